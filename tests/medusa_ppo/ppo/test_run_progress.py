"""What a watcher sees: one line a step without a terminal, a live bar with one."""

from __future__ import annotations

import io
import mmap
import re

import pytest
import torch
from rich.console import Console

from medusa_ppo.contract import metrics as names
from medusa_ppo.ppo import run_progress as progress
from medusa_ppo.ppo.run_progress import (
    LineProgress,
    LiveProgress,
    PeakMemory,
    ProgressSink,
    StepClock,
    make_progress,
    step_lines,
)

VALUES = {
    names.STEP: 3,
    names.REWARD_MEAN: 0.5,
    names.CORRECT_FRAC: 0.5,
    names.TOKENS_PER_S: 1234.4,
    names.MAL_SERVING: 1.789,
    names.HEADS_VERSION: 2,
    names.PAIR_PLAIN_TOKENS_PER_S: 881.7,
}


def play(sink: ProgressSink) -> None:
    with sink:
        sink.phase_started(progress.ACTOR)
        sink.phase_advanced(50, 200, "loss 0.5")
        sink.phase_finished(progress.ACTOR, 1.0)
        sink.run_started("demo", 3, 5)
        for step in (3, 4):
            sink.phase_started(progress.GENERATE, step)
            sink.phase_finished(progress.GENERATE, 0.5)
            sink.step_finished({**VALUES, names.STEP: step})
        sink.note("done")


def console(terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=160)


def test_lines_for_logs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(LineProgress, "ANNOUNCE_S", 0.0)
    out = console(terminal=False)
    sink = make_progress(out)
    assert isinstance(sink, LineProgress)
    play(sink)
    lines = out.file.getvalue().splitlines()
    assert lines[:3] == [
        "prepare the actor ...",
        "  prepare the actor: 25%  loss 0.5",
        "demo: steps 3 to 4",
    ]
    assert lines[3].startswith(
        "step   3  reward 0.50  right 50%  1.79 tok/step  v2  1234 tok/s  (882 without drafts)  "
        "left "
    )
    assert lines[4].endswith("left 0:00") and lines[5] == "done"
    assert "\x1b" not in out.file.getvalue()


def test_the_live_bar_shows_step_speed_acceptance_and_time_left():
    out = console(terminal=True)
    sink = make_progress(out)
    assert isinstance(sink, LiveProgress)
    play(sink)
    text = out.file.getvalue()
    for part in (
        "demo",
        "5/5",
        "1234 tokens/s",
        "1.79 tokens a step",
        "left 0:00",
        "step   4",
        "done",
    ):
        assert part in text, part


def test_a_line_leaves_out_what_is_not_known():
    assert step_lines({names.STEP: 0, names.REWARD_MEAN: 1.0, names.CORRECT_FRAC: None}) == [
        "step   0  reward 1.000"
    ]


def test_a_full_line_is_shortened_to_100_columns_and_loses_nothing():
    """A late step of the demo."""
    full = {
        names.STEP: 123,
        names.REWARD_MEAN: 0.5,
        names.CORRECT_FRAC: 0.22,
        names.KL_REFERENCE: 0.125,
        names.ENTROPY: 1.5,
        names.MAL_SERVING: 4.237,
        names.HEADS_VERSION: 4,
        names.TOKENS_PER_S: 1234.5,
    }
    assert step_lines(full, "left 10:59") == [
        "step 123  reward 0.50  right 22%  kl 0.125  entropy 1.50  4.24 tok/step  v4  1234 tok/s "
        " left 10:59"
    ]


def test_what_no_line_has_room_for_continues_below():
    assert set(VALUES) - {names.STEP} < set(progress.STEP_FORMS)
    full = {names.STEP: 3, **dict.fromkeys(progress.STEP_FORMS, 1234)}
    lines = step_lines(full, "left 1:30")
    assert len(lines) == 2 and all(len(line) <= progress.LINE_WIDTH for line in lines)
    assert lines[1].startswith(" " * 10) and lines[1].endswith("left 1:30")
    shown = re.split(r"\s{2,}", "  ".join(lines))
    assert shown[2:-1] == [short.format(1234) for _, short in progress.STEP_FORMS.values()]


def test_silence():
    play(ProgressSink())


def test_time_left(monkeypatch: pytest.MonkeyPatch):
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    clock = StepClock()
    clock.start(2, 12)
    assert clock.left_text() == "?"
    for _ in range(4):
        now[0] += 15
        clock.finished()
    assert clock.left_text() == "1:30"


def test_time_left_is_known_after_the_first_step() -> None:
    clock = StepClock()
    clock.start(0, 5)
    assert clock.left_text() == "?"
    clock.finished()
    assert re.fullmatch(r"\d+:\d\d", clock.left_text())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there torch counts its own")
def test_the_peak_of_a_phase_is_what_it_had_and_not_what_came_before():
    memory = PeakMemory()
    size = 96 * 2**20
    # Pages of its own: what earlier tests freed may still belong to the process, and torch would
    # take that.
    with memory.during("large"), mmap.mmap(-1, size) as pages:
        for start in range(0, size, mmap.PAGESIZE):
            pages[start] = 1
    with memory.during("small"):
        pass
    found = memory.take()
    if not found:
        pytest.skip("this kernel does not let a process forget its peak")
    assert 0.8 * size < (found["large"] - found["small"]) * 2**30 < 1.3 * size
    assert memory.take() == {}


def test_where_nobody_counts_there_is_no_figure(tmp_path, monkeypatch):
    monkeypatch.setattr(progress, "FORGET_PEAK", tmp_path / "no" / "file")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    memory = PeakMemory()
    with memory.during("phase"):
        pass
    assert memory.take() == {}
