"""The exchange between a tap and a standalone companion: one process's part of a rollout batch as a
safetensors file with a small JSON header; the reply says what the companion wants next.

    header   its sender, step and policy, and how the responses were sampled; whether there are rows
    file     states, tokens, lengths, ... named as in `RolloutBatch`; and, if they have changed, the
             actor's tables: the rows that are read (`TableRows`), or all of them

The reader treats everything as hostile: names, dtypes and shapes are compared with the actor's
before anything is read, numbers have bounds, and nothing is ever unpickled.

Shape letters as in `medusa_ppo.contract.rollout_batch`.
"""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from heads.errors import DataError
from heads.heads_config import GAP
from heads.tensorfile import Header, read_header, read_tensors, save_state
from heads.vocabulary import truncate_logits
from medusa_ppo.companion.wire import TableRows, tied
from medusa_ppo.contract.rollout_batch import RolloutBatch

MOST_HEADER_BYTES = 1 << 16
MOST_TEMPERATURE = 100.0
STATES = ("F32", "BF16", "F16")
LM_HEAD, EMBEDDING = "lm_head_VD", "embedding_VD"
LM_HEAD_ROWS, LM_HEAD_IDS = "lm_head_RD", "lm_head_ids_R"
EMBEDDING_ROWS, EMBEDDING_IDS = "embedding_ED", "embedding_ids_E"
INT64, INT32, FLOAT32 = ("I64",), ("I32",), ("F32",)
BATCH: dict[str, tuple[tuple[str, ...], str]] = {
    "hidden_MD": (STATES, "MD"),
    "response_ids_M": (INT64, "M"),
    "lengths_S": (INT64, "S"),
    "prompts_S": (INT64, "S"),
    "before_ids_X": (INT32, "X"),
    "before_S": (INT64, "S"),
    "logprobs_M": (FLOAT32, "M"),
    "weights_M": (FLOAT32, "M"),
    LM_HEAD: (STATES, "VD"),
    EMBEDDING: (STATES, "VD"),
    LM_HEAD_ROWS: (STATES, "RD"),
    LM_HEAD_IDS: (INT64, "R"),
    EMBEDDING_ROWS: (STATES, "ED"),
    EMBEDDING_IDS: (INT64, "E"),
}
"""Tensors of a part: their dtypes, and their sizes by letter."""
NEEDED = ("hidden_MD", "response_ids_M", "lengths_S", "prompts_S", "before_ids_X", "before_S")
TABLES = (LM_HEAD, EMBEDDING)
ROW_PAIRS = ((LM_HEAD_ROWS, LM_HEAD_IDS), (EMBEDDING_ROWS, EMBEDDING_IDS))
"""Tensors with rows, and those with their token ids."""
MOST_DRAFT_IDS = 40_000
"""Maximum length of the text with the draft tokens in a wish; if more is needed, all rows are
wanted.
"""
LOGPROB_ROWS = 1024
"""Rows whose logits over the whole vocabulary are computed at once."""
CUT_SHARE = 8
"""One in so many of these rows is cut at once: sorting for top-p takes several times the memory of
the logits.
"""
Tables = tuple[torch.Tensor, torch.Tensor | None]


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


Whole = Annotated[int, Field(ge=0, lt=1 << 53)]


class PartHeader(_Message):
    """The header of one process's part.

    Attributes:
        number: number of the call or step by the sender's count; the same in all processes of a
            training.
        rank, ranks: which process sends it, and how many do.
        policy_version: version of the actor that gave the states.
        tables_version: version of the actor at the last change of its tables; with other tables
            nothing can be learned from these states.
        temperature, top_k, top_p: how the responses were sampled.
        left_out: response tokens that the sample omits.
        tied: the embedding is the lm_head, and is sent once.
        rows: False: none of this process's rows is in the sample. Its file then has at most the
            tables, and nobody has to wait for it.
    """

    number: Whole
    rank: Annotated[int, Field(ge=0, lt=1 << 16)] = 0
    ranks: Annotated[int, Field(ge=1, lt=1 << 16)] = 1
    policy_version: Whole
    tables_version: Whole = 0
    temperature: Annotated[float, Field(gt=0, le=MOST_TEMPERATURE, allow_inf_nan=False)] = 1.0
    top_k: Whole = 0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    left_out: Whole = 0
    tied: bool = False
    rows: bool = True

    @model_validator(mode="after")
    def _is_one_of_them(self) -> PartHeader:
        if self.rank >= self.ranks:
            raise ValueError(f"rank {self.rank} of {self.ranks}")
        return self


