"""How many rows can a rule save that ends draft runs early (engine.stop_below), and what would it
have to know?

    python benchmarks/early_end.py --model ../shared/actors/gsm8k-4m --heads HEADS --data HELD.jsonl
    [--temperature 1] [--rows 12000]

Responses are sampled with transformers. At some of their positions a whole run is drawn from the
heads, and the actor reads it, so that for each draft the chance to be accepted is known exactly:
reach (all before it are accepted: products of min(1, p / q) of the tokens drawn) times alpha (sum
of min(p, q)). A rule ends a run before the first draft whose estimated chance is below a threshold;
rules differ in what they estimate it from, and are fitted on one half of the responses and judged
on the other:

    q              a small network: entropy and largest probabilities of q, shares of the drafts before (all that stop_below sees, and more)
    q and states   the same, with h_t and the head's own features beside: what heads could be trained to say of themselves
    p              the exact chance, which nobody has before verification

Printed: rows verified for each accepted draft, over that of full runs, where tokens a step are 2 %
(and 5 %) fewer than those of full runs, and what an oracle has that knows each outcome.

Shape letters: N runs, K drafts, V vocabulary, D hidden, F what a rule looks at.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from heads.checkpoint import load_heads
from heads.factored import head_logits
from heads.modules import Context, MedusaHeads
from heads.targets import context_rows
from medusa_ppo.actors.hf import embedding_weight, lm_head_weight, load_actor, load_tokenizer
from medusa_ppo.runtime.data import load_rows

TOPS = 8
LOSSES = (0.02, 0.05)
AT_ONCE = 64


@torch.no_grad()
def sample(
    model: PreTrainedModel, prompts: list[list[int]], temperature: float, new: int
) -> list[tuple[int, list[int]]]:
    """Prompt length and ids of one response to each."""
    found = []
    for start in range(0, len(prompts), AT_ONCE):
        part = prompts[start : start + AT_ONCE]
        width = max(map(len, part))
        ids_BT = torch.tensor([[0] * (width - len(ids)) + ids for ids in part])
        mask_BT = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in part])
        ways = {
            "do_sample": True,
            "temperature": temperature,
            "top_k": 0,
            "top_p": 1.0,
            "max_new_tokens": new,
        }
        out_BT = model.generate(input_ids=ids_BT, attention_mask=mask_BT, pad_token_id=0, **ways)
        for ids, row in zip(part, out_BT.tolist(), strict=True):
            response = row[width:]
            end = response.index(0) + 1 if 0 in response else len(response)
            found.append((len(ids), ids + response[:end]))
    return found


def read_run(
    model: PreTrainedModel,
    heads: MedusaHeads,
    first: int,
    ids: list[int],
    places: list[int],
    temperature: float,
    draw: torch.Generator,
) -> tuple[torch.Tensor, ...]:
    """Runs drawn after `places` tokens of the response: what q says before each draft `NKF`, states
    `NKD`, and the exact chances `NK` that a draft that is offered is accepted, given what was drawn
    before it.
    """
    lm_head_VD = lm_head_weight(model)
    table_VD = embedding_weight(model)
    K = heads.config.num_heads
    hidden_TD = model.base_model(input_ids=torch.tensor([ids])).last_hidden_state[0]
    hidden_MD = hidden_TD[first - 1 : -1]
    next_M = torch.tensor(ids[first:])
    rows_N = torch.tensor(places)
    context = Context.of(
        context_rows(torch.zeros(len(next_M), dtype=torch.long), heads.config.context)[rows_N],
        hidden_MD,
        next_M,
    )
    condition_NK = torch.zeros(len(places), K, dtype=torch.long)
    condition_NK[:, 0] = next_M[rows_N]
    drawn = []
    logq = []
    features = []
    shares_NK = torch.zeros(len(places), K)
    for k in range(K):
        factored = heads.factored(
            hidden_MD[rows_N],
            lm_head_VD,
            condition=condition_NK,
            embedding_VD=table_VD,
            context=context,
        )
        logq_NV = (
            head_logits(factored, k, slice(None)) / heads.temperatures_K[k] / temperature
        ).log_softmax(-1)
        token_N1 = torch.multinomial(logq_NV.exp(), 1, generator=draw)
        logq.append(logq_NV)
        features.append(factored.features_NKD[:, k])
        drawn.append(token_N1)
        shares_NK[:, k] = (logq_NV.gather(1, token_N1) - logq_NV.amax(1, keepdim=True)).squeeze(1)
        if k + 1 < K:
            condition_NK[:, k + 1] = token_N1.squeeze(1)
    logp_NKV = actor_says(model, ids, first, places, torch.cat(drawn, 1), temperature)
    logq_NKV = torch.stack(logq, 1)
    drawn_NK1 = torch.stack(drawn, 1)
    taken_NK = (logp_NKV - logq_NKV).gather(2, drawn_NK1).squeeze(2).clamp_max(0).exp()
    reach_NK = F.pad(taken_NK.cumprod(1)[:, :-1], (1, 0), value=1.0)
    chance_NK = reach_NK * torch.minimum(logp_NKV, logq_NKV).exp().sum(2)
    entropy_NK = -(logq_NKV.exp() * logq_NKV).sum(2)
    before_NKK = F.pad(shares_NK[:, :-1], (1, 0)).unsqueeze(1) * torch.ones(K, K).tril()
    place_NKK = torch.eye(K).expand(len(places), K, K)
    entropies_NKK = entropy_NK.unsqueeze(1) * torch.ones(K, K).tril()
    seen_NKF = torch.cat([logq_NKV.topk(TOPS, -1).values, entropies_NKK, before_NKK, place_NKK], -1)
    states_NKD2 = torch.cat(
        [hidden_MD[rows_N].unsqueeze(1).expand(-1, K, -1), torch.stack(features, 1)], -1
    )
    return seen_NKF, states_NKD2, chance_NK


def actor_says(
    model: PreTrainedModel,
    ids: list[int],
    first: int,
    places: list[int],
    drawn_NK: torch.Tensor,
    temperature: float,
) -> torch.Tensor:
    """log p of every token at each draft's place, the drafts before it read: `[N, K, V]`."""
    K = drawn_NK.shape[1]
    prefixes = [ids[: first + place + 1] for place in places]
    width = max(map(len, prefixes)) + K
    ids_NT = torch.zeros(len(places), width, dtype=torch.long)
    for n, prefix in enumerate(prefixes):  # Padded on the right: a causal model never looks there.
        ids_NT[n, : len(prefix)] = torch.tensor(prefix)
        ids_NT[n, len(prefix) : len(prefix) + K] = drawn_NK[n]
    hidden_NTD = model.base_model(input_ids=ids_NT).last_hidden_state
    at_NK = torch.tensor([len(prefix) - 1 for prefix in prefixes]).unsqueeze(1) + torch.arange(K)
    chosen_NKD = hidden_NTD.gather(1, at_NK.unsqueeze(-1).expand(-1, -1, hidden_NTD.shape[-1]))
    return (F.linear(chosen_NKD, lm_head_weight(model)) / temperature).log_softmax(-1)


