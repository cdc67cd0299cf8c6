"""Contract with OpenRLHF: everything that medusa_ppo/loops/openrlhf.py relies on, in the installed
package; its vLLM actor is run.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

pytest.importorskip(
    "openrlhf", reason="OpenRLHF has an environment of its own: make test-contracts"
)

from heads.checkpoint import checksum, load_state, save_heads, save_state
from heads.errors import ConfigError
from medusa_ppo.actors.hf import load_actor
from medusa_ppo.companion.positions import block_rows
from medusa_ppo.companion.wire import WantedRows
from medusa_ppo.config.run_config import build_config
from medusa_ppo.feeds.http_feed import FEED_TOKEN
from medusa_ppo.loops import openrlhf as ours
from medusa_ppo.loops.loop_versions import CHECKED, require_loop
from medusa_ppo.loops.remote import RemoteAttachment
from medusa_ppo.loops.worker_tap import COMPANION, masked_rows
from medusa_ppo.plugin.medusa_plugin import heads_for_table
from medusa_ppo.vllm_plugin.speculation import FEED
from tests.contracts.sources import position, source


def parameters(function: Callable[..., Any]) -> list[str]:
    return [
        name for name in inspect.signature(function).parameters if not name.startswith("_ray")
    ]  # Ray adds one to its actors' methods


def test_the_installed_version_is_a_checked_one():
    assert require_loop("openrlhf").startswith(CHECKED["openrlhf"][-1])


def test_the_command_imports_the_names_that_we_replace_and_runs_as_main():
    from openrlhf.cli import train_ppo_ray

    text = inspect.getsource(train_ppo_ray)
    for line in (
        "from openrlhf.trainer.ray import create_vllm_engines",
        "from openrlhf.trainer.ray.ppo_actor import PolicyModelActor",
        "from openrlhf.utils import get_strategy",
        "from openrlhf.trainer.ppo_trainer import PPOTrainer",
        'if __name__ == "__main__":',
    ):
        assert line in text, line
    position(
        text,
        "strategy = get_strategy(args)",
        "vllm_engines = create_vllm_engines(",
        "PPOTrainer.remote(",
        "ppo_trainer.fit.remote()",
    )
    for flag in (
        "ckpt.output_dir",
        "rollout.temperature",
        "rollout.top_p",
        "ds.zero_stage",
        "ds.tensor_parallel_size",
        "ds.ring_attn_size",
    ):
        assert f'"--{flag}"' in text, flag
    position(
        text,
        "args.vllm.num_engines,",
        "args.vllm.tensor_parallel_size,",
        "args.actor.model_name_or_path,",
    )


def test_engines_are_made_from_a_name_in_their_module_and_arguments_reach_vllm():
    from openrlhf.trainer.ray import vllm_engine

    make = source(vllm_engine.create_vllm_engines)
    assert parameters(vllm_engine.create_vllm_engines)[:3] == [
        "num_engines",
        "tensor_parallel_size",
        "pretrain",
    ]
    position(make, "RolloutRayActor.options(", ".remote(**actor_kwargs)")
    actor = ours.plain_class(vllm_engine.RolloutRayActor)
    assert "vllm.AsyncEngineArgs(*args, **self.kwargs)" in source(
        actor.__init__
    ) and "self.llm = " in source(actor.__init__)
    assert inspect.iscoroutinefunction(actor.__init__)
    assert not hasattr(actor, "medusa_call")


def test_the_actor_worker_has_what_we_tap():
    from openrlhf.models.actor import Actor
    from openrlhf.trainer.ray import ppo_actor

    worker = ours.plain_class(ppo_actor.PolicyModelActor)
    assert parameters(worker.forward) == [
        "self",
        "sequences",
        "action_mask",
        "attention_mask",
        "packed_seq_lens",
        "mm_train_inputs_list",
    ]
    assert "self.actor.model" in source(worker) and "self.strategy" in source(worker.forward)
    assert (
        "self.model(sequences, attention_mask=foward_attention_mask, position_ids=position_ids"
        in source(Actor.forward)
    )
    assert "log_probs[:, -action_mask.shape[1] :] * action_mask" in source(Actor.forward)
    assert "model = self.actor.model.module" in source(ppo_actor.ActorPPOTrainer.broadcast_to_vllm)
    assert "self.strategy.args.ds.zero_stage == 3" in source(
        ppo_actor.ActorPPOTrainer.broadcast_to_vllm
    )


def test_the_trainers_hooks_are_called_in_the_order_that_we_need():
    from openrlhf.trainer import ppo_trainer
    from openrlhf.trainer.ppo_utils import experience_maker
    from openrlhf.trainer.ray.launcher import RayActorGroup

    trainer = ours.plain_class(ppo_trainer.PPOTrainer)
    assert parameters(trainer.__init__)[:3] == ["self", "pretrain", "strategy"]
    assert parameters(trainer.fit) == ["self", "global_step"]
    assert parameters(trainer.train_step) == ["self", "rollout_samples", "global_step"]
    assert parameters(trainer.broadcast_to_vllm) == ["self"]
    position(
        source(trainer.train_step),
        "self.experience_maker.make_experience_batch(rollout_samples)",
        "self.ppo_train(",
        "self.broadcast_to_vllm()",
    )
    position(
        source(trainer.broadcast_to_vllm),
        'self.vllm_engines, "wake_up", tags=["weights"]',
        'method_name="broadcast_to_vllm"',
    )
    assert "self.vllm_engines = vllm_engines" in source(ppo_trainer.BasePPOTrainer.__init__)
    assert "self.actor_model_group = actor_model_group" in source(
        ppo_trainer.BasePPOTrainer.__init__
    )
    assert parameters(RayActorGroup.async_run_method) == ["self", "method_name", "args", "kwargs"]
    assert 'method_name="forward"' in inspect.getsource(experience_maker)


def test_an_evaluation_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    from openrlhf.trainer import ppo_trainer

    theirs = ours.plain_class(ppo_trainer.PPOTrainer)
    assert parameters(theirs.evaluate) == ["self", "global_step", "generate_kwargs"]
    position(source(theirs.fit), "self.train_step(", "self.evaluate(global_step, **")
    order: list[Any] = []
    monkeypatch.setattr(
        theirs, "evaluate", lambda self, step, **given: order.append((step, given)) or "logs"
    )
    trainer = object.__new__(ours.plain_class(ours.trainer_actor()))
    trainer.medusa = Namespace(forget_generated=lambda: order.append("forgotten"))
    assert trainer.evaluate(3, temperature=0.0) == "logs"
    assert order == [(3, {"temperature": 0.0}), "forgotten"]


class NotedAttachment:
    """In the place of RemoteAttachment, which starts a companion: what it is told."""

    def __init__(self) -> None:
        self.plugin = Namespace(exposed=contextlib.nullcontext, wanted_rows=lambda: None)
        self.told: list[tuple[str, Any]] = []

    def start(self, version: int = 0) -> None:
        self.told.append(("start", version))

    def updated(self, version: int) -> None:
        self.told.append(("updated", version))

    scoring = RemoteAttachment.scoring

    def scored(self, taken: Any) -> None:
        self.told.append(("scored", taken))

    def generated(self, sampling: Any) -> int:
        return 1000

    def attach(self, call: Any, counters: Any) -> None: ...

    def synced(self, *, lost_heads: bool) -> None: ...

    def figures(self) -> dict[str, float]:
        return {}

    @contextlib.contextmanager
    def training(self) -> Iterator[list[Any]]:
        tables: list[Any] = []
        yield tables
        self.told.append(("end", tables))


@pytest.mark.parametrize("step", [0, 7], ids=["new", "resumed"])
def test_the_actors_versions_go_on_from_a_checkpoint(
    step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenRLHF's own `fit` and `train_step`; what they call on workers and engines is stood in
    for. The first batch after a resume said 1, as did the second one of a new run.
    """
    import ray
    from openrlhf.trainer import ppo_trainer

    theirs = ours.plain_class(ppo_trainer.PPOTrainer)
    states = {"episode": 0, "global_step": step, "total_consumed_prompts": 0}

    def init(self: Any, pretrain: str, strategy: Any) -> None:
        self.args = strategy.args
        self.vllm_engines = []
        self.actor_model_group = Namespace(
            async_run_method=lambda name, *given: given,
            async_run_method_batch=lambda **given: [],
        )
        self.critic_model_group = self.wandb_logger = self.tensorboard_logger = None
        self.eval_dataloader = None
        self.generate_kwargs = {}
        self.tokenizer = Namespace(decode=lambda *_, **__: "text")
        experience = Namespace(sequences=torch.zeros(1, 1, 2), info={"reward": torch.zeros(1, 1)})
        self.experience_maker = Namespace(make_experience_batch=lambda samples: [experience])
        batches = iter([([sample], 1.0, 1, False), ([sample], 1.0, 1, True)])
        self.samples_generator = Namespace(generate_samples=lambda: next(batches))

        class Loader(list[Any]):
            def state_dict(self) -> dict[str, Any]:
                return {}

        self.prompts_dataloader = Loader([0, 1])

    sample = Namespace(action_mask=torch.ones(1, 3))
    monkeypatch.setattr(theirs, "__init__", init)
    for name, found in {
        "init_checkpoint_states": states | {"data_loader_state_dict": {}},
        "restore_best_checkpoint_state": None,
        "save_logs_and_checkpoints": None,
        "_compute_rollout_stats": {},
        "ppo_train": {},
        "broadcast_to_vllm": None,
    }.items():
        monkeypatch.setattr(theirs, name, lambda *_, found=found: found)
    attachment = NotedAttachment()
    monkeypatch.setattr(ours, "RemoteAttachment", lambda *_: attachment)
    monkeypatch.setattr(ours, "call_all", lambda *_: [])
    monkeypatch.setattr(ray, "get", lambda refs: refs)
    args = Namespace(
        medusa=None,
        ckpt=Namespace(output_dir="out"),
        vllm=Namespace(enable_sleep=False),
        rollout=Namespace(temperature=1.0, top_p=1.0, batch_size=1, n_samples_per_prompt=1),
        train=Namespace(num_episodes=1, dynamic_batch_enable=False),
        algo=Namespace(dynamic_filtering_enable=False),
        eval=Namespace(steps=1),
    )
    trainer = ours.plain_class(ours.trainer_actor())("actor", Namespace(args=args))
    trainer.fit()
    resent = [("updated", step)] if step else []
    assert attachment.told == [
        ("start", step),
        *resent,
        ("scored", (step, None)),
        ("updated", step + 1),
        ("scored", (step + 1, None)),
        ("updated", step + 2),
        ("end", []),
    ]


