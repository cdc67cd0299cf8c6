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
    assert not waiter.is_alive() and companion.waited_s > 0.05


def test_in_its_turn_the_companion_has_everything(tmp_path: Path) -> None:
    loop, companion = Pace(tmp_path / "shared"), Pace(tmp_path / "shared")
    loop.hand_over()
    companion.give_way()
    assert companion.has_all and not companion.held and companion.waited_s == 0
    loop.hold(True)
    assert companion.held and not companion.has_all
    loop.hold(False)
    assert not companion.held and not companion.has_all


def test_a_companion_on_another_node_is_never_held(tmp_path: Path) -> None:
    loop = Pace(tmp_path / "here")
    companion = Pace(tmp_path / "there")
    loop.hold(True)
    companion.give_way()
    assert companion.waited_s == 0


def test_a_turn_ends_in_its_time_and_goes_on_in_the_next(
    ray_session: None, chain, client_of
) -> None:
    task = chain()
    client = client_of(task, takes_turns=True, epochs=20)
    assert client.takes_turns, "it shares the cores of a machine without a GPU"
    client.give_way(True)
    client.submit(task.batch(200, 16))
    began = time.monotonic()
    assert not client.take_turn(0.1)
    assert time.monotonic() - began >= 0.1 and client.status().batches_trained == 0
    assert client._pace.held, "the loop goes on, and the companion waits"
    assert until(lambda: client.take_turn(0.5)), "it goes on in the next turns"
    status = client.status()
    assert status.batches_trained == 1
    # What it trained while the loop waited is not said to have been taken from it.
    assert status.train_s > 0.1 and status.worked_s < status.train_s / 2
    assert client.take_turn(0.5), "nothing is left"
    client.give_way(False)
    client.submit(task.batch())
    assert client.drain(60), "whoever waits for it gives it everything, too"


def test_training_stands_still_at_once_and_goes_on(ray_session: None, chain, client_of) -> None:
    task = chain()
    client = client_of(task, epochs=40)
    client.yields = True
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
