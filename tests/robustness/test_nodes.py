"""A loop and its companion on one node, the engine on another, and nothing shared but a cable: no
/dev/shm, no /tmp, no loopback (separate_nodes.py). Heads arrive by each kind of feed, and a node
that goes away and comes back stops nothing.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from medusa_ppo.companion.companion_link import COMPANION_TOKEN, STATUS
from medusa_ppo.contract import metrics as names
from medusa_ppo.feeds.http_feed import FEED_TOKEN
from medusa_ppo.loops.worker_tap import COMPANION
from medusa_ppo.reports.store import read_run
from medusa_ppo.runtime.control_guard import TOKEN
from medusa_ppo.vllm_plugin.speculation import FEED
from tests.medusa_ppo.loops import test_trl_grpo

FOLDER = Path(__file__).resolve().parent
LOOP = FOLDER / "loop_across_nodes.py"
RAY = [sys.executable, "-m", "ray.scripts.scripts"]
STEPS = 30
OWN_STEPS = 6
LAST = 5
"""Steps whose acceptance is compared."""
LONGEST_S = 400
SERVING = r"Heads version (\d+) is serving"
TRAINING_S = 3000
"""Longer, because a whole loop starts some twenty processes that import torch."""
VERL_STEPS = 20
FEED_PORT, COMPANION_PORT, RAY_PORT, SERVER_PORT = 8460, 8461, 6379, 8000
SETTINGS = {"learning_rate": 0.01, "batch_positions": 256}
"""Quick heads for a tiny actor."""
REWARD = """
def even(prompt, response, row):
    return float(len(response) % 2 == 0)
"""
TAKE = """
import os, sys, time
import ray
ray.init(address="auto", log_to_driver=False)
group = ray.util.placement_group([{"CPU": int(sys.argv[1]), sys.argv[2]: 0.001}])
assert group.wait(300), "the node has not so many free processors"
print("taken", flush=True)
while os.path.exists("/tmp/take"):
    time.sleep(0.1)
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

MEETING = """
import pathlib, sys, time, torch
from medusa_ppo.runtime.rendezvous import Meeting, Place
rank, host = int(sys.argv[1]), sys.argv[2]
file = pathlib.Path("/mnt/port")
if rank == 0:
    meeting = Meeting.open(host, 2, timeout_s=120)
    file.with_suffix(".new").write_text(str(meeting.place.port))
    file.with_suffix(".new").rename(file)
else:
    while not file.exists():
        time.sleep(0.1)
    meeting = Meeting(Place(host, int(file.read_text()), 2, 1, timeout_s=120))
print("heard", meeting.join().share(torch.full((2,), 7.0 - rank)).tolist(), flush=True)
meeting.leave()
"""

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
    """Two nodes in one Ray, and a loop on the first one.

    Args:
        cpus: what Ray is told that each node has.
        gpus: likewise, of the head and of the other.
        environment: of all that runs there, beside ENVIRONMENT.
    """

    def __init__(
        self,
        nodes: Any,
        actor: Path,
        cpus: int = 2,
        gpus: tuple[int, int] = (0, 0),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.nodes = nodes
        self._cpus = cpus
        self._gpus = {"head": gpus[0], "other": gpus[1]}
        self.environment = {**ENVIRONMENT, **(environment or {})}
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
                f"--num-cpus={self._cpus}",
                f"--num-gpus={self._gpus[node.name]}",
                "--object-store-memory=300000000",
                "--disable-usage-stats",
                *(["--include-dashboard=false"] if "--head" in words else []),
            ],
            self.environment,
        )
        assert process.wait(120) == 0, node.log("ray.log")

    def join(self) -> None:
        """The other node joins the Ray."""
        self._ray(self.nodes.other, f"--address={self.nodes.head.address}:{RAY_PORT}")

    @contextlib.contextmanager
    def taken(self, node: Any) -> Iterator[None]:
        """All processors of a node are taken: Ray starts nothing there that asks for one."""
        (self.nodes.head.tmp / "take").touch()
        words = [sys.executable, "-c", TAKE, str(self._cpus), node.name]
        taking = self.nodes.head.start("take.log", words, self.environment)
        deadline = time.monotonic() + LONGEST_S
        while "taken" not in (said := self.nodes.head.log("take.log")):
            assert taking.poll() is None and time.monotonic() < deadline, said
            time.sleep(0.1)
        yield
        (self.nodes.head.tmp / "take").unlink()
        assert taking.wait(LONGEST_S) == 0, self.nodes.head.log("take.log")

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

    def loop_ends(self, longest_s: float = LONGEST_S) -> None:
        """Wait until the loop has ended well."""
        assert self.loop is not None
        # What it said tells more than the exception.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.loop.wait(longest_s)
        assert self.loop.poll() == 0, self.said()[-6000:]

    def ended(self) -> list[float]:
        """Tokens of an engine step, for each step of the loop, which has ended well."""
        self.loop_ends()
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
    companion, feed = serve_companion(cluster.nodes.head, "127.0.0.1")
    cluster.begin(engine=engine, companion=companion, feed=feed)


