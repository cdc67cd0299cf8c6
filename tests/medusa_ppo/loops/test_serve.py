"""What a server for a loop's server mode is started with; that it serves is part of test_trl.py."""

from __future__ import annotations

import json
from pathlib import Path

from heads.checkpoint import load_heads
from medusa_ppo.config import build_config
from medusa_ppo.loops.serve import prepare, server_flags


def test_heads_are_made_once_and_named_in_the_flags(chain_actor: Path, tmp_path: Path):
    config = build_config({"heads": {"num_heads": 2}})
    prepare(str(chain_actor), str(tmp_path / "heads"), config)
    heads, metadata = load_heads(tmp_path / "heads")
    assert heads.config.num_heads == 2

    prepare(str(chain_actor), str(tmp_path / "heads"), build_config({"heads": {"num_heads": 4}}))
    assert load_heads(tmp_path / "heads")[1].checksum == metadata.checksum, "heads that are there are left alone"

    flags = server_flags(str(chain_actor), str(tmp_path / "heads"), config)
    named = dict(zip(flags[::2], flags[1::2], strict=True))
    assert json.loads(named["--speculative-config"]) == {
        "method": "medusa",
        "model": str(tmp_path / "heads"),
        "num_speculative_tokens": 2,
    }
    assert named["--worker-extension-cls"].endswith("MedusaWorker") and named["--logprobs-mode"] == "processed_logprobs"
    assert "--disable-log-stats" not in named
