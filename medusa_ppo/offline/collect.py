"""From rows of text to packed rollout batches: responses, behaviour log-probs, and hidden states of the actor.

Shape letters: B rows of a forward pass, T positions, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from heads.errors import DataError
from medusa_ppo.actors.hf import HiddenTap
from medusa_ppo.offline.progress import Advance
from medusa_ppo.serving.engine import RolloutEngine
from medusa_ppo.types import Counters, RolloutBatch, Rollouts, Sampling

TOKENS_PER_FORWARD = 8192
PROMPTS_PER_ROUND = 128


@dataclass(frozen=True)
class Sample:
    """One sequence: what was given, what was written, its behaviour log-probs (None: take the actor's own), and its prompt's number
    (None: nothing else answers the same prompt)."""

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None = None
    prompt: int | None = None


def write_responses(
    engine: RolloutEngine,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    max_tokens: int,
    seed: int,
    advance: Advance,
    per_round: int = PROMPTS_PER_ROUND,
) -> list[Rollouts]:
    """Let the model answer the prompts, `per_round` at a time, until `max_tokens` response tokens are there (0: each prompt once)."""
    rounds: list[Rollouts] = []
    tokens = 0
    start = 0
    while (tokens < max_tokens) if max_tokens else (start < len(prompts)):
        picked = [prompts[i % len(prompts)] for i in range(start, start + per_round)] if max_tokens else prompts[start : start + per_round]
        settings = Sampling(
            sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_new_tokens, sampling.responses_per_prompt, seed + len(rounds)
        )
        rollouts = engine.generate(picked, settings)
        rounds.append(rollouts)
        tokens += rollouts.generated_tokens
        start += len(picked)
        advance(rollouts.generated_tokens if max_tokens else len(picked), f"{rollouts.tokens_per_s:.0f} tokens/s")
    return rounds


def samples_of(rounds: Iterable[Rollouts]) -> list[Sample]:
    """Flatten rollouts; empty responses teach nothing and are left out."""
    numbers: dict[tuple[int, ...], int] = {}
    samples = []
    for rollouts in rounds:
        for response in rollouts.responses:
            prompt = tuple(rollouts.prompts[response.prompt_index])
            if response.token_ids:
                samples.append(Sample(prompt, response.token_ids, response.logprobs, numbers.setdefault(prompt, len(numbers))))
    return samples


def samples_from_texts(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, max_length: int, max_tokens: int) -> list[Sample]:
    """Full texts: the first token is the prompt, everything after it counts as written.

    Raises:
        DataError: when no text has at least two tokens.
    """
    samples: list[Sample] = []
    tokens = 0
    for text in texts:
        ids = tokenizer(text).input_ids[:max_length]
        if len(ids) >= 2:
            samples.append(Sample(tuple(ids[:1]), tuple(ids[1:])))
            tokens += len(ids) - 1
        if max_tokens and tokens >= max_tokens:
            break
    if not samples:
        raise DataError(
            "No text is long enough to train on.", given=f"{len(texts)} texts", expected="at least two tokens each", do="Check --column."
        )
    return samples


@torch.no_grad()
def hidden_batch(model: PreTrainedModel, samples: Sequence[Sample], temperature: float, advance: Advance) -> RolloutBatch:
    """One forward pass over the actor for all samples, packed in their order.

    Log-probs that a sample lacks are the actor's own at `temperature`. Padding is kept small by sorting by length.
    """
    order = sorted(range(len(samples)), key=lambda i: len(samples[i].prompt_ids) + len(samples[i].response_ids))
    hidden: dict[int, torch.Tensor] = {}
    logprobs: dict[int, torch.Tensor] = {}
    for rows in _forward_groups(order, samples):
        _run_rows(model, samples, rows, temperature, hidden, logprobs)
        advance(len(rows))
    count = range(len(samples))
    return RolloutBatch(
        hidden_MD=torch.cat([hidden[i] for i in count]),
        response_ids_M=torch.tensor([token for s in samples for token in s.response_ids], dtype=torch.int64),
        logprobs_M=torch.cat([logprobs[i] for i in count]),
        lengths_S=torch.tensor([len(s.response_ids) for s in samples], dtype=torch.int64),
        temperature=temperature,
        prompts_S=None if any(s.prompt is None for s in samples) else torch.tensor([s.prompt for s in samples], dtype=torch.int64),
    )


def _forward_groups(order: Sequence[int], samples: Sequence[Sample]) -> Iterable[list[int]]:
    group: list[int] = []
    for i in order:
        length = len(samples[i].prompt_ids) + len(samples[i].response_ids)
        if group and (len(group) + 1) * length > TOKENS_PER_FORWARD:
            yield group
            group = []
        group.append(i)
    if group:
        yield group


def _run_rows(
    model: PreTrainedModel,
    samples: Sequence[Sample],
    rows: Sequence[int],
    temperature: float,
    hidden: dict[int, torch.Tensor],
    logprobs: dict[int, torch.Tensor],
) -> None:
    full = [samples[i].prompt_ids + samples[i].response_ids for i in rows]
    width = max(len(ids) for ids in full)
    ids_BT = torch.zeros(len(rows), width, dtype=torch.int64)
    attention_BT = torch.zeros_like(ids_BT)
    for b, ids in enumerate(full):
        ids_BT[b, : len(ids)] = torch.tensor(ids)
        attention_BT[b, : len(ids)] = 1
    device = model.device
    with HiddenTap(model) as tap:
        logits_BTV = model(input_ids=ids_BT.to(device), attention_mask=attention_BT.to(device)).logits
    for b, i in enumerate(rows):
        sample = samples[i]
        first = len(sample.prompt_ids) - 1
        last = first + len(sample.response_ids)
        hidden[i] = tap.hidden_BTD[b, first:last].cpu().clone()
        if sample.logprobs is not None:
            logprobs[i] = torch.tensor(sample.logprobs, dtype=torch.float32)
        else:
            logp_MV = torch.log_softmax(logits_BTV[b, first:last].float() / temperature, dim=-1)
            logprobs[i] = logp_MV.gather(1, torch.tensor(sample.response_ids, device=device)[:, None])[:, 0].cpu()


def total_counters(rounds: Iterable[Rollouts]) -> Counters:
    """Sum of vLLM's counters over all rounds."""
    total = Counters()
    for rollouts in rounds:
        total = total + rollouts.counters
    return total
