"""The configuration of a run: typed, with every default in this one place (no torch).

A YAML file holds only what differs from the defaults; `key=value` pairs from the command line come on top.
An unknown key is an error that names the nearest valid one; fields that contradict each other fail at load.
"""

from __future__ import annotations

import difflib
import os
import sys
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from heads.errors import ConfigError

MAX_SUGGESTIONS = 1
TEACHER_LOSSES = ("kl", "kl_tv")  # They read the actor's own distribution.
TRACKERS = ("tensorboard", "wandb", "trackio", "ray")
EMBEDDED_ACTORS = ("demo", "demo-grown")
"""Names of actors that are trained on first use."""
Layout = Literal["pack", "spread", "strict_pack", "strict_spread"]


class Section(BaseModel):
    """Base of all sections: frozen, no unknown keys, field docstrings become descriptions."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=())


class ModelConfig(Section):
    """The actor and what the critic starts from."""

    path: str = "demo"
    """Folder or hub name of a transformers causal LM; `demo` is the embedded actor, trained on first use, `demo-grown` the same
    with neurons that say nothing: a token costs what it costs in an actor of 20M parameters."""
    critic_path: str = ""
    """Folder or hub name that the critic starts from, or `demo`; empty: the actor's own weights."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the actor and critic in the PPO update."""


