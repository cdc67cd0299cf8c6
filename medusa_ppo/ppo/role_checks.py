"""Checks the models' configurations against the roles of a run, before anything is loaded."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from transformers import AutoConfig

from heads.errors import ConfigError, ModelError
from medusa_ppo.actors.megatron_layout import LlamaSizes
from medusa_ppo.config.ppo_section import IN_TURN, SHARED, SWAPPED
from medusa_ppo.config.run_config import RunConfig
from medusa_ppo.demo.pretraining import RECIPES
from medusa_ppo.engines.launch import read_model_config
from medusa_ppo.ppo.placement import ACTOR, CRITIC, ENGINE, GIB, REWARD
from medusa_ppo.ppo.role_memory import LOOP, RANK, model_config, role_memory
from medusa_ppo.runtime.hardware import ModelSizes, find_hardware, settled

SHAPES = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
)
"""Configuration keys that determine the shapes of tensors."""


def check_roles(config: RunConfig) -> None:
    """Check that the models of a run can take the roles that its configuration gives them. An
    embedded actor, which may not exist yet, always can.

    Raises:
        ModelError, ConfigError: one can't; see `rank_sizes`. Also if a model knows fewer tokens
            than the actor, its sizes do not suit ppo.placement=swapped, or a process's roles do
            not fit on its GPU.
    """
    path = config.model.path
    critic = config.model.critic_path or path
    known = path not in RECIPES
    if known and config.actor.backend == "megatron":
        rank_sizes(config, path, critic)
    if config.model.critic_path and known and critic not in RECIPES:
        _check_critic(path, critic)
    gpu_bytes = find_hardware().gpu_bytes
    check_room(config, LOOP, gpu_bytes)
    if not os.environ.get("RAY_ADDRESS") and not ray.is_initialized():
        # On a cluster the ranks may have other GPUs; they look themselves, before they load.
        check_room(config, RANK, gpu_bytes)
    if config.ppo.placement == SWAPPED and critic not in RECIPES:
        _check_swap(config, critic, config.ppo.reward)


def check_room(config: RunConfig, where: str, gpu_bytes: int) -> None:
    """Check, before anything is loaded, that the roles of a process fit on its GPU in each part of
    a step, and beside an awake engine if ppo.piece_prompts makes them share the GPU with one.
    Nothing is checked if a model's sizes can't be known, and activations are not counted.

    Args:
        where: `role_memory.LOOP` or `RANK`.
        gpu_bytes: memory of its GPU; 0: it has none, or it is unknown.

    Raises:
        ConfigError: they don't fit.
    """
    if not gpu_bytes:
        return
    try:
        sizes = ModelSizes.from_config(model_config(config.model.path))
        processes = role_memory(config, sizes)
    except ModelError:
        return
    engine = 0
    if config.ppo.placement == SHARED:
        engine = round(gpu_bytes * (settled(config).engine.memory_fraction or 0))
    for memory in processes:
        if memory.where != where:
            continue
        for what, found in replace(memory, engine=engine).parts:
            if sum(found.values()) > gpu_bytes:
                raise _no_room(config, where, what, found, gpu_bytes)


def _no_room(
    config: RunConfig, where: str, what: str, found: dict[str, int], gpu_bytes: int
) -> ConfigError:
    parts = ", ".join(f"{role} {count / GIB:.2f}" for role, count in found.items())
    do = "Set ppo.placement=in_turn or shared, or shard the actor over more ranks."
    if config.ppo.placement in (IN_TURN, SHARED):
        do = "Shard the actor over more ranks (actor.backend=megatron), or use smaller models."
    if ENGINE in found:
        do = "Lower engine.memory_fraction, or set ppo.piece_prompts=null."
    return ConfigError(
        f"The roles don't fit on the GPU of {where}.",
        given=(
            f"ppo.placement={config.ppo.placement}, {what}: {parts} GiB,"
            f" {sum(found.values()) / GIB:.2f} at once"
        ),
        expected=f"at most {gpu_bytes / GIB:.2f} GiB, and room for the activations of passes",
        do=do,
    )


def rank_sizes(config: RunConfig, path: str, critic_path: str) -> dict[str, LlamaSizes]:
    """Sizes of the models on the ranks, by role.

    Args:
        path: folder of the actor's checkpoint; the reference starts from it too.
        critic_path: folder that a critic on the ranks starts from.

    Raises:
        ModelError: there is no such folder, Megatron does not compute this family of models here,
            or the reward model has more than one output.
        ConfigError: a model can't be sharded like the actor.
    """
    found = {ACTOR: _sizes(config, "actor", "model.path", path, "actor.backend=transformers")}
    if config.critic_on_ranks:
        found[CRITIC] = _sizes(
            config, "critic", "model.critic_path", critic_path, "actor.roles=policy"
        )
    if config.reward_on_ranks:
        aside = "actor.roles=critic" if config.critic_on_ranks else "actor.roles=policy"
        reward = config.ppo.reward
        found[REWARD] = _sizes(config, "reward model", "ppo.reward", reward, aside)
        model: Any = AutoConfig.from_pretrained(reward, trust_remote_code=False)
        if model.num_labels != 1:
            raise ModelError(
                "The reward model must have exactly one output.",
                given=f"{reward}: {model.num_labels} labels",
                expected="1 label",
                do="Use a reward model.",
            )
    return found


def _sizes(config: RunConfig, who: str, key: str, path: str, aside: str) -> LlamaSizes:
    """Sizes of one role on the ranks. `aside` is the setting that keeps it off them."""
    if not Path(path).is_dir():
        raise ModelError(
            f"The ranks read the {who}'s checkpoint from a folder.",
            given=f"{key}={path}",
            expected="a folder with safetensors that all nodes can read",
            do=f"Download the model, and give its folder as {key}; or set {aside}.",
        )
    found = LlamaSizes.read(path, who, f"Set {aside}.")
    found.check_cut(config.actor.tensor_parallel, config.actor.pipeline_parallel, who)
    if found.mrope_section and config.actor.context_parallel > 1:
        raise ConfigError(
            f"A vision-language {who}'s sequences can't be split.",
            given=f"{key}={path}, actor.context_parallel={config.actor.context_parallel}",
            expected="actor.context_parallel=1",
            do="Set actor.tensor_parallel and actor.sequence_parallel instead.",
        )
    return found


def _check_critic(path: str, critic: str) -> None:
    """Check that the critic knows all of the actor's tokens."""
    tokens, known = (_vocabulary(read_model_config(folder)) for folder in (path, critic))
    if known < tokens:
        raise ModelError(
            "The critic doesn't know all tokens of the actor.",
            given=f"model.critic_path={critic}: {known:,} tokens; the actor has {tokens:,}",
            expected="a model with the actor's tokenizer",
            do="Set model.critic_path to one, or to null: the critic then starts as the actor.",
        )


