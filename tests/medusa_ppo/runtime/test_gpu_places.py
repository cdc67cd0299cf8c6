"""Who gets which GPU: never the loop's, as long as there is another one; and a Ray of ours offers
no other than these. No test machine has GPUs: their names are made up.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import GetTimeoutError

from heads.checkpoint import save_heads
from heads.errors import ConfigError, EngineError, RunError
from heads.heads_config import HeadsConfig
from heads.modules import MedusaHeads
from medusa_ppo.bench import rollout_speed
from medusa_ppo.bench.bench_options import RolloutBench
from medusa_ppo.cli.machine_checks import check_distribution
from medusa_ppo.config.companion_section import CompanionConfig
from medusa_ppo.config.engine_section import EngineConfig
from medusa_ppo.config.run_config import RunConfig, build_config
from medusa_ppo.engines import ray_engine
from medusa_ppo.offline import scene
from medusa_ppo.ppo import loop
from medusa_ppo.runtime import hardware, processes
from medusa_ppo.runtime.console import OfflineProgress
from medusa_ppo.runtime.hardware import (
    GpuPlaces,
    Hardware,
    gpu_places,
    gpus_beside,
    visible_gpus,
)

EIGHT = tuple("01234567")


@pytest.mark.parametrize(
    ("given", "visible", "expected"),
    [
        ({}, EIGHT, GpuPlaces((), EIGHT[1:])),
        ({"replicas": 7}, EIGHT, GpuPlaces((), EIGHT[1:])),
        ({}, ("GPU-8f", "GPU-1c"), GpuPlaces((), ("GPU-1c",))),
        ({}, ("3",), GpuPlaces((), ("3",))),
        ({"backend": "server"}, ("3",), GpuPlaces((("3",),), ("3",))),
        ({"backend": "server"}, (), GpuPlaces(((),), ())),
        (
            {"backend": "server", "replicas": 3, "extra": {"tensor_parallel_size": 2}},
            EIGHT,
            GpuPlaces((("1", "2"), ("3", "4"), ("5", "6")), ("7",)),
        ),
        ({"backend": "http://a:1,http://b:2", "replicas": 2}, EIGHT, GpuPlaces((), EIGHT[1:])),
    ],
)
def test_places(given: dict[str, Any], visible: tuple[str, ...], expected: GpuPlaces) -> None:
    assert gpu_places(EngineConfig(**given), visible) == expected


@pytest.mark.parametrize("visible", [(), ("3",), EIGHT])
def test_whoever_takes_turns_with_engines_leaves_them_all_gpus(visible: tuple[str, ...]) -> None:
    section = EngineConfig(replicas=8, sleep_level=1)
    assert gpu_places(section, visible, shared=True) == GpuPlaces((), visible)


@pytest.mark.parametrize(("replicas", "visible"), [(8, EIGHT), (2, ("0",)), (2, ("4", "5"))])
def test_servers_without_a_gpu_each_are_refused(replicas: int, visible: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="don't have a GPU each") as refused:
        gpu_places(EngineConfig(backend="server", replicas=replicas), visible)
    said = str(refused.value)
    assert f"{replicas} engines" in said and ", ".join(visible) in said


@pytest.mark.parametrize(
    ("taken", "visible", "asked", "expected"),
    [
        (EIGHT, EIGHT, {}, ()),
        (EIGHT[:6], EIGHT, {}, ("6", "7")),
        # Each process sees only its own.
        (EIGHT, ("0",), {}, ()),
        (("GPU-8f",), ("GPU-8f", "GPU-1c"), {}, ("GPU-1c",)),
        # One for everybody.
        (("3",), ("3",), {}, ("3",)),
        ((None,), ("3",), {}, ("3",)),
        # A training on the CPU.
        ((None, None), EIGHT, {}, EIGHT),
        # What the user asked for has to have room, if need be beside the training.
        (EIGHT, EIGHT, {"num_gpus": 0.1}, EIGHT),
        (EIGHT, EIGHT, {"num_gpus": 0.0}, ()),
        (EIGHT[:6], EIGHT, {"num_gpus": 1.0, "workers": 2}, ("6", "7")),
        (EIGHT[:6], EIGHT, {"num_gpus": 1.0, "workers": 3}, EIGHT),
        (EIGHT[:6], EIGHT, {"num_gpus": 0.6, "workers": 3}, EIGHT),
        (EIGHT[:7], EIGHT, {"num_gpus": 0.3, "workers": 3}, ("7",)),
    ],
)
def test_a_companion_gets_what_the_processes_of_a_training_leave(
    taken: tuple[str | None, ...],
    visible: tuple[str, ...],
    asked: dict[str, Any],
    expected: tuple[str, ...],
) -> None:
    assert gpus_beside(taken, visible, CompanionConfig(**asked)) == expected


@pytest.mark.parametrize(
    ("variable", "expected"),
    [(None, ("0", "1", "2")), ("5,3", ("5", "3")), ("GPU-8f, GPU-1c", ("GPU-8f", "GPU-1c"))],
)
def test_the_names_are_those_of_the_environment(
    variable: str | None, expected: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Hardware(3 if variable is None else 2, True, 4, "made up")
    monkeypatch.setattr(hardware, "find_hardware", lambda: found)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if variable is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    assert visible_gpus() == expected


HEAD = Hardware(0, False, 8, "a node without GPUs")


@pytest.fixture
def gpus_elsewhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A driver without a GPU in a cluster with sixteen."""
    node = Hardware(1, True, 96, "one of eight H100", 80 << 30)
    monkeypatch.setattr(processes, "find_hardware", lambda: HEAD)
    monkeypatch.setattr(hardware, "find_hardware", lambda: HEAD)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 200.0, "GPU": 16.0})
    context = SimpleNamespace(get_job_id=lambda: "01")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(processes, "_hardware_there", lambda: node)
    monkeypatch.setattr(ray, "get", lambda found, timeout: found)
    processes._node_with_gpus.cache_clear()
    yield
    processes._node_with_gpus.cache_clear()


