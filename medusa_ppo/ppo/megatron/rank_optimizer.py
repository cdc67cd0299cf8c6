"""Megatron's optimizer on one rank: the tensors that it steps, and its state for each parameter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import FP32Optimizer
from torch import Tensor, nn

from medusa_ppo.actors.megatron_model import RankModel
from medusa_ppo.ppo.optimization import (
    ADAM_BETAS,
    ADAM_EPSILON,
    GradientNorms,
    set_learning_rate,
)

WEIGHTS = "weights"
MOMENTS = ("exp_avg", "exp_avg_sq")
CLIP_EPSILON = 1e-6  # As torch.nn.utils.clip_grad_norm_.


class RankOptimizer:
    """Megatron's AdamW. It steps float32 tensors: this rank's parameters, copies of them, or this
    replica's part of either.
    """

    def __init__(
        self, model: RankModel, learning_rate: float, dtype: torch.dtype, *, distributed: bool
    ) -> None:
        """
        Args:
            learning_rate: AdamW's step size, before any schedule.
            dtype: dtype of the model's parameters.
            distributed: whether each data-parallel replica (and context-parallel rank) keeps only
                a part.
        """
        settings = OptimizerConfig(
            optimizer="adam",
            lr=learning_rate,
            # Needed by Megatron's scheduler, which is never called: `set_learning_rate` sets each
            # step's rate.
            min_lr=learning_rate,
            weight_decay=0.0,
            adam_beta1=ADAM_BETAS[0],
            adam_beta2=ADAM_BETAS[1],
            adam_eps=ADAM_EPSILON,
            params_dtype=dtype,
            bf16=dtype == torch.bfloat16,
            clip_grad=0.0,  # Clipped here, after checking the norm.
            use_distributed_optimizer=distributed,
        )
        self.distributed = distributed
        # Megatron steps float32 copies of 16-bit parameters, and the parameters themselves
        # otherwise.
        self._copies = dtype != torch.float32
        self._device = model.device
        self._group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        self._chain: Any = get_megatron_optimizer(settings, [model.ddp])
        (self._part,) = self._chain.chained_optimizers
        self._held = _stepped(self._part)
        if self._is_torchs:
            # Without TransformerEngine and Apex it is torch's, which Megatron leaves to choose: on
            # a GPU a step then makes a float32 copy of everything that it steps.
            for group in self._part.optimizer.param_groups:
                group["fused"] = True
                group["foreach"] = False

    def step(self, rate: float, clip_norm: float, norms: GradientNorms) -> None:
        """Make a clipped step with the gathered gradients; skip it on all ranks if their norm is
        not finite.
        """
        set_learning_rate(self._chain, rate)
        # The two halves of Megatron's own `step`, because a step may be clipped or skipped in
        # between. The norm is that of all ranks, so they decide alike.
        self._chain.prepare_grads()
        norm = float(self._chain.get_grad_norm())
        if not norms.sound(norm):
            return
        for stepped in self._part.get_parameters():
            stepped.grad.mul_(min(1.0, clip_norm / (norm + CLIP_EPSILON)))
        self._chain.step_with_ready_grads()

    def value(self, what: str, parameter: nn.Parameter) -> Tensor:
        """A whole parameter's weights, or one of its moments. With a distributed optimizer, all
        replicas must call it.
        """
        if what == WEIGHTS and not self._copies:
            return parameter.detach()
        # A replica may hold no part of a parameter; it still takes part in the sum below.
        stepped, place = self._held.get(parameter, (None, slice(0)))
        found: Tensor | None = None
        if stepped is not None:
            found = (stepped if what == WEIGHTS else self._state[stepped][what]).detach()
        if not self.distributed:
            assert found is not None, "all parameters are stepped here"
            return found
        # Each replica has one part and zeros elsewhere, so the sum is complete, to the bit.
        whole = torch.zeros(parameter.numel(), device=self._device)
        if found is not None:
            whole[place] = found
        dist.all_reduce(whole, group=self._group)
        return whole.view(parameter.shape)

    def put(self, what: str, parameter: nn.Parameter, value: Tensor) -> None:
        """Write back what `value` returned; for weights, into the optimizer's own copy."""
        if parameter not in self._held:
            return
        stepped, place = self._held[parameter]
        part = value.flatten()[place].view(stepped.shape).to(self._device, torch.float32)
        if what == WEIGHTS:
            stepped.data.copy_(part)
        else:
            # Cloned, because a view would keep the whole tensor from the file alive.
            self._state[stepped][what] = part.clone()

    def kept(self) -> Iterator[tuple[str, Tensor]]:
        """The stepped tensors and the moments, in a fixed order, each with its name."""
        for number, (stepped, _) in enumerate(self._held.values()):
            yield f"{number}/{WEIGHTS}", stepped
            for moment in MOMENTS:
                if moment in self._state.get(stepped, {}):
                    yield f"{number}/{moment}", self._state[stepped][moment]

    @property
    def steps(self) -> float:
        """Optimizer steps so far. torch's AdamW counts them per parameter, TransformerEngine's and
        Apex's per group.
        """
        counters = [*self._state.values(), *self._chain.param_groups]
        return max(
            (float(counter["step"]) for counter in counters if "step" in counter), default=0.0
        )

    def restart(self, steps: float) -> None:
        """Clear the moments and continue counting from `steps`."""
        self._state.clear()
        for group in self._chain.param_groups if steps else ():
            if not self._is_torchs:
                group["step"] = int(steps)
                continue
            for stepped in group["params"]:
                # Beside the parameter, where torch's fused AdamW keeps it.
                self._state[stepped]["step"] = torch.tensor(
                    steps, dtype=torch.float32, device=stepped.device
                )

    @property
    def _is_torchs(self) -> bool:
        return isinstance(self._part.optimizer, torch.optim.AdamW)

    @property
    def _state(self) -> Any:
        return self._part.optimizer.state


def _stepped(optimizer: Any) -> dict[nn.Parameter, tuple[Tensor, slice]]:
    """For each parameter that this rank steps: its float32 tensor, and which part of the flat
    parameter that is.
    """
    # Megatron has an optimizer class for each case, and each has other names for the same lists.
    if isinstance(optimizer, FP32Optimizer):
        return {parameter: (parameter, slice(None)) for parameter in optimizer.get_parameters()}
    distributed = isinstance(optimizer, DistributedOptimizer)
    if distributed:
        copies = ("model_float16_groups", "shard_fp32_from_float16_groups")
        themselves = ("model_fp32_groups", "shard_fp32_groups")
    else:
        copies = ("float16_groups", "fp32_from_float16_groups")
        themselves = ("fp32_from_fp32_groups", "fp32_from_fp32_groups")
    found = {}
    for models, mains in (copies, themselves):
        groups = zip(getattr(optimizer, models), getattr(optimizer, mains), strict=True)
        for parameters, stepped in groups:
            for parameter, tensor in zip(parameters, stepped, strict=True):
                place = slice(None)
                if distributed:
                    part = optimizer._get_model_param_range_map(parameter)["param"]
                    place = slice(part.start, part.end)
                found[parameter] = (tensor, place)
    return found
