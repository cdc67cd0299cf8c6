"""The real engine's tokens at a fixed prefix against the model's own joint distribution, 250,000
sampled tokens over the cases.

A vocabulary of six tokens makes the joint of four tokens a table of 1,296 cells, so nothing hides
in a mean; one of two tokens makes that of ten tokens, in which a block of eight drafts ends, one of
1,024. What it shows is corollary 3 of docs/theory.md.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
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
from medusa_ppo.config.heads_section import HeadsSection
from medusa_ppo.contract.rollouts import Sampling
from medusa_ppo.drafting.slots import DraftSlots
from medusa_ppo.engines.colocated import ColocatedEngine
from medusa_ppo.vllm_plugin.worker_calls import Drafting
from tests.medusa_ppo.conftest import CPU, EAGER, GRAPHS
from tests.medusa_ppo.engines.conftest import CACHE

D, REQUESTS = 64, 12_500
PROMPT = [1, 4, 2, 0, 5, 3, 3, 4, 2, 0]


@dataclass(frozen=True)
class Toy:
    """A tiny vocabulary, the tokens of a response, and heads."""

    vocab: int
    length: int
    heads: int
    form: str

    @property
    def prompt(self) -> list[int]:
        return [token % self.vocab for token in PROMPT]

    @property
    def heads_config(self) -> HeadsConfig:
        if self.form != "default":
            return HeadsConfig(D, self.vocab, self.heads, kind=self.form)
        return HeadsSection(num_heads=self.heads).sizes(D, self.vocab)


TOYS = {
    "medusa": Toy(6, 4, 3, "medusa"),
    "hydra": Toy(6, 4, 3, "hydra"),
    "default": Toy(6, 4, 3, "default"),
    "8 drafts": Toy(2, 10, 8, "default"),
}
pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.parametrize(
        ("toy", "serving"),
        [
            *((name, CPU) for name in TOYS),
            *(pytest.param(name, GRAPHS, marks=pytest.mark.gpu) for name in TOYS),
            # Without CUDA graphs the default alone: the rest differs from it in the heads, which
            # test_proposer.py compares on a GPU as well.
            pytest.param("default", EAGER, marks=pytest.mark.gpu),
        ],
        indirect=True,
        scope="module",
    ),
]


@pytest.fixture(scope="module")
def toy(request: pytest.FixtureRequest) -> Toy:
    return TOYS[request.param]


@pytest.fixture(scope="module")
def model(toy: Toy) -> Any:
    torch.manual_seed(2)
    config = LlamaConfig(
        vocab_size=toy.vocab,
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


@pytest.fixture(scope="module")
def engine(
    toy: Toy,
    model: Any,
    serving: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[ColocatedEngine]:
    folder = tmp_path_factory.mktemp("toy")
    model.save_pretrained(folder / "model")
    torch.manual_seed(3)
    heads = MedusaHeads(toy.heads_config).requires_grad_(False)
    for name, parameter in heads.named_parameters():
        # What is copied has to move the drafts, or a fault in it would not show.
        size = 1.0 if name.startswith("copy") else 0.1 if toy.form == "default" else 0.2
        parameter.copy_(torch.randn_like(parameter) * size)
    save_heads(folder / "heads", heads, lm_head_VD=model.lm_head.weight)
    config = EngineConfig(
        dtype="float32",
        max_num_seqs=256,
        max_model_len=32,
        threads=1,
        memory_fraction=0.05,
        extra={} if serving == CPU else CACHE,
        enforce_eager=serving != GRAPHS,
        num_drafts=toy.heads,
    )
    with ColocatedEngine(folder / "model", folder / "heads", config) as started:
        yield started


def joint(model: Any, toy: Toy, sampling: Sampling) -> torch.Tensor:
    """Probability of each of the V ** length continuations, float64, in lexicographic order."""
    V = toy.vocab
    tails = itertools.product(range(V), repeat=toy.length)
    rows = torch.tensor([[*toy.prompt, *tail] for tail in tails])
    logits = model(input_ids=rows).logits[:, len(toy.prompt) - 1 : -1].double()
    flat = truncate_logits(
        logits.reshape(-1, V) / sampling.temperature, sampling.top_k, sampling.top_p
    ).log_softmax(-1)
    drawn = rows[:, len(toy.prompt) :, None]
    steps = flat.reshape(-1, toy.length, V).gather(2, drawn).squeeze(2)
    return steps.sum(1).exp()


def p_value(engine: ColocatedEngine, model: Any, toy: Toy, sampling: Sampling) -> float:
    rollouts = engine.generate([toy.prompt], sampling)
    requests = sampling.responses_per_prompt
    assert rollouts.generated_tokens == requests * toy.length
    assert rollouts.counters.accepted > REQUESTS / 20
    ids = torch.tensor([response.token_ids for response in rollouts.responses])
    places = torch.tensor([toy.vocab**power for power in reversed(range(toy.length))])
    observed = torch.bincount((ids * places).sum(1), minlength=toy.vocab**toy.length).double()
    expected = joint(model, toy, sampling) * requests
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
    engine: ColocatedEngine, model: Any, toy: Toy, case: str
) -> None:
    drafting, wanted = CASES[case]
    engine.configure(**PLAIN | drafting)
    requests = REQUESTS * (
        3 if "stop_below" in drafting else 1
    )  # Of runs that end early fewer drafts are accepted.
    sampling = Sampling(
        wanted.temperature, wanted.top_p, wanted.top_k, toy.length, requests, None, True
    )
    torch.manual_seed(1)
    # Of 32 cases one falls below 0.01 in one run of four. It is asked for four times the tokens,
    # which a wrong distribution fails the more.
    many = replace(sampling, responses_per_prompt=4 * requests)
    given = engine, model, toy
    assert p_value(*given, sampling) > 0.01 or p_value(*given, many) > 0.01


def test_a_wrong_q_fails(
    engine: ColocatedEngine, model: Any, toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = DraftSlots.stamp

    def dishonest(
        slots: DraftSlots, slots_B: torch.Tensor, stamps_B: torch.Tensor, count: int
    ) -> None:
        honest(slots, slots_B, stamps_B, count)
        slots.cumulative_KRX.pow_(0.5)  # The sums of another distribution.

    engine.configure(**PLAIN)
    monkeypatch.setattr(DraftSlots, "stamp", dishonest)
    sampling = Sampling(1.0, 1.0, 0, toy.length, REQUESTS, None, True)
    assert p_value(engine, model, toy, sampling) < 1e-4
