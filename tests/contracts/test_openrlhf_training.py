"""A training with the real OpenRLHF on a CPU: its command, its trainer, its DeepSpeed workers, its
vLLM actors with our heads in them.

What needs CUDA is replaced by tests/contracts/openrlhf_on_cpu.py, which names each replacement.
Never run here: sleep, CUDA IPC, NCCL.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

import pytest
import torch

pytest.importorskip(
    "openrlhf", reason="OpenRLHF has an environment of its own: make test-contracts"
)

from safetensors.torch import load_file

from medusa_ppo.companion.companion_link import COMPANION_TOKEN
from medusa_ppo.contract import metrics as names
from medusa_ppo.loops.worker_tap import COMPANION
from medusa_ppo.reports.store import read_run
from medusa_ppo.vllm_plugin.speculation import FEED
from tests.medusa_ppo.loops.served_desk import served_desk

HERE = Path(__file__).resolve().parent
STEPS, PROMPTS, RESPONSES, TOKENS = 10, 8, 4, 24
EPISODES = 3
MEDUSA = f"""
heads: {{num_heads: 2}}
companion: {{learning_rate: 0.01, epochs: 8, batch_positions: 256, wait: true}}
engine:
  num_drafts: 2
  extra: {{kv_cache_memory_bytes: {64 * 1024**2}, max_num_seqs: 16}}
"""


SERVED = f"""
heads: {{path: HEADS}}
engine:
  num_drafts: 2
  extra:
    kv_cache_memory_bytes: {64 * 1024**2}
    max_num_seqs: 16
"""


def arguments(actor: Path, out: Path) -> list[str]:
    """OpenRLHF's command line: GRPO of the tiny actor, one DeepSpeed worker and one engine."""
    settings = {
        "actor.model_name_or_path": actor,
        "actor.num_gpus_per_node": 1,
        "actor.adam.lr": 1e-3,
        "actor.lr_scheduler": "constant",
        "algo.advantage.estimator": "group_norm",
        "algo.kl.init_coef": 0,
        "ckpt.output_dir": out / "run",
        "data.prompt_dataset": out / "prompts.jsonl",
        "data.input_key": "prompt",
        "data.max_len": 64,
        "ds.attn_implementation": "sdpa",
        "ds.zero_stage": 2,
        "reward.remote_url": HERE / "openrlhf_on_cpu.py",
        "rollout.batch_size": PROMPTS,
        "rollout.n_samples_per_prompt": RESPONSES,
        "rollout.max_new_tokens": TOKENS,
        "rollout.micro_batch_size": 8,
        "train.batch_size": PROMPTS * RESPONSES,
        "train.micro_batch_size": 8,
        "vllm.num_engines": 1,
        "vllm.tensor_parallel_size": 1,
        "vllm.sync_backend": "gloo",
    }
    return [
        *(word for key, value in settings.items() for word in (f"--{key}", str(value))),
        "--vllm.enforce_eager",
    ]


def words(out: Path) -> None:
    """Writes the prompts."""
    texts = [
        f"{name} has {n} {what} ."
        for name, what in (("Mia", "pens"), ("Tom", "books"))
        for n in range(2, 42)
    ]
    assert len(texts) == STEPS * PROMPTS
    (out / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": text}) for text in texts))


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(900)
def test_openrlhf_trains_the_actor_and_the_heads_follow(
    chain_actor: Path, tmp_path: Path, train: Callable[..., str]
) -> None:
    words(tmp_path)
    (tmp_path / "heads.yaml").write_text(MEDUSA)
    command = [
        sys.executable,
        str(HERE / "openrlhf_on_cpu.py"),
        "--medusa",
        str(tmp_path / "heads.yaml"),
    ]
    train([*command, *arguments(chain_actor, tmp_path)], {"DS_ACCELERATOR": "cpu"}, 800)

    run = read_run(tmp_path / "run" / "medusa")
    first = run.steps[0]
    last = run.steps[-1]
    assert len(run.steps) == STEPS
    assert last[names.HEADS_VERSION] >= 1 and last[names.MAL_SERVING] > first[names.MAL_SERVING]
    # Heads that have learned nothing yet draft nothing.
    assert sum(step[names.ACCEPTED] for step in run.steps) > 0 and last[names.DRAFTS] > 0

    assert last[names.COMPANION_TRAINED_TOKENS] + last[names.COMPANION_LEFT_OUT] > 0
    start, end = (
        load_file(folder / "model.safetensors") for folder in (chain_actor, tmp_path / "run")
    )
    assert any(not torch.equal(start[name].float(), end[name].float()) for name in start), (
        "the actor has not changed"
    )


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(900)
def test_heads_follow_an_actor_that_is_trained_asynchronously(
    chain_actor: Path,
    tmp_path: Path,
    train: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`--train.async_enable` with partial rollouts: the engine goes on with newer weights in the
    middle of answers. Workers tap their update for a stand-alone companion, and the engine loads
    newer heads from a feed.
    """
    words(tmp_path)
    monkeypatch.setenv(COMPANION_TOKEN, "a token")
    (tmp_path / "heads.yaml").write_text(SERVED.replace("HEADS", str(tmp_path / "heads")))
    command = [
        sys.executable,
        str(HERE / "openrlhf_on_cpu.py"),
        "--medusa",
        str(tmp_path / "heads.yaml"),
        *arguments(chain_actor, tmp_path),
        "--train.async_enable",
        "--train.partial_rollout_enable",
        # A step takes little more than a second, and an engine asks the feed every other one.
        "--train.num_episodes",
        str(EPISODES),
    ]
    learning = {"learning_rate": 0.01, "epochs": 8, "batch_positions": 256}
    with served_desk(chain_actor, tmp_path, learning) as served:
        ours = {COMPANION: served.address, FEED: str(tmp_path / "feed")}
        # The engine's log names each version that it loads.
        ours |= {"DS_ACCELERATOR": "cpu", "VLLM_LOGGING_LEVEL": "INFO"}
        said = train(command, ours, 800)
        status = served.desk.status()

    versions = [batch.policy_version for batch in served.seen]
    # A step takes a second, and the companion wants nothing while it trains: how many it gets is a
    # matter of the machine.
    assert versions == sorted(set(versions))
    assert min(versions) < STEPS and max(versions) >= (EPISODES - 1) * STEPS
    # Every row of a batch that it took, but for those with a single token or interrupted.
    rows = fmean(batch.hidden_MD.shape[0] + batch.left_out for batch in served.seen)
    assert rows >= 0.7 * PROMPTS * RESPONSES * TOKENS
    assert status.versions_published >= 1 and not status.error
    print("versions published:", status.versions_published, "serving:", status.serving)
    # The engine loaded a version by itself. OpenRLHF shows no acceptance; the companion's estimate
    # of the serving heads on the last rows is exact for them.
    assert "is serving; loading took" in said
    assert status.serving is not None and status.serving.mean_acceptance_length > 1.5
