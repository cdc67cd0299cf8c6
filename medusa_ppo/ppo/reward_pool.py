"""Reward functions: finding one by name, and calling it in separate processes, with a time limit
per response (no torch).

A function that hangs can't be stopped in the process that called it. Here it runs in another
process, which is killed with all that it has started, and replaced, when its time is up; the others
continue. Each process handles one response at a time, so a slow one delays only itself.
"""

from __future__ import annotations

import atexit
import contextlib
import difflib
import importlib
import inspect
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

from heads.errors import ConfigError, MedusaError, RunError

RewardFunction = Callable[[str, str, dict[str, Any]], Any]
Sample = tuple[str, str, dict[str, Any]]
START_S = 120.0
"""A process that takes longer to import the function counts as hanging."""
LOOK_S = 1.0
"""Longest wait before it is looked whether a process has ended."""
READY = "ready"


class Outcome(NamedTuple):
    """The outcome of a call: its value (a number, or several), or what it raised (an error of ours,
    or a name and a text), or neither if its time was up.
    """

    value: float | list[float] = 0.0
    error: MedusaError | tuple[str, str] | None = None
    late: bool = False

    def take(self) -> float | list[float]:
        """Return the value or raise the error, as if the function had been called here."""
        if isinstance(self.error, MedusaError):
            raise self.error
        if self.error is not None:
            name, text = self.error
            raise type(name, (Exception,), {})(text)
        return self.value


class RewardWorker:
    """A process that calls the function."""

    def __init__(self, name: str) -> None:
        context = multiprocessing.get_context(
            "spawn"
        )  # A fork would inherit the loop's threads and devices.
        self.pipe, theirs = context.Pipe()
        # Not a daemon, which could have no children by multiprocessing.
        self.process = context.Process(
            target=serve, args=(name, theirs), daemon=False, name="medusa-ppo-reward"
        )
        self.process.start()
        theirs.close()
        self.ready = False
        self.place = -1
        self.until = time.monotonic() + START_S

    def give(self, place: int, sample: Sample, timeout_s: float | None) -> None:
        self.place = place
        self.until = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        self.pipe.send(sample)

    def end(self) -> None:
        """End the process and what it has started: a program that a judge runs, for example."""
        assert self.process.pid is not None, "started in __init__"
        # The group may be gone, or not be made yet.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.join()
        self.pipe.close()


class RewardPool:
    """Processes that call a reward function: started by the first call, ended by `close`."""

    def __init__(self, name: str, processes: int, timeout_s: float | None = None) -> None:
        """
        Args:
            name: `module:function`.
            timeout_s: for each call; None: no limit.
        """
        self._name = name
        self._count = processes
        self._timeout_s = timeout_s
        self._workers: list[RewardWorker] = []

    def start(self) -> None:
        """Start processes that are missing or gone, without waiting for them."""
        if not self._workers:
            # Otherwise a program that ends without `close` would wait for them.
            atexit.register(self.close)
        for worker in [worker for worker in self._workers if not worker.process.is_alive()]:
            self._workers.remove(worker)
            worker.end()
        self._workers += [RewardWorker(self._name) for _ in range(self._count - len(self._workers))]

    def ask(self, samples: Sequence[Sample]) -> list[Outcome]:
        """The function's answers, in order. Raises RunError if its processes don't start."""
        self.start()
        waiting = deque(range(len(samples)))
        found = dict[int, Outcome]()
        while len(found) < len(samples):
            for worker in self._workers:
                if worker.ready and worker.place < 0 and waiting:
                    worker.give(place := waiting.popleft(), samples[place], self._timeout_s)
            busy = [worker for worker in self._workers if worker.place >= 0 or not worker.ready]
            until = min(worker.until for worker in busy)
            heard = wait(
                [worker.pipe for worker in busy],
                min(LOOK_S, max(0.0, until - time.monotonic())),
            )
            for worker in busy:
                # The pipe alone does not show an end: what a judge has forked holds it open.
                if worker.pipe in heard or worker.process.exitcode is not None:
                    self._hear(worker, found)
                elif time.monotonic() >= worker.until:
                    self._replace(worker, Outcome(late=True), found)
        return [found[place] for place in range(len(samples))]

    def _hear(self, worker: RewardWorker, found: dict[int, Outcome]) -> None:
        try:
            # Of a process that has ended, all that it will ever say is there.
            if worker.process.exitcode is not None and not worker.pipe.poll():
                raise EOFError
            said = worker.pipe.recv()
        except (EOFError, OSError):
            worker.process.join(1.0)
            given = f"{self._name}, exit code {worker.process.exitcode}"
            do = "Read its last output, and correct the function."
            problem = RunError(
                "A process of the reward function ended.", given=given, expected="a number", do=do
            )
            self._replace(worker, Outcome(error=problem), found)
            return
        if said != READY:
            found[worker.place] = said
        worker.ready = True
        worker.place = -1

    def _replace(self, worker: RewardWorker, outcome: Outcome, found: dict[int, Outcome]) -> None:
        """Replace the worker and record this outcome for its current item."""
        worker.end()
        if not worker.ready:
            self._workers.remove(worker)
            self.close()
            ended = f"exit code {worker.process.exitcode}"
            given = f"{self._name}: {'no answer in time' if outcome.late else ended}"
            do = "Import its module in a fresh Python; it fails there as it does here."
            raise RunError(
                "A process for rewards did not start.",
                given=given,
                expected=f"within {START_S:.0f} s",
                do=do,
            )
        found[worker.place] = outcome
        self._workers[self._workers.index(worker)] = RewardWorker(self._name)

    def close(self) -> None:
        """End all processes. Safe to call again."""
        atexit.unregister(self.close)
        workers = self._workers
        self._workers = []
        for worker in workers:
            worker.end()


