"""A run in rows: the summary, report.md, and the tables of the page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby, zip_longest
from typing import Any, NamedTuple

from medusa_ppo.config.run_config import RunConfig
from medusa_ppo.contract import metrics as m
from medusa_ppo.reports.findings import find
from medusa_ppo.reports.plain_words import only_first_version, some_drafted
from medusa_ppo.reports.run_files import Run, number
from medusa_ppo.reports.summary import (
    STEP_S,
    judgements,
    ledger_rows,
    mean,
    mean_acceptance_length,
    middle_pair,
    replay_pairs,
    speed_pairs,
    step_pairs,
)
from medusa_ppo.runtime import wording as w

MIB = 1024**2
VERSIONS_FIRST, VERSIONS_LAST = 50, 250
"""Versions beyond these two numbers are cut from the middle, or the table would dominate the page.
"""
LEAST_DRAFTED = 0.05
"""Where fewer of the steps have drafts, what one costs can't be told: the pairs' noise is divided
by this share.
"""
MOSTLY_DRAFTED = 0.9
"""Where fewer of the steps have drafts, and steps are of different sizes, those without drafts are
mostly the larger ones, and one of these is no measure of what a small one costs.
"""

WORTH_PHASES = {
    STEP_S: "a whole PPO step",
    m.GENERATE_S: "of it generation",
    m.SCORE_S: "scoring",
    m.UPDATE_S: "update",
    m.SYNC_S: "sync",
}
"""Phases whose seconds are shown side by side, with the plugin and without it."""


def summary_rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """(what, figure) rows that summarise a run; for the terminal, report.md and the comparison of
    two runs.
    """
    mal = summary["mean_acceptance_length"]
    speed = summary["tokens_per_s"]
    pairs = summary["rollout_speedup_pairs"]
    reward = summary["reward"]
    right = summary["correct_frac"]
    companion = summary["companion"]
    engines = summary.get("mal_per_engine")
    share = some_drafted(summary)
    of_steps = f" (in steps with drafts, {share} of all)" if share else ""
    replay = f"{w.length(mal['serving_replay'])} / {w.length(mal['frozen'])}"
    if only_first_version(summary) and mal["frozen"] is not None:
        replay = f"{w.length(mal['frozen'])}, of the only version so far"
    pool = (
        [
            (
                "Tokens per engine step of each engine",
                ", ".join(w.length(length) for length in engines),
            )
        ]
        if engines
        else []
    )
    return [
        (
            "PPO steps",
            f"{w.whole(summary['steps'])} ({summary['status']}, {w.seconds(summary['wall_s'])})",
        ),
        (
            "Tokens per engine step, first published heads -> last steps",
            f"{w.length(mal['first'])} -> {w.length(mal['serving'])}{of_steps}",
        ),
        (
            "The same by replay, trained heads / frozen heads",
            replay,
        ),
        (
            "Acceptance at position 1, 2, ...",
            ", ".join(w.percent(rate) for rate in summary["acceptance_per_position"] or [])
            or w.NONE,
        ),
        *pool,
        (
            f"Rollouts with drafts, against {w.AGAINST[pairs['against']]}",
            _speedup(summary["rollout_speedup"], pairs),
        ),
        (
            "Tokens/s of these rollouts, with drafts / without",
            f"{w.whole(speed['drafting'])} / {w.whole(speed['plain'])}",
        ),
        *_step_rows(summary),
        (
            "Right answers, first -> last steps",
            f"{w.percent(right['first'])} -> {w.percent(right['last'])}",
        ),
        ("Reward, first -> last steps", f"{w.plain(reward['first'])} -> {w.plain(reward['last'])}"),
        (
            "Companion: tokens trained, versions published",
            f"{w.whole(companion['trained_tokens'])}, {w.whole(companion['versions_published'])}",
        ),
        (
            "Versions compared with their predecessor on later batches; of these worse",
            f"{w.whole(companion['versions_followed'])}; {w.whole(companion['versions_worse'])}",
        ),
        ("Companion: passes over a batch, and the reasons by number of steps", _passes(companion)),
        (
            "Companion: seconds hidden behind PPO / the loop waited",
            f"{w.seconds(companion['hidden_s'])} / {w.seconds(companion['exposed_s'])}",
        ),
        *_account_rows(companion),
        *_warm_up_rows(summary.get("warm_up") or {}),
        *_generate_score_rows(summary.get("generate_score")),
        *_memory_rows(summary.get("memory_peak_gib") or {}),
        *ledger_rows(summary.get("ledger")),
        *_sync_rows(summary.get("actor_sync")),
    ]


def _warm_up_rows(warm_up: dict[str, Any]) -> list[tuple[str, str]]:
    """The warm-up's cost and gain; none for runs without one."""
    if warm_up.get("seconds") is None:
        return []
    brought = f"{w.length(warm_up['before'])} -> {w.length(warm_up['after'])} by replay"
    cost = f"{w.seconds(warm_up['seconds'])}, {w.whole(warm_up['tokens'])} tokens"
    return [("Warm-up of the heads: cost; tokens per engine step", f"{cost}; {brought}")]


