"""The ring gives back the last pairs that are there and no other; drafts with it are those of the
trainer's heads on the same rollout.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from heads.heads_config import HeadsConfig
from heads.modules import Context, MedusaHeads
from heads.targets import MISSING, context_rows
from medusa_ppo.drafting.context import Arrived, ContextHeads, PairRing, Seen, Standing
from medusa_ppo.drafting.core import DraftingCore, DraftSampling

D, V, K, n = 8, 12, 3, 4
CPU = torch.device("cpu")


def written(ring: PairRing, slot: int, request: int, first: int, count: int) -> None:
    places_N = torch.arange(first, first + count)
    kept_NR = places_N.unsqueeze(1).expand(count, 2) + 100.0 * request
    ring.write(torch.full((count,), slot), torch.full((count,), request), places_N, kept_NR)


def read(ring: PairRing, slot: int, request: int, last: int) -> tuple[list[float], list[bool]]:
    kept_BnR, there_Bn = ring.read(
        torch.tensor([slot]), torch.tensor([request]), torch.tensor([last])
    )
    return kept_BnR[0, :, 0].tolist(), there_Bn[0].tolist()


def test_the_last_pairs_come_back_oldest_first() -> None:
    ring = PairRing(2, n, 2, torch.float32, CPU)
    written(ring, 1, 5, 0, 4)
    written(ring, 1, 5, 4, 3)
    assert read(ring, 1, 5, 6) == ([503.0, 504.0, 505.0, 506.0], [True] * 4)


def test_missing_pairs_and_those_of_other_requests_are_masked() -> None:
    ring = PairRing(2, n, 2, torch.float32, CPU)
    written(ring, 0, 5, 0, 2)
    assert read(ring, 0, 5, 1)[1] == [False, False, True, True]
    written(ring, 0, 6, 3, 1)  # The slot's next request; its first positions were of the prompt.
    assert read(ring, 0, 6, 3)[1] == [False, False, False, True]
    written(ring, 0, 6, 6, 1)  # Positions 4 and 5 are missing.
    assert read(ring, 0, 6, 6)[1] == [True, False, False, True]
    assert read(ring, 1, 6, 6)[1] == [False] * 4
    ring.forget()
    assert read(ring, 0, 6, 6)[1] == [False] * 4


class Rollout:
    """Heads, an actor's tables, and one response of ten positions."""

    def __init__(self, **sizes: int) -> None:
        torch.manual_seed(0)
        self.heads = MedusaHeads(HeadsConfig(D, V, K, "hydra", context=n, **sizes)).requires_grad_(
            False
        )
        for parameter in self.heads.parameters():
            parameter.copy_(torch.randn_like(parameter) / 2)
        self.lm_head_VD = torch.randn(V, D)
        self.table_VD = torch.randn(V, D)
        self.hidden_TD = torch.randn(10, D)
        self.ids_T = torch.randint(V, (10,))
        self.core = DraftingCore(
            self.heads,
            lambda f: F.linear(f, self.lm_head_VD),
            lambda i: F.embedding(i, self.table_VD),
        )

    def serve(self, ring: PairRing, at: list[int], first: int = 0) -> Seen:
        """The pairs at these positions of the response, written in one step; what the last attends
        to.
        """
        fused = self.core.fused
        assert isinstance(fused, ContextHeads)
        rows_N = torch.tensor(at)
        pairs_NX = fused.pairs(self.hidden_TD[rows_N], self.ids_T[rows_N])
        slot = torch.tensor([1])
        request = torch.tensor([9])
        ring.write(slot.expand(len(at)), request.expand(len(at)), rows_N + first, pairs_NX[:, D:])
        kept_BnR, there_Bn = ring.read(slot, request, rows_N[-1:] + first)
        return Seen(pairs_NX[-1:, :D], self.ids_T[rows_N[-1:]], kept_BnR, there_Bn)

    def check(self, at: int, seen: Seen, rows_n: torch.Tensor) -> None:
        """Drafts and q at a position are those of the heads that attend to these rows."""
        hidden_BD = self.hidden_TD[at : at + 1]
        last_B = self.ids_T[at : at + 1]
        drafted = self.core.draft(
            hidden_BD,
            last_B,
            K,
            DraftSampling(torch.ones(1), torch.rand(1, K, dtype=torch.float64)),
            seen,
        )
        condition_BK = torch.cat([last_B[:, None], drafted.ids_BK[:, :-1]], dim=1)
        context = Context.of(rows_n[None], self.hidden_TD, self.ids_T)
        logits_BKV = self.heads(
            hidden_BD,
            self.lm_head_VD,
            condition=condition_BK,
            embedding_VD=self.table_VD,
            context=context,
        )
        torch.testing.assert_close(
            torch.stack(drafted.q, dim=1), logits_BKV.softmax(-1), rtol=1e-4, atol=1e-6
        )


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"num_layers": 2, "mlp_ratio": 1},
        {"context_layers": 3},
        {"context_layers": 2, "feed_forward": 2},
    ],
)
def test_serving_drafts_as_replay_does_on_the_same_states(sizes: dict[str, int]) -> None:
    """Steps of one to three accepted positions, one slot among several; the prompt was seven tokens
    long.
    """
    rollout = Rollout(**sizes)
    ring = PairRing(3, n, rollout.core.fused.kept_width, torch.float32, CPU)
    rows_Tn = context_rows(torch.zeros(10, dtype=torch.int64), n)
    for at in ([0], [1, 2], [3, 4, 5], [6], [7, 8, 9]):
        rollout.check(at[-1], rollout.serve(ring, at, first=7), rows_Tn[at[-1]])


