"""The pool that broadcasts: its own rules with stand-ins that receive over real sockets, then vLLM
engines that load what they receive.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from heads.checkpoint import load_state, save_state
from heads.errors import CheckpointError, EngineError, SwapError
from heads.tensorfile import checksum, write_summed
from medusa_ppo.actors.actor_view import SpreadActor
from medusa_ppo.config.engine_section import EngineConfig
from medusa_ppo.contract.rollouts import Counters, Response, Rollouts, Sampling
from medusa_ppo.contract.status import SwapReceipt
from medusa_ppo.engines.actor_sync import ActorSync, BroadcastPool, actor_state, actor_stream
from medusa_ppo.engines.colocated import ColocatedEngine
from medusa_ppo.engines.ray_engine import make_engine
from medusa_ppo.engines.rollout_engine import NoEngine, RolloutEngine
from medusa_ppo.runtime.rendezvous import LOOPBACK, Place
from medusa_ppo.vllm_plugin.transfer import ActorStream, Group, Incoming, read_entries, send
from medusa_ppo.vllm_plugin.vllm_versions import can_transfer, vllm_version
from tests.medusa_ppo.conftest import on_two_gpus
from tests.medusa_ppo.engines.conftest import NEAR, TIED, assert_greedy, logprob_gap, tiny_llama

if TYPE_CHECKING:
    from tests.medusa_ppo.engines.conftest import Actor

# vLLM has one engine a process: tests that start another one end the one that those before share.
pytestmark = pytest.mark.random_order(disabled=True)

GREEDY = Sampling(temperature=0.0, max_new_tokens=24, ignore_eos=True)
BUCKET = 1 << 20
EMBEDDING = "model.embed_tokens.weight"
PROMPTS = [[5, 6, 7, 8], [100, 200, 300]]


class ReceivingEngine(NoEngine):
    """Receives for real and holds the tensors; refuses, dies or is silent on demand."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.state = dict[str, torch.Tensor]()
        self.actor = ""
        self.joined = self.asked = 0
        self.refuses = False
        self.closed = threading.Event()
        self.before_receiving: Callable[[], None] = lambda: None
        self.group: Group | None = None

    def check_actor(self, entries: Any) -> list[str]:
        if self.refuses:
            raise SwapError("The actor is another model's.")
        return ["cpu"]

    def join_transfer(self, place: dict[str, Any]) -> None:
        self.joined += 1
        self.group = Group(Place(**place)).join()

    def receive_actor(self, entries: Any, version: int) -> SwapReceipt:
        assert self.group is not None
        self.before_receiving()
        incoming = Incoming(self.group, read_entries(entries))
        self.state = {name: tensor.clone() for name, tensor in incoming}
        self.actor = incoming.checksum
        self.policy_version = version
        return SwapReceipt(version, self.actor, 0.0)

    def sync_actor(self, path: Any, version: int, checked: Any = None) -> SwapReceipt:
        self.state = load_state(path)
        self.policy_version = version
        self.actor = checksum(self.state)
        return SwapReceipt(version, self.actor, 0.0)

    def generate(self, prompts: Any, sampling: Sampling) -> Rollouts:
        self.asked += len(prompts)
        answers = tuple(
            Response(i, tuple(p), (-1.0,) * len(p), "stop") for i, p in enumerate(prompts)
        )
        return Rollouts(
            tuple(map(tuple, prompts)), answers, Counters(), 0.1, sampling, self.policy_version
        )

    def checksums(self) -> dict[str, str]:
        return {"heads": "", "actor": self.actor}

    def close(self) -> None:
        self.closed.set()


def state_of(value: float) -> dict[str, torch.Tensor]:
    return {"a": torch.full((300,), value), "b": torch.arange(8.0).view(2, 4) * value}


def stream_of(state: Mapping[str, torch.Tensor]) -> ActorStream:
    entries = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in state.items()}
    return ActorStream(
        entries, state.items, lambda path, _: write_summed(path, entries, state.items()), 64
    )


