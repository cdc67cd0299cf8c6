"""One rank of test_verl_megatron.py: verl's own Megatron engine, under our worker, on models of
several parallelisms.

verl's engine class prepares, schedules and scores the rows as in a training; only what needs CUDA
to be built (model, optimizer, bridge) is put into it by hand: Megatron models of
tests/medusa_ppo/actors/cpu_megatron.py with a transformers Llama's weights.

Run as  python verl_megatron_ranks.py RANK RANKS STORE OUT
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "medusa_ppo" / "actors"))
import cpu_megatron as cpu
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.workers.config import McoreEngineConfig
from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

from medusa_ppo.companion.wire import WantedRows
from medusa_ppo.loops.verl.verl_trainer import MedusaActorRolloutRefWorker

ROWS = [
    ((5, 6, 7), (1, 2)),
    ((7,), (3, 3, 4)),
    ((5, 6, 7), (9,)),
    ((8, 9, 10, 11, 12), (13, 14, 15, 16)),
]


def expected(source: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """States and log-probs of the response tokens, row after row; log-probs over the padded
    vocabulary, as verl's are.
    """
    states = []
    logprobs = []
    table_VD = torch.nn.functional.pad(
        source.lm_head.weight, (0, 0, 0, cpu.PADDED_V - cpu.V), value=7.0
    )  # As load_llama pads it.
    with torch.no_grad():
        for prompt, answer in ROWS:
            hidden = source.model(input_ids=torch.tensor([[*prompt, *answer]])).last_hidden_state[
                0, len(prompt) - 1 : -1
            ]
            states.append(hidden)
            logprobs.append((hidden @ table_VD.T).log_softmax(-1)[range(len(answer)), list(answer)])
    return torch.cat(states), torch.cat(logprobs)


def nested(rows: list[Any], dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.nested.as_nested_tensor(
        [torch.tensor(row, dtype=dtype) for row in rows], layout=torch.jagged
    )


def batch(rows: list[Any], **settings: Any) -> TensorDict:
    """A log-prob batch as verl's trainer sends it."""
    fields = {
        "input_ids": nested([[*prompt, *answer] for prompt, answer in rows]),
        "response_mask": nested([[1] * len(answer) for _, answer in rows]),
        "loss_mask": nested([[1] * len(answer) for _, answer in rows]),
        "temperature": torch.ones(len(rows)),
    }
    data = TensorDict(fields, batch_size=[len(rows)])
    tu.assign_non_tensor(data, use_fused_kernels=False, calculate_entropy=False, **settings)
    return data


def engine_of(model: Any, packed: bool) -> MegatronEngineWithLMHead:
    """verl's engine around a model that is there already."""
    engine = MegatronEngineWithLMHead.__new__(MegatronEngineWithLMHead)
    engine.module = [model]
    engine.tf_config = model.config
    engine.enable_routing_replay = False
    engine._is_offload_param = False
    engine.engine_config = McoreEngineConfig(
        context_parallel_size=parallel_state.get_context_parallel_world_size(),
        use_remove_padding=packed,
        use_fused_kernels=False,
    )
    hf_config = SimpleNamespace(architectures=["LlamaForCausalLM"], vocab_size=cpu.V)
    engine.model_config = SimpleNamespace(
        hf_config=hf_config,
        mtp=SimpleNamespace(enable=False, enable_train=False),
        tokenizer=SimpleNamespace(pad_token_id=0),
    )
    return engine


class RankActor:
    """In the place of verl's TrainingWorker, whose start needs CUDA: its engine, and its answer on
    the rank that has one.
    """

    def __init__(self, engine: MegatronEngineWithLMHead) -> None:
        self.engine = engine

    def infer_batch(self, data: TensorDict) -> TensorDict | None:
        output = self.engine.infer_batch(data)
        if not self.engine.is_mp_src_rank_with_outputs():
            return None
        return tu.get_tensordict(tensor_dict=output["model_output"], non_tensor_dict={})


def worker_of(engine: MegatronEngineWithLMHead) -> MedusaActorRolloutRefWorker:
    worker = object.__new__(MedusaActorRolloutRefWorker)
    worker.actor = RankActor(engine)
    worker.enable_routing_replay = False
    rollout = SimpleNamespace(temperature=1.0, top_p=1.0, top_k=-1)
    worker.config = SimpleNamespace(
        actor=SimpleNamespace(strategy="megatron"),
        rollout=rollout,
        medusa_bytes=2**20,
        medusa_ahead=2,
    )
    return worker


