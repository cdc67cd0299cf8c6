"""Training batches of the last policy versions, which join later trainings with a share that falls with their age."""

from __future__ import annotations

from collections import deque

import torch

from medusa_ppo.types import RolloutBatch

FIELDS = ("hidden_MD", "response_ids_M", "logprobs_M", "lengths_S")


class ReplayBuffer:
    """Keeps batches of the last `versions` policy versions, within a byte budget; the oldest go first.

    Each batch carries the version of the policy that its hidden states are of. A batch that is `a` versions old joins with the share
    `decay ** a` of its positions.
    """

    def __init__(self, versions: int, decay: float, max_bytes: int) -> None:
        """
        Args:
            versions: policy versions that a batch stays for; 0: nothing is kept.
            decay: share of the positions that is left with each version, 0..1.
            max_bytes: most bytes of all batches kept.
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
            state |= {f"{index:04d}.{name}": getattr(batch, name) for name in FIELDS}
            meta = (batch.policy_version, batch.temperature, batch.top_k, batch.top_p)
            state[f"{index:04d}.meta"] = torch.tensor(meta, dtype=torch.float64)
            if batch.weights_M is not None:
                state[f"{index:04d}.weights_M"] = batch.weights_M
        return state

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Take over the batches of a state (an empty one: none)."""
        self._batches = deque()
        for index in sorted({name.split(".")[0] for name in state}):
            version, temperature, top_k, top_p = state[f"{index}.meta"].tolist()
            hidden_MD, ids_M, logprobs_M, lengths_S = (state[f"{index}.{name}"] for name in FIELDS)
            sampled = (int(top_k), top_p, state.get(f"{index}.weights_M"))
            self._batches.append(RolloutBatch(hidden_MD, ids_M, logprobs_M, lengths_S, int(version), temperature, None, *sampled))
