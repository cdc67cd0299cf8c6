"""Which positions heads train on, within a batch and among batches of the last policy versions."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import Any

import torch

from heads.copying import Text, Texts
from heads.errors import DataError
from heads.heads_config import COPY_WINDOW
from heads.modules import Context
from heads.targets import (
    MISSING,
    condition_ids,
    context_rows,
    head_logprobs,
    head_targets,
    head_teacher_rows,
    segments_from_lengths,
    used_rows,
)
from medusa_ppo.companion.holdout import cut_to_states, held_stretches, prompt_groups
from medusa_ppo.config.companion_section import REPLAY_DECAY
from medusa_ppo.contract.rollout_batch import RolloutBatch

BLOCK = 256
"""Rows sampled together; the last few of a block only supply targets to the others."""
LEAST_BLOCKS = 8  # Blocks in a sample; a small sample has shorter blocks instead.
ROW_BYTES = 24
"""Bytes of a row besides its state: its token, log-prob and weight, and what the queue adds."""
HELD_SHARE = 1 / 16
"""Share of a sample's rows for judging heads."""


@dataclass(frozen=True)
class TrainingRows:
    """A batch with everything that its rows need for any loss, looked up once.

    Attributes:
        batch: the batch.
        state_rows_M: row of its `hidden_MD` that holds each row's state.
        targets_MK, mask_MK: what head 1..K predicts at each row, and where there is something to
            train on: bool, or float weights.
        condition_MK: tokens since h_t (conditioned kinds), else None.
        logprobs_MK: behaviour log-probs of the targets.
        teacher_rows_MK: row whose state gives the actor's own distribution of the target.
        usable_N: rows with at least one target that counts.
        context_Mn: rows of the pairs that each row attends to (heads with a context), else None. A
            row without a state is missing.
        texts: what the rows search (heads that copy), else None.
    """

    batch: RolloutBatch
    state_rows_M: torch.Tensor
    targets_MK: torch.Tensor
    mask_MK: torch.Tensor
    condition_MK: torch.Tensor | None
    logprobs_MK: torch.Tensor
    teacher_rows_MK: torch.Tensor
    usable_N: torch.Tensor
    context_Mn: torch.Tensor | None = None
    texts: Texts | None = None

    def drafted_from(self, place_V: torch.Tensor, keep: bool) -> TrainingRows:
        """The same for heads that draft from only some tokens.

        Args:
            place_V: each token's place among these, -1 for the others.
            keep: positions with any other token count too, because the actor's own distribution is
                informative there.
        """
        places_MK = place_V[self.targets_MK]
        mask_MK = self.mask_MK if keep else self.mask_MK * (places_MK >= 0)
        usable_N = self.usable_N if keep else (mask_MK > 0).any(1).nonzero().squeeze(1)
        return replace(self, targets_MK=places_MK.clamp(min=0), mask_MK=mask_MK, usable_N=usable_N)

    def by_table_rows(self) -> TrainingRows:
        """The same with each token replaced by its row in the batch's own tables, if these hold
        only some tokens; targets don't change.
        """
        ids_R = self.batch.table_ids_R
        if ids_R is None:
            return self

        def row(ids: torch.Tensor) -> torch.Tensor:
            return torch.where(ids < 0, ids, torch.searchsorted(ids_R, ids))

        texts = self.texts
        return replace(
            self,
            batch=replace(self.batch, response_ids_M=row(self.batch.response_ids_M)),
            condition_MK=None if self.condition_MK is None else row(self.condition_MK),
            texts=None if texts is None else texts._replace(ids_X=row(texts.ids_X)),
        )

    def states(self, rows_N: torch.Tensor) -> torch.Tensor:
        """Hidden states of some rows, `ND`."""
        return self.batch.hidden_MD[self.state_rows_M[rows_N]]

    def context(self, rows_N: torch.Tensor, seen_N: torch.Tensor, device: torch.device) -> Context:
        """What some rows attend to, each limited to a number of pairs."""
        assert self.context_Mn is not None, "looked up for heads with a context"
        rows_Nn = self.context_Mn[rows_N]
        age_n = torch.arange(rows_Nn.shape[1] - 1, -1, -1)
        used_P, places_Nn = used_rows(torch.where(age_n < seen_N.unsqueeze(1), rows_Nn, MISSING))
        hidden_PD = self.states(used_P).to(device).float()
        return Context(
            hidden_PD, self.batch.response_ids_M[used_P].to(device), places_Nn.to(device)
        )

    def text(self, rows_N: torch.Tensor, device: torch.device) -> Text | None:
        """What some rows search; None if the heads don't copy."""
        return None if self.texts is None else self.texts.of_rows(rows_N).to(device)

    def check_neighbours(self, loss: str) -> None:
        """Raise DataError if a training row lacks the states that give the actor's own
        distributions.
        """
        if bool((self.state_rows_M[self.teacher_rows_MK[self.mask_MK > 0]] < 0).any()):
            raise DataError(
                "This loss needs the actor's own distribution, and thus the states of the "
                "following rows.",
                given=(
                    f"companion.loss={loss}, {self.batch.hidden_MD.shape[0]} states of"
                    f" {self.state_rows_M.numel()} positions"
                ),
                expected="all states, or blocks of them with enough rows at their ends",
                do="Sample positions with EarlySample, or use another loss.",
            )


