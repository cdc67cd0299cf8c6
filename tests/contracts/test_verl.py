"""Contract with verl: everything that medusa_ppo/loops/verl*.py relies on, in the installed
package; and its vLLM worker, really run.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("verl", reason="verl has an environment of its own: make test-contracts")

from omegaconf import OmegaConf

from heads.checkpoint import checksum, load_state, save_state
from heads.errors import ConfigError
from medusa_ppo.companion.companion_link import COMPANION_TOKEN
from medusa_ppo.config.run_config import build_config
from medusa_ppo.feeds.http_feed import FEED_TOKEN
from medusa_ppo.loops.loop_versions import require_loop
from medusa_ppo.loops.worker_tap import COMPANION
from medusa_ppo.vllm_plugin.speculation import FEED
from tests.contracts.sources import parameters, position, source


def nested(rows: list[Any], dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.nested.as_nested_tensor(
        [torch.tensor(row, dtype=dtype) for row in rows], layout=torch.jagged
    )


@pytest.fixture(scope="module")
def ours() -> Any:
    import verl.trainer.ppo.v1  # noqa: F401

    return sys.modules["medusa_ppo.loops.verl.verl_trainer"]


def test_the_installed_version_is_a_checked_one():
    import verl

    assert require_loop("verl") == verl.__version__


def test_the_entry_point_brings_our_trainer_and_costs_nothing_before_verls_own_is_imported():
    code = "import verl, sys; assert 'medusa_ppo.loops.verl' in sys.modules; "
    code += "assert 'medusa_ppo.loops.verl.verl_trainer' not in sys.modules; "
    code += "from verl.trainer.ppo.v1 import get_trainer_cls; t = get_trainer_cls('medusa_sync'); "
    code += (
        "assert issubclass(t, get_trainer_cls('sync')) and t.__module__ =="
        " 'medusa_ppo.loops.verl.verl_trainer'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_drivers_variables_reach_verls_processes_but_tokens_do_not() -> None:
    """Where Ray runs already, its driver was the only process to have them: nothing was tapped or
    fed. verl prints what it gives to Ray, and Ray logs it: no token may be in there.
    """
    from verl.trainer import main_ppo

    position(
        source(main_ppo.run_ppo),
        "default_runtime_env = get_ppo_ray_runtime_env(config)",
        "OmegaConf.merge(default_runtime_env, runtime_env_kwargs)",
        'print(f"ray init kwargs: {ray_init_kwargs}")',
        "ray.init(**",
    )
    given = {COMPANION: "http://node:8461", FEED: "http://node:8460"}
    secrets = {COMPANION_TOKEN: "a secret", FEED_TOKEN: "another secret"}
    code = "import json; from verl.trainer.main_ppo import get_ppo_ray_runtime_env as f; "
    code += "print(json.dumps(f()))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | given | secrets,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])["env_vars"]
    assert {name: value for name, value in found.items() if name.startswith("MEDUSA")} == given
    assert found["VERL_FULL_DETERMINISM"] == "0", "verl's own are there too"
    assert "secret" not in done.stdout


def test_the_trainers_hooks_are_called_in_the_order_that_we_need(ours: Any):
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer
    from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

    assert parameters(PPOTrainer.__init__) == ["self", "config"]
    assert parameters(PPOTrainer.fit) == ["self", "agent_loop_manager"]
    assert parameters(PPOTrainer._compute_old_log_prob) == ["self", "batch", "metrics"]
    assert parameters(PPOTrainer._consume_sync_metrics) == ["self"]
    assert (
        parameters(PPOTrainerSync.on_step_end) == parameters(PPOTrainerSync.on_init_end) == ["self"]
    )
    position(
        source(PPOTrainer._step_once),
        "self._compute_old_log_prob(",
        "self._compute_advantage(",
        "self._update_actor(",
    )
    position(
        source(PPOTrainer.fit),
        "self.on_step_begin()",
        "self.step(metrics",
        "self.on_step_end()",
        "metrics.update(self._consume_sync_metrics())",
        "self.logger.log(data=metrics",
    )
    # Both validations end with our hook, and the rollouts of a step come after it.
    assert parameters(PPOTrainerSync.on_validate_end) == ["self"]
    text = source(PPOTrainer.fit)
    assert text.count("self._validate()") == text.count("self.on_validate_end()") == 2
    position(text, "self._validate()", "self.on_validate_end()", "self.step(metrics")
    position(text[text.index("self.on_step_end()") :], "self._validate()", "self.on_validate_end()")
    position(source(PPOTrainer.init), "self._setup()", "self.on_init_end()")
    assert "self.checkpoint_manager.update_weights(self.global_steps)" in source(
        PPOTrainerSync.on_step_end
    )
    assert "self.actor_rollout_wg.compute_log_prob(batch)" in source(
        PPOTrainer._compute_old_log_prob
    )
    setup = source(PPOTrainer._setup)
    position(
        setup,
        "self._init_resource_pool_mgr()",
        "cls=self.role_worker_mapping[actor_role]",
        "LLMServerManager.create(",
        "sleep_replicas()",
    )
    assert "role=str(actor_role)" in setup and "self.role_worker_mapping = {}" in source(
        PPOTrainer._init_resource_pool_mgr
    )
    assert 'self.trainer_mode == "sync"' in inspect.getsource(sys.modules[PPOTrainer.__module__])
    from verl.trainer.ppo.utils import Role

    assert {str(Role.ActorRollout), str(Role.ActorRolloutRef)} < set(ours.ACTOR_ROLES)


def test_a_step_that_warms_up_the_critic_is_reported_like_others(ours: Any) -> None:
    """verl updates no actor in it. Nothing of it was written, and the first update's line had the
    sums of all such steps.
    """
    trainer = object.__new__(ours.MedusaPPOTrainerSync)
    told: list[Any] = []
    trainer.timing_raw, trainer.global_steps = {}, 3
    trainer.checkpoint_manager = SimpleNamespace(update_weights=lambda step: told.append("sync"))
    trainer.config = OmegaConf.create({"actor_rollout_ref": {"rollout": {"free_cache_engine": 1}}})
    trainer.medusa = SimpleNamespace(
        updated=told.append,
        synced=lambda *, lost_heads: told.append(lost_heads),
        figures=lambda: {"medusa/drafts": len(told)},
    )
    trainer._pending_sync_metrics = {"theirs": 1.0}
    # What `fit` does after a step.
    trainer.on_step_end()
    assert told == ["sync", 3, True]
    assert trainer._consume_sync_metrics() == {"theirs": 1.0, "medusa/drafts": 3}


def test_a_validation_is_forgotten(ours: Any) -> None:
    trainer = object.__new__(ours.MedusaPPOTrainerSync)
    forgotten: list[bool] = []
    trainer.medusa = SimpleNamespace(forget_generated=lambda: forgotten.append(True))
    trainer.on_validate_end()
    assert forgotten == [True]


def test_without_heads_the_trainer_is_verls_own(ours: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Theirs:
        def __init__(self, config: Any) -> None:
            self.config = config

    monkeypatch.setattr(ours, "PPOTrainerSync", Theirs)
    off = {"companion": {"enabled": False}, "engine": {"num_drafts": 0}}
    config = verl_config(medusa=off)
    config.trainer.v1.trainer_mode = "medusa_sync"
    trainer = ours.MedusaPPOTrainerSync(config)
    assert type(trainer) is Theirs and trainer.config.trainer.v1.trainer_mode == "sync"


def test_the_worker_has_what_we_tap(ours: Any):
    from verl.single_controller.base.decorator import MAGIC_ATTR, Dispatch, Execute
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngine, FSDPEngineWithLMHead
    from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

    assert parameters(ActorRolloutRefWorker.compute_log_prob) == ["self", "data"]
    assert "self.actor.infer_batch(data)" in source(ActorRolloutRefWorker.compute_log_prob)
    assert "self.actor = self.actor_worker_cls(" in source(ActorRolloutRefWorker.init_model)
    assert "self.engine" in source(TrainingWorker.__init__) and "self.module" in source(FSDPEngine)
    assert "self.module(" in source(FSDPEngineWithLMHead.forward_step)
    assert isinstance(FSDPEngine.is_param_offload_enabled, property)
    assert parameters(FSDPEngine.to) == ["self", "device", "model", "optimizer", "grad"]
    assert 'micro_batch["input_ids"]' in source(FSDPEngineWithLMHead.prepare_model_inputs)
    old, new = (
        getattr(c.compute_log_prob, MAGIC_ATTR)
        for c in (ActorRolloutRefWorker, ours.MedusaActorRolloutRefWorker)
    )
    assert old["execute_mode"] == new["execute_mode"] and old["blocking"] == new["blocking"]
    for method in (
        ours.MedusaActorRolloutRefWorker.medusa_take,
        ours.MedusaActorRolloutRefWorker.medusa_tables,
    ):
        asked = getattr(
            method, MAGIC_ATTR
        )  # Of all ranks: the one that reports is not always the first.
        assert (asked["dispatch_mode"], asked["execute_mode"]) == (Dispatch.ONE_TO_ALL, Execute.ALL)
    assert "return torch.distributed.get_rank()" in source(FSDPEngine.get_data_parallel_rank)


def test_a_tapped_worker_is_called_as_verls_own(ours: Any) -> None:
    from verl.single_controller.base.decorator import MAGIC_ATTR
    from verl.workers.engine_workers import ActorRolloutRefWorker

    from medusa_ppo.loops.verl.verl_tap import tap_worker

    class Worker(ActorRolloutRefWorker):  # type: ignore[misc]
        """Tapped in the place of verl's own."""

    tap_worker(Worker)
    for method in ("compute_log_prob", "update_actor"):
        pair = [getattr(kind, method) for kind in (ActorRolloutRefWorker, Worker)]
        assert pair[0] is not pair[1] and parameters(pair[1]) == ["self", "data"]
        theirs, tapped = (getattr(found, MAGIC_ATTR) for found in pair)
        assert theirs.keys() == tapped.keys()
        for name in ("execute_mode", "blocking"):
            assert theirs[name] == tapped[name]
        # A mode is a pair of functions for a mesh, made anew for each method.
        for part in ("dispatch_fn", "collect_fn"):
            found = [attributes["dispatch_mode"][part] for attributes in (theirs, tapped)]
            assert found[0].func is found[1].func and found[0].args == found[1].args == ("actor",)


