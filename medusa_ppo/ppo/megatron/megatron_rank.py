"""One process of a Megatron actor: its part of actor and reference, and its share of every pass of
PPO.

Every rank gets the same calls in the same order. Sequences are dealt to data-parallel replicas; the
ranks of a replica run the same micro batches. The loss is divided by the tokens of the whole
minibatch, and gradients are added up over replicas: how many there are changes the result by
rounding only. What is learned, moments and losses are float32, as in the loop's own learner; with
model.dtype=bfloat16 the model itself is a bfloat16 copy.

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
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import FP32Optimizer
from safetensors import safe_open
from torch import Tensor, nn

from medusa_ppo.actors.hf import DTYPES
from medusa_ppo.actors.megatron import MegatronActor
from medusa_ppo.actors.megatron_layout import LlamaSizes
from medusa_ppo.actors.megatron_model import RankModel, start_parallel, stop_parallel
from medusa_ppo.config.ppo_section import PPOConfig
from medusa_ppo.config.run_config import RunConfig
from medusa_ppo.contract.rollouts import Rollouts, Sampling
from medusa_ppo.engines.actor_sync import BUCKET_BYTES
from medusa_ppo.ppo.batch import MicroBatch, PPOBatch, minibatches
from medusa_ppo.ppo.megatron.sharded_stats import ShardedSupport, sharded_stats
from medusa_ppo.ppo.megatron.sharded_vocabulary import ShardedVocabulary
from medusa_ppo.ppo.optimization import (
    ADAM_BETAS,
    ADAM_EPSILON,
    GradientNorms,
    learning_rate_share,
    set_learning_rate,
)
from medusa_ppo.ppo.scores import PolicyScores, Scores
from medusa_ppo.ppo.token_stats import TokenStats
from medusa_ppo.ppo.update_totals import UpdateTotals
from medusa_ppo.runtime.rendezvous import Meeting, Place

WEIGHTS = "weights"
TIMEOUT_S = 600.0
MOMENTS = ("exp_avg", "exp_avg_sq")
CLIP_EPSILON = 1e-6  # As torch.nn.utils.clip_grad_norm_.


class RankOptimizer:
    """Megatron's AdamW: steps on float32 tensors, which are this rank's parameters, copies of them,
    or this replica's part of either.
    """

    def __init__(
        self, model: RankModel, config: PPOConfig, dtype: torch.dtype, *, distributed: bool
    ) -> None:
        """
        Args:
            dtype: of the model's parameters.
            distributed: each data-parallel replica (and context-parallel rank) keeps a part.
        """
        settings = OptimizerConfig(
            optimizer="adam",
            lr=config.actor_learning_rate,
            # Needed by Megatron's scheduler, which nobody calls: `set_learning_rate` says each
            # step's rate.
            min_lr=config.actor_learning_rate,
            weight_decay=0.0,
            adam_beta1=ADAM_BETAS[0],
            adam_beta2=ADAM_BETAS[1],
            adam_eps=ADAM_EPSILON,
            params_dtype=dtype,
            bf16=dtype == torch.bfloat16,
            clip_grad=0.0,  # Done here, after a look at the norm.
            use_distributed_optimizer=distributed,
        )
        self.distributed = distributed
        # Megatron steps on float32 copies of parameters in 16 bits, and on the parameters
        # themselves otherwise.
        self._copies = dtype != torch.float32
        self._device = model.device
        self._group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        self._chain: Any = get_megatron_optimizer(settings, [model.ddp])
        (self._part,) = self._chain.chained_optimizers
        self._held = _stepped(self._part)

    def step(self, rate: float, clip_norm: float, norms: GradientNorms) -> None:
        """The step that gathered gradients ask for, clipped; left out, on all ranks, where their
        norm is not finite.
        """
        set_learning_rate(self._chain, rate)
        # Megatron's own `step` in its two halves, since a step may be clipped or left out in
        # between. The norm is that of all ranks, so they decide alike.
        self._chain.prepare_grads()
        norm = float(self._chain.get_grad_norm())
        if not norms.sound(norm):
            return
        for stepped in self._part.get_parameters():
            stepped.grad.mul_(min(1.0, clip_norm / (norm + CLIP_EPSILON)))
        self._chain.step_with_ready_grads()

    def value(self, what: str, parameter: nn.Parameter) -> Tensor:
        """The weights of a parameter, or one of its moments, whole. With a distributed optimizer
        all replicas call it.
        """
        if what == WEIGHTS and not self._copies:
            return parameter.detach()
        # A replica may hold no part of a parameter; it still comes to the sum below.
        stepped, place = self._held.get(parameter, (None, slice(0)))
        found: Tensor | None = None
        if stepped is not None:
            found = (stepped if what == WEIGHTS else self._state[stepped][what]).detach()
        if not self.distributed:
            assert found is not None, "all parameters are stepped here"
            return found
        # Each replica has one part and zeros elsewhere, so the sum is the whole, to the bit.
        whole = torch.zeros(parameter.numel(), device=self._device)
        if found is not None:
            whole[place] = found
        dist.all_reduce(whole, group=self._group)
        return whole.view(parameter.shape)

    def put(self, what: str, parameter: nn.Parameter, value: Tensor) -> None:
        """Take back what `value` gave; of the weights, the optimizer's own."""
        if parameter not in self._held:
            return
        stepped, place = self._held[parameter]
        part = value.flatten()[place].view(stepped.shape).to(self._device, torch.float32)
        if what == WEIGHTS:
            stepped.data.copy_(part)
        else:
            # Without it the moment would be a view of the tensor that was read, and keep all of it
            # alive.
            self._state[stepped][what] = part.clone()

    @property
    def steps(self) -> float:
        """Optimizer steps so far. torch's AdamW counts them for each parameter, TransformerEngine's
        and Apex' for each group.
        """
        counters = [*self._state.values(), *self._chain.param_groups]
        return max(
            (float(counter["step"]) for counter in counters if "step" in counter), default=0.0
        )

    def restart(self, steps: float) -> None:
        """Forget the moments; count on from so many steps."""
        self._state.clear()
        for group in self._chain.param_groups if steps else ():
            if not isinstance(self._part.optimizer, torch.optim.AdamW):
                group["step"] = int(steps)
                continue
            for stepped in group["params"]:
                # On the CPU, where torch's AdamW keeps it.
                self._state[stepped]["step"] = torch.tensor(steps, dtype=torch.float32)

    @property
    def _state(self) -> Any:
        return self._part.optimizer.state


