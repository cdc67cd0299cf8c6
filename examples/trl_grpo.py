"""TRL's GRPO on the embedded task, with draft heads in its colocated vLLM. `python
examples/trl_grpo.py [STEPS] [OUT]`.

On several processes: `ACCELERATE_USE_CPU=true torchrun --nproc_per_node 2 examples/trl_grpo.py 12
OUT`.
"""

from __future__ import annotations

import sys
from typing import Any

from accelerate import PartialState
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from medusa_ppo.demo.actor_cache import ensure_demo_actor
from medusa_ppo.demo.task import demo_rows
from medusa_ppo.loops.trl import MedusaGRPOTrainer
from medusa_ppo.ppo.rewards import exact_answer

MEDUSA = {
    "heads": {"num_heads": 3},
    "companion": {"batch_positions": 256, "epochs": 4},
}


def right_answer(
    prompts: list[str], completions: list[str], answer: list[str], **_: Any
) -> list[float]:
    """1 where the response ends with the right answer."""
    return [
        exact_answer(p, c, {"answer": a})
        for p, c, a in zip(prompts, completions, answer, strict=True)
    ]


def main(
    steps: int = 12,
    out: str = "runs/trl-grpo",
    actor: str = "",
    medusa: Any = MEDUSA,
    **settings: Any,
) -> GRPOTrainer:
    """Train, and return the trainer; its `state.log_history` has the figures, `out`/medusa the
    report.
    """
    args = GRPOConfig(
        output_dir=out,
        max_steps=steps,
        use_vllm=True,
        vllm_mode="colocate",
        **{
            "vllm_max_model_length": 160,
            "max_completion_length": 112,
            # also the sequences that run at once: few, as drafting on a CPU wants it
            "per_device_train_batch_size": 8,
            "gradient_accumulation_steps": 4,
            "steps_per_generation": 1,
            "num_generations": 2,
            "learning_rate": 1e-4,
            "lr_scheduler_type": "constant",
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "bf16": False,
            "gradient_checkpointing": False,
            **settings,
        },
    )
    with (
        PartialState().local_main_process_first()
    ):  # The first process trains the demo's actor if it is not there yet.
        actor = actor or str(ensure_demo_actor())
    rows = Dataset.from_list(demo_rows()).select_columns(["prompt", "answer"])
    trainer = MedusaGRPOTrainer(
        model=actor,
        reward_funcs=right_answer,
        args=args,
        train_dataset=rows,
        medusa=medusa,
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    main(*(int(value) if value.isdigit() else value for value in sys.argv[1:]))
