"""Turns options and a run's settings into a question. An option that is not given comes from the
run, and if the run does not have it either, from a default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from heads.errors import UsageError
from heads.heads_config import HeadsConfig
from medusa_ppo.config.engine_section import EngineConfig
from medusa_ppo.config.heads_section import HeadsSection
from medusa_ppo.config.model_section import VISION_FAMILIES
from medusa_ppo.config.run_config import RunConfig
from medusa_ppo.predict.predict_options import PredictOptions
from medusa_ppo.predict.prediction import LoopWork, Question, Runner, read_sizes
from medusa_ppo.predict.rollout_model import ResponseLengths
from medusa_ppo.runtime.hardware import ModelSizes

RESPONSES, LENGTH_MEAN, PROMPT, SEQUENCES = 256, 1024.0, 512, 256
"""Defaults if neither options nor a run have a value."""


@dataclass(frozen=True)
class Accepted:
    """The acceptance, and where it comes from.

    Attributes:
        shares: share of draft steps in which each position is accepted.
        said: where they come from, in words.
        error: half the width of the mean acceptance length's interval; 0: the user gave shares.
    """

    shares: tuple[float, ...]
    said: str = "given"
    error: float = 0.0


ASSUMED = (0.53, 0.27, 0.13, 0.07, 0.04, 0.02)
"""Two tokens a step, spread over positions as with trained heads."""


def assumed(heads: int) -> Accepted:
    """The acceptance assumed before there are heads."""
    shares = ASSUMED[:heads]
    return Accepted(
        shares, f"assumed, {1 + sum(shares):.2f} tokens a step; `medusa-ppo eval` measures yours"
    )


def question_of(
    options: PredictOptions,
    raw: Mapping[str, Any],
    accepted: Accepted,
    run: RunConfig | None = None,
    trained: HeadsConfig | None = None,
) -> Question:
    """Build the question from options, a run's settings and trained heads.

    Args:
        raw: the model's config.json.
        trained: sizes of the heads with this acceptance; None: those of the run, or new ones.

    Raises:
        UsageError, ModelError: these don't fit together.
    """
    model, longest = read_sizes(raw)
    section = run.heads if run else HeadsSection(num_heads=max(1, len(accepted.shares)))
    heads = trained or section.sizes(model.hidden, model.vocab)
    engine = run.engine if run else EngineConfig()
    ranks = _ranks(options, engine)
    prompt = options.prompt or (run.data.max_prompt_tokens if run else PROMPT)
    drafts = None if options.drafts < 0 else options.drafts
    if drafts is None and isinstance(engine.num_drafts, int):
        drafts = min(engine.num_drafts, len(accepted.shares))
    return Question(
        name=options.model or (run.model.path if run else ""),
        model=model,
        heads=heads,
        acceptance=accepted.shares,
        acceptance_said=accepted.said,
        acceptance_error=accepted.error,
        lengths=_lengths(options, run, longest - prompt if longest else None),
        sequences=options.sequences or (engine.max_num_seqs if run else SEQUENCES),
        prompt=prompt,
        alike=run.sampling.responses_per_prompt if run else 1,
        ranks=ranks,
        runner=_runner(options, run, raw, ranks),
        engines=engine.replicas,
        drafts=drafts,
        width=_width(engine, model, heads),
        loop=_loop(options, run),
        longest=longest,
    )


def unpredicted(options: PredictOptions, run: RunConfig, raw: Mapping[str, Any]) -> str:
    """The run's setting with which engines on V2 work as no prediction for a GPU assumes: steps are
    not scheduled ahead, or the kernels of drafting are launched one by one. Empty: there is none.
    """
    engine = run.engine
    if _runner(options, run, raw, _ranks(options, engine)) == "v1":
        return ""
    if engine.stop_below:
        return f"engine.stop_below={engine.stop_below:g}"
    if engine.memory_bytes:
        return f"engine.memory_bytes={engine.memory_bytes}"
    return (
        "engine.extra.async_scheduling=false"
        if engine.extra.get("async_scheduling") is False
        else ""
    )


def _ranks(options: PredictOptions, engine: EngineConfig) -> int:
    return options.tp or int(engine.extra.get("tensor_parallel_size", 1))


def _runner(
    options: PredictOptions, run: RunConfig | None, raw: Mapping[str, Any], ranks: int
) -> Runner | None:
    """vLLM's model runner as given, or as `engines.launch` would choose it for the run's engines
    with the vLLM that is pinned; None: nothing is known of them.
    """
    if options.runner != "auto":
        return options.runner
    if run is None:
        return None
    section = run.engine
    # A running server has V1 with our heads, unless its environment says otherwise.
    if section.addresses or raw.get("model_type") in VISION_FAMILIES or ranks > 1:
        return section.runner or "v1"
    return section.runner or ("v2" if section.suits_v2 else "v1")


def _lengths(options: PredictOptions, run: RunConfig | None, room: int | None) -> ResponseLengths:
    """The lengths as given, from the run, or the default. `room` is the number of response tokens
    for which the model has room.
    """
    if options.lengths is not None:
        if options.length_mean:
            raise UsageError(
                "The lengths are given twice.",
                given="--lengths and --length-mean",
                expected="one of them",
                do="Leave one out.",
            )
        return ResponseLengths.read(options.lengths)
    count, mean, longest = RESPONSES, LENGTH_MEAN, 0
    if run is not None:
        longest = run.sampling.max_new_tokens
        # Half of the longest, because a run's settings don't contain the mean length.
        mean = longest / 2
        all_of_them = run.ppo.prompts_per_step * run.sampling.responses_per_prompt
        count = -(-all_of_them // run.engine.replicas)
    mean = options.length_mean or mean
    longest = options.longest or longest
    if not longest and room is not None and mean < room:
        # The few that would not fit are cut at the model's limit.
        longest = room
    return ResponseLengths.log_normal(
        options.responses or count, mean, options.length_spread, longest or None
    )


def _width(engine: EngineConfig, model: ModelSizes, heads: HeadsConfig) -> int:
    """Number of tokens that drafts come from, decided as an engine does."""
    if engine.draft_vocab is not None:
        return min(engine.draft_vocab or model.vocab, model.vocab)
    return heads.draft_vocabulary or model.vocab


def _loop(options: PredictOptions, run: RunConfig | None) -> LoopWork:
    seconds = None if options.other_seconds < 0 else options.other_seconds
    if run is None:
        return LoopWork(seconds)
    critic = run.ppo.advantages == "gae"
    return LoopWork(seconds, 2 + critic, 1 + critic, run.ppo.epochs)
