"""SkyRL with a companion beside it: its own command with `trainer.override_entrypoint`.

    export MEDUSA_PPO_COMPANION=http://HOST:8461 MEDUSA_PPO_FEED=http://HOST:8460
    spec=generator.inference_engine.engine_init_kwargs.speculative_config
    python -m skyrl.train.entrypoints.main_base \\
        trainer.override_entrypoint=medusa_ppo.loops.skyrl \\
        $spec.method=medusa $spec.model=HEADS $spec.num_speculative_tokens=3 ...

This was never run in a training. tests/contracts/test_skyrl.py compares the hooks with SkyRL 0.4,
and runs its policy worker's own update on a CPU with the tap:

    vLLM's start     `engine_init_kwargs`, SkyRL's own: they become vLLM's arguments. (Its
                     `speculative_config` accepts only `mtp`, because other drafters "go stale".
                     Engines that load newer heads from a feed by themselves keep ours fresh.)
    update           `FSDPPolicyWorkerBase.forward_backward` and `optim_step`, overridden: every
                     rank taps its rows, in the first of `trainer.update_epochs_per_batch`
    environment      `prepare_runtime_environment`, wrapped: our addresses reach SkyRL's Ray actors
                     on all nodes. Tokens reach the policy's workers, without Ray's logs
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any, ClassVar

import ray

from medusa_ppo.loops.loop_versions import replaced, require_loop
from medusa_ppo.loops.remote import refuse
from medusa_ppo.loops.tap import CompanionTap
from medusa_ppo.loops.worker_tap import (
    Rows,
    as_sampled,
    companion_address,
    masked_rows,
    own_secrets,
    own_tap,
    own_variables,
)

OVERRIDE = "trainer.override_entrypoint="


class TappedPolicyWorker:
    """Mix-in to put before SkyRL's policy worker in a class's bases; every rank has a tap."""

    _medusa_secrets: ClassVar[Mapping[str, str]] = {}
    _medusa_sampling: ClassVar[Mapping[str, Any]] = {}
    # Of the trainer's current step: its number, and the mini-batches that were tapped.
    _medusa_step: tuple[int | None, set[int]] = (None, set())

    def forward_backward(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        """As SkyRL's."""
        tap = self._own_tap()
        with tap(*as_sampled(tap, self._new_rows(data))):
            return super().forward_backward(data, *args, **kwargs)  # type: ignore[misc]

    def optim_step(self) -> Any:
        """As SkyRL's."""
        norm = super().optim_step()  # type: ignore[misc]
        self._own_tap().updated()
        return norm

    def _new_rows(self, data: Any) -> Rows:
        """The rows of a mini-batch; none if an earlier epoch of the same step has tapped it: heads
        would be judged on what they were trained on.
        """
        prompts, responses, logprobs = rows_of(data)
        step = (getattr(data, "metadata", None) or {}).get("global_step")
        if step is None:
            return prompts, responses, logprobs
        if step != self._medusa_step[0]:
            self._medusa_step = (step, set())
        seen = self._medusa_step[1]
        name = hash((*map(tuple, prompts), *map(tuple, responses)))
        if name in seen:
            # Not left out: in a tap the ranks wait for each other, and another may have rows.
            return [], [], None if logprobs is None else []
        seen.add(name)
        return prompts, responses, logprobs

    def _own_tap(self) -> CompanionTap:
        worker: Any = self
        os.environ.update(self._medusa_secrets)
        how = {"temperature": worker.cfg.algorithm.temperature, **self._medusa_sampling}
        return own_tap(worker, worker.model.model, **how)


def rows_of(data: Any) -> Rows:
    """Prompts and responses of SkyRL's batch, and the policy's log-probs from before the update, if
    it has them. Rows are padded on the left, so that responses end together; the loss mask excludes
    what the policy did not write.
    """
    written_BR = data["loss_mask"].bool() & data["response_mask"].bool()
    logprobs_BR = data.get("action_log_probs")
    return masked_rows(data["sequences"], data["attention_mask"], written_BR, logprobs_BR)


def unsupported(cfg: Any) -> dict[str, bool]:
    """Settings of SkyRL that the heads can't be combined with, and whether they are on."""
    policy = cfg.trainer.policy
    return {
        f"trainer.strategy={cfg.trainer.strategy} (not fsdp)": cfg.trainer.strategy != "fsdp",
        "trainer.policy.sequence_parallel_size > 1": policy.sequence_parallel_size > 1,
        "trainer.policy.model.lora.rank > 0": policy.model.lora.rank > 0,
        "generator.inference_engine.speculative_config": (
            cfg.generator.inference_engine.speculative_config is not None
        ),
    }


def tapped(
    worker: type[Any],
    secrets: Mapping[str, str] | None = None,
    *,
    top_p: float = 1.0,
    top_k: int = 0,
) -> type[Any]:
    """A policy worker of SkyRL that taps its update.

    Args:
        secrets: environment variables that it sets before it calls the companion.
        top_p, top_k: how the rollouts are sampled. A worker's configuration has only the
            temperature.
    """
    sampling = {"top_p": top_p, "top_k": top_k}
    ours = {"_medusa_secrets": secrets or {}, "_medusa_sampling": sampling}
    return type(f"Tapped{worker.__name__}", (TappedPolicyWorker, worker), ours)


def _run(cfg: Any, secrets: Mapping[str, str]) -> None:
    """The training, in the process that SkyRL's driver starts for it."""
    from skyrl.backends.skyrl_train.workers.fsdp import fsdp_worker
    from skyrl.train.entrypoints.main_base import BasePPOExp

    sampling = cfg.generator.sampling_params
    made = tapped(
        fsdp_worker.FSDPPolicyWorkerBase, secrets, top_p=sampling.top_p, top_k=sampling.top_k
    )
    worker = ray.remote(num_gpus=1)(made)
    # SkyRL imports the name when it sets up the trainer.
    with replaced(fsdp_worker, "PolicyWorker", worker):
        BasePPOExp(cfg).run()


def main() -> None:
    """SkyRL's own command, which SkyRL calls.

    Raises:
        UnsupportedVersionError: as `require_loop`.
        ConfigError: settings that draft heads can't be combined with, or no address.
    """
    require_loop("skyrl")
    from skyrl.train.config import SkyRLTrainConfig
    from skyrl.train.utils import utils

    given = [word for word in sys.argv[1:] if not word.startswith(OVERRIDE)]
    cfg = SkyRLTrainConfig.from_cli_overrides(given)
    utils.validate_cfg(cfg)
    refuse("SkyRL", unsupported(cfg))
    companion_address()
    prepare = utils.prepare_runtime_environment

    def prepare_with_ours(cfg: Any) -> dict[str, str]:
        return {**prepare(cfg), **own_variables()}

    with replaced(utils, "prepare_runtime_environment", prepare_with_ours):
        utils.initialize_ray(cfg)
    ray.get(ray.remote(num_cpus=1)(_run).remote(cfg, own_secrets()))
