"""Peers that say nothing more, as one does whose machine lost its power: a server forgets them."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from medusa_ppo.runtime import guarded_server
from medusa_ppo.runtime.guarded_server import GuardedServer
from tests.medusa_ppo.companion.conftest import until

TOKEN_NAME = "MEDUSA_PPO_TEST_TOKEN"
PATIENCE_S = 60


async def whole_body(request: Request) -> Response:
    return PlainTextResponse(f"{len(await request.body())} bytes")


@contextlib.contextmanager
def running() -> Iterator[tuple[GuardedServer, threading.Thread]]:
    route = Route("/body", whole_body, methods=["PUT"])
    server = GuardedServer([route], "127.0.0.1", 0, TOKEN_NAME)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        assert until(lambda: bool(server.port) or not thread.is_alive())
        yield server, thread
    finally:
        server.stop()
        thread.join(PATIENCE_S)


def request(size: int, body: bytes) -> bytes:
    return f"PUT /body HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\n\r\n".encode() + body


@pytest.mark.parametrize(
    "said",
    [b"", b"PUT /body HTT", request(2, b"ab") + b"PUT /body HTTP/1.1\r\nHost"],
    ids=["nothing", "half a request", "half of another one"],
)
def test_a_connection_without_a_request_is_closed(
    said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """256 of them, which need no token, closed a server to everybody else."""
    monkeypatch.setattr(guarded_server, "REQUEST_S", 1)
    monkeypatch.delenv(TOKEN_NAME, raising=False)
    with running() as (server, _), socket.create_connection(("127.0.0.1", server.port)) as peer:
        peer.settimeout(PATIENCE_S)
        peer.sendall(said)
        heard = b""
        while part := peer.recv(65536):
            heard += part
        assert (b"2 bytes" in heard) == (b"ab" in said)


def test_a_body_that_comes_slowly_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarded_server, "REQUEST_S", 1)
    monkeypatch.delenv(TOKEN_NAME, raising=False)
    with running() as (server, _), socket.create_connection(("127.0.0.1", server.port)) as peer:
        peer.settimeout(PATIENCE_S)
        peer.sendall(request(4, b"ab"))
        peer.settimeout(4)
        with pytest.raises(TimeoutError):
            peer.recv(65536)
        peer.settimeout(PATIENCE_S)
        peer.sendall(b"cd")
        assert b" 200 " in peer.recv(65536)


def test_a_server_stops_although_a_request_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """`companion serve` never came to saving its state."""
    monkeypatch.setattr(guarded_server, "REQUEST_S", 1)
    monkeypatch.delenv(TOKEN_NAME, raising=False)
    with (
        running() as (server, thread),
        socket.create_connection(("127.0.0.1", server.port)) as peer,
    ):
        peer.sendall(request(1_000_000, b"half"))
        peer.settimeout(2)
        with pytest.raises(TimeoutError):
            peer.recv(65536)
        server.stop()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
