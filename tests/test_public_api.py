"""The public API is a list (docs/site/public_api.yaml): each name is there, says what it is, and
nothing that documents show is missing.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import medusa_ppo
from heads.errors import UnsupportedVersionError
from medusa_ppo.config.run_config import known_keys
from medusa_ppo.contract.metrics import describe

ROOT = Path(__file__).resolve().parent.parent
GROUPS: list[dict[str, Any]] = yaml.safe_load(
    (ROOT / "docs" / "site" / "public_api.yaml").read_text()
)
NAMES = [(group["module"], name) for group in GROUPS for name in group["names"]]
# Modules whose foreign library not every machine has (or takes half a minute to load): imported by
# the slow tests alone.
OPTIONAL = ("medusa_ppo.actors.megatron", "medusa_ppo.loops.trl", "medusa_ppo.loops.trl_ppo")
LOADED = [pair for pair in NAMES if pair[0] not in OPTIONAL]
# Documents show how these are used; they are no promise.
NOT_PROMISED = {
    ("medusa_ppo.demo.task", "demo_rows"): "the embedded task of the examples",
    ("medusa_ppo.demo.actor_cache", "ensure_demo_actor"): "the embedded task of the examples",
}


def check_texts(module: str, name: str) -> None:
    """The name is there, and it and all its public methods say what they are."""
    value = getattr(importlib.import_module(module), name)
    text = (value.__doc__ if inspect.isclass(value) else inspect.getdoc(value)) or ""
    # A dataclass without a docstring gets its own signature as one.
    assert text and not text.startswith(f"{name}("), f"{module}.{name} has no docstring"
    if inspect.isclass(value):
        routines = [
            key
            for key, member in vars(value).items()
            if not key.startswith("_") and inspect.isroutine(member)
        ]
        # inspect.getdoc: a method may inherit the text of the one that it overrides.
        silent = [key for key in routines if not inspect.getdoc(getattr(value, key))]
        assert not silent, f"{module}.{name}: no docstring: {', '.join(silent)}"


@pytest.mark.parametrize(("module", "name"), LOADED, ids=lambda part: part)
def test_each_name_is_there_and_says_what_it_is(module: str, name: str) -> None:
    check_texts(module, name)


@pytest.mark.slow
@pytest.mark.parametrize("module", OPTIONAL)
def test_names_of_optional_modules(module: str) -> None:
    try:
        importlib.import_module(module)
    except (ImportError, UnsupportedVersionError) as error:
        pytest.skip(f"another version of its library is installed, or none: {error}")
    for name in [name for where, name in NAMES if where == module]:
        check_texts(module, name)


def test_no_name_stands_twice() -> None:
    assert len(NAMES) == len(set(NAMES))


def test_what_the_package_names_itself_is_public() -> None:
    assert {
        ("medusa_ppo", name) for name in medusa_ppo.__all__ if not name.startswith("__")
    } <= set(NAMES)


def imports(code: str) -> Iterator[tuple[str, str]]:
    """What a piece of Python, or of a diff, imports from our packages."""
    for match in re.finditer(
        r"^[+ ]?from ((?:heads|medusa_ppo)[\w.]*) import ([\w, ]+)$", code, re.MULTILINE
    ):
        for name in match[2].split(","):
            yield match[1], name.strip()


def test_what_documents_and_examples_import_is_public() -> None:
    shown = [*ROOT.glob("docs/*.md"), *ROOT.glob("examples/*.py"), ROOT / "README.md"]
    found = {pair for file in shown for pair in imports(file.read_text(encoding="utf-8"))}
    assert ("medusa_ppo", "MedusaPlugin") in found, "the search finds nothing"
    missing = found - set(NAMES) - set(NOT_PROMISED)
    assert not missing, f"shown to users but not in docs/site/public_api.yaml: {sorted(missing)}"


@pytest.mark.parametrize(
    ("module", "name"), [pair for pair in NAMES if pair[0] != "medusa_ppo"], ids=lambda part: part
)
def test_names_are_defined_where_they_are_imported_from(module: str, name: str) -> None:
    """The site reads sources and imports nothing; so this holds for optional modules too."""
    path = ROOT / module.replace(".", "/")
    tree = ast.parse(
        (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text(
            encoding="utf-8"
        )
    )
    defined = {
        node.name: node for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)
    }
    assert name in defined and ast.get_docstring(defined[name]), (
        f"{module} does not define {name}, or without a docstring"
    )


def test_public_names_use_the_words_of_the_glossary() -> None:
    """docs/glossary.md names, beside each word, others for the same thing: none of those stands in
    a public name, a key or a metric.
    """
    rows = re.findall(
        r"^\| ([^|]+) \| [^|]+ \| ([^|]*) \|$",
        (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    unused = {
        word.strip(): row[0] for row in rows[1:] for word in row[1].split(",") if word.strip()
    }
    assert len(unused) > 20, "the table was not found"
    public = [name for _, name in NAMES] + known_keys() + list(describe())
    parts = [
        (name, "_" + re.sub(r"(?<=[a-z0-9])(?=[A-Z])|\W", "_", name).lower() + "_")
        for name in public
    ]
    wrong = {
        name: f"say {good}"
        for word, good in unused.items()
        for name, text in parts
        if f"_{word}_" in text
    }
    assert not wrong
