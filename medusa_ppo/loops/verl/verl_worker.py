"""What runs inside verl's vLLM workers: verl's own extension and ours in one class, because vLLM takes only one."""

from __future__ import annotations

from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from medusa_ppo.vllm_plugin.worker_extension import MedusaWorker


class MedusaVerlWorker(MedusaWorker, vLLMColocateWorkerExtension):
    """verl's weight transfer beside our swaps. verl passes over draft models that are not MTP, so the heads are only ours to feed."""
