"""The plugin's view of the actor, whatever trains it: its final hidden states, and the two tables
that heads read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Protocol

import torch


class Tapped(Protocol):
    """The result of tapping a forward pass."""

    @property
    def hidden_BTD(self) -> torch.Tensor:
        """Detached final hidden states, one row of B for each sequence that went through."""


class ActorView(ABC):
    """One actor, in one process. `medusa_ppo.actors.hf` and `medusa_ppo.actors.megatron` have one
    each.
    """

    @abstractmethod
    def tap(self) -> AbstractContextManager[Tapped]:
        """Context around the forward pass to tap."""

    @property
    @abstractmethod
    def lm_head_VD(self) -> torch.Tensor:
        """The whole output matrix."""

    @property
    @abstractmethod
    def embedding_VD(self) -> torch.Tensor:
        """The whole input embedding."""


class SpreadActor(ActorView):
    """An actor whose weights no process holds whole."""

    @abstractmethod
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every tensor of its checkpoint, by the name that it has there."""

    @abstractmethod
    def tensors(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """The current values of these tensors, on the CPU, one after another; only some are in
        memory at a time.
        """
