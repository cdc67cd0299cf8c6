"""What does an engine step cost on a GPU, by number of drafts and of running sequences, and what
does drafting gain there? Engines of their own, started side by side; then one at a time, in turns.

    python benchmarks/gpu_steps.py --shape 8b --sequences 1,16,64
    python benchmarks/gpu_steps.py --model ACTOR --heads HEADS --data rows.jsonl
        --template '{prompt}' --sequences 1,32 --arms none,v1,v2,v2-launched

Arms: `none` is vLLM at its defaults, without speculation; `v1` and `v2` are ours on vLLM's two
model runners; `v2-launched` is V2 with drafting's kernels launched one by one, not as CUDA graphs;
`v2-synchronous` is V2 with no step scheduled before the last one has ended.

With --shape, actor and heads have random weights of real sizes, so what is accepted means nothing
and is divided out: only the milliseconds of a step count. With --model both are real, and so are
tokens/s. A step's milliseconds are those of a response over its steps, and these are its tokens
without the accepted ones. Ratios are to `none`, in the same round.

--trace FOLDER shows instead where a step with the first of --drafts goes: milliseconds of its
phases on the host and of their kernels, the longest kernels, and a file for chrome://tracing.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 128,
        "vocab_size": 20_000,
        "tie_word_embeddings": False,
    },
    "1.5b": {
        "hidden_size": 1536,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "intermediate_size": 8960,
        "vocab_size": 151_936,
        "tie_word_embeddings": True,
    },
    "8b": {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14_336,
        "vocab_size": 128_256,
        "tie_word_embeddings": False,
    },
}
"""As model cards say, all as a Llama, so that only sizes differ; `tiny` is to try this out."""
ARMS = ("none", "v1", "v2", "v2-launched", "v2-synchronous")
PROMPT, WRITTEN, WIDTH = 64, 96, 8192
TRACED, LONGEST = 16, 30
"""Tokens that a traced response has, and kernels that are listed."""
PHASE = "phase: "


def write_actor(folder: Path, shape: str) -> None:
    """Only its config: vLLM makes the weights up (`load_format: dummy`)."""
    from transformers import LlamaConfig

    LlamaConfig(
        **SHAPES[shape],
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
        architectures=["LlamaForCausalLM"],
        torch_dtype="bfloat16",
    ).save_pretrained(folder)


def write_heads(folder: Path, shape: str) -> None:
    """Those that a run starts with, but with random weights."""
    import torch

    from heads.checkpoint import save_heads
    from heads.modules import MedusaHeads
    from medusa_ppo.config.heads_section import HeadsSection

    torch.manual_seed(0)
    sizes = HeadsSection().sizes(SHAPES[shape]["hidden_size"], SHAPES[shape]["vocab_size"])
    heads = MedusaHeads(sizes).requires_grad_(False).to(torch.bfloat16)
    for parameter in heads.parameters():
        parameter.copy_(torch.randn_like(parameter, dtype=torch.float32) * 0.02)
    save_heads(folder, heads)


def prompts_of(options: argparse.Namespace, count: int, seed: int) -> list[list[int]]:
    drawn = random.Random(seed)
    if options.shape:
        vocab = SHAPES[options.shape]["vocab_size"]
        return [[drawn.randrange(1, vocab) for _ in range(PROMPT)] for _ in range(count)]
    from medusa_ppo.offline.scene import read_scene

    found = read_scene(options.model, options.data, options.template, WRITTEN).prompts
    return drawn.sample(found, count)


def serve(options: argparse.Namespace) -> None:
    """One engine: answers each line of the standard input with one of the standard output."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    # vLLM writes to the standard output, too.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from medusa_ppo.config.engine_section import EngineConfig
    from medusa_ppo.contract.rollouts import Sampling
    from medusa_ppo.engines.colocated import ColocatedEngine
    from medusa_ppo.vllm_plugin import draft_graphs

    arm = options.serve
    if arm == "v2-launched":
        draft_graphs.EAGER_USES = sys.maxsize
    extra: dict[str, Any] = {"kv_cache_memory_bytes": options.cache_mib << 20}
    if options.shape:
        extra["load_format"] = "dummy"
    if arm == "v2-synchronous":
        extra["async_scheduling"] = False
    config = EngineConfig(
        dtype="bfloat16",
        max_num_seqs=max(options.sequences),
        max_model_len=512,
        memory_fraction=0.2,
        enforce_eager=options.eager,
        runner=None if arm == "none" else "v1" if arm == "v1" else "v2",
        draft_vocab=WIDTH if options.shape and arm != "none" else None,
        extra=extra,
    )
    heads = None if arm == "none" else options.heads
    if options.trace:
        mark_phases()
    sampling = Sampling(1.0, max_new_tokens=WRITTEN, ignore_eos=True)
    with ColocatedEngine(options.model, heads, config) as engine:
        print(json.dumps({"ready": arm}), file=answers, flush=True)
        for line in sys.stdin:
            asked = json.loads(line)
            if asked["drafts"] is not None:
                choose = asked["drafts"] == "auto"
                number = engine.max_drafts if choose else asked["drafts"]
                engine.configure(num_drafts=number, choose=choose)
            prompts = prompts_of(options, asked["sequences"], asked["seed"])
            # Other numbers of drafts of this arm have answered the same prompts in this round.
            engine.forget_prompts()
            if "trace" in asked:
                print(json.dumps(traced(engine, prompts, asked["trace"])), file=answers, flush=True)
                continue
            found = engine.generate(prompts, sampling)
            counters = found.counters
            steps = (found.generated_tokens - counters.accepted) / asked["sequences"]
            answer = {
                "step_ms": 1e3 * found.seconds / steps,
                "tokens_per_s": found.generated_tokens / found.seconds,
                "tokens_a_step": found.generated_tokens / steps / asked["sequences"],
                "drafts": counters.draft_tokens / counters.drafts if counters.drafts else 0.0,
            }
            print(json.dumps(answer), file=answers, flush=True)