def _step_rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """The time of a whole PPO step, which users notice most; no rows if no step was taken without
    the plugin.
    """
    ratio = summary["step_ratio"]
    pairs = summary["step_pairs"]
    note = [("Measured on", summary["actor_note"])] if summary["actor_note"] else []
    if ratio is None:
        return note
    spread = f"the middle one of {pairs['count']} pairs, {w.span(pairs['min'], pairs['max'])}"
    return [
        (
            "A whole PPO step, with the plugin / without it",
            (
                f"{w.exact_seconds(pairs['with_s'])} / {w.exact_seconds(pairs['without_s'])}:"
                f" {w.more_time(ratio)} ({spread})"
            ),
        ),
        (
            "Of these, generation",
            (
                f"{w.exact_seconds(pairs['generate_with_s'])} /"
                f" {w.exact_seconds(pairs['generate_without_s'])}"
            ),
        ),
        *note,
    ]


def _generate_score_rows(found: dict[str, Any] | None) -> list[tuple[str, str]]:
    """How long engine and scoring worked and idled; no rows for runs that don't record it."""
    if found is None or found["seconds"] is None:
        return []
    what, figure = "Generating and scoring responses, per step", w.seconds(found["seconds"])
    # Of two sides that work in turn each is idle for half of the time, always.
    if w.overlapped(found["idle_frac"]):
        what += "; engine and scoring idle"
        figure += f", {w.percent(found['idle_frac'])} idle"
    return [(what, figure)]


def _memory_rows(peaks: dict[str, float | None]) -> list[tuple[str, str]]:
    """Peak memory by phase; no rows for runs that don't record it."""
    known = [f"{phase} {w.plain(gib)}" for phase, gib in peaks.items() if gib is not None]
    return [("Peak memory of the loop's process by phase, GiB", ", ".join(known))] if known else []


def _sync_rows(sync: dict[str, Any] | None) -> list[tuple[str, str]]:
    """The actor's weights on their way to the engines; no rows if the loop does not report their
    size.
    """
    if sync is None or sync["bytes"] is None:
        return []
    figure = (
        f"{w.plain(sync['bytes'] / MIB)} MiB, {w.seconds(sync['seconds'])}"
        f" ({w.seconds(sync['collect_s'])} of it collecting)"
    )
    return [("New actor weights, to each engine in each step", figure)]


def _account_rows(companion: dict[str, Any]) -> list[tuple[str, str]]:
    """What training saved and cost the loop, if that was recorded."""
    if companion.get("net_s") is None:
        return []
    seconds = " / ".join(w.seconds(companion[name]) for name in ("saved_s", "lost_s", "net_s"))
    rows = [("Companion's account: seconds saved / lost / net", seconds)]
    if companion.get("taken_frac") is not None:
        rows.append(
            ("Share of the loop's seconds that training took", w.percent(companion["taken_frac"]))
        )
    return rows


def _passes(companion: dict[str, Any]) -> str:
    if companion["passes"] is None:
        return w.NONE
    reasons = ", ".join(
        f"{reason} {w.whole(steps)}" for reason, steps in companion["reasons"] or []
    )
    return (
        f"{w.plain(companion['passes'])} ({reasons})" if reasons else w.plain(companion["passes"])
    )


def _speedup(value: float | None, pairs: dict[str, Any]) -> str:
    if value is None:
        return f"{w.NONE} (no pair was timed)"
    return (
        f"{w.ratio(value)} (median of {pairs['count']} pairs, {w.span(pairs['min'], pairs['max'])})"
    )


