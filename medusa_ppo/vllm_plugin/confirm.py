"""Checks of a swap. Before it: do the new heads fit? After it, the probe: compares what the engine
would draft now with a plain computation of the file's heads.

The checksum proves that the right bytes arrived, and the read-back that they are in the parameters.
The drafts could still come from something else: packed copies of the old heads, or heads in another
order. So the serving path drafts for a few fixed states, and the draft probabilities of each head
are compared with those of the file's values, multiplied here without any code of the drafting
path. Each head is given the tokens that were really drafted before it, so a near tie makes no
difference.

Shape letters: B fixed rows, D hidden, V vocabulary, K heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F

from heads.copying import SERVED_PLACES, Text, copied
from heads.errors import CheckpointError, SwapError
from heads.heads_config import TEMPERATURES, HeadsConfig, context_prefix
from heads.modules import MedusaHeads, rms_normalise
from heads.tensorfile import checksum, is_finite, load_state
from medusa_ppo.contract.status import Checked
from medusa_ppo.drafting.context import ContextHeads, Seen
from medusa_ppo.drafting.core import Drafted, DraftingCore, DraftSampling
from medusa_ppo.drafting.products import LM_HEAD, PIECE_BYTES, spread
from medusa_ppo.drafting.texts import TextRing

ROWS = 4
STAND_IN_ROWS = 256
"""Rows of the product that stands in for lm_head's."""
TOLERANCE, TOLERANCE_16_BIT, TOLERANCE_8_BIT = 1e-3, 3e-2, 1e-1
"""Largest allowed root mean square difference of the log-probabilities, relative to their standard
deviation. 16-bit products round at 0.4 %, 8-bit ones at 1 % (trained heads: at most 0.5 % and 3.4 %
of the standard deviation).
"""
LEAST_SPREAD = 0.1
LEAST_PROBABILITY = 1e-9
"""Smaller float32 probabilities are too inaccurate to compare."""


@dataclass(frozen=True)
class Plain:
    """The inputs of the plain product besides the file's tensors.

    Attributes:
        lm_head: the engine's product, rows `[B, D]` -> logits `[B, V]`.
        embed: the engine's lookup, ids `[B]` -> rows `[B, D]`; read for kind hydra only.
        dtype: dtype of the serving heads.
        draft_temperature: temperature of the served probabilities, besides each head's own.
        ids_W: draft vocabulary; None: the whole one.
        in_8_bits: the serving products are in 8 bits.
    """

    lm_head: Callable[[torch.Tensor], torch.Tensor]
    embed: Callable[[torch.Tensor], torch.Tensor] | None
    dtype: torch.dtype
    draft_temperature: float = 1.0
    ids_W: torch.Tensor | None = None
    in_8_bits: bool = False


def read_state(
    path: str | Path, what: str, checked: Checked | None = None
) -> tuple[dict[str, torch.Tensor], str]:
    """A file of weights, and its checksum. Raises SwapError if the file is damaged, holds NaN or
    infinity, or is not the file that was checked.

    Args:
        checked: result of an earlier check of the file; then only its bytes are confirmed here.
    """
    try:
        state = load_state(path, finite=checked is not None)
    except CheckpointError as error:
        given = error.problem if error.given is None else f"{error.problem} {error.given}"
        raise SwapError(
            f"The file with {what} can't be used; the old weights stay.",
            given=given,
            expected="a file of save_state",
            do=str(error.do),
        ) from error
    found = checksum(state)
    if checked is not None and found != checked.checksum:
        raise SwapError(
            "The file is not the one that was checked; the old weights stay.",
            given=str(path),
            expected="the same bytes",
            do="Look for a second writer, or for damage on the file's way to this node.",
        )
    return state, found


def check_finite(state: Mapping[str, torch.Tensor]) -> None:
    """Check tensors that changed their dtype: a large float32 may have become infinite. (read_state
    has checked the file.)
    """
    for name, tensor in state.items():
        if not is_finite(tensor):
            raise SwapError(
                "NaN or infinity in the new heads; the serving ones stay.",
                given=name,
                expected="finite numbers",
                do="Do not publish them.",
            )


