"""Reads and writes safetensors files: atomic, checked against their own header, finite, without
pickle.

Files from disk are treated as hostile: the header's claims are compared with the file's size before
anything is allocated.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from heads.errors import CheckpointError

MAX_HEADER_BYTES = 16 << 20
PAGE, WORD = 4096, 8
"""Size of a page in `page_sums`, and the bytes that it sums at a time."""
MAX_HEADS_HEADER_BYTES = 1 << 20
"""Maximum size of a heads file's header: room for 8,000 tensors. Parsing JSON takes about 50 times
its size, so this also bounds memory.
"""
FLOAT_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
STATE_DTYPES = {
    **FLOAT_DTYPES,
    "F64": torch.float64,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}

CODES = {dtype: code for code, dtype in STATE_DTYPES.items()}

Header = dict[str, tuple[str, tuple[int, ...]]]


def save_state(path: str | Path, state: Mapping[str, torch.Tensor]) -> None:
    """Write tensors to one safetensors file, atomically; no NaN or infinity."""
    with StateWriter(
        path, {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in state.items()}
    ) as writer:
        for name, tensor in state.items():
            writer.put(name, tensor)


def write_summed(
    path: str | Path,
    entries: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    tensors: Iterable[tuple[str, torch.Tensor]],
    over: Path | None = None,
) -> str:
    """Write tensors that come in any order, see `StateWriter`; returns the `checksum` that the file
    must have. Taken from memory, it shows damage by the writing, too.
    """
    with StateWriter(path, entries, over=over, summed=True) as writer:
        for name, tensor in tensors:
            writer.put(name, tensor)
    return joint_checksum(writer.digests)


class StateWriter:
    """Writes a safetensors file tensor by tensor, in any order, so that the whole state is never in
    memory. A context manager.

    The complete file appears when the block succeeds.

    Attributes:
        digests: `tensor_digest` of each tensor that was written, if they are `summed`.
    """

    def __init__(
        self,
        path: str | Path,
        entries: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
        *,
        over: Path | None = None,
        summed: bool = False,
    ) -> None:
        """
        Args:
            path: where the file goes.
            entries: dtype and shape of every tensor to be written.
            over: a file that nobody reads, on the same file system, which becomes this one. In
                memory that is faster than a new file, whose pages have to be found and cleared.
            summed: the tensors' digests are needed.
        """
        self.path = Path(path)
        self._over = over
        self.digests = dict[str, str]()
        self._summed = summed
        self._entries = entries
        self._waiting = set(entries)
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self._starts: dict[str, int] = {}
        end = 0
        # Wide types come first, as in safetensors, so that every tensor is aligned for its type.
        for name in sorted(entries, key=lambda name: (-entries[name][0].itemsize, name)):
            dtype, shape = entries[name]
            self._starts[name], end = end, end + dtype.itemsize * math.prod(shape)
            header[name] = {
                "dtype": CODES[dtype],
                "shape": list(shape),
                "data_offsets": [self._starts[name], end],
            }
        text = json.dumps(header, separators=(",", ":")).encode()
        # Padded like safetensors, so that the data begin at a multiple of 8 and can be
        # memory-mapped.
        text += b" " * (-len(text) % 8)
        self._header = len(text).to_bytes(8, "little") + text
        self.nbytes = len(self._header) + end

    def __enter__(self) -> StateWriter:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self._over is None:
            handle, self._temporary = tempfile.mkstemp(
                prefix=f".{self.path.name}.new-", dir=self.path.parent
            )
        else:
            handle, self._temporary = os.open(self._over, os.O_WRONLY), str(self._over)
        self._file = os.fdopen(handle, "wb")
        try:
            self._file.write(self._header)
            # Tensors arrive in any order; each has its own place.
            self._file.truncate(self.nbytes)
        except OSError:  # The disk has no room even for this.
            Path(self._temporary).unlink()
            raise
        return self

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Write one tensor, in the dtype of its entry. Raises CheckpointError if it is unexpected
        or not finite.
        """
        dtype, shape = self._entries.get(name, (None, None))
        if name not in self._waiting or tuple(tensor.shape) != shape:
            given = f"{name} {tuple(tensor.shape)}"
            expected = f"shape {shape}, once"
            raise CheckpointError(
                "A tensor does not belong in the file.",
                given=given,
                expected=expected,
                do="Report this.",
            )
        tensor = tensor.detach().to("cpu", dtype)
        require_finite({name: tensor}, "the state to save")
        self._file.seek(len(self._header) + self._starts[name])
        self._file.write(_bytes(tensor))
        if self._summed:
            self.digests[name] = tensor_digest(name, tensor)
        self._waiting.remove(name)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._file.flush()
            # Before the rename, which may otherwise reach the disk before the bytes do.
            os.fsync(self._file.fileno())
            self._file.close()
            if kind is None and self._waiting:
                given = f"{len(self._waiting)} missing, e.g. {min(self._waiting)}"
                raise CheckpointError(
                    "The file is not complete.",
                    given=given,
                    expected="every announced tensor",
                    do="Report this.",
                )
            if kind is None:
                # mkstemp makes a private file, but other users read weights.
                os.chmod(self._temporary, 0o644)
                os.replace(self._temporary, self.path)
        finally:
            Path(self._temporary).unlink(missing_ok=True)


