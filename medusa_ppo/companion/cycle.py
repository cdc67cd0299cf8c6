"""One batch in, a better version out, perhaps: split, train, judge, publish or not. No threads, no
files, one flat state.
"""

from __future__ import annotations

import copy
import logging
import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from heads.acceptance import ReplayResult
from heads.errors import CheckpointError, DataError
from heads.heads_config import HeadsConfig
from heads.modules import MedusaHeads
from heads.tensorfile import is_finite
from medusa_ppo.companion.early_stopping import train_while_rising
from medusa_ppo.companion.gate import (
    FALLEN,
    WARM,
    Evidence,
    RunningMean,
    Served,
    Verdict,
    equal,
    extra_over_prompts,
    find_fault,
    fit_temperatures,
    judge,
    replay,
    under,
)
from medusa_ppo.companion.holdout import AHEAD_TOKENS, hold_out, stretches
from medusa_ppo.companion.positions import ReplayBuffer, sampled_share, with_tables
from medusa_ppo.companion.trainer import HeadsTrainer, TrainReport
from medusa_ppo.companion.wire import TableRows
from medusa_ppo.config.companion_section import HOLDOUT_SHARE, CompanionConfig
from medusa_ppo.contract.rollout_batch import RolloutBatch
from medusa_ppo.contract.status import ReplayRow
from medusa_ppo.drafting.products import most_frequent
from medusa_ppo.runtime.rendezvous import Meeting

logger = logging.getLogger(__name__)

SLOWER, SLOWEST = (
    0.5,
    1 / 64,
)  # Factor on the step size after a rollback, undone by a publish; and its minimum.
EASED = (
    1.05  # Factor after any other verdict: a step size that was once too large need not stay so.
)
# Share of the extra tokens: serving heads that lost this much since they were published train at
# full speed.
LAG = 0.1
JUDGED_ROWS = 0.75
"""Rows that heads are trained on for each row that they are judged on, where whole batches are
judged.
"""
# Confidence at each end of the interval by which a version counts as worse than its predecessor.
CERTAIN = 0.975
COUNTERS = (
    "version",
    "fresh",
    "candidates_rejected",
    "rollbacks",
    "last_policy_version",
    "published_policy_version",
    "judged",
    "followed",
    "fell_back",
    "batches_seen",
)
GONE = "upper_batch"
"""A counter that later releases don't have; its value in a state is ignored."""
COUNTERS_0_3 = (*COUNTERS[:6], GONE, *COUNTERS[6:])
LAYOUTS = {len(names): names for names in (COUNTERS, COUNTERS_0_3)}
"""The number of counters in a state shows which release wrote it."""
ROWS = ("serving", "candidate", "frozen")


@dataclass(frozen=True)
class CycleReport:
    """The outcome of one batch.

    Attributes:
        train: the trainer's report.
        verdict: the gate's; None if there was nothing to judge.
        problem: a sentence if the batch was of no use; empty otherwise.
    """

    train: TrainReport
    verdict: Verdict | None = None
    problem: str = ""

    @property
    def published(self) -> bool:
        """A new version is ready in `Cycle.serving`."""
        return self.verdict is not None and self.verdict.publish


