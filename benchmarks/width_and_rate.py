"""Does the companion's default learning rate suit actors of every width? Heads learn a world of
bigrams whose states are as wide as asked, with the trainer of the companion.

    python benchmarks/width_and_rate.py [--widths 256 1024] [--rates 2e-3 default] [--steps 28]

The next token depends on the last one alone, and the state after a token is fixed, so the task is
the same at each width: 512 tokens, entropy of 4.4 nats. The output is one JSON line for each width
and rate: the mean `kl_tv` loss of the four untrained heads at each step of 64 positions.

Shape letters: S sequences, T tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

import argparse
import json
import sys

import torch

from heads.modules import MedusaHeads
from medusa_ppo.companion.trainer import HeadsTrainer
from medusa_ppo.config.companion_section import CompanionConfig
from medusa_ppo.config.heads_section import HeadsSection
from medusa_ppo.contract.rollout_batch import RolloutBatch

VOCAB = 512
LENGTH = 64
STATE_RMS = 2.0
EMBEDDING_RMS = 0.02


def bigrams(width: int, sequences: int) -> tuple[RolloutBatch, torch.Tensor, torch.Tensor]:
    """A batch of such text, and the actor's two tables `[V, D]`."""
    lm_head_VD = torch.randn(VOCAB, width) / width**0.5
    embedding_VD = torch.randn(VOCAB, width) * EMBEDDING_RMS
    state_VD = torch.randn(VOCAB, width)
    state_VD *= STATE_RMS / state_VD.square().mean(-1, keepdim=True).sqrt()
    next_VV = (state_VD @ lm_head_VD.T).softmax(-1)
    ids_ST = torch.empty(sequences, LENGTH + 1, dtype=torch.int64)
    ids_ST[:, 0] = torch.randint(VOCAB, (sequences,))
    for place in range(LENGTH):
        ids_ST[:, place + 1] = torch.multinomial(next_VV[ids_ST[:, place]], 1)[:, 0]
    before_M, response_M = ids_ST[:, :-1].flatten(), ids_ST[:, 1:].flatten()
    batch = RolloutBatch(
        state_VD[before_M],
        response_M,
        next_VV[before_M, response_M].log(),
        torch.full((sequences,), LENGTH),
        before_ids_X=ids_ST[:, 0].int(),
        before_S=torch.ones(sequences, dtype=torch.int64),
    )
    return batch, lm_head_VD, embedding_VD


def losses(width: int, rate: float | None, steps: int, positions: int) -> list[float]:
    """Mean loss of the heads at each step of one pass."""
    torch.manual_seed(0)
    batch, lm_head_VD, embedding_VD = bigrams(width, max(2, steps * positions // LENGTH))
    # Set, because the default belongs to larger steps.
    rate = CompanionConfig(learning_rate=rate).learning_rate_of(width)
    config = CompanionConfig(learning_rate=rate, batch_positions=positions, epochs=1)
    trainer = HeadsTrainer(
        MedusaHeads(HeadsSection().sizes(width, VOCAB)),
        lm_head_VD,
        config,
        0,
        embedding_VD=embedding_VD,
    )
    found = []
    step = trainer._step

    def noted(*given: object) -> torch.Tensor:
        loss_K = step(*given)  # type: ignore[arg-type]
        found.append(round(float(loss_K.mean()), 3))
        return loss_K

    trainer._step = noted  # type: ignore[method-assign]
    trainer.train_batch(batch, steps=steps)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--widths", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--rates", nargs="+", default=["2e-3", "default"])
    parser.add_argument("--steps", type=int, default=28)
    parser.add_argument("--positions", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for width in options.widths:
        for name in options.rates:
            rate = None if name == "default" else float(name)
            row = {
                "width": width,
                "rate": CompanionConfig(learning_rate=rate).learning_rate_of(width),
                "losses": losses(width, rate, options.steps, options.positions),
            }
            sys.stdout.write(json.dumps(row) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
