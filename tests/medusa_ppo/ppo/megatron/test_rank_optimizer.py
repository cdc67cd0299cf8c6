"""What a rank asks of Megatron's optimizer. Its numbers are test_megatron_learner.py's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("megatron.core")


def test_torchs_adamw_steps_without_copies_and_counts_on_where_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from megatron.core.optimizer.optimizer import FP32Optimizer

    from medusa_ppo.ppo.megatron import rank_optimizer

    parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, 2))]
    adamw = torch.optim.AdamW([{"params": [parameter]} for parameter in parameters])
    part = FP32Optimizer.__new__(FP32Optimizer)
    part.optimizer = adamw
    chain = SimpleNamespace(chained_optimizers=[part], param_groups=adamw.param_groups)
    monkeypatch.setattr(rank_optimizer, "get_megatron_optimizer", lambda *_: chain)
    monkeypatch.setattr(
        rank_optimizer,
        "parallel_state",
        SimpleNamespace(get_data_parallel_group=lambda **_: None),
    )
    model: Any = SimpleNamespace(ddp=None, device=torch.device("cpu"))
    one = rank_optimizer.RankOptimizer(model, 1e-3, torch.float32, distributed=False)
    assert all(group["fused"] and not group["foreach"] for group in adamw.param_groups)

    one.restart(5.0)
    for moment in rank_optimizer.MOMENTS:
        for parameter in parameters:
            one.put(moment, parameter, torch.full_like(parameter, 0.25))
    assert {adamw.state[parameter]["step"].device for parameter in parameters} == {model.device}
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    adamw.step()
    assert one.steps == 6.0
    expected = torch.optim.AdamW([nn.Parameter(torch.ones(3))], fused=True)
    (plain,) = expected.param_groups[0]["params"]
    expected.state[plain] = {
        "step": torch.tensor(5.0),
        **{moment: torch.full((3,), 0.25) for moment in rank_optimizer.MOMENTS},
    }
    plain.grad = torch.ones(3)
    expected.step()
    assert torch.equal(parameters[0], plain)
