"""A feed's manifest: the actor of its heads, and its versions with their digests and how they were
judged.

    FEED/manifest.json                      the manifest, replaced by a rename
    FEED/heads-000007-1a2b3c4d.safetensors  a version's tensors, named by version and digest; never
                                            written a second time

Readers treat a manifest as hostile. It must be small, without unknown or repeated keys, and a
file's name must not be a path.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from heads.checkpoint import beyond_bounds
from heads.errors import CheckpointError, ConfigError, FeedError
from heads.heads_config import HeadsConfig
from heads.tensorfile import MAX_HEADS_HEADER_BYTES, parse_json
from medusa_ppo.feeds.actor_sketch import SKETCH_DIGITS, actor_sketch, alike, sketch_rows

MANIFEST = "manifest.json"
MOST_MANIFEST_BYTES = 1 << 18
FORMAT_VERSION: Literal[1] = 1
KEPT_VERSIONS = 4
"""Number of versions that a feed keeps. A reader that falls further behind has to read the manifest
again.
"""
FLOAT32_BYTES = 4
Dtype = Annotated[str, Field(pattern=r"^(float32|bfloat16|float16)$")]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Judged(_Record):
    """The result that let a version through.

    Attributes:
        mean_acceptance_length: tokens per engine step by replay on held-out responses; None if it
            was never judged.
        acceptance_per_position: accepted / draft steps, for each position.
    """

    mean_acceptance_length: Annotated[float, Field(allow_inf_nan=False, ge=1)] | None = None
    acceptance_per_position: Annotated[list[Finite], Field(max_length=64)] = Field(
        default_factory=list
    )


class FeedActor(_Record):
    """The actor that a feed's heads belong to.

    Attributes:
        heads: sizes and kind of the heads, as `HeadsConfig.to_dict`.
        sketch: `actor_sketch` of the actor's lm_head; empty if unknown.
    """

    heads: dict[str, Any]
    sketch: Annotated[str, Field(pattern=rf"^([0-9a-f]{{{SKETCH_DIGITS}}})?$")] = ""

    @classmethod
    def of(cls, config: HeadsConfig, lm_head_VD: torch.Tensor | None) -> FeedActor:
        """Describe an actor by its heads' sizes and by its lm_head (None: unknown)."""
        if lm_head_VD is None:
            return cls(heads=config.to_dict())
        rows_RD = lm_head_VD[sketch_rows(lm_head_VD.shape[0])]
        return cls(heads=config.to_dict(), sketch=actor_sketch(rows_RD))

    @property
    def config(self) -> HeadsConfig:
        """The sizes as a HeadsConfig. Raises FeedError if `heads` are not valid."""
        try:
            config = HeadsConfig.from_dict(self.heads)
        except (ConfigError, TypeError, AttributeError) as error:
            raise damaged("heads", str(error)) from error
        if faults := beyond_bounds(config):
            raise damaged("heads", "; ".join(faults))
        return config

    def most_bytes(self) -> int:
        """Largest size of a file with heads of these sizes in float32 with the longest header."""
        config = self.config
        numbers = config.num_heads  # The draft temperatures, which are optional.
        for shape in config.tensor_shapes().values():
            numbers += shape[0] * (shape[1] if len(shape) > 1 else 1)
        return numbers * FLOAT32_BYTES + MAX_HEADS_HEADER_BYTES

    def require_same(self, other: FeedActor, address: str) -> None:
        """Raise FeedError if `other`, found at an address, is not this actor.

        PPO moves weights, so sketches may differ a little. Two runs that start from the same actor
        can't be told apart. That does no harm: drafting stays lossless, and both have a gate.
        """
        if self.config != other.config:
            given = f"{address}: {other.heads}"
            expected = f"{self.heads}"
        elif not alike(self.sketch, other.sketch):
            given = f"{address}: heads of an actor with another lm_head"
            expected = "an lm_head whose weights mostly have the same signs"
        else:
            return
        raise FeedError(
            "The feed has heads of another actor, or of other sizes.",
            given=given,
            expected=expected,
            do="Name the feed of this actor, or an empty one.",
        )


