"""The rows of a foreign loop: what it generated, and the states that its log-prob passes compute,
tapped and packed for the companion.

`ForwardTap` is for an actor in the plugin's process (or in each process of a training), `RowTap`
for an actor in another process than the plugin. Shape letters: B rows, T tokens (padded), N tokens
of rows packed one after the other, D hidden, M response tokens.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import random
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import nn

from heads.errors import ConfigError, DataError
from medusa_ppo.actors.actor_tables import adapters_in_use, plain_model
from medusa_ppo.actors.hf import (
    Actor,
    StatesHook,
    after_each_call,
    as_view,
    compiled_part,
    traced_hook,
)
from medusa_ppo.companion.collector import BatchCollector
from medusa_ppo.companion.parts_wire import joined
from medusa_ppo.companion.positions import LEAST_BLOCKS, ROW_BYTES, EarlySample, block_rows
from medusa_ppo.contract.rollout_batch import RolloutBatch
from medusa_ppo.contract.rollouts import Counters, Response, Rollouts, Sampling
from medusa_ppo.plugin.medusa_plugin import MedusaPlugin

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Generated:
    """What one generate call of a foreign loop returned: for each row a prompt, a completion and
    its behaviour log-probs.
    """

    prompts: list[list[int]]
    completions: list[list[int]]
    logprobs: list[list[float | None]]

    @property
    def known(self) -> int:
        """Number of rows with a log-prob for each token; others are left out of the rollouts."""
        return sum(
            len(_known(logprobs)) == len(row)
            for row, logprobs in zip(self.completions, self.logprobs, strict=True)
        )

    @classmethod
    def join(cls, parts: Sequence[Generated]) -> Generated:
        """All rows of these parts, in order."""
        return cls(
            *(
                list(itertools.chain.from_iterable(getattr(part, field.name) for part in parts))
                for field in fields(cls)
            )
        )


def _known(logprobs: Sequence[float | None]) -> tuple[float, ...]:
    """Without those that are unknown or infinite."""
    return tuple(value for value in logprobs if value is not None and math.isfinite(value))


def as_rollouts(part: Generated, sampling: Sampling) -> Rollouts:
    """A foreign loop's rows as rollouts; equal prompts count as one. Rows with an unknown or
    infinite log-prob are left out.

    Raises:
        DataError: the numbers of prompts, completions and log-probs differ.
    """
    counts = len(part.prompts), len(part.completions), len(part.logprobs)
    if len(set(counts)) > 1:
        raise DataError(
            "A loop's rows do not fit together.",
            given=counts,
            expected="the same number of each",
            do="Report this, with the loop's version.",
        )
    # Trainers repeat a prompt for each of its responses; holdouts are chosen by prompt.
    prompts = list(dict.fromkeys(tuple(prompt) for prompt in part.prompts))
    index = {prompt: i for i, prompt in enumerate(prompts)}
    responses = []
    for prompt, completion, logprobs in zip(
        part.prompts, part.completions, part.logprobs, strict=True
    ):
        known = _known(logprobs)
        if len(known) == len(completion):
            reason = "length" if len(completion) >= sampling.max_new_tokens else "stop"
            responses.append(Response(index[tuple(prompt)], tuple(completion), known, reason))
    return Rollouts(tuple(prompts), tuple(responses), Counters(), 0.0, sampling)


class RowFinder:
    """Finds the responses of one `Rollouts` among rows of token ids, each response once."""

    def __init__(self, rollouts: Rollouts, own: range | None = None) -> None:
        """`own`: indices of the responses to expect; None: all."""
        self._lengths = [len(response.token_ids) for response in rollouts.responses]
        self._waiting: dict[tuple[int, ...], deque[int]] = {}
        for index, response in enumerate(rollouts.responses):
            if response.token_ids and (own is None or index in own):
                row = (*rollouts.prompts[response.prompt_index], *response.token_ids)
                # At low temperatures a prompt often has equal responses, so each row takes one.
                self._waiting.setdefault(row, deque()).append(index)

    @property
    def done(self) -> bool:
        """Whether every response was found."""
        return not self._waiting

    def find(
        self, ids_BT: torch.Tensor, attention_BT: torch.Tensor
    ) -> tuple[torch.Tensor, list[int | None]]:
        """Response mask of the rows, and for each row the index of its response; None for rows that
        match no remaining response.

        Args:
            ids_BT: prompt and response of each row, with any padding.
            attention_BT: true on prompt and response.
        """
        # Everything is copied at once; row by row, every copy would wait for the device.
        ids = ids_BT.to("cpu")
        attention = attention_BT.to("cpu", torch.bool)
        mask_BT = torch.zeros(ids.shape, dtype=torch.bool)
        found: list[int | None] = []
        for row in range(ids.shape[0]):
            index = self._take(tuple(ids[row][attention[row]].tolist()))
            if index is not None:
                # The response comes last, wherever the padding is.
                response = attention[row].nonzero()[-self._lengths[index] :, 0]
                if int(response[-1] - response[0]) + 1 == len(response):
                    mask_BT[row, response] = True
                else:
                    # The policy sampled a padding token in the middle, and the trainer masked it.
                    index = None
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
    """Opens `plugin.actor_forward` around those forward passes of a model that compute responses of
    the last rollouts.

    It uses the model's own hooks, so it needs nothing from the trainer that calls the model. The
    hooks read and return nothing.
    """

    def __init__(self, model: nn.Module, plugin: MedusaPlugin | RowShare) -> None:
        """
        Args:
            model: the actor; called with `input_ids` and `attention_mask`, each `[B, T]`.
            plugin: must have been given the rollouts passed to `expect`.
        """
        self._model = model
        self._plugin = plugin
        # The adapters that are active when training begins are the policy's.
        self._adapters = adapters_in_use(model)
        self._finder: RowFinder | None = None
        self._open: contextlib.AbstractContextManager[None] | None = None
        self._handles = [
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            model.register_forward_hook(self._after),
        ]

    def expect(self, rollouts: Rollouts, own: range | None = None) -> None:
        """Expect the next passes to cover some or all of these; other processes score theirs."""
        self._finder = RowFinder(rollouts, own)

    def close(self) -> None:
        """Remove the hooks."""
        self._drop_failed()
        for handle in self._handles:
            handle.remove()

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._drop_failed()
        if self._finder is None or self._finder.done or adapters_in_use(module) != self._adapters:
            return  # With another adapter or none, this is a pass of the reference policy.
        ids = kwargs.get("input_ids")
        attention = kwargs.get("attention_mask")
        if (
            not isinstance(ids, torch.Tensor)
            or not isinstance(attention, torch.Tensor)
            or ids.dim() != 2
            or ids.shape != attention.shape
        ):
            return  # A decoding step, or a layout of the caller's own.
        mask_BT, found = self._finder.find(ids, attention)
        if any(index is not None for index in found):
            # A `with` block can't span two hooks.
            self._open = self._plugin.actor_forward(self._model, mask_BT, found)
            self._open.__enter__()

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        opened = self._open
        self._open = None
        if opened is not None:
            opened.__exit__(None, None, None)

    def _drop_failed(self) -> None:
        """A forward pass that raised never reached `_after`."""
        opened = self._open
        self._open = None
        if opened is not None:
            # Raised inside the context, it ends the context before states are taken; the trainer
            # has already seen the real error.
            error = GeneratorExit()
            opened.__exit__(GeneratorExit, error, None)


class RowShare:
    """Stands in for the plugin in each of several processes. It keeps the states of the rows that
    are scored here until all processes deliver theirs.
    """

    def __init__(self) -> None:
        self._collector: BatchCollector | None = None

    def expect(self, rollouts: Rollouts, sample: EarlySample | None, own: range) -> None:
        """Announce the rows of all processes, and the sample of them that the companion wants. This
        process scores its own rows, and keeps no room for the others.
        """
        self._collector = BatchCollector(rollouts, sample, own)

    @contextlib.contextmanager
    def actor_forward(
        self, model: Actor, response_mask_BT: torch.Tensor, sequences: Sequence[int | None]
    ) -> Iterator[None]:
        """Like MedusaPlugin's."""
        if self._collector is None:
            yield
            return
        # States are taken only after the block, so that a failed pass leaves nothing behind.
        with as_view(model).tap() as tap:
            yield
        self._collector.add(tap.hidden_BTD, response_mask_BT, sequences)

    def take(self) -> RolloutBatch | None:
        """The states collected since `expect`."""
        collector = self._collector
        self._collector = None
        return collector.batch() if collector is not None and collector.has_states else None


