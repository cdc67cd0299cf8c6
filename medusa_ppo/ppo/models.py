"""The networks of PPO (what the actor says about response tokens, the critic, the frozen
reference), and its formulas, a function each.

Shape letters: B rows, T tokens (right-padded), D hidden, V vocabulary, M response tokens of a micro
batch, packed row after row, C some of them, S sequences, R response positions (padded to the
longest; mask_SR is True at real tokens). What the formulas take is float32.

All networks stay in eval mode: dropout would make log-probs of unchanged weights differ, and the
ratio of PPO with them.

Position r of a sequence belongs to response token y_r: `logprobs_SR[s, r]` = log pi(y_r | prompt,
y_<r), `values_SR[s, r]` = the critic's value of the state *before* y_r was chosen, `rewards_SR[s,
r]` = what choosing y_r earned.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from heads.checkpoint import load_state, save_state
from heads.errors import CheckpointError, ModelError
from heads.vocabulary import WHOLE, truncate_logits
from medusa_ppo.actors.actor_tables import beyond_lm_head
from medusa_ppo.actors.hf import lm_head_weight
from medusa_ppo.actors.vision import copy_without_tower, forward
from medusa_ppo.contract.rollouts import Sampling
from medusa_ppo.ppo.batch import MicroBatch

AGAIN: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}  # Nothing here draws.
MOMENTS = ("step", "exp_avg", "exp_avg_sq")
NEVER = -1e30
"""A logit whose probability is 0, with log-probs that 0 can be multiplied with."""


def save_trained(
    folder: Path, name: str, module: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Write `NAME.safetensors`, the weights, and `NAME_optimizer.safetensors`, AdamW's moments as
    `weight/moment` (none before a step).

    Of tied weights the first name only (safetensors holds no aliases). Buffers are rebuilt, not
    saved.
    """
    own = dict(module.named_parameters())
    moments = {
        f"{weight}/{key}": optimizer.state[own[weight]][key]
        for weight in own
        for key in MOMENTS
        if own[weight] in optimizer.state
    }
    save_state(
        folder / f"{name}.safetensors",
        {weight: parameter.detach() for weight, parameter in own.items()},
    )
    save_state(folder / f"{name}_optimizer.safetensors", moments)


