"""Push, model card, pull: against a local folder that stands in for the hub (no test machine may
reach the real one).
"""

from __future__ import annotations

import fnmatch
import inspect
import json
import logging
import shutil
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from heads.checkpoint import load_heads, load_lm_head, save_heads
from heads.errors import CheckpointError, ConfigError, DataError, HubError
from heads.heads_config import HeadsConfig
from heads.modules import MedusaHeads
from medusa_ppo.cli.app import app
from medusa_ppo.offline import hub as hub_module
from medusa_ppo.offline.convert import convert
from medusa_ppo.offline.hub import Hub, local_heads, model_card, push_heads, scrubbed

D, V, K = 16, 40, 3
TOKEN = "hf_" + "Q7x" * 10


class FolderHub:
    """A test double for huggingface_hub.HfApi: repositories are folders. Its calls are checked
    against the real signatures.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.private: dict[str, bool] = {}

    def create_repo(self, *args: Any, **kwargs: Any) -> None:
        call = bound("create_repo", *args, **kwargs)
        assert call["exist_ok"] and call["repo_type"] == "model"
        (self.root / call["repo_id"]).mkdir(parents=True, exist_ok=True)
        self.private.setdefault(call["repo_id"], call["private"])

    def upload_folder(self, *args: Any, **kwargs: Any) -> Any:
        call = bound("upload_folder", *args, **kwargs)
        for path in Path(call["folder_path"]).iterdir():
            if any(fnmatch.fnmatch(path.name, pattern) for pattern in call["allow_patterns"]):
                shutil.copy(path, self.root / call["repo_id"])
        return SimpleNamespace(commit_url=f"https://hub/{call['repo_id']}/commit/1")

    def snapshot_download(self, *args: Any, **kwargs: Any) -> str:
        """As the real cache lays it out: snapshots/REVISION/NAME links to blobs/DIGEST."""
        call = bound("snapshot_download", *args, **kwargs)
        source = self.root / call["repo_id"]
        if not source.is_dir():
            raise OSError(f"404 for {call['repo_id']}, asked with Bearer {TOKEN}\nmore lines")
        cache = self.root / "cache" / call["repo_id"].replace("/", "--")
        snapshot = cache / "snapshots" / (call.get("revision") or "main")
        shutil.rmtree(cache, ignore_errors=True)
        snapshot.mkdir(parents=True)
        (cache / "blobs").mkdir()
        for number, path in enumerate(sorted(source.iterdir())):
            if any(fnmatch.fnmatch(path.name, pattern) for pattern in call["allow_patterns"]):
                shutil.copy(path, cache / "blobs" / str(number))
                (snapshot / path.name).symlink_to(f"../../blobs/{number}")
        return str(snapshot)


def bound(method: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """The arguments by name, if the real HfApi takes them."""
    from huggingface_hub import HfApi

    return dict(inspect.signature(getattr(HfApi, method)).bind(None, *args, **kwargs).arguments)


@pytest.fixture
def hub(tmp_path: Path) -> FolderHub:
    return FolderHub(tmp_path / "hub")


@pytest.fixture
def heads(tmp_path: Path) -> Path:
    """Heads as `train` leaves them, in a folder with a log and a file that is nobody's business."""
    torch.manual_seed(0)
    module = MedusaHeads(HeadsConfig(D, V, K, num_layers=1))
    with torch.no_grad():
        module.blocks[0].normal_()
    options = {
        "model": str(tmp_path / "actors" / "tiny"),
        "data": "/home/someone/data/rows.jsonl",
        "kind": "medusa",
        "loss": "ce",
        "seed": 3,
    }
    metadata = {
        "options": options,
        "replay_mean_acceptance_length": 1.4321,
        "trained_tokens": 90000,
    }
    save_heads(
        tmp_path / "heads", module, lm_head_VD=torch.ones(V, D), version=4, metadata=metadata
    )
    (tmp_path / "heads" / "train.jsonl").write_text("{}")
    (tmp_path / "heads" / ".env").write_text(TOKEN)
    return tmp_path / "heads"


