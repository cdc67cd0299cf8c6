"""A companion's desk behind HTTP in the test's own process, for tests of taps."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from medusa_ppo.companion.companion_server import CompanionServer
from medusa_ppo.companion.desk import CompanionDesk
from medusa_ppo.companion.parts_wire import with_logprobs
from medusa_ppo.companion.wire import TableRows, unpack
from medusa_ppo.config.run_config import build_config
from medusa_ppo.contract.rollout_batch import RolloutBatch
from medusa_ppo.loops import served_companion
from medusa_ppo.loops.loop_versions import replaced
from tests.medusa_ppo.companion.conftest import until


def desk_config(folder: Path, companion: Mapping[str, Any] | None = None, **engine: Any) -> Any:
    section = {"feed": str(folder / "feed"), "batch_positions": 64, "num_gpus": 0}
    section |= companion or {}
    return build_config({"heads": {"num_heads": 2}, "companion": section, "engine": engine})


@dataclass
class ServedDesk:
    """
    Attributes:
        seen: batches as they reached the training, with the log-probs that it computes first.
        tables: the actor's tables as of the last batch, whole or the rows that it needs.
    """

    desk: CompanionDesk
    address: str
    tables: Any
    seen: list[RolloutBatch] = field(default_factory=list)


@contextlib.contextmanager
def served_desk(
    actor: Path, folder: Path, companion: Mapping[str, Any] | None = None, **engine: Any
) -> Iterator[ServedDesk]:
    """MEDUSA_PPO_COMPANION_TOKEN must be set. `companion`, `engine`: settings of these sections.
    The feed is FOLDER/feed, the heads to start with are FOLDER/heads.
    """
    with replaced(served_companion, "settle", lambda config: None):  # This very process.
        arguments, tables = served_companion._arguments(
            desk_config(folder, companion, **engine), str(actor), folder / "heads", None
        )
        holder = served_companion._Desk(arguments, tables)
    server = CompanionServer(holder.desk, "127.0.0.1", 0)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    assert until(lambda: bool(server.port) or not thread.is_alive())
    served = ServedDesk(holder.desk, f"http://127.0.0.1:{server.port}", tables)
    take = holder.desk._service.submit

    def submit(packed: Any, tables: Any = None, *, missing: Any = ()) -> int:
        if tables is not None:
            served.tables = unpack(tables)
        rows = isinstance(served.tables, TableRows)
        lm_head_VD = served.tables.lm_head_RD if rows else served.tables[0]
        served.seen.append(with_logprobs(unpack(packed), missing, lm_head_VD))
        return int(take(packed, tables, missing=missing))

    try:
        with replaced(holder.desk._service, "submit", submit):
            yield served
    finally:
        server.stop()
        thread.join()
        holder.close()
