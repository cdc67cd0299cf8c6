"""Losses of the draft heads: chunked ones whose memory does not grow with rows x vocabulary, and
plain references.

Shape letters: N rows, M rows of the batch they were taken from, K heads, D hidden, V vocabulary, C
rows of one chunk.

For every loss here the gradient of one row and head with respect to its logits has the form  c * (q
- target),  where q is the head's softmax: cross-entropy (c = 1, target one-hot), total variation on
on-policy tokens (c = q(y)/p(y) where q(y) < p(y), else 0), their mix, and KL to the actor's own
distribution (c = 1, target p); exact total variation is similar. So the chunked form computes the
gradient of a chunk in the forward pass, while the chunk's logits still exist, and never holds more
than one chunk of them. Softmax, logarithms and sums are float32. Each head has its own loss;
callers add them up. The actor's lm_head never gets a gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from heads.errors import ConfigError
from heads.factored import FactoredLogits, head_logits
from heads.vocabulary import WHOLE, Vocabulary

# Warm-up steps of a named loss without a gradient far from its optimum.
WARM_UP_STEPS = 60

# In mixed losses, cross-entropy or KL acts where total variation has no gradient yet.
# (ce, tv, kl, exact_tv)
NAMED_LOSSES = {
    "ce": (1.0, 0.0, 0.0, 0.0),
    "tv": (0.0, 1.0, 0.0, 0.0),
    "ce_tv": (0.1, 1.0, 0.0, 0.0),
    "kl": (0.0, 0.0, 1.0, 0.0),
    "kl_tv": (0.0, 0.0, 0.1, 1.0),
}


PIECE = 1 << 18
"""Number of float32 logits (1 MiB) whose losses and gradients a CPU computes together."""


@dataclass(frozen=True)
class LossConfig:
    """What the heads minimise, per position: a sum of four losses; a weighted mean over the
    positions of each head.

    Attributes:
        ce: weight of cross-entropy on the rollout's token.
        tv: weight of 1 - min(1, q(y)/p(y)), whose mean over on-policy tokens is the total variation
            of p and q.
        kl: weight of KL(p || q) against the actor's own distribution.
        exact_tv: weight of 1 - sum min(p, q) against the actor's own distribution: what `tv`
            estimates from one token.
        warm_up_steps: optimizer steps of plain cross-entropy before this loss begins. Total
            variation alone has almost no gradient where q(y) is far below p(y), which is where
            heads that start as lm_head begin.
    """

    ce: float = 1.0
    tv: float = 0.0
    kl: float = 0.0
    exact_tv: float = 0.0
    warm_up_steps: int = 0

    def __post_init__(self) -> None:
        weights = (self.ce, self.tv, self.kl, self.exact_tv)
        if min(weights) < 0 or max(weights) == 0:
            raise ConfigError(
                "A loss needs a positive weight.",
                given=weights,
                expected=">= 0, one of them > 0",
                do="Correct the weights.",
            )

    def at(self, step: int) -> LossConfig:
        """The loss of an optimizer step (from 0): cross-entropy while warming up."""
        return LossConfig() if step < self.warm_up_steps else self

    @property
    def needs_teacher(self) -> bool:
        """Whether the loss needs the actor's own distribution."""
        return self.kl > 0 or self.exact_tv > 0

    @classmethod
    def named(cls, name: str) -> LossConfig:
        """`ce`, `tv`, `ce_tv`, `kl` or `kl_tv`, as configurations and the command line name
        them.
        """
        if name not in NAMED_LOSSES:
            raise ConfigError(
                "Unknown loss.",
                given=name,
                expected=" | ".join(NAMED_LOSSES),
                do="Choose one of these.",
            )
        ce, tv, kl, exact_tv = NAMED_LOSSES[name]
        return cls(ce, tv, kl, exact_tv, WARM_UP_STEPS if ce == kl == 0 else 0)


