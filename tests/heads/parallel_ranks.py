"""One tensor-parallel rank of test_parallel.py: compares sharded heads with whole ones in the same
process, rank 0 writes the figures.

Run as  python parallel_ranks.py RANK RANKS STORE OUT
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from heads.acceptance import draft_ids_for_rows, draft_logprobs_for_rows
from heads.checkpoint import load_heads, save_heads
from heads.heads_config import HeadsConfig
from heads.losses import LossConfig, Teacher, head_loss
from heads.modules import SHARED_PREFIXES, Context, MedusaHeads
from heads.parallel import ParallelHeads, ShardedVocabulary
from heads.targets import context_rows
from heads.vocabulary import WHOLE, truncate_logits

D, V, K, N = 16, 1001, 3, 23  # An odd vocabulary: the last rank has fewer rows.
LOSSES = {
    "ce": LossConfig(),
    "tv": LossConfig(0.0, 1.0),
    "kl_tv": LossConfig.named("kl_tv"),
    "all": LossConfig(0.3, 1.0, 0.7, 0.5),
}
KINDS = {
    "medusa-shared": ("medusa", "shared"),
    "medusa-own": ("medusa", "own"),
    "hydra": ("hydra", "shared"),
    "context": ("context", "shared"),
}
PAIRS = 5


class Traffic:
    """Elements that go through torch.distributed, by call."""

    def __init__(self) -> None:
        self.elements: Counter[str] = Counter()
        self.largest = 0
        for name in (
            "all_reduce",
            "all_gather",
            "all_gather_into_tensor",
            "broadcast",
            "reduce_scatter",
            "gather",
            "all_to_all",
            "send",
        ):
            setattr(dist, name, self._counted(name, getattr(dist, name)))

    def _counted(self, name: str, call: Any) -> Any:
        def counted(first: Any, *rest: Any, **named: Any) -> Any:
            tensors = first if isinstance(first, list) else [first]
            size = sum(t.numel() for t in tensors)
            self.elements[name] += size
            self.largest = max(self.largest, size)
            return call(first, *rest, **named)

        return counted

    def start(self) -> None:
        self.elements.clear()
        self.largest = 0


class Case:
    """Whole heads of one kind with random weights, and this rank's share of them."""

    def __init__(self, kind: str, lm_head: str, vocabulary: ShardedVocabulary) -> None:
        torch.manual_seed(0)
        self.vocabulary = vocabulary
        pairs = PAIRS if kind == "context" else 0
        self.whole = MedusaHeads(
            HeadsConfig(D, V, K, "hydra" if pairs else kind, 2, lm_head, context=pairs)
        )
        self.lm_head_VD = torch.randn(V, D)
        self.embedding_VD = torch.randn(V, D)
        if lm_head == "own":
            self.whole.init_own_lm_heads(self.lm_head_VD)
        with torch.no_grad():
            for parameter in self.whole.parameters():
                parameter.add_(0.2 * torch.randn(parameter.shape))
        self.share = ParallelHeads.shard(self.whole, vocabulary)
        self.hidden_ND = torch.randn(N, D)
        self.condition_NK = torch.randint(V, (N, K))
        self.targets_NK = torch.randint(V, (N, K))
        self.mask_NK = torch.rand(N, K) > 0.2
        self.logprobs_NK = -9 * torch.rand(N, K)
        self.rows_NK = torch.randint(N, (N, K))
        self.context_Nn = context_rows(torch.arange(N) // 9, PAIRS) if pairs else None

    def factored(self, sharded: bool) -> Any:
        heads: MedusaHeads = self.share if sharded else self.whole
        own = self.vocabulary.own_rows if sharded else (lambda table: table)
        context = (
            None
            if self.context_Nn is None
            else Context.of(self.context_Nn, self.hidden_ND, self.condition_NK[:, 0])
        )
        tables = {
            "condition": self.condition_NK,
            "embedding_VD": own(self.embedding_VD),
            "context": context,
        }
        return heads.factored(self.hidden_ND, own(self.lm_head_VD), **tables)

    def loss(
        self,
        sharded: bool,
        config: LossConfig,
        cut: tuple[int, float] = (0, 1.0),
        chunk_rows: int = 7,
    ) -> torch.Tensor:
        lm_head = self.vocabulary.own_rows(self.lm_head_VD) if sharded else self.lm_head_VD
        teacher = (
            Teacher(self.hidden_ND, self.rows_NK, lm_head, 0.7, *cut)
            if config.needs_teacher
            else None
        )
        return head_loss(
            self.factored(sharded),
            self.targets_NK,
            self.mask_NK,
            config,
            logprobs_NK=self.logprobs_NK if config.tv else None,
            teacher=teacher,
            temperature=0.8,
            chunk_rows=chunk_rows,
            vocabulary=self.vocabulary if sharded else WHOLE,
        )

    def gradients(self, sharded: bool) -> dict[str, torch.Tensor]:
        """By file key; of the sharded heads put together again."""
        heads = self.share if sharded else self.whole
        swapped = (
            MedusaHeads(dataclasses.replace(heads.config))
            if not sharded
            else ParallelHeads(heads.whole_config, self.vocabulary)
        )
        for parameter, source in zip(swapped.parameters(), heads.parameters(), strict=True):
            parameter.data = (
                torch.zeros_like(source) if source.grad is None else source.grad.clone()
            )
        return (swapped.whole_heads() if sharded else swapped).trainable_state()


def difference(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    assert left.keys() == right.keys()
    return max(float((left[name] - right[name]).abs().max()) for name in left)


def losses(case: Case, name: str, figures: dict[str, Any]) -> None:
    for loss, config in LOSSES.items():
        results = []
        for sharded in (False, True):
            heads = case.share if sharded else case.whole
            heads.zero_grad(set_to_none=True)
            loss_K = case.loss(sharded, config)
            (loss_K * torch.tensor([1.0, 0.5, 2.0])).sum().backward()
            results.append((loss_K.detach(), case.gradients(sharded)))
        (whole_K, whole), (shard_K, shard) = results
        figures[f"loss-{name}-{loss}"] = float(
            ((whole_K - shard_K) / whole_K.clamp(min=1.0)).abs().max()
        )
        figures[f"gradient-{name}-{loss}"] = difference(whole, shard)
        figures[f"size-{name}-{loss}"] = max(float(g.abs().max()) for g in whole.values())


def clips(case: Case, name: str, figures: dict[str, Any]) -> None:
    for heads, sharded in ((case.whole, False), (case.share, True)):
        heads.zero_grad(set_to_none=True)
        (1000 * case.loss(sharded, LossConfig())).sum().backward()
    before = case.gradients(False)
    norm_K = case.share.clip_gradients(1.0)
    expected = {}
    for k in range(len(norm_K)):
        mine = {
            key: value
            for key, value in before.items()
            if (f".{k}." in key[: key.index(".") + 3] if k < K else key.startswith(SHARED_PREFIXES))
        }
        norm = torch.cat([v.flatten() for v in mine.values()]).norm()
        figures[f"clip-norm-{name}-{k}"] = float((norm - norm_K[k]).abs() / norm)
        expected |= {key: value / max(1.0, float(norm)) for key, value in mine.items()}
    figures[f"clip-{name}"] = difference(expected, case.gradients(True))


def drafts(case: Case, name: str, figures: dict[str, Any]) -> None:
    own = case.vocabulary.own_rows
    where = {"condition_MK": case.condition_NK, "context_Mn": case.context_Nn}
    tables = [
        (case.whole, case.lm_head_VD, case.embedding_VD),
        (case.share, own(case.lm_head_VD), own(case.embedding_VD)),
    ]
    ids = [
        draft_ids_for_rows(h, case.hidden_ND, w, embedding_VD=e, chunk_rows=5, **where)
        for h, w, e in tables
    ]
    figures[f"argmax-{name}"] = int((ids[0] != ids[1]).sum())
    for cut, (top_k, top_p) in {
        "plain": (0, 1.0),
        "top_k": (20, 1.0),
        "top_p": (0, 0.8),
        "both": (20, 0.8),
    }.items():
        logq = [
            draft_logprobs_for_rows(
                h,
                case.hidden_ND,
                case.targets_NK,
                w,
                temperatures=(0.5, 1.0),
                top_k=top_k,
                top_p=top_p,
                embedding_VD=e,
                **where,
            )
            for h, w, e in tables
        ]
        figures[f"draft-probability-{name}-{cut}"] = float(
            (logq[0].exp() - logq[1].exp()).abs().max()
        )


def distribution(vocabulary: ShardedVocabulary, figures: dict[str, Any]) -> None:
    """Which token is the likeliest, and which ones are cut."""
    torch.manual_seed(1)
    tied_CV = torch.zeros(2, V).index_fill(1, torch.tensor([900, 2]), 1.0)
    figures["tied argmax"] = vocabulary.argmax(vocabulary.own_rows(tied_CV, 1)).tolist()
    rows_CV = torch.randn(50, V) * 3
    for name, cut in {
        "top_k": (7, 1.0),
        "top_p": (0, 0.7),
        "both": (40, 0.6),
        "most": (1000, 1.0),
        "one": (0, 1e-6),
    }.items():
        kept = vocabulary.truncate(vocabulary.own_rows(rows_CV, 1), *cut) > -torch.inf
        expected = vocabulary.own_rows(truncate_logits(rows_CV, *cut), 1) > -torch.inf
        figures[f"cut-{name}"] = int((kept != expected).sum())


def traffic_of_a_step(case: Case, traffic: Traffic, figures: dict[str, Any]) -> None:
    traffic.start()
    case.loss(True, LossConfig()).sum().backward()
    figures["traffic"] = {**traffic.elements, "largest": traffic.largest, "logits": N * K * V}
    logits_NV = torch.randn(N, case.vocabulary.rows)
    traffic.start()
    case.vocabulary.argmax(logits_NV)
    figures["traffic-argmax"] = sum(traffic.elements.values())


def files(
    case: Case, name: str, group: dist.ProcessGroup, folder: Path, figures: dict[str, Any]
) -> None:
    """Written by all ranks, read on one process and again sharded another way (with Megatron's
    padding).
    """
    whole = case.share.whole_heads()
    if dist.get_rank(group) == 0:
        save_heads(folder / name, whole, version=4)
    dist.barrier(group)
    read, metadata = load_heads(folder / name)
    figures[f"file-{name}"] = difference(
        read.trainable_state(), case.whole.trainable_state()
    ) + abs(metadata.version - 4)
    padded = ShardedVocabulary(V, group, rows_per_rank=512)
    again, _ = ParallelHeads.load(folder / name, padded, vocab_size=V)
    table = torch.randn(512, D)
    figures[f"padding-{name}"] = abs(
        padded.own_rows(table).shape[0] - (512 if padded.rank == 0 else V - 512)
    )
    figures[f"reshard-{name}"] = difference(
        again.whole_heads().trainable_state(), case.whole.trainable_state()
    )


def main(rank: int, ranks: int, store: str, out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    group = dist.group.WORLD
    assert group is not None
    vocabulary = ShardedVocabulary(V, group)
    figures = {}
    traffic = Traffic()
    for name, (kind, lm_head) in KINDS.items():
        case = Case(kind, lm_head, vocabulary)
        losses(case, name, figures)
        clips(case, name, figures)
        drafts(case, name, figures)
        files(case, name, group, Path(out).parent, figures)
    case = Case("medusa", "shared", vocabulary)
    cut_K = [
        case.loss(sharded, LossConfig.named("kl_tv"), (30, 0.9)).detach()
        for sharded in (False, True)
    ]
    figures["loss-cut-teacher"] = float(((cut_K[0] - cut_K[1]) / cut_K[0]).abs().max())
    traffic_of_a_step(case, traffic, figures)
    distribution(vocabulary, figures)
    everyone: list[Any] = [None] * ranks
    dist.all_gather_object(everyone, figures)
    if rank == 0:
        Path(out).write_text(json.dumps(everyone))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:5])
