"""`medusa-ppo eval`: what heads are worth, by replay or by a real engine's counters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from heads.acceptance import ReplayResult
from heads.checkpoint import load_heads
from heads.errors import DataError
from heads.modules import MedusaHeads
from medusa_ppo.actors.hf import embedding_weight, lm_head_weight, load_actor
from medusa_ppo.companion.gate import replay
from medusa_ppo.offline.collect import PROMPTS_PER_ROUND, hidden_batch, samples_of, total_counters, write_responses
from medusa_ppo.offline.progress import OfflineProgress
from medusa_ppo.offline.setting import Setting, engine_config, read_setting, running_engine
from medusa_ppo.types import Rollouts, Sampling

BOOTSTRAP_GROUPS = 16
"""Groups of prompts that the interval of an engine's counters is drawn from."""


@dataclass(frozen=True)
class EvalOptions:
    """The command's options; see `medusa-ppo eval --help`."""

    model: str
    heads: Path
    data: str
    template: str = ""
    engine: str = "replay"
    draft: str = "one-hot"
    draft_temperature: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int = 128
    limit: int = 256
    seed: int = 0


def evaluate_heads(options: EvalOptions, progress: OfflineProgress) -> dict[str, Any]:
    """Generate on-policy responses and measure acceptance.

    Returns:
        The figures of DESIGN's command contract and the settings.

    Raises:
        ModelError, DataError, CheckpointError: unusable model, data or heads.
    """
    if not options.template:
        raise DataError("Heads are measured on responses.", given="no --template", expected="a prompt template", do="Pass --template.")
    model = AutoConfig.from_pretrained(options.model) if Path(options.model).exists() else None
    sizes = {"hidden_size": model.hidden_size, "vocab_size": model.vocab_size} if model else {}
    heads, _ = load_heads(options.heads, **sizes)
    setting = read_setting(options.model, options.data, options.template, options.max_new_tokens, options.limit)
    rounds = _generate(options, setting, progress)
    result = _from_replay(options, heads, rounds, progress) if options.engine == "replay" else _from_engine(rounds)
    tokens = sum(r.generated_tokens for r in rounds)
    seconds = sum(r.seconds for r in rounds)
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in asdict(options).items()}
    return {**result, "generated_tokens": tokens, "tokens_per_s": tokens / seconds, "settings": settings}


def _generate(options: EvalOptions, setting: Setting, progress: OfflineProgress) -> list[Rollouts]:
    sampling = Sampling(options.temperature, options.top_p, options.top_k, options.max_new_tokens)
    progress.say("Starting the engine ...")
    heads_path = str(options.heads) if options.engine == "vllm" else ""
    with running_engine(options.model, heads_path, engine_config(setting.prompts, options.max_new_tokens), options.seed) as engine:
        if heads_path and options.draft == "sampled":
            engine.set_drafting(sampled=True, draft_temperature=options.draft_temperature)
        # An engine counts for a whole call, so the bootstrap needs several calls.
        per_round = -(-len(setting.prompts) // BOOTSTRAP_GROUPS) if options.engine == "vllm" else PROMPTS_PER_ROUND
        with progress.phase("Writing responses", len(setting.prompts)) as advance:
            return write_responses(engine, setting.prompts, sampling, 0, options.seed, advance, min(per_round, PROMPTS_PER_ROUND))


def _from_replay(options: EvalOptions, heads: MedusaHeads, rounds: Sequence[Rollouts], progress: OfflineProgress) -> dict[str, Any]:
    actor = load_actor(options.model)
    samples = samples_of(rounds)
    with progress.phase("Hidden states", len(samples)) as advance:
        batch = replace(hidden_batch(actor, samples, options.temperature, advance), top_k=options.top_k, top_p=options.top_p)
    lm_head_VD = lm_head_weight(actor).detach().float().cpu()
    embedding_VD = embedding_weight(actor).detach().float().cpu()
    drafts = options.draft_temperature if options.draft == "sampled" else 0.0
    return _figures(replay(heads, batch, lm_head_VD, embedding_VD=embedding_VD, draft_temperature=drafts))


def _figures(result: ReplayResult) -> dict[str, Any]:
    interval = result.confidence_interval()
    return {
        "mean_acceptance_length": result.mean_acceptance_length,
        "acceptance_per_position": list(result.acceptance_per_position),
        "drafts": round(result.drafts),
        "accepted": round(result.accepted),
        "confidence_interval": [interval.low, interval.high],
    }


def _from_engine(rounds: Sequence[Rollouts]) -> dict[str, Any]:
    """vLLM's counters over all rounds; the interval is a bootstrap over rounds, which are groups of prompts."""
    counters = total_counters(rounds)
    result = ReplayResult(
        drafts_S=torch.tensor([float(r.counters.drafts) for r in rounds], dtype=torch.float64),
        accepted_SK=torch.tensor([[float(r.counters.accepted)] for r in rounds], dtype=torch.float64),
        unseen_S=torch.zeros(len(rounds), dtype=torch.float64),
    )
    interval = result.confidence_interval()
    return {
        "mean_acceptance_length": counters.mean_acceptance_length,
        "acceptance_per_position": list(counters.acceptance_per_position),
        "drafts": counters.drafts,
        "accepted": counters.accepted,
        "confidence_interval": [interval.low, interval.high],
    }
