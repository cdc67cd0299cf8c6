"""How a vLLM engine is started: checks that need no vLLM, its arguments, and the process of a
server (`python -m` this module).

Options that can't be combined are refused by name.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import re
import runpy
import signal
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from heads.errors import (
    CheckpointError,
    ConfigError,
    ModelError,
    UnsupportedVersionError,
)
from heads.heads_config import HeadsConfig
from medusa_ppo.config.engine_section import AUTO, EngineConfig
from medusa_ppo.config.model_section import VISION_FAMILIES
from medusa_ppo.engines.gpu_room import least_parts
from medusa_ppo.runtime.control_guard import GUARD
from medusa_ppo.runtime.files import cache_folder
from medusa_ppo.runtime.hardware import BFLOAT16, ModelSizes, settled_engine
from medusa_ppo.vllm_plugin.speculation import (
    LOSSLESS,
    QUANTISE_BEFORE,
    refuse_lossy_rule,
    speculation,
)
from medusa_ppo.vllm_plugin.vllm_versions import (
    FIRST_V2,
    V2_SWITCH,
    has_block,
    has_graphs,
    has_v2,
    is_cpu_build,
    require_transfer,
    require_vllm,
    text_of,
    v2_asked,
    vllm_version,
)
from medusa_ppo.vllm_plugin.worker_calls import TRANSFER, WORKER_EXTENSION, Drafting

logger = logging.getLogger(__name__)

CACHE_BLOCK_TOKENS = 128  # vLLM's block size on the CPU; smaller elsewhere.
MIN_CACHE_BYTES = 64 * 1024**2
SLOW_READ_BYTES_PER_S = 50e6
"""What an engine reads of its weights at least, where many read from one file server at once."""
HOST = "127.0.0.1"  # For a server started here: only this process uses it.
ENVIRONMENT = {
    # The engine runs in this process: swaps are direct calls, and there is one process less.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # Its messages would interrupt the progress display.
    "VLLM_LOGGING_LEVEL": "ERROR",
    # vLLM would report each start to its developers.
    "VLLM_NO_USAGE_STATS": "1",
}
AHEAD_OF_TIME = "VLLM_USE_AOT_COMPILE"
KERNELS = "TORCHINDUCTOR_CACHE_DIR"
"""Where torch keeps compiled kernels: a folder of this user, since torch's own choice is in /tmp,
and it runs what it finds there.
"""
# The `vllm` command of the CPU wheel does not start; the module does.
SERVER_MODULE = "vllm.entrypoints.openai.api_server"
OPENMP = re.compile(r"lib(g|i)?omp[^/]*$")
PR_SET_PDEATHSIG = 1
PARENT = "MEDUSA_PPO_PARENT"
"""Variable with the id of the process that starts a server, as that process sees itself."""
SET_BY_THE_ENGINE = {
    "worker_extension_cls": "it carries the swap methods",
    "logprobs_mode": "rollouts must report the distribution that was sampled from",
    "disable_log_stats": "the acceptance counters come from the statistics",
    "model": "it is model.path",
    "weight_transfer_config": "engine.transfer sets it",
    "speculative_config": "it is built from heads.path and engine.num_drafts, losslessly",
}
ASYNCHRONOUS = "async_scheduling"
WITHOUT_MEDUSA = {
    "enable_lora": "the heads share the actor's plain lm_head",
    "enable_expert_parallel": "it has never been tested",
    "enable_batch_sharded_sampling": "ranks would draft different tokens",
    "logits_processors": "vLLM refuses them with speculative decoding",
}


@dataclass(frozen=True)
class LaunchPlan:
    """A checked start.

    Attributes:
        engine_args: keyword arguments of vLLM's engine.
        stop_ids: tokens that end a response, from the model's own files.
        max_drafts: drafts per step that the engine is built for; 0 without heads.
        drafting: its initial configuration.
        max_model_len: longest prompt plus response.
        vocab_size: valid token ids are below it.
        runner: vLLM's model runner; empty: vLLM's choice.
        parts: bytes that each rank has on its GPU at least, by part (`gpu_room.least_parts`).
        load_s: seconds that reading the weights may take.
    """

    engine_args: dict[str, Any]
    stop_ids: tuple[int, ...]
    max_drafts: int
    drafting: Drafting
    max_model_len: int
    vocab_size: int
    runner: str = ""
    parts: dict[str, int] = field(default_factory=dict)
    load_s: float = 0.0

    @property
    def environment(self) -> dict[str, str]:
        """Variables that must be set before vLLM starts."""
        return {V2_SWITCH: "1"} if self.runner == "v2" else {}


def plan_launch(
    model_path: str | Path,
    heads_path: str | Path | None,
    config: EngineConfig,
    seed: int,
    *,
    others_start: bool = False,
) -> LaunchPlan:
    """Check everything that can be known before an engine starts.

    Args:
        others_start: somebody else starts it, in an environment that we don't set.

    Raises:
        UnsupportedVersionError, ModelError, CheckpointError, ConfigError, LossyError.
    """
    require_vllm()
    config = settled_engine(config)
    _refuse_what_is_set_here(config.extra)
    model = read_model_config(model_path)
    text = {**model, **(model.get("text_config") or {})}
    vocab_size = int(text.get("vocab_size", 0))
    hidden_size = int(text.get("hidden_size", text.get("n_embd", 0)))
    args: dict[str, Any] = {
        "model": str(model_path),
        "dtype": config.dtype,
        "max_num_seqs": config.max_num_seqs,
        "max_model_len": config.max_model_len,
        "gpu_memory_utilization": config.memory_fraction,
        "enforce_eager": config.enforce_eager,
        "seed": seed,
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": False,
        "worker_extension_cls": WORKER_EXTENSION,
        # Prompts and responses are token ids.
        "skip_tokenizer_init": True,
        # Otherwise vLLM takes missing sampling settings of a request from the model's own file.
        "generation_config": "vllm",
        "use_tqdm_on_load": False,
    }
    if model.get("model_type") in VISION_FAMILIES:
        # vLLM finds the places of images with the tokenizer, and the vocabulary of Medusa heads in
        # the outermost config.
        args |= {
            "skip_tokenizer_init": False,
            "limit_mm_per_prompt": {"video": 0},
            "hf_overrides": {"vocab_size": vocab_size},
        }
    if config.ranks > 1:
        # By default vLLM asks Ray for workers if it runs in a placement group, and so for GPUs that
        # nobody has reserved.
        args["distributed_executor_backend"] = "mp"
    if config.transfer == "broadcast":
        require_transfer()
        args["weight_transfer_config"] = {"backend": TRANSFER}
    max_drafts = 0
    heads = None
    runner = ""
    if heads_path:
        heads = read_heads_config(heads_path, hidden_size, vocab_size)
        _refuse_quantised_lm_head({**model, **text})
        _refuse_quantising(config.extra.get("quantization"), {**model, **text})
        images = model.get("model_type") in VISION_FAMILIES
        if others_start:
            config = config.model_copy(update={"runner": _runner_of_environment(config)})
        runner = checked_runner(config, images=images)
        max_drafts = heads.num_heads
        if (config.most_drafts or 0) > max_drafts:
            raise ConfigError(
                "There are more drafts than trained heads.",
                given=f"engine.num_drafts={config.num_drafts}",
                expected=f"<= {max_drafts}, the heads in {heads_path}",
                do="Draft fewer tokens or train more heads.",
            )
        first = Drafting(
            # The rest is set by a call: a change of these arguments is a new entry in vLLM's cache
            # of compiled models.
            sampled=config.draft_temperature > 0,
            draft_vocab=draft_vocabulary(config, heads) or 0,
        )
        block = runner == "v2" and has_block(vllm_version())
        args |= speculation(str(heads_path), max_drafts, first, block=block)
        if not is_cpu_build() and runner == "v1":
            most = int(config.extra.get("max_num_batched_tokens", 0)) or None
            sizes = graph_sizes(config.max_num_seqs, max_drafts, most)
            args["compilation_config"] = {"cudagraph_capture_sizes": sizes}
        _refuse_with_heads(config.extra, runner)
        if config.stop_below:
            _refuse_asynchronous(config.extra, "engine.stop_below", "Leave one of the two out.")
            args[ASYNCHRONOUS] = False
    # See cache_bytes: on a CPU, a share of the memory can be negative.
    if is_cpu_build() and "gpu_memory_utilization" not in config.extra:
        args["kv_cache_memory_bytes"] = cache_bytes(text, config)
    if config.sleep_level:
        if is_cpu_build():
            logger.warning(
                "engine.sleep_level=%d frees nothing here: vLLM's CPU build keeps its memory.",
                config.sleep_level,
            )
        else:
            args["enable_sleep_mode"] = True
    # Added last, so that the user's settings win; those that must not change were refused by name.
    args.update(config.extra)
    drafting = _drafting(config, heads)
    return LaunchPlan(
        args,
        stop_ids(model_path, text),
        max_drafts,
        drafting,
        args["max_model_len"],
        vocab_size,
        runner,
        least_parts(
            model,
            args,
            config.extra,
            heads,
            draft_vocabulary(config, heads) or 0,
            sampled=drafting["sampled"],
        ),
        reading_s(model_path, model),
    )


def reading_s(model_path: str | Path, model: Mapping[str, Any] | None = None) -> float:
    """Seconds that reading a model's weights may take. Raises ModelError.

    Args:
        model: the model's configuration; None: it is read here.
    """
    config = read_model_config(model_path) if model is None else model
    return _weights_bytes(model_path, config) / SLOW_READ_BYTES_PER_S


def _weights_bytes(model_path: str | Path, model: Mapping[str, Any]) -> int:
    """Of its files, or (for a hub name) by its sizes; 0: not known."""
    folder = Path(model_path)
    if folder.is_dir():
        return sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    try:
        return BFLOAT16 * ModelSizes.from_config(model).parameters
    except ModelError:
        return 0


def graph_sizes(sequences: int, most_drafts: int, most_tokens: int | None = None) -> list[int]:
    """Token counts for which vLLM's V1 runner captures graphs: multiples of a sequence's tokens
    with all drafts, to which V1 rounds, up to what `sequences` with all drafts need.

    By default V1 stops at 512 tokens (1,024 on Blackwell): with four drafts, 103 sequences would
    run without a graph. A step with fewer drafts uses the next larger graph.
    """
    counts = {1, 2, 4, *range(8, 256, 8), *range(256, 512, 16), *range(512, sequences, 32)}
    counts = {count for count in counts if count < sequences} | {sequences}
    sizes = {count * (most_drafts + 1) for count in counts}
    return sorted(size for size in sizes if most_tokens is None or size <= most_tokens)


def checked_runner(config: EngineConfig, *, images: bool) -> str:
    """`engine.runner` of a settled config. Raises UnsupportedVersionError if it is V2 and something
    here does not support that.
    """
    if config.runner is None:
        if images or not _is_fastest_on_v2(config):
            return "v1"
        logger.warning(
            "Drafting on vLLM's V2 model runner, whose samples were tested on one GPU, before its"
            " steps were scheduled ahead. `medusa-ppo doctor --distribution` tests them here;"
            " engine.runner=v1 is slower."
        )
        return "v2"
    if config.runner == "v1":
        return "v1"
    if lack := _lack_of_v2():
        given, expected = lack
        do = "Set engine.runner=v1, or leave it out."
        if v2_asked():
            # Perhaps nobody set engine.runner: it follows the variable in engines of other loops.
            given = f"{given}, {V2_SWITCH}=1"
            do = f"Unset {V2_SWITCH} where the engines start, and leave engine.runner out."
        raise UnsupportedVersionError(
            "vLLM's V2 model runner is not available here.", given=given, expected=expected, do=do
        )
    return "v2"


def _lack_of_v2() -> tuple[str, str] | None:
    """Why the V2 runner is not available, as `given` and `expected` of an error; None if it is."""
    version = vllm_version()
    if not has_v2(version):
        return f"vLLM {version}", f"vLLM {text_of(FIRST_V2)} or later that was tested"
    if is_cpu_build() and os.environ.get("TRITON_INTERPRET") != "1":
        return "vLLM's CPU build", "a GPU (tests run it on Triton's interpreter)"
    return None


def _runner_of_environment(config: EngineConfig) -> str:
    """The runner of an engine that somebody else starts: vLLM follows the environment."""
    asked = config.runner
    runner = "v2" if v2_asked() else "v1"
    if asked is None and runner == "v1" and config.suits_v2 and _lack_of_v2() is None:
        logger.warning(
            "Drafting on vLLM's V1 model runner, whose drafts cost more than they saved on an H100."
            " Set %s=1 where the loop and its engines start: docs/hooks.md#which-model-runner.",
            V2_SWITCH,
        )
    if asked == "v2" != runner:
        raise ConfigError(
            "The loop starts the engine, and vLLM takes its model runner from the environment.",
            given=f"engine.runner=v2, {V2_SWITCH} not set",
            expected=f"{V2_SWITCH}=1 where the engines start",
            do=f"Set {V2_SWITCH}=1 before the loop starts, or leave engine.runner out.",
        )
    return asked or runner


def _is_fastest_on_v2(config: EngineConfig) -> bool:
    """Whether drafting is recorded as CUDA graphs there (`vllm_plugin.draft_graphs`)."""
    return not is_cpu_build() and has_graphs(vllm_version()) and config.suits_v2


def _drafting(config: EngineConfig, heads: HeadsConfig | None) -> Drafting:
    sampled = config.draft_temperature > 0
    most = heads.num_heads if heads else 0
    drafting: Drafting = {
        "num_drafts": most if config.most_drafts is None else min(config.most_drafts, most),
        "sampled": sampled,
        "draft_temperature": config.draft_temperature if sampled else 1.0,
        "choose": config.chooses_drafts,
    }
    if (size := draft_vocabulary(config, heads)) is not None:
        drafting["draft_vocab"] = size
    if config.memory_bytes:
        drafting["memory_bytes"] = config.memory_bytes
    if config.stop_below:
        drafting["stop_below"] = config.stop_below
    return drafting


def with_all_heads(config: EngineConfig, heads_path: str | Path) -> EngineConfig:
    """Draft with every head in every step, unless a number is set. Figures by position need this:
    if the engine chose K, late positions would have none.
    """
    if config.num_drafts != AUTO or not heads_path:
        return config
    return config.model_copy(update={"num_drafts": read_heads_config(heads_path, 0, 0).num_heads})


def draft_vocabulary(config: EngineConfig, heads: HeadsConfig | None) -> int | None:
    """Number of tokens that drafts come from and heads are trained for; 0 or None: all."""
    if config.draft_vocab is not None:
        return config.draft_vocab
    return (heads.draft_vocabulary or None) if heads is not None else None


def cache_bytes(text_config: dict[str, Any], config: EngineConfig) -> int:
    """Bytes for the keys and values of `max_num_seqs` sequences of full length.

    vLLM's CPU build takes a share of the NUMA node's memory minus what the process already holds;
    on machines that report a small node (virtual machines with hot-plugged memory) that is
    negative, so we set the size explicitly.
    """
    layers = int(text_config.get("num_hidden_layers", text_config.get("n_layer", 1)))
    heads = int(text_config.get("num_attention_heads", text_config.get("n_head", 1)))
    width = int(text_config.get("hidden_size", text_config.get("n_embd", 1)))
    head_dim = int(text_config.get("head_dim") or width // heads)
    kv_heads = int(text_config.get("num_key_value_heads") or heads)
    config = settled_engine(config)
    per_token = 2 * layers * kv_heads * head_dim * (4 if config.dtype == "float32" else 2)
    # Whole blocks for each sequence.
    blocks = config.max_num_seqs * -(-(config.max_model_len or 0) // CACHE_BLOCK_TOKENS)
    # vLLM keeps one block for itself, as a null block.
    return max(MIN_CACHE_BYTES, (blocks + 1) * CACHE_BLOCK_TOKENS * per_token)


def read_model_config(model_path: str | Path) -> dict[str, Any]:
    """The model's config.json, from its folder or (for a hub name) from the hub's cache. Raises
    ModelError if there is none.
    """
    folder = Path(model_path)
    if folder.is_dir():
        path = folder / "config.json"
        if not path.is_file():
            raise ModelError(
                "The model folder has no config.json.",
                given=str(folder),
                expected="a transformers model folder",
                do="Check the path.",
            )
        return _read_json(path)
    name = str(model_path)
    # Checked here: a mistyped path would be looked up on the hub, and the network would be blamed.
    if name.count("/") != 1 or name.startswith((".", "~", os.sep)):
        raise ModelError(
            "The model folder does not exist.",
            given=name,
            expected="a folder, or a hub name like org/name",
            do="Check the path.",
        )
    from transformers import AutoConfig  # Only needed for hub names; the import is slow.

    try:
        return AutoConfig.from_pretrained(name).to_dict()
    except (OSError, ValueError) as error:
        raise ModelError(
            "The model was found neither as a folder nor on the hub.",
            given=f"{name}: {error}",
            expected="a folder or a hub name",
            do="Check the name.",
        ) from None


def read_heads_config(heads_path: str | Path, hidden_size: int, vocab_size: int) -> HeadsConfig:
    """Sizes of native heads, checked against the actor's; the tensors are checked when vLLM loads
    them.
    """
    path = Path(heads_path) / "config.json"
    native = "a folder written by heads.checkpoint.save_heads"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        heads = HeadsConfig.from_dict(raw["medusa_ppo"]["heads"])
    except OSError:
        raise CheckpointError(
            "There is no heads directory.",
            given=str(heads_path),
            expected=native,
            do="Check the path.",
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            "This is not a native heads directory.",
            given=f"{path}: {error!r}",
            expected=native,
            do="Convert it first.",
        ) from None
    for name, value, actor in (
        ("hidden_size", heads.hidden_size, hidden_size),
        ("vocab_size", heads.vocab_size, vocab_size),
    ):
        if actor and value != actor:
            raise CheckpointError(
                "The heads were made for another actor.",
                given=f"{name} {value} in {heads_path}",
                expected=f"{name} {actor}, the actor's",
                do="Use heads that were trained for this actor, or train new ones.",
            )
    return heads


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(
            f"The model's {path.name} is damaged.",
            given=f"{path}: {error}",
            expected="JSON",
            do="Copy it again.",
        ) from None


def _refused(name: str, value: object, why: str, expected: object = "unset") -> ConfigError:
    return ConfigError(
        f"engine.extra.{name} can't be {why}.", given=value, expected=expected, do=f"Remove {name}."
    )


def _refuse_what_is_set_here(extra: dict[str, Any]) -> None:
    """Raise ConfigError for settings that the engine sets itself, or LossyError if one of them asks
    for a rule that would change the distribution of the tokens.
    """
    speculative = extra.get("speculative_config")
    if isinstance(speculative, dict):
        refuse_lossy_rule(str(speculative.get("rejection_sample_method", LOSSLESS[0])))
    for name, reason in SET_BY_THE_ENGINE.items():
        if name in extra:
            raise _refused(name, extra[name], f"changed: {reason}")


def _refuse_with_heads(extra: dict[str, Any], runner: str) -> None:
    for name, reason in WITHOUT_MEDUSA.items():
        if extra.get(name):
            raise _refused(name, extra[name], f"combined with draft heads: {reason}")
    if runner == "v1":
        do = f"Remove {ASYNCHRONOUS}, or set engine.runner=v2."
        _refuse_asynchronous(extra, "drafts on vLLM's V1 model runner", do)
    for name in ("pipeline_parallel_size", "data_parallel_size"):
        if int(extra.get(name, 1)) > 1:
            raise _refused(
                name,
                extra[name],
                "combined with draft heads in this version; use tensor parallelism",
                1,
            )
    # vLLM follows the variable, whatever was checked here.
    if v2_asked() and runner != "v2":
        also = "" if _lack_of_v2() else ", or set engine.runner=v2"
        raise ConfigError(
            "The environment selects a different model runner.",
            given=f"{V2_SWITCH}=1",
            expected=f"engine.runner={runner}",
            do=f"Unset {V2_SWITCH}{also}.",
        )


def _refuse_asynchronous(extra: dict[str, Any], beside: str, do: str) -> None:
    if extra.get(ASYNCHRONOUS):
        raise ConfigError(
            f"The next step can't be scheduled ahead: with {beside}, how many drafts it verifies is"
            " known too late.",
            given=f"engine.extra.{ASYNCHRONOUS}=true",
            expected="false, or nothing",
            do=do,
        )


def _refuse_quantised_lm_head(model: dict[str, Any]) -> None:
    """Raise ConfigError if the model's configuration says that lm_head is quantised. Not every
    format says it: vLLM's process looks at the loaded model again (`refuse_quantised_lm_head`).
    """
    given = _quantization(model)
    groups = given.get("config_groups") or {}
    targets = [
        target
        for group in groups.values()
        if isinstance(group, dict)
        for target in group.get("targets") or ()
    ]
    named = [*filter(_names_lm_head, targets)]
    left_out = any(map(_names_lm_head, given.get("ignore") or ()))
    if given.get("lm_head") is True or (named and not left_out):
        method = given.get("quant_method")
        raise ConfigError(
            "Draft heads multiply by the actor's lm_head, and were never tested with a quantised"
            " one.",
            given=f"quantization_config of {method} with {named or 'lm_head: true'}",
            expected="an lm_head of 16 or 32 bits",
            do="Leave lm_head out of the checkpoint's quantization, or start without heads.",
        )


def _refuse_quantising(method: object, model: dict[str, Any]) -> None:
    """Raise ConfigError if vLLM would quantise a plain checkpoint as it loads, and again with each
    sync: that never ran.
    """
    if method and not _quantization(model):
        raise ConfigError(
            "engine.extra.quantization can't be combined with draft heads.",
            given=method,
            expected="unset, or a checkpoint with a quantization_config of its own",
            do=QUANTISE_BEFORE,
        )


def _quantization(model: dict[str, Any]) -> dict[str, Any]:
    """How a checkpoint is quantised, under either of the names that vLLM looks for; empty if it is
    not.
    """
    return model.get("quantization_config") or model.get("compression_config") or {}


def _names_lm_head(target: str) -> bool:
    """Whether a target of compressed-tensors is lm_head, by its name or by a pattern of names."""
    pattern = target.removeprefix("re:")
    return target == "lm_head" or (pattern != target and re.match(pattern, "lm_head") is not None)


def stop_ids(model_path: str | Path, text_config: dict[str, Any]) -> tuple[int, ...]:
    """End-of-text ids in generation_config.json, config.json and the tokenizer of a folder or hub
    name: a response ends at any of them.
    """
    found: list[int] = []
    generation = _model_json(model_path, "generation_config.json")
    for value in [generation.get("eos_token_id"), text_config.get("eos_token_id")]:
        found += value if isinstance(value, list) else [] if value is None else [value]
    return tuple(dict.fromkeys(int(v) for v in [*found, *_tokenizer_end(model_path)]))


def _model_json(model_path: str | Path, name: str) -> dict[str, Any]:
    """Contents of a JSON file of the model, from its folder or the hub; empty if there is none."""
    folder = Path(model_path)
    path: Path | None = folder / name
    if not folder.is_dir():
        from transformers.utils import cached_file  # Only needed for hub names.

        # Running servers may have a model that is not available here.
        fetched = cached_file(
            str(model_path),
            name,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        path = None if fetched is None else Path(fetched)
    return _read_json(path) if path is not None and path.is_file() else {}


def _tokenizer_end(model_path: str | Path) -> list[int]:
    """The tokenizer's end token, from its files: the engine has no tokenizer."""
    settings, tokens = (
        _model_json(model_path, name) for name in ("tokenizer_config.json", "tokenizer.json")
    )
    end = settings.get("eos_token")
    end = end.get("content") if isinstance(end, dict) else end
    # Older tokenizers have the list in the one file, newer ones in the other.
    listed = {int(i): token for i, token in settings.get("added_tokens_decoder", {}).items()}
    listed |= {int(token["id"]): token for token in tokens.get("added_tokens", [])}
    return [i for i, token in listed.items() if end is not None and token.get("content") == end]


