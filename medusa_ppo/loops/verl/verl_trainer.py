"""verl's synchronous PPO trainer with draft heads: `trainer.v1.trainer_mode=medusa_sync
+medusa.heads.num_heads=4`.

What is hooked, and how (verl 0.9; tests/contracts/test_verl.py compares all of it with the
installed package):

    trainer          registered as `medusa_sync`, a subclass of PPOTrainerSync; loaded by the entry
                     point `verl.plugins`
    vLLM's start     `actor_rollout_ref.rollout.engine_kwargs.vllm`, which verl spreads last over
                     its own arguments
    calls into vLLM  our server class, through RolloutReplicaRegistry; verl's own `collective_rpc`
                     gives no answers back
    log-prob pass    `ActorRolloutRefWorker.compute_log_prob`, overridden: the first data-parallel
                     replica taps its share of the rows
    rollouts         `_compute_old_log_prob`, overridden: what was tapped goes to the companion,
                     with the rows of lm_head and embedding that it needs
    weight sync      `on_step_end`, overridden: the step's line is written, and the heads are fed,
                     because verl's sleep throws them away
    figures          `_consume_sync_metrics`, overridden: verl adds what it gives to the step's
    validation       `on_validate_end`, overridden: what the engines drafted in it is not counted

Shape letters: T tokens of a row, D hidden.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
from omegaconf import OmegaConf, open_dict
from torch import nn
from verl.single_controller.base.decorator import (
    Dispatch,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.rollout.replica import RolloutReplicaRegistry

from heads.errors import ConfigError
from medusa_ppo.actors.hf import HFActor
from medusa_ppo.companion.wire import WantedRows
from medusa_ppo.config.run_config import RunConfig
from medusa_ppo.contract.rollouts import Sampling
from medusa_ppo.loops.attachment import as_config
from medusa_ppo.loops.loop_versions import require_loop
from medusa_ppo.loops.passes import PassTap, RowTap
from medusa_ppo.loops.remote import (
    GatheredActor,
    RemoteAttachment,
    Tables,
    Taken,
    TappedRank,
    call_all,
    refuse,
    sum_counters,
)
from medusa_ppo.loops.verl.verl_tap import (
    FSDP,
    on_device,
    response_logprobs,
    rows_of,
    sampling_of,
    unsupported_actor,
)
from medusa_ppo.loops.worker_tap import COMPANION
from medusa_ppo.runtime.processes import on_one_node
from medusa_ppo.vllm_plugin.speculation import FEED

logger = logging.getLogger(__name__)

WORKER_EXTENSION = "medusa_ppo.loops.verl.verl_server.MedusaVerlWorker"
MEGATRON = "megatron"
STRATEGIES = (*FSDP, MEGATRON)
ACTOR_ROLES = ("actor", "actor_rollout", "actor_rollout_ref")


class MedusaActorRolloutRefWorker(ActorRolloutRefWorker):
    """verl's actor worker; the first data-parallel replica (with FSDP: rank 0) taps its own
    log-prob pass.
    """

    _medusa_rows: int = 0

    @functools.cached_property
    def _medusa(self) -> TappedRank:
        # Made when it is first needed: a separate call builds the engine, after the constructor.
        engine = self.actor.engine
        tap = engine_tap(engine, self.config)
        actor: GatheredActor
        if isinstance(tap, MegatronEngineTap):
            actor = tap.actor
        else:
            actor = HFActor(engine.module, reports=self.rank == 0)
        return TappedRank(tap, actor, functools.partial(on_device, engine))

    @property
    def _tapped(self) -> bool:
        return bool(self.actor.engine.get_data_parallel_rank() == 0)

    @property
    def _gathers(self) -> bool:
        """Whether tables are gathered with this rank: with Megatron by the tapped replica alone."""
        return self._tapped or self.config.actor.strategy != MEGATRON

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    def compute_log_prob(self, data: Any) -> Any:
        # One replica's rows are enough for heads; gathering all would cost the loop bandwidth.
        if not self._medusa_rows or not self._tapped:
            return super().compute_log_prob(data)
        tap = self._medusa.tap
        rows, kept = rows_of(data)
        tap.expect(sum(len(answer) for _, answer in rows), self._medusa_rows)
        with tap.watch(rows):
            output = super().compute_log_prob(data)
        # Ranks that do not report have no output.
        if output is not None:
            logprobs = response_logprobs(output["log_probs"], data["response_mask"])
            tap.add_logprobs([logprobs[i] for i in kept])
        return output

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def medusa_expect(self, rows: int) -> None:
        """How many states of the next log-prob pass are wanted."""
        self._medusa_rows = rows

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def medusa_take(self, policy_version: int, wanted: WantedRows | None) -> Taken | None:
        """What was tapped since the last call, and the rows that go with it; only on the rank that
        reports.
        """
        return self._medusa.take(policy_version, wanted) if self._gathers else None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def medusa_tables(self) -> Tables | None:
        """lm_head and embedding, whole; only on the rank that reports."""
        return self._medusa.whole() if self._gathers else None


def engine_tap(engine: Any, config: Any) -> RowTap:
    """The tap for the engine of an actor worker with this configuration (verl's
    `actor_rollout_ref`).
    """
    kept = sampling_of(config.rollout), int(config.medusa_bytes), int(config.medusa_ahead)
    if config.actor.strategy == MEGATRON:
        return MegatronEngineTap(engine, *kept)
    return PassTap(engine.module, *kept)


class MegatronEngineTap(RowTap):
    """A tap for verl's Megatron engine. It joins whole rows and tables of one model replica on the
    rank where verl's own outputs are.

    The engine may use tensor, pipeline (also virtual stages), sequence and context parallelism.
    Each micro-batch reaches `MegatronEngine.forward_step` on every rank, its rows whole and without
    padding. So that method is wrapped during a log-prob pass, and our tap is open around each call
    of it. One replica is tapped; verl's other data-parallel replicas are not affected. Every rank
    of this replica has a tap, and calls all its methods when the others do, because rows and tables
    are gathered.

    Attributes:
        actor: the replica as seen from this rank.
    """

    def __init__(self, engine: Any, sampling: Sampling, max_bytes: int, ahead: int) -> None:
        """
        Args:
            engine: verl's MegatronEngine, initialised.
            sampling, max_bytes, ahead: as in RowTap.

        Raises:
            ModelError: the model is not a GPTModel (for example, it has an image tower).
            ConfigError: the tap doesn't know how context parallelism splits these rows.
        """
        # Megatron is only installed where it is used.
        from medusa_ppo.actors.megatron import MegatronActor

        super().__init__(sampling, max_bytes, ahead)
        self._engine = engine
        self.actor = MegatronActor(
            engine.module, engine.model_config.hf_config.vocab_size, with_embedding=True
        )
        layout = engine._get_context_parallel_layout(self.actor.model)
        if layout != "zigzag" and engine.engine_config.context_parallel_size > 1:
            raise ConfigError(
                "The states of this model's rows can't be put together.",
                given=f"context parallel layout {layout}",
                expected="zigzag",
                do=(
                    "Set actor_rollout_ref.actor.megatron.context_parallel_size=1, or train without"
                    " draft heads."
                ),
            )
        self.reports = self.actor.reports

    @contextlib.contextmanager
    def _hooked(self) -> Iterator[None]:
        engine = self._engine
        whole = self._engine.forward_step

        def forward_step(
            batch_iter: Iterator[Any], model: nn.Module, *args: Any, **kwargs: Any
        ) -> Any:
            if not any(part is self.actor.model for part in model.modules()):
                return whole(batch_iter, model, *args, **kwargs)  # Another virtual pipeline stage.
            micro_batch = next(batch_iter)
            with self.actor.tap() as tap:
                answer = whole(iter((micro_batch,)), model, *args, **kwargs)
            if self.reports:
                for ids_T, hidden_TD in zip(
                    micro_batch["input_ids"].unbind(), tap.hidden_BTD, strict=True
                ):
                    # Megatron pads rows at their end so that they can be split.
                    self._see(ids_T, hidden_TD[: ids_T.numel()])
            return answer

        engine.forward_step = forward_step
        try:
            yield
        finally:
            del engine.forward_step  # Restores the class's own method.


@register_trainer("medusa_sync")
class MedusaPPOTrainerSync(PPOTrainerSync):
    """verl's trainer, with the heads' companion beside it; verl's own where they are off."""

    def __new__(cls, config: Any) -> Any:
        # Checked here rather than at import, because verl always imports this module.
        require_loop("verl")
        with open_dict(config):
            # verl compares the mode's name in many places; ours is this mode.
            config.trainer.v1.trainer_mode = "sync"
        return super().__new__(cls) if settings(config) is not None else PPOTrainerSync(config)

    def __init__(self, config: Any) -> None:
        medusa = settings(config)
        assert medusa is not None, "else this object is verl's"
        refuse("verl", unsupported(config))
        folder = Path(config.trainer.get("default_local_dir") or medusa.out) / "medusa"
        self.medusa = RemoteAttachment(
            medusa,
            config.actor_rollout_ref.model.path,
            folder,
            # Not verl's `trainer.nnodes`, the nodes with workers: Ray may put this process on
            # one without a GPU (KubeRay's head), and every engine is then on another.
            several_nodes=not on_one_node(),
        )
        configure(config, self.medusa)
        RolloutReplicaRegistry.register("vllm", _load_replica)
        super().__init__(config)

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        for role in self.role_worker_mapping:
            # verl names the role after the processes that it shares.
            if str(role) in ACTOR_ROLES:
                self.role_worker_mapping[role] = ray.remote(MedusaActorRolloutRefWorker)

    def on_init_end(self) -> None:
        super().on_init_end()  # Wakes the engines and loads the actor's weights.
        servers = [
            server
            for replica in self.llm_server_manager.get_replicas()
            for server in replica.servers
        ]
        self.medusa.attach(
            lambda method, args: call_all(servers, method, args), lambda: sum_counters(servers)
        )
        self.medusa.start(self.global_steps)
        # They have slept before, and verl's sleep throws the heads away with the weights.
        self.medusa.synced(lost_heads=True)

    def _compute_old_log_prob(self, batch: Any, metrics: dict[str, Any]) -> Any:
        workers = self.actor_rollout_wg
        with self.medusa.scoring(
            sampling_of(self.config.actor_rollout_ref.rollout),
            # verl counts steps from 1, and a step's rollouts come before its update.
            self.global_steps - 1,
            workers.medusa_expect,
            workers.medusa_take,
        ):
            return super()._compute_old_log_prob(batch, metrics)

    def on_step_end(self) -> None:
        super().on_step_end()
        # Not in `_update_actor`: verl leaves it out while only the critic is warmed up.
        self.medusa.updated(self.global_steps)
        self.medusa.synced(lost_heads=bool(self.config.actor_rollout_ref.rollout.free_cache_engine))

    def _consume_sync_metrics(self) -> Any:
        return {**super()._consume_sync_metrics(), **self.medusa.figures()}

    def on_validate_end(self) -> None:
        super().on_validate_end()
        self.medusa.forget_generated()

    def fit(self, agent_loop_manager: Any) -> None:
        with self.medusa.training() as tables:
            super().fit(agent_loop_manager)
            tables.extend(self.actor_rollout_wg.medusa_tables())


