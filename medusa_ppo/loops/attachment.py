"""What a foreign trainer in this process holds of ours: heads, companion, plugin, tap, run folder. Imports no framework."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import time
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from heads.checkpoint import save_state
from heads.errors import ConfigError
from medusa_ppo import metrics as names
from medusa_ppo.config import RunConfig, build_config, load_config
from medusa_ppo.engines.colocated import AttachedEngine, read_counters
from medusa_ppo.engines.http_server import ServerEngine
from medusa_ppo.engines.launch import LaunchPlan, plan_launch
from medusa_ppo.engines.rollout_engine import RolloutEngine, WorkerEngine
from medusa_ppo.files import OwnedFolder
from medusa_ppo.loops.passes import ForwardTap
from medusa_ppo.plugin import MedusaPlugin, initial_heads
from medusa_ppo.processes import local_ray
from medusa_ppo.reports.store import RunWriter
from medusa_ppo.types import Counters, Response, Rollouts, Sampling

logger = logging.getLogger(__name__)

OURS = ("speculative_config", "worker_extension_cls", "disable_log_stats")
"""Of the arguments that our own engines start with, those that a foreign engine needs as well."""
FINAL_HEADS = "heads-final"
PREFIX = "medusa/"


@dataclass(frozen=True)
class Generated:
    """What one generate call of a foreign loop gave: a prompt, a completion and its behaviour log-probs for each row."""

    prompts: list[list[int]]
    completions: list[list[int]]
    logprobs: list[list[float | None]]


def as_config(medusa: RunConfig | Mapping[str, Any] | str | os.PathLike[str] | None) -> RunConfig | None:
    """The configuration in whatever form it was given; None when it asks for neither drafts nor a companion. Raises ConfigError."""
    if medusa is None:
        return None
    if isinstance(medusa, Mapping):
        medusa = build_config(dict(medusa))
    config = medusa if isinstance(medusa, RunConfig) else load_config(medusa)
    return config if config.companion.enabled or config.engine.num_drafts != 0 else None


class Attachment:
    """One trainer's share: engine arguments before it is built, the plugin while it trains, a run folder when it is done.

    Attributes:
        folder: the run's folder, as of `medusa-ppo report`.
        engine: the trainer's vLLM; None until it is attached.
        plugin: None outside of the training.
    """

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.folder = config.run_dir
        self.engine: RolloutEngine | None = None
        self.plugin: MedusaPlugin | None = None
        folder = OwnedFolder("medusa-ppo-loop-", shared_memory=True)
        weakref.finalize(self, folder.close)
        self._home = folder.path
        self._stack = contextlib.ExitStack()
        self._plan: LaunchPlan | None = None
        self._tap: ForwardTap | None = None
        self._writer: RunWriter | None = None
        self._rollouts: Rollouts | None = None
        self._figures: dict[str, float] = {}
        self._policy_version = 0
        self._steps = 0
        self._began = time.monotonic()

    # ---- the engine ---------------------------------------------------------------------------------------------------------

    def engine_arguments(self, model: Any) -> dict[str, Any]:
        """What the trainer's vLLM needs beside the trainer's own arguments. Writes the heads that it starts with.

        Raises:
            UnsupportedVersionError, ModelError, CheckpointError, ConfigError, LossyError: as `plan_launch`.
        """
        heads = MedusaPlugin.prepare_heads(self.config, model, self._home / "heads")
        save_state(self._kept_state, initial_heads(self.config, model).trainable_state())
        self._plan = plan_launch(model.name_or_path, heads, self.config.engine, self.config.seed)
        return {name: self._plan.engine_args[name] for name in OURS} | self.config.engine.extra

    def attach_llm(self, llm: Any) -> None:
        """Take hold of a `vllm.LLM` that was started with `engine_arguments`."""
        assert self._plan is not None, "engine_arguments() comes first"
        self.engine = AttachedEngine(
            lambda method, args: llm.collective_rpc(method, args=args),
            self._kept_state,
            counters=lambda: read_counters(llm.get_metrics()),
            forget_prompts=llm.reset_prefix_cache,
            drafting=self._plan.drafting,
        )

    def attach_server(self, model: Any, url: str) -> None:
        """Take hold of a vLLM server that somebody started with our heads (docs/hooks.md has the command).

        Raises:
            ConfigError: no heads are named: the server must have been started with the same.
            EngineError: the server does not answer, or does not draft with native heads.
        """
        if not self.config.heads.path:
            raise ConfigError(
                "A server is started before the trainer, so its heads must be named.",
                given="heads.path is empty",
                expected="the folder that the server drafts with",
                do="Set heads.path (docs/hooks.md says how to make it).",
            )
        settings = self.config.engine.model_copy(update={"backend": url})
        self.engine = ServerEngine(model.name_or_path, self.config.heads.path, settings, self.config.seed)

    def sync_by_file(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Carry the actor into the engine through one file, where the trainer's own way does not work."""
        assert self.engine is not None, "the engine is attached when the trainer is built"
        path = self._home / "actor.safetensors"
        save_state(path, {name: tensor.detach().to("cpu").contiguous() for name, tensor in weights.items()})
        try:
            self.engine.sync_actor(path, self._policy_version)
        finally:
            path.unlink(missing_ok=True)

    def weights_synced(self, *, lost_heads: bool) -> None:
        """The trainer has put the actor's weights into the engine by itself.

        Args:
            lost_heads: the engine had slept and thrown its weights away, the heads among them.
        """
        if isinstance(self.engine, AttachedEngine) and lost_heads:
            self.engine.feed_again()
        if isinstance(self.engine, WorkerEngine):
            self.engine.target_changed(self._policy_version)

    @contextlib.contextmanager
    def generation(self, sampling: Sampling) -> Iterator[list[Generated]]:
        """Around one generate call of the trainer. What the block puts into the list goes to the plugin."""
        generated: list[Generated] = []
        plugin, engine = self.plugin, self.engine
        if plugin is None or engine is None:
            yield generated
            return
        plugin.before_generation()
        before, began = engine.counters(), time.perf_counter()
        yield generated
        seconds = time.perf_counter() - began
        counters = engine.counters() - before
        for part in generated:
            rollouts = replace(as_rollouts(part, sampling, counters, seconds), heads_version=engine.heads_version)
            rollouts = replace(rollouts, policy_version=self._policy_version, num_drafts=engine.num_drafts)
            plugin.rollout_ready(rollouts)
            self._rollouts = rollouts
            if self._tap is not None:
                self._tap.expect(rollouts)

    # ---- the trainer's events -----------------------------------------------------------------------------------------------

    def begin(self, model: nn.Module) -> None:
        """Training begins: Ray (if there is none), companion, plugin, tap, run folder."""
        assert self.engine is not None, "the engine is attached when the trainer is built"
        atexit.register(self._stack.close)  # A training that fails does not come to end().
        companion = self.config.companion
        self._stack.enter_context(local_ray(cpus=1 + companion.workers, queue_bytes=companion.queue_bytes))
        self.plugin = MedusaPlugin.start(self.config, model, self.engine, self.folder)
        self._stack.callback(self.plugin.close)
        self._tap = ForwardTap(model, self.plugin)
        self._stack.callback(self._tap.close)
        self._writer = RunWriter(self.folder, self.config.model_dump(mode="json"))
        self._steps, self._began = 0, time.monotonic()

    def updated(self, model: nn.Module, version: int) -> None:
        """The actor has made an optimizer step."""
        self._policy_version = version
        if self.plugin is None:
            return
        self.plugin.policy_updated(model, version)
        self._write_step()

    def _write_step(self) -> None:
        """One line for each rollout batch: a loop may update more often than it generates."""
        rollouts, self._rollouts = self._rollouts, None
        if rollouts is not None and self._writer is not None and self.plugin is not None:
            values = {names.STEP: self._steps, **_rollout_values(rollouts), **self.plugin.metrics()}
            values[names.WALL_S] = time.monotonic() - self._began
            self._writer.step(values)
            self._steps += 1
            self._figures = {PREFIX + name: float(value) for name, value in values.items() if isinstance(value, int | float)}

    def figures(self) -> dict[str, float]:
        """The last step's figures for the trainer's own log, under names of their own."""
        figures, self._figures = self._figures, {}
        return figures

    def end(self) -> None:
        """Training is over: the heads are saved, the report is written, and what was started in `begin` is closed."""
        if self.plugin is None or self._writer is None:
            return
        heads = self.plugin.save_heads(self.folder / FINAL_HEADS)
        self._writer.finish()
        self._stack.close()
        atexit.unregister(self._stack.close)
        self.plugin, self._tap, self._writer = None, None, None
        # Should the trainer train again, it goes on with these.
        self.config = self.config.model_copy(update={"heads": self.config.heads.model_copy(update={"path": str(heads)})})

    @property
    def _kept_state(self) -> Path:
        return self._home / "heads.safetensors"


