"""Bytes and seconds of one PPO step on a cluster, on paper: 8B, 70B and 405B actors on 8 to 1,024
GPUs, and what the companion needs.

    python benchmarks/scale.py                     # the table
    python benchmarks/scale.py --json scale.json   # every number of it

A model, not a measurement: nothing in the table has run on a cluster. Every assumption is a field
of `Assumptions`, `Workload` or `Actor` with its reason; change it with --set, e.g. --set
accepted=1.5. benchmarks/scale_check.py compares its formulas with measurements.

Letters: P parameters, D hidden, V vocabulary, K heads, T tokens, N GPUs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from heads.heads_config import HeadsConfig
from medusa_ppo.cli.plan import TOKEN_BYTES, heads_parameters, hidden_bytes, size_text
from medusa_ppo.companion.holdout import HOLDOUT_TOKENS
from medusa_ppo.companion.trainer import TOGETHER
from medusa_ppo.config.heads_section import HeadsSection
from medusa_ppo.runtime.hardware import BFLOAT16, ModelSizes

Kind = Literal["medusa", "hydra"]
GPUS = (8, 16, 32, 64, 128, 256, 512, 1024)
# Largest share of the fleet that the companion may take.
TARGET = 0.03


@dataclass(frozen=True)
class Assumptions:
    """Assumptions; vendors' figures are those of an H100 SXM.

    Attributes:
        flops: dense bf16 products per second of a GPU (vendor).
        memory_bytes, memory_bytes_per_s: of a GPU (vendor).
        network_bytes_per_s: of a GPU, to another node (one 400 Gb/s card each).
        host_bytes_per_s: of a GPU, to its host (PCIe 5 x16, 63 GB/s by the vendor, less
            overheads).
        train_share: share of `flops` reached in scoring, update and by the companion.
        decode_share: share of `flops` and of the memory's speed reached while generating.
        network_share: share of the network's speed reached.
        step_overhead_s: host time of an engine step.
        reduce_s: one all-reduce of a decode step between tensor-parallel ranks; two per layer.
        drafts: draft tokens per step.
        accepted: drafts accepted per step; mean acceptance length is 1 more. Measured on small
            actors only (RESULTS-archive.md).
        holdout: share of positions that the companion does not train on.
        judged: sets of heads that the gate replays on the holdout: the candidate, the serving
            heads, their predecessors, the frozen control.
        float32_share: share of `flops` that products in float32 reach (TF32, vendor).
        train_bytes: per parameter of actor and critic: bf16 weight and gradient, float32 weight and
            two moments, gradient buffer.
    """

    flops: float = 989e12
    memory_bytes: float = 80e9
    memory_bytes_per_s: float = 3.35e12
    network_bytes_per_s: float = 50e9
    host_bytes_per_s: float = 50e9
    train_share: float = 0.4
    decode_share: float = 0.5
    network_share: float = 0.7
    step_overhead_s: float = 0.004
    reduce_s: float = 15e-6
    drafts: int = 3
    accepted: float = 1.0
    holdout: float = 0.2
    judged: int = 4
    float32_share: float = 0.5
    train_bytes: float = 18.0


@dataclass(frozen=True)
class Workload:
    """One rollout batch, the same at every size of the cluster.

    Attributes:
        responses: number in a step.
        prompt_tokens, response_tokens: means.
        longest: longest response relative to the mean; the last ones of a batch run nearly alone.
        forwards: scoring passes of models of the actor's size (actor, reference, critic, reward
            model).
        epochs: passes of PPO.
        passes: passes of the companion over a batch (companion.epochs).
        teacher: 1 if the loss reads the actor's own distribution (`kl`, `kl_tv`), else 0.
        bfloat16: 1 if the companion's products use it (companion.dtype), 0 for float32.
        draft_vocab: tokens that drafts come from, and that heads are trained and judged on; 0: all.
        trained: share of the positions that the companion trains on.
    """

    responses: int = 4096
    prompt_tokens: int = 512
    response_tokens: int = 1024
    longest: float = 2.0
    forwards: int = 4
    epochs: int = 1
    passes: int = 2
    teacher: int = 1
    bfloat16: int = 1
    draft_vocab: int = 8192
    trained: float = 1.0

    def width(self, vocab: int) -> int:
        """Rows of lm_head in the heads' products."""
        return min(self.draft_vocab or vocab, vocab)


