"""Run by a test in a process of its own: reads files that want to do harm, with 64 MiB of address
space to spare and every event watched.

Arguments: a JSON list of [name, reader, path], a folder to write into. Prints one JSON object: name
-> {error, message, events}.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path

import torch

from heads.checkpoint import load_heads
from heads.errors import CheckpointError
from medusa_ppo.offline.convert import convert

SPARE_BYTES = 64 << 20
WATCHED = (
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.fork",
    "subprocess.Popen",
    "exec",
    "compile",
    "import",
    "socket.connect",
    "shutil.rmtree",
)
events: list[str] = []


def address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def settle() -> None:
    """Wait until threads of the warm-up have given their stacks back: what they hold would be to
    spare later.
    """
    seen = [0, 1, 2]
    while len(set(seen[-3:])) > 1:
        time.sleep(0.1)
        seen.append(address_space())


def read(reader: str, path: Path, out: Path) -> None:
    if reader == "native":
        load_heads(path)
    elif reader == "greedy":  # the control: what a reader without checks would do
        bytearray(SPARE_BYTES + (8 << 20))
    else:
        convert(path, out, "vllm")


def attempt(reader: str, path: Path, out: Path) -> dict[str, object]:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    events.clear()
    resource.setrlimit(resource.RLIMIT_AS, (address_space() + SPARE_BYTES, hard))
    try:
        read(reader, path, out)
        result = {"error": "", "message": "read without a word"}
    except CheckpointError as error:
        result = {"error": "CheckpointError", "message": str(error)}
    except BaseException as error:
        result = {"error": type(error).__name__, "message": str(error)[:300]}
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    return {**result, "events": sorted(set(events)), "wrote": out.exists()}


def main(files: str, out: str) -> None:
    torch.set_num_threads(1)
    listed = json.loads(files)
    for _, reader, path in (
        entry for entry in listed if entry[0].startswith("sound")
    ):  # everything that loads late is loaded now
        read(reader, Path(path), Path(out) / f"warm-{reader}-{Path(path).name}")
    settle()
    sys.addaudithook(lambda event, _: events.append(event) if event in WATCHED else None)
    results = {
        name: attempt(reader, Path(path), Path(out) / "target")
        for name, reader, path in listed
        if not name.startswith("sound")
    }
    sys.stdout.write("\n" + json.dumps(results) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
