"""Tokens/s of head training, ours against the original recipe of Medusa: the same model, tokens and cores, in turn.

Shape letters: B sequences, T positions, K heads, D hidden, V vocabulary.

The original recipe runs the frozen backbone over every padded batch in every epoch, gives each head a linear layer of its own onto the
vocabulary, makes the logits of all heads at all positions, prompt and padding included, and takes one AdamW step for each batch. The arm
`shared lm_head` is the same without the layers of its own: what is left is what the pipeline alone gains. Ours reads hidden states once
(that pass is part of its time) and trains heads of the same kind on them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from heads.config import HeadsConfig
from heads.modules import MedusaHeads
from medusa_ppo.actors.hf import embedding_weight, lm_head_weight
from medusa_ppo.bench.pairs import PairedRates, run_rounds
from medusa_ppo.companion.trainer import HeadsTrainer
from medusa_ppo.config import CompanionConfig
from medusa_ppo.offline.collect import Sample
from medusa_ppo.offline.hidden import HiddenReader, read_all
from medusa_ppo.offline.progress import OfflineProgress

ORIGINAL, SHARED, OURS = "original", "original, shared lm_head", "ours"
EPOCHS = 2
ROUNDS = 3
TOKENS = 16_384
LEARNING_RATE = 1e-3
IGNORED = -100


def first_tokens(samples: Sequence[Sample], tokens: int) -> list[Sample]:
    """The first samples with at least so many written tokens together."""
    chosen: list[Sample] = []
    total = 0
    for sample in samples:
        if total >= tokens:
            break
        chosen.append(sample)
        total += sample.written
    return chosen


def race(
    actor: PreTrainedModel,
    samples: Sequence[Sample],
    num_heads: int,
    batch_positions: int,
    seed: int,
    progress: OfflineProgress,
    *,
    tokens: int = TOKENS,
    rounds: int = ROUNDS,
) -> dict[str, Any]:
    """Let the arms take turns at two epochs over the same samples; rates are written tokens, each counted in every epoch, per second."""
    chosen = first_tokens(samples, tokens)
    written = sum(sample.written for sample in chosen)
    with progress.phase("Throughput of training", 3 * (rounds + 1)) as advance:

        def timed(name: str, work: Any) -> Any:
            def run(number: int) -> float:
                began = time.perf_counter()
                work()
                rate = EPOCHS * written / (time.perf_counter() - began)
                advance(1, f"{name}: {rate:.0f} tokens/s")
                return rate

            return run

        arms = {
            ORIGINAL: timed(ORIGINAL, lambda: train_originally(actor, chosen, num_heads, batch_positions, seed, "own")),
            SHARED: timed(SHARED, lambda: train_originally(actor, chosen, num_heads, batch_positions, seed, "shared")),
            OURS: timed(OURS, lambda: train_ours(actor, chosen, num_heads, batch_positions, seed)),
        }
        rates = run_rounds(arms, ORIGINAL, rounds)
    return _figures(rates, written)


def train_ours(actor: PreTrainedModel, samples: Sequence[Sample], num_heads: int, batch_positions: int, seed: int) -> MedusaHeads:
    """Hidden states once, then all epochs on them."""
    batch = read_all(HiddenReader(actor, 1.0), samples, lambda *_: None)
    lm_head_VD = lm_head_weight(actor).detach()
    heads = MedusaHeads(HeadsConfig(lm_head_VD.shape[1], lm_head_VD.shape[0], num_heads))
    config = CompanionConfig(loss="ce", learning_rate=LEARNING_RATE, batch_positions=batch_positions, epochs=EPOCHS)
    HeadsTrainer(heads, lm_head_VD, config, seed, embedding_VD=embedding_weight(actor).detach()).train_batch(batch)
    return heads


def train_originally(
    actor: PreTrainedModel,
    samples: Sequence[Sample],
    num_heads: int,
    batch_positions: int,
    seed: int,
    lm_head: Literal["own", "shared"],
) -> MedusaHeads:
    """The original recipe; batches hold about `batch_positions` written tokens, so that both recipes take as many optimizer steps."""
    lm_head_VD = lm_head_weight(actor).detach()
    heads = MedusaHeads(HeadsConfig(lm_head_VD.shape[1], lm_head_VD.shape[0], num_heads, lm_head=lm_head))
    if lm_head == "own":
        heads.init_own_lm_heads(lm_head_VD)
    optimizer = torch.optim.AdamW(heads.parameters(), lr=LEARNING_RATE)
    per_batch = max(1, round(batch_positions * len(samples) / sum(sample.written for sample in samples)))
    generator = torch.Generator().manual_seed(seed)
    for _ in range(EPOCHS):
        for part in torch.randperm(len(samples), generator=generator).split(per_batch):
            loss = original_loss(actor, heads, lm_head_VD, [samples[i] for i in part.tolist()])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
    return heads


def original_loss(actor: PreTrainedModel, heads: MedusaHeads, lm_head_VD: torch.Tensor, samples: Sequence[Sample]) -> torch.Tensor:
    """Sum over heads of the mean cross-entropy on written tokens, from the full logits of every position."""
    width = max(len(sample.ids) for sample in samples)
    ids_BT = torch.zeros(len(samples), width, dtype=torch.int64)
    labels_BT = torch.full_like(ids_BT, IGNORED)
    attention_BT = torch.zeros_like(ids_BT)
    for b, sample in enumerate(samples):
        ids_BT[b, : len(sample.ids)] = torch.tensor(sample.ids)
        attention_BT[b, : len(sample.ids)] = 1
        for first, end in sample.spans:
            labels_BT[b, first:end] = ids_BT[b, first:end]
    with torch.no_grad():
        hidden_BTD = actor.base_model(input_ids=ids_BT, attention_mask=attention_BT, use_cache=False).last_hidden_state
    logits_BTKV = heads(hidden_BTD, None if heads.config.lm_head == "own" else lm_head_VD)
    loss = hidden_BTD.new_zeros(())
    for k in range(heads.config.num_heads):
        ahead = k + 2  # lm_head predicts the token 1 further on, head 1 the one after it.
        logits_NV = logits_BTKV[:, :-ahead, k].flatten(0, 1)
        loss = loss + F.cross_entropy(logits_NV, labels_BT[:, ahead:].flatten(), ignore_index=IGNORED)
    return loss


def _figures(rates: PairedRates, written: int) -> dict[str, Any]:
    to_shared = statistics.median(own / other for own, other in zip(rates.rates[OURS], rates.rates[SHARED], strict=True))
    low, high = rates.spread(OURS)
    return {
        "tokens": written,
        "epochs": EPOCHS,
        "tokens_per_s": {arm: rates.median_rate(arm) for arm in rates.rates},
        "ratio": rates.median_ratio(OURS),
        "ratio_low": low,
        "ratio_high": high,
        "ratio_to_shared": to_shared,
    }


def throughput_sentence(figures: Mapping[str, Any]) -> str:
    """The race in one sentence."""
    speeds = figures["tokens_per_s"]
    return (
        f"Training {figures['epochs']} epochs over {figures['tokens']} tokens: {speeds[OURS]:.0f} tokens/s, x{figures['ratio']:.2f} "
        f"({figures['ratio_low']:.2f} to {figures['ratio_high']:.2f}) of the original recipe's {speeds[ORIGINAL]:.0f}; x"
        f"{figures['ratio_to_shared']:.2f} of what that recipe does with a shared lm_head."
    )
