"""The pool: who gets what, everyone on one version, and engines that are lost. Engines are
stand-ins but in the last test.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pytest
import torch
from ray.exceptions import ObjectStoreFullError, RayTaskError
from safetensors.torch import save_file

from heads.checkpoint import checksum, load_state, save_state
from heads.errors import ConfigError, DataError, EngineError, NoRoomError, SwapError
from medusa_ppo.config.engine_section import EngineConfig
from medusa_ppo.config.run_config import build_config, load_config
from medusa_ppo.contract.rollouts import Counters, Response, Rollouts, Sampling
from medusa_ppo.contract.status import Checked, SwapReceipt
from medusa_ppo.drafting.choice import merge_choices
from medusa_ppo.drafting.memory import OVERHEAD, prompt_key
from medusa_ppo.engines import pool as pool_module
from medusa_ppo.engines import ray_engine
from medusa_ppo.engines.pieces import (
    UNFINISHED,
    Partly,
    SharedMemory,
    cut,
    deal,
    expected_tokens,
)
from medusa_ppo.engines.pool import MAX_RESTARTS, EnginePool
from medusa_ppo.engines.ray_engine import EngineHost, RayEngine, make_engine, replica
from medusa_ppo.engines.rollout_engine import RolloutEngine
from medusa_ppo.runtime import files
from medusa_ppo.runtime.processes import ray_errors
from tests.medusa_ppo.conftest import on_two_gpus

if TYPE_CHECKING:
    from tests.medusa_ppo.engines.conftest import Actor

PROMPTS = [[index + 1] * (1 + index % 7) for index in range(40)]
SAMPLING = Sampling(max_new_tokens=8, responses_per_prompt=2, seed=3)


class EchoEngine(RolloutEngine):
    """Answers a prompt with its own tokens; slow, refusing or dead on demand. Real engines are
    tested on their own.
    """

    def __init__(self, index: int, pace_s: float = 0.0) -> None:
        self.index = index
        self.pace_s = pace_s
        self.max_drafts = self.num_drafts = 4
        self.calls: list[list[list[int]]] = []
        self.seeds: list[int | None] = []
        self.versions_at_call: list[tuple[int, int, int]] = []
        self.dies_at_call = 0
        self.refuses_swaps = False
        self.closed = False
        self.sums = {"heads": "", "actor": ""}
        self.drafting: dict[str, Any] = {}
        self.inside = 0
        self.fed_version = 0
        self.told: list[Any] = []

    def remember(self, rows: Any) -> int:
        self.told += rows
        return len(self.told)

    def generate(self, prompts: Any, sampling: Sampling) -> Rollouts:
        self.inside += 1
        assert self.inside == 1, "an engine was asked while it was busy"
        self.calls.append([list(p) for p in prompts])
        self.seeds.append(sampling.seed)
        self.versions_at_call.append((self.heads_version, self.policy_version, self.num_drafts))
        time.sleep(self.pace_s * len(prompts))
        self.inside -= 1
        if self.dies_at_call == len(self.calls):
            raise EngineError("The engine's process died.")
        responses = tuple(
            Response(i, tuple(p), (-1.0,) * len(p), "stop")
            for i, p in enumerate(prompts)
            for _ in range(sampling.responses_per_prompt)
        )
        counters = Counters(
            len(prompts), 4 * len(prompts), self.index * len(prompts), (self.index * len(prompts),)
        )
        seconds = 0.5 + self.pace_s * len(prompts)
        rollouts = Rollouts(tuple(map(tuple, prompts)), responses, counters, seconds, sampling)
        return replace(rollouts, heads_version=max(self.heads_version, self.fed_version))

    def _take(self, what: str, path: Any, version: int) -> SwapReceipt:
        if self.refuses_swaps:
            raise SwapError("The engine refused the file.")
        self.sums[what] = checksum(load_state(path))
        return SwapReceipt(version, self.sums[what], 0.0)

    def swap_heads(self, path: Any, version: int, checked: Any = None) -> SwapReceipt:
        receipt = self._take("heads", path, version)
        self.heads_version = version
        return receipt

    def sync_actor(self, path: Any, version: int, checked: Any = None) -> SwapReceipt:
        receipt = self._take("actor", path, version)
        self.policy_version = version
        return receipt

    def configure(self, **settings: Any) -> None:
        self.num_drafts = settings.pop("num_drafts", self.num_drafts)
        self.drafting |= settings

    def checksums(self) -> dict[str, str]:
        return dict(self.sums)

    def counters(self) -> Counters:
        return Counters(1, 4, self.index, (self.index,))

    def plugin_report(self) -> dict[str, Any]:
        return {"pid": self.index}

    def sleep(self, level: int) -> None:
        self.sums["heads"], self.heads_version = (
            ("", -1) if level == 2 else (self.sums["heads"], self.heads_version)
        )

    def wake(self) -> None:
        if self.closed:
            raise EngineError("The engine is closed.")

    def close(self) -> None:
        self.closed = True


class Factory:
    """Starts stand-ins, and remembers them."""

    def __init__(self, *paces_s: float) -> None:
        self.paces_s = paces_s
        self.started = list[EchoEngine]()
        self.fails: set[int] = set()
        self.failing = dict[int, int]()  # How many starts of an engine still fail.
        self.tries = 0
        self.gate: threading.Event | None = None

    def __call__(self, index: int) -> EchoEngine:
        if self.gate is not None:
            self.gate.wait(10)
        self.tries += 1
        self.failing[index] = self.failing.get(index, 0) - 1
        if index in self.fails or self.failing[index] >= 0:
            raise EngineError(f"Engine {index} does not start.")
        self.started.append(EchoEngine(index, self.paces_s[index]))
        return self.started[-1]

    def of(self, index: int) -> list[EchoEngine]:
        return [engine for engine in self.started if engine.index == index]


@pytest.fixture
def make_pool() -> Iterator[Callable[..., tuple[EnginePool, Factory]]]:
    pools = []

    def make(*paces_s: float) -> tuple[EnginePool, Factory]:
        factory = Factory(*paces_s)
        pools.append(EnginePool(factory, len(paces_s)))
        return pools[-1], factory

    yield make
    for pool in pools:
        pool.close()


def state_file(folder: Path, value: float) -> Path:
    path = folder / f"{value}.safetensors"
    save_state(path, {"x": torch.full((3,), value)})
    return path


# ---- pieces


def test_a_call_in_another_thread_ends_with_the_pool() -> None:
    """As when a run is stopped while its engine writes: what is lost by closing is not started
    again.
    """

    class Busy(EchoEngine):
        gone = threading.Event()
        asked = threading.Event()

        def generate(self, prompts: Any, sampling: Sampling) -> Rollouts:
            self.asked.set()
            assert self.gone.wait(10)
            raise EngineError("The engine is closed.")

        def close(self) -> None:
            self.gone.set()

    started: list[int] = []
    pool = EnginePool(lambda index: started.append(index) or Busy(index), 1)
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(pool.generate, PROMPTS, SAMPLING)
        assert Busy.asked.wait(10)
        pool.close()
        with pytest.raises(EngineError, match="closed"):
            call.result(10)
    assert started == [0]


@pytest.mark.parametrize("call", ["generate", "swap_heads", "sleep"])
def test_an_interrupt_ends_what_the_engines_are_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """It ends the caller's wait alone, and at its end Python waits for the pool's threads."""
    asked, gone = threading.Event(), threading.Event()
    ended: list[bool] = []

    class Busy(EchoEngine):
        def busy(self, *_: Any) -> Any:
            asked.set()
            ended.append(gone.wait(20))
            raise EngineError("The engine is closed.")

        generate = swap_heads = sleep = busy  # type: ignore[assignment]

        def close(self) -> None:
            gone.set()

    def interrupted(*_: Any, **__: Any) -> None:
        assert asked.wait(60)
        monkeypatch.setattr(pool_module, "wait", wait)
        raise KeyboardInterrupt

    left: list[bool] = []
    pool = EnginePool(Busy, 1, on_close=lambda: left.append(True))
    given: dict[str, tuple[Any, ...]] = {
        "generate": (PROMPTS[:1], SAMPLING),
        "swap_heads": (state_file(tmp_path, 1.0), 1),
        "sleep": (1,),
    }
    monkeypatch.setattr(pool_module, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        getattr(pool, call)(*given[call])
    assert ended == [True] and left == [True]
    with pytest.raises(EngineError, match="closed"):
        pool.generate(PROMPTS, SAMPLING)
    pool.close()
    assert left == [True], "Ray's room is given back once"


def test_engines_that_feed_themselves_tell_the_version_that_all_of_them_had(
    make_pool: Callable[..., tuple[EnginePool, Factory]], tmp_path: Path
) -> None:
    pool, factory = make_pool(0.0, 0.0)
    pool.swap_heads(state_file(tmp_path, 1.0), 2)
    assert pool.generate(PROMPTS, SAMPLING).heads_version == 2
    factory.started[0].fed_version = 5
    assert pool.generate(PROMPTS, SAMPLING).heads_version == 2
    factory.started[1].fed_version = 4
    assert pool.generate(PROMPTS, SAMPLING).heads_version == 4


def test_all_engines_tell_by_places_in_the_call_and_a_lost_one_is_told_again() -> None:
    factory = Factory(0.0, 0.0, 0.0)
    told = list[tuple[int, Response]]()
    with EnginePool(factory, 3) as pool:
        factory.started[1].dies_at_call = 1
        rollouts = pool.generate_as_finished(
            PROMPTS, SAMPLING, lambda place, response: told.append((place, response))
        )
        assert dict(told) == dict(enumerate(rollouts.responses)) and len(
            rollouts.responses
        ) == 80 == len(told)
        assert all(response.token_ids == tuple(PROMPTS[place // 2]) for place, response in told)
        assert (
            pool.restarts == 1 and rollouts.responses == pool.generate(PROMPTS, SAMPLING).responses
        )


def test_one_engine_is_stopped_half_way_and_asked_again_where_it_was_lost() -> None:
    class Partial(EchoEngine):
        def generate_partly(self, prompts: Any, sampling: Sampling, partly: Partly) -> Rollouts:
            found = self.generate(prompts, sampling)
            return replace(
                found, responses=(found.responses[0], *partly.begun[1:]), written_tokens=1
            )

    began = (Response(0, (), (), UNFINISHED), Response(1, (7,), (-0.5,), UNFINISHED, (3,)))
    engines: list[Partial] = []

    def start(index: int) -> Partial:
        engines.append(Partial(index))
        engines[-1].dies_at_call = len(engines) == 1
        return engines[-1]

    with EnginePool(start, 1) as pool:
        found = pool.generate_partly([[1], [2, 2]], Sampling(seed=1), Partly(began, 1))
        assert pool.restarts == 1 and found.responses[1] == began[1] and found.generated_tokens == 1
    with EnginePool(Factory(0.0, 0.0), 2) as pool, pytest.raises(EngineError, match="half-way"):
        pool.generate_partly([[1], [2, 2]], Sampling(), Partly(began, 1))
    with pytest.raises(EngineError, match="EchoEngine"):
        EchoEngine(0).generate_partly([[1], [2, 2]], Sampling(), Partly(began, 1))


def test_pieces_hold_every_prompt_once_long_ones_first_and_shrink() -> None:
    pieces = cut(PROMPTS, SAMPLING, 3)
    order = [index for piece in pieces for index in piece]
    assert sorted(order) == list(range(len(PROMPTS)))
    lengths = [len(PROMPTS[index]) for index in order]
    assert lengths == sorted(lengths, reverse=True)
    sizes = [sum(expected_tokens(PROMPTS[i], SAMPLING) for i in piece) for piece in pieces]
    assert sizes[0] == max(sizes) and sizes[-1] < sizes[0] / 3 and len(pieces) > 6


def test_one_engine_gets_all_and_few_prompts_are_a_piece_each() -> None:
    assert [len(piece) for piece in cut(PROMPTS, SAMPLING, 1)] == [len(PROMPTS)]
    assert [len(piece) for piece in cut(PROMPTS[:5], SAMPLING, 4)] == [1] * 5


PRESETS = [
    path
    for path in sorted((Path(__file__).resolve().parents[3] / "configs").glob("*.yaml"))
    if path.stem != "kuberay"
]


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_every_preset_gives_every_engine_its_share(path: Path) -> None:
    """The longest prompt that is allowed beside the shortest one, as data has them."""
    config = load_config(path)
    count, engines = config.ppo.prompts_per_step, config.engine.replicas
    prompts = [[1] * (1 + (index * 37) % config.data.max_prompt_tokens) for index in range(count)]
    sampling = Sampling(
        max_new_tokens=config.sampling.max_new_tokens,
        responses_per_prompt=config.sampling.responses_per_prompt,
    )
    pieces = cut(prompts, sampling, engines)
    assert sorted(index for piece in pieces for index in piece) == list(range(count))
    if engines == 1:
        assert len(pieces) == 1
        return
    assert len(pieces) >= 2 * engines and len(pieces[-1]) == 1 < len(pieces[0])
    dealt = deal(pieces, prompts, sampling, [1.0] * engines)
    assert sorted(piece for given in dealt for piece in given) == sorted(pieces)
    sequences = [
        sampling.responses_per_prompt * sum(len(piece) for piece in given) for given in dealt
    ]
    even = count * sampling.responses_per_prompt / engines
    assert max(sequences) - even <= 2 * sampling.responses_per_prompt, sequences
    assert min(sequences) >= 0.9 * even, sequences


def test_a_slow_engine_is_dealt_less_and_nearly_equal_ones_the_same() -> None:
    pieces = cut(PROMPTS, SAMPLING, 3)
    even = [sum(map(len, given)) for given in deal(pieces, PROMPTS, SAMPLING, [9.0, 10.0, 11.0])]
    assert max(even) - min(even) <= 2
    slow, *others = (
        sum(map(len, given)) for given in deal(pieces, PROMPTS, SAMPLING, [5.0, 10.0, 10.0])
    )
    assert slow == pytest.approx(min(others) / 2, abs=2)


# ---- generating


def test_answers_stand_in_prompt_order_and_counters_add_up(make_pool: Any) -> None:
    pool, factory = make_pool(0.0, 0.0, 0.0)
    rollouts = pool.generate(PROMPTS, SAMPLING)
    assert [r.prompt_index for r in rollouts.responses] == [
        i for i in range(len(PROMPTS)) for _ in range(2)
    ]
    assert all(list(r.token_ids) == PROMPTS[r.prompt_index] for r in rollouts.responses)
    assert rollouts.counters.drafts == len(PROMPTS)
    assert sum(share.counters.accepted for share in rollouts.engines) == rollouts.counters.accepted
    assert sum(share.generated_tokens for share in rollouts.engines) == rollouts.generated_tokens
    for share in rollouts.engines:
        assert share.counters.mean_acceptance_length == (1 + share.index if share.pieces else 1)
    seeds = [seed for engine in factory.started for seed in engine.seeds]
    assert len(set(seeds)) == len(seeds)


def test_the_same_call_is_cut_and_seeded_alike_whoever_is_quick(make_pool: Any) -> None:
    found = []
    for paces in ((0.0, 0.002), (0.002, 0.0)):
        pool, factory = make_pool(*paces)
        pool.generate(PROMPTS, SAMPLING)
        found.append(
            sorted(
                (seed, tuple(map(tuple, call)))
                for e in factory.started
                for seed, call in zip(e.seeds, e.calls, strict=True)
            )
        )
    assert found[0] == found[1]


def test_a_slow_engine_gets_less_in_the_next_call_but_not_with_a_seed(make_pool: Any) -> None:
    """Seconds are those that the engines say."""
    pool, factory = make_pool(0.0, 0.05)
    free = replace(SAMPLING, seed=None)
    for sampling in (free, free, SAMPLING):
        pool.generate(PROMPTS, sampling)
    quick, slow = ([len(call) for call in factory.of(index)[0].calls] for index in (0, 1))
    assert abs(quick[0] - slow[0]) <= 2, "nobody knows yet"
    assert quick[1] > 2 * slow[1] > 0 and (quick[2], slow[2]) == (quick[0], slow[0])


def test_what_a_lost_engine_left_is_shared_without_a_seed_and_kept_together_with_one(
    make_pool: Any,
) -> None:
    for sampling in (replace(SAMPLING, seed=None), SAMPLING):
        pool, factory = make_pool(0.0, 0.0, 0.0)
        factory.gate = threading.Event()
        first = factory.of(1)[0]
        first.dies_at_call = 1
        rollouts = pool.generate(PROMPTS, sampling)
        assert [response.prompt_index for response in rollouts.responses] == [
            index for index in range(len(PROMPTS)) for _ in range(2)
        ]
        others = [call for index in (0, 2) for call in factory.of(index)[0].calls]
        seeds = [seed for index in (0, 2) for seed in factory.of(index)[0].seeds]
        if sampling.seed is None:
            lost = set(map(tuple, first.calls[0]))
            shares = [lost & set(map(tuple, call)) for call in others]
            assert set.union(*shares) == lost and max(map(len, shares)) < len(lost)
        else:
            assert sorted(others).count(first.calls[0]) == 1 and first.seeds[0] in seeds
            assert len(others) == 3
        factory.gate.set()


def test_a_wrong_request_is_the_callers(make_pool: Any) -> None:
    pool, factory = make_pool(0.0, 0.0)
    with pytest.raises(DataError):
        pool.generate([], SAMPLING)
    factory.of(0)[0].generate = lambda *_: (_ for _ in ()).throw(
        DataError("The prompt is too long.")
    )  # type: ignore[method-assign]
    factory.of(1)[0].generate = factory.of(0)[0].generate  # type: ignore[method-assign]
    with pytest.raises(DataError, match="too long"):
        pool.generate(PROMPTS, SAMPLING)
    assert pool.restarts == 0


# ---- versions


def test_a_version_reaches_all_at_once(make_pool: Any, tmp_path: Path) -> None:
    pool, factory = make_pool(0.0, 0.0, 0.0)
    meet = threading.Barrier(3, timeout=10)
    for engine in factory.started:
        take = engine._take
        engine._take = lambda *given, take=take: (meet.wait(), take(*given))[1]
    file = state_file(tmp_path, 1.0)
    receipt = pool.swap_heads(file, 5)
    assert receipt.checksum == checksum(load_state(file)) and receipt.version == 5
    assert [engine.heads_version for engine in factory.started] == [
        5,
        5,
        5,
    ] and pool.heads_version == 5
    pool.sync_actor(state_file(tmp_path, 2.0), 7)
    assert [engine.policy_version for engine in factory.started] == [7, 7, 7]
    assert pool.checksums() == factory.started[0].sums
    rollouts = pool.generate(PROMPTS, SAMPLING)
    assert (rollouts.heads_version, rollouts.policy_version) == (5, 7)


def test_a_file_is_checked_once_and_engines_get_what_was_found(
    make_pool: Any, tmp_path: Path
) -> None:
    pool, factory = make_pool(0.0, 0.0)
    seen: list[Any] = []
    for engine in factory.started:
        swap = engine.swap_heads
        engine.swap_heads = lambda path, version, checked, swap=swap: (
            seen.append(checked),
            swap(path, version),
        )[1]  # type: ignore[method-assign,misc]
    file = state_file(tmp_path, 1.0)
    assert pool.swap_heads(file, 1).checksum == checksum(load_state(file))
    assert seen == [Checked(checksum(load_state(file)))] * 2
    save_file({"x": torch.full((3,), torch.nan)}, tmp_path / "bad")
    with pytest.raises(SwapError, match="can't be used"):
        pool.swap_heads(tmp_path / "bad", 2)
    assert len(seen) == 2 and pool.heads_version == 1, "no engine was asked"
    assert len(list(pool._folder.path.glob("*.safetensors"))) == 1, "the refused file is not kept"


def test_an_engine_that_missed_a_swap_gets_it_before_its_next_piece(
    make_pool: Any, tmp_path: Path
) -> None:
    pool, factory = make_pool(0.0, 0.01)
    late = factory.of(0)[0]
    late.refuses_swaps = True
    file = state_file(tmp_path, 1.0)
    pool.swap_heads(file, 2)
    file.unlink()  # Writers remove their files: the pool has its own.
    assert (late.heads_version, pool.heads_version) == (0, 2)
    late.refuses_swaps = False
    pool.generate(PROMPTS, SAMPLING)
    assert late.heads_version == 2 and all(versions[0] == 2 for versions in late.versions_at_call)
    assert len(set(pool.checksums().values()) - {""}) == 1


def refuse_always(engine: EchoEngine, error: SwapError, heads_left: int | None = None) -> None:
    """Refuse what is sent. `heads_left`: the version of the heads that it then has; None: as
    before.
    """

    def refuse(what: str, path: Any, version: int) -> SwapReceipt:
        engine.heads_version = engine.heads_version if heads_left is None else heads_left
        raise error

    engine._take = refuse  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("error", "heads_left"),
    [
        (SwapError("It keeps its own."), None),
        (NoRoomError("No room."), None),
        (NoRoomError("No."), -1),
    ],
    ids=["has older ones", "no room", "no room, none left"],
)
def test_an_engine_that_takes_no_newer_heads_goes_on_without(
    make_pool: Any,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    error: SwapError,
    heads_left: int | None,
) -> None:
    """Drafts are verified whatever made them, and a start takes minutes."""
    pool, factory = make_pool(0.0, 0.0)
    pool.swap_heads(state_file(tmp_path, 1.0), 1)
    full = factory.of(0)[0]
    take = full._take
    refuse_always(full, error, heads_left)
    pool.swap_heads(state_file(tmp_path, 2.0), 2)
    for calls in (1, 2):
        assert len(pool.generate(PROMPTS, SAMPLING).responses) == 2 * len(PROMPTS)
        assert len(full.calls) == len(factory.of(1)[0].calls) == calls
    assert pool.restarts == 0 and len(factory.started) == 2
    assert {versions[0] for versions in full.versions_at_call} == {heads_left or 1}
    assert len([line for line in caplog.messages if "did not accept" in line]) == 1
    full._take = take  # type: ignore[method-assign]
    pool.generate(PROMPTS, SAMPLING)
    assert full.heads_version == 2 and full.sums == factory.of(1)[0].sums


def test_an_engine_that_drafts_nothing_after_a_refusal_is_started_again(
    make_pool: Any, tmp_path: Path
) -> None:
    """Its heads are damaged, which a start repairs."""
    pool, factory = make_pool(0.0, 0.0)
    refuse_always(factory.of(0)[0], SwapError("It drafts nothing now."), -1)
    pool.swap_heads(state_file(tmp_path, 1.0), 1)
    pool.generate(PROMPTS, SAMPLING)
    start = pool._seats[0].starting
    if start is not None:
        wait([start])
    assert pool.restarts == 1 and factory.of(0)[0].closed
    assert all(pool.generate(PROMPTS, SAMPLING).responses) and factory.of(0)[1].heads_version == 1


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The engines that draft nothing with whatever heads they get, however often they start: as on
    hardware on which their probe fails.
    """
    indices: set[int] = set()
    take = EchoEngine._take

    def refuse(engine: EchoEngine, what: str, path: Any, version: int) -> SwapReceipt:
        if what == "actor" or engine.index not in indices:
            return take(engine, what, path, version)
        engine.heads_version = -1
        raise SwapError("It drafts nothing now.")

    monkeypatch.setattr(EchoEngine, "_take", refuse)
    return indices


