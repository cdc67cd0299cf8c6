"""What a bench leaves behind: figures, a table with its conditions, a plot that is XML."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from heads.checkpoint import save_heads
from heads.errors import CheckpointError, ConfigError
from heads.heads_config import HeadsConfig
from heads.modules import MedusaHeads
from medusa_ppo.bench import heads_table, plugin_costs
from medusa_ppo.bench import rollout_speed as rollout
from medusa_ppo.bench.bench_page import draw_ratios, write_bench
from medusa_ppo.bench.pairs import table_of
from medusa_ppo.bench.rollout_speed import RolloutBench
from medusa_ppo.cli.app import app
from medusa_ppo.config.engine_section import EngineConfig
from medusa_ppo.contract import metrics as names
from medusa_ppo.contract.rollouts import Counters, Response, Rollouts, Sampling
from medusa_ppo.runtime.console import OfflineProgress


def test_files_hold_figures_conditions_and_table(tmp_path: Path) -> None:
    settings = RolloutBench("m", "h", "d", "t", batches=(1, 4))
    plot = draw_ratios(
        "A <title>", ["1", "4"], {"none": [1.0, 1.0], "ours": [1.6, 0.9]}, "sequences"
    )
    files = write_bench(
        tmp_path / "deep" / "rollout.json",
        settings,
        {"rows": [1]},
        [["a", "b"], ["1", "2"]],
        ["Well."],
        plot,
    )
    record = json.loads(files[0].read_text())
    assert (
        record["rows"] == [1]
        and record["settings"]["batches"] == [1, 4]
        and record["versions"]["torch"]
        and record["hardware"]["cpu"]
    )
    text = files[1].read_text()
    assert (
        "| a | b |" in text and "| 1 | 2 |" in text and "Well." in text and "batches=[1, 4]" in text
    )
    assert "![ratios](rollout.svg)" in text
    assert files[2].name == "rollout.svg" and files[2].read_text() == plot


def test_the_plot_has_a_bar_for_every_ratio_and_a_line_at_one() -> None:
    root = ET.fromstring(
        draw_ratios("t", ["1", "4"], {"none": [1.0, 1.0], "ours": [1.6, 0.9]}, "sequences")
    )
    name = "{http://www.w3.org/2000/svg}"
    texts = [text.text for text in root.iter(f"{name}text")]
    assert texts.count("1.00") == 2 and {
        "1.60",
        "0.90",
        "1 sequences",
        "4 sequences",
        "none",
        "ours",
    } <= set(texts)
    (line,) = root.iter(f"{name}line")
    bars = [rect for rect in root.iter(f"{name}rect") if rect.get("width") == "15.0"]
    at_one = [bar for bar in bars if abs(float(bar.get("y", 0)) - float(line.get("y1", 0))) < 0.11]
    assert len(bars) == 4 and len(at_one) == 2


def test_the_plot_has_every_arm_however_many_there_are() -> None:
    arms = {f"arm {number}": [1.0 + number / 100] for number in range(12)}
    root = ET.fromstring(draw_ratios("t", ["1"], arms, "sequences"))
    name = "{http://www.w3.org/2000/svg}"
    texts = {text.text: float(text.get("y", 0)) for text in root.iter(f"{name}text")}
    assert set(arms) <= set(texts) and {f"{1 + n / 100:.2f}" for n in range(12)} <= set(texts)
    height = float(root.get("viewBox", "").split()[-1])
    assert max(texts.values()) < height, "the last row of the legend is inside"


def test_the_page_names_the_dtype_that_auto_turned_out_to_be(tmp_path: Path) -> None:
    settings = RolloutBench("m", "h", "d", "t")
    assert settings.dtype == "auto"
    files = write_bench(tmp_path / "r.json", settings, {"dtype": "bfloat16"}, [["a"], ["1"]], [])
    assert json.loads(files[0].read_text())["settings"]["dtype"] == "bfloat16"
    assert "dtype=bfloat16" in files[1].read_text()


def test_rollout_table_and_verdict() -> None:
    row = {
        "tokens_per_s": 200.0,
        "ratio_low": 1.0,
        "ratio_high": 1.0,
        "mean_acceptance_length": None,
        "drafts_per_step": 0.0,
    }
    rows = [
        row | {"batch": 1, "arm": "none", "ratio": 1.0},
        row | {"batch": 1, "arm": "stock medusa", "ratio": 0.8},
        row | {"batch": 1, "arm": "ours, K = 2", "ratio": 1.7},
        row
        | {
            "batch": 1,
            "arm": "ours, K chosen",
            "ratio": 1.6,
            "mean_acceptance_length": 1.9,
            "drafts_per_step": 3.5,
        },
    ]
    result = {"rows": rows, "batches": [1], "arms": [r["arm"] for r in rows]}
    table = rollout.table(result)
    assert (
        table[0][0] == "sequences"
        and table[1][-2:] == ["", ""]
        and table[4][3] == "1.60"
        and table[4][-2:] == ["1.90", "3.5"]
    )
    first, second, third = rollout.verdict(result)
    assert "x1.60 at 1" in first and "x0.94 at 1" in second and "x2.00 at 1" in third
    assert "1.60" in rollout.plot(result)


def test_a_cell_without_a_figure_is_empty() -> None:
    columns = {"name": "{name}", "range": "{low:.1f} to {high:.1f}"}
    rows = [{"name": "a", "low": 1.0, "high": 2.0}, {"name": "b", "low": None, "high": 2.0}]
    assert table_of(columns, rows) == [["name", "range"], ["a", "1.0 to 2.0"], ["b", ""]]


def test_tables_of_the_other_benches() -> None:
    swap = {
        "parameters": 12288,
        "bytes": 49152,
        "first_s": 0.8,
        "median_s": 0.28,
        "max_s": 0.9,
        "read_s": 0.12,
    }
    assert plugin_costs.swap_table(swap)[1] == [
        "12,288",
        "49,152",
        "0.800",
        "0.280",
        "0.900",
        "0.120",
    ]
    more = {"ratio_to_read": 2.3, "swaps_that_changed_the_drafts": 3, "swaps_compared": 3}
    assert "x2.3 of reading" in plugin_costs.swap_verdict({**swap, **more})[0]
    cost = {
        "seconds_without": 2.0,
        "seconds_with": 2.1,
        "cost": 1.05,
        "cost_low": 1.0,
        "cost_high": 1.1,
        "exposed_share": 0.031,
    }
    assert plugin_costs.companion_table({**cost, "companion_s_per_step": 1.5})[1] == [
        "2.00",
        "2.10",
        "1.050",
        "1.000 to 1.100",
        "3.1%",
        "1.50",
    ]
    assert "x1.050 of one without" in plugin_costs.companion_verdict(cost)[0]
    row = {
        "kind": "hydra",
        "loss": "tv",
        "parameters": 2_620_000,
        "one_hot": 1.588,
        "sampled": 1.869,
        "draft_temperature": 1.0,
    }
    table = heads_table.table({"rows": [{**row, "train_tokens_per_s": 4321.0}]})
    assert table[1] == ["hydra", "tv", "2.62 M", "1.588", "1.869", "1.0", "4321"]


def test_options_of_the_command_line_arrive_and_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {
        "batch": 2,
        "arm": "ours, K chosen",
        "tokens_per_s": 1.0,
        "ratio": 1.5,
        "ratio_low": 1.0,
        "ratio_high": 2.0,
    }
    rows = [{**row, "mean_acceptance_length": 2.0, "drafts_per_step": 3.0}]
    monkeypatch.setattr(
        rollout,
        "run_rollout",
        lambda bench, progress: {"rows": rows, "batches": [2], "arms": ["ours, K chosen"]},
    )
    file = tmp_path / "rollout.json"
    heads = tmp_path / "heads"
    heads.mkdir()
    sizes = {"medusa_ppo": {"heads": {"hidden_size": 8, "vocab_size": 9}}}
    (heads / "config.json").write_text(json.dumps(sizes))
    words = [
        "bench",
        "rollout",
        "--model",
        "m",
        "--heads",
        str(heads),
        "--data",
        "d",
        "--template",
        "t",
        "--batches",
        "2",
        "--json",
        str(file),
    ]
    done = CliRunner().invoke(app, [*words, "--seed", "7", "--others", "none"])
    assert done.exit_code == 0 and "x1.50 at 2 sequences" in done.output, done.output
    settings = json.loads(file.read_text())["settings"]
    assert (settings["heads"], settings["batches"], settings["seed"], settings["others"]) == (
        str(heads),
        [2],
        7,
        ["none"],
    )
    wrong = CliRunner().invoke(app, [*words, "--batches", "0"])
    assert wrong.exit_code == 2 and "--batches takes numbers above 0" in wrong.output
    assert CliRunner().invoke(app, [*words, "--batches", ""]).exit_code == 2
    wrong = CliRunner().invoke(app, [*words, "--fixed=-1"])
    assert wrong.exit_code == 2 and "--fixed takes numbers from 0 on" in wrong.output
    assert CliRunner().invoke(app, [*words, "--fixed", "0,1"]).exit_code == 0


def test_a_second_engine_without_speculation_shows_the_noise(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started: list[str] = []

    # Stands in for three real engines: which ones start is all that is asked here.
    class Engine:
        def __init__(self, model: str, heads: None, config: Any, seed: int, plan: Any) -> None:
            started.append(plan)

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *raised: object) -> None:
            """Nothing is open."""

    class Plan:
        max_drafts = 4

    monkeypatch.setattr(rollout, "RayEngine", Engine)
    monkeypatch.setattr(
        rollout, "plan_launch", lambda model, heads, config, seed: Plan() if heads else "plain"
    )
    config = EngineConfig()
    with rollout.running_arms("m", "h", "", config, 0, tmp_path, others=("again",)) as arms:
        assert [arm.name for arm in arms] == [
            "none",
            "none, again",
            "ours, K = 4",
            "ours, K chosen",
        ]
        assert arms[0].engine is not arms[1].engine and started[:2] == ["plain", "plain"]
    rows = [
        {"batch": 4, "arm": "none", "ratio": 1.0},
        {"batch": 4, "arm": "none, again", "ratio": 0.97},
        {"batch": 4, "arm": "ours, K chosen", "ratio": 1.2},
    ]
    said = rollout.verdict({"rows": rows})
    assert said[-1] == "A second engine without speculation against the first: x0.97 at 4."


def test_an_arm_that_vllm_does_not_have_here_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = RolloutBench(model="m", heads="h", data="d", template="t", others=("none", "eagle"))
    with pytest.raises(ConfigError, match="eagle"):
        rollout.run_rollout(bench, OfflineProgress())
    monkeypatch.setattr(rollout, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install arctic-inference"):
        rollout.run_rollout(replace(bench, others=("suffix",)), OfflineProgress())


class CachingEngine:
    """Counts the prompt tokens that it computes; those that it has seen come from its cache."""

    def __init__(self) -> None:
        self.cached: set[tuple[int, ...]] = set()
        self.computed: list[int] = []

    def configure(self, **settings: object) -> None:
        """Drafts nothing."""

    def forget_prompts(self) -> None:
        self.cached.clear()

    def generate(self, prompts: list[tuple[int, ...]], sampling: Sampling) -> Rollouts:
        self.computed.append(sum(len(p) for p in prompts if p not in self.cached))
        self.cached.update(prompts)
        found = [Response(n, (5,), (-1.0,), "length") for n in range(len(prompts))]
        return Rollouts(tuple(prompts), tuple(found), Counters(), 1.0, sampling)


def test_arms_that_share_an_engine_compute_their_prompts_as_the_others_do() -> None:
    alone, shared = CachingEngine(), CachingEngine()
    arms = [
        rollout.Arm("none", alone),
        rollout.Arm("ours, K = 4", shared, 4),
        rollout.Arm("ours, K chosen", shared, 4, choose=True),
    ]
    bench = RolloutBench(model="m", heads="h", data="d", template="t", rounds=4)
    prompts = [tuple(range(start, start + 50)) for start in range(100)]
    rollout._run_batch(bench, 8, arms, prompts, lambda *_: None)
    assert set(alone.computed) == {8 * 50}
    assert set(shared.computed) == {8 * 50}, "every turn computes all its prompts"


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"fixed": (1, 4)}, "at most 2, the heads in"),
        ({"fixed": (2, 2)}, "Correct --fixed"),
        ({"others": ("ngram", "ngram")}, "Correct --others"),
        ({"batches": (1, 1)}, "Correct --batches"),
        ({"temperature": -1.0}, "Correct --temperature"),
        ({"temperature": float("nan")}, "Correct --temperature"),
        ({"draft_temperature": -1.0}, "Correct --draft-temperature"),
        ({"heads": "wide"}, "made for another actor"),
        ({"stock_heads": "wide"}, "made for another actor"),
        ({"stock_heads": "hydra"}, "vLLM's own Medusa can't serve"),
    ],
)
def test_what_no_engine_could_do_is_refused_before_any_starts(
    wrong: dict[str, Any],
    says: str,
    chain_actor: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = json.loads((chain_actor / "config.json").read_text())
    for name, width, kind in (("right", 1, "medusa"), ("wide", 2, "medusa"), ("hydra", 1, "hydra")):
        sizes = HeadsConfig(width * model["hidden_size"], model["vocab_size"], 2, kind)
        save_heads(tmp_path / name, MedusaHeads(sizes))
    data = tmp_path / "rows.jsonl"
    data.write_text('{"question": "1 + 1"}\n')

    def started(**_: object) -> None:
        raise AssertionError("something was started")

    monkeypatch.setattr(rollout, "local_ray", started)
    named = {
        key: str(tmp_path / value) if "heads" in key else value for key, value in wrong.items()
    }
    bench = RolloutBench(str(chain_actor), str(tmp_path / "right"), str(data), "{question}")
    with pytest.raises((ConfigError, CheckpointError), match=re.escape(says)):
        rollout.run_rollout(replace(bench, **named), OfflineProgress(quiet=True))


class _PluginThatTrains:
    """Trains for half a second in each step, and for as long after it."""

    actor_forward = None

    def __init__(self) -> None:
        self.unsaid_s = 0.0

    def rollout_ready(self, rollouts: Any) -> None:
        self.unsaid_s += 0.5

    def drain(self, timeout_s: float) -> bool:
        self.unsaid_s += 0.5
        return True

    def metrics(self) -> dict[str, float]:
        said, self.unsaid_s = self.unsaid_s, 0.0
        return {names.COMPANION_TRAIN_S: said, names.PLUGIN_EXPOSED_S: 0.1}

    def before_generation(self) -> None: ...

    def policy_updated(self, actor: Any, version: int) -> None: ...


@pytest.mark.parametrize("rounds", [1, 4])
def test_the_warm_up_rounds_training_counts_in_no_round(
    monkeypatch: pytest.MonkeyPatch, rounds: int
) -> None:
    monkeypatch.setattr(plugin_costs._Timed, "_ppo", lambda *_: None)
    learner = SimpleNamespace(actor=None)
    timed = plugin_costs._Timed(learner, _PluginThatTrains(), [None] * (rounds + 1), 0)
    timed.take_turns(rounds, lambda *_: None)
    assert timed.trained_s == pytest.approx(rounds * 1.0)
    assert timed.exposed_s == pytest.approx(rounds * 0.1)
