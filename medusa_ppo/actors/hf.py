"""Actors from transformers: load one safely, and tap its final hidden states from a forward pass
that runs anyway.

Shape letters: B batch rows, T tokens, D hidden, V vocabulary.

"Final hidden state" is what lm_head reads: after the last norm. transformers' base model
(`model.model`, `model.transformer`, ...) returns exactly that as `last_hidden_state`, whatever the
family, so the tap is a single hook on the base model's output.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from heads.errors import ConfigError, DataError, ModelError
from medusa_ppo.actors.actor_tables import Table, layers_of_wrapping, plain_model
from medusa_ppo.actors.actor_view import ActorView
from medusa_ppo.config.model_section import VISION_FAMILIES
from medusa_ppo.runtime.data_files import is_path_like

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "tekken.json")
"""A folder with a tokenizer has at least one of these."""


def load_actor(
    path: str | os.PathLike[str], dtype: str | torch.dtype = "float32"
) -> PreTrainedModel:
    """Load a causal LM, or a vision-language model, from a folder or by its hub name; nothing is
    ever unpickled and no remote code runs.

    Args:
        path: folder of a transformers checkpoint, or a hub name.
        dtype: name or torch dtype of all weights.

    Raises:
        ModelError: no such folder, unreachable hub name, not a causal LM, no usable weights,
            weights that are missing.
        ConfigError: unknown dtype.
    """
    name = os.fspath(path)
    torch_dtype = _dtype(dtype)
    kind = _auto_class(actor_config(path))
    with _loading(name, "The actor can't be loaded."):
        safe: dict[str, Any] = {
            "use_safetensors": _use_safetensors(name),
            "weights_only": True,
            "trust_remote_code": False,
        }
        loaded: Any = kind.from_pretrained(
            name, dtype=torch_dtype, output_loading_info=True, **safe
        )
    model, info = loaded
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelError(
            "The actor's checkpoint lacks weights.",
            given=(
                f"{name}: {', '.join(missing[:3])}{' ...' if len(missing) > 3 else ''}"
                f" ({len(missing)} missing)"
            ),
            expected=(
                "every weight of the model; transformers would fill the gaps with random numbers"
            ),
            do="Save the whole causal LM with save_pretrained, lm_head included.",
        )
    # Drafting stays lossless, but shared heads compute plain lm_head(h) and draft slightly worse
    # than they could.
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        logger.warning(
            "The actor's lm_head has a bias, which draft heads with a shared lm_head leave out."
        )
    # No dropout: log-probs are compared with the engine's.
    return model.eval()


def load_tokenizer(path: str | os.PathLike[str]) -> PreTrainedTokenizerBase:
    """Load an actor's tokenizer; a missing padding token becomes the end token.

    Raises:
        ModelError: there is no usable tokenizer.
    """
    name = os.fspath(path)
    _check_exists(name)
    with _loading(name, "The tokenizer can't be loaded."):
        folder = Path(name)
        # transformers before 5.16 makes one of special tokens alone then.
        if folder.is_dir() and not any(any(folder.glob(kind)) for kind in TOKENIZER_FILES):
            raise FileNotFoundError(f"the folder has no file named {' or '.join(TOKENIZER_FILES)}")
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    if tokenizer.pad_token is None:
        # Padding is masked, so any token will do.
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def table_names(path: str | os.PathLike[str]) -> tuple[str, str]:
    """Names of lm_head and embedding in the actor's own checkpoint, according to the model; the
    same name twice if they are one.

    Raises:
        ModelError: not a causal LM of transformers.
    """
    config = actor_config(path)
    # Only shapes and names; this takes no memory.
    with torch.device("meta"):
        model = _auto_class(config).from_config(config)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return (
        names[id(model.get_output_embeddings().weight)],
        names[id(model.get_input_embeddings().weight)],
    )


def table_files(model_path: str, names: tuple[str, str]) -> list[Path]:
    """Files of a folder, or of a hub name, that may hold these tensors; no other files of a hub
    name are fetched. Empty if there are none.
    """
    folder = Path(model_path)
    if folder.is_dir():
        return sorted(folder.glob("*.safetensors"))
    index = _fetched(model_path, SAFE_WEIGHTS_INDEX_NAME)
    wanted = {SAFE_WEIGHTS_NAME}
    if index is not None:
        places = json.loads(index.read_text())["weight_map"]
        wanted = {places[name] for name in names if name in places}
    files = [_fetched(model_path, name) for name in sorted(wanted)]
    return [file for file in files if file is not None]


def _fetched(model: str, name: str) -> Path | None:
    """A file of a hub name, from transformers' cache or the hub; None if the model has none."""
    path = cached_file(
        model,
        name,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return None if path is None else Path(path)


def lm_head_weight(model: nn.Module) -> torch.Tensor:
    """The actor's output matrix `lm_head_VD`: live (a Parameter, not a copy) if no adapter changes
    it, tied or untied.

    Raises:
        ModelError: the model has no readable output embedding.
        DataError: it is sharded.
    """
    return HFActor(model).lm_head_VD


def embedding_weight(model: nn.Module) -> torch.Tensor:
    """The actor's input embedding `embedding_VD`, like `lm_head_weight`."""
    return HFActor(model).embedding_VD


class HiddenTap:
    """Context manager that records the final hidden states of the forward pass inside it.

    The hook only reads: it returns nothing and detaches what it keeps, so outputs and gradients
    don't change.
    """

    def __init__(self, model: nn.Module) -> None:
        """
        Args:
            model: causal LM of transformers, bare or wrapped (`medusa_ppo.actors.actor_tables` has
                the forms).

        Raises:
            ModelError: the model has no base model under its lm_head.
        """
        inner = plain_model(model)
        base = inner.base_model
        # Without a known base model transformers returns the model itself, whose output is logits,
        # not states.
        if base is inner and inner.get_output_embeddings() is not None:
            raise ModelError(
                "The model's final hidden states can't be tapped.",
                given=type(inner).__name__,
                expected="a causal LM of transformers with a base model under its lm_head",
                do="Use a model class whose `base_model` returns `last_hidden_state`.",
            )
        self._base = base
        self._traced = None if compiled_part(model) is None else traced_hook(base)
        self._handle: torch.utils.hooks.RemovableHandle | None = None
        self._hook = self._traced or StatesHook()

    @property
    def calls(self) -> int:
        """Forward passes seen since the context was entered."""
        return self._hook.calls

    def __enter__(self) -> HiddenTap:
        if self._traced is None:
            self._hook = StatesHook()
            self._handle = self._base.register_forward_hook(self._hook, with_kwargs=True)
        self._hook.reset(open_=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        if self._traced is not None:
            kept = self._traced
            self._hook = StatesHook()
            self._hook.hidden_BTD = kept.hidden_BTD
            self._hook.calls = kept.calls
            kept.reset(open_=False)

    @property
    def hidden_BTD(self) -> torch.Tensor:
        """Detached states of the one forward pass inside the context, in the actor's dtype and on
        its device.

        Raises:
            DataError: no forward pass happened, or more than one.
        """
        hidden_BTD = self._hook.hidden_BTD
        if hidden_BTD is None or self.calls != 1:
            raise DataError(
                "The tapped context must hold exactly one forward pass of the actor.",
                given=f"{self.calls} forward passes",
                expected="1",
                do="Open one context for each micro-batch, around the actor's own forward call.",
            )
        # With tensor parallelism whole states may come as a DTensor replicated on every rank.
        if isinstance(hidden_BTD, DTensor):
            if not all(placement.is_replicate() for placement in hidden_BTD.placements):
                raise ModelError(
                    "The final hidden states are sharded over ranks.",
                    given=f"placements {hidden_BTD.placements}",
                    expected="whole rows on each rank",
                    do=(
                        "Switch sequence parallelism off, or gather the states before the base"
                        " model returns."
                    ),
                )
            return hidden_BTD.to_local()
        return hidden_BTD


class StatesHook:
    """Keeps what a base model returns, and the input that it belongs to.

    Attributes:
        open: whether it keeps anything.
        calls: passes since `reset`.
        hidden_BTD: detached states of the last one.
        inputs: its token ids, attention mask and position ids, each as the base model got it.
    """

    def __init__(self) -> None:
        self.reset(open_=True)

    def reset(self, *, open_: bool) -> None:
        self.open = open_
        self.calls = 0
        self.hidden_BTD: torch.Tensor | None = None
        self.inputs: tuple[Any, Any, Any] = (None, None, None)

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        if self.open:
            # Some models return tuples.
            self.hidden_BTD = (
                output.last_hidden_state if hasattr(output, "last_hidden_state") else output[0]
            ).detach()
            ids = kwargs.get("input_ids", args[0] if args else None)
            self.inputs = ids, kwargs.get("attention_mask"), kwargs.get("position_ids")
            self.calls += 1


_TRACED: weakref.WeakKeyDictionary[nn.Module, StatesHook] = weakref.WeakKeyDictionary()


def compiled_part(model: nn.Module) -> nn.Module | None:
    """What torch.compile has compiled of a model: the outermost of its wrappers, itself and its
    base model that is compiled; None: none of them.
    """
    layers = layers_of_wrapping(model)
    for part in (*layers, getattr(layers[-1], "base_model", None)):
        if part is not None and (
            hasattr(part, "_orig_mod") or part._compiled_call_impl is not None
        ):
            return part
    return None


def traced_hook(base: nn.Module) -> StatesHook:
    """One permanent hook: torch.compile bakes hooks in when it first sees the model, and ignores
    later ones.
    """
    if base not in _TRACED:
        _TRACED[base] = hook = StatesHook()
        hook.reset(open_=False)
        base.register_forward_hook(hook, with_kwargs=True)
        torch.compiler.reset()  # Code compiled earlier lacks it.
    return _TRACED[base]


@contextlib.contextmanager
def after_each_call(part: Any, action: Callable[[], None]) -> Iterator[None]:
    """During the block, `action` runs after each call of a `compiled_part`, outside the compiled
    code.
    """
    if hasattr(part, "_orig_mod"):
        # The hooks of torch.compile's wrapper itself are not compiled.
        handle = part.register_forward_hook(lambda module, args, output: action())
        try:
            yield
        finally:
            handle.remove()
        return
    # `module.compile()` compiles the module's hooks, too, so that only its call is outside.
    call = part._compiled_call_impl

    def called(*args: Any, **kwargs: Any) -> Any:
        output = call(*args, **kwargs)
        action()
        return output

    part._compiled_call_impl = called
    try:
        yield
    finally:
        part._compiled_call_impl = call


class HFActor(ActorView):
    """A transformers actor in one process. If its weights are sharded, every rank has one and calls
    `refresh`.

    Attributes:
        reports: this rank keeps the whole tables; the plugin is here.
        gathered_bytes: bytes of tables that ranks have exchanged so far.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        reports: bool = True,
        with_embedding: bool = True,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """
        Args:
            model: causal LM of transformers, bare or wrapped; see `medusa_ppo.actors.actor_tables`
                for what is understood.
            reports: see the attribute.
            with_embedding: `refresh` also brings the input embedding (heads of kind hydra).
            group: the ranks that hold this actor together; None: all.
        """
        self._model = model
        self._group = group
        self._with_embedding = with_embedding
        self.reports = reports
        self.gathered_bytes = 0
        self._gathered: dict[str, torch.Tensor | None] = {}
        self._bits: dict[str, tuple[int, ...]] = {}

    def tap(self) -> HiddenTap:
        return HiddenTap(self._model)

    def refresh(self, *, embedding: bool = True) -> bool:
        """Bring the tables to the ranks that report, if a rank has seen them change. Every rank
        must call it, before the first use and after the weights changed, at the same point of its
        work, with or without a plugin; otherwise the others wait.

        Args:
            embedding: False: it is not read before the next call. The same on every rank.

        Returns:
            Whether a table may have changed since the last call; the same on every rank.
        """
        tables = {"output": Table(self._model, "output")}
        if self._with_embedding and embedding:
            tables["input"] = Table(self._model, "input")
        else:
            # So that it counts as changed when it is read again.
            self._gathered.pop("input", None)
            self._bits.pop("input", None)
        # Nothing to check or gather; the same holds on every rank, since `frozen` is the same on
        # all.
        if self._bits.keys() == tables.keys() and all(table.frozen for table in tables.values()):
            return False
        if all(table.whole for table in tables.values()):
            return self._changed_here(tables)
        # A rank sees only its shard; either all gather or none.
        changed = torch.tensor(
            [int(self._changed_here(tables))],
            device="cuda" if dist.get_backend(self._group) == "nccl" else "cpu",
        )
        dist.all_reduce(changed, dist.ReduceOp.MAX, group=self._group)
        if not changed.item():
            return False
        tied = "input" in tables and tables["input"].is_that_of(tables["output"])
        for name, table in tables.items():
            if name == "output" or not tied:
                self._gathered[name], nbytes = table.gather(keep=self.reports)
                self.gathered_bytes += nbytes
            else:
                self._gathered[name] = self._gathered["output"]
        return True

    def _changed_here(self, tables: dict[str, Table]) -> bool:
        before = self._bits
        self._bits = {name: table.print_of_bits() for name, table in tables.items()}
        return before != self._bits

    @property
    def lm_head_VD(self) -> torch.Tensor:
        """Live, like `lm_head_weight`; if it is sharded, as of the last `refresh`, on the CPU."""
        return self._table("output")

    @property
    def embedding_VD(self) -> torch.Tensor:
        """As `lm_head_VD`."""
        return self._table("input")

    def _table(self, name: str) -> torch.Tensor:
        table = Table(self._model, name)
        if table.whole:
            return table.live()
        gathered_VD = self._gathered.get(name)
        if gathered_VD is None:
            raise DataError(
                "This process has only a shard of the actor's table.",
                given=(
                    f"{type(self._model).__name__}, refresh()"
                    f" {'called' if self._gathered else 'not called'}, reports={self.reports}"
                ),
                expected=(
                    "an HFActor on every rank, and refresh() called on all of them at the same"
                    " point"
                ),
                do=(
                    "Make HFActor(model, reports=rank == 0) on every rank, call its refresh(), and"
                    " give it to the plugin (docs/hooks.md)."
                ),
            )
        return gathered_VD


Actor = nn.Module | ActorView
Tap = Callable[[Actor, torch.Tensor, tuple[int, ...]], contextlib.AbstractContextManager[Any]]
"""A context around the actor's own forward pass over rows of a batch, given the actor, the mask of
response tokens, and the rows' sequences.
"""


def as_view(model: Actor) -> ActorView:
    """The plugin's view of what it was given: a transformers model, or another kind of actor's
    view.
    """
    return model if isinstance(model, ActorView) else HFActor(model)


def _dtype(dtype: str | torch.dtype) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in DTYPES:
        raise ConfigError(
            "Unknown dtype.",
            given=dtype,
            expected=" | ".join(DTYPES),
            do="Set model.dtype to one of these.",
        )
    return DTYPES[dtype]


def _check_exists(name: str) -> None:
    if not is_path_like(name):
        return
    if not Path(name).is_dir():
        raise ModelError(
            "There is no such model folder.",
            given=name,
            expected="an existing folder, or a hub name",
            do="Correct model.path.",
        )
    if not (Path(name) / "config.json").is_file():
        raise ModelError(
            "The folder does not contain a transformers model.",
            given=name,
            expected="config.json and *.safetensors in it",
            do="Point model.path at a folder written by save_pretrained.",
        )


def actor_config(path: str | os.PathLike[str]) -> Any:
    """The configuration of a model that can be an actor. Raises ModelError, also for a nominally
    causal LM that attends to both sides.
    """
    name = os.fspath(path)
    _check_exists(name)
    with _loading(name, "The model's configuration can't be read."):
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    # transformers has causal classes for BERT and similar models, which attend to both sides unless
    # told otherwise.
    masked_lm = config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(
        config, "is_decoder", False
    )
    if masked_lm or getattr(config, "is_encoder_decoder", False) or _auto_class(config) is None:
        raise ModelError(
            "The model is not a decoder-only causal LM.",
            given=f"{name} (model_type {config.model_type})",
            expected="a causal LM, e.g. of the Llama, Qwen, Mistral, Gemma or GPT-2 family",
            do="Choose a decoder-only model; encoders and encoder-decoders can't be an actor.",
        )
    return config


def _auto_class(config: Any) -> Any:
    """The class that loads a model with this configuration; None if it can't be an actor."""
    if type(config) in AutoModelForCausalLM._model_mapping:
        return AutoModelForCausalLM
    return AutoModelForImageTextToText if config.model_type in VISION_FAMILIES else None


def _use_safetensors(name: str) -> bool | None:
    """True if the folder has safetensors, False if it has only .bin (then loaded with
    weights_only); for a hub name transformers decides.
    """
    folder = Path(name)
    if not folder.is_dir():
        return None
    if any(folder.glob("*.safetensors")):
        return True
    if any(folder.glob("pytorch_model*.bin")):
        return False
    raise ModelError(
        "The model folder holds no weights.",
        given=f"{name}: {', '.join(sorted(p.name for p in folder.iterdir())[:8])}",
        expected="model.safetensors (or pytorch_model.bin)",
        do="Save the model with save_pretrained.",
    )


@contextlib.contextmanager
def _loading(name: str, problem: str) -> Iterator[None]:
    """Turn whatever a bad checkpoint raises (OSError, ValueError, KeyError, SafetensorError, ...)
    into one sentence.
    """
    try:
        yield
    except Exception as error:
        # transformers' errors have many lines; the first one says what is wrong.
        reason = (str(error).strip().splitlines() or ["no message"])[0]
        do = "Check the spelling and the network, or download the model first and give its folder."
        if is_path_like(name):
            do = (
                "Check that the folder was written completely by save_pretrained, and by a"
                " transformers version that is not newer."
            )
        given = f"{name} ({type(error).__name__}: {reason})"
        expected = "a transformers causal LM in a folder or on the hub"
        raise ModelError(problem, given=given, expected=expected, do=do) from error
