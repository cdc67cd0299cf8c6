"""`medusa-ppo predict` as it is typed, and the lines that it prints to be checked with."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from heads.heads_config import HeadsConfig
from medusa_ppo.cli.app import app
from medusa_ppo.config.heads_section import HeadsSection
from medusa_ppo.offline.options import EvalOptions
from medusa_ppo.predict import cpu_steps
from medusa_ppo.predict.check_lines import check_lines
from medusa_ppo.predict.gpus import find_gpu
from medusa_ppo.predict.prediction import Question, predict_on_gpu
from medusa_ppo.predict.rollout_model import ResponseLengths
from medusa_ppo.runtime import hardware
from medusa_ppo.runtime.console import OfflineProgress
from medusa_ppo.runtime.hardware import ModelSizes

LLAMA = {
    "model_type": "llama",
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 8192,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "actor"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return folder


def run(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["predict", *words])
    return result.exit_code, result.output


def test_it_answers_from_a_configuration_alone(model: Path, tmp_path: Path) -> None:
    out, picture = tmp_path / "answer.json", tmp_path / "answer.svg"
    code, said = run(
        *("--model", str(model), "--gpu", "h200", "--acceptance", "0.7,0.5,0.3"),
        *("--length-mean", "800", "--sequences", "32", "--responses", "64"),
        *("--json", str(out), "--picture", str(picture)),
    )
    assert code == 0, said
    answer = json.loads(out.read_text())
    assert said.startswith(answer["sentence"])
    assert "one H200 (vLLM's V2 runner), 64 responses of 800 tokens" in answer["sentence"]
    assert any("synthetic" in line for line in answer["check"])
    # An engine with heads that drafts nothing is no plain one, and the table says what it costs.
    assert re.search(r"pays from +K = 0 +K = 1 +K = 2 +K = 3\n", said)
    assert all(0 < row["without_drafts"] <= 1 for row in answer["rows"])
    assert f"{answer['rows'][-1]['without_drafts']:.2f}" in said
    svg = picture.read_text()
    assert svg.startswith("<svg")
    assert svg.count("<polyline") == 3


def test_no_torch_is_loaded(model: Path) -> None:
    code = (
        "import sys; from medusa_ppo.cli.app import app\n"
        f"app(['predict', '--model', {str(model)!r}, '--acceptance', '0.5'],"
        " standalone_mode=False)\n"
        "sys.exit(bool({'torch', 'vllm', 'ray', 'transformers'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_run_says_what_options_don_t(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        f"model: {{path: {model}}}\n"
        "sampling: {max_new_tokens: 600, responses_per_prompt: 4}\n"
        "ppo: {prompts_per_step: 32, minibatch_size: 32}\n"
        "engine: {replicas: 2, extra: {tensor_parallel_size: 2}}\n"
        "data: {path: demo}\n"
    )
    out = tmp_path / "answer.json"
    code, said = run("--config", str(file), "--acceptance", "0.7,0.5,0.3,0.2", "--json", str(out))
    assert code == 0, said
    asked = json.loads(out.read_text())["asked"]
    assert asked["lengths"]["count"] == 64, "of 128 responses half are each engine's"
    assert asked["lengths"]["mean"] == pytest.approx(300, rel=0.01)
    assert asked["ranks"] == asked["engines"] == 2
    assert asked["loop"]["updates"] == 2, "an actor and a critic learn"
    assert asked["alike"] == 4


@pytest.mark.parametrize(
    "engine",
    [
        "{stop_below: 0.1, num_drafts: 4, draft_temperature: 1.0}",
        "{memory_bytes: 1073741824, draft_temperature: 1.0}",
        "{extra: {async_scheduling: false}}",
    ],
)
def test_what_v2_does_otherwise_than_predicted_is_refused_by_name(
    model: Path, tmp_path: Path, engine: str
) -> None:
    """Before a replay, which takes minutes. On V1 these settings cost what others do."""
    file = tmp_path / "run.yaml"
    file.write_text(f"model: {{path: {model}}}\ndata: {{path: demo}}\nengine: {engine}\n")
    asked = ("--config", str(file), "--acceptance", "0.7,0.5,0.3,0.2")
    code, said = run(*asked)
    name = engine[1:].split(":")[0]
    assert code and f"engine.{name}" in said and "bench rollout" in said
    code, said = run(*asked, "--runner", "v1")
    assert code == 0 and "V1 runner" in said
    found = CliRunner().invoke(app, ["plan", "--config", str(file), "--gpu", "h100"])
    assert found.exit_code == 0, found.output
    assert f"With engine.{name}" in found.output and "not predicted" in found.output


def test_the_acceptance_is_measured_as_the_run_drafts_and_samples(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The costs of its steps are those of its draft vocabulary, too."""
    asked: list[EvalOptions] = []

    def measured(options: EvalOptions, progress: OfflineProgress) -> dict[str, object]:
        asked.append(options)
        return {
            "confidence_interval": [1.5, 1.7],
            "prompts": 3,
            "acceptance_per_position": [0.4, 0.2],
        }

    monkeypatch.setattr("medusa_ppo.offline.evaluate.evaluate_heads", measured)
    monkeypatch.setattr("medusa_ppo.offline.hub.local_heads", lambda folder: folder)
    monkeypatch.setattr(
        "medusa_ppo.predict.trained_heads.read_trained", lambda folder: HeadsConfig(2048, 128256, 2)
    )
    file = tmp_path / "run.yaml"
    file.write_text(
        f"model: {{path: {model}}}\n"
        "sampling: {temperature: 0.7, top_p: 0.9, top_k: 50}\n"
        "engine: {draft_vocab: 4096, draft_temperature: 0.5}\n"
        "data: {path: demo}\n"
    )
    (tmp_path / "heads").mkdir()
    sizes = {"medusa_ppo": {"heads": HeadsConfig(2048, 128256, 2).to_dict()}}
    (tmp_path / "heads" / "config.json").write_text(json.dumps(sizes))
    words = "--heads", str(tmp_path / "heads"), "--data", "rows.jsonl"
    code, said = run("--config", str(file), *words)
    assert code == 0, said
    code, said = run("--model", str(model), *words)
    assert code == 0, said
    names = "draft_vocab", "draft_temperature", "temperature", "top_p", "top_k"
    assert [tuple(getattr(one, name) for name in names) for one in asked] == [
        (4096, 0.5, 0.7, 0.9, 50),
        (-1, 1.0, 1.0, 1.0, 0),
    ]


