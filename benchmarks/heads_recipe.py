"""The heads recipe: heads of any kind and loss on an actor's own samples, judged by the replay
estimate. transformers only, no engine.

    python benchmarks/heads_recipe.py --actor ../shared/actors/gsm8k-4m --data
    ../shared/data/gsm8k/train.jsonl \
        --tokens 100000 --kind hydra --loss ce_tv

The first run samples rollouts and keeps them in --cache; later runs with the same actor and seed
read them (more tokens: only the missing ones are sampled). Each run adds one JSON line to
--results: settings, mean acceptance length one-hot and at each draft temperature, the 95 %
interval, seconds.

Measured with a prototype of this script (hydra, K = 4, gsm8k-4m, 91,944 positions, 473 held-out
rollouts, one gradient clip for all heads): ce_tv 1.593 one-hot and 1.927 sampled (draft temperature
1.0); tv 1.557 and 1.889 (1.0). One epoch of kl: 1.534 and 1.786 (0.8).

Held-out prompts are the last --holdout rows of the data; they are never trained on.

Shape letters: N rows of a step, M rows of all rollouts, S rollouts, B prompts of a batch, T tokens,
K heads, D hidden, V vocabulary.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from heads.acceptance import (
    draft_ids_for_rows,
    draft_logprobs_for_rows,
    replay_estimate,
    replay_sampled,
)
from heads.checkpoint import load_state, save_heads, save_state
from heads.heads_config import KINDS, LM_HEADS, HeadsConfig
from heads.losses import NAMED_LOSSES, LossConfig, Teacher, head_loss
from heads.modules import MedusaHeads, clip_per_head
from heads.targets import (
    condition_ids,
    head_logprobs,
    head_targets,
    head_teacher_rows,
    segments_from_lengths,
)
from medusa_ppo.actors.hf import (
    HiddenTap,
    embedding_weight,
    lm_head_weight,
    load_actor,
    load_tokenizer,
)

logger = logging.getLogger("heads_recipe")

PROMPTS_PER_FILE = 512
BATCH = 128
DRAFT_TEMPERATURES = (0.6, 0.7, 0.8, 0.9, 1.0, 1.1)
WARM_UP_OF_THE_STEP_SIZE = 20


@dataclass(frozen=True)
class Rollouts:
    """On-policy rollouts in packed response coordinates, and what the heads read and predict at
    each row.
    """

    hidden_MD: torch.Tensor
    response_M: torch.Tensor
    logprobs_M: torch.Tensor
    lengths_S: torch.Tensor
    targets_MK: torch.Tensor
    mask_MK: torch.Tensor
    condition_MK: torch.Tensor
    logprobs_MK: torch.Tensor
    teacher_MK: torch.Tensor

    @classmethod
    def build(cls, parts: list[dict[str, torch.Tensor]], heads: int, tokens: int = 0) -> Rollouts:
        """Join files; with `tokens`, keep whole rollouts up to that many positions."""
        whole = {
            name: torch.cat([part[name] for part in parts])
            for name in ("hidden", "response", "logprobs", "lengths")
        }
        lengths_S = whole["lengths"]
        if tokens:
            lengths_S = lengths_S[: int((lengths_S.cumsum(0) <= tokens).sum())]
        rows = int(lengths_S.sum())
        hidden_MD = whole["hidden"][:rows]
        response_M = whole["response"][:rows]
        logprobs_M = whole["logprobs"][:rows]
        segment_M = segments_from_lengths(lengths_S)
        targets_MK, mask_MK = head_targets(response_M, segment_M, heads)
        condition_MK = condition_ids(response_M, segment_M, heads)
        teacher_MK = head_teacher_rows(segment_M, heads)
        logprobs_MK = head_logprobs(logprobs_M, segment_M, heads)
        return cls(
            hidden_MD,
            response_M,
            logprobs_M,
            lengths_S,
            targets_MK,
            mask_MK,
            condition_MK,
            logprobs_MK,
            teacher_MK,
        )


@torch.no_grad()
def sample(
    model: PreTrainedModel, prompts: list[list[int]], max_new_tokens: int, end: int
) -> dict[str, torch.Tensor]:
    """One response to each prompt at temperature 1, with the states and log-probs of one more
    forward pass, as PPO has them.
    """
    out: dict[str, list[Any]] = {"hidden": [], "response": [], "logprobs": [], "lengths": []}
    order = sorted(prompts, key=len)
    for start in range(0, len(order), BATCH):
        group = order[start : start + BATCH]
        width = max(map(len, group))
        ids_BT = torch.tensor([[end] * (width - len(p)) + p for p in group])
        mask_BT = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in group])
        full_BT = model.generate(
            ids_BT, attention_mask=mask_BT, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
            max_new_tokens=max_new_tokens, pad_token_id=end, eos_token_id=end,
        )  # fmt: skip
        response_BT = full_BT[:, width:]
        mask_BT = torch.cat([mask_BT, torch.ones_like(response_BT)], dim=1)
        with HiddenTap(model) as tap:
            logits_BTV = model(
                full_BT, attention_mask=mask_BT, position_ids=(mask_BT.cumsum(1) - 1).clamp(min=0)
            ).logits
        for row in range(len(group)):
            ended = (response_BT[row] == end).nonzero()
            length = int(ended[0]) + 1 if ended.numel() else response_BT.shape[1]
            places = slice(width - 1, width - 1 + length)
            tokens_T = response_BT[row, :length]
            logp_TV = logits_BTV[row, places].float().log_softmax(-1)
            out["hidden"].append(tap.hidden_BTD[row, places].float())
            out["response"].append(tokens_T)
            out["logprobs"].append(logp_TV.gather(1, tokens_T.unsqueeze(1)).squeeze(1))
            out["lengths"].append(length)
        logger.info("sampled %d of %d responses", start + len(group), len(order))
    joined = {name: torch.cat(out[name]) for name in ("hidden", "response", "logprobs")}
    return {**joined, "lengths": torch.tensor(out["lengths"])}


def cached_rollouts(
    args: argparse.Namespace, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> tuple[Rollouts, Rollouts]:
    """Training and held-out rollouts, sampled where the cache lacks them."""
    rows = [json.loads(line) for line in args.data.read_text(encoding="utf-8").splitlines()]
    texts = [args.template.format(**row) for row in rows]
    end = model.config.eos_token_id
    prompts = [
        p
        for p in ([end, *tokenizer.encode(text, add_special_tokens=False)] for text in texts)
        if len(p) <= args.max_prompt_tokens
    ]
    train = prompts[: -args.holdout]
    held_out = prompts[-args.holdout :]

    def read(name: str, wanted: list[list[int]], seed: int) -> dict[str, torch.Tensor]:
        path = args.cache / f"{args.actor.name}-{args.max_new_tokens}-{name}-{seed}.safetensors"
        if not path.is_file():
            torch.manual_seed(seed)
            save_state(path, sample(model, wanted, args.max_new_tokens, end))
        return load_state(path)

    parts: list[dict[str, torch.Tensor]] = []
    while sum(int(part["lengths"].sum()) for part in parts) < args.tokens:
        first = len(parts) * PROMPTS_PER_FILE % len(train)
        parts.append(
            read(
                f"train{len(parts)}",
                train[first : first + PROMPTS_PER_FILE],
                args.seed + 1 + len(parts),
            )
        )
    holdout = Rollouts.build([read("holdout", held_out, args.seed)], args.num_heads)
    return Rollouts.build(parts, args.num_heads, args.tokens), holdout


def train(args: argparse.Namespace, data: Rollouts, tables: dict[str, torch.Tensor]) -> MedusaHeads:
    """AdamW, a cosine from --learning-rate to zero, each head's gradient clipped by itself."""
    torch.manual_seed(args.seed)
    config = LossConfig.named(args.loss, accept_until_fail=args.accept_until_fail)
    depth = data.targets_MK.shape[1]
    width = data.hidden_MD.shape[1]
    sizes = HeadsConfig(
        width,
        tables["lm_head_VD"].shape[0],
        depth,
        args.kind,
        args.num_layers,
        args.lm_head,
        args.rank,
    )
    heads = MedusaHeads(sizes)
    if args.lm_head == "own":
        heads.init_own_lm_heads(tables["lm_head_VD"])
    named = dict(heads.named_parameters())
    optimizer = torch.optim.AdamW(heads.parameters(), lr=args.learning_rate, weight_decay=0.0)
    usable_N = data.mask_MK[:, 0].nonzero().squeeze(1)
    total = args.epochs * math.ceil(usable_N.numel() / args.batch_positions)
    step = 0
    for epoch in range(args.epochs):
        for picks_N in usable_N[torch.randperm(usable_N.numel())].split(args.batch_positions):
            for group in optimizer.param_groups:
                group["lr"] = (
                    args.learning_rate
                    * min(1.0, (step + 1) / WARM_UP_OF_THE_STEP_SIZE)
                    * (1 + math.cos(math.pi * step / total))
                    / 2
                )
            factored = heads.factored(
                data.hidden_MD[picks_N],
                tables["lm_head_VD"],
                condition=data.condition_MK[picks_N],
                embedding_VD=tables["embedding_VD"],
            )
            loss_K = head_loss(
                factored,
                data.targets_MK[picks_N],
                data.mask_MK[picks_N],
                config.at(step),
                logprobs_NK=data.logprobs_MK[picks_N],
                teacher=Teacher(data.hidden_MD, data.teacher_MK[picks_N], tables["lm_head_VD"]),
            )
            optimizer.zero_grad()
            loss_K.sum().backward()
            clip_per_head(named, depth, args.clip_norm)
            optimizer.step()
            step += 1
            if step % 50 == 0:
                logger.info(
                    "epoch %d step %d/%d loss %s",
                    epoch,
                    step,
                    total,
                    [round(x, 3) for x in loss_K.tolist()],
                )
    return heads


