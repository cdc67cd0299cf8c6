"""One rollout batch as tensors, and how it is split: into minibatches for the optimizer's steps,
and into micro batches for the passes (sorted by length, to compute little padding).

Shape letters: S sequences of the rollout batch, R response positions (padded to the longest), B
sequences of a micro batch, T tokens of prompt plus response (padded on the right to the longest), M
response tokens of a micro batch, packed row after row.

Padding is on the right, where a causal model can't see it from any real token: no attention mask is
needed, and the positions are 0, 1, 2, ... for every row, in training as in the engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from heads.errors import DataError
from medusa_ppo.actors.vision import FeatureStore, ImageFeatures
from medusa_ppo.config.ppo_section import PPOConfig
from medusa_ppo.contract.rollouts import Counters, Response, Rollouts, Sampling


@dataclass(frozen=True)
class MicroBatch:
    """Sequences that go through a model together.

    Attributes:
        sequences: B indices into the rollout batch, the order of the rows.
        input_ids_BT: int64, prompt + response + padding.
        response_mask_BT: bool, token t belongs to the response.
        first: place of the batch's first sequence in the rollout batch; above 0 if the batch is a
            piece of it.
        seen: the images of its prompts; None if there are none.
    """

    sequences: tuple[int, ...]
    input_ids_BT: Tensor
    response_mask_BT: Tensor
    first: int = 0
    seen: ImageFeatures | None = None

    @property
    def places(self) -> tuple[int, ...]:
        """The sequences' places in the whole rollout batch."""
        return tuple(self.first + s for s in self.sequences)

    @property
    def predict_mask_BT(self) -> Tensor:
        """bool: the model's output at t predicts a response token (at t + 1)."""
        return torch.nn.functional.pad(self.response_mask_BT[:, 1:], (0, 1), value=False)

    @property
    def response_ids_M(self) -> Tensor:
        """int64, the response tokens row after row: the order in which `x_BT[predict_mask_BT]`
        packs predictions.
        """
        return self.input_ids_BT[self.response_mask_BT]

    @property
    def first_predicting(self) -> int:
        """Column of the first output that any row needs; earlier outputs are thrown away."""
        return int(self.response_mask_BT.any(dim=0).int().argmax()) - 1


class PPOBatch:
    """A rollout batch: token ids per sequence, and response coordinates for everything per token.

    Attributes:
        rollouts, pad_id, first: what it was made from.
        mask_SR: bool, real response tokens; they come first in each row.
        behaviour_SR: float32 log-probs that the engine reported, 0 on padding.
        lengths_S: int64 response tokens of each sequence.
        prompts_S: int64, the prompt that each sequence answers.
        cut_S: bool, the response was cut at the length limit.
        total_lengths: prompt plus response tokens of each sequence.
    """

    def __init__(
        self,
        rollouts: Rollouts,
        device: torch.device | str = "cpu",
        pad_id: int = 0,
        first: int = 0,
    ) -> None:
        """
        Args:
            first: place of its first response in the rollout batch, if it is a piece of one.

        Raises:
            DataError: no responses, a response without tokens, or log-probs that do not fit the
                tokens.
        """
        _check(rollouts)
        self.rollouts = rollouts
        self.device = torch.device(device)
        self.pad_id = pad_id
        self.first = first
        self._prompts = [rollouts.prompts[r.prompt_index] for r in rollouts.responses]
        self._responses = [r.token_ids for r in rollouts.responses]
        self.lengths_S = torch.tensor([len(ids) for ids in self._responses])
        self.prompts_S = torch.tensor([r.prompt_index for r in rollouts.responses])
        self.cut_S = torch.tensor([r.finish_reason == "length" for r in rollouts.responses])
        self.total_lengths = [
            len(p) + len(r) for p, r in zip(self._prompts, self._responses, strict=True)
        ]
        columns_R = torch.arange(int(self.lengths_S.max()))
        self.mask_SR = columns_R[None] < self.lengths_S[:, None]
        self.behaviour_SR = torch.zeros(self.mask_SR.shape)
        self.behaviour_SR[self.mask_SR] = torch.tensor(
            [x for r in rollouts.responses for x in r.logprobs], dtype=torch.float32
        )

    def __len__(self) -> int:
        return len(self._responses)

    def micro_batches(
        self, sequences: list[int], size: int, tokens: int | None = None
    ) -> Iterator[MicroBatch]:
        """Split the given sequences into micro batches of at most `size`, similar in length; each
        is padded to its longest.

        Args:
            tokens: maximum tokens in one, padding included; a longer sequence is alone. None: no
                limit.
        """
        rows: list[int] = []
        for s in sorted(sequences, key=lambda s: (self.total_lengths[s], s)):
            if len(rows) == size or (
                rows and tokens is not None and (len(rows) + 1) * self.total_lengths[s] > tokens
            ):
                yield self._micro(tuple(rows))
                rows = []
            rows.append(s)
        if rows:
            yield self._micro(tuple(rows))

    def seen_micros(
        self, sequences: list[int], size: int, tokens: int | None, features: FeatureStore | None
    ) -> list[MicroBatch]:
        """The same with the images of their prompts. `features`: None: prompts have none."""
        micros = list(self.micro_batches(sequences, size, tokens))
        if features is None:
            return micros
        return [
            replace(micro, seen=features.look(self.prompts_of(micro), micro.input_ids_BT))
            for micro in micros
        ]

    def _micro(self, sequences: tuple[int, ...]) -> MicroBatch:
        width = max(self.total_lengths[s] for s in sequences)
        input_ids_BT = torch.full((len(sequences), width), self.pad_id)
        response_mask_BT = torch.zeros((len(sequences), width), dtype=torch.bool)
        for row, s in enumerate(sequences):
            prompt = self._prompts[s]
            response = self._responses[s]
            total = len(prompt) + len(response)
            input_ids_BT[row, :total] = torch.tensor([*prompt, *response])
            response_mask_BT[row, len(prompt) : total] = True
        return MicroBatch(
            sequences, input_ids_BT.to(self.device), response_mask_BT.to(self.device), self.first
        )

    def prompts_of(self, micro: MicroBatch) -> list[tuple[int, ...]]:
        """The prompts of its rows."""
        return [self._prompts[s] for s in micro.sequences]

    def pack(self, values_SR: Tensor, micro: MicroBatch) -> Tensor:
        """values_SR in the packed order of a micro batch: values_M, on the batch's device."""
        rows = torch.tensor(micro.sequences)
        return values_SR[rows][self.mask_SR[rows]].to(self.device)

    def unpack(self, values_M: Tensor, micro: MicroBatch, into_SR: Tensor) -> None:
        """Write packed values of a micro batch to their places in `into_SR` (in place, on the
        CPU).
        """
        start = 0
        values_M = values_M.detach().to("cpu", into_SR.dtype)
        for s in micro.sequences:
            length = int(self.lengths_S[s])
            into_SR[s, :length] = values_M[start : start + length]
            start += length


