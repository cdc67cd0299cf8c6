"""One step of the V2 speculator on tensors, without the engine: what is verified against."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from heads.checkpoint import save_state
from heads.copying import Texts
from heads.heads_config import HeadsConfig
from heads.modules import MedusaHeads

pytest.importorskip("vllm")
pytest.importorskip("vllm.v1.worker.gpu.model_runner")

from medusa_ppo.drafting import q_rows, sending
from medusa_ppo.drafting.choice import DraftChooser
from medusa_ppo.drafting.core import DraftingCore
from medusa_ppo.drafting.memory import prompt_key
from medusa_ppo.drafting.noise import keys_of
from medusa_ppo.drafting.q_rows import VerifiedRows
from medusa_ppo.drafting.slots import DraftSlots
from medusa_ppo.drafting.stopping import Stopping
from medusa_ppo.drafting.texts import Copier, TextRing
from medusa_ppo.vllm_plugin import proposer
from medusa_ppo.vllm_plugin.confirm import fingerprint
from medusa_ppo.vllm_plugin.cost_key import cost_key
from medusa_ppo.vllm_plugin.running_requests import Admitted
from medusa_ppo.vllm_plugin.speculator import (
    DraftsToVerify,
    HeldHeads,
    MedusaSpeculator,
    in_parts_of_our_size,
    with_as_many_drafts,
    with_q_as_it_is_read,
    without_learning,
)
from medusa_ppo.vllm_plugin.worker_calls import Drafting
from tests.medusa_ppo.vllm_plugin.deep_sleep import tensors_of, throw_away

pytestmark = pytest.mark.usefixtures("one_rank")
D, V, K, B, SLOTS = 8, 1 << 14, 2, 3, 5


class Step:
    """A speculator, and a batch of three requests, the last of which is greedy."""

    def __init__(self, pairs: int = 0, copy_parts: int = 0) -> None:
        torch.manual_seed(0)
        config = HeadsConfig(D, V, K, kind="hydra", context=pairs, copy_parts=copy_parts)
        heads = MedusaHeads(config).requires_grad_(False)
        for parameter in heads.parameters():
            parameter.copy_(torch.randn_like(parameter) / 4)
        lm_head_VD, table_VD = torch.randn(V, D) / 2, torch.randn(V, D)
        drafter: Any = object.__new__(HeldHeads)
        drafter._embedding = lambda: lambda ids: table_VD[ids]
        drafter._core = DraftingCore(heads, lambda rows: rows @ lm_head_VD.T, drafter._embedding())
        drafter.num_drafts = drafter.num_speculative_tokens = K
        drafter.fed, drafter.sampled, drafter._untrained = True, True, False
        drafter.draft_temperature = 1.0
        drafter.choose, drafter.chooser, drafter._step_began = False, DraftChooser(K), None
        drafter.device, drafter.dtype, drafter.hidden_size = torch.device("cpu"), torch.float32, D
        drafter.heads, drafter._target = heads, torch.nn.Module()
        drafter._lm_head = lambda rows: rows @ lm_head_VD.T
        drafter.vllm_config = SimpleNamespace(
            scheduler_config=SimpleNamespace(max_num_seqs=SLOTS),
            model_config=SimpleNamespace(max_model_len=64),
        )
        drafter.draft_vocabulary = drafter._new_vocabulary(0)
        drafter._slots = DraftSlots(SLOTS, K, V, drafter.device)
        drafter._make_ring()
        speculator: Any = object.__new__(MedusaSpeculator)
        speculator.drafter, speculator.states = drafter, None
        speculator.num_speculative_steps, speculator.vocab_size = K, V
        speculator.max_num_reqs, speculator.device = SLOTS, torch.device("cpu")
        speculator.lengths_B = None
        speculator.count = 0
        speculator._grammar_S = torch.zeros(SLOTS + 1, dtype=torch.bool)
        speculator._grammar_S[-1] = True
        speculator._requests_S = torch.arange(SLOTS + 1)
        speculator._keys_S = keys_of(torch.arange(SLOTS + 1))
        speculator.draft_logits = DraftsToVerify(drafter, speculator._requests_S, V)
        self.speculator = speculator
        self.states_seed = 1
        self.sampled_B = torch.ones(B, dtype=torch.int64)
        speculator._temperature_S = torch.tensor([1.0, 0.7, 1.0, 0.0, 1.0, 0.0])
        self.temperature_S = speculator._temperature_S[:SLOTS]
        self.batch = SimpleNamespace(
            num_reqs=B,
            req_ids=["a", "b", "c"],
            idx_mapping=torch.tensor([1, 4, 3]),
            idx_mapping_np=np.array([1, 4, 3]),
            query_start_loc=torch.arange(B + 1),
            positions=torch.arange(B) + 9,
            input_ids=torch.arange(B),
            cu_num_logits_np=np.arange(B + 1),
            num_tokens=B,
        )

    def propose(
        self, dummy_run: bool = False, num_speculative_tokens: int | None = None
    ) -> torch.Tensor:
        nothing_B = torch.zeros(B, dtype=torch.int64)
        return self.speculator.propose(
            self.batch,
            None,
            None,
            torch.randn(8, D, generator=torch.Generator().manual_seed(self.states_seed)),
            None,
            self.sampled_B,
            nothing_B,
            torch.arange(SLOTS).unsqueeze(1),
            None,
            None,  # Its address changes with each step; what was admitted counts.
            torch.arange(SLOTS),
            dummy_run,
            num_speculative_tokens,
        )

    def verified(self, ids_BK: torch.Tensor) -> torch.Tensor:
        """What the next step verifies the drafts of the first two requests against, `[2, K, V]`."""
        places_T = torch.arange(K + 1).repeat(2)
        # The token that was sampled last stands one after the last step's.
        first_2 = self.batch.positions[self.batch.query_start_loc[1:3] - 1] + 1
        rows = VerifiedRows(
            self.batch.idx_mapping[:2].repeat_interleave(K + 1),
            places_T,
            first_2.repeat_interleave(K + 1) + places_T,
            torch.cat([torch.zeros(2, 1, dtype=torch.int64), ids_BK[:2]], dim=1).flatten(),
        )
        seeds_S = torch.arange(SLOTS)
        found = self.speculator.draft_logits.by_row(rows, self.temperature_S, seeds_S)
        return found.table_TKV[[0, K + 1]].clone()


def test_what_is_verified_against_is_what_was_drawn_from() -> None:
    """Not what the drawing was rounded from: with many tokens the rounding of their cumulative sums
    moves each q by some thousandths, and verification would not see it.
    """
    step = Step()
    found_2KV = step.verified(step.propose())
    slots = step.speculator.drafter.slots
    for row, slot in enumerate([1, 4]):
        temperature = float(step.temperature_S[slot])
        for k in range(K):
            drawn_V = slots.q(torch.tensor([row]), torch.tensor([k]))[0]
            kept_V = (found_2KV[row, k] / temperature).softmax(-1)
            assert torch.equal(kept_V > 0, drawn_V > 0)
            torch.testing.assert_close(kept_V, drawn_V, rtol=1e-5, atol=0)


@pytest.mark.parametrize("why", ["greedy", "grammar", "returned", "moved on", "sat out", "dummy"])
def test_drafts_whose_q_is_not_kept_are_one_hot(why: str) -> None:
    step = Step()
    speculator = step.speculator
    if why == "greedy":
        step.temperature_S[1] = 0.0
    if why == "grammar":
        speculator._grammar_S[1] = True
    ids_BK = step.propose()
    if why == "returned":
        speculator._requests_S[1] = 99
    if why == "moved on":
        step.batch.positions = step.batch.positions + 1
    if why == "sat out":
        slots = step.batch.idx_mapping
        step.batch.idx_mapping = torch.tensor([2, 4, 3])
        step.propose()
        step.batch.idx_mapping = slots
    if why == "dummy":
        step.propose(dummy_run=True)
    found_KV = step.verified(ids_BK)[0]
    assert found_KV.isfinite().sum(1).tolist() == [1] * K
    assert found_KV.argmax(1).tolist() == ids_BK[0].tolist()


@pytest.mark.parametrize("untrained", [False, True])
def test_a_dummy_run_takes_the_path_that_serves(
    untrained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM profiles memory by it: what is drawn with, and a table as large as that of a step. Heads
    that are trained later need as much, and so do more drafts.
    """
    step = Step()
    step.speculator.drafter._untrained = untrained
    step.speculator.drafter.num_drafts = 0 if untrained else K
    asked = []
    made = []
    draft, table_of = DraftingCore.draft, q_rows.table_of

    def seen(self: DraftingCore, *args: Any, **named: Any) -> Any:
        asked.append(args[3] if len(args) > 3 else None)
        return draft(self, *args, **named)

    def made_too(*args: Any) -> torch.Tensor:
        table = table_of(*args)
        made.append(tuple(table.shape))
        return table

    monkeypatch.setattr(DraftingCore, "draft", seen)
    monkeypatch.setattr("medusa_ppo.vllm_plugin.q_kernel.table_of", made_too)
    step.propose(dummy_run=True)
    assert asked[0] is not None, "drawn, as in service"
    assert made == [(B * (K + 1), K, V)]
    step.speculator.draft_logits.rows_at_once = 4
    step.propose(dummy_run=True)
    assert made[1:] == [(4, K, V)]


