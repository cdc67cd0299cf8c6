"""Sources of rewards: verifiable answers, a Python function named in the configuration, or a reward
model.

Shape letters: S responses, R response positions, B rows of a batch, T tokens.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import logging
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    PreTrainedTokenizerBase,
)

from heads.errors import ConfigError, DataError, MedusaError, ModelError, RunError
from medusa_ppo.config.ppo_section import PPOConfig
from medusa_ppo.ppo.reward_pool import RewardFunction, RewardPool, Sample, find_callable
from medusa_ppo.runtime.data import Row, template_fields

logger = logging.getLogger(__name__)

RIGHT_FROM = 1.0
"""A response counts as right from this reward on, unless the function has its own `correct_from`;
with rewards for steps, if one of its steps earns it.
"""
REWARD_BATCH = 4
"""Responses per forward pass of a reward model, always: a different number might use different
kernels. The last batch of each width is filled up with copies, which costs little with few rows.
"""
SMALLEST_WIDTH = 8
UNKNOWN = "\ufffd"
"""What a decoder writes for bytes that are no character, or none yet."""
MOST_HELD = 32
"""Number of tokens after which a text is taken even if it may change: a character has four bytes,
but a policy may write any number of bytes that are none.
"""


class RewardSource(ABC):
    """Scores whole responses.

    Attributes:
        model: the reward model; None if there is none.
        late: rewards so far that did not arrive in time and are 0.
        cut: texts so far that lost their first tokens to fit a reward model.
    """

    model: nn.Module | None = None
    late: int = 0
    cut: int = 0

    @abstractmethod
    def score(
        self, prompts: Sequence[str], responses: Sequence[str], rows: Sequence[Row]
    ) -> Tensor:
        """rewards_S float32. Raises RunError if a reward can't be computed or is not finite."""

    @abstractmethod
    def score_steps(
        self, prompts: Sequence[str], responses: Sequence[Sequence[str]], rows: Sequence[Row]
    ) -> list[list[float]]:
        """The same for each step of each response. Raises RunError, also for a wrong number of
        rewards.
        """

    def correct(self, rewards: Tensor) -> Tensor | None:
        """bool_S, the response has the right answer; None if the source doesn't know.

        Args:
            rewards: rewards_S, or rewards_SR of steps, of which the largest counts.
        """
        return None

    def close(self) -> None:  # noqa: B027
        """End whatever was started for it; most start nothing."""


