"""Runs that end early: where they end, what that depends on, what is learned, and that nothing is
lost (docs/theory.md, theorem 3b).
"""

from __future__ import annotations

import pytest
import torch
from scipy.stats import chisquare

from medusa_ppo.drafting import stopping as stopping_file
from medusa_ppo.drafting.core import Drafted, DraftSampling
from medusa_ppo.drafting.slots import DraftSlots, stamps
from medusa_ppo.drafting.stopping import PARTS, TOPS, Stopping
from medusa_ppo.drafting.verify import DraftRows, Proposed, Rule, verify_rows
from tests.medusa_ppo.drafting.test_core import D, K, TableActor, V, random_heads

CPU = torch.device("cpu")
MANY = 60_000


class StoppingStand:
    """Requests in one state."""

    def __init__(self, batch: int, least: float) -> None:
        self.actor = TableActor(1)
        self.batch = batch
        self.actor.lm_head_VD /= 6  # Flat enough for any token.
        self.core = self.actor.core(random_heads("hydra"))
        self.stopping = Stopping(least, batch, K, CPU)
        self.rows_B = torch.arange(batch)

    def draft(self, seed: int, slots: DraftSlots | None = None) -> Drafted:
        torch.manual_seed(seed)
        how = DraftSampling(torch.ones(self.batch), torch.rand(self.batch, K, dtype=torch.float64))
        hidden_BD = self.actor.hidden_BD.expand(self.batch, D)
        last_B = self.actor.last_B.expand(self.batch)
        return self.core.draft(
            hidden_BD, last_B, K, how, slots=slots, ending=self.stopping.begin(self.rows_B)
        )


def test_whether_a_draft_is_made_does_not_depend_on_it() -> None:
    """Of requests whose drafts before it are the same, all go on or none does, though they drew
    different ones.
    """
    stand = StoppingStand(4000, 0.2)
    drafted = stand.draft(0)
    assert drafted.lengths_B is not None
    lengths_B = drafted.lengths_B
    ids_BK = drafted.ids_BK
    assert lengths_B.unique().numel() > 1
    parted = 0
    for k in range(K):
        before_BX = torch.cat([torch.zeros_like(ids_BK[:, :1]), ids_BK[:, :k]], dim=1)
        groups, group_B = before_BX.unique(dim=0, return_inverse=True)
        for group in range(len(groups)):
            chosen_B = group_B == group
            assert (lengths_B[chosen_B] > k).unique().numel() == 1
            parted += ids_BK[chosen_B, k].unique().numel() > 1
    assert parted > 5


@pytest.mark.parametrize("honest", [True, False])
def test_tokens_have_the_models_distribution(honest: bool) -> None:
    """And where a run ends before a draft because of that draft, they have not."""
    stand = StoppingStand(MANY, 0.2)
    slots = DraftSlots(MANY, K, V, CPU)
    rows_B = stand.rows_B
    drafted = stand.draft(1, slots)
    slots.stamp(rows_B, stamps(rows_B, rows_B), K)
    assert drafted.lengths_B is not None
    lengths_B = (
        drafted.lengths_B
        if honest
        else torch.where(drafted.ids_BK[:, 0] % 2 == 0, drafted.lengths_B, 0)
    )
    p_KV = torch.randn(K + 1, V, generator=torch.Generator().manual_seed(5)).softmax(-1)
    kept = slots.look_up(rows_B, stamps(rows_B, rows_B), K)
    counts = lengths_B.tolist()
    flat_T = drafted.ids_BK[torch.arange(K) < lengths_B[:, None]]
    places_N = torch.cat([torch.arange(count + 1) for count in range(K + 1)])
    rows_N = torch.cat([places_N[count * (count + 1) // 2 :][: count + 1] for count in counts])
    proposed = Proposed(kept, torch.rand(MANY, K + 1, dtype=torch.float64))
    runs_B, last_B = verify_rows(
        p_KV.log()[rows_N], None, DraftRows.build(flat_T, counts), counts, proposed, Rule()
    )
    p_values = []
    for k in range(2):
        tokens = torch.where(runs_B > k, drafted.ids_BK[:, k], last_B)[runs_B >= k]
        seen_V = torch.bincount(tokens, minlength=V).double()
        p_values.append(
            float(
                chisquare(
                    seen_V.numpy(),
                    (p_KV[k].double() / p_KV[k].double().sum() * len(tokens)).numpy(),
                ).pvalue
            )
        )
    assert p_values[0] > 1e-3 if honest else p_values[0] < 1e-6
    # The second token follows a first draft that was accepted, or nobody knows which p it has: all
    # here have the same.
    if honest:
        assert p_values[1] > 1e-3


def test_what_is_never_accepted_is_drafted_no_more_and_then_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stopping_file, "EXPLORE", 50)
    stand = StoppingStand(8, 0.1)
    for step in range(48):
        lengths_B = stand.draft(step).lengths_B
        assert lengths_B is not None
        if step < 2:
            assert lengths_B.min() > 0
        stand.stopping.settle(stand.rows_B, lengths_B, torch.zeros_like(lengths_B))
    assert lengths_B.max() == 0
    stand.stopping.settle(stand.rows_B, lengths_B, torch.zeros_like(lengths_B))
    assert stand.draft(48).lengths_B.max() == 0, "the first chance alone is too small"
    assert stand.draft(49).lengths_B.tolist() == [K] * 8, "one step in 50 ends no run"
    for step in range(50, 90):  # By and by all of it is accepted.
        stand.stopping.settle(stand.rows_B, torch.full((8,), K), torch.full((8,), K))
        stand.draft(step)
    assert stand.draft(90).lengths_B.min() > 0


def test_chances_follow_the_top_of_q_and_the_drafts_before() -> None:
    stopping = Stopping(0.3, 4, 2, CPU)
    stopping._offered_TP[:] = 1e4
    stopping._accepted_TP[:] = 1e4 * torch.tensor([0.9, 0.5, 0.2, 0.1])
    stopping._accepted_TP[: TOPS // 2] /= 2
    stopping._estimate()
    sure = torch.tensor([0.9, 0.06, 0.04])
    unsure = torch.tensor([0.4, 0.35, 0.25])
    ending = stopping.begin(torch.arange(4))
    on_B1 = torch.ones(4, 1, dtype=torch.bool)
    ending.ask(torch.stack([sure, sure, unsure, unsure]), on_B1)
    assert ending.lengths_B.tolist() == [1, 1, 0, 0], "means of the rows: 0.42 and 0.21"
    ending.follow(0, torch.tensor([0.9, 0.06, 0.4, 0.25]))
    ending.ask(sure.expand(4, -1), on_B1)
    assert ending.lengths_B.tolist() == [2, 1, 0, 0], (
        "after a draft that is its q's top: 0.9 of 0.42; and who ended stays so"
    )
    assert stopping._cells_KS[0, :4].tolist() == [
        (TOPS * 9 // 10) * PARTS,
        (TOPS * 9 // 10) * PARTS + 3,
        -1,
        -1,
    ]
    off = stopping.begin(torch.arange(4))
    off.ask(unsure.expand(4, -1), ~on_B1)
    assert off.lengths_B.tolist() == [1] * 4, "drafts that are not sampled are all made"
