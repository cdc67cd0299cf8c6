"""The native directory: round trips, hostile files, atomic replacement, and what stock vLLM makes
of it.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from heads import checkpoint
from heads.checkpoint import (
    checksum,
    load_heads,
    load_lm_head,
    load_state,
    previous_of,
    save_heads,
    save_state,
)
from heads.errors import CheckpointError, ConfigError
from heads.heads_config import KINDS, LM_HEADS, HeadsConfig
from heads.modules import MedusaHeads
from heads.tensorfile import sha256_of

D, V, K = 16, 40, 3


def build(kind: str = "medusa", lm_head: str = "shared", layers: int = 2) -> MedusaHeads:
    torch.manual_seed(0)
    pairs = 5 if kind == "context" else 0
    heads = MedusaHeads(
        HeadsConfig(D, V, K, "hydra" if pairs else kind, layers, lm_head, context=pairs)
    )
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.add_(torch.randn_like(parameter))
    return heads


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_heads(
        tmp_path / "heads", build(), lm_head_VD=torch.ones(V, D), version=3, metadata={"note": "a"}
    )
    return tmp_path / "heads"


def edit_config(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    config = json.loads((path / "config.json").read_text())
    change(config)
    (path / "config.json").write_text(json.dumps(config))


def edit_tensors(path: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = dict(load_file(path / "model.safetensors"))
    change(tensors)
    save_file(tensors, path / "model.safetensors")


@pytest.mark.parametrize("kind", [*KINDS, "context"])
@pytest.mark.parametrize("lm_head", LM_HEADS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trip(tmp_path: Path, kind: str, lm_head: str, dtype: torch.dtype) -> None:
    heads = build(kind, lm_head).to(dtype)
    lm_head_VD = torch.randn(V, D)
    save_heads(tmp_path / "a", heads, lm_head_VD=lm_head_VD, version=7, metadata={"loss": "tv"})
    numbers = torch.get_rng_state()
    again, metadata = load_heads(tmp_path / "a", hidden_size=D, vocab_size=V)
    assert torch.equal(torch.get_rng_state(), numbers), "a loop's random numbers stay"
    assert again.config == heads.config and again.dtype == dtype
    assert all(
        torch.equal(a, b) for a, b in zip(heads.parameters(), again.parameters(), strict=True)
    )
    assert (metadata.version, metadata.metadata, metadata.has_lm_head) == (
        7,
        {"loss": "tv"},
        lm_head == "shared" and kind == "medusa",
    )
    assert metadata.checksum == sha256_of(heads.trainable_state())
    stored = load_lm_head(tmp_path / "a")
    assert (stored is not None) == metadata.has_lm_head
    assert stored is None or torch.equal(stored, lm_head_VD.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_draft_temperatures_come_with_the_heads(tmp_path: Path, dtype: torch.dtype) -> None:
    heads = build().to(dtype)
    save_heads(tmp_path / "a", heads)
    before = (tmp_path / "a" / "config.json").read_text(), sha256_of(heads.trainable_state())
    heads.temperatures_K.copy_(torch.tensor([0.75, 1.0, 1.25]))
    save_heads(tmp_path / "b", heads, lm_head_VD=torch.ones(V, D))
    again, metadata = load_heads(tmp_path / "b")
    assert (
        again.temperatures_K.tolist() == [0.75, 1.0, 1.25]
        and again.dtype == again.temperatures_K.dtype == dtype
    )
    assert metadata.checksum == sha256_of(heads.trainable_state()) != before[1]
    assert (
        json.loads((tmp_path / "b" / "config.json").read_text())["medusa_ppo"]["format_version"]
        == 2
    )
    heads.load_trainable_state(load_heads(tmp_path / "a")[0].trainable_state())
    assert heads.temperatures_K.tolist() == [1.0, 1.0, 1.0], "what says nothing of them has none"
    save_heads(tmp_path / "c", heads)
    assert (
        (tmp_path / "c" / "config.json").read_text(),
        sha256_of(heads.trainable_state()),
    ) == before


@pytest.mark.parametrize("wrong", [[0.0, 1.0, 1.0], [-1.0, 1.0, 1.0], [1.0, 1.0]])
def test_impossible_draft_temperatures_are_refused(tmp_path: Path, wrong: list[float]) -> None:
    heads = build()
    good = build().trainable_state()
    with pytest.raises(CheckpointError, match="temperature"):
        heads.load_trainable_state({**good, "temperatures": torch.tensor(wrong)})
    assert heads.temperatures_K.tolist() == [1.0, 1.0, 1.0]
    if len(wrong) == K:
        heads.temperatures_K.copy_(torch.tensor(wrong))
        save_heads(tmp_path / "a", heads)
        with pytest.raises(CheckpointError, match="temperature"):
            load_heads(tmp_path / "a")


def test_heads_of_a_kind_that_is_gone_are_told_so(saved: Path) -> None:
    def as_markov(config: dict[str, Any]) -> None:
        config["medusa_ppo"]["heads"] |= {"kind": "markov", "rank": 64}
        config |= {"model_type": "medusa_ppo", "architectures": ["MedusaPPOModel"]}

    edit_config(saved, as_markov)
    with pytest.raises(CheckpointError, match=r"markov were removed in 0\.4\.0") as caught:
        load_heads(saved)
    assert "damaged" not in str(caught.value) and "kind hydra" in str(caught.value)


def test_a_field_of_a_kind_that_is_gone_says_nothing_of_others(saved: Path) -> None:
    before = load_heads(saved)[0].config
    edit_config(saved, lambda c: c["medusa_ppo"]["heads"].update(rank=64))
    assert load_heads(saved)[0].config == before


def test_without_lm_head(tmp_path: Path) -> None:
    save_heads(tmp_path / "a", build())
    assert (
        load_heads(tmp_path / "a")[1].has_lm_head is False and load_lm_head(tmp_path / "a") is None
    )


def test_replacing_leaves_one_whole_directory(saved: Path) -> None:
    save_heads(saved, build("hydra"), version=4)
    assert load_heads(saved)[1].version == 4
    assert [p.name for p in saved.parent.iterdir()] == ["heads"]
    assert sorted(p.name for p in saved.iterdir()) == ["config.json", "model.safetensors"]


def test_a_link_in_the_place_of_a_directory_is_replaced_and_not_followed(
    saved: Path, tmp_path: Path
) -> None:
    latest = tmp_path / "links" / "latest"
    latest.parent.mkdir()
    latest.symlink_to(saved)
    for version in (4, 5, 6):
        save_heads(latest, build(), version=version)
    assert load_heads(latest)[1].version == 6 and load_heads(saved)[1].version == 3
    assert [p.name for p in latest.parent.iterdir()] == ["latest"]


def test_a_writer_that_dies_at_any_rename_leaves_readable_heads(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.rename
    calls = []

    def dies_at_second(source: str | Path, target: str | Path) -> None:
        calls.append(target)
        if len(calls) == 2:
            raise OSError("killed")
        real(source, target)

    monkeypatch.setattr(checkpoint.os, "rename", dies_at_second)
    with pytest.raises(OSError, match="killed"):
        save_heads(saved, build("hydra"), version=4)
    assert not saved.exists() and load_heads(saved)[1].version == 3
    monkeypatch.undo()
    save_heads(saved, build("hydra"), version=5)
    assert load_heads(saved)[1].version == 5 and not previous_of(saved).exists()


def test_a_failed_write_leaves_the_old_directory(saved: Path) -> None:
    broken = build()
    with torch.no_grad():
        broken.blocks[0][0, 0, 0] = float("nan")
    with pytest.raises(CheckpointError, match="NaN"):
        save_heads(saved, broken, version=4)
    with pytest.raises(ConfigError, match="lm_head"):
        save_heads(saved, build(), lm_head_VD=torch.ones(V + 1, D))
    with pytest.raises(TypeError):
        save_heads(saved, build(), metadata={"not JSON": object()})
    assert load_heads(saved)[1].version == 3 and [p.name for p in saved.parent.iterdir()] == [
        "heads"
    ]


def test_heads_of_another_actor_are_named(saved: Path) -> None:
    with pytest.raises(CheckpointError, match="hidden_size 16"):
        load_heads(saved, hidden_size=32)
    with pytest.raises(CheckpointError, match="vocab_size 41"):
        load_heads(saved, vocab_size=41)


# ---- hostile files


def _truncate(path: Path) -> None:
    data = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(data[:-100])


def _header_lies(length: int) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        data = (path / "model.safetensors").read_bytes()
        (path / "model.safetensors").write_bytes(length.to_bytes(8, "little") + data[8:])

    return change


def _rewrite_header(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def rewrite(path: Path) -> None:
        data = (path / "model.safetensors").read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        change(header)
        text = json.dumps(header).encode()
        (path / "model.safetensors").write_bytes(
            len(text).to_bytes(8, "little") + text + data[8 + length :]
        )

    return rewrite


def _first(header: dict[str, Any]) -> dict[str, Any]:
    return header["blocks.0.layers.0.weight"]


def _config(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    return lambda path: edit_config(path, change)


def _tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    return lambda path: edit_tensors(path, change)


def _flip_a_bit(path: Path) -> None:
    edit_tensors(path, lambda t: t[BLOCK].view(torch.int32)[0, 0].bitwise_xor_(1))


def _fifo(path: Path) -> None:
    (path / "model.safetensors").unlink()
    os.mkfifo(path / "model.safetensors")


BLOCK = "blocks.0.layers.0.weight"
HOSTILE: dict[str, Callable[[Path], Any]] = {
    "no directory": shutil.rmtree,
    "a file instead of a directory": lambda path: (shutil.rmtree(path), path.write_text("x")),
    "no config": lambda path: (path / "config.json").unlink(),
    "no weights": lambda path: (path / "model.safetensors").unlink(),
    "empty weights": lambda path: (path / "model.safetensors").write_bytes(b""),
    "weights are a pipe": _fifo,
    "config is a directory": lambda path: (
        (path / "config.json").unlink(),
        (path / "config.json").mkdir(),
    ),
    "truncated": _truncate,
    "huge header length": _header_lies(1 << 62),
    "header longer than the file": _header_lies(1 << 20),
    "header of length zero": _header_lies(0),
    "trailing bytes": lambda path: (path / "model.safetensors").open("ab").write(b"x" * 64),
    "header is a list": (
        lambda path: (path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"[]")
    ),
    "header is not UTF-8": (
        lambda path: (path / "model.safetensors").write_bytes(
            (2).to_bytes(8, "little") + b"\xff\xfe"
        )
    ),
    "deeply nested header": (
        lambda path: (path / "model.safetensors").write_bytes(
            (200000).to_bytes(8, "little") + b"[" * 200000
        )
    ),
    "overlapping tensors": _rewrite_header(lambda h: _first(h).update(data_offsets=[0, 4])),
    "offsets beyond the file": _rewrite_header(
        lambda h: _first(h).update(data_offsets=[0, 1 << 50])
    ),
    "negative offset": _rewrite_header(lambda h: _first(h).update(data_offsets=[-4, 1020])),
    "shape of huge numbers": _rewrite_header(lambda h: _first(h).update(shape=[1 << 40, 1 << 40])),
    "shape that is text": _rewrite_header(lambda h: _first(h).update(shape="16x16")),
    "entry without dtype": _rewrite_header(lambda h: _first(h).pop("dtype")),
    "unheard-of dtype": _rewrite_header(lambda h: _first(h).update(dtype="F8_E4M3")),
    "dtype that lies about the bytes": _rewrite_header(lambda h: _first(h).update(dtype="BF16")),
    "wrong shape": _tensors(lambda t: t.update({BLOCK: torch.zeros(D, D + 1)})),
    "transposed sizes": _tensors(lambda t: t.update({BLOCK: torch.zeros(D * D)})),
    "wrong dtype": _tensors(lambda t: t.update({BLOCK: torch.zeros(D, D, dtype=torch.float16)})),
    "missing tensor": _tensors(lambda t: t.pop(BLOCK)),
    "unknown tensor": _tensors(lambda t: t.update({"blocks.9.layers.0.weight": torch.zeros(D, D)})),
    "tensor named like a path": _tensors(lambda t: t.update({"../../../tmp/x": torch.zeros(1)})),
    "bias that nobody reads": _tensors(
        lambda t: t.update({"blocks.0.layers.0.bias": torch.zeros(D)})
    ),
    "NaN": _tensors(lambda t: t[BLOCK].fill_(float("nan"))),
    "infinity": _tensors(lambda t: t[BLOCK][0].fill_(float("inf"))),
    "a flipped bit": _flip_a_bit,
    "missing lm_head": _tensors(lambda t: t.pop("lm_head.weight")),
    "config is not JSON": lambda path: (path / "config.json").write_text("{"),
    "config is a number": lambda path: (path / "config.json").write_text("1"),
    "config with a key twice": (
        lambda path: (path / "config.json").write_text(
            '{"model_type": "medusa", "model_type": "x"}'
        )
    ),
    "config of 2 MiB": (
        lambda path: (path / "config.json").write_text('{"x": "' + "a" * (2 << 20) + '"}')
    ),
    "foreign config": _config(lambda c: c.pop("medusa_ppo")),
    "newer format": _config(lambda c: c["medusa_ppo"].update(format_version=4)),
    "format of draft temperatures without them": _config(
        lambda c: c["medusa_ppo"].update(format_version=2)
    ),
    "draft temperatures in the first format": _tensors(
        lambda t: t.update(temperatures=torch.ones(K))
    ),
    "no heads section": _config(lambda c: c["medusa_ppo"].pop("heads")),
    "heads section is a list": _config(lambda c: c["medusa_ppo"].update(heads=[1])),
    "unknown heads key": _config(lambda c: c["medusa_ppo"]["heads"].update(pickle="x")),
    "unknown kind": _config(lambda c: c["medusa_ppo"]["heads"].update(kind="../../x")),
    "a billion heads": _config(
        lambda c: (c.update(num_heads=10**9), c["medusa_ppo"]["heads"].update(num_heads=10**9))
    ),
    "another number of heads": _config(
        lambda c: (c.update(num_heads=2), c["medusa_ppo"]["heads"].update(num_heads=2))
    ),
    "keys for vLLM that disagree": _config(lambda c: c.update(num_heads=2)),
    "negative version": _config(lambda c: c["medusa_ppo"].update(version=-1)),
    "version is true": _config(lambda c: c["medusa_ppo"].update(version=True)),
    "dtype is a path": _config(lambda c: c["medusa_ppo"].update(dtype="load")),
    "another checksum": _config(lambda c: c["medusa_ppo"].update(checksum="0" * 64)),
    "checksum is a list": _config(lambda c: c["medusa_ppo"].update(checksum=[])),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_directories_are_refused(saved: Path, name: str) -> None:
    load_heads(saved)
    HOSTILE[name](saved)
    with pytest.raises(CheckpointError) as caught:
        load_heads(saved)
    assert "do this:" in str(caught.value)


def test_a_changed_lm_head_is_refused(saved: Path) -> None:
    assert load_lm_head(saved) is not None
    edit_tensors(saved, lambda t: t["lm_head.weight"].mul_(2))
    with pytest.raises(CheckpointError, match="checksum"):
        load_lm_head(saved)


def test_validation_stands_before_allocation(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file with a wrong shape is refused without a tensor being read or a module being built."""
    edit_tensors(saved, lambda t: t.update({BLOCK: torch.zeros(D, D + 1)}))

    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("allocated before validation")

    monkeypatch.setattr(checkpoint, "read_tensors", forbidden)
    monkeypatch.setattr(checkpoint, "MedusaHeads", forbidden)
    with pytest.raises(CheckpointError, match="shape"):
        load_heads(saved)


