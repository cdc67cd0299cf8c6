"""`medusa-ppo train`: heads for any causal LM, on its own responses, on full texts or on chats; an interrupted training goes on.
With `--dry-run` its sizes, memory and time, before anything is started or written."""

from __future__ import annotations

import json
import math
import os
import tempfile
import time
from pathlib import Path
from typing import Any, TextIO

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from heads.acceptance import ReplayResult
from heads.checkpoint import save_heads
from heads.errors import DataError
from heads.heads_config import HeadsConfig
from heads.modules import MedusaHeads
from medusa_ppo.actors.hf import DTYPES
from medusa_ppo.companion.trainer import TrainReport
from medusa_ppo.console import Advance, OfflineProgress
from medusa_ppo.processes import StopSignals
from medusa_ppo.reports.wording import seconds
from medusa_ppo.standalone.collect import split_samples
from medusa_ppo.standalone.data_parallel import Worker, Workers, deal_parts, running_workers
from medusa_ppo.standalone.samples import ResumeFolder, TrainPosition, gather_samples, train_scene
from medusa_ppo.standalone.scene import compute_dtype, out_folder, training_device
from medusa_ppo.standalone.train_options import TrainOptions

LOG_FILE = "train.jsonl"
HOLDOUT_FRACTION = 0.1
HOLDOUT_TOKENS = 16_384
"""Most tokens that heads are judged on: enough for two digits of acceptance, and no more work than the training itself."""
LOG_STEPS_PER_EPOCH = 4
PART_TOKENS = 32_768
"""Most tokens between two log steps, and held at once beside the cache."""
SAVE_EVERY_S = 30.0
FLOAT_BYTES = 4
ADAM_STATES = 2
PROBE_SIZE, PROBE_S = 1024, 0.3
BACKWARD = 2
"""A backward pass through a trained matrix is two products, through a frozen one (lm_head) one."""

Line = dict[str, Any]


def train_heads(options: TrainOptions, progress: OfflineProgress) -> Line:
    """Collect sequences, train on their hidden states, keep the best heads by replay on held-out ones.

    Returns:
        The best line of `train.jsonl`.

    Raises:
        ConfigError, ModelError, DataError: unusable options, model, data, template or column.
        CheckpointError: the state of an interrupted training is damaged.
    """
    resume = ResumeFolder(options.out, options)
    if resume.found:
        progress.say(f"Going on with the interrupted training in {options.out} (--fresh begins anew)")
    samples = resume.samples()
    if samples is None:
        scene = train_scene(options)
        out_folder(options.out)
        resume.begin()
        samples = gather_samples(options, scene, resume, progress)
    if compute_dtype(options.dtype) != DTYPES[options.dtype]:
        progress.say(f"This CPU multiplies {options.dtype} slowly: states are kept in it, products are float32")
    training, held_out = split_samples(samples, HOLDOUT_FRACTION, HOLDOUT_TOKENS, options.seed)
    progress.say("Reading the hidden states of the holdout ...")
    with running_workers(options, training, held_out) as worker:
        progress.say(f"{len(training)} sequences to train on ({worker.tokens} tokens), {len(held_out)} held out")
        run = _Run(options, worker, resume)
        try:
            with StopSignals():  # Anew: Ray and vLLM have put their own handlers, and a SIGTERM would end the process unsaved.
                run.train(progress)
        except BaseException:
            run.save()
            raise
    return run.best


