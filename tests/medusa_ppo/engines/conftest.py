"""One real engine for all engine tests of this folder, on the shared actor."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from heads.checkpoint import load_state, save_heads, save_state
from heads.copying import SERVED_PLACES, Texts
from heads.heads_config import COPY_WINDOW, HeadsConfig
from heads.modules import Context, MedusaHeads
from heads.targets import context_rows
from medusa_ppo.config.engine_section import EngineConfig
from medusa_ppo.config.heads_section import HeadsSection
from medusa_ppo.contract.rollouts import Rollouts, Sampling
from medusa_ppo.demo.actor_cache import ensure_demo_actor
from medusa_ppo.demo.task import demo_rows
from medusa_ppo.engines.colocated import ColocatedEngine
from medusa_ppo.engines.probe import Uniformity
from tests.conftest import ROOT
from tests.medusa_ppo.conftest import CPU, EAGER, GRAPHS

HEADS = 4
EMBEDDED = "MEDUSA_PPO_TEST_EMBEDDED"
"""If set, tests of engines use the embedded actor, as they do where `shared/` is missing."""
SHARED = ROOT.parent / "shared"
CACHE = {"kv_cache_memory_bytes": 1 << 29}
NEAR = {CPU: 1e-3, EAGER: 3e-2, GRAPHS: 3e-2}
"""Largest difference in nats between the engine's log-prob of a token and the model's: Triton's
attention multiplies float32 with ten bits of mantissa.
"""
TIED = {CPU: 0.0, EAGER: 5e-2, GRAPHS: 5e-2}
"""Two tokens whose logits are this close may change places on a GPU when a step has other drafts,
since its matrices have other shapes. On a CPU a row's numbers do not depend on its neighbours.
"""


@pytest.fixture(scope="module")
def device(serving: str) -> torch.device:
    """Where the engine's tensors are."""
    return torch.device(serving.partition("-")[0])


@dataclass(frozen=True)
class Actor:
    """The shared actor: its folder, the transformers model in float32, 64 GSM8K prompts, and heads
    that learned next to nothing.
    """

    path: Path
    model: Any
    prompts: list[list[int]]
    heads_path: Path

    @property
    def lm_head_VD(self) -> torch.Tensor:
        return self.model.lm_head.weight.detach()

    def first_heads(self) -> MedusaHeads:
        """Next to lm_head; untrained ones would not draft."""
        heads = self.random_heads(0, scale=0.0)
        heads.blocks[0].copy_(torch.eye(heads.config.hidden_size) * 1e-3)
        return heads

    def random_heads(
        self, seed: int, scale: float = 0.05, kind: str = "medusa", context: int = 0
    ) -> MedusaHeads:
        torch.manual_seed(seed)
        sizes = HeadsConfig(
            self.model.config.hidden_size,
            self.model.config.vocab_size,
            HEADS,
            kind=kind,
            context=context,
        )
        heads = MedusaHeads(sizes).requires_grad_(False)
        for parameter in heads.parameters():
            parameter.copy_(torch.randn_like(parameter) * scale)
        return heads

    def default_heads(self, seed: int, size: float = 0.3, **settings: Any) -> MedusaHeads:
        """Random ones of the form that a run starts with: with a context, feed-forward, copying.

        Args:
            size: how large what they add to the state is, relative to it: with 0 they would draft
                as lm_head does, with 1 hardly a draft would be accepted.
            settings: of `HeadsSection`.
        """
        torch.manual_seed(seed)
        config = self.model.config
        sizes = HeadsSection(**settings).sizes(config.hidden_size, config.vocab_size)
        heads = MedusaHeads(sizes).requires_grad_(False)
        if sizes.lm_head == "own":
            heads.init_own_lm_heads(self.lm_head_VD)
        for name, parameter in heads.named_parameters():
            # All others are random from the start.
            ends = name.endswith("_out") and not name.startswith("copy_")
            if name.startswith("blocks.") or ends:
                parameter.copy_(size * torch.randn_like(parameter) / parameter.shape[-1] ** 0.5)
        return heads

    @torch.no_grad()
    def replayed_q(
        self,
        heads: MedusaHeads,
        prompt: Sequence[int],
        response: Sequence[int],
        drafts_K: torch.Tensor,
        *,
        pairs: int | None = None,
        copies: bool = True,
    ) -> torch.Tensor:
        """q `[K, V]` of the drafts that followed a response so far, as replay sees it: computed
        from the tokens alone, by the heads as they are trained.

        Args:
            drafts_K: these drafts; each head's q depends on the ones before.
            pairs: of the context, the newest ones alone; None: all of the response's.
            copies: False: as if nothing were copied.
        """
        config = heads.config
        at = len(response) - 1
        states_TD = self.model.model(input_ids=torch.tensor([[*prompt, *response]]))
        hidden_MD = states_TD.last_hidden_state[0, len(prompt) - 1 : -1]
        ids_M = torch.tensor(response)
        rows_1n = context_rows(torch.zeros_like(ids_M), config.context)[at : at + 1].clone()
        if pairs is not None:
            rows_1n[:, : config.context - pairs] = -1
        text = None
        if config.copies and copies:
            lengths = torch.tensor([len(prompt)]), torch.tensor([len(response)])
            texts = Texts.of(torch.tensor(prompt), lengths[0], ids_M, lengths[1], COPY_WINDOW)
            text = texts.of_rows(torch.tensor([at]))
        logits_1KV = heads(
            hidden_MD[at : at + 1],
            self.lm_head_VD,
            condition=torch.cat([ids_M[at : at + 1], drafts_K[:-1]])[None],
            embedding_VD=self.model.model.embed_tokens.weight,
            context=Context.of(rows_1n, hidden_MD, ids_M),
            text=text,
            places=SERVED_PLACES,
        )
        return logits_1KV[0].softmax(-1)


