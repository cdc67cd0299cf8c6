"""report.html on disk: write it once, write all reports of a run, or write it again whenever the run grows."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from medusa_ppo.reports.files import write_atomic
from medusa_ppo.reports.markdown import render_markdown
from medusa_ppo.reports.page import render_page
from medusa_ppo.reports.records import META_FILE, METRICS_FILE, Run, read_run
from medusa_ppo.reports.summary import build_summary

logger = logging.getLogger(__name__)

SUMMARY_FILE = "summary.json"
MARKDOWN_FILE = "report.md"
HTML_FILE = "report.html"
REFRESH_S = 10


def write_report(run_dir: Path | str, html_path: Path | str | None = None, compare: Path | str | None = None) -> Path:
    """Write the reports of a run that has finished, was stopped, or still goes on; the page's path comes back.

    Args:
        run_dir: folder of the run.
        html_path: where the page goes; None: RUN/report.html, with summary.json and report.md beside it.
        compare: folder of a second run to lay over the first.

    Raises:
        UsageError: a folder is no run.
        RunError: its files are damaged beyond use.
    """
    run = read_run(run_dir)
    other = None if compare is None else read_run(compare)
    if html_path is None:
        write_files(run, other)
        return run.path / HTML_FILE
    target = Path(html_path)
    write_atomic(target, render_page(run, build_summary(run), other=other))
    return target


def write_files(run: Run, other: Run | None = None) -> dict[str, Any]:
    """Write summary.json, report.md and report.html into the run's folder; the summary comes back."""
    summary = build_summary(run)
    write_atomic(run.path / SUMMARY_FILE, json.dumps(summary, indent=2, allow_nan=False) + "\n")
    write_atomic(run.path / MARKDOWN_FILE, render_markdown(run, summary))
    write_atomic(run.path / HTML_FILE, render_page(run, summary, other=other))
    return summary


def follow(
    run_dir: Path | str,
    html_path: Path | str | None = None,
    *,
    compare: Path | str | None = None,
    on_refresh: Callable[[Path], None] | None = None,
    poll_s: float = 2.0,
    wait: Callable[[float], None] = time.sleep,
) -> Path:
    """Write the page again whenever the run grows, until the run ends (or Ctrl-C); the page's path comes back.

    While the run goes on the page loads itself again every REFRESH_S seconds; the last page that is written does not.

    Args:
        run_dir, html_path, compare: as for write_report.
        on_refresh: called with the path after each write.
        poll_s: seconds between two looks at the folder.
        wait: sleeps for so many seconds; tests pass their own.
    """
    path = Path(run_dir)
    target = Path(html_path) if html_path is not None else path / HTML_FILE
    seen: object = None
    try:
        while True:
            mark = _fingerprint(path)
            run = read_run(path)
            if run.status != "running":
                break
            if mark != seen:
                seen = mark
                other = None if compare is None else read_run(compare)
                write_atomic(target, render_page(run, build_summary(run), other=other, refresh_s=REFRESH_S))
                if on_refresh:
                    on_refresh(target)
            wait(poll_s)
    except KeyboardInterrupt:
        logger.info("Stopped following %s; the run itself goes on", path)
    write_report(path, html_path, compare)
    if on_refresh:
        on_refresh(target)
    return target


def _fingerprint(path: Path) -> tuple[tuple[int, int], ...]:
    """Size and time of the files that a page is made from."""
    stats = [(path / name).stat() for name in (METRICS_FILE, META_FILE) if (path / name).is_file()]
    return tuple((stat.st_size, stat.st_mtime_ns) for stat in stats)
