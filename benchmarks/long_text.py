"""Long text: an actor that writes more than 2,048 tokens, PPO with it, and acceptance by the place
in a response.

    python benchmarks/long_text.py actor OUT
    python benchmarks/long_text.py ppo --model OUT --out runs/long [key=value ...]
    python benchmarks/long_text.py places --model OUT --heads HEADS

The text is that of the embedded task made long: after the solution of the prompt's problem the
response goes on with further problems and their solutions. `actor` trains the demo's actor on such
text for `STEPS` steps, in which nothing ends; before, it ends after one solution. Most responses
then have all 2,304 tokens. `ppo` is a run of 20 steps with the report's usual figures (REINFORCE
with the other responses as baseline, no critic); the reward is what `graded_lines` pays for the
steps of all solutions, a mean over them. HEADS of `places` come from

    medusa-ppo train --model OUT --data ROWS --template '{prompt}' --out HEADS
        --max-new-tokens 2304 --max-train-tokens 60000

with 48 rows of `demo_rows("train")` as JSON lines (a round of responses is whole, so 272,540 tokens
came). `places` lets the engine answer prompts of the split `eval`, and replays the heads on each
quarter of the responses by itself; what copying searches is what stood before. Asked: the last
quarter is not below the first.

Shape letters: B documents, T positions, S responses.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from heads.acceptance import paired_difference
from heads.checkpoint import load_heads
from medusa_ppo.actors.hf import embedding_weight, lm_head_weight, load_actor
from medusa_ppo.companion.gate import Served, replay
from medusa_ppo.contract.rollout_batch import RolloutBatch
from medusa_ppo.contract.rollouts import Sampling
from medusa_ppo.demo.actor_cache import ensure_demo_actor
from medusa_ppo.demo.pretraining import DEFAULT_RECIPE
from medusa_ppo.demo.task import demo_rows, document, graded_lines, problem
from medusa_ppo.offline.collect import samples_of
from medusa_ppo.offline.hidden import HiddenReader, read_all
from medusa_ppo.offline.scene import engine_config, running_engine

ROOT = Path(__file__).parent.parent
DOCUMENTS = 20
"""Problems of a training text, some 2,250 tokens."""
STEPS, ROWS, LEARNING_RATE = 150, 2, 5e-4
POSITIONS = 4096
NEW_TOKENS = 2304
QUARTERS = 4
PPO = (
    "ppo.steps=20",
    "ppo.advantages=rloo",
    "ppo.prompts_per_step=4",
    "ppo.minibatch_size=8",
    "ppo.micro_batch_size=2",
    "ppo.step_separator=null",
    "ppo.reward=benchmarks.long_text:graded_texts",
    "sampling.responses_per_prompt=2",
    f"sampling.max_new_tokens={NEW_TOKENS}",
    "engine.max_num_seqs=4",
    "heads.warm_up_tokens=24576",
    "report.compare_pairs=3",
    "report.speed_every=10",
)
"""Overrides of configs/demo.yaml."""
START = document(problem(0, 0))[0].split()[0]
"""The word that begins a problem."""


def graded_texts(prompt: str, response: str, row: dict[str, Any]) -> float:
    """What the steps of all solutions of a response earn, as a mean over the solutions."""
    solutions = (prompt + response).split(START)[1:]
    earned = []
    for text in solutions:
        lines = text.partition("Answer:")[2]
        # Each solution is measured by its own lines: only what a program can check counts.
        worth = graded_lines("", lines, {"solution": lines, "answer": None})
        earned.append(fmean(worth) if worth else 0.0)
    return fmean(earned) if earned else 0.0


def long_texts(tokenizer: Any, seed: int) -> Iterator[tuple[list[int], list[int]]]:
    """(prompt ids, response ids): a problem with its solution, and further ones behind it."""
    number = 0
    while True:
        texts = []
        for _ in range(DOCUMENTS):
            found = problem(
                number, seed, "pretrain", DEFAULT_RECIPE.slip_rate, DEFAULT_RECIPE.checked_rate
            )
            texts.append(document(found))
            number += 1
        first, solution = texts[0]
        rest = "".join(f"\n{prompt}{answer}" for prompt, answer in texts[1:])
        prompt_ids, response_ids = tokenizer([first, solution + rest], add_special_tokens=False)[
            "input_ids"
        ]
        yield prompt_ids, response_ids


def make_actor(out: Path) -> None:
    folder = ensure_demo_actor()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    model.config.max_position_embeddings = POSITIONS
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98))
    texts = long_texts(tokenizer, seed=1)
    torch.manual_seed(0)
    for step in range(STEPS):
        rate = min(1.0, (step + 1) / 20) * 0.5 * (1 + math.cos(math.pi * step / STEPS))
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * rate
        losses = []
        for _ in range(ROWS):
            prompt, response = next(texts)
            ids_BT = torch.tensor([[*prompt, *response]])
            hidden_BTD = model.model(input_ids=ids_BT[:, :-1], use_cache=False).last_hidden_state
            logits_TV = model.lm_head(hidden_BTD[0, len(prompt) - 1 :])
            loss = F.cross_entropy(logits_TV, ids_BT[0, len(prompt) :])
            (loss / ROWS).backward()
            losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 10 == 0 or step == STEPS - 1:
            sys.stdout.write(f"step {step}: {fmean(losses):.3f} nats, {len(response)} tokens\n")
            sys.stdout.flush()
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def run_ppo(model: str, out: Path, overrides: list[str]) -> int:
    paths = [f"model.path={Path(model).resolve()}", f"out={out.resolve()}"]
    settings = [*paths, "model.critic_path=null", "name=long-text"]
    call = "from medusa_ppo.cli import main; main()"
    words = ["ppo", "--config", str(ROOT / "configs" / "demo.yaml"), *settings, *PPO, *overrides]
    command = [sys.executable, "-c", call, *words]
    # The reward is a function of this file, which the run imports from its working directory.
    return subprocess.run(command, cwd=ROOT, check=False).returncode


def quarter(batch: RolloutBatch, number: int) -> RolloutBatch:
    """This quarter of each response; what stood before it is text to search."""
    assert batch.before_ids_X is not None and batch.before_S is not None, "texts are known"
    rows, before, lengths = [], [], []
    start = at = 0
    for length, known in zip(batch.lengths_S.tolist(), batch.before_S.tolist(), strict=True):
        first, last = (length * part // QUARTERS for part in (number, number + 1))
        rows.append(torch.arange(start + first, start + last))
        earlier = batch.response_ids_M[start : start + first].to(torch.int32)
        before.append(torch.cat([batch.before_ids_X[at : at + known], earlier]))
        lengths.append(last - first)
        start, at = start + length, at + known
    rows_N = torch.cat(rows)
    return replace(
        batch,
        hidden_MD=batch.hidden_MD[rows_N],
        response_ids_M=batch.response_ids_M[rows_N],
        logprobs_M=batch.logprobs_M[rows_N],
        lengths_S=torch.tensor(lengths),
        before_ids_X=torch.cat(before),
        before_S=torch.tensor([len(ids) for ids in before]),
    )


def places(model: str, heads_path: str, count: int, seed: int) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    asked = [row["prompt"] for row in demo_rows("eval", 0, count)]
    prompts = [tuple(ids) for ids in tokenizer(asked, add_special_tokens=False)["input_ids"]]
    config = engine_config(prompts, NEW_TOKENS)
    with running_engine(model, "", config, seed) as engine:
        rollouts = engine.generate(prompts, Sampling(1.0, max_new_tokens=NEW_TOKENS, seed=seed))
    actor = load_actor(model)
    heads = load_heads(Path(heads_path))[0]
    tables: dict[str, Any] = {"embedding_VD": embedding_weight(actor).detach().float()}
    lm_head_VD = lm_head_weight(actor).detach().float()
    batch = read_all(HiddenReader(actor, 1.0), samples_of([rollouts]), lambda *_: None)
    lengths = sorted(batch.lengths_S.tolist())
    sys.stdout.write(
        f"{len(lengths)} responses of {lengths[0]} to {lengths[-1]} tokens (median"
        f" {lengths[len(lengths) // 2]}), {-float(batch.logprobs_M.mean()):.3f} nats a token\n"
    )
    found = []
    for number in range(QUARTERS):
        part = quarter(batch, number)
        found.append(replay(heads, part, lm_head_VD, served=Served(1.0), **tables))
        nats = -float(part.logprobs_M.mean())
        sys.stdout.write(
            f"quarter {number + 1}: {found[-1].mean_acceptance_length:.3f} tokens a step,"
            f" {nats:.3f} nats\n"
        )
    apart = paired_difference(found[-1], found[0])
    sys.stdout.write(
        f"last over first: {apart.value:+.3f} ({apart.low:+.3f} to {apart.high:+.3f})\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    actor = commands.add_parser("actor")
    actor.add_argument("out", type=Path)
    ppo = commands.add_parser("ppo")
    ppo.add_argument("--model", required=True)
    ppo.add_argument("--out", type=Path, required=True)
    ppo.add_argument("overrides", nargs="*")
    by_place = commands.add_parser("places")
    by_place.add_argument("--model", required=True)
    by_place.add_argument("--heads", required=True)
    by_place.add_argument("--prompts", type=int, default=48)
    by_place.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.command == "actor":
        make_actor(options.out)
    elif options.command == "ppo":
        sys.exit(run_ppo(options.model, options.out, options.overrides))
    else:
        places(options.model, options.heads, options.prompts, options.seed)


if __name__ == "__main__":
    main()
