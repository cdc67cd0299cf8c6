"""The companion on several workers in real Ray actors: the same result as on one, and again after
one is lost.
"""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import ray
import torch

from heads.checkpoint import checksum, load_state
from heads.errors import CompanionError, RunError
from heads.heads_config import HeadsConfig
from medusa_ppo.companion.client import CONTROL, CompanionClient, _reason
from medusa_ppo.companion.cycle import Cycle
from medusa_ppo.companion.team import MAX_RESTARTS, TRIES, Leader, Member, _up
from medusa_ppo.companion.wire import ServiceArguments, pack
from medusa_ppo.config.companion_section import CompanionConfig
from medusa_ppo.contract.rollout_batch import RolloutBatch
from medusa_ppo.runtime.processes import bundle, release, reserve
from tests.medusa_ppo.companion.conftest import assert_near, until


def alone(task, batches: list[RolloutBatch], **settings) -> Cycle:
    """What one worker makes of the same batches."""
    config = CompanionConfig(**{"batch_positions": 64, "learning_rate": 2e-2, **settings})
    cycle = Cycle(
        HeadsConfig(task.hidden, task.vocab, num_heads=3), config, task.lm_head_VD, seed=0
    )
    for batch in batches:
        cycle.run(batch)
    return cycle


def pids(client: CompanionClient) -> list[int]:
    """The leader's process, and those of the members in its team."""
    return [
        int(name.split("-")[0]) for name in ray.get(client._call("workers", CONTROL), timeout=60)
    ]


def check_same(client: CompanionClient, cycle: Cycle, folder: Path, device: torch.device) -> None:
    """The companion's state is the cycle's within what the order of float32 sums changes."""
    assert client.save(folder)
    state = load_state(folder / "companion.safetensors")
    other = cycle.state_dict()
    assert client.status().versions_published == cycle.version > 0
    assert set(state) - {"service", "crc"} == set(other)
    assert_near(state, other, device)


SHARE = pytest.param(0.25, marks=pytest.mark.gpu, id="share-of-a-gpu")
EACH = pytest.param(1.0, marks=[pytest.mark.gpu, pytest.mark.gpus(2)], id="a-gpu-each")


@pytest.fixture(scope="module", params=[pytest.param(0.0, id="cpu"), SHARE, EACH])
def num_gpus(request: pytest.FixtureRequest) -> float:
    """Of each worker: none, a share of the same one (gloo sums their gradients), or one (NCCL)."""
    return request.param


@pytest.fixture(scope="module")
def device(num_gpus: float) -> torch.device:
    return torch.device("cuda" if num_gpus else "cpu")


@pytest.fixture
def client_of(
    client_of: Callable[..., CompanionClient], num_gpus: float
) -> Callable[..., CompanionClient]:
    """Companions of two workers."""
    return functools.partial(client_of, workers=2, dtype="float32", num_gpus=num_gpus)


def train_until_whole(client: CompanionClient, task, before: list[int], trained: int = 0) -> None:
    """After a loss all workers are new processes, and learn more than `trained` batches. One on its
    way to a lost process is lost too.
    """

    def once_more() -> bool:
        client.submit(task.batch())
        status = client.status() if client.drain(60) else None
        whole = (
            status is not None
            and status.alive
            and status.workers == 2
            and status.batches_trained > trained
        )
        return whole and not set(pids(client)) & set(before)

    assert until(once_more)


@pytest.mark.slow
def test_two_workers_make_what_one_makes(
    ray_session: None, chain, device: torch.device, client_of, tmp_path: Path
) -> None:
    task = chain()
    batches = [task.batch() for _ in range(8)]
    # Not the default loss: where q equals p its gradient depends on rounding (test_parts.py).
    client = client_of(task, loss="kl")
    for batch in batches:
        client.submit(batch)
        client.update_lm_head(task.lm_head_VD, task.policy_version)
    assert (
        client.drain(60) and client.status().workers == 2 and client.status().batches_trained == 8
    )
    check_same(client, alone(task, batches, loss="kl"), tmp_path, device)
    workers = pids(client)
    client.submit(chain(hidden=20).batch())
    assert client.drain(60) and "hidden size 20" in client.status().error
    client.submit(task.batch())
    assert client.drain(60) and client.status().error == "" and pids(client) == workers, (
        "a bad batch ends nobody"
    )
    client.close()
    assert until(lambda: not any(psutil.pid_exists(pid) for pid in workers), 30)


def sums_of_all(leader: Leader) -> list[tuple[str, ...]]:
    """In the leader's process: checksums of what each worker trains and serves."""
    calls = [member.__ray_call__.remote(sums_of) for member in leader._members.values()]
    return [sums_of(leader), *ray.get(calls, timeout=60)]


def sums_of(worker: Leader | Member) -> tuple[str, ...]:
    cycle = worker._cycle
    heads = (cycle.trainer.heads, cycle.candidate, cycle.serving)
    return tuple(checksum(one.trainable_state()) for one in heads)