def test_sleep_is_level_one_which_keeps_the_heads():
    from openrlhf.trainer.ray import vllm_engine

    actor = ours.plain_class(vllm_engine.RolloutRayActor)
    assert inspect.signature(actor.sleep).parameters["level"].default == 1


def test_the_replaced_classes_are_made():
    from openrlhf.trainer import ppo_trainer
    from openrlhf.trainer.ray import ppo_actor

    for make, theirs in (
        (ours.policy_actor, ppo_actor.PolicyModelActor),
        (ours.trainer_actor, ppo_trainer.PPOTrainer),
    ):
        assert issubclass(ours.plain_class(make()), ours.plain_class(theirs))


def test_the_drivers_variables_reach_workers_and_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its Ray actors had only what their node had: engines looked at no feed, without a word."""
    from openrlhf.trainer.ray import ppo_actor, vllm_engine

    given = {COMPANION: "http://node:8461", FEED: "http://node:8460", FEED_TOKEN: "a secret"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    engine_class = ours.plain_class(ours.rollout_actor({"max_logprobs": 1}))
    policy_class = ours.plain_class(ours.tapped_policy_actor())
    seen: list[dict[str, str | None]] = []

    def note() -> None:
        seen.append({name: os.environ.get(name) for name in (*given, ours.VLLM_PREFIXES)})

    async def start(self: Any, **kwargs: Any) -> None:
        note()

    class NotedTap:
        cuts = False

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            note()

        def __call__(self, *rows: Any) -> contextlib.AbstractContextManager[None]:
            return contextlib.nullcontext()

        def updated(self) -> None: ...

    def elsewhere() -> None:
        """A process on a node without any of these."""
        for name in given:
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv(ours.VLLM_PREFIXES, "OURS_TOO_")

    monkeypatch.setattr(ours.plain_class(vllm_engine.RolloutRayActor), "__init__", start)
    elsewhere()
    asyncio.run(engine_class.__init__(object.__new__(engine_class)))
    monkeypatch.setattr("medusa_ppo.loops.tap.CompanionTap", NotedTap)
    monkeypatch.setattr(ours.plain_class(ppo_actor.PolicyModelActor), "fit", lambda self, kl: {})
    elsewhere()
    worker = object.__new__(policy_class)
    worker.actor = Namespace(model=None)
    args = Namespace(rollout=Namespace(temperature=1.0, top_p=1.0))
    worker.strategy = Namespace(args=args)
    worker.trainer = Namespace(replay_buffer=Namespace(items=[]))
    worker.fit()
    # vLLM's own Ray workers (tensor parallelism) get them by this prefix.
    assert seen == [given | {ours.VLLM_PREFIXES: "OURS_TOO_,MEDUSA_PPO_"}] * 2


def test_the_two_worker_extensions_do_not_meet():
    from openrlhf.trainer.ray.vllm_worker_wrap import WorkerWrap

    from medusa_ppo.vllm_plugin.worker_extension import MedusaWorker

    assert ours.MedusaOpenRLHFWorker.__mro__[1:3] == (
        MedusaWorker,
        WorkerWrap,
    ) and ours.WORKER_EXTENSION.endswith("MedusaOpenRLHFWorker")
    names = [
        {name for name in vars(kind) if not name.startswith("__")}
        for kind in (MedusaWorker, WorkerWrap)
    ]
    assert not names[0] & names[1]


def test_rows_are_those_of_openrlhfs_own_experiences():
    """Two rows padded as OpenRLHF pads them (right); the second has two stretches of actions and is
    passed over.
    """
    sequences = torch.tensor([[5, 6, 1, 2, 0], [7, 3, 9, 4, 8]])
    attention = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]])
    # `actions[b, i]` belongs to token i + 1 of the row.
    actions = torch.tensor([[0, 1, 1, 0], [1, 0, 1, 1]])
    logprobs_BR = -torch.arange(8.0).view(2, 4)
    prompts, answers, logprobs = masked_rows(sequences, attention, actions, logprobs_BR)
    assert (prompts, answers) == ([[5, 6]], [[1, 2]])
    assert [values.tolist() for values in logprobs or []] == [[-1.0, -2.0]]


class EngineWrapper(torch.nn.Module):
    """In the place of DeepSpeed's engine, which needs a process group: the model is its
    `module`.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


