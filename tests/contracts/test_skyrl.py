"""Contract with SkyRL: everything that medusa_ppo/loops/skyrl.py relies on, in the installed
package; and its FSDP policy worker's own update, tapped, on a CPU.

In the place of CUDA: `flash_attn` is empty modules (imported at the top, never called),
`torch.cuda.current_device` is the CPU, its process group is gloo's, and the model is not cut by
FSDP, which one process has no use for.
"""

from __future__ import annotations

import inspect
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import typing_extensions

# First: what follows would stay for the other tests of this process.
pytest.importorskip("skyrl", reason="SkyRL has an environment of its own: make test-contracts")

for name, attributes in (
    ("flash_attn", ()),
    ("flash_attn.bert_padding", ("pad_input", "unpad_input")),
):
    if name not in sys.modules:
        module = types.ModuleType(name)
        module.__spec__ = types.SimpleNamespace(name=name, origin=None)  # type: ignore[assignment]
        for attribute in attributes:
            setattr(module, attribute, None)
        sys.modules[name] = module
if sys.version_info < (3, 12):
    # SkyRL asks for Python 3.12; before that, pydantic accepts only this class.
    typing.TypedDict = typing_extensions.TypedDict  # type: ignore[misc, assignment]

from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from heads.errors import ConfigError  # noqa: E402
from medusa_ppo.companion.companion_link import COMPANION_TOKEN  # noqa: E402
from medusa_ppo.engines.http_server import free_port  # noqa: E402
from medusa_ppo.loops import skyrl as ours  # noqa: E402
from medusa_ppo.loops.loop_versions import CHECKED, require_loop  # noqa: E402
from medusa_ppo.loops.remote import refuse  # noqa: E402
from medusa_ppo.loops.worker_tap import COMPANION  # noqa: E402
from tests.contracts.sources import source  # noqa: E402
from tests.medusa_ppo.loops.served_desk import served_desk  # noqa: E402

SPECULATION = "generator.inference_engine.engine_init_kwargs.speculative_config"
GIVEN = [
    f"{SPECULATION}.method=medusa",
    f"{SPECULATION}.model=heads",
    f"{SPECULATION}.num_speculative_tokens=3",
]


def config(*words: str) -> Any:
    from skyrl.train.config import SkyRLTrainConfig

    return SkyRLTrainConfig.from_cli_overrides([*GIVEN, *words])


def test_the_installed_version_is_a_checked_one() -> None:
    assert require_loop("skyrl").startswith(CHECKED["skyrl"][-1])


def test_its_command_calls_ours_and_imports_the_worker_when_it_sets_the_trainer_up() -> None:
    from skyrl.train.entrypoints import main_base

    assert "import_module(override_entrypoint).main()" in source(main_base.main)
    assert f'startswith("{ours.OVERRIDE}")' in source(main_base.main)
    setup = source(main_base.BasePPOExp._setup_trainer)
    assert "from skyrl.backends.skyrl_train.workers.fsdp.fsdp_worker import (" in setup
    assert "trainer.build_models(PolicyWorker, CriticWorker, RefWorker)" in setup


def test_both_calls_reach_the_worker_by_their_names() -> None:
    from skyrl.backends.skyrl_train.workers import worker_dispatch

    text = inspect.getsource(worker_dispatch.WorkerDispatch)
    assert '"forward_backward"' in text and '"pass_through", "optim_step"' in text


def test_our_environment_reaches_its_processes() -> None:
    from skyrl.train.utils import utils

    assert "env_vars = prepare_runtime_environment(cfg)" in source(utils.initialize_ray)
    assert '"env_vars": env_vars' in source(utils.initialize_ray)


