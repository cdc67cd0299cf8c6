"""Saving and resuming a PPO run: run_dir/checkpoint, replaced atomically; safetensors and JSON, no
pickle.

checkpoint/
  state.json                   next step, versions, seconds so far, the configuration that
                               made it, and the other files' sizes and sums
  actor.safetensors            the actor's weights
  critic.safetensors           the critic's
  actor_optimizer.safetensors  AdamW moments of the actor, per weight
  critic_optimizer.safetensors the critic's
  shaping.json                 the KL coefficient and the scale of the rewards
  metrics.jsonl                a copy of the run's step lines so far
  carried.jsonl                prompts that are not answered yet, with the tokens so far
                               (ppo.carry_after)
  companion/                   the companion's own last state, if there is one
  memory.safetensors           what the engines remember of earlier responses, if they do
checkpoints/step-N/            the last saves, each as checkpoint/ (ppo.keep_checkpoints)
best/                          the actor that did best in an evaluation, for transformers, with
                               evaluation.json

There is no random state to save: prompts, sampling seeds and minibatches are functions of the seed
and the step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import operator
import os
import shutil
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from heads.checkpoint import load_state, remove_directory, save_state, write_json
from heads.errors import CheckpointError, CompanionError, ConfigError, MedusaError
from medusa_ppo import __version__
from medusa_ppo.companion.service import STATE_FILE as COMPANION_FILE
from medusa_ppo.config.config_file import merged
from medusa_ppo.config.run_config import RunConfig, known_keys
from medusa_ppo.config.section import unknown
from medusa_ppo.contract import metrics as names
from medusa_ppo.plugin import AnyPlugin, NoPlugin
from medusa_ppo.plugin.warm_up import FOLDER as WARM_UP_FOLDER
from medusa_ppo.ppo.learner import PPOLearner
from medusa_ppo.ppo.long_tail import Carried, read_carried, save_carried
from medusa_ppo.reports.run_files import (
    BEST_FOLDER,
    CHECKPOINT_FOLDER,
    COMPANION_FOLDER,
    KEPT_FOLDER,
    METRICS_FILE,
)
from medusa_ppo.reports.trackers import plain

logger = logging.getLogger(__name__)

FOLDER = CHECKPOINT_FOLDER
STATE_FILE = "state.json"
MEMORY_FILE = "memory.safetensors"
EVALUATION_FILE = "evaluation.json"
FORMAT_VERSION = 1
BEFORE_WITH_CONTEXT = {"heads": {"feed_forward": 0, "cell": 2, "copy_parts": 0}}
"""Sizes of heads with a context, which alone have them, in states before 0.4: these lack the keys,
and today's defaults are others.
"""
PLACE_KEYS = ("name", "out")
ACTOR_SIZES = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)
"""Parts of a model's config.json that identify an actor; its weights change with every step."""
State = Mapping[str, Tensor]
CHUNK_BYTES = 1 << 22
SUM_THREADS = 4
"""Files that are read at once for their sums: weights and moments of actor and critic are four."""


@dataclass(frozen=True)
class RunPosition:
    """Where a run stands.

    Attributes:
        next_step: the step that comes next.
        policy_version: version of the actor's weights.
        wall_s: seconds of all sessions of the run so far.
        carried: prompts that continue in the next step.
    """

    next_step: int = 0
    policy_version: int = 0
    wall_s: float = 0.0
    carried: tuple[Carried, ...] = ()


@contextlib.contextmanager
def save_companion(config: RunConfig, plugin: AnyPlugin, step: int) -> Iterator[None]:
    """If the loop waits for the companion, write its state to where `save_checkpoint` takes it
    from, before the block that calls that. The checkpoint of this step is written even if that
    fails: the actor is worth more than its heads, and a companion that is down would keep all later
    checkpoints from being written.

    Raises:
        CompanionError: after the block, with `companion.on_error=raise`.
    """
    if not config.companion.wait:
        yield
        return
    error = None
    try:
        saved = plugin.save(config.run_dir / COMPANION_FOLDER)
    except CompanionError as raised:
        saved, error = False, raised
    if not (saved or isinstance(plugin, NoPlugin)) and config.companion.enabled:
        _tell_unsaved(config.run_dir / COMPANION_FOLDER, step)
    yield
    if error is not None:
        raise error


