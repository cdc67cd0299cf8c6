"""The two tables that heads read, from a transformers actor that may be wrapped, adapted or
sharded.

    wrapped    DistributedDataParallel, FSDP, a DeepSpeed engine, torch.compile, PEFT: `plain_model`
               finds the model inside
    adapted    LoRA on a table: the table as the adapter makes it; a table of PEFT's
               `modules_to_save`: the active one
    cut        FSDP1, FSDP2 and tensor parallelism (DTensor), DeepSpeed's ZeRO-3: gathered by all
               ranks, in `Table.gather`

The model itself says which two they are (`get_output_embeddings`, `get_input_embeddings`). Shape
letters: V vocabulary, D hidden.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers import PreTrainedModel

from heads.errors import ModelError

BEYOND_LM_HEAD = {
    "final_logit_softcapping": None,
    "logit_scale": 1,
    "logits_scaling": 1,
    "lm_head_multiplier": 1,
}
"""Changes that some families (Gemma-2, Cohere, Granite, Falcon-H1) make to lm_head's product, by
their config names, with the neutral value. The engine applies them; training, the gate and replay
would not.
"""
PIECE_BYTES = 256 * 2**20
"""Of a DTensor's table, held at once on each rank's device while it is gathered: an 8B's has 2.5 GB
in float32, which a trainer's GPU may not have left.
"""
LORA = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B")
"""Where PEFT's LoRA layers keep their factors, by adapter."""


def layers_of_wrapping(model: nn.Module) -> list[Any]:
    """The model as the loop holds it, and what is under its wrappers, from the outside in; the last
    one is the transformers model, if there is one.
    """
    found: list[Any] = [model]
    while not isinstance(found[-1], PreTrainedModel):
        outer = found[-1]
        below = getattr(outer, "_orig_mod", None) or getattr(outer, "module", None)
        if below is None and hasattr(outer, "get_base_model"):  # PEFT
            below = outer.get_base_model()
        if not isinstance(below, nn.Module):
            break
        found.append(below)
    return found


def plain_model(model: nn.Module) -> Any:
    """The transformers model under its wrappers. Raises ModelError if there is none."""
    inner = layers_of_wrapping(model)[-1]
    if not isinstance(inner, PreTrainedModel):
        raise ModelError(
            "This is not a transformers model.",
            given=type(inner).__name__,
            expected=(
                "a transformers model (PreTrainedModel), bare or under DDP, FSDP, DeepSpeed,"
                " torch.compile or PEFT"
            ),
            do="Load the actor with medusa_ppo.actors.hf.load_actor.",
        )
    return inner


def adapters_in_use(model: nn.Module) -> tuple[Any, ...]:
    """The PEFT adapters active in a forward pass; the same pass without them belongs to a different
    policy.
    """
    layers: list[Any] = [
        part
        for part in model.modules()
        if isinstance(getattr(part, "disable_adapters", None), bool)
    ]
    # PEFT switches all its layers together, so the first one is enough.
    return (layers[0].disable_adapters, tuple(layers[0].active_adapters)) if layers else ()


