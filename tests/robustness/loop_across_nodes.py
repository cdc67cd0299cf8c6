"""The loop of examples/tapped_loop.py, started by test_nodes.py on a node of a Ray: loop and
companion stay on this node, vLLM goes to the node that the order names. If that one goes away, the
loop waits until it is back, and goes on with a new engine.

    python loop_across_nodes.py '{"actor": "/tmp/actor", "engine": "other", ...}'
"""

from __future__ import annotations

import json
import runpy
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
from ray.exceptions import RayActorError
from vllm import LLM

from medusa_ppo.config.run_config import build_config
from medusa_ppo.loops.served_companion import companion_in_ray

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "tapped_loop.py"
ALONE = 0.001
"""Amount of a node's resource: it decides where, not how many."""
STARTS = 3
LOST = "the engine's node is away"
FOUND = "a new engine is up"
Files = dict[str, bytes]


def read(folder: Path) -> Files:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def write(files: Files) -> str:
    """A folder of this node with the files."""
    folder = Path(tempfile.mkdtemp(prefix="from-the-loop-"))
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return str(folder)


class Engine(LLM):
    """vLLM as a Ray actor, on a node that has none of the loop's files."""

    def __init__(self, actor: Files, heads: Files, arguments: dict[str, Any]) -> None:
        speculation = {**arguments["speculative_config"], "model": write(heads)}
        ours = {"model": write(actor), "speculative_config": speculation}
        super().__init__(**{**arguments, **ours})

    def load(self, actor: Files) -> None:
        """The loop's weight sync."""
        self.collective_rpc("reload_weights", kwargs={"weights_path": write(actor)})


class Elsewhere:
    """The calls of the example's loop, for an engine on another node."""

    def __init__(self, order: dict[str, Any], arguments: dict[str, Any]) -> None:
        self._order = order
        self._arguments = arguments
        self._heads = read(Path(order["heads"]))
        self._actor = read(Path(order["actor"]))
        self._counted: dict[str, float] = {}
        self._before: dict[str, float] = {}
        self._engine: Any = self._started()

    def _started(self) -> Any:
        """Ray waits for the node if it is away."""
        return (
            ray.remote(Engine)
            .options(
                num_cpus=0,
                resources={self._order["engine"]: ALONE},
                runtime_env={"env_vars": {"MEDUSA_PPO_FEED": self._order["feed"]}},
            )
            .remote(self._actor, self._heads, self._arguments)
        )

    def __call__(self, name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "collective_rpc":
            # The tokenizer stays.
            self._actor |= read(Path(kwargs["kwargs"]["weights_path"]))
            name, args, kwargs = "load", (self._actor,), {}
        while True:
            try:
                answer = ray.get(getattr(self._engine, name).remote(*args, **kwargs))
                return self._summed(answer) if name == "get_metrics" else answer
            except RayActorError as error:
                print(f"{LOST}: {error}", flush=True)
                self._before = dict(self._counted)
                self._start_again()
                print(FOUND, flush=True)

    def _start_again(self) -> None:
        for left in reversed(range(STARTS)):
            self._engine = self._started()
            try:
                ray.get(self._engine.get_tokenizer.remote())
                return
            except RayActorError:
                # Until Ray misses the node, it puts the new engine there.
                if not left:
                    raise

    def _summed(self, metrics: list[Any]) -> list[Any]:
        """As if it had been one engine all the time."""
        for metric in metrics:
            if hasattr(metric, "value"):
                before = self._before.get(metric.name, 0.0)
                self._counted[metric.name] = metric.value + before
        return [SimpleNamespace(name=name, value=value) for name, value in self._counted.items()]


def main(order: dict[str, Any]) -> None:
    """`actor`, `heads`: folders of this node; `engine`: the node of the engine; `feed`: address;
    `companion`: address, or `ray`; `steps`; `settings`: of the companion.
    """
    ray.init(address="auto", log_to_driver=True)
    companion = order["companion"]
    held = None
    if companion == "ray":
        sections = {"heads": {"num_heads": 3}, "companion": order["settings"]}
        sections["companion"] |= {"feed": order["feed"], "num_gpus": 0, "resource": "head"}
        config = build_config(sections)
        held = companion_in_ray("companion", config, order["actor"], Path(order["heads"]))
        companion = "ray:companion"
    example = runpy.run_path(str(EXAMPLE))
    arguments = example["engine_arguments"](order["actor"], order["heads"])
    call = Elsewhere(order, arguments)
    example["train"](order["actor"], companion, call, order["steps"])
    del held


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
