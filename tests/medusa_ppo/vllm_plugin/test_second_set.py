"""Heads that a thread has made ready: they draft what the same heads draft after a swap that writes
over the old ones, to the bit, whatever happened to the actor meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from heads.checkpoint import save_state
from heads.errors import SwapError

pytest.importorskip("vllm")

from medusa_ppo.drafting.core import DraftingCore
from medusa_ppo.vllm_plugin import target_tables
from medusa_ppo.vllm_plugin.confirm import fixed_inputs, fixed_sampling, what_is_seen
from medusa_ppo.vllm_plugin.int8_products import packed_linear
from medusa_ppo.vllm_plugin.proposer import MedusaProposer
from medusa_ppo.vllm_plugin.second_set import NICE, SecondSet, begin_beside
from tests.medusa_ppo.vllm_plugin.test_proposer import PAIRS, ProposerStep, V

pytestmark = pytest.mark.usefixtures("one_rank")
FORMS = {"alone": (0, 0), "context": (PAIRS, 0), "copying": (PAIRS, 2)}
"""Pairs of a context, and parts of the attention that copies."""
W = 4


@pytest.fixture(params=FORMS.values(), ids=FORMS)
def scene(request: pytest.FixtureRequest) -> Callable[[], ProposerStep]:
    """scene(): a proposer, whose weights are packed; all of them are alike."""

    def make() -> ProposerStep:
        pairs, copy_parts = request.param
        step = ProposerStep(2, pairs=pairs, copy_parts=copy_parts)
        proposer = step.proposer
        proposer._core = DraftingCore(proposer.heads, step.logits, step.embed, packed_linear)
        proposer._target.lm_head = torch.nn.Linear(1, 1, bias=False)
        proposer._target.lm_head.weight.data = step.lm_head_VD
        proposer._use_vocabulary()
        return step

    return make


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As the thread that makes a second set has: with more, the same products round otherwise."""
    # Not torch's own name: an engine within this process may have replaced it.
    before = torch.get_num_threads()
    torch._C.set_num_threads(1)
    yield
    torch._C.set_num_threads(before)


def other_state(step: ProposerStep, path: Path, seed: int = 5) -> Path:
    """A file of other heads."""
    torch.manual_seed(seed)
    save_state(
        path,
        {
            name: torch.randn_like(tensor) / 2
            for name, tensor in step.proposer.heads.trainable_views().items()
        },
    )
    return path


@torch.inference_mode()
def drafted(proposer: MedusaProposer) -> list[torch.Tensor]:
    """What it drafts for fixed states, and q."""
    heads = proposer.heads.config
    fixed = fixed_inputs(heads, proposer.dtype, proposer.device)
    how = fixed_sampling(heads.num_heads, proposer.device)
    core = proposer._core
    seen = what_is_seen(core, fixed)
    found = core.draft(fixed.hidden_BnD[:, -1], fixed.ids_Bn[:, -1], heads.num_heads, how, seen)
    return [found.ids_BK, *found.q]