def test_an_engine_that_no_start_helps_goes_on_without_drafts(
    make_pool: Any, tmp_path: Path, refusing: set[int]
) -> None:
    """It was given up after three starts."""
    pool, factory = make_pool(0.0, 0.0)

    def use(version: int) -> None:
        pool.swap_heads(state_file(tmp_path, float(version)), version)
        for _ in range(2):
            assert len(pool.generate(PROMPTS, SAMPLING).responses) == 2 * len(PROMPTS)
            if (start := pool._seats[0].starting) is not None:
                wait([start])

    refusing.add(0)
    for version in (1, 2, 3):
        use(version)
    again = factory.of(0)[-1]
    assert pool.restarts == 1 and len(again.calls) >= 5 and again.heads_version == -1
    refusing.clear()
    use(4)
    assert again.heads_version == 4
    refusing.add(0)
    use(5)
    assert pool.restarts == 2, "those that it once took may be damaged"


def test_a_single_engine_that_drafts_nothing_after_its_restart_does_not_end_the_run(
    make_pool: Any, tmp_path: Path, refusing: set[int]
) -> None:
    pool, factory = make_pool(0.0)
    pool.swap_heads(state_file(tmp_path, 1.0), 1)
    pool.sync_actor(state_file(tmp_path, 2.0), 6)
    factory.of(0)[0].dies_at_call = 1
    refusing.add(0)
    for _ in range(3):
        assert len(pool.generate(PROMPTS, SAMPLING).responses) == 2 * len(PROMPTS)
    assert pool.restarts == 2 and factory.of(0)[-1].versions_at_call == [(-1, 6, 4)] * 3


