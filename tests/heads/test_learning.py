"""The heads must learn something, and the same seed must give the same numbers (CPU, seconds)."""

from __future__ import annotations

import pytest
import torch

from heads.acceptance import (
    ReplayResult,
    draft_ids_for_rows,
    draft_logprobs_for_rows,
    replay_estimate,
    replay_sampled,
)
from heads.heads_config import HeadsConfig
from heads.losses import LossConfig, Teacher, head_loss
from heads.modules import MedusaHeads
from heads.targets import (
    condition_ids,
    head_logprobs,
    head_targets,
    head_teacher_rows,
    segments_from_lengths,
)

D, V, K, ROWS = 32, 24, 3, 3000


def orthonormal_rows() -> torch.Tensor:
    """A Hadamard matrix of D rows, scaled: lm_head @ (log p @ lm_head) = log p, without a solver
    that rounds differently each time.
    """
    rows_DD = torch.ones(1, 1)
    while rows_DD.shape[0] < D:
        rows_DD = torch.cat([torch.cat([rows_DD, rows_DD], 1), torch.cat([rows_DD, -rows_DD], 1)])
    return rows_DD / D**0.5


class ChainActor:
    """A Markov chain over tokens: the hidden state holds the last token, lm_head reads log p of the
    next one from it exactly.

    Half of the states continue in one way only, the other half in two equal ones. So h_t alone
    can't tell which branch was taken, and heads that are told the sampled token must beat those
    that are not.
    """

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.lm_head_VD = orthonormal_rows()[:V]
        self.embedding_VD = torch.randn(V, D, generator=generator)
        next_V2 = torch.randint(V, (V, 2), generator=generator)
        next_V2[::2, 1] = next_V2[::2, 0]
        self.p_VV = torch.zeros(V, V).scatter_add_(1, next_V2, torch.full((V, 2), 0.5))
        self.p_VV = 0.99 * self.p_VV + 0.01 / V
        self.state_VD = self.p_VV.log() @ self.lm_head_VD

    def rollouts(
        self, seed: int, lengths_S: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """hidden_MD, response_M, logprobs_M."""
        generator = torch.Generator().manual_seed(seed)
        rows = []
        ids = []
        for length in lengths_S.tolist():
            token = int(torch.randint(V, (1,), generator=generator))
            for _ in range(length):
                rows.append(token)
                token = int(torch.multinomial(self.p_VV[token], 1, generator=generator))
                ids.append(token)
        row_M = torch.tensor(rows)
        response_M = torch.tensor(ids)
        return self.state_VD[row_M], response_M, self.p_VV[row_M, response_M].log()


def train(
    kind: str, loss: str, *, seed: int = 0, epochs: int = 12
) -> tuple[MedusaHeads, ChainActor]:
    torch.manual_seed(seed)
    actor = ChainActor()
    lengths_S = torch.full((ROWS // 50,), 50)
    hidden_MD, response_M, logprobs_M = actor.rollouts(1, lengths_S)
    segment_M = segments_from_lengths(lengths_S)
    targets_MK, mask_MK = head_targets(response_M, segment_M, K)
    condition_MK = condition_ids(response_M, segment_M, K)
    logprobs_MK = head_logprobs(logprobs_M, segment_M, K)
    teacher_MK = head_teacher_rows(segment_M, K)
    config = LossConfig.named(loss)
    heads = MedusaHeads(HeadsConfig(D, V, K, kind))
    optimizer = torch.optim.AdamW(heads.parameters(), lr=1e-2, weight_decay=0.0)
    step = 0
    for _ in range(epochs):
        for rows_N in torch.randperm(ROWS).split(250):
            factored = heads.factored(
                hidden_MD[rows_N],
                actor.lm_head_VD,
                condition=condition_MK[rows_N],
                embedding_VD=actor.embedding_VD,
            )
            teacher = Teacher(hidden_MD, teacher_MK[rows_N], actor.lm_head_VD)
            loss_K = head_loss(
                factored,
                targets_MK[rows_N],
                mask_MK[rows_N],
                config.at(step),
                logprobs_NK=logprobs_MK[rows_N],
                teacher=teacher,
            )
            optimizer.zero_grad()
            loss_K.sum().backward()
            optimizer.step()
            step += 1
    return heads, actor


def judge(heads: MedusaHeads, actor: ChainActor) -> tuple[ReplayResult, ReplayResult]:
    """Replay on rollouts that were not trained on: one-hot and sampled drafts."""
    lengths_S = torch.full((40,), 50)
    hidden_MD, response_M, logprobs_M = actor.rollouts(2, lengths_S)
    segment_M = segments_from_lengths(lengths_S)
    tables = {
        "condition_MK": condition_ids(response_M, segment_M, K),
        "embedding_VD": actor.embedding_VD,
    }
    targets_MK, _ = head_targets(response_M, segment_M, K)
    one_hot = replay_estimate(
        draft_ids_for_rows(heads, hidden_MD, actor.lm_head_VD, **tables), response_M, lengths_S
    )
    logq_MK = draft_logprobs_for_rows(heads, hidden_MD, targets_MK, actor.lm_head_VD, **tables)[0]
    return one_hot, replay_sampled(logq_MK, logprobs_M, lengths_S)


@pytest.fixture(scope="module")
def untrained() -> float:
    torch.manual_seed(0)
    return judge(MedusaHeads(HeadsConfig(D, V, K)), ChainActor())[0].mean_acceptance_length


@pytest.mark.parametrize("loss", ["ce", "tv", "ce_tv", "kl"])
@pytest.mark.parametrize(
    ("kind", "one_hot_floor", "sampled_floor"),
    [("medusa", 1.6, 2.0), ("hydra", 2.6, 3.3)],
)
def test_acceptance_rises(
    untrained: float, kind: str, loss: str, one_hot_floor: float, sampled_floor: float
) -> None:
    one_hot, sampled = judge(*train(kind, loss))
    assert untrained < 1.4
    assert one_hot.mean_acceptance_length > one_hot_floor
    assert sampled.mean_acceptance_length > sampled_floor


def test_same_seed_same_numbers() -> None:
    one, _ = train("hydra", "ce_tv", epochs=2)
    two, _ = train("hydra", "ce_tv", epochs=2)
    other, _ = train("hydra", "ce_tv", seed=1, epochs=2)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert not all(
        torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True)
    )