def serve_companion(node: Any, host: str, **settings: Any) -> tuple[str, str]:
    """A companion and a feed of their own on a node; their addresses. The heads to start with are
    in its /tmp/heads.
    """
    feed = f"http://{node.address}:{FEED_PORT}"
    words = ["feed", "serve", "/tmp/feed", "--host", node.address, "--port", str(FEED_PORT)]
    serve(node, *words, port=FEED_PORT, host=node.address)
    places = ["--model", "/tmp/actor", "--heads", "/tmp/heads", "--feed", feed]
    told = [f"companion.{name}={value}" for name, value in (SETTINGS | settings).items()]
    serve(
        node,
        *("companion", "serve", *places, "--host", host, "--port", str(COMPANION_PORT)),
        *("heads.num_heads=3", "companion.num_gpus=0", *told),
        port=COMPANION_PORT,
        host=host,
    )
    return f"http://{host}:{COMPANION_PORT}", feed


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
    cluster.loop_ends()
    left = cluster.nodes.other.run("ls", "/dev/shm")
    assert "medusa-ppo-" not in left, left
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
    cluster.loop_ends()
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


def by_node(said: str, address: str, words: str) -> list[str]:
    """What a pattern found in the lines of one node's processes in a log of Ray's, which names the
    address of other nodes than the command's; empty: the command's.
    """
    place = f", ip={re.escape(address)}" if address else ""
    # Behind it vLLM names its own processes, likewise.
    return re.findall(rf"^\S*\(\w+ pid=\d+{place}\).*{words}", said, re.MULTILINE)


def check_fed(said: str, address: str) -> None:
    """By the loop's log, engines of the node at `address` loaded versions from the feed."""
    versions = by_node(said, address, SERVING)
    print("versions that engines of the other node loaded:", versions)
    assert versions and int(versions[-1]) > 0


def companion_status(node: Any, address: str) -> dict[str, Any]:
    """What a companion has done so far, asked on a node that reaches it."""
    code = (
        "import sys, urllib.request as web\n"
        "asked = web.Request(sys.argv[1], headers={'Authorization': sys.argv[2]})\n"
        "print(web.urlopen(asked, timeout=60).read().decode())"
    )
    words = [f"{address}/{STATUS}", f"Bearer {ENVIRONMENT[COMPANION_TOKEN]}"]
    found: dict[str, Any] = json.loads(node.run(sys.executable, "-S", "-c", code, *words))
    return found


def check_called(run: list[dict[str, Any]], left: str) -> None:
    """The steps of a run whose trainer gives its engines heads: they drafted more at its end, and
    the other node's /dev/shm (`left`) has nothing of it.
    """
    print("tokens a step, of all engines:", [round(step[names.MAL_SERVING], 2) for step in run])
    assert run[-1][names.HEADS_VERSION] >= 1
    assert run[-1][names.MAL_SERVING] > run[0][names.MAL_SERVING] + 0.2
    assert "medusa-ppo-received-" not in left


def verl_settings(verl: ModuleType, mode: str) -> dict[str, Any]:
    """verl's command line on two nodes: its actor, data and sizes are those of its contract test
    (`verl`), a GPU that is not there is one node's.
    """
    theirs = {
        name: value
        for name, value in verl.settings(Path("/mnt/actor"), Path("/mnt"), 1).items()
        # Ray runs already.
        if not name.startswith("+ray_kwargs")
    }
    speculative = "+actor_rollout_ref.rollout.engine_kwargs.vllm.speculative_config"
    served = {
        f"{speculative}.method": "medusa",
        f"{speculative}.model": "/tmp/heads",
        f"{speculative}.num_speculative_tokens": 3,
    }
    heads = {
        "sync": served,
        "colocate_async": served,
        "medusa_sync": {
            **{name: value for name, value in theirs.items() if name.startswith("+medusa")},
            "+medusa.companion.num_gpus": 0,
            "+medusa.companion.resource": "head",
        },
    }
    return {
        **{name: value for name, value in theirs.items() if not name.startswith("+medusa")},
        **heads[mode],
        "trainer.v1.trainer_mode": mode,
        "trainer.nnodes": 2,
        "trainer.total_epochs": 2,
        "trainer.total_training_steps": VERL_STEPS,
        "trainer.save_freq": -1,
        # Faster, and it writes any word in any place before the last step.
        "actor_rollout_ref.actor.optim.lr": 5e-4,
        # Its log has what is accepted on which node.
        "actor_rollout_ref.rollout.disable_log_stats": False,
        "actor_rollout_ref.rollout.calculate_log_probs": True,
        "ray_kwargs.ray_init.num_cpus": "null",
        "hydra.run.dir": "/tmp/hydra",
    }


