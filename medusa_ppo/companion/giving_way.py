"""How the loop tells the companion that it needs the cores now.

While responses are written every second of a shared core is a second of the loop: drafting is to
save them. A message through Ray would come milliseconds late and wake a thread; a byte in shared
memory is read between two pieces of work and costs nothing.
"""

from __future__ import annotations

import mmap
import time
from pathlib import Path

GIVE_WAY_S = 0.005  # Between two looks at whether the loop still needs the cores.


class Pace:
    """A byte in shared memory by which the loop says that it needs the cores now, and the companion
    lets it have them.

    Where the companion runs on another node it has a byte of its own, which nobody sets.

    Attributes:
        waited_s: seconds for which way was given since they were taken last.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "pace", "ab") as file:
            if not file.tell():
                file.write(b"\0")
        with open(folder / "pace", "r+b") as file:
            self._byte = mmap.mmap(file.fileno(), 1)
        self.waited_s = 0.0

    def hold(self, wanted: bool) -> None:
        """The loop's end: from now on, the companion shall (not) wait."""
        self._byte[0] = int(wanted)

    @property
    def held(self) -> bool:
        """The loop wants the companion to wait."""
        return bool(self._byte[0])

    def give_way(self) -> None:
        """The companion's end, between two pieces of work: wait as long as the loop wants."""
        while self.held:
            time.sleep(GIVE_WAY_S)
            self.waited_s += GIVE_WAY_S

    def take_waited_s(self) -> float:
        """Seconds for which way was given; counting begins anew."""
        waited_s = self.waited_s
        self.waited_s = 0.0
        return waited_s
