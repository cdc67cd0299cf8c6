"""The reference PPO run under faults: nothing is lost, repeated or damaged, and the policy is an
undisturbed run's to the bit.

    python tests/robustness/chaos.py            # each kind once; `make test-chaos`
    python tests/robustness/chaos.py --times 10 --only "engine killed" "disk full"
    python tests/robustness/chaos.py --list

Each kind disturbs a whole run of a tiny actor at a random step (`medusa_ppo.ppo.loop.run_ppo`: Ray,
companion, reports, checkpoints; loopback only). The engine samples with transformers
(chaos_engine.py), in the run's process or as a server of its own; the kinds that begin with `vLLM`
run the command with a real engine. Faults are real where that is possible (signals, a full and a
read-only file system in mounts of our own, bytes changed on the disk, sockets), and raised in their
place where it is not (CUDA, the clock). After each run:

    steps      metrics.jsonl holds every step once, with the figures of the undisturbed run
    policy     actor, critic and both optimizers have the undisturbed run's bytes, and where the
               fault is not the companion's the heads too
    files      whatever is in the run folder can be read, and nothing half written is left
    report     report.md says what happened

Exit code 1 when something is wrong. A kind that this machine does not allow (mounts) is named.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chaos_hook
from chaos_kinds import KINDS, Kind
from chaos_scene import MOUNTED, STEPS, ChaosScene, NotPossible, RunOutcome, outcome_of, unreadable

HERE = Path(__file__).resolve()


def faults_of(kind: Kind, run_dir: Path, undisturbed: RunOutcome) -> list[str]:
    """What is wrong after a run; empty when nothing is."""
    found = outcome_of(run_dir)
    wrong = list[str]()
    steps = [line["step"] for line in found.figures]
    if steps != list(range(STEPS)):
        wrong.append(f"steps {steps}")
    for expected, line in zip(undisturbed.figures, found.figures, strict=False):
        differs = [
            name for name in expected.keys() | line.keys() if expected.get(name) != line.get(name)
        ]
        wrong += [f"step {line['step']}: other {', '.join(sorted(differs))}"] if differs else []
    wrong += [
        f"other bytes in {name}"
        for name, value in found.sums.items()
        if value != undisturbed.sums[name]
    ]
    wrong += ["other heads"] if kind.heads and found.heads != undisturbed.heads else []
    wrong += [] if re.search(kind.told, found.report) else [f"the report does not say: {kind.told}"]
    return wrong + unreadable(run_dir)


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

        self._home = home
        self._seed = seed
        self._keep = keep
        self._count = 0
        self._actor = make_tiny_actor(home / "actor")
        self._undisturbed: dict[str, RunOutcome] = {}

    def try_once(self, kind: Kind, tally: Tally) -> None:
        reference = self._reference(kind)
        began = time.monotonic()
        self._count += 1
        scene = ChaosScene(
            self._home / f"{self._count}", self._actor, kind.engine, self._seed * 1000 + self._count
        )
        try:
            kind.undergo(scene)
            tally.wrong += faults_of(kind, scene.run_dir, reference)
        except NotPossible as error:
            tally.skipped = str(error)
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            tally.wrong.append(
                f"{type(error).__name__}: {error} ({Path(last.filename).name}:{last.lineno})"
            )
        finally:
            scene.close()
        tally.times += 1
        tally.seconds += time.monotonic() - began
        if not self._keep and not tally.wrong:
            shutil.rmtree(scene.folder, ignore_errors=True)

    def _reference(self, kind: Kind) -> RunOutcome:
        """The undisturbed run; heads are compared only with the same settings."""
        which = "vllm" if kind.engine == "vllm" else "here"
        if which not in self._undisturbed:
            scene = ChaosScene(self._home / f"u-{which}", self._actor, which, 0)
            if which == "vllm":
                from watched import WatchedRun

                (scene.folder / "w").mkdir()
                with WatchedRun(scene.config(), scene.folder / "w") as run:
                    assert run.wait_for(lambda: run.code is not None, 400) and run.code == 0, (
                        run.tail()
                    )
            else:
                scene.run()
            self._undisturbed[which] = outcome_of(scene.run_dir)
        return self._undisturbed[which]


def table(tallies: dict[str, Tally]) -> str:
    """Markdown, one line a kind."""
    lines = ["| fault | times | wrong | seconds each |", "|---|---|---|---|"]
    for name, tally in tallies.items():
        wrong = f"not possible: {tally.skipped}" if tally.skipped else str(len(tally.wrong))
        lines.append(
            f"| {name} | {tally.times} | {wrong} | {tally.seconds / max(1, tally.times):.0f} |"
        )
    return "\n".join(lines)


def own_mounts() -> None:
    """Start again where mounts are ours alone, if that is allowed."""
    if MOUNTED in os.environ:
        return
    for flags in (["--mount"], ["--user", "--map-root-user", "--mount"]):
        if (
            shutil.which("unshare")
            and subprocess.run(
                ["unshare", *flags, "true"], check=False, capture_output=True
            ).returncode
            == 0
        ):
            os.environ[MOUNTED] = "1"
            os.execvp(
                "unshare",
                ["unshare", *flags, "--propagation", "private", sys.executable, *sys.argv],
            )
    os.environ[MOUNTED] = ""


@contextlib.contextmanager
def own_ray(home: Path) -> Iterator[None]:
    """One Ray for all runs in this process, whose workers take orders."""
    import ray

    from medusa_ppo.runtime.processes import OWN_RAY_ENVIRONMENT

    paths = os.pathsep.join(
        [str(HERE.parent), str(HERE.parents[2]), os.environ.get("PYTHONPATH", "")]
    )
    own = {
        chaos_hook.ORDERS: str(home / "companion-orders"),
        "RAY_enable_worker_prestart": "0",
        "PYTHONPATH": paths,
    }
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
    scene = ChaosScene.__new__(ChaosScene)
    ChaosScene.__init__(
        scene,
        Path(values["folder"]) / f"child-{os.getpid()}",
        Path(values["actor"]),
        values["engine"],
        0,
    )
    scene.out = Path(values["folder"]) / "out"
    scene.changes = values["changes"]
    scene.run(resume)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--times", type=int, default=1, help="how often each kind")
    parser.add_argument("--only", nargs="*", metavar="KIND", help="kinds whose name begins so")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="folder in which everything stays")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--resume", action="store_true", help=argparse.SUPPRESS)
    from medusa_ppo.runtime.processes import quiet_libraries

    options = parser.parse_args()
    if options.child:
        child(options.child, options.resume)
        return 0
    kinds = [
        kind for kind in KINDS if not options.only or kind.name.startswith(tuple(options.only))
    ]
    if options.list or not kinds:
        sys.stdout.write("".join(f"{kind.name}\n" for kind in KINDS))
        return int(not kinds)
    own_mounts()
    quiet_libraries()
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
                    sys.stdout.write(
                        f"{number + 1}: {kind.name}:"
                        f" {tallies[kind.name].skipped or '; '.join(wrong) or 'well'}\n"
                    )
                    sys.stdout.flush()
    count = sum(len(tally.wrong) for tally in tallies.values())
    sys.stdout.write(
        f"\n{table(tallies)}\n\n{sum(tally.times for tally in tallies.values())} disturbed runs,"
        f" {count} things wrong\n"
    )
    if options.json:
        options.json.write_text(
            json.dumps(
                {name: dataclasses.asdict(tally) for name, tally in tallies.items()}, indent=1
            )
            + "\n"
        )
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main())
