"""What the options of the PPO loop do, on a generated task that is learned in seconds: repeat the
prompt's letter three times.

    python benchmarks/practice.py learning    # GAE, GRPO, RLOO and every other option, some seeds
    python benchmarks/practice.py reward      # one text in many batches: the same bits? how fast?

The loop is the product's own (`PPOLoop`). Its engine samples with transformers, in this process,
without heads: this shows what PPO learns, not how fast it generates. The actor is a random Llama of
one layer, so it starts at chance. A response of at most six tokens is right if its first three are
the prompt's letter; the reward is the share of these three.

Shape letters: B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

import argparse
import copy
import logging
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Unpack

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

from heads.checkpoint import checksum, load_state
from medusa_ppo.config.run_config import RunConfig, build_config
from medusa_ppo.contract import metrics as names
from medusa_ppo.contract.rollouts import Counters, Response, Rollouts, Sampling
from medusa_ppo.contract.status import SwapReceipt
from medusa_ppo.engines.actor_sync import ActorSync
from medusa_ppo.engines.rollout_engine import NoEngine, Prompts
from medusa_ppo.ppo.critic import Critic
from medusa_ppo.ppo.generation import Prompt, PromptStream
from medusa_ppo.ppo.learner import Learner
from medusa_ppo.ppo.loop import PPOLoop
from medusa_ppo.ppo.rewards import CallableReward, ModelReward
from medusa_ppo.ppo.session import Parts
from medusa_ppo.reports.store import RunWriter
from medusa_ppo.vllm_plugin.worker_calls import Drafting

logger = logging.getLogger("practice")

VOCABULARY = 16
END = 0
PLACES = 3
PLAIN_BATCH = 16
# Steps over which the means are taken.
FIRST = LAST = 4
OPTIONS: dict[str, dict[str, Any]] = {
    "gae": {},
    "grpo": {"advantages": "grpo"},
    "rloo": {"advantages": "rloo"},
    "grpo, k3 in the loss": {"advantages": "grpo", "kl_in_loss": True, "kl_estimator": "k3"},
    "kl_estimator=k2": {"kl_estimator": "k2"},
    "kl_estimator=k3": {"kl_estimator": "k3"},
    "kl_coefficient=0.2": {"kl_coefficient": 0.2},
    "kl_coefficient=0.2, kl_goal=0.3": {"kl_coefficient": 0.2, "kl_goal": 0.3},
    "kl_stop=0.02": {"kl_stop": 0.02},
    "value_clip_range=null": {"value_clip_range": None},
    "value_clip_unit=returns": {"value_clip_unit": "returns"},
    "rewards x 100": {"kl_coefficient": 1.0, "times": 100.0},
    "rewards x 100, scale_rewards": {"times": 100.0, "scale_rewards": True},
    "rewards x 100, value_clip_unit=returns": {
        "kl_coefficient": 1.0,
        "times": 100.0,
        "value_clip_unit": "returns",
    },
    "learning_rate_schedule=linear": {"learning_rate_schedule": "linear", "warmup_steps": 3},
    "length_penalty=0.1": {"length_penalty": 0.1},
    "cut_responses=0.5": {"cut_responses": 0.5},
    "cut_responses=mask": {"cut_responses": "mask"},
}


class TorchEngine(NoEngine):
    """Samples with transformers; all prompts have one length."""

    def __init__(self, actor: LlamaForCausalLM) -> None:
        # A copy, as in an engine: it must generate with the weights of the last sync, not with
        # those in training.
        self._actor = copy.deepcopy(actor)

    @torch.no_grad()
    def generate(self, prompts: Prompts, sampling: Sampling) -> Rollouts:
        draw = torch.Generator().manual_seed(sampling.seed or 0)
        asked = [
            index for index in range(len(prompts)) for _ in range(sampling.responses_per_prompt)
        ]
        ids_BT = torch.tensor([list(prompts[index]) for index in asked])
        logprobs_BT = torch.zeros(len(asked), 0)
        first = ids_BT.shape[1]
        for _ in range(sampling.max_new_tokens):
            logprobs_BV = (
                self._actor(ids_BT).logits[:, -1].float() / sampling.temperature
            ).log_softmax(-1)
            next_B1 = torch.multinomial(logprobs_BV.exp(), 1, generator=draw)
            ids_BT = torch.cat([ids_BT, next_B1], 1)
            logprobs_BT = torch.cat([logprobs_BT, logprobs_BV.gather(1, next_B1)], 1)
        responses = []
        for index, ids, logprobs in zip(
            asked, ids_BT[:, first:].tolist(), logprobs_BT.tolist(), strict=True
        ):
            length, reason = (ids.index(END) + 1, "stop") if END in ids else (len(ids), "length")
            responses.append(Response(index, tuple(ids[:length]), tuple(logprobs[:length]), reason))
        return Rollouts(
            tuple(map(tuple, prompts)),
            tuple(responses),
            Counters(),
            # No real time: nothing here is about speed.
            0.01,
            sampling,
            self.policy_version,
        )

    def sync_actor(self, path: str | Path, version: int, checked: Any = None) -> SwapReceipt:
        state = load_state(path)
        self._actor.load_state_dict(state)
        self.policy_version = version
        return SwapReceipt(version, checksum(state), 0.0)

    def configure(self, **settings: Unpack[Drafting]) -> None:
        pass

    def checksums(self) -> dict[str, str]:
        return {"actor": checksum(self._actor.state_dict()), "heads": ""}


def run(seed: int, steps: int, *, times: float = 1.0, **ppo: Any) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl of one run."""
    with tempfile.TemporaryDirectory() as folder:
        section = {
            "steps": steps,
            "prompts_per_step": 8,
            "minibatch_size": 16,
            "epochs": 4,
            "checkpoint_every": None,
        }
        section |= {
            "actor_learning_rate": 3e-3,
            "critic_learning_rate": 3e-3,
            "kl_coefficient": 0.01,
        } | ppo
        sampling = {"max_new_tokens": 6, "responses_per_prompt": 8}
        without = {"enabled": False}
        config = build_config(
            {
                "out": folder,
                "seed": seed,
                "ppo": section,
                "sampling": sampling,
                "companion": without,
            }
        )
        actor = random_actor(seed)
        learner = Learner(
            actor, Critic(actor) if config.ppo.advantages == "gae" else None, config.ppo, seed=seed
        )
        rollouts = TorchEngine(actor)
        prompts = PromptStream([Prompt(str(i), (i,), {}) for i in range(1, VOCABULARY)], seed=seed)
        reward = CallableReward(
            lambda prompt, response, row: times * repeated(prompt, response), "repeated", times
        )
        with ActorSync(rollouts) as sync:
            parts = Parts(prompts, text_of_ids(), learner, reward, rollouts, sync)
            return lines_of(config, parts)


