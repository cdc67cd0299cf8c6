"""The reference PPO run under faults: nothing is lost, repeated or damaged, and the policy is an undisturbed run's to the bit.

    python benchmarks/chaos.py                                   # each kind once; `make test-chaos`
    python benchmarks/chaos.py --times 10 --only "engine killed" "disk full"
    python benchmarks/chaos.py --list

Each kind disturbs a whole run of a tiny actor at a random step (`medusa_ppo.ppo.loop.run_ppo`: Ray, companion, reports, checkpoints;
loopback only). The engine samples with transformers (chaos_engine.py), in the run's process or as a server of its own; the kinds that
begin with `vLLM` run the command with a real engine. Faults are real where that is possible (signals, a full and a read-only file system
in mounts of our own, bytes changed on the disk, sockets), and raised in their place where it is not (CUDA, the clock). After each run:

    steps      metrics.jsonl holds every step once, with the figures of the undisturbed run
    policy     actor, critic and both optimizers have the undisturbed run's bytes, and where the fault is not the companion's the heads too
    files      whatever is in the run folder can be read, and nothing half written is left
    report     report.md says what happened

Exit code 1 when something is wrong. A kind that this machine does not allow (mounts) is named.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import chaos_hook
import psutil

STEPS, SAVE_EVERY, DISK_MIB = 8, 2, 24
BACK_S = 120.0
MOUNTED = "CHAOS_OWN_MOUNTS"
HERE = Path(__file__).resolve()
TENSORS = ("actor", "critic", "actor_optimizer", "critic_optimizer")
UNEQUAL = re.compile(
    r"_s$|^companion_|^replay_|^versions_|restarts$|bytes$|gib$|^heads_version$|^staleness$|^swap_|^plugin_|_per_s$|^account_"
)
"""Figures that the clock or the companion decides."""


class Injected(RuntimeError):
    """What a kind raises by itself in the place of an error that no machine here has."""


@dataclasses.dataclass(frozen=True)
class Kind:
    """A fault.

    Attributes:
        name: what it is called.
        undergo: does it to a scene, whose runs it starts.
        told: a regular expression that the report must hold; empty: there is nothing to tell.
        heads: heads come out as undisturbed, too.
        engine: `here`, `server`, `broadcast` or `vllm`.
    """

    name: str
    undergo: Callable[[Scene], None]
    told: str = ""
    heads: bool = True
    engine: str = "here"


class Scene:
    """A run folder, the runs in it, and what is done to them at which moment. It listens to a run as a ProgressSink does."""

    def __init__(self, folder: Path, actor: Path, engine: str, seed: int) -> None:
        self.folder, self.actor, self.engine, self.random = folder, actor, engine, random.Random(seed)
        self.out, self.clients, self.stand_in, self._step = folder / "out", [], None, -1
        self._acts: dict[tuple[int, str], list[Callable[[], object]]] = {}
        self._undo = contextlib.ExitStack()
        folder.mkdir(parents=True)
        self.orders = folder / "orders"
        self.changes: dict[str, dict[str, Any]] = {}

    # ---- what kinds use -------------------------------------------------------------------------------------------------------

    @property
    def run_dir(self) -> Path:
        return self.out / "run"

    def moment(self, first: int = 2, last: int = STEPS - 4) -> int:
        """A random step with some before it and some after it."""
        return self.random.randint(first, last)

    def at(self, step: int, phase: str, act: Callable[[], object]) -> None:
        """Do something when a phase of a step begins."""
        self._acts.setdefault((step, phase), []).append(act)

    def run(self, resume: bool = False) -> None:
        """A whole run in this process."""
        from medusa_ppo.config import build_config
        from medusa_ppo.ppo.loop import run_ppo

        with patches(self):
            run_ppo(build_config(self.config()), listener(self), resume=resume)

    def stops(self, kind: type[BaseException]) -> None:
        """A run that must end with such an error."""
        try:
            self.run()
        except kind:
            self._acts.clear()
            return
        raise AssertionError(f"the run did not end with {kind.__name__}")

    def config(self) -> dict[str, Any]:
        values: dict[str, Any] = {
            "name": "run",
            "out": str(self.out),
            "model": {"path": str(self.actor)},
            "data": {"path": "demo", "max_prompt_tokens": 100, "split": "train[:64]"},
            "sampling": {"max_new_tokens": 8, "responses_per_prompt": 2},
            "engine": {"max_num_seqs": 16, "max_model_len": 128, "threads": 1, "memory_fraction": 0.01, "dtype": "float32"},
            "heads": {"num_heads": 3, "context": 0},
            "companion": {"wait": True, "epochs": 2, "learning_rate": 1e-2, "batch_positions": 128, "gate_confidence": 0.55},
            "ppo": {
                "steps": STEPS,
                "prompts_per_step": 10,
                "actor_learning_rate": 1e-4,
                "entropy_coefficient": 0.02,
                "checkpoint_every": SAVE_EVERY,
                "keep_checkpoints": 2,
                "threads": 1,
            },
        }
        values["engine"] |= {"server": {"backend": "server"}, "broadcast": {"transfer": "broadcast"}}.get(self.engine, {})
        for section, changed in self.changes.items():
            values[section] |= changed
        return values

    def companion(self, title: str = "ray::_HostedService") -> psutil.Process:
        """The newest companion's process, with its log-line of the past left out: those that are dead."""
        found = [process for process in psutil.Process().children(recursive=True) if title in " ".join(cmdline_of(process))]
        return max(found, key=lambda process: process.create_time())

    def companion_back(self, gone: int) -> None:
        """Wait until another companion than the one that is gone answers."""
        deadline = time.monotonic() + BACK_S
        while time.monotonic() < deadline:
            with contextlib.suppress(ValueError):
                self.clients[-1].newest(1 << 40)
                if self.companion().pid != gone and self.clients[-1].status(1.0).alive:
                    return
            time.sleep(0.2)
        raise AssertionError("the companion did not come back")

    def strike_companion(
        self, number: signal.Signals, first: Callable[[], object] = lambda: None, title: str = "ray::_HostedService"
    ) -> None:
        """At a random step: stop it, do something, send the signal; two steps later it must be back."""
        step = self.moment()

        def strike() -> None:
            process, leader = self.companion(title), self.companion().pid if "Hosted" in title else self.companion("ray::Leader").pid
            process.send_signal(signal.SIGSTOP)
            first()
            process.send_signal(number)
            self.at(step + 2, "generate", lambda: self.companion_back(leader))

        self.at(step, "score", strike)

    def mount(self, *words: str) -> None:
        """Mount something, and take it away again at the end."""
        if not os.environ.get(MOUNTED):
            raise NotPossible("no mounts of our own (unshare is not allowed)")
        subprocess.run(["mount", *words], check=True)
        self._undo.callback(subprocess.run, ["umount", "-l", words[-1]], check=False)

    # ---- as a ProgressSink ------------------------------------------------------------------------------------------------------

    def phase_began(self, phase: str, step: int | None) -> None:
        self._step = self._step if step is None else step
        for act in self._acts.pop((self._step, phase), ()):
            act()

    def close(self) -> None:
        self._undo.close()


