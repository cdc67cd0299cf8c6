"""How numbers are written for people: one function per kind of quantity, and an em dash if there is
no measurement.
"""

from __future__ import annotations

import math
from collections.abc import Callable

NONE = "\N{EM DASH}"
TIMES = "\N{MULTIPLICATION SIGN}"
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def length(value: float | None) -> str:
    """Mean acceptance length, tokens per engine step."""
    return NONE if value is None else f"{value:.2f}"


def ratio(value: float | None) -> str:
    return NONE if value is None else f"{TIMES}{value:.2f}"


def span(low: float | None, high: float | None) -> str:
    """The range of some ratios."""
    return f"{ratio(low)} to {ratio(high)}"


def percent(value: float | None) -> str:
    if value is None:
        return NONE
    # From 0.0995 on, one decimal would give 10.0 %.
    digits = 1 if abs(value) < 0.0995 and value else 0
    return f"{100 * value:.{digits}f} %"


def whole(value: float | None) -> str:
    return NONE if value is None else f"{value:,.0f}"


def plain(value: float | None) -> str:
    """Three significant digits, thousands separated, no exponent between 1e-4 and 1e9."""
    if value is None:
        return NONE
    size = abs(value)
    if size == 0:
        return "0"
    # Three significant digits would give 1e+03.
    if size >= 999.5:
        return f"{value:,.0f}" if size < 1e9 else f"{value:.3g}"
    return f"{value:.3g}" if size >= 1e-4 else f"{value:.1e}"


def short(text: str, value: float) -> str:
    """A figure at an axis, with room for about six characters: thousands and millions by letter."""
    # A text that is not a bare number (a percentage, a time) is already short and has its unit.
    if abs(value) < 10_000 or not text.replace(",", "").lstrip("-").isdigit():
        return text
    return f"{value / 1e6:g}M" if abs(value) >= 1e6 else f"{value / 1e3:g}k"


def size_text(count: float) -> str:
    """A number of bytes in a readable unit."""
    power = min(len(UNITS) - 1, int(math.log(max(1, count), 1024)))
    return f"{count / 1024**power:.{int(power > 0)}f} {UNITS[power]}"


def signed(value: float | None) -> str:
    return NONE if value is None else f"{value:+.2f}"


def seconds(value: float | None) -> str:
    """Seconds below two minutes, then minutes, then hours."""
    if value is None:
        return NONE
    if value < 0:
        return f"-{seconds(-value)}"
    if value < 10:
        return f"{value:.2g} s" if value >= 0.01 or value == 0 else f"{1000 * value:.1g} ms"
    if value < 120:
        return f"{value:.0f} s"
    if value < 7200:
        return f"{value / 60:.0f} min"
    return f"{value / 3600:.1f} h"


def exact_seconds(value: float | None) -> str:
    """Seconds with a decimal, for values that are compared and hardly differ."""
    return NONE if value is None else f"{value:.1f} s"


def more_time(ratio: float) -> str:
    """A ratio of times, in words."""
    percent = round(100 * (ratio - 1))
    return (
        f"{abs(percent)} % {'less' if percent < 0 else 'more'} time" if percent else "the same time"
    )


def overlapped(idle_frac: float | None) -> bool:
    """Whether two sides, idle for this share on average, worked at the same time at all. In turn
    they are idle for half of the time whatever they do, which says nothing.
    """
    return idle_frac is not None and idle_frac < 0.495


AGAINST = {
    "vllm": "vLLM without speculation",
    "own": "the same engine without drafts",
    None: "the same without",
}
"""What rollouts with drafts were timed against."""

FORMATS: dict[str, Callable[[float | None], str]] = {
    say.__name__: say for say in (length, percent, whole, plain, seconds)
}
"""Formats of charts, by name."""