def test_a_dummy_run_searches_texts_as_large_as_those_of_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = Step(pairs=4, copy_parts=2)
    searched: list[tuple[int, ...]] = []
    find = Copier.find

    def seen(self: Copier, ring: TextRing, slots_B: torch.Tensor, *rest: Any) -> torch.Tensor:
        searched.append((len(slots_B), ring.places))
        return find(self, ring, slots_B, *rest)

    monkeypatch.setattr(Copier, "find", seen)
    step.propose(dummy_run=True)
    step.propose()
    assert len(searched) == 2 and searched[0] == searched[1]


class Asked:
    """Stands for V2's `rejection_sample`, whose kernels need Triton: notes what it is given."""

    def __call__(
        self, target_TV: Any, table: Any, sampled_T: Any, cu: Any, pos: Any, *rest: Any
    ) -> None:
        self.table = table
        self.mapping_B, self.mapping_T, self.places_T, self.temperature, self.seed = rest[:5]


@pytest.mark.parametrize("sampled", [True, False])
def test_kernels_find_rows_by_a_requests_first(sampled: bool) -> None:
    """Requests with two, no and one drafts: by slot, all the numbers are others."""
    step = Step()
    if not sampled:
        step.speculator.drafter.sampled, step.speculator.drafter._slots = False, None
    ids_BK = step.propose()
    counts, cu = [2, 0, 1], torch.tensor([0, 3, 4, 6], dtype=torch.int32)
    places_T = torch.tensor([0, 1, 2, 0, 0, 1], dtype=torch.int32)
    slots_B = step.batch.idx_mapping.int()
    slots_T = slots_B.repeat_interleave(torch.tensor(counts) + 1)
    ids_T = torch.tensor([0, *ids_BK[0].tolist(), 0, 0, int(ids_BK[2, 0])])
    pos_T = (step.batch.positions + 1).repeat_interleave(torch.tensor(counts) + 1) + places_T
    seeds_S = torch.arange(SLOTS) + 100
    asked = Asked()
    with_q_as_it_is_read(asked)(
        torch.zeros(6, V), step.speculator.draft_logits, ids_T, cu, pos_T, slots_B, slots_T,
        places_T, step.temperature_S, seeds_S, K,
    )  # fmt: skip
    if not sampled:
        assert asked.table is None, "one-hot drafts need no table"
        assert asked.mapping_B is slots_B and asked.seed is seeds_S
        return
    for request, first in enumerate(cu[:3].tolist()):
        assert int(asked.mapping_B[request]) == first
        assert asked.mapping_T[first : first + counts[request] + 1].tolist() == [first] * (
            counts[request] + 1
        )
        slot = int(slots_B[request])
        assert float(asked.temperature[first]) == float(step.temperature_S[slot])
        assert int(asked.seed[first]) == slot + 100
    torch.testing.assert_close(asked.table[0], step.verified(ids_BK)[0], rtol=0, atol=0)
    greedy_V = asked.table[4, 0]
    assert greedy_V.isfinite().nonzero().flatten().tolist() == [int(ids_BK[2, 0])]


