"""Which response a row of a trainer's batch is, told by its tokens: trainers shuffle, split and pad as they like.

Shape letters: B rows of a micro-batch, T tokens.
"""

from __future__ import annotations

import contextlib
from collections import deque
from typing import Any

import torch
from torch import nn

from medusa_ppo.plugin import MedusaPlugin
from medusa_ppo.types import Rollouts


class RowFinder:
    """Finds the responses of one `Rollouts` among rows of token ids, each response once."""

    def __init__(self, rollouts: Rollouts) -> None:
        self._lengths = [len(response.token_ids) for response in rollouts.responses]
        self._waiting: dict[tuple[int, ...], deque[int]] = {}
        for index, response in enumerate(rollouts.responses):
            if response.token_ids:
                row = (*rollouts.prompts[response.prompt_index], *response.token_ids)
                self._waiting.setdefault(row, deque()).append(index)

    @property
    def done(self) -> bool:
        """Every response was found."""
        return not self._waiting

    def find(self, ids_BT: torch.Tensor, attention_BT: torch.Tensor) -> tuple[torch.Tensor, list[int | None]]:
        """Response mask of the rows, and for each row the index of its response; None for rows that are none of those left.

        Args:
            ids_BT: prompt and response of each row, with any padding.
            attention_BT: true on prompt and response.
        """
        ids, attention = ids_BT.to("cpu"), attention_BT.to("cpu", torch.bool)
        mask_BT = torch.zeros(ids.shape, dtype=torch.bool)
        found: list[int | None] = []
        for row in range(ids.shape[0]):
            index = self._take(tuple(ids[row][attention[row]].tolist()))
            if index is not None:
                response = attention[row].nonzero()[-self._lengths[index] :, 0]
                if int(response[-1] - response[0]) + 1 == len(response):
                    mask_BT[row, response] = True
                else:
                    index = None  # A padding token was sampled in the middle, and the trainer has masked it.
            found.append(index)
        return mask_BT, found

    def _take(self, row: tuple[int, ...]) -> int | None:
        waiting = self._waiting.get(row)
        if waiting is None:
            return None
        index = waiting.popleft()
        if not waiting:
            del self._waiting[row]
        return index


class ForwardTap:
    """Opens `plugin.actor_forward` around those forward passes of a model that compute responses of the last rollouts.

    Works on the model's own hooks, so it needs nothing of the trainer that calls the model. The hooks read and return nothing.
    """

    def __init__(self, model: nn.Module, plugin: MedusaPlugin) -> None:
        """
        Args:
            model: the actor; called with `input_ids` and `attention_mask`, each `[B, T]`.
            plugin: whose `rollout_ready` was called with what `expect` gets.
        """
        self._model = model
        self._plugin = plugin
        self._finder: RowFinder | None = None
        self._open: contextlib.AbstractContextManager[None] | None = None
        self._handles = [
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            model.register_forward_hook(self._after),
        ]

    def expect(self, rollouts: Rollouts) -> None:
        """The next passes are over these."""
        self._finder = RowFinder(rollouts)

    def close(self) -> None:
        """Remove the hooks."""
        self._drop_failed()
        for handle in self._handles:
            handle.remove()

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._drop_failed()
        if self._finder is None or self._finder.done:
            return
        ids, attention = kwargs.get("input_ids"), kwargs.get("attention_mask")
        if not isinstance(ids, torch.Tensor) or not isinstance(attention, torch.Tensor) or ids.dim() != 2 or ids.shape != attention.shape:
            return  # A decoding step, or a layout of the caller's own.
        mask_BT, found = self._finder.find(ids, attention)
        if any(index is not None for index in found):
            self._open = self._plugin.actor_forward(self._model, mask_BT, found)
            self._open.__enter__()

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        opened, self._open = self._open, None
        if opened is not None:
            opened.__exit__(None, None, None)

    def _drop_failed(self) -> None:
        """A forward pass that raised never came to `_after`."""
        opened, self._open = self._open, None
        if opened is not None:
            error = GeneratorExit()
            opened.__exit__(GeneratorExit, error, None)