@pytest.mark.usefixtures("gpus_elsewhere")
def test_a_run_whose_loop_has_no_gpu_is_set_by_those_of_the_cluster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[RunConfig] = []

    def session(config: RunConfig, progress: object) -> object:
        seen.append(config)
        raise RunError("far enough", given="", expected="", do="")

    monkeypatch.setenv("RAY_ADDRESS", "auto")
    monkeypatch.setattr(processes, "local_ray", contextlib.nullcontext)
    monkeypatch.setattr(loop, "RunSession", session)
    with pytest.raises(RunError, match="far enough"):
        loop.run_ppo(build_config({"engine": {"replicas": 8}}))
    (config,) = seen
    assert config.model.dtype == config.engine.dtype == "bfloat16"
    assert config.engine.memory_fraction == 0.9 and config.engine.enforce_eager is False
    # A single engine does not share its GPU with a loop that has none.
    one = hardware.settled(build_config({}), processes.run_hardware())
    assert one.engine.memory_fraction == 0.9 and one.ppo.threads == HEAD.cores


@pytest.mark.usefixtures("gpus_elsewhere")
def test_an_engine_whose_driver_has_no_gpu_is_set_by_those_of_the_cluster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray_engine, "visible_gpus", tuple)
    monkeypatch.setattr(ray_engine, "RayEngine", lambda model, heads, config, seed, **_: config)
    found = ray_engine.make_engine("actor", None, EngineConfig())
    assert (found.dtype, found.memory_fraction, found.enforce_eager) == ("bfloat16", 0.9, False)


