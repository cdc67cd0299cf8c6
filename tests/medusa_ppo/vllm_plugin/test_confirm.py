"""The probe after a swap: silent for what the file's heads draft, whatever their kind and dtype;
not for anything else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from heads.heads_config import HeadsConfig
from heads.modules import MedusaHeads
from medusa_ppo.drafting.core import DraftingCore
from medusa_ppo.drafting.products import DraftVocabulary, plain_linear
from medusa_ppo.vllm_plugin.confirm import (
    Plain,
    find_difference,
    fixed_inputs,
    fixed_sampling,
    given_tokens,
    plain_logprobs,
    what_is_seen,
)

D, V, K = 32, 60, 3
CPU = torch.device("cpu")


def summed_in_parts(weight: torch.Tensor, parts: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """A product that is cut along its inner dimension, as cuBLAS may cut one: each part is rounded
    to 16 bits, and so is each sum of parts.
    """
    columns = torch.arange(weight.shape[1]).chunk(parts)

    def product(rows: torch.Tensor) -> torch.Tensor:
        rows = rows.to(weight.dtype)
        partial_sums = [rows[..., part] @ weight[:, part].T for part in columns]
        return reduce(torch.add, partial_sums)

    return product


class ConfirmScene:
    """Heads that draft as in the engine, and the probe's verdict on them."""

    def __init__(
        self,
        kind: str,
        dtype: torch.dtype = torch.float32,
        lm_head: str = "shared",
        layers: int = 1,
    ) -> None:
        torch.manual_seed(0)
        # "deep" is what new heads of a run are, but for a second layer.
        pairs = 6 if kind in ("context", "deep") else 0
        deep = {"context_layers": 2, "feed_forward": 2, "copy_parts": 4} if kind == "deep" else {}
        self.config = HeadsConfig(
            D,
            V,
            K,
            kind="hydra" if pairs else kind,
            lm_head=lm_head,
            num_layers=layers,
            context=pairs,
            **deep,
        )
        self.dtype = dtype
        self.lm_head_VD = torch.randn(V, D).to(dtype)
        self.table_VD = torch.randn(V, D).to(dtype)
        self.heads = self.random(1)
        self.draft_vocabulary: DraftVocabulary | None = None

    def random(self, seed: int, scale: float = 0.1) -> MedusaHeads:
        torch.manual_seed(seed)
        heads = MedusaHeads(self.config).to(self.dtype).requires_grad_(False)
        for parameter in heads.parameters():
            parameter.copy_(torch.randn_like(parameter) * scale)
        return heads

    def logits(self, features_ND: torch.Tensor) -> torch.Tensor:
        return features_ND.to(self.dtype) @ self.lm_head_VD.T

    def embed(self, ids_B: torch.Tensor) -> torch.Tensor:
        return self.table_VD[ids_B]

    def verdict(
        self,
        state: dict[str, torch.Tensor],
        packed_from: MedusaHeads | None = None,
        temperature: float = 1.0,
        native: bool = False,
        parts: int = 0,
        allowed: int = V,
    ) -> str:
        fixed = fixed_inputs(self.config, self.dtype, CPU)
        hydra = self.config.kind == "hydra"
        pack = plain_linear if native else lambda weight: plain_linear(weight.float())
        if parts:
            pack = partial(summed_in_parts, parts=parts)
        core = DraftingCore(packed_from or self.heads, self.logits, self.embed, pack)
        core.use_temperature(temperature)
        ids_W = self.draft_vocabulary.ids_W if self.draft_vocabulary else None
        core.use_vocabulary(ids_W, self.draft_vocabulary.product if self.draft_vocabulary else None)
        seen = what_is_seen(core, fixed)
        draft = core.draft(
            fixed.hidden_BnD[:, -1], fixed.ids_Bn[:, -1], K, fixed_sampling(K, CPU), seen
        )

        def masked(features_ND: torch.Tensor) -> torch.Tensor:
            logits_NV = self.logits(features_ND)
            logits_NV[:, allowed:] = -torch.inf
            return logits_NV

        plain = Plain(masked, self.embed if hydra else None, self.dtype, temperature, ids_W)
        return find_difference(draft, state, self.config, fixed, plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["medusa", "hydra", "context", "deep"])
def test_it_knows_the_heads_of_the_file(kind: str, dtype: torch.dtype) -> None:
    scene = ConfirmScene(kind, dtype, layers=2)
    state = scene.heads.trainable_state()
    assert (
        scene.verdict(state)
        == ""
        == scene.verdict(state, temperature=0.5)
        == scene.verdict(state, native=True)
    )
    assert "head 1" in scene.verdict(scene.random(2).trainable_state())


