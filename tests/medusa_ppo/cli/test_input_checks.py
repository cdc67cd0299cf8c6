"""Wrong models, heads and data are refused by every command before torch, vLLM, Ray, transformers
or `datasets` are loaded: in a second, not in a minute.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from heads.errors import CheckpointError, ModelError
from medusa_ppo.cli.input_checks import check_heads, check_model
from medusa_ppo.config.model_section import MEGATRON_FILES

ROOT = Path(__file__).resolve().parents[3]
HEAVY = ["torch", "vllm", "ray", "transformers", "datasets"]
# Every command is called in one fresh process, in which nothing has loaded a heavy library before.
SCRIPT = """
import json, sys
from typer.testing import CliRunner
from medusa_ppo.cli.app import app
heavy, found = json.loads(sys.argv[1]), []
for words in json.loads(sys.argv[2]):
    result = CliRunner().invoke(app, words)
    loaded = [name for name in heavy if name in sys.modules]
    found.append([result.exit_code, result.output, loaded])
print(json.dumps(found))
"""
SIZES = {"hidden_size": 64, "vocab_size": 500}


def folder(place: Path, **files: Any) -> Path:
    """A folder with these files; `config` stands for config.json."""
    place.mkdir(parents=True)
    for name, content in files.items():
        (place / {"config": "config.json"}.get(name, name)).write_text(json.dumps(content))
    return place


def model(place: Path, **sizes: int) -> Path:
    found = folder(place, config={"model_type": "llama", **(sizes or SIZES)})
    (found / "model.safetensors").write_bytes(b"not read here")
    return found


def heads(place: Path, **sizes: int) -> Path:
    return folder(place, config={"medusa_ppo": {"heads": {**(sizes or SIZES), "num_heads": 2}}})


def in_a_fresh_process(commands: list[list[str]]) -> list[tuple[int, str, list[str]]]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(HEAVY), json.dumps(commands)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    return [tuple(row) for row in json.loads(done.stdout.splitlines()[-1])]


def commands(model: str, heads: str, data: str, out: Path) -> dict[str, list[str]]:
    """Every command that takes a model, and most take heads and data."""
    told = ["--model", model]
    source = ["--data", data, "--template", "{q}"]
    with_heads = ["--heads", heads]
    figures = ["--json", str(out / "figures.json")]
    run = [f"model.path={model}", f"heads.path={heads}", f"data.path={data}", f"out={out}"]
    preset = ["--config", "one-gpu"]
    return {
        "train": ["train", *told, *source, "--out", str(out / "heads")],
        "dry run": ["train", *told, *source, "--out", str(out / "heads"), "--dry-run"],
        "eval": ["eval", *told, *with_heads, *source],
        "bench rollout": ["bench", "rollout", *told, *with_heads, *source, *figures],
        "bench heads": ["bench", "heads", *told, *source, *figures],
        "bench swap": ["bench", "swap", *told, *with_heads, *figures],
        "bench companion": ["bench", "companion", *told, *source, *figures],
        "predict": ["predict", *told, *with_heads, *source],
        "serve": ["serve", *told, *with_heads],
        "companion serve": ["companion", "serve", *told, *with_heads, "--feed", str(out / "feed")],
        "doctor": ["doctor", "--distribution", *preset, *run],
        "ppo": ["ppo", *preset, *run],
    }


@pytest.fixture
def right(tmp_path: Path) -> dict[str, str]:
    """What no command could refuse by looking at files."""
    data = tmp_path / "rows.jsonl"
    data.write_text('{"q": "1"}\n')
    return {
        "model": str(model(tmp_path / "model")),
        "heads": str(heads(tmp_path / "heads")),
        "data": str(data),
    }


WRONG = {
    "no such model": ("model", "missing", 2, "no such model folder"),
    "no model": ("model", "empty", 2, "does not contain a transformers model"),
    "no weights": ("model", "weightless", 2, "holds no weights"),
    "no such heads": ("heads", "missing", 1, "no heads directory"),
    "no heads": ("heads", "foreign", 1, "not a native heads directory"),
    "another model's heads": ("heads", "others", 1, "made for another actor"),
    "no such data": ("data", "missing.jsonl", 2, "no such data file"),
}
MAKE_HEADS = ("serve", "companion serve")
ONLY_CONFIG = ("predict",)
"""Reads no weights of a model."""


def test_what_is_wrong_is_refused_before_anything_is_loaded(
    tmp_path: Path, right: dict[str, str]
) -> None:
    folder(tmp_path / "empty")
    folder(tmp_path / "weightless", config={"model_type": "llama", **SIZES})
    folder(tmp_path / "foreign", config={"model_type": "bert"})
    heads(tmp_path / "others", hidden_size=32, vocab_size=500)
    cases, asked = [], []
    for name, (what, place, code, words) in WRONG.items():
        given = {**right, what: str(tmp_path / place)}
        for command, line in commands(**given, out=tmp_path / "out").items():
            takes = any(given[what] in word for word in line)
            excused = (name == "no such heads" and command in MAKE_HEADS) or (
                name == "no weights" and command in ONLY_CONFIG
            )
            # `predict` finds no such model with words of its own.
            said = words if command not in ONLY_CONFIG or what != "model" else "model"
            if takes and not excused:
                cases.append((name, command, given[what], code, said))
                asked.append(line)
    assert len(cases) > 50
    for case, (exit_code, output, loaded) in zip(cases, in_a_fresh_process(asked), strict=True):
        name, command, path, code, said = case
        plain = output.replace("\n", " ")
        assert (exit_code, loaded) == (code, []), (name, command, output)
        assert said in plain and path in output and "do this" in output, (name, command, output)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["gpt2", "Qwen/Qwen3-0.6B", "models/actor", "a_b/c.d-e"])
def test_a_name_that_the_hub_may_have_is_not_judged(name: str) -> None:
    assert check_model("--model", name) == {}


@pytest.mark.parametrize(
    "name", ["/no/such", "./no", "../no", "a/b/c", "models/actor/", "~/model", ".hidden", "a b"]
)
def test_a_name_that_the_hub_can_t_have_is_refused(name: str) -> None:
    with pytest.raises(ModelError, match="no such model folder"):
        check_model("--model", name)


def test_a_file_is_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "actor").write_text("")
    with pytest.raises(ModelError, match="no such model folder"):
        check_model("--model", "actor")


@pytest.mark.parametrize("text", ["{", "[1]", "7"])
def test_a_damaged_configuration_is_named(tmp_path: Path, text: str) -> None:
    model(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config\.json"):
        check_model("--model", str(tmp_path / "model"))


@pytest.mark.parametrize("file", MEGATRON_FILES)
def test_a_checkpoint_of_megatron_is_left_to_who_reads_it(tmp_path: Path, file: str) -> None:
    assert check_model("--model", str(folder(tmp_path / "model", **{file: 100}))) == {}


def test_heads_are_compared_with_the_language_model_of_several_parts(tmp_path: Path) -> None:
    trained = heads(tmp_path / "heads")
    check_heads(trained, {"model_type": "qwen2_vl", "vocab_size": 9, "text_config": SIZES})
    check_heads(trained, {"n_embd": 64, "vocab_size": 500})
    # What the family's defaults say is not in the file.
    check_heads(trained, {"model_type": "llama"})
    with pytest.raises(CheckpointError, match="another actor"):
        check_heads(trained, {"text_config": {"hidden_size": 65}})


def test_heads_that_a_command_makes_need_room(tmp_path: Path) -> None:
    check_heads(tmp_path / "new", SIZES, may_be_new=True)
    check_heads(folder(tmp_path / "empty"), SIZES, may_be_new=True)
    foreign = folder(tmp_path / "foreign", notes="kept")
    with pytest.raises(CheckpointError, match="something else is"):
        check_heads(foreign, SIZES, may_be_new=True)
    with pytest.raises(CheckpointError, match="another actor"):
        check_heads(heads(tmp_path / "heads", hidden_size=1, vocab_size=2), SIZES, may_be_new=True)


def test_heads_of_the_hub_and_of_an_interrupted_writer_are_judged_later(tmp_path: Path) -> None:
    check_heads("hf://owner/name", SIZES, hub=True)
    with pytest.raises(CheckpointError):
        check_heads("hf://owner/name", SIZES)
    heads(tmp_path / ".heads.previous")
    check_heads(tmp_path / "heads", SIZES)
