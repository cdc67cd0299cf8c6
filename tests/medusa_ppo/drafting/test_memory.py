"""The memory of earlier responses: what it holds, what followed a suffix, what it adds to q, and what it learns."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from medusa_ppo.drafting import memory as memory_file
from medusa_ppo.drafting.core import Drafted, DraftingCore, Sampling
from medusa_ppo.drafting.memory import (
    COUNTS,
    EMPTY,
    FADE,
    FIRST_SHARES,
    MISSING,
    OVERHEAD,
    SUFFIX,
    Debts,
    Recall,
    ResponseMemory,
    RunningMemory,
    Trust,
    advance,
    match,
    prompt_key,
    tail_of,
    vote,
)
from medusa_ppo.drafting.slots import DraftSlots, stamps
from medusa_ppo.drafting.verify import DraftRows, Proposed, Rule, verify_rows
from tests.medusa_ppo.drafting.test_core import Actor, D, K, V, random_heads

CPU = torch.device("cpu")
PROMPT = (3, 1, 2)
MANY = 40_000


def texts(memory: ResponseMemory, prompt: tuple[int, ...] = PROMPT, places: int = 500) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, weights = memory.text(prompt_key(prompt), prompt[-SUFFIX:], (), places)
    return torch.from_numpy(tokens)[None], torch.from_numpy(weights)[None]


def counted(said: list[list[int]], so_far: list[int]) -> tuple[Counter[int], int]:
    """The slow reference: what followed the longest suffix of prompt and response, and its length."""
    whole = [*PROMPT, *so_far]
    for length in range(min(SUFFIX, len(whole)), 0, -1):
        found: Counter[int] = Counter()
        for response in said:
            text = [*PROMPT, *response]
            for end in range(max(length, len(PROMPT)), len(text)):
                if text[end - length : end] == whole[-length:]:
                    found[text[end]] += 1
        if found:
            return found, length
    return Counter(), 0


def test_what_followed_the_longest_suffix_is_what_a_plain_search_finds() -> None:
    rng = np.random.default_rng(0)
    said = [rng.integers(4, size=rng.integers(1, 40)).tolist() for _ in range(6)]
    memory = ResponseMemory(10**6)
    for response in said:
        memory.remember(prompt_key(PROMPT), response)
    texts_1X, weight_1P = texts(memory)
    seen = set()
    for _ in range(60):
        so_far = rng.integers(4, size=rng.integers(0, 20)).tolist()
        next_id = int(rng.integers(4))
        run = match(texts_1X, torch.tensor([tail_of(PROMPT, so_far)]))
        longer = advance(texts_1X, run, torch.tensor([next_id]))
        assert torch.equal(longer, match(texts_1X, torch.tensor([tail_of(PROMPT, [*so_far, next_id])])))
        expected, length = counted(said, so_far)
        votes = vote(run, weight_1P)
        share_V = torch.zeros(4).index_add_(0, texts_1X[0, SUFFIX:].clamp_min(0).long(), votes.share_BP[0])
        assert int(votes.length_B) == length
        seen.add(length)
        if expected:
            torch.testing.assert_close(share_V, torch.tensor([expected[token] for token in range(4)]) / expected.total())
            assert int(votes.cells_B) == (length - 1) * COUNTS + min(int(np.log2(expected.total())), COUNTS - 1)
    assert len(seen) >= 4
    nothing = vote(match(texts_1X, torch.full((1, SUFFIX), MISSING)), weight_1P)
    assert int(nothing.cells_B) == -1 and float(nothing.share_BP.sum()) == 0


def test_old_responses_weigh_less_and_the_budget_holds() -> None:
    memory = ResponseMemory(3 * (4 * 10 + OVERHEAD))
    memory.remember(prompt_key(PROMPT), [5] * 10)
    memory.version = 3
    memory.remember(prompt_key(PROMPT), [6] * 10)
    tokens, weights = memory.text(prompt_key(PROMPT), PROMPT, [[7, -1]], 100)
    assert tokens[:SUFFIX].tolist() == [EMPTY] * SUFFIX and len(tokens) == SUFFIX + len(weights)
    assert tokens[SUFFIX:].tolist() == [*PROMPT, 7, -1, EMPTY, *PROMPT, *[6] * 10, EMPTY, *PROMPT, *[5] * 10, EMPTY]
    of_token = dict(zip(tokens[SUFFIX:].tolist(), weights.tolist(), strict=True))
    assert of_token[7] == of_token[6] == 1 and of_token[5] == pytest.approx(FADE**3) and of_token[EMPTY] == of_token[1] == 0
    assert len(memory.text(prompt_key(PROMPT), PROMPT, (), 20)[1]) == 14, "the newest that fit"
    others = [(9,), (10,)]
    for prompt in others:
        memory.remember(prompt_key(prompt), [8] * 10)
    assert memory.nbytes <= memory.most_bytes
    assert len(memory.text(prompt_key(PROMPT), PROMPT, (), 100)[1]) == 14, "the prompt that waited longest forgets its oldest"
    memory.remember(prompt_key(PROMPT), [1] * 10_000)
    assert memory.nbytes <= memory.most_bytes and len(memory.text(prompt_key((9,)), [9], (), 100)[1]) == 12


def test_trust_follows_what_is_accepted() -> None:
    trust = Trust(CPU)
    cells_N = torch.tensor([0, COUNTS])
    assert trust.share(torch.tensor([0, -1])).tolist() == pytest.approx([FIRST_SHARES[0], 0.0])
    ones_N = torch.ones(2)
    for _ in range(300):  # Behind one token the memory knows the next one for sure, where the heads say a tenth; behind two never.
        share = trust.share(cells_N)
        owed_N = torch.stack([share[0] / (0.1 * (1 - share[0]) + share[0]), torch.zeros(())])
        trust.learn(cells_N, owed_N, ones_N, ones_N)
    assert trust.share(cells_N)[0] > 0.9 and trust.share(cells_N)[1] < 0.05
    assert trust.by_length()[:3] == [(300.0, 300.0), (300.0, 300.0), (0.0, 0.0)]
    trust.learn(torch.tensor([-1]), torch.ones(1), torch.ones(1), torch.ones(1))
    assert trust.by_length()[0] == (300.0, 300.0)


# ---- drafting from both ------------------------------------------------------------------------------------------------------------


class Stand:
    """Requests in one state, heads and a memory of some responses."""

    def __init__(self, batch: int, said: list[list[int]], form: str = "context") -> None:
        self.actor, self.batch = Actor(1), batch
        self.core: DraftingCore = self.actor.core(random_heads(form))
        self.memory = ResponseMemory(10**6)
        for response in said:
            self.memory.remember(prompt_key(PROMPT), response)
        self.trust, self.debts = Trust(CPU), Debts(batch, K, CPU)
        torch.manual_seed(0)
        self.noise_BK = torch.rand(batch, K, dtype=torch.float64)

    def recall(self) -> Recall:
        texts_1X, weight_1P = texts(self.memory)
        tails_Bn = torch.tensor([tail_of(PROMPT)]).expand(self.batch, -1)
        parts = texts_1X.expand(self.batch, -1), weight_1P.expand(self.batch, -1)
        return Recall(*parts, tails_Bn, self.trust, torch.arange(self.batch), self.debts)

    def draft(self, recall: Recall | None, slots: DraftSlots | None = None, temperature: float = 1.0) -> Drafted:
        hidden_BD, last_B = self.actor.hidden_BD.expand(self.batch, D), self.actor.last_B.expand(self.batch)
        how = Sampling(torch.full((self.batch,), temperature), self.noise_BK)
        return self.core.draft(hidden_BD, last_B, K, how, slots=slots, recall=recall)


SAID = [[4, 5, 6, 7], [4, 5, 8], [4, 9]]


def test_q_is_the_mixture_and_what_is_owed_its_part() -> None:
    stand = Stand(200, SAID)
    heads, mixed = stand.draft(None), stand.draft(stand.recall())
    w = FIRST_SHARES[2]
    expected_V = (1 - w) * heads.q[0][0]
    expected_V[4] += w
    torch.testing.assert_close(mixed.q[0][0], expected_V)
    chosen = mixed.ids_BK[:, 0] == 4
    assert 0 < chosen.sum() < 200
    torch.testing.assert_close(stand.debts.owed_KS[0], torch.where(chosen, w / expected_V[4], 0.0))
    second_BV = mixed.q[1][chosen]  # Behind three of the prompt and a 4 came 5 twice and 9 once.
    w = FIRST_SHARES[3]
    assert float(second_BV[0, 5]) > w * 2 / 3 and float(second_BV[0, 9]) > w / 3
    torch.testing.assert_close(second_BV[0].sum(), torch.tensor(1.0))
    others = mixed.ids_BK[:, 0] == 11  # Nothing followed it.
    assert (stand.debts.cells_KS[1][others] == -1).all()


def test_greedy_requests_and_draft_vocabularies() -> None:
    stand = Stand(3, SAID)
    assert torch.equal(stand.draft(stand.recall(), temperature=0.0).ids_BK, stand.draft(None, temperature=0.0).ids_BK)
    assert (stand.debts.cells_KS == -1).all()
    ids_W = torch.tensor([0, 1, 5, 8, 9])
    stand.core.use_vocabulary(ids_W, lambda rows: rows.float() @ stand.actor.lm_head_VD[ids_W].T)
    heads, mixed = stand.draft(None), stand.draft(stand.recall())
    assert torch.isin(mixed.ids_BK, ids_W).all() and torch.equal(heads.q[0], mixed.q[0]), "4 is none of them"


@pytest.mark.parametrize("honest", [True, False])
def test_tokens_have_the_models_distribution(honest: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And with a q that leaves the memory out they have not."""
    stand = Stand(MANY, SAID)
    slots = DraftSlots(MANY, K, V, CPU)
    rows_B = torch.arange(MANY)
    ids_BK = stand.draft(stand.recall(), slots).ids_BK
    slots.stamp(rows_B, stamps(rows_B, rows_B), K)
    if not honest:
        ids_BK = stand.draft(stand.recall()).ids_BK
        stand.draft(None, slots)
    p_KV = torch.randn(K + 1, V, generator=torch.Generator().manual_seed(5)).softmax(-1)
    kept = slots.look_up(rows_B, stamps(rows_B, rows_B), K)
    proposed = Proposed(kept, torch.rand(MANY, K + 1, dtype=torch.float64))
    drafts, counts = DraftRows.build(ids_BK.flatten(), [K] * MANY), [K] * MANY
    runs_B, last_B = verify_rows(p_KV.log().repeat(MANY, 1), None, drafts, counts, proposed, Rule())
    p_values = []
    for k in range(2):
        tokens = torch.where(runs_B > k, ids_BK[:, k], last_B)[runs_B >= k]
        seen_V = torch.bincount(tokens, minlength=V).double()
        p_values.append(float(chisquare(seen_V.numpy(), (p_KV[k].double() / p_KV[k].double().sum() * len(tokens)).numpy()).pvalue))
    assert min(p_values) > 1e-3 if honest else max(p_values) < 1e-6


