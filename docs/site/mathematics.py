"""A hook of mkdocs: TeX between dollar signs becomes MathML while the site is built, so that pages
load no script for it.

The documents keep TeX, which GitHub shows as it is. Formulas are taken out before Markdown sees
them (it would read their stars and underscores) and put back as MathML afterwards.
"""

from __future__ import annotations

import re
from typing import Any

from latex2mathml.converter import convert

CODE_OR_MATH = re.compile(
    r"(?P<code>^```.*?^```|`[^`\n]+`)|\$\$(?P<block>.+?)\$\$|(?<![\\$\w])\$(?P<inline>[^$\s](?:[^$\n]*[^$\s])?)\$(?![\w$])",
    re.MULTILINE | re.DOTALL,
)
MARK = "mathematics-{}-here"
PAGES_WITH_MATHEMATICS = ("theory.md",)

_formulas: list[str] = []


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Put a mark in place of each formula."""
    if page.file.src_uri not in PAGES_WITH_MATHEMATICS:
        return markdown

    def take(match: re.Match[str]) -> str:
        if match["code"] is not None:
            return match.group(0)
        block = match["block"] is not None
        formula = convert(
            (match["block"] or match["inline"]).strip(), display="block" if block else "inline"
        )
        _formulas.append(formula)
        return MARK.format(len(_formulas) - 1)

    return CODE_OR_MATH.sub(take, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Put the formulas in place of their marks."""
    return re.sub(MARK.format(r"(\d+)"), lambda match: _formulas[int(match[1])], html)
