"""`medusa-ppo doctor` and `check-setup`: what this machine has, whether engines sample from the
model's own distribution, and which commands show that GPUs work.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

import medusa_ppo
from medusa_ppo.cli.gpu_suite import described, read_results
from medusa_ppo.config.run_config import OFF
from medusa_ppo.reports.store import GIB, commit, gpu_names
from medusa_ppo.runtime.hardware import OWN_MEMORY, gpu_memory
from medusa_ppo.runtime.wording import size_text
from medusa_ppo.vllm_plugin.vllm_versions import (
    TESTED,
    is_allowed,
    is_cpu_build,
    is_tested,
    vllm_version,
)

if TYPE_CHECKING:
    from medusa_ppo.config.run_config import RunConfig
    from medusa_ppo.contract.rollouts import Sampling
    from medusa_ppo.runtime.console import OfflineProgress

MIN_MEMORY_GIB = 6.0
MIN_SHM_GIB = 1.0
MIN_DISK_GIB = 2.0
PROBE_TIMEOUT_S = 300
# Versions the package takes; pyproject.toml has the same for pip.
RANGES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "torch": ((2, 11), (2, 14)),
    "transformers": ((5, 5, 3), (5, 20)),
    "ray": ((2, 55), (3, 0)),
    "datasets": ((5, 0), (6, 0)),
}
TOLD = (
    "CUDA_VISIBLE_DEVICES",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "NVIDIA_TF32_OVERRIDE",
    "NCCL_P2P_DISABLE",
    "NCCL_SOCKET_IFNAME",
    "VLLM_ATTENTION_BACKEND",
    "VLLM_USE_V2_MODEL_RUNNER",
    "VLLM_WORKER_MULTIPROC_METHOD",
    "VLLM_PLUGINS",
)
"""Environment variables that a page for a bug report shows if they are set. It shows no others,
because they may hold secrets.
"""
# Runs in a separate process: a timeout can end a Ray that hangs, and this process stays clean.
RAY_PROBE = """
import ray
from medusa_ppo.runtime.processes import local_ray
with local_ray(cpus=1):
    print(ray.get(ray.remote(lambda: 6 * 7).remote()))
