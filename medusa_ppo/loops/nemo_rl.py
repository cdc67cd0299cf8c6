"""NeMo-RL with a companion beside it: its own `policy.worker_extension_cls_fqn`, and two lines in
the script that starts the training.

    from medusa_ppo.loops.nemo_rl import register
    register()

    policy:
      worker_extension_cls_fqn: medusa_ppo.loops.nemo_rl.TappedDTensorWorker
      generation:
        vllm_kwargs:
          speculative_config: {method: medusa, model: HEADS, num_speculative_tokens: 3}

with MEDUSA_PPO_COMPANION and MEDUSA_PPO_FEED in the environment. Never run: NeMo-RL is not a
package that could be installed here. The hook was written from its sources (docs/other-loops.md),
and tested with a stand-in for its worker (tests/medusa_ppo/loops/test_worker_taps.py).

    update           `DTensorPolicyWorkerV2Impl.train`, overridden: every rank taps its rows
"""

from __future__ import annotations

from typing import Any

import torch

from medusa_ppo.loops.loop_versions import require_loop
from medusa_ppo.loops.remote import refuse
from medusa_ppo.loops.worker_tap import Rows, as_sampled, own_tap, response_rows

NAME = "TappedDTensorWorker"
WORKER = "nemo_rl.models.policy.workers.dtensor_policy_worker_v2.DTensorPolicyWorkerV2"


class TappedWorker:
    """Mix-in to put before NeMo-RL's policy worker in a class's bases; every rank has a tap."""

    def train(self, data: Any, loss_fn: Any, eval_mode: bool = False, **kwargs: Any) -> Any:
        """Like NeMo-RL's. If a call has several global batches, the actor behind the states of the
        later ones is a few optimizer steps newer than the tables sent with them.
        """
        if eval_mode:
            return super().train(data, loss_fn, eval_mode, **kwargs)  # type: ignore[misc]
        worker: Any = self
        refuse("NeMo-RL", unsupported(worker.cfg))
        generation = worker.cfg["generation"]
        tap = own_tap(
            worker,
            worker.model,
            temperature=generation["temperature"],
            top_p=generation["top_p"],
            top_k=generation["top_k"] or 0,
        )
        with tap(*as_sampled(tap, rows_of(data))):
            metrics = super().train(data, loss_fn, eval_mode, **kwargs)  # type: ignore[misc]
        tap.updated()
        return metrics


def rows_of(data: Any) -> Rows:
    """Prompts and responses of NeMo-RL's batch, and the policy's log-probs from before the update,
    if it has them: rows are padded on the right.
    """
    ids_BT = data["input_ids"]
    places_T = torch.arange(ids_BT.shape[1], device=ids_BT.device)
    real_BT = places_T < data["input_lengths"].to(ids_BT.device)[:, None]
    written_BT = data["token_mask"].bool() & data["sample_mask"].bool()[:, None]
    return response_rows(ids_BT, real_BT, written_BT, data.get("prev_logprobs"))


def unsupported(cfg: Any) -> dict[str, bool]:
    """Settings of NeMo-RL's policy that the heads can't be combined with, and whether they are
    on.
    """
    dtensor = cfg.get("dtensor_cfg") or {}
    return {
        "policy.dtensor_cfg.tensor_parallel_size > 1": dtensor.get("tensor_parallel_size", 1) > 1,
        "policy.dtensor_cfg.context_parallel_size > 1": dtensor.get("context_parallel_size", 1) > 1,
        "policy.dtensor_cfg.lora_cfg.enabled": bool(
            (dtensor.get("lora_cfg") or {}).get("enabled", False)
        ),
        "policy.draft.enabled": bool((cfg.get("draft") or {}).get("enabled", False)),
    }


def register() -> None:
    """Tell NeMo-RL to run our worker in the environment of its own worker. Call this once, before
    the policy is created.

    Raises:
        UnsupportedVersionError: as `require_loop`.
    """
    require_loop("nemo_rl.driver")
    from nemo_rl.distributed.ray_actor_environment_registry import (
        ACTOR_ENVIRONMENT_REGISTRY,
        get_actor_python_env,
    )

    ACTOR_ENVIRONMENT_REGISTRY[f"{__name__}.{NAME}"] = get_actor_python_env(WORKER)


def __getattr__(name: str) -> Any:
    """Create `TappedDTensorWorker` when NeMo-RL looks for it in its workers' environment."""
    # It can't be a class of this file, since it needs NeMo-RL's own, which only a worker has.
    if name != NAME:
        raise AttributeError(name)
    import ray

    require_loop("nemo_rl")
    from nemo_rl.models.policy.utils import get_runtime_env_for_policy_worker
    from nemo_rl.models.policy.workers.dtensor_policy_worker_v2 import DTensorPolicyWorkerV2Impl

    made = type(NAME, (TappedWorker, DTensorPolicyWorkerV2Impl), {"__module__": __name__})
    environment = get_runtime_env_for_policy_worker("dtensor_policy_worker_v2")
    return ray.remote(runtime_env=environment)(made)
