"""The model card of heads: what they are, what was measured and under which settings, how to use them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from heads.checkpoint import HeadsMetadata
from heads.config import HeadsConfig
from heads.errors import DataError

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
SECRET = re.compile(r"hf_[A-Za-z0-9]{6,}")
NEEDED = ("mean_acceptance_length", "acceptance_per_position", "confidence_interval", "drafts", "generated_tokens", "settings")
SHOWN_SETTINGS = ("draft", "draft_temperature", "temperature", "top_p", "top_k", "max_new_tokens", "limit", "seed", "data")


def shareable(value: Any) -> Any:
    """Metadata for others' eyes: of a path of this machine only the last name stays, and no token."""
    if isinstance(value, Mapping):
        return {str(key): shareable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [shareable(item) for item in value]
    if isinstance(value, str):
        return SECRET.sub("***", Path(value).name if _is_path(value) else value)
    return value


def _is_path(text: str) -> bool:
    if len(text) > 1000 or any(sign in text for sign in "\n\0{"):
        return False
    return text.startswith(("/", "./", "../", "~")) or Path(text).exists()


def base_model_of(metadata: HeadsMetadata) -> str:
    """The model that the heads were trained for, as the metadata names it, or empty."""
    notes = metadata.metadata
    options = notes.get("options")
    found = options.get("model") if isinstance(options, Mapping) else notes.get("base_model", notes.get("model"))
    return shareable(found) if isinstance(found, str) else ""


def render_card(repo: str, config: HeadsConfig, metadata: HeadsMetadata, figures: Sequence[Path] = ()) -> str:
    """README.md of a repository with heads.

    Raises:
        DataError: a file of figures is not what `medusa-ppo eval --json` writes.
    """
    base = base_model_of(metadata)
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
    if HUB_NAME.fullmatch(base):
        lines.append(f"base_model: {base}")
    return "\n".join([*lines, "---"])


def _what(config: HeadsConfig, metadata: HeadsMetadata) -> str:
    numbers = sum(_product(shape) for shape in config.tensor_shapes().values())
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


def _product(shape: tuple[int, ...]) -> int:
    out = 1
    for n in shape:
        out *= n
    return out


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
        raise DataError(
            "The figures can't be read.", given=f"{path}: {error}", expected="a JSON file", do="Give one of eval --json."
        ) from None
    if missing or not isinstance(found, dict):
        raise DataError("These are no figures of eval.", given=f"{path}: no {missing}", expected=NEEDED, do="Give one of eval --json.")
    return found
