"""MedusaHeads: draft heads as trainable tensors, teacher-forced.

`medusa_ppo.drafting` runs the same heads step by step.

Shape letters: B batch, T rows, N rows of any kind (all leading dims flattened), K heads, L residual
layers, D hidden, V vocabulary, H inner width of the hydra MLP or cell, F inner width of the feed-
forward layer, n pairs of a context, P pairs that rows share, A parts of an attention, w width of a
part. `...D` means any leading dims.

Head k (1..K) reads h_t and predicts x_{t+1+k}. What it computes, all without bias:

    medusa   f = h_t
    hydra    f = h_t + out[k] SiLU(in[k] [n(h_t); n(e(x_{t+1})); ...; n(e(x_{t+k}))])
    both     logits = lm_head f', with f' = f after L residual blocks f + SiLU(W f)

where n(v) = v / rms(v), so that the scale of embeddings doesn't matter.

With a context of n pairs (kind hydra), m_j = [n(h_j); n(e(x_{j+1}))], and one recurrent cell for
all heads instead of the MLPs:

    b   = h_t, and then for each layer of the context
          b + out sum_j a_j (value m_j)            a: softmax over the existing pairs
                                                   j = t-n+1 .. t of (query [n(b); n(e(x_{t+1}))])
                                                   (key m_j) / sqrt(w)
          b + feed_out SiLU(feed_in n(b))          if there is a feed-forward layer
    s_1 = n(SiLU(start n(b)     + token n(e(x_{t+1})) + copy_out copy_value c_1))
    s_k = n(SiLU(step s_{k-1}   + token n(e(x_{t+k})) + copy_out copy_value c_k))
    f_k = b + out s_k

The attention has A parts of equal width w. c_k is what `heads.copying` found in the text; heads
that don't copy have no such term. The blocks and every `out` start at zero, so every head starts as
lm_head. The actor's lm_head and embedding table are arguments of the calls, frozen and never copied
into the module; it holds trainable tensors only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from heads.copying import Text, copied, own_text
from heads.errors import CheckpointError, ConfigError
from heads.factored import FactoredLogits
from heads.heads_config import TEMPERATURES, HeadsConfig, context_prefix
from heads.targets import MISSING, condition_ids, context_rows, used_rows
from heads.vocabulary import WHOLE, Vocabulary

RMS_EPS = 1e-6
STACKED = {
    "lm_heads.{k}.weight": "lm_heads",
    "mlps.{k}.in.weight": "mlp_in",
    "mlps.{k}.out.weight": "mlp_out",
}
"""File key -> stacked parameter of all heads, in the file's order (the residual blocks come first).
"""
SHARED_PREFIXES = ("context", "copy", "cell")
"""Prefixes of file keys and parameters that all heads share."""
STARTS_AT_ZERO = ("mlp_out", "cell_out")
"""Parameters that must be zero for a head to equal lm_head, besides the blocks and the `out` of
each layer of the context.
"""
COPY_START = 0.5
"""Initial scale of the two products through which copied tokens enter the cell."""


def shared_parameters(config: HeadsConfig) -> dict[str, str]:
    """File key -> parameter that all heads share, in the file's order."""
    return {
        key: key.removesuffix(".weight").replace(".", "_")
        for key in config.tensor_shapes()
        if key.startswith(SHARED_PREFIXES)
    }


class Context(NamedTuple):
    """Pairs (h_j, x_{j+1}) that rows attend to. Created by `Context.of`.

    Attributes:
        hidden_PD: the states of the pairs.
        ids_P: int64, their tokens.
        places_Nn: int64, for each row the pairs at its last n positions, oldest first, its own
            last; MISSING where there is none.
    """

    hidden_PD: torch.Tensor
    ids_P: torch.Tensor
    places_Nn: torch.Tensor

    @classmethod
    def of(cls, rows_Nn: torch.Tensor, hidden_MD: torch.Tensor, ids_M: torch.Tensor) -> Context:
        """The pairs among M that `rows_Nn` (`heads.targets.context_rows`, or some of its rows)
        refers to.
        """
        used_P, places_Nn = used_rows(rows_Nn)
        return cls(hidden_MD[used_P], ids_M[used_P], places_Nn)


