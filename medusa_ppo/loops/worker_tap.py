"""Shared by policy workers of Ray loops that tap their own passes for a stand-alone companion: its
address, a worker's tap, and rows from padded batches; and the environment variables that a loop's
driver hands on to its workers and engines.

In SkyRL, NeMo-RL and OpenRLHF the update's pass is tapped, not the log-prob pass: every algorithm
has the former, and its batch marks the response's tokens. Every worker has a tap; the first one
sends the tables.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from heads.errors import ConfigError

if TYPE_CHECKING:
    from medusa_ppo.loops.tap import CompanionTap

COMPANION = "MEDUSA_PPO_COMPANION"
"""Environment variable with the companion's address."""
OURS = "MEDUSA_PPO_"
"""Environment variables with this prefix are ours."""
SECRET = "TOKEN"
"""How the names of those end that hold a secret."""
JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Ray's variable with what `ray job submit` was given; set in the job's driver."""
Rows = tuple[list[list[int]], list[list[int]], list[torch.Tensor] | None]
"""Token ids of prompts and of their responses, and the latter's log-probs (None: unknown)."""


def companion_address() -> str:
    """The address from the environment. Raises ConfigError if it is not set."""
    if not (address := os.environ.get(COMPANION, "")):
        raise ConfigError(
            "The policy's workers don't know where the companion is.",
            given=f"no {COMPANION}",
            expected="http://HOST:PORT of `medusa-ppo companion serve`, or ray:NAME",
            do=f"export {COMPANION} where the training is started (and before `ray start`, on"
            " each node).",
        )
    return address


def own_tap(worker: Any, model: nn.Module, **how: Any) -> CompanionTap:
    """A worker's tap, made at its first pass: loops load the model in a separate call, after the
    constructor.

    Args:
        worker: keeps the tap.
        how: as for CompanionTap.

    Raises:
        ConfigError: the environment has no address of a companion.
        CompanionError, ModelError: as `CompanionTap`.
    """
    if "_medusa_tap" not in vars(worker):
        # verl imports this file in each of its processes, and most have no tap.
        from medusa_ppo.loops.tap import CompanionTap

        worker._medusa_tap = CompanionTap(model, companion_address(), **how)
    tap: CompanionTap = worker._medusa_tap
    return tap


def as_sampled(tap: CompanionTap, rows: Rows) -> Rows:
    """The rows, without log-probs if responses are sampled with top-p or top-k: those of a loop's
    own pass are over all tokens. (NeMo-RL's depend on its version.) The companion computes them.
    """
    prompts, responses, logprobs = rows
    return prompts, responses, None if tap.cuts else logprobs


def own_variables() -> dict[str, str]:
    """Our environment variables without the secrets, for the `env_vars` of a Ray `runtime_env`: Ray
    writes these into its logs. Those that a Ray job gives are left out: they reach each of its
    processes anyway, and Ray refuses a name that both the job and its driver give.
    """
    job = json.loads(os.environ.get(JOB, "{}"))
    given = (job.get("runtime_env") or {}).get("env_vars") or {}
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(OURS) and not name.endswith(SECRET) and name not in given
    }


def own_secrets() -> dict[str, str]:
    """Our environment variables that hold a secret, for the arguments of a Ray call, which no log
    has.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(OURS) and name.endswith(SECRET)
    }


def response_rows(
    ids_BT: torch.Tensor,
    real_BT: torch.Tensor,
    response_BT: torch.Tensor,
    logprobs_BT: torch.Tensor | None = None,
) -> Rows:
    """The prompt and response of each row that has a prompt and ends in one unbroken response. Rows
    with several turns (tools' answers in between) and rows of padding are left out.

    Args:
        ids_BT: token ids, padded anywhere.
        real_BT: true where a token is not padding.
        response_BT: true where the policy wrote the token.
        logprobs_BT: log-prob of each token; read where the policy wrote it. None: the companion
            computes them.
    """
    prompts, responses, logprobs = [], [], []
    given_BT = torch.zeros(ids_BT.shape) if logprobs_BT is None else logprobs_BT.float().cpu()
    for ids_T, real_T, response_T, given_T in zip(
        ids_BT.cpu(), real_BT.bool().cpu(), response_BT.bool().cpu(), given_BT, strict=True
    ):
        written_N = response_T[real_T]
        count = int(written_N.sum())
        if not 0 < count < written_N.numel() or not bool(written_N[-count:].all()):
            continue
        tokens = ids_T[real_T].tolist()
        prompts.append(tokens[:-count])
        responses.append(tokens[-count:])
        logprobs.append(given_T[real_T][-count:])
    return prompts, responses, None if logprobs_BT is None else logprobs


def masked_rows(
    ids_BT: torch.Tensor,
    real_BT: torch.Tensor,
    written_BR: torch.Tensor,
    logprobs_BR: torch.Tensor | None = None,
) -> Rows:
    """`response_rows` of a batch whose last columns alone have a mask and log-probs; written_BR:
    true where the policy wrote the token.
    """

    def wide(values_BR: torch.Tensor) -> torch.Tensor:
        return F.pad(values_BR, (ids_BT.shape[1] - values_BR.shape[1], 0))

    logprobs_BT = None if logprobs_BR is None else wide(logprobs_BR)
    return response_rows(ids_BT, real_BT, wide(written_BR), logprobs_BT)


def joined_rows(parts: Sequence[Rows]) -> Rows:
    """All rows of some batches. Log-probs are known if each batch has them, with rows or without:
    all ranks must come to the same answer.
    """
    prompts = [row for part in parts for row in part[0]]
    responses = [row for part in parts for row in part[1]]
    if any(part[2] is None for part in parts):
        return prompts, responses, None
    return prompts, responses, [row for part in parts for row in part[2] or ()]
