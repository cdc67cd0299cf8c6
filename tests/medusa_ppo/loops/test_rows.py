"""Rows of a trainer's batch are known by their tokens, in any order, padding and split; and the tap
hands each to the plugin once.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Iterator, Sequence

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from medusa_ppo.actors.hf import HiddenTap
from medusa_ppo.companion.collector import BatchCollector
from medusa_ppo.contract.rollouts import Counters, Response, Rollouts, Sampling
from medusa_ppo.loops.passes import ForwardTap, Generated, RowFinder, as_rollouts

PROMPTS = ((5, 6), (7,))
ANSWERS = ((0, (1, 2)), (0, (1, 2)), (1, (3,)), (1, (4, 4, 4)))


def rollouts() -> Rollouts:
    responses = tuple(
        Response(prompt, tokens, (-1.0,) * len(tokens), "stop") for prompt, tokens in ANSWERS
    )
    return Rollouts(PROMPTS, responses, Counters(), 1.0, Sampling())


def padded(order: Sequence[int], rng: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows as trainers make them: padding in front of the prompt and behind the response; its ids
    are those of real tokens.
    """
    ids = torch.full((len(order), 9), 1)
    attention = torch.zeros(len(order), 9, dtype=torch.int64)
    for row, index in enumerate(order):
        tokens = (*PROMPTS[ANSWERS[index][0]], *ANSWERS[index][1])
        first = rng.randint(0, 9 - len(tokens))
        ids[row, first : first + len(tokens)] = torch.tensor(tokens)
        attention[row, first : first + len(tokens)] = 1
    return ids, attention


def test_each_response_is_found_once_and_its_mask_covers_the_response():
    finder = RowFinder(rollouts())
    rng = random.Random(0)
    ids, attention = padded([3, 1], rng)
    mask, found = finder.find(ids, attention)
    assert found == [3, 0]  # responses 0 and 1 are the same tokens: the first one waiting
    assert [ids[row][mask[row]].tolist() for row in range(2)] == [[4, 4, 4], [1, 2]]
    assert not finder.done

    again, rest = finder.find(*padded([3, 0, 2], rng))
    assert rest == [None, 1, 2] and not again[0].any()
    assert finder.done


def test_an_empty_response_is_not_waited_for():
    given = rollouts()
    empty = Rollouts(given.prompts, (Response(0, (), (), "stop"),), Counters(), 1.0, Sampling())
    assert RowFinder(empty).done


def test_a_response_with_a_hole_is_passed_over():
    ids = torch.tensor([[5, 6, 1, 0, 2]])
    attention = torch.tensor([[1, 1, 1, 0, 1]])
    mask, found = RowFinder(rollouts()).find(ids, attention)
    assert found == [None] and not mask.any()


class RowRecorder:
    """Stands in for the plugin: taps and collects, and sends nothing anywhere."""

    def __init__(self, given: Rollouts) -> None:
        self.collector = BatchCollector(given)
        self.passes = 0

    @contextlib.contextmanager
    def actor_forward(
        self, model: torch.nn.Module, mask: torch.Tensor, found: list[int | None]
    ) -> Iterator[None]:
        self.passes += 1
        with HiddenTap(model) as tap:
            yield
        self.collector.add(tap.hidden_BTD, mask, found)


@pytest.fixture
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=16,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
        )
    ).eval()


def test_the_tap_collects_what_lm_head_reads_and_changes_nothing(model: LlamaForCausalLM):
    given = rollouts()
    rng = random.Random(1)
    ids, attention = padded([2, 0, 3, 1], rng)
    plain = model(input_ids=ids, attention_mask=attention).logits
    recorder = RowRecorder(given)
    tap = ForwardTap(model, recorder)  # type: ignore[arg-type]
    tap.expect(given)

    tapped = [
        model(input_ids=ids[i : i + 2], attention_mask=attention[i : i + 2]).logits for i in (0, 2)
    ]
    model(input_ids=ids, attention_mask=attention)  # all are taken: passed over

    assert recorder.passes == 2 and recorder.collector.complete
    torch.testing.assert_close(torch.cat(tapped), plain)
    hidden_MD = recorder.collector.batch().hidden_MD
    logits_MV = model.lm_head(hidden_MD)
    row = 2  # response 3, whose first token is predicted from the prompt's last
    last = attention[row].nonzero()[-1, 0]
    torch.testing.assert_close(logits_MV[-3:], plain[row, last - 3 : last])
    tap.close()
    assert not model._forward_hooks and not model._forward_pre_hooks


def test_a_pass_that_fails_leaves_no_tap_open(model: LlamaForCausalLM):
    given = rollouts()
    ids, attention = padded([2, 0, 3, 1], random.Random(2))
    recorder = RowRecorder(given)
    tap = ForwardTap(model, recorder)  # type: ignore[arg-type]
    tap.expect(given)
    whole = model.model.embed_tokens.weight.data
    model.model.embed_tokens.weight.data = whole[:2]
    with pytest.raises(IndexError):
        model(input_ids=ids, attention_mask=attention)
    assert recorder.passes == 1 and model.base_model._forward_hooks

    model.model.embed_tokens.weight.data = whole
    model(input_ids=ids, attention_mask=attention)

    assert not model.base_model._forward_hooks and recorder.collector.seen == 0
    tap.close()


def test_a_pass_with_the_adapter_off_is_the_reference_policys(model: LlamaForCausalLM):
    peft = pytest.importorskip("peft")  # In the environments of make test-contracts.
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    )
    given = rollouts()
    ids, attention = padded([2, 0, 3, 1], random.Random(1))
    recorder = RowRecorder(given)
    tap = ForwardTap(adapted, recorder)  # type: ignore[arg-type]
    tap.expect(given)
    with adapted.disable_adapter():
        adapted(input_ids=ids, attention_mask=attention)
    assert recorder.passes == 0
    adapted(input_ids=ids, attention_mask=attention)
    assert recorder.passes == 1 and recorder.collector.complete
    tap.close()


def test_rows_are_counted_as_they_become_rollouts() -> None:
    """A row with an infinite log-prob was counted and left out: the next process looked for its
    rows one place further on.
    """
    logprobs = [[-0.5, -math.inf], [-0.5, None], [-0.5], [-0.5, -0.5], [math.nan, -0.5], []]
    part = Generated([[5]] * 6, [[1, 2]] * 5 + [[]], logprobs)
    assert part.known == len(as_rollouts(part, Sampling()).responses) == 2
