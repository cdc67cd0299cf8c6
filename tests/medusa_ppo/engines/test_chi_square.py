"""The real engine's tokens at a fixed prefix against the model's own joint distribution, 250,000
sampled tokens over the cases.

A vocabulary of six tokens makes the joint of four tokens a table of 1,296 cells, so nothing hides
in a mean. What it shows is corollary 3 of docs/theory.md.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from transformers import LlamaConfig, LlamaForCausalLM

from heads.checkpoint import save_heads
from heads.heads_config import HeadsConfig
from heads.modules import MedusaHeads
from heads.vocabulary import truncate_logits
from medusa_ppo.config.engine_section import EngineConfig
from medusa_ppo.contract.rollouts import Sampling
from medusa_ppo.drafting.slots import DraftSlots
from medusa_ppo.engines.colocated import ColocatedEngine
from medusa_ppo.vllm_plugin.worker_calls import Drafting
from tests.medusa_ppo.conftest import CPU, GRAPHS
from tests.medusa_ppo.engines.conftest import CACHE

pytestmark = [pytest.mark.engine, pytest.mark.slow]
V, D, LENGTH, REQUESTS = 6, 64, 4, 12_500
PROMPT = [1, 4, 2, 0, 5, 3, 3]


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(2)
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=D,
        intermediate_size=2 * D,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.3,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
    )
    return LlamaForCausalLM(config).eval().requires_grad_(False)


@pytest.fixture(scope="module", params=["medusa", "hydra", "context"])
def engine(
    request: pytest.FixtureRequest,
    model: Any,
    serving: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[ColocatedEngine]:
    folder = tmp_path_factory.mktemp("toy")
    model.save_pretrained(folder / "model")
    torch.manual_seed(3)
    kind, pairs = ("hydra", 3) if request.param == "context" else (request.param, 0)
    heads = MedusaHeads(HeadsConfig(D, V, 3, kind=kind, context=pairs)).requires_grad_(False)
    for parameter in heads.parameters():
        parameter.copy_(torch.randn_like(parameter) * (0.1 if pairs else 0.2))
    save_heads(folder / "heads", heads, lm_head_VD=model.lm_head.weight)
    config = EngineConfig(
        dtype="float32",
        max_num_seqs=256,
        max_model_len=32,
        threads=1,
        memory_fraction=0.05,
        extra={} if serving == CPU else CACHE,
        enforce_eager=serving != GRAPHS,
        num_drafts=3,
    )
    with ColocatedEngine(folder / "model", folder / "heads", config) as started:
        yield started


def joint(model: Any, sampling: Sampling) -> torch.Tensor:
    """Probability of each of the V ** LENGTH continuations, float64, in lexicographic order."""
    rows = torch.tensor([[*PROMPT, *tail] for tail in itertools.product(range(V), repeat=LENGTH)])
    logits = model(input_ids=rows).logits[:, len(PROMPT) - 1 : -1].double()
    flat = truncate_logits(
        logits.reshape(-1, V) / sampling.temperature, sampling.top_k, sampling.top_p
    ).log_softmax(-1)
    steps = flat.reshape(-1, LENGTH, V).gather(2, rows[:, len(PROMPT) :, None]).squeeze(2)
    return steps.sum(1).exp()


def p_value(engine: ColocatedEngine, model: Any, sampling: Sampling) -> float:
    rollouts = engine.generate([PROMPT], sampling)
    requests = sampling.responses_per_prompt
    assert rollouts.generated_tokens == requests * LENGTH
    assert rollouts.counters.accepted > REQUESTS / 20
    ids = torch.tensor([response.token_ids for response in rollouts.responses])
    cells = (ids * torch.tensor([V**3, V**2, V, 1])).sum(1)
    observed = torch.bincount(cells, minlength=V**LENGTH).double()
    expected = joint(model, sampling) * requests
    assert float(observed[expected == 0].sum()) == 0
    # Rare cells together, so that each has the five expected counts that the test asks for.
    rare = expected < 5
    observed = torch.cat([observed[~rare], observed[rare].sum()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    keep = expected > 0
    return float(
        chisquare(
            observed[keep].numpy(), (expected[keep] * observed.sum() / expected.sum()).numpy()
        ).pvalue
    )


CASES: dict[str, tuple[Drafting, Sampling]] = {
    "one-hot T=1": ({"sampled": False}, Sampling(1.0)),
    "sampled T=1": ({}, Sampling(1.0)),
    "sampled T=0.7, draft 0.6": ({"draft_temperature": 0.6}, Sampling(0.7)),
    "sampled top-p": ({"draft_temperature": 0.8}, Sampling(1.0, top_p=0.8)),
    "sampled top-k": ({}, Sampling(1.0, top_k=3)),
    "a memory of the responses before and beside": ({"memory_bytes": 100_000}, Sampling(0.7)),
    "runs that end early": ({"stop_below": 0.2}, Sampling(0.7)),
    "both": ({"memory_bytes": 100_000, "stop_below": 0.2}, Sampling(1.0, top_p=0.8)),
}
PLAIN: Drafting = {"sampled": True, "draft_temperature": 1.0, "memory_bytes": 0, "stop_below": 0.0}


@pytest.mark.parametrize("case", CASES)
def test_the_joint_distribution_is_the_models(
    engine: ColocatedEngine, model: Any, case: str
) -> None:
    drafting, wanted = CASES[case]
    engine.configure(**PLAIN | drafting)
    requests = REQUESTS * (
        2 if "stop_below" in drafting else 1
    )  # Of runs that end early fewer drafts are accepted.
    sampling = Sampling(
        wanted.temperature, wanted.top_p, wanted.top_k, LENGTH, requests, None, True
    )
    torch.manual_seed(1)
    # Of 24 cases one falls below 0.01 in one run of four. It is asked for four times the tokens,
    # which a wrong distribution fails the more.
    many = replace(sampling, responses_per_prompt=4 * requests)
    assert p_value(engine, model, sampling) > 0.01 or p_value(engine, model, many) > 0.01


def test_a_wrong_q_fails(
    engine: ColocatedEngine, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = DraftSlots.stamp

    def dishonest(
        slots: DraftSlots, slots_B: torch.Tensor, stamps_B: torch.Tensor, count: int
    ) -> None:
        honest(slots, slots_B, stamps_B, count)
        slots.cumulative_KRX.pow_(0.5)  # The sums of another distribution.

    engine.configure(**PLAIN)
    monkeypatch.setattr(DraftSlots, "stamp", dishonest)
    assert p_value(engine, model, Sampling(1.0, 1.0, 0, LENGTH, REQUESTS, None, True)) < 1e-4
