"""An asynchronous training with the real verl on a CPU: its mode `colocate_async`, where requests
are aborted and continued with newer weights. Its workers tap their passes for a stand-alone
companion, and its vLLM server loads newer heads from a feed while requests run.

What stands in for CUDA: tests/contracts/verl_on_cpu.py. Never run here: `separate_async`, which
needs NCCL.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

import pytest

pytest.importorskip("verl", reason="verl has an environment of its own: make test-contracts")

from medusa_ppo.companion.companion_link import COMPANION_TOKEN
from medusa_ppo.loops.worker_tap import COMPANION
from medusa_ppo.vllm_plugin.speculation import FEED
from tests.contracts.test_verl_training import (
    PROMPTS,
    RAY_FOLDER,
    RESPONSES,
    STEPS,
    TOKENS,
    environment,
    settings,
    words,
)
from tests.medusa_ppo.loops.served_desk import served_desk

COMPANION_SETTINGS = {"learning_rate": 0.01, "epochs": 8, "batch_positions": 256}


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(1000)
@pytest.mark.parametrize(
    ("ranks", "bypass"),
    [
        pytest.param(1, False, id="one"),
        pytest.param(1, True, id="bypass"),
        pytest.param(2, False, id="two"),
    ],
)
def test_heads_follow_an_actor_that_is_trained_asynchronously(
    ranks: int,
    bypass: bool,
    chain_actor: Path,
    tmp_path: Path,
    train: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With verl's own log-prob pass, and in its bypass mode, where only the update is there to be
    tapped; with one worker, and with two (FSDP2 over gloo) and as many servers.
    """
    words(tmp_path)
    monkeypatch.setenv(COMPANION_TOKEN, "a token")
    spec = "actor_rollout_ref.rollout.engine_kwargs.vllm.speculative_config"
    ours = {
        "trainer.v1.trainer_mode": "colocate_async",
        f"+{spec}.method": "medusa",
        f"+{spec}.model": tmp_path / "heads",
        f"+{spec}.num_speculative_tokens": 2,
        "actor_rollout_ref.rollout.disable_log_stats": False,
        "actor_rollout_ref.rollout.calculate_log_probs": True,
        "algorithm.rollout_correction.bypass_mode": bypass,
    }
    theirs = {
        name: value
        for name, value in settings(chain_actor, tmp_path, ranks).items()
        if not name.startswith("+medusa")
    }
    command = [
        sys.executable,
        "-m",
        "verl.trainer.main_ppo",
        *(f"{name}={value}" for name, value in (theirs | ours).items()),
    ]
    with served_desk(chain_actor, tmp_path, COMPANION_SETTINGS) as served:
        ours = {COMPANION: served.address, FEED: str(tmp_path / "feed")}
        # verl's own choice would be WARN: nothing of acceptance.
        ours["VLLM_LOGGING_LEVEL"] = "INFO"
        said = train(command, environment(tmp_path) | ours, 900, RAY_FOLDER)
        status = served.desk.status()

    lines = (tmp_path / "verl.jsonl").read_text().splitlines()
    steps = [json.loads(line)["data"] for line in lines]
    assert len(steps) == STEPS
    # It was asynchronous: some answers were written by more than one version of the actor, or by
    # one that was not the newest.
    worst = "training/off_policy/trajectory_staleness_worst/max"
    assert max(step[worst] for step in steps) >= 1
    # The companion wants nothing while it trains on what came before, so some steps pass it by.
    versions = [batch.policy_version for batch in served.seen]
    assert len(versions) >= (STEPS // 2 if ranks == 1 else 2), versions
    assert versions == sorted(set(versions))
    rows = fmean(batch.hidden_MD.shape[0] + batch.left_out for batch in served.seen)
    assert rows >= 0.7 * PROMPTS * RESPONSES * TOKENS
    assert not status.error
    if ranks > 1:
        # Their steps take a second or two on a CPU: too few batches to publish anything. That both
        # ranks' rows are in each batch is what this shows.
        return
    assert status.versions_published >= 1
    # The engine loaded a version by itself, and drafts with it were accepted.
    assert "is serving; loading took" in said
    lengths = [float(found) for found in re.findall(r"Mean acceptance length: ([\d.]+)", said)]
    print("versions published:", status.versions_published, "tokens a step:", lengths)
    assert lengths and lengths[-1] > 1.5, lengths