def test_an_engine_without_room_for_the_actor_waits_for_the_next_one(
    make_pool: Any, tmp_path: Path
) -> None:
    pool, factory = make_pool(0.0, 0.0)
    full = factory.of(0)[0]
    take = full._take
    refuse_always(full, NoRoomError("No room."))
    pool.sync_actor(state_file(tmp_path, 1.0), 1)
    for _ in range(2):
        assert len(pool.generate(PROMPTS, SAMPLING).responses) == 2 * len(PROMPTS)
    assert not full.calls and pool.restarts == 0 and len(factory.started) == 2
    full._take = take  # type: ignore[method-assign]
    pool.sync_actor(state_file(tmp_path, 2.0), 2)
    pool.generate(PROMPTS, SAMPLING)
    assert full.versions_at_call == [(0, 2, 4)]


def test_a_version_that_nobody_takes_is_an_error_and_forgotten(
    make_pool: Any, tmp_path: Path
) -> None:
    pool, factory = make_pool(0.0, 0.0)
    pool.swap_heads(state_file(tmp_path, 1.0), 1)
    for engine in factory.started:
        engine.refuses_swaps = True
    with pytest.raises(SwapError, match="refused"):
        pool.swap_heads(state_file(tmp_path, 2.0), 2)
    with pytest.raises(SwapError, match="no file"):
        pool.swap_heads(tmp_path / "nothing", 3)
    assert pool.heads_version == 1
    pool.generate(PROMPTS, SAMPLING)
    assert {versions[0] for engine in factory.started for versions in engine.versions_at_call} == {
        1
    }


