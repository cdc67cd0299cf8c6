"""A small actor enlarged by zero-gated neurons: it writes what the small one writes
(`medusa_ppo.demo.pretraining.grow`).

    python benchmarks/grown_actor.py OUT [--model DIR] [--intermediate 16384]

Each token costs as much as in any Llama of this size: all weights are read and multiplied. So an
actor whose weights are in memory and not in a CPU's cache writes text as predictable as the demo's,
and no large actor has to be trained.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

from medusa_ppo.demo.actor_cache import ensure_demo_actor
from medusa_ppo.demo.pretraining import grow


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="", help="a Llama's folder; without it the demo's actor")
    parser.add_argument("--intermediate", type=int, default=16384)
    options = parser.parse_args()
    folder = options.model or str(ensure_demo_actor())
    small = AutoModelForCausalLM.from_pretrained(folder)
    grow(small, options.intermediate).save_pretrained(options.out)
    # vLLM looks for the tokenizer beside the weights.
    AutoTokenizer.from_pretrained(folder).save_pretrained(options.out)


if __name__ == "__main__":
    main()