"""


@dataclass(frozen=True)
class Check:
    """One finding. `do` is the reader's next step, shown only if `ok` is false; `warn` marks a
    finding that may still be fine.
    """

    name: str
    ok: bool
    found: str
    do: str = ""
    warn: bool = False


def run_checks(quick: bool = False) -> Iterator[Check]:
    """Yield the findings one by one, cheap ones first; `quick` skips those that start Ray, vLLM and
    an engine.
    """
    found = ".".join(str(part) for part in sys.version_info[:3])
    yield Check(
        "Python",
        (3, 11) <= sys.version_info[:2] < (3, 13),
        found,
        "Use Python 3.11 or 3.12: make setup PYTHON=python3.11",
    )
    yield from (
        _memory(),
        _shared_memory(),
        _disk(),
        *map(_package, RANGES),
        _vllm(),
        _gpus(),
        _entry_point(),
    )
    if not quick:
        yield _ray()
        yield from _hooks()
        yield from _engine()


def _memory() -> Check:
    # Available rather than free: the system releases the page cache on demand.
    memory = psutil.virtual_memory()
    found = (
        f"{memory.available / GIB:.1f} GiB free of {memory.total / GIB:.1f}, {os.cpu_count()} cores"
    )
    return Check(
        "Memory",
        memory.available / GIB >= MIN_MEMORY_GIB,
        found,
        f"Free at least {MIN_MEMORY_GIB:.0f} GiB: end other programs.",
    )


def _shared_memory() -> Check:
    # macOS has none.
    if not os.path.isdir("/dev/shm"):
        return Check("Shared memory", True, "no /dev/shm here; temporary files are used instead")
    free = shutil.disk_usage("/dev/shm").free / GIB
    return Check(
        "Shared memory",
        free >= MIN_SHM_GIB,
        f"{free:.1f} GiB free in /dev/shm",
        "Enlarge /dev/shm (docker run --shm-size=8g).",
    )


def _disk() -> Check:
    free = shutil.disk_usage(".").free / GIB
    return Check(
        "Disk",
        free >= MIN_DISK_GIB,
        f"{free:.1f} GiB free here",
        f"Free at least {MIN_DISK_GIB:.0f} GiB.",
    )


def _package(name: str) -> Check:
    low, high = RANGES[name]
    do = f"Install {name}>={'.'.join(map(str, low))},<{'.'.join(map(str, high))}: make setup"
    try:
        # Only its metadata is read: importing torch takes seconds, and importing a broken package
        # would end the check.
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Check(name, False, "not installed", do)
    return Check(
        name,
        # After "+" comes the build (+cu128, +cpu), not the release.
        low <= tuple(map(int, re.findall(r"\d+", version.split("+")[0])[:3])) < high,
        version,
        do,
    )


def _vllm() -> Check:
    version = vllm_version()
    found = (
        f"{version} ({'CPU' if is_cpu_build() else 'GPU'} build)" if version else "not installed"
    )
    do = (
        f"Install vLLM {' or '.join(TESTED)}: make setup VLLM={TESTED[-1]} (it picks the CPU or the"
        " CUDA build)"
    )
    # An untested release may well work; the checks of the hooks show whether it does.
    if version and is_allowed(version) and not is_tested(version):
        return Check("vLLM", True, f"{found}, not tested; tested: {', '.join(TESTED)}", warn=True)
    return Check("vLLM", bool(version) and is_allowed(version), found, do)


def _hooks() -> Iterator[Check]:
    """One finding for each name inside vLLM that we rely on. A separate process imports vLLM and
    looks for them.
    """
    module = "medusa_ppo.vllm_plugin.hook_table"
    ok, answer = _python("-m", module)
    if not ok:
        yield Check("Hooks", False, answer, f"Run `python -m {module}` and read what it prints.")
        return
    for hook in json.loads(answer):
        found = hook["fault"] or f"({hook['runner']}, {hook['releases']}, {hook['checked']})"
        do = f"Install a vLLM that was tested: {', '.join(TESTED)}."
        yield Check(f"Hook: {hook['need']}", not hook["fault"], f"{hook['where']} {found}", do)


def _gpus() -> Check:
    names = gpu_names()
    found = "; ".join(names) or "none, everything runs on the CPU"
    idle = bool(names) and is_cpu_build()
    do = "vLLM's CPU build can't use them: make setup STACK=cuda"
    # vLLM starts no engine on a GPU where less is free than the engine is to reserve.
    taken = [gpu for gpu in gpu_memory() if gpu.free < OWN_MEMORY * gpu.total]
    if idle or not taken:
        return Check("GPUs", not idle, found, do)
    free = ", ".join(
        f"GPU {gpu.index} has {size_text(gpu.free)} free of {size_text(gpu.total)}" for gpu in taken
    )
    return Check(
        "GPUs",
        True,
        f"{found}; other programs use them: {free}. An engine of its own asks for"
        f" {OWN_MEMORY:g} of the memory (engine.memory_fraction)",
        warn=True,
    )


def _entry_point() -> Check:
    names = [entry.name for entry in importlib.metadata.entry_points(group="vllm.general_plugins")]
    ok = "medusa_ppo" in names
    found = "registered" if ok else f"not among {names or 'none'}"
    return Check(
        "Plugin registered",
        ok,
        found,
        "Install this package (make setup): vLLM finds the plugin by its entry point.",
    )


def _ray() -> Check:
    # With an address in its environment, the probe would run on somebody's cluster.
    ok, answer = _python("-c", RAY_PROBE, environment={"RAY_ADDRESS": ""})
    ok = ok and answer.endswith("42")
    return Check(
        "Ray starts",
        ok,
        "a local cluster ran a task" if ok else answer,
        "Check for left-over Ray processes: ray status, ray stop",
    )


def _engine() -> Iterator[Check]:
    """Start a tiny engine in a separate process; it reports which plugin it loaded and how it
    samples.
    """
    ok, answer = _python("-m", "medusa_ppo.engines.probe")
    if not ok:
        do = (
            "Free memory and cores, then run `python -m medusa_ppo.engines.probe` and read what it"
            " prints."
        )
        yield Check("Engine starts", False, answer, do)
        return
    report = json.loads(answer)
    yield Check("Engine starts", True, f"vLLM {report['vllm']}, worker process {report['pid']}")
    patches = f"patches: {', '.join(report['patches']) or 'none needed'}"
    yield Check(
        "Plugin loaded",
        report["active"],
        patches,
        "Unset VLLM_PLUGINS, or let it name medusa_ppo.",
    )
    yield Check(
        "Honest sampling",
        abs(report["z"]) < report["limit"],
        f"{report['tokens']} tokens drafted at temperature {report['temperature']}:"
        f" {report['z']:+.2f} standard errors off",
        "Do not trust any figure at temperature > 0 here: the sampler is wrong. Report this with"
        " the lines above.",
    )


def prompts_for(tokens: int, sampling: Sampling) -> int:
    """How many prompts are enough for so many tokens in one call of an engine: it answers all that
    it is given, and others would only make the test longer.
    """
    return max(1, -(-tokens // (sampling.responses_per_prompt * sampling.max_new_tokens)))


def check_distribution(
    config: RunConfig, tokens: int, progress: OfflineProgress, *, data: bool
) -> Iterator[Check]:
    """Sample with a run's model, heads, engine and sampling settings, and compare the samples with
    the model's own distribution (randomised PIT).

    Args:
        tokens: how many to sample with drafts, and as many again without.
        data: answer the run's prompts; otherwise texts begin with random tokens.
    """
    from heads.checkpoint import save_heads
    from medusa_ppo.actors.hf import lm_head_weight, load_actor, load_tokenizer
    from medusa_ppo.contract.rollouts import Sampling
    from medusa_ppo.demo.actor_cache import ensure_demo_actor
    from medusa_ppo.demo.pretraining import RECIPES
    from medusa_ppo.engines import probe
    from medusa_ppo.engines.probe import sentence
    from medusa_ppo.offline.scene import on_device, running_engine
    from medusa_ppo.plugin.medusa_plugin import initial_heads
    from medusa_ppo.ppo.generation import PromptStream
    from medusa_ppo.runtime.hardware import settled
    from medusa_ppo.runtime.processes import local_ray, run_hardware

    path = config.model.path
    asked = config.sampling
    progress.say(f"Loading {path} ...")
    path = str(ensure_demo_actor(recipe=RECIPES[path])) if path in RECIPES else path
    # The reference is float32 whatever dtype the engine has, so that only the engine rounds.
    model = load_actor(path, "float32")
    sampling = Sampling(
        asked.temperature,
        asked.top_p,
        asked.top_k or 0,
        asked.max_new_tokens,
        asked.responses_per_prompt,
    )
    prompts = probe.beginnings(model.config)
    if data:
        prompts = [
            list(p.token_ids)
            for p in PromptStream.load(config.data, load_tokenizer(path), seed=config.seed).batch(
                0, probe.PROMPTS
            )
        ]
    prompts = prompts[: prompts_for(tokens, sampling)]
    with tempfile.TemporaryDirectory(prefix="medusa-ppo-doctor-") as folder, local_ray():
        engine_config = settled(config, run_hardware).engine
        # These prompts are short, and the model's maximum length may be too.
        if not data and config.engine.max_model_len is None:
            engine_config = engine_config.model_copy(
                update={"max_model_len": max(map(len, prompts)) + asked.max_new_tokens}
            )
        heads = initial_heads(config, model)
        # Untrained heads are zero and draft what lm_head predicts. Hardly any draft would be
        # accepted, so little would be tested.
        if heads.untrained:
            probe.stir(heads)
        save_heads(Path(folder) / "heads", heads, lm_head_VD=lm_head_weight(model).detach())
        progress.say("Starting the engine ...")
        with running_engine(
            path, str(Path(folder) / "heads"), engine_config, config.seed
        ) as engine:
            with progress.phase("Tokens", 2 * tokens) as advance:
                runs = probe.sample(engine, prompts, sampling, tokens, advance)
    with progress.phase("Judging", 2 * tokens) as advance:
        drafting, plain = probe.judge(on_device(model), runs, advance)
    for name, test in (("With drafts", drafting), ("Without", plain)):
        if test is not None:
            figures = (
                f"p = {test.chi_square_p:.3g} and {test.kolmogorov_p:.3g}, z = {test.z:+.2f},"
                f" {test.outside} outside the support"
            )
            yield Check(
                name, test.honest, f"{test.tokens:,} tokens: {figures}", "Read the verdict."
            )
    # With a start value, because `sum` would begin with 0, which can't be added to counters.
    accepted = sum((rollouts.counters for rollouts in runs[0][1:]), runs[0][0].counters)
    found = f"{sentence(drafting, plain)} (tokens a step: {accepted.mean_acceptance_length:.2f})"
    yield Check(
        "Distribution",
        drafting.honest,
        found,
        "Run `medusa-ppo doctor`, and this again with a different --tokens; then report both.",
    )


def _python(*arguments: str, environment: dict[str, str] | None = None) -> tuple[bool, str]:
    """Whether a Python process succeeded, and the last line of its output (or of its errors)."""
    try:
        done = subprocess.run(
            [sys.executable, *arguments],
            capture_output=True,
            text=True,
            timeout=PROBE_TIMEOUT_S,
            env={**os.environ, **(environment or {})},
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False, f"no answer in {PROBE_TIMEOUT_S} s"
    if done.returncode == 0:
        # Ray and vLLM print their own lines first.
        return True, done.stdout.strip().rpartition("\n")[2]
    # The last line of a traceback is the error.
    return False, done.stderr.strip().rpartition("\n")[2][:300] or "no output"


@dataclass(frozen=True)
class SetupStep:
    """A command that shows that a part of a GPU setup works.

    Attributes:
        shows: what works if it succeeds.
        needs: the hardware, and what must exist beforehand.
        command: as typed in the checkout's folder.
        prints: words that its output must contain.
        means: how to read them.
    """

    shows: str
    needs: str
    command: str
    prints: tuple[str, ...]
    means: str


def setup_page(model: str, data: str, gpus: int | None = None) -> Iterator[str]:
    """Lines of a page for a bug report: what this machine has, the commands that show whether it
    works, and the tests for this many GPUs with what their last runs found.

    Args:
        model, data: what the commands name.
        gpus: how many GPUs; None: those of this machine, or one if it has none.
    """
    here = gpu_names()
    yield f"medusa-ppo {medusa_ppo.__version__}, commit {commit() or 'none'}, {platform.platform()}"
    yield f"GPUs here: {'; '.join(here) or 'none'}{_driver() if here else ''}"
    told = [f"{name}={os.environ[name]}" for name in TOLD if name in os.environ]
    yield f"Variables: {', '.join(told) or 'none that change how GPUs are used'}"
    for check in run_checks(quick=True):
        yield f"{'ok  ' if check.ok else 'FAIL'} {check.name}: {check.found}"
    for number, step in enumerate(setup_steps(model, data), 1):
        words = ", ".join(repr(word) for word in step.prints)
        yield ""
        yield f"{number}. Shows that {step.shows}."
        yield f"   needs:        {step.needs}"
        yield f"   run:          {step.command}"
        yield f"   must print:   {words}"
        yield f"                 {step.means}"
    yield ""
    yield from described(gpus or len(here) or 1, read_results())


def _driver() -> str:
    """The driver's version, to follow the names of the GPUs."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"; driver unknown ({type(error).__name__})"
    return f"; driver {(answer.stdout.splitlines() or ['unknown'])[0]}"


