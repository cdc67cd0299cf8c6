"""Trains the heads on rollout batches: the heads only, with an optimizer, a gradient clip and a random generator of their own.

Shape letters: M rows of a batch (one per response token), N rows of one optimizer step, K heads, D hidden, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from heads.errors import CheckpointError, DataError
from heads.losses import LossConfig, Teacher, head_loss
from heads.modules import MedusaHeads, clip_per_head
from medusa_ppo.companion.positions import TrainingRows, look_up
from medusa_ppo.config import CompanionConfig
from medusa_ppo.meeting import Meeting
from medusa_ppo.types import RolloutBatch

MOMENTS = ("exp_avg", "exp_avg_sq", "step")
CLIP_NORM = 1.0  # Largest gradient norm of each head.
LOGITS_BYTES = 1024**3  # Of a micro-batch of one head, in float32, at most.
WARM = 1_000_000
"""Steps that heads count as having made which begin trained: their mean keeps its full length from the first step on."""
COUNTERS = ("batches_trained", "batches_skipped", "trained_tokens", "optimizer_steps")


@dataclass(frozen=True)
class TrainReport:
    """What one batch did.

    Attributes:
        loss: mean over heads and optimizer steps; NaN when nothing was trained.
        losses: mean loss of head 1..K over the optimizer steps.
        tokens: positions trained on, each counted once however many epochs.
        rows: positions of all passes, those of replayed batches included: the work that was done.
        optimizer_steps: steps taken.
        problem: why the batch was skipped and everything put back as it was before; empty: it was not.
    """

    loss: float = math.nan
    losses: tuple[float, ...] = ()
    tokens: int = 0
    optimizer_steps: int = 0
    problem: str = ""
    rows: int = 0


class RunningMean:
    """A running mean of the heads' weights over optimizer steps: what is judged and served, while the heads themselves go on learning.

    A rollout batch is small, so each step moves the heads by its noise as much as by what there is to learn; the mean keeps the latter.
    (Polyak and Juditsky 1992; exponential form as in Tarvainen and Valpola 2017, arXiv 1703.01780.)

    Attributes:
        heads: the mean, never trained.
        steps: optimizer steps that it has seen. The first ones weigh more, so that heads that begin at nothing are left behind at once.
    """

    def __init__(self, heads: MedusaHeads, decay: float, *, steps: int = 0) -> None:
        """
        Args:
            heads: a copy of what training begins with, changed in place.
            decay: share of the mean that stays with each step, in [0, 1).
            steps: 0 for heads that begin at nothing, WARM for trained ones.
        """
        self.heads = heads.requires_grad_(False)
        self.steps = steps
        self._decay = decay

    @torch.no_grad()
    def add(self, trained: Iterable[torch.Tensor]) -> None:
        """Take in the parameters as they are after a step, in the order of `heads.parameters()`."""
        kept = min(self._decay, (1 + self.steps) / (10 + self.steps))
        torch._foreach_lerp_(list(self.heads.parameters()), list(trained), 1.0 - kept)
        self.steps += 1

    def restart(self, state: dict[str, torch.Tensor]) -> None:
        """Go on from trained heads (keys of `trainable_state`)."""
        self.heads.load_trainable_state(state)
        self.steps = WARM

    def state_dict(self) -> dict[str, torch.Tensor]:
        """A copy of all of it, under keys that begin with `mean`."""
        return {f"mean.{name}": tensor for name, tensor in self.heads.trainable_state().items()} | {"mean_steps": torch.tensor(self.steps)}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Take over what is under such keys. Raises KeyError, CheckpointError when something is missing."""
        self.heads.load_trainable_state(under(state, "mean."))
        self.steps = int(state["mean_steps"])


