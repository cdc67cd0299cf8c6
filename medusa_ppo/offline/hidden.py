"""Hidden states of samples. Sequences are packed into rows without padding, in fixed groups; groups
are cached up to a limit, and otherwise computed again.

Shape letters: B rows of a forward pass, T positions, D hidden, V vocabulary, M written tokens of
all sequences.

A group is always computed in the same shapes. The training data is therefore the same to the bit,
whatever the cache holds and wherever an interrupted training resumes.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from itertools import pairwise

import torch
from transformers import PreTrainedModel

from medusa_ppo.actors.hf import HiddenTap
from medusa_ppo.contract.rollout_batch import RolloutBatch
from medusa_ppo.offline.collect import Sample
from medusa_ppo.runtime.console import Advance

GROUP_TOKENS = 8192
"""Maximum tokens in a group, and in a forward pass."""
# The minimum, even with little text: a single group could neither be split among workers nor
# reordered in each epoch.
LEAST_GROUPS = 16
ROW_TOKENS = 256
"""Minimum length of a row with packed sequences, so that little of it stays empty."""
LOGIT_ELEMENTS = 1 << 26
"""Maximum number of logits in a forward pass that needs them (256 MiB in float32)."""
# Lengths of the two sequences with which packing is tried out. They differ, so that no position of
# one can be mistaken for the same position of the other.
PROBE_LENGTHS = (7, 5)

Row = list[tuple[int, int]]
"""The sequences that follow each other in a row of a forward pass: (sample, its first position)."""


def read_all(reader: HiddenReader, samples: Sequence[Sample], advance: Advance) -> RolloutBatch:
    """The states of all samples in one batch, in the samples' order."""
    # Read in order of length, so that a forward pass has little padding.
    order = sorted(range(len(samples)), key=lambda i: len(samples[i].ids))
    found: dict[int, RolloutBatch] = {}
    for group in _cut([len(samples[i].ids) for i in order], GROUP_TOKENS):
        numbers = [order[i] for i in group]
        found |= dict(zip(numbers, reader.read([samples[i] for i in numbers]), strict=True))
        advance(len(numbers))
    return RolloutBatch.join([found[i] for i in range(len(samples))])


