"""A run's beginning and end: everything is checked before anything heavy starts, and whatever was
started is always closed.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from heads.checkpoint import remove_directory
from heads.errors import MedusaError
from medusa_ppo.actors.hf import DTYPES, Actor, load_actor, load_tokenizer
from medusa_ppo.actors.vision import FeatureStore, ImageReader
from medusa_ppo.config.ppo_section import SHARED
from medusa_ppo.config.run_config import RunConfig
from medusa_ppo.demo.actor_cache import actor_note, ensure_demo_actor
from medusa_ppo.demo.pretraining import RECIPES
from medusa_ppo.engines.actor_sync import ActorSync, actor_stream
from medusa_ppo.engines.launch import cache_bytes, read_model_config
from medusa_ppo.engines.pool import EnginePool
from medusa_ppo.engines.ray_engine import make_engine
from medusa_ppo.engines.rollout_engine import RolloutEngine
from medusa_ppo.plugin import AnyPlugin, MedusaPlugin, NoPlugin
from medusa_ppo.plugin.medusa_plugin import VERSIONS_FOLDER, refuse_own_heads
from medusa_ppo.plugin.warm_up import FOLDER as WARM_UP_FOLDER
from medusa_ppo.ppo import run_progress as phases
from medusa_ppo.ppo import run_state
from medusa_ppo.ppo.critic import Critic
from medusa_ppo.ppo.generation import PromptStream, num_drafts
from medusa_ppo.ppo.learner import Learner, PPOLearner
from medusa_ppo.ppo.placement import ACTOR, REWARD
from medusa_ppo.ppo.rewards import RewardSource, is_model, make_reward
from medusa_ppo.ppo.role_checks import check_roles
from medusa_ppo.ppo.run_progress import ProgressSink
from medusa_ppo.ppo.run_state import RunPosition
from medusa_ppo.reports.run_files import (
    ACTOR_FOLDER,
    COMPANION_FOLDER,
    HEADS_FOLDER,
    METRICS_FILE,
)
from medusa_ppo.reports.store import RunWriter, refuse_second_writer
from medusa_ppo.reports.trackers import TrackerGroup, check_trackers, start_trackers
from medusa_ppo.runtime.files import OwnedFolder, remove_unfinished
from medusa_ppo.runtime.hardware import gpu_places, visible_gpus
from medusa_ppo.runtime.processes import StopSignals, local_ray

logger = logging.getLogger(__name__)


@dataclass
class Parts:
    """The parts that the loop works with. With a NoPlugin as `plugin` it is plain PPO. `evaluation`
    and `texts` (to train on) may be None; `remembered` returns the engines' memory, to be saved.
    """

    prompts: PromptStream
    tokenizer: PreTrainedTokenizerBase
    learner: PPOLearner
    reward: RewardSource
    engine: RolloutEngine
    sync: ActorSync
    plugin: AnyPlugin = field(default_factory=NoPlugin)
    trackers: TrackerGroup = field(default_factory=TrackerGroup)
    evaluation: PromptStream | None = None
    texts: PromptStream | None = None
    remembered: Callable[[], run_state.State] = dict


class RunSession:
    """Context manager around one run. Leaving it closes plugin, engine and Ray, and writes a
    partial report if the run did not finish.
    """

    def __init__(self, config: RunConfig, progress: ProgressSink) -> None:
        self._config = config
        self._progress = progress
        self._stack = contextlib.ExitStack()
        self._writer: RunWriter | None = None
        self._finished = False
        self._ray_started = False

    def __enter__(self) -> RunSession:
        self._signals = self._stack.enter_context(StopSignals())
        return self

    def stop_if_told(self) -> None:
        """Raises KeyboardInterrupt if a signal to stop was caught by other code."""
        self._signals.stop_if_told()

    def pair_done(self, line: str) -> None:
        """Show a pair of the comparison, which is two real steps; then as after any step."""
        self._progress.note(line)
        self.stop_if_told()

    def prepare(
        self, resume: bool, allow: Sequence[str] = ()
    ) -> tuple[Parts, RunPosition, RunWriter]:
        """Check, load and start everything.

        Raises:
            MedusaError: the first problem; cheap checks come first.
        """
        config = self._config
        check_trackers(config.report.trackers)
        gpu_places(config.engine, visible_gpus(), shared=config.ppo.placement == SHARED)
        # The writer asks once more when it begins, but until then models are loaded, and what seems
        # to be a killed run's is removed.
        refuse_second_writer(config.run_dir)
        own = (config.run_dir / name for name in (VERSIONS_FOLDER, HEADS_FOLDER))
        refuse_own_heads(config.heads.path, *own)
        torch.set_num_threads(config.ppo.threads or 1)
        warmed_up = False
        if resume and run_state.only_warmed_up(config.run_dir):
            self._progress.note(
                "The run was stopped in its warm-up. It starts again with the responses it "
                "already has."
            )
            resume = False
            warmed_up = True
        position = (
            run_state.read_position(config.run_dir, config, allow) if resume else RunPosition()
        )
        if resume:
            remove_unfinished(config.run_dir)
        check_roles(config)
        reward = self._reward()
        self._stack.callback(reward.close)
        actor_path = self._folder_of(config.model.path)
        tokenizer = load_tokenizer(actor_path)
        reader = ImageReader.load(actor_path, tokenizer) if config.data.images else None
        streams = self._streams(tokenizer, reader)
        learner = self._learner(actor_path, reward, reader)
        lines = None
        if resume:
            saved = run_state.saved_folder(config.run_dir)
            learner.load(saved)
            lines = saved / METRICS_FILE
        actor = learner.actor
        heads_path = self._prepare_heads(actor)
        self._place(learner, reward)
        next_step = position.next_step if resume else None
        self._writer = RunWriter(
            config.run_dir,
            config.model_dump(mode="json"),
            resume_step=next_step,
            copy=lines,
            # Before the companion starts, which writes there.
            moves=(COMPANION_FOLDER, VERSIONS_FOLDER),
        )
        if not resume and not warmed_up:  # Left by an earlier run in this folder.
            remove_directory(config.run_dir / WARM_UP_FOLDER)
        if config.model.path in RECIPES:
            self._writer.add(actor_note=actor_note(Path(actor_path)))
        self._start_ray()
        trackers = start_trackers(config, position.next_step)
        self._stack.callback(trackers.close)
        with learner.turns.aside(ACTOR):
            engine, plugin = self._start_engine(
                actor_path, heads_path, learner, resume, position.next_step
            )
            learner.turns.engine_started(self._engine_bytes(actor_path, actor))
        ahead = config.ppo.steps_ahead > 0
        sync = self._stack.enter_context(
            ActorSync(engine, config.engine.dtype or "auto", ahead=ahead)
        )
        # A server that was running before may hold the actor of whoever used it last.
        if position.policy_version or config.engine.addresses:
            level = config.engine.sleep_level if learner.turns.read_on_device else None
            learner.turns.sleep(engine, level)
            with learner.turns.aside(ACTOR):
                wake = functools.partial(learner.turns.wake, engine, level)
                sync(actor, position.policy_version, wake)
        # And the heads, which would draft until the first ones are published.
        if config.engine.addresses and isinstance(plugin, MedusaPlugin):
            plugin.installer.begin_on_a_server(named=bool(config.heads.path))
        remembered = self._remember(engine, tokenizer, actor_path, resume)
        prompts, evaluation, texts = streams
        parts = Parts(
            prompts,
            tokenizer,
            learner,
            reward,
            engine,
            sync,
            plugin,
            trackers,
            evaluation,
            texts,
            remembered,
        )
        return parts, position, self._writer

    def _remember(
        self,
        engine: RolloutEngine,
        tokenizer: PreTrainedTokenizerBase,
        actor_path: str,
        resume: bool,
    ) -> Callable[[], run_state.State]:
        """Restore the engines' memory from the saved run; returns a function that gets their memory
        for the next save.
        """
        memory = engine.memory if isinstance(engine, EnginePool) else None
        if memory is None or not memory.most_bytes:
            return dict
        of = run_state.memory_of(tokenizer, read_model_config(actor_path))
        saved = run_state.saved_memory(self._config.run_dir) if resume else None
        if saved is not None:
            memory.load_state_dict(saved, of)
            engine.remember(memory.rows(engine.policy_version))
        return lambda: memory.state_dict(of, engine.policy_version)

    def _place(self, learner: PPOLearner, reward: RewardSource) -> None:
        """Give every role in this process a place. Raises ConfigError if they don't fit."""
        turns = learner.turns
        config = self._config.engine
        ppo = self._config.ppo
        if reward.model is not None:
            turns.add(REWARD, reward.model)
        if torch.cuda.is_available():
            room = torch.cuda.get_device_properties(0).total_memory
            if ppo.placement == SHARED:
                beside = ppo.piece_prompts is not None
            else:
                beside = (
                    torch.cuda.device_count() == 1 and config.replicas == 1 and not config.addresses
                )
            turns.check_room(room, round(room * (config.memory_fraction or 0)) if beside else 0)
        else:
            turns.check_room(turns.free_memory())

    def _engine_bytes(self, actor_path: str, actor: Actor) -> int:
        """Bytes of all engines while they are awake: on a GPU their share of it, else weights, keys
        and values. 0 for running servers.
        """
        config = self._config.engine
        if config.addresses:
            return 0
        if torch.cuda.is_available():
            return round(
                config.replicas
                * config.ranks
                * (config.memory_fraction or 0)
                * torch.cuda.get_device_properties(0).total_memory
            )
        entries = actor_stream(actor, DTYPES.get(config.dtype or "")).entries
        weights = sum(kind.itemsize * math.prod(shape) for kind, shape in entries.values())
        text = read_model_config(actor_path)
        return config.replicas * (
            weights + cache_bytes({**text, **(text.get("text_config") or {})}, config)
        )

    def _streams(
        self, tokenizer: PreTrainedTokenizerBase, reader: ImageReader | None = None
    ) -> tuple[PromptStream, PromptStream | None, PromptStream | None]:
        """The prompts, and if configured the evaluation's prompts and texts to train on."""
        config = self._config
        data = self._config.data
        needs_answer = not is_model(config.ppo.reward)
        evaluation = None
        texts = None
        prompts = PromptStream.load(
            data, tokenizer, seed=config.seed, needs_answer=needs_answer, reader=reader
        )
        if config.ppo.eval_every:
            evaluation = PromptStream.load_evaluation(
                data, tokenizer, needs_answer=needs_answer, reader=reader
            )
        if data.ptx_path:
            longest = data.max_prompt_tokens + config.sampling.max_new_tokens
            texts = PromptStream.load_texts(
                data.ptx_path, tokenizer, seed=config.seed, longest=longest
            )
        return prompts, evaluation, texts

    def _reward(self) -> RewardSource:
        """The reward source. If ranks hold the reward model, everything but the model."""
        config = self._config
        if not config.reward_on_ranks:
            return make_reward(config.ppo, _device())
        # An optional dependency.
        from medusa_ppo.ppo.megatron.megatron_learner import RankedReward

        return RankedReward(config.ppo)

    def _learner(
        self, actor_path: str, reward: RewardSource, reader: ImageReader | None = None
    ) -> PPOLearner:
        """Actor, critic and reference, wherever they are trained. A reward model on the ranks is
        given the ranks.
        """
        config = self._config
        if config.actor.backend == "transformers":
            actor = _load(actor_path)
            critic = None
            if config.ppo.advantages == "gae":
                critic = Critic(
                    _load(self._folder_of(config.model.critic_path, phases.CRITIC))
                    if config.model.critic_path
                    else actor
                )
            features = FeatureStore(actor, reader) if reader is not None else None
            return Learner(
                actor,
                critic,
                config.ppo,
                seed=config.seed,
                autocast=config.model.dtype == "bfloat16",
                features=features,
            )
        # An optional dependency.
        from medusa_ppo.ppo.megatron.megatron_learner import (
            MegatronLearner,
            RankedReward,
            RankTeam,
        )

        critic_path = (
            self._folder_of(config.model.critic_path, phases.CRITIC)
            if config.model.critic_path
            else actor_path
        )
        critic = None
        if config.ppo.advantages == "gae" and not config.critic_on_ranks:
            critic = Critic(_load(critic_path))
        self._start_ray()
        with self._progress.phase(phases.RANKS):
            # Heads from a folder may be of any kind.
            team = RankTeam(
                actor_path,
                config,
                with_embedding=config.heads.kind == "hydra" or bool(config.heads.path),
                critic_path=critic_path,
            )
            self._stack.callback(team.close)
        if isinstance(reward, RankedReward):
            reward.attach(team)
        return MegatronLearner(team, actor_path, critic, config, reader)

    def _start_ray(self) -> None:
        """Start Ray, unless it is running: the actor's ranks need it first, the rest later."""
        if self._ray_started:
            return
        config = self._config
        visible = visible_gpus()
        shared = config.ppo.placement == SHARED
        offered = gpu_places(config.engine, visible, shared=shared).ray if visible else None
        with self._progress.phase(phases.RAY):
            self._stack.enter_context(
                local_ray(
                    cpus=config.engine.replicas + config.companion.workers,
                    queue_bytes=config.companion.queue_bytes,
                    gpus=offered,
                )
            )
            self._signals.install()  # Ray has installed its own handler.
        self._ray_started = True

    def save(self, parts: Parts, position: RunPosition) -> None:
        """Save the trained actor, the heads and the last checkpoint, which is the largest: each
        even if another can't be saved. Raises the first error, after all of them were tried.
        """
        config = self._config
        if parts.learner.turns.read_on_device:  # Nobody asks the engine any more.
            parts.learner.turns.sleep(parts.engine, config.engine.sleep_level)
        errors: list[Exception] = []
        with self._progress.phase(phases.SAVE):
            for save in (self._save_actor, self._save_heads, self._save_checkpoint):
                try:
                    save(parts, position)
                # On a full disk safetensors raises an error of its own.
                except Exception as error:
                    if errors:
                        logger.error("This could not be saved either: %s", error)
                    errors.append(error)
            if errors:
                raise errors[0]

    def _save_actor(self, parts: Parts, position: RunPosition) -> None:
        with run_state.fresh_folder(self._config.run_dir / ACTOR_FOLDER) as folder:
            parts.learner.save_actor(folder)
            parts.tokenizer.save_pretrained(folder)

    def _save_heads(self, parts: Parts, position: RunPosition) -> None:
        with parts.learner.turns.aside(ACTOR):  # Its lm_head is saved with them.
            parts.plugin.save_heads(self._config.run_dir / HEADS_FOLDER)

    def _save_checkpoint(self, parts: Parts, position: RunPosition) -> None:
        config = self._config
        if not config.ppo.checkpoint_every:
            return
        # The loop has just saved it, if the last step was due.
        if run_state.is_saved(config.run_dir, position, config):
            return
        with run_state.save_companion(config, parts.plugin, position.next_step):
            run_state.save_checkpoint(
                config.run_dir, parts.learner, position, config, parts.remembered()
            )

    def compare(self, parts: Parts, measure: Callable[[Parts], dict[str, Any]]) -> None:
        """Give `measure` the same parts without the plugin, and a new engine: no speculation,
        compiled, otherwise vLLM's defaults. Its figures go to the run's files; if it fails the run
        is not affected. Without a plugin nothing happens.
        """
        assert self._writer is not None, "compare() follows prepare()"
        if isinstance(parts.plugin, NoPlugin):
            return
        config = self._config
        section = config.engine.model_copy(update={"enforce_eager": False})
        try:
            with self._progress.phase(phases.COMPARE), contextlib.ExitStack() as stack:
                engine = stack.enter_context(
                    make_engine(
                        config.run_dir / ACTOR_FOLDER, None, section, config.seed, supervised=True
                    )
                )
                sync = stack.enter_context(ActorSync(engine, section.dtype or "auto"))
                self._writer.add(
                    comparison=measure(replace(parts, engine=engine, sync=sync, plugin=NoPlugin()))
                )
        except MedusaError as error:
            logger.warning("The plugin was not compared with vLLM alone. %s", error)

    def finish(self) -> dict[str, Any]:
        """Write the report, after `save`. Returns the summary."""
        assert self._writer is not None, "finish() follows prepare()"
        with self._progress.phase(phases.FINISH):
            summary = self._writer.finish()
        self._finished = True
        return summary

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None and hasattr(self, "_signals"):
            self._signals.ignore()
        try:
            if self._writer is not None and not self._finished:
                self._write_partial_report(error)
        finally:
            self._stack.__exit__(kind, error, trace)

    def _write_partial_report(self, error: BaseException | None) -> None:
        assert self._writer is not None
        stopped = isinstance(
            error, KeyboardInterrupt | SystemExit
        )  # Ray turns a signal during its start into SystemExit
        if not stopped:
            first_line = next(iter(str(error).splitlines()), "")
            logger.error(
                "The run failed (%s: %s); finished steps are in %s",
                type(error).__name__,
                first_line,
                self._config.run_dir,
            )
        try:
            self._writer.finish(
                "interrupted" if stopped else "failed", None if stopped else {"error": str(error)}
            )
        except Exception as problem:
            # Show the first error; `medusa-ppo report` can rewrite the report from the files.
            logger.error("The partial report could not be written: %s", problem)

    def _folder_of(self, path: str, phase: str = phases.ACTOR) -> str:
        """A model's folder or hub name; an embedded actor is trained first if it is not in the
        cache.
        """
        if path not in RECIPES:
            return path
        with self._progress.phase(phase):
            advance = self._progress.phase_advanced
            return str(
                ensure_demo_actor(
                    lambda s: advance(s.done, s.total, f"loss {s.loss:.3f}"), recipe=RECIPES[path]
                )
            )

    def _prepare_heads(self, actor: Actor) -> str:
        """Folder with the initial heads; empty if neither drafting nor the companion is wanted:
        then there is no plugin.
        """
        if not num_drafts(self._config) and not self._config.companion.enabled:
            return ""
        folder = OwnedFolder("medusa-ppo-heads-")
        self._stack.callback(folder.close)
        return str(MedusaPlugin.prepare_heads(self._config, actor, folder.path / "heads"))

    def _start_engine(
        self, actor_path: str, heads_path: str, learner: PPOLearner, resume: bool, step: int
    ) -> tuple[RolloutEngine, AnyPlugin]:
        config = self._config
        with self._progress.phase(phases.ENGINE):
            engine = make_engine(
                actor_path,
                heads_path,
                config.engine,
                config.seed,
                supervised=True,
                places=learner.engine_places(),
                step=step,
            )
            self._stack.callback(engine.close)
            if engine.note:
                self._progress.note(engine.note)
            if not heads_path:
                return engine, NoPlugin()
            resume_from = run_state.companion_state(config.run_dir) if resume else ""
            plugin = MedusaPlugin.start(
                config, learner.actor, engine, config.run_dir, resume_from=resume_from
            )
            self._stack.callback(plugin.close)
            return engine, plugin


def _load(path: str) -> PreTrainedModel:
    """A model with float32 weights on this process's device; model.dtype is that of products."""
    model = load_actor(path, "float32")
    nn.Module.to(model, _device())
    return model


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
