"""The page as text: self-contained, safe against hostile names, small for long runs, readable at
every stage of a run.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import psutil
import pytest

from heads.errors import UsageError
from medusa_ppo.contract import metrics
from medusa_ppo.contract.metrics import REASONS
from medusa_ppo.reports import page as pages
from medusa_ppo.reports.page import follow, phase_shares, render_page, tiles, write_report
from medusa_ppo.reports.panels import other_metrics, rest_seconds, version_marks
from medusa_ppo.reports.run_files import Run, read_run, start_ticks
from medusa_ppo.reports.summary import build_summary
from medusa_ppo.reports.tables import (
    comparison_rows,
    config_rows,
    shown_versions,
    summary_rows,
    verdict,
    version_rows,
)
from medusa_ppo.runtime import wording as w

MakeRun = Callable[..., Path]
VOID = {"meta", "link", "br", "hr", "img", "input"}


class Balance(HTMLParser):
    """Checks that every tag that opens also closes, in order; collects all attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value) for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()


def page_of(run: Run, **options) -> str:
    return render_page(run, build_summary(run), **options)


def parsed(text: str) -> Balance:
    balance = Balance()
    balance.feed(text)
    assert balance.open == []
    return balance


@pytest.mark.parametrize("name", ["demo", "one", "zero", "long"])
def test_the_page_is_whole_and_loads_nothing(runs: Path, name: str) -> None:
    text = page_of(read_run(runs / name))
    page = parsed(text)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)
    assert "@import" not in text and "url(" not in text
    loading = [
        item for item in page.attributes if item[1] in ("src", "href", "srcset", "data", "action")
    ]
    assert loading == [("link", "href", "data:,")]
    assert "default-src 'none'" in text
    script = re.search(r"<script>(.*?)</script>", text, re.S)
    assert script is not None
    only = base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode()
    assert f"script-src 'sha256-{only}';" in text, (
        "a script that came in with the data does not run"
    )
    ids = [value for _, attribute, value in page.attributes if attribute == "id"]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("name", ["demo", "one", "long"])
def test_every_chart_is_well_formed_and_says_in_words_what_it_shows(runs: Path, name: str) -> None:
    charts = re.findall(r'<div class="box">(.*?)</div>', page_of(read_run(runs / name)), re.S)
    assert len(charts) >= 14
    for chart in charts:
        root = ET.fromstring(chart)
        assert root.get("role") == "img" and root.findtext("title")
        assert "last " in (root.findtext("desc") or "") or "not measured" in (
            root.findtext("desc") or ""
        )
        assert "nan" not in chart.lower().replace("nanos", "") and "inf" not in (
            root.findtext("desc") or ""
        )


def test_ten_thousand_steps_stay_small(runs: Path) -> None:
    assert len(page_of(read_run(runs / "long")).encode()) < 2_000_000


def test_hostile_names_stay_text(tmp_path: Path, make_run: MakeRun) -> None:
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
    run = read_run(make_run(tmp_path / "run", 3))
    steps = tuple({**step, evil: 1.0} for step in run.steps)
    meta = {
        **run.meta,
        "name": evil,
        "config": {evil: evil, "model": {"path": evil}},
        "versions": {evil: evil},
        "extras": {"error": evil},
    }
    text = page_of(Run(run.path, steps, meta, 0, "failed"), other=Run(run.path, steps, meta))
    page = parsed(text)
    assert text.count("<script") == 2 and "<img" not in text
    assert not [item for item in page.attributes if item[1].startswith("on")]
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    assert data is not None and json.loads(data[1])["charts"]


def test_the_hover_values_are_the_measured_ones(runs: Path) -> None:
    run = read_run(runs / "demo")
    data = re.search(r'id="data">(.*?)</script>', page_of(run), re.S)
    assert data is not None
    charts = json.loads(data[1])["charts"]
    entropy = charts["entropy"][0]["mean"]
    assert entropy == pytest.approx(run.column(metrics.ENTROPY), rel=1e-4)
    frozen = next(item for item in charts["mal"] if item["name"].startswith("frozen"))
    assert [value is None for value in frozen["mean"]] == [
        value is None for value in run.column(metrics.REPLAY_FROZEN)
    ]


