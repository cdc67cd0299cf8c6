"""The wheel holds all that the product needs, and its commands run outside of a checkout; the audit
reads licences.
"""

from __future__ import annotations

import itertools
import os
import re
import runpy
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from medusa_ppo import __version__

ROOT = Path(__file__).resolve().parents[1]
BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"
OLD_RUN = ROOT / "tests" / "medusa_ppo" / "ppo" / "old_run.tar.gz"


def tracked() -> list[str]:
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    return [name for name in listed if (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of the tracked files."""
    if not (ROOT / ".git").exists():
        pytest.skip("no checkout")
    copy = tmp_path_factory.mktemp("copy")
    out = tmp_path_factory.mktemp("dist")
    for name in tracked():
        if name.startswith(("heads/", "medusa_ppo/", "configs/")) or "/" not in name:
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((ROOT / name).read_bytes())
    subprocess.run(
        [sys.executable, "-c", BUILD, str(out)], cwd=copy, check=True, capture_output=True
    )
    return next(out.glob("*.whl"))


def test_everything_is_in_it(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    share = f"medusa_ppo-{__version__}.data/data/share/medusa-ppo/"
    wanted = {name for name in tracked() if name.startswith(("heads/", "medusa_ppo/"))}
    wanted |= {share + name for name in tracked() if name.startswith("configs/")}
    assert not wanted - set(names)
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/", "examples/"))]


@pytest.mark.slow
def test_its_commands_run_outside_of_a_checkout(wheel: Path, tmp_path: Path) -> None:
    home = tmp_path / "env"
    venv.create(home, with_pip=False)
    site = next((home / "lib").glob("python*")) / "site-packages"
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(site)
    data = site / f"medusa_ppo-{__version__}.data" / "data" / "share"
    data.rename(home / "share")
    (site / "others.pth").write_text(
        sysconfig.get_path("purelib") + "\n"
    )  # torch and the others, behind the wheel's own.
    run_dir = tmp_path / "run"
    with tarfile.open(OLD_RUN) as archive:
        archive.extractall(run_dir, filter="data")
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*words: str) -> str:
        code = (
            "import medusa_ppo, sys; sys.stderr.write(medusa_ppo.__file__); from medusa_ppo.cli"
            " import main; main()"
        )
        done = subprocess.run(
            [home / "bin" / "python", "-c", code, *words],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0 and str(site) in done.stderr, done.stdout + done.stderr
        return done.stdout

    assert __version__ in run("--version")
    assert "engine" in run("plan", "--config", "demo")
    assert (
        "Report" in run("report", str(run_dir)) and "<svg" in (run_dir / "report.html").read_text()
    )


def test_the_version_stands_in_the_changelog() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## (\d+\.\d+\.\d+)", text, re.MULTILINE)
    assert versions == sorted(versions, reverse=True)
    # The section above the newest release collects what is not released yet.
    released = re.findall(r"^## (\d+\.\d+\.\d+) - \d{4}-\d{2}-\d{2}$", text, re.MULTILINE)
    assert released[0] == __version__


def test_the_audit_reads_each_packages_licence(tmp_path: Path) -> None:
    audit = runpy.run_path(str(ROOT / ".ci" / "audit.py"))
    lock = tmp_path / "lock.txt"
    lock.write_text("# a comment\nnumpy==2.3.0\nhttpx==0.28.1\nno-such-package==1\n")
    by_licence, missing = audit["licences"](audit["pinned"](lock))
    assert missing == ["no-such-package"] and sorted(itertools.chain(*by_licence.values())) == [
        "httpx",
        "numpy",
    ]
    assert audit["to_look_at"](
        {"AGPL-3.0": ["x"], "MIT": ["y"], "unknown": ["z"], "BSD License": ["w"]}
    ) == ["AGPL-3.0", "unknown"]