def test_processes_of_two_nodes_meet_whatever_their_own_names_mean_to_them(
    nodes_module: ModuleType,
) -> None:
    """On Debian and Ubuntu a node's name is 127.0.1.1 to itself."""
    with nodes_module.separate_nodes() as nodes:
        for node in (nodes.head, nodes.other):
            hosts = node.tmp / "hosts"
            hosts.write_text(f"127.0.1.1 {node.name}\n{hosts.read_text()}")
            assert node.run("getent", "ahostsv4", node.name).startswith("127.0.1.1 ")
        ranks = []
        for rank, node in enumerate((nodes.head, nodes.other)):
            words = [sys.executable, "-c", MEETING, str(rank), nodes.head.address]
            ranks.append(node.start("rank.log", words, ENVIRONMENT))
        for process in ranks:
            process.wait(LONGEST_S)
        logs = [node.log("rank.log") for node in (nodes.head, nodes.other)]
    assert [log.splitlines()[-1] for log in logs] == ["heard [7.0, 7.0]"] * 2, logs


@pytest.mark.timeout(TRAINING_S + 900)
@pytest.mark.parametrize("mode", ["sync", "medusa_sync", "colocate_async"])
def test_verl_trains_on_two_nodes(nodes_module: ModuleType, chain_actor: Path, mode: str) -> None:
    """The real verl, with a worker (FSDP2 over gloo) and a vLLM server on each node.

    sync, colocate_async: verl's own trainers. Both workers are tapped for a companion on the first
    node, and both servers load what its feed has, over HTTP. medusa_sync: ours, whose heads reach
    the other node through Ray. In the environment of verl: make test-contracts LOOP=verl.
    """
    pytest.importorskip("verl", reason="verl has an environment of its own: make test-contracts")
    from tests.contracts import test_verl_training as verl

    every_process = {
        **verl.environment(Path("/mnt")),
        "PYTHONPATH": os.pathsep.join([ENVIRONMENT["PYTHONPATH"], str(Path(verl.__file__).parent)]),
        "GLOO_SOCKET_IFNAME": "cable",
        # verl's own choice would be WARN: nothing of acceptance.
        "VLLM_LOGGING_LEVEL": "INFO",
    }
    words = [sys.executable, "-m", "verl.trainer.main_ppo"]
    words += [f"{name}={value}" for name, value in verl_settings(verl, mode).items()]
    with nodes_module.separate_nodes() as nodes:
        head, other = nodes.head, nodes.other
        # A worker's bundle asks for three of these processors, and verl's other processes for more.
        cluster = Cluster(nodes, chain_actor, cpus=16, gpus=(1, 1), environment=every_process)
        verl.words(nodes.shared)
        command_only = {"RAY_ADDRESS": f"{head.address}:{RAY_PORT}", "RAY_DEDUP_LOGS": "0"}
        status: dict[str, Any] = {}
        if mode != "medusa_sync":
            # Beside its tokens, Ray knows nothing of ours; the hook hands the addresses on.
            companion, feed = serve_companion(head, head.address, epochs=8)
            command_only |= {COMPANION: companion, FEED: feed}
            shutil.copytree(head.tmp / "heads", other.tmp / "heads")
        with cluster.taken(other):
            # Else Ray would draw lots for the loop's place.
            cluster.loop = head.start("loop.log", words, {**cluster.environment, **command_only})
            cluster.until("(TaskRunnerV1 pid=")
        cluster.loop_ends(TRAINING_S)
        said = (head.tmp / "loop.log").read_text(errors="replace")
        if mode != "medusa_sync":
            status = companion_status(head, companion)
        left = other.run("ls", "/dev/shm")
        steps = [json.loads(row)["data"] for row in (nodes.shared / "verl.jsonl").open()]
        run = read_run(nodes.shared / "run" / "medusa").steps if mode == "medusa_sync" else []

    lengths = {
        name: [float(found) for found in by_node(said, address, r"acceptance length: ([\d.]+)")]
        for name, address in (("head", ""), ("other", other.address))
    }
    print("tokens a step, by vLLM's log:", lengths)
    assert not re.search(r"\(TaskRunnerV1 pid=\d+, ip=", said), "the loop is on the first node"
    assert len(steps) == VERL_STEPS
    if mode == "colocate_async":
        # Some answers were written by a version of the actor that was not the newest.
        worst = "training/off_policy/trajectory_staleness_worst/max"
        assert max(step[worst] for step in steps) >= 1
    else:
        # Both engines had the weights of the step: answers have the probabilities that verl scores.
        assert max(step["training/rollout_probs_diff_mean"] for step in steps) < 1e-3
    # Heads that have learned nothing draft nothing.
    for found in lengths.values():
        assert found and sum(found[-3:]) / len(found[-3:]) > 1.5, lengths
    if mode == "medusa_sync":
        check_called(run, left)
        return
    check_fed(said, other.address)
    # Those that it asked for, and those that the taps left out.
    learned = (status["trained_tokens"] + status["positions_left_out"]) / status["batches_trained"]
    whole = verl.PROMPTS * verl.RESPONSES * verl.TOKENS
    print(f"positions of a batch: {learned:.0f} of {whole}, status:", status)
    assert learned > 0.6 * whole, "more than one worker has"
    assert not status["error"]


