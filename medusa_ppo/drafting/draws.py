"""How drafts are drawn from the heads' logits, and the draft probabilities that verification needs later.

Shape letters: B requests, K drafts of a step, T drafts of all requests one after the other, D hidden, N rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from heads.modules import MedusaHeads
from medusa_ppo.drafting.draft_vocabulary import LM_HEAD, TokenMap, spread
from medusa_ppo.drafting.packed import PackedHydra

TRUNCATE = Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor | None], torch.Tensor]


@dataclass(frozen=True)
class RequestSampling:
    """How each of the B requests samples; None for `temperature_B` means that all are greedy.

    Attributes:
        temperature_B: 0 for greedy requests.
        top_k_B, top_p_B: None where no request asks for it.
        generators: generators of the seeded requests, by index.
        truncate: vLLM's own top-k/top-p filter: (logits, k, p) -> logits.
    """

    temperature_B: torch.Tensor | None
    top_k_B: torch.Tensor | None = None
    top_p_B: torch.Tensor | None = None
    generators: Mapping[int, torch.Generator] = field(default_factory=dict)
    truncate: TRUNCATE | None = None


@dataclass(frozen=True)
class Draft:
    """Drafts of one step: ids int64 `[B, K]`, and q float32 `[B, K, V]` when they were sampled."""

    ids_BK: torch.Tensor
    probs_BKV: torch.Tensor | None = None


class Chooser:
    """Turns the logits of one position into draft ids: drawn at the draft temperature, or argmax when `sampling` is None.

    With a token map the logits are those of its tokens only; ids and probabilities that come out are of the whole vocabulary.
    """

    def __init__(
        self,
        sampling: RequestSampling | None,
        draft_temperature: float,
        batch: int,
        width: int,
        device: torch.device,
        ids_W: torch.Tensor | None = None,
        vocab_size: int = 0,
    ) -> None:
        self.ids_W, self.vocab_size = ids_W, vocab_size
        self.sampling = None if sampling is None or sampling.temperature_B is None else sampling
        self.ids: list[torch.Tensor] = []
        self.probs: list[torch.Tensor] = []
        if self.sampling is not None:
            self.uniforms_BK = draft_uniforms(batch, width, self.sampling.generators, device)
            self.scale_B1 = draft_scale(self.sampling, draft_temperature)
            assert self.sampling.temperature_B is not None, "a batch of greedy requests is not sampled"
            greedy_B = self.sampling.temperature_B <= 0
            self.greedy_B = greedy_B if bool(greedy_B.any()) else None

    def choose(self, logits_BV: torch.Tensor) -> torch.Tensor:
        """Ids `[B]` of the next position."""
        if self.sampling is None:
            ids_B = logits_BV.argmax(-1)
        else:
            probs_BV = draft_distribution(logits_BV, self.sampling, self.scale_B1)
            ids_B = draw(logits_BV, probs_BV, self.uniforms_BK[:, len(self.ids)], self.greedy_B)
            self.probs.append(probs_BV if self.ids_W is None else spread(probs_BV, self.ids_W, self.vocab_size))
        if self.ids_W is not None:
            ids_B = self.ids_W[ids_B]
        self.ids.append(ids_B)
        return ids_B

    def result(self) -> Draft:
        return Draft(torch.stack(self.ids, dim=1), torch.stack(self.probs, dim=1) if self.probs else None)


def draft_tokens(
    heads: MedusaHeads,
    hidden_BD: torch.Tensor,
    last_ids_B: torch.Tensor,
    count: int,
    lm_head: LM_HEAD,
    *,
    embedding_VD: torch.Tensor | None = None,
    sampling: RequestSampling | None = None,
    draft_temperature: float = 1.0,
    token_map: TokenMap | None = None,
    packed: PackedHydra | None = None,
) -> Draft:
    """Draft `count` (1..K) tokens for each request.

    Args:
        hidden_BD: h_t of each request, the state from which its last token was sampled.
        last_ids_B: int64, that last token x_{t+1}; read by conditioned kinds only.
        lm_head: the engine's product; one call for all heads where the kind allows it.
        embedding_VD: the engine's table; kind hydra only, and not with `packed`.
        sampling: how the requests sample; None for one-hot drafts.
        token_map: draft from its tokens only; needs heads that share lm_head.
        packed: the same heads with packed products; kind hydra only.
    """
    batch = hidden_BD.shape[0]
    ids_W = token_map.ids_W if token_map is not None else None
    if token_map is not None and ids_W is not None:
        lm_head = token_map.logits
    chooser = Chooser(sampling, draft_temperature, batch, count, hidden_BD.device, ids_W, heads.config.vocab_size)
    state = heads.start_draft(hidden_BD) if packed is None else packed.start(hidden_BD)
    ready_BKV = _logits_known_ahead(heads, state.base_BKD, count, lm_head)
    if heads.config.kind == "medusa" and chooser.sampling is None and ready_BKV is not None:
        best_BK = ready_BKV.argmax(-1)
        return Draft(best_BK if ids_W is None else ids_W[best_BK])
    for k in range(count):
        if ready_BKV is not None:
            logits_BV = ready_BKV[:, k].float()
        else:
            if packed is None:
                features_BD = heads.draft_features(state, k, last_ids_B, embedding_VD)
            else:
                features_BD = packed.features(state, k, last_ids_B)
            logits_BV = lm_head(features_BD) if heads.config.lm_head == "shared" else F.linear(features_BD, heads.own_lm_head(k + 1))
        if heads.config.kind == "markov":
            bias_Br = F.embedding(last_ids_B, heads.markov_in[k])
            markov_out_Vr = heads.markov_out[k] if ids_W is None else heads.markov_out[k][ids_W]
            logits_BV = logits_BV + F.linear(bias_Br, markov_out_Vr).float()
        last_ids_B = chooser.choose(logits_BV)
    return chooser.result()


def _logits_known_ahead(heads: MedusaHeads, base_BKD: torch.Tensor, count: int, lm_head: LM_HEAD) -> torch.Tensor | None:
    """lm_head's part of the logits `[B, count, V]` for kinds whose features do not depend on drafted tokens: one product."""
    if heads.config.kind == "hydra":
        return None
    features_BKD = base_BKD[:, :count]
    if heads.config.lm_head == "shared":
        logits_NV = lm_head(features_BKD.reshape(-1, features_BKD.shape[-1]))
        return logits_NV.view(features_BKD.shape[0], count, -1)
    return torch.stack([F.linear(features_BKD[:, k], heads.own_lm_head(k + 1)) for k in range(count)], dim=1)


