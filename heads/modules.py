"""MedusaHeads: the draft heads as trainable tensors, teacher-forced; `medusa_ppo.drafting` asks
them step by step.

Shape letters: B batch, T rows, N rows of any kind (all leading dims flattened), K heads, L residual
layers, D hidden, V vocabulary, H inner width of the hydra MLP or cell, r rank of the markov bias, n
pairs of a context, P pairs that rows share, A parts of the attention, w width of a part. `...D`
means any leading dims.

Head k (1..K) reads h_t and predicts x_{t+1+k}. What it computes, all without bias:

    medusa   f = h_t                                                      logits = lm_head f'
    markov   f = h_t                                                      logits = lm_head f' + out[k] in[k][x_{t+k}]
    hydra    f = h_t + out[k] SiLU(in[k] [n(h_t); n(e(x_{t+1})); ...; n(e(x_{t+k}))])     logits = lm_head f'
    f' = f after L residual blocks f + SiLU(W f);  n(v) = v / rms(v), so that the size of embeddings
    doesn't matter

With a context of n pairs (kind hydra), m_j = [n(h_j); n(e(x_{j+1}))], and one recurrent cell for
all heads in the place of the MLPs:

    b   = h_t + out sum_j a_j (value m_j)       a = softmax of (query m_t) (key m_j) / sqrt(w) over the j = t-n+1 .. t that are there
    s_1 = n(SiLU(start n(b) + token n(e(x_{t+1}))))       s_k = n(SiLU(step s_{k-1} + token n(e(x_{t+k}))))       f_k = b + out s_k

The attention has A parts of equal width w. The blocks and every `out` start at zero, so every head
starts as lm_head. The actor's lm_head and embedding table are arguments of the calls, frozen and
never copied into the module; it holds trainable tensors only.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from heads.errors import CheckpointError, ConfigError
from heads.heads_config import TEMPERATURES, HeadsConfig
from heads.targets import MISSING, condition_ids, context_rows, used_rows
from heads.vocabulary import WHOLE, Vocabulary

RMS_EPS = 1e-6
STACKED = {
    "lm_heads.{k}.weight": "lm_heads",
    "markov.{k}.in.weight": "markov_in",
    "markov.{k}.out.weight": "markov_out",
    "mlps.{k}.in.weight": "mlp_in",
    "mlps.{k}.out.weight": "mlp_out",
}
"""File key -> parameter of all heads, in the file's order (the residual blocks come first)."""
SHARED = {
    "context.in.weight": "context_in",
    "context.out.weight": "context_out",
    "cell.start.weight": "cell_start",
    "cell.token.weight": "cell_token",
    "cell.step.weight": "cell_step",
    "cell.out.weight": "cell_out",
}
"""File key -> parameter that all heads have in common, in the file's order (after those of the
heads).
"""
STARTS_AT_ZERO = ("markov_out", "mlp_out", "context_out", "cell_out")


class Context(NamedTuple):
    """Pairs (h_j, x_{j+1}) that rows attend to; `Context.of` makes it.

    Attributes:
        hidden_PD: the states of the pairs.
        ids_P: int64, their tokens.
        places_Nn: int64, where the pairs at each row's last n positions stand among them, oldest
            first, its own last; MISSING: nowhere.
    """

    hidden_PD: torch.Tensor
    ids_P: torch.Tensor
    places_Nn: torch.Tensor

    @classmethod
    def of(cls, rows_Nn: torch.Tensor, hidden_MD: torch.Tensor, ids_M: torch.Tensor) -> Context:
        """The pairs that `rows_Nn` (`heads.targets.context_rows`, or some of its rows) names among
        M.
        """
        used_P, places_Nn = used_rows(rows_Nn)
        return cls(hidden_MD[used_P], ids_M[used_P], places_Nn)