def test_tokens_that_a_loop_forbids_by_a_mask_on_the_actors_logits_are_no_difference() -> None:
    """verl masks what its tokenizer lacks, and a swap was refused where the heads multiply with
    their own copy of lm_head.
    """
    scene = ConfirmScene("deep")
    state = scene.heads.trainable_state()
    assert scene.verdict(state, allowed=V - V // 8) == ""
    assert "head 1" in scene.verdict(scene.random(2).trainable_state(), allowed=V - V // 8)


@pytest.mark.parametrize("parts", [2, 8, 16])
@pytest.mark.parametrize("kind", ["medusa", "hydra", "context", "deep"])
def test_16_bit_products_that_a_gpu_sums_in_parts_are_known(kind: str, parts: int) -> None:
    """As far as a CPU can show what cuBLAS does. The reference rounds nothing here, so both are
    further apart than two products of one GPU.
    """
    scene = ConfirmScene(kind, torch.bfloat16, layers=2)
    state = scene.heads.trainable_state()
    assert scene.verdict(state, parts=parts) == "" == scene.verdict(state, native=True)
    name = "blocks.2.layers.0.weight"
    assert "head 3" in scene.verdict(state | {name: state[name] * 1.5}, parts=parts)
    assert "head 1" in scene.verdict(scene.random(2).trainable_state(), parts=parts)


@pytest.mark.parametrize("kind", ["medusa", "hydra", "context"])
def test_a_small_difference_in_one_head_is_named(kind: str) -> None:
    scene = ConfirmScene(kind)
    state = scene.heads.trainable_state()
    name = "blocks.2.layers.0.weight"
    assert "head 3" in scene.verdict(state | {name: state[name] * 1.05})


@pytest.mark.parametrize(
    "name",
    [
        "context.in.weight",
        "context.out.weight",
        "cell.start.weight",
        "cell.token.weight",
        "cell.step.weight",
        "context.feed_in.weight",
        "context.1.in.weight",
        "context.1.feed_out.weight",
        "copy.query.weight",
        "copy.key.weight",
        "copy.none.weight",
        "copy.value.weight",
        "copy.out.weight",
    ],
)
def test_a_small_difference_in_what_heads_share_is_found(name: str) -> None:
    deep = any(word in name for word in ("feed", ".1.", "copy"))
    scene = ConfirmScene("deep" if deep else "context")
    scene.heads = scene.random(1, scale=0.4)
    state = scene.heads.trainable_state()
    assert scene.verdict(state) == "" != scene.verdict(state | {name: state[name] * 1.05})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_draft_temperatures_are_confirmed_too(dtype: torch.dtype) -> None:
    scene = ConfirmScene("hydra", dtype)
    plain = scene.heads.trainable_state()
    scene.heads.temperatures_K.copy_(torch.tensor([1.0, 0.75, 1.0]))
    own = scene.heads.trainable_state()
    assert scene.verdict(own) == "" == scene.verdict(own, temperature=0.5)
    assert "head 2" in scene.verdict(plain)


def test_heads_in_another_order_are_found() -> None:
    scene = ConfirmScene("medusa")
    state = scene.heads.trainable_state()
    names = sorted(state)
    assert scene.verdict(dict(zip(names, [state[name] for name in reversed(names)], strict=True)))


def test_products_packed_from_the_heads_before_are_found() -> None:
    scene = ConfirmScene("hydra")
    assert scene.verdict(scene.heads.trainable_state(), packed_from=scene.random(7))


def test_heads_that_start_at_zero_all_draft_alike_and_are_known() -> None:
    scene = ConfirmScene("medusa")
    scene.heads = scene.random(0, scale=0.0)
    assert scene.verdict(scene.heads.trainable_state()) == ""


def test_own_lm_heads_and_a_draft_vocabulary() -> None:
    own = ConfirmScene("medusa", lm_head="own")
    assert own.verdict(own.heads.trainable_state()) == ""
    mapped = ConfirmScene("hydra")
    mapped.draft_vocabulary = DraftVocabulary(10, V)
    mapped.draft_vocabulary.observe([list(range(10)) * 3])
    mapped.draft_vocabulary.refresh(mapped.logits, D, torch.float32, CPU)
    assert mapped.verdict(mapped.heads.trainable_state()) == ""
    assert mapped.verdict(mapped.random(2).trainable_state())


def test_drafts_that_are_no_numbers_are_found() -> None:
    scene = ConfirmScene("medusa")
    state = scene.heads.trainable_state()
    scene.lm_head_VD[0, 0] = torch.nan
    assert "head 1" in scene.verdict(state)


class ReadState(dict[str, torch.Tensor]):
    """Counts how often each tensor is read."""

    def __init__(self, state: dict[str, torch.Tensor]) -> None:
        super().__init__(state)
        self.reads: Counter[str] = Counter()

    def __getitem__(self, name: str) -> torch.Tensor:
        self.reads[name] += 1
        return super().__getitem__(name)


@pytest.mark.parametrize("kind", ["medusa", "hydra", "context", "deep"])
def test_what_heads_share_is_computed_once_and_what_is_theirs_once_for_each(kind: str) -> None:
    """Once for each head, a swap moved five times the file from the host to the GPU."""
    scene = ConfirmScene(kind, layers=2)
    state = ReadState(scene.heads.trainable_state())
    assert scene.verdict(state) == ""
    assert set(state.reads) == set(state)
    often = {name: count for name, count in state.reads.items() if count > 1}
    # The cell is the same for all heads, and each of them multiplies by it.
    in_turn = {"cell.token.weight": K, "cell.step.weight": K - 1, "cell.out.weight": K}
    assert often == (in_turn if kind in ("context", "deep") else {})


def test_a_large_weight_is_never_whole_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """A 70B's largest takes 2.4 GB so, which no profile of memory has seen."""
    monkeypatch.setattr("medusa_ppo.vllm_plugin.confirm.PIECE_BYTES", 5 * 4 * D, raising=False)
    scene = ConfirmScene("deep", torch.bfloat16, layers=2)
    state = scene.heads.trainable_state()
    widened: list[tuple[int, ...]] = []

    class Noted(TorchDispatchMode):
        def __torch_dispatch__(
            self, call: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            found = call(*args, **(kwargs or {}))
            if call is torch.ops.aten._to_copy.default:
                widened.append(tuple(found.shape))
            return found

    fixed = fixed_inputs(scene.config, scene.dtype, CPU)
    plain = Plain(scene.logits, scene.embed, scene.dtype)
    with Noted():
        plain_logprobs(state, scene.config, fixed, given_tokens(scene.config, fixed, K), plain)
    assert (5, D) in widened
    large = {tuple(value.shape) for name, value in state.items() if "copy" not in name}
    assert not large & set(widened)
