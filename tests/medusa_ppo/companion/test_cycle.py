"""A cycle publishes what is better, follows a policy that moves, keeps a frozen control, and
resumes to the bit.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any

import pytest
import torch

from heads.acceptance import Interval
from heads.checkpoint import load_state, save_state
from heads.errors import CheckpointError
from heads.heads_config import HeadsConfig
from medusa_ppo.companion.cycle import JUDGED_ROWS, Cycle
from medusa_ppo.companion.gate import Served, Verdict, equal, replay
from medusa_ppo.companion.holdout import hold_out, stretches
from medusa_ppo.companion.positions import EarlySample
from medusa_ppo.config.companion_section import HOLDOUT_SHARE, CompanionConfig
from medusa_ppo.contract.status import ReplayRow
from tests.medusa_ppo.companion.conftest import sampled


def make(
    task, kind: str = "medusa", seed: int = 0, draft_temperature: float = 0.0, **settings
) -> Cycle:
    config = CompanionConfig(**{"batch_positions": 64, "learning_rate": 2e-2, **settings})
    heads = HeadsConfig(task.hidden, task.vocab, num_heads=3, kind=kind)
    embedding_VD = task.lm_head_VD if kind == "hydra" else None
    return Cycle(
        heads,
        config,
        task.lm_head_VD,
        seed=seed,
        embedding_VD=embedding_VD,
        draft_temperature=draft_temperature,
    )


def length_of(heads, task, batch) -> float:
    return replay(heads, batch, task.lm_head_VD).mean_acceptance_length


def test_versions_grow_and_the_frozen_control_stays(chain) -> None:
    task = chain()
    cycle = make(task)
    assert cycle.version == 0 and cycle.frozen is None
    versions = []
    frozen = None
    for _ in range(20):
        report = cycle.run(task.batch())
        versions.append(cycle.version)
        if report.published and frozen is None:
            frozen = cycle.serving.trainable_state()
        assert report.published == (report.verdict is not None and report.verdict.publish)
    assert versions == sorted(versions) and 2 <= versions[-1] == sum(
        b - a for a, b in zip([0, *versions], versions, strict=False)
    )
    assert 0 < cycle.candidates_rejected <= 20 - cycle.version
    for name, value in cycle.frozen.trainable_state().items():
        assert torch.equal(value, frozen[name])
    fresh = task.batch(60)
    assert length_of(cycle.serving, task, fresh) > length_of(cycle.frozen, task, fresh) + 0.2
    assert all(cycle.rows[name] is not None for name in ("serving", "candidate", "frozen"))


def test_follows_a_policy_that_moves_while_the_frozen_control_falls(chain) -> None:
    task = chain()
    cycle = make(task)
    for _ in range(15):
        cycle.run(task.batch())
    before = length_of(cycle.serving, task, task.batch(60))
    first_version = cycle.version
    frozen_before = length_of(cycle.frozen, task, task.batch(60))
    task.drift()
    cycle.trainer.set_tables(task.lm_head_VD)
    fallen = length_of(cycle.serving, task, task.batch(60))
    for _ in range(25):
        cycle.run(task.batch())
    after = length_of(cycle.serving, task, task.batch(60))
    frozen_after = length_of(cycle.frozen, task, task.batch(60))
    assert before > 2.3 and fallen < 1.6 and after > 2.3, (before, fallen, after)
    assert frozen_after < frozen_before - 0.05 and cycle.version > first_version
    assert cycle.last_policy_version == 1


def test_what_is_held_out_is_not_trained_on(chain) -> None:
    """Not even through another answer to the same prompt."""
    task = chain()
    batch = dataclasses.replace(task.batch(96), prompts_S=torch.arange(96) // 4)
    training, holdout = hold_out(batch, 0.25, seed=5)
    again = hold_out(batch, 0.25, seed=5)
    assert holdout is not None and again[1] is not None
    assert holdout.prompts_S.unique().numel() == 6
    assert (holdout.lengths_S.numel(), training.lengths_S.numel()) == (24, 72)
    assert not set(holdout.prompts_S.tolist()) & set(training.prompts_S.tolist())
    assert torch.equal(training.hidden_MD, again[0].hidden_MD) and torch.equal(
        holdout.response_ids_M, again[1].response_ids_M
    )
    drawn = [hold_out(batch, 0.25, seed)[1].prompts_S.tolist() for seed in range(40)]
    assert {prompt for prompts in drawn for prompt in prompts} == set(range(24))
    assert hold_out(dataclasses.replace(batch, prompts_S=None), 0.25, 0)[1].lengths_S.numel() == 24


def test_of_few_prompts_none_is_spared_and_all_judge_what_was_made_before(chain) -> None:
    """A third of eight prompts was held out: too few to decide by, and training had the others
    alone.
    """
    task = chain()
    batch = dataclasses.replace(task.batch(16), prompts_S=torch.arange(16) // 2)
    assert hold_out(batch, 0.2, 0) == (batch, None)
    cycle = make(task)
    judged = []
    original = cycle._measure

    def measure(heads, holdout):
        judged.append((cycle.trainer.optimizer_steps, holdout.lengths_S.numel()))
        return original(heads, holdout)

    cycle._measure = measure
    first = cycle.run(batch)
    assert not judged and first.verdict is None, "nothing was trained yet"
    assert first.train.tokens == batch.response_ids_M.numel() - 16, "all but the last rows"
    steps = cycle.trainer.optimizer_steps
    cycle.run(dataclasses.replace(task.batch(16), prompts_S=torch.arange(16) // 2))
    assert set(judged) == {(steps, 16)}
    assert cycle.evidence.counts_G5.shape[0] == 8 or cycle.version == 1


def test_the_first_version_of_a_dozen_prompts_comes_with_the_second_batch(chain) -> None:
    task = chain()
    versions = []
    cycle = make(task)
    for _ in range(2):
        cycle.run(dataclasses.replace(task.batch(48), prompts_S=torch.arange(48) // 4))
        versions.append(cycle.version)
    assert versions == [0, 1]


def test_equal_heads_are_replayed_once(chain, monkeypatch: pytest.MonkeyPatch) -> None:
    """The frozen control is what serves until there is a second version, and then what served
    before it.
    """
    task = chain()
    replayed = []
    cycle = make(task)
    measure = cycle._measure
    monkeypatch.setattr(
        cycle, "_measure", lambda heads, batch: (replayed.append(heads), measure(heads, batch))[1]
    )
    counts = []
    for _ in range(20):
        before = cycle.version
        cycle.run(task.batch())
        counts.append((before, len(replayed)))
        replayed.clear()
    assert {count for version, count in counts if version < 2} == {2, 3}, (
        "the candidate, what serves, and once what served before"
    )
    assert all(count == 3 for version, count in counts if version == 2), (
        "the frozen control as well, which served before"
    )
    assert cycle.rows["frozen"] != cycle.rows["serving"]


@pytest.mark.parametrize(
    ("kind", "settings", "share"),
    [
        ("medusa", {"wait": True}, 1.0),  # Without it what is kept for replay is not saved.
        ("hydra", {"replay_versions": 2, "wait": True}, 1.0),
        ("medusa", {"replay_versions": 0}, 0.9),
    ],
)
def test_killed_and_resumed_is_the_same_to_the_bit(
    chain, kind: str, settings: dict, share: float, tmp_path
) -> None:
    task = chain()
    batches = [sampled(task.batch(), share) for _ in range(10)]
    straight = make(task, kind, **settings)
    first = make(task, kind, **settings)
    for batch in batches:
        straight.run(batch)
    for batch in batches[:4]:
        first.run(batch)
    assert first.version > 0
    save_state(tmp_path / "state.safetensors", first.state_dict())
    second = make(task, kind, seed=0, **settings)
    second.load_state_dict(load_state(tmp_path / "state.safetensors"))
    assert second.rows == first.rows and second.version == first.version
    assert (second.passes, second.gain, second.positions_frac) == (
        first.passes,
        first.gain,
        first.positions_frac,
    )
    for batch in batches[4:]:
        second.run(batch)
    left = straight.state_dict()
    right = second.state_dict()
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert torch.equal(value, right[name]), name


def test_state_before_anything_was_learned(chain, tmp_path) -> None:
    task = chain()
    save_state(tmp_path / "state.safetensors", make(task).state_dict())
    cycle = make(task)
    cycle.load_state_dict(load_state(tmp_path / "state.safetensors"))
    assert cycle.version == 0 and cycle.frozen is None and math.isnan(cycle.last_loss)
    with pytest.raises(CheckpointError, match="not a state of the companion"):
        cycle.load_state_dict({"x": torch.zeros(1)})


def test_a_state_of_0_3_0_is_gone_on_with(chain) -> None:
    """It has a counter and two estimates more than later ones."""
    task = chain()
    cycle = make(task)
    for _ in range(6):
        cycle.run(task.batch())
    assert cycle.version > 0
    state = cycle.state_dict()
    in_0_3_0 = (
        "version",
        "fresh",
        "candidates_rejected",
        "rollbacks",
        "last_policy_version",
        "published_policy_version",
        "upper_batch",
        "judged",
        "followed",
        "fell_back",
        "batches_seen",
    )
    counters = [4 if name == "upper_batch" else int(getattr(cycle, name)) for name in in_0_3_0]
    row = torch.tensor([2.0, 0.6, 0.3, 0.1], dtype=torch.float64)
    old = state | {
        "counters": torch.tensor(counters),
        "rows.upper": row,
        "rows.upper_serving": row,
    }
    resumed = make(task)
    resumed.load_state_dict(old)
    again = resumed.state_dict()
    assert again.keys() == state.keys()
    for name, value in state.items():
        assert torch.equal(value, again[name]), name


@pytest.mark.parametrize("where", ["hidden_MD", "logprobs_M"])
def test_batches_that_are_not_finite_are_passed_over(chain, where: str) -> None:
    task = chain()
    cycle = make(task)
    cycle.run(task.batch())
    before = cycle.state_dict()
    batch = task.batch()
    spoiled = getattr(batch, where).clone()
    spoiled.view(-1)[5] = float("nan")
    report = cycle.run(dataclasses.replace(batch, **{where: spoiled}))
    assert "not finite" in report.problem and not report.published
    after = cycle.state_dict()
    after["counters"][-1] -= 1
    for name, value in before.items():
        assert torch.equal(value, after[name]), name


def test_a_candidate_that_fell_behind_is_taken_back(chain) -> None:
    task = chain()
    cycle = make(task)
    for _ in range(15):
        cycle.run(task.batch())
    served = cycle.serving.trainable_state()
    with torch.no_grad():
        for parameter in cycle.trainer.heads.parameters():
            parameter.copy_(torch.randn_like(parameter) * 3)
    version = cycle.version
    report = cycle.run(task.batch())
    assert report.verdict.worse and not report.published and cycle.rollbacks == 1
    assert cycle.version == version
    for name, value in cycle.trainer.heads.trainable_state().items():
        assert torch.equal(value, served[name])
    assert cycle.trainer.rate == 0.5, "the step size that led there is halved"
    for name, value in cycle.candidate.trainable_state().items():
        assert torch.equal(value, served[name]), "the mean begins anew as well"
    for _ in range(5):
        cycle.run(task.batch())
    assert cycle.version >= version
    assert length_of(cycle.candidate, task, task.batch(60)) > 2.2


def test_estimates_keep_their_versions_while_the_next_batch_is_judged(chain) -> None:
    """The status is asked for meanwhile: it gave the last judgement the next one's versions."""
    task = chain()
    cycle = make(task)
    original, seen = cycle._measure, []

    def told() -> tuple[Any, ...]:
        return dict(cycle.rows), cycle.replayed_version, cycle.replayed_policy_version

    def measure(*given: Any) -> Any:
        seen.append(told())
        return original(*given)

    cycle._measure = measure
    judged = []
    for policy in range(4):
        before = told()
        seen.clear()
        cycle.run(dataclasses.replace(task.batch(60), policy_version=policy))
        assert seen and all(found == before for found in seen)
        judged.append(cycle.replayed_policy_version)
    assert judged == [0, 1, 2, 3]


