"""Proof that an engine samples honestly while it drafts: this machine's (`python -m medusa_ppo.engines.probe` prints one line of JSON), or
any engine with any model, heads and settings (`sample`, `judge`).

For the machine a tiny random model is served with drafting at temperature < 1. If its tokens x_t come from p_t, then log p_t(x_t) + H(p_t)
has mean 0 given the past, so the sum over all tokens, divided by the root of the summed variances, is a standard normal z. vLLM's CPU
build without our mend gives |z| above 50 here.

Shape letters: B rows, T positions, M sampled tokens, V vocabulary.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from heads.checkpoint import save_heads
from heads.heads_config import HeadsConfig
from heads.modules import MedusaHeads
from medusa_ppo.config import EngineConfig
from medusa_ppo.drafting.uniformity import Uniformity, add_rollouts
from medusa_ppo.engines.colocated import ColocatedEngine
from medusa_ppo.engines.rollout_engine import Prompts, RolloutEngine
from medusa_ppo.types import Rollouts, Sampling

TEMPERATURE = 0.7
LIMIT = 4.0
VOCAB, HIDDEN, HEADS = 128, 64, 3
PROMPTS, NEW_TOKENS = 64, 32


def honesty_z(logits_MV: torch.Tensor, ids_M: torch.Tensor, sampling: Sampling) -> float:
    """Standard errors between the sampled tokens' log-probs and the model's own expectation; arguments as of `Uniformity.add`."""
    test = Uniformity()
    test.add(logits_MV, ids_M, sampling)
    return test.z


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


def tiny_model(folder: Path) -> LlamaForCausalLM:
    """A random Llama with peaked next-token distributions, saved as a transformers folder."""
    torch.manual_seed(0)
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


def sample(
    engine: RolloutEngine, asked: Prompts, sampling: Sampling, tokens: int, advance: Callable[[float], object]
) -> tuple[list[Rollouts], list[Rollouts]]:
    """At least so many tokens with the engine's drafts, and as many without, call by call in turn. It drafts afterwards as before."""
    drafts = engine.num_drafts
    runs: tuple[list[Rollouts], list[Rollouts]] = ([], [])
    try:
        while min(sum(rollouts.generated_tokens for rollouts in run) for run in runs) < tokens:
            for run, count in zip(runs, (drafts, 0), strict=True):
                engine.configure(num_drafts=count)
                run.append(engine.generate(asked, sampling))
                advance(run[-1].generated_tokens)
    finally:
        engine.configure(num_drafts=drafts)
    return runs


def judge(
    model: Any, runs: tuple[list[Rollouts], list[Rollouts]], advance: Callable[[float], object]
) -> tuple[Uniformity, Uniformity | None]:
    """What `sample` gave, against the model's own distribution; those without drafts only where those with drafts fail."""
    found = []
    for run in runs:
        found.append(Uniformity())
        for rollouts in run:
            add_rollouts(found[-1], model, rollouts)
            advance(rollouts.generated_tokens)
        if found[-1].honest:
            break
    return found[0], found[1] if len(found) > 1 else None


def beginnings(config: Any) -> list[list[int]]:
    """Prompts for any model: the token that begins its texts, or one that ends them, and one at random."""
    config = config.get_text_config()
    begin = next(token for token in (config.bos_token_id, config.eos_token_id, 0) if token is not None)
    begin = begin[0] if isinstance(begin, list) else begin
    generator = torch.Generator().manual_seed(0)
    return [[begin, token] for token in torch.randint(config.vocab_size, (PROMPTS,), generator=generator).tolist()]


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
            rollouts = engine.generate(torch.randint(VOCAB, (PROMPTS, 8), generator=torch.Generator().manual_seed(0)).tolist(), sampling)
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
