"""Versions go in and come out, through a folder and over HTTP; whatever else comes is refused
before it takes memory.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import json
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from heads.checkpoint import checksum, load_state, save_state
from heads.errors import CheckpointError, ConfigError, FeedError
from heads.heads_config import HeadsConfig
from medusa_ppo.companion.client import CompanionClient
from medusa_ppo.config.companion_section import CompanionConfig
from medusa_ppo.feeds.actor_sketch import actor_sketch, alike, sketch_rows
from medusa_ppo.feeds.feed import verify
from medusa_ppo.feeds.feed_manifest import KEPT_VERSIONS, MANIFEST, MOST_MANIFEST_BYTES, FeedActor
from medusa_ppo.feeds.feed_server import FeedServer
from medusa_ppo.feeds.folder_feed import ABANDONED_S, COPIED, FolderFeed
from medusa_ppo.feeds.http_feed import (
    FEED_TOKEN,
    RELEASE_HEADER,
    HttpFeed,
    absolute,
    open_feed,
    require_feed,
)
from tests.medusa_ppo.feeds.conftest import (
    CONFIG,
    VOCAB,
    Place,
    actor,
    heads_file,
    lm_head,
    release,
)


def published(place: Place, tmp_path: Path, versions: int = 1) -> None:
    for number in range(1, versions + 1):
        place.feed.publish(heads_file(tmp_path / f"state-{number}", number), release(number))


def rewrite(place: Place, change: Callable[[dict[str, Any]], None]) -> None:
    """What somebody else does to the manifest."""
    path = place.folder / MANIFEST
    raw = json.loads(path.read_text())
    change(raw)
    path.write_text(json.dumps(raw))


def test_what_is_published_comes_out_as_it_was(place: Place, tmp_path: Path) -> None:
    assert place.feed.manifest() is None
    published(place, tmp_path, 2)
    manifest = place.feed.manifest()
    assert manifest is not None and manifest.newest == 2
    manifest.actor.require_same(actor(), "here")
    newest = manifest.versions[-1]
    assert newest.judged.mean_acceptance_length == 2.5 and newest.policy_version == 2
    path = verify(place.feed, newest, manifest.actor, tmp_path)
    state = load_state(tmp_path / "state-2")
    assert checksum(state) == newest.checksum
    assert all(torch.equal(value, state[name]) for name, value in load_state(path).items())


def test_few_versions_are_kept_and_numbers_only_grow(place: Place, tmp_path: Path) -> None:
    published(place, tmp_path, KEPT_VERSIONS + 3)
    again = place.feed.publish(tmp_path / "state-1", release(1))  # A run that begins anew.
    manifest = place.feed.manifest()
    assert manifest is not None and again.version == KEPT_VERSIONS + 4
    numbers = [version.version for version in manifest.versions]
    assert numbers == [*range(5, KEPT_VERSIONS + 5)]
    files = {version.file for version in manifest.versions}
    assert {path.name for path in place.folder.iterdir()} == {MANIFEST, *files}


def test_what_a_killed_publisher_had_half_written_is_removed(tmp_path: Path) -> None:
    """But not what another one writes now."""
    feed = FolderFeed(tmp_path / "feed")
    feed.folder.mkdir()
    left, now = (feed.folder / f"{COPIED}{name}" for name in ("left", "now"))
    for path in (left, now):
        path.write_bytes(b"half")
    long_ago = left.stat().st_mtime - ABANDONED_S - 60
    os.utime(left, (long_ago, long_ago))
    feed.publish(heads_file(tmp_path / "state", 1), release(1))
    assert not left.exists() and now.exists()
    manifest = feed.manifest()
    assert manifest is not None and manifest.newest == 1


def test_readers_meet_no_half_version_while_one_publishes(place: Place, tmp_path: Path) -> None:
    published(place, tmp_path)
    done = threading.Event()

    def read(number: int) -> list[int]:
        seen = []
        folder = tmp_path / f"reader-{number}"
        folder.mkdir()
        while not done.is_set() or not seen:
            manifest = place.feed.manifest()
            assert manifest is not None
            seen.append(manifest.newest)
            verify(place.feed, manifest.versions[-1], manifest.actor, folder).unlink()
        return seen

    with ThreadPoolExecutor(3) as pool:
        readers = [pool.submit(read, number) for number in range(3)]
        for number in range(2, 12):
            time.sleep(0.3)  # A reader that is slower than all versions kept finds its own gone.
            place.feed.publish(heads_file(tmp_path / "next", number), release(number))
        done.set()
        for reader in readers:
            seen = reader.result()
            assert seen == sorted(seen)


def test_a_forged_digest_a_short_and_a_long_file_are_refused(place: Place, tmp_path: Path) -> None:
    published(place, tmp_path)
    manifest = place.feed.manifest()
    assert manifest is not None
    (version,) = manifest.versions
    stored = place.folder / version.file
    whole = stored.read_bytes()
    damages = {
        "other bytes": whole[:-1] + bytes([whole[-1] ^ 1]),
        "half-written": whole[: len(whole) // 2],
        "longer": whole + b"more" * 100_000,
    }
    for data in damages.values():
        stored.write_bytes(data)
        with pytest.raises(FeedError, match="not the one that its manifest describes"):
            verify(place.feed, version, manifest.actor, tmp_path)
    forged = version.model_copy(update={"checksum": "0" * 64})
    stored.write_bytes(whole)
    with pytest.raises(FeedError, match="does not hold heads of its actor"):
        verify(place.feed, forged, manifest.actor, tmp_path)
    stored.unlink()
    with pytest.raises(FeedError):
        verify(place.feed, version, manifest.actor, tmp_path)
    assert not list(tmp_path.glob("*heads-*")), "nothing of it stays"


def test_a_file_of_100_gb_is_neither_read_nor_written(place: Place, tmp_path: Path) -> None:
    published(place, tmp_path)

    def huge(raw: dict[str, Any]) -> None:
        raw["versions"][0]["bytes"] = 100 * 10**9

    rewrite(place, huge)
    manifest = place.feed.manifest()
    assert manifest is not None
    stored = place.folder / manifest.versions[0].file
    os.truncate(stored, 100 * 10**9)  # Sparse.
    with pytest.raises(FeedError, match="larger than any heads"):
        verify(place.feed, manifest.versions[0], manifest.actor, tmp_path)
    honest = manifest.versions[0].model_copy(update={"bytes": manifest.actor.most_bytes()})
    with pytest.raises(FeedError, match="not the one"):
        verify(place.feed, honest, manifest.actor, tmp_path)


def test_tensors_that_are_no_heads_of_the_actor_are_refused(place: Place, tmp_path: Path) -> None:
    heads_file(tmp_path / "state", 1)
    state = load_state(tmp_path / "state")
    name = next(iter(state))
    for wrong in ({**state, name: state[name][:1]}, {name: state[name]}):
        save_state(tmp_path / "wrong", wrong)
        with pytest.raises((FeedError, CheckpointError)):
            place.feed.publish(tmp_path / "wrong", release(1))
    (tmp_path / "pickle").write_bytes(b"\x80\x04cos\nsystem\n")
    with pytest.raises((FeedError, CheckpointError)):
        place.feed.publish(tmp_path / "pickle", release(1))
    assert place.feed.manifest() is None


def test_another_actors_heads_are_not_published_into_a_feed(place: Place, tmp_path: Path) -> None:
    published(place, tmp_path)
    with pytest.raises(FeedError, match="another actor"):
        place.feed.publish(heads_file(tmp_path / "next", 2), release(2, actor(seed=1)))
    wider = FeedActor(heads=HeadsConfig(32, VOCAB, num_heads=2).to_dict())
    with pytest.raises((FeedError, CheckpointError)):
        place.feed.publish(heads_file(tmp_path / "next", 2), release(2, wider))


def test_a_wrong_feed_is_refused_before_anything_is_published(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = place.feed.address
    require_feed(address, actor(seed=1))
    published(place, tmp_path)
    require_feed(address, actor())
    with pytest.raises(FeedError, match="another actor"):
        require_feed(address, actor(seed=1))
    with pytest.raises(ConfigError):
        require_feed("ftp://somewhere", actor())
    monkeypatch.chdir(tmp_path)
    assert absolute("feed") == str(tmp_path / "feed") and absolute("http://a:1") == "http://a:1"


@pytest.mark.parametrize("resume_from", ["", "somewhere"])
def test_a_run_says_that_a_feed_has_versions_of_an_earlier_one(
    resume_from: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """Its first version takes their place in all engines, whatever they had."""

    def enough(*_: object) -> None:
        raise InterruptedError

    monkeypatch.setattr("medusa_ppo.companion.client.ray.is_initialized", lambda: True)
    monkeypatch.setattr("medusa_ppo.companion.client._with_gpus", enough)
    place = Place(FolderFeed(tmp_path / "feed"), tmp_path / "feed")
    settings = CompanionConfig(feed=place.feed.address)
    for versions in (0, 2):
        published(place, tmp_path, versions)
        with pytest.raises(InterruptedError):
            CompanionClient(CONFIG, settings, lm_head(), seed=0, resume_from=resume_from)
        assert ("the newest is 2" in caplog.text) == bool(versions and not resume_from)


def test_a_trained_actor_is_still_itself_and_another_is_not() -> None:
    rows_RD = lm_head()[sketch_rows(VOCAB)]
    moved_RD = rows_RD + 0.2 * torch.randn(
        rows_RD.shape, generator=torch.Generator().manual_seed(5)
    )
    first = actor_sketch(rows_RD)
    assert alike(first, actor_sketch(moved_RD)) and alike(first, "") and alike("", first)
    assert not alike(first, actor_sketch(lm_head(1)[sketch_rows(VOCAB)]))


MANIFESTS = {
    "no JSON": "{",
    "an unknown key": '{"format_version": 1, "run": "x"}',
    "a list": "[]",
    "another format": '{"format_version": 2, "actor": {"heads": {}}, "versions": []}',
    "a key twice": '{"format_version": 1, "format_version": 1}',
    "deep": "[" * 100_000,
    "too long": " " * 10_000_000,
}


@pytest.mark.parametrize("text", MANIFESTS.values(), ids=MANIFESTS)
def test_a_damaged_manifest_is_refused(place: Place, text: str) -> None:
    place.folder.mkdir()
    (place.folder / MANIFEST).write_text(text)
    with pytest.raises(FeedError):
        place.feed.manifest()


CHANGES: dict[str, Callable[[dict[str, Any]], None]] = {
    "a path": lambda raw: raw["versions"][0].update(file="../../etc/passwd"),
    "an absolute path": lambda raw: raw["versions"][0].update(file="/etc/passwd"),
    "no number": lambda raw: raw["versions"][0].update(bytes="1e9"),
    "true": lambda raw: raw["versions"][0].update(version=True),
    "below nothing": lambda raw: raw["versions"][0].update(bytes=-1),
    "twice": lambda raw: raw.update(versions=raw["versions"] * 2),
    "layers": lambda raw: raw["actor"]["heads"].update(num_layers=2_000_000),
    "a huge vocabulary": lambda raw: raw["actor"]["heads"].update(vocab_size=1 << 40),
    "NaN": lambda raw: raw["versions"][0]["judged"].update(mean_acceptance_length=float("nan")),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_forged_manifest_is_refused(
    place: Place, tmp_path: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    published(place, tmp_path)
    rewrite(place, change)
    with pytest.raises(FeedError, match="manifest is damaged"):
        found = place.feed.manifest()
        assert found is not None
        found.actor.most_bytes()  # What a reader asks next, before it fetches anything.


def test_a_folder_that_may_not_be_read_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine told of full shared memory. What is mocked: the permissions, which root has."""
    feed = FolderFeed(tmp_path / "feed")
    published(Place(feed, feed.folder), tmp_path)

    def refused(path: Any, **_: Any) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(os, "lstat", refused)
        patch.setattr(os, "stat", refused)
        with pytest.raises(FeedError, match=r"(?s)can't be read.*Permission denied"):
            feed.manifest()
    assert feed.manifest() is not None


