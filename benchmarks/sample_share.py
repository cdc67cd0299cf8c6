"""What does a sample of the positions cost? Heads that learn from a small sample of each rollout
batch, against heads that learn from all of it, in the same number of optimizer steps.

    python benchmarks/sample_share.py --model DIR --data FILE --template TEXT [--tokens 2000000]
        [--share 0.02] [--batches 8] [--seeds 0 1 2] [--blocks 0 64 32]

The actor answers the prompts of the data at temperature 1; the answers are cut into batches in the
order in which they were written. Two arms for each seed, both from untrained heads and with the
companion's defaults, except for 256 positions in an optimizer step (`--positions`):

- the sample: `EarlySample`, as a tap draws it where the states are (blocks of neighbours; of a
  tap's own size, or of --blocks rows), and passes over it;
- all: as many optimizer steps on each batch, with positions drawn anew from the whole batch.

Then both are replayed on answers to prompts that neither saw: extra tokens are those beyond the one
that a step writes without drafts. `passes` counts those over the sample: with 1 both arms see as
many positions, and only where they stand differs; with more, the sample is repeated.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace

import torch

from heads.modules import MedusaHeads
from medusa_ppo.actors.hf import embedding_weight, lm_head_weight, load_actor
from medusa_ppo.companion.gate import Served, replay
from medusa_ppo.companion.positions import EarlySample
from medusa_ppo.companion.trainer import HeadsTrainer
from medusa_ppo.config.companion_section import CompanionConfig
from medusa_ppo.config.heads_section import HeadsSection
from medusa_ppo.contract.rollout_batch import RolloutBatch
from medusa_ppo.contract.rollouts import Sampling
from medusa_ppo.offline.collect import Sample, response_rounds, samples_of
from medusa_ppo.offline.hidden import HiddenReader, read_all
from medusa_ppo.offline.scene import engine_config, read_scene, running_engine
from medusa_ppo.runtime.hardware import cpu_has_bfloat16

NEW_TOKENS = 256
HELD_PROMPTS = 400
HEADS = 4


def written(args: argparse.Namespace) -> tuple[list[Sample], list[Sample]]:
    """Answers to learn from, and answers to other prompts, on which heads are judged."""
    scene = read_scene(args.model, args.data, args.template, NEW_TOKENS)
    held, rest = scene.prompts[:HELD_PROMPTS], scene.prompts[HELD_PROMPTS:]
    sampling = Sampling(temperature=1.0, max_new_tokens=NEW_TOKENS, seed=0)
    config = engine_config(scene.prompts, NEW_TOKENS)

    with running_engine(args.model, "", config, 0) as engine:
        learned = samples_of(response_rounds(engine, rest, sampling, args.tokens, advance, 512))
        judged = samples_of(response_rounds(engine, held, replace(sampling, seed=1), 0, advance))
    return learned, judged


def advance(amount: float = 1, note: str = "") -> None:
    """Tells how far it is, where there is something to tell."""
    if note:
        sys.stderr.write(f"  {amount:.0f} {note}\n")


def cut(samples: Sequence[Sample], count: int) -> list[list[Sample]]:
    """`count` parts with about as many written tokens each, in order."""
    parts: list[list[Sample]] = [[] for _ in range(count)]
    total = sum(sample.written for sample in samples)
    before = 0
    for sample in samples:
        parts[min(count - 1, count * before // total)].append(sample)
        before += sample.written
    return parts


def drawn(batch: RolloutBatch, count: int, seed: int) -> RolloutBatch:
    """The batch with `count` of its positions to train on, drawn from all that have a target."""
    usable_M = torch.ones(batch.response_ids_M.numel(), dtype=torch.bool)
    usable_M[batch.lengths_S.cumsum(0) - 1] = False
    usable_N = usable_M.nonzero().squeeze(1)
    order_N = torch.randperm(usable_N.numel(), generator=torch.Generator().manual_seed(seed))
    weights_M = torch.zeros(usable_M.numel()).index_fill_(0, usable_N[order_N[:count]], 1.0)
    return replace(batch, weights_M=weights_M)


class Arm:
    """Heads in training."""

    def __init__(
        self,
        config: CompanionConfig,
        lm_head_VD: torch.Tensor,
        embedding_VD: torch.Tensor,
        seed: int,
    ) -> None:
        vocab, width = lm_head_VD.shape
        torch.manual_seed(seed)
        heads = MedusaHeads(HeadsSection(num_heads=HEADS).sizes(width, vocab))
        dtype = torch.bfloat16 if cpu_has_bfloat16() else None
        self._tables = lm_head_VD, embedding_VD
        self.trainer = HeadsTrainer(
            heads, lm_head_VD, config, seed, embedding_VD=embedding_VD, dtype=dtype
        )

    def extra(self, batch: RolloutBatch) -> float:
        """Tokens per engine step beyond the first, by replay with sampled drafts."""
        lm_head_VD, embedding_VD = self._tables
        with self.trainer.products():
            result = replay(
                self.trainer.heads,
                batch,
                lm_head_VD,
                embedding_VD=embedding_VD,
                served=Served(1.0),
            )
        return result.mean_acceptance_length - 1


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--template", required=True)
    parser.add_argument("--tokens", type=int, default=2_000_000)
    parser.add_argument("--share", type=float, default=0.02)
    parser.add_argument("--batches", type=int, default=8)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--passes", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--blocks", type=int, nargs="+", default=[0], help="0: as a tap chooses")
    parser.add_argument("--positions", type=int, default=256, help="positions of an optimizer step")
    args = parser.parse_args()
    learned, judged = written(args)
    actor = load_actor(args.model).requires_grad_(False)
    lm_head_VD = lm_head_weight(actor).detach().float()
    embedding_VD = embedding_weight(actor).detach().float()
    reader = HiddenReader(actor, 1.0)

    config = CompanionConfig(batch_positions=args.positions)
    arms = {
        (block, passes, seed): tuple(Arm(config, lm_head_VD, embedding_VD, seed) for _ in range(2))
        for block in args.blocks
        for passes in args.passes
        for seed in args.seeds
    }
    rows_in_all = 0
    for number, part in enumerate(cut(learned, args.batches)):
        batch = replace(read_all(reader, part, advance), policy_version=number)
        positions = batch.response_ids_M.numel()
        rows_in_all += positions
        for (block, passes, seed), (sampled, whole) in arms.items():
            rows = round(args.share * positions)
            sample = EarlySample(rows, 0.0, seed, HEADS, block or None).of(batch)
            count = int((sample.weights_M > 0).sum()) if sample.weights_M is not None else positions
            sampled.trainer.train_batch(sample, epochs=passes)
            whole.trainer.train_batch(drawn(batch, passes * count, seed + number), epochs=1)
        sys.stderr.write(f"batch {number}: {positions} positions\n")
    held = read_all(reader, judged, advance)
    sys.stdout.write(
        f"{rows_in_all:,} positions in {args.batches} batches, {args.share:.1%} of them sampled;"
        f" judged on {held.response_ids_M.numel():,}\n"
        "| block | passes | optimizer steps | extra tokens, the sample | all | sample / all |\n"
        "|---|---|---|---|---|---|\n"
    )
    for block, passes in itertools.product(args.blocks, args.passes):
        pairs = [arms[block, passes, seed] for seed in args.seeds]
        steps = {arm.trainer.optimizer_steps for pair in pairs for arm in pair}
        extra = [tuple(arm.extra(held) for arm in pair) for pair in pairs]
        ratios = [sampled / whole for sampled, whole in extra]
        means = [statistics.fmean(column) for column in zip(*extra, strict=True)]
        sys.stdout.write(
            f"| {block or 'own'} | {passes} | {min(steps)} to {max(steps)} |"
            f" {means[0]:.3f} | {means[1]:.3f} |"
            f" {statistics.fmean(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}) |\n"
        )


if __name__ == "__main__":
    main()
