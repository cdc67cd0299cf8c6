"""The messages between loop and companion: arguments, answers, and tensors as NumPy arrays.

The companion is another process, so that it can train while the loop continues. Ray pickles what
passes between the two, and copies torch's tensors; it puts NumPy arrays into shared memory, where
the other side reads them in place. A rollout batch has gigabytes of hidden states.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np
import torch

from heads.heads_config import HeadsConfig
from medusa_ppo.config.companion_section import CompanionConfig
from medusa_ppo.contract.status import PublishedHeads

HANG_S = 300.0
AS_INT16 = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class PackedTensor:
    """One packed tensor: the array, and the name of its torch dtype if NumPy has no such dtype."""

    array: np.ndarray
    dtype: str = ""


@dataclass(frozen=True)
class PackedRecord:
    """A packed dataclass with tensors."""

    kind: type
    fields: dict[str, Any]


def pack(value: Any) -> Any:
    """Convert tensors, also in dataclasses, dictionaries and tuples, to NumPy arrays, which Ray
    transports without a copy.

    Nothing is copied here either if a tensor is contiguous and on the CPU.
    """
    if isinstance(value, torch.Tensor):
        plain = value.detach().to("cpu").contiguous()
        if plain.dtype in AS_INT16:
            return PackedTensor(
                plain.view(torch.int16).numpy(), str(plain.dtype).removeprefix("torch.")
            )
        return PackedTensor(plain.numpy())
    if isinstance(value, dict):
        return {name: pack(part) for name, part in value.items()}
    if isinstance(value, tuple):
        # A tensor that occurs twice (an actor's tied tables) is sent once: the same object is the
        # same again on the other side.
        packed = {id(part): pack(part) for part in value}
        return tuple(packed[id(part)] for part in value)
    if is_dataclass(value):
        return PackedRecord(
            type(value), {field.name: pack(getattr(value, field.name)) for field in fields(value)}
        )
    return value


def unpack(packed: Any) -> Any:
    """Unpack what `pack` returned, on the same memory. Treat its tensors as read-only."""
    if isinstance(packed, PackedTensor):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            tensor = torch.from_numpy(packed.array)
        return tensor.view(getattr(torch, packed.dtype)) if packed.dtype else tensor
    if isinstance(packed, dict):
        return {name: unpack(part) for name, part in packed.items()}
    if isinstance(packed, tuple):
        parts = {id(part): unpack(part) for part in packed}
        return tuple(parts[id(part)] for part in packed)
    if isinstance(packed, PackedRecord):
        return packed.kind(**unpack(packed.fields))
    return packed


def tied(lm_head_VD: torch.Tensor, embedding_VD: torch.Tensor) -> bool:
    """Whether an actor's two tables are one."""
    return (
        lm_head_VD.data_ptr() == embedding_VD.data_ptr()
        and lm_head_VD.shape == embedding_VD.shape
        and lm_head_VD.dtype == embedding_VD.dtype
    )


def pack_tables(lm_head_VD: torch.Tensor, embedding_VD: torch.Tensor | None) -> Any:
    """An actor's two tables, packed; tied ones are sent once."""
    if embedding_VD is not None and tied(lm_head_VD, embedding_VD):
        embedding_VD = lm_head_VD
    return pack((lm_head_VD, embedding_VD))


@dataclass(frozen=True)
class TableRows:
    """The parts of an actor's tables that a batch of that actor needs, in the actor's dtype; rows
    that are never read are not sent. Shape letters: R, E some tokens.

    Attributes:
        lm_head_RD: rows of lm_head, for the draft tokens and the batch's own.
        lm_head_ids_R: int64, ascending, the tokens of these rows; None: `lm_head_RD` is whole.
        embedding_ED, embedding_ids_E: the same for the embedding, for the batch's own tokens; None:
            the heads don't read it, or it is tied.
        tied: the embedding is the lm_head, whose rows are sent once.
    """

    lm_head_RD: torch.Tensor
    lm_head_ids_R: torch.Tensor | None = None
    embedding_ED: torch.Tensor | None = None
    embedding_ids_E: torch.Tensor | None = None
    tied: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        parts = (self.lm_head_RD, self.lm_head_ids_R, self.embedding_ED, self.embedding_ids_E)
        return sum(part.nbytes for part in parts if part is not None)


