"""Are rollouts written and scored sooner in pieces if the roles also take turns in memory?

    python benchmarks/pieces_in_turn.py [--rounds 6] [--hidden 384] [--layers 4] [--prompts 24]
        [--responses 4] [--new 96] [--seqs 8] [--piece 3]

Random Llamas of one size (actor, reference, critic, reward model) with the words of the embedded
example; a real vLLM engine in a Ray actor on one core, the product's `RolloutMaker` and `Learner`
on another one. The same prompts and seeds in three arms, in turn:

    pieces, in turn     ppo.placement=shared: each piece moves each role's weights in beside the
                        engine, which still writes
    whole, in turn      ppo.placement=shared: roles move in once, after the last response
    pieces, at home     ppo.placement=separate: nothing moves

For each arm: seconds from the first request to the last score, the parts of them, the share of
time in which engine or models wait, bytes moved, and the most bytes that the roles had at once.
The figure is the median over the rounds of the seconds of pieces / whole, both in turn. All arms
write the same tokens, and the first and the last one must find the same log-probs and rewards to
the bit; a line says whether they did.

The engine never sleeps here, since vLLM's CPU build can't; it would after the last response in both
of the first two arms.
"""

from __future__ import annotations

import argparse
import copy
import logging
import os
import statistics
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from heads.checkpoint import checksum
from medusa_ppo.config.ppo_section import SEPARATE, SHARED
from medusa_ppo.config.run_config import RunConfig, build_config
from medusa_ppo.contract import metrics as names
from medusa_ppo.contract.rollouts import Rollouts
from medusa_ppo.demo.task import build_tokenizer, demo_rows
from medusa_ppo.engines.ray_engine import make_engine
from medusa_ppo.engines.rollout_engine import RolloutEngine
from medusa_ppo.ppo.critic import Critic
from medusa_ppo.ppo.generation import Prompt, SpeedPairs, sampling_of
from medusa_ppo.ppo.learner import Learner
from medusa_ppo.ppo.placement import REWARD
from medusa_ppo.ppo.rewards import ModelReward
from medusa_ppo.ppo.rollout_maker import RolloutMaker
from medusa_ppo.runtime.console import say
from medusa_ppo.runtime.processes import local_ray

PROMPT_TOKENS = 64
PIECES, WHOLE, AT_HOME = "pieces, in turn", "whole, in turn", "pieces, at home"
ARMS = (PIECES, WHOLE, AT_HOME)
MIB = 2**20


def save_models(folder: Path, hidden: int, layers: int) -> LlamaForCausalLM:
    """An actor whose responses end by chance, so that they have many lengths, and a reward model
    of its size.
    """
    tokenizer = build_tokenizer()
    end = tokenizer.eos_token_id
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 32,
        "num_key_value_heads": hidden // 32,
        "vocab_size": len(tokenizer),
        "bos_token_id": None,
        "eos_token_id": end,
        "pad_token_id": end,
        "tie_word_embeddings": False,
    }
    actor = LlamaForCausalLM(LlamaConfig(**sizes)).float().eval()
    judge = LlamaForSequenceClassification(LlamaConfig(**sizes | {"num_labels": 1})).float()
    for name, model in (("actor", actor), ("judge", judge)):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return actor


def pin(pid: int, core: int) -> None:
    """All threads of a process."""
    for thread in os.listdir(f"/proc/{pid}/task"):
        os.sched_setaffinity(int(thread), {core})


@dataclass
class Found:
    """One batch: its figures, its tokens, and a checksum of what was found about them."""

    figures: dict[str, Any]
    tokens: int
    content: str


class Arm:
    """A loop's rollout maker with its own models."""

    def __init__(
        self, config: RunConfig, actor: LlamaForCausalLM, judge: Path, engine: RolloutEngine
    ) -> None:
        self._config = config
        actor = copy.deepcopy(actor)
        self._learner = Learner(actor, Critic(actor), config.ppo)
        self._reward = ModelReward(str(judge))
        model = self._reward.model
        assert model is not None, "a reward model has one"
        self._learner.turns.add(REWARD, model)
        self._tokenizer = build_tokenizer()
        self._maker = RolloutMaker(
            self._learner,
            SpeedPairs(engine, config),
            self._rewards,
            piece_prompts=config.ppo.piece_prompts,
            pad_id=0,
        )

    def _rewards(self, rollouts: Rollouts, prompts: list[Prompt]) -> torch.Tensor:
        asked = [prompts[response.prompt_index] for response in rollouts.responses]
        texts = self._tokenizer.batch_decode(
            [list(response.token_ids) for response in rollouts.responses]
        )
        with self._learner.turns.on(REWARD):
            return self._reward.score([prompt.text for prompt in asked], texts, [{}] * len(texts))

    def take(self, step: int, prompts: list[Prompt]) -> Found:
        """Write and score one batch."""
        turns = self._learner.turns
        turns.clear()
        turns.take()  # What moved before belongs to no batch.
        rollouts, _ = self._maker.write(step, prompts, sampling_of(self._config, step))
        _, rewards_S, scores, _ = self._maker.score(rollouts)
        content = {
            "logprobs": scores.logprobs_SR,
            "reference": scores.reference_SR,
            "values": scores.values_SR,
            "rewards": rewards_S,
        }
        figures = self._maker.figures() | turns.take()
        return Found(figures, rollouts.generated_tokens, checksum(content))


