"""The companion in a real Ray actor: batches, versions, crashes. One actor for the peaceful tests,
others where they are killed.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray
import torch
from ray.exceptions import GetTimeoutError

from heads.checkpoint import checksum, load_state
from heads.errors import CompanionError, SavedStateError
from heads.heads_config import HeadsConfig
from medusa_ppo.companion import client as client_module
from medusa_ppo.companion import service as service_module
from medusa_ppo.companion.client import (
    FETCH_WAIT_S,
    MOST_RECENT,
    START_TIMEOUT_S,
    STATE_BYTES_PER_S,
    CompanionClient,
    shares_with_loop,
)
from medusa_ppo.companion.cycle import Cycle
from medusa_ppo.companion.positions import ROW_BYTES
from medusa_ppo.companion.service import KEPT_VERSIONS, STATE_FILE, CompanionService
from medusa_ppo.companion.wire import Answer, ServiceArguments, pack
from medusa_ppo.config.companion_section import CompanionConfig
from medusa_ppo.contract.rollout_batch import RolloutBatch
from medusa_ppo.contract.rollouts import Counters, Response, Rollouts, Sampling
from medusa_ppo.contract.status import PublishedHeads
from tests.conftest import cpu_alone
from tests.medusa_ppo.companion.conftest import assert_near, until

pytestmark = pytest.mark.usefixtures("ray_session")


def cycle_of(task, **settings) -> Cycle:
    """What a companion begins with, in this process."""
    config = CompanionConfig(batch_positions=64, learning_rate=2e-2, **settings)
    return Cycle(HeadsConfig(task.hidden, task.vocab, num_heads=3), config, task.lm_head_VD, seed=0)


def pid_of(client: CompanionClient) -> int:
    """Of the process that answered last."""
    return max(
        (int(began), int(pid)) for pid, began in (name.split("-") for name in client._incarnations)
    )[1]


def test_learns_publishes_and_cleans_up(chain, client_of, tmp_path: Path) -> None:
    task = chain(dtype=torch.bfloat16)
    client = client_of(task, tmp_path)
    folder = client._folder.path
    assert client.newest(0) is None
    for _ in range(12):
        client.submit(task.batch())
        client.update_lm_head(task.lm_head_VD, task.policy_version)
    assert client.drain(60)
    status = client.status()
    assert (
        status.alive
        and status.batches_trained == 12
        and status.batches_dropped == 0
        and status.error == ""
    )
    published = client.newest(0)
    assert published is not None and published.version == status.versions_published >= 3
    assert client.newest(published.version) is None
    assert checksum(load_state(published.path)) == published.checksum
    assert published.mean_acceptance_length > 1.5
    assert Path(published.path).parent == folder
    assert client.save(tmp_path / "saved") and any((tmp_path / "saved").iterdir())
    client.close()
    client.close()
    assert not folder.exists()
    assert not client.status().alive and client.newest(0) is None and not client.drain(1)
    client.submit(task.batch())
    assert client.status().batches_dropped == 1
    assert until(lambda: not Path(f"/proc/{pid_of(client)}").exists(), 20)


def test_a_fraction_is_sampled_before_the_copy(chain, client_of) -> None:
    task = chain()
    rows = 90
    row_bytes = 4 * task.hidden + 24
    client = client_of(task, queue_bytes=rows * row_bytes)  # Half of it has room for half of them.
    responses = tuple(Response(n, (1,) * 9, (-1.0,) * 9, "stop") for n in range(10))
    rollouts = Rollouts(((1,),) * 10, responses, Counters(), 1.0, Sampling())
    collector = client.collector(rollouts)
    mask_BT = torch.ones(10, 10, dtype=torch.bool)
    mask_BT[:, 0] = False
    collector.add(
        torch.randn(10, 10, task.hidden, generator=torch.Generator().manual_seed(0)),
        mask_BT,
        list(range(10)),
    )
    batch = collector.batch()
    assert 27 <= batch.hidden_MD.shape[0] == 90 - collector.left_out <= 45
    assert len(batch.response_ids_M) == batch.hidden_MD.shape[0], "no tokens without a state"
    trained_M = (batch.weights_M > 0) & ~batch.held_S.repeat_interleave(batch.lengths_S)
    trained_M[batch.lengths_S.cumsum(0) - 1] = False
    trained_on = int(trained_M.sum())
    client.submit(batch)
    assert client.drain(60)
    status = client.status()
    assert (
        status.error == "" and status.batches_trained == 1 and status.trained_tokens == trained_on
    )
    assert 0 < status.positions_frac < trained_on / 45
    assert status.positions_left_out == collector.left_out
    client.count_left_out(7)
    assert client.status().positions_left_out == collector.left_out + 7


def test_a_batch_of_twenty_times_the_budget_is_sampled(chain, client_of) -> None:
    """It was dropped. At the tap, and where it was collected elsewhere; two of them have room side
    by side.
    """
    task = chain()
    batch = task.batch(600, 16)
    budget = batch.nbytes // 20
    client = client_of(task, queue_bytes=budget)
    client.submit(batch)
    assert until(lambda: (now := client.status()).batches_received == 1 and now.queue_bytes == 0), (
        "one that waits would go for the next"
    )
    client.submit(batch)
    assert client.drain(60)
    status = client.status()
    assert status.batches_trained == 2 and status.batches_dropped == 0 and status.error == ""
    assert status.trained_tokens > 0 and status.positions_left_out > 1.9 * len(batch.response_ids_M)
    rollouts = Rollouts(
        ((1,),), (Response(0, (1,) * 5000, (-1.0,) * 5000, "stop"),), Counters(), 1.0, Sampling()
    )
    assert client.collector(rollouts)._weights_M is not None


def test_rows_are_counted_in_the_dtype_of_the_states(chain, client_of) -> None:
    """Not of the tables: half of the queue would hold half as many of them."""
    task = chain()
    batch = task.batch(8, 16)
    room = 100 * batch.nbytes
    client = client_of(task, queue_bytes=room)
    narrow = dataclasses.replace(batch, hidden_MD=batch.hidden_MD.bfloat16())
    for one, value_bytes in ((narrow, 2), (batch, 4)):
        client.submit(one)
        # Before an answer, so that the companion's time is no bound.
        assert client.most_rows() == room // 2 // (task.hidden * value_bytes + ROW_BYTES)


@cpu_alone
def test_waiting_runs_repeat_themselves(chain, client_of) -> None:
    """Two companions, the same batches, drained after each: the same versions with the same bytes
    at the same steps.
    """

    def run() -> list[tuple[int, str]]:
        task = chain()
        seen = []
        client = client_of(task)
        for _ in range(5):
            client.submit(task.batch())
            assert client.drain(60)
            published = client.newest(0, 60)
            seen.append((published.version, published.checksum) if published else (0, ""))
        return seen

    first = run()
    assert first == run() and first[-1][0] > 0


def test_two_workers_learn_what_one_learns(
    chain, device: torch.device, client_of, tmp_path: Path
) -> None:
    task = chain()
    batches = [task.batch() for _ in range(4)]
    # Not the default loss: where q equals p its gradient depends on rounding (test_parts.py).
    client = client_of(task, workers=2, dtype="float32", loss="kl")
    alone = cycle_of(task, loss="kl")
    for batch in batches:
        client.submit(batch)
        alone.run(batch)
    assert client.drain(60) and client.save(tmp_path)
    status = client.status()
    assert (client.shared or torch.cuda.is_available()) and not client.yields
    assert (
        status.workers == 2
        and status.versions_published == alone.version > 0
        and status.trained_tokens == alone.trainer.trained_tokens
    )
    state = load_state(tmp_path / "companion.safetensors")
    other = alone.state_dict()
    assert set(state) - {"service", "crc"} == set(other)
    assert_near(state, other, device)


@pytest.mark.parametrize(
    ("gpus", "settings", "shared"),
    [
        (0, {}, True),
        (0, {"workers": 2}, True),
        (0, {"workers": 2, "cores": [0, 1]}, False),
        (0, {"workers": 2, "resource": "training"}, False),
        (1, {"workers": 2, "num_gpus": 0.0}, False),
        (1, {"workers": 2, "num_gpus": 0.5}, True),
    ],
)
def test_several_workers_take_from_the_loop_what_one_would(
    monkeypatch: pytest.MonkeyPatch, gpus: int, settings: dict[str, Any], shared: bool
) -> None:
    """They only don't give way: the budget did not see what they took."""
    machine = SimpleNamespace(gpus=["a GPU"] * gpus)
    monkeypatch.setattr(client_module, "find_hardware", lambda: machine)
    monkeypatch.setattr(client_module.ray, "cluster_resources", lambda: {"GPU": float(gpus)})
    assert shares_with_loop(CompanionConfig(**settings)) == shared


