"""`medusa-ppo plan`: who runs where, what moves in a step, and how much memory it takes, before
anything starts (no torch).

Counted: weights, gradients, optimizer states, keys and values, tables, queues, and what a
micro-batch keeps for its backward pass; for a companion on CPUs also the process itself. Not
counted: the memory of kernels, Python, torch and vLLM in all other processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from heads.heads_config import CPU_CHUNK, GPU_CHUNK, HeadsConfig
from medusa_ppo.config.companion_section import LOGITS_BYTES, MOST_OF_PIECES, REPLAY_DECAY
from medusa_ppo.config.engine_section import SERVER
from medusa_ppo.config.ppo_section import IN_TURN, SHARED
from medusa_ppo.config.run_config import RunConfig
from medusa_ppo.engines.gpu_room import CUT, heads_parameters
from medusa_ppo.engines.launch import cache_bytes, draft_vocabulary
from medusa_ppo.ppo.megatron.rank_places import ranks_of_engines, ranks_together
from medusa_ppo.ppo.role_memory import (
    ENGINE,
    LOOP,
    PARTS,
    RANK,
    RoleMemory,
    model_config,
    reward_sizes,
    role_memory,
)
from medusa_ppo.reports.store import without_secrets
from medusa_ppo.runtime.hardware import (
    BFLOAT16,
    FLOAT32,
    Choice,
    Hardware,
    ModelSizes,
    applied,
    choices,
)
from medusa_ppo.runtime.wording import size_text

# Weights, gradients and two moments, all float32.
ADAM_COPIES = 4
# Besides the heads in training, the companion keeps the running mean, the serving heads, their
# predecessors and the frozen control.
OTHER_HEADS = 4
# Per step: gradients that drafts add to one cell, and AdamW's temporaries for all parameters.
STEP_COPIES = 2
# Copies of a chunk's logits: the heads' own, the actor's if the loss reads them, and everything
# derived from them up to the gradient. Measured, like the numbers in `kept_states`.
LOGITS_COPIES, LOGITS_COPIES_WITH_ACTOR = 2, 4
# The same on a rank of Megatron; what top-p keeps is searched in float64 and int64.
RANK_COPIES, RANK_COPIES_WITH_TOP_P = 5, 11
# Resident bytes of a companion on a CPU without any tensor: Python, torch, Ray, their libraries.
PROCESS_BYTES = 380 * 2**20
CACHE = "keys and values"
BACKWARD = "what a micro-batch keeps for its backward pass"
LOGITS = "logits of a chunk, and what is derived from them"
ON_HOST = ", on the host"
"""Suffix of parts that stay in host memory even if the process has a GPU."""
LOOP_NAME, COMPANION = "PPO loop", "companion"
MANY = 4
"""As many engines are listed one by one."""
# An id (int64) and a log-prob (float32).
TOKEN_BYTES = 8 + 4
# Bytes of a row besides its state in the companion's queue (positions.py's own, without its torch).
ROW_BYTES = 24


def kept_states(heads: HeadsConfig) -> int:
    """What the heads' backward pass keeps per position, in states of the actor's width."""
    if not heads.needs_embedding:
        return 4 * heads.num_heads
    attention = heads.context_layers * (2 * heads.context + 2 * heads.feed_forward)
    copying = 6 + heads.copy_parts if heads.copies else 0
    return 6 + 12 * heads.num_heads + attention * (heads.context > 0) + copying


def companion_parts(
    config: RunConfig, heads: HeadsConfig, model: ModelSizes, gpus: bool, tokens: int
) -> dict[str, int]:
    """Memory of one process of the companion with batches of up to `tokens` response tokens. Of
    several workers each holds all heads, tables and batches, and takes its share of an optimizer
    step's positions.
    """
    section = config.companion
    copies = ADAM_COPIES + OTHER_HEADS + STEP_COPIES
    drafted = draft_vocabulary(config.engine, heads) or model.vocab
    # Before anything else the companion trains on the warm-up's tokens.
    most = max(_trained_tokens(config, model, tokens), config.warm_up_tokens)
    share = -(-most // (section.steps_of(most) * section.workers))
    rows = min(share, max(1, LOGITS_BYTES // (FLOAT32 * model.vocab)))
    logits = min(max(GPU_CHUNK if gpus else CPU_CHUNK, drafted), rows * drafted)
    reads_actor = section.loss.startswith("kl")
    tables = (1 + int(heads.needs_embedding)) * model.vocab * model.hidden
    parts = {
        f"heads, {copies} copies with optimizer and versions": (
            copies * FLOAT32 * heads_parameters(heads)
        ),
        "the actor's tables": FLOAT32 * tables,
        # Counted even where it is no copy: without a draft vocabulary and in the table's own dtype.
        "rows of lm_head used in products": BFLOAT16 * drafted * model.hidden,
        BACKWARD: (rows * kept_states(heads) * model.hidden * FLOAT32),
        LOGITS: ((LOGITS_COPIES_WITH_ACTOR if reads_actor else LOGITS_COPIES) * FLOAT32 * logits),
        f"waiting batches, at most{ON_HOST}": section.queue_bytes,
    }
    if section.replay_versions:
        parts[f"batches kept for replay, at most{ON_HOST}"] = section.replay_bytes
    return parts


def hidden_bytes(model: ModelSizes, tokens: int, element: int = FLOAT32) -> int:
    """Final hidden states, token ids and log-probs of this many response tokens, as sent to the
    companion.
    """
    return tokens * (model.hidden * element + TOKEN_BYTES)


TRANSFERS = {
    "file": "as a file in shared memory or Ray's store",
    "broadcast": "broadcast in buckets",
}


@dataclass(frozen=True)
class Process:
    """One row of the plan: a process, or several of the same kind.

    Attributes:
        name: what kind it is.
        count: how many there are.
        where: who starts it, and on which node.
        gpus: GPUs per process; below 1 a share of one; 0 on a machine without any.
        parts: what takes memory in each process, in bytes; on its GPU if it has one.
        guest: its GPUs are counted with those of the process that it shares them with.
        ranks: ranks of an engine: `gpus` are all of theirs, and `parts` those of each.
    """

    name: str
    count: int
    where: str
    gpus: float
    parts: dict[str, int]
    guest: bool = False
    ranks: int = 1

    @property
    def memory(self) -> int:
        """Bytes per process; of an engine of several ranks, per rank."""
        return sum(self.parts.values())

    @property
    def gpu_memory(self) -> int:
        """Bytes that each process has on its GPU, if it has one."""
        return sum(size for what, size in self.parts.items() if not what.endswith(ON_HOST))


@dataclass(frozen=True)
class Move:
    """Something that moves once in every PPO step: `count` copies of `size` bytes each."""

    what: str
    route: str
    size: int
    count: int = 1

    @property
    def total(self) -> int:
        return self.size * self.count


@dataclass(frozen=True)
class Plan:
    """Everything that `medusa-ppo plan` prints. `peaks`: the peak bytes of tensors in each phase,
    in the process that trains the actor; unknown for a Megatron actor. `roles`: for each kind of
    process that holds roles, their memory in each part of a step.
    """

    model: ModelSizes
    heads: HeadsConfig
    processes: tuple[Process, ...]
    moves: tuple[Move, ...]
    response_tokens: int
    hardware: Hardware
    choices: tuple[Choice, ...]
    peaks: dict[str, int]
    roles: tuple[RoleMemory, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def gpus(self) -> float:
        """GPUs requested from Ray, plus one for the PPO process, which requests none; a GPU that
        several processes take turns on counts once.
        """
        return sum(p.count * p.gpus for p in self.processes if not p.guest)

    @property
    def memory(self) -> int:
        return sum(p.count * p.ranks * p.memory for p in self.processes)


def make_plan(config: RunConfig, hardware: Hardware) -> Plan:
    """The plan of a run.

    Args:
        config: the run's configuration.
        hardware: what the machines have.

    Raises:
        ModelError: the model's sizes can't be read.
    """
    # First decide what depends on the hardware: everything below needs it.
    decided = tuple(choices(config, hardware))
    config = applied(config, decided)
    gpus = hardware.gpus > 0
    raw = model_config(config.model.path)
    model = ModelSizes.from_config(raw)
    heads = config.heads.sizes(model.hidden, model.vocab)
    drafting, *plain = _engines(config, model, heads, raw, gpus)
    companion = [_companion(config, model, heads, gpus)] if config.companion.enabled else []
    processes = [
        _ppo(config, model, gpus),
        *_ranks(config, model, gpus),
        drafting,
        *companion,
        *plain,
    ]
    tokens = _response_tokens(config)
    moves = tuple(_moves(config, model, heads, tokens))
    peaks = phase_peaks(config, model, gpus)
    warnings = [*_warnings(config, model, tokens), *_too_large(config, processes, hardware)]
    if not any("out of memory" in warning for warning in warnings):
        warnings += _too_large_together(config, processes, peaks, hardware)
    return Plan(
        model,
        heads,
        tuple(processes),
        moves,
        tokens,
        hardware,
        decided,
        peaks,
        _roles(config, model, drafting),
        tuple(warnings),
    )


def _roles(config: RunConfig, model: ModelSizes, engine: Process) -> tuple[RoleMemory, ...]:
    """The memory of roles by part of a step, with that of an engine that shares their device."""
    found = role_memory(config, model)
    if config.ppo.placement != SHARED:
        return found
    return tuple(replace(memory, engine=engine.gpu_memory) for memory in found)


def _ppo(config: RunConfig, model: ModelSizes, gpus: bool) -> Process:
    parts = _role_parts(config, model, LOOP)
    if config.actor.backend == "transformers":
        parts[BACKWARD] = kept_bytes(config, model)
        parts[LOGITS] = _chunk_bytes(config, model, gpus)
    # Engines of a pool, or ones that start late, read the file after the sync; so it is kept until
    # the next one.
    parts[f"actor's file, for engines that start late or restart{ON_HOST}"] = (
        _element(config) * model.parameters
    )
    if config.ppo.piece_prompts:
        # Half of the queue is the sample's.
        parts[f"states of pieces that were scored, at most{ON_HOST}"] = int(
            MOST_OF_PIECES / 2 * config.companion.queue_bytes
        )
    where = "the process that you start, on its node"
    shared = config.ppo.placement == SHARED
    alone = shared and config.actor.backend == "megatron"
    if shared and not alone:
        where += "; its device is an engine's too"
    return Process(
        LOOP_NAME,
        1,
        where,
        0.0 if alone else float(gpus),
        parts | _remembered(config),
        guest=shared,
    )


def _role_parts(config: RunConfig, model: ModelSizes, where: str) -> dict[str, int]:
    """The memory of a process's roles in the part of a step that takes the most; roles that wait
    are on the host then.
    """
    parts = dict[str, int]()
    for memory in role_memory(config, model):
        if memory.where == where:
            alone = "one role at a time, at most the " * (memory.placement in (IN_TURN, SHARED))
            parts |= {f"{alone}{role}": size for role, size in memory.most.items()}
            if memory.waiting:
                parts[f"roles that wait{ON_HOST}"] = memory.waiting
    return parts


def _micro_tokens(config: RunConfig) -> int:
    """Maximum prompt and response tokens in a micro-batch."""
    length = config.data.max_prompt_tokens + config.sampling.max_new_tokens
    tokens = (config.ppo.micro_batch_size or config.ppo.minibatch_size) * length
    # A sequence longer than the budget is a micro-batch by itself.
    return max(length, min(tokens, config.ppo.micro_batch_tokens or tokens))


def kept_bytes(config: RunConfig, model: ModelSizes) -> int:
    """Activations that a micro-batch keeps for its backward pass; with ppo.recompute, the inputs of
    all layers and one recomputed layer.
    """
    each = model.layer_bytes(config.model.dtype == "bfloat16")
    ends = 4 * FLOAT32 * model.hidden
    layers = (
        model.layers * FLOAT32 * model.hidden + each
        if config.ppo.recompute
        else model.layers * each
    )
    return _micro_tokens(config) * (layers + ends)


def _chunk_bytes(config: RunConfig, model: ModelSizes, gpus: bool, copies: int = 4) -> int:
    """Logits of a chunk, log-probs, probabilities, and the product of the last two. A rank's
    vocabulary is the part that it holds.
    """
    share = config.sampling.max_new_tokens / (
        config.data.max_prompt_tokens + config.sampling.max_new_tokens
    )
    rows = min(
        round(_micro_tokens(config) * share),
        max(1, (GPU_CHUNK if gpus else CPU_CHUNK) // model.vocab),
    )
    return copies * FLOAT32 * rows * model.vocab


def phase_peaks(config: RunConfig, model: ModelSizes, gpus: bool) -> dict[str, int]:
    """Peak bytes of tensors in the process that trains the actor: while a batch is scored, and in
    the update.
    """
    if config.actor.backend != "transformers":
        return {}
    (memory,) = role_memory(config, model)
    gradients = {role.role: role.gradients for role in memory.roles}
    standing = {
        phase: max(
            # Without gradients: they appear during the update, and are counted there.
            sum(memory.during(who, learns).values()) - learns * gradients.get(who, 0)
            for _, who, learns in PARTS
            if who in gradients and learns == (phase == "update")
        )
        for phase in ("score", "update")
    }
    # Matrix products in bfloat16 read a copy of the float32 weights.
    copies = BFLOAT16 * model.parameters if config.model.dtype == "bfloat16" else 0
    tokens = _micro_tokens(config)
    chunk = _chunk_bytes(config, model, gpus)
    passing = FLOAT32 * tokens * (model.intermediate + model.hidden)
    table = FLOAT32 * model.vocab * model.hidden
    scored = max(
        3 * passing + FLOAT32 * tokens * model.hidden, chunk + FLOAT32 * tokens * model.hidden
    )
    # Activations are freed as gradients appear.
    updated = max(
        kept_bytes(config, model) + max(passing, 3 * chunk // 4) + table, FLOAT32 * model.parameters
    )
    return {
        "score": standing["score"] + copies + scored,
        "update": standing["update"] + copies + updated,
    }


def _ranks(config: RunConfig, model: ModelSizes, gpus: bool) -> list[Process]:
    """The processes of a Megatron actor."""
    section = config.actor
    if section.backend != "megatron":
        return []
    parts = _role_parts(config, model, RANK)
    tokens = _micro_tokens(config) // section.context_parallel
    held = replace(model, vocab=-(-model.vocab // section.tensor_parallel))
    element = BFLOAT16 if config.model.dtype == "bfloat16" else FLOAT32
    parts["logits of a micro-batch, and their gradient"] = 2 * element * tokens * held.vocab
    cuts = config.sampling.top_p < 1
    parts[LOGITS] = _chunk_bytes(
        config, held, gpus, RANK_COPIES_WITH_TOP_P if cuts else RANK_COPIES
    )
    where = f"a Ray actor, {_place(section.resource, 1)}, {ranks_together(config)} together"
    return [Process("actor rank", section.ranks, where, float(gpus), parts)]


def _engines(
    config: RunConfig, model: ModelSizes, heads: HeadsConfig, raw: dict[str, Any], gpus: bool
) -> list[Process]:
    """The engines that the loop generates with, and the extra ones that a comparison starts."""
    section = config.engine
    ranks = section.ranks
    # Models with several parts keep the sizes of their language model in a section.
    text = {**raw, **(raw.get("text_config") or {})}
    # Ranks of other kinds have all of the weights, and sequences of their own. More ranks than key
    # heads hold copies of these.
    tensor, pipeline = (int(section.extra.get(f"{kind}_parallel_size", 1)) for kind in CUT)
    parts = {
        "weights": _element(config) * model.parameters // (tensor * pipeline),
        CACHE: cache_bytes(text, section) // (min(tensor, model.kv_heads) * pipeline),
    }
    if section.addresses:
        # An address may hold a password.
        where = f"running servers at {without_secrets(section.backend)}"
    elif section.backend == SERVER:
        where = "a vllm serve process on the PPO loop's node"
    elif guests := ranks_of_engines(config):
        where = f"a Ray actor; {_devices_of(guests)}"
    else:
        where = f"a Ray actor, {_place(section.resource, section.replicas)}"
    # Each rank of a tensor-parallel engine has its own GPU; only an engine of one rank can share.
    share = ((section.memory_fraction or 0.0) if ranks == 1 else float(ranks)) if gpus else 0.0
    guest = config.actor.backend == "megatron" and config.ppo.placement == SHARED
    if guest:
        share = float(ranks * gpus)
    several = f" of {ranks} ranks" * (ranks > 1)
    drafting = parts | {"heads": _element(config) * heads_parameters(heads)} | _remembered(config)
    found = [Process(f"{ENGINE}{several}", section.replicas, where, share, drafting, guest, ranks)]
    if config.report.compare_pairs:
        where += "; after the last step, for report.compare_pairs"
        plain = Process(f"plain {ENGINE}{several}", section.replicas, where, share, parts)
        found.append(replace(plain, ranks=ranks))
    return found


def _devices_of(shares: list[range]) -> str:
    """On which ranks' devices each of some engines is; of many, the first and the last."""
    said = [
        f"engine {index} on the device{'s' * (len(share) > 1)} of rank "
        + " and ".join(map(str, share))
        for index, share in enumerate(shares)
    ]
    return ", ".join(said) if len(said) <= MANY else f"{said[0]}, to {said[-1]}"


