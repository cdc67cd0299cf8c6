"""What copying costs the companion: positions trained a second by heads that copy, from the best
places (`TRAINED_PLACES`, the default) and from all of them, over heads that are otherwise equal and
do not copy.

    taskset -c 0 python benchmarks/copying_in_training.py [--tokens 128 512 1280] [--rounds 7]
        [--dtype float32]

Each arm is a real trainer on the same random batch: responses of so many tokens to prompts of 32.
Speed does not depend on the values. Arms take turns, and medians of the rounds count. One thread,
as a companion beside a loop has. Asked: 0.7 with copying.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import torch

from heads.heads_config import HeadsConfig
from heads.modules import MedusaHeads
from medusa_ppo.companion import trainer as trainer_module
from medusa_ppo.companion.trainer import HeadsTrainer
from medusa_ppo.config.companion_section import CompanionConfig
from medusa_ppo.contract.rollout_batch import RolloutBatch

WIDTH, VOCAB, HEADS, PROMPT = 256, 2048, 4, 32
STEPS, POSITIONS = 2, 512  # Optimizer steps of a pass, and positions of each.


def make_batch(tokens: int) -> RolloutBatch:
    responses = max(1, STEPS * POSITIONS // tokens)
    rows = responses * tokens
    return RolloutBatch(
        torch.randn(rows, WIDTH),
        torch.randint(VOCAB, (rows,)),
        torch.full((rows,), -5.0),
        torch.full((responses,), tokens),
        before_ids_X=torch.randint(VOCAB, (responses * PROMPT,), dtype=torch.int32),
        before_S=torch.full((responses,), PROMPT),
    )


def make_trainer(copy_parts: int, dtype: str, tables: tuple[torch.Tensor, ...]) -> HeadsTrainer:
    config = HeadsConfig(
        WIDTH,
        VOCAB,
        HEADS,
        kind="hydra",
        mlp_ratio=3,
        context=16,
        context_layers=1,
        feed_forward=2,
        copy_parts=copy_parts,
    )
    settings = CompanionConfig(batch_positions=POSITIONS, dtype=dtype)
    lm_head_VD, embedding_VD = tables
    return HeadsTrainer(MedusaHeads(config), lm_head_VD, settings, 0, embedding_VD=embedding_VD)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 512, 1280])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tables = torch.randn(VOCAB, WIDTH), torch.randn(VOCAB, WIDTH)
    best = trainer_module.TRAINED_PLACES
    arms: dict[str, tuple[int, int | None]] = {
        "none": (0, best),
        f"best {best}": (4, best),
        "all": (4, None),
    }
    for tokens in options.tokens:
        batch = make_batch(tokens)
        trainers = {
            name: make_trainer(parts, options.dtype, tables) for name, (parts, _) in arms.items()
        }
        seconds: dict[str, list[float]] = {name: [] for name in arms}
        for _ in range(options.rounds + 1):  # The first round warms up.
            for name, (_, places) in arms.items():
                trainer_module.TRAINED_PLACES = places  # type: ignore[assignment]
                began = time.perf_counter()
                trainers[name].train_batch(batch, steps=STEPS)
                seconds[name].append(time.perf_counter() - began)
        rows = batch.hidden_MD.shape[0]
        middle = {name: statistics.median(found[1:]) for name, found in seconds.items()}
        shares = ", ".join(
            f"{name} {rows / middle[name]:.0f}/s ({middle['none'] / middle[name]:.2f})"
            for name in arms
        )
        sys.stdout.write(f"{tokens} tokens: {shares}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