@dataclass(frozen=True)
class PaperActor:
    """An actor, and how many GPUs one copy of it is spread over in training (tensor x pipeline
    parallel).
    """

    sizes: ModelSizes
    spread: int


# The shapes of Llama 3.1, which its model cards give.
ACTORS = {
    "8B": PaperActor(ModelSizes(4096, 32, 32, 8, 128, 14336, 128256), 4),
    "70B": PaperActor(ModelSizes(8192, 80, 64, 8, 128, 28672, 128256), 16),
    "405B": PaperActor(ModelSizes(16384, 126, 128, 8, 128, 53248, 128256), 128),
}


@dataclass(frozen=True)
class PaperStep:
    """One PPO step on paper. Seconds of consecutive phases; total bytes moved."""

    gpus: int
    engine_ranks: int
    generate_s: float
    score_s: float
    update_s: float
    sync_s: float
    tap_s: float
    swap_s: float
    plain_generate_s: float
    companion_gpus: float
    responses_bytes: float
    weights_bytes: float
    hidden_bytes: float
    tables_bytes: float
    heads_bytes: float

    @property
    def seconds(self) -> float:
        return (
            self.generate_s + self.score_s + self.update_s + self.sync_s + self.tap_s + self.swap_s
        )

    @property
    def speedup(self) -> float:
        """Time of the whole step without heads, relative to the same with heads."""
        return (self.plain_generate_s + self.score_s + self.update_s + self.sync_s) / self.seconds

    @property
    def companion_share(self) -> float:
        """Share of the fleet: the companion works during the whole step, beside everything else."""
        return self.companion_gpus / self.gpus