def _remembered(config: RunConfig) -> dict[str, int]:
    """The memory of earlier responses: all of it in each engine, and a copy in the loop, for
    checkpoints.
    """
    return (
        {f"earlier responses{ON_HOST}": config.engine.memory_bytes}
        if config.engine.memory_bytes
        else {}
    )


def _companion(config: RunConfig, model: ModelSizes, heads: HeadsConfig, gpus: bool) -> Process:
    section = config.companion
    workers = section.workers
    parts = companion_parts(config, heads, model, gpus, _response_tokens(config))
    if not gpus:
        # Freed blocks stay in the process (runtime/kept_memory.py), and micro-batches of other size
        # leave gaps between them: up to as much again as one of them takes.
        parts["freed memory, kept for the next micro-batch"] = parts[BACKWARD] + parts[LOGITS]
        parts["Python, torch and their libraries"] = PROCESS_BYTES
    where = f"a Ray actor, {_place(section.resource, workers)}"
    where += ", on the GPU only while it trains" if section.offload and gpus else ""
    name = COMPANION if workers == 1 else f"{COMPANION} worker"
    return Process(name, workers, where, (section.num_gpus or 0.0) if gpus else 0.0, parts)


def _place(resource: str | None, count: int) -> str:
    """Where Ray places a process, or all `count` of them at once."""
    node = f"on a node with the Ray resource {resource!r}" if resource else "on any node"
    return f"{node}; one placement group for all" if count > 1 else node


