"""The samples of a training: written by the model, or read from texts, chats and rollouts; what an interruption left is used first."""

from __future__ import annotations

from transformers import AutoConfig

from heads.errors import ConfigError
from medusa_ppo.actors.hf import DTYPES
from medusa_ppo.offline.chat import samples_from_chats
from medusa_ppo.offline.collect import PROMPTS_PER_ROUND, Sample, number_prompts, response_rounds, samples_from_texts, samples_of
from medusa_ppo.offline.options import TrainOptions
from medusa_ppo.offline.progress import OfflineProgress
from medusa_ppo.offline.rollouts import samples_from_rollouts
from medusa_ppo.offline.setting import MAX_TEXT_TOKENS, Setting, engine_config, read_setting, running_engine
from medusa_ppo.offline.state import ResumeFolder
from medusa_ppo.types import Sampling

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