class Table:
    """One of the two tables, live.

    Attributes:
        whole: this process has all of it.
    """

    def __init__(self, model: nn.Module, name: str) -> None:
        """
        Args:
            model: the actor as the loop holds it, including wrappers: FSDP1 is only visible from
                outside.
            name: `output` or `input`.

        Raises:
            ModelError: there is no such table, or its form can't be read.
        """
        inner = plain_model(model)
        found = inner.get_output_embeddings() if name == "output" else inner.get_input_embeddings()
        if name == "output":
            _check_logits(inner, found)
        self._what = "an output embedding (lm_head)" if name == "output" else "an input embedding"
        self._model_name = type(inner).__name__
        self._module = module = self._chosen(found)
        # PEFT wraps a layer that it adapts in its own.
        base = module.get_base_layer() if hasattr(module, "get_base_layer") else module
        if not isinstance(getattr(base, "weight", None), torch.Tensor):
            raise self._unusable("none")
        self._adapters = _lora_adapters(module) if base is not module else []
        # Only adapters that report what they add to the weight can give a table.
        if base is not module and not hasattr(module, "get_delta_weight"):
            raise self._unusable(
                f"{type(module).__name__}, an adapter whose product is not a table"
            )
        self._base = base
        # FSDP1 keeps flat pieces in wrappers, FSDP2 changes the module's own class.
        self._unit = _unit_of(base, FSDP, model)
        self._sharding = _unit_of(base, FSDPModule, model)
        self.whole = (
            self._unit is None
            and self._sharding is None
            and not any(isinstance(p, DTensor) or _by_zero(p) for p in self.parameters)
        )
        if self.whole:
            self._checked(base.weight)

    @property
    def parameters(self) -> list[torch.Tensor]:
        """The parameters it consists of, as this rank holds them."""
        if self._unit is not None:
            return list(_own_parameters(self._unit))
        if self._sharding is not None:
            # After a forward pass the outermost unit has whole weights for a while.
            self._sharding.reshard()
        factors = [
            part.weight if isinstance(part, nn.Module) else part
            for kind in LORA
            for adapter, part in getattr(self._module, kind, {}).items()
            if adapter in self._adapters
        ]
        return [self._base.weight, *factors]

    @property
    def frozen(self) -> bool:
        """Whether no optimizer changes it, on any rank."""
        return not any(part.requires_grad for part in self.parameters)

    def print_of_bits(self) -> tuple[int, ...]:
        """A fingerprint of what this rank holds: different after an optimizer step that changed
        it.
        """
        return tuple(_bits(_local(part)) for part in self.parameters)

    def live(self) -> torch.Tensor:
        """`[V, D]` of a whole table: without a copy if it is plain, otherwise with its adapters
        applied.
        """
        return self._checked(self._merged())

    def is_that_of(self, other: Table) -> bool:
        """Whether both are one parameter with the same adapters."""
        return (
            self._base.weight is other._base.weight and not self._adapters and not other._adapters
        )

    @torch.no_grad()
    def gather(self, *, keep: bool) -> tuple[torch.Tensor | None, int]:
        """A copy of the whole table on the CPU, and its bytes. All ranks call it. None for the copy
        if it is not to be kept.
        """
        with self._together():
            weight = self._base.weight
            if not self._adapters and _cut_by_rows(weight):
                return _gathered_in_pieces(self._checked(weight), keep)
            weight_VD = self._checked(self._merged())
            return (weight_VD.detach().to("cpu", copy=True) if keep else None), weight_VD.nbytes

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        cut = [part for part in self.parameters if _by_zero(part)]
        if self._unit is not None:
            # recurse: the unit's own parameters are enough; whole layers below it may not fit.
            with FSDP.summon_full_params(self._unit, recurse=False, writeback=False):
                yield
        elif cut:
            # Only present if ZeRO-3 has sharded something.
            import deepspeed

            with deepspeed.zero.GatheredParameters(cut):
                yield
        else:
            yield

    def _merged(self) -> torch.Tensor:
        weight_VD = _full(self._base.weight)
        # A merged adapter is already in the weight.
        if self._adapters and not self._module.merged and not self._module.disable_adapters:
            return weight_VD + sum(
                _full(self._module.get_delta_weight(adapter)) for adapter in self._adapters
            )
        return weight_VD

    def _chosen(self, module: Any) -> Any:
        """The copy in use, for a table that PEFT trains beside the original."""
        copies = getattr(module, "modules_to_save", None)
        if copies is None:
            return module
        active = [name for name in module.active_adapters if name in copies]
        return (
            copies[active[0]] if active and not module.disable_adapters else module.original_module
        )

    def _checked(self, weight: torch.Tensor) -> torch.Tensor:
        # Some quantized layers pack several numbers into one, and their weight has other rows.
        rows = getattr(self._base, "out_features", None) or getattr(
            self._base, "num_embeddings", None
        )
        if (
            weight.dim() != 2
            or not weight.is_floating_point()
            or rows not in (None, weight.shape[0])
        ):
            raise self._unusable(
                f"{type(self._base).__name__} with a weight of {weight.dtype} {tuple(weight.shape)}"
            )
        return weight

    def _unusable(self, found: str) -> ModelError:
        return ModelError(
            "The model lacks a matrix that the heads need.",
            given=f"{self._model_name}: {found}",
            expected=(
                f"{self._what} with floating-point numbers: whole, or cut by FSDP1, FSDP2, DTensor"
                " or ZeRO-3"
            ),
            do=(
                "Pass the actor with its wrappers, a causal LM of transformers; leave these two"
                " tables out of quantization."
            ),
        )


