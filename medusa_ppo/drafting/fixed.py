"""Tensors that are computed again but keep their address.

A captured CUDA graph reads the addresses it was captured with. What is computed from weights
(concatenated products, tables of tokens, rows of a draft vocabulary) is computed again after every
swap and sync. At a new address the graph would not see it, and would read the old values from
memory that may belong to something else by then.
"""

from __future__ import annotations

import torch


class Fixed:
    """Tensors by name; each keeps its address as long as its shape, dtype and device stay.

    Attributes:
        moves: how often a tensor got a new address, which makes earlier graphs invalid.
    """

    def __init__(self) -> None:
        self.moves = 0
        self._held: dict[str, torch.Tensor] = {}

    # A tensor made in inference mode can only be written in it.
    @torch.inference_mode()
    def put(self, name: str, made: torch.Tensor) -> torch.Tensor:
        """Copy `made` into the tensor of this name and return that; `made` itself if there is none
        or its form differs (then nobody else may write into it).
        """
        held = self._held.get(name)
        if held is not None and _form(held) == _form(made):
            return held if held is made else held.copy_(made)
        self._held[name] = made
        self.moves += 1
        return made


def _form(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device
