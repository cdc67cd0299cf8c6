"""bfloat16 is computed in only where the machine multiplies it itself."""

from __future__ import annotations

import pytest
import torch

from medusa_ppo.offline import scene
from medusa_ppo.runtime import hardware


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
