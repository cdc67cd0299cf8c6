"""What a test has the tensor-parallel workers of an engine do: round differently on all ranks but
the first, and note what each rank drafted and accepted. Workers import it by name.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from vllm.distributed.parallel_state import get_tp_group

from medusa_ppo.vllm_plugin.int8_products import packed_linear

NOTES = "noted_for_a_test"


def digest(values: torch.Tensor) -> str:
    return hashlib.sha256(values.detach().cpu().contiguous().numpy().tobytes()).hexdigest()[:16]


def begin(worker: Any) -> None:
    """From now on the actor's last states are off by one unit in the last place, up or down at
    random, on all ranks but the first; each rank notes every drafting call and what it accepted.
    """
    runner = worker.model_runner
    drafter = runner.drafter
    rank = get_tp_group().rank_in_group
    numbers = torch.Generator().manual_seed(rank)
    notes: list[tuple[Any, ...]] = []
    setattr(drafter, NOTES, notes)

    def rounded(module: Any, given: Any, states_TD: torch.Tensor) -> torch.Tensor:
        if not rank:
            return states_TD
        up_TD = torch.rand(states_TD.shape, generator=numbers).to(states_TD.device) < 0.5
        ends_TD = torch.where(up_TD, torch.inf, -torch.inf).to(states_TD.dtype)
        return torch.nextafter(states_TD, ends_TD)

    # Not the logits: vLLM gathers the same ones on all ranks, and samples from them on each.
    runner.get_model().register_forward_hook(rounded)
    core = drafter._core
    draft, before_step = core.draft, drafter.before_step

    def noted_draft(hidden_BD: torch.Tensor, *given: Any, **named: Any) -> Any:
        drafted = draft(hidden_BD, *given, **named)
        batch, count = drafted.ids_BK.shape
        lengths = None if drafted.lengths_B is None else drafted.lengths_B.tolist()
        # All that verification knows of q, to the bit.
        slots = drafter._slots
        q = "" if slots is None else digest(slots.cumulative_KRX[:count, :batch])
        notes.append(("drafted", digest(hidden_BD), q, drafted.ids_BK.tolist(), lengths))
        return drafted

    def noted_step(sampled_token_ids: Any, *given: Any, **named: Any) -> Any:
        notes.append(("sampled", "", "", [list(ids) for ids in sampled_token_ids], None))
        return before_step(sampled_token_ids, *given, **named)

    core.draft = noted_draft
    drafter.before_step = noted_step


def multiply_alone(worker: Any) -> None:
    """Take the agreement away: each rank multiplies by all rows of logits by itself."""
    drafter = worker.model_runner.drafter
    drafter.draft_vocabulary._pack = drafter._core._pack_own = packed_linear
    drafter._refresh_vocabulary()


def take(worker: Any) -> list[tuple[Any, ...]]:
    """What this rank noted since the last call: what it is; digests of the states and of q; tokens
    by request; the lengths of the runs.
    """
    notes: list[tuple[Any, ...]] = getattr(worker.model_runner.drafter, NOTES)
    taken = list(notes)
    notes.clear()
    return taken