def setup_steps(model: str, data: str) -> tuple[SetupStep, ...]:
    """The five commands, in the order in which to run them: each relies on the ones before."""
    given = f"model.path={model} data.path={data}"
    # A Ray job starts where Ray was started.
    there = "model.path={} data.path={}".format(
        *(os.path.abspath(name) if os.path.exists(name) else name for name in (model, data))
    )
    return (
        SetupStep(
            "the packages fit the machine, vLLM loads our plugin, and drafts do not change the "
            "samples",
            "one GPU",
            "medusa-ppo doctor",
            ("GPUs", "GPU build", "Honest sampling", "All checks passed."),
            "The line `GPUs` names yours, and the line `vLLM` says GPU build.",
        ),
        SetupStep(
            "heads train, and engines serve, sleep and take new weights, on the GPU as on a CPU",
            "one GPU or more; the parts for each number of GPUs are listed below",
            "make test-gpu",
            ("passed, 0 failed",),
            "Each part ends with such a line; tests that need more GPUs are left out.",
        ),
        SetupStep(
            "PPO, engine and companion share a GPU, and new heads reach the engine",
            "one GPU with 80 GiB; the model; data whose rows have a question, and an answer after "
            "#### as in GSM8K",
            f"medusa-ppo ppo --config configs/one-gpu.yaml name=check-setup {given} ppo.steps=20"
            " report.speed_every=5",
            ("The same by replay, trained heads / frozen heads", "Report: "),
            "The first number of that line is not below the second (below it the companion falls"
            " behind the policy), and the report (in runs/check-setup) has no warning.",
        ),
        SetupStep(
            "drafting pays on this GPU",
            "the same GPU; the files of the previous command",
            "medusa-ppo bench rollout --model runs/check-setup/actor --heads"
            f" runs/check-setup/heads-final --data {data} --template 'Question:"
            " {question}\\nAnswer:' --dtype bfloat16 --batches 1,16,64",
            ("Ours against no speculation: ",),
            f"Above x1.00 drafting pays; below it, run without the plugin ({' '.join(OFF)}).",
        ),
        SetupStep(
            "a run finds its nodes through Ray",
            "two nodes, with 8 GPUs in the first (where you run this) and two in the second, the "
            "checkout under the same path on both, and Ray with its job server (ray[default]) "
            "started on both as in docs/cluster.md for a job, with no GPU hidden from it",
            "ray job submit --address=http://127.0.0.1:8265 --entrypoint-num-gpus=1"
            " --entrypoint-resources='{\"engines\": 0.001}' -- medusa-ppo ppo --config two-nodes"
            f" out=$PWD/runs name=check-cluster {there} ppo.steps=5",
            ("Report: ", "succeeded"),
            "Ray's last line says that the job succeeded.",
        ),
    )
