"""Rows and prompts from any local JSONL, Parquet, CSV or text file, or from a hub name, through
`datasets`.
"""

from __future__ import annotations

import codecs
import difflib
import mmap
import os
import string
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets

from heads.errors import DataError
from medusa_ppo.runtime.data_files import FILE_TYPES, data_file, without_split

Row = dict[str, Any]


def load_rows(path: str | os.PathLike[str], *, split: str = "train", limit: int = 0) -> list[Row]:
    """All rows (or the first `limit`) of a file, a folder of files, or a dataset on the hub.

    Args:
        path: local file by its ending, local folder, or hub name (`owner/name`, with a
            configuration `owner/name:config`, with a split `owner/name@split`).
        split: split of a folder, or of a hub dataset whose name has none; a single file has none.
        limit: use only the first rows; 0: all.

    Raises:
        DataError: no such file or dataset, unknown file type, unreadable content, no rows.
    """
    name = os.fspath(path)
    found = _load(name, split)
    if limit:
        found = found.select(range(min(limit, len(found))))
    rows = found.to_list()
    if not rows:
        raise DataError(
            "The data has no rows.",
            given=name,
            expected="at least one row",
            do="Check the file, the split and the limit.",
        )
    return rows


def stream_rows(path: str | os.PathLike[str]) -> Iterator[Row]:
    """The rows of the split `train` one by one, read only on demand: for data larger than the
    memory or the disk.

    Raises:
        DataError: like `load_rows`; for later content, when it is reached.
    """
    name = os.fspath(path)
    found = _load(name, "train", streaming=True)
    with _one_sentence(name):
        yield from found


def render_prompts(rows: Sequence[Row], *, template: str = "", column: str = "prompt") -> list[str]:
    """One prompt per row: the template with the row's fields in braces, or the prompt column if
    there is no template.

    Raises:
        DataError: a field or the column is missing, the template is malformed, or a prompt is empty
            or not a text.
    """
    if not rows:
        raise DataError(
            "There are no rows to make prompts from.",
            given="0 rows",
            expected="at least one",
            do="Check the data.",
        )
    fields = template_fields(template) if template else [column]
    for field in fields:
        require_column(rows, field)
    prompts = [template.format_map(row) if template else row[column] for row in rows]
    for index, prompt in enumerate(prompts):
        if not isinstance(prompt, str) or not prompt:
            raise DataError(
                "A prompt is not a text.",
                given=f"row {index}: {prompt!r:.80}",
                expected="a non-empty text",
                do="Correct the data or the column.",
            )
    return prompts


def image_files(rows: Sequence[Row], column: str, path: str) -> list[tuple[bytes, ...]]:
    """Each row's images in file form; none if the column is empty.

    Args:
        column: a path or a file's bytes, an image as `datasets` stores it (both in a mapping), or a
            list of these.
        path: path of the data; relative paths start at its folder.

    Raises:
        DataError: no such column, or a file that can't be read.
    """
    require_column(rows, column)
    # A dataset from the hub is neither a file nor a folder; its images include their bytes.
    place = Path(path).expanduser()
    folder = place if place.is_dir() else place.parent if place.is_file() else Path()
    found = []
    for index, row in enumerate(rows):
        value = row[column]
        items = value if isinstance(value, (list, tuple)) else [] if value is None else [value]
        found.append(
            tuple(_image_file(item, folder, f"row {index}, column {column}") for item in items)
        )
    return found


def _image_file(item: Any, folder: Path, where: str) -> bytes:
    if isinstance(item, dict):
        # `datasets` writes both keys; with bytes, the path is only a name.
        item = item.get("bytes") or item.get("path")
    if isinstance(item, bytes):
        return item
    if not isinstance(item, str):
        expected = "a path, a file's bytes, or a list of them"
        do = "Name the column of the images in data.images."
        raise DataError(
            "This is not an image.",
            given=f"{where}: {type(item).__name__} {item!r:.80}",
            expected=expected,
            do=do,
        )
    try:
        return (folder / item).read_bytes()
    # ValueError: a path with a null byte.
    except (OSError, ValueError) as error:
        do = "Correct the path, or remove the row; paths are relative to the data file's folder."
        raise DataError(
            "An image can't be read.", given=f"{where}: {error}", expected="an image file", do=do
        ) from None


