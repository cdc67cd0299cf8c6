"""What is ours takes vLLM's places once, and only in a vLLM that was checked."""

from __future__ import annotations

import pytest

from heads.errors import UnsupportedVersionError
from medusa_ppo.vllm_plugin import installation, patches, registration, v1_runner, vllm_versions


def test_install_is_done_once_and_undone_completely() -> None:
    installation.uninstall()
    stock = v1_runner.model_runner.GPUModelRunner.__init__
    forward = patches.rejection_sampler.RejectionSampler.forward
    with pytest.raises(UnsupportedVersionError, match="not active"):
        registration.require_active()
    try:
        registration.register()
        registration.register()
        assert registration.require_active()
        assert v1_runner.model_runner.GPUModelRunner.__init__ is not stock
        assert patches.rejection_sampler.RejectionSampler.forward is not forward
    finally:
        installation.uninstall()
    assert v1_runner.model_runner.GPUModelRunner.__init__ is stock
    assert patches.rejection_sampler.RejectionSampler.forward is forward
    registration.register()


@pytest.mark.parametrize("version", ["0.23.0", "0.34.0", "1.0", "x.y", ""])
def test_other_versions_are_refused_by_our_engines_but_left_alone(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (registration, vllm_versions):
        monkeypatch.setattr(module, "vllm_version", lambda: version)
    monkeypatch.setattr(
        registration,
        "activate",
        lambda: pytest.fail("must not touch a version that was never checked"),
    )
    registration.register()
    with pytest.raises(UnsupportedVersionError):
        vllm_versions.require_vllm()