class Wish(_Message):
    """What a companion wants.

    Attributes:
        rows: how many states of the next batch it wants, from all processes together; 0: none,
            because it is busy.
        ahead: number of following rows that heads learn from.
        hidden, vocab: sizes of the actor that it was started for.
        embedding: whether its heads read the embedding.
        tables_version: version of the last complete tables that it got from a tap; None: none yet.
        draft_ids: tokens that drafts of the next batch may come from, in the form of `ids_text`: of
            lm_head only their rows and those of the batch's own tokens are read. Empty: any.
        trained, published: how many batches it has trained on and how many versions published.
        problem: the last failure; empty: none.
    """

    rows: Whole
    ahead: Whole
    hidden: Whole
    vocab: Whole
    embedding: bool
    tables_version: Whole | None = None
    draft_ids: Annotated[str, Field(max_length=MOST_DRAFT_IDS)] = ""
    trained: Whole = 0
    published: Whole = 0
    problem: Annotated[str, Field(max_length=2000)] = ""


def ids_text(ids: torch.Tensor | None, vocab: int) -> str:
    """Some tokens of a vocabulary as text; empty for None, or if the text would be too long."""
    if ids is None:
        return ""
    mask_V = np.zeros(vocab, dtype=bool)
    mask_V[ids.numpy()] = True
    text = base64.b64encode(zlib.compress(np.packbits(mask_V).tobytes())).decode()
    return text if len(text) <= MOST_DRAFT_IDS else ""


