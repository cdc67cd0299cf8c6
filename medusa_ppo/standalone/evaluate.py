"""`medusa-ppo eval`: what heads are worth, by replay or by a real engine's counters, by temperature and category, and against others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from heads.acceptance import ReplayResult, paired_difference
from heads.checkpoint import load_heads
from heads.errors import DataError
from heads.modules import MedusaHeads
from medusa_ppo.actors.hf import embedding_weight, lm_head_weight, load_actor
from medusa_ppo.companion.gate import replay
from medusa_ppo.console import OfflineProgress
from medusa_ppo.data import require_column
from medusa_ppo.standalone import EvalOptions
from medusa_ppo.standalone.collect import PROMPTS_PER_ROUND, samples_of
from medusa_ppo.standalone.hidden import HiddenReader, read_all
from medusa_ppo.standalone.scene import Scene, engine_config, on_device, read_scene, running_engine, training_device
from medusa_ppo.types import Rollouts, Sampling

BOOTSTRAP_GROUPS = 16
"""Groups of prompts that the interval of an engine's counters is drawn from."""
LEAST_GROUPS = 4
"""Groups of a small category."""
MAX_CATEGORIES = 50


@dataclass(frozen=True)
class Group:
    """Prompts that one call of the engine answers, all of one category."""

    category: str
    prompts: list[tuple[int, ...]]


@dataclass(frozen=True)
class Measured:
    """One set of heads at one temperature.

    Attributes:
        result: counts of each unit that a bootstrap draws: a prompt (replay) or a group of prompts (an engine's counters).
        categories: of each unit.
    """

    result: ReplayResult
    categories: list[str]


def evaluate_heads(options: EvalOptions, progress: OfflineProgress) -> dict[str, Any]:
    """Generate on-policy responses and measure acceptance.

    Returns:
        The figures of DESIGN's command contract and the settings; with them those of each category and temperature, and of the heads to
        compare with (`compare`, with the paired difference).

    Raises:
        ModelError, DataError, CheckpointError: unusable model, data or heads.
    """
    model = AutoConfig.from_pretrained(options.model) if Path(options.model).exists() else None
    sizes = {"hidden_size": model.hidden_size, "vocab_size": model.vocab_size} if model else {}
    folders = [Path(options.heads), *([options.compare] if options.compare else [])]
    heads = [load_heads(folder, **sizes)[0] for folder in folders]
    scene = _read(options)
    groups = _groups(options, scene)
    if options.engine == "replay":
        rollouts = _generate(options, groups, "", progress)
        measured = _replayed(options, heads, groups, rollouts, progress)
    else:
        runs = [_generate(options, groups, str(folder), progress) for folder in folders]
        measured = [[_counted(groups, rounds) for rounds in run] for run in runs]
        rollouts = runs[0]
    rows = []
    for index, temperature in enumerate(options.every_temperature):
        found = [measured[h][index] for h in range(len(folders))]
        rows.append({"temperature": temperature, **_figures(found), **_speed(rollouts[index]), **_by_category(options, found)})
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in asdict(options).items()}
    several = {"temperatures": rows} if options.temperatures else {}
    headline = {key: value for key, value in rows[0].items() if key != "temperature"}
    return {**headline, **several, "prompts": len(scene.prompts), "settings": {**settings, "temperature": rows[0]["temperature"]}}


def _read(options: EvalOptions) -> Scene:
    ways: Any = {"column": options.column, "respond": True}
    scene = read_scene(options.model, options.data, options.template, options.max_new_tokens, options.limit, **ways)
    if options.category:
        require_column(list(scene.rows), options.category)
    return scene