def lines_of(config: RunConfig, parts: Parts) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    writer = RunWriter(config.run_dir, config.model_dump(mode="json"))
    loop = PPOLoop(config, parts)
    loop.run(SimpleNamespace(step=lines.append))  # type: ignore[arg-type]
    writer.close()
    return lines


def repeated(prompt: str, response: str) -> float:
    """Share of the three places that repeat the prompt."""
    return sum(word == prompt for word in response.split()[:PLACES]) / PLACES


def text_of_ids() -> Any:
    """A tokenizer whose text is the token ids."""
    return SimpleNamespace(
        pad_token_id=END,
        # Called like a tokenizer by the loop, with only the parts that it needs.
        batch_decode=lambda ids, skip_special_tokens: [
            " ".join(str(i) for i in row if i != END) for row in ids
        ],
    )


def random_actor(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    ends = {"bos_token_id": None, "eos_token_id": END, "pad_token_id": END}
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            **sizes,
            max_position_embeddings=64,
            tie_word_embeddings=False,
            **ends,
        )
    ).eval()


def mean_of(lines: Sequence[dict[str, Any]], name: str) -> float:
    return statistics.fmean(float(line[name]) for line in lines)


def learning(options: argparse.Namespace) -> None:
    """A table row per variant: right answers in the first and last steps, KL, length and more."""
    logger.info(
        "| | right, first %d | right, last %d | by seed | KL to the reference | optimizer steps |"
        " length | cut |",
        FIRST,
        LAST,
    )
    logger.info("|---|---|---|---|---|---|---|---|")
    for label, settings in OPTIONS.items():
        if options.only and label not in options.only:
            continue
        runs = [run(seed, options.steps, **settings) for seed in range(options.seeds)]
        lasts = [line for lines in runs for line in lines[-LAST:]]
        first = mean_of([line for lines in runs for line in lines[:FIRST]], names.CORRECT_FRAC)
        by_seed = ", ".join(f"{mean_of(lines[-LAST:], names.CORRECT_FRAC):.2f}" for lines in runs)
        figures = [
            mean_of(lasts, name)
            for name in (names.CORRECT_FRAC, names.KL_REFERENCE, names.ACTOR_STEPS)
        ]
        more = [mean_of(lasts, name) for name in (names.RESPONSE_LENGTH, names.TRUNCATED_FRAC)]
        row = (label, first, figures[0], by_seed, figures[1], figures[2], *more)
        logger.info("| %s | %.2f | %.2f | %s | %.2f | %.1f | %.1f | %.2f |", *row)