def test_trained_heads_find_the_step_size_that_suits_them(chain) -> None:
    """With one that is far too large they would lose what they know with every batch. The gate
    makes it smaller until they don't.
    """
    task = chain()
    source = make(task)
    for _ in range(15):
        source.run(task.batch())
    config = CompanionConfig(
        batch_positions=64, learning_rate=16.0
    )  # 0.5 was too large on one kind of CPU and not on another; a new optimizer has a ramp.
    cycle = Cycle(
        source.serving.config,
        config,
        task.lm_head_VD,
        seed=0,
        initial_state=source.serving.trainable_state(),
    )
    rates = [cycle.trainer.rate]
    for _ in range(12):
        cycle.run(task.batch(100))
        rates.append(cycle.trainer.rate)
    assert rates[0] == 1.0 and rates[-1] <= 0.5, rates
    held = task.batch(60)
    assert length_of(cycle.candidate, task, held) > length_of(source.serving, task, held) - 0.1
    twin = Cycle(source.serving.config, config, task.lm_head_VD, seed=0)
    twin.load_state_dict(cycle.state_dict())
    assert twin.trainer.rate == cycle.trainer.rate


def test_a_version_is_compared_with_the_one_before_on_later_batches(chain, monkeypatch) -> None:
    """Not on the holdout that let it in: there the luckier one always wins."""
    task = chain()
    cycle = make(task)
    seen = []
    original = cycle._follow

    def follow(*found) -> None:
        seen.append(cycle.before is not None)
        original(*found)

    monkeypatch.setattr(cycle, "_follow", follow)
    for _ in range(20):
        cycle.run(task.batch(48))
    assert cycle.version >= 3 and 0 < cycle.followed <= cycle.version and cycle.fell_back <= 1
    assert not seen[0] and any(seen)
    good = cycle.serving
    poor = make(task).serving
    cycle.before = good
    cycle.followed = 0
    cycle.fell_back = 0
    cycle.after.clear()
    cycle.serving = poor  # A gate that was wrong.
    cycle.run(task.batch(100))
    assert (cycle.followed, cycle.fell_back, cycle.before is None) == (1, 1, not cycle.fresh)


