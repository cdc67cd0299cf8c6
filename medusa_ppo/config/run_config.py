"""The settings of a run: all sections together, the rules between them, and how they are read.

Each section has a file with its keys, their defaults and the rules among them. `null` is the only
way to write "none" or "automatic"; what then depends on the hardware is decided in
`medusa_ppo.runtime.hardware`. Fields that contradict each other fail at load. Nothing here imports
torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, field_validator

from heads.errors import ConfigError
from medusa_ppo.config.actor_section import (
    ALL_ROLES,
    CRITIC_ROLES,
    POLICY_ROLES,
    ActorConfig,
)
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
from medusa_ppo.config.ppo_section import ATTENTION, SHARED, SWAPPED, PPOConfig
from medusa_ppo.config.report_section import ReportConfig
from medusa_ppo.config.sampling_section import SamplingConfig
from medusa_ppo.config.section import Contradiction, Section, Text

OFF = ("companion.enabled=false", "engine.num_drafts=0")
"""Overrides that switch the plugin off: with only one of them the engine still starts with heads.
"""


class RunConfig(Section):
    """Everything that `medusa-ppo ppo` reads."""

    name: Text = "run"
    """Name of the run; its files go to OUT/NAME. Set it for each run: an existing run is not
    overwritten.
    """
    out: Text = "runs"
    """Folder of all runs. Set it to a disk with room for checkpoints; on a cluster all nodes must
    see it.
    """
    seed: int = 0
    """Seed of everything random: sampling, the order of prompts, new heads. Set it to
    several values to see how much of a result is chance.
    """
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
            raise ConfigError(
                "The run's folder would lie outside the folder of all runs.",
                given=f"name={name}",
                expected="a name",
                do="Give the run a plain name, and set its parent folder with out=FOLDER.",
            )
        return name

    @property
    def run_dir(self) -> Path:
        """Folder of the run's files."""
        return Path(self.out) / self.name

    @property
    def has_budget(self) -> bool:
        """Whether measured seconds decide how much the companion trains. They don't if the loop
        waits for it, since no run reproduces them, nor if the engine writes ahead, since phases
        then overlap.
        """
        return not (self.companion.wait or self.ppo.staleness)

    @property
    def seeds_requests(self) -> bool:
        """Whether requests have seeds: as `sampling.seeded` says, or if the run is reproducible
        because neither drafts nor heads follow the clock.
        """
        if self.sampling.seeded is not None:
            return self.sampling.seeded
        heads_wait = not self.companion.enabled or self.companion.wait
        return heads_wait and not self.engine.chooses_drafts

    @property
    def warm_up_tokens(self) -> int:
        """Tokens of the heads' warm-up before step 0; 0: there is none, because heads are trained,
        nothing trains them, the engine won't draft, or prompts have images.
        """
        untrained = not self.heads.path and self.companion.enabled
        wanted = untrained and self.engine.most_drafts != 0 and self.data.images is None
        return self.heads.warm_up_tokens if wanted else 0

    @property
    def critic_on_ranks(self) -> bool:
        """Whether there is a critic that the ranks of the Megatron actor hold."""
        return self.actor.roles != POLICY_ROLES and self.ppo.advantages == "gae"

    @property
    def reward_on_ranks(self) -> bool:
        """Whether there is a reward model that the ranks of the Megatron actor hold."""
        return self.actor.roles == ALL_ROLES and self.ppo.judged_by_model

    def contradictions(self) -> Iterator[Contradiction]:
        """Contradictions between sections; each section has already refused its own."""
        yield from _of_the_engine(self)
        yield from _of_what_is_learned(self)
        yield from _of_older_actors(self)
        yield from _of_a_megatron_actor(self)
        yield from _of_placement(self)
        yield from _of_images(self)


def _of_the_engine(config: RunConfig) -> Iterator[Contradiction]:
    """Settings that the engine can't fulfil."""
    engine = config.engine
    # Heads from a folder have their own number, which only the engine's start finds out.
    if not config.heads.path and (engine.most_drafts or 0) > config.heads.num_heads:
        yield Contradiction(
            "There are more drafts than heads.",
            ("engine.num_drafts", "heads.num_heads"),
            "engine.num_drafts <= heads.num_heads",
            "Train more heads or draft fewer tokens.",
        )
    need = config.data.max_prompt_tokens + config.sampling.max_new_tokens
    # Another loop supplies its own prompts, and sets none of these sections.
    ours = config.model_fields_set & {"data", "sampling", "ppo"}
    if ours and engine.max_model_len is not None and need > engine.max_model_len:
        yield Contradiction(
            "Prompts and responses do not fit into the engine.",
            ("data.max_prompt_tokens", "sampling.max_new_tokens"),
            f"together <= engine.max_model_len = {engine.max_model_len}",
            "Raise engine.max_model_len, leave it out, or shorten prompts or responses.",
        )
    if config.report.compare_pairs and engine.addresses:
        yield Contradiction(
            "A comparison starts its own engine without heads, which it can't do on your server.",
            ("report.compare_pairs", "engine.backend"),
            "engine.backend=colocated or server",
            "Set report.compare_pairs=null, or let the run start its engine.",
        )


