"""The companion on several workers in real Ray actors: the same result as on one, also when members or the leader are lost."""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import ray
import torch

from heads.checkpoint import load_state
from heads.errors import RunError
from heads.heads_config import HeadsConfig
from medusa_ppo.companion.client import CONTROL, CompanionClient
from medusa_ppo.companion.cycle import Cycle
from medusa_ppo.companion.team import deal
from medusa_ppo.config import CompanionConfig
from medusa_ppo.processes import bundle, release, reserve
from medusa_ppo.types import RolloutBatch


def alone(task, batches: list[RolloutBatch], **settings) -> Cycle:
    """What one worker makes of the same batches."""
    config = CompanionConfig(**{"batch_positions": 64, "learning_rate": 2e-2, **settings})
    cycle = Cycle(HeadsConfig(task.hidden, task.vocab, num_heads=3), config, task.lm_head_VD, seed=0)
    for batch in batches:
        cycle.run(batch)
    return cycle


def pids(client: CompanionClient) -> list[int]:
    """The leader's process, and those of the members in its team."""
    return [int(name.split("-")[0]) for name in ray.get(client._call("workers", CONTROL), timeout=60)]


def until(condition: Callable[[], bool], seconds: float = 120.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.1)
    return False


def check_same(client: CompanionClient, cycle: Cycle, folder: Path) -> None:
    """The companion's state is the cycle's within what the order of float32 sums changes."""
    assert client.save(folder)
    state, other = load_state(folder / "companion.safetensors"), cycle.state_dict()
    assert client.status().versions_published == cycle.version > 0
    assert set(state) - {"service"} == set(other)
    for name, value in other.items():
        torch.testing.assert_close(state[name], value, rtol=1e-3, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")


def train_until_whole_again(client: CompanionClient, task) -> None:
    """A new worker joins when it is up: with the next batch."""

    def once_more() -> bool:
        client.submit(task.batch())
        return client.drain(60) and client.status().workers == 2

    assert until(once_more)


@pytest.fixture
def client_of(client_of: Callable[..., CompanionClient]) -> Callable[..., CompanionClient]:
    """Companions of two workers."""
    return functools.partial(client_of, workers=2)


def test_parts_are_dealt_to_those_that_are_there() -> None:
    assert [list(part) for part in deal("abcd", 4)] == [["a"], ["b"], ["c"], ["d"]]
    assert deal("abcd", 3) == ["a", "b", "cd"] and deal("abcd", 1) == ["abcd"]
    assert all("".join(deal("abcdefg", workers)) == "abcdefg" for workers in range(1, 8))


@pytest.mark.slow
def test_a_member_is_killed_and_replaced(ray_session: None, chain, client_of, tmp_path: Path) -> None:
    task = chain()
    batches = [task.batch() for _ in range(8)]
    client = client_of(task)
    for batch in batches[:4]:
        client.submit(batch)
    assert client.drain(60) and client.status().workers == 2
    version, (leader, member) = client.newest(0).version, pids(client)
    os.kill(member, signal.SIGKILL)
    for batch in batches[4:]:
        client.submit(batch)
        client.update_lm_head(task.lm_head_VD, task.policy_version)
    assert client.drain(60)
    status = client.status()
    assert status.alive and status.error == "" and status.batches_trained == 8 and status.batches_dropped == 0
    check_same(client, alone(task, batches), tmp_path)
    assert client.newest(0).version >= version
    train_until_whole_again(client, task)
    workers = pids(client)
    assert workers[0] == leader and workers[1] != member, "the leader stays; the member is a new process"
    client.submit(chain(hidden=20).batch())
    assert client.drain(60) and "hidden size 20" in client.status().error
    train_until_whole_again(client, task)
    assert client.status().error == "" and pids(client) == workers, "a bad batch ends nobody"
    client.close()
    assert until(lambda: not any(psutil.pid_exists(pid) for pid in workers), 30)


@pytest.mark.slow
def test_a_member_killed_in_the_middle_of_a_batch(ray_session: None, chain, client_of, tmp_path: Path) -> None:
    task = chain()
    batches = [task.batch(400, 16) for _ in range(3)]
    client = client_of(task, epochs=30)
    client.submit(batches[0])
    assert client.drain(120)
    member = pids(client)[1]
    client.submit(batches[1])
    assert until(lambda: client.status().queue_bytes == 0 and psutil.Process(member).cpu_percent(0.2) > 20)
    os.kill(member, signal.SIGKILL)
    client.submit(batches[2])
    assert client.drain(240) and client.status().batches_trained == 3
    check_same(client, alone(task, batches, epochs=30), tmp_path)
    train_until_whole_again(client, task)


@pytest.mark.slow
def test_a_member_that_hangs_is_replaced(ray_session: None, chain, client_of, tmp_path: Path) -> None:
    task = chain()
    batches = [task.batch() for _ in range(3)]
    client = client_of(task, hang_s=10.0)
    member = pids(client)[1]
    os.kill(member, signal.SIGSTOP)
    for batch in batches:
        client.submit(batch)
    assert client.drain(240) and client.status().batches_trained == 3
    check_same(client, alone(task, batches), tmp_path)
    train_until_whole_again(client, task)
    assert not psutil.pid_exists(member) and member not in pids(client)


@pytest.mark.slow
def test_the_leader_comes_back_with_new_members(ray_session: None, chain, client_of, tmp_path: Path) -> None:
    task = chain()
    client = client_of(task, tmp_path)
    for _ in range(6):
        client.submit(task.batch())
    assert client.drain(60)
    version, before = client.newest(0).version, pids(client)
    os.kill(before[0], signal.SIGKILL)
    assert until(lambda: client.newest(0) is not None and client.status().alive and client._incarnation.split("-")[0] != str(before[0]))
    assert until(lambda: not any(psutil.pid_exists(pid) for pid in before)), "a leader's members end with it"
    assert client.newest(0).version >= version and client.status().batches_trained == 6
    train_until_whole_again(client, task)
    assert len(set(pids(client)) | set(before)) == 4 and client.newest(0).version >= version


@pytest.mark.slow
def test_room_that_is_not_there_is_refused(ray_session: None) -> None:
    with pytest.raises(RunError, match="no room for the engines") as caught:
        reserve([bundle(0, "lonely"), bundle(2.0, "")], "engines", timeout_s=1)
    assert "lonely" in str(caught.value.given) and "CPU" in str(caught.value.given)
    group = reserve([bundle(0, "")] * 2, "engines", "STRICT_PACK", timeout_s=60)
    release(group)
