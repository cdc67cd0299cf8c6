"""The samples of a training: written by the model, or read from texts, chats and rollouts; what an interruption left is used first."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from transformers import AutoConfig

from heads.errors import ConfigError, DataError
from medusa_ppo.actors.hf import DTYPES
from medusa_ppo.console import OfflineProgress
from medusa_ppo.data import Row
from medusa_ppo.reports.records import LOGPROBS, PROMPT_IDS, RESPONSE_IDS
from medusa_ppo.standalone.chat import samples_from_chats
from medusa_ppo.standalone.collect import PROMPTS_PER_ROUND, Sample, number_prompts, response_rounds, samples_from_texts, samples_of
from medusa_ppo.standalone.resume import ResumeFolder
from medusa_ppo.standalone.scene import MAX_TEXT_TOKENS, Setting, engine_config, read_setting, running_engine
from medusa_ppo.standalone.train_options import TrainOptions
from medusa_ppo.types import Sampling


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
    samples: list[Sample] = []
    tokens = 0
    for number, row in reversed(list(enumerate(rows))):
        prompt, response = (_ids(row, name, number, vocab_size) for name in (PROMPT_IDS, RESPONSE_IDS))
        _check_sampling(row, number, temperature)
        if not prompt or not response or len(prompt) + len(response) > context:
            continue
        ids = prompt + response
        samples.append(Sample(ids, ((len(prompt), len(ids)),), 0, _logprobs(row, number, len(response))))
        tokens += len(response)
        if tokens >= max_tokens:
            break
    if not samples:
        raise DataError(
            "No rollout is usable.",
            given="prompts or responses without tokens, or too long",
            expected=f"1 to {context} tokens",
            do="Check --data.",
        )
    return number_prompts(samples)


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


STREAMED_SHARE = 16
"""Of a streamed data set as many prompts are read as would do with responses of so many tokens; they are gone through again if need be."""


def train_setting(options: TrainOptions) -> Setting:
    """Model and data as the options name them.

    Raises:
        ConfigError, ModelError, DataError: unusable options, model, data, template or column.
    """
    if options.dtype not in DTYPES or options.dtype == "float16":
        raise ConfigError("Unknown dtype.", given=options.dtype, expected="float32 | bfloat16", do="Correct --dtype.")
    return read_setting(
        options.model,
        options.data,
        options.template,
        options.max_new_tokens,
        column=options.column,
        respond=options.respond,
        streamed_rows=max(PROMPTS_PER_ROUND, options.max_train_tokens // STREAMED_SHARE) if options.streaming else 0,
    )


def gather_samples(options: TrainOptions, setting: Setting, resume: ResumeFolder, progress: OfflineProgress) -> list[Sample]:
    """All samples; saved, so that an interrupted training goes on with the same ones."""
    most, context = options.max_train_tokens, min(setting.context, MAX_TEXT_TOKENS)
    if setting.source.kind == "prompts":
        samples = _responses(options, setting, resume, progress)
    elif setting.source.kind == "chat":
        samples = samples_from_chats(setting.texts, setting.tokenizer, context, most)
    elif setting.source.kind == "rollouts":
        vocab_size = AutoConfig.from_pretrained(options.model).get_text_config().vocab_size
        samples = samples_from_rollouts(setting.rows, vocab_size, setting.context, options.temperature, most)
    else:
        samples = samples_from_texts((str(text) for text in setting.texts), setting.tokenizer, context, most)
    resume.save_samples(samples)
    return samples


def _responses(options: TrainOptions, setting: Setting, resume: ResumeFolder, progress: OfflineProgress) -> list[Sample]:
    if setting.skipped:
        progress.say(f"{setting.skipped} prompts are too long and left out")
    rounds = resume.rounds()
    tokens = sum(sample.written for part in rounds for sample in part)
    if rounds:
        progress.say(f"{tokens} tokens of responses are there already")
    if tokens < options.max_train_tokens:
        sampling = Sampling(temperature=options.temperature, max_new_tokens=options.max_new_tokens, seed=options.seed)
        progress.say("Starting the engine ...")
        config = engine_config(setting.prompts, options.max_new_tokens)
        with running_engine(options.model, "", config, options.seed) as engine:
            with progress.phase("Writing responses", options.max_train_tokens - tokens) as advance:
                writing = response_rounds(
                    engine,
                    setting.prompts,
                    sampling,
                    options.max_train_tokens,
                    advance,
                    rounds_done=len(rounds),
                    tokens_done=tokens,
                )
                for rollouts in writing:
                    rounds.append(samples_of([rollouts]))
                    resume.save_round(len(rounds) - 1, rounds[-1])
    return number_prompts([sample for part in rounds for sample in part])
