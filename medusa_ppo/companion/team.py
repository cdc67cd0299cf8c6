"""The companion on several workers: torch's DDP over the group in which they meet, in actors of a
Ray placement group.

    PPO process -- a reference to the batch --> leader: queue, versions, files (service.py)
         |                                         |  learn
         |   the batch, through Ray's store        v
         +-------------------------------------> members
    all: the same order of positions, each with its share of every optimizer step; gradients are
        summed, so all hold the same state

Whatever breaks the group (a worker that dies, hangs or fails) ends the leader's process. Ray
restarts it, and it continues from the last saved state with the members that come up in time.
Workers that can't work together, or fail TRIES times without a batch in between, stay down and say
why: a hundred more starts would fail the same way.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from heads.errors import CompanionError, DataError
from medusa_ppo.companion.cycle import Cycle, CycleReport
from medusa_ppo.companion.service import CompanionService, make_cycle, settle
from medusa_ppo.companion.wire import PackedTensor, ServiceArguments, pack, unpack
from medusa_ppo.config.companion_section import CompanionConfig
from medusa_ppo.contract.status import CompanionStatus
from medusa_ppo.runtime import kept_memory
from medusa_ppo.runtime.hardware import companion_threads
from medusa_ppo.runtime.processes import TOKEN, in_bundle
from medusa_ppo.runtime.rendezvous import Meeting, PeerLostError, Place

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0
MAX_RESTARTS = 100  # Restarts of a companion whose process ended.
TRIES = 3  # Failures of the workers in a row without a batch in between.
FAILURES = "failures"
"""File next to the published versions with the reason for each of those failures, one per line."""
LOST = (PeerLostError, RayActorError, GetTimeoutError)
"""Errors that mean another process is gone or does not answer. All others come from the work
itself.
"""
SAID_S = 3.0  # Seconds within which a member that broke the group reports it.


@dataclass(frozen=True)
class HandedBatch:
    """A batch as it lies in the leader's queue: references (in lists, so that Ray does not fetch
    them) to it and to the tables, packed; and its number, as the client counts.
    """

    batch: list[ray.ObjectRef]
    tables: list[ray.ObjectRef]
    nbytes: int
    policy_version: int
    number: int


def actor_options(config: CompanionConfig, group: Any, index: int) -> dict[str, Any]:
    """Ray's options for a worker of the companion."""
    return {
        "num_cpus": 0,
        "num_gpus": config.num_gpus,
        "resources": {config.resource: TOKEN} if config.resource else None,
        "runtime_env": {
            "env_vars": {
                **kept_memory.environment(),
                "OMP_NUM_THREADS": str(
                    companion_threads(config.cores, alone=config.resource is not None)
                ),
            }
        },
        **in_bundle(group, index),
    }


class CompanionWorker:
    """One worker's cycle and its tables. The leader has one too."""

    def __init__(self, cycle: Cycle, tables: ray.ObjectRef) -> None:
        self._cycle = cycle
        self._tables = tables

    def learn(self, handed: HandedBatch) -> CycleReport:
        """Learn from a batch together with the others."""
        if handed.tables[0] != self._tables:
            self._cycle.take_tables(unpack(ray.get(handed.tables[0])))
            self._tables = handed.tables[0]
        return self._cycle.run(unpack(ray.get(handed.batch[0])))


class Member:
    """A worker besides the leader, in its own Ray actor, with the leader's state."""

    def __init__(self, first: list[ray.ObjectRef]) -> None:
        arguments, tables = ray.get(first[0])
        settle(arguments.companion)
        self._cycle = make_cycle(arguments, ray.get(tables))
        self._worker = CompanionWorker(self._cycle, tables)

    def name(self) -> str:
        """Name of this process."""
        return f"{os.getpid()}-{time.time_ns()}"

    def join(self, place: Place, state: dict[str, Any]) -> None:
        """Meet the others, with the leader's state."""
        self._cycle.load_state_dict(
            {name: tensor.clone() for name, tensor in unpack(state).items()}
        )
        meeting = Meeting(place)
        try:
            self._cycle.join(meeting.join())
        except Exception:
            meeting.leave()  # The others must not wait for it.
            raise

    def go_on_from(self, version: int, state: dict[str, PackedTensor], serving: int) -> None:
        """As the leader does, whose state is this one's."""
        self._cycle.go_on_from(version, unpack(state), serving)

    def learn(self, handed: HandedBatch) -> None:
        """As `CompanionWorker.learn`.

        The leader reports a batch that fits no worker. Any other failure ends this worker, which
        the others notice.
        """
        with contextlib.suppress(DataError):
            self._worker.learn(handed)


