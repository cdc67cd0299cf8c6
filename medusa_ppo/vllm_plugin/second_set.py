"""A complete second set of serving heads, made beside the engine's work: parameters, fused and
packed weights, tables, and what they have to draft. So loading them between two steps only
exchanges references.

oneDNN packs weights in any thread (`int8_products`), but multiplies in one at a time: products of
equal sizes share what they were compiled to, and their scratch memory. So packed weights are
multiplied for the first time between two steps.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch

from heads.errors import SwapError
from heads.modules import MedusaHeads
from medusa_ppo.drafting.core import DraftingCore
from medusa_ppo.drafting.products import EMBED, WEIGHT, ChosenIds, DraftVocabulary
from medusa_ppo.vllm_plugin.confirm import (
    Plain,
    ReadHeads,
    find_damage,
    find_difference_of_logits,
    fixed_inputs,
    given_tokens,
    plain_logprobs,
    stand_in_lm_head,
    what_is_seen,
)

T = TypeVar("T")
NICE = 10
"""Of the thread that makes a set: on a core that the engine fills it gets a tenth of the time."""
THREAD = "medusa-ppo-heads"
# vLLM's worker on a CPU puts a warning, and nothing else, in the place of `torch.set_num_threads`.
_set_num_threads = torch._C.set_num_threads


@dataclass(frozen=True)
class SetOrder:
    """What is known between two steps about a set to be made.

    Attributes:
        serving: what drafts meanwhile; nothing in it is changed.
        packed: the weights of `serving` that are packed.
        count: drafts of a step.
        actor: number of the actor's changes so far.
        embed: the engine's lookup; kind hydra only.
        with_embedding: the lookup needs no other rank, so the thread may use it.
        dtype: in which the heads serve.
        in_8_bits: packed products are in 8 bits.
        vocabulary: the draft vocabulary.
        choose: `DraftVocabulary.choosing`.
    """

    serving: DraftingCore
    packed: tuple[WEIGHT, ...]
    count: int
    actor: int
    embed: EMBED | None
    with_embedding: bool
    dtype: torch.dtype
    in_8_bits: bool
    vocabulary: DraftVocabulary
    choose: Callable[[], ChosenIds | None] | None


class SecondSet:
    """Heads that are ready to serve.

    Attributes:
        core: drafts with them, once `fault` has found none.
        checksum: of the file's tensors.
        sums: `fingerprint` of the heads.
        untrained: see `MedusaHeads.untrained`.
        actor: number of the actor's changes that `chosen` knows of.
        could_choose: ids of the draft vocabulary could be chosen ahead.
        vocabulary, chosen: the draft vocabulary, and the ids that it may take; None: it keeps its
            own.
    """

    def __init__(self, read: ReadHeads, order: SetOrder) -> None:
        """Make it, on the CPU. Raises SwapError if the parameters are not the file's."""
        serving = order.serving
        config = serving.config
        self.actor = order.actor
        self._actor_read = order.actor if order.with_embedding else None
        self.heads = _empty_heads(serving.heads, order.dtype)
        self.heads.load_trainable_state(read.state)
        lm_head = stand_in_lm_head(config, order.dtype)
        self.core = serving.beside(
            self.heads, lm_head, order.packed, order.count, order.with_embedding
        )
        self.checksum = read.checksum
        self.sums = read.sums
        self.untrained = self.heads.untrained
        if damage := find_damage(self.heads, read.sums):
            raise SwapError(
                "The new heads were not read into memory as they are; the serving ones stay.",
                given=damage,
                expected="the file's values",
                do="Look for faults of this machine's memory.",
            )
        self._plain = Plain(lm_head, order.embed, order.dtype, in_8_bits=order.in_8_bits)
        self._fixed = fixed_inputs(config, order.dtype, torch.device("cpu"))
        self._given = given_tokens(config, self._fixed, order.count)
        self._expected = [] if self._is_behind(order.actor) else self._plainly()
        self.vocabulary = order.vocabulary
        self.could_choose = order.choose is not None
        self.chosen = order.choose() if order.choose is not None else None

    def _is_behind(self, actor: int | None) -> bool:
        """Whether the embedding table has to be read again."""
        reads = self.core.config.kind == "hydra"
        return reads and (actor is None or self._actor_read != actor)

    def _plainly(self) -> list[torch.Tensor]:
        """What the heads have to draft, without any code of the drafting path."""
        state = self.heads.trainable_state(copied=False)
        with torch.inference_mode():
            return plain_logprobs(state, self.core.config, self._fixed, self._given, self._plain)

    def fault(self, actor: int | None) -> str:
        """How its drafts differ from those of the file's heads; empty if they agree. Called between
        two steps, by all ranks: the lookup may need them.

        Args:
            actor: number of the actor's changes by now; None: it is being changed. What was read
                from another one is read again.
        """
        if self._is_behind(actor):
            self.core.actor_changed()
            self._expected = self._plainly()
            self._actor_read = actor
        with torch.inference_mode():
            seen = what_is_seen(self.core, self._fixed)
            logits = self.core.logits_after(self._fixed.hidden_BnD[:, -1], self._given, seen)
        return find_difference_of_logits(logits, self._expected, self._plain)


def _empty_heads(serving: MedusaHeads, dtype: torch.dtype) -> MedusaHeads:
    """Heads of the same sizes on the CPU, with memory for their values."""
    # On the device without memory first: the engine's random numbers stay unchanged.
    with torch.device("meta"):
        heads = MedusaHeads(serving.config)
    heads = heads.to(dtype).to_empty(device="cpu").requires_grad_(False).eval()
    # A file has them only if they are not all 1.
    heads.temperatures_K.fill_(1.0)
    return heads


def begin_beside(work: Callable[[], T]) -> Future[T]:
    """Begin work in a thread that leaves the cores to the engine: at low priority, and on one core,
    except while it packs weights.
    """
    began, returned = threading.Event(), threading.Event()

    def quietly() -> T:
        try:
            # At its first use a thread takes over the number of the process, which would undo the
            # next line.
            torch.get_num_threads()
            _set_num_threads(1)
        finally:
            # At low priority it might not be heard for a while.
            began.set()
        # Where it is forbidden, the thread competes with the engine.
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        # Threads that this one begins have the engine's number.
        returned.wait()
        return work()

    threads = torch.get_num_threads()
    reader = ThreadPoolExecutor(1, THREAD)
    begun = reader.submit(quietly)
    # The thread ends with this work.
    reader.shutdown(wait=False)
    began.wait()
    # The number counts for the thread that sets it, and for all that begin later.
    _set_num_threads(threads)
    returned.set()
    return begun


def let_go(held: list[object]) -> None:
    """Empty the list in a thread: returning gigabytes to the system takes as long as a step."""
    threading.Thread(target=held.clear, name=THREAD, daemon=True).start()
