"""A running mean of the heads' weights over optimizer steps: what is judged and served, while the heads themselves go on learning.

A rollout batch is small, so each optimizer step moves the heads by its noise as much as by what there is to learn; the mean keeps the
latter. (Polyak and Juditsky 1992; exponential form as in Tarvainen and Valpola 2017, arXiv 1703.01780.)
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from heads.modules import MedusaHeads

PREFIX, STEPS = "mean.", "mean_steps"
WARM = 1_000_000
"""Steps that heads count as having made which begin trained: their mean keeps its full length from the first step on."""


class RunningMean:
    """Heads of the same sizes that hold the mean.

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
        means = {f"{PREFIX}{name}": tensor for name, tensor in self.heads.trainable_state().items()}
        return {**means, STEPS: torch.tensor(self.steps)}

    def load_state_dict(self, state: dict[str, torch.Tensor], device: torch.device) -> None:
        """Take over what is under such keys. Raises KeyError, CheckpointError when something is missing."""
        means = {name[len(PREFIX) :]: value.to(device) for name, value in state.items() if name.startswith(PREFIX)}
        self.heads.load_trainable_state(means)
        self.steps = int(state[STEPS])
