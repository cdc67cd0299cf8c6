"""The companion gives way to the loop: by a byte in shared memory, within a piece of work, and what
it waits is no training.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

from medusa_ppo.companion.giving_way import Pace
from tests.medusa_ppo.companion.conftest import until


def test_both_ends_see_one_byte(tmp_path: Path) -> None:
    loop = Pace(tmp_path / "shared")
    companion = Pace(tmp_path / "shared")
    companion.give_way()
    assert companion.waited_s == 0
    loop.hold(True)
    waiter = threading.Thread(target=companion.give_way)
    waiter.start()
    time.sleep(0.1)
    assert waiter.is_alive() and Pace(tmp_path / "shared")._byte[0] == 1, (
        "a companion that is started again waits too"
    )
    loop.hold(False)
    waiter.join(1.0)
    assert not waiter.is_alive() and companion.take_waited_s() > 0.05 and companion.waited_s == 0


def test_a_companion_on_another_node_is_never_held(tmp_path: Path) -> None:
    loop = Pace(tmp_path / "here")
    companion = Pace(tmp_path / "there")
    loop.hold(True)
    companion.give_way()
    assert companion.waited_s == 0


def test_training_stands_still_at_once_and_goes_on(ray_session: None, chain, client_of) -> None:
    task = chain()
    client = client_of(task, epochs=40)
    client.shared = True
    client.submit(task.batch(200, 16))
    assert until(lambda: client.status().train_s > 0)
    client.give_way(True)
    seen: list[float] = []

    def stands_still() -> bool:
        """It ends the piece of work that it is in, and then next to nothing is added: waiting
        itself.
        """
        seen.append(client.status().train_s)
        return len(seen) > 5 and seen[-1] - seen[-6] < 0.02

    assert until(stands_still), "waiting is no training"
    assert client.status().batches_trained == 0
    client.give_way(False)
    assert client.drain(60) and client.status().batches_trained == 1
    client.give_way(True)
    client.submit(task.batch())
    assert client.drain(60), "whoever waits for the companion lets it go on"
