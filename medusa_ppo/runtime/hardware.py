"""What a machine has, what a model needs, and what follows for settings that are null: dtype,
memory share, compiled or eager, threads (no torch).
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import math
import os
import platform
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from heads.errors import ConfigError, ModelError
from medusa_ppo.config.companion_section import CompanionConfig
from medusa_ppo.config.engine_section import SERVER, EngineConfig
from medusa_ppo.config.run_config import RunConfig

BF16_FROM = 8.0  # NVIDIA's compute capability.
BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}
QUERY = ("nvidia-smi", "--query-gpu=compute_cap,memory.total", "--format=csv,noheader,nounits")
MEMORY_QUERY = (
    "nvidia-smi",
    "--query-gpu=index,uuid,name,memory.free,memory.used,mig.mode.current",
    "--format=csv,noheader,nounits",
)
QUERY_TIMEOUT_S = 20.0
SHARED_MEMORY, OWN_MEMORY = 0.35, 0.9
"""An engine's share of a GPU's memory: next to PPO's update, which needs more than half, and on a
GPU of its own.
"""
TURNS_MEMORY = 0.8
"""The same if PPO leaves the GPU while the engine writes; CUDA and torch keep some memory there.
"""
CPU_MEMORY = 0.1
MODEL_LEN = 512
"""Longest prompt plus response of an engine whose loop does not set lengths."""
PRESSURE = Path("/proc/pressure/cpu")
CONTROL_GROUP = Path("/sys/fs/cgroup")
CORE_TIMES = Path("/proc/stat")
COMPANION_SHARE = 0.1
COMPANION_CORES = 4
"""The companion gets one core in this many, if it shares them with PPO and the engine."""


@dataclass(frozen=True)
class Hardware:
    """What a machine has.

    Attributes:
        gpus: number that torch can use and CUDA_VISIBLE_DEVICES allows.
        bfloat16: they support it.
        cores: cores that this process may use.
        found: how it was determined, in words.
        gpu_bytes: memory of the smallest GPU; 0: none, or unknown.
        elsewhere: the GPUs are those of other nodes; the loop's process has none.
    """

    gpus: int
    bfloat16: bool
    cores: int
    found: str
    gpu_bytes: int = 0
    elsewhere: bool = False


Look = Callable[[], Hardware]
"""Finds out what there is. This may take many seconds (nvidia-smi), or a place on a GPU
(`run_hardware`): it is called only if a setting is null that follows from it.
"""


class Choice(NamedTuple):
    """The value chosen for a setting that was null."""

    key: str
    value: Any
    why: str


@functools.cache
def find_hardware() -> Hardware:
    """What this machine has."""
    cores = usable_cores()
    able, why = _capabilities()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    # nvidia-smi shows all GPUs, whatever the variable says. It may contain UUIDs, so its names are
    # only counted.
    if able and visible is not None:
        named = [name for name in visible.split(",") if name.strip() not in ("", "-1")]
        able = able[: len(named)]
        why += f", CUDA_VISIBLE_DEVICES={visible}"
    return Hardware(
        len(able),
        # One dtype for all, so the oldest of them must support it.
        bool(able) and min(capability for capability, _ in able) >= BF16_FROM,
        cores,
        f"{cores} cores, {len(able)} GPUs ({why})",
        min((memory for _, memory in able), default=0),
    )


def _capabilities() -> tuple[list[tuple[float, int]], str]:
    """Compute capability and bytes of memory of each GPU that the installed torch could use, and
    the source of this.
    """
    try:
        # `import torch` would take seconds, and `medusa-ppo plan` needs nothing else from it.
        torch = importlib.metadata.version("torch")
        if "+cpu" in torch:
            return [], f"torch {torch} uses none"
        answer = subprocess.run(
            QUERY, capture_output=True, text=True, timeout=QUERY_TIMEOUT_S, check=True
        ).stdout
        rows = [line.split(",") for line in answer.splitlines() if line.strip()]
        return [(float(row[0]), int(float(row[1]) * 1024**2)) for row in rows], QUERY[0]
    except (
        importlib.metadata.PackageNotFoundError,
        OSError,
        ValueError,
        subprocess.SubprocessError,
    ) as error:
        return [], f"{QUERY[0]}: {type(error).__name__}"


@dataclass(frozen=True)
class GpuMemory:
    """What is free on a GPU now.

    Attributes:
        index, uuid: what nvidia-smi and CUDA_VISIBLE_DEVICES call it.
        model: which kind of GPU it is.
        free, total: bytes; without what the driver keeps for itself, which no program gets.
    """

    index: str
    uuid: str
    model: str
    free: int
    total: int


def gpu_memory() -> list[GpuMemory]:
    """The memory of all GPUs of this machine, whatever CUDA_VISIBLE_DEVICES says; empty if it is
    not known of each: nvidia-smi is absent, too slow or too old, or a GPU is split (MIG) or shares
    the host's memory.
    """
    try:
        answer = subprocess.run(
            MEMORY_QUERY, capture_output=True, text=True, timeout=QUERY_TIMEOUT_S, check=True
        ).stdout
        found = []
        for line in filter(str.strip, answer.splitlines()):
            index, uuid, model, free, used, split = (part.strip() for part in line.split(","))
            if split == "Enabled":
                return []  # A process gets an instance of it, whose memory the query doesn't tell.
            # Newer drivers count what they keep for themselves in the total alone.
            total = int(free) + int(used)
            found.append(GpuMemory(index, uuid, model, int(free) << 20, total << 20))
        return found
    except (OSError, ValueError, subprocess.SubprocessError):
        return []


def memory_of_first(count: int, environment: Mapping[str, str]) -> list[GpuMemory]:
    """What is free on the first `count` GPUs that a process with these variables sees; empty if
    that is not known for sure.
    """
    everything = gpu_memory()
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        names = [gpu.index for gpu in everything]
    else:
        names = [name.strip() for name in visible.split(",")]
    # By default CUDA numbers the fastest GPU first, nvidia-smi by their places on the bus.
    alike = len({gpu.model for gpu in everything}) == 1
    in_order = alike or environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    found = []
    for name in names[:count]:
        # CUDA also takes the beginning of a UUID, if it is that of one GPU alone.
        called = [
            gpu
            for gpu in everything
            if (in_order and gpu.index == name)
            or (name.startswith("GPU-") and gpu.uuid.startswith(name))
        ]
        if len(called) != 1:
            return []
        found += called
    return found if len(found) == count else []


def assumed_hardware(config: RunConfig, gpus: bool | None) -> Hardware:
    """The hardware for a plan: this machine, or one with or without GPUs according to `gpus`."""
    here = find_hardware()
    engine = config.engine
    if gpus is None or gpus == (here.gpus > 0):
        return here
    # `gpus` says whether there are any, not how many: assume one, or a node's usual eight if one
    # can't be enough.
    several = engine.replicas * engine.ranks * config.actor.ranks > 1
    count = int(gpus) * (8 if several or (config.companion.num_gpus or 0) >= 1 else 1)
    found = f"{here.cores} cores, {count} GPUs, as asked for"
    return Hardware(count, gpus, here.cores, found, here.gpu_bytes if gpus else 0)


def settled(config: RunConfig, hardware: Hardware | Look | None = None) -> RunConfig:
    """The run's settings with values for those that were null and follow from the hardware (None:
    this machine's) or other settings.

    The companion's share of a GPU is left open: it is requested at its start, from what is free
    then.
    """
    # So that nobody looks for GPUs because of a share that is left open.
    companion = config.companion.model_copy(update={"enabled": False})
    return applied(config, choices(config.model_copy(update={"companion": companion}), hardware))


def applied(config: RunConfig, decided: Iterable[Choice]) -> RunConfig:
    """The settings with these choices filled in."""
    for choice in decided:
        section, _, name = choice.key.partition(".")
        config = config.model_copy(
            update={section: getattr(config, section).model_copy(update={name: choice.value})}
        )
    return config


def choices(config: RunConfig, hardware: Hardware | Look | None = None) -> list[Choice]:
    """Choose values for settings that are null; others stay."""
    look = _looking(hardware)
    model = config.model
    engine = config.engine
    ppo = config.ppo
    found: list[Choice] = []
    dtype: str | None = model.dtype
    if dtype is None:
        dtype, why = _dtype(look())
        found.append(Choice("model.dtype", dtype, why))
    if engine.dtype is None:
        found.append(Choice("engine.dtype", dtype, "as model.dtype"))
    if engine.max_model_len is None:
        length = config.data.max_prompt_tokens + config.sampling.max_new_tokens
        found.append(
            Choice(
                "engine.max_model_len", length, "data.max_prompt_tokens + sampling.max_new_tokens"
            )
        )
    # Before the engine's own rules, which don't know that PPO leaves the GPU; these choices win.
    if engine.memory_fraction is None and ppo.placement == "shared" and look().gpus:
        found.append(
            Choice("engine.memory_fraction", TURNS_MEMORY, "PPO and the engine take turns")
        )
    found += _of_engine(applied(config, found).engine, look, _cores(hardware))
    # Ranks that share their GPUs with engines have reserved them whole.
    megatron_shares = ppo.placement == "shared" and config.actor.backend == "megatron"
    if config.companion.enabled and config.companion.num_gpus is None:
        taken = config.actor.ranks if megatron_shares else 0
        share = companion_gpus(look().gpus - taken, config.companion.workers)
        none = "no GPU is left" if taken and look().gpus else "no GPU"
        why = "a share, freed between batches" if share else none
        found.append(Choice("companion.num_gpus", share, why))
    if ppo.micro_batch_size is None:
        found.append(Choice("ppo.micro_batch_size", ppo.minibatch_size, "a whole minibatch"))
    if ppo.threads is None:
        ranks = config.actor.ranks
        cores = _cores(hardware)
        found.append(
            Choice(
                "ppo.threads",
                max(1, cores // ranks),
                f"{cores} cores, {ranks} process{'es' * (ranks > 1)}",
            )
        )
    return found


def settled_engine(engine: EngineConfig, hardware: Hardware | Look | None = None) -> EngineConfig:
    """The same for an engine alone, without a run's settings."""
    return engine.model_copy(
        update={
            choice.key.removeprefix("engine."): choice.value
            for choice in _of_engine(engine, _looking(hardware), _cores(hardware))
        }
    )


