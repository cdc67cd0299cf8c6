"""The state that a proposer saves while its steps are timed, and the timings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from medusa_ppo.drafting.running_memory import RunningMemory


class RandomStates(NamedTuple):
    """States of the generators that vLLM draws from.

    Attributes:
        host, on_device: torch's; the latter None on a CPU.
        numpy: V2 takes the seeds of requests without one from it.
    """

    host: torch.Tensor
    on_device: torch.Tensor | None
    numpy: Any


def random_states(device: torch.device) -> RandomStates:
    on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return RandomStates(torch.get_rng_state(), on_device, np.random.get_state())


@dataclass
class Calibrating:
    """A running calibration.

    Attributes:
        drafts: drafts of each step.
        steps: sequences, drafts and seconds of each pure decode step.
        memory: the memory of responses from before the calibration.
        random_states: `random_states` from before it.
    """

    drafts: int
    memory: RunningMemory | None
    random_states: RandomStates
    steps: list[list[float]] = field(default_factory=list)

    @classmethod
    def begin(cls, drafts: int, memory: RunningMemory | None, device: torch.device) -> Calibrating:
        return cls(drafts, memory, random_states(device))

    def take(self) -> list[list[float]]:
        """The timings since the last call."""
        steps = self.steps
        self.steps = []
        return steps

    def end(self, device: torch.device) -> RunningMemory | None:
        """Restore the generators; returns the memory to continue with."""
        states = self.random_states
        torch.set_rng_state(states.host)
        if states.on_device is not None:
            torch.cuda.set_rng_state(states.on_device, device)
        np.random.set_state(states.numpy)
        return self.memory
