"""Rollouts on paper against sums written out by hand, and what the long tail does."""

from __future__ import annotations

from pathlib import Path

import pytest

from heads.errors import DataError, UsageError
from medusa_ppo.predict.rollout_model import ResponseLengths, RolloutModel, StepTable


class LinearSteps:
    """A step takes 1 s and 0.5 s for each sequence; a draft 0.1 s for each, and 0.2 s once."""

    source = "a line"

    def plain(self, sequences: float, context: float) -> float:
        return 1 + 0.5 * sequences + 0.001 * context

    def drafted(self, sequences: float, drafts: int, context: float) -> float:
        extra = 0.2 + 0.1 * drafts * sequences if drafts else 0.05
        return self.plain(sequences, context) + extra

    def prefill(self, tokens: float) -> float:
        return 0.01 * tokens


def lengths(*tokens: int) -> ResponseLengths:
    return ResponseLengths(tokens, "written out")


class NoContext(LinearSteps):
    def plain(self, sequences: float, context: float) -> float:
        return 1 + 0.5 * sequences


def test_a_rollout_is_the_sum_of_its_steps() -> None:
    # Two slots: 2 and 5 begin, then 3 takes the slot of 2. Steps: 2 with two, 3 with two, 0 alone.
    model = RolloutModel(NoContext(), lengths(2, 5, 3), 2, 0, 4)
    plain = model.plain()
    assert plain.seconds == pytest.approx(5 * 2.0)
    assert plain.steps == pytest.approx(5)
    # Now 9 is left alone for its last 6 steps.
    alone = RolloutModel(NoContext(), lengths(3, 9), 2, 0, 4).plain()
    assert alone.seconds == pytest.approx(3 * 2.0 + 6 * 1.5)
    # One of two slots is not fewer than half of them.
    assert alone.tail_s == 0
    tail = RolloutModel(NoContext(), lengths(3, 3, 3, 9), 4, 0, 4).plain()
    assert tail.tail_s == pytest.approx(6 * 1.5)


def test_drafts_take_as_many_steps_as_tokens_a_step_say() -> None:
    model = RolloutModel(NoContext(), lengths(10), 1, 0, 2)
    drafted = model.drafted((0.6, 0.4), 2)
    assert drafted.steps == pytest.approx(10 / 2)
    assert drafted.seconds == pytest.approx(10 / 2 * (1.5 + 0.2 + 0.2))
    assert drafted.drafts == 2


def test_what_pays_best_is_chosen_for_each_number_of_sequences() -> None:
    class Steep(NoContext):
        def drafted(self, sequences: float, drafts: int, context: float) -> float:
            return self.plain(sequences, context) + drafts * 0.02 * sequences**2

    model = RolloutModel(Steep(), lengths(*[10] * 63, 200), 64, 0, 4)
    shares = (0.6, 0.4, 0.3, 0.2)
    tokens = [1.0, 1.6, 2.0, 2.3, 2.5]
    assert model.best_step(tokens, 64, 10)[2] == 0
    assert model.best_step(tokens, 1, 10)[2] == 4
    chosen, fixed = model.drafted(shares), model.drafted(shares, 4)
    plain = model.plain()
    assert chosen.seconds < min(fixed.seconds, plain.seconds)
    # Four drafts while one sequence runs alone, none before.
    assert chosen.drafts == pytest.approx(4 * chosen.tail_s / chosen.seconds)
    assert 0 < chosen.tail_s < plain.tail_s


def test_the_context_of_what_runs_grows() -> None:
    short, long = (
        RolloutModel(LinearSteps(), lengths(count), 1, 0, 1).plain() for count in (100, 1000)
    )
    assert short.seconds == pytest.approx(100 * 1.5 + 0.001 * 100**2 / 2, rel=0.03)
    assert long.seconds == pytest.approx(1000 * 1.5 + 0.001 * 1000**2 / 2, rel=0.05)


def test_fewer_slots_beside_drafting_cost_time() -> None:
    many = lengths(*[20] * 32)
    full = RolloutModel(NoContext(), many, 16, 0, 1)
    less = RolloutModel(NoContext(), many, 16, 0, 1, drafted_slots=8)
    assert less.plain() == full.plain()
    assert less.drafted((0.5,), 1).seconds > full.drafted((0.5,), 1).seconds


def test_step_times_between_sizes_are_a_line() -> None:
    asked = []

    def compute(sequences: float, context: float) -> float:
        asked.append((sequences, context))
        return 2 * sequences + 3 * context

    table = StepTable(compute, 100, 5000)
    assert table.seconds(37, 700) == pytest.approx(2 * 37 + 3 * 700)
    assert table.seconds(100, 5000) == pytest.approx(2 * 100 + 3 * 5000)
    assert table.seconds(38, 710) == pytest.approx(2 * 38 + 3 * 710)
    assert len(asked) == len(set(asked)) <= 8


@pytest.mark.parametrize("longest", [None, 3000])
def test_lengths_have_the_mean_that_was_asked_for(longest: int | None) -> None:
    found = ResponseLengths.log_normal(256, 2000, 0.7, longest)
    assert found.mean == pytest.approx(2000, rel=0.01)
    assert max(found.tokens) == (longest or max(found.tokens))
    assert sorted(found.tokens) != list(found.tokens), "the long ones don't come last"
    assert found == ResponseLengths.log_normal(256, 2000, 0.7, longest)
    even = ResponseLengths.log_normal(8, 100, 0.0)
    assert set(even.tokens) == {100}


@pytest.mark.parametrize("given", [(0, 10, 1, None), (4, 0.5, 1, None), (4, 10, -1, None)])
def test_lengths_that_are_none_are_refused(given: tuple[int, float, float, None]) -> None:
    with pytest.raises(UsageError, match="lengths are not valid"):
        ResponseLengths.log_normal(*given)


def test_a_mean_beyond_the_longest_is_refused() -> None:
    with pytest.raises(UsageError, match="longer than the longest"):
        ResponseLengths.log_normal(4, 100, 1, 50)


def test_lengths_are_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text("12\n7\n300\n")
    assert ResponseLengths.read(file).tokens == (12, 7, 300)
    file.write_text("12\n-7\n")
    with pytest.raises(DataError, match="-7"):
        ResponseLengths.read(file)
    with pytest.raises(DataError, match="can't be read"):
        ResponseLengths.read(tmp_path / "none.txt")
