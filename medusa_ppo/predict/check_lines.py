"""How to check a prediction on a GPU: command lines, ready to run.

Without heads of ours, the lines start vLLM's own Medusa with untrained weights and let it accept
drafts at the given rates (`rejection_sample_method: synthetic`): the text means nothing, the speed
does. vLLM knows the method `medusa` up to 0.32.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence

from heads.errors import ConfigError
from medusa_ppo.predict.draft_work import HeadsDrafter
from medusa_ppo.predict.gpus import GpuFigures
from medusa_ppo.predict.prediction import MEMORY_SHARE, Prediction, sequences_that_fit

FOLDER = "any-heads"
"""Folder for the configuration of untrained heads, which have no weight file."""


def check_lines(
    prediction: Prediction,
    heads: str,
    gpu: GpuFigures | None,
    dtype: str = "bfloat16",
    threads: int = 2,
) -> list[str]:
    """Shell lines: vLLM plain, vLLM with synthetic acceptance, ours with real heads; on a CPU only
    the last, because vLLM has no synthetic acceptance there.

    Args:
        gpu: None: the prediction is for a CPU, with this dtype and number of threads; that for a
            GPU is for bfloat16.
    """
    asked = prediction.question
    sequences = prediction.drafted_slots
    drafts = next(
        (row.best for row in prediction.rows if row.sequences >= sequences and row.best), 0
    ) or len(asked.acceptance)
    rates = [round(share, 4) for share in asked.acceptance[:drafts]]
    stock = {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": asked.model.hidden,
        "vocab_size": asked.model.vocab,
        "truncated_vocab_size": asked.model.vocab,
        "num_heads": drafts,
        "num_hidden_layers": 1,
        "original_lm_head": True,
        "medusa_fc_bias": False,
    }
    speculative = {
        "method": "medusa",
        "model": FOLDER,
        "num_speculative_tokens": drafts,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": rates,
    }
    name = shlex.quote(asked.name)
    length = round(asked.lengths.mean)
    serve = (
        f"vllm serve {name} --load-format dummy --tensor-parallel-size {asked.ranks}"
        f" --max-num-seqs {sequences} --max-model-len {asked.prompt + max(asked.lengths.tokens)}"
    )
    bench = (
        f"vllm bench serve --model {name} --dataset-name random"
        f" --random-input-len {asked.prompt} --random-output-len {length} --ignore-eos"
        f" --temperature 1 --num-prompts {len(asked.lengths.tokens)} --max-concurrency {sequences}"
    )
    if gpu is None:
        batches = [row.sequences for row in prediction.rows[::2]]
        ours = _bench_line(prediction, heads, batches, f"--dtype {dtype} --threads {threads}")
        return ["# with trained heads, on your prompts", ours]
    return [
        "# 1. vLLM without speculation",
        serve,
        bench,
        f"# 2. drafts that cost as much as Medusa's, accepted at {sum(rates) + 1:.2f} tokens a "
        "step",
        f"mkdir -p {FOLDER} && echo {shlex.quote(json.dumps(stock))} > {FOLDER}/config.json",
        # Our plugin refuses rates that would change the samples; here the samples don't matter.
        f"VLLM_PLUGINS=none {serve} --speculative-config {shlex.quote(json.dumps(speculative))}",
        bench,
        *_with_trained_heads(prediction, heads, gpu),
    ]


def _with_trained_heads(prediction: Prediction, heads: str, gpu: GpuFigures) -> list[str]:
    """The third check, as far as the GPU's memory holds several engines at once."""
    asked = prediction.question
    if asked.ranks > 1:
        return [
            "# 3. with trained heads: `medusa-ppo bench rollout` starts engines of one GPU, not of"
            f" {asked.ranks}",
        ]
    drafter = HeadsDrafter(asked.heads, asked.width or asked.model.vocab)
    # Without speculation and ours; with n-grams, too, if there is room.
    for engines, others in ((3, ""), (2, " --others none")):
        try:
            room = sequences_that_fit(
                asked, gpu, drafter.kept_bytes(asked.sequences), MEMORY_SHARE / engines
            )
        except ConfigError:
            continue
        batches = [row.sequences for row in prediction.rows[::2] if row.sequences <= room]
        return [
            f"# 3. with trained heads, on your prompts; {engines} engines share the GPU's memory",
            _bench_line(prediction, heads, batches, f"--dtype bfloat16{others}"),
        ]
    return [
        "# 3. with trained heads: `medusa-ppo bench rollout` starts two engines beside each other,"
        f" and half of one {gpu.name.upper()}'s memory does not hold this model",
    ]


def _bench_line(prediction: Prediction, heads: str, batches: Sequence[int], more: str) -> str:
    asked = prediction.question
    fixed = ",".join(str(count) for count in range(1, len(asked.acceptance) + 1))
    return (
        f"medusa-ppo bench rollout --model {shlex.quote(asked.name)} --heads {shlex.quote(heads)}"
        f" --data DATA --template TEMPLATE --batches {','.join(map(str, batches))} --fixed {fixed}"
        f" --max-new-tokens {round(asked.lengths.mean)} {more}"
    )