def table_rows(
    lm_head_VD: torch.Tensor,
    embedding_VD: torch.Tensor | None,
    batch_ids: torch.Tensor,
    draft_ids: torch.Tensor | None,
    *,
    copied: bool = True,
) -> TableRows:
    """The rows of an actor's tables that a batch needs, on the host. The tables may be on any
    device, of any actor whose whole tables are in this process.

    Args:
        lm_head_VD, embedding_VD: the tables; the embedding only for heads that read it.
        batch_ids: int64, all tokens of the batch (`batch_token_ids`).
        draft_ids: int64, the tokens that drafts may come from; None: any, which needs all of
            lm_head.
        copied: whether the tables may change afterwards; False: the result is used at once.
    """

    def picked(table_VD: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return table_VD.detach().index_select(0, ids.to(table_VD.device)).to("cpu")

    own = batch_ids.unique()
    one_table = embedding_VD is not None and tied(lm_head_VD, embedding_VD)
    embedding_ED = embedding_ids_E = None
    if embedding_VD is not None and not one_table:
        embedding_ED, embedding_ids_E = picked(embedding_VD, own), own
    lm_head_ids_R = None
    if draft_ids is None:
        lm_head_RD = lm_head_VD.detach().to("cpu", copy=copied)
    else:
        lm_head_ids_R = torch.cat([draft_ids.to(torch.int64), own]).unique()
        lm_head_RD = picked(lm_head_VD, lm_head_ids_R)
    return TableRows(lm_head_RD, lm_head_ids_R, embedding_ED, embedding_ids_E, one_table)


@dataclass(frozen=True)
class WantedRows:
    """Which rows of an actor's tables the companion needs with the next batch of that actor, beside
    those of the batch's own tokens.

    Attributes:
        draft_ids: int64, the tokens that drafts may come from; None: any, so all of lm_head.
        embedding: whether the heads read the embedding.
    """

    draft_ids: torch.Tensor | None
    embedding: bool

    def of(
        self,
        lm_head_VD: torch.Tensor,
        embedding_VD: torch.Tensor | None,
        batch_ids: torch.Tensor,
        *,
        copied: bool = True,
    ) -> TableRows:
        """These rows, and those of a batch with these tokens. Arguments as in `table_rows`."""
        read = embedding_VD if self.embedding else None
        return table_rows(lm_head_VD, read, batch_ids, self.draft_ids, copied=copied)


def joined_rows(parts: Sequence[TableRows]) -> TableRows:
    """Join rows that several processes sent. All must be of one actor, at one time."""

    def joined(found: Iterable[torch.Tensor | None]) -> torch.Tensor | None:
        there = [part for part in found if part is not None]
        return torch.cat(there) if there else None

    # One part with all of lm_head is enough.
    whole = [part for part in parts if part.lm_head_ids_R is None]
    heads = whole[:1] or parts
    return TableRows(
        torch.cat([part.lm_head_RD for part in heads]),
        joined(part.lm_head_ids_R for part in heads),
        joined(part.embedding_ED for part in parts),
        joined(part.embedding_ids_E for part in parts),
        heads[0].tied,
    )


def copied_tables(
    lm_head_VD: torch.Tensor, embedding_VD: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both tables of a live actor, copied to the host; tied ones stay one."""
    copy_VD = lm_head_VD.detach().to("cpu", copy=True)
    if tied(lm_head_VD, embedding_VD):
        return copy_VD, copy_VD
    return copy_VD, embedding_VD.detach().to("cpu", copy=True)


def batch_token_ids(*ids: torch.Tensor | None) -> torch.Tensor:
    """The different tokens among these, int64, ascending, without gaps (`GAP`)."""
    found = torch.cat([part.flatten().to(torch.int64) for part in ids if part is not None])
    return found[found >= 0].unique()


@dataclass(frozen=True)
class ServiceArguments:
    """What a companion is built from, also when it is rebuilt after a crash.

    Attributes:
        heads: sizes and kind of the heads.
        companion: the companion's section of the configuration.
        seed: seed of everything random in it.
        initial_state: trainable tensors to start from, packed; None: zero start.
        run_dir: the run's folder (native checkpoints, state for a restart); empty: nothing is
            written there.
        publish_dir: folder in shared memory for published versions.
        resume_from: folder with a saved state to continue from; empty: start from the beginning.
        draft_temperature: temperature of the drafts by which heads are judged, a factor on that of
            the rollouts; 0: one-hot drafts.
        hang_s: a worker that does not answer for this long is ended and restarted.
        num_drafts: maximum drafts in a step; None: one per head.
        draft_vocab: how many of the most frequent tokens drafts may come from; None: all.
        takes_turns: whether the loop waits while the companion trains, on the same cores.
        pace: name of the byte by which the loop tells it to wait; empty: nobody does.
    """

    heads: HeadsConfig
    companion: CompanionConfig
    seed: int
    initial_state: dict[str, PackedTensor] | None
    run_dir: str
    publish_dir: str
    resume_from: str = ""
    draft_temperature: float = 0.0
    hang_s: float = HANG_S
    num_drafts: int | None = None
    draft_vocab: int | None = None
    takes_turns: bool = False
    pace: bytes = b""


@dataclass(frozen=True)
class Answer:
    """Reply to a poll.

    Attributes:
        published: a newer version, if there is one.
        error: the last failure; a batch that was merely skipped is none.
        incarnation: the process that answers.
        held_bytes: bytes of the batches that wait or are in training.
        version: version of its serving heads.
        stuck_s: seconds since the training thread last made progress, while it should compute; 0
            while it writes files.
        draft_ids: int32, tokens that drafts came from after the batch with the number `counted` by
            the client's count; None: any.
        follows: version of the run's heads that this process began with or was told to go on from
            last; 0: of none.
    """

    published: PublishedHeads | None
    error: str
    incarnation: str
    held_bytes: int = 0
    version: int = 0
    stuck_s: float = 0.0
    draft_ids: np.ndarray | None = None
    counted: int = 0
    follows: int = 0
