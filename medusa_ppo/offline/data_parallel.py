"""Data-parallel training: workers in Ray processes, on one machine or a cluster, each on its own
groups, with torch's DDP.

    the command (holds no tensors)
      |  groups of the part            report, tokens
      +--> worker 0 --+  counts, gradients: summed in place
      +--> worker 1 --+  everything else is the same in all of them
      +--> ...      --+

Every worker takes the same optimizer steps on the same gradients, so all hold the same heads; the
first one judges and saves them.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
import torch
from ray.exceptions import RayError
from transformers import AutoConfig

from heads.acceptance import ReplayResult
from heads.errors import ConfigError, RunError
from heads.modules import MedusaHeads
from medusa_ppo.actors.hf import DTYPES, embedding_weight, lm_head_weight, load_actor
from medusa_ppo.companion.gate import Served, fit_temperatures, replay
from medusa_ppo.companion.trainer import HeadsTrainer, TrainReport
from medusa_ppo.config.companion_section import CompanionConfig
from medusa_ppo.offline.collect import Sample
from medusa_ppo.offline.draft_tokens import draft_ids
from medusa_ppo.offline.hidden import HiddenReader, HiddenStates, read_all
from medusa_ppo.offline.options import TrainOptions
from medusa_ppo.offline.scene import (
    ADAM_STATES,
    FLOAT_BYTES,
    compute_dtype,
    on_device,
    training_device,
)
from medusa_ppo.offline.schedule import TrainingPlan, cosine_schedule
from medusa_ppo.runtime.hardware import usable_cores
from medusa_ppo.runtime.processes import local_ray
from medusa_ppo.runtime.rendezvous import Meeting, Place

State = dict[str, torch.Tensor]
SHARED = ("loss", "learning_rate")
"""Options that set the companion's trainer; its other settings keep their defaults."""
START_S = 600.0
"""How long the workers may take to start, which they can't while others hold Ray's GPUs."""


class TrainingWorker:
    """Trains on groups of sequences. Several workers, each with its own groups, take every
    optimizer step together.

    Attributes:
        groups: number of groups, including the other workers'.
        plan: parts and optimizer steps of the whole training.
        tokens: written tokens of all sequences.
        lm_head_VD: the actor's lm_head, float32 on the CPU, for the checkpoint; None for kinds that
            stock vLLM, its only reader, can't serve.
    """

    def __init__(
        self,
        options: TrainOptions,
        training: list[Sample],
        held_out: list[Sample],
        *,
        rank: int = 0,
        team: Meeting | None = None,
    ) -> None:
        """
        Args:
            training: all sequences; the groups are the same in every worker.
            held_out: samples that heads are judged on; only the first worker reads it.
            rank, team: this worker's number among several, and the others.
        """
        self._options = options
        self._rank = rank
        self._team = team
        model = on_device(load_actor(options.model, compute_dtype(options.dtype)))
        # States keep the requested dtype even if matrix products run in float32: the option is also
        # there to halve the cache.
        reader = HiddenReader(model, options.temperature, DTYPES[options.dtype])
        # Only the first worker judges; the others save the memory.
        self._holdout = read_all(reader, held_out, lambda *_: None) if rank == 0 else None
        self._by_model = all(sample.by_model for sample in held_out)
        self._states = HiddenStates(reader, training, options.cache_bytes, options.seed)
        self.groups = len(self._states.groups)
        self.tokens = self._states.tokens
        self.plan = TrainingPlan.of(options, self._states.positions, self.tokens)
        lm_head_VD = lm_head_weight(model).detach()
        self.lm_head_VD = lm_head_VD.float().cpu() if options.kind == "medusa" else None
        embedding_VD = embedding_weight(model).detach()
        # New heads draw from torch's own generator: all workers must begin with the same ones.
        torch.manual_seed(options.seed)
        shared = {name: getattr(options, name) for name in SHARED}
        sizes = options.sizes(lm_head_VD.shape[1], lm_head_VD.shape[0])
        self._trainer = HeadsTrainer(
            MedusaHeads(sizes),
            lm_head_VD,
            CompanionConfig(**shared, batch_positions=options.worker_positions, epochs=1),
            options.seed,
            micro_positions=options.batch_positions,
            embedding_VD=embedding_VD,
            device=training_device(),
            schedule=cosine_schedule(self.plan.steps),
            dtype=compute_dtype(options.dtype),
        )
        # The same in every worker, since all have all sequences.
        self._trainer.ids_W = draft_ids(
            sizes, options.draft_vocab, (sample.ids for sample in training)
        )
        self._served = Served(options.draft_temperature, ids_W=self._trainer.ids_W)
        if team is not None:
            self._trainer.join(team)

    @property
    def parts(self) -> int:
        """Parts that the trainer has seen, whether trained on or given up."""
        return self._trainer.batches_trained + self._trainer.batches_skipped

    def train(self, dealt: list[list[int]], number: int) -> tuple[TrainReport, int]:
        """Train on this worker's groups of a part.

        Args:
            dealt: groups of each worker.
            number: number of the part, over all epochs.

        Returns:
            A report, and the written tokens of this worker's groups.
        """
        if self._team is not None:
            # Only the first worker's state is saved, so the other workers' order of positions must
            # depend on nothing but the part.
            self._trainer.generator.manual_seed(
                # Primes keep the values of neighbouring seeds, parts and ranks from colliding.
                ((self._options.seed * 1_000_003 + number) * 1_009 + self._rank) % 2**63
            )
        batch = self._states.batch(dealt[self._rank])
        before = self._trainer.state_dict()
        try:
            report = self._trainer.train_batch(batch, steps=self.plan.steps_of(dealt))
        except BaseException:
            # A signal may have stopped it between two steps. Training will resume at the beginning
            # of the part, so the state must be that of its beginning.
            self._trainer.load_state_dict(before)
            raise
        return report, int(batch.response_ids_M.numel())

    def judge(self) -> ReplayResult:
        """Replay the heads on the holdout, with the kind of drafts that their loss trains for."""
        assert self._holdout is not None, "only the first worker judges"
        return replay(
            self._trainer.heads,
            self._holdout,
            self._trainer.lm_head_VD,
            embedding_VD=self._trainer.embedding_VD,
            served=self._served,
        )

    def heads(self) -> MedusaHeads:
        """A copy of the heads on the CPU, with draft temperatures fitted to the holdout if the
        model wrote it.
        """
        assert self._holdout is not None, "only the first worker judges"
        # A copy, because training continues with the current temperatures.
        heads = copy.deepcopy(self._trainer.heads)
        trainer = self._trainer
        # Replay weighs drafts by how often the model would write them. Where others wrote the text
        # it prefers temperatures that are worse than none for the model's own.
        if self._by_model:
            fit_temperatures(
                heads,
                self._holdout,
                trainer.lm_head_VD,
                embedding_VD=trainer.embedding_VD,
                served=self._served,
            )
        return heads.cpu()

    def state_dict(self) -> State:
        return self._trainer.state_dict()

    def load_state_dict(self, state: State) -> None:
        self._trainer.load_state_dict(state)


