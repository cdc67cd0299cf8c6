"""The memory of PPO's roles in each part of a step, in bytes (no torch).

Counted: weights, gradients, moments, and the optimizer's float32 weights if a model computes in
bfloat16. Not counted: the activations of passes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from heads.errors import ModelError
from medusa_ppo.config.model_section import EMBEDDED_ACTORS
from medusa_ppo.config.ppo_section import IN_TURN, SEPARATE, SHARED, SWAPPED
from medusa_ppo.config.run_config import RunConfig
from medusa_ppo.engines.launch import read_model_config
from medusa_ppo.runtime.hardware import BFLOAT16, FLOAT32, ModelSizes

ACTOR, REFERENCE, CRITIC, REWARD = "actor", "reference", "critic", "reward model"
ENGINE = "engine"
LOOP, RANK = "the PPO loop", "an actor rank"
WRITES = "the engine writes"
PARTS = (
    (WRITES, "", False),
    ("actor scores", ACTOR, False),
    ("reference scores", REFERENCE, False),
    ("critic scores", CRITIC, False),
    ("reward model judges", REWARD, False),
    ("actor learns", ACTOR, True),
    ("critic learns", CRITIC, True),
)
"""The parts of a step: name, the role that computes, and whether it learns."""


@dataclass(frozen=True)
class RoleBytes:
    """The bytes of a role in one process. A role without gradients doesn't learn."""

    role: str
    weights: int
    gradients: int = 0
    kept: int = 0

    @property
    def learning(self) -> int:
        """Its bytes while it learns."""
        return self.weights + self.gradients + self.kept