def test_equal_heads_keep_their_step_size(chain) -> None:
    """As many candidates are called better by chance as worse. Seven publishes to a rollback were
    needed before, and it ended at 1/64.
    """
    task = chain()
    cycle = make(task)
    row = ReplayRow(2.0, (0.5,))
    chance = torch.Generator().manual_seed(0)
    rates = []
    for _ in range(400):
        draw = float(torch.rand(1, generator=chance))
        difference = Interval(0.0, 0.0, 0.0)
        cycle._obey(Verdict(draw < 0.1, draw > 0.9, "", row, row, row, difference))
        rates.append(cycle.trainer.rate)
    assert sum(rates[200:]) / 200 > 0.4 and min(rates) > 1 / 64


def test_a_rollback_keeps_what_the_optimizer_knows_and_a_fall_gives_it_full_speed(chain) -> None:
    task = chain()
    cycle = make(task)
    for _ in range(15):
        cycle.run(task.batch(48))
    moments = {
        name: value
        for name, value in cycle.trainer.state_dict().items()
        if name.startswith("optimizer")
    }
    row = ReplayRow(2.0, (0.5,))
    cycle._obey(Verdict(False, True, "", row, row, row, Interval(-1.0, -1.5, -0.5)))
    cycle._obey(Verdict(False, True, "", row, row, row, Interval(-1.0, -1.5, -0.5)))
    assert cycle.trainer.rate == 0.25
    after = cycle.trainer.state_dict()
    assert moments and all(torch.equal(after[name], value) for name, value in moments.items())
    task.drift()
    cycle.trainer.set_tables(task.lm_head_VD)
    cycle.run(task.batch(48))
    assert cycle.trainer.rate >= 0.5, (
        "the policy jumped: 1, and half of it where the candidate was worse still"
    )
    cycle._obey(Verdict(False, True, "The candidate holds values that are not finite."))
    assert not any(name.startswith("optimizer") for name in cycle.trainer.state_dict()), (
        "moments that may be broken go"
    )


