"""What a proposer sets aside while its steps are timed, and what was timed."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from medusa_ppo.drafting.running_memory import RunningMemory


@dataclass
class Calibrating:
    """A calibration that is under way.

    Attributes:
        drafts: of each step.
        steps: sequences, drafts and seconds of each pure decode step.
        memory: of responses, before it began.
        random_states: of torch's generators before it began: that of the CPU, and the device's.
    """

    drafts: int
    memory: RunningMemory | None
    random_states: list[torch.Tensor]
    steps: list[list[float]] = field(default_factory=list)

    @classmethod
    def begin(cls, drafts: int, memory: RunningMemory | None, device: torch.device) -> Calibrating:
        states = [torch.get_rng_state()]
        if device.type == "cuda":
            states.append(torch.cuda.get_rng_state(device))
        return cls(drafts, memory, states)

    def take(self) -> list[list[float]]:
        """What was timed since the last call."""
        steps = self.steps
        self.steps = []
        return steps

    def end(self, device: torch.device) -> RunningMemory | None:
        """Put the generators back where they were; returns the memory to go on with."""
        torch.set_rng_state(self.random_states[0])
        if device.type == "cuda":
            torch.cuda.set_rng_state(self.random_states[1], device)
        return self.memory
