"""The data that heads are trained and measured on: sequences of tokens written by the model, or
taken from texts, chats and a run's rollouts.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import jinja2
import torch
from transformers import PreTrainedTokenizerBase

from heads.errors import DataError, ModelError
from medusa_ppo.contract.rollouts import Rollouts, Sampling
from medusa_ppo.engines.rollout_engine import RolloutEngine
from medusa_ppo.reports.run_files import LOGPROBS, PROMPT_IDS, RESPONSE_IDS
from medusa_ppo.runtime.console import Advance
from medusa_ppo.runtime.data import Row

# A round is one call of the engine and one file to resume from. It is large enough to keep the
# engine's batch full, and small enough that an interruption loses little.
PROMPTS_PER_ROUND = 128
# The last rounds are smaller, so that long responses do not pass the wanted tokens by far.
LEAST_PROMPTS_PER_ROUND = 16
MOST_OF_ONE = 0.1
"""Share of the wanted tokens that come from one row as long as others have more, and of the
held-out ones from one prompt: one long document would be all that heads learn or are judged on.
"""
ASSISTANT, SYSTEM = "assistant", "system"

Prompt = TypeVar("Prompt")
Messages = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Sample:
    """One sequence of tokens, and which of them count as written by the model.

    Attributes:
        ids: all tokens, including the given ones.
        spans: (first, end) of each stretch of written tokens, in order; each follows at least one
            token.
        prompt: samples with the same number are much alike (answers to one prompt or question,
            windows of one text, the same text twice), so the holdout takes all of them or none.
        logprobs: behaviour log-probs of the written tokens; None: use the actor's own.
        by_model: whether the model itself wrote them, as replay assumes; not so in texts and chats.
    """

    ids: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    prompt: int
    logprobs: tuple[float, ...] | None = None
    by_model: bool = True

    @property
    def written(self) -> int:
        """Number of written tokens."""
        return sum(end - first for first, end in self.spans)


def take_prompts(prompts: Sequence[Prompt], start: int, count: int) -> list[Prompt]:
    """`count` prompts from position `start` on, wrapping around at the end of the list."""
    return [prompts[i % len(prompts)] for i in range(start, start + count)]


def response_rounds(
    engine: RolloutEngine,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    max_tokens: int,
    advance: Advance,
    per_round: int = PROMPTS_PER_ROUND,
    *,
    done: Sequence[int] = (),
) -> Iterator[Rollouts]:
    """Let the model answer the prompts, at most `per_round` at a time, until there are `max_tokens`
    response tokens (0: each prompt once).

    Args:
        sampling: how to sample; the first round uses its seed, and each later round adds one to it.
        done: response tokens of each round that an earlier call yielded; this one continues after
            them. What a round asks depends on these numbers alone.
    """
    start = tokens = 0
    first_seed = sampling.seed or 0
    for number in itertools.count():
        if max_tokens:
            if tokens >= max_tokens:
                return
            # Before the first response, each one may be as long as is allowed.
            length = tokens / start if start else sampling.max_new_tokens
            wanted = math.ceil((max_tokens - tokens) / max(1.0, length))
            count = min(per_round, max(LEAST_PROMPTS_PER_ROUND, wanted))
            picked = take_prompts(prompts, start, count)
        else:
            picked = list(prompts[start : start + per_round])
            if not picked:
                return
        start = start + len(picked)
        if number < len(done):
            tokens = tokens + done[number]
            continue
        rollouts = engine.generate(picked, replace(sampling, seed=first_seed + number))
        tokens = tokens + rollouts.generated_tokens
        advance(
            rollouts.generated_tokens if max_tokens else len(picked),
            f"{rollouts.tokens_per_s:.0f} tokens/s",
        )
        yield rollouts


def samples_of(rounds: Iterable[Rollouts]) -> list[Sample]:
    """Flatten rollouts; empty responses teach nothing and are left out."""
    samples = []
    for rollouts in rounds:
        for response in rollouts.responses:
            if response.token_ids:
                prompt = tuple(rollouts.prompts[response.prompt_index])
                samples.append(
                    response_sample(prompt, tuple(response.token_ids), tuple(response.logprobs))
                )
    return number_prompts(samples)


def response_sample(
    prompt: tuple[int, ...], response: tuple[int, ...], logprobs: tuple[float, ...] | None
) -> Sample:
    """A prompt and its response as one sample, not numbered yet."""
    return Sample(prompt + response, ((len(prompt), len(prompt) + len(response)),), 0, logprobs)


def number_prompts(samples: Sequence[Sample]) -> list[Sample]:
    """Give all responses to the same prompt the same number, whatever round they come from."""
    numbers: dict[tuple[int, ...], int] = {}
    return [
        # Prompts are told apart by their tokens: rounds repeat prompts under other numbers.
        replace(sample, prompt=numbers.setdefault(sample.ids[: sample.spans[0][0]], len(numbers)))
        for sample in samples
    ]


def samples_from_texts(
    texts: Iterable[str], tokenizer: PreTrainedTokenizerBase, max_length: int, max_tokens: int
) -> list[Sample]:
    """Full texts: the first token is given, everything after it counts as written. Long texts
    become windows of `max_length` tokens.

    Args:
        max_tokens: stop at this many written tokens; later texts are not even read. 0: all.

    Raises:
        DataError: a row is not a text, or no text has at least two tokens.
    """
    # A generator: `take_samples` stops when it has enough, so that a stream is read no further.
    numbers: dict[str, int] = {}
    windows = (
        # A text that is there twice has one number, so that it is never on both sides.
        _windows(text, tokenizer, max_length, numbers.setdefault(text, len(numbers)))
        for text in (_text(value, number) for number, value in enumerate(texts))
    )
    nothing = {"expected": "at least two tokens each", "do": "Check --column."}
    return take_samples(
        windows, max_tokens, "No text is long enough to train on.", "texts", **nothing
    )


def _text(value: object, number: int) -> str:
    if not isinstance(value, str):
        raise DataError(
            "A row is not a text.",
            given=f"row {number}: {value!r:.120}",
            expected="a text, like the rows before",
            do="Correct the row, or name another --column.",
        )
    return value


def _windows(
    text: str, tokenizer: PreTrainedTokenizerBase, max_length: int, number: int
) -> list[Sample]:
    # Not `verbose`, which would warn about every text that is longer than the model's context; long
    # texts are cut into windows below.
    ids = tuple(tokenizer(text, truncation=False, verbose=False).input_ids)
    # The first token of a window is the last one of the previous window.
    windows = [ids[start : start + max_length] for start in range(0, len(ids) - 1, max_length - 1)]
    return [Sample(window, ((1, len(window)),), number, by_model=False) for window in windows]


def take_samples(
    rows: Iterable[list[Sample]],
    max_tokens: int,
    problem: str,
    what: str,
    *,
    expected: str,
    do: str,
) -> list[Sample]:
    """Take the rows' samples in order, up to this many written tokens (0: all). Of rows that have
    more than MOST_OF_ONE of these, the rest is taken only if all rows together are too few, from
    each in turn.

    Raises:
        DataError: there are none.
    """
    samples: list[Sample] = []
    rests: list[list[Sample]] = []
    tokens = seen = 0
    for found in rows:
        seen += 1
        if not max_tokens:
            samples += found
            continue
        taken = within(found, min(math.ceil(MOST_OF_ONE * max_tokens), max_tokens - tokens))
        samples += taken
        tokens += sum(sample.written for sample in taken)
        if tokens >= max_tokens:
            return samples
        if len(taken) < len(found):
            # There are few such rows: each has given MOST_OF_ONE already.
            rests.append(within(found[len(taken) :], max_tokens))
    rest = (sample for turn in itertools.zip_longest(*rests) for sample in turn if sample)
    samples += within(list(rest), max_tokens - tokens)
    if not samples:
        raise DataError(problem, given=f"{seen} {what}", expected=expected, do=do)
    return samples


def within(samples: Sequence[Sample], most_tokens: int) -> list[Sample]:
    """The first samples, up to this many written tokens; the one that reaches them is the last."""
    before = itertools.accumulate((sample.written for sample in samples), initial=0)
    # Not strict: behind the last one there is another number.
    return [s for s, tokens in zip(samples, before, strict=False) if tokens < most_tokens]


def split_samples(
    samples: Sequence[Sample], fraction: float, most_tokens: int, seed: int
) -> tuple[list[Sample], list[Sample]]:
    """Training samples and held-out ones; no prompt is in both. Where many prompts are held out,
    and one of them has more than MOST_OF_ONE of the tokens, the rest of it is in neither.

    Args:
        fraction: share of the prompts to hold out.
        most_tokens: stop holding out at this many written tokens.

    Raises:
        DataError: all samples answer one prompt.
    """
    prompts = sorted({sample.prompt for sample in samples})
    if len(prompts) < 2:
        given = f"{len(samples)} responses, 1 prompt"
        raise DataError(
            "There are too few prompts to keep some out of training.",
            given=given,
            expected="2 prompts",
            do="Give more.",
        )
    indexes: dict[int, list[int]] = {}
    for index, sample in enumerate(samples):
        indexes.setdefault(sample.prompt, []).append(index)
    # At least one prompt is held out however small the fraction: without any, nothing can be
    # judged.
    most = max(1, math.floor(fraction * len(prompts)))
    most_of_one = math.ceil(max(MOST_OF_ONE, 1 / most) * most_tokens)
    held: set[int] = set()
    held_out: list[int] = []
    tokens = 0
    # A separate generator: a resumed training must hold out the same prompts.
    for number in torch.randperm(
        len(prompts), generator=torch.Generator().manual_seed(seed)
    ).tolist():
        if len(held) >= most or tokens >= most_tokens:
            break
        held.add(prompts[number])
        answers = [samples[index] for index in indexes[prompts[number]]]
        taken = within(answers, min(most_of_one, most_tokens - tokens))
        held_out += indexes[prompts[number]][: len(taken)]
        tokens += sum(sample.written for sample in taken)
    return (
        [sample for sample in samples if sample.prompt not in held],
        [samples[index] for index in sorted(held_out)],
    )


# ---- chats


def is_chat(value: object) -> bool:
    """Whether a field of a row holds messages: a list of {role, content}."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in value)
    )