def test_new_heads_leave_every_generator_alone(chain, monkeypatch) -> None:
    """On a GPU too: `torch.manual_seed` would seed that one for good."""
    seeded = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    before = torch.get_rng_state()
    make(chain())
    assert torch.equal(torch.get_rng_state(), before) and not seeded


def test_the_draft_vocabulary_follows_the_rollouts(chain) -> None:
    task = chain()
    heads = HeadsConfig(task.hidden, task.vocab, num_heads=3)
    cycle, twin = (
        Cycle(heads, CompanionConfig(), task.lm_head_VD, seed=0, num_drafts=2, draft_vocab=5)
        for _ in range(2)
    )
    batch = task.batch(8)
    rare = dataclasses.replace(batch, response_ids_M=batch.response_ids_M % 4)
    for one, kept in ((batch, 5), (rare, None), (rare, None), (rare, None)):
        cycle.run(one)
        assert (
            cycle._served.ids_W is not None
            and cycle._served.ids_W.numel() == (kept or 5)
            and cycle._served.num_drafts == 2
        )
        assert cycle.trainer.ids_W is cycle._served.ids_W, "trained for what is drafted from"
    assert {0, 1, 2, 3} <= set(cycle._served.ids_W.tolist())
    twin.load_state_dict(cycle.state_dict())
    assert torch.equal(twin.trainer.ids_W, cycle.trainer.ids_W)
    twin._count(batch)
    cycle._count(batch)
    assert torch.equal(cycle._served.ids_W, twin._served.ids_W)
    off = Cycle(heads, CompanionConfig(), task.lm_head_VD, seed=0, num_drafts=2)
    off.load_state_dict(cycle.state_dict())
    assert off.draft_ids is None and off.trainer.ids_W is None, "it was switched off"
    assert not {"token_counts", "draft_ids"} & set(off.state_dict())