class Teacher(NamedTuple):
    """The actor's own distribution of every target, in factored form: softmax(lm_head
    hidden[rows[n, k]] / temperature), cut.

    Attributes:
        hidden_MD: the actor's hidden states of the whole batch.
        rows_NK: int64, for row n and head k the row of `hidden_MD` that predicts the target
            (`heads.targets.head_teacher_rows`).
        lm_head_VD: the actor's lm_head.
        temperature, top_k, top_p: how the rollouts were sampled.
        lse_M: if lm_head_VD has only some tokens' rows, the log of the sum over all tokens, by row
            of `hidden_MD` (`known_lse`): p is then normalised over all tokens and sums to less than
            1.
    """

    hidden_MD: torch.Tensor
    rows_NK: torch.Tensor
    lm_head_VD: torch.Tensor
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    lse_M: torch.Tensor | None = None

    def logprobs(self, rows_C: torch.Tensor, vocabulary: Vocabulary = WHOLE) -> torch.Tensor:
        """log p at rows of `hidden_MD`, float32 `CV`."""
        hidden_CD = self.hidden_MD[rows_C].to(self.lm_head_VD.dtype)
        logits_CV = F.linear(hidden_CD, self.lm_head_VD).float() / self.temperature
        logits_CV = vocabulary.truncate(logits_CV, self.top_k, self.top_p)
        if self.lse_M is None:
            return vocabulary.log_softmax(logits_CV)
        # This comes from the engine's log-prob and our logits. If the engine's logits differ
        # (rounding, an older policy), the sum over all tokens could be below that over some.
        lse_C1 = torch.maximum(self.lse_M[rows_C].unsqueeze(1), vocabulary.logsumexp(logits_CV))
        return logits_CV.sub_(lse_C1)

    def of_chunk(
        self, rows: slice, vocabulary: Vocabulary = WHOLE
    ) -> Callable[[int, slice], torch.Tensor]:
        """log p of the targets of each head (index from 0), for a piece of a chunk; each is yielded
        once, and the caller may overwrite it. Neighbours share most of their rows, which are
        computed once.
        """
        rows_CK = self.rows_NK[rows]
        used_U, places_CK = rows_CK.unique(return_inverse=True)
        # Few rows are shared: computing head by head avoids one large table.
        if 2 * used_U.numel() > rows_CK.numel():
            held: dict[int, torch.Tensor] = {}

            def of_head(head: int, piece: slice) -> torch.Tensor:
                if head not in held:
                    held.clear()
                    held[head] = self.logprobs(rows_CK[:, head], vocabulary)
                return held[head][piece]

            return of_head
        logp_UV = self.logprobs(used_U, vocabulary)
        return lambda head, piece: logp_UV[places_CK[piece, head]]


def known_lse(
    hidden_MD: torch.Tensor,
    ids_M: torch.Tensor,
    logprobs_M: torch.Tensor,
    lm_head_VD: torch.Tensor,
    temperature: float,
) -> torch.Tensor:
    """`Teacher.lse_M` without multiplying by all rows of lm_head: it follows from one token's logit
    and its log-prob under the sampling distribution.
    """
    logit_M = (hidden_MD.float() * lm_head_VD[ids_M].float()).sum(-1) / temperature
    return logit_M - logprobs_M.float()


def head_loss(
    factored: FactoredLogits,
    targets_NK: torch.Tensor,
    mask_NK: torch.Tensor,
    config: LossConfig,
    *,
    logprobs_NK: torch.Tensor | None = None,
    teacher: Teacher | None = None,
    temperature: float = 1.0,
    chunk_rows: int | None = None,
    vocabulary: Vocabulary = WHOLE,
) -> torch.Tensor:
    """Loss of each head, float32 `K`, in chunks of rows; 0 for a head without a position.

    Args:
        factored: `MedusaHeads.factored(...)`.
        targets_NK: int64 (`heads.targets.head_targets`).
        mask_NK: bool, which positions count; or float, how much each counts in the mean.
        config: the loss.
        logprobs_NK: behaviour log-probs of the targets (`heads.targets.head_logprobs`); needed for
            TV.
        teacher: the actor's distribution; needed for KL and exact TV.
        temperature: sampling temperature of the rollouts. The heads' logits are divided by it, as
            the actor's are when it samples: heads trained at one temperature then fit the others
            too, and heads that start as lm_head start right.
        chunk_rows: rows of one chunk; None: by the size of the vocabulary.
        vocabulary: how the tokens are distributed (`heads.vocabulary` of the heads).
    """
    rows = chunk_rows or vocabulary.chunk_rows(factored.head_weight(0))
    job = _Job(targets_NK, mask_NK, config, logprobs_NK, teacher, temperature, rows, vocabulary)
    job.check(tuple(factored.features_NKD.shape[:2]))
    return _ChunkedLoss.apply(job, *factored)


