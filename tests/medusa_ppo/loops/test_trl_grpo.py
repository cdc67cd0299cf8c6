"""TRL's trainers on real parts: heads are trained and fed while GRPO runs, and what is learned is
what TRL learns without them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

pytest.importorskip("trl")

from heads.checkpoint import load_heads
from heads.errors import ConfigError
from medusa_ppo.contract import metrics as names
from medusa_ppo.reports.store import read_run

if TYPE_CHECKING:
    from tests.medusa_ppo.loops.conftest import ServedLoop

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = """
import json, sys
from datasets import Dataset
from trl import GRPOConfig, RLOOConfig
from trl import GRPOTrainer, RLOOTrainer

kind, actor, out = sys.argv[1:4]
medusa, settings = map(json.loads, sys.argv[4:])
without_companion = medusa is None or not medusa.get("companion", {}).get("enabled", True)
if without_companion and settings.get("use_vllm"):
    from benchmarks_trl_pairs import mend_cpu_sync
    mend_cpu_sync()

def places(completions, **_):
    # Equal responses get different rewards, so that greedy runs learn too.
    return [float((7 * i) % 5) + (len(text) % 3) for i, text in enumerate(completions)]

if kind.startswith("plain-"):  # TRL's own trainer, and nothing of ours is imported.
    trainer_class = GRPOTrainer if kind == "plain-grpo" else RLOOTrainer
else:
    from medusa_ppo.loops.trl import MedusaGRPOTrainer, MedusaRLOOTrainer
    trainer_class = MedusaGRPOTrainer if kind == "grpo" else MedusaRLOOTrainer
config_class = GRPOConfig if kind.endswith("grpo") else RLOOConfig
args = config_class(
    output_dir=out,
    report_to="none",
    save_strategy="no",
    logging_steps=1,
    bf16=False,
    gradient_checkpointing=False,
    per_device_train_batch_size=16,
    num_generations=2,
    max_completion_length=24,
    learning_rate=1e-3,
    lr_scheduler_type="constant",
    **settings,
)
owned = (("Mia", "pens"), ("Tom", "books"))
words = [f"{name} has {n} {what} ." for name, what in owned for n in range(2, 10)]
rows = Dataset.from_list([{"prompt": w} for w in words * 4])
extra = {} if kind.startswith("plain-") else {"medusa": medusa}
trainer = trainer_class(model=actor, reward_funcs=places, args=args, train_dataset=rows, **extra)
trainer.train()
trainer.save_model(out + "/final")
if trainer.accelerator.is_main_process:
    json.dump(trainer.state.log_history, open(out + "/log.json", "w"))
"""

DRAFTS = {"num_drafts": 2}
COMPANION = {"learning_rate": 1e-2, "epochs": 8, "batch_positions": 256, "wait": True}
VLLM = {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": 128}


def train(
    kind: str,
    actor: Path,
    out: Path,
    medusa: Any,
    *,
    environment: dict[str, str] | None = None,
    processes: int = 1,
    **settings: Any,
) -> list[dict[str, float]]:
    """A training in a process of its own (two engines of TRL don't fit into one); its log."""
    out.mkdir(parents=True)
    (out / "benchmarks_trl_pairs.py").write_text((ROOT / "benchmarks" / "trl_pairs.py").read_text())
    env = os.environ | {
        "PYTHONPATH": f"{ROOT}:{out}",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "ACCELERATE_USE_CPU": "true",
        **(environment or {}),
    }
    (out / "train.py").write_text(SCRIPT)
    launch = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
        if processes > 1
        else []
    )
    command = [
        sys.executable,
        *launch,
        str(out / "train.py"),
        kind,
        str(actor),
        str(out),
        json.dumps(medusa),
        json.dumps(settings),
    ]
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((out / "log.json").read_text())


