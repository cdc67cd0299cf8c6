"""Findings: warnings about a run, each with what to do next."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise
from statistics import fmean, median
from typing import Any

from medusa_ppo.config.run_config import OFF
from medusa_ppo.contract import metrics as m
from medusa_ppo.reports.expected_speed import expected_speed
from medusa_ppo.reports.run_files import KILLED, NONFINITE, Run, number
from medusa_ppo.reports.summary import (
    first_last,
    judgements,
    mean,
    mean_acceptance_length,
    window_steps,
)
from medusa_ppo.runtime import wording as w

STALE_UPDATES = 5
"""Serving heads count as stale from this many policy updates on ..."""
KEPT_SHARE = 0.95
"""... if they have lost acceptance: less than this share of the extra tokens per step that they
gained at their best, or, where candidates are judged beside them, of those of the candidates.
"""
LOGPROB_GAP_NATS = 0.05
"""float32 against float32 is near 0.0001, bfloat16 near 0.01: above this the engine and the actor
are not the same policy.
"""
IMPORTANCE_CUT_SHARE = 0.01
"""Share of tokens that are far more likely under the actor than under the engine: above this the
update learns from a different policy's tokens.
"""
EXPOSED_SHARE = 0.1
MOST_EVENTS = 10
"""Logged warnings that a report shows."""
KL_UPDATE_NATS = 0.05
TRUNCATED_SHARE = 0.5
COLLAPSED_ENTROPY_SHARE = 0.2
LENGTH_GROWTH = 1.5
NEVER_PAID_SHARE = 0.95
"""An engine that drafted nothing in this share of its steps would be at least as fast without being
set up for drafts.
"""
ENOUGH_STEPS = 1000
"""Engine steps that this claim takes."""
CURVE_STEPS = 10
"""Shorter curves are not judged."""
JUMP = 8
"""From one step to the next, a change of the mean reward counts as a jump if it is more than this
many times the median change: by chance alone, one change in ten million is. With few changes the
median itself is random, so n changes require 1 + 10 / n times as much. Steps without a change don't
count: where few answers are right most have none, and a single right answer would be a jump.
"""
NO_CHANGE = 1e-6
"""Changes below this share of the largest one are rounding."""
JUMP_ALONE = 2
"""... and more than this many times its neighbours: in a quick but steady rise, all are large."""
CRITIC_STEPS = 20
"""Steps that a critic gets to learn something before it is judged."""
VALUE_LOSS_KEPT = 0.9
"""A value loss has not fallen if it is still above this share of what it was at first."""
EXPLAINED_SHARE = 0.1
"""A critic that explains less than this share of the returns' variance knows next to nothing."""
STILL_REWARD = 0.2
"""Mean rewards this close to each other, relative to the larger, count as equal."""
FLAT_KL_NATS = 1e-6
"""Nats a token: a policy that moved less counts as unmoved, since rounding alone makes as much."""
FAR_KL_NATS = 0.5
"""Nats a token above which a policy is far from its reference, however it got there."""
RUNAWAY_KL_NATS = 0.15
RUNAWAY_GROWTH = 2.5
"""A KL above this that grew by RUNAWAY_GROWTH since the middle of the run is running away."""
NOTICEABLE_RATIO = 1.005
"""Relative difference of step times below which they count as equal."""
WORSE_BY_CHANCE = 0.025
"""Share of versions as good as their predecessor that are counted as worse: whose 95 % interval
lies below 0 (`cycle.CERTAIN`).
"""
CHANCE_OF_SO_MANY = 0.01
"""A count of worse versions that chance reaches more rarely than this is a finding."""
SWAP_LOSS_SHARE = 0.2
"""A swap after which less than this share of the extra accepted tokens is left is called broken ...
"""
SWAP_DRAFTS = 200
"""... if there are this many draft steps before and after it, as for the plugin's own watch: an
engine that chooses to draft nothing has a handful, of its trials.
"""
MOST_SWAPS = 3
"""Broken swaps that a report names one by one."""


@dataclass(frozen=True)
class Finding:
    """One warning: a stable code for programs, one sentence for people, and what to do."""

    code: str
    text: str
    do: str