def test_two_runs_share_one_page(runs: Path, tmp_path: Path) -> None:
    path = write_report(runs / "demo", tmp_path / "both.html", runs / "other")
    text = path.read_text()
    parsed(text)
    assert "Two runs side by side" in text and "companion.learning_rate" in text
    assert '"count":20' in text and text.count("t-other") > 10


def test_without_a_path_the_reports_lie_in_the_run(tmp_path: Path, make_run: MakeRun) -> None:
    run = make_run(tmp_path / "run", 4)
    assert write_report(run) == run / "report.html"
    assert json.loads((run / "summary.json").read_text())["steps"] == 4
    with pytest.raises(UsageError):
        write_report(run, compare=tmp_path / "nothing")


def test_follow_writes_again_when_the_run_grows_and_stops_with_it(
    tmp_path: Path, make_run: MakeRun
) -> None:
    own = {
        "pid": os.getpid(),
        "create_time": psutil.Process().create_time(),
        "host": platform.node(),
    }
    source = make_run(tmp_path / "source", 3)
    lines = (source / "metrics.jsonl").read_text().splitlines(keepends=True)
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.json").write_text(json.dumps({"name": "run", "status": "running", "process": own}))
    (run / "metrics.jsonl").write_text("")
    pages: list[str] = []
    waits = iter(["nothing", *lines, "end"])

    def wait(seconds: float) -> None:
        event = next(waits)
        if event == "end":
            (run / "run.json").write_text(json.dumps({"name": "run", "status": "finished"}))
        elif event != "nothing":
            with open(run / "metrics.jsonl", "a") as stream:
                stream.write(event)

    path = follow(run, on_refresh=lambda page: pages.append(page.read_text()), wait=wait)
    assert path == run / "report.html"
    assert [re.search(r"from (\d+) line", page)[1] for page in pages] == ["0", "1", "2", "3", "3"]
    assert [bool(re.search(r'data-refresh="10"', page)) for page in pages] == [True] * 4 + [False]