def fitted(
    seen_NKF: torch.Tensor, chance_NK: torch.Tensor, fit_N: torch.Tensor, passes: int = 60
) -> torch.Tensor:
    """Chances that a small network estimates, fitted on some runs; the pass that is best on a tenth
    of them is kept.
    """
    torch.manual_seed(0)
    inputs_NF = seen_NKF.flatten(0, 1)
    wanted_N = chance_NK.flatten()
    rows_N = fit_N.repeat_interleave(chance_NK.shape[1]).nonzero().squeeze(1)
    inputs_NF = (inputs_NF - inputs_NF[rows_N].mean(0)) / inputs_NF[rows_N].std(0).clamp_min(1e-3)
    held_N = rows_N[: len(rows_N) // 10]
    rows_N = rows_N[len(rows_N) // 10 :]
    net = nn.Sequential(
        nn.Linear(inputs_NF.shape[1], 128),
        nn.SiLU(),
        nn.Dropout(0.2),
        nn.Linear(128, 64),
        nn.SiLU(),
        nn.Linear(64, 1),
    )
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.05)
    best = float("inf")
    answer_N = wanted_N
    for _ in range(passes):
        net.train()
        for part_N in rows_N[torch.randperm(len(rows_N))].split(512):
            optimizer.zero_grad()
            F.binary_cross_entropy_with_logits(
                net(inputs_NF[part_N]).squeeze(1), wanted_N[part_N]
            ).backward()
            optimizer.step()
        net.eval()
        with torch.no_grad():
            loss = float(
                F.binary_cross_entropy_with_logits(
                    net(inputs_NF[held_N]).squeeze(1), wanted_N[held_N]
                )
            )
            if loss < best:
                best = loss
                answer_N = net(inputs_NF).squeeze(1).sigmoid()
    return answer_N.view_as(chance_NK)


def rows_saved(estimate_NK: torch.Tensor, chance_NK: torch.Tensor, loss: float) -> float:
    """Rows for each accepted draft over those of full runs, at the threshold that loses so much of
    the tokens a step.
    """
    full = float(chance_NK.sum(1).mean())
    least = (1 + full) * (1 - loss) - 1
    low = 0.0
    high = 1.0
    for _ in range(30):
        middle = (low + high) / 2
        goes_NK = (estimate_NK >= middle).cumprod(1)
        low, high = (
            (middle, high) if float((goes_NK * chance_NK).sum(1).mean()) >= least else (low, middle)
        )
    goes_NK = (estimate_NK >= low).cumprod(1).float()
    rows = float(goes_NK.sum(1).mean())
    accepted = float((goes_NK * chance_NK).sum(1).mean())
    return (rows / accepted) / (chance_NK.shape[1] / full)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--heads", type=Path, required=True, help="with a context")
    parser.add_argument("--data", type=Path, required=True, help="rows with a question")
    parser.add_argument("--temperature", type=float, default=1.0)
    for name, value in {"rows": 12_000, "prompts": 512, "new": 96, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    model = load_actor(args.model).eval()
    tokenizer = load_tokenizer(args.model)
    heads = load_heads(args.heads)[0].eval()
    torch.manual_seed(args.seed)
    draw = torch.Generator().manual_seed(args.seed)
    questions = [row["question"] for row in load_rows(args.data, limit=args.prompts)]
    prompts = [
        tokenizer(f"<|endoftext|>Question: {question}\nAnswer:")["input_ids"]
        for question in questions
    ]
    K = heads.config.num_heads
    parts = []
    for number, (first, ids) in enumerate(sample(model, prompts, args.temperature, args.new)):
        most = len(ids) - first - 1
        if most < 1:
            continue
        places = torch.randperm(most, generator=draw)[: -(-args.rows // args.prompts)].tolist()
        with torch.no_grad():
            run = read_run(model, heads, first, ids, places, args.temperature, draw)
        parts.append((*run, torch.full((len(places),), number)))
    seen_NKF, states_NKD2, chance_NK, response_N = (
        torch.cat(part) for part in zip(*parts, strict=True)
    )
    fit_N = response_N % 2 == 0
    rules = {
        "q": fitted(seen_NKF, chance_NK, fit_N),
        "q and states": fitted(torch.cat([seen_NKF, states_NKD2], -1), chance_NK, fit_N),
        "p": chance_NK,
    }
    judged_NK = chance_NK[~fit_N]
    full = float(judged_NK.sum(1).mean())
    text = (
        f"{len(judged_NK)} runs of {K} at temperature {args.temperature}: {1 + full:.3f} tokens a"
        f" step, {K / full:.2f} rows an accepted"
    )
    sys.stdout.write(
        f"{text} draft; an oracle that knows each outcome has {full / K:.2f} of them\n"
    )
    sys.stdout.write("| rule knows | 2 % fewer tokens | 5 % |\n|---|---|---|\n")
    for name, estimate_NK in rules.items():
        cells = " | ".join(
            f"{rows_saved(estimate_NK[~fit_N], judged_NK, loss):.3f}" for loss in LOSSES
        )
        sys.stdout.write(f"| {name} | {cells} |\n")


if __name__ == "__main__":
    main()