def check_fit(
    serving: Mapping[str, tuple[int, ...]], state: Mapping[str, torch.Tensor], path: str
) -> None:
    """Raise SwapError unless the file's tensors have the names and shapes of the serving ones."""
    missing = sorted(set(serving) - set(state))
    unknown = sorted(set(state) - set(serving))
    wrong = [
        f"{name} {tuple(state[name].shape)} {state[name].dtype} instead of {tuple(shape)} floating"
        " point"
        for name, shape in serving.items()
        if name in state
        and (tuple(state[name].shape) != tuple(shape) or not state[name].is_floating_point())
    ]
    if not missing and not wrong and not bool((state.get(TEMPERATURES, torch.ones(1)) > 0).all()):
        wrong = [f"{TEMPERATURES} {state[TEMPERATURES].tolist()}, not above 0"]
    if missing or unknown or wrong:
        raise SwapError(
            "The tensors are not those of the serving heads, which stay.",
            given=f"{path}: missing {missing[:3]}, unknown {unknown[:3]}, not fitting {wrong[:3]}",
            expected=f"{len(serving)} tensors of the serving heads' sizes",
            do="Swap in heads of the same kind, K and sizes.",
        )


class ReadHeads(NamedTuple):
    """A file of heads, read and checked.

    Attributes:
        state: its tensors in the dtype that they serve in, on the host.
        checksum: of the file's tensors.
        sums: `sums_of_bits` of `state`, in the order of `MedusaHeads.trainable_views`.
    """

    state: dict[str, torch.Tensor]
    checksum: str
    sums: list[int]


class FixedInputs(NamedTuple):
    """The inputs of the probe: the last of n pairs in each row; n = 1 for heads without a context.

    Attributes:
        hidden_BnD, ids_Bn: states and tokens, oldest first.
        there_Bn: bool, row b lacks its b oldest pairs.
        text_BL: the text of each row, for heads that copy; it ends with the row's own token. It is
            short enough that all places searched count; otherwise rounding could decide which are
            the best, and a difference would not be a fault.
    """

    hidden_BnD: torch.Tensor
    ids_Bn: torch.Tensor
    there_Bn: torch.Tensor
    text_BL: torch.Tensor


def fixed_inputs(config: HeadsConfig, dtype: torch.dtype, device: torch.device) -> FixedInputs:
    """The same values in every call and on every rank."""
    generator = torch.Generator().manual_seed(0)
    pairs = max(config.context, 1)
    hidden_BnD = torch.randn(ROWS, pairs, config.hidden_size, generator=generator)
    ids_Bn = torch.randint(config.vocab_size, (ROWS, pairs), generator=generator)
    missing_B = torch.arange(ROWS).clamp_max(pairs - 1)
    there_Bn = torch.arange(pairs) >= missing_B.unsqueeze(1)
    length = config.num_heads + SERVED_PLACES
    text_BL = torch.randint(config.vocab_size, (ROWS, length), generator=generator)
    text_BL[:, -1] = ids_Bn[:, -1]
    return FixedInputs(
        hidden_BnD.to(device, dtype), ids_Bn.to(device), there_Bn.to(device), text_BL.to(device)
    )


def what_is_seen(core: DraftingCore, fixed: FixedInputs) -> Seen | None:
    """What the served heads attend to and find in their text; None for heads without a context."""
    if not isinstance(core.fused, ContextHeads):
        return None
    seen = core.fused.seen(fixed.hidden_BnD, fixed.ids_Bn, fixed.there_Bn)
    copier = core.copier
    if copier is None:
        return seen
    rows, length = fixed.text_BL.shape
    parts = core.config.copy_parts
    device = fixed.text_BL.device
    width = core.config.copy_width // parts
    ring = TextRing(rows, length, parts, width, copier.dtype, device)
    slots_N = torch.arange(rows, device=device).repeat_interleave(length)
    positions_N = torch.arange(length, device=device).repeat(rows)
    copier.write(ring, slots_N, positions_N, fixed.text_BL.flatten())
    newest_B = torch.full((rows,), length - 1, device=device)
    told_BKH = copier.find(ring, torch.arange(rows, device=device), newest_B)
    return replace(seen, told_BKH=told_BKH)


