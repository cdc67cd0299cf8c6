"""The structure that CONTRIBUTING promises: where foreign libraries are imported, cold imports,
sizes, no stray prints.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

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
    "liger_kernel": ("heads/losses.py",),
    "vllm": ("medusa_ppo/vllm_plugin/", "medusa_ppo/engines/"),
    "megatron": ("medusa_ppo/actors/", "medusa_ppo/ppo/megatron/"),
    "huggingface_hub": ("medusa_ppo/offline/hub.py",),
    "trl": ("medusa_ppo/loops/trl",),
    "verl": ("medusa_ppo/loops/verl/",),
    "tensorboard": ("medusa_ppo/reports/trackers.py",),
    "wandb": ("medusa_ppo/reports/trackers.py",),
    "trackio": ("medusa_ppo/reports/trackers.py",),
    "openrlhf": ("medusa_ppo/loops/openrlhf.py",),
}
LONG_FILE_LINES, LONG_FUNCTION_LINES = 400, 60


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


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_and_functions_stay_small(path: Path) -> None:
    name = path.relative_to(ROOT).as_posix()
    text = path.read_text()
    assert text.count("\n") <= LONG_FILE_LINES, f"{name} has {text.count(chr(10))} lines: split it"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= LONG_FUNCTION_LINES, f"{name}: {node.name} has {length} lines"


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


def test_no_module_is_called_utils() -> None:
    assert not [p for p in SOURCES if p.stem in ("utils", "helpers", "misc", "common")]


@pytest.mark.parametrize(
    "module",
    [
        "medusa_ppo",
        "medusa_ppo.config",
        "medusa_ppo.contract.metrics",
        "medusa_ppo.reports.store",
        "medusa_ppo.cli",
    ],
)
def test_cold_imports_stay_free_of_torch(module: str) -> None:
    code = (
        f"import {module}, sys; sys.exit(any(m in sys.modules for m in ('torch', 'vllm', 'ray',"
        " 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0, (
        f"import {module} loads a heavy library"
    )


def test_heads_imports_nothing_of_rl() -> None:
    allowed = {"heads", "torch", "safetensors", "numpy", "liger_kernel", *sys.stdlib_module_names}
    for path in ROOT.glob("heads/**/*.py"):
        extra = imported_roots(ast.parse(path.read_text())) - allowed
        assert not extra, f"{path.name} imports {extra}"
