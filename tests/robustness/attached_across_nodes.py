"""The engine of verl or OpenRLHF, as our hooks start it, on another node of a Ray: it starts with
our heads, gets newer ones from this node, and drafts. Started by test_nodes.py, in the environment
of that loop.

    python attached_across_nodes.py openrlhf ACTOR FOLDER NODE
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import torch

from heads.checkpoint import checksum, load_state, save_state
from medusa_ppo.config.run_config import build_config
from medusa_ppo.loops.remote import RemoteAttachment, call_all, sum_counters

ALONE = 0.001
"""Amount of a node's resource: it decides where, not how many."""
REQUESTS = 4
CONTRACTS = str(Path(__file__).resolve().parents[1] / "contracts")
"""Not imported as `tests.contracts`: both loops' packages bring a `tests` of their own."""


def openrlhf(attachment: RemoteAttachment, model: str, where: dict[str, float]) -> tuple[Any, Any]:
    """Its vLLM actor, and a function that generates; as in tests/contracts/test_openrlhf.py."""
    from vllm import SamplingParams

    from medusa_ppo.loops import openrlhf as ours

    sys.path.insert(0, CONTRACTS)
    import openrlhf_on_cpu

    openrlhf_on_cpu.without_flash_attn()
    arguments = {**attachment.arguments(ours.WORKER_EXTENSION), "max_logprobs": 1}
    engine = (
        ours.rollout_actor(arguments)
        .options(num_cpus=0, num_gpus=0, resources=where)
        .remote(
            model=model,
            enforce_eager=True,
            worker_extension_cls="openrlhf.trainer.ray.vllm_worker_wrap.WorkerWrap",
            tensor_parallel_size=1,
            seed=0,
            distributed_executor_backend="uni",
            max_model_len=64,
            enable_prefix_caching=False,
            dtype="float32",
            full_determinism=False,
            kv_cache_memory_bytes=64 * 1024**2,
            num_gpus=0,
            agent_func_path=None,
            remote_rm_url=None,
            mm_pad_token_ids=set(),
        )
    )
    sampling = SamplingParams(temperature=1.0, max_tokens=16, ignore_eos=True, logprobs=1)

    def generate(number: int) -> Any:
        return engine.generate.remote([5, 6, 7], sampling)

    return engine, generate


def verl(attachment: RemoteAttachment, model: str, where: dict[str, float]) -> tuple[Any, Any]:
    """Its server, and a function that generates; as in tests/contracts/test_verl_server.py."""
    from verl.workers.rollout.replica import RolloutMode

    from medusa_ppo.loops.verl import verl_trainer
    from medusa_ppo.loops.verl.verl_server import MedusaHttpServer

    sys.path.insert(0, CONTRACTS)
    from test_verl_server import sections

    assert verl_trainer.__name__ in sys.modules, "`sections` looks for it there"
    rollout, section = sections(Path(model), attachment)
    server = (
        ray.remote(MedusaHttpServer)
        .options(num_cpus=0, max_concurrency=16, resources=where)
        .remote(
            config=rollout,
            model_config=section,
            rollout_mode=RolloutMode.STANDALONE,
            workers=[],
            replica_rank=0,
            node_rank=0,
            gpus_per_node=1,
            nnodes=1,
            cuda_visible_devices="",
        )
    )
    ray.get(server.launch_server.remote(), timeout=300)
    sampling = {"temperature": 1.0, "logprobs": True, "ignore_eos": True}

    def generate(number: int) -> Any:
        return server.generate.remote([5, 6, 7], dict(sampling), f"request-{number}")

    return server, generate


KINDS: dict[str, Callable[..., tuple[Any, Any]]] = {"openrlhf": openrlhf, "verl": verl}


def main(kind: str, model: str, folder: str, node: str) -> None:
    ray.init(address="auto")
    config = build_config({"heads": {"num_heads": 2}})
    attachment = RemoteAttachment(config, model, Path(folder), several_nodes=True)
    engine, generate = KINDS[kind](attachment, model, {node: ALONE})
    attachment.attach(
        lambda method, args: call_all([engine], method, args), lambda: sum_counters([engine])
    )
    attached = attachment.engine
    assert attached is not None and attached.max_drafts == 2
    torch.manual_seed(0)
    for version in (1, 2):
        state = {
            name: 0.1 * torch.randn_like(value)
            for name, value in load_state(attachment._kept_state).items()
        }
        path = Path("/dev/shm") / f"new-{version}.safetensors"
        save_state(path, state)
        assert attached.swap_heads(path, version).checksum == checksum(state)
    attachment.weights_synced(lost_heads=True)
    ray.get([generate(number) for number in range(REQUESTS)], timeout=120)
    drafts = attached.counters().drafts
    assert drafts > 0
    print(f"version {attached.serving_version()}, {drafts} steps with drafts", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
