"""render_page: one self-contained HTML text of a run that loads nothing from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from medusa_ppo import __version__
from medusa_ppo.contract import metrics as m
from medusa_ppo.reports import svg, tables
from medusa_ppo.reports.findings import find
from medusa_ppo.reports.panels import Figure, Panels, spark_values
from medusa_ppo.reports.plain_words import only_first_version, some_drafted
from medusa_ppo.reports.run_files import META_FILE, METRICS_FILE, Run, read_run, status_of
from medusa_ppo.reports.summary import build_summary
from medusa_ppo.runtime import wording as w
from medusa_ppo.runtime.files import write_atomic

logger = logging.getLogger(__name__)

HERE = Path(__file__).parent
SUMMARY_FILE, MARKDOWN_FILE, HTML_FILE = "summary.json", "report.md", "report.html"
# Seconds after which the page of a running run reloads itself.
REFRESH_S = 10
POLL_S = 2.0
"""Seconds between two looks at the folder of a running run."""
ROUNDED = 1.005
"""Seconds that differ by less than this are the same."""


def render_page(
    run: Run, summary: dict[str, Any], *, other: Run | None = None, refresh_s: int = 0
) -> str:
    """The page as one HTML text.

    Args:
        run: the run, finished or not, even without a single step.
        summary: what build_summary returns for it.
        other: a second run to compare with.
        refresh_s: the page reloads itself after this many seconds; 0: never.
    """
    panels = Panels(run, other)
    script = (HERE / "page.js").read_text(encoding="utf-8")
    # The page's policy names this one script: text from a run that looks like a script is never
    # executed.
    digest = hashlib.sha256(script.encode()).digest()
    script_hash = "sha256-" + base64.b64encode(digest).decode()
    figures = {
        name: getattr(panels, name)()
        for name in ("acceptance", "entropy", "positions", "speed", "phases", "passes")
    }
    learning = panels.learning()
    others = panels.others()
    timelines = panels.timelines()
    rows, hidden_rows = tables.shown_versions(tables.version_rows(run))
    return page_template("page.html.jinja").render(
        run=run,
        summary=summary,
        verdict=tables.verdict(summary),
        status_text=_status_text(run, summary),
        tiles=tiles(run, summary),
        findings=find(run, summary),
        figures=figures,
        shares=phase_shares(summary),
        overlap=overlap(summary),
        learning=learning,
        timelines=timelines,
        others=others,
        reason_rows=tables.reason_rows(summary),
        choice_rows=tables.choice_rows(run),
        worth_rows=tables.worth_rows(run, summary),
        advice=tables.advice(run, summary),
        ratio=w.ratio,
        version_columns=tables.VERSION_COLUMNS,
        version_rows=rows,
        hidden_versions=hidden_rows,
        config_rows=tables.config_rows(run.config),
        machine_rows=tables.machine_rows(run),
        glossary=m.describe(),
        other=other,
        comparison=_comparison(run, summary, other),
        refresh_s=refresh_s,
        script=Markup(script),
        script_hash=Markup(script_hash),
        data=_script_data(panels, [*figures.values(), *learning, *others]),
    )


def tiles(run: Run, summary: dict[str, Any]) -> list[dict[str, Any]]:
    """The headline figures: label, figure, what to compare it with, a small line."""
    lengths, pairs, right, reward = (
        summary[key]
        for key in ("mean_acceptance_length", "rollout_speedup_pairs", "correct_frac", "reward")
    )
    replay = (
        f"by replay {w.length(lengths['serving_replay'])}, frozen heads"
        f" {w.length(lengths['frozen'])}"
    )
    if only_first_version(summary):
        replay = f"by replay {w.length(lengths['frozen'])}; one version, nothing to compare"
    share = some_drafted(summary)
    of_steps = f"with drafts, {share} of the steps; " if share else ""
    against = (
        f"against {w.AGAINST[pairs['against']]}, median of {w.whole(pairs['count'])} pairs,"
        f" {w.span(pairs['min'], pairs['max'])}"
    )
    start = "in the first steps" if summary["steps"] > 1 else "in the only step so far"
    learning = (
        "Right answers",
        w.percent(right["last"]),
        f"{w.percent(right['first'])} {start}",
        _spark(run, m.CORRECT_FRAC, "good"),
    )
    # Tasks without reference answers only have rewards.
    if right["last"] is None:
        learning = (
            "Reward",
            w.plain(reward["last"]),
            f"{w.plain(reward['first'])} {start}",
            _spark(run, m.REWARD_MEAN, "good"),
        )
    found = [
        (
            "Tokens per engine step",
            w.length(lengths["serving"]),
            of_steps + ("no replay yet" if lengths["frozen"] is None else replay),
            _spark(run, m.MAL_SERVING, "serving"),
        ),
        (
            "Speed-up by drafting",
            w.ratio(summary["rollout_speedup"]),
            against if pairs["count"] else "no pair was timed",
            _spark(run, m.PAIR_SPEEDUP, "serving"),
        ),
        learning,
        _rate_tile(run, summary),
    ]
    return [dict(zip(("label", "figure", "note", "spark"), tile, strict=True)) for tile in found]


def _rate_tile(run: Run, summary: dict[str, Any]) -> tuple[str, str, str, str]:
    """The time of a whole PPO step, which users notice most; tokens per second if it was not
    measured.
    """
    speed = summary["tokens_per_s"]
    spark = _spark(run, m.TOKENS_PER_S, "rollouts")
    if summary["step_ratio"] is not None:
        pairs = summary["step_pairs"]
        figures = (
            f"{w.exact_seconds(pairs['with_s'])} with the plugin,"
            f" {w.exact_seconds(pairs['without_s'])} without it"
        )
        return (
            "Time of a whole PPO step",
            w.ratio(summary["step_ratio"]),
            f"{figures}: {w.more_time(summary['step_ratio'])}",
            "",
        )
    if speed["drafting"] is not None:
        return (
            "Tokens per second",
            w.whole(speed["drafting"]),
            f"{w.whole(speed['plain'])} without drafting",
            spark,
        )
    return "Tokens per second", w.whole(speed["rollouts"]), "in the last steps' rollouts", spark


def phase_shares(summary: dict[str, Any]) -> list[dict[str, Any]]:
    """Each phase's seconds and share of the run; unaccounted time comes last. Where generation and
    learning overlap, shares add up to more than 1.
    """
    phases = {name: value for name, value in summary["phases_s"].items() if value}
    known = sum(phases.values())
    wall = summary["wall_s"] or known
    # Less than this is rounding, and too thin to see.
    if phases and wall > known * ROUNDED:
        phases["rest"] = wall - known
    whole = wall if known > wall * ROUNDED else sum(phases.values())
    return [
        {
            "name": name,
            "seconds": w.seconds(value),
            "share": value / whole,
            "text": w.percent(value / whole),
        }
        for name, value in phases.items()
    ]


def overlap(summary: dict[str, Any]) -> str:
    """A sentence on phases that overlap; empty if they follow each other."""
    known = sum(value for value in summary["phases_s"].values() if value)
    wall = summary["wall_s"]
    if not wall or known <= wall * ROUNDED:
        return ""
    return f"Phases overlap: their seconds add up to {known / wall:.2f} times those of the run."


def _spark(run: Run, metric: str, tone: str) -> Markup:
    # Metrics of paired steps would be mostly gaps, and a small line needs no true distances.
    return Markup(
        svg.draw_spark([value for value in spark_values(run, metric) if value is not None], tone)
    )


def _status_text(run: Run, summary: dict[str, Any]) -> str:
    """Steps, time, actor, heads and start in one line; unknown parts are left out."""
    planned = run.setting("ppo", "steps")
    done = w.whole(summary["steps"])
    if isinstance(planned, int) and planned != summary["steps"]:
        done += f" of {w.whole(planned)}"
    steps = f"{done} step{'' if done == '1' else 's'}"
    heads = run.setting("heads", "num_heads")
    kind = run.setting("heads", "kind")
    parts = [
        steps if summary["wall_s"] is None else f"{steps} in {w.seconds(summary['wall_s'])}",
        run.setting("model", "path"),
        f"{heads} {kind or ''} heads" if heads else None,
        summary["started_at"],
    ]
    return " · ".join(str(part) for part in parts if part)


def _comparison(run: Run, summary: dict[str, Any], other: Run | None) -> dict[str, Any] | None:
    if other is None:
        return None
    return {
        "rows": tables.comparison_rows(summary, build_summary(other)),
        "config": tables.config_differences(run, other),
    }


def _script_data(panels: Panels, figures: list[Figure]) -> Markup:
    grid = panels.grid
    # The last column may extend beyond the last step.
    last = max([*panels.steps, *panels.other_steps], default=0)
    data = {
        "grid": {"first": grid.first, "width": grid.width, "count": grid.count, "last": last},
        "charts": {figure.key: figure.series for figure in figures if figure.svg},
    }
    # "</script>" inside a name would end the block.
    return Markup(json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"))


@cache
def page_template(name: str) -> jinja2.Template:
    """A template from this folder, with our style sheet included."""
    # Cached, because a page that follows a run is written every few seconds.
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        autoescape=True,
        # A missing name fails here instead of leaving a gap on somebody's page.
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals |= {
        "css": Markup((HERE / "page.css").read_text(encoding="utf-8")),
        "product_version": __version__,
    }
    return environment.get_template(name)


def write_report(
    run_dir: Path | str, html_path: Path | str | None = None, compare: Path | str | None = None
) -> Path:
    """Write the reports of a run that has finished, was stopped, or is still going, and return the
    page's path.

    Args:
        run_dir: folder of the run.
        html_path: where the page goes; None: RUN/report.html, with summary.json and report.md next
            to it.
        compare: folder of a second run to compare with.

    Raises:
        UsageError: a folder is not a run.
        RunError: its files are damaged beyond use.
    """
    run = read_run(run_dir)
    other = None if compare is None else read_run(compare)
    target = Path(html_path or run.path / HTML_FILE)
    if html_path is None:
        write_files(run, other)
    else:
        write_atomic(target, render_page(run, build_summary(run), other=other))
    return target


def write_files(run: Run, other: Run | None = None) -> dict[str, Any]:
    """Write summary.json, report.md and report.html into the run's folder; returns the summary."""
    summary = build_summary(run)
    # Summary first: it is what programs read, and the page may still fail.
    write_atomic(run.path / SUMMARY_FILE, json.dumps(summary, indent=2, allow_nan=False) + "\n")
    write_atomic(run.path / MARKDOWN_FILE, tables.render_markdown(run, summary))
    write_atomic(run.path / HTML_FILE, render_page(run, summary, other=other))
    return summary


