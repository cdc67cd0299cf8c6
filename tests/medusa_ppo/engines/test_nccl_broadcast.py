"""An actor that is broadcast to one engine on each GPU but the loop's, over NCCL: what no CPU has.
test_broadcast.py has the same way over gloo.
"""

from __future__ import annotations

import pytest

from heads.tensorfile import checksum
from medusa_ppo.config.engine_section import EngineConfig
from medusa_ppo.contract.rollouts import Sampling
from medusa_ppo.engines.actor_sync import ActorSync, BroadcastPool, actor_state
from medusa_ppo.engines.ray_engine import make_engine
from medusa_ppo.runtime.hardware import visible_gpus
from medusa_ppo.runtime.processes import local_ray
from tests.medusa_ppo.conftest import EAGER
from tests.medusa_ppo.engines.conftest import NEAR, Actor, logprob_gap
from tests.medusa_ppo.engines.test_broadcast import BUCKET, moved

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]


@pytest.mark.parametrize(
    "serving", [pytest.param(EAGER, marks=[pytest.mark.gpu, pytest.mark.gpus(3)])], indirect=True
)
def test_an_actor_reaches_an_engine_on_each_gpu(
    actor: Actor, engine_config: EngineConfig, serving: str
) -> None:
    """The sender has a GPU of its own, as NCCL asks of every rank."""
    others = visible_gpus()[1:]
    config = engine_config.model_copy(update={"transfer": "broadcast", "replicas": len(others)})
    new = moved(actor.model.cuda())
    try:
        with (
            local_ray(gpus=others),
            make_engine(actor.path, actor.heads_path, config) as pool,
            ActorSync(pool, "float32", BUCKET) as sync,
        ):
            assert isinstance(pool, BroadcastPool)
            receipt = sync(new, 1)
            assert pool._group is not None and pool._group.place.backend == "nccl"
            assert pool._group.place.size == 1 + len(others)
            assert receipt.checksum == pool.checksums()["actor"] == checksum(actor_state(new))
            sampling = Sampling(max_new_tokens=24, ignore_eos=True)
            rollouts = pool.generate(actor.prompts, sampling)
            assert len(rollouts.engines) == len(others) and rollouts.counters.drafts > 0
            assert logprob_gap(new.cpu(), rollouts) < NEAR[serving]
    finally:
        actor.model.cpu()
