"""`eval` without an engine: what is drawn from is the prompt, categories add up to the whole, and
comparisons are paired.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from heads.acceptance import ReplayResult
from heads.checkpoint import save_heads
from heads.errors import ConfigError, DataError
from heads.heads_config import HeadsConfig
from heads.modules import MedusaHeads
from medusa_ppo.actors.hf import load_actor
from medusa_ppo.contract.rollout_batch import RolloutBatch
from medusa_ppo.contract.rollouts import Counters, Response, Rollouts, Sampling
from medusa_ppo.demo.task import build_tokenizer
from medusa_ppo.drafting.memory import FIRST_SHARES
from medusa_ppo.offline import evaluate
from medusa_ppo.offline.evaluate import PromptGroup, Recalled
from medusa_ppo.offline.options import EvalOptions
from medusa_ppo.reports.evaluation import lines, markdown_report
from medusa_ppo.runtime.console import OfflineProgress


@pytest.fixture
def options(chain_actor: Path, tmp_path: Path) -> EvalOptions:
    rows = [
        {"question": f"what is {n} + 1?", "kind": "even" if n % 2 == 0 else "odd"}
        for n in range(10)
    ]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return EvalOptions(
        model=str(chain_actor),
        heads=tmp_path,
        data=str(data),
        template="{question}",
        category="kind",
    )


def answered(group: PromptGroup, seed: int) -> Rollouts:
    """Rollouts as an engine returns them, with an empty response among them."""
    generator = torch.Generator().manual_seed(seed)
    responses = []
    for index in range(len(group.prompts)):
        length = 0 if index == 1 else int(torch.randint(3, 20, (1,), generator=generator))
        ids = tuple(torch.randint(1, 60, (length,), generator=generator).tolist())
        responses.append(Response(index, ids, (-2.0,) * length, "length"))
    return Rollouts(tuple(group.prompts), tuple(responses), Counters(), 1.0, Sampling())


def test_calls_hold_one_category_each(options: EvalOptions) -> None:
    groups = evaluate._groups(options, evaluate._read(options))
    assert [(g.category, len(g.prompts)) for g in groups] == [("even", 5), ("odd", 5)]
    small = evaluate._groups(replace(options, engine="vllm"), evaluate._read(options))
    assert {g.category: len(g.prompts) for g in small} == {"even": 1, "odd": 1} and len(small) == 10
    with pytest.raises(DataError, match="kinds"):
        evaluate._read(replace(options, category="kinds"))


def test_figures_by_category_and_against_other_heads(
    options: EvalOptions, chain_actor: Path
) -> None:
    torch.manual_seed(0)
    config = HeadsConfig(64, len(build_tokenizer()), 2, "medusa")
    start = MedusaHeads(config)
    moved = MedusaHeads(config)
    for parameter in moved.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    groups = evaluate._groups(options, evaluate._read(options))
    twice = [
        *groups,
        PromptGroup("odd", groups[1].prompts),
    ]  # Two answers to each odd prompt: one observation.
    rounds = [answered(group, seed) for seed, group in enumerate(twice)]
    sampled = replace(options, draft="sampled")
    found = evaluate._replayed(
        sampled, [start, moved], twice, [], [rounds], OfflineProgress(quiet=True)
    )
    one = found[0][0]
    assert one.categories == ["even"] * 4 + ["odd"] * 4 and one.result.drafts_S.numel() == 8
    figures = {
        **evaluate._figures([f[0] for f in found]),
        **evaluate._by_category(sampled, [f[0] for f in found]),
    }
    assert sum(row["drafts"] for row in figures["categories"]) == pytest.approx(
        figures["drafts"], abs=1
    )
    for rows in one.parts.values():  # The same drafts, sorted otherwise.
        assert sum(row["drafts"] for row in rows) == pytest.approx(figures["drafts"], abs=2)
        mean = sum(row["drafts"] * row["mean_acceptance_length"] for row in rows) / sum(
            row["drafts"] for row in rows
        )
        assert mean == pytest.approx(figures["mean_acceptance_length"], abs=0.02)
    assert next(iter(one.parts.values()))[0]["part"] == "0 to 16" and len(one.parts) == 2
    other = figures["compare"]
    low, high = other["difference_interval"]
    assert other["difference"] == pytest.approx(
        figures["mean_acceptance_length"] - other["mean_acceptance_length"]
    )
    assert low < other["difference"] < high
    assert evaluate._figures([one, one])["compare"]["difference_interval"] == [0.0, 0.0], (
        "heads never differ from themselves"
    )


def test_an_engines_counters_make_the_same_figures() -> None:
    rounds = [
        Rollouts((), (), Counters(10, 20, 12, (8, 4)), 1.0, Sampling()),
        Rollouts((), (), Counters(), 1.0, Sampling()),
        Rollouts((), (), Counters(6, 12, 3, (3, 0)), 1.0, Sampling()),
    ]
    counted = evaluate._counted([PromptGroup(c, []) for c in "aba"], rounds)
    figures = evaluate._figures([counted])
    assert (
        figures["drafts"] == 16
        and figures["accepted"] == 15
        and figures["acceptance_per_position"] == [11 / 16, 4 / 16]
    )
    assert figures["mean_acceptance_length"] == 1 + 15 / 16


def test_an_interval_over_prompts_is_wider_than_one_over_their_responses() -> None:
    """Sixteen answers to each of 12 prompts, alike within a prompt: taken one by one, they look far
    surer than they are.
    """
    accepted_SK = (
        torch.rand(12, 1, generator=torch.Generator().manual_seed(1))
        .double()
        .mul(10)
        .repeat_interleave(16, 0)
    )
    result = ReplayResult(torch.full((192,), 10.0).double(), accepted_SK, torch.zeros(192).double())
    grouped = result.by_group(torch.arange(192) // 16)
    assert (
        grouped.mean_acceptance_length == pytest.approx(result.mean_acceptance_length)
        and grouped.drafts_S.numel() == 12
    )
    alone = result.confidence_interval()
    over_prompts = grouped.confidence_interval()
    assert over_prompts.high - over_prompts.low > 3 * (alone.high - alone.low)


def said(*ids: int) -> Rollouts:
    """One response to the prompt (1, 2), tokens of a probability of a half."""
    return Rollouts(
        ((1, 2),),
        (Response(0, ids, (math.log(0.5),) * len(ids), "stop"),),
        Counters(),
        1.0,
        Sampling(),
    )


def test_a_memory_in_a_replay_knows_what_followed() -> None:
    """Heads that say a tenth for everything; the response is one that was given before, up to its
    last token.
    """
    recalled = Recalled({0: (1, 2)}, [said(5, 6, 7, 8), said(5, 6, 9)])
    ids_M = torch.tensor([5, 6, 7, 9])
    batch = RolloutBatch(
        torch.zeros(4, 1),
        ids_M,
        torch.full((4,), math.log(0.5)),
        torch.tensor([4]),
        prompts_S=torch.tensor([0]),
    )
    tenth_MK = torch.full((4, 2), math.log(0.1))
    first = recalled(batch, tenth_MK, tenth_MK).exp()
    w = FIRST_SHARES[0]
    sure, even = (
        0.1 * (1 - w) + w,
        0.1 * (1 - w) + w / 2,
    )  # Behind 1 2 5 always 6; behind 1 2 5 6 it was 7 or 9; behind that 8.
    torch.testing.assert_close(first[:2], torch.tensor([[sure, even], [even, 0.1 * (1 - w)]]))
    assert recalled.trust.by_length()[1][0] == pytest.approx(3.0, abs=0.7), (
        "three drafts behind three or four tokens"
    )
    for _ in range(50):
        last = recalled(batch, tenth_MK, tenth_MK).exp()
    assert last[0, 0] > sure and last[0, 1] > even, "it was always of use there"
    assert last[1, 1] > first[1, 1], "and behind five tokens of none"
    nobody = Recalled({0: (1, 2)}, [])(batch, tenth_MK, tenth_MK).exp()
    torch.testing.assert_close(nobody, torch.full((4, 2), 0.1))


def test_one_hot_drafts_have_no_memory(options: EvalOptions) -> None:
    with pytest.raises(ConfigError, match="--draft sampled"):
        one_hot = replace(options, draft="one-hot", earlier_responses=2)
        evaluate.evaluate_heads(one_hot, OfflineProgress(quiet=True))


def two_ahead(model: PreTrainedModel, prompt: tuple[int, ...]) -> tuple[int, ...]:
    """A response whose tokens are those that fresh heads draft: what the model itself would say one
    token earlier.
    """
    response = [5]
    while len(response) < 8:
        logits_BTV = model(torch.tensor([[*prompt, *response[:-1]]])).logits
        response.append(int(logits_BTV[0, -1].argmax()))
    return tuple(response)


@torch.no_grad()
def test_at_temperature_0_a_draft_is_accepted_if_it_is_the_token(options: EvalOptions) -> None:
    """Whatever its log-prob is: vLLM gives that at temperature 1."""
    heads = MedusaHeads(HeadsConfig(64, len(build_tokenizer()), 1, "medusa"))
    groups = evaluate._groups(options, evaluate._read(options))
    model = load_actor(options.model)
    rounds = []
    for seed, group in enumerate(groups):
        # All but the first two responses are what the heads draft: four steps of two tokens.
        some = answered(group, seed)
        responses = tuple(
            replace(one, token_ids=two_ahead(model, group.prompts[i]), logprobs=(-9.0,) * 8)
            if i >= 2
            else one
            for i, one in enumerate(some.responses)
        )
        rounds.append(replace(some, responses=responses))

    def measured(asked: EvalOptions) -> evaluate.MeasuredHeads:
        quiet = OfflineProgress(quiet=True)
        return evaluate._replayed(asked, [heads], groups, [], [rounds], quiet)[0][0]

    greedy = measured(replace(options, temperature=0.0))
    one_hot = measured(replace(options, draft="one-hot"))
    # Of each group the second response is empty, and is left out.
    accepted_S = greedy.result.accepted_SK[:, 0]
    expected_S = torch.tensor([0.0, *[4.0] * 3] * 2, dtype=torch.float64)
    torch.testing.assert_close(accepted_S, expected_S)
    assert torch.equal(accepted_S, one_hot.result.accepted_SK[:, 0])
    assert list(greedy.parts) == ["By place in the response, tokens"], "and it has no entropy"


@pytest.mark.parametrize("temperatures", [(-1.0,), (1.0, math.nan), (math.inf,)])
def test_a_temperature_that_is_none_is_refused(
    options: EvalOptions, temperatures: tuple[float, ...]
) -> None:
    with pytest.raises(ConfigError, match="--temperatures"):
        asked = replace(options, temperatures=temperatures)
        evaluate.evaluate_heads(asked, OfflineProgress(quiet=True))


def test_a_memory_at_temperature_0_is_for_an_engine(options: EvalOptions) -> None:
    with pytest.raises(ConfigError, match="--engine vllm"):
        asked = replace(options, temperature=0.0, earlier_responses=2)
        evaluate.evaluate_heads(asked, OfflineProgress(quiet=True))


def evaluated(
    options: EvalOptions, monkeypatch: pytest.MonkeyPatch
) -> tuple[dict[str, Any], list[str]]:
    """What `eval` finds for answers that no engine writes, and what it says meanwhile."""

    def generate(asked: EvalOptions, groups: list[PromptGroup], *_: object) -> object:
        return [], [[answered(group, seed) for seed, group in enumerate(groups)]], []

    monkeypatch.setattr(evaluate, "_generate", generate)
    said_lines: list[str] = []
    progress = OfflineProgress(quiet=True)
    monkeypatch.setattr(progress, "say", said_lines.append)
    result = evaluate.evaluate_heads(options, progress)
    return result, said_lines


def test_prompts_that_are_too_long_are_told(
    options: EvalOptions, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    vocabulary = len(build_tokenizer())
    heads = MedusaHeads(HeadsConfig(64, vocabulary, 1, "medusa"))
    save_heads(tmp_path / "heads", heads, lm_head_VD=torch.ones(vocabulary, 64))
    with Path(options.data).open("a") as data:
        data.write(json.dumps({"question": "2 + 2 " * 600, "kind": "even"}) + "\n")

    result, said_lines = evaluated(replace(options, heads=str(tmp_path / "heads")), monkeypatch)
    assert (result["prompts"], result["prompts_left_out"]) == (10, 1)
    assert "1 prompt is too long and left out" in said_lines


@pytest.mark.parametrize("trained_on", ["same", "other", "unknown"])
def test_heads_measured_on_their_own_prompts_are_told(
    options: EvalOptions, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, trained_on: str
) -> None:
    vocabulary = len(build_tokenizer())
    heads = MedusaHeads(HeadsConfig(64, vocabulary, 1, "medusa"))
    data = Path(options.data)
    # The same file, written another way.
    named = {
        "same": str(data.parent / "x" / ".." / data.name),
        "other": str(tmp_path / "train.jsonl"),
    }
    note = {"options": {"data": named[trained_on]}} if trained_on in named else {}
    save_heads(tmp_path / "heads", heads, lm_head_VD=torch.ones(vocabulary, 64), metadata=note)

    result, said_lines = evaluated(replace(options, heads=str(tmp_path / "heads")), monkeypatch)
    told = [line for line in said_lines if "were trained on" in line]
    same = trained_on == "same"
    assert len(told) == same and [result.get("warning")] == (told or [None])
    assert ("were trained on" in lines(result)[-1]) == same
    assert ("were trained on" in markdown_report(result)) == same


@pytest.mark.parametrize("engine", ["replay", "vllm"])
def test_heads_that_draft_from_all_tokens_are_refused_before_the_work(
    options: EvalOptions, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, engine: Any
) -> None:
    vocabulary = len(build_tokenizer())
    for name in ("shared", "own"):
        heads = MedusaHeads(HeadsConfig(64, vocabulary, 1, "medusa", lm_head=name))
        save_heads(tmp_path / name, heads, lm_head_VD=torch.ones(vocabulary, 64))

    def generate(*_: object) -> None:
        raise AssertionError("hours of work")

    monkeypatch.setattr(evaluate, "_generate", generate)
    asked = replace(
        options,
        engine=engine,
        heads=str(tmp_path / "shared"),
        compare=tmp_path / "own",
        draft_vocab=5,
    )
    with pytest.raises(ConfigError, match="lm_head=own"):
        evaluate.evaluate_heads(asked, OfflineProgress(quiet=True))