@pytest.fixture
def make_pool() -> Iterator[Callable[..., tuple[BroadcastPool, list[ReceivingEngine]]]]:
    pools = []

    def make(count: int, timeout_s: float = 5.0) -> tuple[BroadcastPool, list[ReceivingEngine]]:
        started: list[ReceivingEngine] = []

        def start(index: int) -> ReceivingEngine:
            started.append(ReceivingEngine(index))
            return started[-1]

        pools.append(BroadcastPool(start, count))
        pools[-1].timeout_s = timeout_s
        started.sort(key=lambda engine: engine.index)
        return pools[-1], started

    yield make
    for pool in pools:
        pool.close()


def engines_of(pool: BroadcastPool) -> list[Any]:
    """Those that sit in the pool, after lost ones have come back."""
    deadline = time.monotonic() + 10
    while len(pool._ready()) < len(pool._seats) and time.monotonic() < deadline:
        pool._revive()
    return [seat.engine for seat in pool._seats]


# ---- the pool's own rules


def test_all_engines_get_each_actor_and_the_group_is_kept(make_pool: Any) -> None:
    pool, engines = make_pool(2)
    for version, value in ((1, 1.0), (2, 2.0)):
        receipt = pool.stream_actor(stream_of(state_of(value)), version)
        assert receipt.checksum == checksum(state_of(value)) == pool.checksums()["actor"]
        assert all(
            torch.equal(engine.state["b"], state_of(value)["b"])
            and engine.policy_version == version
            for engine in engines
        )
        assert pool.policy_version == receipt.version == version
    assert [engine.joined for engine in engines] == [1, 1]
    assert pool.generate(PROMPTS, GREEDY).policy_version == 2 and pool._folder is None, (
        "no file was written"
    )


def test_an_engine_that_comes_late_gets_a_file_and_then_joins(make_pool: Any) -> None:
    pool, engines = make_pool(2)
    pool.stream_actor(stream_of(state_of(1.0)), 1)
    pool._lost(pool._seats[1], EngineError("The engine's process died."))
    late = engines_of(pool)[1]
    assert late is not engines[1] and late.actor == ""
    pool.generate([[index + 1] for index in range(40)], GREEDY)
    assert late.policy_version == 1 and late.actor == engines[0].actor == pool.checksums()["actor"]
    pool.stream_actor(stream_of(state_of(2.0)), 2)
    assert [engine.joined for engine in (engines[0], late)] == [2, 1]
    assert pool.checksums()["actor"] == checksum(state_of(2.0)) and not list(
        pool._folder.path.glob("*.safetensors")
    )


MANY = [[index + 1] for index in range(40)]


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("by_file", [False, True])
def test_an_engine_whose_actor_has_changed_waits_for_the_next_sync(
    make_pool: Any, tmp_path: Path, seed: int | None, by_file: bool
) -> None:
    """As with ppo.staleness: the engines write while the loop updates the actor."""
    pool, engines = make_pool(2)
    state = state_of(1.0)
    pool.stream_actor(stream_of(state), 1)
    state["a"] += 1.0
    pool._lost(pool._seats[1], EngineError("The engine's process died."))
    late = engines_of(pool)[1]
    sampling = Sampling(seed=seed)
    for _ in range(2):
        rollouts = pool.generate(MANY, sampling)
        assert [response.token_ids for response in rollouts.responses] == list(map(tuple, MANY))
        assert (rollouts.policy_version, engines[0].policy_version, late.asked) == (1, 1, 0)
    assert late.policy_version == 0 and pool.restarts == 1
    assert not list(pool._folder.path.glob("*.safetensors")), "what it may not have is not kept"

    if by_file:
        save_state(tmp_path / "actor", state)
        pool.sync_actor(tmp_path / "actor", 2)
    else:
        pool.stream_actor(stream_of(state), 2)
    pool.generate(MANY, sampling)
    assert late.asked > 0 and {engines[0].policy_version, late.policy_version} == {2}
    assert pool.checksums()["actor"] == checksum(state)


