"""Files that want to do harm, to native loading and to convert: a clear error each, nothing
executed, nothing allocated beyond 64 MiB.

All are read by one child process (read_hostile.py) under a limit of its address space and with
Python's audit events watched.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from heads.checkpoint import save_heads
from heads.errors import CheckpointError
from heads.heads_config import HeadsConfig
from heads.modules import MedusaHeads
from medusa_ppo.offline.convert import convert
from medusa_ppo.offline.foreign import read_foreign

D, V, K = 16, 40, 3
Build = Callable[[Path], Any]
SENTINEL = "harm-was-done"


class Harm:
    """Unpickling this makes a folder named SENTINEL in the working directory."""

    def __init__(self, function: Any = os.mkdir, argument: Any = SENTINEL) -> None:
        self.call = (function, (argument,))

    def __reduce__(self) -> tuple[Any, tuple[Any]]:
        return self.call


def sound_state() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    state: dict[str, torch.Tensor] = {}
    for k in range(K):
        state[f"{k}.0.linear.weight"] = torch.randn(D, D, generator=generator)
        state[f"{k}.0.linear.bias"] = torch.randn(D, generator=generator)
        state[f"{k}.1.weight"] = torch.randn(V, D, generator=generator)
    return state


def config(folder: Path, **values: Any) -> None:
    """Heads in model.safetensors are read as stock vLLM reads them, whatever their names: the
    reader that passes over no name. A medusa_lm_head.pt comes before it.
    """
    known = {"model_type": "medusa", "medusa_num_heads": K, "medusa_num_layers": 1}
    (folder / "config.json").write_text(json.dumps(known | values))


# ---- .pt


def saved(change: Callable[[dict[str, Any]], Any], **arguments: Any) -> Build:
    """torch.save of a changed state."""

    def build(folder: Path) -> None:
        state: dict[str, Any] = sound_state()
        replaced = change(state)
        torch.save(
            replaced if isinstance(replaced, Harm) else state,
            folder / "medusa_lm_head.pt",
            **arguments,
        )

    return build


def bytes_of(change: Callable[[bytes], bytes]) -> Build:
    """A sound .pt file whose bytes are changed."""

    def build(folder: Path) -> None:
        torch.save(sound_state(), folder / "medusa_lm_head.pt")
        data = (folder / "medusa_lm_head.pt").read_bytes()
        (folder / "medusa_lm_head.pt").write_bytes(change(data))

    return build


def rezipped(
    change: Callable[[dict[str, bytes]], Any], compression: int = zipfile.ZIP_STORED
) -> Build:
    """A sound .pt file, unpacked, changed and packed again."""

    def build(folder: Path) -> None:
        torch.save(sound_state(), folder / "source.pt")
        with zipfile.ZipFile(folder / "source.pt") as archive:
            entries = {name: archive.read(name) for name in archive.namelist()}
        (folder / "source.pt").unlink()
        change(entries)
        with zipfile.ZipFile(folder / "medusa_lm_head.pt", "w") as archive:
            for name, data in entries.items():
                archive.writestr(
                    name, data, compression if len(data) > 1 << 20 else zipfile.ZIP_STORED
                )

    return build


def described(data: bytes) -> Build:
    """A .pt file with a pickle of our own making."""
    return rezipped(
        lambda entries: entries.update({next(n for n in entries if n.endswith("data.pkl")): data})
    )


def text(value: str) -> str:
    """The pickle instruction for a text."""
    return "X" + struct.pack("<I", len(value)).decode("latin1") + value


def tensor_pickle(
    shape: str, stride: str, offset: str = "K\x00", key: str = text("0"), items: str = "M\x00\x01"
) -> bytes:
    """A dict with one tensor, its numbers and its storage's name as pickle instructions."""
    head = b"\x80\x02}X\x11\x00\x00\x000.0.linear.weightctorch._utils\n_rebuild_tensor_v2\n(("
    storage = (
        b"X\x07\x00\x00\x00storagectorch\nFloatStorage\n"
        + key.encode("latin1")
        + b"X\x03\x00\x00\x00cpu"
    )
    numbers = (
        items.encode("latin1")
        + b"tQ"
        + offset.encode("latin1")
        + shape.encode("latin1")
        + stride.encode("latin1")
    )
    return head + storage + numbers + b"\x89ccollections\nOrderedDict\n)RtRs."


