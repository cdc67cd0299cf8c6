"""What the README and docs/hooks.md show as the change to a user's script: short, and true of the
code as it is.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from medusa_ppo.config.run_config import build_config, known_keys

ROOT = Path(__file__).resolve().parents[2]
MOST_LINES = 5
# A trainer calls its engine and copies its weights itself; a loop of one's own has lines for both.
MOST_LINES_OF_A_LOOP = 9
LOOPS = ("own", "TRL", "verl", "OpenRLHF")


def diffs(page: str) -> list[list[str]]:
    """Lines of each diff on a page."""
    return [
        block.splitlines()
        for block in re.findall(
            r"```diff\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL
        )
    ]


def parts(lines: list[str]) -> list[list[str]]:
    """A diff that shows several loops, cut at its empty lines."""
    found: list[list[str]] = [[]]
    for line in lines:
        found.append([]) if not line.strip() else found[-1].append(line)
    return [part for part in found if part]


def adoptions() -> dict[str, list[str]]:
    """The README's change for each loop."""
    shown = [part for lines in diffs("README.md") for part in parts(lines)]
    assert len(shown) == len(LOOPS)
    return dict(zip(LOOPS, shown, strict=True))


def added(lines: list[str]) -> list[str]:
    return [line[1:].strip() for line in lines if line.startswith("+")]


@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_is_adopted_with_few_lines(loop: str) -> None:
    lines = adoptions()[loop]
    most = MOST_LINES_OF_A_LOOP if loop == "own" else MOST_LINES
    assert 1 <= len(added(lines)) <= most
    assert any(not line.startswith(("+", "-", " #")) or line.startswith("-") for line in lines), (
        "the user's own script is not shown"
    )


def test_the_hooks_page_says_how_many_lines_and_shows_as_many() -> None:
    text = (ROOT / "docs" / "hooks.md").read_text(encoding="utf-8")
    said = {anchor: int(count) for count, anchor in re.findall(r"\| \[(\d)\]\(#([a-z-]+)\)", text)}
    assert said.keys() >= {"any-loop", "trl", "verl", "openrlhf"}
    for heading, body in re.findall(r"\n## ([^\n]+)\n(.*?)(?=\n## |\Z)", text, re.DOTALL):
        anchor = heading.lower().replace(" ", "-")
        block = re.search(r"```diff\n(.*?)```", body, re.DOTALL)
        if anchor in said and block:
            most = MOST_LINES_OF_A_LOOP if anchor == "any-loop" else MOST_LINES
            assert said[anchor] == len(added(block[1].splitlines())) <= most, heading


def test_the_readme_imports_what_the_whole_change_does() -> None:
    """Which a test follows (`tests/medusa_ppo/loops/test_drafting_engine.py`)."""
    whole = added(diffs("docs/hooks.md")[0])
    short = adoptions()["own"]
    assert {line for line in added(short) if line.startswith("from")} <= set(whole)
    for name in ("DraftingEngine(", "ActorSync("):
        assert any(name in line for line in added(short)) and any(name in line for line in whole)


@pytest.mark.parametrize("page", ["README.md", "docs/hooks.md"])
def test_a_loop_of_ones_own_is_told_to_set_what_its_engine_had(page: str) -> None:
    """Our defaults are many times narrower and shorter than those of a `vllm.LLM` on a GPU."""
    lines = adoptions()["own"] if page == "README.md" else diffs(page)[0]
    (settings,) = [line for line in added(lines) if line.startswith("settings = ")]
    given = ast.literal_eval(settings.removeprefix("settings = ").partition("  #")[0])
    assert {"max_num_seqs", "max_model_len"} <= build_config(given).engine.model_fields_set


@pytest.mark.parametrize("page", ["README.md", "docs/hooks.md"])
def test_what_is_imported_and_called_exists(page: str) -> None:
    seen = 0
    for lines in diffs(page):
        for line in added(lines):
            imported = re.fullmatch(r"from (medusa_ppo[\w.]*) import (\w+)", line)
            run = re.match(r"python -m (medusa_ppo[\w.]+) (--\w+)", line)
            if imported:
                module, name = imported.groups()
                names = {
                    node.name
                    for node in ast.parse(source(module)).body
                    if isinstance(node, ast.ClassDef | ast.FunctionDef)
                }
                assert name in names or f'"{name}"' in source(module), line
            elif run:
                script = source(run[1], "__main__.py")
                assert f'"{run[2]}"' in script and '__name__ == "__main__"' in script, line
            elif entry := re.match(r"trainer\.override_entrypoint=(\S+)", line):
                defined = [getattr(node, "name", "") for node in ast.parse(source(entry[1])).body]
                assert "main" in defined, line
            elif re.match(r"\+?medusa\.|trainer\.", line):
                for option in line.rstrip("\\").split():
                    key = option.lstrip("+").partition("=")[0]
                    assert (
                        key == "trainer.v1.trainer_mode"
                        or key.removeprefix("medusa.") in known_keys()
                    ), option
            else:
                continue
            seen += 1
    assert seen >= 4


KEY = re.compile(
    r"`(?:model|actor|data|sampling|engine|heads|companion|ppo|report)\.[a-z_]+(?=[`=])"
)


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        *(
            f"docs/{name}.md"
            for name in ("choosing", "cluster", "companion", "faults", "hooks", "limits")
        ),
    ],
)
def test_settings_that_a_page_names_exist(page: str) -> None:
    named = {
        match[0].strip("`") for match in KEY.finditer((ROOT / page).read_text(encoding="utf-8"))
    }
    calls = {
        "engine.metrics",
        "engine.close",
        "engine.generate",
    }  # Of the class that docs/hooks.md shows.
    assert not named - set(known_keys()) - calls, "a setting that does not exist (any more)"


def source(module: str, of_package: str = "__init__.py") -> str:
    """The file of a module; of a package the one that is asked for."""
    path = ROOT / module.replace(".", "/")
    files = (path.with_suffix(".py"), path / of_package)
    return next(file for file in files if file.is_file()).read_text(encoding="utf-8")


def test_the_trl_example_is_a_plain_script_but_for_the_lines_shown() -> None:
    """Its lines that name us, less those that set the actor and the settings of the plugin."""
    text = (ROOT / "examples" / "trl_grpo.py").read_text(encoding="utf-8")
    lines = [line.strip() for line in text.splitlines() if "Medusa" in line]
    assert lines == [
        "from medusa_ppo.loops.trl import MedusaGRPOTrainer",
        "trainer = MedusaGRPOTrainer(",
    ]
    assert "medusa=medusa" in text
