"""What do roles that take turns on one device (ppo.placement=shared) save, and what does moving
them cost?

    python benchmarks/taking_turns.py [--hidden 512] [--layers 8] [--vocab 8192] [--steps 3]
    [--prompts 8] [--responses 4] [--new 64]

    python benchmarks/taking_turns.py --beside 6 [--hidden ...]     # roles that work at once instead: their seconds, in pairs, on two cores

Actor, reference, critic and a reward model, random Llamas of the same sizes, go through the
product's `Learner` in both placements: score, reward, update, as in a step of the loop, on the same
random rollouts. In the engine's place its bytes are booked: weights, keys and values in float32, as
`medusa-ppo plan` counts them; vLLM's CPU build never sleeps, so its own seconds of sleep and wake
are not measured here.

Printed: the ledger's peaks and their ratio, the same with what a micro-batch keeps for its backward
pass (the plan's figure), seconds of off-load and fetch in a step and the bandwidth, whether all
weights and moments are the same to the bit, and what the same bytes would take over an H100's PCIe
5 x16 (64 GB/s nominal, 50 GB/s assumed), on paper.

With `--beside N`, N rounds in turn: scoring and update of one batch with `ppo.side_by_side` and a
thread for each of the two / without it and two threads; then rewards of 96 responses in two
processes (`ppo.reward_processes=2`) / in the loop's own thread, of a function that computes for 10
ms and of one that returns at once.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from heads.checkpoint import checksum
from medusa_ppo.cli.plan import kept_bytes, turn_moves
from medusa_ppo.config.run_config import RunConfig, build_config
from medusa_ppo.contract import metrics as names
from medusa_ppo.contract.rollouts import Counters, Response, Rollouts, Sampling
from medusa_ppo.engines.launch import cache_bytes
from medusa_ppo.ppo.batch import PPOBatch
from medusa_ppo.ppo.learner import Learner
from medusa_ppo.ppo.models import Critic
from medusa_ppo.ppo.placement import ACTOR, REWARD
from medusa_ppo.ppo.rewards import make_reward
from medusa_ppo.runtime.hardware import ModelSizes, settled

PCIE_BYTES_S = 50e9
GIB = 2**30
ON_PAPER = {
    "Qwen2.5-1.5B": (1536, 28, 12, 2, 128, 8960, 151936),
    "Qwen2.5-3B": (2048, 36, 16, 2, 128, 11008, 151936),
}
PROMPT_TOKENS = 32


class SleepingEngine:
    """Books an engine's turns."""

    def sleep(self, level: int) -> None:
        """Nothing is there."""

    def wake(self) -> None:
        """Nothing is there."""


def settings(options: argparse.Namespace, placement: str) -> RunConfig:
    values: dict[str, Any] = {
        "model": {"dtype": "float32"},
        "data": {"max_prompt_tokens": PROMPT_TOKENS},
        "sampling": {"max_new_tokens": options.new, "responses_per_prompt": options.responses},
        "engine": {"sleep_level": 1 if placement == "shared" else None, "dtype": "float32"},
        "ppo": {
            "placement": placement,
            "prompts_per_step": options.prompts,
            "minibatch_size": 8,
            "epochs": 1,
        },
    }
    return settled(build_config(values))


def random_rollouts(options: argparse.Namespace, step: int) -> Rollouts:
    generator = torch.Generator().manual_seed(step)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(1, options.vocab, (count,), generator=generator).tolist())

    prompts = tuple(ids(PROMPT_TOKENS) for _ in range(options.prompts))
    responses = [
        Response(p, ids(options.new), (-9.0,) * options.new, "length")
        for p in range(options.prompts)
        for _ in range(options.responses)
    ]
    return Rollouts(prompts, tuple(responses), Counters(), 1.0, Sampling())


def llama_of(options: argparse.Namespace) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=options.hidden,
        intermediate_size=3 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=options.hidden // 64,
        vocab_size=options.vocab,
        tie_word_embeddings=False,
        num_labels=1,
        pad_token_id=0,
    )