def _moves(config: RunConfig, model: ModelSizes, heads: HeadsConfig, tokens: int) -> list[Move]:
    engines = config.engine.replicas
    weights = _element(config) * model.parameters
    moves = [
        Move("responses and log-probs", "engines to PPO loop", TOKEN_BYTES * tokens),
        Move(
            "actor weights",
            f"PPO loop to each engine, {TRANSFERS[config.engine.transfer]}",
            weights,
            engines,
        ),
    ]
    if config.ppo.placement in (IN_TURN, SHARED):
        moves += turn_moves(config, model)
    if config.actor.backend == "megatron":
        moves.append(Move("actor weights", "actor ranks to PPO loop", weights))
        if config.companion.enabled:
            moves.append(
                Move(
                    "hidden states", "actor ranks to PPO loop", _batch_bytes(config, model, tokens)
                )
            )
    if config.companion.enabled:
        workers = config.companion.workers
        sizes = FLOAT32 * heads_parameters(heads)
        to = "PPO loop to companion" if workers == 1 else "PPO loop to each companion worker"
        moves += [
            Move("hidden states", to, _batch_bytes(config, model, tokens), workers),
            Move(
                "rows of lm_head" + " and embedding" * heads.needs_embedding + ", at most",
                to,
                _table_bytes(config, model, heads, tokens),
                workers,
            ),
            Move("heads, when there are better ones", "companion to each engine", sizes, engines),
        ]
        if workers > 1:
            moves.append(
                Move(
                    "gradients, summed",
                    "between companion workers",
                    sizes,
                    _sums(config, model, tokens),
                )
            )
    return moves


