"""What crosses between a tap and a companion that runs by itself: one process's part of a rollout
batch as a safetensors file and a small header in JSON; back comes what the companion wants next.

    header   who sends it, of which step and policy, and how the responses were sampled
    file     states, tokens, lengths, ... as `RolloutBatch` names them; and of the actor's tables,
             where they have changed, the rows that are read (`TableRows`), or all

Whoever reads it treats all of it as hostile: names, dtypes and shapes are compared with the actor's
before anything is read, numbers have bounds, and nothing is ever unpickled.

Shape letters as in `medusa_ppo.contract.rollout_batch`.
"""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from heads.errors import DataError
from heads.heads_config import GAP
from heads.tensorfile import Header, read_header, read_tensors, save_state
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
"""Rows, and whose they are."""
MOST_DRAFT_IDS = 40_000
"""Letters of a wish for tokens that drafts come from; where it takes more, all rows are wanted."""
LOGPROB_ROWS = 1024
"""Rows whose logits over the whole vocabulary are there at once."""
Tables = tuple[torch.Tensor, torch.Tensor | None]


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


Whole = Annotated[int, Field(ge=0, lt=1 << 53)]


class PartHeader(_Message):
    """Of one process's part.

    Attributes:
        number: of the step, as the sender counts; the same in all processes of a training.
        rank, ranks: which of them sends it, and how many do.
        policy_version: of the actor that gave the states.
        tables_version: of the actor when its tables changed last; who has others can't learn from
            these states.
        temperature, top_k, top_p: how the responses were sampled.
        left_out: response tokens that are not here, of a sample.
        tied: the embedding is the lm_head, and comes once.
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

    @model_validator(mode="after")
    def _is_one_of_them(self) -> PartHeader:
        if self.rank >= self.ranks:
            raise ValueError(f"rank {self.rank} of {self.ranks}")
        return self


class Wish(_Message):
    """What a companion wants.

    Attributes:
        rows: states of the next batch, of all processes together; 0: nothing, it is busy.
        ahead: rows further on from which heads learn.
        hidden, vocab: of the actor that it was started for.
        embedding: its heads read the embedding.
        tables_version: of the tables that it has whole from a tap; None: none yet.
        draft_ids: tokens that drafts may come from in the next batch, as `ids_text` writes them:
            of lm_head only their rows and those of the batch's own tokens are read. Empty: any.
        trained, published: batches that it has learned from, and versions.
        problem: what failed last; empty: nothing.
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
    """Some tokens of a vocabulary as text; empty for None, and where it would be long."""
    if ids is None:
        return ""
    mask_V = np.zeros(vocab, dtype=bool)
    mask_V[ids.numpy()] = True
    text = base64.b64encode(zlib.compress(np.packbits(mask_V).tobytes())).decode()
    return text if len(text) <= MOST_DRAFT_IDS else ""