def policy_worker(model: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """OpenRLHF's worker and model classes on the CPU, alone in its group; only the device and
    DeepSpeed's wrapper are stood in for.
    """
    from openrlhf.models.actor import Actor

    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    actor = Actor.__new__(Actor)
    torch.nn.Module.__init__(actor)
    actor.model = EngineWrapper(model)
    actor.packing_samples = False
    actor.temperature = 1.0
    actor.is_vlm = False
    worker_class = ours.plain_class(ours.policy_actor())
    worker = worker_class.__new__(worker_class)
    worker.actor = actor
    args = Namespace(rollout=Namespace(temperature=1.0, top_p=1.0), medusa=build_config({}))
    worker.strategy = Namespace(ring_attn_group=None, get_rank=lambda: 0, args=args)

    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    return worker


@pytest.mark.parametrize(
    "made",
    [
        ours.policy_actor,
        ours.tapped_policy_actor,
        lambda: ours.rollout_actor({}),
        ours.trainer_actor,
    ],
    ids=["policy", "tapped policy", "rollout", "trainer"],
)
def test_ray_can_send_our_classes_to_another_process(made: Callable[[], Any]) -> None:
    assert ray.cloudpickle.dumps(ours.plain_class(made()))


def forward(worker: Any, rows: Any) -> None:
    """One experience each, padded on the right as OpenRLHF does it."""
    for prompt, answer in rows:
        length = len(prompt) + len(answer)
        sequences = torch.zeros(1, length + 2, dtype=torch.int64)
        attention = torch.zeros(1, length + 2, dtype=torch.int64)
        sequences[0, :length] = torch.tensor([*prompt, *answer])
        attention[0, :length] = 1
        actions = torch.zeros(1, length + 1, dtype=torch.int64)
        actions[0, len(prompt) - 1 : length - 1] = 1
        worker.forward(sequences=sequences, action_mask=actions, attention_mask=attention)


@torch.no_grad()
def test_its_own_log_prob_pass_is_tapped(scored: Any, monkeypatch: pytest.MonkeyPatch):
    model, rows, states_MD, logprobs_M = scored
    worker = policy_worker(model, monkeypatch)

    def score() -> None:
        forward(worker, rows)

    wanted = WantedRows(torch.tensor([0, 3]), embedding=True)
    tokens = sum(len(answer) for _, answer in rows)
    worker.medusa_expect(tokens, 0)
    score()
    assert worker.medusa_take(3, wanted) is None  # The companion rests: nothing was tapped.
    worker.medusa_expect(tokens, 1000)
    score()

    taken = worker.medusa_take(4, wanted)
    batch, sent = taken.batch, taken.rows
    assert torch.equal(sent.lm_head_RD, model.lm_head.weight[sent.lm_head_ids_R])
    assert len(sent.lm_head_RD) < len(model.lm_head.weight)
    lm_head_VD, _ = worker.medusa_tables()
    assert torch.equal(lm_head_VD, model.lm_head.weight)
    torch.testing.assert_close(batch.hidden_MD, states_MD, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(batch.logprobs_M, logprobs_M, rtol=1e-4, atol=1e-5)
    assert batch.prompts_S.tolist() == [0, 1, 0] and batch.policy_version == 4


@torch.no_grad()
def test_no_more_states_are_kept_than_the_companion_takes(
    scored: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 kept all 2,400, up to half of `companion.queue_bytes`, for a companion that had time
    for 1,000.
    """
    worker = policy_worker(scored[0], monkeypatch)
    rows = [((5, number), tuple(range(1, 25))) for number in range(100)]
    worker.medusa_expect(2400, 1000)
    forward(worker, rows)
    batch = worker.medusa_take(0, None).batch
    heads = build_config({}).heads.num_heads
    assert 500 <= len(batch.hidden_MD) <= 1000 + block_rows(1000, heads)
    assert len(batch.hidden_MD) + batch.left_out == 2400


def test_the_rows_of_its_replay_buffer_are_those_that_it_trains_on() -> None:
    """Without the padding, as its own `remove_padding_in_sequences` leaves them; a row whose
    actions are interrupted is left out.
    """
    from openrlhf.trainer.ppo_utils.experience import (
        Experience,
        remove_padding_in_sequences,
        split_experience_batch,
    )

    experience = Experience(
        sequences=torch.tensor([[0, 5, 6, 7, 8, 0], [4, 5, 6, 7, 8, 9], [4, 5, 6, 7, 8, 0]]),
        attention_mask=torch.tensor([[0, 1, 1, 1, 1, 0], [1] * 6, [1, 1, 1, 1, 1, 0]]),
        action_mask=torch.tensor([[0, 0, 1, 1, 0], [0, 1, 0, 1, 1], [1, 1, 1, 1, 0]]).bool(),
        action_log_probs=torch.arange(15.0).view(3, 5),
    )
    items = remove_padding_in_sequences(split_experience_batch(experience))
    prompts, responses, logprobs = ours.buffered_rows(items)
    assert prompts == [[5, 6], [4]] and responses == [[7, 8], [5, 6, 7, 8]]
    assert [values.tolist() for values in logprobs] == [[2.0, 3.0], [10.0, 11.0, 12.0, 13.0]]
    for item in items:
        item.action_log_probs = None
    # The same on a rank without a row: all ask each other for their tokens, or none.
    assert ours.buffered_rows(items)[2] is None and ours.buffered_rows(items[1:2])[2] is None


@pytest.mark.parametrize("cuts", [False, True])
def test_its_log_probs_are_sent_unless_it_samples_from_some_tokens(
    cuts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenRLHF's actor knows nothing of top-p: its log-probs are over all tokens."""
    from openrlhf.trainer.ray import ppo_actor

    told: list[Any] = []

    class NotedTap:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.cuts = kwargs["top_p"] < 1

        def __call__(self, *rows: Any) -> contextlib.AbstractContextManager[None]:
            told.extend(rows)
            return contextlib.nullcontext()

        def updated(self) -> None: ...

    monkeypatch.setattr("medusa_ppo.loops.tap.CompanionTap", NotedTap)
    monkeypatch.setenv("MEDUSA_PPO_COMPANION", "ray:companion")
    monkeypatch.setattr(ours.plain_class(ppo_actor.PolicyModelActor), "fit", lambda self, kl: {})
    worker = object.__new__(ours.plain_class(ours.tapped_policy_actor()))
    worker.actor = Namespace(model=None)
    rollout = Namespace(temperature=1.0, top_p=0.9 if cuts else 1.0)
    worker.strategy = Namespace(args=Namespace(rollout=rollout))
    item = Namespace(
        sequences=torch.tensor([5, 6, 7, 8]),
        attention_mask=torch.ones(4),
        action_mask=torch.tensor([0, 1, 1]),
        action_log_probs=torch.tensor([-1.0, -2.0, -3.0]),
    )
    worker.trainer = Namespace(replay_buffer=Namespace(items=[item]))
    worker.fit()
    prompts, responses, logprobs = told
    assert (prompts, responses) == ([[5, 6]], [[7, 8]])
    expected = None if cuts else [[-2.0, -3.0]]
    assert (logprobs and [values.tolist() for values in logprobs]) == expected


def test_engines_that_feed_themselves_need_the_companions_heads(
    small_actor: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"heads\.path"):
        ours.served_arguments(build_config({}))
    table = load_actor(small_actor).lm_head.weight
    config = build_config({"heads": {"num_heads": 2}, "engine": {"extra": {"max_num_seqs": 3}}})
    save_heads(tmp_path, heads_for_table(config, table), lm_head_VD=table)
    config = config.model_copy(
        update={"heads": config.heads.model_copy(update={"path": str(tmp_path)})}
    )
    arguments = ours.served_arguments(config)(str(small_actor))
    assert arguments.pop("max_num_seqs") == 3
    # OpenRLHF's own worker extension stays.
    assert set(arguments) == {"speculative_config", "additional_config", "disable_log_stats"}
    assert arguments["additional_config"]["medusa_ppo_drafting"]["choose"]
    assert arguments["speculative_config"]["model"] == str(tmp_path)


@pytest.mark.parametrize(
    "name", ["train.async_enable", "ds.ring_attn_size", "ds.tensor_parallel_size"]
)
def test_what_the_heads_cannot_be_combined_with_is_refused_by_name(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    from medusa_ppo.loops.remote import refuse

    def arguments(**values: int) -> Namespace:
        return Namespace(**values)

    args = Namespace(
        train=arguments(async_enable=0),
        ds=arguments(ring_attn_size=1, tensor_parallel_size=1),
        vllm=arguments(num_engines=1),
        data=arguments(),
    )
    refuse("OpenRLHF", ours.unsupported(args))
    section, key = name.split(".")
    setattr(getattr(args, section), key, 2)
    with pytest.raises(ConfigError, match=f"--{name}"):
        refuse("OpenRLHF", ours.unsupported(args))
    # With a stand-alone companion no trainer is replaced, so any may run.
    assert any(ours.unsupported(args, tapped=True).values()) == (key != "async_enable")
    setattr(getattr(args, section), key, 1 if section == "ds" else 0)
    monkeypatch.setenv(FEED, "http://127.0.0.1:8460")
    with pytest.raises(ConfigError, match=FEED):
        refuse("OpenRLHF", ours.unsupported(args))
    refuse("OpenRLHF", ours.unsupported(args, tapped=True))


@pytest.mark.engine
def test_openrlhfs_own_vllm_actor_takes_our_heads(
    small_actor: Path, tmp_path: Path, local_ray: None
):
    """Its Ray actor with our arguments on vLLM's CPU build; its weight broadcast needs CUDA and is
    not called.
    """
    import ray
    from vllm import SamplingParams

    from medusa_ppo.loops.remote import RemoteAttachment

    attachment = RemoteAttachment(
        build_config({"heads": {"num_heads": 2}}), str(small_actor), tmp_path
    )
    actor_class = ours.rollout_actor(
        {**attachment.arguments(ours.WORKER_EXTENSION), "max_logprobs": 1}
    )
    engine = actor_class.options(num_cpus=0, num_gpus=0).remote(
        model=str(small_actor),
        enforce_eager=True,
        worker_extension_cls="openrlhf.trainer.ray.vllm_worker_wrap.WorkerWrap",
        tensor_parallel_size=1,
        seed=0,
        distributed_executor_backend="uni",
        max_model_len=64,
        enable_prefix_caching=False,
        dtype="float32",
        full_determinism=False,
        kv_cache_memory_bytes=64 * 1024**2,
        num_gpus=0,
        agent_func_path=None,
        remote_rm_url=None,
        mm_pad_token_ids=set(),
    )
    attachment.attach(
        lambda method, args: ours.call_all([engine], method, args),
        lambda: ours.sum_counters([engine]),
    )
    assert attachment.engine is not None and attachment.engine.max_drafts == 2

    torch.manual_seed(0)
    state = {
        name: 0.1 * torch.randn_like(value)
        for name, value in load_state(attachment._kept_state).items()
    }
    save_state(tmp_path / "new.safetensors", state)
    assert attachment.engine.swap_heads(tmp_path / "new.safetensors", 1).checksum == checksum(state)
    attachment.weights_synced(lost_heads=False)

    sampling = SamplingParams(temperature=1.0, max_tokens=16, ignore_eos=True, logprobs=1)
    outputs = ray.get([engine.generate.remote([5, 6, 7], sampling) for _ in range(4)])
    assert all(len(output.outputs[0].token_ids) == 16 for output in outputs)
    assert attachment.engine.counters().drafts > 0
    ray.kill(engine)
