"""Bytes that drafting and verification hold beyond the logits, counted under a fake CUDA device.

    PYTHONPATH=. python tests/medusa_ppo/drafting/test_bytes.py     # the table of docs/limits.md

Operations' own temporary memory is not seen; what they give is. Letters as in the modules.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from heads.heads_config import COPY_WINDOW
from heads.modules import MedusaHeads
from medusa_ppo.config.heads_section import HeadsSection
from medusa_ppo.drafting import q_rows, sending, verify
from medusa_ppo.drafting.context import Arrived, ContextHeads, PairRing, Standing
from medusa_ppo.drafting.core import DraftingCore, DraftSampling
from medusa_ppo.drafting.slots import DraftSlots, stamps
from medusa_ppo.drafting.texts import TextRing
from tests.medusa_ppo.drafting.test_host_reads import Indexing

D = 4096
"""Width of an 8B actor."""


class Peak(TorchDispatchMode):
    """The most bytes that tensors made meanwhile held at once."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Before, too: what was let go since the last operation is gone.
        named = kwargs or {}
        known = self._holding([*args, *named.values()])  # Also those of `out`.
        result = func(*args, **named)
        for value in result if isinstance(result, tuple | list) else [result]:
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                if storage._cdata not in known:
                    self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._alive = {
            key: (ref, size) for key, (ref, size) in self._alive.items() if not ref.expired()
        }
        self.most = max(self.most, sum(size for _, size in self._alive.values()))
        return result

    def _holding(self, args: Any) -> set[int]:
        """Storages that were there before: results that are views or written in place."""
        found: set[int] = set()
        for value in args:
            for tensor in value if isinstance(value, list | tuple) else [value]:
                if isinstance(tensor, torch.Tensor):
                    found.add(tensor.untyped_storage()._cdata)
        return found


def counted(sequences: int, drafts: int, vocab: int, width: int, hidden: int = D) -> dict[str, int]:
    """Bytes of one step with a run's default heads in bfloat16: what is held for good of q and of
    pairs and texts, and at most beside it while drafts are drawn, and while they are verified on V1
    and on V2.
    """
    with FakeTensorMode(), Indexing(), pytest.MonkeyPatch.context() as patch:
        with torch.device("cuda"):
            config = HeadsSection(num_heads=drafts).sizes(hidden, vocab)
            torch.set_default_dtype(torch.bfloat16)
            try:
                heads = MedusaHeads(config).requires_grad_(False)
            finally:
                torch.set_default_dtype(torch.float32)
            lm_head_VD, table_VD = (
                torch.zeros(vocab, hidden, dtype=torch.bfloat16) for _ in range(2)
            )
            hidden_TD = torch.zeros(sequences * (drafts + 1), hidden, dtype=torch.bfloat16)
            ids_T = torch.zeros(sequences * (drafts + 1), dtype=torch.int64)
            ids_W = torch.zeros(width, dtype=torch.int64) if width < vocab else None
            rows_B = torch.zeros(sequences, dtype=torch.int64)
            share_B = torch.ones(sequences)
            noise_BK = torch.zeros(sequences, drafts + 1, dtype=torch.float64)
            target_TV = torch.zeros(sequences * drafts, vocab)
            draft_ids_T = torch.zeros(sequences * drafts, dtype=torch.int64)
        device = rows_B.device
        patch.setattr(
            sending,
            "sent",
            lambda values, device, dtype=torch.int64: torch.empty(
                len(values), dtype=dtype, device=device
            ),
        )
        verify._places.cache_clear()
        core = DraftingCore(
            heads,
            lambda rows: F.linear(rows.bfloat16(), lm_head_VD).float(),
            lambda ids: F.embedding(ids, table_VD),
        )
        if ids_W is not None:
            part_WD = lm_head_VD.narrow(0, 0, width)
            core.use_vocabulary(ids_W, lambda rows: F.linear(rows.bfloat16(), part_WD).float())
        with Peak() as held:
            slots = DraftSlots(sequences, drafts, width, device, ids_W)
        fused, copier = core.fused, core.copier
        assert isinstance(fused, ContextHeads) and copier is not None
        parts = config.copy_parts
        part_width = config.copy_width // parts
        with Peak() as rings:
            ring = PairRing(sequences, config.context, fused.kept_width, fused.dtype, device)
            texts = TextRing(sequences, COPY_WINDOW, parts, part_width, copier.dtype, device)
        with Peak() as drawing:
            at = Standing(rows_B, rows_B, rows_B)
            arrived = Arrived.of_step(
                hidden_TD, ids_T, rows_B, rows_B, rows_B, at, ring.spare, drafts + 1
            )
            copier.write(texts, arrived.slots_N, arrived.positions_N + 1, arrived.ids_N)
            seen = fused.look_back(ring, arrived, at)
            seen = replace(seen, told_BKH=copier.find(texts, rows_B, rows_B))
            how = DraftSampling(share_B, noise_BK[:, :drafts])
            core.draft(hidden_TD[:sequences], rows_B, drafts, how, seen, slots)
            del seen, arrived
            slots.stamp(rows_B, stamps(rows_B, rows_B), drafts)
        counts = [drafts] * sequences
        with Peak() as verifying:
            kept = slots.look_up(rows_B, stamps(rows_B, rows_B), drafts)
            rows = verify.DraftRows.build(draft_ids_T, counts, bonus_rows=False)
            proposed = verify.Proposed(kept, noise_BK)
            verify.verify_rows(target_TV, None, rows, counts, proposed, verify.Rule())
        verify._places.cache_clear()
        at_once = min(q_rows.table_rows_at_once(vocab), sequences * (drafts + 1))
        with torch.device("cuda"):
            some_T = torch.zeros(at_once, dtype=torch.int64)
        with Peak() as making:
            some = q_rows.VerifiedRows(some_T, some_T, some_T, some_T)
            q_rows.table_of(slots, some, rows_B, share_B, vocab)
    return {
        "q": held.most,
        "pairs and texts": rings.most,
        "drawing": drawing.most,
        "verifying": verifying.most,
        "verifying on V2": making.most,
    }


