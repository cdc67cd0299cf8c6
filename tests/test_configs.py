"""Every preset parses, says in its header what it needs and gives, and holds only what differs from
the defaults.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from medusa_ppo.config.config_file import preset
from medusa_ppo.config.run_config import RunConfig, load_config

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
# kuberay.yaml is a manifest for Kubernetes; tests/test_kuberay.py reads it.
PRESETS = sorted(set(CONFIGS.glob("*.yaml")) - {CONFIGS / "kuberay.yaml"})
HEADER = ("# Hardware:", "# Time:", "# Expect:")


def test_there_are_presets():
    assert {"demo", "gsm8k", "one-gpu"} <= {path.stem for path in PRESETS}
    assert preset("demo").name == "demo.yaml"


@pytest.mark.parametrize("path", PRESETS, ids=lambda p: p.stem)
def test_it_parses(path: Path):
    assert load_config(path).name == path.stem


@pytest.mark.parametrize("path", PRESETS, ids=lambda p: p.stem)
def test_its_header_names_hardware_time_and_figure(path: Path):
    head = [line for line in path.read_text().splitlines() if line.startswith("#")]
    for word in HEADER:
        assert any(line.startswith(word) and len(line) > len(word) + 5 for line in head), (
            f"{path.name} lacks '{word} ...'"
        )


@pytest.mark.parametrize("path", PRESETS, ids=lambda p: p.stem)
def test_it_holds_only_what_differs_from_what_it_extends(path: Path):
    own = yaml.safe_load(path.read_text())
    base = own.pop("extends", None)
    below = (load_config(preset(base)) if base else RunConfig()).model_dump(mode="json")
    for section, values in own.items():
        if isinstance(values, dict):
            same = [key for key, value in values.items() if below[section][key] == value]
            assert not same, (
                f"{path.name}: {section}.{', '.join(same)} say what {base or 'the default'} says"
            )


@pytest.mark.parametrize("path", PRESETS, ids=lambda p: p.stem)
def test_it_names_nothing_outside_of_the_checkout(path: Path):
    assert ".." not in path.read_text()