Summary = dict[str, Any]


def find(run: Run, summary: Summary) -> list[Finding]:
    """All findings of a run, the most serious first."""
    return [
        *_of_the_run(run, summary),
        *_of_swaps(run, summary),
        *_of_worth(run, summary),
        *_of_the_prediction(run, summary),
        *_of_heads(run, summary),
        *_of_the_companion(run, summary),
        *_of_ppo(run, summary),
        *_of_the_curves(run, summary),
        *_logged(run, summary),
    ]


def _of_the_run(run: Run, _: Summary) -> Iterator[Finding]:
    error = str(run.section("extras").get("error") or "").strip()
    finished = "the figures cover the steps that it finished."
    if run.status == "failed":
        yield Finding(
            "failed",
            f"The run failed: {error.rstrip('.')}." if error else "The run failed.",
            "Fix the cause and resume.",
        )
    elif run.status == "interrupted":
        yield Finding(
            "interrupted", f"The run was stopped early; {finished}", "Resume it to continue."
        )
    elif run.status == KILLED:
        yield Finding(
            "killed",
            f"The run's process is gone without a final status; {finished}",
            "Resume it to continue.",
        )
    if run.unreadable_lines:
        text = (
            f"{run.unreadable_lines} line(s) of metrics.jsonl are unreadable and left out of every"
            " figure."
        )
        yield Finding(
            "unreadable_lines", text, "Check the disk, and whether two processes wrote there."
        )
    found: dict[str, list[int]] = {}
    for step in run.steps:
        names = step.get(NONFINITE)
        for name in names if isinstance(names, list) else ():
            found.setdefault(str(name), []).append(step[m.STEP])
    # Before the companion's first batch there is no loss, which is not a fault.
    found.pop(m.COMPANION_LOSS, None)
    for name, steps in found.items():
        text = f"{name} was not a finite number in {len(steps)} step(s), first in step {steps[0]}."
        yield Finding(
            "not_finite", text, "Lower the learning rate, or inspect that step's rollouts."
        )


def _of_swaps(run: Run, _: Summary) -> Iterator[Finding]:
    do = (
        "Compare the checksum in the swap receipt with the published one; `medusa-ppo doctor`"
        " checks the engine."
    )
    broken = list(_broken_swaps(run))
    for version, first, old, new in broken[:MOST_SWAPS]:
        swap = f"after heads version {version} came in (step {first}: {old:.2f} to {new:.2f})"
        yield Finding("broken_swap", f"Acceptance fell to almost nothing {swap}.", do)
    if more := len(broken[MOST_SWAPS:]):
        yield Finding("broken_swap", f"It fell like that after {more} more version(s).", do)
    seen = 0.0
    for step in run.steps:
        alarms = number(step.get(m.SWAP_ALARMS)) or 0.0
        if alarms > seen:
            swap = (
                f"Drafts of new heads were hardly ever accepted in step {step[m.STEP]}, though "
                "replay had predicted more"
            )
            do = (
                "Compare engine and companion: dtype, lm_head after the last sync, and `medusa-ppo"
                " doctor`."
            )
            yield Finding("swap_alarm", f"{swap}; the previous heads went back in.", do)
        seen = alarms
    for name, what in ((m.ENGINE_RESTARTS, "An engine"), (m.COMPANION_RESTARTS, "The companion")):
        # These counters cover the whole run: the largest is the last, even if later lines lack it.
        times = max((number(step.get(name)) or 0.0 for step in run.steps), default=0.0)
        if times:
            text = f"{what} was lost and restarted, {times:.0f} time(s). No step was lost."
            yield Finding("restarts", text, "Read the logs of Ray's workers, and check the memory.")


