"""The contract with vLLM's private names, and the version gate."""

from __future__ import annotations

import gc
import importlib
from types import SimpleNamespace

import pytest
import torch

from heads.errors import UnsupportedVersionError
from medusa_ppo.vllm_plugin import hooks as internals
from medusa_ppo.vllm_plugin import patches as mends
from medusa_ppo.vllm_plugin import registration as plugin
from medusa_ppo.vllm_plugin.registration import LAST, Hook


def test_every_private_name_is_as_it_was_checked() -> None:
    assert internals.check_hooks() == []


def test_a_changed_signature_is_named_with_the_release_that_had_it() -> None:
    runner = "vllm.v1.worker.gpu_model_runner"
    hooks = (
        Hook(
            "drafts",
            runner,
            "GPUModelRunner.propose_draft_token_ids",
            ("sampled_token_ids", "moon_phase"),
        ),
        Hook("nothing", runner, "Gone", last=LAST),
        Hook("something else", "vllm.of_the_past", "Gone", last=(0, 23)),
    )
    first, second = internals.check_hooks(hooks)
    assert "no parameter moon_phase" in first
    assert "Gone missing" in second and f"vLLM {plugin.text_of(LAST)} had it" in second


def test_a_release_that_was_never_seen_is_held_against_the_newest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plugin, "vllm_version", lambda: "0.40.0")
    hooks = (
        Hook("nothing", "vllm.v1.worker.gpu_model_runner", "Gone"),
        Hook("older", "vllm.gone", "Gone", last=(0, 31)),
    )
    assert [found.need for found in plugin.compare(hooks=hooks) if found.fault] == ["nothing"]


def test_hooks_of_the_cpu_concern_no_other_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "is_cpu_build", lambda: False)
    assert {found.runner for found in plugin.compare()} == {"V1"}


def test_install_is_done_once_and_undone_completely() -> None:
    internals.uninstall()
    stock = internals.model_runner.GPUModelRunner.__init__
    forward = mends.rejection_sampler.RejectionSampler.forward
    with pytest.raises(UnsupportedVersionError, match="not active"):
        plugin.require_active()
    try:
        plugin.register()
        plugin.register()
        assert plugin.require_active()
        assert internals.model_runner.GPUModelRunner.__init__ is not stock
        assert mends.rejection_sampler.RejectionSampler.forward is not forward
    finally:
        internals.uninstall()
    assert internals.model_runner.GPUModelRunner.__init__ is stock
    assert mends.rejection_sampler.RejectionSampler.forward is forward
    plugin.register()


@pytest.mark.parametrize("version", ["0.23.0", "0.34.0", "1.0", "x.y", ""])
def test_other_versions_are_refused_by_our_engines_but_left_alone(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugin, "vllm_version", lambda: version)
    monkeypatch.setattr(
        plugin, "activate", lambda: pytest.fail("must not touch a version that was never checked")
    )
    plugin.register()
    with pytest.raises(UnsupportedVersionError):
        plugin.require_vllm()


@pytest.mark.parametrize("version", ["0.24.0", "0.31.0", "0.32.0+cpu", "0.32.1.post2"])
def test_tested_versions(version: str) -> None:
    assert plugin.is_tested(version) and plugin.is_allowed(version)


@pytest.mark.parametrize("version", ["0.30.1", "0.33.0"])
def test_a_version_that_was_not_tested_itself_is_used_with_a_warning(
    version: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(plugin, "vllm_version", lambda: version)
    assert not plugin.is_tested(version)
    assert plugin.require_vllm() == version
    assert "not tested" in caplog.text


@pytest.mark.parametrize(
    ("sampled", "drafted", "rows"),
    [
        ([[5], [6]], [0, 0], [0, 1]),
        ([[5, 6, 7], [8], []], [2, 1, 0], [2, 3, 5]),
        ([[5, 6]], [3], [1]),
    ],
)
def test_drafts_start_where_a_request_s_last_token_was_sampled(
    sampled: list[list[int]], drafted: list[int], rows: list[int]
) -> None:
    """Three rows where two were drafted and accepted; of two rows the first where the draft was
    refused; one where the prompt goes on.
    """
    hidden_TD = torch.arange(sum(drafted) + len(drafted)).unsqueeze(1).expand(-1, 4)
    assert internals._last_states(hidden_TD, sampled, drafted)[:, 0].tolist() == rows


@pytest.mark.parametrize(
    ("installed", "method"), [("0.32.0", "medusa"), ("0.33.0", "custom_class")]
)
def test_an_engine_is_told_of_the_heads_as_its_release_takes_them(
    installed: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugin, "vllm_version", lambda: installed)
    told = plugin.speculation("/some/heads", 3, sampled=True)
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
    assert plugin.heads_folder(config) == "/some/heads"
    speculative.method = "ngram"
    assert plugin.heads_folder(config) == ""


def test_a_class_that_nothing_took_the_place_of_says_so() -> None:
    module, _, name = plugin.CUSTOM_CLASS.rpartition(".")
    config = SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=2),
        model_config=SimpleNamespace(get_hidden_size=lambda: 8),
    )
    with pytest.raises(UnsupportedVersionError, match="additional_config"):
        getattr(importlib.import_module(module), name)(config).propose(
            [[1]], None, None, slot_mappings=None
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_packed_products_are_close_to_plain_ones(dtype: torch.dtype, rows: int) -> None:
    """Whatever becomes of the weight: a packed product holds what it reads."""
    torch.manual_seed(0)
    weight = torch.randn(96, 64).to(dtype)
    rows_ND = torch.randn(rows, 64).to(dtype)
    weight[7] = 0
    expected_NW = rows_ND.float() @ weight.float().T
    product = internals.packed_linear(weight)
    del weight
    gc.collect()
    junk = [torch.full((96,), torch.nan) for _ in range(100)]
    limit = 0.02 if internals.packs_8_bit(dtype, torch.device("cpu")) else 1e-5
    assert (
        product(rows_ND).float() - expected_NW
    ).square().mean().sqrt() < limit * expected_NW.std()
    assert len(junk) == 100
