"""Under a fake CUDA device: nothing in drafting, keeping q or looking it up reads a host value or
copies between devices.

Shape letters as in the modules.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from heads.heads_config import HeadsConfig
from heads.modules import MedusaHeads
from medusa_ppo.config.heads_section import HeadsSection
from medusa_ppo.drafting.context import Arrived, ContextHeads, PairRing, Standing
from medusa_ppo.drafting.core import DraftingCore, DraftSampling
from medusa_ppo.drafting.memory import SUFFIX, Drawn, Recall, Trust, Waiting
from medusa_ppo.drafting.noise import ACCEPT_STREAM, DRAFT_STREAM, uniforms
from medusa_ppo.drafting.slots import DraftSlots, stamps
from medusa_ppo.drafting.stopping import Stopping
from medusa_ppo.drafting.texts import TextRing
from medusa_ppo.drafting.verify import DraftRows, TargetRows, accepted_run, residual_sample

D, V, K, B, W = 8, 12, 4, 5, 6


class Indexing(TorchFunctionMode):
    """Brackets by operators: a torch without CUDA refuses them on tensors that say they are on such
    a device.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__getitem__:
            return take(*args)
        if func is torch.Tensor.__setitem__:
            return torch.ops.aten.copy_(take(*args[:2]), args[2])
        return func(*args, **(kwargs or {}))


def take(tensor: torch.Tensor, index: Any) -> torch.Tensor:
    parts = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis in [part if part is Ellipsis else 0 for part in parts]:
        at = next(i for i, part in enumerate(parts) if part is Ellipsis)
        parts[at : at + 1] = [slice(None)] * (
            tensor.dim() - len([p for p in parts if p is not None]) + 1
        )
    if any(isinstance(part, torch.Tensor) for part in parts):
        for dim, part in enumerate(parts):
            if isinstance(part, slice):
                ends = part.start, part.stop, part.step or 1
                tensor = torch.ops.aten.slice(tensor, dim, *ends)
        return torch.ops.aten.index(
            tensor, [None if isinstance(part, slice) else part for part in parts]
        )
    dim = 0
    for part in parts:
        if part is None:
            tensor = tensor.unsqueeze(dim)
        elif isinstance(part, int):
            tensor = tensor.select(dim, part)
            dim = dim - 1
        else:
            tensor = torch.ops.aten.slice(tensor, dim, part.start, part.stop, part.step or 1)
        dim += 1
    return tensor


def devices(values: Any) -> set[str]:
    """Kinds of the devices that these values, or this one, are on."""
    found = values if isinstance(values, tuple | list) else [values]
    return {value.device.type for value in found if isinstance(value, torch.Tensor)}


class NoReads(TorchDispatchMode):
    """An operation whose result is on another device than what it was given is an error; reading a
    value of a fake tensor is one anyway. The host may compute with what it has.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given, made = devices(args), devices(result)
        assert not given or made <= given, f"{func} goes from {given} to {made}"
        return result


class NoCopies(NoReads):
    """The host does nothing either."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        assert "cpu" not in devices(args) | devices(result), f"{func} works on the host"
        return result


def test_the_instrument_sees_a_read_and_a_copy() -> None:
    with FakeTensorMode():
        value_B = torch.zeros(B, device="cuda")
        with Indexing(), NoCopies():
            with pytest.raises(AssertionError, match="goes from"):
                value_B.cpu()
            with pytest.raises(AssertionError, match="goes from"):
                torch.ops.aten._to_copy(value_B, device=torch.device("cpu"))
            with pytest.raises(DataDependentOutputException):
                value_B.sum().item()
            with pytest.raises(AssertionError, match="on the host"):
                torch.ones(3)


