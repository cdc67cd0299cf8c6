"""A task whose answer is known: on-policy rollouts of a Markov chain that a linear lm_head models
exactly.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from heads.copying import MISSING, Text
from heads.heads_config import GAP, HeadsConfig
from medusa_ppo.companion.client import CompanionClient
from medusa_ppo.companion.wire import HANG_S
from medusa_ppo.config.companion_section import CompanionConfig
from medusa_ppo.contract.rollout_batch import RolloutBatch


class ChainTask:
    """Tokens follow a permutation with probability `sure`, else any token; h_t is the one-hot state
    of x_t, scaled.

    lm_head gives exactly the chain's log-probs, so rollouts are on-policy by construction. Head k
    can reach the acceptance of the permutation applied k + 1 times, while the zero start (head k =
    lm_head) is wrong nearly always: acceptance must rise by learning.
    """

    def __init__(
        self,
        vocab: int = 12,
        hidden: int = 16,
        sure: float = 0.95,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.vocab = vocab
        self.hidden = hidden
        self.sure = sure
        self.dtype = dtype
        self._generator = torch.Generator().manual_seed(seed)
        self._frame_VD = (
            torch.linalg.qr(torch.randn(hidden, hidden, generator=self._generator)).Q[:vocab] * 4.0
        )
        self.policy_version = -1
        self.drift()

    def drift(self) -> None:
        """A new policy: another permutation, so what heads have learned is wrong."""
        order = torch.randperm(self.vocab, generator=self._generator)
        self.successor = torch.empty_like(order)
        self.successor[order] = order.roll(
            1
        )  # one cycle: the permutation applied twice is never the permutation
        self.probs_VV = torch.full((self.vocab, self.vocab), (1 - self.sure) / (self.vocab - 1))
        self.probs_VV[torch.arange(self.vocab), self.successor] = self.sure
        self.lm_head_VD = (self.probs_VV.log().T @ self._frame_VD / 16.0).to(self.dtype)
        self.policy_version += 1

    def batch(
        self, sequences: int = 48, length: int = 16, temperature: float = 1.0
    ) -> RolloutBatch:
        lengths_S = torch.randint(2, length + 1, (sequences,), generator=self._generator)
        states = []
        tokens = []
        for n in lengths_S.tolist():
            token = int(torch.randint(self.vocab, (1,), generator=self._generator))
            for _ in range(n):
                states.append(token)
                token = int(torch.multinomial(self.probs_VV[token], 1, generator=self._generator))
                tokens.append(token)
        ids_M = torch.tensor(tokens)
        states_M = torch.tensor(states)
        return RolloutBatch(
            self._frame_VD[states_M].to(self.dtype),
            ids_M,
            self.probs_VV[states_M, ids_M].log(),
            lengths_S,
            self.policy_version,
            temperature,
        )

    def single(self) -> RolloutBatch:
        """Three responses of one token each."""
        batch = self.batch(4)
        hidden_MD = batch.hidden_MD[:3]
        ids_M = batch.response_ids_M[:3]
        logprobs_M = batch.logprobs_M[:3]
        return replace(
            batch,
            hidden_MD=hidden_MD,
            response_ids_M=ids_M,
            logprobs_M=logprobs_M,
            lengths_S=torch.ones(3, dtype=torch.int64),
        )


def with_prompts(batch: RolloutBatch, vocab: int, siblings: int = 3) -> RolloutBatch:
    """The batch with a prompt before each response, in which some tokens stand for images; so many
    responses answer each prompt.
    """
    generator = torch.Generator().manual_seed(5)
    prompts_S = torch.arange(batch.lengths_S.numel()) // siblings
    prompts = [
        torch.randint(vocab, (4 + number % 9,), generator=generator, dtype=torch.int32)
        for number in range(int(prompts_S.max()) + 1)
    ]
    for prompt in prompts[1::2]:
        prompt[len(prompt) // 2] = GAP
    before = [prompts[number] for number in prompts_S.tolist()]
    return replace(
        batch,
        prompts_S=prompts_S,
        before_ids_X=torch.cat(before),
        before_S=torch.tensor([len(prompt) for prompt in before]),
    )


def known_when_drafted(batch: RolloutBatch, window: int | None = None) -> Text:
    """What the request of each row could copy from when the engine drafted there: a text of its
    own, with its prompt and the tokens that it had sampled. No later token is in it, and none of
    another response to its prompt, which may be written in the same steps.
    """
    assert batch.before_ids_X is not None and batch.before_S is not None
    texts: list[list[int]] = []
    befores = batch.before_ids_X.split(batch.before_S.tolist())
    responses = batch.response_ids_M.split(batch.lengths_S.tolist())
    for before, response in zip(befores, responses, strict=True):
        for known in range(1, len(response) + 1):
            texts.append([*before.tolist(), *response[:known].tolist()])
    longest = max(map(len, texts))
    ids_GT = torch.zeros(len(texts), longest, dtype=torch.int64)
    parts_GT = torch.full_like(ids_GT, MISSING)
    for row, text in enumerate(texts):
        part = 0
        for place, token in enumerate(text):
            # Keys and followers don't cross an image.
            part += token == GAP
            if token != GAP:
                ids_GT[row, place], parts_GT[row, place] = token, part
    places = torch.tensor([len(text) - 1 for text in texts])
    return Text.of(ids_GT, parts_GT, torch.arange(len(texts)), places, window)


def some_weights(lengths_S: torch.Tensor, share: float, seed: int = 0) -> torch.Tensor:
    """A weight of 1 at a random share of the positions with a target, 0 at all others: float32
    `M`.
    """
    with_target_M = torch.ones(int(lengths_S.sum()), dtype=torch.bool)
    with_target_M[lengths_S.cumsum(0) - 1] = False
    usable_N = with_target_M.nonzero().squeeze(1)
    order_N = torch.randperm(usable_N.numel(), generator=torch.Generator().manual_seed(seed))
    chosen_N = usable_N[order_N[: round(share * usable_N.numel())]]
    return torch.zeros(with_target_M.numel()).index_fill_(0, chosen_N, 1.0)


def sampled(batch: RolloutBatch, share: float) -> RolloutBatch:
    """The batch with all states, of which a random share of the positions is trained on."""
    return replace(batch, weights_M=some_weights(batch.lengths_S, share))


def until(condition: Callable[[], bool], seconds: float = 120.0) -> bool:
    """Wait; False when it takes longer."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.1)
    return False