@pytest.mark.parametrize("cuts", [False, True])
def test_its_log_probs_are_sent_unless_it_samples_from_some_tokens(ours: Any, cuts: bool) -> None:
    """verl's pass knows nothing of top-p and top-k: its log-probs are over all tokens."""
    from verl.workers.engine_workers import ActorRolloutRefWorker

    from medusa_ppo.loops.verl.verl_tap import tap_worker

    class Worker(ActorRolloutRefWorker):  # type: ignore[misc]
        def compute_log_prob(self, data: Any) -> Any:
            return {"log_probs": -data["input_ids"].float()}

    told: list[Any] = []

    class NotedTap:
        def __init__(self) -> None:
            self.cuts = cuts

        def __call__(self, *rows: Any) -> Any:
            told.extend(rows)
            return contextlib.nullcontext()

    tap_worker(Worker)
    worker = object.__new__(Worker)
    worker.config = verl_config().actor_rollout_ref
    worker.actor = SimpleNamespace(engine=SimpleNamespace(module=None))
    worker._medusa_tap = NotedTap()
    data = {"input_ids": nested([[5, 6, 1, 2], [8, 1]]), "response_mask": nested([[1, 1], [1]])}
    worker.compute_log_prob(data)
    prompts, answers, logprobs = told
    assert (prompts, answers) == ([[5, 6], [8]], [[1, 2], [1]])
    # Shifted left by one, as verl's are.
    expected = None if cuts else [[-6.0, -1.0], [-8.0]]
    assert (logprobs and [values.tolist() for values in logprobs]) == expected