class NotPossible(Exception):
    """This machine does not allow the fault."""


def cmdline_of(process: psutil.Process) -> list[str]:
    try:
        return [] if process.status() == psutil.STATUS_ZOMBIE else process.cmdline()
    except psutil.Error:
        return []


def listener(scene: Scene) -> Any:
    """A ProgressSink that tells the scene."""
    from medusa_ppo.ppo.run_progress import ProgressSink

    class Listener(ProgressSink):
        def phase_started(self, phase: str, step: int | None = None) -> None:
            scene.phase_began(phase, step)

    return Listener()


@contextlib.contextmanager
def patches(scene: Scene) -> Iterator[None]:
    """The engine that stands in, and less patience than a run has."""
    import chaos_engine

    from medusa_ppo import plugin
    from medusa_ppo.companion.client import CompanionClient
    from medusa_ppo.engines import http_server
    from medusa_ppo.engines.actor_sync import BroadcastPool
    from medusa_ppo.engines.launch import plan_launch
    from medusa_ppo.engines.pool import EnginePool
    from medusa_ppo.ppo import session
    from medusa_ppo.reports import trackers

    start = CompanionClient.__init__

    def started(client: CompanionClient, *args: Any, **kwargs: Any) -> None:
        start(client, *args, **kwargs | {"hang_s": 3.0})
        scene.clients.append(client)

    def engine(model: Any, heads: Any, config: Any, seed: int, **_: Any) -> Any:
        def one(index: int) -> Any:
            if scene.engine == "server":
                return chaos_engine.StandInServer(model, heads, config, seed)
            scene.stand_in = chaos_engine.StandIn(model, plan_launch(model, heads, config, seed).stop_ids)
            return scene.stand_in

        return (BroadcastPool if scene.engine == "broadcast" else EnginePool)(one, 1)

    with contextlib.ExitStack() as stack:
        for target, name, value in (
            (CompanionClient, "__init__", started),
            (session, "make_engine", engine),
            (http_server, "CALL_TIMEOUT_S", 4.0),
            (http_server, "TOKEN_S", 0.0),
            (http_server, "STOP_TIMEOUT_S", 1.0),
            (plugin, "DRAIN_TIMEOUT_S", 60.0),
            (trackers, "CLOSE_S", 1.0),
            (chaos_engine.StandInServer, "orders", scene.orders),
        ):
            stack.enter_context(mock.patch.object(target, name, value))
        yield


