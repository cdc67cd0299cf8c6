"""Any loop in two lines: an engine that calls the plug-in's hooks by itself, in the place of the engine that the loop had.

    engine = DraftingEngine(config, actor, model_path, run_dir)

    generate       newer heads go in before; tokens and behaviour log-probs go to the plug-in afterwards
    the actor      tapped by hooks on it wherever the loop scores the last rollouts; rows are known by their tokens
    sync_actor     the plug-in learns that the actor has changed

Whoever wants the hooks in the open calls them (examples/bare_loop.py).
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, Self

from torch import nn

from medusa_ppo.config import RunConfig
from medusa_ppo.engines.ray_engine import make_engine
from medusa_ppo.engines.rollout_engine import Prompts, RolloutEngine
from medusa_ppo.loops.attachment import FINAL_HEADS, as_config
from medusa_ppo.loops.passes import ForwardTap
from medusa_ppo.plugin import MedusaPlugin
from medusa_ppo.processes import local_ray
from medusa_ppo.types import Rollouts, Sampling, SwapReceipt


class DraftingEngine:
    """An engine of ours with the plug-in behind its calls. Without drafts and companion it is the plain engine.

    Attributes:
        engine: the engine itself.
        plugin: None where the settings ask for neither drafts nor a companion.
    """

    def __init__(self, config: RunConfig, actor: nn.Module, model_path: str | Path, run_dir: str | Path) -> None:
        """Start Ray (if there is none), the engine and the companion.

        Args:
            config: read are `heads`, `companion`, `engine` and `seed`.
            actor: a transformers causal LM; the loop scores with `actor(input_ids=..., attention_mask=...)`.
            model_path: the actor's folder, for vLLM.
            run_dir: what the plug-in measures and publishes; the last heads are left in `heads-final`.

        Raises:
            UnsupportedVersionError, ModelError, CheckpointError, ConfigError, LossyError, EngineError: what can't be started.
        """
        self.plugin: MedusaPlugin | None = None
        self._actor, self._folder = actor, Path(run_dir)
        self._tap: ForwardTap | None = None
        with contextlib.ExitStack() as stack:
            stack.enter_context(local_ray(queue_bytes=config.companion.queue_bytes))
            wanted = as_config(config) is not None
            heads = MedusaPlugin.prepare_heads(config, actor, self._folder / "heads") if wanted else None
            self.engine: RolloutEngine = stack.enter_context(make_engine(model_path, heads, config.engine, config.seed))
            if wanted:
                self.plugin = MedusaPlugin.start(config, actor, self.engine, self._folder)
                stack.callback(self.plugin.close)
                self._tap = ForwardTap(actor, self.plugin)
                stack.callback(self._tap.close)
            self._stack = stack.pop_all()

    def generate(self, prompts: Prompts, sampling: Sampling) -> Rollouts:
        """As of RolloutEngine; newer heads go in before, if there are any."""
        if self.plugin is None or self._tap is None:
            return self.engine.generate(prompts, sampling)
        self.plugin.before_generation()
        rollouts = self.engine.generate(prompts, sampling)
        self.plugin.rollout_ready(rollouts)
        self._tap.expect(rollouts)
        return rollouts

    def sync_actor(self, path: str | Path, version: int) -> SwapReceipt:
        """As of RolloutEngine; `medusa_ppo.engines.actor_sync.ActorSync` writes the file and calls it."""
        receipt = self.engine.sync_actor(path, version)
        if self.plugin is not None:
            self.plugin.policy_updated(self._actor, version)
        return receipt

    def metrics(self) -> dict[str, Any]:
        """The plug-in's figures since the last call, under the names of medusa_ppo/metrics.py; none without a plug-in."""
        return self.plugin.metrics() if self.plugin is not None else {}

    def close(self) -> None:
        """Save the heads, and end what was started here."""
        if self.plugin is not None:
            self.plugin.save_heads(self._folder / FINAL_HEADS)
            self.plugin = None
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
