"""A loop of another version works as long as what our hooks hang on is there; what is not is
refused at the start, in one sentence that names it.
"""

from __future__ import annotations

import inspect
import logging
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import ray

from heads.errors import UnsupportedVersionError
from medusa_ppo.loops import loop_versions
from medusa_ppo.loops.loop_seams import SEAMS, Seam, broken_seam
from medusa_ppo.loops.loop_versions import CHECKED, install_command, require_loop

ROOT = Path(__file__).resolve().parents[3]
LOOP = "someloop"


class Trainer:
    def generate(self, prompts: Any, images: Any, profiler: Any = None) -> None: ...


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A loop of version 1.4 whose `Trainer.generate` is hooked; 1.3 was run."""
    module = ModuleType(LOOP)
    module.Trainer = type("Trainer", (Trainer,), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, LOOP, module)
    monkeypatch.setitem(CHECKED, LOOP, ("1.3",))
    seam = Seam(f"{LOOP}:Trainer.generate", ("prompts", "images", "profiler"))
    monkeypatch.setitem(SEAMS, LOOP, (seam,))
    monkeypatch.setattr(metadata, "version", lambda _: "1.4.0")
    yield module
    loop_versions._told.discard(LOOP)


def test_a_version_that_was_never_run_is_told_of_once(
    loop: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="medusa_ppo"):
        assert require_loop(LOOP) == require_loop(LOOP) == "1.4.0"
    (record,) = caplog.records
    assert all(word in record.getMessage() for word in ("1.4.0", "never run", "someloop 1.3.x"))


def test_a_version_that_was_run_is_not_spoken_of(
    loop: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(metadata, "version", lambda _: "1.3.7")
    with caplog.at_level(logging.WARNING, logger="medusa_ppo"):
        require_loop(LOOP)
    assert not caplog.records


def gone(module: Any) -> None:
    del module.Trainer


def renamed(module: Any) -> None:
    module.Trainer = type("Trainer", (), {"produce": Trainer.generate})


def one_more(module: Any) -> None:
    def generate(
        self: Any, prompts: Any, images: Any, profiler: Any, tools: Any = None
    ) -> None: ...

    module.Trainer.generate = generate


def other_names(module: Any) -> None:
    def generate(self: Any, requests: Any, images: Any, profiler: Any) -> None: ...

    module.Trainer.generate = generate


def open_ended(module: Any) -> None:
    def generate(self: Any, prompts: Any, *args: Any, **kwargs: Any) -> None: ...

    module.Trainer.generate = generate


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (gone, "there is no Trainer"),
        (renamed, "there is no generate"),
        (one_more, "takes (prompts, images, profiler, tools)"),
        (other_names, "takes (requests, images, profiler)"),
        (open_ended, "takes (prompts, args, kwargs)"),
    ],
)
@pytest.mark.parametrize("version", ["1.3.0", "1.4.0"])
def test_a_broken_seam_is_refused_by_name(
    loop: ModuleType, change: Any, words: str, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "version", lambda _: version)
    change(loop)
    with pytest.raises(UnsupportedVersionError) as error:
        require_loop(LOOP)
    told = str(error.value)
    assert f"{LOOP}:Trainer.generate: {words}" in told and version in told
    assert f"pip install 'medusa-ppo[{LOOP}]' '{LOOP}[vllm]==1.3.*'" in told


def test_signatures_that_begin_with_or_take_what_we_give(
    loop: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = f"{LOOP}:Trainer.generate"

    def fault(parameters: tuple[str, ...], how: Any) -> str:
        monkeypatch.setitem(SEAMS, LOOP, (Seam(place, parameters, how),))
        return broken_seam(LOOP)

    assert not fault(("prompts", "images"), "begins") and fault(("images",), "begins")
    assert not fault(("profiler", "prompts"), "takes") and fault(("tools",), "takes")
    assert fault(("prompts", "images"), "is")


def test_what_ray_adds_to_an_actors_methods_is_no_fault(loop: ModuleType) -> None:
    class Worker:
        def generate(self, prompts: Any, images: Any, profiler: Any = None) -> None: ...

    ray.remote(Worker)
    loop.Trainer = Worker  # type: ignore[attr-defined]
    assert "_ray_trace_ctx" in inspect.signature(Worker.generate).parameters
    assert not broken_seam(LOOP)


def named_range(method: Any) -> Any:
    """As NeMo-RL's `wrap_with_nvtx_name`, around its workers' `train`: without functools.wraps."""

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    return wrapper


@pytest.mark.parametrize("actor", [False, True])
def test_a_signature_that_a_decorator_hides_is_no_fault(loop: ModuleType, actor: bool) -> None:
    class Worker:
        @named_range
        def generate(self, prompts: Any, images: Any, profiler: Any = None) -> None: ...

    if actor:
        ray.remote(Worker)
    loop.Trainer = Worker  # type: ignore[attr-defined]
    assert "prompts" not in inspect.signature(Worker.generate).parameters
    assert not broken_seam(LOOP)


def test_a_module_that_is_gone_is_named(loop: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SEAMS, LOOP, (Seam("someloop_of_before.trainer:Trainer"),))
    with pytest.raises(UnsupportedVersionError, match=r"someloop_of_before\.trainer:Trainer"):
        require_loop(LOOP)


def test_every_loop_has_its_seams() -> None:
    assert CHECKED.keys() == SEAMS.keys() and all(SEAMS.values())


def test_a_missing_loop_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CHECKED, "no-such-loop", ("1.0",))
    with pytest.raises(UnsupportedVersionError, match="no-such-loop is not installed"):
        require_loop("no-such-loop")


def test_a_loop_that_is_too_new_is_refused_at_the_import_of_its_hooks() -> None:
    """TRL's PPO left it with 1.13."""
    code = (
        "\ntry: import medusa_ppo.loops.trl_ppo"
        "\nexcept Exception as error: print(type(error).__name__, error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "UnsupportedVersionError" in done.stdout, done.stdout + done.stderr[-2000:]
    assert "trl.experimental.ppo" in done.stdout and "'trl==1.12.*'" in done.stdout


def test_what_messages_tell_to_install_is_in_the_documents_and_the_package() -> None:
    """`pip install 'verl==0.9.*'` was told, which no installation with us could satisfy; `make
    installs` resolves the documents' lines.
    """
    package = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    page = (ROOT / "docs" / "hooks.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| [A-Za-z-]+ \| `(pip install [^`]*)` \| [0-9., ]+ \|", page, re.MULTILINE
    )
    loops = [name for name, checked in CHECKED.items() if checked and "." not in name]
    assert [install_command(name) for name in loops] == rows
    for name in loops:
        assert any(part.startswith(name) for part in package["optional-dependencies"][name])
    assert install_command("nemo_rl") == "see docs/hooks.md"