def _of_what_is_learned(config: RunConfig) -> Iterator[Contradiction]:
    """Responses and texts that the update needs."""
    ppo = config.ppo
    data = config.data
    if ppo.advantages != "gae" and config.sampling.responses_per_prompt < 2:
        yield Contradiction(
            "A single response has no others to be compared with.",
            ("ppo.advantages", "sampling.responses_per_prompt"),
            "at least 2 responses to each prompt",
            "Raise sampling.responses_per_prompt.",
        )
    if ppo.advantages != "gae" and config.model.critic_path:
        yield Contradiction(
            "These advantages use no critic.",
            ("ppo.advantages", "model.critic_path"),
            "ppo.advantages=gae",
            "Set ppo.advantages=gae, or model.critic_path=null.",
        )
    if bool(ppo.ptx_coefficient) != bool(data.ptx_path):
        yield Contradiction(
            "Training on texts needs both the texts and their weight.",
            ("ppo.ptx_coefficient", "data.ptx_path"),
            "both or none",
            "Set both, or none.",
        )
    if ppo.eval_every and data.eval_path in (None, data.path) and data.eval_split == data.split:
        yield Contradiction(
            "The evaluation would use the training prompts.",
            ("data.split", "data.eval_path", "data.eval_split"),
            "other prompts",
            "Set data.eval_path or data.eval_split.",
        )


def _of_older_actors(config: RunConfig) -> Iterator[Contradiction]:
    """Responses of an older actor: written ahead, or carried over."""
    ppo = config.ppo
    engine = config.engine
    if ppo.staleness:
        busy = ["report.speed_every", "report.compare_pairs"]
        if ppo.steps_ahead > 0:
            busy += ["ppo.eval_every", "engine.sleep_level"]
        for key in busy:
            if config.value_of(key) is not None:
                yield Contradiction(
                    "While the engine writes for later steps it does nothing else.",
                    ("ppo.staleness", key),
                    "one of the two",
                    f"Set ppo.staleness=0, or {key}=null.",
                )
    alone = engine.backend == COLOCATED and engine.replicas == 1 and not config.data.images
    if ppo.carry_after is not None and not alone:
        yield Contradiction(
            "Only a single colocated engine can stop responses half-way, and only for prompts "
            "without images.",
            ("ppo.carry_after", "engine.backend", "engine.replicas", "data.images"),
            "one of the two",
            "Set ppo.carry_after=null, or the others to their defaults.",
        )


def _of_a_megatron_actor(config: RunConfig) -> Iterator[Contradiction]:
    """Settings that only one of the two actor backends supports."""
    ppo = config.ppo
    actor = config.actor
    sampling = config.sampling
    if actor.context_parallel > 1 and (sampling.top_k or sampling.top_p < 1):
        yield Contradiction(
            "Context parallelism splits sequences differently in each pass, so the top-k/top-p "
            "mask is lost.",
            ("actor.context_parallel", "sampling.top_k", "sampling.top_p"),
            "one of the two",
            "Set actor.context_parallel=1, or sample from all tokens.",
        )
    if actor.backend == "transformers":
        if ppo.recompute == ATTENTION:
            yield Contradiction(
                "transformers' attention keeps no activations that could be recomputed.",
                ("actor.backend", "ppo.recompute"),
                "ppo.recompute=true or false",
                "Set ppo.recompute=true, or actor.backend=megatron.",
            )
        return
    if ppo.side_by_side:
        yield Contradiction(
            "A Megatron actor's ranks already work in parallel with the critic.",
            ("ppo.side_by_side", "actor.backend"),
            "ppo.side_by_side=false",
            "Set ppo.side_by_side=false.",
        )
    if actor.roles == CRITIC_ROLES and ppo.advantages != "gae":
        yield Contradiction(
            "These advantages have no critic that the ranks could hold.",
            ("actor.roles", "ppo.advantages"),
            "ppo.advantages=gae, or actor.roles=policy or all",
            "Change one of the two.",
        )
    if config.reward_on_ranks and ppo.step_separator is not None:
        yield Contradiction(
            "The reward model of the ranks judges whole responses.",
            ("actor.roles", "ppo.step_separator"),
            "actor.roles=critic or policy, or ppo.step_separator=null",
            "Set actor.roles=critic: the reward model then stays in the loop's process.",
        )
    if ppo.placement == SWAPPED and actor.roles == CRITIC_ROLES:
        yield Contradiction(
            "The critic's memory is on the ranks, but the reward model is in the loop's process.",
            ("ppo.placement", "actor.roles"),
            "actor.roles=all or policy",
            "Set actor.roles=all, or ppo.placement=separate.",
        )