class FactoredLogits(NamedTuple):
    """Logits of N rows and K heads, not multiplied out: logits[n, k] = weight[k] features[n, k] +
    bias_weight[k] bias[n, k].

    Attributes:
        features_NKD: output of the residual blocks.
        weight: the actor's lm_head `VD`, or own ones `KVD`.
        bias_NKr: embedding of the token before (markov), else None.
        bias_weight_KVr: its output table (markov), else None.
    """

    features_NKD: torch.Tensor
    weight: torch.Tensor
    bias_NKr: torch.Tensor | None = None
    bias_weight_KVr: torch.Tensor | None = None

    def head_weight(self, head: int) -> torch.Tensor:
        """lm_head `VD` of the head with index `head` (from 0)."""
        return self.weight if self.weight.dim() == 2 else self.weight[head]

    def multiply_out(self) -> torch.Tensor:
        """Plain logits_NKV in float32; for references and small batches."""
        return torch.stack(
            [head_logits(self, head, slice(None)) for head in range(self.features_NKD.shape[1])],
            dim=1,
        )


def head_logits(factored: FactoredLogits, head: int, rows: slice) -> torch.Tensor:
    """logits_NV of one head (index from 0) for some rows: product in the lm_head's dtype, result in
    float32.
    """
    weight_VD = factored.head_weight(head)
    logits_NV = F.linear(factored.features_NKD[rows, head].to(weight_VD.dtype), weight_VD).float()
    if factored.bias_NKr is not None and factored.bias_weight_KVr is not None:
        out_Vr = factored.bias_weight_KVr[head]
        logits_NV = (
            logits_NV + F.linear(factored.bias_NKr[rows, head].to(out_Vr.dtype), out_Vr).float()
        )
    return logits_NV


def rms_normalise(values: torch.Tensor) -> torch.Tensor:
    """v / rms(v) over the last dim, in float32, returned in the dtype given."""
    wide = values.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + RMS_EPS)).to(values.dtype)