def reference_head_loss(
    logits_NKV: torch.Tensor,
    targets_NK: torch.Tensor,
    mask_NK: torch.Tensor,
    config: LossConfig,
    *,
    logprobs_NK: torch.Tensor | None = None,
    teacher_logits_NKV: torch.Tensor | None = None,
    temperature: float = 1.0,
) -> torch.Tensor:
    """The same as `head_loss`, written plainly with autograd; teacher logits are already divided by
    the temperature.
    """
    logq_NKV = F.log_softmax(logits_NKV.float() / temperature, dim=-1)
    logq_NK = logq_NKV.gather(-1, targets_NK.unsqueeze(-1)).squeeze(-1)
    loss_NK = torch.zeros_like(logq_NK)
    if config.ce:
        loss_NK = loss_NK - config.ce * logq_NK
    if config.tv and logprobs_NK is not None:
        loss_NK = loss_NK + config.tv * (1 - (logq_NK - logprobs_NK.float()).clamp(max=0).exp())
    if config.kl and teacher_logits_NKV is not None:
        # Removed tokens have log p = -inf: 0 times that would be NaN.
        logp_NKV = F.log_softmax(teacher_logits_NKV.float(), dim=-1)
        loss_NK = loss_NK + config.kl * torch.where(
            logp_NKV > -torch.inf, logp_NKV.exp() * (logp_NKV - logq_NKV), 0.0
        ).sum(-1)
    if config.exact_tv and teacher_logits_NKV is not None:
        loss_NK = loss_NK + config.exact_tv * (
            1 - torch.minimum(F.softmax(teacher_logits_NKV.float(), dim=-1), logq_NKV.exp()).sum(-1)
        )
    weight_NK = mask_NK.float()
    total_K = weight_NK.sum(0)
    return (loss_NK * weight_NK).sum(0) / torch.where(total_K > 0, total_K, 1.0)


@dataclass
class _Job:
    """Inputs of a chunked loss besides the tensors that may need gradients."""

    targets_NK: torch.Tensor
    mask_NK: torch.Tensor
    config: LossConfig
    logprobs_NK: torch.Tensor | None
    teacher: Teacher | None
    temperature: float
    chunk_rows: int
    vocabulary: Vocabulary

    @property
    def cut(self) -> bool:
        """Whether the actor's distribution may be 0 somewhere; log p is then -inf."""
        teacher = self.teacher
        return teacher is None or teacher.top_k > 0 or teacher.top_p < 1

    def check(self, expected: tuple[int, ...]) -> None:
        """Raise ConfigError if an input does not have the features' rows and heads, or if one that
        the loss needs is missing.
        """
        for name, tensor in (
            ("targets", self.targets_NK),
            ("mask", self.mask_NK),
            ("logprobs", self.logprobs_NK),
        ):
            if tensor is not None and tuple(tensor.shape) != expected:
                given = tuple(tensor.shape)
                do = "Pass one entry per row and head."
                raise ConfigError(
                    f"The {name} do not fit the features.", given=given, expected=expected, do=do
                )
        if self.config.tv and self.logprobs_NK is None:
            do = "Pass them, or use the ce or kl loss."
            raise ConfigError(
                "Total variation needs behaviour log-probs.",
                given="none",
                expected="logprobs_NK",
                do=do,
            )
        if self.config.needs_teacher and self.teacher is None:
            do = "Pass a Teacher, or use the ce or tv loss."
            raise ConfigError(
                "KL and exact TV need the actor's distribution.",
                given="none",
                expected="teacher",
                do=do,
            )