# ---- single files


def test_state_round_trip(tmp_path: Path) -> None:
    state = build("hydra").trainable_state()
    save_state(tmp_path / "s.safetensors", state)
    again = load_state(tmp_path / "s.safetensors")
    assert checksum(again) == checksum(state) and set(again) == set(state)
    assert [p.name for p in tmp_path.iterdir()] == ["s.safetensors"]


def test_hostile_state_files(tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    with pytest.raises(CheckpointError, match="NaN"):
        save_state(path, {"x": torch.tensor([float("nan")])})
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(CheckpointError, match="missing"):
        load_state(path)
    save_file({"x": torch.tensor([float("nan")])}, path)
    with pytest.raises(CheckpointError, match="NaN"):
        load_state(path)
    path.write_bytes(b"PK\x03\x04" + b"x" * 100)
    with pytest.raises(CheckpointError):
        load_state(path)
    torch.save({"x": torch.zeros(3)}, path)
    with pytest.raises(CheckpointError):
        load_state(path)


def test_checksum_sees_names_shapes_dtypes_and_bytes() -> None:
    base = {"a": torch.arange(6.0), "b": torch.zeros(2)}
    others = [
        {"a": torch.arange(6.0), "c": torch.zeros(2)},
        {"a": torch.arange(6.0).reshape(2, 3), "b": torch.zeros(2)},
        {"a": torch.arange(6.0).int().view(torch.int32), "b": torch.zeros(2)},
        {"a": torch.arange(6.0) + 1e-7, "b": torch.zeros(2)},
    ]
    for sums in (checksum, sha256_of):
        assert sums(base) == sums(dict(reversed(base.items())))
        assert sums(base) == sums({"a": torch.arange(12.0)[::2] / 2, "b": torch.zeros(2)})
        assert len({sums(base), *(sums(other) for other in others)}) == 5


# ---- stock vLLM


@pytest.mark.parametrize("lm_head", LM_HEADS)
def test_config_for_stock_vllm(tmp_path: Path, lm_head: str) -> None:
    """The nine keys that vLLM <= 0.32 reads, and nothing else of ours at the top level (research:
    it renames keys with 'num').
    """
    save_heads(tmp_path / "a", build("medusa", lm_head), lm_head_VD=torch.ones(V, D))
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    config.pop("medusa_ppo")
    assert config == {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": D,
        "vocab_size": V,
        "num_heads": K,
        "num_hidden_layers": 2,
        "truncated_vocab_size": V,
        "original_lm_head": lm_head == "shared",
        "medusa_fc_bias": False,
    }
    names = set(load_file(tmp_path / "a" / "model.safetensors"))
    blocks = {f"blocks.{k}.layers.{layer}.weight" for k in range(K) for layer in range(2)}
    assert names == blocks | (
        {"lm_head.weight"} if lm_head == "shared" else {f"lm_heads.{k}.weight" for k in range(K)}
    )


@pytest.mark.parametrize("kind", KINDS)
def test_stock_vllm_reads_medusa_and_refuses_the_other_kinds(tmp_path: Path, kind: str) -> None:
    """vLLM's own configuration loader, without an engine: a kind that stock vLLM can't run must not
    load as something else.
    """
    pytest.importorskip("vllm")
    from vllm.transformers_utils.config import get_config

    save_heads(tmp_path / "a", build(kind), lm_head_VD=torch.ones(V, D))
    if kind == "medusa":
        config = get_config(str(tmp_path / "a"), trust_remote_code=False)
        assert (
            type(config).__name__,
            config.num_heads,
            config.num_hidden_layers,
            config.original_lm_head,
        ) == ("MedusaConfig", K, 2, True)
        assert config.architectures == ["MedusaModel"] and config.truncated_vocab_size == V
    else:
        with pytest.raises(ValueError, match="medusa_ppo"):
            get_config(str(tmp_path / "a"), trust_remote_code=False)


def test_a_folder_from_before_there_was_a_context_loads(tmp_path: Path) -> None:
    """Its configuration lacks the key."""
    heads = build("hydra")
    save_heads(tmp_path / "old", heads)
    edit_config(tmp_path / "old", lambda config: config["medusa_ppo"]["heads"].pop("context"))
    again, _ = load_heads(tmp_path / "old")
    assert again.config == heads.config and again.config.context == 0
    assert all(
        torch.equal(a, b) for a, b in zip(heads.parameters(), again.parameters(), strict=True)
    )


def test_only_heads_are_replaced(tmp_path: Path) -> None:
    """A whole folder is replaced: whatever else was in it would be gone."""
    for file, text in (("thesis.txt", "work"), ("config.json", '{"model_type": "llama"}')):
        (tmp_path / file).mkdir()
        (tmp_path / file / file).write_text(text)
        with pytest.raises(CheckpointError, match="holds no heads"):
            save_heads(tmp_path / file, build("medusa"))
        assert (tmp_path / file / file).read_text() == text
    (tmp_path / "file").write_text("work")
    with pytest.raises(CheckpointError, match="no folder"):
        save_heads(tmp_path / "file", build("medusa"))
    (tmp_path / "empty").mkdir()
    for version in (1, 2):
        save_heads(tmp_path / "empty", build("medusa"), version=version)
        assert load_heads(tmp_path / "empty")[1].version == version


# ---- heads of 0.3.0

OLD = Path(__file__).with_name("heads_of_0_3_0")
"""Folders that the code of 0.3.0 wrote (commit 4d2093b), each by its `save_heads`, of random heads
with K = 2, D = 8, V = 12; `expected.safetensors` has fixed states, tokens and tables, the log-probs
that its `MedusaHeads` gave for them, by head divided by its draft temperature, and the drafts of
its `DraftingCore`, where each row is a request with its newest pair alone.
"""
OLD_FORMS = {
    "medusa": HeadsConfig(8, 12, 2),
    "medusa-own": HeadsConfig(8, 12, 2, num_layers=2, lm_head="own"),
    "hydra": HeadsConfig(8, 12, 2, "hydra"),
    "hydra-own": HeadsConfig(8, 12, 2, "hydra", lm_head="own", mlp_ratio=1),
    "context": HeadsConfig(8, 12, 2, "hydra", context=3),
    "context-of-1": HeadsConfig(8, 12, 2, "hydra", num_layers=2, context=1, mlp_ratio=3),
    "context-own": HeadsConfig(8, 12, 2, "hydra", lm_head="own", context=16),
}
"""Every kind, with and without a context, with either lm_head, other widths and depths; the second
and the last but one have draft temperatures.
"""


@pytest.mark.parametrize("form", OLD_FORMS)
def test_heads_of_0_3_0_load_to_the_same_bits_and_say_the_same(form: str) -> None:
    """What drafts with them: tests/medusa_ppo/drafting/test_core.py."""
    heads, metadata = load_heads(OLD / form, hidden_size=8, vocab_size=12)
    heads.requires_grad_(False)
    assert heads.config == OLD_FORMS[form] and not heads.config.has_new_parts
    assert metadata.metadata == {"note": form} and metadata.version > 0
    state = heads.trainable_state()
    written = load_file(OLD / form / "model.safetensors")
    assert all(torch.equal(state[name], written[name]) for name in state)
    assert set(written) - set(state) <= {"lm_head.weight"}
    expected = load_file(OLD / "expected.safetensors")
    lm_head_VD, table_VD = expected["lm_head_VD"], expected["embedding_VD"]
    if heads.config.lm_head == "shared":
        assert torch.equal(load_lm_head(OLD / form), lm_head_VD)
    hidden_2TD, ids_2T = expected["hidden_2TD"], expected["ids_2T"]
    logits = heads(
        hidden_2TD,
        lm_head_VD if heads.config.lm_head == "shared" else None,
        next_ids_BT=ids_2T if heads.config.needs_embedding else None,
        embedding_VD=table_VD if heads.config.needs_embedding else None,
    )
    given = (logits / heads.temperatures_K.view(-1, 1)).log_softmax(-1)
    torch.testing.assert_close(given, expected[f"{form}.logprobs_2TKV"], rtol=1e-5, atol=1e-5)


def test_heads_of_0_3_0_that_are_gone_are_told_so() -> None:
    with pytest.raises(CheckpointError, match=r"markov were removed in 0\.4\.0"):
        load_heads(OLD / "markov")


@pytest.mark.parametrize("form", OLD_FORMS)
def test_heads_of_earlier_forms_are_written_as_0_3_0_wrote_them(tmp_path: Path, form: str) -> None:
    """So that it can read them; but for the lm_head that only stock vLLM reads, which 0.3.0 takes
    heads without.
    """
    heads, metadata = load_heads(OLD / form)
    save_heads(
        tmp_path / form,
        heads,
        lm_head_VD=load_lm_head(OLD / form),
        version=metadata.version,
        metadata=metadata.metadata,
    )
    again, before = (
        json.loads((folder / form / "config.json").read_text()) for folder in (tmp_path, OLD)
    )
    # Of a kind that is gone; without it 0.3.0 takes the same value.
    assert before["medusa_ppo"]["heads"].pop("rank") == 64
    weights = Path(form) / "model.safetensors"
    expected = (OLD / weights).read_bytes()
    if heads.config.kind != "medusa" and heads.config.lm_head == "shared":
        before["medusa_ppo"]["lm_head_checksum"] = ""
        save_state(tmp_path / "expected.safetensors", heads.trainable_state())
        expected = (tmp_path / "expected.safetensors").read_bytes()
        read = load_file(OLD / weights)
        del read["lm_head.weight"]
        assert sha256_of(read) == sha256_of(load_state(tmp_path / "expected.safetensors"))
    assert again == before
    assert (tmp_path / weights).read_bytes() == expected
