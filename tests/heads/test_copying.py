"""Copying against a plain reference, in values and gradients, and its texts by hand.

The reference reads like the formulas of `heads.copying`: loops over rows and places, in float64.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from heads.copying import (
    AGE_STEP,
    MISSING,
    SERVED_PLACES,
    TRAINED_PLACES,
    Text,
    Texts,
    copied,
    own_text,
    searched_places,
)
from heads.heads_config import GAP

K, D, PARTS, WIDTH, TOKENS, V, C = 2, 6, 2, 4, 3, 9, 5


class Weights:
    """What an attention is made of, in float64; `copied` and the reference take the same."""

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int) -> torch.Tensor:
            values = torch.randn(*shape, generator=generator, dtype=torch.float64)
            return values.requires_grad_()

        self.table_VD = random(V, D)
        self.query = random(PARTS * WIDTH, TOKENS * D)
        self.key = random(PARTS * WIDTH, TOKENS * D)
        self.none_A = random(PARTS)
        self.value = random(C, PARTS * D)

    @property
    def all(self) -> list[torch.Tensor]:
        return [self.table_VD, self.query, self.key, self.none_A, self.value]

    def found(self, text: Text, places: int | None = None) -> torch.Tensor:
        def embed(ids_N: torch.Tensor) -> torch.Tensor:
            return self.table_VD[ids_N]

        return copied(text, embed, self.query, self.key, self.none_A, self.value, K, places=places)


def reference(
    weights: Weights,
    ids: list[int],
    parts: list[int],
    place: int,
    window: int | None = None,
    places: int | None = None,
) -> torch.Tensor:
    """c_k of one row through the value weight, `[K, C]`, by the formulas alone.

    Args:
        ids, parts: the tokens of the text, and the part that each belongs to.
        place: where the row's newest known token stands.
    """
    D_ = weights.table_VD.shape[1]

    def product(weight: torch.Tensor, j: int) -> torch.Tensor:
        columns = []
        for back in reversed(range(TOKENS)):
            i = j - back
            same = i >= 0 and parts[i] == parts[j]
            columns.append(weights.table_VD[ids[i]] if same else torch.zeros(D_).double())
        return (weight @ torch.cat(columns)).view(PARTS, WIDTH)

    searched = []
    for j in range(len(ids)):
        if j + K >= len(ids) or len({parts[i] for i in range(j, j + K + 1)}) > 1:
            continue
        unknown = j + K > place or (window is not None and place - j >= window)
        if parts[j] == parts[place] and unknown:
            continue
        searched.append(j)
    query = product(weights.query, place)
    result = torch.zeros(K, PARTS, D_).double()
    for part in range(PARTS):
        scores = {
            j: query[part] @ product(weights.key, j)[part] / WIDTH**0.5 - AGE_STEP * (place - j)
            for j in searched
        }
        best = sorted(scores, key=lambda j: -float(scores[j].detach()))[:places]
        total = weights.none_A[part].exp() + sum(scores[j].exp() for j in best)
        for k in range(1, K + 1):
            for j in best:
                share = scores[j].exp() / total
                result[k - 1, part] = result[k - 1, part] + share * weights.table_VD[ids[j + k]]
    return result.flatten(1) @ weights.value.T


def same_values_and_gradients(
    weights: Weights, fast: Callable[[], torch.Tensor], slow: Callable[[], torch.Tensor]
) -> None:
    generator = torch.Generator().manual_seed(9)
    gradients = []
    values = []
    for made in (fast, slow):
        found = made()
        values.append(found.detach())
        direction = torch.randn(found.shape, generator=generator.manual_seed(9)).double()
        gradients.append(torch.autograd.grad((found * direction).sum(), weights.all))
    torch.testing.assert_close(values[0], values[1])
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs)
        assert theirs.any()


@pytest.mark.parametrize("places", [None, SERVED_PLACES, TRAINED_PLACES])
@pytest.mark.parametrize("window", [None, 4])
def test_copied_is_the_reference_in_values_and_gradients(
    places: int | None, window: int | None
) -> None:
    """Two responses after prompts, the second with an earlier part; rows asked out of order."""
    weights = Weights()
    before = torch.tensor([1, 2, 3, 4, 1, 2, 3, 5, GAP, 1, 2])
    texts = Texts.of(
        before,
        torch.tensor([4, 7]),
        torch.tensor([1, 2, 3, 1, 2, 3, 3, 5, 1, 2, 1]),
        torch.tensor([6, 5]),
        window,
    )
    rows = torch.tensor([10, 0, 5, 3, 7])
    first = [1, 2, 3, 4, 1, 2, 3, 1, 2, 3]
    second = [1, 2, 3, 5, 0, 1, 2, 3, 5, 1, 2, 1]
    asked = [
        (second, [0] * 4 + [1] + [2] * 7, 11),
        (first, [0] * 10, 4),
        (first, [0] * 10, 9),
        (first, [0] * 10, 7),
        (second, [0] * 4 + [1] + [2] * 7, 8),
    ]

    def slow() -> torch.Tensor:
        # A row knows the tokens up to its own; the rest of its text is not there for it.
        return torch.stack(
            [
                reference(weights, ids[: place + 1], parts[: place + 1], place, window, places)
                for ids, parts, place in asked
            ]
        )

    same_values_and_gradients(weights, lambda: weights.found(texts.of_rows(rows), places), slow)


def test_training_does_not_multiply_by_the_whole_text() -> None:
    """Memory for a row's gradient grows with the text by its scores alone, not by K times as many
    shares: with all places a response of 1,024 tokens trained at a third of the speed.
    """
    weights = Weights()
    length = 512
    text = own_text(torch.arange(length).remainder(V).unsqueeze(0))

    def kept(places: int | None) -> int:
        total = 0

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal total
            total += tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            weights.found(text, places)
        return total

    assert kept(TRAINED_PLACES) < 0.6 * kept(None)


def test_rows_far_from_each_other_find_what_they_find_alone() -> None:
    """Rows of one long response are searched in several stretches; the window joins them."""
    weights = Weights()
    generator = torch.Generator().manual_seed(3)
    ids_M = torch.randint(V, (700,), generator=generator)
    prompt = torch.randint(V, (5,), generator=generator)
    texts = Texts.of(prompt, torch.tensor([5]), ids_M, torch.tensor([700]), window=60)
    rows = torch.tensor([690, 3, 255, 256, 400])
    together = weights.found(texts.of_rows(rows))
    for index, row in enumerate(rows.tolist()):
        alone = weights.found(texts.of_rows(torch.tensor([row])))[0]
        torch.testing.assert_close(together[index], alone)
    text = torch.cat([prompt, ids_M]).tolist()
    expected = reference(weights, text[:696], [0] * 696, 695, window=60)
    torch.testing.assert_close(together[0], expected)


def test_places_that_may_be_searched_by_hand() -> None:
    """Part 0 is earlier, a gap, part 2 the row's own; K = 2 followers have to be known."""
    parts_GT = torch.tensor([[0, 0, 0, MISSING, 2, 2, 2, 2]])
    ids_GT = torch.arange(8).view(1, 8)
    text = Text.of(ids_GT, parts_GT, torch.tensor([0, 0]), torch.tensor([6, 7]))
    searched = searched_places(text, num_heads=2)[0]
    # Place 0: its followers 1 and 2 are of its part. Place 4: 5 and 6 are known to the row at 6.
    # Place 5: its second follower is 7, which the row at 6 does not know yet.
    assert searched[0].tolist() == [True, False, False, False, True, False, False, False]
    assert searched[1].tolist() == [True, False, False, False, True, True, False, False]