def as_rollouts(part: Generated, sampling: Sampling, counters: Counters, seconds: float) -> Rollouts:
    """A foreign loop's rows as rollouts; equal prompts count as one. Rows with an unknown log-prob are left out."""
    prompts = list(dict.fromkeys(tuple(prompt) for prompt in part.prompts))
    index = {prompt: i for i, prompt in enumerate(prompts)}
    responses = []
    for prompt, completion, logprobs in zip(part.prompts, part.completions, part.logprobs, strict=True):
        known = tuple(value for value in logprobs if value is not None)
        if len(known) == len(completion):
            reason = "length" if len(completion) >= sampling.max_new_tokens else "stop"
            responses.append(Response(index[tuple(prompt)], tuple(completion), known, reason))
    return Rollouts(tuple(prompts), tuple(responses), counters, seconds, sampling)


@contextlib.contextmanager
def replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    """Another object under a module's name for the time of the block: some loops have no seam where their engine is built."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def _rollout_values(rollouts: Rollouts) -> dict[str, Any]:
    """What the rollouts say by themselves."""
    count = max(1, len(rollouts.responses))
    return {
        names.POLICY_VERSION: rollouts.policy_version,
        names.GENERATE_S: rollouts.seconds,
        names.TOKENS_PER_S: rollouts.tokens_per_s,
        names.RESPONSE_LENGTH: rollouts.generated_tokens / count,
        names.TRUNCATED_FRAC: sum(r.finish_reason == "length" for r in rollouts.responses) / count,
    }
