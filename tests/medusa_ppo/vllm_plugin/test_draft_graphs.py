"""V2's drafting call, recorded and replayed: the same drafts as without, on tensors whose addresses
stay. A CPU has no CUDA graphs; here a recording is the call's operations, which run again on the
tensors that they had.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

pytest.importorskip("vllm")
pytest.importorskip("vllm.v1.worker.gpu.model_runner")

from medusa_ppo.vllm_plugin.draft_graphs import EAGER_USES, DraftGraphs, padded_sizes
from tests.medusa_ppo.vllm_plugin.test_speculator_step import SLOTS, D, K, Step, V


class SameShapes(TorchFunctionMode):
    """What a recording can't hold: values that the host reads or sends. On a CPU nothing is copied
    for these, so no operation shows them.
    """

    REFUSED = (
        *(torch.Tensor.tolist, torch.Tensor.item, torch.Tensor.numpy, torch.Tensor.cpu),
        *(torch.Tensor.__bool__, torch.Tensor.__int__, torch.Tensor.__float__),
        *(torch.tensor, torch.as_tensor, torch.from_numpy),
    )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in self.REFUSED, func
        return func(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    """The operations of a call, with the tensors that they read and wrote. Sizes and branches that
    come from a tensor's values are refused.
    """

    REFUSED = ("nonzero", "_local_scalar_dense", "masked_select", "unique", "is_nonzero", "item")

    def __init__(self) -> None:
        super().__init__()
        self._made: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).split(".")[1]
        assert not name.startswith(self.REFUSED), func
        if name.startswith("index"):
            assert not any(
                isinstance(index, torch.Tensor) and index.dtype == torch.bool
                for given in args
                if isinstance(given, list | tuple)
                for index in given
            ), func
        result = func(*args, **(kwargs or {}))
        self._made.append((func, args, kwargs or {}, result))
        return result

    @torch.inference_mode()
    def again(self) -> None:
        """Run them again: each reads and writes the memory that it read and wrote."""
        for func, args, kwargs, result in self._made:
            given = {at(value) for value in tensors((args, kwargs))}
            writes = any(
                one.alias_info is not None and one.alias_info.is_write
                for one in func._schema.arguments
            )
            own = [value for value in tensors(result) if at(value) not in given]
            # A view is one still.
            if writes:
                func(*args, **kwargs)
            elif own:
                for place, value in zip(
                    tensors(result), tensors(func(*args, **kwargs)), strict=True
                ):
                    place.copy_(value)


def tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def at(value: torch.Tensor) -> int:
    """Where a tensor's memory lies."""
    return value.untyped_storage().data_ptr()


class Counted(TorchDispatchMode):
    """Counts the operations that would be kernels on a GPU: all but views and empty tensors."""

    FREE = ("empty", "empty_like", "new_empty", "empty_strided", "_unsafe_view", "detach")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema = func._schema
        view = schema.returns and all(
            value.alias_info is not None and not value.alias_info.is_write
            for value in schema.returns
        )
        self.count += not view and schema.name.split("::")[1] not in self.FREE
        return func(*args, **(kwargs or {}))


class Again:
    """Stands for a CUDA graph. As one, it runs no Python again."""

    def __init__(self, call: Callable[[], torch.Tensor]) -> None:
        self._call = call
        self._operations = Operations()
        with SameShapes(), self._operations:
            self.result = call().clone()
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        self._operations.again()


