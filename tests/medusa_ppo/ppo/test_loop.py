"""The loop on an engine that samples with transformers: it learns, repeats itself, resumes, and is
the same with and without the plugin.
"""

from __future__ import annotations

import copy
import itertools
import json
import os
import signal
import time
import types
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from heads.errors import CompanionError
from medusa_ppo.actors.hf import load_actor
from medusa_ppo.config.run_config import RunConfig, build_config
from medusa_ppo.contract import metrics as names
from medusa_ppo.engines.actor_sync import ActorSync
from medusa_ppo.plugin.medusa_plugin import MedusaPlugin, initial_heads
from medusa_ppo.plugin.no_plugin import NoPlugin
from medusa_ppo.ppo import loop
from medusa_ppo.ppo.critic import Critic
from medusa_ppo.ppo.generation import Prompt, PromptStream
from medusa_ppo.ppo.learner import Learner
from medusa_ppo.ppo.loop import PPOLoop
from medusa_ppo.ppo.rewards import CallableReward
from medusa_ppo.ppo.run_progress import ProgressSink
from medusa_ppo.ppo.run_state import RunPosition, read_position, save_companion, saved_folder
from medusa_ppo.ppo.session import Parts, RunSession
from medusa_ppo.reports.store import RunWriter, read_run
from medusa_ppo.runtime.processes import StopSignals
from tests.medusa_ppo.conftest import RecordingCompanion

LETTERS = range(1, 5)


class Numbers:
    """A tokenizer whose text is the token ids."""

    pad_token_id = 0

    def batch_decode(self, ids: list[list[int]], skip_special_tokens: bool = False) -> list[str]:
        return [" ".join(str(i) for i in row if i or not skip_special_tokens) for row in ids]


class Steps(Numbers):
    """Each token is a step."""

    def batch_decode(self, ids: list[list[int]], skip_special_tokens: bool = False) -> list[str]:
        return ["".join(f"{token}|" for token in row if token) for row in ids]


def identity(prompt: str, response: str, row: dict) -> float:
    """Share of the response's three places that repeat the prompt."""
    return sum(word == prompt for word in response.split()) / 3


def settings(tmp_path: Path, **ppo) -> RunConfig:
    section = {
        "steps": 3,
        "prompts_per_step": 4,
        "minibatch_size": 8,
        "micro_batch_size": 8,
        "actor_learning_rate": 3e-3,
        "critic_learning_rate": 3e-3,
        "kl_coefficient": 0.01,
        "checkpoint_every": None,
        **ppo,
    }
    sampling = {"max_new_tokens": 3, "responses_per_prompt": 4, "seeded": True}
    return build_config({"name": "run", "out": str(tmp_path), "ppo": section, "sampling": sampling})


class LoopScene:
    """A loop with its parts, on a tiny actor."""

    def __init__(self, config: RunConfig, actor, engine_class, plugin_of=None) -> None:
        actor = copy.deepcopy(actor)
        self.config = config
        self.engine = engine_class(actor)
        self.learner = Learner(actor, Critic(actor), config.ppo, seed=config.seed)
        self.sync = ActorSync(self.engine)
        self.plugin = plugin_of(self.engine) if plugin_of else NoPlugin()
        prompts = PromptStream([Prompt(str(i), (i,), {}) for i in LETTERS], seed=config.seed)
        self.parts = Parts(
            prompts,
            Numbers(),
            self.learner,
            CallableReward(identity, "identity"),
            self.engine,
            self.sync,
            self.plugin,
        )

    def run(self, position=None, resume_step: int | None = None, cls=PPOLoop) -> list[dict]:
        writer = RunWriter(
            self.config.run_dir, self.config.model_dump(mode="json"), resume_step=resume_step
        )
        cls(self.config, self.parts, ProgressSink(), position).run(writer)
        writer.close()
        self.sync.close()
        return list(read_run(self.config.run_dir).steps)

    def weights(self) -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in self.learner.actor.parameters()])


