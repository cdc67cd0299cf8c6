"""How an engine is told where our heads are."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest

from heads.errors import LossyError, UnsupportedVersionError
from medusa_ppo.vllm_plugin import speculation


@pytest.mark.parametrize(
    ("installed", "method"), [("0.32.0", "medusa"), ("0.33.0", "custom_class")]
)
def test_an_engine_is_told_of_the_heads_as_its_release_takes_them(
    installed: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speculation, "vllm_version", lambda: installed)
    told = speculation.speculation("/some/heads", 3, sampled=True)
    assert (
        told["speculative_config"]["method"] == method
        and told["additional_config"]["medusa_ppo_sampled"]
    )
    speculative = SimpleNamespace(
        **told["speculative_config"], draft_model_config=SimpleNamespace(model="/some/heads")
    )
    config = SimpleNamespace(
        speculative_config=speculative, additional_config=told["additional_config"]
    )
    assert speculation.heads_folder(config) == "/some/heads"
    assert speculation.rule_of(speculative) == "standard", "V1's kernels know no other"
    as_block = speculation.speculation("/some/heads", 3, sampled=True, block=True)
    assert as_block["speculative_config"].pop("rejection_sample_method") == "block"
    assert as_block == told
    speculative.method = "ngram"
    assert speculation.heads_folder(config) == ""


def test_a_class_that_nothing_took_the_place_of_says_so() -> None:
    module, _, name = speculation.CUSTOM_CLASS.rpartition(".")
    config = SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=2),
        model_config=SimpleNamespace(get_hidden_size=lambda: 8),
    )
    with pytest.raises(UnsupportedVersionError, match="additional_config"):
        getattr(importlib.import_module(module), name)(config).propose(
            [[1]], None, None, slot_mappings=None
        )


@pytest.mark.parametrize("rule", ["fly", "synthetic", "typical"])
def test_a_lossy_rule_is_refused_whoever_started_the_engine(rule: str) -> None:
    for lossless in ("standard", "block"):
        config = SimpleNamespace(rejection_sample_method=lossless)
        speculation.refuse_lossy_rule(speculation.rule_of(config))
    speculation.refuse_lossy_rule(speculation.rule_of(SimpleNamespace()))
    with pytest.raises(LossyError, match=rule):
        speculation.refuse_lossy_rule(
            speculation.rule_of(SimpleNamespace(rejection_sample_method=rule))
        )