def _left_over(lengths: Sequence[int], block: int, share: float, seed: int) -> float:
    """Rows that earlier passes over such responses would still owe, if each had to give this many:
    a pass gives whole blocks, and none while it owes less than its longest one may have.
    """
    chance = random.Random(seed)
    least = min(block, max(lengths))
    owed = chance.uniform(0, least)
    for _ in range(PASSES_BEFORE):
        owed += share
        if owed < least:
            continue
        blocks = []
        for length in lengths:
            edges = [0, *range(chance.randint(1, block), length, block), length]
            blocks += [end - first for first, end in itertools.pairwise(edges)]
        chance.shuffle(blocks)
        for size in blocks:
            if size > owed:
                break
            owed -= size
    return owed


PASSES_BEFORE = 8
"""As many make no difference any more how the first of them began."""
ABOUT = 0.8
"""Of the wanted rows, those that passes share out where their tokens are known roughly."""
Row = tuple[Sequence[int], Sequence[int]]
"""Token ids of a prompt and of its response."""


class RowTap(ABC):
    """Collects the states of the announced rows, in whatever micro-batches the loop scores them.

    Attributes:
        reports: whether this process is the one that gets the whole rows.
    """

    reports = True

    def __init__(self, sampling: Sampling, max_bytes: int, ahead: int) -> None:
        """
        Args:
            sampling: how the rollouts are sampled.
            max_bytes: limit for batches in transit and in training; a batch larger than half of it
                is sampled.
            ahead: number of following rows that heads learn from.
        """
        self._sampling = sampling
        self._max_bytes = max_bytes
        self._ahead = ahead
        self._prompts: dict[tuple[int, ...], int] = {}
        self._parts: list[RolloutBatch] = []
        self._finder: RowFinder | None = None
        self._rollouts: Rollouts | None = None
        self._collector: BatchCollector | None = None
        # Whether a pass went through the model in this `watch`, and in the one before.
        self._passed = self._passed_before = True
        self._expected: int | None = None
        self._rows: float | None = None
        self._rank, self._ranks = 0, 1
        self._about = False
        self._batches = 0
        # Counts for this batch: passes so far, and rows of the sample still open for the next ones.
        self._passes = 0
        self._owed = 0.0
        self._left_out = 0

    def expect(
        self,
        tokens: int,
        rows: float | None = None,
        *,
        rank: int = 0,
        ranks: int = 1,
        about: bool = False,
    ) -> None:
        """Announce that the next passes, up to `take`, cover this many response tokens. Each pass
        then contributes its share of the sample. Without this call a pass counts as a whole batch.

        Args:
            rows: number of states in the sample, with several ranks on average, else at most;
                never more than fit into `max_bytes`. None: as many as fit.
            rank, ranks: which process this is, of how many that sample this many `rows` each.
                Blocks are as long as in a sample of all of them together: of short ones, few rows
                could be trained on. Where a process's share is less than a block, it contributes
                one in some batches, and in the others none.
            about: there may be a quarter more tokens, whose passes would find the sample full: it
                gets fewer rows.
        """
        self._expected = tokens
        self._rows = rows
        self._rank, self._ranks = rank, ranks
        self._about = about

    @property
    def prompts(self) -> tuple[tuple[int, ...], ...]:
        """The prompts of the rows since the last `take`, by their numbers."""
        return tuple(self._prompts)

    @abstractmethod
    def _hooked(self) -> contextlib.AbstractContextManager[None]:
        """While this context is open, `_see` gets the whole rows that go through the model."""

    @contextlib.contextmanager
    def watch(self, rows: Sequence[Row]) -> Iterator[None]:
        """Context around the passes over these rows. `add_logprobs` follows, if the tap reports. A
        loop may make no pass at all, for example when its last micro-batch is incomplete; the log
        says so.

        Raises:
            ConfigError: tokens went through the model, but not whole rows: sequence parallelism
                splits them.
        """
        # Ranks without rows run the same passes: a sharded model's states are gathered from all.
        rows = rows if self.reports else ()
        responses = tuple(
            # The pass computes the log-probs; `add_logprobs` later replaces these zeros.
            Response(self._prompt(prompt), tuple(answer), (0.0,) * len(answer), "stop")
            for prompt, answer in rows
        )
        rollouts = Rollouts(tuple(self._prompts), responses, Counters(), 0.0, self._sampling)
        self._finder = RowFinder(rollouts)
        self._rollouts = rollouts
        self._collector = None
        self._passed_before, self._passed = self._passed, False
        with self._hooked():
            yield
        if self._collector is not None or not any(answer for _, answer in rows):
            # Nothing was missed: no reason to say so of the next one without a pass.
            self._passed = True
        elif not self._passed and self._passed_before:
            logger.warning(
                "%d rows were to be scored, and no pass went through the actor: the heads learn"
                " nothing from them. If this goes on, the tap has another model than the loop"
                " calls (of torch.compile(actor), give it what that returned).",
                len(rows),
            )
        elif self._passed:
            raise ConfigError(
                "The log-prob pass did not send whole rows through the model.",
                given="no row was recognised",
                expected="whole rows, padded or packed",
                do=(
                    "Turn off sequence parallelism and ring attention, or train without draft"
                    " heads."
                ),
            )

    def add_logprobs(self, logprobs_by_row: Sequence[torch.Tensor]) -> None:
        """The response tokens' log-probs, one tensor `[length]` for each row of `watch`, in its
        order.
        """
        collector = self._collector
        self._collector = None
        self._finder = None
        if collector is None:
            return
        if collector.has_states:
            self._parts.append(collector.batch(logprobs_by_row))
        else:
            self._left_out += collector.left_out

    def take(self, policy_version: int) -> RolloutBatch | None:
        """Everything collected since the last call, as one batch; None if there is nothing."""
        parts = self._parts
        self._parts = []
        self._prompts = {}
        left_out = self._left_out
        self._batches += 1
        self._passes = self._left_out = 0
        self._owed = 0.0
        self._expected = self._rows = None
        if not parts:
            return None
        batch = joined(parts)
        return replace(batch, policy_version=policy_version, left_out=batch.left_out + left_out)

    def _prompt(self, prompt: Sequence[int]) -> int:
        """The number of a prompt; equal prompts have the same one in all passes of a batch."""
        return self._prompts.setdefault(tuple(prompt), len(self._prompts))

    @property
    def _waiting(self) -> bool:
        """Whether some rows of `watch` are still missing."""
        return self._finder is not None and not self._finder.done

    def _see(self, ids_T: torch.Tensor, hidden_TD: torch.Tensor) -> None:
        """Take one row: prompt and response, without padding."""
        if self._finder is None or self._rollouts is None:
            return
        self._passed = True
        ids_BT = ids_T[None]
        mask_BT, found = self._finder.find(ids_BT, torch.ones_like(ids_BT))
        if found[0] is None:
            return
        if self._collector is None:
            row_bytes = hidden_TD.shape[-1] * hidden_TD.element_size() + ROW_BYTES
            bound = self._max_bytes // 2 // row_bytes
            # Who says how many may have counted with another dtype than these states have.
            rows = bound if self._rows is None else min(self._rows, bound)
            self._collector = self._collector_of(self._rollouts, rows)
        self._collector.add(hidden_TD[None], mask_BT, found)

    def _collector_of(self, rollouts: Rollouts, rows: float) -> BatchCollector:
        """A collector for this pass's share of the sample, if this many rows of the whole batch may
        be kept.

        The holdout is chosen once all passes are done, because answers to one prompt may be in
        several of them.
        """
        tokens = sum(len(response.token_ids) for response in rollouts.responses)
        number = self._passes
        self._passes += 1
        kept = sum(part.hidden_MD.shape[0] for part in self._parts)
        whole = rows
        if self._expected is None:  # The rest belongs to this pass.
            rows = max(0, rows - kept)
        everything = max(self._expected or 0, tokens)
        if rows >= everything and whole >= kept + tokens:
            return BatchCollector(rollouts)
        if self._ranks > 1:
            return BatchCollector(rollouts, self._part_of(rows * tokens / everything, number))
        block = block_rows(int(rows), self._ahead)
        seed = 1_000_003 * self._batches + number
        lengths = [len(response.token_ids) for response in rollouts.responses]
        least = min(block, max(lengths))  # No block is longer than its response.
        if tokens < everything:
            # A share that is less than a block is added to those of the next passes. Before the
            # first one there is a random debt, as earlier ones would have left it; what it may add
            # is taken from all, since a batch larger than it may be is lost whole.
            rows -= min(block, rows / LEAST_BLOCKS)
            if self._about:
                rows *= ABOUT
            if not number:
                self._owed = _left_over(lengths, block, rows * tokens / everything, seed)
        self._owed += rows * tokens / everything
        # There may be more tokens than were announced. A batch has at least one block.
        due = min(int(self._owed), max(int(whole), block) - kept)
        due = due if due >= least else 0
        collector = BatchCollector(rollouts, EarlySample(due, 0.0, seed, self._ahead, block))
        self._owed -= collector.kept
        return collector

    def _part_of(self, rows: float, number: int) -> EarlySample:
        """This process's part of a sample: this many rows on average, in blocks of the whole
        sample.

        Args:
            number: of the pass, in this batch.
        """
        assert self._rows is not None, "each of several ranks announces the number of states"
        # All processes draw the same order, in which each has a place of its own. So nearly the
        # same number of them contribute to each batch.
        pass_name = f"{self._batches} {number}"
        places = list(range(self._ranks))
        random.Random(pass_name).shuffle(places)
        own = random.Random(f"{pass_name} {self._rank}")
        return EarlySample(
            rows,
            0.0,
            own.getrandbits(32),
            self._ahead,
            block_rows(int(self._rows * self._ranks), self._ahead),
            luck=(places[self._rank] + own.random()) / self._ranks,
        )


