"""What drafting is counted to do is what the drafting call does: compared with the operations that
it dispatches on fake tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from heads.heads_config import DRAFT_VOCABULARY, HeadsConfig
from heads.modules import MedusaHeads
from medusa_ppo.config.heads_section import HeadsSection
from medusa_ppo.drafting.core import DraftingCore, DraftSampling
from medusa_ppo.drafting.noise import DRAFT_STREAM, uniforms
from medusa_ppo.drafting.products import plain_linear
from medusa_ppo.drafting.slots import DraftSlots
from medusa_ppo.engines.gpu_room import least_parts
from medusa_ppo.predict.draft_work import HeadsDrafter, LayeredDrafter
from medusa_ppo.runtime.hardware import ModelSizes

D, V = 256, 4096
PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.addmm)


@dataclass
class Counted(TorchDispatchMode):
    """Floating point operations of products, and how many operations are no views."""

    flops: list[float] = field(default_factory=list)
    launches: int = 0

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        view = any(
            value.alias_info is not None and not value.alias_info.is_write
            for value in func._schema.returns
        )
        if not view and func.namespace != "prim":
            self.launches += 1
        if func.overloadpacket in PRODUCTS:
            given = [value for value in args if isinstance(value, torch.Tensor)]
            self.flops.append(2.0 * result.numel() * given[-2].shape[-1])
        return result


def dispatched(config: HeadsConfig, drafts: int, sequences: int) -> Counted:
    """The drafting call as it serves, every part that belongs to it but the search for what may be
    copied, which texts decide.
    """
    count = Counted()
    with FakeTensorMode():
        heads = MedusaHeads(config).requires_grad_(False)
        table_VD = torch.empty(config.vocab_size, config.hidden_size)
        core = DraftingCore(heads, plain_linear(table_VD), lambda ids: F.embedding(ids, table_VD))
        hidden_BD = torch.empty(sequences, config.hidden_size)
        ids_B = torch.zeros(sequences, dtype=torch.int64)
        cpu = torch.device("cpu")
        slots = DraftSlots(sequences, config.num_heads, config.vocab_size, cpu)
        # What is made once is made by the first call, which is not counted.
        for counting in (False, True):
            noise_BK = uniforms(ids_B, None, None, DRAFT_STREAM, drafts)
            sampling = DraftSampling(torch.ones(sequences), noise_BK)
            if not counting:
                core.draft(hidden_BD, ids_B, drafts, sampling, slots=slots)
                continue
            with count:
                core.draft(hidden_BD, ids_B, drafts, sampling, slots=slots)
    return count


CONFIGS = {
    "medusa": HeadsConfig(D, V, 4),
    "hydra": HeadsConfig(D, V, 4, "hydra"),
    "two attentions": HeadsConfig(
        D, V, 4, "hydra", mlp_ratio=3, context=16, context_layers=2, feed_forward=2
    ),
    "hydra with a context": HeadsConfig(D, V, 4, "hydra", mlp_ratio=3, context=16, feed_forward=2),
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("drafts", [1, 4])
def test_products_are_those_of_the_call(name: str, drafts: int) -> None:
    config = CONFIGS[name]
    for sequences in (1, 32):
        found = sum(dispatched(config, drafts, sequences).flops)
        drafter = HeadsDrafter(config, V)
        counted = sum(
            2.0 * rows * inputs * outputs
            for rows, inputs, outputs in drafter.products(sequences, drafts)
        )
        # The call folds small products into tables and others into one another.
        assert counted == pytest.approx(found, rel=0.25)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("drafts", [1, 4])
def test_launches_are_those_of_the_call(name: str, drafts: int) -> None:
    config = CONFIGS[name]
    few, many = (dispatched(config, drafts, sequences).launches for sequences in (2, 64))
    assert few == many, "no work for each request by itself"
    drafter = HeadsDrafter(config, V)
    # Within a tenth: a call leaves one or the other out where there is one request or draft.
    assert drafter.launches(drafts) - drafter.beside(drafts) == pytest.approx(few, rel=0.1)


def test_each_head_reads_the_draft_vocabulary_once() -> None:
    config = CONFIGS["hydra with a context"]
    small, all_tokens = (
        [product for product in HeadsDrafter(config, width).products(8, 3) if product[2] == width]
        for width in (512 + 1, V)
    )
    assert len(small) == len(all_tokens) == 3
    medusa = list(HeadsDrafter(CONFIGS["medusa"], V).products(8, 3))
    assert (24, D, V) in medusa, "kind medusa multiplies all rows at once"


def test_drafting_takes_memory_for_heads_and_sums() -> None:
    config = CONFIGS["hydra with a context"]
    drafter = HeadsDrafter(config, V)
    parameters = sum(tensor.numel() for tensor in MedusaHeads(config).parameters())
    assert drafter.parameters == parameters
    grown = drafter.kept_bytes(65) - drafter.kept_bytes(1)
    assert grown == pytest.approx(64 * (4 * 6 * V + 2 * 2 * 16 * D), rel=0.01)


def test_drafting_takes_the_memory_that_an_engine_looks_for_at_its_start() -> None:
    """Copied texts and the draft vocabulary's rows included."""
    config = HeadsSection().sizes(4096, 128256)
    assert config.copies
    arguments = {"dtype": "bfloat16", "max_num_seqs": 1023, "max_model_len": 8192}
    parts = least_parts({}, arguments, {}, config, DRAFT_VOCABULARY, sampled=True)
    kept = HeadsDrafter(config, DRAFT_VOCABULARY).kept_bytes(1024)
    assert kept == pytest.approx(sum(parts.values()), rel=1e-6)


def test_a_drafter_of_layers_goes_pass_by_pass_or_all_at_once() -> None:
    model = ModelSizes(D, 4, 4, 4, 64, 768, V)
    eagle, block = LayeredDrafter(model, 1, V), LayeredDrafter(model, 5, V, one_pass=True)
    assert eagle.passes(7) == 7
    assert block.passes(7) == 1
    assert {rows for rows, _, _ in eagle.products(2, 7)} == {2}
    assert {rows for rows, _, _ in block.products(2, 7)} == {16, 14}
