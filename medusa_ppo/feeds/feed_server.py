"""`medusa-ppo feed serve`: a feed's folder behind HTTP, for readers and publishers on other nodes.

GET /manifest.json, /heads-....safetensors    what the manifest names, and nothing else
PUT /versions                                 a new version; with the token alone
"""

from __future__ import annotations

import os
import tempfile
import threading
from pathlib import Path
from typing import Any

import uvicorn
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.routing import Route

from heads.errors import ConfigError, MedusaError
from medusa_ppo.feeds.feed_manifest import MANIFEST, FeedVersion, Release
from medusa_ppo.feeds.folder_feed import FolderFeed
from medusa_ppo.feeds.http_feed import FEED_TOKEN, LOOPBACK, RELEASE_HEADER, VERSIONS
from medusa_ppo.runtime.control_guard import ControlGuard

MOST_CONNECTIONS = 256


def require_token_beyond_loopback(host: str) -> None:
    """ConfigError for an address that other machines reach, without a token."""
    if host not in LOOPBACK and not os.environ.get(FEED_TOKEN):
        raise ConfigError(
            "A feed that other machines reach needs a token: who writes into it decides what"
            " engines draft with.",
            given=f"--host {host}, no {FEED_TOKEN}",
            expected=f"{FEED_TOKEN}, the same for the feed, the companion and the engines",
            do=f"export {FEED_TOKEN}=$(openssl rand -hex 32) for all of them, or leave --host out.",
        )


class FeedServer:
    """The ASGI application, and the server that runs it."""

    def __init__(self, folder: str | Path, host: str, port: int) -> None:
        """
        Args:
            folder: of the feed; is made when something is published.
            port: 0: any that is free.

        Raises:
            ConfigError: `require_token_beyond_loopback`.
        """
        require_token_beyond_loopback(host)
        self._feed = FolderFeed(folder)
        self._turn = threading.Lock()
        token = os.environ.get(FEED_TOKEN)
        self._may_publish = bool(token)
        routes = [
            Route(f"/{MANIFEST}", self._manifest),
            Route(f"/{VERSIONS}", self._take, methods=["PUT"]),
            Route("/{name}", self._file),
        ]
        app: Any = Starlette(routes=routes)
        self._server = uvicorn.Server(
            uvicorn.Config(
                ControlGuard(app, token, FEED_TOKEN) if token else app,
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
        """Answer until `stop`, or a signal where it runs in the main thread."""
        self._server.run()

    def stop(self) -> None:
        """End after the requests that are being answered."""
        self._server.should_exit = True

    @property
    def port(self) -> int:
        """The one that it listens on; 0 before it does."""
        if not self._server.started:
            return 0
        return int(self._server.servers[0].sockets[0].getsockname()[1])

    async def _manifest(self, request: Request) -> Response:
        try:
            data = await run_in_threadpool(self._feed.read)
        except MedusaError as error:
            return PlainTextResponse(str(error), status_code=500)
        if data is None:
            return PlainTextResponse("Nothing was published yet.", status_code=404)
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
            text = f"Who publishes over HTTP needs a token: set {FEED_TOKEN} here and there."
            return PlainTextResponse(text, status_code=403)
        try:
            release = Release.model_validate_json(request.headers.get(RELEASE_HEADER, ""))
            most = release.actor.most_bytes()
        except (ValidationError, MedusaError) as error:
            return PlainTextResponse(f"{RELEASE_HEADER}: {error}"[:1000], status_code=400)
        with tempfile.TemporaryDirectory(prefix="medusa-ppo-feed-") as folder:
            path = Path(folder) / "incoming"
            count = 0
            with path.open("wb") as file:
                async for part in request.stream():
                    count += len(part)
                    if count > most:
                        text = f"More than the {most} bytes of such heads."
                        return PlainTextResponse(text, status_code=413)
                    await run_in_threadpool(file.write, part)
            try:
                version = await run_in_threadpool(self._publish, path, release)
            except MedusaError as error:
                return PlainTextResponse(str(error), status_code=409)
        return Response(version.model_dump_json(), media_type="application/json")

    def _publish(self, path: Path, release: Release) -> FeedVersion:
        with self._turn:
            return self._feed.publish(path, release)
