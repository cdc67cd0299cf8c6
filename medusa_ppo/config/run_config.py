"""The settings of a run: all sections together, the rules between them, and how they are read.

Each section has a file of its own with its keys, their defaults and the rules among them. `null` is
the one way to say "none" or "by itself"; what follows from the hardware then is decided in
`medusa_ppo.runtime.hardware`. Fields that contradict each other fail at load. Nothing here imports
torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, field_validator, model_validator

from heads.errors import ConfigError
from medusa_ppo.config.actor_section import ActorConfig
from medusa_ppo.config.companion_section import CompanionConfig
from medusa_ppo.config.config_file import (
    apply_override,
    as_config_error,
    keys_of,
    located,
    read_file,
)
from medusa_ppo.config.data_section import DataConfig
from medusa_ppo.config.engine_section import COLOCATED, EngineConfig
from medusa_ppo.config.heads_section import HeadsSection
from medusa_ppo.config.model_section import ModelConfig
from medusa_ppo.config.old_keys import refuse_old_keys
from medusa_ppo.config.ppo_section import ATTENTION, PPOConfig
from medusa_ppo.config.report_section import ReportConfig
from medusa_ppo.config.sampling_section import SamplingConfig
from medusa_ppo.config.section import Section, Text


class RunConfig(Section):
    """Everything that `medusa-ppo ppo` reads."""

    name: Text = "run"
    """Name of the run; its files go to OUT/NAME."""
    out: Text = "runs"
    """Folder of all runs."""
    seed: int = 0
    """Seed of everything random."""
    model: ModelConfig = Field(default_factory=ModelConfig)
    actor: ActorConfig = Field(default_factory=ActorConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    engine: EngineConfig = Field(default_factory=EngineConfig)
    heads: HeadsSection = Field(default_factory=HeadsSection)
    companion: CompanionConfig = Field(default_factory=CompanionConfig)
    ppo: PPOConfig = Field(default_factory=PPOConfig)
    report: ReportConfig = Field(default_factory=ReportConfig)

    @field_validator("name")
    @classmethod
    def _inside(cls, name: str) -> str:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            do = "Name the run, and the folder that it lies in with out=FOLDER."
            raise ConfigError(
                "The run would lie outside of the folder of all runs.",
                given=f"name={name}",
                expected="a name",
                do=do,
            )
        return name

    @property
    def run_dir(self) -> Path:
        return Path(self.out) / self.name

    @property
    def must_pay(self) -> bool:
        """How much the companion trains follows from measured seconds: not where the loop waits for
        it, since no run repeats them, nor where the engine writes ahead, since they are booked one
        after the other.
        """
        return not (self.companion.wait or self.ppo.staleness)

    @model_validator(mode="after")
    def _fields_agree(self) -> RunConfig:
        for problem, keys, expected, do in (*_contradictions(self), *ppo_contradictions(self)):
            values = [
                f"{key}={getattr(getattr(self, section), name)}"
                for key in keys
                for section, name in [key.split(".")]
            ]
            raise ConfigError(problem, given=", ".join(values), expected=expected, do=do)
        return self


def _contradictions(config: RunConfig) -> Iterator[tuple[str, tuple[str, ...], str, str]]:
    """Fields that contradict each other, at load and not at step 300: the problem, their keys, what
    is expected, what to do.
    """
    engine = config.engine
    heads = config.heads
    ppo = config.ppo
    megatron = config.actor.backend == "megatron"
    if engine.num_drafts is not None and engine.num_drafts > heads.num_heads:
        keys: tuple[str, ...] = ("engine.num_drafts", "heads.num_heads")
        yield (
            "More draft tokens than heads.",
            keys,
            "engine.num_drafts <= heads.num_heads",
            "Train more heads or draft fewer tokens.",
        )
    if (engine.memory_bytes or engine.stop_below) and not engine.draft_temperature:
        keys = ("engine.memory_bytes", "engine.stop_below", "engine.draft_temperature")
        do = "Set the last above 0, or the others to null."
        yield (
            "Only sampled drafts know a memory, or an end by their own chances.",
            keys,
            "sampled drafts",
            do,
        )
    if engine.stop_below and engine.choose_drafts:
        keys = ("engine.stop_below", "engine.choose_drafts")
        yield (
            "What k drafts cost is not seen where each request has its own number.",
            keys,
            "one of the two",
            "Leave one out.",
        )
    need = config.data.max_prompt_tokens + config.sampling.max_new_tokens
    ours = config.model_fields_set & {
        "data",
        "sampling",
        "ppo",
    }  # Another loop brings its own prompts, and sets none of them.
    if ours and engine.max_model_len is not None and need > engine.max_model_len:
        keys = ("data.max_prompt_tokens", "sampling.max_new_tokens")
        do = "Raise engine.max_model_len, leave it out, or shorten prompts or responses."
        yield (
            "Prompts and responses do not fit into the engine.",
            keys,
            f"together <= engine.max_model_len = {engine.max_model_len}",
            do,
        )
    micro = ppo.micro_batch_size or ppo.minibatch_size
    if ppo.minibatch_size % micro and micro < ppo.minibatch_size:
        keys = ("ppo.minibatch_size", "ppo.micro_batch_size")
        yield (
            "A minibatch must be made of whole micro batches.",
            keys,
            "the first divisible by the second",
            "Change one of the two.",
        )
    if not megatron and config.actor.ranks > 1:
        keys = (
            "actor.backend",
            "actor.tensor_parallel",
            "actor.pipeline_parallel",
            "actor.context_parallel",
            "actor.data_parallel",
        )
        do = "Set actor.backend=megatron, or all four parallel sizes to 1."
        yield "The backend transformers trains in one process.", keys, "actor.backend=megatron", do
    if config.actor.sequence_parallel and config.actor.tensor_parallel == 1:
        keys = ("actor.sequence_parallel", "actor.tensor_parallel")
        do = "Raise the second, or leave the first out."
        yield (
            "Tokens are shared by the ranks that share a layer.",
            keys,
            "actor.tensor_parallel above 1",
            do,
        )
    if config.actor.context_parallel > 1 and (config.sampling.top_k or config.sampling.top_p < 1):
        keys = ("actor.context_parallel", "sampling.top_k", "sampling.top_p")
        do = "Set actor.context_parallel=1, or sample from all tokens."
        yield (
            "Ranks share a sequence otherwise in each pass, and forget which tokens a cut left.",
            keys,
            "one of the two",
            do,
        )
    if config.actor.distributed_optimizer and not megatron:
        keys = ("actor.distributed_optimizer", "actor.backend")
        do = "Set actor.backend=megatron, or leave the first out."
        yield (
            "One process has nobody to share its optimizer with.",
            keys,
            "actor.backend=megatron",
            do,
        )
    if engine.sleep_level and engine.backend != COLOCATED:
        keys = ("engine.sleep_level", "engine.backend")
        do = "Set engine.sleep_level=null or engine.backend=colocated."
        yield "Only colocated engines can sleep.", keys, "engine.backend=colocated", do
    if engine.transfer == "broadcast" and (
        engine.backend != COLOCATED or int(engine.extra.get("data_parallel_size", 1)) > 1
    ):
        keys = ("engine.transfer", "engine.backend", "engine.extra")
        do = "Set engine.transfer=file, or engine.backend=colocated with engine.replicas."
        yield (
            "The actor can't be broadcast to these engines.",
            keys,
            "engine.backend=colocated, no data_parallel_size above 1",
            do,
        )
    if engine.addresses and len(engine.addresses) != engine.replicas:
        keys = ("engine.backend", "engine.replicas")
        yield (
            "Each engine needs an address.",
            keys,
            "as many addresses as replicas, with commas between",
            "Correct one of the two.",
        )
    if config.report.compare_pairs and engine.addresses:
        problem = (
            "A run that is compared starts an engine without heads of its own, and can't do so at"
            " your server."
        )
        do = "Set report.compare_pairs=null, or let the engine be started."
        yield (
            problem,
            ("report.compare_pairs", "engine.backend"),
            "engine.backend=colocated or server",
            do,
        )


def ppo_contradictions(config: RunConfig) -> Iterator[tuple[str, tuple[str, ...], str, str]]:
    """Fields of the loop that contradict each other: the problem, their keys, what is expected,
    what to do.
    """
    ppo = config.ppo
    data = config.data
    keys = tuple[str, ...]()
    if ppo.advantages != "gae":
        keys = ("ppo.advantages", "sampling.responses_per_prompt")
        if config.sampling.responses_per_prompt < 2:
            yield (
                "One response has no others to be compared with.",
                keys,
                "at least 2 responses to each prompt",
                "Raise the second.",
            )
        keys = ("ppo.advantages", "ppo.step_separator", "model.critic_path")
        do = "Set ppo.advantages=gae, or the others to null."
        if ppo.step_separator or config.model.critic_path:
            yield (
                "Without a critic there are no rewards of single steps.",
                keys,
                "ppo.advantages=gae",
                do,
            )
    yield from _stale_contradictions(config)
    yield from _place_contradictions(config)
    yield from _image_contradictions(config)
    if ppo.piece_prompts:
        keys = ("ppo.piece_prompts", "ppo.prompts_per_step")
        do = "Set a smaller ppo.piece_prompts, or null."
        if ppo.piece_prompts > ppo.prompts_per_step:
            yield "A piece is larger than the batch.", keys, f"at most {ppo.prompts_per_step}", do
        keys = ("ppo.piece_prompts", "engine.sleep_level")
        do = "Set one of the two to null."
        if config.engine.sleep_level:
            yield (
                "An engine that gives its memory to the scoring can't write meanwhile.",
                keys,
                "one of the two",
                do,
            )
    if ppo.kl_in_loss and ppo.kl_estimator == "k1":
        keys = ("ppo.kl_in_loss", "ppo.kl_estimator")
        do = "Set ppo.kl_estimator=k3, or ppo.kl_in_loss=false."
        yield (
            "As a term of the loss k1 has no gradient on average.",
            keys,
            "ppo.kl_estimator=k2 or k3",
            do,
        )
    if ppo.kl_goal and not ppo.kl_coefficient:
        keys = ("ppo.kl_goal", "ppo.kl_coefficient")
        yield (
            "A coefficient of 0 stays 0, whatever it is multiplied by.",
            keys,
            "ppo.kl_coefficient above 0",
            "Set the second.",
        )
    if bool(ppo.ptx_coefficient) != bool(data.ptx_path):
        keys = ("ppo.ptx_coefficient", "data.ptx_path")
        yield (
            "Texts beside PPO need a weight, and a weight needs texts.",
            keys,
            "both or none",
            "Set both, or none.",
        )
    if ppo.eval_every and data.eval_path in (None, data.path) and data.eval_split == data.split:
        keys = ("data.split", "data.eval_path", "data.eval_split")
        yield (
            "The evaluation would be on the prompts of the training.",
            keys,
            "other prompts",
            "Set data.eval_path or data.eval_split.",
        )
    if config.actor.backend == "megatron" and (ppo.ptx_coefficient or ppo.kl_stop):
        keys = ("actor.backend", "ppo.ptx_coefficient", "ppo.kl_stop")
        do = "Set actor.backend=transformers, or the other two to null."
        yield (
            "The ranks of a Megatron actor know neither texts beside PPO nor an early end.",
            keys,
            "actor.backend=transformers",
            do,
        )
    if config.actor.backend == "transformers" and ppo.recompute == ATTENTION:
        keys = ("actor.backend", "ppo.recompute")
        do = "Set ppo.recompute=true, or actor.backend=megatron."
        yield (
            "transformers' attention keeps nothing that could be made again.",
            keys,
            "ppo.recompute=true or false",
            do,
        )


def _stale_contradictions(config: RunConfig) -> Iterator[tuple[str, tuple[str, ...], str, str]]:
    """The same for responses of an older actor: written ahead, or carried over."""
    ppo = config.ppo
    engine = config.engine
    keys = tuple[str, ...]()
    if ppo.staleness:
        keys = ("ppo.staleness", "ppo.importance_bound")
        if ppo.importance_bound is None:
            do = "Set ppo.importance_bound=2, or ppo.staleness=0."
            yield (
                "An older actor's tokens need importance weights.",
                keys,
                "ppo.importance_bound above 0",
                do,
            )
        beside = ["ppo.piece_prompts", "report.speed_every", "report.compare_pairs"]
        for key in beside + ["ppo.eval_every", "engine.sleep_level"] * (ppo.steps_ahead > 0):
            section, name = key.split(".")
            if getattr(getattr(config, section), name) is not None:
                keys = ("ppo.staleness", key)
                do = "Set one of the two to null (ppo.staleness to 0)."
                yield (
                    "While the engine writes for later steps it does nothing else.",
                    keys,
                    "one of the two",
                    do,
                )
        if ppo.steps_ahead > 1 and engine.choose_drafts:
            keys = ("ppo.staleness", "engine.choose_drafts")
            do = "Set ppo.staleness=1, or engine.choose_drafts=false."
            yield "An engine that never rests can't say what it chose.", keys, "one of the two", do
    if ppo.carry_after is None:
        return
    keys = ("ppo.carry_after", "ppo.staleness")
    do = "Set ppo.staleness=1 or more, or ppo.carry_after=null."
    if not ppo.staleness:
        yield "What is carried over was begun by an older actor.", keys, "ppo.staleness above 0", do
    keys = ("ppo.carry_after", "engine.backend", "engine.replicas", "data.images")
    if engine.backend != "colocated" or engine.replicas > 1 or config.data.images:
        do = "Set ppo.carry_after=null, or the others to their defaults."
        yield (
            "Only one colocated engine stops responses half-way, of prompts without images.",
            keys,
            "one of the two",
            do,
        )


def _place_contradictions(config: RunConfig) -> Iterator[tuple[str, tuple[str, ...], str, str]]:
    """The same for where it all happens: processes for rewards, roles that take turns on one
    device.
    """
    engine = config.engine
    ppo = config.ppo
    ranks = int(config.engine.extra.get("tensor_parallel_size", 1))
    keys: tuple[str, ...]
    if ppo.reward_timeout_s is not None and ppo.reward_processes is None:
        keys = ("ppo.reward_timeout_s", "ppo.reward_processes")
        do = "Set ppo.reward_processes=1 or more."
        yield "Only a process can be ended when its time is over.", keys, "ppo.reward_processes", do
    if ppo.reward_processes is not None and ":" not in ppo.reward:
        keys = ("ppo.reward_processes", "ppo.reward")
        do = "Set ppo.reward_processes=null."
        yield (
            "A reward model is computed by the loop, not in processes.",
            keys,
            "a reward module:function",
            do,
        )
    if ppo.side_by_side and (ppo.placement == "shared" or config.actor.backend == "megatron"):
        keys = ("ppo.side_by_side", "ppo.placement", "actor.backend")
        do = "Set ppo.side_by_side=false."
        yield (
            "Roles that take turns can't work at once; a Megatron actor's ranks do anyway.",
            keys,
            "two of them at their defaults",
            do,
        )
    if ppo.placement == "separate":
        return
    if engine.sleep_level is None:
        keys = ("ppo.placement", "engine.sleep_level")
        do = "Set engine.sleep_level=1, or ppo.placement=separate."
        yield (
            "An engine that stays awake leaves no memory to the others.",
            keys,
            "engine.sleep_level=1 or 2",
            do,
        )
    if config.actor.backend == "megatron":
        keys = ("ppo.placement", "actor.backend")
        do = "Set ppo.placement=separate, or actor.backend=transformers."
        yield (
            "The ranks of a Megatron actor keep their places.",
            keys,
            "actor.backend=transformers",
            do,
        )
    if engine.replicas > 1 or ranks > 1:
        keys = ("ppo.placement", "engine.replicas", "engine.extra")
        do = "Set ppo.placement=separate, or one engine of one rank."
        yield (
            "The loop's process has one device, and engines have more.",
            keys,
            "one engine of one rank",
            do,
        )
    if engine.transfer == "broadcast":
        keys = ("ppo.placement", "engine.transfer")
        do = "Set engine.transfer=file."
        yield (
            "Two processes on one device can't broadcast to each other.",
            keys,
            "engine.transfer=file",
            do,
        )
    if config.report.compare_pairs:
        keys = ("ppo.placement", "report.compare_pairs")
        do = "Set one of the two to its default."
        yield (
            "The engine of a comparison would stand beside the run's own.",
            keys,
            "one of the two",
            do,
        )


def _image_contradictions(config: RunConfig) -> Iterator[tuple[str, tuple[str, ...], str, str]]:
    """The same for prompts with images."""
    if config.data.images is None:
        return
    beside = (
        ("actor.backend", "transformers", "The ranks of a Megatron actor have no vision tower."),
        ("engine.backend", "colocated", "Images travel to colocated engines only."),
        ("engine.runner", "v1", "Images never ran on vLLM's V2 model runner with draft heads."),
        (
            "model.critic_path",
            None,
            "Another critic would have a tower of its own, and the features are the actor's.",
        ),
        ("ppo.placement", "separate", "The vision tower takes no turns."),
        ("ppo.piece_prompts", None, "Prompts with images are asked for as a whole batch."),
        ("report.keep_rollouts", None, "Files of rollouts hold no images."),
    )
    for key, possible, problem in beside:
        section, name = key.split(".")
        if getattr(getattr(config, section), name) != possible:
            said = "null" if possible is None else possible
            yield (
                problem,
                ("data.images", key),
                f"{key}={said}",
                f"Set {key}={said}, or data.images=null.",
            )


def load_config(
    path: str | os.PathLike[str] | None = None, overrides: Sequence[str] = ()
) -> RunConfig:
    """Read a preset or a YAML file with what it extends, apply `key=value` overrides (dotted keys),
    and check the result.

    Raises:
        ConfigError: unknown key, wrong type, contradiction, unreadable file.
    """
    values = {} if path is None else read_file(located(os.fspath(path), Path()).expanduser())
    for pair in overrides:
        apply_override(values, pair, RunConfig)
    return build_config(
        {"ppo": {}} | values
    )  # What is read from a file or a command line is held to our loop's rules.


def build_config(values: Mapping[str, Any]) -> RunConfig:
    """Check a nested mapping and turn it into a RunConfig. Raises ConfigError."""
    refuse_old_keys(values)
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        raise as_config_error(error, RunConfig) from None


def known_keys() -> list[str]:
    """All dotted keys, in order."""
    return keys_of(RunConfig)