class HeadsTrainer:
    """AdamW on the heads, gradients clipped for each head by itself, positions shuffled by a seeded generator.

    The heads' parameters are float32, the actor's tables constants.

    Attributes:
        rate: factor on the configured step size. The caller's to set, and to keep over a restart.
        team: processes to sum gradients with; None: alone.
        generator: of the order of the positions.
        lm_head_VD, embedding_VD: the actor's tables, as they are used.
    """

    def __init__(
        self,
        heads: MedusaHeads,
        lm_head_VD: torch.Tensor,
        config: CompanionConfig,
        seed: int,
        *,
        embedding_VD: torch.Tensor | None = None,
        device: torch.device | None = None,
        schedule: Callable[[int], float] | None = None,
        dtype: torch.dtype | None = None,
        micro_positions: int | None = None,
        team: Meeting | None = None,
        mean: RunningMean | None = None,
    ) -> None:
        """
        Args:
            heads: trained in place.
            lm_head_VD, embedding_VD: the actor's tables; the embedding only for kinds that read it.
            config: step size, loss, positions per step, epochs.
            seed: of the order of the positions.
            device: where to train; None: the CPU.
            schedule: factor of the step size by number of the optimizer step; None: always 1.
            team: see above.
            dtype: of the products; None: float32 on a CPU, the tables' own on a GPU. Parameters, moments and sums stay float32.
            micro_positions: positions whose gradients are computed at once; None: as many as LOGITS_BYTES have room for.
            mean: takes in the heads after each optimizer step, and is part of the state; None: nothing does.
        """
        self.rate = 1.0
        self.team = team
        self._schedule, self._mean, self._dtype = schedule, mean, dtype
        self.device = device or torch.device("cpu")
        self.heads = heads.to(device=self.device, dtype=torch.float32)
        if mean:
            mean.heads.to(self.device, torch.float32)
        self._config = config
        self._micro_positions = micro_positions or max(1, LOGITS_BYTES // (4 * lm_head_VD.shape[0]))
        self._loss = LossConfig.named(config.loss)
        self.generator = torch.Generator().manual_seed(seed)
        self.set_tables(lm_head_VD, embedding_VD)
        self._named = dict(self.heads.named_parameters())
        self._optimizer = self._fresh_optimizer()
        self.batches_trained = self.batches_skipped = self.trained_tokens = self.optimizer_steps = 0

    def set_tables(self, lm_head_VD: torch.Tensor, embedding_VD: torch.Tensor | None = None) -> None:
        """Replace the actor's frozen tables. Without a dtype asked for, a CPU holds them in float32, a GPU as they come."""
        dtype = self._dtype or (torch.float32 if self.device.type == "cpu" else lm_head_VD.dtype)
        self.lm_head_VD = lm_head_VD.detach().to(self.device, dtype)
        self.embedding_VD = None if embedding_VD is None else embedding_VD.detach().to(self.device, dtype)

    def train_batch(
        self, batch: RolloutBatch, replay: Sequence[tuple[RolloutBatch, float]] = (), *, epochs: float | None = None
    ) -> TrainReport:
        """Train on a batch, and on shares of older ones.

        Args:
            batch: on-policy rollouts.
            replay: older batches, each with the share (0..1) of its positions that joins each epoch.
            epochs: passes over the positions, the last over a random part of them where it is no whole number; None: as configured.

        Returns:
            A report. When a loss or gradient is not finite, the heads, the optimizer and the generator are as they were before the call.

        Raises:
            DataError: the batch does not fit the heads.
        """
        self.check(batch)
        before = self.state_dict()
        try:
            losses, tokens, rows = self._train(batch, replay, self._config.epochs if epochs is None else epochs)
        except BaseException as error:
            self.load_state_dict(before)
            if not isinstance(error, FloatingPointError):
                raise
            self.batches_skipped += 1
            return TrainReport(problem=str(error))
        self.batches_trained += 1
        self.trained_tokens += tokens
        self.optimizer_steps += len(losses)
        if not losses:
            return TrainReport(problem="No position has a target: all responses are one token long.")
        mean_K = torch.stack(losses).double().mean(0)
        return TrainReport(float(mean_K.mean()), tuple(mean_K.tolist()), tokens, len(losses), rows=rows)

    def reset_to(self, state: dict[str, torch.Tensor]) -> None:
        """Go back to other heads (keys of `trainable_state`) with an empty optimizer; counters, generator and `rate` go on."""
        self.heads.load_trainable_state(state)
        if self._mean is not None:
            self._mean.restart(state)
        self._optimizer = self._fresh_optimizer()

    # ---- one batch ------------------------------------------------------------------------------------------------------

    def _train(
        self, batch: RolloutBatch, replay: Sequence[tuple[RolloutBatch, float]], epochs: float
    ) -> tuple[list[torch.Tensor], int, int]:
        config = self.heads.config
        sources = [(look_up(part, config.num_heads, config.conditioned), share) for part, share in [(batch, 1.0), *replay]]
        losses: list[torch.Tensor] = []
        worked = 0
        whole, rest = divmod(epochs, 1)
        for part in [1.0] * int(whole) + [rest] * (rest > 0):  # 2.25 -> 1, 1, 0.25
            picks = self._shuffle([(source, part * share) for source, share in sources])
            worked += picks.shape[0]
            rows = self._config.batch_positions
            steps = -(-picks.shape[0] // rows)
            for start in range(0, rows * (self.team.most(steps) if self.team else steps), rows):
                step = self.optimizer_steps + len(losses)
                for group in self._optimizer.param_groups:
                    group["lr"] = self._config.learning_rate * self.rate * (self._schedule(step) if self._schedule else 1.0)
                loss = self._loss.at(step)
                here = picks[start : start + rows]
                losses.append(self._step([source for source, _ in sources], here[here[:, 1] >= 0], loss))
        return losses, round(min(1.0, epochs) * sources[0][0].usable_N.numel()), worked

    def _shuffle(self, sources: Sequence[tuple[TrainingRows, float]]) -> torch.Tensor:
        """(source, row) pairs of one epoch in random order, int64 `[N, 2]`: the same order in all parts of a batch."""
        picks = []
        for index, (source, share) in enumerate(sources):
            usable_N = source.usable_N
            count = max(round(share * usable_N.numel()), int(index == 0))  # A short pass still trains on something.
            chosen = usable_N[torch.randperm(usable_N.numel(), generator=self.generator)[:count]]
            picks.append(torch.stack([torch.full_like(chosen, index), chosen], dim=1))
        pairs = torch.cat(picks)
        return pairs[torch.randperm(pairs.shape[0], generator=self.generator)]

    def _step(self, sources: Sequence[TrainingRows], picks_N2: torch.Tensor, loss: LossConfig) -> torch.Tensor:
        """One optimizer step; returns the loss of each head. Micro-batches add up to the gradient of all positions at once."""
        total_K = _targets(sources, picks_N2)
        if self.team:
            self.team.add_up(total_K)
        loss_K = torch.zeros(self.heads.config.num_heads)
        self._optimizer.zero_grad(set_to_none=True)
        for micro_N2 in picks_N2.split(self._micro_positions) if picks_N2.shape[0] else ():
            # Each loss is a mean over its own positions; weighted by their share, the means add up to the mean over all.
            share_K = _targets(sources, micro_N2) / total_K.clamp(min=1)
            micro_K = self._losses(sources, micro_N2, loss) * share_K.to(self.device)
            micro_K.sum().backward()
            loss_K += micro_K.detach().cpu()
        if self.team:
            self.team.add_up(loss_K)
            for parameter in self._named.values():  # A process without a position in this step adds nothing.
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                self.team.add_up(parameter.grad)
        norm_K = clip_per_head(self._named, self.heads.config.num_heads, CLIP_NORM)
        if not bool(torch.isfinite(loss_K).all() and torch.isfinite(norm_K).all()):
            raise FloatingPointError(f"Not finite: losses {loss_K.tolist()}, gradient norms {norm_K.tolist()}.")
        self._optimizer.step()
        if self._mean is not None:
            self._mean.add(self._named.values())
        return loss_K

    def _losses(self, sources: Sequence[TrainingRows], picks_N2: torch.Tensor, loss: LossConfig) -> torch.Tensor:
        """Loss of each head. Sources are gathered one after the other: their order means nothing."""
        grouped = [(source, picks_N2[picks_N2[:, 0] == index, 1]) for index, source in enumerate(sources)]
        grouped = [(source, rows_N) for source, rows_N in grouped if rows_N.numel()]

        def picked(name: str) -> torch.Tensor:
            return torch.cat([getattr(source, name)[rows_N] for source, rows_N in grouped]).to(self.device)

        hidden_ND = self._states(grouped)
        with torch.autocast(self.device.type, self._dtype or torch.float32, enabled=self._dtype not in (None, torch.float32)):
            condition = picked("condition_MK") if self.heads.config.conditioned else None
            factored = self.heads.factored(hidden_ND, self.lm_head_VD, condition=condition, embedding_VD=self.embedding_VD)
        sampled, teacher = grouped[0][0].batch, None
        if loss.needs_teacher:  # The actor's own distribution of each target, from the states of the rows that predict them.
            hidden = self._states([(source, source.teacher_rows_MK[rows_N].flatten()) for source, rows_N in grouped])
            rows_NK = torch.arange(hidden.shape[0], device=self.device).view(-1, self.heads.config.num_heads)
            teacher = Teacher(hidden, rows_NK, self.lm_head_VD, sampled.temperature, sampled.top_k, sampled.top_p)
        return head_loss(
            factored,
            picked("targets_MK"),
            picked("mask_MK"),
            loss,
            logprobs_NK=picked("logprobs_MK"),
            teacher=teacher,
            temperature=sampled.temperature,
        )

    def _states(self, grouped: list[tuple[TrainingRows, torch.Tensor]]) -> torch.Tensor:
        return torch.cat([source.states(rows_N).to(self.device, torch.float32) for source, rows_N in grouped])

    def check(self, batch: RolloutBatch) -> None:
        """Raise DataError when a batch does not fit the heads or the loss."""
        config = self.heads.config
        if not batch.response_ids_M.numel():
            return  # A part without a response.
        width = batch.hidden_MD.shape[1]
        low, high = int(batch.response_ids_M.min()), int(batch.response_ids_M.max())
        if width != config.hidden_size or low < 0 or high >= config.vocab_size:
            raise DataError(
                "The rollout batch does not fit the heads.",
                given=f"hidden size {width}, token ids {low} to {high}",
                expected=f"hidden size {config.hidden_size}, token ids 0 to {config.vocab_size - 1}",
                do="Use heads made for this actor.",
            )
        if self._loss.needs_teacher and batch.hidden_MD.shape[0] < batch.response_ids_M.shape[0]:
            raise DataError(
                "This loss reads the actor's own distribution, which needs the state of every position.",
                given=f"companion.loss={self._config.loss}, {batch.hidden_MD.shape[0]} states of {batch.response_ids_M.shape[0]} positions",
                expected="all states",
                do="Sample positions in the companion, or use another loss.",
            )

    def _fresh_optimizer(self) -> torch.optim.AdamW:
        return torch.optim.AdamW(self.heads.parameters(), lr=self._config.learning_rate, weight_decay=0.0)  # Decay pulls back to the start.

    # ---- state ------------------------------------------------------------------------------------------------------------

    def move_to(self, device: torch.device) -> int:
        """Carry heads, optimizer and tables to another device, where the next batch is trained on. Returns the bytes that lie there now."""
        self.device = device
        self._optimizer.zero_grad(set_to_none=True)
        moved: list[torch.Tensor] = []
        for heads in (self.heads, self._mean.heads if self._mean else None):
            moved += heads.to(device).parameters() if heads else ()
        for values in self._optimizer.state.values():
            values.update({name: value.to(device) for name, value in values.items() if name != "step"})  # AdamW keeps that on the CPU.
            moved += (value for name, value in values.items() if name != "step")
        self.lm_head_VD = self.lm_head_VD.to(device)
        self.embedding_VD = None if self.embedding_VD is None else self.embedding_VD.to(device)
        moved += [self.lm_head_VD] if self.embedding_VD is None else [self.lm_head_VD, self.embedding_VD]
        return sum(tensor.nbytes for tensor in moved)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """A copy of everything that the next batch depends on: heads, optimizer, generator, counters. Flat, tensors only."""
        state = {f"heads.{name}": tensor for name, tensor in self.heads.trainable_state().items()}
        for name, parameter in self._named.items():
            for moment, value in self._optimizer.state.get(parameter, {}).items():
                state[f"optimizer.{name}.{moment}"] = value.detach().clone()
        state |= self._mean.state_dict() if self._mean else {}
        state["generator"] = self.generator.get_state()
        state["counters"] = torch.tensor([getattr(self, name) for name in COUNTERS], dtype=torch.int64)
        return state

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Take over a state. Raises CheckpointError when it is not one of such a trainer."""
        try:
            self.heads.load_trainable_state(under(state, "heads."))
            optimizer = self._fresh_optimizer()
            for name, parameter in self._named.items():
                moments = under(state, f"optimizer.{name}.")
                if moments.keys() == set(MOMENTS):
                    optimizer.state[parameter] = {
                        moment: value.to("cpu" if moment == "step" else self.device, copy=True) for moment, value in moments.items()
                    }
            self._optimizer = optimizer
            if self._mean is not None:
                self._mean.load_state_dict(state)
            self.generator.set_state(state["generator"].clone())
            for name, value in zip(COUNTERS, state["counters"].tolist(), strict=True):
                setattr(self, name, value)
        except (KeyError, ValueError, RuntimeError) as error:
            raise CheckpointError(
                "This is not a state of the companion's trainer.",
                given=f"{type(error).__name__}: {error}",
                expected="tensors written by HeadsTrainer.state_dict for heads of the same kind and size",
                do="Resume from the folder that the companion wrote, with the same heads configuration.",
            ) from error


def under(state: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """The part of a state whose names begin so, without the prefix."""
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


def _targets(sources: Sequence[TrainingRows], picks_N2: torch.Tensor) -> torch.Tensor:
    """How many of the picked positions each head has a target at (sum of their weights), float32 `K`."""
    counts = [source.mask_MK[picks_N2[picks_N2[:, 0] == index, 1]].sum(0) for index, source in enumerate(sources)]
    return torch.stack(counts).sum(0).float()
