"""The memory of earlier responses: what it holds, what followed a suffix, what it adds to q, and
what it learns (docs/theory.md, theorem 3a).
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from torch.overrides import TorchFunctionMode

from heads.checkpoint import load_state, save_state
from heads.errors import CheckpointError
from medusa_ppo.drafting import running_memory as running_file
from medusa_ppo.drafting.core import Drafted, DraftingCore, DraftSampling
from medusa_ppo.drafting.memory import (
    EMPTY,
    FADE,
    FIRST_SHARES,
    MISSING,
    NEARER,
    OVERHEAD,
    PLACES,
    SUFFIX,
    TOPS,
    Drawn,
    Recall,
    ResponseMemory,
    Trust,
    Waiting,
    advance,
    cells_of,
    match,
    prompt_key,
    shown,
    tail_of,
    vote,
)
from medusa_ppo.drafting.noise import cumulate
from medusa_ppo.drafting.running_memory import REFRESH, RunningMemory
from medusa_ppo.drafting.slots import DraftSlots, stamps
from medusa_ppo.drafting.verify import DraftRows, Proposed, Rule, verify_rows
from tests.medusa_ppo.drafting.test_core import D, K, TableActor, V, random_heads

CPU = torch.device("cpu")
PROMPT = (3, 1, 2)
MANY = 40_000


def texts(
    memory: ResponseMemory, prompt: tuple[int, ...] = PROMPT, places: int = 500
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, weights = memory.text(prompt_key(prompt), prompt[-SUFFIX:], (), places)
    return torch.from_numpy(tokens)[None], torch.from_numpy(weights)[None]


def counted(said: list[list[int]], so_far: list[int]) -> tuple[dict[int, float], int]:
    """The slow reference: what followed suffixes of prompt and response, each occurrence by its
    length, and the longest length.
    """
    whole = [*PROMPT, *so_far]
    found = dict[int, float]()
    longest = 0
    for response in said:
        text = [*PROMPT, *response]
        for end in range(len(PROMPT), len(text)):
            length = 0
            while (
                length < min(SUFFIX, end, len(whole))
                and text[end - 1 - length] == whole[-1 - length]
            ):
                length += 1
            if length:
                found[text[end]] = found.get(text[end], 0.0) + NEARER**length
                longest = max(longest, length)
    return found, longest


def test_what_followed_suffixes_is_what_a_plain_search_finds() -> None:
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
        assert torch.equal(
            longer, match(texts_1X, torch.tensor([tail_of(PROMPT, [*so_far, next_id])]))
        )
        expected, length = counted(said, so_far)
        votes = vote(run, weight_1P)
        share_V = torch.zeros(4).index_add_(
            0, texts_1X[0, SUFFIX:].clamp_min(0).long(), votes.share_BP[0]
        )
        assert int(votes.length_B) == length
        seen.add(length)
        if expected:
            torch.testing.assert_close(
                share_V,
                torch.tensor([expected.get(token, 0.0) for token in range(4)])
                / sum(expected.values()),
            )
    assert len(seen) >= 4
    nothing = vote(match(texts_1X, torch.full((1, SUFFIX), MISSING)), weight_1P)
    assert int(nothing.length_B) == 0 and float(nothing.share_BP.sum()) == 0


def test_cells() -> None:
    lengths_B = torch.tensor([0, 1, 2, 3, 8, 9, 12])
    tops_B = torch.tensor([0.5, 0.0, 1.0, 0.99, 0.5, 0.2, 0.2])
    assert cells_of(lengths_B, tops_B).tolist() == [
        -1,
        0,
        5,
        TOPS + 5,
        3 * TOPS + 3,
        4 * TOPS + 1,
        5 * TOPS + 1,
    ]


def test_old_responses_weigh_less_and_the_budget_holds() -> None:
    memory = ResponseMemory(3 * (4 * 10 + OVERHEAD))
    memory.remember(prompt_key(PROMPT), [5] * 10)
    memory.version = 3
    memory.remember(prompt_key(PROMPT), [6] * 10)
    tokens, weights = memory.text(prompt_key(PROMPT), PROMPT, [[7, -1]], 100)
    assert tokens[:SUFFIX].tolist() == [EMPTY] * SUFFIX and len(tokens) == SUFFIX + len(weights)
    assert tokens[SUFFIX:].tolist() == [
        *PROMPT,
        7,
        -1,
        EMPTY,
        *PROMPT,
        *[6] * 10,
        EMPTY,
        *PROMPT,
        *[5] * 10,
        EMPTY,
    ]
    of_token = dict(zip(tokens[SUFFIX:].tolist(), weights.tolist(), strict=True))
    assert (
        of_token[7] == of_token[6] == 1
        and of_token[5] == pytest.approx(FADE**3)
        and of_token[EMPTY] == of_token[1] == 0
    )
    assert len(memory.text(prompt_key(PROMPT), PROMPT, (), 20)[1]) == 14, "the newest that fit"
    others = [(9,), (10,)]
    for prompt in others:
        memory.remember(prompt_key(prompt), [8] * 10)
    assert memory.nbytes <= memory.most_bytes
    assert len(memory.text(prompt_key(PROMPT), PROMPT, (), 100)[1]) == 14, (
        "the prompt that waited longest forgets its oldest"
    )
    memory.remember(prompt_key(PROMPT), [1] * 10_000)
    assert (
        memory.nbytes <= memory.most_bytes
        and len(memory.text(prompt_key((9,)), [9], (), 100)[1]) == 12
    )


def test_long_responses_count_by_their_last_part_and_hide_none() -> None:
    memory = ResponseMemory(10**6)
    memory.remember(prompt_key(PROMPT), [4, 5, 6])
    memory.remember(prompt_key(PROMPT), list(range(1000, 1300)))
    memory.remember(prompt_key(PROMPT), list(range(2000, 2300)))
    tokens, weights = memory.text(prompt_key(PROMPT), PROMPT, (), 90)
    expected = [*range(2271, 2300), EMPTY, *range(1271, 1300), EMPTY, *PROMPT, 4, 5, 6, EMPTY]
    assert tokens[SUFFIX:].tolist() == expected
    voting = {4, 5, 6, *range(1271, 1300), *range(2271, 2300)}
    assert [weight > 0 for weight in weights] == [token in voting for token in expected]
    beside = [list(range(3000, 3300)), list(range(4000, 4300))]
    siblings = memory.text(prompt_key((9,)), (9,), beside, 90)[0][SUFFIX:].tolist()
    assert siblings == [*range(3256, 3300), EMPTY, *range(4256, 4300), EMPTY]
    assert len(memory.text(prompt_key((9,)), (9,), beside, SUFFIX)[1]) == 0, "too short to say much"
    memory.remember(prompt_key((9,)), range(PLACES + 500))
    kept = memory.text(prompt_key((9,)), (9,), (), 90)[0][SUFFIX:].tolist()
    assert kept == [*range(PLACES + 411, PLACES + 500), EMPTY]
    assert memory.nbytes < 10**5, "more than any text holds is not kept"


def test_very_old_responses_get_the_room_that_new_ones_leave() -> None:
    """Ten epochs of eight responses each, of which nine have next to no weight."""
    memory = ResponseMemory(10**8)
    key = prompt_key(PROMPT)
    for epoch in range(10):
        memory.version = 60 * epoch
        for number in range(8):
            memory.remember(key, [100 * epoch + number] * 10_000)
    tokens, weights = memory.text(key, PROMPT, (), PLACES)
    newest = tokens[SUFFIX:] >= 900
    assert newest.sum() > 0.9 * PLACES and (weights[newest] == 1.0).all()
    # Where there is room, they are shown: nothing newer may match.
    memory = ResponseMemory(10**8)
    for version, token in ((0, 5), (60, 6)):
        memory.version = version
        memory.remember(key, [token] * 10)
    tokens, weights = memory.text(key, PROMPT, (), 100)
    assert tokens[SUFFIX:].tolist() == [*PROMPT, *[6] * 10, EMPTY, *PROMPT, *[5] * 10, EMPTY]
    assert weights[tokens[SUFFIX:] == 5].tolist() == pytest.approx([FADE**60] * 10)


class OtherOrder(TorchFunctionMode):
    """Additions into a tensor come last to first, as a GPU's atomic ones may."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.scatter_add_, torch.Tensor.index_add_):
            into, dim, index, values = args
            args = (into, dim, index.flip(-1), values.flip(dim))
        return func(*args, **(kwargs or {}))


