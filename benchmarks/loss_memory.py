"""Peak memory of the heads' loss against the naive form (full logits of all heads), forward and
backward, each in a process of its own.

    python benchmarks/loss_memory.py --tokens 1024,2048,4096 --naive-tokens 1024

Hidden size, vocabulary and K are those of a mid-sized model (--hidden 1024 --vocab 131072 --heads
4). The peak is what the process's memory rises by over what it holds when the loss begins (features
of all heads and lm_head are there): on a CPU the kernel's high-water mark, on a GPU (--device cuda)
the allocator's. Both forms return the gradient of the features, K x D numbers a token; what a form
needs beside that is its work space, and that of the chunked loss should not depend on the number of
tokens.

The naive form's memory grows with the tokens, so where the machine can't hold it, it is measured at
fewer; ratios are always between figures at the same number of tokens.

Shape letters: N tokens, K heads, D hidden, V vocabulary.
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

from heads.factored import FactoredLogits
from heads.losses import LossConfig, head_loss

logger = logging.getLogger("loss_memory")

FORMS = ("chunked", "naive")


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    options = parse()
    if options.form:
        sys.stdout.write(json.dumps({"peak_mib": measure(options)}) + "\n")
        return
    peaks: dict[str, dict[int, float]] = {"chunked": {}, "naive": {}}
    work: dict[int, float] = {}
    for form, tokens in (("chunked", options.tokens), ("naive", options.naive_tokens)):
        for count in tokens:
            peaks[form][count] = in_own_process(options, form, count)
            beside = peaks[form][count] - count * options.heads * options.hidden * 4 / 2**20
            logger.info(
                "%-8s %6d tokens   %8.0f MiB, %.0f of it work space",
                form,
                count,
                peaks[form][count],
                beside,
            )
            if form == "chunked":
                work[count] = beside
    ratios = {
        count: peaks["chunked"][count] / naive
        for count, naive in peaks["naive"].items()
        if count in peaks["chunked"]
    }
    for count, ratio in ratios.items():
        logger.info("At %d tokens the loss takes %.3f of the naive form's memory.", count, ratio)
    if options.json:
        record = {
            "hidden": options.hidden,
            "vocab": options.vocab,
            "heads": options.heads,
            "device": options.device,
        }
        options.json.write_text(
            json.dumps(
                {**record, "peak_mib": peaks, "work_space_mib": work, "ratios": ratios}, indent=1
            )
            + "\n"
        )


def in_own_process(options: argparse.Namespace, form: str, tokens: int) -> float:
    """MiB. A process of its own, because a high-water mark never falls."""
    sizes = [
        f"--{name}={getattr(options, name)}" for name in ("hidden", "vocab", "heads", "device")
    ]
    command = [sys.executable, __file__, f"--form={form}", f"--tokens={tokens}", *sizes]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{form} at {tokens} tokens failed:\n{done.stderr[-2000:]}")
    return float(json.loads(done.stdout.splitlines()[-1])["peak_mib"])


def measure(options: argparse.Namespace) -> float:
    """Peak of one forward and backward pass of the loss, in MiB over what stood before."""
    torch.manual_seed(0)
    device, (tokens,) = torch.device(options.device), options.tokens
    lm_head_VD = torch.empty(options.vocab, options.hidden, device=device).normal_(
        std=options.hidden**-0.5
    )
    features_NKD = torch.randn(tokens, options.heads, options.hidden, device=device)
    targets_NK = torch.randint(options.vocab, (tokens, options.heads), device=device)
    form = chunked if options.form == "chunked" else naive
    form(
        features_NKD[:8].clone(), lm_head_VD, targets_NK[:8]
    )  # Libraries allocate their own on first use.
    before = begin(device)
    form(features_NKD, lm_head_VD, targets_NK)
    return peak_mib(device) - before


def chunked(features_NKD: torch.Tensor, lm_head_VD: torch.Tensor, targets_NK: torch.Tensor) -> None:
    mask_NK = torch.ones_like(targets_NK, dtype=torch.bool)
    head_loss(
        FactoredLogits(features_NKD.requires_grad_(), lm_head_VD), targets_NK, mask_NK, LossConfig()
    ).sum().backward()


def naive(features_NKD: torch.Tensor, lm_head_VD: torch.Tensor, targets_NK: torch.Tensor) -> None:
    logits_NKV = F.linear(features_NKD.requires_grad_(), lm_head_VD)
    F.cross_entropy(logits_NKV.flatten(0, 1), targets_NK.flatten()).backward()


def begin(device: torch.device) -> float:
    """MiB held now, from where the high-water mark begins anew."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated() / 2**20
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    return peak_mib(device)


def peak_mib(device: torch.device) -> float:
    """High-water mark."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() / 2**20
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tokens", type=counts, default=(1024, 2048, 4096), help="numbers of tokens for the loss"
    )
    parser.add_argument(
        "--naive-tokens", type=counts, default=(1024,), help="numbers of tokens for the naive form"
    )
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--vocab", type=int, default=131_072)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--form", choices=FORMS, help=argparse.SUPPRESS)
    return parser.parse_args()


def counts(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(","))


if __name__ == "__main__":
    main()
