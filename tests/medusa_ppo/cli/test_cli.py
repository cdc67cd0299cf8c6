"""The command line: help with examples, exit codes, one clear sentence for each bad input, no
traceback unless asked for.
"""

from __future__ import annotations

import errno
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from medusa_ppo.cli import run_commands
from medusa_ppo.cli.app import app
from medusa_ppo.config.run_config import RunConfig
from medusa_ppo.demo import dtype_choice
from medusa_ppo.offline import evaluate
from medusa_ppo.reports import evaluation, plain_words, tables
from medusa_ppo.runtime import hardware
from medusa_ppo.runtime.console import command

COMMANDS = [
    "demo",
    "ppo",
    "plan",
    "train",
    "eval",
    "convert",
    "push",
    "report",
    "doctor",
    "check-setup",
]


def run(*arguments: str, code: int) -> str:
    """Run a command in this process; fail unless it exits with `code`."""
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == code, result.output
    return result.output


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_an_example(command: str) -> None:
    assert f"medusa-ppo {command}" in run(command, "--help", code=0).replace("\n", " ")


def test_without_a_command_it_says_what_to_do_first() -> None:
    shown = run(code=0)
    first = re.findall(r"^  medusa-ppo ([a-z]+)", shown, re.MULTILINE)
    assert first[:2] == ["doctor", "demo"] and "--help" in shown
    known = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert set(first) <= set(known)
    assert max(map(len, shown.splitlines())) <= 100


def test_a_run_ends_with_its_sentences_before_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = ["One.", "Two " * 40 + "end."]
    monkeypatch.setattr(plain_words, "in_plain_words", lambda summary: said)
    monkeypatch.setattr(tables, "summary_rows", lambda summary: [("a row", "its figure")])
    run_commands._print_summary({}, tmp_path / "run")
    shown = capsys.readouterr().out
    assert shown.index("One.") < shown.index("Two") < shown.index("a row") < shown.index("Report:")
    assert shown.count("a row") == shown.count("One.") == shown.count("end.") == 1
    assert max(map(len, shown[: shown.index("a row")].splitlines())) <= 100


def test_a_missing_model_folder_is_one_sentence_and_exit_code_2(tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text(json.dumps({"question": "1+1?"}) + "\n")
    output = run(
        "train",
        "--model",
        str(tmp_path / "no-model"),
        "--data",
        str(data),
        "--template",
        "{question}",
        "--out",
        str(tmp_path / "o"),
        code=2,
    )
    assert "no-model" in output and "do this" in output and "Traceback" not in output


def test_train_wants_exactly_one_source_of_text(tmp_path: Path) -> None:
    arguments = ("train", "--model", "m", "--data", "d", "--out", str(tmp_path / "o"))
    assert "--template" in run(*arguments, code=2)
    assert "--template" in run(*arguments, "--template", "{q}", "--column", "text", code=2)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["ppo.step=3"], "ppo.steps"),
        (["engine.num_drafts=9"], "heads.num_heads"),
        (["model.path=/no/such/folder"], "/no/such/folder"),
    ],
)
def test_ppo_refuses_a_bad_configuration_before_anything_starts(
    tmp_path: Path, overrides: list[str], words: str
) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(f"out: {tmp_path / 'runs'}\n")
    output = run("ppo", "--config", str(config), *overrides, code=2)
    assert words in output and "Traceback" not in output


def test_report_of_a_folder_that_is_no_run(tmp_path: Path) -> None:
    output = run("report", str(tmp_path), code=2)
    assert str(tmp_path) in output.replace("\n", "") and "do this" in output


@pytest.mark.parametrize(
    ("able", "gpus", "dtype"), [(True, 0, "bfloat16"), (False, 0, None), (True, 1, "bfloat16")]
)
def test_the_demo_computes_in_what_is_faster_on_this_machine(
    monkeypatch: pytest.MonkeyPatch, able: bool, gpus: int, dtype: str | None
) -> None:
    runs: list[RunConfig] = []
    monkeypatch.setattr(run_commands, "_run", lambda config, resume: runs.append(config))
    found = dtype_choice.Bfloat16({"one token": 0.5 if able else 4.0}, able)
    monkeypatch.setattr(dtype_choice, "time_bfloat16", lambda: found)
    monkeypatch.setattr(
        hardware, "find_hardware", lambda: hardware.Hardware(gpus, bool(gpus), 2, "a test's")
    )
    assert ("demo-bf16.yaml" in run("demo", "--out", "runs/mine", "--steps", "3", code=0)) == (
        dtype is not None
    )
    assert (runs[0].model.dtype, runs[0].name, runs[0].ppo.steps, runs[0].ppo.lam) == (
        dtype,
        "mine",
        3,
        0.95,
    )


def test_an_unknown_option_is_a_usage_error() -> None:
    run("demo", "--stepps", "3", code=2)
    run("demo", "--steps", "0", code=2)


