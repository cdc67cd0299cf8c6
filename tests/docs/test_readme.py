"""The README is one page, and each command in it is one that exists, takes what is shown, and is
run by a test or by CI.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer

from medusa_ppo.cli.app import app

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
RESULTS = (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")
MOST_LINES, MOST_COLUMNS = 110, 100
MOST_FIGURES = 25
"""In the table of what was measured: more than a reader takes in."""
FIGURE = re.compile(r"\d+(?:[.,]\d+)*")
# Command -> the file that runs it on something real, and what of it stands there.
RUN_BY = {
    "make demo": ("tests/medusa_ppo/ppo/test_loop_end_to_end.py", "demo"),
    "make test": (".ci/run", "make test"),
    "medusa-ppo ppo": ("tests/medusa_ppo/ppo/test_resume.py", '"ppo"'),
    "medusa-ppo train": ("tests/medusa_ppo/offline/test_train_and_eval.py", "train"),
    "medusa-ppo convert": ("tests/medusa_ppo/offline/test_convert.py", "convert"),
    "medusa-ppo plan": ("tests/medusa_ppo/cli/test_plan.py", "plan"),
    "medusa-ppo predict": ("tests/medusa_ppo/predict/test_predict_command.py", "predict"),
    "medusa-ppo eval": ("tests/medusa_ppo/offline/test_train_and_eval.py", "eval"),
    "medusa-ppo bench rollout": ("tests/medusa_ppo/bench/test_commands.py", "rollout"),
    "medusa-ppo report": ("tests/medusa_ppo/cli/test_cli.py", "report"),
    "medusa-ppo doctor": ("tests/medusa_ppo/cli/test_machine_checks.py", "doctor"),
    "medusa-ppo check-setup": ("tests/medusa_ppo/cli/test_check_setup.py", "check-setup"),
}


def commands() -> list[list[str]]:
    """The words of each `make` and `medusa-ppo` line in the README's blocks, comments cut off."""
    flags = re.DOTALL | re.MULTILINE
    blocks = re.findall(
        r"^```\n(.*?)^```", re.sub(r"^```diff\n.*?^```", "", README, flags=flags), flags
    )
    lines = [
        line
        for block in blocks
        for line in block.splitlines()
        if line.startswith(("make ", "medusa-ppo "))
    ]
    return [shlex.split(re.sub(r"\s+#.*$", "", line)) for line in lines]


def name_of(words: list[str]) -> str:
    return " ".join(words[: 3 if words[1] == "bench" else 2])


def measured() -> list[str]:
    """The values in the table of what was measured."""
    table = re.search(r"^\| measured.*\n\|[-|]+\n((?:\|.*\n)+)", README, re.MULTILINE)
    assert table, "the table's first cell begins with `measured`"
    return [row.strip("|").split("|")[1] for row in table[1].splitlines()]


def test_it_is_one_page() -> None:
    assert README.count("\n") <= MOST_LINES
    assert all(len(line) <= MOST_COLUMNS for line in README.splitlines())
    pictures = re.findall(r"!\[[^]]+\]\(([^)]+)\)", README)
    assert pictures and all((ROOT / picture).is_file() for picture in pictures)


def test_its_table_is_short_and_each_figure_stands_in_the_results() -> None:
    figures = [figure for value in measured() for figure in FIGURE.findall(value)]
    assert 0 < len(figures) <= MOST_FIGURES
    assert [figure for figure in figures if figure not in FIGURE.findall(RESULTS)] == []


@pytest.mark.parametrize("words", commands(), ids=name_of)
def test_a_command_takes_what_is_shown(words: list[str]) -> None:
    """Parsed by the command itself; nothing is run."""
    if words[0] == "make":
        assert re.search(
            rf"^{words[1]}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE
        )
        return
    command = typer.main.get_command(app)
    rest = words[1:]
    while hasattr(command, "commands"):
        command = command.commands[rest[0]]
        rest = rest[1:]
    command.make_context(name_of(words), list(rest))


def test_each_command_is_run_somewhere() -> None:
    assert {name_of(words) for words in commands()} == set(RUN_BY)
    for command, (file, text) in RUN_BY.items():
        assert text in (ROOT / file).read_text(encoding="utf-8"), f"{command} is not in {file}"
