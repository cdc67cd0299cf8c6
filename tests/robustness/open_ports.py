"""Which ports does a run open, and who reaches them? Exit code 1 when a process of ours listens
outside of loopback.

    python tests/robustness/open_ports.py medusa-ppo demo --steps 1

Every 0.2 s the listening sockets of the command and of all its descendants are read from the
system, until it ends. Ray's processes are known by their names (`raylet`, `gcs_server`,
`ray::...`). One socket of the driver and of each Ray worker is Ray's own (its core worker's gRPC);
what a process opens beyond that, other than on loopback, is torch's or vLLM's or ours, and counts
against us.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter, defaultdict

import psutil

EVERY_S = 0.2
RAY = ("raylet", "gcs_server", "ray::", "log_monitor", "dashboard")
LOOPBACK = ("127.0.0.1", "::1", "::ffff:127.0.0.1")


def listeners(root: psutil.Process) -> set[tuple[int, str, str, int]]:
    """(process, its name, address, port) of every listening TCP socket of a process and its
    descendants.
    """
    found = set()
    for process in [root, *root.children(recursive=True)]:
        try:
            name = " ".join(process.cmdline())[:60] or process.name()
            for socket in process.net_connections(kind="tcp"):
                if socket.status == psutil.CONN_LISTEN:
                    found.add((process.pid, name, socket.laddr.ip, socket.laddr.port))
        except psutil.Error:
            continue  # It ended meanwhile.
    return found


def main() -> int:
    if len(sys.argv) < 2:
        sys.exit(
            "No command. given: nothing"
            "  expected: python tests/robustness/open_ports.py COMMAND..."
            "  do this: name the run to watch"
        )
    run = subprocess.Popen(sys.argv[1:])
    root = psutil.Process(run.pid)
    seen = set()
    while run.poll() is None:
        seen |= listeners(root)
        time.sleep(EVERY_S)
    wide = defaultdict(set)
    for pid, name, address, port in seen:
        if address not in LOOPBACK:
            wide[pid, name].add((address, port))
    write = sys.stdout.write
    ours = 0
    for (pid, name), sockets in sorted(wide.items()):
        rays = (
            len(sockets) if any(part in name for part in RAY[:2] + RAY[3:]) or "ray/" in name else 1
        )
        extra = max(0, len(sockets) - rays)
        ours += extra
        where = ", ".join(f"{address}:{port}" for address, port in sorted(sockets))
        write(
            f"{pid:>8}  {name:<60}  outside of loopback: {where} (Ray's: {len(sockets) - extra},"
            f" others: {extra})\n"
        )
    owners = Counter(
        name.split()[0].rpartition("/")[2] for _, name, address, _ in seen if address in LOOPBACK
    )
    write(
        "on loopback:"
        f" {', '.join(f'{name} {count}' for name, count in sorted(owners.items())) or 'nothing'}\n"
    )
    write(
        f"{len(seen)} listening sockets, {sum(map(len, wide.values()))} outside of loopback, {ours}"
        " of them not Ray's\n"
    )
    return run.returncode or bool(ours)


if __name__ == "__main__":
    sys.exit(main())
