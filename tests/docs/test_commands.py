"""Each `medusa-ppo` line in a block of the documents is one that the program takes; nothing is run.

A line with brackets, bars or dots in it is a synopsis, and left out.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer

from medusa_ppo.cli.app import app

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "CONTRIBUTING.md", ROOT / "heads/FORMAT.md"]
SYNOPSIS = re.compile(r"\[|\.\.\.|\|")


def lines(page: Path) -> list[str]:
    """Commands in fenced and in indented blocks, comments cut off."""
    text = page.read_text(encoding="utf-8")
    fenced = re.findall(r"^```(?:sh|bash)?\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    indented = re.findall(r"^    (.*)$", text, re.MULTILINE)
    block = re.sub(r"\\\n\s*", " ", "\n".join([*fenced, *indented]))
    found = [re.sub(r"\s+#.*$", "", line.strip()) for line in block.splitlines()]
    return [line for line in found if line.startswith("medusa-ppo ") and not SYNOPSIS.search(line)]


COMMANDS = [(page.name, line) for page in PAGES for line in lines(page)]


def test_there_are_some() -> None:
    assert {"quickstart.md", "choosing.md"} <= {page for page, _ in COMMANDS}


@pytest.mark.parametrize(("page", "line"), COMMANDS)
def test_a_command_takes_what_is_shown(page: str, line: str) -> None:
    command = typer.main.get_command(app)
    rest = shlex.split(line)[1:]
    while hasattr(command, "commands"):
        command = command.commands[rest[0]]
        rest = rest[1:]
    command.make_context(line, list(rest))
