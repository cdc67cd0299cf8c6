"""The manifest for Kubernetes: fields that KubeRay knows, a command that exists, and nodes as the
preset wants them.

Field names are those of KubeRay's own types, ray-operator/apis/ray/v1/{rayjob,raycluster}_types.go;
the operator refuses others.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from medusa_ppo.cli.app import app
from medusa_ppo.config.run_config import RunConfig, load_config

ROOT = Path(__file__).resolve().parent.parent
JOB = {
    "activeDeadlineSeconds", "backoffLimit", "rayClusterSpec", "submitterPodTemplate", "metadata",
    "clusterSelector", "submitterConfig", "entrypoint", "runtimeEnvYAML", "jobId", "submissionMode",
    "entrypointResources", "entrypointNumCpus", "entrypointNumGpus", "ttlSecondsAfterFinished",
    "shutdownAfterJobFinishes", "suspend",
}  # fmt: skip
CLUSTER = {
    "headGroupSpec", "workerGroupSpecs", "rayVersion", "enableInTreeAutoscaling",
    "autoscalerOptions", "headServiceAnnotations", "suspend",
}  # fmt: skip
HEAD = {"serviceType", "headService", "enableIngress", "rayStartParams", "template"}
WORKER = {
    "groupName", "replicas", "minReplicas", "maxReplicas", "numOfHosts", "rayStartParams",
    "template", "scaleStrategy",
}  # fmt: skip


@pytest.fixture(scope="module")
def manifest() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "configs" / "kuberay.yaml").read_text())


def nodes(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    cluster = manifest["spec"]["rayClusterSpec"]
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def settings(manifest: dict[str, Any]) -> tuple[list[str], RunConfig]:
    """The entrypoint's words, and the configuration that it makes."""
    words = shlex.split(manifest["spec"]["entrypoint"])
    preset = words[words.index("--config") + 1]
    assert "/" not in preset, "a preset by its name, wherever the image has it"
    return words, load_config(preset, [word for word in words if "=" in word])


def test_its_fields_are_those_of_kuberay(manifest: dict[str, Any]) -> None:
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayJob")
    cluster = manifest["spec"]["rayClusterSpec"]
    assert manifest["spec"].keys() <= JOB and cluster.keys() <= CLUSTER
    assert cluster["headGroupSpec"].keys() <= HEAD
    for group in cluster["workerGroupSpecs"]:
        assert group.keys() <= WORKER
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    for node in nodes(manifest):
        assert all(isinstance(value, str) for value in node["rayStartParams"].values())


def test_its_command_and_settings_exist(manifest: dict[str, Any]) -> None:
    words, config = settings(manifest)
    assert words[0] == "medusa-ppo" and words[1] in get_command(app).commands
    assert config.model.path == "/data/actor" and config.out == "/data/runs"


def test_its_nodes_are_what_the_preset_asks_for(manifest: dict[str, Any]) -> None:
    """Ray's resources, on the nodes that offer each GPUs for every process there, and one version
    of Ray.
    """
    _, config = settings(manifest)
    held: dict[str, float] = json.loads(manifest["spec"]["entrypointResources"])
    offered: dict[str, float] = {}
    gpus: dict[str, int] = {}
    for node in nodes(manifest):
        (container,) = node["template"]["spec"]["containers"]
        count = node.get("replicas", 1)
        for name, amount in json.loads(
            json.loads(node["rayStartParams"].get("resources", '"{}"'))
        ).items():
            offered[name] = offered.get(name, 0) + count * amount
            here = count * int(container["resources"]["limits"]["nvidia.com/gpu"])
            gpus[name] = gpus.get(name, 0) + here
        mounts = {mount["name"] for mount in container["volumeMounts"]}
        assert mounts == {volume["name"] for volume in node["template"]["spec"]["volumes"]}
    assert {
        config.engine.resource,
        config.companion.resource,
    } <= offered.keys() and held.keys() <= offered.keys()
    per_worker = config.companion.num_gpus
    assert per_worker is not None, "the preset says it"
    (entrypoint,) = held
    wanted = {entrypoint: float(manifest["spec"]["entrypointNumGpus"])}
    for resource, count in (
        (config.engine.resource, config.engine.replicas * config.engine.ranks),
        (config.companion.resource, config.companion.workers * per_worker),
    ):
        wanted[resource] = wanted.get(resource, 0) + count
    assert {name: float(count) for name, count in gpus.items()} == wanted
    pinned = next(
        line
        for line in (ROOT / "requirements-cuda.txt").read_text().splitlines()
        if line.startswith("ray==")
    )
    assert pinned == f"ray=={manifest['spec']['rayClusterSpec']['rayVersion']}"
