"""One tensor-parallel rank of test_sharded_vocabulary.py: compares the spread vocabulary with a
whole one in the same process, rank 0 writes the figures.

Run as  python sharded_vocabulary_ranks.py RANK RANKS STORE OUT
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from heads.vocabulary import truncate_logits
from medusa_ppo.ppo.megatron.sharded_stats import sharded_stats
from medusa_ppo.ppo.megatron.sharded_vocabulary import ShardedVocabulary

V, N = 1001, 50  # An odd vocabulary: the last rank has fewer rows.
PADDED_ROWS = 512
CHUNK_ROWS = 16  # N is no multiple of it.
CUTS = {
    "top_k": (7, 1.0),
    "top_p": (0, 0.7),
    "both": (40, 0.6),
    "most": (1000, 1.0),
    "one": (0, 1e-6),
}


class Traffic:
    """Elements that go through torch.distributed, by call."""

    def __init__(self) -> None:
        self.elements: Counter[str] = Counter()
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
            self.elements[name] += sum(t.numel() for t in tensors)
            return call(first, *rest, **named)

        return counted


def stats(vocabulary: ShardedVocabulary, traffic: Traffic) -> dict[str, Any]:
    """Log-probs, entropies and gradients against plain formulas over the whole vocabulary."""
    torch.manual_seed(2)
    logits_NV = (torch.randn(N, V) * 3).requires_grad_()
    ids_N = torch.randint(V, (N,))
    plain_NV = logits_NV.log_softmax(-1)
    plain_N = plain_NV.gather(1, ids_N[:, None])[:, 0]
    entropy_N = -(plain_NV.exp() * plain_NV).sum(-1)
    (plain_N.sum() - 0.3 * entropy_N.sum()).backward()
    assert logits_NV.grad is not None

    own_NV = vocabulary.own_rows(logits_NV.detach(), 1).clone().requires_grad_()
    traffic.elements.clear()
    found = sharded_stats(
        own_NV, torch.arange(N), ids_N, vocabulary, entropy=True, chunk_rows=CHUNK_ROWS
    )
    assert found.entropy_M is not None
    (found.logprobs_M.sum() - 0.3 * found.entropy_M.sum()).backward()
    crossed = dict(traffic.elements)
    assert own_NV.grad is not None
    expected_NV = vocabulary.own_rows(logits_NV.grad, 1)
    return {
        "logprobs": float((found.logprobs_M - plain_N).abs().max()),
        "entropy": float((found.entropy_M - entropy_N).abs().max()),
        "gradient": float((own_NV.grad - expected_NV).abs().max()),
        "traffic": crossed,
    }


def cuts(vocabulary: ShardedVocabulary) -> dict[str, int]:
    """Of each cut, how many tokens are kept by one and left out by the other."""
    torch.manual_seed(1)
    rows_CV = torch.randn(50, V) * 3
    found = {}
    for name, cut in CUTS.items():
        kept = vocabulary.truncate(vocabulary.own_rows(rows_CV, 1), *cut) > -torch.inf
        expected = vocabulary.own_rows(truncate_logits(rows_CV, *cut), 1) > -torch.inf
        found[name] = int((kept != expected).sum())
    return found


def main(rank: int, ranks: int, store: str, out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    group = dist.group.WORLD
    assert group is not None
    vocabulary = ShardedVocabulary(V, group)
    padded = ShardedVocabulary(V, group, rows_per_rank=PADDED_ROWS)
    figures = {
        **stats(vocabulary, Traffic()),
        "cuts": cuts(vocabulary),
        "cuts with padding": cuts(padded),
        "rows of a padded table": padded.own_rows(torch.randn(PADDED_ROWS, 2)).shape[0],
    }
    everyone: list[Any] = [None] * ranks
    dist.all_gather_object(everyone, figures)
    if rank == 0:
        Path(out).write_text(json.dumps(everyone))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:5])
