"""A process group for tests in this process, and what ranks need to run without CUDA."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

SHIM = os.pathsep.join((str(Path(__file__).parents[2] / "actors"), str(Path(__file__).parent)))


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    """A group with one rank, this one."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    group = dist.group.WORLD
    assert group is not None
    yield group
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def shim_in_reach(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Ray's workers have the environment that Ray was started in. Gives the folder in which ranks
    count their bytes, once it is there.
    """
    with pytest.MonkeyPatch.context() as patch:
        peaks = tmp_path_factory.mktemp("counted") / "peaks"
        patch.setenv("PYTHONPATH", SHIM, prepend=os.pathsep)
        patch.setenv("RANK_PEAKS", str(peaks))
        yield peaks
