"""An engine that chooses its drafts times its steps when it starts, keeps what it found, and leaves
no trace of it in what is served.
"""

from __future__ import annotations

import functools
import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from heads.checkpoint import save_heads
from heads.modules import MedusaHeads
from medusa_ppo.config.engine_section import EngineConfig
from medusa_ppo.contract.rollouts import Counters, Sampling
from medusa_ppo.engines import colocated
from medusa_ppo.engines.calibration import measure
from medusa_ppo.engines.colocated import ColocatedEngine
from tests.medusa_ppo.conftest import cpu_alone, eager_on_a_gpu
from tests.medusa_ppo.engines.conftest import HEADS, drafter_of

if TYPE_CHECKING:
    from tests.medusa_ppo.engines.conftest import Actor

pytestmark = pytest.mark.engine
SEQUENCES = 8
SEEDED = Sampling(1.0, max_new_tokens=24, ignore_eos=True, seed=5)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # However slow the machine is.
    monkeypatch.setattr(colocated, "measure", functools.partial(measure, longest_s=1e9))
    return tmp_path / "cache" / "medusa-ppo" / "step-times"


@pytest.fixture
def config(engine_config: EngineConfig) -> EngineConfig:
    return engine_config.model_copy(update={"num_drafts": "auto", "max_num_seqs": SEQUENCES})


@eager_on_a_gpu
def test_it_times_its_steps_once_and_then_knows_them(
    actor: Actor, config: EngineConfig, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its heads were never trained: what they will cost is found all the same."""
    caplog.set_level(logging.INFO)
    sizes = actor.first_heads().config
    save_heads(cache.parent / "new", MedusaHeads(sizes), lm_head_VD=actor.lm_head_VD)
    with ColocatedEngine(actor.path, cache.parent / "new", config) as engine:
        assert engine.note.startswith("Timed ") and engine.note in caplog.text
        assert engine.counters() == Counters(0, 0, 0, (0,) * HEADS)
        assert engine.choices() == [], "those steps are nobody's"
        found = drafter_of(engine).chooser.table.kinds
        assert {kind[0] for kind in found} >= {0, 3} and {kind[1] for kind in found} == {
            *range(HEADS + 1)
        }
        rollouts = engine.generate(actor.prompts[:12], SEEDED)
        assert [len(response.token_ids) for response in rollouts.responses] == [24] * 12
        assert rollouts.counters.drafts == 0, "untrained heads draft nothing"
    (kept,) = cache.iterdir()
    raw = json.loads(kept.read_text())
    assert raw["key"]["max_num_seqs"] == SEQUENCES and raw["key"]["eager"] is True
    assert {(row["running"], row["drafts"]) for row in raw["rows"]} == {
        (2**power, drafts) for power, drafts in found
    }

    kept.write_text("damaged")
    save_heads(cache.parent / "heads", actor.random_heads(1), lm_head_VD=actor.lm_head_VD)
    with ColocatedEngine(actor.path, cache.parent / "heads", config) as engine:
        assert "measured again" in caplog.text and engine.note.startswith("Timed ")
    kept.write_text(json.dumps(raw))
    with ColocatedEngine(actor.path, cache.parent / "heads", config) as engine:
        assert engine.note.startswith("Step times from an earlier start")
        table = drafter_of(engine).chooser.table
        assert {
            (row["running"], row["drafts"]): pytest.approx(row["seconds"]) for row in raw["rows"]
        } == {(row["running"], row["drafts"]): row["seconds"] for row in table.rows()}
        rollouts = engine.generate(actor.prompts[:12], SEEDED)
        assert [len(response.token_ids) for response in rollouts.responses] == [24] * 12
        assert sum(sum(row["steps"]) for row in engine.choices()) > 0


@cpu_alone
def test_a_calibration_leaves_nothing_behind(actor: Actor, config: EngineConfig) -> None:
    """With a fixed number of drafts, so that nothing depends on the clock."""
    fixed = config.model_copy(
        update={"num_drafts": HEADS, "draft_vocab": 400, "memory_bytes": 100_000}
    )
    with ColocatedEngine(actor.path, actor.heads_path, fixed) as engine:
        proposer = drafter_of(engine)

        def asked() -> list[Any]:
            engine.configure(memory_bytes=0)
            engine.configure(memory_bytes=100_000)
            rollouts = engine.generate(actor.prompts[:6], SEEDED)
            return [r.token_ids for r in rollouts.responses], rollouts.counters

        engine.generate(actor.prompts[:6], SEEDED)
        before = asked()
        counted = engine.counters()
        seen_V = proposer.draft_vocabulary._counts_V.clone()
        remembered = proposer.memory.store.nbytes
        random_state = torch.get_rng_state()
        timed = engine._calibrate(range(HEADS + 1))
        assert {step.drafts for step in timed} == {*range(HEADS + 1)}
        assert torch.equal(torch.get_rng_state(), random_state)
        assert engine.counters() == counted
        assert torch.equal(proposer.draft_vocabulary._counts_V, seen_V)
        assert proposer.memory.store.nbytes == remembered > 0
        assert proposer.chooser.table.kinds == {} and engine.choices() == []
        assert not engine._running().llm_engine.has_unfinished_requests()
        assert asked() == before
