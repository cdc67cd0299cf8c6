"""What an interrupted `medusa-ppo train` goes on from: OUT/resume, every file of it replaced atomically; safetensors and JSON.

resume/
  settings.json             the options that the heads depend on; other ones are refused
  round-0000.safetensors    responses of one generation round, until all are written
  samples.safetensors       all sequences that are trained and judged on
  trainer.safetensors       heads, optimizer, generator, counters, and how far the training is

Hidden states are not kept: they are computed again, in the same shapes (medusa_ppo/standalone/hidden.py).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch

from heads.checkpoint import load_state, save_state
from heads.errors import CheckpointError, ConfigError
from medusa_ppo.files import write_atomic
from medusa_ppo.standalone.collect import Sample
from medusa_ppo.standalone.train_options import TrainOptions

FOLDER = "resume"
FORMAT_VERSION = 1
POSITION = "position"


@dataclass(frozen=True)
class Position:
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
        path = self._folder / "samples.safetensors"
        return _unpack(load_state(path)) if self.found and path.is_file() else None

    def save_samples(self, samples: Sequence[Sample]) -> None:
        save_state(self._folder / "samples.safetensors", _pack(samples))
        for path in self._folder.glob("round-*.safetensors"):
            path.unlink()

    def trainer(self) -> tuple[dict[str, torch.Tensor], Position] | None:
        """State of the trainer and how far it was; None before the first save."""
        path = self._folder / "trainer.safetensors"
        if not self.found or not path.is_file():
            return None
        state = load_state(path)
        parts, tokens, wall_s = state.pop(POSITION).tolist()
        return state, Position(int(parts), int(tokens), wall_s)

    def save_trainer(self, state: dict[str, torch.Tensor], position: Position) -> None:
        mark = torch.tensor([position.parts, position.tokens, position.wall_s], dtype=torch.float64)
        save_state(self._folder / "trainer.safetensors", {**state, POSITION: mark})

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
        raise CheckpointError(
            "The interrupted training can't be read.", given=f"{path}: {error}", expected="JSON", do="Begin anew with --fresh."
        ) from None
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
    spans = [span for sample in samples for span in sample.spans]
    logprobs = [value for sample in samples for value in sample.logprobs or ()]
    return {
        "ids": torch.tensor([token for sample in samples for token in sample.ids], dtype=torch.int32),
        "lengths": torch.tensor([len(sample.ids) for sample in samples], dtype=torch.int64),
        "spans": torch.tensor(spans, dtype=torch.int64).reshape(-1, 2),
        "span_counts": torch.tensor([len(sample.spans) for sample in samples], dtype=torch.int64),
        "prompts": torch.tensor([sample.prompt for sample in samples], dtype=torch.int64),
        "logprobs": torch.tensor(logprobs, dtype=torch.float32),
        "logprob_counts": torch.tensor([len(sample.logprobs or ()) for sample in samples], dtype=torch.int64),
    }


def _unpack(state: dict[str, torch.Tensor]) -> list[Sample]:
    ids = _cut(state["ids"], state["lengths"])
    spans = _cut(state["spans"], state["span_counts"])
    logprobs = _cut(state["logprobs"], state["logprob_counts"])
    rows = zip(ids, spans, state["prompts"].tolist(), logprobs, strict=True)
    return [Sample(tuple(i), tuple((a, b) for a, b in s), prompt, tuple(p) or None) for i, s, prompt, p in rows]


def _cut(flat: torch.Tensor, counts: torch.Tensor) -> list[list[Any]]:
    values = flat.tolist()
    return [values[start:end] for start, end in pairwise(accumulate(counts.tolist(), initial=0))]
