"""What crosses between an engine and its workers: how to draft, and errors as data, because vLLM's transports keep only their text."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypedDict

from heads import errors
from heads.errors import MedusaError

WORKER_EXTENSION = "medusa_ppo.vllm_plugin.worker_extension.MedusaWorker"
TRANSFER = "medusa_ppo"
"""Our weight-transfer backend's name in vLLM."""


class Drafting(TypedDict, total=False):
    """How an engine drafts from the next step on. What is left out stays as it is; all of it is lossless, only acceptance and speed differ.

    Attributes:
        num_drafts: drafts per step, 0 (none) to `max_drafts`; with `choose` the most of them.
        sampled: drawn from the heads; else their argmax.
        draft_temperature: of sampled drafts, times the request's own.
        choose: the engine chooses the number of drafts for each step.
        draft_vocab: draft from so many of the most frequent tokens of the rollouts; 0: from all.
    """

    num_drafts: int
    sampled: bool
    draft_temperature: float
    choose: bool
    draft_vocab: int


def reports_errors(method: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Return one of our errors as data; anything else is a bug and travels as it is."""

    @functools.wraps(method)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        try:
            return method(self, *args, **kwargs)
        except MedusaError as error:
            texts = {key: None if value is None else str(value) for key, value in (("given", error.given), ("expected", error.expected))}
            return {"error": {"kind": type(error).__name__, "problem": error.problem, "do": error.do, **texts}}

    return wrapped


def raise_reported(result: Any) -> dict[str, Any]:
    """The result of one worker, or the error it reported."""
    if not isinstance(result, dict):
        raise errors.EngineError(
            "A worker gave an unexpected answer.", given=repr(result)[:200], expected="a mapping", do="Read the engine's log."
        )
    fault = result.get("error")
    if fault is None:
        return result
    kind = getattr(errors, fault["kind"], None)
    if not (isinstance(kind, type) and issubclass(kind, MedusaError)):
        kind = errors.EngineError
    raise kind(fault["problem"], given=fault["given"], expected=fault["expected"], do=fault["do"])


def first_of(answers: list[Any]) -> dict[str, Any]:
    """The first worker's result, after looking for an error in each."""
    checked = [raise_reported(answer) for answer in answers]
    return checked[0]
