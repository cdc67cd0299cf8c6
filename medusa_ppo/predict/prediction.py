"""What drafting would gain: the time of rollouts and steps, the best number of drafts by running
sequences, the acceptance above which it pays, and how certain all that is.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from heads.errors import ConfigError, ModelError, UsageError
from heads.heads_config import HeadsConfig
from medusa_ppo.predict.draft_work import HeadsDrafter
from medusa_ppo.predict.gpus import GpuFigures
from medusa_ppo.predict.measured_tables import operator_times
from medusa_ppo.predict.rollout_model import ResponseLengths, RolloutModel, octaves
from medusa_ppo.predict.step_costs import StepCosts, varied
from medusa_ppo.predict.step_model import GpuSteps, Steps
from medusa_ppo.runtime.hardware import BFLOAT16, ModelSizes

MODEL_ERROR = 0.10
"""Mean absolute error of predicted speed-ups, on published cases that the fit did not see (`python
benchmarks/predict_published.py`); it is part of every interval.
"""
MEMORY_SHARE = 0.9
"""Share of a GPU for weights and KV cache: vLLM's default."""
OTHER_BYTES = 4 * 2**30
"""Bytes of a GPU's memory that CUDA, graphs and activations take."""
TRAIN_SHARE = 0.4
"""Share of a GPU's FLOP/s that scoring and updates reach."""
SWAP_S = 0.3
"""Seconds that a swap takes besides moving the heads: checks, tables, a pause between two steps."""
Runner = Literal["v1", "v2"]
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