def load_trained(
    folder: Path, name: str, module: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Fill both from what `save_trained` wrote. CheckpointError when a file is missing, damaged, or
    does not fit.
    """
    own = dict(module.named_parameters())
    weights, moments = (
        load_state(folder / f"{file}.safetensors") for file in (name, f"{name}_optimizer")
    )
    split = {full: full.rpartition("/")[::2] for full in moments}
    wrong = [
        n
        for n in own.keys() | weights.keys()
        if n not in own or n not in weights or own[n].shape != weights[n].shape
    ]
    for full, (weight, key) in split.items():
        if (
            key not in MOMENTS
            or weight not in own
            or (key != "step" and own[weight].shape != moments[full].shape)
        ):
            wrong.append(full)
    if wrong:
        given = f"{name}: {', '.join(sorted(wrong)[:3])}"
        raise CheckpointError(
            "The saved weights do not fit the model.",
            given=given,
            expected="the same names and shapes",
            do="Check model.path.",
        )
    optimizer.state.clear()
    with torch.no_grad():
        for weight, parameter in own.items():
            parameter.copy_(weights[weight])
    for full, (weight, key) in split.items():
        # Without a dtype or device of its own: AdamW keeps moments beside the weight, and its step
        # counter there too when fused.
        optimizer.state[own[weight]][key] = moments[full].to(own[weight].device)


@dataclass(frozen=True)
class TokenStats:
    """What the actor says about the response tokens of a micro batch. All float32.

    Attributes:
        logprobs_M: log-prob of each response token at the sampling temperature, under the
            distribution that was sampled from.
        entropy_M: entropy of the same distribution in nats; None when not asked for.
    """

    logprobs_M: Tensor
    entropy_M: Tensor | None = None


class Support:
    """Which tokens top-k and top-p left to the actor that wrote the rollouts, at each of their
    positions; nothing where neither is on.

    Old and new policy and the reference are all taken over these: the distribution that was sampled
    from, and what the same choice leaves of the others. Each policy's own choice would give tokens
    that were sampled a probability of 0 after an update.
    """

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self.cuts = sampling.top_k > 0 or sampling.top_p < 1.0
        self._bits: dict[int, np.ndarray] = {}
        self._begun: list[np.ndarray] = []  # Of a micro batch that comes in parts.

    def cut(self, logits_CV: Tensor, micro: MicroBatch, first: int = 0) -> Tensor:
        """The logits with next to minus infinity for all other tokens. The first to ask for a
        sequence is the actor that wrote it.

        Args:
            logits_CV: of C response tokens of the micro batch from `first` on; who does not give
                all at once gives them in their order.
        """
        if not self.cuts:
            return logits_CV
        rows = slice(first, first + len(logits_CV))
        if micro.places[0] in self._bits:
            bits_CV = np.concatenate([self._bits[place] for place in micro.places])[rows]
        else:
            bits_CV = self._kept(logits_CV.detach(), micro.response_ids_M[rows])
            self._begun = [*(self._begun if first else []), bits_CV]
            lengths = micro.response_mask_BT.sum(dim=1).tolist()
            if rows.stop == sum(lengths):
                self._bits.update(
                    zip(
                        micro.places,
                        np.split(np.concatenate(self._begun), np.cumsum(lengths)[:-1]),
                        strict=True,
                    )
                )
        kept_CV = (
            torch.from_numpy(np.unpackbits(bits_CV, axis=1, count=logits_CV.shape[1]))
            .to(logits_CV.device)
            .bool()
        )
        return logits_CV.masked_fill(~kept_CV, NEVER)

    def _kept(self, logits_CV: Tensor, ids_C: Tensor) -> np.ndarray:
        kept_CV = self._truncate(logits_CV) > -torch.inf
        # The engine rounds in its own way, and what it sampled is kept.
        kept_CV = kept_CV | self._sampled(logits_CV, ids_C)
        return np.packbits(kept_CV.cpu().numpy(), axis=1)

    def _truncate(self, logits_CV: Tensor) -> Tensor:
        """The logits with minus infinity for what top-k and top-p leave out."""
        return truncate_logits(logits_CV, self._sampling.top_k, self._sampling.top_p)

    def _sampled(self, logits_CV: Tensor, ids_C: Tensor) -> Tensor:
        """Which column is the sampled token's, bool `CV`."""
        none_CV = torch.zeros_like(logits_CV, dtype=torch.bool)
        return none_CV.scatter_(1, ids_C.unsqueeze(1), True)


def token_stats(
    actor: nn.Module,
    micro: MicroBatch,
    sampling: Sampling,
    *,
    entropy: bool = False,
    support: Support | None = None,
    autocast: bool = False,
    chunk_rows: int | None = None,
) -> TokenStats:
    """Run the actor over a micro batch; keeps the graph when gradients are on.

    The logits are divided by the sampling temperature, as the engine's sampler does, and cut to
    `support`: the policy that PPO improves is the one that wrote the rollouts. With `autocast`
    products run in bfloat16 while weights and log-probs stay float32.

    Logits are never whole: so many rows at a time are made, and made again in the backward pass
    (but for a model whose logits are more than lm_head's product: its own are taken, and only what
    follows is done in chunks).

    Args:
        chunk_rows: rows of logits at a time; None: as the companion's losses.
    """
    lm_head = _plain_lm_head(actor)
    with _autocast(micro.input_ids_BT.device, autocast):
        if lm_head is None:
            source_MX = _response_logits(actor, micro)
        else:
            base: Any = actor.base_model
            source_MX = forward(base, micro.input_ids_BT, micro.seen).last_hidden_state[
                micro.predict_mask_BT
            ]
    ids_M = micro.response_ids_M

    def stats_of(source_CX: Tensor, first: int) -> tuple[Tensor, Tensor]:
        with _autocast(source_CX.device, autocast):
            logits_CV = source_CX if lm_head is None else lm_head(source_CX)
        logits_CV = (
            logits_CV.float()
            if sampling.temperature == 1.0
            else logits_CV.float() / sampling.temperature
        )
        if support is not None:
            logits_CV = support.cut(logits_CV, micro, first=first)
        logprobs_CV = logits_CV.log_softmax(dim=-1)
        logprobs_C = logprobs_CV.gather(1, ids_M[first : first + len(source_CX), None]).squeeze(1)
        return logprobs_C, (
            -(logprobs_CV.exp() * logprobs_CV).sum(dim=-1) if entropy else logprobs_C[:0]
        )

    rows = chunk_rows or (len(ids_M) if lm_head is None else WHOLE.chunk_rows(lm_head.weight))
    again = torch.is_grad_enabled() and rows < len(ids_M)
    parts = []
    for first in range(0, len(ids_M), rows):
        part_CX = source_MX[first : first + rows]
        parts.append(
            checkpoint(stats_of, part_CX, first, **AGAIN) if again else stats_of(part_CX, first)
        )
    logprobs, entropies = zip(*parts, strict=True)
    return TokenStats(torch.cat(logprobs), torch.cat(entropies) if entropy else None)


def _plain_lm_head(actor: Any) -> nn.Linear | None:
    """The actor's lm_head where its product is all that stands between the final states and the
    logits.
    """
    if not isinstance(actor, PreTrainedModel) or actor.base_model is actor:
        return None
    lm_head: Any = actor.get_output_embeddings()
    return (
        lm_head if isinstance(lm_head, nn.Linear) and not beyond_lm_head(actor, lm_head) else None
    )


def recompute_layers(model: nn.Module) -> None:
    """Of each layer keep the input alone, and make its activations again in the backward pass;
    values and gradients stay.

    transformers' own switch does nothing in eval mode, in which all networks here are. ModelError
    when the model has no layers of its kind.
    """
    layers: list[Any] = [
        module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)
    ]
    if not layers:
        do = "Set ppo.recompute=false."
        raise ModelError(
            "The model's layers are not known.",
            given=type(model).__name__,
            expected="a model of transformers",
            do=do,
        )
    for layer in layers:
        layer.forward = _made_again(layer.forward)