def _broken_swaps(run: Run) -> Iterator[tuple[int, int, float, float]]:
    """Version, its first step, and the acceptance before and after, of each swap after which almost
    nothing was accepted.
    """
    # Lines from other loops, or damaged ones, may lack any of these.
    drafted = [
        step
        for step in run.steps
        if number(step.get(m.HEADS_VERSION)) is not None
        and number(step.get(m.DRAFTS))
        and number(step.get(m.ACCEPTED)) is not None
    ]
    stretches = [list(steps) for _, steps in groupby(drafted, key=lambda s: s[m.HEADS_VERSION])]
    for before, after in pairwise(stretches):
        old, new = _length_of_enough(reversed(before)), _length_of_enough(after)
        # Heads whose drafts were hardly ever accepted before can't lose much by a swap.
        if old is None or new is None or old <= 1.1:
            continue
        if new - 1 < SWAP_LOSS_SHARE * (old - 1):
            yield int(after[0][m.HEADS_VERSION]), int(after[0][m.STEP]), old, new


def _length_of_enough(steps: Iterable[dict[str, Any]]) -> float | None:
    """Acceptance over the first of these steps that have SWAP_DRAFTS draft steps; None: there are
    fewer.
    """
    taken: list[dict[str, Any]] = []
    drafts = 0.0
    for step in steps:
        taken.append(step)
        drafts += step[m.DRAFTS]
        if drafts >= SWAP_DRAFTS:
            return mean_acceptance_length(taken)
    return None


def _of_worth(run: Run, summary: Summary) -> Iterator[Finding]:
    speedup = summary["rollout_speedup"]
    count = summary["rollout_speedup_pairs"]["count"]
    if speedup is not None and speedup < 1.0:
        text = f"Drafting did not pay in this run: {w.ratio(speedup)}, median of {count} pair(s)."
        yield Finding(
            "drafting_did_not_pay",
            text,
            "Draft fewer tokens (engine.num_drafts), or none while batches are large.",
        )
    counts = [row["steps"] for row in run.draft_choices()]
    steps = sum(sum(row) for row in counts)
    without = sum(row[0] for row in counts if row)
    if steps >= ENOUGH_STEPS and without >= NEVER_PAID_SHARE * steps:
        text = (
            f"Drafts were not worth their time in {w.percent(without / steps)} of the engine's"
            " steps."
        )
        start = f"Start the next run without the plugin ({' '.join(OFF)})"
        do = f"{start}."
        runner, stop_below = run.setting("engine", "runner"), run.setting("engine", "stop_below")
        if runner == "v1" or stop_below:
            named = "engine.stop_below" if stop_below else "engine.runner=v1"
            do = (
                f"{start}: with {named} an engine can't schedule steps ahead, as vLLM does by"
                " default on a GPU."
            )
        yield Finding("drafts_never_paid", text, do)
    ratio = summary["step_ratio"]
    pairs = summary["step_pairs"]
    if ratio is not None and ratio >= NOTICEABLE_RATIO:
        seconds = (
            f"{w.exact_seconds(pairs['with_s'])} against {w.exact_seconds(pairs['without_s'])}"
        )
        text = (
            f"The loop as a whole is slower with the plugin than without it: {seconds} a step,"
            f" {w.more_time(ratio)}."
        )
        do = (
            "Give the companion its own cores or device, let it train less (companion.epochs), or "
            f"do without the plugin ({' '.join(OFF)}) if generation is a small part of a step."
        )
        yield Finding("plugin_did_not_pay", text, do)


def _of_the_prediction(run: Run, summary: Summary) -> Iterator[Finding]:
    """Rollouts that gain less than they should on such a GPU: something other than acceptance is
    wrong.
    """
    measured = summary["rollout_speedup"]
    if measured is None:
        return
    expected = expected_speed(run, summary["acceptance_per_position"])
    if expected is not None and measured < expected.speedup.low:
        text = (
            f"Rollouts were {w.ratio(measured)} as fast as without drafts, but"
            f" {expected.speedup} is predicted for this acceptance on {expected.machine}."
        )
        yield Finding(
            "slower_than_predicted",
            text,
            "Look for other programs on the GPU, or eager engines (engine.enforce_eager); "
            "`medusa-ppo predict` prints commands that measure rollouts alone.",
        )


