"""`medusa-ppo bench rollout`: tokens per second of every way to draft, in turn, at several numbers
of running sequences.
"""

from __future__ import annotations

import json
import math
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

from heads.checkpoint import load_heads
from heads.errors import ConfigError
from medusa_ppo.bench.bench_options import RolloutBench, Table
from medusa_ppo.bench.bench_page import draw_ratios
from medusa_ppo.bench.pairs import PairedRates, run_rounds, table_of
from medusa_ppo.config.engine_section import EngineConfig
from medusa_ppo.contract.rollouts import Counters, Rollouts, Sampling
from medusa_ppo.engines.launch import LaunchPlan, plan_launch, read_heads_config
from medusa_ppo.engines.ray_engine import RayEngine
from medusa_ppo.engines.rollout_engine import RolloutEngine
from medusa_ppo.offline.collect import take_prompts
from medusa_ppo.offline.draft_tokens import until_chosen
from medusa_ppo.offline.scene import read_scene
from medusa_ppo.runtime.console import OfflineProgress
from medusa_ppo.runtime.hardware import OWN_MEMORY, settled_engine
from medusa_ppo.runtime.processes import local_ray, run_hardware

NONE, STOCK, FIXED, CHOSEN = "none", "stock medusa", "ours, K = {}", "ours, K chosen"
OTHERS: dict[str, dict[str, Any]] = {
    "ngram": {"prompt_lookup_min": 2, "prompt_lookup_max": 4},
    "suffix": {},
}
"""vLLM's own ways to draft without a model: the name of each in vLLM, and its settings."""
AGAIN = "again"
"""The other arm that can be asked for: a second engine without speculation. Its ratio to the first
shows how far two equal engines differ on this machine.
"""
SECOND_NONE = "none, again"
MIN_SEQUENCES = 6
"""Minimum number of sequences per round, so that no batch is judged by a single response."""
LEARNING_ROUNDS = 4
"""Uncounted rounds in which an engine that chooses K learns its step times, as it has after a run's
first rollouts.
"""
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
class Arm:
    """One way to serve: an engine (arms may share one), and how it drafts."""

    name: str
    engine: RolloutEngine
    drafts: int | None = None
    choose: bool = False

    def prepare(self) -> None:
        """Set the engine to this arm's way of drafting."""
        if self.drafts is not None:
            self.engine.configure(num_drafts=self.drafts, choose=self.choose)


@contextmanager
def running_arms(
    model: str,
    heads: str,
    stock_heads: str,
    config: EngineConfig,
    seed: int,
    scratch: Path,
    *,
    others: Sequence[str] = ("ngram",),
    fixed: Sequence[int] = (),
) -> Iterator[list[Arm]]:
    """All arms, started one after another, after the caller's `ray.init`. Every engine is closed
    at the end.

    Args:
        heads: folder of our heads, any kind.
        stock_heads: folder of heads of kind medusa for vLLM's own Medusa; empty: that arm is left
            out.
        config: settings that all engines share; `draft_temperature` and `num_drafts` apply to our
            arms only.
        scratch: folder for the stock arm's copy of its heads.
        others: names in OTHERS, or AGAIN; each is an arm.
        fixed: fixed numbers of drafts, each an arm; empty: one arm that drafts with all heads.
    """
    ours = plan_launch(model, heads, config, seed)
    # The same settings without heads: vLLM's own arms differ only in how they draft.
    plain = plan_launch(model, None, config, seed)
    # If one engine fails to start, the stack closes those that did.
    with ExitStack() as engines:

        def start(plan: LaunchPlan) -> RolloutEngine:
            return engines.enter_context(RayEngine(model, None, config, seed, plan=plan))

        arms = [Arm(NONE, start(plain))]
        if stock_heads:
            arms.append(
                Arm(STOCK, start(_stock_plan(plain, ours.max_drafts, stock_heads, scratch)))
            )
        for name in others:
            if name == AGAIN:
                arms.append(Arm(SECOND_NONE, start(plain)))
                continue
            settings = {"method": name, "num_speculative_tokens": ours.max_drafts, **OTHERS[name]}
            arms.append(Arm(name, start(_with_speculation(plain, settings))))
        # One engine for all of our arms: they differ in drafting, not in what is loaded.
        engine = start(ours)
        most = ours.max_drafts
        yield [
            *arms,
            *(Arm(FIXED.format(k), engine, k) for k in fixed or (most,)),
            Arm(CHOSEN, engine, most, choose=True),
        ]