@dataclass(frozen=True)
class DrawnDrafts:
    """The drafts of one request in one step of an engine.

    Attributes:
        key: vLLM's id of the request.
        prompt, response: vLLM's own state of the request when they were drawn.
        ids_K: the drafts.
        q_KV: what verification takes them to be drawn from.
    """

    key: str
    prompt: list[int]
    response: list[int]
    ids_K: torch.Tensor
    q_KV: torch.Tensor


def tokens(rollouts: Rollouts) -> list[tuple[int, ...]]:
    return [response.token_ids for response in rollouts.responses]


def drafter_of(engine: ColocatedEngine) -> Any:
    return engine._running().llm_engine.model_executor.driver_worker.worker.model_runner.drafter


def watch_drafts(
    engine: ColocatedEngine, monkeypatch: pytest.MonkeyPatch, every: int = 7
) -> list[DrawnDrafts]:
    """A list that fills with what the engine samples as drafts in every so many steps."""
    drafter = drafter_of(engine)
    honest = drafter._core.draft
    seen: list[DrawnDrafts] = []
    calls = 0

    def draft(*given: Any, **named: Any) -> Any:
        nonlocal calls
        drafted = honest(*given, **named)
        calls += 1
        if calls % every:
            return drafted
        rows_B = torch.arange(len(drafted.ids_BK), device=drafted.ids_BK.device)
        count = drafted.ids_BK.shape[1]
        q_BKV = torch.stack(
            [drafter._slots.q(rows_B, torch.full_like(rows_B, k)) for k in range(count)], 1
        )
        keys, live = drafter._running
        for row, key in enumerate(keys):
            prompt, response = list(live[key].prompt_token_ids), list(live[key].output_token_ids)
            # A request whose prompt isn't finished has sampled nothing, and drafts for nobody.
            if response and len(prompt) + len(response) == int(drafter._tokens_B[row]):
                found = drafted.ids_BK[row].cpu(), q_BKV[row].cpu()
                seen.append(DrawnDrafts(key, prompt, response, *found))
        return drafted

    monkeypatch.setattr(drafter._core, "draft", draft)
    return seen


def honesty_z(logits_MV: torch.Tensor, ids_M: torch.Tensor, sampling: Sampling) -> float:
    """Standard errors between the sampled tokens' log-probs and the model's own expectation;
    arguments as of `Uniformity.add`.
    """
    test = Uniformity()
    test.add(logits_MV, ids_M, sampling)
    return test.z


@torch.no_grad()
def sampled_rows(model: Any, rollouts: Rollouts) -> tuple[torch.Tensor, torch.Tensor]:
    """The model's own logits_MV at every sampled position of some rollouts, and ids_M of what was
    sampled there.
    """
    logits: list[torch.Tensor] = []
    ids: list[int] = []
    for response in rollouts.responses:
        prompt = rollouts.prompts[response.prompt_index]
        row_1T = torch.tensor([[*prompt, *response.token_ids]])
        logits.append(model(input_ids=row_1T).logits[0, len(prompt) - 1 : -1])
        ids += response.token_ids
    return torch.cat(logits), torch.tensor(ids)


def logprob_gap(model: Any, rollouts: Rollouts) -> float:
    """The largest difference, in nats, between the engine's log-prob of a sampled token and the
    model's own (temperature 1).
    """
    logits_MV, ids_M = sampled_rows(model, rollouts)
    taken_M = logits_MV.log_softmax(-1).gather(1, ids_M[:, None])[:, 0]
    engines_M = torch.tensor(
        [logprob for response in rollouts.responses for logprob in response.logprobs]
    )
    return float((taken_M - engines_M).abs().max())


