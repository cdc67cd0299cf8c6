"""What earlier responses to the same prompt gain for heads that copy, by replay: as counts mixed
into q (the memory), as text that copying searches besides the request's own, and as both.

    python benchmarks/earlier_responses.py --model ACTOR --heads HEADS --data test.jsonl
        --template 'Question: {question}\\nAnswer:' [--temperatures 1.0,0.7,0.5] [--json FILE]

All ways are replayed on the same responses with the same earlier ones, and each is compared with
copying alone, paired by prompt. The table of w learns from the whole set of responses once before
it is measured, as an engine's would have after a while.

Shape letters: S responses.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from heads.acceptance import ReplayResult, paired_difference
from heads.checkpoint import load_heads
from heads.heads_config import GAP
from medusa_ppo.actors.hf import embedding_weight, lm_head_weight, load_actor
from medusa_ppo.companion.gate import Served, replay
from medusa_ppo.contract.rollout_batch import RolloutBatch
from medusa_ppo.contract.rollouts import Rollouts, Sampling
from medusa_ppo.offline.collect import Sample, samples_of
from medusa_ppo.offline.evaluate import Recalled
from medusa_ppo.offline.hidden import HiddenReader, read_all
from medusa_ppo.offline.scene import engine_config, read_scene, running_engine
from medusa_ppo.runtime.console import offline_progress


def responses(
    options: argparse.Namespace, prompts: Sequence[tuple[int, ...]], temperatures: Sequence[float]
) -> list[tuple[Rollouts, Rollouts]]:
    """Earlier responses, and those to measure, for each temperature."""
    found = []
    config = engine_config(prompts, options.max_new_tokens)
    with running_engine(options.model, "", config, options.seed) as engine:
        for temperature in temperatures:
            sampling = Sampling(temperature, max_new_tokens=options.max_new_tokens)
            pair = [
                engine.generate(prompts, replace(sampling, responses_per_prompt=count, seed=seed))
                for count, seed in (
                    (options.earlier_responses, options.seed + 1),
                    (options.responses, options.seed),
                )
            ]
            found.append((pair[0], pair[1]))
    return found


def with_earlier_texts(
    batch: RolloutBatch, samples: Sequence[Sample], earlier: Rollouts, tail: int
) -> RolloutBatch:
    """The batch with the earlier responses to each prompt before its own text, the newest last; the
    prompt's last tokens precede each.
    """
    said: dict[tuple[int, ...], list[int]] = {}
    for response in earlier.responses:
        prompt = tuple(earlier.prompts[response.prompt_index])
        said.setdefault(prompt, []).extend([*prompt[-tail:], *response.token_ids, GAP])
    prompts = [sample.ids[: sample.spans[0][0]] for sample in samples]
    before = [[*said.get(prompt, []), *prompt] for prompt in prompts]
    return replace(
        batch,
        before_ids_X=torch.tensor([token for ids in before for token in ids], dtype=torch.int32),
        before_S=torch.tensor([len(ids) for ids in before], dtype=torch.int64),
    )


def measure(
    options: argparse.Namespace, temperature: float, earlier: Rollouts, now: Rollouts
) -> dict[str, Any]:
    """Tokens per step of each variant, and its gain over copying alone."""
    actor = load_actor(options.model)
    heads = load_heads(Path(options.heads))[0]
    tables: dict[str, Any] = {"embedding_VD": embedding_weight(actor).detach().float()}
    lm_head_VD = lm_head_weight(actor).detach().float()
    samples = samples_of([now])
    batch = read_all(HiddenReader(actor, temperature), samples, lambda *_: None)
    with_texts = with_earlier_texts(batch, samples, earlier, heads.config.copy_tokens)
    prompts = {sample.prompt: sample.ids[: sample.spans[0][0]] for sample in samples}
    unit_S = torch.tensor([sample.prompt for sample in samples])

    def replayed(of: RolloutBatch, counts: bool) -> ReplayResult:
        recalled = Recalled(prompts, [earlier]) if counts else None
        for _ in range(2 if counts else 1):
            result = replay(heads, of, lm_head_VD, served=Served(1.0, mix=recalled), **tables)
        return result.by_group(unit_S)

    ways = {
        "alone": (batch, False),
        "counts": (batch, True),
        "texts": (with_texts, False),
        "both": (with_texts, True),
    }
    found: dict[str, ReplayResult] = {}
    rows: dict[str, Any] = {}
    for name, (of, counts) in ways.items():
        found[name] = replayed(of, counts)
        gain = paired_difference(found[name], found["alone"])
        rows[name] = {
            "mean_acceptance_length": found[name].mean_acceptance_length,
            "over_alone": [gain.value, gain.low, gain.high],
        }
        sys.stdout.write(f"{temperature:g} {name}: {json.dumps(rows[name])}\n")
        sys.stdout.flush()
    for name, (one, other) in {
        "both over texts": ("both", "texts"),
        "counts over texts": ("counts", "texts"),
    }.items():
        apart = paired_difference(found[one], found[other])
        rows[name] = [apart.value, apart.low, apart.high]
    return {"temperature": temperature, "prompts": len(prompts), "responses": len(samples), **rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--heads", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--template", default="")
    parser.add_argument("--temperatures", default="1.0,0.7,0.5")
    parser.add_argument("--earlier-responses", type=int, default=16)
    parser.add_argument("--responses", type=int, default=2, help="measured ones of each prompt")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--limit", type=int, default=128, help="prompts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json")
    options = parser.parse_args()
    scene = read_scene(
        options.model, options.data, options.template, options.max_new_tokens, options.limit
    )
    temperatures = [float(part) for part in options.temperatures.split(",")]
    rows = []
    with offline_progress() as progress:
        progress.say("Writing responses ...")
        every = responses(options, scene.prompts, temperatures)
    for temperature, (earlier, now) in zip(temperatures, every, strict=True):
        rows.append(measure(options, temperature, earlier, now))
        sys.stdout.write(json.dumps(rows[-1]) + "\n")
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