# ---- the kinds: companion ------------------------------------------------------------------------------------------------------


def companion_killed(scene: Scene) -> None:
    scene.strike_companion(signal.SIGKILL)
    scene.run()


def companion_stopped(scene: Scene) -> None:
    scene.changes = {"companion": {"wait": False, "schedule": "fixed"}}  # Who waits for it would wait for ten minutes.
    scene.strike_companion(signal.SIGSTOP)
    scene.run()


def companion_worker_killed(scene: Scene) -> None:
    scene.changes = {"companion": {"workers": 2}}
    scene.strike_companion(signal.SIGKILL, title="ray::Member")
    scene.run()


def companion_state_truncated(scene: Scene) -> None:
    scene.strike_companion(signal.SIGKILL, lambda: cut(scene.run_dir / "companion" / "companion.safetensors"))
    scene.run()


def companion_state_flipped(scene: Scene) -> None:
    scene.strike_companion(signal.SIGKILL, lambda: flip(scene.run_dir / "companion" / "companion.safetensors", scene.random))
    scene.run()


def ordered(order: str, back: bool) -> Callable[[Scene], None]:
    """The companion does by itself what is ordered, at its next batch."""

    def undergo(scene: Scene) -> None:
        step, file = scene.moment(), Path(os.environ[chaos_hook.ORDERS])

        def give() -> None:
            pid = scene.companion().pid
            file.write_text(order)
            if back:
                scene.at(step + 2, "generate", lambda: scene.companion_back(pid))

        scene.at(step, "generate", give)
        scene.run()
        if file.exists():
            file.unlink()
            raise AssertionError(f"the companion was never at the place for {order}")

    return undergo


def head_file_damaged(harm: Callable[[Path, random.Random], object]) -> Callable[[Scene], None]:
    def undergo(scene: Scene) -> None:
        from medusa_ppo.installer import HeadsInstaller

        swap, harmed = HeadsInstaller._swap, list[int]()

        def swap_damaged(installer: HeadsInstaller, published: Any) -> None:
            if not harmed:
                harmed.append(published.version)
                harm(Path(published.path), scene.random)
            swap(installer, published)

        with mock.patch.object(HeadsInstaller, "_swap", swap_damaged):
            scene.run()
        assert harmed, "no heads were published"

    return undergo


def clock_jumps(scene: Scene) -> None:
    """The driver's clock goes a day ahead and two back, and all that the companion wrote until then is of a day that is to come."""
    step, now = scene.moment(3), time.time

    def ahead() -> None:
        patch = mock.patch.object(time, "time", lambda: now() + 86_400)
        patch.start()
        scene._undo.callback(patch.stop)

    def back() -> None:
        folder = scene.clients[-1]._publish_dir
        for path in [*folder.glob("heads-*"), *(scene.run_dir / "heads").glob("v*"), *scene.run_dir.rglob("*.safetensors")]:
            os.utime(path, (now() + 86_400, now() + 86_400))
        time.time = lambda: now() - 86_400

    scene.at(step - 1, "score", ahead)
    scene.at(step, "score", back)
    scene.run()


