"""One step of the V2 speculator on tensors, without the engine: what it keeps for verification."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from heads.heads_config import HeadsConfig
from heads.modules import MedusaHeads

pytest.importorskip("vllm")
pytest.importorskip("vllm.v1.worker.gpu.model_runner")

from medusa_ppo.drafting.choice import DraftChooser
from medusa_ppo.drafting.core import DraftingCore
from medusa_ppo.drafting.slots import DraftSlots
from medusa_ppo.drafting.stopping import Stopping
from medusa_ppo.vllm_plugin import rank_agreement
from medusa_ppo.vllm_plugin.speculator import HeldHeads, MedusaSpeculator, with_as_many_drafts

D, V, K, B, SLOTS = 8, 1 << 14, 2, 3, 5


class Step:
    """A speculator, and a batch of three requests, the last of which is greedy."""

    def __init__(self, pairs: int = 0, copy_parts: int = 0, vocab: int = V) -> None:
        torch.manual_seed(0)
        config = HeadsConfig(D, vocab, K, kind="hydra", context=pairs, copy_parts=copy_parts)
        heads = MedusaHeads(config).requires_grad_(False)
        for parameter in heads.parameters():
            parameter.copy_(torch.randn_like(parameter) / 4)
        self.lm_head_VD = lm_head_VD = torch.randn(vocab, D) / 2
        self.table_VD = table_VD = torch.randn(vocab, D)
        drafter: Any = object.__new__(HeldHeads)
        drafter._core = DraftingCore(
            heads, lambda rows: rows @ lm_head_VD.T, lambda ids: table_VD[ids]
        )
        drafter.num_drafts = drafter.num_speculative_tokens = K
        drafter.fed, drafter.sampled, drafter._untrained = True, True, False
        drafter.choose, drafter.chooser, drafter._step_began = False, DraftChooser(K), None
        device = lm_head_VD.device
        drafter.device, drafter.dtype, drafter.hidden_size = device, torch.float32, D
        drafter.heads, drafter._target = heads, torch.nn.Module()
        drafter._lm_head = lambda rows: rows @ lm_head_VD.T
        drafter.vllm_config = SimpleNamespace(
            scheduler_config=SimpleNamespace(max_num_seqs=SLOTS),
            model_config=SimpleNamespace(max_model_len=64),
        )
        drafter.draft_vocabulary = drafter._new_vocabulary(0)
        drafter._slots = DraftSlots(SLOTS, K, vocab, drafter.device)
        drafter._make_ring()
        speculator: Any = object.__new__(MedusaSpeculator)
        speculator.drafter, speculator.states, speculator.graphs = drafter, None, None
        speculator.num_speculative_steps, speculator.vocab_size = K, vocab
        speculator.max_num_reqs, speculator.device = SLOTS, device
        speculator._kept_SKV = torch.full((SLOTS + 1, K, vocab), 7.0)
        speculator.draft_logits = speculator._kept_SKV[:SLOTS]
        speculator.lengths_B = None
        speculator._grammar_S = torch.zeros(SLOTS + 1, dtype=torch.bool)
        speculator._requests_S = torch.arange(SLOTS + 1)
        self.speculator = speculator
        self.states_seed = 1
        self.sampled_B = torch.ones(B, dtype=torch.int64)
        self.temperature_S = torch.tensor([1.0, 0.7, 1.0, 0.0, 1.0])
        self.batch = SimpleNamespace(
            num_reqs=B,
            idx_mapping=torch.tensor([1, 4, 3]),
            idx_mapping_np=np.array([1, 4, 3]),
            query_start_loc=torch.arange(B + 1),
            positions=torch.arange(B) + 9,
            input_ids=torch.arange(B),
            cu_num_logits_np=np.arange(B + 1),
            num_tokens=B,
        )

    def propose(self, dummy_run: bool = False) -> torch.Tensor:
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
            self.temperature_S,
            torch.arange(SLOTS),
            dummy_run,
        )


def test_what_is_kept_is_what_was_drawn_from() -> None:
    """Before, it was what the drawing had been rounded from: with many tokens the rounding of
    their cumulative sums moves each q by some thousandths, and verification would not see it.
    """
    step = Step()
    ids_BK = step.propose()
    speculator = step.speculator
    for row, slot in enumerate([1, 4]):
        temperature = float(step.temperature_S[slot])
        for k in range(K):
            drawn_V = speculator.drafter._slots.q(torch.tensor([row]), torch.tensor([k]))[0]
            kept_V = (speculator._kept_SKV[slot, k] / temperature).softmax(-1)
            assert torch.equal(kept_V > 0, drawn_V > 0)
            torch.testing.assert_close(kept_V, drawn_V, rtol=1e-5, atol=0)
    assert speculator._kept_SKV[3].isfinite().sum(1).tolist() == [1, 1]
    assert speculator._kept_SKV[3].argmax(1).tolist() == ids_BK[2].tolist()
    assert bool((speculator._kept_SKV[[0, 2]] == 7.0).all())


def test_a_dummy_run_takes_the_path_that_serves_and_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM profiles memory by it, and runs it in service where other ranks have requests."""
    step = Step()
    step.propose()
    before_SKV = step.speculator._kept_SKV[:SLOTS].clone()
    asked = []
    draft = DraftingCore.draft

    def seen(self: DraftingCore, *args: Any, **named: Any) -> Any:
        asked.append(args[3] if len(args) > 3 else None)
        return draft(self, *args, **named)

    monkeypatch.setattr(DraftingCore, "draft", seen)
    step.batch.positions = step.batch.positions + 1
    step.propose(dummy_run=True)
    assert asked[0] is not None, "drawn, as in service"
    assert torch.equal(step.speculator._kept_SKV[:SLOTS], before_SKV)


