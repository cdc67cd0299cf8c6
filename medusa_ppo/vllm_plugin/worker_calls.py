"""What engines and the worker extension exchange: names, drafting settings, errors as data."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, TypedDict

from heads import errors
from heads.errors import MedusaError

logger = logging.getLogger(__name__)

WORKER_EXTENSION = "medusa_ppo.vllm_plugin.worker_extension.MedusaWorker"
TRANSFER = "medusa_ppo"
"""Our weight-transfer backend's name in vLLM."""
DRAFTING = "medusa_ppo_drafting"
"""In vLLM's additional_config: the `Drafting` that an engine begins with. Drafts are sampled unless
it says otherwise; without it the engine chooses their number.
"""
HEADS = "medusa_ppo_heads"
"""In vLLM's additional_config: the heads' folder, where vLLM has no Medusa (from 0.33 on)."""


class Drafting(TypedDict, total=False):
    """How an engine drafts from the next step on. Missing keys leave their setting unchanged. All
    settings are lossless: only acceptance and speed differ.

    Attributes:
        num_drafts: drafts per step, 0 (none) to `max_drafts`; with `choose` the maximum.
        sampled: drafts are drawn from the heads' distributions; otherwise they are their argmax.
        draft_temperature: factor for sampled drafts, multiplied with the request's own temperature
            and the one stored with each head.
        choose: the engine chooses the number of drafts for each step.
        draft_vocab: draft only from this many most frequent tokens of prompts and rollouts; 0: from
            all tokens.
        memory_bytes: size of the memory of earlier responses, which are mixed into sampled drafts;
            0: no memory.
        stop_below: a run of sampled drafts ends before a draft whose estimated chance of acceptance
            is below this; 0: never.
    """

    num_drafts: int
    sampled: bool
    draft_temperature: float
    choose: bool
    draft_vocab: int
    memory_bytes: int
    stop_below: float


def reports_errors(method: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Return one of our errors as data; any other exception is a bug and is raised unchanged."""

    @functools.wraps(method)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        try:
            return method(self, *args, **kwargs)
        except MedusaError as error:
            return as_data(error)

    return wrapped


def always_answers(method: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Return any exception as data, for calls that a running engine makes by itself.

    vLLM raises at the first rank that failed and leaves the other ranks' answers in their queues,
    where its next call would take them for its own: that ends an engine of several ranks.
    """
    reporting = reports_errors(method)

    @functools.wraps(method)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        try:
            return reporting(self, *args, **kwargs)
        except Exception as error:
            logger.exception("%s failed; the engine goes on without it.", method.__name__)
            return as_data(
                errors.EngineError(
                    "A worker met an unexpected error.",
                    given=f"{method.__name__}: {type(error).__name__}: {error}"[:1000],
                    expected="none",
                    do="Read the worker's log, which says where it was, and report this.",
                )
            )

    return wrapped


def as_data(error: MedusaError) -> dict[str, Any]:
    """A worker's answer that reports an error; `raise_reported` raises it."""
    texts = {
        key: None if value is None else str(value)
        for key, value in (("given", error.given), ("expected", error.expected))
    }
    return {
        "error": {
            "kind": type(error).__name__,
            "problem": error.problem,
            "do": error.do,
            **texts,
        }
    }


def raise_reported(result: Any) -> dict[str, Any]:
    """The result of one worker; raises the error that it reported."""
    if not isinstance(result, dict):
        raise errors.EngineError(
            "A worker gave an unexpected answer.",
            given=repr(result)[:200],
            expected="a mapping",
            do="Read the engine's log.",
        )
    fault = result.get("error")
    if fault is None:
        return result
    fault = fault if isinstance(fault, dict) else {"problem": fault}
    kind = getattr(errors, str(fault.get("kind")), None)
    if not (isinstance(kind, type) and issubclass(kind, MedusaError)):
        kind = errors.EngineError
    raise kind(
        str(fault.get("problem")),
        given=fault.get("given"),
        expected=fault.get("expected"),
        do=str(fault.get("do") or ""),
    )


def first_of(answers: list[Any]) -> dict[str, Any]:
    """The first worker's result, after checking all answers for errors."""
    checked = [raise_reported(answer) for answer in answers]
    return checked[0]
