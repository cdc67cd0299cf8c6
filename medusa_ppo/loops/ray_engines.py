"""Engines of another framework that are Ray actors with our worker methods: one call to all of them, and their counters added up."""

from __future__ import annotations

from typing import Any

import ray

from medusa_ppo.types import Counters


def call_all(engines: list[Any], method: str, args: tuple[Any, ...]) -> list[Any]:
    """A worker method on every worker of every engine."""
    return [answer for answers in ray.get([engine.medusa_call.remote(method, args) for engine in engines]) for answer in answers]


def sum_counters(engines: list[Any]) -> Counters:
    """vLLM's acceptance counters over all engines."""
    total = Counters()
    for counters in ray.get([engine.medusa_counters.remote() for engine in engines]):
        total = total + counters
    return total
