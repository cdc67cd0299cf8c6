"""The companion on several workers: the first one leads, the members learn the same from their own parts of each batch.

    PPO process -- references to the parts --> leader: queue, versions, files (service.py)
         |                                        |  who takes which part
         |   parts, through Ray's store           v
         +------------------------------------> members
    all: the same optimizer steps on summed gradients, one verdict on pooled counts, and so the same state, compared by checksum

What is learned does not depend on who has which part. So a batch in which a worker is lost is learned again by those that are left, and
a new worker joins with the leader's state as soon as it is up.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import ray
import torch
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from medusa_ppo.companion.cycle import Learner, LearnReport
from medusa_ppo.companion.handover import PackedBatch, pack_tensor, unpack_batch, unpack_tensor
from medusa_ppo.companion.service import CompanionService, PackedTables, ServiceArguments, make_learner, settle, unpack_tables
from medusa_ppo.companion.team import GlooTeam, TeamLostError, open_place
from medusa_ppo.config import CompanionConfig
from medusa_ppo.processes import TOKEN, place
from medusa_ppo.types import CompanionStatus, RolloutBatch

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0
GRACE_S = 30.0  # For the end of what a member is at, when the team breaks up.
ATTEMPTS = 3  # To learn a batch together; after them the leader learns it alone.


@dataclass(frozen=True)
class HandedBatch:
    """A batch in parts, as it lies in the leader's queue: references that keep the parts in Ray's store.

    Attributes:
        parts: one reference to a PackedBatch for each worker that there should be.
        nbytes: bytes of all parts.
        policy_version: of the batch.
    """

    parts: tuple[ray.ObjectRef, ...]
    nbytes: int
    policy_version: int


def actor_options(config: CompanionConfig, group: Any, index: int) -> dict[str, Any]:
    """Ray's options for a worker of the companion."""
    return {
        "num_cpus": 0,
        "num_gpus": config.num_gpus,
        "resources": {config.resource: TOKEN} if config.resource else None,
        "runtime_env": {"env_vars": {"OMP_NUM_THREADS": str(config.threads)}},
        **place(group, index),
    }


class Member:
    """A worker beside the leader, in a Ray actor of its own. Its state is the leader's, its parts of the batches are its own."""

    def __init__(self, first: list[ray.ObjectRef]) -> None:
        arguments, tables = ray.get(first[0])
        settle(arguments.companion)
        self._learner = make_learner(arguments, ray.get(tables))
        self._tables = tables
        self._team: GlooTeam | None = None

    def name(self) -> str:
        """Name of this incarnation of the process."""
        return f"{os.getpid()}-{time.time_ns()}"

    def leave(self) -> None:
        """Out of the team, if there is one."""
        team, self._team = self._team, None
        if team is not None:
            team.leave()

    def join(self, where: tuple[str, int], rank: int, size: int, timeout_s: float, state: dict[str, Any]) -> None:
        """Into a new team, with the leader's state."""
        self._learner.load_state_dict({name: unpack_tensor(tensor).clone() for name, tensor in state.items()})
        self._team = GlooTeam.at(where, rank, size, timedelta(seconds=timeout_s))
        self._learner.join(self._team)

    def learn(self, parts: Sequence[ray.ObjectRef], tables: list[ray.ObjectRef]) -> str:
        """Learn from these parts, together with the others. Returns the checksum of the state."""
        try:
            if tables[0] != self._tables:
                self._learner.set_tables(*unpack_tables(ray.get(tables[0])))
                self._tables = tables[0]
            self._learner.learn(fetch(parts))
        except BaseException:
            self.leave()  # Whoever waits for this worker's sums is told.
            raise
        return self._learner.digest()


def fetch(parts: Sequence[ray.ObjectRef]) -> RolloutBatch:
    """Neighbouring parts out of Ray's store, as one."""
    packed: list[PackedBatch] = ray.get(list(parts))
    return RolloutBatch.join([unpack_batch(part) for part in packed])