def mark_phases() -> None:
    """Name the phases of a step in a trace."""
    import torch
    import vllm.v1.worker.gpu.model_runner as v2_runner
    import vllm.v1.worker.gpu.spec_decode.rejection_sampler as v2_sampler

    from medusa_ppo.vllm_plugin import speculator

    def named(name: str, call: Any) -> Any:
        @functools.wraps(call)
        def run(*args: Any, **kwargs: Any) -> Any:
            with torch.profiler.record_function(name):
                return call(*args, **kwargs)

        return run

    runner = v2_runner.GPUModelRunner
    for owner, method, name in (
        (runner, "execute_model", PHASE + "model"),
        (runner, "sample_tokens", PHASE + "sample and draft"),
        (v2_sampler.RejectionSampler, "__call__", PHASE + "  verification"),
        (speculator.DraftsToVerify, "by_row", PHASE + "    rows of q"),
        (speculator.MedusaSpeculator, "propose", PHASE + "  drafting"),
    ):
        setattr(owner, method, named(name, getattr(owner, method)))


def traced(engine: Any, prompts: list[list[int]], path: str) -> dict[str, Any]:
    """Milliseconds a step of phases and kernels. Prompts are read before the trace begins: they are
    in the prefix cache, but for the last block.
    """
    import torch

    from medusa_ppo.contract.rollouts import Sampling

    sampling = Sampling(1.0, max_new_tokens=TRACED, ignore_eos=True)
    engine.generate(prompts, sampling)
    kinds = torch.profiler.ProfilerActivity
    known = [kinds.CPU] + [kinds.CUDA] * torch.cuda.is_available()
    with torch.profiler.profile(activities=known) as profile:
        found = engine.generate(prompts, sampling)
    profile.export_chrome_trace(path)
    steps = (found.generated_tokens - found.counters.accepted) / len(prompts)
    rows = profile.key_averages()
    host = torch.autograd.DeviceType.CPU
    kernels = [row for row in rows if row.device_type != host and not row.key.startswith(PHASE)]
    kernels.sort(key=lambda row: -row.self_device_time_total)
    milliseconds = 1e3 * steps
    return {
        "steps": steps,
        "phases": [
            (
                row.key,
                row.count / steps,
                row.cpu_time_total / milliseconds,
                row.device_time_total / milliseconds,
            )
            for row in rows
            if row.device_type == host and row.key.startswith(PHASE)
        ],
        "kernels": [
            (row.key, row.count / steps, row.self_device_time_total / milliseconds)
            for row in kernels[:LONGEST]
        ],
        "device_ms": sum(row.self_device_time_total for row in kernels) / milliseconds,
        "step_ms": 1e3 * found.seconds / steps,
    }


class Engine:
    """An engine in a process of its own."""

    def __init__(self, options: argparse.Namespace, arm: str) -> None:
        command = [sys.executable, __file__, "--serve", arm]
        for name in ("shape", "model", "heads", "data", "template", "cache_mib"):
            if value := getattr(options, name):
                command += [f"--{name.replace('_', '-')}", str(value)]
        command += ["--sequences", ",".join(map(str, options.sequences))]
        command += ["--eager"] * options.eager
        if options.trace:
            command += ["--trace", str(options.trace)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"An engine ended with {self.process.wait()}; see above.")
        return json.loads(line)

    def ask(
        self, sequences: int, drafts: int | str | None, seed: int, **more: str
    ) -> dict[str, Any]:
        assert self.process.stdin is not None
        asked = {"sequences": sequences, "drafts": drafts, "seed": seed, **more}
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()
        return self.read()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    engines = {arm: Engine(options, arm) for arm in options.arms}
    rows = []
    try:
        for engine in engines.values():
            engine.read()
        cases = [(arm, drafts) for arm in options.arms for drafts in variants(options, arm)]
        for engine in engines.values():
            # As many tokens as a draft vocabulary waits for.
            for seed in range(4):
                engine.ask(max(options.sequences), None, seed)
        for sequences in options.sequences:
            found: dict[Any, list[dict[str, Any]]] = {case: [] for case in cases}
            for number in range(-options.warm, options.rounds):
                turn = number // 2 % len(cases)
                order = [*cases[turn:], *cases[:turn]]
                # As in `medusa_ppo.bench.pairs`: not always after the same one.
                for arm, drafts in reversed(order) if number % 2 else order:
                    answer = engines[arm].ask(sequences, drafts, number + 100)
                    if number >= 0:
                        found[arm, drafts].append(answer)
            rows += [row_of(sequences, case, answers, found) for case, answers in found.items()]
            for row in rows[-len(cases) :]:
                sys.stdout.write(line_of(row) + "\n")
                sys.stdout.flush()
    finally:
        for engine in engines.values():
            engine.close()
    return rows