def duplicate_entry(folder: Path) -> None:
    bytes_of(lambda data: data)(folder)
    with (
        zipfile.ZipFile(folder / "medusa_lm_head.pt", "a") as archive,
        pytest.warns(UserWarning, match="Duplicate"),
    ):
        archive.writestr(
            next(name for name in archive.namelist() if name.endswith("data.pkl")), b"x"
        )


def overlapping_entries(folder: Path) -> None:
    """Every entry of the directory points at the first one's bytes."""
    bytes_of(lambda data: data)(folder)
    data = bytearray((folder / "medusa_lm_head.pt").read_bytes())
    at = -1
    while (at := data.find(b"PK\x01\x02", at + 1)) >= 0:
        data[at + 42 : at + 46] = bytes(4)
    (folder / "medusa_lm_head.pt").write_bytes(bytes(data))


def huge_directory(folder: Path) -> None:
    """8 GiB of nothing (a sparse file) whose end says that 4 GiB less one are the zip's
    directory.
    """
    with (folder / "medusa_lm_head.pt").open("wb") as handle:
        handle.truncate(8 << 30)
        handle.seek(0, os.SEEK_END)
        handle.write(b"PK\x05\x06" + struct.pack("<HHHHIIH", 0, 0, 65535, 65535, 0xFFFFFFFE, 0, 0))


def huge_zip64_directory(folder: Path) -> None:
    record = b"PK\x06\x06" + struct.pack("<QHHIIQQQQ", 44, 45, 45, 0, 0, 1, 1, 7 << 30, 0)
    with (folder / "medusa_lm_head.pt").open("wb") as handle:
        handle.truncate(8 << 30)
        handle.seek(0, os.SEEK_END)
        where = handle.tell()
        end = b"PK\x05\x06" + struct.pack("<HHHHIIH", 0, 0, 65535, 65535, 0xFFFFFFFF, 0xFFFFFFFF, 0)
        handle.write(record + b"PK\x06\x07" + struct.pack("<IQI", 0, where, 1) + end)


def outside_link(name: str) -> Build:
    def build(folder: Path) -> None:
        inner = folder / "inner"
        inner.mkdir()
        config(inner)
        torch.save(sound_state(), folder / "secret.pt")
        (inner / name).symlink_to("../secret.pt")

    return build


