"""A worker's half of the plugin: taps the log-prob pass that the loop makes there, and packs what the companion trains on.

For loops whose actor lives in other processes than the plugin. Shape letters: B rows, T tokens (padded), N tokens of rows packed one
after the other, D hidden, M response tokens.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from heads.errors import ConfigError
from medusa_ppo.companion.collector import BatchCollector
from medusa_ppo.loops.rows import RowFinder
from medusa_ppo.types import Counters, Response, RolloutBatch, Rollouts, Sampling

Row = tuple[Sequence[int], Sequence[int]]
"""Token ids of a prompt and of its response."""


class PassTap:
    """Collects the states of the rows that were announced, from whatever micro-batches the loop makes of them.

    Padded rows (`attention_mask`) and packed ones (`position_ids` that begin anew with each row) are understood.
    """

    def __init__(self, model: nn.Module, sampling: Sampling, max_bytes: int) -> None:
        """
        Args:
            model: the actor, a transformers causal LM under any wrappers.
            sampling: how the rollouts are sampled.
            max_bytes: of hidden states; what comes beyond is passed over.
        """
        inner: Any = model
        while isinstance(getattr(inner, "module", None), nn.Module):
            inner = inner.module
        self._base: Any = getattr(inner, "base_model", inner)
        self._sampling = sampling
        self._max_bytes = max_bytes
        self._prompts: dict[tuple[int, ...], int] = {}
        self._parts: list[RolloutBatch] = []
        self._finder: RowFinder | None = None
        self._collector: BatchCollector | None = None

    @contextlib.contextmanager
    def watch(self, rows: Sequence[Row]) -> Iterator[None]:
        """Around the passes over these rows. `add_logprobs` follows.

        Raises:
            ConfigError: tokens went through the model, but not whole rows: sequence parallelism cuts them up.
        """
        responses = tuple(Response(self._prompt(prompt), tuple(answer), (0.0,) * len(answer), "stop") for prompt, answer in rows)
        rollouts = Rollouts(tuple(self._prompts), responses, Counters(), 0.0, self._sampling)
        self._finder, self._collector = RowFinder(rollouts), BatchCollector(rollouts)
        handle = self._base.register_forward_hook(self._hook, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()
        if rows and not self._collector.complete and not self._collector.seen:
            raise ConfigError(
                "The rows of the log-prob pass did not go through the model as they are.",
                given="no row was recognised",
                expected="whole rows, padded or packed",
                do="Switch sequence parallelism and ring attention off, or train without draft heads.",
            )

    def add_logprobs(self, logprobs_by_row: Sequence[torch.Tensor]) -> None:
        """The response tokens' log-probs, one tensor `[length]` for each row of `watch`, in its order."""
        collector, self._collector, self._finder = self._collector, None, None
        if collector is None or not collector.seen:
            return
        batch = collector.batch()
        if collector.complete:
            batch = replace(batch, logprobs_M=torch.cat([values.detach().float().cpu() for values in logprobs_by_row]))
            if sum(part.nbytes for part in self._parts) + batch.nbytes <= self._max_bytes:
                self._parts.append(batch)

    def take(self, policy_version: int) -> RolloutBatch | None:
        """All that was collected since the last call, as one batch; None when there is nothing."""
        parts, self._parts, self._prompts = self._parts, [], {}
        if not parts:
            return None
        return replace(
            parts[0],
            hidden_MD=torch.cat([part.hidden_MD for part in parts]),
            response_ids_M=torch.cat([part.response_ids_M for part in parts]),
            logprobs_M=torch.cat([part.logprobs_M for part in parts]),
            lengths_S=torch.cat([part.lengths_S for part in parts]),
            prompts_S=torch.cat([part.prompts_S for part in parts if part.prompts_S is not None]),
            policy_version=policy_version,
        )

    def _prompt(self, prompt: Sequence[int]) -> int:
        """Number of a prompt; answers to equal prompts share it over all passes of a batch."""
        return self._prompts.setdefault(tuple(prompt), len(self._prompts))

    def _hook(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        finder, collector = self._finder, self._collector
        ids = kwargs.get("input_ids", args[0] if args else None)
        if finder is None or collector is None or finder.done or not isinstance(ids, torch.Tensor):
            return
        hidden_BTD = output.last_hidden_state if hasattr(output, "last_hidden_state") else output[0]
        attention, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
        for row, first, last in spans(ids, attention, positions):
            tokens = ids[row : row + 1, first:last]
            mask_BT, found = finder.find(tokens, torch.ones_like(tokens))
            if found[0] is not None:
                collector.add(hidden_BTD[row : row + 1, first:last], mask_BT, found)


def spans(ids: torch.Tensor, attention: Any, positions: Any) -> list[tuple[int, int, int]]:
    """(row, first, last) of each sequence in a model's input, padded `[B, T]` or packed `[1, N]`."""
    if isinstance(attention, torch.Tensor) and attention.shape == ids.shape:
        found = []
        for row, mask_T in enumerate(attention.bool().cpu()):
            at = mask_T.nonzero()
            if at.numel():
                found.append((row, int(at[0]), int(at[-1]) + 1))
        return found
    if ids.shape[0] == 1 and isinstance(positions, torch.Tensor) and positions.shape == ids.shape:
        starts = [*(positions[0] == 0).nonzero()[:, 0].tolist(), ids.shape[1]]
        return [(0, first, last) for first, last in itertools.pairwise(starts)]
    return [(row, 0, ids.shape[1]) for row in range(ids.shape[0])]
