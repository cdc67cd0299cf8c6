"""One rank of test_megatron.py: taps Megatron models of every parallelism and compares with
transformers on the same weights.

Run as  python megatron_ranks.py RANK RANKS STORE OUT
"""

from __future__ import annotations

import json
import sys
import traceback
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import cpu_megatron as cpu
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_batch_on_this_cp_rank

from medusa_ppo.actors.hf import HiddenTap
from medusa_ppo.actors.megatron import MegatronActor
from medusa_ppo.companion.collector import BatchCollector
from medusa_ppo.companion.positions import EarlySample
from medusa_ppo.companion.wire import TableRows
from medusa_ppo.contract.rollout_batch import RolloutBatch
from medusa_ppo.contract.rollouts import Counters, Response, Rollouts, Sampling
from medusa_ppo.plugin.medusa_plugin import MedusaPlugin

PROMPTS, RESPONSES, T = (3, 5, 4, 2), (6, 9, 12, 1), 16


class Batch:
    """Four sequences of unequal lengths, right-padded, and what transformers says about them."""

    def __init__(self, source: Any, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.lengths = [p + r for p, r in zip(PROMPTS, RESPONSES, strict=True)]
        self.ids_BT = torch.zeros(4, T, dtype=torch.int64)
        self.mask_BT = torch.zeros(4, T, dtype=torch.bool)
        for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
            self.ids_BT[row, : prompt + response] = torch.randint(
                1, cpu.V, (prompt + response,), generator=generator
            )
            self.mask_BT[row, prompt : prompt + response] = True
        responses = [
            Response(row, tuple(self.ids_BT[row][self.mask_BT[row]].tolist()), (-1.0,) * n, "stop")
            for row, n in enumerate(RESPONSES)
        ]
        self.rollouts = Rollouts(((1,),) * 4, tuple(responses), Counters(), 1.0, Sampling())
        with torch.no_grad(), HiddenTap(source) as tap:
            source(self.ids_BT)
        rows = [
            tap.hidden_BTD[row, p - 1 : p - 1 + r]
            for row, (p, r) in enumerate(zip(PROMPTS, RESPONSES, strict=True))
        ]
        self.expected_MD = torch.cat(rows)

    def inputs(self) -> dict[str, torch.Tensor]:
        positions_BT = torch.arange(T).expand(4, T).contiguous()
        return get_batch_on_this_cp_rank({"input_ids": self.ids_BT, "position_ids": positions_BT})

    def packed(self) -> dict[str, Any]:
        """The same sequences in one row, each padded to a multiple of 4, as one context-parallel
        rank gets them.
        """
        rank = parallel_state.get_context_parallel_rank()
        ranks = parallel_state.get_context_parallel_world_size()
        ends = [0]
        edges = [0]
        ids = []
        for row, length in enumerate(self.lengths):
            ends.append(ends[-1] + length)
            edges.append(edges[-1] + -(-length // 4) * 4)
            ids.append(self.ids_BT[row, : edges[-1] - edges[-2]])
        mine = cpu.pieces_of(edges, rank, ranks)
        real = torch.tensor(ends, dtype=torch.int32)
        padded = torch.tensor(edges, dtype=torch.int32)
        parameters = PackedSeqParams(
            "thd", real, real, padded, padded, max_seqlen_q=T, max_seqlen_kv=T
        )
        return {
            "input_ids": torch.cat(ids)[None, mine],
            "position_ids": mine[None],
            "packed_seq_params": parameters,
        }


def causal_mask() -> torch.Tensor:
    return torch.triu(torch.ones(1, 1, T, T, dtype=torch.bool), diagonal=1)


class KeepingCompanion:
    """Stands for the companion's client: keeps what it is given. The real one is a process of its
    own, tested elsewhere.
    """

    def __init__(self) -> None:
        self.batches: list[RolloutBatch] = []

    def give_way(self, wanted: bool) -> None:
        pass

    def collector(self, rollouts: Rollouts, sample: EarlySample | None = None) -> BatchCollector:
        return BatchCollector(rollouts)

    def count_left_out(self, tokens: int) -> None:
        pass

    def submit(self, batch: RolloutBatch, rows: TableRows | None = None) -> None:
        assert rows is None, "the actor is in this process"
        self.batches.append(batch)


def score(
    actor: MegatronActor, batch: Batch, forward: Any, mask_BT: torch.Tensor | None = None
) -> dict[str, Any]:
    """The loop's log-prob pass through the plugin's own seam: the batch that the companion gets
    against transformers' states.
    """
    if not actor.reports:
        with actor.tap():
            forward()
        return {"reports": False}
    companion = KeepingCompanion()
    plugin = MedusaPlugin(SimpleNamespace(), companion, choices=False)  # type: ignore[arg-type]
    plugin.rollout_ready(batch.rollouts)
    with plugin.actor_forward(actor, batch.mask_BT if mask_BT is None else mask_BT, range(4)):
        forward()
    (taken,) = companion.batches
    return {
        "reports": True,
        "hidden": float((taken.hidden_MD - batch.expected_MD).abs().max()),
        "rows": taken.hidden_MD.shape[0],
    }


def tables(actor: MegatronActor, source: Any) -> dict[str, Any]:
    actor.refresh()
    if not actor.reports:
        return {}
    return {
        "lm_head": float((actor.lm_head_VD - source.lm_head.weight).abs().max()),
        "embedding": float((actor.embedding_VD - source.model.embed_tokens.weight).abs().max()),
    }


def dense(source: Any, batch: Batch, **sizes: Any) -> dict[str, Any]:
    model = cpu.gpt(**sizes)
    cpu.load_llama(model, source)
    actor = MegatronActor(model, cpu.V, with_embedding=True)
    mask = None if sizes.get("own_attention") else causal_mask()
    with torch.no_grad():
        return score(actor, batch, lambda: model(**batch.inputs(), attention_mask=mask)) | tables(
            actor, source
        )


def packed(source: Any, batch: Batch, **sizes: Any) -> dict[str, Any]:
    model = cpu.gpt(own_attention=True, **sizes)
    cpu.load_llama(model, source)
    actor = MegatronActor(model, cpu.V)
    mask_BT = batch.mask_BT[:, : max(batch.lengths)]
    with torch.no_grad():
        return score(actor, batch, lambda: model(**batch.packed(), attention_mask=None), mask_BT)


def pipeline(source: Any, batch: Batch, tied: bool = False) -> dict[str, Any]:
    """Megatron's own schedule with two micro-batches inside one tap."""
    with cpu.CudaOnCpu():
        return _pipeline(source, batch, tied)


def _pipeline(source: Any, batch: Batch, tied: bool) -> dict[str, Any]:
    model = cpu.gpt(pp=2, tied=tied)
    cpu.load_llama(model, source)
    actor = MegatronActor(model, cpu.V, with_embedding=True)

    def forward_step(parts: Any, stage: Any) -> Any:
        rows = next(parts)
        out = stage(
            **{name: value[rows] for name, value in batch.inputs().items()},
            attention_mask=causal_mask(),
        )
        return out, lambda logits: (logits.sum(), {})

    def run() -> None:
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter([slice(0, 2), slice(2, 4)]),
            model=[model],
            num_microbatches=2,
            seq_length=T,
            micro_batch_size=2,
            forward_only=True,
        )

    return score(actor, batch, run) | tables(actor, source)


def untouched_gradients(source: Any, batch: Batch) -> dict[str, Any]:
    """Bit-identical gradients and outputs with and without the tap."""
    model = cpu.gpt(tp=2)
    cpu.load_llama(model, source)
    actor = MegatronActor(model, cpu.V)
    found = []
    for tapped in (False, True):
        model.zero_grad(set_to_none=True)
        tap = actor.tap() if tapped else None
        if tap is not None:
            tap.__enter__()
        logits = model(**batch.inputs(), attention_mask=causal_mask())
        if tap is not None:
            tap.__exit__(None, None, None)
        logits.square().mean().backward()
        found.append(
            [logits.detach().clone()]
            + [p.grad.clone() for p in model.parameters() if p.grad is not None]
        )
    same = all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    hooks = (
        len(model._forward_pre_hooks)
        + len(model.output_layer._forward_pre_hooks)
        + len(model._forward_hooks)
    )
    return {"same": same, "count": len(found[0]), "hooks": hooks}


def refusals(source: Any) -> dict[str, Any]:
    model = cpu.gpt(pp=2)
    actor = MegatronActor([SimpleModule(model)], cpu.V)
    said = []
    for attempt in (
        lambda: MegatronActor(torch.nn.Linear(1, 1), cpu.V),
        lambda: actor.lm_head_VD,
        lambda: actor.tap().hidden_BTD,
    ):
        try:
            attempt()
        except Exception as error:
            said.append(type(error).__name__)
    return {"said": said, "unwrapped": actor.model is model}


def saved(source: Any, folder: Path, **sizes: Any) -> dict[str, Any]:
    """A distributed checkpoint, written by Megatron itself."""
    with cpu.CudaOnCpu():
        model = cpu.gpt(**sizes)
        cpu.load_llama(model, source)
        folder.mkdir(exist_ok=True)
        dist.barrier()
        dist_checkpointing.save(model.sharded_state_dict(), str(folder))
    return {}


class SimpleModule(torch.nn.Module):
    """Wraps a model as DistributedDataParallel does."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module


def main(rank: int, ranks: int, store: str, out: str) -> None:
    torch.set_num_threads(1)
    cpu.patch_cuda()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=30),
    )
    source = cpu.llama()
    batch = Batch(source)
    cases = {
        "tp": lambda: dense(source, batch, tp=2),
        "sp": lambda: dense(source, batch, tp=2, sequence_parallel=True),
        "cp": lambda: dense(source, batch, cp=2, own_attention=True),
        "dp": lambda: dense(source, Batch(source, seed=rank)),
        "packed-tp": lambda: packed(source, batch, tp=2),
        "packed-cp": lambda: packed(source, batch, cp=2),
        "packed-sp": lambda: packed(source, batch, tp=2, sequence_parallel=True),
        "pp": lambda: pipeline(source, batch),
        "pp-tied": lambda: pipeline(cpu.llama(tied=True), Batch(cpu.llama(tied=True)), tied=True),
        "gradients": lambda: untouched_gradients(source, batch),
        "refusals": lambda: refusals(source),
        "saved-tp": lambda: saved(source, Path(out).with_name("tp"), tp=2),
        "saved-pp": lambda: saved(source, Path(out).with_name("pp"), pp=2),
        "saved-tied": lambda: saved(
            cpu.llama(tied=True), Path(out).with_name("tied"), tp=2, tied=True
        ),
    }
    figures: dict[str, Any] = {}
    for name, case in cases.items():
        try:
            figures[name] = case()
        except Exception:
            figures[name] = {
                "error": traceback.format_exc()
            }  # The other rank may wait for this one until gloo's timeout.
    everyone: list[Any] = [None] * ranks
    dist.all_gather_object(everyone, figures)
    if rank == 0:
        Path(out).write_text(json.dumps(everyone))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:5])
