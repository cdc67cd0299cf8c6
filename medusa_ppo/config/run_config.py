"""The settings of a run: typed, with every default in this one place (no torch). What reads files
stands in `config_file`.

`null` is the one way to say "none" or "by itself"; what follows from the hardware then is decided
in `medusa_ppo.runtime.hardware`. Fields that contradict each other fail at load.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from heads.errors import ConfigError
from heads.heads_config import HeadsConfig
from medusa_ppo.config.config_file import (
    Count,
    Section,
    Text,
    apply_override,
    as_config_error,
    keys_of,
    located,
    read_file,
    refuse_old_keys,
    unknown,
)
from medusa_ppo.config.ppo_config import PPOConfig, ppo_contradictions

TRACKERS = ("tensorboard", "wandb", "trackio", "ray")
EMBEDDED_ACTORS = ("demo", "demo-grown")
"""Names of actors that are trained on first use."""
VISION_FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
"""Vision-language models (`model_type` in config.json) that can be an actor and see images."""
COLOCATED, SERVER = "colocated", "server"
HOLDOUT_SHARE = 0.2
"""Share of each batch's responses kept out of training, to judge candidates on."""


class ModelConfig(Section):
    """The actor and what the critic starts from."""

    path: Text = "demo"
    """Folder or hub name of a transformers causal LM; `demo`: the embedded actor, `demo-grown`: the
    same, as slow as 20M parameters.
    """
    critic_path: Text | None = None
    """Folder or hub name that the critic starts from, or `demo`; null: the actor's own weights."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Dtype of products in the PPO update; null: bfloat16 on a GPU that has it, else float32.
    Weights, sums and optimizer stay float32 (a Megatron actor multiplies with bfloat16 copies of
    its weights).
    """


class ActorConfig(Section):
    """What trains the actor, and on how many processes."""

    backend: Literal["transformers", "megatron"] = "transformers"
    """`transformers`: in the loop's own process; `megatron`: megatron-core, on processes that Ray
    starts.
    """
    tensor_parallel: Count = 1
    """Ranks that share each layer (backend `megatron`)."""
    pipeline_parallel: Count = 1
    """Ranks that the layers are spread over (backend `megatron`)."""
    context_parallel: Count = 1
    """Ranks that share the tokens of each sequence (backend `megatron`)."""
    data_parallel: Count = 1
    """Copies of the whole, each with its share of the sequences (backend `megatron`)."""
    sequence_parallel: bool = False
    """Tensor-parallel ranks share the tokens, too, where they would all compute the same (backend
    `megatron`).
    """
    distributed_optimizer: bool = False
    """Each copy keeps moments and float32 weights of its share of the parameters only (backend
    `megatron`).
    """
    resource: Text | None = None
    """Ray resource of the nodes for the actor's ranks (`ray start --resources`); null: any node."""
    imports: Text | None = None
    """Python module that each rank imports before it builds its part, e.g. to replace layers of
    Megatron's; null: none.
    """

    @property
    def ranks(self) -> int:
        return (
            self.tensor_parallel
            * self.pipeline_parallel
            * self.context_parallel
            * self.data_parallel
        )


class DataConfig(Section):
    """Where prompts and reference answers come from."""

    path: Text = "demo"
    """Local JSONL, Parquet, CSV or text file, or a hub name; `demo` is the generated arithmetic
    task.
    """
    split: Text = "train"
    """Split of a hub dataset; `train[:1000]` takes the first thousand rows, of a file as well."""
    template: Text = "{prompt}"
    """The prompt, with the row's fields in braces, e.g. 'Question: {question}\\nAnswer:'."""
    answer_column: Text | None = "answer"
    """Column with the reference answer that the reward reads; null: none. A reward model reads
    none, so a missing column is none then.
    """
    images: Text | None = None
    """Column with each row's image, or a list of them: paths (from the data file's folder), or
    files' bytes as `datasets` has them. For a vision-language actor; the template's text is then a
    user's message in the model's chat template. null: none.
    """
    max_prompt_tokens: Count = 256
    """Longer prompts are left out and counted; an image's tokens count too."""
    eval_path: Text | None = None
    """Where the prompts of the evaluation come from, as `path`; null: the same."""
    eval_split: Text = "test"
    """Split of the evaluation (with ppo.eval_every)."""
    ptx_path: Text | None = None
    """Texts to go on learning by heart beside PPO (with ppo.ptx_coefficient): a column `text`, or a
    text file; null: none.
    """