# ---- inside an engine ------------------------------------------------------------------------------------------------------------


def request(prompt: tuple[int, ...], *said: int, ends: tuple[int, ...] = (), seed: int | None = None) -> Any:
    asked = SimpleNamespace(ignore_eos=False, all_stop_token_ids=set(ends), seed=seed)
    return SimpleNamespace(prompt_token_ids=list(prompt), output_token_ids=list(said), sampling_params=asked)


def lengths(recall: Recall) -> list[int]:
    return vote(recall._run_BP, recall._weight_BP).length_B.tolist()


def test_ended_requests_are_remembered_and_those_beside_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_file, "REFRESH", 2)
    running = RunningMemory(10**6, 2, K, 64, CPU)
    live = {"a": request(PROMPT, 4), "b": request(PROMPT, 4)}
    running.attend(["a", "b"], live)
    assert lengths(running.recall(["a", "b"])) == [0, 0], "each sees what the other has said, and nothing followed that"
    live["a"].output_token_ids += [5, 6]
    running.attend(["a", "b"], live)
    assert lengths(running.recall(["a", "b"])) == [0, 4], "a sees no token of its own"
    live["a"].output_token_ids += [0, 9]
    live["a"].sampling_params.all_stop_token_ids = {0}
    del live["a"]
    live["c"] = request(PROMPT)
    running.attend(["c", "b"], live)
    assert running.store.nbytes == OVERHEAD + 4 * 4, "what came behind the end is not remembered"
    assert lengths(running.recall(["c", "b"])) == [3, 4]
    live["d"] = request((9,))
    running.attend(["d", "b"], live)
    assert lengths(running.recall(["d", "b"])) == [0, 4], "c waits, its place is taken, and d has another prompt"
    running.attend(["c", "d"], live)
    assert lengths(running.recall(["c", "d"])) == [3, 0]


