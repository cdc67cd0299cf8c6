"""Samples from rollouts: token ids and behaviour log-probs that a PPO run wrote (`report.keep_rollouts`), or anybody else."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from heads.errors import DataError
from medusa_ppo.data import Row
from medusa_ppo.offline.collect import Sample, number_prompts
from medusa_ppo.reports.records import LOGPROBS, PROMPT_IDS, RESPONSE_IDS


def samples_from_rollouts(rows: Iterable[Row], vocab_size: int, context: int, temperature: float, max_tokens: int) -> list[Sample]:
    """One sample per row, the last rows first: they are of the newest policy. Empty responses teach nothing and are left out.

    Args:
        rows: with `prompt_ids` and `response_ids`; `logprobs` where known (else the actor's own are taken), `temperature`, `top_p`
            and `top_k` where they are not those of plain sampling.
        vocab_size: ids lie below it.
        context: most tokens of prompt and response together.
        temperature: that the heads are trained for.
        max_tokens: stop when so many response tokens are there.

    Raises:
        DataError: no usable row, ids or log-probs that are none, a row sampled in another way.
    """
    samples: list[Sample] = []
    tokens = 0
    for number, row in reversed(list(enumerate(rows))):
        prompt, response = (_ids(row, name, number, vocab_size) for name in (PROMPT_IDS, RESPONSE_IDS))
        _check_sampling(row, number, temperature)
        if not prompt or not response or len(prompt) + len(response) > context:
            continue
        ids = prompt + response
        samples.append(Sample(ids, ((len(prompt), len(ids)),), 0, _logprobs(row, number, len(response))))
        tokens += len(response)
        if tokens >= max_tokens:
            break
    if not samples:
        raise DataError(
            "No rollout is usable.",
            given="prompts or responses without tokens, or too long",
            expected=f"1 to {context} tokens",
            do="Check --data.",
        )
    return number_prompts(samples)


def _ids(row: Row, name: str, number: int, vocab_size: int) -> tuple[int, ...]:
    found = row.get(name)
    if not isinstance(found, list) or not all(isinstance(i, int) and 0 <= i < vocab_size for i in found):
        raise _bad(row, name, number, f"a list of token ids below {vocab_size}")
    return tuple(found)


def _logprobs(row: Row, number: int, length: int) -> tuple[float, ...] | None:
    found = row.get(LOGPROBS)
    if found is None:
        return None
    if not isinstance(found, list) or len(found) != length or not all(isinstance(p, float | int) and p <= 0 for p in found):
        raise _bad(row, LOGPROBS, number, f"{length} numbers, none above 0")
    return tuple(float(p) for p in found)


def _check_sampling(row: Row, number: int, temperature: float) -> None:
    plain: dict[str, tuple[Any, str]] = {
        "temperature": (temperature, "the --temperature of this training"),
        "top_p": (1.0, "1: heads are trained for plain sampling"),
        "top_k": (0, "0: heads are trained for plain sampling"),
    }
    for name, (wanted, meaning) in plain.items():
        if row.get(name) is not None and row[name] != wanted:
            raise _bad(row, name, number, f"{wanted} ({meaning})")


def _bad(row: Row, name: str, number: int, expected: str) -> DataError:
    return DataError(
        f"A rollout's {name} can't be used.", given=f"row {number}: {row.get(name)!r:.80}", expected=expected, do="Correct the data."
    )
