"""Are an engine's tokens samples of the model's own distribution? One test for any prompts,
settings and drafts, and a check of this machine (`python -m medusa_ppo.engines.probe` serves a tiny
random model with drafts and prints one line of JSON).

The randomised PIT: for a token x that was sampled from p (tokens in p's order, likeliest first), u
= (mass before x) + U(0, 1) p(x) is uniform on (0, 1), whatever the prefix (Czado, Gneiting, Held
2009, Biometrics 65). So all tokens of all prompts go into one chi-square and one Kolmogorov-Smirnov
test. In addition, log p(x) + H(p) has mean 0 given the past, so its sum over all tokens, divided by
the root of the summed variances, is a standard normal z: it reveals a shift of log-probs (vLLM's
CPU build without our patch gives |z| above 50 here). Drafts verified against a different q than
they were drawn from, or one that is a step old, show up in all three. Tokens with zero mass under p
are counted separately: there must be none. Where top-k or top-p cuts, two machines may disagree
about the token at the edge by rounding; tokens within EDGE of it are left out.

Shape letters: B rows, T positions, M sampled tokens, V vocabulary.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from heads.checkpoint import save_heads
from heads.heads_config import HeadsConfig
from heads.modules import MedusaHeads
from heads.vocabulary import truncate_logits
from medusa_ppo.config.engine_section import EngineConfig
from medusa_ppo.contract.rollouts import Response, Rollouts, Sampling
from medusa_ppo.engines.colocated import ColocatedEngine
from medusa_ppo.engines.rollout_engine import Prompts, RolloutEngine

BINS = 20
EDGE = 1e-3
"""How far beyond a cut a token may be, in the logarithm of its probability or in the mass before
it, and still be kept by an engine that is right: some ten times what a GPU's 32-bit logits differ
by from a CPU's. What an engine keeps that keeps one token too many is further away.
"""
LEAST_P = 0.001
MOST_Z = 3.0
SERIES_TERMS = 100
TEMPERATURE = 0.7
# Wider than MOST_Z: one CI run in thousands may fail by chance, and a real fault shows at 50.
LIMIT = 4.0
VOCAB, HIDDEN, HEADS = 128, 64, 3
PROMPTS, NEW_TOKENS = 64, 32


@dataclass
class Uniformity:
    """Statistics of the tokens so far. `add` adds more; the p-values and z cover all of them."""

    seed: int = 0
    outside: int = 0
    at_edge: int = 0
    _u: list[torch.Tensor] = field(default_factory=list)
    _shift: float = 0.0
    _variance: float = 0.0

    def __post_init__(self) -> None:
        self._generator = torch.Generator().manual_seed(self.seed)

    def add(self, logits_MV: torch.Tensor, ids_M: torch.Tensor, sampling: Sampling) -> None:
        """Add sampled tokens.

        Args:
            logits_MV: the reference model's raw logits at each sampled position; -inf where a
                grammar forbids the token.
            ids_M: int64, the sampled tokens.
            sampling: temperature (above 0), top-k and top-p they were sampled with.
        """
        whole_MV = logits_MV.double() / sampling.temperature
        logits_MV = truncate_logits(whole_MV, sampling.top_k, sampling.top_p)
        logp_MV = logits_MV.log_softmax(-1)
        p_MV = logp_MV.exp()
        mass_M = p_MV.gather(1, ids_M[:, None])[:, 0]
        # Ties are in the order of their ids.
        first_MV = torch.arange(p_MV.shape[1], device=p_MV.device) < ids_M[:, None]
        below_M = (p_MV * ((p_MV > mass_M[:, None]) | (first_MV & (p_MV == mass_M[:, None])))).sum(
            -1
        )
        inside_M = mass_M > 0
        uniform_M = torch.rand(len(ids_M), generator=self._generator, dtype=torch.float64)
        self._u.append((below_M + uniform_M.to(mass_M.device) * mass_M)[inside_M].cpu())
        beyond_M = ~inside_M
        if beyond_M.any():
            rows = whole_MV[beyond_M], logits_MV[beyond_M], ids_M[beyond_M]
            at_edge_M = _within_edge(*rows, sampling)
            self.at_edge += int(at_edge_M.sum())
            self.outside += int((~at_edge_M).sum())
        # 0 times -inf would be NaN.
        finite_MV = torch.where(p_MV > 0, logp_MV, 0.0)
        mean_M = (p_MV * finite_MV).sum(-1)
        seen_M = finite_MV.gather(1, ids_M[:, None])[:, 0]
        self._shift += float((seen_M - mean_M)[inside_M].sum())
        self._variance += float(
            ((p_MV * finite_MV.square()).sum(-1) - mean_M.square())[inside_M].sum()
        )

    @property
    def tokens(self) -> int:
        return self.outside + self.at_edge + sum(len(part) for part in self._u)

    @property
    def chi_square_p(self) -> float:
        """p-value of equal counts in 20 bins."""
        u = torch.cat(self._u)
        counts = torch.histc(u, BINS, 0.0, 1.0)
        expected = len(u) / BINS
        statistic = ((counts - expected) ** 2 / expected).sum()
        return float(
            torch.special.gammaincc(
                torch.tensor((BINS - 1) / 2, dtype=torch.float64), statistic / 2
            )
        )

    @property
    def kolmogorov_p(self) -> float:
        """p-value of the largest distance to the uniform distribution function, by its limiting
        law, which is exact enough from a hundred tokens on.
        """
        u = torch.cat(self._u).sort().values
        steps = torch.arange(len(u) + 1, dtype=torch.float64) / len(u)
        distance = float(torch.maximum(steps[1:] - u, u - steps[:-1]).max())
        t = distance * math.sqrt(len(u))
        # There the series alternates without decreasing; the law is 1 to more than ten digits.
        if t < 0.2:
            return 1.0
        terms = ((-1) ** (j - 1) * math.exp(-2 * (j * t) ** 2) for j in range(1, SERIES_TERMS + 1))
        return min(1.0, max(0.0, 2 * sum(terms)))

    @property
    def z(self) -> float:
        """Standard errors between the tokens' log-probs and their own expectation."""
        return self._shift / math.sqrt(self._variance)

    @property
    def honest(self) -> bool:
        """Whether nothing is outside the support, both p-values are over 0.001, and z is within 3:
        about 1 honest engine in 250 fails by chance.
        """
        return (
            not self.outside
            and min(self.chi_square_p, self.kolmogorov_p) > LEAST_P
            and abs(self.z) < MOST_Z
        )

    def figures(self) -> dict[str, Any]:
        """The statistics as plain data, for a table or a file."""
        return {
            "tokens": self.tokens,
            "chi_square_p": self.chi_square_p,
            "kolmogorov_p": self.kolmogorov_p,
            "z": self.z,
            "outside": self.outside,
            "at_edge": self.at_edge,
            "honest": self.honest,
        }