def test_ranks_mix_and_learn_to_the_same_bits_whatever_the_order_of_additions() -> None:
    """Each rank of one engine verifies by itself: another rounding is another token there."""
    torch.manual_seed(3)
    said = [torch.randint(4, (60,)).tolist() for _ in range(12)]
    found = []
    for order in (nullcontext(), OtherOrder()):
        stand = MemoryStand(8, said)
        texts_1X, weight_1P = texts(stand.memory)
        weight_BP = torch.rand(8, weight_1P.shape[1], generator=torch.Generator().manual_seed(1))
        tails_Bn = torch.stack([torch.tensor(tail_of((), [row % 4])) for row in range(8)])
        recall = Recall(
            texts_1X.expand(8, -1),
            weight_BP * (weight_1P > 0),
            tails_Bn,
            stand.trust,
            torch.arange(8),
            stand.waiting,
        )
        generator = torch.Generator().manual_seed(2)
        mass_BW = torch.rand(8, V, generator=generator).softmax(-1)
        parts = torch.rand(4, 500, generator=generator)
        cells_N = torch.randint(0, 36, (500,), generator=generator)
        with order:
            recall.mix(mass_BW, torch.ones(8, 1, dtype=torch.bool))
            for _ in range(3):
                stand.trust.learn(
                    Drawn(cells_N, parts[0], parts[1], parts[2], 1 / parts[3]), parts[0], parts[1]
                )
        found.append((mass_BW, stand.trust._accepted_CG.clone(), stand.trust._share_C))
    for mine, other in zip(*found, strict=True):
        assert torch.equal(mine, other)


