"""Carrying the actor into the engines: one safetensors file in shared memory, or one broadcast; one call, nothing left behind.

A spread actor is written or sent as it comes together: a bucket of its tensors at a time, under the names of its checkpoint.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from heads.checkpoint import save_state
from heads.errors import SwapError
from heads.tensorfile import StateWriter
from medusa_ppo.actors.hf import Actor, embedding_weight, lm_head_weight
from medusa_ppo.actors.seam import SpreadActor
from medusa_ppo.config import ActorConfig
from medusa_ppo.folders import OwnedFolder
from medusa_ppo.serving.broadcast import BroadcastPool
from medusa_ppo.serving.engine import RolloutEngine
from medusa_ppo.serving.transfer import ActorStream
from medusa_ppo.types import SwapReceipt

logger = logging.getLogger(__name__)

BUCKET_BYTES = ActorConfig().bucket_bytes
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class ActorSync:
    """Writes the actor's weights where the engine reads them, or sends them to a `BroadcastPool`. A context manager; or call close().

    Attributes:
        nbytes: bytes of weights that each engine got the last time.
        collect_s: seconds until they were written, or that the broadcast waited for them; the engine's own seconds are in its receipt.
    """

    def __init__(self, engine: RolloutEngine, dtype: str = "auto", bucket_bytes: int = BUCKET_BYTES) -> None:
        """
        Args:
            engine: where the weights go.
            dtype: dtype of the engine's copy; weights are written or sent in it (`auto`: the actor's own).
            bucket_bytes: bytes that a broadcast sends at a time.
        """
        self._engine, self._bucket_bytes = engine, bucket_bytes
        self._dtype = DTYPES.get(dtype)
        self.nbytes, self.collect_s = 0, 0.0
        self._folder = OwnedFolder("medusa-ppo-actor-", shared_memory=True)

    def __call__(self, actor: Actor, version: int) -> SwapReceipt:
        """Put the actor's current weights into the engine; the engine is idle between two generate calls.

        Raises:
            SwapError: the engine did not take them.
        """
        if isinstance(self._engine, BroadcastPool):
            try:
                return self._send(self._engine, actor, version)
            except SwapError as error:
                logger.warning("Actor %d goes to the engines as a file. %s", version, error)
        path = self._folder.path / "actor.safetensors"
        began = time.perf_counter()
        actor_stream(actor, self._dtype, self._bucket_bytes).write(path)
        self.nbytes, self.collect_s = path.stat().st_size, time.perf_counter() - began
        try:
            return self._engine.sync_actor(str(path), version)
        finally:
            path.unlink(missing_ok=True)

    def _send(self, pool: BroadcastPool, actor: Actor, version: int) -> SwapReceipt:
        stream = actor_stream(actor, self._dtype, self._bucket_bytes)
        self.nbytes = sum(dtype.itemsize * math.prod(shape) for dtype, shape in stream.entries.values())
        self.collect_s = 0.0
        return pool.stream_actor(replace(stream, tensors=lambda: self._timed(stream.tensors())), version)

    def _timed(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        began = time.perf_counter()
        for pair in tensors:
            self.collect_s += time.perf_counter() - began
            yield pair
            began = time.perf_counter()

    def close(self) -> None:
        """Remove the folder."""
        self._folder.close()

    def __enter__(self) -> ActorSync:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def write_spread(path: Path, actor: SpreadActor, dtype: torch.dtype) -> None:
    """The actor's checkpoint as one file, at no time whole in memory."""
    with StateWriter(path, {name: (dtype, shape) for name, shape in actor.shapes().items()}) as writer:
        for name, tensor in actor.tensors(dtype):
            writer.put(name, tensor)


def actor_stream(actor: Actor, dtype: torch.dtype | None = None, bucket_bytes: int = BUCKET_BYTES) -> ActorStream:
    """The actor's checkpoint as something that can be written and sent; in `dtype` (None: its own)."""
    if isinstance(actor, SpreadActor):
        spread, kind = actor, dtype or torch.float32
        entries = {name: (kind, tuple(shape)) for name, shape in spread.shapes().items()}
        return ActorStream(entries, lambda: spread.tensors(kind), lambda path: write_spread(path, spread, kind), bucket_bytes)
    assert isinstance(actor, PreTrainedModel), "an actor is one or the other"
    whole, own = actor, _own_tensors(actor)
    entries = {name: (dtype if dtype and tensor.is_floating_point() else tensor.dtype, tuple(tensor.shape)) for name, tensor in own.items()}
    return ActorStream(entries, own.items, lambda path: save_state(path, actor_state(whole, dtype)), bucket_bytes)


def actor_state(actor: PreTrainedModel, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """The actor's weights by their names in a checkpoint, on the CPU; a tied lm_head is left out, as in files of tied models."""
    own = _own_tensors(actor)
    return {name: tensor.to("cpu", dtype if tensor.is_floating_point() else None).contiguous() for name, tensor in own.items()}


def _own_tensors(actor: PreTrainedModel) -> dict[str, torch.Tensor]:
    output, tied = actor.get_output_embeddings(), lm_head_weight(actor) is embedding_weight(actor)
    alias = {f"{name}.weight" for name, module in actor.named_modules() if tied and module is output}
    return {name: tensor.detach() for name, tensor in actor.state_dict().items() if name not in alias}
