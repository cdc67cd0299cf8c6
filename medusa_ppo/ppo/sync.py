"""Carrying the actor into the engine: one safetensors file in shared memory, one call, nothing left behind.

A spread actor is written as it comes together: a bucket of its tensors at a time, under the names of its checkpoint.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
from transformers import PreTrainedModel

from heads.checkpoint import save_state
from heads.tensorfile import StateWriter
from medusa_ppo.actors.hf import Actor, embedding_weight, lm_head_weight
from medusa_ppo.actors.seam import SpreadActor
from medusa_ppo.folders import OwnedFolder
from medusa_ppo.serving.engine import RolloutEngine
from medusa_ppo.types import SwapReceipt

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class ActorSync:
    """Writes the actor's weights where the engine reads them. Use as a context manager, or call close().

    Attributes:
        nbytes: size of the last file.
        collect_s: seconds until it was written; the engine's own seconds are in its receipt.
    """

    def __init__(self, engine: RolloutEngine, dtype: str = "auto") -> None:
        """
        Args:
            engine: where the weights go.
            dtype: dtype of the engine's copy; the file is written in it (`auto`: the actor's own).
        """
        self._engine = engine
        self._dtype = DTYPES.get(dtype)
        self.nbytes, self.collect_s = 0, 0.0
        self._folder = OwnedFolder("medusa-ppo-actor-", shared_memory=True)

    def __call__(self, actor: Actor, version: int) -> SwapReceipt:
        """Put the actor's current weights into the engine; the engine is idle between two generate calls.

        Raises:
            SwapError: the engine did not take them.
        """
        path = self._folder.path / "actor.safetensors"
        began = time.perf_counter()
        if isinstance(actor, SpreadActor):
            write_spread(path, actor, self._dtype or torch.float32)
        else:
            assert isinstance(actor, PreTrainedModel), "an actor is one or the other"
            save_state(path, actor_state(actor, self._dtype))
        self.nbytes, self.collect_s = path.stat().st_size, time.perf_counter() - began
        try:
            return self._engine.sync_actor(str(path), version)
        finally:
            path.unlink(missing_ok=True)

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


def actor_state(actor: PreTrainedModel, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """The actor's weights by their names in a checkpoint, on the CPU; a tied lm_head is left out, as in files of tied models."""
    output, tied = actor.get_output_embeddings(), lm_head_weight(actor) is embedding_weight(actor)
    alias = {f"{name}.weight" for name, module in actor.named_modules() if tied and module is output}
    state = {name: tensor.detach() for name, tensor in actor.state_dict().items() if name not in alias}
    return {name: tensor.to("cpu", dtype if tensor.is_floating_point() else None).contiguous() for name, tensor in state.items()}
