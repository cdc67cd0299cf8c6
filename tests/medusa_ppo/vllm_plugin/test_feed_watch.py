"""The thread beside an engine: it offers what is whole and newer, asks again where a feed was away,
and asks no second time for what was bad.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from heads.errors import SwapError
from medusa_ppo.feeds.folder_feed import FolderFeed
from medusa_ppo.runtime import files
from medusa_ppo.vllm_plugin import feed_watch
from medusa_ppo.vllm_plugin.feed_watch import FeedWatch, Fetched
from tests.medusa_ppo.feeds.conftest import actor, heads_file, release, until


@pytest.fixture
def watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FeedWatch]:
    monkeypatch.setattr(feed_watch, "LOOK_S", 0.01)
    found = FeedWatch(FolderFeed(tmp_path / "feed"), actor())
    yield found
    found.close()


def publish(tmp_path: Path, number: int) -> Path:
    feed = FolderFeed(tmp_path / "feed")
    version = feed.publish(heads_file(tmp_path / "state", number), release(number))
    return tmp_path / "feed" / version.file


def taken(watch: FeedWatch) -> Fetched:
    until(lambda: watch.offers)
    fetched = watch.take()
    assert fetched is not None
    return fetched


def test_the_newest_is_offered_once_and_its_files_go_with_the_watch(
    watch: FeedWatch, tmp_path: Path
) -> None:
    for number in (1, 2, 3):
        publish(tmp_path, number)
        until(lambda: watch.newest_here >= number)  # noqa: B023
    fetched = taken(watch)
    assert fetched.version == 3 and fetched.path.is_file()
    watch.took(fetched, None)
    looks = watch.looks
    until(lambda: watch.looks > looks + 2)
    assert not watch.offers and watch.known == 3
    publish(tmp_path, 4)
    newer = taken(watch)
    assert newer.version == 4 and fetched.path.is_file(), "what serves stays, to be loaded again"
    folder = fetched.path.parent
    watch.close()
    assert not folder.exists()


def test_what_serves_is_loaded_again_and_the_version_that_is_being_loaded_stays(
    watch: FeedWatch, tmp_path: Path
) -> None:
    publish(tmp_path, 1)
    first = taken(watch)
    watch.took(first, None)
    publish(tmp_path, 2)
    second = taken(watch)
    watch.took(first, None)
    assert watch.newest_here == 2
    looks = watch.looks
    until(lambda: watch.looks > looks + 2)
    assert not watch.offers and second.path.is_file() and first.path.is_file()
    publish(tmp_path, 3)
    until(lambda: watch.offers)
    assert second.path.is_file(), "files are only removed where a newer one is fetched"


def test_what_a_killed_engine_left_in_shared_memory_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / "shm"
    shared.mkdir()
    monkeypatch.setattr(files, "SHARED_MEMORY", shared)
    # Nobody holds the lock of a dead owner.
    left = shared / "medusa-ppo-feed-of-the-dead"
    left.mkdir()
    (left / files.LOCK).touch()
    (left / "heads-1").write_bytes(bytes(1000))
    living = FeedWatch(FolderFeed(tmp_path / "feed"), actor())
    assert not left.exists()
    other = FeedWatch(FolderFeed(tmp_path / "feed"), actor())
    assert living._folder.path.parent == shared and living._folder.path.is_dir()
    for watch in (living, other):
        watch.close()
    assert not list(shared.iterdir())


def test_a_file_that_was_away_is_asked_for_again(
    watch: FeedWatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    watch.close()
    caplog.clear()  # that watch may have said by now that its feed is empty
    file = publish(tmp_path, 1)
    file.rename(tmp_path / "away")
    with caplog.at_level(logging.WARNING, logger="medusa_ppo"):
        again = FeedWatch(FolderFeed(tmp_path / "feed"), actor())
        until(lambda: again.looks > 4)
    assert len(caplog.records) == 1 and not again.offers
    (tmp_path / "away").rename(file)
    assert taken(again).version == 1
    again.close()


def test_an_error_of_any_kind_does_not_end_the_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As safetensors, Ray or a proxy raise them; it is told once, and the version still comes."""
    monkeypatch.setattr(feed_watch, "LOOK_S", 0.01)
    verify = feed_watch.verify
    asked: list[Any] = []

    def failing(*args: Any) -> Path:
        asked.append(args)
        if len(asked) <= 2:
            raise RuntimeError("can't start new thread")
        return verify(*args)

    monkeypatch.setattr(feed_watch, "verify", failing)
    publish(tmp_path, 1)
    with caplog.at_level(logging.WARNING, logger="medusa_ppo"):
        watch = FeedWatch(FolderFeed(tmp_path / "feed"), actor())
        until(lambda: watch.offers or not watch._thread.is_alive())
        assert watch.offers and taken(watch).version == 1
        watch.close()
    (record,) = caplog.records
    assert "can't start new thread" in record.getMessage()


def test_what_was_bad_or_refused_is_not_asked_for_again(watch: FeedWatch, tmp_path: Path) -> None:
    publish(tmp_path, 1)
    first = taken(watch)
    watch.took(first, SwapError("The engine did not take it."))
    looks = watch.looks
    until(lambda: watch.looks > looks + 2)
    assert not watch.offers and watch.known == 0 and watch.serving is None
    publish(tmp_path, 2)
    watch.took(taken(watch), None)
    assert watch.known == 2


def test_the_version_before_a_bad_one_is_taken(watch: FeedWatch, tmp_path: Path) -> None:
    watch.close()
    publish(tmp_path, 1)
    bad = publish(tmp_path, 2)
    bad.write_bytes(bad.read_bytes()[:-1])
    again = FeedWatch(FolderFeed(tmp_path / "feed"), actor())
    assert taken(again).version == 1
    again.close()
