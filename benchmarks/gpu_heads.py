"""Speed and memory of head training at the size of a large model: share of the matrix rate measured
in the same run, and peak memory.

    python benchmarks/gpu_heads.py --json gpu_heads.json      # D = 4096, V = 128,000, K = 4, bfloat16, on CUDA
    python benchmarks/gpu_heads.py --device cpu --small       # tiny sizes, to see that it runs

Needs torch only, and nothing of ours but `heads`. One step is features, cross-entropy, backward
pass and AdamW on `--rows` positions. The matrix rate is that of one large square product of the
same dtype; steps and products are timed in turn, and a share is the median over rounds of the two's
ratio. Arithmetic of a step, per row and head: 4 D V for the frozen lm_head (logits, and the
gradient of the features), 4 D D for the first residual layer (its input wants no gradient), 6 D D
for further ones; nothing else is counted, so that what the loss does beside its products shows as a
lower share. Peak memory is beside what stood before the step: heads, AdamW's moments, lm_head and
hidden states. On a CPU it is the process's high-water mark, so forms after the first show only what
they need more.

Letters: N rows, K heads, D hidden, V vocabulary, L residual layers.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import logging
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from heads.factored import FactoredLogits
from heads.heads_config import HeadsConfig
from heads.losses import LossConfig, fused_cross_entropy, head_loss, liger_installed
from heads.modules import MedusaHeads
from heads.vocabulary import WHOLE

logger = logging.getLogger("gpu_heads")

FULL = {"hidden": 4096, "vocab": 128_000, "heads": 4, "rows": 4096, "matrix": 8192, "rounds": 10}
SMALL = {"hidden": 32, "vocab": 512, "heads": 2, "rows": 64, "matrix": 128, "rounds": 2}
LOSSES = ("ce", "ce_tv")
CHUNKS, LIGER = "chunks", "liger"
WARM_UP = 2


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    options = parse()
    device = torch.device(options.device)
    dtype = getattr(torch, options.dtype)
    record: dict[str, Any] = {
        "hardware": hardware(device),
        "versions": versions(),
        "options": plain(options),
        "results": [],
    }
    logger.info("%s; %s", record["hardware"], record["versions"])
    case = Case(options, device, dtype)
    for form in forms(options, device):
        for loss in LOSSES if form == CHUNKS else LOSSES[:1]:
            result = measure(case, form, loss, options.rounds)
            record["results"].append(result)
            logger.info("%s", json.dumps(result))
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


class Case:
    """Heads, their optimizer and one batch, in memory as in training."""

    def __init__(
        self, options: argparse.Namespace, device: torch.device, dtype: torch.dtype
    ) -> None:
        torch.manual_seed(0)
        self.config = HeadsConfig(
            options.hidden, options.vocab, options.heads, num_layers=options.layers
        )
        self.device = device
        self.rows = options.rows
        self.chunk_rows = options.chunk_rows or None
        with torch.device(device):
            self.heads = MedusaHeads(self.config).to(dtype)
            self.lm_head_VD = torch.empty(options.vocab, options.hidden, dtype=dtype).normal_(
                std=options.hidden**-0.5
            )
            self.hidden_ND = torch.randn(options.rows, options.hidden, dtype=dtype)
            self.targets_NK = torch.randint(options.vocab, (options.rows, options.heads))
            self.mask_NK = torch.ones_like(self.targets_NK, dtype=torch.bool)
            self.logprobs_NK = torch.full(self.targets_NK.shape, -1.0)
            self.left_MM = torch.randn(options.matrix, options.matrix, dtype=dtype)
            self.right_MM = torch.randn(options.matrix, options.matrix, dtype=dtype)
        self.optimizer = torch.optim.AdamW(
            self.heads.parameters(), lr=1e-4, fused=device.type == "cuda"
        )

    def flops(self) -> float:
        """Products of one step; see the file's first lines."""
        config = self.config
        per_head = (
            4 * config.hidden_size * config.vocab_size
            + (6 * config.num_layers - 2) * config.hidden_size**2
        )
        return float(self.rows * config.num_heads * per_head)

    def step(self, form: str, loss: str) -> None:
        factored = self.heads.factored(self.hidden_ND, self.lm_head_VD)
        self.loss(form, loss, factored).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def loss(self, form: str, loss: str, factored: FactoredLogits) -> torch.Tensor:
        if form == CHUNKS:
            rows = self.chunk_rows or WHOLE.chunk_rows(self.lm_head_VD)
            config = LossConfig.named(loss)
            return head_loss(
                factored,
                self.targets_NK,
                self.mask_NK,
                config,
                logprobs_NK=self.logprobs_NK,
                chunk_rows=rows,
            )
        return fused_cross_entropy(factored, self.targets_NK, self.mask_NK)

    def product(self) -> None:
        torch.mm(self.left_MM, self.right_MM)


