"""Which sequences and tokens of a batch belong to a rank.

Shape letters: B sequences of this replica, T tokens, P tokens and predictions of one
context-parallel rank, M response tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from medusa_ppo.actors.megatron_model import Inputs, RankModel
from medusa_ppo.actors.vision import FeatureStore
from medusa_ppo.config.ppo_section import PPOConfig
from medusa_ppo.ppo.batch import MicroBatch, PPOBatch


class RankShare:
    """This rank's part of a batch. It is the same for each role, because all are sharded alike."""

    def __init__(
        self, model: RankModel, config: PPOConfig, features: FeatureStore | None = None
    ) -> None:
        """
        Args:
            features: if prompts may have images, the tower's features of them.
        """
        self._model = model
        self._config = config
        self._features = features

    def dealt(self, batch: PPOBatch, sequences: Sequence[int]) -> list[int]:
        """This replica's sequences: every n-th by length, so that replicas have similar work."""
        return sorted(sequences, key=lambda s: (batch.total_lengths[s], s))[
            self._model.replica :: self._model.replicas
        ]

    def micros(self, batch: PPOBatch, sequences: list[int]) -> list[MicroBatch]:
        """The micro batches in which a model runs these sequences."""
        config = self._config
        size = config.micro_batch_size or config.minibatch_size
        return batch.seen_micros(sequences, size, config.micro_batch_tokens, self._features)

    def inputs(self, micros: Sequence[MicroBatch]) -> list[Inputs]:
        """The same as the model takes them."""
        return [self._model.inputs(micro.input_ids_BT, micro.seen) for micro in micros]

    def own_predictions(self, micro: MicroBatch) -> tuple[MicroBatch, Tensor]:
        """The micro batch restricted to the columns of this rank's outputs, each with the token
        that follows; and which of its M predictions they are.
        """
        # For context parallelism rows are padded to equal parts, so columns may lie past the row's
        # end.
        columns_P = self._model.columns(micro.input_ids_BT.shape[1])
        more = max(0, int(columns_P.max()) + 1 - micro.input_ids_BT.shape[1])
        next_BT = torch.nn.functional.pad(micro.input_ids_BT[:, 1:], (0, 1 + more))
        predicts_BT = torch.nn.functional.pad(micro.predict_mask_BT, (0, more), value=False)
        number_BT = predicts_BT.flatten().cumsum(0).view(predicts_BT.shape) - 1
        mask_BP = predicts_BT[:, columns_P]
        return (
            MicroBatch(micro.sequences, next_BT[:, columns_P], mask_BP, micro.first),
            number_BT[:, columns_P][mask_BP],
        )