def beyond_lm_head(model: Any, lm_head: Any) -> list[str]:
    """Whatever makes the model's logits more than lm_head's product, by name."""
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    found = [
        f"{name}={value}"
        for name, plain in BEYOND_LM_HEAD.items()
        if (value := getattr(config, name, None)) not in (None, plain)
    ]
    if isinstance(bias := getattr(lm_head, "bias", None), torch.Tensor) and bool(
        bias.detach().any()
    ):
        found.append("a bias of lm_head")
    return found


def _check_logits(model: Any, lm_head: Any) -> None:
    """Raise ModelError if the actor's logits are not just lm_head's product."""
    if found := beyond_lm_head(model, lm_head):
        raise ModelError(
            "The actor's logits are not just the product of its lm_head.",
            given=f"{type(model).__name__}: {', '.join(found)}",
            expected=(
                "neither a scale, nor a soft cap, nor a bias: heads would be trained and judged "
                "on logits that differ from the engine's"
            ),
            do="Use an actor without it.",
        )


def _lora_adapters(module: Any) -> list[str]:
    names = {name for kind in LORA for name in getattr(module, kind, {})}
    return [name for name in getattr(module, "active_adapters", []) if name in names]


def _unit_of(module: nn.Module, kind: type[Any], model: nn.Module) -> Any:
    """The innermost module of this kind that contains this one; with FSDP1 and 2 the unit that is
    gathered as a whole.
    """
    units = [
        unit
        for unit in model.modules()
        if isinstance(unit, kind) and any(part is module for part in unit.modules())
    ]
    # `modules()` goes from the outside in.
    return units[-1] if units else None


def _own_parameters(unit: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters of an FSDP1 unit, without those of units inside it."""
    yield from (part for part in unit._parameters.values() if part is not None)
    for child in unit.children():
        if not isinstance(child, FSDP):
            yield from _own_parameters(child)


def _by_zero(part: torch.Tensor) -> bool:
    return hasattr(part, "ds_tensor")


def _local(part: torch.Tensor) -> torch.Tensor:
    # Between passes ZeRO-3 replaces the parameter with an empty tensor.
    shard = part.ds_tensor if _by_zero(part) else part  # type: ignore[attr-defined]
    return (shard.to_local() if isinstance(shard, DTensor) else shard).detach()


def _full(weight: torch.Tensor) -> torch.Tensor:
    if not isinstance(weight, DTensor):
        return weight
    # Weights may be on the CPU, but ranks still communicate on their GPUs.
    here: Any = weight.to(weight.device_mesh.device_type)
    return here.full_tensor()


def _cut_by_rows(weight: torch.Tensor) -> bool:
    return isinstance(weight, DTensor) and all(
        type(place) is Replicate or (type(place) is Shard and place.dim == 0)
        for place in weight.placements
    )


def _gathered_in_pieces(weight_VD: Any, keep: bool) -> tuple[torch.Tensor | None, int]:
    """As `Table.gather`, some columns at a time: every rank has these of its own rows."""
    rows, width = weight_VD.shape
    whole_VD = torch.empty(rows, width, dtype=weight_VD.dtype) if keep else None
    columns = max(1, PIECE_BYTES // (rows * weight_VD.element_size()))
    for here_RC, start in zip(
        weight_VD.to_local().split(columns, dim=1), range(0, width, columns), strict=True
    ):
        count = here_RC.shape[1]
        piece = DTensor.from_local(
            here_RC.contiguous(),
            weight_VD.device_mesh,
            weight_VD.placements,
            run_check=False,
            shape=torch.Size((rows, count)),
            stride=(count, 1),
        )
        piece_VC = _full(piece)
        if whole_VD is not None:
            whole_VD[:, start : start + count] = piece_VC.to("cpu")
    return whole_VD, weight_VD.nbytes


def _bits(values: torch.Tensor) -> int:
    whole_numbers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[
        values.element_size()
    ]
    # Bits, not values: a sum of floats may round a small update away, and integers add in any
    # order.
    return int(values.contiguous().view(whole_numbers).sum(dtype=torch.int64))