def test_an_engine_that_was_away_at_the_next_sync_gets_that_actor(make_pool: Any) -> None:
    pool, _ = make_pool(2)
    state = state_of(1.0)
    pool.stream_actor(stream_of(state), 1)
    state["a"] += 1.0
    for seat in pool._seats:
        pool._lost(seat, EngineError("The engine's process died."))
    engines_of(pool)
    with pytest.raises(EngineError, match="No engine is left that has the actor") as caught:
        pool.generate(MANY, GREEDY)
    assert "2 restarted" in str(caught.value) and pool.restarts == 2, "no further ones are started"
    pool.stream_actor(stream_of(state), 2)
    assert pool.generate(MANY, GREEDY).policy_version == 2


def test_a_single_engine_has_a_file_where_the_loop_updates_while_it_writes(make_pool: Any) -> None:
    for changes in (True, False):
        pool, _ = make_pool(1)
        state = state_of(1.0)
        pool.stream_actor(dataclasses.replace(stream_of(state), changes=changes), 1)
        sent = checksum(state)
        state["a"] += 1.0
        pool._lost(pool._seats[0], EngineError("The engine's process died."))
        (late,) = engines_of(pool)
        if changes:
            assert pool.generate(PROMPTS, GREEDY).policy_version == 1 and late.actor == sent
            pool.stream_actor(dataclasses.replace(stream_of(state), changes=True), 2)
            assert len(list(pool._folder.path.glob("*.safetensors"))) == 1
        else:
            with pytest.raises(EngineError, match="may have changed since"):
                pool.generate(PROMPTS, GREEDY)


def test_a_loop_that_lets_engines_write_ahead_says_so(make_pool: Any) -> None:
    model = tiny_llama()
    for ahead in (True, False):
        pool, _ = make_pool(1)
        with ActorSync(pool, ahead=ahead) as sync:
            sync(model, 1)
        assert (pool._folder is not None) == ahead


def test_an_actor_that_can_not_be_written_is_no_end_while_others_have_it(
    make_pool: Any, caplog: pytest.LogCaptureFixture
) -> None:
    pool, engines = make_pool(2)

    def full(path: Path, over: Path | None) -> str:
        path.write_text("half")
        raise OSError(28, "No space left on device")

    pool.stream_actor(dataclasses.replace(stream_of(state_of(1.0)), write=full), 1)
    pool._lost(pool._seats[1], EngineError("The engine's process died."))
    late = engines_of(pool)[1]
    assert len(pool.generate(MANY, GREEDY).responses) == 40 and late.asked == 0
    assert "No space left" in caplog.text and engines[0].asked == 40
    assert not list(pool._folder.path.glob("*.safetensors"))


def test_engines_that_have_the_actor_do_not_wait_for_a_late_ones_file(make_pool: Any) -> None:
    pool, engines = make_pool(2)
    stream = stream_of(state_of(1.0))

    def after_the_others_answer(path: Path, over: Path | None) -> str:
        deadline = time.monotonic() + 10
        while not engines[0].asked and time.monotonic() < deadline:
            time.sleep(0.01)
        assert engines[0].asked, "it waits too"
        return stream.write(path, over)

    pool.stream_actor(dataclasses.replace(stream, write=after_the_others_answer), 1)
    pool._lost(pool._seats[1], EngineError("The engine's process died."))
    late = engines_of(pool)[1]
    pool.generate(MANY, GREEDY)
    assert late.asked and late.policy_version == 1