def _made_again(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        return (
            checkpoint(forward, *args, **kwargs, **AGAIN)
            if torch.is_grad_enabled()
            else forward(*args, **kwargs)
        )

    return run


class Critic(nn.Module):
    """A value head on a backbone of the actor's type: V(prompt, y_<r) for every response token y_r.

    It shares nothing with the actor: own backbone, own optimizer, own gradient clip, so value
    errors never pull on the policy.
    """

    def __init__(self, causal_lm: PreTrainedModel) -> None:
        """
        Args:
            causal_lm: the model whose body (without lm_head) is copied.
        """
        super().__init__()
        self.backbone: nn.Module = copy_without_tower(
            causal_lm, causal_lm.base_model
        ).requires_grad_(True)
        weight = next(self.backbone.parameters())
        self.value_head = nn.Linear(lm_head_weight(causal_lm).shape[1], 1, device=weight.device)
        # Zero start: the first values are 0, not noise as large as the rewards.
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)
        self.eval()

    def forward(self, micro: MicroBatch, autocast: bool = False) -> Tensor:
        """values_M float32, in the packed order of the micro batch."""
        with _autocast(micro.input_ids_BT.device, autocast):
            hidden_BTD = forward(self.backbone, micro.input_ids_BT, micro.seen).last_hidden_state
        return self.value_head(hidden_BTD[micro.predict_mask_BT].float()).squeeze(-1)


def _response_logits(actor: nn.Module, micro: MicroBatch) -> Tensor:
    """logits_MV of the positions that predict response tokens; lm_head is not run over prompts
    where the model allows that.
    """
    first = micro.first_predicting
    keep = micro.input_ids_BT.shape[1] - first
    extra = (
        {"logits_to_keep": keep}
        if "logits_to_keep" in inspect.signature(actor.forward).parameters
        else {}
    )
    logits = forward(actor, micro.input_ids_BT, micro.seen, **extra).logits
    return logits[micro.predict_mask_BT[:, -logits.shape[1] :]]


