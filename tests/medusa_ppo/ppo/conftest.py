"""Tiny actors, and an engine that samples with transformers: PPO's arithmetic needs no vLLM to be
tested.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    PreTrainedTokenizerFast,
)

from heads.checkpoint import checksum, load_state
from medusa_ppo.contract.rollouts import Counters, Response, Rollouts, Sampling
from medusa_ppo.contract.status import SwapReceipt
from medusa_ppo.engines.pieces import UNFINISHED, Partly
from medusa_ppo.engines.rollout_engine import RolloutEngine
from medusa_ppo.vllm_plugin.worker_calls import Drafting

VOCAB = 16
END = 0


def _tiny_actor(
    seed: int = 0, vocab: int = VOCAB, hidden: int = 32, layers: int = 1, tied: bool = False
) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=END,
    )
    return LlamaForCausalLM(config).float().eval()


class SamplingEngine(RolloutEngine):
    """Samples token by token from its own copy of the actor, which only `sync_actor` changes."""

    def __init__(self, actor: LlamaForCausalLM) -> None:
        self.actor = _tiny_actor(
            vocab=actor.config.vocab_size,
            hidden=actor.config.hidden_size,
            tied=actor.config.tie_word_embeddings,
        )
        self.actor.load_state_dict(actor.state_dict())
        self.drafts: list[int] = []
        self.num_drafts = 0
        self.closed = False
        self.asleep = 0
        self.slept: list[int] = []
        self._own = torch.Generator().manual_seed(0)

    def _generator(self, sampling: Sampling) -> torch.Generator:
        """Without a seed its own goes on, as vLLM's does."""
        if sampling.seed is None:
            return self._own
        return torch.Generator().manual_seed(sampling.seed)

    @torch.no_grad()
    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> Rollouts:
        assert not self.asleep, "nobody asks a sleeping engine"
        generator = self._generator(sampling)
        self.drafts.append(self.num_drafts)
        responses = []
        for index, prompt in enumerate(prompts):
            for _ in range(sampling.responses_per_prompt):
                ids = list(prompt)
                logprobs = []
                while len(logprobs) < sampling.max_new_tokens and (not logprobs or ids[-1] != END):
                    distribution = (
                        self.actor(torch.tensor([ids])).logits[0, -1] / sampling.temperature
                    ).log_softmax(-1)
                    ids.append(int(torch.multinomial(distribution.exp(), 1, generator=generator)))
                    logprobs.append(float(distribution[ids[-1]]))
                reason = "stop" if ids[-1] == END else "length"
                responses.append(
                    Response(index, tuple(ids[len(prompt) :]), tuple(logprobs), reason)
                )
        return Rollouts(
            tuple(map(tuple, prompts)),
            tuple(responses),
            Counters(),
            0.01,
            sampling,
            self.policy_version,
            self.heads_version,
            self.num_drafts,
        )

    @torch.no_grad()
    def generate_partly(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, partly: Partly
    ) -> Rollouts:
        """A token for each that has not ended, until enough have, as vLLM's steps are."""
        assert not self.asleep, "nobody asks a sleeping engine"
        repeat = sampling.responses_per_prompt
        generator = self._generator(sampling)
        found = list(partly.begun)

        def unfinished() -> dict[int, int]:
            return {
                i: sum(r.finish_reason == UNFINISHED for r in found[i * repeat :][:repeat])
                for i in range(len(prompts))
            }

        while not partly.over(unfinished()):
            for place, was in enumerate(found):
                if was.finish_reason == UNFINISHED:
                    ids = torch.tensor([[*prompts[place // repeat], *was.token_ids]])
                    distribution = (
                        self.actor(ids).logits[0, -1] / sampling.temperature
                    ).log_softmax(-1)
                    token = int(torch.multinomial(distribution.exp(), 1, generator=generator))
                    longest = len(was.token_ids) + 1 == sampling.max_new_tokens
                    reason = "stop" if token == END else "length" if longest else UNFINISHED
                    tokens = (*was.token_ids, token)
                    logprobs = (*was.logprobs, float(distribution[token]))
                    found[place] = Response(place // repeat, tokens, logprobs, reason)
        written = sum(len(r.token_ids) for r in found) - sum(len(r.token_ids) for r in partly.begun)
        rollouts = Rollouts(
            tuple(map(tuple, prompts)),
            tuple(found),
            Counters(),
            0.01,
            sampling,
            self.policy_version,
            self.heads_version,
        )
        return replace(rollouts, num_drafts=self.num_drafts, written_tokens=written)

    def sleep(self, level: int) -> None:
        self.asleep = level
        self.slept.append(level)

    def wake(self) -> None:
        """A deep sleep has thrown away everything."""
        if self.asleep == 2:
            self.heads_version = -1
            for parameter in self.actor.parameters():
                parameter.data.zero_()
        self.asleep = 0

    def sync_actor(self, path: str, version: int, checked: Any = None) -> SwapReceipt:
        assert not self.asleep, "a sleeping engine has no memory to load into"
        state = load_state(path)
        missing, unexpected = self.actor.load_state_dict(state, strict=False)
        assert not unexpected and set(missing) <= {"lm_head.weight"}
        self.actor.tie_weights()
        self.policy_version = version
        return SwapReceipt(version, checksum(state), 0.0)

    def swap_heads(self, path: str, version: int, checked: Any = None) -> SwapReceipt:
        self.heads_version = version
        return SwapReceipt(version, checksum(load_state(path)), 0.0)

    def configure(self, **settings: Unpack[Drafting]) -> None:
        self.num_drafts = settings.get("num_drafts", self.num_drafts)

    def plugin_report(self) -> dict[str, object]:
        return {}

    def checksums(self) -> dict[str, str]:
        return {"actor": checksum(self.actor.state_dict()), "heads": ""}

    def counters(self) -> Counters:
        return Counters()

    def close(self) -> None:
        self.closed = True


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny tensors: more threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_actor() -> Callable[..., LlamaForCausalLM]:
    """tiny_actor(seed=0, vocab=16, hidden=32, layers=1, tied=False) -> a random Llama."""
    return _tiny_actor


@pytest.fixture
def sampling_engine() -> Callable[[LlamaForCausalLM], RolloutEngine]:
    """sampling_engine(actor) -> an engine with a copy of it."""
    return SamplingEngine


@pytest.fixture
def make_rollouts() -> Callable[..., Rollouts]:
    """Random rollouts of unequal lengths: make(sequences, seed) -> Rollouts, two responses a
    prompt.
    """

    def make(sequences: int = 8, seed: int = 0, vocab: int = VOCAB) -> Rollouts:
        generator = torch.Generator().manual_seed(seed)

        def draw(low: int, high: int) -> tuple[int, ...]:
            length = int(torch.randint(low, high, (1,), generator=generator))
            return tuple(torch.randint(1, vocab, (length,), generator=generator).tolist())

        prompts = tuple(draw(1, 7) for _ in range(sequences // 2))
        ids = [draw(1, 9) for _ in range(sequences)]
        responses = tuple(Response(i // 2, x, (-1.0,) * len(x), "stop") for i, x in enumerate(ids))
        return Rollouts(prompts, responses, Counters(), 1.0, Sampling())

    return make


@pytest.fixture(scope="session")
def save_judge() -> Callable[..., None]:
    """save_judge(folder, labels=1, by_steps=False, hidden=16) -> a random reward model of the
    letters a, b and c, with its tokenizer.
    """
    return _save_judge


def _save_judge(folder: Path, labels: int = 1, by_steps: bool = False, hidden: int = 16) -> None:
    letters = Tokenizer(models.WordLevel({"[PAD]": 0, "a": 1, "b": 2, "c": 3}, unk_token="[PAD]"))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=1 if hidden == 16 else 2,
        num_attention_heads=2,
        num_labels=labels,
        pad_token_id=0,
    )
    (LlamaForTokenClassification if by_steps else LlamaForSequenceClassification)(
        config
    ).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=letters, pad_token="[PAD]").save_pretrained(folder)
