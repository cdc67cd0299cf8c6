"""The feed's thread: the newest version goes there, whatever the feed does meanwhile."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from heads.checkpoint import checksum, load_state
from heads.errors import FeedError
from medusa_ppo.companion.feeder import Feeder, Offer
from medusa_ppo.feeds.feed_manifest import FeedVersion, Release
from medusa_ppo.feeds.folder_feed import FolderFeed
from tests.medusa_ppo.feeds.conftest import heads_file, release

PATIENCE_S = 60.0


class Held(FolderFeed):
    """A folder that takes a version once it may, or raises what it is told to."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.begun, self.may = threading.Event(), threading.Event()
        self.may.set()
        self.error: Exception | None = None
        self.closed = False

    def publish(self, path: Path, release: Release) -> FeedVersion:
        self.begun.set()
        assert self.may.wait(PATIENCE_S)
        if self.error is not None:
            raise self.error
        return super().publish(path, release)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def feed(tmp_path: Path) -> Held:
    return Held(tmp_path / "feed")


@pytest.fixture
def feeder(feed: Held) -> Iterator[Feeder]:
    found = Feeder(feed)
    yield found
    feed.may.set()
    found.close(PATIENCE_S)


def offer(tmp_path: Path, number: int, first: bool = False) -> Offer:
    path = heads_file(tmp_path / f"state-{number}", number)
    return Offer(path, checksum(load_state(path)), release(number), first)


def numbers(feed: FolderFeed) -> list[int]:
    manifest = feed.manifest()
    return [] if manifest is None else [version.version for version in manifest.versions]


def test_of_what_is_offered_during_an_upload_the_newest_is_put_there(
    feeder: Feeder, feed: Held, tmp_path: Path
) -> None:
    feed.may.clear()
    feeder.offer(offer(tmp_path, 1))
    assert feed.begun.wait(PATIENCE_S)
    for number in (2, 3):
        feeder.offer(offer(tmp_path, number))
    assert not feeder.drain(0.05)
    feed.may.set()
    assert feeder.drain(PATIENCE_S) and numbers(feed) == [1, 3] and not feeder.problem


@pytest.mark.parametrize(
    "error", [FeedError("away", given="x"), OSError("no room"), ZeroDivisionError("a fault")]
)
def test_what_could_not_be_put_there_is_tried_again_when_told(
    feeder: Feeder, feed: Held, tmp_path: Path, error: Exception
) -> None:
    feed.error = error
    feeder.offer(offer(tmp_path, 1))
    assert feeder.drain(PATIENCE_S) and str(error.args[0]) in feeder.problem
    feed.error = None
    assert feeder.drain(0.2) and numbers(feed) == []
    feeder.again()
    assert feeder.drain(PATIENCE_S) and numbers(feed) == [1] and not feeder.problem
    feed.begun.clear()
    feeder.again()
    assert feeder.drain(PATIENCE_S) and not feed.begun.is_set(), "it is there"


