"""`medusa-ppo bench companion` and `swap`: what the companion costs a PPO step, and how fast new
heads draft in a running engine.
"""

from __future__ import annotations

import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from heads.checkpoint import load_heads, load_state, save_state
from medusa_ppo.actors.hf import load_actor, load_tokenizer
from medusa_ppo.bench.bench_options import CompanionBench, SwapBench, Table
from medusa_ppo.bench.pairs import PairedRates, run_rounds, table_of
from medusa_ppo.config.engine_section import EngineConfig
from medusa_ppo.config.run_config import RunConfig, build_config
from medusa_ppo.contract import metrics as names
from medusa_ppo.contract.rollouts import Rollouts, Sampling
from medusa_ppo.engines.launch import with_all_heads
from medusa_ppo.engines.ray_engine import RayEngine, make_engine
from medusa_ppo.offline.collect import take_prompts
from medusa_ppo.offline.scene import read_scene
from medusa_ppo.plugin.medusa_plugin import MedusaPlugin
from medusa_ppo.ppo.batch import PPOBatch
from medusa_ppo.ppo.critic import Critic
from medusa_ppo.ppo.learner import Learner, Tap
from medusa_ppo.runtime.console import Advance, OfflineProgress
from medusa_ppo.runtime.processes import local_ray

WITHOUT, WITH = "without", "with the companion"
RESPONSES = 4
# Longest wait for the companion to finish a batch; one that takes longer hangs.
DRAIN_S = 600.0
# Noise added to a tensor, as a share of its spread: enough to change the drafts for sure.
PROBE_SCALE = 0.5
COMPANION_COLUMNS = {
    "s without": "{seconds_without:.2f}",
    "s with": "{seconds_with:.2f}",
    "ratio": "{cost:.3f}",
    "range": "{cost_low:.3f} to {cost_high:.3f}",
    "exposed share": "{exposed_share:.1%}",
    "companion, s a step": "{companion_s_per_step:.2f}",
}
SWAP_COLUMNS = {
    "parameters": "{parameters:,.0f}",
    "bytes": "{bytes:,.0f}",
    "first swap, s": "{first_s:.3f}",
    "swap, s, median": "{median_s:.3f}",
    "swap, s, longest": "{max_s:.3f}",
    "reading the file, s": "{read_s:.3f}",
}


