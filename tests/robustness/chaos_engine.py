"""An engine for chaos.py that samples with transformers: in the run's process, or as a server that
can misbehave.

    python tests/robustness/chaos_engine.py PORT ACTOR ORDERS

That is the server, with vLLM's routes; ORDERS is a file with what goes wrong next.

What it samples is a function of the actor, the prompt and the request's seed alone, so that a run
that asks again, or another process, gets the same to the bit. It verifies no drafts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar, Unpack

import torch
from chaos_hook import take_order
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from medusa_ppo.contract.rollouts import Counters, Response, Rollouts, Sampling
from medusa_ppo.contract.status import Checked, SwapReceipt
from medusa_ppo.engines import rollout_engine as base
from medusa_ppo.engines.http_server import ServerEngine, free_port
from medusa_ppo.engines.launch import end_with_parent
from medusa_ppo.engines.pieces import request_seed
from medusa_ppo.runtime.rendezvous import Place
from medusa_ppo.vllm_plugin.confirm import read_state
from medusa_ppo.vllm_plugin.transfer import Group, Incoming, read_entries
from medusa_ppo.vllm_plugin.worker_calls import Drafting, reports_errors

LATE_S = 12.0
MAX_DRAFTS = 3


class Writer:
    """The actor, and which heads it was given."""

    def __init__(self, model_path: str | Path) -> None:
        torch.set_num_threads(1)
        self.model: LlamaForCausalLM = (
            AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
            .eval()
            .requires_grad_(False)
        )
        self.sums = {"heads": "", "actor": ""}
        self.heads_version = 0

    def write(
        self, prompt: Sequence[int], seed: int | None, sampling: Sampling, stop: Sequence[int]
    ) -> tuple[list[int], list[float], str]:
        """Tokens, their log-probs, and why it ended."""
        generator = torch.Generator().manual_seed(seed or 0)
        ids = list(prompt)
        logprobs = list[float]()
        while len(logprobs) < sampling.max_new_tokens and (not logprobs or ids[-1] not in stop):
            distribution_V = (
                self.model(torch.tensor([ids])).logits[0, -1] / sampling.temperature
            ).log_softmax(-1)
            ids.append(int(torch.multinomial(distribution_V.exp(), 1, generator=generator)))
            logprobs.append(float(distribution_V[ids[-1]]))
        return ids[len(prompt) :], logprobs, "stop" if ids[-1] in stop else "length"

    def take_heads(self, path: str, version: int, checked: Checked | None) -> str:
        """Read and check a file of heads. SwapError leaves those before."""
        _, self.sums["heads"] = read_state(path, "new heads", checked)
        self.heads_version = version
        return self.sums["heads"]

    def take_actor(self, path: str, checked: Checked | None) -> str:
        state, digest = read_state(path, "the actor's weights", checked)
        return self.load(state, digest)

    def load(self, state: dict[str, torch.Tensor], digest: str) -> str:
        self.model.load_state_dict(state)
        self.sums["actor"] = digest
        return digest


class ChaosEngine(base.RolloutEngine):
    """In the run's own process. It can take a broadcast actor.

    Attributes:
        before_receiving: called before a broadcast actor is received, with the engine.
    """

    def __init__(self, model_path: str | Path, stop: Sequence[int]) -> None:
        self._writer = Writer(model_path)
        self._stop = stop
        self.max_drafts = MAX_DRAFTS
        self.num_drafts = MAX_DRAFTS
        self.before_receiving: Callable[[ChaosEngine], None] = lambda engine: None
        self.group: Group | None = None

    def generate(self, prompts: base.Prompts, sampling: Sampling) -> Rollouts:
        repeat = sampling.responses_per_prompt
        responses = []
        for index in range(len(prompts) * repeat):
            seed = request_seed(sampling, index)
            ids, logprobs, reason = self._writer.write(
                prompts[index // repeat], seed, sampling, self._stop
            )
            responses.append(Response(index // repeat, tuple(ids), tuple(logprobs), reason))
        return base.with_versions(
            Rollouts(tuple(map(tuple, prompts)), tuple(responses), Counters(), 0.01, sampling), self
        )

    def swap_heads(
        self, path: str | Path, version: int, checked: Checked | None = None
    ) -> SwapReceipt:
        digest = self._writer.take_heads(base.check_file(path, "new heads"), version, checked)
        self.heads_version = version
        return SwapReceipt(version, digest, 0.0)

    def sync_actor(
        self, path: str | Path, version: int, checked: Checked | None = None
    ) -> SwapReceipt:
        digest = self._writer.take_actor(base.check_file(path, "the actor's weights"), checked)
        self.policy_version = version
        return SwapReceipt(version, digest, 0.0)

    def check_actor(self, entries: Any) -> list[str]:
        return ["cpu"]

    def join_transfer(self, place: dict[str, Any]) -> None:
        self.group = Group(Place(**place)).join()

    def receive_actor(self, entries: Any, version: int) -> SwapReceipt:
        assert self.group is not None
        self.before_receiving(self)
        incoming = Incoming(self.group, read_entries(entries))
        state = {name: tensor.clone() for name, tensor in incoming}
        self.policy_version = version
        return SwapReceipt(version, self._writer.load(state, incoming.checksum), 0.0)

    def configure(self, **settings: Unpack[Drafting]) -> None:
        self.num_drafts = settings.get("num_drafts", self.num_drafts)

    def checksums(self) -> dict[str, str]:
        return dict(self._writer.sums)

    def counters(self) -> Counters:
        return Counters()

    def plugin_report(self) -> dict[str, Any]:
        return {"kind": "medusa", "drafter": "none", "max_drafts": MAX_DRAFTS}

    def close(self) -> None:
        if self.group is not None:
            self.group.leave()


class StandInServer(ServerEngine):
    """`ServerEngine` as it is, with our server in the place of vLLM's. Processes that were started
    are in `started`.
    """

    started: ClassVar[list[int]] = []
    orders = Path("no-orders")

    def _start(self, config: Any, token: str) -> str:
        port = free_port()
        self._log = self.orders.with_name("server.log")
        command = [
            sys.executable,
            __file__,
            str(port),
            str(self.plan.engine_args["model"]),
            str(self.orders),
        ]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | {"TOKEN": token},
                start_new_session=True,
            )
        self.started.append(self._process.pid)
        return f"http://127.0.0.1:{port}"


class ChaosWorkers:
    """What `/collective_rpc` reaches: of our worker extension as much as a run asks for."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    @reports_errors
    def medusa_plugin_report(self) -> dict[str, Any]:
        return {"kind": "medusa", "drafter": "none", "max_drafts": MAX_DRAFTS, "pid": os.getpid()}

    @reports_errors
    def medusa_checksums(self) -> dict[str, Any]:
        return {
            **self._writer.sums,
            "heads_version": self._writer.heads_version,
            "actor_version": 0,
            "process": str(os.getpid()),
        }

    @reports_errors
    def medusa_configure(self, settings: Any) -> dict[str, Any]:
        return {}

    @reports_errors
    def medusa_choices(self) -> dict[str, Any]:
        return {"rows": []}

    @reports_errors
    def medusa_swap_heads(
        self, path: str, version: int, checked: list[Any] | None = None
    ) -> dict[str, Any]:
        digest = self._writer.take_heads(path, version, Checked(*checked) if checked else None)
        return {"version": version, "checksum": digest, "seconds": 0.0}

    @reports_errors
    def medusa_sync_actor(
        self, path: str, version: int, checked: list[Any] | None = None
    ) -> dict[str, Any]:
        digest = self._writer.take_actor(path, Checked(*checked) if checked else None)
        return {"version": version, "checksum": digest, "seconds": 0.0}


