"""Compares the cost of one drafting call between two forms of the heads, in turns.

    python benchmarks/drafting_turns.py --model actors/gsm8k-4m [--dtype bfloat16] [--rounds 40]
        [--forms copying@512,plain copying@8192,copying@512 ...] [--other CHECKOUT] [--json FILE]

A form is a name in `FORMS` followed by an @ and the number of tokens of text per request. With
--other the second form of each pair is drawn by another checkout's code, so
`copying@512,copying@512` compares two commits. Each form runs in its own process; in every round
both of a pair time the same number of calls, in turns. The output is the median of the ratios
within a round, for several numbers of requests.

A call starts like in an engine that has just received two tokens of each request: they are written
to the rings of pairs and of text, the tokens that may be copied are looked up, four drafts are
drawn, and their q is kept for verification. The products are the engine's own (oneDNN, packed).

Shape letters: B requests, N tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

HEADS = 4
CALLS = 20
BATCHES = (1, 4, 16, 64)
FORMS: dict[str, dict[str, int]] = {
    "alone": {"context": 0},
    "bare": {"feed_forward": 0, "cell": 1, "copy_parts": 0},
    "plain": {"copy_parts": 0},
    "copying": {},
    "two-layers": {"context_layers": 2},
}
"""Differences from a run's default heads. `bare` are those of 0.3.0."""
PAIRS = ("copying@512,plain@512", "copying@8192,copying@512", "two-layers@512,copying@512")
NEW_TOKENS = 2
"""Tokens of each request that arrived since the previous call."""


# ---- in a form's own process


class Call:
    """A drafting call as the engine makes it, on random heads and states."""

    def __init__(self, form: str, tokens: int, model: dict[str, Any], dtype_name: str) -> None:
        import torch
        from torch.nn import functional as F

        from heads.heads_config import COPY_WINDOW
        from heads.modules import MedusaHeads
        from medusa_ppo.config.run_config import HeadsSection
        from medusa_ppo.drafting.context import ContextHeads, PairRing
        from medusa_ppo.drafting.core import DraftingCore
        from medusa_ppo.drafting.slots import DraftSlots
        from medusa_ppo.drafting.texts import TextRing
        from medusa_ppo.vllm_plugin.int8_products import packed_linear

        self.torch = torch
        torch.manual_seed(0)
        dtype = getattr(torch, dtype_name)
        vocab = model["vocab_size"]
        hidden = model["hidden_size"]
        section = HeadsSection(num_heads=HEADS, **FORMS[form])
        heads = MedusaHeads(section.sizes(hidden, vocab))
        with torch.no_grad():
            for parameter in heads.parameters():
                parameter.normal_(std=0.05)
        heads = heads.to(dtype).requires_grad_(False)
        lm_head = packed_linear((torch.randn(vocab, hidden) * 0.05).to(dtype))
        table_VD = torch.randn(vocab, hidden).to(dtype)
        self.core = DraftingCore(
            heads, lm_head, lambda ids: F.embedding(ids, table_VD), packed_linear
        )
        self.hidden = hidden
        self.dtype = dtype
        self.tokens = tokens
        most = max(BATCHES)
        cpu = torch.device("cpu")
        self.slots = DraftSlots(most, HEADS, vocab, cpu)
        self.pairs = self.texts = None
        fused = self.core.fused
        if isinstance(fused, ContextHeads):
            self.pairs = PairRing(most, heads.config.context, fused.kept_width, fused.dtype, cpu)
        if heads.config.copies:
            parts = heads.config.copy_parts
            width = heads.config.copy_width // parts
            self.texts = TextRing(most, COPY_WINDOW, parts, width, dtype, cpu)
            kept = min(tokens, COPY_WINDOW)
            positions_N = torch.arange(tokens - kept, tokens)
            for request in range(most):
                ids_N = torch.randint(vocab, (kept,))
                self.core.copier.write(
                    self.texts, torch.full_like(positions_N, request), positions_N, ids_N
                )

    def __call__(self, hidden_BD: Any) -> None:
        from medusa_ppo.drafting.context import Arrived, ContextHeads, Standing
        from medusa_ppo.drafting.core import DraftSampling
        from medusa_ppo.drafting.noise import DRAFT_STREAM, uniforms
        from medusa_ppo.drafting.slots import stamps

        torch = self.torch
        batch = len(hidden_BD)
        requests_B = torch.arange(batch)
        positions_B = torch.full((batch,), self.tokens)
        request_N = requests_B.repeat_interleave(NEW_TOKENS)
        back_N = torch.arange(NEW_TOKENS - 1, -1, -1).repeat(batch)
        ids_N = torch.ones_like(request_N)
        seen = None
        if isinstance(self.core.fused, ContextHeads):
            at = Standing(requests_B, requests_B, positions_B)
            arrived = Arrived(
                hidden_BD[request_N],
                ids_N,
                request_N,
                request_N,
                positions_B[request_N] - back_N,
                NEW_TOKENS * requests_B + NEW_TOKENS - 1,
            )
            seen = self.core.fused.look_back(self.pairs, arrived, at)
            if self.texts is not None:
                self.core.copier.write(
                    self.texts, request_N, positions_B[request_N] - back_N, ids_N
                )
                longest = self.tokens + 1
                told = self.core.copier.find(self.texts, requests_B, positions_B, longest)
                seen = replace(seen, told_BKH=told)
        noise_BK = uniforms(positions_B, None, None, DRAFT_STREAM, HEADS)
        sampling = DraftSampling(torch.ones(batch), noise_BK)
        self.core.draft(hidden_BD, ids_N[:batch], HEADS, sampling, seen=seen, slots=self.slots)
        self.slots.stamp(requests_B, stamps(positions_B, positions_B), HEADS)