def _random(rows: int, columns: int) -> nn.Parameter:
    """A matrix that initially keeps the scale of its input."""
    return nn.Parameter(torch.randn(rows, columns) / columns**0.5)


def rms_normalise(values: torch.Tensor) -> torch.Tensor:
    """v / rms(v) over the last dim, in float32, returned in the dtype given."""
    wide = values.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + RMS_EPS)).to(values.dtype)


class MedusaHeads(nn.Module):
    """K draft heads of one kind; see the module's docstring for what each kind computes.

    Attributes:
        vocabulary: operations over the tokens of lm_head and tables.
        temperatures_K: divisors of each head's logits when drafts are sampled; not trained by
            gradients.
    """

    vocabulary: Vocabulary = WHOLE
    temperatures_K: torch.Tensor

    def __init__(self, config: HeadsConfig) -> None:
        """Zero-start heads; with `lm_head="own"` call `init_own_lm_heads` before use. Random parts
        use torch's global generator.
        """
        super().__init__()
        self.config = config
        self._table_rows: int | None = None  # `tables_of`
        K = config.num_heads
        D = config.hidden_size
        V = config.vocab_size
        # Not in state_dict: files have them only if they are not all 1 (`trainable_state`).
        self.register_buffer("temperatures_K", torch.ones(K), persistent=False)
        self.blocks = nn.ParameterList(
            [nn.Parameter(torch.zeros(K, D, D)) for _ in range(config.num_layers)]
        )
        if config.lm_head == "own":
            self.lm_heads = nn.Parameter(torch.zeros(K, V, D))
        H = config.inner_size
        if config.context:
            self._make_context()
            if config.copies:
                self._make_copying()
            self.cell_start = _random(H, D)
            self.cell_token = _random(H, D)
            self.cell_step = _random(H, H)
            self.cell_out = nn.Parameter(torch.zeros(D, H))
        elif config.kind == "hydra":
            # Head k reads k tokens more than h_t: the widths differ, so these can't be one stacked
            # tensor.
            self.mlp_in = nn.ParameterList([_random(H, D * (k + 2)) for k in range(K)])
            self.mlp_out = nn.Parameter(torch.zeros(K, D, H))

    def _make_context(self) -> None:
        config = self.config
        D = config.hidden_size
        F_ = D * config.feed_forward
        for layer in range(config.context_layers):
            name = context_prefix(layer).replace(".", "_")
            self.register_parameter(f"{name}_in", _random(3 * D, 2 * D))
            self.register_parameter(f"{name}_out", nn.Parameter(torch.zeros(D, D)))
            if F_:
                self.register_parameter(f"{name}_feed_in", _random(F_, D))
                self.register_parameter(f"{name}_feed_out", nn.Parameter(torch.zeros(D, F_)))

    def _make_copying(self) -> None:
        config = self.config
        D = config.hidden_size
        self.copy_query = _random(config.copy_width, config.copy_tokens * D)
        # Equal at the start, so that tokens find the same tokens before anything is learned.
        self.copy_key = nn.Parameter(self.copy_query.detach().clone())
        self.copy_none = nn.Parameter(torch.zeros(config.copy_parts))
        value = torch.randn(config.copy_rank, config.copy_parts * D) / D**0.5
        self.copy_value = nn.Parameter(COPY_START * value)
        out = torch.randn(config.inner_size, config.copy_rank) / config.copy_rank**0.5
        self.copy_out = nn.Parameter(COPY_START * out)

    @property
    def dtype(self) -> torch.dtype:
        return self.blocks[0].dtype

    @property
    def untrained(self) -> bool:
        """Whether they are untrained: every head equals lm_head, or its own copy of it."""
        outputs = [
            parameter
            for name, parameter in self.named_parameters()
            if name.startswith("blocks.")
            or name in STARTS_AT_ZERO
            or (name.startswith("context_") and name.endswith("_out"))
        ]
        return not any(bool(parameter.any()) for parameter in outputs)

    @torch.no_grad()
    def init_own_lm_heads(self, lm_head_VD: torch.Tensor) -> None:
        """Copy the actor's lm_head into every own one. Raises ConfigError if the heads share it
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
        text: Text | None = None,
        places: int | None = None,
    ) -> torch.Tensor:
        """What lm_head multiplies: hidden `...D` -> features `...KD`, in the heads' dtype.

        Args:
            hidden: h_t after the actor's last norm.
            condition: int64 `...K`, the tokens since h_t, oldest first
                (`heads.targets.condition_ids`); conditioned kinds only.
            embedding_VD: the actor's embedding table; kind hydra only.
            context: the pairs before, for each of the N rows; heads with a context only.
            text: what the N rows search; only for heads with copying. None: nothing is found.
            places: best places of the text that count (`heads.copying`); None: all of them.
        """
        base_ND = self._checked_hidden(hidden)
        features_NKD = base_ND.unsqueeze(1).expand(-1, self.config.num_heads, -1)
        if self.config.context:
            condition_NK = self._checked_condition(hidden, condition)
            table_VD = self._checked_embedding(embedding_VD)
            embedded = [self._embed(ids_N, table_VD) for ids_N in condition_NK.unbind(1)]
            context = self._checked_context(context, base_ND)
            for layer in range(self.config.context_layers):
                base_ND = self._with_context(layer, base_ND, embedded[0], context, table_VD)
            found_NKH = None
            if text is not None and self.config.copies:
                found_NKH = self._copied(text, table_VD, places)
            features_NKD = self._from_cell(base_ND, embedded, found_NKH)
        elif self.config.kind == "hydra":
            condition_NK = self._checked_condition(hidden, condition)
            table_VD = self._checked_embedding(embedding_VD)
            inputs = [
                rms_normalise(base_ND),
                *(self._embed(ids_N, table_VD) for ids_N in condition_NK.unbind(1)),
            ]
            # Unbound, since autograd would allocate zeros of the whole tensor for each selected
            # part.
            weights = zip(self.mlp_in, self.mlp_out.unbind(0), strict=True)
            mlps = [
                F.linear(F.silu(F.linear(torch.cat(inputs[: k + 2], -1), into)), out)
                for k, (into, out) in enumerate(weights)
            ]
            features_NKD = features_NKD + torch.stack(mlps, dim=1)
        for block_KDD in self.blocks:
            # One batched product for all heads.
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
        text: Text | None = None,
        places: int | None = None,
    ) -> FactoredLogits:
        """All logits in factored form, for the chunked losses. Arguments as in `forward`; leading
        dims become N.
        """
        features = self.features(
            hidden,
            condition=condition,
            embedding_VD=embedding_VD,
            context=context,
            text=text,
            places=places,
        )
        features_NKD = features.reshape(-1, *features.shape[-2:])
        return FactoredLogits(features_NKD, self._output_weight(lm_head_VD))

    def forward(
        self,
        hidden: torch.Tensor,
        lm_head_VD: torch.Tensor | None = None,
        *,
        condition: torch.Tensor | None = None,
        next_ids_BT: torch.Tensor | None = None,
        embedding_VD: torch.Tensor | None = None,
        context: Context | None = None,
        text: Text | None = None,
        places: int | None = None,
    ) -> torch.Tensor:
        """Teacher-forced logits: hidden `...D` -> `...KV` float32.

        Args:
            hidden: h_t after the actor's last norm.
            lm_head_VD: the actor's lm_head; needed when the heads share it.
            condition: int64 `...K`, the tokens since h_t (conditioned kinds), or instead
            next_ids_BT: int64, each row one sequence: the token that lm_head predicts from each
                h_t.
            embedding_VD: the actor's embedding table; kind hydra only.
            context: the pairs before each row (heads with a context); with `next_ids_BT` all of the
                row's own sequence.
            text, places: what copying searches; with `next_ids_BT` the row's own sequence.
        """
        if condition is None and next_ids_BT is not None and self.config.needs_embedding:
            # Every row of `next_ids_BT` is one sequence, so segments need not be distinguished
            # within it.
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
            if self.config.copies and text is None:
                text = own_text(next_ids_BT)
        factored = self.factored(
            hidden,
            lm_head_VD,
            condition=condition,
            embedding_VD=embedding_VD,
            context=context,
            text=text,
            places=places,
        )
        return factored.multiply_out().reshape(
            *hidden.shape[:-1], self.config.num_heads, self.config.vocab_size
        )

    # ---- parts

    def _with_context(
        self,
        layer: int,
        base_ND: torch.Tensor,
        embedded_ND: torch.Tensor,
        context: Context,
        table_VD: torch.Tensor,
    ) -> torch.Tensor:
        """`base` plus one context layer's attention over the pairs before it."""
        name = context_prefix(layer).replace(".", "_")
        # Queries, keys and values are in one tensor, D rows each.
        weight_in = self.get_parameter(f"{name}_in")
        D = self.config.hidden_size
        parts = self.config.context_parts
        pair_states_PD = rms_normalise(context.hidden_PD.to(self.dtype))
        pairs_P2D = torch.cat([pair_states_PD, self._embed(context.ids_P, table_VD)], -1)
        kept_P2D = F.linear(pairs_P2D, weight_in[D:])
        asked_N2D = torch.cat([rms_normalise(base_ND), embedded_ND], -1)
        query_NAw = F.linear(asked_N2D, weight_in[:D]).unflatten(-1, (parts, -1))
        # F.embedding, because its gradient is several times faster than that of indexing.
        kept_Nn2D = F.embedding(context.places_Nn.clamp_min(0), kept_P2D)
        key_NnAw, value_NnAw = kept_Nn2D.unflatten(-1, (2, parts, -1)).unbind(2)
        score_NAn = torch.einsum("naw,nmaw->nam", query_NAw, key_NnAw) / query_NAw.shape[-1] ** 0.5
        score_NAn = score_NAn.masked_fill((context.places_Nn == MISSING).unsqueeze(1), -torch.inf)
        # Every row has at least its own pair, so no softmax is empty.
        mixed_NAw = torch.einsum("nam,nmaw->naw", score_NAn.softmax(-1), value_NnAw)
        base_ND = base_ND + F.linear(mixed_NAw.flatten(1), self.get_parameter(f"{name}_out"))
        if not self.config.feed_forward:
            return base_ND
        inner_NF = F.silu(F.linear(rms_normalise(base_ND), self.get_parameter(f"{name}_feed_in")))
        return base_ND + F.linear(inner_NF, self.get_parameter(f"{name}_feed_out"))

    def _copied(self, text: Text, table_VD: torch.Tensor, places: int | None) -> torch.Tensor:
        """The result of copying, as input of the cell: `[N, K, H]`."""
        found_NKC = copied(
            text,
            lambda ids_N: self._embed(ids_N, table_VD),
            self.copy_query,
            self.copy_key,
            self.copy_none,
            self.copy_value,
            self.config.num_heads,
            places=places,
        )
        return F.linear(found_NKC, self.copy_out)

    def _from_cell(
        self,
        base_ND: torch.Tensor,
        embedded: list[torch.Tensor],
        found_NKH: torch.Tensor | None,
    ) -> torch.Tensor:
        inner_NH = F.linear(rms_normalise(base_ND), self.cell_start)
        states: list[torch.Tensor] = []
        for k, embedded_ND in enumerate(embedded):
            if states:
                inner_NH = F.linear(states[-1], self.cell_step)
            inner_NH = inner_NH + F.linear(embedded_ND, self.cell_token)
            if found_NKH is not None:
                inner_NH = inner_NH + found_NKH[:, k]
            states.append(rms_normalise(F.silu(inner_NH)))
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
            problem = "The hidden states don't have the width that the heads expect."
            do = "Use heads of this actor."
            raise ConfigError(problem, given=f"width {given}", expected=width, do=do)
        return hidden.reshape(-1, width).to(self.dtype)

    @contextlib.contextmanager
    def tables_of(self, tokens: int | None) -> Iterator[None]:
        """Within the block tables have only the rows of this many tokens, and ids index these;
        None: the whole vocabulary.
        """
        self._table_rows = tokens
        try:
            yield
        finally:
            self._table_rows = None

    def check_table(self, table_VD: torch.Tensor, name: str) -> None:
        """Raise ConfigError if a table of the actor has the wrong size for the heads."""
        expected = (self._table_rows or self.config.vocab_size, self.config.hidden_size)
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
        # The actor's tables belong to the loop's optimizer; heads must not send gradients into
        # them.
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
        shared = shared_parameters(self.config)
        return views | {
            name: getattr(self, attribute).detach() for name, attribute in shared.items()
        }

    def trainable_state(self, *, copied: bool = True) -> dict[str, torch.Tensor]:
        """A copy of all trainable tensors under the file's key names (stock vLLM's for kind
        medusa), and of temperatures that are not 1. With `copied=False` the tensors themselves, for
        immediate reading.
        """
        state = dict(self.trainable_views())
        if bool((self.temperatures_K != 1).any()):
            state[TEMPERATURES] = self.temperatures_K
        return {name: value.detach().clone() for name, value in state.items()} if copied else state

    @torch.no_grad()
    def load_trainable_state(self, state: dict[str, torch.Tensor]) -> None:
        """Copy `state` into the parameters in place; without temperatures these are 1. All must
        match exactly, or nothing is copied.
        """
        views = self.trainable_views() | (
            {TEMPERATURES: self.temperatures_K} if TEMPERATURES in state else {}
        )
        # Everything is checked before anything is copied, so that an engine can continue with the
        # old heads.
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
        # This also refuses NaN.
        if not bool((state.get(TEMPERATURES, self.temperatures_K) > 0).all()):
            given = str(state[TEMPERATURES].tolist())
            raise CheckpointError(
                "A draft temperature is not a number above 0.",
                given=given,
                do="Save the heads again.",
            )
        self.temperatures_K.fill_(1.0)
        for name, view in views.items():
            # Copied in place: optimizers and an engine's fused weights hold these very tensors.
            view.copy_(state[name])