# ---- the process


def kernels_environment() -> dict[str, str]:
    """Variables by which engines on a CPU share compiled kernels, the user's values first; they
    must be set before an engine starts.
    """
    if not is_cpu_build():
        return {}
    # Torch writes its own default into the environment when it is imported; nobody chose it.
    chosen = os.environ.get(KERNELS, "")
    if not chosen or chosen.startswith(os.path.join(tempfile.gettempdir(), "torchinductor_")):
        chosen = str(cache_folder("kernels"))
    # By default vLLM keeps compiled kernels by its whole configuration, so an engine with drafts
    # shares none with one without, and each start compiles for half a minute. With 0 torch keeps
    # them by what they compute. The same kernels run either way.
    return {AHEAD_OF_TIME: os.environ.get(AHEAD_OF_TIME, "0"), KERNELS: chosen}


def process_environment(config: EngineConfig, *, has_gpu: bool) -> dict[str, str]:
    """Environment variables of the engine's process; they must be set before Python starts
    there.
    """
    env = {
        **ENVIRONMENT,
        **kernels_environment(),
        "PYTHONWARNINGS": "ignore::FutureWarning",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    if has_gpu:
        return env
    env |= {
        "OMP_NUM_THREADS": str(settled_engine(config).threads),
        # vLLM would pin its threads to cores that PPO and the companion also use.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    openmp = Path(sys.prefix) / "lib" / "libiomp5.so"
    if openmp.is_file():
        # Intel's OpenMP, which vLLM's CPU build needs. It only works if it is loaded before torch
        # and instead of GNU's, which vLLM leaves here once it has run in this process; with both it
        # does not start.
        others = [
            part
            # The loader accepts both as separators.
            for part in re.split("[: ]", os.environ.get("LD_PRELOAD", ""))
            if part and not OPENMP.search(part)
        ]
        env["LD_PRELOAD"] = ":".join([*others, str(openmp)])
    return env


def server_arguments(plan: LaunchPlan, port: int) -> list[str]:
    """Command line of the server: the engine's arguments as flags."""
    arguments = [
        "--host",
        HOST,
        "--port",
        str(port),
        "--disable-uvicorn-access-log",
        "--middleware",
        GUARD,
    ]
    if (
        int(plan.engine_args.get("tensor_parallel_size", 1)) == 1
        and "distributed_executor_backend" not in plan.engine_args
    ):
        arguments += ["--distributed-executor-backend", "uni"]  # This saves one process.
    return arguments + engine_flags(plan.engine_args)


def engine_flags(engine_args: dict[str, Any]) -> list[str]:
    """Arguments of vLLM's engine as flags of its server."""
    found: list[str] = []
    for name, value in engine_args.items():
        flag = name.replace("_", "-")
        if name == "disable_log_stats":
            continue  # This flag has no negative form, and statistics are on by default.
        if isinstance(value, bool):
            found.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            found += [
                f"--{flag}",
                json.dumps(value) if isinstance(value, (dict, list)) else str(value),
            ]
    return found


def end_with_parent() -> None:
    """Ask Linux to send SIGTERM when the parent dies, so that a killed run leaves no server behind.
    Does nothing elsewhere. Linux means the parent's thread, so the engine must be made in a thread
    that lives as long as the engine is used.
    """
    # Taken out: it is not the parent of processes that the server starts.
    expected = os.environ.pop(PARENT, "")
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    # If the parent died before the request was made, somebody else is the parent now: process 1 or
    # a subreaper. Process 1 by itself says nothing: in a container it may be the run.
    parent = str(os.getppid())
    if expected and parent != expected:
        sys.exit(
            "The server ends, because the run that started it is gone.\n"
            f"  given:    process {parent} as its parent\n"
            f"  expected: process {expected} ({PARENT})\n"
            "  do this:  Start the run again; between the run and the server no other process may"
            " stand."
        )


if __name__ == "__main__":
    end_with_parent()
    runpy.run_module(SERVER_MODULE, run_name="__main__", alter_sys=True)
