"""The samples of a training, written by the model or read from data, and the folder that an interrupted training goes on from.

OUT/resume/                 every file of it is replaced atomically; safetensors and JSON
  settings.json             the options that the heads depend on; other ones are refused
  round-0000.safetensors    responses of one generation round, until all are written
  samples.safetensors       all sequences that are trained and judged on
  trainer.safetensors       heads, optimizer, generator, counters, and how far the training is

Hidden states are not kept: they are computed again, in the same shapes (medusa_ppo/standalone/hidden.py).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig

from heads.checkpoint import load_state, save_state
from heads.errors import CheckpointError, ConfigError, DataError
from medusa_ppo.actors.hf import DTYPES
from medusa_ppo.console import OfflineProgress
from medusa_ppo.data import Row
from medusa_ppo.files import write_atomic
from medusa_ppo.reports.records import LOGPROBS, PROMPT_IDS, RESPONSE_IDS
from medusa_ppo.standalone.collect import (
    PROMPTS_PER_ROUND,
    Sample,
    number_prompts,
    response_rounds,
    response_sample,
    samples_from_chats,
    samples_from_texts,
    samples_of,
    take_samples,
)
from medusa_ppo.standalone.scene import MAX_TEXT_TOKENS, Scene, engine_config, read_scene, running_engine
from medusa_ppo.standalone.train_options import TrainOptions
from medusa_ppo.types import Sampling

FOLDER = "resume"
FORMAT_VERSION = 1
POSITION = "position"
STREAMED_SHARE = 16
"""Of a streamed data set as many prompts are read as would do with responses of so many tokens; they are gone through again if need be."""


class TrainPosition(NamedTuple):
    """How far a training is.

    Attributes:
        parts: parts trained so far; each has one line in train.jsonl.
        tokens: response tokens trained so far, each counted in every epoch.
        wall_s: seconds of training in all sessions.
    """

    parts: int = 0
    tokens: int = 0
    wall_s: float = 0.0


class ResumeFolder:
    """Reads and writes OUT/resume.

    Attributes:
        found: there is something to go on with.
    """

    def __init__(self, out: Path, options: TrainOptions) -> None:
        """
        Raises:
            ConfigError: the folder holds an interrupted training with other settings.
            CheckpointError: its settings can't be read.
        """
        self._folder = out / FOLDER
        self._samples, self._trainer = self._folder / "samples.safetensors", self._folder / "trainer.safetensors"
        self._settings = {"format_version": FORMAT_VERSION, **options.settings()}
        self.found = not options.fresh and any(self._folder.glob("*.safetensors"))
        if self.found:
            _check_settings(self._folder / "settings.json", self._settings)

    def begin(self) -> None:
        """Make the folder; what lies in it and is not to be gone on with goes."""
        if not self.found:
            self.remove()
            write_atomic(self._folder / "settings.json", json.dumps(self._settings, indent=1) + "\n")

    def rounds(self) -> list[list[Sample]]:
        """Responses of the rounds that were written before the interruption."""
        found: list[list[Sample]] = []
        while (path := self._round(len(found))).is_file():
            found.append(_unpack(load_state(path)))
        return found

    def save_round(self, number: int, samples: Sequence[Sample]) -> None:
        save_state(self._round(number), _pack(samples))

    def samples(self) -> list[Sample] | None:
        """All samples, or None when they were not all there yet."""
        return _unpack(load_state(self._samples)) if self.found and self._samples.is_file() else None

    def save_samples(self, samples: Sequence[Sample]) -> None:
        save_state(self._samples, _pack(samples))
        for path in self._folder.glob("round-*.safetensors"):
            path.unlink()

    def trainer(self) -> tuple[dict[str, torch.Tensor], TrainPosition] | None:
        """State of the trainer and how far it was; None before the first save."""
        if not self.found or not self._trainer.is_file():
            return None
        state = load_state(self._trainer)
        parts, tokens, wall_s = state.pop(POSITION).tolist()
        return state, TrainPosition(int(parts), int(tokens), wall_s)

    def save_trainer(self, state: dict[str, torch.Tensor], position: TrainPosition) -> None:
        save_state(self._trainer, {**state, POSITION: torch.tensor(position, dtype=torch.float64)})

    def remove(self) -> None:
        """Forget everything: the training is finished, or begins anew."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _round(self, number: int) -> Path:
        return self._folder / f"round-{number:04d}.safetensors"


