"""The demo actor's folder in the user's cache: trained on first use, whole or not there at all, checked before it is handed out.

    <cache>/medusa-ppo/actors/<key>/            config.json, model.safetensors, tokenizer files: a normal transformers folder
    <cache>/medusa-ppo/actors/<key>/actor.json  the recipe, and the checksum of every other file
    <cache>/medusa-ppo/actors/<key>.lock        held while one process trains; the others wait and then find the folder
    <cache>/medusa-ppo/actors/<key>.partial     an unfinished training, which the next call continues

`<cache>` is $XDG_CACHE_HOME, or ~/.cache. The key is a hash of the recipe, of the vocabulary and of sample text, so whoever changes the
task gets a new actor.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from medusa_ppo.ppo.demo.pretrain import DEFAULT_RECIPE, PretrainProgress, Recipe, recipe_fields, train_actor
from medusa_ppo.ppo.demo.task import document, problem
from medusa_ppo.ppo.demo.tokenizer import build_tokenizer

logger = logging.getLogger(__name__)

RECORD = "actor.json"
_SAMPLE = 64


def ensure_demo_actor(
    progress: PretrainProgress | None = None, cache_dir: str | os.PathLike[str] | None = None, *, recipe: Recipe = DEFAULT_RECIPE
) -> Path:
    """The folder of the demo actor; trains it first if the cache has none that is whole.

    Args:
        progress: called after every training step; never called when the actor is already there.
        cache_dir: folder to use in place of `<cache>/medusa-ppo/actors`.

    Returns:
        A folder that AutoModelForCausalLM, AutoTokenizer and vLLM load as it is.
    """
    tokenizer = build_tokenizer()
    folder = (Path(cache_dir) if cache_dir is not None else default_cache_dir()) / _key(recipe, tokenizer)
    if is_whole(folder):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_name(folder.name + ".lock")):
        if is_whole(folder):
            return folder
        partial = folder.with_name(folder.name + ".partial")
        model = train_actor(recipe, tokenizer, progress=progress, partial=partial, threads=_usable_cores())
        _install(folder, model, tokenizer, recipe)
        partial.unlink(missing_ok=True)
    return folder


def default_cache_dir() -> Path:
    """`<cache>/medusa-ppo/actors` of this user."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base else Path.home() / ".cache") / "medusa-ppo" / "actors"


def is_whole(folder: Path) -> bool:
    """Whether the folder has its record and every file that the record lists, unchanged."""
    try:
        files = json.loads((folder / RECORD).read_text(encoding="utf-8"))["files"]
        return bool(files) and all(_checksum(folder / name) == checksum for name, checksum in files.items())
    except FileNotFoundError:
        return False
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        logger.warning("The demo actor in %s can't be read (%s); it will be trained again.", folder, error)
        return False


def _install(folder: Path, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, recipe: Recipe) -> None:
    """Write the folder under another name, then put it in place in one step."""
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
        fresh = Path(scratch) / "actor"
        model.generation_config = GenerationConfig(do_sample=True, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
        model.save_pretrained(fresh)
        tokenizer.save_pretrained(fresh)
        record = {"recipe": recipe_fields(recipe), "files": {path.name: _checksum(path) for path in sorted(fresh.iterdir())}}
        (fresh / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        for path in fresh.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        if folder.exists():
            logger.warning("The demo actor in %s is damaged; a new one takes its place.", folder)
            folder.rename(Path(scratch) / "damaged")
        fresh.rename(folder)


def _checksum(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()


def _key(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash of all that the actor depends on."""
    sample = [document(problem(index, recipe.seed, "pretrain", recipe.slip_rate)) for index in range(_SAMPLE)]
    text = json.dumps([recipe_fields(recipe), tokenizer.get_vocab(), sample], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock file; the system lets go of it when the process ends, however it ends. The empty file stays."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)