def _of_heads(run: Run, summary: Summary) -> Iterator[Finding]:
    lengths = summary["mean_acceptance_length"]
    gain = lengths["gain"]
    error = lengths["gain_standard_error"]
    # Two standard errors: replay on a small holdout fluctuates, and one holdout alone says nothing.
    # The last term prevents a warning about equal heads because of rounding.
    if gain is not None and error is not None and gain < -2 * error - 1e-9:
        figures = f"{w.length(lengths['serving_replay'])} against {w.length(lengths['frozen'])}"
        text = f"The serving heads are worse than the frozen ones by replay ({figures})."
        yield Finding(
            "worse_than_frozen",
            text,
            "Lower companion.learning_rate (the figure companion_learning_rate is the last step's),"
            " or give it more prompts a step.",
        )
    last = summary["staleness"]["last"]
    window = summary["window_steps"]
    if last is None or last < STALE_UPDATES:
        return
    # Old heads are a fault only if their acceptance has fallen: the gate may have found nothing
    # better.
    drafted = [step for step in run.steps if number(step.get(m.DRAFTS))]
    lengths = [number(step.get(m.MAL_SERVING)) for step in drafted]
    served = [length for length in lengths if length is not None]
    # Single steps are noisy, so windows as long as the summary's are compared.
    windows = range(max(0, len(served) - window + 1))
    means = [fmean(served[start : start + window]) for start in windows]
    fell = ""
    if means:
        if means[-1] - 1 >= KEPT_SHARE * (max(means) - 1):
            return
        fell = (
            f", and tokens per engine step fell from {max(means):.2f} at their best to"
            f" {means[-1]:.2f}"
        )
    if _nothing_is_better(run, window):
        return
    text = f"The heads are stale: in the last step they were {last:.0f} policy updates old{fell}."
    yield Finding(
        "stale_heads",
        text,
        "Check whether the companion still trains and whether its gate refuses candidates (replay "
        "chart).",
    )


def _nothing_is_better(run: Run, window: int) -> bool:
    """Whether candidates were judged in the last steps and the serving heads are as good: then the
    text itself has become harder to foresee, and the heads are not to blame.
    """
    judged = [
        (serving, candidate)
        for step in judgements(run.steps[-window:])
        if (serving := number(step.get(m.REPLAY_SERVING))) is not None
        and (candidate := number(step.get(m.REPLAY_CANDIDATE))) is not None
    ]
    if not judged:
        return False
    serving, candidate = (fmean(lengths) - 1 for lengths in zip(*judged, strict=True))
    return serving >= KEPT_SHARE * candidate


def _versions_worse(summary: Summary) -> Iterator[Finding]:
    followed = summary["companion"]["versions_followed"] or 0
    worse = summary["companion"]["versions_worse"] or 0
    if worse and (chance := _chance_of(worse, followed)) < CHANCE_OF_SO_MANY:
        yield Finding(
            "versions_worse",
            f"{worse} of {followed} versions were significantly worse than the heads before them,"
            f" on later batches; by chance so many are worse in {w.percent(chance)} of the runs.",
            "Raise companion.gate_confidence or ppo.prompts_per_step, or lower"
            " companion.learning_rate (the figure companion_learning_rate is the last step's).",
        )


def _chance_of(worse: int, followed: int) -> float:
    """How often chance alone counts so many versions as worse, or more. By logarithms: from 1,030
    versions on the binomial coefficients fit no float.
    """
    return sum(
        math.exp(
            math.lgamma(followed + 1)
            - math.lgamma(count + 1)
            - math.lgamma(followed - count + 1)
            + count * math.log(WORSE_BY_CHANCE)
            + (followed - count) * math.log1p(-WORSE_BY_CHANCE)
        )
        for count in range(worse, followed + 1)
    )