# ---- engines -------------------------------------------------------------------------------------------------------------------


def engine_signalled(number: signal.Signals) -> Callable[[Scene], None]:
    def undergo(scene: Scene) -> None:
        import chaos_engine

        later_s = scene.random.uniform(0, 0.3)

        def strike() -> None:
            threading.Timer(later_s, os.kill, (chaos_engine.StandInServer.started[-1], number)).start()

        scene.at(scene.moment(), scene.random.choice(["generate", "sync"]), strike)
        scene.run()

    return undergo


def engine_answers(order: str) -> Callable[[Scene], None]:
    def undergo(scene: Scene) -> None:
        scene.at(scene.moment(), "generate", lambda: scene.orders.write_text(order))
        scene.run()
        assert not scene.orders.exists(), "nobody asked the engine"

    return undergo


def broadcast_breaks(scene: Scene) -> None:
    from heads.errors import SwapError

    def breaks(engine: Any) -> None:
        engine.before_receiving = lambda engine: None
        engine.group.leave()
        raise SwapError("The connection broke.", given="a socket", expected="an actor", do="Sync again.")

    scene.at(scene.moment(), "sync", lambda: setattr(scene.stand_in, "before_receiving", breaks))
    scene.run()


# ---- the run itself -------------------------------------------------------------------------------------------------------------


def gpu_error(scene: Scene) -> None:
    import torch

    def raise_it() -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    scene.at(scene.moment(3), scene.random.choice(["score", "update"]), raise_it)
    scene.stops(torch.AcceleratorError)
    scene.run(resume=True)


def stop_at(scene: Scene, step: int) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    scene.at(step, "update", stop)
    scene.stops(KeyboardInterrupt)


def checkpoint_damaged(harm: Callable[[Path, random.Random], object]) -> Callable[[Scene], None]:
    """The last checkpoint (and its link among those that are kept) has other bytes: the run goes on from the one before."""

    def undergo(scene: Scene) -> None:
        stop_at(scene, 5)
        files = sorted(path for path in (scene.run_dir / "checkpoint").iterdir() if path.is_file() and path.stat().st_size > 100)
        harm(scene.random.choice(files), scene.random)
        scene.run(resume=True)

    return undergo


def metrics_damaged(scene: Scene) -> None:
    """A bit of a line in the middle, and half of the last line."""
    stop_at(scene, 5)
    file = scene.run_dir / "metrics.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    place = scene.random.randrange(4)
    lines[place] = lines[place].replace(b'"step"', b'"stop"', 1)
    file.write_bytes(b"".join(lines)[:-20])
    scene.run(resume=True)


def tracker_hangs(scene: Scene) -> None:
    from medusa_ppo.ppo import session
    from medusa_ppo.reports.trackers import TrackerGroup

    class Hung:
        def log(self, step: int, values: Any) -> None:
            time.sleep(600)

        close = staticmethod(lambda: None)

    with mock.patch.object(session, "start_trackers", lambda *_: TrackerGroup({"hung": Hung()})):
        scene.run()


# ---- disks ----------------------------------------------------------------------------------------------------------------------