def test_pairs_from_before_a_swap_are_missing() -> None:
    rollout = Rollout()
    ring = PairRing(3, n, 2 * D, torch.float32, CPU)
    rollout.serve(ring, [0, 1, 2])
    ring.forget()
    rollout.serve(ring, [3])
    rollout.check(4, rollout.serve(ring, [4]), torch.tensor([MISSING, MISSING, 3, 4]))


def test_a_steps_own_tensors_bring_the_same_pairs() -> None:
    """As V2 hands them over: three requests' rows in one tensor, rejected drafts behind the
    accepted ones, a prompt that isn't finished.
    """
    rollout = Rollout()
    ring = PairRing(3, n, 2 * D, torch.float32, CPU)
    DRAFTS = 3
    fused = rollout.core.fused
    assert isinstance(fused, ContextHeads)
    rows_Tn = context_rows(torch.zeros(10, dtype=torch.int64), n)
    begun = 0  # Positions of the response that are behind us; the prompt was seven tokens long.
    for accepted in (1, 3, 2, 4):
        before = torch.randn(2, D)
        rejected = DRAFTS + 1 - accepted
        states_TD = torch.cat(
            [before, rollout.hidden_TD[begun : begun + accepted], torch.randn(rejected + 5, D)]
        )
        # What each row read: the token before, and the drafts behind it; what the last accepted row
        # gave is nobody's input yet.
        read_T = torch.randint(V, (len(states_TD),), dtype=torch.int32)
        read_T[3 : 2 + accepted] = rollout.ids_T[begun : begun + accepted - 1].int()
        at = begun + accepted - 1
        standing = Standing(
            torch.tensor([2, 1, 0]), torch.tensor([4, 9, 7]), torch.tensor([1, 7 + at, 3])
        )
        rows_B = torch.tensor([1, 2 + accepted - 1, len(states_TD) - 1])
        last_B = torch.tensor([3, int(rollout.ids_T[at]), 0])
        arrived = Arrived.of_step(
            states_TD,
            read_T,
            rows_B,
            last_B,
            torch.tensor([1, accepted, 0]),
            standing,
            ring.spare,
            min(DRAFTS + 1, ring.pairs),
        )
        seen = fused.look_back(ring, arrived, standing)
        assert seen.there_Bn[0].tolist() == [False] * (n - 1) + [True] and seen.there_Bn[
            2
        ].tolist() == [False] * (n - 1) + [True]
        rollout.check(
            at,
            Seen(seen.query_BD[1:2], seen.ids_B[1:2], seen.kept_BnR[1:2], seen.there_Bn[1:2]),
            rows_Tn[at],
        )
        begun += accepted