def eval_file(path: Path, **changes: Any) -> Path:
    settings = {
        "engine": "vllm",
        "draft": "one-hot",
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "data": "/home/someone/rows.jsonl",
    }
    figures = {
        "mean_acceptance_length": 1.4012,
        "acceptance_per_position": [0.3, 0.08, 0.0212],
        "confidence_interval": [1.38, 1.42],
        "drafts": 5000,
        "accepted": 2006,
        "generated_tokens": 7006,
        "settings": settings,
    }
    path.write_text(json.dumps(figures | changes))
    return path


def test_the_double_is_a_hub_like_the_real_one(hub: FolderHub) -> None:
    from huggingface_hub import HfApi

    for method in (name for name in vars(Hub) if not name.startswith("_")):
        assert callable(getattr(HfApi, method)) and callable(getattr(hub, method))
    with pytest.raises(TypeError):
        hub.create_repo("a/b", no_such_argument=True)


def test_what_is_pushed_comes_back_bit_for_bit(heads: Path, hub: FolderHub) -> None:
    assert push_heads(heads, "me/heads", private=True, hub=hub) == "https://hub/me/heads/commit/1"
    assert sorted(path.name for path in (hub.root / "me" / "heads").iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
    ]
    assert hub.private == {"me/heads": True}
    before, first = load_heads(heads)
    after, second = load_heads(local_heads("hf://me/heads", hub))
    assert all(
        torch.equal(a, b) for a, b in zip(before.parameters(), after.parameters(), strict=True)
    )
    assert (first.checksum, first.version, first.lm_head_checksum) == (
        second.checksum,
        second.version,
        second.lm_head_checksum,
    )
    assert load_lm_head(local_heads("hf://me/heads@v1", hub)) is not None


def test_nothing_of_this_machine_is_pushed(heads: Path, hub: FolderHub, tmp_path: Path) -> None:
    push_heads(heads, "me/heads", figures=[eval_file(tmp_path / "e.json")], hub=hub)
    for path in (hub.root / "me" / "heads").iterdir():
        data = path.read_bytes()
        assert (
            b"/home/" not in data
            and str(tmp_path).encode() not in data
            and TOKEN.encode() not in data
        )
    options = load_heads(hub.root / "me" / "heads")[1].metadata["options"]
    assert (options["model"], options["data"]) == ("tiny", "rows.jsonl")


def test_the_card_says_what_was_measured_and_how(heads: Path, tmp_path: Path) -> None:
    card = model_card(heads, "me/heads", [eval_file(tmp_path / "e.json")])
    assert card.startswith("---\nlibrary_name: medusa-ppo\n")
    for text in (
        "1.432 by replay",
        "90,000",
        "**1.401** (95 % interval 1.380 to 1.420)",
        "0.300, 0.080, 0.021",
        "vLLM's own counters",
    ):
        assert text in card
    for text in (
        "| loss | ce |",
        "| seed | 3 |",
        "| temperature | 1.0 |",
        "| heads | 3 |",
        "hf://me/heads",
        '"method": "medusa"',
    ):
        assert text in card


def test_a_card_without_figures_says_so_and_names_no_invented_model(tmp_path: Path) -> None:
    save_heads(tmp_path / "h", MedusaHeads(HeadsConfig(D, V, K, "hydra")))
    card = model_card(tmp_path / "h", "me/heads")
    assert (
        "Nothing was measured" in card
        and "base_model" not in card
        and "need the vLLM plugin" in card
    )
    save_heads(
        tmp_path / "h", MedusaHeads(HeadsConfig(D, V, K)), metadata={"base_model": "org/model"}
    )
    card = model_card(tmp_path / "h", "me/heads")
    assert "base_model: org/model" in card and "--to vllm --model org/model" in card


def test_figures_that_are_none_are_named(heads: Path, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"drafts": 3}')
    with pytest.raises(DataError, match="mean_acceptance_length"):
        model_card(heads, "me/heads", [tmp_path / "x.json"])
    (tmp_path / "x.json").write_text("[")
    with pytest.raises(DataError, match="can't be read"):
        model_card(heads, "me/heads", [tmp_path / "x.json"])


