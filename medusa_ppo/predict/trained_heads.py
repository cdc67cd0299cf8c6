"""Sizes of heads in a folder, read without torch."""

from __future__ import annotations

import json
from pathlib import Path

from heads.errors import CheckpointError
from heads.heads_config import HeadsConfig


def read_trained(folder: Path) -> HeadsConfig:
    """Sizes and kind of native heads.

    Raises:
        CheckpointError: there are none in the folder.
    """
    try:
        text = (folder / "config.json").read_text(encoding="utf-8")
        return HeadsConfig.from_dict(json.loads(text)["medusa_ppo"]["heads"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            "This is not a folder of native heads.",
            given=f"{folder}: {type(error).__name__}",
            expected="a config.json with a section medusa_ppo",
            do="Check the path, or create one: `medusa-ppo convert SRC DST --to native`.",
        ) from None
