"""An engine of several ranks that feeds itself, without vLLM: whatever its workers raise, the
engine goes on, and the next version serves.

What stands for vLLM's core are the lines of its `MultiprocExecutor.collective_rpc`: each rank puts
its answer into a queue of its own, and the call raises at the first rank that failed, with the
other ranks' answers still in their queues.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from heads.heads_config import HeadsConfig
from medusa_ppo.feeds.folder_feed import FolderFeed
from medusa_ppo.vllm_plugin import feed_watch, self_feeding, worker_extension
from medusa_ppo.vllm_plugin.feed_watch import FeedWatch
from medusa_ppo.vllm_plugin.self_feeding import MOST_FAULTS, EngineFeeder
from medusa_ppo.vllm_plugin.speculation import FEED
from medusa_ppo.vllm_plugin.worker_extension import MedusaWorker
from tests.medusa_ppo.feeds.conftest import actor, heads_file, release

RANKS = 2


class Drafter:
    """What a rank's worker asks of its drafter; `faults` has the versions at which it fails."""

    def __init__(self, faults: dict[int, Exception]) -> None:
        self.heads = SimpleNamespace(config=HeadsConfig(**actor().heads))
        self.fed = True
        self.version = 0
        self.heads_checksum = ""
        self.faults = faults
        self.swaps: list[int] = []
        self.made: list[Path] = []
        self.prepares = threading.Event()
        self.prepares.set()

    def held_version(self) -> int:
        return self.version if self.fed else -1

    def ahead(self, path: str, checked: Any) -> Callable[[], Any]:
        return self.prepares.wait

    def made_beside(self, begun: Any, path: str, checked: Any) -> Any:
        self.made.append(Path(path))
        return begun.result()

    def swap(self, path: str, version: int, checked: Any, ready: Any = None) -> None:
        self.swaps.append(version)
        if version in self.faults:
            raise self.faults[version]
        if ready is not None:
            ready()
        self.fed, self.version, self.heads_checksum = True, version, checked.checksum


class Core:
    """vLLM's core with its workers, as a feeder sees it."""

    def __init__(self, model: Path, faults: list[dict[int, Exception]]) -> None:
        self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(world_size=len(faults)))
        self.workers = []
        for mine in faults:
            worker: Any = MedusaWorker()
            worker.model_runner = SimpleNamespace(drafter=Drafter(mine))
            worker.vllm_config = SimpleNamespace(
                model_config=SimpleNamespace(model=str(model), revision=None),
                load_config=SimpleNamespace(download_dir=None),
            )
            self.workers.append(worker)
        self.queues: list[deque[tuple[bool, Any]]] = [deque() for _ in faults]

    @property
    def drafters(self) -> list[Drafter]:
        return [worker.model_runner.drafter for worker in self.workers]

    def is_sleeping(self) -> bool:
        return False

    def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        for worker, queue in zip(self.workers, self.queues, strict=True):
            try:
                queue.append((True, getattr(worker, method)(*args)))
            except Exception as error:
                queue.append((False, str(error)))
        responses = []
        for queue in self.queues:
            good, result = queue.popleft()
            if not good:
                raise RuntimeError(f"Worker failed with error '{result}'")
            responses.append(result)
        return responses


@pytest.fixture
def published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_rank: None
) -> Callable[[int], None]:
    """published(number): a version of a feed that engines of this test look at."""
    monkeypatch.setattr(feed_watch, "LOOK_S", 0.01)
    monkeypatch.setattr(self_feeding, "ASK_S", 0.0)
    monkeypatch.setattr(self_feeding, "VERSION_S", 0.0)
    monkeypatch.setattr(worker_extension, "require_active", list)
    monkeypatch.setenv(FEED, str(tmp_path / "feed"))
    feed = FolderFeed(tmp_path / "feed")

    def publish(number: int) -> None:
        feed.publish(heads_file(tmp_path / "state", number), release(number))

    return publish


@pytest.fixture
def begin() -> Any:
    """begin(core): its feeder, which ends with the test, as do its workers' threads."""
    begun: list[tuple[Core, EngineFeeder]] = []

    def start(core: Core) -> EngineFeeder:
        begun.append((core, EngineFeeder(core)))
        return begun[-1][1]

    yield start
    for core, feeder in begun:
        for drafter in core.drafters:
            drafter.prepares.set()
        feeder.close()


