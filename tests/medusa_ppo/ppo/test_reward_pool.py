"""Reward functions in processes of their own: the same numbers, and what hangs, raises or dies
costs its own response alone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from heads.errors import ConfigError, DataError, RunError
from medusa_ppo.config.run_config import build_config
from medusa_ppo.ppo import reward_pool
from medusa_ppo.ppo.reward_pool import RewardPool
from medusa_ppo.ppo.rewards import CallableReward, RewardSource, make_reward

MODULE = """
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

from heads.errors import DataError


def run_for_a_minute():
    time.sleep(60)
    Path("ended by itself").touch()


def judge(prompt, response, row):
    if response == "program":
        program = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path("program").write_text(f"{os.getpid()} {program.pid}")
        program.wait()
    if response == "child":
        child = multiprocessing.get_context("fork").Process(target=os._exit, args=(3,))
        child.start()
        child.join()
        return child.exitcode
    if response == "hang":
        time.sleep(600)
    if response == "raise":
        raise ZeroDivisionError("no way")
    if response == "row":
        raise DataError("A row is wrong.", given="row")
    if response == "die":
        os._exit(7)
    if response == "die while a program runs":
        child = multiprocessing.get_context("fork").Process(target=run_for_a_minute)
        child.start()
        Path("program").write_text(f"{os.getpid()} {child.pid}")
        os._exit(7)
    if response == "steps":
        return [0.5, 0.25]
    return len(prompt) + len(response) + row["more"]
"""


@pytest.fixture
def source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., RewardSource]]:
    """source(timeout_s=None) -> the reward of the module in two processes."""
    (tmp_path / "judging.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    made: list[RewardSource] = []

    def make(timeout_s: float | None = None) -> RewardSource:
        ppo = {"reward": "judging:judge", "reward_processes": 2, "reward_timeout_s": timeout_s}
        made.append(make_reward(build_config({"ppo": ppo}).ppo))
        return made[-1]

    yield make
    for one in made:
        one.close()
        one.close()


def asked(source: RewardSource, *responses: str) -> list[float]:
    return source.score(
        ["p"] * len(responses), responses, [{"more": n} for n in range(len(responses))]
    ).tolist()


def test_the_same_rewards_in_the_same_order(source):
    responses = ["x" * n for n in range(20)]
    here = CallableReward(
        lambda prompt, response, row: len(prompt) + len(response) + row["more"], "here"
    )
    assert asked(source(), *responses) == asked(here, *responses)


def test_what_hangs_is_ended_and_counted_and_nothing_else_waits(source, caplog):
    one = source(0.5)
    began = time.monotonic()
    assert asked(one, "hang", *["x"] * 30) == [0.0, *(2.0 + n for n in range(1, 31))]
    assert time.monotonic() - began < reward_pool.START_S, "not the ten minutes that it wanted"
    assert one.late == 1 and "1 of 31" in caplog.text
    assert asked(one, "x", "hang") == [2.0, 0.0] and one.late == 2


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def seen_gone(pids: list[int]) -> bool:
    deadline = time.monotonic() + 60.0
    while time.monotonic() < deadline and not all(map(gone, pids)):
        time.sleep(0.05)
    return all(map(gone, pids))


def end_after(pids: list[int]) -> None:
    """See that they are gone, and leave none of them behind in any case."""
    try:
        assert seen_gone(pids)
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def program_of_the_judge() -> list[int]:
    """The ids of the process that judges and of the program that it runs."""
    file = Path("program")
    deadline = time.monotonic() + reward_pool.START_S
    while time.monotonic() < deadline and not (file.is_file() and file.read_text()):
        time.sleep(0.05)
    return [int(word) for word in file.read_text().split()]


def test_what_a_judge_has_started_ends_with_its_time(source):
    one = source(4.0)
    assert asked(one, "program", "x") == [0.0, 3.0] and one.late == 1
    end_after(program_of_the_judge())


def test_what_a_judge_has_started_ends_with_a_loop_that_is_killed(source, tmp_path: Path):
    source()  # Writes the module and goes to its folder.
    code = "from medusa_ppo.ppo.reward_pool import RewardPool\nif __name__ == '__main__':\n"
    code += "    RewardPool('judging:judge', 1).ask([('p', 'program', {})])\n"
    (tmp_path / "loop.py").write_text(code)
    paths = os.pathsep.join([str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")])
    loop = subprocess.Popen(
        [sys.executable, "loop.py"], env=os.environ | {"PYTHONPATH": paths}, cwd=tmp_path
    )
    try:
        pids = program_of_the_judge()
    finally:
        loop.kill()
        loop.wait()
    end_after(pids)


def test_a_program_that_forgets_to_close_ends_all_the_same(source, tmp_path: Path):
    source()
    code = "from medusa_ppo.ppo.reward_pool import RewardPool\nif __name__ == '__main__':\n"
    code += "    pool = RewardPool('judging:judge', 1)\n"
    code += "    print(pool.ask([('p', 'r', {'more': 1})])[0].value)\n"
    code += "    print(pool._workers[0].process.pid)\n"
    (tmp_path / "loop.py").write_text(code)
    paths = os.pathsep.join([str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")])
    ran = subprocess.run(
        [sys.executable, "loop.py"],
        env=os.environ | {"PYTHONPATH": paths},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    reward, pid = ran.stdout.split()
    assert float(reward) == 3.0 and seen_gone([int(pid)])


def test_a_judge_may_have_processes(source):
    assert asked(source(), "child") == [3.0]


def test_errors_come_as_they_would_here(source):
    one = source()
    with pytest.raises(RunError, match="ZeroDivisionError: no way"):
        asked(one, "x", "raise")
    with pytest.raises(DataError, match="A row is wrong"):
        asked(one, "row")
    with pytest.raises(RunError, match="process of the reward function ended") as told:
        asked(one, "die")
    assert "exit code 7" in str(told.value)
    assert asked(one, "x") == [2.0], "another process is in its place"


def test_a_process_that_dies_is_seen_although_a_program_of_it_runs(source):
    """Which has a copy of its pipe, so that nobody's end of it is closed."""
    with pytest.raises(RunError, match="process of the reward function ended") as told:
        asked(source(), "die while a program runs", "x")
    assert "exit code 7" in str(told.value)
    end_after(program_of_the_judge())
    assert not Path("ended by itself").exists()


def test_rewards_of_steps(source):
    assert source(30.0).score_steps(["p"], [["ste", "ps"]], [{}]) == [[0.5, 0.25]]


def test_processes_that_do_not_start_are_told(tmp_path: Path, monkeypatch):
    pool = RewardPool("no_such_module:judge", 1)
    with pytest.raises(RunError, match="did not start"):
        pool.ask([("p", "r", {})])
    assert not pool._workers


def test_nothing_is_left_after_close(source):
    one = source()
    asked(one, "x")
    pids = [worker.process.pid for worker in one._pool._workers]
    assert len(pids) == 2 and os.getpid() not in pids
    one.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.parametrize(
    "ppo", [{"reward_timeout_s": 1.0}, {"reward_processes": 2, "reward": "some/model"}]
)
def test_limits_without_processes_and_processes_for_a_model_are_refused(ppo: dict):
    with pytest.raises(ConfigError, match="reward_processes"):
        build_config({"ppo": ppo})
