"""Several engines behind the interface of one: work is balanced, every version is on all of them,
and lost ones are restarted.

    generate      the call is cut into pieces (`cut`), and each engine gets its share of them in one
                  call (`deal`)
    swap, sync    all engines at once, from one file that is checked once; it is kept until the next
                  one, for engines that come late
    memory        what one engine has written goes to all others, and to restarted ones
    Ctrl-C        in a call: closes the pool
    lost engine   its pieces go to the others; it is restarted in the background, catches up, and
                  takes pieces again. A server at an address is looked for until it is back

An engine answers only with the pool's actor: one that missed a sync gets it before its next piece,
and if it has no room for it, it gets no pieces until the next one. So it is with heads, but drafts
of older ones, or none, do no harm: an engine that does not take newer ones goes on without. A pool
of one restarts its engine when it is lost; the engine samples as it would alone.
"""

from __future__ import annotations

import functools
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar, Unpack

from heads.errors import DataError, EngineError, NoRoomError, SwapError
from medusa_ppo.contract.rollouts import Counters, EngineShare, Response, Rollouts, Sampling
from medusa_ppo.contract.status import Checked, SwapReceipt
from medusa_ppo.drafting.choice import merge_choices
from medusa_ppo.drafting.memory import Row
from medusa_ppo.engines import rollout_engine as base
from medusa_ppo.engines.pieces import (
    Finished,
    Partly,
    Piece,
    SharedMemory,
    cut,
    deal,
    in_call,
    piece_seed,
)
from medusa_ppo.runtime.files import OwnedFolder
from medusa_ppo.vllm_plugin.worker_calls import Drafting

logger = logging.getLogger(__name__)

Factory = Callable[[int], base.RolloutEngine]
Call = Callable[[base.RolloutEngine], Any]
Ask = Callable[[base.RolloutEngine, Piece, base.Prompts, Sampling], Rollouts]
MAX_RESTARTS = 3  # Per engine, between two answers.
LOOK_EVERY_S = 10.0  # For a server that somebody else restarts.
METHODS = {"heads": "swap_heads", "actor": "sync_actor"}
NAMES = {"heads": "new heads", "actor": "the actor's weights"}


@dataclass
class Seat:
    """One engine's place in the pool. `engine` is None while it restarts, and for good after too
    many restarts in a row.

    Attributes:
        restarts: since its last answer.
        away_since: when it was first lost since it was last there, by the monotonic clock; None: it
            was not.
        why: why it was lost, or did not start; empty: it was neither.
    """

    index: int
    engine: base.RolloutEngine | None
    restarts: int = 0
    starting: Future[base.RolloutEngine] | None = None
    away_since: float | None = None
    why: str = ""
    settings: Drafting = field(default_factory=Drafting)
    versions: dict[str, int] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)
    """The versions that it did not take, of which a warning has told."""
    remembers: bool = True
    started_for_heads: bool = False
    """It was started again because it drafts nothing with the pool's heads; until it takes some, no
    other start is tried for that.
    """
    behind: bool = False
    """It can't get the pool's actor before the next sync; until then it gets no pieces."""
    share: EngineShare = field(default_factory=EngineShare)
    speed: float | None = None
    """Tokens per second in the calls so far, weighting newer ones more; None: it has answered
    none.
    """


@dataclass(frozen=True)
class Load:
    """Pieces that an engine gets in one call.

    Attributes:
        number: its place among the call's loads; its seed depends on this.
        pieces: as assigned.
        seat: the seat that it belongs to, while that engine is there; None: any engine's.
    """

    number: int
    pieces: tuple[Piece, ...]
    seat: Seat | None

    @property
    def prompts(self) -> Piece:
        """Indices of its prompts, in the order of the engine's call."""
        return tuple(index for piece in self.pieces for index in piece)


Given = ParamSpec("Given")
Answer = TypeVar("Answer")
Running = dict[Future[Rollouts | None], tuple[Seat, Load]]
"""Calls; one that returns None was made to an engine that is `behind`."""


