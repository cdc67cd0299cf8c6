"""heads/FORMAT.md says of every field and tensor what the code does."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path

import pytest

from heads.checkpoint import FORMAT_VERSIONS, load_heads, save_heads
from heads.errors import CheckpointError
from heads.heads_config import SINCE_COPYING, HeadsConfig
from heads.modules import MedusaHeads

PAGE = (Path(__file__).resolve().parents[2] / "heads" / "FORMAT.md").read_text(encoding="utf-8")
D, V = 320, 40
EVERY_FORM = [
    HeadsConfig(D, V, 2, "medusa", num_layers=2, lm_head="own"),
    HeadsConfig(D, V, 3, "hydra", mlp_ratio=3),
    HeadsConfig(D, V, 2, "hydra", context=5),
    HeadsConfig(
        D, V, 2, "hydra", context=5, context_layers=3, feed_forward=4, copy_parts=2, copy_tokens=5
    ),
]


def rows(heading: str, columns: int) -> list[list[str]]:
    """Cells of a section's rows of so many columns whose first cell is code."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line.strip("|").split("|") for line in section.splitlines() if line[:3] == "| `"]
    cells = [[cell.strip() for cell in line] for line in lines]
    return [row for row in cells if len(row) == columns]


FIELDS = {row[0].strip("`"): row[1:] for row in rows("config.json", 5)}
TENSORS = {row[0].strip("`"): row[1] for row in rows("model.safetensors", 3)}


def written_shape(name: str, config: HeadsConfig) -> tuple[int, ...]:
    """What the page says of a tensor, worked out for one configuration."""
    form = re.sub(r"\d+", "{}", name)
    numbers = [int(number) for number in re.findall(r"\d+", name)]
    found = [row for row in TENSORS if re.sub(r"\{\w\}", "{}", row) == form]
    assert len(found) == 1, f"{name} stands {len(found)} times on the page"
    sizes = {
        "D": D,
        "V": V,
        "K": config.num_heads,
        "H": config.mlp_ratio * D,
        "F": config.feed_forward * D,
        "A": config.copy_parts,
        "M": config.copy_tokens,
        "w": 64,
        "R": min(D, max(256, D // 4)),
        **dict(zip(re.findall(r"\{(\w)\}", found[0]), numbers, strict=True)),
    }
    sides = TENSORS[found[0]].strip("[]").split(", ")
    return tuple(
        math.prod(
            sum(sizes[term] if term in sizes else int(term) for term in factor.split(" + "))
            for factor in re.findall(r"[^()]+(?=\))|\w+(?![^(]*\))", side)
        )
        for side in sides
    )


@pytest.mark.parametrize("config", EVERY_FORM, ids=lambda config: f"{config.kind}{config.context}")
def test_every_tensor_has_its_name_and_shape_on_the_page(config: HeadsConfig) -> None:
    shapes = config.shapes_among(["temperatures"])
    assert {name: written_shape(name, config) for name in shapes} == shapes


def test_no_tensor_is_on_the_page_that_heads_never_have() -> None:
    written = {re.sub(r"\{\w\}", "{}", name) for name in TENSORS}
    had = {
        re.sub(r"\d+", "{}", name)
        for config in EVERY_FORM
        for name in config.shapes_among(["temperatures"])
    }
    assert written == had | {"lm_head.weight"}


def test_every_field_has_its_default_and_version_on_the_page() -> None:
    fields = {field.name: field for field in dataclasses.fields(HeadsConfig)}
    assert FIELDS.keys() == fields.keys()
    for name, (default, _, _, since) in FIELDS.items():
        given = fields[name].default
        assert default.strip("`") == ("" if given is dataclasses.MISSING else json.dumps(given))
        assert since == ("3" if name in SINCE_COPYING else "1")


@pytest.mark.parametrize("name", [name for name, row in FIELDS.items() if " to " in row[1]])
def test_the_largest_value_on_the_page_is_the_largest_that_is_read(
    tmp_path: Path, name: str
) -> None:
    most = int(FIELDS[name][1].split(" to ")[1].replace(",", ""))
    save_heads(tmp_path / "heads", MedusaHeads(HeadsConfig(16, V, 2, "hydra", context=5)))
    file = tmp_path / "heads" / "config.json"
    config = json.loads(file.read_text())

    def refusal(value: int) -> str:
        config["medusa_ppo"]["heads"][name] = value
        file.write_text(json.dumps(config))
        try:
            load_heads(tmp_path / "heads")
        except CheckpointError as error:
            return str(error)
        return ""

    # The file's tensors are others in most cases: what counts is whether the bound is named.
    bound = re.compile(rf"{name} {most + 1} > {most}|<= {most}\b")
    assert bound.search(refusal(most + 1))
    assert not bound.search(refusal(most))


def test_every_version_is_on_the_page() -> None:
    assert [int(row[0]) for row in re.findall(r"^\| (\d) \|", PAGE, re.MULTILINE)] == list(
        FORMAT_VERSIONS
    )