class HiddenStates:
    """The samples of a training, split into groups once and for all. A group's batch comes from the
    cache or from a new forward pass.

    Attributes:
        groups: indices of each group's samples.
        cached_bytes: bytes in the cache now.
        forwards: number of groups computed so far.
    """

    def __init__(
        self, reader: HiddenReader, samples: Sequence[Sample], cache_bytes: int, seed: int
    ) -> None:
        """
        Args:
            reader: computes the states.
            cache_bytes: maximum bytes of hidden states to keep; 0: every use is a forward pass.
            seed: seed of the grouping.
        """
        self._reader = reader
        self._samples = samples
        self._room = cache_bytes
        self._kept: dict[int, RolloutBatch] = {}
        # A separate generator: a resumed training must have the same groups.
        order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(seed)).tolist()
        total = sum(len(sample.ids) for sample in samples)
        size = max(1, min(GROUP_TOKENS, -(-total // LEAST_GROUPS)))
        self.groups = [
            [order[i] for i in group] for group in _cut([len(samples[i].ids) for i in order], size)
        ]
        self.cached_bytes = 0
        self.forwards = 0

    @property
    def tokens(self) -> int:
        """Written tokens of all samples."""
        return sum(sample.written for sample in self._samples)

    @property
    def positions(self) -> list[int]:
        """Positions to train on in each group: at the last token of a stretch no head has anything
        to predict.
        """
        return [
            sum(self._samples[i].written - len(self._samples[i].spans) for i in group)
            for group in self.groups
        ]

    def batch(self, numbers: Sequence[int]) -> RolloutBatch:
        """The batch with these groups, in this order."""
        return RolloutBatch.join([self._group(number) for number in numbers])

    def _group(self, number: int) -> RolloutBatch:
        if number in self._kept:
            return self._kept[number]
        batch = RolloutBatch.join(
            self._reader.read([self._samples[i] for i in self.groups[number]])
        )
        self.forwards += 1
        # Cached groups are never evicted. Every epoch uses all groups, so evicting the oldest would
        # evict each one just before it is needed.
        if self.cached_bytes + batch.nbytes <= self._room:
            self._kept[number] = batch
            self.cached_bytes += batch.nbytes
        return batch


class HiddenReader:
    """Reads hidden states from a model's own forward pass: in packed rows if the model keeps packed
    sequences apart, otherwise in padded rows.
    """

    def __init__(
        self, model: PreTrainedModel, temperature: float, dtype: torch.dtype | None = None
    ) -> None:
        """
        Args:
            model: the actor, on the device where it is to run.
            temperature: the temperature of the samples' behaviour log-probs; where a sample has
                none, they are computed at this temperature.
            dtype: dtype of the stored states; None: the model's.
        """
        self._model = model
        self._dtype = dtype or model.dtype
        self._temperature = temperature
        self._sizes = model.config.get_text_config()
        # Model families differ in their arguments, and an unknown argument is an error.
        self._accepts = set(inspect.signature(model.forward).parameters)
        self.packed = self._keeps_packed_apart()

    @torch.no_grad()
    def read(self, samples: Sequence[Sample]) -> list[RolloutBatch]:
        """One batch per sample, on the CPU."""
        longest = max(len(sample.ids) for sample in samples)
        needs_logits = any(sample.logprobs is None for sample in samples)
        most = GROUP_TOKENS
        if needs_logits:
            most = min(most, LOGIT_ELEMENTS // self._sizes.vocab_size)
        # A sequence that is longer than a pass should be gets a pass of its own.
        limit = max(longest, most)
        context = getattr(self._sizes, "max_position_embeddings", None) or ROW_TOKENS
        width = max(longest, min(ROW_TOKENS, limit, context))
        rows = (
            _pack([len(s.ids) for s in samples], width)
            if self.packed
            else _one_each([len(s.ids) for s in samples])
        )
        found: dict[int, RolloutBatch] = {}
        widths = [_width(row, samples) for row in rows]
        for part in _cut(widths, limit, padded=True):
            self._run([rows[i] for i in part], samples, needs_logits, found)
        return [found[i] for i in range(len(samples))]

    def _run(
        self,
        rows: Sequence[Row],
        samples: Sequence[Sample],
        needs_logits: bool,
        found: dict[int, RolloutBatch],
    ) -> None:
        width = max(_width(row, samples) for row in rows)
        ids_BT = torch.zeros(len(rows), width, dtype=torch.int64)
        # The unused end of a row stays at position 0: transformers takes these tokens for sequences
        # of length one, and nothing attends to them.
        positions_BT = torch.zeros_like(ids_BT)
        for b, row in enumerate(rows):
            for i, start in row:
                stop = start + len(samples[i].ids)
                ids_BT[b, start:stop] = torch.tensor(samples[i].ids)
                positions_BT[b, start:stop] = torch.arange(stop - start)
        hidden_BTD, logits_BTV = self._forward(ids_BT, positions_BT, needs_logits)
        for b, row in enumerate(rows):
            for i, start in row:
                found[i] = self._sequence(
                    samples[i], hidden_BTD[b], None if logits_BTV is None else logits_BTV[b], start
                )

    def _sequence(
        self, sample: Sample, hidden_TD: torch.Tensor, logits_TV: torch.Tensor | None, start: int
    ) -> RolloutBatch:
        """Cut a sample's written tokens out of its row, each with the state that predicts it: that
        of the token before.
        """
        ids_M = torch.tensor(
            [token for first, end in sample.spans for token in sample.ids[first:end]],
            dtype=torch.int64,
        )
        rows_M = torch.cat(
            [torch.arange(start + first - 1, start + end - 1) for first, end in sample.spans]
        ).to(hidden_TD.device)
        if sample.logprobs is not None:
            logprobs_M = torch.tensor(sample.logprobs, dtype=torch.float32)
        else:
            assert logits_TV is not None, "logits are computed when a sample lacks log-probs"
            logp_MV = torch.log_softmax(logits_TV[rows_M].float() / self._temperature, dim=-1)
            logprobs_M = logp_MV.gather(1, ids_M.to(logp_MV.device)[:, None])[:, 0].cpu()
        lengths_S = torch.tensor([end - first for first, end in sample.spans], dtype=torch.int64)
        prompts_S = torch.full_like(lengths_S, sample.prompt)
        # States go to the CPU: all of them together may be many times a GPU's memory.
        hidden_MD = hidden_TD[rows_M].to("cpu", self._dtype)
        return RolloutBatch(
            hidden_MD,
            ids_M,
            logprobs_M,
            lengths_S,
            temperature=self._temperature,
            prompts_S=prompts_S,
            # The text that copying may search: for each stretch, everything before it.
            before_ids_X=torch.tensor(
                [token for first, _ in sample.spans for token in sample.ids[:first]],
                dtype=torch.int32,
            ),
            before_S=torch.tensor([first for first, _ in sample.spans], dtype=torch.int64),
        )

    def _forward(
        self, ids_BT: torch.Tensor, positions_BT: torch.Tensor | None, needs_logits: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        # Without a KV cache: transformers detects packed sequences only then.
        options: dict[str, int] = {"use_cache": False} if "use_cache" in self._accepts else {}
        if not needs_logits and "logits_to_keep" in self._accepts:
            # Nobody needs the logits, and lm_head at all positions would be the largest matrix
            # product of the pass.
            options["logits_to_keep"] = 1
        positions = {}
        if positions_BT is not None and "position_ids" in self._accepts:
            positions["position_ids"] = positions_BT.to(self._model.device)
        with HiddenTap(self._model) as tap:
            logits_BTV = self._model(
                input_ids=ids_BT.to(self._model.device), **positions, **options
            ).logits
        return tap.hidden_BTD, logits_BTV if needs_logits else None

    @torch.no_grad()
    def _keeps_packed_apart(self) -> bool:
        """Whether the model keeps packed sequences apart. This is tried out: a short sequence must
        have the same states after another one as alone.
        """
        if "position_ids" not in self._accepts:
            return False
        one, two = PROBE_LENGTHS
        ids = torch.arange(one + two).remainder(self._sizes.vocab_size)[None]
        positions = torch.cat([torch.arange(one), torch.arange(two)])[None]
        together = self._forward(ids, positions, False)[0][0, one:].float()
        alone = self._forward(ids[:, one:], torch.arange(two)[None], False)[0][0].float()
        # Different shapes round differently, but attending to the other sequence would make a far
        # larger difference.
        tolerance = 1e-3 if self._model.dtype == torch.float32 else 3e-2
        return bool((together - alone).norm() <= tolerance * alone.norm())


def _pack(lengths: Sequence[int], width: int) -> list[Row]:
    """Pack sequences into rows: the longest first, each into the first row with room."""
    rows: list[Row] = []
    ends: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        row = next((r for r, end in enumerate(ends) if end + lengths[i] <= width), len(rows))
        if row == len(rows):
            rows.append([])
            ends.append(0)
        rows[row].append((i, ends[row]))
        ends[row] += lengths[i]
    return rows


def _one_each(lengths: Sequence[int]) -> list[Row]:
    """A row for each sequence, sorted by length so that neighbours need little padding. A causal
    mask hides the padding from all tokens.
    """
    return [[(i, 0)] for i in sorted(range(len(lengths)), key=lambda i: lengths[i])]


def _width(row: Row, samples: Sequence[Sample]) -> int:
    last, start = row[-1]
    return start + len(samples[last].ids)


def _cut(sizes: Sequence[int], limit: int, *, padded: bool = False) -> list[list[int]]:
    """Cut the indices of `sizes` into consecutive parts of at most `limit`; an index that is larger
    alone is a part by itself. A part's size is the sum, or, `padded`, the largest times the count.
    """
    ends = [0]
    for i in range(1, len(sizes)):
        part = sizes[ends[-1] : i + 1]
        if (max(part) * len(part) if padded else sum(part)) > limit:
            ends.append(i)
    return [list(range(first, end)) for first, end in pairwise([*ends, len(sizes)])]
