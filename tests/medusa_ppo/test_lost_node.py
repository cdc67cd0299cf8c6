"""A run on a Ray cluster of several nodes (all on this machine) that loses one and gets another:
PPO goes on, everything catches up.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from medusa_ppo.config.run_config import build_config
from medusa_ppo.contract import metrics as names
from medusa_ppo.engines.pool import EnginePool
from medusa_ppo.engines.ray_engine import make_engine
from medusa_ppo.engines.rollout_engine import RolloutEngine
from medusa_ppo.ppo.loop import run_ppo
from medusa_ppo.ppo.run_progress import ProgressSink
from medusa_ppo.reports.store import read_run

MEMORY = 200 * 1024**2
NODE = {"num_cpus": 2, "resources": {"engines": 1, "companion": 1}, "object_store_memory": MEMORY}
STEPS, LOST_AT, BACK_AT = 10, 3, 6
REWARD = """
def even(prompt, response, row):
    return float(len(response) % 2 == 0)
"""


@pytest.fixture
def three_nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """A head node for the caller, and two for engines and workers of the companion."""
    assert not ray.is_initialized()
    folder = tempfile.mkdtemp(prefix="mppo-")  # Short: a socket's path has 107 characters.
    monkeypatch.setenv(
        "RAY_TMPDIR", folder
    )  # The usual one says to everybody on this machine that there is a cluster to join.
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 1, "object_store_memory": MEMORY, "include_dashboard": False},
    )
    try:
        for _ in range(2):
            cluster.add_node(**NODE)
        ray.init(
            address=cluster.address,
            logging_level=logging.ERROR,
            log_to_driver=False,
            configure_logging=False,
        )
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def actors(kind: str) -> list[str]:
    """Ids of the nodes that have a living Ray actor of a class."""
    found = ray._private.state.actors().values()
    return [
        actor["Address"]["NodeID"]
        for actor in found
        if actor["ActorClassName"] == kind and actor["State"] == "ALIVE"
    ]


def until(condition: Callable[[], bool], seconds: float = 600.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.2)


class LosesANode(ProgressSink):
    """Takes the node without the leader away before one step, brings another before a later one,
    and lets that one come up.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.pool: EnginePool | None = None
        self.lost = ""

    def keep(self, *arguments: Any, **more: Any) -> RolloutEngine:
        """In the place of `make_engine`."""
        engine = make_engine(*arguments, **more)
        assert isinstance(engine, EnginePool)
        self.pool = engine
        return engine

    def phase_started(self, phase: str, step: int | None = None) -> None:
        if phase != "generate":
            return
        if step == LOST_AT:
            node = next(n for n in self._cluster.worker_nodes if n.node_id not in actors("Leader"))
            self.lost = node.node_id
            self._cluster.remove_node(node, allow_graceful=False)
            # Until Ray misses it (some 15 s) it places what is started again on the lost node,
            # where that dies; who waits there is asked only with the next batch, and the steps
            # before BACK_AT may take less.
            until(lambda: not any(n["Alive"] for n in ray.nodes() if n["NodeID"] == self.lost))
        if step == BACK_AT:
            assert self.pool is not None
            self._cluster.add_node(**NODE)
            until(
                lambda: all(
                    seat.starting is None or seat.starting.done() for seat in self.pool._seats
                )
            )
            until(lambda: len(actors("Member")) == 1)


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(1200)
def test_a_run_loses_a_node_and_catches_up(
    chain_actor: Path, three_nodes: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "even_reward.py").write_text(REWARD)
    monkeypatch.chdir(tmp_path)
    # A node has room for one engine and one worker: what is lost can't come back beside the other.
    monkeypatch.setattr("medusa_ppo.runtime.processes.TOKEN", 1.0)
    config = build_config(
        {
            "name": "run",
            "out": str(tmp_path),
            "model": {"path": str(chain_actor)},
            "data": {"path": "demo", "max_prompt_tokens": 100, "split": "train[:64]"},
            "sampling": {"max_new_tokens": 24, "responses_per_prompt": 4},
            "engine": {
                "max_num_seqs": 8,
                "max_model_len": 128,
                "threads": 1,
                "memory_fraction": 0.05,
                "num_drafts": 3,
                "replicas": 2,
                "resource": "engines",
            },
            "heads": {"num_heads": 3, "warm_up_tokens": 0},
            "companion": {
                "wait": True,
                "learning_rate": 3e-3,  # Not too quick: versions have to go on after the loss.
                "batch_positions": 256,
                "workers": 2,
                "resource": "companion",
            },
            "ppo": {
                "steps": STEPS,
                "prompts_per_step": 16,
                "micro_batch_size": 16,
                "actor_learning_rate": 1e-4,
                "reward": "even_reward:even",
                "checkpoint_every": None,
                "threads": 1,
            },
        }
    )
    progress = LosesANode(three_nodes)
    monkeypatch.setattr("medusa_ppo.ppo.session.make_engine", progress.keep)

    summary = run_ppo(config, progress)

    steps = read_run(config.run_dir).steps
    assert (
        progress.lost
        and summary["status"] == "finished"
        and [s[names.STEP] for s in steps] == list(range(STEPS))
    )
    engines = [sum(tokens > 0 for tokens in s[names.TOKENS_PER_ENGINE]) for s in steps]
    workers = [s[names.COMPANION_WORKERS] for s in steps]
    versions = [s[names.HEADS_VERSION] for s in steps]
    assert engines[0] == 2 and workers[0] == 2, "everybody begins"
    # The leader begins anew, alone or waiting for the second worker, as Ray misses the node.
    assert 1 in engines[LOST_AT:BACK_AT] and steps[-1][names.COMPANION_RESTARTS] >= 1, (
        "half of it is lost"
    )
    assert engines[-1] == 2 and workers[-1] == 2, "everybody is back"
    assert versions == sorted(versions) and versions[-1] > versions[LOST_AT], "versions go on"
    assert [s[names.POLICY_VERSION] for s in steps] == list(range(STEPS))
    assert steps[-1][names.MAL_SERVING] > steps[0][names.MAL_SERVING] + 0.2
    low, high = sorted(steps[-1][names.MAL_PER_ENGINE])
    assert low > steps[0][names.MAL_SERVING], (low, high)
    assert max(s[names.LOGPROB_GAP] for s in steps) < 1e-3, (
        "the new engine has the actor of its step"
    )
    assert steps[-1][names.COMPANION_DROPPED] <= BACK_AT - LOST_AT, (
        "only what came while the leader waited for the second worker"
    )
