"""Two tensor-parallel ranks, as two threads with a gloo group: an error on one of them ends on
both, wherever it comes from, and nobody is left waiting in a product.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, ProcessGroupGloo

from heads.checkpoint import save_state
from heads.errors import MedusaError, SwapError

pytest.importorskip("vllm")

from medusa_ppo.drafting.products import plain_linear
from medusa_ppo.drafting.slots import DraftSlots
from medusa_ppo.vllm_plugin import confirm, rank_agreement, worker_extension
from medusa_ppo.vllm_plugin.second_set import SecondSet, begin_beside
from medusa_ppo.vllm_plugin.worker_calls import raise_reported
from medusa_ppo.vllm_plugin.worker_extension import MedusaWorker
from tests.medusa_ppo.vllm_plugin.test_proposer import ProposerStep
from tests.medusa_ppo.vllm_plugin.test_worker_extension import D, V, worker

WAITS_S = 3.0
"""A rank that waits for longer waits for nobody."""
RANKS = 2


class TwoRanks:
    """What two ranks do at once; `here` says who the calling thread is."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.here = threading.local()
        self._store = HashStore()
        monkeypatch.setattr(rank_agreement, "get_tp_group", lambda: self.here.group)

    def product(self, rows: torch.Tensor) -> torch.Tensor:
        """What a sharded product is: a meeting of all ranks."""
        shared = rows.clone()
        self.here.group.cpu_group.allreduce([shared]).wait()
        return shared / RANKS

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        """What each rank's work gives, or the error that it ends with."""

        def one(rank: int) -> Any:
            self.here.rank = rank
            group = ProcessGroupGloo(self._store, rank, RANKS, timedelta(seconds=WAITS_S))

            def all_gather(part: torch.Tensor, dim: int) -> torch.Tensor:
                parts = [torch.empty_like(part) for _ in range(RANKS)]
                group.allgather([parts], [part.contiguous()]).wait()
                return torch.cat(parts, dim)

            self.here.group = SimpleNamespace(
                world_size=RANKS,
                rank_in_group=rank,
                ranks=list(range(RANKS)),
                cpu_group=group,
                all_gather=all_gather,
            )
            try:
                return work(rank)
            except Exception as error:
                return error

        with ThreadPoolExecutor(RANKS) as threads:
            return list(threads.map(one, range(RANKS)))

    def failing(self, original: Callable[..., Any], error: Exception) -> Callable[..., Any]:
        """`original`, but on the second rank alone the error."""

        def maybe(*args: Any, **kwargs: Any) -> Any:
            if self.here.rank == 1:
                raise error
            return original(*args, **kwargs)

        return maybe


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> TwoRanks:
    return TwoRanks(monkeypatch)