HARMFUL = b"cposix\nmkdir\n(X" + struct.pack("<I", len(SENTINEL)) + SENTINEL.encode() + b"tR."
BIG = "\x8a\x05\x00\x00\x00\x00\x10"  # 2**36
PICKLES: dict[str, Build] = {
    "pt: empty": bytes_of(lambda data: b""),
    "pt: truncated": bytes_of(lambda data: data[:-200]),
    "pt: first half missing": bytes_of(lambda data: data[len(data) // 2 :]),
    "pt: not a zip": bytes_of(lambda data: b"\x7fELF" + data[4:-22] + bytes(22)),
    "pt: object that runs code": saved(lambda state: state.update({"0.0.linear.weight": Harm()})),
    "pt: object that runs code as the whole": saved(lambda state: Harm()),
    "pt: eval": saved(
        lambda state: state.update(x=Harm(eval, "__import__('os').mkdir('harm-was-done')"))
    ),
    "pt: legacy file that runs code": (
        lambda folder: (folder / "medusa_lm_head.pt").write_bytes(pickle.dumps(Harm()))
    ),
    "pt: legacy file of torch 1.5": saved(lambda state: None, _use_new_zipfile_serialization=False),
    "pt: code by a call in the description": described(b"\x80\x02" + HARMFUL),
    "pt: code by protocol 4": described(b"\x80\x04\x8c\x05posix\x8c\x05mkdir\x93\x8c\x01x\x85R."),
    "pt: a bytearray of 64 GiB": described(
        b"\x80\x02c__builtin__\nbytearray\n" + BIG.encode("latin1") + b"\x85R."
    ),
    "pt: a tensor constructor of 256 GiB": described(
        b"\x80\x02ctorch\nTensor\n" + BIG.encode("latin1") + b"\x85R."
    ),
    "pt: lists in lists without end": described(
        b"\x80\x02" + b"]q\x00(" + b"h\x00h\x00h\x00" * 150000 + b"e."
    ),
    "pt: tuples in tuples without end": described(
        b"\x80\x02}" + b")" + b"\x85" * 150000 + b"K\x01s."
    ),
    "pt: a million empty dicts": described(b"\x80\x02" + b"}" * 1000000 + b"."),
    "pt: pickle cut short": described(b"\x80\x02}X\xff\xff\xff\x7f"),
    "pt: description of 2 MiB": described(b"\x80\x02" + b"N0" * (1 << 20) + b"."),
    "pt: an expanded tensor of 2^72 numbers": described(
        tensor_pickle(BIG + BIG + "\x86", "K\x00K\x00\x86")
    ),
    "pt: a tensor larger than its storage": described(
        tensor_pickle(BIG + BIG + "\x86", BIG + "K\x01\x86")
    ),
    "pt: negative offset": described(
        tensor_pickle("K\x10K\x10\x86", "K\x10K\x01\x86", offset="J\xff\xff\xff\xff")
    ),
    "pt: negative stride": described(tensor_pickle("K\x10K\x10\x86", "J\xf0\xff\xff\xffK\x01\x86")),
    "pt: storage named by a path": described(
        tensor_pickle("K\x10K\x10\x86", "K\x10K\x01\x86", key=text("../../config.json"))
    ),
    "pt: storage named by a tuple whose text is 2^60 long": described(
        tensor_pickle("K\x10K\x10\x86", "K\x10K\x01\x86", key=")q\x00" + "h\x00\x86q\x00" * 60)
    ),
    "pt: storage named by tuples in tuples without end": described(
        tensor_pickle("K\x10K\x10\x86", "K\x10K\x01\x86", key=")" + "\x85" * 150000)
    ),
    "pt: storage with a long name": described(
        tensor_pickle("K\x10K\x10\x86", "K\x10K\x01\x86", key=text("0" * 1000))
    ),
    "pt: storage that is not as large as said": described(
        tensor_pickle("K\x10K\x10\x86", "K\x10K\x01\x86", items=BIG)
    ),
    "pt: a key twice": described(
        tensor_pickle("K\x10K\x10\x86", "K\x10K\x01\x86")[:-1]
        + b"X\x01\x00\x00\x00aNsX\x01\x00\x00\x00aNs."
    ),
    "pt: zip bomb": rezipped(
        lambda e: e.update({next(iter(e)).split("/")[0] + "/data/0": bytes(256 << 20)}),
        zipfile.ZIP_DEFLATED,
    ),
    "pt: entry outside the folder": rezipped(lambda e: e.update({"../../x": b"x"})),
    "pt: entry with an absolute path": rezipped(lambda e: e.update({"/etc/x": b"x"})),
    "pt: an entry twice": duplicate_entry,
    "pt: overlapping entries": overlapping_entries,
    "pt: directory of 4 GiB": huge_directory,
    "pt: zip64 directory of 7 GiB": huge_zip64_directory,
    "pt: big-endian": rezipped(
        lambda e: e.update({next(n for n in e if n.endswith("byteorder")): b"big"})
    ),
    "pt: NaN": saved(lambda state: state["1.0.linear.weight"].fill_(float("nan"))),
    "pt: whole numbers": saved(
        lambda state: state.update({"0.0.linear.weight": torch.zeros(D, D, dtype=torch.int64)})
    ),
    "pt: no tensor": saved(lambda state: state.update({"0.0.linear.weight": 3})),
    "pt: a folder": lambda folder: (folder / "medusa_lm_head.pt").mkdir(),
    "pt: a pipe": lambda folder: os.mkfifo(folder / "medusa_lm_head.pt"),
    "pt: link that leads out": outside_link("medusa_lm_head.pt"),
}


# ---- safetensors


def weights(folder: Path) -> Path:
    return folder / "model.safetensors"


def tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Build:
    def build(folder: Path) -> None:
        state = sound_state()
        change(state)
        save_file(state, weights(folder))

    return build


def header(change: Callable[[dict[str, Any]], Any]) -> Build:
    def build(folder: Path) -> None:
        path = weights(folder)
        save_file(sound_state(), path)
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        entries = json.loads(data[8 : 8 + length])
        changed = change(entries)
        text = (changed if isinstance(changed, str) else json.dumps(entries)).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])

    return build


def boundary_moved(entries: dict[str, Any]) -> None:
    """The first tensor's bytes end where the second one's should: offsets that fill the file, sizes
    that don't fit the shapes.
    """
    one, two = sorted(entries.items(), key=lambda item: item[1].get("data_offsets", [1 << 60]))[:2]
    one[1]["data_offsets"][1] -= 4
    two[1]["data_offsets"][0] -= 4