def template_fields(template: str) -> list[str]:
    """Names in braces, in order. Raises DataError for anything but plain names."""
    try:
        parts = [
            (field, spec, sign)
            for _, field, spec, sign in string.Formatter().parse(template)
            if field is not None
        ]
    except ValueError as error:
        raise DataError(
            "The template is malformed.",
            given=f"{template!r}: {error}",
            expected="{field}, and {{ }} for braces",
            do="Correct the braces: single ones for a field, double ones for a literal brace.",
        ) from None
    for field, spec, sign in parts:
        # `format_map` reads a.b and a[b] as parts of the value of column a, but a column may have
        # such a name; it would then print something other than the column.
        if not field or spec or sign or any(mark in field for mark in ".[]"):
            given = f"{{{field}{'!' * bool(sign)}{sign or ''}{':' * bool(spec)}{spec}}}"
            raise DataError(
                "The template contains something that is not a field.",
                given=given,
                expected="the name of a column",
                do="Write the bare name of a column between the braces.",
            )
    return [field for field, _, _ in parts]


def require_column(rows: Sequence[Row], column: str) -> None:
    """Raise DataError if any row lacks the column, naming the available columns and the closest."""
    if all(column in row for row in rows):
        return
    names = list(rows[0])
    near = difflib.get_close_matches(column, names, n=1)
    do = f"Did you mean {near[0]}?" if near else "Name one of these columns."
    raise DataError("The data has no such column.", given=column, expected=", ".join(names), do=do)


def _load(name: str, split: str, streaming: bool = False) -> Any:
    path = data_file(name)
    if path is None and Path(name).is_dir():
        for file in sorted(
            path for path in Path(name).rglob("*.json*") if FILE_TYPES.get(path.suffix) == "json"
        ):
            # All JSON files below it, since `datasets` picks those of the split by its own rules.
            _refuse_null_lines(file)
        return _quietly(name, name, split=split, streaming=streaming)
    if path is None:
        whole, named = without_split(name)
        # Unlike a path, a hub name contains no colon.
        repository, _, configuration = whole.partition(":")
        return _quietly(
            name, repository, configuration or None, split=named or split, streaming=streaming
        )
    kind = FILE_TYPES[path.suffix]
    if kind == "json":
        _refuse_null_lines(path)
    return _quietly(path, kind, data_files=str(path), split="train", streaming=streaming)


def _refuse_null_lines(path: Path) -> None:
    """Raise DataError for a line that begins with null: pyarrow (26) crashes the process if one
    comes first in a block of its reader.
    """
    if not path.is_file() or path.stat().st_size == 0:
        return
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        place = data.find(b"null")
        while place >= 0:
            before = place - 1
            while before >= 0 and data[before] in b" \t\r":
                before -= 1
            # A byte order mark may precede the first line.
            if before < 0 or data[before] in b"\n" or (before == 2 and data[:3] == codecs.BOM_UTF8):
                # The line is counted only for the error message; a valid file, which may have
                # gigabytes, is only searched once.
                line = data[:place].count(b"\n") + 1
                raise DataError(
                    "A row of the data is null.",
                    given=f"{path}, line {line}",
                    expected="a JSON object",
                    do="Remove the line.",
                )
            place = data.find(b"null", place + 4)


def _quietly(given: object, *args: Any, **kwargs: Any) -> Any:
    """datasets.load_dataset without progress bars, and with one sentence for whatever it raises."""
    bars = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        with _one_sentence(given):
            return datasets.load_dataset(*args, **kwargs)
    finally:
        if not bars:
            datasets.enable_progress_bars()


@contextmanager
def _one_sentence(given: object) -> Iterator[None]:
    """Turn whatever `datasets` raises in the block into a DataError."""
    try:
        yield
    # `datasets` raises its own errors and those of pyarrow, pandas, the hub's client and the
    # system.
    except Exception as error:
        # `datasets` wraps the cause in an error that only says that something went wrong.
        cause = error.__cause__ or error
        first = (str(cause).strip().splitlines() or [type(cause).__name__])[0]
        raise DataError(
            "The data can't be read.",
            given=f"{given} ({type(cause).__name__}: {first:.200})",
            expected=(
                "a JSONL, Parquet, CSV or text file, a folder of them, or a name on the hub with"
                " this split"
            ),
            do=(
                "Check the path or name, the split (--data owner/name@split; data.split or"
                " data.eval_split of a run) and the content; the hub needs a network."
            ),
        ) from error
