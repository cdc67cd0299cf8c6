"""What `actor.imports` names in tests of the loop: ranks without CUDA (megatron_on_cpu.py), which
join their weights in several buckets.

Where the environment's RANK_PEAKS is a folder, each rank counts the bytes of its tensors, and
writes the most of its last step there. Where RANK_IMAGES is one, it writes a line there for each
image that its tower computes.
"""

import hashlib
import json
import os
import sys
from pathlib import Path

import megatron_on_cpu  # noqa: F401
import torch
import torch.distributed as dist

from medusa_ppo.actors import vision
from medusa_ppo.ppo.megatron import megatron_rank

megatron_rank.BUCKET_BYTES = 4096
FOLDER = os.environ.get("RANK_PEAKS", "")

if IMAGES := os.environ.get("RANK_IMAGES", ""):
    computed = vision.features_of

    def noted(actor, reader, image):
        with Path(IMAGES, str(dist.get_rank())).open("a") as file:
            file.write(f"{hashlib.sha256(image).hexdigest()}\n")
        return computed(actor, reader, image)

    vision.features_of = noted

if FOLDER and Path(FOLDER).exists():
    sys.path.insert(0, str(Path(__file__).parents[4]))
    from tests.medusa_ppo.ppo.test_recompute import LiveBytes

    # Ray took the rank's own methods before this module was imported: the optimizer's is what can
    # be followed.
    live = LiveBytes(torch.nn.Module())
    plain = megatron_rank.RankOptimizer.step
    live.__enter__()

    def counted(self, *arguments):
        plain(self, *arguments)
        Path(FOLDER, str(dist.get_rank())).write_text(json.dumps(live.peak))
        live.peak = live.now

    megatron_rank.RankOptimizer.step = counted
