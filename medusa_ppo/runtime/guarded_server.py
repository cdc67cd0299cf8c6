"""A small HTTP server of ours: on loopback unless told otherwise, and behind a token if there is
one. It waits for nobody without end: a peer that lost its power says no word of it.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Sequence
from typing import IO, Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from heads.errors import ConfigError
from medusa_ppo.runtime.control_guard import LOOPBACK, ControlGuard, secret_of

MOST_CONNECTIONS = 256
REQUEST_S = 10
"""Seconds within which a connection has to send a request, and in which requests are still answered
when the server stops.
"""


def require_token_beyond_loopback(host: str, token_name: str, problem: str, whose: str) -> None:
    """Raise ConfigError for an address that other machines can reach, without a token.

    Args:
        token_name: environment variable of the secret.
        problem: what others could do without it.
        whose: other users of the token, in words.
    """
    if host not in LOOPBACK and not secret_of(token_name):
        raise ConfigError(
            problem,
            given=f"--host {host}, no {token_name}",
            expected=f"{token_name}, the same for {whose}",
            do=f"export {token_name}=$(openssl rand -hex 32) for all of them, or leave --host out.",
        )


def require_free_address(host: str, port: int) -> None:
    """Check an address before the work that the server is for: uvicorn binds it only at its start,
    and then ends the process with a message of its own. Port 0 means any, and is free.

    Raises:
        ConfigError: another program listens there, or this machine has no such address.
    """
    bound, problem = False, "no such address"
    try:
        places = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        places, problem = [], str(error.strerror or error)
    for family, kind, protocol, _, address in places:
        try:
            with socket.socket(family, kind, protocol) as probe:
                # As the server itself: what is left of ended connections doesn't count.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind(address)
            bound = True
        except OSError as error:
            problem = str(error.strerror or error)
            if error.errno == errno.EADDRINUSE:
                bound = False
                break
            # `localhost` has an address of IPv6, which a container may lack.
    if not bound:
        raise ConfigError(
            "The server can't listen at this address.",
            given=f"--host {host} --port {port}: {problem}",
            expected="an address of this machine, and a port that no other program uses",
            do="Choose another --port, stop the other program, or correct --host.",
        )


async def write_body(request: Request, file: IO[bytes], most: int, within_s: float) -> int:
    """Write a request's body into a file. Returns the number of bytes that came; once it is over
    `most`, the rest is not read. Raises TimeoutError if it has not ended in time.
    """
    count = 0
    async with asyncio.timeout(within_s):
        async for part in request.stream():
            count += len(part)
            if count > most:
                break
            await run_in_threadpool(file.write, part)
    return count


def too_slow(within_s: float) -> Response:
    """The answer to a body that did not come in time. What there is of it still is not read."""
    text = f"No end of the request within {within_s:.0f} s."
    return PlainTextResponse(text, 408, headers={"Connection": "close"})


class _Connection(AutoHTTPProtocol):  # type: ignore[misc, valid-type]  # Chosen when imported.
    """Closes when no request comes: uvicorn waits for the first one, and for the rest of one whose
    headers have begun, as long as the peer likes, and a few hundred such connections would keep out
    everybody else.
    """

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.loop.call_later(REQUEST_S, self._look, None)

    def _look(self, before: Any) -> None:
        """`before`: the last request as of the previous look, if it had been answered then."""
        if self.transport.is_closing():
            return
        answered = self.cycle is None or self.cycle.response_complete
        if answered and self.cycle is before:
            self.transport.close()
            return
        self.loop.call_later(REQUEST_S, self._look, self.cycle if answered else self)


class GuardedServer:
    """Runs an ASGI application with these routes. With a token in the environment it answers 401 to
    anyone without it.
    """

    def __init__(self, routes: Sequence[BaseRoute], host: str, port: int, token_name: str) -> None:
        """
        Args:
            port: 0: any free one.
            token_name: environment variable of the secret.

        Raises:
            ConfigError: `secret_of`.
        """
        token = secret_of(token_name)
        app: Any = Starlette(routes=list(routes))
        self._server = uvicorn.Server(
            uvicorn.Config(
                ControlGuard(app, token, token_name) if token else app,
                host=host,
                port=port,
                log_level="warning",
                access_log=False,
                http=_Connection,
                limit_concurrency=MOST_CONNECTIONS,
                timeout_graceful_shutdown=REQUEST_S,
                server_header=False,
                lifespan="off",
            )
        )

    def run(self) -> None:
        """Serve until `stop`, or until a signal if it runs in the main thread."""
        self._server.run()

    def stop(self) -> None:
        """Stop after answering current requests, of which it waits `REQUEST_S` for the last."""
        self._server.should_exit = True

    @property
    def port(self) -> int:
        """The port that it listens on; 0 before that."""
        if not self._server.started:
            return 0
        return int(self._server.servers[0].sockets[0].getsockname()[1])
