"""The companion's own process: a queue of batches, one training thread, and published versions. Ray
hosts it, but it does not depend on Ray.

All methods may be called from any thread; `submit` by one at a time, so that batches keep their
order (the client ensures this).

After a crash Ray builds the service again from the same arguments, perhaps on another node. The new
one finds the marker that the first one left in the run's folder, and continues from the last saved
state and, on the same node, the last published version.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from heads.checkpoint import checksum, load_state, save_heads, save_state
from heads.errors import CheckpointError, CompanionError
from heads.tensorfile import crc
from medusa_ppo.companion.batch_queue import BatchQueue
from medusa_ppo.companion.cycle import Cycle, CycleReport
from medusa_ppo.companion.feeder import Feeder, Offer
from medusa_ppo.companion.giving_way import Pace
from medusa_ppo.companion.parts_wire import with_logprobs
from medusa_ppo.companion.wire import (
    Answer,
    PackedTensor,
    ServiceArguments,
    batch_token_ids,
    pack,
    unpack,
)
from medusa_ppo.config.companion_section import CompanionConfig
from medusa_ppo.contract.rollout_batch import RolloutBatch
from medusa_ppo.contract.status import CompanionStatus, PublishedHeads
from medusa_ppo.feeds.feed_manifest import FeedActor, Judged, Release
from medusa_ppo.feeds.http_feed import open_feed
from medusa_ppo.runtime.files import (
    UNFINISHED,
    OwnedFolder,
    remove_unfinished,
    sweep,
    write_atomic,
)
from medusa_ppo.runtime.hardware import (
    companion_threads,
    cores_idle_s,
    cores_wanted_s,
    cpu_has_bfloat16,
    usable_cores,
)

logger = logging.getLogger(__name__)

STATE_FILE = "companion.safetensors"
VERSIONS = "v[0-9]*"
"""Name pattern of the folders that hold a version each, in `heads` of the run's folder."""
MARKER = "started"
FEED_NUMBER = "feed-number"
"""File next to the state. In the state the number would be that of before the last upload, and of a
run that is resumed further back a much lower one.
"""
NICENESS = 5  # PPO goes first if both want a core; otherwise this changes nothing.
IDLE_S = 1.0
WAITED, RESTS, LONGEST_REST_S = 0.1, 100.0, 10.0
"""Outside its turns a companion that takes turns with the loop uses what is idle: it goes on once a
core had nothing to do for nearly `IDLE_S`. After a piece of work during more than `WAITED` of which
somebody waited for a core, it rests for `RESTS` times its seconds, at most `LONGEST_REST_S`, and
then looks again.
"""
LAST_BATCH_S = 3.0
"""How long a companion that is closed waits for its batch, and one of a loop for its feed, before
it removes the published versions: the loop ends its process after 5 s.
"""
KEPT_VERSIONS = 3
UNWRITTEN = "The new heads could not be written where the engine takes them from"
SAVED_EVERY = 8
"""Batches without a version after which the state is written anyway: at a width of 4,096 it is
about 10 GiB.
"""
HOST = torch.device("cpu")
EXIT_CODE = 70  # Exit code of a process that ends itself to be restarted.


@dataclass(frozen=True)
class QueuedBatch:
    """A batch in the queue; packed, the tables of its actor or the rows of them that it needs
    (None: the initial tables); its number by the client's count; and the rows whose log-probs are
    missing (`rows_without_logprobs`).
    """

    batch: RolloutBatch
    tables: Any
    number: int = 0
    missing: Sequence[tuple[int, int]] = ()

    @property
    def nbytes(self) -> int:
        return self.batch.nbytes

    @property
    def policy_version(self) -> int:
        return self.batch.policy_version


