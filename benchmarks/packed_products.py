"""What one packed product of the heads costs a CPU core by dtype: 8 bits, bfloat16 and float32, in
microseconds of processor time.

    python benchmarks/packed_products.py [--into 256] [--out 2048]

The output is the lower quartile of 60 calls, including the quantisation of the rows, and the error
against float64 (root mean square, relative to the results' standard deviation).
"""

from __future__ import annotations

import argparse
import json
import sys
import time

import torch

from medusa_ppo.vllm_plugin.int8_products import onednn_product, packed_linear

CALLS = 60
WARM = 5


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--into", type=int, default=256)
    parser.add_argument("--out", type=int, default=2048)
    options = parser.parse_args()
    # The clock below counts only this thread.
    torch.set_num_threads(1)
    torch.manual_seed(0)
    weight = (torch.randn(options.out, options.into) * 0.05).bfloat16()
    products = {
        "8 bits": packed_linear(weight),
        "bfloat16": onednn_product(weight),
        "float32": onednn_product(weight.float()),
    }
    with torch.inference_mode():
        for count in (1, 4, 16, 64):
            rows_ND = torch.randn(count, options.into).bfloat16()
            exact_NW = rows_ND.double() @ weight.double().T
            row: dict[str, object] = {"rows": count}
            for name, product in products.items():
                took = []
                for _ in range(WARM + CALLS):
                    # This thread's processor time, without other programs on the machine.
                    began = time.thread_time_ns()
                    result_NW = product(rows_ND)
                    took.append(time.thread_time_ns() - began)
                apart = (result_NW.double() - exact_NW).square().mean().sqrt() / exact_NW.std()
                row[name] = {
                    # The lower quartile: interruptions only ever add time, and the minimum is a
                    # lucky call.
                    "us": round(sorted(took[WARM:])[CALLS // 4] / 1e3),
                    "apart": round(float(apart), 4),
                }
            sys.stdout.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