class SamplingConfig(Section):
    """How rollouts are sampled."""

    temperature: float = Field(1.0, gt=0)
    """Sampling temperature of the rollouts."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus mass; 1: off."""
    top_k: Count | None = None
    """Sample from the k likeliest tokens; null: from all."""
    max_new_tokens: Count = 96
    """Longest response, in tokens."""
    responses_per_prompt: Count = 4
    """Responses sampled for each prompt."""


class EngineConfig(Section):
    """vLLM, and how it drafts."""

    backend: Text = COLOCATED
    """`colocated`: vLLM in a Ray actor; `server`: `vllm serve` on this node, started by us; or
    running servers' addresses, with commas.
    """
    runner: Literal["v1", "v2"] = "v1"
    """vLLM's model runner where heads draft; `v2` (vLLM 0.29 or 0.32, never on a GPU) takes none of
    the four keys that say v1 below.
    """
    replicas: Count = 1
    """Engines that share the rollouts; each takes the threads, memory and GPUs that this section
    names.
    """
    resource: Text | None = None
    """Ray resource of the nodes for engines (`ray start --resources`); null: any node (backend
    `colocated` only).
    """
    dtype: Literal["float32", "bfloat16"] | None = None
    """Dtype of the engine's copy of the actor; null: as model.dtype."""
    transfer: Literal["file", "broadcast"] = "file"
    """How engines get a new actor: as a `file`, or by `broadcast` in buckets to all at once (NCCL
    or gloo; backend `colocated` only).
    """
    max_num_seqs: Count = 32
    """Most sequences that run at once."""
    max_model_len: int | None = Field(None, ge=8)
    """Longest prompt plus response, in tokens; null: what data and sampling allow together (512
    where another loop brings the prompts).
    """
    memory_fraction: float | None = Field(None, gt=0, le=1)
    """Share of the GPU for the engine; null: 0.35 where one engine and PPO have one GPU, else 0.9
    (CPU build: what it needs).
    """
    enforce_eager: bool | None = None
    """Skip torch.compile and CUDA graphs: quick start, slower steps; null: on a CPU, and not on a
    GPU.
    """
    sleep_level: Literal[1, 2] | None = None
    """Let the engine sleep while PPO scores and updates: 1 moves its weights to the host, 2 throws
    them away; null: it stays awake.
    """
    threads: Count | None = None
    """CPU threads of the engine (CPU build); null: all cores, shared among the replicas."""
    num_drafts: int | None = Field(None, ge=0)
    """Draft tokens per step; null: as many as there are heads."""
    draft_temperature: float = Field(1.0, ge=0)
    """0: one-hot drafts; above: drafts sampled at this temperature times the request's and each
    head's own. Both are lossless.
    """
    choose_drafts: bool = False
    """Choose the number of drafts (up to num_drafts) for each step from measured costs and
    acceptance (runner v1).
    """
    draft_vocab: int | None = Field(None, ge=0)
    """Draft from so many of the most frequent tokens seen so far; 0: all; null: 8,192 of 32,768 or
    more (lm_head shared, runner v1).
    """
    memory_bytes: int | None = Field(None, ge=0)
    """Bytes of earlier responses kept by prompt, which sampled drafts are also drawn from (runner
    v1); null or 0: none.
    """
    stop_below: float | None = Field(None, gt=0, lt=1)
    """A run of sampled drafts ends before one whose chance to be accepted is estimated below this
    (runner v1); null: never.
    """
    extra: dict[str, Any] = Field(default_factory=dict)
    """More keyword arguments for vLLM's engine, passed on as they are."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """Of running servers; none where the engines are started."""
        return (
            ()
            if self.backend in (COLOCATED, SERVER)
            else tuple(part.strip() for part in self.backend.split(","))
        )

    @field_validator("backend")
    @classmethod
    def _known(cls, backend: str) -> str:
        if backend not in (COLOCATED, SERVER) and not all(
            part.strip().startswith(("http://", "https://")) for part in backend.split(",")
        ):
            raise unknown(
                "Unknown engine.backend.", backend, (COLOCATED, SERVER, "http://HOST:PORT")
            )
        return backend


class HeadsSection(Section):
    """The heads that a run starts with."""

    path: Text | None = None
    """Native heads directory to start from; null: start at zero (every head equals lm_head)."""
    kind: Literal["medusa", "hydra"] = "hydra"
    """What a head reads: the hidden state alone (`medusa`), or also every token sampled or drafted
    since (`hydra`). Set `medusa` only to export the heads to programs that know nothing else.
    """
    num_heads: Count = 4
    """K, the number of heads."""
    context: int = Field(16, ge=0)
    """Last positions of the response that heads of kind `hydra` attend to, beside the state that
    they stand at; 0: none.
    """
    context_layers: Count = 1
    """Attentions over these positions, one after the other. Two accept a little more and cost a
    little more in each drafting call.
    """
    feed_forward: int = Field(2, ge=0)
    """Inner width of the feed-forward layer after each of these attentions, in multiples of the
    hidden size; 0: none.
    """
    cell: Count = 3
    """Width of the state that the heads of kind `hydra` hand on from draft to draft, in multiples
    of the hidden size.
    """
    copy_parts: int = Field(4, ge=0)
    """Parts of the attention that copies what followed the last tokens elsewhere in the prompt and
    the response; 0: nothing is copied. More parts look for more kinds of matches.
    """
    lm_head: Literal["shared", "own"] = "shared"
    """`shared`: the actor's lm_head, frozen; `own`: one trainable lm_head per head."""

    def sizes(self, hidden: int, vocab: int) -> HeadsConfig:
        """What new heads for an actor of this width and vocabulary are."""
        if self.kind != "hydra" or not self.context:
            return HeadsConfig(hidden, vocab, self.num_heads, self.kind, lm_head=self.lm_head)
        return HeadsConfig(
            hidden,
            vocab,
            self.num_heads,
            self.kind,
            lm_head=self.lm_head,
            mlp_ratio=self.cell,
            context=self.context,
            context_layers=self.context_layers,
            feed_forward=self.feed_forward,
            copy_parts=self.copy_parts,
        )


