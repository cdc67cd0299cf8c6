"""A role's memory on one rank: parameters, their gradient buffers, and the optimizer's state, as
`Turns` moves them.

Megatron keeps views of all these in many places (buckets, shards, groups of its optimizers). So the
storages themselves give up their memory and get it back, and every view stays valid. The next role
can borrow the parameters' memory: the reference's weights are then in the actor's memory, and the
reward model's in the critic's.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from medusa_ppo.actors.megatron_model import RankModel
from medusa_ppo.ppo.megatron.rank_optimizer import RankOptimizer
from medusa_ppo.ppo.placement import MOMENT, Resident, Spare, bytes_of

GRADIENTS = "gradients"


class RankResident(Resident):
    """A role that learns on this rank; one that doesn't learn is a `Resident`."""

    def __init__(self, model: RankModel, optimizer: RankOptimizer) -> None:
        super().__init__(model.model)
        self._model = model
        self._kept_by = optimizer
        self._sizes: dict[str, int] = {}
        self._lent: dict[str, list[Tensor]] = {}

    @property
    def here(self) -> bool:
        return bool(self._lent) or super().here

    def _slots(self) -> dict[str, Tensor]:
        """A view of each storage, by name; names of what only learning needs contain `MOMENT`.
        Storages that have given up their memory are included.
        """
        found = dict[str, Tensor]()
        seen = set[int]()
        for name, tensor in self._tensors():
            storage = tensor.untyped_storage()
            if storage._cdata not in seen:
                seen.add(storage._cdata)
                found[name] = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        return found

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        # Parameters first: a view of a parameter shares its storage and gets no name of its own.
        yield from self._module.named_parameters()
        assert self._model.ddp is not None, "it learns"
        for number, buffer in enumerate(self._model.ddp.buffers):
            yield f"{number}{MOMENT}{GRADIENTS}", buffer.grad_data
        yield from self._kept_by.kept()

    def leave(self, spare: Spare, *, partly: bool = False) -> int:
        moved = 0
        standing = dict[int, list[Tensor]]()
        for parameter in self._module.parameters():
            place = parameter.untyped_storage()._cdata
            standing.setdefault(place, []).append(parameter.detach())
        for name, here in self._slots().items():
            lent = self._lent.get(name, [])
            if any(map(spare.holds, lent)) or (name in self._away and not lent):
                continue
            views = standing.get(here.untyped_storage()._cdata, [])
            wanted = [view for view in views if spare.lend(view)]
            if partly and not wanted and not lent:
                continue
            if name not in self._away:
                if not name.endswith(GRADIENTS):
                    moved += self._copy_out(name, here)
                self._sizes[name] = here.nbytes
                self._away.add(name)
            self._lent.pop(name, None)
            if wanted:
                self._lent[name] = wanted
            else:
                here.untyped_storage().resize_(0)
        return moved

    def lacks(self, more: tuple[str, ...]) -> dict[str, Tensor]:
        # Its storages are its own, so no other role can supply them.
        return {}

    def come(self, spare: Spare, more: tuple[str, ...]) -> int:
        moved = 0
        for name, here in self._slots().items():
            if name not in self._away or (MOMENT in name and not name.endswith(more)):
                continue
            storage = here.untyped_storage()
            if name in self._lent:
                del self._lent[name]
            else:
                storage.resize_(self._sizes[name])
            self._away.remove(name)
            # Gradients are zeroed before each step.
            if name in self._host:
                back = torch.empty(0, dtype=torch.uint8, device=here.device).set_(storage)
                moved += back.copy_(self._host[name]).nbytes
        return moved

    def nbytes(self) -> int:
        lent = sum(view.nbytes for views in self._lent.values() for view in views)
        return bytes_of(self._slots().values()) - lent

    def full_bytes(self) -> int:
        return sum(self._sizes.get(name, here.nbytes) for name, here in self._slots().items())

    def weight_bytes(self) -> int:
        return sum(
            self._sizes.get(name, here.nbytes)
            for name, here in self._slots().items()
            if MOMENT not in name
        )
