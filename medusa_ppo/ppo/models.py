"""The networks of PPO: what the actor says about response tokens, the critic, and the frozen reference.

Shape letters: B rows, T tokens (right-padded), D hidden, V vocabulary, M response tokens of a micro batch, packed row after row.

All networks stay in eval mode: dropout would make log-probs of unchanged weights differ, and the ratio of PPO with them.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from heads.errors import CheckpointError
from medusa_ppo.actors.hf import lm_head_weight
from medusa_ppo.ppo.batch import MicroBatch
from medusa_ppo.types import Sampling

MOMENTS = ("step", "exp_avg", "exp_avg_sq")


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """Weights by name; of tied ones the first name only (safetensors holds no aliases). Buffers are rebuilt, not saved."""
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


def load_weights(module: nn.Module, state: dict[str, Tensor], what: str) -> None:
    """Fill a module from what `weights_of` gave. CheckpointError when it does not fit."""
    own = dict(module.named_parameters())
    wrong = [name for name in own.keys() | state.keys() if name not in own or name not in state or own[name].shape != state[name].shape]
    if wrong:
        given = f"{what}: {', '.join(sorted(wrong)[:3])}"
        raise CheckpointError(
            "The saved weights do not fit the model.", given=given, expected="the same names and shapes", do="Check model.path."
        )
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(state[name])


def moments_of(optimizer: torch.optim.Optimizer, module: nn.Module) -> dict[str, Tensor]:
    """AdamW's moments as `weight/moment`; empty before the first step."""
    found = {}
    for name, parameter in module.named_parameters():
        for key in MOMENTS:
            if parameter in optimizer.state:
                found[f"{name}/{key}"] = optimizer.state[parameter][key]
    return found


def load_moments(optimizer: torch.optim.Optimizer, module: nn.Module, state: dict[str, Tensor], what: str) -> None:
    """Fill an optimizer from what `moments_of` gave. CheckpointError when it does not fit."""
    own = dict(module.named_parameters())
    optimizer.state.clear()
    for full, tensor in state.items():
        name, _, key = full.rpartition("/")
        if key not in MOMENTS or name not in own or (key != "step" and own[name].shape != tensor.shape):
            given = f"{what}: {full} {tuple(tensor.shape)}"
            raise CheckpointError(
                "The saved optimizer does not fit the model.", given=given, expected="moments of its weights", do="Check model.path."
            )
        # Without a dtype or device of its own: AdamW keeps moments beside the weight, and its step counter there too when fused.
        optimizer.state[own[name]][key] = tensor.to(own[name].device)


@dataclass(frozen=True)
class TokenStats:
    """What the actor says about the response tokens of a micro batch. All float32.

    Attributes:
        logprobs_M: log-prob of each response token at the sampling temperature, full vocabulary.
        entropy_M: entropy of the same distribution in nats; None when not asked for.
        log_kept_M: log of the probability mass that top-k and top-p keep (0 without them), so that
            `logprobs_M - log_kept_M` is the log-prob under the distribution that was sampled from; None when not asked for.
    """

    logprobs_M: Tensor
    entropy_M: Tensor | None = None
    log_kept_M: Tensor | None = None


def token_stats(
    actor: nn.Module, micro: MicroBatch, sampling: Sampling, *, entropy: bool = False, kept: bool = False, autocast: bool = False
) -> TokenStats:
    """Run the actor over a micro batch; keeps the graph when gradients are on.

    The logits are divided by the sampling temperature, as the engine's sampler does: the policy that PPO improves is the one
    that wrote the rollouts. With `autocast` products run in bfloat16 while weights and log-probs stay float32.
    """
    logits_MV = _response_logits(actor, micro, autocast).float() / sampling.temperature
    logprobs_MV = logits_MV.log_softmax(dim=-1)
    logprobs_M = logprobs_MV.gather(1, micro.response_ids_M[:, None]).squeeze(1)
    entropy_M = -(logprobs_MV.exp() * logprobs_MV).sum(dim=-1) if entropy else None
    log_kept_M = log_kept_mass(logprobs_MV.detach(), sampling.top_k, sampling.top_p) if kept else None
    return TokenStats(logprobs_M, entropy_M, log_kept_M)


def log_kept_mass(logprobs_MV: Tensor, top_k: int, top_p: float) -> Tensor:
    """log of the mass that top-k, then top-p within it, keep of each distribution: 0 when both are off.

    Top-p keeps the likeliest tokens until their share reaches p, the token that crosses included (vLLM's rule).
    """
    if not top_k and top_p >= 1.0:
        return torch.zeros_like(logprobs_MV[:, 0])
    sorted_MV = logprobs_MV.sort(dim=-1, descending=True).values
    if top_k:
        sorted_MV = sorted_MV[:, :top_k]
    share_MV = sorted_MV.softmax(dim=-1)
    before_MV = share_MV.cumsum(dim=-1) - share_MV
    return torch.where(before_MV < top_p, sorted_MV, -torch.inf).logsumexp(dim=-1)


class Critic(nn.Module):
    """A value head on a backbone of the actor's type: V(prompt, y_<r) for every response token y_r.

    It shares nothing with the actor: own backbone, own optimizer, own gradient clip, so value errors never pull on the policy.
    """

    def __init__(self, causal_lm: PreTrainedModel) -> None:
        """
        Args:
            causal_lm: the model whose body (without lm_head) is copied.
        """
        super().__init__()
        self.backbone: nn.Module = copy.deepcopy(causal_lm.base_model).requires_grad_(True)
        weight = next(self.backbone.parameters())
        self.value_head = nn.Linear(_hidden_size(causal_lm), 1, device=weight.device)
        # Zero start: the first values are 0, not noise as large as the rewards.
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)
        self.eval()

    def forward(self, micro: MicroBatch, autocast: bool = False) -> Tensor:
        """values_M float32, in the packed order of the micro batch."""
        with _autocast(micro.input_ids_BT.device, autocast):
            hidden_BTD = self.backbone(input_ids=micro.input_ids_BT, use_cache=False).last_hidden_state
        return self.value_head(hidden_BTD[micro.predict_mask_BT].float()).squeeze(-1)


def frozen_copy(actor: PreTrainedModel) -> PreTrainedModel:
    """The reference: a deep copy of the actor as it is now, that never gets a gradient."""
    reference = copy.deepcopy(actor).eval()
    reference.requires_grad_(False)
    return reference


def _response_logits(actor: nn.Module, micro: MicroBatch, autocast: bool) -> Tensor:
    """logits_MV of the positions that predict response tokens; lm_head is not run over prompts where the model allows that."""
    first = micro.first_predicting
    keep = micro.input_ids_BT.shape[1] - first
    extra = {"logits_to_keep": keep} if "logits_to_keep" in inspect.signature(actor.forward).parameters else {}
    with _autocast(micro.input_ids_BT.device, autocast):
        logits = actor(input_ids=micro.input_ids_BT, use_cache=False, **extra).logits
    return logits[micro.predict_mask_BT[:, -logits.shape[1] :]]


def _autocast(device: torch.device, on: bool) -> contextlib.AbstractContextManager[object]:
    return torch.autocast(device.type, dtype=torch.bfloat16) if on else contextlib.nullcontext()


def _hidden_size(causal_lm: PreTrainedModel) -> int:
    return lm_head_weight(causal_lm).shape[1]
