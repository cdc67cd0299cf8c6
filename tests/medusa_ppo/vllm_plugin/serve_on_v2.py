"""An engine on vLLM's V2 model runner, by Triton's interpreter: test_speculator.py runs it by
itself and reads the JSON that it prints.

    python serve_on_v2.py FOLDER CONTEXT COPY_PARTS v1|v2|v2-ahead

`v2-ahead` schedules steps ahead, `v2` does not.

Shape letters: B prompts, T positions.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

if not {"v2", "v2-ahead"}.isdisjoint(sys.argv) and not os.path.exists("/dev/nvidia0"):
    import interpreter  # noqa: F401  Before vLLM.
import torch

from heads.checkpoint import save_heads, save_state
from heads.errors import ConfigError
from heads.heads_config import HeadsConfig
from heads.modules import MedusaHeads
from medusa_ppo.config.engine_section import EngineConfig
from medusa_ppo.contract.rollouts import Rollouts, Sampling
from medusa_ppo.drafting.core import Drafted, DraftingCore
from medusa_ppo.drafting.memory import prompt_key
from medusa_ppo.drafting.q_rows import VerifiedRows
from medusa_ppo.engines.colocated import ColocatedEngine
from medusa_ppo.engines.probe import HIDDEN, VOCAB, Uniformity, add_rollouts, tiny_model
from medusa_ppo.feeds.feed_manifest import FeedActor, Release
from medusa_ppo.feeds.folder_feed import FolderFeed
from medusa_ppo.vllm_plugin import feed_watch, installation
from medusa_ppo.vllm_plugin.speculation import FEED

HEADS = 2
PROMPTS = 32
NEW_TOKENS = 24
GREEDY_TOKENS = 12
SETTINGS = {
    "plain": Sampling(1.0),
    "top-p": Sampling(0.7, top_p=0.9),
    "top-k": Sampling(1.2, top_k=9),
}
FEATURES: dict[str, dict[str, Any]] = {
    "draft vocabulary": {"draft_vocab": VOCAB // 2},
    "early end": {"stop_below": 0.3},
    "memory": {"memory_bytes": 1_000_000},
}
"""What is asked for beside sampled drafts, with the settings of `plain`."""


def random_heads(seed: int, context: int, copy_parts: int) -> MedusaHeads:
    torch.manual_seed(seed)
    heads = MedusaHeads(
        HeadsConfig(HIDDEN, VOCAB, HEADS, kind="hydra", context=context, copy_parts=copy_parts)
    ).requires_grad_(False)
    for name, parameter in heads.named_parameters():
        # What is copied has to move the drafts, or a fault in it would not show.
        size = 1.0 if name.startswith("copy") else 0.1
        parameter.copy_(torch.randn_like(parameter) * size)
    return heads


@torch.no_grad()
def greedy(model: Any, asked: list[list[int]]) -> list[list[int]]:
    ids_BT = torch.tensor(asked)
    for _ in range(GREEDY_TOKENS):
        ids_BT = torch.cat([ids_BT, model(input_ids=ids_BT).logits[:, -1:].argmax(-1)], dim=1)
    return ids_BT[:, len(asked[0]) :].tolist()


@contextlib.contextmanager
def drafts_noted() -> Iterator[list[list[int]]]:
    """Each request's last token and the drafts behind it, of every drafting call of the block."""
    noted: list[list[int]] = []
    original = DraftingCore.draft

    def draft(
        self: DraftingCore,
        hidden_BD: torch.Tensor,
        last_ids_B: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Drafted:
        drafted = original(self, hidden_BD, last_ids_B, *args, **kwargs)
        noted.extend(torch.cat([last_ids_B.unsqueeze(1), drafted.ids_BK], dim=1).tolist())
        return drafted

    with mock.patch.object(DraftingCore, "draft", draft):
        yield noted


@contextlib.contextmanager
def held_against_a_whole_table(engine: ColocatedEngine) -> Iterator[dict[str, Any]]:
    """Verify each step of the block twice: as in service, and by V2's own kernels with a table of
    all slots, as vLLM's speculators have one. Counts the drafts, and those that have a q; says
    whether both found the same, and how far our kernel is from its reference.
    """
    import vllm.v1.worker.gpu.spec_decode.rejection_sampler as sampler

    from medusa_ppo.vllm_plugin import q_kernel

    ours = sampler.rejection_sample
    kernels = ours.__wrapped__  # type: ignore[attr-defined]
    found: dict[str, Any] = {"alike": True, "drafts": 0, "drawn": 0, "off": 0.0}

    def twice(
        logits_TV: Any, kept: Any, ids_T: Any, firsts: Any, pos_T: Any, *rest: Any, **more: Any
    ) -> Any:
        result = ours(logits_TV, kept, ids_T, firsts, pos_T, *rest, **more)
        slots_B, slots_T, places_T, temperature_S, seed_S = rest[:5]
        rows = VerifiedRows(slots_T, places_T, pos_T, ids_T)
        read = rows, kept._requests_S, temperature_S, seed_S
        by_row, plainly = (
            make(kept.drafter.slots, *read, kept._vocab_size)
            for make in (q_kernel.by_row, q_kernel.by_row_plainly)
        )
        found["alike"] &= all(map(torch.equal, by_row[1:], plainly[1:]))
        part_TKV = plainly.table_TKV
        whole_SKV = part_TKV.new_full((len(temperature_S), HEADS, part_TKV.shape[2]), -torch.inf)
        counts = (firsts.diff() - 1).tolist()
        for slot, first, count in zip(slots_B.tolist(), firsts.tolist(), counts, strict=False):
            whole_SKV[slot, :count] = part_TKV[first, :count]
            off_KV = (by_row.table_TKV[first, :count].exp() - part_TKV[first, :count].exp()).abs()
            found["off"] = max([found["off"], *off_KV.flatten().tolist()])
            found["drafts"] += count
            found["drawn"] += int((part_TKV[first, :count].isfinite().sum(1) > 1).sum())
        expected = kernels(logits_TV, whole_SKV, ids_T, firsts, pos_T, *rest, **more)
        found["alike"] &= bool(torch.equal(result[1], expected[1]))
        for row, count in enumerate(result[1].tolist()):
            found["alike"] &= result[0][row, :count].tolist() == expected[0][row, :count].tolist()
        return result

    with mock.patch.object(sampler, "rejection_sample", twice):
        yield found


def main(folder: Path, context: int, copy_parts: int, kind: str) -> None:
    ahead = kind == "v2-ahead"
    model = tiny_model(folder / "model")
    first = random_heads(1, context, copy_parts)
    save_heads(folder / "heads", first, lm_head_VD=model.lm_head.weight)
    save_state(folder / "new-heads", random_heads(2, context, copy_parts).trainable_state())
    asked = torch.randint(VOCAB, (PROMPTS, 8), generator=torch.Generator().manual_seed(0)).tolist()
    config = EngineConfig(
        dtype="float32",
        max_num_seqs=PROMPTS,
        max_model_len=64,
        threads=1,
        memory_fraction=0.02,
        num_drafts=HEADS,
        runner="v1" if kind == "v1" else "v2",
        enforce_eager=True,
        extra={} if kind == "v1" else {"async_scheduling": ahead},
    )
    with ColocatedEngine(folder / "model", folder / "heads", config) as engine:
        runner = engine._running().llm_engine.model_executor.driver_worker.worker.model_runner
        tell(runner=type(runner).__module__, report=engine.plugin_report())
        with drafts_noted() as noted:
            engine.generate(asked, Sampling(0.0, max_new_tokens=NEW_TOKENS, ignore_eos=True))
        tell(drafted=sorted(noted))
        if kind == "v1":
            return
        tell(ahead=runner.vllm_config.scheduler_config.async_scheduling)
        torch.manual_seed(0)
        few = Sampling(1.0, max_new_tokens=8, ignore_eos=True)
        drawn = engine.generate(asked[:8], few)
        tell(drawn=[list(response.token_ids) for response in drawn.responses])
        seeded = replace(few, seed=7)
        tell(recorded=recorded(runner.speculator, lambda: engine.generate(asked[:8], seeded)))
        tell(block=getattr(runner.rejection_sampler, "use_block_verification", False))
        exact = greedy(model, asked[:4])
        asked_greedily = Sampling(0.0, max_new_tokens=GREEDY_TOKENS, ignore_eos=True)
        for count in range(HEADS, -1, -1):
            engine.configure(num_drafts=count)
            rollouts = engine.generate(asked[:4], asked_greedily)
            same = [list(response.token_ids) for response in rollouts.responses] == exact
            tell(
                **{
                    f"greedy {count}": (
                        same,
                        rollouts.counters.drafts,
                        rollouts.counters.draft_tokens,
                    )
                }
            )
        engine.configure(num_drafts=HEADS, sampled=True)
        with held_against_a_whole_table(engine) as found:
            engine.generate(asked[:8], few)
        tell(table=found)
        tell(parts=in_parts(runner.speculator, lambda: engine.generate(asked[:8], few)))
        for name, sampling in SETTINGS.items():
            began = time.perf_counter()
            wanted = replace(sampling, max_new_tokens=NEW_TOKENS, ignore_eos=True)
            accepted = 0
            test = Uniformity()
            for _ in range(2 if name == "top-p" else 1):  # Few of its drafts are accepted.
                rollouts = engine.generate(asked, wanted)
                add_rollouts(test, model, rollouts)
                accepted += rollouts.counters.accepted
            tell(
                **{
                    name: test.figures()
                    | {"accepted": accepted, "seconds": time.perf_counter() - began}
                }
            )
        for name, settings in FEATURES.items():
            # The interpreter takes minutes for it: once, with the heads that are the default.
            if name == "memory" and not copy_parts:
                continue
            if name == "early end" and ahead:
                tell(**{"no early end": refusal(engine, settings)})
                continue
            engine.configure(**settings)
            if name == "draft vocabulary":
                # First as many tokens as it waits for; then rows of q have columns of their own.
                engine.generate(asked, few)
                with held_against_a_whole_table(engine) as found:
                    engine.generate(asked[:8], few)
                tell(**{"table of few": found})
            test = Uniformity()
            wanted = Sampling(1.0, max_new_tokens=NEW_TOKENS, ignore_eos=True)
            rollouts = engine.generate(asked, wanted)
            add_rollouts(test, model, rollouts)
            counters = rollouts.counters
            found = {"drafts": counters.drafts, "draft_tokens": counters.draft_tokens}
            if name == "memory":
                found |= what_is_remembered(engine, asked, rollouts)
            tell(**{name: test.figures() | {"accepted": counters.accepted} | found})
            engine.configure(**dict.fromkeys(settings, 0))
        hidden = torch.randn(2, HIDDEN, generator=torch.Generator().manual_seed(0)).tolist()
        before = engine.probe(hidden, [5, 6])
        engine.swap_heads(folder / "new-heads", 3)
        tell(swap=(before, engine.probe(hidden, [5, 6]), engine.heads_version))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)
        save_state(folder / "new-actor", model.state_dict())
        engine.sync_actor(folder / "new-actor", 1)
        rollouts = engine.generate(asked[:4], asked_greedily)
        tell(
            synced=[list(response.token_ids) for response in rollouts.responses]
            == greedy(model, asked[:4])
        )
        timed = engine._calibrate(range(HEADS + 1))
        tell(**{"timed drafts": sorted({row.drafts for row in timed})})
        tell(chooses=engine._call("medusa_configure", {"choose": True})["choose"])
        rollouts = engine.generate(asked[:4], asked_greedily)
        same = [list(response.token_ids) for response in rollouts.responses] == greedy(
            model, asked[:4]
        )
        tell(chosen=(same, sum(sum(row["steps"]) for row in engine.choices())))
        tell(**take_from_a_feed(engine, folder, asked[:4], context, copy_parts))


