"""A companion behind HTTP: `medusa-ppo companion serve`, or the same server started elsewhere.

GET /wish      what it wants of the next batch
PUT /parts     one process's part of a batch; its header in PART_HEADER
GET /status    what it has done so far

Every request needs the token: whoever sends rows decides what heads learn.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from heads.errors import CheckpointError, ConfigError, DataError, MedusaError
from medusa_ppo.companion.companion_link import COMPANION_TOKEN, PART_HEADER, PARTS, STATUS, WISH
from medusa_ppo.companion.desk import CompanionDesk
from medusa_ppo.companion.parts_wire import PartHeader, read_message
from medusa_ppo.feeds.http_feed import ANSWER_S, LEAST_BYTES_PER_S
from medusa_ppo.runtime.control_guard import secret_of
from medusa_ppo.runtime.guarded_server import GuardedServer, too_slow, write_body


def require_companion_token(host: str) -> None:
    """Raise ConfigError without a token, even on loopback: every request needs one."""
    if not secret_of(COMPANION_TOKEN):
        raise ConfigError(
            "A standalone companion needs a token: whoever sends rows decides what heads learn.",
            given=f"--host {host}, no {COMPANION_TOKEN}",
            expected=f"{COMPANION_TOKEN}, the same for the companion and the loop",
            do=f"export {COMPANION_TOKEN}=$(openssl rand -hex 32) for both.",
        )


class CompanionServer(GuardedServer):
    """The routes of a companion, and the server that answers them."""

    def __init__(self, desk: CompanionDesk, host: str, port: int) -> None:
        """
        Args:
            desk: closed by its creator.
            port: 0: any free port.

        Raises:
            ConfigError: `require_companion_token`.
        """
        require_companion_token(host)
        self._desk = desk
        routes = [
            Route(f"/{WISH}", self._wish),
            Route(f"/{STATUS}", self._status),
            Route(f"/{PARTS}", self._take, methods=["PUT"]),
        ]
        super().__init__(routes, host, port, COMPANION_TOKEN)

    async def _wish(self, request: Request) -> Response:
        try:
            wish = await run_in_threadpool(self._desk.wish)
        except MedusaError as error:
            return PlainTextResponse(str(error), status_code=500)
        return Response(wish.model_dump_json(), media_type="application/json")

    async def _status(self, request: Request) -> Response:
        status = await run_in_threadpool(self._desk.status)
        return Response(json.dumps(plain(asdict(status))), media_type="application/json")

    async def _take(self, request: Request) -> Response:
        try:
            header = read_message(PartHeader, request.headers.get(PART_HEADER, ""))
            size = int(request.headers.get("Content-Length", ""))
        except (DataError, ValueError) as error:
            return PlainTextResponse(f"{PART_HEADER}, Content-Length: {error}"[:1000], 400)
        if not 0 < size <= self._desk.most_bytes:
            text = f"More than the {self._desk.most_bytes} bytes of a part (companion.queue_bytes)."
            return PlainTextResponse(text, 413)
        if not await run_in_threadpool(self._desk.reserve, size):
            return PlainTextResponse("There is no room until other parts have arrived.", 503)
        within_s = ANSWER_S + size / LEAST_BYTES_PER_S
        path = ""
        room = size
        try:
            handle, path = tempfile.mkstemp(dir=self._desk.folder)
            with os.fdopen(handle, "wb") as file:
                count = await write_body(request, file, size, within_s)
            if count != size:
                what = "More" if count > size else "Fewer"
                return PlainTextResponse(f"{what} bytes than Content-Length.", 400)
            # The desk gives it back itself, when it counts the part as one that it holds.
            room = 0
            wish = await run_in_threadpool(self._desk.take, Path(path), header, size)
        except TimeoutError:
            return too_slow(within_s)
        except OSError as error:
            return PlainTextResponse(f"The part could not be stored here: {error}", 507)
        except (DataError, CheckpointError) as error:
            return PlainTextResponse(str(error)[:2000], 400)
        except MedusaError as error:
            return PlainTextResponse(str(error)[:2000], 500)
        finally:
            if path:
                Path(path).unlink(missing_ok=True)
            await run_in_threadpool(self._desk.give_back, room)
        return Response(wish.model_dump_json(), media_type="application/json")


def plain(value: Any) -> Any:
    """The same without values that JSON lacks: NaN becomes null."""
    if isinstance(value, dict):
        return {name: plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