def test_batches_kept_for_a_draft_vocabulary_are_not_trained_on_without_it(chain) -> None:
    task = chain()
    heads = HeadsConfig(task.hidden, task.vocab, num_heads=3)
    config = CompanionConfig(replay_versions=3, wait=True)
    cycle = Cycle(heads, config, task.lm_head_VD, seed=0, num_drafts=2, draft_vocab=4)
    for version in range(3):
        cycle.run(dataclasses.replace(task.batch(8), policy_version=version))
    assert len(cycle.replay) == 3
    off = Cycle(heads, config, task.lm_head_VD, seed=0, num_drafts=2)
    off.load_state_dict(cycle.state_dict())
    # They have four rows of lm_head; any other token is outside of them.
    report = off.run(dataclasses.replace(task.batch(8), policy_version=3))
    assert report.problem == "" and len(off.replay) == 1


def test_a_batch_of_one_prompt_judges_what_earlier_ones_made_and_is_trained_on_then(chain) -> None:
    task = chain()
    cycle = make(task)
    verdicts = 0
    for number in range(1, 41):
        batch = dataclasses.replace(task.batch(8), prompts_S=torch.zeros(8, dtype=torch.int64))
        before = {name: value.clone() for name, value in cycle.candidate.trainable_state().items()}
        report = cycle.run(batch)
        verdicts += report.verdict is not None
        assert report.problem == "" and cycle.trainer.batches_trained == number
        if report.published:
            assert all(
                torch.equal(value, before[name])
                for name, value in cycle.serving.trainable_state().items()
            )
    # A prompt a batch is one observation a batch: looks are few.
    assert (
        verdicts > 30
        and cycle.version >= 1
        and length_of(cycle.serving, task, task.batch(60)) > 1.5
    )


def test_a_sample_of_one_prompt_is_judged_before_it_is_trained_on(chain) -> None:
    """What earlier batches made is judged on the rows that are here."""
    batch = chain().batch(6, 16)
    whole = dataclasses.replace(batch, prompts_S=torch.zeros(6, dtype=torch.int64))
    some = EarlySample(30, HOLDOUT_SHARE, 0, ahead=3).of(whole)
    assert some.held_S is not None and not some.held_S.any()
    cycle = make(chain())
    before = cycle.serving.trainable_state()
    assert cycle.run(some).verdict is None
    made = copy.deepcopy(cycle.candidate)
    report = cycle.run(dataclasses.replace(some, policy_version=1))
    assert report.verdict is not None and report.problem == ""
    judged = replay(made, stretches(some), chain().lm_head_VD)
    assert report.verdict.candidate.mean_acceptance_length == judged.mean_acceptance_length
    assert all(
        torch.equal(value, before[name]) for name, value in cycle.serving.trainable_state().items()
    )
    assert cycle.trainer.batches_trained == 2


def test_heads_are_judged_once_they_were_trained_on_as_many_rows_as_that_takes(chain) -> None:
    """With a quarter of a pass to each batch, judging all of each took longer than training."""
    task = chain()
    cycle = make(task)
    trained = verdicts = 0
    for number in range(12):
        batch = dataclasses.replace(
            task.batch(16), prompts_S=torch.arange(16) // 2, passes=0.25, policy_version=number
        )
        due = trained >= JUDGED_ROWS * batch.response_ids_M.numel()
        judged = (cycle.version, number)
        report = cycle.run(batch)
        if due:  # Before it was trained on, and with the heads that served then.
            assert (cycle.replayed_version, cycle.replayed_policy_version) == judged
        assert (report.verdict is not None) == due
        trained = report.train.rows + (0 if due else trained)
        verdicts += due
        if number == 1:  # A restart doesn't forget what was trained.
            state = cycle.state_dict()
            before = cycle
            cycle = make(task)
            cycle.load_state_dict(state)
            assert cycle.replayed_version == before.replayed_version
            assert cycle.replayed_policy_version == before.replayed_policy_version
    assert 1 <= verdicts <= 3


