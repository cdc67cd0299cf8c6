"""How would the companion have done on a run's batches with other settings? Records the batches of
a real run, then trains on them again, without engine and actor.

    python benchmarks/replay_companion.py record FOLDER --config demo [key=value ...]
    python benchmarks/replay_companion.py replay FOLDER [companion.key=value ...] [--passes 1.5]

`record` is `medusa-ppo ppo` with a companion client that also writes its batches to files: the
warm-up's batch, then one per step with the passes that the budget allowed. `replay` runs the
companion's own `Cycle` on them; --passes multiplies these passes, like another `companion.share` or
a faster machine would. An engine drafts with the heads that the cycle serves, so its acceptance is
replayed exactly: it depends only on the batch and the heads.

The output for each batch: the version that served it, tokens per engine step by replay on the whole
batch before anything is trained on it (serving heads, first published heads), and CPU seconds of
training and judging; then the means of the last four batches.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from heads.heads_config import HeadsConfig
from heads.modules import MedusaHeads
from medusa_ppo.companion.client import CompanionClient
from medusa_ppo.companion.cycle import Cycle
from medusa_ppo.companion.gate import Served, replay
from medusa_ppo.companion.service import make_cycle
from medusa_ppo.companion.wire import ServiceArguments, TableRows, pack, pack_tables
from medusa_ppo.config.companion_section import CompanionConfig
from medusa_ppo.config.config_file import preset
from medusa_ppo.config.run_config import load_config
from medusa_ppo.contract.rollout_batch import RolloutBatch
from medusa_ppo.plugin import medusa_plugin
from medusa_ppo.ppo.loop import run_ppo
from medusa_ppo.ppo.run_progress import make_progress
from medusa_ppo.runtime.console import say

START = "start.pt"
LAST = 4
"""Number of batches in the closing line, as in a run's report."""
SERVED = ("draft_temperature", "num_drafts", "draft_vocab")


class RecordingClient(CompanionClient):
    """Hands batches over like any client, and writes each to a file with its tables."""

    folder: Path

    def __init__(
        self,
        heads: HeadsConfig,
        config: CompanionConfig,
        lm_head_VD: torch.Tensor,
        *,
        seed: int,
        embedding_VD: torch.Tensor | None = None,
        initial_state: dict[str, torch.Tensor] | None = None,
        **others: Any,
    ) -> None:
        self._written = 0
        self._recorded = (lm_head_VD, embedding_VD)
        self.folder.mkdir(parents=True, exist_ok=True)
        start = {
            "heads": asdict(heads),
            "companion": config.model_dump(mode="json"),
            "seed": seed,
            "initial_state": initial_state,
            **{name: others[name] for name in SERVED if name in others},
        }
        torch.save(start, self.folder / START)
        super().__init__(
            heads,
            config,
            lm_head_VD,
            seed=seed,
            embedding_VD=embedding_VD,
            initial_state=initial_state,
            **others,
        )

    def submit(self, batch: RolloutBatch, rows: TableRows | None = None) -> None:
        lm_head_VD, embedding_VD = self._recorded
        row = {field.name: getattr(batch, field.name) for field in fields(batch)}
        row |= {"lm_head_VD": lm_head_VD, "embedding_VD": embedding_VD}
        torch.save(row, self.folder / f"batch-{self._written:04d}.pt")
        self._written += 1
        super().submit(batch, rows)

    def update_lm_head(
        self,
        lm_head_VD: torch.Tensor,
        policy_version: int,
        *,
        embedding_VD: torch.Tensor | None = None,
    ) -> None:
        copies = [None if table is None else table.clone() for table in (lm_head_VD, embedding_VD)]
        self._recorded = (copies[0], copies[1])
        super().update_lm_head(lm_head_VD, policy_version, embedding_VD=embedding_VD)


