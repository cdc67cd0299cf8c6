"""What a step generates: its prompts, in an order given by the seed alone, and its rollouts; in
paired steps also without drafting.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from heads.errors import DataError
from medusa_ppo.actors.vision import ImageReader
from medusa_ppo.config.data_section import EMBEDDED_DATA, DataConfig
from medusa_ppo.config.run_config import RunConfig
from medusa_ppo.contract import metrics as names
from medusa_ppo.contract.rollouts import Rollouts, Sampling
from medusa_ppo.demo.task import demo_rows
from medusa_ppo.engines.pieces import Finished
from medusa_ppo.engines.rollout_engine import RolloutEngine
from medusa_ppo.reports.run_files import LOGPROBS, PROMPT_IDS, RESPONSE_IDS, ROLLOUTS_FOLDER
from medusa_ppo.runtime.data import Row, image_files, load_rows, render_prompts, require_column
from medusa_ppo.runtime.data_files import refuse_split
from medusa_ppo.runtime.files import write_atomic

logger = logging.getLogger(__name__)

ANSWER = "answer"
DEMO_ROWS = 2048
DEMO_EVAL_ROWS = 128
TEXT = "text"
FIRST_ROWS = re.compile(r"(?P<split>\w+)\[:(?P<limit>\d+)\]")


@dataclass(frozen=True)
class Prompt:
    """One prompt: its text, its tokens, and the row it came from (the reference answer under
    `answer`).
    """

    text: str
    token_ids: tuple[int, ...]
    row: Row


class PromptStream:
    """Usable prompts in passes over the data, each pass in a different order.

    Attributes:
        prompts: all usable prompts, in the order of the data.
        left_out: rows whose prompt is longer than allowed.
    """

    def __init__(self, prompts: Sequence[Prompt], *, seed: int, left_out: int = 0) -> None:
        if not prompts:
            raise DataError(
                "No prompt is usable.",
                given=f"0 prompts, {left_out} left out",
                expected="at least one",
                do="Raise data.max_prompt_tokens.",
            )
        self.prompts = list(prompts)
        self.left_out = left_out
        self._seed = seed

    @classmethod
    def load(
        cls,
        config: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        seed: int,
        needs_answer: bool = True,
        reader: ImageReader | None = None,
    ) -> PromptStream:
        """Read, render and tokenize the data of a run.

        Args:
            needs_answer: the reward may read the answer column, so it must exist.
            reader: reads the images, if the data has any.

        Raises:
            DataError: see medusa_ppo.runtime.data; also if the answer column is missing or every
                prompt is too long.
        """
        rows = _rows(config)
        texts = render_prompts(rows, template=config.template)
        if config.answer_column and (
            needs_answer or all(config.answer_column in row for row in rows)
        ):
            require_column(rows, config.answer_column)
            rows = [{**row, ANSWER: row[config.answer_column]} for row in rows]
        if reader is None or config.images is None:
            ids: list[tuple[int, ...]] = [tuple(found) for found in tokenizer(texts)["input_ids"]]
        else:
            ids = reader.prompts(texts, image_files(rows, config.images, config.path))
        every = [Prompt(*parts) for parts in zip(texts, ids, rows, strict=True)]
        usable = [
            prompt for prompt in every if 0 < len(prompt.token_ids) <= config.max_prompt_tokens
        ]
        if len(usable) < len(every):
            logger.warning(
                "%d of %d prompts are longer than %d tokens and left out",
                len(every) - len(usable),
                len(every),
                config.max_prompt_tokens,
            )
        return cls(usable, seed=seed, left_out=len(every) - len(usable))

    @classmethod
    def load_evaluation(
        cls,
        config: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        needs_answer: bool = True,
        reader: ImageReader | None = None,
    ) -> PromptStream:
        """The prompts of the evaluation. Raises DataError if they can't be read, or if they are the
        training prompts.
        """
        path = config.eval_path or config.path
        if path == config.path and path != EMBEDDED_DATA and Path(path).is_file():
            do = "Set data.eval_path to another file."
            raise DataError(
                "A file has no splits.",
                given=f"{path}, {config.eval_split}",
                expected="other prompts",
                do=do,
            )
        other = config.model_copy(update={"path": path, "split": config.eval_split})
        return cls.load(other, tokenizer, seed=0, needs_answer=needs_answer, reader=reader)

    @classmethod
    def load_texts(
        cls, path: str, tokenizer: PreTrainedTokenizerBase, *, seed: int, longest: int
    ) -> PromptStream:
        """Texts to train on during PPO, each cut to this many tokens. Raises DataError."""
        rows = load_rows(path)
        require_column(rows, TEXT)
        texts = render_prompts(rows, column=TEXT)
        every = [
            Prompt(text, tuple(ids[:longest]), row)
            for text, ids, row in zip(texts, tokenizer(texts)["input_ids"], rows, strict=True)
        ]
        return cls([prompt for prompt in every if len(prompt.token_ids) > 1], seed=seed)

    def batch(self, step: int, size: int) -> list[Prompt]:
        """The prompts of a step: positions step * size ... of the endless stream. A function of
        seed and step alone.
        """
        total = len(self.prompts)
        chosen: list[Prompt] = []
        while len(chosen) < size:
            turn, offset = divmod(step * size + len(chosen), total)
            order = self._order(turn)[offset : offset + size - len(chosen)]
            chosen += [self.prompts[i] for i in order]
        return chosen

    def _order(self, turn: int) -> list[int]:
        generator = torch.Generator().manual_seed((self._seed * 1_000_003 + turn) % 2**63)
        return torch.randperm(len(self.prompts), generator=generator).tolist()


def _rows(config: DataConfig) -> list[dict[str, Any]]:
    """The rows; `SPLIT[:N]` are the first N of any source, and the hub interprets anything else in
    brackets.
    """
    first = FIRST_ROWS.fullmatch(config.split)
    split, limit = (first["split"], int(first["limit"])) if first else (config.split, 0)
    if config.path == EMBEDDED_DATA:
        split = "eval" if split == "test" else split  # Common names for such columns.
        return list(
            demo_rows(split, limit=limit or (DEMO_ROWS if split == "train" else DEMO_EVAL_ROWS))
        )
    # Otherwise it would hold for the evaluation's prompts, too: those that the actor trains on.
    refuse_split(config.path)
    return load_rows(config.path, split=split, limit=limit)


class RolloutFiles:
    """Keeps the rollouts of the last steps, one file each. A step repeated after a restart replaces
    its file.
    """

    def __init__(self, run_dir: Path, steps: int | None) -> None:
        """
        Args:
            run_dir: folder of the run; the files go to its folder `rollouts`.
            steps: how many of the last steps to keep; None: nothing is written.
        """
        self._folder = run_dir / ROLLOUTS_FOLDER
        self._steps = steps
        self._failed = False

    def write(self, step: int, rollouts: Rollouts) -> None:
        """Write one step's responses, and remove the file that is now too old. A full disk must not
        end a run: a failure is logged, once until it works again.
        """
        if self._steps is None:
            return
        try:
            self._path(step - self._steps).unlink(missing_ok=True)  # First: it makes room.
            write_atomic(self._path(step), "".join(f"{line}\n" for line in _lines(step, rollouts)))
            self._failed = False
        except OSError as error:
            if not self._failed:
                logger.error(
                    "The rollouts of step %d could not be kept, nor those of the next steps until"
                    " there is room: %s",
                    step,
                    error,
                )
            self._failed = True

    def _path(self, step: int) -> Path:
        return self._folder / f"step-{step:06d}.jsonl"


def _lines(step: int, rollouts: Rollouts) -> Iterator[str]:
    sampling = rollouts.sampling
    for response in rollouts.responses:
        yield json.dumps(
            {
                PROMPT_IDS: rollouts.prompts[response.prompt_index],
                RESPONSE_IDS: response.token_ids,
                LOGPROBS: response.logprobs,
                "step": step,
                "policy_version": rollouts.policy_version,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k,
                **({"policy_versions": response.versions} if response.versions else {}),
            }
        )


def sampling_of(config: RunConfig, step: int) -> Sampling:
    """How the responses of a step are sampled. The seed follows from the run's seed and the step;
    it is None if nothing has to be reproducible, and the engine then samples all requests at once.
    """
    section = config.sampling
    return Sampling(
        temperature=section.temperature,
        top_p=section.top_p,
        top_k=section.top_k or 0,
        max_new_tokens=section.max_new_tokens,
        responses_per_prompt=section.responses_per_prompt,
        seed=_seed(config, step) if config.seeds_requests else None,
    )


def _seed(config: RunConfig, step: int) -> int:
    return (config.seed * 1_000_003 + step) % 2**31


def evaluation_sampling(config: RunConfig) -> Sampling:
    """How an evaluation's prompts are answered, once each: as in training, but with the same seeds
    every time, so that evaluations differ by the actors and not by chance. They are those of step
    0, which has other prompts.
    """
    sampling = replace(sampling_of(config, 0), responses_per_prompt=1)
    return replace(sampling, seed=_seed(config, 0)) if sampling.temperature > 0 else sampling


def num_drafts(config: RunConfig) -> int:
    """Maximum number of drafts per engine step; with `heads.path` the engine may have other heads,
    and only whether this is 0 is certain.
    """
    most = config.engine.most_drafts
    return config.heads.num_heads if most is None else most


class SpeedPairs:
    """In every n-th step, answers the step's prompts twice: with drafting and without, in
    alternating order.

    PPO always trains on the rollouts with drafting; the others are timed and thrown away. The order
    alternates because the second of two generations finds a warmer machine (and prompts that the
    engine has seen). An engine with a memory would draft from the plain responses to the very same
    prompts, so there they come last.
    """

    def __init__(self, engine: RolloutEngine, config: RunConfig) -> None:
        self._engine = engine
        self._every = config.report.speed_every or 0
        self._drafts = num_drafts(config) > 0
        self._remembers = bool(config.engine.memory_bytes)

    def due(self, step: int) -> bool:
        """Whether this step is paired: the last of every n steps is, so that heads have time to
        learn before the first pair.
        """
        return self._drafts and self._every > 0 and step % self._every == self._every - 1

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        step: int,
        finished: Finished | None = None,
    ) -> tuple[Rollouts, dict[str, float]]:
        """The step's rollouts, and the figures of the pair (empty in steps without one).

        Args:
            finished: called as responses end, in steps without a pair, since its work would be
                timed too.
        """
        if not self.due(step):
            found = (
                self._engine.generate_as_finished(prompts, sampling, finished)
                if finished
                else self._engine.generate(prompts, sampling)
            )
            return found, {}
        plain_first = not self._remembers and (step // self._every) % 2 == 0
        plain = self._plain(prompts, sampling) if plain_first else None
        rollouts = self._engine.generate(prompts, sampling)
        if plain is None:
            plain = self._plain(prompts, sampling)
        return rollouts, pair_figures(rollouts.tokens_per_s, plain.tokens_per_s)

    def _plain(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> Rollouts:
        # The engine's own number: heads from a folder, or a server's, may be more or fewer than
        # those of the configuration.
        before = self._engine.num_drafts
        self._engine.configure(num_drafts=0)
        try:
            return self._engine.generate(prompts, sampling)
        finally:
            self._engine.configure(num_drafts=before)


def pair_figures(drafting: float, plain: float) -> dict[str, float]:
    """Tokens/s of a pair with and without drafting, and their ratio."""
    speedup = drafting / plain if plain else float("nan")
    return {
        names.PAIR_DRAFTING_TOKENS_PER_S: drafting,
        names.PAIR_PLAIN_TOKENS_PER_S: plain,
        names.PAIR_SPEEDUP: speedup,
    }
