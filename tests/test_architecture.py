"""The structure that CONTRIBUTING promises: where foreign libraries are imported, cold imports, no
cycles between files, no name twice, no code in `__init__.py`.

Rooms are import-linter's (pyproject.toml). It does not see cycles between the files of one room, so
those are here. No size is checked: `make check` prints the longest files.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted([*ROOT.glob("heads/**/*.py"), *ROOT.glob("medusa_ppo/**/*.py")])
# Scripts that find their neighbours beside themselves; the packages' imports are import-linter's.
SCRIPTS = {
    folder: sorted((ROOT / folder).glob("*.py"))
    for folder in ("benchmarks", "docs/site", "examples", "tests/robustness")
}

# Foreign library -> the only places that may import it (DESIGN: a foreign library has one home).
HOMES = {
    "vllm": ("medusa_ppo/vllm_plugin/", "medusa_ppo/engines/"),
    "megatron": ("medusa_ppo/actors/", "medusa_ppo/ppo/megatron/"),
    "deepspeed": ("medusa_ppo/actors/",),
    "PIL": ("medusa_ppo/actors/vision.py",),
    "datasets": ("medusa_ppo/runtime/data.py",),
    "huggingface_hub": ("medusa_ppo/offline/hub.py",),
    "httpx": (
        "medusa_ppo/engines/http_server.py",
        "medusa_ppo/feeds/http_feed.py",
        "medusa_ppo/companion/companion_link.py",
    ),
    "starlette": (
        "medusa_ppo/runtime/guarded_server.py",
        "medusa_ppo/feeds/feed_server.py",
        "medusa_ppo/companion/companion_server.py",
    ),
    "uvicorn": ("medusa_ppo/runtime/guarded_server.py",),
    "yaml": ("medusa_ppo/config/config_file.py",),
    "trl": ("medusa_ppo/loops/trl",),
    "verl": ("medusa_ppo/loops/verl/",),
    "openrlhf": ("medusa_ppo/loops/openrlhf.py",),
    "skyrl": ("medusa_ppo/loops/skyrl.py",),
    "nemo_rl": ("medusa_ppo/loops/nemo_rl.py",),
    "tensorboard": ("medusa_ppo/reports/trackers.py",),
    "wandb": ("medusa_ppo/reports/trackers.py",),
    "trackio": ("medusa_ppo/reports/trackers.py",),
}
COLD_ROOMS = ("medusa_ppo.config", "medusa_ppo.reports", "medusa_ppo.cli")
# vLLM imports the entry point in each of its processes before it is set up itself; the table is
# read by who wants to know whether vLLM can be imported at all.
COLD_FILES = tuple(f"medusa_ppo.vllm_plugin.{name}" for name in ("registration", "hook_table"))
HEAVY = {"torch", "vllm", "ray", "transformers"}


@pytest.fixture(scope="module")
def code_shape() -> ModuleType:
    """benchmarks/code_shape.py, which measures what is checked here."""
    file = ROOT / "benchmarks" / "code_shape.py"
    spec = importlib.util.spec_from_file_location("code_shape", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def imported_roots(tree: ast.AST) -> set[str]:
    roots = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            roots |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            roots.add(node.module.split(".")[0])
    return roots


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_foreign_libraries_stay_in_their_homes(path: Path) -> None:
    name = path.relative_to(ROOT).as_posix()
    for root in imported_roots(ast.parse(path.read_text())):
        homes = HOMES.get(root)
        assert homes is None or name.startswith(homes), (
            f"{name} imports {root}; only {', '.join(homes)} may"
        )


def test_a_cycle_is_found_wherever_its_imports_stand(
    code_shape: ModuleType, tmp_path: Path
) -> None:
    room = tmp_path / "medusa_ppo" / "room"
    room.mkdir(parents=True)
    (room / "__init__.py").write_text('"""A room."""\n')
    (room / "first.py").write_text("def call():\n    from medusa_ppo.room.second import name\n")
    (room / "second.py").write_text(
        "if TYPE_CHECKING:\n    from medusa_ppo.room import third\nimport medusa_ppo.room\n"
    )
    (room / "third.py").write_text("import medusa_ppo.room.first\n")
    names = [f"medusa_ppo.room.{name}" for name in ("first", "second", "third")]
    assert code_shape.cycles(code_shape.import_graph(tmp_path)) == [names]
    (room / "third.py").write_text("import medusa_ppo.room\n")
    assert code_shape.cycles(code_shape.import_graph(tmp_path)) == []


def test_statements_of_hooks_are_counted_without_imports_and_docstrings(
    code_shape: ModuleType, tmp_path: Path
) -> None:
    file = tmp_path / code_shape.LOOPS / "skyrl.py"
    file.parent.mkdir(parents=True)
    file.write_text('"""Text."""\nimport os\n\ndef f():\n    """Text."""\n    return os\n')
    assert code_shape.hooks(tmp_path)["SkyRL"] == 2
    assert all(code_shape.hooks(ROOT).values()), "a file was renamed"
    lines = list(code_shape.hooks_report(ROOT, tmp_path))
    assert len(lines) == len(code_shape.HOOKS) + 1 and lines[-1].split()[1] == "2"


def test_init_files_hold_no_code(code_shape: ModuleType) -> None:
    assert code_shape.code_in_init(ROOT) == {}


def test_no_file_lies_beside_the_rooms() -> None:
    loose = {path.name for path in ROOT.glob("medusa_ppo/*.py")}
    assert loose <= {"__init__.py", "__main__.py"}


@pytest.mark.parametrize(
    "path", [p for p in SOURCES if p.stat().st_size], ids=lambda p: str(p.relative_to(ROOT))
)
def test_each_file_says_in_its_first_line_what_it_is_for(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text())), (
        f"{path.relative_to(ROOT)} has no docstring"
    )


def test_no_base_name_occurs_twice() -> None:
    """Who reads `losses.py` in a traceback or a search knows which file that is."""
    counts = Counter(
        path.name
        for path in [*SOURCES, *(script for scripts in SCRIPTS.values() for script in scripts)]
    )
    assert not [
        name
        for name, count in counts.items()
        if count > 1 and name not in ("__init__.py", "__main__.py")
    ]


@pytest.mark.parametrize("folder", SCRIPTS)
def test_scripts_do_not_import_each_other_in_circles(folder: str) -> None:
    names = {path.stem for path in SCRIPTS[folder]}
    graph = {
        path.stem: imported_roots(ast.parse(path.read_text())) & names for path in SCRIPTS[folder]
    }
    TopologicalSorter(graph).prepare()  # CycleError names the circle.


UNUSUAL = {
    "plug-in": "plugin",
    "in silence": "silently",
    "lane": "stream (of random numbers)",
    "lanes": "streams (of random numbers)",
    "mend": "fix",
    "mends": "fixes",
    "mended": "fixed",
    "thereby": "so",
    "wherein": "in which",
    "hitherto": "until now",
}
"""Words that a native reader stumbles over, and what is said in their place."""
PROSE = ("heads", "medusa_ppo", "tests", "benchmarks", "examples", "docs", "configs")


def test_no_word_is_used_that_readers_stumble_over() -> None:
    """RESULTS.md and the changelog keep what was written when it was measured."""
    found = []
    files = [*ROOT.glob("*.md"), *(path for room in PROSE for path in (ROOT / room).rglob("*"))]
    pattern = re.compile(rf"\b({'|'.join(map(re.escape, UNUSUAL))})\b", re.IGNORECASE)
    for path in files:
        kept = path.name == "CHANGELOG.md" or path.name.startswith("RESULTS")
        if kept or path == Path(__file__) or path.suffix not in (".py", ".md", ".yaml"):
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            found += [
                f"{path.relative_to(ROOT)}:{number}: {word}, say {UNUSUAL[word.lower()]}"
                for word in pattern.findall(line)
            ]
    assert not found, "\n".join(found)


def test_no_module_is_called_utils() -> None:
    assert not [p for p in SOURCES if p.stem in ("utils", "helpers", "misc", "common")]


def loads_nothing_heavy(modules: list[str]) -> bool:
    """Whether a fresh process that imports these modules has none of the heavy libraries."""
    code = f"import {', '.join(modules)}, sys; sys.exit(bool({HEAVY!r} & sys.modules.keys()))"
    return subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    "room", ["medusa_ppo", *COLD_ROOMS, "medusa_ppo.contract.metrics", *COLD_FILES]
)
def test_cold_imports_stay_free_of_torch(room: str) -> None:
    assert loads_nothing_heavy([room]), f"import {room} loads a heavy library"


@pytest.mark.parametrize("room", COLD_ROOMS)
def test_every_file_of_a_cold_room_stays_free_of_torch(room: str) -> None:
    """The rooms' `__init__.py` import little or nothing, so they say little of their files."""
    files = sorted((ROOT / room.replace(".", "/")).glob("*.py"))
    modules = [f"{room}.{file.stem}" for file in files if file.stem != "__init__"]
    if not loads_nothing_heavy(modules):
        pytest.fail(str([module for module in modules if not loads_nothing_heavy([module])]))


def test_heads_imports_nothing_of_rl() -> None:
    allowed = {"heads", "torch", "safetensors", "numpy", *sys.stdlib_module_names}
    for path in ROOT.glob("heads/**/*.py"):
        extra = imported_roots(ast.parse(path.read_text())) - allowed
        assert not extra, f"{path.name} imports {extra}"