@pytest.mark.timeout(TRAINING_S + 900)
@pytest.mark.parametrize("feed", ["http", "call", "async"])
def test_openrlhf_trains_on_two_nodes(
    nodes_module: ModuleType, chain_actor: Path, feed: str
) -> None:
    """The real OpenRLHF: a DeepSpeed worker and two engines, on a node with one GPU and one with
    two, which are not there. So at least one engine is on the second.

    http: the worker is tapped for a companion on the first node, and the engines load what its feed
    has. async: the same, with OpenRLHF's asynchronous trainer and partial rollouts. call: our
    trainer gives them its heads, through Ray. In the environment of OpenRLHF: make test-contracts
    LOOP=openrlhf.
    """
    pytest.importorskip(
        "openrlhf", reason="openrlhf has an environment of its own: make test-contracts"
    )
    from tests.contracts import test_openrlhf_training as openrlhf

    folder = Path(openrlhf.__file__).parent
    every_process = {
        "PYTHONPATH": os.pathsep.join([ENVIRONMENT["PYTHONPATH"], str(folder)]),
        "DS_ACCELERATOR": "cpu",
        "GLOO_SOCKET_IFNAME": "cable",
        "VLLM_LOGGING_LEVEL": "INFO",
    }
    served = openrlhf.SERVED.replace("HEADS", "/tmp/heads")
    ours = {
        "http": served,
        "async": served,
        "call": openrlhf.MEDUSA.replace(
            "companion: {", "companion: {num_gpus: 0, resource: head, "
        ),
    }
    words = [sys.executable, str(folder / "openrlhf_on_cpu.py"), "--medusa", "/tmp/heads.yaml"]
    words += openrlhf.arguments(Path("/mnt/actor"), Path("/mnt"))
    words += ["--vllm.num_engines", "2", "--train.num_episodes", str(openrlhf.EPISODES)]
    # Faster, and it writes any word in any place before the last step.
    words += ["--actor.adam.lr", "3e-4"]
    if feed == "async":
        words += ["--train.async_enable", "--train.partial_rollout_enable"]
    with nodes_module.separate_nodes() as nodes:
        head, other = nodes.head, nodes.other
        cluster = Cluster(nodes, chain_actor, cpus=8, gpus=(1, 2), environment=every_process)
        openrlhf.words(nodes.shared)
        (head.tmp / "heads.yaml").write_text(ours[feed])
        command_only = {"RAY_ADDRESS": f"{head.address}:{RAY_PORT}", "RAY_DEDUP_LOGS": "0"}
        if feed != "call":
            companion, address = serve_companion(head, head.address, epochs=8)
            command_only |= {COMPANION: companion, FEED: address}
            shutil.copytree(head.tmp / "heads", other.tmp / "heads")
        cluster.loop = head.start("loop.log", words, {**cluster.environment, **command_only})
        cluster.loop_ends(TRAINING_S)
        said = (head.tmp / "loop.log").read_text(errors="replace")
        companion_said = head.log(f"port-{COMPANION_PORT}.log", 1 << 20)
        left = other.run("ls", "/dev/shm")
        run = read_run(nodes.shared / "run" / "medusa").steps if feed == "call" else []
    assert re.search(rf"RolloutActor pid=\d+, ip={re.escape(other.address)}\)", said), said[-6000:]
    if feed == "call":
        check_called(run, left)
        return
    print(companion_said)
    check_fed(said, other.address)
    if feed == "async":
        # The two halves of OpenRLHF's asynchronous trainer.
        for half in ("TrainingActor", "GenerateSamplesActor"):
            assert f"({half} pid=" in said, said[-6000:]
