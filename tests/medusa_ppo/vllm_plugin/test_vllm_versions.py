"""The gate for versions of vLLM."""

from __future__ import annotations

import pytest

from medusa_ppo.vllm_plugin import vllm_versions


@pytest.mark.parametrize("version", ["0.24.0", "0.31.0", "0.32.0+cpu", "0.32.1.post2"])
def test_tested_versions(version: str) -> None:
    assert vllm_versions.is_tested(version) and vllm_versions.is_allowed(version)


@pytest.mark.parametrize("version", ["0.30.1", "0.33.0"])
def test_a_version_that_was_not_tested_itself_is_used_with_a_warning(
    version: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(vllm_versions, "vllm_version", lambda: version)
    assert not vllm_versions.is_tested(version)
    assert vllm_versions.require_vllm() == version
    assert "not tested" in caplog.text
