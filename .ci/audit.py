"""Licences and known vulnerabilities of the packages of a lock: python .ci/audit.py
requirements-cpu.txt

Licences are read from the packages that are installed. Vulnerabilities are asked of PyPI through
pip-audit (uvx), which needs a network. Exit code 1: something was found. 3: nothing was found, and
some packages could not be asked for.
"""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

PIP_AUDIT = "pip-audit==2.10.1"
TIMEOUT_S = 600
FOUND, NOT_ASKED = 1, 3
SKIPPED = "could not be audited"
PERMISSIVE = re.compile(
    r"apache|\bmit\b|\bmit-|bsd|isc|python|psf|mpl|mozilla|unlicense|zlib|hpnd|public"
    r" domain|0bsd|cc0|boost",
    re.IGNORECASE,
)
STRICT = re.compile(r"\b[al]?gpl|affero|gnu |proprietary|non-?commercial|nvidia", re.IGNORECASE)
"""Licences that ask something of who ships the package, and those that may; each is printed to be
looked at.
"""


def pinned(lock: Path) -> list[str]:
    return re.findall(r"^([A-Za-z0-9._-]+)==", lock.read_text(encoding="utf-8"), re.MULTILINE)


def licence(name: str) -> str | None:
    """As the package says it, in one line; None when it is not installed here."""
    try:
        metadata = importlib.metadata.metadata(name)
    except importlib.metadata.PackageNotFoundError:
        return None
    classifiers = [
        text.split(" :: ")[-1]
        for text in metadata.get_all("Classifier") or []
        if text.startswith("License ::")
    ]
    said = (
        metadata.get("License-Expression")
        or ", ".join(classifiers)
        or (metadata.get("License") or "").strip().partition("\n")[0]
    )
    return said[:100] or "unknown"


def licences(names: list[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Licence -> packages; and the packages that are not installed."""
    by_licence = defaultdict(list)
    missing = []
    for name in names:
        said = licence(name)
        if said is None:
            missing.append(name)
        else:
            by_licence[said].append(name)
    return dict(by_licence), missing


def to_look_at(by_licence: dict[str, list[str]]) -> list[str]:
    return sorted(said for said in by_licence if STRICT.search(said) or not PERMISSIVE.search(said))


def vulnerabilities(lock: Path) -> tuple[int, int]:
    """How many of the lock's packages were asked for, and pip-audit's exit code. A mirror may know
    names and no advisories.
    """
    uvx = shutil.which("uvx", path=f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin")
    if uvx is None:
        return 0, 0
    command = [
        uvx,
        PIP_AUDIT,
        "--no-deps",
        "--disable-pip",
        "--progress-spinner",
        "off",
        "-r",
        str(lock),
    ]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return 0, 0
    if not re.search("No known vulnerabilities found|Found [0-9]+ known", done.stderr):
        sys.stderr.write(done.stderr[-500:] + "\n")
        return 0, 0
    sys.stdout.write(
        "".join(line + "\n" for line in done.stdout.splitlines() if SKIPPED not in line)
    )
    return len(pinned(lock)) - done.stdout.count(SKIPPED), done.returncode


def main(lock: Path) -> int:
    by_licence, missing = licences(pinned(lock))
    strict = to_look_at(by_licence)
    for said, names in sorted(by_licence.items()):
        sys.stdout.write(
            f"{'LOOK  ' if said in strict else '      '}{said:<60} {', '.join(sorted(names))}\n"
        )
    if missing:
        sys.stdout.write(f"Not installed here, so not looked at: {', '.join(missing)}\n")
    sys.stdout.write(
        f"{sum(map(len, by_licence.values()))} packages, {len(by_licence)} licences, {len(strict)}"
        " to look at.\n"
    )
    asked, found = vulnerabilities(lock)
    sys.stdout.write(
        f"Known vulnerabilities: asked for {asked} of {len(pinned(lock))} packages,"
        f" {'some' if found else 'none'} found.\n"
    )
    if found:
        return FOUND
    return 0 if asked == len(pinned(lock)) else NOT_ASKED


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