def raw(data: bytes) -> Build:
    return lambda folder: weights(folder).write_bytes(data)


def long_header(item: bytes, size: int) -> Build:
    text = b"{" + b",".join(b'"%d":' % i + item for i in range(size // (len(item) + 9))) + b"}"
    return raw(len(text).to_bytes(8, "little") + text)


def first(entries: dict[str, Any]) -> dict[str, Any]:
    return entries["0.0.linear.weight"]


SAFETENSORS: dict[str, Build] = {
    "safetensors: empty": raw(b""),
    "safetensors: header of 4 EiB": raw((1 << 62).to_bytes(8, "little") + bytes(100)),
    "safetensors: header of 15 MiB of small objects": long_header(b"{}", 15 << 20),
    "safetensors: header of 900 KiB of small lists": long_header(b"[[],[],[]]", 900 << 10),
    "safetensors: header nested without end": raw((200000).to_bytes(8, "little") + b"[" * 200000),
    "safetensors: header with a number of 5,000 digits": header(
        lambda e: json.dumps(e).replace("[0,", f"[{'9' * 5000},", 1)
    ),
    "safetensors: a key twice": header(
        lambda e: json.dumps(e)[:-1] + ', "0.0.linear.weight": ' + json.dumps(first(e)) + "}"
    ),
    "safetensors: negative offset": header(lambda e: first(e).update(data_offsets=[-4, 1020])),
    "safetensors: overlapping tensors": header(lambda e: first(e).update(data_offsets=[0, 1024])),
    "safetensors: offsets beyond the file": header(
        lambda e: first(e).update(data_offsets=[0, 1 << 50])
    ),
    "safetensors: shape of huge numbers": header(
        lambda e: first(e).update(shape=[1 << 40, 1 << 40])
    ),
    "safetensors: shape that does not fit the bytes": header(boundary_moved),
    "safetensors: dtype that lies": header(lambda e: first(e).update(dtype="BF16")),
    "safetensors: unheard-of dtype": header(lambda e: first(e).update(dtype="F4")),
    "safetensors: truncated": lambda folder: (
        tensors(lambda s: None)(folder),
        os.truncate(weights(folder), 2000),
    ),
    "safetensors: NaN": tensors(lambda s: s["0.1.weight"].fill_(float("nan"))),
    "safetensors: infinity": tensors(lambda s: s["2.0.linear.bias"].fill_(float("inf"))),
    "safetensors: a block of another size": tensors(
        lambda s: s.update({"1.0.linear.weight": torch.zeros(D, D + 1)})
    ),
    "safetensors: an lm_head of another size": tensors(
        lambda s: s.update({"1.1.weight": torch.zeros(V + 1, D)})
    ),
    "safetensors: half of the heads in half precision": tensors(
        lambda s: s.update({"1.1.weight": s["1.1.weight"].half()})
    ),
    "safetensors: a head number with a zero in front": tensors(
        lambda s: s.update({"00.0.linear.weight": torch.zeros(D, D)})
    ),
    "safetensors: head number 999": tensors(
        lambda s: s.update({"999.0.linear.weight": torch.zeros(D, D)})
    ),
    "safetensors: a head number without end": tensors(
        lambda s: s.update({"9" * 90 + ".0.linear.weight": torch.zeros(D, D)})
    ),
    "safetensors: a tensor named like a path": tensors(
        lambda s: s.update({"../../x": torch.zeros(1)})
    ),
    "safetensors: one bias missing": tensors(lambda s: s.pop("1.0.linear.bias")),
    "safetensors: no heads": tensors(
        lambda s: [s.pop(name) for name in list(s)] and s.update({"x": torch.zeros(1)})
    ),
    "safetensors: link that leads out": outside_link("model.safetensors"),
}


def with_config(text: str) -> Build:
    return lambda folder: (
        saved(lambda s: None)(folder),
        (folder / "config.json").write_text(text),
    )


def full_model(*files: dict[str, torch.Tensor]) -> Build:
    def build(folder: Path) -> None:
        config(folder, model_type="llama")
        for number, state in enumerate(files):
            save_file(state, folder / f"model-{number}.safetensors")

    return build


HEAD = {f"medusa_head.{name}": tensor for name, tensor in sound_state().items()}
FOLDERS: dict[str, Build] = {
    "config: a trillion heads": with_config('{"medusa_num_heads": 1000000000000}'),
    "config: minus one head": with_config('{"medusa_num_heads": -1}'),
    "config: heads in words": with_config('{"medusa_num_heads": "three"}'),
    "config: a key twice": with_config('{"medusa_num_heads": 3, "medusa_num_heads": 2}'),
    "config: nested without end": with_config('{"a":' * 100000),
    "config: 2 MiB": with_config('{"a": "' + "b" * (2 << 20) + '"}'),
    "config: a list": with_config("[]"),
    "model: a tensor in two files": full_model(HEAD, HEAD),
    "model: lm_heads before the layer": full_model(
        {name.replace(".1.weight", ".0.weight"): tensor for name, tensor in HEAD.items()}
    ),
    "model: no heads": full_model({"model.norm.weight": torch.zeros(D)}),
    "model: 1,001 files": lambda folder: [
        (folder / f"model-{n}.safetensors").touch() for n in range(1001)
    ],
    "model: a shard that is a link out": (
        lambda folder: (folder / "model-0.safetensors").symlink_to("/etc/passwd")
    ),
    "nothing at all": lambda folder: (folder / "config.json").unlink(),
}

# ---- native


def native(change: Build) -> Build:
    def build(folder: Path) -> None:
        torch.manual_seed(0)
        save_heads(folder / "heads", MedusaHeads(HeadsConfig(D, V, K)), lm_head_VD=torch.ones(V, D))
        change(folder / "heads")

    return build


def native_header(change: Callable[[dict[str, Any]], Any]) -> Build:
    def build(folder: Path) -> None:
        data = weights(folder).read_bytes()
        length = int.from_bytes(data[:8], "little")
        entries = json.loads(data[8 : 8 + length])
        text = (change(entries) or json.dumps(entries)).encode()
        weights(folder).write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])

    return native(build)