def _autocast(device: torch.device, on: bool) -> contextlib.AbstractContextManager[object]:
    return torch.autocast(device.type, dtype=torch.bfloat16) if on else contextlib.nullcontext()


# ---- the formulas

# Keeps the division of `whiten` finite when all advantages are equal.
WHITEN_EPSILON = 1e-8
GROUP_EPSILON = 1e-4
"""The same where all responses to a prompt earned the same; as DeepSeekMath and TRL have it."""


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over the positions where mask is True, each position once (not a mean of means). 0 when
    the mask is empty.
    """
    return torch.where(mask, values, 0.0).sum() / mask.sum().clamp(min=1)


def masked_deviation(values: Tensor, mask: Tensor) -> float:
    """Standard deviation over the positions where mask is True."""
    return float(masked_mean((values - masked_mean(values, mask)) ** 2, mask).sqrt())


def kl_estimates(logprobs: Tensor, reference: Tensor, estimator: str) -> Tensor:
    """Of KL(pi || pi_ref), from tokens sampled from pi, with d = log pi - log pi_ref.

    k1 = d is unbiased and may be negative; k2 = d^2 / 2 has, as a loss, the gradient of the KL, and
    is biased; k3 = exp(-d) - 1 + d is unbiased and never negative, but heavy-tailed where the
    reference likes a token much better.
    """
    difference = logprobs - reference
    if estimator == "k1":
        return difference
    return difference**2 / 2 if estimator == "k2" else torch.expm1(-difference) + difference


def token_rewards(
    scores: Tensor,
    logprobs_SR: Tensor,
    reference_SR: Tensor,
    mask_SR: Tensor,
    kl_coefficient: float,
    estimator: str = "k1",
) -> Tensor:
    """Per-token rewards: minus the KL penalty at every token, and the score: at the sequence's last
    token, or where its steps end.

    The penalty is an estimate from the token that was sampled, so it is part of the return that GAE
    sees.

    Args:
        scores: reward of each whole response (S), or what each token earned (S, R), float32.
        logprobs_SR: log-probs of the actor that wrote the responses.
        reference_SR: log-probs of the frozen reference.
        mask_SR: bool; every row holds at least one token, and real tokens come first.
        kl_coefficient: reward units per nat.
    """
    rewards_SR = torch.where(
        mask_SR, -kl_coefficient * kl_estimates(logprobs_SR, reference_SR, estimator), 0.0
    )
    if scores.dim() == 2:
        return rewards_SR + scores
    last_S = mask_SR.sum(dim=1) - 1
    rewards_SR[torch.arange(len(scores)), last_S] += scores
    return rewards_SR


def group_advantages(rewards_S: Tensor, prompts_S: Tensor, trained_S: Tensor, kind: str) -> Tensor:
    """Advantages of whole responses over the others to the same prompt: advantages_S, 0 for
    responses that are not trained on.

    `grpo`: (reward - mean of the group) / standard deviation of the group. `rloo`: reward - mean of
    the others in the group.

    Args:
        prompts_S: int64, the prompt that each response answers.
        trained_S: bool; others belong to no group.
    """
    groups = int(prompts_S.max()) + 1
    weights_S = trained_S.to(rewards_S.dtype)

    def group_mean(values_S: Tensor) -> Tensor:
        """Of each response's group."""
        sums_G, counts_G = (
            torch.zeros(groups).index_add_(0, prompts_S, part_S)
            for part_S in (values_S * weights_S, weights_S)
        )
        return (sums_G / counts_G.clamp(min=1))[prompts_S]

    centred_S = (rewards_S - group_mean(rewards_S)) * weights_S
    if kind == "grpo":
        return centred_S / (group_mean(centred_S**2).sqrt() + GROUP_EPSILON)
    counts_S = torch.zeros(groups).index_add_(0, prompts_S, weights_S)[prompts_S]
    return centred_S * counts_S / (counts_S - 1).clamp(min=1)


