"""vLLM as an HTTP server: started here, or attached to, on this node or another one. Swaps go
through the same worker extension.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import logging
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self, Unpack

import httpx
import torch
from prometheus_client.parser import text_string_to_metric_families

from heads.errors import EngineError, NoRoomError, SwapError
from medusa_ppo.config.engine_section import EngineConfig
from medusa_ppo.contract.rollouts import Counters, Response, Rollouts, Sampling
from medusa_ppo.contract.status import Checked, SwapReceipt
from medusa_ppo.engines import rollout_engine as base
from medusa_ppo.engines.gpu_room import require_room
from medusa_ppo.engines.launch import (
    HOST,
    PARENT,
    plan_launch,
    process_environment,
    server_arguments,
)
from medusa_ppo.engines.pieces import Finished, request_seed
from medusa_ppo.engines.rollout_engine import COUNTER, Found
from medusa_ppo.runtime.control_guard import LOOPBACK, TOKEN, token_header
from medusa_ppo.runtime.state_receiver import STATE_ROUTE
from medusa_ppo.vllm_plugin.worker_calls import Drafting, first_of

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 600.0
"""Without the time to read the weights (`LaunchPlan.load_s`)."""
ATTACH_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 20.0
LOOK_EVERY_S = 0.25
LOG_TAIL_LINES = 25
PORT_TAKEN = "address already in use"
RAISED = re.compile(r"\b\w*(Error|Exception|Interrupt)(: |$)")
CALL_TIMEOUT_S = 600.0
TOKEN_S = 1.0
"""An engine that takes longer than this per token of a sequence counts as hanging."""
STILL_S = 1800.0
"""An engine that makes no step for this long, while requests wait for it, hangs. On a CPU a step
with thousands of tokens of prompts takes minutes; all else that is slow makes steps.
"""
WATCH_EVERY_S, WATCH_WITHIN_S = 30.0, 10.0
OF_ENGINE = "vllm:"
"""Metrics that change with an engine's steps alone begin so."""
LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=0)
"""A new connection for each request: on a kept one, an answer sent twice would be taken for the
next request's.
"""
AFTER_CLOSE_S = 5.0
"""How long a closed engine, or one after Ctrl-C, waits for an answer. A server that loads an actor
answers when it has it, and does what it was asked for whether or not somebody waits.
"""
LEFT = {"/resume": "be paused", STATE_ROUTE: "have the file that was sent to it in /dev/shm"}
"""What a server is left with that is not asked for this."""
CHUNK_BYTES = 1 << 20
MOST_ANSWER_BYTES = 256 << 20
MOST_POSITIONS = 1024


class Client(httpx.Client):
    """A client whose requests end when it is closed, whichever threads wait for them: closing a
    socket wakes no thread that reads from it, and the server would go on writing for nobody.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._settings = settings
        self._sockets: set[socket.socket] = set()
        self._ends = False

    @contextlib.contextmanager
    def stream(self, method: str, url: httpx.URL | str, **kwargs: Any) -> Iterator[httpx.Response]:
        if self._ends:
            raise httpx.ConnectError("the engine is closed")
        own: set[socket.socket] = set()

        def note(event: str, given: dict[str, Any]) -> None:
            if event.endswith(("connect_tcp.complete", "start_tls.complete")):
                own.add(connected := given["return_value"].get_extra_info("socket"))
                self._sockets.add(connected)
                if self._ends:  # While it was connecting.
                    _shut_down(connected)

        try:
            with super().stream(method, url, extensions={"trace": note}, **kwargs) as response:
                yield response
        finally:
            self._sockets.difference_update(own)

    def break_off(self) -> None:
        """End all requests that are under way; their threads get httpx's error."""
        for connected in tuple(self._sockets):
            _shut_down(connected)

    @property
    def is_closed(self) -> bool:
        # httpx counts it as closed only later: threads that `close` wakes would still use it.
        return self._ends or super().is_closed

    def again(self) -> Self:
        """One like it, which is not closed."""
        # A server that is started here has its address only after its client is made.
        return type(self)(**self._settings | {"base_url": self.base_url})

    def close(self) -> None:
        self._ends = True
        self.break_off()
        super().close()


