"""The driver's half for loops whose actor and engines live in other processes. Imports no framework."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import torch
from safetensors import safe_open

from heads.checkpoint import save_heads, save_state
from heads.errors import ConfigError
from medusa_ppo.actors.hf import embedding_weight, lm_head_weight, load_actor
from medusa_ppo.config import RunConfig
from medusa_ppo.engines.colocated import AttachedEngine, Call
from medusa_ppo.engines.launch import plan_launch
from medusa_ppo.loops.attachment import OURS, Attachment
from medusa_ppo.plugin import MedusaPlugin, heads_for_table
from medusa_ppo.reports.store import RunWriter
from medusa_ppo.types import Counters, RolloutBatch, Rollouts, Sampling


def call_all(engines: list[Any], method: str, args: tuple[Any, ...]) -> list[Any]:
    """A worker method on every worker of every engine."""
    return [answer for answers in ray.get([engine.medusa_call.remote(method, args) for engine in engines]) for answer in answers]


def sum_counters(engines: list[Any]) -> Counters:
    """vLLM's acceptance counters over all engines."""
    total = Counters()
    for counters in ray.get([engine.medusa_counters.remote() for engine in engines]):
        total = total + counters
    return total


logger = logging.getLogger(__name__)

LM_HEAD = "lm_head.weight"
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight")
Tables = tuple[torch.Tensor, torch.Tensor]


class RemoteAttachment(Attachment):
    """As `Attachment`, where only tables, packed batches and named calls cross between processes. All of it on one node."""

    def __init__(self, config: RunConfig, model_path: str, folder: Path) -> None:
        """Read the actor's tables from its files and write the heads that the engines start with.

        Raises:
            UnsupportedVersionError, ModelError, CheckpointError, ConfigError, LossyError: as `plan_launch`.
        """
        super().__init__(config)
        self.folder = folder
        self._tables = read_tables(model_path)
        self._heads = heads_for_table(config, self._tables[0])
        save_heads(self._home / "heads", self._heads, lm_head_VD=self._tables[0], metadata={"start": config.heads.path or "zero"})
        save_state(self._kept_state, self._heads.trainable_state())
        self._plan = plan_launch(model_path, self._home / "heads", config.engine, config.seed)
        self._before = Counters()

    def arguments(self, worker_extension: str) -> dict[str, Any]:
        """What vLLM needs beside the loop's own arguments.

        Args:
            worker_extension: our worker extension joined with the loop's, by name.
        """
        assert self._plan is not None, "planned in __init__"
        ours = {name: self._plan.engine_args[name] for name in (*OURS, "logprobs_mode")}
        return {**ours, "worker_extension_cls": worker_extension, **self.config.engine.extra}

    def attach(self, call: Call, counters: Callable[[], Counters]) -> None:
        """The engines run, and are awake."""
        assert self._plan is not None, "planned in __init__"
        self.engine = AttachedEngine(call, self._kept_state, counters=counters, drafting=self._plan.drafting)

    def start(self) -> None:
        """Training begins: companion, plugin, run folder. Ray is the loop's."""
        assert self.engine is not None, "attach() comes first"
        self.plugin = MedusaPlugin.start_from_tables(self.config, self._heads, self._tables, self.engine, self.folder)
        self._stack.callback(self.plugin.close)
        self._writer = RunWriter(self.folder, self.config.model_dump(mode="json"))
        self._before = self.engine.counters()

    def scored(self, batch: RolloutBatch | None, sampling: Sampling) -> None:
        """A rollout batch was generated and scored; `batch` is what a worker tapped of it."""
        plugin, engine = self.plugin, self.engine
        if plugin is None or engine is None:
            return
        now = engine.counters()
        rollouts = Rollouts((), (), now - self._before, 0.0, sampling, self._policy_version, engine.heads_version, engine.num_drafts)
        self._before, self._rollouts = now, rollouts
        plugin.rollout_ready(rollouts)
        if batch is None:
            logger.warning("No worker tapped the last rollouts; the companion gets nothing.")
            return
        plugin.batch_ready(batch)

    def tables_changed(self, tables: Tables, version: int) -> None:
        """The actor was updated."""
        self._policy_version = version
        if self.plugin is not None:
            self.plugin.tables_updated(tables, version)
            self._write_step()

    def synced(self, *, lost_heads: bool) -> None:
        """The loop has put the actor's weights into its engines, which are awake and idle: newer heads go in, if there are any."""
        self.weights_synced(lost_heads=lost_heads)
        if self.plugin is not None:
            self.plugin.before_generation()


def read_tables(model_path: str) -> Tables:
    """lm_head and embedding of an actor, from its files alone where they are a folder of safetensors; else the actor is loaded."""
    folder, found = Path(model_path), {}
    for path in sorted(folder.glob("*.safetensors")) if folder.is_dir() else []:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                if name == LM_HEAD or name.endswith(EMBEDDINGS):
                    found[LM_HEAD if name == LM_HEAD else "embedding"] = file.get_tensor(name)
    if "embedding" in found:
        return found.get(LM_HEAD, found["embedding"]), found["embedding"]
    actor = load_actor(model_path)
    return lm_head_weight(actor).detach(), embedding_weight(actor).detach()


def refuse(loop: str, reasons: dict[str, bool]) -> None:
    """ConfigError that names every setting of a loop that can't be combined with draft heads.

    Args:
        reasons: setting -> whether it is on.
    """
    given = [name for name, on in reasons.items() if on]
    if given:
        raise ConfigError(
            f"These settings of {loop} can't be combined with draft heads in this version.",
            given=", ".join(given),
            expected="unset",
            do="Change them, or leave medusa out (docs/hooks.md, what is supported).",
        )
