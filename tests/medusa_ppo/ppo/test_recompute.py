"""The memory of scoring and of the backward pass, in bytes of all tensors alive at once."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from heads.errors import ModelError
from medusa_ppo.contract.rollouts import Counters, Response, Rollouts, Sampling
from medusa_ppo.ppo.batch import PPOBatch
from medusa_ppo.ppo.critic import Critic
from medusa_ppo.ppo.recompute import recompute_layers
from medusa_ppo.ppo.token_stats import token_stats


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors that are alive at once, and those of `held`; what a kernel
    takes for itself is not seen.
    """

    def __init__(self, held: torch.nn.Module) -> None:
        super().__init__()
        self._sizes: dict[int, int] = {}
        self.now = self.peak = 0
        for parameter in held.parameters():
            self._note(parameter)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        torch.utils._pytree.tree_map_only(torch.Tensor, self._note, out)
        return out

    def _note(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._sizes:
            self._sizes[storage._cdata] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._gone, storage._cdata)

    def _gone(self, key: int) -> None:
        self.now -= self._sizes.pop(key)


def peak_bytes(work, held: torch.nn.Module) -> int:
    with LiveBytes(held) as live:
        work()
    return live.peak


def test_scoring_with_a_large_vocabulary_takes_little_more_than_the_model(tiny_actor):
    """V = 152k: logits of these 192 tokens alone would be 111 MiB, the log-softmax as much
    again.
    """
    actor = tiny_actor(vocab=152_000, hidden=256, layers=2)
    ids = tuple(range(1, 25))
    rollouts = Rollouts(
        (ids[:8],),
        tuple(Response(0, ids, (-1.0,) * 24, "stop") for _ in range(8)),
        Counters(),
        1.0,
        Sampling(),
    )
    (micro,) = PPOBatch(rollouts).micro_batches(list(range(8)), 8)
    with torch.no_grad():
        own = peak_bytes(
            lambda: actor.base_model(input_ids=micro.input_ids_BT, use_cache=False), actor
        )
        scored = peak_bytes(lambda: token_stats(actor, micro, Sampling(), entropy=True), actor)
        whole = peak_bytes(
            lambda: token_stats(actor, micro, Sampling(), entropy=True, chunk_rows=1000), actor
        )
    assert scored < 1.3 * own < whole


def test_recomputation_works_in_eval_mode_and_changes_no_bit(make_rollouts, tiny_actor):
    (micro,) = PPOBatch(make_rollouts(16)).micro_batches(list(range(16)), 16)
    found = []
    for again in (False, True):
        actor = tiny_actor(layers=6)
        critic = Critic(actor)
        weights = sum(p.numel() * 4 for p in actor.parameters())
        if again:
            recompute_layers(actor)
            recompute_layers(critic)
        stats = token_stats(actor, micro, Sampling())
        stats.logprobs_M.sum().backward()
        (critic(micro) - 1).square().sum().backward()
        found.append(
            [
                stats.logprobs_M.detach(),
                *(p.grad for p in (*actor.parameters(), *critic.parameters())),
            ]
        )
        actor.zero_grad()
        peak = (
            peak_bytes(
                lambda a=actor: token_stats(a, micro, Sampling()).logprobs_M.sum().backward(), actor
            )
            - weights
        )
        found.append(peak)
        assert not actor.training
    assert all(torch.equal(a, b) for a, b in zip(found[0], found[2], strict=True))
    assert found[3] < 0.6 * found[1], "gradients, and the layer that is being made again, included"


def test_a_model_without_known_layers_is_refused():
    with pytest.raises(ModelError, match="layers are unknown"):
        recompute_layers(torch.nn.Linear(2, 2))
