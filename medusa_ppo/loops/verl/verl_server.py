"""verl's vLLM server with two more methods: a worker call that gives its answers back, and the acceptance counters."""

from __future__ import annotations

from typing import Any

import ray
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica

from medusa_ppo.engines.colocated import process_counters
from medusa_ppo.types import Counters


class MedusaHttpServer(vLLMHttpServer):
    """The server's own `collective_rpc` drops what the workers answer."""

    async def medusa_call(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        """A method of the worker extension on all workers of this server."""
        return await self.engine.collective_rpc(method=method, args=args)

    async def medusa_counters(self) -> Counters:
        """vLLM's counters since the start."""
        return process_counters()


class MedusaReplica(vLLMReplica):
    """Starts our server class in the place of verl's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.server_class = ray.remote(MedusaHttpServer)
