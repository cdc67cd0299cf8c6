"""A feed whose versions are objects of a real Ray: what goes in comes out, also in other processes
and when its publisher is gone; what is wrong is an error of a feed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
import torch
from ray.exceptions import RayActorError, RaySystemError
from typer.testing import CliRunner

from heads.checkpoint import checksum, load_state
from heads.errors import ConfigError, FeedError
from medusa_ppo.cli.app import app
from medusa_ppo.feeds.feed import verify
from medusa_ppo.feeds.feed_manifest import KEPT_VERSIONS
from medusa_ppo.feeds.http_feed import absolute, open_feed, require_feed
from medusa_ppo.feeds.ray_feed import RayFeed
from medusa_ppo.runtime.named_actors import NAMESPACE
from tests.medusa_ppo.feeds.conftest import actor, heads_file, release

pytestmark = pytest.mark.usefixtures("ray_session")
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def feed(request: pytest.FixtureRequest) -> Iterator[RayFeed]:
    """Of the test's own name."""
    opened = open_feed(f"ray:{request.node.name}")
    assert isinstance(opened, RayFeed)
    yield opened
    opened.forget()
    opened.close()


def test_what_is_published_comes_out_as_it_was(feed: RayFeed, tmp_path: Path) -> None:
    assert feed.manifest() is None
    for number in (1, 2):
        feed.publish(heads_file(tmp_path / f"state-{number}", number), release(number))
    reader = open_feed(feed.address)
    manifest = reader.manifest()
    assert manifest is not None and manifest.newest == 2
    manifest.actor.require_same(actor(), "here")
    newest = manifest.versions[-1]
    assert newest.judged.mean_acceptance_length == 2.5 and newest.policy_version == 2
    path = verify(reader, newest, manifest.actor, tmp_path)
    state = load_state(tmp_path / "state-2")
    assert checksum(state) == newest.checksum
    assert all(torch.equal(value, state[name]) for name, value in load_state(path).items())


def test_few_versions_are_kept_and_numbers_only_grow(feed: RayFeed, tmp_path: Path) -> None:
    first = feed.publish(heads_file(tmp_path / "state", 1), release(1))
    for number in range(2, KEPT_VERSIONS + 4):
        feed.publish(heads_file(tmp_path / "state", number), release(number))
    again = feed.publish(tmp_path / "state", release(1))  # A run that begins anew.
    manifest = feed.manifest()
    assert manifest is not None and again.version == KEPT_VERSIONS + 4
    assert [version.version for version in manifest.versions] == [*range(5, KEPT_VERSIONS + 5)]
    with pytest.raises(FeedError, match="is gone"):
        verify(feed, first, manifest.actor, tmp_path)


def test_another_actors_heads_and_no_heads_are_refused(feed: RayFeed, tmp_path: Path) -> None:
    require_feed(feed.address, actor(seed=1))
    feed.publish(heads_file(tmp_path / "state", 1), release(1))
    require_feed(feed.address, actor())
    with pytest.raises(FeedError, match="another actor"):
        require_feed(feed.address, actor(seed=1))
    with pytest.raises(FeedError, match="another actor"):
        feed.publish(tmp_path / "state", release(2, actor(seed=1)))
    manifest = feed.manifest()
    assert manifest is not None and manifest.newest == 1