def busy(figures: dict[str, Any]) -> dict[str, float]:
    """Seconds of work by role."""
    return {
        role: sum(end - start for start, end in spans)
        for role, spans in figures[names.SPANS].items()
    }


def table(found: dict[str, list[Found]]) -> list[str]:
    """Markdown: a row for each arm, then the ratio."""
    head = "arm | seconds | engine | models and rewards | waiting | moved, MiB | at once, MiB"
    lines = [f"| {head} |", "|---" * (head.count("|") + 1) + "|"]
    for name, batches in found.items():
        work = [busy(one.figures) for one in batches]
        cells = [
            statistics.median(one.figures[names.GENERATE_SCORE_S] for one in batches),
            statistics.median(roles["engine"] for roles in work),
            statistics.median(sum(roles.values()) - roles["engine"] for roles in work),
        ]
        idle = statistics.median(one.figures[names.GENERATE_SCORE_IDLE] for one in batches)
        moved = statistics.median(one.figures.get(names.OFFLOAD_BYTES, 0) for one in batches)
        most = max(one.figures[names.LEDGER_PEAK] for one in batches) * 1024
        shown = " | ".join(f"{value:.2f}" for value in cells)
        lines.append(f"| {name} | {shown} | {idle:.0%} | {moved / MIB:,.0f} | {most:,.0f} |")
    ratios = [
        ours.figures[names.GENERATE_SCORE_S] / theirs.figures[names.GENERATE_SCORE_S]
        for ours, theirs in zip(found[PIECES], found[WHOLE], strict=True)
    ]
    lines.append(
        f"pieces / whole, in turn: median {statistics.median(ratios):.3f} of {len(ratios)}"
        f" ({min(ratios):.3f} to {max(ratios):.3f})"
    )
    return lines


def configured(options: argparse.Namespace, name: str) -> RunConfig:
    in_turn = name != AT_HOME
    return build_config(
        {
            "ppo": {
                "prompts_per_step": options.prompts,
                "piece_prompts": None if name == WHOLE else options.piece,
                "placement": SHARED if in_turn else SEPARATE,
                "minibatch_size": options.piece * options.responses,
                "threads": 1,
            },
            "data": {"max_prompt_tokens": PROMPT_TOKENS},
            "sampling": {
                "max_new_tokens": options.new,
                "responses_per_prompt": options.responses,
                "seeded": True,
            },
            "engine": {
                "max_num_seqs": options.seqs,
                "max_model_len": PROMPT_TOKENS + options.new,
                "dtype": "float32",
                "threads": 1,
                "sleep_level": 1 if in_turn else None,
            },
            "companion": {"enabled": False},
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sizes = {
        "rounds": 6,
        "hidden": 384,
        "layers": 4,
        "prompts": 24,
        "responses": 4,
        "new": 96,
        "seqs": 8,
        "piece": 3,
    }
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    models_core, engine_core = sorted(os.sched_getaffinity(0))[:2]
    torch.set_num_threads(1)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="medusa-ppo-bench-")))
        actor = save_models(folder, options.hidden, options.layers)
        stack.enter_context(local_ray(cpus=2))
        section = configured(options, AT_HOME).engine
        engine = stack.enter_context(make_engine(folder / "actor", None, section, 0))
        arms = {
            name: Arm(configured(options, name), actor, folder / "judge", engine) for name in ARMS
        }
        pin(int(str(engine.plugin_report()["pid"])), engine_core)
        pin(os.getpid(), models_core)
        rows = demo_rows(limit=(options.rounds + 1) * options.prompts)
        tokenizer = build_tokenizer()
        prompts = [
            Prompt(row["prompt"], tuple(tokenizer(row["prompt"])["input_ids"]), {}) for row in rows
        ]
        found: dict[str, list[Found]] = {name: [] for name in ARMS}
        for step in range(options.rounds + 1):
            asked = prompts[step * options.prompts :][: options.prompts]
            order = ARMS[step % 3 :] + ARMS[: step % 3]
            batch = {name: arms[name].take(step, asked) for name in order}
            if not step:  # The first of each warms up.
                continue
            for name in ARMS:
                found[name].append(batch[name])
            tokens = len({one.tokens for one in batch.values()}) == 1
            bits = batch[PIECES].content == batch[AT_HOME].content
            seconds = ", ".join(
                f"{name} {batch[name].figures[names.GENERATE_SCORE_S]:.2f} s" for name in ARMS
            )
            say(
                f"round {step}: {seconds}; {batch[WHOLE].tokens} tokens, the same in all: {tokens};"
                f" scores of pieces the same to the bit: {bits}"
            )
    say("\n".join(table(found)))


if __name__ == "__main__":
    main()