def test_engines_that_disagree_are_found(make_pool: Any, tmp_path: Path) -> None:
    pool, factory = make_pool(0.0, 0.0)
    factory.of(1)[0]._take = lambda what, path, version: SwapReceipt(version, "other", 0.0)
    with pytest.raises(SwapError, match="different weights"):
        pool.swap_heads(state_file(tmp_path, 1.0), 1)
    with pytest.raises(EngineError, match="different weights"):
        pool.checksums()


def test_engines_that_disagree_get_the_file_again(make_pool: Any, tmp_path: Path) -> None:
    pool, factory = make_pool(0.0, 0.0)
    first = factory.of(0)[0]
    take = first._take
    first._take = lambda what, path, version: SwapReceipt(version, "other", 0.0)
    with pytest.raises(SwapError, match="different weights"):
        pool.swap_heads(file := state_file(tmp_path, 1.0), 1)
    first._take = take
    pool.generate(PROMPTS, SAMPLING)
    assert {engine.sums["heads"] for engine in factory.started} == {checksum(load_state(file))}


def test_settings_reach_all(make_pool: Any) -> None:
    pool, factory = make_pool(0.0, 0.0)
    pool.configure(num_drafts=2)
    pool.configure(sampled=True)
    pool.configure(draft_temperature=0.7)
    for engine in factory.started:
        assert engine.num_drafts == 2 and engine.drafting == {
            "sampled": True,
            "draft_temperature": 0.7,
        }
    with pytest.raises(ConfigError):
        pool.configure(num_drafts=9)
    assert pool.counters() == Counters(2, 8, 1, (1,))
    assert [report["pid"] for report in pool.plugin_report()["engines"]] == [0, 1]


# ---- lost engines


def test_a_lost_engine_is_replaced_and_catches_up(make_pool: Any, tmp_path: Path) -> None:
    pool, factory = make_pool(0.002, 0.002)
    pool.swap_heads(state_file(tmp_path, 1.0), 4)
    pool.sync_actor(state_file(tmp_path, 2.0), 6)
    pool.configure(num_drafts=3)
    (first,) = factory.of(1)
    first.dies_at_call = 2
    rollouts = pool.generate(PROMPTS, SAMPLING)
    assert [r.prompt_index for r in rollouts.responses] == [
        i for i in range(len(PROMPTS)) for _ in range(2)
    ]
    assert rollouts.counters.drafts == len(PROMPTS)
    for _ in range(20):
        pool.generate(PROMPTS, SAMPLING)
        if len(factory.of(1)) == 2 and factory.of(1)[1].calls:
            break
    second = factory.of(1)[1]
    assert first.closed and pool.restarts == 1
    assert second.versions_at_call and set(second.versions_at_call) == {(4, 6, 3)}
    assert pool.checksums() == second.sums


def test_what_one_engine_says_is_told_to_the_others_and_to_those_that_start_again(
    make_pool: Any,
) -> None:
    pool, factory = make_pool(0.001, 0.001)
    pool.generate(PROMPTS, SAMPLING)
    assert not any(engine.told for engine in factory.started), "nobody has a memory"
    pool.memory = SharedMemory(1 << 20)
    before = [len(engine.calls) for engine in factory.started]
    rollouts = pool.generate(PROMPTS, SAMPLING)
    keys = {prompt_key(prompt).hex(): tuple(prompt) for prompt in PROMPTS}
    for engine, first in zip(factory.started, before, strict=True):
        asked = {tuple(prompt) for call in engine.calls[first:] for prompt in call}
        heard = {keys[key] for key, *_ in engine.told}
        assert heard == set(keys.values()) - asked and len(engine.told) == 2 * len(heard)
        assert all(tuple(tokens) == keys[key] and age == 0 for key, age, _, tokens in engine.told)
    seeds = [seed for _, _, seed, _ in pool.memory.rows()]
    assert len(set(seeds)) == len(seeds) == len(rollouts.responses), (
        "what has the same random numbers is known by them"
    )
    factory.of(1)[0].dies_at_call = len(factory.of(1)[0].calls) + 1
    while len(factory.of(1)) < 2 or not factory.of(1)[1].calls:
        pool.generate(PROMPTS, SAMPLING)
    assert {row[0] for row in factory.of(1)[1].told} == set(keys)


