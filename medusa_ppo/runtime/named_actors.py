"""Actors that processes of one Ray cluster find by name: a feed, a companion."""

from __future__ import annotations

import logging
import os
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from heads.errors import MedusaError, RunError

NAMESPACE = "medusa-ppo"
"""Namespace for looking up names, whatever namespace a process is in."""


def join_ray() -> None:
    """Connect this process to the Ray at RAY_ADDRESS, or to the one on its node, unless it is
    already connected. From then on it ends with that Ray: Ray ends a process whose head does not
    answer for a minute, from C++. Raises RunError if there is none.
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
            "This process is not connected to Ray.",
            given=f"{type(error).__name__}: {error}"[:500],
            expected="a Ray on this node, or RAY_ADDRESS",
            do="Call ray.init first, or set RAY_ADDRESS.",
        ) from error


def named_actor(name: str) -> Any:
    """The actor's handle. Raises RunError if there is no such actor."""
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
    """The result of a call. Raises RunError if there is none in time; our own errors pass
    unchanged.
    """
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
            do="Check that it is running.",
        ) from error
