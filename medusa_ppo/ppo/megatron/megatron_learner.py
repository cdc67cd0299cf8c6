"""PPO with a Megatron actor: the loop's process holds the companion and the engines, and drives the
actor's ranks.

    loop (critic,  --rollouts, scores-->  rank 0 ... N-1 in Ray actors (actor, reference, optimizer;
    reward model)  <--log-probs, hidden states, weights in buckets--    critic and reward model as
                                                                        actor.roles says)

A critic in the loop works at the same time as the ranks. A critic on the ranks works before or
after the actor and is sharded like it. Ranks meet in collectives, so all of them must get the same
calls in the same order, whichever thread of the loop makes them: a lock guards the code that sends
a call to all ranks. The actor's weights come as a stream of buckets; the first rank of each stage
sends that stage's weights. Ray pauses a stage that is more than `BUCKETS_AHEAD` buckets ahead of
the reader. With ppo.placement=shared engines use the ranks' devices, in turn with them.

Shape letters: B sequences, R response positions, T tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import ray
import torch
from ray.util.placement_group import PlacementGroup
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, GenerationConfig

from heads.errors import RunError
from heads.tensorfile import StateWriter
from medusa_ppo.actors.actor_view import SpreadActor
from medusa_ppo.actors.hf import load_tokenizer
from medusa_ppo.actors.megatron_layout import (
    LOGITS,
    VALUE,
    LlamaSizes,
    Top,
    checkpoint_shapes,
    saved_name,
)
from medusa_ppo.actors.vision import (
    ImageReader,
    by_content,
    images_of,
    tower_shapes,
    tower_tensors,
)
from medusa_ppo.config.ppo_section import PPOConfig
from medusa_ppo.config.run_config import RunConfig
from medusa_ppo.contract import metrics as names
from medusa_ppo.contract.rollouts import Sampling
from medusa_ppo.engines.actor_sync import actor_stream
from medusa_ppo.plugin.piece_states import PickingTap
from medusa_ppo.ppo.batch import PPOBatch
from medusa_ppo.ppo.critic import Critic, ValueTotals
from medusa_ppo.ppo.learner import PPOLearner, Tap
from medusa_ppo.ppo.megatron.megatron_rank import ActorRank
from medusa_ppo.ppo.megatron.rank_optimizer import MOMENTS, WEIGHTS
from medusa_ppo.ppo.megatron.rank_places import bundle_of, rank_bundles, ranks_of_engines
from medusa_ppo.ppo.megatron.team_turns import TeamTurns
from medusa_ppo.ppo.placement import ACTOR, CRITIC, REWARD
from medusa_ppo.ppo.rewards import JudgedTexts, ReadReward
from medusa_ppo.ppo.role_checks import rank_sizes
from medusa_ppo.ppo.run_progress import Timeline
from medusa_ppo.ppo.scores import PolicyScores, Scores
from medusa_ppo.ppo.update_totals import UpdateTotals
from medusa_ppo.runtime.hardware import cpu_has_bfloat16, settled
from medusa_ppo.runtime.processes import (
    TOKEN,
    SharedPlace,
    in_bundle,
    ray_errors,
    release,
    reserve,
    run_hardware,
)

logger = logging.getLogger(__name__)

BUCKETS_AHEAD = 2
PLACE_TIMEOUT_S = 300.0


class RankTeam:
    """The actor's ranks, each in a Ray actor. The caller runs `ray.init`."""

    def __init__(
        self,
        path: str,
        config: RunConfig,
        *,
        with_embedding: bool,
        critic_path: str | None = None,
    ) -> None:
        """
        Args:
            path: folder of the actor's checkpoint, readable from all nodes.
            with_embedding: whether `tables` returns the input embedding too.
            critic_path: folder of the checkpoint that a critic on the ranks starts from; None: the
                actor's.

        Raises:
            ModelError, ConfigError: as `rank_sizes`, for each role on the ranks.
            RunError: there is no room for the ranks, or one did not start.
        """
        config = settled(config, run_hardware)
        section = config.actor
        self._config = config
        self.count = section.ranks
        sizes = rank_sizes(config, path, critic_path or path)
        self.sizes = sizes[ACTOR]
        self.critic_sizes = sizes.get(CRITIC)
        self._handing = threading.Lock()
        begun_from = (
            (critic_path or path) if CRITIC in sizes else None,
            config.ppo.reward if REWARD in sizes else None,
        )
        # The cluster's GPUs, not this machine's: the loop's process may run on a node without a
        # GPU.
        gpus = bool(ray.cluster_resources().get("GPU"))
        resources = {section.resource: TOKEN} if section.resource else {}
        # A whole GPU, also if an engine uses it too: nobody else is to come there.
        each = {"GPU" if gpus else "CPU": 1.0 if gpus else TOKEN, **resources}
        self._ranks: list[Any] = []
        self._group: PlacementGroup | None = None
        try:
            self._group = reserve(
                rank_bundles(config, each),
                "actor's ranks",
                timeout_s=PLACE_TIMEOUT_S,
            )
            for rank in range(section.ranks):
                options: dict[str, Any] = {
                    # No more than its bundle holds; otherwise Ray refuses to place it.
                    "num_cpus": 0 if gpus else TOKEN,
                    "num_gpus": 1 if gpus else 0,
                    "resources": resources or None,
                    "runtime_env": {
                        "env_vars": {
                            # Ray sets this to 1 in a process that requested less than a core, and
                            # torch obeys it.
                            "OMP_NUM_THREADS": str(config.ppo.threads),
                            # Without this, each rank that imports Megatron warns that
                            # TransformerEngine and Apex are missing.
                            "PYTHONWARNINGS": "ignore",
                        }
                    },
                    **in_bundle(self._group, bundle_of(config, rank)),
                }
                kind: Any = ray.remote(**options)(ActorRank)
                self._ranks.append(kind.remote(rank, path, config, with_embedding, *begun_from))
            # The first rank opens the meeting place on its own node; which node that is, is known
            # only after Ray has placed it.
            self.call("start", self.wait([self._ranks[0].meet_here.remote()])[0])
        except BaseException:
            self.close()
            raise

    def engine_places(self) -> list[SharedPlace]:
        """The places of engines that share the ranks' devices (ppo.placement=shared)."""
        shares = ranks_of_engines(self._config)
        gpus: list[tuple[str, ...]] = self.call("gpus") if shares else []
        return [
            SharedPlace(
                in_bundle(self._group, bundle_of(self._config, share[0])),
                tuple(gpu for rank in share for gpu in gpus[rank]),
            )
            for share in shares
        ]

    def begin(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method on all ranks; returns references to the answers. Safe from any thread."""
        with self._handing:
            return [getattr(rank, method).remote(*arguments) for rank in self._ranks]

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method on all ranks and return the answers of those that have one."""
        return self.wait(self.begin(method, *arguments))

    def wait(self, references: list[Any]) -> list[Any]:
        """Answers that are not None. The first error ends the wait, because other ranks may be
        waiting for the one that failed.
        """
        left = list(references)
        with _rank_errors():
            while left:
                done, left = ray.wait(left)
                ray.get(done)
            return [answer for answer in ray.get(references) if answer is not None]

    def stream(self, role: str, what: str, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """The tensors of the actor's or critic's checkpoint as the stages send them; only some are
        in memory at a time.
        """
        options: dict[str, Any] = {
            "num_returns": "streaming",
            "_generator_backpressure_num_objects": BUCKETS_AHEAD,
        }
        # All start before the first one is read: the ranks of a stage, or all replicas, assemble
        # each tensor in collectives, and one that had not started would block the others.
        with self._handing:
            streams = [
                rank.give_out.options(**options).remote(role, what, dtype) for rank in self._ranks
            ]
        for stream in streams:
            for reference in stream:
                with _rank_errors():
                    tensors: dict[str, Tensor] = ray.get(reference)
                yield from tensors.items()

    def close(self) -> None:
        """End all ranks. Safe to call again."""
        ranks = self._ranks
        self._ranks = []
        group = self._group
        self._group = None
        if not ray.is_initialized():
            return
        for rank in ranks:
            ray.kill(rank)
        release(group)


def _rank_errors() -> AbstractContextManager[None]:
    return ray_errors(
        RunError, "A rank of the actor", "Read the log of Ray's worker, and continue with --resume."
    )


class RankedActor(SpreadActor):
    """The actor on the ranks, as plugin and sync see it."""

    def __init__(self, team: RankTeam, path: str) -> None:
        """
        Args:
            path: folder of the actor's checkpoint. A vision tower is read from there whenever it is
                needed: it is frozen.
        """
        self._team = team
        self._path = path
        self._tower = tower_shapes(path) if team.sizes.mrope_section else {}
        self._tables: tuple[Tensor, Tensor | None] | None = None
        self._hidden_BTD: Tensor | None = None

    @contextlib.contextmanager
    def tap(self) -> Iterator[RankedActor]:
        """A context around `hold`: the ranks have already made the pass."""
        yield self

    def hold(self, hidden_BTD: Tensor) -> None:
        self._hidden_BTD = hidden_BTD

    @property
    def hidden_BTD(self) -> Tensor:
        assert self._hidden_BTD is not None, "hold comes first"
        return self._hidden_BTD

    @property
    def lm_head_VD(self) -> Tensor:
        return self._whole_tables()[0]

    @property
    def embedding_VD(self) -> Tensor:
        embedding_VD = self._whole_tables()[1]
        assert embedding_VD is not None, "the team was made with its embedding"
        return embedding_VD

    def changed(self) -> None:
        """Call this when the ranks have new weights."""
        self._tables = None

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return checkpoint_shapes(self._team.sizes) | self._tower

    def tensors(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        yield from self._team.stream(ACTOR, WEIGHTS, dtype)
        for name, tensor in tower_tensors(self._path) if self._tower else ():
            yield name, tensor.to(dtype)

    def _whole_tables(self) -> tuple[Tensor, Tensor | None]:
        if self._tables is None:
            (self._tables,) = self._team.call("tables")
        return self._tables


class MegatronLearner(PPOLearner):
    """Actor and reference on ranks; the critic is on the ranks too, or in this process."""

    actor: RankedActor

    def __init__(
        self,
        team: RankTeam,
        path: str,
        critic: Critic | None,
        config: RunConfig,
        reader: ImageReader | None = None,
    ) -> None:
        """
        Args:
            team: started ranks; the caller closes it.
            path: folder of the actor's checkpoint; its configuration is saved with the actor.
            critic: the value network, if it is in this process; None: there is no critic, or it is
                on the ranks.
            config: the run's configuration, the same that the ranks have.
            reader: reads the prompts' images, if there are any.
        """
        turns = TeamTurns(config.ppo.placement, team)
        # Of the critic, if it is in this process: the ranks' models are in this dtype. A loop on a
        # node without a GPU has the dtype of the nodes with them, and a CPU without units for
        # bfloat16 takes 16 times as long with it.
        able = torch.cuda.is_available() or cpu_has_bfloat16()
        super().__init__(
            critic,
            config.ppo,
            seed=config.seed,
            autocast=config.model.dtype == "bfloat16" and able,
            turns=turns,
        )
        self._team = team
        self._critic_on_ranks = config.critic_on_ranks
        self.has_critic |= self._critic_on_ranks
        self._path = path
        # The last batch and its reference in Ray's store: scoring and update read the same
        # rollouts.
        self._handed: tuple[PPOBatch, Any] | None = None
        self.actor = RankedActor(team, path)
        self._reader = reader
        self.device = torch.device("cpu") if critic is None else next(critic.parameters()).device

    def engine_places(self) -> list[SharedPlace]:
        return self._team.engine_places()

    def begin_batch(self, sampling: Sampling) -> None:
        self._team.call("begin_batch", sampling)

    def _begin_scoring(
        self, batch: PPOBatch, sampling: Sampling, tap: Tap | None, timeline: Timeline
    ) -> Callable[[], PolicyScores]:
        picks = tap if isinstance(tap, PickingTap) else None
        wanted = None if picks is None else picks.wanted
        tapped = tap is not None if picks is None else wanted is not None
        answers = self._team.begin(
            "score", self._hand(batch), batch.pad_id, batch.first, sampling, tapped, wanted
        )

        def finish() -> PolicyScores:
            total = PolicyScores.zeros(batch)
            with timeline.at_work("actor"):  # The rest of its passes and the reference's.
                shares = self._team.wait(answers)
            for share in shares:
                total.add_share(share.policy)
                if share.states is None:
                    continue
                if picks is not None:
                    picks.put(dict(zip(share.sequences, share.states, strict=True)))
                elif tap is not None:
                    hidden_BRD = pad_sequence(list(share.states), batch_first=True)
                    # Responses start at column 1: column t is predicted from the state at t - 1.
                    mask_BT = torch.nn.functional.pad(
                        batch.mask_SR[list(share.sequences), : hidden_BRD.shape[1]],
                        (1, 0),
                        value=False,
                    )
                    with tap(self.actor, mask_BT, share.sequences):
                        self.actor.hold(hidden_BRD)
            return total

        return finish

    def _begin_update(
        self, batch: PPOBatch, scores: Scores, sampling: Sampling, step: int, texts: PPOBatch | None
    ) -> Callable[[], UpdateTotals]:
        answers = self._team.begin(
            "update",
            self._hand(batch),
            batch.pad_id,
            ray.put(scores),
            sampling,
            step,
            None if texts is None else ray.put(texts.rollouts),
        )
        # Set before the answers arrive: from now on, a caller that needs the tables waits for the
        # ranks, which take one call at a time, and gets the updated ones.
        self.actor.changed()
        return lambda: UpdateTotals.over(self._team.wait(answers))

    def _begin_values(self, batch: PPOBatch, timeline: Timeline) -> Callable[[], Tensor]:
        if not self._critic_on_ranks:
            return super()._begin_values(batch, timeline)
        answers = self._team.begin("values", self._hand(batch), batch.pad_id, batch.first)

        def finish() -> Tensor:
            with timeline.at_work(
                "critic"
            ):  # After the actor, because ranks do one thing at a time.
                shares: list[Tensor] = self._team.wait(answers)
            return torch.stack(shares).sum(dim=0)

        return finish

    def _update_critic(
        self, batch: PPOBatch, scores: Scores, step: int, share: float
    ) -> ValueTotals:
        if not self._critic_on_ranks:
            return super()._update_critic(batch, scores, step, share)
        return ValueTotals.over(
            self._team.call("update_critic", self._hand(batch), batch.pad_id, ray.put(scores), step)
        )

    def prefetch_images(self, prompts: Iterable[Sequence[int]]) -> None:
        # Nobody waits for it: each rank has a thread for its tower.
        self._team.begin("prefetch_images", ray.put(list(prompts)))

    def _image_figures(self, batch: PPOBatch) -> dict[str, float]:
        if self._reader is None:
            return {}
        shares = self._team.call("image_figures")
        return {
            # Replicas may see the same image, and each of them computes it.
            names.IMAGES: len(by_content(images_of(batch.rollouts.prompts))),
            names.TOWER_RUNS: sum(share[names.TOWER_RUNS] for share in shares),
            names.TOWER_S: max(share[names.TOWER_S] for share in shares),
        }

    def take_memory(self) -> dict[str, Any]:
        return super().take_memory() | _of_one_rank(self._team.call("memory"))

    def _hand(self, batch: PPOBatch) -> Any:
        """The rollouts in Ray's store, put there once for scoring and update."""
        if self._handed is None or self._handed[0] is not batch:
            self._handed = (batch, ray.put(batch.rollouts))
        return self._handed[1]

    def save_actor(self, folder: Path) -> None:
        config = AutoConfig.from_pretrained(self._path, trust_remote_code=False)
        # The weights are written in float32, whatever dtype the checkpoint started in.
        for part in (config, *(getattr(config, name) for name in config.sub_configs)):
            part.dtype = torch.float32
        config.save_pretrained(folder)
        with contextlib.suppress(OSError):  # Not every checkpoint has one.
            GenerationConfig.from_pretrained(self._path).save_pretrained(folder)
        actor_stream(self.actor).write(folder / "model.safetensors", None)
        if self._reader is not None:
            self._reader.save(folder)

    def _save_policy(self, folder: Path) -> None:
        self._save_role(ACTOR, self._team.sizes, LOGITS, folder)

    def _save_critic(self, folder: Path) -> None:
        if self._team.critic_sizes is None:
            super()._save_critic(folder)
        else:
            self._save_role(CRITIC, self._team.critic_sizes, VALUE, folder)

    def _save_role(self, role: str, sizes: LlamaSizes, top: Top, folder: Path) -> None:
        """Write `ROLE.safetensors` and `ROLE_optimizer.safetensors`, in float32."""

        def named(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
            return {saved_name(name, sizes, top): shape for name, shape in shapes.items()}

        shapes = named(checkpoint_shapes(sizes, top))
        if role == ACTOR:
            # The actor's tower as well: never trained, but a learner on transformers expects it.
            whole, tensors = named(self.actor.shapes()), self.actor.tensors(torch.float32)
        else:
            whole, tensors = shapes, self._team.stream(role, WEIGHTS, torch.float32)
        weights = {name: (torch.float32, shape) for name, shape in whole.items()}
        with StateWriter(folder / f"{role}.safetensors", weights) as writer:
            for name, tensor in tensors:
                writer.put(saved_name(name, sizes, top), tensor)
        # AdamW has no moments before its first step. A learner on transformers writes none then
        # either, so each can resume from what the other saved.
        steps = max(self._team.call("steps", role))
        entries = {
            f"{name}/{moment}": (torch.float32, shape)
            for name, shape in shapes.items()
            for moment in MOMENTS
            if steps
        }
        entries |= {f"{name}/step": (torch.float32, ()) for name in shapes if steps}
        with StateWriter(folder / f"{role}_optimizer.safetensors", entries) as writer:
            for name in shapes if steps else ():
                writer.put(f"{name}/step", torch.tensor(steps))
            for moment in MOMENTS if steps else ():
                for name, tensor in self._team.stream(role, moment, torch.float32):
                    writer.put(f"{saved_name(name, sizes, top)}/{moment}", tensor)

    def _load_policy(self, folder: Path) -> None:
        # Ranks on other nodes have another working directory.
        self._team.call("load", ACTOR, os.path.abspath(folder))
        self.actor.changed()

    def _load_critic(self, folder: Path) -> None:
        if self._critic_on_ranks:
            self._team.call("load", CRITIC, os.path.abspath(folder))
        else:
            super()._load_critic(folder)


class RankedReward(ReadReward):
    """The scores of the reward model on the ranks, for whole texts. Texts are tokenized here, so
    faults of its tokenizer or template appear before the ranks start. Call `attach` before `score`.
    """

    def __init__(self, config: PPOConfig) -> None:
        """
        Raises:
            ConfigError, ModelError: as `ReadReward`.
        """
        path = config.reward
        model = AutoConfig.from_pretrained(path, trust_remote_code=False)
        super().__init__(
            path,
            load_tokenizer(path),
            model,
            model.vocab_size,
            config.reward_template,
            cuts=config.reward_too_long == "cut",
        )
        self._team: RankTeam | None = None

    def attach(self, team: RankTeam) -> None:
        """Set the ranks that score."""
        self._team = team

    def _outputs(self, texts: Sequence[JudgedTexts]) -> Iterator[Tensor]:
        assert self._team is not None, "attach comes first"
        shares: list[Tensor] = self._team.call("judge", ray.put(list(texts)))
        # Each replica has zeros where others scored, so the sum is complete, to the bit.
        scores_NB = torch.stack(shares).sum(dim=0)
        yield from scores_NB.unsqueeze(-1)


def _of_one_rank(figures: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of the rank that used the most memory, and those of its transfers."""
    return max(figures, key=lambda found: found[names.LEDGER_PEAK])
