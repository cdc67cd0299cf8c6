"""Tables of step times, saved from one start of an engine to the next.

A file's name is a digest of what determines step times (machine, model, vLLM, ...), and the file
repeats it in plain text. Unusable tables are reported and measured again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from medusa_ppo.runtime.files import cache_folder, write_atomic

logger = logging.getLogger(__name__)

FORMAT = 1
LARGEST_BYTES = 1 << 20
MOST_SEQUENCES = 1 << 20
LONGEST_S = 3600.0
"""A longer step can't have been measured."""


def table_file(key: Mapping[str, Any]) -> Path:
    """File of the table for this engine on this machine."""
    digest = hashlib.blake2b(_text(key).encode(), digest_size=12).hexdigest()
    return cache_folder("step-times") / f"{digest}.json"


def read_table(key: Mapping[str, Any], max_drafts: int) -> list[dict[str, float]]:
    """Rows of a `StepTable`; empty if none are usable. The log then says why, unless nothing was
    saved yet.
    """
    file = table_file(key)
    try:
        with file.open("rb") as stream:
            content = stream.read(LARGEST_BYTES + 1)
        if len(content) > LARGEST_BYTES:
            raise ValueError(f"more than {LARGEST_BYTES} bytes")
        raw = json.loads(content)
        if raw["format"] != FORMAT or _text(raw["key"]) != _text(key):
            raise ValueError("from another machine, model or version")
        return [_checked(row, max_drafts) for row in raw["rows"]]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        logger.warning("The step times in %s are not used, but measured again: %s.", file, error)
        return []


def keep_table(key: Mapping[str, Any], rows: Sequence[Mapping[str, float]]) -> None:
    """Write the file. An unwritable folder only costs the next start a calibration."""
    file = table_file(key)
    content = {"format": FORMAT, "key": key, "rows": [dict(row) for row in rows]}
    try:
        write_atomic(file, json.dumps(content, indent=1) + "\n")
    except OSError as error:
        logger.warning("The step times can't be saved in %s: %s.", file, error)


def _text(key: object) -> str:
    return json.dumps([FORMAT, key], sort_keys=True)


def _checked(row: Mapping[str, Any], max_drafts: int) -> dict[str, float]:
    counts = [row[name] for name in ("running", "drafts", "steps")]
    seconds = row["seconds"]
    most = (MOST_SEQUENCES, max_drafts, MOST_SEQUENCES)
    whole = all(type(count) is int for count in counts) and type(seconds) in (int, float)
    if (
        not whole
        or not all(low <= n <= high for low, n, high in zip((1, 0, 1), counts, most, strict=True))
        or not (math.isfinite(seconds) and 0 < seconds <= LONGEST_S)
    ):
        raise ValueError(f"{str(dict(row))[:100]} is not a row of step times")
    running, drafts, steps = counts
    return {"running": running, "drafts": drafts, "seconds": float(seconds), "steps": steps}
