"""A Llama of about 270M parameters with 262,144 tokens, and hydra heads, all random: what drafting costs at a real vocabulary.

    python benchmarks/large_vocabulary.py OUT --tokenizer DIR
    medusa-ppo bench rollout --model OUT/actor --heads OUT/heads --data FILE --template '...' --batches 1 --fixed 4 --dtype bfloat16

Hardly a draft is accepted. A step takes what it takes where all are (five rows are computed and verified either way), so with drafts
in every step it costs `tokens per draft step / ratio to none` plain steps. With `--draft-vocab 0` drafts come from all tokens.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from heads.checkpoint import save_heads
from heads.heads_config import HeadsConfig
from heads.modules import MedusaHeads

V, D, LAYERS, K = 262_144, 640, 18, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokenizer", required=True, help="Folder of a smaller tokenizer: prompts use its tokens alone.")
    options = parser.parse_args()
    torch.manual_seed(0)
    sizes = {"hidden_size": D, "intermediate_size": 2048, "num_hidden_layers": LAYERS, "num_attention_heads": 10}
    tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0, "tie_word_embeddings": True}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=V, max_position_embeddings=1024, **sizes, **tokens)).to(torch.bfloat16)
    model.save_pretrained(options.out / "actor")
    AutoTokenizer.from_pretrained(options.tokenizer).save_pretrained(options.out / "actor")
    heads = MedusaHeads(HeadsConfig(D, V, K, kind="hydra"))
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.normal_(std=0.02)
    save_heads(options.out / "heads", heads, lm_head_VD=model.lm_head.weight.detach().float())


if __name__ == "__main__":
    main()
