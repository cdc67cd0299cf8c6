"""What `train` and `eval` share: the model, the prompts, and an engine that fits them. For `train
--dry-run` also their sizes, memory and time, before anything is started or written.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from heads.checkpoint import refuse_foreign_folder
from heads.errors import ConfigError, DataError
from heads.heads_config import HeadsConfig
from heads.modules import MedusaHeads
from medusa_ppo.actors.hf import DTYPES, load_tokenizer
from medusa_ppo.actors.megatron_checkpoint import described_by
from medusa_ppo.config.engine_section import EngineConfig
from medusa_ppo.config.model_section import VISION_FAMILIES
from medusa_ppo.engines.launch import with_all_heads
from medusa_ppo.engines.ray_engine import make_engine
from medusa_ppo.engines.rollout_engine import RolloutEngine
from medusa_ppo.offline.collect import PROMPTS_PER_ROUND, chat_prompt, check_template, is_chat
from medusa_ppo.offline.draft_tokens import draft_width
from medusa_ppo.offline.hidden import GROUP_TOKENS, LEAST_GROUPS
from medusa_ppo.offline.options import TrainOptions
from medusa_ppo.offline.schedule import TrainingPlan
from medusa_ppo.reports.run_files import PROMPT_IDS, RESPONSE_IDS
from medusa_ppo.runtime.data import Row, load_rows, render_prompts, require_column, stream_rows
from medusa_ppo.runtime.files import LOCK_FILE
from medusa_ppo.runtime.hardware import cpu_has_bfloat16
from medusa_ppo.runtime.processes import local_ray
from medusa_ppo.runtime.training_speed import matrix_rate, training_operations
from medusa_ppo.runtime.wording import seconds

# Longer prompts are left out, because the longest one decides the engine's context and the room for
# keys and values.
MAX_PROMPT_TOKENS = 1024
MAX_TEXT_TOKENS = 2048
"""Longer texts are cut into windows: in sequences as long as the model's context, attention would
take most of a forward pass.
"""
# The context of models whose configuration has no limit.
DEFAULT_CONTEXT = 2048
MESSAGES, PROMPT = "messages", "prompt"
"""Names of columns that are looked for if neither a template nor a column is given."""

RESUME_FOLDER, MODEL_FOLDER = "resume", "model"
"""Folders of `train` in OUT: an interrupted training, and a checkpoint of Megatron converted."""
BEST_PREFIX = ".best-"
LOGS = {".log", ".out", ".err"}
"""Folders in OUT where the best heads are written before they replace the ones there."""
STREAMED_SHARE = 16
"""From a streamed data set, as many prompts are read as are needed if a response has this many
tokens. If responses turn out shorter, prompts are used again.
"""
FLOAT_BYTES = 4
ADAM_STATES = 2
COPIES = 2 * (1 + ADAM_STATES) + 1
"""Times the heads' bytes that training needs: heads and optimizer, the same as they were before the
part in training, to go back to, and the gradients.
"""

WAYS = (
    "--template (the model answers prompts), --column (full texts or chat messages), a column named"
    " messages or prompt, or rollouts"
)


def training_device() -> torch.device:
    """The first GPU, or the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def on_device(model: PreTrainedModel) -> PreTrainedModel:
    """Move the model to the device that heads are trained on."""
    # transformers wraps `to`, which hides torch's signature from the type checker.
    torch.nn.Module.to(model, training_device())
    return model


def compute_dtype(dtype: str) -> torch.dtype:
    """The requested dtype, or float32 if bfloat16 is slow on this machine. Every call gives the
    same answer, so that runs are reproducible.
    """
    wanted = DTYPES[dtype]
    if wanted == torch.float32 or torch.cuda.is_available() or cpu_has_bfloat16():
        return wanted
    return torch.float32


@dataclass(frozen=True)
class Source:
    """Where tokens come from.

    Attributes:
        kind: `prompts` that the model answers, full `texts`, `chat` messages with the assistant's
            turns, or `rollouts` of a PPO run.
        column: the column that holds them; empty with a template and for rollouts.
    """

    kind: Literal["prompts", "texts", "chat", "rollouts"]
    column: str = ""


