"""Chooses the responses that heads are judged on: some that they were not trained on, with few
tokens.

Heads judged on their training data would look better than they draft. Answers to one prompt are
much alike, so whole prompts are held out with all their answers. In a large batch that would be
most of the data, and the number of prompts is what distinguishes versions, so there only a stretch
of one answer to each prompt is held out.

A batch of few prompts holds out none: too little would be left both to decide by and to learn from.
Heads are judged on all of it before they train on it (test-then-train, also called prequential:
Dawid 1984; Blum, Kalai and Langford 1999).
"""

from __future__ import annotations

from dataclasses import replace

import torch

from heads.heads_config import COPY_WINDOW, GAP, KEY_TOKENS
from heads.targets import segments_from_lengths
from medusa_ppo.contract.rollout_batch import RolloutBatch

HOLDOUT_TOKENS = 32_768
"""Response tokens of one batch that heads are judged on: several times what an interval of one
percent needs.
"""
AHEAD_TOKENS = 4096
"""The same for a batch that is judged on before training: part of a large sample."""
HOLDOUT_PROMPTS = 6
"""Prompts needed for a decision about heads. If fewer would be held out, heads are judged on the
batch before training on it.
"""
SAMPLED_SHARE = 0.1
"""Share of prompts held out from a sample drawn without regard to prompts: heads are judged on
everything sampled of each, which is the same share of the sample.
"""
LEAST_STRETCH = 64
"""Tokens of a stretch, if answers are that long: a draft step at its end counts for less."""


def enough_to_hold_out(prompts: int, fraction: float) -> bool:
    """Whether the held-out part of this many prompts is enough to decide by."""
    return round(fraction * prompts) >= HOLDOUT_PROMPTS


def held_out(
    lengths_S: torch.Tensor, prompts_S: torch.Tensor | None, fraction: float, seed: int
) -> torch.Tensor:
    """Which sequences heads are judged on, bool: all answers to a part of the prompts, at least
    HOLDOUT_PROMPTS of them if there are more, or one answer to each if all of them exceed
    HOLDOUT_TOKENS; none if there is only one prompt.
    """
    generator = torch.Generator().manual_seed(seed)
    groups, group_S = prompt_groups(prompts_S, lengths_S.numel())
    held = min(max(HOLDOUT_PROMPTS, round(fraction * groups)), groups - 1)
    order_H = torch.randperm(groups, generator=generator)[:held]
    held_S = torch.isin(group_S, order_H)
    if int(lengths_S[held_S].sum()) <= HOLDOUT_TOKENS:
        return held_S
    chosen_H = [_one_of(group_S == group, generator) for group in order_H]
    return torch.zeros_like(held_S).index_fill_(0, torch.tensor(chosen_H), True)