@pytest.fixture
def chain() -> Callable[..., ChainTask]:
    """Builds chain tasks."""
    return ChainTask


def assert_near(
    state: dict[str, torch.Tensor], other: dict[str, torch.Tensor], device: torch.device
) -> None:
    """A companion's state is another's within what the order of float32 sums changes. On a GPU a
    few weights may differ by a step: Adam's first ones make large what is next to nothing.
    """
    for name, value in other.items():
        if device.type == "cpu" or not value.is_floating_point():
            torch.testing.assert_close(
                state[name],
                value,
                rtol=1e-3,
                atol=1e-4,
                msg=lambda text, name=name: f"{name}: {text}",
            )
        else:
            apart = (state[name].double() - value.double()).abs() > 1e-2
            assert int(apart.sum()) <= apart.numel() / 100, name


@pytest.fixture
def client_of(device: torch.device) -> Iterator[Callable[..., CompanionClient]]:
    """Starts companions for a task, closed when the test ends. On a GPU each worker has a share of
    it, which it leaves between two batches.
    """
    clients: list[CompanionClient] = []
    share = {"num_gpus": 0.25 if device.type == "cuda" else 0.0}

    def start(
        task: ChainTask,
        run_dir: Path | str = "",
        hang_s: float = HANG_S,
        takes_turns: bool = False,
        **settings: Any,
    ) -> CompanionClient:
        given = {"batch_positions": 64, "learning_rate": 2e-2, **share, **settings}
        config = CompanionConfig(**given)
        heads = HeadsConfig(task.hidden, task.vocab, num_heads=3)
        clients.append(
            CompanionClient(
                heads,
                config,
                task.lm_head_VD,
                seed=0,
                run_dir=run_dir,
                hang_s=hang_s,
                takes_turns=takes_turns,
            )
        )
        return clients[-1]

    yield start
    for client in clients:
        client.close()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny tensors: more threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
