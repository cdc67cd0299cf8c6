"""The service without Ray: queue, training thread, published files, saved state, restart after a
crash.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import errno
import itertools
import math
import os
import pickle
import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

from heads.checkpoint import checksum, load_heads, load_state, save_state
from heads.errors import CheckpointError, CompanionError, MedusaError
from heads.heads_config import HeadsConfig
from heads.modules import MedusaHeads
from medusa_ppo.companion import service as service_module
from medusa_ppo.companion.cycle import Cycle
from medusa_ppo.companion.giving_way import Pace
from medusa_ppo.companion.service import (
    HOST,
    SAVED_EVERY,
    STATE_FILE,
    CompanionService,
    forget_oldest,
)
from medusa_ppo.companion.trainer import HeadsTrainer
from medusa_ppo.companion.wire import ServiceArguments, pack, pack_tables, unpack
from medusa_ppo.config.companion_section import CompanionConfig
from medusa_ppo.contract.rollout_batch import RolloutBatch
from medusa_ppo.feeds.feed import verify
from medusa_ppo.feeds.feed_manifest import FeedActor
from medusa_ppo.feeds.folder_feed import FolderFeed
from medusa_ppo.runtime.files import LOCK, OwnedFolder
from tests.medusa_ppo.companion.conftest import sampled, until


def arguments_for(
    task, folder: Path, name: str = "a", resume_from: str = "", **settings
) -> ServiceArguments:
    config = CompanionConfig(**{"batch_positions": 64, "learning_rate": 2e-2, **settings})
    heads = HeadsConfig(task.hidden, task.vocab, num_heads=3)
    return ServiceArguments(
        heads, config, 0, None, str(folder / name / "run"), str(folder / name / "shm"), resume_from
    )


def tables_of(task) -> Any:
    return pack((task.lm_head_VD, None))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64])
def test_tensors_cross_unchanged_and_uncopied(dtype: torch.dtype) -> None:
    tensor = torch.arange(12).view(3, 4).to(dtype)
    packed = pack(tensor)
    back = unpack(packed)
    assert torch.equal(back, tensor) and back.dtype == dtype
    assert back.data_ptr() == tensor.data_ptr() == packed.array.__array_interface__["data"][0]
    packed.array.setflags(write=False)  # as it comes out of Ray's store
    assert torch.equal(unpack(packed), tensor)


def test_tied_tables_cross_and_are_kept_once(chain) -> None:
    """They went to the companion twice with every update, and lay there twice."""
    table_VD = torch.randn(12, 16)
    packed = pack_tables(table_VD.detach(), table_VD.detach())
    assert len(pickle.dumps(packed, protocol=5)) < 1.5 * table_VD.nbytes
    lm_head_VD, embedding_VD = unpack(copy.deepcopy(packed))
    assert lm_head_VD.data_ptr() == embedding_VD.data_ptr() and torch.equal(lm_head_VD, table_VD)
    heads = MedusaHeads(HeadsConfig(16, 12, 2, "hydra"))
    trainer = HeadsTrainer(
        heads, lm_head_VD, CompanionConfig(), 0, embedding_VD=embedding_VD, dtype=torch.float32
    )
    assert trainer.embedding_VD is trainer.lm_head_VD
    trainer.move_to(HOST)
    assert trainer.embedding_VD is trainer.lm_head_VD
    two = pack_tables(table_VD, table_VD.clone())
    assert len(pickle.dumps(two, protocol=5)) > 1.9 * table_VD.nbytes


def test_batches_cross_unchanged(chain) -> None:
    batch = chain(dtype=torch.bfloat16).batch()
    weights_M = torch.ones(batch.response_ids_M.shape[0])
    held_S = torch.arange(batch.lengths_S.numel()) % 2 == 0
    batch = dataclasses.replace(batch, weights_M=weights_M, held_S=held_S)
    back = unpack(pack(batch))
    for field in dataclasses.fields(batch):
        left = getattr(batch, field.name)
        right = getattr(back, field.name)
        assert torch.equal(left, right) if isinstance(left, torch.Tensor) else left == right


def test_publishes_files_that_say_what_the_checksum_says(chain, tmp_path: Path) -> None:
    task = chain()
    service = CompanionService(arguments_for(task, tmp_path), tables_of(task))
    assert service.newest(0).published is None
    for _ in range(12):
        service.submit(pack(task.batch()), tables_of(task))
    assert service.drain(60)
    status = service.status()
    assert (
        status.alive
        and status.batches_received == status.batches_trained == 12
        and status.error == ""
    )
    assert (
        status.versions_published >= 3
        and status.versions_published + status.candidates_rejected == 12
    )
    assert status.train_s > 0 and status.queue_bytes == 0 and len(status.losses) == 3
    published = service.newest(0).published
    assert (
        published.version == status.versions_published
        and service.newest(published.version).published is None
    )
    assert checksum(load_state(published.path)) == published.checksum
    assert published.mean_acceptance_length == pytest.approx(
        status.candidate.mean_acceptance_length, abs=1.0
    ) and (published.mean_acceptance_length > 1.5)
    files = sorted(p.name for p in (tmp_path / "a" / "shm").glob("heads-*"))
    native = sorted(p.name for p in (tmp_path / "a" / "run" / "heads").iterdir())
    assert len(files) == len(native) == 3 and native[-1] == f"v{published.version:06d}"
    heads, metadata = load_heads(
        tmp_path / "a" / "run" / "heads" / native[-1],
        hidden_size=task.hidden,
        vocab_size=task.vocab,
    )
    assert (
        metadata.version == published.version
        and checksum(heads.trainable_state()) == published.checksum
    )
    service.close()
    assert not service.status().alive


def test_a_bad_batch_does_not_end_the_companion(chain, tmp_path: Path) -> None:
    task = chain()
    service = CompanionService(arguments_for(task, tmp_path), tables_of(task))
    service.submit(pack(chain(hidden=20).batch()))
    assert service.drain(60)
    assert "hidden size 20" in service.status().error and service.status().batches_trained == 0
    assert "hidden size 20" in service.newest(0).error
    service.submit(pack(task.batch(1)))
    assert service.drain(60)
    assert (
        service.status().error == service.newest(0).error == ""
        and service.status().batches_trained == 1
    )
    service.submit(pack(task.batch()))
    assert service.drain(60)
    assert (
        service.status().error == ""
        and service.status().batches_trained == 2
        and service.status().alive
    )
    service.close()


def test_queue_is_bounded_and_drain_counts_what_was_dropped(chain, tmp_path: Path) -> None:
    task = chain()
    batch = task.batch()
    service = CompanionService(
        arguments_for(task, tmp_path, queue_bytes=4 * batch.nbytes, epochs=1), tables_of(task)
    )
    with service._state_lock:  # a slow companion: it can't begin
        for _ in range(20):
            held = service.submit(pack(batch))
            assert service.status().queue_bytes <= held <= 3 * batch.nbytes, (
                "room for the next one's way here is left"
            )
        assert held == service.newest(0).held_bytes == 3 * batch.nbytes
        assert service.status().batches_dropped == 17
        assert not service.drain(0.05)
    assert service.drain(60)
    status = service.status()
    assert status.batches_trained == 3 and status.batches_dropped == 17
    service.close()


@pytest.mark.parametrize("how", ["noise", "zeros", "nan", "huge"])
def test_a_poisoned_candidate_is_never_published_and_the_companion_recovers(
    chain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    task = chain()
    service = CompanionService(arguments_for(task, tmp_path), tables_of(task))
    run_batches(service, [task.batch() for _ in range(15)])
    good = service.newest(0).published
    files = sorted((tmp_path / "a").rglob("*.safetensors"))
    assert good is not None
    honest = HeadsTrainer.train_batch

    def poison(self: HeadsTrainer, *args: object, **kwargs: object) -> object:
        report = honest(self, *args, **kwargs)
        torch.manual_seed(0)
        with torch.no_grad():
            for parameter in self.heads.parameters():
                spoiled = {
                    "noise": torch.randn_like(parameter) * 3,
                    "zeros": 0 * parameter,
                    "nan": parameter * torch.nan,
                    "huge": parameter * 1e30,
                }
                parameter.copy_(spoiled[how])
        return report

    with monkeypatch.context() as patch:
        patch.setattr(HeadsTrainer, "train_batch", poison)
        run_batches(service, [task.batch() for _ in range(3)])
    assert service.newest(0).published == good and checksum(load_state(good.path)) == good.checksum
    assert sorted((tmp_path / "a").rglob("*.safetensors")) == files, (
        "and nothing was written for anybody to find"
    )
    run_batches(service, [task.batch() for _ in range(3)])
    status = service.status()
    assert status.error == "" and status.versions_published >= good.version
    assert status.candidate.mean_acceptance_length > status.serving.mean_acceptance_length - 0.3
    service.close()


def test_what_is_published_goes_into_a_feed_also_where_that_was_away(chain, tmp_path: Path) -> None:
    task = chain()
    place = tmp_path / "feed"
    place.write_text("no folder")
    service = CompanionService(arguments_for(task, tmp_path, feed=str(place)), tables_of(task))
    run_batches(service, [task.batch() for _ in range(6)])
    published = service.newest(0).published
    assert service._feeder.drain(60)
    assert published is not None and "feed" in service.status().error
    place.unlink()
    run_batches(service, [task.batch()])
    assert service._feeder.drain(60) and not service.status().error
    published = service.newest(0).published
    manifest = FolderFeed(place).manifest()
    newest = manifest.versions[-1]
    assert (newest.version, newest.checksum) == (published.version, published.checksum)
    assert newest.policy_version == published.policy_version
    assert newest.judged.mean_acceptance_length == published.mean_acceptance_length > 1.0
    assert len(newest.judged.acceptance_per_position) == 3
    assert manifest.actor == FeedActor.of(HeadsConfig(task.hidden, task.vocab, 3), task.lm_head_VD)
    verify(FolderFeed(place), newest, manifest.actor, tmp_path)
    files = len(list(place.iterdir()))
    run_batches(service, [task.batch()])
    assert service._feeder.drain(60)
    if service.newest(published.version).published is None:
        assert len(list(place.iterdir())) == files, "the same version is put there once"
    service.close()


@torch.no_grad()
def test_a_resumed_companion_puts_its_version_into_the_feed_before_any_batch(
    chain, tmp_path: Path
) -> None:
    """What was still on its way there at the end came with the next batch at best."""
    task = chain()
    feed = FolderFeed(tmp_path / "feed")
    arguments = arguments_for(task, tmp_path, feed=str(feed.folder))
    first = CompanionService(arguments, tables_of(task))
    for version in (1, 2):
        first._cycle.version = version
        first._cycle.serving.blocks[0].add_(0.1)
        if version == 1:
            first._publish()
            first._feed_newest()
            assert first._feeder.drain(60)
    first.save(str(tmp_path / "saved"))
    first.close()
    for _ in range(2):
        resumed = dataclasses.replace(arguments, resume_from=str(tmp_path / "saved"))
        service = CompanionService(resumed, tables_of(task))
        assert service._feeder.drain(60)
        assert [version.version for version in feed.manifest().versions] == [1, 2]
        assert feed.manifest().versions[-1].checksum == service.newest(0).published.checksum
        service._feed_newest()
        assert service._feeder.drain(60) and feed.manifest().newest == 2, "it is there once"
        service.close()


@torch.no_grad()
def test_a_restarted_companion_goes_on_with_the_numbers_of_a_feed_that_was_lost_meanwhile(
    chain, tmp_path: Path
) -> None:
    task = chain()
    feed = FolderFeed(tmp_path / "feed")

    def published(name: str, **more: Any) -> CompanionService:
        arguments = arguments_for(task, tmp_path, name, feed=str(feed.folder))
        service = CompanionService(dataclasses.replace(arguments, **more), tables_of(task))
        service._cycle.version += 1
        service._cycle.serving.blocks[0].add_(0.1)
        service._publish()
        service._feed_newest()
        assert service._feeder.drain(60) and not service.status().error
        return service

    # An earlier run has filled the feed, so its numbers are higher than the companion's.
    for _ in range(5):
        published("earlier").close()
    shutil.rmtree(tmp_path / "earlier")
    first = published("a")
    assert feed.manifest().newest == 6
    first.save(str(tmp_path / "saved"))
    first.close()
    shutil.rmtree(feed.folder)
    again = published("a", resume_from=str(tmp_path / "saved"))
    assert [version.version for version in feed.manifest().versions][-1] > 6
    again.close()


def test_a_feed_that_takes_long_does_not_hold_the_training(
    chain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An upload may last minutes: meanwhile no batch was learned from, and nothing said why."""
    monkeypatch.setattr("medusa_ppo.companion.feeder.LONG_S", 0.0)
    task = chain()
    place = str(tmp_path / "feed")
    service = CompanionService(arguments_for(task, tmp_path, feed=place), tables_of(task))
    begun, go_on = threading.Event(), threading.Event()
    manifest = FolderFeed.manifest

    def slow(feed: FolderFeed) -> Any:
        begun.set()
        assert go_on.wait(240)
        return manifest(feed)

    monkeypatch.setattr(FolderFeed, "manifest", slow)
    for _ in range(12):
        run_batches(service, [task.batch()])
        if begun.is_set():
            break
    assert begun.wait(60)
    run_batches(service, [task.batch()])
    assert "on their way into the feed" in service.status().error
    go_on.set()
    assert service._feeder.drain(60) and not service.status().error
    found = FolderFeed(place).manifest()
    assert found is not None and found.newest == service.newest(0).published.version
    service.close()


