"""The section `ppo`: the reference PPO loop. docs/practice.md says when to use which option."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from medusa_ppo.config.section import Count, Section, Text

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
