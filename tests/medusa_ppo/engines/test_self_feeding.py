"""Engines that take newer heads from a feed by themselves, while requests run: the tokens stay what
they were, and whatever is wrong with a feed changes nothing.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from heads import heads_config
from heads.checkpoint import save_heads, save_state
from heads.modules import MedusaHeads
from medusa_ppo.config.engine_section import EngineConfig
from medusa_ppo.contract.rollouts import Sampling
from medusa_ppo.engines.colocated import ColocatedEngine
from medusa_ppo.engines.http_server import ServerEngine
from medusa_ppo.engines.launch import draft_vocabulary, read_heads_config
from medusa_ppo.feeds.feed import Feed
from medusa_ppo.feeds.feed_manifest import MANIFEST, FeedActor, FeedVersion, Release
from medusa_ppo.feeds.feed_server import FeedServer
from medusa_ppo.feeds.folder_feed import FolderFeed
from medusa_ppo.feeds.http_feed import FEED_TOKEN, open_feed
from medusa_ppo.vllm_plugin import feed_watch, installation, self_feeding, v1_runner
from medusa_ppo.vllm_plugin.confirm import fixed_inputs, fixed_sampling
from medusa_ppo.vllm_plugin.feed_watch import FeedWatch
from medusa_ppo.vllm_plugin.second_set import THREAD, SecondSet
from medusa_ppo.vllm_plugin.self_feeding import FEEDER
from medusa_ppo.vllm_plugin.speculation import FEED, speculation
from medusa_ppo.vllm_plugin.worker_calls import DRAFTING, Drafting
from tests.medusa_ppo.conftest import cpu_alone, on_two_gpus
from tests.medusa_ppo.engines.conftest import HEADS, TIED, Actor, assert_greedy, tokens
from tests.medusa_ppo.feeds.conftest import until

pytestmark = pytest.mark.engine
GREEDY = Sampling(temperature=0.0, max_new_tokens=48, ignore_eos=True)
LONG = Sampling(temperature=0.0, max_new_tokens=224, ignore_eos=True)
"""With one draft a step at most 224 steps and at least 112: enough for VERSIONS."""
VERSIONS = 50


def core_of(engine: ColocatedEngine) -> Any:
    return engine._running().llm_engine.engine_core.engine_core


def take_newest(engine: ColocatedEngine, actor: Actor, watch: FeedWatch, version: int) -> None:
    """Let a version come, and requests run until it serves."""
    until(lambda: watch.newest_here == version)
    while watch.known != version:
        engine.generate(actor.prompts[:1], GREEDY)


def end_feeding(core: Any) -> None:
    """The engine keeps its heads; it looks for a feed again after its next step."""
    if (feeder := vars(core).pop(FEEDER, None)) is not None:
        feeder.close()


class Publisher:
    """What a companion does."""

    def __init__(self, actor: Actor, folder: Path, heads: MedusaHeads) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder / "feed"
        self.feed: Feed = FolderFeed(self.folder)
        self.of = FeedActor.of(heads.config, actor.lm_head_VD)
        self._heads = heads
        self.state = folder / "state"
        self.count = 0

    def publish(self, number: int, of: FeedActor | None = None) -> FeedVersion:
        torch.manual_seed(number)
        for parameter in self._heads.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.05)
        save_state(self.state, self._heads.trainable_state())
        release = Release(
            actor=of or self.of, dtype="float32", version=number, policy_version=number
        )
        return self.feed.publish(self.state, release)

    def rewrite(self, change: Callable[[dict[str, Any]], None]) -> None:
        raw = json.loads((self.folder / MANIFEST).read_text())
        change(raw)
        (self.folder / MANIFEST).write_text(json.dumps(raw))

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """What is done to the folder in here is done to a copy, whose manifest is moved over last:
        an engine that looks all the time would take a version that is about to be spoiled.
        """
        seen, self.folder = self.folder, self.folder.with_name("copy")
        shutil.copytree(seen, self.folder)
        self.feed = FolderFeed(self.folder)
        yield
        for file in sorted(self.folder.iterdir(), key=lambda file: file.name == MANIFEST):
            os.replace(file, seen / file.name)
        self.folder, self.feed = seen, FolderFeed(seen)


@pytest.fixture
def publisher(actor: Actor, tmp_path: Path) -> Publisher:
    return Publisher(actor, tmp_path, actor.random_heads(0))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_watch, "LOOK_S", 0.01)
    monkeypatch.setattr(self_feeding, "ASK_S", 0.0)
    monkeypatch.setattr(self_feeding, "VERSION_S", 0.0)


@pytest.fixture
def feeding(
    engine: ColocatedEngine, quick: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str], FeedWatch]]:
    """feeding(address): the shared engine looks there from now on. Returns its watch."""
    core = core_of(engine)

    def begin(address: str) -> FeedWatch:
        monkeypatch.setenv(FEED, address)
        installation.install()
        engine.generate([[1, 2, 3]], Sampling(0.0, max_new_tokens=2, ignore_eos=True))
        return getattr(core, FEEDER)._watch

    yield begin
    end_feeding(core)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], str]]:
    monkeypatch.setenv(FEED_TOKEN, "a secret of this test")
    started: list[tuple[FeedServer, threading.Thread]] = []

    def serve(folder: Path) -> str:
        server = FeedServer(folder, "127.0.0.1", 0)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        until(lambda: bool(server.port) or not thread.is_alive())
        started.append((server, thread))
        return f"http://127.0.0.1:{server.port}"

    yield serve
    for server, thread in started:
        server.stop()
        thread.join()


def generate_while_publishing(
    engine: ColocatedEngine, actor: Actor, publisher: Publisher, versions: int
) -> tuple[list[tuple[int, ...]], list[list[dict[str, Any]]]]:
    """64 requests, with a new version before every other step as long as there are some. What the
    requests said, and what the ranks say of their heads before each step.
    """
    core = core_of(engine)
    feeder = getattr(core, FEEDER)
    watch = feeder._watch
    stepping = core.step_fn
    seen: list[list[dict[str, Any]]] = []
    number = 0

    def step() -> Any:
        nonlocal number
        seen.append(core.collective_rpc("medusa_checksums"))
        if feeder._coming is not None:
            until(
                lambda: all(answer["ready"] for answer in core.collective_rpc("medusa_feed_ready"))
            )
        elif number < versions:
            number += 1
            publisher.publish(number)
            until(lambda: watch.offers)
        return stepping()

    core.step_fn = step
    try:
        rollouts = engine.generate(actor.prompts, LONG)
    finally:
        core.step_fn = stepping
    return tokens(rollouts), seen


@pytest.mark.parametrize("kind", ["folder", "http"])
def test_versions_that_come_while_requests_run_change_no_token(
    engine: ColocatedEngine,
    actor: Actor,
    serving: str,
    publisher: Publisher,
    feeding: Callable[[str], FeedWatch],
    served: Callable[[Path], str],
    kind: str,
) -> None:
    engine.configure(num_drafts=0)
    alone = tokens(engine.generate(actor.prompts, LONG))
    engine.configure(num_drafts=1)
    feeding(str(publisher.folder) if kind == "folder" else served(publisher.folder))
    said, seen = generate_while_publishing(engine, actor, publisher, VERSIONS)
    assert_greedy(actor.model, actor.prompts, said, alone, TIED[serving])
    assert len(said) == 64
    versions = [answer["heads_version"] for (answer,) in seen]
    assert versions == sorted(versions) and set(versions) == {*range(VERSIONS + 1)}
    assert len({answer["heads"] for (answer,) in seen}) == VERSIONS + 1


def closed_port() -> str:
    import socket

    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{closed.getsockname()[1]}"


def half_written(publisher: Publisher) -> None:
    with publisher.at_once():
        file = publisher.folder / publisher.publish(3).file
        file.write_bytes(file.read_bytes()[:1000])


def forged(publisher: Publisher) -> None:
    with publisher.at_once():
        publisher.publish(3)
        publisher.rewrite(lambda raw: raw["versions"][-1].update(digest="0" * 64))


def pickled(publisher: Publisher) -> None:
    """With the right digest: what unpickled it would write a file."""
    import hashlib
    import pickle

    class Harm:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {publisher.folder}/harm",)

    data = pickle.dumps({"weight": Harm()})
    digest = hashlib.sha256(data).hexdigest()
    with publisher.at_once():
        (publisher.folder / publisher.publish(3).file).write_bytes(data)
        publisher.rewrite(lambda raw: raw["versions"][-1].update(digest=digest, bytes=len(data)))


def huge(publisher: Publisher) -> None:
    with publisher.at_once():
        os.truncate(publisher.folder / publisher.publish(3).file, 100 * 10**9)
        publisher.rewrite(lambda raw: raw["versions"][-1].update(bytes=100 * 10**9))


def longer_than_it_says(publisher: Publisher) -> None:
    with publisher.at_once():
        os.truncate(publisher.folder / publisher.publish(3).file, 100 * 10**9)


def of_another_actor(publisher: Publisher) -> None:
    other = publisher.of.model_copy(
        update={"sketch": f"{~int(publisher.of.sketch, 16) % 16**128:0128x}"}
    )
    publisher.folder.rename(publisher.folder.with_name("first"))
    publisher.publish(3, of=other)


def backwards(publisher: Publisher) -> None:
    (publisher.folder / MANIFEST).unlink()
    publisher.publish(1)
    publisher.rewrite(lambda raw: raw["versions"][-1].update(version=1))


def empty(publisher: Publisher) -> None:
    (publisher.folder / MANIFEST).unlink()


def damaged(publisher: Publisher) -> None:
    (publisher.folder / MANIFEST).write_text('{"format_version": 1, "versions"')


BAD: dict[str, tuple[Callable[[Publisher], None], str]] = {
    "half-written": (half_written, "not the one that its manifest describes"),
    "a forged digest": (forged, "not the one that its manifest describes"),
    "a pickle": (pickled, "does not hold heads"),
    "100 GB": (huge, "larger than any heads"),
    "100 GB that say they are less": (
        longer_than_it_says,
        "not the one that its manifest describes",
    ),
    "another actor": (of_another_actor, "another actor"),
    "backwards": (backwards, "goes backwards"),
    "empty": (empty, "is empty"),
    "a damaged manifest": (damaged, "manifest is damaged"),
}


@pytest.mark.parametrize("kind", BAD)
def test_whatever_is_wrong_with_a_feed_drafting_goes_on_and_says_so_once(
    engine: ColocatedEngine,
    actor: Actor,
    serving: str,
    publisher: Publisher,
    feeding: Callable[[str], FeedWatch],
    caplog: pytest.LogCaptureFixture,
    kind: str,
) -> None:
    harm, words = BAD[kind]
    good = 2 if kind == "backwards" else 1
    for number in range(1, good + 1):
        publisher.publish(number)
    watch = feeding(str(publisher.folder))
    take_newest(engine, actor, watch, good)
    before = engine.generate(actor.prompts[:8], GREEDY)
    held = engine.checksums()["heads"]
    assert watch.known == good
    with caplog.at_level(logging.WARNING, logger="medusa_ppo"):
        harm(publisher)
        looks = watch.looks
        until(lambda: watch.looks >= looks + 5)
        after = engine.generate(actor.prompts[:8], GREEDY)
    told = [record.getMessage() for record in caplog.records]
    # "is empty" may be told as well, before what comes next.
    assert sum(words in text for text in told) == 1, told
    assert_greedy(actor.model, actor.prompts, tokens(after), tokens(before), TIED[serving])
    assert after.counters.drafts > 0
    assert engine.checksums()["heads"] == held
    assert not list(publisher.folder.glob("harm"))
    room = sum(path.stat().st_size for path in watch._folder.path.iterdir())
    assert room <= 2 * watch._actor.most_bytes()


def test_a_feed_that_is_away_comes_back(
    engine: ColocatedEngine,
    actor: Actor,
    publisher: Publisher,
    feeding: Callable[[str], FeedWatch],
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, logger="medusa_ppo"):
        watch = feeding(closed_port())
        until(lambda: watch.looks >= 5)
        assert engine.generate(actor.prompts[:8], GREEDY).counters.drafts > 0
    assert sum("does not answer" in record.getMessage() for record in caplog.records) == 1
    watch = None
    end_feeding(core_of(engine))
    publisher.publish(1)
    watch = feeding(str(publisher.folder))
    away = publisher.folder.with_name("away")
    publisher.folder.rename(away)
    looks = watch.looks
    until(lambda: watch.looks >= looks + 2)
    away.rename(publisher.folder)
    newest = publisher.publish(2)
    take_newest(engine, actor, watch, 2)
    assert engine.checksums()["heads"] == newest.checksum and watch.known == newest.version


def test_rollouts_name_the_version_of_the_feed_and_a_swap_keeps_its_own(
    engine: ColocatedEngine,
    actor: Actor,
    publisher: Publisher,
    feeding: Callable[[str], FeedWatch],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    newest = publisher.publish(1)
    engine.swap_heads(publisher.state, 7)
    watch = feeding(str(publisher.folder))
    # The shared engine was started without a feed.
    monkeypatch.setattr(engine, "_feeds_itself", engine.plugin_report()["feeds_itself"])
    take_newest(engine, actor, watch, 1)
    assert engine.checksums()["heads"] == newest.checksum
    assert engine.generate(actor.prompts[:1], GREEDY).heads_version == 7
    publisher.publish(2)
    take_newest(engine, actor, watch, 2)
    assert engine.generate(actor.prompts[:1], GREEDY).heads_version == 2


@cpu_alone
@pytest.mark.parametrize("how", ["the core sleeps", "its workers sleep", "a swap fails"])
def test_heads_that_were_thrown_away_are_loaded_again(
    engine: ColocatedEngine,
    actor: Actor,
    publisher: Publisher,
    feeding: Callable[[str], FeedWatch],
    monkeypatch: pytest.MonkeyPatch,
    how: str,
) -> None:
    """By whichever call of vLLM: some loops let the workers sleep without telling the core."""
    newest = publisher.publish(1)
    watch = feeding(str(publisher.folder))
    take_newest(engine, actor, watch, 1)
    core = core_of(engine)
    worker = core.model_executor.driver_worker.worker
    drafter = worker.model_runner.drafter
    # The CPU's worker does not sleep, and is not looked at by our hook.
    kind = type(worker)
    monkeypatch.setattr(kind, "wake_up", v1_runner.with_heads_looked_at(kind.wake_up))
    if how == "the core sleeps":
        # As long as it takes the core, the rest of its question is not due.
        monkeypatch.setattr(self_feeding, "VERSION_S", 1e9)
        getattr(core, FEEDER)._asks_at = float("inf")
        core.sleep(2)
    with torch.no_grad():
        for parameter in drafter.heads.parameters():
            parameter.zero_()
    if how == "the core sleeps":
        core.wake_up()
    elif how == "its workers sleep":
        core.collective_rpc("wake_up")
    else:
        drafter.fed = False
    assert not drafter.fed
    engine.generate(actor.prompts[:1], GREEDY)
    assert engine.checksums()["heads"] == newest.checksum and drafter.held_version() == 1


@cpu_alone
def test_a_version_from_a_feed_drafts_what_a_swap_of_the_same_heads_drafts(
    engine: ColocatedEngine,
    actor: Actor,
    publisher: Publisher,
    feeding: Callable[[str], FeedWatch],
) -> None:
    core = core_of(engine)
    drafter = core.model_executor.driver_worker.worker.model_runner.drafter
    hidden_BD = torch.randn(5, drafter.hidden_size, generator=torch.Generator().manual_seed(0))

    def seen() -> Any:
        fixed = fixed_inputs(drafter.heads.config, drafter.dtype, drafter.device)
        how = fixed_sampling(HEADS, drafter.device)
        hidden_BnD, ids_Bn = fixed.hidden_BnD[:, -1], fixed.ids_Bn[:, -1]
        q = drafter._core.draft(hidden_BnD, ids_Bn, HEADS, how).q
        counters = engine.generate(actor.prompts[:8], GREEDY).counters
        return (
            torch.stack(q).tolist(),
            engine.probe(hidden_BD.tolist(), [0] * 5),
            (counters.drafts, counters.accepted),
        )

    places = [parameter.data_ptr() for parameter in drafter.heads.parameters()]
    heads = drafter.heads
    publisher.publish(1)
    shutil.copy(publisher.state, publisher.folder.with_name("first"))
    watch = feeding(str(publisher.folder))
    take_newest(engine, actor, watch, 1)
    fed = seen()
    assert drafter.heads is heads
    assert not {parameter.data_ptr() for parameter in heads.parameters()} & {*places}
    end_feeding(core)
    publisher.publish(2)
    engine.swap_heads(publisher.state, 8)
    other = seen()
    engine.swap_heads(publisher.folder.with_name("first"), 9)
    assert seen() == fed and other != fed


@cpu_alone
def test_heads_whose_preparation_failed_beside_the_engine_are_prepared_between_two_steps(
    engine: ColocatedEngine,
    actor: Actor,
    publisher: Publisher,
    feeding: Callable[[str], FeedWatch],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A loop may load the actor meanwhile: vLLM's `reload_weights` takes its tables apart for a
    moment, and a thread that reads one then finds a tensor without memory.
    """
    plainly = SecondSet._plainly
    failed: list[str] = []

    def none_beside(self: SecondSet) -> list[torch.Tensor]:
        thread = threading.current_thread().name
        if thread.startswith(THREAD):
            failed.append(thread)
            raise RuntimeError("Tensor on device meta is not on the expected device cpu!")
        return plainly(self)

    monkeypatch.setattr(SecondSet, "_plainly", none_beside)
    newest = publisher.publish(1)
    watch = feeding(str(publisher.folder))
    take_newest(engine, actor, watch, 1)
    assert failed and engine.checksums()["heads"] == newest.checksum


