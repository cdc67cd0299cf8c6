"""The cache of the embedded example's actor: trained once, by one process, for all processes."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

import torch
from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from medusa_ppo.demo.dtype_choice import LEAST_GAIN, UPDATE, time_bfloat16
from medusa_ppo.demo.pretraining import DEFAULT_RECIPE, PretrainProgress, Recipe, grow, train_actor
from medusa_ppo.demo.task import build_tokenizer, document, problem
from medusa_ppo.runtime.files import cache_folder, locked
from medusa_ppo.runtime.hardware import usable_cores

logger = logging.getLogger(__name__)

RECORD = "actor.json"
"""File beside the weights: the recipe, the note, and the checksum of every other file."""

MOST_THREADS = 16
"""Threads that train it on a CPU. Its products are small: on many cores they would wait for each
other at the end of each.
"""

_SAMPLE = 64
"""Documents that represent the text in the cache's key: a different task makes a different
actor.
"""


def ensure_demo_actor(
    progress: PretrainProgress | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    *,
    recipe: Recipe = DEFAULT_RECIPE,
) -> Path:
    """The folder of the demo actor. Trains it first if the cache has no intact one; a grown actor
    is made from the small one.

    Args:
        progress: called after every training step; never called if the actor already exists.
        cache_dir: folder to use instead of `<cache>/medusa-ppo/actors`.

    Returns:
        A folder that AutoModelForCausalLM, AutoTokenizer and vLLM load as it is.
    """
    small = None
    if recipe.grown_to:
        small = ensure_demo_actor(progress, cache_dir, recipe=replace(recipe, grown_to=0))
    # Its vocabulary is part of the key: a different task makes a different actor.
    tokenizer = build_tokenizer()
    cache = Path(cache_dir) if cache_dir is not None else default_cache_dir()
    folder = cache / _key(recipe, tokenizer)
    if is_whole(folder):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder.with_name(folder.name + ".lock")):
        # Another process may have trained it while this one waited for the lock.
        if is_whole(folder):
            return folder
        # The unfinished training is a file beside the folder, named by the same key, so that it
        # only continues with the same recipe.
        partial = folder.with_name(folder.name + ".partial")
        if small is not None:
            model = grow(LlamaForCausalLM.from_pretrained(small), recipe.grown_to)
        else:
            on_gpu = torch.cuda.is_available()
            model = train_actor(
                recipe,
                tokenizer,
                progress=progress,
                partial=partial,
                threads=min(usable_cores(), MOST_THREADS),
                bfloat16=(
                    torch.cuda.is_bf16_supported(including_emulation=False)
                    if on_gpu
                    else time_bfloat16().ratios[UPDATE] < LEAST_GAIN
                ),
                device="cuda" if on_gpu else "cpu",
            )
        _install(folder, model, tokenizer, recipe)
        partial.unlink(missing_ok=True)
    return folder


def actor_note(folder: Path) -> str | None:
    """A note about a demo actor that belongs next to every figure measured with it; None: none."""
    note = json.loads((folder / RECORD).read_text(encoding="utf-8")).get("note")
    return str(note) if note else None


def default_cache_dir() -> Path:
    """`<cache>/medusa-ppo/actors` of this user."""
    return cache_folder("actors")


def is_whole(folder: Path) -> bool:
    """Whether the folder has its record and every file that the record lists, unchanged."""
    try:
        files = json.loads((folder / RECORD).read_text(encoding="utf-8"))["files"]
        return bool(files) and all(
            _checksum(folder / name) == checksum for name, checksum in files.items()
        )
    # No warning, because this is the usual case before the first training.
    except FileNotFoundError:
        return False
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        logger.warning(
            "The demo actor in %s can't be read (%s); it will be trained again.", folder, error
        )
        return False


def _install(
    folder: Path, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, recipe: Recipe
) -> None:
    """Write the folder under another name, then put it in place in one step."""
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
        fresh = Path(scratch) / "actor"
        model.generation_config = GenerationConfig(
            do_sample=True, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
        )
        model.save_pretrained(fresh)
        tokenizer.save_pretrained(fresh)
        record = {
            "recipe": asdict(recipe),
            "note": _note(model, recipe),
            "files": {path.name: _checksum(path) for path in sorted(fresh.iterdir())},
        }
        (fresh / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        for path in fresh.iterdir():
            # Flushed before the rename: after a crash the name must not refer to files that never
            # reached the disk.
            with path.open("rb") as file:
                os.fsync(file.fileno())
        if folder.exists():
            logger.warning("The demo actor in %s is damaged; a new one will replace it.", folder)
            # A non-empty folder can't be replaced by a rename, so the damaged one is removed first.
            folder.rename(Path(scratch) / "damaged")
        fresh.rename(folder)


def _note(model: LlamaForCausalLM, recipe: Recipe) -> str:
    """What a reader of figures must know about a grown actor; empty for the small one."""
    if not recipe.grown_to:
        return ""
    new = 3 * (recipe.grown_to - recipe.intermediate_size) * recipe.hidden_size * recipe.num_layers
    whole = sum(parameter.numel() for parameter in model.parameters())
    return (
        f"an actor of {whole / 1e6:.1f}M parameters, {new / 1e6:.1f}M of which are zero-gated"
        " neurons (a token costs what it costs in an actor of this size, the text is as easy to"
        " predict as a small one's)"
    )


def _checksum(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()


def _key(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash of everything the actor depends on."""
    sample = [
        document(problem(index, recipe.seed, "pretrain", recipe.slip_rate, recipe.checked_rate))
        for index in range(_SAMPLE)
    ]
    text = json.dumps([asdict(recipe), tokenizer.get_vocab(), sample], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
