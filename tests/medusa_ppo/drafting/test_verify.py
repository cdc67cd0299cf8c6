"""Verification in plain torch: the joint distribution of the emitted tokens must be the target's,
whatever was drafted (docs/theory.md, lemma 1 and theorem 2).
"""

from __future__ import annotations

import itertools

import pytest
import torch
from scipy.stats import chisquare

from medusa_ppo.drafting import verify

V, K = 4, 2
TRIALS = 120_000


def target_tables(seed: int = 0) -> list[torch.Tensor]:
    """p(x1), p(x2 | x1), p(x3 | x1 x2) of a small random process, as tables [V], [V, V], [V, V,
    V].
    """
    torch.manual_seed(seed)
    return [
        torch.softmax(1.5 * torch.randn([V] * (n + 1), dtype=torch.float64), -1)
        for n in range(K + 1)
    ]


def step_logprobs(tables: list[torch.Tensor], drafts_BK: torch.Tensor) -> torch.Tensor:
    """What the target gives at the K + 1 rows of each request that drafted `drafts_BK`: [B * (K +
    1), V] float32.
    """
    batch = drafts_BK.shape[0]
    rows = [
        tables[0].expand(batch, V),
        tables[1][drafts_BK[:, 0]],
        tables[2][drafts_BK[:, 0], drafts_BK[:, 1]],
    ]
    return torch.stack(rows, dim=1).reshape(-1, V).log().float()


def emitted_joint(ids_BW: torch.Tensor, tables: list[torch.Tensor]) -> torch.Tensor:
    """Counts over all (x1, x2, x3): runs that ended early are finished from the target itself."""
    ids = ids_BW.to(torch.int64).clone()
    for position in range(K + 1):
        missing = ids[:, position] < 0
        if missing.any():
            before = ids[missing][:, :position]
            probs = tables[position][tuple(before[:, j] for j in range(position))]
            ids[missing, position] = torch.multinomial(probs, 1)[:, 0]
    flat = ids[:, 0] * V * V + ids[:, 1] * V + ids[:, 2]
    return torch.bincount(flat, minlength=V**3)


def joint_probs(tables: list[torch.Tensor]) -> torch.Tensor:
    return torch.tensor(
        [
            float(tables[0][a] * tables[1][a, b] * tables[2][a, b, c])
            for a, b, c in itertools.product(range(V), repeat=3)
        ],
        dtype=torch.float64,
    )


def p_value(draft_probs: torch.Tensor | None, claimed: torch.Tensor | None, seed: int) -> float:
    """Chi-square p-value of the emitted joint. Drafts come from `draft_probs` [K, V] (or are
    fixed), verification believes `claimed`.
    """
    torch.manual_seed(seed)
    tables = target_tables()
    if draft_probs is None:
        drafts_BK = torch.tensor([1, 2]).expand(TRIALS, K).contiguous()
    else:
        drafts_BK = torch.stack(
            [torch.multinomial(draft_probs[j], TRIALS, replacement=True) for j in range(K)], dim=1
        )
    counts = [K] * TRIALS
    rows = verify.DraftRows.build(drafts_BK.flatten(), counts)
    probs_TV = (
        None
        if claimed is None
        else claimed.float().expand(TRIALS, K, V).reshape(-1, V).contiguous()
    )
    run_B, last_B = verify.verify_rows(
        step_logprobs(tables, drafts_BK), None, rows, counts, probs_TV, verify.Rule()
    )
    observed = emitted_joint(verify.assemble(rows, run_B, last_B), tables)
    expected = joint_probs(tables)
    return float(chisquare(observed.numpy(), (expected / expected.sum() * TRIALS).numpy()).pvalue)


QS = torch.softmax(
    torch.tensor([[0.3, 1.0, -1.0, 0.0], [2.0, -2.0, 0.5, 0.1]], dtype=torch.float64), -1
)


def test_one_hot_drafts_leave_the_joint_distribution_alone() -> None:
    assert p_value(None, None, seed=1) > 0.01


def test_sampled_drafts_leave_the_joint_distribution_alone() -> None:
    assert p_value(QS, QS, seed=2) > 0.01


def test_a_wrong_q_is_caught_by_the_same_statistic() -> None:
    wrong = torch.softmax(QS.log() * 0.5, -1)
    assert p_value(QS, wrong, seed=3) < 1e-6


def test_sampled_drafts_may_be_taken_for_one_hot() -> None:
    # Given the draft, the one-hot rule emits p exactly; only acceptance is lost.
    assert p_value(QS, None, seed=4) > 0.01


def test_ragged_batches_refused_ids_and_zero_drafts() -> None:
    logits = torch.full((3 + 1 + 2, V), -torch.inf)
    for row, token in enumerate([1, 2, 3, 0, 2, 2]):
        logits[row, token] = 0.0
    counts = [2, 0, 1]
    rows = verify.DraftRows.build(torch.tensor([1, 2, -1]), counts)
    assert rows.starts_B.tolist() == [0, 3, 4]
    for rule in (
        verify.Rule(),
        verify.Rule(all_greedy=True),
        verify.Rule(greedy_B=torch.tensor([True, False, True])),
    ):
        run_B, last_B = verify.verify_rows(logits, None, rows, counts, None, rule)
        assert verify.assemble(rows, run_B, last_B).tolist() == [
            [1, 2, 3],
            [0, -1, -1],
            [2, -1, -1],
        ]


def test_no_drafts_at_all_samples_from_the_target() -> None:
    torch.manual_seed(0)
    probs = torch.softmax(torch.randn(V), -1)
    rows = verify.DraftRows.build(torch.empty(0, dtype=torch.int64), [0] * 40_000)
    _, last_B = verify.verify_rows(
        probs.log().expand(40_000, V), None, rows, [0] * 40_000, None, verify.Rule()
    )
    assert (
        chisquare(
            torch.bincount(last_B, minlength=V).numpy(),
            (probs.double() / probs.double().sum() * 40_000).numpy(),
        ).pvalue
        > 0.01
    )


def test_a_token_of_probability_zero_is_never_emitted() -> None:
    logits = torch.tensor([[0.0, -torch.inf, 0.0, -torch.inf]]).expand(20_000, V)
    rows = verify.DraftRows.build(torch.empty(0, dtype=torch.int64), [0] * 20_000)
    _, last_B = verify.verify_rows(logits, None, rows, [0] * 20_000, None, verify.Rule())
    assert set(last_B.tolist()) == {0, 2}


def test_seeded_requests_do_not_depend_on_their_neighbours() -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, V)

    def sample(batch: int, index: int) -> list[int]:
        counts = [1] * batch
        rows = verify.DraftRows.build(torch.tensor([2] * batch), counts)
        own = torch.cat([logits[:2] if i == index else logits[2:4] for i in range(batch)])
        rule = verify.Rule(generators={index: torch.Generator().manual_seed(7)})
        run_B, last_B = verify.verify_rows(own, None, rows, counts, None, rule)
        return verify.assemble(rows, run_B, last_B)[index].tolist()

    assert sample(1, 0) == sample(3, 2) == sample(5, 1)


@pytest.mark.parametrize(("replace_from", "replace_to"), [(0, 0), (0, 1)])
def test_expand_to_rows(replace_from: int, replace_to: int) -> None:
    values = verify.expand_to_rows(
        torch.tensor([0.0, 0.5, 2.0]),
        torch.tensor([2, 2, 5], dtype=torch.int32),
        5,
        replace_from,
        replace_to,
    )
    first = float(replace_to) if replace_from != replace_to else 0.0
    assert values.tolist() == [first, first, 2.0, 2.0, 2.0]
