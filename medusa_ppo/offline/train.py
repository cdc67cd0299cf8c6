"""`medusa-ppo train`: trains heads for any causal LM, on its own responses, on full texts or on
chats. An interrupted training can be resumed.

OUT/.lock               held while a training runs: a second one in the same folder is refused
OUT/model/              the model in transformers' format, if it came as a distributed checkpoint
                        of Megatron

OUT/resume/             every file in it is replaced atomically
  settings.json         the options that the heads depend on; a command with others is refused
  round-0000.json       responses of one generation round, until all are written
  samples.json          all sequences that are trained and judged on
  trainer.safetensors   heads, optimizer, generator, counters, and how far the training is

Hidden states are not stored: they are computed again, in the same shapes
(medusa_ppo/offline/hidden.py).
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch
from transformers import AutoConfig

from heads.acceptance import ReplayResult
from heads.checkpoint import load_state, save_heads, save_state
from heads.errors import CheckpointError, ConfigError, DataError
from heads.modules import MedusaHeads
from medusa_ppo.actors.hf import DTYPES
from medusa_ppo.actors.megatron_checkpoint import as_transformers, folder_of
from medusa_ppo.companion.trainer import TrainReport
from medusa_ppo.contract.rollouts import Sampling
from medusa_ppo.offline.collect import (
    Sample,
    number_prompts,
    response_rounds,
    samples_from_chats,
    samples_from_rollouts,
    samples_from_texts,
    samples_of,
    split_samples,
)
from medusa_ppo.offline.data_parallel import (
    TrainingWorker,
    TrainingWorkers,
    gpus_for_workers,
    running_workers,
)
from medusa_ppo.offline.options import WRITTEN_BY_MODEL, TrainOptions
from medusa_ppo.offline.scene import (
    BEST_PREFIX,
    MAX_TEXT_TOKENS,
    MODEL_FOLDER,
    RESUME_FOLDER,
    Scene,
    compute_dtype,
    engine_config,
    out_folder,
    refuse_foreign_out,
    running_engine,
    train_scene,
)
from medusa_ppo.runtime.console import Advance, OfflineProgress
from medusa_ppo.runtime.files import only_one_in, write_atomic
from medusa_ppo.runtime.processes import StopSignals

LOG_FILE = "train.jsonl"
HOLDOUT_FRACTION = 0.1
HOLDOUT_TOKENS = 16_384
"""Maximum tokens that heads are judged on: enough for two digits of acceptance, and no more work
than training itself.
"""
# An interruption that can't be caught loses at most what was trained since the last save, and the
# part in training. The state of a large model's heads takes long to write, so the time between two
# saves is also at least this many times what the last one took.
SAVE_EVERY_S = 30.0
TIMES_A_SAVE = 20
# Compared like a setting, so that a folder in another release's format is refused.
RESUME_FORMAT = 3
POSITION = "position"
UNREADABLE, BEGIN_ANEW = "The interrupted training can't be read.", "Start over with --fresh."

Line = dict[str, Any]


def train_heads(options: TrainOptions, progress: OfflineProgress) -> Line:
    """Collect sequences, train on their hidden states, and keep the best heads by replay on
    held-out sequences.

    Returns:
        The best line of `train.jsonl`.

    Raises:
        ConfigError, ModelError, DataError: unusable options, model, data, template or column.
        CheckpointError: the state of an interrupted training is damaged, or OUT has other files.
        RunError: another training writes into OUT.
    """
    refuse_foreign_out(options.out)
    if options.workers > 1:
        gpus_for_workers(options.workers)
    scene = None
    if not options.out.is_dir() and folder_of(options.model) is None:
        # There is nothing to resume, so the data are needed anyway; and wrong options leave no
        # folder. A checkpoint of Megatron is converted in OUT before anything of it is read.
        scene = train_scene(options)
    # Created before hours of work, because the path may not be writable.
    with only_one_in(out_folder(options.out), "training", "--out"):
        return _train(options, scene, progress)


def _train(options: TrainOptions, scene: Scene | None, progress: OfflineProgress) -> Line:
    """`train_heads` in a folder that no one else writes into. `scene`: if it was read before."""
    resume = ResumeFolder(options.out, options)
    if resume.found:
        progress.say(f"Continuing the interrupted training in {options.out} (--fresh starts over)")
    # Only after the settings were compared: they name the model as the user does.
    options = replace(options, model=as_transformers(options.model, options.out / MODEL_FOLDER))
    resume.sweep()
    samples = resume.samples()
    if samples is None:
        scene = scene or train_scene(options)
        resume.begin()
        samples = gather_samples(options, scene, resume, progress)
    if compute_dtype(options.dtype) != DTYPES[options.dtype]:
        progress.say(
            f"This CPU multiplies {options.dtype} slowly: states are kept in it, products are"
            " float32"
        )
    by_model = all(sample.by_model for sample in samples)
    if not by_model:
        progress.say(
            "The model did not write this text, so replay on it is only a rough guide, and no draft"
            " temperatures are fitted"
        )
    training, held_out = split_samples(samples, HOLDOUT_FRACTION, HOLDOUT_TOKENS, options.seed)
    width = AutoConfig.from_pretrained(options.model).get_text_config().hidden_size
    options = options.for_text(sum(sample.written for sample in training), width)
    progress.say(
        f"Steps of {options.step_positions} positions, learning rate {options.learning_rate:.2g}"
    )
    progress.say("Reading the hidden states of the holdout ...")
    with running_workers(options, training, held_out) as worker:
        progress.say(
            f"{len(training)} sequences to train on ({worker.tokens} tokens), {len(held_out)}"
            " held out"
        )
        run = _Run(options, worker, resume, by_model)
        try:
            # Ray and vLLM have installed their own handlers by now; with theirs, SIGTERM would end
            # the process without a save.
            with StopSignals():
                run.train(progress)
        # After Ctrl-C, a signal or an error.
        except BaseException:
            run.save()
            raise
    return run.best


def gather_samples(
    options: TrainOptions, scene: Scene, resume: ResumeFolder, progress: OfflineProgress
) -> list[Sample]:
    """All samples. They are saved, so that an interrupted training resumes with the same ones."""
    most = options.max_train_tokens
    context = min(scene.context, MAX_TEXT_TOKENS)
    if scene.source.kind == "prompts":
        samples = _responses(options, scene, resume, progress)
    elif scene.source.kind == "chat":
        samples = samples_from_chats(scene.texts, scene.tokenizer, context, most)
    elif scene.source.kind == "rollouts":
        vocab_size = AutoConfig.from_pretrained(options.model).get_text_config().vocab_size
        samples = samples_from_rollouts(
            scene.rows, vocab_size, scene.context, options.temperature, most
        )
    else:
        samples = samples_from_texts(scene.texts, scene.tokenizer, context, most)
    resume.save_samples(samples)
    return samples


def _responses(
    options: TrainOptions, scene: Scene, resume: ResumeFolder, progress: OfflineProgress
) -> list[Sample]:
    if scene.left_out:
        progress.say(scene.left_out)
    rounds = resume.rounds()
    done = [sum(sample.written for sample in part) for part in rounds]
    tokens = sum(done)
    if rounds:
        progress.say(f"{tokens} tokens of responses already exist")
    if tokens < options.max_train_tokens:
        sampling = Sampling(
            temperature=options.temperature,
            max_new_tokens=options.max_new_tokens,
            seed=options.seed,
        )
        progress.say("Starting the engine ...")
        config = engine_config(scene.prompts, options.max_new_tokens)
        with running_engine(options.model, "", config, options.seed) as engine:
            with progress.phase("Writing responses", options.max_train_tokens - tokens) as advance:
                most = options.max_train_tokens
                for rollouts in response_rounds(
                    engine, scene.prompts, sampling, most, advance, done=done
                ):
                    rounds.append(samples_of([rollouts]))
                    resume.save_round(len(rounds) - 1, rounds[-1])
    return number_prompts([sample for part in rounds for sample in part])


class _Run:
    """One training: its worker, position and log."""

    def __init__(
        self,
        options: TrainOptions,
        worker: TrainingWorker | TrainingWorkers,
        resume: ResumeFolder,
        by_model: bool,
    ) -> None:
        """`by_model`: whether the model wrote all samples."""
        self._by_model = by_model
        self._options = options
        self._worker = worker
        self._resume = resume
        self._plan = worker.plan
        self._log = options.out / LOG_FILE
        self._saved_at = time.monotonic()
        self._save_took_s = 0.0
        self.position = TrainPosition()
        self._lines: list[Line] = []
        saved = resume.trainer()
        if saved is not None:
            # The sequences come from samples.json, so parts and groups are the same as before.
            state, self.position = saved
            worker.load_state_dict(state)
            self._lines = _read_log(self._log, self.position.parts)
        # Lines from after the last save are dropped: their parts are trained again.
        self._log.write_text(
            "".join(json.dumps(line) + "\n" for line in self._lines), encoding="utf-8"
        )

    @property
    def best(self) -> Line:
        return max(self._lines, key=lambda line: line["replay_mean_acceptance_length"])

    def train(self, progress: OfflineProgress) -> None:
        """Train on all remaining parts, or until the time is up or the target is reached."""
        total = self._options.epochs * self._plan.parts
        with (
            progress.phase("Training the heads", total - self.position.parts) as advance,
            self._log.open("a", encoding="utf-8") as log,
        ):
            while self.position.parts < total:
                if reason := self._reason_to_stop():
                    progress.say(reason)
                    self.save()
                    return
                self._one_part(log, advance, progress)
        # Removed only after all epochs: a training that stopped at a target or a time limit can be
        # continued.
        self._resume.remove()

    def save(self) -> None:
        """Save the trainer's state, unless the trainer is ahead of the position; then the previous
        save stays.
        """
        if self._worker.parts == self.position.parts > 0:
            began = time.monotonic()
            self._resume.save_trainer(self._worker.state_dict(), self.position)
            self._saved_at = time.monotonic()
            self._save_took_s = self._saved_at - began

    def _one_part(self, log: TextIO, advance: Advance, progress: OfflineProgress) -> None:
        began = time.monotonic()
        epoch, part = divmod(self.position.parts, self._plan.parts)
        dealt = self._plan.dealt(epoch)[part]
        report, tokens = self._worker.train(dealt, self.position.parts)
        if report.problem:
            progress.say(report.problem)
        spent_s = time.monotonic() - began
        judged = self._worker.judge()
        line = {
            **_log_line(self.position.tokens + tokens, report, judged, tokens / spent_s),
            WRITTEN_BY_MODEL: self._by_model,
        }
        self._lines.append(line)
        # `max` takes the earliest of equal lines, so heads that are no better are not written.
        if line is self.best:
            _keep_best(
                self._options.out,
                self._worker.heads(),
                self._worker.lm_head_VD,
                _metadata(self._options, line),
            )
        before_s = self.position.wall_s
        # Taken only now: to write the heads of a large model takes longer than to train a part.
        line["wall_s"] = before_s + time.monotonic() - began
        log.write(json.dumps(line) + "\n")
        # Flushed because people follow the log during the training.
        log.flush()
        self.position = TrainPosition(self.position.parts + 1, line["tokens"], line["wall_s"])
        advance(1, _note(line))
        apart_s = max(SAVE_EVERY_S, TIMES_A_SAVE * self._save_took_s)
        if time.monotonic() - self._saved_at > apart_s:
            self.save()
            # So that --max-minutes counts the save as well.
            self.position = self.position._replace(wall_s=before_s + time.monotonic() - began)

    def _reason_to_stop(self) -> str:
        if (
            self._lines
            and 0 < self._options.target_mal <= self.best["replay_mean_acceptance_length"]
        ):
            return (
                f"The target of {self._options.target_mal} is reached; the same command with a "
                "higher target continues."
            )
        if 0 < 60 * self._options.max_minutes <= self.position.wall_s:
            return (
                "The time is up; the best heads so far are kept, and the same command with more "
                "minutes continues."
            )
        return ""


def _keep_best(
    out: Path, heads: MedusaHeads, lm_head_VD: torch.Tensor | None, metadata: dict[str, Any]
) -> None:
    """Put the checkpoint into OUT file by file: `save_heads` replaces whole folders, and OUT also
    contains the log.

    The weights come first. Between the two replacements, a reader finds that the checksum in
    config.json is wrong, and so never uses a mixture.
    """
    with tempfile.TemporaryDirectory(dir=out, prefix=BEST_PREFIX) as folder:
        save_heads(Path(folder) / "heads", heads, lm_head_VD=lm_head_VD, metadata=metadata)
        for file in ("model.safetensors", "config.json"):
            os.replace(Path(folder) / "heads" / file, out / file)


def _read_log(path: Path, count: int) -> list[Line]:
    """The lines of the parts that the saved state covers; later ones will be written again."""
    lines = path.read_text(encoding="utf-8").splitlines()[:count] if path.is_file() else []
    try:
        found = [json.loads(line) for line in lines]
        problem = f"{path}: {len(found)} lines"
    except ValueError as error:
        found = []
        problem = f"{path}: {error}"
    if len(found) != count:
        raise DataError(
            "The log of the interrupted training is damaged.",
            given=problem,
            expected=f"{count} lines",
            do="Use --fresh.",
        )
    return found


def _log_line(tokens: int, report: TrainReport, judged: ReplayResult, tokens_per_s: float) -> Line:
    """A line of train.jsonl without `wall_s`, which is known once the part's heads are written."""
    return {
        "tokens": tokens,
        "loss": None if math.isnan(report.loss) else report.loss,
        "losses": list(report.losses),
        "replay_mean_acceptance_length": judged.mean_acceptance_length,
        "acceptance_per_position": list(judged.acceptance_per_position),
        "tokens_per_s": tokens_per_s,
    }


