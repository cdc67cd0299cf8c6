"""The doctor: every finding has a next step, and a version that was never checked is a fault."""

from __future__ import annotations

import importlib.metadata
import json
import tomllib
from dataclasses import asdict
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from typer.testing import CliRunner

from medusa_ppo.cli import machine_checks
from medusa_ppo.cli.app import app
from medusa_ppo.contract.rollouts import Sampling
from medusa_ppo.engines.probe import tiny_model
from medusa_ppo.runtime.hardware import GpuMemory
from medusa_ppo.vllm_plugin.hook_table import HookCheck

ROOT = Path(__file__).resolve().parents[3]


def test_the_quick_checks_pass_here_and_say_what_they_found() -> None:
    checks = list(machine_checks.run_checks(quick=True))
    assert {"Python", "Memory", "vLLM", "Plugin registered", "torch", "ray"} <= {
        check.name for check in checks
    }
    assert all(check.found for check in checks)
    assert [check.name for check in checks if not check.ok] == []


@pytest.mark.parametrize("version", ["0.34.0", "0.23.0", "1.0.0"])
def test_another_vllm_is_a_fault_with_a_next_step(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(machine_checks, "vllm_version", lambda: version)
    check = next(c for c in machine_checks.run_checks(quick=True) if c.name == "vLLM")
    assert not check.ok and version in check.found and "make setup" in check.do


def test_a_vllm_that_was_not_tested_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_checks, "vllm_version", lambda: "0.30.1")
    check = next(c for c in machine_checks.run_checks(quick=True) if c.name == "vLLM")
    assert check.ok and check.warn and "not tested" in check.found


def test_each_hook_is_one_line_and_one_that_vanished_names_the_release_that_had_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    faults = ("", "missing; vLLM 0.31 had it")
    rows = [
        asdict(HookCheck("drafts", "vllm.a:B.c", "V1", "0.24 to 0.32", "run on CPU", fault))
        for fault in faults
    ]
    monkeypatch.setattr(machine_checks, "_python", lambda *arguments: (True, json.dumps(rows)))
    there, gone = machine_checks._hooks()
    assert there.ok and "0.24 to 0.32" in there.found and "V1" in there.found
    assert not gone.ok and "vLLM 0.31 had it" in gone.found and "0.32" in gone.do


def test_a_package_that_is_not_there_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    faults = {check.name for check in machine_checks.run_checks(quick=True) if not check.ok}
    assert {"torch", "ray", "transformers", "datasets", "vLLM"} <= faults


def test_packages_are_taken_as_pip_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """verl's and OpenRLHF's transformers are older than ours, and no fault."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = {Requirement(text).name: Requirement(text) for text in project["dependencies"]}
    for name in machine_checks.RANGES:
        for version in (
            "2.10.9",
            "2.11.0+cpu",
            "2.13.1",
            "2.14.0",
            "2.55.0",
            "2.54.1",
            "3.0.0",
            "4.9.0",
            "5.0.0",
            "5.5.2",
            "5.5.3",
            "5.9.0",
            "5.19.0",
            "5.20.0",
            "6.0.0",
        ):
            monkeypatch.setattr(importlib.metadata, "version", lambda _, version=version: version)
            assert machine_checks._package(name).ok == (version in wanted[name].specifier), version


def test_a_shorter_test_of_the_distribution_is_shorter() -> None:
    """4,000 tokens of 64 prompts with 4 responses of 96 were 22,000."""
    sampling = Sampling(max_new_tokens=96, responses_per_prompt=4)
    for tokens in (1000, 4000, 20_000):
        written = machine_checks.prompts_for(tokens, sampling) * 4 * 96
        assert tokens <= written < tokens + 4 * 96
    assert machine_checks.prompts_for(1000, Sampling(max_new_tokens=4096)) == 1


def test_gpus_that_the_cpu_build_leaves_idle_are_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_checks, "gpu_names", lambda: ["Some GPU, 81559 MiB"])
    for cpu, ok in ((True, False), (False, True)):
        monkeypatch.setattr(machine_checks, "is_cpu_build", lambda cpu=cpu: cpu)
        check = next(c for c in machine_checks.run_checks(quick=True) if c.name == "GPUs")
        assert check.ok is ok and "Some GPU" in check.found and "STACK=cuda" in check.do


@pytest.mark.parametrize("taken", [0, 60])
def test_gpus_whose_memory_others_have_are_a_warning(
    monkeypatch: pytest.MonkeyPatch, taken: int
) -> None:
    """No GPU here: their memory is made up."""
    gib = 2**30
    found = [
        GpuMemory("0", "GPU-a", "Some GPU", 80 * gib, 80 * gib),
        GpuMemory("1", "GPU-b", "Some GPU", (80 - taken) * gib, 80 * gib),
    ]
    monkeypatch.setattr(machine_checks, "gpu_names", lambda: ["Some GPU, 81559 MiB"] * 2)
    monkeypatch.setattr(machine_checks, "gpu_memory", lambda: found)
    monkeypatch.setattr(machine_checks, "is_cpu_build", lambda: False)
    check = next(c for c in machine_checks.run_checks(quick=True) if c.name == "GPUs")
    assert check.ok and check.warn is bool(taken) and "81559 MiB" in check.found
    assert ("GPU 1 has 20.0 GiB free of 80.0 GiB" in check.found) is bool(taken)
    assert "GPU 0 has" not in check.found


@pytest.mark.parametrize(
    "words",
    [
        ["--model", "models/actor"],
        ["--heads", "heads-gsm8k"],
        ["--config", "run.yaml"],
        ["--tokens", "2000"],
        ["engine.num_drafts=2"],
        ["--quick", "--model", "models/actor"],
        ["--quick", "--distribution"],
    ],
)
def test_the_doctor_passes_nothing_that_it_does_not_look_at(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("run_checks", "check_distribution"):
        monkeypatch.setattr(machine_checks, name, lambda *arguments, **how: [])
    found = CliRunner().invoke(app, ["doctor", *words])
    assert found.exit_code == 2 and "passed" not in found.output
    assert "--distribution" in found.output and words[-1] in found.output
    assert CliRunner().invoke(app, ["doctor", "--quick"]).exit_code == 0
    assert CliRunner().invoke(app, ["doctor", "--distribution"]).exit_code == 0


@pytest.mark.engine
@pytest.mark.slow
def test_the_doctor_judges_anyones_model_and_settings(tmp_path: Path) -> None:
    tiny_model(tmp_path / "model")
    asked = [
        "sampling.temperature=0.7",
        "sampling.top_p=0.9",
        "sampling.max_new_tokens=32",
        "engine.num_drafts=2",
        "heads.num_heads=3",
    ]
    done = CliRunner().invoke(
        app,
        [
            "doctor",
            "--distribution",
            "--model",
            str(tmp_path / "model"),
            "--tokens",
            "1000",
            *asked,
        ],
    )
    assert done.exit_code == 0, done.output
    assert "Honest: " in done.output and "All checks passed." in done.output