def _of_placement(config: RunConfig) -> Iterator[Contradiction]:
    """Rules for roles that take turns on the engine's device."""
    engine = config.engine
    if config.ppo.placement != SHARED:
        return
    if engine.sleep_level is None:
        yield Contradiction(
            "An engine that stays awake leaves no memory for the other roles.",
            ("ppo.placement", "engine.sleep_level"),
            "engine.sleep_level=1 or 2",
            "Set engine.sleep_level=1, or ppo.placement=separate.",
        )
    if engine.transfer == "broadcast":
        yield Contradiction(
            "Two processes on the same device can't broadcast to each other.",
            ("ppo.placement", "engine.transfer"),
            "engine.transfer=file",
            "Set engine.transfer=file.",
        )
    if config.report.compare_pairs:
        yield Contradiction(
            "The comparison's engine would share the device with the run's own.",
            ("ppo.placement", "report.compare_pairs"),
            "one of the two",
            "Set ppo.placement=separate, or report.compare_pairs=null.",
        )
    if config.actor.backend == "megatron":
        yield from _of_ranks_that_share(config)


def _of_ranks_that_share(config: RunConfig) -> Iterator[Contradiction]:
    """Rules for a Megatron actor whose ranks have engines on their devices."""
    engine = config.engine
    actor = config.actor
    if engine.replicas * engine.ranks != actor.ranks:
        yield Contradiction(
            f"The actor has {actor.ranks} ranks and the engines have"
            f" {engine.replicas * engine.ranks}, but each rank shares its device with one of"
            " theirs.",
            (
                "ppo.placement",
                "engine.replicas",
                "engine.extra",
                "actor.tensor_parallel",
                "actor.pipeline_parallel",
                "actor.context_parallel",
                "actor.data_parallel",
            ),
            f"engine.replicas times tensor_parallel_size = {actor.ranks}",
            f"Set engine.replicas={actor.ranks} without tensor_parallel_size, or fewer engines of"
            " more ranks; or ppo.placement=in_turn, with GPUs for the engines.",
        )
    if config.ppo.advantages == "gae" and not config.critic_on_ranks:
        yield Contradiction(
            "The critic would be in the loop's process, which has no device of its own.",
            ("ppo.placement", "actor.roles"),
            "actor.roles=critic or all",
            "Set actor.roles=critic, or ppo.placement=in_turn.",
        )
    if config.ppo.judged_by_model and not config.reward_on_ranks:
        yield Contradiction(
            "The reward model would be in the loop's process, which has no device of its own.",
            ("ppo.placement", "actor.roles", "ppo.reward"),
            "actor.roles=all",
            "Set actor.roles=all, or ppo.placement=in_turn.",
        )
    if engine.resource is not None:
        yield Contradiction(
            "Engines that share the ranks' devices are on the ranks' nodes.",
            ("ppo.placement", "engine.resource"),
            "engine.resource=null",
            "Set actor.resource instead.",
        )


def _of_images(config: RunConfig) -> Iterator[Contradiction]:
    """Settings that can't be combined with images."""
    if config.data.images is None:
        return
    if (
        config.actor.backend == "megatron"
        and config.ppo.advantages == "gae"
        and not config.critic_on_ranks
    ):
        yield Contradiction(
            "The vision tower is on the ranks of the Megatron actor, and the critic is not.",
            ("data.images", "actor.backend", "actor.roles"),
            "actor.roles=critic",
            "Set actor.roles=critic, or ppo.advantages=rloo.",
        )
    beside = (
        ("engine.backend", COLOCATED, "Only colocated engines can receive images."),
        (
            "engine.runner",
            "v1" if config.engine.runner == "v2" else config.engine.runner,
            "Images with draft heads were never run on vLLM's V2 model runner.",
        ),
        (
            "model.critic_path",
            None,
            "A different critic would need its own vision tower, but the features are the actor's.",
        ),
        ("ppo.placement", "separate", "The vision tower can't take turns on a device."),
        ("ppo.piece_prompts", None, "Prompts with images must be generated as a whole batch."),
        ("report.keep_rollouts", None, "Rollout files can't hold images."),
    )
    for key, possible, problem in beside:
        if config.value_of(key) != possible:
            said = "null" if possible is None else possible
            yield Contradiction(
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
    )  # Settings from a file or command line must follow our own loop's rules.


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