def test_estimates_keep_the_version_of_the_heads_that_a_verdict_replaced(chain) -> None:
    task = chain()
    cycle = make(task)
    while not cycle.run(task.batch()).published:
        assert cycle.replayed_version == cycle.version == 0
    assert (cycle.replayed_version, cycle.version, cycle.replayed_policy_version) == (0, 1, 0)
    state = cycle.state_dict()
    state["schedule"] = state["schedule"][:-3]  # As earlier releases wrote it.
    again = make(task)
    again.load_state_dict(state)
    assert (again.replayed_version, again.version, again.replayed_policy_version) == (0, 1, 0)


def test_estimates_of_heads_that_an_engine_went_back_to_have_their_own_number(chain) -> None:
    """They stood under that of the version which it refused: excellent by replay, and hardly ever
    accepted.
    """
    task = chain()
    cycle = make(task)
    while not cycle.run(task.batch()).published:
        pass
    good = cycle.serving.trainable_state()
    while not cycle.run(task.batch()).published:
        pass
    cycle.go_on_from(2, good, 1)
    again = make(task)
    again.load_state_dict(cycle.state_dict())
    for one in (cycle, again):
        assert (one.version, one.serving_version) == (2, 1)
        published = False
        while not published:
            published = one.run(task.batch(60)).published
            assert one.replayed_version == 1
        assert (one.version, one.serving_version) == (3, 3)


def test_starts_from_given_heads(chain) -> None:
    task = chain()
    source = make(task)
    for _ in range(10):
        source.run(task.batch())
    state = source.serving.trainable_state()
    config = CompanionConfig(batch_positions=64, learning_rate=1e-4)
    cycle = Cycle(source.serving.config, config, task.lm_head_VD, seed=0, initial_state=state)
    for name, value in cycle.serving.trainable_state().items():
        assert torch.equal(value, state[name])
    assert cycle.run(task.batch()).verdict.serving.mean_acceptance_length > 2.2


def test_makes_as_many_passes_as_the_batch_says(chain) -> None:
    task = chain()
    cycle = make(task, epochs=3)
    rows = []
    for passes in (None, 1.0, 0.5):
        before = cycle.trainer.optimizer_steps
        cycle.run(dataclasses.replace(task.batch(24), passes=passes))
        rows.append(cycle.trainer.optimizer_steps - before)
        assert cycle.passes == (3 if passes is None else passes)
        assert cycle.positions_frac == min(1.0, cycle.passes)
    assert rows[0] > rows[1] > rows[2] > 0


def test_learns_from_a_sample_of_the_positions(chain) -> None:
    task = chain()
    cycle = make(task)
    shares = []
    for _ in range(20):
        cycle.run(sampled(task.batch(), 0.3))
        shares.append(cycle.positions_frac)
    assert length_of(cycle.serving, task, task.batch(60)) > 2.2
    assert shares == pytest.approx([0.3] * 20, abs=0.05)


def test_the_gate_sees_whole_responses_whatever_is_sampled(chain, monkeypatch) -> None:
    seen = []
    original = Cycle._obey
    monkeypatch.setattr(
        Cycle,
        "_obey",
        lambda self, verdict: (seen.append(verdict.serving), original(self, verdict)),
    )
    for share in (1.0, 0.5):
        task = chain()
        cycle = make(task)
        # What two batches of one policy make differs with the share; what serves does not.
        for _ in range(2):
            cycle.run(sampled(task.batch(), share))
    assert len(seen) == 2 and seen[0] == seen[1]