def _check_options(bench: RolloutBench) -> None:
    """Refuse what would otherwise show only in the first round, minutes later, or not at all."""
    for option, parts in (
        ("batches", bench.batches),
        ("fixed", bench.fixed),
        ("others", bench.others),
    ):
        # Rows are told apart by their names.
        if len(set(parts)) < len(parts):
            raise ConfigError(
                f"--{option} names something twice.",
                given=",".join(map(str, parts)),
                expected="each once",
                do=f"Correct --{option}.",
            )
    for option, value in (
        ("temperature", bench.temperature),
        ("draft-temperature", bench.draft_temperature),
    ):
        if not 0 <= value < math.inf:
            raise ConfigError(
                "This temperature can't be used.",
                given=f"--{option} {value:g}",
                expected="0 (always the most likely token) or more",
                do=f"Correct --{option}.",
            )


def _check_heads(bench: RolloutBench, most: int) -> None:
    """Refuse numbers of drafts that the heads don't have, and heads that vLLM's own Medusa can't
    serve. Ours have been compared with the actor by now.
    """
    if max(bench.fixed, default=0) > most:
        raise ConfigError(
            "There are more drafts than heads.",
            given=f"--fixed {','.join(map(str, bench.fixed))}",
            expected=f"at most {most}, the heads in {bench.heads}",
            do="Correct --fixed.",
        )
    if not bench.stock_heads:
        return
    ours = read_heads_config(bench.heads, 0, 0)
    stock = read_heads_config(bench.stock_heads, ours.hidden_size, ours.vocab_size)
    if stock.kind != "medusa":
        raise ConfigError(
            "vLLM's own Medusa can't serve these heads.",
            given=f"kind {stock.kind} in {bench.stock_heads}",
            expected="medusa",
            do="Train heads of that kind, or leave this arm out.",
        )


def _others(names: Sequence[str]) -> list[str]:
    names = [name for name in names if name != NONE]
    for name in names:
        if name not in (*OTHERS, AGAIN):
            raise ConfigError(
                "There is no such arm.",
                given=f"others: {name}",
                expected=", ".join([NONE, *OTHERS, AGAIN]),
                do="Name one of them.",
            )
    # vLLM would report this too, but only when that engine starts, minutes later.
    if "suffix" in names and find_spec("arctic_inference") is None:
        raise ConfigError(
            "vLLM's suffix decoding needs a package that is not installed.",
            given="others: suffix",
            expected="arctic-inference",
            do="`pip install arctic-inference`, or leave this arm out.",
        )
    return names


def _with_speculation(plan: LaunchPlan, settings: dict[str, Any]) -> LaunchPlan:
    return replace(plan, engine_args={**plan.engine_args, "speculative_config": settings})


