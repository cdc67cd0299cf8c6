"""What the documents and the source name exists: files, modules, and what links lead to, headings
included.

RESULTS.md and CHANGELOG.md are history: what they name may be gone.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted(
    [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "heads" / "FORMAT.md",
        *ROOT.glob("docs/*.md"),
        *ROOT.glob("configs/*.yaml"),
    ]
)
SOURCES = sorted(
    file
    for folder in ("heads", "medusa_ppo", "benchmarks", "examples", "docs/site", "tests/robustness")
    for file in (ROOT / folder).rglob("*.py")
)
ROOMS = r"heads|medusa_ppo|tests|benchmarks|configs|docs|examples|\.ci"
FILE = re.compile(rf"(?<![\w./-])((?:{ROOMS})/[\w./-]*\w\.\w+)")
# Not of `heads`: `heads.context` is a key of the configuration.
MODULE = re.compile(r"(?<![\w./:-])(medusa_ppo(?:\.\w+)+)")
LINK = re.compile(r"!?\[[^\]]+\]\(([^)\s#]+)[^)\s]*\)")


# A link to a heading of its own page or of another one, and headings outside of code.
ANCHOR = re.compile(r"(?<!!)\[[^\]]+\]\(([^)\s#]*)#([^)\s]+)\)")
CODE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
RESULTS = [ROOT / "benchmarks" / name for name in ("RESULTS.md", "RESULTS-archive.md")]


def anchors(file: Path) -> set[str]:
    """The anchors that GitHub and the site both give a page's headings."""
    text = CODE.sub("", file.read_text(encoding="utf-8"))
    found = set()
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        words = re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", heading)
        words = re.sub(r"[^\w\s-]", "", words).strip().lower()
        github, site = re.sub(r"\s", "-", words), re.sub(r"[-\s]+", "-", words)
        if github == site:
            found.add(site)
    return found


def of(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


def exists(module: str) -> bool:
    """Whether a dotted name is a module, or something that a module's text has."""
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        stem = ROOT.joinpath(*parts[:length])
        file = stem.with_suffix(".py")
        if not file.is_file():
            file = stem / "__init__.py"
        if file.is_file():
            text = file.read_text(encoding="utf-8")
            return all(re.search(rf"\b{part}\b", text) for part in parts[length:])
    return False


@pytest.mark.parametrize("file", [*DOCUMENTS, *SOURCES], ids=of)
def test_files_and_modules_that_are_named_exist(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert [name for name in FILE.findall(text) if not (ROOT / name).exists()] == []
    assert [name for name in MODULE.findall(text) if not exists(name)] == []


@pytest.mark.parametrize("file", [file for file in DOCUMENTS if file.suffix == ".md"], ids=of)
def test_links_lead_somewhere(file: Path) -> None:
    """In a checkout and on GitHub, where the pages that the site makes from the code don't exist:
    a link to one names what it is made from (`docs/site/build_pages.py`).
    """
    targets = LINK.findall(file.read_text(encoding="utf-8"))
    here = [target for target in targets if "://" not in target]
    assert [target for target in here if not (file.parent / target).exists()] == []


@pytest.mark.parametrize(
    "file", [*(file for file in DOCUMENTS if file.suffix == ".md"), *RESULTS], ids=of
)
def test_links_to_headings_lead_to_one(file: Path) -> None:
    found = ANCHOR.findall(CODE.sub("", file.read_text(encoding="utf-8")))
    here = [(page, anchor) for page, anchor in found if not page.startswith("http")]
    assert [
        f"{page}#{anchor}"
        for page, anchor in here
        if anchor not in anchors((file.parent / page).resolve() if page else file)
    ] == []


def test_an_anchor_has_to_hold_on_github_and_on_the_site(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A page\n## Drafts, `a.b`: two\n```\n# no heading\n```\n## One / two\n")
    assert anchors(page) == {"a-page", "drafts-ab-two"}
