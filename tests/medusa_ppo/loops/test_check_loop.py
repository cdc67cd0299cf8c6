"""`check-loop` finds what is wrong with an adapter, by name; a right one passes all ten on real
parts.
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from heads.errors import ConfigError
from medusa_ppo.loops.check_loop import check_loop, judge
from tests.medusa_ppo.cli.test_cli import run

ROOT = Path(__file__).resolve().parents[3]
NAMES = [
    "one plugin",
    "order of hooks",
    "log-probs",
    "rows",
    "states",
    "versions",
    "tables",
    "newest heads",
    "drafts",
]
SEEN = {
    "calls": ["start", *["before_generation", "rollout_ready", "policy_updated"] * 4, "close"],
    "batches": [
        {
            "responses": 8,
            "known": 8,
            "tokens": 80,
            "policy": step,
            "heads": step,
            "drafts": 40,
            "length": 1.1 + 0.2 * step,
        }
        for step in range(4)
    ],
    "versions": [1, 2, 3, 4],
    "fits": [{"responses": 8, "good": 1.0}] * 4,
    "wrong_tables": 0,
    "swapped": [3, "abc", "abc"],
}


def broken(change: Callable[[dict[str, Any]], Any]) -> list[str]:
    seen = copy.deepcopy(SEEN)
    change(seen)
    return [finding.name for finding in judge(seen) if not finding.ok]


def test_a_right_loop_has_nothing_to_correct():
    assert [finding.name for finding in judge(SEEN)] == NAMES and not broken(lambda seen: None)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("one plugin", lambda seen: seen["calls"].insert(0, "start")),
        ("one plugin", lambda seen: seen["calls"].pop()),
        ("order of hooks", lambda seen: seen["calls"].remove("before_generation")),
        ("order of hooks", lambda seen: seen["calls"].insert(2, "policy_updated")),
        ("log-probs", lambda seen: seen["batches"][1].update(known=7)),
        ("rows", lambda seen: seen["fits"].pop()),
        ("states", lambda seen: seen["fits"].__setitem__(2, {"responses": 8, "good": 0.2})),
        ("versions", lambda seen: [batch.update(policy=0) for batch in seen["batches"]]),
        ("versions", lambda seen: seen.update(versions=[1, 1, 2, 3])),
        ("tables", lambda seen: seen.update(wrong_tables=1)),
        ("newest heads", lambda seen: [batch.update(heads=0) for batch in seen["batches"]]),
        ("newest heads", lambda seen: seen.update(swapped=[3, "abc", "old"])),
        ("drafts", lambda seen: [batch.update(drafts=0, length=1.0) for batch in seen["batches"]]),
    ],
)
def test_each_fault_is_found_by_its_name(name: str, change: Callable[[dict[str, Any]], Any]):
    assert broken(change) == [name]


def test_what_can_not_be_run_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ConfigError, match="not the name of a function"):
        list(check_loop("my_module"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_loop.py").write_text(
        "def make_trainer(medusa):\n    raise OSError('no disk')\n"
    )
    with pytest.raises(ConfigError, match="no disk"):
        list(check_loop("my_loop:make_trainer"))


def test_the_commands_file_of_settings_reaches_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_loop.py").write_text(
        "def make_trainer(medusa):\n    raise OSError(medusa['heads']['num_heads'])\n"
    )
    (tmp_path / "heads.yaml").write_text("heads: {num_heads: 7}\n")
    words = ["check-loop", "my_loop:make_trainer", "--medusa", "heads.yaml"]
    assert "OSError: 7" in run(*words, code=ConfigError.exit_code)


LOOP = '''
"""A loop of somebody's own around DraftingEngine; greedy, so each call does the same."""
import os, tempfile
from types import SimpleNamespace
import torch
from medusa_ppo.actors.hf import load_actor, load_tokenizer
from medusa_ppo.config.run_config import build_config
from medusa_ppo.engines.actor_sync import ActorSync
from medusa_ppo.loops.attachment import DraftingEngine
from medusa_ppo.contract.rollouts import Sampling

FORGETS = os.environ.get("FORGETS", "")

def make_trainer(medusa):
    off = {"companion": {"enabled": False}, "engine": {"num_drafts": 0}}
    settings = dict(medusa or off)
    small = {"max_num_seqs": 8, "max_model_len": 96, "threads": 1}
    settings["engine"] = {**settings["engine"], **small}
    path = os.environ["ACTOR"]
    actor, tokenizer = load_actor(path), load_tokenizer(path)
    prompts = tokenizer([f"Question: {n} + {n} = ?\\nAnswer:" for n in range(2, 10)]).input_ids

    def train():
        torch.manual_seed(0)
        optimizer = torch.optim.AdamW(actor.parameters(), lr=1e-4)
        config = build_config(settings)
        with tempfile.TemporaryDirectory() as folder:
            with DraftingEngine(config, actor, path, folder) as engine, ActorSync(engine) as sync:
                for step in range(4):
                    rollouts = engine.generate(prompts, Sampling(top_k=1, max_new_tokens=24))
                    rows = [
                        [*rollouts.prompts[response.prompt_index], *response.token_ids]
                        for response in rollouts.responses
                    ]
                    if FORGETS == "rows":
                        rows = [row[:-1] for row in rows]
                    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
                    for at, row in enumerate(rows):
                        ids[at, : len(row)] = torch.tensor(row)
                    lengths = torch.tensor([len(row) for row in rows])
                    mask = torch.arange(ids.shape[1])[None] < lengths[:, None]
                    logits = actor(input_ids=ids, attention_mask=mask.long()).logits
                    (logits.float().log_softmax(-1)[..., 5] * mask).mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    sync(actor, step + 1)

    return SimpleNamespace(train=train, model=actor)
'''


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize(
    ("fault", "failing"), [("", set()), ("rows", {"rows", "states", "newest heads", "drafts"})]
)
def test_a_loop_of_somebodys_own(fault: str, failing: set[str], chain_actor: Path, tmp_path: Path):
    (tmp_path / "my_loop.py").write_text(LOOP)
    environment = os.environ | {
        "ACTOR": str(chain_actor),
        "FORGETS": fault,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    command = [
        sys.executable,
        "-c",
        "from medusa_ppo.cli import main; main()",
        "check-loop",
        "my_loop:make_trainer",
    ]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(("ok", "FAIL"))]
    assert len(lines) == 10, done.stdout + done.stderr[-3000:]
    assert {line[5:27].strip() for line in lines if line.startswith("FAIL")} == failing
    assert done.returncode == (1 if failing else 0)