@torch.no_grad()
def assert_greedy(
    model: Any,
    prompts: Sequence[Sequence[int]],
    found: Sequence[Sequence[int]],
    expected: Sequence[Sequence[int]],
    tied: float = 0.0,
) -> None:
    """Check that greedy responses are the same. They may differ from a token on to which the model
    gives the same logit as to the other one, within `tied`.
    """
    assert len(found) == len(expected)
    for prompt, ours, theirs in zip(prompts, found, expected, strict=False):
        if tuple(ours) == tuple(theirs):
            continue
        assert tied, (ours, theirs)
        pairs = enumerate(zip(ours, theirs, strict=False))
        at = next((place for place, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
        assert at < min(len(ours), len(theirs)), "one ends where the other goes on"
        row_1T = torch.tensor([[*prompt, *ours[:at]]])
        logits_V = model(input_ids=row_1T).logits[0, -1]
        apart = float((logits_V[ours[at]] - logits_V[theirs[at]]).abs())
        assert apart < tied, f"token {at} of a response: {apart} nats"


def most_placeholders(rollouts: Rollouts, serving: str) -> int:
    """Draft tokens that vLLM may count though no head drafted them. On a GPU it caches prompts; a
    request that lacks only one token of its prompt gets as many placeholders in its first step as
    the engine has heads, whatever number of drafts is asked for.
    """
    return 0 if serving == CPU else HEADS * len(rollouts.responses)


def drafted_nothing(rollouts: Rollouts, serving: str) -> bool:
    """Whether heads drafted nothing, so that only placeholders were counted."""
    counters = rollouts.counters
    most = most_placeholders(rollouts, serving)
    return counters.draft_tokens <= most and counters.accepted == 0


def tiny_llama(tied: bool = False) -> LlamaForCausalLM:
    torch.manual_seed(0)
    ends = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0}
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    return (
        LlamaForCausalLM(LlamaConfig(vocab_size=320, tie_word_embeddings=tied, **sizes, **ends))
        .float()
        .eval()
    )


@pytest.fixture(scope="session")
def actor(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Actor:
    """The small real actor beside the checkout. GPU tests use the embedded one if that is missing,
    as in a lab: training it takes some minutes, once.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    on_a_gpu = any(item.get_closest_marker("gpu") for item in request.session.items)
    embedded = os.environ.get(EMBEDDED) or (on_a_gpu and not (SHARED / "actors").is_dir())
    if embedded:
        path = ensure_demo_actor()
        texts = [row["prompt"] for row in demo_rows(limit=64)]
    else:
        shared_dir: Path = request.getfixturevalue("shared_dir")
        path = shared_dir / "actors" / "gsm8k-4m"
        text = (shared_dir / "data" / "gsm8k" / "train.jsonl").read_text(encoding="utf-8")
        questions = [json.loads(line)["question"] for line in text.splitlines()[:64]]
        texts = [f"<|endoftext|>Question: {question}\nAnswer:" for question in questions]
    tokenizer = AutoTokenizer.from_pretrained(path)
    prompts = [tokenizer(text, add_special_tokens=False).input_ids for text in texts]
    model = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval().requires_grad_(False)
    )
    heads_path = tmp_path_factory.mktemp("native") / "heads"
    found = Actor(path, model, prompts, heads_path)
    save_heads(heads_path, found.first_heads(), lm_head_VD=model.lm_head.weight)
    return found


@pytest.fixture(scope="module")
def engine_config(serving: str) -> EngineConfig:
    return EngineConfig(
        # V2 has tests of its own (test_speculator.py); many of these look into V1.
        runner="v1",
        dtype="float32",
        max_num_seqs=64,
        max_model_len=512,
        threads=1,
        # As many tokens in a step as on a CPU, so that long prompts are split on a GPU too.
        # Keys and values in bytes, so that vLLM does not measure what other tests' engines free.
        extra={} if serving == CPU else {"max_num_batched_tokens": 2048, **CACHE},
        memory_fraction=0.05,
        enforce_eager=serving != GRAPHS,
        num_drafts=HEADS,
    )


@pytest.fixture
def alike(serving: str) -> Callable[[ColocatedEngine], None]:
    """alike(engine): the next call computes its prompts as an earlier one did. On a GPU a prompt
    that is partly cached has a matrix of another shape, and is rounded differently.
    """

    def forget(engine: ColocatedEngine) -> None:
        if serving != CPU:
            engine._forget_prompts()

    return forget


@pytest.fixture(scope="module")
def shared_engine(
    actor: Actor, engine_config: EngineConfig, serving: str
) -> Iterator[ColocatedEngine]:
    """Of one module: vLLM has one engine a process, and one of another module that closes would
    take this one's groups with it. On a GPU it can sleep, which vLLM allows one engine a process;
    vLLM's CPU build keeps its memory either way.
    """
    config = engine_config.model_copy(update={"sleep_level": None if serving == CPU else 1})
    with ColocatedEngine(actor.path, actor.heads_path, config, seed=0) as engine:
        yield engine


@pytest.fixture
def engine(
    shared_engine: ColocatedEngine, actor: Actor, tmp_path: Path
) -> Iterator[ColocatedEngine]:
    """The shared engine, put back as it was started when the test is over."""
    yield shared_engine
    shared_engine.wake()
    shared_engine.configure(
        num_drafts=HEADS,
        choose=False,
        sampled=False,
        draft_temperature=1.0,
        draft_vocab=0,
        memory_bytes=0,
    )
    state = actor.first_heads().trainable_state()
    save_state(tmp_path / "first.safetensors", state)
    shared_engine.swap_heads(tmp_path / "first.safetensors", 0)
    if shared_engine.policy_version:
        save_state(tmp_path / "actor.safetensors", actor.model.state_dict())
        shared_engine.sync_actor(tmp_path / "actor.safetensors", 0)
    assert load_state(tmp_path / "first.safetensors").keys() == state.keys()