def test_publishers_and_readers_are_other_processes(feed: RayFeed, tmp_path: Path) -> None:
    """A version outlives the process that put it there, and an engine's process that nobody has
    connected finds the Ray by RAY_ADDRESS.
    """
    feed.publish(heads_file(tmp_path / "state", 1), release(1))

    @ray.remote
    def publish() -> int:
        place = open_feed(feed.address)
        return place.publish(heads_file(tmp_path / "state-2", 2), release(2)).version

    assert ray.get(publish.remote()) == 2
    code = (
        "import sys, threading\n"
        "from pathlib import Path\n"
        "from medusa_ppo.feeds.feed import verify\n"
        "from medusa_ppo.feeds.http_feed import open_feed\n"
        "def look():\n"
        "    feed = open_feed(sys.argv[1])\n"
        "    manifest = feed.manifest()\n"
        "    for version in manifest.versions:\n"
        "        verify(feed, version, manifest.actor, Path(sys.argv[2]))\n"
        "    print('versions', [version.version for version in manifest.versions])\n"
        "thread = threading.Thread(target=look)\n"  # As an engine does.
        "thread.start()\n"
        "thread.join()\n"
    )
    environment = os.environ | {
        "RAY_ADDRESS": ray.get_runtime_context().gcs_address,
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [sys.executable, "-c", code, feed.address, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "versions [1, 2]" in done.stdout, done.stderr[-2000:]
    assert len(list(tmp_path.glob("heads-*"))) == 2


class Forged:
    """In the actor's place: somebody who writes what he likes."""

    def write(self, manifest: bytes, nbytes: int, data: object) -> None:
        self._manifest = manifest
        self._nbytes = nbytes
        self._ref = ray.put(data)

    def read(self) -> object:
        return self._manifest

    def file(self, name: str) -> object:
        return self._nbytes, [self._ref]


def test_what_is_forged_is_refused_before_it_is_used(feed: RayFeed, tmp_path: Path) -> None:
    feed.publish(heads_file(tmp_path / "state", 1), release(1))
    manifest = feed.manifest()
    assert manifest is not None
    (version,) = manifest.versions
    whole = np.fromfile(tmp_path / "state", np.uint8)
    other = whole.copy()
    other[-1] ^= 1
    good = manifest.model_dump_json().encode()
    huge = good.replace(b'"bytes":%d' % version.bytes, b'"bytes":100000000000')
    damages: dict[str, tuple[bytes, int, object, str]] = {
        "other bytes": (good, whole.size, other, "not the one that its manifest describes"),
        "shorter": (good, whole.size, whole[:-8], "not the one that its manifest describes"),
        "another length": (good, whole.size + 1, whole, "does not have the"),
        "no bytes": (good, whole.size, ["a list"], "not an array of bytes"),
        "100 GB": (huge, 100 * 10**9, whole, "larger than any heads"),
        "a damaged manifest": (b"{", whole.size, whole, "manifest is damaged"),
        "a long manifest": (b" " * 10_000_000, whole.size, whole, "no manifest"),
    }
    forged = ray.remote(name="forged", namespace=NAMESPACE, num_cpus=0)(Forged).remote()
    reader = open_feed("ray:forged")
    for text, nbytes, data, message in damages.values():
        ray.get(forged.write.remote(text, nbytes, data))
        with pytest.raises(FeedError, match=message):
            found = reader.manifest()
            assert found is not None
            verify(reader, found.versions[0], found.actor, tmp_path)
    ray.kill(forged)
    assert not list(tmp_path.glob("*heads-*")), "nothing of it stays"


def test_a_feed_that_ends_is_away_and_may_come_again(feed: RayFeed, tmp_path: Path) -> None:
    feed.publish(heads_file(tmp_path / "state", 1), release(1))
    holder = ray.get_actor(feed.address.removeprefix("ray:"), namespace=NAMESPACE)
    ray.kill(holder)
    ends = time.monotonic() + 30
    # Ray ends it a moment later: until then it may still answer.
    with pytest.raises(RayActorError):
        while time.monotonic() < ends:
            ray.get(holder.read.remote(), timeout=30)
    with pytest.raises(FeedError, match="does not answer"):
        feed.manifest()
    assert feed.manifest() is None
    assert feed.publish(tmp_path / "state", release(7)).version == 7


def test_a_call_that_ray_does_not_take_is_an_error_of_a_feed(feed: RayFeed) -> None:
    """Not only answers fail: `.remote()` raises where this process has lost its Ray."""

    def broken(*_: Any) -> Any:
        raise RaySystemError("the core worker has been shut down")

    feed._actor = SimpleNamespace(read=SimpleNamespace(remote=broken))
    with pytest.raises(FeedError, match=r"(?s)does not answer.*shut down"):
        feed.manifest()
    assert feed.manifest() is None, "the actor is looked up again, and nothing was published"


def test_people_list_and_forget_it(feed: RayFeed, tmp_path: Path) -> None:
    def run(*words: str) -> str:
        result = CliRunner().invoke(app, ["feed", *words])
        assert result.exit_code == 0, result.output
        return result.output

    feed.publish(heads_file(tmp_path / "state", 1), release(1))
    assert "2 heads of kind medusa" in run("list", feed.address)
    assert "ended" in run("forget", feed.address)
    assert "no such feed" in run("forget", feed.address)
    result = CliRunner().invoke(app, ["feed", "forget", str(tmp_path)])
    assert result.exit_code == 2 and "Remove the folder" in result.output


def test_addresses() -> None:
    assert absolute("ray:heads") == "ray:heads"
    for wrong in ("ray:", "ray:a b", "ray:../etc", "ray://127.0.0.1:10001", "ray:" + "x" * 101):
        with pytest.raises(ConfigError):
            open_feed(wrong)
