"""The pages that `make docs` hands to mkdocs: the written ones, and those made from the code so
that they can't fall behind it.

`python docs/site/build_pages.py build/docs` writes `pages/` and `mkdocs.yml` there; nothing of it
is kept in git. Made from the code are one page for each command, the configuration keys, the public
API and the list of files; the documents of the repository are copied, and their links follow.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import yaml
from api import api_page
from commands import command_names, command_page, commands_page
from configuration import configuration_page
from source_tree import tree_page

from heads.errors import UsageError

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent

# File of the repository -> page of the site.
WRITTEN = {
    "docs/index.md": "index.md",
    "docs/hooks.md": "hooks.md",
    "docs/feeds.md": "feeds.md",
    "docs/other-loops.md": "other-loops.md",
    "docs/choosing.md": "choosing.md",
    "docs/cluster.md": "cluster.md",
    "docs/faults.md": "faults.md",
    "docs/companion.md": "companion.md",
    "docs/practice.md": "practice.md",
    "docs/theory.md": "theory.md",
    "docs/metrics.md": "metrics.md",
    "docs/glossary.md": "glossary.md",
    "docs/security.md": "security.md",
    "docs/releases.md": "releases.md",
    "docs/quickstart.md": "quickstart.md",
    "docs/first-hour.md": "first-hour.md",
    "docs/supported.md": "supported.md",
    "docs/limits.md": "limits.md",
    "docs/decisions.md": "decisions.md",
    "docs/formats.md": "formats.md",
    "heads/FORMAT.md": "format.md",
    "benchmarks/RESULTS.md": "results.md",
    "benchmarks/RESULTS-archive.md": "results-archive.md",
    "CHANGELOG.md": "changelog.md",
}
PICTURES = tuple(f"docs/{file.name}" for file in sorted(ROOT.glob("docs/*.svg")))
COMMANDS = "commands"
CONFIGURATION = "configuration.md"
API = "api.md"
TREE = "where.md"
MADE_FROM = {
    "medusa_ppo/config": CONFIGURATION,
    "medusa_ppo/cli": f"{COMMANDS}/index.md",
    "docs/site/public_api.yaml": API,
}
"""What documents link to, as a checkout has no such pages -> the page that is made from it."""
# The words of a link may go on in the next line, not in the next paragraph.
LINK = re.compile(r"(?<!!)\[((?:[^\]\n]|\n(?!\n))+)\]\(([^)\s]+)\)")
CODE = re.compile(r"(^```.*?^```|^    .*?$|`[^`\n]+`)", re.MULTILINE | re.DOTALL)


def written_page(source: str) -> str:
    """A document of the repository as a page."""
    return linked((ROOT / source).read_text(encoding="utf-8"), source)


def linked(text: str, source: str) -> str:
    """The text of a page that lies at `source`: links to other pages follow; links to files without
    a page become their names.

    Raises:
        UsageError: a link to a file that does not exist.
    """

    def turn(match: re.Match[str]) -> str:
        words, target = match.groups()
        if "://" in target or target.startswith(("#", "mailto:")):
            return match.group(0)
        path, _, anchor = target.partition("#")
        file = (ROOT / source).parent / path
        if not file.exists():
            raise UsageError(
                "A link leads nowhere.",
                given=f"{source}: {target}",
                expected="a file of the repository",
                do="Correct it.",
            )
        name = file.resolve().relative_to(ROOT).as_posix()
        page = (WRITTEN | MADE_FROM).get(name)
        if page is not None:
            return f"[{words}]({page}{'#' + anchor if anchor else ''})"
        return (
            f"{words} (`{name}`)" if name not in words else words if "`" in words else f"`{name}`"
        )

    parts = CODE.split(text)
    # Odd parts are code, where brackets are no links.
    return "".join(part if index % 2 else LINK.sub(turn, part) for index, part in enumerate(parts))


def settings() -> dict[str, Any]:
    """The configuration of mkdocs, with the navigation that follows from the commands."""
    config: dict[str, Any] = yaml.safe_load((HERE / "mkdocs.yml").read_text(encoding="utf-8"))
    pages = [{f"medusa-ppo {name}": page_of(name)} for name in command_names()]
    config["nav"] = [
        {
            "Start": [
                "index.md",
                {"Your own model": "quickstart.md"},
                {"The first hour on GPUs": "first-hour.md"},
                {"Is it worth it?": "choosing.md"},
            ]
        },
        {
            "Guides": [
                {"In the loop you have": "hooks.md"},
                {"Engines that feed themselves": "feeds.md"},
                {"SkyRL, prime-rl, slime, NeMo-RL": "other-loops.md"},
                {"The options of PPO": "practice.md"},
                {"The companion": "companion.md"},
                {"On a cluster": "cluster.md"},
                {"When something breaks": "faults.md"},
                {"Who may do what": "security.md"},
            ]
        },
        {
            "Reference": [
                {"Commands": [f"{COMMANDS}/index.md", *pages]},
                CONFIGURATION,
                "metrics.md",
                API,
                {"Checkpoints of heads": "format.md"},
                {"Other formats": "formats.md"},
                {"What is supported": "supported.md"},
                {"Known limits": "limits.md"},
                {"Releases": "releases.md"},
                {"Changes": "changelog.md"},
                "glossary.md",
                TREE,
            ]
        },
        {
            "Background": [
                {"Results": "results.md"},
                {"Results of earlier releases": "results-archive.md"},
                {"Decisions": "decisions.md"},
                {"Theory": "theory.md"},
            ]
        },
    ]
    return config


def page_of(command: str) -> str:
    return f"{COMMANDS}/{command.replace(' ', '-')}.md"


def build(out: Path) -> None:
    """Write all pages and the configuration of mkdocs into `out`, which is emptied first if it was
    made by this program.
    """
    mark = out / ".medusa-ppo-docs"
    if out.exists() and any(out.iterdir()) and not mark.exists():
        raise UsageError(
            "The folder holds something else.",
            given=out,
            expected="a new folder, or an earlier build",
            do="Name another.",
        )
    shutil.rmtree(out, ignore_errors=True)
    pages = {target: written_page(source) for source, target in WRITTEN.items()}
    pages |= {page_of(name): command_page(name) for name in command_names()}
    pages[f"{COMMANDS}/index.md"] = commands_page(
        {name: Path(page_of(name)).name for name in command_names()}
    )
    pages[CONFIGURATION] = configuration_page()
    pages[API] = api_page()
    pages[TREE] = linked(tree_page(), f"docs/{TREE}")
    for name, text in pages.items():
        file = out / "pages" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    for file in (HERE / "extra.css", *(ROOT / picture for picture in PICTURES)):
        shutil.copy(file, out / "pages" / file.name)
    config = settings()
    config["docs_dir"], config["site_dir"] = (
        str(out.resolve() / "pages"),
        str(out.resolve().parent / "site"),
    )
    config["hooks"] = [str(HERE / "mathematics.py")]
    config["plugins"][1]["mkdocstrings"]["handlers"]["python"]["paths"] = [str(ROOT)]
    # JSON is YAML.
    (out / "mkdocs.yml").write_text(json.dumps(config, indent=1), encoding="utf-8")
    mark.touch()


if __name__ == "__main__":
    try:
        build(Path(sys.argv[1] if len(sys.argv) > 1 else "build/docs"))
    except UsageError as error:
        sys.exit(str(error))