def verdict(summary: dict[str, Any]) -> str:
    """What happened, in one or two sentences based only on measurements."""
    if not summary["steps"]:
        return "No PPO step has finished yet."
    mal = summary["mean_acceptance_length"]
    parts = []
    if summary["rollout_speedup"] is not None:
        times = summary["rollout_speedup"]
        plain = w.AGAINST[summary["rollout_speedup_pairs"]["against"]]
        parts.append(
            f"drafts made generation {times:.2f} times as fast as {plain}"
            if times >= 1
            else f"drafts slowed generation down to {times:.2f} of {plain}"
        )
    if summary["step_ratio"] is not None:
        seconds = summary["step_pairs"]
        parts.append(
            f"a whole PPO step took {w.exact_seconds(seconds['with_s'])} with the plugin and"
            f" {w.exact_seconds(seconds['without_s'])} without it"
            f" ({w.more_time(summary['step_ratio'])})"
        )
    if mal["gain"] is not None and not only_first_version(summary):
        word = "more" if mal["gain"] >= 0 else "fewer"
        parts.append(
            f"the heads trained along the way give {abs(mal['gain']):.2f} tokens {word} per engine"
            " step than frozen ones"
        )
    elif mal["serving"] is not None:
        share = some_drafted(summary)
        with_drafts = f" with drafts ({share} of all)" if share else ""
        parts.append(f"the engine wrote {mal['serving']:.2f} tokens per step{with_drafts}")
    right = summary["correct_frac"]
    if right["first"] is not None and right["last"] is not None and summary["steps"] > 1:
        parts.append(
            f"right answers went from {w.percent(right['first'])} to {w.percent(right['last'])}"
        )
    if not parts:
        return (
            f"{w.whole(summary['steps'])} PPO steps were recorded, without any figure on drafting."
        )
    text = (
        f"{', '.join(parts[:-1])}{',' if len(parts) > 2 else ''} and {parts[-1]}"
        if len(parts) > 1
        else parts[0]
    )
    note = f" Measured on {summary['actor_note']}." if summary["actor_note"] else ""
    return f"{text[0].upper()}{text[1:]}.{note}"


def render_markdown(run: Run, summary: dict[str, Any]) -> str:
    """The full text of report.md."""
    hardware = run.section("hardware")
    machine = [
        hardware.get("cpu") or "unknown CPU",
        f"{hardware.get('usable_cores', '?')} cores",
        f"{hardware.get('memory_gib', '?')} GiB",
    ]
    machine += hardware.get("gpus") or ["no GPU"]
    window = summary["window_steps"]
    lines = [f"# {_cell(run.name)}", "", verdict(summary), "", "| what | figure |", "|---|---|"]
    lines += [f"| {what} | {_cell(figure)} |" for what, figure in summary_rows(summary)]
    lines += [
        "",
        (
            f"First and last figures are means over {window} step{'' if window == 1 else 's'}."
            " Acceptance is vLLM's own count; trained and frozen heads are compared by replay on"
            " the same rollouts. docs/metrics.md explains every number."
        ),
    ]
    lines += ["", text] if (text := advice(run, summary)) else []
    lines += ["", "## Warnings", ""]
    lines += [
        f"- **{_cell(finding.text)}** {_cell(finding.do)}" for finding in find(run, summary)
    ] or ["None."]
    lines += [
        "",
        "## Ran on",
        "",
        (
            f"{_cell(', '.join(map(str, machine)))}, started"
            f" {summary['started_at'] or 'at an unknown time'}."
        ),
    ]
    lines += [
        f"\nResumed {_cell(value)}." for name, value in machine_rows(run) if name == "resumed"
    ]
    lines += ["", "| package | version |", "|---|---|"]
    lines += [
        f"| {_cell(name)} | {_cell(version)} |" for name, version in summary["versions"].items()
    ]
    return "\n".join([*lines, ""])


def _cell(text: object) -> str:
    """Text that can't break a table or add markup."""
    return (
        # Names come from folders and other people's files; "](" would turn them into links.
        " ".join(str(text).split()).replace("|", "\\|").replace("<", "&lt;").replace("](", "]\\(")
    )