def judge(
    heads: MedusaHeads, held_out: Rollouts, tables: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """Replay of the held-out rollouts: one-hot drafts, and sampled ones at each draft
    temperature.
    """
    where = {"condition_MK": held_out.condition_MK, "embedding_VD": tables["embedding_VD"]}
    ids_MK = draft_ids_for_rows(heads, held_out.hidden_MD, tables["lm_head_VD"], **where)
    one_hot = replay_estimate(ids_MK, held_out.response_M, held_out.lengths_S)
    logq_QMK = draft_logprobs_for_rows(
        heads,
        held_out.hidden_MD,
        held_out.targets_MK,
        tables["lm_head_VD"],
        temperatures=DRAFT_TEMPERATURES,
        **where,
    )
    sampled = {
        t: replay_sampled(q, held_out.logprobs_M, held_out.lengths_S)
        for t, q in zip(DRAFT_TEMPERATURES, logq_QMK, strict=True)
    }
    best = max(sampled, key=lambda t: sampled[t].mean_acceptance_length)
    interval = sampled[best].confidence_interval()
    return {
        "one_hot": one_hot.mean_acceptance_length,
        "sampled": {str(t): result.mean_acceptance_length for t, result in sampled.items()},
        "best_draft_temperature": best,
        "best": interval.value,
        "best_interval_95": [interval.low, interval.high],
        "best_acceptance_per_position": list(sampled[best].acceptance_per_position),
        "holdout_rollouts": held_out.lengths_S.numel(),
    }


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--actor", type=Path, required=True, help="folder of the actor")
    parser.add_argument(
        "--data", type=Path, required=True, help="JSONL file with the prompts' fields"
    )
    parser.add_argument("--template", default="Question: {question}\nAnswer:")
    parser.add_argument("--tokens", type=int, default=100_000, help="training positions")
    parser.add_argument("--holdout", type=int, default=400, help="held-out prompts")
    parser.add_argument("--kind", choices=KINDS, default="hydra")
    parser.add_argument("--loss", choices=list(NAMED_LOSSES), default="ce_tv")
    parser.add_argument("--lm-head", choices=LM_HEADS, default="shared")
    parser.add_argument("--accept-until-fail", type=float, default=None)
    for name, value in (
        ("num-heads", 4),
        ("num-layers", 1),
        ("rank", 64),
        ("epochs", 4),
        ("batch-positions", 512),
        ("seed", 0),
    ):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--max-prompt-tokens", type=int, default=256)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--clip-norm", type=float, default=1.0)
    parser.add_argument("--cache", type=Path, default=Path("runs/heads_recipe"))
    parser.add_argument("--results", type=Path, default=Path("runs/heads_recipe/results.jsonl"))
    parser.add_argument("--save", type=Path, default=None, help="write the heads here")
    return parser.parse_args(argv)


def main(argv: list[str]) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    args = parse(argv)
    model = load_actor(args.actor).eval()
    tokenizer = load_tokenizer(args.actor)
    tables = {
        "lm_head_VD": lm_head_weight(model).detach(),
        "embedding_VD": embedding_weight(model).detach(),
    }
    data, held_out = cached_rollouts(args, model, tokenizer)
    started = time.monotonic()
    heads = train(args, data, tables)
    seconds = time.monotonic() - started
    settings = {
        name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()
    }
    parameters = sum(parameter.numel() for parameter in heads.parameters())
    line = {
        **judge(heads, held_out, tables),
        "positions": data.response_M.numel(),
        "trainable": parameters,
        "train_s": seconds,
        "settings": settings,
    }
    args.results.parent.mkdir(parents=True, exist_ok=True)
    with args.results.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    sys.stdout.write(json.dumps(line, indent=2) + "\n")
    if args.save:
        save_heads(args.save, heads, lm_head_VD=tables["lm_head_VD"], metadata={"recipe": settings})


if __name__ == "__main__":
    main(sys.argv[1:])
