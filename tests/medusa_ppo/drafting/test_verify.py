"""Verification in plain torch: the joint distribution of the emitted tokens must be the target's,
whatever was drafted (docs/theory.md, lemma 1, lemma 2 and theorem 2).
"""

from __future__ import annotations

import itertools

import pytest
import torch
from scipy.stats import chisquare

from heads.acceptance import block_acceptance
from medusa_ppo.drafting import verify
from medusa_ppo.drafting.noise import cumulate
from medusa_ppo.drafting.slots import NOTHING, DraftSlots, KeptDrafts

V, K = 4, 2
TRIALS = 120_000


def target_tables(device: torch.device, seed: int = 0) -> list[torch.Tensor]:
    """p(x1), p(x2 | x1), p(x3 | x1 x2) of a small random process, as tables [V], [V, V], [V, V,
    V].
    """
    torch.manual_seed(seed)
    return [
        torch.softmax(1.5 * torch.randn([V] * (n + 1), dtype=torch.float64), -1).to(device)
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


def p_value(
    device: torch.device,
    draft_probs: torch.Tensor | None,
    claimed: torch.Tensor | None,
    seed: int,
) -> float:
    """Chi-square p-value of the emitted joint. Drafts come from `draft_probs` [K, V] (or are
    fixed), verification believes `claimed`.
    """
    torch.manual_seed(seed)
    tables = target_tables(device)
    draft_probs, claimed = (
        None if table is None else table.to(device) for table in (draft_probs, claimed)
    )
    if draft_probs is None:
        drafts_BK = torch.tensor([1, 2], device=device).expand(TRIALS, K).contiguous()
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
    observed = emitted_joint(verify.assemble(rows, run_B, last_B), tables).cpu()
    expected = joint_probs(tables)
    return float(chisquare(observed.numpy(), (expected / expected.sum() * TRIALS).numpy()).pvalue)


QS = torch.softmax(
    torch.tensor([[0.3, 1.0, -1.0, 0.0], [2.0, -2.0, 0.5, 0.1]], dtype=torch.float64), -1
)


def test_one_hot_drafts_leave_the_joint_distribution_alone(device: torch.device) -> None:
    assert p_value(device, None, None, seed=1) > 0.01


def test_sampled_drafts_leave_the_joint_distribution_alone(device: torch.device) -> None:
    assert p_value(device, QS, QS, seed=2) > 0.01


def test_a_wrong_q_is_caught_by_the_same_statistic(device: torch.device) -> None:
    wrong = torch.softmax(QS.log() * 0.5, -1)
    assert p_value(device, QS, wrong, seed=3) < 1e-6


def test_sampled_drafts_may_be_taken_for_one_hot(device: torch.device) -> None:
    # Given the draft, the one-hot rule emits p exactly; only acceptance is lost.
    assert p_value(device, QS, None, seed=4) > 0.01


# ---- the rule of blocks against a slow reference


def reference(
    p_LV: list[list[float]], q_LV: list[list[float]], drafts: list[int], numbers: list[float]
) -> tuple[int, list[float]]:
    """Algorithm 2 of Sun et al. for one request, in plain Python: the run, and what the next token
    comes from. `p_LV` has one row more than there are drafts.
    """
    weights = [1.0]
    for draft, p_V, q_V in zip(drafts, p_LV, q_LV, strict=False):
        ratio = p_V[draft] / q_V[draft] if q_V[draft] > 0 else 0.0
        weights.append(min(1.0, weights[-1] * ratio))
    run = 0
    for length in range(1, len(drafts) + 1):
        weight = weights[length]
        if length == len(drafts):
            chance = weight
        else:
            left = sum(
                max(weight * p - q, 0.0) for p, q in zip(p_LV[length], q_LV[length], strict=True)
            )
            chance = left / (left + 1 - weight) if left + 1 - weight > 0 else 1.0
        if numbers[length - 1] < chance:
            run = length
    if run == len(drafts):
        return run, p_LV[run]
    pairs = zip(p_LV[run], q_LV[run], strict=True)
    return run, [max(weights[run] * p - q, 0.0) for p, q in pairs]


def block_batch(
    device: torch.device, seed: int, batch: int, width: int, mapped: bool
) -> tuple[verify.DraftRows, torch.Tensor, KeptDrafts, list[int], torch.Tensor]:
    """Requests of 0 to `width` drafts, some of them refused ids and some one-hot: their rows, the
    model's log-probs, q as our drafting keeps it, their counts, and q as dense rows.
    """
    torch.manual_seed(seed)
    ids_W = torch.tensor([0, 2, 3, 5], device=device) if mapped else None
    size = 6
    columns = size if ids_W is None else len(ids_W)
    slots = DraftSlots(batch, width, columns, device, ids_W)
    rows_B = torch.arange(batch, device=device)
    places = slots.places(width, batch)
    q_KBW = torch.randn(width, batch, columns).mul(0.4).softmax(-1).to(device)
    for k in range(width):
        cumulate(q_KBW[k], places.cumulative[k])
        places.columns[k].copy_(torch.multinomial(q_KBW[k], 1))
    one_hot_B = rows_B % 5 == 4
    slots.stamp(rows_B, torch.where(one_hot_B, NOTHING, rows_B), width)
    kept = slots.look_up(rows_B, rows_B, width)
    columns_BK = slots.columns_KR[:, :batch].t()
    ids_BK = columns_BK if ids_W is None else ids_W[columns_BK]
    dense_BKV = torch.zeros(batch, width, size, device=device)
    for k in range(width):
        q_BW = slots.q(rows_B, torch.full((batch,), k, device=device))
        dense_BKV[:, k] = (
            q_BW
            if ids_W is None
            else torch.zeros(batch, size, device=device).index_copy(1, ids_W, q_BW)
        )
    one_hot_BKV = torch.nn.functional.one_hot(ids_BK, size).float()
    dense_BKV = torch.where(one_hot_B.view(-1, 1, 1), one_hot_BKV, dense_BKV)
    counts = [(row * 7) % (width + 1) for row in range(batch)]
    refused_BK = torch.where(torch.rand(batch, width).to(device) < 0.05, verify.PLACEHOLDER, ids_BK)
    counts_B1 = torch.tensor(counts, device=device).unsqueeze(1)
    flat_T = refused_BK[torch.arange(width, device=device) < counts_B1]
    logits_NV = torch.randn(sum(counts) + batch, size).mul(0.4)
    # As top-k and top-p cut: what is not sampled has no probability.
    logits_NV[torch.rand(logits_NV.shape) < 0.1] = -torch.inf
    logits_NV[:, 2] = 0.3
    logprobs_NV = logits_NV.log_softmax(-1).to(device)
    return verify.DraftRows.build(flat_T, counts), logprobs_NV, kept, counts, dense_BKV


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_blocks_are_verified_as_the_reference_says(
    device: torch.device, width: int, mapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ragged, with refused ids, one-hot requests and a draft vocabulary; on all rows at once, as on
    a GPU, the same, and so a part of the requests after the other.
    """
    batch = 900
    drafts, logprobs_NV, kept, counts, dense_BKV = block_batch(device, width, batch, width, mapped)
    numbers_BK = torch.rand(batch, width, dtype=torch.float64).to(device)
    target = verify.TargetRows(logprobs_NV, logprobs_NV)
    run = verify.accepted_run(target, drafts, numbers_BK, kept)
    at_B1 = run.length_B.clamp_max(width - 1).unsqueeze(1)
    # One row after the other below: where each is read a GPU would be waited for.
    logprobs_host_NV, dense_host_BKV = logprobs_NV.cpu(), dense_BKV.cpu()
    starts, lengths = drafts.starts_B.tolist(), run.length_B.tolist()
    drafted, weights = drafts.draft_ids_BK.tolist(), run.weight_B.tolist()
    given_BK = numbers_BK.tolist()
    seen = set()
    for row, count in enumerate(counts):
        first = starts[row]
        ids = drafted[row][:count]
        there = ids.index(verify.PLACEHOLDER) if verify.PLACEHOLDER in ids else count
        p_LV = logprobs_host_NV[first : first + there + 1].exp().double().tolist()
        q_LV = dense_host_BKV[row, :there].double().tolist()
        length, mass_V = reference(p_LV, q_LV, ids[:there], given_BK[row])
        assert lengths[row] == length, row
        refused = ids[length] if length < there else verify.PLACEHOLDER
        p_1V = logprobs_NV[first + length].exp().unsqueeze(0)
        left_1V = kept.part(slice(row, row + 1)).residual(
            p_1V * weights[row],
            at_B1[row : row + 1],
            torch.tensor([[refused]], device=device),
        )
        if length == there:
            left_1V = p_1V
        torch.testing.assert_close(
            left_1V[0].double().cpu(), torch.tensor(mass_V).double(), atol=1e-6, rtol=1e-4
        )
        seen.add(length)
    assert seen == set(range(width + 1))
    monkeypatch.setattr(verify, "waits_for", lambda device: True)
    again = verify.accepted_run(target, drafts, numbers_BK, kept)
    assert torch.equal(again.length_B, run.length_B)
    assert torch.equal(again.weight_B, run.weight_B)
    numbers_BW = torch.cat(
        [numbers_BK, torch.rand(batch, 1, dtype=torch.float64).to(device)], dim=1
    )
    given = logprobs_NV, None, drafts, counts, verify.Proposed(kept, numbers_BW), verify.Rule()
    at_once = verify.verify_rows(*given)
    monkeypatch.setattr(verify, "ROW_BYTES", 8 * logprobs_NV.shape[1] * 100)
    for waits in (True, False):
        monkeypatch.setattr(verify, "waits_for", lambda device, waits=waits: waits)
        for whole, in_parts in zip(at_once, verify.verify_rows(*given), strict=True):
            assert torch.equal(whole, in_parts)


def test_a_block_accepts_more_than_token_by_token(device: torch.device) -> None:
    """And as many as the replay estimate takes it to: the sum over drafts of q w."""
    torch.manual_seed(8)
    tables = target_tables(device)
    drafts_BK = torch.stack(
        [torch.multinomial(QS[j].to(device), TRIALS, replacement=True) for j in range(K)], dim=1
    )
    counts = [K] * TRIALS
    rows = verify.DraftRows.build(drafts_BK.flatten(), counts)
    claimed_TV = QS.float().to(device).expand(TRIALS, K, V).reshape(-1, V)
    logprobs_NV = step_logprobs(tables, drafts_BK)
    run_B, _ = verify.verify_rows(logprobs_NV, None, rows, counts, claimed_TV, verify.Rule())
    tables = [table.cpu() for table in tables]
    by_token = as_block = 0.0
    for a, b in itertools.product(range(V), repeat=2):
        q_K = QS[0, a], QS[1, b]
        p_K = tables[0][a], tables[1][a, b]
        # Responses come from p: what the estimate takes to be reached of one, times its chance.
        chance = p_K[0] * p_K[1]
        ratios_1K = torch.stack([q_K[0] / p_K[0], q_K[1] / p_K[1]]).log().unsqueeze(0)
        first, second = block_acceptance(ratios_1K)[0]
        as_block += float(chance * first * (1 + second))
        least = [min(1.0, float(q / p)) for q, p in zip(q_K, p_K, strict=True)]
        by_token += float(chance) * least[0] * (1 + least[1])
    found = run_B.double().mean()
    error = float(run_B.double().std()) / TRIALS**0.5
    assert abs(float(found) - as_block) < 4 * error
    assert as_block > by_token + 5 * error


def test_ragged_batches_refused_ids_and_zero_drafts(device: torch.device) -> None:
    logits = torch.full((3 + 1 + 2, V), -torch.inf, device=device)
    for row, token in enumerate([1, 2, 3, 0, 2, 2]):
        logits[row, token] = 0.0
    counts = [2, 0, 1]
    rows = verify.DraftRows.build(torch.tensor([1, 2, -1], device=device), counts)
    assert rows.starts_B.tolist() == [0, 3, 4]
    for rule in (
        verify.Rule(),
        verify.Rule(all_greedy=True),
        verify.Rule(greedy_B=torch.tensor([True, False, True], device=device)),
    ):
        run_B, last_B = verify.verify_rows(logits, None, rows, counts, None, rule)
        assert verify.assemble(rows, run_B, last_B).tolist() == [
            [1, 2, 3],
            [0, -1, -1],
            [2, -1, -1],
        ]


def test_no_drafts_at_all_samples_from_the_target(device: torch.device) -> None:
    torch.manual_seed(0)
    probs = torch.softmax(torch.randn(V), -1).to(device)
    rows = verify.DraftRows.build(torch.empty(0, dtype=torch.int64, device=device), [0] * 40_000)
    _, last_B = verify.verify_rows(
        probs.log().expand(40_000, V), None, rows, [0] * 40_000, None, verify.Rule()
    )
    assert (
        chisquare(
            torch.bincount(last_B, minlength=V).cpu().numpy(),
            (probs.double() / probs.double().sum() * 40_000).cpu().numpy(),
        ).pvalue
        > 0.01
    )


def test_a_token_of_probability_zero_is_never_emitted(device: torch.device) -> None:
    logits = torch.tensor([[0.0, -torch.inf, 0.0, -torch.inf]], device=device).expand(20_000, V)
    rows = verify.DraftRows.build(torch.empty(0, dtype=torch.int64, device=device), [0] * 20_000)
    _, last_B = verify.verify_rows(logits, None, rows, [0] * 20_000, None, verify.Rule())
    assert set(last_B.tolist()) == {0, 2}


def test_seeded_requests_do_not_depend_on_their_neighbours(device: torch.device) -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, V).to(device)

    def sample(batch: int, index: int) -> list[int]:
        counts = [1] * batch
        rows = verify.DraftRows.build(torch.tensor([2] * batch, device=device), counts)
        own = torch.cat([logits[:2] if i == index else logits[2:4] for i in range(batch)])
        rule = verify.Rule(generators={index: torch.Generator(device=device).manual_seed(7)})
        run_B, last_B = verify.verify_rows(own, None, rows, counts, None, rule)
        return verify.assemble(rows, run_B, last_B)[index].tolist()

    assert sample(1, 0) == sample(3, 2) == sample(5, 1)


@pytest.mark.parametrize(("replace_from", "replace_to"), [(0, 0), (0, 1)])
def test_expand_to_rows(device: torch.device, replace_from: int, replace_to: int) -> None:
    values = verify.expand_to_rows(
        torch.tensor([0.0, 0.5, 2.0], device=device),
        torch.tensor([2, 2, 5], dtype=torch.int32, device=device),
        5,
        replace_from,
        replace_to,
    )
    first = float(replace_to) if replace_from != replace_to else 0.0
    assert values.tolist() == [first, first, 2.0, 2.0, 2.0]