def serve(name: str, pipe: Connection) -> None:
    """In the process: call the function for each item until there are no more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Only the loop handles Ctrl-C.
    os.setsid()  # A group, to be ended as a whole.
    threading.Thread(target=_end_with_loop, daemon=True).start()
    function = find_callable(name)
    pipe.send(READY)
    with contextlib.suppress(EOFError, OSError):
        while True:
            sample = pipe.recv()
            try:
                said = Outcome(plain(function(*sample)))
            except MedusaError as error:
                said = Outcome(error=error)
            except Exception as error:  # the user's own code
                said = Outcome(error=(type(error).__name__, str(error)))
            pipe.send(said)


def _end_with_loop() -> None:
    """End this process's group when the loop is gone, however that ended. The kernel's own signal
    would come when the thread ends that started this process.
    """
    loop = multiprocessing.parent_process()
    if loop is not None:
        wait([loop.sentinel])
        os.killpg(0, signal.SIGKILL)


def plain(given: Any) -> float | list[float]:
    """A reward as a float, or several as a list of floats: numpy's and torch's types become
    Python's.
    """
    try:
        return float(given)
    except TypeError:
        return [float(reward) for reward in given]


def find_callable(name: str) -> RewardFunction:
    """Import `module:function`; modules in the working directory are found too."""
    module_name, mark, function_name = name.partition(":")
    if not mark or not module_name or not function_name:
        raise ConfigError(
            "ppo.reward must be module:function.",
            given=name,
            expected="e.g. medusa_ppo.ppo.rewards:exact_answer",
            do="Correct ppo.reward.",
        )
    module = _import(module_name)
    function = getattr(module, function_name, None)
    if not callable(function):
        known = [
            key
            for key, value in vars(module).items()
            if inspect.isfunction(value) and not key.startswith("_")
        ]
        near = difflib.get_close_matches(function_name, known, n=1)
        do = f"Did you mean {module_name}:{near[0]}?" if near else "Correct ppo.reward."
        raise ConfigError(
            "The module has no such reward function.",
            given=name,
            expected=", ".join(known) or "a function in it",
            do=do,
        )
    try:
        inspect.signature(function).bind("prompt", "response", {})
    except TypeError:
        given = f"{name}{inspect.signature(function)}"
        raise ConfigError(
            "The reward function has the wrong arguments.",
            given=given,
            expected="(prompt, response, row)",
            do="Change it.",
        ) from None
    return function


def _import(name: str) -> Any:
    here = os.getcwd()
    # The path of a console script lacks the working directory, where people keep their reward
    # functions.
    added = here not in sys.path and "" not in sys.path
    if added:
        sys.path.append(here)
    try:
        return importlib.import_module(name)
    except ImportError as error:
        given = f"{name}: {error}"
        do = "Run from the folder that holds the module, or install it."
        raise ConfigError(
            "The module of the reward function can't be imported.",
            given=given,
            expected="an importable module",
            do=do,
        ) from error
    finally:
        if added:
            sys.path.remove(here)
