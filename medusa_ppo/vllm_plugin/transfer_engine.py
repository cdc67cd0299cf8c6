"""Our backend of vLLM's weight-transfer API: each rank of an engine receives the actor from a
broadcast, and loads it as it arrives.

vLLM's session calls it (`init_weight_transfer_engine`, `start_weight_update`, `update_weights`,
`finish_weight_update`). Layers are reloaded one by one, so that weights which vLLM has packed or
fused are renewed; a rank holds one bucket and the incomplete layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from heads.checkpoint import LM_HEAD_KEY
from heads.errors import SwapError
from medusa_ppo.runtime.rendezvous import Place
from medusa_ppo.vllm_plugin.transfer import Group, Incoming, read_entries


@dataclass
class BroadcastInit(WeightTransferInitInfo):
    """`place`: fields of `Place`."""

    place: dict[str, Any]


@dataclass
class BroadcastUpdate(WeightTransferUpdateInfo):
    """`entries`: `ActorStream.header` of the tensors. `tied`: lm_head is the embedding, and is not
    loaded a second time.
    """

    entries: dict[str, Any]
    tied: bool = False


class BroadcastEngine(WeightTransferEngine[BroadcastInit, BroadcastUpdate]):
    """One rank's end of the transfer.

    Attributes:
        checksum: checksum of the last received actor.
        lm_head_V2: two columns of its lm_head, if it had one; the serving lm_head is compared with
            them afterwards.
    """

    init_info_cls = BroadcastInit
    update_info_cls = BroadcastUpdate
    supports_draft_weight_update = False  # Heads are swapped, in one call.

    checksum: str = ""
    lm_head_V2: torch.Tensor | None = None
    _group: Group | None = None

    def init_transfer_engine(self, init_info: BroadcastInit) -> None:
        """Join the trainer's group. Raises SwapError if a rank is missing."""
        self.shutdown()
        place = Place(**init_info.place)
        self._group = Group(place.seen_by(place.rank + self.parallel_config.rank)).join()

    def start_weight_update(self) -> None:
        """Does nothing: the model stays unchanged until it is known what arrives."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Like vLLM's own, which fails if there is no accelerator to synchronize."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: BroadcastUpdate) -> None:
        """Load the tensors as they arrive. After a SwapError the model is intact, but its weights
        are not.
        """
        if self._group is None:
            raise SwapError(
                "The engine has not joined a group.",
                given="update_weights()",
                expected="init_weight_transfer_engine() first",
                do="Join.",
            )
        incoming = Incoming(self._group, read_entries(update_info.entries))
        load: Any = self.model.load_weights
        initialize_layerwise_reload(self.model)
        try:
            load(self._wanted(incoming, update_info.tied))
        except BaseException:
            self.shutdown()
            finalize_layerwise_reload(self.model, self.model_config)
            raise
        self.checksum = incoming.checksum

    def finish_weight_update(self) -> None:
        """Finish attention layers, and everything else that vLLM computes from the weights."""
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Leave the group. Safe without one."""
        group = self._group
        self._group = None
        if group is not None:
            group.leave()

    def _wanted(self, incoming: Incoming, tied: bool) -> Iterator[tuple[str, torch.Tensor]]:
        self.checksum = ""
        self.lm_head_V2 = None
        for name, tensor in incoming:
            if name == LM_HEAD_KEY:
                self.lm_head_V2 = tensor[:, :2].clone()
            if not (tied and name == LM_HEAD_KEY):
                yield name, tensor
