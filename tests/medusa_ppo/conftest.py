"""Fixtures for everything that needs a Ray cluster: one small local one for each module of tests."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


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
        )
    yield
    if started:
        ray.shutdown()