class Scene:
    """A speculator with graphs (or without) that takes steps of changing batches."""

    def __init__(self, recorded: bool, pairs: int, copy_parts: int) -> None:
        self.step = Step(pairs, copy_parts)
        self.speculator = self.step.speculator
        texts = self.speculator.drafter._texts
        if texts is not None:
            texts.one_by_one = False  # As on a GPU: nothing is asked of the host.
        self.recordings: list[Again] = []
        self.graphs = DraftGraphs(SLOTS, K, self.record)
        if recorded:
            self.speculator._graphs = self.graphs
        self.position_S = np.full(SLOTS, 9)
        self.last_S1 = torch.zeros(SLOTS, 1, dtype=torch.int64)
        self.seeds_S = torch.arange(SLOTS)

    def record(self, call: Callable[[], torch.Tensor]) -> tuple[Again, torch.Tensor]:
        again = Again(call)
        self.recordings.append(again)
        return again, again.result

    def take(self, slots: list[int], seed: int, verified: int = 0) -> torch.Tensor:
        """A step of these requests, each of which verified so many drafts and accepted one less."""
        generator = torch.Generator().manual_seed(seed)
        count, rows = len(slots), len(slots) * (verified + 1)
        self.position_S[slots] += max(verified, 1)
        last = torch.from_numpy(self.position_S[slots])
        ahead = torch.arange(-max(verified - 1, 0), verified - max(verified - 1, 0) + 1)
        batch = SimpleNamespace(
            num_reqs=count,
            req_ids=[str(slot) for slot in slots],
            idx_mapping=torch.tensor(slots, dtype=torch.int32),
            idx_mapping_np=np.array(slots),
            query_start_loc=torch.arange(count + 1, dtype=torch.int32) * (verified + 1),
            positions=(last.unsqueeze(1) + ahead).flatten(),
            input_ids=torch.randint(V, (rows,), generator=generator, dtype=torch.int32),
            cu_num_logits_np=np.arange(count + 1) * (verified + 1),
            num_tokens=rows,
        )
        hidden_TD = torch.randn(rows + 3, D, generator=generator)
        self.last_S1.copy_(torch.randint(V, (SLOTS, 1), generator=generator))
        return self.speculator.propose(
            batch,
            None,
            None,
            # vLLM's own tensor has more rows than the step.
            hidden_TD,
            None,
            torch.full((count,), max(verified, 1), dtype=torch.int32),
            torch.full((count,), min(verified, 1), dtype=torch.int32),
            self.last_S1,
            None,
            # V2 has several buffers, in turn.
            self.step.temperature_S.clone(),
            self.seeds_S,
        )

    def kept(self) -> list[torch.Tensor]:
        """What verification and later steps read."""
        drafter = self.speculator.drafter
        ring, texts, slots = drafter._ring, drafter._texts, drafter.slots
        found = [slots.stamps_R[:SLOTS], slots.rows_S[:SLOTS]]
        if ring is not None:
            found += [ring.stamps_N[: -ring.pairs], ring.kept_NR[: -ring.pairs]]
        if texts is not None:
            found += [texts.newest_S[:SLOTS], texts.ids_SL[:SLOTS], texts.keys_SALw[:SLOTS]]
        return found


BATCHES = [[1, 4, 3], [1, 4, 3], [4, 1], [0, 1, 2, 3, 4], [3], [2, 0, 4], [4, 1], [3], [3, 1, 4]]
KINDS = {"alone": (0, 0), "context": (4, 0), "copying": (4, 2)}


@pytest.mark.parametrize("kind", KINDS)
def test_replayed_drafts_are_those_of_the_call(kind: str) -> None:
    """Whatever the batch: what is beyond it belongs to requests of an earlier one, and must neither
    be drafted for nor written to.
    """
    eager, recorded = Scene(False, *KINDS[kind]), Scene(True, *KINDS[kind])
    for turn in range(3):
        for number, slots in enumerate(BATCHES):
            drawn = []
            for scene in (eager, recorded):
                ids_BK = scene.take(slots, 10 * turn + number, verified=min(turn, 1) * K)
                drafts = scene.speculator.drafter.slots
                rows_B = drafts.rows_S[slots]
                drawn.append((ids_BK, drafts.cumulative_KRX[:, rows_B].clone()))
            (ids_BK, sums_KBX), (other_BK, others_KBX) = drawn
            # A product with more rows is rounded differently: a uniform number that is next to a
            # sum may draw the column beside it.
            assert int((ids_BK - other_BK).abs().max()) <= 1, (turn, slots)
            torch.testing.assert_close(sums_KBX, others_KBX, rtol=1e-5, atol=1e-6)
            for left, right in zip(eager.kept(), recorded.kept(), strict=True):
                torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)
    assert len(recorded.recordings) == len({1, 2, 4, 5}) and not eager.recordings
    assert sum(again.replays for again in recorded.recordings) > len(BATCHES)
    assert not recorded.graphs.broken


def test_a_recording_reads_and_writes_the_memory_that_it_was_made_with() -> None:
    """So that a tensor that moves unnoticed shows here, and not on a GPU alone."""
    scene = Scene(True, 4, 2)
    for number in range(EAGER_USES + 2):
        scene.take([1, 4, 3], number)
    slots = scene.speculator.drafter.slots
    before = slots.stamps_R.clone()
    moved = slots.stamps_R
    slots.stamps_R = moved.clone()
    scene.take([1, 4, 3], 7)
    assert torch.equal(slots.stamps_R, before) and not torch.equal(moved, before)


@pytest.mark.parametrize(
    "read",
    [
        lambda value: value.tolist(),
        lambda value: value.sum().item(),
        lambda value: value.cpu(),
        lambda value: value[value > 0],
        lambda value: value.nonzero(),
        lambda value: bool(value.any()),
        lambda value: torch.tensor([1]),
    ],
)
def test_a_recording_holds_nothing_that_the_host_reads(read: Callable[[torch.Tensor], Any]) -> None:
    value = torch.ones(3)

    def call() -> torch.Tensor:
        read(value)
        return value

    with pytest.raises(AssertionError), torch.inference_mode():
        Again(call)