def _shut_down(connected: socket.socket) -> None:
    with contextlib.suppress(OSError):  # It has ended by itself.
        # Not the method of a TLS socket, which takes the session from the thread that reads.
        socket.socket.shutdown(connected, socket.SHUT_RDWR)


class ServerEngine(base.WorkerEngine):
    """An OpenAI-compatible vLLM server, asked with token ids."""

    _met = ""
    """The worker process that answered last; empty: none yet."""
    _actor_sum = ""
    """Checksum of the actor that was synced last; empty: none was, or a loop has loaded it by its
    own means.
    """
    _settings: Drafting
    """Its draft settings."""
    _started_here = False
    """Whether the server ends with this engine."""

    def __init__(
        self,
        model_path: str | Path,
        heads_path: str | Path | None,
        config: EngineConfig,
        seed: int = 0,
        *,
        devices: Sequence[str] = (),
        closing: threading.Event | None = None,
    ) -> None:
        """Start a server, or attach to the one at `config.backend`. Raises like `plan_launch`, and
        EngineError if there is no room for one (`gpu_room`), or none answers.

        Args:
            devices: the GPUs for a server started here, as CUDA_VISIBLE_DEVICES names them; none:
                those of this process.
            closing: set when nobody wants the server any more, which ends its start.
        """
        self._devices = tuple(devices)
        self.plan = plan_launch(model_path, heads_path, config, seed)
        self._process: subprocess.Popen[bytes] | None = None
        # There is no log if the server belongs to somebody else.
        self._log = Path(os.devnull)
        # On a shared node loopback is no protection, so a server started here answers only with our
        # token.
        token = None if config.addresses else secrets.token_urlsafe(32)
        self._started_here = not config.addresses
        self._client = Client(
            base_url="" if token else config.addresses[0],
            headers=token_header(token),
            timeout=CALL_TIMEOUT_S,
            limits=LIMITS,
            # Loopback needs no proxy from the environment, which would learn the token.
            trust_env=not token,
        )
        # Twice the engine's slots, so that requests wait in the server and slots never wait for
        # requests.
        self._workers = max(1, 2 * config.max_num_seqs)
        closing = closing or threading.Event()
        try:
            if token:
                self._start_up(config, token, closing)
            else:
                self._wait_until_healthy(started_here=False, closing=closing)
            self._model_name = self._json(
                "GET", "/v1/models", lambda body: str(body["data"][0]["id"])
            )
            self._take_stock(self.plan.drafting, needs_heads=bool(heads_path))
        except BaseException:
            self.close()
            raise

    # ---- the engine's methods

    def generate(self, prompts: base.Prompts, sampling: Sampling) -> Rollouts:
        return self.generate_as_finished(prompts, sampling, lambda place, response: None)

    def generate_as_finished(
        self, prompts: base.Prompts, sampling: Sampling, finished: Finished
    ) -> Rollouts:
        base.check_request(prompts, sampling, self.plan.max_model_len, self.plan.vocab_size)
        repeat = sampling.responses_per_prompt
        count = len(prompts) * repeat
        longest_s = patience_s(prompts, sampling, self._workers // 2)

        def complete(i: int) -> Response:
            response = self._complete(
                i // repeat,
                list(prompts[i // repeat]),
                request_seed(sampling, i),
                sampling,
                longest_s,
            )
            finished(i, response)
            return response

        def answer() -> list[Response]:
            with (
                self._watched(),
                ThreadPoolExecutor(
                    min(count, self._workers), thread_name_prefix="medusa-ppo-http"
                ) as pool,
            ):
                calls = [pool.submit(complete, i) for i in range(count)]
                try:
                    return [call.result() for call in calls]
                except BaseException as error:
                    pool.shutdown(wait=False, cancel_futures=True)
                    # After Ctrl-C nobody wants the answers. One call may just be connecting.
                    while not isinstance(error, Exception) and not all(c.done() for c in calls):
                        self._client.break_off()
                        time.sleep(LOOK_EVERY_S)
                    raise

        return self._answered(prompts, sampling, answer)

    def swap_heads(
        self, path: str | Path, version: int, checked: Checked | None = None
    ) -> SwapReceipt:
        # Running requests pause while the engine loads the file, so it is read and summed here,
        # where they don't wait.
        return super().swap_heads(path, version, checked or base.check_state(path, "new heads"))

    def sync_actor(
        self, path: str | Path, version: int, checked: Checked | None = None
    ) -> SwapReceipt:
        # Other clients may have requests running: they wait, and their cached keys and values are
        # recomputed.
        file = base.check_file(path, "the actor's weights")
        checked = checked or base.check_state(file, "the actor's weights")
        try:
            self._post("/pause", params={"mode": "keep", "clear_cache": "true"})
            receipt = super().sync_actor(file, version, checked)
        finally:
            # Resumed even after an error, because a paused server answers no requests; and it
            # pauses also if the call to pause is broken off.
            self._even_if_closed(lambda: self._post("/resume"), "POST", "/resume")
        self._actor_sum = receipt.checksum
        return receipt

    def _even_if_closed(self, ask: Callable[[], object], verb: str, path: str) -> None:
        """What has to follow a call, because others may use the server: `ask`, or the same once
        more with a new client if `close` breaks that off, as it may have broken off the call. After
        Ctrl-C nobody waits for it either.
        """
        if not _is_interrupted():
            try:
                ask()
            except (EngineError, RuntimeError):  # The latter: httpx's, of a client that is closed.
                if not self._client.is_closed:
                    raise
            else:
                return
        if self._started_here and self._client.is_closed:
            return  # It is being ended.
        with self._client.again() as client:
            try:
                client.request(verb, path, timeout=AFTER_CLOSE_S).raise_for_status()
            except httpx.ReadTimeout:
                logger.debug("%s was busy when it was asked for %s", self._address, path)
            except httpx.HTTPError as error:
                logger.warning("%s may still %s: %r", self._address, LEFT[path], error)

    def target_changed(self, version: int) -> None:
        super().target_changed(version)
        self._actor_sum = ""

    def _receipt(
        self, method: str, path: str, version: int, checked: Checked | None = None
    ) -> SwapReceipt:
        with self._seen_by_the_server(path) as seen:
            return super()._receipt(method, seen, version, checked)

    @contextlib.contextmanager
    def _seen_by_the_server(self, path: str) -> Iterator[str]:
        """The name under which the server can read the file. If the server is on another node, it
        names a copy there, which exists during the block.
        """
        if self._client.base_url.host in LOOPBACK:
            yield path
            return
        size = os.path.getsize(path)
        with open(path, "rb") as file:
            answer = self._sent(
                "PUT",
                # httpx would send a file without a length.
                content=iter(lambda: file.read(CHUNK_BYTES), b""),
                headers={"Content-Length": str(size)},
            )
        if answer.status_code in (httpx.codes.NOT_FOUND, httpx.codes.METHOD_NOT_ALLOWED):
            # Not started by `medusa-ppo serve`: it has to see this node's file.
            yield path
            return
        if answer.status_code != httpx.codes.OK:
            full = answer.status_code == httpx.codes.REQUEST_ENTITY_TOO_LARGE
            raise (NoRoomError if full else SwapError)(
                "The server did not take the file that was sent to it.",
                given=f"{self._address}{STATE_ROUTE}: {answer.status_code} {answer.text[:500]}",
                expected=f"200 for {size} bytes",
                do=f"Enlarge /dev/shm of the server's node, or check {TOKEN}.",
            )
        try:
            yield base.understood(lambda: str(answer.json()["path"]), answer.content)
        finally:
            self._even_if_closed(lambda: self._sent("DELETE"), "DELETE", STATE_ROUTE)

    def _sent(self, verb: str, **kwargs: Any) -> httpx.Response:
        """Send a request to `state_receiver` and return its answer, whatever that is. Raises
        SwapError if there is none.
        """
        try:
            return self._fetch(verb, STATE_ROUTE, CALL_TIMEOUT_S, **kwargs)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise SwapError(
                "The server on another node can't be reached.",
                given=f"{verb} {self._address}{STATE_ROUTE}: {error!r}",
                expected=f"an answer within {CALL_TIMEOUT_S:.0f} s",
                do="Check that it runs and can be reached from here.",
            ) from error

    def _forget_prompts(self) -> bool:
        self._post("/reset_prefix_cache", params={"reset_running_requests": "true"})
        return True

    def configure(self, **settings: Unpack[Drafting]) -> None:
        super().configure(**settings)
        self._settings = self._settings | settings

    def counters(self) -> Counters:
        """See RolloutEngine. Loops call this before and after each generation, which is when a
        restarted server is noticed.
        """
        if self._met:
            self._meet_again()
        page = self._request("GET", "/metrics").text if self.max_drafts else ""
        return base.understood(lambda: parse_counters(page), page)

    def _take_stock(self, drafting: Drafting, *, needs_heads: bool = True) -> None:
        self._settings = drafting
        super()._take_stock(drafting, needs_heads=needs_heads)
        self._met, _, _ = self._who_answers()

    def _who_answers(self) -> tuple[str, int, str]:
        """An identifier of the worker's process, its actor's version, and that one's checksum."""
        return self._asked(
            "medusa_checksums",
            lambda answer: (
                str(answer["process"]),
                int(answer["actor_version"]),
                str(answer["actor"]),
            ),
        )

    def _meet_again(self) -> None:
        """Give a restarted server its draft settings; it then waits for its heads (`heads_version`
        is -1).

        Raises:
            EngineError: it was restarted and not synced since, so it writes with the actor in its
                folder.
        """
        process, version, actor = self._who_answers()
        # Process ids can recur; the worker's own name for itself does not.
        if process == self._met:
            return
        # The version alone does not tell: a run's first actor is version 0, as is the one in the
        # server's folder.
        if (version, actor) != (self.policy_version, self._actor_sum):
            raise EngineError(
                "The vLLM server was restarted, and its answers since then may come from a "
                "different actor.",
                given=f"actor version {version} at {self._address}, {_in_words(actor)}",
                expected=(
                    f"version {self.policy_version}, {_in_words(self._actor_sum)}, which was synced"
                    " into it"
                ),
                do="Sync the actor, or continue from a checkpoint.",
            )
        logger.warning("The vLLM server was restarted; it has the actor, and is getting its heads.")
        self._met = process
        self.configure(**self._settings)
        if self._settings.get("choose") and self.max_drafts:
            self._begin_to_choose()
        self.heads_version = -1 if self.max_drafts else self.heads_version

    def close(self) -> None:
        """End the process group that was started here; an attached server keeps running."""
        self._client.close()
        self._end_process()

    def _end_process(self) -> None:
        process = self._process
        self._process = None
        if process is None:
            return
        atexit.unregister(self.close)
        # Always SIGKILL in the end: the group's first process may have ended before its workers.
        for sign in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(process.pid, sign)
            except ProcessLookupError:
                break
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                logger.debug("the server ignored %s", sign.name)
        process.wait()
        if self._log.is_file():  # But not the device that stands for no log: root could remove it.
            self._log.unlink()

    # ---- the process

    def _start_up(self, config: EngineConfig, token: str, closing: threading.Event) -> None:
        """Start a server, and wait until it answers. Its port was free when it was chosen, but the
        server binds it seconds later: if somebody else has it by then, another one is tried.
        """
        for tries_left in (1, 0):
            self._client.base_url = self._start(config, token)
            try:
                return self._wait_until_healthy(started_here=True, closing=closing)
            except EngineError:
                if not tries_left or PORT_TAKEN not in self._said().lower():
                    raise
            logger.warning("%s was taken before the server had it.", self._address)
            self._end_process()

    def _start(self, config: EngineConfig, token: str) -> str:
        env = (
            os.environ
            | process_environment(config, has_gpu=torch.cuda.is_available())
            | self.plan.environment
        )
        env |= {"VLLM_SERVER_DEV_MODE": "1", TOKEN: token, "VLLM_API_KEY": token}
        env[PARENT] = str(os.getpid())
        if self._devices:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(self._devices)
        # The server keeps its API in one process and the model in another; the setting for
        # in-process engines does not apply to it.
        env.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
        require_room(self.plan.engine_args, self.plan.parts, env)
        port = free_port()
        handle, name = tempfile.mkstemp(prefix="medusa-ppo-server-", suffix=".log")
        self._log = Path(name)
        command = [
            sys.executable,
            "-m",
            "medusa_ppo.engines.launch",
            *server_arguments(self.plan, port),
        ]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                # Not a pipe: it would not be read, and a full pipe blocks the server.
                stdout=handle,
                stderr=subprocess.STDOUT,
                env=env,
                # A separate process group, to be ended as a whole; Ctrl-C in the terminal goes to
                # the loop, which shuts it down in order.
                start_new_session=True,
            )
        finally:
            os.close(handle)
        atexit.register(self.close)
        return f"http://{HOST}:{port}"

    def _wait_until_healthy(self, *, started_here: bool, closing: threading.Event) -> None:
        within_s = START_TIMEOUT_S + self.plan.load_s if started_here else ATTACH_TIMEOUT_S
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            # There is no point in waiting ten minutes for a dead process.
            if self._process is not None and self._process.poll() is not None:
                raise EngineError(
                    "The vLLM server ended while starting.",
                    given=f"exit code {self._process.returncode}; its last output:\n{self._tail()}",
                    expected="a server",
                    do="Fix the problem named in its log.",
                )
            try:
                if self._fetch("GET", "/health", 5.0).status_code == httpx.codes.OK:
                    return
            except httpx.HTTPError as error:
                logger.debug("no server yet: %r", error)
            if closing.wait(LOOK_EVERY_S):
                raise base.not_wanted()
        raise EngineError(
            "No vLLM server answers.",
            given=f"{self._address}; {self._tail()}",
            expected=f"GET /health -> 200 within {within_s:.0f} s",
            do="Check engine.backend, or read the log.",
        )

    def _tail(self) -> str:
        return last_words(self._said()) if self._log.is_file() else "no log"

    def _said(self) -> str:
        """The log of a server that was started here."""
        if not self._log.is_file():
            return ""
        return self._log.read_text(encoding="utf-8", errors="replace")

    @property
    def _address(self) -> httpx.URL:
        """The address as it may appear in a log: without the user and password of
        engine.backend.
        """
        return self._client.base_url.copy_with(userinfo=b"")

    # ---- is it still at work?

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """Context around requests: if the engine makes no more steps, a server that was started
        here is ended, so that they fail now and not after the hours that slow ones may take. Of
        another server, which may be in others' use, a warning says so.
        """
        over, hung = threading.Event(), threading.Event()

        def watch() -> None:
            seen: str | None = None
            since = time.monotonic()
            while not over.wait(WATCH_EVERY_S):
                now = self._signs_of_life(seen)
                if now != seen or now == "":
                    seen = now
                    since = time.monotonic()
                elif time.monotonic() - since > STILL_S:
                    hung.set()
                    self._end_hung()
                    return

        watcher = threading.Thread(target=watch, name="medusa-ppo-watch", daemon=True)
        watcher.start()
        try:
            yield
        except EngineError as error:
            if not hung.is_set() or self._process is None:
                raise
            raise EngineError(
                "The vLLM server hung, and was ended.",
                given=f"no engine step in {STILL_S:.0f} s while requests waited, {self._address}",
                expected="steps, or an answer",
                do=f"Its log ends:\n{self._tail()}",
            ) from error
        finally:
            over.set()
            watcher.join()

    def _signs_of_life(self, seen: str | None) -> str | None:
        """The engine's metrics, which each step changes; empty: the server has none. What was
        `seen` last if it does not answer.
        """
        try:
            answer = self._fetch("GET", "/metrics", WATCH_WITHIN_S)
        except (httpx.HTTPError, RuntimeError):  # The latter: another thread has closed the client.
            return seen
        return "\n".join(line for line in answer.text.splitlines() if line.startswith(OF_ENGINE))

    def _end_hung(self) -> None:
        process = self._process
        if process is None:
            logger.warning(
                "The vLLM server at %s has made no engine step for %.0f s while requests wait for"
                " it. If it hangs, start it again.",
                self._address,
                STILL_S,
            )
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    # ---- HTTP

    def _complete(
        self,
        prompt_index: int,
        prompt: list[int],
        seed: int | None,
        sampling: Sampling,
        longest_s: float,
    ) -> Response:
        body = base.sampling_arguments(sampling, self.plan.stop_ids, seed)
        body |= {
            "model": self._model_name,
            "prompt": prompt,
            "return_token_ids": True,
            # The server has no tokenizer to write tokens as text.
            "return_tokens_as_token_ids": True,
        }
        given = {name: value for name, value in body.items() if value is not None}

        def response(body: Any) -> Response:
            choice = body["choices"][0]
            token_ids = choice["token_ids"]
            logprobs = choice["logprobs"]["token_logprobs"]
            strange = [
                token
                for token in token_ids
                # For isinstance, `true` is an int.
                if type(token) is not int or not 0 <= token < (self.plan.vocab_size or 1 << 31)
            ]
            if strange or len(token_ids) > sampling.max_new_tokens:
                raise ValueError(
                    f"{len(token_ids)} tokens for max_tokens {sampling.max_new_tokens},"
                    f" {len(strange)} outside the vocabulary"
                )
            reason = str(choice["finish_reason"])
            # A shared server can break a response off, e.g. for another client's pause.
            if reason not in ("stop", "length"):
                raise EngineError(
                    "The vLLM server broke a response off.",
                    given=f"finish_reason {reason} after {len(token_ids)} tokens, {self._address}",
                    expected="finish_reason stop or length",
                    do="Check who else pauses, syncs or aborts requests on this server.",
                )
            return base.checked_response(prompt_index, token_ids, logprobs, reason)

        return self._json("POST", "/v1/completions", response, within_s=longest_s, json=given)

    def _call(self, method: str, *args: Any) -> dict[str, Any]:
        return self._json(
            "POST",
            "/collective_rpc",
            lambda body: first_of(body["results"]),
            json={"method": method, "args": list(args)},
        )

    def _json(self, verb: str, path: str, take: Callable[[Any], Found], **kwargs: Any) -> Found:
        """The part that `take` extracts from the answer's JSON."""
        answer = self._request(verb, path, **kwargs)
        return base.understood(lambda: take(answer.json()), answer.content)

    def _post(self, path: str, **kwargs: Any) -> httpx.Response:
        return self._request("POST", path, **kwargs)

    def _request(
        self, verb: str, path: str, *, within_s: float | None = None, **kwargs: Any
    ) -> httpx.Response:
        """A valid answer. Raises EngineError for any other, and for none."""
        within_s = within_s or CALL_TIMEOUT_S
        try:
            answer = self._fetch(verb, path, within_s, **kwargs)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise EngineError(
                "The vLLM server can't be reached.",
                given=f"{self._address}{path}: {error!r}",
                expected=f"an answer within {within_s:.0f} s",
                do=f"Its log ends:\n{self._tail()}",
            ) from error
        if answer.status_code != httpx.codes.OK:
            do = {
                int(
                    httpx.codes.NOT_FOUND
                ): "Start the server with VLLM_SERVER_DEV_MODE=1 and our worker extension.",
                int(
                    httpx.codes.UNAUTHORIZED
                ): f"Set {TOKEN} to the secret that the server was started with.",
            }.get(answer.status_code, "Read its log.")
            given = f"{verb} {path}: {answer.status_code} {answer.text[:500]}"
            raise EngineError(
                "The vLLM server refused a request.", given=given, expected="200", do=do
            )
        return answer

    def _fetch(self, verb: str, path: str, within_s: float, **kwargs: Any) -> httpx.Response:
        """The whole answer, within this many seconds and MOST_ANSWER_BYTES, however it arrives;
        raises httpx's error if there is none.
        """
        # httpx's timeout is per read: an answer that trickles in would never end.
        deadline = time.monotonic() + within_s
        content = bytearray()
        with self._client.stream(verb, path, timeout=within_s, **kwargs) as stream:
            for part in stream.iter_bytes():
                content += part
                # A server that never stops sending would fill the memory.
                if len(content) > MOST_ANSWER_BYTES or time.monotonic() > deadline:
                    raise httpx.ReadTimeout(f"{len(content)} bytes in {within_s:.0f} s and no end")
            return httpx.Response(stream.status_code, content=bytes(content))


def _is_interrupted() -> bool:
    """Whether this follows Ctrl-C, or another exception that is no error."""
    error = sys.exc_info()[1]
    return error is not None and not isinstance(error, Exception)


def _in_words(actor_sum: str) -> str:
    return f"checksum {actor_sum[:16]}" if actor_sum else "without a checksum"


def last_words(log: str) -> str:
    """The end of a log, after its first exception: a server ends long after its engine, with "See
    root cause above".
    """
    lines = log.splitlines()
    first = next((number for number, line in enumerate(lines) if RAISED.search(line)), len(lines))
    return "\n".join(
        ([lines[first], "..."] if first < len(lines) - LOG_TAIL_LINES else [])
        + lines[-LOG_TAIL_LINES:]
    )


def patience_s(prompts: base.Prompts, sampling: Sampling, slots: int | None = None) -> float:
    """Seconds after which an engine that answers these prompts counts as hanging. Prompts count as
    well as responses: on a CPU, reading those of all slots takes minutes.

    Args:
        slots: requests beyond these wait for a turn; None: only until some response ends.
    """
    longest = max(map(len, prompts), default=0) + sampling.max_new_tokens
    count = len(prompts) * sampling.responses_per_prompt
    turns = 1 if slots is None else -(-count // max(1, slots))
    return CALL_TIMEOUT_S + TOKEN_S * longest * turns


def free_port() -> int:
    """A free port."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def parse_counters(text: str) -> Counters:
    """Acceptance counters from the Prometheus page, summed over engines."""
    totals = collections.Counter[str]()
    positions = collections.Counter[int]()
    for sample in (
        sample for family in text_string_to_metric_families(text) for sample in family.samples
    ):
        if sample.name == f"{COUNTER}accepted_tokens_per_pos_total":
            positions[int(sample.labels["position"])] += int(sample.value)
        elif sample.name.startswith(COUNTER):
            totals[sample.name] += int(sample.value)
    drafts, drafted, accepted = (
        totals[f"{COUNTER}{name}_total"] for name in ("drafts", "draft_tokens", "accepted_tokens")
    )
    # A label is untrusted text: a tuple up to a huge position would fill the memory.
    if any(not 0 <= position < MOST_POSITIONS for position in positions):
        raise ValueError(f"position {max(positions)}")
    return Counters(
        drafts,
        drafted,
        accepted,
        tuple(positions[i] for i in range(max(positions, default=-1) + 1)),
    )
