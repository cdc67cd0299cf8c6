"""The critic: a value head on a backbone of the actor's type, and the sums of its update.

Shape letters: B rows, T tokens (right-padded), D hidden, M response tokens of a micro batch, packed
row after row.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from transformers import PreTrainedModel

from medusa_ppo.actors.hf import lm_head_weight
from medusa_ppo.actors.vision import copy_without_tower, forward
from medusa_ppo.config.ppo_section import PPOConfig
from medusa_ppo.contract import metrics as names
from medusa_ppo.ppo import arithmetic
from medusa_ppo.ppo.batch import MicroBatch, PPOBatch
from medusa_ppo.ppo.optimization import GradientNorms
from medusa_ppo.ppo.scores import Scores
from medusa_ppo.ppo.token_stats import bfloat16_products


class Critic(nn.Module):
    """V(prompt, y_<r) for every response token y_r: the value of the state before it was chosen.

    It shares nothing with the actor: own backbone, own optimizer, own gradient clip, so value
    errors never pull on the policy.
    """

    def __init__(self, causal_lm: PreTrainedModel) -> None:
        """
        Args:
            causal_lm: the model whose body (without lm_head) is copied.
        """
        super().__init__()
        backbone = copy_without_tower(causal_lm, causal_lm.base_model)
        self.backbone: nn.Module = backbone.requires_grad_(True)
        device = next(backbone.parameters()).device
        hidden_size = lm_head_weight(causal_lm).shape[1]
        self.value_head = nn.Linear(hidden_size, 1, device=device)
        # Zero start: the first values are 0, not noise as large as the rewards.
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)
        # With dropout, values would differ between scoring and update though weights are the same.
        self.eval()

    def forward(self, micro: MicroBatch, autocast: bool = False) -> Tensor:
        """values_M float32, in the packed order of the micro batch."""
        with bfloat16_products(micro.input_ids_BT.device, autocast):
            hidden_BTD = forward(self.backbone, micro.input_ids_BT, micro.seen).last_hidden_state
        return self.value_head(hidden_BTD[micro.predict_mask_BT].float()).squeeze(-1)


class ValueTotals:
    """Sums over all tokens of all passes of the critic's update."""

    def __init__(self) -> None:
        self.loss = 0.0
        self.tokens = 0
        self.norms = GradientNorms()

    @classmethod
    def over(cls, shares: Sequence[ValueTotals]) -> ValueTotals:
        """Combine replicas that took the same steps, each on its own sequences: tokens and norms
        already cover all replicas.
        """
        total = cls()
        total.tokens = shares[0].tokens
        total.norms = shares[0].norms
        total.loss = sum(share.loss for share in shares)
        return total

    def report(self) -> dict[str, float]:
        """Means over tokens. Raises RunError if no gradient was finite."""
        self.norms.mean("critic")
        return {names.VALUE_LOSS: self.loss / max(1, self.tokens)}


def value_clip(config: PPOConfig, batch: PPOBatch, scores: Scores) -> float | None:
    """How far a value may move from its value before the update, in reward units."""
    clip_range = config.value_clip_range
    if clip_range is not None and config.value_clip_unit == "returns":
        clip_range *= arithmetic.masked_deviation(scores.returns_SR, batch.mask_SR)
    return clip_range
