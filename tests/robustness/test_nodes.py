"""A loop and its companion on one node, the engine on another, and nothing shared but a cable: no
/dev/shm, no /tmp, no loopback (separate_nodes.py). Heads arrive by each kind of feed, and a node
that goes away and comes back stops nothing.
"""

from __future__ import annotations

import importlib
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from medusa_ppo.companion.companion_link import COMPANION_TOKEN
from medusa_ppo.contract import metrics as names
from medusa_ppo.feeds.http_feed import FEED_TOKEN
from medusa_ppo.reports.store import read_run
from medusa_ppo.runtime.control_guard import TOKEN
from tests.medusa_ppo.loops import test_trl_grpo

FOLDER = Path(__file__).resolve().parent
LOOP = FOLDER / "loop_across_nodes.py"
RAY = [sys.executable, "-m", "ray.scripts.scripts"]
STEPS = 30
OWN_STEPS = 6
LAST = 5
"""Steps whose acceptance is compared."""
LONGEST_S = 400
FEED_PORT, COMPANION_PORT, RAY_PORT, SERVER_PORT = 8460, 8461, 6379, 8000
SETTINGS = {"learning_rate": 0.01, "batch_positions": 256}
"""Quick heads for a tiny actor."""
REWARD = """
def even(prompt, response, row):
    return float(len(response) % 2 == 0)
"""
ENVIRONMENT = {
    "PYTHONPATH": str(FOLDER.parents[1]),
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # As vLLM is usually run: its core is a process below the Ray actor's.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    # `ray start` asks for the token of the environment, and does not show it by itself.
    "RAY_AUTH_MODE": "token",
    COMPANION_TOKEN: "a secret of this test",
    FEED_TOKEN: "another secret of this test",
    TOKEN: "and one more",
}

pytestmark = [pytest.mark.slow, pytest.mark.engine, pytest.mark.timeout(2 * LONGEST_S + 120)]


@pytest.fixture(scope="module")
def nodes_module() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        module = importlib.import_module("separate_nodes")
        if reason := module.why_not():
            pytest.skip(reason)
        yield module


def serve(node: Any, *words: str, port: int, host: str) -> None:
    """A command of ours on a node, which listens."""
    name = f"port-{port}.log"
    process = node.start(name, [sys.executable, "-m", "medusa_ppo", *words], ENVIRONMENT)
    code = (
        "import socket, sys\n"
        f"try: socket.create_connection(({host!r}, {port}), 1)\n"
        "except OSError: sys.exit(1)"
    )
    deadline = time.monotonic() + 200
    asking = node.command(sys.executable, "-S", "-c", code)
    while subprocess.run(asking, check=False).returncode:
        assert process.poll() is None and time.monotonic() < deadline, node.log(name)
        time.sleep(0.2)


class Cluster:
    """Two nodes in one Ray, and a loop on the first one."""

    def __init__(self, nodes: Any, actor: Path) -> None:
        self.nodes = nodes
        shutil.copytree(actor, nodes.head.tmp / "actor")
        shutil.copytree(actor, nodes.shared / "actor")
        self._ray(nodes.head, "--head", f"--port={RAY_PORT}")
        self.join()
        self.loop: subprocess.Popen[bytes] | None = None

    def _ray(self, node: Any, *words: str) -> None:
        process = node.start(
            "ray.log",
            [
                *(*RAY, "start", *words),
                f"--node-ip-address={node.address}",
                f'--resources={{"{node.name}": 1}}',
                "--num-cpus=2",
                "--num-gpus=0",
                "--object-store-memory=300000000",
                "--disable-usage-stats",
                *(["--include-dashboard=false"] if "--head" in words else []),
            ],
            ENVIRONMENT,
        )
        assert process.wait(120) == 0, node.log("ray.log")

    def join(self) -> None:
        """The other node joins the Ray."""
        self._ray(self.nodes.other, f"--address={self.nodes.head.address}:{RAY_PORT}")

    def begin(self, **order: Any) -> None:
        """Start the loop."""
        whole = {
            "actor": "/tmp/actor",
            "heads": "/tmp/heads",
            "steps": STEPS,
            "settings": SETTINGS,
            **order,
        }
        words = [sys.executable, str(LOOP), json.dumps(whole)]
        self.loop = self.nodes.head.start("loop.log", words, ENVIRONMENT)

    def said(self) -> str:
        return self.nodes.head.log("loop.log", 1 << 20)

    def until(self, words: str) -> None:
        """Wait until the loop has said it."""
        assert self.loop is not None
        deadline = time.monotonic() + LONGEST_S
        while words not in self.said():
            assert self.loop.poll() is None, self.said()[-6000:]
            assert time.monotonic() < deadline, self.said()[-6000:]
            time.sleep(0.1)

    def ended(self) -> list[float]:
        """Tokens of an engine step, for each step of the loop, which has ended well."""
        assert self.loop is not None
        assert self.loop.wait(LONGEST_S) == 0, self.said()[-6000:]
        found = [float(value) for value in re.findall(r"([\d.]+) tokens a step", self.said())]
        assert len(found) == STEPS, self.said()[-6000:]
        return found


