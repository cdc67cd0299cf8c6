"""`medusa-ppo bench companion`: the wall time of PPO's score and update with and without the companion, in turn on the same rollouts."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from medusa_ppo import metrics as names
from medusa_ppo.actors.hf import load_actor, load_tokenizer
from medusa_ppo.bench.measuring import PairedRates, run_rounds
from medusa_ppo.config import RunConfig, build_config
from medusa_ppo.console import Advance, OfflineProgress
from medusa_ppo.engines.ray_engine import make_engine
from medusa_ppo.plugin import MedusaPlugin
from medusa_ppo.ppo.batch import PPOBatch
from medusa_ppo.ppo.learner import Learner, Tap
from medusa_ppo.ppo.models import Critic
from medusa_ppo.processes import local_ray
from medusa_ppo.standalone.collect import take_prompts
from medusa_ppo.standalone.scene import read_scene
from medusa_ppo.types import Rollouts, Sampling

WITHOUT, WITH = "without", "with the companion"
RESPONSES = 4
DRAIN_S = 600.0


@dataclass(frozen=True)
class CompanionBench:
    """The PPO step that is timed, and how often."""

    model: str
    data: str
    template: str
    kind: str = "hydra"
    rounds: int = 8
    prompts_per_step: int = 16
    max_new_tokens: int = 64
    seed: int = 0


def run_companion(bench: CompanionBench, progress: OfflineProgress) -> dict[str, Any]:
    """Write rollouts once, then time each of them twice: plain, and with all of the plugin's hooks and a training companion.

    PPO and the companion get a core each where there are two. The companion has finished its batch before the plain step begins.

    Raises:
        ModelError, DataError: unusable model, data or template.
    """
    prompts = read_scene(bench.model, bench.data, bench.template, bench.max_new_tokens).prompts
    cores = sorted(os.sched_getaffinity(0))
    config = _config(bench, max(len(p) for p in prompts), cores[1:2])
    actor = load_actor(bench.model)
    pad_id = load_tokenizer(bench.model).pad_token_id or 0
    learner = Learner(actor, Critic(actor), config.ppo, seed=bench.seed)
    with tempfile.TemporaryDirectory(prefix="medusa-ppo-bench-") as name, local_ray(cpus=2, queue_bytes=config.companion.queue_bytes):
        heads = MedusaPlugin.prepare_heads(config, actor, Path(name) / "heads")
        with make_engine(bench.model, heads, config.engine, bench.seed) as engine:
            progress.say("Writing the rollouts ...")
            steps = [engine.generate(part, sampling) for part, sampling in _parts(bench, prompts)]
            timed = _Timed(learner, MedusaPlugin.start(config, actor, engine, name), steps, pad_id)
            try:
                with _pinned(cores[:1]), progress.phase("Pairs of PPO steps", bench.rounds) as advance:
                    rates = timed.take_turns(bench.rounds, advance)
            finally:
                timed.plugin.close()
    costs = [1 / ratio for ratio in rates.ratios(WITH)]
    return {
        "cost": 1 / rates.median_ratio(WITH),
        "cost_low": min(costs),
        "cost_high": max(costs),
        "seconds_without": 1 / rates.median_rate(WITHOUT),
        "seconds_with": 1 / rates.median_rate(WITH),
        "exposed_share": timed.exposed_s / sum(1 / rate for rate in rates.rates[WITH]),
        "companion_s_per_step": timed.trained_s / bench.rounds,
        "ppo_cores": cores[:1],
        "companion_cores": cores[1:2],
    }


class _Timed:
    """The two arms, and what the plugin says about the one with it."""

    def __init__(self, learner: Learner, plugin: MedusaPlugin, steps: Sequence[Rollouts], pad_id: int) -> None:
        self.learner, self.plugin, self.steps, self.pad_id = learner, plugin, steps, pad_id
        self.exposed_s = 0.0
        self.trained_s = 0.0

    def take_turns(self, rounds: int, advance: Advance) -> PairedRates:
        def with_companion(number: int) -> float:
            began = time.perf_counter()
            self.plugin.before_generation()
            self.plugin.rollout_ready(self.steps[number])
            self._ppo(number, self.plugin.actor_forward)
            self.plugin.policy_updated(self.learner.actor, number + 1)
            values = self.plugin.metrics()
            seconds = time.perf_counter() - began
            self.plugin.drain(DRAIN_S)
            if number >= 0:
                self.exposed_s += values[names.PLUGIN_EXPOSED_S]
                self.trained_s += self.plugin.metrics()[names.COMPANION_TRAIN_S] + values[names.COMPANION_TRAIN_S]
            advance(number >= 0, f"{seconds:.2f} s with, {self.exposed_s:.2f} s exposed so far")
            return 1 / seconds

        def without(number: int) -> float:
            began = time.perf_counter()
            self._ppo(number, None)
            return 1 / (time.perf_counter() - began)

        return run_rounds({WITHOUT: without, WITH: with_companion}, WITHOUT, rounds)

    def _ppo(self, number: int, tap: Tap | None) -> None:
        """Score and update as the loop does. What the rewards are does not matter for the time."""
        rollouts = self.steps[number]
        batch = PPOBatch(rollouts, self.learner.device, self.pad_id)
        rewards_S = torch.tensor([float(len(r.token_ids) % 2) for r in rollouts.responses])
        scores, _ = self.learner.score(batch, rewards_S, rollouts.sampling, tap)
        self.learner.update(batch, scores, rollouts.sampling, number)


def _config(bench: CompanionBench, longest_prompt: int, companion_cores: Sequence[int]) -> RunConfig:
    length = longest_prompt + bench.max_new_tokens
    return build_config(
        {
            "seed": bench.seed,
            "engine": {"max_num_seqs": 32, "max_model_len": max(64, length)},
            "data": {"max_prompt_tokens": longest_prompt},
            "sampling": {"max_new_tokens": bench.max_new_tokens},
            "heads": {"kind": bench.kind},
            "companion": {"cores": list(companion_cores)},
            "ppo": {"threads": 1},
        }
    )


def _parts(bench: CompanionBench, prompts: Sequence[Sequence[int]]) -> Iterator[tuple[list[Sequence[int]], Sampling]]:
    """Prompts and sampling of each step; the last one is for the round that is not counted."""
    for step in range(bench.rounds + 1):
        start = step * bench.prompts_per_step
        picked = take_prompts(prompts, start, bench.prompts_per_step)
        yield picked, Sampling(max_new_tokens=bench.max_new_tokens, responses_per_prompt=RESPONSES, seed=bench.seed + step)


@contextmanager
def _pinned(cores: Sequence[int]) -> Iterator[None]:
    """This process on these cores with one thread each, for the time of the block."""
    before, threads = os.sched_getaffinity(0), torch.get_num_threads()
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(len(cores))
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
        torch.set_num_threads(threads)


def table(result: Mapping[str, Any]) -> list[list[str]]:
    """Header and one row."""
    return [
        ["s without", "s with", "ratio", "range", "exposed share", "companion, s a step"],
        [
            f"{result['seconds_without']:.2f}",
            f"{result['seconds_with']:.2f}",
            f"{result['cost']:.3f}",
            f"{result['cost_low']:.3f} to {result['cost_high']:.3f}",
            f"{result['exposed_share']:.1%}",
            f"{result['companion_s_per_step']:.2f}",
        ],
    ]


def verdict(result: Mapping[str, Any]) -> list[str]:
    """The sentences that a reader wants first."""
    return [
        f"A PPO step (score and update) with the companion takes x{result['cost']:.3f} of one without; the loop spends "
        f"{result['exposed_share']:.1%} of it in the plugin."
    ]
