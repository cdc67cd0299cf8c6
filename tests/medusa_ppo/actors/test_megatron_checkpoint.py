"""A distributed checkpoint of Megatron's, laid out by hand: what trains on it, and what is refused.
Megatron's own: test_megatron.py.
"""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from transformers import AutoModelForCausalLM

from heads.checkpoint import load_heads
from heads.errors import ModelError
from medusa_ppo.actors.megatron_checkpoint import (
    INDEX,
    NORMS,
    TRACKER,
    as_transformers,
    described_by,
)
from medusa_ppo.actors.megatron_layout import Cutter, LlamaSizes, key_table
from medusa_ppo.offline.options import TrainOptions
from medusa_ppo.offline.scene import plan_training
from medusa_ppo.offline.train import train_heads
from medusa_ppo.runtime.console import OfflineProgress


def lay_out(source: Path, folder: Path, *, stacked: bool = True, left_out: str = "") -> Path:
    """The model of `source` as Megatron saves it: `folder`/iter_0000007, and beside it what
    transformers needs.
    """
    sizes = LlamaSizes.read(source)
    inside = folder / "iter_0000007"
    state = dict(AutoModelForCausalLM.from_pretrained(source).named_parameters())
    tensors: dict[str, torch.Tensor] = {}
    for name, entry in key_table(sizes).items():
        whole = Cutter(sizes, 0, 1).merge(entry, [state[part].detach() for part in entry.sources])
        parts = name.split(".", 3)
        if not name.startswith("decoder.layers."):
            tensors[name] = whole
        elif stacked:
            key = f"decoder.layers.{NORMS.get(parts[3], parts[3])}"
            tensors[key] = torch.cat([tensors.get(key, whole[None][:0]), whole[None]])
        else:
            tensors[f"decoder.layers.{parts[2]}.{NORMS.get(parts[3], parts[3])}"] = whole
    tensors.pop(left_out, None)
    dcp.save(tensors, storage_writer=dcp.FileSystemWriter(inside), no_dist=True)
    (folder / TRACKER).write_text("7\n")
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, folder)
    return folder


@pytest.fixture
def options(chain_actor: Path, tmp_path: Path) -> TrainOptions:
    (tmp_path / "texts.txt").write_text(
        "\n".join(f"{a} + {b} = {a + b}" for a in range(8) for b in range(8))
    )
    settings = {"num_heads": 2, "epochs": 1, "batch_positions": 32}
    return TrainOptions(
        model=str(chain_actor),
        data=str(tmp_path / "texts.txt"),
        out=tmp_path / "heads",
        column="text",
        **settings,
    )


@pytest.mark.parametrize("stacked", [True, False])
def test_heads_are_those_of_the_same_model(
    options: TrainOptions, tmp_path: Path, stacked: bool
) -> None:
    ours = replace(
        options,
        model=str(lay_out(Path(options.model), tmp_path / "saved", stacked=stacked)),
        out=tmp_path / "ours",
    )
    assert (
        f"vocabulary {LlamaSizes.read(options.model).vocab}" in dict(plan_training(ours))["model"]
    )
    for each in (options, ours):
        train_heads(each, OfflineProgress(quiet=True))
    expected, found = (load_heads(each.out)[0].trainable_state() for each in (options, ours))
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert (ours.out / "model" / "tokenizer_config.json").is_file() and not (
        ours.out / "model" / TRACKER
    ).exists()


def test_it_is_written_once_and_anew_after_another_save(chain_actor: Path, tmp_path: Path) -> None:
    folder = lay_out(chain_actor, tmp_path / "saved")
    out = tmp_path / "model"
    file = Path(as_transformers(str(folder), out)) / "model.safetensors"
    first = file.stat().st_mtime_ns
    as_transformers(str(folder / "iter_0000007"), out)
    assert file.stat().st_mtime_ns == first
    os.utime(folder / "iter_0000007" / INDEX, ns=(1, 1))
    as_transformers(str(folder), out)
    assert file.stat().st_mtime_ns > first
    assert as_transformers(str(chain_actor), out) == str(chain_actor), (
        "another path stays what it is"
    )


class Harmful:
    def __reduce__(self) -> tuple[Callable[..., None], tuple[str]]:
        return os.mkdir, ("harm",)


def test_an_index_runs_nothing(
    chain_actor: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = lay_out(chain_actor, tmp_path / "saved")
    (folder / "iter_0000007" / INDEX).write_bytes(pickle.dumps(Harmful()))
    with pytest.raises(ModelError, match=r"state_dict_metadata"):
        as_transformers(str(folder), tmp_path / "model")
    assert not (tmp_path / "harm").exists()


def test_what_lacks_is_named(chain_actor: Path, tmp_path: Path) -> None:
    folder = lay_out(chain_actor, tmp_path / "saved", left_out="decoder.final_layernorm.weight")
    with pytest.raises(ModelError, match=r"without decoder\.final_layernorm"):
        as_transformers(str(folder), tmp_path / "model")
    assert not (tmp_path / "model" / "model.safetensors").exists()
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"config\.json and a tokenizer"):
        described_by(str(folder))
    (folder / TRACKER).write_text("8")
    with pytest.raises(ModelError, match="torch_dist"):
        described_by(str(folder))


def test_a_part_that_was_cut_off_and_another_configuration_are_refused(
    chain_actor: Path, tmp_path: Path
) -> None:
    folder = lay_out(chain_actor, tmp_path / "saved")
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(
        config.replace('"intermediate_size": ', '"intermediate_size": 1')
    )
    with pytest.raises(ModelError, match=r"as config\.json says"):
        as_transformers(str(folder), tmp_path / "model")
    (folder / "config.json").write_text(config)
    (data,) = (folder / "iter_0000007").glob("*.distcp")
    data.write_bytes(data.read_bytes()[:-5000])
    with pytest.raises(ModelError, match="a part of a tensor"):
        as_transformers(str(folder), tmp_path / "model")
