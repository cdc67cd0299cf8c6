"""The bench commands on a real engine: they end, their files hold figures, and the figures are of
what was asked.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from heads.checkpoint import save_heads
from heads.heads_config import HeadsConfig
from heads.modules import MedusaHeads
from medusa_ppo.cli.app import app
from medusa_ppo.demo.task import demo_rows

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def heads(chain_actor: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from medusa_ppo.actors.hf import lm_head_weight, load_actor

    lm_head_VD = lm_head_weight(load_actor(chain_actor)).detach()
    folder = tmp_path_factory.mktemp("heads") / "medusa"
    heads = MedusaHeads(HeadsConfig(lm_head_VD.shape[1], lm_head_VD.shape[0], 3)).requires_grad_(
        False
    )
    heads.blocks[0].fill_(1e-4)  # Untrained ones do not draft.
    save_heads(folder, heads, lm_head_VD=lm_head_VD)
    return folder


@pytest.fixture(scope="module")
def source(chain_actor: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    path = tmp_path_factory.mktemp("data") / "questions.jsonl"
    path.write_text(
        "".join(
            json.dumps({"question": row["question"]}) + "\n" for row in demo_rows("train", 0, 32)
        )
    )
    return ["--model", str(chain_actor), "--data", str(path), "--template", "{question}"]


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["bench", *arguments])
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.slow
def test_swap(chain_actor: Path, heads: Path, tmp_path: Path) -> None:
    file = tmp_path / "swap.json"
    run(
        "swap",
        "--model",
        str(chain_actor),
        "--heads",
        str(heads),
        "--repeats",
        "4",
        "--json",
        str(file),
    )
    figures = json.loads(file.read_text())
    assert (
        figures["parameters"] == 3 * 64 * 64
        and figures["swaps_that_changed_the_drafts"] == 3 == figures["swaps_compared"]
    )
    assert figures["read_s"] > 0 and 0 < figures["median_s"] <= figures["max_s"]
    assert "12,288" in file.with_suffix(".md").read_text()


@pytest.mark.slow
def test_companion(source: list[str], tmp_path: Path) -> None:
    file = tmp_path / "companion.json"
    threads = torch.get_num_threads()
    run(
        "companion",
        *source,
        "--rounds",
        "2",
        "--prompts-per-step",
        "4",
        "--max-new-tokens",
        "16",
        "--json",
        str(file),
    )
    figures = json.loads(file.read_text())
    assert figures["companion_s_per_step"] > 0 and 0 < figures["exposed_share"] < 1
    assert figures["cost_low"] <= figures["cost"] <= figures["cost_high"]
    assert torch.get_num_threads() == threads


@pytest.mark.slow
def test_rollout(source: list[str], heads: Path, tmp_path: Path) -> None:
    file = tmp_path / "rollout.json"
    arguments = (
        "--heads",
        str(heads),
        "--stock-heads",
        str(heads),
        "--batches",
        "1,4",
        "--rounds",
        "1",
        "--eager",
        "--fixed",
        "0,3",
        "--json",
        str(file),
    )
    run("rollout", *source, *arguments, "--max-new-tokens", "16")
    figures = json.loads(file.read_text())
    assert figures["arms"] == [
        "none",
        "stock medusa",
        "ngram",
        "ours, K = 0",
        "ours, K = 3",
        "ours, K chosen",
    ]
    rows = {(row["batch"], row["arm"]): row for row in figures["rows"]}
    assert len(rows) == 12 and rows[1, "none"]["ratio"] == 1.0
    assert rows[4, "none"]["drafts_per_step"] == rows[4, "ours, K = 0"]["drafts_per_step"] == 0
    assert (
        rows[1, "stock medusa"]["drafts_per_step"] == 3 == rows[1, "ours, K = 3"]["drafts_per_step"]
    )
    assert file.with_suffix(".svg").is_file()


@pytest.mark.slow
def test_heads(source: list[str], tmp_path: Path) -> None:
    file = tmp_path / "heads.json"
    arguments = (
        "--train-tokens",
        "3000",
        "--epochs",
        "12",
        "--num-heads",
        "2",
        "--kinds",
        "medusa,hydra",
        "--losses",
        "ce,kl_tv",
    )
    run("heads", *source, *arguments, "--max-new-tokens", "16", "--json", str(file))
    figures = json.loads(file.read_text())
    rows = figures["rows"]
    assert (
        figures["throughput"]["ratio"] > 0
        and "original recipe" in file.with_suffix(".md").read_text()
    )
    assert [(row["kind"], row["loss"]) for row in rows] == [
        (k, loss) for k in ("medusa", "hydra") for loss in ("ce", "kl_tv")
    ]
    assert all(row["one_hot"] >= 1 and row["sampled"] > 1 for row in rows)
    assert all(min(row["one_hot"], row["sampled"]) > 2 for row in rows if row["kind"] == "hydra"), (
        "heads that see the tokens before learn soon"
    )