def test_links_and_pipes_are_not_followed(tmp_path: Path) -> None:
    place = Place(FolderFeed(tmp_path / "feed"), tmp_path / "feed")
    published(place, tmp_path)
    manifest = place.feed.manifest()
    assert manifest is not None
    stored = place.folder / manifest.versions[0].file
    stored.rename(tmp_path / "elsewhere")
    stored.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FeedError):
        verify(place.feed, manifest.versions[0], manifest.actor, tmp_path)
    stored.unlink()
    os.mkfifo(stored)
    with pytest.raises(FeedError):
        verify(place.feed, manifest.versions[0], manifest.actor, tmp_path)


# ---- HTTP alone


def test_who_has_no_token_reads_and_publishes_nothing(
    tmp_path: Path, token: str, served: Callable[[Path], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    address = served(tmp_path / "feed")
    for wrong in ("", "another"):
        monkeypatch.setenv(FEED_TOKEN, wrong)
        feed = HttpFeed(address)
        with pytest.raises(FeedError, match="401"):
            feed.manifest()
        with pytest.raises(FeedError, match="401"):
            feed.publish(heads_file(tmp_path / "state", 1), release(1))
        feed.close()


def test_a_tokens_newline_keeps_nobody_out_and_is_in_no_error(
    tmp_path: Path, token: str, served: Callable[[Path], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    address = served(tmp_path / "feed")
    monkeypatch.setenv(FEED_TOKEN, f"{token}\n")
    feed = HttpFeed(address)
    assert feed.manifest() is None
    assert feed.publish(heads_file(tmp_path / "state", 1), release(1)).version == 1
    feed.close()


def test_without_a_token_a_server_stays_on_loopback_and_takes_nothing(
    tmp_path: Path, served: Callable[[Path], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(FEED_TOKEN, raising=False)
    with pytest.raises(ConfigError, match=FEED_TOKEN):
        FeedServer(tmp_path, "0.0.0.0", 0)
    feed = HttpFeed(served(tmp_path / "feed"))
    assert feed.manifest() is None
    with pytest.raises(FeedError, match="403"):
        feed.publish(heads_file(tmp_path / "state", 1), release(1))
    feed.close()


def test_a_server_gives_out_nothing_but_what_the_manifest_names(
    tmp_path: Path, token: str, served: Callable[[Path], str]
) -> None:
    folder = tmp_path / "feed"
    address = served(folder)
    published(Place(FolderFeed(folder), folder), tmp_path)
    (folder / "secret").write_text("mine")
    (tmp_path / "outside").write_text("mine")
    headers = {"Authorization": f"Bearer {token}"}
    for name in ("secret", "../outside", "%2e%2e%2foutside", "heads-000001-00000000.safetensors"):
        assert httpx.get(f"{address}/{name}", headers=headers, trust_env=False).status_code == 404
    more = {**headers, "X-Medusa-PPO-Release": "{}"}
    for method, path in (("DELETE", "/manifest.json"), ("POST", "/versions"), ("PUT", "/versions")):
        answer = httpx.request(method, f"{address}{path}", headers=more, trust_env=False)
        assert answer.status_code in (400, 404, 405)


def test_an_upload_that_never_ends_is_given_up(
    tmp_path: Path, token: str, served: Callable[[Path], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("medusa_ppo.feeds.feed_server.ANSWER_S", 1.0)
    host, port = served(tmp_path / "feed").removeprefix("http://").split(":")
    told = {
        "Authorization": f"Bearer {token}",
        RELEASE_HEADER: release(1).model_dump_json(),
        "Content-Length": "5000",
    }
    lines = "".join(f"{name}: {value}\r\n" for name, value in told.items())
    with socket.create_connection((host, int(port))) as peer:
        peer.settimeout(60)
        peer.sendall(f"PUT /versions HTTP/1.1\r\nHost: x\r\n{lines}\r\n".encode() + b"x" * 1000)
        heard = b""
        while part := peer.recv(4096):
            heard += part
        assert b" 408 " in heard
    assert FolderFeed(tmp_path / "feed").manifest() is None


def test_an_upload_needs_room_where_the_feed_is_and_nowhere_else(
    tmp_path: Path, token: str, served: Callable[[Path], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It went through /tmp; and of a full disk its sender learned nothing but the number 500."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "full"))
    feed = HttpFeed(served(tmp_path / "feed"))
    path = heads_file(tmp_path / "state", 1)
    assert feed.publish(path, release(1)).version == 1

    async def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("medusa_ppo.feeds.feed_server.write_body", full)
    with pytest.raises(FeedError, match=r"507 .*No space left on device"):
        feed.publish(path, release(2))
    feed.close()
    manifest = FolderFeed(tmp_path / "feed").manifest()
    assert manifest is not None
    named = {MANIFEST, *(version.file for version in manifest.versions)}
    assert {path.name for path in (tmp_path / "feed").iterdir()} == named


def test_nobody_answers_or_not_as_a_feed(tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{closed.getsockname()[1]}"
    feed = open_feed(address)
    with pytest.raises(FeedError, match="does not answer"):
        feed.manifest()
    feed.close()
    (tmp_path / "a file").write_text("")
    assert open_feed(str(tmp_path / "nothing here")).manifest() is None
    for wrong in ("s3://bucket", "", "http://", "http://host:port"):
        with pytest.raises(ConfigError):
            open_feed(wrong)


@pytest.fixture
def answering() -> Any:
    """answering(data): the address of a server that sends this to whoever comes, and then waits."""
    sockets: list[socket.socket] = []
    over = threading.Event()

    def serve(data: bytes) -> str:
        listening = socket.create_server(("127.0.0.1", 0))
        sockets.append(listening)

        def answer() -> None:
            while not over.is_set():
                try:
                    peer, _ = listening.accept()
                except OSError:  # Closed at the end of the test.
                    return
                peer.recv(65536)
                peer.sendall(data)
                sockets.append(peer)

        threading.Thread(target=answer, daemon=True).start()
        return f"http://127.0.0.1:{listening.getsockname()[1]}"

    yield serve
    over.set()
    for opened in sockets:
        opened.close()


STRANGE = {
    "no HTTP": b"no HTTP",
    "elsewhere": b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:9/\r\n"
    b"Content-Length: 0\r\n\r\n",
    "90 GB": b"HTTP/1.1 200 OK\r\nContent-Length: 90000000000\r\n\r\n" + b"x" * 1_000_000,
    "stuck": b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf",
}


@pytest.mark.parametrize("data", STRANGE.values(), ids=STRANGE)
def test_a_strange_server_is_given_up(
    answering: Callable[[bytes], str],
    data: bytes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("medusa_ppo.feeds.http_feed.ANSWER_S", 0.5)
    feed = open_feed(answering(data))
    with pytest.raises(FeedError):
        feed.manifest()
    with pytest.raises(FeedError):
        feed.publish(heads_file(tmp_path / "state", 1), release(1))
    feed.close()


@pytest.mark.parametrize("how", ["packed", "long"])
def test_of_an_answer_to_an_upload_no_more_is_read_than_a_version_has(
    how: str, answering: Callable[[bytes], str], tmp_path: Path
) -> None:
    """100 MB of zeros fit into 100 kB."""
    path = heads_file(tmp_path / "state", 1)
    version = FolderFeed(tmp_path / "feed").publish(path, release(1))
    body = version.model_dump_json().encode()
    head = b"HTTP/1.1 200 OK\r\n"
    if how == "packed":
        body = gzip.compress(body)
        head += b"Content-Encoding: gzip\r\n"
    else:
        body += b" " * MOST_MANIFEST_BYTES
    feed = open_feed(answering(head + f"Content-Length: {len(body)}\r\n\r\n".encode() + body))
    with pytest.raises(FeedError):
        feed.publish(path, release(1))
    feed.close()


def test_an_answer_that_trickles_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("medusa_ppo.feeds.http_feed.ANSWER_S", 0.5)
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def trickle() -> None:
            for _ in range(2):
                peer, _ = listening.accept()
                with peer, contextlib.suppress(OSError):  # The reader goes.
                    peer.recv(65536)
                    peer.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
                    for _ in range(100):
                        peer.sendall(b" ")
                        over.wait(0.1)

        answers = threading.Thread(target=trickle, daemon=True)
        answers.start()
        feed = open_feed(f"http://127.0.0.1:{listening.getsockname()[1]}")
        with pytest.raises(FeedError, match="no end in time"):
            feed.manifest()
        with pytest.raises(FeedError, match="no end in time"):
            feed.publish(heads_file(tmp_path / "state", 1), release(1))
        feed.close()
        over.set()
        answers.join(60)
