"""A feed in Ray: a named actor holds the manifest and, for each version, a reference to an object
with its bytes. Readers in the same Ray get these from their node's object store, which fetches an
object once, however many engines read it.

The actor is detached: like a folder, it stays when its publisher ends, until its Ray ends or
`forget` is called. Ray unpickles what it transports, so such a feed is only as safe as its Ray. The
contents are checked like those of any feed.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError

from heads.errors import ConfigError, FeedError, RunError
from medusa_ppo.feeds.feed import CHUNK_BYTES, Feed, check_heads_file
from medusa_ppo.feeds.feed_manifest import (
    MOST_MANIFEST_BYTES,
    FeedManifest,
    FeedVersion,
    Release,
    described,
    next_number,
    with_version,
)
from medusa_ppo.feeds.http_feed import ANSWER_S, LEAST_BYTES_PER_S, RAY
from medusa_ppo.runtime.named_actors import NAMESPACE, answer_of, join_ray, named_actor

"""Minimum speed for an object; a slower one is given up."""
NAME = re.compile(r"[\w.-]{1,100}")


class _VersionHolder:
    """The actor. It handles one call at a time, so publishers take turns."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._manifest: FeedManifest | None = None
        self._objects: dict[str, ray.ObjectRef] = {}

    def read(self) -> bytes | None:
        return None if self._manifest is None else self._manifest.model_dump_json().encode()

    def publish(self, data: np.ndarray, tensors: str, release: str) -> str:
        told = Release.model_validate_json(release)
        number = next_number(self._manifest, told, self._address)
        digest = hashlib.sha256(data.data).hexdigest()
        version = described(number, data.size, digest, tensors, told)
        # Put into the store by this actor, which then owns it, so that it outlives its publisher.
        self._objects[version.file] = ray.put(data)
        self._manifest = with_version(self._manifest, version, told)
        kept = {found.file for found in self._manifest.versions}
        self._objects = {name: ref for name, ref in self._objects.items() if name in kept}
        return version.model_dump_json()

    def file(self, name: str) -> tuple[int, list[Any]] | None:
        """Size and reference of a version; in a list, so that Ray does not fetch it."""
        ref = self._objects.get(name)
        versions = self._manifest.versions if self._manifest is not None else []
        sizes = {version.file: version.bytes for version in versions}
        return None if ref is None else (sizes[name], [ref])


class RayFeed(Feed):
    """A feed in the Ray that this process is connected to; without a connection, in the Ray of
    RAY_ADDRESS or of this node.
    """

    def __init__(self, address: str) -> None:
        """`address`: `ray:NAME`. Raises ConfigError for an invalid name."""
        self.address = address
        self._name = address.removeprefix(RAY)
        self._actor: Any = None
        if not NAME.fullmatch(self._name):
            raise ConfigError(
                "This is not the address of a feed in Ray.",
                given=address[:200],
                expected="ray:NAME, of letters, digits, dots and dashes",
                do="Give the feed a name.",
            )

    def read(self) -> bytes | None:
        data = self._asked(lambda actor: actor.read.remote(), ANSWER_S, missing=None)
        if data is None:
            return None
        if not isinstance(data, bytes) or len(data) > MOST_MANIFEST_BYTES:
            raise self._unreachable("no manifest, or a very long one")
        return data

    def stream(self, file: str, size: int) -> Iterator[bytes]:
        found = self._asked(lambda actor: actor.file.remote(file), ANSWER_S, missing=None)
        if found is None:
            raise self._unreachable(f"{file} is gone")
        match found:
            # The size is checked before the object is fetched, because objects are fetched whole.
            case int(nbytes), [ray.ObjectRef() as ref] if nbytes == size:
                pass
            case _:
                raise self._unreachable(f"{file} does not have the {size} bytes of its entry")
        data = self._asked(lambda actor: ref, ANSWER_S + size / LEAST_BYTES_PER_S)
        if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.ndim != 1:
            raise self._unreachable(f"{file} is not an array of bytes")
        view = data.data
        for first in range(0, len(view), CHUNK_BYTES):
            yield bytes(view[first : first + CHUNK_BYTES])

    def publish(self, path: Path, release: Release) -> FeedVersion:
        tensors = check_heads_file(path, release.actor, release.dtype)
        data = np.fromfile(path, np.uint8)
        patience_s = ANSWER_S + data.size / LEAST_BYTES_PER_S
        self._begin()
        answer = self._asked(
            lambda actor: actor.publish.remote(data, tensors, release.model_dump_json()),
            patience_s,
        )
        return FeedVersion.model_validate_json(answer)

    def close(self) -> None:
        self._actor = None

    def forget(self) -> bool:
        """End the actor, with all its versions. False if there is none."""
        actor = self._found()
        self._actor = None
        if actor is not None:
            ray.kill(actor)
        return actor is not None

    def _begin(self) -> None:
        """The actor; created if there is none yet."""
        try:
            join_ray()
        except RunError as error:
            raise self._unreachable(f"{error.problem} {error.given}") from error
        self._actor = ray.remote(  # type: ignore[call-overload]  # Ray's stubs know no names.
            name=self._name,
            namespace=NAMESPACE,
            get_if_exists=True,
            lifetime="detached",
            num_cpus=0,
        )(_VersionHolder).remote(self.address)

    def _found(self) -> Any:
        """The actor; None if nothing was published."""
        if self._actor is None:
            try:
                join_ray()
            except RunError as error:
                raise self._unreachable(f"{error.problem} {error.given}") from error
            try:
                self._actor = named_actor(self._name)
            except RunError:
                return None
        return self._actor

    def _asked(self, call: Callable[[Any], Any], patience_s: float, **missing: Any) -> Any:
        """The actor's answer; `missing` if there is no such actor."""
        actor = self._found()
        if actor is None:
            if missing:
                return missing["missing"]
            raise self._unreachable("nothing was published yet")
        try:
            return answer_of(call(actor), patience_s)
        except FeedError:
            raise
        except RunError as error:
            # The actor has ended; another one may get its name.
            self._actor = None
            raise self._unreachable(f"{error.problem} {error.given}") from error
        # Ray also raises where a call is only sent, for example after it was shut down here.
        except RayError as error:
            self._actor = None
            raise self._unreachable(f"{type(error).__name__}: {error}"[:500]) from error

    def _unreachable(self, found: str) -> FeedError:
        return FeedError(
            "The feed of this Ray does not answer as it should.",
            given=f"{self.address}: {found}",
            expected="the actor that a companion of the same Ray has made",
            do="Check that this process and the companion are in the same Ray (RAY_ADDRESS).",
        )
