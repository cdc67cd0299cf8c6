"""TRL's GRPO on two processes, for real: one companion, both engines fed, both processes' rows
learned from, nothing hangs.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

pytest.importorskip("trl")

from medusa_ppo.contract import metrics as names
from medusa_ppo.reports.store import read_run

if TYPE_CHECKING:
    from tests.medusa_ppo.loops.conftest import ServedLoop

ROOT = Path(__file__).resolve().parents[3]
RATIO = "sampling/importance_sampling_ratio/mean"
OF_THIS_TRAINING = "MEDUSA_PPO_TEST_TRAINING"
PATIENCE_S = 60
SCRIPT = '''
import json, os, sys, time
import torch
import torch.distributed as dist
from accelerate import Accelerator
from datasets import Dataset
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback
from trl import GRPOConfig
from trl.generation import vllm_generation

from medusa_ppo.loops.trl import MedusaGRPOTrainer
from medusa_ppo.plugin import NoPlugin

form, actor, out, steps, event, settings = sys.argv[1:]
steps = int(steps)
settings = json.loads(settings)


class Sharded(MedusaGRPOTrainer):
    """The seam: accelerate sets FSDP2 up on GPUs only, so the test does what it would do there, and
    says so to TRL's weight sync.
    """

    def create_optimizer(self, *args, **kwargs):
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.accelerator.prepare_model = lambda model, **_: model
        self.vllm_generation._dist.fsdp_version = 2
        return super().create_optimizer(*args, **kwargs)


class Look(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        cut = [isinstance(p, DTensor) for p in kwargs["model"].parameters()]
        assert all(cut) if form == "fsdp2" else not any(cut)
        if state.global_step == 2 and event == "rank dies" and dist.get_rank() == 1:
            os._exit(3)
        if state.global_step == 2 and event == "companion dies" and dist.get_rank() == 0:
            import ray

            ray.kill(trainer.medusa.plugin._companion._actor, no_restart=False)
        if state.global_step == 3 and event == "server" and dist.get_rank() == 0:
            # Between two steps: the test does what it does to the server.
            open(f"{out}/waits", "w").close()
            while not os.path.exists(f"{out}/go"):
                time.sleep(0.1)


def places(completions, **_):
    return [float((7 * i) % 5) + (len(text) % 3) for i, text in enumerate(completions)]


args = GRPOConfig(
    output_dir=out,
    report_to="none",
    save_strategy="no",
    logging_steps=1,
    bf16=False,
    gradient_checkpointing=False,
    per_device_train_batch_size=8,
    num_generations=2,
    max_completion_length=24,
    learning_rate=1e-3,
    lr_scheduler_type="constant",
    optim="adamw_torch",
    max_grad_norm=0.0,
    max_steps=steps,
    **settings,
)
owned = (("Mia", "pens"), ("Tom", "books"))
words = [f"{name} has {n} {what} ." for name, what in owned for n in range(2, 10)]
rows = Dataset.from_list([{"prompt": w} for w in words * 4])
companion = {
    "learning_rate": 1e-2,
    "epochs": 8,
    "batch_positions": 256,
    "wait": event != "companion dies",
}
heads = {"num_heads": 2} | ({"path": os.environ["HEADS"]} if os.environ.get("HEADS") else {})
medusa = {"heads": heads, "engine": {"num_drafts": 2}, "companion": companion}
trainer = (Sharded if form == "fsdp2" else MedusaGRPOTrainer)(
    model=actor,
    reward_funcs=places,
    args=args,
    train_dataset=rows,
    medusa=medusa,
    callbacks=[Look()],
)
trainer.train()
own = trainer.medusa.engine is None and isinstance(trainer.medusa.plugin, NoPlugin)
found = {"alone": own, "log": trainer.state.log_history}
json.dump(found, open(f"{out}/rank{dist.get_rank()}.json", "w"))
'''


COLOCATED = {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": 128}


def launch(
    form: str,
    actor: Path,
    out: Path,
    steps: int,
    event: str = "",
    settings: dict[str, Any] = COLOCATED,
    heads: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """A training of two processes, until it ends; nothing of it is left then."""
    out.mkdir(parents=True)
    (out / "train.py").write_text(SCRIPT)
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "ACCELERATE_USE_CPU": "true",
        "HEADS": str(heads or ""),
        OF_THIS_TRAINING: str(out),
    }
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
        str(out / "train.py"),
    ]
    command += [form, str(actor), str(out), str(steps), event, json.dumps(settings)]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=580, check=False
    )
    until = time.monotonic() + 60
    while (left := processes_of(out)) and time.monotonic() < until:
        time.sleep(0.5)
    assert not left, f"left behind: {left}"
    return done


def processes_of(out: Path) -> list[str]:
    """Whatever a training started, by its environment: processes whose parent is gone too."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if (
                process.environ().get(OF_THIS_TRAINING) == str(out)
                and process.status() != psutil.STATUS_ZOMBIE
            ):
                found.append(" ".join(process.cmdline())[:80])
    return found


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize("form", ["ddp", "fsdp2"])
def test_two_processes_have_one_companion_and_both_are_fed(
    form: str, chain_actor: Path, tmp_path: Path
):
    out = tmp_path / "run"
    done = launch(form, chain_actor, out, 8)
    assert done.returncode == 0, done.stderr[-4000:]

    run = read_run(out / "medusa")
    first = run.steps[0]
    last = run.steps[-1]
    assert len(run.steps) == 8 and last[names.HEADS_VERSION] >= 1
    assert last[names.MAL_SERVING] > first[names.MAL_SERVING] + 0.2
    # 16 responses a step, 8 of each process, a quarter of the prompts held out: one process's alone
    # would be less than 0.4.
    tokens = sum(step[names.RESPONSE_LENGTH] * 16 for step in run.steps[:-1])
    assert last[names.COMPANION_TRAINED_TOKENS] > 0.55 * tokens
    ranks: list[dict[str, Any]] = [
        json.loads((out / f"rank{rank}.json").read_text()) for rank in range(2)
    ]
    assert ranks[1]["alone"] and not ranks[0]["alone"]
    assert f"medusa/{names.MAL_SERVING}" in str(ranks[0]["log"])
    table = 2 * 4 * table_numbers(chain_actor)  # lm_head and the embedding, in float32
    assert all(step[names.TABLE_BYTES] == (table if form == "fsdp2" else 0) for step in run.steps)


