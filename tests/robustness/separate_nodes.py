"""Nodes of a cluster, on one machine, that share as little as real ones: each has its own network
(joined by a cable that can be pulled), /dev/shm, /tmp, process numbers and host name. Needs root
and Linux's namespaces. The file system apart from /tmp is shared, for the checkout and its
environment, and /mnt is one folder for all nodes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

import psutil

ROOT = Path(__file__).resolve().parents[2]
NEEDED = ("setpriv", "unshare", "nsenter", "ip", "mount")
START_S = 20.0
NETWORK = "10.231.77"
"""Addresses of the nodes; in their own networks, so that they can't collide with the machine's."""
OUTSIDE = "8.8.8.8"
"""Ray and vLLM look up their own address by the route to this one. Nothing is sent."""
# As the first process of the node it also has to reap what is left to it, which `sleep` would not.
SETUP = """
set -e
hostname "$1"
mount --bind "$2/tmp/hosts" /etc/hosts
mount -t tmpfs tmpfs /dev/shm
mount --bind "$2/../shared" /mnt
mount --bind "$2/tmp" /tmp
ip link set lo up
ip address add "$3/32" dev lo
touch /tmp/up
while sleep 1; do :; done
"""


def why_not() -> str:
    """Why this machine can't have such nodes; empty if it can."""
    if os.geteuid() != 0:
        return "needs root, for namespaces of its own"
    if missing := [name for name in NEEDED if shutil.which(name) is None]:
        return f"needs the commands {', '.join(missing)}"
    for path in (ROOT, Path(sys.prefix).resolve()):
        if path.is_relative_to(tempfile.gettempdir()):
            return f"needs a checkout outside of {tempfile.gettempdir()}, which nodes do not share"
    tried = subprocess.run(
        [
            *("unshare", "--net", "--mount", "--pid", "--uts", "--ipc", "--fork", "--mount-proc"),
            *("sh", "-c", "mount -t tmpfs tmpfs /dev/shm && ip link add name a type veth"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    return f"namespaces are not permitted here: {tried.stderr.strip()}" if tried.returncode else ""


class SeparateNode:
    """One node. Whatever runs on it ends with it.

    Attributes:
        name: its host name.
        address: its address in the nodes' network.
        tmp: the folder that it sees as /tmp.
    """

    def __init__(self, name: str, number: int, folder: Path, names: Mapping[str, str]) -> None:
        self.name = name
        self.address = f"{NETWORK}.{number}"
        self.tmp = folder / "tmp"
        self.tmp.mkdir(parents=True, exist_ok=True)
        hosts = "".join(f"{address} {name}\n" for name, address in names.items())
        (self.tmp / "hosts").write_text(f"127.0.0.1 localhost\n{hosts}")
        (self.tmp / "up").unlink(missing_ok=True)
        kinds = ("--net", "--mount", "--pid", "--uts", "--ipc", "--mount-proc")
        with (self.tmp / "node.log").open("wb") as log:
            self._unshare = subprocess.Popen(
                [
                    # If this process ends, however it does, the node ends too.
                    *("setpriv", "--pdeathsig", "KILL"),
                    *("unshare", *kinds, "--fork", "--kill-child"),
                    *("sh", "-c", SETUP, "sh", name, str(folder), self.address),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self._until_up()
        except BaseException:
            self.end()
            raise

    def _until_up(self) -> None:
        deadline = time.monotonic() + START_S
        while not (self.tmp / "up").exists():
            assert self._unshare.poll() is None, self.log("node.log")
            assert time.monotonic() < deadline, f"{self.name} did not come up"
            time.sleep(0.05)

    @property
    def first_process(self) -> int:
        """Its id on the machine."""
        (child,) = psutil.Process(self._unshare.pid).children()
        return child.pid

    def command(self, *words: str) -> list[str]:
        """The command that runs a command on this node."""
        kinds = ("--net", "--mount", "--pid", "--uts", "--ipc")
        return ["nsenter", "-t", str(self.first_process), *kinds, "--wd=/tmp", *words]

    def run(self, *words: str) -> str:
        """Run a short command; its output. Fails with what it wrote."""
        done = subprocess.run(
            self.command(*words), capture_output=True, text=True, check=False, timeout=120
        )
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    def start(
        self, log: str, words: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a command that ends with the node.

        Args:
            log: name of the file in /tmp that gets its output.
            environment: added to that of this process.
        """
        with (self.tmp / log).open("ab") as file:
            return subprocess.Popen(
                self.command(*words),
                env={**os.environ, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def log(self, name: str, end: int = 4000) -> str:
        """The end of a log."""
        path = self.tmp / name
        return path.read_text(errors="replace")[-end:] if path.exists() else f"no {name}"

    def cable(self, plugged: bool) -> None:
        """Plug its cable in, or pull it: packets are lost, connections stay open."""
        self.run("ip", "link", "set", "cable", "up" if plugged else "down")
        if plugged:
            # They go with the link.
            self.add_routes()

    def add_routes(self) -> None:
        for place in (f"{NETWORK}.0/24", OUTSIDE):
            self.run("ip", "route", "replace", place, "dev", "cable", "src", self.address)

    def end(self) -> None:
        """As if it lost its power. Safe to call again."""
        try:
            # All others end with the first of its processes, and before it.
            os.kill(self.first_process, signal.SIGKILL)
        except (psutil.NoSuchProcess, ValueError):
            self._unshare.kill()
        self._unshare.wait()


class SeparateNodes:
    """A head node, and one other that can go away and come back.

    Attributes:
        shared: the folder that both see as /mnt.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.shared = folder / "shared"
        self.shared.mkdir()
        self._names = {"head": f"{NETWORK}.1", "other": f"{NETWORK}.2"}
        self.head = SeparateNode("head", 1, folder / "head", self._names)
        self.other: SeparateNode
        try:
            self.bring()
        except BaseException:
            self.head.end()
            raise

    def bring(self) -> SeparateNode:
        """The other node, and the cable between the two. Its /tmp stays as it was."""
        self.other = SeparateNode("other", 2, self._folder / "other", self._names)
        try:
            subprocess.run(
                [
                    *("ip", "link", "add", "name", "cable"),
                    *("netns", str(self.head.first_process), "type", "veth"),
                    *("peer", "name", "cable", "netns", str(self.other.first_process)),
                ],
                check=True,
            )
            for node in (self.head, self.other):
                node.cable(True)
        except BaseException:
            self.other.end()
            raise
        return self.other

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.other.end()
        self.head.end()


@contextlib.contextmanager
def separate_nodes() -> Iterator[SeparateNodes]:
    """Two nodes, which end with the block, and whatever they wrote with them."""
    with (
        tempfile.TemporaryDirectory(prefix="mppo-nodes-") as folder,
        SeparateNodes(Path(folder)) as nodes,
    ):
        yield nodes