def _closed_by_ctrl_c(
    method: Callable[Concatenate[EnginePool, Given], Answer],
) -> Callable[Concatenate[EnginePool, Given], Answer]:
    """The same method; Ctrl-C in it also closes the pool. It ends the caller's wait, but not the
    calls in the pool's threads: servers would write for nobody, and Python waits for threads at its
    end.
    """

    @functools.wraps(method)
    def closing(pool: EnginePool, *args: Given.args, **kwargs: Given.kwargs) -> Answer:
        try:
            return method(pool, *args, **kwargs)
        except BaseException as error:
            if not isinstance(error, Exception):
                pool.close()
            raise

    return closing


class EnginePool(base.RolloutEngine):
    """Engines that answer as one.

    Attributes:
        shares: what each engine did in the last `generate`.
        restarts: engine restarts so far.
        memory: a copy of what all of them remember, with the same number of bytes (0 until set).
    """

    def __init__(
        self,
        factory: Factory,
        count: int,
        *,
        on_close: Callable[[], None] = lambda: None,
        back_within_s: float = 0.0,
        closing: threading.Event | None = None,
    ) -> None:
        """Start `count` engines, all at once. If one fails, ends the others and raises its error.

        Args:
            factory: starts the engine with a given index; called again for a lost one.
            count: number of engines.
            on_close: called when all engines are closed.
            back_within_s: the engines are servers that somebody else restarts, and the factory
                finds one only when it is back: for so many seconds the pool waits if it has no
                other engine. 0: the factory starts them.
            closing: set by `close`, so that the factory gives up what it is starting.
        """
        self._factory = factory
        self._on_close = on_close
        self._back_within_s = back_within_s
        # One call per engine, plus the restart of a lost one.
        self._threads = ThreadPoolExecutor(2 * count, thread_name_prefix="medusa-ppo-pool")
        self._kept: dict[str, tuple[Path, int, Checked]] = {}
        self._folder: OwnedFolder | None = None
        self._settings = Drafting()
        self.memory = SharedMemory(0)
        self.restarts = 0
        self._closing = closing or threading.Event()
        starts = [self._threads.submit(factory, index) for index in range(count)]
        self._seats = [Seat(index, None, starting=start) for index, start in enumerate(starts)]
        try:
            # Wait for all of them, even if one has failed: those that came up must be closed.
            wait(starts)
        except BaseException:  # Ctrl-C.
            self.close()
            raise
        for seat, start in zip(self._seats, starts, strict=True):
            seat.starting = None
            seat.engine = None if start.exception() else start.result()
        failed = next((error for start in starts if (error := start.exception())), None)
        if failed is not None:
            self.close()
            raise failed
        engines = self._engines()
        # Servers started by hand may have different numbers of heads.
        self.max_drafts = min(engine.max_drafts for engine in engines)
        self.num_drafts = min(engine.num_drafts for engine in engines)
        self.note = engines[0].note
        self.heads_version = engines[0].heads_version
        self.policy_version = engines[0].policy_version
        for seat in self._seats:
            # Newly started engines agree, and no file is kept; none is behind.
            seat.versions = {"heads": self.heads_version, "actor": self.policy_version}

    @property
    def shares(self) -> tuple[EngineShare, ...]:
        return tuple(seat.share for seat in self._seats)

    # ---- the engine's methods

    def generate(self, prompts: base.Prompts, sampling: Sampling) -> Rollouts:
        """See `RolloutEngine.generate`. Raises EngineError if no engine is left."""
        return self._generate(
            prompts, sampling, lambda engine, piece, *asked: engine.generate(*asked)
        )

    def generate_as_finished(
        self, prompts: base.Prompts, sampling: Sampling, finished: Finished
    ) -> Rollouts:
        told = functools.partial(in_call, finished, repeat=sampling.responses_per_prompt)
        return self._generate(
            prompts,
            sampling,
            lambda engine, piece, *asked: engine.generate_as_finished(*asked, told(piece)),
        )

    def generate_partly(
        self, prompts: base.Prompts, sampling: Sampling, partly: Partly
    ) -> Rollouts:
        """Only a single engine can do this: none of several knows when all of them together have
        enough.
        """
        if len(self._seats) > 1:
            raise EngineError(
                "Several engines can't stop half-way.",
                given=len(self._seats),
                expected="one",
                do="Set engine.replicas=1.",
            )
        return self._generate(
            prompts, sampling, lambda engine, piece, *asked: engine.generate_partly(*asked, partly)
        )

    @_closed_by_ctrl_c
    def _generate(self, prompts: base.Prompts, sampling: Sampling, ask: Ask) -> Rollouts:
        if not prompts:
            raise DataError(
                "There is no prompt.",
                given="an empty list",
                expected="at least one",
                do="Check the dataset and its filters.",
            )
        started = time.perf_counter()
        for seat in self._seats:
            seat.share = EngineShare(seat.index)
        self._revive()
        waiting = self._loads(prompts, sampling)
        answers: list[tuple[Piece, Rollouts]] = []
        running: Running = {}
        try:
            while waiting or running:
                self._hand_out(waiting, running, prompts, sampling, ask)
                # Only if pieces are waiting: otherwise there is no need to wait for a restart in
                # the background.
                starting = [
                    seat.starting for seat in self._seats if seat.starting is not None and waiting
                ]
                if not running and (not starting or self._overdue()):
                    raise self._none_left()
                awaited: list[Future[Any]] = [*running, *starting]
                wait(awaited, return_when=FIRST_COMPLETED)
                for job in [job for job in running if job.done()]:
                    seat, load = running.pop(job)
                    error = job.exception()
                    if error is not None:
                        self._lost(seat, error)
                        waiting[:0] = self._left_by_a_lost_one(load, sampling)
                    elif (answer := job.result()) is None:
                        seat.behind = True
                        waiting[:0] = self._left_by_a_lost_one(load, sampling)
                    else:
                        answers.append((load.prompts, answer))
                        self.memory.hear(seat.engine, answer, self.policy_version)
                        seat.share = seat.share.plus(answer)
                        # It answers again; MAX_RESTARTS is for engines that never do.
                        seat.restarts = 0
                        seat.away_since = None
                        seat.why = ""
        except Exception:
            # An error leaves no engine busy.
            wait(running)
            raise
        self._spread_news()
        self._note_speeds()
        return self._joined(prompts, sampling, answers, time.perf_counter() - started)

    def _loads(self, prompts: base.Prompts, sampling: Sampling) -> list[Load]:
        """The loads of each engine. With a seed they are the same whatever has happened to engines
        and however fast they are, because responses depend on them.
        """
        pieces = cut(prompts, sampling, len(self._seats))
        seats = (self._able() if sampling.seed is None else None) or self._seats
        known = [seat.speed for seat in seats if seat.speed is not None]
        speeds = known if len(known) == len(seats) and sampling.seed is None else [1.0] * len(seats)
        dealt = deal(pieces, prompts, sampling, speeds)
        return [
            Load(number, given, seat)
            for number, (seat, given) in enumerate(zip(seats, dealt, strict=True))
            if given
        ]

    @staticmethod
    def _left_by_a_lost_one(load: Load, sampling: Sampling) -> list[Load]:
        """The loads that other engines get for that of a lost one. With a seed it stays whole, for
        the same responses; without one it is given out piece by piece, so that many can help.
        """
        if sampling.seed is not None:
            return [replace(load, seat=None)]
        return [replace(load, pieces=(piece,), seat=None) for piece in load.pieces]

    def _note_speeds(self) -> None:
        for seat in self._seats:
            if seat.share.seconds > 0:
                now = seat.share.tokens / seat.share.seconds
                seat.speed = now if seat.speed is None else (seat.speed + now) / 2

    def _hand_out(
        self,
        waiting: list[Load],
        running: Running,
        prompts: base.Prompts,
        sampling: Sampling,
        ask: Ask,
    ) -> None:
        """Give each free engine its load, or an orphaned one; the engine with the fewest tokens so
        far comes first.
        """
        self._revive()
        busy = {seat.index for seat, _ in running.values()}
        able = self._able()
        for seat in sorted(able, key=lambda seat: seat.share.tokens):
            if seat.index in busy:
                continue
            own = [load for load in waiting if load.seat is seat]
            free = [load for load in waiting if load.seat not in able]
            load = next(iter(own + free), None)
            if load is None:
                continue
            waiting.remove(load)
            seeded = (
                # A single engine keeps the call's own seed, and samples as it would without a pool.
                replace(sampling, seed=piece_seed(sampling, load.number))
                if len(self._seats) > 1
                else sampling
            )
            asked = [prompts[index] for index in load.prompts]
            call = self._threads.submit(self._ask, seat, load.prompts, asked, seeded, ask)
            running[call] = (seat, load)

    def swap_heads(
        self, path: str | Path, version: int, checked: Checked | None = None
    ) -> SwapReceipt:
        """See `RolloutEngine.swap_heads`; on all engines. Raises SwapError if none accepted
        them.
        """
        receipt = self._deliver("heads", path, version, checked)
        self.heads_version = version
        return receipt

    def sync_actor(
        self, path: str | Path, version: int, checked: Checked | None = None
    ) -> SwapReceipt:
        """See `RolloutEngine.sync_actor`; on all engines. Raises SwapError if none accepted it."""
        receipt = self._deliver("actor", path, version, checked)
        self.policy_version = version
        return receipt

    def configure(self, **settings: Unpack[Drafting]) -> None:
        count = self._possible(settings)
        before = self._settings
        self._settings = before | settings
        if settings.get("memory_bytes", self.memory.most_bytes) != self.memory.most_bytes:
            # Replaced only if the size changes: setting the same size must not forget anything.
            self.memory = SharedMemory(settings["memory_bytes"])
        self._everywhere(lambda engine: engine.configure(**settings))
        for seat in self._ready():
            # One that was restarted lacks earlier settings too: it gets all before its next piece.
            if seat.settings == before:
                seat.settings = self._settings.copy()
        self.num_drafts = count

    def checksums(self) -> dict[str, str]:
        """The checksums that all engines agree on. Raises EngineError if they don't."""
        found = [engine.checksums() for engine in self._engines()]
        if any(sums != found[0] for sums in found):
            raise EngineError(
                "The engines hold different weights.",
                given=found,
                expected="the same in all",
                do="Swap or sync again.",
            )
        return found[0]

    def counters(self) -> Counters:
        return sum((engine.counters() for engine in self._engines()), Counters())

    def choices(self) -> list[dict[str, Any]]:
        return merge_choices(
            [
                rows
                for _, rows in self._everywhere(lambda engine: engine.choices())
                if isinstance(rows, list)
            ]
        )

    def plugin_report(self) -> dict[str, Any]:
        """The first engine's, and under `engines` those of all."""
        reports = [engine.plugin_report() for engine in self._engines()]
        return {**reports[0], "engines": reports}

    def remember(self, rows: Sequence[Row]) -> int:
        answers = self._everywhere(lambda engine: engine.remember(rows))
        # None, if all of them were lost: they hear it when they are back.
        return max((held for _, held in answers if isinstance(held, int)), default=0)

    def _spread_news(self) -> None:
        """Send what each engine has written in this call to all others."""
        if len(self._seats) > 1 and self.memory.news:
            self._ask_all(
                [seat for seat in self._ready() if seat.remembers],
                lambda engine: engine.remember(self.memory.news_for(engine)),
            )
        self.memory.news.clear()

    def sleep(self, level: int) -> None:
        """See `RolloutEngine.sleep`. Waits for engines that are restarting: awake, they would take
        memory that others need from now on.
        """
        asleep: list[base.RolloutEngine | None] = []
        while seats := [seat for seat in self._all_seated() if seat.engine not in asleep]:
            answers = self._ask_all(seats, lambda engine: engine.sleep(level))
            asleep += [seat.engine for seat, error in answers if not isinstance(error, Exception)]

    def wake(self) -> None:
        """See `RolloutEngine.wake`. An engine that lost its heads in its sleep gets them back
        before its next piece, if the pool has their file.
        """
        self._everywhere(lambda engine: engine.wake())
        self._note_lost_heads()

    def _note_lost_heads(self) -> None:
        for seat in self._ready():
            if seat.engine is not None and seat.engine.heads_version < 0:
                seat.versions["heads"] = -1
                self.heads_version = self.heads_version if "heads" in self._kept else -1

    def close(self) -> None:
        # A call in another thread loses its engine now, and no replacement is started.
        self._closing.set()
        # Wait for engines that are starting: they would outlive the run.
        for seat in self._seats:
            if seat.starting is not None:
                wait([seat.starting])
                seat.engine = None if seat.starting.exception() else seat.starting.result()
                seat.starting = None
        wait([self._threads.submit(engine.close) for engine in self._engines()])
        self._threads.shutdown()
        for seat in self._seats:
            seat.engine = None
        if self._folder is not None:
            self._folder.close()
        on_close = self._on_close
        self._on_close = lambda: None
        on_close()

    # ---- asking

    def _ask(
        self, seat: Seat, piece: Piece, prompts: base.Prompts, sampling: Sampling, ask: Ask
    ) -> Rollouts | None:
        assert seat.engine is not None
        return ask(seat.engine, piece, prompts, sampling) if self._catch_up(seat) else None

    def _catch_up(self, seat: Seat) -> bool:
        """Bring an engine up to the pool's versions and settings; returns whether that is possible
        before the next sync.
        """
        engine = seat.engine
        assert engine is not None
        for what, (path, version, checked) in self._kept.items():
            # A server that was restarted between two calls says itself that its heads are gone.
            gone = what == "heads" and engine.heads_version < 0
            if not gone and seat.versions.get(what) == version:
                continue
            try:
                getattr(engine, METHODS[what])(path, version, checked)
            except SwapError as error:
                if not self._goes_on_without(seat, what, error):
                    seat.started_for_heads |= what == "heads"
                    raise
                self._note_refused(seat, what, version, error)
                if what == "actor":
                    return False
            else:
                seat.versions[what] = version
        if seat.settings != self._settings:
            engine.configure(**self._settings)
            seat.settings = self._settings.copy()
        if not seat.remembers:
            engine.remember(self.memory.rows(self.policy_version))
            seat.remembers = True
        seat.started_for_heads &= engine.heads_version < 0
        return True

    @staticmethod
    def _goes_on_without(seat: Seat, what: str, error: SwapError) -> bool:
        """Whether an engine that refused the pool's version is used all the same; otherwise it is
        started again, which helps if it is damaged.
        """
        assert seat.engine is not None
        drafts = seat.engine.heads_version >= 0
        no_help = isinstance(error, NoRoomError)
        return no_help or (what == "heads" and (drafts or seat.started_for_heads))

    @staticmethod
    def _note_refused(seat: Seat, what: str, version: int, error: SwapError) -> None:
        """Log a refusal once per version: the pool asks again before each call's pieces."""
        if seat.refused.get(what) != version:
            logger.warning("Engine %d did not accept %s. %s", seat.index, NAMES[what], error)
        seat.refused[what] = version

    def _joined(
        self,
        prompts: base.Prompts,
        sampling: Sampling,
        answers: list[tuple[Piece, Rollouts]],
        seconds: float,
    ) -> Rollouts:
        by_prompt: dict[int, list[Response]] = {}
        for piece, part in answers:
            for response in part.responses:
                index = piece[response.prompt_index]
                by_prompt.setdefault(index, []).append(replace(response, prompt_index=index))
        responses = tuple(
            response for index in range(len(prompts)) for response in by_prompt[index]
        )
        counters = sum((part.counters for _, part in answers), Counters())
        shares = self.shares if len(self._seats) > 1 else ()
        written = (
            None
            if all(part.written_tokens is None for _, part in answers)
            else sum(part.generated_tokens for _, part in answers)
        )
        rollouts = Rollouts(
            tuple(map(tuple, prompts)),
            responses,
            counters,
            seconds,
            sampling,
            engines=shares,
            written_tokens=written,
        )
        # Engines that feed themselves may be ahead of the pool's swaps: the version that all had.
        serving = min((part.heads_version for _, part in answers), default=0)
        rollouts = base.with_versions(rollouts, self)
        return replace(rollouts, heads_version=max(rollouts.heads_version, serving))

    # ---- the same on all engines

    def _deliver(
        self, what: str, path: str | Path, version: int, checked: Checked | None
    ) -> SwapReceipt:
        """Send heads or actor to all engines at once; returns the slowest one's seconds. The file
        is checked here once, not by each engine.
        """
        started = time.perf_counter()
        # Saved before it is read, so that the engines read the file that was checked.
        file = self._keep(base.check_file(path, NAMES[what]), f"{what}-{version}")
        try:
            found = checked or base.check_state(file, NAMES[what])
        except SwapError:
            file.unlink()
            raise
        while True:
            answers = self._everywhere(
                lambda engine: getattr(engine, METHODS[what])(file, version, found)
            )
            receipts = [
                (seat, answer) for seat, answer in answers if isinstance(answer, SwapReceipt)
            ]
            if receipts or any(isinstance(answer, SwapError) for _, answer in answers):
                # Otherwise all were lost; restarted ones are asked again.
                break
        self._note_lost_heads()
        if not receipts:
            file.unlink(missing_ok=True)
            raise next(error for _, error in answers if isinstance(error, SwapError))
        self._forget(what)
        self._kept[what] = (file, version, found)
        self._none_is_behind(what)
        for seat, answer in answers:
            if isinstance(answer, SwapError):
                seat.refused[what] = version
        sums = {receipt.checksum for _, receipt in receipts}
        for seat, _ in receipts:
            # Which of them differs from the file, nobody knows: all get it again.
            seat.versions[what] = version if len(sums) == 1 else -1
        if len(sums) > 1:
            raise SwapError(
                "The engines hold different weights after one swap.",
                given=sorted(sums),
                expected="one checksum",
                do="Swap again.",
            )
        return SwapReceipt(version, receipts[0][1].checksum, time.perf_counter() - started)

    def _keep(self, path: str, name: str) -> Path:
        """The file under the pool's own name, since writers remove or replace theirs. A hard link
        if possible, else a copy.
        """
        file = self._new_file(name)
        try:
            os.link(path, file)
        except OSError:
            shutil.copyfile(path, file)
        return file

    def _new_file(self, name: str) -> Path:
        self._folder = self._folder or OwnedFolder("medusa-ppo-pool-", shared_memory=True)
        # A version can arrive twice while an engine still reads its first file.
        return self._folder.path / f"{name}-{time.monotonic_ns()}.safetensors"

    def _forget(self, what: str) -> None:
        """Remove the file that was kept until now."""
        if what in self._kept:
            self._kept.pop(what)[0].unlink(missing_ok=True)

    def _none_is_behind(self, what: str) -> None:
        """Engines that have not got this version can get it before their next piece."""
        for seat in self._seats:
            seat.behind = seat.behind and what != "actor"

    def _everywhere(self, call: Call) -> list[tuple[Seat, Any]]:
        """Call all engines at once; returns the answer or error of each. Lost engines are
        restarted; an invalid request is raised.
        """
        return self._ask_all(self._seated(), call)

    @_closed_by_ctrl_c
    def _seated(self) -> list[Seat]:
        """The seats with an engine; if there are none, waits for one to start. Raises EngineError
        if none will.
        """
        self._revive()
        while not self._ready():
            starting = [seat.starting for seat in self._seats if seat.starting is not None]
            if not starting or self._overdue():
                raise self._none_left()
            wait(starting, return_when=FIRST_COMPLETED)
            self._revive()
        return self._ready()

    @_closed_by_ctrl_c
    def _all_seated(self) -> list[Seat]:
        """As `_seated`, when no engine is starting any more."""
        while (
            starting := [seat.starting for seat in self._seats if seat.starting is not None]
        ) and not self._overdue():
            wait(starting)
            self._revive()
        return self._seated()

    @_closed_by_ctrl_c
    def _ask_all(
        self,
        seats: list[Seat],
        call: Call,
        meanwhile: Callable[[], None] = lambda: None,
        patience_s: float | None = None,
    ) -> list[tuple[Seat, Any]]:
        """The answers of these seats' engines. `meanwhile` runs here while they work; an engine
        that has not answered `patience_s` after it ends counts as lost.
        """
        jobs = [
            (seat, self._threads.submit(call, seat.engine))
            for seat in seats
            if seat.engine is not None
        ]
        meanwhile()
        done = wait([job for _, job in jobs], patience_s).done
        answers = []
        for seat, job in jobs:
            error = (
                job.exception()
                if job in done
                else EngineError(
                    "The engine does not answer.",
                    given=f"nothing for {patience_s} s",
                    expected="an answer",
                    do="Read the engine's log; it is being restarted.",
                )
            )
            if isinstance(error, SwapError):
                logger.warning("Engine %d did not accept the new weights. %s", seat.index, error)
            elif error is not None:
                self._lost(seat, error)
            answers.append((seat, error or job.result()))
        return answers

    # ---- lost engines

    def _lost(self, seat: Seat, error: BaseException) -> None:
        """Restart a lost engine in the background. Errors that aren't the engine's are raised."""
        # An invalid request would be invalid for the next engine too.
        if not isinstance(error, EngineError) or self._closing.is_set():
            raise error
        self._note_why(seat, error)
        engine = seat.engine
        seat.engine = None
        seat.away_since = seat.away_since or time.monotonic()
        if seat.restarts < MAX_RESTARTS:
            # One that answers nothing between two losses gets time to come to itself.
            pause_s = LOOK_EVERY_S if self._back_within_s and seat.restarts else 0.0
            seat.restarts += 1
            self.restarts += 1
            seat.starting = self._threads.submit(self._start_again, seat.index, engine, pause_s)
            return
        logger.warning(
            "Engine %d is given up: %d starts in a row brought no answer.",
            seat.index,
            MAX_RESTARTS,
        )
        if engine is not None:
            # Closed in the background, because it may hang.
            self._threads.submit(engine.close)

    @staticmethod
    def _note_why(seat: Seat, error: BaseException) -> None:
        """Log a loss, and why a start failed; of starts that fail alike only the first."""
        if seat.engine is not None or str(error) != seat.why:
            logger.warning("Engine %d is lost. %s", seat.index, error)
        seat.why = str(error)

    def _start_again(
        self, index: int, old: base.RolloutEngine | None, pause_s: float
    ) -> base.RolloutEngine:
        if old is not None:
            # The old one is closed first, because the new one needs its memory.
            old.close()
        if self._closing.wait(pause_s):
            raise _closed(f"engine {index}, which was lost")
        return self._factory(index)

    def _revive(self) -> None:
        """Seat the engines that have started; they don't yet have what the pool holds."""
        for seat in self._seats:
            if seat.starting is None or not seat.starting.done():
                continue
            error = seat.starting.exception()
            start = seat.starting
            seat.starting = None
            if error is not None and self._back_within_s and not self._closing.is_set():
                # Not a restart: its server is not back yet.
                self._note_why(seat, error)
                seat.starting = self._threads.submit(
                    self._start_again, seat.index, None, LOOK_EVERY_S
                )
            elif error is not None:
                self._lost(seat, _not_started(error))
            else:
                seat.engine = start.result()
                # If it goes again before it has answered, it is waited for as long as before.
                seat.away_since = None
                seat.versions = {}
                seat.settings = Drafting()
                seat.behind = False
                # With nothing remembered there is nothing to catch up on.
                seat.remembers = not self.memory.most_bytes

    def _overdue(self) -> bool:
        """Whether all engines that the pool waits for have been away for too long."""
        now = time.monotonic()
        return self._back_within_s > 0 and not any(
            seat.starting is not None and now - (seat.away_since or now) < self._back_within_s
            for seat in self._seats
        )

    def _ready(self) -> list[Seat]:
        return [seat for seat in self._seats if seat.engine is not None]

    def _able(self) -> list[Seat]:
        """The seats whose engines can answer with the pool's versions."""
        return [seat for seat in self._ready() if not seat.behind]

    def _engines(self) -> list[base.RolloutEngine]:
        return [seat.engine for seat in self._seats if seat.engine is not None]

    def _none_left(self) -> EngineError:
        if self._closing.is_set():
            return _closed("a call after close() or Ctrl-C")
        behind = sum(seat.behind for seat in self._ready())
        if behind:
            return EngineError(
                "No engine is left that has the actor.",
                given=(
                    f"{behind} restarted since it was broadcast (it may have changed since then),"
                    " or without room for its file"
                ),
                expected=f"one engine with version {self.policy_version}",
                do=(
                    "Continue from a checkpoint. engine.transfer=file keeps a file for engines that"
                    " restart; it needs room in /dev/shm."
                ),
            )
        reasons = dict.fromkeys(seat.why for seat in self._seats if seat.why)
        given = f"{self.restarts} restarts; the last errors:\n" + "\n".join(reasons)
        return EngineError(
            "No engine of the pool is left.",
            given=given,
            expected="at least one engine"
            + (f", or one back within {self._back_within_s:.0f} s" if self._back_within_s else ""),
            do="Read the engines' logs.",
        )


def _closed(given: str) -> EngineError:
    return EngineError(
        "The pool is closed.",
        given=given,
        expected="a pool that is in use",
        do="Start a new one.",
    )


def _not_started(error: BaseException) -> BaseException:
    """A failed restart as the engine's error, whatever its kind: it started with the same settings
    before, and other engines go on.
    """
    if isinstance(error, EngineError) or not isinstance(error, Exception):
        return error
    return EngineError(
        "An engine could not be started again.",
        given=f"{type(error).__name__}: {error}",
        expected="a start like its first one",
        do="Read the message, and check memory and disk.",
    )