def _of_the_companion(run: Run, summary: Summary) -> Iterator[Finding]:
    yield from _versions_worse(summary)
    trained = run.column(m.COMPANION_TRAINED_TOKENS)
    # The first step with the counter's final value: nothing was trained after it.
    final = next((value for value in reversed(trained) if value is not None), None)
    since = trained.index(final) if final else len(trained)
    # Steps with zero passes don't count: the companion was sent nothing, as there was nothing to
    # gain.
    rests = sum(step.get(m.COMPANION_PASSES) == 0 for step in run.steps[since:])
    # One step without a trained batch is normal overlap; a quarter of the run means that the
    # companion stopped.
    if len(trained) - 1 - since - rests > max(3, window_steps(len(trained))):
        text = f"The companion has not trained since step {run.steps[since][m.STEP]}."
        yield Finding(
            "companion_stopped",
            text,
            "Read its error in the log; PPO continued with the heads it had.",
        )
    dropped = summary["companion"]["batches_dropped"]
    exposed = _exposed_beside_turns(summary["companion"])
    wall = summary["wall_s"]
    if dropped:
        text = (
            f"The companion's queue dropped {dropped} rollout batch(es): it is slower than the"
            " loop."
        )
        do = (
            "Heads learn from the newest batches. Give the companion more threads or a GPU, or "
            "lower companion.epochs."
        )
        yield Finding("batches_dropped", text, do)
    if exposed and wall and exposed > EXPOSED_SHARE * wall:
        text = (
            f"The loop spent {w.percent(exposed / wall)} of its time inside the plugin's hooks,"
            " the companion's turns left out."
        )
        yield Finding(
            "plugin_exposed",
            text,
            "Check whether companion.wait is on; if not, handing over hidden states is slow.",
        )


def _exposed_beside_turns(companion: dict[str, Any]) -> float | None:
    """Seconds inside the plugin's hooks without those in which the loop waited for training that
    has a budget.
    """
    exposed, train, hidden = (companion[name] for name in ("exposed_s", "train_s", "hidden_s"))
    if companion["taken_frac"] is None or None in (exposed, train, hidden):
        return exposed
    return exposed - (train - hidden)


def _of_ppo(run: Run, _: Summary) -> Iterator[Finding]:
    gap = _recent_of_the_newest_actor(run, m.LOGPROB_GAP)
    if gap is not None and gap > LOGPROB_GAP_NATS:
        text = (
            f"Log-prob mismatch is high: engine and actor differ by {gap:.3f} nats a token on"
            " average."
        )
        yield Finding(
            "logprob_gap",
            text,
            "Use the same dtype in engine and update, and check that actor syncs reach the engine.",
        )
    far = _recent_of_the_newest_actor(run, m.IMPORTANCE_CUT)
    if far is not None and far > IMPORTANCE_CUT_SHARE:
        text = (
            f"{w.percent(far)} of the last tokens are far more likely under the actor than under "
            "the engine that sampled them."
        )
        yield Finding(
            "off_policy",
            text,
            "Set ppo.importance_bound (2 is usual), and engine.dtype to model.dtype.",
        )
    skipped = sum(number(step.get(m.STEPS_SKIPPED)) or 0.0 for step in run.steps)
    if skipped:
        text = (
            f"{skipped:.0f} optimizer step(s) were skipped because their gradient was not finite."
        )
        yield Finding("steps_skipped", text, "Lower the learning rate, or look for huge rewards.")
    moved = _first_and_recent(run, m.KL_UPDATE)[1]
    if moved is not None and moved > KL_UPDATE_NATS:
        text = f"The policy moves far in one update (KL {moved:.3f} nats in the last steps)."
        yield Finding("large_update", text, "Lower ppo.actor_learning_rate or ppo.epochs.")
    cut = _first_and_recent(run, m.TRUNCATED_FRAC)[1]
    if cut is not None and cut > TRUNCATED_SHARE:
        text = (
            f"{w.percent(cut)} of the last responses were cut at the length limit, so their reward"
            " is a guess."
        )
        yield Finding("truncated", text, "Raise sampling.max_new_tokens.")
    first, recent = _first_and_recent(run, m.ENTROPY)
    if first and first > 0 and recent is not None and recent < COLLAPSED_ENTROPY_SHARE * first:
        text = (
            f"Entropy fell from {first:.2f} to {recent:.2f} nats: part of a higher acceptance is"
            " the policy's own certainty."
        )
        yield Finding(
            "entropy_collapse",
            text,
            "Judge the heads by comparing serving with frozen; raise ppo.kl_coefficient if "
            "variety matters.",
        )
    first, recent = _first_and_recent(run, m.RESPONSE_LENGTH)
    if first is not None and recent is not None and recent > LENGTH_GROWTH * first:
        text = (
            f"Responses grew from {first:.0f} to {recent:.0f} tokens: the reward may pay for"
            " length."
        )
        yield Finding("longer_responses", text, "Read some responses from the last steps.")


