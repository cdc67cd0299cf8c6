"""Replay: by hand, against plain loops and the enumeration of all outcomes (docs/theory.md, theorem
5), and against a simulated engine that counts as vLLM does (theorem 4).
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from heads.acceptance import (
    ReplayResult,
    better_temperatures,
    draft_ids_for_rows,
    draft_logprobs_for_rows,
    paired_difference,
    replay_estimate,
    replay_probabilities,
    replay_sampled,
    student_quantile,
)
from heads.errors import DataError
from heads.heads_config import KINDS, HeadsConfig
from heads.modules import MedusaHeads
from heads.targets import condition_ids, head_logprobs, head_targets, segments_from_lengths

EOS = 0


def test_by_hand() -> None:
    """One response 5 6 7 8 9 9, two heads. Stops: row 0 (both right, jump 3), row 3 (first wrong,
    jump 1), row 4 (one right, end).
    """
    response_M = torch.tensor([5, 6, 7, 8, 9, 9])
    drafts_MK = torch.tensor([[6, 7], [0, 0], [0, 0], [1, 9], [9, 3], [4, 4]])
    result = replay_estimate(drafts_MK, response_M, torch.tensor([6]))
    assert (result.drafts, result.accepted_per_position) == (3.0, (2.0, 1.0))
    assert result.mean_acceptance_length == 1 + 3 / 3
    assert result.acceptance_per_position == (2 / 3, 1 / 3)
    assert (
        result.accepted_upper == 4.0
    )  # At row 4 the second draft was behind the end: vLLM may have accepted it, unseen.


def test_the_right_but_unreached_does_not_count() -> None:
    """A wrong first draft ends the run, whatever stands behind it; averages over all rows would
    count row 1.
    """
    drafts_MK = torch.tensor([[1, 7], [7, 8], [0, 0], [0, 0]])
    result = replay_estimate(drafts_MK, torch.tensor([5, 6, 7, 8]), torch.tensor([4]))
    assert (result.drafts, result.accepted_per_position) == (2.0, (1.0, 1.0))


def test_short_responses() -> None:
    """A response of one token ends before any draft; one of two tokens has one draft step, with one
    draft that is seen.
    """
    result = replay_estimate(torch.full((3, 4), 6), torch.tensor([5, 5, 6]), torch.tensor([1, 2]))
    assert result.drafts_S.tolist() == [0.0, 1.0]
    assert result.accepted_SK.tolist() == [[0.0] * 4, [1.0, 0.0, 0.0, 0.0]]
    assert result.unseen_S.tolist() == [0.0, 3.0]
    assert (
        replay_estimate(
            torch.full((1, 4), 6), torch.tensor([5]), torch.tensor([1])
        ).mean_acceptance_length
        == 1.0
    )


def plain_replay(match_TK: list[list[bool]]) -> tuple[int, list[int]]:
    """The definition as a loop over one response."""
    length = len(match_TK)
    heads = len(match_TK[0])
    row = 0
    drafts = 0
    accepted = [0] * heads
    while row < length - 1:
        drafts += 1
        run = 0
        while run < heads and row + run + 1 < length and match_TK[row][run]:
            accepted[run] += 1
            run += 1
        row += run + 1
    return drafts, accepted


def test_one_hot_equals_a_plain_loop() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths_S = torch.randint(1, 30, (50,), generator=generator)
    match_MK = torch.rand(int(lengths_S.sum()), 3, generator=generator) < 0.6
    result = replay_probabilities(match_MK, lengths_S)
    start = 0
    for index, length in enumerate(lengths_S.tolist()):
        drafts, accepted = plain_replay(match_MK[start : start + length].tolist())
        assert (
            int(result.drafts_S[index]) == drafts and result.accepted_SK[index].tolist() == accepted
        )
        start += length


def row_by_row(accept_MK: torch.Tensor, lengths_S: torch.Tensor) -> ReplayResult:
    """The slow reference: one response after the other, one draft after the other."""
    heads = accept_MK.shape[1]
    counts: list[list[float]] = []
    rows: list[tuple[float, float]] = []
    for accept_TK in accept_MK.double().split(lengths_S.tolist()):
        length = len(accept_TK)
        visits = [1.0] + [0.0] * (length + heads)
        drafts, unseen, accepted = 0.0, 0.0, [0.0] * heads
        for t, accept_K in enumerate(accept_TK.tolist()):
            left = length - 1 - t
            reached = visits[t] if left else 0.0
            drafts += reached
            rows.append((reached, 0.0))
            for k in range(1, heads + 1):
                unseen += reached * (left == k - 1) * (heads - left)
                longer = reached * accept_K[k - 1] * (k <= left)
                accepted[k - 1] += longer
                rows[-1] = (rows[-1][0], rows[-1][1] + longer)
                visits[t + k] += reached - longer
                reached = longer
            visits[t + heads + 1] += reached
        counts.append([drafts, unseen, *accepted])
    columns = torch.tensor(counts, dtype=torch.float64)
    return ReplayResult(
        columns[:, 0], columns[:, 2:], columns[:, 1], torch.tensor(rows, dtype=torch.float64)
    )


@pytest.mark.parametrize("heads", [1, 4])
def test_all_responses_at_once_are_each_by_itself(heads: int) -> None:
    generator = torch.Generator().manual_seed(heads)
    lengths_S = torch.cat([torch.arange(1, 8), torch.randint(1, 40, (30,), generator=generator)])
    accept_MK = torch.rand(int(lengths_S.sum()), heads, generator=generator)
    accept_MK[::7] = 1.0
    slow = row_by_row(accept_MK, lengths_S)
    fast = replay_probabilities(accept_MK, lengths_S)
    for name in ("drafts_S", "accepted_SK", "unseen_S", "rows_M2"):
        torch.testing.assert_close(
            getattr(fast, name), getattr(slow, name), rtol=0, atol=1e-12, msg=name
        )


def test_the_time_is_that_of_the_longest_response_and_an_operation_a_row() -> None:
    """Eight operations for each draft of each row made a batch of long responses wait for
    minutes.
    """
    lengths_S = torch.full((8,), 256)
    accept_MK = torch.full((8 * 256, 4), 0.5)
    with CountOperations() as count:
        replay_probabilities(accept_MK, lengths_S)
    assert count.arithmetic < 2 * 256, "operations that compute, views left out"


class CountOperations(TorchDispatchMode):
    """How many operations write something new."""

    def __init__(self) -> None:
        super().__init__()
        self.arithmetic = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.arithmetic += not func.is_view
        return func(*args, **(kwargs or {}))


def test_expectation_equals_enumeration_over_all_outcomes() -> None:
    """Sampled drafts: the exact expectation against a sum over all 2^(T K) outcomes of a short
    response.
    """
    generator = torch.Generator().manual_seed(1)
    length = 4
    heads = 2
    accept_TK = torch.rand(length, heads, generator=generator).double()
    drafts = 0.0
    accepted = [0.0] * heads
    for bits in itertools.product([False, True], repeat=length * heads):
        match = [list(bits[t * heads : (t + 1) * heads]) for t in range(length)]
        probability = math.prod(
            float(accept_TK[t, k]) if match[t][k] else 1 - float(accept_TK[t, k])
            for t in range(length)
            for k in range(heads)
        )
        one_drafts, one_accepted = plain_replay(match)
        drafts += probability * one_drafts
        accepted = [a + probability * b for a, b in zip(accepted, one_accepted, strict=True)]
    result = replay_probabilities(accept_TK, torch.tensor([length]))
    assert result.drafts == pytest.approx(drafts, rel=1e-12)
    assert result.accepted_per_position == pytest.approx(accepted, rel=1e-12)


class TinyEngine:
    """Speculative decoding over a first-order Markov actor, counting as vLLM does.

    As in vLLM, drafts are not shortened to the token limit, verification goes on behind an end
    token, tokens behind the end are cut off after they were counted, and a finished request drafts
    no more.
    """

    def __init__(
        self, seed: int, vocab: int = 8, heads: int = 3, draft_temperature: float = 0.8
    ) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        table = torch.Generator().manual_seed(99)
        self.vocab = vocab
        self.heads = heads
        self.p_VV = (2.0 * torch.randn(vocab, vocab, generator=table)).softmax(-1).double()
        self.p_VV[:, EOS] = 0.05 * self.p_VV[:, EOS].clamp(max=1.0) + 0.02
        self.p_VV /= self.p_VV.sum(-1, keepdim=True)
        # Head k reads the token of the row (its "hidden state") and no later one, as kind medusa
        # does.
        power = self.p_VV @ self.p_VV
        self.q_KVV = []
        for _ in range(heads):
            self.q_KVV.append((power.log() / draft_temperature).softmax(-1))
            power = power @ self.p_VV
        self.drafts = self.accepted = 0

    def draw(self, weights_V: torch.Tensor) -> int:
        return int(torch.multinomial(weights_V, 1, generator=self.generator))

    def verify(self, last: int, drafts: list[int], q_KV: list[torch.Tensor]) -> tuple[int, int]:
        """A block of drafts: how many are accepted, and the token behind them."""
        weights = [1.0]
        rows = [self.p_VV[last]]
        for draft, q_V in zip(drafts, q_KV, strict=True):
            weights.append(min(1.0, weights[-1] * float(rows[-1][draft] / q_V[draft])))
            rows.append(self.p_VV[draft])
        left_LV = [
            (weight * p_V - q_V).clamp(min=0)
            for weight, p_V, q_V in zip(weights[:-1], rows[:-1], q_KV, strict=True)
        ]
        run = 0
        for length in range(1, len(drafts) + 1):
            chance = weights[length]
            if length < len(drafts):
                left = float(left_LV[length].sum())
                chance = left / max(left + 1 - chance, 1e-30)
            if float(torch.rand(1, generator=self.generator, dtype=torch.float64)) < chance:
                run = length
        return run, self.draw(rows[run] if run == len(drafts) else left_LV[run])

    def generate(self, max_tokens: int, *, sampled: bool) -> tuple[list[int], list[int]]:
        """One response, and the token each row stands on."""
        rows = [1]
        response = [self.draw(self.p_VV[1])]
        while response[-1] != EOS and len(response) < max_tokens:
            state = rows[len(response) - 1]
            q_KV = [q_VV[state] for q_VV in self.q_KVV]
            if not sampled:
                q_KV = [torch.zeros_like(q_V).index_fill_(0, q_V.argmax(), 1.0) for q_V in q_KV]
            drafts = [self.draw(q_V) for q_V in q_KV]
            run, last = self.verify(response[-1], drafts, q_KV)
            self.drafts = self.drafts + 1
            self.accepted = self.accepted + run
            for token in [*drafts[:run], last]:
                rows.append(response[-1])
                response.append(token)
                if token == EOS or len(response) == max_tokens:
                    break
        return response, rows

    def replay(
        self, responses: list[list[int]], rows: list[list[int]], *, sampled: bool
    ) -> ReplayResult:
        lengths_S = torch.tensor([len(r) for r in responses])
        response_M = torch.tensor([t for r in responses for t in r])
        row_M = torch.tensor([t for r in rows for t in r])
        segment_M = segments_from_lengths(lengths_S)
        q_MKV = torch.stack([q_VV[row_M] for q_VV in self.q_KVV], dim=1)
        if not sampled:
            return replay_estimate(q_MKV.argmax(-1), response_M, lengths_S)
        targets_MK, _ = head_targets(response_M, segment_M, self.heads)
        return replay_sampled(
            q_MKV.gather(-1, targets_MK.unsqueeze(-1)).squeeze(-1).log(),
            self.p_VV[row_M, response_M].log(),
            lengths_S,
        )


@pytest.mark.parametrize("max_tokens", [5, 40])
def test_one_hot_replay_reproduces_the_counters_of_the_engine_that_drafted(max_tokens: int) -> None:
    """Pathwise: the number of draft steps exactly, the accepted tokens up to what was accepted
    behind the ends.
    """
    engine = TinyEngine(0)
    responses, rows = zip(
        *(engine.generate(max_tokens, sampled=False) for _ in range(150)), strict=True
    )
    result = engine.replay(list(responses), list(rows), sampled=False)
    assert result.drafts == engine.drafts
    assert result.accepted <= engine.accepted <= result.accepted_upper
    if max_tokens == 40:
        assert 1 + engine.accepted / engine.drafts == pytest.approx(
            result.mean_acceptance_length, rel=0.03
        )


@pytest.mark.parametrize("sampled", [False, True])
def test_replay_of_plain_rollouts_predicts_the_counters(sampled: bool) -> None:
    """In law: rollouts made without any drafts predict what drafting would count, within 3 % and
    within noise.
    """
    engine = TinyEngine(1)
    plain = TinyEngine(2)
    for _ in range(300):
        engine.generate(60, sampled=sampled)
    responses = []
    rows = []
    for _ in range(300):
        response = [plain.draw(plain.p_VV[1])]
        while response[-1] != EOS and len(response) < 60:
            response.append(plain.draw(plain.p_VV[response[-1]]))
        responses.append(response)
        rows.append([1, *response[:-1]])
    result = plain.replay(responses, rows, sampled=sampled)
    interval = result.confidence_interval(0.9999)
    width = interval.high - interval.low
    assert result.mean_acceptance_length > 1.15
    assert 1 + engine.accepted / engine.drafts == pytest.approx(
        result.mean_acceptance_length, abs=width + 0.01
    )


def test_sampled_becomes_one_hot_when_the_draft_temperature_goes_to_zero() -> None:
    generator = torch.Generator().manual_seed(3)
    heads = MedusaHeads(HeadsConfig(8, 12, 2))
    lm_head_VD = torch.randn(12, 8, generator=generator)
    hidden_MD = torch.randn(90, 8, generator=generator)
    lengths_S = torch.tensor([40, 50])
    response_M = torch.randint(12, (90,), generator=generator)
    targets_MK, _ = head_targets(response_M, segments_from_lengths(lengths_S), 2)
    logq_QMK = draft_logprobs_for_rows(
        heads, hidden_MD, targets_MK, lm_head_VD, temperatures=(1e-6, 1.0)
    )
    cold = replay_sampled(logq_QMK[0], torch.full((90,), -1e-9), lengths_S)
    one_hot = replay_estimate(
        draft_ids_for_rows(heads, hidden_MD, lm_head_VD), response_M, lengths_S
    )
    assert cold.mean_acceptance_length == pytest.approx(one_hot.mean_acceptance_length, abs=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_in_chunks_equal_plain_logits(kind: str) -> None:
    torch.manual_seed(0)
    heads = MedusaHeads(HeadsConfig(8, 12, 3, kind))
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    lm_head_VD = torch.randn(12, 8)
    embedding_VD = torch.randn(12, 8)
    hidden_MD = torch.randn(31, 8)
    response_M = torch.randint(12, (31,))
    lengths_S = torch.tensor([11, 20])
    segment_M = segments_from_lengths(lengths_S)
    condition_MK = condition_ids(response_M, segment_M, 3)
    targets_MK, _ = head_targets(response_M, segment_M, 3)
    logits_MKV = heads(hidden_MD, lm_head_VD, condition=condition_MK, embedding_VD=embedding_VD)
    ids_MK = draft_ids_for_rows(
        heads,
        hidden_MD,
        lm_head_VD,
        condition_MK=condition_MK,
        embedding_VD=embedding_VD,
        chunk_rows=7,
    )
    assert torch.equal(ids_MK, logits_MKV.argmax(-1))
    logq_QMK = draft_logprobs_for_rows(
        heads,
        hidden_MD,
        targets_MK,
        lm_head_VD,
        temperatures=(0.5, 2.0),
        condition_MK=condition_MK,
        embedding_VD=embedding_VD,
        chunk_rows=7,
    )
    for index, temperature in enumerate((0.5, 2.0)):
        expected = (
            (logits_MKV / temperature)
            .log_softmax(-1)
            .gather(-1, targets_MK.unsqueeze(-1))
            .squeeze(-1)
        )
        torch.testing.assert_close(logq_QMK[index], expected, rtol=1e-4, atol=1e-5)
    assert head_logprobs(torch.zeros(31), segment_M, 3).shape == targets_MK.shape


def test_each_heads_own_draft_temperature_is_in_its_q_and_not_in_its_argmax() -> None:
    generator = torch.Generator().manual_seed(3)
    heads = MedusaHeads(HeadsConfig(8, 12, 2))
    lm_head_VD = torch.randn(12, 8, generator=generator)
    hidden_MD = torch.randn(9, 8, generator=generator)
    targets_MK = torch.randint(12, (9, 2), generator=generator)
    plain_QMK = draft_logprobs_for_rows(
        heads, hidden_MD, targets_MK, lm_head_VD, temperatures=(0.35, 1.4, 0.7)
    )
    ids_MK = draft_ids_for_rows(heads, hidden_MD, lm_head_VD)
    heads.temperatures_K.copy_(torch.tensor([0.5, 2.0]))
    own_MK = draft_logprobs_for_rows(heads, hidden_MD, targets_MK, lm_head_VD, temperatures=(0.7,))[
        0
    ]
    torch.testing.assert_close(own_MK, torch.stack([plain_QMK[0, :, 0], plain_QMK[1, :, 1]], dim=1))
    assert torch.equal(draft_ids_for_rows(heads, hidden_MD, lm_head_VD), ids_MK)


def test_a_temperature_is_left_only_for_one_that_is_surely_better() -> None:
    generator = torch.Generator().manual_seed(4)
    group_M = torch.arange(40).repeat_interleave(5)
    noise_QM = torch.rand(3, 200, generator=generator, dtype=torch.float64)
    better_QM = noise_QM[:1] * torch.tensor([0.8, 1.0, 0.9], dtype=torch.float64).unsqueeze(1)
    # Ratios q / p below 1, which are chances as they stand.
    better_QM = better_QM.log()
    assert better_temperatures(torch.stack([better_QM, better_QM], dim=2), group_M, [0, 2]) == [
        1,
        1,
    ]
    alike_QM = 0.5 + 0.01 * noise_QM
    alike_QMK = torch.stack([alike_QM] * 3, dim=2)
    chosen = better_temperatures(alike_QMK.log(), group_M, [0, 1, 2])
    before_M = torch.ones(200, dtype=torch.float64)
    gains = []
    for now, best in enumerate(chosen):
        gains.append(((alike_QM[best] - alike_QM[now]) * before_M).view(40, 5).sum(1))
        before_M = before_M * alike_QM[best]
    pairs = zip(range(3), chosen, gains, strict=True)
    assert all(
        best == now or float(gain.sum()) > float(gain.std()) * 40**0.5 for now, best, gain in pairs
    )
    one_group = better_temperatures(
        torch.stack([better_QM], dim=2), torch.zeros(200, dtype=torch.int64), [0]
    )
    assert one_group == [0], "one prompt shows no error"
    unreached_QM = torch.full_like(better_QM, -torch.inf)
    assert better_temperatures(torch.stack([unreached_QM, better_QM], dim=2), group_M, [0, 0]) == [
        0,
        0,
    ], "nobody comes to the second"


def test_confidence_interval_covers() -> None:
    """Of 60 data sets with a known mean acceptance length, the 90 % interval covers most."""
    generator = torch.Generator().manual_seed(5)
    lengths_S = torch.full((40,), 30)
    rate = 0.5
    covered = 0
    truth = replay_probabilities(
        torch.full((3000, 2), rate), torch.full((100,), 30)
    ).mean_acceptance_length
    for _ in range(60):
        result = replay_probabilities(torch.rand(1200, 2, generator=generator) < rate, lengths_S)
        interval = result.confidence_interval(0.9)
        assert interval.low <= interval.value <= interval.high
        assert interval.value == pytest.approx(result.mean_acceptance_length)
        covered += interval.low <= truth <= interval.high
    assert 45 <= covered < 60


def test_one_observation_says_nothing_beyond_what_is_possible() -> None:
    one = replay_probabilities(torch.full((30, 2), 0.5), torch.tensor([30]))
    interval = one.confidence_interval()
    assert (interval.low, interval.high) == (1.0, 3.0)
    difference = paired_difference(one, one)
    assert (difference.value, difference.low, difference.high) == (0.0, -2.0, 2.0)


def test_a_difference_between_few_and_many_heads_is_inside_its_interval() -> None:
    # One observation: the interval is all that is possible.
    few = replay_probabilities(torch.full((30, 2), 0.3), torch.tensor([30]))
    many = replay_probabilities(torch.full((30, 8), 0.95), torch.tensor([30]))
    for first, second, low, high in ((few, many, -8.0, 2.0), (many, few, -2.0, 8.0)):
        difference = paired_difference(first, second)
        assert (difference.low, difference.high) == (low, high)
        assert low < difference.value < high


def test_quantiles_are_students() -> None:
    from scipy import stats

    for freedom in (5, 8, 30, 1000):
        for share in (0.91, 0.975):
            assert student_quantile(share, freedom) == pytest.approx(
                stats.t.ppf(share, freedom), rel=1e-2
            )


def test_paired_difference_sees_what_separate_intervals_hide() -> None:
    """Sequences differ widely, the two sets of heads by little: only the paired interval excludes
    zero.
    """
    generator = torch.Generator().manual_seed(6)
    lengths_S = torch.full((60,), 30)
    rate_S = torch.rand(60, generator=generator) * 0.8 + 0.1
    rate_MK = rate_S.repeat_interleave(30).unsqueeze(1).expand(-1, 2)
    better = replay_probabilities(rate_MK * 1.05, lengths_S)
    worse = replay_probabilities(rate_MK, lengths_S)
    difference = paired_difference(better, worse)
    assert difference.low > 0 and difference.value == pytest.approx(
        better.mean_acceptance_length - worse.mean_acceptance_length
    )
    assert better.confidence_interval().low < worse.confidence_interval().high
    same = paired_difference(worse, worse)
    assert (same.value, same.low, same.high) == (0.0, 0.0, 0.0)
    with pytest.raises(DataError, match="same sequences"):
        paired_difference(better, replay_probabilities(rate_MK[:30], torch.tensor([30])))


@pytest.mark.parametrize("lengths", [[], [3, 0], [2, 2]])
def test_lengths_that_do_not_fit(lengths: list[int]) -> None:
    with pytest.raises(DataError, match="lengths"):
        replay_estimate(
            torch.zeros(3, 2, dtype=torch.int64),
            torch.zeros(3, dtype=torch.int64),
            torch.tensor(lengths, dtype=torch.int64),
        )