class _Run:
    """One training: who does it, where it stands, and its log."""

    def __init__(self, options: TrainOptions, worker: Worker | Workers, resume: ResumeFolder) -> None:
        self._options, self._worker, self._resume = options, worker, resume
        wanted = max(LOG_STEPS_PER_EPOCH, math.ceil(worker.tokens / (PART_TOKENS * options.workers)))
        self._parts = min(worker.groups // options.workers, wanted)
        self._log = options.out / LOG_FILE
        self._saved_at = time.monotonic()
        self.position = TrainPosition()
        self._lines: list[Line] = []
        saved = resume.trainer()
        if saved is not None:
            state, self.position = saved
            worker.load_state_dict(state)
            self._lines = _read_log(self._log, self.position.parts)
        self._log.write_text("".join(json.dumps(line) + "\n" for line in self._lines), encoding="utf-8")

    @property
    def best(self) -> Line:
        return max(self._lines, key=lambda line: line["replay_mean_acceptance_length"])

    def train(self, progress: OfflineProgress) -> None:
        """All parts that are left, or until the time is up or the target reached."""
        total = self._options.epochs * self._parts
        with progress.phase("Training the heads", total - self.position.parts) as advance, self._log.open("a", encoding="utf-8") as log:
            while self.position.parts < total:
                if reason := self._reason_to_stop():
                    progress.say(reason)
                    self.save()
                    return
                self._one_part(log, advance, progress)
        self._resume.remove()

    def save(self) -> None:
        """Write the state, unless the trainer is ahead of the position: then what was saved before stands."""
        if self._worker.parts == self.position.parts > 0:
            self._resume.save_trainer(self._worker.state_dict(), self.position)
            self._saved_at = time.monotonic()

    def _one_part(self, log: TextIO, advance: Advance, progress: OfflineProgress) -> None:
        began = time.monotonic()
        epoch, part = divmod(self.position.parts, self._parts)
        dealt = deal_parts(self._worker.groups, self._parts, self._options.workers, self._options.seed, epoch)[part]
        report, tokens = self._worker.train(dealt, self.position.parts)
        if report.problem:
            progress.say(report.problem)
        spent_s = time.monotonic() - began
        judged = self._worker.judge()
        wall_s = self.position.wall_s + time.monotonic() - began
        line = _log_line(self.position.tokens + tokens, report, judged, wall_s, tokens / spent_s)
        self._lines.append(line)
        log.write(json.dumps(line) + "\n")
        log.flush()
        if line is self.best:
            _keep_best(self._options.out, self._worker.heads(), self._worker.lm_head_VD, _metadata(self._options, line))
        self.position = TrainPosition(self.position.parts + 1, line["tokens"], wall_s)
        advance(1, _note(line))
        if time.monotonic() - self._saved_at > SAVE_EVERY_S:
            self.save()

    def _reason_to_stop(self) -> str:
        if self._lines and 0 < self._options.target_mal <= self.best["replay_mean_acceptance_length"]:
            return f"The target of {self._options.target_mal} is reached; the same command with a higher one goes on."
        if 0 < 60 * self._options.max_minutes <= self.position.wall_s:
            return "The time is up; the best heads so far are kept, and the same command with more minutes goes on."
        return ""


def _keep_best(out: Path, heads: MedusaHeads, lm_head_VD: torch.Tensor, metadata: dict[str, Any]) -> None:
    """Put the checkpoint into OUT file by file: `save_heads` replaces whole folders, and the log lives in this one.

    The weights come first; a reader between the two replacements finds the checksum in config.json wrong, not a mixture.
    """
    with tempfile.TemporaryDirectory(dir=out, prefix=".best-") as folder:
        save_heads(Path(folder) / "heads", heads, lm_head_VD=lm_head_VD, metadata=metadata)
        for file in ("model.safetensors", "config.json"):
            os.replace(Path(folder) / "heads" / file, out / file)


def _read_log(path: Path, count: int) -> list[Line]:
    """The lines of the parts that the saved state has seen; later ones will be written again."""
    lines = path.read_text(encoding="utf-8").splitlines()[:count] if path.is_file() else []
    try:
        found = [json.loads(line) for line in lines]
        problem = f"{path}: {len(found)} lines"
    except ValueError as error:
        found, problem = [], f"{path}: {error}"
    if len(found) != count:
        raise DataError("The log of the interrupted training is damaged.", given=problem, expected=f"{count} lines", do="Use --fresh.")
    return found


def _log_line(tokens: int, report: TrainReport, judged: ReplayResult, wall_s: float, tokens_per_s: float) -> Line:
    return {
        "tokens": tokens,
        "loss": None if math.isnan(report.loss) else report.loss,
        "losses": list(report.losses),
        "replay_mean_acceptance_length": judged.mean_acceptance_length,
        "acceptance_per_position": list(judged.acceptance_per_position),
        "tokens_per_s": tokens_per_s,
        "wall_s": wall_s,
    }


def _note(line: Line) -> str:
    positions = " ".join(f"{value:.2f}" for value in line["acceptance_per_position"])
    loss = "no step" if line["loss"] is None else f"loss {line['loss']:.3f}"
    return f"{loss}, replay {line['replay_mean_acceptance_length']:.3f} ({positions}), {line['tokens_per_s']:.0f} tokens/s"


def _metadata(options: TrainOptions, line: Line) -> dict[str, Any]:
    replayed = line["replay_mean_acceptance_length"]
    return {"options": options.settings(), "replay_mean_acceptance_length": replayed, "trained_tokens": line["tokens"]}


def plan_training(options: TrainOptions) -> list[tuple[str, str]]:
    """What `--dry-run` prints, from the configuration files and a moment of matrix products."""
    scene = train_scene(options)
    model = AutoConfig.from_pretrained(options.model)
    with torch.device("meta"):
        actor = sum(p.numel() for p in AutoModelForCausalLM.from_config(model).parameters())
    config = HeadsConfig(model.hidden_size, model.vocab_size, options.num_heads, options.kind)
    with torch.device("meta"):
        parameters = sum(p.numel() for p in MedusaHeads(config).parameters())
    width, compute = DTYPES[options.dtype].itemsize, compute_dtype(options.dtype)
    hidden_bytes = options.max_train_tokens * model.hidden_size * width
    kept = min(hidden_bytes, options.cache_bytes)
    share = 1.0 if hidden_bytes <= options.cache_bytes else options.cache_bytes / hidden_bytes
    steps = options.epochs * -(-options.max_train_tokens // options.step_positions)
    rate = _measured_rate(compute)
    collect_s, train_s = _estimate(options, model, actor, parameters, share, rate)
    source = f"{len(scene.prompts)} prompts, responses by the model" if scene.prompts else f"column {scene.source.column!r}"
    return [
        ("model", f"{options.model} (hidden {model.hidden_size}, vocabulary {model.vocab_size}, {actor / 1e6:.1f} M parameters)"),
        ("heads", f"{options.num_heads} x {options.kind}, {parameters / 1e6:.2f} M parameters"),
        ("model in memory", f"{_mib(actor * compute.itemsize)}"),
        ("heads, optimizer, gradients", f"{_mib(parameters * FLOAT_BYTES * (2 + ADAM_STATES))}"),
        ("hidden states", f"{_mib(hidden_bytes)} for {options.max_train_tokens} tokens, {_mib(kept)} of them kept between epochs"),
        ("source", f"{source} ({scene.source.kind})"),
        ("optimizer steps", f"{steps} of {options.step_positions} positions"),
        ("matrix rate here", f"{rate / 1e9:.0f} GFLOP/s in {compute} on {training_device()}, measured now"),
        ("hidden states take", f"at least {seconds(collect_s)}" + (", after the writing of the responses" if scene.prompts else "")),
        ("training takes", f"at least {seconds(train_s)} (the matrix products alone)"),
        ("output", str(options.out)),
    ]


def _estimate(options: TrainOptions, model: PretrainedConfig, actor: int, parameters: int, kept: float, rate: float) -> tuple[float, float]:
    """Seconds of the first forward pass and of the training: the products that can't be left out, at the measured rate."""
    tokens = options.max_train_tokens
    forward = 2.0 * actor
    logits = 2.0 * options.num_heads * model.vocab_size * model.hidden_size
    step = 2.0 * parameters * (1 + BACKWARD) + logits * 2
    again = (1 - kept) * forward * (options.epochs - 1)
    return tokens * forward / rate, tokens * (options.epochs * step + again) / rate


def _measured_rate(dtype: torch.dtype) -> float:
    """Floating-point operations a second of square matrix products in the dtype of the training."""
    device = training_device()
    matrix = torch.randn(PROBE_SIZE, PROBE_SIZE, device=device).to(dtype)
    float((matrix @ matrix).float().sum())  # The first product also loads what later ones need.
    count, began = 0, time.perf_counter()
    while (spent := time.perf_counter() - began) < PROBE_S:
        float((matrix @ matrix)[0, 0])
        count += 1
    return count * 2.0 * PROBE_SIZE**3 / spent


def _mib(size: float) -> str:
    return f"{size / 2**20:.0f} MiB"