class VersionRow(NamedTuple):
    """One version of the heads while it was serving; VERSION_COLUMNS says what each figure is. None
    if unknown.
    """

    version: int
    first_step: int
    steps: int
    policy_version: int | None
    staleness: float | None
    engine: float | None
    replay: float | None
    frozen: float | None
    gain: float | None

    def cells(self) -> list[tuple[str, float | None]]:
        """(text, sort value) per column of VERSION_COLUMNS."""
        return [
            (say(value), value) for (_, say, _), value in zip(VERSION_COLUMNS, self, strict=True)
        ]


VERSION_COLUMNS: tuple[tuple[str, Callable[[Any], str], str], ...] = (
    (
        "version",
        lambda number: f"v{number}",
        "Version of the heads; 0 are those the run started with",
    ),
    ("from step", w.whole, "First step that drafted with them"),
    ("steps", w.whole, "Steps that drafted with them"),
    ("policy", w.whole, "Version of the policy whose rollouts they were last trained on"),
    (
        "staleness",
        w.whole,
        "Maximum policy updates since their last training batch while they served",
    ),
    ("engine", w.length, "Tokens per engine step, counted by vLLM while they served"),
    ("replay", w.length, "Tokens per engine step by replay, when they were judged as serving"),
    ("frozen", w.length, "The same replay for the first published heads"),
    ("gain", w.signed, "Replay minus frozen"),
)
"""Title of each figure of a VersionRow, how it is written, what it is."""


class ChoiceRow(NamedTuple):
    """What the engine chose with this many running sequences: share of the steps with 0..K drafts,
    and the speed-up by the last step's report.
    """

    running: str
    steps: int
    shares: list[float]
    speedup: float | None


def choice_rows(run: Run) -> list[ChoiceRow]:
    """Chosen K by running sequences, over the whole run; empty if the engine did not choose."""
    steps: dict[int, list[int]] = {}
    speedup: dict[int, float | None] = {}
    for row in run.draft_choices():
        # A run that was resumed may draft more tokens than before, so rows may differ in length.
        both = zip_longest(steps.get(row["running"], []), row["steps"], fillvalue=0)
        steps[row["running"]] = [before + now for before, now in both]
        # The engine's last estimate, which knows most; earlier ones are not averaged in.
        speedup[row["running"]] = row["speedup"]
    rows = []
    longest = max(map(len, steps.values()), default=0)
    for running, shorter in sorted(steps.items()):
        counts = shorter + [0] * (longest - len(shorter))
        # Cells double in size: the number is the smallest of its cell.
        label = "1" if running == 1 else f"{running} to {2 * running - 1}"
        total = sum(counts)
        rows.append(
            ChoiceRow(
                label,
                total,
                [count / total if total else 0.0 for count in counts],
                speedup[running],
            )
        )
    return rows


def worth_rows(run: Run, summary: dict[str, Any]) -> list[tuple[str, ...]]:
    """Rows of phase, seconds with and without the plugin, ratio, range and pairs; empty for a run
    without a comparison after its last step.
    """
    rows: list[tuple[str, ...]] = []
    pairs, against = speed_pairs(run)
    # Pairs on the run's own engine don't show what a user would have without the plugin.
    if against == "vllm":
        drafting, plain = (summary["tokens_per_s"][side] for side in ("drafting", "plain"))
        spread = summary["rollout_speedup_pairs"]
        figures = (
            w.whole(drafting),
            w.whole(plain),
            # Of this pair, as in the rows below; the summary has the median of all pairs.
            w.ratio(drafting / plain if drafting and plain else summary["rollout_speedup"]),
        )
        rows.append(
            (
                "rollouts, tokens/s",
                *figures,
                w.span(spread["min"], spread["max"]),
                w.whole(len(pairs)),
            )
        )
    for name, what in WORTH_PHASES.items():
        # A phase missing in some pairs is compared over those that have it.
        both = [
            (ours, plain) for ours, plain in step_pairs(run) if name in ours and plain.get(name)
        ]
        if middle := middle_pair(both, name):
            ratios = [ours[name] / plain[name] for ours, plain in both]
            seconds = [w.exact_seconds(side[name]) for side in middle]
            rows.append(
                (
                    what,
                    *seconds,
                    w.ratio(middle[0][name] / middle[1][name]),
                    w.span(min(ratios), max(ratios)),
                    w.whole(len(both)),
                )
            )
    return rows


