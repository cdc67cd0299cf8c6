"""What of a Ray's GPUs is left to the companion, and what a loop is told at its start when its
trainer and engines have them all: how long training takes on the CPU, and what to do.
"""

from __future__ import annotations

import logging

import ray
import torch

from heads.heads_config import HeadsConfig
from heads.modules import MedusaHeads
from medusa_ppo.config.companion_section import CompanionConfig
from medusa_ppo.runtime.hardware import (
    COMPANION_SHARE,
    companion_gpus,
    companion_threads,
    cpu_has_bfloat16,
)
from medusa_ppo.runtime.matrix_rate import matrix_rate

logger = logging.getLogger(__name__)

TOKENS = 10_000
TRAINED, FROZEN = 3, 2
"""Products of a weight in a step of training: its own, and the gradients of what it multiplies and
of itself. A frozen one has none of its own.
"""


def gpus_left(config: CompanionConfig, heads: HeadsConfig, draft_vocab: int | None) -> float:
    """GPUs for each worker, of those of this Ray that are free now. A warning says what it costs
    that none is; where there are no GPUs, nobody expects one.

    Args:
        draft_vocab: tokens that drafts come from; None, 0: all.
    """
    gpus = companion_gpus(ray.available_resources().get("GPU", 0.0), config.workers)
    if not gpus and (taken := ray.cluster_resources().get("GPU", 0.0)):
        logger.warning("%s", words(heads, config, draft_vocab or heads.vocab_size, taken))
    return gpus


def operations(heads: HeadsConfig, drafted: int) -> float:
    """Of the matrix products that one pass over one token asks for; look-ups and attention over the
    last positions, which are small beside them, are left out.

    Args:
        drafted: tokens that drafts come from.
    """
    # On the meta device parameters are counted without memory for them.
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in MedusaHeads(heads).parameters())
    table = heads.hidden_size * drafted
    logits = 0 if heads.lm_head == "own" else FROZEN * heads.num_heads * table
    # Beside each head's logits the actor's own distribution, which has no gradient.
    return 2.0 * (TRAINED * parameters + logits + table)


def words(heads: HeadsConfig, config: CompanionConfig, drafted: int, gpus: float) -> str:
    """The warning. Measures this machine for a third of a second.

    Args:
        drafted: as of `operations`.
        gpus: of the Ray, all of them taken.
    """
    threads = companion_threads(config.cores, alone=config.resource is not None)
    half = config.dtype == "bfloat16" or (config.dtype is None and cpu_has_bfloat16())
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        rate = matrix_rate(torch.bfloat16 if half else torch.float32)
    finally:
        torch.set_num_threads(before)
    seconds = TOKENS * operations(heads, drafted) / rate
    return (
        f"The companion trains on the CPU: the loop has taken all GPUs of this Ray ({gpus:g}). A"
        f" pass over {TOKENS:,} response tokens takes {seconds:.1f} s at least (threads: {threads};"
        f" {rate / 1e9:.0f} GFLOP/s, measured here); what it has no time for is left out. Do one of"
        f" three things: leave it {COMPANION_SHARE:g} GPU for each worker; give it a machine of its"
        " own (companion.resource); or make training cheaper (lower heads.cell,"
        " heads.feed_forward, engine.draft_vocab)."
    )
