"""A small HTTP server of ours: on loopback unless told otherwise, and behind a token if there is
one.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.routing import BaseRoute

from heads.errors import ConfigError
from medusa_ppo.runtime.control_guard import LOOPBACK, ControlGuard

MOST_CONNECTIONS = 256


def require_token_beyond_loopback(host: str, token_name: str, problem: str, whose: str) -> None:
    """Raise ConfigError for an address that other machines can reach, without a token.

    Args:
        token_name: environment variable of the secret.
        problem: what others could do without it.
        whose: other users of the token, in words.
    """
    if host not in LOOPBACK and not os.environ.get(token_name):
        raise ConfigError(
            problem,
            given=f"--host {host}, no {token_name}",
            expected=f"{token_name}, the same for {whose}",
            do=f"export {token_name}=$(openssl rand -hex 32) for all of them, or leave --host out.",
        )


class GuardedServer:
    """Runs an ASGI application with these routes. With a token in the environment it answers 401 to
    anyone without it.
    """

    def __init__(self, routes: Sequence[BaseRoute], host: str, port: int, token_name: str) -> None:
        """
        Args:
            port: 0: any free one.
            token_name: environment variable of the secret.
        """
        token = os.environ.get(token_name)
        app: Any = Starlette(routes=list(routes))
        self._server = uvicorn.Server(
            uvicorn.Config(
                ControlGuard(app, token, token_name) if token else app,
                host=host,
                port=port,
                log_level="warning",
                access_log=False,
                limit_concurrency=MOST_CONNECTIONS,
                server_header=False,
                lifespan="off",
            )
        )

    def run(self) -> None:
        """Serve until `stop`, or until a signal if it runs in the main thread."""
        self._server.run()

    def stop(self) -> None:
        """Stop after answering current requests."""
        self._server.should_exit = True

    @property
    def port(self) -> int:
        """The port that it listens on; 0 before that."""
        if not self._server.started:
            return 0
        return int(self._server.servers[0].sockets[0].getsockname()[1])
