"""Fused cross-entropy against the plain reference, when it is chosen, and what no form of it may
do.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from heads import losses
from heads.losses import (
    IGNORED,
    LossConfig,
    fused_cross_entropy,
    head_loss,
    liger_can,
    reference_head_loss,
)
from heads.modules import FactoredLogits
from heads.vocabulary import WHOLE, Vocabulary

ROOT = Path(__file__).resolve().parents[2]
N, K, D, V = 23, 3, 16, 40
SCALE_K = torch.tensor(
    [1.0, 2.0, 5.0]
)  # Unequal: a head's gradient scaled by another head's weight would show.


def torch_sum(
    features_ND: torch.Tensor, weight_VD: torch.Tensor, targets_N: torch.Tensor
) -> torch.Tensor:
    """A second reference, in the place of Liger's kernel: that needs CUDA, or Triton's interpreter
    (below).
    """
    return F.linear_cross_entropy(
        features_ND, weight_VD, targets_N, ignore_index=IGNORED, reduction="sum"
    )


class Rows:
    """Random features, targets and lm_heads."""

    def __init__(self, own: bool) -> None:
        generator = torch.Generator().manual_seed(0)
        self.features_NKD = torch.randn(N, K, D, generator=generator).requires_grad_()
        self.weight = torch.randn((K, V, D) if own else (V, D), generator=generator).requires_grad_(
            own
        )
        self.targets_NK = torch.randint(V, (N, K), generator=generator)
        self.mask_NK = torch.rand(N, K, generator=generator) > 0.2
        self.factored = FactoredLogits(self.features_NKD, self.weight)

    def values_and_gradients(self, loss_K: torch.Tensor) -> list[torch.Tensor]:
        wanted = [tensor for tensor in (self.features_NKD, self.weight) if tensor.requires_grad]
        return [loss_K.detach(), *torch.autograd.grad((loss_K * SCALE_K).sum(), wanted)]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("own", [False, True])
def test_torchs_form_is_the_reference(
    own: bool, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses, "liger_sum", torch_sum)
    rows = Rows(own)
    fused_K = fused_cross_entropy(rows.factored, rows.targets_NK, rows.mask_NK, temperature)
    plain_K = reference_head_loss(
        rows.factored.multiply_out(),
        rows.targets_NK,
        rows.mask_NK,
        LossConfig(),
        temperature=temperature,
    )
    for ours, plain in zip(
        rows.values_and_gradients(fused_K), rows.values_and_gradients(plain_K), strict=True
    ):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)


def test_a_head_without_a_position_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "liger_sum", torch_sum)
    rows = Rows(own=False)
    rows.mask_NK[:, 1] = False
    loss_K = fused_cross_entropy(rows.factored, rows.targets_NK, rows.mask_NK)
    _, gradient_NKD = rows.values_and_gradients(loss_K)
    assert (
        loss_K[1].item() == 0.0
        and not bool(gradient_NKD[:, 1].any())
        and bool(gradient_NKD[:, 0].any())
    )


class Products(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes the shape of everything that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for value in made if isinstance(made, tuple | list) else (made,):
            if isinstance(value, torch.Tensor) and not function.is_view:
                self.shapes.add(tuple(value.shape))
        return made


@pytest.mark.parametrize("fused", [False, True])
def test_no_gradient_of_the_frozen_lm_head_is_ever_made(
    fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even when the table asks for one, and not as an intermediate of its shape; of own
    lm_heads it is made.
    """
    monkeypatch.setattr(losses, "liger_can", lambda *_: fused)
    monkeypatch.setattr(losses, "liger_sum", torch_sum)
    made = {}
    for own in (False, True):
        rows = Rows(own)
        rows.weight.requires_grad_()
        with Products() as products:
            head_loss(rows.factored, rows.targets_NK, rows.mask_NK, LossConfig()).sum().backward()
        made[own] = any(shape[-2:] in ((V, D), (D, V)) for shape in products.shapes)
        assert (rows.weight.grad is not None) == own
    assert made == {False: False, True: True}


def test_markov_and_spread_vocabularies_stay_in_our_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Rows(own=False)
    biased = FactoredLogits(
        rows.features_NKD, rows.weight, torch.zeros(N, K, 2), torch.zeros(K, V, 2)
    )

    class Spread(Vocabulary):
        pass

    on_cuda = FactoredLogits(rows.features_NKD, torch.empty(V, D, device="meta"))
    monkeypatch.setattr(losses, "liger_installed", lambda: True)
    monkeypatch.setattr(torch.Tensor, "device", property(lambda _: torch.device("cuda")))
    assert liger_can(on_cuda, WHOLE)
    assert not liger_can(biased, WHOLE) and not liger_can(on_cuda, Spread())
    monkeypatch.setattr(losses, "liger_installed", lambda: False)
    assert not liger_can(on_cuda, WHOLE)


def test_on_a_cpu_our_chunks_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """CONTRIBUTING's decisions say why."""
    monkeypatch.setattr(losses, "liger_installed", lambda: True)
    assert not liger_can(Rows(own=False).factored, WHOLE) and not liger_can(
        Rows(own=True).factored, WHOLE
    )


@pytest.mark.parametrize(
    "config",
    [
        LossConfig(0.5, tv=0.1),
        LossConfig(0.0, kl=1.0),
        LossConfig(0.0, exact_tv=1.0),
        LossConfig(accept_until_fail=0.1),
    ],
)
def test_other_losses_are_not_plain(config: LossConfig) -> None:
    assert LossConfig().plain and LossConfig(0.5).plain and not config.plain


def test_the_weight_of_cross_entropy_reaches_the_fused_form(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = Rows(own=False)
    chunks_K = head_loss(
        rows.factored, rows.targets_NK, rows.mask_NK, LossConfig(0.5), temperature=1.3
    )
    monkeypatch.setattr(losses, "liger_can", lambda *_: True)
    monkeypatch.setattr(losses, "liger_sum", torch_sum)
    fused_K = head_loss(
        rows.factored, rows.targets_NK, rows.mask_NK, LossConfig(0.5), temperature=1.3
    )
    assert type(fused_K.grad_fn) is not type(chunks_K.grad_fn)
    for ours, plain in zip(
        rows.values_and_gradients(fused_K), rows.values_and_gradients(chunks_K), strict=True
    ):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)


LIGER_ON_CPU = """
import torch
from heads.losses import LossConfig, fused_cross_entropy, reference_head_loss
from tests.heads.test_linear_loss import Rows
for own in (False, True):
    rows = Rows(own)
    fused_K = fused_cross_entropy(rows.factored, rows.targets_NK, rows.mask_NK, 0.7)
    plain_K = reference_head_loss(rows.factored.multiply_out(), rows.targets_NK, rows.mask_NK, LossConfig(), temperature=0.7)
    for ours, plain in zip(rows.values_and_gradients(fused_K), rows.values_and_gradients(plain_K), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)
print("same")
"""


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("liger_kernel") is None, reason="liger_kernel is not installed"
)
def test_ligers_kernel_is_the_reference() -> None:
    """The real package's real kernel, run by Triton's interpreter: a GPU is not needed for its
    arithmetic.
    """
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
    }
    done = subprocess.run(
        [sys.executable, "-c", LIGER_ON_CPU],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        timeout=300,
        cwd=ROOT,
    )
    assert done.stdout.strip() == "same", done.stderr[-3000:]
