"""The engines that are compared: what a user would otherwise pick, each in a process of its own, with the same model and cache."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from heads.errors import ConfigError
from medusa_ppo.config import EngineConfig
from medusa_ppo.serving.engine import RolloutEngine
from medusa_ppo.serving.launch import LaunchPlan, plan_launch, read_heads_config
from medusa_ppo.serving.ray_engine import RayEngine

NONE, STOCK, NGRAM, FIXED, CHOSEN = "none", "stock medusa", "n-gram", "ours, K fixed", "ours, K chosen"
NGRAM_LOOKUP = {"prompt_lookup_min": 2, "prompt_lookup_max": 4}


@dataclass(frozen=True)
class Arm:
    """One way to serve: an engine (arms may share one), and how it drafts."""

    name: str
    engine: RolloutEngine
    choose: bool | None = None

    def prepare(self) -> None:
        """Set the engine to this arm's way of drafting."""
        if self.choose is not None:
            self.engine.set_drafting(choose=self.choose)


@contextmanager
def running_arms(
    model: str, heads: str, stock_heads: str, config: EngineConfig, seed: int, scratch: Path, *, ngram: bool = True
) -> Iterator[list[Arm]]:
    """All arms, started one after the other; `ray.init` is the caller's. Every engine is closed at the end.

    Args:
        heads: folder of our heads, any kind.
        stock_heads: folder of heads of kind medusa for vLLM's own Medusa; empty: that arm is left out.
        config: settings that all engines share; `draft_temperature` and `num_drafts` are of our arms.
        scratch: folder for the stock arm's copy of its heads.
        ngram: with the n-gram arm.
    """
    ours = plan_launch(model, heads, config, seed)
    plain = plan_launch(model, None, config, seed)
    with ExitStack() as engines:

        def start(plan: LaunchPlan) -> RolloutEngine:
            return engines.enter_context(RayEngine(model, None, config, seed, plan=plan))

        arms = [Arm(NONE, start(plain))]
        if stock_heads:
            arms.append(Arm(STOCK, start(_stock_plan(plain, ours.max_drafts, stock_heads, scratch))))
        if ngram:
            settings = {"method": "ngram", "num_speculative_tokens": ours.max_drafts, **NGRAM_LOOKUP}
            arms.append(Arm(NGRAM, start(_with_speculation(plain, settings))))
        engine = start(ours)
        yield [*arms, Arm(FIXED, engine, choose=False), Arm(CHOSEN, engine, choose=True)]


def _with_speculation(plan: LaunchPlan, settings: dict[str, Any]) -> LaunchPlan:
    return replace(plan, engine_args={**plan.engine_args, "speculative_config": settings})


def _stock_plan(plain: LaunchPlan, drafts: int, stock_heads: str, scratch: Path) -> LaunchPlan:
    """vLLM's own Medusa module and lm_head products. The mends of the CPU build stay: without them its samples are wrong."""
    kind = read_heads_config(stock_heads, 0, 0).kind
    if kind != "medusa":
        raise ConfigError(
            "vLLM's own Medusa can't serve these heads.", given=f"kind {kind} in {stock_heads}", expected="medusa", do="Train some."
        )
    folder = scratch / "stock-heads"
    shutil.copytree(stock_heads, folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    del config["medusa_ppo"]  # Then our proposer leaves the folder to vLLM.
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    plan = _with_speculation(plain, {"method": "medusa", "model": str(folder), "num_speculative_tokens": drafts})
    return replace(plan, max_drafts=drafts, num_drafts=drafts, drafting={})
