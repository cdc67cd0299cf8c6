"""What verifying drafts as a block gains for given heads, by replay: tokens per step compared with
token-by-token verification, on the same responses.

    python benchmarks/block_verification.py --model ACTOR --heads HEADS --data test.jsonl
        --template 'Question: {question}\\nAnswer:' [--temperatures 1.0,0.7] [--json FILE]

For responses y drawn from p, the probability that y_1 .. y_k were drafted and accepted, relative to
that of y itself, is

    token by token   w_k = product over j <= k of min(1, q_j / p_j)
    as a block       w_k = min(1, least product of q_1 / p_1 .. q_j / p_j over j <= k)

and with both rules the next token comes from p (`heads.acceptance.block_acceptance`).

Shape letters: M response tokens, K heads.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from medusa_ppo.companion import gate
from medusa_ppo.offline.evaluate import evaluate_heads
from medusa_ppo.offline.options import EvalOptions
from medusa_ppo.runtime.console import offline_progress


def token_acceptance(ratios_MK: torch.Tensor) -> torch.Tensor:
    """Like `heads.acceptance.block_acceptance`, for verification token by token."""
    return ratios_MK.clamp(max=0).exp()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--heads", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--template", default="")
    parser.add_argument("--temperatures", default="1.0")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--limit", type=int, default=150)
    parser.add_argument("--json")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for temperature in map(float, options.temperatures.split(",")):
        asked = EvalOptions(
            model=options.model,
            heads=options.heads,
            data=options.data,
            template=options.template,
            temperature=temperature,
            max_new_tokens=options.max_new_tokens,
            limit=options.limit,
        )
        found = {}
        for name in ("token", "block"):
            way = token_acceptance if name == "token" else gate.block_acceptance
            with mock.patch.object(gate, "block_acceptance", way), offline_progress() as progress:
                # Seeds are those of the options, so both read the same responses.
                found[name] = evaluate_heads(asked, progress)["mean_acceptance_length"]
        rows.append({"temperature": temperature, **found, "ratio": found["block"] / found["token"]})
        sys.stdout.write(json.dumps(rows[-1]) + "\n")
        sys.stdout.flush()
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
