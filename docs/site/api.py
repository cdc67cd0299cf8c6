"""The page of the public API: the names of public_api.yaml, which mkdocstrings fills with their
docstrings and signatures.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

LIST = Path(__file__).resolve().parent / "public_api.yaml"

HEAD = """# Public API

These names are stable: the changelog names any change that breaks them, and before 1.0 such a
change comes with a new minor version. Everything else in the packages may change at any time.
Tensor names carry their shape: B batch, T time, D hidden, V vocabulary, K heads, S sequences, M
packed response tokens, N rows.
"""


def public_names() -> dict[str, list[str]]:
    """Title of a group -> its names, `module.name`."""
    groups: list[dict[str, Any]] = yaml.safe_load(LIST.read_text(encoding="utf-8"))
    return {
        group["title"]: [f"{group['module']}.{name}" for name in group["names"]] for group in groups
    }


def import_line(names: list[str]) -> str:
    """How a group is imported."""
    module = names[0].rpartition(".")[0]
    return f"from {module} import {', '.join(name.rpartition('.')[2] for name in names)}"


def api_page() -> str:
    """The whole page; `:::` lines are mkdocstrings' own."""
    lines = [HEAD]
    for title, names in public_names().items():
        lines += [f"## {title}", "", "```python", import_line(names), "```", ""]
        for name in names:
            # The class is re-exported by a lazy import that a reader of the source alone can't
            # follow.
            target = (
                "medusa_ppo.plugin.medusa_plugin.MedusaPlugin"
                if name == "medusa_ppo.MedusaPlugin"
                else name
            )
            lines += [f"::: {target}", ""]
    return "\n".join(lines)