def recorded(speculator: Any, generate: Any) -> dict[str, Any]:
    """Whether the tokens are the same if drafting calls are recorded and replayed, and how often
    each recording is. A CPU has no CUDA graphs: a recording is the call itself. vLLM's tensors are
    its own, so what a recording reads is where vLLM really puts it.
    """
    from medusa_ppo.vllm_plugin.draft_graphs import DraftGraphs

    replays: list[int] = []

    class Again:
        def __init__(self, call: Any) -> None:
            self._call, self.number = call, len(replays)
            replays.append(0)
            self.result = call().clone()

        def replay(self) -> None:
            replays[self.number] += 1
            self.result.copy_(self._call())

    def record(call: Any) -> tuple[Any, torch.Tensor]:
        again = Again(call)
        return again, again.result

    drawn = []
    for graphs in (None, DraftGraphs(PROMPTS, HEADS, record)):
        speculator._graphs = graphs
        drawn.append([list(response.token_ids) for response in generate().responses])
    speculator._graphs = None
    return {"alike": drawn[0] == drawn[1], "replays": replays}


def refusal(engine: ColocatedEngine, settings: dict[str, Any]) -> str:
    """How the engine refuses these settings."""
    try:
        engine.configure(**settings)
    except ConfigError as error:
        return str(error)
    return ""


