"""A companion by itself: parts become batches, behind HTTP and in a Ray; heads reach a feed; bad
input is refused and changes nothing.
"""

from __future__ import annotations

import itertools
import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import torch

from heads.errors import CheckpointError, CompanionError, ConfigError, DataError, FeedError
from heads.heads_config import HeadsConfig
from medusa_ppo.companion.companion_link import (
    COMPANION_TOKEN,
    PART_HEADER,
    HttpLink,
    open_link,
)
from medusa_ppo.companion.companion_server import CompanionServer, plain
from medusa_ppo.companion.desk import CompanionDesk
from medusa_ppo.companion.parts_wire import PartHeader, Tables, batch_tensors, write_part
from medusa_ppo.companion.positions import ROW_BYTES, EarlySample, block_rows
from medusa_ppo.companion.wire import ServiceArguments, unpack
from medusa_ppo.config.companion_section import CompanionConfig
from medusa_ppo.contract.rollout_batch import RolloutBatch
from medusa_ppo.feeds.feed_manifest import FeedVersion, Release
from medusa_ppo.feeds.folder_feed import FolderFeed
from tests.medusa_ppo.companion.conftest import ChainTask, until
from tests.medusa_ppo.companion.test_parts_wire import part_of


@pytest.fixture
def task() -> ChainTask:
    return ChainTask()


@pytest.fixture
def made(tmp_path: Path, task: ChainTask) -> Iterator[Callable[..., CompanionDesk]]:
    """made(**settings of the companion) -> a desk, which ends with the test."""
    desks: list[CompanionDesk] = []

    def make(**settings: object) -> CompanionDesk:
        given = {"batch_positions": 64, "learning_rate": 2e-2, "epochs": 4, **settings}
        config = CompanionConfig.model_validate({"feed": str(tmp_path / "feed"), **given})
        heads = HeadsConfig(task.hidden, task.vocab, num_heads=3)
        arguments = ServiceArguments(heads, config, 0, None, "", str(tmp_path / "published"))
        desks.append(CompanionDesk(arguments, (task.lm_head_VD, None)))
        return desks[-1]

    yield make
    for desk in desks:
        desk.close()


@pytest.fixture
def desk(made: Callable[..., CompanionDesk]) -> CompanionDesk:
    return made()


@pytest.fixture
def served(
    desk: CompanionDesk, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[CompanionDesk, str]]:
    monkeypatch.setenv(COMPANION_TOKEN, "a secret of this test")
    server = CompanionServer(desk, "127.0.0.1", 0)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    assert until(lambda: bool(server.port) or not thread.is_alive())
    yield desk, f"http://127.0.0.1:{server.port}"
    server.stop()
    thread.join()


def header(number: int = 0, **more: int) -> PartHeader:
    return PartHeader(number=number, policy_version=number, tables_version=number, **more)


def put(
    desk: CompanionDesk, batch: RolloutBatch, tables: Tables | None, told: PartHeader
) -> PartHeader:
    path = desk.folder / "incoming"
    told = write_part(path, batch_tensors(batch, logprobs=True), tables, told)
    desk.take(path, told)
    path.unlink()
    return told


def put_without_logprobs(
    desk: CompanionDesk, batch: RolloutBatch, tables: Tables | None, told: PartHeader
) -> None:
    path = desk.folder / f"incoming from {told.rank}"
    desk.take(path, write_part(path, batch_tensors(batch, logprobs=False), tables, told))


def received(desk: CompanionDesk) -> int:
    return desk.status().batches_received


def test_heads_learn_from_parts_and_reach_the_feed(
    desk: CompanionDesk, task: ChainTask, tmp_path: Path
) -> None:
    for number in range(8):
        put(desk, part_of(task, 64), (task.lm_head_VD, None), header(number))
        assert desk.drain(60)
    status = desk.status()
    assert status.batches_trained == 8 and not status.error
    assert desk._service._feeder.drain(60)
    manifest = FolderFeed(tmp_path / "feed").manifest()
    assert manifest is not None
    length = manifest.versions[-1].judged.mean_acceptance_length
    assert length is not None and length > 1.5
    wish = desk.wish()
    assert (wish.trained, wish.published) == (8, manifest.newest) and wish.tables_version == 7


