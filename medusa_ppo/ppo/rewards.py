"""Where rewards come from: verifiable ones, a Python callable named in the configuration, or a reward model."""

from __future__ import annotations

import difflib
import importlib
import inspect
import math
import os
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from heads.errors import ConfigError, DataError, MedusaError, ModelError, RunError
from medusa_ppo.config import PPOConfig
from medusa_ppo.data import Row

RewardFunction = Callable[[str, str, Row], float]

RIGHT_FROM = 1.0
"""A response counts as right from this reward on, unless the function has an attribute `correct_from`."""
REWARD_BATCH = 16
"""Responses per forward pass of a reward model."""


class RewardSource(ABC):
    """Scores whole responses."""

    @abstractmethod
    def score(self, prompts: Sequence[str], responses: Sequence[str], rows: Sequence[Row]) -> Tensor:
        """rewards_S float32. Raises RunError when a reward can't be computed or is not finite."""

    def correct(self, scores_S: Tensor) -> Tensor | None:
        """bool_S, the response has the right answer; None when the source doesn't know what is right."""
        return None


class CallableReward(RewardSource):
    """`reward(prompt, response, row) -> float`."""

    def __init__(self, function: RewardFunction, name: str, correct_from: float = RIGHT_FROM) -> None:
        self._function = function
        self._name = name
        self._correct_from = correct_from

    def score(self, prompts: Sequence[str], responses: Sequence[str], rows: Sequence[Row]) -> Tensor:
        return torch.tensor([self._one(*sample) for sample in zip(prompts, responses, rows, strict=True)], dtype=torch.float32)

    def correct(self, scores_S: Tensor) -> Tensor | None:
        return scores_S >= self._correct_from

    def _one(self, prompt: str, response: str, row: Row) -> float:
        try:
            value = float(self._function(prompt, response, row))
        except MedusaError:
            raise
        except Exception as error:  # the user's own code
            do = "Correct the function; it must handle any text, also an empty one."
            given = f"{self._name} on response {response!r:.120}: {type(error).__name__}: {error}"
            raise RunError("The reward function failed.", given=given, expected="a number", do=do) from error
        if not math.isfinite(value):
            raise RunError(
                "A reward is not finite.", given=f"{self._name} -> {value}", expected="a finite number", do="Correct the function."
            )
        return value


class ModelReward(RewardSource):
    """The single logit of a transformers sequence-classification model, read over prompt plus response."""

    def __init__(self, path: str, device: torch.device | str = "cpu") -> None:
        """
        Raises:
            ModelError: not loadable, or it has more than one output.
        """
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
            self._model = (
                AutoModelForSequenceClassification.from_pretrained(path, weights_only=True, trust_remote_code=False).eval().to(device)
            )
        except Exception as error:  # transformers raises OSError, ValueError, KeyError, SafetensorError, ... for a bad checkpoint
            first = (str(error).strip().splitlines() or [""])[0]
            given = f"{path} ({type(error).__name__}: {first:.200})"
            do = "Check ppo.reward; a Python function is written as module:function."
            raise ModelError("The reward model can't be loaded.", given=given, expected="a sequence-classification model", do=do) from error
        if self._model.config.num_labels != 1:
            labels = self._model.config.num_labels
            raise ModelError(
                "The reward model has not one output.", given=f"{path}: {labels} labels", expected="1 label", do="Use a reward model."
            )
        if self._tokenizer.pad_token is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        if self._model.config.pad_token_id is None:
            self._model.config.pad_token_id = self._tokenizer.pad_token_id
        self._longest = int(getattr(self._model.config, "max_position_embeddings", 0) or 1024)

    @torch.no_grad()
    def score(self, prompts: Sequence[str], responses: Sequence[str], rows: Sequence[Row]) -> Tensor:
        texts = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        scores_S = torch.zeros(len(texts))
        for start in range(0, len(order), REWARD_BATCH):
            chosen = order[start : start + REWARD_BATCH]
            inputs = self._tokenizer(
                [texts[i] for i in chosen], return_tensors="pt", padding=True, truncation=True, max_length=self._longest
            )
            inputs = {key: inputs[key].to(self._model.device) for key in ("input_ids", "attention_mask")}
            scores_S[chosen] = self._model(**inputs).logits[:, 0].float().cpu()
        if not scores_S.isfinite().all():
            raise RunError(
                "A reward is not finite.",
                given="the reward model's output",
                expected="finite numbers",
                do="Check the reward model's weights.",
            )
        return scores_S


