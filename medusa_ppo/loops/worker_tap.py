"""What policy workers of Ray loops (SkyRL, NeMo-RL) share when they tap their own training pass:
the companion's address, and rows out of padded batches.

The pass of the update is tapped, not that of the log-probs: all their algorithms make it, and its
batch says which tokens are the response's. Every worker has a tap; the first one sends the tables.
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
    """ConfigError where nobody has said it."""
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
    """Prompt and response of those rows that end in one unbroken response, and have a prompt. Left
    out are those of several turns, whose tools' answers stand between, and rows of padding.

    Args:
        ids_BT: token ids, padded anywhere.
        real_BT: which of them are no padding.
        response_BT: which of them the policy has written.
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
