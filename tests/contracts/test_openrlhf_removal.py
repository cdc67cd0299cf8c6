"""OpenRLHF without draft heads: its own command, run with nothing of it replaced."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip(
    "openrlhf", reason="OpenRLHF has an environment of its own: make test-contracts"
)

from medusa_ppo.loops import openrlhf as ours

OFF = "companion: {enabled: false}\nengine: {num_drafts: 0}\n"


def names() -> dict[str, Any]:
    """Everything in OpenRLHF that we replace when heads are asked for, and all else in the same
    modules.
    """
    from openrlhf.trainer import ppo_trainer
    from openrlhf.trainer import ray as ray_package
    from openrlhf.trainer.ray import ppo_actor, vllm_engine

    modules = (ppo_trainer, ray_package, ppo_actor, vllm_engine, sys.modules["openrlhf.utils"])
    return {
        f"{module.__name__}.{name}": value
        for module in modules
        for name, value in vars(module).items()
        if not name.startswith("__")
    }


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str], dict[str, Any]]]:
    """What `main` would have run: the module, its arguments, and the names that it would have
    found. All is put back afterwards.
    """
    ran: list[tuple[str, list[str], dict[str, Any]]] = []
    for place, value in names().items():
        module, _, name = place.rpartition(".")
        monkeypatch.setattr(sys.modules[module], name, value)  # Put back when the test ends.
    monkeypatch.setattr(sys, "argv", ["x"])
    monkeypatch.setattr(
        runpy, "run_module", lambda name, run_name: ran.append((name, sys.argv[1:], names()))
    )
    return ran


def changed(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    return {name for name in before | after if before.get(name) is not after.get(name)}


@pytest.mark.parametrize("switched_off", [False, True], ids=["without --medusa", "switched off"])
def test_nothing_is_replaced(command: list[Any], switched_off: bool, tmp_path: Path) -> None:
    before = names()
    (tmp_path / "off.yaml").write_text(OFF)
    ours.main(
        [
            *(["--medusa", str(tmp_path / "off.yaml")] if switched_off else []),
            "--ckpt.output_dir",
            "x",
        ]
    )

    ((name, arguments, found),) = command
    assert name == ours.CLI and arguments == ["--ckpt.output_dir", "x"]
    assert not changed(before, found)


def test_with_heads_the_named_four_are_replaced_and_no_other(
    command: list[Any], tmp_path: Path
) -> None:
    before = names()
    (tmp_path / "on.yaml").write_text("heads: {num_heads: 2}\n")
    ours.main(["--medusa", str(tmp_path / "on.yaml")])

    ((_, _, found),) = command
    assert changed(before, found) == {
        "openrlhf.trainer.ray.create_vllm_engines",
        "openrlhf.trainer.ray.ppo_actor.PolicyModelActor",
        "openrlhf.trainer.ppo_trainer.PPOTrainer",
        "openrlhf.utils.get_strategy",
    }
