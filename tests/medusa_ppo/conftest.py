"""Fixtures of several modules: a small local Ray for each module of tests that needs one, and workers that meet."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from medusa_ppo.meeting import LOOPBACK, Meeting


@pytest.fixture(scope="module")
def ray_session() -> Iterator[None]:
    """A local Ray with two CPUs and 300 MB of shared memory, without dashboard; ended with the module, since others start their own."""
    import ray

    started = not ray.is_initialized()
    if started:
        ray.init(
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=300 * 1024**2,
            logging_level=logging.ERROR,
            log_to_driver=False,
            configure_logging=False,
            _system_config={"free_objects_period_milliseconds": 10},  # What nobody holds is gone at once.
        )
    yield
    if started:
        ray.shutdown()


@pytest.fixture
def in_a_team() -> Callable[..., list[Any]]:
    """in_a_team(work, size=2): `work(team, rank)` of so many workers, in threads, over real sockets."""
    return _in_a_team


def _in_a_team(work: Callable[[Meeting, int], Any], size: int = 2) -> list[Any]:
    first = Meeting.open(LOOPBACK, size, timeout_s=30.0)

    def run(rank: int) -> Any:
        team = (Meeting(first.place.seen_by(rank)) if rank else first).join()
        try:
            return work(team, rank)
        finally:
            team.leave()

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))
