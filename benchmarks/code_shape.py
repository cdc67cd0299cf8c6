"""What the code looks like in numbers: size, comments, wide lines, tuple assignments, cycles, names
that occur twice. Figures to look at, not bounds to meet.

    python benchmarks/code_shape.py [--root DIR]     # another checkout to compare with
"""

from __future__ import annotations

import argparse
import ast
import tokenize
from collections import Counter
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from medusa_ppo.runtime.console import say

WIDE = 100
GROUPS = {
    "heads + medusa_ppo": ("heads", "medusa_ppo"),
    "benchmarks": ("benchmarks",),
    "tests": ("tests",),
}
# A constant is counted with the expression that holds it, a context is grammar and no code.
NOT_COUNTED = (ast.Constant, ast.expr_context, ast.Module)


def sources(root: Path, folders: tuple[str, ...]) -> list[Path]:
    """The Python files of some folders of a checkout."""
    return sorted(path for folder in folders for path in (root / folder).rglob("*.py"))


def nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """What is counted as size."""
    return (node for node in ast.walk(tree) if not isinstance(node, NOT_COUNTED))


def is_tuple_assignment(node: ast.AST) -> bool:
    """`a, b = x, y`: several assignments in one line. `rows, columns = table.shape` is none."""
    return (
        isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Tuple)
        and any(isinstance(target, ast.Tuple) for target in node.targets)
    )


def comment_lines(path: Path) -> int:
    """Lines that hold a comment."""
    with tokenize.open(path) as file:
        found = tokenize.generate_tokens(file.readline)
        return sum(token.type == tokenize.COMMENT for token in found)


def shape(paths: list[Path]) -> dict[str, float]:
    """The figures of a group of files."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in paths]
    texts = [path.read_text(encoding="utf-8").splitlines() for path in paths]
    lines = sum(map(len, texts))
    tuples = sum(is_tuple_assignment(node) for tree in trees for node in ast.walk(tree))
    classes = Counter(
        node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
    )
    return {
        "files": len(paths),
        "lines": lines,
        "AST nodes": sum(1 for tree in trees for _ in nodes(tree)),
        "lines over 100 columns": sum(len(line) > WIDE for text in texts for line in text),
        "tuple assignments in 1,000 lines": 1000 * tuples / max(1, lines),
        "comment lines, %": 100 * sum(map(comment_lines, paths)) / max(1, lines),
        "class names that occur twice": sum(count > 1 for count in classes.values()),
    }


def import_graph(root: Path) -> dict[str, set[str]]:
    """Which of our modules each one imports: at the top, in functions, and for types alone."""
    modules = {}
    for path in sources(root, ("heads", "medusa_ppo")):
        name = ".".join(path.relative_to(root).with_suffix("").parts)
        modules[name.removesuffix(".__init__")] = path
    graph: dict[str, set[str]] = {name: set() for name in modules}
    for name, path in modules.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                graph[name] |= {alias.name for alias in node.names} & modules.keys()
            elif isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    full = f"{node.module}.{alias.name}"
                    graph[name] |= {full if full in modules else node.module} & modules.keys()
    return graph


def first_cycle(graph: dict[str, set[str]]) -> list[str]:
    """A chain of modules that import each other; empty where there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def code_in_init(root: Path) -> int:
    """Lines of `__init__.py` files in statements other than imports, `__all__` and docstrings."""
    found = 0
    for path in sources(root, ("heads", "medusa_ppo")):
        if path.name != "__init__.py":
            continue
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            if not (is_text or isinstance(node, ast.Import | ast.ImportFrom)):
                found += (node.end_lineno or node.lineno) - node.lineno + 1
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = Path(__file__).resolve().parent.parent
    parser.add_argument("--root", type=Path, default=default, help="checkout to measure")
    root = parser.parse_args().root
    for group, folders in GROUPS.items():
        say(f"{group}:")
        for name, value in shape(sources(root, folders)).items():
            say(f"  {name:34} {value:,.1f}" if value % 1 else f"  {name:34} {value:,.0f}")
    cycle = first_cycle(import_graph(root))
    say("cycle between files:", " -> ".join(cycle) or "none")
    say("code in __init__.py:", code_in_init(root), "lines")


if __name__ == "__main__":
    main()
