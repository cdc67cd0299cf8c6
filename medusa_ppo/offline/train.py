"""`medusa-ppo train`: heads for any causal LM, on its own responses or on full texts."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedModel

from heads.acceptance import ReplayResult
from heads.checkpoint import save_heads
from heads.config import HeadsConfig
from heads.errors import DataError
from heads.modules import MedusaHeads
from medusa_ppo.actors.hf import embedding_weight, lm_head_weight, load_actor
from medusa_ppo.companion.gate import replay
from medusa_ppo.companion.trainer import HeadsTrainer, cosine_schedule
from medusa_ppo.config import CompanionConfig
from medusa_ppo.offline.collect import Sample, hidden_batch, samples_from_texts, samples_of, write_responses
from medusa_ppo.offline.progress import OfflineProgress
from medusa_ppo.offline.setting import Setting, engine_config, out_folder, read_setting, running_engine, texts_of
from medusa_ppo.types import RolloutBatch, Sampling

HOLDOUT_FRACTION = 0.1
LOG_STEPS_PER_EPOCH = 4
FLOAT_BYTES = 4
ADAM_STATES = 2


@dataclass(frozen=True)
class TrainOptions:
    """The command's options; see `medusa-ppo train --help`."""

    model: str
    data: str
    out: Path
    kind: str = "hydra"
    num_heads: int = 4
    loss: str = "ce_tv"
    template: str = ""
    column: str = ""
    max_train_tokens: int = 100_000
    max_minutes: float = 0.0
    epochs: int = 4
    learning_rate: float = 2e-3
    batch_positions: int = 512
    temperature: float = 1.0
    max_new_tokens: int = 128
    seed: int = 0