class Handler(BaseHTTPRequestHandler):
    """One request. `writer`, `workers`, `orders` and `token` are set by `serve`."""

    writer: Writer
    workers: ChaosWorkers
    orders: Path
    token = ""
    lock = threading.Lock()
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer({"data": [{"id": "stand-in"}]} if self.path == "/v1/models" else "")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        if self.token and self.headers.get("Authorization") != f"Bearer {self.token}":
            self.send_error(401)
        elif self.path == "/collective_rpc":
            with self.lock:
                answer = getattr(self.workers, body["method"])(*body["args"])
            self._answer({"results": [answer]})
        elif self.path == "/v1/completions":
            self._complete(body)
        else:
            self._answer({})

    def _complete(self, body: dict[str, Any]) -> None:
        with self.lock:
            order = take_order(self.orders)
            sampling = Sampling(body["temperature"], max_new_tokens=body["max_tokens"])
            ids, logprobs, reason = self.writer.write(
                body["prompt"], body.get("seed"), sampling, body["stop_token_ids"]
            )
        if order == "late":
            time.sleep(LATE_S)
        if order == "nothing":
            self.close_connection = True
            return
        if order == "gpu":  # What vLLM answers when its engine's process has ended over one.
            self.send_error(
                500,
                "EngineCore encountered an issue: CUDA error: an illegal memory access was"
                " encountered",
            )
            return
        if order == "wrong":
            ids = [token + (1 << 20) for token in ids]
        if order == "half":
            ids = ids[:-1]  # A token of which only the log-prob arrives.
        answer = {
            "choices": [
                {
                    "token_ids": ids,
                    "logprobs": {"token_logprobs": logprobs},
                    "finish_reason": reason,
                }
            ]
        }
        self._answer(answer)
        if order == "twice":
            self._answer(answer)

    def _answer(self, body: Any) -> None:
        content = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Nobody reads it."""


class Server(ThreadingHTTPServer):
    """With room for all requests of a rollout that connect at once; of more than that the system
    resets some.
    """

    request_queue_size = 128


def serve(port: int, model_path: str, orders: Path) -> None:
    end_with_parent()
    Handler.writer = Writer(model_path)
    Handler.workers = ChaosWorkers(Handler.writer)
    Handler.orders = orders
    Handler.token = os.environ.get("TOKEN", "")
    Server(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    serve(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
