"""`medusa-ppo feed`: what people see of a feed, and a server as a process of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from heads.errors import ConfigError, FeedError
from medusa_ppo.engines.http_server import free_port
from medusa_ppo.feeds.feed import Feed
from medusa_ppo.feeds.feed_manifest import MANIFEST
from medusa_ppo.feeds.folder_feed import FolderFeed
from medusa_ppo.feeds.http_feed import FEED_TOKEN, open_feed
from medusa_ppo.runtime.guarded_server import require_free_address
from tests.medusa_ppo.cli.test_cli import run
from tests.medusa_ppo.feeds.conftest import heads_file, release


def answers(feed: Feed) -> bool:
    try:
        feed.manifest()
    except FeedError:
        return False
    return True


def test_list_and_verify_say_what_there_is(tmp_path: Path) -> None:
    folder = str(tmp_path / "feed")
    # A folder that nobody made: most likely the name is wrong.
    said = run("feed", "list", folder, code=1)
    assert "There is no such feed" in said and "companion.feed" in said
    (tmp_path / "feed").mkdir()
    assert "nothing has been published" in run("feed", "list", folder, code=0)
    assert "nothing published" in run("feed", "verify", folder, code=1)
    for number in (1, 2):
        FolderFeed(folder).publish(heads_file(tmp_path / "state", number), release(number))
    listed = run("feed", "list", folder, code=0)
    assert "2 heads of kind medusa" in listed and "2.500" in listed
    assert "2 versions are whole" in run("feed", "verify", folder, code=0)
    newest = sorted((tmp_path / "feed").glob("heads-*"))[-1]
    newest.write_bytes(newest.read_bytes()[:-1])
    assert "do this" in run("feed", "verify", folder, code=1)


def test_the_advice_for_a_damaged_manifest_is_not_the_command_that_failed(tmp_path: Path) -> None:
    FolderFeed(str(tmp_path)).publish(heads_file(tmp_path / "state", 1), release(1))
    (tmp_path / MANIFEST).write_text("{")
    assert "feed list" not in run("feed", "list", str(tmp_path), code=1).partition("do this")[2]


def test_serve_refuses_other_machines_without_a_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(FEED_TOKEN, raising=False)
    output = run("feed", "serve", str(tmp_path), "--host", "0.0.0.0", code=2)
    assert FEED_TOKEN in output and "Traceback" not in output


def test_serve_refuses_a_port_that_is_taken_and_what_is_no_folder(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        said = run("feed", "serve", str(tmp_path), "--port", port, code=2)
    assert f"--port {port}" in said and "do this" in said and "Feed " not in said
    (tmp_path / "file").write_text("kept")
    for name in ("file", "file/below"):
        said = run("feed", "serve", str(tmp_path / name), code=2)
        assert "file is no folder" in said.replace("\n", "") and "Correct FOLDER" in said


def test_an_address_of_another_machine_is_refused_and_any_free_port_taken() -> None:
    require_free_address("127.0.0.1", 0)
    require_free_address("localhost", 0)
    # An address that is kept for documents, so no machine has it.
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1"):
        require_free_address("192.0.2.1", 0)


def test_serve_answers_until_it_is_told_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FEED_TOKEN, "a secret of this test")
    port = free_port()
    command = [sys.executable, "-m", "medusa_ppo", "feed", "serve", str(tmp_path / "feed")]
    server = subprocess.Popen([*command, "--port", str(port)], env=os.environ)
    try:
        feed = open_feed(f"http://127.0.0.1:{port}")
        while not answers(feed):
            assert server.poll() is None, "the server ended"
            time.sleep(0.1)
        feed.publish(heads_file(tmp_path / "state", 1), release(1))
        manifest = feed.manifest()
        assert manifest is not None and manifest.newest == 1
        feed.close()
    finally:
        server.terminate()
        server.wait(timeout=60)
