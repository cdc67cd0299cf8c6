"""The running mean of heads in training: what is judged and served."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from heads.modules import MedusaHeads

WARM = 1_000_000
"""Steps that heads count as having made which begin trained: their mean keeps its full length from the first step on."""


class RunningMean:
    """A running mean of the heads' weights over optimizer steps: what is judged and served, while the heads themselves go on learning.

    A rollout batch is small, so each step moves the heads by its noise as much as by what there is to learn; the mean keeps the latter.
    (Polyak and Juditsky 1992; exponential form as in Tarvainen and Valpola 2017, arXiv 1703.01780.)

    Attributes:
        heads: the mean, never trained.
        steps: optimizer steps that it has seen. The first ones weigh more, so that heads that begin at nothing are left behind at once.
    """

    def __init__(self, heads: MedusaHeads, decay: float, *, steps: int = 0) -> None:
        """
        Args:
            heads: a copy of what training begins with, changed in place.
            decay: share of the mean that stays with each step, in [0, 1).
            steps: 0 for heads that begin at nothing, WARM for trained ones.
        """
        self.heads = heads.requires_grad_(False)
        self.steps = steps
        self._decay = decay

    @torch.no_grad()
    def add(self, trained: Iterable[torch.Tensor]) -> None:
        """Take in the parameters as they are after a step, in the order of `heads.parameters()`."""
        kept = min(self._decay, (1 + self.steps) / (10 + self.steps))
        torch._foreach_lerp_(list(self.heads.parameters()), list(trained), 1.0 - kept)
        self.steps += 1

    def restart(self, state: dict[str, torch.Tensor]) -> None:
        """Go on from trained heads (keys of `trainable_state`)."""
        self.heads.load_trainable_state(state)
        self.steps = WARM

    def state_dict(self) -> dict[str, torch.Tensor]:
        """A copy of all of it, under keys that begin with `mean`."""
        return {f"mean.{name}": tensor for name, tensor in self.heads.trainable_state().items()} | {"mean_steps": torch.tensor(self.steps)}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Take over what is under such keys. Raises KeyError, CheckpointError when something is missing."""
        self.heads.load_trainable_state(under(state, "mean."))
        self.steps = int(state["mean_steps"])


def under(state: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """The part of a state whose names begin so, without the prefix."""
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
