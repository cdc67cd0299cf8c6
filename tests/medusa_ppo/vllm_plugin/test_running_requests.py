"""What a memory reads of V2's requests: their texts a step later, their last tokens at once, and
the probabilities of what they drafted.
"""

from __future__ import annotations

import pytest
import torch

from medusa_ppo.drafting import sending
from medusa_ppo.drafting.memory import MISSING, SUFFIX, tail_of
from medusa_ppo.drafting.q_rows import VerifiedRows
from medusa_ppo.vllm_plugin.running_requests import Admitted, RunningRequests

SLOTS, K, V = 4, 3, 7


def test_texts_come_a_step_later_and_their_ends_at_once(device: torch.device) -> None:
    """Up to four tokens a step, none while a prompt is not finished."""
    running = RunningRequests(SLOTS, K, device)
    prompts = {"a": list(range(9, 5 + SUFFIX)), "b": list(range(20, 20 + 2 * SUFFIX))}
    running.begin(
        [
            Admitted(key, slot, prompt, prompt, None)
            for slot, (key, prompt) in zip((2, 0), prompts.items(), strict=True)
        ]
    )
    slots_B = torch.tensor([2, 0], device=device)
    texts = {key: list(prompt) for key, prompt in prompts.items()}
    steps = ([[1], []], [[2, 3, 4, 5], [50]], [[], [51, 52]], [[6, 7], [53, 54, 55]])
    for step in steps:
        before = {key: list(text[len(prompts[key]) :]) for key, text in texts.items()}
        ids_Bn = torch.full((2, K + 1), 99)
        for row, (key, tokens) in enumerate(zip(prompts, step, strict=True)):
            texts[key] += tokens
            ids_Bn[row, : len(tokens)] = torch.tensor(tokens[::-1], dtype=torch.int64)
        counts_B = torch.tensor([len(tokens) for tokens in step]).to(device)
        tails_Bn = running.sampled(list(prompts), slots_B, ids_Bn.to(device), counts_B)
        assert tails_Bn.tolist() == [tail_of(texts[key]) for key in prompts]
        assert {key: request.output_token_ids for key, request in running.live.items()} == before
    running.take()
    for key, request in running.live.items():
        assert [*request.prompt_token_ids, *request.output_token_ids] == texts[key]
    assert tails_Bn[0, 0] != MISSING, "the shorter text has as many tokens as a tail by now"


def test_who_ends_has_its_last_tokens_and_who_comes_back_goes_on(device: torch.device) -> None:
    running = RunningRequests(SLOTS, K, device)
    running.begin([Admitted("a", 1, [5], [5], None), Admitted("b", 3, [6], [6], None)])
    request = running.live["a"]

    def step(keys: list[str], slots: list[int], ids: list[list[int]], counts: list[int]) -> None:
        tensors = (torch.tensor(numbers, device=device) for numbers in (slots, ids, counts))
        running.sampled(keys, *tensors)

    step(["a", "b"], [1, 3], [[2, 1, 0, 0], [3, 0, 0, 0]], [2, 1])
    running.end(["a"])
    assert list(running.live) == ["b"]
    running.take()
    assert request.output_token_ids == [1, 2], "and they reach it after its end"
    # Preempted: another slot, and the same text.
    running.begin([Admitted("b", 0, [6], [6, 3], None)])
    step(["b"], [0], [[4, 0, 0, 0]], [1])
    running.take()
    assert running.live["b"].output_token_ids == [3, 4]


def test_nothing_is_waited_for_before_a_steps_work_is_queued(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """When requests end and arrive, a step that is scheduled ahead has not begun, and the last one
    is not done. The new request has the id of the one that ended.
    """
    running = RunningRequests(SLOTS, K, torch.device("cpu"))
    waited: list[bool] = []
    arrived = sending.OnItsWay.arrived

    def noted(self: sending.OnItsWay) -> torch.Tensor:
        waited.append(True)
        return arrived(self)

    monkeypatch.setattr(sending.OnItsWay, "arrived", noted)
    running.begin([Admitted("a", 1, [5], [5], None), Admitted("b", 2, [5], [5], None)])
    first, goes_on = running.live["a"], running.live["b"]
    ids_Bn = torch.tensor([[2, 1, 0, 0], [3, 0, 0, 0]])
    running.sampled(["a", "b"], torch.tensor([1, 2]), ids_Bn, torch.tensor([2, 1]))
    running.end([])
    running.end(["a"])
    running.begin([Admitted("a", 1, [6], [6], None)])
    assert not waited
    running.take()
    assert waited and first.output_token_ids == [1, 2] and goes_on.output_token_ids == [3]
    assert running.live["a"].output_token_ids == [], "these are another one's tokens"


@pytest.mark.parametrize("together", [True, False])
def test_the_probability_of_each_draft_is_noted(together: bool, device: torch.device) -> None:
    """Requests with two, no and three drafts, verified at once or one after the other."""
    torch.manual_seed(0)
    running = RunningRequests(SLOTS, K, device)
    counts, slots = [2, 0, 3], [3, 1, 0]
    logits_TV = torch.randn(sum(counts) + 3, V).to(device)
    ids_T = torch.tensor([0, 4, 5, 0, 0, 1, 2, 6], device=device)
    places_T = torch.tensor([0, 1, 2, 0, 0, 1, 2, 3], device=device)
    slots_T = torch.tensor([3, 3, 3, 1, 0, 0, 0, 0], device=device)
    for part in [slice(0, 8)] if together else [slice(0, 3), slice(3, 4), slice(4, 8)]:
        rows = VerifiedRows(slots_T[part], places_T[part], places_T[part], ids_T[part])
        running.score(logits_TV[part], rows)
    found_KB = running.scores(torch.tensor(slots, device=device))
    p_TV = logits_TV.softmax(-1)
    assert found_KB[:2, 0].tolist() == pytest.approx([float(p_TV[0, 4]), float(p_TV[1, 5])])
    assert found_KB[:, 2].tolist() == pytest.approx(
        [float(p_TV[4, 1]), float(p_TV[5, 2]), float(p_TV[6, 6])]
    )
