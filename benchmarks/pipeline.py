"""Are rollouts scored sooner when pieces are scored while the engine writes? The same prompts and
seeds, in turn with a loop that waits.

    python benchmarks/pipeline.py [--pairs 6] [--hidden 256] [--layers 4] [--prompts 24]
    [--responses 4] [--new 96] [--seqs 8] [--piece 3]

A random Llama with the demo's words, a real vLLM engine in a Ray actor, the product's
`RolloutMaker` with actor, reference and critic, on two cores. Three arms take turns, the order
changing from round to round:

    pieces              the engine on one core, the models on the other one, `ppo.piece_prompts`
    whole               the same engine and cores, the whole batch scored when it is whole
    whole, both cores   an engine with two threads, models with two threads: each has both cores while it works

Figures are medians over the rounds of seconds pieces / seconds whole, and each arm's idle share
(`generate_score_idle_frac`). Whether a round's work was the same to the token, its line says.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from medusa_ppo.config.run_config import RunConfig, build_config
from medusa_ppo.contract import metrics as names
from medusa_ppo.demo.task import build_tokenizer, demo_rows
from medusa_ppo.engines.ray_engine import make_engine
from medusa_ppo.engines.rollout_engine import RolloutEngine
from medusa_ppo.ppo.generation import Prompt, SpeedPairs, sampling_of
from medusa_ppo.ppo.learner import Learner
from medusa_ppo.ppo.models import Critic
from medusa_ppo.ppo.rollout_maker import RolloutMaker
from medusa_ppo.runtime.processes import local_ray

PROMPT_TOKENS = 64
ARMS = {"pieces": 1, "whole": 1, "whole, both cores": 2}
"""Cores of the engine, and of the models."""


def random_actor(folder: Path, hidden: int, layers: int) -> LlamaForCausalLM:
    """An actor whose responses end by chance, so that they are of many lengths."""
    tokenizer = build_tokenizer()
    torch.manual_seed(0)
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 32,
    }
    end = tokenizer.eos_token_id
    words = {
        "vocab_size": len(tokenizer),
        "bos_token_id": None,
        "eos_token_id": end,
        "pad_token_id": end,
    }
    actor = (
        LlamaForCausalLM(
            LlamaConfig(
                **sizes, **words, num_key_value_heads=hidden // 32, tie_word_embeddings=False
            )
        )
        .float()
        .eval()
    )
    actor.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return actor


def pin(pid: int, cores: set[int]) -> None:
    """All threads of a process."""
    for thread in os.listdir(f"/proc/{pid}/task"):
        os.sched_setaffinity(int(thread), cores)


class Bench:
    """The arms over the same models."""

    def __init__(
        self,
        config: RunConfig,
        actor: LlamaForCausalLM,
        engines: dict[int, RolloutEngine],
        cores: list[int],
    ) -> None:
        learner = Learner(actor, Critic(actor), config.ppo)
        self._config = config
        self._cores = cores
        self._engines = engines
        self._pids = {
            threads: int(engine.plugin_report()["pid"]) for threads, engine in engines.items()
        }
        self._arms = {
            name: RolloutMaker(
                learner,
                SpeedPairs(engines[threads], config),
                self._rewards,
                piece_prompts=piece,
                pad_id=0,
            )
            for (name, threads), piece in zip(
                ARMS.items(), (config.ppo.piece_prompts, None, None), strict=True
            )
        }
        self._tokenizer = build_tokenizer()
        rows = demo_rows(limit=16 * config.ppo.prompts_per_step)
        every = [
            Prompt(row["prompt"], tuple(self._tokenizer(row["prompt"])["input_ids"]), row)
            for row in rows
        ]
        self._prompts = [prompt for prompt in every if len(prompt.token_ids) <= PROMPT_TOKENS]

    def _rewards(self, rollouts: Any, prompts: Any) -> torch.Tensor:
        texts = self._tokenizer.batch_decode(
            [list(response.token_ids) for response in rollouts.responses]
        )
        return torch.tensor([len(text) / 100 for text in texts])

    def take(self, name: str, step: int) -> tuple[dict[str, Any], int, float]:
        """One batch, generated and scored: its figures, its tokens, and the sum of its
        log-probs.
        """
        threads = ARMS[name]
        size = self._config.ppo.prompts_per_step
        maker = self._arms[name]
        engine_cores, own = (
            (self._cores[1:], self._cores[:1]) if threads == 1 else (self._cores, self._cores)
        )
        pin(self._pids[threads], set(engine_cores))
        pin(os.getpid(), set(own))
        torch.set_num_threads(threads)
        at = step * size % (len(self._prompts) - size)
        maker.begin(step, self._prompts[at : at + size], sampling_of(self._config, step))
        rollouts, _ = maker.finish(step)
        _, _, scores, _ = maker.score(rollouts)
        return maker.figures(), rollouts.generated_tokens, float(scores.logprobs_SR.double().sum())


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def rounds(bench: Bench, count: int, say: Callable[[str], None]) -> None:
    """All arms in turn, and what is said about them."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in ARMS}
    for name in ARMS:
        bench.take(name, 0)
    for step in range(1, count + 1):
        order = list(ARMS)[step % 3 :] + list(ARMS)[: step % 3]
        work = {}
        for name in order:
            figures, *work[name] = bench.take(name, step)
            found[name].append(figures)
        same_tokens = len({tokens for tokens, _ in work.values()}) == 1
        sums = [total for _, total in work.values()]
        seconds = ", ".join(
            f"{name} {found[name][-1][names.GENERATE_SCORE_S]:.2f} s" for name in ARMS
        )
        spread = max(sums) - min(sums)
        say(
            f"round {step}: {seconds}; {work['whole'][0]} tokens, the same in all: {same_tokens};"
            f" log-probs summed differ by {spread:.1e}"
        )
    for name, lines in found.items():
        busy = {
            role: statistics.median(
                sum(b - a for a, b in line[names.SPANS][role]) for line in lines
            )
            for role in lines[0][names.SPANS]
        }
        parts = ", ".join(f"{role} {value:.2f}" for role, value in busy.items())
        seconds, idle = (
            statistics.median(line[key] for line in lines)
            for key in (names.GENERATE_SCORE_S, names.GENERATE_SCORE_IDLE)
        )
        say(f"{name}: median {seconds:.2f} s, idle {idle:.0%}; seconds at work: {parts}")
    for name in list(ARMS)[1:]:
        pairs = zip(found["pieces"], found[name], strict=True)
        ratios = [
            ours[names.GENERATE_SCORE_S] / theirs[names.GENERATE_SCORE_S] for ours, theirs in pairs
        ]
        say(
            f"pieces / {name}: median {statistics.median(ratios):.3f} of {len(ratios)}"
            f" ({min(ratios):.3f} to {max(ratios):.3f})"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sizes = {
        "pairs": 6,
        "hidden": 256,
        "layers": 4,
        "prompts": 24,
        "responses": 4,
        "new": 96,
        "seqs": 8,
        "piece": 3,
        "micro": 12,
    }
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    cores = sorted(os.sched_getaffinity(0))[:2]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        actor = random_actor(folder / "actor", options.hidden, options.layers)
        ppo = {
            "prompts_per_step": options.prompts,
            "piece_prompts": options.piece,
            "minibatch_size": options.micro,
        }
        values = {
            "ppo": ppo,
            "data": {"max_prompt_tokens": PROMPT_TOKENS},
            "sampling": {"max_new_tokens": options.new, "responses_per_prompt": options.responses},
            "engine": {
                "max_num_seqs": options.seqs,
                "max_model_len": PROMPT_TOKENS + options.new,
                "dtype": "float32",
                "memory_fraction": 0.05,
            },
            "companion": {"enabled": False},
        }
        stack.enter_context(local_ray(cpus=2))
        engines = {}
        for threads in sorted(set(ARMS.values())):
            section = build_config(values).engine.model_copy(update={"threads": threads})
            engines[threads] = stack.enter_context(make_engine(folder / "actor", None, section, 0))
        rounds(Bench(build_config(values), actor, engines, cores), options.pairs, say)


if __name__ == "__main__":
    main()
