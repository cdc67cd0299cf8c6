"""An actor of about 100M parameters for `medusa-ppo bench rollout`, with heads that are good and
heads that are always wrong.

    python benchmarks/large_actor.py OUT --tokenizer DIR
    medusa-ppo bench rollout --model OUT/actor --heads OUT/wrong --data OUT/prompts.jsonl --template
    '{prompt}'

Its layers compute as those of any Llama of this size, but what they add to the residual stream is
zero, so the next token depends on the last one alone and by a known table: heads learn it from
states and responses that need no forward pass. A real model is harder to draft for; what this one
measures is what drafting costs and can bring where weights are read from memory.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from heads.checkpoint import save_heads
from heads.heads_config import HeadsConfig
from heads.modules import MedusaHeads
from medusa_ppo.companion.trainer import HeadsTrainer
from medusa_ppo.config.run_config import CompanionConfig
from medusa_ppo.contract.rollout_batch import RolloutBatch

V, D, LAYERS, K = 8192, 768, 12, 4
USED = 512
"""Tokens that follow each other; the rest of the vocabulary is there for its cost and turns up now
and then.
"""
SHARPNESS = 13.0
"""Logit of the token that usually follows; the others lie about zero, so that it has a probability
of about 0.98 before the noise.
"""
SEQUENCES, LENGTH = 64, 64


def build_actor(folder: Path, tokenizer: str) -> LlamaForCausalLM:
    """The actor, in float32 (97.5M parameters), with the tokenizer of another model beside it."""
    torch.manual_seed(0)
    sizes = {
        "hidden_size": D,
        "intermediate_size": 2048,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 12,
    }
    tokens = {
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
    }
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=V, max_position_embeddings=1024, **sizes, **tokens)
    ).requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    embedding_VD = torch.nn.functional.normalize(torch.randn(V, D), dim=1)
    model.model.embed_tokens.weight.copy_(embedding_VD)
    # After the last norm a state is its token's embedding times sqrt(D).
    model.lm_head.weight.zero_()
    model.lm_head.weight[:USED] = SHARPNESS / D**0.5 * embedding_VD[torch.randperm(USED)]
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)
    return model


def responses(model: LlamaForCausalLM, sequences: int) -> RolloutBatch:
    """On-policy responses from the table alone."""
    ids_S = torch.randint(USED, (sequences,))
    columns = []
    states = []
    logprobs = []
    for _ in range(LENGTH):
        hidden_SD = model.model.norm(model.model.embed_tokens(ids_S))
        logprobs_SV = model.lm_head(hidden_SD).log_softmax(-1)
        ids_S = torch.multinomial(logprobs_SV.exp(), 1)[:, 0]
        columns.append(ids_S)
        states.append(hidden_SD)
        logprobs.append(logprobs_SV.gather(1, ids_S[:, None])[:, 0])
    hidden_MD = torch.stack(states, 1).reshape(-1, D)
    lengths_S = torch.full((sequences,), LENGTH)
    return RolloutBatch(
        hidden_MD, torch.stack(columns, 1).flatten(), torch.stack(logprobs, 1).flatten(), lengths_S
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--tokenizer",
        required=True,
        help="Folder of a model whose tokenizer has at most 8,192 tokens.",
    )
    parser.add_argument("--epochs", type=int, default=5)
    arguments = parser.parse_args()
    model = build_actor(arguments.out / "actor", arguments.tokenizer)
    lm_head_VD = model.lm_head.weight
    table_VD = model.model.embed_tokens.weight
    heads = MedusaHeads(HeadsConfig(D, V, K, kind="hydra"))
    config = CompanionConfig(
        loss="ce", epochs=arguments.epochs, batch_positions=512, learning_rate=2e-3
    )
    trainer = HeadsTrainer(heads, lm_head_VD, config, 0, embedding_VD=table_VD)
    trainer.train_batch(responses(model, SEQUENCES))
    save_heads(arguments.out / "good", trainer.heads, lm_head_VD=lm_head_VD)
    torch.manual_seed(1)
    wrong = MedusaHeads(HeadsConfig(D, V, K, kind="hydra")).requires_grad_(False)
    for parameter in wrong.parameters():
        parameter.normal_(std=0.05)
    save_heads(arguments.out / "wrong", wrong, lm_head_VD=lm_head_VD)
    words = [tokenizer_word(arguments.tokenizer, seed) for seed in range(256)]
    (arguments.out / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": text}) + "\n" for text in words), encoding="utf-8"
    )


def tokenizer_word(folder: str, seed: int) -> str:
    """A prompt of sixteen tokens or so."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = torch.randint(20, USED, (16,), generator=torch.Generator().manual_seed(seed))
    return tokenizer.decode(ids, skip_special_tokens=True) or "a"


if __name__ == "__main__":
    main()
