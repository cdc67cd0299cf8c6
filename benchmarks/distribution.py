"""Are sampled tokens samples of the model's own distribution, whatever the settings? The randomised
PIT, setting by setting.

    medusa-ppo train --model ACTOR --data train.jsonl --template 'Question: {question}\nAnswer:'
        --out HEADS --max-train-tokens 20000
    python benchmarks/distribution.py --model ACTOR --heads HEADS --data train.jsonl
        --tokens 200000 --json distribution.jsonl

For each setting one engine (float32, sampled drafts) samples at least this many tokens, which are
compared with the transformers model in float32. The same engine then drafts again with a q that is
one step old: those samples must fail, or the test could not detect a wrong q. (A grammar's drafts
are verified as one-hot, without q; its control treats their old q as valid.) Seeds are fixed.
`--runner v2` is vLLM's V2 model runner; without a GPU it uses Triton's interpreter, at some tens of
tokens per second. With `--ahead` it schedules steps ahead, as it does on GPUs, except where runs of
drafts end early. `--random-actor DIR` writes an untrained actor and heads, with which 200,000
tokens take a minute or two on one core; the interpreter wants a smaller one (`--vocab 128
--num-heads 2`), whose prompts are the data's by remainder, and which can't follow a grammar, and
short texts (`--prompt-tokens 12 --new-tokens 32`).

Shape letters: M sampled tokens of one response, V vocabulary.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

# The engine is driven step by step and inspected, so it has to be in this process.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

# Before the options are parsed, because what follows imports vLLM.
if "v2" in sys.argv and not os.path.exists("/dev/nvidia0"):
    # Before vLLM, which looks for a driver when it is imported.
    import interpreter  # noqa: F401

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from heads.checkpoint import load_heads, save_heads, save_state
from heads.modules import MedusaHeads
from medusa_ppo.actors.hf import load_actor
from medusa_ppo.config.engine_section import EngineConfig
from medusa_ppo.config.heads_section import HeadsSection
from medusa_ppo.contract.rollouts import Sampling
from medusa_ppo.engines import launch
from medusa_ppo.engines.probe import Uniformity
from medusa_ppo.feeds.feed_manifest import FeedActor, Release
from medusa_ppo.feeds.folder_feed import FolderFeed
from medusa_ppo.runtime.data import load_rows, render_prompts
from medusa_ppo.vllm_plugin import feed_watch
from medusa_ppo.vllm_plugin.self_feeding import FEEDER
from medusa_ppo.vllm_plugin.speculation import FEED
from medusa_ppo.vllm_plugin.worker_calls import Drafting

SEED = 20261122
AT_ONCE = 256
"""Responses requested from the engine together."""
# A wrong q shows within some thousand tokens; showing that nothing is wrong takes many more.
STALE_TOKENS = 5_000
EVERY = (23, 61)
"""Engine steps between two swaps of the heads, and between two syncs of the actor."""
LOOK_S = 0.05
"""Seconds between two looks into a feed: with the product's two, a run of a minute would see few
versions.
"""
STRUCTURED = "structured output"
WORDS = "( [a-z]{1,9}){200}"
"""A grammar that forbids most of what the actor would write: digits, signs and capitals."""


@dataclass(frozen=True)
class Setting:
    """One row of the table.

    Attributes:
        asked: sampling of one request, from a generator of random numbers.
        drafting: settings besides sampled drafts.
        engine: arguments of vLLM's engine.
        sequences: most that run at once.
        preamble: begin every prompt with the same solved examples.
        cache_blocks: blocks of keys and values per sequence on average, where each needs two: fewer
            cause preemptions; 0: as many as they need.
        in_flight: swap heads and sync actors while requests run.
        fed: in flight, heads come from a feed, which the engine loads by itself.
    """

    name: str
    asked: Callable[[random.Random], dict[str, Any]] = lambda rng: {}
    drafting: Drafting = field(default_factory=Drafting)
    engine: dict[str, Any] = field(default_factory=dict)
    sequences: int = 128
    preamble: bool = False
    cache_blocks: float = 0
    in_flight: bool = False
    fed: bool = False


def mixed(rng: random.Random) -> dict[str, Any]:
    """Random settings of a request; greedy ones are included only as neighbours."""
    temperature = rng.choice((0.0, 0.5, 0.7, 0.9, 1.0, 1.0, 1.3))
    return {
        "temperature": temperature,
        "top_k": rng.choice((0, 0, 5, 40)),
        "top_p": rng.choice((1.0, 1.0, 0.9, 0.7)),
    }


SETTINGS = (
    Setting("plain"),
    Setting("temperature 0.7, top-p 0.9", lambda rng: {"temperature": 0.7, "top_p": 0.9}),
    Setting("mixed by request", mixed),
    Setting("seeds", lambda rng: {"seed": rng.randrange(1 << 31)}),
    Setting("K chosen", drafting={"choose": True}),
    Setting("draft vocabulary", drafting={"draft_vocab": 512}),
    Setting("memory, siblings", lambda rng: {"n": 8}, {"memory_bytes": 1 << 26}),
    Setting("memory, temperature 0.5", lambda rng: {"temperature": 0.5}, {"memory_bytes": 1 << 26}),
    Setting("early end", drafting={"stop_below": 0.1}),
    Setting(
        "all of it in flight", mixed, {"memory_bytes": 1 << 26, "stop_below": 0.1}, in_flight=True
    ),
    Setting("n > 1", lambda rng: {"n": 8}),
    Setting("prefix cache", engine={"enable_prefix_caching": True}, preamble=True),
    Setting(
        "chunked prefill",
        engine={"max_num_batched_tokens": 192, "enable_prefix_caching": False},
        sequences=32,
        preamble=True,
    ),
    Setting("preemption", cache_blocks=0.6),
    Setting(STRUCTURED, lambda rng: {"regex": WORDS}, engine={"skip_tokenizer_init": False}),
    Setting("swap and sync in flight", in_flight=True),
    Setting("feed and sync in flight", in_flight=True, fed=True),
)


@dataclass
class SampledAnswer:
    """One response. `versions`: (number of tokens before, actor that sampled the next ones)."""

    prompt: list[int]
    ids: list[int]
    asked: dict[str, Any]
    versions: list[tuple[int, int]]


@dataclass
class Stage:
    """What all settings share: prompts, actors (the second one differs a little), heads, and files
    of both.
    """

    model: Path
    heads: Path
    prompts: list[list[int]]
    preamble: list[int]
    actors: list[Any]
    files: dict[str, list[Path]]

    @classmethod
    def build(cls, options: argparse.Namespace, folder: Path) -> Stage:
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        rows = load_rows(str(options.data), limit=512)
        texts = render_prompts(rows, template=options.template)
        solved = "".join(
            f"{text}{row['answer']}\n\n" for text, row in zip(texts[:2], rows[:2], strict=True)
        )
        preamble = tokenizer(solved, add_special_tokens=False).input_ids
        # Preamble, question and response must fit into 512 tokens.
        prompts = [
            ids[-options.prompt_tokens :]
            for ids in tokenizer(texts[2:], add_special_tokens=False).input_ids
        ]
        actors = [
            load_actor(options.model, "float32").eval().requires_grad_(False) for _ in range(2)
        ]
        vocab = actors[0].config.vocab_size
        prompts = [[token % vocab for token in prompt] for prompt in prompts]
        preamble = [token % vocab for token in preamble[-4 * options.prompt_tokens :]]
        heads = [load_heads(options.heads)[0] for _ in range(2)]
        generator = torch.Generator().manual_seed(SEED)
        for parameter in (*actors[1].parameters(), *heads[1].parameters()):
            if parameter.dim() > 1:
                parameter.data += (
                    0.1 * parameter.std() * torch.randn(parameter.shape, generator=generator)
                )
        files: dict[str, list[Path]] = {"actors": [], "heads": []}
        for number in range(2):
            files["actors"].append(folder / f"actor-{number}.safetensors")
            save_state(files["actors"][-1], actors[number].state_dict())
            files["heads"].append(folder / f"heads-{number}.safetensors")
            save_state(files["heads"][-1], heads[number].trainable_state())
        return cls(options.model, options.heads, prompts, preamble, actors, files)

    def fed_actor(self) -> FeedActor:
        """The actor as a feed's manifest names it."""
        return FeedActor.of(load_heads(self.heads)[0].config, self.actors[0].lm_head.weight)