def _tell_unsaved(folder: Path, step: int) -> None:
    found, then = "none", "begins with new heads"
    with contextlib.suppress(FileNotFoundError):
        written = time.localtime((folder / COMPANION_FILE).stat().st_mtime)
        found = f"the state of {time.strftime('%Y-%m-%d %H:%M:%S', written)}"
        then = "goes on with older heads, and does not repeat to the bit"
    logger.warning(
        "The companion's state could not be saved for the checkpoint of step %d, which holds %s: a"
        " run that is resumed from there %s.",
        step,
        found,
        then,
    )


def save_checkpoint(
    run_dir: Path,
    learner: PPOLearner,
    position: RunPosition,
    config: RunConfig,
    memory: State | None = None,
) -> Path:
    """Write run_dir/checkpoint; a crash at any moment leaves either the old or the new one,
    complete.

    Args:
        memory: the engines' memory; None or empty: they have none.
    """
    with fresh_folder(run_dir / FOLDER) as folder:
        learner.save(folder)
        if memory:
            save_state(folder / MEMORY_FILE, memory)
        _take_companion(run_dir / COMPANION_FOLDER, folder / COMPANION_FOLDER)
        if (run_dir / METRICS_FILE).is_file():
            shutil.copyfile(run_dir / METRICS_FILE, folder / METRICS_FILE)
        save_carried(folder, position.carried)
        write_json(folder / STATE_FILE, _state_of(position, config) | {"files": _sums(folder)})
    if config.ppo.keep_checkpoints is not None:
        _keep(run_dir, position.next_step, config.ppo.keep_checkpoints)
    return run_dir / FOLDER


def _state_of(position: RunPosition, config: RunConfig) -> dict[str, Any]:
    """What state.json says about a checkpoint, without its files."""
    where = {
        field.name: getattr(position, field.name)
        for field in dataclasses.fields(position)
        if field.name != "carried"
    }
    return {
        "format_version": FORMAT_VERSION,
        "version": __version__,
        **where,
        "config": plain(config),
    }


