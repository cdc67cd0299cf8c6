"""A training with the real verl on a CPU: its command, its trainer, its Ray workers with FSDP2, its
vLLM server with our heads in it.

What needs CUDA is replaced by tests/contracts/verl_on_cpu.py, which names each replacement. Never
run here: sleep, CUDA IPC, NCCL.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("verl", reason="verl has an environment of its own: make test-contracts")

from safetensors.torch import load_file

from medusa_ppo.contract import metrics as names
from medusa_ppo.reports.store import read_run

HERE = Path(__file__).resolve().parent
STEPS, PROMPTS, RESPONSES, TOKENS = 10, 8, 4, 24
RAY_FOLDER = (
    Path(tempfile.gettempdir()) / f"verl-{os.getpid()}"
)  # Short: a socket's path may have 107 characters.
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def settings(actor: Path, out: Path, ranks: int) -> dict[str, Any]:
    """verl's command line: the tiny actor, GRPO, and the lines that a CPU needs."""
    return {
        "trainer.v1.trainer_mode": "medusa_sync",
        "+medusa.heads.num_heads": 2,
        "+medusa.engine.num_drafts": 2,
        "+medusa.companion.learning_rate": 0.01,
        "+medusa.companion.epochs": 8,
        "+medusa.companion.batch_positions": 256,
        "+medusa.companion.wait": True,
        "algorithm.adv_estimator": "grpo",
        "data.train_files": out / "prompts.json",
        "data.val_files": out / "prompts.json",
        "data.train_batch_size": PROMPTS,
        "data.max_prompt_length": 32,
        "data.max_response_length": TOKENS,
        "data.dataloader_num_workers": 0,
        "reward.num_workers": 1,
        "reward.custom_reward_function.path": HERE / "verl_on_cpu.py",
        "actor_rollout_ref.model.path": actor,
        "actor_rollout_ref.model.use_remove_padding": False,
        "actor_rollout_ref.model.custom_chat_template": json.dumps(TEMPLATE),
        "actor_rollout_ref.model.enable_gradient_checkpointing": False,
        "+actor_rollout_ref.model.override_config.attn_implementation": "sdpa",
        "actor_rollout_ref.actor.strategy": "fsdp2",
        "actor_rollout_ref.actor.use_torch_compile": False,
        "actor_rollout_ref.actor.fsdp_config.strategy": "fsdp2",
        "actor_rollout_ref.actor.fsdp_config.use_torch_compile": False,
        "+actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype": "fp32",
        "actor_rollout_ref.actor.optim.lr": 1e-3,
        "actor_rollout_ref.actor.ppo_mini_batch_size": PROMPTS,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 4,
        "actor_rollout_ref.rollout.name": "vllm",
        "actor_rollout_ref.rollout.n": RESPONSES,
        "actor_rollout_ref.rollout.dtype": "float32",
        "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 4,
        "actor_rollout_ref.rollout.enforce_eager": True,
        "actor_rollout_ref.rollout.ignore_eos": True,
        "actor_rollout_ref.rollout.max_model_len": 64,
        "actor_rollout_ref.rollout.max_num_seqs": 16,
        "actor_rollout_ref.rollout.load_format": "auto",
        "actor_rollout_ref.rollout.free_cache_engine": False,
        "+actor_rollout_ref.rollout.enable_sleep_mode": False,
        "actor_rollout_ref.rollout.agent.num_workers": 1,
        "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes": 16,
        "+actor_rollout_ref.rollout.engine_kwargs.vllm.distributed_executor_backend": "uni",
        "+actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_memory_bytes": 64 * 1024**2,
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
        "trainer.device": "cpu",
        "trainer.nnodes": 1,
        "trainer.n_gpus_per_node": ranks,
        "trainer.logger": '["file"]',
        "trainer.val_before_train": False,
        "trainer.resume_mode": "disable",
        "trainer.save_freq": STEPS,
        "actor_rollout_ref.actor.checkpoint.save_contents": "[hf_model]",
        "trainer.total_epochs": 1,
        "trainer.total_training_steps": STEPS,
        "trainer.default_local_dir": out / "run",
        "ray_kwargs.ray_init.num_cpus": 16,
        "+ray_kwargs.ray_init.num_gpus": ranks,
        "+ray_kwargs.ray_init.include_dashboard": False,
        "+ray_kwargs.ray_init.object_store_memory": 256 * 1024**2,
        "+ray_kwargs.ray_init._temp_dir": RAY_FOLDER,
    }