class CallableReward(RewardSource):
    """`reward(prompt, response, row) -> float`."""

    def __init__(
        self,
        function: RewardFunction,
        name: str,
        correct_from: float = RIGHT_FROM,
        pool: RewardPool | None = None,
    ) -> None:
        """
        Args:
            pool: calls the function in its processes; None: call it here.
        """
        self._function = function
        self._pool = pool
        self._name = name
        self._correct_from = correct_from

    def score(
        self, prompts: Sequence[str], responses: Sequence[str], rows: Sequence[Row]
    ) -> Tensor:
        samples = list(zip(prompts, responses, rows, strict=True))
        found = [
            self._called(call, sample[1], lambda given: [float(given)], 1)[0]
            for sample, call in self._calls(samples)
        ]
        return torch.tensor(found, dtype=torch.float32)

    def correct(self, rewards: Tensor) -> Tensor | None:
        scores_S = rewards.amax(dim=1) if rewards.dim() == 2 else rewards
        return scores_S >= self._correct_from

    def score_steps(
        self, prompts: Sequence[str], responses: Sequence[Sequence[str]], rows: Sequence[Row]
    ) -> list[list[float]]:
        samples = [
            (prompt, "".join(steps), row)
            for prompt, steps, row in zip(prompts, responses, rows, strict=True)
        ]
        return [
            self._steps(call, steps)
            for steps, (_, call) in zip(responses, self._calls(samples), strict=True)
        ]

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()

    def _calls(self, samples: Sequence[Sample]) -> list[tuple[Sample, Callable[[], Any] | None]]:
        """A call per response: computes it here, or returns the outcome of another process. None:
        that process was killed.
        """
        if self._pool is None:
            return [(sample, functools.partial(self._function, *sample)) for sample in samples]
        outcomes = self._pool.ask(samples)
        late = sum(outcome.late for outcome in outcomes)
        self.late += late
        if late:
            logger.warning(
                "%s took too long for %d of %d responses: their reward is 0.",
                self._name,
                late,
                len(samples),
            )
        return [
            (sample, None if outcome.late else outcome.take)
            for sample, outcome in zip(samples, outcomes, strict=True)
        ]

    def _steps(self, call: Callable[[], Any] | None, steps: Sequence[str]) -> list[float]:
        found = self._called(
            call, "".join(steps), lambda given: [float(reward) for reward in given], len(steps)
        )
        if len(found) != len(steps):
            do = (
                "Split the response at ppo.step_separator, skip blank parts, and return one "
                "reward for each other part."
            )
            given = f"{self._name}: {len(found)} rewards for {''.join(steps)!r:.120}"
            raise RunError(
                "The number of step rewards is wrong.",
                given=given,
                expected=f"{len(steps)} rewards",
                do=do,
            )
        return found

    def _called(
        self,
        call: Callable[[], Any] | None,
        response: str,
        read: Callable[[Any], list[float]],
        count: int,
    ) -> list[float]:
        """The call's rewards; this many zeros if there is none."""
        if call is None:
            return [0.0] * count
        try:
            values = read(call())
        except MedusaError:
            raise
        except Exception as error:  # the user's own code
            do = "Correct the function; it must handle any text, even an empty one."
            given = f"{self._name} on response {response!r:.120}: {type(error).__name__}: {error}"
            expected = "a number (with ppo.step_separator a list of them)"
            raise RunError(
                "The reward function failed.", given=given, expected=expected, do=do
            ) from error
        for value in values:
            if not math.isfinite(value):
                raise _not_finite(f"{self._name} -> {value}", "Correct the function.")
        return values


@dataclass(frozen=True)
class JudgedTexts:
    """A batch of texts as a reward model reads it, padded on the right.

    Attributes:
        ids_BT, mask_BT: int64 tokens, and 1 where a text has one.
        last_B: column of each text's last token that is no padding, also where a text itself ends
            with padding tokens: transformers' classifiers look there.
    """

    ids_BT: Tensor
    mask_BT: Tensor
    last_B: Tensor