def samples_from_chats(
    chats: Iterable[Messages], tokenizer: PreTrainedTokenizerBase, max_length: int, max_tokens: int
) -> list[Sample]:
    """Conversations: only the assistant's turns (including the token that ends each) count as
    written.

    Args:
        max_length: longer conversations are cut at their end, or before and after their last answer
            if none begins within this length.
        max_tokens: stop at this many written tokens; 0: all.

    Raises:
        ModelError: the tokenizer has no chat template, or can't report where its tokens begin.
        DataError: a row is not a list of messages, the template refuses it, or no assistant says
            anything.
    """
    check_template(tokenizer)
    numbers: dict[str, int] = {}
    every = (
        _conversation(messages, tokenizer, max_length, number, numbers)
        for number, messages in enumerate(chats)
    )
    nothing = {
        "expected": "messages of the role assistant",
        "do": "Add --respond, so that the model writes the answers itself.",
    }
    return take_samples(
        every,
        max_tokens,
        "No conversation has an assistant's turn to train on.",
        "conversations",
        **nothing,
    )


def _conversation(
    messages: Messages,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    number: int,
    numbers: dict[str, int],
) -> list[Sample]:
    """The samples of a row. `numbers` of the questions so far gets this row's, if it is new."""
    written = _written_turns(messages, tokenizer, number)
    prompt = numbers.setdefault(_question(messages), len(numbers))
    samples = [_chat_sample(text, turns, tokenizer, max_length, prompt) for text, turns in written]
    return [sample for sample in samples if sample is not None]


