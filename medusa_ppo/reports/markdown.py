"""report.md: what happened, on one page, every figure with the one it is to be compared with."""

from __future__ import annotations

from typing import Any

from medusa_ppo.reports import wording as w
from medusa_ppo.reports.findings import find
from medusa_ppo.reports.records import Run

MIB = 1024**2


def summary_rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """(what, figure) rows that sum a run up; for the terminal, report.md and the comparison of two runs."""
    mal, speed, pairs = summary["mean_acceptance_length"], summary["tokens_per_s"], summary["rollout_speedup_pairs"]
    reward, right, companion = summary["reward"], summary["correct_frac"], summary["companion"]
    engines = summary.get("mal_per_engine")
    pool = [("Tokens per engine step of each engine", ", ".join(w.length(length) for length in engines))] if engines else []
    return [
        ("PPO steps", f"{w.whole(summary['steps'])} ({summary['status']}, {w.seconds(summary['wall_s'])})"),
        ("Tokens per engine step, first published heads -> last steps", f"{w.length(mal['first'])} -> {w.length(mal['serving'])}"),
        ("The same by replay, trained heads / frozen heads", f"{w.length(mal['serving_replay'])} / {w.length(mal['frozen'])}"),
        ("Acceptance at position 1, 2, ...", ", ".join(w.percent(rate) for rate in summary["acceptance_per_position"] or []) or w.NONE),
        *pool,
        (f"Rollouts with drafts, against {w.AGAINST[pairs['against']]}", _speedup(summary["rollout_speedup"], pairs)),
        ("Tokens/s of these rollouts, with drafts / without", f"{w.whole(speed['drafting'])} / {w.whole(speed['plain'])}"),
        *_step_rows(summary),
        ("Right answers, first -> last steps", f"{w.percent(right['first'])} -> {w.percent(right['last'])}"),
        ("Reward, first -> last steps", f"{w.plain(reward['first'])} -> {w.plain(reward['last'])}"),
        (
            "Companion: tokens trained, versions published",
            f"{w.whole(companion['trained_tokens'])}, {w.whole(companion['versions_published'])}",
        ),
        ("Companion: passes over a batch, and in how many steps why", _passes(companion)),
        (
            "Companion: seconds hidden behind PPO / the loop waited",
            f"{w.seconds(companion['hidden_s'])} / {w.seconds(companion['exposed_s'])}",
        ),
        *_sync_rows(summary.get("actor_sync")),
    ]


def _step_rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """What a user feels; nothing where no step was taken without the plugin."""
    ratio, pairs = summary["step_ratio"], summary["step_pairs"]
    note = [("Measured on", summary["actor_note"])] if summary["actor_note"] else []
    if ratio is None:
        return note
    spread = f"median of {pairs['count']} pairs, {w.ratio(pairs['min'])} to {w.ratio(pairs['max'])}"
    return [
        (
            "A whole PPO step, with the plugin / without it",
            f"{w.exact_seconds(pairs['with_s'])} / {w.exact_seconds(pairs['without_s'])}: {w.more_time(ratio)} ({spread})",
        ),
        (
            "Of these, generation",
            f"{w.exact_seconds(pairs['generate_with_s'])} / {w.exact_seconds(pairs['generate_without_s'])}",
        ),
        *note,
    ]


def _sync_rows(sync: dict[str, Any] | None) -> list[tuple[str, str]]:
    """Nothing where the loop does not say how large the actor's weights are."""
    if sync is None or sync["bytes"] is None:
        return []
    figure = f"{w.plain(sync['bytes'] / MIB)} MiB, {w.seconds(sync['seconds'])} ({w.seconds(sync['collect_s'])} of it collecting)"
    return [("New actor weights, to each engine in each step", figure)]


def _passes(companion: dict[str, Any]) -> str:
    if companion["passes"] is None:
        return w.NONE
    reasons = ", ".join(f"{reason} {w.whole(steps)}" for reason, steps in companion["reasons"] or [])
    return f"{w.plain(companion['passes'])} ({reasons})" if reasons else w.plain(companion["passes"])