def fixed_sampling(count: int, device: torch.device) -> DraftSampling:
    """Sampling at temperature 1 from the middle of each distribution: it gives the same drafts
    every time, and keeps q.
    """
    return DraftSampling(
        torch.ones(ROWS, device=device),
        torch.full((ROWS, count), 0.5, dtype=torch.float64, device=device),
    )


def find_difference(
    draft: Drafted,
    state: Mapping[str, torch.Tensor],
    config: HeadsConfig,
    fixed: FixedInputs,
    plain: Plain,
) -> str:
    """Where the served drafts differ from those of `state`, in one sentence; empty if they agree.

    Every head is computed even after a difference: with tensor parallelism each product is a
    collective of all ranks.
    """
    assert draft.q, "the probe keeps probabilities"
    heads = _PlainHeads(state, config, fixed, plain)
    given = [fixed.ids_Bn[:, -1], *draft.ids_BK[:, :-1].unbind(1)]
    found = ""
    for k, ids_B in enumerate(given):
        logprobs_BV = heads.next(ids_B)
        served_BV = (
            draft.q[k]
            if plain.ids_W is None
            else spread(draft.q[k], plain.ids_W, config.vocab_size)
        )
        found = found or _difference(k, served_BV, logprobs_BV, plain)
    return found


def stand_in_lm_head(config: HeadsConfig, dtype: torch.dtype) -> LM_HEAD:
    """Fixed random rows in place of lm_head's, on the CPU: where only the heads are judged, their
    features may be compared by any product. The engine's own is busy with its steps.
    """
    generator = torch.Generator().manual_seed(1)
    rows = min(config.vocab_size, STAND_IN_ROWS)
    weight_WD = torch.randn(rows, config.hidden_size, generator=generator)
    weight_WD /= config.hidden_size**0.5
    return lambda features_ND: F.linear(features_ND.to(dtype).float(), weight_WD)


def given_tokens(config: HeadsConfig, fixed: FixedInputs, count: int) -> list[torch.Tensor]:
    """Tokens `[B]` that the first `count` heads are given, the last one of each row first."""
    generator = torch.Generator().manual_seed(2)
    others_KB = torch.randint(config.vocab_size, (count - 1, ROWS), generator=generator)
    return [fixed.ids_Bn[:, -1], *others_KB.to(fixed.ids_Bn.device).unbind(0)]


def plain_logprobs(
    state: Mapping[str, torch.Tensor],
    config: HeadsConfig,
    fixed: FixedInputs,
    given: list[torch.Tensor],
    plain: Plain,
) -> list[torch.Tensor]:
    """Log-probabilities `[B, V]` of each head after the tokens that it and those before it are
    given, from the file's tensors alone.
    """
    heads = _PlainHeads(state, config, fixed, plain)
    return [heads.next(ids_B) for ids_B in given]


def find_difference_of_logits(
    logits: list[torch.Tensor], expected: list[torch.Tensor], plain: Plain
) -> str:
    """Where served logits `[B, V]` of each head differ from `plain_logprobs`; empty if they
    agree.
    """
    found = ""
    for k, (logits_BV, logprobs_BV) in enumerate(zip(logits, expected, strict=True)):
        found = found or _difference(k, logits_BV.softmax(-1), logprobs_BV, plain)
    return found


def _difference(k: int, served_BV: torch.Tensor, logprobs_BV: torch.Tensor, plain: Plain) -> str:
    """Whether served probabilities differ from those of the file, in a sentence; else empty."""
    limit = (
        TOLERANCE
        if plain.dtype == torch.float32
        else TOLERANCE_8_BIT
        if plain.in_8_bits
        else TOLERANCE_16_BIT
    )
    apart = _apart(served_BV, logprobs_BV)
    if apart <= limit:  # False for NaN, which so counts as a difference.
        return ""
    return f"head {k + 1}: log-probabilities {apart:.1e} of their spread apart, {limit:.0e} at most"