def work(form: str, model: dict[str, Any], dtype_name: str, threads: int) -> None:
    """Answer each line (a number of requests) with the seconds of one call."""
    import torch

    torch.set_num_threads(threads)
    name, _, tokens = form.partition("@")
    call = Call(name, int(tokens or 512), model, dtype_name)
    with torch.inference_mode():
        for line in sys.stdin:
            hidden_BD = torch.randn(int(line), call.hidden).to(call.dtype)
            # Once before timing: products are packed on first use.
            call(hidden_BD)
            seconds = []
            for _ in range(CALLS):
                began = time.perf_counter()
                call(hidden_BD)
                seconds.append(time.perf_counter() - began)
            sys.stdout.write(json.dumps(statistics.median(seconds)) + "\n")
            sys.stdout.flush()


# ---- the comparison


class FormProcess:
    """A process that draws drafts with heads of one form."""

    def __init__(self, form: str, options: argparse.Namespace, dtype: str, checkout: Path) -> None:
        script = checkout / "benchmarks" / Path(__file__).name
        command = [sys.executable, str(script), "--form", form, "--model", options.model]
        command += ["--dtype", dtype, "--threads", str(options.threads)]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # Otherwise the process would import the installed package.
            env=os.environ | {"PYTHONPATH": str(checkout)},
        )

    def seconds(self, batch: int) -> float:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{batch}\n")
        self.process.stdin.flush()
        while line := self.process.stdout.readline():
            try:
                return float(json.loads(line))
            except ValueError:
                # vLLM greets on stdout.
                continue
        raise RuntimeError("The process that draws drafts has ended; its last words are above.")

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def compare(pair: str, options: argparse.Namespace, dtype: str) -> list[dict[str, Any]]:
    """Rows for every number of requests: the first form's time over the second's."""
    forms = pair.split(",")
    here = Path(__file__).resolve().parent.parent
    checkouts = (here, (options.other or here).resolve())
    processes = [
        FormProcess(form, options, dtype, checkout)
        for form, checkout in zip(forms, checkouts, strict=True)
    ]
    rows = []
    try:
        for batch in BATCHES:
            ratios = []
            seconds: list[list[float]] = [[], []]
            for number in range(-2, options.rounds):
                # Each is first as often as last: a machine that slows down would favour one.
                order = (0, 1) if number % 2 else (1, 0)
                took = {index: processes[index].seconds(batch) for index in order}
                # The first rounds warm up.
                if number < 0:
                    continue
                ratios.append(took[0] / took[1])
                for index in order:
                    seconds[index].append(took[index])
            row = {
                "forms": forms,
                "dtype": dtype,
                "requests": batch,
                "ratio": round(statistics.median(ratios), 3),
                "range": [round(min(ratios), 3), round(max(ratios), 3)],
                "microseconds": [round(1e6 * statistics.median(each)) for each in seconds],
            }
            sys.stdout.write(json.dumps(row) + "\n")
            sys.stdout.flush()
            rows.append(row)
    finally:
        for process in processes:
            process.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="Folder of the actor whose sizes count.")
    parser.add_argument("--forms", nargs="+", default=PAIRS, metavar="A@TOKENS,B@TOKENS")
    parser.add_argument("--dtype", default="", help="Default: bfloat16, then float32.")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json")
    parser.add_argument("--other", type=Path, help="Checkout that draws the second forms.")
    parser.add_argument("--form", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.form:
        model = json.loads((Path(options.model) / "config.json").read_text())
        work(options.form, model, options.dtype, options.threads)
        return
    rows = [
        row
        for dtype in ([options.dtype] if options.dtype else ["bfloat16", "float32"])
        for pair in options.forms
        for row in compare(pair, options, dtype)
    ]
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
