"""The drafting call of V2 in graphs: with a stand-in for CUDA's (`fake_graphs`), in vLLM's own
manager. Steps of all sizes, through swaps, syncs and everything else that changes what drafts.
"""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("vllm")
pytest.importorskip("vllm.v1.worker.gpu.model_runner")

from vllm.config import CUDAGraphMode

from medusa_ppo.drafting.products import plain_linear
from medusa_ppo.drafting.stopping import Stopping
from medusa_ppo.vllm_plugin import draft_graphs, proposer
from medusa_ppo.vllm_plugin.speculator import MedusaSpeculator
from tests.medusa_ppo.drafting.test_host_reads import Indexing, NoCopies
from tests.medusa_ppo.vllm_plugin.deep_sleep import tensors_of
from tests.medusa_ppo.vllm_plugin.fake_graphs import (
    Capture,
    CaptureError,
    FakeGraph,
    Outliving,
    installed,
)
from tests.medusa_ppo.vllm_plugin.test_speculator_step import SLOTS, D, K, Step

V = 64
SIZES = [1, 2, 4, 8]
"""As vLLM's own: none of them is a full batch, which is 5."""
FORMS = {"alone": (0, 0), "context": (4, 0), "copying": (4, 2)}

pytestmark = pytest.mark.skipif(
    not draft_graphs.can_capture(), reason="this vLLM's manager captures its own models alone"
)


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch)
    # As on a GPU: oneDNN's packed products lie behind handles that no torch operation shows.
    monkeypatch.setattr(proposer, "packed_linear", plain_linear)