class Cycle:
    """Candidate, serving and frozen heads, and the rule by which the candidate becomes the serving
    ones.

    Attributes:
        candidate: running mean of the heads in training; may serve next.
        serving: the last published heads (version 0: those the run started with).
        frozen: the first published heads, never trained again; None before.
        version: number of the last published heads; grows by one with every publish.
        serving_version: number of the serving heads: `version`, except after an engine went back to
            earlier ones, which it has under their own number.
        fresh: the last judged candidate is what is serving now.
        team: processes that learn the same from the same batches, and share the work; None: there
            are none.
        evidence: candidates against the serving heads, on holdouts.
        before: the previous serving heads, until `after` (the new ones against these, on holdouts
            of later batches) is decided.
        followed: versions that were compared with the previous one on later batches; `fell_back`:
            those of them that were significantly worse.
        rows: replay estimates of the heads in ROWS on the last judged holdout.
        replayed_version, replayed_policy_version: number of the serving heads in `rows`, which a
            verdict may have replaced since, and version of the actor that wrote the holdout.
        trainer: trains, and has the actor's tables.
        passes, positions_frac: passes over the last batch, and the share of its positions that were
            trained on.
        judged: batches that a candidate was judged on.
        gain: how much better the candidate was than the serving heads when it was last judged, by
            all evidence.
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
        num_drafts: int | None = None,
        draft_vocab: int | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._config = config
        self._served = Served(draft_temperature, num_drafts)
        self._draft_vocab = (
            draft_vocab
            if draft_vocab is not None and 0 < draft_vocab < heads_config.vocab_size
            else None
        )
        self._counts_V = torch.zeros(
            heads_config.vocab_size if self._draft_vocab else 0, dtype=torch.float64
        )
        self._seed = seed
        first = _new_heads(heads_config, lm_head_VD, seed, initial_state)
        self.candidate = _new_heads(heads_config, lm_head_VD, seed, initial_state)
        mean = RunningMean(self.candidate, steps=0 if first.untrained else WARM)
        how: dict[str, Any] = {
            "embedding_VD": embedding_VD,
            "device": device,
            "dtype": getattr(torch, config.dtype) if config.dtype else None,
            "mean": mean,
        }
        self.trainer = HeadsTrainer(first, lm_head_VD, config, seed, **how)
        self.replay = ReplayBuffer(config.replay_versions, config.replay_bytes)
        self.serving = _copy(self.trainer.heads)
        self.frozen: MedusaHeads | None = None
        self.rows: dict[str, ReplayRow | None] = {}
        self.replayed_version = self.replayed_policy_version = -1
        self.last_loss = math.nan
        self.last_losses: tuple[float, ...] = ()
        self.passes = self.positions_frac = self.gain = 0.0
        self.version = self.serving_version = 0
        self.fresh = False
        self.candidates_rejected = 0
        self.rollbacks = 0
        self.last_policy_version = -1
        self.published_policy_version = -1
        self.batches_seen = self.judged = self.followed = self.fell_back = 0
        self.before: MedusaHeads | None = None
        self.after = Evidence()
        # Extra tokens that the serving heads reached when they were published, or fell to since.
        self._level = 0.0
        # Rows of all passes since heads were judged.
        self._unjudged_rows = 0
        self.team: Meeting | None = None
        self.evidence = Evidence()

    @property
    def draft_ids(self) -> torch.Tensor | None:
        """The tokens that drafts come from, int64 `W`; None: any."""
        return self._served.ids_W

    def take_tables(self, tables: Any) -> None:
        """The actor's tables after an update: both whole, or the rows that a batch needs.

        Raises:
            DataError: rows of another actor.
        """
        if isinstance(tables, TableRows):
            self.trainer.set_rows(tables)
        else:
            self.trainer.set_tables(*tables)

    def join(self, team: Meeting) -> None:
        """From now on, learn together with these processes, which hold the same state and get the
        same batches.
        """
        self.team = team
        self.trainer.join(team, alike=True)
        self.replay.load_state_dict({})  # Not part of the state that the others got.

    def run(self, batch: RolloutBatch) -> CycleReport:
        """Train on most of the batch's responses and judge the result on the others.

        A batch of few prompts has none to spare: the heads from earlier batches are judged on all
        of it before training on it, if they were trained on enough rows (JUDGED_ROWS) since they
        were judged last.

        Raises:
            DataError: the batch does not fit the heads.
        """
        self.batches_seen += 1
        if not (is_finite(batch.hidden_MD) and is_finite(batch.logprobs_M)):
            return CycleReport(
                TrainReport(),
                problem="The batch holds hidden states or log-probs that are not finite.",
            )
        self.trainer.check(batch)
        self._count(batch)
        seed = self._seed * 1_000_003 + self.batches_seen
        training, holdout = hold_out(batch, HOLDOUT_SHARE, seed)
        verdict = None
        if holdout is None:
            ahead = stretches(batch, seed, AHEAD_TOKENS)
            # Judging three sets of heads on a row takes about as long as training on it.
            if self._unjudged_rows >= JUDGED_ROWS * int(ahead.lengths_S.sum()):
                verdict = self._judge(ahead)
            else:
                # An earlier batch's estimates say nothing about this one.
                self.rows = dict.fromkeys(ROWS)
        self.passes = float(self._config.epochs if batch.passes is None else batch.passes)
        # Less than one pass is made over a part of the positions.
        self.positions_frac = min(1.0, self.passes) * sampled_share(training)
        report = self._train(training, holdout, batch.policy_version)
        if report.problem:
            logger.warning(
                "Batch of policy version %d skipped: %s", batch.policy_version, report.problem
            )
            return CycleReport(report, verdict, report.problem)
        self._unjudged_rows += report.rows
        problem = ""
        if self.replay.wanted:
            tables = self.trainer.lm_head_VD, self.trainer.embedding_VD
            problem = self.replay.add(with_tables(training, *tables, self.trainer.ids_W))
        self.last_loss = report.loss
        self.last_losses = report.losses
        self.last_policy_version = batch.policy_version
        if holdout is not None:
            if batch.rising_s is not None:
                # The warm-up already stopped by this holdout, and the run begins with its heads.
                self._fit_temperatures(holdout)
            verdict = self._judge(holdout)
            if batch.rising_s is not None:
                # The configured step size is for untrained heads, and these are trained now.
                self.trainer.rate = SLOWER
        return CycleReport(report, verdict, problem)

    def _train(
        self, training: RolloutBatch, holdout: RolloutBatch | None, policy_version: int
    ) -> TrainReport:
        """Train on the batch and on what is replayed beside it; in a warm-up, for as long as
        acceptance on the holdout rises.

        An error in the middle (out of memory, say) may leave half an optimizer step behind. Then
        training continues from the serving heads, the last ones judged: copying everything before
        each batch would double memory and time for something that hardly ever happens.
        """
        older = self.replay.older(policy_version)
        try:
            if training.rising_s is not None and holdout is not None:
                return self._train_while_rising(training, holdout, training.rising_s)
            return self.trainer.train_batch(training, older, epochs=self.passes)
        except DataError:
            raise  # For a batch that doesn't fit: nothing was trained on it.
        except Exception:
            self.trainer.reset_to(self.serving.trainable_state(), moments=False)
            self.evidence.clear(same_second=True)  # It belonged to a candidate that is gone.
            raise

    def _train_while_rising(
        self, training: RolloutBatch, holdout: RolloutBatch, seconds: float
    ) -> TrainReport:
        """Passes for a warm-up: untrained heads need far more passes than those of a run."""
        report, self.passes = train_while_rising(
            self.trainer,
            training,
            lambda: self._measure(self.candidate, holdout).mean_acceptance_length - 1,
            self.candidate.trainable_state,
            self._config.steps_of(training.hidden_MD.shape[0]),
            seconds,
        )
        return report

    def _count(self, batch: RolloutBatch) -> None:
        """Follow the engine's draft vocabulary, which is chosen from responses by the same rule;
        heads train and are judged on it.
        """
        if self._draft_vocab is not None:
            self._counts_V += torch.bincount(batch.response_ids_M, minlength=self._counts_V.numel())
            ids_W = most_frequent(self._counts_V, self._draft_vocab)
            self._draft_from(self._served.ids_W if ids_W is None else ids_W)

    def _draft_from(self, ids_W: torch.Tensor | None) -> None:
        self._served = replace(self._served, ids_W=ids_W)
        self.trainer.ids_W = ids_W

    def _judge(self, holdout: RolloutBatch) -> Verdict:
        """Apply the gate's verdict."""
        self._unjudged_rows = 0
        fault = find_fault(self.trainer.heads, self.serving) or find_fault(
            self.candidate, self.serving
        )  # The running mean may keep it small.
        if fault:
            verdict = Verdict(False, True, fault)
        else:
            of_serving = self._measure(self.serving, holdout)
            of_candidate = self._measure(self.candidate, holdout)
            of_frozen = of_serving
            # Until the second version they are equal.
            if self.frozen is not None and not equal(self.frozen, self.serving):
                of_frozen = self._measure(self.frozen, holdout)
            # Right after a publish the two are equal; counting that would dilute the evidence.
            learned = not equal(self.candidate, self.serving, temperatures=False)
            if learned and math.isfinite(of_candidate.accepted):
                self.evidence.add(self.batches_seen, of_candidate, of_serving, holdout)
                self.judged, self.gain = (
                    self.judged + 1,
                    self.evidence.difference(self._config.gate_confidence).value,
                )
            self._follow(of_serving, of_frozen, holdout)
            verdict = judge(
                of_candidate, of_serving, of_frozen, self.evidence, self._config.gate_confidence
            )
        # With the rows, not before: judging may take as long as some steps of the loop, which ask
        # for the status meanwhile.
        self.replayed_version = self.serving_version
        self.replayed_policy_version = holdout.policy_version
        self._obey(verdict)
        # These temperatures are for later versions: what is published must be what was judged.
        if verdict.publish:
            self._fit_temperatures(holdout)
        return verdict

    def _fit_temperatures(self, holdout: RolloutBatch) -> None:
        """Set the candidate's draft temperatures, which apply from now on."""
        trainer = self.trainer
        with trainer.products():  # As in `_measure`: for the heads that are judged and that draft.
            fit_temperatures(
                self.candidate,
                holdout,
                trainer.lm_head_VD,
                embedding_VD=trainer.embedding_VD,
                served=self._served,
                team=self.team,
            )

    def _follow(
        self, of_serving: ReplayResult, of_frozen: ReplayResult, holdout: RolloutBatch
    ) -> None:
        """Compare the serving heads with their predecessors, on rollouts after the swap, until
        there are enough of these.
        """
        if self.before is not None:
            same = self.frozen is not None and equal(self.before, self.frozen)
            self.after.add(
                self.batches_seen,
                of_serving,
                of_frozen if same else self._measure(self.before, holdout),
                holdout,
            )
            if self.after.enough:
                self.followed += 1
                self.fell_back += self.after.difference(CERTAIN).high < 0
                self.before = None
        now = extra_over_prompts(of_serving, holdout, FALLEN)
        if now.high < (1 - LAG) * self._level:
            self.trainer.rate = 1.0
            self._level = now.value

    def _measure(self, heads: MedusaHeads, batch: RolloutBatch) -> ReplayResult:
        trainer = self.trainer
        with trainer.products():  # An engine also drafts in this dtype.
            return replay(
                heads,
                batch,
                trainer.lm_head_VD,
                embedding_VD=trainer.embedding_VD,
                served=self._served,
                team=self.team,
                give_way=trainer.give_way,
            )

    def move_to(self, device: torch.device) -> None:
        """Move all heads, the optimizer and the tables to another device."""
        self.trainer.move_to(device)
        for heads in (self.serving, self.frozen, self.before):
            if heads is not None:
                heads.to(device)

    def adopt(self, version: int, state: dict[str, torch.Tensor]) -> None:
        """Serve a version that was published after the loaded state was saved; training continues
        from that state.
        """
        self.serving.load_trainable_state(state)
        self.evidence.clear()
        self.before = None
        self.version = self.serving_version = version
        self.fresh = False
        self.frozen = self.frozen or _copy(self.serving)

    def go_on_from(self, version: int, state: dict[str, torch.Tensor], serving: int) -> None:
        """Serve these heads, which the engine has under the number `serving`, and train on from
        them; `version` was the last one offered to it.

        Raises:
            CheckpointError: they don't fit; nothing has changed.
        """
        self.adopt(max(version, self.version), state)
        self.serving_version = serving
        self.trainer.reset_to(self.serving.trainable_state(), moments=False)

    def _obey(self, verdict: Verdict) -> None:
        self.fresh = False  # First: others read the status meanwhile.
        self.rows |= {
            "serving": verdict.serving,
            "candidate": verdict.candidate,
            "frozen": verdict.frozen,
        }
        if verdict.publish or verdict.worse:  # From now on a different pair is compared.
            self.evidence.clear(same_second=not verdict.publish)
        if verdict.publish:
            if self.before is None:
                self.before = _copy(self.serving)
            else:
                self.before.load_trainable_state(self.serving.trainable_state(copied=False))
            self.after.clear()
            self.serving.load_trainable_state(self.candidate.trainable_state(copied=False))
            self.version += 1
            self.serving_version = self.version
            self.fresh = True
            self.trainer.rate = min(1.0, self.trainer.rate / SLOWER)
            self._level = verdict.candidate.mean_acceptance_length - 1 if verdict.candidate else 0.0
            self.published_policy_version = self.last_policy_version
            self.frozen = self.frozen or _copy(self.serving)
            return
        self.candidates_rejected += verdict.worse or verdict.difference is not None
        if verdict.worse:
            logger.warning(
                "The candidate fell behind the serving heads; training continues from the serving "
                "heads. %s",
                verdict.reason,
            )
            self.trainer.reset_to(
                self.serving.trainable_state(copied=False), moments=verdict.candidate is not None
            )
            self.trainer.rate = max(SLOWEST, self.trainer.rate * SLOWER)
            self.rollbacks += 1
        elif verdict.difference is not None:
            self.trainer.rate = min(1.0, self.trainer.rate * EASED)

    # ---- state

    def state_dict(self, *, copied: bool = True) -> dict[str, torch.Tensor]:
        """Everything that later batches depend on (replayed batches only with `saves_replay`).
        Flat, tensors only; a copy, or the tensors themselves for immediate reading.
        """
        trained = self.trainer.state_dict(copied=copied)
        state = {f"trainer.{name}": value for name, value in trained.items()}
        # They are equal right after a publish, which is when this is usually saved.
        served = None if equal(self.serving, self.candidate) else self.serving
        for role, heads in (("serving", served), ("frozen", self.frozen), ("before", self.before)):
            if heads is not None:
                tensors = heads.trainable_state(copied=copied)
                state |= {f"{role}.{name}": value for name, value in tensors.items()}
        if self._config.saves_replay:
            state |= {f"replay.{name}": value for name, value in self.replay.state_dict().items()}
        for role, evidence in (("evidence", self.evidence), ("after", self.after)):
            state |= {f"{role}.{name}": value for name, value in evidence.state_dict().items()}
        state["counters"] = torch.tensor(
            [getattr(self, name) for name in COUNTERS], dtype=torch.int64
        )
        state["schedule"] = torch.tensor(
            [
                self.trainer.rate,
                self.positions_frac,
                self.passes,
                self.gain,
                self._level,
                self._unjudged_rows,
                self.replayed_version,
                self.replayed_policy_version,
                self.serving_version,
            ],
            dtype=torch.float64,
        )
        if self._draft_vocab is not None:
            state["token_counts"] = self._counts_V.clone()
            if self._served.ids_W is not None:
                state["draft_ids"] = self._served.ids_W
        if self.last_losses:
            state["last_losses"] = torch.tensor(
                [self.last_loss, *self.last_losses], dtype=torch.float64
            )
        for name, row in self.rows.items():
            if row is not None:
                state[f"rows.{name}"] = torch.tensor(
                    [row.mean_acceptance_length, *row.acceptance_per_position], dtype=torch.float64
                )
        return state

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Restore a state. Raises CheckpointError if it does not belong to such a cycle."""
        missing = [
            name
            for name in ("counters", "schedule", "trainer.counters", "trainer.generator")
            if name not in state
        ]
        names = () if missing else LAYOUTS.get(state["counters"].numel(), ())
        if not names:
            raise CheckpointError(
                "This is not a state of the companion.",
                given=f"missing: {', '.join(missing) or 'none'}; {len(state)} tensors",
                expected="a file written by the companion of this release, of 0.3.0 or 0.2.0",
                do="Resume from the folder that the companion wrote.",
            )
        self.trainer.load_state_dict(under(state, "trainer."))
        self.serving.load_trainable_state(under(state, "serving.") or under(state, "trainer.mean."))
        self.frozen, self.before = (
            self._heads_of(under(state, role)) for role in ("frozen.", "before.")
        )
        # The state may be of a run with a draft vocabulary, which was switched off since.
        if self._draft_vocab is not None:
            self._counts_V = state.get("token_counts", self._counts_V).clone()
            self._draft_from(state.get("draft_ids", self._served.ids_W))
        # What was kept for a draft vocabulary has the tables' rows of its tokens alone.
        self.replay.load_state_dict(under(state, "replay."), whole_tables=self._draft_vocab is None)
        self.evidence.load_state_dict(under(state, "evidence."))
        self.after.load_state_dict(under(state, "after."))
        for name, value in zip(names, state["counters"].tolist(), strict=True):
            if name != GONE:
                setattr(self, name, value)
        self.trainer.rate, self.positions_frac, *later = state["schedule"].tolist()
        # Earlier releases wrote fewer numbers: those before 0.4 not the fourth of these, and not
        # yet which versions are serving and were judged.
        later += [0.0] * (4 - len(later))
        self.passes, self.gain, self._level, unjudged_rows, *versions = later
        self._unjudged_rows = int(unjudged_rows)
        known = (self.version - bool(self.fresh), self.last_policy_version, self.version)
        versions = [*map(int, versions), *known[len(versions) :]]
        self.replayed_version, self.replayed_policy_version, self.serving_version = versions
        self.last_loss, *losses = (
            state["last_losses"].tolist() if "last_losses" in state else [math.nan]
        )
        self.last_losses = tuple(losses)
        rows = {name: value.tolist() for name, value in under(state, "rows.").items()}
        self.rows = {
            name: ReplayRow(values[0], tuple(values[1:]))
            for name, values in rows.items()
            if name in ROWS  # States of 0.3.0 may hold two more rows.
        }

    def _heads_of(self, state: dict[str, torch.Tensor]) -> MedusaHeads | None:
        heads = _copy(self.serving) if state else None
        if heads is not None:
            heads.load_trainable_state(state)
        return heads


def _new_heads(
    config: HeadsConfig, lm_head_VD: torch.Tensor, seed: int, state: dict[str, torch.Tensor] | None
) -> MedusaHeads:
    """New heads whose random parts depend only on the seed; the process's own generator is not
    touched.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # Not a GPU's, which would not be restored.
        heads = MedusaHeads(config)
    if state is not None:
        heads.load_trainable_state({name: value.to(torch.float32) for name, value in state.items()})
    elif config.lm_head == "own":
        heads.init_own_lm_heads(lm_head_VD)
    return heads


def _copy(heads: MedusaHeads) -> MedusaHeads:
    return copy.deepcopy(heads).requires_grad_(False)