def table_numbers(actor: Path) -> int:
    from safetensors import safe_open

    with safe_open(actor / "model.safetensors", "pt") as file:
        rows, columns = file.get_slice("lm_head.weight").get_shape()
    return rows * columns


@pytest.mark.slow
@pytest.mark.engine
def test_a_companion_that_dies_ends_nothing(chain_actor: Path, tmp_path: Path):
    done = launch("ddp", chain_actor, tmp_path / "run", 6, "companion dies")
    assert done.returncode == 0, done.stderr[-4000:]
    steps = read_run(tmp_path / "run" / "medusa").steps
    assert (
        len(steps) == 6
        and max(later - sooner for sooner, later in pairwise(step[names.WALL_S] for step in steps))
        < PATIENCE_S
    )


@pytest.mark.slow
@pytest.mark.engine
def test_a_process_that_dies_ends_the_training_within_a_minute(chain_actor: Path, tmp_path: Path):
    done = launch("ddp", chain_actor, tmp_path / "run", 50, "rank dies")
    steps = read_run(tmp_path / "run" / "medusa").steps
    assert done.returncode != 0 and len(steps) <= 3
    ended = time.time() - (tmp_path / "run" / "medusa" / "metrics.jsonl").stat().st_mtime
    assert ended < PATIENCE_S + 30  # Since the last step; a step's own time is in it.
    assert "exitcode  : 3" in done.stderr, done.stderr[-4000:]  # torchrun names who began it.


def train_with_a_server(
    served: ServedLoop, actor: Path, out: Path, steps: int, *, again: bool
) -> tuple[Any, float]:
    """A training whose server is killed between two steps, and started again or not; and its
    seconds from then on.
    """
    with ThreadPoolExecutor(1) as pool:
        training = pool.submit(
            launch, "ddp", actor, out, steps, "server", served.settings, served.heads
        )
        while not (out / "waits").exists() and not training.done():
            time.sleep(0.2)
        served.end(signal.SIGKILL)
        if again:
            served.start()
            served.wait()
        went = time.monotonic()
        (out / "go").touch()
        return training.result(), time.monotonic() - went


@pytest.mark.slow
@pytest.mark.engine
def test_a_server_that_is_started_again_gets_actor_and_heads_again(
    served: ServedLoop, chain_actor: Path, tmp_path: Path
):
    done, _ = train_with_a_server(served, chain_actor, tmp_path / "run", 8, again=True)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "The vLLM server was restarted" in done.stderr
    steps = read_run(tmp_path / "run" / "medusa").steps
    assert len(steps) == 8 and steps[-1][names.MAL_SERVING] > steps[0][names.MAL_SERVING] + 0.2
    log = json.loads((tmp_path / "run" / "rank0.json").read_text())["log"]
    ratios = [
        row[RATIO] for row in log if RATIO in row
    ]  # 1 where who writes is the policy that is trained.
    assert len(ratios) == 8 and all(abs(ratio - 1) < 0.02 for ratio in ratios)


@pytest.mark.slow
@pytest.mark.engine
def test_a_server_that_dies_ends_the_training_with_one_clear_error(
    served: ServedLoop, chain_actor: Path, tmp_path: Path
):
    done, seconds = train_with_a_server(served, chain_actor, tmp_path / "run", 8, again=False)
    assert done.returncode != 0 and seconds < PATIENCE_S
    assert "The vLLM server can't be reached" in done.stderr, done.stderr[-4000:]
    assert len(read_run(tmp_path / "run" / "medusa").steps) == 3
