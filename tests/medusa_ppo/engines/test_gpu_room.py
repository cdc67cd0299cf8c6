"""A GPU without room for an engine: said before vLLM loads the model, with the bytes of each part;
nothing that vLLM would take is refused. No test machine has GPUs: a program stands in for
nvidia-smi, and vLLM is said to be built for GPUs.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from heads.checkpoint import save_heads
from heads.errors import EngineError
from heads.heads_config import COPY_WINDOW, HeadsConfig
from heads.modules import MedusaHeads
from medusa_ppo.config.engine_section import EngineConfig
from medusa_ppo.engines import colocated, gpu_room, http_server
from medusa_ppo.engines.colocated import ColocatedEngine
from medusa_ppo.engines.gpu_room import heads_parameters, least_parts, require_room
from medusa_ppo.engines.http_server import ServerEngine
from medusa_ppo.engines.launch import plan_launch
from medusa_ppo.runtime import hardware
from medusa_ppo.runtime.hardware import GpuMemory, gpu_memory, memory_of_first

MIB = 2**20
ROW = "{index}, GPU-{index}f1c, {model}, {free}, {used}, {split}"
SIZES = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
LLAMA = {"model_type": "llama", "head_dim": 8, **SIZES}
ARGS = {"dtype": "bfloat16", "max_model_len": 512, "max_num_seqs": 8, "gpu_memory_utilization": 0.9}

Says = Callable[..., None]


def row(index: int, free: object, used: object, model: str = "H100", split: str = "[N/A]") -> str:
    return ROW.format(index=index, free=free, used=used, model=model, split=split)


@pytest.fixture
def says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Says]:
    """Sets what nvidia-smi answers from now on, and how it ends."""
    program = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    monkeypatch.setattr(gpu_room, "is_cpu_build", lambda: False)
    monkeypatch.setattr(gpu_room, "ROOM_WITHIN_S", 0.0)

    def answer(*rows: str, code: int = 0) -> None:
        lines = "\n".join(rows)
        program.write_text(f"#!/bin/sh\ncat <<'END'\n{lines}\nEND\nexit {code}\n")
        program.chmod(0o755)

    yield answer


def test_the_memory_of_every_gpu(says: Says) -> None:
    says(row(0, 80000, 1000), row(1, 500, 80500, split="Disabled"))
    assert gpu_memory() == [
        GpuMemory("0", "GPU-0f1c", "H100", 80000 * MIB, 81000 * MIB),
        GpuMemory("1", "GPU-1f1c", "H100", 500 * MIB, 81000 * MIB),
    ]


@pytest.mark.parametrize(
    ("rows", "code"),
    [
        ([], 0),
        (["No devices were found"], 6),
        ([row(0, 10, 80000)], 9),  # It fell over in the middle.
        (["Field 'mig.mode.current' is not a valid field to query."], 2),
        ([row(0, "[N/A]", "[N/A]")], 0),  # It shares the host's memory.
        ([row(0, 10, 80000), row(1, 10, 80000, split="Enabled")], 0),
    ],
)
def test_what_is_not_known_refuses_nothing(says: Says, rows: list[str], code: int) -> None:
    says(*rows, code=code)
    assert gpu_memory() == []
    require_room(ARGS, {"weights": 2**60}, {})


def test_without_an_answer_nothing_is_refused(
    says: Says, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_room(ARGS, {"weights": 2**60}, {})  # There is no such program.
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setattr(hardware, "QUERY_TIMEOUT_S", 0.1)
    require_room(ARGS, {"weights": 2**60}, {})


@pytest.mark.parametrize(
    ("variables", "count", "expected"),
    [
        ({}, 1, ["0"]),
        ({}, 3, ["0", "1", "2"]),
        ({}, 4, []),
        ({"CUDA_VISIBLE_DEVICES": "2, 0"}, 1, ["2"]),
        ({"CUDA_VISIBLE_DEVICES": "2, 0"}, 2, ["2", "0"]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-1f"}, 1, ["1"]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-"}, 1, []),  # All of them are called so.
        ({"CUDA_VISIBLE_DEVICES": "MIG-8f1c"}, 1, []),
        ({"CUDA_VISIBLE_DEVICES": ""}, 1, []),
        ({"CUDA_VISIBLE_DEVICES": "7"}, 1, []),
    ],
)
def test_the_gpus_that_an_engine_gets(
    says: Says, variables: dict[str, str], count: int, expected: list[str]
) -> None:
    says(*(row(index, 80000, 1000) for index in range(3)))
    assert [gpu.index for gpu in memory_of_first(count, variables)] == expected


def test_gpus_of_different_kinds_are_not_taken_for_one_another(says: Says) -> None:
    """CUDA calls the fastest one 0."""
    says(row(0, 10, 16000, "T4"), row(1, 80000, 1000))
    assert memory_of_first(1, {}) == memory_of_first(1, {"CUDA_VISIBLE_DEVICES": "0"}) == []
    by_bus = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "1"}
    assert [gpu.model for gpu in memory_of_first(1, by_bus)] == ["H100"]
    assert [gpu.model for gpu in memory_of_first(1, {"CUDA_VISIBLE_DEVICES": "GPU-0"})] == ["T4"]


PARTS = {"weights": 15 << 30, "heads": 1 << 30, "drafting buffers": 300 * MIB}


def test_memory_that_another_program_has(says: Says) -> None:
    says(row(0, 80000, 1000), row(1, 20 * 1024, 60 * 1024))
    require_room(ARGS, PARTS, {})
    with pytest.raises(EngineError) as refused:
        require_room(ARGS, PARTS, {"CUDA_VISIBLE_DEVICES": "1"})
    said = str(refused.value)
    for words in (
        "GPU 1 (H100): 20.0 GiB free of 80.0 GiB; other processes have 60.0 GiB",
        "72.0 GiB free, engine.memory_fraction=0.9",
        "weights 15.0 GiB, heads 1.0 GiB, drafting buffers 300.0 MiB",
        "engine.memory_fraction to 0.25 or less",
    ):
        assert words in said, said
    # Of several ranks the one with the least room decides.
    with pytest.raises(EngineError, match="GPU 1 "):
        require_room({**ARGS, "tensor_parallel_size": 2}, PARTS, {})
    # A smaller share would not do.
    with pytest.raises(EngineError) as refused:
        require_room(ARGS, {"weights": 30 << 30}, {"CUDA_VISIBLE_DEVICES": "1"})
    assert "CUDA_VISIBLE_DEVICES" in str(refused.value)
    assert "or less" not in str(refused.value)


@pytest.mark.parametrize("free", [9000, 9001, 20000])
def test_what_vllm_takes_is_not_refused(says: Says, free: int) -> None:
    """Roles of a run that stay beside the engine, and engines that sleep, hold memory too."""
    says(row(0, free, 10_000 - free if free < 10_000 else 0))
    require_room({**ARGS, "gpu_memory_utilization": 0.9}, {}, {})


def test_a_share_that_is_too_small_for_the_model(says: Says) -> None:
    says(row(0, 80 * 1024, 0))
    with pytest.raises(EngineError, match="too small") as refused:
        require_room({**ARGS, "gpu_memory_utilization": 0.2}, PARTS, {})
    said = str(refused.value)
    assert "16.0 GiB of GPU 0" in said and "16.3 GiB at least" in said and "Raise" in said
    require_room({**ARGS, "gpu_memory_utilization": 0.21}, PARTS, {})
    # A cache of a set size is not taken from the share.
    fixed = {**ARGS, "gpu_memory_utilization": 0.2, "kv_cache_memory_bytes": 1}
    require_room(fixed, PARTS, {})


@pytest.mark.parametrize(
    "more",
    [
        {"load_format": "somewhere_else"},
        {"nnodes": 2},
        {"distributed_executor_backend": "ray"},
        {"distributed_executor_backend": "external_launcher"},
    ],
)
def test_engines_whose_memory_is_elsewhere_are_not_judged(says: Says, more: dict[str, Any]) -> None:
    says(row(0, 10, 80000))
    with pytest.raises(EngineError):
        require_room(ARGS, {}, {})
    require_room({**ARGS, **more}, {}, {})


def test_an_engine_for_cpus_asks_nobody(says: Says, monkeypatch: pytest.MonkeyPatch) -> None:
    says(row(0, 10, 80000))
    monkeypatch.setattr(gpu_room, "is_cpu_build", lambda: True)
    monkeypatch.setattr(gpu_room, "memory_of_first", None)
    require_room(ARGS, {}, {})


def test_memory_of_a_process_that_was_just_ended_is_waited_for(
    says: Says, monkeypatch: pytest.MonkeyPatch
) -> None:
    says(row(0, 10, 80000))
    monkeypatch.setattr(gpu_room, "ROOM_WITHIN_S", 60.0)
    monkeypatch.setattr(gpu_room, "LOOK_EVERY_S", 0.0)
    looked = []

    def memory(count: int, environment: dict[str, str]) -> list[GpuMemory]:
        looked.append(count)
        return [GpuMemory("0", "GPU-a", "H100", 10 if len(looked) < 3 else 100, 100)]

    monkeypatch.setattr(gpu_room, "memory_of_first", memory)
    require_room(ARGS, {}, {})
    assert looked == [1, 1, 1]


# ---- the parts


def test_the_weights_and_the_cache_are_the_models() -> None:
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    parts = least_parts(LLAMA, ARGS, {}, None, 0, sampled=True)
    assert parts == {
        "weights": 2 * sum(p.numel() for p in model.parameters()),
        # Two kinds, three layers, two shared heads of width 8, two bytes.
        "keys and values of one sequence of 512 tokens": 2 * 3 * 2 * 8 * 512 * 2,
    }
    halved = least_parts(LLAMA, ARGS, {"tensor_parallel_size": 2}, None, 0, sampled=True)
    assert {what: 2 * size for what, size in halved.items()} == parts
    wide = least_parts(LLAMA, {**ARGS, "dtype": "float32"}, {}, None, 0, sampled=True)
    assert wide["weights"] == 2 * parts["weights"]
    window = least_parts({**LLAMA, "sliding_window": 128}, ARGS, {}, None, 0, sampled=True)
    assert sum(window.values()) < sum(parts.values())
    fixed = least_parts(LLAMA, ARGS, {"kv_cache_memory_bytes": 7}, None, 0, sampled=True)
    assert [size for what, size in fixed.items() if "keys" in what] == [7]


@pytest.mark.parametrize(
    ("model", "extra"),
    [
        ({"model_type": "gemma3n"}, {}),
        ({"num_local_experts": 8}, {}),
        ({"quantization_config": {"quant_method": "fp8"}}, {}),
        ({}, {"quantization": "fp8"}),
        ({}, {"hf_overrides": {"num_hidden_layers": 1}}),
        ({}, {"kv_cache_dtype": "fp8"}),
        ({}, {"cpu_offload_gb": 4}),
    ],
)
def test_parts_that_may_be_smaller_are_not_counted(
    model: dict[str, Any], extra: dict[str, Any]
) -> None:
    assert least_parts({**LLAMA, **model}, ARGS, extra, None, 0, sampled=True) == {}


def test_the_parts_of_heads() -> None:
    heads = HeadsConfig(32, 100, 4, "hydra", context=2, copy_parts=3)
    parts = least_parts(LLAMA, ARGS, {}, heads, 10, sampled=False)
    assert parts["heads"] == 2 * sum(p.numel() for p in MedusaHeads(heads).parameters())
    pairs, texts = 2 * 9 * 2 * 2 * 32, 2 * 9 * min(COPY_WINDOW, 512) * heads.copy_width
    assert parts["drafting buffers"] == pairs + texts + 2 * 10 * 32
    sampled = least_parts(LLAMA, ARGS, {}, heads, 10, sampled=True)
    assert sampled["drafting buffers"] - parts["drafting buffers"] == 4 * 9 * 10 * (4 + 2)
    plain = least_parts(LLAMA, ARGS, {}, HeadsConfig(32, 100, 2), 0, sampled=True)
    assert plain["drafting buffers"] == 4 * 9 * 100 * (2 + 2)
    assert plain["heads"] == 2 * heads_parameters(HeadsConfig(32, 100, 2))


# ---- the engines


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """A model of which there is only the configuration, so that loading it would fail; and heads
    for it.
    """
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(LLAMA))
    heads = MedusaHeads(HeadsConfig(32, 100, 2))
    save_heads(tmp_path / "heads", heads, lm_head_VD=torch.zeros(100, 32))
    return tmp_path / "model", tmp_path / "heads"


def test_neither_engine_starts_vllm_without_room(
    says: Says, folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    says(row(0, 80000, 1000), row(1, 20, 80000))

    def started(*_: object, **__: object) -> None:
        raise AssertionError("vLLM was started")

    monkeypatch.setattr(colocated, "kernels_environment", started)
    monkeypatch.setattr(http_server, "server_arguments", started)
    monkeypatch.setattr(tempfile, "tempdir", str(folders[0]))  # For a log.
    config = EngineConfig(dtype="bfloat16", max_model_len=64, memory_fraction=0.9, threads=1)
    words = "GPU 1 .*weights .*keys and values of one .*heads .*drafting buffers"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    with pytest.raises(EngineError, match=f"(?s){words}"):
        ColocatedEngine(*folders, config)
    # A server gets the GPU that was chosen for it.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    server = config.model_copy(update={"backend": "server"})
    with pytest.raises(EngineError, match=f"(?s){words}"):
        ServerEngine(*folders, server, devices=("1",))
    with pytest.raises(AssertionError, match="vLLM was started"):
        ServerEngine(*folders, server, devices=("0",))


def test_a_launch_is_planned_with_its_parts(folders: tuple[Path, Path]) -> None:
    model, heads = folders
    config = EngineConfig(dtype="bfloat16", max_model_len=64)
    plan = plan_launch(model, heads, config, 0)
    assert set(plan.parts) == {
        "weights",
        "keys and values of one sequence of 64 tokens",
        "heads",
        "drafting buffers",
    }
    assert set(plan_launch(model, None, config, 0).parts) == set(plan.parts) - {
        "heads",
        "drafting buffers",
    }
