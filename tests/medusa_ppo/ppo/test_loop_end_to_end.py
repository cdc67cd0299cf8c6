"""The whole run on real parts: vLLM in Ray, companion, swaps, syncs, report; then resumed; then
stopped by a signal.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from heads.checkpoint import load_heads
from medusa_ppo.config.run_config import RunConfig, build_config
from medusa_ppo.contract import metrics as names
from medusa_ppo.ppo.loop import run_ppo
from medusa_ppo.ppo.run_progress import ProgressSink
from medusa_ppo.reports.store import read_run
from medusa_ppo.runtime.files import LOCK, _is_free

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

REWARD = """
def even(prompt, response, row):
    return float(len(response) % 2 == 0)
"""


WAYS = {
    "pieces": {"ppo": {"piece_prompts": 2}},
    "ahead": {"ppo": {"staleness": 2, "importance_bound": 2.0}},
    "carried": {"ppo": {"staleness": 1, "importance_bound": 2.0, "carry_after": 0.6}},
    "shared": {"ppo": {"placement": "shared"}, "engine": {"sleep_level": 1}},
    "shared by two": {
        "ppo": {"placement": "shared"},
        "engine": {"sleep_level": 2, "replicas": 2, "max_num_seqs": 8},
    },
}


def settings(actor: Path, out: Path, steps: int, compare_pairs: int | None = None) -> RunConfig:
    return build_config(
        {
            "name": "run",
            "out": str(out),
            "model": {"path": str(actor)},
            "data": {"path": "demo", "max_prompt_tokens": 100, "split": "train[:64]"},
            "sampling": {"max_new_tokens": 24, "responses_per_prompt": 4},
            "engine": {"max_num_seqs": 16, "max_model_len": 128, "threads": 1, "num_drafts": 3},
            # Without a warm-up the first steps show what heads learn in the run.
            "heads": {"num_heads": 3, "warm_up_tokens": 0},
            # Waiting makes the number of published versions certain; that PPO never waits otherwise
            # is the plugin's own test.
            "companion": {"wait": True, "epochs": 8, "learning_rate": 1e-2},
            "ppo": {
                "steps": steps,
                "prompts_per_step": 8,
                "micro_batch_size": 16,
                "actor_learning_rate": 1e-4,
                "reward": "even_reward:even",
                "checkpoint_every": 2,
                "threads": 1,
            },
            "report": {"speed_every": 2, "compare_pairs": compare_pairs},
        }
    )


def leftovers() -> set[str]:
    """Our folders in shared memory and in the folder for temporary files, but for those that a
    living program beside this one owns.
    """
    places = [Path("/dev/shm"), Path(os.environ.get("TMPDIR", "/tmp"))]
    found = [
        p
        for place in places
        if place.is_dir()
        for p in place.iterdir()
        if p.name.startswith(("medusa-ppo", "mppo-"))
    ]
    ours = {file.path for file in psutil.Process().open_files()}
    return {
        str(p)
        for p in found
        if str(p / LOCK) in ours or not (p / LOCK).is_file() or _is_free(p / LOCK)
    }


def check_none_left(before: set[str]) -> None:
    """Not at once: another program's folder has no lock for a moment when it comes and when it
    goes.
    """
    ends = time.monotonic() + 10
    while not (left := leftovers()) <= before and time.monotonic() < ends:
        time.sleep(0.2)
    assert left <= before


class Phases(ProgressSink):
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def phase_started(self, phase: str, step: int | None = None) -> None:
        self.seen.append(phase)


def test_a_run_from_nothing_to_the_report_and_on(
    chain_actor: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    import ray

    (tmp_path / "even_reward.py").write_text(REWARD)
    monkeypatch.chdir(tmp_path)
    before = leftovers()
    children = set(psutil.Process().children(recursive=True))
    config = settings(chain_actor, tmp_path, steps=6, compare_pairs=1)
    progress = Phases()

    summary = run_ppo(config, progress)

    steps = read_run(config.run_dir).steps
    assert (
        [s[names.STEP] for s in steps] == list(range(6))
        and summary["steps"] == 6
        and summary["status"] == "finished"
    )
    assert all(set(s) - {"nonfinite"} <= set(names.describe()) for s in steps)
    assert [s[names.POLICY_VERSION] for s in steps] == list(range(6))
    assert max(s[names.LOGPROB_GAP] for s in steps) < 1e-3, (
        "each sync reached the engine: its log-probs are the actor's"
    )
    assert steps[0][names.HEADS_VERSION] == 0 and steps[-1][names.HEADS_VERSION] >= 1, (
        "heads trained in the run were swapped in"
    )
    assert steps[-1][names.MAL_SERVING] > steps[0][names.MAL_SERVING] + 0.2
    assert [names.PAIR_SPEEDUP in s for s in steps] == [False, True] * 3
    assert (
        steps[-1][names.COMPANION_TRAINED_TOKENS] > 1000
        and summary["companion"]["versions_published"] >= 1
    )
    assert {
        "start vLLM",
        "generate",
        "score",
        "update",
        "sync",
        "save",
        "compare",
        "write the report",
    } <= set(progress.seen)
    assert (
        summary["rollout_speedup_pairs"]["against"] == "vllm"
        and summary["rollout_speedup_pairs"]["count"] == 1
    )
    assert summary["step_pairs"]["count"] == 1 and summary["step_ratio"] > 0
    for name in ("summary.json", "report.md", "report.html", "checkpoint/state.json"):
        assert (config.run_dir / name).is_file()
    check_results(config, chain_actor)
    check_nothing_left(before, children)

    summary = run_ppo(
        settings(chain_actor, tmp_path, steps=7),
        resume=True,
        allow=["ppo.steps", "report.compare_pairs"],
    )
    steps = read_run(config.run_dir).steps
    assert [s[names.STEP] for s in steps] == list(range(7)) and summary["status"] == "finished"
    assert steps[6][names.POLICY_VERSION] == 6 and steps[6][names.LOGPROB_GAP] < 1e-3
    assert (
        steps[6][names.HEADS_VERSION] >= steps[5][names.HEADS_VERSION]
        and steps[6][names.MAL_SERVING] > steps[0][names.MAL_SERVING] + 0.2
    )
    assert steps[6][names.KL_REFERENCE] != 0.0, "the reference is still the actor of the beginning"
    assert not ray.is_initialized()
    check_nothing_left(before, children)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_each_way_through_a_step_on_a_real_engine(
    chain_actor: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
):
    """Some steps, heads and companion included; what each way promises of its engine."""
    # Heads are there from the third step on; two steps ahead, what a policy of then wrote is
    # learned from in the sixth at the latest.
    count = 6 if way == "ahead" else 4
    (tmp_path / "even_reward.py").write_text(REWARD)
    monkeypatch.chdir(tmp_path)
    before = leftovers()
    children = set(psutil.Process().children(recursive=True))
    values = settings(chain_actor, tmp_path, steps=count).model_dump(mode="json") | {"report": {}}
    for section, more in WAYS[way].items():
        values[section] |= more
    config = build_config(values)

    run_ppo(config)

    steps = read_run(config.run_dir).steps
    assert [s[names.STEP] for s in steps] == list(range(count))
    assert [s[names.DRAFTS] > 0 for s in steps] == [s[names.HEADS_VERSION] >= 1 for s in steps], (
        "heads that learned nothing draft nothing"
    )
    assert steps[-1][names.HEADS_VERSION] >= 1, "heads trained in the run were swapped in"
    lags = [s[names.POLICY_LAG] for s in steps]
    if way == "ahead":
        assert max(lags) in (1, 2), lags
        assert max(s[names.LOGPROB_GAP] for s in steps if not s[names.POLICY_LAG]) < 1e-3
    elif way == "carried":
        assert max(s[names.PROMPTS_CARRIED] for s in steps) > 0 == steps[-1][names.PROMPTS_CARRIED]
        assert max(s[names.POLICY_LAG_MAX] for s in steps) == 1 and lags[0] == 0 < max(lags) < 1
    else:
        assert lags == [0] * count and max(s[names.LOGPROB_GAP] for s in steps) < 1e-3
    if way == "pieces":
        assert all(len(s[names.SPANS]["actor"]) == 4 for s in steps)
    roles = steps[-1][names.LEDGER_ROLES]
    assert set(roles) == {"engine", "actor", "reference", "critic"}
    shared = way.startswith("shared")
    at_once = (
        max(roles.values()) if shared else roles["engine"] + roles["actor"] + roles["reference"]
    )
    assert (
        steps[-1][names.LEDGER_PEAK] == pytest.approx(at_once)
        if shared
        else steps[-1][names.LEDGER_PEAK] > at_once
    )
    check_results(config, chain_actor)
    check_nothing_left(before, children)


def check_results(config: RunConfig, start: Path) -> None:
    trained, first = (
        AutoModelForCausalLM.from_pretrained(path) for path in (config.run_dir / "actor", start)
    )
    assert not torch.equal(trained.lm_head.weight, first.lm_head.weight)
    heads, info = load_heads(config.run_dir / "heads-final", hidden_size=64)
    assert info.version >= 1 and any(t.any() for t in heads.trainable_state().values())


def check_nothing_left(before: set[str], children: set[psutil.Process]) -> None:
    import ray

    assert not ray.is_initialized()
    _, alive = psutil.wait_procs(
        set(psutil.Process().children(recursive=True)) - children, timeout=20
    )
    assert not alive, [p.cmdline()[:3] for p in alive]
    check_none_left(before)


@pytest.mark.slow
def test_a_vision_language_actor_runs_the_whole_loop_with_heads(
    vision_actor, picture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """vLLM computes its own features, the trainer those of each image once; their log-probs agree,
    and heads learn and are swapped.
    """
    (tmp_path / "even_reward.py").write_text(REWARD)
    monkeypatch.chdir(tmp_path)
    for number in range(4):
        (tmp_path / f"{number}.png").write_bytes(picture(number, 60, 60 + 30 * number))
    rows = [
        {"prompt": f"{n}?", "answer": "", "image": [f"{n % 4}.png", "0.png"][: 1 + n % 2]}
        for n in range(12)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder = vision_actor()
    config = settings(folder, tmp_path, steps=4)
    data = config.data.model_copy(
        update={"path": "rows.jsonl", "split": "train", "images": "image"}
    )
    ppo = config.ppo.model_copy(update={"checkpoint_every": None})
    config = config.model_copy(
        update={
            "data": data,
            "ppo": ppo,
            "report": config.report.model_copy(update={"speed_every": None}),
        }
    )

    summary = run_ppo(config)

    steps = read_run(config.run_dir).steps
    assert summary["status"] == "finished" and len(steps) == 4
    assert max(s[names.LOGPROB_GAP] for s in steps) < 1e-3, (
        "engine and trainer see the same images, after each sync"
    )
    assert (
        sum(s[names.TOWER_RUNS] for s in steps) == 4 and min(s[names.IMAGES] for s in steps) >= 1
    ), "each image once in the whole run"
    assert (
        steps[-1][names.HEADS_VERSION] >= 1
        and steps[-1][names.MAL_SERVING] > steps[0][names.MAL_SERVING] + 0.2
    )
    assert (config.run_dir / "actor" / "preprocessor_config.json").is_file()


RUN = """
import sys
from medusa_ppo.ppo.loop import run_ppo
from medusa_ppo.config.run_config import load_config
from rich.console import Console
from medusa_ppo.ppo.run_progress import LineProgress
try:
    run_ppo(load_config(sys.argv[1]), LineProgress(Console(file=sys.stdout)))
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "send"),
    [(signal.SIGINT, os.kill), (signal.SIGTERM, os.kill), (signal.SIGTERM, os.killpg)],
    ids=["Ctrl-C", "SIGTERM", "SIGTERM to the group"],
)
def test_a_signal_leaves_a_partial_report_and_nothing_else(
    chain_actor: Path,
    tmp_path: Path,
    number: signal.Signals,
    send: Callable[[int, signal.Signals], None],
):
    import yaml

    (tmp_path / "even_reward.py").write_text(REWARD)
    before = leftovers()
    config = settings(chain_actor, tmp_path, steps=500)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(json.loads(config.model_dump_json())))
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", RUN, "run.yaml"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step   1"):
            break
    children = psutil.Process(process.pid).children(recursive=True)
    assert children
    time.sleep(0.3)  # into a phase of the next step
    send(process.pid, number)
    process.stdout.read()
    assert process.wait(60) == 130
    _, alive = psutil.wait_procs(children, timeout=20)
    assert not alive, [p.cmdline()[:3] for p in alive]
    check_none_left(before)
    run = read_run(config.run_dir)
    assert run.status == "interrupted" and len(run.steps) >= 2
    assert (
        json.loads((config.run_dir / "summary.json").read_text())["status"] == "interrupted"
        and (config.run_dir / "report.html").is_file()
    )


def test_step_0_drafts_with_heads_that_a_warm_up_trained(
    chain_actor: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "even_reward.py").write_text(REWARD)
    monkeypatch.chdir(tmp_path)
    config = settings(chain_actor, tmp_path, steps=1)
    heads = config.heads.model_copy(update={"warm_up_tokens": 1500, "warm_up_s": 120.0})
    progress = Phases()
    summary = run_ppo(config.model_copy(update={"heads": heads}), progress)
    (step,) = read_run(config.run_dir).steps
    assert "warm up the heads" in progress.seen and step[names.HEADS_VERSION] == 1
    assert step[names.WARM_UP_TOKENS] >= 1500 and step[names.MAL_SERVING] > 1.2
    assert summary["warm_up"]["after"] > summary["warm_up"]["before"] + 0.2
