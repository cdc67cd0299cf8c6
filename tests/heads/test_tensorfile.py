"""Files that are written tensor by tensor, and the quick sum."""

from __future__ import annotations

import hashlib
import resource
from pathlib import Path
from typing import Any

import pytest
import torch

from heads.errors import CheckpointError
from heads.tensorfile import (
    PAGE,
    StateWriter,
    checksum,
    crc,
    is_finite,
    load_state,
    read_header,
    save_state,
    write_summed,
)

STATE = {
    "b": torch.arange(6, dtype=torch.float32).view(2, 3),
    "a": torch.tensor(3.0, dtype=torch.bfloat16),
    "empty": torch.zeros(0, 4),
    "odd": torch.arange(5, dtype=torch.uint8),
}
ENTRIES = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in STATE.items()}


def test_any_order_gives_the_same_tensors_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "new" / "state.safetensors"
    with StateWriter(path, ENTRIES) as writer:
        for name in ("odd", "empty", "a", "b"):
            assert not path.exists()
            writer.put(name, STATE[name])
    assert path.stat().st_size == writer.nbytes and list(path.parent.iterdir()) == [path]
    assert read_header(path).keys() == STATE.keys()
    found = load_state(path)
    assert all(
        torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype
        for name, tensor in STATE.items()
    )
    save_state(tmp_path / "whole", STATE)
    assert crc(found) == crc(load_state(tmp_path / "whole"))


def test_tensors_are_cast_to_what_was_announced(tmp_path: Path) -> None:
    with StateWriter(tmp_path / "state", {"x": (torch.bfloat16, (2,))}) as writer:
        writer.put("x", torch.tensor([1.0, 2.0]))
    assert torch.equal(
        load_state(tmp_path / "state")["x"], torch.tensor([1.0, 2.0], dtype=torch.bfloat16)
    )


def test_the_sum_of_what_is_written_is_that_of_what_is_read(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    given = {
        **STATE,
        "cast": torch.randn(3, PAGE - 1, generator=generator),
        "turned": torch.randn(PAGE, 7, generator=generator).T,
        "shifted": torch.randn(PAGE + 9, generator=generator)[1:],
    }
    entries = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in given.items()}
    entries["cast"] = (torch.bfloat16, (3, PAGE - 1))
    path = tmp_path / "state"
    written = write_summed(path, entries, reversed(given.items()))
    found = load_state(path)
    assert all(torch.equal(found[name], t.to(entries[name][0])) for name, t in given.items())
    assert written == checksum(found)
    data = bytearray(path.read_bytes())
    data[-PAGE] ^= 1
    path.write_bytes(data)
    assert written != checksum(load_state(path))


@pytest.mark.parametrize(
    "tensors",
    [
        {"b": torch.zeros(3, 2)},
        {"unknown": torch.zeros(1)},
        {"b": torch.full((2, 3), float("nan"))},
        {"b": STATE["b"]},
    ],
    ids=["shape", "name", "nan", "incomplete"],
)
def test_what_is_wrong_or_missing_leaves_the_old_file(
    tmp_path: Path, tensors: dict[str, torch.Tensor]
) -> None:
    path = tmp_path / "state"
    save_state(path, {"old": torch.ones(1)})
    with pytest.raises(CheckpointError):
        with StateWriter(path, ENTRIES) as writer:
            for name, tensor in tensors.items():
                writer.put(name, tensor)
    assert load_state(path).keys() == {"old"} and list(tmp_path.iterdir()) == [path]


def test_a_tensor_comes_once(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not belong"):
        with StateWriter(tmp_path / "state", ENTRIES) as writer:
            writer.put("b", STATE["b"])
            writer.put("b", STATE["b"])


def test_the_quick_sum_sees_every_byte_and_the_order_of_tensors() -> None:
    base = {"x": torch.arange(8.0), "y": torch.ones(3)}
    assert crc(base) == crc(dict(reversed(base.items())))
    for name in base:
        changed = {key: value.clone() for key, value in base.items()}
        changed[name][-1] += 1
        assert crc(changed) != crc(base)
    assert crc({"x": base["y"], "y": base["x"]}) != crc(base)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_the_checksum_sees_every_byte_that_changes_and_pages_in_another_order(
    dtype: torch.dtype,
) -> None:
    """Of whole pages and of a last one that is none; wherever the tensor lies in memory."""
    size = (2 * PAGE + 40) // dtype.itemsize
    whole = torch.randint(256, (size + 1,), generator=torch.Generator().manual_seed(0)).to(dtype)
    base = whole[:size].clone()
    good = checksum({"x": base})
    assert checksum({"x": whole[:size]}) == good
    shifted = torch.cat([base[:1], base])[1:]
    assert shifted.storage_offset() == 1 and checksum({"x": shifted}) == good
    data = base.view(torch.uint8)
    for place in range(0, len(data), 7):
        for bit in (1, 128):
            data[place] ^= bit
            assert checksum({"x": base}) != good, place
            data[place] ^= bit
    assert checksum({"x": base}) == good
    data[:PAGE], data[PAGE : 2 * PAGE] = data[PAGE : 2 * PAGE].clone(), data[:PAGE].clone()
    assert checksum({"x": base}) != good


def test_nothing_on_the_way_of_weights_is_hashed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SHA-256 takes a second a GiB, and a sync of 8B would wait 11 s for it: one word a page and
    the names are all that is hashed.
    """
    hashed: list[int] = []
    sha256 = hashlib.sha256

    def counted(data: bytes = b"") -> Any:
        hashed.append(len(data))
        return sha256(data)

    monkeypatch.setattr(hashlib, "sha256", counted)
    state = {"x": torch.ones(1 << 20), "y": torch.ones(1000)}
    save_state(tmp_path / "state", state)
    assert checksum(load_state(tmp_path / "state")) == checksum(state)
    nbytes = sum(tensor.nbytes for tensor in state.values())
    assert sum(hashed) / 2 < nbytes / 400


@pytest.mark.parametrize("limit", [0, 10, 200])
def test_a_full_disk_leaves_nothing_half_written(tmp_path: Path, limit: int) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
        with pytest.raises(OSError):
            save_state(tmp_path / "state", STATE)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_one_value_that_is_not_finite_is_seen(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    values_N = torch.randn(1001).to(dtype)
    values_N[[3, 7]] = torch.tensor([largest, -largest], dtype=dtype)
    assert is_finite(values_N) and is_finite(values_N[:0]) and is_finite(values_N[5])
    for wrong in (float("nan"), float("inf"), -float("inf")):
        assert not is_finite(values_N.index_fill(0, torch.tensor([1000]), wrong))