class _Gradients:
    """Accumulators for the gradients of one pass; None for those that nobody needs. Gradients of
    the heads' own lm_heads are summed in float32.
    """

    def __init__(self, factored: FactoredLogits, wanted: tuple[bool, ...]) -> None:
        wants_features, wants_weight = wanted
        self.features_NKD: torch.Tensor | None = None
        self.weight_KVD: torch.Tensor | None = None
        if wants_features:
            self.features_NKD = torch.zeros_like(factored.features_NKD)
        if wants_weight and factored.weight.dim() == 3:
            self.weight_KVD = torch.zeros_like(factored.weight, dtype=torch.float32)

    @property
    def any(self) -> bool:
        return any(gradient is not None for gradient in self.in_order())

    def in_order(self) -> tuple[torch.Tensor | None, ...]:
        return self.features_NKD, self.weight_KVD

    def add(
        self, factored: FactoredLogits, head: int, rows: slice, dlogits_CV: torch.Tensor
    ) -> None:
        weight_VD = factored.head_weight(head)
        dlow_CV = dlogits_CV.to(weight_VD.dtype)
        if self.features_NKD is not None:
            dfeatures_CD = dlow_CV @ weight_VD
            self.features_NKD[rows, head] = dfeatures_CD.to(self.features_NKD.dtype)
        if self.weight_KVD is not None:
            features_CD = factored.features_NKD[rows, head].to(dlow_CV.dtype)
            # A sum over many chunks in 16 bits would lose the later ones.
            self.weight_KVD[head] += (dlow_CV.T @ features_CD).float()


