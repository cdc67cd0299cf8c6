"""Trains the heads on rollout batches: the heads only, with an optimizer, a gradient clip and a
random generator of their own.

They train on blocks of consecutive positions in random order, which share most of their context and
most of the rows that give their targets. With a context, a tenth of the positions sees only a
random part of it, because an engine does not always have all of it.

Shape letters: M rows of a batch (one per response token), N rows of one optimizer step, K heads, D
hidden, V vocabulary.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from heads.copying import TRAINED_PLACES
from heads.errors import CheckpointError, DataError
from heads.losses import LossConfig, Teacher, head_loss, known_lse
from heads.modules import MedusaHeads, clip_per_head
from medusa_ppo.companion.gate import RunningMean, under
from medusa_ppo.companion.positions import TrainingRows, in_blocks, look_up
from medusa_ppo.companion.wire import TableRows, tied
from medusa_ppo.config.companion_section import LOGITS_BYTES, CompanionConfig
from medusa_ppo.contract.rollout_batch import RolloutBatch
from medusa_ppo.runtime.rendezvous import Meeting

MOMENTS = ("exp_avg", "exp_avg_sq", "step")
CLIP_NORM = 1.0  # Largest gradient norm of each head.
TOGETHER = 32
"""Consecutive positions that heads are trained on together."""
CUT_SHARE = 0.1
"""Share of the positions whose context is cut at random."""
RAMP_STEPS = 40
"""Steps of a new optimizer on trained heads until its step size is the configured one. AdamW's
first steps move every weight by the whole step size, whatever the gradients, and trained heads lose
some of what they know. Untrained ones have nothing to lose.
"""
COUNTERS = (
    "batches_trained",
    "batches_skipped",
    "trained_tokens",
    "optimizer_steps",
    "ramp_steps",  # States of 0.3 end before it.
)


@dataclass(frozen=True)
class TrainReport:
    """The report on one batch.

    Attributes:
        loss: mean over heads and optimizer steps; NaN when nothing was trained.
        losses: mean loss of head 1..K over the optimizer steps.
        tokens: positions trained on, each counted once however many epochs.
        rows: positions of all passes, including replayed batches: the total work.
        optimizer_steps: steps taken.
        problem: why training on the batch stopped after these optimizer steps; empty: it didn't.
    """

    loss: float = math.nan
    losses: tuple[float, ...] = ()
    tokens: int = 0
    optimizer_steps: int = 0
    problem: str = ""
    rows: int = 0


class HeadsTrainer:
    """AdamW on the heads, gradients clipped for each head by itself, positions shuffled by a seeded
    generator.

    The heads' parameters are float32, the actor's tables constants.

    Attributes:
        rate: factor on the configured step size, set by the caller and kept over a restart.
        last_step_size: that of the last optimizer step; 0 before this process took one.
        ramp_steps: steps over which the optimizer's step size rises, from its first one on.
        team: processes that take every optimizer step together; None: this one alone.
        generator: draws the order of the positions.
        give_way: called between two pieces of work; may wait.
        lm_head_VD, embedding_VD: the actor's tables; on a CPU in float32 unless a dtype of products
            was given.
        ids_W: tokens that drafts come from; only these are used in products; None: all. Set by the
            caller.
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
        mean: RunningMean | None = None,
    ) -> None:
        """
        Args:
            heads: trained in place.
            lm_head_VD, embedding_VD: the actor's tables; the embedding only for kinds that read it.
            config: step size, loss, positions per step, epochs.
            seed: seed of the order of the positions.
            device: where to train; None: the CPU.
            schedule: factor of the step size by number of the optimizer step; None: a ramp of a
                new optimizer, and less for small steps.
            dtype: dtype of products; None: float32 on a CPU; on a GPU lm_head's dtype for products
                with it, and float32 for all others. Parameters, moments and sums stay float32.
            micro_positions: positions whose gradients are computed at once; None: as many as
                LOGITS_BYTES have room for.
            mean: running mean, updated after each optimizer step and part of the state; None: none.
        """
        self.rate = 1.0
        self.last_step_size = 0.0
        self.give_way: Callable[[], None] = lambda: None
        self.ids_W: torch.Tensor | None = None
        self._schedule = schedule
        self._mean = mean
        self._dtype = dtype
        self.device = device or torch.device("cpu")
        self.heads = heads.to(device=self.device, dtype=torch.float32)
        if mean:
            mean.heads.to(self.device, torch.float32)
        self._config = config
        self._learning_rate = config.learning_rate_of(lm_head_VD.shape[1])
        self._micro_positions = micro_positions or max(1, LOGITS_BYTES // (4 * lm_head_VD.shape[0]))
        self._loss = LossConfig.named(config.loss)
        self.generator = torch.Generator().manual_seed(seed)
        # By lm_head: its table, the draft tokens, and what `_tables_of` computed from them.
        self._products: dict[
            int,
            tuple[
                torch.Tensor,
                torch.Tensor | None,
                tuple[torch.Tensor, torch.Tensor | None, torch.Tensor],
            ],
        ] = {}
        self.set_tables(lm_head_VD, embedding_VD)
        self._named = dict(self.heads.named_parameters())
        self._optimizer = self._fresh_optimizer()
        self.join(None)
        self.batches_trained = self.batches_skipped = self.trained_tokens = self.optimizer_steps = 0

    def join(self, team: Meeting | None, *, alike: bool = False) -> None:
        """From now on, take every optimizer step together with these processes, which hold the same
        state: torch's DDP sums the gradients.

        Args:
            team: these processes; None: leave the team.
            alike: all get the same batches, and each takes its share of a step's positions;
                otherwise each trains on its own batch.
        """
        self.team = team
        self._alike = alike and team is not None
        self._groups: dict[str, Any] = {}
        self._step_losses: Any = self._losses_of_all(init_sync=True)

    def _losses_of_all(self, *, init_sync: bool) -> Any:
        """The losses, with gradients that DDP sums over the team. `init_sync`: the first process's
        heads become everyone's.
        """
        losses = _Losses(self.heads, self._losses)
        if self.team is None:
            return losses
        # One for each kind of device: to make one, all processes meet.
        if self.device.type not in self._groups:
            self._groups[self.device.type] = self.team.process_group(self.device)
        return DistributedDataParallel(
            losses,
            process_group=self._groups[self.device.type],
            init_sync=init_sync,
            # The cell of a single head takes no second step, so that matrix has no gradient.
            find_unused_parameters=self.heads.config.num_heads == 1,
        )

    def set_tables(
        self, lm_head_VD: torch.Tensor, embedding_VD: torch.Tensor | None = None
    ) -> None:
        """Replace the actor's frozen tables."""
        dtype = torch.float32 if self.device.type == "cpu" and self._dtype is None else None
        self.lm_head_VD = lm_head_VD.detach().to(self.device, dtype)
        # Without a conversion they stay the caller's own, and are never written to.
        self._owns_lm_head = self.lm_head_VD.data_ptr() != lm_head_VD.data_ptr()
        self._owns_embedding = False
        if embedding_VD is not None and tied(lm_head_VD, embedding_VD):
            self.embedding_VD: torch.Tensor | None = self.lm_head_VD
        else:
            self.embedding_VD = (
                None if embedding_VD is None else embedding_VD.detach().to(self.device, dtype)
            )
            if self.embedding_VD is not None and embedding_VD is not None:
                self._owns_embedding = self.embedding_VD.data_ptr() != embedding_VD.data_ptr()

    def set_rows(self, rows: TableRows) -> None:
        """Copy rows of the actor's tables; missing rows stay unchanged.

        Raises:
            DataError: they belong to another actor.
        """
        self._check_rows(rows.lm_head_RD, rows.lm_head_ids_R)
        if rows.embedding_ED is not None:
            self._check_rows(rows.embedding_ED, rows.embedding_ids_E)
        # These were computed from the old rows.
        self._products = {}
        if self.embedding_VD is not None and rows.embedding_ED is not None:
            # Only once: the given tables may be in Ray's store, or be the loop's own.
            if not self._owns_embedding:
                self.embedding_VD = self.embedding_VD.clone()
                self._owns_embedding = True
            self._write_rows(self.embedding_VD, rows.embedding_ids_E, rows.embedding_ED)
        if rows.lm_head_ids_R is None:
            self.lm_head_VD = rows.lm_head_RD.to(self.device, self.lm_head_VD.dtype)
            self._owns_lm_head = False
        else:
            if not self._owns_lm_head:
                self.lm_head_VD = self.lm_head_VD.clone()
                self._owns_lm_head = True
            self._write_rows(self.lm_head_VD, rows.lm_head_ids_R, rows.lm_head_RD)
        if self.embedding_VD is not None and rows.tied:
            self.embedding_VD = self.lm_head_VD
            self._owns_embedding = False

    def _write_rows(
        self, table_VD: torch.Tensor, ids: torch.Tensor | None, rows: torch.Tensor | None
    ) -> None:
        if ids is not None and rows is not None:
            table_VD.index_copy_(0, ids.to(self.device), rows.to(self.device, table_VD.dtype))

    def _check_rows(self, rows: torch.Tensor, ids: torch.Tensor | None) -> None:
        vocab, hidden = self.lm_head_VD.shape
        count = vocab if ids is None else ids.numel()
        inside = ids is None or not count or 0 <= int(ids.min()) <= int(ids.max()) < vocab
        if rows.shape != (count, hidden) or not inside:
            raise DataError(
                "The rows of the actor's tables do not fit the heads.",
                given=f"rows {tuple(rows.shape)} of {'all' if ids is None else count} tokens",
                expected=f"width {hidden}, tokens below {vocab}",
                do="Use heads made for this actor.",
            )

    def train_batch(
        self,
        batch: RolloutBatch,
        replay: Sequence[tuple[RolloutBatch, float]] = (),
        *,
        epochs: float | None = None,
        steps: int | None = None,
    ) -> TrainReport:
        """Train on a batch, and on shares of older ones.

        Args:
            batch: on-policy rollouts.
            replay: older batches, each with the share (0..1) of its positions that joins each
                epoch.
            epochs: passes over the positions; if this is not a whole number, the last pass covers a
                random part of them; None: as configured.
            steps: optimizer steps of a pass, at most as many as there are positions; None: as
                configured (`CompanionConfig.steps_of`). All of them are about equal.

        Returns:
            A report. If a step's losses or gradients are not finite, it and all later steps are
                skipped; the result of earlier steps is sound, and stays.

        Raises:
            DataError: the batch does not fit the heads.
        """
        self.check(batch)
        before = self.optimizer_steps
        try:
            losses, tokens, rows = self._train(
                batch, replay, self._config.epochs if epochs is None else epochs, steps
            )
        except FloatingPointError as error:
            self.batches_skipped += 1
            return TrainReport(optimizer_steps=self.optimizer_steps - before, problem=str(error))
        self.batches_trained += 1
        self.trained_tokens += tokens
        if not losses:
            return TrainReport(
                problem="No position has a target: all responses are one token long."
            )
        mean_K = torch.stack(losses).double().mean(0)
        return TrainReport(
            float(mean_K.mean()), tuple(mean_K.tolist()), tokens, len(losses), rows=rows
        )

    def reset_to(self, state: dict[str, torch.Tensor], *, moments: bool = True) -> None:
        """Go back to other heads (keys of `trainable_state`); counters, generator and `rate`
        continue, and the optimizer's moments if allowed.
        """
        self.heads.load_trainable_state(state)
        if self._mean is not None:
            self._mean.restart(state)
        if not moments:
            self._optimizer = self._fresh_optimizer()

    # ---- one batch

    def _train(
        self,
        batch: RolloutBatch,
        replay: Sequence[tuple[RolloutBatch, float]],
        epochs: float,
        wanted_steps: int | None,
    ) -> tuple[list[torch.Tensor], int, int]:
        self._products = {}  # Data derived from earlier batches' tables is no longer needed.
        sources = [(self._look_up(part), share) for part, share in [(batch, 1.0), *replay]]
        losses: list[torch.Tensor] = []
        worked = 0
        whole, rest = divmod(epochs, 1)
        for part in [1.0] * int(whole) + [rest] * (rest > 0):  # 2.25 -> 1, 1, 0.25
            picks = self._shuffle([(source, part * share) for source, share in sources])
            worked += picks.shape[0]
            count = picks.shape[0]
            steps = min(count, wanted_steps or self._config.steps_of(count))
            # Each worker of a team takes as many steps as the one with most, since a gradient sum
            # waits for all.
            steps = self.team.most(steps) if self.team else steps
            positions = self._positions_of_all(count) / max(1, steps)
            for number in range(steps):
                self.last_step_size = self._learning_rate * self.rate * self._step_size(positions)
                for group in self._optimizer.param_groups:
                    group["lr"] = self.last_step_size
                loss = self._loss.at(self.optimizer_steps)
                # Equal steps: a small one with what is left would move the heads as far as a whole.
                here = picks[number * count // steps : (number + 1) * count // steps]
                losses.append(self._step([source for source, _ in sources], self._own(here), loss))
        return losses, round(min(1.0, epochs) * sources[0][0].usable_N.numel()), worked

    def _positions_of_all(self, count: int) -> int:
        """Positions of the whole team's pass. Members must agree on it, or equal gradients would
        move their heads by different steps; a schedule doesn't ask for it.
        """
        if self.team is None or self._alike or self._schedule is not None:
            return count
        counted = torch.tensor([count], dtype=torch.int64)
        self.team.add_up(counted)
        return int(counted)

    def _own(self, picks_N3: torch.Tensor) -> torch.Tensor:
        """This worker's share of a step's positions: a run of them, because neighbours share most
        of their context and of the rows that give their targets. With every n-th position each
        worker would compute nearly all of these.
        """
        if self.team is None or not self._alike:
            return picks_N3
        rank, size, count = self.team.place.rank, self.team.place.size, picks_N3.shape[0]
        return picks_N3[rank * count // size : (rank + 1) * count // size]

    def _step_size(self, positions: float) -> float:
        """The schedule's factor at the next step. Without a schedule, that of a new optimizer's
        ramp, times the root of the step's share of a whole step: smaller steps are noisier.
        """
        if self._schedule is not None:
            return self._schedule(self.optimizer_steps)
        size = math.sqrt(min(1.0, positions / self._config.rate_positions))
        if self.ramp_steps:
            states = self._optimizer.state.values()
            age = max((int(values["step"]) for values in states), default=0)
            size *= min(1.0, (age + 1) / self.ramp_steps)
        return size

    def _look_up(self, batch: RolloutBatch) -> TrainingRows:
        config = self.heads.config
        sizes = config.num_heads, config.needs_embedding, config.context, config.copies
        rows = look_up(batch, *sizes)
        if self._loss.needs_teacher:
            rows.check_neighbours(self._config.loss)
        if self.ids_W is None:
            return rows.by_table_rows()
        place_V = torch.full((config.vocab_size,), -1).index_copy_(
            0, self.ids_W, torch.arange(self.ids_W.numel())
        )
        return rows.drafted_from(place_V, keep=self._loss.needs_teacher).by_table_rows()

    def _shuffle(self, sources: Sequence[tuple[TrainingRows, float]]) -> torch.Tensor:
        """(source, row, pairs that it sees) of one epoch in random order, int64 `[N, 3]`."""
        pairs = self.heads.config.context
        picks = []
        for index, (source, share) in enumerate(sources):
            usable_N = source.usable_N
            count = max(
                round(share * usable_N.numel()), int(index == 0)
            )  # Even a short pass trains on something.
            chosen = usable_N[in_blocks(usable_N.numel(), TOGETHER, self.generator)[:count]]
            picks.append(
                torch.stack(
                    [torch.full_like(chosen, index), chosen, torch.full_like(chosen, pairs)], dim=1
                )
            )
        joined = torch.cat(picks)
        joined = joined[in_blocks(joined.shape[0], TOGETHER, self.generator)]
        if pairs:
            drawn_N = torch.randint(1, pairs + 1, joined.shape[:1], generator=self.generator)
            cut_N = torch.rand(joined.shape[:1], generator=self.generator) < CUT_SHARE
            joined[:, 2] = torch.where(cut_N, drawn_N, pairs)
        return joined

    def _step(
        self, sources: Sequence[TrainingRows], picks_N3: torch.Tensor, loss: LossConfig
    ) -> torch.Tensor:
        """One optimizer step; returns the loss of each head. Micro-batches add up to the gradient
        of all positions at once.

        Nothing changes before all gradients are there and are finite, so training can stop between
        two steps. Only an error inside the update itself leaves half a step behind; to continue
        after one, use other heads (`reset_to`).
        """
        total_K = torch.zeros(self.heads.config.num_heads)
        for source, rows_N2 in _by_source(sources, picks_N3):
            total_K += source.mask_MK[rows_N2[:, 0]].sum(0)
        if self.team:
            self.team.add_up(total_K)
        loss_K = torch.zeros(self.heads.config.num_heads)
        self._optimizer.zero_grad(set_to_none=True)
        if self._step_losses is None:
            self._step_losses = self._losses_of_all(init_sync=False)
        micros = [
            part
            for micro_N3 in picks_N3.split(self._micro_positions)
            for part in _by_source(sources, micro_N3)
        ]
        if (
            self.team and not micros
        ):  # Without a position in this step, take part with an empty loss.
            micros = [(sources[0], picks_N3[:0, 1:])]
        for index, (source, rows_N2) in enumerate(micros):
            self.give_way()
            # Each loss is a mean over its own positions; weighted by their share, the means add up
            # to the mean over all.
            share_K = (source.mask_MK[rows_N2[:, 0]].sum(0).float() / total_K.clamp(min=1)).to(
                self.device
            )
            alone = isinstance(self._step_losses, _Losses) or index == len(micros) - 1
            with contextlib.nullcontext() if alone else self._step_losses.no_sync():
                micro_K = self._step_losses(source, rows_N2, loss) * share_K
                (
                    micro_K.sum() * (self.team.place.size if self.team else 1)
                ).backward()  # DDP takes the mean over the processes.
            loss_K += micro_K.detach().cpu()
        if self.team:
            self.team.add_up(loss_K)
        norm_K = clip_per_head(self._named, self.heads.config.num_heads, CLIP_NORM)
        if not bool(torch.isfinite(loss_K).all() and torch.isfinite(norm_K).all()):
            raise FloatingPointError(
                f"Not finite: losses {loss_K.tolist()}, gradient norms {norm_K.tolist()}."
            )
        self._optimizer.step()
        if self._mean is not None:
            self._mean.add(self._named.values())
        self.optimizer_steps += 1
        return loss_K

    def products(self) -> torch.autocast:
        """Within this context products have the dtype of training; sums stay float32."""
        return torch.autocast(
            self.device.type,
            self._dtype or torch.float32,
            enabled=self._dtype not in (None, torch.float32),
        )

    def _losses(
        self, source: TrainingRows, rows_N2: torch.Tensor, loss: LossConfig
    ) -> torch.Tensor:
        """Loss of each head at (row, pairs that it sees) of one batch, with the tables and the
        sampling of the policy that wrote it.
        """
        (rows_N, seen_N), batch = rows_N2.unbind(1), source.batch
        lm_head_VD, embedding_VD, product_WD = self._tables_of(batch)
        # Moved in the states' dtype: `to` with a dtype would convert on the host first.
        hidden_ND = source.states(rows_N).to(self.device).float()
        own_rows = None if batch.table_ids_R is None else batch.table_ids_R.numel()
        with self.products(), self.heads.tables_of(own_rows):
            condition = (
                source.condition_MK[rows_N].to(self.device)
                if source.condition_MK is not None
                else None
            )
            context = (
                source.context(rows_N, seen_N, self.device)
                if source.context_Mn is not None
                else None
            )
            factored = self.heads.factored(
                hidden_ND,
                lm_head_VD,
                condition=condition,
                embedding_VD=embedding_VD,
                context=context,
                text=source.text(rows_N, self.device),
                places=TRAINED_PLACES,
            )
        if self.ids_W is not None:
            rows_WD = product_WD if factored.weight.dim() == 2 else None
            factored = factored.of_tokens(self.ids_W.to(self.device), rows_WD)
        elif factored.weight.dim() == 2:
            factored = factored._replace(weight=product_WD)
        return head_loss(
            factored,
            source.targets_MK[rows_N].to(self.device),
            source.mask_MK[rows_N].to(self.device),
            loss,
            logprobs_NK=source.logprobs_MK[rows_N].to(self.device),
            teacher=(
                self._teacher(source, rows_N, lm_head_VD, product_WD)
                if loss.needs_teacher
                else None
            ),
            temperature=batch.temperature,
        )

    def _tables_of(
        self, batch: RolloutBatch
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """lm_head and embedding of the policy that wrote a batch, and the rows of lm_head used in
        products, in the dtype of products.
        """
        own = batch.lm_head_VD
        key = self.lm_head_VD if own is None else own
        found = self._products.get(id(key))
        if found is None or found[0] is not key or found[1] is not self.ids_W:
            dtype = self.lm_head_VD.dtype
            lm_head_VD = self.lm_head_VD if own is None else own.to(self.device, dtype)
            embedding_VD = (
                self.embedding_VD
                if batch.embedding_VD is None
                else batch.embedding_VD.to(self.device, dtype)
            )
            rows_WD = lm_head_VD
            if self.ids_W is not None:
                rows_WD = self._drafted_rows(lm_head_VD, batch.table_ids_R)
            product_WD = rows_WD.to(self._dtype or dtype)
            found = (key, self.ids_W, (lm_head_VD, embedding_VD, product_WD))
            self._products[id(key)] = found
        return found[2]

    def _drafted_rows(
        self, lm_head_VD: torch.Tensor, table_ids: torch.Tensor | None
    ) -> torch.Tensor:
        """Rows of the draft vocabulary. A token that joined it after a batch was kept uses its
        newest row.
        """
        assert self.ids_W is not None, "drafts come from some tokens"
        ids_W = self.ids_W.cpu()
        if table_ids is None:
            return lm_head_VD[ids_W.to(self.device)]
        places_W = torch.searchsorted(table_ids, ids_W).clamp(max=table_ids.numel() - 1)
        kept_W = (table_ids[places_W] == ids_W).unsqueeze(1).to(self.device)
        newest_WD = self.lm_head_VD[ids_W.to(self.device)]
        return torch.where(kept_W, lm_head_VD[places_W.to(self.device)], newest_WD)

    def _teacher(
        self,
        source: TrainingRows,
        rows_N: torch.Tensor,
        lm_head_VD: torch.Tensor,
        product_WD: torch.Tensor,
    ) -> Teacher:
        """The actor's own distribution of each target, from the states of the rows that predict
        them, each computed once.
        """
        batch = source.batch
        used_U, places_NK = source.teacher_rows_MK[rows_N].unique(return_inverse=True)
        hidden_UD = source.states(used_U).to(self.device).float()
        lse_U = None
        if self.ids_W is not None:
            ids_U = batch.response_ids_M[used_U].to(self.device)
            logprobs_U = batch.logprobs_M[used_U].to(self.device)
            lse_U = known_lse(hidden_UD, ids_U, logprobs_U, lm_head_VD, batch.temperature)
        return Teacher(
            hidden_UD,
            places_NK.to(self.device),
            product_WD,
            batch.temperature,
            batch.top_k,
            batch.top_p,
            lse_U,
        )

    def check(self, batch: RolloutBatch) -> None:
        """Raise DataError if a batch does not fit the heads or the loss."""
        config = self.heads.config
        if not batch.response_ids_M.numel():
            return  # A part without a response.
        width = batch.hidden_MD.shape[1]
        low = int(batch.response_ids_M.min())
        high = int(batch.response_ids_M.max())
        if width != config.hidden_size or low < 0 or high >= config.vocab_size:
            raise DataError(
                "The rollout batch does not fit the heads.",
                given=f"hidden size {width}, token ids {low} to {high}",
                expected=(
                    f"hidden size {config.hidden_size}, token ids 0 to {config.vocab_size - 1}"
                ),
                do="Use heads made for this actor.",
            )

    def _fresh_optimizer(self) -> torch.optim.AdamW:
        self.ramp_steps = 0 if self.heads.untrained else RAMP_STEPS
        return torch.optim.AdamW(
            self.heads.parameters(), lr=self._learning_rate, weight_decay=0.0
        )  # Weight decay would pull back to the start.

    # ---- state

    def move_to(self, device: torch.device) -> int:
        """Move heads, optimizer and tables to another device for the next batch. Returns the bytes
        now there.
        """
        self.device = device
        self._optimizer.zero_grad(set_to_none=True)
        moved: list[torch.Tensor] = []
        for heads in (self.heads, self._mean.heads if self._mean else None):
            moved += heads.to(device).parameters() if heads else ()
        for values in self._optimizer.state.values():
            values.update(
                {name: value.to(device) for name, value in values.items() if name != "step"}
            )  # AdamW keeps this on the CPU.
            moved += (value for name, value in values.items() if name != "step")
        one_table = self.embedding_VD is self.lm_head_VD
        self.lm_head_VD = self.lm_head_VD.to(device)
        self._products = {}
        moved.append(self.lm_head_VD)
        if self.embedding_VD is not None:
            if one_table:
                self.embedding_VD = self.lm_head_VD
            else:
                self.embedding_VD = self.embedding_VD.to(device)
                moved.append(self.embedding_VD)
        # A parameter that changes its device loses the node that DDP hooks into, silently: from
        # then on no gradient would leave its process. The next step makes it anew, so that its
        # buffers, as large as all gradients, don't exist while nothing is trained.
        self._step_losses = None
        return sum(tensor.nbytes for tensor in moved)

    def state_dict(self, *, copied: bool = True) -> dict[str, torch.Tensor]:
        """Everything that the next batch depends on: heads, optimizer, generator, counters. Flat,
        tensors only; a copy, or the tensors themselves for immediate reading.
        """
        heads = self.heads.trainable_state(copied=copied)
        state = {f"heads.{name}": tensor for name, tensor in heads.items()}
        for name, parameter in self._named.items():
            for moment, value in self._optimizer.state.get(parameter, {}).items():
                kept = value.detach()
                state[f"optimizer.{name}.{moment}"] = kept.clone() if copied else kept
        state |= self._mean.state_dict(copied=copied) if self._mean else {}
        state["generator"] = self.generator.get_state()
        state["counters"] = torch.tensor(
            [getattr(self, name) for name in COUNTERS], dtype=torch.int64
        )
        return state

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Restore a state. Raises CheckpointError if it does not belong to such a trainer."""
        try:
            self.heads.load_trainable_state(under(state, "heads."))
            optimizer = self._fresh_optimizer()
            for name, parameter in self._named.items():
                moments = under(state, f"optimizer.{name}.")
                if moments.keys() == set(MOMENTS):
                    optimizer.state[parameter] = {
                        moment: value.to("cpu" if moment == "step" else self.device, copy=True)
                        for moment, value in moments.items()
                    }
            self._optimizer = optimizer
            if self._mean is not None:
                self._mean.load_state_dict(state)
            self.generator.set_state(state["generator"].clone())
            counters = state["counters"].tolist()
            if len(counters) == len(COUNTERS) - 1:
                counters.append(0)
            for name, value in zip(COUNTERS, counters, strict=True):
                setattr(self, name, value)
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise  # The device's fault, not the state's.
        except (KeyError, ValueError, RuntimeError) as error:
            raise CheckpointError(
                "This is not a state of the companion's trainer.",
                given=f"{type(error).__name__}: {error}",
                expected=(
                    "tensors written by HeadsTrainer.state_dict for heads of the same kind and size"
                ),
                do=(
                    "Resume from the folder that the companion wrote, with the same heads"
                    " configuration."
                ),
            ) from error


class _Losses(torch.nn.Module):
    """The losses of a micro-batch as a module's forward pass, which is what DDP wraps."""

    def __init__(self, heads: MedusaHeads, losses: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.heads = heads
        self._of = losses

    def forward(
        self, source: TrainingRows, rows_N2: torch.Tensor, loss: LossConfig
    ) -> torch.Tensor:
        if rows_N2.numel():
            return self._of(source, rows_N2, loss)
        return (
            torch.stack([parameter.sum() for parameter in self.heads.parameters()])
            .sum()
            .mul(0)
            .expand(self.heads.config.num_heads)
        )


def _by_source(
    sources: Sequence[TrainingRows], picks_N3: torch.Tensor
) -> list[tuple[TrainingRows, torch.Tensor]]:
    """From the picks, the (row, pairs that it sees) of each source that has any."""
    found = [
        (source, picks_N3[picks_N3[:, 0] == index, 1:]) for index, source in enumerate(sources)
    ]
    return [(source, rows_N2) for source, rows_N2 in found if rows_N2.numel()]
