"""build_summary: the figures of a run, each with one definition, and null if there is no
measurement.

SUMMARY_KEYS explains every key; docs/metrics.md is generated from it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from statistics import fmean, median, quantiles, stdev
from typing import Any

from medusa_ppo.contract import metrics as m
from medusa_ppo.reports.run_files import Run, number, numbers
from medusa_ppo.runtime import wording as w

WINDOW_SHARE = 4
"""The first and the last 1/4 of the steps ..."""
WINDOW_MOST = 20
"""... but at most this many are averaged for `first` and `last` figures."""
STEP_S = "step_s"
"""Key of a whole step's seconds in a run's comparison."""
StepPair = tuple[dict[str, float], dict[str, float]]
"""Seconds by phase, of a step with the plugin and of one without."""
PHASES = {
    m.GENERATE_S: "generate",
    m.SCORE_S: "score",
    m.UPDATE_S: "update",
    m.SYNC_S: "sync",
    m.SWAP_S: "swap",
}
"""Metrics of the phases of a step, and what a phase is called."""
PEAKS = {
    m.GENERATE_PEAK: "generate",
    m.SCORE_PEAK: "score",
    m.UPDATE_PEAK: "update",
    m.SYNC_PEAK: "sync",
}
"""Metrics of the memory peaks of these phases."""
LEDGER = ("engine", "actor", "reference", "critic", "reward")
"""Roles whose bytes on devices are counted."""

SUMMARY_KEYS: dict[str, str] = {
    "name": "Name of the run.",
    "status": (
        "`running`, `finished`, `interrupted`, `failed`, `killed` (its process is gone without a "
        "final status) or `unknown`."
    ),
    "started_at": "When the run started, UTC.",
    "wall_s": "Seconds since the start at the end of the last step.",
    "steps": "PPO steps with a line in metrics.jsonl.",
    "window_steps": (
        "Number of steps that `last` figures are taken over (`first` figures as well): a quarter of"
        " the run, at least 1, at most 20."
    ),
    "mean_acceptance_length.serving": (
        "Tokens per engine step from vLLM's counters over the last window: 1 + accepted / draft"
        " steps."
    ),
    "mean_acceptance_length.first": (
        "The same counters in the first step that drafted with published heads (heads version 1 or"
        " later)."
    ),
    "mean_acceptance_length.frozen": (
        "Replay estimate of the first published heads, never trained again; mean over the "
        "companion's judgements of published heads in the last window."
    ),
    "mean_acceptance_length.serving_replay": (
        "The heads that served at these judgements, by the same estimator on the same rollouts: "
        "compare `frozen` with this, not with `serving`."
    ),
    "mean_acceptance_length.gain": "`serving_replay` minus `frozen`.",
    "mean_acceptance_length.gain_standard_error": (
        "Standard error of that gain over its judgements; null for fewer than two."
    ),
    "mean_acceptance_length.replay_steps": (
        "Judgements behind the three replay figures; one that is repeated in later steps counts"
        " once."
    ),
    "drafted_frac": (
        "Share of the engine's steps that drafted, over the last window; acceptance lengths from"
        " counters are of these steps. Null: the engine did not choose."
    ),
    "acceptance_per_position": (
        "Accepted at position 1..K / draft steps, from vLLM's counters over the last window."
    ),
    "mal_per_engine": (
        "Tokens per engine step of each engine of a pool, from its counters over the last window: 1"
        " + accepted / draft steps. Of runs of earlier releases the mean of the steps in which it"
        " generated."
    ),
    "rollout_speedup": (
        "Median over all pairs of (tokens/s with drafting / tokens/s without), the same prompts,"
        " timed in turn."
    ),
    "rollout_speedup_pairs.against": (
        "What drafting was timed against. `vllm`: a separate engine without speculation, "
        "compiled, at vLLM's defaults, after the last step; `own`: this run's engine without "
        "drafts, in its paired steps; null: nothing."
    ),
    "rollout_speedup_pairs.count": "Number of pairs.",
    "rollout_speedup_pairs.min": "Smallest ratio.",
    "rollout_speedup_pairs.max": "Largest ratio.",
    "rollout_speedup_pairs.lower_quartile": (
        "A quarter of the pairs is below; null for fewer than four pairs."
    ),
    "rollout_speedup_pairs.upper_quartile": (
        "A quarter of the pairs is above; null for fewer than four pairs."
    ),
    "rollout_speedup_pairs.last": "The last pair's ratio.",
    "step_ratio": (
        "Seconds of a whole PPO step with the plugin / seconds without it (a separate engine at "
        "vLLM's defaults), on the same prompts in turn after the last step, both scaled to the "
        "mean of their generated tokens, for the median pair (the upper one of an even number): "
        "above 1 the plugin slows the loop down."
    ),
    "step_pairs.count": "Number of pairs.",
    "step_pairs.min": "Smallest ratio.",
    "step_pairs.max": "Largest ratio.",
    "step_pairs.with_s": (
        "Seconds of a step with the plugin, in the median pair, scaled as for step_ratio."
    ),
    "step_pairs.without_s": "Seconds of a step without it, in the same pair, scaled alike.",
    "step_pairs.generate_with_s": "Seconds of generation within `step_pairs.with_s`.",
    "step_pairs.generate_without_s": "Seconds of generation within `step_pairs.without_s`.",
    "actor_note": (
        "A note on the actor that belongs next to any figure, e.g. that it was grown by "
        "zero-gated neurons; null: none."
    ),
    "tokens_per_s.drafting": (
        "Response tokens per second with drafting, for the median pair (the larger of two)."
    ),
    "tokens_per_s.plain": "The same without drafting.",
    "tokens_per_s.rollouts": (
        "Response tokens per second of the run's own generation, mean over the last window."
    ),
    "reward.first": "Mean reward over the first window, without the KL penalty.",
    "reward.last": "The same over the last window.",
    "correct_frac.first": "Share of responses with the right answer, mean over the first window.",
    "correct_frac.last": "The same over the last window.",
    "companion.trained_tokens": "Positions the companion trained on.",
    "companion.optimizer_steps": "Optimizer steps it took.",
    "companion.passes": "Passes over a rollout batch, mean over the steps.",
    "companion.reasons": (
        "The reasons: pairs of a training state and its number of steps, the most frequent first."
    ),
    "companion.versions_published": "Versions of the heads it published.",
    "companion.versions_followed": (
        "Of these, the versions compared with their predecessor on batches after the swap."
    ),
    "companion.versions_worse": "Of those, the versions that were significantly worse.",
    "companion.batches_dropped": (
        "Rollout batches it dropped, because there was no room or newer policies had arrived."
    ),
    "companion.train_s": "Seconds it trained.",
    "companion.hidden_s": "Of these, seconds in which no hook of the loop waited for it.",
    "companion.exposed_s": "Seconds the loop spent inside the plugin's hooks.",
    "companion.saved_s": (
        "Seconds of generation saved in steps with drafts, compared with the first published heads,"
        " by replay."
    ),
    "companion.lost_s": (
        "Seconds that the companion took from the loop: in hooks, and on shared cores or devices."
    ),
    "companion.taken_frac": (
        "Share of the loop's seconds that training took; companion.share is the limit."
    ),
    "companion.net_s": ("Saved minus lost. For a loop without the plugin see step_ratio."),
    "warm_up.seconds": "Seconds of the warm-up before the first step; null: there was none.",
    "warm_up.tokens": "Response tokens that it trained and judged heads on.",
    "warm_up.before": (
        "Replay estimate of the heads before it, on its held-out prompts: tokens per engine step."
    ),
    "warm_up.after": "The same for the heads that it gave to the engine.",
    "staleness.last": (
        "Policy updates between the serving heads' last training batch and the last step's"
        " rollouts."
    ),
    "staleness.max": "The largest in the run.",
    "logprob_gap.last": (
        "Mean |engine log-prob - actor log-prob| in nats, mean over the last window."
    ),
    "phases_s.generate": "Seconds of rollout generation in the whole run.",
    "phases_s.score": "Seconds of the log-prob, value and reward passes.",
    "phases_s.update": "Seconds of the PPO updates.",
    "phases_s.sync": "Seconds to send the actor to the engine.",
    "phases_s.swap": "Seconds to swap heads into the engine.",
    "memory_peak_gib.generate": (
        "Peak memory of the loop's process during generation, over the run: torch's on its GPU, "
        "or resident."
    ),
    "memory_peak_gib.score": "The same during scoring.",
    "memory_peak_gib.update": "The same during the update.",
    "memory_peak_gib.sync": "The same during the sync.",
    "ledger.peak_gib": (
        "Peak memory of all roles on devices together: weights, gradients, moments, keys and"
        " values."
    ),
    **{f"ledger.{role}_gib": f"Peak memory of the {role}." for role in LEDGER},
    "ledger.offload_s": (
        "Seconds spent moving roles to host memory and back in a step, mean over the last window"
        " (unless ppo.placement is separate)."
    ),
    "ledger.offload_bytes": "Bytes copied for that, mean over the last window.",
    "ledger.wake_s": (
        "Seconds that the engine took to go to sleep and to wake up in a step, mean over the last"
        " window."
    ),
    "generate_score.seconds": (
        "Seconds from the start of generation to the end of scoring in a step, mean over the last"
        " window."
    ),
    "generate_score.idle_frac": (
        "Share of these in which engine or scoring was idle (mean of the two), mean over the last"
        " window."
    ),
    "actor_sync.seconds": ("Seconds to send the actor to the engines, mean over the last window."),
    "actor_sync.collect_s": (
        "Of these, seconds until its weights were collected from its processes and written."
    ),
    "actor_sync.bytes": "Bytes of the actor's weights that each engine read in the last step.",
    "versions": "Versions of the packages.",
    "extras": "Added by the program that wrote the run.",
}


def build_summary(run: Run) -> dict[str, Any]:
    """All figures of a run as nested plain data (keys: SUMMARY_KEYS). Missing data gives None,
    never an invented number.
    """
    window = window_steps(len(run.steps))
    pairs, against = speed_pairs(run)
    speedups = _present([pair.get(m.PAIR_SPEEDUP) for pair in pairs])
    # From one pair, so that they match its ratio.
    told = sorted(
        (pair for pair in pairs if pair[m.PAIR_PLAIN_TOKENS_PER_S]),
        key=lambda pair: pair[m.PAIR_SPEEDUP] or 0.0,
    )
    rates = told[len(told) // 2] if told else {}
    steps = step_pairs(run)
    middle = middle_pair(steps)
    # Without any steps the window is 0, and there is nothing to cut.
    last = run.steps[-window:]
    return {
        "name": run.name,
        "status": run.status,
        "started_at": run.meta.get("started_at"),
        "wall_s": _last(run.column(m.WALL_S)),
        "steps": len(run.steps),
        "window_steps": window,
        "mean_acceptance_length": _acceptance_lengths(run, last),
        "drafted_frac": _drafted_frac(run, window),
        "acceptance_per_position": acceptance_per_position(last),
        "mal_per_engine": mal_per_engine(last),
        "rollout_speedup": _median(speedups),
        "rollout_speedup_pairs": {**_spread(speedups), "against": against},
        "step_ratio": middle[0][STEP_S] / middle[1][STEP_S] if middle else None,
        "step_pairs": _step_figures(steps),
        "actor_note": run.meta.get("actor_note"),
        "tokens_per_s": {
            "drafting": rates.get(m.PAIR_DRAFTING_TOKENS_PER_S),
            "plain": rates.get(m.PAIR_PLAIN_TOKENS_PER_S),
            "rollouts": mean(run.column(m.TOKENS_PER_S)[-window:]),
        },
        "reward": first_last(run.column(m.REWARD_MEAN), window),
        "correct_frac": first_last(run.column(m.CORRECT_FRAC), window),
        "companion": _companion(run),
        "warm_up": {
            "seconds": _sum(run.column(m.WARM_UP_S)),
            "tokens": _whole(_sum(run.column(m.WARM_UP_TOKENS))),
            "before": _last(run.column(m.WARM_UP_BEFORE)),
            "after": _last(run.column(m.WARM_UP_AFTER)),
        },
        "staleness": {
            "last": _last(run.column(m.STALENESS)),
            "max": max(_present(run.column(m.STALENESS)), default=None),
        },
        "logprob_gap": {"last": mean(run.column(m.LOGPROB_GAP)[-window:])},
        "phases_s": {phase: _sum(run.column(metric)) for metric, phase in PHASES.items()},
        "memory_peak_gib": {
            phase: max(_present(run.column(metric)), default=None)
            for metric, phase in PEAKS.items()
        },
        "ledger": _ledger(run, window),
        "generate_score": {
            "seconds": mean(run.column(m.GENERATE_SCORE_S)[-window:]),
            "idle_frac": mean(run.column(m.GENERATE_SCORE_IDLE)[-window:]),
        },
        "actor_sync": {
            "seconds": mean(run.column(m.SYNC_S)[-window:]),
            "collect_s": mean(run.column(m.SYNC_COLLECT_S)[-window:]),
            "bytes": _last(run.column(m.SYNC_BYTES)),
        },
        "versions": run.section("versions"),
        "extras": run.section("extras"),
    }


def _drafted_frac(run: Run, window: int) -> float | None:
    counts = [row["steps"] for row in run.draft_choices(window)]
    steps = sum(sum(row) for row in counts)
    return 1 - sum(row[0] for row in counts if row) / steps if steps else None


def _ledger(run: Run, window: int) -> dict[str, Any]:
    steps = [
        step[m.LEDGER_ROLES] for step in run.steps if isinstance(step.get(m.LEDGER_ROLES), dict)
    ]
    means = {"offload_s": m.OFFLOAD_S, "offload_bytes": m.OFFLOAD_BYTES, "wake_s": m.ENGINE_WAKE_S}
    return {
        "peak_gib": max(_present(run.column(m.LEDGER_PEAK)), default=None),
        **{
            f"{role}_gib": max(_present([step.get(role) for step in steps]), default=None)
            for role in LEDGER
        },
        **{name: mean(run.column(metric)[-window:]) for name, metric in means.items()},
    }


def ledger_rows(ledger: dict[str, Any] | None) -> list[tuple[str, str]]:
    """Rows of the report; none for runs without a ledger."""
    if ledger is None or ledger["peak_gib"] is None:
        return []
    gib_by_role = {role: ledger[f"{role}_gib"] for role in LEDGER}
    roles = ", ".join(
        f"{role} {w.plain(gib)}" for role, gib in gib_by_role.items() if gib is not None
    )
    rows = [
        (
            "Peak memory of all roles on devices, and of each role, GiB",
            f"{w.plain(ledger['peak_gib'])}; {roles}",
        )
    ]
    if ledger["offload_s"] is not None:
        figure = (
            f"{w.exact_seconds(ledger['offload_s'])}"
            f" ({w.plain((ledger['offload_bytes'] or 0) / 1024**2)} MiB)"
        )
        rows.append(("Roles to host memory and back, in each step", figure))
    if ledger["wake_s"] is not None:
        rows.append(
            ("The engine asleep and awake again, in each step", w.exact_seconds(ledger["wake_s"]))
        )
    return rows


def window_steps(steps: int) -> int:
    """Number of steps behind the `first` and `last` figures of a run of this length."""
    return min(WINDOW_MOST, max(1, steps // WINDOW_SHARE)) if steps else 0


def mean_acceptance_length(steps: Sequence[dict[str, Any]]) -> float | None:
    """1 + accepted / draft steps from the counters of these steps; None when nothing was
    drafted.
    """
    drafts = accepted = 0.0
    for step in steps:
        some = number(step.get(m.DRAFTS))
        taken = number(step.get(m.ACCEPTED))
        if some and taken is not None:
            drafts = drafts + some
            accepted = accepted + taken
    # Sums first, then the ratio: a mean of the steps' ratios would give a short step the weight of
    # a long one.
    return 1.0 + accepted / drafts if drafts else None


def acceptance_per_position(steps: Sequence[dict[str, Any]]) -> list[float] | None:
    """Accepted at position k / draft steps over these steps, weighted by draft steps; None when
    nothing was drafted.

    A step that drafted fewer tokens counts as not accepted at the later positions: the rate is per
    draft step.
    """
    drafts = 0.0
    accepted: list[float] = []
    for step in steps:
        some = number(step.get(m.DRAFTS))
        rates = numbers(step.get(m.ACCEPTANCE_PER_POSITION))
        if not some or rates is None:
            continue
        drafts += some
        # If K is chosen, a later step may have more positions.
        accepted += [0.0] * (len(rates) - len(accepted))
        for position, rate in enumerate(rates):
            accepted[position] += rate * some
    return [taken / drafts for taken in accepted] if drafts else None


def mal_per_engine(steps: Sequence[dict[str, Any]]) -> list[float | None] | None:
    """Each engine's 1 + accepted / draft steps over these steps, None for one that drafted nothing;
    None without a pool.
    """
    counted: dict[int, list[dict[str, float]]] = {}
    for step in steps:
        drafts = numbers(step.get(m.DRAFTS_PER_ENGINE)) or []
        accepted = numbers(step.get(m.ACCEPTED_PER_ENGINE)) or []
        # A damaged line may have lists of different lengths.
        for index, (some, taken) in enumerate(zip(drafts, accepted, strict=False)):
            counted.setdefault(index, []).append({m.DRAFTS: some, m.ACCEPTED: taken})
    if not counted:
        return _mean_per_engine(steps)
    return [mean_acceptance_length(counted[index]) for index in sorted(counted)]


def _mean_per_engine(steps: Sequence[dict[str, Any]]) -> list[float | None] | None:
    """The mean of the steps in which an engine generated something, of lines of earlier releases,
    which lack its counters.
    """
    lengths: dict[int, list[float]] = {}
    engines = 0
    for step in steps:
        found = numbers(step.get(m.MAL_PER_ENGINE))
        tokens = numbers(step.get(m.TOKENS_PER_ENGINE))
        if found is None or tokens is None:
            continue
        engines = max(engines, len(found))
        # A damaged line may have lists of different lengths.
        for index, (length, generated) in enumerate(zip(found, tokens, strict=False)):
            # An idle engine has a length of 1 by definition, and no acceptance.
            if generated:
                lengths.setdefault(index, []).append(length)
    if not engines:
        return None
    return [fmean(lengths[index]) if index in lengths else None for index in range(engines)]


def speed_pairs(run: Run) -> tuple[list[dict[str, float | None]], str | None]:
    """Tokens/s with drafts and without, pair by pair, and against what: those after the last step
    if there are any.
    """
    columns = (m.PAIR_DRAFTING_TOKENS_PER_S, m.PAIR_PLAIN_TOKENS_PER_S, m.PAIR_SPEEDUP)
    # A separate engine at vLLM's defaults is what a user would have; this run's engine without
    # drafts is only a substitute.
    for lines, against in ((_entries(run, "rollouts"), "vllm"), (run.steps, "own")):
        pairs = [{name: number(line.get(name)) for name in columns} for line in lines]
        pairs = [pair for pair in pairs if pair[m.PAIR_SPEEDUP] is not None]
        if pairs:
            return pairs, against
    return [], None


def step_pairs(run: Run) -> list[StepPair]:
    """Seconds of the steps taken in turn with and without the plugin, and of their phases, by the
    names of the metrics.

    `step_s` is the whole step; unreadable pairs are left out.
    """
    pairs = [
        (_seconds(entry.get("with")), _seconds(entry.get("without")))
        for entry in _entries(run, "steps")
    ]
    return [(ours, plain) for ours, plain in pairs if ours.get(STEP_S) and plain.get(STEP_S)]


def _seconds(side: object) -> dict[str, float]:
    """Seconds by phase of one side of a pair, without anything that is not a number."""
    if not isinstance(side, dict):
        return {}
    found = {str(name): number(given) for name, given in side.items()}
    return {name: value for name, value in found.items() if value is not None}


def _entries(run: Run, kind: str) -> list[dict[str, Any]]:
    """One kind of entry of the comparison after the last step; run.json may contain anything."""
    entries = run.section("comparison").get(kind)
    if not isinstance(entries, list):
        return []
    return [entry for entry in entries if isinstance(entry, dict)]


def middle_pair(pairs: Sequence[StepPair], name: str = STEP_S) -> StepPair | None:
    """The pair with the median ratio of seconds in a phase (the upper one of an even number): its
    seconds match its ratio, unlike separate medians of each side.
    """
    ordered = sorted(pairs, key=lambda pair: pair[0][name] / pair[1][name])
    return ordered[len(ordered) // 2] if ordered else None


def _step_figures(pairs: list[StepPair]) -> dict[str, float | int | None]:
    ratios = [ours[STEP_S] / plain[STEP_S] for ours, plain in pairs]
    ours, plain = middle_pair(pairs) or ({}, {})
    figures: dict[str, float | int | None] = {
        "count": len(pairs),
        "min": min(ratios, default=None),
        "max": max(ratios, default=None),
    }
    for prefix, name in (("", STEP_S), ("generate_", m.GENERATE_S)):
        figures |= {f"{prefix}with_s": ours.get(name), f"{prefix}without_s": plain.get(name)}
    return figures


def judgements(steps: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first of the steps with each judgement of the companion. Its estimates stand in every
    step until the next one, and counting them again would make one noisy holdout look certain.
    """
    found = []
    before: tuple[float | None, ...] = ()
    for step in steps:
        estimates = tuple(
            number(step.get(name))
            for name in (m.REPLAY_SERVING, m.REPLAY_CANDIDATE, m.REPLAY_FROZEN)
        )
        if not any(estimates):
            continue
        if m.REPLAY_HEADS_VERSION in step:
            # Lines of earlier releases have a policy version that is not always the judged one.
            estimates += (number(step.get(m.REPLAY_POLICY_VERSION)),)
        if estimates != before:
            found.append(step)
        before = estimates
    return found


