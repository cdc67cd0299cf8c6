"""Are an engine's tokens samples of the model's own distribution? One test for any prompts, settings and drafts: the randomised PIT.

For a token x that was sampled from p (tokens in p's order, likeliest first), u = (mass before x) + U(0, 1) p(x) is uniform on (0, 1),
whatever the prefix (Czado, Gneiting, Held 2009, Biometrics 65). So all tokens of all prompts go into one chi-square and one
Kolmogorov-Smirnov test; the standardised sum of log p(x) + H(p) shows a shift of log-probs besides. Drafts that are verified against
another q than they were drawn from, or against one that is a step old, show in all three. Tokens to which p gives no mass are counted by
themselves: there may be none.

Shape letters: M sampled tokens of one response, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from heads.vocabulary import truncate_logits
from medusa_ppo.types import Response, Rollouts, Sampling

BINS = 20
LEAST_P = 0.001
MOST_Z = 3.0
SERIES_TERMS = 100


@dataclass
class Uniformity:
    """What was seen of the tokens so far. `add` takes more; the p-values and z are of all of them."""

    seed: int = 0
    outside: int = 0
    _u: list[Tensor] = field(default_factory=list)
    _shift: float = 0.0
    _variance: float = 0.0

    def __post_init__(self) -> None:
        self._generator = torch.Generator().manual_seed(self.seed)

    def add(self, logits_MV: Tensor, ids_M: Tensor, sampling: Sampling) -> None:
        """Take in sampled tokens.

        Args:
            logits_MV: the reference model's raw logits at each sampled position; -inf where a grammar forbids the token.
            ids_M: int64, what was sampled there.
            sampling: temperature (above 0), top-k and top-p they were sampled with.
        """
        logits_MV = truncate_logits(logits_MV.double() / sampling.temperature, sampling.top_k, sampling.top_p)
        logp_MV = logits_MV.log_softmax(-1)
        p_MV = logp_MV.exp()
        mass_M = p_MV.gather(1, ids_M[:, None])[:, 0]
        # Ties stand in the order of their ids.
        first_MV = torch.arange(p_MV.shape[1], device=p_MV.device) < ids_M[:, None]
        below_M = (p_MV * ((p_MV > mass_M[:, None]) | (first_MV & (p_MV == mass_M[:, None])))).sum(-1)
        inside_M = mass_M > 0
        uniform_M = torch.rand(len(ids_M), generator=self._generator, dtype=torch.float64)
        self._u.append((below_M + uniform_M.to(mass_M.device) * mass_M)[inside_M].cpu())
        self.outside += int((~inside_M).sum())
        finite_MV = torch.where(p_MV > 0, logp_MV, 0.0)
        mean_M = (p_MV * finite_MV).sum(-1)
        seen_M = finite_MV.gather(1, ids_M[:, None])[:, 0]
        self._shift += float((seen_M - mean_M)[inside_M].sum())
        self._variance += float(((p_MV * finite_MV.square()).sum(-1) - mean_M.square())[inside_M].sum())

    @property
    def tokens(self) -> int:
        return self.outside + sum(len(part) for part in self._u)

    @property
    def chi_square_p(self) -> float:
        """Of equal counts in 20 bins."""
        u = torch.cat(self._u)
        counts = torch.histc(u, BINS, 0.0, 1.0)
        expected = len(u) / BINS
        statistic = ((counts - expected) ** 2 / expected).sum()
        return float(torch.special.gammaincc(torch.tensor((BINS - 1) / 2, dtype=torch.float64), statistic / 2))

    @property
    def kolmogorov_p(self) -> float:
        """Of the largest distance to the uniform distribution function; its limiting law, exact enough from a hundred tokens on."""
        u = torch.cat(self._u).sort().values
        steps = torch.arange(len(u) + 1, dtype=torch.float64) / len(u)
        distance = float(torch.maximum(steps[1:] - u, u - steps[:-1]).max())
        t = distance * math.sqrt(len(u))
        if t < 0.2:  # The series alternates there without falling; the law is 1 to more than ten digits.
            return 1.0
        return min(1.0, max(0.0, 2 * sum((-1) ** (j - 1) * math.exp(-2 * (j * t) ** 2) for j in range(1, SERIES_TERMS + 1))))

    @property
    def z(self) -> float:
        """Standard errors between the tokens' log-probs and their own expectation."""
        return self._shift / math.sqrt(self._variance)

    @property
    def honest(self) -> bool:
        """Nothing outside of the support, both p-values over 0.001, z within 3: by chance 1 honest engine in about 250 fails."""
        return not self.outside and min(self.chi_square_p, self.kolmogorov_p) > LEAST_P and abs(self.z) < MOST_Z

    def figures(self) -> dict[str, Any]:
        """For a table or a file."""
        return {
            "tokens": self.tokens,
            "chi_square_p": self.chi_square_p,
            "kolmogorov_p": self.kolmogorov_p,
            "z": self.z,
            "outside": self.outside,
            "honest": self.honest,
        }


@torch.no_grad()
def add_rollouts(test: Uniformity, model: Any, rollouts: Rollouts) -> None:
    """All responses of some rollouts, against a transformers model in float32 or better."""
    for response in rollouts.responses:
        add_response(test, model, rollouts.prompts[response.prompt_index], response, rollouts.sampling)


@torch.no_grad()
def add_response(test: Uniformity, model: Any, prompt: Iterable[int], response: Response, sampling: Sampling) -> None:
    """One response, whose sampling may differ from its neighbours'."""
    prefix = list(prompt)
    row_1T = torch.tensor([[*prefix, *response.token_ids]], device=model.device)
    test.add(model(input_ids=row_1T).logits[0, len(prefix) - 1 : -1], row_1T[0, len(prefix) :], sampling)


def sentence(drafting: Uniformity, plain: Uniformity | None) -> str:
    """The verdict. `plain` is of the same engine without drafts: what it fails too is not the drafts' doing. It is read only where
    those with drafts fail."""
    if drafting.honest:
        return f"Honest: {drafting.tokens:,} tokens sampled with drafts fit the model's own distribution."
    if plain is not None and not plain.honest:
        return (
            "Not the drafts: without them the engine's tokens differ from the reference as well (its dtype, kernels or sampling settings)."
        )
    return "WRONG: with drafts the tokens do not have the model's distribution, without them they do. Do not train on them; report this."