def step_until(feeder: EngineFeeder, core: Core, condition: Callable[[], bool]) -> None:
    """The test's own time limit ends it."""
    while not condition():
        feeder.between_steps(core)
        time.sleep(0.001)


def serves_first(
    begin: Callable[[Core], EngineFeeder], core: Core, published: Callable[[int], None]
) -> tuple[EngineFeeder, FeedWatch]:
    """A feeder that has loaded version 1, and its watch."""
    feeder = begin(core)
    watch = feeder._watch
    assert watch is not None
    published(1)
    step_until(feeder, core, lambda: watch.known == 1)
    return feeder, watch


BROKEN = RuntimeError("an illegal memory access")


@pytest.mark.parametrize("failing", [(0, 1), (0,), (1,)])
@pytest.mark.parametrize("lost", [False, True])
def test_a_version_that_makes_workers_raise_is_left_out_and_the_next_one_serves(
    published: Callable[[int], None],
    begin: Callable[[Core], EngineFeeder],
    tmp_path: Path,
    failing: tuple[int, ...],
    lost: bool,
) -> None:
    core = Core(tmp_path, [{2: BROKEN} if rank in failing else {} for rank in range(RANKS)])
    feeder, watch = serves_first(begin, core, published)
    if lost:
        # The heads were gone when the error came.
        for rank in failing:
            drafter = core.drafters[rank]
            swap = drafter.swap

            def losing(*args: Any, mine: Drafter = drafter, swap: Any = swap, **more: Any) -> None:
                mine.fed = False
                swap(*args, **more)

            drafter.swap = losing  # type: ignore[method-assign]
    published(2)
    step_until(feeder, core, lambda: any(2 in drafter.swaps for drafter in core.drafters))
    # What serves after the failure are the last good heads, on all ranks.
    assert [drafter.held_version() for drafter in core.drafters] == [1] * RANKS
    assert watch.known == 1 and not any(core.queues)
    published(3)
    step_until(feeder, core, lambda: watch.known == 3)
    assert [drafter.held_version() for drafter in core.drafters] == [3] * RANKS
    assert not any(core.queues), "every answer was taken by the call that it belongs to"