def test_debug_shows_the_traceback_and_plain_runs_do_not() -> None:
    code = (
        "import sys; from medusa_ppo.cli import main; sys.argv = ['medusa-ppo', *sys.argv[1:]];"
        " main()"
    )
    plain = subprocess.run(
        [sys.executable, "-c", code, "ppo", "--config", "none.yaml"],
        capture_output=True,
        text=True,
        check=False,
    )
    debug = subprocess.run(
        [sys.executable, "-c", code, "ppo", "--config", "none.yaml", "--debug"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert plain.returncode == debug.returncode == 2
    assert "Traceback" not in plain.stderr and "Traceback" in debug.stderr
    assert "none.yaml" in plain.stderr


@pytest.mark.parametrize(
    "words",
    [("train", "--out", "o"), ("eval", "--heads", "h"), ("bench", "rollout", "--heads", "h")],
)
def test_a_template_that_was_typed_with_backslash_n_has_a_line_break(
    words: tuple[str, ...],
) -> None:
    command = typer.main.get_command(app)
    rest = list(words)
    while hasattr(command, "commands"):
        command = command.commands[rest.pop(0)]
    context = command.make_context(
        "x", [*rest, "--model", "m", "--data", "d", "--template", r"Question: {question}\nAnswer:"]
    )
    assert context.params["template"] == "Question: {question}\nAnswer:"


def test_allow_goes_with_resume() -> None:
    assert "do this:  Add --resume" in run(
        "ppo", "--config", "demo", "--allow", "ppo.steps", code=2
    )


@pytest.mark.parametrize(
    ("number", "says"),
    [(errno.ENOSPC, "make room"), (errno.EROFS, "choose another place"), (errno.EIO, "--debug")],
)
def test_a_disk_that_takes_nothing_is_one_sentence(
    number: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def write() -> None:
        raise OSError(number, "No", "runs/x")

    with pytest.raises(typer.Exit):
        command(write)()
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    "number", [errno.ENOENT, errno.EISDIR, errno.EEXIST, errno.ENOTDIR, errno.EACCES]
)
def test_a_wrong_path_is_named_and_is_the_users_to_correct(
    number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def write() -> None:
        raise OSError(number, "No", "runs/x")

    with pytest.raises(typer.Exit):
        command(write)()
    said = capsys.readouterr().err.rpartition("do this:")[2]
    assert "orrect the path runs/x" in said or "give runs/x to this user" in said, said


def test_eval_prints_its_figures_before_it_writes_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "a-folder.json"
    measured: list[bool] = []

    def evaluate_heads(options: object, progress: object) -> dict[str, str]:
        measured.append(True)
        # Somebody makes the folder while the engine runs, which no check before it can see.
        folder.mkdir()
        return {}

    monkeypatch.setattr(evaluate, "evaluate_heads", evaluate_heads)
    monkeypatch.setattr(evaluation, "lines", lambda result: ["2.34 tokens per engine step"])
    (tmp_path / "heads").mkdir()
    sizes = {"medusa_ppo": {"heads": {"hidden_size": 8, "vocab_size": 9}}}
    (tmp_path / "heads" / "config.json").write_text(json.dumps(sizes))
    words = ["eval", "--model", "m", "--heads", str(tmp_path / "heads"), "--data", "d"]
    assert "2.34 tokens per engine step" in run(*words, "--json", str(folder), code=1)
    measured.clear()
    for option in ("--json", "--markdown", "--html"):
        assert f"do this:  Correct {option}" in run(*words, option, str(folder), code=2)
    below = tmp_path / "a-file" / "figures.json"
    below.parent.touch()
    assert "is no folder" in run(*words, "--json", str(below), code=2)
    assert not measured, "refused before the work"


@pytest.mark.parametrize("name", ["x.md", "x.svg"])
def test_bench_keeps_its_figures_apart_from_their_page(name: str, tmp_path: Path) -> None:
    said = run("bench", "swap", "--model", "m", "--heads", "h", "--json", name, code=2)
    assert "--json x.md" in said or "--json x.svg" in said
    assert "x.json" in said


@pytest.mark.parametrize(
    ("option", "first", "word"),
    [("--kinds", "hydra", "medsa"), ("--kinds", "hydra", "hydra:x"), ("--losses", "ce", "kltv")],
)
def test_bench_heads_refuses_an_unknown_name_at_once(option: str, first: str, word: str) -> None:
    """Its turn to train came after all responses had been written."""
    source = ("--model", "m", "--data", "d", "--template", "{q}")
    said = run("bench", "heads", *source, option, f"{first},{word}", code=2)
    assert f"{option} {first},{word}: {word}" in said and f"Correct {option}" in said


def test_the_demo_refuses_a_folder_that_can_t_be_one_before_it_measures_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dtype_choice, "time_bfloat16", lambda: pytest.fail("too late"))
    (tmp_path / "file").touch()
    for name in ("file", "file/below"):
        said = run("demo", "--out", str(tmp_path / name), code=2)
        assert "is no folder" in said and "Correct --out" in said


def test_a_dry_run_knows_that_there_are_too_few_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    source = ("--model", "m", "--data", "d", "--template", "{q}", "--out", str(tmp_path / "o"))
    said = run("train", *source, "--workers", "2", "--dry-run", code=2)
    assert "too few GPUs" in said and "--workers 2" in said
