"""The cluster on paper: sums by hand, what must grow and shrink, and the model against measurements
of a tiny case.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest

from heads.heads_config import HeadsConfig

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def scale(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("scale")


def heads_of(scale: ModuleType, name: str, kind: str = "hydra") -> HeadsConfig:
    sizes = scale.ACTORS[name].sizes
    return HeadsConfig(sizes.hidden, sizes.vocab, 4, kind)


def test_actors_have_the_sizes_in_their_names(scale: ModuleType) -> None:
    for name, actor in scale.ACTORS.items():
        assert actor.sizes.parameters / 1e9 == pytest.approx(float(name[:-1]), rel=0.02)


def test_arithmetic_of_heads_by_hand(scale: ModuleType) -> None:
    D = 3
    V = 10
    assert scale.head_flops(HeadsConfig(D, V, 1), training=True) == 4 * D * V + 4 * D * D
    assert scale.head_flops(HeadsConfig(D, V, 2), training=False) == 2 * (2 * D * V + 2 * D * D)
    own = HeadsConfig(D, V, 1, lm_head="own", num_layers=2)
    assert scale.head_flops(own, training=True) == 6 * D * V + 4 * D * D + 6 * D * D
    hydra = 4 * D * V + 6 * D * D + 4 * (6 * 6) + 6 * (6 * 3)
    assert scale.head_flops(HeadsConfig(D, V, 1, "hydra"), training=True) == hydra
    context, plain = (
        scale.head_flops(HeadsConfig(D, V, 3, kind, context=n), training=False)
        for kind, n in (("hydra", 4), ("medusa", 0))
    )
    taught = scale.head_flops(HeadsConfig(D, V, 2), training=True, width=4, teacher=True)
    assert taught == 2 * (4 * D * 4 + 4 * D * D) + 2 * D * 4 * 33 / 32, (
        "one head more than the first reads one row more of 32"
    )
    assert context == plain + 2 * (7 * D * D + 2 * D * D + 3 * (2 + 2) * D * D + 2 * 4 * D * D)


def test_more_gpus_take_less_time_and_move_more_weights(scale: ModuleType) -> None:
    rows = [
        s for name, s in scale.table("hydra", scale.Assumptions(), scale.Workload()) if name == "8B"
    ]
    assert [s.gpus for s in rows] == list(scale.GPUS)
    for before, after in pairwise(rows):
        assert after.seconds < before.seconds
        assert after.update_s == pytest.approx(before.update_s / 2)
        assert (
            after.weights_bytes == 2 * before.weights_bytes
            and after.hidden_bytes == before.hidden_bytes
        )
        assert after.companion_share < before.companion_share


def test_what_does_not_fit_is_left_out(scale: ModuleType) -> None:
    smallest = {}
    for name, step in scale.table("medusa", scale.Assumptions(), scale.Workload()):
        smallest.setdefault(name, (step.gpus, step.engine_ranks))
    assert smallest == {"8B": (8, 1), "70B": (64, 4), "405B": (256, 16)}
    roomy = scale.Assumptions(memory_bytes=192e9)
    assert (
        scale.step_on_paper(
            scale.ACTORS["405B"], heads_of(scale, "405B"), 128, roomy, scale.Workload()
        )
        is not None
    )


def test_drafting_pays_only_for_what_is_accepted(scale: ModuleType) -> None:
    actor = scale.ACTORS["8B"]
    heads = heads_of(scale, "8B")
    steps = [
        scale.step_on_paper(
            actor, heads, 64, scale.Assumptions(accepted=accepted), scale.Workload()
        )
        for accepted in (0.0, 0.5, 1.0, 2.0)
    ]
    assert steps[0].speedup < 1
    assert [s.speedup for s in steps] == sorted(s.speedup for s in steps)
    assert steps[0].generate_s / steps[2].generate_s < 2


def test_the_companions_share_follows_what_it_trains_on(scale: ModuleType) -> None:
    actor = scale.ACTORS["8B"]
    heads = heads_of(scale, "8B")
    given = scale.Assumptions(judged=0)
    works = [scale.Workload(draft_vocab=0, trained=share) for share in (1.0, 0.5)]
    whole, half = (scale.step_on_paper(actor, heads, 8, given, work) for work in works)
    assert half.companion_share == pytest.approx(whole.companion_share / 2)
    (line,) = [line for line in scale.verdict([("8B", whole)]) if "8B on 8" in line]
    fits = float(line.split("trains on ")[1].split(" %")[0]) / 100
    kept = scale.step_on_paper(actor, heads, 8, given, scale.Workload(draft_vocab=0, trained=fits))
    assert kept.companion_share == pytest.approx(scale.TARGET, rel=0.02)
    part, slow = (
        scale.step_on_paper(actor, heads, 8, given, scale.Workload(**how))
        for how in ({}, {"bfloat16": 0})
    )
    assert (
        part.companion_share < whole.companion_share / 2
        and slow.companion_share == pytest.approx(part.companion_share / given.float32_share)
    )


def test_the_command(scale: ModuleType, tmp_path: Path) -> None:
    out = tmp_path / "scale.json"
    command = [
        sys.executable,
        str(FOLDER / "scale.py"),
        "--set",
        "accepted=1.5",
        "--set",
        "epochs=2",
        "--json",
        str(out),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "| 405B | 1024 |" in done.stdout and "Companion within 3 %" in done.stdout
    written = json.loads(out.read_text())
    assert written["assumptions"]["accepted"] == 1.5 and written["workload"]["epochs"] == 2
    assert {field.name for field in dataclasses.fields(scale.PaperStep)} <= written["rows"][
        0
    ].keys()
    wrong = subprocess.run(
        [*command, "--set", "acepted=1"], capture_output=True, text=True, check=False
    )
    assert wrong.returncode == 2 and "acepted" in wrong.stderr


def test_the_model_against_measurements_of_a_tiny_case(
    scale: ModuleType, steps_taken: list[int]
) -> None:
    found = importlib.import_module("scale_check").compare(
        rounds=1, layers=1, width=64, vocab=512, rows=9, tokens=32
    )
    assert set(steps_taken) == {1}, (
        "the formulas have no optimizer, so it is used as little as possible"
    )
    for name in ("actor weights, bytes", "heads, bytes", "hidden states and tokens, bytes"):
        assert float(found[name].split("measured / model ")[1]) == pytest.approx(1.0, abs=0.05)
    assert (
        "measured" in found["hydra kl_tv, context 16, 64 tokens: training / scoring pass, seconds"]
    )  # How long it takes decides nothing here.
