"""A loop of an unknown version is refused at the start, in one sentence that says what to do."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata

import pytest

from heads.errors import UnsupportedVersionError
from medusa_ppo.loops.loop_versions import CHECKED, require_loop


@pytest.mark.parametrize("name", sorted(CHECKED))
def test_a_checked_version_is_accepted(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(metadata, "version", lambda _: f"{CHECKED[name][-1]}.7")
    assert require_loop(name) == f"{CHECKED[name][-1]}.7"


@pytest.mark.parametrize("name", sorted(CHECKED))
@pytest.mark.parametrize("version", ["0.0.1", "1.160.0", "99.0"])
def test_an_unknown_version_is_refused(name: str, version: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(metadata, "version", lambda _: version)
    with pytest.raises(UnsupportedVersionError, match="never checked") as error:
        require_loop(name)
    assert (
        version in str(error.value)
        and CHECKED[name][-1] in str(error.value)
        and "pip install" in str(error.value)
    )


def test_a_missing_loop_is_named():
    CHECKED["no-such-loop"] = ("1.0",)
    try:
        with pytest.raises(UnsupportedVersionError, match="no-such-loop is not installed"):
            require_loop("no-such-loop")
    finally:
        del CHECKED["no-such-loop"]


@pytest.mark.parametrize(("module", "package"), [("trl", "trl"), ("trl_ppo", "trl")])
def test_the_refusal_comes_before_anything_of_the_loop_is_imported(module: str, package: str):
    code = (
        "import sys; from importlib import metadata; known = metadata.version; "
        f"metadata.version = lambda name: '9.9.9' if name == '{package}' else known(name); "
        f"\ntry: import medusa_ppo.loops.{module}"
        f"\nexcept Exception as error: print(error); assert '{package}' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "never checked" in done.stdout and "9.9.9" in done.stdout