def test_tokens_do_not_go_through_rays_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray logs the variables of a `runtime_env`; it does not log the arguments of a call."""
    from skyrl.train.utils import utils

    given: dict[str, str] = {}
    handed: list[Any] = []
    monkeypatch.setattr(utils, "validate_cfg", lambda cfg: None)
    monkeypatch.setattr(utils, "prepare_runtime_environment", lambda cfg: {"THEIRS": "1"})
    monkeypatch.setattr(
        utils, "initialize_ray", lambda cfg: given.update(utils.prepare_runtime_environment(cfg))
    )
    run = SimpleNamespace(remote=lambda cfg, secrets: handed.append(secrets))
    ray_double = SimpleNamespace(get=lambda found: found, remote=lambda **_: lambda function: run)
    monkeypatch.setattr(ours, "ray", ray_double)
    monkeypatch.setattr(sys, "argv", ["main_base", f"{ours.OVERRIDE}medusa_ppo.loops.skyrl"])
    monkeypatch.setenv(COMPANION, "http://node:8461")
    monkeypatch.setenv(COMPANION_TOKEN, "a secret of this test")
    ours.main()
    assert given == {"THEIRS": "1", COMPANION: "http://node:8461"}
    assert handed == [{COMPANION_TOKEN: "a secret of this test"}]


def test_the_sampling_of_its_rollouts_reaches_the_tap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its workers get `cfg.trainer` alone, and its rollouts the generator's own parameters."""
    from skyrl.backends.skyrl_train.workers.fsdp import fsdp_worker
    from skyrl.train.entrypoints import main_base

    cfg = config("generator.sampling_params.top_p=0.9", "generator.sampling_params.top_k=20")
    made: list[Any] = []
    ray_double = SimpleNamespace(remote=lambda **_: lambda kind: made.append(kind) or kind)
    monkeypatch.setattr(ours, "ray", ray_double)
    experiment = SimpleNamespace(run=lambda: made.append(fsdp_worker.PolicyWorker))
    monkeypatch.setattr(main_base, "BasePPOExp", lambda cfg: experiment)
    ours._run(cfg, {COMPANION_TOKEN: "a secret of this test"})
    kind, running = made
    assert running is kind and kind._medusa_sampling == {"top_p": 0.9, "top_k": 20}
    assert kind._medusa_secrets == {COMPANION_TOKEN: "a secret of this test"}


def test_heads_are_an_argument_of_its_engines_and_its_own_key_refuses_them() -> None:
    from skyrl.backends.skyrl_train.inference_servers import utils as servers
    from skyrl.train.utils import utils

    cfg = config()
    refuse("SkyRL", ours.unsupported(cfg))
    text = source(servers.build_vllm_cli_args)
    own, kwargs = (
        text.index("args.speculative_config = spec_cfg"),
        text.index("engine_kwargs.items()"),
    )
    assert own < kwargs and "setattr(args, key, value)" in text[kwargs:]
    assert dict(cfg.generator.inference_engine.engine_init_kwargs)["speculative_config"] == {
        "method": "medusa",
        "model": "heads",
        "num_speculative_tokens": 3,
    }
    assert "medusa" not in utils.SUPPORTED_SPECULATIVE_DECODING_METHODS


@pytest.mark.parametrize(
    "change",
    [
        "trainer.strategy=megatron",
        "trainer.policy.sequence_parallel_size=2",
        "trainer.policy.model.lora.rank=8",
        "generator.inference_engine.speculative_config.method=mtp",
    ],
)
def test_what_the_heads_cannot_be_combined_with_is_refused_by_name(change: str) -> None:
    with pytest.raises(ConfigError) as error:
        refuse("SkyRL", ours.unsupported(config(change)))
    assert change.split("=")[0].removesuffix(".method") in str(error.value)


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A gloo group of this process alone, and SkyRL's mesh in it."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1
    )
    yield init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "sp"))
    dist.destroy_process_group()


