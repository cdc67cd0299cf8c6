"""Heads on the model hub: push with a model card, pull by `hf://owner/name`. The only place that imports huggingface_hub.

No token passes through this code: huggingface_hub finds it by itself (`hf auth login` or HF_TOKEN), and whatever its errors say is
scrubbed of tokens before anyone sees it.
"""

from __future__ import annotations

import logging
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from heads.checkpoint import load_heads, load_lm_head, save_heads
from heads.errors import ConfigError, HubError
from medusa_ppo.offline.card import render_card, shareable

logger = logging.getLogger(__name__)

PREFIX = "hf://"
NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
REVISION = re.compile(r"[A-Za-z0-9][\w./-]{0,95}")
PULLED = [
    "config.json",
    "model.safetensors",
    "model-*.safetensors",
    "medusa_lm_head.safetensors",
    "medusa_lm_head.pt",
    "pytorch_model*.bin",
]
PUSHED = ["config.json", "model.safetensors", "README.md"]
TOKENS = re.compile(r"hf_[A-Za-z0-9]{6,}|(?<=Bearer )\S+")


class Hub(Protocol):
    """What is used of huggingface_hub.HfApi."""

    def create_repo(self, repo_id: str, *, private: bool | None = None, repo_type: str | None = None, exist_ok: bool = False) -> Any: ...

    def upload_folder(self, *, repo_id: str, folder_path: str, commit_message: str | None = None, allow_patterns: Any = None) -> Any: ...

    def snapshot_download(self, repo_id: str, *, revision: str | None = None, allow_patterns: Any = None) -> Any: ...


def local_heads(name: str, hub: Hub | None = None) -> Path:
    """A folder of heads as it is, or the local copy of `hf://owner/name` or `hf://owner/name@revision`.

    Raises:
        ConfigError: what follows hf:// is no repository.
        HubError: the hub can't be reached, or has no such repository for this user.
    """
    if not name.startswith(PREFIX):
        return Path(name)
    repo, _, revision = name.removeprefix(PREFIX).partition("@")
    _check_repo(repo)
    if revision and (not REVISION.fullmatch(revision) or ".." in revision):
        raise ConfigError("This is no revision.", given=revision[:80], expected="a branch, a tag or a commit", do="Correct what follows @.")
    with _hub_errors(f"pulling {repo}"):
        return Path(_open(hub).snapshot_download(repo, revision=revision or None, allow_patterns=PULLED))


def push_heads(heads: Path, repo: str, *, private: bool = False, figures: Sequence[Path] = (), hub: Hub | None = None) -> str:
    """Push a native heads directory; nothing else that lies in the folder goes along.

    Args:
        private: of a repository that is made now; one that is there keeps its setting.
        figures: JSON files of `medusa-ppo eval --json` for the model card.

    Returns:
        Where it stands now.

    Raises:
        CheckpointError: the folder holds no sound native heads.
        HubError: the hub refuses, or can't be reached.
    """
    _check_repo(repo)
    module, metadata = load_heads(heads)
    card = render_card(repo, module.config, metadata, figures)
    with tempfile.TemporaryDirectory(prefix="medusa-ppo-push-") as scratch:
        folder = Path(scratch) / "heads"
        shared = shareable(metadata.metadata)
        save_heads(folder, module, lm_head_VD=load_lm_head(heads), metadata=shared, version=metadata.version)
        (folder / "README.md").write_text(card, encoding="utf-8")
        with _hub_errors(f"pushing {repo}"):
            api = _open(hub)
            api.create_repo(repo, private=private, repo_type="model", exist_ok=True)
            message = f"Heads of kind {module.config.kind}, version {metadata.version}"
            done = api.upload_folder(repo_id=repo, folder_path=str(folder), commit_message=message, allow_patterns=PUSHED)
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
    return TOKENS.sub("***", text)


def _check_repo(repo: str) -> None:
    if not NAME.fullmatch(repo) or ".." in repo:
        raise ConfigError("This is no repository of the hub.", given=repo[:120], expected="owner/name", do="Correct the name.")


def _open(hub: Hub | None) -> Hub:
    if hub is not None:
        return hub
    from huggingface_hub import HfApi  # Slow to import, and only these two commands need it.

    return HfApi()


@contextmanager
def _hub_errors(doing: str) -> Iterator[None]:
    """HubError without a cause: huggingface_hub's errors carry requests, and with them the token, into a traceback."""
    problem = ""
    try:
        yield
    except Exception as error:  # OSError, ValueError and errors of two HTTP libraries; all of them mean the same to the user
        lines = str(error).strip().splitlines()
        problem = f"{type(error).__name__}: {scrubbed(lines[0] if lines else 'no message', [_token()])[:300]}"
    if problem:
        raise HubError(
            f"The hub failed while {doing}.",
            given=problem,
            expected="a repository that this user may read, or write to for a push",
            do="Check the name and the network, and log in with `hf auth login`.",
        ) from None


def _token() -> str:
    from huggingface_hub import get_token

    return get_token() or ""
