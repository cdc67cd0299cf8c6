"""Every key of the configuration does something: each is changed, and the plan, the engine's start,
a training or a file differs.

A row of ROWS is a key, a value that is not its default, and where a difference must show. What a
place shows is never the value itself as it was written, but what was made of it. A key without a
row fails, and so does a row without a key.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import astuple, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from heads.checkpoint import checksum, save_heads
from heads.errors import RunError
from heads.heads_config import HeadsConfig
from heads.modules import MedusaHeads
from medusa_ppo.actors import megatron_model
from medusa_ppo.actors.megatron_layout import LlamaSizes
from medusa_ppo.cli.plan import make_plan
from medusa_ppo.companion import client as client_file
from medusa_ppo.companion.cycle import Cycle
from medusa_ppo.companion.service import settle
from medusa_ppo.config.run_config import RunConfig, build_config, known_keys
from medusa_ppo.contract.rollout_batch import RolloutBatch
from medusa_ppo.contract.rollouts import Rollouts, Sampling
from medusa_ppo.engines.launch import plan_launch, process_environment
from medusa_ppo.engines.pieces import Partly
from medusa_ppo.plugin.medusa_plugin import MedusaPlugin, initial_heads
from medusa_ppo.plugin.no_plugin import NoPlugin
from medusa_ppo.plugin.warm_up import WarmUpReport
from medusa_ppo.ppo import loop as loop_file
from medusa_ppo.ppo import run_warm_up
from medusa_ppo.ppo import session as session_file
from medusa_ppo.ppo.batch import PPOBatch, text_batch
from medusa_ppo.ppo.critic import Critic
from medusa_ppo.ppo.generation import Prompt, PromptStream, RolloutFiles, SpeedPairs, sampling_of
from medusa_ppo.ppo.learner import Learner
from medusa_ppo.ppo.megatron import megatron_rank
from medusa_ppo.ppo.placement import Turns
from medusa_ppo.ppo.rewards import make_reward
from medusa_ppo.ppo.run_progress import ProgressSink
from medusa_ppo.ppo.run_state import RunPosition, save_checkpoint
from medusa_ppo.ppo.scores import Measured, PolicyScores
from medusa_ppo.reports import trackers
from medusa_ppo.runtime.hardware import Hardware, settled
from medusa_ppo.runtime.processes import bundle

NODE = Hardware(8, True, 16, "eight GPUs and sixteen cores")
# Tokens that follow from each other, and the width of their states.
CHAIN = 12
STATE = 16
REPLAYED = {"companion": {"replay_versions": 2}}
SIZES = LlamaSizes(2, 16, 24, 4, 2, 4, CHAIN, 1e-6, 1e4, 0.0, 64, False, False, False)
EVALUATED = {"ppo": {"eval_every": 1}, "data": {"eval_path": "other.jsonl"}}

# key -> (another value, where it shows, what else must be set for it to show)
Row = tuple[Any, str, dict[str, Any]]
ROWS: dict[str, Row] = {
    "name": ("other", "rollout_files", {}),
    "out": ("elsewhere", "rollout_files", {}),
    "seed": (5, "sampling", {"sampling": {"seeded": True}}),
    "model.path": ("larger", "plan", {}),
    "model.critic_path": ("larger", "plan", {}),
    "model.dtype": ("float32", "launch", {}),
    "actor.backend": ("megatron", "plan", {}),
    "actor.tensor_parallel": (2, "plan", {"actor": {"backend": "megatron"}}),
    "actor.pipeline_parallel": (2, "plan", {"actor": {"backend": "megatron"}}),
    "actor.context_parallel": (2, "plan", {"actor": {"backend": "megatron"}}),
    "actor.data_parallel": (2, "plan", {"actor": {"backend": "megatron"}}),
    "actor.sequence_parallel": (
        True,
        "cut",
        {"actor": {"backend": "megatron", "tensor_parallel": 2}},
    ),
    "actor.distributed_optimizer": (
        True,
        "plan",
        {"actor": {"backend": "megatron", "data_parallel": 2}},
    ),
    "actor.roles": ("all", "plan", {"actor": {"backend": "megatron"}}),
    "actor.resource": ("near", "plan", {"actor": {"backend": "megatron"}}),
    "actor.imports": ("json", "rank", {}),
    "data.path": ("other.jsonl", "prompts", {}),
    "data.split": ("train[:2]", "prompts", {}),
    "data.template": ("Q: {prompt}", "prompts", {}),
    "data.answer_column": ("solution", "prompts", {}),
    "data.images": ("files", "prompts", {}),
    "data.max_prompt_tokens": (5, "prompts", {}),
    "data.eval_path": ("third.jsonl", "streams", EVALUATED),
    "data.eval_split": ("train[:2]", "streams", EVALUATED),
    "data.ptx_path": (
        "rows.txt",
        "streams",
        {"ppo": {"ptx_coefficient": 0.5}, "data": {"ptx_path": "other.txt"}},
    ),
    "sampling.temperature": (0.7, "sampling", {}),
    "sampling.top_p": (0.9, "sampling", {}),
    "sampling.top_k": (20, "sampling", {}),
    "sampling.max_new_tokens": (32, "sampling", {}),
    "sampling.responses_per_prompt": (2, "sampling", {}),
    "sampling.seeded": (True, "sampling", {}),
    "engine.backend": ("server", "plan", {}),
    "engine.runner": ("v1", "launch", {}),
    "engine.replicas": (2, "plan", {}),
    "engine.resource": ("near", "ray_room", {}),
    "engine.dtype": ("float32", "launch", {}),
    "engine.transfer": ("broadcast", "launch", {}),
    "engine.max_num_seqs": (8, "launch", {}),
    "engine.max_model_len": (500, "launch", {}),
    "engine.memory_fraction": (0.5, "launch", {}),
    "engine.enforce_eager": (True, "launch", {}),
    "engine.sleep_level": (2, "launch", {}),
    "engine.threads": (3, "environment", {}),
    "engine.num_drafts": (2, "launch", {}),
    "engine.draft_temperature": (0.0, "launch", {}),
    "engine.draft_vocab": (8, "launch", {}),
    "engine.memory_bytes": (2**20, "launch", {}),
    "engine.stop_below": (0.1, "launch", {"engine": {"num_drafts": 2}}),
    "engine.extra": ({"block_size": 32}, "launch", {}),
    "heads.path": ("heads", "first_heads", {}),
    "heads.kind": ("medusa", "first_heads", {}),
    "heads.num_heads": (3, "first_heads", {}),
    "heads.context": (8, "first_heads", {}),
    "heads.context_layers": (2, "first_heads", {}),
    "heads.feed_forward": (1, "first_heads", {}),
    "heads.cell": (2, "first_heads", {}),
    "heads.copy_parts": (2, "first_heads", {}),
    "heads.lm_head": ("own", "first_heads", {}),
    "heads.warm_up_tokens": (0, "warmed", {}),
    "heads.warm_up_s": (5.0, "warmed", {}),
    "companion.enabled": (False, "plugin", {}),
    "companion.on_error": ("raise", "plugin", {}),
    "companion.loss": ("ce", "learned", {}),
    "companion.learning_rate": (1e-3, "learned", {}),
    "companion.dtype": ("bfloat16", "learned", {}),
    "companion.batch_positions": (32, "learned", {}),
    "companion.epochs": (3, "learned", {}),
    "companion.share": (0.2, "plugin", {}),
    "companion.queue_bytes": (2**28, "plan", {}),
    "companion.wait": (True, "learned", REPLAYED),
    "companion.replay_versions": (2, "learned", {}),
    "companion.gate_confidence": (
        0.51,
        "learned",
        {"companion": {"learning_rate": 3e-3, "loss": "ce_tv"}},
    ),
    "companion.cores": ([0], "process", {}),
    "companion.num_gpus": (1.0, "plan", {}),
    "companion.workers": (2, "plan", {}),
    "companion.feed": ("versions", "feed", {}),
    "companion.resource": ("near", "ray_room", {}),
    "ppo.steps": (3, "loop", {}),
    "ppo.prompts_per_step": (8, "plan", {}),
    "ppo.staleness": (
        2,
        "written_ahead",
        {"ppo": {"importance_bound": 2.0}, "companion": {"enabled": False}},
    ),
    "ppo.carry_after": (
        0.5,
        "written_ahead",
        {"ppo": {"staleness": 1, "importance_bound": 2.0}, "companion": {"enabled": False}},
    ),
    "ppo.piece_prompts": (1, "pieces", {}),
    "ppo.placement": ("shared", "plan", {"engine": {"sleep_level": 1}}),
    "ppo.side_by_side": (True, "beside", {}),
    "ppo.epochs": (1, "updated", {}),
    "ppo.minibatch_size": (4, "updated", {}),
    "ppo.micro_batch_size": (8, "plan", {}),
    "ppo.micro_batch_tokens": (20, "passes", {}),
    "ppo.recompute": (True, "passes", {}),
    "ppo.reference_dtype": (
        "bfloat16",
        "updated",
        {"ppo": {"kl_coefficient": 0.5, "actor_learning_rate": 1e-2}},
    ),
    "ppo.actor_learning_rate": (3e-3, "updated", {}),
    "ppo.critic_learning_rate": (3e-3, "updated", {}),
    "ppo.learning_rate_schedule": ("linear", "updated", {}),
    "ppo.warmup_steps": (2, "updated", {}),
    "ppo.advantages": ("rloo", "updated", {}),
    "ppo.lam": (0.5, "updated", {}),
    "ppo.clip_range": (0.01, "updated", {"ppo": {"actor_learning_rate": 1e-2}}),
    "ppo.value_clip_range": (0.001, "updated", {}),
    "ppo.value_clip_unit": ("returns", "updated", {"ppo": {"value_clip_range": 3e-3}}),
    "ppo.kl_coefficient": (0.5, "updated", {}),
    "ppo.kl_estimator": ("k3", "updated", {}),
    "ppo.kl_in_loss": (True, "updated", {"ppo": {"kl_estimator": "k3", "kl_coefficient": 1.0}}),
    "ppo.kl_goal": (0.001, "updated", {}),
    "ppo.kl_stop": (1e-6, "updated", {"ppo": {"actor_learning_rate": 1e-2}}),
    "ppo.entropy_coefficient": (0.1, "updated", {}),
    "ppo.clip_norm": (0.01, "updated", {}),
    "ppo.importance_bound": (2.0, "updated", {}),
    "ppo.scale_rewards": (True, "updated", {}),
    "ppo.length_penalty": (0.1, "updated", {}),
    "ppo.cut_responses": ("mask", "updated", {}),
    "ppo.ptx_coefficient": (
        0.7,
        "updated",
        {"ppo": {"ptx_coefficient": 0.1}, "data": {"ptx_path": "other.txt"}},
    ),
    "ppo.reward": ("long_responses:longer", "reward", {}),
    "ppo.reward_processes": (2, "reward_processes", {}),
    "ppo.reward_timeout_s": (0.01, "reward_processes", {"ppo": {"reward_processes": 1}}),
    "ppo.reward_template": ("{prompt}a{response}", "judged", {}),
    "ppo.reward_too_long": ("cut", "judged_too_long", {}),
    "ppo.step_separator": ("b", "judged", {}),
    "ppo.eval_every": (1, "evaluated", {}),
    "ppo.checkpoint_every": (3, "loop", {}),
    "ppo.keep_checkpoints": (2, "kept", {}),
    "ppo.threads": (3, "threads", {}),
    "report.compare_pairs": (2, "compared", {}),
    "report.speed_every": (2, "pairs", {}),
    "report.trackers": (["wandb"], "tracked", {}),
    "report.project": ("other", "tracked", {"report": {"trackers": ["wandb"]}}),
    "report.keep_rollouts": (2, "rollout_files", {}),
}


REWARD = """
def longer(prompt, response, row):
    return len(response) / 4