class _ChunkedLoss(torch.autograd.Function):
    """Computes loss and gradient chunk by chunk in forward; backward only scales. Gradients of head
    k depend on the loss of head k alone.
    """

    @staticmethod
    def forward(ctx: Any, job: _Job, *tensors: torch.Tensor | None) -> torch.Tensor:
        factored = FactoredLogits(*tensors)  # type: ignore[arg-type]
        gradients = _Gradients(factored, ctx.needs_input_grad[1:])
        rows, heads = job.targets_NK.shape
        loss_K = torch.zeros(heads, dtype=torch.float32, device=job.targets_NK.device)
        total_K = torch.zeros_like(loss_K)
        for start in range(0, rows, job.chunk_rows):
            chunk = slice(start, min(rows, start + job.chunk_rows))
            teach = (
                job.teacher.of_chunk(chunk, job.vocabulary)
                if job.teacher is not None and job.config.needs_teacher
                else None
            )
            for head in range(heads):
                # The logits of this chunk are overwritten with their gradient.
                logits_CV = head_logits(factored, head, chunk)
                weight_C = job.mask_NK[chunk, head].float()
                loss_C = torch.empty_like(weight_C)
                # Rows are independent, so they are processed in pieces that stay in the cache.
                for piece in _pieces(logits_CV):
                    first = start + piece.start
                    loss_C[piece] = _row_losses(
                        job,
                        logits_CV[piece],
                        None if teach is None else teach(head, piece),
                        head,
                        slice(first, first + piece.stop - piece.start),
                        weight_C[piece] if gradients.any else None,
                    )
                loss_K[head] += (loss_C * weight_C).sum()
                total_K[head] += weight_C.sum()
                if gradients.any:
                    gradients.add(factored, head, chunk, logits_CV)
        gradients.features_NKD = job.vocabulary.sum_gradient(gradients.features_NKD)
        # A head without a position has loss 0, not 0 / 0.
        ctx.inverse_K = 1.0 / torch.where(total_K > 0, total_K, 1.0)
        ctx.gradients = gradients
        ctx.dtypes = tuple(None if t is None else t.dtype for t in tensors)
        return loss_K * ctx.inverse_K

    @staticmethod
    def backward(ctx: Any, grad_K: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("The first backward pass consumes the gradients of a chunked loss.")
        scale_K = grad_K.float() * ctx.inverse_K
        shapes = (scale_K.view(1, -1, 1), scale_K.view(-1, 1, 1))
        scaled = [
            None if gradient is None else gradient.mul_(scale).to(dtype)
            for gradient, scale, dtype in zip(
                ctx.gradients.in_order(), shapes, ctx.dtypes, strict=True
            )
        ]
        # They were scaled in place, so a second backward pass would be wrong; drop them.
        ctx.gradients = None
        return None, *scaled


def _pieces(logits_CV: torch.Tensor) -> list[slice]:
    """Rows of a chunk that are processed together: all of them on a GPU; on a CPU, few enough that
    the intermediate results stay in a core's cache.
    """
    rows, width = logits_CV.shape
    most = rows if logits_CV.device.type != "cpu" else max(1, PIECE // max(1, width))
    return [slice(first, min(rows, first + most)) for first in range(0, rows, most)]


def _row_losses(
    job: _Job,
    logits_CV: torch.Tensor,
    logp_CV: torch.Tensor | None,
    head: int,
    chunk: slice,
    weight_C: torch.Tensor | None,
) -> torch.Tensor:
    """Loss of each row. Overwrites `logits_CV` with the loss's gradient by these logits times
    `weight_C` (None: no gradient is wanted).

    `logp_CV` is the actor's own distribution, if the loss reads it; over a part of the vocabulary
    it sums to less than 1.
    """
    config = job.config
    vocabulary = job.vocabulary
    targets_C = job.targets_NK[chunk, head]
    if job.temperature != 1:
        logits_CV.div_(job.temperature)
    lse_C1 = vocabulary.logsumexp(logits_CV)
    logq_C = vocabulary.pick(logits_CV, targets_C) - lse_C1.squeeze(1)
    loss_C = -config.ce * logq_C
    pull_C = torch.full_like(logq_C, config.ce)
    if config.tv and job.logprobs_NK is not None:
        log_ratio_C = logq_C - job.logprobs_NK[chunk, head].float()
        ratio_C = log_ratio_C.clamp(max=0).exp()
        loss_C = loss_C + config.tv * (1 - ratio_C)
        pull_C = pull_C + config.tv * ratio_C * (log_ratio_C < 0)
    # In place, here and below: the logits of a chunk are the largest tensors of a training step.
    logq_CV = logits_CV.sub_(lse_C1)
    if logp_CV is None:
        if weight_C is None:
            return loss_C
        pull_C = pull_C * weight_C
        dlogits_CV = logq_CV.exp_().mul_(pull_C.unsqueeze(1))
        vocabulary.add_at(dlogits_CV, targets_C, -pull_C)
    else:
        p_CV = logp_CV.exp()
        below_CV = logq_CV < logp_CV
        if config.kl:
            kl_CV = logp_CV.sub_(logq_CV).mul_(p_CV)
            if job.cut:
                # 0 x -inf is 0.
                kl_CV.masked_fill_(p_CV == 0, 0.0)
            loss_C = loss_C + config.kl * vocabulary.total(kl_CV)
        q_CV = logq_CV.exp_()
        if config.exact_tv:
            # Reuses the memory of a tensor that is not read again.
            lower_CV = torch.minimum(p_CV, q_CV, out=logp_CV)
            loss_C = loss_C + config.exact_tv * (1 - vocabulary.total(lower_CV))
        if weight_C is None:
            return loss_C
        whole = job.teacher is None or job.teacher.lse_M is None
        # KL's gradient is q times the mass of p, minus p; over only some tokens, that mass is below
        # 1.
        mass_C: torch.Tensor | float = 1.0 if whole else vocabulary.total(p_CV)
        push_C = pull_C + config.kl * mass_C
        if config.exact_tv:
            # q where it is below p, else 0: the part of sum min(p, q) that depends on q.
            below_q_CV = torch.mul(q_CV, below_CV, out=logp_CV)
            push_C = push_C + config.exact_tv * vocabulary.total(below_q_CV)
        dlogits_CV = q_CV.mul_((push_C * weight_C).unsqueeze(1))
        vocabulary.add_at(dlogits_CV, targets_C, -(pull_C * weight_C))
        dlogits_CV.addcmul_(p_CV, weight_C.unsqueeze(1), value=-config.kl)
        if config.exact_tv:
            dlogits_CV.addcmul_(below_q_CV, weight_C.unsqueeze(1), value=-config.exact_tv)
    if job.temperature != 1:
        # The logits were divided by the temperature, so their gradient is too.
        dlogits_CV.div_(job.temperature)
    return loss_C