class _PlainHeads:
    """The heads one after the other, from the tensors of `state` alone. What they share (context,
    copies, beginning of the cell) is computed once.

    The tensors are those that are served, rounded as they are, but products are in float32: then
    only what is served has rounding errors, and a CPU without 16-bit units is as fast.
    """

    def __init__(
        self,
        state: Mapping[str, torch.Tensor],
        config: HeadsConfig,
        fixed: FixedInputs,
        plain: Plain,
    ) -> None:
        self._state = state
        self._config = config
        self._fixed = fixed
        self._plain = plain
        self._device = fixed.hidden_BnD.device
        self._temperatures = (
            self._float32(state[TEMPERATURES]).tolist()
            if TEMPERATURES in state
            else [1.0] * config.num_heads
        )
        self._given = 0
        self._base_BD = fixed.hidden_BnD[:, -1].float()
        self._told_BKH: torch.Tensor | None = None
        if config.context:
            self._base_BD = self._with_context()
            self._inner_BH = self._times(rms_normalise(self._base_BD), state["cell.start.weight"])
            if config.copies:
                self._told_BKH = self._told()
        else:
            self._inputs = [rms_normalise(self._base_BD)]

    def next(self, ids_B: torch.Tensor) -> torch.Tensor:
        """Log-probabilities `[B, V]` of the next head, which is given these tokens after those of
        the heads before it.
        """
        k = self._given
        self._given += 1
        state, config, plain = self._state, self._config, self._plain
        features_BD = self._base_BD
        if config.context:
            features_BD = features_BD + self._out_of_cell(k, ids_B)
        elif config.kind == "hydra":
            self._inputs.append(self._embedded(ids_B))
            inner_BH = F.silu(
                self._times(torch.cat(self._inputs, dim=-1), state[f"mlps.{k}.in.weight"])
            )
            features_BD = features_BD + self._times(inner_BH, state[f"mlps.{k}.out.weight"])
        for layer in range(config.num_layers):
            weight_DD = state[f"blocks.{k}.layers.{layer}.weight"]
            features_BD = features_BD + F.silu(self._times(features_BD, weight_DD))
        logits_BV = (
            self._times(features_BD, state[f"lm_heads.{k}.weight"])
            if config.lm_head == "own"
            else plain.lm_head(features_BD.to(plain.dtype))
        ).float()
        if plain.ids_W is not None:
            kept_BV = torch.full_like(logits_BV, -torch.inf)
            logits_BV = kept_BV.index_copy(1, plain.ids_W, logits_BV[:, plain.ids_W])
        temperature = plain.draft_temperature * self._temperatures[k]
        return (logits_BV / temperature).log_softmax(-1)

    def _float32(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._device, self._plain.dtype).float()

    def _times(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """`rows @ weight.T`. A large weight in float32 would be gigabytes that no profile of
        memory has seen, so it is a piece at a time.
        """
        at_once = max(1, PIECE_BYTES // (4 * weight.shape[1]))
        parts = [F.linear(rows, self._float32(part)) for part in weight.split(at_once)]
        return torch.cat(parts, dim=-1)

    def _embedded(self, ids: torch.Tensor) -> torch.Tensor:
        assert self._plain.embed is not None, "hydra heads read embeddings"
        return rms_normalise(self._plain.embed(ids.flatten())).float().view(*ids.shape, -1)

    def _out_of_cell(self, k: int, ids_B: torch.Tensor) -> torch.Tensor:
        """What the cell adds for the head with index k, `[B, D]`."""
        state = self._state
        inner_BH = self._inner_BH
        if k:
            inner_BH = self._times(rms_normalise(F.silu(inner_BH)), state["cell.step.weight"])
        inner_BH = inner_BH + self._times(self._embedded(ids_B), state["cell.token.weight"])
        if self._told_BKH is not None:
            inner_BH = inner_BH + self._told_BKH[:, k]
        self._inner_BH = inner_BH
        return self._times(rms_normalise(F.silu(inner_BH)), state["cell.out.weight"])

    def _with_context(self) -> torch.Tensor:
        """h_t plus the output of its context layers, `[B, D]`."""
        config, fixed, state, times = self._config, self._fixed, self._state, self._times
        hidden_BnD = fixed.hidden_BnD.float()
        base_BD = hidden_BnD[:, -1]
        last_BD = self._embedded(fixed.ids_Bn[:, -1])
        pairs_Bnx = torch.cat([rms_normalise(hidden_BnD), self._embedded(fixed.ids_Bn)], dim=-1)
        for layer in range(config.context_layers):
            name = context_prefix(layer)
            query, key, value = state[f"{name}.in.weight"].chunk(3)
            asked_Bx = torch.cat([rms_normalise(base_BD), last_BD], dim=-1)
            query_BAw, key_BnAw, value_BnAw = (
                part.unflatten(-1, (config.context_parts, -1))
                for part in (times(asked_Bx, query), times(pairs_Bnx, key), times(pairs_Bnx, value))
            )
            score_BnA = (query_BAw.unsqueeze(1) * key_BnAw).sum(-1) / query_BAw.shape[-1] ** 0.5
            score_BAn = score_BnA.transpose(1, 2)
            share_BAn = score_BAn.masked_fill(~fixed.there_Bn.unsqueeze(1), -math.inf).softmax(-1)
            mixed_BAw = (share_BAn.unsqueeze(-1) * value_BnAw.transpose(1, 2)).sum(2)
            base_BD = base_BD + times(mixed_BAw.flatten(1), state[f"{name}.out.weight"])
            if config.feed_forward:
                inner_BF = F.silu(times(rms_normalise(base_BD), state[f"{name}.feed_in.weight"]))
                base_BD = base_BD + times(inner_BF, state[f"{name}.feed_out.weight"])
        return base_BD

    def _told(self) -> torch.Tensor:
        """What copying gives the cell for each head, `[B, K, H]`."""
        text_BL = self._fixed.text_BL
        rows, length = text_BL.shape
        rows_B = torch.arange(rows, device=text_BL.device)
        lasts_B = torch.full_like(rows_B, length - 1)
        text = Text.of(text_BL, torch.zeros_like(text_BL), rows_B, lasts_B)
        found_BKC = copied(
            text,
            self._embedded,
            self._float32(self._state["copy.query.weight"]),
            self._float32(self._state["copy.key.weight"]),
            self._float32(self._state["copy.none.weight"]),
            self._float32(self._state["copy.value.weight"]),
            self._config.num_heads,
        )
        return self._times(found_BKC, self._state["copy.out.weight"])


def _apart(served_BV: torch.Tensor, logprobs_BV: torch.Tensor) -> float:
    """Root mean square of the difference over the tokens that have a probability, relative to the
    standard deviation of the log-probabilities.

    A loop may forbid tokens by masking the actor's logits (verl does, beyond the tokenizer's
    vocabulary). Products with a copy of lm_head don't know of that, and a forbidden draft is just
    rejected, so only the other tokens are compared.
    """
    if not bool(torch.isfinite(served_BV).all()):
        return math.nan
    served_BV = served_BV.masked_fill(logprobs_BV == -torch.inf, 0.0)
    served_BV = served_BV / served_BV.sum(-1, keepdim=True)
    known_BV = logprobs_BV > math.log(LEAST_PROBABILITY)
    expected = logprobs_BV[known_BV]
    seen = served_BV[known_BV].log()
    spread = max(float(expected.std(correction=0)), LEAST_SPREAD)
    return float((seen - expected).square().mean().sqrt()) / spread


def fingerprint(heads: MedusaHeads) -> list[int]:
    """Checksums of the weights in memory, in the order of `heads.trainable_views()`. They show
    whether the right ones arrived, and later whether memory was thrown away.
    """
    return sums_of_bits(heads.trainable_views().values())


def find_damage(heads: MedusaHeads, sums: Sequence[int]) -> str:
    """Which weights in memory have another checksum than those in `sums`, in the order of
    `fingerprint`; empty if none has.
    """
    held = fingerprint(heads)
    return next(
        (
            f"{name} does not read back"
            for name, there, sent in zip(heads.trainable_views(), held, sums, strict=True)
            if there != sent
        ),
        "",
    )


def sums_of_bits(tensors: Iterable[torch.Tensor]) -> list[int]:
    """A sum over the bits of each tensor, computed on its device; only the sums are copied to the
    host, all at once.
    """
    return torch.stack([_sum_of_bits(tensor.reshape(-1)) for tensor in tensors]).tolist()


def _sum_of_bits(values_N: torch.Tensor) -> torch.Tensor:
    """Sums words of 8 bytes if the size allows, which is several times as fast; overflow wraps."""
    size = values_N.element_size()
    words = (
        torch.int64 if values_N.numel() * size % 8 == 0 else {2: torch.int16, 4: torch.int32}[size]
    )
    return values_N.view(words).sum(dtype=torch.int64)
