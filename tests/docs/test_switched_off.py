"""Two keys switch the plugin off. With one of them alone an engine still starts with heads, and
keeps what they cost: its runner, its memory, its place on a list of what can't be combined.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from medusa_ppo.config.run_config import OFF, load_config
from medusa_ppo.loops.attachment import as_config

ROOT = Path(__file__).resolve().parents[2]
TEXTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SOURCES = sorted((ROOT / "medusa_ppo").rglob("*.py"))
# Sentences with one of the keys alone -> why that is what they mean.
ALONE = {
    "If the two lines stay together, set `companion.enabled=false`": "the heads go on drafting",
    "with seeded requests and no drafts, ten steps": "compares a companion with none, not drafting",
    "`engine.num_drafts=0` shows whether drafts have to do with it": "looks for a cause",
    "heads from a file as they are, or (with engine.num_drafts=0)": "says so of the other key",
}


def prose(page: Path) -> str:
    """A page without its blocks of commands."""
    text = re.sub(
        r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE
    )
    return re.sub(r"^    \S.*$", "", text, flags=re.MULTILINE)


def sentences(text: str) -> Iterator[str]:
    """The cells of a table by themselves."""
    for part in re.split(r"\n\s*\n|\n- |\|", text):
        yield from re.split(r"(?<=[.!?;])\s+(?=[A-Z`*])", " ".join(part.split()))


def messages(source: str) -> Iterator[str]:
    """The strings of a module."""
    for node in ast.walk(ast.parse(source)):
        # The keys by themselves are where OFF is defined.
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value not in OFF:
            yield from sentences(node.value)


def half_off(found: Iterator[str]) -> list[str]:
    """Sentences that name one of the keys, and not the other."""
    alone = [sentence for sentence in found if 0 < sum(key in sentence for key in OFF) < len(OFF)]
    return [text for text in alone if not any(known.lower() in text.lower() for known in ALONE)]


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.name)
def test_a_page_that_switches_the_plugin_off_names_both_keys(page: Path) -> None:
    assert half_off(sentences(prose(page))) == []


def test_messages_that_switch_the_plugin_off_name_both_keys() -> None:
    sources = {
        path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in SOURCES
    }
    found = {
        name: half_off(messages(source))
        for name, source in sources.items()
        if any(key in source for key in OFF)
    }
    assert found.pop("medusa_ppo/config/run_config.py") == [], "which defines them"
    assert {name: texts for name, texts in found.items() if texts} == {}


def test_a_sentence_with_one_key_is_found() -> None:
    text = "Say this. Turn drafts off (`companion.enabled=false`). | Or `engine.num_drafts=0` |"
    assert len(half_off(sentences(text))) == 2
    assert half_off(sentences(f"Set `{' '.join(OFF)}`.")) == []


@pytest.mark.parametrize("preset", ["one-gpu", "one-node", "demo", "gsm8k"])
def test_with_both_keys_there_is_no_plugin(preset: str) -> None:
    assert as_config(load_config(preset, OFF)) is None
    for key in OFF:
        assert as_config(load_config(preset, [key])) is not None
