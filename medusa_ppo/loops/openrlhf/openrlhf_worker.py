"""What runs inside OpenRLHF's vLLM workers: its own extension and ours in one class, because vLLM takes only one."""

from __future__ import annotations

from openrlhf.trainer.ray.vllm_worker_wrap import WorkerWrap

from medusa_ppo.vllm_plugin.worker_extension import MedusaWorker


class MedusaOpenRLHFWorker(MedusaWorker, WorkerWrap):
    """OpenRLHF's weight broadcast beside our swaps."""