def test_ppo_learns_to_repeat_the_prompt(tmp_path: Path, tiny_actor, sampling_engine):
    scene = LoopScene(settings(tmp_path, steps=30, epochs=4), tiny_actor(), sampling_engine)
    rewards = [step[names.REWARD_MEAN] for step in scene.run()]
    assert rewards[0] < 0.2 and sum(rewards[-3:]) / 3 > 0.6, rewards


def test_same_seed_same_numbers(tmp_path: Path, tiny_actor, sampling_engine):
    found = []
    for name in ("a", "b"):
        scene = LoopScene(settings(tmp_path / name), tiny_actor(), sampling_engine)
        steps = [
            {k: v for k, v in step.items() if not k.endswith(("_s", "idle_frac", "_gib"))}
            for step in scene.run()
        ]
        found.append((steps, scene.weights()))
    assert found[0][0] == found[1][0] and torch.equal(found[0][1], found[1][1])


def test_a_step_reports_what_the_metrics_file_names(tmp_path: Path, tiny_actor, sampling_engine):
    step = LoopScene(settings(tmp_path, steps=1), tiny_actor(), sampling_engine).run()[0]
    assert set(step) <= set(names.describe())
    for name in (
        names.STEP,
        names.WALL_S,
        names.POLICY_VERSION,
        names.REWARD_MEAN,
        names.CORRECT_FRAC,
        names.KL_REFERENCE,
        names.ENTROPY,
    ):
        assert name in step
    assert step[names.LOGPROB_GAP] < 1e-5, "engine and learner compute the same log-probs here"
    assert 1 <= step[names.RESPONSE_LENGTH] <= 3 and 0 <= step[names.TRUNCATED_FRAC] <= 1


def test_the_engine_gets_every_update(tmp_path: Path, tiny_actor, sampling_engine):
    scene = LoopScene(settings(tmp_path), tiny_actor(), sampling_engine)
    steps = scene.run()
    assert [step[names.POLICY_VERSION] for step in steps] == [
        0,
        1,
        2,
    ] and scene.engine.policy_version == 3
    assert all(step[names.LOGPROB_GAP] < 1e-5 for step in steps), (
        "a sync that misses weights would show here"
    )
    torch.testing.assert_close(
        scene.engine.actor.lm_head.weight, scene.learner.actor.lm_head.weight, rtol=0, atol=0
    )


def test_resumed_run_is_the_run_that_never_stopped(tmp_path: Path, tiny_actor, sampling_engine):
    whole = LoopScene(settings(tmp_path / "whole", steps=4), tiny_actor(), sampling_engine)
    expected = whole.run()
    LoopScene(
        settings(tmp_path / "cut", steps=3, checkpoint_every=2), tiny_actor(), sampling_engine
    ).run()
    config = settings(tmp_path / "cut", steps=4, checkpoint_every=2)
    rest = LoopScene(config, tiny_actor(), sampling_engine)
    position = read_position(config.run_dir, config, ["ppo.steps"])
    rest.learner.load(saved_folder(config.run_dir))
    rest.sync(rest.learner.actor, position.policy_version)
    found = rest.run(position, resume_step=position.next_step)
    assert [s[names.STEP] for s in found] == [0, 1, 2, 3]
    assert [s[names.REWARD_MEAN] for s in found] == [s[names.REWARD_MEAN] for s in expected]
    assert torch.equal(rest.weights(), whole.weights())
    assert found[-1][names.WALL_S] > found[1][names.WALL_S], "the clock goes on"


