"""Heads on the model hub: pulls them by name, and pushes them with a card that says what was
measured, with which settings, and how to use them.
"""

from __future__ import annotations

import json
import logging
import math
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import jinja2

from heads.checkpoint import HeadsMetadata, load_heads, load_lm_head, save_heads
from heads.errors import ConfigError, DataError, HubError
from heads.heads_config import HeadsConfig
from medusa_ppo.offline.foreign import HEADS_FILE, base_model_of
from medusa_ppo.offline.options import HUB_PREFIX, WRITTEN_BY_MODEL
from medusa_ppo.reports.store import without_secrets

logger = logging.getLogger(__name__)

CARD = Path(__file__).with_name("card.md.jinja")
# Names become parts of cache paths and addresses, so only the hub's own characters are allowed.
NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
REVISION = re.compile(r"[A-Za-z0-9][\w./-]{0,95}")
# Files of other formats, too, since `convert` also takes heads from the hub.
PULLED = [
    "config.json",
    "model.safetensors",
    "model-*.safetensors",
    HEADS_FILE,
    "pytorch_model*.bin",
]
PUSHED = ["config.json", "model.safetensors", "README.md"]
NEEDED = (
    "mean_acceptance_length",
    "acceptance_per_position",
    "confidence_interval",
    "drafts",
    "generated_tokens",
    "settings",
)
SHOWN_SETTINGS = (
    "draft",
    "draft_temperature",
    "temperature",
    "top_p",
    "top_k",
    "max_new_tokens",
    "limit",
    "seed",
    "data",
)


def shareable(value: Any) -> Any:
    """Metadata that may be published: paths on this machine are cut to their last part, and tokens
    are removed.
    """
    if isinstance(value, Mapping):
        return {str(key): shareable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [shareable(item) for item in value]
    if isinstance(value, str):
        return scrubbed(Path(value).name if _is_path(value) else value)
    return value


def _is_path(text: str) -> bool:
    # A template or a text is not a path, and `exists` raises for impossible names.
    if len(text) > 1000 or any(sign in text for sign in "\n\0{"):
        return False
    return text.startswith(("/", "./", "../", "~")) or Path(text).exists()


def render_card(
    repo: str, config: HeadsConfig, metadata: HeadsMetadata, figures: Sequence[Path] = ()
) -> str:
    """README.md of a repository with heads.

    Raises:
        DataError: a file of figures is not what `medusa-ppo eval --json` writes.
    """
    # StrictUndefined: a missing field must be an error, not a blank in the card.
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, keep_trailing_newline=True
    )
    # A vertical bar or a line break would end the cell.
    environment.filters["cell"] = lambda value: str(value).replace("|", "\\|").replace("\n", "\\n")
    base = shareable(base_model_of(metadata))
    numbers = sum(math.prod(shape) for shape in config.tensor_shapes().values())
    heads = {
        "kind": config.kind,
        "heads": config.num_heads,
        "layers per head": config.num_layers,
        "lm_head": (
            "shared with the model"
            if config.lm_head == "shared"
            else "one of its own for each head"
        ),
        "hidden size, vocabulary": f"{config.hidden_size}, {config.vocab_size}",
        "parameters": f"{numbers:,} ({metadata.dtype})",
        "version": metadata.version,
        "checksum (SHA-256)": f"`{metadata.checksum}`",
    }
    return environment.from_string(CARD.read_text(encoding="utf-8")).render(
        repo=repo,
        config=config,
        base=base,
        # Only a hub name becomes a link: a folder's name could lead to somebody else's model.
        base_on_hub=bool(NAME.fullmatch(base)),
        has_lm_head=config.lm_head == "own" or metadata.has_lm_head,
        heads=heads,
        replayed=_replayed(metadata.metadata),
        measured=[_measured(_read_figures(path)) for path in figures],
        trained=_trained(metadata.metadata),
    )


