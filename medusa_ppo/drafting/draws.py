"""Drafts from the heads, one after the other, and the draft probabilities that verification needs later.

Shape letters: B requests, K drafts of a step, T drafts of all requests one after the other, D hidden, N rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from heads.modules import MedusaHeads, rms_normalise
from medusa_ppo.drafting.draft_vocabulary import LINEAR, LM_HEAD, PACK, TokenMap, plain_linear, spread
from medusa_ppo.drafting.verify import invert_sum, uniform_numbers

EMBED = Callable[[torch.Tensor], torch.Tensor]
"""Ids int64 `[B]` -> rows `[B, D]` of the actor's embedding table."""
TRUNCATE = Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor | None], torch.Tensor]


class ServedHeads:
    """The heads as an engine asks them: the next one is told what was drafted before.

    Kinds medusa and markov read h_t alone: the trainer's form gives the features of all heads in one product, from the parameters as
    they are. One hydra head after the other asks for three small products; with few rows they cost more in packing and dispatch than in
    arithmetic, so they are packed once, when this is made. Where the CPU has no bfloat16 units, bfloat16 heads are packed as float32:
    emulated products cost as many times more as there are rows.
    """

    def __init__(self, heads: MedusaHeads, embed: EMBED | None = None, pack: PACK = plain_linear, dtype: torch.dtype | None = None) -> None:
        """
        Args:
            heads: what is packed of them is a copy of their values now.
            embed: the engine's own lookup, whatever shards the table; read by kind hydra only.
            pack: how a weight becomes a product.
            dtype: what packed products compute in; None: as the heads.
        """
        self.heads, self.config = heads, heads.config
        self._embed, self._dtype = embed, dtype or heads.dtype
        if self.config.kind == "hydra":

            def packed(weight: torch.Tensor) -> LINEAR:
                return pack(weight.detach().to(self._dtype))

            heads_K = range(self.config.num_heads)
            self._into, self._out = [packed(heads.mlp_in[k]) for k in heads_K], [packed(heads.mlp_out[k]) for k in heads_K]
            self._blocks = [[packed(block_KDD[k]) for block_KDD in heads.blocks] for k in heads_K]

    def known_ahead(self, hidden_BD: torch.Tensor, count: int, lm_head: LM_HEAD) -> torch.Tensor | None:
        """lm_head's part of the logits `[B, count, V]` of kinds whose features do not depend on drafted tokens; None for the others."""
        if self.config.kind == "hydra":
            return None
        features_BKD = self.heads.features(hidden_BD)[:, :count]
        if self.config.lm_head == "shared":
            logits_NV = lm_head(features_BKD.reshape(-1, features_BKD.shape[-1]))
            return logits_NV.view(features_BKD.shape[0], count, -1)
        return torch.stack([F.linear(features_BKD[:, k], self.heads.own_lm_head(k + 1)) for k in range(count)], dim=1)

    def start(self, hidden_BD: torch.Tensor) -> list[torch.Tensor]:
        """Kind hydra: h_t and n(h_t), each `[B, D]`; `features` adds the embeddings of the tokens since."""
        base_BD = hidden_BD.to(self._dtype)
        return [base_BD, rms_normalise(base_BD)]

    def features(self, state: list[torch.Tensor], k: int, last_ids_B: torch.Tensor) -> torch.Tensor:
        """Kind hydra: what lm_head reads for the head with index k (from 0), `BD` in the heads' dtype; ask in order, once each."""
        assert self._embed is not None, "hydra heads read embeddings"
        state.append(rms_normalise(self._embed(last_ids_B)).to(self._dtype))
        base_BD, *inputs = state
        features_BD = base_BD + self._out[k](F.silu(self._into[k](torch.cat(inputs, dim=-1))))
        for block in self._blocks[k]:
            features_BD = features_BD + F.silu(block(features_BD))
        return features_BD.to(self.heads.dtype)

    def logits(self, state: list[torch.Tensor], k: int, last_ids_B: torch.Tensor, lm_head: LM_HEAD) -> torch.Tensor:
        """Kind hydra: logits `[B, V]` of the head with index k."""
        features_BD = self.features(state, k, last_ids_B)
        return lm_head(features_BD) if self.config.lm_head == "shared" else F.linear(features_BD, self.heads.own_lm_head(k + 1))


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


