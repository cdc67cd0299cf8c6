"""Folders of a living process stay, those of a killed one go."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from heads.errors import EngineError
from medusa_ppo.config.engine_section import EngineConfig
from medusa_ppo.engines import ray_engine
from medusa_ppo.runtime import files as folders
from medusa_ppo.runtime.files import OwnedFolder, sweep

OWNER = """
import os, sys, time
from pathlib import Path
from medusa_ppo.runtime import files as folders
folders.SHARED_MEMORY = Path(sys.argv[1])
folder = folders.OwnedFolder("medusa-ppo-test-", shared_memory=True)
print(folder.path, flush=True)
time.sleep(float(sys.argv[2]))
if os.fork() == 0:
    folder.close()  # In a child that is not the owner.
    os._exit(0)
os.wait()
print(folder.path.is_dir())
"""


@pytest.fixture(autouse=True)
def own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other runs of this machine are left alone."""
    monkeypatch.setattr(folders, "SHARED_MEMORY", tmp_path / "shm")
    monkeypatch.setattr(folders.tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "shm").mkdir()
    (tmp_path / "tmp").mkdir()


def test_the_folder_of_a_killed_process_is_swept(tmp_path: Path) -> None:
    mine = OwnedFolder("mppo-")
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path / "shm"), "60"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert owner.stdout is not None
        folder = Path(owner.stdout.readline().strip())
        assert folder.parent == tmp_path / "shm" and sweep() == [] and folder.is_dir()
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        assert sweep() == [folder] and not folder.exists() and mine.path.is_dir()
    finally:
        owner.kill()
        owner.wait()
    mine.close()
    mine.close()
    assert not mine.path.exists()


def test_a_folder_goes_with_its_object_or_its_process_and_not_with_a_forked_child(
    tmp_path: Path,
) -> None:
    mine = OwnedFolder("mppo-")
    folder = mine.path
    assert folder.is_dir()
    del mine
    gc.collect()
    assert not folder.exists()
    ended = subprocess.run(
        [sys.executable, "-c", OWNER, str(tmp_path / "shm"), "0"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    name, was_there_after_the_fork = ended.stdout.split()
    assert (
        was_there_after_the_fork == "True"
        and Path(name).parent == tmp_path / "shm"
        and not Path(name).exists()
    )


def test_what_is_no_owners_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "shm" / "medusa-ppo-old").mkdir()
    (tmp_path / "shm" / "other" / folders.LOCK).mkdir(parents=True)
    kept = OwnedFolder("mppo-").keep()
    assert sweep() == [] and kept.is_dir() and not list(kept.iterdir())


def test_an_engine_that_starts_leaves_temporary_files_to_their_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be on another node, which has the folder too and does not see its locks."""
    places = [tmp_path / name / "medusa-ppo-heads" for name in ("tmp", "shm")]
    for place in places:
        place.mkdir()
        (place / folders.LOCK).touch()

    def not_started(*_: object, **__: object) -> None:
        raise EngineError("not started", given="", expected="", do="")

    monkeypatch.setattr(ray_engine, "ColocatedEngine", not_started)
    assert isinstance(
        ray_engine.EngineHost("model", None, EngineConfig(), 0, None).start({})[0], EngineError
    )
    assert [place.exists() for place in places] == [True, False]


def test_links_and_what_others_made_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everybody may write into these folders."""
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / folders.LOCK).touch()
    (tmp_path / "shm" / "medusa-ppo-link").symlink_to(precious)
    (tmp_path / "shm" / "medusa-ppo-lock").mkdir()
    (tmp_path / "shm" / "medusa-ppo-lock" / folders.LOCK).symlink_to(precious / folders.LOCK)
    assert (
        sweep() == []
        and (precious / folders.LOCK).is_file()
        and (tmp_path / "shm" / "medusa-ppo-lock").is_dir()
    )
    (tmp_path / "shm" / "medusa-ppo-other").mkdir()
    (tmp_path / "shm" / "medusa-ppo-other" / folders.LOCK).touch()
    monkeypatch.setattr(folders.os, "geteuid", lambda: 12345)
    assert sweep() == []
