"""What a large vocabulary costs, and what drafting only from its most frequent tokens saves and
loses.

    python benchmarks/large_vocabulary.py actor OUT --tokenizer DIR
    medusa-ppo bench rollout --model OUT/actor --heads OUT/heads --data FILE --template '...'
        --batches 1 --fixed 4 --dtype bfloat16
    python benchmarks/large_vocabulary.py train [--width 8192] [--rows 256] [--rounds 3]
    python benchmarks/large_vocabulary.py length --model DIR --data FILE --template '...'
        [--width 512] [--batches 8]

`actor` writes a Llama of about 270M parameters with 262,144 tokens, and hydra heads, all random.
Hardly any draft is accepted, but a step takes the same time as if all were (five rows are computed
and verified either way). So with drafts in every step, a step costs `tokens per draft step / ratio
to none` plain steps. With `--draft-vocab 0` drafts come from all tokens.

`train` times the companion's training at that vocabulary, in turn: with all tokens and with
`--width` of them, with products in float32 and in bfloat16. `length` trains new heads on the same
on-policy batches of a real actor with the whole vocabulary and with a part of it, in the
companion's own cycle, and compares the final heads on responses that neither has seen.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch
from companion_defaults import Sampler
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from heads.checkpoint import save_heads
from heads.heads_config import HeadsConfig
from heads.modules import MedusaHeads
from medusa_ppo.actors.hf import (
    DTYPES,
    embedding_weight,
    lm_head_weight,
    load_actor,
    load_tokenizer,
)
from medusa_ppo.companion.cycle import Cycle
from medusa_ppo.companion.gate import Served, replay
from medusa_ppo.companion.trainer import HeadsTrainer
from medusa_ppo.config.companion_section import CompanionConfig
from medusa_ppo.config.data_section import DataConfig
from medusa_ppo.contract.rollout_batch import RolloutBatch
from medusa_ppo.contract.rollouts import Sampling
from medusa_ppo.ppo.generation import PromptStream

V, D, LAYERS, K = 262_144, 640, 18, 4
ANSWERS = 4
TOKENS = 96
CONTEXT = 16


def write_actor(options: argparse.Namespace) -> None:
    """The random Llama and its heads."""
    sizes = {
        "hidden_size": D,
        "intermediate_size": 2048,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 10,
    }
    tokens = {
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
        # As in small models with large vocabularies.
        "tie_word_embeddings": True,
    }
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=V, max_position_embeddings=1024, **sizes, **tokens)
    ).to(torch.bfloat16)
    model.save_pretrained(options.out / "actor")
    AutoTokenizer.from_pretrained(options.tokenizer).save_pretrained(options.out / "actor")
    heads = MedusaHeads(HeadsConfig(D, V, K, kind="hydra"))
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.normal_(std=0.02)
    save_heads(options.out / "heads", heads, lm_head_VD=model.lm_head.weight.detach().float())


def time_training(options: argparse.Namespace) -> None:
    """Tokens/s of one pass over a batch, each form in turn."""
    heads = HeadsConfig(D, options.vocab, K, "hydra", context=CONTEXT)
    table_VD = 0.02 * torch.randn(options.vocab, D)
    rows = options.rows
    ids_W = torch.arange(0, options.vocab, options.vocab // options.width)[: options.width]
    # Sampled tokens are among the frequent ones, as when the draft vocabulary follows the rollouts.
    ids_M = ids_W[torch.randint(options.width, (rows,))]
    batch = RolloutBatch(
        torch.randn(rows, D), ids_M, torch.full((rows,), -2.0), torch.full((rows // 64,), 64)
    )
    trainers = {}
    for name in options.dtypes:
        for width in (options.vocab, options.width):
            config = CompanionConfig(epochs=1, batch_positions=rows)
            trainer = HeadsTrainer(
                MedusaHeads(heads), table_VD, config, 0, embedding_VD=table_VD, dtype=DTYPES[name]
            )
            # Set from outside: in a run the companion chooses it from rollouts, and here there are
            # none.
            trainer.ids_W = None if width == options.vocab else ids_W
            trainers[name, width] = trainer
    seconds: dict[tuple[str, int], list[float]] = {key: [] for key in trainers}
    for _ in range(options.rounds + 1):
        for key, trainer in trainers.items():
            began = time.perf_counter()
            trainer.train_batch(batch, steps=1)
            seconds[key].append(time.perf_counter() - began)
    # The first round warms up.
    rates = {key: rows / statistics.median(taken[1:]) for key, taken in seconds.items()}
    first = rates[options.dtypes[0], options.vocab]
    for (name, width), rate in rates.items():
        sys.stdout.write(
            f"{name:<9} {width:>7} tokens: {rate:8.1f} positions/s, x{rate / first:.2f}\n"
        )


@torch.no_grad()
def sampled(
    actor: PreTrainedModel, prompts: PromptStream, step: int, count: int, end: int
) -> RolloutBatch:
    """A batch of the actor's own responses with their states."""
    chosen = [prompt.token_ids for prompt in prompts.batch(step, count)]
    rollouts = Sampler(actor).generate(
        chosen, Sampling(1.0, max_new_tokens=TOKENS, responses_per_prompt=ANSWERS, seed=step)
    )
    states = []
    for response in rollouts.responses:
        ids_1T = torch.tensor([[*chosen[response.prompt_index], *response.token_ids]])
        # The state before each token: the last one of the prompt predicts the first.
        states.append(
            actor.base_model(ids_1T).last_hidden_state[0, -1 - len(response.token_ids) : -1]
        )
    ids_M = torch.tensor([token for response in rollouts.responses for token in response.token_ids])
    logprobs_M = torch.tensor(
        [value for response in rollouts.responses for value in response.logprobs]
    )
    lengths_S = torch.tensor([len(response.token_ids) for response in rollouts.responses])
    prompts_S = torch.tensor([response.prompt_index for response in rollouts.responses])
    return RolloutBatch(torch.cat(states), ids_M, logprobs_M, lengths_S, prompts_S=prompts_S)