@pytest.mark.usefixtures("gpus_elsewhere")
@pytest.mark.parametrize(
    ("extra", "gpus"),
    [
        ({}, 0.9),
        ({"tensor_parallel_size": 2}, 2),
        ({"pipeline_parallel_size": 2}, 2),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 3}, 6),
        ({"prefill_context_parallel_size": 2}, 2),
        # These use the GPUs of the tensor-parallel ranks.
        ({"decode_context_parallel_size": 2, "tensor_parallel_size": 2}, 2),
    ],
)
@pytest.mark.parametrize("replicas", [1, 2])
def test_ray_keeps_a_gpu_for_each_rank_of_an_engine(
    extra: dict[str, int], gpus: float, replicas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for a single engine while it is started again; pipeline stages were not counted."""
    reserved: list[Any] = []
    placed: list[Any] = []
    planned: list[int] = []

    def reserve(bundles: list[dict[str, float]], what: str, *, timeout_s: float) -> str:
        assert timeout_s == 600
        reserved.append(([bundle["GPU"] for bundle in bundles], what))
        return "group"

    def plan(*_: Any) -> Any:
        planned.append(1)
        return SimpleNamespace(load_s=2800.0)

    def start(
        model: str,
        heads: None,
        config: EngineConfig,
        seed: int,
        *,
        where: Any,
        load_s: float,
        **_: Any,
    ) -> Any:
        placed.append(where)
        assert load_s == 2800.0
        assert ray_engine.gpus_asked(config) == gpus
        return SimpleNamespace(
            max_drafts=0, num_drafts=0, note="", heads_version=0, policy_version=0, close=int
        )

    monkeypatch.setattr(ray_engine, "visible_gpus", tuple)
    monkeypatch.setattr(ray_engine, "plan_launch", plan)
    monkeypatch.setattr(ray_engine, "reserve", reserve)
    monkeypatch.setattr(ray_engine, "release", reserved.append)
    monkeypatch.setattr(ray_engine, "in_bundle", lambda group, index: (group, index))
    monkeypatch.setattr(ray_engine, "RayEngine", start)
    config = EngineConfig(extra=extra, replicas=replicas)
    ray_engine.make_engine("actor", None, config, supervised=True).close()
    what = "engine" if replicas == 1 else "engines"
    assert reserved == [([gpus] * replicas, what), "group"]
    assert sorted(placed) == [("group", index) for index in range(replicas)]
    assert planned == [1], "whatever is warned of is told once"


def test_an_engine_that_was_planned_is_not_planned_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What its plan warns of would be told once more, and again at each restart."""
    planned: list[int] = []
    monkeypatch.setattr(ray_engine, "plan_launch", lambda *_: planned.append(1))
    monkeypatch.setattr(ray_engine.ray, "is_initialized", lambda: False)
    with pytest.raises(EngineError, match="Ray is not running"):
        ray_engine.RayEngine("actor", None, EngineConfig(), load_s=2800.0)
    assert not planned


def test_wrong_settings_of_an_engine_are_refused_before_the_wait_for_its_place(
    chain_actor: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were told after it, or hidden behind "no room"."""
    reserved: list[Any] = []
    monkeypatch.setattr(ray_engine, "visible_gpus", tuple)
    monkeypatch.setattr(ray_engine, "gpus_asked", lambda config: 0.0)
    monkeypatch.setattr(ray_engine, "reserve", lambda *given, **_: reserved.append(given))
    config = EngineConfig(extra={"worker_extension_cls": "own.Extension"})
    with pytest.raises(ConfigError, match="worker_extension_cls"):
        ray_engine.make_engine(chain_actor, None, config, supervised=True)
    assert not reserved


@pytest.mark.usefixtures("gpus_elsewhere")
def test_the_test_of_the_distribution_is_set_by_the_gpus_of_the_cluster(
    chain_actor: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its engine was given a CPU's settings by a head of KubeRay."""
    seen: list[EngineConfig] = []

    def engine(model: str, heads: str, config: EngineConfig, seed: int) -> object:
        seen.append(config)
        raise RunError("far enough", given="", expected="", do="")

    monkeypatch.setattr(processes, "local_ray", contextlib.nullcontext)
    monkeypatch.setattr(scene, "running_engine", engine)
    config = build_config({"model": {"path": str(chain_actor)}, "heads": {"num_heads": 2}})
    with pytest.raises(RunError, match="far enough"):
        list(check_distribution(config, 100, OfflineProgress(quiet=True), data=False))
    (found,) = seen
    assert (found.dtype, found.memory_fraction, found.enforce_eager) == ("bfloat16", 0.9, False)


@pytest.mark.usefixtures("gpus_elsewhere")
def test_engines_that_are_compared_share_a_gpu_of_the_cluster(
    chain_actor: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them took 0.9 of it, and the figure's dtype was the head's."""
    seen: list[EngineConfig] = []

    def arms(model: str, heads: str, stock: str, config: EngineConfig, *_: Any, **__: Any) -> Any:
        seen.append(config)
        return contextlib.nullcontext([])

    monkeypatch.setattr(rollout_speed, "local_ray", lambda **_: contextlib.nullcontext())
    monkeypatch.setattr(rollout_speed, "running_arms", arms)
    monkeypatch.setattr(rollout_speed, "_run_batch", lambda *_: [])
    model = json.loads((chain_actor / "config.json").read_text())
    save_heads(
        tmp_path / "heads", MedusaHeads(HeadsConfig(model["hidden_size"], model["vocab_size"], 2))
    )
    data = tmp_path / "rows.jsonl"
    data.write_text('{"question": "1 + 1"}\n')
    bench = RolloutBench(str(chain_actor), str(tmp_path / "heads"), str(data), "{question}")
    figures = rollout_speed.run_rollout(bench, OfflineProgress(quiet=True))
    (found,) = seen
    assert (found.dtype, found.memory_fraction) == ("bfloat16", 0.9 / 3)
    assert figures["dtype"] == "bfloat16"


def test_no_gpu_is_asked_about_what_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process on a node with GPUs needs a place there, and an engine that vLLM alone is compared
    with starts after the last step.
    """

    def full() -> Hardware:
        raise RunError("no GPU is free", given="", expected="", do="")

    node = Hardware(1, True, 96, "one of eight H100", 80 << 30)
    run = hardware.settled(build_config({"companion": {"enabled": True}}), node)
    assert hardware.settled(run, full) == run
    # What the error asks for is enough.
    for placement in ("separate", "shared"):
        asked = {
            "model": {"dtype": "bfloat16"},
            "engine": {"memory_fraction": 0.5, "enforce_eager": False, "sleep_level": 1},
            "ppo": {"placement": placement},
        }
        assert hardware.settled(build_config(asked), full).engine.dtype == "bfloat16"
    monkeypatch.setattr(ray_engine, "visible_gpus", tuple)
    monkeypatch.setattr(
        ray_engine, "RayEngine", lambda model, heads, config, seed, place, **_: config
    )
    monkeypatch.setattr(ray_engine, "run_hardware", full)
    assert ray_engine.make_engine("actor", None, run.engine) == run.engine
    with pytest.raises(RunError, match="no GPU is free"):
        ray_engine.make_engine("actor", None, EngineConfig())


@pytest.mark.usefixtures("gpus_elsewhere")
def test_a_cluster_that_grows_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    before = processes.run_hardware()
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"GPU": 24.0})
    monkeypatch.setattr(processes, "_hardware_there", lambda: pytest.fail("asked again"))
    assert processes.run_hardware() == replace(
        before, gpus=24, found=before.found.replace("16 GPUs", "24 GPUs")
    )


@pytest.mark.usefixtures("gpus_elsewhere")
def test_gpus_that_say_nothing_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(found: object, timeout: float) -> None:
        raise GetTimeoutError(f"{timeout:.0f} s")

    monkeypatch.setattr(ray, "get", never)
    with pytest.raises(RunError, match="looks at a GPU of the cluster did not answer in time"):
        processes.run_hardware()


def test_an_engine_of_several_ranks_does_not_share_the_loops_only_gpu() -> None:
    one = Hardware(1, True, 8, "one GPU")
    shares = hardware.settled_engine(EngineConfig(), one)
    alone = hardware.settled_engine(EngineConfig(extra={"tensor_parallel_size": 8}), one)
    assert (shares.memory_fraction, alone.memory_fraction) == (0.35, 0.9)


OFFERED = """
import os, ray
from medusa_ppo.runtime.processes import local_ray

@ray.remote(num_gpus=1, num_cpus=0)
class Engine:
    def sees(self):
        return os.environ["CUDA_VISIBLE_DEVICES"]

with local_ray(gpus=("5", "6")):
    engines = [Engine.remote() for _ in range(2)]
    print(sorted(ray.get([engine.sees.remote() for engine in engines])))
    print(ray.cluster_resources()["GPU"], os.environ.get("CUDA_VISIBLE_DEVICES"))
"""


def test_a_ray_of_ours_gives_out_the_gpus_that_it_was_told() -> None:
    """Ray itself does not look whether they are there."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    ran = subprocess.run(
        [sys.executable, "-c", OFFERED],
        env=environment | {"CUDA_VISIBLE_DEVICES": "4,5,6"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.stdout.split("\n")[:2] == ["['5', '6']", "2.0 4,5,6"], (
        ran.stdout + ran.stderr[-1500:]
    )
