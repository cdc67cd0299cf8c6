"""Any loop with a tap: the companion is a process of its own, and vLLM loads newer heads from its
feed. The lines that a loop adds are marked.

    export MEDUSA_PPO_COMPANION_TOKEN=$(openssl rand -hex 32)
    medusa-ppo companion serve --model ACTOR --heads my-heads/ --feed feed/ heads.num_heads=3 &
    MEDUSA_PPO_FEED=feed/ python examples/tapped_loop.py ACTOR my-heads/ http://127.0.0.1:8461

With `ray` in place of the address, companion, feed and vLLM are actors of one Ray.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm import LLM, SamplingParams

from medusa_ppo.loops.tap import CompanionTap  # ours


def engine_arguments(actor_path: str, heads: str) -> dict[str, Any]:
    """The arguments that vLLM is started with."""
    speculation = {"method": "medusa", "model": heads, "num_speculative_tokens": 3}  # ours
    return {
        "model": actor_path,
        "dtype": "float32",
        "max_model_len": 256,
        "max_num_seqs": 32,
        "enforce_eager": True,
        "kv_cache_memory_bytes": 1 << 28,
        "disable_log_stats": False,
        "speculative_config": speculation,
    }


def pad(
    prompts: list[list[int]], answers: list[list[int]]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Prompt and answer of each row with padding behind, and two masks: tokens, answer tokens."""
    width = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True))
    ids_BT = torch.zeros(len(prompts), width, dtype=torch.int64)
    attention_BT, mask_BT = torch.zeros_like(ids_BT), torch.zeros_like(ids_BT)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        ids_BT[row, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        attention_BT[row, : len(prompt) + len(answer)] = 1
        mask_BT[row, len(prompt) : len(prompt) + len(answer)] = 1
    return ids_BT, attention_BT, mask_BT


def tokens_a_step(call: Callable[..., Any], before: dict[str, float]) -> float:
    """Tokens of an engine step with drafts since the last call, by vLLM's own counters; 1 if there
    was none.
    """
    now = {
        m.name: m.value
        for m in call("get_metrics")
        if m.name.startswith("vllm:spec_decode_num") and hasattr(m, "value")
    }
    grown = {name: value - before.get(name, 0.0) for name, value in now.items()}
    before.update(now)
    drafts = grown.get("vllm:spec_decode_num_drafts", 0.0)
    return 1.0 + grown["vllm:spec_decode_num_accepted_tokens"] / drafts if drafts else 1.0


def train(actor_path: str, companion: str, call: Callable[..., Any], steps: int) -> list[float]:
    """Teach the actor to answer in an even number of tokens. Returns the tokens of an engine step,
    for each step of the loop.

    Args:
        companion: where the companion listens.
        call: calls a method of vLLM's `LLM` by name.
    """
    actor = AutoModelForCausalLM.from_pretrained(actor_path, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(actor_path)
    optimizer = torch.optim.AdamW(actor.parameters(), lr=1e-5)
    questions = tokenizer([f"Question: {n} + {n} = ?\nAnswer:" for n in range(2, 34)]).input_ids
    sampling = SamplingParams(temperature=1.0, max_tokens=48, n=2)
    counters: dict[str, float] = {}
    figures = []
    with CompanionTap(actor, companion) as tap, tempfile.TemporaryDirectory() as folder:  # ours
        for _ in range(steps):
            asked = [{"prompt_token_ids": ids} for ids in questions]
            said = call("generate", asked, sampling, use_tqdm=False)
            rows = [(list(r.prompt_token_ids), list(o.token_ids)) for r in said for o in r.outputs]
            prompts, answers = [row[0] for row in rows], [row[1] for row in rows]
            ids_BT, attention_BT, mask_BT = pad(prompts, answers)
            rewards_B = torch.tensor([float(len(answer) % 2 == 0) for answer in answers])
            with tap(prompts, answers):  # ours: around the log-prob pass
                logits_BTV = actor(ids_BT, attention_mask=attention_BT).logits
            logprobs_BTV = logits_BTV[:, :-1].log_softmax(-1)
            logprobs_BT = logprobs_BTV.gather(2, ids_BT[:, 1:, None])[..., 0] * mask_BT[:, 1:]
            advantages_B = rewards_B - rewards_B.mean()
            loss = -(advantages_B[:, None] * logprobs_BT).sum() / mask_BT.sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            tap.updated()  # ours: the actor has changed
            actor.save_pretrained(folder)
            call("collective_rpc", "reload_weights", kwargs={"weights_path": folder})
            call("reset_prefix_cache")
            figures.append(tokens_a_step(call, counters))
            print(f"step {len(figures)}: {figures[-1]:.2f} tokens a step", flush=True)
    return figures


def main(actor_path: str, heads: str, companion: str, steps: int = 40) -> list[float]:
    """A companion behind HTTP; vLLM belongs to this process."""
    llm = LLM(**engine_arguments(actor_path, heads))

    def call(name: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(llm, name)(*args, **kwargs)

    return train(actor_path, companion, call, steps)


def main_in_ray(actor_path: str, heads: str, steps: int = 40, **sections: Any) -> list[float]:
    """Companion, feed and vLLM as actors of one Ray."""
    import ray

    from medusa_ppo.config.run_config import build_config
    from medusa_ppo.loops.served_companion import companion_in_ray

    if not ray.is_initialized():
        ray.init()
    companion = {"feed": "ray:heads", **sections.pop("companion", {})}
    config = build_config({"heads": {"num_heads": 3}, "companion": companion, **sections})
    held = companion_in_ray("companion", config, actor_path, Path(heads))
    environment = {"env_vars": {"MEDUSA_PPO_FEED": "ray:heads"}}
    llm = (
        ray.remote(num_gpus=0.5 if ray.cluster_resources().get("GPU") else 0)(LLM)
        .options(runtime_env=environment)
        .remote(**engine_arguments(actor_path, heads))
    )

    def call(name: str, *args: Any, **kwargs: Any) -> Any:
        return ray.get(getattr(llm, name).remote(*args, **kwargs))

    try:
        return train(actor_path, "ray:companion", call, steps)
    finally:
        ray.kill(llm)
        ray.kill(held)


if __name__ == "__main__":
    path, folder, where = sys.argv[1:4]
    count = int(sys.argv[4]) if len(sys.argv) > 4 else 40
    main_in_ray(path, folder, count) if where == "ray" else main(path, folder, where, count)
