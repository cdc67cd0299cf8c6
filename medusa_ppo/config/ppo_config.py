"""The section `ppo` of a run's settings, and what contradicts each other in the reference PPO loop.
docs/practice.md says when to use which option (no torch).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from medusa_ppo.config.config_file import Count, Section, Text

if TYPE_CHECKING:  # It reads this file.
    from medusa_ppo.config.run_config import RunConfig


Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
MASK, ATTENTION = "mask", "attention"


class PPOConfig(Section):
    """The reference PPO loop."""

    steps: Count = 16
    """PPO steps (rollout batches)."""
    prompts_per_step: Count = 32
    """Prompts per rollout batch."""
    staleness: int = Field(0, ge=0)
    """Most updates that the actor that wrote a batch may be behind the one that learns from it: so
    far ahead the engine writes while others are learned from (with `importance_bound`); 0: one
    after the other.
    """
    carry_after: float | None = Field(None, gt=0, lt=1)
    """Share of a batch's prompts after whose answers the engine stops: the others go on in the next
    step, with its actor, at most `staleness` times (of which one less is left for writing ahead);
    null: it waits for all.
    """
    piece_prompts: Count | None = None
    """Prompts of a piece of the batch: pieces whose responses have all ended are scored while the
    engine writes the others; null: the whole batch is scored when all have ended.
    """
    placement: Literal["separate", "shared"] = "separate"
    """`separate`: every role keeps its memory; `shared`: actor, critic, reference and reward take
    turns on the engine's device while it sleeps (`engine.sleep_level`), and wait in host memory
    while it writes.
    """
    side_by_side: bool = False
    """The reference scores beside actor and critic, and the critic learns beside the actor, in a
    thread with `threads` of its own.
    """
    epochs: Count = 2
    """Passes over each rollout batch."""
    minibatch_size: Count = 32
    """Responses per optimizer step."""
    micro_batch_size: Count | None = None
    """Responses per forward pass, at most; null: a whole minibatch."""
    micro_batch_tokens: Count | None = None
    """Tokens per forward pass, at most: prompts, responses and padding; a longer sequence goes
    alone. null: as many as there are.
    """
    recompute: bool | Literal["attention"] = False
    """Of each layer keep the input alone, and make its activations again in the backward pass: a
    third more time, much less memory. `attention`: make again what lies between its queries and its
    output only (actor.backend `megatron`).
    """
    reference_dtype: Literal["float32", "bfloat16"] | None = None
    """Dtype of the reference's weights; null: as the actor's (float32; with actor.backend
    `megatron` model.dtype).
    """
    actor_learning_rate: Positive = 1e-5
    """AdamW step size of the actor."""
    critic_learning_rate: Positive = 1e-4
    """AdamW step size of the critic."""
    learning_rate_schedule: Literal["linear", "cosine"] | None = None
    """How both step sizes fall, to zero after the last step; null: they stay."""
    warmup_steps: Count | None = None
    """PPO steps in which both step sizes rise from zero first; null: none."""
    advantages: Literal["gae", "grpo", "rloo"] = "gae"
    """What a token's advantage is: `gae` from a critic; `grpo` and `rloo` from the other responses
    to the same prompt, without one.
    """
    gamma: float = Field(1.0, gt=0, le=1)
    """Discount per token (`gae`)."""
    lam: float = Field(0.95, ge=0, le=1)
    """GAE lambda."""
    clip_range: Positive = 0.2
    """Clip of the policy ratio."""
    value_clip_range: Positive | None = 0.2
    """Clip of the value prediction around the old one; null: none."""
    value_clip_unit: Literal["reward", "returns"] = "reward"
    """Unit of that clip: the reward's own, or the standard deviation of the batch's returns."""
    kl_coefficient: NotNegative = 0.02
    """Weight of the per-token KL penalty against the reference, in reward units; with `kl_goal` the
    first one.
    """
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    """Estimate of that KL from the sampled token, d = log pi - log pi_ref: d, d^2 / 2, or exp(-d) -
    1 + d.
    """
    kl_in_loss: bool = False
    """The penalty is a term of the loss (`k2` or `k3`) and not a part of the reward."""
    kl_goal: Positive | None = None
    """Mean KL a token, in nats, that the coefficient is moved towards, by up to a tenth each step;
    null: it is fixed.
    """
    kl_stop: Positive | None = None
    """Mean KL of a minibatch to the actor of the rollouts, in nats, above which an update of the
    actor ends; null: it never ends early.
    """
    entropy_coefficient: NotNegative = 0.0
    """Weight of the entropy bonus."""
    clip_norm: Positive = 1.0
    """Largest gradient norm of actor and critic, each clipped by itself."""
    importance_bound: Positive | None = None
    """Weigh each token by pi / pi_engine, at most this (truncated importance sampling); null:
    weights of 1.
    """
    scale_rewards: bool = False
    """Divide rewards by their standard deviation over the run so far."""
    length_penalty: NotNegative | None = None
    """Reward units taken off for each token of a response; null: none."""
    cut_responses: Literal["mask"] | NotNegative | None = None
    """What becomes of responses cut at the length limit: `mask`: nothing is learned from them; a
    number: so much reward is taken off; null: they are like others.
    """
    ptx_coefficient: Positive | None = None
    """Weight of the mean loss on the texts of data.ptx_path, added to each optimizer step of the
    actor; null: none.
    """
    reward: Text = "medusa_ppo.ppo.rewards:exact_answer"
    """Python callable `module:function`, or the folder or hub name of a reward model. A callable's
    answers are right from a reward of 1 on, or of its attribute `correct_from`.
    """
    reward_processes: Count | None = None
    """Processes beside the loop that call a reward function, one response each at a time; null: it
    is called in the loop's own thread.
    """
    reward_timeout_s: Positive | None = None
    """Seconds for the reward of one response (with `reward_processes`): then its process is ended,
    and the reward is 0; null: any.
    """
    reward_template: Text = "{prompt}{response}"
    """What a reward model reads, as in its training: with its marks and its end token."""
    step_separator: Text | None = None
    """Each step of a response, up to this text, has a reward of its own: a callable returns a list,
    a model is a token classifier; null: one reward for the whole response.
    """
    eval_every: Count | None = None
    """Steps between two evaluations on data.eval_split, the best of which is kept in RUN/best;
    null: never.
    """
    checkpoint_every: Count | None = 4
    """Steps between two saves of the run's state (for --resume); null: never."""
    keep_checkpoints: Count | None = None
    """Keep so many of the last saves in RUN/checkpoints as well; null: only the newest is there."""
    threads: Count | None = None
    """CPU threads of the update, of each rank where the actor has several; null: all cores, shared
    among them.
    """

    @property
    def steps_ahead(self) -> int:
        """Steps that the engine writes ahead: of the updates that a token may be behind, one is for
        being carried over.
        """
        return self.staleness - (self.carry_after is not None)


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