def text_batch(texts: Sequence[tuple[int, ...]], device: torch.device, pad_id: int) -> PPOBatch:
    """Whole texts of at least two tokens: everything but the first token counts as the response."""
    responses = tuple(
        Response(i, ids[1:], (0.0,) * (len(ids) - 1), "stop") for i, ids in enumerate(texts)
    )
    return PPOBatch(
        Rollouts(tuple(ids[:1] for ids in texts), responses, Counters(), 0.0, Sampling()),
        device,
        pad_id,
    )


def chosen_texts(texts: PPOBatch, before: int, count: int) -> list[int]:
    """The texts that go with the `count` responses of a minibatch, in order; `before`: responses of
    the update's minibatches before it. They begin again when all have been used.
    """
    return sorted({(before + n) % len(texts) for n in range(count)})


def _check(rollouts: Rollouts) -> None:
    if not rollouts.responses:
        raise DataError(
            "The engine returned no responses.",
            given="0 responses",
            expected="at least one",
            do="Check the prompts and the engine's log.",
        )
    for index, response in enumerate(rollouts.responses):
        if not response.token_ids or len(response.token_ids) != len(response.logprobs):
            raise DataError(
                "A response can't be used for training.",
                given=(
                    f"response {index}: {len(response.token_ids)} tokens, {len(response.logprobs)}"
                    " log-probs"
                ),
                expected="at least one token, and one log-prob for each",
                do="Check that the engine returns log-probs and does not abort requests.",
            )
        if not rollouts.prompts[response.prompt_index]:
            raise DataError(
                "A prompt is empty.",
                given=f"prompt {response.prompt_index}",
                expected="at least one token",
                do="Correct the template.",
            )


def minibatches(
    trained: Sequence[int], config: PPOConfig, seed: int, step: int
) -> Iterator[list[int]]:
    """The sequences of each optimizer step of an update, out of those learned from: as few
    minibatches as their size allows, and as equal. A small rest would get an optimizer step of its
    own, which AdamW makes as long as those of whole minibatches.

    Seeded only by the step, so that a resumed run draws the same.
    """
    order = torch.Generator().manual_seed((seed * 1_000_003 + step) % 2**63)
    parts = -(-len(trained) // config.minibatch_size)
    for _ in range(config.epochs if parts else 0):
        for places in torch.randperm(len(trained), generator=order).tensor_split(parts):
            yield [trained[place] for place in places.tolist()]