@dataclass(frozen=True)
class Scene:
    """What both commands need before starting anything heavy.

    Attributes:
        rows: an iterator if they are streamed.
        prompts: the prompts, if the source is of kind `prompts`; otherwise empty.
        kept: index of each prompt's row.
        context: maximum length of a sequence, in tokens.
        skipped: number of prompts left out because they are too long (or empty).
    """

    tokenizer: PreTrainedTokenizerBase
    rows: Iterable[Row]
    source: Source
    prompts: list[tuple[int, ...]]
    kept: list[int]
    context: int
    skipped: int

    @property
    def left_out(self) -> str:
        """What to say about prompts that are left out; empty if none are."""
        if not self.skipped:
            return ""
        many = "1 prompt is" if self.skipped == 1 else f"{self.skipped} prompts are"
        return f"{many} too long and left out"

    @property
    def texts(self) -> Iterator[Any]:
        """The fields of the column with full texts or messages; empty ones are skipped."""
        return (row[self.source.column] for row in self.rows if row.get(self.source.column))


def read_scene(
    model: str,
    data: str,
    template: str,
    max_new_tokens: int,
    limit: int = 0,
    *,
    column: str = "",
    respond: bool = False,
    streamed_rows: int = 0,
) -> Scene:
    """Load the tokenizer and the rows, find out what the rows contain, and tokenize them if they
    are prompts.

    Args:
        limit: use only the first rows; 0: all.
        column: the column with full texts or messages; not needed for columns named `messages` or
            `prompt`.
        respond: treat messages as prompts: the model replaces the assistant's last turn.
        streamed_rows: read rows one by one as they are needed, and this many prompts; 0: all rows
            at once.

    Raises:
        ModelError, DataError: see `load_tokenizer`, `load_rows` and `find_source`.
    """
    check_one_way(template, column)
    rows: Iterable[Row] = (
        iter(islice(stream_rows(data), limit or None))
        if streamed_rows
        else _load(data, limit, bool(template or column))
    )
    looked_at = _until_filled(rows, template, column)
    if not looked_at:
        raise DataError(
            "The data holds no rows.",
            given=data,
            expected="at least one row",
            do="Check the file and the split.",
        )
    # Looking at these rows took them from the stream, so they are put back.
    if streamed_rows:
        rows = chain(looked_at, rows)
    source = find_source(looked_at[-1], template, column, respond)
    tokenizer = load_tokenizer(model)
    # A model of several parts has its sizes in that of the text.
    sizes = AutoConfig.from_pretrained(model).get_text_config()
    context = int(getattr(sizes, "max_position_embeddings", None) or DEFAULT_CONTEXT)
    if source.kind != "prompts":
        return Scene(tokenizer, rows, source, [], [], context, 0)
    rows = list(islice(rows, streamed_rows or None))
    longest = min(MAX_PROMPT_TOKENS, context - max_new_tokens)
    if longest < 1:
        given = f"--max-new-tokens {max_new_tokens}"
        expected = f"less than {context}"
        raise DataError(
            "The longest response leaves no room for a prompt.",
            given=given,
            expected=expected,
            do="Request fewer tokens.",
        )
    every = _tokenized(rows, template, source.column, tokenizer)
    kept = [i for i, ids in enumerate(every) if 0 < len(ids) <= longest]
    if not kept:
        given = f"{len(every)} prompts"
        expected = f"1 to {longest} tokens each"
        raise DataError(
            "No prompt is usable.",
            given=given,
            expected=expected,
            do="Check --template and --data.",
        )
    return Scene(
        tokenizer, rows, source, [every[i] for i in kept], kept, context, len(every) - len(kept)
    )


def _until_filled(rows: Iterable[Row], template: str, column: str) -> list[Row]:
    """The first rows, up to one that is not empty where the text comes from: an empty list may be
    a conversation or anything else.
    """
    looked_at = []
    for row in rows:
        looked_at.append(row)
        found = _column_in(row, column)
        if template or row.get(found) or found not in row:
            break
    return looked_at


def _column_in(row: Row, column: str) -> str:
    """The column of full texts or messages; empty if none is named, and none has a known name."""
    return column or next((name for name in (MESSAGES, PROMPT) if name in row), "")


def find_source(row: Row, template: str, column: str, respond: bool = False) -> Source:
    """What the rows contain, by one that is not empty there.

    Raises:
        DataError: both a template and a column are given; neither is given and no column has a
            known name; or the column is unknown, or holds neither texts nor messages.
    """
    check_one_way(template, column)
    if template:
        return Source("prompts")
    if not column and PROMPT_IDS in row and RESPONSE_IDS in row:
        return Source("prompts", PROMPT_IDS) if respond else Source("rollouts")
    found = _column_in(row, column)
    if not found:
        raise DataError(
            "Say where the text comes from.",
            given=f"columns {', '.join(row)}",
            expected=WAYS,
            do="Give one of them.",
        )
    require_column([row], found)
    # The model answers a column named `prompt`, but a column given with --column is read as text.
    if not column and found == PROMPT:
        return Source("prompts", found)
    value = row[found]
    if value and not (isinstance(value, str) or is_chat(value)):
        raise DataError(
            "The column holds neither texts nor messages.",
            given=f"column {found}: {value!r:.120}",
            expected="a text, or a list of messages with role and content",
            do="Name another --column, or convert the data: one list of messages in each row.",
        )
    return Source("prompts" if respond else "chat" if is_chat(value) else "texts", found)


