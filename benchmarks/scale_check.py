"""Compares the formulas of scale.py with measurements on this machine: bytes moved, and the
companion's time relative to the scoring pass.

    python benchmarks/scale_check.py [--small] [--json FILE]

It takes minutes; `--small` has sizes for a busy machine.

Both times are taken in turn on the same threads. The ratio of their arithmetic is the model's
prediction of the ratio of the times; it is valid on any machine where both reach the same share of
its arithmetic. A random Llama replaces the actor: times don't depend on the weights' values.

Letters: B batch rows, T tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from scale import head_flops
from transformers import LlamaConfig, LlamaForCausalLM

from heads.checkpoint import save_state
from heads.heads_config import HeadsConfig
from heads.modules import MedusaHeads
from medusa_ppo.cli.plan import heads_parameters, hidden_bytes
from medusa_ppo.companion.trainer import HeadsTrainer
from medusa_ppo.config.companion_section import CompanionConfig
from medusa_ppo.contract.rollout_batch import RolloutBatch
from medusa_ppo.engines.actor_sync import actor_state
from medusa_ppo.runtime.hardware import FLOAT32, ModelSizes

ROUNDS = 5
LAYERS, WIDTH, VOCAB, ROWS, TOKENS = 6, 512, 8192, 8, 256
SMALL = {"width": 256, "vocab": 4096, "rows": 2}


def compare(
    rounds: int = ROUNDS,
    layers: int = LAYERS,
    width: int = WIDTH,
    vocab: int = VOCAB,
    rows: int = ROWS,
    tokens: int = TOKENS,
) -> dict[str, str]:
    """Each formula's figure next to the measured one."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=11 * width // 4,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        tie_word_embeddings=False,
    )
    actor = LlamaForCausalLM(config).eval()
    sizes = ModelSizes.from_config(config.to_dict())
    batch = RolloutBatch(
        torch.randn(rows * tokens, width),
        torch.randint(vocab, (rows * tokens,)),
        torch.full((rows * tokens,), -2.0),
        torch.full((rows,), tokens),
    )
    out = _bytes(actor, sizes, batch)
    score_flops = 2.0 * sizes.product_parameters * rows * tokens
    cases = (
        ("medusa", "ce", 0, 0),
        ("hydra", "ce_tv", 0, 0),
        ("hydra", "kl_tv", 16, 0),
        ("hydra", "kl_tv", 16, vocab // 8),
    )
    for kind, loss, pairs, part in cases:
        heads = HeadsConfig(width, vocab, 4, kind, context=pairs)
        table = actor.lm_head.weight.detach()
        settings = CompanionConfig(loss=loss, epochs=1, batch_positions=rows * tokens)
        trainer = HeadsTrainer(
            MedusaHeads(heads),
            table,
            settings,
            0,
            embedding_VD=actor.model.embed_tokens.weight.detach(),
        )
        # Rows from all over the table, like those of a draft vocabulary.
        trainer.ids_W = torch.arange(part) * 8 if part else None
        score_s, train_s = _in_turn(
            lambda: _score(actor, rows, tokens),
            # Bound now: a lambda would take the loop's last trainer. In one step, because the
            # formulas have no optimizer.
            lambda trainer=trainer: trainer.train_batch(batch, steps=1),
            rounds,
        )
        train_flops = (
            head_flops(heads, training=True, width=part, teacher=loss == "kl_tv") * rows * tokens
        )
        name = (
            kind
            + f" {loss}" * (kind != "medusa")
            + f", context {pairs}" * bool(pairs)
            + f", {part} tokens" * bool(part)
        )
        ratios = sorted(t / s for s, t in zip(score_s, train_s, strict=True))
        said = train_flops / score_flops
        found = statistics.median(ratios)
        out[f"{name}: training / scoring pass, seconds"] = (
            f"model {said:.3f}, measured {found:.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f});"
            f" measured / model {found / said:.2f}"
        )
        rates = (score_flops / statistics.median(score_s), train_flops / statistics.median(train_s))
        out[f"{name}: arithmetic reached, Gflop/s"] = (
            f"scoring {rates[0] / 1e9:.0f}, training {rates[1] / 1e9:.0f}"
        )
    return out


def _bytes(actor: LlamaForCausalLM, sizes: ModelSizes, batch: RolloutBatch) -> dict[str, str]:
    heads = HeadsConfig(sizes.hidden, sizes.vocab, 4, "hydra")
    with tempfile.TemporaryDirectory() as folder:
        found = {}
        for name, state in (
            ("actor", actor_state(actor)),
            ("heads", MedusaHeads(heads).trainable_state()),
        ):
            save_state(Path(folder) / name, state)
            found[name] = (Path(folder) / name).stat().st_size
    pairs = {
        "actor weights, bytes": (FLOAT32 * sizes.parameters, found["actor"]),
        "heads, bytes": (FLOAT32 * heads_parameters(heads), found["heads"]),
        "hidden states and tokens, bytes": (
            hidden_bytes(sizes, batch.hidden_MD.shape[0]),
            batch.nbytes,
        ),
    }
    return {
        name: f"model {said}, measured {real}; measured / model {real / said:.4f}"
        for name, (said, real) in pairs.items()
    }


@torch.no_grad()
def _score(actor: LlamaForCausalLM, rows: int, tokens: int) -> None:
    actor(torch.zeros(rows, tokens, dtype=torch.int64))


def _in_turn(
    first: Callable[[], object], second: Callable[[], object], rounds: int
) -> tuple[list[float], list[float]]:
    """Seconds of both, taken in turn; a first round is discarded."""
    taken: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds + 1):
        for call, seconds in zip((first, second), taken, strict=True):
            began = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - began)
    return taken[0][1:], taken[1][1:]


def main() -> None:
    parser = argparse.ArgumentParser(
        description="The formulas of scale.py against measurements on this machine."
    )
    parser.add_argument("--small", action="store_true", help="sizes for a busy machine")
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    options = parser.parse_args()
    found = compare(**(SMALL if options.small else {}))
    sys.stdout.write("\n".join(f"{name:<44} {value}" for name, value in found.items()) + "\n")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