def test_a_new_policy_makes_what_was_said_older() -> None:
    running = RunningMemory(10**6, 2, K, 64, CPU)
    running.attend(["a"], {"a": request(PROMPT, 4, 5)})
    running.new_policy()
    running.attend(["b"], {"b": request(PROMPT)})
    recall = running.recall(["b"])
    assert recall._weight_BP.max() == pytest.approx(FADE), "it began with the policy before"


def test_a_request_sees_nothing_that_was_drawn_with_its_own_numbers() -> None:
    """With the seed of another request q would depend on the very numbers that drafts are drawn by."""
    running = RunningMemory(10**6, 3, K, 64, CPU)
    live = {"a": request(PROMPT, 4, seed=1), "b": request(PROMPT, seed=1), "c": request(PROMPT, seed=2)}
    running.attend(list("abc"), live)
    assert lengths(running.recall(list("abc")))[1:] == [0, 3]
    del live["a"]
    live["d"] = request(PROMPT, seed=1)
    running.attend(list("dbc"), live)
    assert lengths(running.recall(list("dbc"))) == [0, 0, 3]
    live["e"] = request(PROMPT)
    running.attend(list("ebc"), live)
    assert lengths(running.recall(list("ebc"))) == [3, 0, 3]


def test_learning_reads_the_drafts_that_were_verified() -> None:
    running = RunningMemory(10**6, 3, 2, 64, CPU)
    for response in SAID:
        running.store.remember(prompt_key(PROMPT), response)
    live = {key: request(PROMPT) for key in "abc"}
    running.attend(list("abc"), live)
    recall = running.recall(list("abc"))
    mass_BW = torch.full((3, V), 1 / V)
    recall.mix(mass_BW, torch.ones(3, 1, dtype=torch.bool))
    ids_B = torch.tensor([4, 4, 5])
    recall.follow(0, ids_B, mass_BW.gather(1, ids_B[:, None])[:, 0])
    running.settle(list("abc"), [1, 1, 0], [1, 0, 0])  # One accepted, one refused, one never verified.
    assert running.trust.by_length()[2] == (2.0, 1.0)
    assert float(running.trust.owed_C.sum()) == pytest.approx(FIRST_SHARES[2] / float(mass_BW[0, 4]))
    running.settle(list("abc"), [1, 1, 1], [1, 1, 1])
    assert running.trust.by_length()[2] == (2.0, 1.0), "nothing is learned twice"