def _note(line: Line) -> str:
    positions = " ".join(f"{value:.2f}" for value in line["acceptance_per_position"])
    loss = "no step" if line["loss"] is None else f"loss {line['loss']:.3f}"
    return (
        f"{loss}, replay {line['replay_mean_acceptance_length']:.3f} ({positions}),"
        f" {line['tokens_per_s']:.0f} tokens/s"
    )


def _metadata(options: TrainOptions, line: Line) -> dict[str, Any]:
    replayed = line["replay_mean_acceptance_length"]
    return {
        "options": options.settings(),
        "replay_mean_acceptance_length": replayed,
        "trained_tokens": line["tokens"],
        WRITTEN_BY_MODEL: line[WRITTEN_BY_MODEL],
    }


# ---- the folder from which an interrupted training continues


class TrainPosition(NamedTuple):
    """How far a training is.

    Attributes:
        parts: number of parts trained so far; each has one line in train.jsonl.
        tokens: response tokens trained on so far, counted again in every epoch.
        wall_s: seconds of training and of writing what was trained, interruptions not counted.
    """

    parts: int = 0
    tokens: int = 0
    wall_s: float = 0.0


class ResumeFolder:
    """Reads and writes OUT/resume.

    Attributes:
        found: whether there is something to resume.
    """

    def __init__(self, out: Path, options: TrainOptions) -> None:
        """
        Raises:
            ConfigError: the folder holds an interrupted training with other settings.
            CheckpointError: its settings can't be read.
        """
        self._out = out
        self._folder = out / RESUME_FOLDER
        self._samples = self._folder / "samples.json"
        self._trainer = self._folder / "trainer.safetensors"
        self._settings = {"format_version": RESUME_FORMAT, **options.settings()}
        # With only the settings there is nothing to resume, so they may differ.
        more_than_settings = len(list(self._folder.glob("*"))) > 1
        self.found = not options.fresh and more_than_settings
        if self.found:
            _check_settings(self._folder / "settings.json", self._settings)

    def begin(self) -> None:
        """Create the folder. If it is not resumed, remove what it contains: a new training must not
        find another one's rounds.
        """
        if not self.found:
            self.remove()
            write_atomic(
                self._folder / "settings.json", json.dumps(self._settings, indent=1) + "\n"
            )

    def sweep(self) -> None:
        """Remove half-written heads of a training that was killed. The caller holds OUT."""
        for folder in self._out.glob(f"{BEST_PREFIX}*"):
            shutil.rmtree(folder, ignore_errors=True)

    def rounds(self) -> list[list[Sample]]:
        """The responses of the rounds that were complete before the interruption."""
        found: list[list[Sample]] = []
        while (path := self._round(len(found))).is_file():
            found.append(_read_samples(path))
        return found

    def save_round(self, number: int, samples: Sequence[Sample]) -> None:
        _write_samples(self._round(number), samples)

    def samples(self) -> list[Sample] | None:
        """All samples, or None if they are not complete."""
        return _read_samples(self._samples) if self.found and self._samples.is_file() else None

    def save_samples(self, samples: Sequence[Sample]) -> None:
        _write_samples(self._samples, samples)
        # The rounds are removed only now: until the samples are written, a resumed training needs
        # them.
        for path in self._folder.glob("round-*.json"):
            path.unlink()

    def trainer(self) -> tuple[dict[str, torch.Tensor], TrainPosition] | None:
        """State and position of the trainer; None before the first save."""
        if not self.found or not self._trainer.is_file():
            return None
        state = load_state(self._trainer)
        parts, tokens, wall_s = state.pop(POSITION).tolist()
        return state, TrainPosition(int(parts), int(tokens), wall_s)

    def save_trainer(self, state: dict[str, torch.Tensor], position: TrainPosition) -> None:
        save_state(self._trainer, {**state, POSITION: torch.tensor(position, dtype=torch.float64)})

    def remove(self) -> None:
        """Remove everything, because the training is finished or starts over."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _round(self, number: int) -> Path:
        return self._folder / f"round-{number:04d}.json"


def _check_settings(path: Path, settings: dict[str, Any]) -> None:
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        changed = [key for key in {**saved, **settings} if saved.get(key) != settings.get(key)]
    # Valid JSON may also be a list or a number.
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(
            UNREADABLE, given=f"{path}: {error}", expected="JSON", do=BEGIN_ANEW
        ) from None
    if changed:
        given = ", ".join(
            f"{key} {settings.get(key)!r} (was {saved.get(key)!r})" for key in changed
        )
        raise ConfigError(
            "The output folder holds an interrupted training with other settings.",
            given=given,
            expected="the same settings, to resume it",
            do="Restore them, choose another --out, or start over with --fresh.",
        )


def _write_samples(path: Path, samples: Sequence[Sample]) -> None:
    write_atomic(
        path,
        json.dumps(
            [
                (sample.ids, sample.spans, sample.prompt, sample.logprobs, sample.by_model)
                for sample in samples
            ]
        ),
    )


def _read_samples(path: Path) -> list[Sample]:
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
        return [
            Sample(
                tuple(ids),
                tuple((a, b) for a, b in spans),
                prompt,
                tuple(p) if p else None,
                # Version 0.3 did not write it, and had log-probs of nearly all that models wrote.
                by_model[0] if by_model else bool(p),
            )
            for ids, spans, prompt, p, *by_model in rows
        ]
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(
            UNREADABLE, given=f"{path}: {error}", expected="JSON", do=BEGIN_ANEW
        ) from None
