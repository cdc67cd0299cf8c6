"""The worker's tap: the same training data from padded rows, from packed rows, and from the
plugin's own tap.
"""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from heads.errors import ConfigError
from medusa_ppo.contract.rollout_batch import RolloutBatch
from medusa_ppo.contract.rollouts import Sampling
from medusa_ppo.loops.passes import PassTap, spans

ROWS = [((5, 6), (1, 2)), ((7,), (3, 3, 4)), ((5, 6), (9,))]


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    return LlamaForCausalLM(LlamaConfig(vocab_size=16, **sizes, attn_implementation="sdpa")).eval()


def reference(model: LlamaForCausalLM) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Hidden states and log-probs of the response tokens, one unpadded row after the other."""
    states = []
    logprobs = []
    for prompt, answer in ROWS:
        ids = torch.tensor([[*prompt, *answer]])
        with torch.no_grad():
            hidden = model.model(input_ids=ids).last_hidden_state[0, len(prompt) - 1 : -1]
        states.append(hidden)
        logprobs.append(
            model.lm_head(hidden).log_softmax(-1).detach()[range(len(answer)), list(answer)]
        )
    return torch.cat(states), logprobs


def check(
    batch: RolloutBatch | None, states_MD: torch.Tensor, logprobs: list[torch.Tensor]
) -> None:
    assert batch is not None
    torch.testing.assert_close(batch.hidden_MD, states_MD, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(batch.logprobs_M, torch.cat(logprobs))
    assert batch.response_ids_M.tolist() == [token for _, answer in ROWS for token in answer]
    assert batch.lengths_S.tolist() == [2, 3, 1] and batch.policy_version == 5
    assert batch.prompts_S is not None and batch.prompts_S.tolist() == [0, 1, 0]


def padded(
    rows: list[tuple[tuple[int, ...], tuple[int, ...]]],
) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.zeros(len(rows), 6, dtype=torch.int64)
    attention = torch.zeros(len(rows), 6, dtype=torch.int64)
    for row, (prompt, answer) in enumerate(rows):
        first = 3 - len(prompt)
        ids[row, first : 3 + len(answer)] = torch.tensor([*prompt, *answer])
        attention[row, first : 3 + len(answer)] = 1
    return ids, attention


@torch.no_grad()
def test_padded_micro_batches_in_another_order(model: LlamaForCausalLM):
    states_MD, logprobs = reference(model)
    tap = PassTap(model, Sampling(), 2**20)
    with tap.watch(ROWS):
        for part in ([2], [1, 0]):
            ids, attention = padded([ROWS[i] for i in part])
            positions = (attention.cumsum(-1) - 1).clamp(min=0)
            model(ids, attention_mask=attention, position_ids=positions)
    tap.add_logprobs(logprobs)
    check(tap.take(5), states_MD, logprobs)
    assert tap.take(6) is None and not model.base_model._forward_hooks


@torch.no_grad()
def test_packed_rows(model: LlamaForCausalLM):
    states_MD, logprobs = reference(model)
    tap = PassTap(model, Sampling(), 2**20)
    ids = torch.tensor([[token for prompt, answer in ROWS for token in (*prompt, *answer)]])
    positions = torch.tensor(
        [[i for prompt, answer in ROWS for i in range(len(prompt) + len(answer))]]
    )
    with tap.watch(ROWS):
        model(input_ids=ids, attention_mask=None, position_ids=positions, use_cache=False)
    tap.add_logprobs(logprobs)
    check(tap.take(5), states_MD, logprobs)


@torch.no_grad()
def test_a_batch_may_come_in_several_passes_and_stops_at_its_bytes(model: LlamaForCausalLM):
    states_MD, logprobs = reference(model)
    for limit, rows in ((2**20, 3), (200, 1)):
        tap = PassTap(model, Sampling(), limit)
        for row, values in zip(ROWS, logprobs, strict=True):
            ids, attention = padded([row])
            with tap.watch([row]):
                model(input_ids=ids, attention_mask=attention)
            tap.add_logprobs([values])
        batch = tap.take(5)
        assert batch is not None and batch.lengths_S.numel() == rows
        torch.testing.assert_close(
            batch.hidden_MD, states_MD[: batch.hidden_MD.shape[0]], rtol=1e-4, atol=1e-5
        )


@torch.no_grad()
def test_rows_that_were_cut_up_are_refused(model: LlamaForCausalLM):
    tap = PassTap(model, Sampling(), 2**20)
    with pytest.raises(ConfigError, match="sequence parallelism"):
        with tap.watch(ROWS):
            model(input_ids=torch.tensor([[5, 6]]), position_ids=torch.tensor([[0, 1]]))


def test_spans_of_rows_without_any_mask():
    assert spans(torch.zeros(2, 3), None, None) == [(0, 0, 3), (1, 0, 3)]