def turn_moves(config: RunConfig, model: ModelSizes) -> list[Move]:
    """Bytes copied in a step when roles take turns. Each role moves in to score, once per piece;
    actor and critic also move in to learn, and out again with their new weights.
    """
    ppo = config.ppo
    pieces = -(-ppo.prompts_per_step // ppo.piece_prompts) if ppo.piece_prompts else 1
    found = []
    for memory in role_memory(config, model):
        judges = sum(role.weights for role in memory.roles if not role.gradients)
        weights = sum(role.weights for role in memory.roles if role.gradients)
        learned = weights + sum(role.kept for role in memory.roles)
        each = " of each rank" * (memory.where == RANK)
        count = config.actor.ranks if each else 1
        found += [
            Move(
                "all roles' weights, and what actor and critic learn with",
                f"host memory to the device{each}",
                pieces * (judges + weights) + learned,
                count,
            ),
            Move(
                "what actor and critic have learned",
                f"the device{each} to host memory",
                learned,
                count,
            ),
        ]
    return found


def _element(config: RunConfig) -> int:
    """Bytes per weight in the engine."""
    return FLOAT32 if config.engine.dtype == "float32" else BFLOAT16


def _state_element(config: RunConfig) -> int:
    """Bytes of one number of the actor's states and tables. A transformers actor keeps float32
    weights and gives float32 states, also where its products are bfloat16; a Megatron actor is a
    bfloat16 copy then.
    """
    copies = config.actor.backend == "megatron" and config.model.dtype == "bfloat16"
    return BFLOAT16 if copies else FLOAT32


def _table_bytes(config: RunConfig, model: ModelSizes, heads: HeadsConfig, tokens: int) -> int:
    """Maximum bytes of table rows sent with a batch: lm_head's rows for draft tokens and for the
    batch's own tokens, and the embedding's rows for the latter. A tied table is sent once. A
    sample's own tokens include the text before each of its blocks, so they may be any of the step.
    """
    prompts = config.ppo.prompts_per_step * config.data.max_prompt_tokens
    own = min(model.vocab, tokens + prompts)
    drafted = draft_vocabulary(config.engine, heads) or model.vocab
    lm_head = min(model.vocab, drafted + own) if heads.lm_head == "shared" else 0
    embedding = own if heads.needs_embedding and not (model.tied and lm_head) else 0
    return _state_element(config) * model.hidden * (lm_head + embedding)


def _response_tokens(config: RunConfig) -> int:
    """The most that a step's responses have together."""
    sampling = config.sampling
    return config.ppo.prompts_per_step * sampling.responses_per_prompt * sampling.max_new_tokens


def _kept_tokens(config: RunConfig, model: ModelSizes, tokens: int) -> int:
    """How many of these response tokens the companion gets, at most, with their hidden states."""
    # A batch may fill half of the queue: the next one comes while it is in training.
    rows = config.companion.queue_bytes // 2 // (model.hidden * _state_element(config) + ROW_BYTES)
    # Heads learn from the rows that follow, so even the smallest sample has one for each head.
    return min(tokens, max(rows, config.heads.num_heads + 1))


def _trained_tokens(config: RunConfig, model: ModelSizes, tokens: int) -> int:
    """Positions of a pass over a step's batch, at most, with those of replayed ones beside it."""
    replayed = sum(REPLAY_DECAY**age for age in range(config.companion.replay_versions + 1))
    return round(_kept_tokens(config, model, tokens) * replayed)


def _batch_bytes(config: RunConfig, model: ModelSizes, tokens: int) -> int:
    """Maximum bytes of a rollout batch sent to the companion; too large a batch is sampled."""
    kept = _kept_tokens(config, model, tokens)
    # A sample has a weight for each of its rows.
    return hidden_bytes(model, kept, _state_element(config)) + (kept < tokens) * kept * FLOAT32


def _sums(config: RunConfig, model: ModelSizes, tokens: int) -> int:
    """How many copies of the gradients move between the companion's workers, at most: to sum them,
    each optimizer step sends them twice between all but one of the workers.
    """
    section = config.companion
    steps = section.epochs * section.steps_of(_trained_tokens(config, model, tokens))
    return 2 * (section.workers - 1) * steps


def _warnings(config: RunConfig, model: ModelSizes, tokens: int) -> list[str]:
    """Warnings about problems that would otherwise go unnoticed."""
    batch = _batch_bytes(config, model, tokens)
    room = config.companion.queue_bytes
    too_large = (
        f"The smallest sample of a step's hidden states takes {size_text(batch)}, more than"
        f" companion.queue_bytes={room}: such batches are dropped."
    )
    found = []
    if config.companion.enabled and batch > room:
        found.append(f"{too_large} Set companion.queue_bytes={2 * batch} or more.")
    if config.ppo.judged_by_model and reward_sizes(config) is None:
        found.append(
            f"The sizes of the reward model {config.ppo.reward} are unknown, so its memory is not"
            " counted: add it yourself."
        )
    return found


def _too_large(config: RunConfig, processes: list[Process], hardware: Hardware) -> Iterator[str]:
    """Warnings about processes that don't fit on a GPU by themselves."""
    size = hardware.gpu_bytes
    for process in processes:
        need = process.gpu_memory
        room = size
        of_it = ""
        if ENGINE in process.name:
            # vLLM takes as many keys and values as its share of the GPU leaves room for.
            need -= process.parts[CACHE]
            room = _reserved(config, size) or size
            of_it = f" without {CACHE}"
        if size and process.gpus and need > room:
            yield (
                f"Each {process.name} takes {size_text(need)}{of_it} on its GPU, where it has"
                f" {size_text(room)}: it will run out of memory."
            )


def _too_large_together(
    config: RunConfig, processes: list[Process], peaks: dict[str, int], hardware: Hardware
) -> Iterator[str]:
    """A warning about processes that share a machine's only GPU and don't fit on it together."""
    if not hardware.gpu_bytes or hardware.gpus != 1 or hardware.elsewhere:
        return
    taken = {}
    for process in processes:
        # An engine for a comparison comes after the last step, and the run may do without it.
        if process.gpus and ENGINE not in process.name:
            taken[process.name] = process.count * process.gpu_memory
    if peaks and LOOP_NAME in taken:
        taken[LOOP_NAME] = max(peaks.values())
    engines = config.engine.replicas * _reserved(config, hardware.gpu_bytes)
    need = sum(taken.values()) + engines
    if config.ppo.placement == SHARED:  # The engine sleeps while roles compute, and they leave.
        roles = sum(size for name, size in taken.items() if not name.startswith(COMPANION))
        need -= min(engines, roles)
    if engines:
        taken["engine" + "s" * (config.engine.replicas > 1)] = engines
    if need > hardware.gpu_bytes:
        parts = ", ".join(f"{name} {size_text(size)}" for name, size in taken.items())
        yield (
            f"All processes are on the only GPU, where they take {size_text(need)} at once"
            f" ({parts}), and it has {size_text(hardware.gpu_bytes)}: they will run out of memory."
            " Lower engine.memory_fraction, set ppo.placement=shared with engine.sleep_level=1, or"
            " use a smaller model."
        )


def _reserved(config: RunConfig, gpu_bytes: int) -> int:
    """Bytes that vLLM reserves on each of an engine's GPUs; 0 for running servers."""
    section = config.engine
    return 0 if section.addresses else round((section.memory_fraction or 0.0) * gpu_bytes)


def lines(plan: Plan) -> list[str]:
    """The plan as text."""
    model = plan.model
    heads = plan.heads
    out = [
        (
            f"Actor      {model.parameters / 1e6:,.1f} M parameters (hidden {model.hidden},"
            f" {model.layers} layers, vocabulary {model.vocab})"
        ),
        (
            f"Heads      {heads.num_heads} x {heads.kind}, {heads_parameters(heads) / 1e6:,.2f} M"
            " parameters"
        ),
        f"Step       up to {plan.response_tokens:,} response tokens",
        "",
        "Who runs where",
    ]
    for process in plan.processes:
        gpus = f"{process.gpus:g} GPU" if process.gpus else "no GPU"
        each = " a rank" if process.ranks > 1 else " each" if process.count > 1 else ""
        memory = size_text(process.memory) + each
        out.append(f"  {process.count} x {process.name:<18} {gpus:<8} {memory:<16} {process.where}")
        out += [f"      {size_text(size):>12}  {what}" for what, size in process.parts.items()]
    for held in plan.roles:
        when = f"when (ppo.placement={held.placement})"
        out += ["", f"Who has the memory of {held.where}, {when}"]
        for what, found in held.parts:
            roles = ", ".join(f"{role} {size_text(size)}" for role, size in found.items())
            out.append(f"  {what:<20} {size_text(sum(found.values())):<10} {roles}")
    if plan.peaks:
        phases = ", ".join(f"{phase} {size_text(size)}" for phase, size in plan.peaks.items())
        out += ["", f"The PPO loop's tensors, at most, by phase: {phases}"]
    out += ["", "What moves in every step"]
    for move in plan.moves:
        copies = f" x {move.count}" if move.count > 1 else ""
        out.append(f"  {size_text(move.size) + copies:<18} {move.what}: {move.route}")
    out += ["", f"Decided by the hardware: {plan.hardware.found}"]
    out += [f"  {choice.key} = {choice.value}: {choice.why}" for choice in plan.choices]
    shared = any(process.guest for process in plan.processes)
    which = "shared ones counted once" if shared else "the PPO loop's one included"
    asked = f"{plan.gpus:g} GPUs ({which})" if plan.gpus else "no GPU"
    out += [f"\nWarning: {warning}" for warning in plan.warnings]
    out += [
        "",
        (
            f"In all {size_text(plan.memory)} and {asked}, plus what Python, torch and vLLM "
            "themselves need."
        ),
    ]
    return out
