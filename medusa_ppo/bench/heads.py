"""`medusa-ppo bench heads`: kinds x losses on the same tokens, judged by replay with one-hot and with sampled drafts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from transformers import PreTrainedModel

from heads.config import HeadsConfig
from heads.modules import MedusaHeads
from medusa_ppo.actors.hf import embedding_weight, lm_head_weight, load_actor
from medusa_ppo.bench.throughput import first_tokens, race, throughput_sentence
from medusa_ppo.companion.gate import replay
from medusa_ppo.companion.trainer import HeadsTrainer, cosine_schedule
from medusa_ppo.config import CompanionConfig
from medusa_ppo.offline.collect import Sample, samples_of, split_samples, write_responses
from medusa_ppo.offline.hidden import HiddenReader, read_all
from medusa_ppo.offline.progress import OfflineProgress
from medusa_ppo.offline.setting import engine_config, read_setting, running_engine
from medusa_ppo.types import RolloutBatch, Sampling

DRAFT_TEMPERATURES = (0.6, 0.8, 1.0)
HELD_OUT_RESPONSES = 150


@dataclass(frozen=True)
class HeadsBench:
    """What to compare, on what."""

    model: str
    data: str
    template: str
    train_tokens: int = 100_000
    epochs: int = 4
    num_heads: int = 4
    kinds: tuple[str, ...] = ("medusa", "markov", "hydra")
    losses: tuple[str, ...] = ("ce", "tv", "ce_tv", "kl", "kl_tv")
    max_new_tokens: int = 96
    learning_rate: float = 2e-3
    batch_positions: int = 512
    seed: int = 0


@dataclass(frozen=True)
class Collected:
    """What all combinations are trained and judged on. No held-out response answers a prompt that was trained on."""

    actor: PreTrainedModel
    samples: list[Sample]
    train: RolloutBatch
    holdout: RolloutBatch
    lm_head_VD: torch.Tensor
    embedding_VD: torch.Tensor


def collect(bench: HeadsBench, progress: OfflineProgress) -> Collected:
    """On-policy rollouts of the model at temperature 1."""
    setting = read_setting(bench.model, bench.data, bench.template, bench.max_new_tokens)
    held_tokens = HELD_OUT_RESPONSES * bench.max_new_tokens
    wanted = bench.train_tokens + held_tokens
    with running_engine(bench.model, "", engine_config(setting.prompts, bench.max_new_tokens), bench.seed) as engine:
        with progress.phase("Writing responses", wanted) as advance:
            rounds = write_responses(engine, setting.prompts, Sampling(max_new_tokens=bench.max_new_tokens), wanted, bench.seed, advance)
    samples = samples_of(rounds)
    training, held = split_samples(samples, HELD_OUT_RESPONSES / len(samples), held_tokens, bench.seed)
    training = first_tokens(training, bench.train_tokens)
    actor = load_actor(bench.model)
    with progress.phase("Hidden states", len(training) + len(held)) as advance:
        reader = HiddenReader(actor, 1.0)
        train, holdout = (read_all(reader, part, advance) for part in (training, held))
    return Collected(actor, training, train, holdout, lm_head_weight(actor).detach().float(), embedding_weight(actor).detach().float())


def run_heads(bench: HeadsBench, progress: OfflineProgress) -> dict[str, Any]:
    """Train every combination on the same tokens and replay it on the same held-out responses; then race the original recipe."""
    found = collect(bench, progress)
    rows = []
    pairs = [(kind, loss) for kind in bench.kinds for loss in bench.losses]
    with progress.phase("Training", len(pairs)) as advance:
        for kind, loss in pairs:
            row = _train_and_judge(bench, kind, loss, found.train, found.holdout, found.lm_head_VD, found.embedding_VD)
            rows.append(row)
            advance(1, f"{kind} {loss}: one-hot {row['one_hot']:.3f}, sampled {row['sampled']:.3f}")
    return {
        "train_tokens": found.train.response_ids_M.numel(),
        "held_out_tokens": found.holdout.response_ids_M.numel(),
        "epochs": bench.epochs,
        "rows": rows,
        "throughput": race(found.actor, found.samples, bench.num_heads, bench.batch_positions, bench.seed, progress),
    }


def _train_and_judge(
    bench: HeadsBench,
    kind: str,
    loss: str,
    train: RolloutBatch,
    holdout: RolloutBatch,
    lm_head_VD: torch.Tensor,
    embedding_VD: torch.Tensor,
) -> dict[str, Any]:
    torch.manual_seed(bench.seed)
    heads = MedusaHeads(HeadsConfig(lm_head_VD.shape[1], lm_head_VD.shape[0], bench.num_heads, kind))
    config = CompanionConfig(loss=loss, learning_rate=bench.learning_rate, epochs=bench.epochs, batch_positions=bench.batch_positions)
    steps = bench.epochs * -(-train.response_ids_M.numel() // bench.batch_positions)
    trainer = HeadsTrainer(heads, lm_head_VD, config, bench.seed, embedding_VD=embedding_VD, schedule=cosine_schedule(steps))
    started = time.monotonic()
    report = trainer.train_batch(train)
    seconds = time.monotonic() - started
    one_hot = replay(heads, holdout, lm_head_VD, embedding_VD=embedding_VD)
    best, temperature = max(_sampled(heads, holdout, lm_head_VD, embedding_VD))
    return {
        "kind": kind,
        "loss": loss,
        "parameters": sum(p.numel() for p in heads.parameters()),
        "one_hot": one_hot.mean_acceptance_length,
        "sampled": best,
        "draft_temperature": temperature,
        "train_tokens_per_s": bench.epochs * report.tokens / seconds,
    }


def _sampled(
    heads: MedusaHeads, holdout: RolloutBatch, lm_head_VD: torch.Tensor, embedding_VD: torch.Tensor
) -> Iterator[tuple[float, float]]:
    for temperature in DRAFT_TEMPERATURES:
        result = replay(heads, holdout, lm_head_VD, embedding_VD=embedding_VD, draft_temperature=temperature)
        yield result.mean_acceptance_length, temperature


def table(result: dict[str, Any]) -> list[list[str]]:
    """Header and rows for people."""
    header = ["kind", "loss", "parameters", "one-hot", "sampled", "draft temp.", "tokens/s"]
    rows = [
        [
            r["kind"],
            r["loss"],
            f"{r['parameters'] / 1e6:.2f} M",
            f"{r['one_hot']:.3f}",
            f"{r['sampled']:.3f}",
            f"{r['draft_temperature']:.1f}",
            f"{r['train_tokens_per_s']:.0f}",
        ]
        for r in result["rows"]
    ]
    return [header, *rows]


def verdict(result: dict[str, Any]) -> list[str]:
    """The sentences that a reader wants first."""
    sentences = [throughput_sentence(result["throughput"])]
    for drafts, key in (("one-hot", "one_hot"), ("sampled", "sampled")):
        best = max(result["rows"], key=itemgetter(key))
        sentences.append(f"Best with {drafts} drafts: {best['kind']} with {best['loss']}, {best[key]:.3f} tokens a step.")
    return sentences
