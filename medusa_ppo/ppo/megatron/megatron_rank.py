"""One process of a Megatron actor. It holds its part of the actor and the reference, and of the
critic and reward model if actor.roles says so, and does its share of every PPO pass.

The roles keep their memory or take turns with it (ppo.placement), like those in the loop's process;
with `shared` also with an engine on this rank's device, of which the loop tells it.

Every rank gets the same calls in the same order, so all of them also take the same turns. Sequences
are dealt to data-parallel replicas; the ranks of a replica run the same micro batches. The loss is
divided by the number of tokens of the whole minibatch, and gradients are summed over replicas, so
the number of replicas changes the result by rounding only. Trained weights, moments and losses are
float32, as in the loop's own learner; with model.dtype=bfloat16 the model itself is a bfloat16
copy.

Shape letters: S sequences, R response positions, B sequences of this replica, T tokens, P tokens
and predictions of one context-parallel rank, D hidden, M response tokens, V vocabulary.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors import safe_open
from torch import Tensor

from medusa_ppo.actors.hf import DTYPES, load_tokenizer
from medusa_ppo.actors.megatron import MegatronActor
from medusa_ppo.actors.megatron_layout import SCORE, VALUE, LlamaSizes, checkpoint_dtype
from medusa_ppo.actors.megatron_model import (
    RankModel,
    host_group,
    start_parallel,
    stop_parallel,
)
from medusa_ppo.actors.vision import FeatureStore, ImageReader, load_tower
from medusa_ppo.config.run_config import RunConfig
from medusa_ppo.contract.rollouts import Rollouts, Sampling
from medusa_ppo.engines.actor_sync import BUCKET_BYTES
from medusa_ppo.ppo.batch import MicroBatch, PPOBatch, chosen_texts, minibatches
from medusa_ppo.ppo.critic import ValueTotals
from medusa_ppo.ppo.megatron.rank_critic import RankCritic
from medusa_ppo.ppo.megatron.rank_memory import RankResident
from medusa_ppo.ppo.megatron.rank_optimizer import MOMENTS, WEIGHTS, RankOptimizer
from medusa_ppo.ppo.megatron.rank_reward import RankReward
from medusa_ppo.ppo.megatron.rank_share import RankShare
from medusa_ppo.ppo.megatron.sharded_stats import ShardedSupport, sharded_stats
from medusa_ppo.ppo.megatron.sharded_vocabulary import ShardedVocabulary
from medusa_ppo.ppo.optimization import learning_rate_share
from medusa_ppo.ppo.placement import ACTOR, CRITIC, REFERENCE, REWARD, Resident, Turns
from medusa_ppo.ppo.rewards import JudgedTexts
from medusa_ppo.ppo.role_checks import check_room
from medusa_ppo.ppo.role_memory import RANK
from medusa_ppo.ppo.scores import PolicyScores, Scores
from medusa_ppo.ppo.token_stats import TokenStats
from medusa_ppo.ppo.update_totals import UpdateTotals
from medusa_ppo.runtime.processes import own_gpus
from medusa_ppo.runtime.rendezvous import Meeting, Place

TIMEOUT_S = 600.0


@dataclass(frozen=True)
class RankScores:
    """What the reporting rank of a replica returns to the loop.

    Attributes:
        policy: in the whole batch's shape, zero outside this replica's sequences.
        sequences: B indices into the rollout batch.
        states: for each of these, the actor's final hidden states that predict its response tokens,
            if requested, `[states, D]` on the CPU; None: not requested.
    """

    policy: PolicyScores
    sequences: tuple[int, ...]
    states: tuple[Tensor, ...] | None


class ActorRank:
    """Runs in a Ray actor. Call `meet_here` on the first rank, then `start` on all ranks at once,
    before anything else.
    """

    def __init__(
        self,
        rank: int,
        path: str,
        config: RunConfig,
        with_embedding: bool,
        critic_path: str | None = None,
        reward_path: str | None = None,
    ) -> None:
        """
        Args:
            rank: 0 to actor.ranks - 1.
            path: folder of the actor's checkpoint; the reference keeps these weights.
            config: the run's.
            with_embedding: whether `tables` returns the input embedding too.
            critic_path: folder of the checkpoint that a critic here starts from; None: there is
                none here.
            reward_path: folder of a reward model that scores here; None: there is none here.
        """
        self._rank = rank
        self._path = path
        self._critic_path = critic_path
        self._reward_path = reward_path
        self._config = config
        self._with_embedding = with_embedding
        self._meeting: Meeting | None = None
        self._scored: set[int] = set()  # Sequences of the last batch that this replica scored.

    def meet_here(self) -> Place:
        """Open the meeting place of the ranks."""
        self._meeting = Meeting.open(
            ray.util.get_node_ip_address(), self._config.actor.ranks, timeout_s=TIMEOUT_S
        )
        return self._meeting.place

    def start(self, place: Place) -> None:
        section = self._config.actor
        # Before anything is built, because this may replace Megatron's layers.
        if section.imports:
            importlib.import_module(section.imports)
        torch.set_num_threads(self._config.ppo.threads or 1)
        # The first rank already opened it in `meet_here`.
        self._meeting = self._meeting or Meeting(place.seen_by(self._rank))
        start_parallel(self._meeting, section)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if torch.cuda.is_available():
            check_room(self._config, RANK, torch.cuda.get_device_properties(0).total_memory)
        sizes = LlamaSizes.read(self._path)
        ppo = self._config.ppo
        dtype = DTYPES[self._config.model.dtype or "float32"]
        reference_dtype = DTYPES[ppo.reference_dtype] if ppo.reference_dtype else dtype
        build = functools.partial(RankModel, section=section, device=device)
        self._turns = Turns(ppo.placement)
        self._actor = build(sizes, self._path, trained=True, dtype=dtype, recompute=ppo.recompute)
        self._optimizer = self._optimizer_of(
            self._actor, self._path, ppo.actor_learning_rate, dtype
        )
        self._learning = {ACTOR: (self._actor, self._optimizer)}
        self._place(ACTOR, RankResident(self._actor, self._optimizer))
        self._reference = build(sizes, self._path, trained=False, dtype=reference_dtype)
        self._place(REFERENCE, Resident(self._reference.model))
        self._features = self._feature_store(device) if self._config.data.images else None
        self._share = RankShare(self._actor, ppo, self._features)
        self._view = MegatronActor(
            self._actor.model, sizes.vocab, with_embedding=self._with_embedding
        )
        self._vocabulary = ShardedVocabulary(
            sizes.vocab,
            parallel_state.get_tensor_model_parallel_group(),
            rows_per_rank=sizes.vocab_rows(section.tensor_parallel),
        )
        self._support = ShardedSupport(Sampling(), self._vocabulary)  # Of the last scored batch.
        self._critic: RankCritic | None = None
        if self._critic_path is not None:
            model = build(
                LlamaSizes.read(self._critic_path),
                self._critic_path,
                trained=True,
                dtype=dtype,
                recompute=ppo.recompute,
                top=VALUE,
            )
            optimizer = self._optimizer_of(
                model, self._critic_path, ppo.critic_learning_rate, dtype
            )
            self._critic = RankCritic(model, optimizer, ppo, self._features)
            self._learning[CRITIC] = (model, optimizer)
            self._place(CRITIC, RankResident(model, optimizer))
        self._reward: RankReward | None = None
        if self._reward_path is not None:
            judge = build(
                LlamaSizes.read(self._reward_path),
                self._reward_path,
                trained=False,
                dtype=DTYPES[checkpoint_dtype(self._reward_path)],
                top=SCORE,
            )
            self._reward = RankReward(judge)
            self._place(REWARD, Resident(judge.model))

    def _feature_store(self, device: torch.device) -> FeatureStore:
        """The actor's tower, whole on each rank; the ranks of a replica share its images."""
        reader = ImageReader.load(self._path, load_tokenizer(self._path))
        return FeatureStore(load_tower(self._path, device), reader, group=host_group(TIMEOUT_S))

    def _place(self, role: str, resident: Resident) -> None:
        """Register a role. If all roles take turns, it frees memory for the next one."""
        self._turns.settle(role, resident)
        self._turns.clear()

    def _optimizer_of(
        self, model: RankModel, path: str, learning_rate: float, dtype: torch.dtype
    ) -> RankOptimizer:
        found = RankOptimizer(
            model,
            learning_rate,
            dtype,
            distributed=self._config.actor.distributed_optimizer,
        )
        if dtype != torch.float32:
            # The optimizer copied parameters to float32 that had already been rounded.
            parameters = model.parameters()
            for name, shard in model.first_shards(path):
                found.put(WEIGHTS, parameters[name], shard)
        return found

    # ---- passes

    def prefetch_images(self, prompts: Sequence[Sequence[int]]) -> None:
        """Start computing the features of the images of these prompts."""
        assert self._features is not None, "called only with images"
        self._features.prefetch(prompts)

    def image_figures(self) -> dict[str, float] | None:
        """The reporting rank's figures of the images that its replica saw since the last call."""
        assert self._features is not None, "called only with images"
        figures = self._features.figures()
        return figures if self._view.reports else None

    def begin_batch(self, sampling: Sampling) -> None:
        """Start a new batch of rollouts: forget what was kept from the previous one."""
        self._support = ShardedSupport(sampling, self._vocabulary)
        self._scored = set()

    @torch.no_grad()
    def score(
        self,
        rollouts: Rollouts,
        pad_id: int,
        first: int,
        sampling: Sampling,
        tapped: bool,
        wanted: tuple[Tensor, ...] | None = None,
    ) -> RankScores | None:
        """Run actor and reference over this replica's sequences; the reporting rank returns what
        they compute.

        Args:
            rollouts: the batch, or a piece of it.
            first: index of its first sequence in the batch.
            tapped: whether to return hidden states.
            wanted: bool, for which tokens of each response; None: for all.
        """
        batch = PPOBatch(rollouts, self._actor.device, pad_id, first)
        found = PolicyScores.zeros(batch)
        micros = self._share.micros(batch, self._share.dealt(batch, range(len(batch))))
        self._scored |= {place for micro in micros for place in micro.places}
        inputs = self._share.inputs(micros)

        def pick(n: int, hidden_BTD: Tensor) -> Tensor:
            # Picked after each pass: all states together would fill the GPU, and most are never
            # read.
            return _response_states(hidden_BTD, batch, micros[n].sequences, wanted)

        with (
            self._turns.on(ACTOR),
            self._view.tap(pick) if tapped else contextlib.nullcontext() as tap,
        ):
            self._actor.run(
                inputs,
                lambda n, logits: found.put_actor(
                    batch, micros[n], self._stats(micros[n], logits, sampling, entropy=True)
                ),
            )
        with self._turns.on(REFERENCE):
            self._reference.run(
                inputs,
                lambda n, logits_BPV: batch.unpack(
                    self._stats(micros[n], logits_BPV, sampling).logprobs_M,
                    micros[n],
                    found.reference_SR,
                ),
            )
        # By now every rank of the replica has the same figures.
        if not self._view.reports:
            return None
        sequences = tuple(s for micro in micros for s in micro.sequences)
        states = None
        if tap is not None and sequences:
            counts = [
                int(batch.lengths_S[s]) if wanted is None else int(wanted[s].sum())
                for s in sequences
            ]
            states = torch.cat(tap.picked).split(counts)
        return RankScores(found, sequences, states)

    def update(
        self,
        rollouts: Rollouts,
        pad_id: int,
        scores: Scores,
        sampling: Sampling,
        step: int,
        texts: Rollouts | None = None,
    ) -> UpdateTotals | None:
        """All optimizer steps of one PPO update; the reporting rank returns the sums over this
        replica's sequences.

        A step whose gradient is not finite is skipped on all ranks.

        Args:
            texts: other texts to train on, with weight ppo.ptx_coefficient.
        """
        batch = PPOBatch(rollouts, self._actor.device, pad_id)
        beside = None if texts is None else PPOBatch(texts, self._actor.device, pad_id)
        with self._turns.on(ACTOR, training=True):
            totals = self._actor_steps(batch, scores, sampling, step, beside)
        return totals if self._view.reports else None

    def _actor_steps(
        self, batch: PPOBatch, scores: Scores, sampling: Sampling, step: int, texts: PPOBatch | None
    ) -> UpdateTotals:
        config = self._config.ppo
        totals = UpdateTotals()
        rate = learning_rate_share(config, step) * config.actor_learning_rate
        begun = 0  # Responses of the minibatches so far.
        for sequences in minibatches(scores.sequences, config, self._config.seed, step):
            tokens = int(batch.lengths_S[sequences].sum())
            kl_before = totals.kl
            own = self._share.dealt(batch, sequences)
            # Only the rank that scored a sequence knows which tokens top-k and top-p left.
            if self._support.cuts:
                own = [s for s in sequences if s in self._scored]
            micros = self._share.micros(batch, own)

            # The defaults bind this minibatch: the function is defined anew in each iteration.
            def loss(
                n: int, logits_BPV: Tensor, micros: list[MicroBatch] = micros, tokens: int = tokens
            ) -> Tensor:
                stats = self._stats(
                    micros[n], logits_BPV, sampling, entropy=config.entropy_coefficient > 0
                )
                return totals.policy_loss_of(batch, scores, micros[n], stats, config) / tokens

            self._actor.clear_gradients()
            self._actor.run(self._share.inputs(micros), loss, backward=True)
            totals.tokens += tokens
            if self._moved_enough(totals.kl - kl_before, tokens):
                break
            if texts is not None:
                chosen = chosen_texts(texts, begun, len(sequences))
                totals.text_losses.append(self._learn_texts(texts, chosen))
            begun += len(sequences)
            self._actor.gather_gradients()
            self._optimizer.step(rate, config.clip_norm, totals.norms)
        return totals

    def _learn_texts(self, texts: PPOBatch, chosen: list[int]) -> float:
        """Add the gradient of the mean loss on these texts, and return this replica's part of that
        loss.
        """
        tokens = int(texts.lengths_S[chosen].sum())
        micros = self._share.micros(texts, self._share.dealt(texts, chosen))
        everything = ShardedSupport(Sampling(), self._vocabulary)
        total = 0.0

        def loss(n: int, logits_BPV: Tensor) -> Tensor:
            nonlocal total
            stats = self._stats(micros[n], logits_BPV, Sampling(), support=everything)
            mean = -stats.logprobs_M.sum() / tokens
            total += mean.item()
            return (self._config.ppo.ptx_coefficient or 0.0) * mean

        self._actor.run(self._share.inputs(micros), loss, backward=True)
        return total

    def _moved_enough(self, kl: float, tokens: int) -> bool:
        """Whether a minibatch's policy is further than ppo.kl_stop from the one that wrote it. All
        ranks get the same answer.

        Args:
            kl: sum over this replica's tokens, on the rank that reports.
            tokens: number of tokens of all replicas.
        """
        most = self._config.ppo.kl_stop
        if most is None:
            return False
        total = torch.tensor(kl if self._view.reports else 0.0, device=self._actor.device)
        dist.all_reduce(total)
        return float(total) / tokens > most

    def values(self, rollouts: Rollouts, pad_id: int, first: int) -> Tensor | None:
        """The critic's passes over this replica's sequences. The reporting rank returns values_SR,
        zero outside these sequences.
        """
        assert self._critic is not None, "called only on ranks that have one"
        batch = PPOBatch(rollouts, self._actor.device, pad_id, first)
        with self._turns.on(CRITIC):
            values_SR = self._critic.values(batch)
        return values_SR if self._view.reports else None

    def update_critic(
        self, rollouts: Rollouts, pad_id: int, scores: Scores, step: int
    ) -> ValueTotals | None:
        """All optimizer steps of the critic; the reporting rank returns the sums over this
        replica's sequences.
        """
        assert self._critic is not None, "called only on ranks that have one"
        batch = PPOBatch(rollouts, self._actor.device, pad_id)
        with self._turns.on(CRITIC, training=True):
            totals = self._critic.update(batch, scores, self._config.seed, step)
        return totals if self._view.reports else None

    def judge(self, texts: Sequence[JudgedTexts]) -> Tensor | None:
        """The reward model's passes over this replica's batches. The reporting rank returns a score
        of each text (batches, B), zero outside these batches.
        """
        assert self._reward is not None, "called only on ranks that have one"
        with self._turns.on(REWARD):
            scores_NB = self._reward.scores(texts)
        return scores_NB if self._view.reports else None

    def gpus(self) -> tuple[str, ...]:
        """This rank's GPU, as its node names it; none on a node without GPUs."""
        return own_gpus()

    def clear(self) -> None:
        """All roles leave the device, for an engine that is about to wake up there."""
        self._turns.clear()

    def engine_has(self, count: int) -> None:
        """Note the bytes that an engine has on this rank's device from now on."""
        self._turns.engine_has(count)

    def memory(self) -> dict[str, Any]:
        """The memory that the roles used on this rank since the last call, and what was moved."""
        return self._turns.take()

    def _stats(
        self,
        micro: MicroBatch,
        logits_BPV: Tensor,
        sampling: Sampling,
        *,
        entropy: bool = False,
        support: ShardedSupport | None = None,
    ) -> TokenStats:
        """`support`: tokens that were sampled from; None: those of the last scored batch."""
        own, places_P = self._share.own_predictions(micro)
        sampled = support or self._support
        found = sharded_stats(
            logits_BPV.flatten(0, 1),
            own.response_mask_BT.flatten().nonzero().squeeze(1),
            own.response_ids_M,
            self._vocabulary,
            temperature=sampling.temperature,
            cut=lambda logits_CV, first: sampled.cut(logits_CV, own, first),
            entropy=entropy,
        )
        total = int(micro.response_mask_BT.sum())
        entropy_M = (
            None
            if found.entropy_M is None
            else self._actor.of_all_columns(found.entropy_M, places_P, total)
        )
        return TokenStats(self._actor.of_all_columns(found.logprobs_M, places_P, total), entropy_M)

    # ---- weights

    def tables(self) -> tuple[Tensor, Tensor | None] | None:
        """The whole lm_head and, if wanted, the embedding, from the reporting rank of the first
        replica.
        """
        # All replicas have the same weights.
        if self._actor.replica:
            return None
        with self._turns.on(ACTOR):
            self._view.refresh()
        if not self._view.reports:
            return None
        return (
            self._view.lm_head_VD,
            self._view.embedding_VD if self._with_embedding else None,
        )

    def give_out(self, role: str, what: str, dtype: torch.dtype) -> Iterator[dict[str, Tensor]]:
        """This stage's tensors of the actor or critic, under the checkpoint's names and some at a
        time: `weights`, or one of AdamW's moments.
        """
        model, optimizer = self._learning[role]
        # With a distributed optimizer each replica has a part of every tensor, so all must iterate,
        # though only the first replica's answer is used.
        if model.first or optimizer.distributed:
            with self._turns.on(role, more=(what,)):
                yield from model.whole_tensors(
                    functools.partial(optimizer.value, what), dtype, BUCKET_BYTES
                )

    def steps(self, role: str) -> float:
        """Number of optimizer steps of the actor or critic so far."""
        return self._learning[role][1].steps

    def load(self, role: str, folder: str) -> None:
        """Read this rank's part of a saved actor or critic. The reference keeps its weights."""
        with self._turns.on(role, training=True):
            self._load(role, folder)

    def _load(self, role: str, folder: str) -> None:
        model, optimizer = self._learning[role]
        weights = Path(folder) / f"{role}.safetensors"
        file = Path(folder) / f"{role}_optimizer.safetensors"
        model.load(weights)
        _read(model, optimizer, weights, WEIGHTS)
        with safe_open(file, "pt") as handle:
            steps = next(
                (
                    float(handle.get_tensor(name))
                    for name in handle.keys()  # noqa: SIM118
                    if name.endswith("/step")
                ),
                0.0,
            )
        optimizer.restart(steps)
        for moment in MOMENTS if steps else ():
            _read(model, optimizer, file, moment)

    def stop(self) -> None:
        stop_parallel()


def _read(model: RankModel, optimizer: RankOptimizer, path: Path, what: str) -> None:
    """Fill an optimizer's weights, or one of its moments, from a file or folder."""
    parameters = model.parameters()
    for name, shard in model.read_saved(path, "" if what == WEIGHTS else f"/{what}"):
        optimizer.put(what, parameters[name], shard)


def _response_states(
    hidden_BTD: Tensor,
    batch: PPOBatch,
    sequences: Sequence[int],
    wanted: Sequence[Tensor] | None,
) -> Tensor:
    """The states before the wanted response tokens of some sequences, concatenated, in the actor's
    dtype, on the CPU.
    """
    found = []
    for row, s in enumerate(sequences):
        length = int(batch.lengths_S[s])
        first = batch.total_lengths[s] - length - 1
        states_RD = hidden_BTD[row, first : first + length]
        found.append(states_RD if wanted is None else states_RD[wanted[s].to(states_RD.device)])
    return torch.cat(found).cpu()