def _looking(hardware: Hardware | Look | None) -> Look:
    """Looks once at most."""
    if isinstance(hardware, Hardware):
        return lambda: hardware
    return functools.cache(hardware or find_hardware)


def _cores(hardware: Hardware | Look | None) -> int:
    """Threads are counted by this machine's cores, so nobody looks for GPUs because of them."""
    return hardware.cores if isinstance(hardware, Hardware) else usable_cores()


def _dtype(hardware: Hardware) -> tuple[str, str]:
    """The dtype for this hardware, and why."""
    if hardware.bfloat16:
        return "bfloat16", "a GPU that has it"
    return "float32", "no GPU that has bfloat16"


def _of_engine(engine: EngineConfig, look: Look, cores: int) -> Iterator[Choice]:
    if engine.dtype is None:
        yield Choice("engine.dtype", *_dtype(look()))
    if engine.max_model_len is None:
        yield Choice("engine.max_model_len", MODEL_LEN, "the length of responses is not set")
    if engine.memory_fraction is None:
        key = "engine.memory_fraction"
        if not look().gpus:
            yield Choice(key, CPU_MEMORY, "no GPU")
        # An engine of several ranks is on a node with as many GPUs, which is not the loop's.
        elif look().gpus == 1 == engine.replicas * engine.ranks and not look().elsewhere:
            yield Choice(key, SHARED_MEMORY, "PPO's update is on the same GPU")
        else:
            yield Choice(key, OWN_MEMORY, "a GPU of its own")
    if engine.enforce_eager is None:
        gpus = look().gpus
        yield Choice(
            "engine.enforce_eager",
            not gpus,
            "so that a GPU does not wait for Python" if gpus else "no GPU: a quick start",
        )
    if engine.threads is None:
        why = f"{cores} cores, {engine.replicas} engine{'s' * (engine.replicas > 1)}"
        yield Choice("engine.threads", max(1, cores // engine.replicas), why)


def cores_wanted_s() -> float:
    """Seconds since boot in which some process waited for a core, by the kernel's count; NaN if it
    is not available.
    """
    try:
        some = PRESSURE.read_text(encoding="utf-8").splitlines()[0]
        return int(some.rpartition("total=")[2]) / 1e6
    except (OSError, ValueError, IndexError):
        return math.nan


def cores_idle_s() -> float:
    """Seconds since boot in which a core that this process may use had nothing to do, of all these
    cores together, by the kernel's count; NaN if it is not available. Nor is it where the process
    gets less time than these cores have: their idle time is not its own.
    """
    allowed = os.sched_getaffinity(0)
    if usable_cores() < len(allowed):
        return math.nan
    try:
        ticks = []
        for line in CORE_TIMES.read_text(encoding="utf-8").splitlines():
            name, *times = line.split()
            if name.startswith("cpu") and name != "cpu" and int(name[3:]) in allowed:
                ticks.append(int(times[3]) + int(times[4]))
        return sum(ticks) / os.sysconf("SC_CLK_TCK") if ticks else math.nan
    except (OSError, ValueError, IndexError):
        return math.nan


def usable_cores() -> int:
    """Cores that this process may use. A container or a job may have only some of the machine's
    (its affinity), or the time of fewer (a limit of its control group).
    """
    cores = len(os.sched_getaffinity(0))
    limit = _time_limit()
    return cores if limit is None else max(1, min(cores, int(limit)))


def _time_limit() -> float | None:
    """Cores' worth of time that the control group may use, of version 2 or 1; None: no limit."""
    with contextlib.suppress(OSError, ValueError):
        quota, period = (CONTROL_GROUP / "cpu.max").read_text(encoding="utf-8").split()
        return None if quota == "max" else int(quota) / int(period)
    with contextlib.suppress(OSError, ValueError):
        quota, period = (
            (CONTROL_GROUP / "cpu" / f"cpu.cfs_{name}_us").read_text(encoding="utf-8")
            for name in ("quota", "period")
        )
        return int(quota) / int(period) if int(quota) > 0 else None
    return None


def cpu_has_bfloat16() -> bool:
    """Whether this CPU has bfloat16 units."""
    return bool(BFLOAT16_FLAGS & _cpu_flags())


def processor_name() -> str:
    """The CPU's model, according to Linux."""
    names = [line for line in _cpu_lines() if line.lower().startswith(("model name", "cpu part"))]
    return names[0].partition(":")[2].strip() if names else platform.machine()


def _cpu_lines() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def _cpu_flags() -> set[str]:
    return {
        word
        for line in _cpu_lines()
        if line.lower().startswith(("flags", "features"))
        for word in line.partition(":")[2].split()
    }


def visible_gpus() -> tuple[str, ...]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them; the first one is the
    loop's.
    """
    count = find_hardware().gpus
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return tuple(map(str, range(count)))
    return tuple(name.strip() for name in named.split(",") if name.strip() not in ("", "-1"))[
        :count
    ]


class GpuPlaces(NamedTuple):
    """Who on this node gets which GPUs, besides the loop, which has the first one.

    Attributes:
        servers: for each engine behind HTTP that is started here, one GPU per rank; empty without
            GPUs.
        ray: those that our own Ray offers to everyone else.
    """

    servers: tuple[tuple[str, ...], ...]
    ray: tuple[str, ...]


def gpu_places(
    engine: EngineConfig, visible: tuple[str, ...], *, shared: bool = False
) -> GpuPlaces:
    """Places on a node with these GPUs. A single GPU is shared by all.

    Args:
        shared: engines and the update take turns on the same GPUs (ppo.placement=shared), so the
            loop has none for itself.

    Raises:
        ConfigError: engines behind HTTP don't have a GPU for each of their ranks.
    """
    # Ray places colocated engines, and running servers already have their places.
    servers = engine.replicas if engine.backend == SERVER else 0
    ranks = engine.ranks
    if not visible:
        return GpuPlaces(((),) * servers, ())
    free = visible if len(visible) == 1 else visible[1:]
    if servers * ranks > len(free):
        one = "they share" if len(visible) == 1 else "the first is the loop's"
        raise ConfigError(
            "The engines behind HTTP don't have a GPU each.",
            given=f"{servers} engines of {ranks} GPUs; visible: {', '.join(visible)}, {one}",
            expected=f"at most {len(free)} GPUs for all of them",
            do="Lower engine.replicas, or set engine.backend=colocated on a cluster, or start"
            " servers by hand and give their addresses.",
        )
    taken = [tuple(free[i * ranks : (i + 1) * ranks]) for i in range(servers)]
    left = visible if shared or len(visible) == 1 else free[servers * ranks :]
    return GpuPlaces(tuple(taken), tuple(left))


def gpus_beside(
    taken: Sequence[str | None], visible: tuple[str, ...], companion: CompanionConfig
) -> tuple[str, ...]:
    """The GPUs of this node that our own Ray offers to the companion of a training whose processes
    have theirs already. A single process on a single GPU shares it with all.

    Args:
        taken: each process's GPU, named as in `visible`; None: it computes on the CPU.
        companion: if its `num_gpus` asks for more than the others have left, it gets these too.
    """
    if len(visible) == len(taken) == 1:
        return visible
    free = tuple(gpu for gpu in visible if gpu not in taken)
    each = companion.num_gpus or 0.0
    # Ray puts a process with a share of a GPU on a single one.
    wanted = math.ceil(companion.workers / max(1, int(1 / each))) * max(1.0, each) if each else 0.0
    return free if len(free) >= wanted else visible


def companion_gpus(free: float, workers: int) -> float:
    """GPUs for each companion worker by default: a share if that much is free, else none."""
    return COMPANION_SHARE if free >= COMPANION_SHARE * workers else 0.0


def companion_threads(cores: tuple[int, ...] | None, *, alone: bool) -> int:
    """CPU threads of a worker: one on each core that it is pinned to; else a part of the node's
    cores, or all if the node is its own.
    """
    if cores:
        return len(cores)
    usable = usable_cores()
    return usable if alone else max(1, usable // COMPANION_CORES)


# ---- what a model needs

FLOAT32, BFLOAT16 = 4, 2
ATTENTION_HEADS = ("num_attention_heads", "n_head")
WITHOUT_GATE = ("gpt2", "gpt_neox", "gpt_neo", "opt", "phi")
TIED_BY_DEFAULT = (
    *("bloom", "cohere", "cohere2", "ernie4_5", "falcon", "gemma", "gemma2", "gemma3"),
    *("gemma3_text", "gemma3n", "gemma3n_text", "gemma4", "gemma4_text", "gpt2", "gpt_bigcode"),
    *("gpt_neo", "mpt", "openai-gpt", "opt", "smollm3", "starcoder2", "vaultgemma", "xglm"),
)
"""Dense families (`model_type`) whose files say nothing of a tied lm_head, since transformers
leaves out a family's default.
"""


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a dense decoder-only model.

    Attributes:
        hidden: D.
        layers, heads, kv_heads, head_dim: sizes of the attention.
        intermediate: width of the MLP's inner layer.
        vocab: V.
        gated: the MLP has a gate beside its up projection.
        tied: lm_head is the embedding.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    gated: bool = True
    tied: bool = False

    @classmethod
    def from_config(cls, raw: Mapping[str, Any]) -> ModelSizes:
        """From a transformers config.json. Raises ModelError if a size is missing, or the model is
        a mixture of experts.
        """
        # Vision-language models have a separate section with the sizes of their language model.
        text = {**raw, **(raw.get("text_config") or {})}
        if any(text.get(key) for key in ("num_local_experts", "num_experts", "n_routed_experts")):
            raise ModelError(
                "Mixtures of experts can't be planned.",
                given=text.get("model_type"),
                expected="a dense model",
                do="Measure a short run.",
            )
        # GPT-2 and its relatives use different names.
        hidden, layers, heads = (
            _first(text, *names)
            for names in (
                ("hidden_size", "n_embd"),
                ("num_hidden_layers", "n_layer"),
                ATTENTION_HEADS,
            )
        )
        return cls(
            hidden,
            layers,
            heads,
            # Missing in families older than grouped-query attention, which have as many as query
            # heads.
            int(text.get("num_key_value_heads") or heads),
            int(text.get("head_dim") or hidden // heads),
            # GPT-2 writes `n_inner: null` for its usual width, four times D.
            int(text.get("intermediate_size") or text.get("n_inner") or 4 * hidden),
            _first(text, "vocab_size"),
            text.get("model_type") not in WITHOUT_GATE,
            bool(text.get("tie_word_embeddings", text.get("model_type") in TIED_BY_DEFAULT)),
        )

    @property
    def parameters(self) -> int:
        """Weights of matrices and RMS norms; biases and learned positions (older families) are left
        out.
        """
        # Query and output are as wide as all heads, key and value as the shared heads.
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        mlp = (3 if self.gated else 2) * self.hidden * self.intermediate
        tables = (1 if self.tied else 2) * self.vocab * self.hidden
        return self.layers * (attention + mlp + 2 * self.hidden) + self.hidden + tables

    @property
    def product_parameters(self) -> int:
        """Weights that multiply a token in a forward pass: all but the embedding."""
        return self.parameters - (0 if self.tied else self.vocab * self.hidden)

    def layer_bytes(self, bfloat16: bool) -> int:
        """What a layer keeps per token for its backward pass: the inputs of norms, attention,
        products and the MLP's gate. With bfloat16 products each of them has its own copy.
        """
        # Queries, keys, values and the output product's input; then the MLP's gate, its activation,
        # the up projection and their product.
        inner = (
            2 * (self.heads + self.kv_heads) * self.head_dim
            + (4 if self.gated else 3) * self.intermediate
        )
        if bfloat16:
            return FLOAT32 * 4 * self.hidden + BFLOAT16 * (5 * self.hidden + inner)
        return FLOAT32 * (6 * self.hidden + inner)

    @property
    def cache_elements(self) -> int:
        """Size of the keys and values of one token."""
        return self.cache_elements_of_rank(1)

    def cache_elements_of_rank(self, ranks: int) -> int:
        """What each of so many tensor-parallel ranks has of them: at least one key head, which
        several have where there are more ranks than key heads.
        """
        return 2 * self.layers * max(1, self.kv_heads // ranks) * self.head_dim


def _first(values: Mapping[str, Any], *names: str) -> int:
    for name in names:
        if values.get(name):
            return int(values[name])
    raise ModelError(
        "The model's config.json lacks a size.",
        given=sorted(values)[:8],
        expected=" or ".join(names),
        do="Use a decoder-only model.",
    )