def _speedup(value: float | None, pairs: dict[str, Any]) -> str:
    if value is None:
        return f"{w.NONE} (no pair was timed)"
    return f"{w.ratio(value)} (median of {pairs['count']} pairs, {w.ratio(pairs['min'])} to {w.ratio(pairs['max'])})"


def verdict(summary: dict[str, Any]) -> str:
    """What happened in one or two sentences, made only of what was measured."""
    if not summary["steps"]:
        return "No PPO step has finished yet."
    mal, parts = summary["mean_acceptance_length"], []
    if summary["rollout_speedup"] is not None:
        times, plain = summary["rollout_speedup"], w.AGAINST[summary["rollout_speedup_pairs"]["against"]]
        parts.append(
            f"drafts made generation {times:.2f} times as fast as {plain}"
            if times >= 1
            else f"drafts slowed generation down to {times:.2f} of {plain}"
        )
    if summary["step_ratio"] is not None:
        seconds = summary["step_pairs"]
        parts.append(
            f"a whole PPO step took {w.exact_seconds(seconds['with_s'])} with the plugin and {w.exact_seconds(seconds['without_s'])} "
            f"without it ({w.more_time(summary['step_ratio'])})"
        )
    if mal["gain"] is not None:
        word = "more" if mal["gain"] >= 0 else "fewer"
        parts.append(f"the heads trained along the way give {abs(mal['gain']):.2f} tokens {word} per engine step than frozen ones")
    elif mal["serving"] is not None:
        parts.append(f"the engine wrote {mal['serving']:.2f} tokens per step")
    right = summary["correct_frac"]
    if right["first"] is not None and right["last"] is not None and summary["steps"] > 1:
        parts.append(f"right answers went from {w.percent(right['first'])} to {w.percent(right['last'])}")
    if not parts:
        return f"{w.whole(summary['steps'])} PPO steps were recorded, without any figure on drafting."
    text = f"{', '.join(parts[:-1])}{',' if len(parts) > 2 else ''} and {parts[-1]}" if len(parts) > 1 else parts[0]
    note = f" Measured on {summary['actor_note']}." if summary["actor_note"] else ""
    return f"{text[0].upper()}{text[1:]}.{note}"


def render_markdown(run: Run, summary: dict[str, Any]) -> str:
    """The whole of report.md."""
    rows = [f"| {what} | {_cell(figure)} |" for what, figure in summary_rows(summary)]
    findings = [f"- **{_cell(finding.text)}** {_cell(finding.do)}" for finding in find(run, summary)]
    versions = [f"| {_cell(name)} | {_cell(version)} |" for name, version in summary["versions"].items()]
    hardware = run.section("hardware")
    machine = ", ".join(
        [
            str(hardware.get("cpu") or "unknown CPU"),
            f"{hardware.get('usable_cores', '?')} cores",
            f"{hardware.get('memory_gib', '?')} GiB",
            *(str(gpu) for gpu in hardware.get("gpus") or ["no GPU"]),
        ]
    )
    window = summary["window_steps"]
    lines = [
        f"# {_cell(run.name)}",
        "",
        verdict(summary),
        "",
        "| what | figure |",
        "|---|---|",
        *rows,
        "",
        f"First and last figures are means over {window} step{'' if window == 1 else 's'}. Acceptance is vLLM's own count; "
        "trained and frozen heads are compared by replay on the same rollouts. docs/metrics.md explains every number.",
        "",
        "## Warnings",
        "",
        *(findings or ["None."]),
        "",
        "## Ran on",
        "",
        f"{_cell(machine)}, started {summary['started_at'] or 'at an unknown time'}.",
        "",
        "| package | version |",
        "|---|---|",
        *versions,
        "",
    ]
    return "\n".join(lines)


def _cell(text: object) -> str:
    """Text that can't break a table or bring markup of its own."""
    return " ".join(str(text).split()).replace("|", "\\|").replace("<", "&lt;")