def ids_of_text(text: str, vocab: int) -> torch.Tensor | None:
    """The tokens in a text by `ids_text`. Raises DataError for any other text."""
    if not text:
        return None
    size = -(-vocab // 8)
    try:
        packed = base64.b64decode(text, validate=True)
        unpacker = zlib.decompressobj()
        # One byte more than allowed: valid text ends before the limit.
        data = unpacker.decompress(packed, size + 1)
        if len(data) != size or unpacker.unconsumed_tail or not unpacker.eof:
            raise ValueError(f"not {size} bytes")
    except (ValueError, zlib.error) as error:
        raise DataError(
            "This text does not encode tokens of a vocabulary.",
            given=f"{text[:40]!r}: {error}",
            expected=f"a mask of {vocab} tokens",
            do="Run the same release of medusa-ppo at both ends.",
        ) from error
    return torch.from_numpy(np.unpackbits(np.frombuffer(data, np.uint8))[:vocab].nonzero()[0])


def read_message(kind: type[Any], text: str | bytes) -> Any:
    """Read a header or a wish from its JSON. Raises DataError for anything else."""
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or kind.__name__
        raise DataError(
            "This is not a message between a tap and a companion.",
            given=f"{where}: {first['msg']}"[:500],
            expected=f"a {kind.__name__} of this release",
            do="Run the same release of medusa-ppo at both ends.",
        ) from error


def prompt_key(prompt: Sequence[int]) -> int:
    """A prompt's number, the same in all processes: 63 bits of a hash of its tokens."""
    data = b",".join(b"%d" % token for token in prompt)
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 1


def batch_tensors(batch: RolloutBatch, *, logprobs: bool) -> dict[str, torch.Tensor]:
    """The tensors of the file. With `logprobs` those of the batch; otherwise the companion computes
    them.
    """
    states = {name: value for name in BATCH if (value := getattr(batch, name, None)) is not None}
    if not logprobs:
        del states["logprobs_M"]
    # If prompts are unknown (those of images, for example), nothing precedes a response.
    empty = torch.zeros(0, dtype=torch.int32)
    states.setdefault("before_ids_X", empty)
    states.setdefault("before_S", torch.zeros_like(batch.lengths_S))
    return states


def write_part(
    path: Path,
    tensors: dict[str, torch.Tensor],
    tables: Tables | TableRows | None,
    header: PartHeader,
) -> PartHeader:
    """Write a part's file; returns the header that belongs to it. Raises CheckpointError for NaN
    and infinity.

    Args:
        tensors: from `batch_tensors`; empty: none of this process's rows is in the sample.
        tables: tables of the actor that gave the states, if they have changed: the rows that this
            part needs (`table_rows` with the wish's `draft_ids`), or both whole; None: unchanged.
    """
    header = header.model_copy(update={"rows": bool(tensors)})
    if isinstance(tables, TableRows):
        found = {
            LM_HEAD if tables.lm_head_ids_R is None else LM_HEAD_ROWS: tables.lm_head_RD,
            LM_HEAD_IDS: tables.lm_head_ids_R,
            EMBEDDING_ROWS: tables.embedding_ED,
            EMBEDDING_IDS: tables.embedding_ids_E,
        }
        tensors = tensors | {name: value for name, value in found.items() if value is not None}
        header = header.model_copy(update={"tied": tables.tied})
    elif tables is not None:
        lm_head_VD, embedding_VD = tables
        tensors = tensors | {LM_HEAD: lm_head_VD}
        if embedding_VD is not None and not tied(lm_head_VD, embedding_VD):
            tensors[EMBEDDING] = embedding_VD
        header = header.model_copy(
            update={"tied": embedding_VD is not None and EMBEDDING not in tensors}
        )
    save_state(path, tensors)
    return header


@dataclass(frozen=True)
class Part:
    """A part in the companion's memory.

    Attributes:
        batch: its rows; log-probs are 0 unless `has_logprobs`. None: none is in the sample.
        tables: tables of the actor that wrote it, if they were sent: both whole, or rows of them.
    """

    header: PartHeader
    batch: RolloutBatch | None
    tables: Tables | TableRows | None
    has_logprobs: bool


def read_part(path: Path, header: PartHeader, hidden: int, vocab: int) -> Part:
    """Read a part from an actor of this width and vocabulary.

    Raises:
        DataError, CheckpointError: it is incomplete, from another actor, or has values out of
            bounds.
    """
    found = read_header(path, MOST_HEADER_BYTES)
    sizes = _sizes(found, hidden, vocab, header.rows)
    tensors: dict[str, Any] = read_tensors(path, list(found))
    _check_table_ids(tensors, vocab)
    lm_head_VD = tensors.pop(LM_HEAD, None)
    embedding_VD = tensors.pop(EMBEDDING, None)
    rows = {name: tensors.pop(name, None) for pair in ROW_PAIRS for name in pair}
    has_logprobs = "logprobs_M" in tensors or not header.rows
    batch = None
    if header.rows:
        _check_values(tensors, sizes["X"], vocab)
        tensors.setdefault("logprobs_M", torch.zeros(sizes["M"]))
        batch = RolloutBatch(
            policy_version=header.policy_version,
            temperature=header.temperature,
            top_k=header.top_k,
            top_p=header.top_p,
            left_out=header.left_out,
            **tensors,
        )
    tables: Tables | TableRows | None = None
    if rows[LM_HEAD_ROWS] is not None or rows[EMBEDDING_ROWS] is not None:
        lm_head_RD = lm_head_VD if rows[LM_HEAD_ROWS] is None else rows[LM_HEAD_ROWS]
        tables = TableRows(**{**rows, LM_HEAD_ROWS: lm_head_RD}, tied=header.tied)
    elif lm_head_VD is not None:
        tables = lm_head_VD, lm_head_VD if header.tied else embedding_VD
    return Part(header, batch, tables, has_logprobs)


def _sizes(found: Header, hidden: int, vocab: int, rows: bool) -> dict[str, int]:
    """Sizes by letter, after comparing names, dtypes and shapes. DataError if they differ.

    Args:
        rows: whether there are rows; otherwise only tables may be.
    """
    sizes = {"D": hidden, "V": vocab}
    needed = NEEDED if rows else ()
    known = tuple(BATCH) if rows else (*TABLES, *chain(*ROW_PAIRS))
    missing = [name for name in needed if name not in found]
    unknown = [name for name in found if name not in known]
    if missing or unknown:
        given = f"missing: {', '.join(missing) or 'none'}; unknown: {', '.join(unknown) or 'none'}"
        more = ", ".join(name for name in known if name not in needed)
        raise _refused(given[:500], f"{', '.join(needed) or 'no row'}; and perhaps {more}")
    if EMBEDDING in found and LM_HEAD not in found:
        raise _refused("an embedding without an lm_head", "both tables, or the lm_head alone")
    if any((rows in found) != (ids in found) for rows, ids in ROW_PAIRS):
        raise _refused("rows of a table without tokens, or tokens without rows", "both, or neither")
    twice = {LM_HEAD, LM_HEAD_ROWS} <= found.keys() or {EMBEDDING, EMBEDDING_ROWS} <= found.keys()
    alone = EMBEDDING_ROWS in found and not {LM_HEAD, LM_HEAD_ROWS} & found.keys()
    if twice or alone:
        raise _refused("a table whole and in rows, or no lm_head", "each table once, and lm_head")
    for name, (dtype, shape) in found.items():
        dtypes, letters = BATCH[name]
        expected = tuple(
            sizes.setdefault(letter, size) for letter, size in zip(letters, shape, strict=False)
        )
        if dtype not in dtypes or len(shape) != len(letters) or expected != shape:
            raise _refused(
                f"{name}: {dtype} {shape}",
                f"{' or '.join(dtypes)}, sizes {letters} with"
                f" {', '.join(f'{letter}={size}' for letter, size in sorted(sizes.items()))}",
            )
    return sizes


def _check_values(tensors: dict[str, torch.Tensor], before: int, vocab: int) -> None:
    """Raise DataError for values that no loop sends. Reading has already checked that they are
    finite.
    """
    lengths_S = tensors["lengths_S"]
    before_S = tensors["before_S"]
    ids_M = tensors["response_ids_M"]
    rows = ids_M.numel()
    # Each alone first: a sum of numbers near 2^63 would wrap.
    for name, values, least, most in (
        ("lengths_S", lengths_S, 1, rows),
        ("before_S", before_S, 0, before),
        ("response_ids_M", ids_M, 0, vocab - 1),
        ("before_ids_X", tensors["before_ids_X"], GAP, vocab - 1),
        ("prompts_S", tensors["prompts_S"], 0, (1 << 63) - 1),
    ):
        if values.numel() and not least <= int(values.min()) <= int(values.max()) <= most:
            raise _refused(
                f"{name} from {int(values.min())} to {int(values.max())}",
                f"from {least} to {most}",
            )
    if int(lengths_S.sum()) != rows or int(before_S.sum()) != before:
        raise _refused(
            f"{int(lengths_S.sum())} tokens in responses, {int(before_S.sum())} before them",
            f"{rows} and {before}",
        )
    weights_M = tensors.get("weights_M")
    if weights_M is not None and bool(((weights_M < 0) | (weights_M > 1)).any()):
        # A tap removes rows without a state before it sends.
        raise _refused(f"weights from {float(weights_M.min())}", "from 0 to 1")


def _check_table_ids(tensors: dict[str, torch.Tensor], vocab: int) -> None:
    """Raise DataError for tokens of table rows that no loop sends."""
    for _, name in ROW_PAIRS:
        ids = tensors.get(name)
        if ids is None:
            continue
        rising = bool((ids.diff() > 0).all())
        if not ids.numel() or not rising or int(ids[0]) < 0 or int(ids[-1]) >= vocab:
            raise _refused(f"{name} of {ids.numel()} tokens", f"rising, from 0 to {vocab - 1}")


def _refused(given: str, expected: str) -> DataError:
    return DataError(
        "The rows that a tap sent do not fit this companion.",
        given=given,
        expected=expected,
        do="Start the companion with the actor that the loop trains, and the same release of"
        " medusa-ppo.",
    )


def rows_without_logprobs(parts: Sequence[Part]) -> tuple[tuple[int, int], ...]:
    """First row, and the one after the last, of each part without log-probs, in the batch that the
    parts become (`joined`).
    """
    counts = [0 if part.batch is None else part.batch.response_ids_M.numel() for part in parts]
    ends = list(accumulate(counts))
    bounds = zip([0, *ends], ends, parts, strict=False)
    return tuple((first, end) for first, end, part in bounds if not part.has_logprobs)


def with_logprobs(
    batch: RolloutBatch,
    missing: Sequence[tuple[int, int]],
    lm_head_VD: torch.Tensor,
    give_way: Callable[[], None] = lambda: None,
) -> RolloutBatch:
    """The batch with the log-probs of these rows (`rows_without_logprobs`), computed from their own
    states on the device of the table, which is that of their actor: under the distribution that was
    sampled from, after temperature, top-k and top-p.

    Args:
        lm_head_VD: all rows of it, whatever tokens drafts come from.
        give_way: called between two pieces of work; may wait.
    """
    if not missing:
        return batch
    logprobs_M = batch.logprobs_M.clone()
    for first, end in missing:
        for start in range(first, end, LOGPROB_ROWS):
            give_way()
            rows = slice(start, min(end, start + LOGPROB_ROWS))
            logprobs_M[rows] = _logprobs(batch, rows, lm_head_VD, give_way).cpu()
    return replace(batch, logprobs_M=logprobs_M)


def _logprobs(
    batch: RolloutBatch, rows: slice, lm_head_VD: torch.Tensor, give_way: Callable[[], None]
) -> torch.Tensor:
    """`with_logprobs` of one block of rows, `N`."""
    device, dtype = lm_head_VD.device, lm_head_VD.dtype
    ids_N1 = batch.response_ids_M[rows].to(device)[:, None]
    scaled_NV = (batch.hidden_MD[rows].to(device, dtype) @ lm_head_VD.T).float()
    scaled_NV /= batch.temperature
    chosen_N1 = scaled_NV.gather(1, ids_N1)
    if batch.top_k <= 0 and batch.top_p >= 1:
        return chosen_N1[:, 0] - scaled_NV.logsumexp(1)
    logprobs_N = torch.empty_like(chosen_N1[:, 0])
    count = max(1, LOGPROB_ROWS // CUT_SHARE)
    for start in range(0, len(scaled_NV), count):
        if start:
            give_way()
        part = slice(start, start + count)
        cut_CV = truncate_logits(scaled_NV[part], batch.top_k, batch.top_p)
        # The engine rounds differently. What it sampled belongs to what it sampled from.
        cut_CV.scatter_(1, ids_N1[part], chosen_N1[part])
        logprobs_N[part] = chosen_N1[part, 0] - cut_CV.logsumexp(1)
    return logprobs_N


def joined(batches: Sequence[RolloutBatch]) -> RolloutBatch:
    """Join parts of one step into one batch. If some parts are samples, the rows of whole parts get
    weight 1.
    """
    if any(batch.weights_M is not None for batch in batches):
        batches = [
            batch
            if batch.weights_M is not None
            else replace(batch, weights_M=torch.ones(batch.response_ids_M.shape[0]))
            for batch in batches
        ]
    return RolloutBatch.join(list(batches))
