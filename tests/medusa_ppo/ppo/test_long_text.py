"""Responses of thousands of tokens through a step of the loop: rewards, the tapped passes, losses
in chunks and the update take memory that grows with the tokens, not with their square.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from medusa_ppo.contract import metrics as names
from medusa_ppo.contract.rollouts import Counters, Response, Rollouts, Sampling
from medusa_ppo.plugin.medusa_plugin import MedusaPlugin
from tests.medusa_ppo.conftest import RecordingCompanion
from tests.medusa_ppo.ppo.conftest import VOCAB, SamplingEngine
from tests.medusa_ppo.ppo.test_loop import LoopScene, settings
from tests.medusa_ppo.ppo.test_recompute import LiveBytes


class LongEngine(SamplingEngine):
    """Writes random tokens up to the limit: a forward pass for each would take an hour."""

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> Rollouts:
        drawn = torch.Generator().manual_seed(sampling.seed or 0)
        length = sampling.max_new_tokens
        responses = []
        for index in range(len(prompts)):
            for _ in range(sampling.responses_per_prompt):
                ids = torch.randint(1, VOCAB, (length,), generator=drawn).tolist()
                logprobs = (-math.log(VOCAB),) * length
                responses.append(Response(index, tuple(ids), logprobs, "length"))
        return Rollouts(
            tuple(map(tuple, prompts)), tuple(responses), Counters(), 0.01, sampling, 0, 0, 0
        )


def most_bytes(folder: Path, actor: Any, tokens: int) -> int:
    """The most bytes that a step's tensors have at once, without the models'."""
    config = settings(
        folder, steps=1, epochs=1, prompts_per_step=1, minibatch_size=2, micro_batch_size=1
    )
    sampling = {"max_new_tokens": tokens, "responses_per_prompt": 2}
    config = config.model_copy(update={"sampling": config.sampling.model_copy(update=sampling)})
    recorder = RecordingCompanion()
    scene = LoopScene(config, actor, LongEngine, lambda engine: MedusaPlugin(engine, recorder))
    with LiveBytes(torch.nn.Module()) as live:
        (step,) = scene.run()
    assert step[names.RESPONSE_LENGTH] == tokens and step[names.ACTOR_GRAD_NORM] > 0
    assert len(recorder.batches[0].hidden_MD) == 2 * tokens, "the tap has all states"
    return live.peak


@pytest.mark.parametrize(
    "sizes",
    [(512, 2048, 8192), pytest.param((2048, 8192, 32768), marks=pytest.mark.slow)],
    ids=["8192", "32768"],
)
def test_a_step_takes_memory_in_proportion_to_the_tokens(
    tmp_path: Path, tiny_actor, sizes: tuple[int, int, int]
) -> None:
    bytes_T = {tokens: most_bytes(tmp_path / str(tokens), tiny_actor(), tokens) for tokens in sizes}
    first, second, third = bytes_T.values()
    print(f"\n{bytes_T}")
    expected = (sizes[2] - sizes[1]) / (sizes[1] - sizes[0])
    assert (third - second) / (second - first) == pytest.approx(expected, rel=0.15), bytes_T
