"""The section `engine`: vLLM, and how it drafts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator

from medusa_ppo.config.section import Contradiction, Count, Section, Text, unknown

COLOCATED, SERVER = "colocated", "server"
AUTO: Literal["auto"] = "auto"
RANK_KINDS = ("tensor", "pipeline", "prefill_context", "data")
"""The ways in which vLLM splits an engine over ranks that have a GPU each: `..._parallel_size`."""


def _auto(given: object) -> object:
    """Earlier releases wrote `null` when no number was set."""
    return AUTO if given in (None, "null") else given


Drafts = Annotated[Annotated[int, Field(ge=0)] | Literal["auto"], BeforeValidator(_auto)]


class EngineConfig(Section):
    """vLLM, and how it drafts."""

    backend: Text = COLOCATED
    """Where vLLM runs. `colocated`: in a process that Ray starts. `server`: as `vllm serve` on this
    node, started by us. Or the addresses of running servers, separated by commas. Set it when vLLM
    already runs somewhere, or when other programs use the same server.
    """
    runner: Literal["v1", "v2"] | None = None
    """vLLM's model runner for drafting; null: `v2` on a GPU with vLLM 0.32, for an engine of one
    rank that has CUDA graphs, keeps its memory and gets actors by file, since on an H100 drafts
    paid only there; else `v1`. Set it to v1 if `medusa-ppo doctor --distribution` finds that v2
    does not sample honestly.
    """
    replicas: Count = 1
    """Engines that split the prompts of a step; each takes the threads, memory and GPUs that this
    section sets. Set it to the number of GPUs that generate.
    """
    resource: Text | None = None
    """Name of a Ray resource (`ray start --resources`): engines run on nodes that have it; null:
    any node (backend `colocated` only). Set it on a cluster where engines have their own nodes.
    """
    dtype: Literal["float32", "bfloat16"] | None = None
    """Number format of the engine's copy of the actor; null: as model.dtype. Set it to bfloat16
    when the update is in float32 but the engine should be fast; `logprob_gap` shows what that
    costs, and ppo.importance_bound corrects for it.
    """
    transfer: Literal["file", "broadcast"] = "file"
    """How engines get a new actor. `file`: they read one file in shared memory. `broadcast`: it is
    sent to all at once, over NCCL or gloo (backend `colocated` only). Set it to broadcast when
    engines and update run on different nodes.
    """
    max_num_seqs: Count = 32
    """Maximum number of sequences generated at once; others wait. Set it as high as memory allows
    when a step has more responses than this.
    """
    max_model_len: int | None = Field(None, ge=8)
    """Longest prompt and response together, in tokens; null: data.max_prompt_tokens plus
    sampling.max_new_tokens, or 512 if another loop supplies the prompts. Set it in such a loop.
    """
    memory_fraction: float | None = Field(None, gt=0, le=1)
    """Share of the GPU's memory for the engine; null: 0.35 if one engine and PPO share one GPU, 0.8
    with ppo.placement=shared, else 0.9 (CPU build: what it needs). Set it lower when the update or
    the companion runs out of memory.
    """
    enforce_eager: bool | None = None
    """Skip torch.compile and CUDA graphs: the engine starts sooner but each step takes longer;
    null: true on a CPU, false on a GPU. Set it to true for short trials on a GPU, to false for long
    runs on a CPU.
    """
    sleep_level: Literal[1, 2] | None = None
    """Let the engine release its memory while PPO scores and updates. 1 moves its weights to the
    host, 2 discards them; null: it keeps its memory. Set it when engine and update share a GPU that
    is too small for both; use 2 if the host is short of memory too.
    """
    threads: Count | None = None
    """CPU threads of each engine (CPU build); null: all cores, divided among the replicas. Set it
    when other programs need cores.
    """
    num_drafts: Drafts = AUTO
    """Draft tokens in each engine step. `auto`: chosen for each step, from zero to one per head, by
    measured times and acceptance. A number: always that many; 0: no drafting. Set it to a number
    for runs that must be reproducible, since the choice follows the clock; to 0 to switch drafting
    off.
    """
    draft_temperature: float = Field(1.0, ge=0)
    """Factor on the temperature at which drafts are sampled, on top of the request's and each
    head's own; 0: drafts are the heads' most probable tokens. Responses have the same distribution
    either way. Set it to 0 for requests with a grammar (structured output); otherwise rarely.
    """
    draft_vocab: int | None = Field(None, ge=0)
    """Draft only from this many tokens, the most frequent so far; 0: from all; null: 8,192 for
    vocabularies of 32,768 or more, with heads.lm_head=shared, else all. Set it higher when
    responses use many rare tokens; a lower number makes drafts cheaper.
    """
    memory_bytes: int | None = Field(None, ge=0)
    """Bytes for earlier responses, remembered by prompt, from which drafts are also drawn (sampled
    drafts only); null or 0: none. Set it when prompts recur and the engine has time to spare, as on
    a GPU with few sequences; a token takes 4 bytes.
    """
    stop_below: float | None = Field(None, gt=0, lt=1)
    """In each step, stop drafting for a request before the first draft whose estimated chance of
    acceptance is below this (sampled drafts, a fixed num_drafts); null: never. Set it to 0.05 to
    0.08 when verifying drafts is what slows the engine down. V2 then schedules no step ahead.
    """
    extra: dict[str, Any] = Field(default_factory=dict)
    """More keyword arguments for vLLM's engine, passed on unchanged, e.g. `{tensor_parallel_size:
    2}`. Set it when vLLM needs an option that has no key here.
    """

    @property
    def chooses_drafts(self) -> bool:
        """Whether the engine chooses the number of drafts of each step."""
        return self.num_drafts == AUTO

    @property
    def most_drafts(self) -> int | None:
        """Maximum number of drafts in a step; None: one per head."""
        return None if self.num_drafts == AUTO else int(self.num_drafts)

    @property
    def ranks(self) -> int:
        """Number of an engine's ranks, each of which has a GPU if there are any."""
        return math.prod(int(self.extra.get(f"{kind}_parallel_size", 1)) for kind in RANK_KINDS)

    @property
    def suits_v2(self) -> bool:
        """Whether drafting was tested on vLLM's V2 runner with such settings, and is recorded as
        CUDA graphs there. V1 launches its kernels one by one, and on an H100 that took longer than
        the drafts saved.
        """
        return (
            self.ranks == 1
            and not self.enforce_eager
            # Sleep and broadcasts were tested on V1 alone.
            and not self.sleep_level
            and self.transfer == "file"
        )

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses of running servers; none if we start the engines."""
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

    def contradictions(self) -> Iterator[Contradiction]:
        if (self.memory_bytes or self.stop_below) and not self.draft_temperature:
            yield Contradiction(
                "Only sampled drafts support a memory or an early stop.",
                ("engine.memory_bytes", "engine.stop_below", "engine.draft_temperature"),
                "sampled drafts",
                "Set engine.draft_temperature above 0, or the others to null.",
            )
        if self.stop_below and self.chooses_drafts:
            yield Contradiction(
                "The cost of k drafts can't be measured if each request has its own number.",
                ("engine.stop_below", "engine.num_drafts"),
                "a fixed number of drafts, or no engine.stop_below",
                "Set engine.num_drafts to a number, e.g. the number of heads, or leave "
                "engine.stop_below out.",
            )
        if self.sleep_level and self.backend != COLOCATED:
            yield Contradiction(
                "Only colocated engines can sleep.",
                ("engine.sleep_level", "engine.backend"),
                "engine.backend=colocated",
                "Set engine.sleep_level=null or engine.backend=colocated.",
            )
        several = int(self.extra.get("data_parallel_size", 1)) > 1
        if self.transfer == "broadcast" and (self.backend != COLOCATED or several):
            yield Contradiction(
                "The actor can't be broadcast to these engines.",
                ("engine.transfer", "engine.backend", "engine.extra"),
                "engine.backend=colocated, no data_parallel_size above 1",
                "Set engine.transfer=file, or engine.backend=colocated with engine.replicas.",
            )
        if self.addresses and len(self.addresses) != self.replicas:
            yield Contradiction(
                "Each engine needs an address.",
                ("engine.backend", "engine.replicas"),
                "as many addresses as replicas, separated by commas",
                "Correct one of the two.",
            )
