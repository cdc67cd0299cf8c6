"""What the worker extension checks of an actor that comes; a plain product stands for vLLM's model
(engines/ has the real one).
"""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from heads.errors import SwapError
from medusa_ppo.vllm_plugin.worker_extension import MedusaWorker

pytestmark = pytest.mark.usefixtures("one_rank")
D, V = 8, 50


def worker(model: str, lm_head_VD: torch.Tensor) -> Any:
    """The extension beside a model whose product is that of `lm_head_VD`."""
    held: Any = MedusaWorker()
    held.device = torch.device("cpu")
    network = SimpleNamespace(
        logits_processor=SimpleNamespace(scale=1.0, soft_cap=None),
        compute_logits=lambda hidden_BD: hidden_BD @ lm_head_VD.T,
        modules=lambda: (),
    )
    config = SimpleNamespace(get_hidden_size=lambda: D)
    held.model_runner = SimpleNamespace(
        get_model=lambda: network, model_config=config, dtype=lm_head_VD.dtype
    )
    hf_config = SimpleNamespace(tie_word_embeddings=False)
    held.vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(model=model, revision=None, hf_config=hf_config),
        load_config=SimpleNamespace(download_dir=None),
    )
    return held


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_lm_head_that_missed_one_small_update_is_seen(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    served_VD = torch.randn(V, D).to(dtype)
    held = worker("", served_VD)
    held._medusa_check_lm_head(served_VD[:, :2].float(), "the same")
    new_VD = (served_VD.float() * (1 + 2 * torch.finfo(dtype).eps)).to(
        dtype
    )  # Far less than any tolerance would see.
    assert torch.allclose(new_VD, served_VD, rtol=2e-2, atol=1e-3)
    with pytest.raises(SwapError, match="still serves the old lm_head"):
        held._medusa_check_lm_head(new_VD[:, :2], "an update")


def test_an_actor_for_a_model_by_hub_name_is_checked_against_the_hubs_cache(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = tmp_path / "models--lab--actor"
    snapshot = kept / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text("0" * 40)
    (snapshot / "config.json").write_text("{}")
    save_file({"lm_head.weight": torch.zeros(V, D)}, snapshot / "model.safetensors")
    held = worker("lab/actor", torch.zeros(V, D))
    held.vllm_config.load_config.download_dir = str(tmp_path)
    assert held._medusa_check_entries({"lm_head.weight": ("F32", (V, D))}, "right") == [
        "lm_head.weight"
    ]
    with pytest.raises(SwapError, match="not those of the serving model"):
        held._medusa_check_entries({"lm_head.weight": ("F32", (V + 1, D))}, "another vocabulary")
    assert not caplog.records
    held.vllm_config.model_config.model = "lab/unknown"
    with caplog.at_level(logging.WARNING):
        assert held._medusa_check_entries({"anything": ("F32", (1,))}, "unchecked") == ["anything"]
    assert "not checked" in caplog.text


@pytest.mark.parametrize(
    ("dtype", "method"),
    [(torch.float8_e4m3fn, "fp8"), (torch.int8, "compressed-tensors"), (torch.int32, "gptq")],
)
def test_a_quantised_checkpoint_takes_no_actor_and_says_so(
    tmp_path: Path, dtype: torch.dtype, method: str
) -> None:
    """Its own tensors would be taken; an actor has no scales, and another kind of numbers."""
    name = "model.layers.0.o_proj"
    tensors = {f"{name}.weight": torch.zeros(D, D).to(dtype), f"{name}.weight_scale": torch.ones(1)}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    held = worker(str(tmp_path), torch.zeros(V, D))
    actor = {f"{name}.weight": ("F32", (D, D))}
    with pytest.raises(SwapError, match="not those of the serving model"):
        held._medusa_check_entries(actor, "an actor")
    quantised = {"quant_method": method}
    held.vllm_config.model_config.hf_config.quantization_config = quantised
    with pytest.raises(SwapError, match=f"(?s)quantised checkpoint.*{method}"):
        held._medusa_check_entries(actor, "an actor")
    codes = {torch.float8_e4m3fn: "F8_E4M3", torch.int8: "I8", torch.int32: "I32"}
    same = {f"{name}.weight": (codes[dtype], (D, D)), f"{name}.weight_scale": ("F32", (1,))}
    assert held._medusa_check_entries(same, "its own") == list(same)