def _vocabulary(model: dict[str, Any]) -> int:
    # Models with several parts keep the sizes of their language model in a subsection.
    return int({**model, **(model.get("text_config") or {})}.get("vocab_size", 0))


def _check_swap(config: RunConfig, critic: str, reward: str) -> None:
    """Check that the reward model fits into the memory of the critic's weights."""
    theirs, ours = read_model_config(reward), read_model_config(critic)
    kinds = {
        # The loop's own critic is float32, whatever dtype its products use.
        "critic": (config.critic_on_ranks and config.model.dtype) or "float32",
        "reward": str(theirs.get("dtype") or theirs.get("torch_dtype") or "float32"),
    }
    faults = [
        f"{key} {theirs.get(key)} and {ours.get(key)}"
        for key in SHAPES
        if theirs.get(key) != ours.get(key)
    ]
    if kinds["critic"] != kinds["reward"]:
        faults.append(f"weights in {kinds['reward']} and {kinds['critic']}")
    if faults:
        raise ConfigError(
            "The reward model does not fit into the critic's memory.",
            given=f"ppo.placement=swapped, reward model and critic: {', '.join(faults)}",
            expected="a reward model and a critic of the same shapes and kind of numbers",
            do=(
                "Set ppo.placement=separate or in_turn, or model.critic_path to a model of the"
                " reward model's sizes."
            ),
        )