OF = {"tokenizer": b"t" * 32, "actor": b"a" * 32}


def filled() -> ResponseMemory:
    memory = ResponseMemory(10_000)
    memory.version = 4
    for key, tokens, version, seed in (
        (PROMPT, [5, 6], 1, 7),
        ((9,), [8], 4, None),
        (PROMPT, [2, 2, 2], 3, 0),
    ):
        memory.remember(prompt_key(key), tokens, version, seed)
    return memory


def test_what_one_memory_holds_goes_into_another_with_its_age() -> None:
    memory = filled()
    other = ResponseMemory(10_000)
    other.version = 10
    other.take(json.loads(json.dumps(memory.rows())))
    assert other.rows() == memory.rows() and other.nbytes == memory.nbytes
    assert [(age, seed, tokens) for _, age, seed, tokens in other.rows()] == [
        (0, None, [8]),
        (3, 7, [5, 6]),
        (1, 0, [2, 2, 2]),
    ]
    mine, theirs = (
        [part.tolist() for part in one.text(prompt_key(PROMPT), PROMPT, (), 100)]
        for one in (memory, other)
    )
    assert (
        mine == theirs and pytest.approx(min(weight for weight in theirs[1] if weight)) == FADE**3
    )
    small = ResponseMemory(2 * OVERHEAD + 30)
    small.take(memory.rows())
    assert small.nbytes <= small.most_bytes and [row[3] for row in small.rows()] == [
        [5, 6],
        [2, 2, 2],
    ], "what was heard last stays"