@pytest.mark.parametrize("call", ["medusa_feed_ahead", "medusa_feed_ready"])
def test_calls_that_fail_drop_a_version_and_after_a_few_in_a_row_feeding_ends(
    published: Callable[[int], None],
    begin: Callable[[Core], EngineFeeder],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
) -> None:
    core = Core(tmp_path, [{}, {}])
    feeder = begin(core)
    watch = feeder._watch
    assert watch is not None
    honest = core.collective_rpc
    failed: list[str] = []

    def failing(method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        if method == call and fails:
            failed.append(method)
            raise TimeoutError("RPC call timed out.")
        return honest(method, args)

    core.collective_rpc = failing  # type: ignore[method-assign]
    fails = True
    with caplog.at_level(logging.WARNING, logger="medusa_ppo"):
        published(1)
        step_until(feeder, core, lambda: len(failed) == 1)
        assert feeder._coming is None and watch.known == 0
        fails = False
        published(2)
        step_until(feeder, core, lambda: watch.known == 2)
        fails = True
        for number in range(MOST_FAULTS):
            assert feeder._watch is watch
            published(3 + number)
            step_until(feeder, core, lambda: len(failed) == 2 + number)  # noqa: B023
    assert feeder._watch is None
    feeder.between_steps(core)
    told = [record.getMessage() for record in caplog.records]
    assert sum("loads no more heads" in text for text in told) == 1, told
    watch._thread.join(60)
    assert not watch._thread.is_alive() and not watch._folder.path.exists()
    assert [drafter.version for drafter in core.drafters] == [2, 2]


@pytest.mark.parametrize("lost", [(0, 1), (1,)])
@pytest.mark.parametrize("woken", [False, True])
def test_heads_that_are_lost_in_any_way_are_loaded_again(
    published: Callable[[int], None],
    begin: Callable[[Core], EngineFeeder],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lost: tuple[int, ...],
    woken: bool,
) -> None:
    """Whether or not the core has heard of it. The sketch of the actor, for which a whole model is
    laid out, is made when the engine begins, and never again.
    """
    sketched: list[Any] = []
    sketch = MedusaWorker._medusa_sketch

    def seen(self: MedusaWorker) -> str:
        sketched.append(self)
        return sketch(self)

    monkeypatch.setattr(MedusaWorker, "_medusa_sketch", seen)
    core = Core(tmp_path, [{}, {}])
    feeder, _ = serves_first(begin, core, published)
    if woken:
        monkeypatch.setattr(self_feeding, "VERSION_S", 1e9)
        feeder.between_steps(core)
        feeder._asks_at = 1e9
    for _ in range(2):
        for rank in lost:
            core.drafters[rank].fed = False
        feeder.woken = woken
        feeder.between_steps(core)
        assert [drafter.held_version() for drafter in core.drafters] == [1, 1]
    assert not any(core.queues)
    assert sketched == core.workers, "once for each rank"


def test_heads_that_are_lost_while_newer_ones_are_prepared_leave_those(
    published: Callable[[int], None], begin: Callable[[Core], EngineFeeder], tmp_path: Path
) -> None:
    """The lost ones serve until the newer ones are ready, whose file and preparation stay."""
    core = Core(tmp_path, [{}, {}])
    feeder, watch = serves_first(begin, core, published)
    for drafter in core.drafters:
        drafter.prepares.clear()
        drafter.made.clear()
    published(2)
    step_until(feeder, core, lambda: feeder._coming is not None)
    coming = feeder._coming
    for drafter in core.drafters:
        drafter.fed = False
    feeder.between_steps(core)
    assert [drafter.held_version() for drafter in core.drafters] == [1, 1]
    looks = watch.looks
    step_until(feeder, core, lambda: watch.looks > looks + 2)
    for drafter in core.drafters:
        drafter.prepares.set()
    step_until(feeder, core, lambda: watch.known == 2 or feeder._coming is not coming)
    assert watch.known == 2 and watch.serving is coming, "offered once"
    assert [drafter.made for drafter in core.drafters] == [[coming.path]] * 2
    assert [drafter.swaps for drafter in core.drafters] == [[1, 1, 2]] * 2


def test_lost_heads_that_cannot_be_loaded_are_tried_ever_more_rarely(
    published: Callable[[int], None],
    begin: Callable[[Core], EngineFeeder],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core = Core(tmp_path, [{}])
    feeder, _ = serves_first(begin, core, published)
    now = [0.0]
    monkeypatch.setattr(self_feeding, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(self_feeding, "VERSION_S", 5.0)
    feeder._asks_at, feeder._patience_s = 0.0, 5.0
    (drafter,) = core.drafters
    drafter.fed, drafter.faults[1], drafter.swaps = False, BROKEN, []
    tried = []
    for second in range(100):
        now[0] = float(second)
        before = len(drafter.swaps)
        feeder.between_steps(core)
        tried += [second] * (len(drafter.swaps) - before)
    assert tried == [0, 10, 30, 70]
    drafter.faults.clear()
    for second in range(100, 200):
        now[0] = float(second)
        feeder.between_steps(core)
    assert drafter.swaps == [1] * 5 and drafter.held_version() == 1
    assert feeder._patience_s == 5.0


def test_a_question_that_fails_is_asked_ever_more_rarely_and_an_answer_ends_the_count(
    published: Callable[[int], None],
    begin: Callable[[Core], EngineFeeder],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps follow each other in milliseconds, so workers that were busy for one of them were asked
    three times at once, and feeding ended for good.
    """
    core = Core(tmp_path, [{}])
    feeder, watch = serves_first(begin, core, published)
    # Versions are no part of it, so that what is counted is the questions.
    watch.end()
    watch._thread.join()
    now = [0.0]
    monkeypatch.setattr(self_feeding, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(self_feeding, "VERSION_S", 5.0)
    feeder._asks_at, feeder._patience_s = 0.0, 5.0
    honest = core.collective_rpc
    asked: list[float] = []
    fails = True

    def failing(method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        assert method == "medusa_feed_version"
        asked.append(now[0])
        if fails:
            now[0] += 2.0
            raise TimeoutError("RPC call timed out.")
        return honest(method, args)

    core.collective_rpc = failing  # type: ignore[method-assign]

    def steps_until(second: float) -> list[float]:
        asked.clear()
        while now[0] < second:
            feeder.between_steps(core)
            now[0] += 0.5
        return list(asked)

    assert steps_until(20.0) == [0.0, 12.0]
    for begins in (100.0, 200.0):
        fails = False
        now[0] = begins
        assert steps_until(begins + 1) == [begins]
        assert feeder._patience_s == 5.0
        fails = True
        assert steps_until(begins + 20) == [begins + 5, begins + 17]
    assert feeder._watch is watch
    # As many in a row as any other fault.
    steps_until(300.0)
    assert feeder._watch is None


def test_a_question_that_fails_leaves_the_version_that_is_being_prepared(
    published: Callable[[int], None],
    begin: Callable[[Core], EngineFeeder],
    tmp_path: Path,
) -> None:
    core = Core(tmp_path, [{}])
    feeder, watch = serves_first(begin, core, published)
    honest = core.collective_rpc
    failed: list[str] = []

    def failing(method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        if method == "medusa_feed_version" and feeder._coming is not None and not failed:
            failed.append(method)
            raise TimeoutError("RPC call timed out.")
        if method == "medusa_feed_ready" and not failed:
            return [{"ready": False}]
        return honest(method, args)

    core.collective_rpc = failing  # type: ignore[method-assign]
    published(2)
    step_until(feeder, core, lambda: bool(failed))
    assert feeder._coming is not None and feeder._coming.version == 2
    step_until(feeder, core, lambda: watch.known == 2)


@pytest.mark.parametrize("what", ["a rank without a drafter", "no room for a folder"])
def test_an_engine_that_cannot_be_fed_says_so_once_and_runs(
    published: Callable[[int], None],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    what: str,
) -> None:
    core = Core(tmp_path, [{}])
    if what == "a rank without a drafter":
        core.workers[0].model_runner = None
    else:

        def no_room(*_: Any, **__: Any) -> Any:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(feed_watch, "OwnedFolder", no_room)
    with caplog.at_level(logging.WARNING, logger="medusa_ppo"):
        feeder = EngineFeeder(core)
        for _ in range(3):
            feeder.between_steps(core)
        feeder.close()
    told = [record.getMessage() for record in caplog.records]
    assert sum("This engine loads no heads" in text for text in told) == 1, told


def test_ranks_that_are_engines_of_their_own_are_not_fed(
    published: Callable[[int], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each would load a version when it has seen it, in another step than the others: their
    collectives would wait for each other for ever.
    """
    published(1)
    core = Core(tmp_path, [{}, {}])
    core.vllm_config.parallel_config.distributed_executor_backend = "external_launcher"
    with caplog.at_level(logging.WARNING, logger="medusa_ppo"):
        feeder = EngineFeeder(core)
    assert feeder._watch is None
    feeder.between_steps(core)
    assert [drafter.swaps for drafter in core.drafters] == [[], []]
    assert "external_launcher" in caplog.text


def test_a_file_of_git_lfs_beside_the_weights_leaves_the_sketch_empty(
    published: Callable[[int], None],
    begin: Callable[[Core], EngineFeeder],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from transformers import LlamaConfig

    sizes: dict[str, Any] = {"hidden_size": 8, "vocab_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 8}
    config = LlamaConfig(**sizes, **heads)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path / "model")
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"
    (tmp_path / "model" / "adapter.safetensors").write_text(pointer)
    core = Core(tmp_path / "model", [{}])
    with caplog.at_level(logging.WARNING, logger="medusa_ppo"):
        feeder = begin(core)
    assert core.collective_rpc("medusa_feed_state")[0]["sketch"] == ""
    assert "can't be read" in caplog.text
    watch = feeder._watch
    assert watch is not None
    published(1)
    step_until(feeder, core, lambda: watch.known == 1)
    assert core.drafters[0].version == 1