def test_as_many_rows_are_verified_at_a_time_as_the_table_may_have() -> None:
    step = Step()
    seen: list[int] = []

    def verify(self: Any, *args: Any) -> None:
        seen.append(args[5])

    wrapped = in_parts_of_our_size(verify)
    ours = step.speculator.draft_logits
    for draft_logits, limit in ((ours, 1 << 20), (ours, 3), (None, 1 << 20)):
        wrapped(None, None, None, draft_logits, None, None, limit, 5)
    assert seen == [q_rows.TABLE_BYTES // (4 * V), 3, 1 << 20]


def test_the_number_of_drafts_is_chosen_and_learned_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step sampled is known one step later; seconds and drafts are those of that step."""
    step = Step()
    drafter = step.speculator.drafter
    drafter.choose = True
    seen: list[tuple[int, int]] = []
    accepted: list[tuple[list[int], list[int]]] = []
    chooser = drafter.chooser
    monkeypatch.setattr(chooser, "choose", lambda batch: 1)
    monkeypatch.setattr(chooser, "observe_step", lambda batch, k, s: seen.append((batch, k)))
    monkeypatch.setattr(chooser, "observe_acceptance", lambda d, a: accepted.append((d, a)))
    step.propose()
    assert step.speculator.count == 1 and not seen and not accepted
    step.batch.cu_num_logits_np, step.batch.num_tokens = np.arange(B + 1) * 2, 2 * B
    step.propose()
    assert not accepted, "nothing was drafted before the first step"
    assert not seen, "and it has no beginning"
    step.propose(dummy_run=True)
    assert not accepted and not seen, "a dummy run shows nothing"
    step.propose()
    assert accepted == [([1] * B, [0] * B)] and seen == [(B, 1)]
    step.batch.num_tokens += 5  # A prompt among them.
    step.propose()
    step.propose()
    assert seen == [(B, 1)] * 2, "the step with a prompt is none of those that are timed"


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_seconds_are_those_of_the_step_they_are_learned_for(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU has only begun a step when its drafts are asked for. Seconds in which an engine may
    have been idle, or a size was recorded, belong to no step.
    """
    drafter = Step().speculator.drafter
    drafter.choose, drafter.device = True, torch.device(kind)
    host = [0.0]
    monkeypatch.setattr(proposer, "time", SimpleNamespace(perf_counter=lambda: host[0]))
    seen: list[tuple[int, float]] = []
    monkeypatch.setattr(
        drafter.chooser, "observe_step", lambda batch, k, seconds: seen.append((k, seconds))
    )
    takes_s = {0: 0.010, 1: 0.020, 2: 0.030}

    def step(drafts: int, keys: str = "abc") -> None:
        began = host[0]
        host[0] += 0.0005 if kind == "cuda" else takes_s[drafts]
        sampled_B = torch.ones(len(keys), dtype=torch.int32)
        drafter.step_ended(list(keys), sampled_B, [drafts] * len(keys), len(keys) * (1 + drafts))
        host[0] = began + takes_s[drafts]

    for drafts in [0, 0, 2, 0, 0, 1, 0, 2, 2, 1, 0]:
        step(drafts)
    assert len(seen) >= 9
    assert [seconds for _, seconds in seen] == pytest.approx([takes_s[k] for k, _ in seen])
    del seen[:]
    host[0] += 60.0
    step(1, "def")
    step(1, "def")
    if kind == "cuda":
        assert [seconds for _, seconds in seen] == pytest.approx([takes_s[1]])
        drafter.skip_step()
        host[0] += 5.0
        step(1, "def")
        step(2, "def")
        assert [seconds for _, seconds in seen] == pytest.approx([takes_s[1]] * 2)
        drafter.calibrate(None)
        assert len(seen) == 2, "nobody knows how long the last one took"


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_steps_without_drafting_are_no_choice_to_draft_nothing(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plain half of a timed pair has several times as many steps as the half with drafts: 80 %
    "without drafts" in the report for an engine that drafted in all it chose for.
    """
    drafter = Step().speculator.drafter
    drafter.choose, drafter.device = True, torch.device(kind)
    clock = itertools.count()
    monkeypatch.setattr(proposer, "time", SimpleNamespace(perf_counter=lambda: next(clock)))

    def steps(drafts: int, count: int) -> None:
        for _ in range(count):
            sampled_B = torch.ones(B, dtype=torch.int32)
            drafter.step_ended(list("abc"), sampled_B, [drafts] * B, B * (1 + drafts))

    def counted() -> list[list[int]]:
        return [row["steps"] for row in drafter.chooser.take_report()]

    # A step counts when the next one comes; on a CPU the first one has no beginning.
    known = 5 if kind == "cuda" else 4
    steps(1, 6)
    assert counted() == [[0, known, 0]]
    drafter.configure(Drafting(num_drafts=0))
    steps(0, 20)
    # On a CPU the last step before was still to be counted.
    assert counted() == ([] if kind == "cuda" else [[0, 1, 0]])
    drafter.configure(Drafting(num_drafts=K))
    steps(2, 6)
    assert counted() == [[0, 0, known]]


def test_nothing_is_learned_from_vllms_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its requests are artificial, and its steps take seconds. Untrained heads draft in it, because
    kernels are compiled in it.
    """
    step = Step()
    speculator, drafter = step.speculator, step.speculator.drafter
    drafter._untrained = True
    drafter.choose = True
    drafter.draft_vocabulary = drafter._new_vocabulary(6)
    memory = drafter.memory = drafter._new_memory(10**6)
    counts: list[int] = []
    untouched = drafter.chooser.acceptance.shares()

    def steps(worker: Any) -> str:
        torch.manual_seed(7)
        asked = SimpleNamespace(
            seed=None, structured_outputs=None, ignore_eos=True, all_stop_token_ids=set()
        )
        step.batch.req_ids = [f"_warmup_{number}_" for number in range(B)]
        drafter.admit(
            [
                Admitted(key, int(slot), [50, 51], [50, 51], asked)
                for key, slot in zip(step.batch.req_ids, step.batch.idx_mapping, strict=True)
            ]
        )
        for drafts in (0, K, K, 0, 0):
            step.batch.cu_num_logits_np = np.arange(B + 1) * (1 + drafts)
            step.batch.num_tokens = B * (1 + drafts)
            step.propose()
            counts.append(speculator.count)
        drafter.running.end(step.batch.req_ids)
        torch.manual_seed(11)
        return "as vLLM's own"

    runner = SimpleNamespace(model_runner=SimpleNamespace(speculator=speculator))
    assert without_learning(steps)(runner) == "as vLLM's own"
    assert torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(11).get_state())
    assert counts == [K] * 5
    step.batch.req_ids = ["a", "b", "c"]
    monkeypatch.setattr(drafter.chooser, "choose", lambda batch: 0)
    drafter._untrained = False
    drafter.running.begin([Admitted(key, 0, [1], [1], None) for key in step.batch.req_ids])
    step.propose()
    assert not drafter.chooser.table.kinds and drafter.chooser.acceptance.shares() == untouched
    assert drafter.memory is memory and not memory.store.rows()
    counted = drafter.draft_vocabulary._counts_V.nonzero().flatten().tolist()
    assert counted == [1, 3, 4], "the last tokens of the step that was served"
    for _ in range(2):
        step.propose()
    assert list(drafter.chooser.table.kinds) == [(2, 0)]


def test_after_a_calibration_requests_have_the_seeds_that_they_would_have_had() -> None:
    """V2 takes those of requests without a seed from numpy's generator, and a calibration's own
    requests have none. Whether an engine calibrates depends on a file of the machine.
    """
    drafter = Step().speculator.drafter

    def seeds() -> list[int]:
        return np.random.randint(2**31, size=4).tolist()

    np.random.seed(5)
    torch.manual_seed(5)
    expected = seeds(), torch.rand(4).tolist()
    np.random.seed(5)
    torch.manual_seed(5)
    drafter.calibrate(1)
    assert (seeds(), torch.rand(4).tolist()) == expected
    drafter.calibrate(2)
    assert seeds() != expected[0]
    drafter.calibrate(None)
    assert (seeds(), torch.rand(4).tolist()) == expected


def test_drafts_that_nobody_made_teach_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a request whose prompt is cached."""
    step = Step()
    drafter = step.speculator.drafter
    drafter.choose = True
    drafter.memory = drafter._new_memory(10**6)
    drafter.stopping = Stopping(0.5, SLOTS, K, drafter.device)
    drafter.running.begin([Admitted(key, 0, [1], [1], None) for key in step.batch.req_ids])
    settled: list[list[int]] = []
    accepted: list[list[int]] = []
    monkeypatch.setattr(drafter.memory, "settle", lambda keys, d, p: settled.append(list(d)))
    monkeypatch.setattr(drafter.stopping, "settle", lambda s, d, a: settled.append(d.tolist()))
    monkeypatch.setattr(
        drafter.chooser, "observe_acceptance", lambda drafted, right: accepted.append(list(drafted))
    )
    step.batch.cu_num_logits_np, step.batch.num_tokens = np.arange(B + 1) * (K + 1), B * (K + 1)
    step.batch.is_prefilling_np = np.array([False, True, False])
    step.propose()
    step.batch.is_prefilling_np = np.zeros(B, dtype=np.bool_)
    step.propose()
    step.propose()
    assert settled == [[K, 0, K]] * 2 + [[K] * B] * 4
    assert accepted == [[K, 0, K], [K] * B]
    assert all(kind == (2, K) for kind in drafter.chooser.table.kinds)


@pytest.mark.parametrize("without", [1, 2, 5])
def test_after_steps_without_drafts_it_drafts_as_if_it_always_had(without: int) -> None:
    """What heads with a context attend to came in steps after which nothing was drafted, out of
    buffers that V2 writes into again.
    """
    found = []
    for pausing, forgetting in ((False, False), (True, False), (True, True)):
        step = Step(pairs=4)
        drafter = step.speculator.drafter
        for number in range(without + 2):
            drafter.num_drafts = 0 if pausing and 0 < number <= without else K
            step.states_seed = number
            if forgetting:
                drafter._unread.forget()
            ids_BK = step.propose()
            kept_2KV = step.verified(ids_BK)
            step.batch.positions += 1
            step.batch.input_ids += 1
        temperature_211 = step.temperature_S[[1, 4]].view(2, 1, 1)
        found.append((kept_2KV / temperature_211).softmax(-1))
    always, paused, without_them = found
    # The drawing rounds sums of 16,384 probabilities.
    torch.testing.assert_close(paused, always, atol=1e-6, rtol=0.01)
    assert (without_them - always).abs().max() > 1e-5


def test_a_draft_vocabulary_is_counted_on_the_device_and_drafted_from() -> None:
    """From prompts and from what steps sampled; what is kept lies on its tokens alone."""
    step = Step()
    drafter = step.speculator.drafter
    drafter.draft_vocabulary = vocabulary = drafter._new_vocabulary(6)
    drafter.admit([arrived(1, [50, 51, 50, 52, 52])])
    step.batch.input_ids = torch.tensor([7, 60, 7, 61, 62, 7])
    step.batch.query_start_loc = torch.tensor([0, 2, 5, 6])
    step.batch.positions = torch.arange(6)
    step.batch.cu_num_logits_np, step.batch.num_tokens = np.array([0, 2, 5, 6]), 6
    step.sampled_B = torch.tensor([2, 3, 0])
    step.propose()
    counts_V = vocabulary._counts_V
    # Last tokens are the slots' own numbers, and accepted drafts stand behind the rows before.
    expected = {50: 2, 51: 1, 52: 2, 1: 1, 4: 1, 60: 1, 61: 1, 62: 1}
    assert {int(token): int(counts_V[token]) for token in counts_V.nonzero()[:, 0]} == expected
    assert vocabulary.ids_W is None
    drafter.admit([arrived(4, [50, 51, 52, 1, 4, 60])])
    step.sampled_B = torch.ones(B, dtype=torch.int64)
    step.propose()
    ids_W = vocabulary.ids_W
    assert ids_W is not None and ids_W.tolist() == [1, 4, 50, 51, 52, 60]
    ids_BK = step.propose()
    assert set(ids_BK[:2].flatten().tolist()) <= set(ids_W.tolist())
    found_2KV = step.verified(ids_BK)
    for row, slot in enumerate([1, 4]):
        kept_V = found_2KV[row, 0]
        assert set(kept_V.isfinite().nonzero()[:, 0].tolist()) <= set(ids_W.tolist())
        drawn_W = drafter._slots.q(torch.tensor([row]), torch.tensor([0]))[0]
        temperature = float(step.temperature_S[slot])
        torch.testing.assert_close((kept_V / temperature).softmax(-1)[ids_W], drawn_W)


def test_a_request_that_comes_back_is_not_counted_again() -> None:
    """Its response was counted as it was sampled."""
    drafter = Step().speculator.drafter
    drafter.draft_vocabulary = vocabulary = drafter._new_vocabulary(6)
    asked = SimpleNamespace(structured_outputs=None)
    drafter.admit([Admitted("a", 1, [50, 51], [50, 51], asked)])
    once = [1, 1, 0]
    assert vocabulary._counts_V[50:53].tolist() == once
    drafter.admit([Admitted("a", 2, [50, 51], [50, 51, 52, 52], asked)])
    assert vocabulary._counts_V[50:53].tolist() == once
    drafter.running.end(["a"])
    drafter.admit([Admitted("a", 2, [50, 51], [50, 51], asked)])
    assert vocabulary._counts_V[50:53].tolist() == [2, 2, 0], "another request with its id"


def test_runs_end_early_by_request() -> None:
    step = Step()
    speculator, drafter = step.speculator, step.speculator.drafter
    drafter.stopping = Stopping(0.5, SLOTS, K, drafter.device)
    ids_BK = step.propose()
    lengths = speculator.lengths_B.tolist()
    assert lengths[2] == K, "greedy drafts are not ended"
    assert min(lengths[:2]) < K, "next to no draft from so flat a q is likely"
    found = SimpleNamespace(draft_token_ids=ids_BK.tolist())
    runner = SimpleNamespace(speculator=speculator)
    taken = with_as_many_drafts(lambda self: found)(runner).draft_token_ids
    assert [len(ids) for ids in taken] == lengths
    step.propose(dummy_run=True)
    assert speculator.lengths_B.tolist() == lengths


def test_a_deep_sleep_leaves_what_v2_learned_as_new() -> None:
    """Beside the memory and early ends these are the last tokens of requests, the chances of their
    drafts, and the counts of a draft vocabulary, which V2 has on the device.
    """

    def serving() -> Step:
        step = Step()
        drafter = step.speculator.drafter
        drafter.draft_vocabulary = drafter._new_vocabulary(V // 2)
        drafter.memory = drafter._new_memory(10**6)
        drafter.memory.store.remember(prompt_key([1, 2]), [3, 4, 5, 6])
        drafter.stopping = Stopping(0.3, SLOTS, K, drafter.device)
        drafter._fingerprint, drafter.version = fingerprint(drafter.heads), 0
        return step

    asked = SimpleNamespace(
        seed=None, structured_outputs=None, ignore_eos=True, all_stop_token_ids=set()
    )

    def drafted(step: Step) -> list[list[int]]:
        slots = [int(slot) for slot in step.batch.idx_mapping]
        keys = step.batch.req_ids
        step.speculator.drafter.admit(
            [
                Admitted(key, slot, [1, 2], [1, 2, 3], asked)
                for slot, key in zip(slots, keys, strict=True)
            ]
        )
        return [step.propose().tolist() for _ in range(2)][1]

    step, fresh = serving(), serving()
    drafter, other = step.speculator.drafter, fresh.speculator.drafter
    drafted(step)
    lost = [drafter.memory, drafter.stopping, drafter.running, drafter._serves]
    coming = drafter.running._coming  # On its way to the host.
    throw_away([*tensors_of(lost, (coming,)), drafter.draft_vocabulary._counts_V])
    drafter._fingerprint = []
    assert drafter.held_version() == -1 and not drafter.fed
    new = [other.memory, other.stopping, other.running, other._serves]
    for here, there in zip(tensors_of(lost, (coming,)), tensors_of(new), strict=True):
        assert here.dtype == there.dtype and torch.equal(here, there)
    counts_V = drafter.draft_vocabulary._counts_V
    assert not counts_V.any() and not drafter.draft_vocabulary.due
    # What a swap does, whose file and check have tests of their own.
    drafter.fed, drafter._fingerprint = True, other._fingerprint
    assert drafted(step) == drafted(fresh)


@pytest.mark.parametrize("requests", [1, 3])
def test_new_requests_reach_the_device_together_and_without_waiting(
    requests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy from ordinary memory waits for the forward pass; on an H100 32 requests took 0.2 s.
    So everything goes in as many copies for three requests as for one.
    """
    step = Step(pairs=4, copy_parts=2)
    speculator = step.speculator
    counted: list[Any] = []
    sent = sending.sent

    def count(values: Any, *rest: Any) -> torch.Tensor:
        counted.append(values)
        return sent(values, *rest)

    monkeypatch.setattr(sending, "sent", count)
    speculator._admitted = 6
    new = [arrived(2, [7, 8, 9]), arrived(0, [5]), arrived(3, [6, 6, 7, 8], grammar=True)]
    temperatures_S = np.linspace(0.0, 1.3, SLOTS, dtype=np.float32)
    states = SimpleNamespace(
        seeds=SimpleNamespace(np=np.arange(SLOTS) - 2**62),
        temperature=SimpleNamespace(np=temperatures_S),
    )
    speculator.admit(new[:requests], states)
    assert len(counted) == 5
    texts = speculator.drafter._texts
    for row, one in enumerate(new[:requests]):
        count_of_tokens = len(one.tokens)
        assert texts.ids_SL[one.slot, :count_of_tokens].tolist() == list(one.tokens)
        assert int(texts.newest_S[one.slot]) == count_of_tokens - 1
        assert int(speculator._requests_S[one.slot]) == 7 + row
        assert int(speculator._keys_S[one.slot]) == int(keys_of([one.slot - 2**62]))
        assert bool(speculator._grammar_S[one.slot]) == one.has_grammar
        assert float(speculator._temperature_S[one.slot]) == temperatures_S[one.slot]
    alone = Step(pairs=4, copy_parts=2).speculator
    alone._admitted = 6
    for one in new[:requests]:
        alone.admit([one], states)
    assert torch.equal(alone.drafter._texts.keys_SALw, texts.keys_SALw)
    assert torch.equal(alone.drafter.running._tails_Sn, speculator.drafter.running._tails_Sn)


def test_texts_are_copied_from_by_the_keys_of_the_heads_that_serve() -> None:
    """After a swap the keys of what was said before are made anew: running requests copy as if they
    had arrived after it.
    """
    running, later = Step(pairs=4, copy_parts=2), Step(pairs=4, copy_parts=2)
    said = [arrived(2, [7, 8, 9, 7, 8]), arrived(0, [5]), arrived(3, list(range(70)))]

    def swap(step: Step) -> None:
        drafter = step.speculator.drafter
        for parameter in drafter.heads.parameters():
            parameter.mul_(1.5)
        drafter._core.load()
        drafter._forget_pairs()

    running.speculator.drafter.admit(said)
    before_SALw = running.speculator.drafter._texts.keys_SALw.clone()
    swap(running)
    swap(later)
    later.speculator.drafter.admit(said)
    texts, expected = (step.speculator.drafter._texts for step in (running, later))
    assert torch.equal(texts.newest_S[:SLOTS], expected.newest_S[:SLOTS])
    for one in said:
        here, there, before = (
            keys_SALw[one.slot, :, : len(one.tokens)]
            for keys_SALw in (texts.keys_SALw, expected.keys_SALw, before_SALw)
        )
        torch.testing.assert_close(here, there)
        assert not torch.allclose(here, before)
    slots_B, newest_B = torch.tensor([2, 3]), torch.tensor([4, 69])
    found, other = (
        step.speculator.drafter._core.copier.find(ring, slots_B, newest_B)
        for step, ring in ((running, texts), (later, expected))
    )
    torch.testing.assert_close(found, other)


def test_keys_are_renewed_of_the_texts_that_run_and_of_no_others() -> None:
    """Between two batches of rollouts nobody runs, and each slot holds a text that has ended: with
    1,024 of them a sync and a swap made a million keys each that nobody read.
    """
    step = Step(pairs=4, copy_parts=2)
    drafter = step.speculator.drafter
    texts = drafter._texts
    drafter.admit([arrived(2, [7, 8, 9, 7, 8]), arrived(0, [5]), arrived(3, list(range(70)))])
    drafter.running.end(["request 2"])
    # Preempted, a request came back elsewhere, and another one has its place.
    asked = SimpleNamespace(structured_outputs=None)
    back = Admitted("request 0", 4, [5], [5, 6], asked)
    drafter.admit([back, Admitted("another", 0, [9], [9], asked)])
    texts.keys_SALw.fill_(torch.nan)
    drafter._forget_pairs()
    made = [int(keys_ALw[0, :, 0].isfinite().sum()) for keys_ALw in texts.keys_SALw]
    assert made == [1, 0, 0, texts.places, 2, 0]
    drafter.running.end(list(drafter.running.live))
    texts.keys_SALw.fill_(torch.nan)
    drafter.target_changed()
    assert not texts.keys_SALw.isfinite().any()


def test_an_actor_that_comes_before_the_first_heads_leaves_keys_to_them(tmp_path: Path) -> None:
    """After a deep sleep nothing is there that keys are made of until heads come from the feed; of
    the tables of a small vocabulary a row was looked up that does not exist, and the engine died.
    """
    step, later = Step(pairs=4, copy_parts=2), Step(pairs=4, copy_parts=2)
    said = [arrived(1, [7, 8, 9, 7, 8]), arrived(4, [5, 6])]
    drafter = step.speculator.drafter
    save_state(tmp_path / "heads", drafter.heads.trainable_state())
    drafter._fingerprint, drafter.version = fingerprint(drafter.heads), 0
    copier = drafter._core.copier
    throw_away([*drafter.heads.parameters(), *tensors_of(copier, (copier._embed, copier.heads))])
    # Memory may come back as anything: with huge numbers here, too, every place counted as empty.
    copier._back_M.zero_()
    assert drafter.held_version() == -1
    drafter.target_loaded()
    drafter.admit(said)
    step.propose()
    assert step.speculator.count == 0
    drafter.swap(str(tmp_path / "heads"), 3)
    assert drafter.held_version() == 3
    later.speculator.drafter.admit(said)
    for one in said:
        here, there = (
            found.speculator.drafter._texts.keys_SALw[one.slot, :, : len(one.tokens)]
            for found in (step, later)
        )
        assert torch.equal(here, there)


def test_the_first_trained_heads_make_the_keys_of_running_texts(tmp_path: Path) -> None:
    """Of untrained ones nobody would read any."""
    step, later = Step(pairs=4, copy_parts=2), Step(pairs=4, copy_parts=2)
    drafter = step.speculator.drafter
    save_state(tmp_path / "heads", drafter.heads.trainable_state())
    drafter._untrained = True
    said = arrived(1, [7, 8, 9, 7, 8])
    drafter.admit([said])
    assert not drafter._texts.keys_SALw.any()
    drafter.swap(str(tmp_path / "heads"), 3, ready=drafter.ahead(str(tmp_path / "heads")))
    later.speculator.drafter.admit([said])
    here, there = (found.speculator.drafter._texts.keys_SALw for found in (step, later))
    assert there.any() and torch.equal(here, there)


def written_by(speculator: Any) -> list[int]:
    """A list that fills with how many tokens each call writes to the texts."""
    written: list[int] = []
    copier = speculator.drafter._core.copier
    write = copier.write

    def counted(ring: TextRing, slots_N: torch.Tensor, *more: torch.Tensor) -> None:
        written.append(len(slots_N))
        write(ring, slots_N, *more)

    copier.write = counted
    return written


def test_of_a_prompt_of_100k_tokens_only_the_window_is_written() -> None:
    """Its last tokens are copied from as those of a text of their own; a request beside it keeps
    its text.
    """
    step = Step(pairs=4, copy_parts=2)
    drafter = step.speculator.drafter
    ring, copier = drafter._texts, drafter._core.copier
    held = sum(tensor.nbytes for tensor in tensors_of([ring]))
    written = written_by(step.speculator)
    generator = torch.Generator().manual_seed(0)
    # Few different tokens, so that there is much to find.
    long = torch.randint(12, (100_000,), generator=generator).tolist()
    near = [3, 1, 4, 1, 5, 9, 3, 1]
    drafter.admit([arrived(2, long), arrived(0, near)])
    assert sum(written) == ring.places + len(near)
    assert sum(tensor.nbytes for tensor in tensors_of([ring])) == held
    slots_B = torch.tensor([2, 0])
    newest_B = torch.tensor([len(long) - 1, len(near) - 1])
    told_BKH = copier.find(ring, slots_B, newest_B)
    for told_KH, text in zip(told_BKH, (long[-ring.places :], near), strict=True):
        ids_M = torch.tensor(text)
        lengths = torch.tensor([0]), torch.tensor([len(text)])
        texts = Texts.of(ids_M[:0], lengths[0], ids_M, lengths[1])
        of_last = texts.of_rows(lengths[1] - 1)
        wanted = drafter.heads._copied(of_last, drafter._core._embed(torch.arange(V)), 2)[0]
        torch.testing.assert_close(told_KH, wanted, rtol=1e-3, atol=1e-5)
        assert wanted.any()


@pytest.mark.parametrize("prompt", [[], [7], [7, 8]])
def test_a_prompt_shorter_than_k_drafts_and_finds_nothing(prompt: list[int]) -> None:
    """And an empty one, as of a prompt that was given as embeddings; what stood in its slot before
    is no text of it.
    """
    step = Step(pairs=4, copy_parts=2)
    drafter = step.speculator.drafter
    drafter.admit([arrived(1, [7, 8, 9, 7, 8, 9, 7, 8]), arrived(4, [1, 2, 1, 2, 1, 2])])
    drafter.admit([arrived(1, prompt)])
    newest_B = torch.tensor([max(len(prompt) - 1, 0), 5])
    told_BKH = drafter._core.copier.find(drafter._texts, torch.tensor([1, 4]), newest_B)
    assert not told_BKH[0].any() and told_BKH[1].any()
    step.batch.positions = torch.tensor([max(len(prompt) - 1, 0), 5, 0])
    ids_BK = step.propose()
    assert ids_BK.shape == (B, K) and bool(((ids_BK >= 0) & (ids_BK < V)).all())
    assert (step.verified(ids_BK).isfinite().sum(2) > 1).all(), "both have a q"


def test_v2_copies_no_token_of_an_image() -> None:
    image = 7
    step = Step(pairs=4, copy_parts=2)
    drafter = step.speculator.drafter
    core = drafter._core
    drafter.admit([arrived(1, [5, image, image, 6, 5, image, 6, 5])])
    asked: list[tuple[torch.Tensor, torch.Tensor]] = []
    for never in ((), (image,)):
        core.copier = Copier(drafter.heads, core._embed, never=never)
        told = core.copier._told

        def watched(*given: torch.Tensor, told: Any = told) -> torch.Tensor:
            asked.append(given)
            return told(*given)

        core.copier._told = watched
        core.copier.find(drafter._texts, torch.tensor([1]), torch.tensor([7]))
    (ids_BKAm, share_BKAm), (same_BKAm, never_BKAm) = asked
    assert torch.equal(ids_BKAm, same_BKAm)
    images_BKAm = ids_BKAm == image
    assert share_BKAm[images_BKAm].any() and not never_BKAm[images_BKAm].any()
    assert torch.equal(share_BKAm[~images_BKAm], never_BKAm[~images_BKAm])


def test_a_draft_vocabulary_without_the_copied_token_has_a_whole_q_on_v2() -> None:
    """q is over the map; what it lacks is never drafted, whatever was found."""
    step = Step(pairs=4, copy_parts=2)
    drafter = step.speculator.drafter
    drafter.admit([arrived(slot, [7, 8, 9, 7, 8, 9, 7, 8]) for slot in (1, 4)])
    ids_W = torch.tensor([1, 4, 6, 20])
    weight_VD = drafter._lm_head(torch.eye(D)).T
    drafter._slots = DraftSlots(SLOTS, K, len(ids_W), drafter.device, ids_W)
    drafter._core.use_vocabulary(ids_W, lambda rows: rows @ weight_VD[ids_W].T)
    step.batch.positions = torch.tensor([7, 7, 7])
    ids_BK = step.propose()
    assert set(ids_BK.flatten().tolist()) <= set(ids_W.tolist())
    log_q_2KV = step.verified(ids_BK) / step.temperature_S[step.batch.idx_mapping[:2]].view(2, 1, 1)
    torch.testing.assert_close(log_q_2KV.exp().sum(2), torch.ones(2, K))
    assert set(log_q_2KV.isfinite().nonzero()[:, 2].tolist()) <= set(ids_W.tolist())


def test_steps_scheduled_ahead_have_as_many_drafts_as_were_scheduled() -> None:
    """What the speculator would rather have holds later."""
    step = Step()
    speculator, drafter = step.speculator, step.speculator.drafter
    speculator.ahead = True
    drafter.num_drafts = 1
    ids_BK = step.propose(num_speculative_tokens=2)
    assert (speculator.count, speculator.asked) == (2, 1)
    assert (step.verified(ids_BK).isfinite().sum(2) > 1).all(), "both have a q"
    drafter.num_drafts = 2
    assert step.propose(num_speculative_tokens=0).shape == (B, K)
    assert (speculator.count, speculator.asked) == (0, 2)


def test_without_heads_a_step_scheduled_ahead_has_drafts_that_any_q_allows() -> None:
    step = Step()
    speculator, drafter = step.speculator, step.speculator.drafter
    speculator.ahead = True
    step.propose(num_speculative_tokens=2)
    drafter.fed = False
    step.batch.positions += 1
    ids_BK = step.propose(num_speculative_tokens=2)
    assert speculator.asked == 0 and (ids_BK == 0).all()
    rows_2KV = step.verified(ids_BK)
    assert (rows_2KV.isfinite().sum(2) == 1).all() and (rows_2KV[:, :, 0] == 0).all()


def drafter_with_costs() -> Any:
    """A drafter that knows all that the times of its steps are valid for."""
    drafter = Step().speculator.drafter
    config = drafter.vllm_config
    config.parallel_config = SimpleNamespace(tensor_parallel_size=1)
    config.model_config.hf_text_config = SimpleNamespace(hidden_size=D)
    config.model_config.enforce_eager = True
    return drafter


def test_times_of_steps_are_those_of_a_runner_and_of_its_way_to_schedule() -> None:
    """Otherwise V2 would choose by times that V1 had on the same machine."""
    drafter = drafter_with_costs()
    first = cost_key(drafter)
    drafter.vllm_config.scheduler_config.async_scheduling = True
    ahead = cost_key(drafter)
    drafter.runner = "v1"
    assert (first["runner"], cost_key(drafter)["runner"]) == ("v2", "v1")
    assert [key for key in first if first[key] != ahead[key]] == ["asynchronous"]


def test_times_of_steps_are_those_with_or_without_a_memory_and_early_ends() -> None:
    """With either of them V2 launches its kernels one by one on a GPU: three times as long."""
    drafter = drafter_with_costs()
    keys = []
    for settings in ({}, {"memory_bytes": 1 << 20}, {"memory_bytes": 0, "stop_below": 0.3}):
        drafter.configure(Drafting(**settings))
        keys.append(cost_key(drafter))
    alone, remembering, ending = keys
    assert [key for key in alone if alone[key] != remembering[key]] == ["memory"]
    assert [key for key in alone if alone[key] != ending[key]] == ["stops_early"]
    drafter.configure(Drafting(stop_below=0.0))
    assert cost_key(drafter) == alone


def arrived(slot: int, tokens: list[int], *, grammar: bool = False) -> Admitted:
    asked = SimpleNamespace(structured_outputs={} if grammar else None)
    return Admitted(f"request {slot}", slot, tokens, tokens, asked)