def _question(messages: Messages) -> str:
    """What the assistant answers first: rows with the same question are much alike. Greetings are
    no answers, so a conversation without a question is its own.
    """
    asked = False
    for index, message in enumerate(messages):
        if message["role"] == ASSISTANT and asked:
            return json.dumps(messages[:index], sort_keys=True, default=str)
        asked = asked or message["role"] not in (ASSISTANT, SYSTEM)
    return json.dumps(messages, sort_keys=True, default=str)


def chat_prompt(messages: Messages, tokenizer: PreTrainedTokenizerBase, number: int) -> str:
    """The conversation as a prompt for the model. If it ends with an answer, that is left out. Of
    an empty one nothing is left.
    """
    if messages:
        _check_chat(messages, number)
    asked = messages[:-1] if messages and messages[-1]["role"] == ASSISTANT else messages
    return _render(asked, tokenizer, number, answer=True)


def check_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ModelError if the tokenizer can't render messages."""
    if not tokenizer.chat_template:
        raise ModelError(
            "The tokenizer has no chat template.",
            given=tokenizer.name_or_path or type(tokenizer).__name__,
            expected="chat_template in tokenizer_config.json, or chat_template.jinja beside it",
            do=(
                "Use the folder of a chat model, or train on plain texts (--column) or prompts"
                " (--template)."
            ),
        )
    if not tokenizer.is_fast:
        raise ModelError(
            "The tokenizer can't report where its tokens begin in the text.",
            given=type(tokenizer).__name__,
            expected="a fast tokenizer (tokenizer.json)",
            do="Convert it, or train on plain texts (--column) or prompts (--template).",
        )