def clip_per_head(named: dict[str, nn.Parameter], num_heads: int, clip_norm: float) -> torch.Tensor:
    """Scale each head's gradient to a Euclidean norm of at most `clip_norm`, independently of the
    other heads, and the gradient of the shared parameters likewise.

    Args:
        named: parameters of MedusaHeads: stacked `[K, ...]`, `mlp_in.{k}` of one head, or shared
            (`SHARED_PREFIXES`).

    Returns:
        Norm of each head's gradient before clipping, float32 `K`; one more if heads share
        parameters.
    """
    by_head: list[list[torch.Tensor]] = [[] for _ in range(num_heads)]
    shared: list[torch.Tensor] = []
    for name, parameter in named.items():
        if parameter.grad is None:
            continue
        if name.startswith(SHARED_PREFIXES):
            shared.append(parameter.grad)
        elif name.startswith("mlp_in."):
            by_head[int(name.split(".")[1])].append(parameter.grad)
        else:
            # Stacked: each head's part is a view, through which it is scaled below.
            for grads, grad in zip(by_head, parameter.grad, strict=True):
                grads.append(grad)
    by_head += [shared] if shared else []
    norms = [
        torch.stack([torch.linalg.vector_norm(g) for g in grads]).square().sum().sqrt()
        for grads in by_head
    ]
    for norm, grads in zip(norms, by_head, strict=True):
        # A head without a position in this step has a gradient of zero.
        scale = (clip_norm / (norm + 1e-12)).clamp(max=1.0)
        for grad in grads:
            grad.mul_(scale)
    return torch.stack(norms)