class MedusaHeads(nn.Module):
    """K draft heads of one kind; see the module's docstring for what each kind computes.

    Attributes:
        vocabulary: where the tokens of lm_head and tables are; `heads.parallel` replaces it.
        temperatures_K: what the logits of each head are divided by when drafts are sampled; not
            trained by gradients.
    """

    vocabulary: Vocabulary = WHOLE
    temperatures_K: torch.Tensor

    def __init__(self, config: HeadsConfig) -> None:
        """Zero-start heads; with `lm_head="own"` call `init_own_lm_heads` before use. Random parts
        use torch's global generator.
        """
        super().__init__()
        self.config = config
        K = config.num_heads
        D = config.hidden_size
        V = config.vocab_size
        self.register_buffer("temperatures_K", torch.ones(K), persistent=False)
        self.blocks = nn.ParameterList(
            [nn.Parameter(torch.zeros(K, D, D)) for _ in range(config.num_layers)]
        )
        if config.lm_head == "own":
            self.lm_heads = nn.Parameter(torch.zeros(K, V, D))
        if config.kind == "markov":
            self.markov_in = nn.Parameter(torch.randn(K, V, config.rank) / config.rank**0.5)
            self.markov_out = nn.Parameter(torch.zeros(K, V, config.rank))
        H = D * config.mlp_ratio
        if config.context:
            self.context_in = nn.Parameter(torch.randn(3 * D, 2 * D) / (2 * D) ** 0.5)
            self.context_out = nn.Parameter(torch.zeros(D, D))
            self.cell_start, self.cell_token = (
                nn.Parameter(torch.randn(H, D) / D**0.5) for _ in range(2)
            )
            self.cell_step = nn.Parameter(torch.randn(H, H) / H**0.5)
            self.cell_out = nn.Parameter(torch.zeros(D, H))
        elif config.kind == "hydra":
            self.mlp_in = nn.ParameterList(
                [nn.Parameter(torch.randn(H, D * (k + 2)) / (D * (k + 2)) ** 0.5) for k in range(K)]
            )
            self.mlp_out = nn.Parameter(torch.zeros(K, D, H))

    @property
    def dtype(self) -> torch.dtype:
        return self.blocks[0].dtype

    @property
    def untrained(self) -> bool:
        """They stand where they start: every head equals lm_head (its own one too, if that is what
        it was set to).
        """
        outputs = [
            *self.blocks,
            *(getattr(self, name) for name in STARTS_AT_ZERO if hasattr(self, name)),
        ]
        return not any(bool(parameter.any()) for parameter in outputs)

    @torch.no_grad()
    def init_own_lm_heads(self, lm_head_VD: torch.Tensor) -> None:
        """Copy the actor's lm_head into every own one. ConfigError when the heads share it
        instead.
        """
        own_KVD = self._own_lm_heads()
        self.check_table(lm_head_VD, "lm_head")
        own_KVD.copy_(lm_head_VD.expand_as(own_KVD))

    def own_lm_head(self, k: int) -> torch.Tensor:
        """The trainable lm_head `VD` of head k (1..K)."""
        return self._own_lm_heads()[k - 1]

    def features(
        self,
        hidden: torch.Tensor,
        *,
        condition: torch.Tensor | None = None,
        embedding_VD: torch.Tensor | None = None,
        context: Context | None = None,
    ) -> torch.Tensor:
        """What lm_head reads, before the product: hidden `...D` -> features `...KD`, in the heads'
        dtype.

        Args:
            hidden: h_t after the actor's last norm.
            condition: int64 `...K`, the tokens since h_t, oldest first
                (`heads.targets.condition_ids`); conditioned kinds only.
            embedding_VD: the actor's embedding table; kind hydra only.
            context: the pairs before, for each of the N rows; heads with a context only.
        """
        base_ND = self._checked_hidden(hidden)
        features_NKD = base_ND.unsqueeze(1).expand(-1, self.config.num_heads, -1)
        if self.config.context:
            condition_NK = self._checked_condition(hidden, condition)
            table_VD = self._checked_embedding(embedding_VD)
            embedded = [self._embed(ids_N, table_VD) for ids_N in condition_NK.unbind(1)]
            base_ND = self._with_context(
                base_ND, embedded[0], self._checked_context(context, base_ND), table_VD
            )
            features_NKD = self._from_cell(base_ND, embedded)
        elif self.config.kind == "hydra":
            condition_NK = self._checked_condition(hidden, condition)
            table_VD = self._checked_embedding(embedding_VD)
            inputs = [
                rms_normalise(base_ND),
                *(self._embed(ids_N, table_VD) for ids_N in condition_NK.unbind(1)),
            ]
            # Unbound: autograd would fill zeros of the whole tensor for each part that is selected.
            weights = zip(self.mlp_in, self.mlp_out.unbind(0), strict=True)
            mlps = [
                F.linear(F.silu(F.linear(torch.cat(inputs[: k + 2], -1), into)), out)
                for k, (into, out) in enumerate(weights)
            ]
            features_NKD = features_NKD + torch.stack(mlps, dim=1)
        for block_KDD in self.blocks:
            features_NKD = features_NKD + F.silu(
                torch.einsum("nki,koi->nko", features_NKD, block_KDD)
            )
        return features_NKD.reshape(
            *hidden.shape[:-1], self.config.num_heads, self.config.hidden_size
        )

    def factored(
        self,
        hidden: torch.Tensor,
        lm_head_VD: torch.Tensor | None = None,
        *,
        condition: torch.Tensor | None = None,
        embedding_VD: torch.Tensor | None = None,
        context: Context | None = None,
    ) -> FactoredLogits:
        """All logits in factored form, which the chunked losses take. Arguments as in `forward`;
        leading dims become N.
        """
        features = self.features(
            hidden, condition=condition, embedding_VD=embedding_VD, context=context
        )
        features_NKD = features.reshape(-1, *features.shape[-2:])
        weight = self._output_weight(lm_head_VD)
        if self.config.kind != "markov":
            return FactoredLogits(features_NKD, weight)
        ids_and_tables = zip(
            self._checked_condition(hidden, condition).unbind(1),
            self.markov_in.unbind(0),
            strict=True,
        )
        bias_NKr = torch.stack(
            [self.vocabulary.look_up(ids_N, table_Vr) for ids_N, table_Vr in ids_and_tables], dim=1
        )
        return FactoredLogits(features_NKD, weight, bias_NKr, self.markov_out)

    def forward(
        self,
        hidden: torch.Tensor,
        lm_head_VD: torch.Tensor | None = None,
        *,
        condition: torch.Tensor | None = None,
        next_ids_BT: torch.Tensor | None = None,
        embedding_VD: torch.Tensor | None = None,
        context: Context | None = None,
    ) -> torch.Tensor:
        """Teacher-forced logits: hidden `...D` -> `...KV` float32.

        Args:
            hidden: h_t after the actor's last norm.
            lm_head_VD: the actor's lm_head; needed when the heads share it.
            condition: int64 `...K`, the tokens since h_t (conditioned kinds), or instead
            next_ids_BT: int64, one row of it one sequence: the token that lm_head predicts from
                each h_t.
            embedding_VD: the actor's embedding table; kind hydra only.
            context: the pairs before each row (heads with a context); with `next_ids_BT` all of the
                row's own sequence.
        """
        if condition is None and next_ids_BT is not None and self.config.conditioned:
            condition = condition_ids(
                next_ids_BT, torch.zeros_like(next_ids_BT), self.config.num_heads
            )
            if self.config.context:
                segment_M = (
                    torch.arange(next_ids_BT.numel(), device=next_ids_BT.device)
                    // next_ids_BT.shape[-1]
                )
                context = Context.of(
                    context_rows(segment_M, self.config.context),
                    hidden.flatten(0, -2),
                    next_ids_BT.flatten(),
                )
        factored = self.factored(
            hidden, lm_head_VD, condition=condition, embedding_VD=embedding_VD, context=context
        )
        return factored.multiply_out().reshape(
            *hidden.shape[:-1], self.config.num_heads, self.config.vocab_size
        )

    # ---- parts

    def _with_context(
        self,
        base_ND: torch.Tensor,
        embedded_ND: torch.Tensor,
        context: Context,
        table_VD: torch.Tensor,
    ) -> torch.Tensor:
        """h_t and what the pairs before it say."""
        D = self.config.hidden_size
        parts = self.config.context_parts
        pairs_P2D = torch.cat(
            [rms_normalise(context.hidden_PD.to(self.dtype)), self._embed(context.ids_P, table_VD)],
            -1,
        )
        kept_P2D = F.linear(pairs_P2D, self.context_in[D:])
        query_NAw = F.linear(
            torch.cat([rms_normalise(base_ND), embedded_ND], -1), self.context_in[:D]
        ).unflatten(-1, (parts, -1))
        # Looked up as an embedding is: its gradient is added up several times as fast as that of an
        # index.
        key_NnAw, value_NnAw = (
            F.embedding(context.places_Nn.clamp_min(0), kept_P2D)
            .unflatten(-1, (2, parts, -1))
            .unbind(2)
        )
        score_NAn = torch.einsum("naw,nmaw->nam", query_NAw, key_NnAw) / query_NAw.shape[-1] ** 0.5
        score_NAn = score_NAn.masked_fill((context.places_Nn == MISSING).unsqueeze(1), -torch.inf)
        mixed_NAw = torch.einsum("nam,nmaw->naw", score_NAn.softmax(-1), value_NnAw)
        return base_ND + F.linear(mixed_NAw.flatten(1), self.context_out)

    def _from_cell(self, base_ND: torch.Tensor, embedded: list[torch.Tensor]) -> torch.Tensor:
        inner_NH = F.linear(rms_normalise(base_ND), self.cell_start)
        states: list[torch.Tensor] = []
        for embedded_ND in embedded:
            if states:
                inner_NH = F.linear(states[-1], self.cell_step)
            states.append(rms_normalise(F.silu(inner_NH + F.linear(embedded_ND, self.cell_token))))
        return base_ND.unsqueeze(1) + F.linear(torch.stack(states, dim=1), self.cell_out)

    def _embed(self, ids_N: torch.Tensor, table_VD: torch.Tensor) -> torch.Tensor:
        return rms_normalise(self.vocabulary.look_up(ids_N, table_VD)).to(self.dtype)

    def _own_lm_heads(self) -> torch.Tensor:
        if self.config.lm_head != "own":
            problem = "These heads share the actor's lm_head."
            raise ConfigError(
                problem, given="lm_head=shared", expected="lm_head=own", do="Use the actor's."
            )
        return self.lm_heads

    def _output_weight(self, lm_head_VD: torch.Tensor | None) -> torch.Tensor:
        if self.config.lm_head == "own":
            return self.lm_heads
        return self._checked_table(lm_head_VD, "lm_head", "These heads share the actor's lm_head.")

    def _checked_hidden(self, hidden: torch.Tensor) -> torch.Tensor:
        given = hidden.shape[-1]
        width = self.config.hidden_size
        if given != width:
            problem = "The hidden states do not fit the heads."
            do = "Use heads of this actor."
            raise ConfigError(problem, given=f"width {given}", expected=width, do=do)
        return hidden.reshape(-1, width).to(self.dtype)

    def check_table(self, table_VD: torch.Tensor, name: str) -> None:
        """ConfigError when a table of the actor's is not of the size that the heads were made
        for.
        """
        expected = (self.config.vocab_size, self.config.hidden_size)
        if tuple(table_VD.shape) != expected:
            problem = f"The {name} does not fit the heads."
            do = "Use heads of this actor."
            raise ConfigError(problem, given=tuple(table_VD.shape), expected=expected, do=do)

    def _checked_embedding(self, embedding_VD: torch.Tensor | None) -> torch.Tensor:
        return self._checked_table(embedding_VD, "embedding table", "Hydra heads read embeddings.")

    def _checked_table(self, table_VD: torch.Tensor | None, name: str, why: str) -> torch.Tensor:
        if table_VD is None:
            raise ConfigError(
                why,
                given=f"no {name}",
                expected=f"the actor's {name}",
                do=f"Pass the actor's {name}.",
            )
        self.check_table(table_VD, name)
        return table_VD.detach()

    def _checked_condition(
        self, hidden: torch.Tensor, condition: torch.Tensor | None
    ) -> torch.Tensor:
        """The ids as `NK`."""
        expected = (*hidden.shape[:-1], self.config.num_heads)
        if condition is None or tuple(condition.shape) != expected:
            raise ConfigError(
                f"{self.config.kind} heads read the tokens since h_t.",
                given="none" if condition is None else tuple(condition.shape),
                expected=f"ids of shape {expected}",
                do="Pass heads.targets.condition_ids(...).",
            )
        return condition.reshape(-1, self.config.num_heads)

    def _checked_context(self, context: Context | None, base_ND: torch.Tensor) -> Context:
        expected = (base_ND.shape[0], self.config.context)
        given = None if context is None else tuple(context.places_Nn.shape)
        if context is None or given != expected:
            do = "Pass a Context of heads.targets.context_rows(...)."
            raise ConfigError(
                "These heads read the pairs before h_t.",
                given=given,
                expected=f"places of shape {expected}",
                do=do,
            )
        return context

    # ---- state in the file's key names

    def trainable_views(self) -> dict[str, torch.Tensor]:
        """File key -> view of the parameter it lives in; the keys and their order are those of
        `config.tensor_shapes()`.
        """
        tables = {
            name: getattr(self, attribute)
            for name, attribute in STACKED.items()
            if hasattr(self, attribute)
        }
        views: dict[str, torch.Tensor] = {}
        for k in range(self.config.num_heads):
            views |= {
                f"blocks.{k}.layers.{layer}.weight": block_KDD.detach()[k]
                for layer, block_KDD in enumerate(self.blocks)
            }
            views |= {name.format(k=k): table[k].detach() for name, table in tables.items()}
        return views | {
            name: getattr(self, attribute).detach()
            for name, attribute in SHARED.items()
            if hasattr(self, attribute)
        }

    def trainable_state(self) -> dict[str, torch.Tensor]:
        """A copy of all trainable tensors under the file's key names (stock vLLM's for kind
        medusa), and of temperatures that are not 1.
        """
        state = {name: view.clone() for name, view in self.trainable_views().items()}
        return state | (
            {TEMPERATURES: self.temperatures_K.clone()}
            if bool((self.temperatures_K != 1).any())
            else {}
        )

    @torch.no_grad()
    def load_trainable_state(self, state: dict[str, torch.Tensor]) -> None:
        """Copy `state` into the parameters in place; without temperatures these are 1. All must
        match exactly, or nothing is copied.
        """
        views = self.trainable_views() | (
            {TEMPERATURES: self.temperatures_K} if TEMPERATURES in state else {}
        )
        wrong = sorted(set(views) ^ set(state)) or [
            name
            for name, view in views.items()
            if view.shape != state[name].shape or view.dtype != state[name].dtype
        ]
        if wrong:
            name = wrong[0]
            given = f"{tuple(state[name].shape)} {state[name].dtype}" if name in state else "absent"
            expected = (
                f"{tuple(views[name].shape)} {views[name].dtype}" if name in views else "absent"
            )
            problem = f"The tensor {name} does not fit these heads ({len(wrong)} do not)."
            do = "Load a state of the same kind, size and dtype."
            raise CheckpointError(problem, given=given, expected=expected, do=do)
        if not bool((state.get(TEMPERATURES, self.temperatures_K) > 0).all()):
            given = str(state[TEMPERATURES].tolist())
            raise CheckpointError(
                "A draft temperature is no number above 0.", given=given, do="Save the heads again."
            )
        self.temperatures_K.fill_(1.0)
        for name, view in views.items():
            view.copy_(state[name])