def test_a_window_bounds_the_own_part_alone() -> None:
    parts_GT = torch.tensor([[0, 0, 0, MISSING, 2, 2, 2, 2]])
    text = Text.of(
        torch.arange(8).view(1, 8), parts_GT, torch.tensor([0]), torch.tensor([7]), window=3
    )
    searched = searched_places(text, num_heads=2)[0, 0]
    assert searched.tolist() == [True, False, False, False, False, True, False, False]


def test_of_two_places_that_are_alike_the_newer_is_copied() -> None:
    weights = Weights()
    with torch.no_grad():
        weights.none_A.fill_(-100.0)
    #      the same two tokens twice, 7 after the first and 8 after the second
    ids = torch.tensor([[1, 2, 7, 7, 1, 2, 8, 8, 1, 2]])
    text = Text.of(ids, torch.zeros_like(ids), torch.tensor([0]), torch.tensor([9]))
    with torch.no_grad():
        weights.key.copy_(weights.query)
        # Only the last two tokens count, so that both places are alike to the bit.
        weights.key[:, :D] = 0
    found = weights.found(text, places=1)[0, 0]
    torch.testing.assert_close(found, weights.value @ weights.table_VD[8].repeat(PARTS))


def test_a_text_shorter_than_k_finds_nothing() -> None:
    weights = Weights()
    text = own_text(torch.tensor([[3, 4]]))
    assert not weights.found(text).any()
    assert not weights.found(text, SERVED_PLACES).any()


def test_own_text_gives_each_row_what_stands_before_it() -> None:
    weights = Weights()
    ids = [1, 2, 3, 1, 2, 3, 1]
    found = weights.found(own_text(torch.tensor([ids])))
    for place in range(len(ids)):
        expected = reference(weights, ids[: place + 1], [0] * (place + 1), place)
        torch.testing.assert_close(found[place], expected)


def test_texts_of_lays_earlier_parts_prompt_and_response_behind_each_other() -> None:
    texts = Texts.of(
        torch.tensor([7, GAP, 1, 2, 3]),
        torch.tensor([4, 1]),
        torch.tensor([5, 6, 8]),
        torch.tensor([2, 1]),
    )
    assert texts.ids_X.tolist() == [7, GAP, 1, 2, 5, 6, 3, 8]
    assert texts.starts_S.tolist() == [0, 6]
    assert texts.own_S.tolist() == [2, 6]
    assert texts.sequence_M.tolist() == [0, 0, 1]
    assert texts.place_M.tolist() == [4, 5, 7]
    text = texts.of_rows(torch.tensor([2, 1]))
    assert text.ids_GT.tolist() == [[7, 0, 1, 2, 5, 6], [3, 8, 7, 7, 7, 7]]
    assert text.parts_GT.tolist() == [
        [0, MISSING, 1, 1, 1, 1],
        [0, 0, MISSING, MISSING, MISSING, MISSING],
    ]
    # Rows keep the order in which they were asked for.
    assert text.places_GR.flatten()[text.order_N].tolist() == [1, 5]


@pytest.mark.parametrize("places", [None, 2])
def test_it_computes_in_the_dtype_of_its_weights(places: int | None) -> None:
    """Scores are float32 all the same, since they have the age of a place."""
    weights = Weights()
    text = own_text(torch.randint(V, (2, 12), generator=torch.Generator().manual_seed(3)))
    expected = weights.found(text, places)
    for name in ("table_VD", "query", "key", "none_A", "value"):
        setattr(weights, name, getattr(weights, name).detach().bfloat16())
    found = weights.found(text, places)
    assert found.dtype == torch.bfloat16
    # Two places whose scores are close may change ranks.
    assert float((found.double() - expected).abs().median()) < 0.02 * float(expected.std())
