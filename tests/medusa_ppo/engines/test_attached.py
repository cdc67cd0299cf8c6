"""An engine that another loop drives: what is fed reaches every worker, and comes back after the
loop threw it away.
"""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from heads.checkpoint import checksum, load_state, save_state
from heads.errors import EngineError, SwapError
from medusa_ppo.contract.rollouts import Sampling
from medusa_ppo.engines.colocated import AttachedEngine
from medusa_ppo.engines.kept_tables import keep_table

KEY = {"machine": "one", "max_num_seqs": 2}


class AttachedWorkers:
    """Two workers behind one call, as `collective_rpc` answers."""

    def __init__(self, kind: str = "medusa") -> None:
        self.kind = kind
        self.feeds_itself = False
        self.version = 0
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.broken = False

    def __call__(self, method: str, args: tuple[Any, ...]) -> list[dict[str, Any]]:
        self.calls.append((method, args))
        if method == "medusa_plugin_report":
            drafts = {"kind": self.kind, "drafter": "MedusaProposer", "max_drafts": 3}
            return [drafts | {"feeds_itself": self.feeds_itself}] * 2
        if method == "medusa_step_times":
            return [{"key": KEY, "choices": [0, 1, 3], "rows": list(*args)}] * 2
        if method == "medusa_feed_version":
            return [{"version": self.version}] * 2
        if method == "medusa_checksums":
            return [{"heads": "", "heads_version": self.version, "actor": ""}] * 2
        if method == "medusa_swap_heads":
            good = {"version": args[1], "checksum": checksum(load_state(args[0])), "seconds": 0.0}
            return [
                good,
                {
                    "error": {
                        "kind": "SwapError",
                        "problem": "no",
                        "do": "",
                        "given": None,
                        "expected": None,
                    }
                }
                if self.broken
                else good,
            ]
        return [{}] * 2


@pytest.fixture
def states(tmp_path: Path) -> tuple[Path, Path]:
    """The state that the engine starts with, and a newer one."""
    first = tmp_path / "kept.safetensors"
    second = tmp_path / "published.safetensors"
    save_state(first, {"w": torch.zeros(2)})
    save_state(second, {"w": torch.ones(2)})
    return first, second


def test_what_was_fed_last_is_fed_again_even_when_the_published_file_is_gone(
    states: tuple[Path, Path],
):
    kept, published = states
    workers = AttachedWorkers()
    engine = AttachedEngine(workers, kept)
    assert engine.feed_again().checksum == checksum({"w": torch.zeros(2)})

    engine.swap_heads(published, 4)
    published.unlink()

    assert engine.feed_again().checksum == checksum({"w": torch.ones(2)})
    assert (
        workers.calls[-1] == ("medusa_swap_heads", (str(kept.resolve()), 4))
        and engine.heads_version == 4
    )


def test_an_engine_that_feeds_itself_is_asked_what_it_drafts_with(states: tuple[Path, Path]):
    kept, published = states
    workers = AttachedWorkers()
    other = AttachedEngine(workers, kept)
    workers.version = 9
    assert other.serving_version() == 0, "nobody else feeds it"
    workers.feeds_itself, workers.version = True, 0
    engine = AttachedEngine(workers, kept)
    assert engine.serving_version() == 0
    engine.swap_heads(published, 4)
    workers.version = 7
    workers.calls.clear()
    assert engine.serving_version() == engine.heads_version == 7
    # An engine that sleeps can't read its heads.
    assert [method for method, _ in workers.calls] == ["medusa_feed_version"]
    engine.feed_again()
    assert workers.calls[-1] == ("medusa_swap_heads", (str(kept.resolve()), 4))


def test_heads_that_one_worker_refuses_are_not_kept(states: tuple[Path, Path]):
    kept, published = states
    workers = AttachedWorkers()
    engine = AttachedEngine(workers, kept)
    workers.broken = True
    with pytest.raises(SwapError):
        engine.swap_heads(published, 4)
    assert torch.equal(load_state(kept)["w"], torch.zeros(2)) and engine.heads_version == 0


def test_heads_that_can_t_be_kept_are_in_the_engine_all_the_same(
    states: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A full /dev/shm ended the loop's training when the engine already had its heads."""
    kept, published = states
    workers = AttachedWorkers()
    engine = AttachedEngine(workers, kept)

    def full(source: Path, target: Path) -> None:
        Path(target).write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfile", full)
        assert engine.swap_heads(published, 4).checksum == checksum({"w": torch.ones(2)})
    assert engine.heads_version == 4 and "No space left" in caplog.text
    assert set(kept.parent.iterdir()) == {kept, published}
    # What it has are the version before's, under that one's number.
    assert engine.feed_again().checksum == checksum({"w": torch.zeros(2)})
    assert engine.heads_version == 0
    assert engine.swap_heads(published, 5).version == engine.feed_again().version == 5


def test_the_number_of_drafts_and_the_loops_own_sync_reach_the_workers(states: tuple[Path, Path]):
    workers = AttachedWorkers()
    engine = AttachedEngine(
        workers, states[0], drafting={"num_drafts": 2, "sampled": True, "draft_temperature": 0.8}
    )
    engine.target_changed(7)
    assert (
        "medusa_configure",
        ({"num_drafts": 2, "sampled": True, "draft_temperature": 0.8},),
    ) in workers.calls
    assert engine.num_drafts == 2
    assert workers.calls[-1] == ("medusa_target_changed", (7,)) and engine.policy_version == 7


def test_step_times_that_were_kept_reach_the_workers_of_an_engine_that_chooses(
    states: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    rows = [{"running": 1, "drafts": 0, "seconds": 0.01, "steps": 8}]

    def told(**drafting: Any) -> tuple[list[tuple[Any, ...]], str]:
        workers = AttachedWorkers()
        engine = AttachedEngine(workers, states[0], drafting={"num_drafts": 3, **drafting})
        return [
            args for method, args in workers.calls if method == "medusa_step_times"
        ], engine.note

    assert told(choose=True) == ([()], ""), "nothing was kept: it learns in service"
    keep_table(KEY, rows)
    found, note = told(choose=True)
    assert found == [(), (rows,)] and "earlier start" in note
    assert told() == told(choose=False) == ([], "")


def test_an_engine_without_our_heads_and_a_call_to_generate_are_refused(states: tuple[Path, Path]):
    with pytest.raises(EngineError, match="does not draft with native heads"):
        AttachedEngine(AttachedWorkers(kind=""), states[0])
    with pytest.raises(EngineError, match="belongs to another loop"):
        AttachedEngine(AttachedWorkers(), states[0]).generate([[1]], Sampling())