class FeedVersion(_Record):
    """One version of the heads.

    Attributes:
        version: its number, which grows from one version of the feed to the next.
        file: the file's name in the feed.
        bytes: length of the file.
        digest: SHA-256 of the file's bytes.
        checksum: `heads.tensorfile.checksum` of its tensors, which an engine reports.
        dtype: dtype of its tensors, e.g. `float32`.
        policy_version: version of the actor whose rollouts were trained on last.
        judged: the result that let it through.
        written_s: when it was written, in seconds since 1970.
    """

    version: Annotated[int, Field(ge=1, lt=1 << 53)]
    file: Annotated[str, Field(pattern=r"^heads-\d{6,16}-[0-9a-f]{8}\.safetensors$")]
    bytes: Annotated[int, Field(ge=8)]
    digest: Digest
    checksum: Digest
    dtype: Dtype
    policy_version: int
    judged: Judged = Field(default_factory=Judged)
    written_s: Finite


class FeedManifest(_Record):
    """The whole manifest; the newest version comes last."""

    format_version: Literal[1] = FORMAT_VERSION
    actor: FeedActor
    versions: Annotated[list[FeedVersion], Field(max_length=64)]

    @model_validator(mode="after")
    def _grows(self) -> FeedManifest:
        numbers = [version.version for version in self.versions]
        if sorted(set(numbers)) != numbers:
            raise ValueError(f"versions {numbers} do not grow")
        return self

    @property
    def newest(self) -> int:
        """0: none."""
        return self.versions[-1].version if self.versions else 0


class Release(_Record):
    """What is published besides the file of tensors.

    Attributes:
        actor: the actor of the heads.
        version: the publisher's number. If the feed already has it, the feed's next number is used.
        dtype, policy_version, judged: as in `FeedVersion`.
    """

    actor: FeedActor
    dtype: Dtype
    version: Annotated[int, Field(ge=1, lt=1 << 53)]
    policy_version: int
    judged: Judged = Field(default_factory=Judged)


def next_number(found: FeedManifest | None, release: Release, address: str) -> int:
    """The number of the next version in a feed. Raises FeedError if the feed belongs to another
    actor.
    """
    if found is None:
        return release.version
    found.actor.require_same(release.actor, address)
    return max(release.version, found.newest + 1)


def described(number: int, size: int, digest: str, tensors: str, release: Release) -> FeedVersion:
    """A version's entry in the manifest. `digest`, `tensors`: of its file, and of the tensors in
    it.
    """
    return FeedVersion(
        version=number,
        file=f"heads-{number:06d}-{digest[:8]}.safetensors",
        bytes=size,
        digest=digest,
        checksum=tensors,
        dtype=release.dtype,
        policy_version=release.policy_version,
        judged=release.judged,
        written_s=time.time(),
    )


def with_version(
    found: FeedManifest | None, version: FeedVersion, release: Release
) -> FeedManifest:
    """The manifest with one more version, and without those that are too old."""
    before = found.versions if found is not None else []
    return FeedManifest(
        # The newest sketch is kept, so that an actor that moves far still matches from version to
        # version.
        actor=release.actor,
        versions=[*before, version][-KEPT_VERSIONS:],
    )


def read_manifest(data: bytes, address: str) -> FeedManifest:
    """Read a manifest. Raises FeedError for anything but a complete manifest of this format."""
    try:
        raw = parse_json(data, Path(MANIFEST))
        # By JSON's own rules: true is not a number, and 1.0 not an integer.
        return FeedManifest.model_validate(raw)
    except CheckpointError as error:
        raise damaged(address, str(error.given)) from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise damaged(address, f"{where}: {first['msg']}") from error


def damaged(address: str, found: str) -> FeedError:
    return FeedError(
        "The feed's manifest is damaged.",
        given=f"{address}: {found[:500]}",
        expected=f"{MANIFEST} of format {FORMAT_VERSION}",
        do=f"Look at {MANIFEST} itself, and publish to an empty feed.",
    )