def gpus_for_workers(workers: int) -> int:
    """GPUs that each of several workers reserves: one, or none where there are none at all. Called
    before any work, because Ray would wait for ever for a GPU that it doesn't have.

    Raises:
        ConfigError: Ray has too few GPUs or CPUs.
    """
    here = torch.cuda.device_count() if torch.cuda.is_available() else 0
    offered: dict[str, float] = {"GPU": here}
    # Our own Ray offers the GPUs of this machine, and as many CPUs as there are workers.
    if ray.is_initialized() or os.environ.get("RAY_ADDRESS"):
        with local_ray():
            found = ray.cluster_resources()
        offered = {name: found.get(name, 0.0) for name in ("GPU", "CPU")}
    # Without GPUs in Ray, workers would still see those of this machine and share the first one.
    gpus = 1 if offered["GPU"] or here else 0
    if not gpus:
        del offered["GPU"]
    for name, amount in offered.items():
        if amount < workers:
            raise ConfigError(
                f"There are too few {name}s for this many workers.",
                given=f"--workers {workers}; Ray has {amount:g} {name}s",
                expected=f"a {name} for each worker",
                do="Use fewer --workers, or join a larger Ray (RAY_ADDRESS).",
            )
    return gpus


def shared_bytes(options: TrainOptions) -> int:
    """Bytes that workers hand over through Ray's store at the same time, which would spill them to
    a file if it were smaller: the trainer's state, the best heads and the actor's lm_head.
    """
    model = AutoConfig.from_pretrained(options.model).get_text_config()
    config = options.sizes(model.hidden_size, model.vocab_size)
    heads = sum(math.prod(shape) for shape in config.tensor_shapes().values())
    state = (1 + ADAM_STATES) * heads
    return FLOAT_BYTES * (state + heads + model.vocab_size * model.hidden_size)