def context_of(batch: RolloutBatch, pairs: int) -> torch.Tensor | None:
    """`heads.targets.context_rows` of a batch, without the rows that have no state; None for 0
    pairs.
    """
    if not pairs:
        return None
    rows_Mn = context_rows(segments_from_lengths(batch.lengths_S), pairs)
    return torch.where(batch.state_rows_M[rows_Mn.clamp_min(0)] >= 0, rows_Mn, MISSING)


def texts_of(batch: RolloutBatch) -> Texts:
    """What each row of a batch may search: only what the engine knew when it drafted there."""
    before_ids = batch.before_ids_X
    before_S = batch.before_S
    if before_ids is None or before_S is None:
        before_ids = torch.empty(0, dtype=torch.int64)
        before_S = torch.zeros_like(batch.lengths_S)
    return Texts.of(before_ids, before_S, batch.response_ids_M, batch.lengths_S, COPY_WINDOW)


def in_blocks(count: int, block: int, generator: torch.Generator) -> torch.Tensor:
    """The numbers below `count` in blocks of neighbours; the blocks are in random order."""
    blocks = torch.randperm(-(-count // block), generator=generator)
    order_N = (blocks.unsqueeze(1) * block + torch.arange(block)).flatten()
    return order_N[order_N < count]


def look_up(
    batch: RolloutBatch, num_heads: int, conditioned: bool, pairs: int = 0, copies: bool = False
) -> TrainingRows:
    """Targets, conditions, contexts of this many pairs, texts to copy from, and log-probs of every
    row of a batch; rows without a weight have no target.
    """
    segment_M = segments_from_lengths(batch.lengths_S)
    targets_MK, mask_MK = head_targets(batch.response_ids_M, segment_M, num_heads)
    if batch.weights_M is not None:
        kept_M1 = (batch.weights_M > 0).unsqueeze(1)
        weights_M1 = batch.weights_M.unsqueeze(1)
        mask_MK = (
            mask_MK & kept_M1 if bool((weights_M1[kept_M1] == 1).all()) else mask_MK * weights_M1
        )
    return TrainingRows(
        batch,
        batch.state_rows_M,
        targets_MK,
        mask_MK,
        condition_ids(batch.response_ids_M, segment_M, num_heads) if conditioned else None,
        head_logprobs(batch.logprobs_M, segment_M, num_heads),
        head_teacher_rows(segment_M, num_heads),
        (mask_MK > 0).any(1).nonzero().squeeze(1),
        context_of(batch, pairs),
        texts_of(batch) if copies else None,
    )


def sampled_share(batch: RolloutBatch) -> float:
    """Share of the positions with a target that are trained on; 1 where there is none."""
    # At the last row of each response even the first head has nothing to predict.
    usable_M = torch.ones(int(batch.lengths_S.sum()), dtype=torch.bool)
    usable_M[batch.lengths_S.cumsum(0) - 1] = False
    if batch.weights_M is None or not usable_M.any():
        return 1.0
    all_of_it = int(usable_M.sum()) + batch.left_out
    return float((usable_M & (batch.weights_M > 0)).sum() / all_of_it)


def block_rows(rows: int, ahead: int) -> int:
    """Rows per block in a sample of this size."""
    return max(ahead + 1, min(BLOCK, rows // LEAST_BLOCKS))


@dataclass(frozen=True)
class Places:
    """Which of a batch's responses some are.

    Attributes:
        places_S: index of each among all of the batch's responses.
        responses: number of the batch's responses.
        prompts: number of the batch's prompts; `prompts_S` are below it.
    """

    places_S: torch.Tensor
    responses: int
    prompts: int


@dataclass(frozen=True)
class EarlySample:
    """Samples positions where their states are, before anything is padded, gathered or moved: in
    blocks of BLOCK rows of one response. The same lengths give the same sample everywhere.

    Each block has a random number, and those with the smallest are kept. What a response draws does
    not depend on the others' lengths, so that `candidates` can say of a part of the batch what may
    be in the sample, before the rest is written.

    The heads at a row learn from the actor's own distribution up to `ahead` rows further on, so the
    rows at a block's end only serve the others and are not trained on. Rows at its beginning attend
    to whichever earlier pairs exist, as in an engine after a swap.

    Attributes:
        rows: maximum number of rows whose states are kept; with `luck` the number on average.
        holdout_fraction: share of the prompts that have a stretch of one answer held out; these
            stretches are HELD_SHARE of the rows. 0: `companion.holdout` chooses among the blocks
            once all are there.
        seed: seed of all draws.
        ahead: number of following rows that heads learn from.
        block: rows of a block; None: BLOCK, or less if few would fit.
        luck: for one of several parts of a batch, whose share may be less than a block: a number
            drawn uniformly from 0..1, with which a part of a block counts as a whole one or as
            none. Each row is then equally likely, whatever the sizes of the blocks. It needs a
            `holdout_fraction` of 0. None: blocks are kept while `rows` has room for them.
        most: only blocks with a smaller random number, which is uniform in 0..1, may be kept.
    """

    rows: float
    holdout_fraction: float
    seed: int
    ahead: int
    block: int | None = None
    luck: float | None = None
    most: float = 1.0

    def draw(
        self,
        lengths_S: torch.Tensor,
        prompts_S: torch.Tensor | None,
        places: Places | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weights of all rows, float32 `M`, as in `RolloutBatch`; and which responses heads are
        judged on, bool `S`. No response may be empty.

        Args:
            places: where responses stand in a batch that has empty ones, too; None: they are all.
        """
        blocks = self._blocks(lengths_S, prompts_S, places)
        rows_B = torch.bincount(blocks.block_M)
        order_B = blocks.number_B.argsort()
        order_B = order_B[blocks.allowed_B[order_B]]
        kept_B = torch.zeros(rows_B.numel(), dtype=torch.bool)
        if self.luck is not None:
            share = rows_B.numel() * self.rows / blocks.block_M.numel()
            kept_B[order_B[: int(share + self.luck)]] = True
        else:
            fits_B = rows_B[order_B].cumsum(0) <= self.rows - int(blocks.judged_M.sum())
            kept_B[order_B[fits_B]] = True
            if self.rows:
                kept_B[order_B[:1]] = True  # There is always at least one.
        kept_M = kept_B[blocks.block_M]
        # A row whose neighbours were not kept only serves others and isn't trained on.
        row_M = torch.arange(kept_M.numel())
        whole_M = kept_M & kept_M[row_M + blocks.left_M.clamp(max=self.ahead)]
        weights_M = whole_M.float() - (~kept_M).float()
        weights_M[blocks.judged_M] = 1.0
        if not self.holdout_fraction:
            return weights_M, None
        judged = segments_from_lengths(lengths_S)[blocks.judged_M]
        return weights_M, torch.zeros_like(lengths_S, dtype=torch.bool).index_fill_(0, judged, True)

    def candidates(
        self, lengths_S: torch.Tensor, prompts_S: torch.Tensor, places: Places
    ) -> torch.Tensor:
        """Which rows of some of a batch's responses may be in the sample of all, bool `M`. All
        answers to their prompts must be among them, and none may be empty.
        """
        blocks = self._blocks(lengths_S, prompts_S, places)
        return blocks.allowed_B[blocks.block_M] | blocks.judged_M

    def _blocks(
        self, lengths_S: torch.Tensor, prompts_S: torch.Tensor | None, places: Places | None
    ) -> _Blocks:
        if places is None:
            groups, group_S = prompt_groups(prompts_S, lengths_S.numel())
            places = Places(torch.arange(lengths_S.numel()), lengths_S.numel(), groups)
        else:
            assert prompts_S is not None, "places are given with prompts"
            group_S = prompts_S
        generator = torch.Generator().manual_seed(self.seed)
        judged_M, spared_S = held_stretches(
            lengths_S,
            group_S,
            places.prompts,
            self.holdout_fraction,
            int(HELD_SHARE * self.rows),
            generator,
        )
        segment_M = segments_from_lengths(lengths_S)
        place_M = torch.arange(segment_M.numel()) - (lengths_S.cumsum(0) - lengths_S)[segment_M]
        block = self.block or block_rows(int(self.rows), self.ahead)
        # Blocks begin at a different place in each response, so that every row is equally often at
        # an edge, where it isn't trained on.
        phases = torch.randint(block, (places.responses,), generator=generator)
        phase_S = phases[places.places_S]
        blocks_S = (lengths_S + phase_S - 1) // block + 1
        first_S = blocks_S.cumsum(0) - blocks_S
        of_B = segments_from_lengths(blocks_S)
        # The first blocks of all the batch's responses, then the second ones: numbers that do not
        # depend on how long any of them is.
        numbers_NS = torch.stack(
            [
                torch.rand(places.responses, generator=generator, dtype=torch.float64)
                for _ in range(int(blocks_S.max()))
            ]
        )
        number_B = numbers_NS[torch.arange(of_B.numel()) - first_S[of_B], places.places_S[of_B]]
        return _Blocks(
            judged_M=judged_M,
            block_M=(place_M + phase_S[segment_M]) // block + first_S[segment_M],
            left_M=lengths_S[segment_M] - 1 - place_M,
            number_B=number_B,
            allowed_B=(number_B < self.most) & ~spared_S[of_B],
        )

    def unless_all_fit(self, rows: int) -> EarlySample | None:
        """The sample of a batch with this many rows; None: it is all of them."""
        return None if rows <= self.rows and self.most >= 1.0 else self

    def of(self, batch: RolloutBatch) -> RolloutBatch:
        """The same for a batch with all its states."""
        own = replace(self, seed=batch_seed(self.seed, batch.policy_version))
        weights_M, held_S = own.draw(batch.lengths_S, batch.prompts_S)
        return cut_to_states(
            replace(
                batch, hidden_MD=batch.hidden_MD[weights_M >= 0], weights_M=weights_M, held_S=held_S
            )
        )


def batch_seed(seed: int, number: int) -> int:
    """A seed for one of many batches."""
    return seed * 1_000_003 + number


@dataclass(frozen=True)
class _Blocks:
    """The blocks of some responses.

    Attributes:
        judged_M: rows that heads are judged on.
        block_M: each row's block.
        left_M: rows that follow in its response.
        number_B: each block's random number.
        allowed_B: blocks that may be kept.
    """

    judged_M: torch.Tensor
    block_M: torch.Tensor
    left_M: torch.Tensor
    number_B: torch.Tensor
    allowed_B: torch.Tensor


FIELDS = (
    "hidden_MD",
    "response_ids_M",
    "logprobs_M",
    "lengths_S",
    "weights_M",
    "before_ids_X",
    "before_S",
    "lm_head_VD",
    "embedding_VD",
    "table_ids_R",
)


def with_tables(
    batch: RolloutBatch,
    lm_head_VD: torch.Tensor,
    embedding_VD: torch.Tensor | None,
    ids_W: torch.Tensor | None,
) -> RolloutBatch:
    """A batch for later, with the tables of the actor that wrote it, in the dtype of its states and
    on the host. With a draft vocabulary, only the rows of its tokens and of the batch's own are
    ever read.
    """
    ids_R = None
    if ids_W is not None:
        parts = [ids_W.cpu(), batch.response_ids_M]
        if batch.before_ids_X is not None:
            before_X = batch.before_ids_X.to(torch.int64)
            parts.append(before_X[before_X >= 0])  # Gaps are not tokens.
        ids_R = torch.cat(parts).unique()

    def rows(table_VD: torch.Tensor) -> torch.Tensor:
        # A copy in any case: rows of later batches are written into the table itself.
        if ids_R is None:
            return table_VD.detach().to("cpu", batch.hidden_MD.dtype, copy=True)
        return table_VD.detach()[ids_R.to(table_VD.device)].to("cpu", batch.hidden_MD.dtype)

    return replace(
        batch,
        lm_head_VD=rows(lm_head_VD),
        embedding_VD=None if embedding_VD is None else rows(embedding_VD),
        table_ids_R=ids_R,
    )


class ReplayBuffer:
    """Keeps batches of the last `versions` policy versions, within a byte budget; the oldest go
    first.

    Each batch carries the version of the policy that its hidden states are of, and that policy's
    tables (`with_tables`). A batch that is `a` versions old joins with the share `decay ** a` of
    its positions.
    """

    def __init__(self, versions: int, max_bytes: int, decay: float = REPLAY_DECAY) -> None:
        """
        Args:
            versions: policy versions that a batch stays for; 0: nothing is kept.
            max_bytes: limit on the bytes of all kept batches together.
            decay: share of the positions that remains with each version, 0..1.
        """
        self._versions = versions
        self._decay = decay
        self._max_bytes = max_bytes
        self._batches: deque[RolloutBatch] = deque()

    def add(self, batch: RolloutBatch) -> str:
        """Keep a batch after training on it. Never keep held-out data.

        Returns:
            Why it can't be kept; empty if it was kept, or keeping is off.
        """
        if self._versions == 0:
            return ""
        if batch.nbytes > self._max_bytes:
            return (
                f"A batch of {batch.nbytes:,} bytes, the actor's tables included, is not kept for "
                f"replay: the limit for all of them is {self._max_bytes:,}. Raise "
                "companion.queue_bytes, or set engine.draft_vocab or companion.replay_versions=0."
            )
        self._batches.append(batch)
        while self.nbytes > self._max_bytes:
            self._batches.popleft()
        return ""

    @property
    def wanted(self) -> bool:
        """Whether anything is kept."""
        return self._versions > 0

    def older(self, policy_version: int) -> list[tuple[RolloutBatch, float]]:
        """Batches and shares that join training on rollouts of `policy_version`; batches that are
        too old are dropped.

        So are those of higher versions. They are of a loop that ended while its companion went on,
        or of steps that it repeats: the present loop's versions never reach them in time to let
        them age, so they would join every batch with all of their positions.
        """
        self._batches = deque(
            b for b in self._batches if 0 <= policy_version - b.policy_version <= self._versions
        )
        return [
            (batch, self._decay ** (policy_version - batch.policy_version))
            for batch in self._batches
        ]

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def nbytes(self) -> int:
        """Bytes kept now."""
        return sum(batch.nbytes for batch in self._batches)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """All batches kept, flat, tensors only."""
        state: dict[str, torch.Tensor] = {}
        for index, batch in enumerate(self._batches):
            meta = (batch.policy_version, batch.temperature, batch.top_k, batch.top_p)
            state[f"{index:04d}.meta"] = torch.tensor(meta, dtype=torch.float64)
            state |= {
                f"{index:04d}.{name}": value
                for name in FIELDS
                if (value := getattr(batch, name)) is not None
            }
        return state

    def load_state_dict(self, state: dict[str, torch.Tensor], whole_tables: bool = False) -> None:
        """Restore the batches of a state (an empty one: none).

        Args:
            whole_tables: without those that have only some rows of the actor's tables.
        """
        self._batches = deque()
        for index in sorted({name.split(".")[0] for name in state}):
            version, temperature, top_k, top_p = state[f"{index}.meta"].tolist()
            # Copies, because products round differently for unaligned tensors, as they are in a
            # file.
            found = {name: state.get(f"{index}.{name}") for name in FIELDS}
            if whole_tables and found["table_ids_R"] is not None:
                continue
            tensors: dict[str, Any] = {
                name: None if value is None else value.clone() for name, value in found.items()
            }
            how = {
                "policy_version": int(version),
                "temperature": temperature,
                "top_k": int(top_k),
                "top_p": top_p,
            }
            self._batches.append(RolloutBatch(**tensors, **how))