def plan_training(options: TrainOptions) -> list[tuple[str, str]]:
    """What `--dry-run` prints: sizes and memory, from the configuration files alone."""
    setting = _checked_setting(options)
    model = AutoConfig.from_pretrained(options.model)
    heads = MedusaHeads(_heads_config(options, model.hidden_size, model.vocab_size))
    parameters = sum(p.numel() for p in heads.parameters())
    hidden_bytes = options.max_train_tokens * model.hidden_size * FLOAT_BYTES
    return [
        ("model", f"{options.model} (hidden {model.hidden_size}, vocabulary {model.vocab_size})"),
        ("heads", f"{options.num_heads} x {options.kind}, {parameters / 1e6:.2f} M parameters"),
        ("heads, optimizer, gradients", f"{parameters * FLOAT_BYTES * (2 + ADAM_STATES) / 2**20:.0f} MiB"),
        ("hidden states", f"{hidden_bytes / 2**20:.0f} MiB for {options.max_train_tokens} tokens"),
        (
            "source",
            f"{len(setting.prompts)} prompts, responses by the model"
            if options.template
            else f"column {options.column!r} of {len(setting.rows)} rows",
        ),
        ("optimizer steps", str(options.epochs * -(-options.max_train_tokens // options.batch_positions))),
        ("output", str(options.out)),
    ]


def train_heads(options: TrainOptions, progress: OfflineProgress) -> dict[str, Any]:
    """Collect responses and hidden states, train, keep the best heads by replay on held-out responses.

    Returns:
        The last best line of `train.jsonl` and the number of tokens.

    Raises:
        ModelError, DataError: unusable model, data, template or column.
    """
    setting = _checked_setting(options)
    out = out_folder(options.out)
    samples = _collect(options, setting, progress)
    model = load_actor(options.model)
    with progress.phase("Hidden states", len(samples)) as advance:
        batch = hidden_batch(model, samples, options.temperature, advance)
    train, holdout = _split(batch, options.seed)
    progress.say(
        f"{train.lengths_S.numel()} responses to train on ({train.response_ids_M.numel()} tokens), {holdout.lengths_S.numel()} held out"
    )
    return _train(options, model, train, holdout, out, progress)


def _checked_setting(options: TrainOptions) -> Setting:
    if bool(options.template) == bool(options.column):
        raise DataError(
            "Say where the text comes from, in one way.",
            given=f"--template {options.template!r}, --column {options.column!r}",
            expected="--template (the model answers prompts) or --column (full texts)",
            do="Give exactly one of the two.",
        )
    return read_setting(options.model, options.data, options.template, options.max_new_tokens)


def _heads_config(options: TrainOptions, hidden_size: int, vocab_size: int) -> HeadsConfig:
    return HeadsConfig(hidden_size=hidden_size, vocab_size=vocab_size, num_heads=options.num_heads, kind=options.kind)


def _collect(options: TrainOptions, setting: Setting, progress: OfflineProgress) -> list[Sample]:
    if options.column:
        texts = texts_of(setting.rows, options.column)
        return samples_from_texts(texts, setting.tokenizer, setting.context, options.max_train_tokens)
    if setting.skipped:
        progress.say(f"{setting.skipped} prompts are too long and left out")
    sampling = Sampling(temperature=options.temperature, max_new_tokens=options.max_new_tokens)
    progress.say("Starting the engine ...")
    with running_engine(options.model, "", engine_config(setting.prompts, options.max_new_tokens), options.seed) as engine:
        with progress.phase("Writing responses", options.max_train_tokens) as advance:
            return samples_of(write_responses(engine, setting.prompts, sampling, options.max_train_tokens, options.seed, advance))


def _split(batch: RolloutBatch, seed: int) -> tuple[RolloutBatch, RolloutBatch]:
    train, holdout = batch.hold_out(HOLDOUT_FRACTION, seed)
    if holdout is None:
        count = batch.lengths_S.numel()
        raise DataError("Too few prompts to keep some out of training.", given=f"{count} responses", expected="2 prompts", do="Give more.")
    return train, holdout


def _parts(batch: RolloutBatch, epochs: int, seed: int) -> Iterator[RolloutBatch]:
    """Every epoch in a new order, cut into a few parts; a log line follows each."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for part in torch.randperm(batch.lengths_S.numel(), generator=generator).tensor_split(LOG_STEPS_PER_EPOCH):
            if part.numel():
                yield batch.select(part)


def _train(
    options: TrainOptions, model: PreTrainedModel, train: RolloutBatch, holdout: RolloutBatch, out: Path, progress: OfflineProgress
) -> dict[str, Any]:
    lm_head_VD = lm_head_weight(model).detach().float().cpu()
    embedding_VD = embedding_weight(model).detach().float().cpu()
    torch.manual_seed(options.seed)
    heads = MedusaHeads(_heads_config(options, lm_head_VD.shape[1], lm_head_VD.shape[0]))
    config = CompanionConfig(loss=options.loss, learning_rate=options.learning_rate, batch_positions=options.batch_positions, epochs=1)
    steps = options.epochs * -(-train.response_ids_M.numel() // options.batch_positions)
    trainer = HeadsTrainer(heads, lm_head_VD, config, options.seed, embedding_VD=embedding_VD, schedule=cosine_schedule(steps))
    drafts = 0.0 if options.loss == "ce" else 1.0  # judge the heads by the drafts that their loss aims at
    best: dict[str, Any] = {}
    tokens = 0
    started = time.monotonic()
    parts = options.epochs * min(LOG_STEPS_PER_EPOCH, train.lengths_S.numel())
    with progress.phase("Training the heads", parts) as advance, (out / "train.jsonl").open("w", encoding="utf-8") as log:
        for part in _parts(train, options.epochs, options.seed):
            report = trainer.train_batch(part)
            tokens += part.response_ids_M.numel()
            judged = replay(trainer.heads, holdout, trainer.lm_head_VD, embedding_VD=trainer.embedding_VD, draft_temperature=drafts)
            line = _log_line(tokens, report.loss, judged, time.monotonic() - started)
            log.write(json.dumps(line) + "\n")
            log.flush()
            advance(1, f"loss {report.loss:.3f}, replay {judged.mean_acceptance_length:.3f}")
            if not best or line["replay_mean_acceptance_length"] > best["replay_mean_acceptance_length"]:
                best = line
                _keep_best(out, heads, lm_head_VD, _metadata(options, line))
            if options.max_minutes and time.monotonic() - started > 60 * options.max_minutes:
                progress.say("The time is up; the best heads so far are kept.")
                break
    return best


def _keep_best(out: Path, heads: MedusaHeads, lm_head_VD: torch.Tensor, metadata: dict[str, Any]) -> None:
    """Put the checkpoint into OUT file by file: `save_heads` replaces whole folders, and the log lives in this one.

    The weights come first; a reader between the two replacements finds the checksum in config.json wrong, not a mixture.
    """
    with tempfile.TemporaryDirectory(dir=out, prefix=".best-") as folder:
        save_heads(Path(folder) / "heads", heads, lm_head_VD=lm_head_VD, metadata=metadata)
        for file in ("model.safetensors", "config.json"):
            os.replace(Path(folder) / "heads" / file, out / file)


def _log_line(tokens: int, loss: float, judged: ReplayResult, seconds: float) -> dict[str, Any]:
    return {
        "tokens": tokens,
        "loss": loss,
        "replay_mean_acceptance_length": judged.mean_acceptance_length,
        "acceptance_per_position": list(judged.acceptance_per_position),
        "wall_s": seconds,
    }


def _metadata(options: TrainOptions, line: dict[str, Any]) -> dict[str, Any]:
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in asdict(options).items() if key not in ("out",)}
    return {"options": settings, "replay_mean_acceptance_length": line["replay_mean_acceptance_length"], "trained_tokens": line["tokens"]}
