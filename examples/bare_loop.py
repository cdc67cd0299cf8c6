"""Any loop: the five hooks of MedusaPlugin around a policy-gradient loop in plain torch. `python
examples/bare_loop.py ACTOR_FOLDER`.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from medusa_ppo import MedusaPlugin
from medusa_ppo.actors.hf import load_actor, load_tokenizer
from medusa_ppo.config.run_config import build_config
from medusa_ppo.contract.rollouts import Rollouts, Sampling
from medusa_ppo.engines.actor_sync import ActorSync
from medusa_ppo.engines.colocated import ColocatedEngine
from medusa_ppo.runtime.processes import local_ray


def pad(rollouts: Rollouts) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompt and response of each row with padding behind, and which tokens are the response's."""
    rows = [(rollouts.prompts[r.prompt_index], r.token_ids) for r in rollouts.responses]
    width = max(len(prompt) + len(answer) for prompt, answer in rows)
    ids_BT = torch.zeros(len(rows), width, dtype=torch.int64)
    mask_BT = torch.zeros(len(rows), width, dtype=torch.bool)
    for row, (prompt, answer) in enumerate(rows):
        ids_BT[row, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        mask_BT[row, len(prompt) : len(prompt) + len(answer)] = True
    return ids_BT, mask_BT


def main(actor_path: str, steps: int = 8, **sections: Any) -> list[dict[str, Any]]:
    """Teach the actor to answer in an even number of tokens. Returns the plugin's figures of each
    step.
    """
    config = build_config({"companion": {"learning_rate": 1e-2, "wait": True}, **sections})
    actor = load_actor(actor_path)
    tokenizer = load_tokenizer(actor_path)
    figures = []
    optimizer = torch.optim.AdamW(actor.parameters(), lr=1e-4)
    prompts = tokenizer([f"Question: {n} + {n} = ?\nAnswer:" for n in range(2, 42)]).input_ids
    with tempfile.TemporaryDirectory() as folder, local_ray():
        start = Path(folder) / "heads-start"  # the companion's versions will be in "heads"
        heads = MedusaPlugin.prepare_heads(config, actor, start)  # the engine starts with these
        with ColocatedEngine(actor_path, heads, config.engine) as engine, ActorSync(engine) as sync:
            plugin = MedusaPlugin.start(config, actor, engine, folder)
            for step in range(steps):
                plugin.before_generation()  # hook 1: newer heads, if there are any, go into vLLM
                rollouts = engine.generate(
                    prompts, Sampling(max_new_tokens=24, responses_per_prompt=2, seed=step)
                )
                plugin.rollout_ready(rollouts)  # hook 2: tokens and behaviour log-probs
                ids_BT, mask_BT = pad(rollouts)
                rewards_B = torch.tensor(
                    [float(len(r.token_ids) % 2 == 0) for r in rollouts.responses]
                )
                # hook 3: this very pass is tapped
                with plugin.actor_forward(actor, mask_BT, range(len(mask_BT))):
                    logits_BTV = actor(ids_BT).logits
                logprobs_BT = (
                    logits_BTV[:, :-1].log_softmax(-1).gather(2, ids_BT[:, 1:, None])[..., 0]
                    * mask_BT[:, 1:]
                )
                loss = (
                    -((rewards_B - rewards_B.mean())[:, None] * logprobs_BT).sum() / mask_BT.sum()
                )
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                plugin.policy_updated(actor, step + 1)  # hook 4: the actor has changed
                sync(actor, step + 1)
                figures.append(
                    plugin.metrics() | {"reward": rewards_B.mean().item()}
                )  # hook 5: what the engine did
            plugin.close()
    return figures


if __name__ == "__main__":
    for number, values in enumerate(main(sys.argv[1])):
        print(
            f"step {number}: reward {values['reward']:.2f}, acceptance length"
            f" {values['mal_serving']:.2f}"
        )
