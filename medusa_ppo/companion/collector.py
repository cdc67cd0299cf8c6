"""Puts tapped hidden states in the order of their response tokens.

A loop scores responses in micro-batches, in any order and with any padding, and perhaps only some
of them. Heads train on whole responses, token by token. This file converts one into the other, with
a single copy of each state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from heads.errors import DataError
from medusa_ppo.companion.holdout import cut_to_states
from medusa_ppo.companion.positions import EarlySample, Places
from medusa_ppo.companion.wire import batch_token_ids
from medusa_ppo.contract.rollout_batch import RolloutBatch
from medusa_ppo.contract.rollouts import Response, Rollouts, copyable


def filled_responses(responses: Sequence[Response]) -> tuple[torch.Tensor, torch.Tensor]:
    """Lengths and prompts of the responses with a token."""
    filled = [(len(r.token_ids), r.prompt_index) for r in responses if r.token_ids]
    lengths, prompts = zip(*filled, strict=True) if filled else ((), ())
    return torch.tensor(lengths, dtype=torch.int64), torch.tensor(prompts, dtype=torch.int64)


def places_of(part: Sequence[Response], responses: int, prompts: int, first: int = 0) -> Places:
    """Where the responses with a token stand, if `part` begins at index `first` of a batch of
    `responses` responses to `prompts` prompts (0: as many as the part names).
    """
    filled = [first + place for place, response in enumerate(part) if response.token_ids]
    named = max((response.prompt_index for response in part), default=-1) + 1
    return Places(torch.tensor(filled, dtype=torch.int64), responses, max(prompts, named))


class BatchCollector:
    """Collects the final hidden states of every response of one `Rollouts`.

    One CPU tensor is filled in place, so a state is copied once here. With a sample only the states
    of its rows leave the actor's device.

    Attributes:
        empty_responses: responses without a token.
        left_out: response tokens whose states the `sample` omits.
    """

    def __init__(
        self, rollouts: Rollouts, sample: EarlySample | None = None, own: range | None = None
    ) -> None:
        """
        Args:
            rollouts: the rollouts whose states will arrive.
            sample: which of them are wanted; None: all.
            own: indices of the responses scored here, if other processes score the rest; None: all.
        """
        self._rollouts = rollouts
        self.sample = sample
        self._lengths = [len(response.token_ids) for response in rollouts.responses]
        self._seen = [length == 0 for length in self._lengths]
        self._weights_M: torch.Tensor | None = None
        self._held_S: torch.Tensor | None = None
        if sample is not None and any(self._lengths):
            self._weights_M, self._held_S = sample.draw(
                *filled_responses(rollouts.responses),
                places_of(rollouts.responses, len(rollouts.responses), len(rollouts.prompts)),
            )
        wanted_M = (
            torch.ones(sum(self._lengths), dtype=torch.bool)
            if self._weights_M is None
            else self._weights_M >= 0
        )
        self._wanted = wanted_M.split(
            self._lengths
        )  # Rows of each response whose states are wanted.
        self._own = range(len(self._lengths)) if own is None else own
        self._counts = [
            int(wanted.sum()) if s in self._own else 0 for s, wanted in enumerate(self._wanted)
        ]
        self._hidden_MD: torch.Tensor | None = None
        self._ids_M: torch.Tensor | None = None
        self._copied: torch.cuda.Event | None = None
        self.empty_responses = sum(self._seen)
        self.left_out = int((~wanted_M).sum())

    @property
    def complete(self) -> bool:
        """True when every response with at least one token has its states."""
        return all(self._seen)

    @property
    def seen(self) -> int:
        """Responses that have their states."""
        return sum(self._seen) - self.empty_responses

    @property
    def tokens(self) -> int:
        """Response tokens of the rollouts; 0 where only the workers that score them know them."""
        return sum(self._lengths)

    @property
    def kept(self) -> int:
        """Number of wanted states."""
        return sum(self._counts)

    @property
    def has_states(self) -> bool:
        """Whether a response with a wanted state has been scored."""
        return any(seen and count for seen, count in zip(self._seen, self._counts, strict=True))

    def add(
        self,
        hidden_BTD: torch.Tensor,
        response_mask_BT: torch.Tensor,
        sequences: Sequence[int | None] | torch.Tensor,
    ) -> int:
        """Take the rows of one micro-batch, skipping responses that were taken before.

        Args:
            hidden_BTD: final hidden states, on any device; T may be one less than the mask's (a
                forward without the last token).
            response_mask_BT: true where token t of the row is a response token.
            sequences: for each row, the index of its response in `rollouts.responses`, or None: it
                is none of them and is skipped.

        Returns:
            Number of responses taken.

        Raises:
            DataError: shapes, indices or token counts that do not fit the rollouts.
        """
        mask_BT = response_mask_BT.to(device="cpu", dtype=torch.bool)
        order = [None if s is None else int(s) for s in sequences]
        self._check(hidden_BTD, mask_BT, order)
        taken: dict[int, int] = {}  # Response -> its row; the first one if there are several.
        for row, s in enumerate(order):
            if s is not None and s in self._own and not self._seen[s]:
                taken.setdefault(s, row)
        if not taken:
            return 0
        rows = torch.tensor(list(taken.values()))
        row_M, token_M = mask_BT[rows].nonzero(as_tuple=True)
        # Token t is predicted from the state one position before it.
        index_M = rows[row_M] * hidden_BTD.shape[1] + token_M - 1
        # Selected on the actor's device, so that only the wanted states move to the host, in one
        # copy.
        index_M = index_M[torch.cat([self._wanted[s] for s in taken])].to(hidden_BTD.device)
        states_MD = hidden_BTD.detach().flatten(0, 1).index_select(0, index_M)
        on_gpu = states_MD.is_cuda
        if self._hidden_MD is None:
            self._hidden_MD = torch.empty(
                sum(self._counts), hidden_BTD.shape[-1], dtype=hidden_BTD.dtype, pin_memory=on_gpu
            )
        places = self._hidden_MD.split(self._counts)
        counts = [self._counts[s] for s in taken]
        for s, states in zip(taken, states_MD.split(counts), strict=True):
            places[s].copy_(states, non_blocking=on_gpu)
            self._seen[s] = True
        if on_gpu:  # The loop continues while they are copied.
            self._copied = torch.cuda.Event()
            self._copied.record()
        return len(taken)

    @property
    def wanted(self) -> tuple[torch.Tensor, ...]:
        """For each response, which of its rows' states are wanted: bool `[its tokens]`."""
        return self._wanted

    def put(self, sequence: int, states_ND: torch.Tensor) -> None:
        """Take the wanted states of one response, selected by another process.

        Raises:
            DataError: their number is wrong.
        """
        if states_ND.shape[0] != self._counts[sequence]:
            raise DataError(
                "The states of a response do not fit the sample.",
                given=f"{states_ND.shape[0]} states of response {sequence}",
                expected=f"{self._counts[sequence]}",
                do="Draw on all ranks with the sample and the rollouts of the plugin.",
            )
        if self._seen[sequence]:
            return
        if self._hidden_MD is None:
            self._hidden_MD = torch.empty(
                sum(self._counts), states_ND.shape[-1], dtype=states_ND.dtype
            )
        self._hidden_MD.split(self._counts)[sequence].copy_(states_ND)
        self._seen[sequence] = True

    def token_ids(self) -> torch.Tensor:
        """The different tokens of the future batch, int64, ascending; including responses that are
        not scored.
        """
        if not self.kept:
            return torch.zeros(0, dtype=torch.int64)
        stateless = self._packed(torch.zeros(self.kept, 0), None)
        cut = stateless if self.sample is None else cut_to_states(stateless)
        return batch_token_ids(cut.response_ids_M, cut.before_ids_X)

    def batch(self, logprobs: Sequence[torch.Tensor] | None = None) -> RolloutBatch:
        """The packed batch of all responses whose states were taken.

        Args:
            logprobs: behaviour log-probs of all responses, `[its tokens]` each, instead of the
                rollouts' own.

        Raises:
            DataError: there are no states.
        """
        if self._hidden_MD is None:
            raise DataError(
                "No response of the rollout batch has a hidden state.",
                given=(
                    f"{len(self._lengths)} responses, {self.empty_responses} of them empty,"
                    f" {self.seen} scored inside the tap"
                ),
                expected="at least one response with a token, scored inside plugin.actor_forward",
                do=(
                    "Check the rollouts' end tokens, and wrap the actor's log-prob forward in"
                    " plugin.actor_forward."
                ),
            )
        if self._copied is not None:
            self._copied.synchronize()  # Otherwise the last states might still be in transit.
        whole = self._packed(self._hidden_MD, logprobs)
        seen_S = torch.tensor(
            [seen for seen, length in zip(self._seen, self._lengths, strict=True) if length]
        )
        seen = whole if seen_S.all() else whole.select(seen_S.nonzero()[:, 0])
        return replace(seen, weights_M=None) if self.sample is None else cut_to_states(seen)

    def _packed(
        self, hidden_MD: torch.Tensor, logprobs: Sequence[torch.Tensor] | None
    ) -> RolloutBatch:
        """The batch of all responses that have a token, with these states."""
        responses = self._rollouts.responses
        if self._ids_M is None:
            ids = [t for r in responses for t in r.token_ids]
            self._ids_M = torch.tensor(ids, dtype=torch.int64)
        logprobs_M = (
            torch.tensor([p for r in responses for p in r.logprobs], dtype=torch.float32)
            if logprobs is None
            else torch.cat([values.detach().float().cpu() for values in logprobs])
        )
        lengths_S, prompts_S = filled_responses(responses)
        sampling = self._rollouts.sampling
        before_ids_X, before_S = self._before(prompts_S)
        # States scored by other processes are not here, sampled or not.
        weights_M = self._weights_M
        if len(self._own) < len(self._lengths):
            own_S = torch.tensor([s in self._own for s in range(len(self._lengths))])
            own_M = own_S.repeat_interleave(torch.tensor(self._lengths))
            weights_M = torch.where(own_M, torch.ones(()) if weights_M is None else weights_M, -1.0)
        return RolloutBatch(
            hidden_MD,
            self._ids_M,
            logprobs_M,
            lengths_S,
            self._rollouts.policy_version,
            sampling.temperature,
            prompts_S,
            sampling.top_k,
            sampling.top_p,
            weights_M,
            self._held_S,
            before_ids_X=before_ids_X,
            before_S=before_S,
        )

    def _before(self, prompts_S: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The text before each response, as in `RolloutBatch`. A loop may number its prompts
        without handing them in; the text is then unknown.
        """
        prompts = self._rollouts.prompts
        if not prompts or int(prompts_S.max()) >= len(prompts):
            return None, None
        searched = [torch.tensor(copyable(prompt), dtype=torch.int32) for prompt in prompts]
        before = [searched[index] for index in prompts_S.tolist()]
        return torch.cat(before), torch.tensor([len(ids) for ids in before], dtype=torch.int64)

    def _check(
        self, hidden_BTD: torch.Tensor, mask_BT: torch.Tensor, order: list[int | None]
    ) -> None:
        rows, tokens = mask_BT.shape if mask_BT.dim() == 2 else (-1, -1)
        if (
            hidden_BTD.shape[0] != rows
            or len(order) != rows
            or hidden_BTD.shape[1] not in (tokens, tokens - 1)
        ):
            raise DataError(
                "The tapped forward pass and its response mask do not fit together.",
                given=(
                    f"hidden {tuple(hidden_BTD.shape)}, mask {tuple(mask_BT.shape)}, {len(order)}"
                    " sequences"
                ),
                expected="hidden [B, T or T - 1, D], mask [B, T], B sequences",
                do="Pass the mask of exactly the tokens that go through the actor.",
            )
        outside = [s for s in order if s is not None and not 0 <= s < len(self._lengths)]
        if outside:
            raise DataError(
                "A row names a response that does not exist.",
                given=outside[:4],
                expected=f"0 to {len(self._lengths) - 1}",
                do="Pass indices into rollouts.responses.",
            )
        counts = mask_BT.sum(1).tolist()
        spans = (mask_BT[:, 1:] & ~mask_BT[:, :-1]).sum(1).tolist()
        for row, s in enumerate(order):
            if s is not None and (
                counts[row] != self._lengths[s] or spans[row] > 1 or bool(mask_BT[row, 0])
            ):
                raise DataError(
                    "The response mask of a row does not cover its response.",
                    given=(
                        f"row {row} (response {s}): {counts[row]} tokens in"
                        f" {spans[row] + int(mask_BT[row, 0])} stretches"
                    ),
                    expected=(
                        f"{self._lengths[s]} tokens in one stretch that follows at least one prompt"
                        " token"
                    ),
                    do=(
                        "Mark every sampled token of the response, the end token included, and"
                        " nothing else."
                    ),
                )