def test_the_plugin_changes_no_bit_of_the_policy(tmp_path: Path, tiny_actor, sampling_engine):
    recorder = RecordingCompanion()
    plain = LoopScene(settings(tmp_path / "plain"), tiny_actor(), sampling_engine)
    tapped = LoopScene(
        settings(tmp_path / "tapped"),
        tiny_actor(),
        sampling_engine,
        lambda engine: MedusaPlugin(engine, recorder),
    )
    expected = plain.run()
    found = tapped.run()
    assert torch.equal(plain.weights(), tapped.weights())
    assert [s[names.ACTOR_GRAD_NORM] for s in expected] == [s[names.ACTOR_GRAD_NORM] for s in found]
    assert len(recorder.batches) == 3, "one batch a step reached the companion"
    assert recorder.batches[0].hidden_MD.shape == (round(found[0][names.RESPONSE_LENGTH] * 16), 32)


def forward_calls(tmp_path: Path, actor, engine_class, plugin_of) -> int:
    """Passes over the actor's backbone in three whole steps of the loop."""
    scene = LoopScene(settings(tmp_path), actor, engine_class, plugin_of)
    calls: list[int] = []
    scene.learner.actor.base_model.register_forward_hook(lambda *_: calls.append(1))
    scene.run()
    return len(calls)


def test_the_loop_makes_as_many_passes_over_the_actor_with_the_plugin_as_without(
    tmp_path: Path, tiny_actor, sampling_engine
):
    recorder = RecordingCompanion()
    without = forward_calls(tmp_path / "without", tiny_actor(), sampling_engine, None)
    with_plugin = forward_calls(
        tmp_path / "with",
        tiny_actor(),
        sampling_engine,
        lambda engine: MedusaPlugin(engine, recorder),
    )
    assert with_plugin == without > 0 and len(recorder.batches) == 3


@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_that_sleeps_through_every_update_changes_nothing_but_its_heads(
    tmp_path: Path, tiny_actor, sampling_engine, level
):
    """It sleeps from the rollouts to the sync of each step; what a deep sleep threw away is there
    again when it generates.
    """
    awake = LoopScene(settings(tmp_path / "awake"), tiny_actor(), sampling_engine)
    expected = awake.run()
    config = settings(tmp_path / "asleep")
    config = config.model_copy(
        update={"engine": config.engine.model_copy(update={"sleep_level": level})}
    )
    heads = initial_heads(config, tiny_actor())
    asleep = LoopScene(
        config,
        tiny_actor(),
        sampling_engine,
        lambda engine: MedusaPlugin(engine, RecordingCompanion(), heads=heads),
    )
    found = asleep.run()
    assert asleep.engine.slept == [level] * 3 and not asleep.engine.asleep
    assert [s[names.REWARD_MEAN] for s in found] == [s[names.REWARD_MEAN] for s in expected]
    assert torch.equal(asleep.weights(), awake.weights())
    assert [s[names.HEADS_VERSION] for s in found] == [0, 0, 0], "fed again before each generation"
    assert asleep.engine.heads_version == (-1 if level == 2 else 0), (
        "until the next one it knows that it has none"
    )


def test_removing_the_plugin_is_deleting_its_lines(tmp_path: Path, tiny_actor, sampling_engine):
    """The loop's own source, without every line marked `# medusa`, is a PPO loop that gives the
    same weights.
    """
    source = Path(loop.__file__).read_text()
    kept = [line for line in source.splitlines() if not line.endswith("# medusa")]
    assert len(kept) <= len(source.splitlines()) - 10
    assert "plugin" not in "".join(kept).split('"""', 2)[2].replace("# medusa", "")
    stripped = types.ModuleType("loop_without_plugin")
    exec(compile("\n".join(kept), "loop_without_plugin", "exec"), stripped.__dict__)
    found = []
    for name, cls in (("whole", PPOLoop), ("stripped", stripped.PPOLoop)):
        scene = LoopScene(settings(tmp_path / name), tiny_actor(), sampling_engine)
        scene.run(cls=cls)
        found.append(scene.weights())
    assert torch.equal(*found)