class CompanionService:
    """Trains on submitted batches in its own thread and publishes what passes the gate."""

    def __init__(self, arguments: ServiceArguments, tables: Any) -> None:
        """
        Args:
            arguments: what it is built from.
            tables: the actor's lm_head and, for kinds that read it, its embedding (else None),
                packed.
        """
        config = arguments.companion
        self._arguments = arguments
        self._config = config
        self._incarnation = f"{os.getpid()}-{time.time_ns()}"
        self._publish_dir = Path(arguments.publish_dir)
        # On the loop's node the folder is the loop's, which removes it. On another one only this
        # process can.
        self._home = OwnedFolder.taken(self._publish_dir)
        if self._home is not None:
            sweep()  # Of companions that were killed here, perhaps nobody else does it.
        self._publish_dir.mkdir(parents=True, exist_ok=True)
        self._cycle = make_cycle(arguments, tables)
        self._pace = Pace(self._publish_dir)
        self._hears_loop = self._pace.name == arguments.pace
        self._cycle.trainer.give_way = self._give_way
        self._device = self._cycle.trainer.device
        self._run_dir = Path(arguments.run_dir) if arguments.run_dir else None
        self._published: PublishedHeads | None = None
        # The serving heads are not yet where the engine takes them from.
        self._unwritten = False
        self._feeder: Feeder | None = None
        if config.feed:
            kept = self._run_dir / "companion" / FEED_NUMBER if self._run_dir else None
            self._feeder = Feeder(open_feed(config.feed), kept)
        self._offered_version = 0
        self._judged = Judged()
        # The last tables to arrive, and those that the trainer uses; None: none have arrived.
        self._tables: Any = None
        self._tables_used: Any = None
        self._queue = BatchQueue(config.queue_bytes)
        self._state_lock = threading.Lock()
        self._idle = threading.Condition()
        self._outstanding = self._received = self._dropped_before = self._unsaved = 0
        self._counted = 0  # Number of the last batch that was learned from.
        self._train_s = self._worked_s = self._cpu_since_s = 0.0
        self._wanted_since_s = math.nan
        self._busy_since: float | None = None
        # Seconds of training on a batch whose files are being written; None: it still trains.
        self._took_s: float | None = None
        self._takes_turns = arguments.takes_turns and self._hears_loop
        self._wanted_last_s = math.nan
        # The process's and the machine's counts when the training thread began to wait; None: it
        # works.
        self._waits_since: tuple[float, float] | None = None
        self._threads = torch.get_num_threads()
        self._loop_waits = False
        # The process's and the machine's counts at the last look, while the loop waits for a turn.
        self._turn_since: tuple[float, float] | None = None
        # Whether the training thread trains, judges or moves its tensors, and when it last made
        # progress with that.
        self._computes = False
        self._beat = 0.0
        self._error = ""  # What failed with the last batch.
        self._note = self._found = (
            # Why the last batch was of no use although nothing failed, or what was wrong at the
            # start, until reported.
            ""
        )
        # Whether the folder of published versions is gone: nobody reads them any more.
        self._ends = False
        self._begin(arguments)
        self._follows = self._cycle.version
        self._rest()
        self._thread = threading.Thread(target=self._run, name="companion-training", daemon=True)
        self._thread.start()

    # ---- called by the client

    @property
    def behind(self) -> bool:
        """Whether a batch waits behind the one in training."""
        return self._busy_since is not None and len(self._queue) > 0

    @property
    def feed_problem(self) -> str:
        """Why the feed lacks the newest version; empty if it has it, or will have it soon."""
        return self._feeder.problem if self._feeder is not None else ""

    def ready(self) -> str:
        """Name of this incarnation of the process; changes with a restart."""
        return self._incarnation

    def hears_loop(self) -> bool:
        """Whether it sees when the loop needs the cores: not on another node."""
        return self._hears_loop

    def submit(
        self,
        packed: Any,
        tables: Any = None,
        number: int = 0,
        missing: Sequence[tuple[int, int]] = (),
    ) -> int:
        """Queue a batch. Never blocks; the oldest waiting batches are dropped if they are too old
        or take too many bytes (including the next one).

        Args:
            packed: the batch, packed.
            tables: tables of the actor that gave the batch's states, packed: both whole, or the
                `TableRows` that it needs; None: unchanged.
            number: number of the batch by the caller's count.
            missing: rows whose log-probs are missing (`rows_without_logprobs`). They are computed
                before the batch is trained on, and need all of its actor's lm_head.

        Returns:
            Bytes of the batches that wait or are in training now.
        """
        self._tables = tables or self._tables
        return self._enqueue(QueuedBatch(unpack(packed), self._tables, number, missing))

    def _enqueue(self, batch: Any) -> int:
        with self._idle:
            self._received += 1
            self._outstanding += 1 - self._queue.put(batch, room=batch.nbytes)
            self._idle.notify_all()
            return self._queue.held_nbytes

    def newest(self, after_version: int) -> Answer:
        """The last published version if it is newer than `after_version`."""
        published = self._published
        if published is not None and published.version <= after_version:
            published = None
        computes = self._computes and self._waits_since is None
        stuck_s = time.monotonic() - self._beat if computes else 0.0
        # In this order: at worst, what a later batch has added is reported with an older number.
        counted = self._counted
        draft_ids = self._cycle.draft_ids
        return Answer(
            published,
            self._error,
            self._incarnation,
            self._queue.held_nbytes,
            self._cycle.version,
            stuck_s,
            None if draft_ids is None else draft_ids.to(torch.int32).numpy(),
            counted,
            self._follows,
        )

    def draft_ids(self) -> torch.Tensor | None:
        """The tokens that drafts come from, including those that they may come from once the
        waiting batches are counted, int64, ascending; None: any.
        """
        with self._idle:
            waiting = [queued.batch.response_ids_M for queued in self._queue.held()]
        ids_W = self._cycle.draft_ids
        return None if ids_W is None else batch_token_ids(ids_W, *waiting)

    def adopt(self, version: int, state: dict[str, PackedTensor], serving: int) -> None:
        """The engine drafts with these heads, under the number `serving`, and `version` was the
        last one offered to it: training continues from them, after this batch. So does a restart:
        from here on they are what that version, or a later one that the engine never got, consists
        of.
        """
        with self._state_lock:
            self._go_on_from(version, state, serving)
            # Never judged against the engine's heads.
            self._published = None
            if self._feeder is not None:
                self._feeder.offer(None)
            self._unwritten = False
            self._follows = version
            # Otherwise a restart would bring back the heads that the engine did without.
            self._tried("The companion's state could not be saved", self._write_checkpoint)
            self._tried("The engine's heads could not be written", self._write_serving)
            self._tried(
                "The engine's heads could not be written into the run's folder",
                lambda: self._keep_heads(None),
            )

    def _go_on_from(self, version: int, state: dict[str, PackedTensor], serving: int) -> None:
        """`Cycle.go_on_from` in all processes that learn."""
        self._cycle.go_on_from(version, unpack(state), serving)

    def published_state(self, version: int) -> dict[str, PackedTensor] | None:
        """Packed tensors of the last published version, for a client on another node; None if
        `version` is no longer the last.
        """
        published = self._published
        if published is None or published.version != version:
            return None
        return pack(load_state(published.path))

    def status(self) -> CompanionStatus:
        """The status so far."""
        cycle = self._cycle
        trainer = self._cycle.trainer
        rows: dict[str, Any] = dict(cycle.rows)
        running_s = self._training_s()
        found = self._found
        self._found = ""
        return CompanionStatus(
            alive=self._thread.is_alive(),
            incarnation=self._incarnation,
            batches_received=self._received,
            batches_dropped=self._dropped_before + self._queue.dropped,
            batches_trained=trainer.batches_trained,
            trained_tokens=trainer.trained_tokens,
            optimizer_steps=trainer.optimizer_steps,
            versions_published=cycle.version,
            candidates_rejected=cycle.candidates_rejected,
            train_s=self._train_s + running_s,
            worked_s=self._worked_s
            + (0.0 if self._busy_since is None else self._work_s(running_s)),
            queue_bytes=self._queue.nbytes,
            last_loss=cycle.last_loss,
            last_policy_version=cycle.last_policy_version,
            **rows,
            error=self._error or found or self._note or self.feed_problem,
            losses=cycle.last_losses,
            passes=cycle.passes,
            judged=cycle.judged,
            gain=cycle.gain,
            versions_followed=cycle.followed,
            versions_worse=cycle.fell_back,
            fresh=bool(cycle.fresh),
            replayed_version=cycle.replayed_version,
            replayed_policy_version=cycle.replayed_policy_version,
            positions_frac=cycle.positions_frac,
            rate=trainer.rate,
            learning_rate=trainer.last_step_size,
            gpu_gib=(
                torch.cuda.memory_reserved(self._device) / 1024**3
                if self._device.type == "cuda"
                else None
            ),
        )

    def drain(self, timeout_s: float, *, feed: bool = False) -> bool:
        """Wait until everything submitted is trained on; False if the time is up first.

        Args:
            feed: try again what could not be put into the feed, and wait for it, too. A loop that
                gives the companion a turn has no time for that.
        """
        ends_s = time.monotonic() + timeout_s
        with self._idle:
            if not self._idle.wait_for(lambda: self._outstanding <= 0, timeout_s):
                return False
        if not feed or self._feeder is None:
            return True
        self._feeder.again()
        return self._feeder.drain(max(0.0, ends_s - time.monotonic()))

    def save(self, folder: str) -> str:
        """Write the whole state, after the batch in training, into `folder`, atomically. Returns
        the file's path.
        """
        with self._state_lock:
            return str(self._write_state(Path(folder)))

    def state_bytes(self) -> int:
        """Bytes of the state that `save` writes, after the batch in training."""
        with self._state_lock:
            return sum(tensor.nbytes for tensor in self._cycle.state_dict(copied=False).values())

    def close(self, *, alone: bool = False) -> None:
        """Stop the training thread after its current batch, and the feed's after its version.

        Args:
            alone: no loop ends this process soon: wait for the feed as long as it should take.
        """
        ends_s = time.monotonic() + LAST_BATCH_S
        self._queue.close()
        self._thread.join(timeout=LAST_BATCH_S)
        if self._feeder is not None:
            self._feeder.close(None if alone else max(0.0, ends_s - time.monotonic()))
        if self._home is not None:
            self._ends = True
            self._home.close()
        self._thread.join(timeout=10 - LAST_BATCH_S)

    # ---- the training thread

    def _run(self) -> None:
        while (batch := self._queue.get()) is not None:
            self._took_s = None
            self._busy_since = time.monotonic()
            self._cpu_since_s = time.process_time()
            self._wanted_since_s = cores_wanted_s()
            self._turn_since = None
            try:
                with self._state_lock, self._computing():
                    if self._config.offload:
                        self._cycle.move_to(self._device)
                    report = self._learn(batch)
                    self._took_s = self._training_s()
                self._error = ""
                self._note = report.problem
                self._unsaved += 1
                if report.published or self._unsaved >= SAVED_EVERY:
                    # Before the version is visible, so that a crash in between can't lose it. A
                    # full disk does not keep heads from the engine.
                    self._tried("The companion's state could not be saved", self._checkpoint)
                if self._ends:
                    continue
                self._unwritten |= report.published
                # After every batch, so that a version is written once there is room for it.
                self._tried(UNWRITTEN, self._publish_unwritten)
                # After every batch, so that a feed that was unavailable gets what it missed.
                self._feed_newest()
            except Exception as error:
                # One bad batch must not end the companion; the status reports it, and the next one
                # comes.
                if _ends_process(error):
                    self._start_again(f"{type(error).__name__}: {error}")
                logger.exception(
                    "The companion could not learn from a batch of policy version %d.",
                    batch.policy_version,
                )
                self._error = f"{type(error).__name__}: {error}"
            finally:
                took_s = self._took_s = self._training_s()
                # Here, where the error and what its frames hold are gone.
                self._rest_anyway()
                self._pace.waited_s = 0.0
                self._leave_out_turn()
                self._train_s, self._worked_s = (
                    self._train_s + took_s,
                    self._worked_s + self._work_s(took_s),
                )
                self._busy_since = None
                self._counted = batch.number
                del batch  # Its shared memory must not wait for the next one.
                self._queue.done()
                with self._idle:
                    self._outstanding -= 1
                    self._idle.notify_all()

    def _training_s(self) -> float:
        """Seconds of training on the current batch so far. Files don't count: they take as long as
        the disk does, and nothing of a GPU.
        """
        # Both once: the training thread may end the batch meanwhile.
        since, took_s = self._busy_since, self._took_s
        if since is None:
            return 0.0
        return time.monotonic() - since - self._pace.waited_s if took_s is None else took_s

    def _work_s(self, took_s: float) -> float:
        """The part of a batch's training time that others could have used. On a CPU this excludes
        time when others had the cores, and is at most the time in which a process waited for one.
        """
        if self._device.type == "cuda":
            return took_s
        cpu_s, wanted_s = self._waits_since or (time.process_time(), cores_wanted_s())
        had_s = self._processes * (cpu_s - self._cpu_since_s)
        wanted_s -= self._wanted_since_s
        return had_s if math.isnan(wanted_s) else min(had_s, max(0.0, wanted_s))

    @property
    def _processes(self) -> int:
        """How many processes train, each about as long as this one."""
        return 1

    @contextlib.contextmanager
    def _computing(self) -> Iterator[None]:
        """Inside, this thread hangs if it makes no progress. Outside it waits for a batch or for
        its state, or writes files, which takes as long as the disk does: minutes for the state of
        a large actor's heads. Whoever ended it there would lose the version that it has made.
        """
        self._beat = time.monotonic()
        self._computes = True
        try:
            yield
        finally:
            self._computes = False

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        """Inside, this thread only waits: nothing counts as training, and it does not hang."""
        cpu_s, wanted_s = self._waits_since = time.process_time(), cores_wanted_s()
        try:
            yield
        finally:
            self._cpu_since_s += time.process_time() - cpu_s
            self._wanted_last_s = cores_wanted_s()
            self._wanted_since_s += self._wanted_last_s - wanted_s
            self._beat = time.monotonic()
            # Last: a status asked for meanwhile may report too little for now, but not too much.
            self._waits_since = None

    def _wait_for_a_core(self) -> None:
        """Wait until a core is idle, or it is this companion's turn."""
        while not self._pace.has_all:
            began_s, idle_s = time.monotonic(), cores_idle_s()
            self._pace.give_way(IDLE_S)
            took_s = time.monotonic() - began_s
            # In a longer wait the loop wanted the cores, and now does something else.
            if took_s < 1.5 * IDLE_S and cores_idle_s() - idle_s > 0.9 * took_s:
                return

    def _leave_out_turn(self) -> None:
        """Not to count a piece of work that began and ended in the same turn: the loop waited for
        it, and counts those seconds.
        """
        if self._turn_since is not None and self._pace.has_all:
            cpu_s, wanted_s = self._turn_since
            self._cpu_since_s += time.process_time() - cpu_s
            self._wanted_since_s += cores_wanted_s() - wanted_s
        self._begin_piece()

    def _begin_piece(self) -> None:
        self._turn_since = (time.process_time(), cores_wanted_s()) if self._pace.has_all else None

    def _give_way(self) -> None:
        began_s, self._beat = self._beat, time.monotonic()
        self._leave_out_turn()
        wanted_s = cores_wanted_s()
        piece_s = self._beat - began_s
        rest_s = 0.0
        # Where the kernel doesn't count, `wanted_s` is NaN, and somebody may have waited.
        if self._takes_turns and not wanted_s - self._wanted_last_s < WAITED * piece_s:
            rest_s = min(LONGEST_REST_S, RESTS * piece_s)
        if self._pace.held or (rest_s and not self._loop_waits):
            with self._waiting():
                self._pace.give_way(rest_s)
                if self._takes_turns and not self._loop_waits:
                    self._wait_for_a_core()
            self._begin_piece()
        self._use_threads()
        self._wanted_last_s = cores_wanted_s()
        self._beat = time.monotonic()

    def _learn(self, batch: Any) -> CycleReport:
        """Train on a batch from the queue."""
        # Its own tables, not the newest ones: with a backlog its states belong to an earlier
        # policy.
        if batch.tables is not None and not _same(batch.tables, self._tables_used):
            self._cycle.take_tables(unpack(batch.tables))
            self._tables_used = batch.tables
        self._loop_waits = batch.batch.rising_s is not None
        with self._waiting():
            if self._takes_turns and not self._loop_waits:
                self._wait_for_a_core()
        self._begin_piece()
        self._use_threads()
        # Here the table is on the device already, and nobody waits for the result.
        trainer = self._cycle.trainer
        return self._cycle.run(
            with_logprobs(batch.batch, batch.missing, trainer.lm_head_VD, trainer.give_way)
        )

    def _use_threads(self) -> None:
        """Compute on all cores while the loop waits, and otherwise on this companion's part."""
        threads = self._threads
        if self._loop_waits or self._pace.has_all:
            threads = usable_cores()
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)

    def _start_again(self, why: str) -> None:
        """End this process: Ray restarts it, and it continues from the last saved state."""
        logger.critical("The companion's process ends, to be restarted. %s", why)
        logging.shutdown()
        os._exit(EXIT_CODE)

    def _rest(self) -> None:
        """Leave the GPU to others while no batch waits; everything on it moves to host memory."""
        if not self._config.offload or len(self._queue):
            return
        with self._state_lock, self._computing():
            self._cycle.move_to(HOST)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _rest_anyway(self) -> None:
        """`_rest`, also after a batch that failed: what ran out of memory must not keep the loop's.
        An error is told unless the batch has told one.
        """
        try:
            self._rest()
        except Exception as error:
            if _ends_process(error):
                self._start_again(f"{type(error).__name__}: {error}")
            logger.exception("The companion could not leave its device.")
            self._error = self._error or f"{type(error).__name__}: {error}"

    def _publish_unwritten(self) -> None:
        """Publish the serving heads, if that has not happened yet."""
        with self._state_lock:  # `adopt` writes the same file.
            if self._unwritten:
                self._publish()

    def _publish(self) -> None:
        """Write the serving heads: to a file in shared memory, which the engine swaps in, and as a
        native checkpoint to the run's folder.
        """
        cycle = self._cycle
        state = cycle.serving.trainable_state(copied=False)
        version = cycle.version
        row = cycle.rows.get("candidate" if cycle.fresh else "serving")
        length = row.mean_acceptance_length if row else math.nan
        # A feed that is unavailable gets it later, after other batches have been judged.
        self._judged = Judged()
        if row is not None and math.isfinite(length):
            self._judged = Judged(
                mean_acceptance_length=length,
                acceptance_per_position=list(row.acceptance_per_position),
            )
        path = self._write_serving()
        self._published = PublishedHeads(
            version, str(path), checksum(state), cycle.published_policy_version, length
        )
        self._unwritten = False
        self._tried(
            "The new heads could not be written into the run's folder",
            lambda: self._keep_heads(length if row else None),
        )

    def _write_serving(self) -> Path:
        """Write the serving heads where the engine takes them from."""
        cycle = self._cycle
        path = self._publish_dir / f"heads-{cycle.version:06d}.safetensors"
        save_state(path, cycle.serving.trainable_state(copied=False))
        forget_oldest(path, "heads-*.safetensors")
        return path

    def _feed_newest(self) -> None:
        """Have the last published version put into the feed, if there is a feed that lacks it."""
        published = self._published
        if self._feeder is None:
            return
        if published is None or published.version == self._offered_version:
            self._feeder.again()
            return
        self._offered_version = published.version
        release = self._release(published.version)
        self._feeder.offer(Offer(Path(published.path), published.checksum, release))

    def _release(self, version: int) -> Release:
        """What a feed is told of the serving heads."""
        cycle = self._cycle
        return Release(
            actor=FeedActor.of(cycle.serving.config, cycle.trainer.lm_head_VD),
            dtype=str(cycle.serving.dtype).removeprefix("torch."),
            version=version,
            policy_version=cycle.published_policy_version,
            judged=self._judged,
        )

    def _keep_heads(self, length: float | None) -> None:
        """Write the serving heads as a native checkpoint. `length`: their replay estimate."""
        if self._run_dir is None:
            return
        cycle = self._cycle
        heads = self._cycle.serving
        metadata = {
            "policy_version": cycle.published_policy_version,
            "trained_tokens": cycle.trainer.trained_tokens,
            "replay_mean_acceptance_length": length,
        }
        folder = self._run_dir / "heads" / f"v{cycle.version:06d}"
        lm_head_VD = cycle.trainer.lm_head_VD if heads.config.lm_head == "shared" else None
        save_heads(folder, heads, lm_head_VD=lm_head_VD, metadata=metadata, version=cycle.version)
        forget_oldest(folder, VERSIONS)

    def _tried(self, what: str, write: Callable[[], object]) -> None:
        """Report a file that can't be written (a full or read-only disk, a folder of heads that was
        damaged) in the status; training continues.
        """
        try:
            write()
        except (OSError, CheckpointError) as error:
            self._note = f"{what}: {error}"
            logger.warning("%s; training continues.", self._note)

    def _checkpoint(self) -> None:
        with self._state_lock:
            self._write_checkpoint()

    def _write_checkpoint(self) -> None:
        """Write what a restart continues from; the caller has the state to itself."""
        if self._run_dir is not None:
            self._write_state(self._run_dir / "companion")
        self._unsaved = 0

    def _write_state(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        save_state(folder / STATE_FILE, self._state())
        return folder / STATE_FILE

    def _begin(self, arguments: ServiceArguments) -> None:
        """Start from the right state: a first start, a resumed run, or a restart after a crash."""
        # Without a run folder, the versions on this node are all there is.
        marker = (
            self._run_dir / "companion" if self._run_dir else Path(arguments.publish_dir)
        ) / MARKER
        again = (
            marker.is_file() and marker.read_text() == arguments.publish_dir
        )  # Not what an earlier run left.
        folder = Path(arguments.resume_from) if arguments.resume_from else None
        # A state may have gigabytes, and so has what a killed companion had written of it.
        self._tried("What was half-written could not be removed", self._remove_unfinished)
        if again:
            logger.warning("The companion was restarted after its process ended.")
            if self._run_dir is not None and (self._run_dir / "companion" / STATE_FILE).is_file():
                folder = self._run_dir / "companion"
        if folder is not None:
            self._take_over_saved(folder / STATE_FILE, again)
        if not again:
            # A new engine gets what serves as the version that was published last.
            self._cycle.serving_version = self._cycle.version
            self._tried(
                "The companion's state could not be saved",
                lambda: self._own_saved_state(resumed=folder is not None),
            )
        self._adopt_newest()
        self._unwritten = self._cycle.version > 0
        self._tried(UNWRITTEN, self._publish_unwritten)
        self._tried("The first heads could not be written for the feed", self._feed_first)
        self._tried(
            "The companion could not mark its start",
            lambda: write_atomic(marker, arguments.publish_dir),
        )

    def _feed_first(self) -> None:
        """Have trained heads put into a feed that has none yet, although no gate has judged them: a
        deep sleep before the first version takes from engines those that they started with. A
        version of before the restart goes into any feed: it may have been on its way at the end.
        """
        if self._feeder is None:
            return
        cycle = self._cycle
        if self._published is not None:
            self._feed_newest()
        elif cycle.version == 0 and not cycle.serving.untrained:
            path = self._write_serving()
            # The first version that the gate lets through has the feed's next number.
            digest = checksum(cycle.serving.trainable_state(copied=False))
            self._feeder.offer(Offer(path, digest, self._release(1), first=True))

    def _remove_unfinished(self) -> None:
        # The loop writes into the last one as well.
        remove_unfinished(self._publish_dir, f".heads-{UNFINISHED[1:]}")
        if self._run_dir is not None:
            for name in ("companion", "heads"):
                remove_unfinished(self._run_dir / name)

    def _take_over_saved(self, file: Path, again: bool) -> None:
        """Load the last saved state. After a crash a damaged one is ignored, because the published
        heads are still there.

        Raises:
            CheckpointError: a resumed run would begin with different heads than it ended with.
            CompanionError: the file could not be read now; nothing says that it is damaged.
        """
        try:
            self._take_over(load_state(file))
        except CheckpointError as error:
            if not again:
                if _may_pass(error.__cause__):
                    raise CompanionError(
                        "The companion's saved state could not be read.",
                        given=f"{file}: {error.__cause__}",
                        expected="a disk that answers, and memory for the state",
                        do="Try again once there is; the state is left as it is.",
                    ) from error
                raise
            self._found = (
                "The companion's saved state is damaged; it continues from the last published "
                "heads."
                f" {error}"
            )
            logger.warning(self._found)

    def _adopt_newest(self) -> None:
        """Serve the last published version, if its file is intact: versions never go back."""
        for file in sorted(self._publish_dir.glob("heads-*.safetensors"), reverse=True):
            version = int(file.stem.split("-")[1])
            if version <= self._cycle.version:
                return
            try:
                return self._cycle.adopt(version, load_state(file))
            except CheckpointError as error:
                logger.warning("Published heads are damaged; using the previous ones. %s", error)

    def _own_saved_state(self, resumed: bool) -> None:
        """After a crash the companion must not return to leftovers of an earlier run, or of the
        part of this run that is repeated.
        """
        if self._run_dir is None:
            return
        if resumed:
            self.save(str(self._run_dir / "companion"))
        else:
            (self._run_dir / "companion" / STATE_FILE).unlink(missing_ok=True)

    def _state(self) -> dict[str, torch.Tensor]:
        own = [
            float(self._received),
            float(self._dropped_before + self._queue.dropped),
            self._train_s,
        ]
        state = self._cycle.state_dict(copied=False)  # Training pauses while it is written.
        return state | {
            "service": torch.tensor(own, dtype=torch.float64),
            "crc": torch.tensor(crc(state)),
        }

    def _take_over(self, state: dict[str, torch.Tensor]) -> None:
        received, dropped, self._train_s = state.pop("service", torch.zeros(3)).tolist()
        said = state.pop("crc", None)  # Releases before 0.3 wrote none.
        if said is not None and int(said) != crc(state):
            do = "Start without --resume, or copy the file from elsewhere."
            raise CheckpointError(
                "The companion's saved state was changed after it was written.",
                given="its CRC-32",
                do=do,
            )
        self._received = int(received)
        self._dropped_before = int(dropped)
        self._cycle.load_state_dict(state)


def make_cycle(arguments: ServiceArguments, tables: Any) -> Cycle:
    """The initial heads and tables of a companion process."""
    lm_head_VD, embedding_VD = unpack(tables)
    config = arguments.companion
    device = torch.device("cuda" if config.num_gpus and torch.cuda.is_available() else "cpu")
    if config.dtype is None and (
        torch.cuda.is_bf16_supported() if device.type == "cuda" else cpu_has_bfloat16()
    ):
        config = config.model_copy(update={"dtype": "bfloat16"})
    names = ("seed", "draft_temperature", "num_drafts", "draft_vocab")
    served: dict[str, Any] = {name: getattr(arguments, name) for name in names}
    state = unpack(arguments.initial_state)
    return Cycle(
        arguments.heads,
        config,
        lm_head_VD,
        initial_state=state,
        embedding_VD=embedding_VD,
        device=device,
        **served,
    )


def _same(tables: Any, used: Any) -> bool:
    """Whether both are the same object in Ray's store. Each call unpacks it anew, so addresses are
    compared. `TableRows` belong to one batch and need no such comparison.
    """
    if not isinstance(tables, tuple) or not isinstance(used, tuple):
        return tables is used
    return tables[0].array.ctypes.data == used[0].array.ctypes.data


def _ends_process(error: Exception) -> bool:
    """After a CUDA error every call fails, and only a new process helps. Running out of memory is
    not such an error.
    """
    return isinstance(error, torch.AcceleratorError) and not isinstance(
        error, torch.OutOfMemoryError
    )


def _may_pass(cause: BaseException | None) -> bool:
    """Whether what kept a file from being read says nothing about the file: an error of the disk,
    or too little memory, for which torch has no error of its own.
    """
    if isinstance(cause, RuntimeError):
        return "allocate memory" in str(cause)
    return isinstance(cause, OSError | MemoryError) and not isinstance(cause, FileNotFoundError)


def forget_oldest(newest: Path, pattern: str) -> None:
    """Keep `newest` and a few versions before it, so that an engine still reading an older one
    finds it.
    """
    written = newest.stat().st_mtime_ns

    def age(path: Path) -> tuple[bool, int, str]:
        # Not by number: an earlier run in this folder may have left higher ones. Files newer than
        # the newest were written before the clock was set back.
        modified = path.stat().st_mtime_ns
        return modified <= written, modified, path.name

    others = sorted((path for path in newest.parent.glob(pattern) if path != newest), key=age)
    for old in others[: 1 - KEPT_VERSIONS]:
        if old.is_dir():
            shutil.rmtree(old, ignore_errors=True)
        else:
            old.unlink(missing_ok=True)


def settle(config: CompanionConfig, takes_turns: bool = False) -> None:
    """Threads, cores and priority of this process, so that PPO keeps its own. One that takes turns
    with the loop has its priority: in a turn, other programs should not get more than the loop
    lets them have.
    """
    torch.set_num_threads(companion_threads(config.cores, alone=config.resource is not None))
    if config.cores:
        os.sched_setaffinity(0, set(config.cores))
    if not takes_turns:
        os.nice(NICENESS)
