"""What a kind of chaos.py happens to: a run folder, the runs in it, the moments at which something
is done, what is left.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import psutil

STEPS = 8
SAVE_EVERY = 2
BACK_S = 120.0
MOUNTED = "CHAOS_OWN_MOUNTS"
TENSORS = ("actor", "critic", "actor_optimizer", "critic_optimizer")
UNEQUAL = re.compile(
    r"_s$|^companion_|^replay_|^versions_|restarts$|bytes$|gib$|^heads_version$|^staleness$|^swap_"
    r"|^plugin_|_per_s$|^account_|idle_frac$"
)
"""Figures that the clock or the companion decides."""


class ChaosScene:
    """A run folder, the runs in it, and what is done to them at which moment. It listens to a run
    as a ProgressSink does.
    """

    def __init__(self, folder: Path, actor: Path, engine: str, seed: int) -> None:
        self.folder = folder
        self.actor = actor
        self.engine = engine
        self.random = random.Random(seed)
        self.out = folder / "out"
        self.clients = []
        self.stand_in = None
        self._step = -1
        self._acts: dict[tuple[int, str], list[Callable[[], object]]] = {}
        self._undo = contextlib.ExitStack()
        folder.mkdir(parents=True)
        self.orders = folder / "orders"
        self.changes: dict[str, dict[str, Any]] = {}

    # ---- what kinds use

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
        from medusa_ppo.config.run_config import build_config
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
            "engine": {
                "max_num_seqs": 16,
                "max_model_len": 128,
                "threads": 1,
                "memory_fraction": 0.01,
                "dtype": "float32",
                "num_drafts": 3,
            },
            "heads": {"num_heads": 3, "context": 0, "warm_up_tokens": 0},
            "companion": {
                "wait": True,
                "epochs": 2,
                "learning_rate": 1e-2,
                "batch_positions": 128,
                "gate_confidence": 0.55,
            },
            "ppo": {
                "steps": STEPS,
                "prompts_per_step": 16,
                "actor_learning_rate": 1e-4,
                "entropy_coefficient": 0.02,
                "checkpoint_every": SAVE_EVERY,
                "keep_checkpoints": 2,
                "threads": 1,
            },
        }
        values["engine"] |= {
            "server": {"backend": "server"},
            "broadcast": {"transfer": "broadcast"},
        }.get(self.engine, {})
        for section, changed in self.changes.items():
            values[section] = values.get(section, {}) | changed
        return values

    def companion(self, title: str = "") -> psutil.Process:
        """The newest living process of the companion; the first of its workers where it has
        several.
        """
        title = title or (
            "ray::Leader"
            if self.changes.get("companion", {}).get("workers", 1) > 1
            else "ray::_HostedService"
        )
        found = [
            process
            for process in psutil.Process().children(recursive=True)
            if title in " ".join(cmdline_of(process))
        ]
        return max(found, key=lambda process: process.create_time())

    def companion_back(self, gone: int) -> None:
        """Wait until another companion than the one that is gone answers."""
        deadline = time.monotonic() + BACK_S
        while time.monotonic() < deadline:
            with contextlib.suppress(ValueError):  # There is none now.
                self.clients[-1].newest(1 << 40)
                if self.companion().pid != gone and self.clients[-1].status(1.0).alive:
                    return
            time.sleep(0.2)
        raise AssertionError("the companion did not come back")

    def strike_companion(
        self, number: signal.Signals, first: Callable[[], object] = lambda: None, title: str = ""
    ) -> None:
        """At a random step: stop it, do something, send the signal; two steps later it must be
        back.
        """
        step = self.moment()

        def strike() -> None:
            process = self.companion(title)
            leader = self.companion().pid
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

    # ---- as a ProgressSink

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


def listener(scene: ChaosScene) -> Any:
    """A ProgressSink that tells the scene."""
    from medusa_ppo.ppo.run_progress import ProgressSink

    class Listener(ProgressSink):
        def phase_started(self, phase: str, step: int | None = None) -> None:
            scene.phase_began(phase, step)

    return Listener()


@contextlib.contextmanager
def patches(scene: ChaosScene) -> Iterator[None]:
    """The engine that stands in, and less patience than a run has."""
    import chaos_engine

    from medusa_ppo.companion.client import CompanionClient
    from medusa_ppo.engines import http_server
    from medusa_ppo.engines.actor_sync import BroadcastPool
    from medusa_ppo.engines.launch import plan_launch
    from medusa_ppo.engines.pool import EnginePool
    from medusa_ppo.plugin import medusa_plugin as plugin
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
            scene.stand_in = chaos_engine.ChaosEngine(
                model, plan_launch(model, heads, config, seed).stop_ids
            )
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
            (trackers, "MOST_WAITING", 3),
            (chaos_engine.StandInServer, "orders", scene.orders),
        ):
            stack.enter_context(mock.patch.object(target, name, value))
        yield


# ---- processes of their own


class Child:
    """`run_ppo` in a process of its own, with a Ray of its own."""

    def __init__(self, scene: ChaosScene, *more: str) -> None:
        file = scene.folder / "child.json"
        file.write_text(
            json.dumps(
                {
                    "engine": scene.engine,
                    "actor": str(scene.actor),
                    "folder": str(scene.folder),
                    "changes": scene.changes,
                }
            )
        )
        environment = {
            name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"
        } | {"TMPDIR": str(scene.folder.parent)}
        with (scene.folder / "child.log").open("ab") as log:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    str(Path(__file__).with_name("chaos.py")),
                    "--child",
                    str(file),
                    *more,
                ],
                env=environment,
                stdout=log,
                stderr=log,
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


# ---- damage


def cut(file: Path, generator: random.Random | None = None) -> None:
    """Half of it is left, as after a power cut."""
    os.truncate(file, file.stat().st_size // 2)


def flip(file: Path, generator: random.Random) -> None:
    """One bit, in the last half: of numbers, not of a header."""
    data = bytearray(file.read_bytes())
    data[generator.randrange(len(data) // 2, len(data))] ^= 1 << generator.randrange(8)
    with file.open("r+b") as stream:  # The same inode: a link has the damage too.
        stream.write(data)


# ---- what a run left


@dataclasses.dataclass(frozen=True)
class RunOutcome:
    """What a finished run left."""

    figures: list[dict[str, Any]]
    sums: dict[str, str]
    heads: str
    report: str


def outcome_of(run_dir: Path) -> RunOutcome:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    figures = [
        {name: value for name, value in line.items() if not UNEQUAL.search(name)} for line in lines
    ]
    files = {name: run_dir / "checkpoint" / f"{name}.safetensors" for name in TENSORS} | {
        "final": run_dir / "actor" / "model.safetensors"
    }
    sums = {name: hashlib.sha256(file.read_bytes()).hexdigest() for name, file in files.items()}
    heads = hashlib.sha256((run_dir / "heads-final" / "model.safetensors").read_bytes()).hexdigest()
    return RunOutcome(figures, sums, heads, (run_dir / "report.md").read_text())


def unreadable(run_dir: Path) -> list[str]:
    """Files of a run that are not whole, and what is half written."""
    from heads.checkpoint import load_heads, load_state
    from heads.errors import MedusaError
    from medusa_ppo.ppo.run_state import saved_folder

    wrong = [f"left behind: {path.name}" for path in run_dir.rglob(".*")]
    readers: list[tuple[Path, Callable[[Path], object]]] = [
        (path, load_state) for path in run_dir.rglob("*.safetensors")
    ]
    readers += [
        (path, load_heads) for path in [run_dir / "heads-final", *(run_dir / "heads").glob("v*")]
    ]
    readers += [
        (path, lambda path: json.loads(path.read_text())) for path in run_dir.rglob("*.json")
    ]
    for path, read in readers:
        try:
            read(path)
        except (MedusaError, ValueError, OSError) as error:
            wrong.append(f"{path.relative_to(run_dir)}: {error}")
    return (
        wrong
        if saved_folder(run_dir) == run_dir / "checkpoint"
        else [*wrong, "the last checkpoint is damaged"]
    )