class CompanionConfig(Section):
    """How the heads are trained beside PPO."""

    enabled: bool = True
    """Train the heads while PPO runs."""
    on_error: Literal["raise", "disable"] = "disable"
    """What a failed companion does to PPO: `disable` goes on with the serving heads."""
    loss: Literal["ce", "tv", "ce_tv", "kl", "kl_tv"] = "kl_tv"
    """Loss of the heads."""
    learning_rate: float = Field(2e-3, gt=0)
    """AdamW step size."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Dtype of its products; null: bfloat16 on a GPU or CPU that has it, else float32. Weights,
    sums and optimizer stay float32.
    """
    batch_positions: Count = 2048
    """Positions per optimizer step, of all workers together."""
    epochs: Count = 2
    """Most passes over each rollout batch; as many are made as gain more seconds than they lose
    (all with `wait` or ppo.staleness).
    """
    position_share: float = Field(1.0, gt=0, le=1)
    """Share of the positions of each batch that is trained on, drawn at random in blocks."""
    queue_bytes: Count = 2 * 1024**3
    """Byte budget of batches on their way, waiting and in training together (and twice as much of
    those kept for replay). Of a batch that is more than half of it a sample is taken; when it is
    full the oldest that waits goes and is counted.
    """
    wait: bool = False
    """Wait for the companion before each generation: repeatable, also after --resume, but its time
    is no longer hidden.
    """
    replay_versions: int = Field(0, ge=0)
    """Policy versions for which a batch is trained on again beside newer ones, by half as much with
    each.
    """
    gate_confidence: float = Field(0.9, gt=0.5, lt=1)
    """How sure (one-sided) a candidate must be better on the holdout than the serving heads before
    it is published.
    """
    upper_mark_every: Count | None = None
    """Batches between two upper marks: heads fitted on and on to that very batch, the most it could
    give on its holdout; null: never.
    """
    cores: tuple[int, ...] | None = None
    """CPU cores that each worker is pinned to, a thread on each; null: any, with threads for a
    quarter of them (all with `resource`).
    """
    num_gpus: float | None = Field(None, ge=0)
    """GPUs of each worker; null: a tenth, where so much is free. A single worker with a share of
    one leaves it between batches.
    """
    workers: Count = 1
    """Processes that share each batch and every optimizer step; the heads come out the same."""
    resource: Text | None = None
    """Ray resource of the nodes for the companion (`ray start --resources`); null: any node."""

    @property
    def offload(self) -> bool:
        """A companion that has a share of a GPU leaves it to others between batches; several
        workers keep their place.
        """
        return self.workers == 1 and 0 < (self.num_gpus or 0) < 1

    @property
    def replay_bytes(self) -> int:
        """Byte budget of the batches kept for replay."""
        return 2 * self.queue_bytes

    @property
    def saves_replay(self) -> bool:
        """Batches kept for replay are part of the saved state: a run that waits is one that must
        repeat to the bit.
        """
        return self.wait and self.workers == 1