class ActorConfig(Section):
    """What trains the actor, and on how many processes."""

    backend: Literal["transformers", "megatron"] = "transformers"
    """`transformers`: in the loop's own process; `megatron`: megatron-core, on processes that Ray starts."""
    tensor_parallel: int = Field(1, ge=1)
    """Ranks that share each layer (backend `megatron`)."""
    pipeline_parallel: int = Field(1, ge=1)
    """Ranks that the layers are spread over (backend `megatron`)."""
    data_parallel: int = Field(1, ge=1)
    """Copies of the whole, each with its share of the sequences (backend `megatron`)."""
    resource: str = ""
    """Ray resource of the nodes for the actor's ranks (`ray start --resources`); empty: any node."""
    threads: int = Field(1, ge=1)
    """CPU threads of each rank."""
    bucket_bytes: int = Field(256 * 1024**2, ge=1)
    """Bytes of weights that a pipeline stage joins, or a broadcast sends, at a time; one tensor at least."""
    imports: str = ""
    """Python module that each rank imports before it builds its part, e.g. to replace layers of Megatron's; empty: none."""

    @property
    def ranks(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel * self.data_parallel


class DataConfig(Section):
    """Where prompts and reference answers come from."""

    path: str = "demo"
    """Local JSONL, Parquet, CSV or text file, or a hub name; `demo` is the generated arithmetic task."""
    split: str = "train"
    """Split, for hub names."""
    template: str = ""
    """Prompt template with the row's fields in braces, e.g. 'Question: {question}\\nAnswer:'."""
    column: str = "prompt"
    """Prompt column, used when no template is given."""
    answer_column: str = "answer"
    """Column with the reference answer that the reward reads; empty: none."""
    max_prompt_tokens: int = Field(256, ge=1)
    """Longer prompts are left out and counted."""
    limit: int = Field(0, ge=0)
    """Use only the first rows; 0: all."""


class SamplingConfig(Section):
    """How rollouts are sampled."""

    temperature: float = Field(1.0, gt=0)
    """Sampling temperature of the rollouts."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus mass; 1: off."""
    top_k: int = Field(0, ge=0)
    """Sample from the k likeliest tokens; 0: off."""
    max_new_tokens: int = Field(96, ge=1)
    """Longest response, in tokens."""
    responses_per_prompt: int = Field(4, ge=1)
    """Responses sampled for each prompt."""


class EngineConfig(Section):
    """vLLM, and how it drafts."""

    backend: Literal["colocated", "server"] = "colocated"
    """`colocated`: vLLM inside a Ray actor on this node; `server`: `vllm serve` over HTTP, started by us."""
    replicas: int = Field(1, ge=1)
    """Engines that share the rollouts; each takes the threads, memory and GPUs that this section names."""
    resource: str = ""
    """Ray resource of the nodes for engines (`ray start --resources`); empty: any node (backend `colocated` only)."""
    placement: Layout | Literal[""] = ""
    """Reserve room for all replicas at once, laid out over nodes like this; empty: each finds its own (backend `colocated` only)."""
    url: str = ""
    """Address of a running server, or one for each replica with commas between; empty: start them (backend `server` only)."""
    host: str = "127.0.0.1"
    """Address a started server binds to."""
    port: int = Field(0, ge=0, le=65535)
    """Port of a started server, of further replicas the ones after it; 0: free ones."""
    dtype: Literal["auto", "float32", "bfloat16"] = "float32"
    """Dtype of the engine's copy of the actor."""
    transfer: Literal["file", "broadcast"] = "file"
    """How engines get a new actor. `file`: in shared memory, or through Ray's store; `broadcast`: in buckets to all at once, by NCCL
    between GPUs and gloo elsewhere, through vLLM's weight-transfer API (backend `colocated` only)."""
    max_num_seqs: int = Field(32, ge=1)
    """Most sequences that run at once."""
    max_model_len: int = Field(512, ge=8)
    """Longest prompt plus response, in tokens."""
    memory_fraction: float = Field(0.1, gt=0, le=1)
    """Share of the memory (GPU, or RAM on CPU) for the engine."""
    enforce_eager: bool = True
    """Skip torch.compile and CUDA graphs: quick start, slower steps on a GPU."""
    sleep_level: Literal[0, 1, 2] = 0
    """Let the engine sleep while PPO scores and updates: 1 moves its weights to the host, 2 throws them away; 0: it stays awake."""
    threads: int = Field(2, ge=1)
    """CPU threads of the engine (CPU build)."""
    num_drafts: int = Field(-1, ge=-1)
    """Draft tokens per step; -1: all heads; 0: no drafting."""
    draft_temperature: float = Field(1.0, ge=0)
    """0: one-hot drafts; above: drafts sampled at this temperature times the request's own. Both are lossless."""
    choose_drafts: bool = False
    """Choose the number of drafts (up to num_drafts) for each step from measured costs and acceptance."""
    draft_vocab: int = Field(0, ge=0)
    """Draft from so many of the most frequent tokens of the rollouts (saves lm_head's product where vocabularies are large); 0: all."""
    extra: dict[str, Any] = Field(default_factory=dict)
    """More keyword arguments for vLLM's engine, passed on as they are."""


class HeadsSection(Section):
    """The heads that a run starts with."""

    path: str = ""
    """Native heads directory to start from; empty: start at zero (every head equals lm_head)."""
    kind: Literal["medusa", "markov", "hydra"] = "hydra"
    """Heads read the hidden state (`medusa`), the token before as well (`markov`), or all tokens since (`hydra`)."""
    num_heads: int = Field(4, ge=1)
    """K, the number of heads."""
    num_layers: int = Field(1, ge=1)
    """Residual blocks per head."""
    lm_head: Literal["shared", "own"] = "shared"
    """`shared`: the actor's lm_head, frozen; `own`: one trainable lm_head per head."""
    rank: int = Field(64, ge=1)
    """Rank of the markov bias."""


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
    weight_decay: float = Field(0.0, ge=0)
    """AdamW decoupled weight decay."""
    clip_norm: float = Field(1.0, gt=0)
    """Largest gradient norm of each head, clipped per head."""
    average: float = Field(0.97, ge=0, lt=1)
    """Candidates are the running mean of the heads in training, of which this share stays with each optimizer step; 0: the last heads."""
    batch_positions: int = Field(2048, ge=1)
    """Positions per optimizer step (per micro-batch of one, with `accumulate`)."""
    accumulate: int = Field(1, ge=1)
    """Micro-batches whose gradients add up to one optimizer step."""
    schedule: Literal["fixed", "drift"] = "fixed"
    """`fixed`: `epochs` passes over each batch; `drift`: as many while the serving heads lag behind, fewer while training gains nothing."""
    epochs: int = Field(2, ge=1)
    """Passes over each rollout batch; with schedule `drift` the most."""
    min_epochs: float = Field(0.25, gt=0, le=1)
    """Schedule `drift`: the fewest passes; below 1 a random part of the positions once."""
    drift_lag: float = Field(0.03, gt=0, lt=1)
    """Schedule `drift`: share of the extra tokens (mean acceptance length - 1) that has to be lost, or to be gained, for more passes."""
    positions: Literal["all", "fraction"] = "all"
    """Positions trained on: all, or a random `fraction`."""
    position_share: float = Field(0.5, gt=0, le=1)
    """Positions `fraction`: share of them."""
    holdout_fraction: float = Field(0.2, gt=0, lt=1)
    """Share of each batch's responses kept out of training, to judge candidates on."""
    queue_bytes: int = Field(512 * 1024**2, ge=1)
    """Byte budget of batches on their way, waiting and in training together; when it is full the oldest that waits goes and is counted."""
    queue_lag: int = Field(2, ge=0)
    """A waiting batch goes when it is more policy versions than this behind the newest: the heads of a slow companion don't go stale."""
    wait: bool = False
    """Wait for the companion before each generation: repeatable, but its time is no longer hidden."""
    replay_versions: int = Field(0, ge=0)
    """Policy versions for which a batch is trained on again beside newer ones; 0: each batch once."""
    replay_decay: float = Field(0.5, gt=0, le=1)
    """Share of a replayed batch's positions that is left with each policy version."""
    replay_bytes: int = Field(1024**3, ge=1)
    """Byte budget of the batches kept for replay."""
    save_replay: bool = False
    """Write replayed batches (their hidden states) to disk with the companion's state, so that a resumed run repeats to the bit."""
    gate_confidence: float = Field(0.9, gt=0.5, lt=1)
    """How sure (one-sided) a candidate must be better on the holdout than the serving heads before it is published."""
    draft_temperature: float = Field(0.0, ge=0)
    """Draft temperature that candidates are judged at, times the rollouts' own; 0: one-hot. A run sets it to the engine's."""
    upper_mark_every: int = Field(0, ge=0)
    """Batches between two upper marks: heads fitted on and on to that very batch, the most it could give on its holdout; 0: never."""
    checkpoint_every: int = Field(1, ge=0)
    """Batches between two saves of the companion's whole state in the run's folder; 0: never."""
    max_restarts: int = Field(100, ge=0)
    """Times that a companion whose process ended is started again from its saved state."""
    hang_s: float = Field(300.0, gt=0)
    """A companion that answers nothing for so many seconds is ended and started again."""
    cores: tuple[int, ...] = ()
    """CPU cores that the companion's workers are pinned to; empty: any."""
    niceness: int = Field(5, ge=0, le=19)
    """Added to the companion's niceness, so that PPO goes first where both want a core."""
    threads: int = Field(1, ge=1)
    """CPU threads of the companion, of each worker."""
    num_gpus: float = Field(0.0, ge=0)
    """GPUs (or a share of one) that Ray gives to the companion, to each worker."""
    offload: bool = False
    """Between batches heads, optimizer and tables lie in the host's memory, so that the GPU's is free for others."""
    workers: int = Field(1, ge=1)
    """Processes that share each batch and every optimizer step; the heads come out the same."""
    placement: Layout = "pack"
    """How several workers are laid out over nodes; room for all is reserved at once."""
    resource: str = ""
    """Ray resource of the nodes for the companion (`ray start --resources`); empty: any node."""

    @property
    def samples_early(self) -> bool:
        """Positions are sampled before their states leave the actor. Not for losses that read the states of their neighbours."""
        return self.positions == "fraction" and self.loss not in TEACHER_LOSSES


class PPOConfig(Section):
    """The reference PPO loop."""

    steps: int = Field(16, ge=1)
    """PPO steps (rollout batches)."""
    prompts_per_step: int = Field(32, ge=1)
    """Prompts per rollout batch."""
    epochs: int = Field(2, ge=1)
    """Passes over each rollout batch."""
    minibatch_size: int = Field(32, ge=1)
    """Responses per optimizer step."""
    micro_batch_size: int = Field(32, ge=1)
    """Responses per forward pass."""
    actor_learning_rate: float = Field(1e-5, gt=0)
    """AdamW step size of the actor."""
    critic_learning_rate: float = Field(1e-4, gt=0)
    """AdamW step size of the critic."""
    gamma: float = Field(1.0, gt=0, le=1)
    """Discount per token."""
    lam: float = Field(0.95, ge=0, le=1)
    """GAE lambda."""
    clip_range: float = Field(0.2, gt=0)
    """Clip of the policy ratio."""
    value_clip_range: float = Field(0.2, gt=0)
    """Clip of the value prediction around the old one."""
    kl_coefficient: float = Field(0.02, ge=0)
    """Weight of the per-token KL penalty against the reference, in reward units."""
    value_coefficient: float = Field(0.5, gt=0)
    """Weight of the value loss."""
    entropy_coefficient: float = Field(0.0, ge=0)
    """Weight of the entropy bonus."""
    clip_norm: float = Field(1.0, gt=0)
    """Largest gradient norm of actor and critic, each clipped by itself."""
    reward: str = "medusa_ppo.ppo.rewards:exact_answer"
    """Python callable `module:function`, or the folder or hub name of a reward model (with `reward_kind=model`)."""
    reward_kind: Literal["callable", "model"] = "callable"
    """What `reward` names."""
    correct_from: float = 1.0
    """A response counts as right from this reward on (callables only)."""
    checkpoint_every: int = Field(4, ge=0)
    """Steps between two saves of the run's state (for --resume); 0: never."""
    threads: int = Field(2, ge=1)
    """CPU threads of the update."""


class ReportConfig(Section):
    """What is measured besides."""

    compare_pairs: int | None = Field(None, ge=1)
    """After the last step, so many times in turn: rollouts and whole PPO steps with the plugin, and without it in an engine of its own at
    vLLM's defaults; null: never."""
    speed_every: int | None = Field(None, ge=1)
    """Every n-th step the same prompts are also generated without drafting, in turn, by the same engine, and timed; null: never."""
    speed_prompts: int = Field(0, ge=0)
    """Prompts of such a pair; 0: the step's own."""
    trackers: tuple[str, ...] = ()
    """Where each step's figures go beside metrics.jsonl: any of tensorboard, wandb, trackio, ray (Prometheus)."""
    project: str = "medusa-ppo"
    """Project under which wandb and trackio show the run."""
    keep_rollouts: int = Field(0, ge=0)
    """Write the rollouts of the last n steps to RUN/rollouts, for `medusa-ppo train --data RUN/rollouts`; 0: none."""

    @field_validator("trackers")
    @classmethod
    def _known(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if name not in TRACKERS:
                near = difflib.get_close_matches(name, TRACKERS, n=MAX_SUGGESTIONS)
                raise ConfigError(
                    "Unknown tracker in report.trackers.",
                    given=name,
                    expected=near[0] if near else ", ".join(TRACKERS),
                    do=f"Did you mean {near[0]}?" if near else "Name one of these.",
                )
        return tuple(dict.fromkeys(names))


class RunConfig(Section):
    """Everything that `medusa-ppo ppo` reads."""

    name: str = "run"
    """Name of the run; its files go to OUT/NAME."""
    out: str = "runs"
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

    @property
    def run_dir(self) -> Path:
        return Path(self.out) / self.name

    @model_validator(mode="after")
    def _fields_agree(self) -> RunConfig:
        _check_agreement(self)
        return self


def _check_agreement(config: RunConfig) -> None:
    """Refuse fields that contradict each other, at load and not at step 300."""
    engine, heads, ppo = config.engine, config.heads, config.ppo
    if engine.num_drafts > heads.num_heads:
        raise ConfigError(
            "More draft tokens than heads.",
            given=f"engine.num_drafts={engine.num_drafts}, heads.num_heads={heads.num_heads}",
            expected="engine.num_drafts <= heads.num_heads",
            do="Train more heads or draft fewer tokens.",
        )
    need = config.data.max_prompt_tokens + config.sampling.max_new_tokens
    if need > engine.max_model_len:
        raise ConfigError(
            "Prompts and responses do not fit into the engine.",
            given=f"data.max_prompt_tokens + sampling.max_new_tokens = {need}",
            expected=f"<= engine.max_model_len = {engine.max_model_len}",
            do="Raise engine.max_model_len or shorten prompts or responses.",
        )
    if ppo.minibatch_size % ppo.micro_batch_size and ppo.micro_batch_size < ppo.minibatch_size:
        raise ConfigError(
            "A minibatch must be made of whole micro batches.",
            given=f"ppo.minibatch_size={ppo.minibatch_size}, ppo.micro_batch_size={ppo.micro_batch_size}",
            expected="minibatch_size divisible by micro_batch_size",
            do="Change one of the two.",
        )
    if config.actor.backend == "transformers" and config.actor.ranks > 1:
        raise ConfigError(
            "The backend transformers trains in one process.",
            given=f"actor.backend=transformers, {config.actor.ranks} ranks",
            expected="actor.backend=megatron",
            do="Set actor.backend=megatron, or all three parallel sizes to 1.",
        )
    if config.actor.backend == "megatron" and config.model.dtype != "float32":
        raise ConfigError(
            "Megatron's products are computed in the dtype of its weights here.",
            given=f"actor.backend=megatron, model.dtype={config.model.dtype}",
            expected="model.dtype=float32",
            do="Set model.dtype=float32.",
        )
    if config.companion.offload and not config.companion.num_gpus:
        raise ConfigError(
            "companion.offload has no effect without a GPU.",
            given="companion.offload=true, companion.num_gpus=0",
            expected="companion.num_gpus > 0, a share is enough",
            do="Give the companion a share of a GPU, or remove companion.offload.",
        )
    if config.report.compare_pairs and engine.url:
        raise ConfigError(
            "A run that is compared starts an engine without heads of its own, and can't do so at your server.",
            given=f"report.compare_pairs={config.report.compare_pairs}, engine.url={engine.url!r}",
            expected="report.compare_pairs=null, or no engine.url",
            do="Remove one of the two.",
        )
    _check_engine(engine)
    _check_workers(config.companion)


def _check_engine(engine: EngineConfig) -> None:
    """The same for what the engine's fields say of each other."""
    if engine.placement and (engine.replicas == 1 or engine.backend == "server"):
        raise ConfigError(
            "engine.placement reserves room for several engines in Ray actors.",
            given=f"engine.placement={engine.placement}, engine.replicas={engine.replicas}, engine.backend={engine.backend}",
            expected="replicas above 1 and backend colocated",
            do="Remove engine.placement, or correct the others.",
        )
    if engine.url and engine.backend != "server":
        raise ConfigError(
            "engine.url is only read by the server backend.",
            given=f"engine.url={engine.url!r}, engine.backend={engine.backend!r}",
            expected="engine.backend=server",
            do="Set engine.backend=server or remove engine.url.",
        )
    if engine.sleep_level and engine.backend != "colocated":
        raise ConfigError(
            "Only colocated engines can sleep.",
            given=f"engine.sleep_level={engine.sleep_level}, engine.backend={engine.backend!r}",
            expected="engine.backend=colocated",
            do="Set engine.sleep_level=0 or engine.backend=colocated.",
        )
    if engine.transfer == "broadcast" and (engine.backend != "colocated" or int(engine.extra.get("data_parallel_size", 1)) > 1):
        raise ConfigError(
            "The actor can't be broadcast to these engines.",
            given=f"engine.transfer=broadcast, engine.backend={engine.backend!r}, engine.extra={engine.extra}",
            expected="engine.backend=colocated, no data_parallel_size above 1",
            do="Set engine.transfer=file, or engine.backend=colocated with engine.replicas.",
        )
    if engine.url and engine.url.count(",") + 1 != engine.replicas:
        raise ConfigError(
            "Each engine needs an address.",
            given=f"engine.url={engine.url!r}, engine.replicas={engine.replicas}",
            expected="as many addresses as replicas, with commas between",
            do="Correct one of the two.",
        )


def _check_workers(companion: CompanionConfig) -> None:
    """Refuse what several workers can't do: each has only a part of every batch."""
    for name in ("save_replay", "positions", "offload"):
        value, default = getattr(companion, name), CompanionConfig.model_fields[name].default
        if companion.workers > 1 and value != default:
            raise ConfigError(
                f"companion.{name}={value} needs a companion of one worker only.",
                given=f"companion.workers={companion.workers}, companion.{name}={value}",
                expected=f"companion.workers=1 or companion.{name}={default}",
                do="Change one of the two.",
            )


def load_config(path: str | os.PathLike[str] | None = None, overrides: list[str] | tuple[str, ...] = ()) -> RunConfig:
    """Read a YAML file, apply `key=value` overrides (dotted keys, YAML values), and check the result.

    Raises:
        ConfigError: unknown key, wrong type, contradiction, unreadable file.
    """
    values: dict[str, Any] = {}
    if path is not None:
        values = _read_yaml(Path(path))
    for pair in overrides:
        _apply_override(values, pair)
    return build_config(values)


def build_config(values: dict[str, Any]) -> RunConfig:
    """Check a nested mapping and turn it into a RunConfig. Raises ConfigError."""
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        raise _translate(error) from None


def preset(name: str) -> Path:
    """Path of a preset in `configs/`: beside the packages in a checkout, under `share/` in an installed wheel."""
    for folder in (Path(__file__).resolve().parent.parent / "configs", Path(sys.prefix) / "share" / "medusa-ppo" / "configs"):
        if (folder / f"{name}.yaml").is_file():
            return folder / f"{name}.yaml"
    raise ConfigError(
        "The preset does not exist.", given=name, expected="a file in configs/", do="Run from a checkout, or pass --config FILE."
    )


def _read_yaml(path: Path) -> dict[str, Any]:
    if not path.is_file():
        near = sorted(str(p) for p in path.parent.glob("*.yaml")) if path.parent.is_dir() else []
        raise ConfigError(
            "The configuration file does not exist.", given=path, expected=", ".join(near) or "a YAML file", do="Check --config."
        )
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(
            "The configuration file is not YAML.", given=f"{path}: {error}", expected="a mapping of sections", do="Correct the file."
        ) from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(
            "The configuration file must hold a mapping.",
            given=type(values).__name__,
            expected="section: {key: value}",
            do=f"Correct {path}.",
        )
    return values


def _apply_override(values: dict[str, Any], pair: str) -> None:
    key, sign, text = pair.partition("=")
    if not sign or not key:
        raise ConfigError("An override must be key=value.", given=pair, expected="e.g. ppo.steps=20", do="Write key=value without spaces.")
    try:
        value = yaml.safe_load(text) if text else ""
    except yaml.YAMLError:
        raise ConfigError(
            "The value of an override is not YAML.", given=pair, expected="a number, text, true/false", do="Quote the value."
        ) from None
    node = values
    *parents, leaf = key.split(".")
    for parent in parents:
        child = node.setdefault(parent, {})
        if not isinstance(child, dict):
            raise ConfigError(
                "An override goes through a key that is not a section.", given=pair, expected="section.key=value", do="Check the key."
            )
        node = child
    node[leaf] = value


def known_keys(section: type[Section] = RunConfig, prefix: str = "") -> list[str]:
    """All dotted keys, in order."""
    keys: list[str] = []
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            keys += known_keys(kind, f"{prefix}{name}.")
        else:
            keys.append(prefix + name)
    return keys


def _translate(error: ValidationError) -> ConfigError:
    """Turn pydantic's first complaint into our one clear sentence."""
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        keys = known_keys()
        near = (
            difflib.get_close_matches(key, keys, n=MAX_SUGGESTIONS)
            or [k for k in keys if k.split(".")[-1] == key.split(".")[-1]][:MAX_SUGGESTIONS]
        )
        return ConfigError(
            "Unknown configuration key.",
            given=f"{key} = {first['input']!r}",
            expected=f"{near[0]}" if near else "one of the documented keys",
            do=f"Did you mean {near[0]}?" if near else "Remove the key.",
        )
    return ConfigError(f"{key} has a wrong value.", given=repr(first.get("input")), expected=first["msg"], do=f"Correct {key}.")
