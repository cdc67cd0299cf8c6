"""What tests of one process have in the place of vLLM's groups of ranks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is the only rank of its engine. Modules ask for it: test_rank_agreement.py has
    groups of its own.
    """
    # By name: this file is read where there is no vLLM, too.
    group = "medusa_ppo.vllm_plugin.rank_agreement.get_tp_group"
    monkeypatch.setattr(group, lambda: SimpleNamespace(world_size=1))
