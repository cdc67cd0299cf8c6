"""Which positions heads are trained on: of a batch, and of the batches of the last policy versions."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

from heads.targets import condition_ids, head_logprobs, head_targets, head_teacher_rows, segments_from_lengths
from medusa_ppo.types import RolloutBatch, held_out


@dataclass(frozen=True)
class TrainingRows:
    """A batch with everything that its rows need for any loss, looked up once.

    Attributes:
        batch: it.
        state_rows_M: row of its `hidden_MD` that holds each row's state.
        targets_MK, mask_MK: what head 1..K predicts at each row, and where there is something to train on: bool, or float weights.
        condition_MK: tokens since h_t (conditioned kinds), else None.
        logprobs_MK: behaviour log-probs of the targets.
        teacher_rows_MK: row whose state gives the actor's own distribution of the target.
        usable_N: rows with at least one target that counts; of a part: of the whole batch, -1 for rows that it does not have.
    """

    batch: RolloutBatch
    state_rows_M: torch.Tensor
    targets_MK: torch.Tensor
    mask_MK: torch.Tensor
    condition_MK: torch.Tensor | None
    logprobs_MK: torch.Tensor
    teacher_rows_MK: torch.Tensor
    usable_N: torch.Tensor

    def states(self, rows_N: torch.Tensor) -> torch.Tensor:
        """Hidden states of some rows, `ND`."""
        return self.batch.hidden_MD[self.state_rows_M[rows_N]]


def look_up(batch: RolloutBatch, num_heads: int, conditioned: bool) -> TrainingRows:
    """Targets, conditions and log-probs of every row of a batch; rows without a weight have no target."""
    segment_M = segments_from_lengths(batch.lengths_S)
    targets_MK, mask_MK = head_targets(batch.response_ids_M, segment_M, num_heads)
    if batch.weights_M is not None:
        kept_M1, weights_M1 = (batch.weights_M > 0).unsqueeze(1), batch.weights_M.unsqueeze(1)
        mask_MK = mask_MK & kept_M1 if bool((weights_M1[kept_M1] == 1).all()) else mask_MK * weights_M1
    return TrainingRows(
        batch,
        batch.state_rows_M,
        targets_MK,
        mask_MK,
        condition_ids(batch.response_ids_M, segment_M, num_heads) if conditioned else None,
        head_logprobs(batch.logprobs_M, segment_M, num_heads),
        head_teacher_rows(segment_M, num_heads),
        _among_all((mask_MK > 0).any(1).nonzero().squeeze(1), batch),
    )


def _among_all(usable_N: torch.Tensor, batch: RolloutBatch) -> torch.Tensor:
    """The usable rows of a part at their places among those of the whole batch; -1 at the others' places."""
    if batch.whole is None:
        return usable_N
    usable_S = batch.whole.lengths_S - 1  # All but a response's last row.
    all_N, first = torch.full((int(usable_S.sum()),), -1), int(usable_S[: batch.whole.first].sum())
    all_N[first : first + usable_N.numel()] = usable_N
    return all_N


def fraction_weights(lengths_S: torch.Tensor, share: float, seed: int) -> torch.Tensor:
    """A weight of 1 at a random share of the positions with a target, 0 at all others: float32 `M`."""
    usable_N = _with_target(lengths_S).nonzero().squeeze(1)
    order_N = torch.randperm(usable_N.numel(), generator=torch.Generator().manual_seed(seed))
    chosen_N = usable_N[order_N[: round(share * usable_N.numel())]]
    return torch.zeros(int(lengths_S.sum())).index_fill_(0, chosen_N, 1.0)


def sampled_share(batch: RolloutBatch) -> float:
    """Share of the positions with a target that are trained on; 1 where there is none."""
    usable_M = _with_target(batch.lengths_S)
    if batch.weights_M is None or not usable_M.any():
        return 1.0
    return float((usable_M & (batch.weights_M > 0)).sum() / usable_M.sum())


def _with_target(lengths_S: torch.Tensor) -> torch.Tensor:
    """Rows at which the first head has something to predict: all but the last of each response. Bool `M`."""
    with_target_M = torch.ones(int(lengths_S.sum()), dtype=torch.bool)
    with_target_M[lengths_S.cumsum(0) - 1] = False
    return with_target_M


@dataclass(frozen=True)
class EarlySample:
    """How positions are sampled before their states are copied out of the actor's memory.

    Attributes:
        share: of the positions with a target.
        holdout_fraction: share of the prompts whose answers keep all of their states: heads are judged on them.
        seed: of both draws.
    """

    share: float
    holdout_fraction: float
    seed: int

    def draw(self, lengths_S: torch.Tensor, prompts_S: torch.Tensor, policy_version: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights of all rows, float32 `M`, and which responses heads are judged on, bool `S`. No response is empty."""
        seed = self.seed * 1_000_003 + policy_version
        held_S = held_out(prompts_S, self.holdout_fraction, seed)
        weights_M = fraction_weights(lengths_S, self.share, seed)
        return weights_M.masked_fill_(held_S[segments_from_lengths(lengths_S)], 1.0), held_S


FIELDS = ("hidden_MD", "response_ids_M", "logprobs_M", "lengths_S", "weights_M")


REPLAY_DECAY = 0.5


class ReplayBuffer:
    """Keeps batches of the last `versions` policy versions, within a byte budget; the oldest go first.

    Each batch carries the version of the policy that its hidden states are of. A batch that is `a` versions old joins with the share
    `decay ** a` of its positions.
    """

    def __init__(self, versions: int, max_bytes: int, decay: float = REPLAY_DECAY) -> None:
        """
        Args:
            versions: policy versions that a batch stays for; 0: nothing is kept.
            max_bytes: most bytes of all batches kept.
            decay: share of the positions that is left with each version, 0..1.
        """
        self._versions = versions
        self._decay = decay
        self._max_bytes = max_bytes
        self._batches: deque[RolloutBatch] = deque()

    def add(self, batch: RolloutBatch) -> None:
        """Keep a batch, after it was trained on. Never keep what heads are judged on."""
        if self._versions == 0 or batch.nbytes > self._max_bytes:
            return
        self._batches.append(batch)
        while self.nbytes > self._max_bytes:
            self._batches.popleft()

    def older(self, policy_version: int) -> list[tuple[RolloutBatch, float]]:
        """Batches and shares that join a training on rollouts of `policy_version`; what is too old for it is forgotten."""
        self._batches = deque(b for b in self._batches if policy_version - b.policy_version <= self._versions)
        return [(batch, self._decay ** max(0, policy_version - batch.policy_version)) for batch in self._batches]

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
            state |= {f"{index:04d}.{name}": value for name in FIELDS if (value := getattr(batch, name)) is not None}
        return state

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Take over the batches of a state (an empty one: none)."""
        self._batches = deque()
        for index in sorted({name.split(".")[0] for name in state}):
            version, temperature, top_k, top_p = state[f"{index}.meta"].tolist()
            tensors: dict[str, Any] = {name: state.get(f"{index}.{name}") for name in FIELDS}
            how = {"policy_version": int(version), "temperature": temperature, "top_k": int(top_k), "top_p": top_p}
            self._batches.append(RolloutBatch(**tensors, **how))
