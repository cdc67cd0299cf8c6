"""`medusa-ppo eval`: what heads gain, by replay or by a real engine's counters, by temperature and
category, and compared with other heads.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import count, pairwise, zip_longest
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoConfig

from heads.acceptance import ReplayResult, paired_difference
from heads.checkpoint import load_heads
from heads.errors import ConfigError, DataError
from heads.modules import MedusaHeads
from heads.targets import look_ahead, segments_from_lengths
from medusa_ppo.actors.hf import embedding_weight, lm_head_weight, load_actor
from medusa_ppo.companion.gate import Served, replay
from medusa_ppo.contract.rollout_batch import RolloutBatch
from medusa_ppo.contract.rollouts import Rollouts, Sampling
from medusa_ppo.drafting.memory import (
    LENGTHS,
    PLACES,
    SUFFIX,
    Drawn,
    ResponseMemory,
    Trust,
    cells_of,
    match,
    prompt_key,
    tail_of,
    vote,
)
from medusa_ppo.engines.rollout_engine import RolloutEngine
from medusa_ppo.offline.collect import PROMPTS_PER_ROUND, samples_of
from medusa_ppo.offline.draft_tokens import draft_ids, draft_width, text_to_count, until_chosen
from medusa_ppo.offline.hidden import HiddenReader, read_all
from medusa_ppo.offline.options import EvalOptions
from medusa_ppo.offline.scene import (
    Scene,
    engine_config,
    on_device,
    read_scene,
    running_engine,
    training_device,
)
from medusa_ppo.runtime.console import OfflineProgress
from medusa_ppo.runtime.data import require_column

INTERVAL_GROUPS = 16
"""Number of prompt groups behind the interval of an engine's counters ..."""
LEAST_GROUPS = 4
"""... and the minimum for a small category."""
# A column with more values holds texts or numbers rather than categories; its table would be
# unreadable.
MAX_CATEGORIES = 50
MEMORY_BYTES = 2**30
"""Size of the memory of earlier responses."""
PLACE_BOUNDS, ENTROPY_BOUNDS = (0, 16, 64, 256, 1024), (0, 0.25, 0.5, 1, 2)
"""Bounds of the ranges into which draft steps are sorted."""
BY_SUFFIX = "By length of the suffix that the memory knew, drafts"
ENTROPY_ROWS = 1024
"""Rows whose distribution is computed at once."""
ROWS_AT_ONCE = 64
"""Tokens of a response that a replay looks up at once."""


@dataclass(frozen=True)
class PromptGroup:
    """Prompts that one call of the engine answers, all of one category."""

    category: str
    prompts: list[tuple[int, ...]]


@dataclass(frozen=True)
class MeasuredHeads:
    """One set of heads at one temperature.

    Attributes:
        result: counts of each observation behind an interval: a prompt (replay) or a group of
            prompts (an engine's counters).
        categories: category of each observation.
        parts: more about where drafts are accepted, by replay: titles of tables, and their rows.
    """

    result: ReplayResult
    categories: list[str]
    parts: dict[str, list[dict[str, Any]]] = field(default_factory=dict)


