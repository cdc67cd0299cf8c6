"""verl's own vLLM server class, started by its own `launch_server` in a Ray actor on vLLM's CPU
build, with our heads in it.

Not run here, because it needs CUDA: sleep (`free_cache_engine`), and verl's weight sync, which
vLLM's CPU build can't take.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("verl", reason="verl has an environment of its own: make test-contracts")

from omegaconf import OmegaConf

from heads.checkpoint import checksum, load_state, save_state
from medusa_ppo.config.run_config import build_config

SETTINGS = {
    "rollout.name": "vllm",
    "rollout.tensor_model_parallel_size": 1,
    "rollout.dtype": "float32",
    "rollout.load_format": "auto",
    "rollout.enforce_eager": True,
    "rollout.free_cache_engine": False,
    "rollout.enable_sleep_mode": False,
    "rollout.max_model_len": 64,
    "rollout.max_num_seqs": 8,
    "rollout.prompt_length": 16,
    "rollout.response_length": 16,
    "rollout.engine_kwargs": {
        "vllm": {"distributed_executor_backend": "uni", "kv_cache_memory_bytes": 64 * 1024**2}
    },
    "model.override_config": {"attn_implementation": "sdpa"},
}


def sections(small_actor: Path, attachment: Any) -> tuple[Any, Any]:
    """verl's own configuration of rollout and model, with what our trainer writes into it."""
    import verl
    import verl.trainer.ppo.v1

    config = OmegaConf.load(
        Path(verl.__file__).parent / "trainer" / "config" / "_generated_ppo_trainer.yaml"
    )
    for key, value in {**SETTINGS, "model.path": str(small_actor)}.items():
        OmegaConf.update(config, f"actor_rollout_ref.{key}", value, force_add=True)
    sys.modules["medusa_ppo.loops.verl.verl_trainer"].configure(config, attachment)
    OmegaConf.resolve(config)
    return config.actor_rollout_ref.rollout, config.actor_rollout_ref.model


@pytest.mark.engine
def test_verls_own_server_takes_our_heads_and_generates(
    small_actor: Path, tmp_path: Path, local_ray: None
) -> None:
    import ray
    from verl.workers.rollout.replica import RolloutMode

    from medusa_ppo.loops.remote import RemoteAttachment, call_all, sum_counters
    from medusa_ppo.loops.verl.verl_server import MedusaHttpServer

    attachment = RemoteAttachment(
        build_config({"heads": {"num_heads": 2}}), str(small_actor), tmp_path
    )
    rollout, model = sections(small_actor, attachment)
    server = (
        ray.remote(MedusaHttpServer)
        .options(num_cpus=0, max_concurrency=16)
        .remote(
            config=rollout,
            model_config=model,
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
    attachment.attach(
        lambda method, args: call_all([server], method, args), lambda: sum_counters([server])
    )
    assert attachment.engine is not None and attachment.engine.max_drafts == 2

    torch.manual_seed(0)
    state = {
        name: 0.1 * torch.randn_like(value)
        for name, value in load_state(attachment._kept_state).items()
    }
    save_state(tmp_path / "new.safetensors", state)
    assert attachment.engine.swap_heads(tmp_path / "new.safetensors", 1).checksum == checksum(state)
    attachment.weights_synced(lost_heads=True)

    sampling = {"temperature": 1.0, "logprobs": True, "ignore_eos": True}
    outputs = ray.get(
        [server.generate.remote([5, 6, 7], dict(sampling), f"request-{i}") for i in range(4)],
        timeout=120,
    )
    assert all(len(output.token_ids) == len(output.log_probs) == 16 for output in outputs)
    counters = attachment.engine.counters()
    assert counters.drafts > 0 and counters.draft_tokens > counters.drafts
    ray.kill(server)