def test_heads_of_the_hub_are_read_and_checked_from_their_copy(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replay and `bench rollout` only read folders."""
    copy = tmp_path / "pulled"
    copy.mkdir()
    sizes = {"medusa_ppo": {"heads": HeadsConfig(2048, 128256, 2).to_dict()}}
    (copy / "config.json").write_text(json.dumps(sizes))
    pulled: list[str] = []
    read: list[str] = []

    def pull(name: str) -> Path:
        pulled.append(name)
        return copy

    def measured(options: EvalOptions, progress: OfflineProgress) -> dict[str, object]:
        read.append(options.heads)
        return {
            "confidence_interval": [1.5, 1.7],
            "prompts": 3,
            "acceptance_per_position": [0.4, 0.2],
        }

    monkeypatch.setattr("medusa_ppo.offline.evaluate.evaluate_heads", measured)
    monkeypatch.setattr("medusa_ppo.offline.hub.local_heads", pull)
    words = "--heads", "hf://owner/name", "--data", "rows.jsonl"
    out = tmp_path / "answer.json"
    code, said = run("--model", str(model), "--gpu", "h100", *words, "--json", str(out))
    assert code == 0, said
    assert pulled == ["hf://owner/name"] and read == [str(copy)]
    check = json.loads(out.read_text())["check"][-1]
    assert f"--heads {shlex.quote(str(copy))} " in check


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--acceptance", "0.5,0.6"), "must not rise"),
        (("--acceptance", "1.2"), "between 0 and 1"),
        ((), "The acceptance is unknown"),
        (("--acceptance", "0.5", "--gpu", "b200"), "This GPU is unknown"),
        (("--acceptance", "0.5", "--length-mean", "9000"), "longer than the model can hold"),
        (
            ("--acceptance", "0.5", "--longest", "9000", "--length-spread", "1.5"),
            "longer than the model can hold",
        ),
        (("--acceptance", "0.5", "--heads", "/no/heads"), "no heads directory"),
    ],
)
def test_bad_input_is_refused_in_words(model: Path, words: tuple[str, ...], said: str) -> None:
    code, output = run("--model", str(model), *words)
    assert code != 0
    assert said in output
    assert "given:" in output and "expected:" in output and "do this:" in output


def test_a_cpu_that_cannot_multiply_in_bfloat16_is_told_of_the_other_dtype(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise RuntimeError("could not create a primitive descriptor for the matmul primitive")

    monkeypatch.setattr(cpu_steps, "CpuSteps", refused)
    monkeypatch.setattr(hardware, "cpu_has_bfloat16", lambda: False)
    words = ("--model", str(model), "--gpu", "cpu", "--acceptance", "0.5")
    code, output = run(*words)
    assert code == 2 and "--dtype float32" in output and "RuntimeError" not in output
    # Any other fault of oneDNN's is shown as it is.
    code, output = run(*words, "--dtype", "float32")
    assert code == 1 and "primitive descriptor" in output


def fields_of(module: str, name: str) -> set[str]:
    """Annotated names of a class, from its source: vLLM takes many seconds to import."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.submodule_search_locations
    file = Path(spec.submodule_search_locations[0]) / module
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ClassDef) and node.name == name:
            return {
                item.target.id
                for item in node.body
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
            }
    raise AssertionError(f"no class {name} in {file}")


