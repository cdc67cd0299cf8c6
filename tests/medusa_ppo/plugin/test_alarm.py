"""When rollouts after a swap raise an alarm, and when they must not."""

from __future__ import annotations

import logging

import pytest

from heads.checkpoint import checksum, load_state
from heads.heads_config import HeadsConfig
from heads.modules import MedusaHeads
from medusa_ppo.contract.rollouts import Counters, Rollouts, Sampling
from medusa_ppo.contract.status import PublishedHeads
from medusa_ppo.plugin.installer import MIN_DRAFTS, SwapWatch, first_heads


def rollouts(version: int, extra: float, drafts: int = 1000) -> Rollouts:
    return Rollouts(
        (),
        (),
        Counters(drafts, 3 * drafts, round(extra * drafts)),
        1.0,
        Sampling(),
        heads_version=version,
    )


def published(version: int, predicted: float = 2.0) -> PublishedHeads:
    return PublishedHeads(version, "heads.safetensors", "sum", version, predicted)


def watch_after_swap(extra_before: float = 0.5, predicted: float = 2.0) -> SwapWatch:
    watch = SwapWatch()
    assert not watch.broken(rollouts(0, extra_before))
    watch.swapped(published(1, predicted))
    return watch


def test_next_to_no_acceptance_is_an_alarm(caplog: pytest.LogCaptureFixture) -> None:
    watch = watch_after_swap()
    with caplog.at_level(logging.WARNING):
        assert watch.broken(rollouts(1, 0.09))
    assert watch.alarms == 1 and watch.refused == 1 and "version 1" in caplog.text
    assert not watch.broken(rollouts(1, 0.0)), (
        "told once; the loop may be late in putting the others back"
    )


@pytest.mark.parametrize(
    ("before", "predicted", "extra"),
    [(0.5, 2.0, 0.11), (0.5, 1.0, 0.0), (0.01, 2.0, 0.05)],
    ids=["a tenth of the promise is kept", "nothing was predicted", "the heads before had less"],
)
def test_no_alarm(before: float, predicted: float, extra: float) -> None:
    watch = watch_after_swap(before, predicted)
    assert not watch.broken(rollouts(1, extra)) and watch.alarms == 0 and watch.refused == -1


def test_few_draft_steps_are_added_up() -> None:
    watch = watch_after_swap()
    assert not watch.broken(rollouts(1, 0.0, MIN_DRAFTS - 1))
    assert watch.broken(rollouts(1, 0.0, 1))


def test_only_the_first_rollouts_are_judged() -> None:
    """Later a policy may have moved away from its heads; that is no broken swap."""
    watch = watch_after_swap()
    assert not watch.broken(rollouts(1, 0.9))
    assert not watch.broken(rollouts(1, 0.0)) and watch.alarms == 0


def test_rollouts_of_other_heads_do_not_count() -> None:
    watch = watch_after_swap()
    assert not watch.broken(rollouts(0, 0.0))
    assert watch.broken(rollouts(1, 0.0))


def test_without_a_word_on_the_heads_before_there_is_no_alarm() -> None:
    watch = SwapWatch()
    watch.swapped(published(1))
    assert not watch.broken(rollouts(1, 0.0))


def test_heads_that_follow_are_compared_with_those_that_were_put_back() -> None:
    watch = watch_after_swap()
    assert watch.broken(rollouts(1, 0.0))
    watch.put_back()
    watch.swapped(published(2))
    assert watch.broken(rollouts(2, 0.0)) and watch.alarms == 2 and watch.refused == 2


def test_the_first_heads_are_a_file_for_a_while() -> None:
    heads = MedusaHeads(HeadsConfig(4, 8, 2))
    with first_heads(heads) as first:
        assert (
            checksum(load_state(first.path)) == first.checksum == checksum(heads.trainable_state())
            and first.version == 0
        )
        path = first.path
    with pytest.raises(Exception, match="first"):
        load_state(path)
