"""How a step's rollouts are made: responses are written and scored, one after the other or, in
pieces, at the same time.

    ppo.piece_prompts=null    engine ------------------ | actor, reference, critic, reward on the
                              whole batch
    ppo.piece_prompts=n       engine ------------------
                                    piece 0 | piece 1 | piece 2        each as soon as its last
                                                                       response has ended

    ppo.staleness=n           engine: step t + 1, up to t + n | ...
                              step t: scored, learned from    |

One engine call generates all responses of a step, with or without pieces, so its running set stays
full, and its output does not depend on them. A piece is all responses to n consecutive prompts,
whenever they end. So the configuration, never timing, decides what is computed together, and the
numbers equal, to the bit, those of the same pieces scored after generation. The engine's call runs
in its own thread, the models' passes in another one, and rewards in the caller's. The plugin's tap
on the actor's passes takes of each piece the states that may be in the batch's sample
(`plugin/piece_states.py`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from medusa_ppo.actors.hf import Tap
from medusa_ppo.contract import metrics as names
from medusa_ppo.contract.rollouts import Counters, ImagePrompt, Response, Rollouts, Sampling
from medusa_ppo.engines.pieces import Finished
from medusa_ppo.plugin.medusa_plugin import StatesTap
from medusa_ppo.plugin.piece_states import PieceStates
from medusa_ppo.ppo.batch import PPOBatch
from medusa_ppo.ppo.generation import Prompt, SpeedPairs
from medusa_ppo.ppo.learner import PPOLearner
from medusa_ppo.ppo.long_tail import Carried, LongTail
from medusa_ppo.ppo.placement import ACTOR
from medusa_ppo.ppo.run_progress import Timeline
from medusa_ppo.ppo.scores import Measured, Scores

Rewards = Callable[[Rollouts, list[Prompt]], Tensor]
"""Computes the rewards of responses, `rewards_S`, or of their steps, `rewards_SR`."""
Written = tuple[list[Prompt], Rollouts, dict[str, float]]
"""The answered prompts, their rollouts, and figures about the pair and about what is carried over.
"""
Answered = tuple[Rollouts, dict[str, float]]
"""The rollouts that a step learns from, and these figures."""


@dataclass
class Piece:
    """Responses to some consecutive prompts: their places in the batch, those that have ended, and
    what is known about them.
    """

    places: range
    ended: dict[int, Response] = field(default_factory=dict)
    scored: tuple[Response, ...] = ()
    measured: Future[Measured] | None = None
    rewards: Tensor | None = None


@dataclass
class Step:
    """A step's work. The caller's thread reads `news`: a complete piece, an error, or None when the
    engine is done.
    """

    prompts: list[Prompt]
    sampling: Sampling
    pieces: list[Piece]
    held: PieceStates | None
    news: SimpleQueue[Piece | BaseException | None] = field(default_factory=SimpleQueue)
    lock: threading.Lock = field(default_factory=threading.Lock)


class RolloutMaker:
    """Makes and scores the rollouts of one step after another.

        write, score                 here and now, in pieces where the configuration says so
        write_with_carried, score    here and now, with prompts of earlier steps
        begin ... take, score        in the engine's thread; others may be begun before one is taken

    Attributes:
        timeline: timeline of the step.
    """

    def __init__(
        self,
        learner: PPOLearner,
        speed: SpeedPairs,
        rewards: Rewards,
        *,
        pad_id: int,
        piece_prompts: int | None = None,
        tail: LongTail | None = None,
    ) -> None:
        """
        Args:
            rewards: computes rewards of responses.
            piece_prompts: as in the configuration.
            tail: carries prompts over to the next step; None: each step waits for all of its own.
        """
        self._tail = tail
        self._begun: dict[int, tuple[Sampling, Future[Written]]] = {}
        self._learner = learner
        self._speed = speed
        self._rewards = rewards
        self._piece_prompts = piece_prompts
        self._pad_id = pad_id
        self._engine_thread, self._models_thread = (
            ThreadPoolExecutor(1, f"medusa-ppo-{name}") for name in ("engine", "models")
        )
        self._step: Step | None = None
        self._writing_since = 0.0
        self.timeline = Timeline()

    # ---- here and now

    def write(
        self,
        step: int,
        prompts: list[Prompt],
        sampling: Sampling,
        tap: StatesTap | None = None,
    ) -> Answered:
        """The rollouts of a step, and figures about writing them; pieces are scored meanwhile.

        Args:
            tap: the one that `score` will get.
        """
        self.timeline = Timeline()
        self._fetch_images(prompts)
        pieces = [] if self._speed.due(step) else self._cut(len(prompts), sampling)
        if not pieces:
            with self.timeline.at_work("engine"):
                written = self._ask(prompts, sampling, step)
            return self._answered(written, sampling)
        held = None
        if tap is not None:
            responses = len(prompts) * sampling.responses_per_prompt
            held = tap.begin_pieces(step, responses, len(prompts))
        self._step = work = Step(prompts, sampling, pieces, held)
        self._learner.begin_batch(sampling)

        def ask() -> Written:
            with self.timeline.at_work("engine"):
                return self._ask(
                    prompts,
                    sampling,
                    step,
                    lambda place, response: self._ended(work, place, response),
                )

        call = self._engine_thread.submit(ask)
        call.add_done_callback(lambda _: work.news.put(None))
        self._reward_whole(work)
        _, rollouts, figures = call.result()
        return _with_their_images(rollouts, prompts), figures

    def write_with_carried(self, step: int, prompts: list[Prompt], sampling: Sampling) -> Answered:
        """Like `write`, for as many of the step's prompts and those carried over into it as are
        answered in time.
        """
        self.timeline = Timeline()
        with self.timeline.at_work("engine"):
            written = self._ask_with_carried(prompts, sampling, step)
        return self._answered(written, sampling)

    def carried_into(self, step: int) -> tuple[Carried, ...]:
        """Prompts carried over from the previous step."""
        return self._tail.into(step) if self._tail is not None else ()

    def figures(self) -> dict[str, Any]:
        """Figures from the step's timeline."""
        return self.timeline.figures()

    # ---- ahead

    @property
    def idle(self) -> bool:
        """Whether the engine has nothing to write, so that it can get new weights."""
        return all(call.done() for _, call in self._begun.values())

    def has_begun(self, step: int) -> bool:
        """Whether the step's rollouts are being written, or wait to be taken."""
        return step in self._begun

    def begin(self, step: int, prompts: list[Prompt], sampling: Sampling) -> None:
        """Let the engine write a step's rollouts, including those carried over into it, as soon as
        it has written the ones begun before.
        """
        self._fetch_images(prompts)
        call = self._engine_thread.submit(self._write_ahead, prompts, sampling, step)
        self._begun[step] = (sampling, call)

    def take(self, step: int) -> Answered:
        """The rollouts of a begun step, once they are written; its timeline begins."""
        self.timeline = Timeline()
        sampling, call = self._begun[step]
        written = call.result()
        del self._begun[step]
        return self._answered(written, sampling)

    def figures_ahead(self) -> dict[str, Any]:
        """Only the spans of the step's timeline: who waited for whom means nothing if the engine
        never waits.
        """
        if not self.idle:
            self.timeline.add("engine", self._writing_since)
        return {names.SPANS: self.timeline.figures()[names.SPANS]}

    def _write_ahead(self, prompts: list[Prompt], sampling: Sampling, step: int) -> Written:
        """Runs in the engine's thread; its seconds count in the timeline of the step in which they
        end.
        """
        ask = self._ask if self._tail is None else self._ask_with_carried
        self._writing_since = time.monotonic()
        try:
            return ask(prompts, sampling, step)
        finally:
            self.timeline.add("engine", self._writing_since)

    # ---- scored

    def score(
        self, rollouts: Rollouts, tap: Tap | None = None
    ) -> tuple[PPOBatch, Tensor, Scores, dict[str, float]]:
        """The batch of the last rollouts, its rewards, its scores, and figures for the log."""
        work = self._step
        self._step = None
        assert work is not None, "the rollouts must be written first"
        batch = PPOBatch(rollouts, self._learner.device, self._pad_id)
        if work.pieces:
            work.news.put(None)
            self._reward_whole(work)
        for piece in work.pieces:
            if piece.measured is not None:
                piece.measured.result()
        if work.pieces and all(
            piece.scored == rollouts.responses[piece.places.start : piece.places.stop]
            for piece in work.pieces
        ):
            measured, rewards = self._joined(batch, work.pieces)
            if isinstance(tap, StatesTap) and work.held is not None:
                # A tap may read the actor's tables.
                with self._learner.turns.on(ACTOR):
                    tap.take(work.held)
        else:
            # In one go: after an engine was lost, the responses may differ from those already
            # scored.
            self._learner.begin_batch(work.sampling)
            measured = self._learner.measure(batch, work.sampling, tap, self.timeline)
            with self.timeline.at_work(
                "reward"
            ):  # After the critic, whose place a reward model takes if roles take turns.
                rewards = self._rewards(rollouts, work.prompts)
        return batch, rewards, *self._learner.conclude(batch, measured, rewards)

    # ---- parts

    def _ask(
        self, prompts: list[Prompt], sampling: Sampling, step: int, finished: Finished | None = None
    ) -> Written:
        token_ids = [prompt.token_ids for prompt in prompts]
        return prompts, *self._speed.generate(token_ids, sampling, step, finished)

    def _ask_with_carried(self, prompts: list[Prompt], sampling: Sampling, step: int) -> Written:
        assert self._tail is not None, "only called if prompts are carried over"
        answered, rollouts = self._tail.write(step, prompts, sampling)
        return answered, rollouts, {names.PROMPTS_CARRIED: len(self._tail.into(step + 1))}

    def _answered(self, written: Written, sampling: Sampling) -> Answered:
        """Rollouts that were written as a whole, to be scored as a whole."""
        prompts, rollouts, figures = written
        self._step = Step(prompts, sampling, [], None)
        return _with_their_images(rollouts, prompts), figures

    def _fetch_images(self, prompts: Sequence[Prompt]) -> None:
        """Start computing the features of the prompts' images."""
        if _with_images(prompts):
            self._learner.prefetch_images([prompt.token_ids for prompt in prompts])

    def _cut(self, prompts: int, sampling: Sampling) -> list[Piece]:
        if self._piece_prompts is None:
            return []
        size = self._piece_prompts * sampling.responses_per_prompt
        total = prompts * sampling.responses_per_prompt
        return [Piece(range(start, min(start + size, total))) for start in range(0, total, size)]

    def _ended(self, work: Step, place: int, response: Response) -> None:
        """Take a finished response; this runs in the engine's threads. After a lost engine, a
        response may come a second time, when its piece is already being scored; `score` handles
        that.
        """
        piece = work.pieces[place // len(work.pieces[0].places)]
        with work.lock:
            piece.ended[place] = response
            if piece.measured is not None or len(piece.ended) < len(piece.places):
                return
            piece.scored = tuple(piece.ended[place] for place in piece.places)
            piece.measured = self._models_thread.submit(self._measure, work, piece)
        piece.measured.add_done_callback(
            lambda done: (
                work.news.put(error)
                if not done.cancelled() and (error := done.exception())
                else None
            )
        )
        work.news.put(piece)

    def _measure(self, work: Step, piece: Piece) -> Measured:
        batch = PPOBatch(_part(work, piece), self._learner.device, self._pad_id, piece.places.start)
        tap = None if work.held is None else work.held.tap(piece.places.start, piece.scored)
        return self._learner.measure(batch, work.sampling, tap, self.timeline)

    def _reward_whole(self, work: Step) -> None:
        """Compute the rewards of each piece as soon as it is complete, until the engine is done. If
        something fails meanwhile, raise that error and begin no further piece.
        """
        try:
            while (news := work.news.get()) is not None:
                if isinstance(news, BaseException):
                    raise news
                with self.timeline.at_work("reward"):
                    news.rewards = self._rewards(_part(work, news), work.prompts)
        except BaseException:
            for piece in work.pieces:
                if piece.measured is not None:
                    piece.measured.cancel()
            raise

    @staticmethod
    def _joined(batch: PPOBatch, pieces: Sequence[Piece]) -> tuple[Measured, Tensor]:
        measured = Measured.join(
            batch,
            [
                (piece.places.start, piece.measured.result())
                for piece in pieces
                if piece.measured is not None
            ],
        )
        found = [piece.rewards for piece in pieces if piece.rewards is not None]
        if found[0].dim() == 1:
            return measured, torch.cat(found)
        width = batch.mask_SR.shape[1]
        return measured, torch.cat(
            [
                torch.nn.functional.pad(rewards_SR, (0, width - rewards_SR.shape[1]))
                for rewards_SR in found
            ]
        )


def _with_images(prompts: Sequence[Prompt]) -> bool:
    return any(isinstance(prompt.token_ids, ImagePrompt) for prompt in prompts)


def _with_their_images(rollouts: Rollouts, prompts: Sequence[Prompt]) -> Rollouts:
    """The rollouts with their prompts' images, which an engine's answer doesn't contain."""
    if not _with_images(prompts):
        return rollouts
    return replace(rollouts, prompts=tuple(prompt.token_ids for prompt in prompts))


def _part(work: Step, piece: Piece) -> Rollouts:
    """The rollouts of a piece, to all prompts of the step."""
    return Rollouts(
        tuple(prompt.token_ids for prompt in work.prompts),
        piece.scored,
        Counters(),
        0.0,
        work.sampling,
    )