class ReadReward(RewardSource):
    """Rewards from a classifier with one output, wherever it is computed.

    The same text gets the same reward to the bit, whatever else is in the batch: the shape of the
    input depends only on the text's own length, and there is always padding.
    """

    def __init__(
        self,
        path: str,
        tokenizer: Any,
        config: Any,
        rows: int,
        template: str,
        *,
        cuts: bool,
        unused_positions: int = 0,
    ) -> None:
        """
        Args:
            tokenizer: the model's own.
            config: the model's, of transformers.
            rows: number of tokens that the model knows.
            cuts: a text of more tokens than the model reads loses its first ones; otherwise it is
                an error.
            unused_positions: number of the model's positions that no token of a text has.

        Raises:
            ConfigError: the template lacks one of its fields.
            ModelError: the tokenizer has more tokens than the model.
        """
        self._before, self._after = _template_parts(template)
        self._tokenizer = tokenizer
        tokens = len(tokenizer)
        if tokens > rows:
            raise ModelError(
                "The reward model's tokenizer does not match it.",
                given=f"{path}: a tokenizer of {tokens} tokens, a model of {rows}",
                expected="no more tokens than the model has",
                do="Put the tokenizer that it was trained with next to it.",
            )
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        if config.pad_token_id is None:
            config.pad_token_id = tokenizer.pad_token_id
        self._config = config
        self._cuts = cuts
        self._unused_positions = unused_positions
        # One less than fits: a batch without padding would be computed differently.
        self._longest = self._most_tokens() - 1

    def _most_tokens(self) -> int:
        """Maximum number of tokens that the model can read: its number of positions or, if that is
        unlimited, its tokenizer's limit. (A tokenizer without a limit names a huge number.)
        """
        positions = int(getattr(self._config, "max_position_embeddings", 0) or 0)
        if positions > 1:
            return positions - self._unused_positions
        return int(self._tokenizer.model_max_length)

    @abstractmethod
    def _outputs(self, texts: Sequence[JudgedTexts]) -> Iterator[Tensor]:
        """The model's output for each batch, float32 on the CPU: for its texts or its tokens."""

    @torch.no_grad()
    def score(
        self, prompts: Sequence[str], responses: Sequence[str], rows: Sequence[Row]
    ) -> Tensor:
        texts = [
            self._before.format(prompt=p) + r + self._after
            for p, r in zip(prompts, responses, strict=True)
        ]
        ids = self._tokenizer(texts)["input_ids"]
        long = [place for place, text in enumerate(ids) if len(text) > self._longest]
        if long:
            self._note_too_long([len(ids[place]) for place in long])
            # Cut at the front, because such models judge by the end of the text. The template's
            # special tokens stay.
            self._tokenizer.truncation_side = "left"
            shorter = self._tokenizer(
                [texts[place] for place in long], truncation=True, max_length=self._longest
            )["input_ids"]
            for place, text in zip(long, shorter, strict=True):
                ids[place] = text
        scores_S = torch.zeros(len(texts))
        for chosen, logits_BX in self._logits(ids):
            scores_S[chosen] = logits_BX[:, 0]
        return scores_S

    @torch.no_grad()
    def score_steps(
        self, prompts: Sequence[str], responses: Sequence[Sequence[str]], rows: Sequence[Row]
    ) -> list[list[float]]:
        ids = []
        ends = []
        for prompt, steps in zip(prompts, responses, strict=True):
            parts = [self._tokenizer(self._before.format(prompt=prompt))["input_ids"]]
            parts += [
                self._tokenizer(step, add_special_tokens=False)["input_ids"] for step in steps
            ]
            after = (
                self._tokenizer(self._after, add_special_tokens=False)["input_ids"]
                if self._after
                else []
            )
            over = sum(map(len, parts)) + len(after) - self._longest
            if over > 0:
                self._note_too_long([over + self._longest])
                # Each step keeps its end, where its reward is read.
                if over >= len(parts[0]):
                    raise self._too_long(
                        over + self._longest, "Set a smaller sampling.max_new_tokens."
                    )
                parts[0] = parts[0][over:]
            ids.append([*itertools.chain.from_iterable(parts), *after])
            ends.append(
                [total - 1 for total in itertools.accumulate(len(part) for part in parts)][1:]
            )
        rewards: list[list[float]] = [[] for _ in ids]
        for chosen, logits_BTX in self._logits(ids):
            # Two labels: the probability that the step is right.
            judged_BT = (
                logits_BTX[..., 0] if logits_BTX.shape[-1] == 1 else logits_BTX.softmax(-1)[..., 1]
            )
            for row, s in enumerate(chosen):
                rewards[s] = judged_BT[row, ends[s]].tolist()
        return rewards

    def _note_too_long(self, lengths: Sequence[int]) -> None:
        """Count texts to cut. Raises RunError if none may be cut."""
        if not self._cuts:
            raise self._too_long(
                max(lengths),
                "Set ppo.reward_too_long=cut, or lower sampling.max_new_tokens or "
                "data.max_prompt_tokens.",
            )
        self.cut += len(lengths)
        logger.warning("Texts were too long for the reward model and lost their first tokens.")

    def _too_long(self, length: int, do: str) -> RunError:
        return RunError(
            "A text is too long for the reward model.",
            given=f"prompt and response of {length:,} tokens in its template",
            expected=f"at most {self._longest:,}",
            do=do,
        )

    def _logits(self, ids: Sequence[Sequence[int]]) -> Iterator[tuple[list[int], Tensor]]:
        """Indices of texts, and the model's output for them, float32 on the CPU."""
        widths = [min(_width(len(text)), self._longest + 1) for text in ids]
        by_width = sorted(range(len(ids)), key=lambda s: (widths[s], s))
        groups = [
            (chosen, width)
            for width, members in itertools.groupby(by_width, key=lambda s: widths[s])
            for chosen in _batches(list(members), REWARD_BATCH)
        ]
        texts = [self._padded([ids[s] for s in chosen], width) for chosen, width in groups]
        for (chosen, _), batch, output in zip(groups, texts, self._outputs(texts), strict=True):
            logits = output[: len(chosen)]
            mask_BT = batch.mask_BT[: len(chosen)].bool()
            if not logits[mask_BT if logits.dim() == 3 else ...].isfinite().all():
                raise _not_finite("the reward model's output", "Check the reward model's weights.")
            yield chosen, logits

    def _padded(self, ids: Sequence[Sequence[int]], width: int) -> JudgedTexts:
        filled = [*ids, *[ids[0]] * (REWARD_BATCH - len(ids))]
        ids_BT = torch.full((REWARD_BATCH, width), int(self._tokenizer.pad_token_id or 0))
        mask_BT = torch.zeros((REWARD_BATCH, width), dtype=torch.int64)
        for row, text in enumerate(filled):
            ids_BT[row, : len(text)] = torch.tensor(text, dtype=torch.int64)
            mask_BT[row, : len(text)] = 1
        last_B = ((ids_BT != self._config.pad_token_id) * torch.arange(width)).argmax(dim=1)
        return JudgedTexts(ids_BT, mask_BT, last_B)