@pytest.mark.slow
@pytest.mark.parametrize("drafting", [None, {"num_drafts": 3, "draft_vocab": 0}])
def test_what_a_loop_passes_is_vllms_own_configuration_and_an_address(
    actor: Actor,
    publisher: Publisher,
    quick: None,
    monkeypatch: pytest.MonkeyPatch,
    drafting: Drafting | None,
) -> None:
    """An engine that knows nothing of ours but heads: no worker extension, no call of a loop. If
    nobody says how to draft, it chooses K, and drafts from the tokens that the companion trains.
    """
    from vllm import LLM, SamplingParams, TokensPrompt

    monkeypatch.setenv(FEED, str(publisher.folder))
    # As if the actor's vocabulary were a large one.
    monkeypatch.setattr(heads_config, "LARGE_VOCABULARY", 16)
    monkeypatch.setattr(heads_config, "DRAFT_VOCABULARY", 12)
    told = speculation(str(actor.heads_path), 4, drafting or {})
    if drafting is None:
        del told["additional_config"][DRAFTING]
    installation.install()
    newest = publisher.publish(1)
    llm = LLM(
        str(actor.path),
        dtype="float32",
        max_model_len=256,
        enforce_eager=True,
        skip_tokenizer_init=True,
        gpu_memory_utilization=0.05,
        kv_cache_memory_bytes=1 << 28,
        **told,
    )
    core = llm.llm_engine.engine_core.engine_core
    try:
        (held,) = core.collective_rpc("medusa_configure", args=({},))
        assert held["sampled"]
        if drafting is None:
            trained = draft_vocabulary(EngineConfig(), read_heads_config(actor.heads_path, 0, 0))
            assert (held["num_drafts"], held["choose"], held["draft_vocab"]) == (4, True, trained)
            assert trained == 12
        else:
            assert (held["num_drafts"], held["choose"], held["draft_vocab"]) == (3, False, 0)
        asked = [TokensPrompt(prompt_token_ids=prompt) for prompt in actor.prompts[:8]]
        greedy = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, detokenize=False)
        first = [answer.outputs[0].token_ids for answer in llm.generate(asked, greedy)]
        watch = getattr(core, FEEDER)._watch
        until(lambda: watch.newest_here == 1)
        while watch.known != 1:
            second = [answer.outputs[0].token_ids for answer in llm.generate(asked, greedy)]
            assert second == first
        (answer,) = core.collective_rpc("medusa_checksums")
    finally:
        llm.llm_engine.engine_core.shutdown()
    assert (answer["heads"], answer["heads_version"]) == (newest.checksum, 1)