def _stepped(optimizer: Any) -> dict[nn.Parameter, tuple[Tensor, slice]]:
    """Of each parameter that this rank steps: the float32 tensor that is stepped, and which part of
    the flat parameter that is.
    """
    # Megatron has an optimizer class for each case, and each has its own names for the same lists.
    if isinstance(optimizer, FP32Optimizer):
        return {parameter: (parameter, slice(None)) for parameter in optimizer.get_parameters()}
    distributed = isinstance(optimizer, DistributedOptimizer)
    if distributed:
        copies = ("model_float16_groups", "shard_fp32_from_float16_groups")
        themselves = ("model_fp32_groups", "shard_fp32_groups")
    else:
        copies = ("float16_groups", "fp32_from_float16_groups")
        themselves = ("fp32_from_fp32_groups", "fp32_from_fp32_groups")
    found = {}
    for models, mains in (copies, themselves):
        groups = zip(getattr(optimizer, models), getattr(optimizer, mains), strict=True)
        for parameters, stepped in groups:
            for parameter, tensor in zip(parameters, stepped, strict=True):
                place = slice(None)
                if distributed:
                    part = optimizer._get_model_param_range_map(parameter)["param"]
                    place = slice(part.start, part.end)
                found[parameter] = (tensor, place)
    return found


@dataclass(frozen=True)
class RankScores:
    """What the rank that reports for a replica hands to the loop.

    Attributes:
        policy: of the whole batch's shape, zero outside of this replica's sequences.
        sequences: B indices into the rollout batch.
        states: of each of these the actor's final hidden states that predict its response tokens,
            those that were asked for, `[states, D]` on the CPU; None: not asked for.
    """

    policy: PolicyScores
    sequences: tuple[int, ...]
    states: tuple[Tensor, ...] | None


