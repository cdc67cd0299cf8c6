"""A feed behind HTTP, as served by `medusa-ppo feed serve`; and `open_feed`, which opens any kind
of feed by its address.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx
from pydantic import ValidationError

from heads.errors import ConfigError, FeedError
from medusa_ppo.feeds.feed import CHUNK_BYTES, Feed
from medusa_ppo.feeds.feed_manifest import (
    MANIFEST,
    MOST_MANIFEST_BYTES,
    FeedActor,
    FeedManifest,
    FeedVersion,
    Release,
)
from medusa_ppo.feeds.folder_feed import FolderFeed
from medusa_ppo.runtime.control_guard import LOOPBACK, secret_of, token_header

logger = logging.getLogger(__name__)

FEED_TOKEN = "MEDUSA_PPO_FEED_TOKEN"
"""Environment variable with a feed's secret. It is not the one for an engine's control routes:
whoever reads heads need not be able to replace an actor, and a server that we start has its own
token.
"""
RELEASE_HEADER = "X-Medusa-PPO-Release"
RAY = "ray:"
"""Prefix of the address of a feed in a Ray actor."""
VERSIONS = "versions"
"""Route for publishing new versions (PUT)."""
ANSWER_S = 10.0
"""Seconds for a short answer, and for the next part of a file."""
LEAST_BYTES_PER_S = 1 << 20
"""Minimum speed of a download; a slower one is given up."""
# A new connection for each request: on a kept one, an answer sent twice would be taken for the
# next.
LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=0)


def open_feed(address: str) -> Feed:
    """The feed at `http://HOST:PORT`, `https://...`, in a Ray (`ray:NAME`), or in a folder. Raises
    ConfigError for other addresses.
    """
    if address.startswith(("http://", "https://")):
        return HttpFeed(address)
    if address.startswith(RAY):
        # Load Ray only if the feed is in it.
        from medusa_ppo.feeds.ray_feed import RayFeed

        return RayFeed(address)
    if not address or re.match(r"^\w+://", address):
        raise _no_address(address or "nothing")
    return FolderFeed(address)


def token_client(url: httpx.URL, token_name: str, timeout_s: float) -> httpx.Client:
    """A client for a small server of ours, with the token from the environment, if there is one.
    Redirections are not followed, because the token is for this address alone.

    Args:
        token_name: environment variable of the server's secret.
        timeout_s: for each part of an answer, unless a request sets its own.

    Raises:
        ConfigError: `secret_of`.
    """
    token = secret_of(token_name)
    return httpx.Client(
        base_url=url,
        # Compressed data is refused, because it could expand to any size.
        headers={**(token_header(token) if token else {}), "Accept-Encoding": "identity"},
        timeout=timeout_s,
        limits=LIMITS,
        # On loopback no proxy from the environment is needed, and it would learn the token.
        trust_env=url.host not in LOOPBACK,
    )


def absolute(address: str) -> str:
    """The address in a form that works from other folders."""
    elsewhere = "://" in address or address.startswith(RAY)
    return address if elsewhere else str(Path(address).absolute())


def require_feed(address: str, actor: FeedActor) -> FeedManifest | None:
    """Check a feed before anything is published. Returns its manifest; None: nothing has been
    published yet.

    Raises:
        ConfigError: the address is invalid.
        FeedError: it can't be reached, or has another actor's heads.
    """
    feed = open_feed(address)
    try:
        if (found := feed.manifest()) is not None:
            found.actor.require_same(actor, feed.address)
        return found
    finally:
        feed.close()


def warn_of_earlier(found: FeedManifest | None, address: str) -> None:
    """Say that a feed has versions of an earlier run, which a new one does not go on from."""
    if found is not None and found.versions:
        logger.warning(
            "The feed %s has versions of this actor, the newest is %d. The first version of this"
            " run takes its place in all engines, though it may be worse: the run does not go on"
            " from them. Name an empty feed, or begin with heads that were trained before"
            " (heads.path).",
            address,
            found.newest,
        )


def _no_address(given: str) -> ConfigError:
    return ConfigError(
        "This is not the address of a feed.",
        given=given,
        expected="a folder, http://HOST:PORT, https://HOST or ray:NAME",
        do="Name a folder that the companion writes, or the address that `medusa-ppo feed serve`"
        " prints.",
    )


class HttpFeed(Feed):
    """A feed behind HTTP (`token_client`)."""

    def __init__(self, address: str) -> None:
        """Raises ConfigError for an address that is not a URL, or a token that can't be sent."""
        try:
            url = httpx.URL(address.rstrip("/") + "/")
        except httpx.InvalidURL as error:
            raise _no_address(f"{address}: {error}") from error
        if not url.host:
            raise _no_address(address)
        self.address = str(url.copy_with(userinfo=b""))
        self._client = token_client(url, FEED_TOKEN, ANSWER_S)

    def close(self) -> None:
        self._client.close()

    def read(self) -> bytes | None:
        data = bytearray()
        for part in self._parts(MANIFEST, ANSWER_S, missing_is_empty=True):
            data += part
            if len(data) > MOST_MANIFEST_BYTES:
                raise self._unreachable(MANIFEST, f"more than {MOST_MANIFEST_BYTES} bytes")
        return bytes(data) or None

    def stream(self, file: str, size: int) -> Iterator[bytes]:
        return self._parts(file, ANSWER_S + size / LEAST_BYTES_PER_S)

    def publish(self, path: Path, release: Release) -> FeedVersion:
        size = path.stat().st_size
        within_s = ANSWER_S + size / LEAST_BYTES_PER_S
        # Of the upload, and as long again for the server to check and store it.
        deadline = time.monotonic() + 2 * within_s
        try:
            with path.open("rb") as file:
                parts = iter(lambda: file.read(CHUNK_BYTES), b"")
                with self._client.stream(
                    "PUT",
                    VERSIONS,
                    content=self._in_time(VERSIONS, parts, deadline),
                    headers={
                        RELEASE_HEADER: release.model_dump_json(),
                        "Content-Length": str(size),
                    },
                    timeout=within_s,
                ) as answer:
                    data = bytearray()
                    for part in self._in_time(VERSIONS, answer.iter_raw(), deadline):
                        data += part
                        if len(data) > MOST_MANIFEST_BYTES:
                            raise self._unreachable(VERSIONS, "an answer that is too long")
            if answer.status_code != httpx.codes.OK:
                text = data[:500].decode(errors="replace")
                raise self._unreachable(VERSIONS, f"{answer.status_code} {text}")
            return FeedVersion.model_validate_json(bytes(data))
        except (httpx.HTTPError, httpx.InvalidURL, ValidationError) as error:
            raise self._unreachable(VERSIONS, repr(error)) from error

    def _in_time(self, name: str, parts: Iterable[bytes], deadline: float) -> Iterator[bytes]:
        """The same parts, until they take too long. httpx's timeouts are for each part as it
        arrives, so what trickles would never end; and in parts of a given size it gives nothing
        until one is full.
        """
        for part in parts:
            if time.monotonic() > deadline:
                raise self._unreachable(name, "no end in time")
            yield part

    def _parts(
        self, name: str, within_s: float, *, missing_is_empty: bool = False
    ) -> Iterator[bytes]:
        deadline = time.monotonic() + within_s
        try:
            with self._client.stream("GET", name) as answer:
                if answer.status_code == httpx.codes.NOT_FOUND and missing_is_empty:
                    return
                answer.raise_for_status()
                yield from self._in_time(name, answer.iter_raw(), deadline)
        except httpx.HTTPStatusError as error:
            raise self._unreachable(name, str(error.response.status_code)) from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._unreachable(name, repr(error)) from error

    def _unreachable(self, name: str, found: Any) -> FeedError:
        return FeedError(
            "The feed does not answer as it should.",
            given=f"{self.address}{name}: {found}",
            expected="an answer of `medusa-ppo feed serve`",
            do=f"Check that it runs, can be reached from here, and has the same {FEED_TOKEN}.",
        )
