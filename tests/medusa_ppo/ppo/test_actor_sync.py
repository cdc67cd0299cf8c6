"""The actor's way into the engine: the right names, nothing left behind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from heads.errors import SwapError
from heads.tensorfile import checksum, load_state
from medusa_ppo.engines.actor_sync import ActorSync, actor_state, actor_stream


@pytest.mark.parametrize("tied", [False, True])
def test_names_are_those_of_a_checkpoint(tiny_actor, tmp_path: Path, tied: bool):
    from safetensors import safe_open

    actor = tiny_actor(tied=tied)
    actor.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert actor_state(actor).keys() == set(file.keys())
        for name, tensor in actor_state(actor).items():
            torch.testing.assert_close(file.get_tensor(name), tensor, rtol=0, atol=0)
    assert all(
        dtype == torch.bfloat16 for dtype, _ in actor_stream(actor, torch.bfloat16).entries.values()
    )


@pytest.mark.parametrize("tied", [False, True])
def test_the_engine_gets_the_weights_and_the_version(tiny_actor, sampling_engine, tied: bool):
    actor = tiny_actor(tied=tied)
    engine = sampling_engine(actor)
    with torch.no_grad():
        for parameter in actor.parameters():
            parameter.add_(0.1)
    with ActorSync(engine) as sync:
        assert sync(actor, 7).version == 7
        folder = sync._folder.path
        assert len(list(folder.glob("*.safetensors"))) == 1
    assert not folder.exists()
    ids = torch.tensor([[1, 2, 3]])
    torch.testing.assert_close(engine.actor(ids).logits, actor(ids).logits, rtol=0, atol=0)
    assert engine.policy_version == 7


@pytest.mark.parametrize("streams", [False, True])
def test_an_engine_wakes_when_the_file_is_there(
    tiny_actor, sampling_engine, monkeypatch: pytest.MonkeyPatch, streams: bool
):
    """The actor may have been on its device until then. A broadcast needs both at once."""
    events = []
    engine = sampling_engine(tiny_actor())
    with ActorSync(engine) as sync:
        folder = sync._folder.path
        monkeypatch.setattr(engine, "streams", streams, raising=False)

        def take(given, version, checked=None):
            events.append("taken")
            if not isinstance(given, str):
                raise SwapError("not as a stream")

        monkeypatch.setattr(engine, "stream_actor", take, raising=False)
        monkeypatch.setattr(engine, "sync_actor", take)
        sync(
            tiny_actor(),
            1,
            lambda: events.append(f"woken, file {any(folder.glob('*.safetensors'))}"),
        )
    assert events == (
        ["woken, file False", "taken", "taken"] if streams else ["woken, file True", "taken"]
    )


def test_a_failing_engine_leaves_no_file(
    tiny_actor, sampling_engine, monkeypatch: pytest.MonkeyPatch
):
    engine = sampling_engine(tiny_actor())

    def refuse(path, version, checked):
        raise SwapError("no")

    monkeypatch.setattr(engine, "sync_actor", refuse)
    with ActorSync(engine) as sync:
        with pytest.raises(SwapError):
            sync(tiny_actor(), 1)
        assert not list(sync._folder.path.glob("*.safetensors"))


@pytest.mark.parametrize("linked", [False, True])
def test_a_file_without_readers_is_overwritten_and_no_other(
    tiny_actor, sampling_engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, linked: bool
):
    """Linked: as by a pool, which lets a file go when it has the next one."""
    engine = sampling_engine(tiny_actor())
    taken = engine.sync_actor
    files: list[int] = []
    kept: list[Path] = []
    sums: list[str] = []

    def take(path, version, checked):
        receipt = taken(path, version, checked)
        assert checksum(load_state(path)) == checked.checksum
        files.append(Path(path).stat().st_ino)
        sums.append(checked.checksum)
        if linked:
            kept.append(Path(f"{path}.kept"))
            kept[-1].hardlink_to(path)
        return receipt

    monkeypatch.setattr(engine, "sync_actor", take)
    actor = tiny_actor()
    with ActorSync(engine) as sync:
        for version in range(1, 6):
            with torch.no_grad():
                actor.get_input_embeddings().weight.add_(0.1)
            sync(actor, version)
            if linked:
                assert checksum(load_state(kept[-1])) == sums[-1]
                if version > 1:
                    assert checksum(load_state(kept[-2])) == sums[-2]
                    kept[-2].unlink()
    assert len(set(sums)) == 5
    assert files == [files[version % 2] if linked else files[0] for version in range(5)]
    assert len(set(files)) == (2 if linked else 1)
