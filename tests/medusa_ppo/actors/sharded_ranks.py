"""One rank's part of test_sharded.py: an actor in one of its forms, tapped and trained, compared
with the same actor whole and alone.
"""

from __future__ import annotations

import copy
import importlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

from heads.errors import MedusaError
from medusa_ppo.actors import actor_tables
from medusa_ppo.actors.hf import HFActor, HiddenTap, lm_head_weight

VOCAB, WIDTH, RATE = 50, 32, 0.5
RANKS = 2
PIECE = 5 * VOCAB * 4
"""Bytes of five columns: the last piece has fewer."""


def tiny(tied: bool = False) -> LlamaForCausalLM:
    torch.manual_seed(3)
    sizes = {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=40, tie_word_embeddings=tied, **sizes
    )
    config._attn_implementation = "sdpa"
    return LlamaForCausalLM(config)


def fsdp1(model: nn.Module, use_orig_params: bool) -> nn.Module:
    for i, layer in enumerate(model.model.layers):
        model.model.layers[i] = FSDP(
            layer, device_id=torch.device("cpu"), use_orig_params=use_orig_params
        )
    return FSDP(model, device_id=torch.device("cpu"), use_orig_params=use_orig_params)


def fsdp2(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (RANKS,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def lora(model: nn.Module, **settings: Any) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(5)
    adapted = get_peft_model(
        model, LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, **settings)
    )
    return adapted


def checkpointed(model: nn.Module) -> nn.Module:
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def zero3(model: nn.Module) -> nn.Module:
    import deepspeed

    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
    }
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), RATE), config=settings
    )
    return engine


FORMS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "ddp": DistributedDataParallel,
    "fsdp1": lambda model: fsdp1(model, True),
    "fsdp1-flat": lambda model: fsdp1(model, False),
    "fsdp2": fsdp2,
    "fsdp2-pieces": fsdp2,
    "fsdp2-checkpointed": lambda model: fsdp2(checkpointed(model)),
    "ddp-checkpointed": lambda model: DistributedDataParallel(checkpointed(model)),
    "ddp-compiled": lambda model: torch.compile(
        DistributedDataParallel(model), backend="aot_eager"
    ),
    "zero3": zero3,
    "ddp-lora": lambda model: DistributedDataParallel(
        lora(model, target_modules=["q_proj", "v_proj"])
    ),
    "fsdp2-lora": lambda model: lora_then_fsdp2(model, target_modules=["q_proj", "v_proj"]),
    "fsdp2-lora-tables": lambda model: lora_then_fsdp2(
        model, target_modules=["q_proj", "lm_head", "embed_tokens"]
    ),
    "ddp-lora-saved": lambda model: DistributedDataParallel(
        lora(model, target_modules=["q_proj"], modules_to_save=["lm_head"])
    ),
}


def lora_then_fsdp2(model: nn.Module, **settings: Any) -> nn.Module:
    adapted = lora(model, **settings)
    mesh = init_device_mesh("cpu", (RANKS,))
    for layer in adapted.get_base_model().model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(adapted, mesh=mesh)
    return adapted


def alone(form: str) -> nn.Module:
    """The same actor, whole, on this rank alone."""
    if "lora" not in form:
        return tiny()
    settings: dict[str, Any] = {"target_modules": ["q_proj", "v_proj"]}
    if form.endswith("tables"):
        settings = {"target_modules": ["q_proj", "lm_head", "embed_tokens"]}
    if form.endswith("saved"):
        settings = {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}
    return lora(tiny(), **settings)