class ReportConfig(Section):
    """What is measured besides."""

    compare_pairs: Count | None = None
    """After the last step, so many pairs: rollouts and PPO steps with the plugin, and without it
    (an engine at vLLM's defaults).
    """
    speed_every: Count | None = None
    """Every n-th step the same prompts are also generated without drafting, in turn, by the same
    engine, and timed; null: never.
    """
    speed_prompts: Count | None = None
    """Prompts of such a pair; null: the step's own."""
    trackers: tuple[str, ...] = ()
    """Where each step's figures go beside metrics.jsonl: any of tensorboard, wandb, trackio, ray
    (Prometheus).
    """
    project: str = "medusa-ppo"
    """Project under which wandb and trackio show the run."""
    keep_rollouts: Count | None = None
    """Write the rollouts of the last n steps to RUN/rollouts, for `medusa-ppo train --data
    RUN/rollouts`; null: none.
    """

    @field_validator("trackers")
    @classmethod
    def _known(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if name not in TRACKERS:
                raise unknown("Unknown tracker in report.trackers.", name, TRACKERS)
        return tuple(dict.fromkeys(names))


class RunConfig(Section):
    """Everything that `medusa-ppo ppo` reads."""

    name: Text = "run"
    """Name of the run; its files go to OUT/NAME."""
    out: Text = "runs"
    """Folder of all runs."""
    seed: int = 0
    """Seed of everything random."""
    model: ModelConfig = Field(default_factory=ModelConfig)
    actor: ActorConfig = Field(default_factory=ActorConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    engine: EngineConfig = Field(default_factory=EngineConfig)
    heads: HeadsSection = Field(default_factory=HeadsSection)
    companion: CompanionConfig = Field(default_factory=CompanionConfig)
    ppo: PPOConfig = Field(default_factory=PPOConfig)
    report: ReportConfig = Field(default_factory=ReportConfig)

    @field_validator("name")
    @classmethod
    def _inside(cls, name: str) -> str:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            do = "Name the run, and the folder that it lies in with out=FOLDER."
            raise ConfigError(
                "The run would lie outside of the folder of all runs.",
                given=f"name={name}",
                expected="a name",
                do=do,
            )
        return name

    @property
    def run_dir(self) -> Path:
        return Path(self.out) / self.name

    @property
    def must_pay(self) -> bool:
        """How much the companion trains follows from measured seconds: not where the loop waits for
        it, since no run repeats them, nor where the engine writes ahead, since they are booked one
        after the other.
        """
        return not (self.companion.wait or self.ppo.staleness)

    @model_validator(mode="after")
    def _fields_agree(self) -> RunConfig:
        for problem, keys, expected, do in (*_contradictions(self), *ppo_contradictions(self)):
            values = [
                f"{key}={getattr(getattr(self, section), name)}"
                for key in keys
                for section, name in [key.split(".")]
            ]
            raise ConfigError(problem, given=", ".join(values), expected=expected, do=do)
        return self


def _contradictions(config: RunConfig) -> Iterator[tuple[str, tuple[str, ...], str, str]]:
    """Fields that contradict each other, at load and not at step 300: the problem, their keys, what
    is expected, what to do.
    """
    engine = config.engine
    heads = config.heads
    ppo = config.ppo
    megatron = config.actor.backend == "megatron"
    if engine.num_drafts is not None and engine.num_drafts > heads.num_heads:
        keys: tuple[str, ...] = ("engine.num_drafts", "heads.num_heads")
        yield (
            "More draft tokens than heads.",
            keys,
            "engine.num_drafts <= heads.num_heads",
            "Train more heads or draft fewer tokens.",
        )
    if (engine.memory_bytes or engine.stop_below) and not engine.draft_temperature:
        keys = ("engine.memory_bytes", "engine.stop_below", "engine.draft_temperature")
        do = "Set the last above 0, or the others to null."
        yield (
            "Only sampled drafts know a memory, or an end by their own chances.",
            keys,
            "sampled drafts",
            do,
        )
    if engine.stop_below and engine.choose_drafts:
        keys = ("engine.stop_below", "engine.choose_drafts")
        yield (
            "What k drafts cost is not seen where each request has its own number.",
            keys,
            "one of the two",
            "Leave one out.",
        )
    need = config.data.max_prompt_tokens + config.sampling.max_new_tokens
    ours = config.model_fields_set & {
        "data",
        "sampling",
        "ppo",
    }  # Another loop brings its own prompts, and sets none of them.
    if ours and engine.max_model_len is not None and need > engine.max_model_len:
        keys = ("data.max_prompt_tokens", "sampling.max_new_tokens")
        do = "Raise engine.max_model_len, leave it out, or shorten prompts or responses."
        yield (
            "Prompts and responses do not fit into the engine.",
            keys,
            f"together <= engine.max_model_len = {engine.max_model_len}",
            do,
        )
    micro = ppo.micro_batch_size or ppo.minibatch_size
    if ppo.minibatch_size % micro and micro < ppo.minibatch_size:
        keys = ("ppo.minibatch_size", "ppo.micro_batch_size")
        yield (
            "A minibatch must be made of whole micro batches.",
            keys,
            "the first divisible by the second",
            "Change one of the two.",
        )
    if not megatron and config.actor.ranks > 1:
        keys = (
            "actor.backend",
            "actor.tensor_parallel",
            "actor.pipeline_parallel",
            "actor.context_parallel",
            "actor.data_parallel",
        )
        do = "Set actor.backend=megatron, or all four parallel sizes to 1."
        yield "The backend transformers trains in one process.", keys, "actor.backend=megatron", do
    if config.actor.sequence_parallel and config.actor.tensor_parallel == 1:
        keys = ("actor.sequence_parallel", "actor.tensor_parallel")
        do = "Raise the second, or leave the first out."
        yield (
            "Tokens are shared by the ranks that share a layer.",
            keys,
            "actor.tensor_parallel above 1",
            do,
        )
    if config.actor.context_parallel > 1 and (config.sampling.top_k or config.sampling.top_p < 1):
        keys = ("actor.context_parallel", "sampling.top_k", "sampling.top_p")
        do = "Set actor.context_parallel=1, or sample from all tokens."
        yield (
            "Ranks share a sequence otherwise in each pass, and forget which tokens a cut left.",
            keys,
            "one of the two",
            do,
        )
    if config.actor.distributed_optimizer and not megatron:
        keys = ("actor.distributed_optimizer", "actor.backend")
        do = "Set actor.backend=megatron, or leave the first out."
        yield (
            "One process has nobody to share its optimizer with.",
            keys,
            "actor.backend=megatron",
            do,
        )
    if config.companion.workers > 1 and config.companion.position_share < 1:
        keys = ("companion.workers", "companion.position_share")
        problem = (
            "A companion that trains on a share of the positions has one worker only: others have"
            " only a part of each batch."
        )
        yield (
            problem,
            keys,
            "companion.workers=1 or companion.position_share=1",
            "Change one of the two.",
        )
    if engine.sleep_level and engine.backend != COLOCATED:
        keys = ("engine.sleep_level", "engine.backend")
        do = "Set engine.sleep_level=null or engine.backend=colocated."
        yield "Only colocated engines can sleep.", keys, "engine.backend=colocated", do
    if engine.transfer == "broadcast" and (
        engine.backend != COLOCATED or int(engine.extra.get("data_parallel_size", 1)) > 1
    ):
        keys = ("engine.transfer", "engine.backend", "engine.extra")
        do = "Set engine.transfer=file, or engine.backend=colocated with engine.replicas."
        yield (
            "The actor can't be broadcast to these engines.",
            keys,
            "engine.backend=colocated, no data_parallel_size above 1",
            do,
        )
    if engine.addresses and len(engine.addresses) != engine.replicas:
        keys = ("engine.backend", "engine.replicas")
        yield (
            "Each engine needs an address.",
            keys,
            "as many addresses as replicas, with commas between",
            "Correct one of the two.",
        )
    if config.report.compare_pairs and engine.addresses:
        problem = (
            "A run that is compared starts an engine without heads of its own, and can't do so at"
            " your server."
        )
        do = "Set report.compare_pairs=null, or let the engine be started."
        yield (
            problem,
            ("report.compare_pairs", "engine.backend"),
            "engine.backend=colocated or server",
            do,
        )


def load_config(
    path: str | os.PathLike[str] | None = None, overrides: Sequence[str] = ()
) -> RunConfig:
    """Read a preset or a YAML file with what it extends, apply `key=value` overrides (dotted keys),
    and check the result.

    Raises:
        ConfigError: unknown key, wrong type, contradiction, unreadable file.
    """
    values = {} if path is None else read_file(located(os.fspath(path), Path()).expanduser())
    for pair in overrides:
        apply_override(values, pair, RunConfig)
    return build_config(
        {"ppo": {}} | values
    )  # What is read from a file or a command line is held to our loop's rules.


def build_config(values: Mapping[str, Any]) -> RunConfig:
    """Check a nested mapping and turn it into a RunConfig. Raises ConfigError."""
    refuse_old_keys(values)
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        raise as_config_error(error, RunConfig) from None


def known_keys() -> list[str]:
    """All dotted keys, in order."""
    return keys_of(RunConfig)