def test_gradients_with_and_without_the_plugin_are_the_same_bits(
    tmp_path: Path, tiny_actor, sampling_engine, monkeypatch
):
    found = []
    for plugin_of in (None, lambda engine: MedusaPlugin(engine, RecordingCompanion())):
        scene = LoopScene(
            settings(tmp_path / str(len(found)), steps=1, epochs=1, minibatch_size=16),
            tiny_actor(),
            sampling_engine,
            plugin_of,
        )
        gradients: list[torch.Tensor] = []
        actor = scene.learner.actor
        monkeypatch.setattr(
            scene.learner.actor_optimizer,
            "step",
            lambda a=actor, g=gradients: g.extend(p.grad.clone() for p in a.parameters()),
        )
        scene.run()
        found.append(gradients)
    assert len(found[0]) > 5 and any(g.any() for g in found[0])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_the_rollouts_of_the_last_steps_stay_on_disk(tmp_path: Path, tiny_actor, sampling_engine):
    config = settings(tmp_path)
    config = config.model_copy(
        update={"report": config.report.model_copy(update={"keep_rollouts": 2})}
    )
    steps = LoopScene(config, tiny_actor(), sampling_engine).run()
    files = sorted((config.run_dir / "rollouts").iterdir())
    assert [file.name for file in files] == ["step-000001.jsonl", "step-000002.jsonl"]
    rows = [json.loads(line) for line in files[1].read_text().splitlines()]
    assert {row["policy_version"] for row in rows} == {2} and len(rows) == 16
    assert sum(len(row["response_ids"]) for row in rows) / 16 == steps[2][names.RESPONSE_LENGTH]
    assert all(
        len(row["logprobs"]) == len(row["response_ids"]) and len(row["prompt_ids"]) == 1
        for row in rows
    )
    LoopScene(config, tiny_actor(), sampling_engine).run()
    (earlier,) = (config.run_dir / "earlier").iterdir()
    assert len(list((earlier / "rollouts").iterdir())) == 2, (
        "an earlier run's rollouts are not mixed with this one's"
    )


@pytest.mark.parametrize("earlier", [False, True])
def test_a_checkpoint_without_the_companions_newest_state_says_so(
    tmp_path: Path, tiny_actor, sampling_engine, caplog: pytest.LogCaptureFixture, earlier: bool
):
    """It was written without a word. The actor is not given up for its heads."""

    class UnsavedCompanion(RecordingCompanion):
        def save(self, folder: Path) -> bool:
            return False

    config = settings(tmp_path, steps=1, checkpoint_every=1)
    waiting = config.companion.model_copy(update={"wait": True})
    config = config.model_copy(update={"companion": waiting})
    LoopScene(config, tiny_actor(), sampling_engine).run()
    assert not caplog.records, "no companion, no state"
    scene = LoopScene(
        config,
        tiny_actor(),
        sampling_engine,
        lambda engine: MedusaPlugin(engine, UnsavedCompanion()),
    )
    state = config.run_dir / "companion" / "companion.safetensors"
    if earlier:
        state.parent.mkdir()
        state.write_bytes(b"")
        os.utime(state, (0, time.mktime((2026, 1, 2, 3, 4, 5, 0, 0, -1))))
    with save_companion(config, scene.plugin, 7):
        pass
    (told,) = [record.getMessage() for record in caplog.records]
    assert "step 7" in told
    assert ("of 2026-01-02 03:04:05" if earlier else "holds none") in told
    scene.run()
    assert "could not be saved for the checkpoint of step 1" in caplog.text
    assert (config.run_dir / "checkpoint" / "state.json").is_file()