def clip_per_head(named: dict[str, nn.Parameter], num_heads: int, clip_norm: float) -> torch.Tensor:
    """Scale each head's gradient to at most `clip_norm` (Euclidean), whatever the other heads' are;
    and that of what they share.

    Args:
        named: parameters of MedusaHeads: stacked `[K, ...]`, `mlp_in.{k}` of one head, or in common
            (`SHARED`).

    Returns:
        Norm of each head's gradient before clipping, float32 `K`; one more where heads share
        something.
    """
    by_head: list[list[torch.Tensor]] = [[] for _ in range(num_heads)]
    shared: list[torch.Tensor] = []
    for name, parameter in named.items():
        if parameter.grad is None:
            continue
        if name in SHARED.values():
            shared.append(parameter.grad)
        elif name.startswith("mlp_in."):
            by_head[int(name.split(".")[1])].append(parameter.grad)
        else:
            for grads, grad in zip(by_head, parameter.grad, strict=True):
                grads.append(grad)
    by_head += [shared] if shared else []
    norms = [
        torch.stack([torch.linalg.vector_norm(g) for g in grads]).square().sum().sqrt()
        for grads in by_head
    ]
    for norm, grads in zip(norms, by_head, strict=True):
        scale = (clip_norm / (norm + 1e-12)).clamp(max=1.0)
        for grad in grads:
            grad.mul_(scale)
    return torch.stack(norms)
