"""The README is one page, and each command in it is one that exists, takes what is shown, and is
run by a test or by CI.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import typer

from medusa_ppo.cli.app import app
from medusa_ppo.cli.plan import Plan, make_plan
from medusa_ppo.config.run_config import load_config
from medusa_ppo.runtime.hardware import Hardware

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
RESULTS = (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")
MOST_LINES, MOST_COLUMNS = 110, 100
MOST_FIGURES = 25
"""In the table of what was measured: more than a reader takes in."""
GIB = 1024**3
LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
GEMMA_270M = {
    "model_type": "gemma3_text",
    "hidden_size": 640,
    "num_hidden_layers": 18,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "intermediate_size": 2048,
    # As on the hub: transformers leaves out that the family's tables are tied.
    "vocab_size": 262144,
}
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


def planned(folder: Path, model: dict[str, object], preset: str, keys: str, gpus: int) -> Plan:
    (folder / "config.json").write_text(json.dumps(model))
    overrides = [f"model.path={folder}", "data.path=train.jsonl", *keys.split()]
    config = load_config(ROOT / "configs" / preset, overrides)
    return make_plan(config, Hardware(gpus, gpus > 0, 8, "8 cores", 80 * GIB if gpus else 0))


def test_8b_on_8_gpus_fits_with_the_settings_that_it_names(tmp_path: Path) -> None:
    said = re.search(r"`configs/([\w-]+\.yaml) ([^`]+)`", README)
    assert said
    plan = planned(tmp_path, LLAMA_8B, said[1], said[2], gpus=8)
    assert plan.gpus <= 8 and max(process.gpu_memory for process in plan.processes) < 80 * GIB


def test_a_270m_model_takes_the_memory_that_it_says(tmp_path: Path) -> None:
    said = re.search(r"needs some (\d+) GiB by `medusa-ppo plan`\s*\((\d+) without", README)
    assert said
    grpo = "ppo.advantages=grpo sampling.responses_per_prompt=4"
    found = [
        round(planned(tmp_path, GEMMA_270M, "gsm8k.yaml", keys, gpus=0).memory / GIB)
        for keys in ("", grpo)
    ]
    assert found == [int(figure) for figure in said.groups()]


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
