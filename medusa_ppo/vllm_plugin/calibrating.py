"""The state that a proposer saves while its steps are timed, and the timings."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from medusa_ppo.drafting.running_memory import RunningMemory


def random_states(device: torch.device) -> list[torch.Tensor]:
    """States of torch's generators: the CPU's, and the device's."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return states


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
    random_states: list[torch.Tensor]
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
        torch.set_rng_state(self.random_states[0])
        if device.type == "cuda":
            torch.cuda.set_rng_state(self.random_states[1], device)
        return self.memory
