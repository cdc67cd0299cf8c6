"""Gauges by name, and the Grafana dashboard that shows exactly these."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from medusa_ppo.contract import metrics as names
from medusa_ppo.reports.trackers import PREFIX, RayTracker

DASHBOARD = Path(__file__).resolve().parents[3] / "configs" / "grafana-dashboard.json"


class Gauges:
    """Stands for ray.util.metrics.Gauge where a test looks at what is set; test_ray_exports_them
    has the real one.
    """

    def __init__(self) -> None:
        self.made: list[str] = []
        self.values: dict[tuple[str, str], float] = {}

    def __call__(
        self, name: str, description: str = "", tag_keys: tuple[str, ...] | None = None
    ) -> Any:
        assert tag_keys == ("run", "position") and description
        self.made.append(name)
        owner = self

        class Gauge:
            def set(self, value: float, tags: dict[str, str]) -> None:
                assert tags["run"] == "mine"
                owner.values[name, tags["position"]] = value

        return Gauge()


def test_figures_become_gauges(monkeypatch: pytest.MonkeyPatch) -> None:
    gauges = Gauges()
    monkeypatch.setattr("ray.util.metrics.Gauge", gauges)
    tracker = RayTracker("mine")
    for step in range(2):
        values = {f"{names.ACCEPTANCE_PER_POSITION}/{k}": 0.5 / k for k in (1, 2)}
        tracker.log(step, {names.STEP: float(step), **values, "not one of ours": 1.0})
    assert gauges.made == [PREFIX + names.STEP, PREFIX + names.ACCEPTANCE_PER_POSITION], (
        "made once each"
    )
    assert gauges.values == {
        (PREFIX + names.STEP, ""): 1.0,
        (PREFIX + names.ACCEPTANCE_PER_POSITION, "1"): 0.5,
        (PREFIX + names.ACCEPTANCE_PER_POSITION, "2"): 0.25,
    }


def test_the_dashboard_shows_names_that_exist() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(expressions) > 20
    used = {re.fullmatch(r'(\w+)\{run=~"\$run"\}', expression)[1] for expression in expressions}
    variables = {variable["name"]: variable for variable in dashboard["templating"]["list"]}
    used |= set(re.findall(r"label_values\((\w+), run\)", variables["run"]["query"]["query"]))
    exported = {f"ray_{PREFIX}{name}" for name in names.describe()}
    assert used <= exported, used - exported
    assert {
        f"ray_{PREFIX}{name}"
        for name in (names.MAL_SERVING, names.REPLAY_FROZEN, names.SWAP_ALARMS)
    } <= used


def test_its_panels_do_not_overlap() -> None:
    places = [panel["gridPos"] for panel in json.loads(DASHBOARD.read_text())["panels"]]
    cells = [
        (x, y)
        for p in places
        for x in range(p["x"], p["x"] + p["w"])
        for y in range(p["y"], p["y"] + p["h"])
    ]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24


SCRAPE_S = 60


@pytest.mark.slow
def test_ray_exports_them(tmp_path: Path) -> None:
    """The real gauge, read as Prometheus would read it from the node's agent."""
    import time
    import urllib.error
    import urllib.request

    import ray

    from medusa_ppo.runtime.processes import local_ray

    pytest.importorskip(
        "opencensus",
        reason="Ray's nodes export metrics with ray[default], which medusa-ppo[cluster] brings",
    )
    with local_ray():
        tracker = RayTracker("mine")
        port = ray.nodes()[0]["MetricsExportPort"]
        text = ""
        ends = time.monotonic() + SCRAPE_S
        while time.monotonic() < ends and 'Position="2"' not in text and 'position="2"' not in text:
            tracker.log(1, {names.MAL_SERVING: 2.5, f"{names.ACCEPTANCE_PER_POSITION}/2": 0.25})
            time.sleep(1)
            try:
                with urllib.request.urlopen(
                    f"http://127.0.0.1:{port}/metrics", timeout=5
                ) as answer:
                    text = answer.read().decode()
            except (urllib.error.URLError, TimeoutError):
                continue
    lines = [line for line in text.splitlines() if line.startswith(f"ray_{PREFIX}")]
    assert any(
        re.search(r'run="mine"', line) and line.startswith(f"ray_{PREFIX}{names.MAL_SERVING}")
        for line in lines
    ), lines
    assert any('position="2"' in line and line.endswith(" 0.25") for line in lines), lines