class Leader(CompanionService):
    """The service on the first of several workers. Batches and tables come by reference."""

    def __init__(self, first: list[ray.ObjectRef], group: Any = None) -> None:
        """
        Args:
            first: reference to the ServiceArguments, and a reference to the tables.
            group: placement group with a bundle for each worker; None: Ray finds a node for each.
        """
        arguments: ServiceArguments
        arguments, tables = ray.get(first[0])
        self._failures = Path(arguments.publish_dir) / FAILURES
        self._refuse_to_fail_again()
        settle(arguments.companion)
        kinds: list[Any] = [
            ray.remote(max_restarts=0, **actor_options(arguments.companion, group, index))(Member)
            for index in range(1, arguments.companion.workers)
        ]
        self._members: dict[str, Any] = _up([partial(kind.remote, first) for kind in kinds])
        super().__init__(arguments, ray.get(tables))
        self._worker = CompanionWorker(self._cycle, tables)
        with self._state_lock:
            self._assemble()

    def submit(
        self,
        batch: HandedBatch,
        tables: Any = None,
        number: int = 0,
        missing: Sequence[tuple[int, int]] = (),
    ) -> int:
        """As `CompanionService.submit`; batch and tables stay in Ray's store until they are trained
        on. No log-probs are missing: only a desk gets batches without, and it has one worker.
        """
        assert not missing, "a desk has a companion of one worker"
        return self._enqueue(batch)

    def status(self) -> CompanionStatus:
        return dataclasses.replace(super().status(), workers=self._processes)

    @property
    def _processes(self) -> int:
        return 1 + len(self._members)

    def workers(self) -> tuple[str, ...]:
        """Names of all processes that learn now, the leader's own first."""
        return self._incarnation, *self._members

    def close(self, *, alone: bool = False) -> None:
        super().close(alone=alone)
        self._end_members()

    def _refuse_to_fail_again(self) -> None:
        """Raise CompanionError if the last TRIES starts have failed."""
        failures = self._failures.read_text().splitlines() if self._failures.is_file() else []
        if len(failures) >= TRIES:
            raise CompanionError(
                "The companion's workers keep failing.",
                given=f"{len(failures)} failures, no batch in between; the last: {failures[-1]}",
                expected="workers that start and learn from a batch",
                do="Remove the cause, or set companion.workers=1; the current heads stay.",
            )

    def _assemble(self) -> None:
        """Form one group of all workers that came up.

        Raises:
            CompanionError: all are up, but can't work together.
        """
        if not self._members:
            return
        calls: list[ray.ObjectRef] = []
        meeting = None
        try:
            meeting = Meeting.open(
                ray.util.get_node_ip_address(),
                1 + len(self._members),
                timeout_s=self._arguments.hang_s,
            )
            state = ray.put(pack(self._cycle.state_dict()))
            calls = [
                member.join.remote(meeting.place.seen_by(rank), state)
                for rank, member in enumerate(self._members.values(), 1)
            ]
            self._cycle.join(meeting.join())
            ray.get(calls, timeout=self._arguments.hang_s)
        except Exception as error:
            cause = _cause(error, calls)
            if isinstance(cause, LOST):
                self._start_again(f"The workers did not meet: {cause}")
            self._end_members()
            raise CompanionError(
                "The companion's workers can't work together.",
                given=f"{type(cause).__name__}: {cause}",
                expected=f"{1 + len(self._members)} workers that sum their gradients",
                do="Remove the cause, or set companion.workers=1.",
            ) from cause

    def _learn(self, batch: HandedBatch) -> CycleReport:
        with self._all_or_none():
            calls = [member.learn.remote(batch) for member in self._members.values()]
            report = self._worker.learn(batch)
            ray.get(calls, timeout=self._arguments.hang_s)
            self._failures.unlink(missing_ok=True)
            return report

    def _go_on_from(self, version: int, state: dict[str, PackedTensor], serving: int) -> None:
        # First here: heads that don't fit are refused, and nobody has changed.
        super()._go_on_from(version, state, serving)
        with self._all_or_none():
            handed = ray.put(state)
            calls = [
                member.go_on_from.remote(version, handed, serving)
                for member in self._members.values()
            ]
            ray.get(calls, timeout=self._arguments.hang_s)

    @contextlib.contextmanager
    def _all_or_none(self) -> Iterator[None]:
        """Inside, all workers do the same. After an error, in this one or another, it is unknown
        what state the others have: all start again. A batch that fits none has changed none.
        """
        try:
            yield
        except DataError:
            raise
        except Exception as error:
            self._start_again(
                f"A worker of the companion was lost: {type(error).__name__}: {error}"
            )
            raise

    def _start_again(self, why: str) -> None:
        with self._failures.open("a") as file:
            file.write(" ".join(why.split()) + "\n")
        self._end_members()
        super()._start_again(why)

    def _end_members(self) -> None:
        for member in self._members.values():
            ray.kill(member, no_restart=True)


def _cause(error: Exception, calls: Sequence[ray.ObjectRef]) -> Exception:
    """What broke a group: the error of the first member that ended, else the leader's own. A
    failing member leaves, and the others only see a closed connection.
    """
    ended = ray.wait(list(calls), timeout=SAID_S)[0] if calls else []
    for call in ended:
        try:
            ray.get(call)
        except RayTaskError as failed:
            return failed.cause if isinstance(failed.cause, Exception) else failed
        except RayError as failed:
            return failed
    return error


def _up(start: list[Callable[[], Any]]) -> dict[str, Any]:
    """The members that come up in time, by name; the others are ended.

    One that dies meanwhile is started once more: Ray may have placed it on a lost node, which it
    notices only after some time.
    """
    found = {}
    ends = time.monotonic() + START_TIMEOUT_S
    for again in (True, False):
        actors = [(one, one()) for one in start]
        calls = {actor.name.remote(): (one, actor) for one, actor in actors}
        ready, late = ray.wait(
            list(calls), num_returns=len(calls), timeout=max(0.0, ends - time.monotonic())
        )
        start = []
        for call in ready:
            one, actor = calls[call]
            try:
                found[ray.get(call)] = actor
            except RayError as error:
                start.append(one)
                what = "it is started once more" if again else "the others go on without it"
                logger.warning("A worker of the companion did not start; %s. %s", what, error)
        for call in late:
            logger.warning(
                "A worker of the companion did not come up within %.0f s; the others continue "
                "without it.",
                START_TIMEOUT_S,
            )
            ray.kill(calls[call][1], no_restart=True)
        if not start:
            break
    return found
