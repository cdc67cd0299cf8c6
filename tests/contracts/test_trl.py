"""Contract with TRL: every class, signature and attribute that medusa_ppo/loops/trl.py relies on,
in the installed package.
"""

from __future__ import annotations

import ast
from typing import Any

import pytest

trl = pytest.importorskip("trl")

from transformers import Trainer, TrainerCallback  # noqa: E402
from trl.generation import vllm_client, vllm_generation  # noqa: E402
from trl.trainer import grpo_trainer, rloo_trainer  # noqa: E402

from medusa_ppo.loops.attachment import OURS  # noqa: E402
from medusa_ppo.loops.loop_versions import require_loop  # noqa: E402
from tests.contracts.sources import parameters, source  # noqa: E402

TRAINERS = [(grpo_trainer, "GRPOTrainer"), (rloo_trainer, "RLOOTrainer")]


def calls(thing: Any, name: str) -> list[ast.Call]:
    """Calls of `name` (a bare name or the last part of a dotted one) in the source of a class or
    function.
    """
    found = []
    for node in ast.walk(ast.parse(source(thing))):
        if isinstance(node, ast.Call) and name == getattr(
            node.func, "id", getattr(node.func, "attr", None)
        ):
            found.append(node)
    return found


def test_the_installed_version_is_a_checked_one():
    assert require_loop("trl") == trl.__version__


@pytest.mark.parametrize(("module", "name"), TRAINERS)
def test_the_trainers_build_their_generation_from_a_name_in_their_module(module: Any, name: str):
    assert module.VLLMGeneration is vllm_generation.VLLMGeneration
    (call,) = calls(getattr(module, name).__init__, "VLLMGeneration")
    given = {keyword.arg for keyword in call.keywords}
    assert not call.args and {"model", "accelerator", "mode", "min_p", "enable_sleep_mode"} <= given
    assert "self.use_vllm" in source(getattr(module, name).__init__)
    assert getattr(trl, name).__module__ == module.__name__


@pytest.mark.parametrize(("module", "name"), TRAINERS)
def test_the_trainers_sync_and_generate_through_the_two_methods_that_are_overridden(
    module: Any, name: str
):
    trainer = getattr(module, name)
    assert calls(trainer, "sync_weights")
    for call in calls(trainer._generate_single_turn, "generate"):
        owner = ast.unparse(call.func)
        if owner == "self.vllm_generation.generate":
            assert {keyword.arg for keyword in call.keywords} == {
                "prompts",
                "images",
                "num_generations",
                "profiler",
            }
            break
    else:
        pytest.fail(f"{name} does not generate through self.vllm_generation")


@pytest.mark.parametrize(("module", "name"), TRAINERS)
def test_the_log_prob_pass_goes_through_the_models_own_call(module: Any, name: str):
    body = source(getattr(module, name)._get_per_token_logps_and_entropies)
    assert "model(**model_inputs" in body
    assert (
        '"input_ids": input_ids_batch' in body and '"attention_mask": attention_mask_batch' in body
    )


def test_generation_has_the_signatures_and_attributes():
    generation = vllm_generation.VLLMGeneration
    assert parameters(generation.sync_weights) == ["self"]
    assert parameters(generation.generate) == [
        "self",
        "prompts",
        "images",
        "num_generations",
        "profiler",
    ]
    assert parameters(generation._iter_named_params) == ["self"]
    assert {"model", "accelerator", "mode", "min_p"} <= set(parameters(generation.__init__))
    body = source(generation)
    for name in (
        "temperature",
        "top_p",
        "top_k",
        "max_completion_length",
        "logprobs",
        "mode",
        "enable_sleep_mode",
    ):
        assert f"self.{name} = {name}" in body, name
    for name in ("_llm_weights_sleeping", "vllm_client", "llm"):
        assert f"self.{name} = " in body, name
    assert "return prompt_ids, completion_ids, logprobs, logprob_token_ids" in body


def test_colocated_vllm_is_started_from_a_name_in_the_module_and_without_our_arguments():
    (call,) = calls(vllm_generation.VLLMGeneration._init_vllm, "LLM")
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    assert not call.args and not set(OURS) & set(given)
    assert ast.unparse(given["logprobs_mode"]) == "'processed_logprobs'"
    assert ast.unparse(given["model"]) == "model.name_or_path"


def test_colocated_vllm_falls_asleep_after_its_start_and_is_woken_for_a_sync():
    generation = vllm_generation.VLLMGeneration
    begins = source(generation.__init__)
    known = ("self.accelerator = ", "self.tensor_parallel_size = ")
    assert all(begins.index(name) < begins.index("self._init_vllm()") for name in known)
    start = source(generation._init_vllm)
    assert start.index("self.llm = LLM(") < start.index("self.llm.sleep(level=2)")
    sync = source(generation.sync_weights)
    assert sync.index('self.llm.wake_up(tags=["weights"])') < sync.index("load_weights([(name")
    generate = source(generation.generate)
    sleeps = generate.index("self.llm.sleep(level=2)")
    assert generate.index("self.sync_weights()") < generate.index('wake_up(tags=["kv_cache"])')
    assert sleeps < generate.index("self._llm_weights_sleeping = True")


def test_the_server_mode_opens_a_communicator_that_needs_cuda():
    assert parameters(vllm_client.VLLMClient.init_communicator) == ["self", "device"]
    assert vllm_generation.VLLMClient is vllm_client.VLLMClient
    (call,) = calls(vllm_generation.VLLMGeneration._init_vllm, "init_communicator")
    assert [keyword.arg for keyword in call.keywords] == ["device"]
    assert "self.base_url" in source(vllm_client.VLLMClient.__init__)


def test_the_events_and_the_log_are_those_of_transformers():
    assert parameters(Trainer.log) == ["self", "logs", "start_time"]
    for name in ("on_train_begin", "on_step_end", "on_train_end"):
        assert parameters(getattr(TrainerCallback, name)) == [
            "self",
            "args",
            "state",
            "control",
            "kwargs",
        ]
    assert {"tools", "rollout_func", "environment_factory", "peft_config"} <= set(
        parameters(trl.GRPOTrainer.__init__)
    )
    assert "peft_config" in parameters(trl.RLOOTrainer.__init__)
