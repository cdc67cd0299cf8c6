"""The turns of a run whose roles are on the ranks of a Megatron actor.

With ppo.placement=shared a rank of an engine is on each rank's device. All roles of all ranks leave
before an engine wakes up. Ranks can read a role on their device only, because they join its parts
there; so whoever saves or sends one lets the engines sleep meanwhile.
"""

from __future__ import annotations

from typing import Any, Protocol

from medusa_ppo.config.ppo_section import SHARED
from medusa_ppo.contract import metrics as names
from medusa_ppo.ppo.placement import Turns


class Team(Protocol):
    """What is needed of the actor's ranks."""

    count: int

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method on all ranks."""


class TeamTurns(Turns):
    """`Turns` of the loop's process, which the ranks follow."""

    def __init__(self, placement: str, team: Team) -> None:
        super().__init__(placement)
        self.read_on_device = placement == SHARED
        self._team = team

    def clear(self) -> None:
        super().clear()
        if self.read_on_device:
            self._team.call("clear")

    def engine_has(self, count: int) -> None:
        super().engine_has(count)
        if self.read_on_device:
            self._team.call("engine_has", count // self._team.count)

    def take(self) -> dict[str, Any]:
        """The ranks have all other figures."""
        found = {names.ENGINE_WAKE_S: self._wake_s} if self._wake_s else {}
        self._wake_s = 0.0
        return found
