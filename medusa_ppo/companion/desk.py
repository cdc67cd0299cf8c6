"""Joins the parts from a training's processes into batches of the companion: a standalone companion
has this instead of a plugin. It is independent of the transport.

Parts of one step come from several processes, each when it has finished its pass, some without
rows: the sample has none of theirs. Once all have arrived they form one batch; if the next step's
parts arrive first, those present do. Nobody waits.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from heads.errors import CheckpointError, CompanionError, DataError
from heads.heads_config import HeadsConfig
from medusa_ppo.companion.parts_wire import (
    Part,
    PartHeader,
    Tables,
    Wish,
    ids_text,
    joined,
    read_part,
    rows_without_logprobs,
)
from medusa_ppo.companion.positions import ROW_BYTES, block_rows
from medusa_ppo.companion.service import CompanionService
from medusa_ppo.companion.wire import (
    ServiceArguments,
    TableRows,
    batch_token_ids,
    joined_rows,
    pack,
    pack_tables,
)
from medusa_ppo.contract.status import CompanionStatus
from medusa_ppo.feeds.actor_sketch import sketch_rows
from medusa_ppo.runtime.files import OwnedFolder

logger = logging.getLogger(__name__)

FLOAT32_BYTES = 4
INT64_BYTES = 8
HEADER_ROOM = 1 << 16
LATE_STEPS = 8
"""Steps for which a process may be behind the others, and is known to be. Where a loop taps each
mini-batch they may be seconds.
"""
STEP = ("number", "policy_version", "tables_version", "ranks", "temperature")
"""Fields of a part's header that are the same for all parts of a step."""