def test_the_instrument_sees_what_is_held_and_what_is_let_go() -> None:
    with FakeTensorMode():
        before = torch.empty(1000, dtype=torch.uint8)
    with before.fake_mode, Peak() as seen:
        first = torch.empty(1000, dtype=torch.uint8)
        for _ in range(5):
            torch.empty(500, dtype=torch.uint8)
        first.view(10, 100).add_(1)
        torch.add(first, 1, out=before)
    assert seen.most == 1500


def test_a_large_batch_drafts_and_verifies_in_little_memory() -> None:
    """1,024 sequences, four drafts, 152k tokens of which drafts come from 8,192: q of all tokens
    and all drafts took 7.5 GB in verification alone, and drawing 1.5 GB.
    """
    found = counted(1024, 4, 152_064, 8192)
    most = max(found["drawing"], found["verifying"], found["verifying on V2"])
    assert found["q"] + most < 600e6, found
    # As long as they are: 16 pairs of 2 D numbers, 1,024 places of 256, for each request.
    assert found["pairs and texts"] < 850e6, found


def test_what_drawing_takes_grows_little_with_the_actor() -> None:
    """Rows of the width of the actor come in pieces."""
    found = [counted(1024, 4, 152_064, 8192, hidden)["drawing"] for hidden in (4096, 8192)]
    assert found[1] - found[0] < 400e6, found


def test_without_a_draft_vocabulary_verification_holds_no_second_row_of_each_draft() -> None:
    found = counted(1024, 4, 152_064, 152_064)
    assert max(found["verifying"], found["verifying on V2"]) < 600e6, found
    assert found["q"] < 4e9, found


if __name__ == "__main__":
    for drafts in (4, 8):
        print(f"{drafts} drafts:")
        for sequences in (64, 256, 1024):
            for vocab in (32_000, 152_064, 262_144):
                for width in (8192, vocab):
                    found = counted(sequences, drafts, vocab, width)
                    sizes = [f"{value / 2**20:,.0f}" for value in found.values()]
                    cells = [f"{sequences:,}", f"{vocab:,}", f"{width:,}", *sizes]
                    print("|", " | ".join(cells), "|")
