"""A vLLM server for a loop's server mode: `python -m medusa_ppo.loops.serve --model DIR --heads DIR [vLLM's own flags]`.

The heads are made (zero start, or as `--medusa FILE` says) when their folder does not exist yet. Then this process becomes vLLM's own
server, with the flags that drafting and swapping need.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from medusa_ppo.config import RunConfig, load_config
from medusa_ppo.engines.launch import SERVER_MODULE, plan_launch
from medusa_ppo.loops.attachment import OURS


def prepare(model: str, heads: str, config: RunConfig) -> None:
    """Write the heads that a server starts with, unless they are there."""
    from medusa_ppo.actors.hf import load_actor
    from medusa_ppo.plugin import MedusaPlugin

    if not (Path(heads) / "config.json").is_file():
        MedusaPlugin.prepare_heads(config, load_actor(model), heads)


def server_flags(model: str, heads: str, config: RunConfig) -> list[str]:
    """vLLM's flags for drafting and swapping. Raises as `plan_launch`."""
    arguments = plan_launch(model, heads, config.engine, config.seed).engine_args
    flags = ["--model", model]
    for name in (*OURS, "logprobs_mode"):
        value = arguments[name]
        if value is not False:  # Statistics are on without their flag.
            flags += [f"--{name.replace('_', '-')}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return flags


def main(arguments: list[str] | None = None) -> None:
    """Parse our three flags, make the heads, and hand over to vLLM."""
    parser = argparse.ArgumentParser(prog="python -m medusa_ppo.loops.serve", description=__doc__, allow_abbrev=False)
    parser.add_argument("--model", required=True)
    parser.add_argument("--heads", required=True)
    parser.add_argument("--medusa", default=None, help="YAML file; read are heads, engine and seed")
    given, rest = parser.parse_known_args(arguments)
    config = load_config(given.medusa)
    prepare(given.model, given.heads, config)
    flags = server_flags(given.model, str(Path(given.heads).resolve()), config)
    # The server keeps its API in one process and the model in another; the route that reaches our workers is one of development mode.
    environment = {name: value for name, value in os.environ.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    os.execvpe(sys.executable, [sys.executable, "-m", SERVER_MODULE, *flags, *rest], environment | {"VLLM_SERVER_DEV_MODE": "1"})


if __name__ == "__main__":
    main()
