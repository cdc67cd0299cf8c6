"""A tap's connection to a standalone companion: over HTTP, or to a named actor of the same Ray.

Nothing here is pickled by us: both carry the file and the header of `parts_wire`. (Ray pickles its
own calls, between processes that have its token.)
"""

from __future__ import annotations

import re
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import httpx

from heads.errors import CompanionError, ConfigError, DataError, MedusaError
from medusa_ppo.companion.parts_wire import PartHeader, Wish, read_message
from medusa_ppo.feeds.http_feed import ANSWER_S, LEAST_BYTES_PER_S, RAY, token_client

COMPANION_TOKEN = "MEDUSA_PPO_COMPANION_TOKEN"
"""Environment variable of a companion's secret."""
PART_HEADER = "X-Medusa-PPO-Part"
WISH, PARTS, STATUS = "wish", "parts", "status"
MOST_ANSWER_BYTES = 1 << 16
CHUNK_BYTES = 1 << 20


class CompanionLink(ABC):
    """One companion, from one process.

    Attributes:
        address: where it is, in a readable form.
    """

    address: str

    @abstractmethod
    def ask(self) -> Wish:
        """What it wants. Raises CompanionError if it does not answer properly."""

    @abstractmethod
    def put(self, path: Path, header: PartHeader) -> Wish:
        """Send a part. Raises CompanionError if it was not accepted."""

    @abstractmethod
    def close(self) -> None:
        """Release its resources. Safe to call again."""


def open_link(address: str) -> CompanionLink:
    """The companion at `http://HOST:PORT`, `https://...`, or `ray:NAME`. Raises ConfigError for
    other addresses.
    """
    if address.startswith(("http://", "https://")):
        return HttpLink(address)
    if re.fullmatch(r"ray:[\w.-]{1,100}", address):
        return RayLink(address)
    raise _no_address(address or "nothing")


def _no_address(given: str) -> ConfigError:
    return ConfigError(
        "This is not the address of a companion.",
        given=given,
        expected="http://HOST:PORT, https://HOST, or ray:NAME",
        do="Give the address that `medusa-ppo companion serve` prints, or the name passed to "
        "`companion_in_ray`.",
    )


class HttpLink(CompanionLink):
    """A companion behind HTTP (`token_client`)."""

    def __init__(self, address: str) -> None:
        """Raises ConfigError for an address that is not a URL, or a token that can't be sent."""
        try:
            url = httpx.URL(address.rstrip("/") + "/")
        except httpx.InvalidURL as error:
            raise _no_address(f"{address}: {error}") from error
        if not url.host:
            raise _no_address(address)
        self.address = str(url.copy_with(userinfo=b""))
        self._client = token_client(url, COMPANION_TOKEN, ANSWER_S)

    def ask(self) -> Wish:
        return self._answered(self._client.build_request("GET", WISH), ANSWER_S)

    def put(self, path: Path, header: PartHeader) -> Wish:
        size = path.stat().st_size
        within_s = ANSWER_S + size / LEAST_BYTES_PER_S
        with path.open("rb") as file:
            request = self._client.build_request(
                "PUT",
                PARTS,
                content=iter(lambda: file.read(CHUNK_BYTES), b""),
                headers={PART_HEADER: header.model_dump_json(), "Content-Length": str(size)},
                timeout=within_s,
            )
            # Of the upload, and as long again for what the companion does with it.
            return self._answered(request, 2 * within_s)

    def close(self) -> None:
        self._client.close()

    def _answered(self, request: httpx.Request, within_s: float) -> Wish:
        # httpx's timeouts are for each part as it arrives: what trickles would never end.
        deadline = time.monotonic() + within_s
        try:
            answer = self._client.send(request, stream=True)
            try:
                data = bytearray()
                for part in answer.iter_raw():
                    data += part
                    if time.monotonic() > deadline:
                        raise self._refused("no end in time")
                    if len(data) > MOST_ANSWER_BYTES:
                        raise self._refused("an answer that is too long")
            finally:
                answer.close()
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._refused(repr(error)) from error
        if answer.status_code != httpx.codes.OK:
            raise self._refused(f"{answer.status_code} {data[:2000].decode(errors='replace')}")
        return _wish(bytes(data), self.address)

    def _refused(self, found: str) -> CompanionError:
        return CompanionError(
            "The companion does not answer as it should.",
            given=f"{self.address}: {found}",
            expected="an answer of `medusa-ppo companion serve`",
            do=f"Check whether it runs, can be reached from here, and has the same"
            f" {COMPANION_TOKEN}.",
        )


class RayLink(CompanionLink):
    """The named actor of `companion_in_ray`, in the Ray that this process is connected to."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._actor: Any = None

    def ask(self) -> Wish:
        return self._answered(lambda actor: actor.wish.remote(), ANSWER_S)

    def put(self, path: Path, header: PartHeader) -> Wish:
        # Load Ray only if the companion is in it.
        import numpy as np

        data = np.fromfile(path, np.uint8)
        patience_s = ANSWER_S + data.size / LEAST_BYTES_PER_S
        text = header.model_dump_json()
        return self._answered(lambda actor: actor.take.remote(text, data), patience_s)

    def close(self) -> None:
        self._actor = None

    def _answered(self, call: Any, patience_s: float) -> Wish:
        from ray.exceptions import RayError

        from medusa_ppo.runtime.named_actors import answer_of, named_actor

        try:
            if self._actor is None:
                self._actor = named_actor(self.address.removeprefix(RAY))
            return _wish(answer_of(call(self._actor), patience_s), self.address)
        # Ray also raises where a call is only sent, for example when its object store is full.
        except (MedusaError, RayError) as error:
            # At the next call another actor may have its name.
            self._actor = None
            found = (
                f"{error.problem} {error.given}"
                if isinstance(error, MedusaError)
                else f"{type(error).__name__}: {error}"
            )
            raise CompanionError(
                "The companion does not answer as it should.",
                given=f"{self.address}: {found}"[:1000],
                expected="the actor that `companion_in_ray` started, in this Ray",
                do="Check that it is running.",
            ) from error


def _wish(data: str | bytes, address: str) -> Wish:
    try:
        return read_message(Wish, data)
    except DataError as error:
        raise CompanionError(
            "The companion's answer is not valid.",
            given=f"{address}: {error.given}",
            expected=error.expected,
            do=error.do,
        ) from error
