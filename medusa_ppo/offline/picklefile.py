"""Finds out what a torch .pt file of tensors contains without executing it. Only then does
torch.load(weights_only=True) get the file.

A .pt file is a zip with one pickle (data.pkl) that describes tensors, and one stored entry of bytes
for each storage. Before torch sees the file, its zip directory is bounded and checked (no
compression, no overlap, no entry twice), and our own small reader goes through the pickle: thirty
instructions, eleven names, no calls. It accepts what `torch.save` writes for a flat dict of
tensors, and nothing else.
"""

from __future__ import annotations

import pickletools
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from heads.errors import CheckpointError
from heads.tensorfile import Header, regular_size, require_finite

# Heads have a few dozen tensors and need a thousandth of these limits.
MAX_PICKLE_BYTES, MAX_PICKLE_STEPS = 1 << 20, 200_000
# An entry takes about a hundred bytes, so there is room for thousands of tensors.
MAX_DIRECTORY_BYTES = 512 << 10
MAX_DIMENSIONS = 8
MAX_STORAGE_NAME = 20  # torch counts storages: "0", "1", ...
END_RECORD, END64_LOCATOR, END64_RECORD = b"PK\x05\x06", b"PK\x06\x07", b"PK\x06\x06"
# Sizes and signatures that the zip format fixes.
END_BYTES, LOCATOR_BYTES, LOCAL_HEADER_BYTES = 22, 20, 30

BROKEN_ZIP = (zipfile.BadZipFile, NotImplementedError, RuntimeError, ValueError, OSError, EOFError)
"""The errors that zipfile raises for broken files."""

STORAGES = {
    "torch FloatStorage": "F32",
    "torch BFloat16Storage": "BF16",
    "torch HalfStorage": "F16",
    "torch DoubleStorage": "F64",
    "torch LongStorage": "I64",
    "torch IntStorage": "I32",
    "torch ByteStorage": "U8",
    "torch BoolStorage": "BOOL",
}
ITEM_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "F64": 8, "I64": 8, "I32": 4, "U8": 1, "BOOL": 1}
ORDERED_DICT, TENSOR, PARAMETER = (
    "collections OrderedDict",
    "torch._utils _rebuild_tensor_v2",
    "torch._utils _rebuild_parameter",
)
NAMES = {*STORAGES, ORDERED_DICT, TENSOR, PARAMETER}


@dataclass(frozen=True)
class _Name:
    """A name that the pickle mentions; it is never looked up."""

    text: str


@dataclass(frozen=True)
class _Storage:
    dtype: str
    key: str
    items: int


@dataclass(frozen=True)
class _Tensor:
    dtype: str
    shape: tuple[int, ...]


_MARK = object()


def read_pickle_header(path: Path) -> Header:
    """Tensor name -> (dtype code, shape) of a .pt file. Raises CheckpointError for anything but a
    flat dict of contiguous tensors.
    """
    entries = _checked_entries(path)
    # torch puts everything into one folder, which is named after the file.
    records = {name.split("/", 1)[1]: info for name, info in entries.items()}
    description = records.get("data.pkl")
    if description is None or description.file_size > MAX_PICKLE_BYTES:
        given = (
            "no data.pkl" if description is None else f"data.pkl of {description.file_size} bytes"
        )
        raise _damaged(path, given, f"a data.pkl of at most {MAX_PICKLE_BYTES} bytes")
    # torch writes this entry since 2.1; older files are taken to be little-endian.
    order = records.get("byteorder")
    if order is not None and (order.file_size > 16 or _entry(path, order).strip() != b"little"):
        raise _damaged(path, "big-endian numbers", "little-endian numbers")
    return _Description(path, records).read(_entry(path, description))


def read_pickle_tensors(path: Path, names: list[str]) -> dict[str, torch.Tensor]:
    """Copies of some tensors in a file that `read_pickle_header` accepts; other tensors stay on
    disk.
    """
    header = read_pickle_header(path)
    try:
        # `mmap` leaves other tensors on disk; the clones below outlive the mapping.
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        state = {name: loaded[name].detach().clone() for name in names}
    # For what it can't read, torch raises RuntimeError, UnpicklingError, KeyError and others.
    except Exception as error:
        raise _damaged(path, f"{type(error).__name__}", "a file written by torch.save") from error
    for name, tensor in state.items():
        # The file may have been replaced since its header was read.
        if tuple(tensor.shape) != header[name][1]:
            raise _damaged(
                path, f"{name} {tuple(tensor.shape)}", f"{header[name][1]}, as its description says"
            )
    require_finite(state, str(path))
    return state


# ---- the zip