def _groups(options: EvalOptions, scene: Scene) -> list[Group]:
    """The prompts in the calls that an engine is to make. It counts for a whole call: small groups, of one category each."""
    rows = list(scene.rows)
    by_category: dict[str, list[tuple[int, ...]]] = {}
    for prompt, row in zip(scene.prompts, scene.kept, strict=True):
        by_category.setdefault(str(rows[row][options.category]) if options.category else "", []).append(prompt)
    if len(by_category) > MAX_CATEGORIES:
        given, expected = f"{options.category}: {len(by_category)} values", f"at most {MAX_CATEGORIES}"
        problem = "The column has too many values to be a category."
        raise DataError(problem, given=given, expected=expected, do="Name another --category.")
    groups = []
    for category, prompts in by_category.items():
        size = PROMPTS_PER_ROUND
        if options.engine == "vllm":
            size = min(size, -(-len(scene.prompts) // BOOTSTRAP_GROUPS), -(-len(prompts) // LEAST_GROUPS))
        groups += [Group(category, prompts[start : start + size]) for start in range(0, len(prompts), size)]
    return groups


def _generate(options: EvalOptions, groups: Sequence[Group], heads: str, progress: OfflineProgress) -> list[list[Rollouts]]:
    """Responses of each group, once for each temperature; with heads, the engine drafts."""
    progress.say(f"Starting the engine {'with ' + heads if heads else ''} ...")
    prompts = [prompt for group in groups for prompt in group.prompts]
    with running_engine(options.model, heads, engine_config(prompts, options.max_new_tokens), options.seed) as engine:
        if heads and options.draft == "sampled":
            engine.configure(sampled=True, draft_temperature=options.draft_temperature)
        runs: list[list[Rollouts]] = []
        for temperature in options.every_temperature:
            sampling = Sampling(temperature, options.top_p, options.top_k, options.max_new_tokens)
            runs.append([])
            with progress.phase(f"Responses, temperature {temperature:g}", len(prompts)) as advance:
                for number, group in enumerate(groups):
                    rollouts = engine.generate(group.prompts, replace(sampling, seed=options.seed + number))
                    runs[-1].append(rollouts)
                    advance(len(group.prompts), f"{rollouts.tokens_per_s:.0f} tokens/s")
        return runs


def _replayed(
    options: EvalOptions,
    heads: Sequence[MedusaHeads],
    groups: Sequence[Group],
    rollouts: Sequence[Sequence[Rollouts]],
    progress: OfflineProgress,
) -> list[list[Measured]]:
    """All heads on the same rollouts, at every temperature."""
    device = training_device()
    actor = on_device(load_actor(options.model))
    lm_head_VD, embedding_VD = lm_head_weight(actor).detach().float(), embedding_weight(actor).detach().float()
    drafts = options.draft_temperature if options.draft == "sampled" else 0.0
    measured: list[list[Measured]] = [[] for _ in heads]
    for temperature, rounds in zip(options.every_temperature, rollouts, strict=True):
        samples = samples_of(rounds)
        with progress.phase(f"Hidden states, temperature {temperature:g}", len(samples)) as advance:
            batch = read_all(HiddenReader(actor, temperature), samples, advance)
        batch = replace(batch, top_k=options.top_k, top_p=options.top_p)
        of_each = [group.category for group, r in zip(groups, rounds, strict=True) for response in r.responses if response.token_ids]
        units: dict[tuple[str, int], int] = {}
        pairs = zip(of_each, [sample.prompt for sample in samples], strict=True)
        unit_S = torch.tensor([units.setdefault(pair, len(units)) for pair in pairs])
        for one, found in zip(heads, measured, strict=True):
            result = replay(one.to(device), batch, lm_head_VD, embedding_VD=embedding_VD, draft_temperature=drafts)
            found.append(Measured(result.by_group(unit_S), [category for category, _ in units]))
    return measured


def _counted(groups: Sequence[Group], rounds: Sequence[Rollouts]) -> Measured:
    """vLLM's counters; the units are the calls, which are groups of prompts."""
    accepted = list(zip_longest(*(r.counters.accepted_per_position for r in rounds), fillvalue=0))
    drafts = torch.tensor([r.counters.drafts for r in rounds], dtype=torch.float64)
    result = ReplayResult(drafts, torch.tensor(accepted, dtype=torch.float64).reshape(-1, len(rounds)).T, torch.zeros_like(drafts))
    return Measured(result, [group.category for group in groups])


def _by_category(options: EvalOptions, found: Sequence[Measured]) -> dict[str, Any]:
    if not options.category:
        return {}
    rows = []
    for category in sorted(set(found[0].categories)):
        chosen = torch.tensor([own == category for own in found[0].categories])
        rows.append({"category": category, **_figures([Measured(one.result.select(chosen), [category]) for one in found])})
    return {"categories": rows}


def _figures(found: Sequence[Measured]) -> dict[str, Any]:
    """Figures of the heads, and, paired with them, those of the heads to compare with."""
    figures = _of_one(found[0].result)
    if len(found) == 1:
        return figures
    difference = paired_difference(found[0].result, found[1].result)
    other = {**_of_one(found[1].result), "difference": difference.value, "difference_interval": [difference.low, difference.high]}
    return {**figures, "compare": other}


def _of_one(result: ReplayResult) -> dict[str, Any]:
    interval = result.confidence_interval()
    return {
        "mean_acceptance_length": result.mean_acceptance_length,
        "acceptance_per_position": list(result.acceptance_per_position),
        "drafts": round(result.drafts),
        "accepted": round(result.accepted),
        "confidence_interval": [interval.low, interval.high],
    }


def _speed(rounds: Sequence[Rollouts]) -> dict[str, Any]:
    tokens, seconds = sum(r.generated_tokens for r in rounds), sum(r.seconds for r in rounds)
    return {"generated_tokens": tokens, "tokens_per_s": tokens / seconds}