@dataclass(frozen=True)
class RoleMemory:
    """The roles of one process, or of several equal ones.

    Attributes:
        where: which process.
        placement: a value of ppo.placement.
        buffered: gradients have memory all the time, not only while they are computed.
        steps_on_copies: weights have 16 bits, and the optimizer works on float32 copies; the copies
            are a third of `kept`.
        engine: bytes of an engine that shares the process's device, while it is awake
            (ppo.placement=shared).
        pieces: roles score while that engine writes.
        together: actor and critic learn at the same time (ppo.side_by_side).
    """

    where: str
    placement: str
    roles: tuple[RoleBytes, ...]
    buffered: bool = False
    steps_on_copies: bool = False
    engine: int = 0
    pieces: bool = False
    together: bool = False

    def during(self, who: str, learns: bool) -> dict[str, int]:
        """Bytes of each role on the process's device while one of them computes; with an engine
        that shares the device, those of the engine too while it is awake.
        """
        awake = not who or (self.pieces and not learns)
        shares = {ENGINE: self.engine} if self.engine and awake else {}
        return self._roles_during(who, learns) | shares

    def _roles_during(self, who: str, learns: bool) -> dict[str, int]:
        if self.placement in (IN_TURN, SHARED):
            # While the engine writes, ranks still hold the weights that they last sent to it.
            given = not who and self.buffered and self.placement == IN_TURN
            return {
                role.role: role.learning
                if learns
                else role.weights + (role.kept // 3 if given and self.steps_on_copies else 0)
                for role in self.roles
                if role.role == (ACTOR if given else who)
            }
        found = {
            role.role: role.weights
            + role.kept
            + role.gradients * (self.buffered or (learns and (self.together or role.role == who)))
            for role in self.roles
        }
        if self.placement == SWAPPED and REWARD in found:
            judge = found.pop(REWARD)
            if who == REWARD:
                found[CRITIC] -= min(judge, found[CRITIC])
                found[REWARD] = judge
        return found

    @property
    def parts(self) -> list[tuple[str, dict[str, int]]]:
        """The parts of a step that happen in this process, and the bytes of each role in them."""
        here = {role.role for role in self.roles}
        return [
            (what, self.during(who, learns))
            for what, who, learns in PARTS
            if not who or who in here
        ]

    @property
    def most(self) -> dict[str, int]:
        """The bytes of each role in the part of a step that takes the most memory."""
        alone = replace(self, engine=0)
        return max((found for _, found in alone.parts), key=lambda found: sum(found.values()))

    @property
    def waiting(self) -> int:
        """Bytes of the copies that roles keep in host memory."""
        if self.placement == SEPARATE:
            return 0
        if self.placement == SWAPPED:
            both = [role.weights for role in self.roles if role.role in (CRITIC, REWARD)]
            return sum(both) if len(both) > 1 else 0
        return sum(role.weights + role.kept for role in self.roles)


def role_memory(config: RunConfig, model: ModelSizes) -> tuple[RoleMemory, ...]:
    """The memory of the loop's process and of each rank of a Megatron actor, if they hold roles."""
    loop = list[RoleBytes]()
    ranks = list[RoleBytes]()
    megatron = config.actor.backend == "megatron"
    critic = critic_sizes(config, model)
    judge = reward_sizes(config)
    (ranks if megatron else loop).extend(
        [_learning(config, ACTOR, model.parameters, megatron), _reference(config, model)]
    )
    if critic is not None:
        on_ranks = config.critic_on_ranks
        (ranks if on_ranks else loop).append(
            _learning(config, CRITIC, scoring_parameters(critic), on_ranks)
        )
    if judge is not None:
        sizes, element = judge
        count = scoring_parameters(sizes) // (_cut(config) if config.reward_on_ranks else 1)
        (ranks if config.reward_on_ranks else loop).append(RoleBytes(REWARD, element * count))
    placement = config.ppo.placement
    pieces = config.ppo.piece_prompts is not None
    together = config.ppo.side_by_side
    here = RoleMemory(LOOP, placement, tuple(loop), pieces=pieces, together=together)
    found = [here] if loop else []
    if ranks:
        copies = config.model.dtype == "bfloat16"
        found.append(RoleMemory(RANK, placement, tuple(ranks), True, copies, pieces=pieces))
    return tuple(found)


def _cut(config: RunConfig) -> int:
    return config.actor.tensor_parallel * config.actor.pipeline_parallel


def _reference(config: RunConfig, model: ModelSizes) -> RoleBytes:
    if config.actor.backend != "megatron":
        element = BFLOAT16 if config.ppo.reference_dtype == "bfloat16" else FLOAT32
        return RoleBytes(REFERENCE, element * model.parameters)
    kind = config.ppo.reference_dtype or config.model.dtype
    element = BFLOAT16 if kind == "bfloat16" else FLOAT32
    return RoleBytes(REFERENCE, element * model.parameters // _cut(config))


def _learning(config: RunConfig, role: str, parameters: int, on_ranks: bool) -> RoleBytes:
    """The bytes of a role that learns: `kept` is two moments and, on ranks with bfloat16 weights,
    the optimizer's float32 copies; with a distributed optimizer, a share of both.
    """
    if not on_ranks:
        return RoleBytes(role, *(FLOAT32 * count * parameters for count in (1, 1, 2)))
    section = config.actor
    copies = config.model.dtype == "bfloat16"
    shares = (
        section.data_parallel * section.context_parallel if section.distributed_optimizer else 1
    )
    own = parameters // _cut(config)
    return RoleBytes(
        role,
        (BFLOAT16 if copies else FLOAT32) * own,
        FLOAT32 * own,
        FLOAT32 * (2 + copies) * own // shares,
    )


def critic_sizes(config: RunConfig, model: ModelSizes) -> ModelSizes | None:
    """Sizes of the critic; None if the advantages need no critic."""
    if config.ppo.advantages != "gae":
        return None
    if not config.model.critic_path:
        return model
    return ModelSizes.from_config(model_config(config.model.critic_path))


def reward_sizes(config: RunConfig) -> tuple[ModelSizes, int] | None:
    """Sizes of the reward model, and the bytes per parameter. None if there is no such model, or if
    its sizes can't be known.
    """
    if not config.ppo.judged_by_model:
        return None
    try:
        raw = model_config(config.ppo.reward)
        element = BFLOAT16 if raw.get("dtype") in ("bfloat16", "float16") else FLOAT32
        return ModelSizes.from_config(raw), element
    except ModelError:
        return None


def scoring_parameters(model: ModelSizes) -> int:
    """Number of parameters of a critic or reward model. Instead of an lm_head it has a layer with
    one output; a tied table stays, as its embedding.
    """
    return model.parameters - model.vocab * model.hidden * (not model.tied) + model.hidden


def model_config(path: str) -> dict[str, Any]:
    """config.json of a model. For an embedded actor it is made from its recipe, because its folder
    may not exist yet.
    """
    if path not in EMBEDDED_ACTORS:
        return read_model_config(path)
    # Loads torch, which only a plan for an embedded actor needs.
    from medusa_ppo.demo.pretraining import RECIPES
    from medusa_ppo.demo.task import build_tokenizer

    recipe = RECIPES[path]
    return {
        "model_type": "llama",
        "hidden_size": recipe.hidden_size,
        "num_hidden_layers": recipe.num_layers,
        "num_attention_heads": recipe.num_heads,
        "intermediate_size": recipe.grown_to or recipe.intermediate_size,
        "vocab_size": len(build_tokenizer()),
        "tie_word_embeddings": False,
    }