class PassTap(RowTap):
    """Taps a transformers causal LM with a forward hook; a compiled one too.

    Rows may be padded (`attention_mask`) or packed (`position_ids` that restart with each row).
    """

    def __init__(self, model: nn.Module, sampling: Sampling, max_bytes: int, ahead: int) -> None:
        """
        Args:
            model: the actor, a transformers causal LM under any wrappers.
            sampling, max_bytes, ahead: as in RowTap.
        """
        super().__init__(sampling, max_bytes, ahead)
        self._model = model
        # The hook is on the base model: its output is the state that heads read, and a pass may
        # compute no logits.
        self._base: Any = plain_model(model).base_model
        if compiled_part(model) is not None:
            # Before its first compiled pass if possible; otherwise the model is compiled again.
            traced_hook(self._base)

    @contextlib.contextmanager
    def _hooked(self) -> Iterator[None]:
        compiled = compiled_part(self._model)
        if compiled is None:
            handle = self._base.register_forward_hook(self._hook, with_kwargs=True)
            try:
                yield
            finally:
                handle.remove()
            return
        # Inside the compiled pass only tensors are kept; rows are looked for after it.
        kept = traced_hook(self._base)

        def passed() -> None:
            self._see_pass(kept)
            kept.reset(open_=True)

        with after_each_call(compiled, passed):
            kept.reset(open_=True)
            try:
                yield
            finally:
                kept.reset(open_=False)

    def _hook(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        if self._waiting:
            kept = StatesHook()
            kept(module, args, kwargs, output)
            self._see_pass(kept)

    def _see_pass(self, kept: StatesHook) -> None:
        """Take the rows of one pass."""
        ids, attention, positions = kept.inputs
        hidden_BTD = kept.hidden_BTD
        if not self._waiting or hidden_BTD is None or not isinstance(ids, torch.Tensor):
            return
        self._passed = True
        for row, first, last in spans(ids, attention, positions):
            self._see(ids[row, first:last], hidden_BTD[row, first:last])


def spans(ids: torch.Tensor, attention: Any, positions: Any) -> list[tuple[int, int, int]]:
    """(row, first, last) of each sequence in a model's input, padded `[B, T]` or packed `[1,
    N]`.

    Args:
        positions: `[1, N]`; or one such plane for each axis that the model counts along (M-RoPE),
            whose first one counts the text: `[axes, 1, N]`.

    Raises:
        ConfigError: the rows may be packed, and their positions have another shape.
    """
    if isinstance(attention, torch.Tensor) and attention.shape == ids.shape:
        found = []
        for row, mask_T in enumerate(attention.bool().cpu()):
            at = mask_T.nonzero()
            if at.numel():
                found.append((row, int(at[0]), int(at[-1]) + 1))
        return found
    if ids.shape[0] == 1 and isinstance(positions, torch.Tensor):
        plane = positions[0] if positions.dim() == 3 else positions
        if plane.shape != ids.shape:
            raise ConfigError(
                "Packed rows can't be told apart by these positions.",
                given=f"position_ids {tuple(positions.shape)} of tokens {tuple(ids.shape)}",
                expected=f"{tuple(ids.shape)}, or that many for each axis (M-RoPE)",
                do="Train without draft heads, or let the loop pad its rows.",
            )
        # Packed rows can only be told apart by their positions.
        starts = [*(plane[0] == 0).nonzero()[:, 0].tolist(), ids.shape[1]]
        return [(0, first, last) for first, last in itertools.pairwise(starts)]
    return [(row, 0, ids.shape[1]) for row in range(ids.shape[0])]
