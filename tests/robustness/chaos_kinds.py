"""The kinds of faults of chaos.py, each a function that does it to a scene."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import chaos_hook
import psutil
from chaos_scene import BACK_S, STEPS, ChaosScene, Child, cmdline_of, cut, flip

DISK_MIB = 24


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
    undergo: Callable[[ChaosScene], None]
    told: str = ""
    heads: bool = True
    engine: str = "here"


# ---- the kinds: companion


def companion_killed(scene: ChaosScene) -> None:
    scene.strike_companion(signal.SIGKILL)
    scene.run()


def companion_stopped(scene: ChaosScene) -> None:
    scene.changes = {"companion": {"wait": False}}  # Who waits for it would wait for ten minutes.
    scene.strike_companion(signal.SIGSTOP)
    scene.run()


def companion_worker_killed(scene: ChaosScene) -> None:
    scene.changes = {"companion": {"workers": 2}}
    scene.strike_companion(signal.SIGKILL, title="ray::Member")
    scene.run()


def companion_worker_stopped(scene: ChaosScene) -> None:
    scene.changes = {"companion": {"workers": 2, "wait": False}}
    scene.strike_companion(signal.SIGSTOP, title="ray::Member")
    scene.run()


def companion_state_truncated(scene: ChaosScene) -> None:
    scene.strike_companion(
        signal.SIGKILL, lambda: cut(scene.run_dir / "companion" / "companion.safetensors")
    )
    scene.run()


def companion_state_flipped(scene: ChaosScene) -> None:
    scene.strike_companion(
        signal.SIGKILL,
        lambda: flip(scene.run_dir / "companion" / "companion.safetensors", scene.random),
    )
    scene.run()


def ordered(order: str, back: bool, last: int = STEPS - 4) -> Callable[[ChaosScene], None]:
    """The companion does by itself what is ordered, at its next batch or version; given at a random
    step from 1 to `last`.
    """

    def undergo(scene: ChaosScene) -> None:
        step = scene.moment(1, last)
        file = Path(os.environ[chaos_hook.ORDERS])
        pids = list[int]()

        def give() -> None:
            pids.append(scene.companion().pid)
            file.write_text(order)

        def look(at: int) -> None:
            """Once it has done so it must come back."""
            if file.exists():
                scene.at(at + 1, "generate", lambda: look(at + 1))
            else:
                scene.companion_back(pids[0])

        scene.at(step, "generate", give)
        if back:
            scene.at(step + 2, "generate", lambda: look(step + 2))
        scene.run()
        if file.exists():
            file.unlink()
            raise AssertionError(f"the companion was never at the place for {order}")

    return undergo


def head_file_damaged(
    harm: Callable[[Path, random.Random], object],
) -> Callable[[ChaosScene], None]:
    def undergo(scene: ChaosScene) -> None:
        from medusa_ppo.plugin.installer import HeadsInstaller

        swap = HeadsInstaller._swap
        harmed = list[int]()

        def swap_damaged(installer: HeadsInstaller, published: Any) -> None:
            if not harmed:
                harmed.append(published.version)
                harm(Path(published.path), scene.random)
            swap(installer, published)

        with mock.patch.object(HeadsInstaller, "_swap", swap_damaged):
            scene.run()
        assert harmed, "no heads were published"

    return undergo


def clock_jumps(scene: ChaosScene) -> None:
    """The driver's clock goes a day ahead and two back, and all that the companion wrote until then
    is of a day that is to come.
    """
    step = scene.moment(3)
    now = time.time

    def ahead() -> None:
        patch = mock.patch.object(time, "time", lambda: now() + 86_400)
        patch.start()
        scene._undo.callback(patch.stop)

    def back() -> None:
        folder = scene.clients[-1]._publish_dir
        for path in [
            *folder.glob("heads-*"),
            *(scene.run_dir / "heads").glob("v*"),
            *scene.run_dir.rglob("*.safetensors"),
        ]:
            os.utime(path, (now() + 86_400, now() + 86_400))
        time.time = lambda: now() - 86_400

    scene.at(step - 1, "score", ahead)
    scene.at(step, "score", back)
    scene.run()


# ---- engines


def engine_signalled(number: signal.Signals) -> Callable[[ChaosScene], None]:
    def undergo(scene: ChaosScene) -> None:
        import chaos_engine

        later_s = scene.random.uniform(0, 0.3)

        def strike() -> None:
            threading.Timer(
                later_s, os.kill, (chaos_engine.StandInServer.started[-1], number)
            ).start()

        scene.at(scene.moment(), scene.random.choice(["generate", "sync"]), strike)
        scene.run()

    return undergo


def engine_answers(order: str) -> Callable[[ChaosScene], None]:
    def undergo(scene: ChaosScene) -> None:
        scene.at(scene.moment(), "generate", lambda: scene.orders.write_text(order))
        scene.run()
        assert not scene.orders.exists(), "nobody asked the engine"

    return undergo


def broadcast_breaks(scene: ChaosScene) -> None:
    from heads.errors import SwapError

    def breaks(engine: Any) -> None:
        engine.before_receiving = lambda engine: None
        engine.group.leave()
        raise SwapError(
            "The connection broke.", given="a socket", expected="an actor", do="Sync again."
        )

    scene.at(scene.moment(), "sync", lambda: setattr(scene.stand_in, "before_receiving", breaks))
    scene.run()


# ---- the run itself


def gpu_error(scene: ChaosScene) -> None:
    import torch

    def raise_it() -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    scene.at(scene.moment(3), scene.random.choice(["score", "update"]), raise_it)
    scene.stops(torch.AcceleratorError)
    scene.run(resume=True)


def stop_at(scene: ChaosScene, step: int) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    scene.at(step, "update", stop)
    scene.stops(KeyboardInterrupt)


def checkpoint_damaged(
    harm: Callable[[Path, random.Random], object],
) -> Callable[[ChaosScene], None]:
    """The last checkpoint (and its link among those that are kept) has other bytes: the run goes on
    from the one before.
    """

    def undergo(scene: ChaosScene) -> None:
        stop_at(scene, 5)
        files = sorted(
            path
            for path in (scene.run_dir / "checkpoint").iterdir()
            if path.is_file() and path.stat().st_size > 100
        )
        harm(scene.random.choice(files), scene.random)
        scene.run(resume=True)

    return undergo


def metrics_damaged(scene: ChaosScene) -> None:
    """A bit of a line in the middle, and half of the last line."""
    stop_at(scene, 5)
    file = scene.run_dir / "metrics.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    place = scene.random.randrange(4)
    lines[place] = lines[place].replace(b'"step"', b'"stop"', 1)
    file.write_bytes(b"".join(lines)[:-20])
    scene.run(resume=True)


def tracker_hangs(scene: ChaosScene) -> None:
    from medusa_ppo.ppo import session
    from medusa_ppo.reports.trackers import TrackerGroup

    class Hung:
        def log(self, step: int, values: Any) -> None:
            time.sleep(600)

        close = staticmethod(lambda: None)

    with mock.patch.object(session, "start_trackers", lambda *_: TrackerGroup({"hung": Hung()})):
        scene.run()


# ---- disks


def disk_full(scene: ChaosScene) -> None:
    """A file system of a few MiB, filled for some steps, in which rollouts can't be kept either."""
    scene.changes = {"report": {"keep_rollouts": 2}}
    scene.out.mkdir()
    scene.mount("-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(scene.out))
    filler = scene.out / "filler"
    step = scene.moment()

    def fill() -> None:
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(b"x" * 4096)

    scene.at(step, "generate", fill)
    scene.at(step + 3, "generate", filler.unlink)
    scene.run()
    save_outside(scene)


def read_only(scene: ChaosScene) -> None:
    """Nothing can be written into the run's folder for some steps; the file of metrics, which is
    open, is written on.
    """
    step = scene.moment()
    scene.at(
        step,
        "generate",
        lambda: (
            scene.mount("--bind", *[str(scene.run_dir)] * 2),
            scene.mount("-o", "remount,bind,ro", str(scene.run_dir)),
        ),
    )
    scene.at(
        step + 3,
        "generate",
        lambda: subprocess.run(["umount", "-l", str(scene.run_dir)], check=True),
    )
    scene.run()


def disk_slow(scene: ChaosScene) -> None:
    """Each flush to the disk takes a third of a second for some steps."""
    fsync = os.fsync
    step = scene.moment()

    def slowly(handle: int) -> None:
        time.sleep(0.3)
        fsync(handle)

    patch = mock.patch.object(os, "fsync", slowly)
    scene.at(step, "generate", patch.start)
    scene.at(step + 3, "generate", patch.stop)
    scene.run()


def save_outside(scene: ChaosScene) -> None:
    """Take the run's folder off its small disk."""
    shutil.copytree(scene.run_dir, scene.folder / "kept" / "run", symlinks=True)
    scene.out = scene.folder / "kept"


def in_child(
    strike: Callable[[Child], object], codes: tuple[int, ...]
) -> Callable[[ChaosScene], None]:
    """Something is done to a child at a random moment of a random step; where that ends it, it is
    resumed.
    """

    def undergo(scene: ChaosScene) -> None:
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


def vllm_signalled(number: signal.Signals) -> Callable[[ChaosScene], None]:
    """A real engine in Ray."""

    def undergo(scene: ChaosScene) -> None:
        from watched import WatchedRun

        patience = (
            "import medusa_ppo.engines.http_server as h; h.CALL_TIMEOUT_S, h.TOKEN_S = 20.0, 0.0"
        )
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
    Kind(
        "companion killed",
        companion_killed,
        "The companion was lost and started again",
        heads=False,
    ),
    Kind("companion stopped", companion_stopped, "ended and restarted", heads=False),
    Kind(
        "companion's second worker killed",
        companion_worker_killed,
        "The companion was lost and started again",
        heads=False,
    ),
    Kind(
        "companion's second worker stopped",
        companion_worker_stopped,
        "(lost|ended) and started again",
        heads=False,
    ),
    Kind(
        "companion: GPU error",
        ordered("cuda", back=True),
        "The companion was lost and started again",
        heads=False,
    ),
    Kind(
        "companion: out of memory",
        ordered("memory", back=False),
        "can't allocate memory|not enough memory|invalid size",
        heads=False,
    ),
    Kind(
        "companion killed in the middle of a head version",
        # Few versions follow the first, and one that dies at the last does not come back in it.
        ordered("half", back=True, last=1),
        "The companion was lost and started again",
        heads=False,
    ),
    Kind(
        "companion killed, its state cut in half",
        companion_state_truncated,
        "saved state is damaged",
        heads=False,
    ),
    Kind(
        "companion killed, a bit of its state flipped",
        companion_state_flipped,
        "saved state is damaged",
        heads=False,
    ),
    Kind("head file cut in half", head_file_damaged(cut), "were not installed", heads=False),
    Kind(
        "head file with a flipped bit", head_file_damaged(flip), "were not installed", heads=False
    ),
    Kind("clock jumps", clock_jumps),
    Kind("companion's clock jumps", ordered("clock", back=False)),
    Kind(
        "engine killed",
        engine_signalled(signal.SIGKILL),
        "An engine was lost and started again",
        engine="server",
    ),
    Kind(
        "engine stopped",
        engine_signalled(signal.SIGSTOP),
        "An engine was lost and started again",
        engine="server",
    ),
    Kind(
        "engine answers late",
        engine_answers("late"),
        "An engine was lost and started again",
        engine="server",
    ),
    Kind(
        "engine answers other tokens",
        engine_answers("wrong"),
        "outside the vocabulary",
        engine="server",
    ),
    Kind(
        "engine answers half",
        engine_answers("half"),
        "do not belong to its tokens",
        engine="server",
    ),
    Kind("engine answers twice", engine_answers("twice"), engine="server"),
    Kind(
        "engine answers nothing",
        engine_answers("nothing"),
        "An engine was lost and started again",
        engine="server",
    ),
    Kind(
        "engine has a GPU error",
        engine_answers("gpu"),
        "An engine was lost and started again",
        engine="server",
    ),
    Kind(
        "broadcast breaks off",
        broadcast_breaks,
        "to the engines as a file",
        engine="broadcast",
    ),
    Kind("GPU error in the loop", gpu_error, "illegal memory access(.|\n)*Resumed at step"),
    Kind("checkpoint cut in half", checkpoint_damaged(cut), "checkpoint is damaged"),
    Kind("checkpoint with a flipped bit", checkpoint_damaged(flip), "checkpoint is damaged"),
    Kind("metrics damaged", metrics_damaged, "unreadable lines"),
    Kind("tracker hangs", tracker_hangs, "Tracker hung failed"),
    Kind("disk full", disk_full, "could not be written"),
    Kind("disk read-only", read_only, "could not be written"),
    Kind("disk slow", disk_slow),
    Kind(
        "driver killed",
        in_child(lambda child: child.process.kill(), (-signal.SIGKILL,)),
        "Resumed at step",
    ),
    Kind("driver stopped for 5 s", in_child(stop_and_go, (0,))),
    Kind("raylet killed", in_child(kill_raylet, (1,)), "Resumed at step"),
    Kind(
        "vLLM killed",
        vllm_signalled(signal.SIGKILL),
        "An engine was lost and started again",
        engine="vllm",
    ),
    Kind(
        "vLLM stopped",
        vllm_signalled(signal.SIGSTOP),
        "An engine was lost and started again",
        engine="vllm",
    ),
)