@pytest.mark.slow
def test_all_workers_go_on_from_the_engines_heads(
    ray_session: None, chain, device: torch.device, client_of, tmp_path: Path
) -> None:
    """Only the leader did: the next batch broke the team, which started again without them."""
    task = chain()
    batches = [task.batch() for _ in range(6)]
    client = client_of(task, loss="kl")
    one = alone(task, batches[:4], loss="kl")
    for batch in batches[:4]:
        client.submit(batch)
    assert client.drain(120)
    workers = pids(client)
    untrained = Cycle(one.serving.config, CompanionConfig(), task.lm_head_VD, seed=0)
    state = untrained.serving.trainable_state()
    version = client.status().versions_published + 1
    client.go_on_from(version, state, 0)
    one.go_on_from(version, state, 0)
    assert until(client._telling_is_over) and client._error == ""
    told = ray.get(client._actor.__ray_call__.remote(sums_of_all), timeout=60)
    assert told == [(checksum(state),) * 3] * 2
    for batch in batches[4:]:
        client.submit(batch)
        one.run(batch)
    assert client.drain(120)
    status = client.status()
    assert (status.error, status.restarts, status.batches_trained) == ("", 0, 6)
    assert pids(client) == workers
    first, second = ray.get(client._actor.__ray_call__.remote(sums_of_all), timeout=60)
    assert first == second and first[0] != checksum(state)
    check_same(client, one, tmp_path, device)


@pytest.mark.slow
@pytest.mark.parametrize("who", [0, 1])
def test_a_worker_killed_in_the_middle_of_a_batch(
    ray_session: None, chain, client_of, tmp_path: Path, who: int
) -> None:
    """All start again, from the state after the last whole batch."""
    task = chain()
    client = client_of(task, tmp_path, epochs=30)
    for _ in range(2):
        client.submit(task.batch())
    assert client.drain(120)
    trained = client.status().batches_trained
    version = client.newest(0).version
    before = pids(client)
    client.submit(task.batch(400, 16))
    assert until(lambda: psutil.Process(before[1]).cpu_percent(0.2) > 20)
    os.kill(before[who], signal.SIGKILL)
    train_until_whole(client, task, before, trained)
    assert trained == 2 and client.newest(0).version >= version
    assert until(lambda: not any(psutil.pid_exists(pid) for pid in before), 60), (
        "nobody is left over"
    )


@pytest.mark.slow
def test_a_member_that_hangs_is_replaced(ray_session: None, chain, client_of) -> None:
    task = chain()
    client = client_of(task, hang_s=10.0)
    before = pids(client)
    os.kill(before[1], signal.SIGSTOP)
    client.submit(task.batch())
    try:
        train_until_whole(client, task, before)
    finally:
        if psutil.pid_exists(before[1]):
            os.kill(before[1], signal.SIGKILL)


@pytest.mark.slow
def test_room_that_is_not_there_is_refused(ray_session: None) -> None:
    with pytest.raises(RunError, match="no room for the engines") as caught:
        reserve([bundle(0, "lonely"), bundle(2.0, "")], "engines", timeout_s=1)
    assert "lonely" in str(caught.value.given) and "CPU" in str(caught.value.given)
    group = reserve([bundle(0, "")] * 2, "engines", timeout_s=60)
    release(group)


@pytest.mark.slow
def test_a_member_that_dies_before_it_is_up_is_started_once_more(
    ray_session: None, tmp_path: Path
) -> None:
    """So it goes with one that Ray placed on a node of which it did not yet know that it is
    lost.
    """

    class Dies:
        def __init__(self, log: Path, deaths: int) -> None:
            with log.open("a") as lines:
                lines.write("started\n")
            if len(log.read_text().splitlines()) <= deaths:
                os._exit(1)

        def name(self) -> str:
            return "it"

    kind = ray.remote(num_cpus=0, max_restarts=0)(Dies)
    once = tmp_path / "once"
    always = tmp_path / "always"
    assert (
        list(_up([lambda: kind.remote(once, 1)])) == ["it"]
        and len(once.read_text().splitlines()) == 2
    )
    assert _up([lambda: kind.remote(always, 9)]) == {} and len(always.read_text().splitlines()) == 2


class CannotSum(Leader):
    """The workers are all there, and torch has no backend for what they train on."""

    def __init__(self, first: list[ray.ObjectRef], log: Path) -> None:
        with log.open("a") as lines:
            lines.write("started\n")
        super().__init__(first)

    def _assemble(self) -> None:
        def refuse(*_: object, **__: object) -> None:
            raise RuntimeError("No backend type associated with device type cuda")

        self._cycle.trainer.join = refuse
        super()._assemble()


class AlwaysLost(CannotSum):
    """A worker is lost whenever they meet."""

    def _assemble(self) -> None:
        self._start_again("A worker was lost: out of memory")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "starts", "said"),
    [(CannotSum, 1, "device type cuda"), (AlwaysLost, TRIES + 1, "out of memory")],
)
def test_workers_that_can_not_start_say_why_and_stay_away(
    ray_session: None, chain, tmp_path: Path, kind: type, starts: int, said: str
) -> None:
    """Not tried a hundred times while PPO goes on without a companion and without a word."""
    task = chain()
    arguments = ServiceArguments(
        HeadsConfig(task.hidden, task.vocab, num_heads=3),
        CompanionConfig(workers=2),
        0,
        None,
        "",
        str(tmp_path / "published"),
        hang_s=30.0,
    )
    first = ray.put((arguments, ray.put(pack((task.lm_head_VD, None)))))
    log = tmp_path / "log"
    actor = ray.remote(num_cpus=0, max_restarts=MAX_RESTARTS, max_task_retries=MAX_RESTARTS)(
        kind
    ).remote([first], log)
    with pytest.raises(ray.exceptions.RayActorError) as caught:
        ray.get(actor.ready.remote(), timeout=100)
    assert CompanionError.__name__ in str(caught.value)
    assert said in _reason(caught.value), "in one line, for the report"
    assert len(log.read_text().splitlines()) == starts
