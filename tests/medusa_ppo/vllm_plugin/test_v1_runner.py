"""What stands in the place of methods of vLLM's V1 model runner."""

from __future__ import annotations

import pytest
import torch

from medusa_ppo.vllm_plugin import v1_runner


@pytest.mark.parametrize(
    ("sampled", "drafted", "rows"),
    [
        ([[5], [6]], [0, 0], [0, 1]),
        ([[5, 6, 7], [8], []], [2, 1, 0], [2, 3, 5]),
        ([[5, 6]], [3], [1]),
    ],
)
def test_drafts_start_where_a_request_s_last_token_was_sampled(
    sampled: list[list[int]], drafted: list[int], rows: list[int]
) -> None:
    """Three rows where two were drafted and accepted; of two rows the first where the draft was
    refused; one where the prompt goes on.
    """
    hidden_TD = torch.arange(sum(drafted) + len(drafted)).unsqueeze(1).expand(-1, 4)
    assert v1_runner._last_states(hidden_TD, sampled, drafted)[:, 0].tolist() == rows