class ModelReward(ReadReward):
    """Scores by a transformers classifier in this process: of a whole text, or with `by_steps` of
    its tokens at the end of each step.
    """

    def __init__(
        self,
        path: str,
        device: torch.device | str = "cpu",
        template: str = "{prompt}{response}",
        *,
        by_steps: bool = False,
        cuts: bool = False,
    ) -> None:
        """
        Args:
            cuts: as `ReadReward`.

        Raises:
            ConfigError: the template lacks one of its fields.
            ModelError: not loadable, it has more outputs, or its tokenizer has more tokens than it.
        """
        _template_parts(template)
        kind: Any = (
            AutoModelForTokenClassification if by_steps else AutoModelForSequenceClassification
        )
        expected = "a token-classification model" if by_steps else "a sequence-classification model"
        try:
            tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
            self.model: Any = (
                kind.from_pretrained(path, weights_only=True, trust_remote_code=False)
                .eval()
                .to(device)
            )
        except Exception as error:
            # transformers raises OSError, ValueError, KeyError, SafetensorError, ... for a bad
            # checkpoint
            first = (str(error).strip().splitlines() or [""])[0]
            given = f"{path} ({type(error).__name__}: {first:.200})"
            do = "Check ppo.reward; a Python function is written as module:function."
            raise ModelError(
                "The reward model can't be loaded.", given=given, expected=expected, do=do
            ) from error
        labels = self.model.config.num_labels
        allowed = (1, 2) if by_steps else (1,)
        if labels not in allowed:
            given = f"{path}: {labels} labels"
            expected = " or ".join(f"{n} label{'s' * (n > 1)}" for n in allowed)
            raise ModelError(
                "The reward model must have exactly one output.",
                given=given,
                expected=expected,
                do="Use a reward model.",
            )
        rows = self.model.get_input_embeddings().weight.shape[0]
        super().__init__(
            path,
            tokenizer,
            self.model.config,
            rows,
            template,
            cuts=cuts,
            unused_positions=_unused_positions(self.model),
        )

    def _outputs(self, texts: Sequence[JudgedTexts]) -> Iterator[Tensor]:
        for batch in texts:
            inputs = {
                "input_ids": batch.ids_BT.to(self.model.device),
                "attention_mask": batch.mask_BT.to(self.model.device),
            }
            yield self.model(**inputs).logits.float().cpu()


def _unused_positions(model: nn.Module) -> int:
    """Number of positions before that of a text's first token. RoBERTa and its relatives begin
    after the position of padding, which their table of positions names: 514 positions hold 512
    tokens.
    """
    padding = [
        module.padding_idx
        for name, module in model.named_modules()
        if name.rpartition(".")[2] == "position_embeddings"
        and isinstance(getattr(module, "padding_idx", None), int)
    ]
    return max(padding, default=-1) + 1


