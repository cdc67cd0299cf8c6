"""The section `engine`: vLLM, and how it drafts."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from medusa_ppo.config.section import Count, Section, Text, unknown

COLOCATED, SERVER = "colocated", "server"


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