def record(folder: Path, config: str, overrides: Sequence[str]) -> None:
    """Run PPO, and store what its companion receives."""
    RecordingClient.folder = folder
    medusa_plugin.CompanionClient = RecordingClient  # type: ignore[misc]  # For this process alone.
    path = preset(config) if not Path(config).is_file() else config
    with make_progress() as progress:
        run_ppo(load_config(path, [*overrides, f"out={folder}", "name=run"]), progress)


def cycle_of(start: dict[str, Any], first: dict[str, Any], overrides: Sequence[str]) -> Cycle:
    """A cycle in the initial state of the run's companion, except for these settings.

    Args:
        first: the first recorded batch, with the run's initial tables.
    """
    settings = start["companion"]
    for override in overrides:
        key, value = override.split("=", 1)
        name = key.removeprefix("companion.")
        settings[name] = value if value not in ("null", "") else None
    arguments = ServiceArguments(
        HeadsConfig(**start["heads"]),
        CompanionConfig.model_validate(settings),
        start["seed"],
        pack(start["initial_state"]),
        "",
        "",
        "",
        **{name: start[name] for name in SERVED if name in start},
    )
    return make_cycle(arguments, pack_tables(first["lm_head_VD"], first["embedding_VD"]))


def measured(cycle: Cycle, heads: MedusaHeads, batch: RolloutBatch, served: Served) -> float:
    with cycle.trainer.products():
        result = replay(
            heads,
            batch,
            cycle.trainer.lm_head_VD,
            embedding_VD=cycle.trainer.embedding_VD,
            served=served,
        )
    return result.mean_acceptance_length


def replay_run(folder: Path, overrides: Sequence[str], factor: float, threads: int) -> None:
    torch.set_num_threads(threads)
    files = sorted(folder.glob("batch-*.pt"))
    start = torch.load(folder / START, weights_only=True)
    cycle = cycle_of(start, torch.load(files[0], weights_only=True), overrides)
    served = Served(start.get("draft_temperature", 0.0), start.get("num_drafts"))
    rows: list[tuple[float, float]] = []
    say("batch  version  serving  frozen  passes  CPU s  verdict")
    for number, path in enumerate(files):
        found = torch.load(path, weights_only=True)
        tables = found.pop("lm_head_VD"), found.pop("embedding_VD")
        batch = RolloutBatch(**found)
        cycle.trainer.set_tables(*tables)
        serving = measured(cycle, cycle.serving, batch, served)
        frozen = measured(cycle, cycle.frozen, batch, served) if cycle.frozen else serving
        version = cycle.version
        began_s = time.process_time()
        verdict = ""
        if batch.rising_s is not None:
            # Its limit is in seconds, and a replay must not depend on how busy the machine is.
            batch = replace(batch, rising_s=1e9)
        elif batch.passes is not None:
            batch = replace(batch, passes=batch.passes * factor)
        report = cycle.run(batch)
        if report.verdict is not None:
            verdict = report.verdict.reason
        took_s = time.process_time() - began_s
        if batch.rising_s is None:
            rows.append((serving, frozen))
        say(
            f"{number:5d}  {version:7d}  {serving:7.3f}  {frozen:6.3f}  {cycle.passes:6.2f}"
            f"  {took_s:5.1f}  {verdict}"
        )
    if last := rows[-LAST:]:  # An interrupted run may have only its warm-up.
        say(
            f"last {len(last)} batches: {fmean(row[0] for row in last):.3f} tokens an engine step,"
            f" {fmean(row[1] for row in last):.3f} by the first version; {cycle.version} versions"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("record", "replay"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--config", default="demo", help="record: a preset or a file")
    parser.add_argument("--passes", type=float, default=1.0, help="replay: factor on the passes")
    parser.add_argument("--threads", type=int, default=1, help="replay: of torch")
    args = parser.parse_intermixed_args()
    if args.what == "record":
        record(args.folder, args.config, args.overrides)
    elif not any(args.folder.glob("batch-*.pt")):
        parser.error(f"{args.folder} holds no recorded batches; record a run into it first")
    else:
        replay_run(args.folder, args.overrides, args.passes, args.threads)


if __name__ == "__main__":
    main()
