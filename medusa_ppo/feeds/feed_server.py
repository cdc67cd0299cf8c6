"""`medusa-ppo feed serve`: a feed's folder behind HTTP, for readers and publishers on other nodes.

GET /manifest.json, /heads-....safetensors    what the manifest names, and nothing else
PUT /versions                                 a new version; only with the token
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.routing import Route

from heads.errors import MedusaError
from medusa_ppo.feeds.feed_manifest import MANIFEST, FeedVersion, Release
from medusa_ppo.feeds.folder_feed import FolderFeed
from medusa_ppo.feeds.http_feed import (
    ANSWER_S,
    FEED_TOKEN,
    LEAST_BYTES_PER_S,
    RELEASE_HEADER,
    VERSIONS,
)
from medusa_ppo.runtime.control_guard import secret_of
from medusa_ppo.runtime.guarded_server import (
    GuardedServer,
    require_free_address,
    require_token_beyond_loopback,
    too_slow,
    write_body,
)


class FeedServer(GuardedServer):
    """The routes of a feed's folder, and the server that answers them."""

    def __init__(self, folder: str | Path, host: str, port: int) -> None:
        """
        Args:
            folder: the feed's folder; created when something is published.
            port: 0: any free port.

        Raises:
            ConfigError: `require_token_beyond_loopback`, `require_free_address`.
        """
        require_token_beyond_loopback(
            host,
            FEED_TOKEN,
            "A feed that other machines reach needs a token: whoever writes to it decides what"
            " engines draft with.",
            "the feed, the companion and the engines",
        )
        require_free_address(host, port)
        self._feed = FolderFeed(folder)
        self._turn = threading.Lock()
        self._may_publish = bool(secret_of(FEED_TOKEN))
        routes = [
            Route(f"/{MANIFEST}", self._manifest),
            Route(f"/{VERSIONS}", self._take, methods=["PUT"]),
            Route("/{name}", self._file),
        ]
        super().__init__(routes, host, port, FEED_TOKEN)

    async def _manifest(self, request: Request) -> Response:
        try:
            data = await run_in_threadpool(self._feed.read)
        except MedusaError as error:
            return PlainTextResponse(str(error), status_code=500)
        if data is None:
            return PlainTextResponse("Nothing has been published yet.", status_code=404)
        return Response(data, media_type="application/json")

    async def _file(self, request: Request) -> Response:
        name = request.path_params["name"]
        try:
            manifest = await run_in_threadpool(self._feed.manifest)
        except MedusaError as error:
            return PlainTextResponse(str(error), status_code=500)
        path = self._feed.folder / name
        if manifest is None or name not in {version.file for version in manifest.versions}:
            return PlainTextResponse("The manifest names no such file.", status_code=404)
        if path.is_symlink() or not path.is_file():
            return PlainTextResponse("The file is gone.", status_code=404)
        return FileResponse(path, media_type="application/octet-stream")

    async def _take(self, request: Request) -> Response:
        if not self._may_publish:
            text = f"Publishing over HTTP needs a token: set {FEED_TOKEN} here and there."
            return PlainTextResponse(text, status_code=403)
        try:
            release = Release.model_validate_json(request.headers.get(RELEASE_HEADER, ""))
            most = release.actor.most_bytes()
        except (ValidationError, MedusaError) as error:
            return PlainTextResponse(f"{RELEASE_HEADER}: {error}"[:1000], status_code=400)
        within_s = ANSWER_S + most / LEAST_BYTES_PER_S
        path = None
        try:
            handle, path = await run_in_threadpool(self._feed.begin_file)
            with os.fdopen(handle, "wb") as file:
                count = await write_body(request, file, most, within_s)
            if count > most:
                text = f"More than the {most} bytes of such heads."
                return PlainTextResponse(text, status_code=413)
            version = await run_in_threadpool(self._publish, path, release)
        except TimeoutError:
            return too_slow(within_s)
        except OSError as error:
            text = f"The version could not be stored here: {error}"
            return PlainTextResponse(text, status_code=507)
        except MedusaError as error:
            return PlainTextResponse(str(error), status_code=409)
        finally:
            if path is not None:
                path.unlink(missing_ok=True)
        return Response(version.model_dump_json(), media_type="application/json")

    def _publish(self, path: Path, release: Release) -> FeedVersion:
        with self._turn:
            return self._feed.publish(path, release)