def _checked_entries(path: Path) -> dict[str, zipfile.ZipInfo]:
    """The entries by name. The directory's size and what each entry claims are first checked
    against the file.
    """
    size = regular_size(path)
    _check_directory_size(path, size)
    try:
        with zipfile.ZipFile(path) as archive:
            infos = archive.infolist()
            start = archive.start_dir
    except BROKEN_ZIP as error:
        raise _damaged(path, f"{error!s:.100}", "a file written by torch.save") from error
    # Of two entries with the same name, torch might read the other one than we do.
    entries = {info.filename: info for info in infos}
    if len(entries) != len(infos):
        raise _damaged(path, "an entry twice in the zip", "each entry once")
    for name, info in entries.items():
        parts = name.split("/")
        if (
            len(parts) < 2
            or "" in parts
            or ".." in parts
            or "\\" in name
            or parts[0] != next(iter(entries)).split("/")[0]
        ):
            raise _damaged(path, f"the entry {name[:80]!r}", "entries below one folder")
        if (
            info.compress_type != zipfile.ZIP_STORED
            or info.compress_size != info.file_size
            or info.flag_bits & 1
        ):
            raise _damaged(
                path,
                f"{name[:80]!r} is compressed or encrypted ({info.file_size} bytes unpacked)",
                "stored entries only",
            )
    # A lower bound, which suffices to find an overlap: the lengths of name and extra field are left
    # out, because only the entry's own header has them.
    spans = sorted(
        (info.header_offset, info.header_offset + LOCAL_HEADER_BYTES + info.file_size)
        for info in infos
    )
    ends = [end for _, end in spans]
    # Not strict: each entry but the first is compared with the end of the previous one.
    if any(begin < end for (begin, _), end in zip(spans[1:], ends, strict=False)) or (
        ends and ends[-1] > start
    ):
        raise _damaged(
            path, "entries that overlap or leave the file", "entries one after the other"
        )
    return entries