def test_a_saved_memory_is_the_same_memory_in_the_new_budget(tmp_path: Path) -> None:
    memory = filled()
    save_state(tmp_path / "memory.safetensors", memory.state_dict(OF))
    again = ResponseMemory(10_000)
    again.remember(prompt_key((1,)), [1])
    again.load_state_dict(load_state(tmp_path / "memory.safetensors"), OF)
    assert (again.rows(), again.version, again.nbytes) == (memory.rows(), 4, memory.nbytes)
    small = ResponseMemory(2 * OVERHEAD + 30)
    small.load_state_dict(load_state(tmp_path / "memory.safetensors"), OF)
    assert small.nbytes <= small.most_bytes and len(small.rows()) == 2
    save_state(tmp_path / "empty.safetensors", ResponseMemory(100).state_dict(OF))
    again.load_state_dict(load_state(tmp_path / "empty.safetensors"), OF)
    assert not again.rows() and not again.nbytes


@pytest.mark.parametrize("name", OF)
def test_a_memory_of_something_else_is_refused(name: str) -> None:
    memory = filled()
    state = filled().state_dict(OF)
    rows = memory.rows()
    with pytest.raises(CheckpointError, match=f"another {name}") as caught:
        memory.load_state_dict(state, {**OF, name: b"x" * 32})
    assert (
        all(word in str(caught.value) for word in ("given:", "expected:", "do this:"))
        and memory.rows() == rows
    )


@pytest.mark.parametrize("name", ["tokens", "table", "keys", "version", "place"])
def test_a_damaged_memory_is_refused(name: str) -> None:
    state = filled().state_dict(OF)
    if name == "place":
        state["table"][0, 4] = 2
    elif name == "tokens":
        state["tokens"] = state["tokens"][1:]
    else:
        del state[name]
    with pytest.raises(CheckpointError, match="damaged"):
        ResponseMemory(10_000).load_state_dict(state, OF)


def test_trust_finds_the_share_with_which_most_is_accepted() -> None:
    """Two cells in which p is a given mixture of the sources, drafts being drawn from whatever
    mixture serves.
    """
    torch.manual_seed(0)
    heads_V = torch.tensor([0.7, 0.1, 0.1, 0.1])
    memory_V = torch.tensor([0.0, 0.5, 0.5, 0.0])
    best = (0.1, 0.8)
    trust = Trust(CPU)
    cells_C = torch.tensor([0, TOPS])
    assert trust.share(torch.tensor([0, -1])).tolist() == pytest.approx([FIRST_SHARES[0], 0.0])
    for _ in range(300):
        for cell, share in zip(cells_C, best, strict=True):
            p_V = torch.lerp(heads_V, memory_V, share)
            q_V = torch.lerp(heads_V, memory_V, float(trust.share(cell[None])))
            drawn_N = torch.multinomial(q_V, 8, replacement=True)
            parts = heads_V[drawn_N], memory_V[drawn_N], p_V[drawn_N], 1 / q_V[drawn_N]
            trust.learn(
                Drawn(cell.expand(8), *parts), torch.ones(8), (p_V / q_V)[drawn_N].clamp_max(1)
            )
    assert trust.share(cells_C).tolist() == pytest.approx(best)
    assert [offered for offered, _ in trust.by_length()[:3]] == [2400.0, 2400.0, 0.0]
    assert trust.by_length()[0][1] > 0.9 * 2400
    trust.learn(Drawn(torch.tensor([-1]), *torch.ones(4, 1)), torch.ones(1), torch.ones(1))
    assert trust.by_length()[0][0] == 2400.0


# ---- drafting from both


