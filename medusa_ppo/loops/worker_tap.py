"""What policy workers of Ray loops (SkyRL, NeMo-RL) share when they tap their own training pass:
the companion's address, and rows from padded batches.

The pass of the update is tapped, not that of the log-probs, because all their algorithms make it,
and its batch marks the response's tokens. Every worker has a tap; the first one sends the tables.
"""

from __future__ import annotations

import os

import torch

from heads.errors import ConfigError

COMPANION = "MEDUSA_PPO_COMPANION"
"""Environment variable with the companion's address."""
Rows = tuple[list[list[int]], list[list[int]]]
"""Token ids of prompts, and of their responses."""


def companion_address() -> str:
    """The address from the environment. Raises ConfigError if it is not set."""
    if not (address := os.environ.get(COMPANION, "")):
        raise ConfigError(
            "The policy's workers do not know where the companion is.",
            given=f"no {COMPANION}",
            expected="http://HOST:PORT of `medusa-ppo companion serve`, or ray:NAME",
            do=f"export {COMPANION} where the training is started (and before `ray start`, on"
            " each node).",
        )
    return address


def response_rows(ids_BT: torch.Tensor, real_BT: torch.Tensor, response_BT: torch.Tensor) -> Rows:
    """Prompt and response of the rows that have a prompt and end in one unbroken response. Rows of
    several turns, with tools' answers in between, and rows of padding are left out.

    Args:
        ids_BT: token ids, padded anywhere.
        real_BT: true where a token is not padding.
        response_BT: true where the policy wrote the token.
    """
    prompts, responses = [], []
    for ids_T, real_T, response_T in zip(
        ids_BT.cpu(), real_BT.bool().cpu(), response_BT.bool().cpu(), strict=True
    ):
        written_N = response_T[real_T]
        count = int(written_N.sum())
        if not 0 < count < written_N.numel() or not bool(written_N[-count:].all()):
            continue
        tokens = ids_T[real_T].tolist()
        prompts.append(tokens[:-count])
        responses.append(tokens[-count:])
    return prompts, responses
