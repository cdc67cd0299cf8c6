"""Mends of older releases of vLLM, on stand-ins for what they mend: they hold with every release that is installed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from heads.errors import LossyError
from medusa_ppo.vllm_plugin.mends import drafts_as_lists, kind_of_heads_known, refuse_lossy_rule


@pytest.mark.parametrize("count", [0, 2, 4])
def test_drafts_leave_as_lists_of_as_many_as_were_drafted(count: int) -> None:
    ids_BK = torch.arange(3 * count).reshape(3, count)
    assert drafts_as_lists(lambda runner: ids_BK)(None) == ids_BK.tolist()
    assert drafts_as_lists(lambda runner: [[1], []])(None) == [[1], []]


@pytest.mark.parametrize(
    ("given", "seen"), [("medusa_ppo", "medusa"), ("dummy_medusa_ppo", "dummy_medusa"), ("medusa", "medusa"), ("llama", "llama")]
)
def test_our_kinds_of_heads_are_medusa_to_vllm(given: str, seen: str) -> None:
    asked = []

    def original(config: SimpleNamespace) -> SimpleNamespace:
        asked.append(config.model_type)
        return config

    assert kind_of_heads_known(original)(SimpleNamespace(model_type=given)).model_type == seen
    assert asked == [seen]


@pytest.mark.parametrize("rule", ["fly", "synthetic", "typical"])
def test_a_lossy_rule_is_refused_whoever_started_the_engine(rule: str) -> None:
    for lossless in ("standard", "block"):
        refuse_lossy_rule(SimpleNamespace(rejection_sample_method=lossless))
    with pytest.raises(LossyError, match=rule):
        refuse_lossy_rule(SimpleNamespace(rejection_sample_method=rule))