def _check_settings(path: Path, settings: dict[str, Any]) -> None:
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        changed = [key for key in {**saved, **settings} if saved.get(key) != settings.get(key)]
    except (OSError, ValueError, TypeError, AttributeError) as error:
        given, do = f"{path}: {error}", "Begin anew with --fresh."
        raise CheckpointError("The interrupted training can't be read.", given=given, expected="JSON", do=do) from None
    if changed:
        given = ", ".join(f"{key} {settings.get(key)!r} (was {saved.get(key)!r})" for key in changed)
        raise ConfigError(
            "The output folder holds an interrupted training with other settings.",
            given=given,
            expected="the same settings, to go on with it",
            do="Restore them, choose another --out, or begin anew with --fresh.",
        )


def _pack(samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
    """Samples as flat tensors."""
    columns: dict[str, tuple[torch.dtype, list[Any]]] = {
        "ids": (torch.int32, [token for sample in samples for token in sample.ids]),
        "lengths": (torch.int64, [len(sample.ids) for sample in samples]),
        "spans": (torch.int64, [span for sample in samples for span in sample.spans]),
        "span_counts": (torch.int64, [len(sample.spans) for sample in samples]),
        "prompts": (torch.int64, [sample.prompt for sample in samples]),
        "logprobs": (torch.float32, [value for sample in samples for value in sample.logprobs or ()]),
        "logprob_counts": (torch.int64, [len(sample.logprobs or ()) for sample in samples]),
    }
    return {name: torch.tensor(values, dtype=dtype) for name, (dtype, values) in columns.items()}


def _unpack(state: dict[str, torch.Tensor]) -> list[Sample]:
    columns = (
        _cut(state[flat], state[counts]) for flat, counts in (("ids", "lengths"), ("spans", "span_counts"), ("logprobs", "logprob_counts"))
    )
    rows = zip(*columns, state["prompts"].tolist(), strict=True)
    return [Sample(tuple(ids), tuple((a, b) for a, b in spans), prompt, tuple(p) or None) for ids, spans, p, prompt in rows]


def _cut(flat: torch.Tensor, counts: torch.Tensor) -> list[list[Any]]:
    values = flat.tolist()
    return [values[start:end] for start, end in pairwise(accumulate(counts.tolist(), initial=0))]


def samples_from_rollouts(rows: Iterable[Row], vocab_size: int, context: int, temperature: float, max_tokens: int) -> list[Sample]:
    """One sample per row, the last rows first: they are of the newest policy. Empty responses teach nothing and are left out.

    Args:
        rows: with `prompt_ids` and `response_ids`; `logprobs` where known (else the actor's own are taken), `temperature`, `top_p`
            and `top_k` where they are not those of plain sampling.
        vocab_size: ids lie below it.
        context: most tokens of prompt and response together.
        temperature: that the heads are trained for.
        max_tokens: stop when so many response tokens are there.

    Raises:
        DataError: no usable row, ids or log-probs that are none, a row sampled in another way.
    """
    newest_first = reversed(list(enumerate(rows)))
    found = (_rollout(row, number, vocab_size, context, temperature) for number, row in newest_first)
    nothing = {"expected": f"prompts and responses of 1 to {context} tokens together", "do": "Check --data."}
    return number_prompts(take_samples(found, max_tokens, "No rollout is usable.", "rows", **nothing))


def _rollout(row: Row, number: int, vocab_size: int, context: int, temperature: float) -> list[Sample]:
    prompt, response = (_ids(row, name, number, vocab_size) for name in (PROMPT_IDS, RESPONSE_IDS))
    _check_sampling(row, number, temperature)
    if not prompt or not response or len(prompt) + len(response) > context:
        return []
    return [response_sample(prompt, response, _logprobs(row, number, len(response)))]


def _ids(row: Row, name: str, number: int, vocab_size: int) -> tuple[int, ...]:
    found = row.get(name)
    if not isinstance(found, list) or not all(isinstance(i, int) and 0 <= i < vocab_size for i in found):
        raise _bad(row, name, number, f"a list of token ids below {vocab_size}")
    return tuple(found)


def _logprobs(row: Row, number: int, length: int) -> tuple[float, ...] | None:
    found = row.get(LOGPROBS)
    if found is None:
        return None
    if not isinstance(found, list) or len(found) != length or not all(isinstance(p, float | int) and p <= 0 for p in found):
        raise _bad(row, LOGPROBS, number, f"{length} numbers, none above 0")
    return tuple(float(p) for p in found)


def _check_sampling(row: Row, number: int, temperature: float) -> None:
    plain: dict[str, tuple[Any, str]] = {
        "temperature": (temperature, "the --temperature of this training"),
        "top_p": (1.0, "1: heads are trained for plain sampling"),
        "top_k": (0, "0: heads are trained for plain sampling"),
    }
    for name, (wanted, meaning) in plain.items():
        if row.get(name) is not None and row[name] != wanted:
            raise _bad(row, name, number, f"{wanted} ({meaning})")


def _bad(row: Row, name: str, number: int, expected: str) -> DataError:
    return DataError(
        f"A rollout's {name} can't be used.", given=f"row {number}: {row.get(name)!r:.80}", expected=expected, do="Correct the data."
    )


def train_scene(options: TrainOptions) -> Scene:
    """Model and data as the options name them.

    Raises:
        ConfigError, ModelError, DataError: unusable options, model, data, template or column.
    """
    if options.dtype not in DTYPES or options.dtype == "float16":
        raise ConfigError("Unknown dtype.", given=options.dtype, expected="float32 | bfloat16", do="Correct --dtype.")
    return read_scene(
        options.model,
        options.data,
        options.template,
        options.max_new_tokens,
        column=options.column,
        respond=options.respond,
        streamed_rows=max(PROMPTS_PER_ROUND, options.max_train_tokens // STREAMED_SHARE) if options.streaming else 0,
    )


def gather_samples(options: TrainOptions, scene: Scene, resume: ResumeFolder, progress: OfflineProgress) -> list[Sample]:
    """All samples; saved, so that an interrupted training goes on with the same ones."""
    most, context = options.max_train_tokens, min(scene.context, MAX_TEXT_TOKENS)
    if scene.source.kind == "prompts":
        samples = _responses(options, scene, resume, progress)
    elif scene.source.kind == "chat":
        samples = samples_from_chats(scene.texts, scene.tokenizer, context, most)
    elif scene.source.kind == "rollouts":
        vocab_size = AutoConfig.from_pretrained(options.model).get_text_config().vocab_size
        samples = samples_from_rollouts(scene.rows, vocab_size, scene.context, options.temperature, most)
    else:
        samples = samples_from_texts((str(text) for text in scene.texts), scene.tokenizer, context, most)
    resume.save_samples(samples)
    return samples


def _responses(options: TrainOptions, scene: Scene, resume: ResumeFolder, progress: OfflineProgress) -> list[Sample]:
    if scene.skipped:
        progress.say(f"{scene.skipped} prompts are too long and left out")
    rounds = resume.rounds()
    tokens = sum(sample.written for part in rounds for sample in part)
    if rounds:
        progress.say(f"{tokens} tokens of responses are there already")
    if tokens < options.max_train_tokens:
        sampling = Sampling(temperature=options.temperature, max_new_tokens=options.max_new_tokens, seed=options.seed)
        progress.say("Starting the engine ...")
        config = engine_config(scene.prompts, options.max_new_tokens)
        with running_engine(options.model, "", config, options.seed) as engine:
            with progress.phase("Writing responses", options.max_train_tokens - tokens) as advance:
                most, done = options.max_train_tokens, {"rounds_done": len(rounds), "tokens_done": tokens}
                for rollouts in response_rounds(engine, scene.prompts, sampling, most, advance, **done):
                    rounds.append(samples_of([rollouts]))
                    resume.save_round(len(rounds) - 1, rounds[-1])
    return number_prompts([sample for part in rounds for sample in part])
