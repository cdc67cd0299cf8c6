"""The share of a Ray's GPUs that is left to the companion. If the loop has them all, a warning says
what training on the CPU takes, and what to do instead.
"""

from __future__ import annotations

import logging

import ray
import torch

from heads.heads_config import HeadsConfig
from medusa_ppo.config.companion_section import CompanionConfig
from medusa_ppo.runtime.hardware import (
    COMPANION_SHARE,
    companion_gpus,
    companion_threads,
    cpu_has_bfloat16,
    find_hardware,
)
from medusa_ppo.runtime.training_speed import matrix_rate, training_operations

logger = logging.getLogger(__name__)

TOKENS = 10_000


def gpus_left(config: CompanionConfig, heads: HeadsConfig, draft_vocab: int | None) -> float:
    """GPUs for each worker, of those of this Ray that are free now. Warns if there are GPUs, but
    none is left: others have reserved them, or a Ray that we started offers none, since the
    processes of the training have them all.

    Args:
        draft_vocab: number of tokens that drafts come from; None, 0: all.
    """
    gpus = companion_gpus(ray.available_resources().get("GPU", 0.0), config.workers)
    taken = 0.0 if gpus else ray.cluster_resources().get("GPU", 0.0)
    # What this machine has says nothing about a node of the companion's own.
    if not gpus and not taken and config.resource is None:
        taken = find_hardware().gpus
    if taken:
        logger.warning("%s", _warning(config, heads, draft_vocab or heads.vocab_size, taken))
    return gpus


def _warning(config: CompanionConfig, heads: HeadsConfig, drafted: int, gpus: float) -> str:
    """The warning's text. Takes a third of a second, to measure how fast this machine is."""
    threads = companion_threads(config.cores, alone=config.resource is not None)
    half = config.dtype == "bfloat16" or (config.dtype is None and cpu_has_bfloat16())
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        rate = matrix_rate(torch.bfloat16 if half else torch.float32)
    finally:
        torch.set_num_threads(before)
    seconds = TOKENS * training_operations(heads, drafted) / rate
    return (
        f"The companion trains on the CPU, because no GPU is left for it (of {gpus:g})."
        f" A pass over {TOKENS:,} response tokens takes at least {seconds:.1f} s there (matrix"
        f" products alone; {rate / 1e9:.0f} GFLOP/s, measured here; threads: {threads}); rollouts"
        f" that it has no time for are left out. Do one of these: leave it {COMPANION_SHARE:g} GPU"
        " for each worker; give it a machine of its own (companion.resource); train smaller heads"
        " (lower heads.cell, heads.feed_forward, engine.draft_vocab); or accept it"
        " (companion.num_gpus=0)."
    )
