"""Which names are paths, and which file a name of data means: told from the name and the file's
ending and size, without `datasets`, which takes seconds to load.
"""

from __future__ import annotations

import os
from pathlib import Path

from heads.errors import DataError

FILE_TYPES = {
    ".jsonl": "json",
    ".json": "json",
    ".parquet": "parquet",
    ".csv": "csv",
    ".txt": "text",
}
"""Ending -> its reader in `datasets`."""


def data_file(name: str) -> Path | None:
    """The file that holds the data; None for a folder, and for a name that the hub may have.

    Raises:
        DataError: no such file, unknown file type, or an empty file.
    """
    # Before the rules for names: a local folder `owner/name` wins over the hub's.
    path = Path(name)
    # What ends like a file's name is not looked up on the hub.
    if path.is_dir() or not (is_path_like(name) or path.suffix in FILE_TYPES):
        return None
    path = path.expanduser()
    if not path.is_file():
        near = sorted(str(other) for other in path.parent.glob("*") if other.suffix in FILE_TYPES)
        raise DataError(
            "There is no such data file.",
            given=path,
            expected=", ".join(near[:8]) or "an existing file",
            do="Correct the path: --data, or data.path of a run.",
        )
    if path.suffix not in FILE_TYPES:
        raise DataError(
            "The type of the data file is unknown.",
            given=path,
            expected=", ".join(FILE_TYPES),
            do="Convert it, or correct its ending.",
        )
    if path.stat().st_size == 0:
        raise DataError(
            "The data file is empty.",
            given=path,
            expected="at least one row",
            do="Write the rows first.",
        )
    return path


def without_split(name: str) -> tuple[str, str]:
    """A hub name (`owner/name@split`) without its split, and the split; empty: it names none.

    Raises:
        DataError: as `data_file`.
    """
    if data_file(name) is not None or Path(name).is_dir():
        return name, ""
    # Unlike a path, a hub name does not contain the sign.
    whole, _, split = name.partition("@")
    return whole, split


def refuse_split(name: str) -> None:
    """As `data_file`, for a run's prompts: raises DataError also for a hub name that names its
    split. A run has settings for that, one for training and one for the evaluation.
    """
    whole, split = without_split(name)
    if split:
        raise DataError(
            "A run's data are named without a split.",
            given=name,
            expected=whole,
            do=(
                f"Leave @{split} out, and set data.split={split}; for the evaluation's prompts,"
                f" data.eval_split={split}."
            ),
        )


def is_path_like(name: str) -> bool:
    """Whether this names a file or folder: it exists, or is written as a path. Anything else is a
    hub name: `name` or `owner/name`.
    """
    return (
        Path(name).exists()
        or name.startswith((".", "~", os.sep))
        or name.count("/") > 1
        or not name.strip()
    )