def test_generation_goes_on_while_an_engine_starts(make_pool: Any) -> None:
    pool, factory = make_pool(0.0, 0.0)
    factory.gate = threading.Event()
    factory.of(1)[0].dies_at_call = 1
    for _ in range(3):
        assert len(pool.generate(PROMPTS, SAMPLING).responses) == 2 * len(PROMPTS)
    assert len(factory.of(1)) == 1
    factory.gate.set()


def test_the_last_engine_is_waited_for_and_then_given_up(make_pool: Any) -> None:
    pool, factory = make_pool(0.0)
    factory.of(0)[0].dies_at_call = 1
    assert len(pool.generate(PROMPTS, SAMPLING).responses) == 2 * len(PROMPTS)
    factory.fails = {0}
    factory.of(0)[-1].dies_at_call = len(factory.of(0)[-1].calls) + 1
    with pytest.raises(EngineError, match="No engine of the pool is left"):
        pool.generate(PROMPTS, SAMPLING)
    assert pool.restarts == 1 + MAX_RESTARTS, (
        "one before the answer, and then as many as may follow each other"
    )


def test_a_warning_says_that_one_of_several_engines_is_given_up(
    make_pool: Any, caplog: pytest.LogCaptureFixture
) -> None:
    pool, factory = make_pool(0.0, 0.0)
    factory.fails = {1}
    factory.of(1)[0].dies_at_call = 1
    pool.generate(PROMPTS, SAMPLING)
    while (start := pool._seats[1].starting) is not None:
        wait([start])
        pool.generate(PROMPTS, SAMPLING)
    pool.generate(PROMPTS, SAMPLING)
    assert pool.restarts == MAX_RESTARTS
    assert len([line for line in caplog.messages if "Engine 1 is given up" in line]) == 1


def test_restarts_are_counted_between_answers(make_pool: Any) -> None:
    """An engine that dies once a day is started again for ever."""
    pool, factory = make_pool(0.0)
    for _ in range(MAX_RESTARTS + 2):
        engine = factory.of(0)[-1]
        engine.dies_at_call = len(engine.calls) + 1
        assert len(pool.generate(PROMPTS, SAMPLING).responses) == 2 * len(PROMPTS)
    assert pool.restarts == MAX_RESTARTS + 2


def test_a_restarted_engine_gets_the_settings_of_before_and_the_newest_ones(make_pool: Any) -> None:
    pool, factory = make_pool(0.0, 0.0)
    pool.configure(sampled=True, draft_temperature=0.7)
    pool._lost(pool._seats[1], EngineError("The engine's process died."))
    wait([pool._seats[1].starting])
    pool.configure(num_drafts=2)
    pool.generate(PROMPTS, SAMPLING)
    for engine in (factory.of(0)[0], factory.of(1)[1]):
        assert engine.calls and engine.num_drafts == 2
        assert engine.drafting == {"sampled": True, "draft_temperature": 0.7}


def test_a_single_engine_that_dies_over_what_it_is_told_hears_it_again(make_pool: Any) -> None:
    """As a resumed run does: the pool has the rows first, then its engines."""
    pool, factory = make_pool(0.0)
    pool.memory = SharedMemory(1 << 20)
    rows = [(prompt_key([5]).hex(), 0, 1, [6, 7])]
    pool.memory.take(rows)

    def die(rows: Any) -> int:
        raise EngineError("The engine's process died.")

    factory.of(0)[0].remember = die  # type: ignore[method-assign]
    assert pool.remember(pool.memory.rows(0)) == 0
    pool.generate(PROMPTS, SAMPLING)
    assert [tuple(tokens) for *_, tokens in factory.of(0)[1].told] == [(6, 7)]


def test_a_restart_that_fails_for_any_reason_is_not_the_others_end(make_pool: Any) -> None:
    pool, factory = make_pool(0.0, 0.0)
    start = factory.__call__

    def full(index: int) -> EchoEngine:
        raise OSError(28, "No space left on device")

    pool._factory = full
    factory.of(1)[0].dies_at_call = 1
    for _ in range(MAX_RESTARTS + 1):
        assert len(pool.generate(PROMPTS, SAMPLING).responses) == 2 * len(PROMPTS)
        if pool._seats[1].starting is not None:
            wait([pool._seats[1].starting])
    assert pool.restarts == MAX_RESTARTS
    factory.of(0)[0].dies_at_call = len(factory.of(0)[0].calls) + 1
    with pytest.raises(EngineError, match="No space left on device"):
        pool.generate(PROMPTS, SAMPLING)
    pool._factory = start


def test_heads_that_a_server_lost_between_two_calls_come_back(
    make_pool: Any, tmp_path: Path
) -> None:
    pool, factory = make_pool(0.0, 0.0)
    pool.swap_heads(state_file(tmp_path, 1.0), 4)
    factory.of(1)[0].heads_version = -1
    pool.generate(PROMPTS, SAMPLING)
    assert factory.of(1)[0].versions_at_call == [(4, 0, 4)]


# ---- servers that somebody else restarts


@pytest.fixture
def make_attached(
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Callable[..., tuple[EnginePool, Factory]]]:
    """Pools of servers at addresses, which look for lost ones all the time."""
    monkeypatch.setattr(pool_module, "LOOK_EVERY_S", 0.01)
    pools = []

    def make(count: int, back_within_s: float = 60.0) -> tuple[EnginePool, Factory]:
        factory = Factory(*[0.0] * count)
        pools.append(EnginePool(factory, count, back_within_s=back_within_s))
        return pools[-1], factory

    yield make
    for pool in pools:
        pool.close()


