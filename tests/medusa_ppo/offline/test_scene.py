"""bfloat16 is computed in only where the machine multiplies it itself, and a model's sizes are
found wherever its configuration has them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from heads.checkpoint import save_heads
from heads.errors import CheckpointError
from heads.heads_config import HeadsConfig
from heads.modules import MedusaHeads
from medusa_ppo.offline import scene
from medusa_ppo.offline.evaluate import evaluate_heads
from medusa_ppo.offline.options import EvalOptions, TrainOptions
from medusa_ppo.offline.scene import plan_training, read_scene
from medusa_ppo.runtime import hardware
from medusa_ppo.runtime.console import OfflineProgress


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="a GPU multiplies bfloat16 whatever the CPU does"
)
@pytest.mark.parametrize(
    ("flag", "expected"),
    [("avx512_bf16", torch.bfloat16), ("bf16", torch.bfloat16), ("avx2", torch.float32)],
)
def test_the_cpus_flags_decide(
    monkeypatch: pytest.MonkeyPatch, flag: str, expected: torch.dtype
) -> None:
    monkeypatch.setattr(hardware, "_cpu_flags", lambda: {"fpu", flag})
    assert (
        scene.compute_dtype("bfloat16") == expected
        and scene.compute_dtype("float32") == torch.float32
    )


def test_this_machines_flags_are_read() -> None:
    assert {"fpu", "asimd"} & hardware._cpu_flags(), "x86 or Arm"


def test_a_model_of_several_parts_has_the_sizes_of_its_text_part(
    vision_actor: Callable[..., Path], questions: Path, tmp_path: Path
) -> None:
    """As vision-language models have them: config.json has a text_config."""
    model = str(vision_actor("qwen2_5_vl"))
    assert read_scene(model, str(questions), "", 16, column="question").context == 512
    options = TrainOptions(
        model=model, data=str(questions), out=tmp_path / "heads", column="question"
    )
    plan = dict(plan_training(options))
    sizes = AutoConfig.from_pretrained(model).get_text_config()
    width = f"hidden {sizes.hidden_size}, vocabulary {sizes.vocab_size},"
    assert width in plan["model"]
    evaluated = EvalOptions(
        model=model, heads=str(tmp_path / "others"), data=str(questions), template="{question}"
    )
    heads = MedusaHeads(HeadsConfig(sizes.hidden_size + 8, sizes.vocab_size, 1))
    lm_head_VD = torch.ones(sizes.vocab_size, sizes.hidden_size + 8)
    save_heads(tmp_path / "others", heads, lm_head_VD=lm_head_VD)
    with pytest.raises(CheckpointError, match=f"{sizes.hidden_size}"):
        evaluate_heads(evaluated, OfflineProgress(quiet=True))