def _of_the_curves(run: Run, _: Summary) -> Iterator[Finding]:
    """What PPO's curves look like when something is wrong, in runs that are long enough."""
    if len(run.steps) < CURVE_STEPS:
        return
    yield from _reward_jumps(run)
    yield from _value_loss(run)
    yield from _kl(run)


def _reward_jumps(run: Run) -> Iterator[Finding]:
    known = [
        (int(step[m.STEP]), reward)
        for step in run.steps
        if (reward := number(step.get(m.REWARD_MEAN))) is not None
    ]
    changes = [after - before for (_, before), (_, after) in pairwise(known)]
    if not changes:
        return
    sizes = [abs(change) for change in changes]
    least = NO_CHANGE * max(sizes)
    real = [size for size in sizes if size > least]
    if len(real) < CURVE_STEPS - 1:
        return
    usual = median(real)
    least = JUMP * (1 + 10 / len(real)) * usual
    found = []
    for place, change in enumerate(changes):
        beside = changes[max(0, place - 1) : place] + changes[place + 1 : place + 2]
        # Only neighbours in the same direction count: a spike is followed by a fall of equal size.
        alike = max((abs(other) for other in beside if other * change > 0), default=0.0)
        if abs(change) > max(least, JUMP_ALONE * alike) and change:
            found.append(place)
    if found:
        first = found[0]
        (_, before), (step, after) = known[first], known[first + 1]
        times = f", the first of {len(found)} such jumps" if len(found) > 1 else ""
        yield Finding(
            "reward_jump",
            f"The mean reward jumped from {before:.3g} to {after:.3g} in step {step}{times}, "
            f"while a step that changes it usually does so by {usual:.2g}.",
            "Read the responses of the steps before and after: a policy that found a loophole in "
            "the reward, or a reward that failed, looks like this.",
        )


def _value_loss(run: Run) -> Iterator[Finding]:
    first, recent = _first_and_recent(run, m.VALUE_LOSS)
    if len(run.steps) < CRITIC_STEPS or not first:
        return
    if recent is None or recent < VALUE_LOSS_KEPT * first:
        return
    _, explained = _first_and_recent(run, m.VALUE_EXPLAINED)
    reward, reward_now = _first_and_recent(run, m.REWARD_MEAN)
    if explained is None:
        # When rewards move their variance changes, and so does the loss of an equally good critic.
        if reward is None or reward_now is None:
            return
        if abs(reward_now - reward) > STILL_REWARD * max(abs(reward), abs(reward_now)):
            return
        knows = "while the reward stayed where it was"
    elif explained < EXPLAINED_SHARE:
        knows = f"and the critic explains {w.percent(max(0.0, explained))} of the returns' variance"
    else:
        return
    yield Finding(
        "value_loss_flat",
        f"The value loss did not fall: {first:.3g} in the first steps, {recent:.3g} in the last"
        f" ones, {knows}.",
        "Raise ppo.critic_learning_rate or ppo.epochs, or check ppo.value_clip_range: it cuts off "
        "values if rewards move by more.",
    )


