"""The tables of docs/metrics.md, made from metrics.describe() and SUMMARY_KEYS so that the page
can't fall behind the code.

`python docs/site/metric_tables.py docs/metrics.md` writes them anew between the page's markers.
"""

from __future__ import annotations

import sys
from pathlib import Path

from heads.errors import UsageError
from medusa_ppo.contract import metrics
from medusa_ppo.reports.summary import SUMMARY_KEYS
from medusa_ppo.runtime.files import write_atomic

MARKERS = {
    "metrics": ("<!-- begin: metrics -->", "<!-- end: metrics -->"),
    "summary": ("<!-- begin: summary -->", "<!-- end: summary -->"),
}
UNITS = {
    "_s": "seconds",
    "_frac": "share, 0 to 1",
    "_tokens": "tokens",
    "_tokens_per_s": "tokens/s",
    "_gib": "GiB",
    "_bytes": "bytes",
}


def metrics_table() -> str:
    """One row per key of metrics.jsonl."""
    rows = [f"| `{name}` | {unit(name)} | {what} |" for name, what in metrics.describe().items()]
    return "\n".join(["| key | unit | what it is |", "|---|---|---|", *rows])


def summary_table() -> str:
    """One row per key of summary.json, dots for nesting."""
    rows = [f"| `{key}` | {what} |" for key, what in SUMMARY_KEYS.items()]
    return "\n".join(["| key | what it is |", "|---|---|", *rows])


def unit(name: str) -> str:
    """The unit that a metric's name ends in; the longest ending counts."""
    fitting = [ending for ending in UNITS if name.endswith(ending)]
    return UNITS[max(fitting, key=len)] if fitting else ""


def fill(text: str) -> str:
    """The page with both tables as the code has them now. Raises UsageError when a marker is
    missing.
    """
    for name, table in (("metrics", metrics_table()), ("summary", summary_table())):
        begin, end = MARKERS[name]
        if text.count(begin) != 1 or text.count(end) != 1:
            raise UsageError(
                "The page lacks the place of a table.",
                given=name,
                expected=f"{begin} and {end}, once each",
                do="Put the markers back.",
            )
        text = text[: text.index(begin) + len(begin)] + f"\n{table}\n" + text[text.index(end) :]
    return text


if __name__ == "__main__":
    for page in sys.argv[1:]:
        write_atomic(Path(page), fill(Path(page).read_text(encoding="utf-8")))