def _written_turns(
    messages: Messages, tokenizer: PreTrainedTokenizerBase, number: int
) -> list[tuple[str, list[tuple[int, int]]]]:
    """Texts, each with the character ranges that the assistant wrote.

    Usually one text holds all turns. Some templates render a turn differently when more messages
    follow (they drop earlier reasoning); then the turn gets a separate text, as the model wrote it.
    """
    _check_chat(messages, number)
    whole = _render(messages, tokenizer, number)
    together: list[tuple[int, int]] = []
    alone = []
    for index, message in enumerate(messages):
        if message["role"] != ASSISTANT:
            continue
        # A template doesn't report where its turns begin, so a turn is what it adds to the text
        # before.
        before = _render(messages[:index], tokenizer, number, answer=True)
        after = _render(messages[: index + 1], tokenizer, number)
        # A generation prompt can contain text that the final turn lacks (an opening tag for
        # reasoning), so only the common part was given.
        turn = (_common_prefix(before, after), len(after))
        if whole.startswith(after):
            together.append(turn)
        else:
            alone.append((after, [turn]))
    return [(whole, together), *alone] if together else alone


def _check_chat(messages: object, number: int) -> None:
    if not is_chat(messages):
        given = f"row {number}: {messages!r:.120}"
        expected = "a list of messages with role and content"
        raise DataError(
            "A row is not a conversation.",
            given=given,
            expected=expected,
            do="Name another --column.",
        )


def _common_prefix(left: str, right: str) -> int:
    """Length of the longest text that both begin with."""
    # Not strict: the texts differ in length.
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(left), len(right)))


def _render(
    messages: Messages, tokenizer: PreTrainedTokenizerBase, number: int, *, answer: bool = False
) -> str:
    # Templates read messages[0], which would fail for an empty list.
    if not messages:
        return ""
    try:
        return str(
            tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=answer
            )
        )
    # Templates are code: they raise errors of their own and can fail in any other way.
    except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
        raise DataError(
            "The chat template rejects a conversation.",
            given=f"row {number}: {type(error).__name__}: {error}",
            expected="messages that this model's template accepts",
            do="Correct the row, or leave it out.",
        ) from error