def generalized_advantages(
    rewards_SR: Tensor, values_SR: Tensor, mask_SR: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """GAE: advantages_SR and returns_SR = advantages + values, zero on padding.

    delta_r = reward_r + gamma V_{r+1} - V_r and A_r = delta_r + gamma lam A_{r+1}. The value after
    the last token is 0, for responses that ended and for responses that were cut: a cut response is
    judged by its score, like any other.
    """
    advantages_SR = torch.zeros_like(rewards_SR)
    next_advantage_S = torch.zeros_like(rewards_SR[:, 0])
    next_value_S = torch.zeros_like(next_advantage_S)
    for r in range(rewards_SR.shape[1] - 1, -1, -1):
        real_S = mask_SR[:, r]
        delta_S = rewards_SR[:, r] + gamma * next_value_S - values_SR[:, r]
        # Padding stands behind the last token, so it must leave the zeros that the last token
        # starts from.
        next_advantage_S = torch.where(real_S, delta_S + gamma * lam * next_advantage_S, 0.0)
        next_value_S = torch.where(real_S, values_SR[:, r], 0.0)
        advantages_SR[:, r] = next_advantage_S
    return advantages_SR, torch.where(mask_SR, advantages_SR + values_SR, 0.0)


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """Zero mean and unit variance over all real tokens of the rollout batch; zero on padding.

    Over the whole batch and not over a minibatch: a minibatch of lucky responses must not look
    average to itself.
    """
    mean = masked_mean(values, mask)
    variance = masked_mean((values - mean) ** 2, mask)
    return torch.where(mask, (values - mean) * torch.rsqrt(variance + WHITEN_EPSILON), 0.0)


@dataclass(frozen=True)
class PolicyTerms:
    """Sums over the rows of a micro batch; the caller divides by the tokens of its minibatch.

    Attributes:
        loss: sum of the clipped surrogate (to be minimised), with gradient.
        clipped: number of rows whose ratio was clipped away, no gradient.
        kl: sum of (ratio - 1) - log ratio, the non-negative estimate of KL(old || new) in nats, no
            gradient.
    """

    loss: Tensor
    clipped: Tensor
    kl: Tensor


def clipped_surrogate(
    logprobs_M: Tensor,
    old_logprobs_M: Tensor,
    advantages_M: Tensor,
    clip_range: float,
    weights_M: Tensor | None = None,
) -> PolicyTerms:
    """PPO's pessimistic surrogate: -min(ratio A, clip(ratio, 1 - c, 1 + c) A), summed over rows,
    each with its weight.
    """
    log_ratio_M = logprobs_M - old_logprobs_M
    ratio_M = log_ratio_M.exp()
    free_M = ratio_M * advantages_M
    clipped_M = ratio_M.clamp(1 - clip_range, 1 + clip_range) * advantages_M
    with torch.no_grad():
        clipped = (clipped_M < free_M).sum()
        kl = (ratio_M - 1 - log_ratio_M).sum()
    worse_M = torch.minimum(free_M, clipped_M)
    return PolicyTerms(
        loss=-(worse_M if weights_M is None else weights_M * worse_M).sum(), clipped=clipped, kl=kl
    )


def importance_weights(gap: Tensor, bound: float) -> Tensor:
    """min(pi / pi_engine, bound) of each token, from log pi - log pi_engine: what an expectation
    over the engine's tokens lacks to be one over the actor's. The bound keeps the variance finite,
    at a small bias.
    """
    return gap.exp().clamp(max=bound)


def clipped_value_loss(
    values_M: Tensor, old_values_M: Tensor, returns_M: Tensor, clip_range: float | None
) -> Tensor:
    """Half the squared error to the return, the worse of free and clipped around the old value,
    summed over rows; None: not clipped.
    """
    free_M = (values_M - returns_M) ** 2
    if clip_range is None:
        return 0.5 * free_M.sum()
    clipped_M = old_values_M + (values_M - old_values_M).clamp(-clip_range, clip_range)
    return 0.5 * torch.maximum(free_M, (clipped_M - returns_M) ** 2).sum()
