"""How the loop tells the companion that it needs the cores now, or that it needs none of them.

While responses are being written, every second of a shared core is a second of the loop, which
drafting is meant to save. A message through Ray would arrive milliseconds late and wake a thread; a
byte in shared memory is read between two pieces of work and costs nothing.
"""

from __future__ import annotations

import mmap
import secrets
import time
from pathlib import Path

GIVE_WAY_S = 0.005  # Seconds between two checks whether the loop still needs the cores.
GO_ON, WAIT, TAKE_ALL = range(3)
NAME_BYTES = 16


class Pace:
    """A byte in shared memory that the loop sets while it needs the cores, so that the companion
    pauses, and while it waits for the companion, which then takes all of them.

    On another node the companion has its own byte, which is never set.

    Attributes:
        name: random, the same for all who see the same byte.
        waited_s: seconds waited so far; who reads it may set it to 0.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "pace", "ab") as file:
            if not file.tell():
                file.write(b"\0" + secrets.token_bytes(NAME_BYTES))
        with open(folder / "pace", "r+b") as file:
            self._byte = mmap.mmap(file.fileno(), 1 + NAME_BYTES)
        self.name = self._byte[1:]
        self.waited_s = 0.0

    def hold(self, wanted: bool) -> None:
        """The loop calls this to let the companion wait, or continue."""
        self._byte[0] = WAIT if wanted else GO_ON

    def hand_over(self) -> None:
        """The loop calls this when it waits for the companion, until it calls `hold`."""
        self._byte[0] = TAKE_ALL

    @property
    def has_all(self) -> bool:
        """Whether the loop waits for the companion."""
        return self._byte[0] == TAKE_ALL

    @property
    def held(self) -> bool:
        """Whether the loop wants the companion to wait."""
        return self._byte[0] == WAIT

    def give_way(self, rest_s: float = 0.0) -> None:
        """Wait for as long as the loop wants, and at least `rest_s` unless it hands over. The
        companion calls this between pieces of work.
        """
        now = time.monotonic()
        ends = now + rest_s
        while self.held or (now < ends and not self.has_all):
            time.sleep(GIVE_WAY_S)
            # On a busy machine a sleep takes longer.
            began, now = now, time.monotonic()
            self.waited_s += now - began
