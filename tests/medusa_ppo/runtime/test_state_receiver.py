"""What a trainer on another node sends to a server is a file there until it is no longer needed; a
wrong length leaves nothing, and nobody sends anything without the token.
"""

from __future__ import annotations

import asyncio
import errno
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from medusa_ppo.runtime import state_receiver
from medusa_ppo.runtime.control_guard import ControlGuard
from medusa_ppo.runtime.state_receiver import STATE_ROUTE, StateReceiver

TOKEN = {"Authorization": "Bearer secret"}


async def theirs(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """vLLM's own routes."""
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., httpx.Response]:
    """ask(verb, route, **more) -> the answer of a server with both middlewares."""
    monkeypatch.setattr("medusa_ppo.runtime.files.SHARED_MEMORY", tmp_path)
    app = ControlGuard(StateReceiver(theirs), "secret")

    def ask(verb: str, route: str = STATE_ROUTE, **more: Any) -> httpx.Response:
        async def asked() -> httpx.Response:
            transport = httpx.ASGITransport(app)  # type: ignore[arg-type]  # ASGI's own types.
            async with httpx.AsyncClient(transport=transport, base_url="http://there") as client:
                return await client.request(verb, route, **more)

        return asyncio.run(asked())

    return ask


def test_a_file_arrives_and_is_gone_when_it_was_used(
    ask: Callable[..., httpx.Response], tmp_path: Path
) -> None:
    content = bytes(range(256)) * 10_000
    answer = ask("PUT", content=content, headers=TOKEN)
    path = Path(answer.json()["path"])
    assert answer.status_code == 200 and path.is_relative_to(tmp_path)
    assert path.read_bytes() == content
    again = Path(ask("PUT", content=b"newer", headers=TOKEN).json()["path"])
    assert again.read_bytes() == b"newer" and not path.exists(), "one at a time"
    assert ask("DELETE", headers=TOKEN).status_code == 200
    assert not any(tmp_path.iterdir())
    assert ask("DELETE", headers=TOKEN).status_code == 200


@pytest.mark.parametrize("length", [0, 3, 9, "many", 1 << 62])
def test_a_wrong_length_leaves_nothing(
    ask: Callable[..., httpx.Response], tmp_path: Path, length: Any
) -> None:
    answer = ask("PUT", content=b"12345", headers=TOKEN | {"Content-Length": str(length)})
    assert answer.status_code in (400, 413) and answer.json()["error"]
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("full", ["folder", "file"])
def test_room_that_others_take_meanwhile_is_no_room_and_nothing_stays(
    ask: Callable[..., httpx.Response],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    full: str,
) -> None:
    """A half file kept its gigabytes, and the engine counted as lost."""

    def no_room(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    content = bytes(1 << 21)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with monkeypatch.context() as patch:
        if full == "folder":
            patch.setattr(state_receiver, "OwnedFolder", no_room)
        else:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
        try:
            answer = ask("PUT", content=content, headers=TOKEN)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert answer.status_code == 413 and f"{len(content)} bytes" in answer.json()["error"]
    assert not any(tmp_path.iterdir())
    assert ask("PUT", content=content, headers=TOKEN).status_code == 200
    ask("DELETE", headers=TOKEN)


def test_a_file_has_its_room_before_its_bytes_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers of one node that were sent an actor at once all began by the same free bytes."""
    monkeypatch.setattr("medusa_ppo.runtime.files.SHARED_MEMORY", tmp_path)
    reserved: list[int] = []
    answers: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        (file,) = tmp_path.glob("*/state.safetensors")
        reserved.append(file.stat().st_blocks * 512)
        return {"type": "http.request", "body": b"x" * 5000, "more_body": len(reserved) < 3}

    async def send(message: dict[str, Any]) -> None:
        answers.append(message)

    receiver = StateReceiver(theirs)
    headers = [(b"content-length", b"15000")]
    scope = {"type": "http", "path": STATE_ROUTE, "method": "PUT", "headers": headers}
    asyncio.run(receiver(scope, receive, send))
    assert answers[0]["status"] == 200 and len(reserved) == 3 and min(reserved) >= 15_000
    receiver._forget()


def test_other_routes_are_the_servers_own_and_strangers_send_nothing(
    ask: Callable[..., httpx.Response], tmp_path: Path
) -> None:
    assert ask("POST", "/pause", headers=TOKEN).status_code == 204
    assert ask("GET", headers=TOKEN).status_code == 405
    for verb in ("PUT", "DELETE"):
        assert ask(verb, content=b"12345").status_code == 401
    assert not any(tmp_path.iterdir())
    assert state_receiver.RECEIVER.endswith(StateReceiver.__name__)