@pytest.fixture
def cluster(nodes_module: ModuleType, chain_actor: Path) -> Iterator[Cluster]:
    with nodes_module.separate_nodes() as nodes:
        yield Cluster(nodes, chain_actor)


def with_ray_feed(cluster: Cluster, engine: str) -> None:
    cluster.begin(engine=engine, companion="ray", feed="ray:heads")


def with_http_feed(cluster: Cluster, engine: str) -> None:
    """The companion is a process of its own, which only the loop's node reaches."""
    address = cluster.nodes.head.address
    feed = f"http://{address}:{FEED_PORT}"
    words = ["feed", "serve", "/tmp/feed", "--host", address, "--port", str(FEED_PORT)]
    serve(cluster.nodes.head, *words, port=FEED_PORT, host=address)
    places = ["--model", "/tmp/actor", "--heads", "/tmp/heads", "--feed", feed]
    settings = [f"companion.{name}={value}" for name, value in SETTINGS.items()]
    serve(
        cluster.nodes.head,
        *("companion", "serve", *places, "--port", str(COMPANION_PORT)),
        *("heads.num_heads=3", "companion.num_gpus=0", *settings),
        port=COMPANION_PORT,
        host="127.0.0.1",
    )
    companion = f"http://127.0.0.1:{COMPANION_PORT}"
    cluster.begin(engine=engine, companion=companion, feed=feed)


FEEDS: dict[str, Callable[[Cluster, str], None]] = {"ray": with_ray_feed, "http": with_http_feed}


@pytest.fixture(scope="module")
def on_one_node(nodes_module: ModuleType, chain_actor: Path) -> float:
    """Tokens of a step in the last steps, with the engine beside the loop."""
    with nodes_module.separate_nodes() as nodes:
        alone = Cluster(nodes, chain_actor)
        with_ray_feed(alone, "head")
        return mean_of_last(alone.ended())


def mean_of_last(found: list[float]) -> float:
    return sum(found[-LAST:]) / LAST


def check(found: list[float], on_one_node: float) -> None:
    assert found[0] == 1.0, "untrained heads draft nothing"
    assert on_one_node > 2
    assert abs(mean_of_last(found) - on_one_node) < 0.4, (found, on_one_node)


@pytest.mark.parametrize("kind", FEEDS)
def test_an_engine_on_another_node_is_fed(cluster: Cluster, on_one_node: float, kind: str) -> None:
    FEEDS[kind](cluster, "other")
    found = cluster.ended()
    check(found, on_one_node)


@pytest.mark.parametrize("kind", FEEDS)
def test_a_node_goes_away_and_comes_back(cluster: Cluster, on_one_node: float, kind: str) -> None:
    FEEDS[kind](cluster, "other")
    cluster.until("step 15:")
    cluster.nodes.other.end()
    cluster.until("the engine's node is away")
    cluster.nodes.bring()
    cluster.join()
    cluster.until("a new engine is up")
    found = cluster.ended()
    check(found, on_one_node)


def test_a_cable_is_pulled_for_a_while(cluster: Cluster, on_one_node: float) -> None:
    with_http_feed(cluster, "other")
    cluster.until("step 12:")
    cluster.nodes.other.cable(False)
    time.sleep(8)
    cluster.nodes.other.cable(True)
    check(cluster.ended(), on_one_node)


