"""Access to the control routes of a vLLM server: the token, and the middleware that requires it."""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable
from typing import Any

from heads.errors import ConfigError

GUARD = "medusa_ppo.runtime.control_guard.ControlGuard"
TOKEN = "MEDUSA_PPO_TOKEN"
"""Environment variable of the secret without which a server answers no control request."""
OPEN_PATHS = ("/health", "/ping", "/version", "/metrics", "/metrics/", "/tokenize", "/detokenize")
"""Routes open to everybody; under /v1 vLLM's own --api-key applies, except for GUARDED.
"""
LOOPBACK = ("127.0.0.1", "localhost", "::1")
GUARDED = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
"""These also change what the server serves."""


def secret_of(name: str) -> str:
    """The secret in an environment variable, without white space around it, which files of secrets
    often end with; empty if there is none. Raises ConfigError for one that no header can carry:
    errors of HTTP libraries quote it.
    """
    secret = os.environ.get(name, "").strip()
    if not (secret.isascii() and secret.isprintable()):
        raise ConfigError(
            "A token has characters that cannot be sent.",
            given=f"{name}, whose value stays secret",
            expected="printable ASCII characters",
            do=f"export {name}=$(openssl rand -hex 32), the same for all who use it.",
        )
    return secret


def token_header(token: str | None = None) -> dict[str, str]:
    """The header that opens a server's control routes: from `token`, or from the environment; empty
    if there is none.
    """
    token = token or secret_of(TOKEN)
    return {"Authorization": f"Bearer {token}"} if token else {}


class ControlGuard:
    """ASGI middleware of vLLM's server (`--middleware`): everything but OPEN_PATHS and /v1 needs
    the token, if there is one.

    vLLM's --api-key does not cover the routes that pause the engine, reset its cache, and call and
    refill its workers.
    """

    def __init__(
        self, app: Callable[..., Awaitable[None]], token: str | None = None, name: str = TOKEN
    ) -> None:
        """
        Args:
            token: None: the environment's.
            name: name of its variable, for the error message.
        """
        self.app = app
        self._name = name
        self._expected = token_header(token).get("Authorization", "").encode()

    async def __call__(
        self,
        scope: dict[str, Any],
        receive: Callable[..., Any],
        send: Callable[..., Awaitable[None]],
    ) -> None:
        if scope["type"] in ("http", "websocket") and self._expected:
            path = scope["path"].removeprefix(scope.get("root_path", ""))
            given = next(
                (value for name, value in scope["headers"] if name == b"authorization"), b""
            )
            is_open = path in OPEN_PATHS or (
                path.startswith("/v1/") and path.rstrip("/") not in GUARDED
            )
            if not is_open and not hmac.compare_digest(given, self._expected):
                if scope["type"] == "websocket":
                    await send({"type": "websocket.close", "code": 1008})
                    return
                text = (
                    f"Unauthorized. given: {path} without the token  expected: Authorization:"
                    f" Bearer TOKEN  do this: set {self._name}"
                )
                await send(
                    {
                        "type": "http.response.start",
                        "status": 401,
                        "headers": [(b"content-type", b"text/plain")],
                    }
                )
                await send({"type": "http.response.body", "body": text.encode()})
                return
        await self.app(scope, receive, send)