def replay_pairs(steps: Sequence[dict[str, Any]]) -> list[tuple[float, float]]:
    """Replay estimates of the serving and of the frozen heads, for the judgements with both."""
    pairs = [
        (number(step.get(m.REPLAY_SERVING)), number(step.get(m.REPLAY_FROZEN)))
        for step in judgements(steps)
    ]
    return [
        (serving, frozen) for serving, frozen in pairs if serving is not None and frozen is not None
    ]


def _of_published_heads(run: Run, last: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The steps whose replay estimates are of published heads. The first judgements are of the
    heads that the run started with, and the batch that was last judged may be older than the step.
    """
    versions = _last(run.column(m.VERSIONS_PUBLISHED))
    if not versions:
        return list(last)
    served = (step for step in run.steps if (number(step.get(m.HEADS_VERSION)) or 0) >= 1)
    since = number(next(served, {}).get(m.POLICY_VERSION))

    def published(step: dict[str, Any]) -> bool:
        version = number(step.get(m.REPLAY_HEADS_VERSION))
        # Lines of earlier releases don't say which heads were judged. Only with a single version
        # can the heads before it be told from it.
        if version is not None or versions != 1:
            return version is None or version >= 1
        judged = number(step.get(m.REPLAY_POLICY_VERSION))
        if since is not None and judged is not None:
            return judged >= since
        return number(step.get(m.HEADS_VERSION)) != 0

    return [step for step in last if published(step)]


def _acceptance_lengths(run: Run, last: Sequence[dict[str, Any]]) -> dict[str, float | int | None]:
    # Both from the same steps: means over different steps would compare rollouts, not heads.
    both = replay_pairs(_of_published_heads(run, last))
    gains = [serving - frozen for serving, frozen in both]
    published = (
        step
        for step in run.steps
        if (number(step.get(m.HEADS_VERSION)) or 0) >= 1 and number(step.get(m.DRAFTS))
    )
    first = next(published, None)
    return {
        "serving": mean_acceptance_length(last),
        "first": mean_acceptance_length([first]) if first else None,
        "frozen": mean([frozen for _, frozen in both]),
        "serving_replay": mean([serving for serving, _ in both]),
        "gain": mean(gains),
        "gain_standard_error": stdev(gains) / math.sqrt(len(gains)) if len(gains) > 1 else None,
        "replay_steps": len(both),
    }


def _companion(run: Run) -> dict[str, Any]:
    told = [step.get(m.COMPANION_REASON) for step in run.steps]
    reasons = Counter(reason for reason in told if isinstance(reason, str))
    saved_s = _sum(run.column(m.COMPANION_SAVED_S))
    lost_s = _sum(run.column(m.COMPANION_LOST_S))
    return {
        "trained_tokens": _whole(_last(run.column(m.COMPANION_TRAINED_TOKENS))),
        "optimizer_steps": _whole(_last(run.column(m.COMPANION_STEPS))),
        "passes": mean(run.column(m.COMPANION_PASSES)),
        "reasons": [[reason, steps] for reason, steps in reasons.most_common()] or None,
        "versions_published": _whole(_last(run.column(m.VERSIONS_PUBLISHED))),
        "versions_followed": _whole(_last(run.column(m.VERSIONS_FOLLOWED))),
        "versions_worse": _whole(_last(run.column(m.VERSIONS_WORSE))),
        "batches_dropped": _whole(_last(run.column(m.COMPANION_DROPPED))),
        "train_s": _sum(run.column(m.COMPANION_TRAIN_S)),
        "hidden_s": _sum(run.column(m.COMPANION_HIDDEN_S)),
        "exposed_s": _sum(run.column(m.PLUGIN_EXPOSED_S)),
        "saved_s": saved_s,
        "lost_s": lost_s,
        "taken_frac": _last(run.column(m.COMPANION_TAKEN)),
        "net_s": None if saved_s is None or lost_s is None else saved_s - lost_s,
    }


def _spread(ratios: list[float]) -> dict[str, float | int | None]:
    """Count, range and quartiles of ratios. With fewer than four, quartiles would say no more than
    the range.
    """
    lower: float | None = None
    upper: float | None = None
    if len(ratios) >= 4:
        # `inclusive` keeps quartiles within the range: these pairs are the whole population.
        lower, _, upper = quantiles(ratios, n=4, method="inclusive")
    return {
        "count": len(ratios),
        "min": min(ratios, default=None),
        "max": max(ratios, default=None),
        "lower_quartile": lower,
        "upper_quartile": upper,
        "last": ratios[-1] if ratios else None,
    }


def _present(column: Sequence[float | None]) -> list[float]:
    return [value for value in column if value is not None]


def _last(column: Sequence[float | None]) -> float | None:
    return next((value for value in reversed(column) if value is not None), None)


def _sum(column: Sequence[float | None]) -> float | None:
    values = _present(column)
    # An exact sum: a run has thousands of steps, and sums of seconds are subtracted from each
    # other.
    return math.fsum(values) if values else None


def _median(column: Sequence[float | None]) -> float | None:
    values = _present(column)
    return median(values) if values else None


def mean(column: Sequence[float | None]) -> float | None:
    """Mean of the measured values; None if there are none."""
    values = _present(column)
    return fmean(values) if values else None


def first_last(column: Sequence[float | None], window: int) -> dict[str, float | None]:
    """Means over the first and the last window of steps; None if nothing was measured."""
    return {"first": mean(column[:window]), "last": mean(column[-window:])}


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)
