"""Actors that processes of one Ray find by their names: a feed, a companion."""

from __future__ import annotations

import logging
import os
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from heads.errors import MedusaError, RunError

NAMESPACE = "medusa-ppo"
"""Names are looked up here, whatever namespace a process is in."""


def join_ray() -> None:
    """Connect this process to the Ray of RAY_ADDRESS, or to the one that runs on its node, where it
    is in none. RunError when there is none.
    """
    if ray.is_initialized():
        return
    try:
        ray.init(
            address=os.environ.get("RAY_ADDRESS") or "auto",
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    # Ray raises ConnectionError, ValueError and bare RuntimeErrors here.
    except Exception as error:
        raise RunError(
            "This process is in no Ray.",
            given=f"{type(error).__name__}: {error}"[:500],
            expected="a Ray on this node, or RAY_ADDRESS",
            do="Call ray.init first, or set RAY_ADDRESS.",
        ) from error


def named_actor(name: str) -> Any:
    """Its handle. RunError when there is no such actor."""
    join_ray()
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except (ValueError, RayError) as error:
        raise RunError(
            "There is no such actor in this Ray.",
            given=name,
            expected=f"an actor of this name in the namespace {NAMESPACE}",
            do="Start it first, in the same Ray.",
        ) from error


def answer_of(ref: Any, timeout_s: float) -> Any:
    """What a call gives. RunError when it gives nothing in time; our own errors as they are."""
    try:
        return ray.get(ref, timeout=timeout_s)
    except RayError as error:
        if isinstance(error, RayTaskError) and isinstance(error.cause, MedusaError):
            raise error.cause from None
        late = isinstance(error, GetTimeoutError)
        raise RunError(
            "An actor of this Ray does not answer.",
            given="no answer in time" if late else (str(error).strip().splitlines() or ["?"])[-1],
            expected=f"an answer within {timeout_s:.0f} s",
            do="Look whether it runs.",
        ) from error