def in_parts(speculator: Any, generate: Any) -> int:
    """Verify some requests two at a time; returns the most rows of logits that a table had."""
    from medusa_ppo.vllm_plugin import q_kernel

    kept = speculator.draft_logits
    most, kept.rows_at_once = kept.rows_at_once, 2 * (HEADS + 1)
    sizes = []
    by_row = q_kernel.by_row

    def seen(slots: Any, rows: VerifiedRows, *rest: Any) -> Any:
        sizes.append(len(rows.slots_T))
        return by_row(slots, rows, *rest)

    with mock.patch.object(q_kernel, "by_row", seen):
        generate()
    kept.rows_at_once = most
    return max(sizes)


def what_is_remembered(
    engine: ColocatedEngine, asked: list[list[int]], rollouts: Rollouts
) -> dict[str, Any]:
    """Whether the memory has every response as it was written, and how many drafts of the same
    prompts' next responses it has learned from. (What they are worth does not show: responses of a
    random actor hardly resemble each other.)
    """
    engine.generate(asked, Sampling(0.7, max_new_tokens=NEW_TOKENS, ignore_eos=True))
    runner = engine._running().llm_engine.model_executor.driver_worker.worker.model_runner
    memory = runner.speculator.drafter.memory
    # What was accepted beyond a response's last token is remembered too.
    kept = {(key, *tokens[:NEW_TOKENS]) for key, _, _, tokens in memory.store.rows()}
    written = {
        (prompt_key(rollouts.prompts[response.prompt_index]).hex(), *response.token_ids)
        for response in rollouts.responses
    }
    return {
        "remembered": written <= kept,
        "scored": float(memory.trust._seen_C.sum()),
    }