def draft_uniforms(batch: int, width: int, generators: Mapping[int, torch.Generator], device: torch.device) -> torch.Tensor:
    """Float64 uniforms `[B, width]`; a seeded request draws from its own generator."""
    numbers_BK = torch.rand((batch, width), dtype=torch.float64, device=device)
    for index, generator in generators.items():
        numbers_BK[index] = torch.rand(width, dtype=torch.float64, generator=generator, device=device)
    return numbers_BK


def draft_scale(sampling: RequestSampling, draft_temperature: float) -> torch.Tensor:
    """1 / (request temperature x draft temperature) `[B, 1]` float32; greedy requests count as temperature 1."""
    temperature_B = sampling.temperature_B
    if temperature_B is None:
        raise ValueError("a batch of greedy requests has no draft distribution")
    safe_B = torch.where(temperature_B > 0, temperature_B, torch.ones_like(temperature_B))
    return (safe_B * draft_temperature).reciprocal().unsqueeze(1)


def draft_distribution(logits_BV: torch.Tensor, sampling: RequestSampling, scale_B1: torch.Tensor) -> torch.Tensor:
    """q `[B, V]`: the head's distribution, cut as the request's own top-k and top-p are.

    Any q is lossless; cutting it as the target is cut only keeps it from drafting what must be refused.
    """
    scaled_BV = logits_BV.float() * scale_B1
    if sampling.truncate is not None and (sampling.top_k_B is not None or sampling.top_p_B is not None):
        scaled_BV = sampling.truncate(scaled_BV, sampling.top_k_B, sampling.top_p_B)
    return scaled_BV.softmax(-1)


def draw(logits_BV: torch.Tensor, probs_BV: torch.Tensor, uniform_B: torch.Tensor, greedy_B: torch.Tensor | None) -> torch.Tensor:
    """Draft ids `[B]`: drawn from probs by inverting the cumulative sum; argmax of logits for greedy requests (None: there are none).

    A float64 uniform is at most 1 - 2^-53, and its product with the total then rounds to less than the total: some entry exceeds it.
    """
    cumulative_BV = probs_BV.cumsum(1, dtype=torch.float64)
    point_B1 = uniform_B.unsqueeze(1) * cumulative_BV[:, -1:]
    drawn_B = torch.searchsorted(cumulative_BV, point_B1, right=True).squeeze(1)
    return drawn_B if greedy_B is None else torch.where(greedy_B, logits_BV.argmax(1), drawn_B)


class DraftProbs:
    """Draft probabilities by request, kept from the step that drafted until the step that verifies.

    A request's entry is taken out in the next step that schedules the request, whether or not its drafts are used there, so an
    entry can never be mistaken for that of later drafts. Drafts without an entry were not sampled: they are one-hot.
    """

    def __init__(self) -> None:
        self._by_request: dict[str, torch.Tensor] = {}

    def __len__(self) -> int:
        return len(self._by_request)

    def put(self, request_ids: Sequence[str], probs_BKV: torch.Tensor) -> None:
        self._by_request.update(zip(request_ids, probs_BKV, strict=True))

    def keep_only(self, request_ids: Mapping[str, object]) -> None:
        """Forget requests that have ended."""
        self._by_request = {key: probs for key, probs in self._by_request.items() if key in request_ids}

    def take(self, request_ids: Sequence[str], counts: Sequence[int], draft_ids_T: torch.Tensor, vocab_size: int) -> torch.Tensor | None:
        """q of all drafts `[T, V]` float32, or None when none of them was sampled. Removes the entries of these requests."""
        found = [self._by_request.pop(key, None) for key in request_ids]
        if all(probs is None or count == 0 for probs, count in zip(found, counts, strict=True)):
            return None
        parts, start = [], 0
        for probs_KV, count in zip(found, counts, strict=True):
            if count:
                ids = draft_ids_T[start : start + count]
                parts.append(probs_KV[:count] if probs_KV is not None else _one_hot(ids, vocab_size))
            start += count
        return torch.cat(parts)


def _one_hot(ids_T: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """One-hot rows float32; a row of zeros for the id -1, so that nothing is taken from the target there."""
    rows_TV = torch.zeros((ids_T.shape[0], vocab_size), dtype=torch.float32, device=ids_T.device)
    ids_T1 = ids_T.to(torch.int64).unsqueeze(1)
    return rows_TV.scatter(1, ids_T1.clamp_min(0), (ids_T1 >= 0).float())