def test_one_engine_that_refuses_leaves_all_as_they_are(make_pool: Any) -> None:
    pool, engines = make_pool(2)
    pool.stream_actor(stream_of(state_of(1.0)), 1)
    engines[1].refuses = True
    with pytest.raises(SwapError, match="another model"):
        pool.stream_actor(stream_of(state_of(2.0)), 2)
    assert pool.policy_version == 1 and {engine.actor for engine in engines} == {
        checksum(state_of(1.0))
    }


def test_an_engine_that_dies_on_the_way_is_an_error_soon_and_a_file_goes_on(
    make_pool: Any, tmp_path: Path
) -> None:
    pool, engines = make_pool(2)

    def die() -> None:
        engines[1].group.leave()
        raise EngineError("The engine's process died.")

    engines[1].before_receiving = die
    began = time.monotonic()
    state = state_of(1.0) | {"large": torch.randn(2000, 1000)}
    with pytest.raises(SwapError):
        pool.stream_actor(stream_of(state), 1)
    assert time.monotonic() - began < 12 and pool.policy_version == 0
    save_state(tmp_path / "actor", state)
    pool.sync_actor(tmp_path / "actor", 1)
    engines_of(pool)
    pool.generate([[index + 1] for index in range(40)], GREEDY)
    assert pool.checksums()["actor"] == checksum(state) and pool.restarts == 1
    assert pool.stream_actor(stream_of(state_of(2.0)), 2).checksum == pool.checksums()["actor"]


def test_a_silent_engine_is_lost_within_the_timeout(make_pool: Any, tmp_path: Path) -> None:
    pool, engines = make_pool(2, timeout_s=0.5)

    def hang() -> None:
        engines[1].closed.wait(20)
        raise EngineError("The engine's process died.")

    engines[1].before_receiving = hang
    began = time.monotonic()
    with pytest.raises(SwapError, match="broke off"):
        pool.stream_actor(stream_of(state_of(1.0)), 1)
    assert time.monotonic() - began < 5 and pool.restarts == 1
    save_state(tmp_path / "actor", state_of(1.0))
    pool.sync_actor(tmp_path / "actor", 1)
    late = engines_of(pool)[1]
    pool.generate([[index + 1] for index in range(40)], GREEDY)
    assert late is not engines[1] and late.actor == engines[0].actor == checksum(state_of(1.0))


def test_a_broadcast_that_fails_goes_as_a_file(
    make_pool: Any, caplog: pytest.LogCaptureFixture
) -> None:
    pool, engines = make_pool(1)
    model = tiny_llama()

    def die() -> None:
        engines[0].group.leave()
        raise SwapError("The connection broke.")

    engines[0].before_receiving = die
    with ActorSync(pool) as sync:
        receipt = sync(model, 1)
        assert receipt.checksum == engines[0].actor == checksum(actor_state(model))
        assert "to the engines as a file" in caplog.text
        engines[0].before_receiving = lambda: None
        caplog.clear()
        assert (
            sync(model, 2).checksum == receipt.checksum
            and engines[0].policy_version == 2
            and not caplog.text
        )
        assert (
            sync.nbytes == sum(t.nbytes for t in actor_state(model).values()) and sync.collect_s > 0
        )


def test_a_files_engine_says_that_it_takes_no_broadcast() -> None:
    for call in (RolloutEngine.check_actor, RolloutEngine.join_transfer):
        with pytest.raises(EngineError, match="only from a file"):
            call(ReceivingEngine(0), {})


# ---- vLLM


def moved(model: Any, seed: int = 3) -> Any:
    other = copy.deepcopy(model)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.1 * parameter.std() * torch.randn_like(parameter))
    return other


