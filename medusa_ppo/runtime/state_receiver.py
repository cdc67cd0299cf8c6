"""Heads and weights for a vLLM server on another node: a middleware that puts what a trainer sends
into a file of the server's own shared memory, where its workers read it.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from medusa_ppo.runtime.files import SHARED_MEMORY, OwnedFolder

RECEIVER = "medusa_ppo.runtime.state_receiver.StateReceiver"
STATE_ROUTE = "/medusa_ppo/state"
"""PUT: a file's bytes; the answer names the file. DELETE: it is no longer needed."""
SPARED = 0.1
"""Share of the free shared memory that a file has to leave."""
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


class StateReceiver:
    """ASGI middleware of vLLM's server (`--middleware`), behind `ControlGuard`: whoever may send a
    state may replace the actor. Keeps one file at a time.
    """

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self.app = app
        self._folder: OwnedFolder | None = None

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        if scope["type"] != "http" or path != STATE_ROUTE:
            await self.app(scope, receive, send)
            return
        if scope["method"] == "PUT":
            status, answer = await self._take(scope, receive)
        elif scope["method"] == "DELETE":
            self._forget()
            status, answer = 200, {}
        else:
            status, answer = 405, {"error": "PUT or DELETE"}
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(answer).encode()})

    async def _take(self, scope: dict[str, Any], receive: Receive) -> tuple[int, dict[str, str]]:
        given = next((value for name, value in scope["headers"] if name == b"content-length"), b"")
        size = int(given) if given.isdigit() else 0
        # The previous file is removed first, because there may not be room for two.
        self._forget()
        try:
            self._folder = OwnedFolder("medusa-ppo-received-", shared_memory=True)
            free = shutil.disk_usage(self._folder.path).free
            if not 0 < size <= (1 - SPARED) * free:
                self._forget()
                text = f"{size} bytes; {free} are free in {SHARED_MEMORY} of the server's node"
                return 413, {"error": text}
            path = self._folder.path / "state.safetensors"
            count = await _written(path, size, receive)
        except OSError as error:
            # Others need what it has taken so far, and this server may get no other file.
            self._forget()
            text = f"{size} bytes don't fit into {SHARED_MEMORY} of the server's node: {error}"
            return 413, {"error": text}
        if count != size:
            self._forget()
            return 400, {"error": f"{count} bytes arrived, but Content-Length is {size}"}
        return 200, {"path": str(path)}

    def _forget(self) -> None:
        if self._folder is not None:
            self._folder.close()
            self._folder = None


async def _written(path: Path, size: int, receive: Receive) -> int:
    """Write the request's body; returns how many bytes came. Raises OSError if there is no room."""
    count, more = 0, True
    with open(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600), "wb") as file:
        # All of its room now: other servers of this node that are sent the same actor go by the
        # same free bytes. In a thread, because the kernel fills it with zeros.
        await asyncio.to_thread(os.posix_fallocate, file.fileno(), 0, size)
        while more and count <= size:
            message = await receive()
            body = message.get("body", b"")
            count += len(body)
            file.write(body)
            more = message["type"] == "http.request" and message.get("more_body", False)
    return count
