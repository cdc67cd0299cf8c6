"""OpenRLHF's PPO with draft heads: `python -m medusa_ppo.loops.openrlhf --medusa heads.yaml`,
followed by OpenRLHF's own arguments.

OpenRLHF has no plugins and passes no arguments on to vLLM. So its command is run with three names
replaced (OpenRLHF 0.11; tests/contracts/test_openrlhf.py compares all of it with the installed
package):

    vLLM's start     `create_vllm_engines`: the same call, with a Ray actor class that adds our
                     arguments to the engine's
    log-prob pass    `PolicyModelActor.forward`, overridden: rank 0 taps its share of the rows
    rollouts         `RemoteExperienceMaker.make_experience_batch`, wrapped: what was tapped goes to
                     the companion, with the rows of lm_head and embedding that it needs
    weight sync      `BasePPOTrainer.broadcast_to_vllm`, overridden: newer heads into the engines
    evaluation       `PPOTrainer.evaluate`, overridden: what is drafted in it is not counted

With a stand-alone companion (MEDUSA_PPO_COMPANION and MEDUSA_PPO_FEED in the environment, `heads:
{path: HEADS}` in heads.yaml) it replaces two names, and no trainer; so it works with
`--train.async_enable` and on several nodes, too. Engines load newer heads from the feed:

    vLLM's start     `create_vllm_engines`, as above
    update           `PolicyModelActor.fit`, overridden: every rank taps its rows
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import logging
import os
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import ray
import torch

from heads.errors import ConfigError
from medusa_ppo.actors.hf import HFActor
from medusa_ppo.companion.wire import WantedRows
from medusa_ppo.config.run_config import RunConfig, load_config
from medusa_ppo.contract.rollouts import Sampling
from medusa_ppo.engines.launch import plan_launch
from medusa_ppo.loops.attachment import (
    SPECULATION,
    as_config,
    refuse_broadcast,
    warn_of_idle_settings,
)
from medusa_ppo.loops.loop_versions import require_loop
from medusa_ppo.loops.passes import PassTap
from medusa_ppo.loops.remote import (
    EngineCalls,
    RemoteAttachment,
    Tables,
    Taken,
    TappedRank,
    call_all,
    refuse,
    sum_counters,
)
from medusa_ppo.loops.worker_tap import (
    COMPANION,
    OURS,
    Rows,
    as_sampled,
    joined_rows,
    masked_rows,
    own_secrets,
    own_tap,
    own_variables,
)
from medusa_ppo.runtime.processes import on_one_node
from medusa_ppo.vllm_plugin.speculation import FEED
from medusa_ppo.vllm_plugin.worker_calls import DRAFTING

logger = logging.getLogger(__name__)

WORKER_EXTENSION = "medusa_ppo.loops.openrlhf.MedusaOpenRLHFWorker"
CLI = "openrlhf.cli.train_ppo_ray"
VLLM_PREFIXES = "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY"
"""vLLM's variable: which ones its own Ray workers get besides those that it knows."""
FOLDER = "medusa"
"""The run's folder, inside OpenRLHF's folder for checkpoints."""


def __getattr__(name: str) -> type[Any]:
    """Create `MedusaOpenRLHFWorker` when vLLM's workers look for it: OpenRLHF's extension and ours
    in one class, because vLLM accepts only one.
    """
    # It can't be a class of this file: it needs OpenRLHF's extension and vLLM, which only a worker
    # has.
    if name != "MedusaOpenRLHFWorker":
        raise AttributeError(name)
    from openrlhf.trainer.ray.vllm_worker_wrap import WorkerWrap

    from medusa_ppo.vllm_plugin.worker_extension import MedusaWorker

    return type(
        name,
        (MedusaWorker, WorkerWrap),
        {"__module__": __name__, "__doc__": "OpenRLHF's weight broadcast beside our swaps."},
    )


def plain_class(actor_class: Any) -> type[Any]:
    """The class inside Ray's decorator, to inherit from."""
    # Ray wraps a class in a subclass that it marks as decorated, and whatever is derived from that
    # subclass would inherit the mark.
    return actor_class.__ray_metadata__.modified_class.__ray_actor_class__