def test_a_companion_that_ends_the_run_does_not_take_the_checkpoint_with_it(
    tmp_path: Path, tiny_actor, sampling_engine, caplog: pytest.LogCaptureFixture
):
    """With `on_error=raise`, what the last checkpoint had missed was lost with the run."""

    class BrokenCompanion(RecordingCompanion):
        def save(self, folder: Path) -> bool:
            raise CompanionError("The companion failed.")

    config = settings(tmp_path, steps=2, checkpoint_every=1)
    waiting = config.companion.model_copy(update={"wait": True, "on_error": "raise"})
    config = config.model_copy(update={"companion": waiting})
    scene = LoopScene(
        config,
        tiny_actor(),
        sampling_engine,
        lambda engine: MedusaPlugin(engine, BrokenCompanion(), on_error="raise"),
    )
    with pytest.raises(CompanionError):
        scene.run()
    position = read_position(config.run_dir, config)
    assert position.next_step == 1 and "checkpoint of step 1" in caplog.text


def test_metrics_lines_are_plain_json(tmp_path: Path, tiny_actor, sampling_engine):
    scene = LoopScene(settings(tmp_path, steps=1), tiny_actor(), sampling_engine)
    scene.run()
    (line,) = (scene.config.run_dir / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)[names.STEP] == 0


class Saved(Numbers):
    def save_pretrained(self, folder: Path) -> None:
        (folder / "tokenizer.json").write_text("{}")


def best(config: RunConfig) -> dict:
    return json.loads((config.run_dir / "best" / "evaluation.json").read_text())


def test_evaluations_change_no_bit_and_the_best_actor_is_kept(
    tmp_path: Path, tiny_actor, sampling_engine
):
    found = []
    for every in (None, 2):
        config = settings(tmp_path / str(every), steps=6, epochs=4, eval_every=every)
        scene = LoopScene(config, tiny_actor(), sampling_engine)
        scene.parts.tokenizer = Saved()
        if every:
            scene.parts.evaluation = PromptStream(
                [Prompt(str(i), (i,), {}) for i in range(5, 13)], seed=0
            )
        found.append((scene.run(), scene.weights()))
    (plain, before), (steps, after) = found
    assert torch.equal(before, after) and not any(names.EVAL_REWARD in step for step in plain)
    evaluated = {
        step[names.STEP]: step[names.EVAL_REWARD] for step in steps if names.EVAL_REWARD in step
    }
    assert list(evaluated) == [1, 3, 5]
    assert best(config)[names.STEP] == max(evaluated, key=evaluated.get) and best(config)[
        names.EVAL_REWARD
    ] == max(evaluated.values())
    kept = load_actor(config.run_dir / "best")
    if best(config)[names.STEP] == 5:
        assert torch.equal(torch.cat([p.detach().flatten() for p in kept.parameters()]), after)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_the_same_actor_gets_the_same_evaluation_in_every_step_and_run(
    tmp_path: Path, tiny_actor, sampling_engine, temperature: float
):
    """Whether or not the requests of rollouts have seeds; these stay as they are."""
    found = []
    for run, seeded in enumerate((False, False, True)):
        config = settings(tmp_path / str(run), steps=2, eval_every=1, actor_learning_rate=1e-12)
        sampling = {"seeded": seeded, "temperature": temperature}
        config = config.model_copy(
            update={"sampling": config.sampling.model_copy(update=sampling), "seed": 5}
        )
        scene = LoopScene(config, tiny_actor(), sampling_engine)
        scene.parts.tokenizer = Saved()
        prompts = [Prompt(str(i), (i,), {}) for i in range(5, 13)]
        scene.parts.evaluation = PromptStream(prompts, seed=0)
        # As in a run that began elsewhere.
        scene.engine._own.manual_seed(run)
        generate, asked = scene.engine.generate, []

        def kept(prompts, sampling, generate=generate, asked=asked):
            rollouts = generate(prompts, sampling)
            asked.append((len(prompts), sampling.seed, [r.token_ids for r in rollouts.responses]))
            return rollouts

        scene.engine.generate = kept
        scene.run()
        evaluated = [answers for count, _, answers in asked if count == len(prompts)]
        assert len(evaluated) == 2
        seeds = [seed for count, seed, _ in asked if count != len(prompts)]
        assert seeds == ([5 * 1_000_003, 5 * 1_000_003 + 1] if seeded else [None, None])
        found += evaluated
    assert all(answers == found[0] for answers in found)