def take_from_a_feed(
    engine: ColocatedEngine, folder: Path, asked: list[list[int]], context: int, copy_parts: int
) -> dict[str, Any]:
    """Versions that are published while requests run, one for each of the first steps."""
    sampling = Sampling(0.0, max_new_tokens=GREEDY_TOKENS, ignore_eos=True)
    before = [response.token_ids for response in engine.generate(asked, sampling).responses]
    feed_watch.LOOK_S = 0.01
    os.environ[FEED] = str(folder / "feed")
    installation.install()
    # Imports vLLM, which the interpreter has to come before.
    from medusa_ppo.vllm_plugin import self_feeding

    self_feeding.ASK_S = 0.0
    engine.generate(asked[:1], Sampling(0.0, max_new_tokens=2, ignore_eos=True))
    core = engine._running().llm_engine.engine_core.engine_core
    feeder = getattr(core, self_feeding.FEEDER)
    watch = feeder._watch
    stepping = core.step_fn
    published = 0

    def step() -> Any:
        nonlocal published
        if feeder._coming is not None:
            while not engine._call("medusa_feed_ready")["ready"]:
                time.sleep(0.01)
        else:
            published += 1
            heads = random_heads(10 + published, context, copy_parts)
            save_state(folder / "fed", heads.trainable_state())
            actor = FeedActor.of(heads.config, None)
            release = Release(actor=actor, dtype="float32", version=published, policy_version=0)
            FolderFeed(folder / "feed").publish(folder / "fed", release)
            while not watch.offers:
                time.sleep(0.01)
        return stepping()

    core.step_fn = step
    rollouts = engine.generate(asked, sampling)
    core.step_fn = stepping
    found = engine._call("medusa_checksums")["heads_version"]
    same = [response.token_ids for response in rollouts.responses] == before
    return {"fed": (same, published, found)}


def tell(**found: Any) -> None:
    """One line of JSON."""
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