def check_one_way(template: str, column: str) -> None:
    """Raise DataError if both are given; checked before anything is read."""
    if template and column:
        given = f"--template {template!r}, --column {column!r}"
        raise DataError(
            "Where the text comes from is said twice.",
            given=given,
            expected=WAYS,
            do="Give only one of the two.",
        )


def _load(data: str, limit: int, said: bool) -> list[Row]:
    try:
        return load_rows(data, limit=limit)
    except DataError as error:
        if said:
            raise
        # Name both problems, or a user who corrects the path would run into the second one.
        do = (
            f"{error.do} Then say where the text comes from: --template, --column, or a column"
            " named messages or prompt."
        )
        raise DataError(error.problem, given=error.given, expected=error.expected, do=do) from error


def _tokenized(
    rows: Sequence[Row], template: str, column: str, tokenizer: PreTrainedTokenizerBase
) -> list[tuple[int, ...]]:
    if column == PROMPT_IDS:
        return [tuple(row[column]) for row in rows]
    if column and any(is_chat(row.get(column)) for row in rows):
        check_template(tokenizer)
        # The template has already written the special tokens into the text.
        texts = [chat_prompt(row[column], tokenizer, number) for number, row in enumerate(rows)]
        return [tuple(tokenizer(text, add_special_tokens=False).input_ids) for text in texts]
    texts = render_prompts(rows, template=template, column=column)
    return [tuple(ids) for ids in tokenizer(texts).input_ids]


def engine_config(prompts: Sequence[Sequence[int]], max_new_tokens: int) -> EngineConfig:
    """Settings for an engine that is just large enough for these prompts."""
    longest = max(len(ids) for ids in prompts) + max_new_tokens
    return EngineConfig(
        max_num_seqs=64,
        max_model_len=max(64, longest),
        memory_fraction=0.6 if torch.cuda.is_available() else 0.1,
        threads=max(1, torch.get_num_threads()),
    )


@contextmanager
def running_engine(
    model: str, heads_path: str, config: EngineConfig, seed: int
) -> Iterator[RolloutEngine]:
    """An engine in an actor of a local Ray, during the block. Afterwards both are always gone."""
    config = with_all_heads(config, heads_path)
    with local_ray(), make_engine(model, heads_path, config, seed) as engine:
        yield engine


def refuse_foreign_out(out: Path) -> None:
    """Check that heads trained into OUT replace no files but those of an earlier training.

    Raises:
        CheckpointError: it has other files, and neither heads nor an interrupted training.
    """
    if (out / RESUME_FOLDER).is_dir():
        return
    names = {path.name for path in out.iterdir()} if out.is_dir() else set()
    # Of a training that was interrupted before it wrote more, or what a shell or a job's queue has
    # begun to write there.
    names -= {LOCK_FILE, MODEL_FOLDER}
    own = (name.startswith(BEST_PREFIX) or Path(name).suffix in LOGS for name in names)
    if not all(own) or not out.is_dir():
        refuse_foreign_folder(out)


