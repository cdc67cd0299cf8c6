"""Long responses on ranks that share each sequence: the memory of a step grows with the tokens."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from medusa_ppo.config.run_config import build_config
from medusa_ppo.contract.rollouts import Counters, Response, Rollouts, Sampling
from medusa_ppo.ppo.batch import PPOBatch

pytest.importorskip("megatron.core")

VOCAB = 16
SIZES = (2048, 8192, 32768)


def batch_of(tokens: int) -> PPOBatch:
    """Two sequences of this many tokens."""
    ids_ST = torch.randint(1, VOCAB, (2, tokens), generator=torch.Generator().manual_seed(0))
    responses = tuple(
        Response(0, tuple(ids[16:]), (-math.log(VOCAB),) * (tokens - 16), "length")
        for ids in ids_ST.tolist()
    )
    prompts = (tuple(ids_ST[0, :16].tolist()),)
    return PPOBatch(Rollouts(prompts, responses, Counters(), 1.0, Sampling()))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("cut", ["context_parallel", "tensor_parallel"])
def test_a_step_takes_memory_in_proportion_to_the_tokens(
    shim_in_reach: Path, ray_session: None, tmp_path: Path, cut: str
) -> None:
    """Scoring and update of actor and reference; a rank counts its tensors from one optimizer step
    to the next.
    """
    from medusa_ppo.ppo.megatron.megatron_learner import MegatronLearner, RankTeam

    shim_in_reach.mkdir(exist_ok=True)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(
            **sizes,
            vocab_size=VOCAB,
            max_position_embeddings=SIZES[-1],
            bos_token_id=None,
            eos_token_id=0,
            pad_token_id=0,
            tie_word_embeddings=False,
        )
    ).save_pretrained(tmp_path)
    config = build_config(
        {
            "model": {"path": str(tmp_path)},
            "actor": {"backend": "megatron", "imports": "ranks_on_cpu", cut: 2},
            "sampling": {"max_new_tokens": SIZES[-1]},
            "ppo": {
                "advantages": "grpo",
                "minibatch_size": 2,
                "micro_batch_size": 1,
                "epochs": 1,
                "threads": 1,
            },
        }
    )
    team = RankTeam(str(tmp_path), config, with_embedding=False)
    bytes_T = {}
    try:
        learner = MegatronLearner(team, str(tmp_path), None, config)
        for tokens in (64, *SIZES):  # The first makes the moments.
            batch = batch_of(tokens)
            scores, _ = learner.score(batch, torch.tensor([0.0, 1.0]), Sampling())
            learner.update(batch, scores, Sampling(), 0)
            files = list(shim_in_reach.iterdir())
            assert len(files) == 2
            bytes_T[tokens] = max(json.loads(file.read_text()) for file in files)
    finally:
        team.close()
    print(f"\n{cut}: {bytes_T}")
    first, second, third = (bytes_T[tokens] for tokens in SIZES)
    expected = (SIZES[2] - SIZES[1]) / (SIZES[1] - SIZES[0])
    assert (third - second) / (second - first) == pytest.approx(expected, rel=0.15), bytes_T