def test_a_server_that_is_away_for_long_is_found_when_it_is_back(
    make_attached: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pool, factory = make_attached(2)
    pool.swap_heads(state_file(tmp_path, 1.0), 4)
    pool.sync_actor(state_file(tmp_path, 2.0), 6)
    factory.failing[1] = 3 * MAX_RESTARTS
    factory.of(1)[0].dies_at_call = 1
    assert len(pool.generate(PROMPTS, SAMPLING).responses) == 2 * len(PROMPTS)
    # Meanwhile the others get newer versions.
    pool.swap_heads(state_file(tmp_path, 3.0), 5)
    pool.sync_actor(state_file(tmp_path, 4.0), 7)
    pool.configure(num_drafts=3)
    deadline = time.monotonic() + 60
    while (len(factory.of(1)) < 2 or not factory.of(1)[1].calls) and time.monotonic() < deadline:
        pool.generate(PROMPTS, SAMPLING)
    assert factory.of(1)[0].closed and factory.of(1)[1].versions_at_call[0] == (5, 7, 3)
    assert pool.checksums() == factory.of(1)[1].sums and pool.restarts == 1
    assert len([line for line in caplog.messages if "is lost" in line]) == 2, (
        "that it was lost, and the first of the starts that failed alike"
    )


def test_a_single_server_is_waited_for(make_attached: Any, tmp_path: Path) -> None:
    pool, factory = make_attached(1)
    for call in (
        lambda: pool.generate(PROMPTS, SAMPLING),
        lambda: pool.sync_actor(state_file(tmp_path, 1.0), 3),
    ):
        factory.failing[0] = 2 * MAX_RESTARTS
        factory.of(0)[-1].dies_at_call = len(factory.of(0)[-1].calls) + 1
        pool.generate(PROMPTS, SAMPLING)
        pool._lost(pool._seats[0], EngineError("The server is gone."))
        call()
    assert len(factory.of(0)) == 5 and pool.restarts == 4
    assert pool.generate(PROMPTS, SAMPLING).policy_version == 3


def test_a_server_that_came_back_is_waited_for_again(
    make_attached: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was away for most of the time that it may be, came back, and is gone before it has
    answered.
    """
    pool, factory = make_attached(1, back_within_s=60.0)
    now = [1000.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], perf_counter=time.perf_counter)
    monkeypatch.setattr(pool_module, "time", clock)
    pool._lost(pool._seats[0], EngineError("The server is gone."))
    wait([pool._seats[0].starting])
    now[0] += 59.0
    pool._revive()
    now[0] += 2.0
    factory.of(0)[-1].dies_at_call = 1
    factory.failing[0] = 2
    assert len(pool.generate(PROMPTS, SAMPLING).responses) == 2 * len(PROMPTS)
    assert len(factory.of(0)) == 3 and pool.restarts == 2


@pytest.mark.parametrize("call", ["generate", "swap"])
def test_a_single_server_that_stays_away_ends_the_run(
    make_attached: Any, tmp_path: Path, call: str
) -> None:
    pool, factory = make_attached(1, back_within_s=0.3)
    factory.fails = {0}
    pool._lost(pool._seats[0], EngineError("The server is gone."))
    with pytest.raises(EngineError, match="No engine of the pool is left") as caught:
        if call == "generate":
            pool.generate(PROMPTS, SAMPLING)
        else:
            pool.swap_heads(state_file(tmp_path, 1.0), 2)
    assert "Engine 0 does not start" in str(caught.value) and "within 0 s" in str(caught.value)
    assert factory.tries > 1 and pool.restarts == 1


def test_a_request_that_ends_each_server_ends_the_run(make_attached: Any) -> None:
    pool, _ = make_attached(2)

    def die(engine: EchoEngine, prompts: Any, sampling: Sampling) -> Rollouts:
        raise EngineError("The server refused a request.")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EchoEngine, "generate", die)
        with pytest.raises(EngineError, match="No engine of the pool is left") as caught:
            pool.generate(PROMPTS, SAMPLING)
    assert "refused a request" in str(caught.value) and pool.restarts == 2 * MAX_RESTARTS


def test_a_pool_that_ends_does_not_look_for_a_server_any_more(
    make_attached: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "LOOK_EVERY_S", 3600.0)
    pool, factory = make_attached(2)
    factory.fails = {1}
    pool._lost(pool._seats[1], EngineError("The server is gone."))
    wait([pool._seats[1].starting])
    pool.generate(PROMPTS, SAMPLING)
    tries = factory.tries
    with ThreadPoolExecutor(1) as thread:
        thread.submit(pool.close).result(60)
    assert factory.tries == tries == 3


def test_make_engine_knows_servers_that_it_does_not_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray_engine, "ServerEngine", lambda *_, **__: EchoEngine(0))
    # A 70B's weights.
    monkeypatch.setattr(ray_engine, "reading_s", lambda model: 2800.0)
    for backend, expected in (("http://a:1", ray_engine.START_TIMEOUT_S + 2800), ("server", 0.0)):
        config = EngineConfig(backend=backend)
        with make_engine("model", None, config, supervised=True) as pool:
            assert isinstance(pool, EnginePool) and pool._back_within_s == expected


def test_an_engine_that_starts_later_draws_other_random_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Requests without a seed draw from their engine's, from its beginning."""
    seeds = list[int]()

    def start(model: str, heads: Any, config: EngineConfig, seed: int, **_: Any) -> EchoEngine:
        seeds.append(seed)
        return EchoEngine(len(seeds))

    monkeypatch.setattr(ray_engine, "ServerEngine", start)
    monkeypatch.setattr(ray_engine, "reading_s", lambda model: 0.0)
    config = EngineConfig(backend="http://a:1, http://b:2", replicas=2)
    with make_engine("model", None, config, 7) as pool:
        assert isinstance(pool, EnginePool)
        assert sorted(seeds) == [7, 8], "of a run that is not interrupted"
        for _ in range(2):
            seat = pool._seats[1]
            pool._lost(seat, EngineError("The engine's process died."))
            wait([seat.starting])
            pool._revive()
    make_engine("model", None, config, 7, step=10).close()
    make_engine("model", None, replica(config, 0), 7, step=10).close()
    make_engine("model", None, replica(config, 0), 7, step=20).close()
    assert len(seeds) == 8 and seeds[6] in seeds[4:6]
    assert len(set(seeds)) == 7 and all(0 <= seed < 2**31 for seed in seeds)
    before = len(seeds)
    make_engine("model", None, replica(config, 0), 7).close()
    assert seeds[before:] == [7]


def test_a_pool_of_one_samples_what_its_engine_would(make_pool: Any) -> None:
    pool, factory = make_pool(0.0)
    rollouts = pool.generate(PROMPTS, SAMPLING)
    assert factory.of(0)[0].calls == [PROMPTS] and factory.of(0)[0].seeds == [SAMPLING.seed]
    assert rollouts.engines == () and rollouts.counters.drafts == len(PROMPTS)


def test_a_single_engine_that_dies_over_a_sync_is_started_again_and_synced(
    make_pool: Any, tmp_path: Path
) -> None:
    pool, factory = make_pool(0.0)
    heads = state_file(tmp_path, 1.0)
    actor = state_file(tmp_path, 2.0)
    pool.swap_heads(heads, 4)

    def die(what: str, path: Any, version: int) -> SwapReceipt:
        raise EngineError("The engine's process died.")

    factory.of(0)[0]._take = die  # type: ignore[method-assign]
    assert pool.sync_actor(actor, 6).checksum == checksum(load_state(actor))
    second = factory.of(0)[1]
    assert factory.of(0)[0].closed and second.policy_version == pool.policy_version == 6
    rollouts = pool.generate(PROMPTS, SAMPLING)
    assert second.versions_at_call == [(4, 6, 4)] and rollouts.heads_version == 4
    factory.fails = {0}
    second._take = die  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="No engine of the pool is left"):
        pool.sync_actor(actor, 7)


def test_an_engine_that_dies_over_a_question_does_not_end_the_run(make_pool: Any) -> None:
    pool, factory = make_pool(0.0)

    def die() -> list[dict[str, Any]]:
        raise EngineError("The engine's process died.")

    factory.of(0)[0].choices = die  # type: ignore[method-assign]
    assert pool.choices() == []
    assert (
        len(pool.generate(PROMPTS, SAMPLING).responses) == 2 * len(PROMPTS) and pool.restarts == 1
    )


def test_heads_lost_in_a_deep_sleep_come_back_before_the_next_piece(
    make_pool: Any, tmp_path: Path
) -> None:
    pool, factory = make_pool(0.0, 0.0)
    pool.sleep(2)
    pool.wake()
    assert pool.heads_version == -1, "the pool never had the file of the first heads"
    pool.swap_heads(state_file(tmp_path, 1.0), 4)
    pool.sleep(1)
    pool.wake()
    assert pool.heads_version == 4 and all(engine.sums["heads"] for engine in factory.started)
    pool.sleep(2)
    pool.wake()
    assert pool.heads_version == 4 and not any(engine.sums["heads"] for engine in factory.started)
    pool.generate(PROMPTS, SAMPLING)
    assert {versions[0] for engine in factory.started for versions in engine.versions_at_call} == {
        4
    }
    assert pool.checksums()["heads"] == checksum(load_state(tmp_path / "1.0.safetensors"))


def test_all_sleep_even_one_that_is_being_restarted(make_pool: Any) -> None:
    """Awake, it would take memory that somebody else gets as soon as the engines sleep."""
    pool, factory = make_pool(0.0, 0.0, 0.0)
    asleep = list[EchoEngine]()
    noted = EchoEngine.sleep

    def die(level: int) -> None:
        raise EngineError("The engine's process died.")

    def sleep(engine: EchoEngine, level: int) -> None:
        noted(engine, level)
        asleep.append(engine)

    factory.of(1)[0].sleep = die  # type: ignore[method-assign]
    factory.of(2)[0].dies_at_call = 1
    factory.gate = threading.Event()
    pool.generate(PROMPTS, SAMPLING)
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(1) as thread:
        patch.setattr(EchoEngine, "sleep", sleep)
        call = thread.submit(pool.sleep, 1)
        time.sleep(0.2)
        assert not call.done(), "two are starting"
        factory.gate.set()
        call.result(10)
    assert pool.restarts == 2 and len(asleep) == 3
    assert {engine.index for engine in asleep} == {0, 1, 2}
    assert set(asleep) == {factory.of(index)[-1] for index in range(3)}


def test_a_failed_start_ends_the_others() -> None:
    factory = Factory(0.0, 0.0)
    factory.fails = {1}
    with pytest.raises(EngineError, match="Engine 1 does not start"):
        EnginePool(factory, 2)
    assert factory.of(0)[0].closed


def test_an_interrupt_ends_the_engines_that_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the end of the run, or of Python, waits for as long as a start may take."""
    closing = threading.Event()
    first = EchoEngine(0)
    starting = threading.Event()
    ended = list[bool]()

    def start(index: int) -> EchoEngine:
        if index == 0:
            return first
        starting.set()
        ended.append(closing.wait(20))
        raise EngineError("The engine is not wanted any more.")

    def interrupted(*_: Any) -> None:
        assert starting.wait(60)
        monkeypatch.setattr(pool_module, "wait", wait)
        raise KeyboardInterrupt

    monkeypatch.setattr(pool_module, "wait", interrupted)
    left = list[bool]()
    with pytest.raises(KeyboardInterrupt):
        EnginePool(start, 2, closing=closing, on_close=lambda: left.append(True))
    assert ended == [True] and first.closed and left == [True]


def test_an_engine_that_starts_learns_that_its_pool_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = dict[str, Any]()

    def start(*_: Any, **more: Any) -> EchoEngine:
        given.update(more)
        return EchoEngine(0)

    monkeypatch.setattr(ray_engine, "ServerEngine", start)
    monkeypatch.setattr(ray_engine, "reading_s", lambda model: 0.0)
    pool = make_engine("model", None, EngineConfig(backend="http://a:1"), supervised=True)
    assert not given["closing"].is_set()
    pool.close()
    monkeypatch.setattr(ray_engine.ray, "wait", lambda asked, timeout: ([], asked))
    engine = RayEngine.__new__(RayEngine)
    engine._host = SimpleNamespace(start=SimpleNamespace(remote=lambda *_: "answer"))
    with pytest.raises(EngineError, match="not wanted any more"):
        engine._ask_at_start(given["closing"], "start")


def test_an_engine_gets_time_to_read_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([0.0, 3399.0, 3401.0])
    monkeypatch.setattr(ray_engine.ray, "wait", lambda asked, timeout: ([], asked))
    monkeypatch.setattr(ray_engine, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    engine = RayEngine.__new__(RayEngine)
    engine._host = SimpleNamespace(start=SimpleNamespace(remote=lambda *_: "answer"))
    engine._load_s = 2800.0
    with pytest.raises(EngineError, match="no answer in 3400 s"):
        engine._ask_at_start(threading.Event(), "start")


def test_replicas_have_addresses_of_their_own() -> None:
    config = EngineConfig(backend="http://a:1, http://b:2", replicas=2)
    assert [replica(config, i).addresses for i in range(2)] == [("http://a:1",), ("http://b:2",)]
    assert replica(EngineConfig(replicas=2), 1) == EngineConfig()
    with pytest.raises(ConfigError, match="address"):
        build_config({"engine": {"backend": "http://a:1", "replicas": 2}})


# ---- engines on other nodes


@pytest.mark.parametrize("fails", [False, True])
def test_heads_from_another_node_are_in_memory_only_until_vllm_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """An engine ends by SIGKILL, which removes nothing."""
    monkeypatch.setattr(files, "SHARED_MEMORY", tmp_path)
    killed = tmp_path / "medusa-ppo-received-killed"
    killed.mkdir()
    (killed / files.LOCK).touch()
    seen = list[bytes]()

    def started(model: str, heads: str, *more: Any, plan: Any) -> EchoEngine:
        seen.append((Path(heads) / "heads.safetensors").read_bytes())
        if fails:
            raise EngineError("vLLM did not start.")
        return EchoEngine(0)

    monkeypatch.setattr(ray_engine, "ColocatedEngine", started)
    monkeypatch.setattr(ray_engine.ray, "get", lambda content: content)
    node = SimpleNamespace(get_node_id=lambda: "other")
    monkeypatch.setattr(ray_engine.ray, "get_runtime_context", lambda: node)
    host = EngineHost("model", str(tmp_path / "elsewhere"), EngineConfig(), 0, None)
    answer, _ = host.start({"heads.safetensors": [np.frombuffer(b"bytes", dtype=np.uint8)]})
    assert seen == [b"bytes"] and (isinstance(answer, EngineError) if fails else answer == "other")
    assert not list(tmp_path.iterdir()), "its own, or what a killed engine has left"


def test_an_engine_on_another_node_gets_the_files_bytes(tmp_path: Path) -> None:
    host = EngineHost("model", None, EngineConfig(), 0, None)
    host._engine = engine = EchoEngine(0)  # type: ignore[assignment]
    file = state_file(tmp_path, 3.0)
    receipt, state = host.call_with_bytes("swap_heads", np.fromfile(file, dtype=np.uint8), 7, None)
    assert receipt == SwapReceipt(7, checksum(load_state(file)), 0.0)
    assert state["heads_version"] == engine.heads_version == 7
    engine.refuses_swaps = True
    assert isinstance(
        host.call_with_bytes("swap_heads", np.fromfile(file, dtype=np.uint8), 8, None)[0], SwapError
    )
    assert not list(Path("/dev/shm").glob("medusa-ppo-received-*"))


@pytest.mark.parametrize("full", ["folder", "file"])
def test_no_room_on_an_engines_node_refuses_new_heads_and_ends_no_engine(
    make_pool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: str
) -> None:
    pool, factory = make_pool(0.0, 0.0)

    class Content(np.ndarray):
        def tofile(self, *_: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    def on_a_full_node(engine: EchoEngine, path: Any, version: int, checked: Any) -> Any:
        host = EngineHost("model", None, EngineConfig(), 0, None)
        host._engine = engine  # type: ignore[assignment]
        # As `RayEngine`: an OSError in Ray's actor would be an EngineError, an engine's death.
        with ray_errors(EngineError, "The engine's process", "Read its log."):
            try:
                answer, _ = host.call_with_bytes(
                    "swap_heads", np.zeros(3, np.uint8).view(Content), version, checked
                )
            except OSError as error:
                raise RayTaskError("call_with_bytes", "", error) from error
        raise answer

    if full == "folder":

        def refuse(*_: Any, **__: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(ray_engine, "OwnedFolder", refuse)
    monkeypatch.setattr(EchoEngine, "swap_heads", on_a_full_node)
    with pytest.raises(NoRoomError, match="No space left on device"):
        pool.swap_heads(state_file(tmp_path, 1.0), 1)
    assert pool.restarts == 0 and len(factory.started) == 2
    assert len(pool.generate(PROMPTS, SAMPLING).responses) == 2 * len(PROMPTS)


class Reference:
    """Of an object in Ray's store; it is there as long as this lives."""

    alive: ClassVar[list[int]] = []

    def __init__(self, content: np.ndarray) -> None:
        self.nbytes = content.nbytes
        self.alive.append(self.nbytes)

    def __del__(self) -> None:
        self.alive.remove(self.nbytes)


def test_a_file_is_in_the_store_once_and_only_while_engines_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise an actor stays there beside the next one."""
    seen = list[list[int]]()
    monkeypatch.setattr(ray_engine.ray, "put", Reference)
    together = threading.Barrier(2, timeout=60)

    def ask(engine: RayEngine, *_: Any, **__: Any) -> None:
        together.wait()
        seen.append(list(Reference.alive))
        together.wait()

    monkeypatch.setattr(RayEngine, "_ask", ask)
    engines = [RayEngine.__new__(RayEngine) for _ in range(2)]
    for engine in engines:
        engine.elsewhere = True
    for number in range(3):
        file = state_file(tmp_path, float(number))
        with ThreadPoolExecutor(2) as threads:
            calls = [threads.submit(engine.sync_actor, file, number) for engine in engines]
        assert [call.result() for call in calls] == [None, None]
        assert not Reference.alive
    assert seen == [[file.stat().st_size]] * 6


def test_the_first_heads_are_in_the_store_once_for_all_engines_that_lack_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads = tmp_path / "heads"
    heads.mkdir()
    (heads / "config.json").write_text("{}")
    (heads / "heads.safetensors").write_bytes(b"x" * 1000)
    lacking = [True, False, True]
    monkeypatch.setattr(ray_engine.ray, "put", Reference)
    monkeypatch.setattr(ray_engine.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray_engine.ray, "cluster_resources", dict)
    monkeypatch.setattr(ray_engine, "on_one_node", lambda: False)
    monkeypatch.setattr(ray_engine, "plan_launch", lambda *_: SimpleNamespace(load_s=0.0))
    node = SimpleNamespace(get_node_id=lambda: "loop")
    monkeypatch.setattr(ray_engine.ray, "get_runtime_context", lambda: node)

    class Actor:
        """In the place of Ray's: the seed is its number."""

        def remote(self, model: str, heads: str, config: EngineConfig, seed: int, plan: Any) -> Any:
            return seed

    monkeypatch.setattr(ray_engine.ray, "remote", lambda **_: lambda host: Actor())
    together = threading.Barrier(len(lacking), timeout=60)
    sent = dict[int, set[str]]()
    held = list[list[int]]()

    def ask(engine: RayEngine, closing: threading.Event, entry: str, *given: Any) -> Any:
        number = engine._host
        if entry == "lacks_heads":
            return lacking[number]
        together.wait()
        sent[number] = set(given[0] or ())
        held.append(sorted(Reference.alive))
        together.wait()
        return "other"

    monkeypatch.setattr(RayEngine, "_ask_at_start", ask)
    with ThreadPoolExecutor(len(lacking)) as threads:
        calls = [
            threads.submit(RayEngine, "model", heads, EngineConfig(), number)
            for number in range(len(lacking))
        ]
    assert all(call.result().elsewhere for call in calls)
    files = {"config.json", "heads.safetensors"}
    assert sent == {0: files, 1: set(), 2: files} and held == [[2, 1000]] * 3
    assert not Reference.alive


def test_a_full_store_refuses_a_file_and_ends_no_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(content: np.ndarray) -> None:
        raise ObjectStoreFullError("The object store is full.")

    monkeypatch.setattr(ray_engine.ray, "put", full)
    engine = RayEngine.__new__(RayEngine)
    engine.elsewhere = True
    with pytest.raises(NoRoomError, match="The object store is full"):
        engine.sync_actor(state_file(tmp_path, 1.0), 1)


# ---- real engines


@on_two_gpus
@pytest.mark.slow
@pytest.mark.engine
def test_two_real_engines(
    actor: Actor, engine_config: EngineConfig, ray_session: None, tmp_path: Path
) -> None:
    config = engine_config.model_copy(
        update={"replicas": 2, "max_num_seqs": 8, "memory_bytes": 1 << 20}
    )
    with make_engine(actor.path, actor.heads_path, config, seed=0) as pool:
        assert isinstance(pool, EnginePool) and pool.memory.most_bytes == 1 << 20
        pids = [report["pid"] for report in pool.plugin_report()["engines"]]
        assert len(set(pids)) == 2
        state = actor.random_heads(seed=2).trainable_state()
        save_state(tmp_path / "heads.safetensors", state)
        assert pool.swap_heads(tmp_path / "heads.safetensors", 3).checksum == checksum(state)
        sampling = Sampling(1.0, max_new_tokens=24, responses_per_prompt=2, seed=4)
        rollouts = pool.generate(actor.prompts[:24], sampling)
        assert [r.prompt_index for r in rollouts.responses] == [
            i for i in range(24) for _ in range(2)
        ]
        assert all(share.counters.drafts > 0 for share in rollouts.engines)
        assert sum(share.counters.drafts for share in rollouts.engines) == rollouts.counters.drafts
        # Each has what it wrote (of its last step it hears with its next one), and was told of what
        # the other one wrote.
        missing = [pool.memory.nbytes - engine.remember([]) for engine in pool._engines()]
        assert (
            all(0 <= some <= 8 * (24 * 4 + OVERHEAD) for some in missing)
            and pool.memory.nbytes > 48 * OVERHEAD
        )
        # The second engine is treated as if it were on another node: the heads come through Ray's
        # object store.
        far = pool._seats[1].engine
        assert isinstance(far, RayEngine) and not far.elsewhere
        far.elsewhere = True
        state = actor.random_heads(seed=3).trainable_state()
        save_state(tmp_path / "heads.safetensors", state)
        pool.swap_heads(tmp_path / "heads.safetensors", 4)
        assert pool.checksums()["heads"] == checksum(state)
        # One engine dies: the rollouts come, and its successor drafts with the same heads.
        os.kill(int(pids[1]), signal.SIGKILL)
        assert len(pool.generate(actor.prompts[:24], sampling).responses) == 48
        deadline = time.monotonic() + 300
        while len(pool._ready()) < 2 and time.monotonic() < deadline:
            pool.generate(actor.prompts[:4], sampling)
        again = pool.generate(actor.prompts[:24], sampling)
        assert len(again.responses) == 48 and pool.restarts == 1
        assert min(engine.remember([]) for engine in pool._engines()) > 48 * OVERHEAD, (
            "the successor was told of what was said before it"
        )
        assert pool.checksums()["heads"] == checksum(state)
        assert {report["pid"] for report in pool.plugin_report()["engines"]} != set(pids)


def test_what_the_engines_chose_is_added_up() -> None:
    first = [{"running": 1, "steps": [1, 3], "speedup": 1.4}]
    second = [
        {"running": 1, "steps": [3, 1], "speedup": 1.2},
        {"running": 8, "steps": [5, 0], "speedup": 1.0},
    ]
    assert merge_choices([first, second]) == [
        {"running": 1, "steps": [4, 4], "speedup": pytest.approx(1.3)},
        second[1],
    ]
    unknown = [{"running": 1, "steps": [0, 40], "speedup": None}]
    assert merge_choices([first, unknown]) == [{"running": 1, "steps": [1, 43], "speedup": 1.4}]
    assert merge_choices([unknown, unknown])[0]["speedup"] is None