def rows(rank: int, form: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    ids_BT = torch.randint(0, VOCAB, (2, 9), generator=generator)
    return {"input_ids": ids_BT, "attention_mask": torch.ones_like(ids_BT), "use_cache": False}


def step(
    model: nn.Module, batch: dict[str, Any], optimizer: torch.optim.Optimizer | None
) -> torch.Tensor:
    loss = model(**batch).logits.float().log_softmax(-1)[..., 3].mean()
    if hasattr(model, "backward"):  # DeepSpeed's engine
        model.backward(loss)
        model.step()
    else:
        loss.backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
    return loss.detach()


def merged(model: nn.Module, name: str) -> torch.Tensor:
    """What the whole, lonely actor multiplies with, by PEFT's own merge."""
    inner = copy.deepcopy(model)
    if hasattr(inner, "merge_and_unload"):
        inner = inner.merge_and_unload()
    module = inner.get_output_embeddings() if name == "lm_head" else inner.get_input_embeddings()
    return module.weight.detach().clone()


def train(form: str, rank: int, tapped: bool) -> dict[str, Any]:
    """Two steps. What came out of the tap, the tables before and after, and a print of the weights'
    bits on this rank.
    """
    model = FORMS[form](tiny())
    optimizer = (
        torch.optim.SGD([p for p in model.parameters() if p.requires_grad], RATE)
        if form != "zero3"
        else None
    )
    seen: dict[str, Any] = {"hidden": [], "tables": [], "changed": []}
    actor = HFActor(model, reports=rank == 0) if tapped else None
    for number in range(2):
        if actor is not None:
            seen["changed"].append(actor.refresh())
            if rank == 0:
                seen["tables"].append(
                    (actor.lm_head_VD.detach().clone(), actor.embedding_VD.detach().clone())
                )
        if actor is None:
            step(model, rows(rank + 10 * number, form), optimizer)
        else:
            with HiddenTap(model) as tap:
                step(model, rows(rank + 10 * number, form), optimizer)
            seen["hidden"].append(tap.hidden_BTD.clone())
    if actor is not None:
        seen["again"] = (actor.refresh(), actor.refresh())
        seen["bytes"] = actor.gathered_bytes
    seen["weights"] = {name: _local(p).detach().clone() for name, p in model.named_parameters()}
    return seen


def _local(parameter: torch.Tensor) -> torch.Tensor:
    shard = getattr(parameter, "ds_tensor", parameter)
    return shard.to_local() if hasattr(shard, "to_local") else shard


def reference(form: str) -> dict[str, Any]:
    """The whole actor alone, trained on both ranks' rows with the mean of their gradients."""
    model = alone(form)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], RATE)
    out: dict[str, Any] = {"hidden": [], "tables": []}
    for number in range(2):
        out["tables"].append((merged(model, "lm_head"), merged(model, "embedding")))
        hidden = []
        for rank in range(RANKS):
            with HiddenTap(model) as tap:
                logits = model(**rows(rank + 10 * number, form)).logits
            (logits.float().log_softmax(-1)[..., 3].mean() / RANKS).backward()
            hidden.append(tap.hidden_BTD.clone())
        optimizer.step()
        optimizer.zero_grad()
        out["hidden"].append(hidden)
    return out


def check(form: str, rank: int) -> dict[str, Any]:
    gathered: list[int] = []
    whole = actor_tables._full

    def noted(weight: torch.Tensor) -> torch.Tensor:
        gathered.append(weight.nbytes)
        return whole(weight)

    most = PIECE if form == "fsdp2-pieces" else actor_tables.PIECE_BYTES
    with mock.patch.multiple(actor_tables, PIECE_BYTES=most, _full=noted):
        tapped = train(form, rank, True)
    plain = train(form, rank, False)
    expected = reference(form)
    same = tapped["weights"].keys() == plain["weights"].keys() and all(
        torch.equal(tapped["weights"][name], plain["weights"][name]) for name in plain["weights"]
    )
    off_hidden = max(
        float((mine - whole[rank]).abs().max())
        for mine, whole in zip(tapped["hidden"], expected["hidden"], strict=True)
    )
    off_tables = 0.0
    for mine, whole in zip(tapped["tables"], expected["tables"], strict=rank == 0):
        off_tables = max(
            off_tables, *(float((a - b).abs().max()) for a, b in zip(mine, whole, strict=True))
        )
    moved = float((expected["tables"][1][0] - expected["tables"][0][0]).abs().max())
    return {
        "bit_equal": same,
        "hidden": off_hidden,
        "tables": off_tables,
        "moved": moved,
        "changed": tapped["changed"],
        "again": tapped["again"],
        "bytes": tapped["bytes"],
        "largest": max(gathered, default=0),
    }


def unrefreshed() -> str:
    """What a rank is told that asks for a table of a cut actor without the others."""
    try:
        lm_head_weight(fsdp2(tiny()))
    except MedusaError as error:
        return str(error)
    return ""


def run_rank(rank: int, port: int, out: Path, forms: Sequence[str]) -> None:
    """This rank's part; what it found goes to `out`."""
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "WORLD_SIZE": str(RANKS),
    }
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_SIZE": str(RANKS), "DS_ACCELERATOR": "cpu"}
    torch.set_num_threads(1)
    if "zero3" in forms:
        import deepspeed

        deepspeed_comm: Any = importlib.import_module("deepspeed.comm.torch")
        deepspeed_comm.build_shm_op = lambda: (
            None
        )  # Faster sums through shared memory; to compile it takes minutes.
        deepspeed.init_distributed("gloo")
    else:
        dist.init_process_group("gloo")
    found = {form: check(form, rank) for form in forms}
    if "fsdp2" in forms:
        found["unrefreshed"] = {"error": unrefreshed()}
    (out / f"rank{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    run_rank(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