@dataclass(frozen=True)
class Interval:
    """A figure with its interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f} to {self.high:.2f})"


@dataclass(frozen=True)
class LoopWork:
    """What a step does besides its rollouts.

    Attributes:
        seconds: measured or given; None: estimated from its FLOPs.
        forwards: passes that score a batch (actor, reference, critic).
        updates: models that learn from it.
        epochs: passes over the batch in an update.
    """

    seconds: float | None = None
    forwards: int = 2
    updates: int = 1
    epochs: int = 1


@dataclass(frozen=True)
class Question:
    """What to predict.

    Attributes:
        name: the model's name as given.
        model: its sizes.
        heads: the heads' sizes.
        acceptance: acceptance at each position, falling.
        acceptance_said: where it comes from, in words.
        acceptance_error: half the width of the mean acceptance length's interval; 0: the user gave
            the acceptance.
        lengths: lengths of one engine's responses.
        sequences: maximum number that run at once (vLLM's max_num_seqs).
        prompt: tokens of a prompt.
        alike: responses per prompt, which is prefilled once for all of them.
        ranks: GPUs of an engine (tensor parallel).
        runner: vLLM's model runner; None: V2, and V1 for an engine of several GPUs.
        engines: number of equal engines, each with such lengths.
        drafts: drafts in every step; None: the best number for however many sequences run.
        width: number of tokens that drafts come from; 0: all.
        loop: the rest of a step.
        longest: tokens that fit in the model's context; None: unknown.
    """

    name: str
    model: ModelSizes
    heads: HeadsConfig
    acceptance: tuple[float, ...]
    lengths: ResponseLengths
    acceptance_said: str = "given"
    acceptance_error: float = 0.0
    sequences: int = 256
    prompt: int = 512
    alike: int = 1
    ranks: int = 1
    runner: Runner | None = None
    engines: int = 1
    drafts: int | None = None
    width: int = 0
    loop: LoopWork = LoopWork()
    longest: int | None = None

    def __post_init__(self) -> None:
        check_acceptance(self.acceptance, self.heads.num_heads)
        longest = self.prompt + max(self.lengths.tokens)
        if self.longest is not None and longest > self.longest:
            raise UsageError(
                "Responses are longer than the model can hold.",
                given=f"a prompt of {self.prompt} and a response of {max(self.lengths.tokens)}",
                expected=f"at most {self.longest} tokens together",
                do="Give shorter lengths: --length-mean, --longest, --lengths or --prompt.",
            )
        if self.model.heads % self.ranks or self.ranks < 1:
            raise UsageError(
                "The attention can't be split among that many GPUs.",
                given=f"--tp {self.ranks}, {self.model.heads} attention heads",
                expected="a number of GPUs that divides the number of attention heads",
                do="Correct --tp.",
            )
        if self.drafts is not None and not 0 <= self.drafts <= len(self.acceptance):
            raise UsageError(
                "The acceptance does not cover that many drafts.",
                given=f"--drafts {self.drafts}, acceptance at {len(self.acceptance)} positions",
                expected=f"0 to {len(self.acceptance)}",
                do="Give one share for each draft.",
            )

    @property
    def runs_on(self) -> Runner:
        """As our engines choose it: V2 was not run with several ranks."""
        return self.runner or ("v1" if self.ranks > 1 else "v2")

    @property
    def acceptance_length(self) -> float:
        """Mean acceptance length when every head drafts."""
        return 1.0 + sum(self.acceptance)


def check_acceptance(shares: Sequence[float], heads: int) -> None:
    """Check the acceptance at each position.

    Raises:
        UsageError: one is not a share, they rise, or there are more of them than heads.
    """
    falling = all(a >= b for a, b in pairwise(shares))
    if shares and falling and all(0 <= share <= 1 for share in shares) and len(shares) <= heads:
        return
    problem = (
        "There is acceptance at more positions than there are heads."
        if len(shares) > heads
        else "The acceptance at each position must be between 0 and 1 and must not rise."
    )
    raise UsageError(
        problem,
        given=f"acceptance {','.join(f'{share:g}' for share in shares) or 'of nothing'}",
        expected=f"at most {heads} falling shares, like 0.6,0.4,0.3,0.2",
        do="Take them from `medusa-ppo eval` (`acceptance per position`).",
    )


def read_sizes(raw: Mapping[str, Any]) -> tuple[ModelSizes, int | None]:
    """The model's sizes, and the tokens that fit in its context.

    Raises:
        ModelError: a size is missing, or the model is a mixture of experts.
    """
    text = {**raw, **(raw.get("text_config") or {})}
    if any(text.get(key) for key in EXPERTS):
        raise ModelError(
            "Mixtures of experts can't be predicted: the cost of verification depends on how many "
            "experts the rows of a step share, and no table has that.",
            given=f"{text.get('model_type')}: {_mixture(text)}",
            expected="a dense model",
            do="Measure it: `medusa-ppo bench rollout` on your GPU.",
        )
    longest = text.get("max_position_embeddings") or text.get("n_positions")
    return ModelSizes.from_config(raw), int(longest) if longest else None


def _mixture(text: Mapping[str, Any]) -> str:
    """Total and active parameters of a mixture of experts, as far as its sizes say."""
    experts = next(int(text[key]) for key in EXPERTS if text.get(key))
    active = int(text.get("num_experts_per_tok") or text.get("top_k_experts") or 1)
    without = {key: value for key, value in text.items() if key not in EXPERTS}
    inner = text.get("moe_intermediate_size") or text.get("intermediate_size")
    try:
        dense = ModelSizes.from_config({**without, "intermediate_size": inner})
    except ModelError:
        return f"{experts} experts, {active} of them active"
    one = dense.layers * 3 * dense.hidden * dense.intermediate
    rest = dense.parameters - one
    return (
        f"about {(rest + experts * one) / 1e9:.1f} B parameters in all,"
        f" {(rest + active * one) / 1e9:.1f} B of them active"
    )


@dataclass(frozen=True)
class SizeRow:
    """What each number of drafts gains at this many running sequences.

    Attributes:
        sequences: how many run.
        speedups: tokens/s over vLLM's plain step, with 1, 2, ... drafts.
        best: number of drafts that gains most; 0: none is faster than vLLM's plain step.
        pays_from: mean acceptance length above which the fastest number of drafts pays.
        without_drafts: tokens/s over vLLM's plain step of an engine with heads that drafts nothing,
            which is what it chooses if no number of drafts is faster than that.
    """

    sequences: int
    speedups: tuple[float, ...]
    best: int
    pays_from: float
    without_drafts: float


@dataclass(frozen=True)
class Prediction:
    """The answer. Times are those of one engine's rollout and of a whole step.

    Attributes:
        speedup: time of rollouts without drafts / with drafts.
        plain_s, drafted_s: seconds of a rollout, including prompts.
        tail_share: share of the plain rollout's time with fewer than half of the slots in use.
        tail_speedup: speed-up in that part.
        pays_from: mean acceptance length above which rollouts are faster; None: never.
        step, async_step: time of a step without drafts / with drafts, if rollouts and the rest
            follow each other, and if they run at the same time; None: the rest is unknown.
        other_s: the rest of a step.
        slots, drafted_slots: sequences that fit at once, without and with drafting.
        rows: by running sequences.
        source: where the seconds of operations come from.
        assumptions: every number that was assumed.
    """

    question: Question
    machine: str
    speedup: Interval
    plain_s: float
    drafted_s: float
    mean_drafts: float
    tail_share: float
    tail_speedup: float
    pays_from: float | None
    step: Interval | None
    async_step: Interval | None
    other_s: float | None
    slots: int
    drafted_slots: int
    rows: tuple[SizeRow, ...]
    source: str
    assumptions: dict[str, Any]

    @property
    def sentence(self) -> str:
        """The answer that a reader wants first."""
        asked = self.question
        faster = f"rollouts {self.speedup} times as fast"
        step = f", a step {self.step.value:.2f}" if self.step else ""
        pays = (
            f"it pays from {self.pays_from:.2f} on"
            if self.pays_from is not None
            else "it never pays"
        )
        return (
            f"With {asked.name} on {self.machine}, {len(asked.lengths.tokens)} responses of"
            f" {asked.lengths.mean:,.0f} tokens: {faster}{step}, at"
            f" {asked.acceptance_length:.2f} tokens per engine step; {pays}."
        )

    def to_json(self) -> dict[str, Any]:
        """Everything as plain values."""
        values = dataclasses.asdict(self)
        question = values.pop("question")
        question["lengths"] = {
            "said": self.question.lengths.said,
            "count": len(self.question.lengths.tokens),
            "mean": self.question.lengths.mean,
            "longest": max(self.question.lengths.tokens),
        }
        return {"sentence": self.sentence, "asked": question, **values}


def predict_on_gpu(
    question: Question, gpu: GpuFigures, costs: StepCosts | None = None, *, tables: bool = True
) -> Prediction:
    """The prediction for engines on such GPUs."""
    costs = costs or StepCosts()
    drafter = HeadsDrafter(question.heads, question.width or question.model.vocab)

    def steps_at(at: StepCosts) -> Steps:
        times = operator_times(gpu, at, tables=tables)
        return GpuSteps(question.model, drafter, times, question.ranks, question.runs_on)

    slots = sequences_that_fit(question, gpu, 0.0)
    drafted_slots = sequences_that_fit(question, gpu, drafter.kept_bytes(question.sequences))
    other = question.loop.seconds
    if other is None:
        gpus = question.ranks * question.engines
        other = _arithmetic_seconds(question, gpus * gpu.flops * TRAIN_SHARE)
    several = f"{question.ranks} {gpu.name.upper()}s" if question.ranks > 1 else gpu.name.upper()
    machine = f"{'one ' if question.ranks == 1 else ''}{several}" + (
        f", {question.engines} engines" * (question.engines > 1)
    )
    machine += f" (vLLM's {question.runs_on.upper()} runner)"
    swap = SWAP_S + BFLOAT16 * drafter.parameters / gpu.host_bytes_per_s
    return _answer(
        question,
        machine,
        steps_at(costs),
        [(steps_at(low), steps_at(high)) for _, low, high in varied(costs)],
        (slots, drafted_slots),
        other,
        swap,
        {
            "gpu": dataclasses.asdict(gpu),
            "costs": dataclasses.asdict(costs),
            "memory_share": MEMORY_SHARE,
            "other_bytes": OTHER_BYTES,
            "train_share": TRAIN_SHARE,
            "swap_s": swap,
            "model_error": MODEL_ERROR,
            "companion": "trains on its own device",
        },
    )


def predict_on(
    question: Question, machine: str, steps: Steps, measured: Mapping[str, Any], error: float
) -> Prediction:
    """The prediction from step times measured on this machine."""
    slots = (question.sequences, question.sequences)
    assumptions = {"measured": dict(measured), "model_error": error}
    other = question.loop.seconds
    return _answer(question, machine, steps, [], slots, other, 0.0, assumptions)


def _answer(
    question: Question,
    machine: str,
    steps: Steps,
    variations: Sequence[tuple[Steps, Steps]],
    slots: tuple[int, int],
    other: float | None,
    swap: float,
    assumptions: dict[str, Any],
) -> Prediction:
    prefill = steps.prefill(question.prompt * len(question.lengths.tokens) / question.alike)
    most = len(question.acceptance)

    def model_of(these: Steps) -> RolloutModel:
        return RolloutModel(
            these, question.lengths, slots[0], question.prompt, most, drafted_slots=slots[1]
        )

    def speedup_of(model: RolloutModel, shares: Sequence[float]) -> float:
        plain, drafted = model.plain(), model.drafted(shares, question.drafts)
        return (plain.seconds + prefill) / (drafted.seconds + prefill)

    model = model_of(steps)
    plain = model.plain()
    drafted = model.drafted(question.acceptance, question.drafts)
    plain_s, drafted_s = plain.seconds + prefill, drafted.seconds + prefill
    speedup = plain_s / drafted_s
    # Each cost is moved to both ends of its range, one at a time. These errors and the model's own
    # are independent, so their squares add.
    downs, ups = [assumptions["model_error"] ** 2], [assumptions["model_error"] ** 2]
    pairs = [
        (
            speedup_of(model_of(low), question.acceptance),
            speedup_of(model_of(high), question.acceptance),
        )
        for low, high in variations
    ]
    if question.acceptance_error:
        share = question.acceptance_error / max(question.acceptance_length - 1, 1e-9)
        pairs.append(
            (
                speedup_of(model, _scaled(question.acceptance, 1 - share)),
                speedup_of(model, _scaled(question.acceptance, 1 + share)),
            )
        )
    for pair in pairs:
        downs.append(min(0.0, math.log(min(pair) / speedup)) ** 2)
        ups.append(max(0.0, math.log(max(pair) / speedup)) ** 2)
    low_ratio, high_ratio = math.exp(-math.sqrt(sum(downs))), math.exp(math.sqrt(sum(ups)))
    interval = Interval(speedup, speedup * low_ratio, speedup * high_ratio)

    def whole(together: Callable[[float, float], float]) -> Interval | None:
        if other is None:
            return None
        rest = other
        before = together(plain_s, rest)
        ends = (
            before / together(plain_s / ratio + swap, rest)
            for ratio in (interval.value, interval.low, interval.high)
        )
        return Interval(*ends)

    tail_drafted = drafted.tail_s
    return Prediction(
        question=question,
        machine=machine,
        speedup=interval,
        plain_s=plain_s,
        drafted_s=drafted_s,
        mean_drafts=drafted.drafts,
        tail_share=plain.tail_s / plain_s,
        tail_speedup=plain.tail_s / tail_drafted if tail_drafted else 1.0,
        pays_from=_pays_from(lambda shares: speedup_of(model, shares), question.acceptance),
        step=whole(lambda rollout, rest: rollout + rest),
        async_step=whole(max),
        other_s=other,
        slots=model.slots,
        drafted_slots=model.drafted_slots,
        rows=tuple(_size_rows(model, question.acceptance)),
        source=steps.source,
        assumptions=assumptions,
    )


def _size_rows(model: RolloutModel, acceptance: Sequence[float]) -> Iterator[SizeRow]:
    for sequences in sorted({*octaves(model.slots), model.slots}):
        prices = [model.price(sequences, drafts) for drafts in range(1, len(acceptance) + 1)]
        speedups = tuple(
            (1.0 + sum(acceptance[:drafts])) / price for drafts, price in enumerate(prices, 1)
        )
        best = max(range(len(speedups)), key=speedups.__getitem__)
        pays = best + 1 if speedups[best] > 1 else 0
        yield SizeRow(sequences, speedups, pays, prices[best], 1.0 / model.price(sequences, 0))


def _scaled(acceptance: Sequence[float], factor: float) -> tuple[float, ...]:
    """Bend the shares until their sum is this many times as large; they stay falling."""
    wanted = factor * sum(acceptance)
    low, high = 0.0, 50.0
    for _ in range(50):
        power = (low + high) / 2
        if sum(_bent(acceptance, power)) > wanted:
            low = power
        else:
            high = power
    return _bent(acceptance, high)


def _bent(acceptance: Sequence[float], power: float) -> tuple[float, ...]:
    """Shares raised to a power: heads with a similar profile that are better (below 1) or worse."""
    # No power changes a share of 0 or 1.
    return tuple(min(max(share, 1e-4), 1 - 1e-4) ** power for share in acceptance)


def _pays_from(
    speedup: Callable[[Sequence[float]], float], acceptance: Sequence[float]
) -> float | None:
    """The mean acceptance length above which rollouts are faster than vLLM without drafts."""
    low, high = 0.0, 50.0
    if speedup(_bent(acceptance, low)) <= 1:
        return None
    for _ in range(14):
        power = (low + high) / 2 if high < 50 else low + 1.0
        if speedup(_bent(acceptance, power)) > 1:
            low = power
            if high == 50.0 and low > 12:
                break
        else:
            high = power
    return 1.0 + sum(_bent(acceptance, low))


def sequences_that_fit(
    question: Question,
    gpu: GpuFigures,
    drafting_bytes: float,
    memory_share: float = MEMORY_SHARE,
) -> int:
    """How many sequences fit into the KV cache of an engine with this share of its GPUs' memory,
    with prompts and responses of mean length; at most as many as asked for. `drafting_bytes` are
    those of each GPU.

    Raises:
        ConfigError: the weights alone are too large.
    """
    model = question.model
    weights = BFLOAT16 * model.parameters / question.ranks
    free = gpu.memory_bytes * memory_share - OTHER_BYTES - weights - drafting_bytes
    token = BFLOAT16 * model.cache_elements_of_rank(question.ranks)
    fits = int(free / (token * (question.prompt + question.lengths.mean)))
    if fits < 1:
        raise ConfigError(
            "The model does not fit.",
            given=(
                f"{model.parameters / 1e9:.1f} B parameters on {question.ranks} x {gpu.name},"
                f" responses of {question.lengths.mean:,.0f} tokens"
            ),
            expected="room in the GPU's memory for the weights and one sequence's cache",
            do="Use more GPUs (--tp) or shorter responses.",
        )
    return min(question.sequences, fits)


def _arithmetic_seconds(question: Question, flops: float) -> float:
    """Seconds to score a step's tokens and learn from them, at this rate."""
    loop = question.loop
    tokens = question.engines * sum(question.prompt + length for length in question.lengths.tokens)
    passes = 2 * loop.forwards + 6 * loop.updates * loop.epochs
    return passes * question.model.product_parameters * tokens / flops
