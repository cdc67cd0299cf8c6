"""The engine over HTTP, end to end: a real server, its swaps, its counters, its end."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import torch

from heads.checkpoint import checksum, load_state, save_state
from heads.errors import EngineError, NoRoomError, SwapError
from medusa_ppo.config.engine_section import EngineConfig
from medusa_ppo.contract.rollouts import Sampling
from medusa_ppo.engines import http_server, ray_engine
from medusa_ppo.engines.http_server import ServerEngine, last_words
from medusa_ppo.engines.launch import LaunchPlan
from medusa_ppo.engines.ray_engine import make_engine
from tests.medusa_ppo.conftest import cpu_alone, eager_on_a_gpu
from tests.medusa_ppo.engines.conftest import (
    NEAR,
    TIED,
    assert_greedy,
    drafted_nothing,
    honesty_z,
    sampled_rows,
)

if TYPE_CHECKING:
    from tests.medusa_ppo.engines.conftest import Actor


PLAN = LaunchPlan({}, (), 0, {}, 0, 0)


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"


@eager_on_a_gpu
@pytest.mark.engine
@pytest.mark.slow
def test_server_end_to_end(
    actor: Actor,
    engine_config: EngineConfig,
    serving: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = engine_config.model_copy(update={"backend": "server"})
    # As vLLM leaves it in a process that had an engine of its own: with a second OpenMP beside it,
    # its server does not start.
    monkeypatch.setenv(
        "LD_PRELOAD", str(next((Path(torch.__file__).parent / "lib").glob("libgomp*")))
    )
    with make_engine(actor.path, actor.heads_path, config, seed=0) as engine:
        assert isinstance(engine, ServerEngine)
        pid = engine._process.pid
        report = engine.plugin_report()
        assert report["drafter"] == "MedusaProposer"
        greedy = Sampling(0.0, max_new_tokens=32, ignore_eos=True)
        first = engine.generate(actor.prompts[:16], greedy)
        assert first.counters.drafts > 0
        engine.configure(num_drafts=0)
        plain = engine.generate(actor.prompts[:16], greedy)
        answers = ([r.token_ids for r in found.responses] for found in (plain, first))
        assert_greedy(actor.model, actor.prompts, *answers, TIED[serving])
        assert drafted_nothing(plain, serving)
        engine.configure(num_drafts=4)
        sampling = Sampling(0.7, max_new_tokens=32, ignore_eos=True, seed=3, responses_per_prompt=2)
        rollouts = engine.generate(actor.prompts[:32], sampling)
        logits_MV, ids_M = sampled_rows(actor.model, rollouts)
        assert abs(honesty_z(logits_MV, ids_M, sampling)) < 3
        expected_M = (logits_MV / 0.7).log_softmax(-1).gather(1, ids_M[:, None])[:, 0]
        seen_M = torch.tensor([v for r in rollouts.responses for v in r.logprobs])
        assert float((expected_M - seen_M).abs().max()) < NEAR[serving]
        heads = actor.random_heads(seed=2)
        save_state(tmp_path / "heads.safetensors", heads.trainable_state())
        assert engine.swap_heads(tmp_path / "heads.safetensors", 1).checksum == checksum(
            heads.trainable_state()
        )
        hidden_BD = torch.randn(3, actor.lm_head_VD.shape[1])
        features_BKD = heads.features(hidden_BD)
        assert (
            engine.probe(hidden_BD.tolist(), [0] * 3)
            == (features_BKD @ actor.lm_head_VD.T).argmax(-1).tolist()
        )
        moved = {name: value * 1.05 for name, value in actor.model.state_dict().items()}
        save_state(tmp_path / "actor.safetensors", moved)
        assert (
            engine.sync_actor(tmp_path / "actor.safetensors", 1).checksum
            == engine.checksums()["actor"]
            == checksum(moved)
        )
        assert engine.generate(actor.prompts[:16], greedy).responses != first.responses
        (tmp_path / "bad.safetensors").write_text("nothing")
        with pytest.raises(SwapError):
            engine.swap_heads(tmp_path / "bad.safetensors", 2)
        address = config.model_copy(update={"backend": str(engine._client.base_url)})
        for path in (
            "/collective_rpc",
            "/pause",
            "/update_weights",
            "/v1/completions",
            "/sleep",
        ):  # Nobody asks without the token.
            assert httpx.post(f"{engine._client.base_url}{path}", json={}).status_code == 401, path
        monkeypatch.delenv("MEDUSA_PPO_TOKEN", raising=False)
        with pytest.raises(EngineError, match="MEDUSA_PPO_TOKEN"):
            ServerEngine(actor.path, actor.heads_path, address)
        monkeypatch.setenv(
            "MEDUSA_PPO_TOKEN", engine._client.headers["Authorization"].removeprefix("Bearer ")
        )
        attached = ServerEngine(actor.path, actor.heads_path, address)
        assert attached.generate(actor.prompts[:2], greedy).counters.drafts > 0
        long = Sampling(0.0, max_new_tokens=300, ignore_eos=True)
        undisturbed = attached.generate(actor.prompts[:16], long)
        with ThreadPoolExecutor(1) as thread:
            running = thread.submit(attached.generate, actor.prompts[:16], long)
            version = 1
            while not running.done():
                version += 1
                engine.swap_heads(tmp_path / "heads.safetensors", version)
                engine.sync_actor(tmp_path / "actor.safetensors", version)
            assert version > 3, "swaps and syncs happened in flight"
            found = (running.result(), undisturbed)
            answers = ([r.token_ids for r in rollouts.responses] for rollouts in found)
            synced = copy.deepcopy(actor.model)
            synced.load_state_dict(moved)
            assert_greedy(synced, actor.prompts, *answers, TIED[serving])
            assert running.result().counters.accepted > 0
        attached.close()
        assert not gone(pid)
    assert gone(pid)


@cpu_alone
@pytest.mark.engine
def test_a_server_that_cannot_start_shows_its_log(
    actor: Actor, engine_config: EngineConfig
) -> None:
    config = engine_config.model_copy(
        update={"backend": "server", "extra": {"no_such_engine_option": 1}}
    )
    with pytest.raises(EngineError, match="no-such-engine-option"):
        make_engine(actor.path, None, config)


def test_each_server_sees_its_own_gpus_and_not_the_loops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names of GPUs are made up, since no test machine has any; the processes are real, and say
    what they see in the place of serving.
    """
    model = tmp_path / "model"
    model.mkdir()
    sizes = {"model_type": "llama", "hidden_size": 8, "vocab_size": 16, "eos_token_id": 3}
    (model / "config.json").write_text(json.dumps(sizes))
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "sees $CUDA_VISIBLE_DEVICES"; exit 1\n')
    python.chmod(0o700)
    monkeypatch.setattr(http_server.sys, "executable", str(python))
    monkeypatch.setattr(ray_engine, "visible_gpus", lambda: ("0", "3", "5"))
    section = EngineConfig(backend="server", replicas=2, max_model_len=64, dtype="float32")
    started: list[str] = []

    class Noted(ServerEngine):
        def _wait_until_healthy(self, *, started_here: bool, closing: threading.Event) -> None:
            try:
                super()._wait_until_healthy(started_here=started_here, closing=closing)
            except EngineError as error:
                started.append(str(error))
                raise

    monkeypatch.setattr(ray_engine, "ServerEngine", Noted)
    with pytest.raises(EngineError, match="sees"):
        make_engine(model, None, section)
    assert sorted(said[said.index("sees") :][:6] for said in started) == ["sees 3", "sees 5"]
    started.clear()
    with pytest.raises(EngineError, match="sees 3"):
        make_engine(model, None, section.model_copy(update={"replicas": 1}))
    assert len(started) == 1


