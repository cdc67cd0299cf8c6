"""Which responses heads are judged on: whole prompts, few tokens, and always some.

Heads that were judged on what they were trained on would look better than they draft. Answers to
one prompt are much alike, so a prompt is held out with all of its answers.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from medusa_ppo.contract.rollout_batch import RolloutBatch

HOLDOUT_TOKENS = 32_768
"""Response tokens that heads are judged on, of one batch: several times what an interval of one
percent asks for.
"""
HOLDOUT_PROMPTS = 6
"""Held-out prompts that a decision about heads asks for. A batch that would hold out fewer holds
out more of its own (`held_out`).
"""
FEW_PROMPTS_SHARE = 5 / 3
"""Times as many prompts are held out where they are few: two batches of a dozen prompts then
decide, and not three.
"""


def held_out(
    lengths_S: torch.Tensor, prompts_S: torch.Tensor | None, fraction: float, seed: int
) -> torch.Tensor:
    """Which sequences heads are judged on, bool: all answers to a part of the prompts; none where
    there is one prompt only.

    Where that is fewer than HOLDOUT_PROMPTS, up to FEW_PROMPTS_SHARE times as many. The first of
    them always, the next ones as long as HOLDOUT_TOKENS have room for their answers.
    """
    prompts_S = torch.arange(lengths_S.numel()) if prompts_S is None else prompts_S
    groups, group_S = prompts_S.unique(return_inverse=True)
    if groups.numel() < 2:
        return torch.zeros_like(prompts_S, dtype=torch.bool)
    held = round(fraction * groups.numel())
    if held < HOLDOUT_PROMPTS:
        held = min(HOLDOUT_PROMPTS, round(FEW_PROMPTS_SHARE * fraction * groups.numel()))
    held = min(max(1, held), groups.numel() - 1)
    order = torch.randperm(groups.numel(), generator=torch.Generator().manual_seed(seed))[:held]
    tokens = (
        torch.zeros(groups.numel(), dtype=torch.int64)
        .index_add_(0, group_S, lengths_S)[order]
        .cumsum(0)
    )
    fits = tokens <= HOLDOUT_TOKENS
    fits[0] = True
    return torch.isin(group_S, order[fits])


def hold_out(
    batch: RolloutBatch, fraction: float, seed: int
) -> tuple[RolloutBatch, RolloutBatch | None]:
    """Split into training and holdout by prompts, so that no held-out response answers a prompt
    that was trained on.

    Returns:
        (training, holdout); the holdout is None where there is one prompt only.
    """
    held_S = batch.held_S
    if held_S is None:
        held_S = held_out(batch.lengths_S, batch.prompts_S, fraction, seed)
    if not 0 < int(held_S.sum()) < held_S.numel():
        return batch, None
    training = batch.select((~held_S).nonzero()[:, 0])
    holdout = batch.select(held_S.nonzero()[:, 0])
    return replace(training, held_S=None), replace(holdout, weights_M=None, held_S=None)
