"""Bytes and losses of PPO with all roles on two ranks of a Megatron actor: side by side, with the
reward model in the critic's memory, and in turn. Ranks run on the CPU.

    python benchmarks/roles_on_ranks.py [--hidden 512] [--layers 8] [--vocab 4096] [--steps 3]
        [--dtype float32]

Actor, critic, reference and reward model have the same sizes. For the rank with the most:

- plan: a rank's memory according to `medusa-ppo plan`;
- ledger: weights, gradients and moments, the most at once;
- process: the process's peak resident memory above that before the roles were built, without
  copies in host memory (they replace a GPU's host memory); so it includes the activations of
  passes;
- over half of all: the process's bytes relative to half of the roles' memory in one process;
- host: copies that wait;
- moved, seconds: bytes to host memory and back in a step, and the step's seconds.

Weights after the last step are compared by their bits, losses and values by their differences.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import torch

ROOT = Path(__file__).resolve().parent.parent
SHIM = ROOT / "tests" / "medusa_ppo" / "actors"
RANK = "ROLES_ON_RANKS"
"""Environment variable of ranks, which import this file before they build anything."""
EVERY_S = 0.002
PLACEMENTS = ("separate", "swapped", "in_turn")
GIB = 2**30
PROCESS, HOST = "process_gib", "host_gib"
PROMPT, RESPONSE, SEQUENCES = 16, 48, 16


# ---- in a rank


def watch() -> None:
    """Track the process's resident memory in a thread; `Turns.take` reports the peak."""
    from medusa_ppo.ppo import placement

    process = psutil.Process()
    began = process.memory_info().rss
    residents: list[Any] = []
    most = [0, 0]
    settle = placement.Turns.settle
    take = placement.Turns.take

    def settled(self: Any, role: str, resident: Any) -> None:
        residents.append(resident)
        settle(self, role, resident)

    def taken(self: Any) -> dict[str, Any]:
        found = take(self) | {PROCESS: most[0] / GIB, HOST: most[1] / GIB}
        most[0] = 0
        return found

    def look() -> None:
        while True:
            waiting = sum(
                host.nbytes for resident in residents for host in list(resident._host.values())
            )
            most[0] = max(most[0], process.memory_info().rss - began - waiting)
            most[1] = max(most[1], waiting)
            time.sleep(EVERY_S)

    placement.Turns.settle = settled  # type: ignore[method-assign]
    placement.Turns.take = taken  # type: ignore[method-assign]
    threading.Thread(target=look, daemon=True).start()


if os.environ.get(RANK) and __name__ != "__main__":
    sys.path.insert(0, str(SHIM))
    import megatron_on_cpu  # noqa: F401

    watch()


# ---- in the loop


