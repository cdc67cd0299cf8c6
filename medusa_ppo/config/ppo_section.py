"""The section `ppo`: the reference PPO loop. docs/practice.md says when to use which option."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from medusa_ppo.config.section import (
    Contradiction,
    Count,
    NotNegative,
    Positive,
    Section,
    Text,
)

MASK, ATTENTION = "mask", "attention"
SEPARATE, SWAPPED, IN_TURN, SHARED = "separate", "swapped", "in_turn", "shared"


class PPOConfig(Section):
    """The reference PPO loop."""

    steps: Count = 16
    """PPO steps of the run, each with its own rollout batch. Set it to how long you want to
    train.
    """
    prompts_per_step: Count = 32
    """Prompts of a rollout batch; each has sampling.responses_per_prompt responses. Set it higher
    when metrics jump from step to step, or when engines idle.
    """
    staleness: int = Field(0, ge=0)
    """Maximum policy lag, in updates, between generating a batch and training on it. The engine
    writes that far ahead while the loop learns from earlier batches; this needs `importance_bound`.
    0: engine and update take turns. Set it to 1 when each has its own device and one waits for the
    other.
    """
    carry_after: float | None = Field(None, gt=0, lt=1)
    """Stop the engine when this share of a batch's prompts is answered; the others continue in the
    next step with its actor, at most `staleness` times (which leaves one step less for writing
    ahead); null: wait for all. Set it, with `staleness` of 1 or more, when a few long responses
    hold up the batch.
    """
    piece_prompts: Count | None = None
    """Prompts in a piece of the batch: a piece is scored as soon as all its responses have ended,
    while the engine writes the others; null: scoring begins when all have ended. Set it to a
    quarter or an eighth of `prompts_per_step` when engine and update have separate devices.
    """
    placement: Literal["separate", "swapped", "in_turn", "shared"] = "separate"
    """`separate`: actor, critic, reference and reward model keep their memory all the time.
    `swapped`: a reward model of the critic's sizes has no memory of its own, and uses that of the
    critic's weights while it scores. `in_turn`: one role at a time is on its device, and the others
    wait in host memory; engines have their own devices. `shared`: the roles take turns on the
    engines' devices while these sleep (engine.sleep_level), and wait in host memory while they
    generate; each rank of a Megatron actor shares its device with one engine rank. Set it to shared
    when there is only one GPU, or when all GPUs are to generate and to train; to in_turn when the
    roles do not fit on their devices together.
    """
    side_by_side: bool = False
    """The reference scores in parallel with actor and critic, and the critic learns in parallel
    with the actor, each with `threads` CPU threads. Set it on a CPU with cores to spare, with
    `threads` at half of them.
    """
    epochs: Count = 2
    """Passes over each rollout batch. Set it lower when `kl_update` grows, higher when rollouts
    take most of the time.
    """
    minibatch_size: Count = 32
    """Most responses in an optimizer step; a batch that is no multiple of it is split into equal
    parts. Set it higher when learning is noisy, lower for more optimizer steps from the same batch.
    """
    micro_batch_size: Count | None = None
    """Maximum responses in a forward pass; null: a whole minibatch. Set it lower when the update
    runs out of memory; apart from rounding, the result is the same.
    """
    micro_batch_tokens: Count | None = None
    """Maximum tokens in a forward pass: prompts, responses and padding; a longer sequence gets its
    own pass; null: no limit. Set it when lengths vary a lot: it limits memory better than
    `micro_batch_size`.
    """
    recompute: bool | Literal["attention"] = False
    """Keep only the input of each layer and recompute its activations in the backward pass: a third
    more time, much less memory. `attention`: only from queries to output, some percent less
    (actor.backend `megatron`). Set it when a micro-batch of one response does not fit.
    """
    reference_dtype: Literal["float32", "bfloat16"] | None = None
    """Number format of the reference's weights; null: as the actor's (float32; with actor.backend
    `megatron` model.dtype). Set it to bfloat16 to halve the reference's memory.
    """
    actor_learning_rate: Positive = 1e-5
    """AdamW learning rate of the actor. Set it lower for larger actors (1e-6 for billions of
    parameters), and when `kl_update` jumps.
    """
    critic_learning_rate: Positive = 1e-4
    """AdamW learning rate of the critic. Set it lower when `value_loss` does not fall, higher when
    the critic lags behind the actor.
    """
    learning_rate_schedule: Literal["linear", "cosine"] | None = None
    """How both learning rates fall, to zero after the last step; null: they stay constant. Set it
    for a smooth end of the run.
    """
    warmup_steps: Count | None = None
    """PPO steps over which both learning rates first rise from zero; null: none. Set it when the
    first steps do damage, e.g. with a critic that starts untrained.
    """
    advantages: Literal["gae", "grpo", "rloo"] = "gae"
    """What a token's advantage is: `gae` takes it from a critic; `grpo` and `rloo` from the other
    responses to the same prompt, without a critic. Set it to grpo or rloo when memory is short, or
    when the critic learns badly, with several responses to each prompt.
    """
    lam: float = Field(0.95, ge=0, le=1)
    """GAE's lambda: how much a token's advantage trusts later rewards over the critic; 1: only
    rewards. Set it to 1 when responses are short and have one reward at their end.
    """
    clip_range: Positive = 0.2
    """Clip of the policy ratio: how far one update may move a token's probability, as a share. Set
    it lower when `kl_update` jumps.
    """
    value_clip_range: Positive | None = 0.2
    """Clip of the critic's prediction around its prediction before the update, in
    `value_clip_unit`; null: no clip. Set it to null when rewards are much larger than 1 and the
    critic hardly moves.
    """
    value_clip_unit: Literal["reward", "returns"] = "reward"
    """Unit of that clip: the reward's own, or the standard deviation of the batch's returns. Set it
    to returns when you don't know the scale of the rewards.
    """
    kl_coefficient: NotNegative = 0.02
    """Weight of the KL penalty against the reference, in reward units per nat and token (`grpo`: in
    standard deviations of a group's rewards); with `kl_goal` the initial value. Set it higher when
    the actor drifts into nonsense that is rewarded, to 0 when it may drift freely.
    """
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    """How that KL is estimated from the sampled token, with d = log pi - log pi_ref: d, d^2 / 2, or
    exp(-d) - 1 + d. Set it to k3 with `kl_in_loss` for GRPO as in DeepSeekMath.
    """
    kl_in_loss: bool = False
    """Make the penalty a term of the loss (`k2` or `k3`) instead of a part of the reward. Set it
    for GRPO as in DeepSeekMath.
    """
    kl_goal: Positive | None = None
    """Target for the KL to the reference, in nats a token; `kl_coefficient` adapts to reach it, by
    up to a tenth each step; null: the coefficient is fixed. Set it when you know how far the actor
    may go, but not what that costs in reward.
    """
    kl_stop: Positive | None = None
    """End the actor's update when a minibatch's KL to the actor that wrote it, in nats a token,
    exceeds this; null: it never ends early. Set it to 0.01 or 0.02 when `kl_update` jumps.
    """
    entropy_coefficient: NotNegative = 0.0
    """Weight of the entropy bonus, per nat and token. Set it above 0 when `entropy` falls and all
    responses become alike.
    """
    clip_norm: Positive = 1.0
    """Largest gradient norm; actor and critic are clipped separately. Set it lower when single
    steps do damage.
    """
    importance_bound: Positive | None = None
    """Weight each token by pi / pi_engine, but at most by this (truncated importance sampling);
    null: every token has weight 1. Set it to 2 when the engine is in bfloat16 or quantised, and
    with `staleness`.
    """
    scale_rewards: bool = False
    """Divide rewards by their standard deviation over the run so far. Set it for reward models,
    whose scale is arbitrary.
    """
    length_penalty: NotNegative | None = None
    """Reward units subtracted for each token of a response; null: none. Set it when responses grow
    but nothing else improves.
    """
    cut_responses: Literal["mask"] | NotNegative | None = None
    """What to do with responses that were cut at sampling.max_new_tokens. `mask`: learn nothing
    from them; a number: subtract this many reward units; null: treat them like others. Set it to
    mask when the limit only saves time, to a number when ending in time is part of the task.
    """
    ptx_coefficient: Positive | None = None
    """Weight of the mean loss on the texts of data.ptx_path, added in each optimizer step of the
    actor; null: none. Set it together with data.ptx_path.
    """
    reward: Text = "medusa_ppo.ppo.rewards:exact_answer"
    """What judges a response: a Python function `module:function`, or the folder or hub name of a
    reward model. A response counts as right if its reward (with ppo.step_separator that of one of
    its steps) is at least 1, or at least the function's attribute `correct_from`. Set it to your
    own reward unless answers are compared with data.answer_column.
    """
    reward_processes: Count | None = None
    """Separate processes that call the reward function, each for one response at a time; null: the
    loop calls it itself. Set it when the function is slow or may hang, e.g. because it runs code.
    """
    reward_timeout_s: Positive | None = None
    """Time limit, in seconds, for the reward of one response (with `reward_processes`): after that
    its process is killed and the reward is 0; null: no limit. Set it when the function may hang.
    """
    reward_template: Text = "{prompt}{response}"
    """The text that a reward model reads. Set it to the format that the model was trained on, with
    its markers and end token.
    """
    reward_too_long: Literal["error", "cut"] = "error"
    """What to do with a text that has more tokens than the reward model can read. `error`: end the
    run. `cut`: drop the text's first tokens, never the last ones, which such models score, and
    count it in `rewards_cut`. Set it to cut when few responses are that long, or when prompts have
    long beginnings that matter little.
    """
    step_separator: Text | None = None
    """Text that ends a step of a response. Each step then has its own reward: the function returns
    a list, or the model is a token classifier; null: one reward for the whole response. Set it when
    your reward judges single steps.
    """
    eval_every: Count | None = None
    """Steps between two evaluations on data.eval_split; RUN/best keeps the best actor; null: never.
    Set it when you have prompts that are not trained on.
    """
    checkpoint_every: Count | None = 4
    """Steps between two saves of the run's state, which --resume reads; null: never. Set it to how
    many steps you could afford to lose; a save writes actor, critic and optimizer.
    """
    keep_checkpoints: Count | None = None
    """Keep this many of the last saves in RUN/checkpoints; null: only the newest. Set it when you
    may want to go back further than one save.
    """
    threads: Count | None = None
    """CPU threads of the update, per rank if the actor has several; null: all cores, divided among
    the ranks. Set it when other programs need cores, and with `side_by_side`.
    """

    @property
    def steps_ahead(self) -> int:
        """Steps that the engine writes ahead; of the allowed lag, one update is reserved for
        carrying over.
        """
        return self.staleness - (self.carry_after is not None)

    @property
    def judged_by_model(self) -> bool:
        """Whether a reward model judges, rather than a function."""
        return ":" not in self.reward

    def contradictions(self) -> Iterator[Contradiction]:
        micro = self.micro_batch_size or self.minibatch_size
        if self.minibatch_size % micro and micro < self.minibatch_size:
            yield Contradiction(
                "A minibatch must consist of whole micro-batches.",
                ("ppo.minibatch_size", "ppo.micro_batch_size"),
                "the first divisible by the second",
                "Change one of the two.",
            )
        if self.piece_prompts and self.piece_prompts > self.prompts_per_step:
            yield Contradiction(
                "A piece is larger than the batch.",
                ("ppo.piece_prompts", "ppo.prompts_per_step"),
                f"at most {self.prompts_per_step}",
                "Set a smaller ppo.piece_prompts, or null.",
            )
        yield from self._of_older_actors()
        yield from self._of_the_penalty()
        yield from self._of_rewards()
        if self.side_by_side and self.placement in (IN_TURN, SHARED):
            yield Contradiction(
                "Roles that take turns can't work in parallel.",
                ("ppo.side_by_side", "ppo.placement"),
                "one of the two",
                "Set ppo.side_by_side=false, or ppo.placement=separate.",
            )

        if self.placement == SWAPPED and (self.advantages != "gae" or not self.judged_by_model):
            yield Contradiction(
                "Only a reward model and a critic can share memory.",
                ("ppo.placement", "ppo.advantages", "ppo.reward"),
                "ppo.advantages=gae, and a reward model as ppo.reward",
                "Set ppo.placement=separate, or set both of them as expected.",
            )

    def _of_older_actors(self) -> Iterator[Contradiction]:
        if self.staleness and self.importance_bound is None:
            yield Contradiction(
                "An older actor's tokens need importance weights.",
                ("ppo.staleness", "ppo.importance_bound"),
                "ppo.importance_bound above 0",
                "Set ppo.importance_bound=2, or ppo.staleness=0.",
            )
        if self.staleness and self.piece_prompts is not None:
            yield Contradiction(
                "While the engine writes for later steps it can't do anything else.",
                ("ppo.staleness", "ppo.piece_prompts"),
                "one of the two",
                "Set ppo.staleness=0, or ppo.piece_prompts=null.",
            )
        if self.carry_after is not None and not self.staleness:
            yield Contradiction(
                "Carried-over responses were begun by an older actor.",
                ("ppo.carry_after", "ppo.staleness"),
                "ppo.staleness above 0",
                "Set ppo.staleness=1 or more, or ppo.carry_after=null.",
            )

    def _of_the_penalty(self) -> Iterator[Contradiction]:
        if self.kl_in_loss and self.kl_estimator == "k1":
            yield Contradiction(
                "In the loss, k1 has a gradient of zero on average.",
                ("ppo.kl_in_loss", "ppo.kl_estimator"),
                "ppo.kl_estimator=k2 or k3",
                "Set ppo.kl_estimator=k3, or ppo.kl_in_loss=false.",
            )
        if self.kl_goal and not self.kl_coefficient:
            yield Contradiction(
                "A coefficient of 0 stays 0, because it is adapted by multiplication.",
                ("ppo.kl_goal", "ppo.kl_coefficient"),
                "ppo.kl_coefficient above 0",
                "Set ppo.kl_coefficient above 0.",
            )

    def _of_rewards(self) -> Iterator[Contradiction]:
        if self.advantages != "gae" and self.step_separator:
            yield Contradiction(
                "Without a critic there can be no rewards for single steps.",
                ("ppo.advantages", "ppo.step_separator"),
                "ppo.advantages=gae",
                "Set ppo.advantages=gae, or ppo.step_separator=null.",
            )
        if self.reward_timeout_s is not None and self.reward_processes is None:
            yield Contradiction(
                "A time limit needs rewards in processes.",
                ("ppo.reward_timeout_s", "ppo.reward_processes"),
                "ppo.reward_processes",
                "Set ppo.reward_processes=1 or more.",
            )
        if self.reward_processes is not None and self.judged_by_model:
            yield Contradiction(
                "Reward models run in the loop, not in reward processes.",
                ("ppo.reward_processes", "ppo.reward"),
                "a reward module:function",
                "Set ppo.reward_processes=null.",
            )
