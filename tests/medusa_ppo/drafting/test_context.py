"""The ring gives back the last pairs that are there and no other; drafts with it are those of the
trainer's heads on the same rollout.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from heads.heads_config import HeadsConfig
from heads.modules import Context, MedusaHeads
from heads.targets import MISSING, context_rows
from medusa_ppo.drafting.context import Arrived, ContextHeads, PairRing, Seen, Standing
from medusa_ppo.drafting.core import DraftingCore, DraftSampling
from medusa_ppo.drafting.products import plain_linear
from tests.medusa_ppo.vllm_plugin.deep_sleep import tensors_of

D, V, K, n = 8, 12, 3, 4


def written(ring: PairRing, slot: int, request: int, first: int, count: int) -> None:
    device = ring.kept_NR.device
    places_N = torch.arange(first, first + count, device=device)
    kept_NR = places_N.unsqueeze(1).expand(count, 2) + 100.0 * request
    slots_N, requests_N = (torch.full((count,), n, device=device) for n in (slot, request))
    ring.write(slots_N, requests_N, places_N, kept_NR)


def read(ring: PairRing, slot: int, request: int, last: int) -> tuple[list[float], list[bool]]:
    where = (torch.tensor([number], device=ring.kept_NR.device) for number in (slot, request, last))
    kept_BnR, there_Bn = ring.read(*where)
    return kept_BnR[0, :, 0].tolist(), there_Bn[0].tolist()


def test_the_last_pairs_come_back_oldest_first(device: torch.device) -> None:
    ring = PairRing(2, n, 2, torch.float32, device)
    written(ring, 1, 5, 0, 4)
    written(ring, 1, 5, 4, 3)
    assert read(ring, 1, 5, 6) == ([503.0, 504.0, 505.0, 506.0], [True] * 4)


def test_missing_pairs_and_those_of_other_requests_are_masked(device: torch.device) -> None:
    ring = PairRing(2, n, 2, torch.float32, device)
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

    def __init__(self, device: torch.device, **sizes: int) -> None:
        torch.manual_seed(0)
        self.device = device
        self.heads = MedusaHeads(HeadsConfig(D, V, K, "hydra", context=n, **sizes)).requires_grad_(
            False
        )
        for parameter in self.heads.parameters():
            parameter.copy_(torch.randn_like(parameter) / 2)
        self.heads.to(device)
        self.lm_head_VD, self.table_VD, self.hidden_TD = (
            torch.randn(count, D).to(device) for count in (V, V, 10)
        )
        self.ids_T = torch.randint(V, (10,)).to(device)
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
        rows_N = torch.tensor(at, device=self.device)
        pairs_NX = fused.pairs(self.hidden_TD[rows_N], self.ids_T[rows_N])
        slot = torch.tensor([1], device=self.device)
        request = torch.tensor([9], device=self.device)
        ring.write(slot.expand(len(at)), request.expand(len(at)), rows_N + first, pairs_NX[:, D:])
        kept_BnR, there_Bn = ring.read(slot, request, rows_N[-1:] + first)
        return Seen(
            pairs_NX[-1:, :D],
            self.ids_T[rows_N[-1:]],
            lambda rows: (kept_BnR[rows], there_Bn[rows]),
        )

    def check(self, at: int, seen: Seen, rows_n: torch.Tensor) -> None:
        """Drafts and q at a position are those of the heads that attend to these rows."""
        hidden_BD = self.hidden_TD[at : at + 1]
        last_B = self.ids_T[at : at + 1]
        drafted = self.core.draft(
            hidden_BD,
            last_B,
            K,
            DraftSampling(
                torch.ones(1, device=self.device),
                torch.rand(1, K, dtype=torch.float64, device=self.device),
            ),
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
def test_serving_drafts_as_replay_does_on_the_same_states(
    device: torch.device, sizes: dict[str, int]
) -> None:
    """Steps of one to three accepted positions, one slot among several; the prompt was seven tokens
    long.
    """
    rollout = Rollout(device, **sizes)
    ring = PairRing(3, n, rollout.core.fused.kept_width, torch.float32, device)
    rows_Tn = context_rows(torch.zeros(10, dtype=torch.int64, device=device), n)
    for at in ([0], [1, 2], [3, 4, 5], [6], [7, 8, 9]):
        rollout.check(at[-1], rollout.serve(ring, at, first=7), rows_Tn[at[-1]])


def test_pairs_from_before_a_swap_are_missing(device: torch.device) -> None:
    rollout = Rollout(device)
    ring = PairRing(3, n, 2 * D, torch.float32, device)
    rollout.serve(ring, [0, 1, 2])
    ring.forget()
    rollout.serve(ring, [3])
    rollout.check(
        4, rollout.serve(ring, [4]), torch.tensor([MISSING, MISSING, 3, 4], device=device)
    )


def test_a_steps_own_tensors_bring_the_same_pairs(device: torch.device) -> None:
    """As V2 hands them over: three requests' rows in one tensor, rejected drafts behind the
    accepted ones, a prompt that isn't finished.
    """
    rollout = Rollout(device)
    ring = PairRing(3, n, 2 * D, torch.float32, device)
    DRAFTS = 3
    fused = rollout.core.fused
    assert isinstance(fused, ContextHeads)
    rows_Tn = context_rows(torch.zeros(10, dtype=torch.int64, device=device), n)
    begun = 0  # Positions of the response that are behind us; the prompt was seven tokens long.
    for accepted in (1, 3, 2, 4):
        before = torch.randn(2, D, device=device)
        rejected = DRAFTS + 1 - accepted
        states_TD = torch.cat(
            [
                before,
                rollout.hidden_TD[begun : begun + accepted],
                torch.randn(rejected + 5, D, device=device),
            ]
        )
        # What each row read: the token before, and the drafts behind it; what the last accepted row
        # gave is nobody's input yet.
        read_T = torch.randint(V, (len(states_TD),), dtype=torch.int32, device=device)
        read_T[3 : 2 + accepted] = rollout.ids_T[begun : begun + accepted - 1].int()
        at = begun + accepted - 1
        standing = Standing(
            torch.tensor([2, 1, 0], device=device),
            torch.tensor([4, 9, 7], device=device),
            torch.tensor([1, 7 + at, 3], device=device),
        )
        rows_B = torch.tensor([1, 2 + accepted - 1, len(states_TD) - 1], device=device)
        last_B = torch.tensor([3, int(rollout.ids_T[at]), 0], device=device)
        arrived = Arrived.of_step(
            states_TD,
            read_T,
            rows_B,
            last_B,
            torch.tensor([1, accepted, 0], device=device),
            standing,
            ring.spare,
            min(DRAFTS + 1, ring.pairs),
        )
        seen = fused.look_back(ring, arrived, standing)
        _, there_Bn = seen.kept(slice(0, 3))
        assert there_Bn[0].tolist() == there_Bn[2].tolist() == [False] * (n - 1) + [True]
        rollout.check(
            at,
            Seen(
                seen.query_BD[1:2],
                seen.ids_B[1:2],
                lambda _, kept=seen.kept: kept(slice(1, 2)),
            ),
            rows_Tn[at],
        )
        begun += accepted


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("layers", [1, 2])
def test_a_swap_writes_what_products_read_where_it_is(
    device: torch.device,
    layers: int,
    inference: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At a new place 0.6 GB of an 8B's heads stayed on the GPU while the engine slept, from the
    first swap on, and as much was never used again.
    """
    # As with a real vocabulary, whose tables would be too large.
    for module in ("context", "texts"):
        monkeypatch.setattr(f"medusa_ppo.drafting.{module}.TABLE_ENTRIES", 0)
    rollout = Rollout(device, context_layers=layers, feed_forward=2, copy_parts=2)
    heads = rollout.heads

    def core() -> DraftingCore:
        return DraftingCore(
            heads, lambda rows: rows, lambda ids: F.embedding(ids, rollout.table_VD)
        )

    def weights(held: DraftingCore) -> list[torch.Tensor]:
        """All that products read: 1 / rms of the tokens is made again with each actor."""
        found = tensors_of(held, (rollout,))
        return [
            one for one in found if one.is_floating_point() and one.dim() > 1 and one.shape[1] > 1
        ]

    serving = core()
    places = {weight.data_ptr() for weight in weights(serving)}
    for parameter in heads.parameters():
        parameter.mul_(1.25)
    with torch.inference_mode(inference):
        serving.load()
    assert {weight.data_ptr() for weight in weights(serving)} == places
    swapped, made = ([weight.cpu() for weight in weights(held)] for held in (serving, core()))
    assert len(swapped) == len(made) > 10
    for here, there in zip(swapped, made, strict=True):
        assert torch.equal(here, there)


def test_a_packed_product_keeps_no_second_copy_of_its_weight(device: torch.device) -> None:
    """On a CPU: the copy takes a third of what the heads take."""
    rollout = Rollout(device)

    def packed(weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        return plain_linear(weight.clone())

    fused = ContextHeads(rollout.heads, lambda ids: F.embedding(ids, rollout.table_VD), packed)
    for _ in range(2):
        assert fused._next_weight is not None and fused._next_weight() is None
        fused.load()
