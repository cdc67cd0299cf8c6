"""Does the built site load anything from elsewhere, or link to a page of its own that it lacks?
`python docs/site/check_site.py build/site` fails when a page does.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

# Attributes that a browser fetches by itself; a link that a reader may click is none of them.
FETCHED = {
    "script": "src",
    "img": "src",
    "iframe": "src",
    "source": "src",
    "video": "src",
    "audio": "src",
    "link": "href",
}
NOT_FETCHED_LINKS = ("canonical", "alternate", "prev", "next")


class _Page(HTMLParser):
    """What one page fetches, and what it links to."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.linked: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        address = values.get(FETCHED.get(tag, ""))
        if address and not (tag == "link" and values.get("rel") in NOT_FETCHED_LINKS):
            self.fetched.append(address)
        if tag == "a" and (target := values.get("href")):
            self.linked.append(target)


def foreign(site: Path) -> Iterator[tuple[str, str]]:
    """(page or style sheet, address) of everything that comes from elsewhere."""
    for file in sorted(site.rglob("*.html")):
        page = _Page()
        page.feed(file.read_text(encoding="utf-8"))
        for address in page.fetched:
            if "//" in address:
                yield file.relative_to(site).as_posix(), address
    for file in sorted(site.rglob("*.css")):
        text = file.read_text(encoding="utf-8")
        if "url(http" in text or "url(//" in text or "@import" in text:
            yield file.relative_to(site).as_posix(), "a style sheet or font"


def dead(site: Path) -> Iterator[tuple[str, str]]:
    """(page, address) of each link or picture whose file the site does not have: mkdocs does not
    report a link that leads out of its own folder.
    """
    for file in sorted(site.rglob("*.html")):
        page = _Page()
        page.feed(file.read_text(encoding="utf-8"))
        for address in (*page.linked, *page.fetched):
            parts = urlsplit(address)
            # The page for addresses that don't exist names the others from the root.
            if parts.scheme or parts.netloc or not parts.path or parts.path.startswith("/"):
                continue
            if not (file.parent / unquote(parts.path)).exists():
                yield file.relative_to(site).as_posix(), address


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    found = [
        *(f"The site is not offline: {page} loads {address}" for page, address in foreign(folder)),
        *(f"A link leads nowhere: {page} names {address}" for page, address in dead(folder)),
    ]
    if found:
        sys.exit("\n".join(found))
