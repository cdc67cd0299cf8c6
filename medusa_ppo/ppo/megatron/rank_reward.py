"""A rank's part of a reward model, which scores whole texts.

Shape letters: N batches, B rows, T tokens, P tokens of one context-parallel rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from medusa_ppo.actors.megatron_model import RankModel
from medusa_ppo.ppo.rewards import REWARD_BATCH, JudgedTexts


class RankReward:
    """`medusa_ppo.ppo.rewards.ModelReward` on ranks, sharded like the actor. Batches keep their
    composition, so a text's reward depends on nothing else.

    Every rank calls each method in the same order.
    """

    def __init__(self, model: RankModel) -> None:
        self._model = model

    @torch.no_grad()
    def scores(self, texts: Sequence[JudgedTexts]) -> Tensor:
        """scores_NB, zero outside this replica's batches; on the ranks of its last stage."""
        model = self._model
        found_NB = torch.zeros(len(texts), REWARD_BATCH)
        own = range(model.replica, len(texts), model.replicas)
        model.run(
            [model.inputs(texts[n].ids_BT.to(model.device)) for n in own],
            lambda i, out_BP1: found_NB[own[i]].copy_(self._last(texts[own[i]], out_BP1)),
        )
        return found_NB

    def _last(self, texts: JudgedTexts, out_BP1: Tensor) -> Tensor:
        """scores_B at each text's last token, on all ranks that share the batch."""
        columns_P = self._model.columns(texts.ids_BT.shape[1])
        last_BP = texts.last_B.to(columns_P.device)[:, None] == columns_P
        rows_M = last_BP.nonzero()[:, 0]
        return self._model.of_all_columns(out_BP1[last_BP][:, 0], rows_M, len(texts.last_B))