def _template_parts(template: str) -> tuple[str, str]:
    """The template's parts before the response (with the prompt's place in it) and after it."""
    fields = template_fields(template)
    if fields != ["prompt", "response"]:
        raise ConfigError(
            "The reward model's template is not usable.",
            given=f"{template!r}: {', '.join(fields) or 'no field'}",
            expected="{prompt} and {response}, once each and in this order",
            do="Write ppo.reward_template in the format of its training texts.",
        )
    before, _, after = template.partition("{response}")
    return before, after.replace("{{", "{").replace("}}", "}")


def _width(length: int) -> int:
    """Columns of a batch for texts of this length: at least one more, in steps of an eighth."""
    step = max(SMALLEST_WIDTH, 1 << max(0, length.bit_length() - 4))
    return (length // step + 1) * step


def _batches(items: list[int], size: int) -> Iterator[list[int]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def token_texts(
    tokenizer: PreTrainedTokenizerBase, responses: Sequence[Sequence[int]]
) -> list[list[str]]:
    """The text of each token of each response; joined, they are the response's text.

    A token's text depends on those around it: decoded alone, tokens of a SentencePiece lose their
    space, and parts of a character become U+FFFD. A token that only begins or continues a character
    has no text here, and the one that ends it has all of it.

    tokenizers' DecodeStream is not used: on bytes that are no text, which a policy may write, it
    raises an error, and it never gives out what it holds back at the end.
    """
    known: dict[tuple[int, ...], str] = {}

    def text_of(token_ids: Sequence[int]) -> str:
        # Most windows are pairs of tokens that occur many times in a batch.
        key = tuple(token_ids)
        if key not in known:
            (known[key],) = tokenizer.batch_decode([list(key)], skip_special_tokens=True)
        return known[key]

    wholes = tokenizer.batch_decode([list(ids) for ids in responses], skip_special_tokens=True)
    found = []
    for token_ids, whole in zip(responses, wholes, strict=True):
        # Cut out of the whole text, so that their sum is right even where a later byte changes what
        # earlier ones meant.
        ends = [min(end, len(whole)) for end in _text_ends(token_ids, text_of)]
        if ends:
            ends[-1] = len(whole)
        found.append([whole[start:end] for start, end in itertools.pairwise([0, *ends])])
    return found


def _text_ends(token_ids: Sequence[int], text_of: Callable[[Sequence[int]], str]) -> Iterator[int]:
    """How many characters the tokens up to each one have, by decoding it together with only those
    since the last but one that had a text, as vLLM does.
    """
    total = 0
    first = 0
    taken = 0
    for count in range(1, len(token_ids) + 1):
        before = len(text_of(token_ids[first:taken])) if taken > first else 0
        text = text_of(token_ids[first:count])
        # A character may be incomplete, or a special token has no text. A window that does not end
        # would take longer and longer.
        if (len(text) <= before or text.endswith(UNKNOWN)) and count - taken < MOST_HELD:
            yield total
            continue
        total += max(0, len(text) - before)
        first = taken
        taken = count
        yield total


def earned_by_steps(
    source: RewardSource,
    pieces: Sequence[Sequence[str]],
    prompts: Sequence[str],
    rows: Sequence[Row],
    separator: str,
) -> Tensor:
    """rewards_SR: what each step of a response earned, at its last token.

    Args:
        pieces: the text of each token of each response (`token_texts`).
    """
    ends = [step_ends(texts, separator) for texts in pieces]
    steps = [_cut(texts, found) for texts, found in zip(pieces, ends, strict=True)]
    rewards_SR = torch.zeros(len(pieces), max(len(texts) for texts in pieces))
    for s, rewards in enumerate(source.score_steps(prompts, steps, rows)):
        for (_, token), reward in zip(ends[s], rewards, strict=True):
            rewards_SR[s, token] += reward
    return rewards_SR


def step_ends(pieces: Sequence[str], separator: str) -> list[tuple[int, int]]:
    """Where each step ends: the number of characters up to there, and the token with the last of
    them.

    Steps are the non-blank parts between separators; text after the last step belongs to it. There
    is at least one.
    """
    text = "".join(pieces)
    last = 0
    found = list[int]()
    for match in re.finditer(re.escape(separator), text):
        if text[last : match.start()].strip():
            found.append(match.end())
            last = match.end()
    if not found or text[last:].strip():
        found.append(len(text))
    found[-1] = len(text)
    totals = list(itertools.accumulate(len(piece) for piece in pieces))
    tokens = [*(bisect.bisect_left(totals, end) for end in found[:-1]), len(pieces) - 1]
    return list(zip(found, tokens, strict=True))


def _cut(pieces: Sequence[str], ends: Sequence[tuple[int, int]]) -> list[str]:
    text = "".join(pieces)
    starts = [0, *(end for end, _ in ends[:-1])]
    return [text[start:end] for start, (end, _) in zip(starts, ends, strict=True)]


def _not_finite(given: str, do: str) -> RunError:
    return RunError("A reward is not finite.", given=given, expected="a finite number", do=do)


def make_reward(config: PPOConfig, device: torch.device | str = "cpu") -> RewardSource:
    """The configured reward.

    Raises:
        ConfigError: `module:function` does not exist or can't take (prompt, response, row), or the
            template is not usable.
        ModelError: the reward model can't be used.
    """
    if is_model(config.reward):
        return ModelReward(
            config.reward,
            device,
            config.reward_template,
            by_steps=config.step_separator is not None,
            cuts=config.reward_too_long == "cut",
        )
    function = find_callable(config.reward)
    pool = None
    if config.reward_processes is not None:
        pool = RewardPool(config.reward, config.reward_processes, config.reward_timeout_s)
        pool.start()
    return CallableReward(
        function, config.reward, getattr(function, "correct_from", RIGHT_FROM), pool
    )


def is_model(reward: str) -> bool:
    """Whether a reward model judges, rather than a function that could read a reference answer."""
    return ":" not in reward


ANSWER_COLUMN = "answer"
_MARKED = re.compile(r"####[ \t]*([^\n]*)")
_NUMBER = re.compile(r"-?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")


def exact_answer(prompt: str, response: str, row: dict[str, Any]) -> float:
    """1.0 if the number after the response's last `####` equals the reference's, else 0.0.

    The reference is `row["answer"]`: the bare number, or a worked solution that ends with `####
    number` (GSM8K). Numbers are compared by value: `1,000`, `$1000` and `1000.0` are the same.

    Raises:
        DataError: the row has no answer, or none with a number.
    """
    expected = _reference(row)
    given = _marked_number(response)
    return 1.0 if given is not None and given == expected else 0.0


def _reference(row: dict[str, Any]) -> Decimal:
    if ANSWER_COLUMN not in row:
        raise DataError(
            "A row has no reference answer.",
            given=sorted(row),
            expected=f"a column {ANSWER_COLUMN!r}",
            do="Set data.answer_column.",
        )
    text = str(row[ANSWER_COLUMN])
    number = _marked_number(text) if "####" in text else _number(text)
    if number is None:
        raise DataError(
            "A reference answer holds no number.",
            given=repr(text[-80:]),
            expected="a number, or '#### number'",
            do="Correct the row.",
        )
    return number


def _marked_number(text: str) -> Decimal | None:
    """The number alone after the last answer mark; None if there is no mark, or anything else after
    it.
    """
    marked = _MARKED.findall(text)
    return _number(marked[-1]) if marked else None


def _number(text: str) -> Decimal | None:
    """The text as a single number, ignoring a currency or percent sign, a final full stop and
    commas between digits.
    """
    bare = text.strip().strip("$€£% ").rstrip(".").strip()
    if not _NUMBER.fullmatch(bare):
        return None
    try:
        return Decimal(bare.replace(",", ""))
    except InvalidOperation:
        return None
