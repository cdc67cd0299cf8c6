"""Contract with TRL's last PPOTrainer, and a real training beside which heads are trained."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip(
    "trl.experimental.ppo.ppo_trainer", reason="TRL has no PPOTrainer any more: make test-contracts"
)

from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    set_seed,
)
from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

from heads.checkpoint import load_heads
from medusa_ppo.config.run_config import build_config
from medusa_ppo.contract import metrics as names
from medusa_ppo.loops.attachment import Attachment
from medusa_ppo.loops.loop_versions import require_loop
from medusa_ppo.loops.trl_ppo import MedusaPPOTrainer
from medusa_ppo.reports.store import read_run
from medusa_ppo.runtime.processes import local_ray


def test_names_signatures_and_order():
    import trl

    assert require_loop("trl.experimental.ppo") == trl.__version__
    wanted = [
        "model",
        "queries",
        "local_rollout_forward_batch_size",
        "pad_token_id",
        "generation_config",
    ]
    assert list(inspect.signature(ppo_trainer.batch_generation).parameters) == wanted
    train = inspect.getsource(PPOTrainer.train)
    order = (
        "on_train_begin(",
        "= batch_generation(",
        "= forward(model, mb_query_responses",
        "on_step_end(",
        "on_train_end(",
    )
    assert [train.index(part) for part in order] == sorted(train.index(part) for part in order)
    assert "batch_generation(" in inspect.getsource(PPOTrainer.generate_completions)
    forward = inspect.getsource(ppo_trainer.forward)
    assert (
        "attention_mask = query_responses != pad_token_id" in forward
        and "input_ids=input_ids" in forward
    )
    assert "self.policy(**kwargs)" in inspect.getsource(ppo_trainer.PolicyAndValueWrapper.forward)


@pytest.fixture
def ray_session() -> Iterator[None]:
    with local_ray(cpus=2):
        yield


def train(trainer_class: Any, actor: Path, out: Path, **extra: Any) -> dict[str, torch.Tensor]:
    """Three updates; the policy's weights afterwards."""
    set_seed(0)  # NumPy's too: TRL shuffles its minibatches with it.
    tokenizer = AutoTokenizer.from_pretrained(actor, padding_side="left")
    tokenizer.add_special_tokens({"pad_token": tokenizer.convert_ids_to_tokens(1)})
    judge = {"num_labels": 1, "pad_token_id": tokenizer.pad_token_id}
    rows = Dataset.from_list(
        [{"input_ids": tokenizer(f"Mia has {n} pens .").input_ids} for n in range(2, 18)]
    )
    trainer = trainer_class(
        args=PPOConfig(
            output_dir=str(out),
            report_to="none",
            save_strategy="no",
            per_device_train_batch_size=16,
            num_mini_batches=1,
            num_ppo_epochs=2,
            total_episodes=48,
            response_length=12,
            learning_rate=1e-4,
            num_sample_generations=0,
            bf16=False,
            gradient_checkpointing=False,
            seed=0,
        ),
        processing_class=tokenizer,
        model=AutoModelForCausalLM.from_pretrained(actor),
        ref_model=AutoModelForCausalLM.from_pretrained(actor),
        reward_model=AutoModelForSequenceClassification.from_pretrained(actor, **judge),
        value_model=AutoModelForSequenceClassification.from_pretrained(actor, **judge),
        train_dataset=rows,
        **extra,
    )
    trainer.train()
    return {
        name: value.detach().clone() for name, value in trainer.model.policy.state_dict().items()
    }


def test_heads_are_trained_and_the_policy_learns_the_same_to_the_bit(
    small_actor: Path, tmp_path: Path, ray_session: None
):
    medusa = {
        "heads": {"num_heads": 2},
        "companion": {"learning_rate": 1e-2, "batch_positions": 64, "wait": True},
    }
    with_heads = train(MedusaPPOTrainer, small_actor, tmp_path / "with", medusa=medusa)
    without = train(PPOTrainer, small_actor, tmp_path / "without")

    assert all(torch.equal(with_heads[name], without[name]) for name in without)
    start = AutoModelForCausalLM.from_pretrained(small_actor).state_dict()
    assert not all(torch.equal(without[name], start[name]) for name in start)
    run = read_run(tmp_path / "with" / "medusa")
    assert len(run.steps) == 3 and run.steps[-1][names.COMPANION_TRAINED_TOKENS] > 200
    load_heads(tmp_path / "with" / "medusa" / "heads-final")


def test_a_training_that_fails_is_told_to_medusa(monkeypatch: pytest.MonkeyPatch):
    """TRL has no event for it."""
    error = RuntimeError("no reward")

    def fails(self: Any) -> None:
        raise error

    told: list[BaseException] = []
    monkeypatch.setattr(PPOTrainer, "train", fails)
    trainer = object.__new__(MedusaPPOTrainer)
    trainer.medusa = Attachment(build_config({"heads": {"num_heads": 2}}))
    monkeypatch.setattr(trainer.medusa, "_fail", told.append)
    with pytest.raises(RuntimeError, match="no reward"):
        trainer.train()
    assert told == [error]
