"""What serving finds in a text is what the heads find that were trained on it.

Whatever the ring has seen before: prompts longer than it, other requests, other heads.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from heads.copying import SERVED_PLACES, Texts
from heads.heads_config import HeadsConfig
from heads.modules import MedusaHeads
from medusa_ppo.drafting import products, texts
from medusa_ppo.drafting.texts import Copier, TextRing

D, V, K, PARTS = 16, 30, 3, 2
CPU = torch.device("cpu")


class CountCalls(TorchDispatchMode):
    """Counts torch's operations."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, call: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.count += 1
        return call(*args, **(kwargs or {}))


class Scene:
    """Heads that copy, the actor's embedding, and texts in which tokens come again and again."""

    def __init__(self, dtype: torch.dtype = torch.float32, **sizes: int) -> None:
        torch.manual_seed(0)
        config = HeadsConfig(D, V, K, "hydra", context=4, copy_parts=PARTS, **sizes)
        self.heads = MedusaHeads(config).requires_grad_(False)
        for parameter in self.heads.parameters():
            parameter.copy_(torch.randn_like(parameter) / parameter.shape[-1] ** 0.5)
        self.heads.to(dtype)
        self.table_VD = torch.randn(V, D)
        self.copier = Copier(self.heads, lambda ids: F.embedding(ids, self.table_VD))

    def ring(self, slots: int = 3, places: int = 64) -> TextRing:
        return TextRing(slots, places, PARTS, 64, torch.float32, CPU)

    def write(self, ring: TextRing, slot: int, ids: torch.Tensor, first: int, last: int) -> None:
        """The tokens `first` to `last - 1` of a request, in one step."""
        positions_N = torch.arange(max(first, last - ring.places), last)
        slots_N = torch.full_like(positions_N, slot)
        self.copier.write(ring, slots_N, positions_N, ids[positions_N])

    def trained(self, ids: torch.Tensor, newest: int, window: int | None = None) -> torch.Tensor:
        """What the cell of the trained heads is told where x_{t+1} is the token `newest`, `[K, H]`,
        by `heads.copying` with the places that are served.
        """
        prompt = torch.empty(0, dtype=torch.int64)
        nothing = torch.zeros(1, dtype=torch.int64)
        lengths = torch.tensor([newest + 1])
        found = Texts.of(prompt, nothing, ids[: newest + 1], lengths, window)
        text = found.of_rows(torch.tensor([newest]))
        return self.heads._copied(text, self.table_VD, SERVED_PLACES)[0]


def repeating(length: int, seed: int = 0) -> torch.Tensor:
    """Few different tokens, so that the same two follow each other often."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(8, (length,), generator=generator)


@pytest.mark.parametrize("small_tables", [True, False])
@pytest.mark.parametrize("sizes", [{}, {"copy_tokens": 1}, {"copy_tokens": 5}])
def test_what_is_found_is_what_the_trained_heads_find(
    sizes: dict[str, int], small_tables: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not small_tables:
        monkeypatch.setattr(texts, "TABLE_ENTRIES", 0)
    scene = Scene(**sizes)
    ring = scene.ring()
    ids = repeating(40)
    scene.write(ring, 1, ids, 0, 7)
    scene.write(ring, 0, repeating(50, seed=1), 0, 50)
    end = 7
    for step in (1, 2, 4, 1, 3, 4, 4):
        scene.write(ring, 1, ids, end, end + step)
        end += step
        told_BKH = scene.copier.find(ring, torch.tensor([1]), torch.tensor([end - 1]))
        torch.testing.assert_close(told_BKH[0], scene.trained(ids, end - 1), rtol=1e-4, atol=1e-5)


def test_a_text_longer_than_the_ring_is_searched_in_its_last_places() -> None:
    scene = Scene()
    ring = scene.ring(places=16)
    ids = repeating(60)
    scene.write(ring, 2, ids, 0, 45)
    for end in range(45, 60):
        scene.write(ring, 2, ids, end, end + 1)
        told_BKH = scene.copier.find(ring, torch.tensor([2]), torch.tensor([end]))
        expected_KH = scene.trained(ids, end, window=16)
        # The oldest keys may be made of tokens that the ring no longer held when they were written.
        torch.testing.assert_close(told_BKH[0], expected_KH, rtol=1e-4, atol=1e-5)


def test_fewer_places_are_enough_where_the_longest_text_is_known() -> None:
    scene = Scene()
    ring = scene.ring(places=512)
    ids = repeating(100)
    scene.write(ring, 0, ids, 0, 100)
    slots_B = torch.tensor([0])
    newest_B = torch.tensor([99])
    whole = scene.copier.find(ring, slots_B, newest_B)
    torch.testing.assert_close(scene.copier.find(ring, slots_B, newest_B, longest=100), whole)


def test_keys_that_are_one_token_late_find_something_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Verification is right for any draft, so no test of the distribution sees such a fault: this
    comparison does.
    """
    scene = Scene()
    ring = scene.ring()
    ids = repeating(40)
    made = scene.copier._last_tokens

    def late(
        ring: TextRing, slots_N: torch.Tensor, positions_N: torch.Tensor, half: int
    ) -> torch.Tensor:
        return made(ring, slots_N, (positions_N - half).clamp_min(0), half)

    monkeypatch.setattr(scene.copier, "_last_tokens", late)
    scene.write(ring, 1, ids, 0, 40)
    told_BKH = scene.copier.find(ring, torch.tensor([1]), torch.tensor([39]))
    assert not torch.allclose(told_BKH[0], scene.trained(ids, 39), rtol=1e-2, atol=1e-2)