def _stock_plan(plain: LaunchPlan, drafts: int, stock_heads: str, scratch: Path) -> LaunchPlan:
    """vLLM's own Medusa module and lm_head products. The patches of the CPU build stay: without
    them its samples are wrong.
    """
    folder = scratch / "stock-heads"
    # A copy, because its configuration is changed below.
    shutil.copytree(stock_heads, folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    # Without this section our plugin leaves the folder to vLLM's own proposer.
    del config["medusa_ppo"]
    # That proposer drafts with all the heads that its configuration names.
    config["num_heads"] = min(config["num_heads"], drafts)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return _with_speculation(
        plain,
        {"method": "medusa", "model": str(folder), "num_speculative_tokens": config["num_heads"]},
    )


def run_rollout(bench: RolloutBench, progress: OfflineProgress) -> dict[str, Any]:
    """Start all engines, let them take turns on the same prompts, and compare them within rounds.

    Raises:
        ModelError, DataError, CheckpointError, ConfigError: before anything starts.
        EngineError: an engine failed.
    """
    _check_options(bench)
    others = _others(bench.others)
    prompts = read_scene(bench.model, bench.data, bench.template, bench.max_new_tokens).prompts
    engines = 2 + bool(bench.stock_heads) + len(others)
    config = EngineConfig(
        dtype=None if bench.dtype == "auto" else bench.dtype,
        max_num_seqs=max(bench.batches),
        max_model_len=max(64, max(len(p) for p in prompts) + bench.max_new_tokens),
        enforce_eager=bench.eager,
        threads=bench.threads,
        draft_temperature=bench.draft_temperature,
        draft_vocab=None if bench.draft_vocab < 0 else bench.draft_vocab,
        memory_bytes=bench.memory_bytes or None,
    )
    ours = plan_launch(bench.model, bench.heads, config, bench.seed)
    _check_heads(bench, ours.max_drafts)
    progress.say("Starting the engines, one process for each ...")
    rows: list[dict[str, Any]] = []
    with (
        tempfile.TemporaryDirectory(prefix="medusa-ppo-bench-") as scratch,
        local_ray(cpus=bench.threads),
    ):
        hardware = run_hardware()
        if hardware.gpus:
            # Only one engine computes at a time, but all of them keep their memory.
            config = config.model_copy(update={"memory_fraction": OWN_MEMORY / engines})
        config = settled_engine(config, hardware)
        with (
            running_arms(
                bench.model,
                bench.heads,
                bench.stock_heads,
                config,
                bench.seed,
                Path(scratch),
                others=others,
                fixed=bench.fixed,
            ) as arms,
            progress.phase(
                "Rollouts", len(bench.batches) * len(arms) * (bench.rounds + 1)
            ) as advance,
        ):
            # `plan_launch` has replaced -1 as it does for a run. An engine with untrained heads
            # drafts nothing, and never chooses what from.
            width = ours.drafting.get("draft_vocab")
            if width and not load_heads(bench.heads)[0].untrained:
                until_chosen(width, _counting_calls(bench, arms[-1], prompts))
            for batch in bench.batches:
                rows += _run_batch(bench, batch, arms, prompts, advance)
    return {
        "rows": rows,
        "batches": list(bench.batches),
        "arms": [arm.name for arm in arms],
        "dtype": config.dtype,
    }


def _counting_calls(
    bench: RolloutBench, arm: Arm, prompts: Sequence[Sequence[int]]
) -> Iterator[Rollouts]:
    """Calls that let this arm's engine count the tokens that it will draft from."""
    # An engine that chooses may choose to draft nothing, and then counts nothing.
    replace(arm, choose=False).prepare()
    batch = max(bench.batches)
    for number in count():
        yield arm.engine.generate(
            take_prompts(prompts, number * batch, batch),
            Sampling(bench.temperature, max_new_tokens=bench.max_new_tokens),
        )


def _run_batch(
    bench: RolloutBench,
    batch: int,
    arms: Sequence[Arm],
    prompts: Sequence[Sequence[int]],
    advance: Any,
) -> list[dict[str, Any]]:
    counters: dict[str, Counters] = {arm.name: Counters() for arm in arms}
    groups = -(-MIN_SEQUENCES // batch)

    def turn(arm: Arm) -> Callable[[int], float]:
        def run(number: int) -> float:
            # Arms share an engine, and the previous one may have changed its settings.
            arm.prepare()
            # It may also have left this turn's prompts in the prefix cache, from which other arms'
            # engines get nothing. A run's rollouts begin without it, too, after each sync.
            arm.engine.forget_prompts()
            tokens = 0
            seconds = 0.0
            for group in range(groups * (LEARNING_ROUNDS if arm.choose and number < 0 else 1)):
                # All arms of a round get the same prompts; warm-up rounds get the first ones.
                start = (max(number, 0) * groups + group) * batch
                picked = take_prompts(prompts, start, batch)
                rollouts = arm.engine.generate(
                    picked, Sampling(bench.temperature, max_new_tokens=bench.max_new_tokens)
                )
                tokens = tokens + rollouts.generated_tokens
                seconds = seconds + rollouts.seconds
                # Counters of the warm-up are left out: the engine is still learning its step times.
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
    """The result as a table, with one row per batch and arm."""
    return table_of(
        COLUMNS,
        [{**row, "drafts_per_step": row["drafts_per_step"] or None} for row in result["rows"]],
    )


def verdict(result: Mapping[str, Any]) -> list[str]:
    """The sentences that a reader wants first."""

    def of(arm: str) -> dict[int, float]:
        return {row["batch"]: row["ratio"] for row in result["rows"] if row["arm"] == arm}

    def told(ratios: Mapping[int, float], base: Mapping[int, float] | None = None) -> str:
        return ", ".join(
            f"x{ratio / (base[batch] if base else 1.0):.2f} at {batch}"
            for batch, ratio in ratios.items()
        )

    chosen, stock, again = of(CHOSEN), of(STOCK), of(SECOND_NONE)
    # Zero drafts is a fixed number, too; its ratio is 1.
    fixed = dict.fromkeys(chosen, 1.0)
    for row in result["rows"]:
        if row["arm"].startswith(FIXED.format("")):
            fixed[row["batch"]] = max(fixed[row["batch"]], row["ratio"])
    median = f"(median over batch sizes x{statistics.median(chosen.values()):.2f})"
    said = [
        f"Ours against no speculation: {told(chosen)} sequences {median}.",
        f"Chosen against the best fixed number of drafts: {told(chosen, fixed)}.",
    ]
    if stock:
        said.append(f"Ours against stock Medusa: {told(chosen, stock)}.")
    if again:
        said.append(f"A second engine without speculation against the first: {told(again)}.")
    return said


def plot(result: Mapping[str, Any]) -> str:
    """A picture with bars: each arm's ratio to no speculation, by number of sequences."""
    series = {
        arm: [row["ratio"] for row in result["rows"] if row["arm"] == arm] for arm in result["arms"]
    }
    return draw_ratios(
        "Tokens/s, ratio to no speculation",
        [str(batch) for batch in result["batches"]],
        series,
        "sequences",
    )