def tokens(engine: RolloutEngine, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    return [response.token_ids for response in engine.generate(prompts, GREEDY).responses]


class Spread(SpreadActor):
    """A model's tensors as stages give them out: backwards."""

    def __init__(self, model: Any) -> None:
        self._state = actor_state(model)

    def tap(self) -> Any:
        raise NotImplementedError("only the tensors are asked for here")

    lm_head_VD = embedding_VD = property(tap)  # type: ignore[assignment]

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self._state.items()}

    def tensors(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        for name in reversed(self._state):
            yield name, self._state[name].to(dtype)


@pytest.fixture(scope="module")
def broadcast_config(engine_config: EngineConfig) -> EngineConfig:
    if not can_transfer(vllm_version()):
        pytest.skip("our backend is refused with this vLLM")
    return engine_config.model_copy(update={"transfer": "broadcast", "max_num_seqs": 16})


@pytest.fixture(scope="module")
def pool_of_one(actor: Actor, broadcast_config: EngineConfig) -> Iterator[BroadcastPool]:
    with BroadcastPool(
        lambda index: ColocatedEngine(actor.path, actor.heads_path, broadcast_config), 1
    ) as pool:
        pool.timeout_s = 20.0
        yield pool


@pytest.mark.engine
@pytest.mark.parametrize("spread", [False, True])
def test_a_broadcast_actor_is_the_one_of_a_file(
    pool_of_one: BroadcastPool, actor: Actor, tmp_path: Path, spread: bool
) -> None:
    pool = pool_of_one
    new = moved(actor.model)
    with ActorSync(pool, "float32", BUCKET) as sync:
        sync(actor.model, 1)
        before = tokens(pool, actor.prompts[:8])
        save_state(tmp_path / "new.safetensors", actor_state(new))
        by_file = pool.sync_actor(tmp_path / "new.safetensors", 2)
        expected = tokens(pool, actor.prompts[:8])
        sync(actor.model, 3)
        assert tokens(pool, actor.prompts[:8]) == before != expected, "cached prompts are forgotten"
        receipt = sync(Spread(new) if spread else new, 4)
        assert (
            receipt.checksum == by_file.checksum == pool.checksums()["actor"]
            and receipt.version == 4
        )
        rollouts = pool.generate(actor.prompts[:8], GREEDY)
        assert [
            response.token_ids for response in rollouts.responses
        ] == expected and rollouts.policy_version == 4
        assert rollouts.counters.drafts > 0
    # Zero-start heads are the lm_head: what they draft follows the new one.
    (engine,) = engines_of(pool)
    hidden_BD = torch.randn(4, new.config.hidden_size)
    assert [row[0] for row in engine.probe(hidden_BD.tolist(), [0] * 4)] == (
        hidden_BD @ new.lm_head.weight.T
    ).argmax(-1).tolist()


@pytest.mark.engine
@pytest.mark.parametrize("case", ["missing", "unknown", "shape", "kind"])
def test_a_foreign_actor_is_refused_before_anything_changes(
    pool_of_one: BroadcastPool, actor: Actor, serving: str, case: str
) -> None:
    pool = pool_of_one
    name = "model.layers.0.mlp.up_proj.weight"
    with ActorSync(pool, "float32", BUCKET) as sync:
        receipt = sync(actor.model, 1)
    before = tokens(pool, actor.prompts[:4])
    state = actor_state(actor.model)
    wrong = {
        "missing": {key: value for key, value in state.items() if key != name},
        "unknown": state | {"other.weight": torch.zeros(2)},
        "shape": state | {name: state[name][:8]},
        "kind": state | {name: state[name].long()},
    }[case]
    with pytest.raises(SwapError, match="not those of the serving model, which stays"):
        pool.stream_actor(stream_of(wrong), 2)
    after = tokens(pool, actor.prompts[:4])
    assert_greedy(actor.model, actor.prompts, after, before, TIED[serving])
    assert (
        pool.checksums()["actor"] == receipt.checksum
        and pool.policy_version == 1
        and pool.restarts == 0
    )


@pytest.mark.engine
def test_an_engine_between_two_actors_answers_nothing_until_it_has_one(
    pool_of_one: BroadcastPool, actor: Actor, tmp_path: Path
) -> None:
    pool = pool_of_one
    with ActorSync(pool, "float32", BUCKET) as sync:
        sync(actor.model, 1)
        before = tokens(pool, actor.prompts[:4])
        broken = copy.deepcopy(actor.model)
        broken.model.norm.weight[0] = torch.nan
        with pytest.raises(CheckpointError, match="NaN or infinity"):
            sync(broken, 2)
        (engine,) = engines_of(pool)
        with pytest.raises(EngineError, match="no complete actor"):
            engine.generate(actor.prompts[:1], GREEDY)
        assert engine.checksums()["actor"] == ""
        sync(actor.model, 3)
        assert tokens(pool, actor.prompts[:4]) == before and engine.policy_version == 3


@pytest.mark.engine
def test_a_broken_broadcast_is_mended_by_a_file(
    pool_of_one: BroadcastPool, actor: Actor, caplog: pytest.LogCaptureFixture
) -> None:
    """Half of a layer's fused tensors had come; what was left of them must not meet the file's."""
    pool = pool_of_one
    new = moved(actor.model, seed=5)
    state = actor_state(new)

    def half() -> Iterator[tuple[str, torch.Tensor]]:
        for name in sorted(state):
            if name == "model.layers.1.self_attn.v_proj.weight":
                raise SwapError("The stream ends here.")
            yield name, torch.full_like(state[name], 0.5)

    with ActorSync(pool, "float32", BUCKET) as sync:
        stream = actor_stream(new, torch.float32, 1)
        with pytest.raises(SwapError, match="ends here"):
            pool.stream_actor(ActorStream(stream.entries, half, stream.write, 1), 1)
        file = sync._folder.path / "state.safetensors"
        save_state(file, state)
        receipt = pool.sync_actor(file, 2)
    by_file = tokens(pool, actor.prompts[:8])
    assert receipt.checksum == checksum(state)
    with ActorSync(pool, "float32", BUCKET) as sync:
        sync(actor.model, 3)
        sync(new, 4)
    assert tokens(pool, actor.prompts[:8]) == by_file and pool.restarts == 0


@pytest.mark.engine
def test_vllms_own_session_calls_reach_our_backend(
    pool_of_one: BroadcastPool, actor: Actor
) -> None:
    new = moved(actor.model, seed=9)
    stream = actor_stream(new, torch.float32, BUCKET)
    (engine,) = engines_of(pool_of_one)
    group = Group.open(LOOPBACK, 2, timeout_s=20.0)
    place = dataclasses.asdict(group.place.seen_by(1))
    joining = threading.Thread(
        target=engine._llm.init_weight_transfer_engine, args=({"init_info": {"place": place}},)
    )
    joining.start()
    group.join()
    joining.join()
    sending = threading.Thread(target=send, args=(group, stream))
    sending.start()
    engine._llm.start_weight_update()
    engine._llm.update_weights({"update_info": {"entries": stream.header()}})
    engine._llm.finish_weight_update("step-7")
    sending.join()
    group.leave()
    engine._llm.reset_prefix_cache()
    assert engine._llm.get_weight_version() == "step-7"
    engine.target_changed(7)
    by_session = tokens(engine, actor.prompts[:8])
    with ActorSync(pool_of_one, "float32", BUCKET) as sync:
        sync(actor.model, 8)
        assert tokens(pool_of_one, actor.prompts[:8]) != by_session
        sync(new, 9)
        assert tokens(pool_of_one, actor.prompts[:8]) == by_session


@pytest.mark.engine
def test_a_tied_lm_head_follows_the_embedding(
    tmp_path: Path, broadcast_config: EngineConfig, serving: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without heads vLLM takes V2, which can't record in a process in which V1 has recorded.
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    model = tiny_llama(tied=True)
    model.save_pretrained(tmp_path)
    # Another table, not a moved one: what an lm_head of before would say lies far off.
    state = actor_state(model) | {EMBEDDING: 0.1 * torch.randn(320, 64)}
    assert "lm_head.weight" not in state
    with BroadcastPool(lambda index: ColocatedEngine(tmp_path, None, broadcast_config), 1) as pool:
        assert pool.stream_actor(stream_of(state), 1).checksum == checksum(state)
        rollouts = pool.generate(PROMPTS, Sampling(max_new_tokens=12))
        assert logprob_gap(model, rollouts) > 0.1
        model.load_state_dict(state, strict=False)
        assert logprob_gap(model, rollouts) < NEAR[serving] / 10
        # With its lm_head beside, as some loops send it: not loaded a second time.
        pool.stream_actor(stream_of(state | {"lm_head.weight": state[EMBEDDING].clone()}), 2)
        rollouts = pool.generate(PROMPTS, Sampling(max_new_tokens=12))
        assert logprob_gap(model, rollouts) < NEAR[serving] / 10


@on_two_gpus
@pytest.mark.slow
@pytest.mark.engine
def test_two_real_engines_one_of_which_dies_on_the_way(
    actor: Actor,
    broadcast_config: EngineConfig,
    serving: str,
    ray_session: None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = broadcast_config.model_copy(update={"replicas": 2, "max_num_seqs": 8})
    with (
        make_engine(actor.path, actor.heads_path, config) as pool,
        ActorSync(pool, "float32", BUCKET) as sync,
    ):
        assert isinstance(pool, BroadcastPool)
        pool.timeout_s = 20.0
        new = moved(actor.model)
        assert (
            sync(new, 1).checksum == checksum(actor_state(new)) == pool.checksums()["actor"]
            and not caplog.text
        )
        expected = tokens(pool, actor.prompts[:8])
        pids = [int(report["pid"]) for report in pool.plugin_report()["engines"]]
        stream = actor_stream(actor.model, torch.float32, BUCKET)

        def deadly() -> Iterator[tuple[str, torch.Tensor]]:
            for count, pair in enumerate(stream.tensors()):
                if count == 10:
                    os.kill(pids[1], signal.SIGKILL)
                yield pair

        began = time.monotonic()
        with pytest.raises(SwapError):
            pool.stream_actor(ActorStream(stream.entries, deadly, stream.write, BUCKET), 2)
        assert time.monotonic() - began < 60
        sync(new, 2)
        # One engine goes on with the actor of the next sync.
        one = tokens(pool, actor.prompts[:8])
        assert_greedy(new, actor.prompts, one, expected, TIED[serving])
        deadline = time.monotonic() + 300
        while len(pool._ready()) < 2 and time.monotonic() < deadline:
            pool.generate(actor.prompts[:4], GREEDY)
        assert len(pool.generate(actor.prompts[:24], GREEDY).responses) == 24 and pool.restarts == 1
        assert pool.checksums()["actor"] == checksum(actor_state(new)), (
            "the one that came late has it too"
        )
        caplog.clear()
        sync(actor.model, 3)
        assert pool.checksums()["actor"] == checksum(actor_state(actor.model)) and not caplog.text


@on_two_gpus
@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs a core for each rank")
def test_tensor_parallel_ranks_each_take_their_part(
    actor: Actor, broadcast_config: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    cut = broadcast_config.extra | {"tensor_parallel_size": 2}
    config = broadcast_config.model_copy(update={"extra": cut})
    new = moved(actor.model)
    pool = BroadcastPool(lambda index: ColocatedEngine(actor.path, actor.heads_path, config), 1)
    with pool, ActorSync(pool, "float32", BUCKET) as sync:
        before = tokens(pool, actor.prompts[:8])
        sync(new, 1)
        assert pool._group is not None and pool._group.place.size == 3
        by_broadcast = tokens(pool, actor.prompts[:8])
        save_state(tmp_path / "new.safetensors", actor_state(new))
        pool.sync_actor(tmp_path / "new.safetensors", 2)
        assert tokens(pool, actor.prompts[:8]) == by_broadcast != before