class MemoryStand:
    """Requests in one state, heads and a memory of some responses."""

    def __init__(self, batch: int, said: list[list[int]], form: str = "context") -> None:
        self.actor = TableActor(1)
        self.batch = batch
        self.core: DraftingCore = self.actor.core(random_heads(form))
        self.memory = ResponseMemory(10**6)
        for response in said:
            self.memory.remember(prompt_key(PROMPT), response)
        self.trust = Trust(CPU)
        self.waiting = Waiting(batch, K, CPU)
        torch.manual_seed(0)
        self.noise_BK = torch.rand(batch, K, dtype=torch.float64)

    def recall(self) -> Recall:
        texts_1X, weight_1P = texts(self.memory)
        tails_Bn = torch.tensor([tail_of(PROMPT)]).expand(self.batch, -1)
        parts = texts_1X.expand(self.batch, -1), weight_1P.expand(self.batch, -1)
        return Recall(*parts, tails_Bn, self.trust, torch.arange(self.batch), self.waiting)

    def draft(
        self, recall: Recall | None, slots: DraftSlots | None = None, temperature: float = 1.0
    ) -> Drafted:
        hidden_BD = self.actor.hidden_BD.expand(self.batch, D)
        last_B = self.actor.last_B.expand(self.batch)
        how = DraftSampling(torch.full((self.batch,), temperature), self.noise_BK)
        return self.core.draft(hidden_BD, last_B, K, how, slots=slots, recall=recall)


SAID = [[4, 5, 6, 7], [4, 5, 8], [4, 9]]


def share_at(stand: MemoryStand, length: int, q_V: torch.Tensor) -> float:
    return float(stand.trust.share(cells_of(torch.tensor([length]), q_V.max()[None])))


def test_q_is_the_mixture_and_its_parts_wait() -> None:
    stand = MemoryStand(200, SAID)
    stand.actor.lm_head_VD /= 6  # Flat enough for any token.
    heads = stand.draft(None)
    mixed = stand.draft(stand.recall())
    w = share_at(stand, 3, heads.q[0][0])
    expected_V = (1 - w) * heads.q[0][0]
    expected_V[4] += w
    torch.testing.assert_close(mixed.q[0][0], expected_V)
    first_B = mixed.ids_BK[:, 0]
    chosen = first_B == 4
    assert 0 < chosen.sum() < 200
    waiting_B3 = stand.waiting.q_KS3[0]
    torch.testing.assert_close(waiting_B3[:, 0], heads.q[0][0][first_B], atol=1e-5, rtol=1e-4)
    assert waiting_B3[:, 1].tolist() == chosen.float().tolist()
    torch.testing.assert_close(waiting_B3[:, 2], expected_V[first_B])
    second_V = mixed.q[1][chosen][0]  # Behind three of the prompt and a 4 came 5 twice and 9 once.
    assert float(second_V[5] - second_V[9]) > 0.02 and float(second_V[9]) > 0.03
    torch.testing.assert_close(second_V.sum(), torch.tensor(1.0))
    assert (stand.waiting.cells_KS[1][first_B == 11] == -1).all(), "nothing followed it"


def test_greedy_requests_and_draft_vocabularies() -> None:
    stand = MemoryStand(3, SAID)
    assert torch.equal(
        stand.draft(stand.recall(), temperature=0.0).ids_BK,
        stand.draft(None, temperature=0.0).ids_BK,
    )
    assert (stand.waiting.cells_KS == -1).all()
    ids_W = torch.tensor([0, 1, 5, 8, 9])
    stand.core.use_vocabulary(ids_W, lambda rows: rows.float() @ stand.actor.lm_head_VD[ids_W].T)
    heads = stand.draft(None)
    mixed = stand.draft(stand.recall())
    assert torch.isin(mixed.ids_BK, ids_W).all() and torch.equal(heads.q[0], mixed.q[0]), (
        "4 is none of them"
    )