def evaluate_heads(options: EvalOptions, progress: OfflineProgress) -> dict[str, Any]:
    """Generate on-policy responses and measure acceptance.

    Returns:
        The figures and the settings. Added to them are the figures of each category and each
        temperature, and those of the heads to compare with (`compare`, with the paired difference).

    Raises:
        ConfigError: a memory for one-hot drafts, a temperature that can't be used, or heads that
            can't draft from some tokens only.
        ModelError, DataError, CheckpointError: unusable model, data or heads.
    """
    if options.earlier_responses and options.draft != "sampled":
        given = f"--earlier-responses {options.earlier_responses} --draft {options.draft}"
        problem = "One-hot drafts are not mixed with a memory."
        do = "Add --draft sampled."
        raise ConfigError(problem, given=given, expected="--draft sampled", do=do)
    _check_temperatures(options)
    # Heads of another model are refused before the engine starts. For a model on the hub the sizes
    # are not known yet, and nothing is pulled just to know them.
    sizes = {}
    if Path(options.model).exists():
        # A model of several parts has its sizes in that of the text.
        model = AutoConfig.from_pretrained(options.model).get_text_config()
        sizes = {"hidden_size": model.hidden_size, "vocab_size": model.vocab_size}
    folders = [Path(options.heads), *([options.compare] if options.compare else [])]
    loaded = [load_heads(folder, **sizes) for folder in folders]
    heads = [one for one, _ in loaded]
    # Said before the work, in which one may still think better of it, and with the figures.
    known = known_data(options.data, [metadata.metadata for _, metadata in loaded])
    if known:
        progress.say(known)
    # Before all work: heads that can't draft from some tokens only are refused here.
    widths = [draft_width(one.config, options.draft_vocab) for one in heads]
    scene = _read(options)
    if scene.left_out:
        progress.say(scene.left_out)
    groups = _groups(options, scene)
    if options.engine == "replay":
        earlier, rollouts, texts = _generate(options, groups, "", progress, max(widths))
        measured = _replayed(options, heads, groups, earlier, rollouts, progress, texts)
    else:
        # Counters only cover what an engine drafts itself, so each set of heads gets an engine. One
        # with untrained heads drafts nothing, and never chooses what from.
        runs = [
            _generate(options, groups, str(folder), progress, 0 if one.untrained else width)[1]
            for folder, one, width in zip(folders, heads, widths, strict=True)
        ]
        measured = [[_counted(groups, rounds) for rounds in run] for run in runs]
        rollouts = runs[0]
    rows = []
    for index, temperature in enumerate(options.every_temperature):
        found = [measured[h][index] for h in range(len(folders))]
        rows.append(
            {
                "temperature": temperature,
                **_figures(found),
                **_speed(rollouts[index]),
                **_by_category(options, found),
            }
        )
    settings = {
        key: str(value) if isinstance(value, Path) else value
        for key, value in asdict(options).items()
    }
    several = {"temperatures": rows} if options.temperatures else {}
    headline = {key: value for key, value in rows[0].items() if key != "temperature"}
    return {
        **headline,
        **several,
        "prompts": len(scene.prompts),
        "prompts_left_out": scene.skipped,
        **({"warning": known} if known else {}),
        "settings": {**settings, "temperature": rows[0]["temperature"]},
    }


def known_data(data: str, notes: Sequence[Mapping[str, Any]]) -> str:
    """A warning if heads with such notes (of `medusa-ppo train`) were trained on this data; empty
    if none is known to be.
    """
    for note in notes:
        options = note.get("options")
        trained_on = options.get("data") if isinstance(options, Mapping) else None
        if not isinstance(trained_on, str) or not trained_on:
            continue
        # A path may be written in several ways; this leaves names of the hub different, too.
        if os.path.abspath(trained_on) == os.path.abspath(data):
            return (
                f"These heads were trained on {data}: on other prompts fewer drafts are accepted."
                " Measure them with --data that they don't know."
            )
    return ""


def _check_temperatures(options: EvalOptions) -> None:
    for temperature in options.every_temperature:
        if not 0 <= temperature < math.inf:
            raise ConfigError(
                "The sampling temperature can't be used.",
                given=f"{temperature:g}",
                expected="0 (always the most likely token) or more",
                do="Correct --temperature or --temperatures.",
            )
    greedy = 0 in options.every_temperature
    if greedy and options.earlier_responses and options.engine == "replay":
        # At temperature 0 drafts are the most likely tokens; the replay has a mixture with a
        # memory only for sampled ones.
        raise ConfigError(
            "At temperature 0 a replay can't tell what a memory would draft.",
            given=f"--temperature 0 --earlier-responses {options.earlier_responses}",
            expected="a temperature above 0, or no earlier responses",
            do="Add --engine vllm, which counts what the engine drafts, or leave one of them out.",
        )


def _read(options: EvalOptions) -> Scene:
    ways: Any = {"column": options.column, "respond": True}
    scene = read_scene(
        options.model, options.data, options.template, options.max_new_tokens, options.limit, **ways
    )
    if options.category:
        require_column(list(scene.rows), options.category)
    return scene