def _replayed(notes: Mapping[str, Any]) -> str:
    """What the training measured, as a sentence, or nothing."""
    length = notes.get("replay_mean_acceptance_length")
    tokens = notes.get("trained_tokens")
    if not isinstance(length, int | float):
        return ""
    after = f", after {tokens:,} training tokens" if isinstance(tokens, int) else ""
    if notes.get(WRITTEN_BY_MODEL) is False:
        return (
            "By replay on text held out of training, which the model did not write, the mean"
            f" acceptance length would be {length:.3f}{after}. What the model writes itself is"
            " accepted at another rate: `medusa-ppo eval` measures it."
        )
    return (
        f"Mean acceptance length {length:.3f} by replay on responses held out of training{after}."
    )


def _measured(figures: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of `eval` and how they were measured, as rows of the card."""
    (low, high), settings = figures["confidence_interval"], figures["settings"]
    return {
        "mean acceptance length": (
            f"**{figures['mean_acceptance_length']:.3f}** (95 % interval {low:.3f} to {high:.3f})"
        ),
        "acceptance by position": ", ".join(
            f"{value:.3f}" for value in figures["acceptance_per_position"]
        ),
        "measured by": (
            "vLLM's own counters" if settings.get("engine") == "vllm" else "replay of rollouts"
        ),
        "draft steps, tokens": f"{figures['drafts']:,}, {figures['generated_tokens']:,}",
        **{
            name.replace("_", " "): shareable(settings[name])
            for name in SHOWN_SETTINGS
            if name in settings
        },
    }


def _trained(notes: Mapping[str, Any]) -> dict[str, Any]:
    """The settings recorded with the heads."""
    rest = {
        key: value
        for key, value in notes.items()
        if key
        not in ("options", "replay_mean_acceptance_length", "trained_tokens", WRITTEN_BY_MODEL)
    }
    options = notes.get("options")
    rows = {**(options if isinstance(options, Mapping) else {}), **rest}
    return {
        key: shareable(value)
        for key, value in rows.items()
        if isinstance(value, str | int | float | bool) and value != ""
    }


def _read_figures(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        missing = [name for name in NEEDED if name not in found]
    except (OSError, ValueError, TypeError) as error:
        given = f"{path}: {error}"
        do = "Give a file written by eval --json."
        raise DataError(
            "The figures can't be read.", given=given, expected="a JSON file", do=do
        ) from None
    if missing or not isinstance(found, dict):
        raise DataError(
            "These are not figures of eval.",
            given=f"{path}: no {missing}",
            expected=NEEDED,
            do="Give a file written by eval --json.",
        )
    return found


class Hub(Protocol):
    """The parts of huggingface_hub.HfApi that we use."""

    def create_repo(
        self,
        repo_id: str,
        *,
        private: bool | None = None,
        repo_type: str | None = None,
        exist_ok: bool = False,
    ) -> Any: ...

    def upload_folder(
        self,
        *,
        repo_id: str,
        folder_path: str,
        commit_message: str | None = None,
        allow_patterns: Any = None,
    ) -> Any: ...

    def snapshot_download(
        self, repo_id: str, *, revision: str | None = None, allow_patterns: Any = None
    ) -> Any: ...


def local_heads(name: str, hub: Hub | None = None) -> Path:
    """The folder itself, or the local copy of `hf://owner/name` or `hf://owner/name@revision`.

    Raises:
        ConfigError: what follows hf:// is not a repository, or what follows @ not a revision.
        HubError: the hub can't be reached, or has no such repository for this user.
    """
    if not name.startswith(HUB_PREFIX):
        return Path(name)
    repo, _, revision = name.removeprefix(HUB_PREFIX).partition("@")
    _check_repo(repo)
    if revision and (not REVISION.fullmatch(revision) or ".." in revision):
        raise ConfigError(
            "This is not a revision of a repository.",
            given=revision[:80],
            expected="a branch, a tag or a commit",
            do="Correct what follows @.",
        )
    # Only the files that heads need: a repository may contain a whole training.
    with _hub_errors(f"pulling {repo}"):
        return Path(
            _open(hub).snapshot_download(repo, revision=revision or None, allow_patterns=PULLED)
        )


def push_heads(
    heads: Path,
    repo: str,
    *,
    private: bool = False,
    figures: Sequence[Path] = (),
    hub: Hub | None = None,
) -> str:
    """Push the native heads in a folder, and nothing else that is in it.

    Args:
        private: make the repository private if it is created now; an existing one stays as it is.
        figures: JSON files of `medusa-ppo eval --json` for the model card.

    Returns:
        Its address.

    Raises:
        CheckpointError: the folder has no valid native heads.
        HubError: the hub refuses, or can't be reached.
    """
    _check_repo(repo)
    module, metadata = load_heads(heads)
    card = render_card(repo, module.config, metadata, figures)
    with tempfile.TemporaryDirectory(prefix="medusa-ppo-push-") as scratch:
        folder = Path(scratch) / "heads"
        # Saved again rather than uploaded as it is: the metadata contains paths on this machine,
        # and other files in the folder must stay here.
        shared = shareable(metadata.metadata)
        save_heads(
            folder,
            module,
            lm_head_VD=load_lm_head(heads),
            metadata=shared,
            version=metadata.version,
        )
        (folder / "README.md").write_text(card, encoding="utf-8")
        with _hub_errors(f"pushing {repo}"):
            api = _open(hub)
            api.create_repo(repo, private=private, repo_type="model", exist_ok=True)
            message = f"Heads of kind {module.config.kind}, version {metadata.version}"
            done = api.upload_folder(
                repo_id=repo, folder_path=str(folder), commit_message=message, allow_patterns=PUSHED
            )
    logger.info("Pushed heads version %d to %s.", metadata.version, repo)
    return str(getattr(done, "commit_url", None) or repo)


def model_card(heads: Path, repo: str, figures: Sequence[Path] = ()) -> str:
    """The README.md that `push_heads` would write."""
    _check_repo(repo)
    module, metadata = load_heads(heads)
    return render_card(repo, module.config, metadata, figures)


def scrubbed(text: str, secrets: Mapping[str, Any] | Sequence[str] = ()) -> str:
    """The text with tokens replaced by ***."""
    for secret in secrets:
        text = text.replace(secret, "***") if secret else text
    return str(without_secrets(text))


def _check_repo(repo: str) -> None:
    if not NAME.fullmatch(repo) or ".." in repo:
        raise ConfigError(
            "This is not a hub repository.",
            given=repo[:120],
            expected="owner/name",
            do="Correct the name.",
        )


def _open(hub: Hub | None) -> Hub:
    if hub is not None:
        return hub
    # Imported here because it is slow, and only pulling and pushing need it.
    from huggingface_hub import HfApi

    return HfApi()


@contextmanager
def _hub_errors(doing: str) -> Iterator[None]:
    """Turn any error into a HubError without a cause: errors of huggingface_hub contain the request
    and with it the token, which a traceback would show.
    """
    problem = ""
    try:
        yield
    except Exception as error:
        # It may be an OSError, a ValueError or an error of two HTTP libraries; to the user they all
        # mean the same.
        lines = str(error).strip().splitlines()
        message = lines[0] if lines else "no message"
        problem = f"{type(error).__name__}: {scrubbed(message, [_token()])[:300]}"
    # Raised out here: inside `except`, the first error would become its context.
    if problem:
        raise HubError(
            f"The hub request failed while {doing}.",
            given=problem,
            expected="a repository that this user may read, or write to for a push",
            do="Check the name and the network, and log in with `hf auth login`.",
        ) from None


def _token() -> str:
    from huggingface_hub import get_token

    return get_token() or ""