def is_saved(run_dir: Path, position: RunPosition, config: RunConfig) -> bool:
    """Whether run_dir/checkpoint is of this position, which its seconds tell from that of any other
    session of the run.
    """
    try:
        found = json.loads((run_dir / FOLDER / STATE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False  # None yet, or one that has to be replaced anyway.
    wanted = json.loads(json.dumps(_state_of(position, config)))
    return isinstance(found, dict) and wanted.items() <= found.items()


def _keep(run_dir: Path, step: int, count: int) -> None:
    """Keep the new checkpoint and the configured number before it. Files never change, so links are
    copies.

    Those of later steps are removed: somebody has gone back to an earlier checkpoint, and they
    would be kept in the place of the new ones, and be what a damaged one is replaced with.
    """
    with fresh_folder(run_dir / KEPT_FOLDER / f"step-{step:06d}") as folder:
        shutil.copytree(run_dir / FOLDER, folder, dirs_exist_ok=True, copy_function=_link)
    kept = {
        int(old.name.removeprefix("step-")): old
        for old in (run_dir / KEPT_FOLDER).glob("step-*")
        if old.name.removeprefix("step-").isdecimal()  # Else it is somebody's own copy.
    }
    stay = sorted(number for number in kept if number <= step)[-count:]
    for number in kept.keys() - set(stay):
        remove_directory(kept[number])


def keep_best(
    run_dir: Path,
    figures: Mapping[str, float],
    learner: PPOLearner,
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Keep the actor if no evaluation of the run was better. A full disk must not end a run: a
    failure is logged, and the old actor stays.
    """
    file = run_dir / BEST_FOLDER / EVALUATION_FILE
    try:
        if (
            file.is_file()
            and json.loads(file.read_text(encoding="utf-8"))[names.EVAL_REWARD]
            >= figures[names.EVAL_REWARD]
        ):
            return
        with fresh_folder(run_dir / BEST_FOLDER) as folder:
            learner.save_actor(folder)
            tokenizer.save_pretrained(folder)
            (folder / EVALUATION_FILE).write_text(
                json.dumps(dict(figures), indent=1) + "\n", encoding="utf-8"
            )
    # On a full disk safetensors raises an error of its own, and a fast tokenizer one of no kind.
    except Exception as error:
        logger.error("The best actor so far could not be saved; the previous one stays: %s", error)


@contextlib.contextmanager
def fresh_folder(target: Path) -> Iterator[Path]:
    """A new folder that replaces `target` if the block succeeds, and is removed if it doesn't.

    This takes two renames; a reader in between finds the old folder aside.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    new = Path(tempfile.mkdtemp(prefix=f".{target.name}.new-", dir=target.parent))
    old = target.with_name(f".{target.name}.old")
    try:
        yield new
        new.chmod(0o755)  # mkdtemp makes it accessible only to us.
        _to_disk(new)
        if os.path.lexists(target):
            remove_directory(old)
            os.rename(target, old)
        os.rename(new, target)
        _to_disk(target.parent)
        remove_directory(old)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _to_disk(path: Path) -> None:
    """Flush a file or a folder's entries: a power cut must not leave a name without its content."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sums(folder: Path) -> dict[str, list[int]]:
    """Size and CRC-32 of each file of a checkpoint but state.json; all are on disk afterwards."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != STATE_FILE)
    stopped = threading.Event()
    # A thread has about a gigabyte a second, and does not hold the interpreter's lock meanwhile.
    with ThreadPoolExecutor(SUM_THREADS, "medusa-ppo-sums") as pool:
        try:
            sums = list(pool.map(lambda path: _sum_of(path, stopped), paths))
        finally:
            # The pool waits for its threads. After a signal there is no time for hundreds of
            # gigabytes.
            stopped.set()
    names_of = [path.relative_to(folder).as_posix() for path in paths]
    return dict(zip(names_of, sums, strict=True))


def _sum_of(path: Path, stopped: threading.Event) -> list[int]:
    """The sum means nothing once `stopped` is set."""
    _to_disk(path)
    value = 0
    with path.open("rb") as file:
        while not stopped.is_set() and (part := file.read(CHUNK_BYTES)):
            value = zlib.crc32(part, value)
    return [path.stat().st_size, value]


def read_position(run_dir: Path, config: RunConfig, allow: Sequence[str] = ()) -> RunPosition:
    """The saved run's position, after checking that the configuration is the saved one.

    Args:
        allow: keys, or whole sections, that may have changed.

    Raises:
        CheckpointError: nothing was saved, or state.json is damaged.
        ConfigError: a key has changed, or `allow` names an unknown one.
    """
    keys = [key for key in known_keys() if key not in PLACE_KEYS]
    for name in allow:
        if not any(_within(key, name) for key in keys):
            raise unknown("--allow names no key of the configuration.", name, keys)
    file = saved_folder(run_dir) / STATE_FILE
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
        if raw["format_version"] != FORMAT_VERSION:
            raise ValueError(
                f"format_version {raw['format_version']}, this program reads {FORMAT_VERSION}"
            )
        position = RunPosition(
            int(raw["next_step"]), int(raw["policy_version"]), float(raw["wall_s"])
        )
        old = raw["config"]
        default = plain(RunConfig())
        now = plain(config)
        # Add the keys that are newer than the state.
        whole = merged(default, old)
        if whole["heads"]["kind"] == "hydra" and whole["heads"]["context"]:
            whole = merged(merged(whole, BEFORE_WITH_CONTEXT), old)
        was = {key: _look_up(whole, key) for key in keys}
    except (
        OSError,
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
        OverflowError,
        RecursionError,
    ) as error:
        given = f"{file}: {error!r}"
        do = "Start without --resume."
        raise CheckpointError(
            "The saved run is damaged.", given=given, expected=f"a complete {STATE_FILE}", do=do
        ) from None
    changed = [
        key
        for key, value in was.items()
        if value != _look_up(now, key) and not any(_within(key, name) for name in allow)
    ]
    if changed:
        given = ", ".join(
            f"{key} was {was[key]!r} and is {_look_up(now, key)!r}" for key in changed
        )
        do = (
            "Restore them, or let them differ: --resume"
            f" {' '.join(f'--allow {key}' for key in changed)}."
        )
        raise ConfigError(
            "The configuration differs from the saved one.",
            given=given,
            expected="the same values",
            do=do,
        )
    return dataclasses.replace(
        position, carried=read_carried(file.parent, wanted=config.ppo.carry_after is not None)
    )


def _within(key: str, name: str) -> bool:
    """Whether a dotted key is `name`, or is in a section of that name."""
    return key == name or key.startswith(f"{name}.")


def only_warmed_up(run_dir: Path) -> bool:
    """Whether the run was stopped in its warm-up or its first step, so that there is nothing else
    to lose.
    """
    saves = (run_dir / FOLDER, run_dir / f".{FOLDER}.old", run_dir / KEPT_FOLDER)
    steps = run_dir / METRICS_FILE
    begun = any(path.exists() for path in saves) or (steps.is_file() and steps.stat().st_size)
    return any((run_dir / WARM_UP_FOLDER).glob("round-*.json")) and not begun


def saved_folder(run_dir: Path) -> Path:
    """The folder of the newest intact checkpoint: the last one, even after a crash between the two
    renames of `save_checkpoint`, or an earlier one that was kept.

    Raises:
        CheckpointError: there is none, or none is intact.
    """
    damage: list[str] = []
    kept = sorted((run_dir / KEPT_FOLDER).glob("step-*"), reverse=True)
    for folder in (run_dir / FOLDER, run_dir / f".{FOLDER}.old", *kept):
        if not (folder / STATE_FILE).is_file():
            continue
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        fault = _fault_of(
            folder, tuple((path, path.stat().st_size, path.stat().st_mtime_ns) for path in files)
        )
        if not fault:
            if damage:
                logger.error(
                    "A checkpoint is damaged, the run continues from %s: %s",
                    folder,
                    "; ".join(damage),
                )
            return folder
        damage.append(f"{folder}: {fault}")
    if damage:
        do = (
            "Copy it from elsewhere, or start without --resume; ppo.keep_checkpoints=2 keeps the"
            " one before the last."
        )
        raise CheckpointError(
            "The saved run is damaged.",
            given="; ".join(damage),
            expected=f"a complete {STATE_FILE} and its files",
            do=do,
        )
    raise CheckpointError(
        "There is nothing to resume from.",
        given=run_dir,
        expected=f"{FOLDER}/{STATE_FILE} in it",
        do="Start without --resume.",
    )


@functools.lru_cache(maxsize=16)
def _fault_of(folder: Path, stamp: tuple[tuple[Path, int, int], ...]) -> str:
    """What is wrong with a checkpoint's files; empty if they are as written. `stamp`: lets the
    cache read them only once.
    """
    try:
        state = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
        said = state.get("files")
        found = _sums(folder)
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        return repr(error)
    if not isinstance(said, dict):
        return ""  # From a release that wrote no sums.
    wrong = sorted(name for name in said.keys() | found.keys() if said.get(name) != found.get(name))
    return f"{', '.join(wrong)}: not the bytes that were written" if wrong else ""


def companion_state(run_dir: Path) -> str:
    """Folder with the companion's saved state, for MedusaPlugin.start(resume_from=...); empty if
    there is none.
    """
    folder = saved_folder(run_dir) / COMPANION_FOLDER
    # The folder is there from the companion's start on, its state from the first time it saves.
    return str(folder) if (folder / COMPANION_FILE).is_file() else ""


def saved_memory(run_dir: Path) -> State | None:
    """What the engines remembered when the run was saved; None: nothing. Raises CheckpointError if
    it can't be read.
    """
    file = saved_folder(run_dir) / MEMORY_FILE
    return load_state(file) if file.is_file() else None


def memory_of(tokenizer: PreTrainedTokenizerBase, actor: Mapping[str, Any]) -> dict[str, bytes]:
    """Digests that identify whose responses a memory holds: of the tokenizer's vocabulary and of
    the actor's configuration.
    """
    parts = {
        "tokenizer": sorted(tokenizer.get_vocab().items()),
        "actor": {name: actor.get(name) for name in ACTOR_SIZES},
    }
    return {
        name: hashlib.sha256(json.dumps(part, sort_keys=True).encode()).digest()
        for name, part in parts.items()
    }


def _take_companion(source: Path, target: Path) -> None:
    """Keep the companion's last state. It replaces its files and never changes them, so links are
    copies.
    """
    if not source.is_dir():
        return
    target.mkdir()
    for path in source.glob("*.safetensors"):
        _link(path, target / path.name)


def _link(source: str | Path, target: str | Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # A file system without links.
        shutil.copy2(source, target)


def _look_up(values: Any, key: str) -> Any:
    return functools.reduce(operator.getitem, key.split("."), values)


def try_save(
    run_dir: Path,
    learner: PPOLearner,
    position: RunPosition,
    config: RunConfig,
    memory: State | None = None,
) -> None:
    """Save without letting a full disk end the run: a failure is logged, and the last checkpoint
    stays.
    """
    try:
        save_checkpoint(run_dir, learner, position, config, memory)
    except (OSError, MedusaError) as error:
        logger.error(
            "The checkpoint of step %d could not be written; the previous one stays: %s",
            position.next_step,
            error,
        )
