"""Rows and prompts from files; every complaint names what was given and what would do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from heads.errors import DataError
from medusa_ppo.cli.input_checks import check_data
from medusa_ppo.runtime import data

ROWS = [
    {"question": "1+1?", "answer": "2"},
    {"question": "2+2?", "answer": "4"},
    {"question": "3+3?", "answer": "6"},
]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data.datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def write(folder: Path, kind: str) -> Path:
    path = folder / f"rows.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    elif kind == "csv":
        path.write_text(
            "question,answer\n" + "".join(f"{r['question']},{r['answer']}\n" for r in ROWS)
        )
    elif kind == "parquet":
        data.datasets.Dataset.from_list(ROWS).to_parquet(path)
    elif kind == "txt":
        path.write_text("".join(r["question"] + "\n" for r in ROWS))
    return path


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_tables_give_the_same_rows(tmp_path: Path, kind: str):
    rows = data.load_rows(write(tmp_path, kind))
    assert [{k: str(v) for k, v in row.items()} for row in rows] == ROWS


def test_text_files_have_one_row_a_line(tmp_path: Path):
    rows = data.load_rows(write(tmp_path, "txt"))
    assert data.render_prompts(rows, column="text") == ["1+1?", "2+2?", "3+3?"]


def test_a_folder_is_read_by_its_split(tmp_path: Path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "train.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    assert data.load_rows(folder) == ROWS[:1]


def test_limit_takes_the_first_rows(tmp_path: Path):
    assert data.load_rows(write(tmp_path, "jsonl"), limit=2) == ROWS[:2]
    assert len(data.load_rows(write(tmp_path, "jsonl"), limit=99)) == 3


def test_template_and_column():
    assert data.render_prompts(ROWS, template="Q: {question} {{x}}\nA:")[0] == "Q: 1+1? {x}\nA:"
    assert data.render_prompts(ROWS, column="question") == [row["question"] for row in ROWS]


def test_missing_column_names_the_available_ones_and_the_nearest():
    with pytest.raises(DataError) as caught:
        data.render_prompts(ROWS, template="{questoin}")
    assert (
        "questoin" in str(caught.value)
        and "question, answer" in str(caught.value)
        and "Did you mean question?" in str(caught.value)
    )
    with pytest.raises(DataError, match="no such column"):
        data.render_prompts(ROWS, column="prompt")


@pytest.mark.parametrize("template", ["{question", "{}", "{question.upper}", "{question[0]}"])
def test_malformed_templates_are_refused(template: str):
    with pytest.raises(DataError):
        data.render_prompts(ROWS, template=template)


@pytest.mark.parametrize("value", ["", None, 7, ["a"]])
def test_prompts_that_are_no_text_are_refused(value: object):
    with pytest.raises(DataError, match="not a text"):
        data.render_prompts([{"prompt": value}])


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("rows.jsonl", "", "empty"),
        ("rows.csv", "question,answer\n", "no data"),
        ("rows.xlsx", "x", "unknown"),
        ("rows.jsonl", "{not json\n", "can't be read"),
        ("rows.parquet", "not parquet", "can't be read"),
    ],
)
def test_unusable_files_are_one_sentence(tmp_path: Path, name: str, content: str, says: str):
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=says):
        data.load_rows(tmp_path / name)


def test_missing_file_names_its_neighbours(tmp_path: Path):
    write(tmp_path, "jsonl")
    with pytest.raises(DataError) as caught:
        data.load_rows(tmp_path / "row.jsonl")
    assert "rows.jsonl" in str(caught.value)


def test_unreachable_hub_name(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(data.datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match="can't be read"):
        data.load_rows("nobody/nothing-of-this-name")


@pytest.mark.parametrize(
    ("name", "repository", "configuration", "split"),
    [
        ("owner/name", "owner/name", None, "train"),
        ("owner/name@test_sft", "owner/name", None, "test_sft"),
        ("owner/name:main@test", "owner/name", "main", "test"),
        ("owner/name-1.0@test", "owner/name-1.0", None, "test"),
    ],
)
def test_a_hub_name_may_name_its_split(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    repository: str,
    configuration: str | None,
    split: str,
) -> None:
    asked: list[tuple[Any, ...]] = []

    def load(*args: Any, **kwargs: Any) -> Any:
        asked.append((*args, kwargs["split"]))
        return data.datasets.Dataset.from_list([{"question": "1 + 1"}])

    monkeypatch.setattr(data.datasets, "load_dataset", load)
    check_data(name)
    assert data.load_rows(name) == list(data.stream_rows(name)) == [{"question": "1 + 1"}]
    assert asked == [(repository, configuration, split)] * 2


def test_the_error_says_how_another_split_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any, **__: Any) -> Any:
        raise ValueError('Unknown split "train". Should be one of ["train_sft", "test_sft"].')

    monkeypatch.setattr(data.datasets, "load_dataset", load)
    with pytest.raises(DataError, match=r"train_sft(.|\n)*owner/name@split"):
        data.load_rows("owner/name")


def test_streamed_rows_are_the_same_and_read_only_as_far_as_asked_for(tmp_path: Path):
    path = write(tmp_path, "jsonl")
    assert list(data.stream_rows(path)) == data.load_rows(path)
    folder = tmp_path / "shards"
    folder.mkdir()
    (folder / "train-0.jsonl").write_text(path.read_text())
    (folder / "train-1.jsonl").write_text('{"question": broken\n')
    rows = data.stream_rows(folder)
    assert [next(rows) for _ in range(2)] == data.load_rows(path)[:2]
    with pytest.raises(DataError, match="can't be read"):
        list(rows)


@pytest.mark.parametrize(
    "text", ["null", 'null\n{"a": 1}\n', "\ufeffnull\n", '{"a": 1}\n \t null\n', "[\nnull]"]
)
def test_a_row_that_is_null_is_refused_before_the_reader_dies_of_it(
    tmp_path: Path, text: str
) -> None:
    for file in (tmp_path / "rows.jsonl", tmp_path / "folder" / "train.json"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    line = text[: text.index("null")].count("\n") + 1
    for path in (tmp_path / "rows.jsonl", tmp_path / "folder"):
        with pytest.raises(DataError, match=f"line {line}"):
            data.load_rows(path)


def test_null_in_a_row_is_a_value_or_a_word(tmp_path: Path) -> None:
    rows = [{"q": None, "a": "¿null?"}, {"q": "x", "a": "null"}]
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    )
    assert data.load_rows(tmp_path / "rows.jsonl") == rows


def test_a_missing_file_names_both_places_that_a_path_comes_from(tmp_path: Path) -> None:
    with pytest.raises(DataError) as refused:
        data.load_rows(tmp_path / "none.jsonl")
    assert "--data" in refused.value.do and "data.path" in refused.value.do