def test_a_tap_refuses_what_it_cannot_read_by_name(ours: Any) -> None:
    from medusa_ppo.loops.verl.verl_tap import _tap_of

    worker = SimpleNamespace(config=verl_config(True).actor_rollout_ref)
    with pytest.raises(ConfigError, match=r"strategy=megatron \(not fsdp or fsdp2\)"):
        _tap_of(worker)


def test_one_companion_at_a_time(ours: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(COMPANION, "http://127.0.0.1:8461")
    (on,) = [name for name, is_on in ours.unsupported(verl_config()).items() if is_on]
    assert on.startswith(COMPANION)
    monkeypatch.delenv(COMPANION)
    # Left exported from an asynchronous run, it would let engines load other heads than ours.
    monkeypatch.setenv(FEED, "http://127.0.0.1:8460")
    (on,) = [name for name, is_on in ours.unsupported(verl_config()).items() if is_on]
    assert on.startswith(FEED)


def test_rows_and_log_probs_of_a_nested_batch(ours: Any):
    data = {
        "input_ids": nested([[5, 6, 1, 2], [7, 3, 9, 4], [8, 1]]),
        "response_mask": nested([[1, 1], [1, 0, 1], [1]]),
    }
    rows, kept = ours.rows_of(data)
    assert rows == [([5, 6], [1, 2]), ([8], [1])] and kept == [
        0,
        2,
    ]  # the middle one holds a tool's token

    from verl.workers.utils.padding import response_from_nested

    shifted = nested([[0.1, 0.2, 0.3, 9], [0.4, 0.5, 0.6, 9], [0.7, 9]], torch.float32)
    theirs = response_from_nested(shifted, data["response_mask"]).unbind()
    for mine, other in zip(
        ours.response_logprobs(shifted, data["response_mask"]), theirs, strict=True
    ):
        assert torch.equal(mine, other)


@torch.no_grad()
@pytest.mark.parametrize("remove_padding", [True, False])
def test_its_own_log_prob_pass_is_tapped(ours: Any, scored: Any, remove_padding: bool):
    """verl's FSDP engine's own preparation of inputs and outputs around the model, without FSDP and
    its devices.
    """
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    from medusa_ppo.contract.rollouts import Sampling
    from medusa_ppo.loops.passes import PassTap

    model, rows, states_MD, logprobs_M = scored
    engine = FSDPEngineWithLMHead.__new__(FSDPEngineWithLMHead)
    engine.pad_to_length = 0
    engine.use_ulysses_sp = False
    engine.module = model

    whole = [[*prompt, *answer] for prompt, answer in rows]
    fields = {
        "input_ids": nested(whole),
        "position_ids": nested([list(range(len(row))) for row in whole]),
        "response_mask": nested([[1] * len(answer) for _, answer in rows]),
        "temperature": torch.ones(len(rows)),
    }
    data = TensorDict(fields, batch_size=[len(rows)])
    tu.assign_non_tensor(
        data, use_remove_padding=remove_padding, use_fused_kernels=False, calculate_entropy=False
    )

    tap = PassTap(model, Sampling(), 2**20, 2)
    found, kept = ours.rows_of(data)
    with tap.watch(found):
        inputs, arguments = engine.prepare_model_inputs(micro_batch=data)
        raw = engine.module(**inputs, use_cache=False)
        output = engine.prepare_model_outputs(
            output=raw, output_args=arguments, micro_batch=data, logits_processor_func=None
        )
    logprobs = ours.response_logprobs(output["log_probs"], data["response_mask"])
    tap.add_logprobs([logprobs[i] for i in kept])

    batch = tap.take(4)
    assert batch is not None
    torch.testing.assert_close(batch.hidden_MD, states_MD, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(batch.logprobs_M, logprobs_M, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_no_more_states_are_kept_than_the_companion_takes(
    ours: Any, scored: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker kept all 2,400, up to half of `companion.queue_bytes`, for a companion that had
    time for 1,000. verl's own pass is stood in for by one padded row at a time.
    """
    from verl.workers.engine_workers import ActorRolloutRefWorker

    from medusa_ppo.companion.positions import block_rows

    model = scored[0]
    rows = [[5, number, *range(1, 25)] for number in range(100)]

    def score(self: Any, data: Any) -> dict[str, torch.Tensor]:
        for ids_T in data["input_ids"].unbind():
            model(input_ids=ids_T[None])
        return {"log_probs": data["input_ids"].float()}

    monkeypatch.setattr(ActorRolloutRefWorker, "compute_log_prob", score)
    worker = object.__new__(ours.MedusaActorRolloutRefWorker)
    engine = SimpleNamespace(
        module=model, get_data_parallel_rank=lambda: 0, is_param_offload_enabled=False
    )
    worker.actor = SimpleNamespace(engine=engine)
    worker.config = verl_config().actor_rollout_ref
    OmegaConf.update(worker.config, "medusa_bytes", 2**30, force_add=True)
    OmegaConf.update(worker.config, "medusa_ahead", 4, force_add=True)
    monkeypatch.setattr(ours.MedusaActorRolloutRefWorker, "rank", 0, raising=False)
    data = {"input_ids": nested(rows), "response_mask": nested([[1] * 24] * 100)}
    worker.medusa_expect(0)
    worker.compute_log_prob(data)
    assert "_medusa" not in vars(worker), "the companion rests"
    worker.medusa_expect(1000)
    worker.compute_log_prob(data)
    batch = worker.medusa_take(0, None).batch
    assert 500 <= len(batch.hidden_MD) <= 1000 + block_rows(1000, 4)
    assert len(batch.hidden_MD) + batch.left_out == 2400


def verl_config(megatron: bool = False, **changes: Any) -> Any:
    """verl's own default configuration, with the actor's folder and our line."""
    import verl

    folder = Path(verl.__file__).parent / "trainer" / "config"
    config = OmegaConf.load(
        folder / f"_generated_ppo_{'megatron_' if megatron else ''}trainer.yaml"
    )
    OmegaConf.update(config, "actor_rollout_ref.rollout.name", "vllm")
    for key, value in changes.items():
        OmegaConf.update(config, key.replace("__", "."), value, force_add=True)
    OmegaConf.set_struct(config, True)
    return config


@pytest.mark.parametrize("megatron", [False, True], ids=["fsdp", "megatron"])
def test_verls_default_configuration_is_supported_and_gets_our_arguments(
    ours: Any, megatron: bool, small_actor: Path, tmp_path: Path
):
    from medusa_ppo.loops.remote import RemoteAttachment

    config = verl_config(
        megatron, actor_rollout_ref__rollout__engine_kwargs={"vllm": {"swap_space": 1}}
    )
    assert not any(ours.unsupported(config).values()), ours.unsupported(config)
    attachment = RemoteAttachment(
        build_config({"heads": {"num_heads": 3}}), str(small_actor), tmp_path
    )
    ours.configure(config, attachment)

    kwargs = config.actor_rollout_ref.rollout.engine_kwargs.vllm
    assert kwargs.swap_space == 1 and kwargs.worker_extension_cls == ours.WORKER_EXTENSION
    assert (
        kwargs.speculative_config.method == "medusa"
        and kwargs.speculative_config.num_speculative_tokens == 3
    )
    assert kwargs.disable_log_stats is False


@pytest.mark.parametrize(
    "change",
    [
        {"actor_rollout_ref__rollout__name": "sglang"},
        {"actor_rollout_ref__actor__strategy": "torchtitan"},
        {"actor_rollout_ref__actor__ulysses_sequence_parallel_size": 2},
        {"actor_rollout_ref__model__lora_rank": 8},
        {"actor_rollout_ref__model__lora_adapter_path": "adapter"},
        {"actor_rollout_ref__model__lora__rank": 8, "megatron": True},
        {"actor_rollout_ref__model__use_fused_kernels": True, "megatron": True},
        {"actor_rollout_ref__actor__megatron__dynamic_context_parallel": True, "megatron": True},
        {"actor_rollout_ref__actor__megatron__use_megatron_fsdp": True, "megatron": True},
        {"actor_rollout_ref__rollout__data_parallel_size": 2},
        {"algorithm__rollout_correction__bypass_mode": True},
        {
            "actor_rollout_ref__rollout__tensor_model_parallel_size": 2,
            "trainer__n_gpus_per_node": 1,
        },
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_the_heads_cannot_be_combined_with_is_refused_by_name(
    ours: Any, change: dict[str, Any]
):
    config = verl_config(medusa={"heads": {"num_heads": 2}}, **change)
    config.trainer.v1.trainer_mode = "medusa_sync"
    with pytest.raises(ConfigError, match="settings of verl") as error:
        ours.MedusaPPOTrainerSync(config)
    assert next(iter(change)).split("__")[-1] in str(error.value)


@pytest.mark.parametrize("alone", [True, False])
def test_engines_of_another_node_are_told_where_to_find_heads(
    alone: bool, ours: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One node with GPUs, and Ray's head without: heads were in the head's own /dev/shm."""

    class Made(Exception):
        pass

    def make(*args: Any, several_nodes: bool) -> None:
        raise Made(several_nodes)

    monkeypatch.setattr(ours, "on_one_node", lambda: alone)
    monkeypatch.setattr(ours, "RemoteAttachment", make)
    config = verl_config(medusa={"heads": {"num_heads": 2}}, trainer__nnodes=1)
    config.trainer.v1.trainer_mode = "medusa_sync"
    with pytest.raises(Made) as made:
        ours.MedusaPPOTrainerSync(config)
    assert made.value.args == (not alone,)


def test_engine_arguments_are_spread_last_and_become_flags():
    from verl.workers.rollout.vllm_rollout.utils import build_cli_args_from_config
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

    launch = source(vLLMHttpServer.launch_server)
    position(
        launch,
        '"worker_extension_cls": self._get_worker_extension_cls()',
        "**engine_kwargs",
        "build_cli_args_from_config(args)",
    )
    flags = build_cli_args_from_config(
        {"speculative_config": {"method": "medusa"}, "disable_log_stats": False}
    )
    assert flags == ["--speculative_config", '{"method": "medusa"}']


def test_the_server_and_its_replica_are_where_we_replace_them(ours: Any):
    from verl.workers.rollout import llm_server
    from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica

    from medusa_ppo.loops.verl.verl_server import MedusaHttpServer, MedusaReplica

    assert "self.server_class = ray.remote(vLLMHttpServer)" in source(vLLMReplica.__init__)
    assert "self.server_class.options(" in source(vLLMReplica.launch_servers)
    assert "return" not in source(vLLMHttpServer.collective_rpc), (
        "verl gives answers back now: MedusaHttpServer.medusa_call can go"
    )
    assert "self.servers" in source(
        RolloutReplica.__init__
    ) and "get_rollout_replica_class(" in inspect.getsource(llm_server)
    assert not hasattr(vLLMHttpServer, "medusa_call") and issubclass(
        MedusaHttpServer, vLLMHttpServer
    )
    before = RolloutReplicaRegistry._registry["vllm"]
    RolloutReplicaRegistry.register("vllm", ours._load_replica)
    try:
        assert RolloutReplicaRegistry.get("vllm") is MedusaReplica
    finally:
        RolloutReplicaRegistry.register("vllm", before)


def test_sleep_discards_the_heads_and_the_sync_passes_over_them():
    from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

    assert source(vLLMHttpServer._resolve_sleep_level).rstrip().endswith("return 2")
    assert 'method == "mtp"' in source(vLLMColocateWorkerExtension._use_mtp_drafter_weight_sync)


def extension_methods() -> tuple[set[str], set[str]]:
    from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

    from medusa_ppo.vllm_plugin.worker_extension import MedusaWorker

    def own(kind: type) -> set[str]:
        return {name for name in vars(kind) if not name.startswith("__")}

    return own(MedusaWorker), own(vLLMColocateWorkerExtension)


def test_the_two_worker_extensions_do_not_meet():
    mine, theirs = extension_methods()
    assert not mine & theirs


@pytest.mark.engine
def test_our_worker_runs_in_vllm_and_the_heads_come_back_after_the_engine_lost_them(
    small_actor: Path, tmp_path: Path
):
    """A minimal driver in the place of verl's server, which needs CUDA: the same calls in the order
    of on_init_end and on_step_end.
    """
    from vllm import LLM, SamplingParams

    from medusa_ppo.engines.colocated import process_counters
    from medusa_ppo.loops.remote import RemoteAttachment
    from medusa_ppo.loops.verl.verl_trainer import WORKER_EXTENSION

    attachment = RemoteAttachment(
        build_config({"heads": {"num_heads": 2}}), str(small_actor), tmp_path
    )
    llm = LLM(
        model=str(small_actor),
        max_model_len=64,
        max_num_seqs=8,
        enforce_eager=True,
        kv_cache_memory_bytes=64 * 1024**2,
        skip_tokenizer_init=True,
        **attachment.arguments(WORKER_EXTENSION),
    )
    llm.collective_rpc(
        "monkey_patch_model", kwargs={"vocab_size": 423}
    )  # verl's own method, which its server calls after the start; it forbids a few tokens
    attachment.attach(lambda method, args: llm.collective_rpc(method, args=args), process_counters)
    engine = attachment.engine
    assert engine is not None

    def drafts() -> list[list[int]]:
        hidden = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).tolist()
        return llm.collective_rpc("medusa_probe", args=(hidden, [1, 2, 3]))[0]["drafts"]

    torch.manual_seed(0)
    state = {
        name: 0.1 * torch.randn_like(value)
        for name, value in load_state(attachment._kept_state).items()
    }
    save_state(tmp_path / "new.safetensors", state)
    receipt = engine.swap_heads(tmp_path / "new.safetensors", 1)
    assert receipt.checksum == checksum(state)
    fed = drafts()

    drafter = llm.llm_engine.model_executor.driver_worker.worker.model_runner.drafter
    for (
        parameter
    ) in drafter.heads.parameters():  # what level-2 sleep does to weights that no sync restores
        parameter.data.fill_(7.0)
    assert engine.checksums()["heads"] == "", "the engine sees that they are gone"
    attachment.weights_synced(lost_heads=True)
    assert engine.checksums()["heads"] == receipt.checksum and drafts() == fed

    prompts = [{"prompt_token_ids": [5, 6, 7]}] * 4
    outputs = llm.generate(
        prompts,
        SamplingParams(temperature=1.0, max_tokens=16, ignore_eos=True, detokenize=False),
        use_tqdm=False,
    )
    assert all(len(output.outputs[0].token_ids) == 16 for output in outputs)
    assert process_counters().drafts > 0
    llm.llm_engine.engine_core.shutdown()