def test_the_lines_are_ones_that_vllm_takes() -> None:
    model = ModelSizes(2048, 16, 32, 8, 64, 8192, 128256)
    question = Question(
        "org/name",
        model,
        HeadsSection().sizes(2048, 128256),
        (0.6, 0.4, 0.25, 0.15),
        ResponseLengths.log_normal(64, 500, 0.5),
        sequences=16,
    )
    prediction = predict_on_gpu(question, find_gpu("h100"), tables=False)
    on_cpu = check_lines(prediction, "HEADS", None, "float32", 3)
    assert not [line for line in on_cpu if "synthetic" in line]
    assert on_cpu[1].startswith("medusa-ppo bench rollout")
    assert on_cpu[1].endswith("--dtype float32 --threads 3")
    lines = check_lines(prediction, "HEADS", find_gpu("h100"))
    speculative = next(line for line in lines if "--speculative-config" in line)
    words = shlex.split(speculative)
    given = json.loads(words[words.index("--speculative-config") + 1])
    known = fields_of("config/speculative.py", "SpeculativeConfig")
    assert set(given) <= known
    rates = given["synthetic_acceptance_rates"]
    assert len(rates) == given["num_speculative_tokens"]
    assert rates == sorted(rates, reverse=True)
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.submodule_search_locations
    root = Path(spec.submodule_search_locations[0])
    bench = (root / "benchmarks/serve.py").read_text() + (
        root / "benchmarks/datasets/datasets.py"
    ).read_text()
    line = next(line for line in lines if line.startswith("vllm bench serve"))
    for word in shlex.split(line):
        assert not word.startswith("--") or f'"{word}"' in bench, word


LLAMA_8B = ModelSizes(4096, 32, 32, 8, 128, 14336, 128256)
GEMMA_27B = ModelSizes(5376, 62, 32, 16, 128, 21504, 262144)


@pytest.mark.parametrize(
    ("model", "ranks", "largest", "says"),
    [
        # Three engines have 24 GB each of an H100: room for the 8B, but not for 256 sequences.
        (LLAMA_8B, 1, 16, "--dtype bfloat16"),
        (LLAMA_8B, 4, 0, "starts engines of one GPU, not of 4"),
        (GEMMA_27B, 1, 0, "does not hold this model"),
    ],
)
def test_trained_heads_are_timed_only_where_several_engines_fit(
    model: ModelSizes, ranks: int, largest: int, says: str
) -> None:
    question = Question(
        "org/name",
        model,
        HeadsSection().sizes(model.hidden, model.vocab),
        (0.6, 0.4),
        ResponseLengths.log_normal(64, 1000, 0.5),
        sequences=256,
        ranks=ranks,
    )
    prediction = predict_on_gpu(question, find_gpu("h100"), tables=False)
    lines = check_lines(prediction, "HEADS", find_gpu("h100"))
    assert says in lines[-1]
    words = shlex.split(lines[-1], comments=True)
    batches = words[words.index("--batches") + 1].split(",") if "--batches" in words else ["0"]
    assert max(map(int, batches)) <= largest