def publishing(desk: CompanionDesk) -> CompanionDesk:
    """The desk, whose companion has just published a version and hands it to the feed."""
    service = desk._service
    service._cycle.version = 1
    service._publish()
    service._feed_newest()
    return desk


@torch.no_grad()
@pytest.mark.parametrize("drained", [True, False])
def test_the_end_waits_for_what_is_on_its_way_into_the_feed(
    made: Callable[..., CompanionDesk],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    drained: bool,
) -> None:
    """An upload had three seconds at most, and large heads take minutes: the version was lost."""
    monkeypatch.setattr("medusa_ppo.companion.service.LAST_BATCH_S", 0.0)
    publish, may = FolderFeed.publish, threading.Event()

    def slow(feed: FolderFeed, path: Path, release: Release) -> FeedVersion:
        assert may.wait(60)
        return publish(feed, path, release)

    monkeypatch.setattr(FolderFeed, "publish", slow)
    desk = publishing(made())
    feed = FolderFeed(tmp_path / "feed")
    if drained:
        assert not desk.drain(0.05)
    release_soon = threading.Timer(0.5, may.set)
    release_soon.start()
    if drained:
        assert desk.drain(60) and feed.manifest() is not None
    desk.close()
    release_soon.join()
    manifest = feed.manifest()
    assert manifest is not None and manifest.newest == 1


@pytest.mark.parametrize("drained", [True, False])
def test_the_end_tries_again_what_the_feed_could_not_take(
    made: Callable[..., CompanionDesk],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    drained: bool,
) -> None:
    publish = FolderFeed.publish

    def away(*_: object) -> FeedVersion:
        raise FeedError("The feed is being started again.")

    monkeypatch.setattr(FolderFeed, "publish", away)
    desk = publishing(made())
    feed = FolderFeed(tmp_path / "feed")
    assert until(lambda: "being started again" in desk._service.feed_problem)
    assert feed.manifest() is None
    monkeypatch.setattr(FolderFeed, "publish", publish)
    if drained:
        assert desk.drain(60) and feed.manifest() is not None
    desk.close()
    manifest = feed.manifest()
    assert manifest is not None and manifest.newest == 1


def test_parts_of_all_processes_become_one_batch(desk: CompanionDesk, task: ChainTask) -> None:
    tables = task.lm_head_VD, None
    put(desk, part_of(task), None, header(ranks=3, rank=1))
    put(desk, part_of(task), tables, header(ranks=3, rank=0))
    assert received(desk) == 0
    put(desk, part_of(task), None, header(ranks=3, rank=2))
    assert received(desk) == 1
    # One that has died: the others' rows go when the next step's come.
    put(desk, part_of(task), tables, header(1, ranks=3, rank=0))
    put(desk, part_of(task), tables, header(2, ranks=3, rank=0))
    assert received(desk) == 2


def responses_of_batches(desk: CompanionDesk) -> list[int]:
    """How many responses each batch has that goes to the service from now on."""
    sizes: list[int] = []
    desk._service.submit = lambda packed, *_, **__: sizes.append(  # type: ignore[method-assign]
        unpack(packed).lengths_S.numel()
    )
    return sizes


def test_a_late_part_is_dropped_alone(desk: CompanionDesk, task: ChainTask) -> None:
    """It broke up the next step: what had come of that one went alone, and the rest by itself."""
    tables = task.lm_head_VD, None
    sizes = responses_of_batches(desk)
    order = [(1, 0), (1, 1), (2, 0), (1, 2), (2, 1), (2, 2), (3, 0), (3, 1), (3, 2)]
    for number, rank in order:
        put(desk, part_of(task), None if rank else tables, header(number, ranks=3, rank=rank))
    one = part_of(task).lengths_S.numel()
    assert sizes == [2 * one, 3 * one, 3 * one]
    assert desk.status().batches_dropped == 1
    # One that begins to send anew after its restart, with the numbers of before, is not late.
    put(desk, part_of(task), tables, header(4, ranks=3, rank=0))
    for _ in range(2):
        put(desk, part_of(task), tables, header(5, ranks=3, rank=0))
    put(desk, part_of(task), None, header(5, ranks=3, rank=1))
    put(desk, part_of(task), None, header(5, ranks=3, rank=2))
    assert sizes[3:] == [one, one, 3 * one] and desk.status().batches_dropped == 1