def save_models(folder: Path, options: argparse.Namespace) -> tuple[Path, Path]:
    """An actor, and a reward model of the same sizes with a tokenizer of letters."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        LlamaForSequenceClassification,
        PreTrainedTokenizerFast,
    )

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": options.vocab,
        "hidden_size": options.hidden,
        "intermediate_size": 3 * options.hidden,
        "num_hidden_layers": options.layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
    }
    kind = torch.bfloat16 if options.dtype == "bfloat16" else torch.float32
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(folder / "actor")
    judge = LlamaForSequenceClassification(LlamaConfig(**sizes, num_labels=1))
    judge.to(kind).save_pretrained(folder / "judge")
    letters = Tokenizer(models.WordLevel({"[PAD]": 0, "a": 1, "b": 2, "c": 3}, unk_token="[PAD]"))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=letters, pad_token="[PAD]").save_pretrained(
        folder / "judge"
    )
    return folder / "actor", folder / "judge"


def batch_of(step: int, vocab: int) -> Any:
    from medusa_ppo.contract.rollouts import Counters, Response, Rollouts, Sampling
    from medusa_ppo.ppo.batch import PPOBatch

    drawn = torch.Generator().manual_seed(step)
    ids_ST = torch.randint(1, vocab, (SEQUENCES, PROMPT + RESPONSE), generator=drawn).tolist()
    responses = tuple(
        Response(s, tuple(ids[PROMPT : len(ids) - s]), (-8.0,) * (RESPONSE - s), "stop")
        for s, ids in enumerate(ids_ST)
    )
    prompts = tuple(tuple(ids[:PROMPT]) for ids in ids_ST)
    return PPOBatch(Rollouts(prompts, responses, Counters(), 1.0, Sampling()))


def run(
    actor: Path, judge: Path, placement: str, options: argparse.Namespace
) -> tuple[dict[str, float], list[torch.Tensor]]:
    """One placement: its figures, and the results of its steps."""
    from medusa_ppo.cli.plan import make_plan
    from medusa_ppo.config.run_config import build_config
    from medusa_ppo.contract import metrics as names
    from medusa_ppo.contract.rollouts import Sampling
    from medusa_ppo.ppo.megatron.megatron_learner import MegatronLearner, RankedReward, RankTeam
    from medusa_ppo.ppo.role_memory import RANK as A_RANK
    from medusa_ppo.runtime.hardware import Hardware

    config = build_config(
        {
            "model": {"path": str(actor), "dtype": options.dtype},
            "actor": {
                "backend": "megatron",
                "tensor_parallel": 2,
                "roles": "all",
                "imports": Path(__file__).stem,
            },
            "ppo": {
                "placement": placement,
                "reward": str(judge),
                "minibatch_size": 8,
                "micro_batch_size": 2,
                "threads": 1,
            },
        }
    )
    plan = make_plan(config, Hardware(0, False, 2, "two cores"))
    (planned,) = (memory for memory in plan.roles if memory.where == A_RANK)
    team = RankTeam(str(actor), config, with_embedding=False)
    try:
        learner = MegatronLearner(team, str(actor), None, config)
        reward = RankedReward(config.ppo)
        reward.attach(team)
        computed = []
        drawn = torch.Generator().manual_seed(1)
        most: dict[str, float] = {}
        for step in range(options.steps):
            texts = [
                "abc"[int(n) % 3] * (3 + int(n))
                for n in torch.randint(0, 40, (SEQUENCES,), generator=drawn)
            ]
            began = time.perf_counter()
            rewards_S = reward.score(["ab"] * SEQUENCES, texts, [{}] * SEQUENCES)
            batch = batch_of(step, options.vocab)
            scores, _ = learner.score(batch, rewards_S, Sampling())
            report = learner.update(batch, scores, Sampling(), step)
            seconds = time.perf_counter() - began
            figures = learner.take_memory()
            # The first step creates the moments.
            if step:
                found = {
                    "ledger": figures[names.LEDGER_PEAK] * GIB,
                    "process": figures[PROCESS] * GIB,
                    "host": figures[HOST] * GIB,
                    "moved": float(figures.get(names.OFFLOAD_BYTES, 0)),
                    "seconds": seconds,
                }
                most = {key: max(value, most.get(key, 0.0)) for key, value in found.items()}
            computed += [
                rewards_S,
                scores.values_SR,
                scores.logprobs_SR,
                torch.tensor([report[names.VALUE_LOSS], report[names.POLICY_LOSS]]),
            ]
        weights = dict(learner.actor.tensors(torch.float32))
        computed.append(torch.cat([tensor.flatten() for tensor in weights.values()]))
        whole = sum(role.learning for role in planned.roles) * 2
        return {"plan": float(sum(planned.most.values())), "whole": float(whole), **most}, computed
    finally:
        team.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="Bytes of all roles on two ranks.")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    options = parser.parse_args()
    os.environ[RANK] = "1"
    # Ray's workers get the environment that it was started in. Freed memory leaves the process at
    # once, so that its resident memory is what it uses.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    os.environ["PYTHONPATH"] = os.pathsep.join((str(ROOT), str(ROOT / "benchmarks"), str(SHIM)))

    from medusa_ppo.runtime.processes import local_ray

    rows = {}
    computed = {}
    with tempfile.TemporaryDirectory(prefix="medusa-ppo-bench-") as folder, local_ray():
        actor, judge = save_models(Path(folder), options)
        for placement in PLACEMENTS:
            rows[placement], computed[placement] = run(actor, judge, placement, options)
    mib = 2**20
    say = sys.stdout.write
    say(f"roles in one process: {rows['separate']['whole'] / mib:,.0f} MiB\n")
    say(
        "| placement | plan MiB | ledger MiB | process MiB | process / plan | over half of all |"
        " host MiB | moved MiB | seconds |\n"
    )
    say("|---|---|---|---|---|---|---|---|---|\n")
    for placement, row in rows.items():
        say(
            f"| {placement} | {row['plan'] / mib:,.0f} | {row['ledger'] / mib:,.0f}"
            f" | {row['process'] / mib:,.0f} | {row['process'] / row['plan']:.2f}"
            f" | {row['process'] / (row['whole'] / 2):.2f} | {row['host'] / mib:,.0f}"
            f" | {row['moved'] / mib:,.0f} | {row['seconds']:.1f} |\n"
        )
    for placement in PLACEMENTS[1:]:
        pairs = list(zip(computed[placement], computed["separate"], strict=True))
        apart = max(float((one - other).abs().max()) for one, other in pairs)
        same = torch.equal(*pairs[-1])
        say(
            f"{placement}: rewards, values, log-probs, losses and weights differ by {apart:.1e} at"
            f" most from separate; the same weights to the bit: {same}\n"
        )


if __name__ == "__main__":
    main()