def test_a_server_that_is_started_learns_who_starts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    sizes = {"model_type": "llama", "hidden_size": 8, "vocab_size": 16, "eos_token_id": 3}
    (model / "config.json").write_text(json.dumps(sizes))
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "told $MEDUSA_PPO_PARENT, is below $PPID."; exit 1\n')
    python.chmod(0o700)
    monkeypatch.setattr(http_server.sys, "executable", str(python))
    with pytest.raises(EngineError, match=f"told {os.getpid()}, is below {os.getpid()}\\."):
        ServerEngine(model, None, EngineConfig(backend="server", max_model_len=64, dtype="float32"))


SERVER = """#!{python}
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

# As vLLM: it binds the port that it is given.
class Server(HTTPServer):
    allow_reuse_address = False

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({{"data": [{{"id": "model"}}]}}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

port = int(sys.argv[sys.argv.index("--port") + 1])
with open({ports!r}, "a") as ports:
    ports.write(f"{{port}}\\n")
Server(("127.0.0.1", port), Handler).serve_forever()
"""
"""A program in the place of vLLM's server."""


@pytest.mark.parametrize("taken", [1, 2])
def test_a_port_that_was_taken_meanwhile_is_replaced_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: int
) -> None:
    """Between the choice of a port and the server's bind there are seconds."""
    python, ports = tmp_path / "python", tmp_path / "ports"
    python.write_text(SERVER.format(python=sys.executable, ports=str(ports)))
    python.chmod(0o700)
    monkeypatch.setattr(http_server.sys, "executable", str(python))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(http_server, "plan_launch", lambda *_: PLAN)
    monkeypatch.setattr(ServerEngine, "_take_stock", lambda *_, **__: None)
    others = [socket.socket() for _ in range(taken)]
    for other in others:
        other.bind(("127.0.0.1", 0))
    numbers = [other.getsockname()[1] for other in others]
    given = numbers.copy()
    free = http_server.free_port
    monkeypatch.setattr(http_server, "free_port", lambda: given.pop(0) if given else free())
    config = EngineConfig(backend="server", max_num_seqs=1, max_model_len=8, dtype="float32")
    with contextlib.ExitStack() as stack:
        for other in others:
            stack.enter_context(other)
        if taken == 1:
            with ServerEngine("model", None, config) as engine:
                tried = [int(line) for line in ports.read_text().split()]
                assert tried[0] == numbers[0] and len(tried) == 2
                assert engine._client.base_url.port == tried[1]
                process = engine._process
            assert process is not None and process.poll() is not None
        else:
            with pytest.raises(EngineError, match="ended while starting") as caught:
                ServerEngine("model", None, config)
            assert "Address already in use" in str(caught.value)
            assert [int(line) for line in ports.read_text().split()] == numbers
    assert not list(tmp_path.glob("medusa-ppo-server-*")), "their logs are gone"


