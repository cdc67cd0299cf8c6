"""docs/quickstart.md on a tiny model: its `medusa-ppo` commands with the words of the page, one
after the other in one folder. Only sizes are smaller here.

`make test` has room for those with one engine at a time: predict, train and eval. The others are
marked slow: doctor starts Ray and an engine to look at the machine, bench rollout an engine for
each way to draft, ppo an engine, Ray and the companion, and report needs ppo's run.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from medusa_ppo.cli.app import app
from medusa_ppo.demo.task import demo_rows

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
FIRST = ("predict", "train", "eval")
THEN = ("doctor", "bench rollout", "ppo", "report")
# Command -> words added to those of the page: smaller sizes, and for a tiny model larger steps.
SMALLER = {
    "train": "--max-new-tokens 16 --epochs 6 --batch-positions 128 --learning-rate 1e-2",
    "eval": "--max-new-tokens 16 --limit 8",
    "bench rollout": "--max-new-tokens 16 --rounds 1 --eager --others ngram",
    "ppo": (
        "data.max_prompt_tokens=100 sampling.max_new_tokens=16 engine.max_num_seqs=8"
        " engine.max_model_len=128 engine.enforce_eager=true ppo.steps=2 ppo.prompts_per_step=8"
        " ppo.minibatch_size=8 ppo.micro_batch_size=8 report.speed_every=null"
    ),
}
# Words of the page -> what this test has in their place.
REPLACED = {
    "--length-mean 2000": "--length-mean 100",
    "--max-train-tokens 100000": "--max-train-tokens 2000",
    "1,16,64": "1,4",
    "configs/": f"{ROOT}/configs/",
}

pytestmark = pytest.mark.timeout(1200)


def commands() -> dict[str, str]:
    """Each command of the page by its name, in order."""
    blocks = re.findall(r"^```\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.splitlines()]
    return {
        name: line
        for line in lines
        for name in (*FIRST, *THEN)
        if re.match(rf"medusa-ppo {name}( |$)", line)
    }


def words(name: str, actor: Path) -> list[str]:
    """The words after `medusa-ppo`, for the tiny actor and in its sizes."""
    command = commands()[name]
    for given, used in REPLACED.items():
        command = command.replace(given, used)
    command = re.sub(r"\bDIR\b", str(actor), command)
    return shlex.split(f"{command} {SMALLER.get(name, '')}")[1:]


def run(name: str, actor: Path) -> str:
    done = CliRunner().invoke(app, words(name, actor))
    assert done.exit_code == 0, f"{commands()[name]}\n{done.output[-3000:]}"
    return done.output


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a reader has: prompts to train on, and others to test with."""
    folder = tmp_path_factory.mktemp("quickstart")
    for name, first in (("train.jsonl", 0), ("test.jsonl", 64)):
        rows = [
            {"question": row["question"], "answer": "#### 7"}
            for row in demo_rows("train", first, 64)
        ]
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def trained(folder: Path, chain_actor: Path) -> str:
    """What `train` says; its heads are in the folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return run("train", chain_actor)


def test_each_command_of_the_page_is_run_by_a_test() -> None:
    lines = re.findall(r"^medusa-ppo .*$", PAGE, re.MULTILINE)
    assert list(commands().values()) == lines
    shown = "\n".join(lines)
    assert all(given in shown for given in REPLACED) and set(SMALLER) <= set(commands())


@pytest.mark.engine
def test_a_reader_gets_from_a_model_to_heads_and_their_worth(
    chain_actor: Path, folder: Path, trained: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    assert "times as fast" in run("predict", chain_actor).splitlines()[0]
    last = trained.strip().splitlines()[-1]
    assert "heads" in last and "tokens per engine step on held-out responses" in last
    assert (folder / "my-heads" / "model.safetensors").is_file()
    shown = run("eval", chain_actor)
    figures = json.loads((folder / "eval.json").read_text())
    assert f"{figures['mean_acceptance_length']:.3f}" in shown
    assert figures["mean_acceptance_length"] > 1.2


@pytest.mark.engine
@pytest.mark.slow
def test_a_reader_gets_from_heads_to_a_report(
    chain_actor: Path, folder: Path, trained: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    assert run("doctor", chain_actor).strip().endswith("All checks passed.")
    assert "ours, K chosen" in run("bench rollout", chain_actor)
    assert "Report: " in run("ppo", chain_actor)
    run("report", chain_actor)
    assert "<html" in (folder / "report.html").read_text()
