"""The companion on several workers, a team: the first one leads, the members learn the same from their own parts of each batch.

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
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from medusa_ppo.companion.cycle import Cycle, CycleReport
from medusa_ppo.companion.handover import ServiceArguments, pack, unpack
from medusa_ppo.companion.service import CompanionService, make_cycle, settle
from medusa_ppo.config import CompanionConfig
from medusa_ppo.hardware import companion_threads
from medusa_ppo.meeting import Meeting, PeerLostError, Place
from medusa_ppo.processes import TOKEN, in_bundle
from medusa_ppo.types import CompanionStatus, RolloutBatch

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0
MAX_RESTARTS = 100  # Of a process of the companion that ended.
GRACE_S = 30.0  # For the end of what a member is at, when the team breaks up.
ATTEMPTS = 3  # To learn a batch together; after them the leader learns it alone.


@dataclass(frozen=True)
class HandedBatch:
    """A batch in parts, as it lies in the leader's queue: references that keep the parts in Ray's store.

    Attributes:
        parts: one reference to a packed batch for each worker that there should be.
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
        "runtime_env": {"env_vars": {"OMP_NUM_THREADS": str(companion_threads(config.cores, alone=config.resource is not None))}},
        **in_bundle(group, index),
    }


class Member:
    """A worker beside the leader, in a Ray actor of its own. Its state is the leader's, its parts of the batches are its own."""

    def __init__(self, first: list[ray.ObjectRef]) -> None:
        arguments, tables = ray.get(first[0])
        settle(arguments.companion)
        self._cycle = make_cycle(arguments, ray.get(tables))
        self._tables = tables
        self._team: Meeting | None = None

    def name(self) -> str:
        """Name of this incarnation of the process."""
        return f"{os.getpid()}-{time.time_ns()}"

    def leave(self) -> None:
        """Out of the team, if there is one."""
        team, self._team = self._team, None
        if team is not None:
            team.leave()

    def join(self, place: Place, state: dict[str, Any]) -> None:
        """Into a new team, with the leader's state."""
        self._cycle.load_state_dict({name: tensor.clone() for name, tensor in unpack(state).items()})
        self._team = Meeting(place).join()
        self._cycle.join(self._team)

    def learn(self, parts: Sequence[ray.ObjectRef], tables: list[ray.ObjectRef]) -> str:
        """Learn from these parts, together with the others. Returns the checksum of the state."""
        try:
            if tables[0] != self._tables:
                self._cycle.trainer.set_tables(*unpack(ray.get(tables[0])))
                self._tables = tables[0]
            self._cycle.run(fetch(parts))
        except BaseException:
            self.leave()  # Whoever waits for this worker's sums is told.
            raise
        return self._cycle.digest()


def fetch(parts: Sequence[ray.ObjectRef]) -> RolloutBatch:
    """Neighbouring parts out of Ray's store, as one."""
    return RolloutBatch.join([unpack(part) for part in ray.get(list(parts))])