def test_new_tables_are_used(chain, tmp_path: Path) -> None:
    task = chain()
    service = CompanionService(arguments_for(task, tmp_path), tables_of(task))
    task.drift()
    service.submit(pack(task.batch()), tables_of(task))
    assert service.drain(60)
    assert torch.equal(service._cycle.trainer.lm_head_VD, task.lm_head_VD)
    service.close()


def run_batches(service: CompanionService, batches) -> None:
    for batch in batches:
        service.submit(pack(batch))
    assert service.drain(60)


def test_each_batch_is_trained_on_with_the_tables_of_its_actor(
    chain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch that waits while newer tables come was trained with these, of another policy."""
    task = chain()
    waits = threading.Event()
    seen: list[torch.Tensor] = []
    original = Cycle.run

    def run(cycle: Cycle, batch: RolloutBatch):
        assert waits.wait(30)
        seen.append(cycle.trainer.lm_head_VD.clone())
        return original(cycle, batch)

    monkeypatch.setattr(Cycle, "run", run)
    service = CompanionService(arguments_for(task, tmp_path), tables_of(task))
    tables = [task.lm_head_VD, task.lm_head_VD * 2, task.lm_head_VD * 3]
    for table in tables:
        service.submit(pack(task.batch()), pack((table, None)))
    waits.set()
    assert service.drain(60)
    assert len(seen) == 3 and all(map(torch.equal, seen, tables))
    service.close()


def test_saved_and_resumed_is_the_same_to_the_bit(chain, tmp_path: Path) -> None:
    task = chain()
    batches = [task.batch() for _ in range(8)]
    straight = CompanionService(arguments_for(task, tmp_path, "straight"), tables_of(task))
    run_batches(straight, batches)
    first = CompanionService(arguments_for(task, tmp_path, "first"), tables_of(task))
    run_batches(first, batches[:3])
    saved = Path(first.save(str(tmp_path / "saved"))).read_bytes()
    header = 8 + int.from_bytes(saved[:8], "little")
    assert 0 <= len(saved) - header - first.state_bytes() < 100, "all but some numbers"
    first.close()
    second = CompanionService(
        arguments_for(task, tmp_path, "second", resume_from=str(tmp_path / "saved")),
        tables_of(task),
    )
    if first.newest(0).published is not None:
        assert second.newest(0).published.checksum == first.newest(0).published.checksum
    run_batches(second, batches[3:])
    assert second.newest(0).published.checksum == straight.newest(0).published.checksum
    left = straight._cycle.state_dict()
    right = second._cycle.state_dict()
    assert (
        all(torch.equal(value, right[name]) for name, value in left.items())
        and left.keys() == right.keys()
    )
    assert second.status().batches_received == 8
    straight.close()
    second.close()


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (OSError(errno.ESTALE, "Stale file handle"), True),
        (OSError(errno.EIO, "Input/output error"), True),
        (MemoryError("Cannot allocate memory (os error 12)"), True),
        (RuntimeError("unable to mmap 8 bytes from file <x>: Cannot allocate memory (12)"), True),
        (RuntimeError("Storage size calculation overflowed"), False),
        (FileNotFoundError(errno.ENOENT, "No such file or directory"), False),
        (SafetensorError("incomplete metadata"), False),
    ],
)
def test_a_state_that_could_not_be_read_is_not_called_unusable(
    chain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, passes: bool
) -> None:
    """The next try may read it. Whoever resumes gives a state up that is damaged or missing."""
    task = chain()
    state = tmp_path / "saved" / STATE_FILE
    save_state(state, {"x": torch.zeros(2)})

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("heads.tensorfile.safe_open", fail)
    with pytest.raises(MedusaError) as caught:
        CompanionService(
            arguments_for(task, tmp_path, resume_from=str(state.parent)), tables_of(task)
        )
    assert type(caught.value) is (CompanionError if passes else CheckpointError)
    assert str(state) in str(caught.value.given) and str(error) in str(caught.value.given)


def test_a_second_start_with_the_same_arguments_goes_on(chain, tmp_path: Path) -> None:
    """What Ray does after a crash: the same constructor again, in a new process."""
    task = chain()
    arguments = arguments_for(task, tmp_path)
    first = CompanionService(arguments, tables_of(task))
    saved = 0
    known = 0
    for number in range(1, 7):
        run_batches(first, [task.batch()])
        if (version := first.status().versions_published) > known:
            saved = number
            known = version
    published = first.newest(0).published
    first._queue.close()
    second = CompanionService(arguments, tables_of(task))
    assert (
        second.status().batches_trained == saved > 0
        and second.newest(0).published.version == published.version
    )
    assert second.newest(0).published.checksum == published.checksum
    task.drift()  # something new to learn
    for _ in range(8):
        second.submit(pack(task.batch()), tables_of(task))
    assert second.drain(60) and second.newest(0).published.version > published.version
    second.close()


def test_a_second_start_on_another_node_goes_on(chain, tmp_path: Path) -> None:
    """There the run's folder is the same, and the folder of published versions is empty."""
    task = chain()
    arguments = arguments_for(task, tmp_path)
    first = CompanionService(arguments, tables_of(task))
    run_batches(first, [task.batch() for _ in range(6)])
    published = first.newest(0).published
    first.close()
    shutil.rmtree(arguments.publish_dir)
    second = CompanionService(arguments, tables_of(task))
    again = second.newest(0).published
    assert second.status().batches_trained > 0 and (again.version, again.checksum) == (
        published.version,
        published.checksum,
    )
    second.close()


def test_on_another_node_a_companion_removes_what_it_has_published(chain, tmp_path: Path) -> None:
    """The loop removes its own node's folder: the versions (each 2 GiB at a width of 4,096) stayed
    in the memory of the companion's.
    """
    task = chain()

    def given(folder: Path) -> ServiceArguments:
        return dataclasses.replace(arguments_for(task, tmp_path), publish_dir=str(folder))

    there = tmp_path / "shm" / "medusa-ppo-heads-there"
    service = CompanionService(given(there), tables_of(task))
    run_batches(service, [task.batch() for _ in range(6)])
    assert list(there.glob("heads-*.safetensors")) and (there / LOCK).is_file()
    again = CompanionService(given(there), tables_of(task))
    again.close()
    assert there.is_dir(), "who does not own it leaves it"
    service.close()
    assert not there.exists()
    # Of one that was killed, the next one goes on with the versions, and removes them.
    there.mkdir()
    (there / LOCK).touch()
    service = CompanionService(given(there), tables_of(task))
    assert there.is_dir()
    service.close()
    assert not there.exists()
    with contextlib.closing(OwnedFolder("medusa-ppo-heads-")) as loops:
        CompanionService(given(loops.path), tables_of(task)).close()
        assert loops.path.is_dir()


def test_the_state_is_written_with_each_version_and_seldom_without(
    chain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is several times the heads: some 10 GiB at a width of 4,096."""
    task = chain()
    service = CompanionService(
        arguments_for(task, tmp_path, gate_confidence=0.999), tables_of(task)
    )
    path = tmp_path / "a" / "run" / "companion" / STATE_FILE
    written = []
    batches = 0
    before = service.status().versions_published
    for _ in range(24):
        path.unlink(missing_ok=True)
        run_batches(service, [task.batch(28, 8)])
        batches = batches + 1
        now = service.status().versions_published
        assert path.is_file() == (now > before or batches == SAVED_EVERY)
        if path.is_file():
            state = load_state(path)
            assert now == before or not any(name.startswith("serving.") for name in state), (
                "a new version is the mean, which is there"
            )
            written.append(now > before)
            batches = 0
        before = now
    assert set(written) == {True, False}
    service.close()


def test_versions_never_go_back_when_the_saved_state_is_older(chain, tmp_path: Path) -> None:
    task = chain()
    arguments = arguments_for(task, tmp_path)
    first = CompanionService(arguments, tables_of(task))
    run_batches(first, [task.batch() for _ in range(6)])
    published = first.newest(0).published
    assert published.version > 1
    (tmp_path / "a" / "run" / "companion" / STATE_FILE).unlink()
    first._queue.close()
    second = CompanionService(arguments, tables_of(task))
    assert (
        second.newest(0).published.version == published.version
        and second.newest(0).published.checksum == published.checksum
    )
    run_batches(second, [task.batch() for _ in range(12)])
    assert second.status().versions_published >= published.version
    second.close()


def test_a_resumed_companion_never_goes_back_to_what_is_done_again(chain, tmp_path: Path) -> None:
    """The state of before the run was killed is newer than the checkpoint: a crash right after the
    resumption must not find it.
    """
    task = chain()
    batches = [task.batch() for _ in range(6)]
    first = CompanionService(arguments_for(task, tmp_path, "run"), tables_of(task))
    run_batches(first, batches[:2])
    first.save(str(tmp_path / "checkpoint"))
    run_batches(first, batches[2:])  # Its own saved state holds six batches now.
    first.close()
    again = dataclasses.replace(
        arguments_for(task, tmp_path, "run", resume_from=str(tmp_path / "checkpoint")),
        publish_dir=str(tmp_path / "fresh"),
    )
    CompanionService(again, tables_of(task)).close()
    crashed = CompanionService(again, tables_of(task))
    assert crashed.status().batches_trained == 2
    crashed.close()


def test_a_new_run_in_an_old_folder_takes_nothing_from_it(chain, tmp_path: Path) -> None:
    task = chain()
    old = CompanionService(arguments_for(task, tmp_path, "run"), tables_of(task))
    run_batches(old, [task.batch() for _ in range(12)])
    assert old.status().versions_published > 2
    old.close()
    new = dataclasses.replace(
        arguments_for(task, tmp_path, "run"), publish_dir=str(tmp_path / "fresh")
    )
    CompanionService(new, tables_of(task)).close()
    crashed = CompanionService(new, tables_of(task))
    assert crashed.status().batches_trained == 0 and crashed.newest(0).published is None
    run_batches(crashed, [task.batch() for _ in range(12)])
    published = crashed.newest(0).published
    assert (tmp_path / "run" / "run" / "heads" / f"v{published.version:06d}").is_dir(), (
        "higher numbers of the old run don't push it out"
    )
    crashed.close()


def test_what_a_killed_companion_had_half_written_is_removed(chain, tmp_path: Path) -> None:
    """Only `ppo --resume` did: each death while the state was written left its gigabytes."""
    task = chain()
    given = arguments_for(task, tmp_path)
    left = [
        Path(given.run_dir) / "companion" / f".{STATE_FILE}.new-abc",
        Path(given.run_dir) / "heads" / ".v000003.new-abc" / "model.safetensors",
        Path(given.publish_dir) / ".heads-000003.safetensors.new-abc",
    ]
    kept = [
        Path(given.run_dir) / "checkpoint" / ".other.new-abc",
        Path(given.publish_dir) / ".fetched-000003.safetensors.new-abc",
    ]
    for path in left + kept:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"half")
    service = CompanionService(given, tables_of(task))
    assert not any(path.exists() for path in left) and all(path.exists() for path in kept)
    assert not left[1].parent.exists()
    service.close()


def counted_moves(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Where the cycle's tensors move from now on."""
    moves: list[str] = []
    move = Cycle.move_to

    def moved(self: Cycle, device: torch.device) -> None:
        moves.append("host" if device is HOST else "gpu")
        move(self, device)

    monkeypatch.setattr(Cycle, "move_to", moved)
    return moves


def test_the_gpu_is_left_to_others_between_batches(chain, tmp_path: Path, monkeypatch) -> None:
    """What is mocked: the GPU. Its device is the CPU too, so moves are counted by where they go;
    the cycle and the training are real.
    """
    moves = counted_moves(monkeypatch)
    task = chain()
    batches = [task.batch() for _ in range(6)]
    service = CompanionService(arguments_for(task, tmp_path, num_gpus=0.5), tables_of(task))
    assert moves == ["host"], "at once after the start"
    for batch in batches[:3]:
        service.submit(pack(batch))
        assert service.drain(60)
    assert moves == ["host", *["gpu", "host"] * 3]
    moves.clear()
    with service._state_lock:  # Busy, so that batches pile up.
        for batch in batches[3:]:
            service.submit(pack(batch))
    assert service.drain(60)
    assert moves.count("gpu") == 3 and moves[-1] == "host" and moves.count("host") < 3, (
        "not between batches that wait"
    )
    plain = CompanionService(arguments_for(task, tmp_path, "plain"), tables_of(task))
    moves.clear()
    run_batches(plain, batches)
    assert moves == []
    left = service._cycle.state_dict()
    right = plain._cycle.state_dict()
    assert all(torch.equal(value, right[name]) for name, value in left.items())
    assert service.status().gpu_gib is None
    service.close()
    plain.close()


def test_the_status_says_how_much_is_trained(chain, tmp_path: Path) -> None:
    task = chain()
    service = CompanionService(arguments_for(task, tmp_path), tables_of(task))
    assert service.status().passes == service.status().learning_rate == 0
    # Of few prompts none is held out: a batch is judged on when three quarters as many positions
    # were trained on, here two passes over a quarter of two batches.
    run_batches(service, [sampled(task.batch(), 0.25) for _ in range(3)])
    status = service.status()
    assert (status.passes, status.judged) == (2, 1) and status.positions_frac == pytest.approx(
        0.25, abs=0.05
    )
    (group,) = service._cycle.trainer._optimizer.param_groups
    assert status.learning_rate == group["lr"] > 0
    service.close()


def test_a_training_thread_that_is_stuck_is_told_and_one_that_gives_way_is_not(
    chain, tmp_path: Path
) -> None:
    """Polls are answered by other threads, so an answer alone says nothing."""
    task = chain()
    stuck = threading.Event()
    service = CompanionService(arguments_for(task, tmp_path), tables_of(task))
    assert service.newest(0).stuck_s == 0
    service._cycle.run = lambda batch: stuck.wait(20)  # type: ignore[assignment,return-value]
    service.submit(pack(task.batch()))
    time.sleep(0.3)
    assert 0.1 < service.newest(0).stuck_s < 5
    service._pace.hold(True)
    assert service.newest(0).stuck_s > 0.1, "it does not wait, whatever the loop wants"
    stuck.set()
    assert service.drain(10)
    service._cycle.run = lambda batch: service._give_way()  # type: ignore[assignment,return-value]
    service.submit(pack(task.batch()))
    time.sleep(0.3)
    assert service.newest(0).stuck_s == 0, "it waits"
    service._pace.hold(False)
    service.drain(10)
    service.close()


def test_what_others_do_while_it_waits_is_not_taken_from_them(
    chain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in a status that is asked for while it waits, before it trains and in the middle."""
    task = chain()
    arguments = arguments_for(task, tmp_path)
    pace = Pace(Path(arguments.publish_dir))
    wanted = itertools.count(step=100.0)
    monkeypatch.setattr(service_module, "cores_wanted_s", lambda: 0.0)
    monkeypatch.setattr(service_module, "cores_idle_s", lambda: 0.0)
    arguments = dataclasses.replace(arguments, takes_turns=True, pace=pace.name)
    service = CompanionService(arguments, tables_of(task))
    assert service.hears_loop()
    service._cycle.run = lambda batch: service._give_way()  # type: ignore[assignment,return-value]
    service.submit(pack(task.batch()))
    assert until(lambda: service._waits_since is not None)
    monkeypatch.setattr(service_module, "cores_wanted_s", lambda: next(wanted))
    assert service.status().worked_s == 0.0, "it waits for a core"
    pace.hand_over()
    assert service.drain(10)
    assert service.status().worked_s < 1.0
    service.close()


def test_a_companion_that_does_not_hear_the_loop_takes_no_turns(chain, tmp_path: Path) -> None:
    """On another node; the loop then counts nothing and waits for nothing."""
    task = chain()
    arguments = dataclasses.replace(arguments_for(task, tmp_path), takes_turns=True, pace=b"other")
    service = CompanionService(arguments, tables_of(task))
    assert not service.hears_loop()
    run_batches(service, [task.batch()])
    service.close()


def test_an_error_of_cuda_ends_the_process_and_other_errors_do_not(
    chain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = chain()
    ended = []
    service = CompanionService(arguments_for(task, tmp_path), tables_of(task))
    monkeypatch.setattr(service, "_start_again", ended.append)
    for error in (
        torch.OutOfMemoryError("small"),
        ValueError("odd"),
        torch.AcceleratorError("an illegal memory access"),
    ):

        def fail(batch: RolloutBatch, error: Exception = error) -> None:
            raise error

        service._cycle.run = fail  # type: ignore[method-assign,assignment]
        run_batches(service, [task.batch()])
    assert len(ended) == 1 and "illegal memory access" in ended[0]
    service.close()


def test_an_error_while_leaving_the_gpu_does_not_end_the_training(
    chain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = chain()
    service = CompanionService(arguments_for(task, tmp_path), tables_of(task))
    rest = service._rest
    failed = []

    def rest_once() -> None:
        if failed:
            return rest()
        failed.append(True)
        raise RuntimeError("no memory on the host")

    monkeypatch.setattr(service, "_rest", rest_once)
    run_batches(service, [task.batch()])
    assert "no memory on the host" in service.status().error
    run_batches(service, [task.batch()])
    assert (
        service.status().alive
        and service.status().error == ""
        and service.status().batches_trained == 2
    )
    service.close()


@pytest.mark.parametrize("where", ["learning", "saving"])
def test_after_an_error_too_the_gpu_is_left_to_the_loop(
    chain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """What is mocked: the GPU, as above. A batch that ran out of its memory left the heads, the
    optimizer and the tables there until the next batch.
    """
    moves = counted_moves(monkeypatch)
    task = chain()
    service = CompanionService(arguments_for(task, tmp_path, num_gpus=0.1), tables_of(task))

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("no memory on the loop's GPU")

    with monkeypatch.context() as patch:
        if where == "learning":
            patch.setattr(service._cycle, "run", fail)
        else:
            patch.setattr(service, "_feed_newest", fail)
        run_batches(service, [task.batch()])
        assert "no memory on the loop's GPU" in service.status().error
    assert moves == ["host", "gpu", "host"]
    run_batches(service, [task.batch()])
    assert service.status().error == "" and moves[-2:] == ["gpu", "host"]
    service.close()


def test_goes_on_from_what_the_engine_has(chain, tmp_path: Path) -> None:
    """After an alarm, or when a companion has lost its state: what is published next has a newer
    number than the engine's.
    """
    task = chain()
    source = CompanionService(arguments_for(task, tmp_path, "a"), tables_of(task))
    run_batches(source, [task.batch() for _ in range(8)])
    state = load_state(source.newest(0).published.path)
    source.close()
    service = CompanionService(arguments_for(task, tmp_path, "b"), tables_of(task))
    assert service.newest(0).version == 0
    service.adopt(41, pack(state), 40)
    assert service.newest(0).version == 41
    for heads in (service._cycle.serving, service._cycle.candidate, service._cycle.trainer.heads):
        assert checksum(heads.trainable_state()) == checksum(state)
    task.drift()
    service.submit(pack(task.batch(100)), pack((task.lm_head_VD, None)))
    run_batches(service, [task.batch(100) for _ in range(10)])
    assert service.newest(41).published.version > 41
    service.close()


@pytest.mark.parametrize("left", ["all", "files", "state"])
def test_a_restart_goes_on_from_what_the_engine_has_too(chain, tmp_path: Path, left: str) -> None:
    """The engine refused the last version. `left`: what the new process finds of the old one."""
    task = chain()
    arguments = arguments_for(task, tmp_path)
    first = CompanionService(arguments, tables_of(task))
    while first.newest(1).published is None:
        run_batches(first, [task.batch()])
    refused = first.newest(1).published
    before = load_state(
        refused.path.replace(f"{refused.version:06d}", f"{refused.version - 1:06d}")
    )
    first.adopt(refused.version, pack(before), refused.version - 1)
    first._queue.close()
    kept, metadata = load_heads(tmp_path / "a" / "run" / "heads" / f"v{refused.version:06d}")
    assert metadata.version == refused.version
    assert checksum(kept.trainable_state()) == checksum(before)
    if left == "files":
        (tmp_path / "a" / "run" / "companion" / STATE_FILE).unlink()
    if left == "state":
        shutil.rmtree(arguments.publish_dir)
    second = CompanionService(arguments, tables_of(task))
    assert second.newest(0).version == refused.version
    assert checksum(before) != refused.checksum
    assert checksum(second._cycle.serving.trainable_state()) == checksum(before)
    if left != "files":
        assert checksum(second._cycle.candidate.trainable_state()) == checksum(before)
    if left == "all":
        assert second._cycle.serving_version == refused.version - 1, "the engine still has it"
    assert second.newest(refused.version).published is None
    second.close()


def test_a_resumed_run_gives_its_engine_the_last_number(chain, tmp_path: Path) -> None:
    """The engine that went back to earlier heads is gone; a new one gets these as the version that
    was published last.
    """
    task = chain()
    first = CompanionService(arguments_for(task, tmp_path, "a"), tables_of(task))
    before = first._cycle.serving.trainable_state()
    while (refused := first.newest(0).published) is None:
        run_batches(first, [task.batch()])
    first.adopt(refused.version, pack(before), 0)
    first.save(str(tmp_path / "saved"))
    first.close()
    resumed = arguments_for(task, tmp_path, "b", resume_from=str(tmp_path / "saved"))
    second = CompanionService(resumed, tables_of(task))
    published = second.newest(0).published
    assert published.version == refused.version
    assert published.checksum == checksum(before)
    assert second._cycle.serving_version == published.version
    second.close()


def test_waiting_for_a_core_takes_nothing_from_others(
    chain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "cores_wanted_s", lambda: math.nan)
    task = chain()
    service = CompanionService(arguments_for(task, tmp_path), tables_of(task))
    learn = service._learn
    monkeypatch.setattr(
        service, "_learn", lambda batch: (time.sleep(1.0), learn(batch))[1]
    )  # As a scheduler would let it wait.
    run_batches(service, [task.batch(4)])
    status = service.status()
    assert status.train_s > 1.0 and 0 < status.worked_s < status.train_s - 0.5
    service.close()


@pytest.mark.parametrize(("wanted_s", "taken"), [(0.0, False), (1e6, True), (math.nan, True)])
def test_cores_that_nobody_wanted_are_not_taken_from_the_loop(
    chain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted_s: float, taken: bool
) -> None:
    """The kernel counts the seconds in which somebody waited for a core; where it doesn't, all
    count.
    """
    clock = iter(range(10**6))
    monkeypatch.setattr(service_module, "cores_wanted_s", lambda: wanted_s * next(clock))
    task = chain()
    service = CompanionService(arguments_for(task, tmp_path), tables_of(task))
    run_batches(service, [task.batch()])
    status = service.status()
    assert status.train_s > 0 and (status.worked_s > 0) == taken
    service.close()


@pytest.mark.parametrize("idle", [False, True])
def test_between_its_turns_a_companion_uses_what_is_idle(
    chain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, idle: bool
) -> None:
    """Where no core is, a batch waits for the turn, and is then trained on all cores."""
    monkeypatch.setattr(
        service_module, "cores_idle_s", lambda: 2 * time.monotonic() if idle else 0.0
    )
    monkeypatch.setattr(service_module, "cores_wanted_s", lambda: 0.0)
    monkeypatch.setattr(service_module, "IDLE_S", 0.1)
    monkeypatch.setattr(service_module.os, "sched_getaffinity", lambda pid: {0, 1, 2})
    task = chain()
    arguments = arguments_for(task, tmp_path)
    pace = Pace(Path(arguments.publish_dir))
    arguments = dataclasses.replace(arguments, takes_turns=True, pace=pace.name)
    service = CompanionService(arguments, tables_of(task))
    threads: set[int] = set()
    run = service._cycle.run
    monkeypatch.setattr(
        service._cycle, "run", lambda batch: (threads.add(torch.get_num_threads()), run(batch))[1]
    )
    service.submit(pack(task.batch()))
    if not idle:
        assert not service.drain(1.0) and not threads, "somebody needs the cores"
        pace.hand_over()
    assert service.drain(120)
    assert threads == {1 if idle else 3}
    service.close()


def test_training_seconds_run_while_it_trains(chain, tmp_path: Path) -> None:
    task = chain()
    service = CompanionService(arguments_for(task, tmp_path), tables_of(task))
    with service._state_lock:
        service.submit(pack(task.batch()))
        deadline = time.monotonic() + 10
        while service.status().train_s == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        first = service.status().train_s
        time.sleep(0.05)
        assert service.status().train_s > first > 0
    service.drain(60)
    service.close()


@pytest.mark.parametrize("writes", ["_checkpoint", "_publish_unwritten"])
def test_files_are_no_training(
    chain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: str
) -> None:
    """On a GPU all seconds of a batch count as taken from the loop: those of a slow disk, too, of
    which the next steps then paid off the budget. What is mocked: the GPU, and the disk.
    """
    monkeypatch.setattr(service_module, "SAVED_EVERY", 1)
    task = chain()
    service = CompanionService(arguments_for(task, tmp_path), tables_of(task))
    monkeypatch.setattr(service, "_work_s", lambda took_s: took_s)  # As on a GPU.
    monkeypatch.setattr(
        service._cycle, "run", lambda batch: SimpleNamespace(published=False, problem="")
    )
    writing, go_on = threading.Event(), threading.Event()

    def write() -> None:
        writing.set()
        assert go_on.wait(60)

    monkeypatch.setattr(service, writes, write)
    monkeypatch.setattr(service, "_rest_anyway", lambda: None)
    service.submit(pack(task.batch()))
    assert writing.wait(60)
    trained = service.status()
    time.sleep(0.1)
    meanwhile = service.status()
    go_on.set()
    assert service.drain(60)
    for status in (meanwhile, service.status()):
        assert status.train_s == trained.train_s > 0 and status.worked_s == trained.worked_s > 0
    service.close()


# ---- disks and clocks


@pytest.mark.parametrize("how", ["cut", "flip"])
def test_a_crash_that_left_a_damaged_state_goes_on_from_the_published_heads(
    chain, tmp_path: Path, how: str
) -> None:
    task = chain()
    arguments = arguments_for(task, tmp_path)
    first = CompanionService(arguments, tables_of(task))
    run_batches(first, [task.batch() for _ in range(6)])
    published = first.newest(0).published
    first._queue.close()
    file = tmp_path / "a" / "run" / "companion" / STATE_FILE
    data = bytearray(file.read_bytes())
    data[-100] ^= 1  # Of a tensor: only the sum can tell.
    file.write_bytes(data[: len(data) // 2] if how == "cut" else data)
    second = CompanionService(arguments, tables_of(task))
    again = second.newest(0).published
    assert (again.version, again.checksum) == (published.version, published.checksum)
    run_batches(second, [task.batch()])  # Before anybody asks.
    first_told = second.status()
    assert "saved state is damaged" in first_told.error and first_told.batches_trained == 1
    assert second.status().error == ""
    second.close()
    resumed = dataclasses.replace(
        arguments, resume_from=str(file.parent), publish_dir=str(tmp_path / "fresh")
    )
    file.write_bytes(data)
    with pytest.raises(CheckpointError):
        CompanionService(resumed, tables_of(task))


def test_damaged_published_heads_are_passed_over_after_a_crash(chain, tmp_path: Path) -> None:
    task = chain()
    arguments = arguments_for(task, tmp_path)
    first = CompanionService(arguments, tables_of(task))
    run_batches(first, [task.batch() for _ in range(12)])
    version = first.newest(0).published.version
    first._queue.close()
    (tmp_path / "a" / "run" / "companion" / STATE_FILE).unlink()
    newest = tmp_path / "a" / "shm" / f"heads-{version:06d}.safetensors"
    newest.write_bytes(newest.read_bytes()[:50])
    second = CompanionService(arguments, tables_of(task))
    assert second.newest(0).published.version == version - 1
    second.close()


def test_a_full_disk_keeps_no_heads_from_the_engine(
    chain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = chain()
    service = CompanionService(arguments_for(task, tmp_path), tables_of(task))
    save = service_module.save_state
    heads = service_module.save_heads
    full = OSError(28, "No space left on device")

    def save_state(path: Path, state: Any) -> None:
        if "run" in path.parts:
            raise full
        save(path, state)

    def save_heads(*args: Any, **kwargs: Any) -> None:
        raise full

    monkeypatch.setattr(service_module, "save_state", save_state)
    monkeypatch.setattr(service_module, "save_heads", save_heads)
    run_batches(service, [task.batch() for _ in range(8)])
    published = service.newest(0).published
    assert published is not None and checksum(load_state(published.path)) == published.checksum
    assert service.newest(0).error == "" and "No space left" in service.status().error
    monkeypatch.setattr(service_module, "save_state", save)
    monkeypatch.setattr(service_module, "save_heads", heads)
    run_batches(service, [task.batch()])
    assert (
        service.status().error == ""
        and (tmp_path / "a" / "run" / "companion" / STATE_FILE).is_file()
    )
    service.close()


def test_heads_that_could_not_be_written_reach_the_engine_later(
    chain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = chain()
    service = CompanionService(arguments_for(task, tmp_path), tables_of(task))
    save = service_module.save_state

    def save_state(path: Path, state: Any) -> None:
        if path.name.startswith("heads-"):
            raise OSError(28, "No space left on device")
        save(path, state)

    monkeypatch.setattr(service_module, "save_state", save_state)
    run_batches(service, [task.batch() for _ in range(8)])
    status = service.status()
    assert status.versions_published > 0 and "where the engine takes them from" in status.error
    assert service.newest(0).published is None
    monkeypatch.setattr(service_module, "save_state", save)
    # A batch that can't bring a version of its own.
    spoilt = task.batch()
    spoilt.hidden_MD[0, 0] = math.nan
    run_batches(service, [spoilt])
    published = service.newest(0).published
    assert published is not None and published.version == status.versions_published
    assert checksum(load_state(published.path)) == published.checksum
    # Once is enough.
    Path(published.path).unlink()
    run_batches(service, [spoilt])
    assert not Path(published.path).exists()
    service.close()


def test_the_newest_heads_stay_when_the_clock_was_put_back(tmp_path: Path) -> None:
    files = [tmp_path / f"heads-{number:06d}.safetensors" for number in range(6)]
    for number, file in enumerate(files):
        file.touch()
        later = (
            10**9 if number < 4 else 0
        )  # Those before were written when the clock was years ahead.
        os.utime(file, (10**9 + later + number, 10**9 + later + number))
        forget_oldest(file, "heads-*.safetensors")
    assert sorted(tmp_path.iterdir()) == files[3:]


def test_a_warm_up_has_every_core_and_ordinary_batches_have_their_own(
    chain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is waited for before the first step, when nobody else computes."""
    task = chain()
    seen: list[int] = []
    run = Cycle.run
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(3)))
    monkeypatch.setattr(
        Cycle, "run", lambda *given: seen.append(torch.get_num_threads()) or run(*given)
    )
    service = CompanionService(arguments_for(task, tmp_path), tables_of(task))
    warm = dataclasses.replace(task.batch(), rising_s=5.0)
    for batch in (task.batch(), warm, task.batch()):
        service.submit(pack(batch))
        assert service.drain(240.0)
    service.close()
    assert seen[1] == 3 and seen[0] == seen[2] != 3, seen
