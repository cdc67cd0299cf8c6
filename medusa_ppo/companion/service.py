"""The companion's own process: a queue of batches, one training thread, and published versions. Ray hosts it; it knows nothing of Ray.

All methods may be called from any thread; `submit` by one at a time, so that batches keep their order (the client sees to it).

After a crash Ray builds the service again from the same arguments, perhaps on another node. It finds the marker that the first one left
in the run's folder, and goes on from the last saved state and, on the same node, the last published version.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from heads.checkpoint import load_state, save_state
from heads.heads_config import HeadsConfig
from medusa_ppo.companion.buffer import BoundedQueue
from medusa_ppo.companion.cycle import Learner, LearnReport
from medusa_ppo.companion.handover import PackedBatch, PackedTensor, pack_tensor, unpack_batch, unpack_tensor
from medusa_ppo.companion.publisher import Publisher
from medusa_ppo.config import CompanionConfig
from medusa_ppo.types import CompanionStatus, PublishedHeads

logger = logging.getLogger(__name__)

STATE_FILE = "companion.safetensors"
MARKER = "started"
HOST = torch.device("cpu")


@dataclass(frozen=True)
class PackedTables:
    """The actor's frozen tables on their way: lm_head, and the embedding table for kinds that read it."""

    lm_head: PackedTensor
    embedding: PackedTensor | None = None


@dataclass(frozen=True)
class ServiceArguments:
    """What a service is built from, and built again from after a crash.

    Attributes:
        heads: sizes and kind of the heads.
        companion: the companion's section of the configuration.
        seed: seed of everything random in it.
        initial_state: trainable tensors to start from; None: zero start.
        run_dir: the run's folder (native checkpoints, state for a restart); empty: nothing is written there.
        publish_dir: folder in shared memory for published versions.
        resume_from: folder with a saved state to go on from; empty: begin anew.
    """

    heads: HeadsConfig
    companion: CompanionConfig
    seed: int
    initial_state: dict[str, PackedTensor] | None
    run_dir: str
    publish_dir: str
    resume_from: str = ""


@dataclass(frozen=True)
class Answer:
    """Reply to a poll: a newer version if there is one, what failed last (a batch that was merely skipped is no failure), and how many
    bytes of batches are held."""

    published: PublishedHeads | None
    error: str
    incarnation: str
    held_bytes: int = 0