def _chat_sample(
    text: str,
    turns: list[tuple[int, int]],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    number: int,
) -> Sample | None:
    """A text as a sample; the tokens within the turns count as written. If none of them begins
    within `max_length` tokens, the sample is the text before the end of the last one.
    """
    encoded = tokenizer(
        # The template has already written the special tokens into the text.
        text,
        add_special_tokens=False,
        return_offsets_mapping=True,
        truncation=False,
        verbose=False,
    )
    ids = tuple(encoded["input_ids"])
    starts = [start for start, _ in encoded["offset_mapping"]]
    spans = []
    for begin, end in turns:
        # A text's first token can't count: no state before it predicts it.
        inside = [i for i, start in enumerate(starts) if begin <= start < end and i > 0]
        if not inside:
            continue
        first = inside[0]
        last = inside[-1]
        # What the template puts after the end token is never written by the model.
        ends = [i for i in inside if ids[i] == tokenizer.eos_token_id]
        spans.append((first, (ends[-1] if ends else last) + 1))
    if not spans:
        return None
    cut = 0 if spans[0][0] < max_length else max(0, spans[-1][1] - max_length)
    within_cut = [(max(1, a - cut), min(max_length, b - cut)) for a, b in spans]
    kept = tuple((first, end) for first, end in within_cut if first < end)
    return Sample(ids[cut : cut + max_length], kept, number, by_model=False)


# ---- rollouts of a run


def samples_from_rollouts(
    rows: Iterable[Row], vocab_size: int, context: int, temperature: float, max_tokens: int
) -> list[Sample]:
    """One sample per row. The last rows come first, because the newest policy wrote them. Empty
    responses teach nothing and are left out.

    Args:
        rows: with `prompt_ids` and `response_ids`; `logprobs` if known (otherwise the actor's own
            are used), and `temperature`, `top_p` and `top_k` unless it was plain sampling.
        vocab_size: ids must be below this.
        context: maximum tokens of prompt and response together.
        temperature: temperature that the heads are trained for.
        max_tokens: stop at this many response tokens.

    Raises:
        DataError: no usable row, invalid ids or log-probs, or a row sampled differently.
    """
    # Rows are numbered before they are reversed, so that an error gives the number in the file.
    newest_first = reversed(list(enumerate(rows)))
    found = (
        _rollout(row, number, vocab_size, context, temperature) for number, row in newest_first
    )
    nothing = {
        "expected": f"prompts and responses of 1 to {context} tokens together",
        "do": "Check --data.",
    }
    return number_prompts(
        take_samples(found, max_tokens, "No rollout is usable.", "rows", **nothing)
    )


def _rollout(
    row: Row, number: int, vocab_size: int, context: int, temperature: float
) -> list[Sample]:
    prompt, response = (_ids(row, name, number, vocab_size) for name in (PROMPT_IDS, RESPONSE_IDS))
    _check_sampling(row, number, temperature)
    if not prompt or not response or len(prompt) + len(response) > context:
        return []
    return [response_sample(prompt, response, _logprobs(row, number, len(response)))]


def _ids(row: Row, name: str, number: int, vocab_size: int) -> tuple[int, ...]:
    found = row.get(name)
    if not isinstance(found, list) or not all(
        isinstance(i, int) and 0 <= i < vocab_size for i in found
    ):
        raise _bad(row, name, number, f"a list of token ids below {vocab_size}")
    return tuple(found)


def _logprobs(row: Row, number: int, length: int) -> tuple[float, ...] | None:
    found = row.get(LOGPROBS)
    if found is None:
        return None
    if (
        not isinstance(found, list)
        or len(found) != length
        # This also refuses NaN, which is not <= 0.
        or not all(isinstance(p, float | int) and p <= 0 for p in found)
    ):
        raise _bad(row, LOGPROBS, number, f"{length} numbers, none above 0")
    return tuple(float(p) for p in found)


def _check_sampling(row: Row, number: int, temperature: float) -> None:
    plain: dict[str, tuple[Any, str]] = {
        "temperature": (temperature, "the --temperature of this training"),
        "top_p": (1.0, "1: heads are trained for plain sampling"),
        "top_k": (0, "0: heads are trained for plain sampling"),
    }
    for name, (wanted, meaning) in plain.items():
        # Log-probs of a truncated distribution are not those of the sampling that heads are for:
        # heads would be trained and judged with the wrong p.
        if row.get(name) is not None and row[name] != wanted:
            raise _bad(row, name, number, f"{wanted} ({meaning})")


def _bad(row: Row, name: str, number: int, expected: str) -> DataError:
    return DataError(
        f"A rollout's {name} can't be used.",
        given=f"row {number}: {row.get(name)!r:.80}",
        expected=expected,
        do="Correct the data.",
    )