def native_config(change: Callable[[dict[str, Any]], Any]) -> Build:
    def build(folder: Path) -> None:
        values = json.loads((folder / "config.json").read_text())
        change(values)
        (folder / "config.json").write_text(json.dumps(values))

    return native(build)


def native_tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Build:
    def build(folder: Path) -> None:
        state = {name: tensor.clone() for name, tensor in load_file(weights(folder)).items()}
        change(state)
        save_file(state, weights(folder))

    return native(build)


def moved_out(name: str) -> Build:
    return native(
        lambda f: ((f / name).rename(f.parent / "elsewhere"), (f / name).symlink_to("../elsewhere"))
    )


BLOCK = "blocks.0.layers.0.weight"
SIZES = {"num_heads": 31, "hidden_size": 1 << 17, "vocab_size": 1 << 24}
NATIVE: dict[str, Build] = {
    "native: truncated": native(lambda f: os.truncate(weights(f), 1500)),
    "native: empty": native(lambda f: weights(f).write_bytes(b"")),
    "native: weights that are a pickle": native(
        lambda f: weights(f).write_bytes(pickle.dumps(Harm()))
    ),
    "native: weights that are a .pt file": native(lambda f: torch.save({"x": Harm()}, weights(f))),
    "native: header of 4 EiB": native(
        lambda f: weights(f).write_bytes((1 << 62).to_bytes(8, "little") + bytes(99))
    ),
    "native: header of 15 MiB": native(long_header(b"{}", 15 << 20)),
    "native: a key twice": native_header(
        lambda e: json.dumps(e)[:-1] + f', "{BLOCK}": ' + json.dumps(e[BLOCK]) + "}"
    ),
    "native: negative offset": native_header(lambda e: e[BLOCK].update(data_offsets=[-4, 1020])),
    "native: overlapping tensors": native_header(
        lambda e: e[BLOCK].update(data_offsets=e["lm_head.weight"]["data_offsets"])
    ),
    "native: shape of huge numbers": native_header(
        lambda e: e[BLOCK].update(shape=[1 << 40, 1 << 40])
    ),
    "native: dtype that lies": native_header(lambda e: e[BLOCK].update(dtype="F16")),
    "native: sizes at the bounds": native_config(
        lambda c: (c.update(SIZES), c["medusa_ppo"]["heads"].update(SIZES))
    ),
    "native: heads beyond their number": native_config(
        lambda c: c["medusa_ppo"]["heads"].update(num_heads=10**15)
    ),
    "native: sizes beyond the bounds": native_config(
        lambda c: c["medusa_ppo"]["heads"].update(num_layers=10**15)
    ),
    "native: wrong shape": native_tensors(lambda s: s.update({BLOCK: torch.zeros(D, D + 1)})),
    "native: wrong dtype": native_tensors(lambda s: s.update({BLOCK: torch.zeros(D, D).half()})),
    "native: NaN": native_tensors(lambda s: s[BLOCK].fill_(float("nan"))),
    "native: tensor named like a path": native_tensors(
        lambda s: s.update({"../../x": torch.zeros(1)})
    ),
    "native: weights that link out": moved_out("model.safetensors"),
    "native: config that links out": moved_out("config.json"),
    "native: config nested without end": native(
        lambda f: (f / "config.json").write_text('{"a":' * 100000)
    ),
}
FOREIGN = {**PICKLES, **SAFETENSORS, **FOLDERS}


