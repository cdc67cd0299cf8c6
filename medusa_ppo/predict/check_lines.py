"""How to check a prediction on a GPU: command lines, ready to run.

Without heads of ours, the lines start vLLM's own Medusa with untrained weights and let it accept
drafts at the given rates (`rejection_sample_method: synthetic`): the text means nothing, the speed
does. vLLM knows the method `medusa` up to 0.32.
"""

from __future__ import annotations

import json
import shlex

from medusa_ppo.predict.prediction import Prediction

FOLDER = "any-heads"
"""Folder for the configuration of untrained heads, which have no weight file."""


def check_lines(prediction: Prediction, heads: str = "HEADS", on_gpu: bool = True) -> list[str]:
    """Shell lines: vLLM plain, vLLM with synthetic acceptance, ours with real heads; on a CPU only
    the last, because vLLM has no synthetic acceptance there.
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
    batches = ",".join(str(row.sequences) for row in prediction.rows[::2])
    fixed = ",".join(str(count) for count in range(1, len(asked.acceptance) + 1))
    ours = (
        f"medusa-ppo bench rollout --model {name} --heads {shlex.quote(heads)} --data DATA"
        f" --template TEMPLATE --batches {batches} --fixed {fixed} --max-new-tokens {length}"
    )
    if not on_gpu:
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
        "# 3. with trained heads, on your prompts",
        ours,
    ]
