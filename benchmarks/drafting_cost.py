"""Time of one drafting call, ours against vLLM's own Medusa proposer, on the same engine, heads and
hidden states.

    python benchmarks/drafting_cost.py --vocab 32000 --hidden 512 --heads 4

A random Llama with that vocabulary is built in a temporary folder. Both proposers live in one
engine and take turns in every round; what is printed is the median of the ratios within a round,
for several numbers of running sequences.

Shape letters: B sequences, D hidden.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from heads.checkpoint import save_heads
from heads.heads_config import HeadsConfig
from heads.modules import MedusaHeads
from medusa_ppo.bench.pairs import run_rounds
from medusa_ppo.config.run_config import EngineConfig
from medusa_ppo.engines.colocated import ColocatedEngine
from medusa_ppo.vllm_plugin.hooks import Drafter

GREEDY = SimpleNamespace(all_greedy=True)


def build(folder: Path, vocab: int, hidden: int, heads: int) -> None:
    """A random actor and random heads of kind medusa for it; the heads a second time without our
    key, as stock vLLM reads them.
    """
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab,
            hidden_size=hidden,
            intermediate_size=hidden,
            num_hidden_layers=1,
            num_attention_heads=hidden // 64,
            num_key_value_heads=hidden // 64,
            bos_token_id=None,
            eos_token_id=0,
            tie_word_embeddings=False,
        )
    )
    model.save_pretrained(folder / "actor")
    trained = MedusaHeads(HeadsConfig(hidden, vocab, heads))
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.normal_(std=0.02)
    save_heads(folder / "heads", trained, lm_head_VD=model.lm_head.weight.detach())
    shutil.copytree(folder / "heads", folder / "stock")
    config = json.loads((folder / "stock" / "config.json").read_text())
    del config["medusa_ppo"]
    (folder / "stock" / "config.json").write_text(json.dumps(config))


def stock_proposer(ours: Any, folder: Path) -> Any:
    """vLLM's own proposer with its own module, beside ours in the same engine."""
    from vllm.config import set_current_vllm_config

    stock = Drafter(ours.vllm_config, ours.device)
    draft_config = stock.spec_config.draft_model_config
    before = draft_config.model
    draft_config.model = str(folder)
    try:
        with set_current_vllm_config(ours.vllm_config):
            stock.load_model(ours._target)
    finally:
        draft_config.model = before
    return stock


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocab", type=int, default=32_000)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--batches", default="1,4,16,64")
    parser.add_argument(
        "--draft-vocab",
        type=int,
        default=0,
        help="Our proposer drafts from so many tokens; 0: from all.",
    )
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory(prefix="medusa-ppo-bench-") as name:
        folder = Path(name)
        build(folder, options.vocab, options.hidden, options.heads)
        config = EngineConfig(
            dtype="float32",
            max_num_seqs=64,
            max_model_len=64,
            draft_temperature=0.0,
            threads=options.threads,
        )
        with ColocatedEngine(folder / "actor", folder / "heads", config) as engine:
            ours = engine._running().llm_engine.model_executor.driver_worker.worker.model_runner.drafter
            stock = stock_proposer(ours, folder / "stock")
            if options.draft_vocab:
                ours.configure({"draft_vocab": options.draft_vocab})
                ours.token_map.observe([list(range(options.draft_vocab)) * 2])
                ours.target_changed()
            for batch in (int(word) for word in options.batches.split(",")):
                hidden_BD = torch.randn(batch, options.hidden, dtype=ours.dtype)
                ours._last_ids = [0] * batch
                call = {"ours": ours, "stock": stock}
                with torch.inference_mode():
                    same = torch.equal(
                        *(
                            torch.as_tensor(p.propose(options.heads, hidden_BD, GREEDY)).long()
                            for p in call.values()
                        )
                    )

                    def timed(
                        proposer: Any, states_BD: torch.Tensor = hidden_BD
                    ) -> Callable[[int], float]:
                        def run(_: int) -> float:
                            began = time.perf_counter()
                            proposer.propose(options.heads, states_BD, GREEDY)
                            return time.perf_counter() - began

                        return run

                    rates = run_rounds(
                        {key: timed(value) for key, value in call.items()},
                        "stock",
                        options.rounds,
                        warmup=3,
                    )
                low, high = rates.spread("ours")
                line = {
                    "sequences": batch,
                    "same_drafts": same,
                    "ratio": rates.median_ratio("ours"),
                    "range": [low, high],
                }
                line |= {f"{key}_ms": 1e3 * statistics.median(rates.rates[key]) for key in call}
                sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
