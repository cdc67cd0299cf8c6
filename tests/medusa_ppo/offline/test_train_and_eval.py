"""`train` and `eval` on a real engine: heads that learn, and two measurements of them that
agree.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from heads.checkpoint import load_heads
from medusa_ppo.cli.app import app
from medusa_ppo.offline.collect import Sample
from medusa_ppo.offline.train import ResumeFolder

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.slow
def test_trained_heads_are_worth_what_replay_and_the_engine_say(
    chain_actor: Path, questions: Path, tmp_path: Path
) -> None:
    # The actor goes on from the last word, and all questions end with the same one.
    rows = [json.loads(line)["question"].split() for line in questions.read_text().splitlines()]
    data = tmp_path / "beginnings.jsonl"
    data.write_text(
        "".join(
            json.dumps({"question": " ".join(words[: len(words) - number % 8])}) + "\n"
            for number, words in enumerate(rows)
        )
    )
    source = (
        "--model",
        chain_actor,
        "--data",
        data,
        "--template",
        "{question}",
        "--max-new-tokens",
        24,
    )
    out = tmp_path / "heads"
    shown = run(
        "train",
        *source,
        "--out",
        out,
        "--num-heads",
        3,
        "--max-train-tokens",
        4000,
        "--epochs",
        6,
        "--learning-rate",
        1e-2,
    )
    lines = [json.loads(line) for line in (out / "train.jsonl").read_text().splitlines()]
    assert lines[-1]["loss"] < lines[0]["loss"] and len(lines) == 24
    best = max(line["replay_mean_acceptance_length"] for line in lines)
    assert best > 1.3 and f"{best:.3f}" in shown
    heads, _ = load_heads(out)
    assert heads.config.kind == "hydra" and heads.config.num_heads == 3

    other = tmp_path / "other"
    run(
        "train",
        *source,
        "--out",
        other,
        "--num-heads",
        2,
        "--max-train-tokens",
        500,
        "--epochs",
        1,
        "--kind",
        "medusa",
    )
    figures = {}
    several = (
        "--temperatures",
        "0.5,1",
        "--category",
        "question",
        "--compare",
        other,
        "--draft",
        "sampled",
    )
    for engine in ("replay", "vllm"):
        file = tmp_path / engine
        outputs = (
            "--json",
            file.with_suffix(".json"),
            "--markdown",
            file.with_suffix(".md"),
            "--html",
            file.with_suffix(".html"),
        )
        run("eval", *source, "--heads", out, "--engine", engine, *several, *outputs)
        found = json.loads(file.with_suffix(".json").read_text())
        assert [row["temperature"] for row in found["temperatures"]] == [0.5, 1.0] and len(
            found["categories"]
        ) == 48
        for row in found["temperatures"]:
            length = row["mean_acceptance_length"]
            least, most = row["confidence_interval"]
            # At 0.5 this actor is so sure that every draft may be accepted; then, and only then,
            # the interval is a point.
            assert least < length < most or (
                row["temperature"] == 0.5 and least == length == most == 1 + heads.config.num_heads
            )
        figures[engine] = found["temperatures"][1]
        low, high = found["compare"]["difference_interval"]
        assert 0 < low < found["compare"]["difference"] < high, "six epochs beat one"
        assert sum(row["drafts"] for row in found["categories"]) == pytest.approx(
            found["drafts"], abs=6
        )
        assert (
            "## By question" in file.with_suffix(".md").read_text()
            and "<svg" in file.with_suffix(".html").read_text()
        )
    by_replay, by_engine = (figures[name]["mean_acceptance_length"] for name in ("replay", "vllm"))
    # About 1,100 tokens each, sampled anew: seeds 0 to 3 gave 3.0 to 3.8 with the same heads. How
    # far apart the two may be is what their own intervals say;
    # tests/medusa_ppo/engines/test_replay_against_counters.py compares them closely.
    deviations = [
        (high - low) / (2 * 1.96)
        for low, high in (figures[name]["confidence_interval"] for name in ("replay", "vllm"))
    ]
    assert abs(by_replay - by_engine) < 3 * math.hypot(*deviations) < 1.2
    assert figures["vllm"]["drafts"] > 200


@pytest.mark.slow
def test_responses_that_were_written_are_not_written_again(
    chain_actor: Path, questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = (
        "--model",
        chain_actor,
        "--data",
        questions,
        "--template",
        "{question}",
        "--max-new-tokens",
        16,
        "--num-heads",
        2,
    )
    arguments = (
        "train",
        *source,
        "--max-train-tokens",
        4500,
        "--epochs",
        1,
        "--out",
        tmp_path / "heads",
    )
    real = ResumeFolder.save_round

    def interrupted(self: ResumeFolder, number: int, samples: Sequence[Sample]) -> None:
        real(self, number, samples)
        if number == 1:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ResumeFolder, "save_round", interrupted)
        assert CliRunner().invoke(app, [str(argument) for argument in arguments]).exit_code == 130
    folder = tmp_path / "heads" / "resume"
    written = [path.read_bytes() for path in sorted(folder.glob("round-*"))]
    assert len(written) == 2
    shown = run(*arguments)
    assert "Continuing" in shown and "tokens of responses already exist" in shown
    assert (
        len((tmp_path / "heads" / "train.jsonl").read_text().splitlines()) == 4
        and not folder.exists()
    )


def test_full_texts_need_no_engine(chain_actor: Path, questions: Path, tmp_path: Path) -> None:
    out = tmp_path / "heads"
    arguments = (
        "--model",
        chain_actor,
        "--data",
        questions,
        "--column",
        "question",
        "--out",
        out,
        "--kind",
        "medusa",
        "--loss",
        "ce",
    )
    assert (
        "3 x medusa" in run("train", *arguments, "--num-heads", 3, "--dry-run") and not out.exists()
    )
    run("train", *arguments, "--num-heads", 3, "--epochs", 1, "--seed", 4)
    first = (out / "train.jsonl").read_text()
    assert load_heads(out)[0].config.kind == "medusa"
    run("train", *arguments, "--num-heads", 3, "--epochs", 1, "--seed", 4)
    again = [json.loads(line)["loss"] for line in (out / "train.jsonl").read_text().splitlines()]
    assert again == [json.loads(line)["loss"] for line in first.splitlines()], (
        "the same seed repeats itself"
    )