def test_its_own_update_is_tapped(
    small_actor: Path,
    one_process: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SkyRL's collation of rollouts, its worker's `forward_backward` with its loss, and its
    `optim_step`: the rows that come are those that were sampled, with the states of that pass.
    """
    from skyrl.backends.skyrl_train.distributed.fsdp_strategy import FSDPStrategy
    from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
    from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry
    from skyrl.backends.skyrl_train.workers.fsdp.fsdp_worker import FSDPPolicyWorkerBase
    from skyrl.backends.skyrl_train.workers.model_wrapper import HFModelWrapper

    cfg = config(
        "trainer.micro_train_batch_size_per_gpu=2",
        "trainer.flash_attn=false",
        "trainer.remove_microbatch_padding=false",
        "trainer.algorithm.use_kl_loss=false",
    )
    model = AutoModelForCausalLM.from_pretrained(small_actor, dtype=torch.float32)
    worker = ours.tapped(FSDPPolicyWorkerBase).__new__(ours.tapped(FSDPPolicyWorkerBase))
    worker.cfg = cfg.trainer
    worker.cfg.algorithm.temperature = 1.0
    worker.model = HFModelWrapper(model, use_flash_attention_2=False)
    worker.optimizer = torch.optim.SGD(model.parameters(), 0.1)
    worker.scheduler = torch.optim.lr_scheduler.ConstantLR(worker.optimizer, 1.0)
    worker.strategy = FSDPStrategy(
        cfg.trainer.policy.fsdp_config, cfg.trainer.policy.optimizer_config
    )
    worker.strategy.world_size = 1
    worker.device_mesh = one_process
    worker.mesh_rank = SimpleNamespace(dp_size=1)
    worker.policy_loss_fn = PolicyLossRegistry.get(cfg.trainer.algorithm.policy_loss_type)

    rows = [([5, 6], [1, 2, 3]), ([7, 8, 9], [4]), ([5], [6, 7])]
    batch = collated(rows)
    data = TrainingInputBatch(batch)
    data.metadata = {"response_length": 3}
    before = model.lm_head.weight.detach().clone()
    with torch.no_grad():
        states = [
            model.base_model(torch.tensor([[*prompt, *answer]])).last_hidden_state[0][
                len(prompt) - 1 : -1
            ]
            for prompt, answer in rows
        ]
    monkeypatch.setenv(COMPANION_TOKEN, "a secret of this test")
    with served_desk(small_actor, tmp_path) as served:
        monkeypatch.setenv(COMPANION, served.address)
        for step in range(2):
            worker.forward_backward(data)
            worker.optim_step()
            tap = worker._medusa_tap
            assert tap.drain(30) and not tap.problem and tap.sent == step + 1
        tap.close()
    first, second = served.seen
    assert first.response_ids_M.tolist() == second.response_ids_M.tolist() == [1, 2, 3, 4, 6, 7]
    assert (first.policy_version, second.policy_version) == (0, 1)
    torch.testing.assert_close(first.hidden_MD.float(), torch.cat(states))
    assert not torch.equal(model.lm_head.weight, before), "the actor was updated"
    assert not torch.equal(first.hidden_MD, second.hidden_MD)


def collated(rows: list[tuple[list[int], list[int]]]) -> dict[str, torch.Tensor]:
    """As SkyRL's `convert_prompts_responses_to_batch_tensors` makes them: all end together."""
    from skyrl.train.dataset import preprocess

    width = max(len(prompt) + len(answer) for prompt, answer in rows)
    most = max(len(answer) for _, answer in rows)
    batch = {
        "sequences": torch.zeros(len(rows), width, dtype=torch.int64),
        "attention_mask": torch.zeros(len(rows), width, dtype=torch.int64),
        "response_mask": torch.zeros(len(rows), most, dtype=torch.int64),
    }
    for row, (prompt, answer) in enumerate(rows):
        whole = [*prompt, *answer]
        batch["sequences"][row, width - len(whole) :] = torch.tensor(whole)
        batch["attention_mask"][row, width - len(whole) :] = 1
        batch["response_mask"][row, most - len(answer) :] = 1
    batch["loss_mask"] = batch["response_mask"].float()
    ones = torch.ones(len(rows), most)
    batch |= {"action_log_probs": -ones, "advantages": ones * batch["loss_mask"]}
    assert "right-aligned" in inspect.getsource(preprocess)
    return batch