def measure(case: Case, form: str, loss: str, rounds: int) -> dict[str, Any]:
    """Steps and products in turn; medians, and the smallest and largest share of a round."""
    for _ in range(WARM_UP):
        case.step(form, loss)
        case.product()
    before = begin(case.device)
    case.step(form, loss)
    peak = peak_mib(case.device) - before
    product_flops = 2.0 * case.left_MM.shape[0] ** 3
    step_s = []
    product_s = []
    for _ in range(rounds):
        product_s.append(seconds(case.device, case.product))
        step_s.append(seconds(case.device, lambda: case.step(form, loss)))
    shares = [
        case.flops() / step / (product_flops / product)
        for step, product in zip(step_s, product_s, strict=True)
    ]
    step = statistics.median(step_s)
    return {
        "form": form,
        "loss": loss,
        "step_s": step,
        "rows_per_s": case.rows / step,
        "tflops": case.flops() / step / 1e12,
        "matrix_tflops": product_flops / statistics.median(product_s) / 1e12,
        "share_of_matrix_rate": statistics.median(shares),
        "share_range": [min(shares), max(shares)],
        "peak_mib": peak,
        "held_mib": before,
        "full_logits_mib": (
            case.rows
            * case.config.num_heads
            * case.config.vocab_size
            * case.lm_head_VD.element_size()
            / 2**20
        ),
    }


def forms(options: argparse.Namespace, device: torch.device) -> list[str]:
    """Those that were asked for; Liger's only where it can run."""
    able = {LIGER: device.type == "cuda" and liger_installed()}
    return [form for form in options.forms.split(",") if able.get(form, True)]


def seconds(device: torch.device, call: Callable[[], None]) -> float:
    synchronize(device)
    began = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - began


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def begin(device: torch.device) -> float:
    """MiB held now, from where the peak begins anew."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device) / 2**20
    return peak_mib(device)


def peak_mib(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def hardware(device: torch.device) -> str:
    if device.type != "cuda":
        return f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    properties = torch.cuda.get_device_properties(device)
    return (
        f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB,"
        f" {properties.multi_processor_count} SMs"
    )


def versions() -> dict[str, str]:
    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
    }
    for package in ("triton", "liger_kernel"):
        if importlib.util.find_spec(package) is not None:
            found[package] = importlib.metadata.version(package)
    return found


def plain(options: argparse.Namespace) -> dict[str, Any]:
    return {
        name: str(value) if isinstance(value, Path) else value
        for name, value in vars(options).items()
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value in FULL.items():
        parser.add_argument(f"--{name}", type=int, help=f"default {value:,}")
    parser.add_argument("--layers", type=int, default=1, help="residual layers of a head")
    parser.add_argument(
        "--chunk-rows", type=int, default=0, help="rows of one of our chunks; 0: as in training"
    )
    parser.add_argument(
        "--forms",
        default="chunks,liger",
        help="who computes cross-entropy; liger only where it is installed",
    )
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--device", default="cuda", help="cuda or cpu")
    parser.add_argument("--small", action="store_true", help="tiny sizes")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    for name, value in (SMALL if options.small else FULL).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device; --device cpu --small shows that it runs")
    return options


if __name__ == "__main__":
    main()
