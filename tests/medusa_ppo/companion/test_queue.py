"""The queue keeps its byte budget, drops the oldest batch and never blocks the one who puts."""

from __future__ import annotations

import threading
import time

import torch

from medusa_ppo.companion.batch_queue import BatchQueue
from medusa_ppo.contract.rollout_batch import RolloutBatch


def batch_of(rows: int, version: int = 0) -> RolloutBatch:
    """One sequence of `rows` tokens; 4 states of float32 each: 16 + 8 + 4 bytes per row, plus 8."""
    return RolloutBatch(
        torch.zeros(rows, 4),
        torch.zeros(rows, dtype=torch.int64),
        torch.zeros(rows),
        torch.tensor([rows]),
        policy_version=version,
    )


def test_order_and_bytes() -> None:
    queue = BatchQueue(10_000, 10)
    assert [queue.put(batch_of(10, v)) for v in range(3)] == [0, 0, 0]
    assert len(queue) == 3 and queue.nbytes == 3 * 288
    assert [queue.get(0).policy_version for _ in range(3)] == [0, 1, 2]
    assert queue.nbytes == 0 and queue.get(0) is None


def test_oldest_goes_until_the_new_one_fits() -> None:
    queue = BatchQueue(3 * 288, 10)
    for version in range(3):
        queue.put(batch_of(10, version))
    assert queue.put(batch_of(15, 3)) == 2
    assert queue.nbytes <= queue.max_bytes and queue.dropped == 2
    assert [queue.get(0).policy_version for _ in range(2)] == [2, 3]


def test_a_batch_over_the_budget_does_not_push_the_others_out() -> None:
    queue = BatchQueue(400, 10)
    queue.put(batch_of(10, 1))
    assert queue.put(batch_of(100, 2)) == 1
    assert queue.dropped == 1 and queue.get(0).policy_version == 1


def test_batches_of_old_policies_go() -> None:
    queue = BatchQueue(10_000, 1)
    assert [queue.put(batch_of(10, v)) for v in (0, 0, 1, 1, 2)] == [0, 0, 0, 0, 2], (
        "batches of one policy are equally good"
    )
    assert (len(queue), queue.nbytes, queue.dropped) == (3, 3 * 288, 2)
    assert queue.put(batch_of(10, 9)) == 3 and queue.get(0).policy_version == 9


def test_a_batch_in_use_counts_and_room_is_kept_for_the_next() -> None:
    queue = BatchQueue(4 * 288, 10)
    for version in range(3):
        queue.put(batch_of(10, version))
    assert queue.get(0).policy_version == 0 and (queue.nbytes, queue.held_nbytes) == (
        2 * 288,
        3 * 288,
    )
    assert queue.put(batch_of(10, 3), room=288) == 1 and queue.held_nbytes == 3 * 288
    assert queue.put(batch_of(31, 4)) == 1 and len(queue) == 2, (
        "there is no room beside the one in use, so nobody makes way for it"
    )
    assert [queue.get(0).policy_version for _ in range(2)] == [2, 3]
    assert queue.get(0) is None and queue.held_nbytes == 0


def test_budget_holds_under_many_threads() -> None:
    queue = BatchQueue(5 * 288, 10)
    seen: list[int] = []
    held: list[int] = []

    def produce() -> None:
        for _ in range(200):
            queue.put(batch_of(10))
            held.append(queue.held_nbytes)

    def consume() -> None:
        while (batch := queue.get(5)) is not None:
            seen.append(batch.lengths_S.numel())

    consumer = threading.Thread(target=consume)
    producers = [threading.Thread(target=produce) for _ in range(3)]
    for thread in [consumer, *producers]:
        thread.start()
    for thread in producers:
        thread.join()
    queue.close()
    consumer.join(5)
    assert not consumer.is_alive()
    assert max(held) <= queue.max_bytes and queue.nbytes == 0
    assert len(seen) + queue.dropped == 600


def test_close_wakes_a_waiter_and_refuses_more() -> None:
    queue = BatchQueue(10_000, 10)
    got: list[object] = []
    waiter = threading.Thread(target=lambda: got.append(queue.get(None)))
    waiter.start()
    time.sleep(0.02)
    queue.close()
    waiter.join(5)
    assert got == [None] and not waiter.is_alive()
    assert queue.put(batch_of(1)) == 1