def make_reward(config: PPOConfig, device: torch.device | str = "cpu") -> RewardSource:
    """The reward that the configuration names.

    Raises:
        ConfigError: `module:function` does not exist or can't take (prompt, response, row).
        ModelError: the reward model can't be used.
    """
    if ":" not in config.reward:
        return ModelReward(config.reward, device)
    function = find_callable(config.reward)
    return CallableReward(function, config.reward, getattr(function, "correct_from", RIGHT_FROM))


def find_callable(name: str) -> RewardFunction:
    """Import `module:function`; modules in the working directory are found as well."""
    module_name, mark, function_name = name.partition(":")
    if not mark or not module_name or not function_name:
        raise ConfigError(
            "ppo.reward must be module:function.", given=name, expected="e.g. medusa_ppo.ppo.rewards:exact_answer", do="Correct ppo.reward."
        )
    module = _import(module_name)
    function = getattr(module, function_name, None)
    if not callable(function):
        known = [key for key, value in vars(module).items() if inspect.isfunction(value) and not key.startswith("_")]
        near = difflib.get_close_matches(function_name, known, n=1)
        do = f"Did you mean {module_name}:{near[0]}?" if near else "Correct ppo.reward."
        raise ConfigError("The module has no such reward function.", given=name, expected=", ".join(known) or "a function in it", do=do)
    try:
        inspect.signature(function).bind("prompt", "response", {})
    except TypeError:
        given = f"{name}{inspect.signature(function)}"
        raise ConfigError(
            "The reward function takes other arguments.", given=given, expected="(prompt, response, row)", do="Change it."
        ) from None
    return function


def _import(name: str) -> Any:
    here = os.getcwd()
    # A console script does not have the working directory on its path, where people keep their reward functions.
    added = here not in sys.path and "" not in sys.path
    if added:
        sys.path.append(here)
    try:
        return importlib.import_module(name)
    except ImportError as error:
        given = f"{name}: {error}"
        do = "Run from the folder that holds the module, or install it."
        raise ConfigError(
            "The module of the reward function can't be imported.", given=given, expected="an importable module", do=do
        ) from error
    finally:
        if added:
            sys.path.remove(here)


ANSWER_COLUMN = "answer"
_MARKED = re.compile(r"####[ \t]*([^\n]*)")
_NUMBER = re.compile(r"-?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")


def exact_answer(prompt: str, response: str, row: dict[str, Any]) -> float:
    """1.0 if the number after the response's last `####` equals the reference's, else 0.0.

    The reference is `row["answer"]`: the bare number, or a worked solution that ends with `#### number` (GSM8K). Numbers are compared by
    value: `1,000`, `$1000` and `1000.0` are the same.

    Raises:
        DataError: the row has no answer, or none with a number.
    """
    expected = _reference(row)
    given = _marked_number(response)
    return 1.0 if given is not None and given == expected else 0.0


def _reference(row: dict[str, Any]) -> Decimal:
    if ANSWER_COLUMN not in row:
        raise DataError(
            "A row has no reference answer.", given=sorted(row), expected=f"a column {ANSWER_COLUMN!r}", do="Set data.answer_column."
        )
    text = str(row[ANSWER_COLUMN])
    number = _marked_number(text) if "####" in text else _number(text)
    if number is None:
        raise DataError(
            "A reference answer holds no number.", given=repr(text[-80:]), expected="a number, or '#### number'", do="Correct the row."
        )
    return number


def _marked_number(text: str) -> Decimal | None:
    """The number that stands alone after the last answer mark; None where there is no mark or something else behind it."""
    marked = _MARKED.findall(text)
    return _number(marked[-1]) if marked else None


def _number(text: str) -> Decimal | None:
    """The text as one number; a currency or percent sign, a full stop at its end and commas between digits don't count."""
    bare = text.strip().strip("$€£% ").rstrip(".").strip()
    if not _NUMBER.fullmatch(bare):
        return None
    try:
        return Decimal(bare.replace(",", ""))
    except InvalidOperation:
        return None