def alike(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def ready_beside(proposer: MedusaProposer, path: Path) -> Callable[[], Any]:
    """What a thread has made of the file."""
    begun = begin_beside(proposer.ahead(str(path)))
    assert isinstance(begun.result(), SecondSet)
    return begun.result


def test_a_second_set_drafts_what_a_swap_over_the_first_drafts(
    scene: Callable[[], ProposerStep], tmp_path: Path
) -> None:
    fed, swapped = scene().proposer, scene().proposer
    first = drafted(fed)
    module = fed.heads
    save_state(tmp_path / "first", fed.heads.trainable_state())
    path = other_state(scene(), tmp_path / "other")
    numbers = torch.get_rng_state()
    ready = ready_beside(fed, path)
    assert torch.equal(torch.get_rng_state(), numbers), "the engine's random numbers stay"
    assert alike(drafted(fed), first), "and so does what drafts"
    for proposer, made in ((fed, ready), (swapped, None)):
        digest = proposer.swap(str(path), 3, ready=made)
        assert digest == proposer.heads_checksum
        assert proposer.held_version() == 3
    assert fed.heads_checksum == swapped.heads_checksum
    assert alike(drafted(fed), drafted(swapped)) and not alike(drafted(fed), first)
    assert fed.heads is module, "vLLM knows it as the draft model"
    # A call of the loop writes into the same tensors.
    fed.swap(str(tmp_path / "first"), 4)
    assert alike(drafted(fed), first) and fed.held_version() == 4
    fed.swap(str(path), 5, ready=ready_beside(fed, path))
    assert alike(drafted(fed), drafted(swapped))


@pytest.mark.parametrize("how", ["synced", "being loaded", "synced twice"])
def test_an_actor_that_changes_meanwhile_is_the_one_that_a_second_set_drafts_for(
    scene: Callable[[], ProposerStep], tmp_path: Path, how: str
) -> None:
    steps = scene(), scene()
    path = other_state(scene(), tmp_path / "other")
    ready = ready_beside(steps[0].proposer, path)
    for step in steps:
        step.table_VD.copy_(step.table_VD.flip(0))
        step.lm_head_VD.mul_(1.5)
        if how == "being loaded":
            step.proposer.target_loaded()
            continue
        step.proposer.target_changed()
        if how == "synced twice":
            step.table_VD.mul_(torch.arange(1, V + 1).unsqueeze(1))
            step.proposer.target_changed()
    fed, swapped = (step.proposer for step in steps)
    fed.swap(str(path), 3, ready=ready)
    swapped.swap(str(path), 3)
    assert alike(drafted(fed), drafted(swapped))


def test_one_that_is_prepared_while_an_actor_is_loaded_reads_it_when_it_is_there(
    scene: Callable[[], ProposerStep], tmp_path: Path
) -> None:
    steps = scene(), scene()
    path = other_state(scene(), tmp_path / "other")
    fed, swapped = (step.proposer for step in steps)
    fed.target_loaded()
    ready = ready_beside(fed, path)
    for step in steps:
        step.table_VD.copy_(step.table_VD.flip(0))
        step.proposer.target_changed()
    fed.swap(str(path), 3, ready=ready)
    swapped.swap(str(path), 3)
    assert alike(drafted(fed), drafted(swapped))


def test_a_set_that_drafts_as_other_heads_do_is_refused_and_the_first_goes_on(
    scene: Callable[[], ProposerStep], tmp_path: Path
) -> None:
    """As if the old weights had been packed again."""
    proposer = scene().proposer
    first = drafted(proposer)
    made = proposer.ahead(str(other_state(scene(), tmp_path / "other")))()
    assert isinstance(made, SecondSet)
    made.core.fused = proposer._core.fused
    with pytest.raises(SwapError, match="do not draft as they should"):
        proposer.swap(str(tmp_path / "other"), 3, ready=lambda: made)
    assert proposer.fed and proposer.held_version() == 0 and alike(drafted(proposer), first)


def test_a_file_that_does_not_fit_is_refused_before_anything_is_made_of_it(
    scene: Callable[[], ProposerStep], tmp_path: Path
) -> None:
    proposer = scene().proposer
    first = drafted(proposer)
    state = proposer.heads.trainable_state()
    state[next(iter(state))] = torch.zeros(2, 3)
    save_state(tmp_path / "bad", state)
    begun = begin_beside(proposer.ahead(str(tmp_path / "bad")))
    with pytest.raises(SwapError, match="not those of the serving heads"):
        proposer.swap(str(tmp_path / "bad"), 3, ready=begun.result)
    assert proposer.fed and proposer.held_version() == 0 and alike(drafted(proposer), first)


@pytest.mark.parametrize("counted", [0, 400], ids=["few tokens", "many tokens"])
@pytest.mark.parametrize("synced", [False, True])
def test_a_draft_vocabulary_is_chosen_again_as_by_a_swap(
    scene: Callable[[], ProposerStep], tmp_path: Path, counted: int, synced: bool
) -> None:
    steps = scene(), scene()
    path = other_state(scene(), tmp_path / "other")
    for step in steps:
        vocabulary = step.proposer._new_vocabulary(W)
        step.proposer.draft_vocabulary = vocabulary
        vocabulary.observe([[1, 2, 5, 7] * 20])
        step.proposer._refresh_vocabulary()
        assert vocabulary.ids_W.tolist() == [1, 2, 5, 7]
        vocabulary.observe([[9, 8, 3, 2] * counted])
    fed, swapped = (step.proposer for step in steps)
    ready = ready_beside(fed, path)
    for step in steps:
        if synced:
            step.lm_head_VD.copy_(step.lm_head_VD.flip(0))
            step.proposer.target_changed()
    fed.swap(str(path), 3, ready=ready)
    swapped.swap(str(path), 3)
    ids_W = fed.draft_vocabulary.ids_W
    assert ids_W.tolist() == ([2, 3, 8, 9] if counted else [1, 2, 5, 7])
    assert torch.equal(ids_W, swapped.draft_vocabulary.ids_W)
    assert torch.equal(fed._core.ids_W, ids_W)
    assert alike(drafted(fed), drafted(swapped))
    assert target_tables.lm_head_weight(fed._target, V) is not None, "the thread has read it"


@pytest.mark.parametrize("in_a_worker", [False, True])
def test_a_thread_beside_the_engine_has_one_core_and_little_priority(
    in_a_worker: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os
    import threading

    def skipped(threads: int) -> None:
        """What vLLM's worker on a CPU puts in the place of torch's function."""

    def seen() -> tuple[int, int]:
        own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        return torch.get_num_threads(), own

    returned = threading.Event()

    def seen_later() -> tuple[int, int]:
        returned.wait()
        return seen()

    set_num_threads = torch._C.set_num_threads
    set_num_threads(2)
    monkeypatch.setattr(torch, "set_num_threads", skipped if in_a_worker else set_num_threads)
    before = seen()
    begun = begin_beside(seen_later)
    # By then the number for later threads is what it was, and must not count for this one.
    returned.set()
    threads, priority = begun.result()
    assert (threads, priority) == (1, min(NICE, 19))
    assert seen() == before
    later: list[int] = []
    other = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
    other.start()
    other.join()
    assert later == [2], "threads that begin later have as many as ever"