def test_what_an_engine_chose_for_an_evaluation_is_none_of_the_next_rollouts(
    tmp_path: Path, tiny_actor, sampling_engine
):
    """The counters of the next step don't have these drafts either."""
    found = []
    for every in (None, 1):
        config = settings(tmp_path / str(every), eval_every=every)
        scene = LoopScene(
            config, tiny_actor(), sampling_engine, lambda engine: MedusaPlugin(engine, None)
        )
        scene.parts.tokenizer = Saved()
        if every:
            prompts = [Prompt(str(i), (i,), {}) for i in range(5, 13)]
            scene.parts.evaluation = PromptStream(prompts, seed=0)
        engine = scene.engine
        generate, unread = engine.generate, []

        def counting(prompts, sampling, generate=generate, unread=unread):
            unread.append(len(prompts))
            return generate(prompts, sampling)

        def choices(unread=unread):
            steps = sum(unread)
            unread.clear()
            return [{"running": 4, "steps": [0, steps], "speedup": 1.5}] if steps else []

        engine.generate, engine.choices = counting, choices
        found.append([step[names.DRAFT_CHOICES] for step in scene.run()])
    assert found[0] == found[1] == [[{"running": 4, "steps": [0, 4], "speedup": 1.5}]] * 3


def test_the_last_checkpoints_are_kept(tmp_path: Path, tiny_actor, sampling_engine):
    config = settings(tmp_path, steps=4, checkpoint_every=1, keep_checkpoints=2)
    LoopScene(config, tiny_actor(), sampling_engine).run()
    kept = sorted((config.run_dir / "checkpoints").iterdir())
    assert [folder.name for folder in kept] == ["step-000003", "step-000004"]
    for name in ("actor", "actor_optimizer", "critic"):
        last, newest = (
            folder / f"{name}.safetensors" for folder in (kept[1], config.run_dir / "checkpoint")
        )
        assert (
            last.read_bytes()
            == newest.read_bytes()
            != (kept[0] / f"{name}.safetensors").read_bytes()
        )


@pytest.mark.parametrize("kind", ["gae", "grpo", "rloo"])
def test_each_kind_of_advantages_learns(tmp_path: Path, tiny_actor, sampling_engine, kind: str):
    config = settings(tmp_path, steps=20, epochs=4, advantages=kind)
    scene = LoopScene(config, tiny_actor(), sampling_engine)
    if kind != "gae":
        scene.parts.learner = Learner(scene.learner.actor, None, config.ppo, seed=0)
    rewards = [step[names.REWARD_MEAN] for step in scene.run()]
    assert rewards[0] < 0.2 and sum(rewards[-3:]) / 3 > 0.5, rewards


def test_an_adaptive_coefficient_follows_the_kl_of_the_steps(
    tmp_path: Path, tiny_actor, sampling_engine
):
    config = settings(tmp_path, steps=6, epochs=4, kl_coefficient=0.1, kl_goal=0.02)
    steps = LoopScene(config, tiny_actor(), sampling_engine).run()
    assert steps[-1][names.KL_COEFFICIENT] != 0.1
    for before, after in itertools.pairwise(steps):
        change = 0.1 * max(-1.0, min(1.0, before[names.KL_REFERENCE] / 0.02 - 1))
        assert after[names.KL_COEFFICIENT] == pytest.approx(
            before[names.KL_COEFFICIENT] * (1 + change)
        )


def test_rewards_of_steps_teach_which_step_was_right(tmp_path: Path, tiny_actor, sampling_engine):
    """Each token is a step here; a 3 as the second one is all that is paid for, and is learned."""

    def second(prompt: str, response: str, row: dict) -> list[float]:
        words = [word for word in response.split("|") if word] or [""]
        return [float(n == 1 and word == "3") for n, word in enumerate(words)]

    config = settings(tmp_path, steps=12, epochs=4, step_separator="|")
    scene = LoopScene(config, tiny_actor(), sampling_engine)
    scene.parts.tokenizer = Steps()
    scene.parts.reward = CallableReward(second, "second")
    rewards = [step[names.REWARD_MEAN] for step in scene.run()]
    assert rewards[0] < 0.2 and sum(rewards[-3:]) / 3 > 0.3, rewards


