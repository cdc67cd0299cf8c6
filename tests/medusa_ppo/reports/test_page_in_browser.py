"""The page in a real browser: no console error, theme, sorting, hover and keys, width of a
telephone, time to open.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from medusa_ppo.reports.page import render_page, write_report
from medusa_ppo.reports.run_files import read_run
from medusa_ppo.reports.summary import build_summary

CHROMIUM = next(
    (
        found
        for name in ("chromium", "chromium-browser", "google-chrome")
        if (found := shutil.which(name))
    ),
    None,
)
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="needs a Chromium on the PATH (Debian: apt-get install chromium)"
)
sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright (extra dev)")

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def pages(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages")
    for name in ("demo", "long", "one", "zero"):
        write_report(runs / name, folder / f"{name}.html")
    write_report(runs / "demo", folder / "compare.html", runs / "other")
    run = read_run(runs / "demo")
    (folder / "live.html").write_text(render_page(run, build_summary(run), refresh_s=1))
    return folder


class Opened:
    """A page in its own context, with everything that the console and the network said."""

    def __init__(self, browser: Any, path: Path, **options: Any) -> None:
        self.context = browser.new_context(**options)
        self.page = self.context.new_page()
        self.faults: list[str] = []
        self.requests: list[str] = []
        self.page.on(
            "console",
            lambda message: (
                self.faults.append(message.text) if message.type in ("error", "warning") else None
            ),
        )
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri(), wait_until="load")

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *_: object) -> None:
        self.context.close()


@pytest.mark.parametrize("name", ["demo", "long", "one", "zero", "compare"])
@pytest.mark.parametrize("width", [1280, 390])
def test_no_console_error_no_request_no_sideways_scrolling(
    browser: Any, pages: Path, name: str, width: int
) -> None:
    with Opened(
        browser, pages / f"{name}.html", viewport={"width": width, "height": 900}
    ) as opened:
        opened.page.evaluate(
            "document.querySelectorAll('details').forEach((item) => { item.open = true; })"
        )
        assert opened.faults == []
        assert [url for url in opened.requests if not url.startswith("data:")] == [
            (pages / f"{name}.html").as_uri()
        ]
        assert opened.page.evaluate("document.documentElement.scrollWidth") <= width


def test_the_theme_follows_the_system_until_the_button_is_pressed(
    browser: Any, pages: Path
) -> None:
    with Opened(browser, pages / "demo.html", color_scheme="dark") as opened:
        background = "getComputedStyle(document.body).backgroundColor"
        dark = opened.page.evaluate(background)
        opened.page.click("#theme")
        light = opened.page.evaluate(background)
        assert dark != light
        assert opened.page.get_attribute("#theme", "aria-pressed") == "false"
        opened.page.reload()
        assert opened.page.evaluate(background) == light, "the choice is remembered"
        opened.page.click("#theme")
        assert opened.page.evaluate(background) == dark


def test_a_click_sorts_the_versions_and_a_second_turns_them_around(
    browser: Any, pages: Path
) -> None:
    with Opened(browser, pages / "demo.html") as opened:

        def column(index: int) -> list[str]:
            return opened.page.locator(
                f"#versions tbody tr td:nth-child({index})"
            ).all_inner_texts()

        versions = column(1)
        assert versions == sorted(versions)
        opened.page.click("#versions th:nth-child(6) button")
        rising = [float(text) for text in column(6)]
        assert rising == sorted(rising)
        opened.page.click("#versions th:nth-child(6) button")
        assert [float(text) for text in column(6)] == rising[::-1]
        assert opened.page.get_attribute("#versions th:nth-child(6)", "aria-sort") == "descending"
        opened.page.click("#versions th:nth-child(9) button")
        assert column(9)[-1] == "\N{EM DASH}", "rows without a value stay at the end"
        assert opened.faults == []


def test_the_pointer_shows_the_step_and_its_values(browser: Any, pages: Path, runs: Path) -> None:
    run = read_run(runs / "demo")
    with Opened(browser, pages / "demo.html", viewport={"width": 1280, "height": 900}) as opened:
        plot = opened.page.locator("#chart-mal .plot")
        plot.scroll_into_view_if_needed()
        box = plot.bounding_box()
        assert box is not None
        opened.page.mouse.move(box["x"] + box["width"] * 9.5 / 16, box["y"] + 60)
        text = opened.page.inner_text("#tip")
        assert (
            "step 9" in text
            and f"{run.steps[9]['mal_serving']:.2f}" in text
            and f"{run.steps[9]['replay_mal_frozen']:.2f}" in text
        )
        marked = opened.page.eval_on_selector_all(
            ".cursor", "lines => new Set(lines.map(l => l.getAttribute('x1'))).size"
        )
        assert marked == 1, "all charts mark the same step"
        opened.page.mouse.move(5, 5)
        assert opened.page.locator("#tip").is_hidden()
        plot.focus()
        opened.page.keyboard.press("End")
        assert "step 15" in opened.page.inner_text("#tip")
        opened.page.keyboard.press("ArrowLeft")
        assert "step 14" in opened.page.inner_text("#tip")
        opened.page.keyboard.press("Escape")
        assert opened.page.locator("#tip").is_hidden() and opened.faults == []


def test_a_column_of_many_steps_shows_their_range(browser: Any, pages: Path) -> None:
    with Opened(browser, pages / "long.html") as opened:
        opened.page.locator("#chart-mal .plot").focus()
        opened.page.keyboard.press("Home")
        assert "steps 0 to 27" in opened.page.inner_text(
            "#tip"
        ) and " to " in opened.page.inner_text("#tip div b")


def test_ten_thousand_steps_open_at_once(browser: Any, pages: Path) -> None:
    """The page's own measure of its loading; generous, for a machine that does other things too."""
    with Opened(browser, pages / "long.html") as opened:
        timing = opened.page.evaluate(
            "(() => { const t = performance.getEntriesByType('navigation')[0]; return"
            " t.loadEventEnd - t.startTime; })()"
        )
        assert 0 < timing < 10_000
        assert opened.page.locator(".plot").count() > 14


def test_a_live_page_loads_itself_again_and_can_be_stopped(browser: Any, pages: Path) -> None:
    with Opened(browser, pages / "live.html") as opened:
        opened.page.evaluate("document.getElementById('config').open = true")
        with opened.page.expect_navigation(timeout=20_000):
            pass
        opened.page.wait_for_function("document.getElementById('config').open")
        opened.page.click("#live")
        assert opened.page.get_attribute("#live", "aria-pressed") == "false"
        seen = len(opened.requests)
        opened.page.wait_for_timeout(2_500)
        assert len(opened.requests) == seen and opened.faults == []


def test_a_print_shows_what_is_folded(browser: Any, pages: Path) -> None:
    with Opened(browser, pages / "demo.html", color_scheme="light") as opened:
        assert len(opened.page.pdf(print_background=True)) > 20_000
        opened.page.evaluate("dispatchEvent(new Event('beforeprint'))")
        assert opened.page.locator("details:not([open])").count() == 0
        opened.page.evaluate("dispatchEvent(new Event('afterprint'))")
        assert opened.page.locator("details[open]").count() == 0