def run(
    options: argparse.Namespace, placement: str
) -> tuple[list[dict[str, Any]], str, RunConfig, ModelSizes]:
    """The figures of each step, a checksum of what was learned, and what was run."""
    config = settings(options, placement)
    torch.manual_seed(0)
    llama = llama_of(options)
    actor = LlamaForCausalLM(llama).float().eval()
    judge = LlamaForSequenceClassification(llama).float().eval()
    learner = Learner(actor, Critic(actor), config.ppo)
    sizes = ModelSizes.from_config(llama.to_dict())
    engine = SleepingEngine()
    turns = learner.turns
    turns.add(REWARD, judge)
    turns.engine_started(4 * sizes.parameters + cache_bytes(llama.to_dict(), config.engine))
    steps = []
    for step in range(options.steps):
        turns.clear()
        turns.sleep(engine, config.engine.sleep_level)
        batch = PPOBatch(random_rollouts(options, step))
        learner.begin_batch(Sampling())
        measured = learner.measure(batch, Sampling())
        with turns.on(REWARD), torch.no_grad():
            rewards_S = torch.cat(
                [
                    judge(input_ids=micro.input_ids_BT).logits[:, 0]
                    for micro in batch.micro_batches(list(range(len(batch))), 8)
                ]
            )
        scores, _ = learner.conclude(batch, measured, rewards_S)
        learner.update(batch, scores, Sampling(), step)
        with turns.aside(ACTOR):
            turns.wake(engine, config.engine.sleep_level)
        steps.append(turns.take())
    with turns.on("critic", training=True):
        sums = (
            [checksum({name: p.detach() for name, p in learner.critic.named_parameters()})]
            if learner.critic
            else []
        )
    with turns.on(ACTOR, training=True):
        moments = {
            f"{n}/{key}": value
            for n, p in actor.named_parameters()
            for key, value in learner.actor_optimizer.state[p].items()
        }
        sums += [checksum(actor.state_dict()), checksum(moments)]
    return steps, " ".join(sums), config, sizes


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def on_paper(name: str, sizes: tuple[int, ...]) -> None:
    model = ModelSizes(*sizes, tied=True)
    config = build_config(
        {
            "ppo": {"placement": "shared", "reference_dtype": "bfloat16"},
            "engine": {"sleep_level": 1},
        }
    )
    moved = sum(move.total for move in turn_moves(config, model))
    slept = 2 * 2 * model.parameters
    say(
        f"on paper, {name} ({model.parameters / 1e9:.1f} G parameters, weights and moments float32,"
        f" reference bfloat16), one H100: {moved / 1e9:.0f} GB a step, {moved / PCIE_BYTES_S:.1f}"
        f" s; the engine's sleep and wake (level 1) {slept / 1e9:.0f} GB,"
        f" {slept / PCIE_BYTES_S:.2f} s; actor with gradients and moments"
        f" {16 * model.parameters / 1e9:.0f} GB at once"
    )


def busy(prompt: str, response: str, row: dict[str, Any]) -> float:
    """A reward that takes 10 ms of a core."""
    until = time.thread_time() + 0.01
    while time.thread_time() < until:
        pass
    return float(len(response))


def quick(prompt: str, response: str, row: dict[str, Any]) -> float:
    """A reward that takes nothing: what is left is what a process costs."""
    return float(len(response))


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def learned(options: argparse.Namespace, learner: Learner, threads: int, step: int) -> None:
    """Scoring and update of a batch."""
    torch.set_num_threads(threads)
    batch = PPOBatch(random_rollouts(options, step))
    scores, _ = learner.score(batch, torch.arange(len(batch)) / 8, Sampling())
    learner.update(batch, scores, Sampling(), step)