def deal(parts: Sequence[ray.ObjectRef], workers: int) -> list[Sequence[ray.ObjectRef]]:
    """Neighbouring parts for each worker, as evenly as it goes."""
    cuts = [len(parts) * index // workers for index in range(workers + 1)]
    return [parts[cuts[index] : cuts[index + 1]] for index in range(workers)]


@dataclass(eq=False)
class _Hold:
    """The leader's hold on a member. `name` is empty until it is up; `actor` is None when it was started too often."""

    index: int
    actor: Any = None
    naming: ray.ObjectRef | None = None
    name: str = ""
    starts: int = 0


class Team:
    """The leader's hold on its members: starts them, brings them into one team, replaces those that are lost."""

    def __init__(self, first: list[ray.ObjectRef], arguments: ServiceArguments, group: Any) -> None:
        """
        Args:
            first: reference to what every worker of the companion is built from.
            arguments: the same.
            group: placement group with a bundle for each worker; None: Ray finds a node for each.
        """
        config = arguments.companion
        self._first, self._config, self._hang_s, self._group = first, config, arguments.hang_s, group
        self._members = [_Hold(index) for index in range(1, config.workers)]
        self._meeting: Meeting | None = None
        self._together: list[_Hold] = []
        for member in self._members:
            self._start(member)
        ray.wait([member.naming for member in self._members], num_returns=len(self._members), timeout=START_TIMEOUT_S)

    @property
    def names(self) -> tuple[str, ...]:
        """Members of the team as it is."""
        return tuple(member.name for member in self._together)

    def assemble(self, cycle: Cycle) -> None:
        """One team of the leader and all members that are up. Nothing is done while they stay the same.

        Raises:
            PeerLostError: somebody was lost meanwhile.
        """
        if self._up() == self._together:
            return
        self.disband(cycle)
        members = self._asked_to_leave()
        if not members:
            return
        meeting = Meeting.open(ray.util.get_node_ip_address(), 1 + len(members), timeout_s=self._hang_s)
        state = ray.put(pack(cycle.state_dict()))
        calls = [member.actor.join.remote(meeting.place.seen_by(rank), state) for rank, member in enumerate(members, 1)]
        self._meeting, self._together = meeting.join(), members
        cycle.join(meeting)
        for member, call in zip(members, calls, strict=True):
            self._answer(member, call, self._hang_s)
        if not all(member.name for member in members):
            raise PeerLostError("A worker did not join the team.")

    def learn(self, cycle: Cycle, batch: HandedBatch, tables: list[ray.ObjectRef]) -> CycleReport:
        """Learn from a batch together.

        Raises:
            PeerLostError: a worker was lost; the cycle's state is between two states.
            Exception: what any worker raised about the batch.
        """
        own, *others = deal(batch.parts, 1 + len(self._together))
        calls = [member.actor.learn.remote(parts, tables) for member, parts in zip(self._together, others, strict=True)]
        try:
            report = cycle.run(fetch(own))
        except PeerLostError:
            self.disband(cycle)
            self._raise_fault(calls)
            raise
        except BaseException:
            self.disband(cycle)
            raise
        self._compare(cycle, calls)
        return report

    def disband(self, cycle: Cycle) -> None:
        """End the team; the next `assemble` makes a new one, in which all have the leader's state."""
        meeting, self._meeting = self._meeting, None
        self._together = []
        cycle.join(None)
        if meeting is not None:
            meeting.leave()

    def close(self) -> None:
        """End all members."""
        for member in self._members:
            if member.actor is not None:
                ray.kill(member.actor, no_restart=True)

    # ---- parts ------------------------------------------------------------------------------------------------------------

    def _start(self, member: _Hold) -> None:
        member.name, member.starts = "", member.starts + 1
        kind: Any = ray.remote(max_restarts=0, **actor_options(self._config, self._group, member.index))(Member)
        member.actor = kind.remote(self._first)
        member.naming = member.actor.name.remote()

    def _lost(self, member: _Hold, why: object) -> None:
        """End what may be left of a member, and start another in its place."""
        logger.warning("Worker %d of the companion is lost. %s", member.index, why)
        ray.kill(member.actor, no_restart=True)
        member.actor, member.naming, member.name = None, None, ""
        if member.starts <= MAX_RESTARTS:
            self._start(member)

    def _answer(self, member: _Hold, call: ray.ObjectRef, timeout_s: float) -> Any:
        """What a member answers; without an answer it is lost."""
        try:
            return ray.get(call, timeout=timeout_s)
        except RayError as error:
            self._lost(member, error)
            return None

    def _up(self) -> list[_Hold]:
        """Members that have come up, as far as is known."""
        for member in self._members:
            if not member.name and member.naming is not None and ray.wait([member.naming], timeout=0)[0]:
                member.name = self._answer(member, member.naming, GRACE_S) or ""
        return [member for member in self._members if member.name]

    def _asked_to_leave(self) -> list[_Hold]:
        """Members that answer, out of any team they were in; the others are replaced."""
        answers = [(member, member.actor.leave.remote()) for member in self._up()]
        for member, answer in answers:
            self._answer(member, answer, GRACE_S)
        return [member for member, _ in answers if member.name]

    def _raise_fault(self, calls: list[ray.ObjectRef]) -> None:
        """When a member raised an error of its own, that is what broke the team: the batch is to blame, and nobody is lost."""
        for call in calls:
            try:
                ray.get(call, timeout=GRACE_S)
            except (PeerLostError, RayActorError, GetTimeoutError) as error:
                logger.debug("A member's call ended with the team: %s", error)
            except RayTaskError as error:
                raise error.cause from error

    def _compare(self, cycle: Cycle, calls: list[ray.ObjectRef]) -> None:
        """Whoever came out with another state gets the leader's; a member that is lost now has done its part."""
        if not calls:
            return
        digest = cycle.digest()
        try:
            others = ray.get(calls, timeout=self._hang_s)
        except RayError as error:
            logger.warning("A worker of the companion was lost after a batch. %s", error)
            self.disband(cycle)
            return
        if any(other != digest for other in others):
            logger.error("The companion's workers hold different states after a batch; all take the leader's.")
            self.disband(cycle)


class Leader(CompanionService):
    """The service on the first of several workers. Batches come in parts, tables by reference."""

    def __init__(self, first: list[ray.ObjectRef], group: Any = None) -> None:
        """
        Args:
            first: reference to the ServiceArguments, and a reference to the tables.
            group: as for `Team`.
        """
        arguments: ServiceArguments
        arguments, tables = ray.get(first[0])
        settle(arguments.companion)
        self._team = Team(first, arguments, group)
        self._newest, self._used = [tables], [tables]
        super().__init__(arguments, ray.get(tables))
        with self._state_lock:
            self._assemble()

    def submit(self, batch: HandedBatch, tables: list[ray.ObjectRef]) -> int:  # type: ignore[override]
        """As `CompanionService.submit`; parts and tables stay in Ray's store until they are trained on."""
        self._newest = tables
        return self._enqueue(batch, None)

    def status(self) -> CompanionStatus:
        return dataclasses.replace(super().status(), workers=1 + len(self._team.names))

    def workers(self) -> tuple[str, ...]:
        """Names of all incarnations that learn now, the leader's own first."""
        return self._incarnation, *self._team.names

    def close(self) -> None:
        super().close()
        self._team.close()

    def _learn(self, batch: HandedBatch) -> CycleReport:
        """Together with the members; when one is lost, once more from the state before. Alone when that does not help."""
        cycle, tables = self._cycle, self._newest
        if tables[0] != self._used[0]:
            cycle.trainer.set_tables(*unpack(ray.get(tables[0])))
            self._used = tables
        before = cycle.state_dict()
        for _ in range(ATTEMPTS):
            try:
                self._team.assemble(cycle)
                return self._team.learn(cycle, batch, tables)
            except PeerLostError as error:
                logger.warning("The companion learns a batch once more. %s", error)
                self._team.disband(cycle)
                cycle.load_state_dict(before)
        return self._team.learn(cycle, batch, tables)

    def _assemble(self) -> None:
        try:
            self._team.assemble(self._cycle)
        except PeerLostError as error:
            logger.warning("The companion begins with fewer workers. %s", error)
            self._team.disband(self._cycle)