def out_folder(out: Path) -> Path:
    """Create the output folder now, so that a path that can't be written fails before the work."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        given = f"{out}: {error.strerror}"
        do = "Choose another --out."
        raise DataError(
            "The output folder can't be created.", given=given, expected="a writable folder", do=do
        ) from None
    return out


def train_scene(options: TrainOptions) -> Scene:
    """Load model and data as the options describe.

    Raises:
        ConfigError, ModelError, DataError: unusable options, model, data, template or column.
    """
    if options.dtype not in DTYPES or options.dtype == "float16":
        raise ConfigError(
            "Unknown dtype.",
            given=options.dtype,
            expected="float32 | bfloat16",
            do="Correct --dtype.",
        )
    if not 0 < options.temperature < math.inf:
        raise ConfigError(
            "Heads can't be trained for this sampling temperature.",
            given=f"{options.temperature:g}",
            expected="a number above 0",
            do=(
                "Train at --temperature 1: at temperature 0 the engine drafts these heads' most"
                " likely tokens."
            ),
        )
    # The trainer's own section refuses it only when the responses are written.
    if options.learning_rate is not None and not 0 < options.learning_rate < math.inf:
        raise ConfigError(
            "Heads can't be trained at this learning rate.",
            given=f"--learning-rate {options.learning_rate:g}",
            expected="a number above 0; the default is 0.512 / the model's hidden size",
            do="Correct --learning-rate, or leave it out.",
        )
    return read_scene(
        options.model,
        options.data,
        options.template,
        options.max_new_tokens,
        column=options.column,
        respond=options.respond,
        streamed_rows=(
            max(PROMPTS_PER_ROUND, options.max_train_tokens // STREAMED_SHARE)
            if options.streaming
            else 0
        ),
    )


def plan_training(options: TrainOptions) -> list[tuple[str, str]]:
    """The rows that `--dry-run` prints, from configuration files and a moment of timed matrix
    products.
    """
    refuse_foreign_out(options.out)
    options = replace(options, model=described_by(options.model))
    scene = train_scene(options)
    whole = AutoConfig.from_pretrained(options.model)
    kind = (
        AutoModelForImageTextToText if whole.model_type in VISION_FAMILIES else AutoModelForCausalLM
    )
    # On the meta device, parameters are counted without using memory.
    with torch.device("meta"):
        actor = sum(p.numel() for p in kind.from_config(whole).parameters())
    model = whole.get_text_config()
    config = options.sizes(model.hidden_size, model.vocab_size)
    with torch.device("meta"):
        parameters = sum(p.numel() for p in MedusaHeads(config).parameters())
    width = DTYPES[options.dtype].itemsize
    compute = compute_dtype(options.dtype)
    hidden_bytes = options.max_train_tokens * model.hidden_size * width
    kept = min(hidden_bytes, options.cache_bytes)
    share = 1.0 if hidden_bytes <= options.cache_bytes else options.cache_bytes / hidden_bytes
    options = options.for_text(options.max_train_tokens, model.hidden_size)
    steps = _planned_steps(options)
    rate = matrix_rate(compute, training_device())
    collect_s, train_s = _estimate(options, config, actor, share, rate)
    source = (
        f"{len(scene.prompts)} prompts, responses by the model"
        if scene.prompts
        else f"column {scene.source.column!r}"
    )
    return [
        (
            "model",
            (
                f"{options.model} (hidden {model.hidden_size}, vocabulary {model.vocab_size},"
                f" {actor / 1e6:.1f} M parameters)"
            ),
        ),
        ("heads", f"{options.num_heads} x {options.kind}, {parameters / 1e6:.2f} M parameters"),
        ("model in memory", f"{_mib(actor * compute.itemsize)}"),
        ("heads, optimizer, gradients", f"{_mib(parameters * FLOAT_BYTES * COPIES)}"),
        (
            "hidden states",
            (
                f"{_mib(hidden_bytes)} for {options.max_train_tokens} tokens, {_mib(kept)} of them"
                " kept between epochs"
            ),
        ),
        ("source", f"{source} ({scene.source.kind})"),
        (
            "optimizer steps",
            (
                f"about {steps} of up to {options.step_positions} positions, learning rate"
                f" {options.learning_rate:.2g}"
            ),
        ),
        (
            "matrix rate here",
            f"{rate / 1e9:.0f} GFLOP/s in {compute} on {training_device()}, measured now",
        ),
        (
            "hidden states take",
            f"at least {seconds(collect_s)}"
            + (", after the writing of the responses" if scene.prompts else ""),
        ),
        ("training takes", f"at least {seconds(train_s)} (the matrix products alone)"),
        ("output", str(options.out)),
    ]


def _planned_steps(options: TrainOptions) -> int:
    """Optimizer steps on as many tokens as there are at most, in groups of equal size."""
    tokens = options.max_train_tokens
    count = max(LEAST_GROUPS, -(-tokens // GROUP_TOKENS))
    sizes = [tokens * (i + 1) // count - tokens * i // count for i in range(count)]
    return TrainingPlan.of(options, sizes, tokens).steps


def _estimate(
    options: TrainOptions,
    config: HeadsConfig,
    actor: int,
    kept: float,
    rate: float,
) -> tuple[float, float]:
    """Seconds for the hidden states and for the training: the matrix products that neither can
    avoid, at the measured rate.
    """
    tokens = options.max_train_tokens
    forward = 2.0 * actor
    drafted = draft_width(config, options.draft_vocab) or config.vocab_size
    step = training_operations(config, drafted)
    again = (1 - kept) * forward * (options.epochs - 1)
    return tokens * forward / rate, tokens * (options.epochs * step + again) / rate


def _mib(size: float) -> str:
    return f"{size / 2**20:.0f} MiB"
