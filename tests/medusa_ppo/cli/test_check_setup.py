"""check-setup: the five commands for a setup with GPUs are real, follow from each other, and print
what they are said to print.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from medusa_ppo.cli import machine_checks
from medusa_ppo.cli.app import app
from medusa_ppo.cli.gpu_suite import (
    PARTS,
    RESULTS,
    PartResult,
    parts_for,
    read_results,
    results_text,
)
from medusa_ppo.config.run_config import OFF, load_config
from medusa_ppo.reports.run_files import ACTOR_FOLDER, HEADS_FOLDER
from medusa_ppo.runtime.files import write_atomic

ROOT = Path(__file__).resolve().parents[3]
STEPS = machine_checks.setup_steps("models/actor", "data/rows.jsonl")


def parsed(words: list[str]) -> dict[str, object]:
    """The arguments of one of our commands as its own parser reads them; nothing is run."""
    command = get_command(app)
    assert words.pop(0) == "medusa-ppo"
    while hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    return command.make_context(command.name, words).params


@pytest.mark.parametrize("step", STEPS, ids=lambda step: " ".join(step.command.split()[:3]))
def test_each_command_is_real(step: machine_checks.SetupStep) -> None:
    # $'...' is bash's way to write a line break, which shlex does not know.
    words = shlex.split(
        re.sub(r"\$('[^']*')", lambda match: match[1].replace("\\n", "\n"), step.command)
    )
    if words[0] == "make":
        made = (ROOT / "Makefile").read_text()
        assert re.search(rf"^{words[1]}:.*\n.*tests/run_gpu_tests.py", made, re.MULTILINE)
        return
    if words[0] == "ray":
        from ray.dashboard.modules.job.cli import submit

        given = submit.make_context("submit", words[3:]).params
        assert words[1:3] == ["job", "submit"] and given["entrypoint_num_gpus"] == 1
        words = list(given["entrypoint"])
    values = parsed(words)
    if values.get("config"):
        name = str(values["config"])  # A path in the checkout, or a preset.
        config = load_config(
            ROOT / name if name.endswith(".yaml") else Path(name), values["overrides"]
        )  # type: ignore[arg-type]
        assert (
            config.model.path == "models/actor"
            and config.data.path == "data/rows.jsonl"
            and config.name in step.command
        )


def test_the_bench_takes_what_the_run_before_leaves_behind() -> None:
    run = STEPS[2].command
    bench = STEPS[3].command
    named = re.search(r"name=(\S+)", run)
    assert named is not None and load_config().out == "runs"
    folder = f"runs/{named[1]}"
    assert f"--model {folder}/{ACTOR_FOLDER} --heads {folder}/{HEADS_FOLDER} " in bench
    template = load_config(ROOT / "configs" / "one-gpu.yaml").data.template
    assert f"--template '{template}'".replace("\n", "\\n") in bench


def test_a_bench_that_says_no_leads_to_a_run_without_the_plugin() -> None:
    assert " ".join(OFF) in STEPS[3].means


def test_what_they_must_print_stands_in_the_code() -> None:
    ours = "".join(
        path.read_text()
        for path in (ROOT / "medusa_ppo").rglob("*.py")
        if path.name != "machine_checks.py"
    )
    ours += str([check.name for check in machine_checks.run_checks(quick=True)]) + "Honest sampling"
    # Of vLLM's line on a machine with GPUs, tests/run_gpu_tests.py and Ray.
    foreign = {"GPU build", "passed, 0 failed", "succeeded"}
    assert [
        words
        for step in STEPS
        for words in step.prints
        if words not in ours and words not in foreign
    ] == []


def test_they_are_printed_whole_and_written_to_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what the last run of each part found, its failed tests by name."""
    monkeypatch.chdir(tmp_path)
    found = PartResult(70, 1, 2, 61.5, ("test_x[cuda]: too far",), "2026-01-02 03:04", "an H100")
    write_atomic(RESULTS, results_text({"serving": found}))
    options = ["--model", "models/actor", "--data", "data/rows.jsonl", "--gpus", "2"]
    done = CliRunner().invoke(app, ["check-setup", *options, "--page", "page.md"])
    assert done.exit_code == 0 and len(STEPS) == 5
    for step in STEPS:
        assert (
            step.command in done.output
            and step.needs in done.output
            and all(words in done.output for words in step.prints)
        )
    page = (tmp_path / "page.md").read_text()
    assert page.split() == done.output.split()
    for part in PARTS:
        assert (f"PART={part.name}\n" in page) == (part.gpus <= 2), part.name
    assert "70 passed, 1 failed, 2 left out, 62 s, 2026-01-02 03:04, an H100" in page
    assert "FAILED test_x[cuda]: too far" in page and "many (3 GPUs)" in page
    assert page.count("never here") == len(parts_for(2)) - 1
    assert (parts_for(8), len(parts_for(1))) == (PARTS, len(PARTS) - 2)
    RESULTS.write_text("damaged")
    assert read_results() == {}


def test_the_first_hour_says_how_long_the_tests_take() -> None:
    page = (ROOT / "docs" / "first-hour.md").read_text(encoding="utf-8")
    said = re.search(r"\((\d+) minutes for the first part, about (\d+) for all on one GPU\)", page)
    assert said is not None
    parts = parts_for(1)
    assert [int(figure) for figure in said.groups()] == [
        parts[0].minutes,
        sum(part.minutes for part in parts),
    ]
