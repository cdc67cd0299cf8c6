"""TRL's generation with an engine that sleeps between two rollouts, and throws its weights away.
The engine is a double, because vLLM's CPU build can't sleep: asleep it refuses whatever needs the
memory that a sleeping engine has given away, where a real one would end the process.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("trl")

from accelerate import Accelerator

from heads.checkpoint import checksum, load_state, save_state
from medusa_ppo.actors.hf import load_actor
from medusa_ppo.config.run_config import build_config
from medusa_ppo.engines.colocated import AttachedEngine
from medusa_ppo.loops import attachment as attachment_module
from medusa_ppo.loops import trl as module
from medusa_ppo.loops.attachment import Attachment
from medusa_ppo.loops.trl import MedusaGeneration

ON_THE_HOST = {"medusa_plugin_report", "medusa_choices"}
"""Calls whose answers are not in the device's memory."""


class SleepyLLM:
    """In the place of `vllm.LLM`.

    Attributes:
        awake: what its memory holds now.
        version: the heads that it holds; -1: they are lost.
        drafted_by: the heads of each call of `generate`.
    """

    def __init__(self, **arguments: Any) -> None:
        self.arguments = arguments
        self.awake = {"weights", "kv_cache"}
        self.version = 0
        self.heads = ""
        self.drafted_by: list[int] = []
        self.synced = 0
        runner = SimpleNamespace(model=SimpleNamespace(load_weights=self._load))
        executor = SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner))
        self.llm_engine = SimpleNamespace(model_executor=executor)

    def _load(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        assert "weights" in self.awake and len(weights) == 1
        self.synced += 1

    def sleep(self, level: int) -> None:
        assert level == 2 and self.awake == {"weights", "kv_cache"}
        self.awake = set()
        self.version = -1

    def wake_up(self, tags: list[str]) -> None:
        self.awake |= set(tags)

    def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[dict[str, Any]]:
        if "weights" not in self.awake and method not in ON_THE_HOST:
            raise RuntimeError(f"{method}: an illegal memory access was encountered")
        if method == "medusa_swap_heads":
            self.version = int(args[1])
            self.heads = checksum(load_state(args[0]))
        facts = {"kind": "medusa", "drafter": "MedusaProposer", "max_drafts": 2, "rows": []}
        times = {"key": {"what": "times of nobody's machine"}, "choices": [0, 1, 2], "seconds": 0.0}
        held = {"heads_version": self.version, "version": self.version, "checksum": self.heads}
        return [facts | times | held]

    def get_metrics(self) -> list[Any]:
        names = ("drafts", "draft_tokens", "accepted_tokens")
        counts = [SimpleNamespace(name=f"vllm:spec_decode_num_{name}", value=0) for name in names]
        by_place = f"vllm:spec_decode_num_{names[-1]}_per_pos"
        return [*counts, SimpleNamespace(name=by_place, values=[0, 0])]

    def reset_prefix_cache(self) -> bool:
        return True

    def generate(self, prompts: list[Any], **_: Any) -> list[Any]:
        assert self.awake == {"weights", "kv_cache"}
        self.drafted_by.append(self.version)
        logprob = {7: SimpleNamespace(rank=1, logprob=-0.5)}
        answer = SimpleNamespace(token_ids=[7, 7], logprobs=[logprob] * 2)
        return [
            SimpleNamespace(prompt_token_ids=prompt["prompt_token_ids"], outputs=[answer])
            for prompt in prompts
        ]


def test_heads_of_an_engine_that_sleeps_are_looked_at_awake_and_loaded_after_each_sleep(
    chain_actor: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "is_cpu_build", lambda: False)
    monkeypatch.setattr(module.vllm_generation, "LLM", SleepyLLM)
    monkeypatch.setattr(attachment_module, "local_ray", lambda **_: contextlib.nullcontext())
    config = build_config({"heads": {"num_heads": 2}, "companion": {"enabled": False}})
    attachment = Attachment(config)
    attachment.folder = tmp_path / "medusa"
    model = load_actor(str(chain_actor)).train()
    generation = MedusaGeneration(
        attachment,
        model=model,
        accelerator=Accelerator(cpu=True),
        processing_class=None,
        enable_sleep_mode=True,
    )
    llm: SleepyLLM = generation.llm
    engine = attachment.engine
    assert isinstance(engine, AttachedEngine) and not llm.awake
    assert engine.heads_version == 0 and llm.arguments["enable_sleep_mode"]

    attachment.begin(model)

    def roll_out() -> int:
        generation.generate([[5, 6], [9, 7]], None, 1)
        assert not llm.awake and attachment._rollouts is not None
        return attachment._rollouts.heads_version

    generation.sync_weights()
    assert llm.version == 0 and llm.synced, "the heads of the start are back"
    assert roll_out() == 0
    # Without a sync by the trainer, e.g. because the actor has not changed.
    assert roll_out() == 0

    generation.sync_weights()
    newer = tmp_path / "newer.safetensors"
    first = load_state(attachment._kept_state)
    save_state(newer, {name: tensor + 0.1 for name, tensor in first.items()})
    engine.swap_heads(newer, 3)
    newer.unlink()
    assert (roll_out(), roll_out()) == (3, 3)
    assert llm.drafted_by == [0, 0, 3, 3]
    attachment.end()


def test_who_trains_with_images_is_told_once_that_heads_learn_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They were left out without a word."""
    answer = (None, [[7]], [[[-0.5]]])
    monkeypatch.setattr(
        module.vllm_generation.VLLMGeneration, "generate", lambda self, *given: answer
    )
    monkeypatch.setattr(MedusaGeneration, "sampling", lambda self, count: None)
    generation = object.__new__(MedusaGeneration)
    rows: list[Any] = []
    generation.attachment = SimpleNamespace(generation=lambda _: contextlib.nullcontext(rows))
    generation.mode, generation.told_of_images = "server", False
    generation.model = SimpleNamespace(training=True)
    for _ in range(2):
        assert generation.generate([[5]], [["an image"]], 1) == answer
    (record,) = caplog.records
    assert "images" in record.message and not rows
    generation.generate([[5]], None, 1)
    assert len(rows) == len(caplog.records) == 1