def disk_full(scene: Scene) -> None:
    """A file system of a few MiB, filled for some steps."""
    scene.out.mkdir()
    scene.mount("-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(scene.out))
    filler, step = scene.out / "filler", scene.moment()

    def fill() -> None:
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(b"x" * 4096)

    scene.at(step, "generate", fill)
    scene.at(step + 3, "generate", filler.unlink)
    scene.run()
    save_outside(scene)


def read_only(scene: Scene) -> None:
    """Nothing can be written into the run's folder for some steps; the file of metrics, which is open, is written on."""
    step = scene.moment()
    scene.at(
        step,
        "generate",
        lambda: (scene.mount("--bind", *[str(scene.run_dir)] * 2), scene.mount("-o", "remount,bind,ro", str(scene.run_dir))),
    )
    scene.at(step + 3, "generate", lambda: subprocess.run(["umount", "-l", str(scene.run_dir)], check=True))
    scene.run()


def disk_slow(scene: Scene) -> None:
    """Each flush to the disk takes a third of a second for some steps."""
    fsync, step = os.fsync, scene.moment()

    def slowly(handle: int) -> None:
        time.sleep(0.3)
        fsync(handle)

    patch = mock.patch.object(os, "fsync", slowly)
    scene.at(step, "generate", patch.start)
    scene.at(step + 3, "generate", patch.stop)
    scene.run()


def save_outside(scene: Scene) -> None:
    """Take the run's folder off its small disk."""
    shutil.copytree(scene.run_dir, scene.folder / "kept" / "run", symlinks=True)
    scene.out = scene.folder / "kept"


def cut(file: Path, generator: random.Random | None = None) -> None:
    """Half of it is left, as after a power cut."""
    os.truncate(file, file.stat().st_size // 2)


def flip(file: Path, generator: random.Random) -> None:
    """One bit, in the last half: of numbers, not of a header."""
    data = bytearray(file.read_bytes())
    data[generator.randrange(len(data) // 2, len(data))] ^= 1 << generator.randrange(8)
    with file.open("r+b") as stream:  # The same inode: a link has the damage too.
        stream.write(data)


# ---- processes of their own ------------------------------------------------------------------------------------------------------


class Child:
    """`run_ppo` in a process of its own, with a Ray of its own."""

    def __init__(self, scene: Scene, *more: str) -> None:
        file = scene.folder / "child.json"
        file.write_text(
            json.dumps({"engine": scene.engine, "actor": str(scene.actor), "folder": str(scene.folder), "changes": scene.changes})
        )
        environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | {"TMPDIR": str(scene.folder.parent)}
        with (scene.folder / "child.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(HERE), "--child", str(file), *more], env=environment, stdout=log, stderr=log
            )
        self._metrics = scene.run_dir / "metrics.jsonl"

    def wait_for_step(self, step: int) -> None:
        deadline = time.monotonic() + BACK_S
        while not self._metrics.is_file() or self._metrics.read_bytes().count(b"\n") <= step:
            assert self.process.poll() is None, "the child ended too soon"
            assert time.monotonic() < deadline, "the child makes no steps"
            time.sleep(0.02)

    def end(self, timeout_s: float = BACK_S) -> int:
        return self.process.wait(timeout_s)


def in_child(strike: Callable[[Child], object], codes: tuple[int, ...]) -> Callable[[Scene], None]:
    """Something is done to a child at a random moment of a random step; where that ends it, it is resumed."""

    def undergo(scene: Scene) -> None:
        child = Child(scene)
        try:
            child.wait_for_step(scene.moment())
            time.sleep(scene.random.uniform(0, 0.5))
            below = psutil.Process(child.process.pid).children(recursive=True)
            strike(child)
            code = child.end()
            assert code in codes, f"exit code {code}"
            if code:
                _, alive = psutil.wait_procs(below, timeout=BACK_S)
                assert not alive, f"left behind: {[cmdline_of(process)[:2] for process in alive]}"
                child = Child(scene, "--resume")
                assert child.end() == 0
        finally:
            child.process.kill()

    return undergo


def stop_and_go(child: Child) -> None:
    child.process.send_signal(signal.SIGSTOP)
    time.sleep(5.0)
    child.process.send_signal(signal.SIGCONT)


def kill_raylet(child: Child) -> None:
    for process in psutil.Process(child.process.pid).children(recursive=True):
        if "raylet" in Path((cmdline_of(process) or [""])[0]).name:
            process.kill()


def vllm_signalled(number: signal.Signals) -> Callable[[Scene], None]:
    """A real engine in Ray."""

    def undergo(scene: Scene) -> None:
        from watched import WatchedRun

        patience = "import medusa_ppo.engines.http_server as h; h.CALL_TIMEOUT_S, h.TOKEN_S = 20.0, 0.0"
        (scene.folder / "w").mkdir()
        with WatchedRun(scene.config(), scene.folder / "w", patience) as run:
            step = scene.moment()
            assert run.wait_for(lambda: len(run.steps()) > step, 300), run.tail()
            pid = run.pid_of("engine")
            assert pid is not None
            os.kill(pid, number)
            assert run.wait_for(lambda: run.code is not None, 400) and run.code == 0, run.tail()
            assert not run.left_behind()

    return undergo


KINDS = (
    Kind("companion killed", companion_killed, "The companion was lost and started again", heads=False),
    Kind("companion stopped", companion_stopped, "ended and started again", heads=False),
    Kind("companion's second worker killed", companion_worker_killed, "The companion was lost and started again", heads=False),
    Kind("companion: GPU error", ordered("cuda", back=True), "The companion was lost and started again", heads=False),
    Kind("companion: out of memory", ordered("memory", back=False), "can't allocate memory|not enough memory|invalid size", heads=False),
    Kind(
        "companion killed in the middle of a head version",
        ordered("half", back=True),
        "The companion was lost and started again",
        heads=False,
    ),
    Kind("companion killed, its state cut in half", companion_state_truncated, "saved state is damaged", heads=False),
    Kind("companion killed, a bit of its state flipped", companion_state_flipped, "saved state is damaged", heads=False),
    Kind("head file cut in half", head_file_damaged(cut), "were not installed", heads=False),
    Kind("head file with a flipped bit", head_file_damaged(flip), "were not installed", heads=False),
    Kind("clock jumps", clock_jumps),
    Kind("engine killed", engine_signalled(signal.SIGKILL), "An engine was lost and started again", engine="server"),
    Kind("engine stopped", engine_signalled(signal.SIGSTOP), "An engine was lost and started again", engine="server"),
    Kind("engine answers late", engine_answers("late"), "An engine was lost and started again", engine="server"),
    Kind("engine answers other tokens", engine_answers("wrong"), "outside the vocabulary", engine="server"),
    Kind("engine answers half", engine_answers("half"), "do not belong to its tokens", engine="server"),
    Kind("engine answers twice", engine_answers("twice"), engine="server"),
    Kind("engine answers nothing", engine_answers("nothing"), "An engine was lost and started again", engine="server"),
    Kind("broadcast breaks off", broadcast_breaks, "goes to the engines as a file", engine="broadcast"),
    Kind("GPU error in the loop", gpu_error, "at step"),
    Kind("checkpoint cut in half", checkpoint_damaged(cut), "checkpoint is damaged"),
    Kind("checkpoint with a flipped bit", checkpoint_damaged(flip), "checkpoint is damaged"),
    Kind("metrics damaged", metrics_damaged, "unreadable lines"),
    Kind("tracker hangs", tracker_hangs, "Tracker hung failed"),
    Kind("disk full", disk_full, "could not be written"),
    Kind("disk read-only", read_only, "could not be written"),
    Kind("disk slow", disk_slow),
    Kind("driver killed", in_child(lambda child: child.process.kill(), (-signal.SIGKILL,)), "at step"),
    Kind("driver stopped for 5 s", in_child(stop_and_go, (0,))),
    Kind("raylet killed", in_child(kill_raylet, (1,)), "at step"),
    Kind("vLLM killed", vllm_signalled(signal.SIGKILL), "An engine was lost and started again", engine="vllm"),
    Kind("vLLM stopped", vllm_signalled(signal.SIGSTOP), "An engine was lost and started again", engine="vllm"),
)


# ---- what must hold afterwards ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a finished run left."""

    figures: list[dict[str, Any]]
    sums: dict[str, str]
    heads: str
    report: str


def outcome_of(run_dir: Path) -> Outcome:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    figures = [{name: value for name, value in line.items() if not UNEQUAL.search(name)} for line in lines]
    files = {name: run_dir / "checkpoint" / f"{name}.safetensors" for name in TENSORS} | {"final": run_dir / "actor" / "model.safetensors"}
    sums = {name: hashlib.sha256(file.read_bytes()).hexdigest() for name, file in files.items()}
    heads = hashlib.sha256((run_dir / "heads-final" / "model.safetensors").read_bytes()).hexdigest()
    return Outcome(figures, sums, heads, (run_dir / "report.md").read_text())


def faults_of(kind: Kind, run_dir: Path, undisturbed: Outcome) -> list[str]:
    """What is wrong after a run; empty when nothing is."""
    found, wrong = outcome_of(run_dir), list[str]()
    steps = [line["step"] for line in found.figures]
    if steps != list(range(STEPS)):
        wrong.append(f"steps {steps}")
    for expected, line in zip(undisturbed.figures, found.figures, strict=False):
        differs = [name for name in expected.keys() | line.keys() if expected.get(name) != line.get(name)]
        wrong += [f"step {line['step']}: other {', '.join(sorted(differs))}"] if differs else []
    wrong += [f"other bytes in {name}" for name, value in found.sums.items() if value != undisturbed.sums[name]]
    wrong += ["other heads"] if kind.heads and found.heads != undisturbed.heads else []
    wrong += [] if re.search(kind.told, found.report) else [f"the report does not say: {kind.told}"]
    return wrong + unreadable(run_dir)


def unreadable(run_dir: Path) -> list[str]:
    """Files of a run that are not whole, and what is half written."""
    from heads.checkpoint import load_heads, load_state
    from heads.errors import MedusaError
    from medusa_ppo.ppo.run_state import saved_folder

    wrong = [f"left behind: {path.name}" for path in run_dir.rglob(".*")]
    readers: list[tuple[Path, Callable[[Path], object]]] = [(path, load_state) for path in run_dir.rglob("*.safetensors")]
    readers += [(path, load_heads) for path in [run_dir / "heads-final", *(run_dir / "heads").glob("v*")]]
    readers += [(path, lambda path: json.loads(path.read_text())) for path in run_dir.rglob("*.json")]
    for path, read in readers:
        try:
            read(path)
        except (MedusaError, ValueError, OSError) as error:
            wrong.append(f"{path.relative_to(run_dir)}: {error}")
    return wrong if saved_folder(run_dir) == run_dir / "checkpoint" else [*wrong, "the last checkpoint is damaged"]


@dataclasses.dataclass
class Tally:
    """How often a kind was undergone, what was wrong, and the seconds of all."""

    times: int = 0
    wrong: list[str] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    skipped: str = ""


class Suite:
    """All kinds against undisturbed runs."""

    def __init__(self, home: Path, seed: int, keep: bool) -> None:
        from watched import make_tiny_actor

        self._home, self._seed, self._keep, self._count = home, seed, keep, 0
        self._actor = make_tiny_actor(home / "actor")
        self._undisturbed: dict[str, Outcome] = {}

    def try_once(self, kind: Kind, tally: Tally) -> None:
        reference, began = self._reference(kind), time.monotonic()
        self._count += 1
        scene = Scene(self._home / f"{self._count}", self._actor, kind.engine, self._seed * 1000 + self._count)
        try:
            kind.undergo(scene)
            tally.wrong += faults_of(kind, scene.run_dir, reference)
        except NotPossible as error:
            tally.skipped = str(error)
        except BaseException as error:
            if isinstance(error, SystemExit):
                raise
            last = traceback.extract_tb(error.__traceback__)[-1]
            tally.wrong.append(f"{type(error).__name__}: {error} ({Path(last.filename).name}:{last.lineno})")
        finally:
            scene.close()
        tally.times += 1
        tally.seconds += time.monotonic() - began
        if not self._keep and not tally.wrong:
            shutil.rmtree(scene.folder, ignore_errors=True)

    def _reference(self, kind: Kind) -> Outcome:
        """The undisturbed run; heads are compared only with the same settings."""
        which = "vllm" if kind.engine == "vllm" else "here"
        if which not in self._undisturbed:
            scene = Scene(self._home / f"undisturbed-{which}", self._actor, which, 0)
            if which == "vllm":
                from watched import WatchedRun

                (scene.folder / "w").mkdir()
                with WatchedRun(scene.config(), scene.folder / "w") as run:
                    assert run.wait_for(lambda: run.code is not None, 400) and run.code == 0, run.tail()
            else:
                scene.run()
            self._undisturbed[which] = outcome_of(scene.run_dir)
        return self._undisturbed[which]


def table(tallies: dict[str, Tally]) -> str:
    """Markdown, one line a kind."""
    lines = ["| fault | times | wrong | seconds each |", "|---|---|---|---|"]
    for name, tally in tallies.items():
        wrong = f"not possible: {tally.skipped}" if tally.skipped else str(len(tally.wrong))
        lines.append(f"| {name} | {tally.times} | {wrong} | {tally.seconds / max(1, tally.times):.0f} |")
    return "\n".join(lines)


def own_mounts() -> None:
    """Start again where mounts are ours alone, if that is allowed."""
    if MOUNTED in os.environ:
        return
    for flags in (["--mount"], ["--user", "--map-root-user", "--mount"]):
        if shutil.which("unshare") and subprocess.run(["unshare", *flags, "true"], check=False, capture_output=True).returncode == 0:
            os.environ[MOUNTED] = "1"
            os.execvp("unshare", ["unshare", *flags, "--propagation", "private", sys.executable, *sys.argv])
    os.environ[MOUNTED] = ""


@contextlib.contextmanager
def own_ray(home: Path) -> Iterator[None]:
    """One Ray for all runs in this process, whose workers take orders."""
    import ray

    from medusa_ppo.processes import OWN_RAY_ENVIRONMENT

    paths = os.pathsep.join([str(HERE.parent), str(HERE.parent.parent), os.environ.get("PYTHONPATH", "")])
    own = {chaos_hook.ORDERS: str(home / "companion-orders"), "RAY_enable_worker_prestart": "0", "PYTHONPATH": paths}
    os.environ.update(OWN_RAY_ENVIRONMENT | own)
    hook: dict[str, Any] = {"worker_process_setup_hook": "chaos_hook.install"}
    size = 256 << 20
    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=size,
        _temp_dir=str(home / "r"),
        runtime_env=hook,
    )
    try:
        yield
    finally:
        ray.shutdown()


def child(file: str, resume: bool) -> None:
    """What `Child` starts."""
    values = json.loads(Path(file).read_text())
    scene = Scene.__new__(Scene)
    Scene.__init__(scene, Path(values["folder"]) / f"child-{os.getpid()}", Path(values["actor"]), values["engine"], 0)
    scene.out, scene.changes = Path(values["folder"]) / "out", values["changes"]
    scene.run(resume)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=1, help="how often each kind")
    parser.add_argument("--only", nargs="*", metavar="KIND", help="kinds whose name begins so")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="folder in which everything stays")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--resume", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child, options.resume)
        return 0
    kinds = [kind for kind in KINDS if not options.only or kind.name.startswith(tuple(options.only))]
    if options.list or not kinds:
        sys.stdout.write("".join(f"{kind.name}\n" for kind in KINDS))
        return int(not kinds)
    own_mounts()
    tallies = {kind.name: Tally() for kind in kinds}
    # Short: Ray's sockets are in it.
    with contextlib.ExitStack() as stack:
        home = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ch-")))
        home.mkdir(exist_ok=True)
        os.environ["OMP_NUM_THREADS"] = "1"
        with own_ray(home):
            suite = Suite(home, options.seed, options.keep is not None)
            for number in range(options.times):
                for kind in kinds:
                    before = len(tallies[kind.name].wrong)
                    suite.try_once(kind, tallies[kind.name])
                    wrong = tallies[kind.name].wrong[before:]
                    sys.stdout.write(f"{number + 1}: {kind.name}: {tallies[kind.name].skipped or '; '.join(wrong) or 'well'}\n")
                    sys.stdout.flush()
    count = sum(len(tally.wrong) for tally in tallies.values())
    sys.stdout.write(f"\n{table(tallies)}\n\n{sum(tally.times for tally in tallies.values())} disturbed runs, {count} things wrong\n")
    if options.json:
        options.json.write_text(json.dumps({name: dataclasses.asdict(tally) for name, tally in tallies.items()}, indent=1) + "\n")
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main())