def trace(options: argparse.Namespace) -> None:
    options.trace.mkdir(parents=True, exist_ok=True)
    engines = {arm: Engine(options, arm) for arm in options.arms}
    try:
        for engine in engines.values():
            engine.read()
        for arm, engine in engines.items():
            for seed in range(4):
                engine.ask(max(options.sequences), None, seed)
            for sequences in options.sequences:
                drafts = variants(options, arm)[0]
                for seed in range(3):
                    untraced = engine.ask(sequences, drafts, seed)
                path = options.trace / f"{arm}-{sequences}.json.gz"
                found = engine.ask(sequences, drafts, 0, trace=str(path))
                sys.stdout.write(
                    f"{arm}, {sequences} sequences, K={drafts}: {untraced['step_ms']:.3f} ms a step"
                    f" ({found['step_ms']:.3f} traced), {found['device_ms']:.3f} ms of kernels\n"
                )
                for name, count, host, device in found["phases"]:
                    line = f"{host:8.3f} ms host {device:8.3f} ms kernels {count:6.1f}  {name}\n"
                    sys.stdout.write(line)
                for name, count, device in found["kernels"]:
                    sys.stdout.write(f"{device:8.3f} ms {count:6.1f}  {name[:110]}\n")
                sys.stdout.flush()
    finally:
        for engine in engines.values():
            engine.close()


def variants(options: argparse.Namespace, arm: str) -> list[int | str | None]:
    return [None] if arm == "none" else options.drafts


def row_of(
    sequences: int, case: Any, answers: list[dict[str, Any]], found: dict[Any, Any]
) -> dict[str, Any]:
    base = found.get(("none", None), answers)
    steps = [own["step_ms"] / other["step_ms"] for own, other in zip(answers, base, strict=True)]
    rates = [
        own["tokens_per_s"] / other["tokens_per_s"]
        for own, other in zip(answers, base, strict=True)
    ]
    middle = {name: statistics.median(one[name] for one in answers) for name in answers[0]}
    return {
        "sequences": sequences,
        "arm": case[0],
        "number": case[1],
        **middle,
        "step_ratio": (min(steps), statistics.median(steps), max(steps)),
        "rate_ratio": (min(rates), statistics.median(rates), max(rates)),
    }


def line_of(row: dict[str, Any]) -> str:
    low, middle, high = row["step_ratio"]
    least, rate, most = row["rate_ratio"]
    return (
        f"{row['sequences']:4d} {row['arm']:12s} K={row['number']}:"
        f" {row['step_ms']:8.3f} ms a step, x{middle:.2f} ({low:.2f} to {high:.2f});"
        f" {row['tokens_a_step']:.2f} tokens a step;"
        f" {row['tokens_per_s']:.0f} tokens/s, x{rate:.2f} ({least:.2f} to {most:.2f})"
    )


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES)
    parser.add_argument("--model", default="")
    parser.add_argument("--heads", default="")
    parser.add_argument("--data", default="")
    parser.add_argument("--template", default="")
    parser.add_argument("--sequences", type=numbers, default=[1, 16, 64])
    parser.add_argument("--arms", type=lambda text: text.split(","), default=["none", "v2"])
    parser.add_argument("--drafts", nargs="+", default=[4, 2, 1, 0, "auto"], help="K, or auto")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm", type=int, default=2, help="uncounted rounds")
    parser.add_argument("--cache-mib", type=int, default=3072, help="keys and values of an engine")
    parser.add_argument("--eager", action="store_true", help="neither torch.compile nor graphs")
    parser.add_argument("--json", type=Path, help="write all figures there")
    parser.add_argument("--trace", type=Path, help="see above")
    parser.add_argument("--serve", choices=ARMS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.drafts = [int(n) if str(n).isdigit() else n for n in options.drafts]
    if unknown := [arm for arm in options.arms if arm not in ARMS]:
        parser.error(f"given: --arms {','.join(unknown)}  expected: {', '.join(ARMS)}")
    if not options.shape and not (options.model and options.heads and options.data):
        parser.error("--shape, or --model with --heads, --data and --template")
    if options.serve:
        serve(options)
        return
    with tempfile.TemporaryDirectory(prefix="medusa-ppo-steps-") as folder:
        if options.shape:
            options.model, options.heads = f"{folder}/actor", f"{folder}/heads"
            write_actor(Path(options.model), options.shape)
            write_heads(Path(options.heads), options.shape)
        if options.trace:
            trace(options)
            return
        rows = measure(options)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
