"""The companion's queue of rollout batches, limited in bytes and in age.

Training may be slower than the loop. The loop must not wait for it, and hidden states must not pile
up in memory, so batches are dropped: the oldest first, because heads that learn from an old policy
draft worse for the new one.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

MAX_LAG = 2  # Policy versions.


class BatchQueue:
    """First in, first out, for any number of threads that put and one that gets. Putting never
    blocks.

    It is limited in bytes and in age: the oldest batch (anything with `nbytes` and
    `policy_version`) is dropped and counted. A batch that was taken out is in use until `done`, or
    until the next one is requested; until then its bytes count.

    Attributes:
        dropped: batches dropped so far.
        nbytes: bytes waiting now.
    """

    def __init__(self, max_bytes: int, max_lag: int = MAX_LAG) -> None:
        """
        Args:
            max_bytes: limit on the bytes of all batches together that wait or are in use.
            max_lag: policy versions that a waiting batch may be behind the newest. Otherwise a slow
                companion trains on ever staler rollouts.
        """
        self.max_bytes = max_bytes
        self.max_lag = max_lag
        self.nbytes = self.dropped = self._in_use = 0
        self._used: Any = None
        self._batches: deque[Any] = deque()
        self._closed = False
        self._changed = threading.Condition()

    def put(self, batch: Any, room: int = 0) -> int:
        """Append a batch, dropping the oldest ones until it fits. If it does not fit next to the
        batch in use, it is dropped itself.

        Args:
            batch: the new batch.
            room: bytes to keep free for batches in transit, as long as older batches can be dropped
                for it.

        Returns:
            Number of batches dropped by this call.
        """
        with self._changed:
            if self._closed or self._in_use + batch.nbytes > self.max_bytes:
                self.dropped += 1
                return 1
            dropped = 0
            oldest = batch.policy_version - self.max_lag
            while self._batches and (
                self._batches[0].policy_version < oldest
                or self.held_nbytes + batch.nbytes + room > self.max_bytes
            ):
                self.nbytes -= self._batches.popleft().nbytes
                dropped += 1
            self._batches.append(batch)
            self.nbytes += batch.nbytes
            self.dropped += dropped
            self._changed.notify()
            return dropped

    def get(self, timeout_s: float | None = None) -> Any | None:
        """Take the oldest batch; None if the time is up or the queue is closed and empty. Without a
        timeout it waits for one of these.
        """
        with self._changed:
            self._in_use, self._used = 0, None
            self._changed.wait_for(lambda: self._batches or self._closed, timeout_s)
            if not self._batches:
                return None
            batch = self._batches.popleft()
            self.nbytes -= batch.nbytes
            self._in_use, self._used = batch.nbytes, batch
            return batch

    def done(self) -> None:
        """Release the batch in use."""
        with self._changed:
            self._in_use, self._used = 0, None

    def held(self) -> list[Any]:
        """The batches that are in use or wait, in their order."""
        with self._changed:
            return [*([] if self._used is None else [self._used]), *self._batches]

    def close(self) -> None:
        """Wake all waiting threads; later batches are dropped."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def held_nbytes(self) -> int:
        """Bytes waiting and in use now."""
        return self.nbytes + self._in_use