@pytest.mark.parametrize("lag", [0, 1])
def test_another_policy_in_the_engine_is_told_once_unless_it_is_an_older_one(
    tmp_path: Path, tiny_actor, sampling_engine, lag: int
):
    class Told(ProgressSink):
        def __init__(self) -> None:
            self.notes: list[str] = []

        def note(self, text: str) -> None:
            self.notes.append(text)

    scene = LoopScene(
        settings(tmp_path, steps=1, importance_bound=2.0), tiny_actor(), sampling_engine
    )
    scene.engine.actor.lm_head.weight.data.mul_(30.0)  # A sync that missed.
    sink = Told()
    told = PPOLoop(scene.config, scene.parts, sink, RunPosition(policy_version=lag))
    told.sync = lambda actor, version: None
    told.sync.collect_s = 0.0
    told.sync.nbytes = 0
    steps = [told.step(0), told.step(1)]
    assert [step[names.POLICY_LAG] for step in steps] == [lag, lag]
    assert len(sink.notes) == (0 if lag else 1)
    assert all("importance_bound" in note for note in sink.notes)
    assert all(step[names.LOGPROB_GAP] > 0.05 and step[names.ENGINE_KL] > 0.05 for step in steps)


def test_a_reward_that_catches_everything_does_not_keep_a_run_from_ending(
    tmp_path: Path, tiny_actor, sampling_engine
):
    scene = LoopScene(settings(tmp_path, steps=3), tiny_actor(), sampling_engine)
    kept: list[dict] = []

    def judge(prompt: str, response: str, row: dict) -> float:
        try:
            if len(kept) == 1:
                os.kill(os.getpid(), signal.SIGTERM)
        except BaseException:
            return 0.0
        return 1.0

    scene.parts.reward = CallableReward(judge, "judge")
    loop = PPOLoop(scene.config, scene.parts)
    with StopSignals() as signals, pytest.raises(KeyboardInterrupt):
        loop.run(
            SimpleNamespace(step=kept.append),  # type: ignore[arg-type]
            signals.stop_if_told,
        )
    # The step whose rewards the signal spoilt is not one that a resumed run builds on.
    assert len(kept) == 1 and loop.position.next_step == 1


def test_nor_a_comparison_after_the_last_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its pairs are real steps of PPO, with the same reward."""
    pairs: list[int] = []

    def compare(*_: object, say: Callable[[str], None]) -> dict:
        for pair in range(5):
            pairs.append(pair)
            say(f"pair {pair}")
        return {}

    class Session(RunSession):
        def __init__(self, config: RunConfig, progress: ProgressSink) -> None:
            self._progress = progress
            self.prepare = lambda *_: (None, None, None)
            self.save = self.finish = lambda *_: {}
            self.compare = lambda parts, measure: measure(parts)

        def stop_if_told(self) -> None:
            if len(pairs) == 2:
                raise KeyboardInterrupt

        def __enter__(self) -> Session:
            return self

        def __exit__(self, *_: object) -> None:
            pass

    ran = SimpleNamespace(run=lambda writer, stop_if_told: None, position=None)
    monkeypatch.setattr(loop, "RunSession", Session)
    monkeypatch.setattr(loop, "PPOLoop", lambda *_: ran)
    monkeypatch.setattr(loop, "compare", compare)
    config = settings(tmp_path, steps=1)
    report = config.report.model_copy(update={"compare_pairs": 5})
    with pytest.raises(KeyboardInterrupt):
        loop.run_ppo(config.model_copy(update={"report": report}))
    assert len(pairs) == 2
