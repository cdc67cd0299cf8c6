"""One batch in, a better version out, perhaps: split, train, judge, publish or not. No threads, no files, one flat state."""

from __future__ import annotations

import copy
import logging
import math
from dataclasses import dataclass, replace

import torch

from heads.acceptance import ReplayResult
from heads.checkpoint import checksum
from heads.errors import CheckpointError
from heads.heads_config import HeadsConfig
from heads.modules import MedusaHeads
from medusa_ppo.companion.gate import Verdict, find_fault, judge, replay, replay_row
from medusa_ppo.companion.positions import ReplayBuffer, fraction_weights, sampled_share
from medusa_ppo.companion.schedule import Decision, Schedule
from medusa_ppo.companion.trainer import WARM, HeadsTrainer, RunningMean, TrainReport, under
from medusa_ppo.config import HOLDOUT_SHARE, CompanionConfig
from medusa_ppo.meeting import Meeting
from medusa_ppo.types import ReplayRow, RolloutBatch

logger = logging.getLogger(__name__)

UPPER_MARK_PASSES = (1, 1, 2, 4)  # Over one batch, one after the other; measured after each.
SLOWER, FASTER, SLOWEST = 0.5, 1.1, 1 / 64  # Factors on the step size after a rollback and after a publish, and its least share.
COUNTERS = (
    "version",
    "fresh",
    "candidates_rejected",
    "rollbacks",
    "last_policy_version",
    "published_policy_version",
    "upper_batch",
    "batches_seen",
)


@dataclass(frozen=True)
class CycleReport:
    """What became of one batch.

    Attributes:
        train: the trainer's report.
        verdict: the gate's; None when there was nothing to judge.
        problem: one sentence when the batch was of no use; empty otherwise.
    """

    train: TrainReport
    verdict: Verdict | None = None
    problem: str = ""

    @property
    def published(self) -> bool:
        """A new version is ready in `Cycle.serving`."""
        return self.verdict is not None and self.verdict.publish


