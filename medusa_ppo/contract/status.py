"""What companion and engines report about heads: published versions, estimates, receipts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PublishedHeads:
    """A version of the heads that the companion offers to the engine.

    Attributes:
        version: grows by one with every publish; 0 are the heads that the run started with.
        path: safetensors file (shared memory) with the trainable tensors; keys as in
            heads/FORMAT.md.
        checksum: hex digest over names and bytes; the engine reports the same after the swap.
        policy_version: version of the actor whose rollouts were trained on last.
        mean_acceptance_length: replay estimate of these heads on the holdout.
    """

    version: int
    path: str
    checksum: str
    policy_version: int
    mean_acceptance_length: float


@dataclass(frozen=True)
class ReplayRow:
    """Replay estimate of one set of heads on one batch's holdout."""

    mean_acceptance_length: float
    acceptance_per_position: tuple[float, ...]


@dataclass(frozen=True)
class CompanionStatus:
    """What the companion has done so far. Values are totals since its start unless a name says
    otherwise.

    `train_s` is the time of training, `worked_s` the part of it taken from others: on a CPU, the
    seconds of a core. `passes` and `positions_frac` are those of the last batch; `rate` is the
    factor on the configured step size for the next one, `learning_rate` that of the last optimizer
    step (0 before the first of a process). The gate has judged `judged` batches; `gain` is how much
    better the candidate then was than the serving heads. `versions_followed` were compared with
    their predecessor on later batches, and `versions_worse` were significantly worse. `fresh`:
    `candidate` is the estimate of the last published version, and `serving` that of the one before.
    `replayed_version` is the version of the heads in `serving`, and `replayed_policy_version` that
    of the actor whose rollouts all three were judged on; below 0: no batch was judged.
    `incarnation`: which process.
    """

    alive: bool = True
    batches_received: int = 0
    batches_dropped: int = 0
    batches_trained: int = 0
    trained_tokens: int = 0
    optimizer_steps: int = 0
    versions_published: int = 0
    candidates_rejected: int = 0
    train_s: float = 0.0
    queue_bytes: int = 0
    last_loss: float = float("nan")
    last_policy_version: int = -1
    serving: ReplayRow | None = None
    candidate: ReplayRow | None = None
    frozen: ReplayRow | None = None
    error: str = ""
    restarts: int = 0
    losses: tuple[float, ...] = ()
    passes: float = 0.0
    judged: int = 0
    gain: float = 0.0
    versions_followed: int = 0
    versions_worse: int = 0
    positions_frac: float = 0.0
    positions_left_out: int = 0
    gpu_gib: float | None = None
    workers: int = 1
    rate: float = 1.0
    learning_rate: float = 0.0
    worked_s: float = 0.0
    fresh: bool = False
    replayed_version: int = -1
    replayed_policy_version: int = -1
    incarnation: str = ""


@dataclass(frozen=True)
class Checked:
    """What is known of a whole file of weights that was checked, while it was read or written: it
    is finite, and has this `heads.tensorfile.checksum`, by which later readers confirm its bytes.
    """

    checksum: str


@dataclass(frozen=True)
class SwapReceipt:
    """An engine's report after new heads or a new actor arrived."""

    version: int
    checksum: str
    seconds: float