class CompanionService:
    """Trains on submitted batches in a thread of its own and publishes what the gate lets through."""

    def __init__(self, arguments: ServiceArguments, tables: PackedTables) -> None:
        config = arguments.companion
        settle(config)
        self._config = config
        self._incarnation = f"{os.getpid()}-{time.time_ns()}"
        self._learner = make_learner(arguments, tables)
        self._device = self._learner.trainer.device
        self._run_dir = Path(arguments.run_dir) if arguments.run_dir else None
        self._publisher = Publisher(Path(arguments.publish_dir), self._run_dir / "heads" if self._run_dir else None)
        self._published: PublishedHeads | None = None
        self._tables: PackedTables | None = None
        self._queue: BoundedQueue[Any] = BoundedQueue(config.queue_bytes, config.queue_lag)
        self._state_lock = threading.Lock()
        self._idle = threading.Condition()
        self._outstanding = 0
        self._received = 0
        self._dropped_before = 0
        self._train_s = 0.0
        self._busy_since: float | None = None
        self._error = ""  # What failed with the last batch.
        self._note = ""  # Why the last batch was of no use, though nothing failed.
        self._begin(arguments)
        self._rest()
        self._thread = threading.Thread(target=self._run, name="companion-training", daemon=True)
        self._thread.start()

    # ---- what the client calls ------------------------------------------------------------------------------------------

    def ready(self) -> str:
        """Name of this incarnation of the process; changes when it was started again."""
        return self._incarnation

    def submit(self, packed: PackedBatch, tables: PackedTables | None = None) -> int:
        """Queue a batch. Never blocks; the oldest that wait go when they are too old or too many bytes (the next one counted).

        Args:
            packed: the batch.
            tables: the actor's tables now, used from the next training on; None: as before.

        Returns:
            Bytes of the batches that wait or are in training now.
        """
        return self._enqueue(unpack_batch(packed), tables)

    def _enqueue(self, batch: Any, tables: PackedTables | None) -> int:
        with self._idle:
            self._tables = tables or self._tables
            self._received += 1
            self._outstanding += 1 - self._queue.put(batch, room=batch.nbytes)
            self._idle.notify_all()
            return self._queue.held_nbytes

    def newest(self, after_version: int) -> Answer:
        """The last published version if it is newer than `after_version`."""
        published = self._published
        if published is not None and published.version <= after_version:
            published = None
        return Answer(published, self._error, self._incarnation, self._queue.held_nbytes)

    def published_state(self, version: int) -> dict[str, PackedTensor] | None:
        """Tensors of the last published version, for a client on another node; None when `version` is not the last any more."""
        published = self._published
        if published is None or published.version != version:
            return None
        return {name: pack_tensor(tensor) for name, tensor in load_state(published.path).items()}

    def status(self) -> CompanionStatus:
        """What has been done so far."""
        learner = self._learner
        running_s = 0.0 if self._busy_since is None else time.monotonic() - self._busy_since
        return CompanionStatus(
            alive=self._thread.is_alive(),
            batches_received=self._received,
            batches_dropped=self._dropped_before + self._queue.dropped,
            batches_trained=learner.batches_trained,
            trained_tokens=learner.trained_tokens,
            optimizer_steps=learner.optimizer_steps,
            versions_published=learner.version,
            candidates_rejected=learner.candidates_rejected,
            train_s=self._train_s + running_s,
            queue_bytes=self._queue.nbytes,
            last_loss=learner.last_loss,
            last_policy_version=learner.last_policy_version,
            serving=learner.rows.get("serving"),
            candidate=learner.rows.get("candidate"),
            frozen=learner.rows.get("frozen"),
            upper=learner.rows.get("upper"),
            upper_serving=learner.rows.get("upper_serving"),
            upper_batch=learner.upper_batch,
            error=self._error or self._note,
            losses=learner.last_losses,
            passes=learner.schedule.last.passes,
            reason=learner.schedule.last.reason,
            positions_frac=learner.positions_frac,
            rate=learner.trainer.rate,
            gpu_gib=torch.cuda.memory_reserved(self._device) / 1024**3 if self._device.type == "cuda" else None,
        )

    def drain(self, timeout_s: float) -> bool:
        """Wait until everything submitted is trained; False when the time is up first."""
        with self._idle:
            return self._idle.wait_for(lambda: self._outstanding <= 0, timeout_s)

    def save(self, folder: str) -> str:
        """Write the whole state, after the batch in training, into `folder`, atomically. Returns the file's path."""
        with self._state_lock:
            path = Path(folder) / STATE_FILE
            path.parent.mkdir(parents=True, exist_ok=True)
            save_state(path, self._state())
            return str(path)

    def close(self) -> None:
        """Stop the training thread after the batch it is at."""
        self._queue.close()
        self._thread.join(timeout=10)

    # ---- the training thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (batch := self._queue.get()) is not None:
            started = time.monotonic()
            self._busy_since = started
            try:
                with self._state_lock:
                    if self._config.offload:
                        self._learner.move_to(self._device)
                    self._use_tables()
                    report = self._learn(batch)
                self._error, self._note = "", report.problem
                self._checkpoint()  # Before the version is shown to anybody: a crash in between must not lose it.
                if report.published:
                    self._publish()
            except (
                Exception
            ) as error:  # One bad batch must not end the companion; it is counted, told in the status, and the next one comes.
                logger.exception("The companion could not learn from a batch of policy version %d.", batch.policy_version)
                self._error = f"{type(error).__name__}: {error}"
            finally:
                self._rest()
                self._busy_since = None
                self._train_s += time.monotonic() - started
                del batch  # Its shared memory must not wait for the next one.
                self._queue.done()
                with self._idle:
                    self._outstanding -= 1
                    self._idle.notify_all()

    def _learn(self, batch: Any) -> LearnReport:
        """A batch as it lay in the queue."""
        return self._learner.learn(batch)

    def _rest(self) -> None:
        """Leave the GPU to others while no batch waits; what was computed there is in the host's memory then."""
        if not self._config.offload or len(self._queue):
            return
        with self._state_lock:
            self._learner.move_to(HOST)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _use_tables(self) -> None:
        """The newest tables that came; with a backlog they are a little newer than the batch's states."""
        with self._idle:
            tables, self._tables = self._tables, None
        if tables is not None:
            self._learner.set_tables(*unpack_tables(tables))

    def _publish(self) -> None:
        learner = self._learner
        row = learner.rows.get("candidate" if learner.fresh else "serving")
        length = row.mean_acceptance_length if row else math.nan
        metadata: dict[str, object] = {
            "policy_version": learner.published_policy_version,
            "trained_tokens": learner.trained_tokens,
            "replay_mean_acceptance_length": length if row else None,
        }
        path, digest = self._publisher.publish(learner.serving, learner.version, learner.lm_head_VD, metadata)
        self._published = PublishedHeads(learner.version, str(path), digest, learner.published_policy_version, length)

    def _checkpoint(self) -> None:
        every = self._config.checkpoint_every
        if self._run_dir is not None and every and self._learner.batches_trained % every == 0:
            self.save(str(self._run_dir / "companion"))

    def _begin(self, arguments: ServiceArguments) -> None:
        """A first start, a resumed run, or a restart after a crash."""
        # Without a run's folder the versions on this node are all there is.
        marker = (self._run_dir / "companion" if self._run_dir else Path(arguments.publish_dir)) / MARKER
        again = marker.is_file() and marker.read_text() == arguments.publish_dir  # Not what an earlier run left.
        folder = Path(arguments.resume_from) if arguments.resume_from else None
        if again:
            logger.warning("The companion was started again after its process ended.")
            if self._run_dir is not None and (self._run_dir / "companion" / STATE_FILE).is_file():
                folder = self._run_dir / "companion"
        if folder is not None:
            self._take_over(load_state(folder / STATE_FILE))
        if not again:
            self._own_saved_state(resumed=folder is not None)
        newest = self._publisher.newest()
        if newest is not None and newest[0] > self._learner.version:
            self._learner.adopt(*newest)
        if self._learner.version > 0:
            self._publish()
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.write_text(arguments.publish_dir)

    def _own_saved_state(self, resumed: bool) -> None:
        """What an earlier run, or the part of this one that is done again, left here must not be what a crash goes back to."""
        if self._run_dir is None:
            return
        if resumed:
            self.save(str(self._run_dir / "companion"))
        else:
            (self._run_dir / "companion" / STATE_FILE).unlink(missing_ok=True)

    def _state(self) -> dict[str, torch.Tensor]:
        own = [float(self._received), float(self._dropped_before + self._queue.dropped), self._train_s]
        return self._learner.state_dict() | {"service": torch.tensor(own, dtype=torch.float64)}

    def _take_over(self, state: dict[str, torch.Tensor]) -> None:
        received, dropped, self._train_s = state.pop("service", torch.zeros(3)).tolist()
        self._received, self._dropped_before = int(received), int(dropped)
        self._learner.load_state_dict(state)


def make_learner(arguments: ServiceArguments, tables: PackedTables) -> Learner:
    """The learner that a process of the companion begins with."""
    config, initial = arguments.companion, arguments.initial_state
    lm_head_VD, embedding_VD = unpack_tables(tables)
    return Learner(
        arguments.heads,
        config,
        lm_head_VD,
        seed=arguments.seed,
        initial_state=None if initial is None else {name: unpack_tensor(tensor).clone() for name, tensor in initial.items()},
        embedding_VD=embedding_VD,
        device=torch.device("cuda" if config.num_gpus > 0 and torch.cuda.is_available() else "cpu"),
    )


def unpack_tables(tables: PackedTables) -> tuple[torch.Tensor, torch.Tensor | None]:
    """lm_head and, for kinds that read it, the embedding."""
    return unpack_tensor(tables.lm_head), None if tables.embedding is None else unpack_tensor(tables.embedding)


def settle(config: CompanionConfig) -> None:
    """Threads, cores and priority of this process, so that PPO keeps its own."""
    torch.set_num_threads(config.threads)
    if config.cores:
        os.sched_setaffinity(0, set(config.cores))
    if config.niceness:
        os.nice(config.niceness)
