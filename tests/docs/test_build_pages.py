"""The documentation site: nothing that can be typed is without its text, links hold, and what is
built loads nothing from elsewhere.
"""

from __future__ import annotations

import importlib
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
from typer.testing import CliRunner

from heads.errors import UsageError
from medusa_ppo.cli.app import app
from medusa_ppo.config.run_config import known_keys

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "docs" / "site"


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """docs/site/build_pages.py, which finds its neighbours beside itself."""
    monkeypatch.syspath_prepend(str(SITE))
    return importlib.import_module("build_pages")


@pytest.fixture
def commands(site: ModuleType) -> ModuleType:
    return importlib.import_module("commands")


def test_each_command_and_option_has_its_text(commands: ModuleType) -> None:
    names = commands.command_names()
    assert {"demo", "ppo", "train", "eval", "report", "doctor", "bench rollout"} <= set(names)
    for name in names:
        words, example = commands.help_text(name)
        assert words and "[bold]" not in words, f"medusa-ppo {name} does not say what it does"
        assert example.startswith("medusa-ppo "), f"medusa-ppo {name} has no example"
        silent = [row["name"] for row in commands.parameters(name) if not row["help"]]
        assert not silent, f"medusa-ppo {name}: no text for {', '.join(silent)}"


def test_pages_show_what_the_program_takes(commands: ModuleType) -> None:
    """Read from the functions here, from typer's own parser there: both know the same options, and
    no flag is said to have a `no-`.
    """
    for name in commands.command_names():
        shown = (
            CliRunner()
            .invoke(app, [*name.split(), "--help"], env={"COLUMNS": "300", "TERM": "dumb"})
            .output
        )
        for row in commands.parameters(name):
            if row["kind"] == "option":
                taken = [word for word in row["name"].split() if word.startswith("--")]
                assert taken and all(word in shown for word in taken), (
                    f"medusa-ppo {name} does not take {row['name']}"
                )


def test_the_page_of_a_command(commands: ModuleType) -> None:
    page = commands.command_page("train")
    assert "| `--kind medusa|hydra` | `hydra` | Kind of the heads. |" in page
    assert "| `--model TEXT` | required |" in page
    assert "| `--dry-run` | off |" in page
    assert "medusa-ppo report RUN [OPTIONS]" in commands.command_page("report")


def test_each_configuration_key_has_its_text(site: ModuleType) -> None:
    configuration = importlib.import_module("configuration")
    page = configuration.configuration_page()
    for key in known_keys():
        row = next((line for line in page.splitlines() if line.startswith(f"| `{key}` |")), None)
        assert row is not None, f"{key} is not on the page"
        assert row.rstrip(" |").rpartition("|")[2].strip(), f"{key} does not say what it is"
    assert "| `sampling.top_p` | number > 0, &lt;= 1 | `1.0` |" in page
    assert "| `heads.kind` | `medusa`, `hydra` | `hydra` |" in page
    assert "| `companion.cores` | list of whole number, or null | `null` |" in page
    assert "| `engine.memory_fraction` | number > 0, &lt;= 1, or null | `null` |" in page


def test_the_list_of_files_is_whole(site: ModuleType) -> None:
    """Every source file has its row, with all that its first paragraph says."""
    tree = importlib.import_module("source_tree")
    page = tree.tree_page()
    files = [
        *ROOT.glob("heads/**/*.py"),
        *ROOT.glob("medusa_ppo/**/*.py"),
        *ROOT.glob("benchmarks/*.py"),
        *ROOT.glob("tests/robustness/*.py"),
        *ROOT.glob("configs/*.yaml"),
    ]
    for file in (file for file in files if file.stat().st_size):
        said = tree.purpose(file)
        assert said.endswith((".", "?")) and not said.endswith("..."), (
            f"{file.name} is cut off: {said}"
        )
        folder = file.parent.relative_to(ROOT).as_posix()
        section = page.split(f"\n## {folder}/\n")[1].split("\n## ")[0]
        assert any(form in section for form in (tree.escape(said), tree.cell(tree.escape(said)))), (
            f"{folder}/{file.name}"
        )
    assert "| `targets.py` | The only code that shifts tokens" in page and "one-gpu.yaml" in page


