"""The gate: a candidate is published only when it beats the serving heads on rollouts that it was not trained on.

Shape letters: M rows of the holdout, K heads, V vocabulary, D hidden.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from heads.acceptance import (
    Interval,
    ReplayResult,
    draft_ids_for_rows,
    draft_logprobs_for_rows,
    one_hot_acceptance,
    paired_difference,
    replay_probabilities,
    sampled_acceptance,
)
from heads.modules import MedusaHeads
from heads.targets import condition_ids, head_targets, segments_from_lengths
from medusa_ppo.meeting import Meeting
from medusa_ppo.types import ReplayRow, RolloutBatch

MAX_WEIGHT = 1e4  # Trained heads stay below 10; beyond this, products overflow in 16-bit engines although argmax may look sound here.


@dataclass(frozen=True)
class Verdict:
    """What the gate decided, and on what grounds.

    Attributes:
        publish: the candidate may be served.
        worse: the candidate is surely worse than the serving heads.
        reason: one sentence.
        serving, candidate, frozen: replay estimates on the same holdout; None when a set of heads could not be judged.
        difference: candidate minus serving, mean acceptance length, with its interval.
    """

    publish: bool
    worse: bool
    reason: str
    serving: ReplayRow | None = None
    candidate: ReplayRow | None = None
    frozen: ReplayRow | None = None
    difference: Interval | None = None


def replay(
    heads: MedusaHeads,
    holdout: RolloutBatch,
    lm_head_VD: torch.Tensor,
    *,
    embedding_VD: torch.Tensor | None = None,
    draft_temperature: float = 0.0,
    team: Meeting | None = None,
) -> ReplayResult:
    """Replay estimate of heads on a batch, on the device of the heads; with a team, of all its parts, the same in every process."""
    if holdout.lengths_S.numel():
        accept_MK = _acceptance(heads, holdout, lm_head_VD, embedding_VD, draft_temperature)
        here = replay_probabilities(accept_MK, holdout.lengths_S)
    else:  # A part without a response.
        none_S = torch.zeros(0, dtype=torch.float64)
        here = ReplayResult(none_S, none_S.new_zeros(0, heads.config.num_heads), none_S)
    if team is None:
        return here
    columns = team.gather(torch.cat([here.drafts_S[:, None], here.accepted_SK, here.unseen_S[:, None]], dim=1))
    return ReplayResult(columns[:, 0], columns[:, 1:-1], columns[:, -1])


def _acceptance(
    heads: MedusaHeads, batch: RolloutBatch, lm_head_VD: torch.Tensor, embedding_VD: torch.Tensor | None, draft_temperature: float
) -> torch.Tensor:
    """Probability that the draft of each head at each row is accepted, given that those before it were, float64 `MK`."""
    config, device = heads.config, lm_head_VD.device
    segment_M = segments_from_lengths(batch.lengths_S)
    hidden_MD = batch.hidden_MD.to(device, torch.float32)
    condition_MK = condition_ids(batch.response_ids_M, segment_M, config.num_heads).to(device) if config.conditioned else None
    if draft_temperature <= 0:
        ids_MK = draft_ids_for_rows(heads, hidden_MD, lm_head_VD, condition_MK=condition_MK, embedding_VD=embedding_VD)
        return one_hot_acceptance(ids_MK.cpu(), batch.response_ids_M, batch.lengths_S)
    targets_MK, _ = head_targets(batch.response_ids_M, segment_M, config.num_heads)
    logprobs_1MK = draft_logprobs_for_rows(
        heads,
        hidden_MD,
        targets_MK.to(device),
        lm_head_VD,
        temperatures=(batch.temperature * draft_temperature,),  # As the engine drafts: request temperature x draft temperature.
        top_k=batch.top_k,
        top_p=batch.top_p,
        condition_MK=condition_MK,
        embedding_VD=embedding_VD,
    )
    return sampled_acceptance(logprobs_1MK[0].cpu(), batch.logprobs_M, batch.lengths_S)


def judge(
    candidate: MedusaHeads,
    serving: MedusaHeads,
    frozen: MedusaHeads | None,
    measure: Callable[[MedusaHeads], ReplayResult],
    confidence: float = 0.9,
    of_serving: ReplayResult | None = None,
) -> Verdict:
    """Compare the candidate with the serving heads, response by response, and measure the frozen control beside them.

    Args:
        candidate: newly trained heads.
        serving: what the engine drafts with (before the first publish: the heads it started with).
        frozen: the first published heads; None before there are any (the serving heads stand in).
        measure: replay of heads on rollouts that the candidate was not trained on.
        confidence: probability (one-sided, bootstrap over responses) that a difference has the sign it shows.
        of_serving: what `measure` gives for the serving heads, where it is known already.
    """
    fault = find_fault(candidate, serving)
    if fault:
        return Verdict(False, True, fault)
    of_serving, of_candidate = of_serving or measure(serving), measure(candidate)
    of_frozen = of_serving if frozen is None else measure(frozen)
    rows = (replay_row(of_serving), replay_row(of_candidate), replay_row(of_frozen))
    if not of_candidate.drafts:
        return Verdict(False, False, "The holdout has no draft step: its responses are one token long.", *rows)
    if not math.isfinite(of_candidate.accepted):
        return Verdict(False, True, "The candidate's logits overflow.", rows[0], None, rows[2])
    difference = paired_difference(of_candidate, of_serving, 2 * confidence - 1)
    seen = f"{difference.value:+.4f} (interval {difference.low:+.4f} to {difference.high:+.4f}) against the serving heads"
    if difference.low > 0:
        return Verdict(True, False, f"Better: {seen}.", *rows, difference)
    return Verdict(False, difference.high < 0, f"Not surely better: {seen}.", *rows, difference)


def find_fault(candidate: MedusaHeads, serving: MedusaHeads) -> str:
    """Why these heads may not even be replayed: other sizes, values that are not finite, or huge. Empty when nothing is wrong."""
    if candidate.config != serving.config:
        return f"The candidate has other sizes than the serving heads: {candidate.config}."
    for name, tensor in candidate.trainable_state().items():
        if not bool(torch.isfinite(tensor).all()):
            return f"The candidate's {name} holds values that are not finite."
        if float(tensor.abs().max()) > MAX_WEIGHT:
            return f"The candidate's {name} exploded: a weight of {float(tensor.abs().max()):.1e}."
    return ""


def replay_row(result: ReplayResult) -> ReplayRow:
    """What is told of a replay."""
    return ReplayRow(result.mean_acceptance_length, result.acceptance_per_position)