def beside(options: argparse.Namespace) -> None:
    config = settings(options, "separate")
    learners = {}
    for side_by_side in (True, False):
        torch.manual_seed(0)
        actor = LlamaForCausalLM(llama_of(options)).float().eval()
        learners[side_by_side] = Learner(
            actor, Critic(actor), config.ppo.model_copy(update={"side_by_side": side_by_side})
        )
    works: dict[str, Callable[[bool, int], object]] = {
        "scoring and update, side by side, a thread each / two threads": lambda side, step: learned(
            options, learners[side], 2 - side, step
        )
    }
    texts = [str(i) for i in range(96)]
    blank = [dict[str, Any]()] * 96
    with ExitStack() as stack:
        for name in ("busy", "quick"):
            sources = {}
            for processes in (2, None):
                section = config.ppo.model_copy(
                    update={"reward": f"taking_turns:{name}", "reward_processes": processes}
                )
                sources[processes is not None] = source = make_reward(section)
                stack.callback(source.close)
            works[f"rewards, two processes / own thread, {name}"] = lambda side, _, both=sources: (
                both[side].score(texts, texts, blank)
            )
        for label, work in works.items():
            found: dict[bool, list[float]] = {True: [], False: []}
            for step in range(options.beside + 1):
                for side in (True, False) if step % 2 else (False, True):
                    seconds = timed(lambda work=work, side=side, step=step: work(side, step))
                    found[side] += [seconds] * (step > 0)  # The first of each warms up.
            ratios = [ours / theirs for ours, theirs in zip(found[True], found[False], strict=True)]
            seconds_of = " / ".join(
                f"{statistics.median(found[side]):.4f} s" for side in (True, False)
            )
            say(
                f"{label}: median {statistics.median(ratios):.3f} of {len(ratios)}"
                f" ({min(ratios):.3f} to {max(ratios):.3f}); {seconds_of}"
            )
    weights = {side: checksum(learner.actor.state_dict()) for side, learner in learners.items()}
    say(
        f"actors the same to the bit: {weights[True] == weights[False]} (other numbers of threads"
        " may add up in another order)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value in {
        "hidden": 512,
        "layers": 8,
        "vocab": 8192,
        "steps": 3,
        "prompts": 8,
        "responses": 4,
        "new": 64,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--beside", type=int, default=0, help="rounds")
    options = parser.parse_args()
    if options.beside:
        return beside(options)
    found = {placement: run(options, placement) for placement in ("separate", "shared")}
    peaks = {}
    for placement, (steps, _, config, sizes) in found.items():
        last = steps[-1]
        kept = kept_bytes(config, sizes) / GIB
        peaks[placement] = last[names.LEDGER_PEAK], last[names.LEDGER_PEAK] + kept
        roles = ", ".join(f"{role} {gib:.3f}" for role, gib in last[names.LEDGER_ROLES].items())
        say(
            f"{placement}: {sizes.parameters / 1e6:.0f} M parameters each; ledger's peak"
            f" {last[names.LEDGER_PEAK]:.3f} GiB ({roles})"
        )
        say(f"  with what a micro-batch keeps: {peaks[placement][1]:.3f} GiB")
    ratios = [
        ours / theirs for ours, theirs in zip(peaks["shared"], peaks["separate"], strict=True)
    ]
    say(f"shared / separate: {ratios[0]:.3f}, with what a micro-batch keeps {ratios[1]:.3f}")
    moves = [(step[names.OFFLOAD_S], step[names.OFFLOAD_BYTES]) for step in found["shared"][0][1:]]
    seconds = statistics.median(s for s, _ in moves)
    count = statistics.median(n for _, n in moves)
    say(
        f"off-load and fetch in a step: {seconds:.2f} s for {count / GIB:.2f} GiB"
        f" ({count / seconds / 1e9:.1f} GB/s)"
    )
    say(f"weights and moments the same to the bit: {found['shared'][1] == found['separate'][1]}")
    for name, sizes in ON_PAPER.items():
        on_paper(name, sizes)


if __name__ == "__main__":
    main()
