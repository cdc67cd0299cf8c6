"""A batch whose pieces are scored before all of it is written: of its states as many are kept as
may be in its sample, and the sample is as good as one of the whole batch.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from heads.targets import segments_from_lengths
from medusa_ppo.companion.collector import BatchCollector
from medusa_ppo.companion.positions import EarlySample
from medusa_ppo.config.companion_section import HOLDOUT_SHARE, MOST_OF_PIECES
from medusa_ppo.contract.rollouts import Counters, Response, Rollouts, Sampling
from medusa_ppo.plugin.piece_states import PieceStates

ANSWERS = 4


class Scene:
    """Answers of any lengths; a row's state is its place in the batch."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths
        self.prompts = len(lengths) // ANSWERS
        responses = tuple(
            Response(s // ANSWERS, (7,) * length, (-1.0,) * length, "stop")
            for s, length in enumerate(lengths)
        )
        self.rollouts = Rollouts(
            ((1,),) * self.prompts, responses, Counters(), 1.0, Sampling(), policy_version=9
        )
        self.states = torch.arange(sum(lengths), dtype=torch.float32)[:, None].split(lengths)

    def sample(self, rows: int, seed: int = 0) -> EarlySample:
        return EarlySample(rows, HOLDOUT_SHARE, seed, ahead=4)

    def scored(self, sample: EarlySample, order: list[int]) -> tuple[PieceStates, int]:
        """After pieces of one prompt each, in this order; and the most states kept in between."""
        held = PieceStates(sample, len(self.lengths), self.prompts)
        most = 0
        for prompt in order:
            self.score(held, prompt)
            most = max(most, held.kept)
        return held, most

    def score(self, held: PieceStates, prompt: int) -> None:
        first = prompt * ANSWERS
        tap = held.tap(first, self.rollouts.responses[first : first + ANSWERS])
        tap.put({s: self.states[first + s][wanted] for s, wanted in enumerate(tap.wanted)})

    def collected(self, held: PieceStates, late: Sequence[int] = ()) -> BatchCollector:
        """The batch, whose sample was drawn before the late pieces were scored."""
        tokens = sum(self.lengths)
        collector = BatchCollector(self.rollouts, held.settle(tokens).unless_all_fit(tokens))
        for prompt in late:
            self.score(held, prompt)
        for s, wanted in enumerate(collector.wanted):
            collector.put(s, held.take(s, wanted))
        assert collector.complete and not held.kept
        return collector


def some_lengths(prompts: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    lengths = [draw.randint(1, 700) for _ in range(prompts * ANSWERS)]
    lengths[3] = lengths[17] = 0
    return lengths


@pytest.mark.parametrize("share", [0.02, 0.3, 0.9])
def test_a_sample_by_pieces_has_its_own_states_and_is_no_larger(share: float) -> None:
    scene = Scene(some_lengths(96, 0))
    rows = int(share * sum(scene.lengths))
    order = list(range(96))
    random.Random(1).shuffle(order)
    held, most = scene.scored(scene.sample(rows), order)
    collector = scene.collected(held)
    wanted_M = torch.cat(collector.wanted)
    assert 0.8 * rows < int(wanted_M.sum()) <= rows
    assert most <= MOST_OF_PIECES * rows + ANSWERS * 700
    batch = collector.batch()
    assert torch.equal(batch.hidden_MD[:, 0], wanted_M.nonzero()[:, 0].float())
    # Prompts that heads are judged on are not trained on.
    assert batch.held_S is not None and batch.weights_M is not None and batch.prompts_S is not None
    judged = set(batch.prompts_S[batch.held_S].tolist())
    assert len(judged) >= (6 if share > 0.1 else 1) and not judged & set(
        batch.prompts_S[~batch.held_S].tolist()
    )


@pytest.mark.parametrize("rows", [300, 3000])
def test_pieces_may_be_scored_after_the_whole_batch_is_written(rows: int) -> None:
    """The last ones are the longest, so that more is expected with each of them."""
    for seed in range(10):
        scene = Scene(sorted(some_lengths(48, seed)))
        held, _ = scene.scored(scene.sample(rows, seed), list(range(40)))
        collector = scene.collected(held, late=range(40, 48))
        wanted_M = torch.cat(collector.wanted)
        assert torch.equal(collector.batch().hidden_MD[:, 0], wanted_M.nonzero()[:, 0].float())
        assert 0.5 * rows < int(wanted_M.sum()) <= rows


def test_what_comes_in_one_piece_is_the_sample_of_the_batch() -> None:
    scene = Scene(some_lengths(40, 2))
    held = PieceStates(scene.sample(2000), len(scene.lengths), scene.prompts)
    tap = held.tap(0, scene.rollouts.responses)
    tap.put({s: scene.states[s][wanted] for s, wanted in enumerate(tap.wanted)})
    alone = BatchCollector(scene.rollouts, scene.sample(2000))
    assert all(map(torch.equal, scene.collected(held).wanted, alone.wanted))


def test_a_batch_that_fits_is_kept_whole() -> None:
    """Its held-out prompts with all their answers, too: the companion chooses them."""
    scene = Scene([5, 3, 9, 4] * 40)
    held, most = scene.scored(scene.sample(4000), list(range(40)))
    collector = scene.collected(held)
    assert collector.sample is None and most == sum(scene.lengths) == collector.kept


def test_a_batch_that_turns_out_to_fit_has_what_was_kept() -> None:
    """The first answers were the longest, so that too much was expected."""
    scene = Scene([600] * (4 * ANSWERS) + [20] * (60 * ANSWERS))
    tokens = sum(scene.lengths)
    held, most = scene.scored(scene.sample(tokens), list(range(64)))
    assert held.sample.most < 1.0 and most < tokens
    assert 0 < scene.collected(held).kept < tokens


def test_every_row_is_as_likely_whenever_its_piece_ends() -> None:
    """Of pieces that end early or late, of short and long answers, as in `EarlySample` itself."""
    scene = Scene([length for s in range(48) for length in (700 if s % 3 else 60,) * ANSWERS])
    tokens = sum(scene.lengths)
    # Short ones end first.
    order = sorted(range(48), key=lambda prompt: (scene.lengths[prompt * ANSWERS], prompt))
    trained_M = torch.zeros(tokens)
    count = 30
    for seed in range(count):
        held, _ = scene.scored(scene.sample(tokens // 3, seed), order)
        sample = held.sample.unless_all_fit(tokens)
        assert sample is not None
        weights_M, held_S = sample.draw(
            torch.tensor(scene.lengths), torch.arange(len(scene.lengths)) // ANSWERS
        )
        segment_M = segments_from_lengths(torch.tensor(scene.lengths))
        assert held_S is not None
        trained_M += (weights_M > 0) & ~held_S[segment_M]
    rates_P = torch.stack(
        [
            part.mean() / count
            for part in trained_M.split(
                [sum(scene.lengths[p * ANSWERS : (p + 1) * ANSWERS]) for p in range(48)]
            )
        ]
    )
    place_P = torch.empty(48, dtype=torch.int64)
    place_P[torch.tensor(order)] = torch.arange(48)
    for early_P in (place_P < 24, torch.arange(48) % 3 == 0, torch.arange(48) < 24):
        rates = float(rates_P[early_P].mean()), float(rates_P[~early_P].mean())
        assert max(rates) < 1.15 * min(rates), rates