def source_of(folder: Path) -> Path:
    return next((folder / name for name in ("inner", "heads") if (folder / name).is_dir()), folder)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What the child process saw, by the name of the file."""
    root = tmp_path_factory.mktemp("hostile")
    listed = [("control", "greedy", str(root))]
    sound: dict[str, Build] = {
        "sound pt": saved(lambda s: None),
        "sound safetensors": tensors(lambda s: None),
        "sound native": native(lambda f: None),
    }
    for number, (name, build) in enumerate({**sound, **FOREIGN, **NATIVE}.items()):
        folder = root / str(number)
        folder.mkdir()
        if "native" not in name:
            config(folder)
        build(folder)
        listed.append((name, "native" if "native" in name else "convert", str(source_of(folder))))
        if name in NATIVE:
            listed.append((f"{name}, by convert", "convert", str(source_of(folder))))
    env = os.environ | {
        "OMP_NUM_THREADS": "1",
        "MALLOC_ARENA_MAX": "1",
        "PYTHONPATH": str(Path(__file__).parents[3]),
    }
    script = Path(__file__).with_name("read_hostile.py")
    command = [sys.executable, str(script), json.dumps(listed), str(root / "out")]
    done = subprocess.run(
        command, cwd=root, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert not (root / SENTINEL).exists()
    shutil.rmtree(root, ignore_errors=True)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", [*FOREIGN, *NATIVE, *(f"{name}, by convert" for name in NATIVE)])
def test_a_clear_error_nothing_executed_nothing_allocated(
    outcomes: dict[str, dict[str, Any]], name: str
) -> None:
    outcome = outcomes[name]
    assert outcome["error"] == "CheckpointError", outcome
    assert "given:" in outcome["message"] and "do this:" in outcome["message"]
    assert len(outcome["message"]) < 1500  # a hostile name does not fill the screen
    assert not set(outcome["events"]) - {"import", "compile", "exec"}, outcome["events"]
    assert not outcome["wrote"]


WORDS = {
    "pt: object that runs code": "posix mkdir",
    "pt: eval": "eval",
    "pt: code by a call in the description": "posix mkdir",
    "pt: a bytearray of 64 GiB": "bytearray",
    "pt: a tensor constructor of 256 GiB": "torch Tensor",
    "pt: lists in lists without end": "EMPTY_LIST",
    "pt: tuples in tuples without end": "not text",
    "pt: a million empty dicts": "step 200001",
    "pt: an expanded tensor of 2^72 numbers": "is outside its storage",
    "pt: a tensor larger than its storage": "is outside its storage",
    "pt: negative offset": "with an impossible size",
    "pt: storage named by a path": "bytes are not in the file",
    "pt: storage named by a tuple whose text is 2^60 long": "without a name",
    "pt: storage named by tuples in tuples without end": "without a name",
    "pt: storage with a long name": "without a name",
    "pt: a key twice": "'a' twice",
    "pt: zip bomb": "compressed",
    "pt: entry outside the folder": "'../../x'",
    "pt: an entry twice": "an entry twice",
    "pt: overlapping entries": "overlap",
    "pt: big-endian": "big-endian",
    "safetensors: a key twice": "a key appears twice",
    "safetensors: head number 999": "1000 heads",
    "safetensors: a head number with a zero in front": "unknown tensors",
    "native: sizes at the bounds": "missing [",
    "native: heads beyond their number": "num_heads <= 31",
    "native: sizes beyond the bounds": "num_layers 1000000000000000 > 64",
}
"""What refuses them: the check that is meant, not one behind it that would have done so too."""


@pytest.mark.parametrize("name", WORDS)
def test_it_is_the_first_door_that_stays_shut(
    outcomes: dict[str, dict[str, Any]], name: str
) -> None:
    assert WORDS[name] in outcomes[name]["message"]


def test_the_limit_bites(outcomes: dict[str, dict[str, Any]]) -> None:
    """The control: 72 MiB are not to be had in the child process."""
    assert outcomes["control"]["error"] == "MemoryError"


def test_there_are_more_than_thirty() -> None:
    assert len(FOREIGN) >= 30 and len(NATIVE) >= 15


def test_the_harm_is_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is refused above does run where a pickle is loaded without care."""
    monkeypatch.chdir(tmp_path)
    pickle.loads(pickle.dumps(Harm()))  # noqa: S301
    assert (tmp_path / SENTINEL).is_dir()


