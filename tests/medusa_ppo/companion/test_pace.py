"""The companion gives way to the loop: by a byte in shared memory, within a piece of work, and what it waits is no training."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from medusa_ppo.companion import Pace


def test_both_ends_see_one_byte(tmp_path: Path) -> None:
    loop, companion = Pace(tmp_path / "shared"), Pace(tmp_path / "shared")
    companion.give_way()
    assert companion.waited_s == 0
    loop.hold(True)
    waiter = threading.Thread(target=companion.give_way)
    waiter.start()
    time.sleep(0.1)
    assert waiter.is_alive() and Pace(tmp_path / "shared")._byte[0] == 1, "a companion that is started again waits too"
    loop.hold(False)
    waiter.join(1.0)
    assert not waiter.is_alive() and companion.take_waited_s() > 0.05 and companion.waited_s == 0


def test_a_companion_on_another_node_is_never_held(tmp_path: Path) -> None:
    loop, companion = Pace(tmp_path / "here"), Pace(tmp_path / "there")
    loop.hold(True)
    companion.give_way()
    assert companion.waited_s == 0


def test_training_stands_still_at_once_and_goes_on(ray_session: None, chain, client_of) -> None:
    task = chain()
    client = client_of(task, epochs=40)
    client.shared = True
    client.submit(task.batch(200, 16))
    deadline = time.monotonic() + 30
    while not client.status().train_s and time.monotonic() < deadline:
        time.sleep(0.02)
    client.give_way(True)
    time.sleep(0.3)
    before = client.status()
    time.sleep(0.5)
    after = client.status()
    assert before.batches_trained == 0 and 0 < after.train_s < before.train_s + 0.1, "waiting is no training"
    client.give_way(False)
    assert client.drain(60) and client.status().batches_trained == 1
    client.give_way(True)
    client.submit(task.batch())
    assert client.drain(60), "whoever waits for the companion lets it go on"