longer.correct_from = 2.0
"""


def test_every_key_has_a_row_and_every_row_a_key() -> None:
    assert list(ROWS) == known_keys()


@pytest.mark.parametrize("key", ROWS)
def test_a_key_makes_a_difference(key: str, places: KeyEffects) -> None:
    value, place, more = ROWS[key]
    show: Callable[[RunConfig], Any] = getattr(places, place)
    first = show(places.config(more))
    second = show(places.config(more, key, value))
    assert first != second, f"{key}={value} changes nothing in {place}"
    assert first == show(places.config(more)), f"{place} shows other things each time"


class _Enough(Exception):
    """What was looked for has happened."""


class KeyEffects:
    """What is looked at. Every method takes a configuration and gives something that can be
    compared.
    """

    def __init__(
        self,
        folder: Path,
        patch: pytest.MonkeyPatch,
        tiny_actor: Callable[..., Any],
        rollouts: Rollouts,
    ) -> None:
        self._folder = folder
        self._patch = patch
        self._tiny_actor = tiny_actor
        self._rollouts = rollouts
        patch.chdir(folder)

    def config(self, more: dict[str, Any], key: str = "", value: Any = None) -> RunConfig:
        values: dict[str, Any] = {"model": {"path": "actor"}, "data": {"path": "rows.jsonl"}}
        for section, settings in more.items():
            values[section] = {**values.get(section, {}), **settings}
        if key:
            *parents, leaf = key.split(".")
            node = values.setdefault(parents[0], {}) if parents else values
            node[leaf] = value
        return build_config(values)

    def plan(self, config: RunConfig) -> Any:
        plan = make_plan(config, NODE)
        return plan.processes, plan.moves

    def launch(self, config: RunConfig) -> Any:
        self._patch.setattr("medusa_ppo.engines.launch.is_cpu_build", lambda: False)
        return astuple(plan_launch("actor", "heads", settled(config, NODE).engine, config.seed))

    def environment(self, config: RunConfig) -> Any:
        return process_environment(config.engine, has_gpu=False)

    def ray_room(self, config: RunConfig) -> Any:
        return (
            bundle(0, config.engine.resource),
            client_file.actor_options(config.companion, None, 0)["resources"],
        )

    def feed(self, config: RunConfig) -> Any:
        """Which feed a companion looks at before it starts anything."""
        asked: list[str] = []
        self._patch.setattr(client_file.ray, "is_initialized", lambda: True)
        self._patch.setattr(client_file, "require_feed", lambda address, _: asked.append(address))
        self._patch.setattr(client_file, "_with_gpus", _enough)
        table_VD = torch.zeros(CHAIN, STATE)
        with pytest.raises(_Enough):
            client_file.CompanionClient(
                HeadsConfig(STATE, CHAIN, 2), config.companion, table_VD, seed=0
            )
        return asked

    def rank(self, config: RunConfig) -> Any:
        imported: list[str] = []
        self._patch.setattr(megatron_rank.importlib, "import_module", imported.append)
        self._patch.setattr(torch, "set_num_threads", _enough)
        with pytest.raises(_Enough):
            megatron_rank.ActorRank(0, "actor", config, False).start(("", 0))
        return imported

    def cut(self, config: RunConfig) -> Any:
        """How Megatron builds the actor."""
        settings = megatron_model._settings(
            SIZES, config.actor, torch.float32, config.ppo.recompute
        )
        return settings.sequence_parallel

    def prompts(self, config: RunConfig) -> Any:
        reader: Any = SimpleNamespace(
            prompts=lambda texts, images: [(len(files[0]),) for files in images]
        )
        found = PromptStream.load(config.data, letters, seed=0, reader=reader)
        return [(prompt.text, prompt.row["answer"], prompt.token_ids) for prompt in found.prompts]

    def sampling(self, config: RunConfig) -> Any:
        return sampling_of(config, 3)

    def first_heads(self, config: RunConfig) -> Any:
        heads = initial_heads(config, self._tiny_actor())
        return heads.config, checksum(heads.trainable_state())

    def plugin(self, config: RunConfig) -> Any:
        started: list[Any] = []
        self._patch.setattr(
            "medusa_ppo.plugin.medusa_plugin.CompanionClient",
            lambda *a, **k: started.append(a) or SimpleNamespace(shared=True),
        )
        heads = initial_heads(config, self._tiny_actor())
        table = torch.zeros(16, 32)
        engine: Any = SimpleNamespace(swap_heads=lambda *a: 1 / 0)
        plugin = MedusaPlugin.start_from_tables(config, heads, (table, table), engine, self._folder)
        return len(started), plugin.installer._on_error, plugin.budget and plugin.budget._share

    def learned(self, config: RunConfig) -> Any:
        """The companion's whole state after some batches."""
        section = config.companion.model_copy(
            update={"batch_positions": min(64, config.companion.batch_positions)}
        )
        cycle = Cycle(HeadsConfig(STATE, CHAIN, 2), section, TABLE_VD, seed=0)
        for version in range(4):
            cycle.run(chain_batch(version))
        return checksum(cycle.state_dict())

    def process(self, config: RunConfig) -> Any:
        seen: list[Any] = []
        for owner, name in ((torch, "set_num_threads"), (os, "sched_setaffinity"), (os, "nice")):
            self._patch.setattr(
                owner, name, lambda *values, name=name: seen.append((name, *values))
            )
        settle(config.companion)
        return seen

    def updated(self, config: RunConfig) -> Any:
        """Weights of actor and critic after two updates from the same rollouts."""
        actor = self._tiny_actor()
        learner = Learner(
            actor,
            Critic(actor) if config.ppo.advantages == "gae" else None,
            config.ppo,
            seed=config.seed,
        )
        batch = PPOBatch(self._rollouts)
        texts = (
            None
            if config.ppo.ptx_coefficient is None
            else text_batch([(1, 2, 3)], learner.device, 0)
        )
        rewards_S = torch.arange(len(self._rollouts.responses)) / 4
        for step in range(2):
            scores, _ = learner.score(batch, rewards_S, Sampling())
            learner.update(batch, scores, Sampling(), step, texts)
        return checksum(learner.actor.state_dict()), learner.critic and checksum(
            dict(learner.critic.named_parameters())
        )

    def passes(self, config: RunConfig) -> Any:
        """How many layers the actor goes through in an update, and on how many rows."""
        actor = self._tiny_actor()
        rows = list[int]()
        learner = Learner(actor, Critic(actor), config.ppo)
        batch = PPOBatch(self._rollouts)
        scores, _ = learner.score(batch, torch.arange(len(batch)) / 4, Sampling())
        actor.model.layers[0].input_layernorm.register_forward_hook(
            lambda module, inputs, output: rows.append(len(output))
        )
        learner.update(batch, scores, Sampling(), 0)
        return rows

    def beside(self, config: RunConfig) -> Any:
        """Which threads the reference's passes are in."""
        actor = self._tiny_actor()
        found = set[bool]()
        learner = Learner(actor, Critic(actor), config.ppo)
        here = threading.current_thread()
        learner.reference.model.register_forward_hook(
            lambda *_: found.add(threading.current_thread() is here)
        )
        learner.score(
            PPOBatch(self._rollouts), torch.zeros(len(self._rollouts.responses)), Sampling()
        )
        return found

    def streams(self, config: RunConfig) -> Any:
        """What is evaluated on, and what is learned by heart."""
        session = session_file.RunSession(config, ProgressSink())
        return [
            stream and [prompt.text for prompt in stream.prompts]
            for stream in session._streams(letters)[1:]
        ]  # type: ignore[arg-type]

    def judged_too_long(self, config: RunConfig) -> Any:
        """How many texts a reward model cuts, or that it refuses them."""
        source = make_reward(config.ppo.model_copy(update={"reward": "judge"}))
        try:
            source.score(["a" * 5000], ["b"], [{}])
        except RunError as error:
            return str(error)
        return source.cut

    def judged(self, config: RunConfig) -> Any:
        """What the loop asks a reward model."""
        source = make_reward(
            config.ppo.model_copy(
                update={"reward": "steps" if config.ppo.step_separator else "judge"}
            )
        )
        one: Any = SimpleNamespace(
            config=config,
            reward=source,
            turns=Turns(),
            tokenizer=SimpleNamespace(
                batch_decode=lambda ids, **_: ["".join("ab"[n % 2] for n in row) for row in ids]
            ),
        )
        prompts: Any = [SimpleNamespace(text="a", row={})] * len(self._rollouts.prompts)
        return loop_file.PPOLoop._rewards(one, self._rollouts, prompts).tolist()

    def evaluated(self, config: RunConfig) -> Any:
        """Whether there is something to evaluate on."""
        session = session_file.RunSession(
            config.model_copy(update={"data": build_config({"data": {"path": "demo"}}).data}),
            ProgressSink(),
        )
        return session._streams(letters)[1] is not None  # type: ignore[arg-type]

    def kept(self, config: RunConfig) -> Any:
        shutil.rmtree(config.run_dir, ignore_errors=True)
        learner: Any = SimpleNamespace(save=lambda folder: None)
        for step in (1, 2, 3):
            save_checkpoint(config.run_dir, learner, RunPosition(step), config)
        return sorted(path.parent.name for path in config.run_dir.rglob("state.json"))

    def pieces(self, config: RunConfig) -> Any:
        """What the loop scores in one go."""
        measured: list[int] = []
        learner: Any = SimpleNamespace(
            device="cpu",
            turns=Turns(),
            begin_batch=lambda sampling: None,
            measure=lambda batch, *rest: (
                measured.append(len(batch))
                or Measured(PolicyScores.zeros(batch), torch.zeros(batch.mask_SR.shape))
            ),
            conclude=lambda *rest: (None, {}),
        )
        one: Any = SimpleNamespace(
            **dict.fromkeys(
                (
                    "prompts",
                    "tokenizer",
                    "sync",
                    "evaluation",
                    "texts",
                    "reward",
                    "remembered",
                )
            ),
            trackers=trackers.TrackerGroup(),
            plugin=NoPlugin(),
            learner=learner,
            engine=SimpleNamespace(
                generate_as_finished=self._finish, generate=lambda *_: self._rollouts
            ),
        )
        loop = loop_file.PPOLoop(config, one, ProgressSink())
        loop.maker._rewards = lambda rollouts, prompts: torch.zeros(len(rollouts.responses))
        prompts: Any = [SimpleNamespace(token_ids=ids) for ids in self._rollouts.prompts]
        sampling = replace(sampling_of(config, 0), responses_per_prompt=2)
        rollouts, _ = loop.maker.write(0, prompts, sampling)
        loop.maker.score(rollouts)
        return measured

    def written_ahead(self, config: RunConfig) -> Any:
        """What the engine was asked until the first step is learned from: each step's whole batch,
        or so many prompts of it.
        """
        asked: list[int] = []
        learner: Any = SimpleNamespace(device="cpu", turns=Turns(), update=_enough)

        def partly(prompts: Any, sampling: Sampling, partly: Partly) -> Rollouts:
            asked.append(partly.enough)
            ended = (
                replace(begun, token_ids=(1,), logprobs=(-1.0,), finish_reason="stop")
                for begun in partly.begun
            )
            return replace(self._rollouts, responses=tuple(ended))

        engine: Any = SimpleNamespace(
            policy_version=0,
            generate=lambda *_: asked.append(0) or self._rollouts,
            generate_partly=partly,
        )
        prompts: Any = [SimpleNamespace(token_ids=ids) for ids in self._rollouts.prompts]
        stream: Any = SimpleNamespace(batch=lambda step, size: prompts)
        parts: Any = SimpleNamespace(
            **dict.fromkeys(("tokenizer", "sync", "evaluation", "texts", "reward", "remembered")),
            trackers=trackers.TrackerGroup(),
            plugin=NoPlugin(),
            learner=learner,
            engine=engine,
            prompts=stream,
        )
        loop = loop_file.PPOLoop(config, parts, ProgressSink())
        loop.maker.score = _enough
        with pytest.raises(_Enough):
            loop.step(0)
        loop.maker._engine_thread.shutdown()
        return asked

    def _finish(self, prompts: Any, sampling: Sampling, finished: Callable[..., None]) -> Rollouts:
        for place, response in enumerate(self._rollouts.responses):
            finished(place, response)
        return self._rollouts

    def reward(self, config: RunConfig) -> Any:
        source = make_reward(config.ppo)
        scores_S = source.score(["1", "1"], ["#### 2", "a long response"], [{"answer": "2"}] * 2)
        return scores_S.tolist(), source.correct(scores_S).tolist()

    def reward_processes(self, config: RunConfig) -> Any:
        """In how many processes a slow function is called, and what of it comes in time."""
        (self._folder / "slow_rewards.py").write_text(
            "import os, time\n\n\ndef pid(*_):\n    time.sleep(0.3)\n    return"
            " float(os.getpid())\n"
        )
        source = make_reward(config.ppo.model_copy(update={"reward": "slow_rewards:pid"}))
        try:
            pids = source.score(["a"] * 4, ["b"] * 4, [{}] * 4).tolist()
        finally:
            source.close()
        return len({pid for pid in pids if pid}), float(os.getpid()) in pids

    def loop(self, config: RunConfig) -> Any:
        saved: list[int] = []
        self._patch.setattr(
            loop_file,
            "try_save",
            lambda folder, learner, position, *_: saved.append(position.next_step),
        )
        self._patch.setattr(loop_file.PPOLoop, "step", lambda self, step: {})
        parts: Any = SimpleNamespace(
            **dict.fromkeys(
                (
                    "prompts",
                    "tokenizer",
                    "reward",
                    "sync",
                    "engine",
                    "evaluation",
                    "texts",
                )
            ),
            remembered=dict,
            plugin=NoPlugin(),
            learner=SimpleNamespace(turns=Turns()),
            trackers=trackers.TrackerGroup(),
        )
        loop = loop_file.PPOLoop(config, parts, ProgressSink())
        loop.run(SimpleNamespace(step=lambda values: None))  # type: ignore[arg-type]
        return loop.position.next_step, saved

    def threads(self, config: RunConfig) -> Any:
        seen: list[int] = []
        self._patch.setattr(torch, "set_num_threads", seen.append)
        self._patch.setattr(session_file, "make_reward", _enough)
        with pytest.raises(_Enough):
            session_file.RunSession(settled(config, NODE), ProgressSink()).prepare(resume=False)
        return seen

    def warmed(self, config: RunConfig) -> Any:
        """Of how many tokens and seconds there is a warm-up."""
        asked: list[tuple[int, float]] = []

        def warm_up(*_: Any, tokens: int, seconds: float, **__: Any) -> WarmUpReport:
            asked.append((tokens, seconds))
            return WarmUpReport()

        parts: Any = SimpleNamespace(
            plugin=SimpleNamespace(warm_up=warm_up),
            prompts=PromptStream([Prompt("a", (1,), {})], seed=0),
            learner=SimpleNamespace(turns=Turns()),
            tokenizer=None,
        )
        run_warm_up.warm_up(config, parts, ProgressSink(), RunPosition())
        return asked

    def pairs(self, config: RunConfig) -> Any:
        asked: list[int] = []
        engine: Any = SimpleNamespace(
            generate=lambda prompts, sampling: asked.append(len(prompts)) or self._rollouts,
            configure=lambda **settings: None,
            num_drafts=4,
        )
        pairs = SpeedPairs(engine, config)
        for step in range(4):
            pairs.generate([(1,), (2,)], Sampling(), step)
        return asked

    def compared(self, config: RunConfig) -> Any:
        """What a run asks for after its last step."""
        asked: list[str] = []
        parts: Any = SimpleNamespace(plugin=True)

        class Session:
            def __init__(self, *arguments: Any) -> None:
                self.prepare = lambda *arguments: (parts, None, None)
                self.save = self.finish = self.stop_if_told = lambda *arguments: None
                self.pair_done = None
                self.compare = lambda parts, measure: asked.append("compare")

            def __enter__(self) -> Session:
                return self

            def __exit__(self, *arguments: Any) -> None:
                pass

        loop = SimpleNamespace(run=lambda writer, stop_if_told: None, position=None)
        self._patch.setattr(loop_file, "RunSession", Session)
        self._patch.setattr(loop_file, "PPOLoop", lambda *arguments: loop)
        loop_file.run_ppo(config)
        return asked

    def tracked(self, config: RunConfig) -> Any:
        told: list[str] = []
        self._patch.setitem(
            trackers.STARTS,
            "wandb",
            lambda config, _: told.append(config.report.project) or trackers.TrackerGroup(),
        )
        trackers.start_trackers(config, 0)
        return told

    def rollout_files(self, config: RunConfig) -> Any:
        shutil.rmtree(config.run_dir, ignore_errors=True)
        files = RolloutFiles(config.run_dir, config.report.keep_rollouts or 1)
        for step in range(3):
            files.write(step, self._rollouts)
        return sorted(str(path) for path in config.run_dir.rglob("*.jsonl"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_actor, save_judge) -> Path:
    """Actors, heads, prompts and a reward that configurations name."""
    folder = tmp_path_factory.mktemp("places")
    (folder / "long_responses.py").write_text(REWARD)
    for name, hidden in (("actor", 32), ("larger", 64)):
        tiny_actor(hidden=hidden).save_pretrained(folder / name)
    torch.manual_seed(1)
    save_heads(
        folder / "heads",
        MedusaHeads(HeadsConfig(32, 16, 4, "hydra")),
        lm_head_VD=tiny_actor().lm_head.weight.detach(),
    )
    for name, mark in (("rows", "a"), ("other", "b"), ("third", "c")):
        rows = [
            {
                "prompt": mark * n,
                "answer": str(n),
                "solution": str(n + 1),
                "files": "long_responses.py",
            }
            for n in (3, 5, 8)
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / f"{name}.txt").write_text(f"one {mark}\ntwo {mark}\n")
    save_judge(folder / "judge")
    save_judge(folder / "steps", by_steps=True)
    return folder


@pytest.fixture
def places(folder: Path, monkeypatch: pytest.MonkeyPatch, tiny_actor, make_rollouts) -> KeyEffects:
    rollouts: Rollouts = make_rollouts(8)
    ends = ("stop", "length", "stop", "stop")
    responses = (
        replace(response, finish_reason=end)
        for response, end in zip(rollouts.responses, ends * 2, strict=True)
    )
    return KeyEffects(
        folder, monkeypatch, tiny_actor, replace(rollouts, responses=tuple(responses))
    )


def letters(texts: list[str]) -> dict[str, Any]:
    """A tokenizer."""
    return {"input_ids": [[ord(c) for c in text] for text in texts]}


def _enough(*arguments: Any, **more: Any) -> Any:
    raise _Enough


FRAME = torch.linalg.qr(torch.randn(STATE, STATE, generator=torch.Generator().manual_seed(0))).Q
TABLE_VD = torch.randn(CHAIN, STATE, generator=torch.Generator().manual_seed(1))


def chain_batch(version: int) -> RolloutBatch:
    """Responses in which each token often follows from the one before."""
    generator = torch.Generator().manual_seed(version)
    lengths_S = torch.randint(2, 16, (24,), generator=generator)
    starts = torch.randint(CHAIN, (24,), generator=generator).tolist()
    ids_M = torch.cat(
        [(start + torch.arange(int(n))) % CHAIN for start, n in zip(starts, lengths_S, strict=True)]
    )
    ids_M = torch.where(
        torch.rand(ids_M.shape, generator=generator) < 0.4,
        torch.randint(CHAIN, ids_M.shape, generator=generator),
        ids_M,
    )
    states_M = (ids_M - 1) % CHAIN
    return RolloutBatch(
        4.0 * FRAME[states_M], ids_M, torch.full(ids_M.shape, -0.1), lengths_S, version
    )
