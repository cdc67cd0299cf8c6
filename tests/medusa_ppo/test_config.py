"""Configuration: defaults, overrides, and the sentences a user reads when a key is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from heads.errors import ConfigError
from heads.losses import NAMED_LOSSES, LossConfig
from medusa_ppo.config import TEACHER_LOSSES, known_keys, load_config

ROOT = Path(__file__).resolve().parents[2]


def test_overrides_are_typed(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("ppo: {steps: 3}\nname: from-file\n")
    config = load_config(file, ["ppo.clip_range=0.1", "companion.enabled=false", "model.path=some/folder"])
    assert (config.ppo.steps, config.ppo.clip_range, config.companion.enabled) == (3, 0.1, False)
    assert config.model.path == "some/folder" and config.name == "from-file"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("ppo.step=3", "ppo.steps"),
        ("engine.num_draft=1", "engine.num_drafts"),
        ("heads.kind=eagle", "medusa"),
        ("ppo.steps=many", "integer"),
        ("ppo.steps=0", "greater than or equal to 1"),
        ("engine.num_drafts=9", "heads.num_heads"),
        ("sampling.max_new_tokens=9000", "engine.max_model_len"),
        ("engine.url=http://127.0.0.1:1", "engine.backend=server"),
        ("engine={transfer: broadcast, backend: server}", "engine.backend=colocated"),
        ("engine={transfer: broadcast, extra: {data_parallel_size: 2}}", "no data_parallel_size above 1"),
        ("companion.offload=true", "companion.num_gpus > 0"),
        ("companion.min_epochs=2", "less than or equal to 1"),
        ("engine.placement=spread", "replicas above 1"),
        ("companion={workers: 2, save_replay: true}", "companion.workers=1 or companion.save_replay=False"),
        ("companion={workers: 2, positions: fraction}", "companion.workers=1 or companion.positions=all"),
        ("companion={workers: 2, offload: true, num_gpus: 1}", "companion.workers=1 or companion.offload=False"),
        ("companion.placement=near", "companion.placement"),
        ("nonsense", "key=value"),
        ("name.x.y=1", "section"),
    ],
)
def test_a_wrong_override_names_what_is_right(override: str, words: str) -> None:
    overrides = ["name=abc", override] if override.startswith("name.") else [override]
    with pytest.raises(ConfigError) as error:
        load_config(None, overrides)
    assert words in str(error.value)
    assert error.value.exit_code == 2


def test_a_missing_or_broken_file_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        load_config(tmp_path / "none.yaml")
    broken = tmp_path / "broken.yaml"
    broken.write_text("a: [1,")
    with pytest.raises(ConfigError, match="not YAML"):
        load_config(broken)
    broken.write_text("- 1\n")
    with pytest.raises(ConfigError, match="mapping"):
        load_config(broken)


def test_the_config_is_frozen_and_every_field_is_documented() -> None:
    config = load_config()
    with pytest.raises(Exception, match="frozen"):
        config.ppo.steps = 5  # type: ignore[misc]
    for key in known_keys():
        section = type(config)
        *parents, leaf = key.split(".")
        for parent in parents:
            section = section.model_fields[parent].annotation
        assert section.model_fields[leaf].description, f"{key} has no docstring"


def test_losses_that_need_neighbours_are_not_sampled_early() -> None:
    for loss in NAMED_LOSSES:
        assert (loss in TEACHER_LOSSES) == LossConfig.named(loss).needs_teacher
        config = load_config(None, ["companion.positions=fraction", f"companion.loss={loss}"])
        assert config.companion.samples_early != LossConfig.named(loss).needs_teacher
    assert not load_config().companion.samples_early
