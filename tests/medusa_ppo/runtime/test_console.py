"""Progress of commands without PPO: what their lines say."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from medusa_ppo.runtime import console
from medusa_ppo.runtime.console import OfflineProgress


class Clock:
    """The time of a test, which passes only when told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        monkeypatch.setattr(console.time, "monotonic", lambda: self.now_s)

    def pass_s(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_a_pause_is_no_work(clock: Clock) -> None:
    """Of six parts of 20 s each, the fourth takes an hour more: the machine slept."""
    out = io.StringIO()
    with OfflineProgress(Console(file=out, width=200)).phase("Training", 6) as advance:
        for part in range(5):
            clock.pass_s(20 + 3600 * (part == 3))
            advance(1, f"part {part}")
    lines = [line for line in out.getvalue().splitlines() if "left" in line]
    assert [line.partition(", ")[2] for line in lines] == [
        "100 s left",
        "80 s left",
        "60 s left",
        "40 s left",
        "20 s left",
    ]


def test_work_that_is_not_counted_has_no_part_in_the_pace(clock: Clock) -> None:
    out = io.StringIO()
    with OfflineProgress(Console(file=out, width=200)).phase("Rounds", 5) as advance:
        clock.pass_s(300)
        advance(0, "warm-up")
        clock.pass_s(20)
        advance(1, "round 1")
    first, second = [line for line in out.getvalue().splitlines() if "left" in line]
    assert first.endswith("warm-up, ? left") and second.endswith("round 1, 80 s left")


def test_a_line_without_news_has_no_gap(clock: Clock) -> None:
    out = io.StringIO()
    with OfflineProgress(Console(file=out, width=200)).phase("Tokens", 4) as advance:
        clock.pass_s(20)
        advance(1)
    assert "Tokens: 25%  60 s left" in out.getvalue().splitlines()


def test_words_between_colons_stay_words(capsys: pytest.CaptureFixture[str]) -> None:
    console.say("--kinds hydra:x: unknown")
    console.errors.print("[red]Error:[/red] the reward module:x:function")
    shown = capsys.readouterr()
    assert "hydra:x: unknown" in shown.out and "module:x:function" in shown.err
