"""What CUDA's allocator does to a drafter in a sleep of level 2, for machines without one: every
tensor that was made while the heads were loaded holds anything afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

GARBAGE = 1 << 40
"""No id, slot, position or stamp that a tensor of these tests has a place for."""


def tensors_of(root: Any, spared: tuple[Any, ...] = ()) -> list[torch.Tensor]:
    """All tensors that can be reached from an object of ours on its device: through attributes,
    containers, closures and partials. What is reached through `spared` alone belongs to others.
    """
    seen = {id(other) for other in spared}
    found: list[torch.Tensor] = []
    waiting = [root]
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            found.append(thing)
        else:
            waiting += _inside(thing)
    return found


def _inside(thing: Any) -> Iterator[Any]:
    if isinstance(thing, dict):
        yield from thing.values()
    elif isinstance(thing, (list, tuple)):
        yield from thing
    elif type(thing).__module__.startswith(("heads.", "medusa_ppo.", "torch.nn.")):
        yield from vars(thing).values()
    for cell in getattr(thing, "__closure__", None) or ():
        yield cell.cell_contents
    if type(thing).__name__ == "partial":
        yield from (thing.func, *thing.args, *thing.keywords.values())
    yield getattr(thing, "__self__", None)


def throw_away(tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        with torch.inference_mode(tensor.is_inference()):
            if tensor.is_floating_point():
                tensor.data.fill_(torch.nan)
            else:
                tensor.data.fill_(GARBAGE if tensor.dtype == torch.int64 else 1)
