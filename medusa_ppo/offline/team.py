"""Data-parallel training: workers in processes of Ray, on one machine or a cluster, that sum their gradients before each step.

    the command (no tensors of its own)
      |  groups of the part            report, tokens
      +--> worker 0 --+  counts, gradients: summed in place by Gloo
      +--> worker 1 --+  everything else is the same in all of them
      +--> ...      --+

Every worker takes the same optimizer steps on the same gradients, so all hold the same heads; the first one judges and saves them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
import torch
import torch.distributed as dist
from ray.exceptions import RayError

from heads.acceptance import ReplayResult
from heads.config import HeadsConfig
from heads.errors import ConfigError, RunError
from heads.modules import MedusaHeads
from medusa_ppo.companion.team import GlooTeam, open_place
from medusa_ppo.companion.trainer import TrainReport
from medusa_ppo.offline.collect import Sample
from medusa_ppo.offline.options import TrainOptions
from medusa_ppo.offline.worker import State, Worker
from medusa_ppo.runtime import local_ray


@contextmanager
def running_workers(options: TrainOptions, training: list[Sample], held_out: list[Sample]) -> Iterator[Worker | Workers]:
    """One worker in this process, or several in processes of their own, for the time of the block."""
    if options.workers == 1:
        yield Worker(options, training, held_out)
        return
    with local_ray(cpus=options.workers):
        workers = Workers(options, training, held_out)
        try:
            yield workers
        finally:
            workers.close()


class WorkerHost:
    """What a Ray process holds: meets the others, then is a worker."""

    def __init__(self, rank: int, size: int, threads: int) -> None:
        torch.set_num_threads(threads)
        self._rank, self._size = rank, size
        self._store: dist.Store | None = None
        self._worker: Worker | None = None

    def meet_here(self) -> tuple[str, int]:
        """Open the place where the workers find each other; its address."""
        self._store, place = open_place(ray.util.get_node_ip_address(), self._size)
        return place

    def start(self, place: tuple[str, int], options: TrainOptions, training: list[Sample], held_out: list[Sample]) -> None:
        rank, size = self._rank, self._size
        team = GlooTeam(self._store, rank, size) if self._store else GlooTeam.at(place, rank, size)
        self._worker = Worker(options, training, held_out, rank=rank, team=team)

    def call(self, method: str, *arguments: Any) -> Any:
        """Of the worker."""
        return getattr(self._worker, method)(*arguments)

    def facts(self) -> tuple[int, int, HeadsConfig, torch.Tensor]:
        assert self._worker is not None, "start comes first"
        return self._worker.groups, self._worker.tokens, self._worker.heads().config, self._worker.lm_head_VD

    def parts(self) -> int:
        assert self._worker is not None, "start comes first"
        return self._worker.parts


class Workers:
    """Several workers that look like one; attributes as `Worker`."""

    def __init__(self, options: TrainOptions, training: list[Sample], held_out: list[Sample]) -> None:
        size = options.workers
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        threads = max(1, len(os.sched_getaffinity(0)) // size)
        kind: Any = ray.remote(num_cpus=1, num_gpus=1 if gpus else 0)(WorkerHost)
        self._hosts = [kind.remote(rank, size, threads) for rank in range(size)]
        place = self._get(self._hosts[0].meet_here.remote())
        shared = ray.put(training)
        self._get([host.start.remote(place, options, shared, held_out if not rank else []) for rank, host in enumerate(self._hosts)])
        self.groups, self.tokens, self._config, self.lm_head_VD = self._get(self._hosts[0].facts.remote())
        if self.groups < size:
            expected = f"at most {self.groups}"
            raise ConfigError("There is too little text for so many workers.", given=size, expected=expected, do="Use fewer --workers.")

    @property
    def parts(self) -> int:
        return self._get(self._hosts[0].parts.remote())

    def train(self, dealt: list[list[int]], number: int) -> tuple[TrainReport, int]:
        done = self._all("train", dealt, number)
        return done[0][0], sum(tokens for _, tokens in done)

    def judge(self) -> ReplayResult:
        return self._get(self._hosts[0].call.remote("judge"))

    def heads(self) -> MedusaHeads:
        heads = MedusaHeads(self._config)
        state = self.state_dict()
        heads.load_trainable_state({name[6:]: value for name, value in state.items() if name.startswith("heads.")})
        return heads

    def state_dict(self) -> State:
        return self._get(self._hosts[0].call.remote("state_dict"))

    def load_state_dict(self, state: State) -> None:
        self._all("load_state_dict", ray.put(state))

    def close(self) -> None:
        """End all processes."""
        for host in self._hosts:
            ray.kill(host)

    def _all(self, method: str, *arguments: Any) -> list[Any]:
        return self._get([host.call.remote(method, *arguments) for host in self._hosts])

    def _get(self, references: Any) -> Any:
        try:
            return ray.get(references)
        except RayError as error:
            raise RunError(
                "A worker of the training failed.",
                given=f"{type(error).__name__}: {error}",
                expected="all workers up to the end",
                do="The same command goes on from the last save; use fewer --workers if memory was short.",
            ) from error