def held_stretches(
    lengths_S: torch.Tensor,
    group_S: torch.Tensor,
    groups: int,
    fraction: float,
    rows: int,
    generator: torch.Generator,
) -> tuple[torch.Tensor, torch.Tensor]:
    """For a batch that will be sampled: a stretch of one answer to each of a part of the prompts;
    nothing if there are few prompts.

    Prompts are drawn uniformly, so that answers of every length are left for training; within a
    prompt every token is equally likely to be judged on. Nothing depends on answers to other
    prompts, so that they may be missing.

    Args:
        group_S: which of the batch's prompts each answers.
        groups: number of the batch's prompts.
        rows: maximum rows of all stretches together; a single one may be longer.

    Returns:
        Which rows they are, bool `M`; which sequences answer one of these prompts, bool `S`.
    """
    judged_M = torch.zeros(int(lengths_S.sum()), dtype=torch.bool)
    if not enough_to_hold_out(groups, fraction):
        return judged_M, torch.zeros_like(lengths_S, dtype=torch.bool)
    order_H = torch.randperm(groups, generator=generator)[: round(fraction * groups)]
    length = max(LEAST_STRETCH, rows // order_H.numel())
    order_H = order_H[: max(1, rows // length)]
    seeds = torch.randint(2**62, order_H.shape, generator=generator).tolist()
    starts_S = lengths_S.cumsum(0) - lengths_S
    for group, seed in zip(order_H, seeds, strict=True):
        answers = (group_S == group).nonzero()[:, 0]
        if not answers.numel():  # Not here, or all of them are empty.
            continue
        own = torch.Generator().manual_seed(seed)
        # Stretches begin at a different place in each answer, or those at its ends would be short.
        phases_A = torch.randint(length, answers.shape, generator=own)
        stretches_A = (lengths_S[answers] + phases_A - 1) // length + 1
        number = int(torch.randint(int(stretches_A.sum()), (1,), generator=own))
        answer = int((stretches_A.cumsum(0) <= number).sum())
        place = number - int(stretches_A[:answer].sum())
        sequence = int(answers[answer])
        first = max(0, place * length - int(phases_A[answer]))
        last = min(int(lengths_S[sequence]), (place + 1) * length - int(phases_A[answer]))
        start = int(starts_S[sequence])
        judged_M[start + first : start + last] = True
    return judged_M, torch.isin(group_S, order_H)


def hold_out(
    batch: RolloutBatch, fraction: float, seed: int
) -> tuple[RolloutBatch, RolloutBatch | None]:
    """Split into training and holdout by prompts, so that no held-out response answers a prompt
    that was trained on.

    Returns:
        (training, holdout); the holdout is None if there are few prompts.
    """
    held_S = batch.held_S
    if held_S is None:
        share = fraction if batch.weights_M is None else min(fraction, SAMPLED_SHARE)
        groups, _ = prompt_groups(batch.prompts_S, batch.lengths_S.numel())
        if not enough_to_hold_out(groups, share):
            return batch, None
        held_S = held_out(batch.lengths_S, batch.prompts_S, share, seed)
    spared_S = held_S
    if batch.prompts_S is not None:
        spared_S = torch.isin(batch.prompts_S, batch.prompts_S[held_S])
    if not 0 < int(spared_S.sum()) < held_S.numel():
        return replace(batch, held_S=None) if batch.held_S is not None else batch, None
    training = batch.select((~spared_S).nonzero()[:, 0])
    holdout = stretches(batch.select(held_S.nonzero()[:, 0]), seed)
    return replace(training, held_S=None), holdout


def stretches(batch: RolloutBatch, seed: int = 0, tokens: int = HOLDOUT_TOKENS) -> RolloutBatch:
    """What heads can be judged on: each run of rows with states becomes a separate response, after
    the text before it. At most `tokens` tokens.
    """
    whole = replace(cut_to_states(batch), weights_M=None, held_S=None)
    if int(whole.lengths_S.sum()) <= tokens:
        return whole
    # Long responses are cut, so that many prompts take part.
    most = max(LEAST_STRETCH, tokens // whole.lengths_S.numel())
    generator = torch.Generator().manual_seed(seed)
    segment_M = segments_from_lengths(whole.lengths_S)
    place_M = (
        torch.arange(segment_M.numel()) - (whole.lengths_S.cumsum(0) - whole.lengths_S)[segment_M]
    )
    spare_S = (whole.lengths_S - most).clamp(min=0)
    first_S = (torch.rand(spare_S.shape, generator=generator) * (spare_S + 1)).long()
    first_M = first_S[segment_M]
    within_M = (place_M >= first_M) & (place_M < first_M + most)
    shorter = cut_to_states(replace(whole, weights_M=within_M.float() - (~within_M).float()))
    order = torch.randperm(shorter.lengths_S.numel(), generator=generator)
    fits = shorter.lengths_S[order].cumsum(0) <= tokens
    return replace(shorter.select(order[fits].sort().values), weights_M=None)


def cut_to_states(batch: RolloutBatch) -> RolloutBatch:
    """Turn each run of rows with states into a separate response, after the text before it.
    Training and replay read nothing else, and the other tokens of long responses take much memory.
    """
    if batch.weights_M is None:
        return batch
    kept_M = batch.weights_M >= 0
    if bool(kept_M.all()):
        return batch
    segment_M = segments_from_lengths(batch.lengths_S)
    starts_S = batch.lengths_S.cumsum(0) - batch.lengths_S
    before_M = kept_M.roll(1)
    before_M[starts_S] = False
    first_R = (kept_M & ~before_M).nonzero()[:, 0]
    run_N = (kept_M & ~before_M).cumsum(0)[kept_M] - 1
    of_R = segment_M[first_R]
    ids_M = batch.response_ids_M
    earlier: list[torch.Tensor] = []
    ends_S = None if batch.before_S is None else batch.before_S.cumsum(0)
    for sequence, first in zip(of_R.tolist(), first_R.tolist(), strict=True):
        parts = [ids_M[int(starts_S[sequence]) : first].to(torch.int32)]
        if batch.before_ids_X is not None and batch.before_S is not None and ends_S is not None:
            end = int(ends_S[sequence])
            parts.insert(0, batch.before_ids_X[end - int(batch.before_S[sequence]) : end])
        earlier.append(_searched(torch.cat(parts)))
    return replace(
        batch,
        hidden_MD=batch.hidden_MD[batch.state_rows_M[kept_M]],
        response_ids_M=ids_M[kept_M],
        logprobs_M=batch.logprobs_M[kept_M],
        lengths_S=torch.bincount(run_N, minlength=first_R.numel()),
        # Stretches of one response answer the same prompt, even if the prompt is unknown.
        prompts_S=of_R if batch.prompts_S is None else batch.prompts_S[of_R],
        weights_M=batch.weights_M[kept_M],
        held_S=None if batch.held_S is None else batch.held_S[of_R],
        before_ids_X=torch.cat(earlier),
        before_S=torch.tensor([ids.numel() for ids in earlier], dtype=torch.int64),
        left_out=batch.left_out + int((~kept_M).sum()),
    )


def _searched(ids_X: torch.Tensor) -> torch.Tensor:
    """The part of the text before a run that copying searches: earlier parts, and as much of the
    run's own part as is within the window.
    """
    gaps = (ids_X == GAP).nonzero()[:, 0]
    own = int(gaps[-1]) + 1 if gaps.numel() else 0
    first = max(own, ids_X.numel() - COPY_WINDOW - KEY_TOKENS)
    return ids_X if first == own else torch.cat([ids_X[:own], ids_X[first:]])


def prompt_groups(prompts_S: torch.Tensor | None, sequences: int) -> tuple[int, torch.Tensor]:
    """Number of prompts; which one each sequence answers, 0, 1, ..."""
    if prompts_S is None:
        return sequences, torch.arange(sequences)
    prompts, group_S = prompts_S.unique(return_inverse=True)
    return prompts.numel(), group_S


def _one_of(answers_S: torch.Tensor, generator: torch.Generator) -> int:
    found = answers_S.nonzero()[:, 0]
    return int(found[torch.randint(found.numel(), (1,), generator=generator)])