def _kl(run: Run) -> Iterator[Finding]:
    column = run.column(m.KL_REFERENCE)
    _, recent = _first_and_recent(run, m.KL_REFERENCE)
    known = [value for value in column if value is not None]
    if recent is None or len(known) < CURVE_STEPS:
        return
    if max(map(abs, known)) < FLAT_KL_NATS:
        yield Finding(
            "kl_flat",
            f"The policy has not moved: its KL to the reference is {recent:.1g} nats a token after"
            f" {len(run.steps)} steps.",
            "Raise ppo.actor_learning_rate, and check whether optimizer steps were skipped or all "
            "responses to a prompt have the same reward.",
        )
        return
    window = window_steps(len(known))
    start = len(known) // 2 - window // 2
    middle = fmean(known[start : start + window])
    runs_away = recent > RUNAWAY_KL_NATS and recent > RUNAWAY_GROWTH * max(middle, 0.0)
    if recent > FAR_KL_NATS or runs_away:
        yield Finding(
            "kl_runaway",
            f"The policy runs away from its reference: {recent:.2f} nats a token in the last steps,"
            f" {middle:.2f} in the middle of the run.",
            "Raise ppo.kl_coefficient or set ppo.kl_goal, lower ppo.actor_learning_rate, and read "
            "responses from the last steps.",
        )


def _logged(run: Run, _: Summary) -> Iterator[Finding]:
    """Warnings of our own code during the run."""
    events = _sound_events(run.meta.get("events"))
    for event in events[:MOST_EVENTS]:
        times = f" ({event['times']} times)" if event.get("times", 1) != 1 else ""
        yield Finding(
            "event",
            f"Step {event.get('step')}{times}: {event.get('text')}",
            "docs/faults.md explains what a run does then.",
        )
    if len(events) > MOST_EVENTS:
        yield Finding(
            "events",
            f"{len(events) - MOST_EVENTS} more warning(s) were logged.",
            "They are in run.json, under events.",
        )


def _first_and_recent(run: Run, name: str) -> tuple[float | None, float | None]:
    """Means over the first and the last window of steps."""
    means = first_last(run.column(name), window_steps(len(run.steps)))
    return means["first"], means["last"]


def _recent_of_the_newest_actor(run: Run, name: str) -> float | None:
    """Mean over those of the last window of steps that learned from the newest actor's tokens. The
    log-probs of an older one's (ppo.staleness) differ however sound engine and sync are.
    """
    recent = run.steps[-window_steps(len(run.steps)) :]
    return mean([number(step.get(name)) for step in recent if not number(step.get(m.POLICY_LAG))])


def _sound_events(found: object) -> list[dict[str, Any]]:
    """The events in run.json, which a user or a killed run may have left in any state."""
    if not isinstance(found, list):
        return []
    return [event for event in found if isinstance(event, dict)]


class Events(logging.Handler):
    """Warnings that our own code logs during a run, kept in run.json.

    Attributes:
        fresh: there was a warning since this was last set to False.
        next_step: the current step.
        told: the events: `step`, `text`, and how many `times` it was logged.
    """

    LOGGERS = ("heads", "medusa_ppo")
    MOST = 50
    LONGEST = 500

    def __init__(self, next_step: int, before: object, clean: Callable[[str], Any]) -> None:
        """Listen until `close`.

        Args:
            next_step: see the attribute.
            before: the events that run.json already holds.
            clean: removes secrets from a text.
        """
        super().__init__(logging.WARNING)
        self.next_step = next_step
        self.fresh = False
        self._clean = clean
        self.told = _sound_events(before)
        for name in self.LOGGERS:
            logging.getLogger(name).addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        # Warnings quote addresses and settings, which may contain secrets.
        text = str(self._clean(record.getMessage()))[: self.LONGEST]
        # A warning in every step becomes one event with a count, or it would crowd out all others.
        known = next((event for event in self.told if event.get("text") == text), None)
        if known is not None:
            known["times"] = known.get("times", 1) + 1
        # run.json is rewritten for each of them, and must stay small.
        elif len(self.told) < self.MOST:
            self.told.append({"step": self.next_step, "text": text, "times": 1})
        self.fresh = True
        # If logging is not set up, Python shows warnings only while there is no handler at all;
        # without this, listening would hide them from the user.
        alone = not logging.root.handlers and all(
            logging.getLogger(name).handlers == [self] for name in self.LOGGERS
        )
        if alone and logging.lastResort:
            logging.lastResort.handle(record)

    def close(self) -> None:
        for name in self.LOGGERS:
            logging.getLogger(name).removeHandler(self)
        super().close()
