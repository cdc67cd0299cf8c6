"""What several modules share: where engines serve, a small local Ray for each module of tests that
needs one, workers that meet, a companion's double.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from medusa_ppo.companion.collector import BatchCollector
from medusa_ppo.companion.positions import EarlySample
from medusa_ppo.companion.wire import TableRows
from medusa_ppo.contract.rollout_batch import RolloutBatch
from medusa_ppo.contract.rollouts import Rollouts
from medusa_ppo.contract.status import CompanionStatus, PublishedHeads
from medusa_ppo.runtime.rendezvous import LOOPBACK, Meeting
from medusa_ppo.vllm_plugin.vllm_versions import is_cpu_build
from tests.conftest import GPUS

CPU, EAGER, GRAPHS = "cpu", "cuda-eager", "cuda-graphs"
cpu_alone = pytest.mark.parametrize("serving", [CPU], indirect=True)
"""For a test of something that only vLLM's CPU build has."""
eager_on_a_gpu = pytest.mark.parametrize(
    "serving", [CPU, pytest.param(EAGER, marks=pytest.mark.gpu)], indirect=True
)
"""For a test that starts its own engines and does not depend on CUDA graphs."""
on_two_gpus = pytest.mark.parametrize(
    "serving", [CPU, pytest.param(EAGER, marks=GPUS.marks)], indirect=True
)


@pytest.fixture(
    scope="module",
    params=[CPU, *(pytest.param(name, marks=pytest.mark.gpu) for name in (EAGER, GRAPHS))],
)
def serving(request: pytest.FixtureRequest) -> str:
    """Where an engine serves: on the CPU, or on a GPU eagerly or with CUDA graphs. Each test of an
    engine runs once on the CPU and twice on a GPU (`make test-gpu`).
    """
    if (request.param == CPU) == is_cpu_build():
        return request.param
    if request.param == CPU:
        pytest.skip(f"this build of vLLM does not serve on {request.param}")
    pytest.fail(
        "vLLM's CPU build leaves the GPU idle. given: -m gpu  expected: vLLM's CUDA build  do this:"
        " make setup STACK=cuda"
    )


@pytest.fixture(scope="module")
def ray_session() -> Iterator[None]:
    """A local Ray with two CPUs and 300 MB of shared memory, without dashboard; ended with the
    module, since others start their own.
    """
    import ray

    started = not ray.is_initialized()
    if started:
        ray.init(
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=300 * 1024**2,
            logging_level=logging.ERROR,
            log_to_driver=False,
            configure_logging=False,
            _system_config={
                "free_objects_period_milliseconds": 10
            },  # What nobody holds is gone at once.
        )
    yield
    if started:
        ray.shutdown()


@pytest.fixture
def in_a_team() -> Callable[..., list[Any]]:
    """in_a_team(work, size=2): `work(team, rank)` of so many workers, in threads, over real
    sockets.
    """
    return _in_a_team


def _in_a_team(work: Callable[[Meeting, int], Any], size: int = 2) -> list[Any]:
    first = Meeting.open(LOOPBACK, size, timeout_s=30.0)

    def run(rank: int) -> Any:
        team = (Meeting(first.place.seen_by(rank)) if rank else first).join()
        try:
            return work(team, rank)
        finally:
            team.leave()

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


class RecordingCompanion:
    """Stands for the companion where a test looks at what the plugin hands over and does with the
    answers.
    """

    def __init__(self) -> None:
        self.batches: list[RolloutBatch] = []
        self.rows: list[TableRows | None] = []
        self.tables: list[tuple[torch.Tensor, int]] = []
        self.offer: PublishedHeads | None = None
        self.drained = 0
        self.left_out = 0
        self.most = 1 << 20
        self.train_s = 0.0
        # What else it reports.
        self.reported: dict[str, Any] = {}
        self.shared = True
        self.takes_turns = False
        self.turns: list[float] = []
        self.gave_way: list[bool] = []
        self.taken_back: list[tuple[int, dict[str, torch.Tensor], int]] = []

    def go_on_from(self, version: int, state: dict[str, torch.Tensor], serving: int) -> None:
        self.taken_back.append((version, state, serving))

    def give_way(self, wanted: bool) -> None:
        self.gave_way.append(wanted)

    def take_turn(self, seconds: float) -> bool:
        self.turns.append(seconds)
        return True

    def count_left_out(self, tokens: int) -> None:
        self.left_out += tokens

    def most_rows(self) -> int:
        return self.most

    def begin_sample(self, number: int) -> EarlySample:
        return EarlySample(self.most_rows(), 0.2, number, ahead=4)

    def collector(self, rollouts: Rollouts, sample: EarlySample | None = None) -> BatchCollector:
        tokens = sum(len(response.token_ids) for response in rollouts.responses)
        sample = sample or self.begin_sample(rollouts.policy_version)
        return BatchCollector(rollouts, sample.unless_all_fit(tokens))

    def submit(self, batch: RolloutBatch, rows: TableRows | None = None) -> None:
        self.batches.append(batch)
        self.rows.append(rows)

    def update_lm_head(
        self,
        lm_head_VD: torch.Tensor,
        policy_version: int,
        *,
        embedding_VD: torch.Tensor | None = None,
    ) -> None:
        self.tables.append((lm_head_VD.clone(), policy_version))

    def newest(self, after_version: int, timeout_s: float = 0.5) -> PublishedHeads | None:
        return self.offer if self.offer is not None and self.offer.version > after_version else None

    def status(self, timeout_s: float = 2.0) -> CompanionStatus:
        return CompanionStatus(
            batches_received=len(self.batches),
            train_s=self.train_s,
            trained_tokens=11,
            last_loss=float("nan"),
            **self.reported,
        )

    def drain(self, timeout_s: float) -> bool:
        self.drained += 1
        return True

    def close(self) -> None:
        self.offer = None
