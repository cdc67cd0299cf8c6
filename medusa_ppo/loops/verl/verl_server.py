"""Our code inside verl's vLLM: verl's server with two more methods, and verl's worker extension
joined with ours.
"""

from __future__ import annotations

from typing import Any

import ray
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica

from medusa_ppo.contract.rollouts import Counters
from medusa_ppo.engines.colocated import process_counters
from medusa_ppo.loops.remote import SentFile, arrived
from medusa_ppo.vllm_plugin.worker_extension import MedusaWorker


class MedusaHttpServer(vLLMHttpServer):
    """verl's server with two more methods, because its `collective_rpc` drops workers' answers."""

    async def medusa_call(
        self, method: str, args: tuple[Any, ...], sent: SentFile | None = None
    ) -> list[Any]:
        """Call a method of the worker extension on all workers of this server."""
        async with arrived(args, sent) as found:
            return await self.engine.collective_rpc(method=method, args=found)

    async def medusa_counters(self) -> Counters:
        """vLLM's counters since the start."""
        return process_counters()


class MedusaReplica(vLLMReplica):
    """Starts our server class instead of verl's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.server_class = ray.remote(MedusaHttpServer)


class MedusaVerlWorker(MedusaWorker, vLLMColocateWorkerExtension):
    """Both extensions in one class, because vLLM takes only one. verl's weight transfer skips
    drafters other than MTP, so only we load the heads.
    """