def test_a_recorded_step_is_few_kernels() -> None:
    """Each takes some microseconds of a step that may take two milliseconds. (On a GPU a
    normalisation is one kernel, and the sums that drafts are drawn with are more.)
    """
    scene = Scene(True, 16, 4)
    for number in range(EAGER_USES + 1):
        scene.take([1, 4, 3], number, verified=K)
    with Counted() as counted:
        scene.recordings[0]._call()
    assert counted.count <= 195


def test_other_heads_are_recorded_anew() -> None:
    eager, recorded = Scene(False, 4, 2), Scene(True, 4, 2)
    for turn in range(3):
        for scene in (eager, recorded):
            drafter = scene.speculator.drafter
            for parameter in drafter.heads.parameters():
                parameter.data.mul_(1.5)
            drafter._core.load()
            drafter._forget_pairs()
        for number in range(EAGER_USES + 2):
            ids = [scene.take([1, 4, 3], 10 * turn + number) for scene in (eager, recorded)]
            assert torch.equal(*ids)
        assert len(recorded.recordings) == turn + 1
        assert recorded.recordings[-1].replays == 2


def test_a_step_that_was_recorded_does_not_count_for_the_times_of_steps() -> None:
    scene = Scene(True, 4, 0)
    scene.speculator.drafter._step_began = 1.0
    for number in range(EAGER_USES):
        scene.take([1, 4], number)
    assert scene.speculator.drafter._step_began == 1.0
    scene.take([1, 4], 7)
    assert scene.speculator.drafter._step_began is None and scene.graphs.recorded_now
    scene.take([1, 4], 8)
    assert not scene.graphs.recorded_now


@pytest.mark.parametrize("kind", ["context", "copying"])
def test_steps_without_drafts_are_recorded_too(kind: str) -> None:
    """Their pairs are written at once. Without recordings they wait on the host until the next
    drafts, which then find the same.
    """
    eager, recorded = Scene(False, *KINDS[kind]), Scene(True, *KINDS[kind])
    for number, count in enumerate([K, K, 0, 0, 0, K, 1, 0, K, K, 1, 0, 1]):
        drafts = []
        for scene in (eager, recorded):
            scene.speculator.drafter.num_drafts = count
            ids_BK = scene.take([1, 4, 3], number, verified=min(number, 1))
            drafts.append(ids_BK[:, :count])
        assert torch.equal(*drafts), number
        if count:
            for left, right in zip(eager.kept(), recorded.kept(), strict=True):
                torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)
    assert len(recorded.recordings) == len({K, 1, 0})
    assert len(recorded.speculator.drafter._unread) == 0


def test_a_step_with_more_rows_than_a_recording_has_is_not_replayed() -> None:
    """One with prompts."""
    scene = Scene(True, 4, 0)
    for number in range(EAGER_USES + 1):
        scene.take([1, 4], number)
    (again,) = scene.recordings
    replays = again.replays
    scene.take([1, 4], 23, verified=K + 1)
    assert again.replays == replays
    scene.take([1, 4], 24)
    assert again.replays == replays + 1


def test_what_can_not_be_recorded_is_computed_as_before(caplog: pytest.LogCaptureFixture) -> None:
    eager, refusing = Scene(False, 4, 2), Scene(True, 4, 2)

    def refuse(call: Callable[[], torch.Tensor]) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    refusing.graphs._record = refuse
    for number in range(EAGER_USES + 3):
        ids = [scene.take([1, 4, 3], number) for scene in (eager, refusing)]
        assert torch.equal(*ids)
    assert "not permitted" in refusing.graphs.broken
    assert caplog.text.count("takes longer") == 1


@pytest.mark.parametrize("most", [1, 2, 3, 5, 8, 9, 32, 100, 1024])
def test_sizes_reach_the_most_requests_with_little_padding(most: int) -> None:
    sizes = padded_sizes(most)
    assert list(sizes) == sorted(set(sizes)) and sizes[-1] == most
    for below, above in itertools.pairwise(sizes):
        assert above <= 2 * below and (below < 32 or above - below <= below / 4)


@pytest.mark.parametrize("why", ["no heads yet", "few pairs"])
def test_the_text_to_copy_from_has_no_gaps(why: str) -> None:
    """Neither where heads come while requests run, nor where a step samples more tokens than the
    heads' other attention looks back.
    """
    whole = Scene(recorded=False, pairs=K + 1, copy_parts=2)
    other = Scene(recorded=False, pairs=1 if why == "few pairs" else K + 1, copy_parts=2)
    other.speculator.drafter.fed = why == "few pairs"
    for scene in (whole, other):
        for seed, verified in enumerate((K, 0, K)):
            scene.take([1, 4], seed, verified)
    told, texts = (scene.speculator.drafter._texts for scene in (whole, other))
    assert int(told.newest_S[1]) > K
    assert torch.equal(texts.newest_S[:SLOTS], told.newest_S[:SLOTS])
    assert torch.equal(texts.ids_SL[:SLOTS], told.ids_SL[:SLOTS])