def test_all_documents_are_pages_with_links_that_hold(site: ModuleType, tmp_path: Path) -> None:
    site.build(tmp_path / "docs")
    pages = {
        file.relative_to(tmp_path / "docs" / "pages").as_posix()
        for file in (tmp_path / "docs" / "pages").rglob("*.md")
    }
    assert {
        "index.md",
        "theory.md",
        "choosing.md",
        "api.md",
        "configuration.md",
        "commands/train.md",
        "format.md",
        "where.md",
    } <= pages
    assert {f"docs/{file.name}" for file in ROOT.glob("docs/*.md")} <= set(site.WRITTEN), (
        "a document is no page"
    )
    assert (
        "[measured results](results.md)" in (tmp_path / "docs" / "pages" / "index.md").read_text()
    )
    site.build(tmp_path / "docs")  # A second time, into the first one's place.


def test_a_link_that_leads_nowhere_is_refused(
    site: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "page.md").write_text("`[no](link.md)` and [a link](missing.md)\n")
    monkeypatch.setattr(site, "ROOT", tmp_path)
    with pytest.raises(UsageError, match=r"missing\.md"):
        site.written_page("docs/page.md")


def test_a_link_whose_words_go_on_in_the_next_line_follows(site: ModuleType) -> None:
    text = "See [the\nresults]({}#a) and [no\n\nlink](missing.md)."
    given, found = text.format("../benchmarks/RESULTS.md"), text.format("results.md")
    assert site.linked(given, "docs/x.md") == found


def test_a_link_to_what_a_page_is_made_from_leads_to_the_page(site: ModuleType) -> None:
    for source, page in site.MADE_FROM.items():
        assert (ROOT / source).exists()
        assert site.linked(f"[all](../{source}).", "docs/x.md") == f"[all]({page})."


def test_a_folder_of_somebody_else_is_left_alone(site: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "theirs.txt").write_text("kept")
    with pytest.raises(UsageError):
        site.build(tmp_path)
    assert (tmp_path / "theirs.txt").read_text() == "kept"


def test_what_a_page_loads_from_elsewhere_is_found(site: ModuleType, tmp_path: Path) -> None:
    check = importlib.import_module("check_site")
    (tmp_path / "good.html").write_text(
        '<script src="a.js"></script><a href="https://example.org">read</a>'
    )
    assert not list(check.foreign(tmp_path))
    (tmp_path / "bad.html").write_text(
        '<link rel="stylesheet" href="//fonts.example.org/x.css">'
        '<img src="https://example.org/x.png">'
    )
    (tmp_path / "bad.css").write_text("@font-face { src: url(https://example.org/x.woff) }")
    assert [page for page, _ in check.foreign(tmp_path)] == ["bad.html", "bad.html", "bad.css"]


def test_a_link_to_a_page_that_the_site_lacks_is_found(site: ModuleType, tmp_path: Path) -> None:
    check = importlib.import_module("check_site")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "page.html").write_text(
        '<a href="../index.html#top">up</a><a href="#here">here</a><a href="mailto:x@y">mail</a>'
        '<a href="https://example.org/none">away</a><img src="picture.svg">'
    )
    (tmp_path / "index.html").write_text('<a href="folder/page.html?q=1">down</a>')
    assert list(check.dead(tmp_path)) == [("folder/page.html", "picture.svg")]


@pytest.mark.slow
def test_the_site_builds_without_a_warning() -> None:
    if not (ROOT / ".venv-docs" / ".setup").exists():
        pytest.skip("needs the site's own packages: make docs (make test-slow installs them)")
    # -o: what is installed stays as it is.
    old = [
        word
        for stamp in ROOT.glob(".venv/.setup-*")
        for word in ("-o", str(stamp.relative_to(ROOT)))
    ]
    done = subprocess.run(
        ["make", "docs", *old], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    theory = (ROOT / "build" / "site" / "theory.html").read_text()
    assert "<math" in theory and "mathematics-" not in theory
    assert "MedusaPlugin" in (ROOT / "build" / "site" / "api.html").read_text()
