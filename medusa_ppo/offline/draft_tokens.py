"""The draft vocabulary of heads that are trained or measured without a run: by the rule of engines
and companion, from the tokens that are there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from heads.errors import ConfigError, EngineError
from heads.heads_config import HeadsConfig
from medusa_ppo.contract.rollouts import Rollouts
from medusa_ppo.drafting.products import MIN_TOKENS_PER_ENTRY, frequent_ids


def draft_width(heads: HeadsConfig, asked: int) -> int:
    """Number of tokens that drafts come from; 0: all.

    Args:
        asked: the option `--draft-vocab`: 0: all; -1: as an engine decides by itself.

    Raises:
        ConfigError: heads that can't draft from some tokens only.
    """
    if asked > 0 and heads.lm_head == "own":
        raise ConfigError(
            "These heads can't draft from a truncated vocabulary.",
            given=f"--draft-vocab {asked}, heads with lm_head=own",
            expected="heads that share the actor's lm_head",
            do="Leave --draft-vocab out (in a run's configuration: engine.draft_vocab).",
        )
    width = heads.draft_vocabulary if asked < 0 else asked
    return width if width < heads.vocab_size else 0


def draft_ids(
    heads: HeadsConfig, asked: int, texts: Iterable[Sequence[int]]
) -> torch.Tensor | None:
    """The most frequent tokens of these texts (prompts and responses, as an engine counts), int64
    `W`, ascending; None: drafts come from all tokens.
    """
    width = draft_width(heads, asked)
    if not width:
        return None
    counts_V = torch.zeros(heads.vocab_size, dtype=torch.int64)
    for ids in texts:
        ids_T = torch.tensor(ids, dtype=torch.int64)
        counts_V.index_add_(0, ids_T, torch.ones_like(ids_T))
    return frequent_ids(counts_V, width)


def text_to_count(width: int, calls: Iterable[Rollouts]) -> list[tuple[int, ...]]:
    """As many prompts and responses, from as few calls, as an engine counts before it chooses the
    `width` tokens that it drafts from (0: none). They must not be those that are measured: tokens
    chosen from a text cover that text best, so its acceptance would be too high.
    """
    texts: list[tuple[int, ...]] = []
    counted = 0
    calls = iter(calls)
    while counted < MIN_TOKENS_PER_ENTRY * width:
        rollouts = next(calls)
        new = [(*rollouts.prompts[one.prompt_index], *one.token_ids) for one in rollouts.responses]
        counted += sum(map(len, new))
        texts += new
    return texts


def until_chosen(width: int, calls: Iterable[Rollouts]) -> None:
    """Make calls of a drafting engine, one after another, until it is sure to have chosen the
    `width` tokens that it drafts from (0: none to choose, no call). In a run it has chosen them
    after the first step.

    Raises:
        EngineError: the engine drafted in none of the calls.
    """
    counted = 0
    drafted = False
    calls = iter(calls)
    while counted < MIN_TOKENS_PER_ENTRY * width:
        rollouts = next(calls)
        steps = rollouts.counters.drafts
        # The V2 runner counts on the device how many drafts were accepted; its host, which decides
        # when there are enough, is sure of one token per request and step. V1 has counted more.
        counted += steps + sum(map(len, rollouts.prompts))
        # A single call may draft nothing: a response may end with its first token.
        drafted = drafted or steps > 0
    if width and not drafted:
        raise EngineError(
            "The engine drafted nothing, so it chose no draft vocabulary.",
            given=f"no draft while {counted} tokens were counted",
            expected="drafts",
            do="Ask for longer responses (--max-new-tokens), or add --draft-vocab 0.",
        )