def test_a_run_that_does_not_grow_is_read_once(
    tmp_path: Path, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading thousands of steps takes a second, on the node that trains."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    run = make_run(tmp_path / "run", 2, status="running")
    own = {"pid": process.pid, "start_ticks": start_ticks(process.pid), "host": platform.node()}
    (run / "run.json").write_text(json.dumps({"status": "running", "process": own}))
    reads: list[Path] = []

    def read(path: Path) -> Run:
        reads.append(path)
        return read_run(path)

    monkeypatch.setattr(pages, "read_run", read)
    seen: list[int] = []

    def wait(seconds: float) -> None:
        seen.append(len(reads))
        if len(seen) == 3:  # It ends without a word.
            process.communicate()

    follow(run, wait=wait)
    assert seen == [1, 1, 1]
    assert "killed" in (run / "report.html").read_text(), "its end is seen all the same"


def test_ctrl_c_leaves_a_page_that_rests(tmp_path: Path, make_run: MakeRun) -> None:
    own = {
        "pid": os.getpid(),
        "create_time": psutil.Process().create_time(),
        "host": platform.node(),
    }
    run = make_run(tmp_path / "run", 2, status="running")
    (run / "run.json").write_text(json.dumps({"status": "running", "process": own}))

    def wait(seconds: float) -> None:
        raise KeyboardInterrupt

    assert 'data-refresh="0"' in follow(run, tmp_path / "page.html", wait=wait).read_text()
    assert not (run / "report.html").exists()


def test_every_logged_number_is_somewhere_on_the_page(runs: Path) -> None:
    run = read_run(runs / "demo")
    text = page_of(run)
    for name in other_metrics(run):
        assert f"<h3>{name}</h3>" in text
    assert {metrics.NUM_DRAFTS, metrics.ACTOR_GRAD_NORM, metrics.COMPANION_LOSS} <= set(
        other_metrics(run)
    )


def test_versions_are_rows_and_flags(runs: Path) -> None:
    run = read_run(runs / "demo")
    rows = version_rows(run)
    assert sum(row.steps for row in rows) == 16 and rows[0].version == 0
    assert [step for step, _ in version_marks(run)] == [row.first_step for row in rows[1:]]
    second = rows[2]
    served = [step for step in run.steps if step["heads_version"] == second.version]
    assert second.policy_version == served[0]["policy_version"] - served[0]["staleness"]
    assert second.engine == pytest.approx(
        1 + sum(s["accepted"] for s in served) / sum(s["drafts"] for s in served)
    )
    kept, left_out = shown_versions(rows * 200)
    assert len(kept) + left_out == 200 * len(rows) and len(kept) == 300


def test_estimates_belong_to_the_heads_that_were_judged() -> None:
    """The judgement that publishes version 4 is of version 3, and stands in a step of 4."""
    steps = [
        {"step": 0, "heads_version": 3},
        {"step": 1, "heads_version": 4, "replay_mal_serving": 3.98, "replay_heads_version": 3},
        {"step": 2, "heads_version": 4, "replay_mal_serving": 4.10, "replay_heads_version": 4},
    ]
    for step in steps[1:]:
        step |= {"replay_mal_candidate": 4.2, "replay_mal_frozen": 3.8, "versions_published": 4}
    rows = version_rows(Run(Path("r"), tuple(steps)))
    assert [(row.version, row.replay) for row in rows] == [(3, 3.98), (4, 4.10)]
    old = [
        {name: value for name, value in step.items() if name != "replay_heads_version"}
        for step in steps
    ]
    rows = version_rows(Run(Path("r"), tuple(old)))
    assert [row.replay for row in rows] == [None, pytest.approx(4.04)], "these lines don't say"


def test_phases_that_overlap_are_shares_of_the_run() -> None:
    """Generation beside the update: shares of their sum would say 51 % and 34 %."""
    phases = {"generate_s": 90.0, "score_s": 20.0, "update_s": 60.0, "sync_s": 5.0}
    beside = Run(
        Path("r"), tuple({"step": n, "wall_s": 100.0 * (n + 1), **phases} for n in range(10))
    )
    shares = {part["name"]: part["text"] for part in phase_shares(build_summary(beside))}
    assert shares == {"generate": "90 %", "score": "20 %", "update": "60 %", "sync": "5.0 %"}
    said = "Phases overlap: their seconds add up to 1.75 times those of the run."
    assert said in page_of(beside)
    in_turn = Run(Path("r"), ({"step": 0, "wall_s": 200.0, **phases},))
    shares = {part["name"]: part["text"] for part in phase_shares(build_summary(in_turn))}
    assert shares["generate"] == "45 %" and shares["rest"] == "12 %"
    assert "Phases overlap" not in page_of(in_turn)


def test_the_rest_of_a_step_is_what_no_phase_accounts_for() -> None:
    steps = (
        {"step": 0, "wall_s": 5.0},
        {"step": 1, "wall_s": 9.0, "generate_s": 1.0, "update_s": 2.5},
        {"step": 3, "wall_s": 20.0},
        {"step": 4},
    )
    assert rest_seconds(Run(Path("r"), steps)) == [None, 0.5, None, None]


def test_configuration_rows_mark_what_differs_from_the_defaults() -> None:
    rows = {
        key: (value, changed)
        for key, value, changed in config_rows(
            {"seed": 0, "ppo": {"steps": 99}, "mine": {"x": None}, "name": ""}
        )
    }
    assert rows == {
        "seed": ("0", False),
        "ppo.steps": ("99", True),
        "mine.x": ("null", False),
        "name": ("''", True),
    }


def test_the_drafts_chosen_stand_by_running_sequences(runs: Path) -> None:
    table = page_of(read_run(runs / "demo")).split('id="choices"')[1].split("</table>")[0]
    rows = [
        re.findall(r"<t[hd][^>]*>([^<]*)<", row)
        for row in table.split("<tbody>")[1].split("</tr>")[:2]
    ]
    assert rows[0] == ["1", "160", "10 %", "20 %", "70 %", w.ratio(1.31)]
    assert rows[1][:4] == ["8 to 15", "640", "75 %", "25 %"]


def test_the_schedule_stands_with_its_reasons(runs: Path) -> None:
    run = read_run(runs / "demo")
    text = page_of(run)
    card = text.split('id="schedule"')[1].split("</table>")[0]
    rows = [
        re.findall(r"<t[hd][^>]*>([^<]*)<", row)
        for row in card.split("<tbody>")[1].split("</tr>")[:3]
    ]
    assert [row[:2] for row in rows] == [["floor", "10"], ["waiting", "5"], ["training", "1"]]
    assert all(row[2] == REASONS.get(row[0], "") for row in rows) and rows[2][2], (
        "`floor` is of runs before 0.2"
    )
    assert 'id="chart-passes"' in card and metrics.COMPANION_PASSES not in other_metrics(run)
    (row,) = [figure for what, figure in summary_rows(build_summary(run)) if "passes" in what]
    assert row == "0.906 (floor 10, waiting 5, training 1)"
    steps = tuple(
        {key: value for key, value in step.items() if "passes" not in key and "reason" not in key}
        for step in run.steps
    )
    old = Run(run.path, steps, run.meta)
    assert 'id="schedule"' not in page_of(old), "a run of an earlier release"


def test_what_the_plugin_is_worth_stands_on_the_page_with_and_without(runs: Path) -> None:
    run = read_run(runs / "demo")
    assert 'id="worth"' not in page_of(run)
    comparison = {
        "rollouts": [
            {
                "pair_speedup": 1.3,
                "pair_drafting_tokens_per_s": 650.0,
                "pair_plain_tokens_per_s": 500.0,
            }
        ],
        "steps": [
            {
                "with": {"step_s": 11.0, "generate_s": 3.0},
                "without": {"step_s": 10.0, "generate_s": 4.0},
            }
        ],
    }
    text = page_of(
        replace(run, meta={**run.meta, "comparison": comparison, "actor_note": "an actor of paper"})
    )
    parsed(text)
    assert (
        '<tr><th scope="row">a whole PPO step</th><td>11.0 s</td><td>10.0'
        " s</td><td>\N{MULTIPLICATION SIGN}1.10</td>" in text
    )
    assert (
        "<td>650</td><td>500</td>" in text
        and "Time of a whole PPO step" in text
        and "10 % more time" in text
    )
    assert text.count("Measured on an actor of paper.") == 2, (
        "beside the verdict and beside the table"
    )


def test_figures_that_only_one_of_two_runs_has_stand_beside_a_dash(runs: Path) -> None:
    run = read_run(runs / "demo")
    steps = [{"with": {"step_s": 11.0}, "without": {"step_s": 10.0}}]
    compared = replace(run, meta={**run.meta, "comparison": {"steps": steps}})
    for here, there in ((run, compared), (compared, run)):
        rows = {
            what: figures
            for what, *figures in comparison_rows(build_summary(here), build_summary(there))
        }
        step = rows["A whole PPO step, with the plugin / without it"]
        assert step[here is run].startswith("11.0 s / 10.0 s") and step[here is not run] == w.NONE


def test_who_worked_when_is_drawn_for_the_last_step_that_says_so(runs: Path) -> None:
    run = read_run(runs / "demo")
    assert "Who worked when" not in page_of(run)
    spans = {
        "engine": [[0.0, 4.0]],
        "actor": [[1.0, 2.0], [3.0, 5.0]],
        "reward": [["x", 2]],
        "stranger": [[0, 1]],
        "critic": "none",
    }
    told = replace(
        run,
        steps=[
            *run.steps[:-1],
            {
                **run.steps[-1],
                metrics.SPANS: spans,
                metrics.GENERATE_SCORE_S: 5.0,
                metrics.GENERATE_SCORE_IDLE: 0.3,
            },
        ],
    )
    text = page_of(told)
    parsed(text)
    assert "Who worked when, in step 15" in text and "were idle for 30 %" in text
    (drawing,) = re.findall(
        r'<svg class="plot still".*?data-chart="spans-0".*?</svg></svg>', text, re.S
    )
    assert re.findall(r'class="fill t-(\w+)" d="([^"]*)"', drawing) == [
        ("generate", "M0 2H800v18H0z"),
        ("score", "M200 24H400v18H200zM600 24H1000v18H600z"),
    ]
    assert "engine: 4 s in 1 part." in drawing and "actor: 3 s in 2 parts." in drawing
    both = page_of(told, other=told)
    assert both.count("Who worked when, in step 15 of demo") >= 2 and 'id="chart-spans-1"' in both
    assert (
        dict(summary_rows(build_summary(told)))[
            "Generating and scoring responses, per step; engine and scoring idle"
        ]
        == "5 s, 30 % idle"
    )
    # Two sides that work in turn are idle for half of the time, whatever they do.
    told.steps[-1][metrics.GENERATE_SCORE_IDLE] = 0.5
    assert (
        dict(summary_rows(build_summary(told)))["Generating and scoring responses, per step"]
        == "5 s"
    )
    assert "Who worked when" in page_of(told) and "idle for 50 %" not in page_of(told)


def test_lengths_are_those_of_the_steps_with_drafts(tmp_path: Path) -> None:
    """On the tile, in the table and in the verdict; the share is of the last window's steps."""
    step = {
        "step": 0,
        "drafts": 10,
        "accepted": 20,
        "acceptance_per_position": [1.0, 1.0],
        "replay_mal_serving": 2.5,
        "replay_mal_frozen": 2.5,
        "versions_published": 1,
    }
    drafted = {"draft_choices": [{"running": 1, "steps": [0, 100], "speedup": 1.5}]}
    seldom = {"draft_choices": [{"running": 64, "steps": [47, 0, 3], "speedup": 1.0}]}
    often = Run(tmp_path, ({**step, **drafted},))
    now_seldom = Run(tmp_path, ({**step, **drafted}, {**step, **seldom, "step": 1}))
    summary = build_summary(now_seldom)
    assert summary["drafted_frac"] == pytest.approx(0.06)
    rows = dict(summary_rows(summary))
    assert rows["Tokens per engine step, first published heads -> last steps"].endswith(
        "3.00 (in steps with drafts, 6.0 % of all)"
    )
    # One version is not compared with itself.
    replay = rows["The same by replay, trained heads / frozen heads"]
    assert replay == "2.50, of the only version so far"
    assert "frozen" not in verdict(summary)
    assert "wrote 3.00 tokens per step with drafts (6.0 % of all)" in verdict(summary)
    (tile, *_) = tiles(now_seldom, summary)
    assert tile["note"].startswith("with drafts, 6.0 % of the steps; ")
    assert tile["note"].endswith("one version, nothing to compare")
    assert "with drafts" not in tiles(often, build_summary(often))[0]["note"]


def test_heads_that_the_first_version_has_replaced_are_not_called_by_its_name(
    tmp_path: Path,
) -> None:
    """The figures of the step that publishes it are of those that the run started with."""
    row = "The same by replay, trained heads / frozen heads"
    judged = {"drafts": 10, "accepted": 1, "acceptance_per_position": [0.1, 0.0]}
    judged |= {"replay_mal_serving": 1.02, "replay_mal_frozen": 1.02}
    steps = [{**judged, "step": n, "heads_version": 0, "versions_published": 0} for n in range(3)]
    steps.append({**judged, "step": 3, "heads_version": 0, "versions_published": 1})
    run = Run(tmp_path, tuple(steps))
    summary = build_summary(run)
    assert summary["mean_acceptance_length"]["frozen"] is None
    assert dict(summary_rows(summary))[row] == "\N{EM DASH} / \N{EM DASH}"
    assert tiles(run, summary)[0]["note"] == "no replay yet"
    served = {**judged, "step": 4, "heads_version": 1, "versions_published": 1}
    served |= {"replay_mal_serving": 1.6, "replay_mal_frozen": 1.6}
    run = Run(tmp_path, (*steps, served))
    assert dict(summary_rows(build_summary(run)))[row] == "1.60, of the only version so far"
    assert tiles(run, build_summary(run))[0]["note"].startswith("by replay 1.60; ")
    # A companion that nobody waits for: the batch judged last is older than the step.
    early = {**served, **judged, "policy_version": 4, "replay_policy_version": 3}
    late = {**served, "step": 5, "policy_version": 5, "replay_policy_version": 4}
    for last, expected in (((early,), None), ((early, late), 1.6)):
        summary = build_summary(Run(tmp_path, (*steps, *last)))
        assert summary["mean_acceptance_length"]["frozen"] == expected
    # Lines that name the heads that were judged need no such inference.
    early |= {"replay_heads_version": 0}
    late |= {"replay_heads_version": 1}
    for last, expected in (((early,), None), ((early, late), 1.6)):
        summary = build_summary(Run(tmp_path, (*steps, *last)))
        assert summary["mean_acceptance_length"]["frozen"] == expected
