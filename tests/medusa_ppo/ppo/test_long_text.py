"""Responses of thousands of tokens through a step of the loop: rewards, the tapped passes, losses
in chunks and the update take memory that grows with the tokens, not with their square. And a whole
run with vLLM at that length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from medusa_ppo.config.run_config import build_config
from medusa_ppo.contract import metrics as names
from medusa_ppo.contract.rollouts import Counters, Response, Rollouts, Sampling
from medusa_ppo.plugin.medusa_plugin import MedusaPlugin
from medusa_ppo.ppo.loop import run_ppo
from medusa_ppo.reports.store import read_run
from tests.medusa_ppo.conftest import RecordingCompanion
from tests.medusa_ppo.ppo.conftest import VOCAB, SamplingEngine
from tests.medusa_ppo.ppo.test_loop import LoopScene, settings
from tests.medusa_ppo.ppo.test_recompute import LiveBytes

PROMPT_TOKENS = 100


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


LONG = 8192


def long_actor(chain_actor: Path, folder: Path) -> Path:
    """The actor whose tokens follow from each other, with room for the text, and an end that
    nothing leads to.
    """
    tokenizer = AutoTokenizer.from_pretrained(chain_actor)
    model = AutoModelForCausalLM.from_pretrained(
        chain_actor, max_position_embeddings=LONG + PROMPT_TOKENS
    )
    with torch.no_grad():
        table_VD = model.lm_head.weight
        table_VD.mul_(4.0)
        table_VD[tokenizer.eos_token_id] = 0.0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_with_responses_of_8192_tokens(chain_actor: Path, tmp_path: Path) -> None:
    """vLLM, drafts, the tap, the companion, the update and the sync, with nothing cut short."""
    config = build_config(
        {
            "name": "run",
            "out": str(tmp_path),
            "model": {"path": str(long_actor(chain_actor, tmp_path / "actor"))},
            "data": {"path": "demo", "max_prompt_tokens": PROMPT_TOKENS, "split": "train[:64]"},
            "sampling": {"max_new_tokens": LONG, "responses_per_prompt": 2, "seeded": True},
            "engine": {"max_num_seqs": 4, "threads": 1, "num_drafts": 3},
            "heads": {"num_heads": 3, "warm_up_tokens": 0},
            "companion": {"wait": True, "epochs": 2, "learning_rate": 1e-2},
            "ppo": {
                "steps": 3,
                "prompts_per_step": 2,
                "minibatch_size": 2,
                "micro_batch_size": 1,
                "epochs": 1,
                "reward": "tests.medusa_ppo.ppo.test_long_text:even",
                "checkpoint_every": None,
                "threads": 1,
            },
            "report": {"compare_pairs": None, "speed_every": None},
        }
    )
    run_ppo(config)
    steps = read_run(config.run_dir).steps
    assert [step[names.RESPONSE_LENGTH] for step in steps] == [LONG] * 3
    # The same policy at the 8,192nd token as at the first.
    assert all(step[names.LOGPROB_GAP_MAX] < 0.01 for step in steps)
    assert all(step[names.COMPANION_DROPPED] == 0 for step in steps)
    assert steps[-1][names.MAL_SERVING] > steps[0][names.MAL_SERVING] + 0.2
    assert steps[-1][names.VERSIONS_PUBLISHED] >= 1


def even(prompt: str, response: str, row: dict[str, Any]) -> float:
    return float(len(response) % 2 == 0)