def score(
    source: Any,
    *,
    packed: bool = True,
    rows: list[Any] | None = None,
    settings: dict[str, Any],
    **sizes: Any,
) -> dict[str, Any]:
    """verl's log-prob pass under our worker, and what the worker hands over afterwards."""
    with cpu.CudaOnCpu():
        model = cpu.gpt(own_attention=True, **sizes)
        model.config.variable_seq_lengths = True
        cpu.load_llama(model, source)
        engine = engine_of(model.eval(), packed)
        worker = worker_of(engine)
        worker.medusa_expect(1 << 20)
        output = worker.compute_log_prob(batch(rows or ROWS, **settings))
        wanted = WantedRows(torch.tensor([0, 3]), embedding=True)
        taken = worker.medusa_take(3, wanted)
        tables = worker.medusa_tables()
    found: dict[str, Any] = {
        "replica": engine.get_data_parallel_rank(),
        "reports": taken is not None,
        "tables": tables is not None,
        "outputs": output is not None,
        "clean": "forward_step" not in vars(engine),
    }
    if taken is not None and tables is not None:
        states_MD, logprobs_M = expected(source)
        tapped, sent = taken.batch, taken.rows
        assert sent is not None and sent.lm_head_ids_R is not None
        lm_head_RD = source.lm_head.weight[sent.lm_head_ids_R]
        found |= {
            "hidden": float((tapped.hidden_MD - states_MD).abs().max()),
            "logprobs": float((tapped.logprobs_M - logprobs_M).abs().max()),
            "lengths": tapped.lengths_S.tolist(),
            "prompts": tapped.prompts_S.tolist(),
            "sent": float((sent.lm_head_RD - lm_head_RD).abs().max()),
            "sent of": len(lm_head_RD) / cpu.V,
            "lm_head": float((tables[0] - source.lm_head.weight).abs().max()),
            "embedding": float((tables[1] - source.model.embed_tokens.weight).abs().max()),
        }
    return found


def unchanged(source: Any) -> dict[str, Any]:
    """verl's log-probs to the bit with and without our worker around them."""
    settings = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 2}
    with cpu.CudaOnCpu():
        model = cpu.gpt(own_attention=True, tp=2)
        cpu.load_llama(model, source)
        engine = engine_of(model.eval(), True)
        plain = RankActor(engine).infer_batch(batch(ROWS, **settings))
        worker = worker_of(engine)
        worker.medusa_expect(1 << 20)
        tapped = worker.compute_log_prob(batch(ROWS, **settings))
    if plain is None or tapped is None:
        return {"same": plain is tapped}
    return {"same": torch.equal(plain["log_probs"].values(), tapped["log_probs"].values())}


def main(rank: int, ranks: int, store: str, out: str) -> None:
    torch.set_num_threads(1)
    cpu.patch_cuda()
    torch.cuda.empty_cache = lambda: None  # type: ignore[assignment]
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=20),
    )
    source = cpu.llama()
    two = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 2}
    dynamic = {"use_dynamic_bsz": True, "max_token_len_per_gpu": 10}
    elsewhere = [((1,), (2,)), ((3,), (4,)), ((5,), (6,)), ((7,), (8,))]
    cases = {
        "tensor": lambda: score(source, settings=two, tp=2),
        "tensor, rows of equal length": lambda: score(source, settings=two, packed=False, tp=2),
        "micro-batches in another order": lambda: score(source, settings=dynamic, tp=2),
        "sequence": lambda: score(source, settings=two, tp=2, sequence_parallel=True),
        "context": lambda: score(source, settings=two, cp=2),
        "pipeline": lambda: score(source, settings=two, pp=2),
        "data": lambda: score(source, settings=two, rows=elsewhere if rank else None),
        "unchanged": lambda: unchanged(source),
    }
    # What goes wrong on one rank would leave the other waiting: the first failure ends all
    # (run_ranks).
    figures = {name: case() for name, case in cases.items()}
    everyone: list[Any] = [None] * ranks
    dist.all_gather_object(everyone, figures)
    if rank == 0:
        Path(out).write_text(json.dumps(everyone))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:5])