@pytest.mark.parametrize("kind", ["medusa", "hydra", "context", "default"])
@pytest.mark.parametrize("vocabulary", [False, True])
def test_a_step_stays_on_the_device(kind: str, vocabulary: bool) -> None:
    width = W if vocabulary else V
    with FakeTensorMode(), Indexing():
        with torch.device("cuda"):
            if kind == "default":
                config = HeadsSection(num_heads=K).sizes(D, V)
            else:
                pairs = 4 if kind == "context" else 0
                config = HeadsConfig(D, V, K, kind="hydra" if pairs else kind, context=pairs)
            heads = MedusaHeads(config).requires_grad_(False)
            lm_head_VD, table_VD, hidden_BD = (torch.zeros(rows, D) for rows in (V, V, B))
            ids_W = torch.zeros(W, dtype=torch.int64) if vocabulary else None
            rows_B = torch.zeros(B, dtype=torch.int64)
            share_B = torch.ones(B)
            rows_BK = torch.zeros(B, K, dtype=torch.int64)
            logprobs_NV = torch.zeros(B * (K + 1), V)
            numbers_BW = torch.zeros(B, K + 1, dtype=torch.float64)
        core = DraftingCore(
            heads, lambda f: F.linear(f, lm_head_VD), lambda i: F.embedding(i, table_VD)
        )
        if ids_W is not None:
            core.use_vocabulary(ids_W, lambda f: F.linear(f, lm_head_VD.narrow(0, 0, W)))
        slots = DraftSlots(8, K, width, rows_B.device, ids_W)
        device = rows_B.device
        ring = PairRing(8, max(config.context, 1), 2 * D, hidden_BD.dtype, device)
        texts = TextRing(8, 64, max(config.copy_parts, 1), 64, hidden_BD.dtype, device)
        with NoCopies():
            seen = None
            at = Standing(rows_B, rows_B, rows_B)
            if isinstance(core.fused, ContextHeads):
                arrived = Arrived.of_step(
                    hidden_BD, rows_B, rows_B, rows_B, rows_B, at, ring.spare, K + 1
                )
                seen = core.fused.look_back(ring, arrived, at)
                if core.copier is not None:
                    core.copier.write(texts, arrived.slots_N, arrived.positions_N, arrived.ids_N)
                    told_BKH = core.copier.find(texts, rows_B, rows_B)
                    seen = replace(seen, told_BKH=told_BKH)
            sampling = DraftSampling(
                share_B, uniforms(rows_B, rows_B, rows_B == 0, DRAFT_STREAM, K), rows_B, share_B
            )
            for count, how in ((K, sampling), (K - 1, None)):
                drafted = core.draft(hidden_BD, rows_B, count, how, seen, slots)
                assert drafted.ids_BK.shape == (B, count) and drafted.ids_BK.device.type == "cuda"
                slots.stamp(rows_B, stamps(rows_B, rows_B), count)
            kept = slots.look_up(rows_B, stamps(rows_B, rows_B), K)
            assert kept.rows(rows_B.unsqueeze(1)).shape == (B, width)
            uniforms(rows_B, None, None, ACCEPT_STREAM, K)
            drafts = DraftRows(rows_BK, rows_B, rows_B, rows_BK)
            target = TargetRows(logprobs_NV)
            run = accepted_run(target, drafts, numbers_BW[:, :K], kept)
            ends_BV = target.rows(run.length_B)
            last_B = residual_sample(ends_BV, drafts, run, numbers_BW[:, -1], kept)
            assert last_B.shape == (B,) and last_B.device.type == "cuda"


@pytest.mark.parametrize("vocabulary", [False, True])
def test_a_memory_and_an_early_end_stay_on_the_device(vocabulary: bool) -> None:
    with FakeTensorMode(), Indexing():
        with torch.device("cuda"):
            heads = MedusaHeads(HeadsConfig(D, V, K, kind="hydra")).requires_grad_(False)
            lm_head_VD, table_VD, hidden_BD = (torch.zeros(rows, D) for rows in (V, V, B))
            ids_W = torch.zeros(W, dtype=torch.int64) if vocabulary else None
            rows_B = torch.zeros(B, dtype=torch.int64)
            share_B = torch.ones(B)
            texts_BX = torch.zeros(B, SUFFIX + 9, dtype=torch.int32)
            weight_BP = torch.ones(B, 9)
            noise_BK = torch.zeros(B, K, dtype=torch.float64)
        core = DraftingCore(
            heads, lambda f: F.linear(f, lm_head_VD), lambda i: F.embedding(i, table_VD)
        )
        if ids_W is not None:
            core.use_vocabulary(ids_W, lambda f: F.linear(f, lm_head_VD.narrow(0, 0, W)))
        slots = DraftSlots(8, K, W if vocabulary else V, rows_B.device, ids_W)
        trust = Trust(rows_B.device)
        waiting = Waiting(8, K, rows_B.device)
        stopping = Stopping(0.1, 8, K, rows_B.device)
        with NoCopies():
            recall = Recall(texts_BX, weight_BP, texts_BX[:, :SUFFIX], trust, rows_B, waiting)
            ending = stopping.begin(rows_B)
            drafted = core.draft(
                hidden_BD, rows_B, K, DraftSampling(share_B, noise_BK), None, slots, recall, ending
            )
            assert drafted.lengths_B is not None and drafted.lengths_B.device.type == "cuda"
            trust.learn(Drawn(rows_B, share_B, share_B, share_B, share_B), share_B, share_B)
            stopping.settle(rows_B, rows_B, rows_B)
