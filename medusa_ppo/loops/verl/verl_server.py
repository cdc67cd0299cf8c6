"""Our code inside verl's vLLM: verl's server with two more methods, and verl's worker extension
joined with ours.
"""

from __future__ import annotations

from typing import Any

import ray
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica

from medusa_ppo.loops.remote import EngineCalls
from medusa_ppo.vllm_plugin.worker_extension import MedusaWorker


class MedusaHttpServer(EngineCalls, vLLMHttpServer):
    """verl's server with two more methods, because its `collective_rpc` drops workers' answers."""

    medusa_engine = "engine"


class MedusaReplica(vLLMReplica):
    """Starts our server class instead of verl's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.server_class = ray.remote(MedusaHttpServer)


class MedusaVerlWorker(MedusaWorker, vLLMColocateWorkerExtension):
    """Both extensions in one class, because vLLM takes only one. verl's weight transfer skips
    drafters other than MTP, so only we load the heads.
    """
