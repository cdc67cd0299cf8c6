"""The example for any loop runs as it stands on the page: two steps on real parts, and the heads of
the first draft in the second.
"""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from medusa_ppo.contract import metrics as names
from tests.medusa_ppo.conftest import eager_on_a_gpu

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / "examples" / "bare_loop.py"
HOOKS = ("before_generation()", "rollout_ready(", "actor_forward(", "policy_updated(", "metrics()")


@eager_on_a_gpu
@pytest.mark.engine
def test_two_steps_of_the_example_feed_the_engine(chain_actor: Path, serving: str):
    torch.manual_seed(0)
    main = runpy.run_path(str(EXAMPLE))["main"]

    first, second = main(
        str(chain_actor),
        2,
        engine={
            "max_num_seqs": 32,
            "threads": 1,
            "num_drafts": 2,
            "enforce_eager": True,
        },
        heads={"num_heads": 2},
        companion={"learning_rate": 1e-2, "wait": True, "epochs": 8, "batch_positions": 256},
    )

    assert (first[names.HEADS_VERSION], second[names.HEADS_VERSION]) == (0, 1)
    assert second[names.MAL_SERVING] > first[names.MAL_SERVING]


def test_the_example_calls_each_hook_once():
    text = EXAMPLE.read_text(encoding="utf-8")
    for hook in HOOKS:
        assert text.count(f"plugin.{hook}") == 1


def test_the_example_keeps_its_first_heads_apart_from_the_companions_versions():
    """Who copies it into a lasting folder starts it there again."""
    text = EXAMPLE.read_text(encoding="utf-8")
    assert 'Path(folder) / "heads-start"' in text and '"heads")' not in text


def test_the_example_can_be_read_without_its_hooks():
    """By the slow test below: each line of the plugin has to be one line."""
    compile(without_hooks(EXAMPLE.read_text(encoding="utf-8")), str(EXAMPLE), "exec")


def without_hooks(text: str) -> str:
    """The example as its author would have written it without us: every line of the plugin is
    gone, the engine has no heads.
    """
    text = re.sub(r"with plugin\.actor_forward\(.*\):.*", "if True:", text)
    text = re.sub(r"heads = MedusaPlugin\.prepare_heads\(.*", "heads = None", text)
    text = text.replace("plugin.metrics() | ", "")
    kept = [
        line
        for line in text.splitlines()
        if not re.match(r"\s*(plugin\b|from medusa_ppo import MedusaPlugin)", line)
    ]
    bare = "\n".join(kept)
    assert "plugin." not in bare and "MedusaPlugin." not in bare
    return bare


RUN = """
import json, sys, torch
from safetensors.torch import save_file
torch.manual_seed(0)
scope = {"__name__": "example"}
exec(compile(open(sys.argv[1]).read(), sys.argv[1], "exec"), scope)
load, kept = scope["load_actor"], []
scope["load_actor"] = lambda path: kept.append(load(path)) or kept[-1]
figures = scope["main"](sys.argv[2], 3, **json.loads(sys.argv[3]))
save_file({name: value.clone() for name, value in kept[0].state_dict().items()}, sys.argv[4])
print("REWARDS", [step["reward"] for step in figures])
"""


@pytest.mark.slow
@pytest.mark.engine
def test_switched_off_the_loop_is_the_loop_without_it_to_the_bit(chain_actor: Path, tmp_path: Path):
    (tmp_path / "with.py").write_text(EXAMPLE.read_text(encoding="utf-8"))
    (tmp_path / "without.py").write_text(without_hooks(EXAMPLE.read_text(encoding="utf-8")))
    engine = '"engine": {"max_num_seqs": 32, "threads": 1, "num_drafts": 0}'
    settings = {
        "with": f'{{"companion": {{"enabled": false}}, {engine}}}',
        "without": f"{{{engine}}}",
    }
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    said = {}
    for arm, given in settings.items():
        command = [
            sys.executable,
            "-c",
            RUN,
            str(tmp_path / f"{arm}.py"),
            str(chain_actor),
            given,
            str(tmp_path / f"{arm}.safetensors"),
        ]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=400, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
        said[arm] = done.stdout[done.stdout.index("REWARDS") :]

    learned = {arm: load_file(tmp_path / f"{arm}.safetensors") for arm in settings}
    start = load_file(chain_actor / "model.safetensors")
    assert said["with"] == said["without"]
    assert all(
        torch.equal(learned["with"][name], value) for name, value in learned["without"].items()
    )
    assert not all(
        torch.equal(start[name], value) for name, value in learned["with"].items() if name in start
    ), "nothing was learned"
