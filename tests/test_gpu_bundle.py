"""Device code of other GPUs is overwritten; everything else stays, and where it was."""

from __future__ import annotations

import struct
from pathlib import Path

from tests.gpu_bundle import BEGIN, CUBIN, PTX, prune


def part(kind: int, capability: int, code: bytes) -> bytes:
    header = struct.pack("<HHIQ", kind, 0x101, 64, len(code))
    return header + bytes(12) + struct.pack("<I", capability) + bytes(32) + code


def container(*parts: bytes) -> bytes:
    body = b"".join(parts)
    return BEGIN + struct.pack("<Q", len(body)) + body


def test_what_one_kind_of_gpu_runs_stays(tmp_path: Path) -> None:
    def library(*codes: bytes) -> bytes:
        first, second, third, fourth, fifth, sixth = codes
        return (
            b"\x7fELF host code "
            + container(part(CUBIN, 80, first), part(CUBIN, 90, second), part(PTX, 80, third))
            + b"more host code"
            # Without machine code for it: the newest PTX that is not too new.
            + container(part(PTX, 75, fourth), part(PTX, 80, fifth), part(PTX, 100, sixth))
            + BEGIN
            + b"not a container"
        )

    codes = [bytes([number]) * 24 for number in range(1, 7)]
    path = tmp_path / "lib.so"
    path.write_bytes(library(*codes))
    zeros = bytes(24)
    assert prune(path, 90) == 4 * 24
    assert path.read_bytes() == library(zeros, codes[1], zeros, zeros, codes[4], zeros)
    path.write_bytes(b"")
    assert prune(path, 90) == 0