def test_an_upload_is_named_once_it_lasts_longer_than_its_bytes_should(
    feeder: Feeder, feed: Held, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads of 2.4 GB take twenty seconds over 1 Gbit/s: each version was an error of the
    companion.
    """
    now_s = [1000.0]
    clock = SimpleNamespace(monotonic=lambda: now_s[0])
    monkeypatch.setattr("medusa_ppo.companion.feeder.time", clock)
    large = offer(tmp_path, 1)
    os.truncate(large.path, 2_400_000_000)
    # Nothing reads the file.
    feed.error = OSError("no room")
    feed.may.clear()
    feeder.offer(large)
    assert feed.begun.wait(PATIENCE_S)
    for seconds, named in ((11, False), (200, False), (240, True)):
        now_s[0] = 1000.0 + seconds
        assert bool(feeder.problem) == named
    assert "after 239 s or more" in feeder.problem
    feed.may.set()
    assert feeder.drain(PATIENCE_S) and "no room" in feeder.problem
    small = offer(tmp_path, 2)
    feed.begun.clear()
    feed.may.clear()
    feeder.offer(small)
    assert feed.begun.wait(PATIENCE_S) and not feeder.problem
    now_s[0] += 11
    assert "after 10 s or more" in feeder.problem


def test_what_is_taken_back_is_not_put_there(feeder: Feeder, feed: Held, tmp_path: Path) -> None:
    feed.error = OSError("no room")
    feeder.offer(offer(tmp_path, 1))
    assert feeder.drain(PATIENCE_S)
    feed.error = None
    feeder.offer(None)
    feeder.again()
    assert feeder.drain(PATIENCE_S) and numbers(feed) == [] and not feeder.problem


def test_first_versions_are_for_an_empty_feed(feeder: Feeder, feed: Held, tmp_path: Path) -> None:
    for number in (1, 2):
        feeder.offer(offer(tmp_path, number, first=True))
        assert feeder.drain(PATIENCE_S)
    assert numbers(feed) == [1] and not feeder.problem


def test_numbers_go_on_where_a_feed_has_lost_its_versions(
    feeder: Feeder, feed: Held, tmp_path: Path
) -> None:
    """Engines kept for good the version that they had from before: the publisher went on with its
    own numbers, which are lower in a feed that an earlier run has filled.
    """
    for number in range(1, 21):
        feed.publish(heads_file(tmp_path / "earlier", number), release(number))
    for number in (1, 2):
        feeder.offer(offer(tmp_path, number))
        assert feeder.drain(PATIENCE_S)
    assert numbers(feed)[-2:] == [21, 22]
    shutil.rmtree(feed.folder)
    feeder.offer(offer(tmp_path, 3))
    assert feeder.drain(PATIENCE_S) and numbers(feed) == [23] and not feeder.problem


def test_numbers_go_on_where_feed_and_companion_were_lost_together(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The next process began to count with its own versions: engines elsewhere kept old heads."""
    feed, kept = FolderFeed(tmp_path / "feed"), tmp_path / "run" / "number"
    feed.publish(heads_file(tmp_path / "earlier", 40), release(40))

    def feed_with(number: int, kept: Path | None) -> list[int]:
        feeder = Feeder(feed, kept)
        feeder.offer(offer(tmp_path, number))
        feeder.close(PATIENCE_S)
        assert not feeder.problem
        return numbers(feed)

    assert feed_with(1, kept) == [40, 41]
    shutil.rmtree(feed.folder)
    assert feed_with(2, kept) == [42]
    # What can't be kept or read is told, and the version goes there all the same.
    kept.write_text("forty")
    assert feed_with(3, kept) == [42, 43] and "could not be read" in caplog.text
    kept.unlink()
    kept.mkdir()
    assert feed_with(4, kept) == [42, 43, 44] and "could not be kept" in caplog.text


def test_at_the_end_the_last_version_still_goes_there(feed: Held, tmp_path: Path) -> None:
    feeder = Feeder(feed)
    feeder.offer(offer(tmp_path, 1))
    feeder.close(PATIENCE_S)
    assert numbers(feed) == [1] and feed.closed
    unused = Held(tmp_path / "other")
    Feeder(unused).close(PATIENCE_S)
    assert unused.closed


@pytest.mark.parametrize("back", [True, False])
def test_at_the_end_what_could_not_be_put_there_is_tried_once_more(
    feed: Held, tmp_path: Path, caplog: pytest.LogCaptureFixture, back: bool
) -> None:
    """The feed may be well again, and no batch comes after which it would be tried."""
    feed.error = FeedError("away", given="x")
    feeder = Feeder(feed)
    feeder.offer(offer(tmp_path, 1))
    assert feeder.drain(PATIENCE_S) and feeder.problem
    if back:
        feed.error = None
    feeder.close(None)
    assert numbers(feed) == ([1] if back else []) and feed.closed
    assert ("newest heads are not in the feed" in caplog.text) == (not back)


def test_at_the_end_an_upload_has_the_time_that_its_bytes_take(
    feed: Held, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("medusa_ppo.companion.feeder.LONG_S", 0.0)
    offered = offer(tmp_path, 1)
    nbytes = offered.path.stat().st_size
    for seconds in (0.05, PATIENCE_S):
        monkeypatch.setattr("medusa_ppo.companion.feeder.BYTES_PER_S", nbytes / seconds)
        feed.begun.clear()
        feed.may.clear()
        feeder = Feeder(feed)
        feeder.offer(offered)
        assert feed.begun.wait(PATIENCE_S)
        late = threading.Timer(0.3, feed.may.set)
        if seconds == PATIENCE_S:
            late.start()
        feeder.close(None)
        assert numbers(feed) == ([1] if seconds == PATIENCE_S else [])
        assert "on their way" in caplog.text
        assert ("not in the feed" in caplog.text) == (seconds != PATIENCE_S)
        caplog.clear()
        feed.may.set()
        assert feeder._thread is not None
        feeder._thread.join(PATIENCE_S)
        shutil.rmtree(feed.folder)
