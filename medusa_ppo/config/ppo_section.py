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
    """PPO steps of the run, each with a rollout batch of its own. Set it to how long you train."""
    prompts_per_step: Count = 32
    """Prompts of a rollout batch; each has sampling.responses_per_prompt responses. Set it higher
    when figures jump from step to step, or when engines are not busy.
    """
    staleness: int = Field(0, ge=0)
    """Most updates that the actor that wrote a batch may be behind the actor that learns from it.
    So far ahead the engine writes while earlier batches are learned from; it needs
    `importance_bound`. 0: engine and update take turns. Set it to 1 when both have devices of their
    own and one of them waits for the other.
    """
    carry_after: float | None = Field(None, gt=0, lt=1)
    """Share of a batch's prompts after whose responses the engine stops: the others go on in the
    next step with its actor, at most `staleness` times (so one step less is left for writing
    ahead); null: the engine waits for all. Set it, with `staleness` of 1 or more, when a few long
    responses hold up the batch.
    """
    piece_prompts: Count | None = None
    """Prompts in a piece of the batch: as soon as all responses of a piece have ended, it is scored
    while the engine writes the others; null: scoring begins when all have ended. Set it to a
    quarter or an eighth of `prompts_per_step` when engine and update have devices of their own.
    """
    placement: Literal["separate", "swapped", "in_turn", "shared"] = "separate"
    """`separate`: actor, critic, reference and reward keep their memory all the time. `swapped`: a
    reward model of the critic's sizes has none of its own, and stands in the memory of the critic's
    weights while it judges. `in_turn`: one role at a time is on its device, and the others wait in
    host memory; engines have devices of their own. `shared`: they take turns on the engine's device
    while it sleeps (engine.sleep_level), and wait in host memory while it writes. Set it to shared
    when one GPU must do for everything, to in_turn when the roles do not fit beside each other.
    """
    side_by_side: bool = False
    """The reference scores beside actor and critic, and the critic learns beside the actor, in a
    thread with as many CPU threads (`threads`). Set it on a CPU with cores to spare, with `threads`
    at half of them.
    """
    epochs: Count = 2
    """Passes over each rollout batch. Set it lower when `kl_update` grows, higher when rollouts
    take most of the time.
    """
    minibatch_size: Count = 32
    """Responses of an optimizer step. Set it higher when learning is noisy, lower for more
    optimizer steps from the same batch.
    """
    micro_batch_size: Count | None = None
    """Most responses in a forward pass; null: a whole minibatch. Set it lower when the update runs
    out of memory; what is learned stays the same but for rounding.
    """
    micro_batch_tokens: Count | None = None
    """Most tokens in a forward pass: prompts, responses and padding; a longer sequence goes alone;
    null: no bound. Set it when lengths differ much: it bounds memory better than
    `micro_batch_size`.
    """
    recompute: bool | Literal["attention"] = False
    """Keep only the input of each layer and compute its activations again in the backward pass: a
    third more time, much less memory. `attention`: compute only what lies between queries and
    output again (actor.backend `megatron`). Set it when a micro-batch of one response does not fit.
    """
    reference_dtype: Literal["float32", "bfloat16"] | None = None
    """Number format of the reference's weights; null: as the actor's (float32; with actor.backend
    `megatron` model.dtype). Set it to bfloat16 to halve the reference's memory.
    """
    actor_learning_rate: Positive = 1e-5
    """AdamW step size of the actor. Set it lower for larger actors (1e-6 for billions of
    parameters), and when `kl_update` jumps.
    """
    critic_learning_rate: Positive = 1e-4
    """AdamW step size of the critic. Set it lower when `value_loss` does not fall, higher when the
    critic is behind the actor.
    """
    learning_rate_schedule: Literal["linear", "cosine"] | None = None
    """How both step sizes fall, to zero after the last step; null: they stay. Set it when the end
    of a run is to be quiet.
    """
    warmup_steps: Count | None = None
    """PPO steps in which both step sizes rise from zero first; null: none. Set it when the first
    steps do damage, e.g. with a critic that starts untrained.
    """
    advantages: Literal["gae", "grpo", "rloo"] = "gae"
    """What a token's advantage is: `gae` takes it from a critic; `grpo` and `rloo` from the other
    responses to the same prompt, without a critic. Set it to grpo or rloo when memory is short, or
    when the critic learns badly, with several responses to each prompt.
    """
    lam: float = Field(0.95, ge=0, le=1)
    """GAE's lambda: how much a token's advantage trusts later rewards over the critic; 1: rewards
    alone. Set it to 1 when responses are short and have one reward at their end.
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
    to returns when nobody knows how large rewards are.
    """
    kl_coefficient: NotNegative = 0.02
    """Weight of the KL penalty against the reference, in reward units for each nat of a token; with
    `kl_goal` the one that the run begins with. Set it higher when the actor drifts into nonsense
    that is rewarded, to 0 when it may go anywhere.
    """
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    """How that KL is estimated from the sampled token, with d = log pi - log pi_ref: d, d^2 / 2, or
    exp(-d) - 1 + d. Set it to k3 with `kl_in_loss` for GRPO as DeepSeekMath has it.
    """
    kl_in_loss: bool = False
    """The penalty is a term of the loss (`k2` or `k3`) instead of a part of the reward. Set it for
    GRPO as DeepSeekMath has it.
    """
    kl_goal: Positive | None = None
    """KL to the reference, in nats a token, that `kl_coefficient` is moved towards, by up to a
    tenth each step; null: the coefficient is fixed. Set it when you know how far the actor may go,
    but not what that costs in reward.
    """
    kl_stop: Positive | None = None
    """KL of a minibatch to the actor that wrote it, in nats a token, above which the actor's update
    ends; null: it never ends early. Set it to 0.01 or 0.02 when `kl_update` jumps.
    """
    entropy_coefficient: NotNegative = 0.0
    """Weight of the entropy bonus, for each nat of a token. Set it above 0 when `entropy` falls and
    all responses become alike.
    """
    clip_norm: Positive = 1.0
    """Largest gradient norm; actor and critic are clipped each by itself. Set it lower when single
    steps do damage.
    """
    importance_bound: Positive | None = None
    """Weigh each token by pi / pi_engine, but at most by this (truncated importance sampling);
    null: every token weighs 1. Set it to 2 when the engine is in bfloat16 or quantised, and with
    `staleness`.
    """
    scale_rewards: bool = False
    """Divide rewards by their standard deviation over the run so far. Set it for reward models,
    whose scale nobody chose.
    """
    length_penalty: NotNegative | None = None
    """Reward units taken off for each token of a response; null: none. Set it when responses grow
    and nothing else does.
    """
    cut_responses: Literal["mask"] | NotNegative | None = None
    """What becomes of responses that were cut at sampling.max_new_tokens. `mask`: nothing is
    learned from them; a number: so many reward units are taken off; null: they are like others. Set
    it to mask when the limit only saves time, to a number when ending in time is part of the task.
    """
    ptx_coefficient: Positive | None = None
    """Weight of the mean loss on the texts of data.ptx_path, added in each optimizer step of the
    actor; null: none. Set it together with data.ptx_path.
    """
    reward: Text = "medusa_ppo.ppo.rewards:exact_answer"
    """What judges a response: a Python function `module:function`, or the folder or hub name of a
    reward model. A response counts as right from a reward of 1 on, or from the function's attribute
    `correct_from`. Set it to your own reward unless answers are compared with data.answer_column.
    """
    reward_processes: Count | None = None
    """Processes beside the loop that call the reward function, one response each at a time; null:
    the loop calls it itself. Set it when the function takes long or may hang, e.g. because it runs
    code.
    """
    reward_timeout_s: Positive | None = None
    """Seconds for the reward of one response (with `reward_processes`): after that its process is
    ended, and the reward is 0; null: no limit. Set it when the function may hang.
    """
    reward_template: Text = "{prompt}{response}"
    """The text that a reward model reads. Set it to the form that the model was trained on, with
    its marks and its end token.
    """
    reward_too_long: Literal["error", "cut"] = "error"
    """What becomes of a text that has more tokens than the reward model reads. `error`: the run
    ends. `cut`: the text loses its first tokens, never the last ones, where such models look, and
    is counted in `rewards_cut`. Set it to cut when few responses are so long, or prompts have long
    beginnings that say little.
    """
    step_separator: Text | None = None
    """Text that ends a step of a response, each of which has a reward of its own: the function
    returns a list, the model is a token classifier; null: one reward for the whole response. Set it
    when your reward judges single steps.
    """
    eval_every: Count | None = None
    """Steps between two evaluations on data.eval_split, the best of which is kept in RUN/best;
    null: never. Set it when you have prompts that are not trained on.
    """
    checkpoint_every: Count | None = 4
    """Steps between two saves of the run's state, which --resume reads; null: never. Set it so that
    losing so many steps would not hurt; a save takes the time to write actor, critic and optimizer.
    """
    keep_checkpoints: Count | None = None
    """Keep this many of the last saves in RUN/checkpoints; null: only the newest is there. Set it
    when you may want to go back further than one save.
    """
    threads: Count | None = None
    """CPU threads of the update, in each rank where the actor has several; null: all cores, divided
    among them. Set it when other programs need cores, and with `side_by_side`.
    """

    @property
    def steps_ahead(self) -> int:
        """Steps that the engine writes ahead: of the updates that a token may be behind, one is for
        being carried over.
        """
        return self.staleness - (self.carry_after is not None)

    @property
    def judged_by_model(self) -> bool:
        """A reward model judges, and no function."""
        return ":" not in self.reward

    def contradictions(self) -> Iterator[Contradiction]:
        micro = self.micro_batch_size or self.minibatch_size
        if self.minibatch_size % micro and micro < self.minibatch_size:
            yield Contradiction(
                "A minibatch must be made of whole micro batches.",
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
                "Roles that take turns can't work at once.",
                ("ppo.side_by_side", "ppo.placement"),
                "one of the two",
                "Set ppo.side_by_side=false, or ppo.placement=separate.",
            )

        if self.placement == SWAPPED and (self.advantages != "gae" or not self.judged_by_model):
            yield Contradiction(
                "Only a reward model and a critic can stand in the same memory.",
                ("ppo.placement", "ppo.advantages", "ppo.reward"),
                "ppo.advantages=gae, and a reward model as ppo.reward",
                "Set ppo.placement=separate, or both of them.",
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
                "While the engine writes for later steps it does nothing else.",
                ("ppo.staleness", "ppo.piece_prompts"),
                "one of the two",
                "Set ppo.staleness=0, or ppo.piece_prompts=null.",
            )
        if self.carry_after is not None and not self.staleness:
            yield Contradiction(
                "What is carried over was begun by an older actor.",
                ("ppo.carry_after", "ppo.staleness"),
                "ppo.staleness above 0",
                "Set ppo.staleness=1 or more, or ppo.carry_after=null.",
            )

    def _of_the_penalty(self) -> Iterator[Contradiction]:
        if self.kl_in_loss and self.kl_estimator == "k1":
            yield Contradiction(
                "As a term of the loss k1 has no gradient on average.",
                ("ppo.kl_in_loss", "ppo.kl_estimator"),
                "ppo.kl_estimator=k2 or k3",
                "Set ppo.kl_estimator=k3, or ppo.kl_in_loss=false.",
            )
        if self.kl_goal and not self.kl_coefficient:
            yield Contradiction(
                "A coefficient of 0 stays 0, whatever it is multiplied by.",
                ("ppo.kl_goal", "ppo.kl_coefficient"),
                "ppo.kl_coefficient above 0",
                "Set the second.",
            )

    def _of_rewards(self) -> Iterator[Contradiction]:
        if self.advantages != "gae" and self.step_separator:
            yield Contradiction(
                "Without a critic there are no rewards of single steps.",
                ("ppo.advantages", "ppo.step_separator"),
                "ppo.advantages=gae",
                "Set ppo.advantages=gae, or ppo.step_separator=null.",
            )
        if self.reward_timeout_s is not None and self.reward_processes is None:
            yield Contradiction(
                "Only a process can be ended when its time is over.",
                ("ppo.reward_timeout_s", "ppo.reward_processes"),
                "ppo.reward_processes",
                "Set ppo.reward_processes=1 or more.",
            )
        if self.reward_processes is not None and self.judged_by_model:
            yield Contradiction(
                "A reward model is computed by the loop, not in processes.",
                ("ppo.reward_processes", "ppo.reward"),
                "a reward module:function",
                "Set ppo.reward_processes=null.",
            )