def advice(run: Run, summary: dict[str, Any]) -> str:
    """Whether drafting pays here, with how many sequences, and what would change that; empty if no
    rollouts were timed.
    """
    speed = summary["rollout_speedup"]
    accepted = summary["mean_acceptance_length"]["serving"]
    steps = summary["step_pairs"]
    if speed is None or accepted is None:
        return ""
    most = run.setting("engine", "max_num_seqs")
    where = "of this run"
    if most == 1:
        where += ", one sequence at a time"
    elif most:
        where += f", with at most {most} sequences at once"
    text = f"{'Worth it' if speed >= 1 else 'Not worth it'} for rollouts {where}: "
    text += f"{w.ratio(speed)} at {w.length(accepted)} tokens an engine step"
    if share := some_drafted(summary):
        text += f" with drafts ({share} of all)"
    drafted = summary["drafted_frac"]
    choices = choice_rows(run)
    price = None
    if drafted is None or drafted >= MOSTLY_DRAFTED or len(choices) == 1:
        # A draft step costs as much as this many plain steps, so with fewer tokens it is slower.
        price = _draft_step_price(accepted, speed, 1.0 if drafted is None else drafted)
    text += "." if price is None else f"; it pays above {w.length(price)}."
    rows = [(row.running, row.speedup) for row in choices if row.speedup is not None]
    for verb, running in (
        # At exactly 1 the engine chose to draft nothing.
        ("pays", [running for running, ratio in rows if ratio > 1]),
        ("does not pay", [running for running, ratio in rows if ratio <= 1]),
    ):
        text += (
            f" By the engine's own clock it {verb} with {', '.join(running)} running."
            if running
            else ""
        )
    if not (
        steps["count"]
        and all(steps[name] is not None for name in ("generate_with_s", "generate_without_s"))
    ):
        return text + " It gains more with fewer sequences at once and more certain policies."
    rest = steps["with_s"] - steps["generate_with_s"]
    others = steps["without_s"] - steps["generate_without_s"]
    share = steps["generate_without_s"] / steps["without_s"]
    # Twice the generation on both sides, the rest unchanged: the plugin gains more when generation,
    # which it speeds up, takes longer.
    twice = (rest + 2 * steps["generate_with_s"]) / (others + 2 * steps["generate_without_s"])
    text += (
        f" Generation is {w.percent(share)} of a step without the plugin; if responses took twice"
        " as long, a step would take "
    )
    return f"{text}{w.more_time(twice)} with the plugin (by arithmetic on the middle pair)."


def _draft_step_price(accepted: float, speed: float, drafted: float) -> float | None:
    """How many plain steps a step with drafts costs, if this share of the steps has drafts and
    writes `accepted` tokens; None if too few have, or if it is less than one, which only noise of
    the pairs can give.
    """
    if drafted < LEAST_DRAFTED:
        return None
    tokens = 1.0 + drafted * (accepted - 1.0)
    price = (tokens / speed - (1.0 - drafted)) / drafted
    return price if price >= 1.0 else None


def reason_rows(summary: dict[str, Any]) -> list[tuple[str, str, str]]:
    """(reason, steps, what it means) of the companion's schedule, the most frequent first."""
    return [
        (reason, w.whole(steps), m.REASONS.get(reason, ""))
        for reason, steps in summary["companion"]["reasons"] or []
    ]


def version_rows(run: Run) -> list[VersionRow]:
    """One row per stretch of steps with the same version, oldest first."""
    known = [step for step in run.steps if number(step.get(m.HEADS_VERSION)) is not None]
    # All at once: a run may have thousands of versions, and as many judgements.
    judged: dict[float | None, list[dict[str, Any]]] = {}
    for step in judgements(run.steps):
        judged.setdefault(number(step.get(m.REPLAY_HEADS_VERSION)), []).append(step)

    def judgements_of(version: float, stretch: list[dict[str, Any]]) -> list[dict[str, Any]]:
        # The judgement by which heads are replaced stands in a step of their successors. Lines of
        # earlier releases don't say which heads were judged.
        return judged.get(version) or [
            step for step in stretch if m.REPLAY_HEADS_VERSION not in step
        ]

    return [
        _version_row(int(version), stretch := list(steps), judgements_of(version, stretch))
        # Neighbours only: heads that were put back after an alarm form a separate stretch.
        for version, steps in groupby(known, key=lambda step: step[m.HEADS_VERSION])
    ]