class Served(Step):
    """A speculator that serves: other batches in every step."""

    def __init__(self, form: str, *, graphs: bool, sampled: bool = True) -> None:
        super().__init__(*FORMS[form], vocab=V)
        self.last_SK = torch.zeros(SLOTS, dtype=torch.int64)
        self.positions_S = torch.full((SLOTS,), 9)
        drafter, speculator = self.speculator.drafter, self.speculator
        drafter.sampled = sampled
        drafter._refresh_vocabulary()
        speculator.vllm_config = SimpleNamespace(
            scheduler_config=SimpleNamespace(max_num_seqs=SLOTS),
            compilation_config=SimpleNamespace(
                cudagraph_capture_sizes=SIZES, max_cudagraph_capture_size=SIZES[-1]
            ),
            parallel_config=SimpleNamespace(tensor_parallel_size=1),
            speculative_config=SimpleNamespace(num_speculative_tokens=K),
            additional_config={},
        )
        mode = CUDAGraphMode.FULL_AND_PIECEWISE if graphs else CUDAGraphMode.NONE
        speculator.init_cudagraph_manager(mode)
        speculator.capture()

    def serve(self, number: int, most: int = K, cut: bool = False) -> torch.Tensor:
        """A step; its batch and what the model computed follow from its number."""
        torch.manual_seed(number)
        batch = int(torch.randint(1, SLOTS + 1, ()))
        slots_B = torch.randperm(SLOTS)[:batch]
        drafted_B = torch.randint(K + 1, (batch,))
        sampled_B = (torch.rand(batch) * (drafted_B + 2)).long()
        rejected_B = torch.where(sampled_B > 0, drafted_B + 1 - sampled_B, 0)
        starts_X = F.pad((drafted_B + 1).cumsum(0), (1, 0))
        rows = int(starts_X[-1])
        first_B = self.positions_S[slots_B]
        positions = [first_B[i] + torch.arange(int(drafted_B[i]) + 1) for i in range(batch)]
        self.positions_S[slots_B] += sampled_B
        speculator = self.speculator
        top_k_S, top_p_S = torch.arange(SLOTS) + 3, torch.linspace(0.3, 1, SLOTS)
        cuts = (top_k_S, top_p_S) if cut else (None, None)
        speculator.states = SimpleNamespace(
            get_top_k_top_p=lambda slots, *_: tuple(c if c is None else c[slots] for c in cuts)
        )
        batch_of = SimpleNamespace(
            num_reqs=batch,
            idx_mapping=slots_B.int(),
            idx_mapping_np=slots_B.numpy(),
            query_start_loc=starts_X.int(),
            positions=torch.cat(positions),
            input_ids=torch.randint(V, (rows,), dtype=torch.int32),
            cu_num_logits_np=starts_X.numpy().astype(np.int32),
            num_tokens=rows,
        )
        drafts_BK = speculator.propose(
            batch_of,
            None,
            None,
            torch.randn(rows, D),
            None,
            sampled_B.int(),
            rejected_B.int(),
            torch.randint(V, (SLOTS, 1)),
            None,
            self.temperature_S,
            torch.arange(SLOTS) * 7,
            num_speculative_tokens=most,
        )
        return drafts_BK[:, : speculator.count].clone()

    @property
    def replays(self) -> int:
        return sum(graph.replays for graph in self.speculator.graphs.graphs.values())

    def swap(self, seed: int) -> None:
        drafter = self.speculator.drafter
        generator = torch.Generator().manual_seed(seed)
        state = {
            name: torch.randn(view.shape, generator=generator) / 4
            for name, view in drafter.heads.trainable_views().items()
        }
        drafter.heads.load_trainable_state(state)
        drafter._core.load()
        drafter._forget_pairs()
        drafter._refresh_vocabulary()

    def sync(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for table in (self.lm_head_VD, self.table_VD):
            table.copy_(torch.randn(V, D, generator=generator) / 2)
        self.speculator.drafter.target_changed()


def assert_alike(graphed: Served, eager: Served) -> None:
    """Everything that the next step, and verification, reads."""
    # Products of a padded batch are rounded in another order.
    kept = [each.speculator.draft_logits.exp() for each in (graphed, eager)]
    torch.testing.assert_close(*kept, rtol=1e-3, atol=1e-5)
    one, other = graphed.speculator.drafter, eager.speculator.drafter
    if one._ring is not None:
        own = SLOTS * one._ring.pairs
        assert torch.equal(one._ring.stamps_N[:own], other._ring.stamps_N[:own])
        torch.testing.assert_close(one._ring.kept_NR[:own], other._ring.kept_NR[:own])
    if one._texts is not None:
        assert torch.equal(one._texts.ids_SL[:SLOTS], other._texts.ids_SL[:SLOTS])
    lengths = graphed.speculator.lengths_B, eager.speculator.lengths_B
    assert (lengths[0] is None) == (lengths[1] is None)
    if lengths[0] is not None:
        assert lengths[0].tolist() == lengths[1].tolist()


@pytest.mark.parametrize("sampled", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_replays_draft_what_calls_draft(form: str, sampled: bool) -> None:
    """Through swaps of heads and syncs of the actor, which change values and no address: no graph
    is captured again for them.
    """
    graphed = Served(form, graphs=True, sampled=sampled)
    eager = Served(form, graphs=False, sampled=sampled)
    captured = dict(graphed.speculator.graphs.graphs)
    assert [(desc.num_reqs, desc.drafts) for desc in captured] == [(5, K), (4, K), (2, K), (1, K)]
    with torch.inference_mode():
        for number in range(24):
            most = 1 if number % 6 == 5 else K
            cut = sampled and number % 4 == 3
            drafts = [each.serve(number, most, cut) for each in (graphed, eager)]
            assert torch.equal(*drafts), number
            assert_alike(graphed, eager)
            if number % 8 == 3:
                graphed.swap(number), eager.swap(number)
            if number % 8 == 6:
                graphed.sync(number), eager.sync(number)
    graphs = graphed.speculator.graphs.graphs
    assert all(graphs[desc] is graph for desc, graph in captured.items())
    assert graphed.replays == 24
    cuts = {desc.cut for desc in graphs}
    assert {desc.drafts for desc in graphs} == {1, K} and cuts == (
        {True, False} if sampled else {False}
    )


def test_an_early_end_and_a_draft_vocabulary_are_in_the_graph() -> None:
    """What changes the shapes, and not only values, makes graphs be captured anew: once."""
    graphed, eager = Served("context", graphs=True), Served("context", graphs=False)
    first = graphed.speculator.graphs.graphs.copy()
    for each in (graphed, eager):
        drafter = each.speculator.drafter
        drafter.stopping = Stopping(0.3, SLOTS, K, drafter.device)
        drafter._changes += 1
    ended = 0
    with torch.inference_mode():
        for number in range(80):
            if number == 20:
                for each in (graphed, eager):
                    drafter = each.speculator.drafter
                    drafter.draft_vocabulary = drafter._new_vocabulary(6)
            drafts = [each.serve(number) for each in (graphed, eager)]
            assert torch.equal(*drafts), number
            assert_alike(graphed, eager)
            ended += int((graphed.speculator.lengths_B < K).sum())
            if number == 39:
                begun = dict(graphed.speculator.graphs.graphs)
            if number % 10 == 5:
                graphed.swap(number), eager.swap(number)
    assert ended > 5, "runs ended early"
    ids_W = graphed.speculator.drafter.ids_W
    assert ids_W is not None and len(ids_W) == 6
    assert torch.equal(ids_W, eager.speculator.drafter.ids_W)
    last = graphed.speculator.graphs.graphs
    assert not set(map(id, first.values())) & set(map(id, begun.values())), "the width changed"
    assert all(last[desc] is graph for desc, graph in begun.items()), "tokens changed, no address"


def test_steps_that_were_held_are_read_outside_of_the_graph() -> None:
    graphed, eager = Served("context", graphs=True), Served("context", graphs=False)
    with torch.inference_mode():
        for number in range(12):
            for each in (graphed, eager):
                each.speculator.drafter.num_drafts = 0 if number in (3, 4, 8) else K
            drafts = [each.serve(number) for each in (graphed, eager)]
            assert torch.equal(*drafts), number
            assert_alike(graphed, eager)
    assert graphed.replays == 12 - 3 - 2, "but for the steps without drafts and those behind them"


@pytest.mark.parametrize("form", FORMS)
def test_nothing_that_the_call_makes_outlives_it(form: str) -> None:
    served = Served(form, graphs=False)
    speculator = served.speculator
    speculator.drafter.stopping = Stopping(0.3, SLOTS, K, torch.device("cpu"))
    with torch.inference_mode():
        served.serve(1)
        held = {tensor.data_ptr() for tensor in tensors_of(speculator)}
        with Outliving() as seen:
            speculator._call(4, K, True)
        gc.collect()
        assert seen.alive == 0
        assert {tensor.data_ptr() for tensor in tensors_of(speculator)} == held


@pytest.mark.parametrize("form", FORMS)
def test_a_swap_and_a_sync_leave_every_address(form: str) -> None:
    served = Served(form, graphs=False)
    drafter = served.speculator.drafter
    layout = drafter.layout

    def addresses() -> set[int]:
        return {t.data_ptr() for t in tensors_of(drafter) if t.numel() and t.dim()}

    served.swap(1)
    before = addresses()
    served.swap(2)
    served.sync(3)
    assert addresses() == before
    assert drafter.layout == layout


def test_vllm_drops_them_after_its_profile() -> None:
    """`profile_cudagraph_memory` looks for managers among the speculator's attributes."""
    served = Served("alone", graphs=True)
    managers = [
        name
        for name, value in vars(served.speculator).items()
        if isinstance(value, draft_graphs.CudaGraphManager)
    ]
    assert managers == ["graphs"]
    served.speculator.graphs = None
    with torch.inference_mode():
        served.serve(1)
    served.speculator.init_cudagraph_manager(CUDAGraphMode.NONE)
    assert served.speculator.graphs is None


def test_sizes_are_vllms_and_a_full_batch() -> None:
    assert draft_graphs.sizes_of([1, 2, 4, 8], 5) == [1, 2, 4, 5]
    assert draft_graphs.sizes_of([1, 2, 4, 8], 8) == [1, 2, 4, 8]
    assert draft_graphs.sizes_of([1, 2, 4], 8) == [1, 2, 4]
    assert draft_graphs.sizes_of([], 8) == []


# ---- the instrument


def test_the_stand_in_refuses_what_cuda_refuses() -> None:
    value_N = torch.arange(4)
    for wrong in (
        lambda: value_N.sum().item(),
        value_N.nonzero,
        lambda: value_N[value_N > 1],
        lambda: bool((value_N > 1).any()),
        lambda: torch.rand(3),
        lambda: torch.tensor([1, 2]),
    ):
        with pytest.raises(CaptureError), Capture(FakeGraph()):
            wrong()


def test_the_stand_in_sees_what_python_alone_has_changed() -> None:
    held = SimpleNamespace(weight_N=torch.ones(3), factor=2.0)
    out_N = torch.zeros(3)
    graph = FakeGraph()
    with torch.inference_mode(), Capture(graph):
        out_N.copy_(held.weight_N * held.factor + 1)
    held.weight_N.fill_(5)
    graph.replay()
    assert out_N.tolist() == [11] * 3, "values in place are seen"
    held.factor = 3.0
    graph.replay()
    assert out_N.tolist() == [11] * 3, "numbers of Python are not"
    held.weight_N = torch.ones(3)
    with pytest.raises(CaptureError, match="given back"):
        graph.replay()


def test_the_stand_in_gives_its_memory_away() -> None:
    graph = FakeGraph()
    with torch.inference_mode(), Capture(graph):
        made_N = torch.ones(3) * 2
    graph.forget()
    assert not made_N.isfinite().any()


# ---- on the device


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("cut", [False, True])
def test_the_call_stays_on_the_device(form: str, cut: bool) -> None:
    """From `_inputs` to `_inputs` under a fake CUDA device: no value crosses."""
    with torch.inference_mode(), FakeTensorMode(), Indexing():
        with torch.device("cuda"):
            served = Served.__new__(Served)
            Step.__init__(served, *FORMS[form], vocab=V)
        speculator: Any = served.speculator
        assert isinstance(speculator, MedusaSpeculator)
        with NoCopies():
            speculator._clear(3)
            speculator._call(3, K, cut)
        rows = speculator._inputs.rows(3)
        assert rows.drafts_BK.device.type == "cuda" and rows.drafts_BK.shape == (3, K)