class CompanionDesk:
    """A companion's service, and the parts waiting to become its batches.

    Attributes:
        folder: in shared memory, for incoming files.
    """

    def __init__(self, arguments: ServiceArguments, tables_VD: Tables) -> None:
        """
        Args:
            arguments: what the companion is built from; it publishes to `companion.feed`.
            tables_VD: the actor's lm_head and embedding as its files have them; the embedding only
                for heads that read it.
        """
        self._heads: HeadsConfig = arguments.heads
        self._config = arguments.companion
        self._lock = threading.Lock()
        self._parts: list[Part] = []
        # The last steps that went before all their parts had come, and the processes that had sent
        # theirs.
        self._incomplete: dict[tuple[Any, ...], set[int]] = {}
        self._packed_tables: Any = None
        self._tables_version: int | None = None
        self._coming = 0
        self._arrived: float | None = None
        self._step_s = 0.0
        self._dropped = self._left_out = 0
        self._note = ""
        # Not by the tables' dtype: the loop's actor may compute in another one than its files have.
        self._row_bytes = self._heads.hidden_size * FLOAT32_BYTES + ROW_BYTES
        self._home = OwnedFolder("medusa-ppo-desk-", shared_memory=True)
        self.folder = self._home.path
        self._service = CompanionService(arguments, pack_tables(*tables_VD))

    # ---- what a transport calls

    @property
    def most_bytes(self) -> int:
        """Maximum size of a part's file: all rows of the tables in float32, and what the queue can
        hold.
        """
        return HEADER_ROOM + self._most_table_bytes + self._config.queue_bytes

    @property
    def _most_table_bytes(self) -> int:
        tables = FLOAT32_BYTES * self._heads.vocab_size * self._heads.hidden_size
        ids = INT64_BYTES * self._heads.vocab_size
        return 2 * (tables + ids)

    def reserve(self, nbytes: int) -> bool:
        """Reserve room for an incoming part; `take` or `give_back` follows. False if there is none
        now.
        """
        with self._lock:
            # The tables of a step that waits for a process must not keep out those of the next
            # one, with which it goes.
            most = self.most_bytes + self._most_table_bytes
            if self._coming + self._held + nbytes > most:
                return False
            self._coming += nbytes
            return True

    def give_back(self, nbytes: int) -> None:
        """The part will never arrive."""
        with self._lock:
            self._coming -= nbytes

    def take(self, path: Path, header: PartHeader, reserved: int = 0) -> Wish:
        """Accept a part. Its file may be removed afterwards.

        Args:
            reserved: room that was reserved for it; given back once it counts as held, or failed.

        Raises:
            DataError, CheckpointError: as `read_part`, and for whole tables from another process
                than the first.
            CompanionError: the companion is gone.
        """
        try:
            part = self._read(path, header)
        except BaseException:
            self.give_back(reserved)
            raise
        with self._lock:
            self._coming -= reserved
            self._join(part)
        return self.wish()

    def _read(self, path: Path, header: PartHeader) -> Part:
        try:
            part = read_part(path, header, self._heads.hidden_size, self._heads.vocab_size)
        except (DataError, CheckpointError) as error:
            # The tap gets the error; the companion's status shows it too.
            with self._lock:
                self._tell(f"Rows of process {header.rank} were refused: {error.given}")
            raise
        if header.rank and isinstance(part.tables, tuple):
            # Each would be held until all processes have sent.
            raise DataError(
                "Only the first process sends the actor's tables whole.",
                given=f"tables from process {header.rank}",
                expected="none, or the rows that its own tokens need",
                do="Run the same release of medusa-ppo at both ends.",
            )
        if self._heads.needs_embedding and not _has_embedding(part.tables):
            raise DataError(
                "These heads read the actor's embedding, which did not arrive.",
                given="an lm_head alone",
                expected="both tables",
                do="Run the same release of medusa-ppo at both ends.",
            )
        return part

    def wish(self) -> Wish:
        """What is wanted next."""
        status = self._service.status()
        if not status.alive:
            raise CompanionError(
                "The companion has ended.",
                given=status.error or "its thread is gone",
                expected="a thread that trains",
                do="Read its log, and restart it.",
            )
        problem = status.error
        if self._note and problem == self._service.feed_problem:
            # A tap can do something about lost rows, and nothing about a feed.
            problem = self._note
        return Wish(
            rows=self._rows(status),
            ahead=self._heads.num_heads,
            hidden=self._heads.hidden_size,
            vocab=self._heads.vocab_size,
            embedding=self._heads.needs_embedding,
            tables_version=self._tables_version,
            draft_ids=ids_text(self._draft_ids(), self._heads.vocab_size),
            trained=status.batches_trained,
            published=status.versions_published,
            problem=problem[:2000],
        )

    def status(self) -> CompanionStatus:
        """The service's status, plus the batches dropped here and the positions that the taps left
        out.
        """
        status = self._service.status()
        return replace(
            status,
            batches_dropped=status.batches_dropped + self._dropped,
            positions_left_out=self._left_out,
        )

    def drain(self, timeout_s: float) -> bool:
        """Wait until everything complete is trained on, and the feed has what came of it or can't
        be reached; False if the time is up first.
        """
        return self._service.drain(timeout_s, feed=True)

    def save(self, folder: Path) -> None:
        """Write the companion's whole state, after the batch in training."""
        self._service.save(str(folder))

    def close(self) -> None:
        """Stop the training thread, wait for what is on its way into the feed, and remove incoming
        data.
        """
        self._service.close(alone=True)
        self._home.close()

    # ---- parts

    @property
    def _held(self) -> int:
        rows = sum(part.batch.nbytes for part in self._parts if part.batch is not None)
        return rows + sum(_table_bytes(part.tables) for part in self._parts)

    def _draft_ids(self) -> torch.Tensor | None:
        """Tokens that drafts of the next batch may come from; None: any."""
        with self._lock:
            batches = [part.batch for part in self._parts if part.batch is not None]
        waiting = [batch.response_ids_M for batch in batches]
        ids = self._service.draft_ids()
        if ids is None:
            return None
        # For the feed's manifest, which says whose heads these are.
        sketched = torch.tensor(sketch_rows(self._heads.vocab_size))
        return batch_token_ids(ids, sketched, *waiting)

    def _join(self, part: Part) -> None:
        """Put a part to those of its step, or begin the next one with it."""
        header = part.header
        if not self._parts or not _together(self._parts, header):
            sent = self._incomplete.get(_step(header))
            if sent is not None and header.rank not in sent:
                # It must not end the step that is waited for now.
                if not header.rank and part.tables is not None:
                    # It is complete in itself. Without its tables the first process would send
                    # whole ones again with its next part, which would be as late.
                    self._submit([part])
                elif header.rows:
                    self._drop(
                        f"Rows of process {header.rank} came when a later step's had begun to"
                        " come: nothing is learned from them."
                    )
                return
            if self._parts and _step(self._parts[0].header) != _step(header):
                # Else the process repeats itself: several calls of one step. What the others send
                # for the earlier call is not late, but goes with this one.
                self._remember_incomplete()
            self._submit_waiting()
            # A process that was started again may begin with its numbers of before.
            self._incomplete.pop(_step(header), None)
        self._parts.append(part)
        if len(self._parts) == header.ranks:
            self._submit_waiting()

    def _remember_incomplete(self) -> None:
        """The step that is waited for goes without the parts that have not come."""
        self._incomplete[_step(self._parts[0].header)] = {
            other.header.rank for other in self._parts
        }
        while len(self._incomplete) > LATE_STEPS:
            self._incomplete.pop(next(iter(self._incomplete)))

    def _submit_waiting(self) -> None:
        parts, self._parts = self._parts, []
        if parts:
            self._submit(parts)

    def _submit(self, parts: list[Part]) -> None:
        """Turn parts of one step into a batch, if one of them has rows and the tables of their
        actor are here.
        """
        header = parts[0].header
        whole = [part.tables for part in parts if isinstance(part.tables, tuple)]
        rows = [part.tables for part in parts if isinstance(part.tables, TableRows)]
        rowless = not any(part.header.rows for part in parts)
        some = False
        if whole:
            lm_head_VD, embedding_VD = whole[-1]
            self._tables_version = header.tables_version
            read_VD = embedding_VD if self._heads.needs_embedding else None
            self._packed_tables = pack_tables(lm_head_VD, read_VD)
        elif self._tables_version != header.tables_version and not rowless:
            # The first process has the rows that drafts come from, others those of their own ids.
            if not any(part.header.rank == 0 and part.tables is not None for part in parts):
                self._drop(
                    f"A step's rows came without the tables of their actor (version"
                    f" {header.tables_version}): the first process did not send, and nothing is"
                    " learned from them."
                )
                return
            found = joined_rows(rows)
            some = found.lm_head_ids_R is not None
            # The tables here now mix several versions, except in the rows that this batch reads.
            self._tables_version = None
            self._packed_tables = pack(found)
        if some and not all(part.has_logprobs for part in parts):
            self._drop(
                "A step's rows came without log-probs and with some rows of lm_head, and log-probs"
                " follow from all of them: nothing is learned from it."
            )
            return
        if rowless:
            return
        now = time.monotonic()
        self._step_s = 0.0 if self._arrived is None else now - self._arrived
        self._arrived = now
        batch = joined([part.batch for part in parts if part.batch is not None])
        elsewhere = sum(part.header.left_out for part in parts if part.batch is None)
        batch = replace(batch, left_out=batch.left_out + elsewhere)
        self._left_out += batch.left_out
        self._row_bytes = self._heads.hidden_size * batch.hidden_MD.element_size() + ROW_BYTES
        # Missing log-probs are computed when the batch is trained on: taps wait for this lock.
        missing = rows_without_logprobs(parts)
        self._service.submit(pack(batch), self._packed_tables, missing=missing)
        self._note = ""

    def _drop(self, problem: str) -> None:
        self._dropped += 1
        self._tell(problem)

    def _tell(self, problem: str) -> None:
        if problem != self._note:
            self._note = problem
            logger.warning("%s", problem)

    def _rows(self, status: CompanionStatus) -> int:
        """Rows of the next batch: as many as fit next to the previous batch and can be trained on
        before the one after it. None while a batch waits behind the one in training.
        """
        if self._service.behind:
            return 0
        rows = self._config.queue_bytes // 2 // self._row_bytes
        # Of several processes the sample is this large on average only. Its blocks end where their
        # responses do, so its size varies with the root of their number: 144 samples of 2 to 32
        # processes had at most 8.6 blocks more of 512, and 1.9 of 16.
        block = block_rows(rows, self._heads.num_heads)
        rows -= min(rows // 2, int(block * (1 + math.sqrt(rows / block)) / 2))
        position_s = status.train_s / status.trained_tokens if status.trained_tokens else 0.0
        if position_s and self._step_s:
            in_time = int(self._step_s / position_s)
            # Less than an optimizer step's rows is not worth judging.
            rows = min(rows, max(in_time, self._config.batch_positions))
        return rows


def _step(header: PartHeader) -> tuple[Any, ...]:
    """Tells the step that a part belongs to from others."""
    return tuple(getattr(header, name) for name in STEP)


def _together(parts: list[Part], header: PartHeader) -> bool:
    """Whether a part belongs to the step of these, and its process has not sent one yet."""
    ranks = {other.header.rank for other in parts}
    return _step(parts[0].header) == _step(header) and header.rank not in ranks


def _table_bytes(tables: Tables | TableRows | None) -> int:
    """Bytes of memory of a part's tables; of a table that is both, once."""
    if tables is None:
        return 0
    if isinstance(tables, TableRows):
        return tables.nbytes
    found = {id(table_VD): table_VD.nbytes for table_VD in tables if table_VD is not None}
    return sum(found.values())


def _has_embedding(tables: Tables | TableRows | None) -> bool:
    """Whether heads that read the embedding can learn with these tables; None: with the earlier
    ones.
    """
    if isinstance(tables, TableRows):
        return tables.tied or tables.embedding_ED is not None
    return tables is None or tables[1] is not None
