"""Findings: what a reader of a run should be warned about, each in one sentence with the next step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any

from medusa_ppo import metrics as m
from medusa_ppo.reports import wording as w
from medusa_ppo.reports.records import KILLED, NONFINITE, Run, number
from medusa_ppo.reports.summary import first_last, window_steps

STALE_UPDATES = 5
"""Serving heads this many policy updates old are called stale."""
KEPT_SHARE = 0.95
"""... when less than this share of the extra accepted tokens of the best stretch is left."""
LOGPROB_GAP_NATS = 0.05
"""float32 against float32 is near 0.0001, bfloat16 near 0.01: above this the engine and the actor are not the same policy."""
EXPOSED_SHARE = 0.1
KL_UPDATE_NATS = 0.05
TRUNCATED_SHARE = 0.5
COLLAPSED_ENTROPY_SHARE = 0.2
LENGTH_GROWTH = 1.5
NOTICEABLE_RATIO = 1.005
"""Of the times of whole steps: what is below is called the same time."""
SWAP_LOSS_SHARE = 0.2
"""A swap after which less than this share of the extra accepted tokens is left is called broken."""


@dataclass(frozen=True)
class Finding:
    """One warning: a stable code for programs, one sentence for people, and what to do."""

    code: str
    text: str
    do: str


Summary = dict[str, Any]
Check = Callable[[Run, Summary], Iterator[Finding]]
CHECKS: list[Check] = []


def find(run: Run, summary: Summary) -> list[Finding]:
    """All findings of a run, the gravest first."""
    return [finding for check in CHECKS for finding in check(run, summary)]


def _check(function: Check) -> Check:
    """One of the checks; their order in this file is that of the findings."""
    CHECKS.append(function)
    return function


@_check
def _stopped_early(run: Run, _: Summary) -> Iterator[Finding]:
    error = str(run.section("extras").get("error") or "").strip()
    finished = "the figures are those of the steps it finished."
    if run.status == "failed":
        yield Finding("failed", f"The run failed: {error.rstrip('.')}." if error else "The run failed.", "Mend the cause and resume.")
    elif run.status == "interrupted":
        yield Finding("interrupted", f"The run was stopped before its end; {finished}", "Resume it to go on.")
    elif run.status == KILLED:
        yield Finding("killed", f"The run's process is gone and left no word; {finished}", "Resume it to go on.")


@_check
def _unreadable(run: Run, _: Summary) -> Iterator[Finding]:
    if run.unreadable_lines:
        text = f"{run.unreadable_lines} line(s) of metrics.jsonl are unreadable and left out of every figure."
        yield Finding("unreadable_lines", text, "Check the disk, and whether two processes wrote there.")


@_check
def _not_finite(run: Run, _: Summary) -> Iterator[Finding]:
    found: dict[str, list[int]] = {}
    for step in run.steps:
        names = step.get(NONFINITE)
        for name in names if isinstance(names, list) else ():
            found.setdefault(str(name), []).append(step[m.STEP])
    found.pop(m.COMPANION_LOSS, None)  # Before the companion's first batch it has no loss: not a fault.
    for name, steps in found.items():
        text = f"{name} was not a finite number in {len(steps)} step(s), first in step {steps[0]}."
        yield Finding("not_finite", text, "Lower the learning rate, or look at that step's rollouts.")


@_check
def _broken_swap(run: Run, _: Summary) -> Iterator[Finding]:
    do = "Compare the checksum in the swap receipt with the published one; `medusa-ppo doctor` checks the engine."
    for before, after in pairwise(run.steps):
        old, new = number(before.get(m.MAL_SERVING)), number(after.get(m.MAL_SERVING))
        versions = number(before.get(m.HEADS_VERSION)), number(after.get(m.HEADS_VERSION))
        drafted = number(before.get(m.DRAFTS)) and number(after.get(m.DRAFTS))
        if None in versions or versions[0] == versions[1] or old is None or new is None or not drafted:
            continue
        if old > 1.1 and new - 1 < SWAP_LOSS_SHARE * (old - 1):
            swap = f"after heads version {versions[1]:.0f} came in (step {after[m.STEP]}: {old:.2f} to {new:.2f})"
            yield Finding("broken_swap", f"Acceptance fell to almost nothing {swap}.", do)


@_check
def _swap_alarm(run: Run, _: Summary) -> Iterator[Finding]:
    seen = 0.0
    for step in run.steps:
        alarms = number(step.get(m.SWAP_ALARMS)) or 0.0
        if alarms > seen:
            swap = f"New heads were accepted next to never in step {step[m.STEP]}, though replay had promised more"
            text = f"{swap}; the heads before went back in."
            yield Finding("swap_alarm", text, "Compare engine and companion: dtype, lm_head after the last sync, and `medusa-ppo doctor`.")
        seen = alarms


@_check
def _restarts(run: Run, _: Summary) -> Iterator[Finding]:
    for name, what in ((m.ENGINE_RESTARTS, "An engine"), (m.COMPANION_RESTARTS, "The companion")):
        times = max((number(step.get(name)) or 0.0 for step in run.steps), default=0.0)
        if times:
            text = f"{what} was lost and started again, {times:.0f} time(s). No step was lost."
            yield Finding("restarts", text, "Read the logs of Ray's workers, and mind the memory.")


@_check
def _drafting_did_not_pay(run: Run, summary: Summary) -> Iterator[Finding]:
    speedup, pairs = summary["rollout_speedup"], summary["rollout_speedup_pairs"]
    if speedup is not None and speedup < 1.0:
        text = f"Drafting did not pay in this run: {w.ratio(speedup)}, median of {pairs['count']} pair(s)."
        yield Finding("drafting_did_not_pay", text, "Draft fewer tokens (engine.num_drafts), or none while batches are large.")


@_check
def _plugin_did_not_pay(_: Run, summary: Summary) -> Iterator[Finding]:
    ratio, pairs = summary["step_ratio"], summary["step_pairs"]
    if ratio is not None and ratio >= NOTICEABLE_RATIO:
        seconds = f"{w.exact_seconds(pairs['with_s'])} against {w.exact_seconds(pairs['without_s'])}"
        text = f"The loop as a whole is slower with the plugin than without it: {seconds} a step, {w.more_time(ratio)}."
        do = "Give the companion cores or a device of its own, let it train less (companion.epochs), or do without where generation is a "
        yield Finding("plugin_did_not_pay", text, f"{do}small part of a step.")


@_check
def _worse_than_frozen(run: Run, summary: Summary) -> Iterator[Finding]:
    lengths = summary["mean_acceptance_length"]
    gain, error = lengths["gain"], lengths["gain_standard_error"]
    if gain is not None and gain < -2 * (error if error is not None else 0.0) - 1e-9:
        figures = f"{w.length(lengths['serving_replay'])} against {w.length(lengths['frozen'])}"
        text = f"The serving heads are worse than the frozen ones by replay ({figures})."
        yield Finding("worse_than_frozen", text, "Lower companion.learning_rate, or give it more prompts a step.")


@_check
def _stale(run: Run, summary: Summary) -> Iterator[Finding]:
    """Old heads are a fault only when they accept less than they once did: the gate may have found nothing better."""
    last = summary["staleness"]["last"]
    if last is None or last < STALE_UPDATES:
        return
    window = summary["window_steps"]
    lengths = [value for step in run.steps if number(step.get(m.DRAFTS)) and (value := number(step.get(m.MAL_SERVING))) is not None]
    means = [fmean(lengths[index : index + window]) for index in range(max(0, len(lengths) - window + 1))]
    fell = ""
    if means:
        if means[-1] - 1 >= KEPT_SHARE * (max(means) - 1):
            return
        fell = f", and tokens per engine step fell from {max(means):.2f} at their best to {means[-1]:.2f}"
    text = f"The heads got stale: in the last step they were {last:.0f} policy updates old{fell}."
    yield Finding("stale_heads", text, "See whether the companion still trains and whether its gate refuses candidates (replay chart).")


@_check
def _companion_stopped(run: Run, _: Summary) -> Iterator[Finding]:
    trained = run.column(m.COMPANION_TRAINED_TOKENS)
    final = next((value for value in reversed(trained) if value is not None), None)
    if not final:
        return
    since = next(index for index, value in enumerate(trained) if value == final)
    # One step without a trained batch is the overlap itself; a quarter of the run is a companion that stopped.
    if len(trained) - 1 - since > max(3, window_steps(len(trained))):
        text = f"The companion trained nothing after step {run.steps[since][m.STEP]}."
        yield Finding("companion_stopped", text, "Read its error in the log; PPO went on with the heads it had.")


@_check
def _dropped(run: Run, summary: Summary) -> Iterator[Finding]:
    dropped = summary["companion"]["batches_dropped"]
    if dropped:
        text = f"The companion's queue dropped {dropped} rollout batch(es): it is slower than the loop."
        do = "Heads learn from the newest ones. Give it more threads or a GPU, or set fewer companion.epochs."
        yield Finding("batches_dropped", text, do)


@_check
def _exposed(run: Run, summary: Summary) -> Iterator[Finding]:
    exposed, wall = summary["companion"]["exposed_s"], summary["wall_s"]
    if exposed and wall and exposed > EXPOSED_SHARE * wall:
        text = f"The loop spent {w.percent(exposed / wall)} of its time inside the plugin's hooks."
        yield Finding("plugin_exposed", text, "See whether companion.wait is on; else the hand-over of hidden states is slow.")


@_check
def _logprob_gap(run: Run, summary: Summary) -> Iterator[Finding]:
    gap = summary["logprob_gap"]["last"]
    if gap is not None and gap > LOGPROB_GAP_NATS:
        text = f"Log-prob mismatch is high: engine and actor differ by {gap:.3f} nats a token on average."
        yield Finding("logprob_gap", text, "Use the same dtype in engine and update, and check that actor syncs reach the engine.")


@_check
def _large_update(run: Run, _: Summary) -> Iterator[Finding]:
    recent = _first_and_recent(run, m.KL_UPDATE)[1]
    if recent is not None and recent > KL_UPDATE_NATS:
        text = f"The policy moves far in one update (KL {recent:.3f} nats in the last steps)."
        yield Finding("large_update", text, "Lower ppo.actor_learning_rate or ppo.epochs.")


@_check
def _truncated(run: Run, _: Summary) -> Iterator[Finding]:
    recent = _first_and_recent(run, m.TRUNCATED_FRAC)[1]
    if recent is not None and recent > TRUNCATED_SHARE:
        text = f"{w.percent(recent)} of the last responses were cut at the length limit, so their reward is a guess."
        yield Finding("truncated", text, "Raise sampling.max_new_tokens.")


@_check
def _collapsed(run: Run, _: Summary) -> Iterator[Finding]:
    first, recent = _first_and_recent(run, m.ENTROPY)
    if first and first > 0 and recent is not None and recent < COLLAPSED_ENTROPY_SHARE * first:
        text = f"Entropy fell from {first:.2f} to {recent:.2f} nats: part of a higher acceptance is the policy's own certainty."
        yield Finding("entropy_collapse", text, "Judge the heads by serving against frozen; raise ppo.kl_coefficient if variety matters.")


@_check
def _longer(run: Run, _: Summary) -> Iterator[Finding]:
    first, recent = _first_and_recent(run, m.RESPONSE_LENGTH)
    if first is not None and recent is not None and recent > LENGTH_GROWTH * first:
        text = f"Responses grew from {first:.0f} to {recent:.0f} tokens: the reward may pay for length."
        yield Finding("longer_responses", text, "Read some responses of the last steps.")


def _first_and_recent(run: Run, name: str) -> tuple[float | None, float | None]:
    """Means over the first and over the last window of steps."""
    means = first_last(run.column(name), window_steps(len(run.steps)))
    return means["first"], means["last"]
