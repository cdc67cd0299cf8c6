"""The worker's tap: the same training data from padded rows, from packed rows, and from the
plugin's own tap.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from heads.errors import ConfigError
from medusa_ppo.companion.holdout import AHEAD_TOKENS, HOLDOUT_PROMPTS, hold_out, stretches
from medusa_ppo.companion.positions import BLOCK, ROW_BYTES
from medusa_ppo.contract.rollout_batch import RolloutBatch
from medusa_ppo.contract.rollouts import Counters, Response, Rollouts, Sampling
from medusa_ppo.loops.passes import PassTap, RowTap, spans
from medusa_ppo.loops.tap import _PolicyTap

ROWS = [((5, 6), (1, 2)), ((7,), (3, 3, 4)), ((5, 6), (9,))]


@pytest.fixture(scope="module")
def model(device: torch.device) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    config = LlamaConfig(vocab_size=16, **sizes, attn_implementation="sdpa")
    return LlamaForCausalLM(config).eval().to(device)


def reference(model: LlamaForCausalLM) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Hidden states and log-probs of the response tokens, one unpadded row after the other."""
    states = []
    logprobs = []
    for prompt, answer in ROWS:
        ids = torch.tensor([[*prompt, *answer]], device=model.device)
        with torch.no_grad():
            hidden = model.model(input_ids=ids).last_hidden_state[0, len(prompt) - 1 : -1]
        states.append(hidden.cpu())
        logprobs_TV = model.lm_head(hidden).log_softmax(-1).detach().cpu()
        logprobs.append(logprobs_TV[range(len(answer)), list(answer)])
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
    rows: list[tuple[tuple[int, ...], tuple[int, ...]]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.zeros(len(rows), 6, dtype=torch.int64)
    attention = torch.zeros(len(rows), 6, dtype=torch.int64)
    for row, (prompt, answer) in enumerate(rows):
        first = 3 - len(prompt)
        ids[row, first : 3 + len(answer)] = torch.tensor([*prompt, *answer])
        attention[row, first : 3 + len(answer)] = 1
    return ids.to(device), attention.to(device)


@torch.no_grad()
def test_padded_micro_batches_in_another_order(model: LlamaForCausalLM):
    states_MD, logprobs = reference(model)
    tap = PassTap(model, Sampling(), 2**20, 2)
    with tap.watch(ROWS):
        for part in ([2], [1, 0]):
            ids, attention = padded([ROWS[i] for i in part], model.device)
            positions = (attention.cumsum(-1) - 1).clamp(min=0)
            model(ids, attention_mask=attention, position_ids=positions)
    tap.add_logprobs(logprobs)
    check(tap.take(5), states_MD, logprobs)
    assert tap.take(6) is None and not model.base_model._forward_hooks


@torch.no_grad()
def test_packed_rows(model: LlamaForCausalLM):
    states_MD, logprobs = reference(model)
    tap = PassTap(model, Sampling(), 2**20, 2)
    ids = torch.tensor([[token for prompt, answer in ROWS for token in (*prompt, *answer)]])
    positions = torch.tensor(
        [[i for prompt, answer in ROWS for i in range(len(prompt) + len(answer))]]
    )
    ids, positions = ids.to(model.device), positions.to(model.device)
    with tap.watch(ROWS):
        model(input_ids=ids, attention_mask=None, position_ids=positions, use_cache=False)
    tap.add_logprobs(logprobs)
    check(tap.take(5), states_MD, logprobs)


@torch.no_grad()
def test_a_batch_may_come_in_several_passes(model: LlamaForCausalLM):
    states_MD, logprobs = reference(model)
    tap = PassTap(model, Sampling(), 2**20, 2)
    for row, values in zip(ROWS, logprobs, strict=True):
        ids, attention = padded([row], model.device)
        with tap.watch([row]):
            model(input_ids=ids, attention_mask=attention)
        tap.add_logprobs([values])
    check(tap.take(5), states_MD, logprobs)


class States(torch.nn.Module):
    """In the place of a model whose states would be gigabytes: a row of two numbers a token, the
    second one the token.
    """

    base_model: torch.nn.Module

    def __init__(self) -> None:
        super().__init__()
        self.base_model = self

    def forward(self, input_ids: torch.Tensor, **_: object) -> tuple[torch.Tensor]:
        ids = input_ids.float()
        return (torch.stack([torch.full_like(ids, -1.0), ids], dim=-1),)


@pytest.mark.parametrize(("passes", "told"), [(1, False), (32, True)], ids=["verl", "openrlhf"])
def test_of_a_batch_beyond_the_budget_a_sample_is_taken_of_all_its_parts(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, passes: int, told: bool
) -> None:
    """verl scores a rank's whole share in one call, of which all was dropped; OpenRLHF in pieces,
    of which the first ones filled the budget and the last quarter gave nothing.
    """
    monkeypatch.setattr("medusa_ppo.loops.passes.plain_model", lambda model: model)
    rows = [((1, 2), tuple(range(10, 10 + 500))) for _ in range(128)]
    rows = [((1, prompt), answer) for prompt, (_, answer) in enumerate(rows)]
    budget = 6400
    model = States()
    quarters = torch.zeros(4)
    places = torch.zeros(5)
    tap = PassTap(model, Sampling(), 2 * budget * (2 * 4 + ROW_BYTES), 2)
    for batch_number in range(24):
        if told:
            tap.expect(128 * 500)
        for part in range(passes):
            own = rows[part * 128 // passes : (part + 1) * 128 // passes]
            with tap.watch(own):
                for prompt, answer in own:
                    model(input_ids=torch.tensor([[*prompt, *answer]], device=device))
            tap.add_logprobs([torch.zeros(500) for _ in own])
        batch = tap.take(batch_number)
        assert batch is not None and batch.weights_M is not None
        assert 0.9 * budget < batch.hidden_MD.shape[0] <= budget
        assert batch.prompts_S is not None and batch.before_S is not None
        # Each prompt is its response here, and prompts are numbered in their order.
        quarters.index_add_(0, batch.prompts_S // 32, batch.lengths_S.float())
        tokens_M = batch.response_ids_M - 10  # Each is its place.
        places += torch.bincount(tokens_M // 100, minlength=5)
        assert batch.left_out + batch.hidden_MD.shape[0] == 128 * 500
        # The sample has answers to few prompts: of many of them a stretch is judged ahead.
        assert hold_out(batch, 0.2, 0)[1] is None
        judged = stretches(batch, 0, AHEAD_TOKENS)
        assert judged.response_ids_M.numel() <= AHEAD_TOKENS
        assert judged.prompts_S.unique().numel() >= HOLDOUT_PROMPTS
    assert quarters.min() > 0.15 * quarters.sum() and quarters.max() < 0.35 * quarters.sum()
    # A piece that is due little more than a block takes a second one only where it is short: at a
    # response's two ends. Over 240 batches it is 0.76; of 24 it varies by 0.03.
    assert places.min() > 0.7 * places.max(), places


class SampledRows(RowTap):
    """Counts the rows that each pass may keep, without a model."""

    def _hooked(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def kept_by(self, rows: int, passes: int, count: int, length: int) -> list[int]:
        found = []
        answers = tuple(Response(n, (1,) * length, (0.0,) * length, "stop") for n in range(count))
        for number in range(passes):
            prompts = tuple((number, n) for n in range(count))
            rollouts = Rollouts(prompts, answers, Counters(), 0.0, self._sampling)
            kept = self._collector_of(rollouts, rows).kept
            found.append(kept)
            self._parts.append(cast(RolloutBatch, SimpleNamespace(hidden_MD=torch.zeros(kept, 1))))
        self._parts = []
        self.take(0)
        return found


@pytest.mark.parametrize("share", [1.0, 0.8], ids=["exactly", "a-quarter-more"])
@pytest.mark.parametrize(("count", "length", "rows"), [(8, 300, 2000), (4, 64, 500)])
def test_each_pass_gives_its_share_if_the_tokens_are_known_roughly(
    count: int, length: int, rows: int, share: float
) -> None:
    """OpenRLHF's worker is told the mean of all ranks. Where it had a quarter more, the last passes
    gave nothing; and the first ones gave more, where responses are shorter than a block.
    """
    tap = SampledRows(Sampling(), 2**40, 4)
    kept_P = torch.zeros(8)
    for _ in range(300):
        tap.expect(int(share * 8 * count * length), rows, about=share < 1)
        kept = tap.kept_by(rows, 8, count, length)
        assert 0.6 * rows < sum(kept) <= rows
        kept_P += torch.tensor(kept)
    assert (kept_P / kept_P.mean() - 1).abs().max() < 0.1, kept_P
    assert kept_P.sum() > 0.8 * 300 * rows


@pytest.mark.parametrize("asked", [None, 8000, 3000], ids=["all", "too-many", "fewer"])
@pytest.mark.parametrize("passes", [1, 32], ids=["verl", "openrlhf"])
def test_a_batch_never_exceeds_its_bytes(
    monkeypatch: pytest.MonkeyPatch, passes: int, asked: int | None
) -> None:
    """The companion takes what fits beside the batch in training, and a larger one not at all: the
    rows that it asks for are counted in another dtype than a worker's states may have, and a
    replica's responses may be longer than the others'.
    """
    monkeypatch.setattr("medusa_ppo.loops.passes.plain_model", lambda model: model)
    rows = [((1, prompt), tuple(range(10, 10 + 500))) for prompt in range(128)]
    budget = 6400
    model = States()
    tap = PassTap(model, Sampling(), 2 * budget * (2 * 4 + ROW_BYTES), 2)
    most = min(budget, asked or budget)
    for longer in (1.0, 1.3):
        for batch_number in range(6):
            tap.expect(int(128 * 500 / longer), asked)
            for part in range(passes):
                own = rows[part * 128 // passes : (part + 1) * 128 // passes]
                with tap.watch(own):
                    for prompt, answer in own:
                        model(input_ids=torch.tensor([[*prompt, *answer]]))
                tap.add_logprobs([torch.zeros(500) for _ in own])
            batch = tap.take(batch_number)
            assert batch is not None
            assert most - 2 * BLOCK <= batch.hidden_MD.shape[0] <= most


def test_many_ranks_sample_in_blocks_of_their_common_sample(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """At 64 ranks a wish of 2,048 rows is 32 for each. In blocks of a sample of 32 rows, one row in
    five could be trained on, and none had the context that an engine gives it.
    """
    monkeypatch.setattr("medusa_ppo.loops.passes.plain_model", lambda model: model)
    ranks, wish, steps, context = 64, 2048, 50, 16
    lengths = [100, 500, 1500]
    model = States()
    taps = [PassTap(model, Sampling(), 1 << 62, 4) for _ in range(ranks)]
    kept = torch.zeros(steps)
    of_ranks = torch.zeros(ranks)
    of_lengths = torch.zeros(len(lengths))
    of_places = torch.zeros(15)  # Of 100 tokens each, in the longest response.
    trained = full = 0
    for step in range(steps):
        for rank, tap in enumerate(taps):
            rows = [((1, n), tuple(range(10, 10 + length))) for n, length in enumerate(lengths)]
            tap.expect(sum(lengths), wish / ranks, rank=rank, ranks=ranks)
            with tap.watch(rows):
                for prompt, answer in rows:
                    model(input_ids=torch.tensor([[*prompt, *answer]], device=device))
            tap.add_logprobs([torch.zeros(length) for length in lengths])
            batch = tap.take(step)
            if batch is None:
                continue
            assert batch.weights_M is not None and batch.prompts_S is not None
            assert batch.hidden_MD.shape[0] + batch.left_out == sum(lengths)
            run_M = torch.cat([torch.arange(n) for n in batch.lengths_S.tolist()])
            place_M = batch.response_ids_M - 10
            trained_M = batch.weights_M > 0
            kept[step] += trained_M.numel()
            trained += int(trained_M.sum())
            full += int((run_M >= place_M.clamp(max=context))[trained_M].sum())
            of_ranks[rank] += trained_M.numel()
            prompts_M = batch.prompts_S.repeat_interleave(batch.lengths_S)
            of_lengths += torch.bincount(prompts_M, minlength=len(lengths))
            of_places += torch.bincount(place_M[prompts_M == 2] // 100, minlength=15)
    assert float(kept.mean()) == pytest.approx(wish, rel=0.05)
    assert 0.5 * wish < float(kept.min()) and float(kept.max()) < 1.5 * wish, kept
    assert trained > 0.9 * kept.sum() and full > 0.9 * trained
    eighths = of_ranks.view(8, 8).sum(1) / of_ranks.sum()
    assert float(eighths.min()) > 0.1 and float(eighths.max()) < 0.15, eighths
    rates = of_lengths / torch.tensor(lengths)
    assert rates.max() < 1.3 * rates.min(), rates
    thirds = of_places.view(3, 5).sum(1)
    assert thirds.max() < 1.3 * thirds.min(), of_places


class Wrapper(torch.nn.Module):
    """As DistributedDataParallel and an FSDP unit hold a model."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


FORMS: dict[str, Callable[[Any], Any]] = {
    "torch.compile": lambda model: torch.compile(model, backend="eager"),
    "compile": lambda model: [model.compile(backend="eager"), model][1],
    "base": lambda model: [model.base_model.compile(backend="eager"), model][1],
    "wrapped": lambda model: Wrapper(torch.compile(model, backend="eager")),
}


def one_layer(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """A copy that compiles faster."""
    small = copy.deepcopy(model)
    small.model.layers = small.model.layers[:1]
    return small


@torch.no_grad()
@pytest.mark.parametrize(
    ("form", "kind"), [*((form, PassTap) for form in FORMS), ("compile", _PolicyTap)]
)
def test_a_compiled_actor_is_tapped_in_each_step(
    model: LlamaForCausalLM, form: str, kind: type[PassTap]
) -> None:
    """Code that was compiled before there was a tap has no hook, and ignores those added later."""
    small = one_layer(model)
    states_MD, logprobs = reference(small)
    actor = FORMS[form](small)
    ids, attention = padded([ROWS[1]], model.device)
    actor(input_ids=ids, attention_mask=attention)
    tap = kind(actor, Sampling(), 2**20, 2)
    for _ in range(2):
        with tap.watch(ROWS):
            for row in (2, 0, 1):  # Of one shape: another one is compiled anew.
                ids, attention = padded([ROWS[row]], model.device)
                actor(input_ids=ids, attention_mask=attention)
        tap.add_logprobs(logprobs)
        check(tap.take(5), states_MD, logprobs)
        actor(input_ids=ids, attention_mask=attention)
        assert tap.take(6) is None, "outside the block nothing is kept"


@torch.no_grad()
def test_an_actor_compiled_after_the_tap_was_made_is_tapped(model: LlamaForCausalLM) -> None:
    actor = one_layer(model)
    states_MD, logprobs = reference(actor)
    tap = PassTap(actor, Sampling(), 2**20, 2)
    actor.compile(backend="eager")
    ids, attention = padded(ROWS, model.device)
    actor(input_ids=ids, attention_mask=attention)
    with tap.watch(ROWS):
        actor(input_ids=ids, attention_mask=attention)
    tap.add_logprobs(logprobs)
    check(tap.take(5), states_MD, logprobs)


def test_gradients_of_a_compiled_actor_are_those_without_a_tap(model: LlamaForCausalLM) -> None:
    actor = one_layer(model)
    actor.compile(backend="eager")
    ids, attention = padded(ROWS, model.device)
    tap = PassTap(actor, Sampling(), 2**20, 2)

    def gradients() -> list[torch.Tensor]:
        actor.zero_grad()
        actor(input_ids=ids, attention_mask=attention).logits.square().sum().backward()
        return [p.grad.clone() for p in actor.parameters() if p.grad is not None]

    before = gradients()
    with tap.watch(ROWS):
        tapped = gradients()
    tap.add_logprobs([torch.zeros(len(answer)) for _, answer in ROWS])
    batch = tap.take(5)
    assert batch is not None and not batch.hidden_MD.requires_grad and batch.prompts_S is not None
    for left, right in zip(before, tapped, strict=True):
        torch.testing.assert_close(right, left, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_rows_that_were_cut_up_are_refused(model: LlamaForCausalLM):
    tap = PassTap(model, Sampling(), 2**20, 2)
    with pytest.raises(ConfigError, match="sequence parallelism"):
        with tap.watch(ROWS):
            ids, positions = torch.tensor([[[5, 6]], [[0, 1]]], device=model.device)
            model(input_ids=ids, position_ids=positions)


def test_a_loop_that_makes_no_pass_is_told_once(
    model: LlamaForCausalLM, caplog: pytest.LogCaptureFixture
) -> None:
    """OpenRLHF's dynamic batches leave out what does not fill one: that ended the training."""
    tap = PassTap(model, Sampling(), 2**20, 2)
    for _ in range(2):
        with tap.watch(ROWS):
            pass
        tap.add_logprobs([torch.zeros(len(answer)) for _, answer in ROWS])
        assert tap.take(5) is None
    (record,) = caplog.records
    assert "no pass went through" in record.message


def test_spans_of_rows_without_any_mask():
    assert spans(torch.zeros(2, 3), None, None) == [(0, 0, 3), (1, 0, 3)]


def test_spans_of_packed_rows_whose_positions_have_several_axes() -> None:
    """verl gives M-RoPE models four planes, the text's first. All was one row, and the training
    ended with advice about sequence parallelism.
    """
    text_N = torch.tensor([0, 1, 2, 0, 1])
    positions = torch.stack([text_N, *[torch.arange(5) + 7] * 3])[:, None]
    assert positions.shape == (4, 1, 5)
    assert spans(torch.zeros(1, 5), None, positions) == [(0, 0, 3), (0, 3, 5)]
    with pytest.raises(ConfigError, match=r"position_ids \(1, 4\)"):
        spans(torch.zeros(1, 5), None, positions[0, :, :4])
