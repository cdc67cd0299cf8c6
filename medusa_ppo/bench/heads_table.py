"""`medusa-ppo bench heads`: kinds and losses of heads on the same tokens, and the speed of training
against the original recipe of Medusa.

Shape letters: B sequences, T positions, K heads, D hidden, V vocabulary.

The original recipe runs the frozen backbone over every padded batch in every epoch and gives each
head its own linear layer onto the vocabulary. It computes the logits of all heads at all positions,
prompt and padding included, and takes one AdamW step per batch. The arm `original, shared lm_head`
is the same without those layers; it shows how much of our speed comes from the pipeline alone. Ours
reads hidden states once (that pass counts in its time) and trains heads of the same kind on them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from heads.heads_config import HeadsConfig
from heads.modules import MedusaHeads
from medusa_ppo.actors.hf import embedding_weight, lm_head_weight, load_actor
from medusa_ppo.bench.bench_options import HeadsBench, Table
from medusa_ppo.bench.pairs import run_rounds, table_of
from medusa_ppo.companion.gate import Served, replay
from medusa_ppo.companion.trainer import HeadsTrainer
from medusa_ppo.config.companion_section import CompanionConfig
from medusa_ppo.contract.rollout_batch import RolloutBatch
from medusa_ppo.contract.rollouts import Sampling
from medusa_ppo.offline.collect import Sample, response_rounds, samples_of, split_samples
from medusa_ppo.offline.hidden import HiddenReader, read_all
from medusa_ppo.offline.scene import engine_config, on_device, read_scene, running_engine
from medusa_ppo.offline.schedule import cosine_schedule
from medusa_ppo.runtime.console import OfflineProgress

ORIGINAL, SHARED, OURS = "original", "original, shared lm_head", "ours"
# Settings of the race, which compares speed, not learning.
EPOCHS = 2
ROUNDS = 3
TOKENS = 16_384
LEARNING_RATE = 1e-3
# The target that torch's cross-entropy ignores by default.
IGNORED = -100
# Each combination is judged at the best of these.
DRAFT_TEMPERATURES = (0.6, 0.8, 1.0)
HELD_OUT_RESPONSES = 150
COLUMNS = {
    "kind": "{kind}",
    "loss": "{loss}",
    "parameters": "{parameters_m:.2f} M",
    "one-hot": "{one_hot:.3f}",
    "sampled": "{sampled:.3f}",
    "draft temp.": "{draft_temperature:.1f}",
    "tokens/s": "{train_tokens_per_s:.0f}",
}


def first_tokens(samples: Sequence[Sample], tokens: int) -> list[Sample]:
    """The first samples that together have at least this many written tokens."""
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
    """Let the arms take turns at two epochs over the same samples. Rates are written tokens per
    second, counted again in every epoch.
    """
    chosen = first_tokens(samples, tokens)
    written = sum(sample.written for sample in chosen)
    recipe = (actor, chosen, num_heads, batch_positions, seed)
    works: dict[str, Callable[[], object]] = {
        ORIGINAL: lambda: train_originally(*recipe, "own"),
        SHARED: lambda: train_originally(*recipe, "shared"),
        OURS: lambda: train_ours(*recipe),
    }
    with progress.phase("Throughput of training", len(works) * (rounds + 1)) as advance:

        def timed(name: str) -> Callable[[int], float]:
            def run(number: int) -> float:
                began = time.perf_counter()
                works[name]()
                if actor.device.type == "cuda":
                    # The last products may still be on their way.
                    torch.cuda.synchronize(actor.device)
                rate = EPOCHS * written / (time.perf_counter() - began)
                advance(1, f"{name}: {rate:.0f} tokens/s")
                return rate

            return run

        # Arms take turns: a shared machine is faster in one minute than in the next.
        rates = run_rounds({name: timed(name) for name in works}, ORIGINAL, rounds)
    return {
        "tokens": written,
        "epochs": EPOCHS,
        "tokens_per_s": {arm: rates.median_rate(arm) for arm in works},
        **rates.ratio_figures(OURS),
        "ratio_to_shared": statistics.median(
            own / other for own, other in zip(rates.rates[OURS], rates.rates[SHARED], strict=True)
        ),
    }


def train_ours(
    actor: PreTrainedModel,
    samples: Sequence[Sample],
    num_heads: int,
    batch_positions: int,
    seed: int,
) -> MedusaHeads:
    """Our way: compute the hidden states once, and train all epochs on them."""
    batch = read_all(HiddenReader(actor, 1.0), samples, lambda *_: None)
    lm_head_VD = lm_head_weight(actor).detach()
    heads = MedusaHeads(HeadsConfig(lm_head_VD.shape[1], lm_head_VD.shape[0], num_heads))
    config = CompanionConfig(
        loss="ce", learning_rate=LEARNING_RATE, batch_positions=batch_positions, epochs=EPOCHS
    )
    HeadsTrainer(
        heads,
        lm_head_VD,
        config,
        seed,
        embedding_VD=embedding_weight(actor).detach(),
        device=actor.device,
    ).train_batch(batch)
    return heads


def train_originally(
    actor: PreTrainedModel,
    samples: Sequence[Sample],
    num_heads: int,
    batch_positions: int,
    seed: int,
    lm_head: Literal["own", "shared"],
) -> MedusaHeads:
    """The original recipe. Batches hold about `batch_positions` written tokens, so that both ways
    take the same number of optimizer steps.
    """
    lm_head_VD = lm_head_weight(actor).detach()
    heads = MedusaHeads(
        HeadsConfig(lm_head_VD.shape[1], lm_head_VD.shape[0], num_heads, lm_head=lm_head)
    ).to(actor.device)
    if lm_head == "own":
        # As in that recipe, each head's own layer begins as a copy of the model's lm_head.
        heads.init_own_lm_heads(lm_head_VD)
    optimizer = torch.optim.AdamW(heads.parameters(), lr=LEARNING_RATE)
    # The original batches by sequences, ours by positions. With equal numbers of optimizer steps,
    # only speed differs.
    per_batch = max(
        1, round(batch_positions * len(samples) / sum(sample.written for sample in samples))
    )
    generator = torch.Generator().manual_seed(seed)
    for _ in range(EPOCHS):
        for part in torch.randperm(len(samples), generator=generator).split(per_batch):
            loss = original_loss(actor, heads, lm_head_VD, [samples[i] for i in part.tolist()])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
    return heads


def original_loss(
    actor: PreTrainedModel, heads: MedusaHeads, lm_head_VD: torch.Tensor, samples: Sequence[Sample]
) -> torch.Tensor:
    """The sum over heads of the mean cross-entropy on written tokens. As in the original, the full
    logits of every position are computed first.
    """
    width = max(len(sample.ids) for sample in samples)
    ids_BT = torch.zeros(len(samples), width, dtype=torch.int64)
    labels_BT = torch.full_like(ids_BT, IGNORED)
    attention_BT = torch.zeros_like(ids_BT)
    for b, sample in enumerate(samples):
        ids_BT[b, : len(sample.ids)] = torch.tensor(sample.ids)
        attention_BT[b, : len(sample.ids)] = 1
        for first, end in sample.spans:
            labels_BT[b, first:end] = ids_BT[b, first:end]
    labels_BT = labels_BT.to(actor.device)
    with torch.no_grad():
        hidden_BTD = actor.base_model(
            input_ids=ids_BT.to(actor.device),
            attention_mask=attention_BT.to(actor.device),
            use_cache=False,
        ).last_hidden_state
    logits_BTKV = heads(hidden_BTD, None if heads.config.lm_head == "own" else lm_head_VD)
    loss = hidden_BTD.new_zeros(())
    for k in range(heads.config.num_heads):
        # lm_head predicts the next token, head 1 the one after it.
        ahead = k + 2
        logits_NV = logits_BTKV[:, :-ahead, k].flatten(0, 1)
        loss = loss + F.cross_entropy(
            logits_NV, labels_BT[:, ahead:].flatten(), ignore_index=IGNORED
        )
    return loss


def throughput_sentence(figures: Mapping[str, Any]) -> str:
    """The race in one sentence."""
    speeds = figures["tokens_per_s"]
    return (
        f"Training {figures['epochs']} epochs over {figures['tokens']} tokens: {speeds[OURS]:.0f}"
        f" tokens/s, x{figures['ratio']:.2f} ({figures['ratio_low']:.2f} to"
        f" {figures['ratio_high']:.2f}) of the original recipe's {speeds[ORIGINAL]:.0f};"
        f" x{figures['ratio_to_shared']:.2f} of what that recipe does with a shared lm_head."
    )


@dataclass(frozen=True)
class Collected:
    """The tokens that every combination is trained and judged on. No held-out response answers a
    training prompt.
    """

    actor: PreTrainedModel
    samples: list[Sample]
    train: RolloutBatch
    holdout: RolloutBatch
    lm_head_VD: torch.Tensor
    embedding_VD: torch.Tensor


def collect(bench: HeadsBench, progress: OfflineProgress) -> Collected:
    """Let the model write on-policy rollouts at temperature 1."""
    setting = read_scene(bench.model, bench.data, bench.template, bench.max_new_tokens)
    held_tokens = HELD_OUT_RESPONSES * bench.max_new_tokens
    wanted = bench.train_tokens + held_tokens
    with running_engine(
        bench.model, "", engine_config(setting.prompts, bench.max_new_tokens), bench.seed
    ) as engine:
        with progress.phase("Writing responses", wanted) as advance:
            sampling = Sampling(max_new_tokens=bench.max_new_tokens, seed=bench.seed)
            rounds = list(response_rounds(engine, setting.prompts, sampling, wanted, advance))
    samples = samples_of(rounds)
    training, held = split_samples(
        samples, HELD_OUT_RESPONSES / len(samples), held_tokens, bench.seed
    )
    # Cut after the holdout is taken out, so that every combination trains on as many tokens as
    # requested.
    training = first_tokens(training, bench.train_tokens)
    actor = on_device(load_actor(bench.model))
    with progress.phase("Hidden states", len(training) + len(held)) as advance:
        reader = HiddenReader(actor, 1.0)
        train, holdout = (read_all(reader, part, advance) for part in (training, held))
    return Collected(
        actor,
        training,
        train,
        holdout,
        lm_head_weight(actor).detach().float(),
        embedding_weight(actor).detach().float(),
    )


def run_heads(bench: HeadsBench, progress: OfflineProgress) -> dict[str, Any]:
    """Train every combination on the same tokens and replay it on the same held-out responses; then
    race the original recipe.
    """
    found = collect(bench, progress)
    rows = []
    pairs = [(kind, loss) for kind in bench.kinds for loss in bench.losses]
    with progress.phase("Training", len(pairs)) as advance:
        for kind, loss in pairs:
            row = _train_and_judge(bench, kind, loss, found)
            rows.append(row)
            advance(1, f"{kind} {loss}: one-hot {row['one_hot']:.3f}, sampled {row['sampled']:.3f}")
    return {
        "train_tokens": found.train.response_ids_M.numel(),
        "held_out_tokens": found.holdout.response_ids_M.numel(),
        "epochs": bench.epochs,
        "rows": rows,
        "throughput": race(
            found.actor, found.samples, bench.num_heads, bench.batch_positions, bench.seed, progress
        ),
    }


def _train_and_judge(bench: HeadsBench, kind: str, loss: str, found: Collected) -> dict[str, Any]:
    # Every combination begins with the same random numbers, whatever ran before it.
    torch.manual_seed(bench.seed)
    lm_head_VD = found.lm_head_VD
    embedding_VD = found.embedding_VD
    vocab_size, hidden_size = lm_head_VD.shape
    heads = MedusaHeads(bench.section(kind).sizes(hidden_size, vocab_size))
    config = CompanionConfig(
        loss=loss,
        learning_rate=bench.learning_rate,
        epochs=bench.epochs,
        batch_positions=bench.batch_positions,
    )
    steps = bench.epochs * config.steps_of(found.train.response_ids_M.numel())
    trainer = HeadsTrainer(
        heads,
        lm_head_VD,
        config,
        bench.seed,
        embedding_VD=embedding_VD,
        device=found.actor.device,
        schedule=cosine_schedule(steps),
    )
    started = time.monotonic()
    report = trainer.train_batch(found.train)
    seconds = time.monotonic() - started
    one_hot, *sampled = (
        replay(
            heads,
            found.holdout,
            lm_head_VD,
            embedding_VD=embedding_VD,
            served=Served(temperature),
        ).mean_acceptance_length
        for temperature in (0.0, *DRAFT_TEMPERATURES)
    )
    # A user would fit the draft temperature too, so each combination is judged at its best one.
    best, temperature = max(zip(sampled, DRAFT_TEMPERATURES, strict=True))
    return {
        "kind": kind,
        "loss": loss,
        "parameters": sum(p.numel() for p in heads.parameters()),
        "one_hot": one_hot,
        "sampled": best,
        "draft_temperature": temperature,
        "train_tokens_per_s": bench.epochs * report.tokens / seconds,
    }


def table(result: Mapping[str, Any]) -> Table:
    """The result as a table."""
    return table_of(
        COLUMNS, [{**row, "parameters_m": row["parameters"] / 1e6} for row in result["rows"]]
    )


def verdict(result: Mapping[str, Any]) -> list[str]:
    """The sentences that a reader wants first."""
    sentences = [throughput_sentence(result["throughput"])]
    for drafts, key in (("one-hot", "one_hot"), ("sampled", "sampled")):
        best = max(result["rows"], key=lambda row: row[key])
        sentences.append(
            f"Best with {drafts} drafts: {best['kind']} with {best['loss']}, {best[key]:.3f} tokens"
            " a step."
        )
    return sentences
