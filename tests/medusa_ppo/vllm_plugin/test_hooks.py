"""The contract with vLLM's private names, and the version gate."""

from __future__ import annotations

import pytest

from heads.errors import UnsupportedVersionError
from medusa_ppo.vllm_plugin import hooks as internals
from medusa_ppo.vllm_plugin import registration as plugin


def test_every_private_name_is_as_it_was_checked() -> None:
    assert internals.check_contract() == []


def test_a_changed_signature_is_named() -> None:
    contract = (
        ("vllm.v1.spec_decode.medusa", "MedusaProposer.propose", "num_speculative_tokens moon_phase"),
        ("vllm.v1.spec_decode.medusa", "Gone", ""),
    )
    first, second = internals.check_contract(contract)
    assert "moon_phase" in first
    assert "Gone is missing" in second


def test_install_is_done_once_and_undone_completely() -> None:
    internals.uninstall()
    stock = internals.model_runner.GPUModelRunner.__init__
    forward = internals.rejection_sampler.RejectionSampler.forward
    with pytest.raises(UnsupportedVersionError, match="not active"):
        plugin.require_active()
    try:
        plugin.register()
        plugin.register()
        assert plugin.require_active()
        assert internals.model_runner.GPUModelRunner.__init__ is not stock
        assert internals.rejection_sampler.RejectionSampler.forward is not forward
    finally:
        internals.uninstall()
    assert internals.model_runner.GPUModelRunner.__init__ is stock
    assert internals.rejection_sampler.RejectionSampler.forward is forward
    plugin.register()


@pytest.mark.parametrize("version", ["0.30.1", "0.33.0", "1.0", ""])
def test_other_versions_are_refused_by_our_engines_but_left_alone(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "vllm_version", lambda: version)
    monkeypatch.setattr(plugin, "activate", lambda: pytest.fail("must not touch a version that was never checked"))
    plugin.register()
    with pytest.raises(UnsupportedVersionError):
        plugin.require_vllm()


@pytest.mark.parametrize("version", ["0.31.0", "0.32.0", "0.32.1.post2"])
def test_checked_versions(version: str) -> None:
    assert plugin.is_checked(version)
