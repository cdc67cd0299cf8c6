"""vLLM as an HTTP server on this node: started here, or attached to. Swaps go through the same worker extension."""

from __future__ import annotations

import atexit
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import torch

from heads.errors import EngineError
from medusa_ppo.config import EngineConfig
from medusa_ppo.engines import rollout_engine as base
from medusa_ppo.engines.launch import HOST, plan_launch, process_environment, server_arguments
from medusa_ppo.types import Checked, Counters, Response, Rollouts, Sampling, SwapReceipt
from medusa_ppo.vllm_plugin.rpc import first_of

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 600.0
ATTACH_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 20.0
LOG_TAIL_LINES = 25
COUNTER_LINE = re.compile(
    r"^vllm:spec_decode_num_(drafts|draft_tokens|accepted_tokens|accepted_tokens_per_pos)_total\{([^}]*)\} (\S+)$", re.MULTILINE
)
POSITION = re.compile(r'position="(\d+)"')
CALL_TIMEOUT_S = 600.0


class ServerEngine(base.WorkerEngine):
    """An OpenAI-compatible vLLM server, asked with token ids."""

    def __init__(self, model_path: str | Path, heads_path: str | Path | None, config: EngineConfig, seed: int = 0) -> None:
        """Start a server, or attach to the one at `config.backend`. Raises as `plan_launch`, and EngineError when no server answers."""
        self.plan = plan_launch(model_path, heads_path, config, seed)
        self._process: subprocess.Popen[bytes] | None = None
        self._log = Path(os.devnull)
        self._client = httpx.Client(
            base_url=config.addresses[0] if config.addresses else self._start(config),
            timeout=CALL_TIMEOUT_S,
            limits=httpx.Limits(max_connections=None),
        )
        self._workers = max(1, 2 * config.max_num_seqs)
        try:
            self._wait_until_healthy(started_here=not config.addresses)
            report = self.plugin_report()
            self._check_served(report, bool(heads_path))
            self._model_name = self._get("/v1/models").json()["data"][0]["id"]
            self.max_drafts = int(report["max_drafts"])
            if self.max_drafts:
                self.heads_version = int(self._call("medusa_checksums")["heads_version"])
                self.configure(**self.plan.drafting | {"num_drafts": min(self.plan.drafting["num_drafts"], self.max_drafts)})
        except BaseException:
            self.close()
            raise

    # ---- the engine's methods ---------------------------------------------------------------------------------------------

    def generate(self, prompts: base.Prompts, sampling: Sampling) -> Rollouts:
        base.check_request(prompts, sampling, self.plan.max_model_len, self.plan.vocab_size)
        repeat = sampling.responses_per_prompt
        jobs: list[tuple[int, list[int], int | None]] = [
            (i // repeat, list(prompts[i // repeat]), base.request_seed(sampling, i)) for i in range(len(prompts) * repeat)
        ]

        def answer() -> list[Response]:
            with ThreadPoolExecutor(min(len(jobs), self._workers), thread_name_prefix="medusa-ppo-http") as pool:
                return list(pool.map(lambda job: self._complete(job[0], job[1], job[2], sampling), jobs))

        return self._answered(prompts, sampling, answer)

    def sync_actor(self, path: str | Path, version: int, checked: Checked | None = None) -> SwapReceipt:
        # Other clients may have requests running: they wait, and their cached keys and values are computed anew.
        file = base.check_file(path, "the actor's weights")
        self._post("/pause", params={"mode": "keep", "clear_cache": "true"})
        try:
            return super().sync_actor(file, version, checked)
        finally:
            self._post("/resume")

    def _forget_prompts(self) -> bool:
        self._post("/reset_prefix_cache", params={"reset_running_requests": "true"})
        return True

    def counters(self) -> Counters:
        return parse_counters(self._get("/metrics").text) if self.max_drafts else Counters()

    def close(self) -> None:
        """End the process group that was started here; a server that was attached to runs on."""
        self._client.close()
        process, self._process = self._process, None
        if process is None:
            return
        atexit.unregister(self.close)
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
        self._log.unlink(missing_ok=True)

    # ---- the process ------------------------------------------------------------------------------------------------------

    def _start(self, config: EngineConfig) -> str:
        port = free_port()
        handle, name = tempfile.mkstemp(prefix="medusa-ppo-server-", suffix=".log")
        self._log = Path(name)
        env = os.environ | process_environment(config, has_gpu=torch.cuda.is_available()) | {"VLLM_SERVER_DEV_MODE": "1"}
        # The server keeps its API in one process and the model in another; the setting for in-process engines is not its own.
        env.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
        command = [sys.executable, "-m", "medusa_ppo.engines.launch", *server_arguments(self.plan, port)]
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=handle, stderr=subprocess.STDOUT, env=env, start_new_session=True
            )
        finally:
            os.close(handle)
        atexit.register(self.close)
        return f"http://{HOST}:{port}"

    def _wait_until_healthy(self, *, started_here: bool) -> None:
        deadline = time.monotonic() + (START_TIMEOUT_S if started_here else ATTACH_TIMEOUT_S)
        while time.monotonic() < deadline:
            if self._process is not None and self._process.poll() is not None:
                raise EngineError(
                    "The vLLM server ended while starting.",
                    given=f"exit code {self._process.returncode}; its last words:\n{self._tail()}",
                    expected="a server",
                    do="Correct what its log names.",
                )
            try:
                if self._client.get("/health", timeout=5.0).status_code == httpx.codes.OK:
                    return
            except httpx.TransportError:
                time.sleep(0.25)
        raise EngineError(
            "No vLLM server answers.",
            given=f"{self._client.base_url}; {self._tail()}",
            expected="GET /health -> 200",
            do="Check engine.backend, or read the log.",
        )

    def _tail(self) -> str:
        if not self._log.is_file():
            return "no log"
        return "\n".join(self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_TAIL_LINES:])

    def _check_served(self, report: dict[str, Any], with_heads: bool) -> None:
        if with_heads and not report["kind"]:
            raise EngineError(
                "The server does not draft with native heads.",
                given=f"drafter {report['drafter'] or 'none'}",
                expected="a server started with these heads",
                do="Start it with --speculative-config method=medusa and the heads folder.",
            )

    # ---- HTTP ---------------------------------------------------------------------------------------------------------------

    def _complete(self, prompt_index: int, prompt: list[int], seed: int | None, sampling: Sampling) -> Response:
        body = base.sampling_arguments(sampling, self.plan.stop_ids, seed)
        body |= {"model": self._model_name, "prompt": prompt, "return_token_ids": True, "return_tokens_as_token_ids": True}
        choice = self._post(
            "/v1/completions", timeout=None, json={name: value for name, value in body.items() if value is not None}
        ).json()["choices"][0]
        token_ids, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        return base.checked_response(prompt_index, token_ids, logprobs, choice["finish_reason"])

    def _call(self, method: str, *args: Any) -> dict[str, Any]:
        answers = self._post("/collective_rpc", json={"method": method, "args": list(args)}).json()["results"]
        return first_of(answers)

    def _get(self, path: str) -> httpx.Response:
        return self._request("GET", path)

    def _post(self, path: str, **kwargs: Any) -> httpx.Response:
        return self._request("POST", path, **kwargs)

    def _request(self, verb: str, path: str, **kwargs: Any) -> httpx.Response:
        try:
            answer = self._client.request(verb, path, **kwargs)
        except httpx.HTTPError as error:
            raise EngineError(
                "The vLLM server can't be reached.",
                given=f"{self._client.base_url}{path}: {error!r}",
                expected="an answer",
                do=f"Its log ends:\n{self._tail()}",
            ) from error
        if answer.status_code != httpx.codes.OK:
            hint = (
                "Start the server with VLLM_SERVER_DEV_MODE=1 and our worker extension."
                if answer.status_code == httpx.codes.NOT_FOUND
                else "Read its log."
            )
            raise EngineError(
                "The vLLM server refused a request.",
                given=f"{verb} {path}: {answer.status_code} {answer.text[:500]}",
                expected="200",
                do=hint,
            )
        return answer


def free_port() -> int:
    """A port that nobody has."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def parse_counters(text: str) -> Counters:
    """Acceptance counters of the Prometheus page, summed over engines."""
    totals = {"drafts": 0, "draft_tokens": 0, "accepted_tokens": 0}
    positions: dict[int, int] = {}
    for name, labels, value in COUNTER_LINE.findall(text):
        if name == "accepted_tokens_per_pos":
            found = POSITION.search(labels)
            if found:
                positions[int(found[1])] = positions.get(int(found[1]), 0) + int(float(value))
        else:
            totals[name] += int(float(value))
    width = max(positions, default=-1) + 1
    return Counters(totals["drafts"], totals["draft_tokens"], totals["accepted_tokens"], tuple(positions.get(i, 0) for i in range(width)))