def test_killed_companion_never_raises_and_shows_in_the_status(
    chain, client_of, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("medusa_ppo.companion.client.MAX_RESTARTS", 0)
    task = chain()
    client = client_of(task)
    client.submit(task.batch())
    assert client.drain(60) and client.status().batches_trained == 1
    os.kill(pid_of(client), signal.SIGKILL)
    assert until(lambda: not client.status().alive)
    for _ in range(3):
        client.submit(task.batch())
        client.update_lm_head(task.lm_head_VD, 1)
        assert client.newest(0) is None
    status = client.status()
    assert not status.alive and status.error and status.batches_trained == 1
    assert until(lambda: client.newest(0) is None and client.status().batches_dropped == 3)
    assert not client.drain(1) and not client.save("/nowhere")


def test_a_companion_that_stays_down_leaves_no_tokens_behind(
    chain, client_of, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each lost batch they stayed, and every later batch read the rows of all of them."""
    monkeypatch.setattr("medusa_ppo.companion.client.MAX_RESTARTS", 0)
    task = chain()
    client = client_of(task)
    client.submit(task.batch())
    assert client.drain(60)
    client.newest(0, 60)
    os.kill(pid_of(client), signal.SIGKILL)
    assert until(lambda: not client.status().alive)
    for _ in range(10):
        client.submit(task.batch())
        client.newest(0)
    assert until(lambda: client.newest(0) is None and not client._flying)
    assert not client._recent and client.status().batches_dropped == 10


def test_tokens_of_many_batches_without_an_answer_are_one_entry(chain, client_of) -> None:
    """None is forgotten before the companion has counted it."""
    task = chain()
    client = client_of(task)
    client._draft_ids = torch.zeros(0, dtype=torch.int64)
    batches = [task.batch(2, 3) for _ in range(3 * MOST_RECENT)]
    for batch in batches:
        client.submit(batch)
    assert len(client._recent) <= MOST_RECENT
    assert len(client._recent[0][1]) <= task.vocab, "each once"
    wanted = set(client.wanted_rows().draft_ids.tolist())
    assert wanted >= set(torch.cat([batch.response_ids_M for batch in batches]).tolist())
    assert client.drain(60)
    client.newest(0, 60)
    assert not client._recent


def test_killed_companion_raises_when_asked_to(
    chain, client_of, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("medusa_ppo.companion.client.MAX_RESTARTS", 0)
    task = chain()
    client = client_of(task, on_error="raise")
    os.kill(pid_of(client), signal.SIGKILL)
    with pytest.raises(CompanionError, match="disable"):
        until(lambda: client.status() is None)
    with pytest.raises(CompanionError):
        until(lambda: client.newest(0) is not None)


def test_killed_companion_comes_back_from_its_checkpoint(chain, client_of, tmp_path: Path) -> None:
    task = chain()
    client = client_of(task, tmp_path)
    for _ in range(6):
        client.submit(task.batch())
        client.update_lm_head(
            task.lm_head_VD, task.policy_version
        )  # The tables it was started with are needed again.
    assert client.drain(60)
    before = client.newest(0)
    assert before is not None
    trained = 6
    for killed, answers in (
        (1, lambda: client.newest(0) is not None),
        (2, lambda: client.status().alive),
    ):
        os.kill(pid_of(client), signal.SIGKILL)
        pid = pid_of(client)
        assert until(lambda: answers() and pid_of(client) != pid)  # noqa: B023
        assert client.status().restarts == killed
        assert client.newest(0).version >= before.version and client.status().alive
        again = client.status().batches_trained
        assert 0 < again <= trained, "what was trained when the last version was published"
        client.submit(task.batch())
        assert client.drain(60)
        assert client.status().batches_trained == again + 1 == (trained := again + 1)
    assert client.newest(0).version >= before.version


@pytest.mark.slow
def test_one_that_dies_while_it_judges_is_started_again(chain, client_of, tmp_path: Path) -> None:
    """It stands still for the loop at the first piece of the replay, and is killed there."""
    task = chain()
    client = client_of(task, tmp_path, on_error="disable")
    assert client.shared
    client.give_way(True)
    # Of few prompts: what was made before is judged ahead of the training.
    client.submit(task.batch(4))
    assert until(lambda: client.status().train_s > 0)
    assert client.status().optimizer_steps == 0
    pid = pid_of(client)
    began = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    assert client.newest(0) is None
    assert time.monotonic() - began < 10, "the loop goes on"
    client.give_way(False)
    assert until(lambda: client.status().alive and pid_of(client) != pid)
    status = client.status()
    assert status.restarts == 1 and status.batches_trained == 0
    client.submit(task.batch())
    assert client.drain(60) and client.status().batches_trained == 1


def test_stopped_companion_costs_a_short_poll_and_is_started_again(
    chain, client_of, tmp_path: Path
) -> None:
    """SIGSTOP: alive, but it answers nothing. Batches are bounded on our side, and after `hang_s`
    it is ended and started again.
    """
    task = chain()
    batch = task.batch()
    client = client_of(task, tmp_path, hang_s=1.0, queue_bytes=4 * batch.nbytes)
    pid = pid_of(client)
    os.kill(pid, signal.SIGSTOP)
    for _ in range(10):
        client.submit(batch)
    assert len(client._flying) <= 4
    assert client.status(0.2).alive is False and "no answer in time" in client.status(0.2).error
    assert client.newest(0) is None
    assert until(lambda: client.newest(0) is None and client.status(0.5).alive, 60)
    assert until(lambda: client.newest(0) is None and pid_of(client) != pid)
    assert client.status().batches_dropped >= 6


def stored_bytes() -> int:
    """Bytes in Ray's shared memory, what a process still reads included."""
    from ray._private.internal_api import node_stats

    (node,) = ray.nodes()
    return int(
        node_stats(
            node["NodeManagerAddress"], node["NodeManagerPort"], False
        ).store_stats.object_store_bytes_used
    )


def large_batch(rows: int, hidden: int = 16, vocab: int = 12) -> RolloutBatch:
    generator = torch.Generator().manual_seed(0)
    ids_M = torch.randint(vocab, (rows,), generator=generator)
    return RolloutBatch(
        torch.randn(rows, hidden, generator=generator),
        ids_M,
        torch.full((rows,), -2.0),
        torch.full((rows // 10,), 10),
    )


@cpu_alone
def test_a_slow_companion_never_holds_more_than_the_budget(chain, client_of) -> None:
    """Measured in Ray's store: on its way, waiting, and in training together. Old batches make way;
    in the end nothing is held.
    """
    task = chain()
    batch = large_batch(20_000)
    budget = 4 * batch.nbytes
    client = client_of(task, queue_bytes=budget, epochs=30, batch_positions=512)
    before = stored_bytes()
    largest = 0
    for version in range(20):
        client.submit(dataclasses.replace(batch, policy_version=version))
        client.newest(0)
        for _ in range(5):
            time.sleep(0.03)  # Ray frees what nobody holds every 10 ms here.
            largest = max(largest, stored_bytes() - before)
    assert 2 * batch.nbytes < largest <= budget + 4096, (largest, batch.nbytes)
    status = client.status()
    assert status.batches_dropped > 5 and status.batches_received > 10, (
        "old ones made way for new ones"
    )
    assert client.drain(120)
    assert until(lambda: stored_bytes() - before < 4096, 10), "an idle companion holds no batch"


@cpu_alone
@pytest.mark.slow
def test_a_companion_that_runs_out_of_memory_goes_on_with_the_next_batch(
    chain, client_of, tmp_path: Path
) -> None:
    """Its address space is limited: a batch that is too large for it fails (or ends the process),
    the ones after it are learned from.
    """
    task = chain()
    client = client_of(task, tmp_path, queue_bytes=2**30)
    client.submit(task.batch())
    assert client.drain(60)
    process = psutil.Process(pid_of(client))
    process.rlimit(psutil.RLIMIT_AS, (process.memory_info().vms + 16 * 2**20, -1))
    client.submit(large_batch(300_000))
    assert until(lambda: client.newest(99) is None and bool(client.status().error))
    error = client.status().error
    assert "memory" in error.lower() or "died" in error or "alloc" in error.lower(), error
    assert until(lambda: client.newest(99) is None and client.status().alive)
    trained = client.status().batches_trained

    def learns_again() -> bool:
        client.submit(task.batch())
        return (
            client.drain(60)
            and client.status().batches_trained > trained
            and client.status().error == ""
        )

    assert until(learns_again)


def test_a_batch_that_does_not_fit_is_told(chain, client_of) -> None:
    client = client_of(chain())
    client.submit(chain(hidden=20).batch())
    assert client.drain(60)
    assert (
        client.newest(0) is None
        and "hidden size 20" in client.status().error
        and client.status().alive
    )


def test_a_companion_that_can_not_start_says_so(chain) -> None:
    task = chain()
    heads = HeadsConfig(task.hidden + 1, task.vocab, num_heads=3, lm_head="own")
    with pytest.raises(CompanionError, match="did not start"):
        CompanionClient(heads, CompanionConfig(), task.lm_head_VD, seed=0)


def test_only_a_state_that_can_not_be_used_is_called_so(
    chain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever resumes may begin anew after that, but not after an error of the disk, nor after a
    start that was too slow: a large state is given the time that a slow disk takes for it.
    """
    task = chain()
    heads = HeadsConfig(task.hidden, task.vocab, num_heads=3)
    file = tmp_path / STATE_FILE

    def resume() -> CompanionError:
        with pytest.raises(CompanionError) as caught:
            CompanionClient(heads, CompanionConfig(), task.lm_head_VD, seed=0, resume_from=tmp_path)
        return caught.value

    file.write_bytes(b"damaged")
    damaged = resume()
    assert isinstance(damaged, SavedStateError) and str(file) in str(damaged.given)
    file.unlink()
    file.symlink_to(file)  # No process can open it.
    unread = resume()
    assert not isinstance(unread, SavedStateError) and str(file) in str(unread.given)
    assert "could not be read" in str(unread.given)
    file.unlink()
    with file.open("wb") as made:
        made.truncate(10 * 1024**3)
    given: list[float] = []

    def get(asked: object, timeout: float) -> None:
        given.append(timeout)
        raise GetTimeoutError

    monkeypatch.setattr("medusa_ppo.companion.client.ray.get", get)
    late = resume()
    assert not isinstance(late, SavedStateError) and "no answer in time" in str(late.given)
    assert given == [START_TIMEOUT_S + 10 * 1024**3 / STATE_BYTES_PER_S]
    assert f"within {given[0]:.0f} s" in str(late.expected)


def test_a_large_state_has_the_time_that_a_slow_disk_takes(
    chain, client_of, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the batch in training. It had 180 s for both."""
    client = client_of(chain())
    given: list[float] = []

    def get(asked: object, timeout: float) -> int:
        given.append(timeout)
        return 60 * 1024**3  # The first answer: bytes of the state.

    with monkeypatch.context() as patch:
        patch.setattr("medusa_ppo.companion.client.ray.get", get)
        assert client.save(tmp_path)
    before_s = START_TIMEOUT_S + client._hang_s
    assert given == [before_s, before_s + 60 * 1024**3 / STATE_BYTES_PER_S]


@cpu_alone
def test_a_stuck_companion_is_started_again(
    chain, client_of, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = chain()
    client = client_of(task)
    ended = []
    monkeypatch.setattr(
        "medusa_ppo.companion.client.ray.kill", lambda actor, no_restart: ended.append(no_restart)
    )
    monkeypatch.setattr(
        "medusa_ppo.companion.client.ray.get",
        lambda *how, **more: Answer(None, "", "x", 0, 0, 301.0),
    )
    assert client.newest(0, 5.0) is None and ended == [False] and "not moved on" in client._error


@cpu_alone
def test_a_version_from_before_the_companion_was_told_is_not_offered(
    chain, client_of, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once it goes on from the engine's heads, the file of that version holds these. What is
    mocked: the calls to the companion's process.
    """
    client = client_of(chain())
    file = tmp_path / "heads-000004.safetensors"
    file.write_bytes(b"")
    published = PublishedHeads(4, str(file), "sum", 0, 2.0)
    answer = ray.put(Answer(published, "", "x", version=4))
    pending = _never.remote()
    answers = {"newest": answer, "adopt": pending}
    monkeypatch.setattr(client, "_call", lambda name, *_: answers[name])
    assert client.newest(3, 60) == published
    client._poll = answer  # In flight while the engine's heads are told.
    client.go_on_from(3, {}, 3)
    assert client.newest(3, 60) is None
    assert client.newest(3, 60) is None, "nor one that is asked for before they are there"
    ray.cancel(pending, force=True)
    client._telling = ray.put(None)
    assert client.newest(3, 60) == published
    monkeypatch.undo()


def published_elsewhere(
    client: CompanionClient, monkeypatch: pytest.MonkeyPatch, versions: dict[int, object]
) -> list[int]:
    """Let a client's companion be on another node: the file of its last version, by number, is not
    on this one. Returns the versions that are fetched. What is mocked: the calls to its process.
    """
    fetched: list[int] = []

    def call(method: str, group: str, *arguments: int) -> object:
        if method == "newest":
            last = max(versions)
            there = PublishedHeads(last, f"/elsewhere/heads-{last}", "sum", 0, 2.0)
            return ray.put(Answer(there, "", "x", version=last))
        assert method == "published_state"
        fetched.append(arguments[0])
        return versions[arguments[0]]

    monkeypatch.setattr(client, "_call", call)
    return fetched


@cpu_alone
def test_versions_of_another_node_do_not_fill_this_ones_memory(
    chain, client_of, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = client_of(chain())
    versions: dict[int, object] = {}
    published_elsewhere(client, monkeypatch, versions)
    found = []
    for version in range(1, 7):
        versions[version] = ray.put(pack({"weight": torch.full((8,), float(version))}))
        found.append(client.newest(version - 1, 60))
    there = sorted(str(path) for path in client._folder.path.glob("fetched-*"))
    assert there == [heads.path for heads in found[-KEPT_VERSIONS:]], "an engine may go back to one"
    assert checksum(load_state(found[-1].path)) == found[-1].checksum
    monkeypatch.undo()


@cpu_alone
@pytest.mark.parametrize("on_error", ["disable", "raise"])
def test_a_full_memory_costs_a_version_of_another_node_and_not_the_run(
    chain, client_of, monkeypatch: pytest.MonkeyPatch, on_error: str
) -> None:
    client = client_of(chain(), on_error=on_error)
    published_elsewhere(client, monkeypatch, {1: ray.put(pack({"weight": torch.zeros(8)}))})

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("medusa_ppo.companion.client.save_state", full)
        if on_error == "raise":
            with pytest.raises(CompanionError, match="No space left"):
                client.newest(0, 60)
        else:
            assert client.newest(0, 60) is None and "No space left" in client._error
    assert client.newest(0, 60).version == 1, "once there is room"
    monkeypatch.undo()


@cpu_alone
def test_a_version_that_takes_long_from_another_node_is_waited_for_once_and_arrives(
    chain, client_of, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each poll began anew, and waited for a minute. Meanwhile newer ones may be published."""
    client = client_of(chain())
    gate = tmp_path / "gate"
    versions: dict[int, object] = {
        1: _once.remote(str(gate), pack({"weight": torch.ones(8)})),
        2: _once.remote(str(gate), pack({"weight": torch.zeros(8)})),
    }
    later = versions.pop(2)
    fetched = published_elsewhere(client, monkeypatch, versions)
    waited: list[float] = []
    wait = ray.wait

    def short(calls: list[object], *, timeout: float, **how: object) -> object:
        if calls[0] in (versions[1], later):
            waited.append(timeout)
            timeout = min(timeout, 0.1)
        return wait(calls, timeout=timeout, **how)

    with monkeypatch.context() as patch:
        patch.setattr("medusa_ppo.companion.client.ray.wait", short)
        assert client.newest(0, 10) is None
        versions[2] = later
        assert client.newest(0, 10) is None
        assert fetched == [1] and waited == [FETCH_WAIT_S, 10] and client._error == ""
        assert client._fetch_wait_s == FETCH_WAIT_S / 2
    gate.touch()
    assert wait([versions[1]], timeout=60)[0]
    found = client.newest(0, 10)
    assert found.version == 1 and checksum(load_state(found.path)) == found.checksum
    assert client.newest(1, 60).version == 2 and fetched == [1, 2]
    monkeypatch.undo()


@cpu_alone
def test_a_version_that_does_not_arrive_from_another_node_is_asked_for_again(
    chain, client_of, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """After the time that its size takes on a slow network. So is one that the companion replaced
    with the engine's heads.
    """
    client = client_of(chain())
    pending = _once.remote(str(tmp_path / "gate"), None)
    fetched = published_elsewhere(client, monkeypatch, {1: pending})
    monkeypatch.setattr(client, "_fetch_wait_s", 0.0)
    assert client.newest(0, 0.1) is None and client._error == ""
    assert client._fetch_s == FETCH_WAIT_S + 3 * 16 * 16 * 4 / STATE_BYTES_PER_S
    monkeypatch.setattr(client, "_fetch_s", 0.0)
    assert client.newest(0, 0.1) is None and "did not arrive within" in client._error
    assert client.newest(0, 0.1) is None and fetched == [1, 1]
    monkeypatch.setattr(client, "_call", lambda *_: ray.put(None))
    client.go_on_from(0, {}, 0)
    assert client._fetch is None
    (tmp_path / "gate").touch()
    monkeypatch.undo()


@ray.remote(num_cpus=0)
def _once(gate: str, value: object) -> object:
    """The value, once that file is there."""
    while not Path(gate).exists():
        time.sleep(0.05)
    return value


@ray.remote(num_cpus=0)
def _never() -> None:
    time.sleep(600)


@cpu_alone
def test_a_companion_that_writes_for_long_is_not_ended_and_its_version_arrives(
    chain, client_of, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state of a large actor's heads takes minutes. What is mocked: the clock, the disk, and
    the calls to the companion's process, which go to a service in this one.
    """
    task = chain()
    client = client_of(task)
    ahead_s = [0.0]
    clock = SimpleNamespace(
        monotonic=lambda: time.monotonic() + ahead_s[0],
        process_time=time.process_time,
        time_ns=time.time_ns,
    )
    monkeypatch.setattr(service_module, "time", clock)
    config = CompanionConfig(batch_positions=64, learning_rate=2e-2)
    heads = HeadsConfig(task.hidden, task.vocab, num_heads=3)
    run, shm = str(tmp_path / "run"), str(tmp_path / "shm")
    service = CompanionService(
        ServiceArguments(heads, config, 0, None, run, shm), pack((task.lm_head_VD, None))
    )
    writes, written = threading.Event(), threading.Event()
    checkpoint = service._checkpoint

    def slow_disk() -> None:
        writes.set()
        assert written.wait(60)
        checkpoint()

    monkeypatch.setattr(service, "_checkpoint", slow_disk)
    monkeypatch.setattr(
        client, "_call", lambda name, _, *given: ray.put(getattr(service, name)(*given))
    )
    ended: list[object] = []
    monkeypatch.setattr("medusa_ppo.companion.client.ray.kill", lambda *_, **__: ended.append(1))
    # Until a version is made.
    for _ in range(12):
        service.submit(pack(task.batch()))
        assert until(lambda: writes.is_set() or service.drain(0))
        if writes.is_set():
            break
    assert writes.is_set()
    ahead_s[0] = 10 * client._hang_s
    assert client.newest(0, 60) is None and ended == [] and client._error == ""
    written.set()
    assert service.drain(60)
    published = client.newest(0, 60)
    assert published is not None and published.version == 1 and ended == []
    monkeypatch.undo()
    service.close()


@pytest.mark.parametrize("lost", [False, True])
def test_a_companion_without_its_state_goes_on_from_the_engines_version(
    chain, client_of, monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    """It has no run folder, and its published files are gone with its node. `lost`: so is the first
    call that tells it which heads the engine has, and it learns two versions of its own before the
    next one.
    """
    task = chain()
    client = client_of(task)
    for _ in range(8):
        if client.status().versions_published < 2:
            client.submit(task.batch())
            assert client.drain(60)
    published = client.newest(0)
    assert published is not None and published.version == 2
    kept = Path(published.path).rename(client._folder.path / "kept.safetensors")
    for file in client._folder.path.glob("heads-*"):
        file.unlink()
    (client._folder.path / "started").unlink()
    client._newest = dataclasses.replace(published, path=str(kept))
    ray.kill(client._actor, no_restart=False)
    task.drift()
    client.update_lm_head(task.lm_head_VD, task.policy_version)
    call, told = client._call, []

    def losing(method: str, group: str, *arguments: object) -> ray.ObjectRef:
        if method == "adopt":
            told.append(arguments[0])
            if lost and len(told) == 1:
                return ray.put(None)
        return call(method, group, *arguments)

    monkeypatch.setattr(client, "_call", losing)
    # Ray may take a minute to restart it on a busy machine.
    assert until(lambda: client.newest(published.version) is None and bool(told))
    if lost:
        for _ in range(2):
            client.submit(task.batch(100))
            assert client.drain(60)
        assert client.status().versions_published == published.version
        assert client.newest(published.version, 10.0) is None
    assert set(told) == {published.version} and len(told) >= 1 + lost
    assert client.status().restarts == 1
    newer = None
    for _ in range(10):
        client.submit(task.batch(100))
        assert client.drain(60)
        newer = newer or client.newest(published.version, 10.0)
    status = client.status()
    seen = status.versions_published, status.candidates_rejected, status.error, told
    assert newer is not None and newer.version > published.version, seen