def follow(
    run_dir: Path | str,
    html_path: Path | str | None = None,
    *,
    compare: Path | str | None = None,
    on_refresh: Callable[[Path], None] | None = None,
    wait: Callable[[float], None] = time.sleep,
) -> Path:
    """Rewrite the page whenever the run grows, until the run ends (or Ctrl-C), and return the
    page's path.

    During the run the page reloads itself every REFRESH_S seconds; the final page does not.

    Args:
        run_dir, html_path, compare: as for write_report.
        on_refresh: called with the path after each write.
        wait: sleeps for this many seconds; tests pass their own.
    """
    path = Path(run_dir)
    target = Path(html_path or path / HTML_FILE)
    seen: object = None
    meta: dict[str, Any] = {}
    try:
        while True:
            # Taken before the run is read, so that anything written in between is seen next time.
            mark = _fingerprint(path)
            # A long run takes a second to read; a process that ends writes nothing.
            grown = read_run(path) if mark != seen else None
            if grown is not None:
                seen, meta = mark, grown.meta
            # The final page is written below, without the refresh.
            if status_of(meta) != "running":
                break
            if grown is not None:
                other = None if compare is None else read_run(compare)
                summary = build_summary(grown)
                page = render_page(grown, summary, other=other, refresh_s=REFRESH_S)
                write_atomic(target, page)
                if on_refresh:
                    on_refresh(target)
            wait(POLL_S)
    # Ctrl-C is the usual way to stop following.
    except KeyboardInterrupt:
        logger.info("Stopped following %s; the run itself continues", path)
    write_report(path, html_path, compare)
    if on_refresh:
        on_refresh(target)
    return target


def _fingerprint(path: Path) -> tuple[tuple[int, int], ...]:
    """Size and time of the files that a page is made from."""
    stats = [(path / name).stat() for name in (METRICS_FILE, META_FILE) if (path / name).is_file()]
    return tuple((stat.st_size, stat.st_mtime_ns) for stat in stats)