@torch.no_grad()
def reward(options: argparse.Namespace) -> None:
    """The same text in many random batches, and seconds compared with batches padded to their own
    longest, in turn.
    """
    with tempfile.TemporaryDirectory() as folder:
        judge(Path(folder), options.hidden)
        source = ModelReward(folder)
        draw = random.Random(0)
        texts = [
            "".join(draw.choices("abc", k=draw.randrange(8, 200))) for _ in range(options.texts)
        ]
        blank: list[dict[str, Any]] = [{}] * len(texts)
        expected = source.score([""] * len(texts), texts, blank)
        left = list(range(len(texts)))
        differing = 0
        draw.shuffle(left)
        # Mixes of random sizes, until every text was in one.
        while left:
            size = draw.randrange(1, 400)
            mix = left[:size]
            left = left[size:]
            mixed = [texts[i] for i in mix]
            scores = source.score([""] * len(mix), mixed, blank[: len(mix)])
            # Bits, not a tolerance: the product promises that neighbours change nothing.
            differing += int((scores != expected[mix]).sum())
        plain_differing = 0
        found = plain(source, texts)
        for start in range(0, 512, 37):
            plain_differing += int(
                (plain(source, texts[start : start + 37]) != found[start : start + 37]).sum()
            )
        text = (
            "%d texts in random mixes: %d differ in a bit; padded to the longest of the batch: %d"
            " of 518 do"
        )
        logger.info(text, len(texts), differing, plain_differing)
        ratios = []
        for pair in range(options.pairs):
            some = draw.sample(texts, options.step)
            seconds = {}
            # Each is first as often as second.
            for fixed in (True, False) if pair % 2 else (False, True):
                began = time.perf_counter()
                (
                    source.score([""] * len(some), some, blank[: len(some)])
                    if fixed
                    else plain(source, some)
                )
                seconds[fixed] = time.perf_counter() - began
            ratios.append(seconds[False] / seconds[True])
        figures = (options.step, statistics.median(ratios), min(ratios), max(ratios))
        logger.info(
            "speed, of that of plain batches of %d texts: median %.2f (%.2f to %.2f)", *figures
        )


def plain(source: ModelReward, texts: list[str]) -> torch.Tensor:
    """Sorted, and padded to the longest of each batch."""
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    scores = torch.zeros(len(texts))
    for start in range(0, len(order), PLAIN_BATCH):
        chosen = order[start : start + PLAIN_BATCH]
        inputs = source._tokenizer([texts[i] for i in chosen], return_tensors="pt", padding=True)
        scores[chosen] = source.model(
            input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]
        ).logits[:, 0]
    return scores


def judge(folder: Path, hidden: int) -> None:
    """A random reward model of three letters."""
    letters = Tokenizer(models.WordLevel({"[PAD]": 0, "a": 1, "b": 2, "c": 3}, unk_token="[PAD]"))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    torch.manual_seed(0)
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    LlamaForSequenceClassification(
        LlamaConfig(vocab_size=4, **sizes, num_labels=1, pad_token_id=0)
    ).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=letters, pad_token="[PAD]").save_pretrained(folder)


def main() -> None:
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logger.setLevel(logging.INFO)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["learning", "reward"])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", action="append", choices=OPTIONS)
    parser.add_argument("--texts", type=int, default=10_000)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--step", type=int, default=128, help="texts of a timed call")
    options = parser.parse_args()
    torch.set_num_threads(1)
    {"learning": learning, "reward": reward}[options.what](options)


if __name__ == "__main__":
    main()