@pytest.mark.parametrize("transfer", ["file", "broadcast"])
def test_our_own_loop_has_its_engine_on_another_node(cluster: Cluster, transfer: str) -> None:
    head = cluster.nodes.head
    (head.tmp / "even_reward.py").write_text(REWARD)
    config = {
        "name": "run",
        "out": "/tmp",
        "model": {"path": "/mnt/actor"},
        "data": {"path": "demo", "max_prompt_tokens": 100, "split": "train[:64]"},
        "sampling": {"max_new_tokens": 24, "responses_per_prompt": 4},
        "engine": {
            "max_num_seqs": 8,
            "max_model_len": 128,
            "threads": 1,
            "memory_fraction": 0.05,
            "num_drafts": 3,
            "resource": "other",
            "transfer": transfer,
        },
        "heads": {"num_heads": 3, "warm_up_tokens": 0},
        "companion": {**SETTINGS, "wait": True, "resource": "head"},
        "ppo": {
            "steps": OWN_STEPS,
            "prompts_per_step": 16,
            "micro_batch_size": 16,
            "actor_learning_rate": 1e-4,
            "reward": "even_reward:even",
            "checkpoint_every": None,
            "threads": 1,
        },
    }
    # JSON is YAML.
    (head.tmp / "run.yaml").write_text(json.dumps(config))
    environment = {**ENVIRONMENT, "RAY_ADDRESS": f"{head.address}:{RAY_PORT}"}
    words = [sys.executable, "-m", "medusa_ppo", "ppo", "--config", "/tmp/run.yaml"]
    cluster.loop = head.start("loop.log", words, environment)
    assert cluster.loop.wait(LONGEST_S) == 0, cluster.said()[-6000:]
    run = read_run(head.tmp / "run").steps
    assert [step[names.POLICY_VERSION] for step in run] == list(range(OWN_STEPS))
    assert run[-1][names.HEADS_VERSION] >= 1
    assert run[-1][names.MAL_SERVING] > run[0][names.MAL_SERVING] + 0.2
    assert max(step[names.LOGPROB_GAP] for step in run) < 1e-3, "the engine has the step's actor"


@pytest.mark.parametrize("loop", ["openrlhf", "verl"])
def test_another_loops_engine_is_on_another_node(cluster: Cluster, loop: str) -> None:
    """As our hooks start it. In the environment of that loop: make test-contracts LOOP=openrlhf."""
    pytest.importorskip(loop, reason=f"{loop} has an environment of its own: make test-contracts")
    words = [loop, "/mnt/actor", "/mnt/run", "other"]
    command = [sys.executable, str(FOLDER / "attached_across_nodes.py"), *words]
    cluster.loop = cluster.nodes.head.start("loop.log", command, ENVIRONMENT)
    assert cluster.loop.wait(LONGEST_S) == 0, cluster.said()[-6000:]
    assert "version 2, " in cluster.said(), cluster.said()[-2000:]


def test_trl_trains_on_one_node_and_its_server_is_on_another(
    nodes_module: ModuleType, chain_actor: Path
) -> None:
    """Heads and weights reach the server over HTTP; the folder that it starts with is on both."""
    with nodes_module.separate_nodes() as nodes:
        shutil.copytree(chain_actor, nodes.shared / "actor")
        (nodes.shared / "heads.yaml").write_text("heads: {num_heads: 2}\n")
        (nodes.head.tmp / "train.py").write_text(test_trl_grpo.SCRIPT)
        address = nodes.other.address
        serve(
            nodes.other,
            *("serve", "--model", "/mnt/actor", "--heads", "/mnt/heads"),
            *("--medusa", "/mnt/heads.yaml", "--host", address, "--port", str(SERVER_PORT)),
            *("--max-model-len", "128", "--max-num-seqs", "16", "--enforce-eager"),
            *("--max-logprobs", "-1", "--distributed-executor-backend", "uni"),
            *("--kv-cache-memory-bytes", str(64 * 1024**2)),
            port=SERVER_PORT,
            host=address,
        )
        medusa = {
            "heads": {"num_heads": 2, "path": "/mnt/heads"},
            "engine": test_trl_grpo.DRAFTS,
            "companion": test_trl_grpo.COMPANION,
        }
        settings = {
            "use_vllm": True,
            "vllm_mode": "server",
            "vllm_server_base_url": f"http://{address}:{SERVER_PORT}",
            "max_steps": 8,
        }
        words = ["grpo", "/mnt/actor", "/tmp/run", json.dumps(medusa), json.dumps(settings)]
        trainer = nodes.head.start(
            "loop.log",
            [sys.executable, "/tmp/train.py", *words],
            {**ENVIRONMENT, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"},
        )
        assert trainer.wait(LONGEST_S) == 0, nodes.head.log("loop.log", 6000)
        log = json.loads((nodes.head.tmp / "run" / "log.json").read_text())
        left = nodes.other.run("ls", "/dev/shm")
    steps = [row for row in log if f"medusa/{names.MAL_SERVING}" in row]
    assert steps[-1][f"medusa/{names.HEADS_VERSION}"] >= 1
    assert steps[-1][f"medusa/{names.MAL_SERVING}"] > steps[0][f"medusa/{names.MAL_SERVING}"] + 0.2
    assert all(abs(row["sampling/importance_sampling_ratio/mean"] - 1) < 0.02 for row in steps)
    assert "medusa-ppo-received-" not in left
