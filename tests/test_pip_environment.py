"""`make pip-environment` proves today's install line and this checkout, however often it is run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PYTHON = """#!/bin/sh
if [ "$2" = venv ]; then
  mkdir -p "$3/bin" && cp "$0" "$3/bin/python"
fi
echo "$@" >> "$CALLS"
"""
"""In the place of a Python: it makes environments of itself, and notes what it is asked."""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What the script reads of a checkout; nothing asks the package index."""
    for name in (
        ".ci/pip_environment",
        ".ci/install_lines",
        ".ci/wheels_for_cpu.py",
        "docs/hooks.md",
        "pyproject.toml",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / ".ci" / "installs").write_text("#!/bin/sh\necho '[trl] 3.11: vllm==0.31.0'\n")
    (tmp_path / "main" / "bin").mkdir(parents=True)
    (tmp_path / "main" / "bin" / "python").write_text(PYTHON)
    for program in (".ci/installs", "main/bin/python"):
        (tmp_path / program).chmod(0o700)
    return tmp_path


def asked(checkout: Path) -> list[str]:
    """The calls of `pip install` and of the tests in one run, in order."""
    calls = checkout / "calls"
    calls.unlink(missing_ok=True)
    subprocess.run(
        [".ci/pip_environment", "environments", "trl", "main"],
        cwd=checkout,
        env=os.environ | {"CALLS": str(calls), "PYTHON": str(checkout / "main/bin/python")},
        check=True,
        capture_output=True,
    )
    lines = calls.read_text().splitlines()
    return [line for line in lines if " install " in line or line.startswith("-m pytest")]


def test_an_environment_is_made_anew_for_another_line_and_has_the_checkout_of_now(
    checkout: Path,
) -> None:
    """It ran the tests in that of any earlier line, and was green."""
    line, tools, tests = asked(checkout)
    assert ".[trl" in line and " trl" in line and "pytest" in tools
    own, again = asked(checkout)
    assert own.endswith("--no-deps --force-reinstall .") and again == tests
    page = checkout / "docs" / "hooks.md"
    page.write_text(re.sub(r"(\| TRL \| `pip .*?)==[\d.]+", r"\1==7.", page.read_text()))
    changed, *_ = asked(checkout)
    assert "==7.*" in changed
    declared = checkout / "pyproject.toml"
    declared.write_text(declared.read_text() + "# Another dependency, say.\n")
    assert ".[trl" in asked(checkout)[0]
    assert len(asked(checkout)) == 2