def random_actor(like: Path, folder: Path, vocab: int | None, num_heads: int) -> None:
    """`actor` and `heads`, with the tokenizer and the kind of another actor, but small and
    untrained, for many tokens per second.
    """
    config = AutoConfig.from_pretrained(like)
    config.update(
        {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
        }
    )
    config.update({"head_dim": 32, "initializer_range": 0.25, "dtype": "float32"})
    if vocab:
        config.update({"vocab_size": vocab, "bos_token_id": 0, "eos_token_id": 0})
    torch.manual_seed(0)
    actor = AutoModelForCausalLM.from_config(config)
    actor.save_pretrained(folder / "actor")
    AutoTokenizer.from_pretrained(like).save_pretrained(folder / "actor")
    torch.manual_seed(1)
    sizes = HeadsSection(num_heads=num_heads).sizes(config.hidden_size, config.vocab_size)
    heads = MedusaHeads(sizes).requires_grad_(False)
    for parameter in heads.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.02)
    save_heads(folder / "heads", heads, lm_head_VD=actor.lm_head.weight)


# ---- sampling


class SteppedEngine:
    """One engine, driven step by step, so that things can happen while requests run."""

    def __init__(
        self, engine: Any, setting: Setting, stage: Stage, seed: int, options: argparse.Namespace
    ) -> None:
        self.engine = engine
        self.new_tokens = options.new_tokens
        self._swap_every, self._sync_every = options.every
        self.setting = setting
        self.stage = stage
        self.seen: dict[str, int] = {
            "preempted": 0,
            "cached prompt tokens": 0,
            "swaps": 0,
            "versions fed": 0,
            "syncs": 0,
        }
        self._llm = engine._running().llm_engine
        self._rng = random.Random(seed)
        self._steps = self._serial = 0
        self._actor = self._heads = self._published = 0
        scheduler = self._llm.engine_core.engine_core.scheduler
        original = scheduler._preempt_request

        def preempt(*args: Any, **kwargs: Any) -> Any:
            self.seen["preempted"] += 1
            return original(*args, **kwargs)

        # Counted, to show whether anything was preempted at all.
        scheduler._preempt_request = preempt

    def sample(self, tokens: int) -> list[SampledAnswer]:
        """At least this many tokens, of whole responses."""
        answers: list[SampledAnswer] = []
        # Whole responses: stopping in the middle would leave out drafts that are still being
        # refused.
        while sum(len(answer.ids) for answer in answers) < tokens:
            left = tokens - sum(len(answer.ids) for answer in answers)
            answers += self._round(min(AT_ONCE, 1 + left // self.new_tokens))
        return answers

    def _round(self, count: int) -> list[SampledAnswer]:
        asked: dict[str, tuple[list[int], dict[str, Any]]] = {}
        responses = 0
        while responses < count:
            self._serial += 1
            prompt = [
                *(self.stage.preamble if self.setting.preamble else ()),
                *self._rng.choice(self.stage.prompts),
            ]
            wanted = {"temperature": 1.0, **self.setting.asked(self._rng)}
            asked[str(self._serial)] = (prompt, wanted)
            responses += wanted.get("n", 1)
            params = _params(wanted, self.new_tokens)
            self._llm.add_request(str(self._serial), {"prompt_token_ids": prompt}, params)
        lengths: dict[str, int] = dict.fromkeys(asked, 0)
        versions: dict[str, list[tuple[int, int]]] = {key: [(0, self._actor)] for key in asked}
        # A step reports one response that progressed, even when it ends a request for several.
        # Using only that report would leave out the response that took the most steps, whose drafts
        # were refused most often: a sample of another distribution.
        answers: dict[tuple[str, int], SampledAnswer] = {}
        while self._llm.has_unfinished_requests():
            for output in self._llm.step():
                prompt, wanted = asked[output.request_id]
                for one in output.outputs:
                    lengths[output.request_id] = len(one.token_ids)
                    ids = list(one.token_ids)
                    answers[output.request_id, one.index] = SampledAnswer(
                        prompt, ids, wanted, versions[output.request_id]
                    )
                if output.finished:
                    self.seen["cached prompt tokens"] += output.num_cached_tokens or 0
            self._steps += 1
            if self.setting.in_flight:
                self._interfere(lengths, versions)
        return list(answers.values())

    def _interfere(
        self, lengths: dict[str, int], versions: dict[str, list[tuple[int, int]]]
    ) -> None:
        if self._steps % self._swap_every == 0 and self.setting.fed:
            self._publish()
        elif self._steps % self._swap_every == 0:
            self._heads = 1 - self._heads
            self.seen["swaps"] += 1
            self.engine.swap_heads(self.stage.files["heads"][self._heads], self.seen["swaps"])
        if self._steps % self._sync_every == 0:
            self._actor = 1 - self._actor
            self.seen["syncs"] += 1
            self.engine.sync_actor(self.stage.files["actors"][self._actor], self.seen["syncs"])
            for key, length in lengths.items():
                versions[key].append((length, self._actor))

    def _publish(self) -> None:
        """A version of heads into the engine's feed, and how many it has loaded so far."""
        loaded = getattr(self._llm.engine_core.engine_core, FEEDER)._watch.known
        self.seen["versions fed"] = loaded
        # The watch fetches what is newest: each version is given the time to be loaded.
        if loaded < self._published:
            return
        self._heads = 1 - self._heads
        self._published += 1
        release = Release(
            actor=self.stage.fed_actor(),
            dtype="float32",
            version=self._published,
            policy_version=self.seen["syncs"],
        )
        FolderFeed(os.environ[FEED]).publish(self.stage.files["heads"][self._heads], release)


def _params(wanted: dict[str, Any], new_tokens: int) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    wanted = dict(wanted)
    grammar = wanted.pop("regex", None)
    wanted["structured_outputs"] = StructuredOutputsParams(regex=grammar) if grammar else None
    return SamplingParams(
        **wanted, max_tokens=new_tokens, ignore_eos=True, detokenize=False, logprobs=0
    )


# ---- judging


class Grammar:
    """What xgrammar's matcher forbids at each place of a response."""

    def __init__(self, model: Path, regex: str, vocab_size: int) -> None:
        import xgrammar

        info = xgrammar.TokenizerInfo.from_huggingface(
            AutoTokenizer.from_pretrained(model), vocab_size=vocab_size
        )
        self._xgrammar = xgrammar
        self._compiled = xgrammar.GrammarCompiler(info).compile_regex(regex)
        self._size = vocab_size

    def mask(self, logits_MV: torch.Tensor, ids: list[int]) -> torch.Tensor:
        matcher = self._xgrammar.GrammarMatcher(self._compiled)
        bits = self._xgrammar.allocate_token_bitmask(1, self._size)
        # The mask is applied in place.
        masked_MV = logits_MV.float().clone()
        for row, token in enumerate(ids):
            matcher.fill_next_token_bitmask(bits)
            self._xgrammar.apply_token_bitmask_inplace(masked_MV[row : row + 1], bits)
            assert matcher.accept_token(token), "the engine sampled what its grammar forbids"
        return masked_MV


@torch.no_grad()
def judge(answers: list[SampledAnswer], stage: Stage) -> Uniformity:
    """Judge all tokens except those of greedy requests."""
    test = Uniformity(seed=SEED)
    grammar = None
    for answer in answers:
        wanted = answer.asked
        # Greedy tokens are not random; they are there as neighbours of the others.
        if not wanted["temperature"]:
            continue
        sampling = Sampling(wanted["temperature"], wanted.get("top_p", 1.0), wanted.get("top_k", 0))
        ends = [*(start for start, _ in answer.versions[1:]), len(answer.ids)]
        for (start, version), end in zip(answer.versions, ends, strict=True):
            # A sync may come before a request's first token.
            if start == end:
                continue
            ids = answer.ids[:end]
            # One pass over the whole response gives the distribution of every token in it.
            logits_MV = stage.actors[version](
                input_ids=torch.tensor([[*answer.prompt, *ids]])
            ).logits[0, len(answer.prompt) - 1 : -1]
            if "regex" in wanted:
                grammar = grammar or Grammar(stage.model, wanted["regex"], logits_MV.shape[1])
                logits_MV = grammar.mask(logits_MV, ids)
            test.add(logits_MV[start:], torch.tensor(ids[start:]), sampling)
    return test


# ---- a q that is one step old


def keep_one_step_old(worker: Any) -> None:
    """In the worker: give verification the q of the previous step. Never part of the product."""
    from medusa_ppo.vllm_plugin import proposer
    from medusa_ppo.vllm_plugin.drafter import drafter_of

    drafter = drafter_of(worker.model_runner)
    use = drafter._use_vocabulary
    # With a grammar too: treat drafts as sampled, where the product verifies them as one-hot. (V2
    # has no such call.)
    drafter._meet = lambda request: proposer.Traits(request.sampling_params.seed)

    held: list[Any] = [None]

    def use_vocabulary() -> None:
        use()
        # The same slots may serve one vocabulary after the other; they are held back once.
        if drafter._slots is not held[-1] and drafter._slots is not None:
            _hold_back(drafter._slots, "stamp", lambda: drafter._slots.cumulative_KRX)
        held.append(drafter._slots)

    drafter._use_vocabulary = use_vocabulary
    use_vocabulary()


def _hold_back(holder: Any, method: str, kept: Callable[[], torch.Tensor]) -> None:
    """After each call of the method, the tensor holds what it held after the previous call."""
    original = getattr(holder, method)
    # Copies, because the tensor is rewritten in place in every step.
    older = [kept().clone()]

    def stale(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        newer = kept().clone()
        kept().copy_(older[0])
        older[0] = newer
        return result

    setattr(holder, method, stale)


# ---- the table


@contextlib.contextmanager
def started(setting: Setting, stage: Stage, runner: str | None, ahead: bool) -> Iterator[Any]:
    from medusa_ppo.engines.colocated import ColocatedEngine

    scheduling = {"async_scheduling": ahead}
    config = EngineConfig(
        dtype="float32",
        max_num_seqs=setting.sequences,
        max_model_len=512,
        threads=1,
        memory_fraction=0.05,
        extra=setting.engine | (scheduling if runner == "v2" else {}),
    )
    config = launch.with_all_heads(config, stage.heads)
    if runner:
        config = config.model_copy(update={"runner": runner})
    ample = launch.cache_bytes
    usual = feed_watch.LOOK_S
    feed_watch.LOOK_S = LOOK_S
    feed = tempfile.TemporaryDirectory(prefix="medusa-ppo-pit-feed-")
    if setting.fed:
        os.environ[FEED] = feed.name
    if setting.cache_blocks:
        # The product makes room for all sequences at full length, so nothing would ever be
        # preempted.
        launch.cache_bytes = lambda text, _: int(
            setting.cache_blocks * setting.sequences * block_bytes(text)
        )
    try:
        with ColocatedEngine(stage.model, stage.heads, config, seed=SEED) as engine:
            drafting = setting.drafting
            if "draft_vocab" in drafting:
                # Of a small vocabulary, which the interpreter wants, all of it would be less.
                half = stage.actors[0].config.vocab_size // 2
                drafting = drafting | {"draft_vocab": min(drafting["draft_vocab"], half)}
            engine.configure(sampled=True, draft_temperature=1.0, **drafting)
            yield engine
    finally:
        launch.cache_bytes = ample
        feed_watch.LOOK_S = usual
        os.environ.pop(FEED, None)
        feed.cleanup()


def block_bytes(text_config: dict[str, Any]) -> int:
    """Bytes of one block of keys and values in float32."""
    heads = text_config["num_attention_heads"]
    width = text_config.get("head_dim") or text_config["hidden_size"] // heads
    return (
        2
        * text_config["num_hidden_layers"]
        * (text_config.get("num_key_value_heads") or heads)
        * width
        * 4
        * launch.CACHE_BLOCK_TOKENS
    )


def measure(setting: Setting, stage: Stage, options: argparse.Namespace) -> dict[str, Any]:
    """The figures of one setting: correct, and with a q that is one step old."""
    began = time.perf_counter()
    figures: dict[str, Any] = {"setting": setting.name, "runner": options.runner or "v1"}
    # Where runs of drafts end early, steps can't be scheduled ahead.
    figures["ahead"] = ahead = options.ahead and "stop_below" not in setting.drafting
    with started(setting, stage, options.runner, ahead) as engine:
        # Requests without a seed draw from torch's own generator.
        torch.manual_seed(SEED)
        sampler = SteppedEngine(engine, setting, stage, SEED, options)
        answers = sampler.sample(options.tokens)
        counters = engine.counters()
        # Before the control, which also preempts and swaps.
        figures["seen"] = {name: count for name, count in sampler.seen.items() if count}
        engine._running().collective_rpc(keep_one_step_old)
        stale = sampler.sample(options.stale_tokens)
    figures |= judge(answers, stage).figures() | {
        "tokens_a_step": round(counters.mean_acceptance_length, 3)
    }
    figures["one_step_old"] = judge(stale, stage).figures()
    return figures | {"seconds": round(time.perf_counter() - began)}


def line(row: dict[str, Any]) -> str:
    """One line of the Markdown table."""
    old = row["one_step_old"]
    seen = ", ".join(f"{count:,} {name}" for name, count in row["seen"].items())
    verdict = "pass" if row["honest"] else "**FAIL**"
    return (
        f"| {row['setting']} | {row['tokens']:,} | {row['chi_square_p']:.3f} |"
        f" {row['kolmogorov_p']:.3f} | {row['z']:+.2f} | {row['outside']} | {verdict} |"
        f" {row['tokens_a_step']:.2f} | {seen} | {old['tokens']:,}: p ="
        f" {min(old['chi_square_p'], old['kolmogorov_p']):.1g}, z ="
        f" {old['z']:+.1f}{' **not seen**' if old['honest'] else ''} |"
    )


HEAD = (
    "| setting | tokens | chi-square p | K-S p | z | outside | | tokens a step | seen | with q one"
    " step old |\n|---|---|---|---|---|---|---|---|---|---|"
)


def main() -> None:
    parser = argparse.ArgumentParser(description="The randomised PIT in every setting.")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--heads", type=Path)
    parser.add_argument("--data", type=Path, help="rows with a question and an answer")
    parser.add_argument(
        "--random-actor", type=Path, help="only write a small untrained actor with heads there"
    )
    parser.add_argument("--vocab", type=int, help="with --random-actor: number of tokens")
    parser.add_argument("--num-heads", type=int, default=4, help="with --random-actor")
    parser.add_argument("--template", default="<|endoftext|>Question: {question}\nAnswer:")
    parser.add_argument("--prompt-tokens", type=int, default=96, help="at most, of each prompt")
    parser.add_argument("--new-tokens", type=int, default=96, help="of each response")
    parser.add_argument("--sequences", type=int, help="most at once; default: the setting's own")
    parser.add_argument(
        "--every", type=int, nargs=2, default=EVERY, help="steps between swaps, and between syncs"
    )
    parser.add_argument("--settings", nargs="*", help="names; default: all of the runner's")
    parser.add_argument("--tokens", type=int, default=200_000)
    parser.add_argument("--stale-tokens", type=int, default=STALE_TOKENS)
    parser.add_argument("--runner", choices=("v1", "v2"))
    parser.add_argument("--ahead", action="store_true", help="with v2: schedule steps ahead")
    parser.add_argument("--json", type=Path, help="append a line for each setting")
    options = parser.parse_args()
    if options.random_actor:
        random_actor(options.model, options.random_actor, options.vocab, options.num_heads)
        return
    if not (options.heads and options.data):
        parser.error("--heads and --data are needed")
    every = [setting.name for setting in SETTINGS]
    names = options.settings or every
    if unknown := sorted(set(names) - set(every)):
        parser.error(f"there is no setting {unknown}; there are {every}")
    bad = False
    with tempfile.TemporaryDirectory(prefix="medusa-ppo-pit-") as folder:
        stage = Stage.build(options, Path(folder))
        tokens = stage.actors[0].config.vocab_size
        pieces = len(AutoTokenizer.from_pretrained(options.model))
        if STRUCTURED in names and tokens < pieces:
            parser.error(
                f"{STRUCTURED} needs an actor with all {pieces} tokens of its tokenizer (given:"
                f" {tokens}); leave the setting out, or --vocab"
            )
        sys.stdout.write(f"{HEAD}\n")
        # Fed engines come first: vLLM gets its hooks once in a process, those of a feed only if
        # one is named then; without one they do nothing.
        for usual in sorted((s for s in SETTINGS if s.name in names), key=lambda s: not s.fed):
            setting = replace(usual, sequences=options.sequences or usual.sequences)
            row = measure(setting, stage, options)
            # A control that passes is as bad as a row that fails: the test could not see a fault.
            bad |= not row["honest"] or row["one_step_old"]["honest"]
            sys.stdout.write(f"{line(row)}\n")
            sys.stdout.flush()
            if options.json:
                with options.json.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
    sys.exit(bad)


if __name__ == "__main__":
    main()
