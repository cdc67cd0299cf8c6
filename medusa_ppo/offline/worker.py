"""One process of a training: its share of the sequences, its copy of the heads, and the judging of them."""

from __future__ import annotations

import torch

from heads.acceptance import ReplayResult
from heads.config import HeadsConfig
from heads.modules import MedusaHeads
from medusa_ppo.actors.hf import DTYPES, embedding_weight, lm_head_weight, load_actor
from medusa_ppo.companion.gate import replay
from medusa_ppo.companion.team import Team
from medusa_ppo.companion.trainer import HeadsTrainer, TrainReport, cosine_schedule
from medusa_ppo.config import CompanionConfig
from medusa_ppo.offline.collect import Sample
from medusa_ppo.offline.device import compute_dtype, on_device, training_device
from medusa_ppo.offline.hidden import HiddenReader, HiddenStates, read_all
from medusa_ppo.offline.options import TrainOptions

State = dict[str, torch.Tensor]


class Worker:
    """Trains on groups of sequences; several of them, each with other groups, take every optimizer step together.

    Attributes:
        groups: number of groups that all the sequences make, the other workers' included.
        tokens: written tokens of all sequences.
        lm_head_VD: the actor's lm_head, float32 on the CPU, for the checkpoint.
    """

    def __init__(
        self, options: TrainOptions, training: list[Sample], held_out: list[Sample], *, rank: int = 0, team: Team | None = None
    ) -> None:
        """
        Args:
            training: all sequences; the groups are the same in every worker.
            held_out: what heads are judged on; only the first worker reads it.
            rank, team: which one of several this is, and the others.
        """
        self._options, self._rank, self._team = options, rank, team
        model = on_device(load_actor(options.model, compute_dtype(options.dtype)))
        reader = HiddenReader(model, options.temperature, DTYPES[options.dtype])
        self._holdout = read_all(reader, held_out, lambda *_: None) if rank == 0 else None
        self._states = HiddenStates(reader, training, options.cache_bytes, options.seed)
        self.groups, self.tokens = len(self._states.groups), self._states.tokens
        self.lm_head_VD = lm_head_weight(model).detach().float().cpu()
        lm_head_VD, embedding_VD = lm_head_weight(model).detach(), embedding_weight(model).detach()
        torch.manual_seed(options.seed)
        self._trainer = HeadsTrainer(
            MedusaHeads(HeadsConfig(lm_head_VD.shape[1], lm_head_VD.shape[0], options.num_heads, options.kind)),
            lm_head_VD,
            CompanionConfig(
                loss=options.loss,
                learning_rate=options.learning_rate,
                batch_positions=options.batch_positions,
                accumulate=options.accumulate,
                epochs=1,
            ),
            options.seed,
            embedding_VD=embedding_VD,
            device=training_device(),
            schedule=cosine_schedule(options.epochs * -(-self.tokens // options.step_positions)),
            dtype=compute_dtype(options.dtype),
            team=team,
        )

    @property
    def parts(self) -> int:
        """Parts that the trainer has seen, whether they were trained or given up."""
        return self._trainer.batches_trained + self._trainer.batches_skipped

    def train(self, dealt: list[list[int]], number: int) -> tuple[TrainReport, int]:
        """Train on this worker's groups of a part.

        Args:
            dealt: groups of each worker.
            number: of the part, over all epochs.

        Returns:
            A report, and the written tokens of this worker's groups.
        """
        if self._team is not None:
            # Only the first worker's state is saved: the others' order of positions must follow from the part alone.
            self._trainer.reseed(((self._options.seed * 1_000_003 + number) * 1_009 + self._rank) % 2**63)
        batch = self._states.batch(dealt[self._rank])
        return self._trainer.train_batch(batch), int(batch.response_ids_M.numel())

    def judge(self) -> ReplayResult:
        """Replay of the heads on the holdout, with the drafts that their loss aims at."""
        assert self._holdout is not None, "only the first worker judges"
        return replay(
            self._trainer.heads,
            self._holdout,
            self._trainer.lm_head_VD,
            embedding_VD=self._trainer.embedding_VD,
            draft_temperature=self._options.draft_temperature,
        )

    def heads(self) -> MedusaHeads:
        """The heads, to be saved at once."""
        return self._trainer.heads

    def state_dict(self) -> State:
        return self._trainer.state_dict()

    def load_state_dict(self, state: State) -> None:
        self._trainer.load_state_dict(state)

    def close(self) -> None:
        """Nothing to give back."""


def deal_parts(groups: int, parts: int, workers: int, seed: int, epoch: int) -> list[list[list[int]]]:
    """The groups of each part of an epoch, by worker: a function of seed and epoch alone.

    A worker always has the same groups, so that its cache holds what it needs; each epoch has them in a new order.
    """
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
    shares = []
    for rank in range(workers):
        own = torch.arange(rank, groups, workers)
        shares.append([part.tolist() for part in own[torch.randperm(own.numel(), generator=generator)].tensor_split(parts)])
    return [[share[part] for share in shares] for part in range(parts)]