def rollout_actor(arguments: dict[str, Any]) -> Any:
    """OpenRLHF's vLLM actor, with our arguments for the engine and two more methods, as a Ray actor
    class.
    """
    # OpenRLHF is imported where it is used, because vLLM's workers import this file only for their
    # extension.
    from openrlhf.trainer.ray import vllm_engine

    # Ray gives an actor's process what its node has, not what the driver has: the class brings it.
    variables = own_variables() | own_secrets()

    class MedusaRolloutActor(EngineCalls, plain_class(vllm_engine.RolloutRayActor)):  # type: ignore[misc]
        medusa_engine = "llm"

        # Async as in OpenRLHF's class; Ray awaits it.
        async def __init__(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[misc]
            # Before vLLM starts: it looks for its feed when it does.
            take_variables(variables)
            await super().__init__(*args, **{**kwargs, **arguments})

    return ray.remote(MedusaRolloutActor)


def take_variables(variables: dict[str, str]) -> None:
    """Set the driver's variables in an actor's process; vLLM hands them on to the workers that it
    starts in Ray.
    """
    os.environ.update(variables)
    prefixes = os.environ.get(VLLM_PREFIXES, "").split(",")
    os.environ[VLLM_PREFIXES] = ",".join(filter(None, dict.fromkeys([*prefixes, OURS])))


def policy_actor() -> Any:
    """OpenRLHF's actor worker, whose rank 0 taps its own log-prob pass, as a Ray actor class."""
    from openrlhf.trainer.ray import ppo_actor

    class MedusaPolicyActor(plain_class(ppo_actor.PolicyModelActor)):  # type: ignore[misc]
        _medusa_rows: int = 0
        _medusa_rank: TappedRank | None = None

        # Not `cached_property`: Ray pickles this class, and until Python 3.12 that has a lock.
        @property
        def _medusa(self) -> TappedRank:
            # Made when it is first needed: the model is loaded by a separate call after the
            # constructor.
            if self._medusa_rank is None:
                args, model = self.strategy.args, self.actor.model
                sampling = sampling_of(args)
                kept = args.medusa.companion.queue_bytes, args.medusa.heads.num_heads
                actor = HFActor(model, reports=self.strategy.get_rank() == 0)
                self._medusa_rank = TappedRank(PassTap(model, sampling, *kept), actor)
            return self._medusa_rank

        def forward(
            self, sequences: Any, action_mask: Any = None, attention_mask: Any = None, **kwargs: Any
        ) -> Any:
            # One rank's rows are enough for heads; gathering all would cost the loop bandwidth.
            if self.strategy.get_rank() != 0 or not self._medusa_rows:
                return super().forward(sequences, action_mask, attention_mask, **kwargs)
            prompts, answers, _ = masked_rows(sequences, attention_mask, action_mask)
            with self._medusa.tap.watch(list(zip(prompts, answers, strict=True))):
                log_probs = super().forward(sequences, action_mask, attention_mask, **kwargs)
            *_, logprobs = masked_rows(sequences, attention_mask, action_mask, log_probs)
            self._medusa.tap.add_logprobs(logprobs or [])
            return log_probs

        def medusa_expect(self, tokens: int, rows: int) -> None:
            """The next passes cover this many response tokens, over all ranks, and so many of their
            states are wanted.
            """
            self._medusa_rows = rows
            if rows and self.strategy.get_rank() == 0:
                # Nobody knows yet which rank scores which of them.
                ranks = torch.distributed.get_world_size()
                self._medusa.tap.expect(-(-tokens // ranks), rows, about=ranks > 1)

        def medusa_take(self, policy_version: int, wanted: WantedRows | None) -> Taken | None:
            return self._medusa.take(policy_version, wanted)

        def medusa_tables(self) -> Tables | None:
            return self._medusa.whole()

    return ray.remote(num_gpus=1)(MedusaPolicyActor)


def tapped_policy_actor() -> Any:
    """OpenRLHF's actor worker, each of which taps its update for a stand-alone companion, as a Ray
    actor class.
    """
    from openrlhf.trainer.ray import ppo_actor

    # As in `rollout_actor`: without them ranks on some nodes would wait in a tap for the others.
    variables = own_variables() | own_secrets()

    class TappedPolicyActor(plain_class(ppo_actor.PolicyModelActor)):  # type: ignore[misc]
        def fit(self, kl_ctl: float = 0) -> Any:
            take_variables(variables)
            rollout = self.strategy.args.rollout
            how = {"temperature": rollout.temperature, "top_p": rollout.top_p}
            tap = own_tap(self, self.actor.model, **how)
            with tap(*as_sampled(tap, buffered_rows(self.trainer.replay_buffer.items))):
                status = super().fit(kl_ctl)
            tap.updated()
            return status

    return ray.remote(num_gpus=1)(TappedPolicyActor)


def buffered_rows(items: Sequence[Any]) -> Rows:
    """Prompts and responses that OpenRLHF's replay buffer holds, one in each item, and the actor's
    log-probs from before the update, if it has them.
    """
    rows = []
    for item in items:
        logprobs_R = item.action_log_probs
        rows.append(
            masked_rows(
                item.sequences[None],
                item.attention_mask[None],
                item.action_mask[None],
                None if logprobs_R is None else logprobs_R[None],
            )
        )
    return joined_rows(rows)


def sampling_of(args: Any) -> Sampling:
    """OpenRLHF's sampling of its rollouts in our form."""
    return Sampling(temperature=args.rollout.temperature, top_p=args.rollout.top_p)


def trainer_actor() -> Any:
    """OpenRLHF's trainer with the heads' companion beside it, as a Ray actor class."""
    from openrlhf.trainer import ppo_trainer

    class MedusaOpenRLHFTrainer(plain_class(ppo_trainer.PPOTrainer)):  # type: ignore[misc]
        def __init__(self, pretrain: str, strategy: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(pretrain, strategy, *args, **kwargs)
            self.medusa = RemoteAttachment(
                strategy.args.medusa, pretrain, Path(strategy.args.ckpt.output_dir) / FOLDER
            )
            make = self.experience_maker.make_experience_batch

            def make_and_take(rollout_samples: Any) -> Any:
                group = self.actor_model_group

                def on_all(method: str, *given: Any) -> list[Any]:
                    return ray.get(group.async_run_method(method, *given))

                # Announced before the passes: they come in pieces, and each contributes its share
                # of the sample.
                tokens = sum(int(sample.action_mask.sum()) for sample in rollout_samples)
                with self.medusa.scoring(
                    sampling_of(self.args),
                    self._medusa_version,
                    functools.partial(on_all, "medusa_expect", tokens),
                    functools.partial(on_all, "medusa_take"),
                ):
                    return make(rollout_samples)

            # Replaced on the object: OpenRLHF's constructor creates it, and offers no way to use a
            # different class.
            self.experience_maker.make_experience_batch = make_and_take
            # The actor's version, and the one that its next broadcast brings to the engines.
            self._medusa_version = self._medusa_next = 0

        def fit(self, global_step: int = 0) -> None:
            # OpenRLHF asks for the checkpoint's states again, and counts on from them.
            resumed = int(self.init_checkpoint_states()["global_step"])
            self._medusa_version = self._medusa_next = resumed or global_step
            engines = self.vllm_engines
            with engines_awake(self.args, engines):
                self.medusa.attach(
                    lambda method, args: call_all(engines, method, args),
                    lambda: sum_counters(engines),
                )
            self.medusa.start(self._medusa_version)
            with self.medusa.training() as tables:
                super().fit(global_step)
                group = self.actor_model_group
                tables.extend(ray.get(group.async_run_method("medusa_tables")))

        def train_step(self, rollout_samples: Any, global_step: int) -> Any:
            self._medusa_version, self._medusa_next = global_step, global_step + 1
            status, step = super().train_step(rollout_samples, global_step)
            return {**status, **self.medusa.figures()}, step

        def broadcast_to_vllm(self) -> None:
            # With sleep mode the engines' weights are awake now, and level 1 has kept the heads.
            super().broadcast_to_vllm()
            # OpenRLHF also sends a checkpoint's actor, before the first step: that is no update.
            self._medusa_version = self._medusa_next
            self.medusa.updated(self._medusa_version)
            self.medusa.synced(lost_heads=False)

        def evaluate(self, global_step: int, **generate_kwargs: Any) -> Any:
            logs = super().evaluate(global_step, **generate_kwargs)
            self.medusa.forget_generated()
            return logs

    return ray.remote(MedusaOpenRLHFTrainer)


@contextlib.contextmanager
def engines_awake(args: Any, engines: list[Any]) -> Iterator[None]:
    """Keep the engines' weights in memory during the block; with sleep on, OpenRLHF starts its
    engines asleep.
    """
    from openrlhf.trainer.ray.vllm_engine import batch_vllm_engine_call

    if args.vllm.enable_sleep:
        batch_vllm_engine_call(engines, "wake_up")
    yield
    if args.vllm.enable_sleep:
        batch_vllm_engine_call(engines, "sleep")


def unsupported(args: Any, *, tapped: bool = False) -> dict[str, bool]:
    """Settings of OpenRLHF that the heads can't be combined with, and whether they are on.

    Args:
        tapped: with a stand-alone companion.
    """
    return {
        f"--train.async_enable without {COMPANION}": bool(args.train.async_enable) and not tapped,
        # Engines would take a feed's heads over ours and ours over the feed's.
        f"{FEED} without {COMPANION} (this trainer gives heads to its engines itself)": (
            bool(os.environ.get(FEED)) and not tapped
        ),
        "--ds.ring_attn_size > 1": int(args.ds.ring_attn_size) > 1,
        "--ds.tensor_parallel_size > 1": int(args.ds.tensor_parallel_size) > 1,
        "--vllm.num_engines 0": not args.vllm.num_engines,
        "--data.max_images_per_prompt > 0": int(getattr(args.data, "max_images_per_prompt", 0)) > 0,
    }


def install(config: RunConfig) -> None:
    """Replace the names that OpenRLHF's command imports, for this process.

    Raises:
        ConfigError: with a stand-alone companion, the configuration does not say where its heads
            are.
    """
    from openrlhf.trainer import ppo_trainer
    from openrlhf.trainer.ray import ppo_actor

    folder = [config.run_dir]
    tapped = bool(os.environ.get(COMPANION))
    if tapped:
        _replace_engines(served_arguments(config))
        ppo_actor.PolicyModelActor = tapped_policy_actor()
    else:
        kept: list[RemoteAttachment] = []  # Keeps the heads' folder until the engines have started.

        def arguments(pretrain: str) -> dict[str, Any]:
            # Ray may put engines on any of its nodes.
            nodes = not on_one_node()
            attachment = RemoteAttachment(config, pretrain, folder[0], several_nodes=nodes)
            # Kept because the arguments name its folder, which disappears with it.
            kept.append(attachment)
            return {**attachment.arguments(WORKER_EXTENSION), "max_logprobs": 1}

        _replace_engines(arguments)
        ppo_actor.PolicyModelActor = policy_actor()
        ppo_trainer.PPOTrainer = trainer_actor()
    from openrlhf.utils import get_strategy

    def strategy_with_heads(args: Any) -> Any:
        refuse("OpenRLHF", unsupported(args, tapped=tapped))
        # The strategy carries the arguments to every actor, and our settings with them.
        args.medusa = config
        folder[0] = Path(args.ckpt.output_dir) / FOLDER
        return get_strategy(args)

    sys.modules["openrlhf.utils"].get_strategy = strategy_with_heads  # type: ignore[attr-defined]


def _replace_engines(arguments: Callable[[str], dict[str, Any]]) -> None:
    """Let OpenRLHF start its engines with further arguments of vLLM, which depend on the actor's
    name.
    """
    from openrlhf.trainer import ray as ray_package
    from openrlhf.trainer.ray import vllm_engine

    create = vllm_engine.create_vllm_engines

    def create_with_heads(
        num_engines: int, tensor_parallel_size: int, pretrain: str, *args: Any, **kwargs: Any
    ) -> Any:
        vllm_engine.RolloutRayActor = rollout_actor(arguments(pretrain))
        return create(num_engines, tensor_parallel_size, pretrain, *args, **kwargs)

    ray_package.create_vllm_engines = create_with_heads


def served_arguments(config: RunConfig) -> Callable[[str], dict[str, Any]]:
    """The arguments of vLLM for engines that feed themselves, by the actor's name.

    Raises:
        ConfigError: the configuration does not name the companion's heads.
    """
    heads = config.heads.path
    if not heads:
        raise ConfigError(
            "Engines need the heads that the companion starts with.",
            given=f"no heads.path, {COMPANION} is set",
            expected="heads.path in the file that --medusa names",
            do="Name the folder of --heads of `medusa-ppo companion serve`; all nodes have to see"
            " it.",
        )
    refuse_broadcast(config.engine)
    warn_of_idle_settings(config.engine)

    def arguments(pretrain: str) -> dict[str, Any]:
        plan = plan_launch(
            pretrain, Path(heads).resolve(), config.engine, config.seed, others_start=True
        )
        # Nobody calls these engines later: all settings go with them, and vLLM's own log has their
        # acceptance.
        ours = {name: plan.engine_args[name] for name in (*SPECULATION, "disable_log_stats")}
        ours["additional_config"] |= {DRAFTING: dict(plan.drafting)}
        return ours | config.engine.extra

    return arguments


def main(arguments: list[str] | None = None) -> None:
    """Run OpenRLHF's own command with draft heads; without `--medusa`, unchanged."""
    parser = argparse.ArgumentParser(
        prog="python -m medusa_ppo.loops.openrlhf", add_help=False, allow_abbrev=False
    )
    parser.add_argument("--medusa", default="")
    given, rest = parser.parse_known_args(arguments)
    require_loop("openrlhf")
    config = as_config(load_config(given.medusa)) if given.medusa else None
    if config is not None:
        install(config)
    # OpenRLHF parses the command line itself, and would reject our flag.
    sys.argv = [CLI, *rest]
    # The command imports the names when it runs, after `install` has replaced them.
    runpy.run_module(CLI, run_name="__main__")


if __name__ == "__main__":
    main()