@pytest.fixture
def waiting(ask, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[Any, Any]]]:
    """waiting(metrics, after_s) -> an engine whose server answers prompts after so long, and
    `/metrics` with what `metrics` returns; and the process that stands for the server's own.
    """
    monkeypatch.setattr(http_server, "STILL_S", 0.5)
    monkeypatch.setattr(http_server, "WATCH_EVERY_S", 0.05)
    monkeypatch.setattr(http_server, "WATCH_WITHIN_S", 0.2)
    processes = list[subprocess.Popen[bytes]]()

    def build(metrics: Callable[[], str | None], after_s: float, own: bool = True):
        process = subprocess.Popen(["sleep", "600"], start_new_session=True)
        processes.append(process)

        def behave(connection: socket.socket, request: bytes) -> None:
            if b"/metrics" in request:
                text = metrics()
                if text is not None:
                    connection.sendall(answer(text.encode()))
                return
            began = time.monotonic()
            while time.monotonic() - began < after_s:
                # With its process the server's connections are gone.
                if process.poll() is not None:
                    connection.close()
                    return
                time.sleep(0.02)
            connection.sendall(answer(COMPLETION))

        engine, _ = ask(behave)
        monkeypatch.setattr(http_server, "CALL_TIMEOUT_S", 60.0)
        engine._process = process if own else None
        return engine, process

    yield build
    for process in processes:
        process.kill()
        process.wait()


STILL = 'process_cpu_seconds_total {now}\nvllm:generation_tokens_total{{engine="0"}} 7.0\n'


@pytest.mark.parametrize("silent", [False, True])
def test_a_server_of_ours_whose_engine_makes_no_step_is_ended(waiting, silent: bool) -> None:
    """Requests of thousands of tokens have hours, so a hung engine was noticed after days."""
    engine, process = waiting(
        lambda: None if silent else STILL.format(now=time.monotonic()), after_s=60.0
    )
    with pytest.raises(EngineError, match="hung, and was ended"):
        engine.generate([[1, 2]] * 3, Sampling(max_new_tokens=2))
    assert process.poll() == -signal.SIGKILL
    engine.close()


@pytest.mark.parametrize(
    "metrics",
    [
        lambda: f"vllm:generation_tokens_total {time.monotonic()}",
        # Its tokens stand still while prompts are read or requests are preempted.
        lambda: f"vllm:generation_tokens_total 7\nvllm:num_preemptions_total {time.monotonic()}",
        lambda: "process_cpu_seconds_total 7",  # Statistics are off.
    ],
    ids=["writes", "preempts", "unknown"],
)
def test_a_slow_server_is_waited_for(waiting, metrics: Callable[[], str]) -> None:
    engine, process = waiting(metrics, after_s=1.5)
    rollouts = engine.generate([[1, 2]] * 3, Sampling(max_new_tokens=2))
    assert len(rollouts.responses) == 3 and process.poll() is None
    engine.close()


def test_a_server_of_others_is_not_ended(waiting, caplog: pytest.LogCaptureFixture) -> None:
    engine, process = waiting(lambda: STILL.format(now=0), after_s=1.5, own=False)
    with caplog.at_level("WARNING"):
        rollouts = engine.generate([[1, 2]] * 3, Sampling(max_new_tokens=2))
    assert len(rollouts.responses) == 3 and process.poll() is None
    assert caplog.text.count("has made no engine step") == 1
    engine.close()


def test_the_first_exception_of_a_log_is_shown_above_its_end() -> None:
    core = (
        "(EngineCore pid=7) ERROR [core.py:1165] ValueError: To serve at least one request, 2.0 GiB"
        " KV cache is needed"
    )
    end = (
        "(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above."
        " Failed core proc(s): {}"
    )
    frames = ["(APIServer pid=1)     self.engine_core = make_client()"] * 40
    shown = last_words("\n".join(["INFO: 0 errors so far", core, *frames, end])).splitlines()
    assert shown[:2] == [core, "..."] and shown[-1] == end and len(shown) < 30
    assert (
        last_words("\n".join(["INFO", core])).splitlines() == ["INFO", core]
        and last_words("") == ""
    )
    core = "(EngineCore pid=7) ERROR [core.py:1510] AssertionError"
    assert last_words("\n".join([core, *frames, end])).startswith(core)