def _within_edge(
    whole_MV: torch.Tensor, cut_MV: torch.Tensor, ids_M: torch.Tensor, sampling: Sampling
) -> torch.Tensor:
    """Which tokens that the cuts exclude are as likely as the last one that they keep, or would be
    kept by a slightly larger top-p.
    """
    ids_M1 = ids_M[:, None]
    least_M1 = cut_MV.masked_fill(cut_MV == -torch.inf, torch.inf).amin(1, keepdim=True)
    close_M1 = whole_MV.gather(1, ids_M1) >= least_M1 - EDGE
    if sampling.top_p < 1:
        top_p = min(1.0, sampling.top_p + EDGE)
        wider_MV = truncate_logits(whole_MV, sampling.top_k, top_p)
        close_M1 |= wider_MV.gather(1, ids_M1) > -torch.inf
    return close_M1[:, 0]


@torch.no_grad()
def add_rollouts(test: Uniformity, model: Any, rollouts: Rollouts) -> None:
    """Test all responses of some rollouts against a transformers model in float32 or better."""
    for response in rollouts.responses:
        add_response(
            test, model, rollouts.prompts[response.prompt_index], response, rollouts.sampling
        )


@torch.no_grad()
def add_response(
    test: Uniformity, model: Any, prompt: Iterable[int], response: Response, sampling: Sampling
) -> None:
    """Test one response, whose sampling may differ from its neighbours'."""
    prefix = list(prompt)
    row_1T = torch.tensor([[*prefix, *response.token_ids]], device=model.device)
    test.add(
        model(input_ids=row_1T).logits[0, len(prefix) - 1 : -1], row_1T[0, len(prefix) :], sampling
    )