def _groups(options: EvalOptions, scene: Scene) -> list[PromptGroup]:
    """The prompts, grouped into calls of the engine. The engine counts acceptance per call, so each
    group is small and has one category.
    """
    rows = list(scene.rows)
    by_category: dict[str, list[tuple[int, ...]]] = {}
    for prompt, row in zip(scene.prompts, scene.kept, strict=True):
        category = str(rows[row][options.category]) if options.category else ""
        by_category.setdefault(category, []).append(prompt)
    if len(by_category) > MAX_CATEGORIES:
        given = f"{options.category}: {len(by_category)} values"
        expected = f"at most {MAX_CATEGORIES}"
        problem = "The column has too many values to be a category."
        raise DataError(problem, given=given, expected=expected, do="Name another --category.")
    groups = []
    for category, prompts in by_category.items():
        # A replay counts response by response, so calls may have any size.
        size = PROMPTS_PER_ROUND
        if options.engine == "vllm":
            size = min(
                size, -(-len(scene.prompts) // INTERVAL_GROUPS), -(-len(prompts) // LEAST_GROUPS)
            )
        groups += [
            PromptGroup(category, prompts[start : start + size])
            for start in range(0, len(prompts), size)
        ]
    return groups


def _generate(
    options: EvalOptions,
    groups: Sequence[PromptGroup],
    heads: str,
    progress: OfflineProgress,
    width: int = 0,
) -> tuple[list[list[Rollouts]], list[list[Rollouts]], list[tuple[int, ...]]]:
    """For each temperature, the earlier responses of each group and those to measure. With heads,
    the engine drafts, from `width` tokens (0: all) that it has chosen before; without, the third
    part is the text from which a replay chooses them, by other seeds than what is measured.
    """
    progress.say(f"Starting the engine {'with ' + heads if heads else ''} ...")
    prompts = [prompt for group in groups for prompt in group.prompts]
    earlier: list[list[Rollouts]] = []
    runs: list[list[Rollouts]] = []
    texts: list[tuple[int, ...]] = []
    with running_engine(
        options.model, heads, engine_config(prompts, options.max_new_tokens), options.seed
    ) as engine:
        if heads:
            # Set in both cases, because an engine samples drafts by default.
            sampled = options.draft == "sampled"
            engine.configure(
                sampled=sampled, draft_temperature=options.draft_temperature, draft_vocab=width
            )
            until_chosen(width, _counting_calls(options, engine, groups))
        elif width:
            progress.say("Counting tokens for the draft vocabulary ...")
            texts = text_to_count(width, _counting_calls(options, engine, groups))
        for temperature in options.every_temperature:
            sampling = Sampling(temperature, options.top_p, options.top_k, options.max_new_tokens)
            if heads and options.earlier_responses:
                # The memory forgets responses at another temperature.
                engine.configure(memory_bytes=0)
                engine.configure(memory_bytes=MEMORY_BYTES)
            before = replace(sampling, responses_per_prompt=options.earlier_responses)
            # Other seeds than for the measured responses: the memory would otherwise hold exactly
            # the responses that are measured.
            own = options.seed + len(groups)
            ways = (
                [("Earlier responses", earlier, before, own)] if options.earlier_responses else []
            )
            for name, found, way, seed in (*ways, ("Responses", runs, sampling, options.seed)):
                found.append([])
                with progress.phase(
                    f"{name}, temperature {temperature:g}", len(prompts)
                ) as advance:
                    for number, group in enumerate(groups):
                        rollouts = engine.generate(group.prompts, replace(way, seed=seed + number))
                        found[-1].append(rollouts)
                        advance(len(group.prompts), f"{rollouts.tokens_per_s:.0f} tokens/s")
    return earlier, runs, texts


def _counting_calls(
    options: EvalOptions, engine: RolloutEngine, groups: Sequence[PromptGroup]
) -> Iterator[Rollouts]:
    """Responses whose tokens are counted for a draft vocabulary, and not measured."""
    for number in count():
        sampling = Sampling(
            options.every_temperature[0],
            options.top_p,
            options.top_k,
            options.max_new_tokens,
            # Responses that are measured have other seeds.
            seed=options.seed + 2 * len(groups) + number,
        )
        yield engine.generate(groups[number % len(groups)].prompts, sampling)


def _replayed(
    options: EvalOptions,
    heads: Sequence[MedusaHeads],
    groups: Sequence[PromptGroup],
    earlier: Sequence[Sequence[Rollouts]],
    rollouts: Sequence[Sequence[Rollouts]],
    progress: OfflineProgress,
    texts: Sequence[Sequence[int]] = (),
) -> list[list[MeasuredHeads]]:
    """Replay all heads on the same rollouts, at every temperature, with a memory of the earlier
    responses if there are any. Draft vocabularies are chosen from `texts`.
    """
    device = training_device()
    actor = on_device(load_actor(options.model))
    lm_head_VD = lm_head_weight(actor).detach().float()
    embedding_VD = embedding_weight(actor).detach().float()
    measured: list[list[MeasuredHeads]] = [[] for _ in heads]
    for temperature, before, rounds in zip(
        options.every_temperature, earlier or [[]] * len(rollouts), rollouts, strict=True
    ):
        # Verification at temperature 0 accepts the most likely token and nothing else, whatever its
        # log-prob is (vLLM gives that at temperature 1 then).
        greedy = temperature == 0
        drafts = options.draft_temperature if options.draft == "sampled" and not greedy else 0.0
        samples = samples_of(rounds)
        prompts = {sample.prompt: sample.ids[: sample.spans[0][0]] for sample in samples}
        with progress.phase(f"Hidden states, temperature {temperature:g}", len(samples)) as advance:
            batch = read_all(HiddenReader(actor, temperature or 1.0), samples, advance)
        # The replay has to truncate q and p as the sampling did, which the reader doesn't know.
        batch = replace(batch, top_k=options.top_k, top_p=options.top_p)
        of_each = [
            group.category
            for group, r in zip(groups, rounds, strict=True)
            for response in r.responses
            if response.token_ids
        ]
        # Responses to one prompt are much alike. An observation for the interval is therefore a
        # prompt with all its responses, within one category.
        units: dict[tuple[str, int], int] = {}
        pairs = zip(of_each, [sample.prompt for sample in samples], strict=True)
        unit_S = torch.tensor([units.setdefault(pair, len(units)) for pair in pairs])
        for one, found in zip(heads, measured, strict=True):
            ids_W = draft_ids(one.config, options.draft_vocab, texts)
            # Each set of heads gets its own trust in the memory, which depends on the heads.
            recalled = Recalled(prompts, before) if before else None
            result = replay(
                one.to(device),
                batch,
                lm_head_VD,
                embedding_VD=embedding_VD,
                served=Served(drafts, ids_W=ids_W, mix=recalled),
            )
            parts = _parts(result, batch, lm_head_VD, greedy=greedy) | (
                {BY_SUFFIX: _by_suffix(recalled.trust)} if recalled else {}
            )
            found.append(
                MeasuredHeads(result.by_group(unit_S), [category for category, _ in units], parts)
            )
    return measured


def _parts(
    result: ReplayResult, batch: RolloutBatch, lm_head_VD: torch.Tensor, *, greedy: bool = False
) -> dict[str, list[dict[str, Any]]]:
    """Tokens per step, by the place of the drafts in their response and by the policy's entropy at
    the first drafted token. A greedy policy has no entropy.
    """
    assert result.rows_M2 is not None, "a replay on one process knows its rows"
    here_M = segments_from_lengths(batch.lengths_S)
    place_M = torch.arange(len(here_M)) - (batch.lengths_S.cumsum(0) - batch.lengths_S)[here_M]
    by_place = {
        "By place in the response, tokens": _by_value(place_M, PLACE_BOUNDS, result.rows_M2)
    }
    if greedy:
        return by_place
    entropy = []
    for hidden_CD in batch.hidden_MD.split(ENTROPY_ROWS):
        logp_CV = (hidden_CD.to(lm_head_VD) @ lm_head_VD.T / batch.temperature).log_softmax(-1)
        entropy.append(-(logp_CV.exp() * logp_CV).sum(-1).cpu())
    next_M = look_ahead(torch.cat(entropy), here_M, 1, first=1)[0].squeeze(1)
    return by_place | {
        "By entropy of the policy at the first draft, nats": _by_value(
            next_M, ENTROPY_BOUNDS, result.rows_M2
        )
    }


def _by_value(
    values_M: torch.Tensor, bounds: Sequence[float], rows_M2: torch.Tensor
) -> list[dict[str, Any]]:
    """Tokens per step of the rows in each range of values; ranges without drafts are left out."""
    found = []
    for low, high in pairwise((*bounds, math.inf)):
        drafts, accepted = rows_M2[(values_M >= low) & (values_M < high)].sum(0).tolist()
        # A replay's counts are expectations, not integers; below one draft a ratio means nothing.
        if drafts >= 1:
            name = f"{low:g} and more" if high == math.inf else f"{low:g} to {high:g}"
            found.append(
                {
                    "part": name,
                    "drafts": round(drafts),
                    "mean_acceptance_length": 1 + accepted / drafts,
                }
            )
    return found


def _by_suffix(trust: Trust) -> list[dict[str, Any]]:
    """The share of verified drafts that were accepted, by the length of the suffix that the memory
    knew.
    """
    rows = [
        (part, *both) for part, both in zip(LENGTHS, trust.by_length(), strict=True) if both[0] >= 1
    ]
    return [
        {"part": part, "drafts": round(drafts), "accepted_share": taken / drafts}
        for part, drafts, taken in rows
    ]


class Recalled:
    """The engine's memory of earlier responses, in a replay: for each response, what the memory
    would have drafted.

    Trust in the memory is learned from one response after the other, as an engine learns it from
    its steps.

    Attributes:
        trust: the table of w.
    """

    def __init__(self, prompts: Mapping[int, tuple[int, ...]], earlier: Sequence[Rollouts]) -> None:
        """
        Args:
            prompts: the prompts by their numbers in a batch.
            earlier: the responses that the memory holds.
        """
        self._prompts = prompts
        self._memory = ResponseMemory(MEMORY_BYTES)
        self.trust = Trust(torch.device("cpu"))
        for rollouts in earlier:
            for response in rollouts.responses:
                self._memory.remember(
                    prompt_key(rollouts.prompts[response.prompt_index]), response.token_ids
                )

    def __call__(
        self, batch: RolloutBatch, logprobs_MK: torch.Tensor, tops_MK: torch.Tensor
    ) -> torch.Tensor:
        """log q of the mixture for the batch's tokens. `logprobs_MK` is log q of the heads, and
        `tops_MK` the log of each head's largest probability.
        """
        assert batch.prompts_S is not None, "samples know their prompts"
        lengths = batch.lengths_S.tolist()
        of_each = (
            part.split(lengths)
            for part in (
                batch.response_ids_M,
                batch.logprobs_M.exp(),
                logprobs_MK.exp(),
                tops_MK.exp(),
            )
        )
        parts = [
            self._mixed(self._prompts[prompt], *response)
            for prompt, *response in zip(batch.prompts_S.tolist(), *of_each, strict=True)
        ]
        return torch.cat(parts).log()

    def _mixed(
        self,
        prompt: tuple[int, ...],
        ids_T: torch.Tensor,
        p_T: torch.Tensor,
        heads_TK: torch.Tensor,
        tops_TK: torch.Tensor,
    ) -> torch.Tensor:
        """The mixture's q of a response's tokens `[T, K]`. How many of them would have been
        accepted decides the memory's weight w in the next responses.
        """
        here_T = torch.zeros_like(ids_T)
        K = heads_TK.shape[1]
        ahead = [
            look_ahead(part, here_T, K, first=1) for part in (*self._look_up(prompt, ids_T), p_T)
        ]
        (memory_TK, there_TK), (length_TK, _), (p_TK, _) = ahead
        cells_TK = torch.where(there_TK, cells_of(length_TK, tops_TK), -1)
        q_TK = torch.lerp(heads_TK, memory_TK, self.trust.share(cells_TK))
        # The probability that all drafts up to each are accepted as a block, and the product of q /
        # p up to it (`heads.acceptance.block_acceptance`).
        ratio_TK = torch.where(there_TK, q_TK / p_TK.clamp_min(1e-30), 0.0).double()
        product_TK = ratio_TK.cumprod(1)
        taken_TK = product_TK.cummin(1).values.clamp_max(1)
        # A draft is only judged if all earlier ones were accepted.
        offered_TK, before_TK = (
            F.pad(part[:, :-1], (1, 0), value=1.0) * there_TK for part in (taken_TK, product_TK)
        )
        # The policy drew these tokens, not the mixture, so earlier drafts are weighted by q / p.
        drawn = Drawn(
            cells_TK,
            heads_TK,
            memory_TK,
            p_TK * torch.where(before_TK > 0, offered_TK / before_TK, 0.0),
            before_TK / p_TK.clamp_min(1e-30),
        )
        self.trust.learn(
            Drawn(*(part.flatten() for part in drawn)), offered_TK.flatten(), taken_TK.flatten()
        )
        return q_TK

    def _look_up(
        self, prompt: tuple[int, ...], ids_T: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The memory's q of each token of a response, and how long a suffix before the token the
        memory knows.
        """
        tokens, weights = self._memory.text(prompt_key(prompt), prompt[-SUFFIX:], (), PLACES)
        if not len(weights):
            return torch.zeros(len(ids_T)), torch.zeros_like(ids_T)
        text_1X = torch.from_numpy(tokens)[None]
        weight_1P = torch.from_numpy(weights)[None]
        # Row t is the suffix before token t.
        tails_Tn = (
            torch.cat([torch.tensor(tail_of(prompt)), ids_T])
            .unfold(0, SUFFIX, 1)[: len(ids_T)]
            .int()
        )
        q = []
        lengths = []
        for tails_Bn, ids_B in zip(
            tails_Tn.split(ROWS_AT_ONCE), ids_T.split(ROWS_AT_ONCE), strict=True
        ):
            votes = vote(match(text_1X.expand(len(ids_B), -1), tails_Bn), weight_1P)
            q.append((votes.share_BP * (text_1X[:, SUFFIX:] == ids_B[:, None])).sum(1))
            lengths.append(votes.length_B)
        return torch.cat(q), torch.cat(lengths)


def _counted(groups: Sequence[PromptGroup], rounds: Sequence[Rollouts]) -> MeasuredHeads:
    """vLLM's counters. Each call, which answers one group of prompts, is an observation."""
    # If the engine chooses K, calls can differ in their number of positions.
    accepted = list(zip_longest(*(r.counters.accepted_per_position for r in rounds), fillvalue=0))
    drafts = torch.tensor([r.counters.drafts for r in rounds], dtype=torch.float64)
    result = ReplayResult(
        drafts,
        torch.tensor(accepted, dtype=torch.float64).reshape(-1, len(rounds)).T,
        torch.zeros_like(drafts),
    )
    return MeasuredHeads(result, [group.category for group in groups])


def _by_category(options: EvalOptions, found: Sequence[MeasuredHeads]) -> dict[str, Any]:
    if not options.category:
        return {}
    rows = []
    for category in sorted(set(found[0].categories)):
        chosen = torch.tensor([own == category for own in found[0].categories])
        rows.append(
            {
                "category": category,
                **_figures([MeasuredHeads(one.result.select(chosen), [category]) for one in found]),
            }
        )
    return {"categories": rows}


def _figures(found: Sequence[MeasuredHeads]) -> dict[str, Any]:
    """The figures of the heads and, if there are heads to compare with, theirs, paired."""
    figures = {**_of_one(found[0].result), **({"parts": found[0].parts} if found[0].parts else {})}
    if len(found) == 1:
        return figures
    difference = paired_difference(found[0].result, found[1].result)
    other = {
        **_of_one(found[1].result),
        "difference": difference.value,
        "difference_interval": [difference.low, difference.high],
    }
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
    tokens = sum(r.generated_tokens for r in rounds)
    seconds = sum(r.seconds for r in rounds)
    return {"generated_tokens": tokens, "tokens_per_s": tokens / seconds}
