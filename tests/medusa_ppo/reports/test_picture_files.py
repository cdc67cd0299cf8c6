"""Pictures as files: whole XML, colours for light and dark, shapes where the figures put them."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from medusa_ppo.reports.picture_files import DARK, LIGHT, draw_curves, draw_stacks, draw_steps

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize(
    "picture",
    [
        draw_curves("A < B", [1, 4], {"K = 1": [0.9, 1.2]}, "sequences"),
        draw_steps("A < B", [0, 5], {"trained": [1.0, 2.0], "frozen": [1.0, 1.5]}, "step"),
        draw_stacks("A < B", {"with": {"generation": 1.0, "update": 2.0}}, "s"),
    ],
)
def test_a_picture_is_a_whole_file_in_light_and_dark(picture: str) -> None:
    root = ElementTree.fromstring(picture)
    assert root.findtext(f"{SVG}title") == "A < B"
    style = root.findtext(f"{SVG}style") or ""
    light, dark = style.split("@media (prefers-color-scheme:dark)")
    assert all(colour in light for colour in LIGHT) and all(colour in dark for colour in DARK)
    # A colour outside of the style would be the same on a dark page.
    assert not re.search(r'(?:stroke|fill)="#', picture)
    used = set(re.findall(r'class="(\w+)"', picture))
    assert {"ground"} < used and all(f".{kind}" in style for kind in used)


def test_steps_are_as_far_apart_as_their_numbers() -> None:
    points = re.findall(r'points="([^"]+)"', draw_steps("t", [0, 1, 4], {"a": [1, 2, 3]}, "step"))
    first, second, last = (float(point.split(",")[0]) for point in points[0].split())
    assert last - first == pytest.approx(4 * (second - first), abs=0.3)


def test_the_parts_of_a_bar_follow_each_other_and_share_one_scale() -> None:
    picture = draw_stacks("t", {"without": {"a": 6.0, "b": 2.0}, "with": {"a": 3.0, "b": 1.0}}, "s")
    bars = [
        (float(x), float(width))
        for x, width in re.findall(r'<rect x="([\d.]+)" y="\d+" width="([\d.]+)"', picture)
        if float(width) != 10  # The legend.
    ]
    (start, first), (then, second), (again, half), _ = bars
    assert then == pytest.approx(start + first, abs=0.11) and again == start
    assert first == pytest.approx(3 * second, abs=0.2) and half == pytest.approx(first / 2, abs=0.1)
    assert ">8.0 s</text>" in picture and ">4.0 s</text>" in picture


def test_a_curve_on_another_one_is_seen() -> None:
    picture = draw_steps("t", [0, 1], {"a": [1, 2], "b": [1, 2], "c": [1, 3]}, "step")
    dashed = ["stroke-dasharray" in line for line in re.findall(r"<polyline[^>]*>", picture)]
    assert dashed == [False, True, False]