class ActorRank:
    """Lives in a Ray actor. `start` comes first, on all ranks at once, after `meet_here` on the
    first.
    """

    def __init__(self, rank: int, path: str, config: RunConfig, with_embedding: bool) -> None:
        """
        Args:
            rank: 0 to actor.ranks - 1.
            path: folder of the actor's checkpoint; the reference stays what is there.
            config: the run's.
            with_embedding: `tables` brings the input embedding too.
        """
        self._rank = rank
        self._path = path
        self._config = config
        self._with_embedding = with_embedding
        self._meeting: Meeting | None = None
        self._scored: set[int] = set()  # Of the last batch: the sequences this replica scored.

    def meet_here(self) -> Place:
        """Open the place where the ranks find each other."""
        self._meeting = Meeting.open(
            ray.util.get_node_ip_address(), self._config.actor.ranks, timeout_s=TIMEOUT_S
        )
        return self._meeting.place

    def start(self, place: Place) -> None:
        section = self._config.actor
        # Before anything is built: it may replace layers of Megatron's.
        if section.imports:
            importlib.import_module(section.imports)
        torch.set_num_threads(self._config.ppo.threads or 1)
        # The first rank has opened it already, in `meet_here`.
        self._meeting = self._meeting or Meeting(place.seen_by(self._rank))
        start_parallel(self._meeting, section)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        sizes = LlamaSizes.read(self._path)
        ppo = self._config.ppo
        dtype = DTYPES[self._config.model.dtype or "float32"]
        reference_dtype = DTYPES[ppo.reference_dtype] if ppo.reference_dtype else dtype
        build = functools.partial(RankModel, sizes, self._path, section, device=device)
        self._actor = build(trained=True, dtype=dtype, recompute=ppo.recompute)
        self._reference = build(trained=False, dtype=reference_dtype)
        self._view = MegatronActor(
            self._actor.model, sizes.vocab, with_embedding=self._with_embedding
        )
        self._vocabulary = ShardedVocabulary(
            sizes.vocab,
            parallel_state.get_tensor_model_parallel_group(),
            rows_per_rank=sizes.vocab_rows(section.tensor_parallel),
        )
        self._support = ShardedSupport(Sampling(), self._vocabulary)  # Of the last batch scored.
        self._optimizer = RankOptimizer(
            self._actor, ppo, dtype, distributed=section.distributed_optimizer
        )
        if dtype != torch.float32:
            # The optimizer made its float32 copies of parameters that were rounded already.
            self._read(Path(self._path), WEIGHTS)

    # ---- passes

    def begin_batch(self, sampling: Sampling) -> None:
        """New rollouts will be scored: what was kept of those before is forgotten."""
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
        """Passes of actor and reference over this replica's sequences; the answer comes from the
        rank that reports.

        Args:
            rollouts: the batch, or a piece of it.
            first: place of its first sequence in the batch.
            tapped: hand in hidden states.
            wanted: of which tokens of each response, bool; None: of all.
        """
        batch = PPOBatch(rollouts, self._actor.device, pad_id, first)
        found = PolicyScores.zeros(batch)
        micros = self._micros(batch, self._dealt(batch, range(len(batch))))
        self._scored |= {place for micro in micros for place in micro.places}
        inputs = [self._actor.inputs(micro.input_ids_BT) for micro in micros]

        def pick(n: int, hidden_BTD: Tensor) -> Tensor:
            # Now, pass by pass: the states of all of them would fill the GPU, and nobody reads
            # most.
            return _response_states(hidden_BTD, batch, micros[n].sequences, wanted)

        with self._view.tap(pick) if tapped else contextlib.nullcontext() as tap:
            self._actor.run(
                inputs,
                lambda n, logits: found.put_actor(
                    batch, micros[n], self._stats(micros[n], logits, sampling, entropy=True)
                ),
            )
        self._reference.run(
            inputs,
            lambda n, logits_BPV: batch.unpack(
                self._stats(micros[n], logits_BPV, sampling).logprobs_M,
                micros[n],
                found.reference_SR,
            ),
        )
        # Every rank of the replica has the same figures by now.
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
        self, rollouts: Rollouts, pad_id: int, scores: Scores, sampling: Sampling, step: int
    ) -> UpdateTotals | None:
        """All optimizer steps of one PPO update; the sums over this replica's sequences from the
        rank that reports.

        A step whose gradient is not finite is left out, on all ranks.
        """
        batch = PPOBatch(rollouts, self._actor.device, pad_id)
        config = self._config.ppo
        totals = UpdateTotals()
        rate = learning_rate_share(config, step) * config.actor_learning_rate
        for sequences in minibatches(scores.sequences, config, self._config.seed, step):
            tokens = int(batch.lengths_S[sequences].sum())
            own = self._dealt(batch, sequences)
            # Only who scored a sequence knows which of its tokens top-k and top-p had left.
            if self._support.cuts:
                own = [s for s in sequences if s in self._scored]
            micros = self._micros(batch, own)

            # Its defaults are this minibatch's: the function is made anew in each turn of the loop.
            def loss(
                n: int, logits_BPV: Tensor, micros: list[MicroBatch] = micros, tokens: int = tokens
            ) -> Tensor:
                stats = self._stats(
                    micros[n], logits_BPV, sampling, entropy=config.entropy_coefficient > 0
                )
                return totals.policy_loss_of(batch, scores, micros[n], stats, config) / tokens

            self._actor.clear_gradients()
            self._actor.run(
                [self._actor.inputs(micro.input_ids_BT) for micro in micros], loss, backward=True
            )
            self._actor.gather_gradients()
            totals.tokens += tokens
            self._optimizer.step(rate, config.clip_norm, totals.norms)
        return totals if self._view.reports else None

    def _dealt(self, batch: PPOBatch, sequences: Sequence[int]) -> list[int]:
        """This replica's: every n-th by length, so that replicas have about the same to do."""
        return sorted(sequences, key=lambda s: (batch.total_lengths[s], s))[
            self._actor.replica :: self._actor.replicas
        ]

    def _micros(self, batch: PPOBatch, sequences: list[int]) -> list[MicroBatch]:
        config = self._config.ppo
        return list(
            batch.micro_batches(
                sequences,
                config.micro_batch_size or config.minibatch_size,
                config.micro_batch_tokens,
            )
        )

    def _stats(
        self, micro: MicroBatch, logits_BPV: Tensor, sampling: Sampling, *, entropy: bool = False
    ) -> TokenStats:
        own, places_P = self._own_predictions(micro)
        logits_PV = self._vocabulary.own_rows(logits_BPV[own.response_mask_BT], dim=1)
        scaled_PV = logits_PV.float() / sampling.temperature
        found = sharded_stats(
            self._support.cut(scaled_PV, own),
            own.response_ids_M,
            self._vocabulary,
            entropy=entropy,
        )
        total = int(micro.response_mask_BT.sum())
        entropy_M = (
            None
            if found.entropy_M is None
            else self._actor.of_all_columns(found.entropy_M, places_P, total)
        )
        return TokenStats(self._actor.of_all_columns(found.logprobs_M, places_P, total), entropy_M)

    def _own_predictions(self, micro: MicroBatch) -> tuple[MicroBatch, Tensor]:
        """The micro batch in the columns that this rank's logits have, each with the token that
        follows; and which of its M predictions they are.
        """
        # For context parallelism rows are padded to equal parts, so columns may lie behind the
        # row's end.
        columns_P = self._actor.columns(micro.input_ids_BT.shape[1])
        more = max(0, int(columns_P.max()) + 1 - micro.input_ids_BT.shape[1])
        next_BT = torch.nn.functional.pad(micro.input_ids_BT[:, 1:], (0, 1 + more))
        predicts_BT = torch.nn.functional.pad(micro.predict_mask_BT, (0, more), value=False)
        number_BT = predicts_BT.flatten().cumsum(0).view(predicts_BT.shape) - 1
        mask_BP = predicts_BT[:, columns_P]
        return (
            MicroBatch(micro.sequences, next_BT[:, columns_P], mask_BP, micro.first),
            number_BT[:, columns_P][mask_BP],
        )

    # ---- weights

    def tables(self) -> tuple[Tensor, Tensor | None] | None:
        """The whole lm_head and (when wanted) embedding, from the first replica's rank that
        reports.
        """
        # All replicas have the same weights.
        if self._actor.replica:
            return None
        self._view.refresh()
        if not self._view.reports:
            return None
        return (
            self._view.lm_head_VD,
            self._view.embedding_VD if self._with_embedding else None,
        )

    def give_out(self, what: str, dtype: torch.dtype) -> Iterator[dict[str, Tensor]]:
        """This stage's tensors by the checkpoint's names, some at a time: `weights`, or one of
        AdamW's moments.
        """
        # With a distributed optimizer each replica has a part of every tensor, so all must walk
        # along, though only the first one's answer is handed out.
        if self._actor.first or self._optimizer.distributed:
            yield from self._actor.whole_tensors(
                functools.partial(self._optimizer.value, what), dtype, BUCKET_BYTES
            )

    def steps(self) -> float:
        """Optimizer steps so far."""
        return self._optimizer.steps

    def load(self, folder: str) -> None:
        """Read this rank's part of what a learner saved. The reference stays."""
        weights = Path(folder) / "actor.safetensors"
        file = Path(folder) / "actor_optimizer.safetensors"
        self._actor.load(weights)
        self._read(weights, WEIGHTS)
        with safe_open(file, "pt") as handle:
            steps = next(
                (
                    float(handle.get_tensor(name))
                    for name in handle.keys()  # noqa: SIM118
                    if name.endswith("/step")
                ),
                0.0,
            )
        self._optimizer.restart(steps)
        for moment in MOMENTS if steps else ():
            self._read(file, moment)

    def _read(self, path: Path, what: str) -> None:
        """Fill the optimizer's weights, or a moment, from a file or folder."""
        parameters = self._actor.parameters()
        for name, shard in self._actor.read_shards(
            path, list(parameters), "" if what == WEIGHTS else f"/{what}"
        ):
            self._optimizer.put(what, parameters[name], shard)

    def stop(self) -> None:
        stop_parallel()


def _response_states(
    hidden_BTD: Tensor,
    batch: PPOBatch,
    sequences: Sequence[int],
    wanted: Sequence[Tensor] | None,
) -> Tensor:
    """The states before each response token of some sequences, one after the other, in the actor's
    dtype, on the CPU; of those tokens that are wanted.
    """
    found = []
    for row, s in enumerate(sequences):
        length = int(batch.lengths_S[s])
        first = batch.total_lengths[s] - length - 1
        states_RD = hidden_BTD[row, first : first + length]
        found.append(states_RD if wanted is None else states_RD[wanted[s].to(states_RD.device)])
    return torch.cat(found).cpu()
