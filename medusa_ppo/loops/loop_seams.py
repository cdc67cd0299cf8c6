"""The names in other people's loops that our hooks rely on. When a loop starts, these names and
their signatures are looked up in the installed version. What this can't show (the order of calls,
the contents of results) is tested by tests/contracts/.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

Signature = Literal["is", "begins", "takes"]


@dataclass(frozen=True)
class Seam:
    """A name in another loop.

    Attributes:
        place: `module:Name.attribute`.
        parameters: its signature, without `self`. If a decorator hides it, as NeMo-RL's for
            profiling does, it counts as fitting.
        how: `is`: our function replaces it, so there must be no other parameters; `begins`: our
            call passes these by position; `takes`: our call passes these by name, among others.
    """

    place: str
    parameters: tuple[str, ...] | None = None
    how: Signature = "is"


def _seam(place: str, parameters: str | None = None, how: Signature = "is") -> Seam:
    return Seam(place, None if parameters is None else tuple(parameters.split()), how)


GENERATION = "trl.generation.vllm_generation"
VERL = "verl.trainer.ppo.v1"
OPENRLHF = "openrlhf.trainer"
SKYRL = "skyrl.backends.skyrl_train.workers"
NEMO_RL = "nemo_rl.models.policy"
SEAMS: dict[str, tuple[Seam, ...]] = {
    "trl": (
        _seam(f"{GENERATION}:LLM"),
        _seam(f"{GENERATION}:VLLMClient.init_communicator", "device"),
        _seam(
            f"{GENERATION}:VLLMGeneration.__init__",
            "model accelerator mode min_p enable_sleep_mode",
            "takes",
        ),
        _seam(f"{GENERATION}:VLLMGeneration.sync_weights", ""),
        _seam(f"{GENERATION}:VLLMGeneration.generate", "prompts images num_generations profiler"),
        _seam(f"{GENERATION}:VLLMGeneration._iter_named_params", ""),
        *(
            seam
            for kind in ("grpo", "rloo")
            for seam in (
                _seam(f"trl.trainer.{kind}_trainer:VLLMGeneration"),
                _seam(f"trl.trainer.{kind}_trainer:{kind.upper()}Trainer.log", "logs start_time"),
            )
        ),
    ),
    "trl.experimental.ppo": (
        _seam(
            "trl.experimental.ppo.ppo_trainer:batch_generation",
            "model queries local_rollout_forward_batch_size pad_token_id generation_config",
        ),
        _seam("trl.experimental.ppo:PPOTrainer.generate_completions", "sampling"),
        _seam("trl.experimental.ppo:PPOTrainer.train", ""),
    ),
    "verl": (
        _seam(f"{VERL}.trainer_base:register_trainer"),
        _seam(f"{VERL}.trainer_base:PPOTrainer.__init__", "config"),
        _seam(f"{VERL}.trainer_base:PPOTrainer.fit", "agent_loop_manager"),
        _seam(f"{VERL}.trainer_base:PPOTrainer._init_resource_pool_mgr", ""),
        _seam(f"{VERL}.trainer_base:PPOTrainer._compute_old_log_prob", "batch metrics"),
        _seam(f"{VERL}.trainer_base:PPOTrainer._consume_sync_metrics", ""),
        _seam(f"{VERL}.trainer_base:PPOTrainer.on_validate_end", ""),
        _seam(f"{VERL}.trainer_sync:PPOTrainerSync.on_init_end", ""),
        _seam(f"{VERL}.trainer_sync:PPOTrainerSync.on_step_end", ""),
        _seam("verl.workers.engine_workers:ActorRolloutRefWorker.compute_log_prob", "data"),
        _seam("verl.workers.rollout.replica:RolloutReplicaRegistry.register"),
        _seam("verl.single_controller.base.decorator:make_nd_compute_dataproto_dispatch_fn"),
    ),
    # Looked up in the driver, before it starts Ray.
    "verl.environment": (_seam("verl.trainer.constants_ppo:get_ppo_ray_runtime_env"),),
    # Looked up in each process that has a worker, which never imports the trainer.
    "verl.worker": (
        _seam("verl.workers.engine_workers:ActorRolloutRefWorker.compute_log_prob", "data"),
        _seam("verl.workers.engine_workers:ActorRolloutRefWorker.update_actor", "data"),
    ),
    # Looked up only where its servers start, because this imports vLLM.
    "verl.server": (
        _seam("verl.workers.rollout.vllm_rollout.utils:vLLMColocateWorkerExtension"),
        _seam("verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMHttpServer"),
        _seam("verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMReplica.launch_servers"),
    ),
    "openrlhf": (
        _seam(
            f"{OPENRLHF}.ray.vllm_engine:create_vllm_engines",
            "num_engines tensor_parallel_size pretrain",
            "begins",
        ),
        # The name that the command imports, which is replaced.
        _seam(f"{OPENRLHF}.ray:create_vllm_engines"),
        _seam(f"{OPENRLHF}.ray.vllm_engine:RolloutRayActor.__init__"),
        _seam(f"{OPENRLHF}.ray.vllm_engine:batch_vllm_engine_call"),
        _seam(
            f"{OPENRLHF}.ray.ppo_actor:PolicyModelActor.forward",
            "sequences action_mask attention_mask",
            "begins",
        ),
        _seam(f"{OPENRLHF}.ray.ppo_actor:PolicyModelActor.fit", "kl_ctl"),
        _seam(f"{OPENRLHF}.ppo_trainer:PPOTrainer.__init__", "pretrain strategy", "begins"),
        _seam(f"{OPENRLHF}.ppo_trainer:PPOTrainer.fit", "global_step"),
        _seam(f"{OPENRLHF}.ppo_trainer:PPOTrainer.init_checkpoint_states", ""),
        _seam(f"{OPENRLHF}.ppo_trainer:PPOTrainer.train_step", "rollout_samples global_step"),
        _seam(f"{OPENRLHF}.ppo_trainer:PPOTrainer.broadcast_to_vllm", ""),
        _seam(f"{OPENRLHF}.ppo_trainer:PPOTrainer.evaluate", "global_step", "begins"),
        _seam(
            f"{OPENRLHF}.ppo_utils.experience_maker:RemoteExperienceMaker.make_experience_batch",
            "rollout_samples",
        ),
        _seam("openrlhf.utils:get_strategy"),
    ),
    "skyrl": (
        _seam("skyrl.train.config:SkyRLTrainConfig.from_cli_overrides"),
        _seam("skyrl.train.entrypoints.main_base:BasePPOExp.run", ""),
        _seam("skyrl.train.utils.utils:initialize_ray", "cfg", "begins"),
        _seam("skyrl.train.utils.utils:prepare_runtime_environment", "cfg"),
        _seam("skyrl.train.utils.utils:validate_cfg", "cfg", "begins"),
        _seam(f"{SKYRL}.fsdp.fsdp_worker:PolicyWorker"),
        _seam(f"{SKYRL}.fsdp.fsdp_worker:FSDPPolicyWorkerBase.forward_backward", "data", "begins"),
        _seam(f"{SKYRL}.fsdp.fsdp_worker:FSDPPolicyWorkerBase.optim_step", ""),
    ),
    "nemo_rl": (
        _seam(f"{NEMO_RL}.utils:get_runtime_env_for_policy_worker"),
        _seam(
            f"{NEMO_RL}.workers.dtensor_policy_worker_v2:DTensorPolicyWorkerV2Impl.train",
            "data loss_fn eval_mode",
            "begins",
        ),
    ),
    # Looked up in the driver, which may lack what its workers import.
    "nemo_rl.driver": (
        _seam("nemo_rl.distributed.ray_actor_environment_registry:ACTOR_ENVIRONMENT_REGISTRY"),
        _seam("nemo_rl.distributed.ray_actor_environment_registry:get_actor_python_env"),
    ),
}


NOT_THEIRS = ("self", "_ray_trace_ctx")
"""Parameters that no call of a loop passes. Ray adds the second one to the methods of a class that
it makes an actor of.
"""
HIDDEN = [inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD]
"""The signature of a wrapper that does not say what it wraps: it accepts anything, and tells
nothing about the function inside.
"""


def broken_seam(name: str) -> str:
    """The first seam of a loop that has changed, with what was found; empty if there is none."""
    for seam in SEAMS[name]:
        if found := _fault(seam):
            return f"{seam.place}: {found}"
    return ""


def _fault(seam: Seam) -> str:
    module_name, _, path = seam.place.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except ImportError as error:
        return f"can't be imported ({error})"
    for part in path.split("."):
        found = _plain(found)
        if not hasattr(found, part):
            return f"there is no {part}"
        found = getattr(found, part)
    if seam.parameters is None:
        return ""
    theirs = [
        parameter
        for name, parameter in inspect.signature(found).parameters.items()
        if name not in NOT_THEIRS
    ]
    if [parameter.kind for parameter in theirs] == HIDDEN:
        return ""
    given = [parameter.name for parameter in theirs]
    return "" if _fits(given, seam.parameters, seam.how) else f"takes ({', '.join(given)})"


def _plain(found: Any) -> Any:
    """The class inside Ray's decorator."""
    decorated = getattr(found, "__ray_metadata__", None)
    return found if decorated is None else decorated.modified_class


def _fits(given: Sequence[str], parameters: Sequence[str], how: Signature) -> bool:
    match how:
        case "is":
            return list(given) == list(parameters)
        case "begins":
            return list(given[: len(parameters)]) == list(parameters)
        case "takes":
            return set(parameters) <= set(given)
