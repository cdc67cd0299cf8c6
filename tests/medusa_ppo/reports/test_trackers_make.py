"""Which trackers a run gets: names, missing packages and failed starts are told before PPO
begins.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from heads.errors import ConfigError
from medusa_ppo.config.run_config import RunConfig, build_config
from medusa_ppo.reports import trackers as make


def config_of(tmp_path: Path, *trackers: str) -> RunConfig:
    return build_config(
        {
            "name": "run",
            "out": str(tmp_path),
            "report": {"trackers": list(trackers), "project": "mine"},
        }
    )


@pytest.mark.parametrize(
    ("name", "near"), [("tensorbord", "tensorboard"), ("wand", "wandb"), ("trakio", "trackio")]
)
def test_an_unknown_name_gets_the_nearest_valid_one(tmp_path: Path, name: str, near: str) -> None:
    with pytest.raises(ConfigError, match=f"Did you mean {near}"):
        config_of(tmp_path, "ray", name)


def test_every_name_is_known_everywhere(tmp_path: Path) -> None:
    from medusa_ppo.config.report_section import TRACKERS

    assert set(TRACKERS) == set(make.PACKAGES) == set(make.STARTS)
    assert config_of(tmp_path, "ray", "wandb", "ray").report.trackers == ("ray", "wandb")
    assert RunConfig().report.trackers == ()


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "wandb" else object()
    )
    make.check_trackers(("tensorboard", "ray"))
    with pytest.raises(ConfigError, match="pip install wandb"):
        make.check_trackers(("ray", "wandb"))


def test_a_tracker_that_does_not_start_closes_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = []

    class Started:
        def __init__(self, config: RunConfig, first_step: int) -> None:
            assert (config.report.project, config.name, first_step) == ("mine", "run", 4)
            assert config.run_dir == tmp_path / "run"
            self.name = config.name

        def log(self, step: int, values: object) -> None:
            raise AssertionError("nothing was logged")

        def close(self) -> None:
            closed.append(self.name)

    def refuse(*_: object) -> Started:
        raise RuntimeError("not logged in")

    monkeypatch.setitem(make.STARTS, "ray", Started)
    monkeypatch.setitem(make.STARTS, "wandb", refuse)
    with pytest.raises(ConfigError, match="not logged in"):
        make.start_trackers(config_of(tmp_path, "ray", "wandb"), 4)
    assert closed == ["run"]


def test_a_service_gets_the_configuration_without_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is another's machine, where the run's files are not."""
    given: list[object] = []
    monkeypatch.setattr(make, "WandbTracker", lambda *values: given.extend(values))
    monkeypatch.setattr(make, "TrackioTracker", lambda *values, resumed: given.extend(values))
    engine = {"backend": "http://me:pw@host", "extra": {"api_key": "pw2"}}
    config = build_config(
        {"out": str(tmp_path), "engine": engine, "report": {"compare_pairs": None}}
    )
    for name in ("wandb", "trackio"):
        make.STARTS[name](config, 0)
    assert (
        len(given) == 7
        and "***" in repr(given)
        and "pw" not in repr(given).replace(str(tmp_path), "")
    )