def compare_lengths(options: argparse.Namespace) -> None:
    """Mean acceptance length of heads trained for a part of the vocabulary relative to heads
    trained for all of it.
    """
    actor = load_actor(options.model, "float32")
    tokenizer = load_tokenizer(options.model)
    data = DataConfig(path=options.data, template=options.template, answer_column=None)
    prompts = PromptStream.load(data, tokenizer, seed=0)
    # The last two are held out: no heads learn from them.
    batches = [
        sampled(actor, prompts, step, options.prompts, tokenizer.eos_token_id)
        for step in range(options.batches + 2)
    ]
    lm_head_VD = lm_head_weight(actor).detach()
    embedding_VD = embedding_weight(actor).detach()
    vocab, width = lm_head_VD.shape
    held_out = RolloutBatch.join(batches[-2:])
    found = {}
    for size in (vocab, options.width):
        heads = HeadsConfig(width, vocab, K, "hydra", context=CONTEXT)
        config = CompanionConfig()
        how = {
            "embedding_VD": embedding_VD,
            "draft_temperature": 1.0,
            "draft_vocab": None if size == vocab else size,
        }
        cycle = Cycle(heads, config, lm_head_VD, seed=0, **how)
        began = time.process_time()
        for batch in batches[:-2]:
            cycle.run(batch)
        cpu_s = time.process_time() - began
        served = Served(1.0, None, cycle.trainer.ids_W)
        result = replay(
            cycle.candidate, held_out, lm_head_VD, embedding_VD=embedding_VD, served=served
        )
        found[size] = result.mean_acceptance_length
        sys.stdout.write(
            f"{size:>6} of {vocab} tokens: {found[size]:.3f} tokens a step, {cpu_s:.0f} CPU s,"
            f" version {cycle.version}\n"
        )
    positions = sum(batch.response_ids_M.numel() for batch in batches[:-2])
    sys.stdout.write(
        f"part / all: {found[options.width] / found[vocab]:.4f}; {positions:,} positions\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    writing = commands.add_parser("actor", help="write the random actor and its heads")
    writing.add_argument("out", type=Path)
    writing.add_argument(
        "--tokenizer",
        required=True,
        help="Folder of a smaller tokenizer: prompts use its tokens alone.",
    )
    timing = commands.add_parser("train", help="time the companion's training")
    timing.add_argument("--vocab", type=int, default=V)
    timing.add_argument("--width", type=int, default=8192, help="tokens that drafts come from")
    timing.add_argument(
        "--rows", type=int, default=256, help="positions of the batch, in responses of 64"
    )
    timing.add_argument("--rounds", type=int, default=3)
    timing.add_argument(
        "--dtypes", nargs="+", default=["float32", "bfloat16"], choices=list(DTYPES)
    )
    length = commands.add_parser("length", help="compare acceptance")
    length.add_argument("--model", required=True)
    length.add_argument("--data", required=True)
    length.add_argument("--template", required=True)
    length.add_argument("--width", type=int, default=512, help="tokens that drafts come from")
    length.add_argument("--batches", type=int, default=8)
    length.add_argument(
        "--prompts", type=int, default=32, help=f"of a batch, {ANSWERS} answers to each"
    )
    options = parser.parse_args()
    torch.manual_seed(0)
    {"actor": write_actor, "train": time_training, "length": compare_lengths}[options.command](
        options
    )


if __name__ == "__main__":
    main()