def test_a_text_shorter_than_k_finds_nothing() -> None:
    scene = Scene()
    ring = scene.ring()
    scene.write(ring, 0, repeating(3), 0, 3)
    told_BKH = scene.copier.find(ring, torch.tensor([0, 1]), torch.tensor([2, 0]))
    assert not told_BKH.any()


def test_other_heads_find_other_things_once_the_texts_are_written_again() -> None:
    scene = Scene()
    ring = scene.ring()
    ids = repeating(30)
    scene.write(ring, 0, ids, 0, 30)
    with torch.no_grad():
        scene.heads.copy_key.mul_(-1)
    scene.copier.load()
    scene.write(ring, 0, ids, 0, 30)
    told_BKH = scene.copier.find(ring, torch.tensor([0]), torch.tensor([29]))
    torch.testing.assert_close(told_BKH[0], scene.trained(ids, 29), rtol=1e-4, atol=1e-5)


def test_keys_are_made_again_in_as_many_operations_whatever_the_number_of_texts() -> None:
    """One text after the other took 27,000 launches for 1,024 of them, and a wait for each."""
    scene = Scene()
    counted: list[int] = []
    for lengths in ([3, 40, 100], [3, 40, 100, 7, 0, 64, 20, 1, 65]):
        ring = scene.ring(slots=len(lengths))
        for slot, length in enumerate(lengths):
            if length:
                scene.write(ring, slot, repeating(length, seed=slot), 0, length)
        made_SALw = ring.keys_SALw.clone()
        ring.keys_SALw[: len(lengths) - 1].fill_(-9.0)
        with CountCalls() as calls:
            scene.copier.write_again(ring, torch.arange(len(lengths) - 1))
        counted.append(calls.count)
        for slot, length in enumerate(lengths):
            kept_ALw = ring.keys_SALw[slot, :, : min(length, ring.places)]
            # Keys of the oldest places may be made of tokens that the ring had lost meanwhile.
            lost = 2 if length > ring.places else 0
            oldest = length % ring.places
            same_L = (kept_ALw == made_SALw[slot, :, : kept_ALw.shape[1]]).all(2).all(0)
            others_L = (torch.arange(len(same_L)) - oldest) % ring.places >= lost
            assert bool(same_L[others_L].all())
    assert counted[0] == counted[1]


def test_a_large_vocabulary_has_no_tables() -> None:
    scene = Scene()
    size = scene.heads.config.copy_width * 2 * 3 * V
    assert size <= products.TABLE_ENTRIES and len(scene.copier._shares_XC) == 2


def test_tokens_that_stand_for_images_are_never_copied() -> None:
    """What follows is copied as if the image's token were no follower at all."""
    scene = Scene()
    image = 7
    copier = Copier(scene.heads, lambda ids: F.embedding(ids, scene.table_VD), never=[image])
    ring = scene.ring()
    ids = repeating(40)
    scene.copier.write(ring, torch.zeros(40, dtype=torch.int64), torch.arange(40), ids)
    slots_B = torch.tensor([0])
    newest_B = torch.tensor([39])
    with_images = scene.copier.find(ring, slots_B, newest_B)
    asked: list[torch.Tensor] = []
    told = copier._told

    def watched(ids_BKAm: torch.Tensor, share_BKAm: torch.Tensor) -> torch.Tensor:
        asked.append(share_BKAm[ids_BKAm == image])
        return told(ids_BKAm, share_BKAm)

    copier._told = watched  # type: ignore[method-assign]
    without = copier.find(ring, slots_B, newest_B)
    assert asked[0].numel() and not asked[0].any()
    assert not torch.allclose(with_images, without)