def run_companion(bench: CompanionBench, progress: OfflineProgress) -> dict[str, Any]:
    """Write rollouts once, then time a PPO step on each of them twice: plain, and with all of the
    plugin's hooks and a training companion.

    PPO and the companion get a core each if there are two. The companion finishes its batch before
    the plain step begins.

    Raises:
        ModelError, DataError: unusable model, data or template.
    """
    prompts = read_scene(bench.model, bench.data, bench.template, bench.max_new_tokens).prompts
    cores = sorted(os.sched_getaffinity(0))
    # One core each: on shared cores the timing would depend on what the companion is doing then.
    config = _config(bench, max(len(p) for p in prompts), cores[1:2])
    actor = load_actor(bench.model)
    pad_id = load_tokenizer(bench.model).pad_token_id or 0
    learner = Learner(actor, Critic(actor), config.ppo, seed=bench.seed)
    with (
        tempfile.TemporaryDirectory(prefix="medusa-ppo-bench-") as name,
        local_ray(cpus=2, queue_bytes=config.companion.queue_bytes),
    ):
        heads = MedusaPlugin.prepare_heads(config, actor, Path(name) / "heads")
        # Rollouts are written once, so that both arms learn from the same ones.
        with make_engine(bench.model, heads, config.engine, bench.seed) as engine:
            progress.say("Writing the rollouts ...")
            steps = [engine.generate(part, sampling) for part, sampling in _parts(bench, prompts)]
            timed = _Timed(learner, MedusaPlugin.start(config, actor, engine, name), steps, pad_id)
            try:
                with (
                    _pinned(cores[:1]),
                    progress.phase("Pairs of PPO steps", bench.rounds) as advance,
                ):
                    rates = timed.take_turns(bench.rounds, advance)
            finally:
                timed.plugin.close()
    # The ratio is steps per second without the companion over steps per second with it, which is
    # seconds with it over seconds without.
    costs = rates.ratios(WITHOUT)
    return {
        "cost": statistics.median(costs),
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
    """The two arms, and what the plugin reports about the one that has it."""

    def __init__(
        self, learner: Learner, plugin: MedusaPlugin, steps: Sequence[Rollouts], pad_id: int
    ) -> None:
        self.learner = learner
        self.plugin = plugin
        self.steps = steps
        self.pad_id = pad_id
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
            # Only now that the clock has stopped: the rest of the companion's training belongs to
            # no step, and must not overlap with the plain step that follows.
            self.plugin.drain(DRAIN_S)
            # Asked for in the warm-up round as well, or the next one would count its training.
            rest = self.plugin.metrics()
            if number >= 0:
                self.exposed_s += values[names.PLUGIN_EXPOSED_S]
                # The companion's training within the step, and the rest after it.
                self.trained_s += values[names.COMPANION_TRAIN_S] + rest[names.COMPANION_TRAIN_S]
            advance(number >= 0, f"{seconds:.2f} s with, {self.exposed_s:.2f} s exposed so far")
            return 1 / seconds

        def without(number: int) -> float:
            began = time.perf_counter()
            self._ppo(number, None)
            return 1 / (time.perf_counter() - began)

        # Rates are steps per second, so with the companion's arm as the base the other arm's ratio
        # is the cost.
        return run_rounds({WITHOUT: without, WITH: with_companion}, WITH, rounds)

    def _ppo(self, number: int, tap: Tap | None) -> None:
        """Score and update as the loop does. The rewards' values don't affect the time."""
        rollouts = self.steps[number]
        batch = PPOBatch(rollouts, self.learner.device, self.pad_id)
        rewards_S = torch.tensor([float(len(r.token_ids) % 2) for r in rollouts.responses])
        scores, _ = self.learner.score(batch, rewards_S, rollouts.sampling, tap)
        self.learner.update(batch, scores, rollouts.sampling, number)


def _config(
    bench: CompanionBench, longest_prompt: int, companion_cores: Sequence[int]
) -> RunConfig:
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


def _parts(
    bench: CompanionBench, prompts: Sequence[Sequence[int]]
) -> Iterator[tuple[list[Sequence[int]], Sampling]]:
    """Prompts and sampling of each step; the last one is for the warm-up round."""
    for step in range(bench.rounds + 1):
        start = step * bench.prompts_per_step
        picked = take_prompts(prompts, start, bench.prompts_per_step)
        yield (
            picked,
            Sampling(
                max_new_tokens=bench.max_new_tokens,
                responses_per_prompt=RESPONSES,
                seed=bench.seed + step,
            ),
        )


@contextmanager
def _pinned(cores: Sequence[int]) -> Iterator[None]:
    """Run this process on these cores with one thread each during the block."""
    before = os.sched_getaffinity(0)
    threads = torch.get_num_threads()
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(len(cores))
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
        torch.set_num_threads(threads)


def companion_table(result: Mapping[str, Any]) -> Table:
    """Header and one row."""
    return table_of(COMPANION_COLUMNS, [result])


def companion_verdict(result: Mapping[str, Any]) -> list[str]:
    """The sentences that a reader wants first."""
    return [
        f"A PPO step (score and update) with the companion takes x{result['cost']:.3f} of one"
        f" without; the loop spends {result['exposed_share']:.1%} of it in the plugin."
    ]


def run_swap(bench: SwapBench, progress: OfflineProgress) -> dict[str, Any]:
    """Swap two states of the heads in turn; after each swap the engine drafts on fixed hidden
    states.

    Raises:
        ModelError, CheckpointError: unusable model or heads.
        SwapError: the engine did not take the heads.
    """
    heads, _ = load_heads(bench.heads)
    generator = torch.Generator().manual_seed(bench.seed)
    first = {name: tensor.float().contiguous() for name, tensor in heads.trainable_state().items()}
    other = {name: _disturbed(tensor, generator) for name, tensor in first.items()}
    hidden = torch.randn(64, heads.config.hidden_size, generator=generator)
    last_ids = torch.randint(heads.config.vocab_size, (64,), generator=generator).tolist()
    swaps = []
    reads = []
    drafts = []
    with tempfile.TemporaryDirectory(
        # Where a run's companion puts its versions, too; elsewhere this would time a disk.
        prefix="medusa-ppo-bench-",
        dir="/dev/shm" if Path("/dev/shm").is_dir() else None,
    ) as folder:
        files = [Path(folder) / name for name in ("a.safetensors", "b.safetensors")]
        for file, state in zip(files, (first, other), strict=True):
            save_state(file, state)
        config = EngineConfig(
            dtype="float32",
            max_num_seqs=8,
            max_model_len=64,
            threads=max(1, torch.get_num_threads()),
        )
        config = with_all_heads(config, bench.heads)
        progress.say("Starting the engine ...")
        with (
            local_ray(),
            RayEngine(bench.model, bench.heads, config, bench.seed) as engine,
            progress.phase("Swaps", bench.repeats) as advance,
        ):
            for version in range(1, bench.repeats + 1):
                file = files[version % 2]
                began = time.perf_counter()
                # Reading the file is the part of a swap that can't be avoided. It is timed right
                # before the swap, so that both find the file in the same memory.
                load_state(file)
                reads.append(time.perf_counter() - began)
                began = time.perf_counter()
                engine.swap_heads(file, version)
                swaps.append(time.perf_counter() - began)
                # A swap that changed nothing would be fast, too: different drafts show that the
                # heads have changed.
                drafts.append(engine.probe(hidden.tolist(), last_ids))
                advance(1, f"{swaps[-1]:.3f} s")
    changed = sum(before != after for before, after in itertools.pairwise(drafts))
    return {
        "parameters": sum(tensor.numel() for tensor in first.values()),
        "bytes": sum(tensor.numel() * tensor.element_size() for tensor in first.values()),
        "first_s": swaps[0],
        "median_s": statistics.median(swaps),
        "max_s": max(swaps),
        "read_s": statistics.median(reads),
        "ratio_to_read": statistics.median(
            swap / read for swap, read in zip(swaps, reads, strict=True)
        ),
        "swaps_that_changed_the_drafts": changed,
        "swaps_compared": max(0, bench.repeats - 1),
    }


def _disturbed(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """The tensor plus noise that is large enough to change the drafts."""
    # The lower bound is for tensors of zeros, whose spread is zero.
    return tensor + PROBE_SCALE * tensor.std().clamp_min(0.02) * torch.randn(
        tensor.shape, generator=generator
    )


def swap_table(result: Mapping[str, Any]) -> Table:
    """Header and one row."""
    return table_of(SWAP_COLUMNS, [result])


def swap_verdict(result: Mapping[str, Any]) -> list[str]:
    """The sentences that a reader wants first."""
    return [
        f"{result['parameters'] / 1e6:.1f}M parameters swap in {result['median_s']:.3f} s,"
        f" x{result['ratio_to_read']:.1f} of reading and checking their file; the drafts changed"
        f" after {result['swaps_that_changed_the_drafts']} of {result['swaps_compared']} swaps."
    ]
