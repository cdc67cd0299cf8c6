"""What `actor.imports` names in tests of the loop: ranks without CUDA (megatron_on_cpu.py), which join their weights in several buckets."""

import megatron_on_cpu  # noqa: F401

from medusa_ppo.ppo.megatron import megatron_rank

megatron_rank.BUCKET_BYTES = 4096