def step_on_paper(
    actor: PaperActor, heads: HeadsConfig, gpus: int, given: Assumptions, work: Workload
) -> PaperStep | None:
    """None if the training states or the engine's weights do not fit into this many GPUs."""
    model = actor.sizes
    # Actor, critic, and a reference in bf16.
    states = model.parameters * (2 * given.train_bytes + BFLOAT16) / gpus
    ranks = engine_ranks(model, given)
    # A fifth is left for activations.
    if states > 0.8 * given.memory_bytes or gpus < max(ranks, actor.spread):
        return None
    tokens = work.responses * work.response_tokens
    all_tokens = work.responses * (work.prompt_tokens + work.response_tokens)
    rate = gpus * given.flops * given.train_share
    engines = gpus // ranks
    hidden = float(hidden_bytes(model, tokens, BFLOAT16))
    heads_size = BFLOAT16 * heads_parameters(heads)
    weights = BFLOAT16 * model.parameters
    tables = BFLOAT16 * (1 + int(heads.needs_embedding)) * model.vocab * model.hidden
    network = given.network_bytes_per_s * given.network_share
    before = PaperStep(
        gpus,
        ranks,
        generate_s=generate_seconds(model, heads, engines, ranks, given, work, given.drafts),
        score_s=work.forwards * 2 * model.product_parameters * all_tokens / rate,
        # Actor and critic; 6 operations per parameter and token: a forward pass (2) and a backward
        # pass (4).
        update_s=2 * work.epochs * 6 * model.product_parameters * all_tokens / rate,
        sync_s=weights / ranks / network,
        tap_s=hidden / (gpus // actor.spread) / given.host_bytes_per_s,
        swap_s=heads_size / network,
        plain_generate_s=generate_seconds(model, heads, engines, ranks, given, work, 0),
        companion_gpus=0.0,
        responses_bytes=float(TOKEN_BYTES * tokens),
        weights_bytes=float(weights * engines),
        hidden_bytes=hidden,
        tables_bytes=float(tables),
        heads_bytes=float(heads_size * engines * ranks),
    )
    flops = companion_flops(heads, tokens, given, work)
    speed = given.flops * given.train_share * (1.0 if work.bfloat16 else given.float32_share)
    return dataclasses.replace(before, companion_gpus=flops / (speed * before.seconds))


def engine_ranks(model: ModelSizes, given: Assumptions) -> int:
    """Fewest GPUs (a power of two) whose memory is at most two thirds filled by the weights."""
    need = BFLOAT16 * model.parameters / (given.memory_bytes * 2 / 3)
    return 1 << max(0, math.ceil(math.log2(need)))


def generate_seconds(
    model: ModelSizes,
    heads: HeadsConfig,
    engines: int,
    ranks: int,
    given: Assumptions,
    work: Workload,
    drafts: int,
) -> float:
    """One rollout batch on all engines: the prompts, full batches, then the remaining long
    responses.
    """
    per_engine = work.responses / engines
    # Half of the response: the average length of a running sequence.
    cache = BFLOAT16 * model.cache_elements * (work.prompt_tokens + work.response_tokens / 2)
    # 0.9 of a GPU is engine.memory_fraction if PPO is not on the same GPU.
    room = ranks * given.memory_bytes * 0.9 - BFLOAT16 * model.parameters
    running = max(1.0, min(per_engine, room / cache))
    length = work.response_tokens / (1 + (given.accepted if drafts else 0.0))
    prompt_s = (
        2
        * model.product_parameters
        * per_engine
        * work.prompt_tokens
        / (ranks * given.flops * given.train_share)
    )
    steps = per_engine / running * length
    tail = (work.longest - 1) * length
    # A tenth represents the tail: the last responses run nearly alone, so weights are read for few
    # tokens.
    few = max(1.0, running / 10)
    return (
        prompt_s
        + steps
        * decode_seconds(
            model, heads, running, ranks, given, drafts, cache, work.width(model.vocab)
        )
        + tail
        * decode_seconds(model, heads, few, ranks, given, drafts, cache, work.width(model.vocab))
    )


def decode_seconds(
    model: ModelSizes,
    heads: HeadsConfig,
    running: float,
    ranks: int,
    given: Assumptions,
    drafts: int,
    cache: float,
    width: int,
) -> float:
    """One engine step: reading the weights (`width` rows of lm_head once more per draft) and the
    cache, or the arithmetic, whichever takes longer.
    """
    drafter = drafts * (width * model.hidden + heads_parameters(heads) / heads.num_heads)
    read = BFLOAT16 * (model.product_parameters + drafter) + running * cache
    arithmetic = 2 * running * (model.product_parameters * (1 + drafts) + drafter)
    speed = ranks * given.decode_share
    # A roofline: reading and arithmetic overlap, and the slower one is what it takes.
    busy = max(read / (speed * given.memory_bytes_per_s), arithmetic / (speed * given.flops))
    return busy + given.step_overhead_s + (2 * model.layers * given.reduce_s if ranks > 1 else 0.0)


def head_flops(
    heads: HeadsConfig, *, training: bool, width: int = 0, teacher: bool = False
) -> float:
    """Operations of all heads at one position. Tables and h_t get no gradient, so only products
    after the first weights have two products in the backward pass.

    Args:
        width: tokens that drafts come from; 0: all.
        teacher: whether the loss reads the actor's own distribution: one more product with lm_head
            for each row that a head's target follows.
    """
    D = heads.hidden_size
    V = width or heads.vocab_size
    # A forward product (2), the gradient to the features (4), and for the heads' own table the
    # gradient to it (6).
    logits = (2.0 if not training else 4.0 if heads.lm_head == "shared" else 6.0) * D * V
    total = heads.num_heads * logits
    # Each row of a block of neighbours once, plus those after its end.
    if teacher and training:
        total += 2.0 * D * V * (TOGETHER + heads.num_heads - 1) / TOGETHER
    # Nothing is propagated back into h_t, so a first layer's gradient is one product instead of
    # two.
    first = heads.kind != "hydra"
    for layer in range(heads.num_layers):
        total += (
            heads.num_heads
            * D
            * D
            * (2.0 if not training else 4.0 if first and layer == 0 else 6.0)
        )
    inner = heads.mlp_ratio * D
    # Each pair is computed once, because training uses whole blocks and serving keeps pairs.
    if heads.context:
        total += (6 * D * D + inner * D) * (4.0 if training else 2.0)
        total += D * D * (6.0 if training else 2.0)
        total += heads.num_heads * inner * D * ((4.0 + 6.0) if training else (2.0 + 2.0))
        total += (heads.num_heads - 1) * inner * inner * (6.0 if training else 2.0)
    elif heads.kind == "hydra":
        total += sum(inner * D * (k + 2) for k in range(heads.num_heads)) * (
            4.0 if training else 2.0
        )
        total += heads.num_heads * inner * D * (6.0 if training else 2.0)
    return total


def companion_flops(heads: HeadsConfig, tokens: int, given: Assumptions, work: Workload) -> float:
    """Training on one batch, and the gate's replay on the holdout, which is HOLDOUT_TOKENS at
    most.
    """
    width = work.width(heads.vocab_size)
    position = head_flops(heads, training=True, width=width, teacher=bool(work.teacher))
    held = min(given.holdout * tokens, HOLDOUT_TOKENS)
    learned = (tokens - held) * work.trained * work.passes * position
    replayed = given.judged * held * head_flops(heads, training=False, width=width)
    return learned + replayed


def table(kind: Kind, given: Assumptions, work: Workload) -> list[tuple[str, PaperStep]]:
    rows = []
    for name, actor in ACTORS.items():
        # The product's defaults.
        heads = HeadsSection(kind=kind).sizes(actor.sizes.hidden, actor.sizes.vocab)
        for gpus in GPUS:
            step = step_on_paper(actor, heads, gpus, given, work)
            if step is not None:
                rows.append((name, step))
    return rows


def markdown(rows: list[tuple[str, PaperStep]]) -> list[str]:
    out = [
        (
            "| actor | GPUs | GPUs per engine | generate s | score + update s | sync + tap + swap s"
            " | step s | speed-up | companion, GPUs | share | weights moved | hidden states |"
            " heads |"
        ),
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, s in rows:
        moved = " | ".join(size_text(n) for n in (s.weights_bytes, s.hidden_bytes, s.heads_bytes))
        moves_s = s.sync_s + s.tap_s + s.swap_s
        seconds = (
            f"{s.generate_s:.1f} | {s.score_s + s.update_s:.1f} | {moves_s:.2f} | {s.seconds:.1f} |"
            f" {s.speedup:.2f}"
        )
        companion = f"{s.companion_gpus:.2f} | {100 * s.companion_share:.1f} %"
        out.append(f"| {name} | {s.gpus} | {s.engine_ranks} | {seconds} | {companion} | {moved} |")
    return out


def verdict(rows: list[tuple[str, PaperStep]]) -> list[str]:
    """Where the companion takes more than its share, and the share of the positions that it could
    train on there.
    """
    above = [(name, s) for name, s in rows if s.companion_share > TARGET]
    out = [
        f"Companion within {100 * TARGET:.0f} % of the fleet in {len(rows) - len(above)} of"
        f" {len(rows)} cases."
    ]
    for name, s in above:
        fits = TARGET / s.companion_share
        out.append(
            f"  {name} on {s.gpus}: {100 * s.companion_share:.1f} %; within when it trains on"
            f" {100 * fits:.0f} % of the positions."
        )
    return out


def overridden(values: Any, pairs: list[str]) -> Any:
    """A copy with the `name=value` pairs that name its fields applied."""
    fields = {field.name: field.type for field in dataclasses.fields(values)}
    found = dict(pair.split("=", 1) for pair in pairs)
    return dataclasses.replace(
        values,
        **{n: (int if fields[n] == "int" else float)(v) for n, v in found.items() if n in fields},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="One PPO step on a cluster, on paper.")
    parser.add_argument(
        "--kind",
        default="hydra",
        choices=("medusa", "hydra"),
        help="kind of the heads (K = 4)",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="another value of an assumption or of the workload",
    )
    parser.add_argument("--json", type=Path, help="write every number to this file")
    options = parser.parse_args()
    given = overridden(Assumptions(), options.set)
    work = overridden(Workload(), options.set)
    known = {field.name for kind in (Assumptions, Workload) for field in dataclasses.fields(kind)}
    if unknown := [pair for pair in options.set if pair.split("=")[0] not in known]:
        parser.error(f"unknown: {unknown[0]}; known: {', '.join(sorted(known))}")
    rows = table(options.kind, given, work)
    sys.stdout.write("\n".join([*markdown(rows), "", *verdict(rows)]) + "\n")
    if options.json:
        figures = [
            {
                "actor": name,
                **dataclasses.asdict(s),
                "seconds": s.seconds,
                "companion_share": s.companion_share,
            }
            for name, s in rows
        ]
        result = {
            "assumptions": dataclasses.asdict(given),
            "workload": dataclasses.asdict(work),
            "rows": figures,
        }
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
