"""The page that says where things are: every source file and preset with what it says about itself,
so that no row falls behind.
"""

from __future__ import annotations

import ast
from pathlib import Path

from commands import cell, escape

ROOT = Path(__file__).resolve().parent.parent.parent
PLACES = (
    "heads",
    "medusa_ppo",
    "configs",
    "examples",
    "benchmarks",
    "tests/robustness",
    "docs/site",
)
HEAD = """# Where things are

Each file says in its first lines what it is for; this page collects them. Tests are in `tests/`,
under the path of what they test. Imports point down, and a tool checks that:
[CONTRIBUTING](../CONTRIBUTING.md) has the order.
"""


def tree_page() -> str:
    """The whole page: a section for each folder, a row for each file."""
    lines = [HEAD]
    for place in PLACES:
        said = sources(place)
        for folder in sorted({file.parent for file in said}):
            lines += [
                f"## {folder.relative_to(ROOT).as_posix()}/",
                "",
                "| file | what it is for |",
                "|---|---|",
            ]
            lines += [
                f"| `{file.name}` | {cell(escape(text))} |"
                for file, text in said.items()
                if file.parent == folder
            ]
            lines.append("")
    return "\n".join(lines)


def sources(place: str) -> dict[Path, str]:
    """The files of a place and of the folders in it that have something to say, and what."""
    files = sorted(file for pattern in ("*.py", "*.yaml") for file in (ROOT / place).rglob(pattern))
    return {file: text for file in files if (text := purpose(file))}


def purpose(file: Path) -> str:
    """What a file says first about itself, whole: the first paragraph of a docstring, the first
    sentence of a preset's comment.
    """
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".py":
        return " ".join((ast.get_docstring(ast.parse(text)) or "").split("\n\n")[0].split())
    said: list[str] = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        said.append(line.lstrip("# "))
        if line.endswith("."):
            break
    return " ".join(said)
