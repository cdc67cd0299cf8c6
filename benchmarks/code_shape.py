"""Numbers about the code: size, comments, wide lines, cycles between files, duplicate names. They
are figures to look at, not limits.

    python benchmarks/code_shape.py                  # this checkout
    python benchmarks/code_shape.py --root DIR       # another one, to compare with
    python benchmarks/code_shape.py --longest 10     # the ten longest files and nothing else
    python benchmarks/code_shape.py --hooks          # statements of each loop's hooks
    python benchmarks/code_shape.py --hooks --than DIR   # and those of another checkout

`tests/test_architecture.py` takes the import graph and the duplicate names from here; cycles and
duplicate names are the two figures that can fail `make check`.
"""

from __future__ import annotations

import argparse
import ast
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from medusa_ppo.runtime.console import say

# As line-length in pyproject.toml.
WIDE = 100
SOURCE = ("heads", "medusa_ppo")
GROUPS = {"heads + medusa_ppo": SOURCE, "benchmarks": ("benchmarks",), "tests": ("tests",)}
LOOPS = "medusa_ppo/loops"
HOOKS = {
    "TRL": ("trl.py",),
    "TRL, PPOTrainer": ("trl_ppo.py",),
    "verl, medusa_sync": ("verl/verl_trainer.py", "verl/verl_server.py"),
    "verl, with a tap": ("verl/verl_tap.py", "verl/verl_plugin.py"),
    "OpenRLHF, both forms": ("openrlhf.py",),
    "SkyRL": ("skyrl.py",),
    "NeMo-RL": ("nemo_rl.py",),
    "shared by some": ("remote.py", "worker_tap.py", "attachment.py", "ranks.py"),
}
"""The files of each loop's hooks, below LOOPS."""
# A constant is counted with the expression that holds it; a context is grammar, not code.
NOT_COUNTED = (ast.Constant, ast.expr_context, ast.Module)

Graph = dict[str, set[str]]


def sources(root: Path, folders: tuple[str, ...]) -> list[Path]:
    """The Python files of some folders of a checkout."""
    return sorted(path for folder in folders for path in (root / folder).rglob("*.py"))


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


# ---- size


def nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes that count as size."""
    return (node for node in ast.walk(tree) if not isinstance(node, NOT_COUNTED))


def is_tuple_assignment(node: ast.AST) -> bool:
    """`a, b = x, y`: several assignments in one line. `rows, columns = table.shape` is not one."""
    return (
        isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Tuple)
        and any(isinstance(target, ast.Tuple) for target in node.targets)
    )


def statements(path: Path) -> int:
    """Statements of a file, without imports and docstrings."""
    return sum(
        isinstance(node, ast.stmt)
        and not isinstance(node, ast.Import | ast.ImportFrom)
        and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        for node in ast.walk(parse(path))
    )


def comment_lines(path: Path) -> int:
    """Lines that hold a comment."""
    with tokenize.open(path) as file:
        # By tokens, because a "#" inside a text is not a comment.
        tokens = tokenize.generate_tokens(file.readline)
        return sum(token.type == tokenize.COMMENT for token in tokens)


def shape(paths: list[Path]) -> dict[str, float]:
    """The figures of a group of files."""
    trees = [parse(path) for path in paths]
    texts = [path.read_text(encoding="utf-8").splitlines() for path in paths]
    lines = sum(map(len, texts))
    tuples = sum(is_tuple_assignment(node) for tree in trees for node in ast.walk(tree))
    return {
        "files": len(paths),
        "lines": lines,
        "AST nodes": sum(1 for tree in trees for _ in nodes(tree)),
        "lines over 100 columns": sum(len(line) > WIDE for text in texts for line in text),
        "tuple assignments in 1,000 lines": 1000 * tuples / max(1, lines),
        "comment lines, %": 100 * sum(map(comment_lines, paths)) / max(1, lines),
        "class names that occur twice": len(doubled_classes(paths)),
    }


def longest(root: Path, count: int) -> list[tuple[int, str]]:
    """The longest source files: lines, and path."""
    lengths = [
        (len(path.read_text(encoding="utf-8").splitlines()), path.relative_to(root).as_posix())
        for path in sources(root, SOURCE)
    ]
    return sorted(lengths, reverse=True)[:count]


# ---- structure


def doubled_classes(paths: list[Path]) -> dict[str, list[Path]]:
    """Class names that occur more than once, and where."""
    found: dict[str, list[Path]] = defaultdict(list)
    for path in paths:
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(path)
    return {name: places for name, places in found.items() if len(places) > 1}


def import_graph(root: Path) -> Graph:
    """Which of our modules each one imports: at the top, in functions, and for types alone."""
    modules = {}
    for path in sources(root, SOURCE):
        name = ".".join(path.relative_to(root).with_suffix("").parts)
        modules[name.removesuffix(".__init__")] = path
    graph: Graph = {name: set() for name in modules}
    for name, path in modules.items():
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.Import):
                graph[name] |= {alias.name for alias in node.names} & modules.keys()
            elif isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    # `from package import name` may name a module or something in one.
                    full = f"{node.module}.{alias.name}"
                    graph[name] |= {full if full in modules else node.module} & modules.keys()
    return graph


def reachable(graph: Graph, start: str) -> set[str]:
    """What `start` imports, directly or through others; itself only where it is in a cycle."""
    seen: set[str] = set()
    waiting = list(graph[start])
    while waiting:
        module = waiting.pop()
        if module not in seen:
            seen.add(module)
            waiting += graph[module]
    return seen


def cycles(graph: Graph) -> list[list[str]]:
    """Groups of modules that import each other, each group once."""
    reach = {module: reachable(graph, module) for module in graph}
    found: list[list[str]] = []
    for module in sorted(graph):
        # Every module of a cycle reaches all others of it, so one of them names the group.
        in_known_group = any(module in group for group in found)
        if module in reach[module] and not in_known_group:
            found.append(sorted(other for other in reach[module] if module in reach[other]))
    return found


def is_reexport(statement: ast.stmt) -> bool:
    """Whether an `__init__.py` may hold it: a docstring, an import, `__all__`, `__version__`,
    imports for a type checker, and the `__getattr__` that imports a name when it is asked for.
    """
    match statement:
        case ast.Expr(value=ast.Constant(value=str())) | ast.Import() | ast.ImportFrom():
            return True
        case ast.Assign(targets=[ast.Name(id="__all__" | "__version__")]):
            return True
        case ast.FunctionDef(name="__getattr__"):
            return True
        case ast.If(test=ast.Name(id="TYPE_CHECKING"), body=body, orelse=[]):
            return all(is_reexport(inner) for inner in body)
    return False


def code_in_init(root: Path) -> dict[str, int]:
    """Lines of each `__init__.py` in statements that are more than re-exports."""
    found = {}
    for path in sources(root, SOURCE):
        if path.name == "__init__.py":
            found[path.relative_to(root).as_posix()] = sum(
                (statement.end_lineno or statement.lineno) - statement.lineno + 1
                for statement in parse(path).body
                if not is_reexport(statement)
            )
    return {name: lines for name, lines in found.items() if lines}


# ---- the command


def report(root: Path) -> Iterator[str]:
    """Every figure as a line of text."""
    for group, folders in GROUPS.items():
        yield f"{group}:"
        for name, value in shape(sources(root, folders)).items():
            number = f"{value:,.1f}" if value % 1 else f"{value:,.0f}"
            yield f"  {name:34} {number}"
    for name, places in sorted(doubled_classes(sources(root, SOURCE)).items()):
        where = ", ".join(place.relative_to(root).as_posix() for place in places)
        yield f"class {name}: {where}"
    found = cycles(import_graph(root))
    yield f"cycles between files: {len(found)}"
    for group in found:
        yield f"  {', '.join(group)}"
    yield f"code in __init__.py: {sum(code_in_init(root).values()):,} lines"


def hooks(root: Path) -> dict[str, int]:
    """Statements of each loop's hooks; files that a checkout lacks count none."""
    files = {name: [root / LOOPS / file for file in found] for name, found in HOOKS.items()}
    return {
        name: sum(statements(path) for path in found if path.is_file())
        for name, found in files.items()
    }


def hooks_report(root: Path, than: Path | None) -> Iterator[str]:
    """`hooks` as lines of text, with those of another checkout before them if there is one."""
    counts = [hooks(place) for place in (than, root) if place is not None]
    for name in HOOKS:
        yield f"{name:24}" + "".join(f"{count[name]:8,}" for count in counts)
    yield f"{'all':24}" + "".join(f"{sum(count.values()):8,}" for count in counts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = Path(__file__).resolve().parent.parent
    parser.add_argument("--root", type=Path, default=default, help="checkout to measure")
    parser.add_argument("--longest", type=int, metavar="N", help="list the N longest files")
    parser.add_argument("--hooks", action="store_true", help="statements of each loop's hooks")
    parser.add_argument("--than", type=Path, metavar="DIR", help="a checkout before, for --hooks")
    options = parser.parse_args()
    if options.hooks:
        for line in hooks_report(options.root, options.than):
            say(line)
        return
    if options.longest:
        for lines, name in longest(options.root, options.longest):
            say(f"{lines:6,}  {name}")
        return
    for line in report(options.root):
        say(line)


if __name__ == "__main__":
    main()
