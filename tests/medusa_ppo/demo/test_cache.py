"""The cached actor: trained once, loadable by anyone, rebuilt when damaged, safe with two at a
time.
"""

from __future__ import annotations

import json
import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from medusa_ppo.demo import actor_cache
from medusa_ppo.demo.actor_cache import (
    RECORD,
    actor_note,
    default_cache_dir,
    ensure_demo_actor,
    is_whole,
)
from medusa_ppo.demo.dtype_choice import ROWS, Bfloat16
from medusa_ppo.demo.pretraining import PretrainStatus, Recipe
from medusa_ppo.demo.task import demo_rows

MICRO = Recipe(
    steps=3,
    batch_size=2,
    hidden_size=32,
    intermediate_size=64,
    num_layers=1,
    num_heads=2,
    warmup_steps=1,
)


@pytest.fixture(autouse=True)
def dtype_that_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Timing both takes as long as all else here; test_dtype_choice.py does it."""
    ratios = dict.fromkeys(ROWS, 1.0)
    monkeypatch.setattr(actor_cache, "time_bfloat16", lambda: Bfloat16(ratios, False))


def _must_not_train(status: PretrainStatus) -> None:
    raise AssertionError("trained again")


def test_trains_once_and_the_folder_is_a_normal_one(tmp_path: Path) -> None:
    seen: list[PretrainStatus] = []
    folder = ensure_demo_actor(seen.append, tmp_path, recipe=MICRO)
    assert len(seen) == MICRO.steps
    assert ensure_demo_actor(_must_not_train, tmp_path, recipe=MICRO) == folder
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.config.vocab_size == len(tokenizer)
    assert model.dtype == torch.float32
    prompt = demo_rows("eval", limit=1)[0]["prompt"]
    ids_BT = tokenizer(prompt, return_tensors="pt")["input_ids"]
    written_BT = model.generate(input_ids=ids_BT, max_new_tokens=5, do_sample=False)
    assert written_BT.shape[1] > ids_BT.shape[1]
    assert json.loads((folder / RECORD).read_text())["recipe"]["steps"] == MICRO.steps


def test_nothing_but_the_actor_and_the_lock_stays(tmp_path: Path) -> None:
    folder = ensure_demo_actor(None, tmp_path, recipe=MICRO)
    assert sorted(path.name for path in tmp_path.iterdir()) == [folder.name, folder.name + ".lock"]


def test_another_recipe_has_another_folder(tmp_path: Path) -> None:
    other = Recipe(**{**vars(MICRO), "seed": 1})
    assert ensure_demo_actor(None, tmp_path, recipe=MICRO) != ensure_demo_actor(
        None, tmp_path, recipe=other
    )


@pytest.mark.parametrize(
    "damage",
    ["cut weights", "flipped byte", "missing tokenizer", "broken record", "record of nothing"],
)
def test_a_damaged_folder_is_rebuilt(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = ensure_demo_actor(None, tmp_path, recipe=MICRO)
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    if damage == "cut weights":
        weights.write_bytes(whole[: len(whole) // 2])
    elif damage == "flipped byte":
        weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    elif damage == "missing tokenizer":
        (folder / "tokenizer.json").unlink()
    elif damage == "broken record":
        (folder / RECORD).write_text("{")
    else:
        (folder / RECORD).write_text("[]")
    assert not is_whole(folder)
    with caplog.at_level(logging.WARNING):
        assert ensure_demo_actor(None, tmp_path, recipe=MICRO) == folder
    assert "damaged" in caplog.text
    assert is_whole(folder)
    assert weights.read_bytes() == whole


def test_two_at_a_time_train_once(tmp_path: Path) -> None:
    seen: list[PretrainStatus] = []
    with ThreadPoolExecutor(2) as pool:
        folders = list(
            pool.map(lambda _: ensure_demo_actor(seen.append, tmp_path, recipe=MICRO), range(2))
        )
    assert folders[0] == folders[1]
    assert len(seen) == MICRO.steps


def test_a_stop_half_way_leaves_no_folder(tmp_path: Path) -> None:
    def stop(status: PretrainStatus) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ensure_demo_actor(stop, tmp_path, recipe=MICRO)
    assert not any(path.is_dir() for path in tmp_path.iterdir())
    assert is_whole(ensure_demo_actor(None, tmp_path, recipe=MICRO))


def test_the_cache_follows_the_users_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_cache_dir() == tmp_path / "xdg" / "medusa-ppo" / "actors"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert default_cache_dir() == tmp_path / "home" / ".cache" / "medusa-ppo" / "actors"


def test_a_grown_actor_writes_what_the_small_one_writes_and_is_called_grown(tmp_path: Path) -> None:
    small_folder = ensure_demo_actor(None, tmp_path, recipe=MICRO)
    grown_folder = ensure_demo_actor(None, tmp_path, recipe=replace(MICRO, grown_to=96))
    small, grown = (
        AutoModelForCausalLM.from_pretrained(folder) for folder in (small_folder, grown_folder)
    )
    assert grown.config.intermediate_size == 96 and small.config.intermediate_size == 64
    ids_BT = torch.arange(40)[None]
    torch.testing.assert_close(grown(ids_BT).logits, small(ids_BT).logits)
    grown(ids_BT).logits.logsumexp(-1).sum().backward()
    mlp = grown.model.layers[0].mlp
    old = small.config.intermediate_size
    new = (
        mlp.gate_proj.weight.grad[old:],
        mlp.up_proj.weight.grad[old:],
        mlp.down_proj.weight.grad[:, old:],
    )
    assert mlp.gate_proj.weight.grad.any() and not any(part.any() for part in new), (
        "they stay silent while the actor learns"
    )
    assert actor_note(small_folder) is None and "zero-gated neurons" in str(
        actor_note(grown_folder)
    )