def environment(out: Path) -> dict[str, str]:
    """Puts verl_on_cpu.py into each of verl's processes; verl's metrics go to OUT/verl.jsonl."""
    return {
        "VERL_USE_EXTERNAL_MODULES": "verl_on_cpu",
        "VERL_PLATFORM": "medusa-test-cpu",
        "VERL_ENGINE_DEVICE": "cuda",
        "VERL_FILE_LOGGER_PATH": str(out / "verl.jsonl"),
        "HYDRA_FULL_ERROR": "1",
    }


def words(out: Path) -> None:
    """Writes the prompts."""
    texts = [
        f"{name} has {n} {what} ."
        for name, what in (("Mia", "pens"), ("Tom", "books"))
        for n in range(2, 12)
    ]
    rows = [
        {
            "prompt": [{"role": "user", "content": text}],
            "data_source": "x",
            "reward_model": {"ground_truth": ""},
        }
        for text in texts * 4
    ]
    (out / "prompts.json").write_text("\n".join(json.dumps(row) for row in rows))


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(1000)
def test_verl_trains_the_actor_and_the_heads_follow(
    chain_actor: Path, tmp_path: Path, train: Callable[..., str]
) -> None:
    words(tmp_path)
    command = [
        sys.executable,
        "-m",
        "verl.trainer.main_ppo",
        *(f"{key}={value}" for key, value in settings(chain_actor, tmp_path, 1).items()),
    ]
    train(command, environment(tmp_path), 900, RAY_FOLDER)

    theirs = [
        json.loads(line)["data"] for line in (tmp_path / "verl.jsonl").read_text().splitlines()
    ]
    assert len(theirs) == STEPS and all(f"medusa/{names.MAL_SERVING}" in step for step in theirs)
    # The engine sampled from the policy that verl scored, in every step: its sync works here, and
    # drafts change no distribution.
    assert all(step["training/rollout_probs_diff_mean"] < 1e-3 for step in theirs)

    run = read_run(tmp_path / "run" / "medusa")
    first = run.steps[0]
    last = run.steps[-1]
    assert [step[names.POLICY_VERSION] for step in run.steps] == list(range(STEPS))
    # Heads that have learned nothing yet draft nothing.
    assert all(step[names.DRAFTS] > 0 for step in run.steps if step[names.HEADS_VERSION])
    # Only rows of lm_head and embedding leave the workers, not both whole tables.
    tables = load_file(chain_actor / "model.safetensors")
    whole = sum(tables[name].nbytes for name in ("lm_head.weight", "model.embed_tokens.weight"))
    assert all(0 < step[names.TABLE_BYTES] < whole for step in run.steps)
    assert (
        last[names.HEADS_VERSION] >= 1 and last[names.MAL_SERVING] > first[names.MAL_SERVING] + 0.2
    )
    # Every step's rows reached the companion, a quarter of their prompts for the holdout; it
    # trained on each batch before the next.
    tokens = (STEPS - 1) * PROMPTS * RESPONSES * TOKENS
    assert last[names.COMPANION_TRAINED_TOKENS] + last[names.COMPANION_LEFT_OUT] > 0.5 * tokens

    start = load_file(chain_actor / "model.safetensors")
    (end,) = list((tmp_path / "run").rglob("huggingface"))
    trained = load_file(end / "model.safetensors")
    assert trained.keys() == start.keys() and not any(
        torch.equal(trained[name].float(), start[name].float()) for name in start
    )
