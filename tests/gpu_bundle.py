"""The CUDA environment as one folder, small enough to carry to a machine with a GPU that reaches no
package index: torch and vLLM as `requirements-cuda.txt` pins them, with the device code of one
kind of GPU.

    python tests/gpu_bundle.py OUT [--python 3.12] [--capability 90]
    tar -C OUT -c . | zstd -19 -T0 --long=27 > site.tar.zst     # some 0.5 GB

There, unpack it and put the folder first on the path: a `.pth` file in the machine's site-packages
with `import sys; sys.path.insert(0, "FOLDER")`, so that every child process finds it. Link the
machine's own `nvidia` libraries of the same CUDA into `FOLDER/nvidia`. With these, and without
FlashInfer, set PYTORCH_SKIP_CUDNN_COMPATIBILITY_CHECK=1 and VLLM_USE_FLASHINFER_SAMPLER=0.
"""

from __future__ import annotations

import argparse
import mmap
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements-cuda.txt"
LEFT_OUT = (
    # On a machine with CUDA, or big and used by no test.
    *("nvidia-", "cuda-", "tilelang", "z3-solver", "tokenspeed", "humming", "flashinfer", "quack"),
    *("torchcodec", "pynvvideocodec", "playwright", "mypy", "ruff", "instanttensor", "nccl"),
)
KEPT = ("nvidia-nccl-cu13",)
UNREAD = ("triton/backends/nvidia/lib/cupti/*.a", "triton/_C/libproton.so", "torch/include")
"""Parts that only builds and profilers read."""
BEGIN = struct.pack("<IHH", 0xBA55ED50, 1, 16)
"""Magic number, version and header size of a container of device code (a fatbin)."""
PTX, CUBIN = 1, 2


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--python", default="3.12", help="of the machine with the GPU")
    parser.add_argument("--capability", type=int, default=90, help="of its GPU: 90 for an H100")
    options = parser.parse_args()
    install(options.out, options.python)
    for pattern in UNREAD:
        for path in options.out.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for path in sorted(options.out.rglob("*.so*")):
        if path.is_file() and not path.is_symlink() and (gone := prune(path, options.capability)):
            sys.stdout.write(f"{path.relative_to(options.out)}: {gone >> 20} MiB for other GPUs\n")


def install(out: Path, python: str) -> None:
    """The pinned packages, for another Python if need be."""
    pins = [line.split(" ")[0] for line in LOCK.read_text().splitlines() if "==" in line]
    wanted = [pin for pin in pins if pin.startswith(KEPT) or not pin.startswith(LEFT_OUT)]
    command = [str(Path(sys.executable).with_name("uv")), "pip", "install", "-q", "--no-config"]
    # Not links into its cache: files are written below.
    command += ["--link-mode", "copy"]
    command += ["--target", str(out), "--python-version", python, "--no-deps"]
    command += ["--python-platform", "x86_64-manylinux_2_39", "--only-binary", ":all:"]
    subprocess.run([*command, *(re.sub(r"[\\;].*", "", pin).strip() for pin in wanted)], check=True)


def prune(path: Path, capability: int) -> int:
    """Overwrite with zeros what a GPU of this capability does not run; it then compresses to
    nothing, and nothing moves. Where a container has no machine code for it, the newest PTX that
    the driver can translate stays. Returns the number of bytes.
    """
    gone = 0
    if path.stat().st_size < len(BEGIN):
        return gone
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as code:
        for parts in containers(code):
            native = any(kind == CUBIN and of == capability for kind, of, _, _ in parts)
            newest = max(
                (of for kind, of, _, _ in parts if kind == PTX and of <= capability), default=0
            )
            for kind, of, start, size in parts:
                stays = of == capability if kind == CUBIN else not native and of == newest
                if kind in (PTX, CUBIN) and not stays:
                    code[start : start + size] = bytes(size)
                    gone += size
    return gone


def containers(code: mmap.mmap) -> Iterator[list[tuple[int, int, int, int]]]:
    """Of each container its parts: kind, capability, where its code starts, and its size."""
    at = code.find(BEGIN)
    while at >= 0:
        place = at + 16
        end = place + struct.unpack_from("<Q", code, at + 8)[0]
        parts = []
        while place < end <= len(code):
            kind, _, header, size = struct.unpack_from("<HHIQ", code, place)
            if not 32 <= header <= 4096 or place + header + size > end:
                parts = []  # These bytes only look like one.
                break
            capability = struct.unpack_from("<I", code, place + 28)[0]
            parts.append((kind, capability, place + header, size))
            place += header + size
        if parts:
            yield parts
        at = code.find(BEGIN, end if parts else at + 4)


if __name__ == "__main__":
    main()