def _version_row(
    version: int, steps: Sequence[dict[str, Any]], judged: Sequence[dict[str, Any]]
) -> VersionRow:
    policy = number(steps[0].get(m.POLICY_VERSION))
    age = number(steps[0].get(m.STALENESS))
    both = replay_pairs(judged)
    replay = mean([serving for serving, _ in both])
    frozen = mean([frozen for _, frozen in both])
    return VersionRow(
        version,
        int(steps[0][m.STEP]),
        len(steps),
        # Staleness is the distance to the policy they were trained on.
        None if policy is None or age is None else int(policy - age),
        max(
            (value for s in steps if (value := number(s.get(m.STALENESS))) is not None),
            default=None,
        ),
        mean_acceptance_length(steps),
        replay,
        frozen,
        None if replay is None or frozen is None else replay - frozen,
    )


def shown_versions(rows: list[VersionRow]) -> tuple[list[VersionRow], int]:
    """The rows that the page shows and how many were left out of the middle."""
    if len(rows) <= VERSIONS_FIRST + VERSIONS_LAST:
        return rows, 0
    return rows[:VERSIONS_FIRST] + rows[-VERSIONS_LAST:], len(rows) - VERSIONS_FIRST - VERSIONS_LAST


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested configuration -> dotted keys; an empty section stays as {}."""
    out: dict[str, Any] = {}
    for key, value in values.items():
        out |= (
            flatten(value, f"{prefix}{key}.")
            if isinstance(value, dict) and value
            else {f"{prefix}{key}": value}
        )
    return out


def config_rows(config: dict[str, Any]) -> list[tuple[str, str, bool]]:
    """(dotted key, value, whether it differs from the default), in the configuration's order."""
    # Defaults of this release: an older release's default is shown as a choice.
    defaults = flatten(RunConfig().model_dump(mode="json"))
    return [
        (key, show(value), key in defaults and defaults[key] != value)
        for key, value in flatten(config).items()
    ]


def show(value: Any) -> str:
    """A configuration value as one would write it in YAML."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value) if value == "" else str(value)


def machine_rows(run: Run) -> list[tuple[str, str]]:
    """What the run ran on, from run.json."""
    hardware = run.section("hardware")
    rows = [
        ("command", run.meta.get("command")),
        ("commit", run.meta.get("commit")),
        ("seed", run.config.get("seed", "") if run.meta.get("command") else None),
        ("processor", hardware.get("cpu")),
        ("cores", _cores(hardware)),
        ("memory", f"{hardware['memory_gib']} GiB" if "memory_gib" in hardware else None),
        (
            "GPU",
            ", ".join(str(gpu) for gpu in hardware.get("gpus") or [])
            or ("none" if hardware else None),
        ),
        ("system", hardware.get("system")),
        ("started", run.meta.get("started_at")),
        ("ended", run.meta.get("finished_at")),
        *[("resumed", _resumed(item)) for item in run.meta.get("resumed") or []],
    ]
    return [(name, str(value)) for name, value in rows if value not in (None, "")]


def _resumed(item: dict[str, Any]) -> str:
    """At which step it resumed, and what was different before."""
    was = ", ".join(f"{key} was {show(value)}" for key, value in (item.get("was") or {}).items())
    return f"at step {item.get('step')}" + (f", before it {was}" if was else "")


def _cores(hardware: dict[str, Any]) -> str | None:
    if "cores" not in hardware:
        return None
    usable = hardware.get("usable_cores", hardware["cores"])
    return f"{usable} of {hardware['cores']} usable" if usable != hardware["cores"] else str(usable)


def comparison_rows(summary: dict[str, Any], other: dict[str, Any]) -> list[tuple[str, str, str]]:
    """(what, this run, the other run)."""
    ours = dict(summary_rows(summary))
    theirs = dict(summary_rows(other))
    return [(what, ours.get(what, w.NONE), theirs.get(what, w.NONE)) for what in {**ours, **theirs}]


def config_differences(run: Run, other: Run) -> list[tuple[str, str, str]]:
    """Configuration keys on which two runs differ: (key, this run, the other run); names and
    folders are ignored.
    """
    here = flatten(run.config)
    there = flatten(other.config)
    keys = [*here, *(key for key in there if key not in here)]
    # None is a valid value of a key.
    missing = object()
    return [
        (
            key,
            show(here[key]) if key in here else w.NONE,
            show(there[key]) if key in there else w.NONE,
        )
        for key in keys
        if key not in ("name", "out") and here.get(key, missing) != there.get(key, missing)
    ]