def test_a_batch_whose_states_were_sampled_is_trained_on_where_they_are(chain) -> None:
    task = chain()
    batch = dataclasses.replace(task.batch(), prompts_S=None)
    held_S = torch.arange(batch.lengths_S.numel()) % 4 == 0
    weights_M = (
        torch.rand(batch.response_ids_M.shape[0], generator=torch.Generator().manual_seed(0))
        .lt(0.5)
        .float()
    )
    weights_M[held_S[torch.repeat_interleave(torch.arange(held_S.numel()), batch.lengths_S)]] = 1.0
    compact_M = weights_M.where(weights_M > 0, -1.0)
    compact = dataclasses.replace(
        batch, weights_M=compact_M, hidden_MD=batch.hidden_MD[weights_M > 0], held_S=held_S
    )
    cycle = make(task, loss="ce")
    assert cycle.run(compact).problem == "" and 0.35 < cycle.positions_frac < 0.65


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_candidates_are_judged_at_the_temperature_that_the_engine_drafts_at(
    chain, temperature: float
) -> None:
    """Draft temperature times the rollouts' own, once."""
    task = chain()
    cycle = make(task, draft_temperature=1.0)
    for _ in range(6):
        cycle.run(task.batch())
    served = cycle.serving.trainable_state()
    batch = task.batch(temperature=temperature)
    verdict = cycle.run(batch).verdict
    _, holdout = hold_out(batch, HOLDOUT_SHARE, cycle._seed * 1_000_003 + cycle.batches_seen)
    heads = make(task).serving
    heads.load_trainable_state(served)
    expected = replay(heads, holdout, task.lm_head_VD, served=Served(1.0)).mean_acceptance_length
    assert verdict.serving.mean_acceptance_length == pytest.approx(expected)


def test_what_is_published_is_what_was_judged_temperatures_included(
    chain, monkeypatch, tmp_path
) -> None:
    """A version's temperatures were fitted after its verdict, and nothing had judged them. Now the
    candidates of the next one go on with them, and so does a resumed companion.
    """
    task = chain()
    cycle = make(task, draft_temperature=1.0)
    fitted: list[list[float]] = [[1.0, 1.0, 1.0]]

    def fit(heads, holdout, lm_head_VD, **how) -> None:
        assert heads is cycle.candidate and how["served"].draft_temperature == 1.0
        assert holdout.lengths_S.numel() < 48
        fitted.append([0.75, 1.0, 0.5 + 0.25 * len(fitted)])
        heads.temperatures_K.copy_(torch.tensor(fitted[-1]))

    monkeypatch.setattr("medusa_ppo.companion.cycle.fit_temperatures", fit)
    while cycle.version < 2:
        report = cycle.run(task.batch())
        assert len(fitted) == 1 + cycle.version
        assert cycle.candidate.temperatures_K.tolist() == fitted[-1]
        if report.published:
            assert cycle.serving.temperatures_K.tolist() == fitted[-2], "those it was judged with"
    assert cycle.frozen.temperatures_K.tolist() == fitted[0]
    save_state(tmp_path / "s.safetensors", cycle.state_dict())
    resumed = make(task, draft_temperature=1.0)
    resumed.load_state_dict(load_state(tmp_path / "s.safetensors"))
    for left, right in (
        (cycle.serving, resumed.serving),
        (cycle.candidate, resumed.candidate),
        (cycle.frozen, resumed.frozen),
    ):
        assert equal(left, right) and left.temperatures_K.tolist() == right.temperatures_K.tolist()
    monkeypatch.undo()
    started = Cycle(
        cycle.serving.config,
        cycle._config,
        task.lm_head_VD,
        seed=0,
        initial_state=cycle.serving.trainable_state(),
    )
    assert equal(started.serving, cycle.serving)


def test_after_an_error_in_the_middle_training_goes_on_from_the_serving_heads(
    chain, monkeypatch
) -> None:
    """Half an optimizer step is no heads: neither those in training nor their mean keep it."""
    task = chain()
    cycle = make(task)
    for _ in range(6):
        cycle.run(task.batch())
    assert cycle.version > 0
    served = cycle.serving.trainable_state()
    optimizer = cycle.trainer._optimizer

    def half(*args: object) -> None:
        for parameter in list(cycle.trainer.heads.parameters())[:1]:
            parameter.data.fill_(1e3)
        raise MemoryError("no more")

    with monkeypatch.context() as patch:
        patch.setattr(optimizer, "step", half)
        with pytest.raises(MemoryError):
            cycle.run(task.batch())
    for heads in (cycle.trainer.heads, cycle.candidate, cycle.serving):
        state = heads.trainable_state()
        assert all(torch.equal(value, state[name]) for name, value in served.items())
    assert not cycle.evidence.tokens
    assert cycle.run(task.batch()).problem == ""