@contextmanager
def running_workers(
    options: TrainOptions, training: list[Sample], held_out: list[Sample]
) -> Iterator[TrainingWorker | TrainingWorkers]:
    """One worker in this process, or several in separate processes, during the block."""
    if options.workers == 1:
        yield TrainingWorker(options, training, held_out)
        return
    with local_ray(cpus=options.workers, queue_bytes=shared_bytes(options)):
        workers = TrainingWorkers(options, training, held_out)
        try:
            yield workers
        finally:
            workers.close()


class WorkerHost:
    """A worker in a Ray process: it first meets the others."""

    def __init__(self, rank: int, size: int, threads: int) -> None:
        torch.set_num_threads(threads)
        self._rank = rank
        self._size = size
        self._meeting: Meeting | None = None

    def meet_here(self) -> Place:
        """Open the place where the workers find each other."""
        self._meeting = Meeting.open(ray.util.get_node_ip_address(), self._size)
        return self._meeting.place

    def start(
        self, place: Place, options: TrainOptions, training: list[Sample], held_out: list[Sample]
    ) -> None:
        # The first worker has already opened the place, in `meet_here`.
        self._meeting = (self._meeting or Meeting(place.seen_by(self._rank))).join()
        self._worker = TrainingWorker(
            options, training, held_out, rank=self._rank, team=self._meeting
        )

    def ask(self, name: str, *arguments: Any) -> Any:
        """Call a method of the worker, or read one of its attributes."""
        found = getattr(self._worker, name)
        return found(*arguments) if callable(found) else found


class TrainingWorkers:
    """Several workers behind the interface of one; it has the attributes of `TrainingWorker`."""

    def __init__(
        self, options: TrainOptions, training: list[Sample], held_out: list[Sample]
    ) -> None:
        size = options.workers
        gpus = gpus_for_workers(size)
        # Ray gives a process that reserves one CPU one thread, whatever the machine has.
        threads = max(1, usable_cores() // size)
        kind: Any = ray.remote(num_cpus=1, num_gpus=gpus)(WorkerHost)
        self._hosts = [kind.remote(rank, size, threads) for rank in range(size)]
        self._wait_for_start()
        place = self._get(self._hosts[0].meet_here.remote())
        shared = ray.put(training)
        # Called on all at once, because each waits in `start` for the others.
        self._get(
            [
                host.start.remote(place, options, shared, held_out if not rank else [])
                for rank, host in enumerate(self._hosts)
            ]
        )
        self.groups, self.plan, self.tokens, self.lm_head_VD = (
            self._first(name) for name in ("groups", "plan", "tokens", "lm_head_VD")
        )
        # Checked only now, because the workers cut the groups, from the lengths of all sequences.
        if self.groups < size:
            expected = f"at most {self.groups}"
            raise ConfigError(
                "There is too little text for this many workers.",
                given=size,
                expected=expected,
                do="Use fewer --workers.",
            )

    @property
    def parts(self) -> int:
        return self._first("parts")

    def train(self, dealt: list[list[int]], number: int) -> tuple[TrainReport, int]:
        done = self._all("train", dealt, number)
        return done[0][0], sum(tokens for _, tokens in done)

    def judge(self) -> ReplayResult:
        return self._first("judge")

    def heads(self) -> MedusaHeads:
        return self._first("heads")

    def state_dict(self) -> State:
        return self._first("state_dict")

    def load_state_dict(self, state: State) -> None:
        # Put into Ray's store once for all workers; as an argument it would be copied for each.
        self._all("load_state_dict", ray.put(state))

    def close(self) -> None:
        """End all processes."""
        for host in self._hosts:
            ray.kill(host)

    def _wait_for_start(self) -> None:
        ready = [host.__ray_ready__.remote() for host in self._hosts]
        started, waiting = ray.wait(ready, num_returns=len(ready), timeout=START_S)
        if waiting:
            self.close()
            raise RunError(
                "The training workers did not start.",
                given=f"{len(started)} of {len(ready)} after {START_S:g} s",
                expected="all of them, each with its GPU and CPU of Ray",
                do="End what holds Ray's GPUs or CPUs, or use fewer --workers.",
            )

    def _first(self, name: str) -> Any:
        return self._get(self._hosts[0].ask.remote(name))

    def _all(self, name: str, *arguments: Any) -> list[Any]:
        return self._get([host.ask.remote(name, *arguments) for host in self._hosts])

    def _get(self, references: Any) -> Any:
        try:
            return ray.get(references)
        # Ray also wraps what a worker raised itself.
        except RayError as error:
            raise RunError(
                "A training worker failed.",
                given=f"{type(error).__name__}: {error}",
                expected="all workers run to the end",
                do=(
                    "The same command continues from the last save; use fewer --workers if memory "
                    "was short."
                ),
            ) from error