@pytest.mark.parametrize("agree", [True, False])
@pytest.mark.parametrize("rows", ["draft vocabulary", "small lm_head", "own lm_heads"])
def test_ranks_that_round_differently_draw_from_the_same_q(
    ranks: TwoRanks, monkeypatch: pytest.MonkeyPatch, rows: str, agree: bool
) -> None:
    """To the bit, whatever each multiplies by itself; not so if each multiplied by all rows alone.
    An odd number of rows is shared, too. tests/medusa_ppo/engines/test_tensor_parallel.py has it in
    an engine.
    """
    from medusa_ppo.vllm_plugin import proposer

    if not agree:
        monkeypatch.setattr(proposer, "shared_product", lambda pack: pack)
    keys = [str(row) for row in range(20)]
    # Seeds, because the threads share torch's generator.
    seeds = list(range(len(keys)))
    steps = [ProposerStep(len(keys), seeds, pairs=2, copy_parts=2) for _ in range(RANKS)]
    ups = torch.rand(steps[0].hidden_1D.shape, generator=torch.Generator().manual_seed(6)) < 0.5
    steps[1].hidden_1D = torch.nextafter(
        steps[1].hidden_1D, torch.where(ups, torch.inf, -torch.inf)
    )

    def work(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        mine = steps[rank].proposer
        pack = proposer.shared_product(plain_linear)
        mine._lm_head = steps[rank].logits
        if rows == "own lm_heads":
            # As many rows as tokens, which two ranks share evenly.
            lm_heads = [steps[rank].lm_head_VD + k for k in range(mine.num_drafts)]
            mine._core._own = [pack(lm_head_VD) for lm_head_VD in lm_heads]
        else:
            size = 7 if rows == "draft vocabulary" else 0
            mine.draft_vocabulary = mine._new_vocabulary(size)
            mine._refresh_vocabulary()
            assert mine.draft_vocabulary.product is not None
        ids_BK = steps[rank].propose(keys, 9)
        return ids_BK, mine._slots.cumulative_KRX[:, : len(keys)].clone()

    first, second = ranks.run(work)
    assert not isinstance(first, Exception) and not isinstance(second, Exception), (first, second)
    assert torch.equal(first[1], second[1]) == agree
    assert torch.equal(first[0], second[0]) or not agree


NO_ROOM = MemoryError("no room for the file")
REFUSED = SwapError("Not these heads.", given="a file", expected="another", do="Swap again.")


def swapping(ranks: TwoRanks, path: Path, ahead: str = "") -> Callable[[int], Any]:
    """A swap on ranks whose lm_head and embedding meet.

    Args:
        ahead: "beside": a thread prepares it, where nobody meets; "late": as late as possible.
    """
    # Not in the threads: they share torch's generator, and the ranks' tables would differ.
    steps = [ProposerStep(2, pairs=2) for _ in range(RANKS)]
    save_state(path, steps[0].proposer.heads.trainable_state())

    def work(rank: int) -> Any:
        step = steps[rank]
        proposer = step.proposer
        proposer._lm_head = lambda rows: ranks.product(step.logits(rows))
        proposer._core._whole_lm_head = proposer._lm_head
        embed = lambda ids_N: ranks.product(step.embed(ids_N))  # noqa: E731
        proposer._core._embed = proposer._core.fused._embed = embed
        ready = proposer.ahead(str(path)) if ahead else None
        if ahead == "beside":
            ready = begin_beside(ready).result
        proposer.swap(str(path), 3, ready=ready)
        return proposer.held_version()

    return work


@pytest.mark.parametrize("ahead", ["", "late"])
@pytest.mark.parametrize("place", ["", "read_state", "check_fit", "check_finite"])
def test_heads_that_one_rank_cannot_read_stay_out_of_all(
    ranks: TwoRanks, place: str, ahead: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from medusa_ppo.vllm_plugin import proposer

    if place:
        error = NO_ROOM if place == "read_state" else REFUSED
        monkeypatch.setattr(proposer, place, ranks.failing(getattr(confirm, place), error))
    first, second = ranks.run(swapping(ranks, tmp_path / "heads", ahead))
    if not place:
        assert (first, second) == (3, 3)
        return
    assert isinstance(first, SwapError) and "Another rank" in str(first), first
    assert str(error).splitlines()[0].split(":")[0] in str(first), "it says what the other said"
    assert second is error


def test_a_thread_prepares_heads_without_meeting_another_rank(
    ranks: TwoRanks, tmp_path: Path
) -> None:
    assert ranks.run(swapping(ranks, tmp_path / "heads", "beside")) == [3, 3]


def test_a_second_set_that_is_wrong_on_one_rank_is_taken_by_none(
    ranks: TwoRanks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It meets the others in every product before it says so."""
    honest = SecondSet.fault

    def fault(self: SecondSet, actor: int | None) -> str:
        return honest(self, actor) or ("head 1: wrong" if ranks.here.rank == 1 else "")

    monkeypatch.setattr(SecondSet, "fault", fault)
    for found in ranks.run(swapping(ranks, tmp_path / "heads", "late")):
        assert isinstance(found, SwapError) and "do not draft as they should" in str(found)


def test_a_table_of_q_that_one_rank_has_no_room_for_replaces_none(
    ranks: TwoRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    from medusa_ppo.vllm_plugin import proposer

    monkeypatch.setattr(proposer, "DraftSlots", ranks.failing(DraftSlots, NO_ROOM))
    proposers = [ProposerStep(2).proposer for _ in range(RANKS)]
    before = [mine._slots for mine in proposers]

    def work(rank: int) -> None:
        vocabulary = proposers[rank].draft_vocabulary
        vocabulary.ids_W, vocabulary.product = torch.arange(3), lambda rows: rows[:, :3]
        proposers[rank]._use_vocabulary()

    first, second = ranks.run(work)
    assert isinstance(first, SwapError) and "making room" in str(first)
    assert second is NO_ROOM
    assert [mine._slots for mine in proposers] == before
    assert [mine._core.ids_W for mine in proposers] == [None] * RANKS


@pytest.mark.parametrize(
    ("part", "settings"),
    [("RunningMemory", {"memory_bytes": 1 << 20}), ("Stopping", {"stop_below": 0.1})],
)
def test_settings_that_one_rank_has_no_room_for_change_nothing_on_any(
    ranks: TwoRanks, monkeypatch: pytest.MonkeyPatch, part: str, settings: Any
) -> None:
    from medusa_ppo.vllm_plugin import proposer

    monkeypatch.setattr(proposer, part, ranks.failing(getattr(proposer, part), NO_ROOM))
    proposers = [ProposerStep(2).proposer for _ in range(RANKS)]
    first, second = ranks.run(lambda rank: proposers[rank].configure({"num_drafts": 1} | settings))
    assert isinstance(first, SwapError) and "Another rank" in str(first)
    assert second is NO_ROOM
    for mine in proposers:
        assert mine.num_drafts > 1 and mine.memory is None and mine.stopping is None


def syncing(ranks: TwoRanks, path: Path) -> Callable[[int], Any]:
    """A sync of the actor on ranks whose lm_head meets."""
    torch.manual_seed(0)
    served_VD = torch.randn(V, D)
    save_state(path, {"lm_head.weight": served_VD})

    def work(_: int) -> Any:
        held = worker("", served_VD)
        model = held.model_runner.get_model()
        product = model.compute_logits
        model.compute_logits = lambda rows: ranks.product(product(rows))
        held.reload_weights = lambda *, weights_iterator: [*weights_iterator]
        held._medusa_drafter = lambda: None
        held._medusa_tied = lambda: False
        done = held.medusa_sync_actor(str(path), 4)
        return held, done

    return work


@pytest.mark.parametrize("place", ["", "read_state", "entries", "load", "compare"])
def test_an_actor_that_one_rank_cannot_take_is_served_by_none(
    ranks: TwoRanks, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if place == "read_state":
        failing = ranks.failing(confirm.read_state, NO_ROOM)
        monkeypatch.setattr(worker_extension, "read_state", failing)
    elif place == "entries":
        failing = ranks.failing(MedusaWorker._medusa_check_entries, REFUSED)
        monkeypatch.setattr(MedusaWorker, "_medusa_check_entries", failing)
    elif place == "load":
        failing = ranks.failing(MedusaWorker._medusa_load, REFUSED)
        monkeypatch.setattr(MedusaWorker, "_medusa_load", failing)
    elif place == "compare":
        equal = torch.equal
        monkeypatch.setattr(torch, "equal", lambda a, b: equal(a, b) and ranks.here.rank == 0)
    first, second = ranks.run(syncing(ranks, tmp_path / "actor"))
    if not place:
        assert first[1]["version"] == second[1]["version"] == 4
        assert first[0]._medusa_actor[0] == 4
        return
    assert not isinstance(first, Exception), first
    with pytest.raises(MedusaError, match="Another rank"):
        raise_reported(first[1])
    if place == "read_state":
        assert second is NO_ROOM
    else:
        with pytest.raises(SwapError):
            raise_reported(second[1])
    if place in ("load", "compare"):
        assert first[0]._medusa_actor == (-1, ""), "half of it is another actor's"
