"""One process of a Megatron actor: its part of actor and reference, and its share of every pass of PPO.

Every rank gets the same calls in the same order. Sequences are dealt to data-parallel replicas; the ranks of a replica run the same
micro batches. The loss is divided by the tokens of the whole minibatch, and gradients are added up over replicas: how many there are
changes the result by rounding only. Weights, moments and losses are float32, as in the loop's own learner.

Shape letters: S sequences, R response positions, B sequences of this replica, T tokens, D hidden, M response tokens, V vocabulary.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import torch
from safetensors import safe_open
from torch import Tensor

from heads.vocabulary import Vocabulary
from medusa_ppo.actors.megatron import MegatronActor, MegatronTap
from medusa_ppo.actors.megatron_layout import LlamaSizes
from medusa_ppo.actors.megatron_model import RankModel, causal_inputs, start_parallel, stop_parallel
from medusa_ppo.config import RunConfig
from medusa_ppo.engines.actor_sync import BUCKET_BYTES
from medusa_ppo.meeting import Meeting, Place
from medusa_ppo.ppo.batch import MicroBatch, PolicyScores, PPOBatch, Scores
from medusa_ppo.ppo.learner import UpdateTotals, adamw, minibatches
from medusa_ppo.ppo.models import Support, TokenStats
from medusa_ppo.ppo.shaping import learning_rate_share, set_learning_rate
from medusa_ppo.types import Rollouts, Sampling


def sharded_stats(logits_MV: Tensor, ids_M: Tensor, vocabulary: Vocabulary, *, entropy: bool = False) -> TokenStats:
    """As `token_stats`, from this rank's logits; the same on every rank. Gradients reach this rank's logits only.

    Args:
        logits_MV: float32, without the vocabulary's padding, at the sampling temperature, and cut to what was sampled from.
        ids_M: the response tokens.
        vocabulary: how the tokens are spread over ranks.
    """
    logprobs_M, entropy_M = _LogprobAndEntropy.apply(logits_MV, ids_M, vocabulary)
    return TokenStats(logprobs_M, entropy_M if entropy else None)


class _LogprobAndEntropy(torch.autograd.Function):
    """log p of the given token, and the entropy of the distribution."""

    @staticmethod
    def forward(ctx: Any, logits_MV: Tensor, ids_M: Tensor, vocabulary: Vocabulary) -> tuple[Tensor, Tensor]:
        logprobs_MV = vocabulary.log_softmax(logits_MV)
        entropy_M = -vocabulary.total(logprobs_MV.exp() * logprobs_MV)
        ctx.save_for_backward(logprobs_MV, ids_M, entropy_M)
        ctx.vocabulary = vocabulary
        return vocabulary.pick(logprobs_MV, ids_M), entropy_M

    @staticmethod
    def backward(ctx: Any, picked_M: Tensor, entropy_grad_M: Tensor) -> tuple[Tensor, None, None]:
        logprobs_MV, ids_M, entropy_M = ctx.saved_tensors
        mass_MV = logprobs_MV.exp()
        grad_MV = -mass_MV * (picked_M[:, None] + entropy_grad_M[:, None] * (logprobs_MV + entropy_M[:, None]))
        return ctx.vocabulary.add_at(grad_MV, ids_M, picked_M), None, None


WEIGHTS = "weights"
TIMEOUT_S = 600.0
MOMENTS = ("exp_avg", "exp_avg_sq")
CLIP_EPSILON = 1e-6  # As torch.nn.utils.clip_grad_norm_.


@dataclass(frozen=True)
class RankScores:
    """What the rank that reports for a replica hands to the loop.

    Attributes:
        policy: of the whole batch's shape, zero outside of this replica's sequences.
        sequences: B indices into the rollout batch.
        hidden_BRD: the actor's final hidden states that predict each response token, zero behind the last; None: not asked for.
    """

    policy: PolicyScores
    sequences: tuple[int, ...]
    hidden_BRD: Tensor | None


class ActorRank:
    """Lives in a Ray actor. `start` comes first, on all ranks at once, after `meet_here` on the first."""

    def __init__(self, rank: int, path: str, config: RunConfig, with_embedding: bool) -> None:
        """
        Args:
            rank: 0 to tensor x pipeline x data parallel - 1.
            path: folder of the actor's checkpoint; the reference stays what is there.
            config: the run's.
            with_embedding: `tables` brings the input embedding too.
        """
        self._rank, self._path, self._config, self._with_embedding = rank, path, config, with_embedding
        self._meeting: Meeting | None = None
        self._support = Support(Sampling())  # Of the batch that was scored last.

    def meet_here(self) -> Place:
        """Open the place where the ranks find each other."""
        self._meeting = Meeting.open(ray.util.get_node_ip_address(), self._config.actor.ranks, timeout_s=TIMEOUT_S)
        return self._meeting.place

    def start(self, place: Place) -> None:
        section = self._config.actor
        if section.imports:
            importlib.import_module(section.imports)
        torch.set_num_threads(self._config.ppo.threads or 1)
        self._meeting = self._meeting or Meeting(place.seen_by(self._rank))
        start_parallel(self._meeting, section.tensor_parallel, section.pipeline_parallel)
        device, sizes = torch.device("cuda" if torch.cuda.is_available() else "cpu"), LlamaSizes.read(self._path)
        self._actor = RankModel(sizes, self._path, trained=True, device=device)
        self._reference = RankModel(sizes, self._path, trained=False, device=device)
        self._view = MegatronActor(self._actor.model, sizes.vocab, with_embedding=self._with_embedding)
        self._optimizer = adamw(list(self._actor.model.parameters()), self._config.ppo.actor_learning_rate)

    # ---- passes ---------------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def score(self, rollouts: Rollouts, pad_id: int, sampling: Sampling, tapped: bool) -> RankScores | None:
        """Passes of actor and reference over this replica's sequences; the answer comes from the rank that reports."""
        batch = PPOBatch(rollouts, self._actor.device, pad_id)
        self._support = Support(sampling)
        found, micros = PolicyScores.zeros(batch), self._micros(batch, range(len(batch)))
        with self._view.tap() if tapped else contextlib.nullcontext() as tap:
            self._actor.run(
                [causal_inputs(micro.input_ids_BT) for micro in micros],
                lambda n, logits_BTV: found.put(batch, micros[n], self._stats(micros[n], logits_BTV, sampling, entropy=True)),
            )
        self._reference.run(
            [causal_inputs(micro.input_ids_BT) for micro in micros],
            lambda n, logits_BTV: batch.unpack(self._stats(micros[n], logits_BTV, sampling).logprobs_M, micros[n], found.reference_SR),
        )
        if not self._view.reports:
            return None
        sequences = tuple(s for micro in micros for s in micro.sequences)
        return RankScores(found, sequences, _response_states(tap, batch, sequences) if tap is not None and sequences else None)

    def update(self, rollouts: Rollouts, pad_id: int, scores: Scores, sampling: Sampling, step: int) -> UpdateTotals | None:
        """All optimizer steps of one PPO update; the sums over this replica's sequences from the rank that reports.

        A step whose gradient is not finite is left out, on all ranks.
        """
        batch, config = PPOBatch(rollouts, self._actor.device, pad_id), self._config.ppo
        totals = UpdateTotals()
        set_learning_rate(self._optimizer, learning_rate_share(config, step) * config.actor_learning_rate)
        for sequences in minibatches(scores.sequences, config, self._config.seed, step):
            tokens, micros = int(batch.lengths_S[sequences].sum()), self._micros(batch, sequences)

            def loss(n: int, logits_BTV: Tensor, micros: list[MicroBatch] = micros, tokens: int = tokens) -> Tensor:
                stats = self._stats(micros[n], logits_BTV, sampling, entropy=config.entropy_coefficient > 0)
                return totals.policy_loss_of(batch, scores, micros[n], stats, config) / tokens

            self._actor.clear_gradients()
            self._actor.run([causal_inputs(micro.input_ids_BT) for micro in micros], loss, backward=True)
            norm = self._actor.gather_gradients()
            totals.tokens += tokens
            if not totals.norms.sound(norm):
                continue
            for parameter in self._actor.model.parameters():
                assert parameter.grad is not None, "gather_gradients puts it there"
                parameter.grad.mul_(min(1.0, config.clip_norm / (norm + CLIP_EPSILON)))
            self._optimizer.step()
        return totals if self._view.reports else None

    def _micros(self, batch: PPOBatch, sequences: Sequence[int]) -> list[MicroBatch]:
        """This replica's micro batches: every n-th sequence by length, so that replicas have about the same to do.

        Where tokens were cut it is every n-th of the whole batch: only the replica that scored a sequence knows what was left.
        """
        dealt = range(len(batch)) if self._support.cuts else sequences
        share = sorted(dealt, key=lambda s: (batch.total_lengths[s], s))[self._actor.replica :: self._actor.replicas]
        wanted = set(sequences)
        size = self._config.ppo.micro_batch_size or self._config.ppo.minibatch_size
        return list(batch.micro_batches([s for s in share if s in wanted], size))

    def _stats(self, micro: MicroBatch, logits_BTV: Tensor, sampling: Sampling, *, entropy: bool = False) -> TokenStats:
        vocabulary = self._view.vocabulary
        scaled_MV = vocabulary.own_rows(logits_BTV[micro.predict_mask_BT], dim=1).float() / sampling.temperature
        return sharded_stats(self._support.cut(scaled_MV, micro, vocabulary), micro.response_ids_M, vocabulary, entropy=entropy)

    # ---- weights --------------------------------------------------------------------------------------------------------------

    def tables(self) -> tuple[Tensor, Tensor | None] | None:
        """The whole lm_head and (when wanted) embedding, from the first replica's rank that reports."""
        if self._actor.replica:
            return None
        self._view.refresh()
        if not self._view.reports:
            return None
        return self._view.lm_head_VD, self._view.embedding_VD if self._with_embedding else None

    def give_out(self, what: str, dtype: torch.dtype) -> Iterator[dict[str, Tensor]]:
        """This stage's tensors by the checkpoint's names, some at a time: `weights`, or one of AdamW's moments."""
        if self._actor.replica:
            return
        shards: dict[str, Tensor] = dict(self._actor.given_out())
        if what != WEIGHTS:
            shards = {name: self._optimizer.state[parameter][what] for name, parameter in self._actor.given_out().items()}
        yield from self._actor.whole_tensors(shards, dtype, BUCKET_BYTES)

    def steps(self) -> float:
        """Optimizer steps so far."""
        return max((float(state["step"]) for state in self._optimizer.state.values()), default=0.0)

    def load(self, folder: str) -> None:
        """Read this rank's part of what a learner saved. The reference stays."""
        self._actor.load(Path(folder) / "actor.safetensors")
        self._optimizer.state.clear()
        file = Path(folder) / "actor_optimizer.safetensors"
        with safe_open(file, "pt") as handle:
            steps = {name.rpartition("/")[0]: handle.get_tensor(name) for name in handle.keys() if name.endswith("/step")}  # noqa: SIM118
        if not steps:
            return
        parameters = self._actor.parameters()
        for moment in MOMENTS:
            for name, shard in self._actor.read_shards(file, list(parameters), f"/{moment}"):
                self._optimizer.state[parameters[name]][moment] = shard.to(self._actor.device).contiguous()
        for parameter in parameters.values():
            self._optimizer.state[parameter]["step"] = next(iter(steps.values())).to(self._actor.device).clone()

    def stop(self) -> None:
        stop_parallel()


def _response_states(tap: MegatronTap, batch: PPOBatch, sequences: Sequence[int]) -> Tensor:
    """`hidden_BRD` in the actor's dtype, on the CPU: the state before each response token."""
    hidden_BTD = tap.hidden_BTD
    out_BRD = torch.zeros(len(sequences), int(batch.lengths_S[list(sequences)].max()), hidden_BTD.shape[-1], dtype=hidden_BTD.dtype)
    for row, s in enumerate(sequences):
        length = int(batch.lengths_S[s])
        first = batch.total_lengths[s] - length - 1
        out_BRD[row, :length] = hidden_BTD[row, first : first + length].cpu()
    return out_BRD
