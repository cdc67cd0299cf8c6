"""docs/quickstart.md on a tiny model: its `medusa-ppo` commands, one after the other in one folder,
as a reader would type them. Only sizes are smaller here.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from medusa_ppo.demo.task import demo_rows

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
LIMIT_S = 600
# What is smaller: command -> words behind those of the page.
SMALLER = {
    "train": "--max-new-tokens 16 --epochs 2",
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
}


def commands() -> list[str]:
    blocks = re.findall(r"^```\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    return [
        line for block in blocks for line in block.splitlines() if line.startswith("medusa-ppo ")
    ]


def words(command: str, actor: Path) -> list[str]:
    """The words behind `medusa-ppo`, for the tiny actor and in its sizes."""
    for given, used in REPLACED.items():
        command = command.replace(given, used)
    command = command.replace("configs/", f"{ROOT}/configs/")
    command = re.sub(r"\bDIR\b", str(actor), command)
    name = next((name for name in SMALLER if command.startswith(f"medusa-ppo {name} ")), "")
    return shlex.split(f"{command} {SMALLER.get(name, '')}")[1:]


def test_the_page_has_each_thing_that_is_made_smaller() -> None:
    shown = "\n".join(commands())
    assert all(f"medusa-ppo {name} " in shown for name in SMALLER)
    assert all(given in shown for given in REPLACED)


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_reader_gets_from_a_model_to_a_report(chain_actor: Path, tmp_path: Path) -> None:
    rows = [{"question": row["question"], "answer": "#### 7"} for row in demo_rows("train", 0, 64)]
    for name in ("train.jsonl", "test.jsonl"):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    env = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "100"}
    for command in commands():
        done = subprocess.run(
            [sys.executable, "-m", "medusa_ppo", *words(command, chain_actor)],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    assert (tmp_path / "heads" / "model.safetensors").is_file()
    assert json.loads((tmp_path / "eval.json").read_text())
    assert "<html" in (tmp_path / "report.html").read_text()