# ---- damage at random


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Some bytes changed, removed or put in; pickle instructions more often than others."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(out))
        way = rng.random()
        if way < 0.5:
            out[at] = rng.randrange(256)
        elif way < 0.75:
            del out[at : at + rng.randrange(1, 9)]
        else:
            out[at:at] = bytes(
                rng.choice(b'().}]tsuQRqehKJNbX0123456789"[]{},:\x85\x86\x87\x88\x89\x8a')
                for _ in range(rng.randrange(1, 4))
            )
    return bytes(out)


@pytest.mark.parametrize("part", ["description", "zip", "header"])
def test_damage_at_random_is_refused_or_harmless(part: str, tmp_path: Path) -> None:
    """150 files each: heads of the right sizes, or our error; never another exception."""
    rng = random.Random(part)
    saved(lambda state: None)(tmp_path)
    tensors(lambda state: None)(tmp_path)
    config(tmp_path)
    packed = (tmp_path / "medusa_lm_head.pt").read_bytes()
    plain = weights(tmp_path).read_bytes()
    with zipfile.ZipFile(tmp_path / "medusa_lm_head.pt") as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    description = next(name for name in entries if name.endswith("data.pkl"))
    length = int.from_bytes(plain[:8], "little")
    (tmp_path / "medusa_lm_head.pt").unlink()  # it would be read in the place of the weights
    file = weights(tmp_path) if part == "header" else tmp_path / "x.pt"
    refused = 0
    for _ in range(150):
        if part == "description":
            with zipfile.ZipFile(file, "w") as archive:
                for name, data in entries.items():
                    archive.writestr(name, damaged(data, rng) if name == description else data)
        elif part == "zip":
            file.write_bytes(packed[:-2000] + damaged(packed[-2000:], rng))
        else:
            text = damaged(plain[8 : 8 + length], rng)
            file.write_bytes(len(text).to_bytes(8, "little") + text + plain[8 + length :])
        try:
            found = read_foreign(tmp_path if part == "header" else file).heads.config
        except CheckpointError:
            refused += 1
        else:
            assert (found.hidden_size, found.vocab_size) == (D, V)
    assert refused > 40


@pytest.mark.parametrize(
    "value", [None, [], {}, "x", -1, 0, True, 10**30, 0.5, [[]], {"num_medusa_heads": "x"}], ids=str
)
def test_any_value_in_a_configuration(value: Any, tmp_path: Path) -> None:
    """Every key that is read, with a value that it should not have."""
    keys = [
        "medusa_num_heads",
        "medusa_num_layers",
        "hidden_size",
        "vocab_size",
        "text_config",
        "version",
        "base_model_name_or_path",
    ]
    saved(lambda state: None)(tmp_path)
    stock = tmp_path / "stock"
    convert(tmp_path, stock, "vllm")
    sound = json.loads((stock / "config.json").read_text())
    for key in keys:
        (tmp_path / "config.json").write_text(json.dumps({key: value}))
        read_or_refuse(tmp_path)
    for key in [*sound, "logit_scale", "num_attention_heads"]:
        (stock / "config.json").write_text(json.dumps({**sound, key: value}))
        read_or_refuse(stock)


def read_or_refuse(folder: Path) -> None:
    try:
        assert read_foreign(folder).heads.config.num_heads == K
    except CheckpointError as error:
        assert len(str(error)) < 1500