@cpu_alone
def test_nobody_at_the_url(
    actor: Actor, engine_config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    from medusa_ppo.engines import http_server as server

    monkeypatch.setattr(server, "START_TIMEOUT_S", 1.0)
    monkeypatch.setattr(server, "ATTACH_TIMEOUT_S", 0.6)
    config = engine_config.model_copy(update={"backend": f"http://127.0.0.1:{server.free_port()}"})
    with pytest.raises(EngineError, match="No vLLM server answers"):
        make_engine(actor.path, None, config)


# ---- a server that answers late, wrongly, twice or not at all


COMPLETION = {
    "choices": [
        {
            "token_ids": [3, 4],
            "logprobs": {"token_logprobs": [-0.5, -0.1]},
            "finish_reason": "length",
        }
    ]
}


class Strange:
    """A server of one listening socket. `behave` gets each connection after its request was
    read.
    """

    def __init__(
        self, behave: Callable[[socket.socket, bytes], None], host: str = "127.0.0.1"
    ) -> None:
        self.requests: list[bytes] = []
        self._behave = behave
        self._open = threading.Event()
        self._socket = socket.create_server((host, 0))
        self.address = f"http://{host}:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._talk, args=(connection,), daemon=True).start()

    def _talk(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            while request := connection.recv(1 << 16):
                self.requests.append(request)
                self._behave(connection, request)

    def close(self) -> None:
        self._socket.shutdown(
            socket.SHUT_RDWR
        )  # Else the thread waits on, and if it is interrupted for whoever has the number then.
        self._socket.close()


def answer(body: object, status: str = "200 OK", length: int | None = None) -> bytes:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return (
        f"HTTP/1.1 {status}\r\nContent-Length: {length or len(content)}\r\n\r\n".encode() + content
    )


def silent(connection: socket.socket, request: bytes) -> None:
    time.sleep(30.0)


def gone_at_once(connection: socket.socket, request: bytes) -> None:
    connection.close()


def drip(connection: socket.socket, request: bytes) -> None:
    connection.sendall(answer(b"", length=10_000_000))
    while True:
        connection.sendall(b"x")
        time.sleep(0.05)


def endless(connection: socket.socket, request: bytes) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        connection.sendall(b"x" * 65536)


def half(connection: socket.socket, request: bytes) -> None:
    connection.sendall(answer(COMPLETION, length=10_000))
    connection.close()


@pytest.fixture
def ask(
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Callable[..., tuple[ServerEngine, Strange]]]:
    """An engine attached to a strange server; patience of half a second."""
    monkeypatch.setattr(http_server, "CALL_TIMEOUT_S", 0.5)
    monkeypatch.setattr(http_server, "TOKEN_S", 0.0)
    monkeypatch.setattr(http_server, "MOST_ANSWER_BYTES", 1 << 20)
    servers: list[Strange] = []

    def build(
        behave: Callable[[socket.socket, bytes], None], host: str = "127.0.0.1"
    ) -> tuple[ServerEngine, Strange]:
        servers.append(server := Strange(behave, host))
        engine = ServerEngine.__new__(ServerEngine)
        engine.plan = replace(PLAN, max_model_len=64, vocab_size=16, stop_ids=(0,))
        engine.max_drafts = 0
        engine._workers = 4
        engine._process = None
        engine._log = Path(os.devnull)
        engine._model_name = "model"
        engine._client = http_server.Client(
            base_url=server.address,
            limits=http_server.LIMITS,
            timeout=http_server.CALL_TIMEOUT_S,
        )
        return engine, server

    yield build
    for server in servers:
        server.close()


@pytest.mark.parametrize(
    "behave",
    [lambda c, r: None, drip, endless, half, lambda c, r: c.close()],
    ids=["silent", "drip", "endless", "half", "gone"],
)
def test_an_answer_that_does_not_come_is_an_error_in_time(ask, behave) -> None:
    engine, _ = ask(behave)
    began = time.monotonic()
    with pytest.raises(EngineError, match="can't be reached"):
        engine.generate([[1, 2]] * 8, Sampling(max_new_tokens=4))
    assert time.monotonic() - began < 60.0
    engine.close()


@pytest.mark.parametrize(
    "body",
    [
        b"<html>hello</html>",
        b"",
        b"[" * 100_000,
        {"choices": []},
        {"choices": [{**COMPLETION["choices"][0], "token_ids": [3]}]},
        {"choices": [{**COMPLETION["choices"][0], "token_ids": [3, 99]}]},
        {
            "choices": [
                {
                    **COMPLETION["choices"][0],
                    "token_ids": [1] * 9,
                    "logprobs": {"token_logprobs": [0.0] * 9},
                }
            ]
        },
        (
            b'{"choices": [{"token_ids": [3], "logprobs": {"token_logprobs": [NaN]},'
            b' "finish_reason": "stop"}]}'
        ),
    ],
)
def test_a_wrong_answer_is_an_error(ask, body: object) -> None:
    engine, _ = ask(lambda connection, request: connection.sendall(answer(body)))
    with pytest.raises(EngineError):
        engine.generate([[1, 2]], Sampling(max_new_tokens=4))
    engine.close()


def test_a_servers_own_penalties_do_not_touch_the_rollouts(ask) -> None:
    protocol = pytest.importorskip("vllm.entrypoints.openai.completion.protocol")
    engine, _ = ask(lambda connection, request: None)
    asked = []

    def complete(request: httpx.Request) -> httpx.Response:
        asked.append(json.loads(request.content))
        return httpx.Response(200, json=COMPLETION)

    engine._client = http_server.Client(
        base_url="http://x", transport=httpx.MockTransport(complete)
    )
    engine.generate([[1, 2]], Sampling(0.7, top_p=0.9, top_k=5, max_new_tokens=4))
    engine.close()
    request = protocol.CompletionRequest(**asked[0])
    # What vLLM's server fills in from such a generation_config.json, if a request leaves it out.
    own = {"repetition_penalty": 1.05, "presence_penalty": 0.5, "frequency_penalty": 0.5}
    own |= {"temperature": 0.6, "top_p": 0.8, "top_k": 20, "min_p": 0.05}
    params = request.to_sampling_params(4, own)
    assert {name: getattr(params, name) for name in own} == {
        **{"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
        **{"temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.0},
    }


@pytest.mark.parametrize("reason", ["abort", "repetition", None])
def test_a_response_that_the_server_broke_off_is_not_learned_from(ask, reason) -> None:
    body = {"choices": [{**COMPLETION["choices"][0], "finish_reason": reason}]}
    engine, _ = ask(lambda connection, request: connection.sendall(answer(body)))
    with pytest.raises(EngineError, match=f"finish_reason {reason}"):
        engine.generate([[1, 2]], Sampling(max_new_tokens=4))
    engine.close()


def test_what_a_server_says_twice_is_no_answer_to_the_next_question(ask) -> None:
    other = json.loads(json.dumps(COMPLETION).replace("3, 4", "5, 6"))
    engine, server = ask(
        lambda connection, request: connection.sendall(answer(COMPLETION) + answer(other))
    )
    for _ in range(3):
        rollouts = engine.generate([[1, 2]], Sampling(max_new_tokens=4))
        assert [r.token_ids for r in rollouts.responses] == [(3, 4)]
    assert len(server.requests) >= 3
    engine.close()


@pytest.mark.parametrize(
    "behave", [lambda c, r: c.sendall(answer({}, "503 No")), endless], ids=["503", "endless"]
)
def test_a_server_that_is_not_healthy_is_asked_a_few_times_a_second(
    ask, behave, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "ATTACH_TIMEOUT_S", 0.6)
    engine, server = ask(behave)
    with pytest.raises(EngineError, match="No vLLM server answers"):
        engine._wait_until_healthy(started_here=False, closing=threading.Event())
    assert 1 <= len(server.requests) <= 4
    engine.close()


class Writing:
    """What a server does that writes for long: it counts who asks, and who goes."""

    def __init__(self) -> None:
        self.asked = threading.Semaphore(0)
        self.gone = threading.Semaphore(0)

    def __call__(self, connection: socket.socket, request: bytes) -> None:
        self.asked.release()
        connection.settimeout(20.0)
        while connection.recv(1 << 16):  # The request's body may come by itself.
            pass
        self.gone.release()

    def until(self, counted: threading.Semaphore, count: int) -> None:
        assert all(counted.acquire(timeout=60) for _ in range(count))


def test_a_closed_engine_ends_its_requests(ask, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C closes it in the main thread; threads that wait for answers would hold up the end of
    the run, and the server would write on.
    """
    monkeypatch.setattr(http_server, "CALL_TIMEOUT_S", 600.0)
    engine, _ = ask(writing := Writing())
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(engine.generate, [[1, 2]] * 8, Sampling(max_new_tokens=4))
        writing.until(writing.asked, engine._workers)
        engine.close()
        writing.until(writing.gone, engine._workers)
        with pytest.raises(EngineError, match="can't be reached"):
            call.result(60)
    with pytest.raises(EngineError, match="the engine is closed"):
        engine.plugin_report()


class Shared:
    """A server that others use, too. It answers at once, but for the requests for `held`, which it
    keeps until their client goes; `ends` says what it does with those to resume.
    """

    def __init__(
        self, held: bytes, ends: Callable[[socket.socket, bytes], None] | None = None
    ) -> None:
        self.holding = Writing()
        self._held = held
        self._ends = ends

    def __call__(self, connection: socket.socket, request: bytes) -> None:
        if request.split(b" ")[1].startswith(self._held):
            self.holding(connection, request)
        elif self._ends and request.startswith(b"POST /resume"):
            self._ends(connection, request)
        else:
            head, _, body = request.partition(b"\r\n\r\n")
            length = next(
                (int(line.split()[1]) for line in head.lower().splitlines() if b"-length:" in line),
                0,
            )
            while len(body) < length:  # The request's body may come by itself.
                body += connection.recv(1 << 16)
            connection.sendall(answer({"path": "/there"}))

    def breaks_off(
        self, engine: ServerEngine, method: str, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Close the engine while it waits for the held answer. The thread that waits wakes before
        httpx counts its client as closed.
        """
        whole = httpx.Client.close
        save_state(path, {"x": torch.ones(3)})
        with ThreadPoolExecutor(1) as threads:
            call = threads.submit(getattr(engine, method), path, 1)

            def late(client: httpx.Client) -> None:
                wait([call], 60)
                whole(client)

            monkeypatch.setattr(httpx.Client, "close", late)
            self.holding.until(self.holding.asked, 1)
            engine.close()
            with pytest.raises(EngineError):
                call.result(60)


def asked_of(server: Strange) -> list[str]:
    lines = [request.split(b" ") for request in server.requests]
    return [f"{verb.decode()} {path.partition(b'?')[0].decode()}" for verb, path, *_ in lines]


@pytest.mark.parametrize("held", ["/pause", "/collective_rpc"])
def test_a_server_does_not_stay_paused_when_a_sync_is_broken_off(
    ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: str
) -> None:
    """Others may use it, and it pauses also if nobody waits for that."""
    monkeypatch.setattr(http_server, "CALL_TIMEOUT_S", 600.0)
    engine, server = ask(shared := Shared(held.encode()))
    shared.breaks_off(engine, "sync_actor", tmp_path / "actor", monkeypatch)
    begun = ["POST /pause"] if held == "/pause" else ["POST /pause", "POST /collective_rpc"]
    assert asked_of(server) == [*begun, "POST /resume"]


@pytest.mark.parametrize("method", ["swap_heads", "sync_actor"])
def test_a_server_does_not_keep_the_file_of_a_call_that_is_broken_off(
    ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr(http_server, "CALL_TIMEOUT_S", 600.0)
    engine, server = ask(shared := Shared(b"/collective_rpc"), host="127.0.0.2")
    shared.breaks_off(engine, method, tmp_path / "state", monkeypatch)
    route = http_server.STATE_ROUTE
    expected = [f"PUT {route}", "POST /collective_rpc", f"DELETE {route}"]
    if method == "sync_actor":
        expected = ["POST /pause", *expected, "POST /resume"]
    assert asked_of(server) == expected


@pytest.mark.parametrize(("status", "kind"), [(413, NoRoomError), (500, SwapError)])
def test_a_node_without_room_is_told_from_a_server_that_refuses(
    ask, tmp_path: Path, status: int, kind: type[SwapError]
) -> None:
    """A start helps only one of them."""
    engine, _ = ask(silent)
    transport = httpx.MockTransport(lambda request: httpx.Response(status))
    engine._client = http_server.Client(base_url="http://node", transport=transport)
    save_state(tmp_path / "heads", {"x": torch.ones(3)})
    with pytest.raises(SwapError, match=str(status)) as caught:
        engine.swap_heads(tmp_path / "heads", 1)
    assert caught.type is kind
    engine.close()


@pytest.mark.parametrize(
    ("ends", "warns"),
    [
        (Writing(), False),
        (gone_at_once, True),
        (lambda c, r: c.sendall(answer({}, "500 No")), True),
    ],
    ids=["busy", "gone", "refuses"],
)
def test_a_closed_engine_does_not_wait_for_a_server_that_loads_an_actor(
    ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog, ends, warns: bool
) -> None:
    """It resumes when it has loaded it, whoever waits for that."""
    monkeypatch.setattr(http_server, "CALL_TIMEOUT_S", 600.0)
    monkeypatch.setattr(http_server, "AFTER_CLOSE_S", 0.2)
    engine, server = ask(shared := Shared(b"/collective_rpc", ends))
    shared.breaks_off(engine, "sync_actor", tmp_path / "actor", monkeypatch)
    assert asked_of(server)[-1] == "POST /resume"
    assert ("may still be paused" in caplog.text) == warns


def test_a_server_of_ours_that_is_being_ended_is_not_said_to_be_paused(
    ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(http_server, "CALL_TIMEOUT_S", 600.0)

    def serves(connection: socket.socket, request: bytes) -> None:
        if request.startswith(b"GET"):
            connection.sendall(answer({"data": [{"id": "model"}]}))
        else:
            shared(connection, request)

    _, server = ask(serves)
    shared = Shared(b"/collective_rpc")
    monkeypatch.setattr(http_server, "plan_launch", lambda *_: PLAN)
    monkeypatch.setattr(ServerEngine, "_start", lambda engine, config, token: server.address)
    monkeypatch.setattr(ServerEngine, "_take_stock", lambda *_, **__: None)
    engine = ServerEngine("model", None, EngineConfig(backend="server", max_num_seqs=1))
    shared.breaks_off(engine, "sync_actor", tmp_path / "actor", monkeypatch)
    assert asked_of(server)[-1] == "POST /collective_rpc" and not caplog.text


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Python hears SIGINT also where a shell started the tests in its background and ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_ends_the_requests_of_an_engine_without_a_pool(
    ask, ctrl_c: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "CALL_TIMEOUT_S", 600.0)
    engine, _ = ask(writing := Writing())

    def interrupt() -> None:
        writing.until(writing.asked, engine._workers)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        engine.generate([[1, 2]] * 8, Sampling(max_new_tokens=4))
    thread.join()
    writing.until(writing.gone, engine._workers)
    engine.close()


@pytest.mark.parametrize("ours", [False, True])
def test_an_interrupt_in_a_sync_does_not_wait_for_the_actor_without_a_pool(
    ask, ctrl_c: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ours: bool
) -> None:
    """The server resumes when it has loaded it, whoever waits for that; and it does so too where
    the loop goes on with its own server.
    """
    monkeypatch.setattr(http_server, "CALL_TIMEOUT_S", 20.0)
    monkeypatch.setattr(http_server, "AFTER_CLOSE_S", 0.2)
    engine, server = ask(shared := Shared(b"/collective_rpc", Writing()))
    if ours:
        engine._started_here = True
        engine._client = http_server.Client(base_url="", timeout=20.0, limits=http_server.LIMITS)
        engine._client.base_url = server.address  # It is known once the server is started.
    save_state(tmp_path / "actor", {"x": torch.ones(3)})

    def interrupt() -> None:
        shared.holding.until(shared.holding.asked, 1)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        engine.sync_actor(tmp_path / "actor", 1)
    thread.join()
    assert asked_of(server) == ["POST /pause", "POST /collective_rpc", "POST /resume"]
    engine.close()


def test_a_server_gets_time_to_read_its_weights(ask, monkeypatch: pytest.MonkeyPatch) -> None:
    """A 70B from a file server that many engines read at once was never there in ten minutes."""
    monkeypatch.setattr(http_server, "START_TIMEOUT_S", 0.0)
    answers = [answer({}), *[answer({}, "503 No")] * 3]
    engine, _ = ask(lambda connection, request: connection.sendall(answers.pop()))
    with pytest.raises(EngineError, match="within 0 s"):
        engine._wait_until_healthy(started_here=True, closing=threading.Event())
    engine.plan = replace(engine.plan, load_s=60.0)
    engine._wait_until_healthy(started_here=True, closing=threading.Event())
    engine.close()


def test_a_start_that_nobody_wants_any_more_ends(ask, monkeypatch: pytest.MonkeyPatch) -> None:
    closing = threading.Event()

    def starts(connection: socket.socket, request: bytes) -> None:
        closing.set()
        connection.sendall(answer({}, "503 No"))

    monkeypatch.setattr(http_server, "START_TIMEOUT_S", 20.0)
    engine, _ = ask(starts)
    with pytest.raises(EngineError, match="not wanted any more"):
        engine._wait_until_healthy(started_here=True, closing=closing)
    engine.close()


@pytest.mark.parametrize(
    ("status", "says"),
    [("599 Odd", "599"), ("401 No", "MEDUSA_PPO_TOKEN"), ("404 No", "VLLM_SERVER_DEV_MODE")],
)
def test_a_refusal_says_what_to_do(ask, status: str, says: str) -> None:
    engine, _ = ask(lambda connection, request: connection.sendall(answer({}, status)))
    with pytest.raises(EngineError, match=says):
        engine.plugin_report()
    engine.close()


def test_a_server_that_was_started_here_is_asked_without_the_proxy_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = Strange(
        lambda connection, request: connection.sendall(answer({"data": [{"id": "model"}]}))
    )
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{http_server.free_port()}")
    monkeypatch.setattr(http_server, "plan_launch", lambda *_: PLAN)
    monkeypatch.setattr(ServerEngine, "_start", lambda engine, config, token: server.address)
    monkeypatch.setattr(ServerEngine, "_take_stock", lambda *_, **__: None)
    monkeypatch.setattr(http_server, "ATTACH_TIMEOUT_S", 1.0)
    monkeypatch.setattr(http_server, "START_TIMEOUT_S", 1.0)
    engine = ServerEngine("model", None, EngineConfig(backend="server", max_num_seqs=1))
    assert engine._model_name == "model" and b"Bearer" in server.requests[0]
    engine.close()
    server.close()


class ServerWorkers(httpx.MockTransport):
    """A server's worker, as far as it is asked here; `process` says which one it is, and without
    `max_drafts` it has no heads.
    """

    def __init__(self) -> None:
        super().__init__(self._answer)
        self.process = "first"
        self.max_drafts = 2
        self.feeds_itself = False
        self.actor = ""
        self.actor_version = 0
        self.calls = list[str]()

    def _answer(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/metrics":
            return httpx.Response(200, content=b"")
        if request.url.path != "/collective_rpc":
            return httpx.Response(200)
        asked = json.loads(request.content)
        self.calls.append(asked["method"])
        if asked["method"] == "medusa_sync_actor":
            path, self.actor_version, _ = asked["args"]
            self.actor = checksum(load_state(path))
            receipt = {"version": self.actor_version, "checksum": self.actor, "seconds": 0.0}
            return httpx.Response(200, json={"results": [receipt]})
        if asked["method"] == "medusa_feed_version" and not self.max_drafts:
            fault = {"kind": "SwapError", "problem": "The engine runs without draft heads."}
            return httpx.Response(200, json={"results": [{"error": fault}]})
        facts = {
            "kind": "medusa" if self.max_drafts else "",
            "drafter": "x",
            "max_drafts": self.max_drafts,
            "feeds_itself": self.feeds_itself,
            "version": 3,
            "heads": "",
            "heads_version": 0,
            "actor": self.actor,
        }
        return httpx.Response(
            200,
            json={
                "results": [facts | {"actor_version": self.actor_version, "process": self.process}]
            },
        )


def test_a_server_that_was_started_again_is_told_how_to_draft_and_waits_for_heads(ask) -> None:
    engine, _ = ask(silent)
    engine._client = http_server.Client(
        base_url="http://me:pw@server", transport=(workers := ServerWorkers())
    )
    engine._take_stock({"sampled": True})
    engine.configure(num_drafts=1)
    engine.heads_version = engine.policy_version = workers.actor_version = 5
    workers.calls.clear()
    engine.counters()
    assert workers.calls == ["medusa_checksums"] and engine.heads_version == 5

    # It has the actor of its folder.
    workers.process = "second"
    workers.actor_version = 0
    for _ in range(2):
        with pytest.raises(EngineError, match="a different actor") as caught:
            engine.counters()
    assert "pw" not in str(caught.value) and engine.heads_version == 5
    workers.actor_version = 5  # A sync has come.
    workers.calls.clear()
    engine.counters()
    assert (
        workers.calls == ["medusa_checksums", "medusa_configure"]
        and engine.heads_version == -1
        and engine.num_drafts == 1
    )
    engine.close()


def test_a_server_that_was_started_again_does_not_pass_for_one_with_a_runs_first_actor(
    ask, tmp_path: Path
) -> None:
    """A run's first actor is version 0, and so is that of a server which was never synced."""
    engine, _ = ask(silent)
    engine._client = http_server.Client(
        base_url="http://127.0.0.1", transport=(workers := ServerWorkers())
    )
    engine._take_stock({})
    save_state(tmp_path / "actor", {"w": torch.ones(2)})
    engine.sync_actor(tmp_path / "actor", 0)
    engine.counters()

    synced = workers.actor
    workers.process, workers.actor = "second", ""
    for _ in range(2):
        with pytest.raises(EngineError, match="a different actor") as caught:
            engine.counters()
    assert synced[:16] in str(caught.value)
    workers.actor = synced  # Another client of the same run has synced it.
    engine.counters()
    assert engine.heads_version == -1

    # Weights that a loop has loaded by its own means have no checksum.
    engine.target_changed(7)
    workers.process, workers.actor, workers.actor_version = "third", "", 7
    engine.counters()
    engine.close()


@pytest.mark.parametrize(("max_drafts", "version"), [(2, 3), (0, 0)])
def test_an_engine_without_heads_is_not_asked_what_a_feed_gave_it(
    ask, max_drafts: int, version: int
) -> None:
    """A feed's address is in the environment of all engines, and reaches those without heads."""
    engine, _ = ask(silent)
    engine._client = http_server.Client(
        base_url="http://server", transport=(workers := ServerWorkers())
    )
    workers.max_drafts, workers.feeds_itself = max_drafts, True
    engine._take_stock({}, needs_heads=False)
    rollouts = engine._answered([[1]], Sampling(), lambda: [])
    assert rollouts.heads_version == version
    assert ("medusa_feed_version" in workers.calls) == bool(max_drafts)
    engine.close()


def test_an_error_tells_the_address_without_its_password(ask) -> None:
    engine, server = ask(lambda c, r: c.close())
    engine._client = http_server.Client(
        base_url=server.address.replace("//", "//me:pw@"), limits=http_server.LIMITS
    )
    with pytest.raises(EngineError, match=server.address.partition("//")[2]) as caught:
        engine.plugin_report()
    assert "pw" not in str(caught.value)
    engine.close()


def test_a_closed_engine_removes_its_log_and_no_device(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "device")  # As a device is, no regular file.
    (tmp_path / "log").touch()
    for name, left in (("device", True), ("log", False)):
        engine = ServerEngine.__new__(ServerEngine)
        engine._client = http_server.Client()
        engine._log = tmp_path / name
        engine._process = subprocess.Popen(["sleep", "60"], start_new_session=True)
        engine.close()
        assert (tmp_path / name).exists() == left