@on_two_gpus
@pytest.mark.slow
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs a core for each rank")
def test_two_ranks_take_each_version_at_the_same_step(
    actor: Actor,
    engine_config: EngineConfig,
    serving: str,
    served: Callable[[Path], str],
    ray_session: None,
    quick: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From one kind of feed after the other."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    monkeypatch.setenv(FEED, str(tmp_path / "nothing yet"))
    installation.install()
    config = engine_config.model_copy(
        update={"extra": engine_config.extra | {"tensor_parallel_size": 2}, "num_drafts": 2}
    )
    save_heads(tmp_path / "heads", actor.first_heads(), lm_head_VD=actor.lm_head_VD)
    with ColocatedEngine(actor.path, tmp_path / "heads", config) as engine:
        engine.configure(num_drafts=0)
        alone = tokens(engine.generate(actor.prompts, LONG))
        engine.configure(num_drafts=1)
        for kind in ("folder", "http", "ray"):
            end_feeding(core_of(engine))
            publisher = Publisher(actor, tmp_path / kind, actor.random_heads(0))
            address = str(publisher.folder)
            if kind == "http":
                address = served(publisher.folder)
            elif kind == "ray":
                address = "ray:two-ranks"
                publisher.feed = open_feed(address)
            monkeypatch.setenv(FEED, address)
            engine.generate(actor.prompts[:1], GREEDY)
            said, seen = generate_while_publishing(engine, actor, publisher, VERSIONS)
            assert_greedy(actor.model, actor.prompts, said, alone, TIED[serving])
            assert len(said) == 64, kind
            taken = [ranks[0]["heads_version"] for ranks in seen]
            assert {*taken[taken.index(1) :]} == {*range(1, VERSIONS + 1)}, kind
            for ranks in seen:
                assert len(ranks) == 2 and ranks[0]["heads_version"] == ranks[1]["heads_version"]
                assert ranks[0]["heads"] == ranks[1]["heads"], kind
            assert engine.generate(actor.prompts[:1], GREEDY).heads_version == VERSIONS


@cpu_alone
@pytest.mark.slow
def test_a_server_with_a_core_of_its_own_feeds_itself(
    actor: Actor,
    publisher: Publisher,
    engine_config: EngineConfig,
    served: Callable[[Path], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(FEED, served(publisher.folder))
    config = engine_config.model_copy(update={"backend": "server"})
    with ServerEngine(actor.path, actor.heads_path, config) as engine:
        first = tokens(engine.generate(actor.prompts[:4], GREEDY))
        newest = publisher.publish(1)
        while engine.checksums()["heads"] != newest.checksum:
            assert tokens(engine.generate(actor.prompts[:4], GREEDY)) == first
        assert engine.generate(actor.prompts[:4], GREEDY).heads_version == newest.version
