"""The contract with vLLM's private names."""

from __future__ import annotations

import pytest

from medusa_ppo.vllm_plugin import hook_table
from medusa_ppo.vllm_plugin.hook_table import Hook
from medusa_ppo.vllm_plugin.installation import check_hooks
from medusa_ppo.vllm_plugin.vllm_versions import LAST, text_of


def test_every_private_name_is_as_it_was_checked() -> None:
    assert check_hooks() == []


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
    first, second = check_hooks(hooks)
    assert "no parameter moon_phase" in first
    assert "Gone missing" in second and f"vLLM {text_of(LAST)} had it" in second


def test_a_release_that_was_never_seen_is_held_against_the_newest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hook_table, "vllm_version", lambda: "0.40.0")
    hooks = (
        Hook("nothing", "vllm.v1.worker.gpu_model_runner", "Gone"),
        Hook("older", "vllm.gone", "Gone", last=(0, 31)),
    )
    assert [found.need for found in hook_table.compare(hooks=hooks) if found.fault] == ["nothing"]


def test_hooks_of_the_cpu_concern_no_other_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hook_table, "is_cpu_build", lambda: False)
    assert {found.runner for found in hook_table.compare()} == {
        "V1",
        hook_table.CORE,
    }


def test_an_attribute_that_is_set_no_more_is_named() -> None:
    """What objects have and their class has not: vLLM would end with an AttributeError at the
    first draft.
    """
    batch = "vllm.v1.worker.gpu_input_batch"
    hooks = (
        Hook("there", batch, "InputBatch.__init__", attributes=("token_ids_cpu",)),
        Hook("gone", batch, "InputBatch.__init__", attributes=("token_ids_cpu", "moon_phase")),
    )
    (fault,) = check_hooks(hooks)
    assert "no attribute moon_phase" in fault and "token_ids_cpu" not in fault


@pytest.mark.parametrize("name", ["token_ids_cpu", "prefill_token_ids"])
def test_what_copying_reads_is_in_the_table(name: str) -> None:
    assert any(name in (*hook.attributes, *hook.parameters) for hook in hook_table.HOOKS)