def deal(parts: Sequence[ray.ObjectRef], workers: int) -> list[Sequence[ray.ObjectRef]]:
    """Neighbouring parts for each worker, as evenly as it goes."""
    cuts = [len(parts) * index // workers for index in range(workers + 1)]
    return [parts[cuts[index] : cuts[index + 1]] for index in range(workers)]


@dataclass(eq=False)
class _Seat:
    """A member's place. `name` is empty until it is up; `actor` is None when it was started too often."""

    index: int
    actor: Any = None
    naming: ray.ObjectRef | None = None
    name: str = ""
    starts: int = 0


class Crew:
    """The leader's hold on its members: starts them, brings them into one team, replaces those that are lost."""

    def __init__(self, first: list[ray.ObjectRef], config: CompanionConfig, group: Any) -> None:
        """
        Args:
            first: reference to what every worker of the companion is built from.
            config: the companion's section.
            group: placement group with a bundle for each worker; None: Ray finds a node for each.
        """
        self._first, self._config, self._group = first, config, group
        self._seats = [_Seat(index) for index in range(1, config.workers)]
        self._team: GlooTeam | None = None
        self._together: list[_Seat] = []
        for seat in self._seats:
            self._start(seat)
        ray.wait([seat.naming for seat in self._seats], num_returns=len(self._seats), timeout=START_TIMEOUT_S)

    @property
    def names(self) -> tuple[str, ...]:
        """Members of the team as it is."""
        return tuple(seat.name for seat in self._together)

    def assemble(self, learner: Learner) -> None:
        """One team of the leader and all members that are up. Nothing is done while they stay the same.

        Raises:
            TeamLostError: somebody was lost meanwhile.
        """
        if self._up() == self._together:
            return
        self.disband(learner)
        seats = self._asked_to_leave()
        if not seats:
            return
        timeout_s, size = self._config.hang_s, 1 + len(seats)
        store, where = open_place(ray.util.get_node_ip_address(), size, timedelta(seconds=timeout_s))
        state = ray.put({name: pack_tensor(tensor) for name, tensor in learner.state_dict().items()})
        calls = [seat.actor.join.remote(where, rank, size, timeout_s, state) for rank, seat in enumerate(seats, 1)]
        self._team = GlooTeam(store, 0, size, timedelta(seconds=timeout_s))
        learner.join(self._team)
        self._together = seats
        for seat, call in zip(seats, calls, strict=True):
            try:
                ray.get(call, timeout=timeout_s)
            except RayError as error:
                self._lost(seat, error)
        if not all(seat.name for seat in seats):
            raise TeamLostError("A worker did not join the team.")

    def learn(self, learner: Learner, batch: HandedBatch, tables: list[ray.ObjectRef]) -> LearnReport:
        """Learn from a batch together.

        Raises:
            TeamLostError: a worker was lost; the learner's state is between two states.
            Exception: what any worker raised about the batch.
        """
        own, *others = deal(batch.parts, 1 + len(self._together))
        calls = [seat.actor.learn.remote(parts, tables) for seat, parts in zip(self._together, others, strict=True)]
        try:
            report = learner.learn(fetch(own))
        except TeamLostError:
            self.disband(learner)
            self._raise_fault(calls)
            raise
        except BaseException:
            self.disband(learner)
            raise
        self._compare(learner, calls)
        return report

    def disband(self, learner: Learner) -> None:
        """End the team; the next `assemble` makes a new one, in which all have the leader's state."""
        team, self._team = self._team, None
        self._together = []
        learner.join(None)
        if team is not None:
            team.leave()

    def close(self) -> None:
        """End all members."""
        for seat in self._seats:
            if seat.actor is not None:
                ray.kill(seat.actor, no_restart=True)

    # ---- parts ------------------------------------------------------------------------------------------------------------

    def _start(self, seat: _Seat) -> None:
        seat.name, seat.starts = "", seat.starts + 1
        kind: Any = ray.remote(max_restarts=0, **actor_options(self._config, self._group, seat.index))(Member)
        seat.actor = kind.remote(self._first)
        seat.naming = seat.actor.name.remote()

    def _lost(self, seat: _Seat, why: object) -> None:
        """End what may be left of a member, and start another in its place."""
        logger.warning("Worker %d of the companion is lost. %s", seat.index, why)
        ray.kill(seat.actor, no_restart=True)
        seat.actor, seat.naming, seat.name = None, None, ""
        if seat.starts <= self._config.max_restarts:
            self._start(seat)

    def _up(self) -> list[_Seat]:
        """Members that have come up, as far as is known."""
        for seat in self._seats:
            if not seat.name and seat.naming is not None and ray.wait([seat.naming], timeout=0)[0]:
                try:
                    seat.name = ray.get(seat.naming)
                except RayError as error:
                    self._lost(seat, error)
        return [seat for seat in self._seats if seat.name]

    def _asked_to_leave(self) -> list[_Seat]:
        """Members that answer, out of any team they were in; the others are replaced."""
        answers = [(seat, seat.actor.leave.remote()) for seat in self._up()]
        for seat, answer in answers:
            try:
                ray.get(answer, timeout=GRACE_S)
            except RayError as error:
                self._lost(seat, error)
        return [seat for seat, _ in answers if seat.name]

    def _raise_fault(self, calls: list[ray.ObjectRef]) -> None:
        """When a member raised an error of its own, that is what broke the team: the batch is to blame, and nobody is lost."""
        for call in calls:
            try:
                ray.get(call, timeout=GRACE_S)
            except (TeamLostError, RayActorError, GetTimeoutError) as error:
                logger.debug("A member's call ended with the team: %s", error)
            except RayTaskError as error:
                raise error.cause from error

    def _compare(self, learner: Learner, calls: list[ray.ObjectRef]) -> None:
        """Whoever came out with another state gets the leader's; a member that is lost now has done its part."""
        if not calls:
            return
        digest = learner.digest()
        try:
            others = ray.get(calls, timeout=self._config.hang_s)
        except RayError as error:
            logger.warning("A worker of the companion was lost after a batch. %s", error)
            self.disband(learner)
            return
        if any(other != digest for other in others):
            logger.error("The companion's workers hold different states after a batch; all take the leader's.")
            self.disband(learner)


class Leader(CompanionService):
    """The service on the first of several workers. Batches come in parts, tables by reference."""

    def __init__(self, first: list[ray.ObjectRef], group: Any = None) -> None:
        """
        Args:
            first: reference to the ServiceArguments, and a reference to the tables.
            group: as for `Crew`.
        """
        arguments: ServiceArguments
        arguments, tables = ray.get(first[0])
        self._crew = Crew(first, arguments.companion, group)
        self._newest, self._used = [tables], [tables]
        super().__init__(arguments, ray.get(tables))
        with self._state_lock:
            self._assemble()

    def submit(self, batch: HandedBatch, tables: list[ray.ObjectRef]) -> int:  # type: ignore[override]
        """As `CompanionService.submit`; parts and tables stay in Ray's store until they are trained on."""
        self._newest = tables
        return self._enqueue(batch, None)

    def status(self) -> CompanionStatus:
        return dataclasses.replace(super().status(), workers=1 + len(self._crew.names))

    def workers(self) -> tuple[str, ...]:
        """Names of all incarnations that learn now, the leader's own first."""
        return self._incarnation, *self._crew.names

    def close(self) -> None:
        super().close()
        self._crew.close()

    def _learn(self, batch: HandedBatch) -> LearnReport:
        """Together with the members; when one is lost, once more from the state before. Alone when that does not help."""
        learner, tables = self._learner, self._newest
        if tables[0] != self._used[0]:
            learner.set_tables(*_tables(tables))
            self._used = tables
        before = learner.state_dict()
        for _ in range(ATTEMPTS):
            try:
                self._crew.assemble(learner)
                return self._crew.learn(learner, batch, tables)
            except TeamLostError as error:
                logger.warning("The companion learns a batch once more. %s", error)
                self._crew.disband(learner)
                learner.load_state_dict(before)
        return self._crew.learn(learner, batch, tables)

    def _assemble(self) -> None:
        try:
            self._crew.assemble(self._learner)
        except TeamLostError as error:
            logger.warning("The companion begins with fewer workers. %s", error)
            self._crew.disband(self._learner)


def _tables(tables: list[ray.ObjectRef]) -> tuple[torch.Tensor, torch.Tensor | None]:
    packed: PackedTables = ray.get(tables[0])
    return unpack_tables(packed)