@pytest.mark.parametrize("behind", [2, 5])
def test_a_process_that_is_several_steps_behind_leaves_the_others_together(
    desk: CompanionDesk, task: ChainTask, behind: int
) -> None:
    """Its part counted as a new step, and those of the others, which were on time, as late."""
    tables = task.lm_head_VD, None
    sizes = responses_of_batches(desk)
    steps = behind + 4
    for number in range(1, steps + 1):
        late = [(number - behind, 2)] if number > behind else []
        for sent, rank in [(number, 0), *late, (number, 1)]:
            put(desk, part_of(task), None if rank else tables, header(sent, ranks=3, rank=rank))
    # It has caught up.
    for rank in range(3):
        told = header(steps + 1, ranks=3, rank=rank)
        put(desk, part_of(task), None if rank else tables, told)
    one = part_of(task).lengths_S.numel()
    assert sizes == [2 * one] * steps + [3 * one]
    assert desk.status().batches_dropped == 4


def test_a_training_that_begins_again_with_its_numbers_is_not_late(
    desk: CompanionDesk, task: ChainTask
) -> None:
    tables = task.lm_head_VD, None
    sizes = responses_of_batches(desk)
    for number, rank in [(1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (1, 0), (1, 1), (1, 2)]:
        put(desk, part_of(task), None if rank else tables, header(number, ranks=3, rank=rank))
    one = part_of(task).lengths_S.numel()
    assert sizes == [2 * one, 2 * one, one, 3 * one] and desk.status().batches_dropped == 0


def test_a_late_part_with_its_own_tables_is_learned_from(
    desk: CompanionDesk, task: ChainTask
) -> None:
    """Whole tables take more than a step to arrive. They were dropped with their part, so that the
    first process sent them again, late again: nobody's rows were learned from.
    """
    sizes = responses_of_batches(desk)
    tables = task.lm_head_VD, None
    for number, rank in [(1, 1), (2, 1), (1, 0), (2, 0)]:
        put(desk, part_of(task), None if rank else tables, header(number, ranks=2, rank=rank))
    one = part_of(task).lengths_S.numel()
    assert sizes == [one, 2 * one] and desk.wish().tables_version == 2
    assert desk.status().batches_dropped == 1, "those of process 1 went before the tables came"


def test_a_process_that_is_behind_may_have_several_calls_of_a_step(
    desk: CompanionDesk, task: ChainTask
) -> None:
    """Taps that don't meet number updates, not calls: the second part of the process that was
    behind was dropped in each step, as if the next step had begun.
    """
    sizes = responses_of_batches(desk)
    tables = task.lm_head_VD, None
    for number in range(3):
        for rank in (0, 0, 1, 1):
            put(desk, part_of(task), None if rank else tables, header(number, ranks=2, rank=rank))
    put(desk, part_of(task), tables, header(3, ranks=2, rank=0))
    one = part_of(task).lengths_S.numel()
    assert sizes == [one, 2 * one, one] * 3
    assert desk.status().batches_dropped == 0 and not desk.wish().problem


def test_rows_without_their_tables_are_not_learned_from(
    desk: CompanionDesk, task: ChainTask
) -> None:
    put(desk, part_of(task), None, header(1))
    assert received(desk) == 0 and "tables" in desk.wish().problem
    assert desk.status().batches_dropped == 1
    desk._service._feeder._problem = "The feed is away."
    assert "tables" in desk.wish().problem, "what a tap can't change does not hide it"
    desk._note = ""
    assert desk.wish().problem == "The feed is away."
    desk._service._feeder._problem = ""
    put(desk, part_of(task), (task.lm_head_VD, None), header(1))
    put(desk, part_of(task), None, header(2).model_copy(update={"tables_version": 1}))
    assert received(desk) == 2 and desk.wish().tables_version == 1


def test_no_more_rows_are_wanted_than_there_is_time_for(
    made: Callable[..., CompanionDesk], task: ChainTask
) -> None:
    desk = made()
    rows = desk.wish().rows
    most = CompanionConfig().queue_bytes // 2 // (task.hidden * 4 + 24)
    assert 0.98 * most < rows < most
    for number in range(2):
        put(desk, part_of(task, 64), (task.lm_head_VD, None), header(number))
        assert desk.drain(60)
    # The steps came as quickly as they were trained on.
    assert 64 <= desk.wish().rows < rows


def test_a_batch_is_half_of_the_queue_in_whatever_dtype_its_states_are(
    made: Callable[..., CompanionDesk], task: ChainTask
) -> None:
    """Tables in bfloat16 gave float32 states the whole queue: what came while such a batch was
    trained on was dropped.
    """
    task.lm_head_VD = task.lm_head_VD.to(torch.bfloat16)
    desk = made(queue_bytes=2_000_000)
    most = {width: 1_000_000 // (task.hidden * width + ROW_BYTES) for width in (2, 4)}
    assert 0.8 * most[4] < desk.wish().rows <= most[4], "nothing has come yet"
    batch = part_of(task)
    tables = task.lm_head_VD, None
    for number, (dtype, width) in enumerate(((torch.bfloat16, 2), (torch.float32, 4))):
        states = replace(batch, hidden_MD=batch.hidden_MD.to(dtype))
        put(desk, states, tables, header(number))
        assert desk.drain(60)
        desk._step_s = 0.0  # However long they take.
        assert 0.8 * most[width] < desk.wish().rows <= most[width]


def test_two_samples_of_several_processes_fit_into_the_queue(
    made: Callable[..., CompanionDesk], task: ChainTask
) -> None:
    """They have the wanted size on average: half of all were larger than half of the queue."""
    queue_bytes = 2_800_000
    rows = made(queue_bytes=queue_bytes).wish().rows
    ranks, ahead = 8, 3

    def drawn(step: int) -> int:
        found = random.Random(step)
        total = 0
        for rank in range(ranks):
            lengths_S = torch.tensor([found.randint(50, 1500) for _ in range(8)])
            luck = (rank + found.random()) / ranks
            block = block_rows(rows, ahead)
            sample = EarlySample(rows / ranks, 0.0, found.getrandbits(32), ahead, block, luck=luck)
            weights_M, _ = sample.draw(lengths_S, None)
            total += int((weights_M >= 0).sum())
        return total

    sizes = [drawn(step) for step in range(24)]
    row_bytes = task.hidden * 4 + ROW_BYTES
    assert max(map(sum, itertools.pairwise(sizes))) * row_bytes <= queue_bytes
    assert sum(sizes) * row_bytes > 0.8 * len(sizes) * queue_bytes / 2


def test_bytes_on_their_way_have_a_bound(
    made: Callable[..., CompanionDesk], task: ChainTask
) -> None:
    desk = made(queue_bytes=1000)
    most = desk.most_bytes + 2 * 4 * task.vocab * (task.hidden + 2)
    assert desk.reserve(most - 10) and not desk.reserve(20) and desk.reserve(10)
    desk.give_back(most)
    put(desk, part_of(task), (task.lm_head_VD, None), header(ranks=2, rank=0))
    assert not desk.reserve(most - 10), "what waits for the others counts"


def test_tables_that_wait_for_other_processes_have_a_bound(
    made: Callable[..., CompanionDesk], task: ChainTask
) -> None:
    """Parts without rows counted as nothing, and held whole tables."""
    desk = made(queue_bytes=1000)
    tables = task.lm_head_VD, None
    path = desk.folder / "incoming"

    def send(told: PartHeader) -> None:
        told = write_part(path, {}, tables, told)
        size = path.stat().st_size
        assert desk.reserve(size)
        desk.take(path, told, size)

    send(header(ranks=9, rank=0))
    assert desk._held == task.lm_head_VD.nbytes and not desk._coming
    for rank in (1, 2):
        with pytest.raises(DataError, match="Only the first process"):
            send(header(ranks=9, rank=rank))
    assert desk._held == task.lm_head_VD.nbytes and not desk._coming
    # The others of that step never come; the next one's tables have room beside it.
    send(header(1, ranks=9, rank=0))
    assert desk._held == task.lm_head_VD.nbytes and not desk._coming


def test_a_state_that_is_nan_on_one_rank_is_told_and_the_others_are_learned_from(
    desk: CompanionDesk, task: ChainTask
) -> None:
    tables = task.lm_head_VD, None
    for number, ranks in ((0, 2), (1, 2)):
        put(desk, part_of(task, 32), tables, header(number, ranks=ranks, rank=0))
        if number:
            break
        path = desk.folder / "incoming"
        told = write_part(
            path, batch_tensors(part_of(task), logprobs=True), None, header(0, ranks=2, rank=1)
        )
        data = bytearray(path.read_bytes())
        # Of a tap that writes it all the same, whose release has no look at its states.
        data[-4:] = b"\xff\xff\xff\xff"
        path.write_bytes(data)
        with pytest.raises((DataError, CheckpointError)):
            desk.take(path, told)
        assert "process 1" in desk.wish().problem
    # The first step went when the second one's came, with what there was of it.
    assert desk.drain(60) and received(desk) == 1
    assert desk.status().batches_trained == 1 and not desk.status().error


def test_ranks_of_different_lengths_and_one_that_taps_nothing(
    desk: CompanionDesk, task: ChainTask
) -> None:
    tables = task.lm_head_VD, None
    for number in range(3):
        # Rank 2 has no row of this step, and sends nothing at all.
        put(desk, part_of(task, 40), tables, header(number, ranks=3, rank=0))
        put(desk, part_of(task, 3), None, header(number, ranks=3, rank=1))
    assert desk.drain(60) and received(desk) == 2, "the last one waits for the next step"
    status = desk.status()
    assert status.batches_trained == 2 and not status.error
    assert desk.wish().tables_version == 1


def test_parts_without_rows_complete_a_step_and_bring_its_tables(
    desk: CompanionDesk, task: ChainTask
) -> None:
    def without_rows(tables: Tables | None, told: PartHeader) -> None:
        path = desk.folder / "incoming"
        desk.take(path, write_part(path, {}, tables, told))
        path.unlink()

    without_rows((task.lm_head_VD, None), header(ranks=3, rank=0, left_out=70))
    without_rows(None, header(ranks=3, rank=2, left_out=7))
    put(desk, part_of(task, 40), None, header(ranks=3, rank=1))
    assert received(desk) == 1 and desk.wish().tables_version == 0
    # A step without any row is none, and its tables stay.
    for rank in range(3):
        tables = None if rank else (task.lm_head_VD, None)
        without_rows(tables, header(1, ranks=3, rank=rank))
    assert received(desk) == 1 and desk.wish().tables_version == 1
    assert desk.drain(60) and not desk.wish().problem


def test_over_http(served: tuple[CompanionDesk, str], task: ChainTask, tmp_path: Path) -> None:
    desk, address = served
    link = open_link(address)
    wish = link.ask()
    assert (wish.hidden, wish.vocab, wish.ahead) == (task.hidden, task.vocab, 3)
    path = tmp_path / "part"
    tables = task.lm_head_VD, None
    told = write_part(path, batch_tensors(part_of(task), logprobs=False), tables, header(4))
    assert link.put(path, told).tables_version == 4
    assert received(desk) == 1 and list(desk.folder.glob("tmp*")) == []
    answer = httpx.get(
        f"{address}/status",
        headers={"Authorization": "Bearer a secret of this test"},
        trust_env=False,
    )
    assert answer.json()["batches_received"] == 1
    link.close()


def test_who_has_no_token_gets_nothing(
    served: tuple[CompanionDesk, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk, address = served
    for wrong in ("", "another"):
        monkeypatch.setenv(COMPANION_TOKEN, wrong)
        link = HttpLink(address)
        (tmp_path / "part").write_bytes(b"x" * 100)
        with pytest.raises(CompanionError, match="401"):
            link.ask()
        with pytest.raises(CompanionError, match="401"):
            link.put(tmp_path / "part", header())
        link.close()
    monkeypatch.delenv(COMPANION_TOKEN)
    for host in ("127.0.0.1", "0.0.0.0"):
        with pytest.raises(ConfigError, match=COMPANION_TOKEN):
            CompanionServer(desk, host, 0)


def test_bad_requests_take_no_memory_and_change_nothing(
    served: tuple[CompanionDesk, str], task: ChainTask, tmp_path: Path
) -> None:
    desk, address = served
    headers = {"Authorization": "Bearer a secret of this test"}
    good = {**headers, PART_HEADER: header().model_dump_json()}
    path = tmp_path / "part"
    write_part(path, batch_tensors(part_of(task), logprobs=True), None, header())
    whole = path.read_bytes()

    def answer(
        data: bytes, given: dict[str, str], method: str = "PUT", where: str = "parts"
    ) -> int:
        return httpx.request(
            method, f"{address}/{where}", content=data, headers=given, trust_env=False
        ).status_code

    assert answer(whole, headers) == 400
    assert answer(whole, {**headers, PART_HEADER: "{}"}) == 400
    assert answer(whole[:-8], good) == 400
    assert answer(b"\x80\x04cos\nsystem\n", good) == 400
    assert answer(b"", good) in (400, 413)
    assert answer(whole, good, "POST") == 405
    assert answer(whole, good, where="elsewhere") == 404
    host, port = address.removeprefix("http://").split(":")
    lines = "".join(f"{name}: {value}\r\n" for name, value in good.items())
    with socket.create_connection((host, int(port))) as peer:
        text = f"PUT /parts HTTP/1.1\r\nHost: x\r\n{lines}Content-Length: 100000000000\r\n\r\n"
        peer.sendall(text.encode() + b"x" * 1000)
        assert b" 413 " in peer.recv(4096)
    with socket.create_connection((host, int(port))) as peer:
        text = f"PUT /parts HTTP/1.1\r\nHost: x\r\n{lines}Content-Length: 5000\r\n\r\n"
        peer.sendall(text.encode() + b"x" * 1000)  # And goes away in the middle.
    assert until(lambda: desk.reserve(desk.most_bytes), 10), "its room is given back"
    desk.give_back(desk.most_bytes)
    assert received(desk) == 0 and not list(desk.folder.glob("tmp*"))
    assert answer(whole, good) == 200


def test_a_part_that_never_ends_is_given_up(
    served: tuple[CompanionDesk, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a node that lost its power; its file and its room were kept for ever."""
    monkeypatch.setattr("medusa_ppo.companion.companion_server.ANSWER_S", 1.0)
    desk, address = served
    host, port = address.removeprefix("http://").split(":")
    told = {
        "Authorization": "Bearer a secret of this test",
        PART_HEADER: header().model_dump_json(),
        "Content-Length": "5000",
    }
    lines = "".join(f"{name}: {value}\r\n" for name, value in told.items())
    with socket.create_connection((host, int(port))) as peer:
        peer.settimeout(60)
        peer.sendall(f"PUT /parts HTTP/1.1\r\nHost: x\r\n{lines}\r\n".encode() + b"x" * 1000)
        heard = b""
        while part := peer.recv(4096):
            heard += part
        assert b" 408 " in heard
    assert until(lambda: not desk._coming, 30) and not list(desk.folder.glob("tmp*"))


def test_a_part_that_finds_no_room_on_the_disk_gives_its_room_back(
    served: tuple[CompanionDesk, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk, address = served
    (tmp_path / "part").write_bytes(b"x" * 100)
    monkeypatch.setattr(desk, "folder", tmp_path / "gone")
    link = HttpLink(address)
    with pytest.raises(CompanionError, match=r"507 .*No such file"):
        link.put(tmp_path / "part", header())
    link.close()
    assert until(lambda: not desk._coming, 30)


def test_whoever_answers_as_no_companion_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("medusa_ppo.companion.companion_link.ANSWER_S", 0.5)
    over = threading.Event()
    for data in (
        b"no HTTP",
        b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:9/\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nContent-Length: 90000000000\r\n\r\n" + b"x" * 1_000_000,
        b"",
    ):
        listening = socket.create_server(("127.0.0.1", 0))

        def answer(listening: socket.socket = listening, data: bytes = data) -> None:
            peer, _ = listening.accept()
            peer.recv(65536)
            peer.sendall(data)
            over.wait(5)
            peer.close()

        threading.Thread(target=answer, daemon=True).start()
        link = open_link(f"http://127.0.0.1:{listening.getsockname()[1]}")
        began = time.monotonic()
        with pytest.raises(CompanionError):
            link.ask()
        assert time.monotonic() - began < 60
        link.close()
        listening.close()
    over.set()


@pytest.mark.parametrize("address", ["", "somewhere", "ftp://host", "http://", "ray:", "ray:a/b"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="do this"):
        open_link(address)


def test_json_has_no_nan() -> None:
    assert json.dumps(plain({"a": (float("nan"), 1.5), "b": [float("inf")]})) == (
        '{"a": [null, 1.5], "b": [null]}'
    )


def test_states_of_another_dtype_than_the_tables_are_learned_from(
    desk: CompanionDesk, task: ChainTask
) -> None:
    batch = part_of(task, 32)
    tensors = batch_tensors(batch, logprobs=False)
    tensors["hidden_MD"] = tensors["hidden_MD"].to(torch.bfloat16)
    path = desk.folder / "incoming"
    desk.take(path, write_part(path, tensors, (task.lm_head_VD, None), header()))
    assert desk.drain(60) and not desk.status().error


def test_taps_are_answered_while_missing_log_probs_are_computed(
    desk: CompanionDesk, task: ChainTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were computed under the lock that all requests need, until taps gave up."""
    computes, go_on = threading.Event(), threading.Event()
    logsumexp = torch.Tensor.logsumexp

    def slow(*given: object, **more: object) -> torch.Tensor:
        computes.set()
        assert go_on.wait(60)
        return logsumexp(*given, **more)

    monkeypatch.setattr(torch.Tensor, "logsumexp", slow)
    tables = task.lm_head_VD, None
    takes = threading.Thread(
        target=lambda: put_without_logprobs(desk, part_of(task, 64), tables, header())
    )
    takes.start()
    assert computes.wait(60)
    answered: list[object] = []

    def ask() -> None:
        answered.append(desk.wish())
        answered.append(desk.reserve(10))
        desk.give_back(10)
        put_without_logprobs(desk, part_of(task, 64), None, header(ranks=2))
        answered.append(desk.wish())

    asks = threading.Thread(target=ask)
    asks.start()
    asks.join(30)
    count = len(answered)
    go_on.set()
    for thread in (asks, takes):
        thread.join(60)
    assert count == 3 and answered[1] is True
    assert desk.drain(60) and not desk.status().error and desk.status().batches_trained == 1


def test_the_table_is_moved_once_for_all_parts_without_log_probs(
    desk: CompanionDesk, task: ChainTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    move = torch.Tensor.to
    moved: list[torch.Tensor] = []

    def counted(tensor: torch.Tensor, *given: object, **more: object) -> torch.Tensor:
        if tensor.shape == task.lm_head_VD.shape:
            moved.append(tensor)
        return move(tensor, *given, **more)

    monkeypatch.setattr(torch.Tensor, "to", counted)
    counts = []
    for number, ranks in enumerate((1, 4)):
        moved.clear()
        for rank in range(ranks):
            tables = None if rank else (task.lm_head_VD, None)
            put_without_logprobs(
                desk, part_of(task, 64), tables, header(number, ranks=ranks, rank=rank)
            )
        assert desk.drain(60) and not desk.status().error
        counts.append(len(moved))
    assert desk.status().batches_trained == 2 and counts[0] == counts[1] > 0