def sha256_of(state: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 (hex) over sorted names, dtypes, shapes and bytes, as in a folder of heads
    (FORMAT.md). It takes a second per GiB, so it is used for stored files, not for data in transit.
    """
    digest = hashlib.sha256()
    for name in sorted(state):
        digest.update(_title(name, state[name].dtype, state[name].shape))
        digest.update(_bytes(state[name]))
    return digest.hexdigest()


def _title(name: str, dtype: torch.dtype, shape: Sequence[int]) -> bytes:
    return f"{name}|{str(dtype).removeprefix('torch.')}|{tuple(shape)}|".encode()


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


# ---- checksums of data in transit: at the speed of memory, on the tensor's device


def checksum(state: Mapping[str, torch.Tensor]) -> str:
    """`joint_checksum` (hex) of complete tensors; the device does not matter."""
    return joint_checksum({name: tensor_digest(name, tensor) for name, tensor in state.items()})


def joint_checksum(digests: Mapping[str, str]) -> str:
    """Checksum over the `tensor_digest` of each name, sorted. It suits tensors that arrive in any
    order, and never all at once.
    """
    return hashlib.sha256("".join(digests[name] for name in sorted(digests)).encode()).hexdigest()


def tensor_digest(name: str, tensor: torch.Tensor) -> str:
    """Digest of one tensor's name, dtype, shape and bytes."""
    return digest_of_sums(name, tensor.dtype, tensor.shape, page_sums(tensor))


def digest_of_sums(
    name: str, dtype: torch.dtype, shape: Sequence[int], sums_P: torch.Tensor
) -> str:
    """`tensor_digest` of a tensor whose `page_sums` are known."""
    return hashlib.sha256(_title(name, dtype, shape) + bytes(_bytes(sums_P))).hexdigest()


def page_sums(tensor: torch.Tensor) -> torch.Tensor:
    """Sums of the 8-byte words of each `PAGE` of a tensor's bytes, int64 that wraps; the last page
    is padded with zeros.

    A changed byte changes its page's sum, and swapped or foreign pages show as well; that is how
    memory, files and networks fail. One pass reads the tensor where it is; then only one word in
    512 is hashed.
    """
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if flat.storage_offset() % WORD:
        flat = flat.clone()
    whole = flat.numel() // PAGE * PAGE
    sums_P = flat[:whole].view(torch.int64).view(-1, PAGE // WORD).sum(1)
    if whole == flat.numel():
        return sums_P
    last = flat.new_zeros(PAGE)
    last[: flat.numel() - whole] = flat[whole:]
    return torch.cat([sums_P, last.view(torch.int64).sum().view(1)])


def crc(state: Mapping[str, torch.Tensor]) -> int:
    """CRC-32 over the bytes in the order of sorted names."""
    value = 0
    for name in sorted(state):
        value = zlib.crc32(_bytes(state[name]), value)
    return value


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether there is no NaN or infinity among floating-point values. Checked by their extremes,
    which propagate both, in an eighth of `isfinite`'s time.
    """
    return not tensor.numel() or bool(
        torch.isfinite(torch.stack(torch.aminmax(tensor.detach()))).all()
    )


def require_finite(tensors: Mapping[str, torch.Tensor], what: str) -> None:
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not is_finite(tensor):
            do = "Train with a smaller step size."
            raise CheckpointError(
                f"NaN or infinity in {what}.", given=name, expected="finite numbers", do=do
            )


def load_state(path: str | Path, *, finite: bool = False) -> dict[str, torch.Tensor]:
    """Read a file written by `save_state`. Raises CheckpointError if it is damaged or contains NaN
    or infinity.

    Args:
        finite: the values have already been checked for NaN and infinity.
    """
    path = Path(path)
    header = read_header(path)
    for name, (dtype, _) in header.items():
        if dtype not in STATE_DTYPES:
            raise _damaged(
                "A tensor has a dtype that is not supported.",
                f"{name} {dtype}",
                " | ".join(STATE_DTYPES),
                "Convert it.",
            )
    return read_tensors(path, list(header), finite=finite)


def read_regular(path: Path, limit: int) -> bytes:
    """The content of a small regular file; a device or pipe is refused unopened."""
    size = regular_size(path)
    # The size is checked before opening, since reading a pipe or a device might never end.
    if size > limit:
        do = "This is not a heads checkpoint."
        raise _damaged(
            "A file of the checkpoint is too large.", f"{path}: {size} bytes", f"<= {limit}", do
        )
    return path.read_bytes()


def regular_size(path: Path) -> int:
    """Bytes of a file; a device, a pipe or a folder is refused unopened."""
    try:
        status = path.stat()
    except OSError as error:
        raise _damaged(
            "A file of the checkpoint is missing.", path, "a readable file", "Check the path."
        ) from error
    if not stat.S_ISREG(status.st_mode):
        raise _damaged(
            "A file of the checkpoint is not a plain file.", path, "a plain file", "Check the path."
        )
    return status.st_size


def parse_json(data: bytes, path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(data.decode("utf-8"), object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise _damaged(
            "A file of the checkpoint is damaged.", f"{path}: {error}", "JSON"
        ) from error
    if not isinstance(raw, dict):
        raise _damaged(
            "A file of the checkpoint is damaged.", f"{path}: {type(raw).__name__}", "a JSON object"
        )
    return raw


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # Readers differ in which of two equal keys they use; the checked one may not be the used one.
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("a key appears twice")
    return out


def file_inside(folder: Path, name: str) -> Path:
    """The file `name` of a folder. It must be a plain name, and not a link that leads out of the
    folder.

    A hub cache links its snapshots' files to blobs beside them (snapshots/REVISION/NAME ->
    blobs/DIGEST): those links are followed.
    """
    path = folder / name
    if not name or name != Path(name).name or name in (".", "..") or "\0" in name:
        raise _damaged(
            "A file's name is a path.",
            repr(name[:80]),
            "a file name without folders",
            "Don't trust this folder.",
        )
    home = folder.resolve()
    home = home.parent.parent if home.parent.name == "snapshots" else home
    if path.is_symlink() and not path.resolve().is_relative_to(home):
        raise _damaged(
            "A file of the folder is a link that leads out of it.",
            path,
            "a plain file",
            "Copy the file itself.",
        )
    return path


def _damaged(
    problem: str, given: object, expected: str, do: str = "Copy it again."
) -> CheckpointError:
    return CheckpointError(problem, given=given, expected=expected, do=do)


def read_header(path: Path, limit: int = MAX_HEADER_BYTES) -> Header:
    """Tensor name -> (dtype code, shape), after checking that the header's own claims fit the
    file's size.
    """
    size = regular_size(path)
    with path.open("rb") as handle:
        # The first eight bytes give the header's length, and may contain anything.
        length = int.from_bytes(handle.read(8), "little")
        if size < 8 or length > min(limit, size - 8):
            problem = "The file is incomplete, not a safetensors file, or has too large a header."
            raise _damaged(problem, f"{path}: {size} bytes, header {length}", "a whole file")
        raw = parse_json(handle.read(length), path)
    raw.pop("__metadata__", None)
    with _opened(path) as file:
        # The library checks the header's entries against the file, and allocates nothing.
        slices = {name: file.get_slice(name) for name in raw}
        return {
            name: (found.get_dtype(), tuple(found.get_shape())) for name, found in slices.items()
        }


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Raise CheckpointError for a file that safetensors rejects."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            yield file
    # The last two: impossibly large sizes.
    except (SafetensorError, OSError, MemoryError, RuntimeError) as error:
        raise _damaged(
            "The file is incomplete or damaged.",
            f"{path}: {error!s:.200}",
            "a whole safetensors file",
        ) from error


def read_tensors(path: Path, names: list[str], *, finite: bool = False) -> dict[str, torch.Tensor]:
    with _opened(path) as file:
        state = {name: file.get_tensor(name) for name in names}
    if not finite:
        require_finite(state, str(path))
    return state