def test_the_number_of_drafts_is_chosen_and_learned_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step sampled is known one step later; seconds and drafts are those of that step."""
    monkeypatch.setattr(rank_agreement, "get_tp_group", lambda: SimpleNamespace(world_size=1))
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
            step.propose()
            step.batch.positions += 1
            step.batch.input_ids += 1
        temperature_211 = step.temperature_S[[1, 4]].view(2, 1, 1)
        found.append((step.speculator._kept_SKV[[1, 4]] / temperature_211).softmax(-1))
    always, paused, without_them = found
    # The drawing rounds sums of 16,384 probabilities.
    torch.testing.assert_close(paused, always, atol=1e-6, rtol=0.01)
    assert (without_them - always).abs().max() > 1e-5


def test_a_draft_vocabulary_is_counted_on_the_device_and_drafted_from() -> None:
    """From prompts and from what steps sampled; what is kept lies on its tokens alone."""
    step = Step()
    speculator, drafter = step.speculator, step.speculator.drafter
    drafter.draft_vocabulary = vocabulary = drafter._new_vocabulary(6)
    drafter.admit(1, [50, 51, 50, 52, 52])
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
    drafter.admit(4, [50, 51, 52, 1, 4, 60])
    step.sampled_B = torch.ones(B, dtype=torch.int64)
    step.propose()
    ids_W = vocabulary.ids_W
    assert ids_W is not None and ids_W.tolist() == [1, 4, 50, 51, 52, 60]
    ids_BK = step.propose()
    assert set(ids_BK[:2].flatten().tolist()) <= set(ids_W.tolist())
    for row, slot in enumerate([1, 4]):
        kept_V = speculator._kept_SKV[slot, 0]
        assert set(kept_V.isfinite().nonzero()[:, 0].tolist()) <= set(ids_W.tolist())
        drawn_W = drafter._slots.q(torch.tensor([row]), torch.tensor([0]))[0]
        temperature = float(step.temperature_S[slot])
        torch.testing.assert_close((kept_V / temperature).softmax(-1)[ids_W], drawn_W)


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