def test_damaged_heads_are_not_pushed(heads: Path, hub: FolderHub) -> None:
    with (heads / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x01")
    with pytest.raises(CheckpointError):
        push_heads(heads, "me/heads", hub=hub)
    assert not hub.root.exists()


@pytest.mark.parametrize(
    "name", ["me", "me/", "../x", "me/..", "me/a/b", "-me/x", "me/x y", "http://x/y"]
)
def test_names_that_are_no_repository(name: str, heads: Path, hub: FolderHub) -> None:
    for attempt in (
        lambda: push_heads(heads, name, hub=hub),
        lambda: local_heads(f"hf://{name}", hub),
    ):
        with pytest.raises(ConfigError, match="owner/name"):
            attempt()
    with pytest.raises(ConfigError, match="revision"):
        local_heads("hf://me/heads@../../x", hub)


def test_without_the_prefix_a_name_is_a_folder(hub: FolderHub) -> None:
    """Nothing is looked for on the hub unless it is asked for."""
    assert local_heads("me/heads", hub) == Path("me/heads")
    assert not hub.root.exists()


def test_tokens_are_never_shown(
    hub: FolderHub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Not in the error, not in the traceback that --debug prints, not in a log."""
    monkeypatch.setenv("HF_TOKEN", "another-kind-of-secret")
    with caplog.at_level(logging.DEBUG), pytest.raises(HubError) as caught:
        local_heads("hf://me/nothing", hub)
    shown = "".join(traceback.format_exception(caught.value)) + str(caught.value) + caplog.text
    assert "404 for me/nothing" in shown and "Bearer ***" in shown and TOKEN not in shown
    assert scrubbed("x another-kind-of-secret y", ["another-kind-of-secret"]) == "x *** y"


def test_convert_takes_a_hub_name(
    heads: Path, hub: FolderHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole command, with the double in the place of the real hub; and the same for heads of
    another format.
    """
    push_heads(heads, "me/heads", hub=hub)
    convert(heads, hub.root / "me" / "foreign", "fasterdecoding")
    monkeypatch.setattr(hub_module, "_open", lambda given: given or hub)
    for name, to, words in (
        ("heads", "vllm", "native -> vllm"),
        ("foreign", "vllm", "fasterdecoding -> vllm"),
    ):
        result = CliRunner().invoke(
            app, ["convert", f"hf://me/{name}", str(tmp_path / name / "out"), "--to", to]
        )
        assert result.exit_code == 0 and f"{words}: 3 heads of 1 layers" in result.output, (
            result.output
        )
    result = CliRunner().invoke(
        app, ["convert", "hf://me/none", str(tmp_path / "x"), "--to", "vllm"]
    )
    assert result.exit_code == 1 and "hf auth login" in result.output and TOKEN not in result.output


def test_eval_takes_a_hub_name(hub: FolderHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads are pulled before anything heavy starts, so a wrong name costs nothing."""
    monkeypatch.setattr(hub_module, "_open", lambda given: given or hub)
    arguments = ["eval", "--model", "no-model", "--data", "no-data", "--template", "{q}", "--heads"]
    result = CliRunner().invoke(app, [*arguments, "hf://me/none"])
    assert result.exit_code == 1 and "pulling me/none" in result.output, result.output
    save_heads(hub.root / "me" / "heads", MedusaHeads(HeadsConfig(D, V, K)))
    result = CliRunner().invoke(app, [*arguments, "hf://me/heads"])
    assert result.exit_code == 2 and "no-data" in result.output, result.output


def test_push_by_the_command(
    heads: Path, hub: FolderHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_module, "_open", lambda given: given or hub)
    figures = eval_file(tmp_path / "e.json")
    shown = CliRunner().invoke(
        app, ["push", str(heads), "me/heads", "--dry-run", "--eval", str(figures)]
    )
    assert shown.exit_code == 0 and "**1.401**" in shown.output and not hub.root.exists()
    done = CliRunner().invoke(
        app, ["push", str(heads), "me/heads", "--private", "--eval", str(figures)]
    )
    assert done.exit_code == 0 and "https://hub/me/heads/commit/1" in done.output.replace("\n", "")
    assert (
        "**1.401**" in (hub.root / "me" / "heads" / "README.md").read_text()
        and hub.private["me/heads"]
    )