@pytest.mark.parametrize("honest", [True, False])
def test_tokens_have_the_models_distribution(honest: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And with a q that leaves the memory out they have not."""
    stand = MemoryStand(MANY, SAID)
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
    drafts = DraftRows.build(ids_BK.flatten(), [K] * MANY)
    counts = [K] * MANY
    runs_B, last_B = verify_rows(p_KV.log().repeat(MANY, 1), None, drafts, counts, proposed, Rule())
    p_values = []
    for k in range(2):
        tokens = torch.where(runs_B > k, ids_BK[:, k], last_B)[runs_B >= k]
        seen_V = torch.bincount(tokens, minlength=V).double()
        p_values.append(
            float(
                chisquare(
                    seen_V.numpy(),
                    (p_KV[k].double() / p_KV[k].double().sum() * len(tokens)).numpy(),
                ).pvalue
            )
        )
    assert min(p_values) > 1e-3 if honest else max(p_values) < 1e-6


# ---- inside an engine


def request(
    prompt: tuple[int, ...], *said: int, ends: tuple[int, ...] = (), seed: int | None = None
) -> Any:
    asked = SimpleNamespace(ignore_eos=False, all_stop_token_ids=set(ends), seed=seed)
    return SimpleNamespace(
        prompt_token_ids=list(prompt), output_token_ids=list(said), sampling_params=asked
    )


def lengths(recall: Recall) -> list[int]:
    return vote(recall._run_BP, recall._weight_BP).length_B.tolist()


def test_ended_requests_are_remembered_and_those_beside_are_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(running_file, "REFRESH", 2)
    running = RunningMemory(10**6, 2, K, 64, CPU)
    live = {"a": request(PROMPT, 4), "b": request(PROMPT, 4)}
    running.attend(["a", "b"], live)
    assert lengths(running.recall(["a", "b"])) == [
        0,
        0,
    ], "each sees what the other has said, and nothing followed that"
    live["a"].output_token_ids += [5, 6]
    running.attend(["a", "b"], live)
    assert lengths(running.recall(["a", "b"])) == [0, 0], "not yet"
    assert lengths(running.recall(["b", "a"])) == [0, 0], "a is renewed first"
    assert lengths(running.recall(["b", "a"])) == [4, 0], "a sees no token of its own"
    live["a"].output_token_ids += [0, 9]
    live["a"].sampling_params.all_stop_token_ids = {0}
    del live["a"]
    live["c"] = request(PROMPT)
    running.attend(["c", "b"], live)
    assert running.store.nbytes == OVERHEAD + 4 * 4, "what came behind the end is not remembered"
    assert lengths(running.recall(["c", "b"])) == [3, 4]
    live["d"] = request((9,))
    running.attend(["d", "b"], live)
    assert lengths(running.recall(["d", "b"])) == [
        0,
        4,
    ], "c waits, its place is taken, and d has another prompt"
    running.attend(["c", "d"], live)
    assert lengths(running.recall(["c", "d"])) == [3, 0]


def test_another_request_with_the_same_id_is_another_request() -> None:
    """Callers may number their requests in each call anew."""
    running = RunningMemory(10**6, 2, K, 64, CPU)
    running.store.remember(prompt_key((9,)), [4, 5], seed=2)
    first = request(PROMPT, 4, 5, 6, seed=1)
    running.attend(["0"], {"0": first})
    assert lengths(running.recall(["0"])) == [0]
    running.attend(["0"], {"0": request((9,), 4, seed=3)})
    assert running.store.nbytes == 2 * OVERHEAD + 4 * (2 + 3), "the first one has ended"
    assert lengths(running.recall(["0"])) == [2], "it sees what was said to its own prompt"
    running.attend(["0"], {"0": request((9,), 4, seed=2)})
    assert lengths(running.recall(["0"])) == [0], "and nothing of its own seed"


@pytest.mark.parametrize("seeded", [False, True])
def test_texts_are_renewed_in_turn_an_eighth_in_each_step(
    seeded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device waits meanwhile. 20 requests to three prompts, whose finished responses are
    prepared once for all of them.
    """
    running = RunningMemory(10**6, 24, K, 400, CPU)
    prompts = [(1, 2), (3, 4), (5, 6)]
    for number, prompt in enumerate(prompts):
        for length in (30, 60, 90):
            said = list(range(1000 * number, 1000 * number + length))
            running.store.remember(prompt_key(prompt), said, seed=0)
    live = {
        str(place): request(prompts[place // 8], *[place] * (20 + place), seed=place % 3)
        for place in range(20)
    }
    if not seeded:
        for one in live.values():
            one.sampling_params.seed = None
    keys = list(live)
    written: list[list[str]] = []
    lay_out = RunningMemory._lay_out

    def noted(self: RunningMemory, request_ids: list[str]) -> None:
        written.append(list(request_ids))
        lay_out(self, request_ids)

    monkeypatch.setattr(RunningMemory, "_lay_out", noted)
    built: list[bytes] = []
    finished = ResponseMemory.finished

    def counted(self: ResponseMemory, key: bytes, *rest: Any) -> Any:
        built.append(key)
        return finished(self, key, *rest)

    monkeypatch.setattr(ResponseMemory, "finished", counted)
    running.attend(keys, live)
    running.recall(keys)
    assert written == [keys]
    if not seeded:
        assert len(built) == 3, "once for each prompt"
    for step in range(40):
        for one in live.values():
            one.output_token_ids.append(7)
        # In another order, as a batch may have in each step.
        running.attend(keys, live)
        running.recall(keys[step % 20 :] + keys[: step % 20])
    assert all(len(some) <= 3 for some in written[1:])
    last = {key: max(n for n, some in enumerate(written) if key in some) for key in keys}
    assert min(last.values()) > len(written) - 2 * REFRESH, "each in its turn"
    for key in keys:
        met = running._met[key]
        others = [
            one.output_token_ids[: len(one.output_token_ids) - len(written) + 1 + last[key]]
            for other, one in live.items()
            if other != key
            and one.prompt_token_ids == met.request.prompt_token_ids
            and not (seeded and one.sampling_params.seed == met.seed)
        ]
        tokens, weights = running.store.text(met.key, met.tail, others, 400, met.seed)
        slot = running._slots[key]
        written_X = running._tokens_SX[slot]
        length = running._lengths[slot]
        place = len(shown([(said, 1.0) for said in others], met.tail, 200).weights)
        assert place > 100
        assert written_X[: SUFFIX + place].tolist() == tokens[: SUFFIX + place].tolist()
        assert running._weight_SP[slot, :place].tolist() == weights[:place].tolist()
        assert (written_X[SUFFIX + length :] == EMPTY).all()
        assert (running._weight_SP[slot, length:] == 0).all()
        if seeded:
            assert written_X[: SUFFIX + length].tolist() == tokens.tolist()


def test_a_new_policy_makes_what_was_said_older() -> None:
    running = RunningMemory(10**6, 2, K, 64, CPU)
    running.attend(["a"], {"a": request(PROMPT, 4, 5)})
    running.new_policy()
    running.attend(["b"], {"b": request(PROMPT)})
    recall = running.recall(["b"])
    assert recall._weight_BP.max() == pytest.approx(FADE), "it began with the policy before"


def test_a_request_sees_nothing_that_was_drawn_with_its_own_numbers() -> None:
    """With the seed of another request q would depend on the very numbers that drafts are drawn
    by.
    """
    running = RunningMemory(10**6, 3, K, 64, CPU)
    live = {
        "a": request(PROMPT, 4, seed=1),
        "b": request(PROMPT, seed=1),
        "c": request(PROMPT, seed=2),
    }
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
    logits_NV = torch.zeros(3, V)
    learned: list[Drawn] = []
    running.trust.learn = lambda drawn, offered, taken: learned.append(drawn)
    running.judge(logits_NV, torch.tensor([0, 2]), torch.tensor([4, 4]), [1, 1, 0], torch.ones(3))
    running.settle(list("abc"), [1, 1, 0])  # The third was never verified.
    drawn = learned[0]
    q = float(mass_BW[0, 4])
    assert drawn.weight.tolist() == pytest.approx([1 / q, 1 / q, 0, 0, 0, 0]) and drawn.p[
        :2
    ].tolist() == pytest.approx([1 / V] * 2)
    assert drawn.heads[:2].tolist() == pytest.approx([1 / V] * 2) and drawn.memory[:2].tolist() == [
        1,
        1,
    ]
    assert (drawn.cells[:2] >= 0).all()
    running.settle(list("abc"), [1, 1, 1])
    assert len(learned) == 1, "what was not judged is not learned from"
    running.judge(
        logits_NV, torch.tensor([0, 1, 2]), torch.tensor([4, 4, 4]), [1, 1, 1], torch.ones(3)
    )
    running.settle(list("abc"), [1, 1, 1])
    assert (learned[1].cells == -1).all(), "nothing is learned twice"


def test_what_a_block_accepts_of_each_share_is_learned_from_all_its_drafts() -> None:
    """The sum over tokens of min(w p, q), w the weight of the drafts before; and the chances that a
    draft is reached and taken are what verification counts.
    """
    many = 1000
    torch.manual_seed(0)
    running = RunningMemory(10**6, many, 2, 64, CPU)
    for response in SAID:
        running.store.remember(prompt_key(PROMPT), response)
    keys = [str(row) for row in range(many)]
    running.attend(keys, {key: request(PROMPT) for key in keys})
    recall = running.recall(keys)
    heads_KV = torch.randn(2, V).softmax(-1)
    p_KV = torch.randn(3, V).softmax(-1)
    slots = DraftSlots(many, 2, V, CPU)
    rows_B = torch.arange(many)
    places = slots.places(2, many)
    ids = []
    for k in range(2):
        mass_BW = heads_KV[k].repeat(many, 1)
        recall.mix(mass_BW, torch.ones(many, 1, dtype=torch.bool))
        cumulate(mass_BW, places.cumulative[k])
        ids_B = torch.multinomial(mass_BW, 1)[:, 0]
        places.columns[k].copy_(ids_B.unsqueeze(1))
        recall.follow(k, ids_B, mass_BW.gather(1, ids_B[:, None])[:, 0])
        ids.append(ids_B)
    slots.stamp(rows_B, stamps(rows_B, rows_B), 2)
    kept = slots.look_up(rows_B, stamps(rows_B, rows_B), 2)
    drafts = DraftRows.build(torch.stack(ids, 1).flatten(), [2] * many)
    counts = [2] * many
    logits_NV = p_KV.log().repeat(many, 1)
    reached = torch.zeros(3, dtype=torch.float64)
    for _ in range(50):
        proposed = Proposed(kept, torch.rand(many, 3, dtype=torch.float64))
        runs_B, _ = verify_rows(logits_NV, None, drafts, counts, proposed, Rule())
        reached += torch.stack([(runs_B >= k).double().mean() for k in range(3)]) / 50
    learned: list[tuple[Drawn, torch.Tensor, torch.Tensor]] = []
    running.trust.learn = lambda *given: learned.append(given)
    rows_T = drafts.rows_BK.flatten()
    ids_T = drafts.draft_ids_BK.flatten()
    running.judge(logits_NV, rows_T, ids_T, [2] * many, torch.ones(many))
    running.settle(keys, [2] * many)
    _, offered_N, taken_N = learned[0]
    for chance_N, share in (
        (offered_N[many:], reached[1]),
        (taken_N[:many], reached[1]),
        (taken_N[many:], reached[2]),
    ):
        assert float(chance_N.mean()) == pytest.approx(float(share), abs=0.03)
