"""Heads on the model hub: pulled by name, and pushed with a card that says what was measured, under which settings, and how to use them."""

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

from heads.checkpoint import HeadsMetadata, load_heads, load_lm_head, save_heads
from heads.errors import ConfigError, DataError, HubError
from heads.heads_config import HeadsConfig
from medusa_ppo.exchange.foreign import HEADS_FILES, base_model_of

logger = logging.getLogger(__name__)

PREFIX = "hf://"
NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
REVISION = re.compile(r"[A-Za-z0-9][\w./-]{0,95}")
PULLED = ["config.json", "model.safetensors", "model-*.safetensors", *HEADS_FILES, "pytorch_model*.bin"]
PUSHED = ["config.json", "model.safetensors", "README.md"]
TOKENS = re.compile(r"hf_[A-Za-z0-9]{6,}|(?<=Bearer )\S+")
NEEDED = ("mean_acceptance_length", "acceptance_per_position", "confidence_interval", "drafts", "generated_tokens", "settings")
SHOWN_SETTINGS = ("draft", "draft_temperature", "temperature", "top_p", "top_k", "max_new_tokens", "limit", "seed", "data")


def shareable(value: Any) -> Any:
    """Metadata for others' eyes: of a path of this machine only the last name stays, and no token."""
    if isinstance(value, Mapping):
        return {str(key): shareable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [shareable(item) for item in value]
    if isinstance(value, str):
        return scrubbed(Path(value).name if _is_path(value) else value)
    return value


def _is_path(text: str) -> bool:
    if len(text) > 1000 or any(sign in text for sign in "\n\0{"):
        return False
    return text.startswith(("/", "./", "../", "~")) or Path(text).exists()


def render_card(repo: str, config: HeadsConfig, metadata: HeadsMetadata, figures: Sequence[Path] = ()) -> str:
    """README.md of a repository with heads.

    Raises:
        DataError: a file of figures is not what `medusa-ppo eval --json` writes.
    """
    base = shareable(base_model_of(metadata))
    parts = [
        _front_matter(base),
        f"# Draft heads for {base or 'a language model'}",
        _what(config, metadata),
        "## Measured acceptance",
        _measured(metadata, [_read_figures(path) for path in figures]),
        "## How they were trained",
        _trained(metadata),
        "## Use",
        _use(repo, config, metadata, base),
    ]
    return "\n\n".join(parts) + "\n"


def _front_matter(base: str) -> str:
    lines = ["---", "library_name: medusa-ppo", "tags: [medusa, speculative-decoding, draft-heads, vllm]"]
    if NAME.fullmatch(base):
        lines.append(f"base_model: {base}")
    return "\n".join([*lines, "---"])


def _what(config: HeadsConfig, metadata: HeadsMetadata) -> str:
    numbers = sum(math.prod(shape) for shape in config.tensor_shapes().values())
    lm_head = "shared with the model" if config.lm_head == "shared" else "one of its own for each head"
    rows = {
        "kind": config.kind,
        "heads": config.num_heads,
        "layers per head": config.num_layers,
        "lm_head": lm_head,
        "hidden size, vocabulary": f"{config.hidden_size}, {config.vocab_size}",
        "parameters": f"{numbers:,} ({metadata.dtype})",
        "version": metadata.version,
        "checksum (SHA-256)": f"`{metadata.checksum}`",
    }
    sentence = "Head k reads the model's final hidden state h_t and drafts token x_{t+1+k}. Every draft is verified by the model: what it"
    return f"{sentence} writes has the same distribution as without drafts.\n\n{_table(('', ''), rows.items())}"


def _measured(metadata: HeadsMetadata, figures: Sequence[Mapping[str, Any]]) -> str:
    """The figures there are, each with how it came about; a sentence where there are none."""
    parts = []
    notes = metadata.metadata
    length = notes.get("replay_mean_acceptance_length")
    if isinstance(length, int | float):
        tokens = notes.get("trained_tokens")
        after = f", after {tokens:,} training tokens" if isinstance(tokens, int) else ""
        parts.append(f"Mean acceptance length {length:.3f} by replay on responses held out of training{after}.")
    for one in figures:
        low, high = one["confidence_interval"]
        settings = one["settings"]
        how = "vLLM's own counters" if settings.get("engine") == "vllm" else "replay of rollouts"
        rows = {
            "mean acceptance length": f"**{one['mean_acceptance_length']:.3f}** (95 % interval {low:.3f} to {high:.3f})",
            "accepted per step, by position": ", ".join(f"{value:.3f}" for value in one["acceptance_per_position"]),
            "measured by": how,
            "draft steps, tokens": f"{one['drafts']:,}, {one['generated_tokens']:,}",
            **{name.replace("_", " "): shareable(settings[name]) for name in SHOWN_SETTINGS if name in settings},
        }
        parts.append(_table(("figure", "value"), rows.items()))
    if not parts:
        return "Nothing was measured when these heads were pushed. `medusa-ppo eval` measures them on your prompts."
    parts.append("Mean acceptance length = 1 + accepted drafts / draft steps. It depends on the text: measure on your own prompts.")
    return "\n\n".join(parts)


def _trained(metadata: HeadsMetadata) -> str:
    notes = {key: value for key, value in metadata.metadata.items() if key not in ("replay_mean_acceptance_length", "trained_tokens")}
    options = notes.pop("options", None)
    rows = {**(options if isinstance(options, Mapping) else {}), **notes}
    plain = {key: shareable(value) for key, value in rows.items() if isinstance(value, str | int | float | bool) and value != ""}
    return _table(("setting", "value"), plain.items()) if plain else "The heads don't say."


def _use(repo: str, config: HeadsConfig, metadata: HeadsMetadata, base: str) -> str:
    options = f"--model {base or 'MODEL'} --heads hf://{repo} --data prompts.jsonl --template '{{question}}' --engine vllm"
    evaluate = f"```\nmedusa-ppo eval {options}\n```"
    if config.kind != "medusa":
        return f"{evaluate}\n\nHeads of kind {config.kind} need the vLLM plug-in of medusa-ppo; stock vLLM can't serve them."
    if config.lm_head == "own" or metadata.has_lm_head:
        stock = f'speculative_config={{"method": "medusa", "model": "{repo}", "num_speculative_tokens": {config.num_heads}}}'
        return f"{evaluate}\n\nStock vLLM up to 0.32 serves them too: `{stock}`."
    convert = f"medusa-ppo convert hf://{repo} heads-vllm --to vllm --model {base or 'MODEL'}"
    return f"{evaluate}\n\nFor stock vLLM up to 0.32 the model's lm_head has to be added: `{convert}`."


def _table(head: tuple[str, str], rows: Any) -> str:
    lines = [f"| {head[0]} | {head[1]} |", "|---|---|"]
    return "\n".join([*lines, *(f"| {_cell(name)} | {_cell(value)} |" for name, value in rows)])


def _cell(value: object) -> str:
    return str(value).replace("|", "\\|").replace("\n", "\\n")


def _read_figures(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        missing = [name for name in NEEDED if name not in found]
    except (OSError, ValueError, TypeError) as error:
        given, do = f"{path}: {error}", "Give one of eval --json."
        raise DataError("The figures can't be read.", given=given, expected="a JSON file", do=do) from None
    if missing or not isinstance(found, dict):
        raise DataError("These are no figures of eval.", given=f"{path}: no {missing}", expected=NEEDED, do="Give one of eval --json.")
    return found


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