def ids_of_text(text: str, vocab: int) -> torch.Tensor | None:
    """What `ids_text` was given. DataError for other text."""
    if not text:
        return None
    size = -(-vocab // 8)
    try:
        packed = base64.b64decode(text, validate=True)
        unpacker = zlib.decompressobj()
        # One byte more than there may be: it ends only where nothing is left.
        data = unpacker.decompress(packed, size + 1)
        if len(data) != size or unpacker.unconsumed_tail or not unpacker.eof:
            raise ValueError(f"not {size} bytes")
    except (ValueError, zlib.error) as error:
        raise DataError(
            "These are no tokens of a vocabulary.",
            given=f"{text[:40]!r}: {error}",
            expected=f"a mask of {vocab} tokens",
            do="Run the same release of medusa-ppo at both ends.",
        ) from error
    return torch.from_numpy(np.unpackbits(np.frombuffer(data, np.uint8))[:vocab].nonzero()[0])


def read_message(kind: type[Any], text: str | bytes) -> Any:
    """A header or a wish from its JSON. DataError for anything else."""
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or kind.__name__
        raise DataError(
            "This is no message between a tap and a companion.",
            given=f"{where}: {first['msg']}"[:500],
            expected=f"a {kind.__name__} of this release",
            do="Run the same release of medusa-ppo at both ends.",
        ) from error


def prompt_key(prompt: Sequence[int]) -> int:
    """A prompt's number, the same in all processes: 63 bits of a hash of its tokens."""
    data = b",".join(b"%d" % token for token in prompt)
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 1


def batch_tensors(batch: RolloutBatch, *, logprobs: bool) -> dict[str, torch.Tensor]:
    """What goes into the file. `logprobs`: those of the batch; else the companion computes them."""
    states = {name: value for name in BATCH if (value := getattr(batch, name, None)) is not None}
    if not logprobs:
        del states["logprobs_M"]
    # Where prompts are not known (those of images, say), nothing stands before a response.
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
    """Write a part's file. CheckpointError for NaN and infinity. Returns the header that goes with
    it.

    Args:
        tables: of the actor that gave the states, where they have changed: the rows that this part
            needs (`table_rows` with the wish's `draft_ids`), or both whole; None: as before.
    """
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
    """A part as the companion has it.

    Attributes:
        batch: its rows; log-probs of 0 where `has_logprobs` says that none came.
        tables: of the actor that wrote it, where they came: both whole, or rows of them.
    """

    header: PartHeader
    batch: RolloutBatch
    tables: Tables | TableRows | None
    has_logprobs: bool


def read_part(path: Path, header: PartHeader, hidden: int, vocab: int) -> Part:
    """Read a part of an actor of this width and vocabulary.

    Raises:
        DataError, CheckpointError: it is not whole, of another actor, or has values beyond bounds.
    """
    found = read_header(path, MOST_HEADER_BYTES)
    sizes = _sizes(found, hidden, vocab)
    tensors: dict[str, Any] = read_tensors(path, list(found))
    _check_values(tensors, sizes["X"], vocab)
    lm_head_VD = tensors.pop(LM_HEAD, None)
    embedding_VD = tensors.pop(EMBEDDING, None)
    rows = {name: tensors.pop(name, None) for pair in ROW_PAIRS for name in pair}
    has_logprobs = "logprobs_M" in tensors
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


def _sizes(found: Header, hidden: int, vocab: int) -> dict[str, int]:
    """Sizes by letter, after comparing names, dtypes and shapes. DataError for others."""
    sizes = {"D": hidden, "V": vocab}
    missing = [name for name in NEEDED if name not in found]
    unknown = [name for name in found if name not in BATCH]
    if missing or unknown:
        given = f"missing: {', '.join(missing) or 'none'}; unknown: {', '.join(unknown) or 'none'}"
        more = ", ".join(name for name in BATCH if name not in NEEDED)
        raise _refused(given[:500], f"{', '.join(NEEDED)}; and perhaps {more}")
    if EMBEDDING in found and LM_HEAD not in found:
        raise _refused("an embedding without an lm_head", "both tables, or the lm_head alone")
    if any((rows in found) != (ids in found) for rows, ids in ROW_PAIRS):
        raise _refused("rows of a table without their tokens, or these alone", "both, or neither")
    twice = {LM_HEAD, LM_HEAD_ROWS} <= found.keys() or {EMBEDDING, EMBEDDING_ROWS} <= found.keys()
    alone = EMBEDDING_ROWS in found and not {LM_HEAD, LM_HEAD_ROWS} & found.keys()
    if twice or alone:
        raise _refused("a table whole and in rows, or no lm_head", "each table once, lm_head among")
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
    """DataError for what no loop sends. That numbers are finite was seen when they were read."""
    lengths_S = tensors["lengths_S"]
    before_S = tensors["before_S"]
    ids_M = tensors["response_ids_M"]
    rows = ids_M.numel()
    # Each by itself first: numbers near 2^63 would wrap when they are added.
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
    for _, name in ROW_PAIRS:
        ids = tensors.get(name)
        if ids is None:
            continue
        rising = bool((ids.diff() > 0).all())
        if not ids.numel() or not rising or int(ids[0]) < 0 or int(ids[-1]) >= vocab:
            raise _refused(f"{name} of {ids.numel()} tokens", f"rising, from 0 to {vocab - 1}")
    if int(lengths_S.sum()) != rows or int(before_S.sum()) != before:
        raise _refused(
            f"{int(lengths_S.sum())} tokens in responses, {int(before_S.sum())} before them",
            f"{rows} and {before}",
        )
    weights_M = tensors.get("weights_M")
    if weights_M is not None and bool(((weights_M < 0) | (weights_M > 1)).any()):
        # A tap cuts rows without a state out before it sends.
        raise _refused(f"weights from {float(weights_M.min())}", "from 0 to 1")


def _refused(given: str, expected: str) -> DataError:
    return DataError(
        "The rows that a tap sent do not fit this companion.",
        given=given,
        expected=expected,
        do="Start the companion with the actor that the loop trains, and the same release of"
        " medusa-ppo.",
    )


def with_logprobs(part: Part, lm_head_VD: torch.Tensor, device: torch.device) -> RolloutBatch:
    """The part's batch with the log-probs that its own states give, where none came."""
    batch = part.batch
    if part.has_logprobs:
        return batch
    table_VD = lm_head_VD.to(device)
    found = []
    for hidden_ND, ids_N in zip(
        batch.hidden_MD.split(LOGPROB_ROWS), batch.response_ids_M.split(LOGPROB_ROWS), strict=True
    ):
        logits_NV = (hidden_ND.to(device, table_VD.dtype) @ table_VD.T).float()
        scaled_NV = logits_NV / batch.temperature
        chosen_N1 = scaled_NV.gather(1, ids_N.to(device)[:, None])
        found.append((chosen_N1[:, 0] - scaled_NV.logsumexp(1)).cpu())
    return replace(batch, logprobs_M=torch.cat(found))


def joined(batches: Sequence[RolloutBatch]) -> RolloutBatch:
    """Parts of one step as one batch. Of a sample and a whole part the rows of the latter count
    fully.
    """
    if any(batch.weights_M is not None for batch in batches):
        batches = [
            batch
            if batch.weights_M is not None
            else replace(batch, weights_M=torch.ones(batch.response_ids_M.shape[0]))
            for batch in batches
        ]
    return RolloutBatch.join(list(batches))