def settings(config: Any) -> RunConfig | None:
    """What verl's configuration says of the heads; None: they are switched off."""
    section = config.get("medusa") or OmegaConf.create({})
    return as_config(OmegaConf.to_container(section, resolve=True))


def unsupported(config: Any) -> dict[str, bool]:
    """Settings of verl that the heads can't be combined with, and whether they are on."""
    actor = config.actor_rollout_ref.actor
    rollout = config.actor_rollout_ref.rollout
    model = config.actor_rollout_ref.model
    correction = config.algorithm.get("rollout_correction") or {}
    kwargs = (rollout.get("engine_kwargs") or {}).get("vllm") or {}
    megatron = (actor.get("megatron") or {}) if actor.strategy == MEGATRON else {}
    return {
        f"actor_rollout_ref.rollout.name={rollout.name} (not vllm)": rollout.name != "vllm",
        f"actor_rollout_ref.actor.strategy={actor.strategy} (not {' or '.join(STRATEGIES)})": (
            actor.strategy not in STRATEGIES
        ),
        "actor_rollout_ref.model.use_fused_kernels with Megatron "
        "(its logits are never made, so the tap has no output layer)": (
            actor.strategy == MEGATRON and bool(model.get("use_fused_kernels", False))
        ),
        "actor_rollout_ref.actor.megatron.dynamic_context_parallel": bool(
            megatron.get("dynamic_context_parallel", False)
        ),
        "actor_rollout_ref.actor.megatron.use_megatron_fsdp": bool(
            megatron.get("use_megatron_fsdp", False)
        ),
        **unsupported_actor(config.actor_rollout_ref),
        "actor_rollout_ref.rollout.data_parallel_size > 1": (
            int(rollout.get("data_parallel_size", 1)) > 1
        ),
        "actor_rollout_ref.rollout.engine_kwargs.vllm.speculative_config": bool(
            kwargs.get("speculative_config")
        ),
        f"{COMPANION} (a companion of its own; this mode starts one)": bool(
            os.environ.get(COMPANION)
        ),
        # Engines would take a feed's heads over ours and ours over the feed's.
        f"{FEED} (this mode gives heads to its engines itself)": bool(os.environ.get(FEED)),
        "algorithm.rollout_correction.bypass_mode (there is no log-prob pass to tap)": bool(
            correction.get("bypass_mode", False)
        ),
        "actor_rollout_ref.rollout.tensor_model_parallel_size > trainer.n_gpus_per_node "
        "(an engine on several nodes)": (
            int(rollout.get("tensor_model_parallel_size", 1))
            * int(rollout.get("pipeline_model_parallel_size", 1))
            > int(config.trainer.n_gpus_per_node)
        ),
    }


def configure(config: Any, medusa: RemoteAttachment) -> None:
    """Write what vLLM and the workers need into verl's own configuration."""
    part = config.actor_rollout_ref
    given = {
        "rollout.engine_kwargs.vllm": medusa.arguments(WORKER_EXTENSION),
        "medusa_bytes": medusa.config.companion.queue_bytes,
        "medusa_ahead": medusa.config.heads.num_heads,
    }
    for key, value in given.items():
        OmegaConf.update(part, key, value, force_add=True)


def _load_replica() -> type[Any]:
    # Imported here because it imports vLLM, which the driver only needs when it starts servers.
    require_loop("verl.server")
    from medusa_ppo.loops.verl.verl_server import MedusaReplica

    return MedusaReplica
