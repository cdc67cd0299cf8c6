"""HeadsConfig refuses what can't be built and names the nearest key."""

from __future__ import annotations

import pytest

from heads.errors import ConfigError
from heads.heads_config import HeadsConfig


def test_round_trip() -> None:
    config = HeadsConfig(16, 40, 3, "hydra", 2, "own", 8, 3, 5)
    assert HeadsConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"kind": "eagle"}, "kind"),
        ({"lm_head": "tied"}, "lm_head"),
        ({"num_heads": 0}, "num_heads"),
        ({"num_heads": 32}, "num_heads <= 31"),
        ({"kind": "hydra", "context": 4, "copy_parts": True}, "copy_parts"),
        ({"kind": "hydra", "copy_parts": 4}, "context"),
        ({"kind": "hydra", "feed_forward": 2}, "context"),
        ({"kind": "markov"}, "removed in 0.4.0"),
        ({"num_layers": 1.0}, "num_layers"),
        ({"kind": "hydra", "context": -1}, "context"),
        ({"kind": "hydra", "context": True}, "context"),
        ({"kind": "medusa", "context": 4}, "hydra"),
    ],
)
def test_impossible_values(change: dict, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        HeadsConfig.from_dict({"hidden_size": 16, "vocab_size": 40, **change})


def test_unknown_and_missing_keys() -> None:
    with pytest.raises(ConfigError, match="num_heads"):
        HeadsConfig.from_dict({"hidden_size": 16, "vocab_size": 40, "num_head": 3})
    with pytest.raises(ConfigError, match="vocab_size"):
        HeadsConfig.from_dict({"hidden_size": 16})


def test_trainable_parameters_of_the_design_table() -> None:
    """DESIGN.md 2: 0.26M, 2.36M and 2.62M for the actor of 256 x 2,048."""
    millions = {}
    for kind, lm_head in (
        ("medusa", "shared"),
        ("medusa", "own"),
        ("hydra", "shared"),
    ):
        shapes = HeadsConfig(256, 2048, 4, kind, 1, lm_head).tensor_shapes()
        count = 0
        for shape in shapes.values():
            size = 1
            for side in shape:
                size *= side
            count += size
        millions[kind, lm_head] = round(count / 1e6, 2)
    assert millions == {
        ("medusa", "shared"): 0.26,
        ("medusa", "own"): 2.36,
        ("hydra", "shared"): 2.62,
    }