def _entry(path: Path, info: zipfile.ZipInfo) -> bytes:
    """The bytes of a small entry, checked against their checksum."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.read(info)
    except BROKEN_ZIP as error:
        raise _damaged(path, f"{error!s:.100}", "a file written by torch.save") from error


def _check_directory_size(path: Path, size: int) -> None:
    """Bound the zip's directory before zipfile reads it whole. torch writes no comment, so the end
    record ends the file.
    """
    with path.open("rb") as handle:
        handle.seek(max(0, size - END_BYTES - LOCATOR_BYTES))
        tail = handle.read()
        end = tail[-END_BYTES:]
        locator = tail[: -END_BYTES or None]
        if len(tail) < END_BYTES or end[:4] != END_RECORD:
            raise _damaged(
                path,
                f"{size} bytes without a zip's end record",
                "a file written by torch.save (torch 1.6 or newer)",
            )
        claims = [int.from_bytes(end[12:16], "little")]
        if locator[:4] == END64_LOCATOR:
            # The position comes from the file, so it may be anything.
            handle.seek(min(size, int.from_bytes(locator[8:16], "little")))
            record = handle.read(56)
            if record[:4] != END64_RECORD:
                raise _damaged(path, "a broken zip64 end record", "a file written by torch.save")
            # torch always writes zip64, and if it is there zipfile uses only that.
            claims = [int.from_bytes(record[40:48], "little")]
    if max(claims) > min(MAX_DIRECTORY_BYTES, size):
        raise _damaged(
            path, f"a zip directory of {max(claims)} bytes", f"at most {MAX_DIRECTORY_BYTES}"
        )


# ---- the pickle


class _Description:
    """Interprets a pickle with a stack of plain values. Nothing is imported or called, and no
    number in the pickle makes us allocate memory.
    """

    def __init__(self, path: Path, records: dict[str, zipfile.ZipInfo]) -> None:
        self._path = path
        self._records = records
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._actions: dict[str, Callable[[Any], None]] = {
            **dict.fromkeys(("PROTO", "FRAME", "STOP"), lambda _: None),
            **dict.fromkeys(
                ("BINUNICODE", "SHORT_BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1"),
                self._stack.append,
            ),
            **dict.fromkeys(("BINPUT", "LONG_BINPUT"), self._put),
            **dict.fromkeys(
                ("BINGET", "LONG_BINGET"), lambda index: self._stack.append(self._memo[index])
            ),
            "MEMOIZE": lambda _: self._put(len(self._memo)),
            "MARK": lambda _: self._stack.append(_MARK),
            "NONE": lambda _: self._stack.append(None),
            "NEWTRUE": lambda _: self._stack.append(True),
            "NEWFALSE": lambda _: self._stack.append(False),
            "EMPTY_TUPLE": lambda _: self._stack.append(()),
            "EMPTY_DICT": lambda _: self._stack.append({}),
            "TUPLE": lambda _: self._stack.append(tuple(self._pop_mark())),
            "TUPLE1": lambda _: self._tuple(1),
            "TUPLE2": lambda _: self._tuple(2),
            "TUPLE3": lambda _: self._tuple(3),
            "GLOBAL": self._global,
            "BINPERSID": lambda _: self._stack.append(self._storage(self._stack.pop())),
            "REDUCE": lambda _: self._reduce(),
            "BUILD": lambda _: self._build(),
            "SETITEM": lambda _: self._set([self._stack.pop(-2), self._stack.pop()]),
            "SETITEMS": lambda _: self._set(self._pop_mark()),
        }

    def read(self, data: bytes) -> Header:
        try:
            for step, (opcode, argument, _) in enumerate(pickletools.genops(data)):
                action = self._actions.get(opcode.name)
                if action is None or step > MAX_PICKLE_STEPS:
                    raise self._refused(f"the pickle instruction {opcode.name} (step {step})")
                action(argument)
        # A damaged pickle can make our few lines fail in any way.
        except (
            ValueError,
            TypeError,
            IndexError,
            KeyError,
            AttributeError,
            RecursionError,
        ) as error:
            raise self._refused(f"a damaged description ({type(error).__name__})") from error
        if len(self._stack) != 1 or not isinstance(self._stack[0], dict):
            raise self._refused("not a dict of tensors")
        for name, value in self._stack[0].items():
            if not isinstance(name, str) or not isinstance(value, _Tensor):
                raise self._refused(f"{name!r:.80}, which is not a tensor")
        return {name: (tensor.dtype, tensor.shape) for name, tensor in self._stack[0].items()}

    def _put(self, index: int) -> None:
        self._memo[index] = self._stack[-1]

    def _pop_mark(self) -> list[Any]:
        behind = next((i for i, value in enumerate(reversed(self._stack)) if value is _MARK), None)
        if behind is None:
            raise self._refused("a missing mark")
        at = len(self._stack) - 1 - behind
        values = self._stack[at + 1 :]
        del self._stack[at:]
        return values

    def _tuple(self, count: int) -> None:
        values = tuple(self._stack[-count:])
        if len(values) != count or _MARK in values:
            raise IndexError
        self._stack[-count:] = [values]

    def _global(self, text: str) -> None:
        if text not in NAMES:
            raise self._refused(f"the name {text[:80]!r}, which loading would run")
        self._stack.append(_Name(text))

    def _storage(self, identifier: tuple[Any, ...]) -> _Storage:
        kind, name, key, _, items = identifier
        # Only text is ever written out: a tuple that holds another one twice, and so on, takes a
        # few bytes of the pickle, but its text is longer than any memory.
        if not isinstance(key, str) or len(key) > MAX_STORAGE_NAME:
            raise self._refused("a storage without a name of torch's")
        code = STORAGES[name.text]
        record = self._records.get(f"data/{key}")
        if (
            kind != "storage"
            or type(items) is not int
            or items < 0
            or record is None
            # Storages must be in the file, so that no number can make torch allocate more than the
            # file's size.
            or record.file_size != items * ITEM_BYTES[code]
        ):
            raise self._refused(f"a storage {key!r} whose bytes are not in the file")
        return _Storage(code, key, items)

    def _reduce(self) -> None:
        arguments = self._stack.pop()
        name = self._stack.pop().text
        if name == ORDERED_DICT and arguments == ():
            self._stack.append({})
        # A parameter is read as its tensor; its flags don't matter here.
        elif name == PARAMETER and isinstance(arguments[0], _Tensor):
            self._stack.append(arguments[0])
        elif name == TENSOR:
            # The other arguments (gradients, hooks, metadata) don't affect the size; they are not
            # read.
            self._stack.append(self._tensor(*arguments[:4]))
        else:
            raise self._refused(f"a call of {name}")

    def _tensor(
        self, storage: _Storage, offset: int, shape: tuple[int, ...], stride: tuple[int, ...]
    ) -> _Tensor:
        numbers = (offset, *shape, *stride)
        sound = isinstance(storage, _Storage) and len(shape) == len(stride) <= MAX_DIMENSIONS
        # `isinstance` would take True for 1.
        if not sound or any(type(n) is not int or n < 0 for n in numbers):
            raise self._refused("a tensor with an impossible size")
        # Along a dimension of length 1 any stride is right.
        contiguous = tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
        if offset + prod(shape) > storage.items or any(
            s != c for s, c, n in zip(stride, contiguous, shape, strict=True) if n > 1
        ):
            raise self._refused(
                f"a tensor of shape {shape!s:.80} that is outside its storage or not contiguous"
            )
        return _Tensor(storage.dtype, shape)

    def _build(self) -> None:
        """The state of an OrderedDict, where torch keeps the versions of modules: not read."""
        self._stack.pop()
        if not isinstance(self._stack[-1], dict):
            raise self._refused("an object with a state")

    def _set(self, values: list[Any]) -> None:
        pairs = list(zip(values[::2], values[1::2], strict=True))
        for key, value in pairs:
            # Only text: to hash a tuple, Python recurses into it without a limit of depth.
            if not isinstance(key, str):
                raise self._refused("a key that is not text")
            if key in self._stack[-1]:
                raise self._refused(f"the key {key!r:.80} twice")
            self._stack[-1][key] = value

    def _refused(self, what: str) -> CheckpointError:
        return CheckpointError(
            "The .pt file is more than a dict of tensors; it was not loaded.",
            given=f"{self._path}: {what}",
            expected="what torch.save writes for a flat state_dict",
            do="Don't load it anywhere; ask for a safetensors file.",
        )


def _damaged(path: Path, given: str, expected: str) -> CheckpointError:
    return CheckpointError(
        "The .pt file can't be read.",
        given=f"{path}: {given}",
        expected=expected,
        do="Copy it again, or save it again with torch.save.",
    )
