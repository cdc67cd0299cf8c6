"""Actors from transformers: load one safely, and tap its final hidden states from a forward pass that happens anyway.

Shape letters: B batch rows, T tokens, D hidden, V vocabulary.

"Final hidden state" is what lm_head reads: after the last norm. transformers' base model (`model.model`, `model.transformer`, ...)
returns exactly that as `last_hidden_state`, whatever the family, so the tap is one hook on the base model's output.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from heads.errors import ConfigError, DataError, ModelError
from medusa_ppo.actors.seam import ActorView, unwrap

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_actor(path: str | os.PathLike[str], dtype: str | torch.dtype = "float32") -> PreTrainedModel:
    """Load a causal LM from a folder or by its hub name; nothing is ever unpickled and no remote code runs.

    Args:
        path: folder of a transformers checkpoint, or a hub name.
        dtype: name or torch dtype of all weights.

    Raises:
        ModelError: no such folder, unreachable hub name, not a causal LM, no usable weights, weights that are missing.
        ConfigError: unknown dtype.
    """
    name = os.fspath(path)
    torch_dtype = _dtype(dtype)
    _check_is_causal(name)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            name,
            dtype=torch_dtype,
            use_safetensors=_use_safetensors(name),
            weights_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except Exception as error:  # transformers raises OSError, ValueError, KeyError, SafetensorError, ... for a bad checkpoint
        raise _unusable(name, "The actor can't be loaded.", error) from error
    model, info = loaded
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelError(
            "The actor's checkpoint lacks weights.",
            given=f"{name}: {', '.join(missing[:3])}{' ...' if len(missing) > 3 else ''} ({len(missing)} missing)",
            expected="every weight of the model; transformers would fill the gaps with random numbers",
            do="Save the whole causal LM with save_pretrained, lm_head included.",
        )
    # Drafting stays lossless, but shared heads compute plain lm_head(h) and draft a little worse than they could.
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        logger.warning("The actor's lm_head has a bias, which draft heads with a shared lm_head leave out.")
    return model.eval()


def load_tokenizer(path: str | os.PathLike[str]) -> PreTrainedTokenizerBase:
    """Load the tokenizer beside an actor; a missing padding token becomes the end token.

    Raises:
        ModelError: there is no usable tokenizer.
    """
    name = os.fspath(path)
    _check_exists(name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # transformers and tokenizers raise many kinds for a bad file
        raise _unusable(name, "The tokenizer can't be loaded.", error) from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def lm_head_weight(model: nn.Module) -> torch.Tensor:
    """The actor's live output matrix `lm_head_VD` (a Parameter, not a copy), tied or untied.

    Raises:
        ModelError: the model has no output embedding.
    """
    head = _unwrap(model).get_output_embeddings()
    return _matrix(head, model, "an output embedding (lm_head)")


def embedding_weight(model: nn.Module) -> torch.Tensor:
    """The actor's live input embedding `embedding_VD` (a Parameter, not a copy).

    Raises:
        ModelError: the model has no input embedding.
    """
    return _matrix(_unwrap(model).get_input_embeddings(), model, "an input embedding")


class HiddenTap:
    """Context manager that remembers the final hidden states of the forward pass run inside it.

    The hook only reads: it returns nothing, and what it keeps is detached, so outputs and gradients are those of a model without it.
    """

    def __init__(self, model: nn.Module) -> None:
        """
        Args:
            model: causal LM of transformers, bare or wrapped by DistributedDataParallel.

        Raises:
            ModelError: the model has no base model under its lm_head.
        """
        inner = _unwrap(model)
        base = inner.base_model
        if base is inner and inner.get_output_embeddings() is not None:
            raise ModelError(
                "The model's final hidden states can't be tapped.",
                given=type(inner).__name__,
                expected="a causal LM of transformers with a base model under its lm_head",
                do="Use a model class whose `base_model` returns `last_hidden_state`.",
            )
        self._base = base
        self._handle: torch.utils.hooks.RemovableHandle | None = None
        self._hidden_BTD: torch.Tensor | None = None
        self.calls = 0

    def __enter__(self) -> HiddenTap:
        self._hidden_BTD = None
        self.calls = 0
        self._handle = self._base.register_forward_hook(self._hook)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _hook(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        hidden_BTD = output.last_hidden_state if hasattr(output, "last_hidden_state") else output[0]
        self._hidden_BTD = hidden_BTD.detach()
        self.calls += 1

    @property
    def hidden_BTD(self) -> torch.Tensor:
        """Detached states of the one forward pass inside the context, in the actor's dtype and on its device.

        Raises:
            DataError: no forward pass happened, or more than one.
        """
        if self._hidden_BTD is None or self.calls != 1:
            raise DataError(
                "The tapped context must hold exactly one forward pass of the actor.",
                given=f"{self.calls} forward passes",
                expected="1",
                do="Open one context for each micro-batch, around the actor's own forward call.",
            )
        return self._hidden_BTD


class HFActor(ActorView):
    """A transformers actor that this process holds whole."""

    def __init__(self, model: nn.Module) -> None:
        """
        Args:
            model: causal LM of transformers, bare or wrapped by DistributedDataParallel.
        """
        self._model = model

    def tap(self) -> HiddenTap:
        return HiddenTap(self._model)

    @property
    def lm_head_VD(self) -> torch.Tensor:
        """Live, as `lm_head_weight`."""
        return lm_head_weight(self._model)

    @property
    def embedding_VD(self) -> torch.Tensor:
        """Live, as `embedding_weight`."""
        return embedding_weight(self._model)


Actor = nn.Module | ActorView


def as_view(model: Actor) -> ActorView:
    """What the plug-in was given, as it sees it: a transformers model, or the view of another kind of actor."""
    return model if isinstance(model, ActorView) else HFActor(model)


def _unwrap(model: nn.Module) -> Any:
    return unwrap(model, PreTrainedModel, "a transformers model", "Load the actor with medusa_ppo.actors.hf.load_actor.")


def _matrix(module: nn.Module | None, model: nn.Module, what: str) -> torch.Tensor:
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.dim() != 2:
        raise ModelError(
            "The model lacks a matrix that the heads need.",
            given=type(model).__name__,
            expected=what,
            do="Use a causal LM of transformers.",
        )
    return weight


def _dtype(dtype: str | torch.dtype) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in DTYPES:
        raise ConfigError("Unknown dtype.", given=dtype, expected=" | ".join(DTYPES), do="Set model.dtype to one of these.")
    return DTYPES[dtype]


def _is_folder_like(name: str) -> bool:
    """A hub name is `name` or `owner/name`; all else, and whatever exists, is meant as a folder."""
    return Path(name).exists() or name.startswith((".", "~", os.sep)) or name.count("/") > 1 or not name.strip()


def _check_exists(name: str) -> None:
    if not _is_folder_like(name):
        return
    if not Path(name).is_dir():
        raise ModelError(
            "There is no such model folder.", given=name, expected="an existing folder, or a hub name", do="Correct model.path."
        )
    if not (Path(name) / "config.json").is_file():
        raise ModelError(
            "The folder holds no transformers model.",
            given=name,
            expected="config.json and *.safetensors in it",
            do="Point model.path at a folder written by save_pretrained.",
        )


def _check_is_causal(name: str) -> None:
    """Refuse what transformers would load as a causal LM although it attends to both sides."""
    _check_exists(name)
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # transformers raises OSError, ValueError, KeyError, ... for a bad configuration
        raise _unusable(name, "The model's configuration can't be read.", error) from error
    masked_lm = config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(config, "is_decoder", False)
    if masked_lm or getattr(config, "is_encoder_decoder", False) or type(config) not in AutoModelForCausalLM._model_mapping:
        raise ModelError(
            "The model is not a decoder-only causal LM.",
            given=f"{name} (model_type {config.model_type})",
            expected="a causal LM, e.g. of the Llama, Qwen, Mistral, Gemma or GPT-2 family",
            do="Choose a decoder-only model; encoders and encoder-decoders can't be an actor.",
        )


def _use_safetensors(name: str) -> bool | None:
    """True when the folder has safetensors, False when it has only .bin (then loaded with weights_only); a hub name decides by itself."""
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


def _unusable(name: str, problem: str, error: Exception) -> ModelError:
    reason = str(error).strip().splitlines()
    if _is_folder_like(name):
        do = "Check that the folder was written completely by save_pretrained, and by a transformers version that is not newer."
    else:
        do = "Check the spelling and the network, or download the model first and give its folder."
    return ModelError(
        problem,
        given=f"{name} ({type(error).__name__}: {reason[0] if reason else 'no message'})",
        expected="a transformers causal LM in a folder or on the hub",
        do=do,
    )