def final_weights(out: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(out / "final" / "model.safetensors")


def same_bits(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        torch.equal(left[name], right[name]) for name in left
    )


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize("kind", ["grpo", "rloo"])
def test_heads_are_fed_while_the_trainer_runs(
    kind: str, chain_actor: Path, device: torch.device, tmp_path: Path
):
    log = train(
        kind,
        chain_actor,
        tmp_path / "run",
        {"heads": {"num_heads": 2}, "engine": DRAFTS, "companion": COMPANION},
        environment={"ACCELERATE_USE_CPU": str(device.type == "cpu").lower()},
        max_steps=10,
        **VLLM,
    )

    steps = [row for row in log if f"medusa/{names.MAL_SERVING}" in row]
    run = read_run(tmp_path / "run" / "medusa")
    assert len(steps) == len(run.steps) == 10
    versions = [step[names.HEADS_VERSION] for step in run.steps]
    assert (
        versions[0] == 0 and versions == sorted(versions) and versions[-1] >= 1
    )  # The gate decides by 6 held-out prompts, 2 of a batch
    assert [step[names.POLICY_VERSION] for step in run.steps] == list(range(10))
    assert run.steps[-1][names.MAL_SERVING] > run.steps[0][names.MAL_SERVING] + 0.2
    load_heads(tmp_path / "run" / "medusa" / "heads-final")
    if kind == "grpo":
        # The engine samples from the policy that the trainer scores: the sync and the patch for the
        # CPU work.
        assert all(abs(row["sampling/importance_sampling_ratio/mean"] - 1) < 0.02 for row in steps)


@pytest.mark.slow
@pytest.mark.engine
def test_the_actor_learns_the_same_to_the_bit_with_drafts_and_without(
    chain_actor: Path, tmp_path: Path
):
    greedy = {
        "generation_kwargs": {"temperature": 0.0},
        "vllm_importance_sampling_correction": False,
        "max_steps": 8,
        **VLLM,
    }
    with_heads = train(
        "grpo",
        chain_actor,
        tmp_path / "with",
        {"heads": {"num_heads": 2}, "engine": DRAFTS, "companion": COMPANION},
        **greedy,
    )
    train("grpo", chain_actor, tmp_path / "without", None, **greedy)

    assert any(row.get(f"medusa/{names.ACCEPTED}", 0) > 0 for row in with_heads)
    start = final_weights_of(chain_actor)
    assert not same_bits(final_weights(tmp_path / "with"), start), "nothing was learned"
    assert same_bits(final_weights(tmp_path / "with"), final_weights(tmp_path / "without"))


@pytest.mark.slow
@pytest.mark.engine
def test_switched_off_it_is_trls_own_trainer_on_vllm_to_the_bit(chain_actor: Path, tmp_path: Path):
    """Sampled at temperature 1. The other arm is TRL's trainer, imports nothing of ours, and its
    vLLM does not load our plugin.
    """
    off = {"companion": {"enabled": False}, "engine": {"num_drafts": 0}}
    switched_off = train("grpo", chain_actor, tmp_path / "off", off, max_steps=3, **VLLM)
    plain = train(
        "plain-grpo",
        chain_actor,
        tmp_path / "plain",
        None,
        environment={"VLLM_PLUGINS": ""},
        max_steps=3,
        **VLLM,
    )

    assert not same_bits(final_weights(tmp_path / "off"), final_weights_of(chain_actor)), (
        "nothing was learned"
    )
    assert same_bits(final_weights(tmp_path / "off"), final_weights(tmp_path / "plain"))
    assert [row.get("reward") for row in switched_off] == [row.get("reward") for row in plain]
    assert not (tmp_path / "off" / "medusa").exists()


@pytest.mark.slow
@pytest.mark.engine
def test_server_mode_feeds_a_server_that_was_started_before(
    served: ServedLoop, chain_actor: Path, tmp_path: Path
):
    heads = {"num_heads": 2, "path": str(served.heads)}
    medusa = {"heads": heads, "engine": DRAFTS, "companion": COMPANION}
    log = train("grpo", chain_actor, tmp_path / "run", medusa, max_steps=8, **served.settings)

    steps = [row for row in log if f"medusa/{names.MAL_SERVING}" in row]
    assert steps[-1][f"medusa/{names.HEADS_VERSION}"] >= 1
    assert steps[-1][f"medusa/{names.MAL_SERVING}"] > steps[0][f"medusa/{names.MAL_SERVING}"] + 0.2
    assert all(abs(row["sampling/importance_sampling_ratio/mean"] - 1) < 0.02 for row in steps)


def final_weights_of(actor: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(actor / "model.safetensors")


def small_trainer(trainer_class: Any, actor: Path, out: Path, **extra: Any) -> Any:
    from datasets import Dataset
    from trl import GRPOConfig

    args = GRPOConfig(
        output_dir=str(out),
        report_to="none",
        save_strategy="no",
        max_steps=1,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=6,
        learning_rate=1e-3,
    )
    rows = Dataset.from_list([{"prompt": "Mia has 3 pens ."}] * 4)
    return trainer_class(
        model=str(actor),
        reward_funcs=lambda completions, **_: [float(i) for i in range(len(completions))],
        args=args,
        train_dataset=rows,
        **extra,
    )


def test_without_medusa_the_trainer_is_trls_to_the_bit(chain_actor: Path, tmp_path: Path):
    from trl import GRPOTrainer

    from medusa_ppo.loops.trl import MedusaGRPOTrainer

    weights = []
    off = {"companion": {"enabled": False}, "engine": {"num_drafts": 0}}
    for name, trainer_class, extra in (
        ("trl", GRPOTrainer, {}),
        ("none", MedusaGRPOTrainer, {}),
        ("off", MedusaGRPOTrainer, {"medusa": off}),
    ):
        trainer = small_trainer(trainer_class, chain_actor, tmp_path / name, **extra)
        trainer.train()
        weights.append(
            {key: value.detach().clone() for key, value in trainer.model.state_dict().items()}
        )
    assert not same_bits(weights[0], final_weights_of(chain_actor))
    assert same_bits(weights[0], weights[1]) and same_bits(weights[0], weights[2])


def test_what_the_heads_cannot_learn_from_is_refused(chain_actor: Path, tmp_path: Path):
    from medusa_ppo.loops.trl import MedusaGRPOTrainer

    with pytest.raises(ConfigError, match="rollout_func"):
        small_trainer(
            MedusaGRPOTrainer, chain_actor, tmp_path / "a", medusa={}, rollout_func=lambda *_: {}
        )
    with pytest.raises(ConfigError, match="need vLLM"):
        small_trainer(MedusaGRPOTrainer, chain_actor, tmp_path / "b", medusa={})
    with pytest.raises(ConfigError, match="Unknown configuration key"):
        small_trainer(MedusaGRPOTrainer, chain_actor, tmp_path / "c", medusa={"headz": {}})


@pytest.mark.parametrize("by_position", [True, False])
def test_the_processes_wait_as_long_as_the_trainer_lets_them(
    by_position: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from trl import GRPOConfig

    from medusa_ppo.loops import trl

    asked: list[float] = []

    def here(settings: object, timeout_s: float = 0.0) -> Any:
        asked.append(timeout_s)
        raise InterruptedError

    monkeypatch.setattr(trl.Ranks, "here", here)
    args = GRPOConfig(output_dir=str(tmp_path), ddp_timeout=7200, bf16=False)
    given: Any = ("actor", len, args) if by_position else ()
    named: Any = {} if by_position else {"args": args}
    with pytest.raises(InterruptedError):
        trl.MedusaGRPOTrainer(*given, medusa={}, **named)
    assert asked == [7200]