class Cycle:
    """Candidate, serving and frozen heads, and the rule by which the candidate becomes the serving ones.

    Attributes:
        candidate: running mean of the heads in training; the serving ones of tomorrow.
        serving: the last published heads (version 0: those the run started with).
        frozen: the first published heads, never trained again; None before.
        version: number of the serving heads; grows by one with every publish.
        fresh: the last judged candidate is what is serving now.
        team: processes that learn the same from the other parts of each batch; None: there are none.
        rows: replay estimates `serving`, `candidate`, `frozen` on the last judged holdout, and of the last upper mark `upper` and, on the
            same holdout, `upper_serving`.
        upper_batch: number of the batch that the upper mark is of; 0: none was taken.
        trainer: trains, and has the actor's tables.
        schedule: how much a batch is trained on; its `last` decision.
        positions_frac: share of the last batch's positions that were trained on.
    """

    def __init__(
        self,
        heads_config: HeadsConfig,
        config: CompanionConfig,
        lm_head_VD: torch.Tensor,
        *,
        seed: int,
        initial_state: dict[str, torch.Tensor] | None = None,
        embedding_VD: torch.Tensor | None = None,
        draft_temperature: float = 0.0,
        device: torch.device | None = None,
    ) -> None:
        self._config, self._draft_temperature = config, draft_temperature
        self._seed = seed
        first = _new_heads(heads_config, lm_head_VD, seed, initial_state)
        self.candidate = _new_heads(heads_config, lm_head_VD, seed, initial_state)
        mean = RunningMean(self.candidate, config.average, steps=0 if first.untrained else WARM)
        self.trainer = HeadsTrainer(first, lm_head_VD, config, seed, embedding_VD=embedding_VD, device=device, mean=mean)
        self.schedule = Schedule(config.schedule, config.epochs)
        self.replay = ReplayBuffer(config.replay_versions, config.replay_bytes)
        self.serving = _copy(self.trainer.heads)
        self.frozen: MedusaHeads | None = None
        self.rows: dict[str, ReplayRow | None] = {}
        self.last_loss = math.nan
        self.last_losses: tuple[float, ...] = ()
        self.positions_frac = 0.0
        self.version = 0
        self.fresh = False
        self.candidates_rejected = 0
        self.rollbacks = 0
        self.last_policy_version = -1
        self.published_policy_version = -1
        self.batches_seen = 0
        self.upper_batch = 0
        self.team: Meeting | None = None

    def join(self, team: Meeting | None) -> None:
        """From now on, learn together with these processes, which hold the same state. Batches kept for replay are forgotten."""
        self.team = self.trainer.team = team
        self.replay.load_state_dict({})

    def run(self, batch: RolloutBatch) -> CycleReport:
        """Train on most of the batch's responses and judge the result on the others.

        A batch of one prompt leaves no others: all of it judges what earlier batches have made, and is trained on afterwards.

        Raises:
            DataError: the batch does not fit the heads.
        """
        self.batches_seen += 1
        finite = bool(torch.isfinite(batch.hidden_MD).all() and torch.isfinite(batch.logprobs_M).all())
        if self.team is not None:
            finite = not self.team.most(int(not finite))
        if not finite:
            return CycleReport(TrainReport(), problem="The batch holds hidden states or log-probs that are not finite.")
        self.trainer.check(batch)
        seed = self._seed * 1_000_003 + self.batches_seen
        training, holdout = batch.hold_out(HOLDOUT_SHARE, seed)
        verdict = self._judge(batch) if holdout is None and batch.weights_M is None else None
        before = None if holdout is None or self._config.schedule == "fixed" else self._measure(self.serving, holdout)
        passes = self._decide(before).passes
        if self._config.position_share < 1 and training.weights_M is None:  # Else they were sampled before states were copied, or not.
            training = replace(training, weights_M=fraction_weights(training.lengths_S, self._config.position_share, seed))
        self.positions_frac = sampled_share(training)
        report = self.trainer.train_batch(training, self.replay.older(batch.policy_version), epochs=passes)
        if report.problem:
            logger.warning("Batch of policy version %d skipped: %s", batch.policy_version, report.problem)
            return CycleReport(report, verdict, report.problem)
        self.replay.add(training)
        self.last_loss, self.last_losses = report.loss, report.losses
        self.last_policy_version = batch.policy_version
        if holdout is None:
            problem = "" if verdict else "A batch of one prompt, of which only a sample of positions is here, leaves nothing to judge on."
            return CycleReport(report, verdict, problem)
        verdict = self._judge(holdout, before)
        if self._config.upper_mark_every and self.batches_seen % self._config.upper_mark_every == 0:
            self.rows |= {"upper": self._upper_mark(training, holdout), "upper_serving": verdict.serving}
            self.upper_batch = self.batches_seen
        self._tell_schedule(verdict)
        return CycleReport(report, verdict)

    def _judge(self, holdout: RolloutBatch, of_serving: ReplayResult | None = None) -> Verdict:
        """What the gate says, which is done."""
        fault = find_fault(self.trainer.heads, self.serving)  # What the mean has not taken in yet, or keeps small.
        if fault:
            verdict = Verdict(False, True, fault)
        else:
            confidence, judged = self._config.gate_confidence, (self.candidate, self.serving, self.frozen)
            verdict = judge(*judged, lambda heads: self._measure(heads, holdout), confidence, of_serving)
        self._obey(verdict)
        return verdict

    def _measure(self, heads: MedusaHeads, batch: RolloutBatch) -> ReplayResult:
        trainer, temperature = self.trainer, self._draft_temperature
        return replay(heads, batch, trainer.lm_head_VD, embedding_VD=trainer.embedding_VD, draft_temperature=temperature, team=self.team)

    def _decide(self, before: ReplayResult | None) -> Decision:
        if before is None or not before.drafts:
            return self.schedule.decide(None)
        interval = before.confidence_interval(2 * self._config.gate_confidence - 1)
        return self.schedule.decide(interval.value, interval.high)

    def _tell_schedule(self, verdict: Verdict) -> None:
        upper = self.rows.get("upper") if self.upper_batch == self.batches_seen else None
        if verdict.serving is not None and verdict.candidate is not None and verdict.difference is not None:
            self.schedule.judged(
                verdict.serving.mean_acceptance_length,
                verdict.candidate.mean_acceptance_length,
                verdict.difference.low,
                published=verdict.publish,
                upper=None if upper is None else upper.mean_acceptance_length,
            )

    def _upper_mark(self, training: RolloutBatch, holdout: RolloutBatch) -> ReplayRow:
        """The most that this very batch could give: a copy of the candidate is fitted to it on and on, and its best replay counts.

        Fitted on the responses that are not judged. Heads fitted on those that are reach much more, by learning them by heart: what they
        gain there they lose on other responses of the same policy (docs/companion.md has the figures).
        """
        trainer, mean = self.trainer, RunningMean(_copy(self.candidate), self._config.average, steps=WARM)
        fitted = HeadsTrainer(
            _copy(self.candidate).requires_grad_(True),
            trainer.lm_head_VD,
            self._config,
            self._seed,
            embedding_VD=trainer.embedding_VD,
            device=trainer.device,
            team=self.team,
            mean=mean,
        )
        fitted.rate = trainer.rate
        results = [self._measure(self.candidate, holdout)]
        for passes in UPPER_MARK_PASSES:
            fitted.train_batch(training, epochs=passes)
            results += [self._measure(heads, holdout) for heads in (fitted.heads, mean.heads)]
        best = max(results, key=lambda result: result.mean_acceptance_length)
        return replay_row(best)

    def move_to(self, device: torch.device) -> None:
        """Carry all heads, the optimizer and the tables to another device."""
        self.trainer.move_to(device)
        for heads in (self.serving, self.frozen):
            if heads is not None:
                heads.to(device)

    def adopt(self, version: int, state: dict[str, torch.Tensor]) -> None:
        """Serve a version that was published after the state now loaded was saved; training goes on from that state."""
        self.serving.load_trainable_state(state)
        self.version = version
        self.fresh = False
        self.frozen = self.frozen or _copy(self.serving)

    def _obey(self, verdict: Verdict) -> None:
        self.rows |= {"serving": verdict.serving, "candidate": verdict.candidate, "frozen": verdict.frozen}
        self.fresh = verdict.publish
        if verdict.publish:
            self.serving.load_trainable_state(self.candidate.trainable_state())
            self.version += 1
            self.trainer.rate = min(1.0, self.trainer.rate * FASTER)
            self.published_policy_version = self.last_policy_version
            self.frozen = self.frozen or _copy(self.serving)
            return
        self.candidates_rejected += 1
        if verdict.worse:
            logger.warning("The candidate fell behind the serving heads; training goes on from these. %s", verdict.reason)
            self.trainer.reset_to(self.serving.trainable_state())
            self.trainer.rate = max(SLOWEST, self.trainer.rate * SLOWER)
            self.rollbacks += 1

    # ---- state ------------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, torch.Tensor]:
        """A copy of everything that later batches depend on (replayed batches only with `saves_replay`). Flat, tensors only."""
        state = {f"trainer.{name}": value for name, value in self.trainer.state_dict().items()}
        state |= {f"serving.{name}": value for name, value in self.serving.trainable_state().items()}
        if self.frozen is not None:
            state |= {f"frozen.{name}": value for name, value in self.frozen.trainable_state().items()}
        if self._config.saves_replay:
            state |= {f"replay.{name}": value for name, value in self.replay.state_dict().items()}
        state["counters"] = torch.tensor([getattr(self, name) for name in COUNTERS], dtype=torch.int64)
        state["schedule"] = torch.tensor([self.trainer.rate, self.positions_frac, *self.schedule.state()], dtype=torch.float64)
        if self.last_losses:
            state["last_losses"] = torch.tensor([self.last_loss, *self.last_losses], dtype=torch.float64)
        for name, row in self.rows.items():
            if row is not None:
                state[f"rows.{name}"] = torch.tensor([row.mean_acceptance_length, *row.acceptance_per_position], dtype=torch.float64)
        return state

    def digest(self) -> str:
        """Checksum over all of the state: equal in processes that learn together."""
        return checksum(self.state_dict())

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Take over a state. Raises CheckpointError when it is not one of such a cycle."""
        missing = [name for name in ("counters", "trainer.counters", "trainer.generator") if name not in state]
        if missing or state["counters"].numel() != len(COUNTERS):
            raise CheckpointError(
                "This is not a state of the companion.",
                given=f"missing: {', '.join(missing) or 'none'}; {len(state)} tensors",
                expected="a file written by the companion of the same release",
                do="Resume from the folder that the companion wrote.",
            )
        self.trainer.load_state_dict(under(state, "trainer."))
        self.serving.load_trainable_state(under(state, "serving."))
        frozen = under(state, "frozen.")
        self.frozen = _copy(self.serving) if frozen else None
        if self.frozen is not None:
            self.frozen.load_trainable_state(frozen)
        self.replay.load_state_dict(under(state, "replay."))
        for name, value in zip(COUNTERS, state["counters"].tolist(), strict=True):
            setattr(self, name, value)
        if "schedule" in state:
            self.trainer.rate, self.positions_frac, *schedule = state["schedule"].tolist()
            self.schedule.load(schedule)
        self.last_loss, *losses = state["last_losses"].tolist() if "last_losses" in state else [math.nan]
        self.last_losses = tuple(losses)
        rows = {name: value.tolist() for name, value in under(state, "rows.").items()}
        self.rows = {name: ReplayRow(values[0], tuple(values[1:])) for name, values in rows.items()}


def _new_heads(config: HeadsConfig, lm_head_VD: torch.Tensor, seed: int, state: dict[str, torch.Tensor] | None) -> MedusaHeads:
    """New heads whose random parts depend on the seed alone; the process's own generator is left as it is."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        heads = MedusaHeads(config)
    if state is not None:
        heads.load_trainable_state({name: value.to(torch.float32) for name, value in state.items()})
    elif config.lm_head == "own":
        heads.init_own_lm_heads(lm_head_VD)
    return heads


def _copy(heads: MedusaHeads) -> MedusaHeads:
    return copy.deepcopy(heads).requires_grad_(False)
