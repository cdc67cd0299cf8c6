"""`medusa-ppo bench rollout`: tokens per second of every way to draft, in turn, at several numbers of running sequences."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from medusa_ppo.bench.measuring import CHOSEN, NONE, STOCK, Arm, PairedRates, Table, draw_ratios, run_rounds, running_arms, table_of
from medusa_ppo.config import EngineConfig
from medusa_ppo.console import OfflineProgress
from medusa_ppo.drafting.draft_vocabulary import MIN_TOKENS_PER_ENTRY
from medusa_ppo.processes import local_ray
from medusa_ppo.standalone.collect import take_prompts
from medusa_ppo.standalone.scene import read_scene
from medusa_ppo.types import Counters, Sampling

MIN_SEQUENCES = 6
"""A round has at least so many sequences, so that a small batch is not judged by one response."""
COLUMNS = {
    "sequences": "{batch}",
    "arm": "{arm}",
    "tokens/s": "{tokens_per_s:.0f}",
    "ratio to none": "{ratio:.2f}",
    "range": "{ratio_low:.2f} to {ratio_high:.2f}",
    "tokens per draft step": "{mean_acceptance_length:.2f}",
    "drafts per draft step": "{drafts_per_step:.1f}",
}


@dataclass(frozen=True)
class RolloutBench:
    """What is served, and how often; see `medusa-ppo bench rollout --help`."""

    model: str
    heads: str
    data: str
    template: str
    stock_heads: str = ""
    batches: tuple[int, ...] = (1, 4, 16, 64)
    rounds: int = 6
    max_new_tokens: int = 96
    temperature: float = 1.0
    draft_temperature: float = 1.0
    draft_vocab: int = 0
    dtype: Literal["auto", "float32", "bfloat16"] = "float32"
    eager: bool = False
    ngram: bool = True
    threads: int = 2
    seed: int = 0


def run_rollout(bench: RolloutBench, progress: OfflineProgress) -> dict[str, Any]:
    """Start all engines, let them take turns on the same prompts, and compare within each round.

    Raises:
        ModelError, DataError, CheckpointError, ConfigError: before anything starts.
        EngineError: an engine failed.
    """
    prompts = read_scene(bench.model, bench.data, bench.template, bench.max_new_tokens).prompts
    config = EngineConfig(
        dtype=None if bench.dtype == "auto" else bench.dtype,
        max_num_seqs=max(bench.batches),
        max_model_len=max(64, max(len(p) for p in prompts) + bench.max_new_tokens),
        enforce_eager=bench.eager,
        threads=bench.threads,
        draft_temperature=bench.draft_temperature,
        draft_vocab=bench.draft_vocab or None,
    )
    progress.say("Starting the engines, one process for each ...")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="medusa-ppo-bench-") as scratch, local_ray(cpus=bench.threads):
        with (
            running_arms(bench.model, bench.heads, bench.stock_heads, config, bench.seed, Path(scratch), ngram=bench.ngram) as arms,
            progress.phase("Rollouts", len(bench.batches) * len(arms) * (bench.rounds + 1)) as advance,
        ):
            if bench.draft_vocab:
                _count_tokens(bench, arms[-1], prompts)
            for batch in bench.batches:
                rows += _run_batch(bench, batch, arms, prompts, advance)
    return {"rows": rows, "batches": list(bench.batches), "arms": [arm.name for arm in arms]}


def _count_tokens(bench: RolloutBench, arm: Arm, prompts: Sequence[Sequence[int]]) -> None:
    """Let the engine see enough tokens to pick its draft vocabulary, as it has in a run after the first step."""
    counted = 0
    while counted < MIN_TOKENS_PER_ENTRY * bench.draft_vocab:
        rollouts = arm.engine.generate(prompts[: max(bench.batches)], Sampling(bench.temperature, max_new_tokens=bench.max_new_tokens))
        counted += rollouts.generated_tokens


def _run_batch(
    bench: RolloutBench, batch: int, arms: Sequence[Arm], prompts: Sequence[Sequence[int]], advance: Any
) -> list[dict[str, Any]]:
    counters: dict[str, Counters] = {arm.name: Counters() for arm in arms}
    groups = -(-MIN_SEQUENCES // batch)

    def turn(arm: Arm) -> Callable[[int], float]:
        def run(number: int) -> float:
            arm.prepare()
            tokens, seconds = 0, 0.0
            for group in range(groups):
                start = (max(number, 0) * groups + group) * batch
                picked = take_prompts(prompts, start, batch)
                rollouts = arm.engine.generate(picked, Sampling(bench.temperature, max_new_tokens=bench.max_new_tokens))
                tokens, seconds = tokens + rollouts.generated_tokens, seconds + rollouts.seconds
                if number >= 0:
                    counters[arm.name] = counters[arm.name] + rollouts.counters
            advance(1, f"batch {batch}, {arm.name}: {tokens / seconds:.0f} tokens/s")
            return tokens / seconds

        return run

    rates = run_rounds({arm.name: turn(arm) for arm in arms}, NONE, bench.rounds)
    return [_row(batch, arm.name, rates, counters[arm.name]) for arm in arms]


def _row(batch: int, name: str, rates: PairedRates, counted: Counters) -> dict[str, Any]:
    return {
        "batch": batch,
        "arm": name,
        "tokens_per_s": rates.median_rate(name),
        **rates.ratio_figures(name),
        "mean_acceptance_length": counted.mean_acceptance_length if counted.drafts else None,
        "drafts_per_step": counted.draft_tokens / counted.drafts if counted.drafts else 0.0,
    }


def table(result: Mapping[str, Any]) -> Table:
    """Header and rows for people: one row per batch and arm."""
    return table_of(COLUMNS, [{**row, "drafts_per_step": row["drafts_per_step"] or None} for row in result["rows"]])


def verdict(result: Mapping[str, Any]) -> list[str]:
    """The sentences that a reader wants first."""
    chosen = {row["batch"]: row["ratio"] for row in result["rows"] if row["arm"] == CHOSEN}
    stock = {row["batch"]: row["ratio"] for row in result["rows"] if row["arm"] == STOCK}
    to_none = ", ".join(f"x{ratio:.2f} at {batch}" for batch, ratio in chosen.items())
    to_stock = ", ".join(f"x{chosen[batch] / ratio:.2f} at {batch}" for batch, ratio in stock.items())
    median = f"(median over batch sizes x{statistics.median(chosen.values()):.2f})"
    return [f"Ours against no speculation: {to_none} sequences {median}.", *([f"Ours against stock Medusa: {to_stock}."] if stock else [])]


def plot(result: Mapping[str, Any]) -> str:
    """Bars of the ratio to no speculation, by number of sequences."""
    series = {arm: [row["ratio"] for row in result["rows"] if row["arm"] == arm] for arm in result["arms"]}
    return draw_ratios("Tokens/s, ratio to no speculation", [str(batch) for batch in result["batches"]], series, "sequences")
