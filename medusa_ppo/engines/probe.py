"""Proof that this machine's engine samples honestly while it drafts: `python -m medusa_ppo.engines.probe` prints one line of JSON.

A tiny random model is served with drafting at temperature < 1. If its tokens x_t come from p_t, then log p_t(x_t) + H(p_t) has mean 0
given the past, so the sum over all tokens, divided by the root of the summed variances, is a standard normal z. vLLM's CPU build
without our mend gives |z| above 50 here.

Shape letters: B rows, T positions, M sampled tokens, V vocabulary.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from heads.checkpoint import save_heads
from heads.heads_config import HeadsConfig
from heads.modules import MedusaHeads
from heads.vocabulary import truncate_logits
from medusa_ppo.config import EngineConfig
from medusa_ppo.engines.colocated import ColocatedEngine
from medusa_ppo.types import Rollouts, Sampling

TEMPERATURE = 0.7
LIMIT = 4.0
VOCAB, HIDDEN, HEADS = 128, 64, 3
PROMPTS, NEW_TOKENS = 64, 32


def honesty_z(logits_MV: torch.Tensor, ids_M: torch.Tensor, sampling: Sampling) -> float:
    """Standard errors between the sampled tokens' log-probs and the model's own expectation of them.

    Args:
        logits_MV: the model's raw logits at each sampled position.
        ids_M: the sampled tokens.
        sampling: temperature, top-p and top-k they were sampled with.
    """
    logp_MV = torch.log_softmax(truncate_logits(logits_MV.double() / sampling.temperature, sampling.top_k, sampling.top_p), dim=-1)
    p_MV = logp_MV.exp()
    safe_MV = torch.where(p_MV > 0, logp_MV, torch.zeros_like(logp_MV))
    mean_M = (p_MV * safe_MV).sum(-1)
    variance_M = (p_MV * safe_MV.square()).sum(-1) - mean_M.square()
    seen_M = logp_MV.gather(1, ids_M[:, None])[:, 0]
    return float((seen_M - mean_M).sum() / variance_M.sum().sqrt())


@torch.no_grad()
def sampled_rows(model: Any, rollouts: Rollouts) -> tuple[torch.Tensor, torch.Tensor]:
    """The model's own logits_MV at every sampled position of some rollouts, and ids_M of what was sampled there."""
    logits: list[torch.Tensor] = []
    ids: list[int] = []
    for response in rollouts.responses:
        prompt = rollouts.prompts[response.prompt_index]
        row_1T = torch.tensor([[*prompt, *response.token_ids]])
        logits.append(model(input_ids=row_1T).logits[0, len(prompt) - 1 : -1])
        ids += response.token_ids
    return torch.cat(logits), torch.tensor(ids)


def tiny_model(folder: Path, seed: int = 0) -> LlamaForCausalLM:
    """A random Llama with peaked next-token distributions, saved as a transformers folder."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=HIDDEN * 2,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
        eos_token_id=None,
        bos_token_id=None,
    )
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model


def prompts(count: int, seed: int = 0) -> Sequence[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB, (count, 8), generator=generator).tolist()


def run_probe() -> dict[str, Any]:
    """Start a tiny engine with zero-start heads, sample with drafting, and compare with the model."""
    with tempfile.TemporaryDirectory(prefix="medusa-ppo-probe-") as temporary:
        folder = Path(temporary)
        model = tiny_model(folder / "model")
        heads = MedusaHeads(HeadsConfig(hidden_size=HIDDEN, vocab_size=VOCAB, num_heads=HEADS))
        save_heads(folder / "heads", heads, lm_head_VD=model.lm_head.weight)
        config = EngineConfig(max_num_seqs=16, max_model_len=64, threads=1)
        sampling = Sampling(temperature=TEMPERATURE, max_new_tokens=NEW_TOKENS, ignore_eos=True, seed=0)
        with ColocatedEngine(folder / "model", folder / "heads", config) as engine:
            report = engine.plugin_report()
            rollouts = engine.generate(prompts(PROMPTS), sampling)
        logits_MV, ids_M = sampled_rows(model, rollouts)
    return {
        "vllm": report["vllm"],
        "pid": report["pid"],
        "active": report["drafter"] == "MedusaProposer",
        "mends": report["mends"],
        "temperature": TEMPERATURE,
        "tokens": int(ids_M.numel()),
        "drafts": rollouts.counters.drafts,
        "z": honesty_z(logits_MV, ids_M, sampling),
        "limit": LIMIT,
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(run_probe()) + "\n")