class Drawing:
    """Turns the logits of one position after the other into draft ids: drawn at the draft temperature, or argmax without `sampling`.

    With a token map the logits are those of its tokens only; ids and probabilities that come out are of the whole vocabulary.
    """

    def __init__(
        self, sampling: RequestSampling | None, temperature: float, batch: int, count: int, ids_W: torch.Tensor | None, vocab_size: int
    ) -> None:
        self.ids_W, self.vocab_size, self.sampling = ids_W, vocab_size, sampling
        self.ids: list[torch.Tensor] = []
        self.probs: list[torch.Tensor] = []
        temperature_B = None if sampling is None else sampling.temperature_B
        self.sampled = sampling is not None and temperature_B is not None
        if sampling is not None and temperature_B is not None:
            self.uniforms_BK = uniform_numbers([count - 1] * batch, count, sampling.generators, temperature_B.device)
            greedy_B = temperature_B <= 0
            # Greedy requests count as temperature 1 in q.
            self.scale_B1 = (torch.where(greedy_B, 1.0, temperature_B) * temperature).reciprocal().unsqueeze(1)
            self.greedy_B = greedy_B if bool(greedy_B.any()) else None

    def choose(self, logits_BV: torch.Tensor) -> torch.Tensor:
        """Ids `[B]` of the next position."""
        if self.sampled:
            probs_BV = self._distribution(logits_BV)
            ids_B = draw(logits_BV, probs_BV, self.uniforms_BK[:, len(self.ids)], self.greedy_B)
            self.probs.append(probs_BV if self.ids_W is None else spread(probs_BV, self.ids_W, self.vocab_size))
        else:
            ids_B = logits_BV.argmax(-1)
        self.ids.append(ids_B if self.ids_W is None else self.ids_W[ids_B])
        return self.ids[-1]

    def _distribution(self, logits_BV: torch.Tensor) -> torch.Tensor:
        """q `[B, V]`: the head's distribution, cut as the request's own top-k and top-p are.

        Any q is lossless; cutting it as the target is cut only keeps it from drafting what must be refused.
        """
        sampling, scaled_BV = self.sampling, logits_BV.float() * self.scale_B1
        if sampling is not None and sampling.truncate is not None and (sampling.top_k_B is not None or sampling.top_p_B is not None):
            scaled_BV = sampling.truncate(scaled_BV, sampling.top_k_B, sampling.top_p_B)
        return scaled_BV.softmax(-1)

    def result(self) -> Draft:
        return Draft(torch.stack(self.ids, dim=1), torch.stack(self.probs, dim=1) if self.probs else None)


def draft_tokens(
    served: ServedHeads,
    hidden_BD: torch.Tensor,
    last_ids_B: torch.Tensor,
    count: int,
    lm_head: LM_HEAD,
    *,
    sampling: RequestSampling | None = None,
    draft_temperature: float = 1.0,
    token_map: TokenMap | None = None,
) -> Draft:
    """Draft `count` (1..K) tokens for each request.

    Args:
        hidden_BD: h_t of each request, the state from which its last token was sampled.
        last_ids_B: int64, that last token x_{t+1}; read by conditioned kinds only.
        lm_head: the engine's product; one call for all heads where the kind allows it.
        sampling: how the requests sample; None for one-hot drafts.
        token_map: draft from its tokens only; needs heads that share lm_head.
    """
    heads, ids_W = served.heads, None
    if token_map is not None and token_map.ids_W is not None:
        lm_head, ids_W = token_map.logits, token_map.ids_W
    drawing = Drawing(sampling, draft_temperature, hidden_BD.shape[0], count, ids_W, heads.config.vocab_size)
    ready_BKV = served.known_ahead(hidden_BD, count, lm_head)
    if heads.config.kind == "medusa" and not drawing.sampled and ready_BKV is not None:
        best_BK = ready_BKV.argmax(-1)
        return Draft(best_BK if ids_W is None else ids_W[best_BK])
    state = [] if ready_BKV is not None else served.start(hidden_BD)
    for k in range(count):
        logits_BV = served.logits(state, k, last_ids_B, lm_head) if ready_BKV is None else ready_BKV[:, k].float()
        if heads.config.kind == "markov":
            bias_Br = F.embedding(last_ids_B, heads.markov_in[k])
            markov_out_Vr = heads.markov_out[k] if ids_W is None else heads.markov_out[k][ids_W]
            logits_BV = logits_BV + F.linear(bias_Br, markov_out_Vr).float()
        last_ids_B = drawing.choose(logits_BV)
    return drawing.result()


def draw(logits_BV: torch.Tensor, probs_BV: torch.Tensor, uniform_B: torch.Tensor, greedy_B: torch.Tensor | None) -> torch.Tensor:
    """Draft ids `[B]`: drawn from probs; argmax of logits for greedy requests (None: there are none)."""
    drawn_B = invert_sum(probs_BV, uniform_B)
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