def sentence(drafting: Uniformity, plain: Uniformity | None) -> str:
    """The verdict. `plain` is the same engine without drafts: if it fails too, drafts are not the
    cause. It is used only if the samples with drafts fail.
    """
    if drafting.honest:
        return (
            f"Honest: {drafting.tokens:,} tokens sampled with drafts fit the model's own"
            " distribution."
        )
    if plain is not None and not plain.honest:
        return (
            "Not the drafts: without them the engine's tokens differ from the reference as well"
            " (its dtype, kernels or sampling settings)."
        )
    return (
        "WRONG: with drafts the tokens do not have the model's distribution, without them they do."
        " Do not train on them; report this."
    )


def tiny_model(folder: Path) -> LlamaForCausalLM:
    """A random Llama with peaked next-token distributions, saved as a transformers folder."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=HIDDEN * 2,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
        eos_token_id=None,
        bos_token_id=None,
    )
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model


def sample(
    engine: RolloutEngine,
    asked: Prompts,
    sampling: Sampling,
    tokens: int,
    advance: Callable[[float], object],
) -> tuple[list[Rollouts], list[Rollouts]]:
    """Sample at least this many tokens with the engine's drafts, and as many without, in
    alternating calls. Afterwards it drafts as before.
    """
    drafts = engine.num_drafts
    runs: tuple[list[Rollouts], list[Rollouts]] = ([], [])
    try:
        while min(sum(rollouts.generated_tokens for rollouts in run) for run in runs) < tokens:
            for run, count in zip(runs, (drafts, 0), strict=True):
                engine.configure(num_drafts=count)
                run.append(engine.generate(asked, sampling))
                advance(run[-1].generated_tokens)
    finally:
        engine.configure(num_drafts=drafts)
    return runs


def judge(
    model: Any, runs: tuple[list[Rollouts], list[Rollouts]], advance: Callable[[float], object]
) -> tuple[Uniformity, Uniformity | None]:
    """Compare `sample`'s result with the model's own distribution; samples without drafts only if
    those with drafts fail.
    """
    found = []
    for run in runs:
        found.append(Uniformity())
        for rollouts in run:
            add_rollouts(found[-1], model, rollouts)
            advance(rollouts.generated_tokens)
        if found[-1].honest:
            break
    return found[0], found[1] if len(found) > 1 else None


def beginnings(config: Any) -> list[list[int]]:
    """Prompts for any model: the token that begins its texts, or one that ends them, and a random
    one.
    """
    config = config.get_text_config()
    begin = next(
        token for token in (config.bos_token_id, config.eos_token_id, 0) if token is not None
    )
    begin = begin[0] if isinstance(begin, list) else begin
    generator = torch.Generator().manual_seed(0)
    return [
        [begin, token]
        for token in torch.randint(config.vocab_size, (PROMPTS,), generator=generator).tolist()
    ]


@torch.no_grad()
def stir(heads: MedusaHeads) -> None:
    """Fill the blocks of untrained heads with random numbers, so that they draft."""
    generator = torch.Generator().manual_seed(0)
    for block in heads.blocks:
        block.normal_(std=0.5 / heads.config.hidden_size**0.5, generator=generator)


def run_probe() -> dict[str, Any]:
    """Start a tiny engine with random heads, sample with drafting, and compare with the model."""
    with tempfile.TemporaryDirectory(prefix="medusa-ppo-probe-") as temporary:
        folder = Path(temporary)
        model = tiny_model(folder / "model")
        heads = MedusaHeads(HeadsConfig(hidden_size=HIDDEN, vocab_size=VOCAB, num_heads=HEADS))
        # Untrained heads draft nothing.
        stir(heads)
        save_heads(folder / "heads", heads, lm_head_VD=model.lm_head.weight)
        config = EngineConfig(max_num_seqs=16, max_model_len=64, threads=1, num_drafts=HEADS)
        sampling = Sampling(
            temperature=TEMPERATURE, max_new_tokens=NEW_TOKENS, ignore_eos=True, seed=0
        )
        with ColocatedEngine(folder / "model", folder / "heads", config) as engine:
            report = engine.plugin_report()
            rollouts = engine.generate(
                torch.randint(
                    VOCAB, (PROMPTS, 8), generator=torch.Generator().manual_seed(0)
                ).tolist(),
                sampling,
            )
        test = Uniformity()
        add_rollouts(test, model, rollouts)
    return {
        "vllm": report["vllm"],
        "pid": report["pid"],
        "active": report["drafter"] == "MedusaProposer",
        "patches": report["patches"],
        "temperature": TEMPERATURE,
        "tokens": test.tokens,
        "drafts": rollouts.counters.drafts,
        "z": test.z,
        "limit": LIMIT,
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(run_probe()) + "\n")
