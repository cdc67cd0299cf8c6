"""The trainer learns, repeats itself to the bit, resumes to the bit, and takes no step that is
not finite.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import math
from typing import Any

import pytest
import torch

from heads.checkpoint import load_state, save_state
from heads.copying import TRAINED_PLACES
from heads.errors import CheckpointError, DataError
from heads.heads_config import HeadsConfig
from heads.losses import LossConfig, Teacher, reference_head_loss
from heads.modules import SHARED_PREFIXES, MedusaHeads, clip_per_head
from heads.tensorfile import is_finite
from medusa_ppo.companion import trainer as trainer_module
from medusa_ppo.companion.gate import Served, replay
from medusa_ppo.companion.positions import look_up
from medusa_ppo.companion.trainer import HeadsTrainer
from medusa_ppo.config.companion_section import CompanionConfig
from medusa_ppo.contract.rollout_batch import RolloutBatch
from tests.conftest import GPU
from tests.medusa_ppo.companion.conftest import known_when_drafted, with_prompts

KINDS = ["medusa", "hydra", "context"]
PAIRS = 4


def sizes(task, form: str = "medusa", lm_head: str = "shared") -> HeadsConfig:
    """Of a kind, or of hydra heads with a context, or of these with copying."""
    kind, pairs = ("hydra", PAIRS) if form in ("context", "copying") else (form, 0)
    return HeadsConfig(
        task.hidden,
        task.vocab,
        num_heads=3,
        kind=kind,
        lm_head=lm_head,
        context=pairs,
        copy_parts=2 if form == "copying" else 0,
    )


def make(
    task,
    kind: str = "medusa",
    seed: int = 0,
    lm_head: str = "shared",
    *,
    device: torch.device | None = None,
    heads: MedusaHeads | None = None,
    **settings,
) -> HeadsTrainer:
    config = CompanionConfig(**{"batch_positions": 64, "learning_rate": 2e-2, **settings})
    torch.manual_seed(7)
    heads = heads or MedusaHeads(sizes(task, kind, lm_head))
    if lm_head == "own":
        heads.init_own_lm_heads(task.lm_head_VD.float())
    return HeadsTrainer(
        heads,
        task.lm_head_VD,
        config,
        seed,
        embedding_VD=task.lm_head_VD if heads.config.needs_embedding else None,
        device=device,
    )


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert torch.equal(value, right[name]), name


def assert_repeated(
    left: dict[str, torch.Tensor], right: dict[str, torch.Tensor], device: torch.device
) -> None:
    """To the bit on a CPU. A GPU adds the rows of a gradient up in any order, and where a gradient
    is next to nothing Adam's first steps make that large: all but a few weights are the same.
    """
    if device.type == "cpu":
        assert_same(left, right)
        return
    assert left.keys() == right.keys()
    for name, value in left.items():
        apart = (value.double() - right[name].double()).abs() > 1e-2
        limit = 0.01 if value.is_floating_point() else 0.0
        assert float(apart.double().mean()) <= limit, name


@pytest.mark.parametrize("kind", [*KINDS, "copying"])
def test_acceptance_rises(chain, device: torch.device, kind: str) -> None:
    task = chain()
    trainer = make(task, kind, device=device)
    held_out = task.batch(40)
    embedding = {"embedding_VD": trainer.embedding_VD}
    before = replay(trainer.heads, held_out, trainer.lm_head_VD, **embedding).mean_acceptance_length
    reports = [trainer.train_batch(task.batch()) for _ in range(15)]
    after = replay(trainer.heads, held_out, trainer.lm_head_VD, **embedding).mean_acceptance_length
    assert before < 1.3 and after > 2.5, (before, after)
    assert reports[-1].loss < 0.6 * reports[0].loss
    assert trainer.batches_trained == 15 and trainer.trained_tokens == sum(
        r.tokens for r in reports
    )
    assert trainer.optimizer_steps == sum(r.optimizer_steps for r in reports)


@pytest.mark.parametrize("loss", ["ce", "tv", "ce_tv", "kl"])
def test_every_loss_goes_down(chain, device: torch.device, loss: str) -> None:
    task = chain()
    trainer = make(task, "hydra", loss=loss, device=device)
    reports = [trainer.train_batch(task.batch()) for _ in range(8)]
    assert reports[-1].loss < 0.8 * reports[0].loss


@pytest.mark.parametrize(
    ("form", "loss"), [("medusa", "kl_tv"), ("medusa", "ce_tv"), ("context", "kl_tv")]
)
def test_heads_are_trained_for_the_tokens_that_drafts_come_from(
    chain, device: torch.device, form: str, loss: str
) -> None:
    task = chain(sure=0.8)
    ids_W = torch.tensor([0, 1, 2, 4, 5, 7, 8, 10, 11])
    whole = make(task, form, loss=loss, device=device)
    part = make(task, form, loss=loss, device=device)
    held_out = task.batch(60)
    part.ids_W = ids_W
    for _ in range(12):
        batch = task.batch()
        reports = [trainer.train_batch(batch) for trainer in (whole, part)]
    # Without its token a position says nothing, unless the actor's own distribution is read.
    assert (reports[1].tokens == reports[0].tokens) == (loss == "kl_tv")
    how = {"served": Served(1.0, None, ids_W)}
    lengths = [
        replay(
            t.heads, held_out, t.lm_head_VD, embedding_VD=t.lm_head_VD, **how
        ).mean_acceptance_length
        for t in (whole, part)
    ]
    assert lengths[1] > lengths[0] - 0.05 and lengths[1] > 1.4, lengths


@pytest.mark.parametrize("form", ["hydra", "context"])
def test_products_in_bfloat16_lose_little(chain, device: torch.device, form: str) -> None:
    task = chain(sure=0.8)
    trainers = [make(task, form, device=device), make(task, form, device=device)]
    trainers[1] = HeadsTrainer(
        trainers[1].heads,
        task.lm_head_VD,
        trainers[1]._config,
        0,
        embedding_VD=task.lm_head_VD,
        device=device,
        dtype=torch.bfloat16,
    )
    batches = [task.batch() for _ in range(10)]
    held_out = task.batch(60)
    losses = [[trainer.train_batch(batch).loss for batch in batches] for trainer in trainers]
    assert losses[1] != losses[0] and losses[1] == pytest.approx(losses[0], abs=0.03)
    lengths = [
        replay(t.heads, held_out, t.lm_head_VD, embedding_VD=t.embedding_VD, served=Served(1.0))
        for t in trainers
    ]
    assert lengths[1].mean_acceptance_length == pytest.approx(
        lengths[0].mean_acceptance_length, rel=0.03
    )
    assert trainers[1].lm_head_VD.dtype == torch.float32, "what the gate replays with"
    assert all(
        value.dtype == torch.float32
        for name, value in trainers[1].state_dict().items()
        if "heads" in name or "optim" in name
    )


def sequence_by_sequence(
    heads: MedusaHeads, batch: RolloutBatch, lm_head_VD: torch.Tensor
) -> torch.Tensor:
    """All logits `NKV`, each response by itself, whole; what is copied is from its prompt and the
    tokens before.
    """
    device = lm_head_VD.device
    logits = []
    for sequence in range(batch.lengths_S.numel()):
        one = batch.select(torch.tensor([sequence]))
        text = known_when_drafted(one).to(device) if heads.config.copies else None
        given = one.hidden_MD.to(device)[None], lm_head_VD
        more = {"embedding_VD": lm_head_VD, "text": text, "places": TRAINED_PLACES}
        logits.append(heads(*given, next_ids_BT=one.response_ids_M.to(device)[None], **more)[0])
    return torch.cat(logits)


@pytest.mark.parametrize("form", ["hydra", "context", "copying"])
def test_first_step_is_that_of_the_plain_reference(
    chain, device: torch.device, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One optimizer step over a whole batch, against autograd through full logits and the textbook
    AdamW.
    """
    monkeypatch.setattr("medusa_ppo.companion.trainer.CLIP_NORM", 1e9)
    monkeypatch.setattr("medusa_ppo.companion.trainer.CUT_SHARE", 0.0)
    task = chain()
    # Siblings, written in the same steps, know nothing of each other.
    batch = with_prompts(task.batch(6), task.vocab)
    for loss in ("ce", "ce_tv", "kl"):
        trainer = make(task, form, loss=loss, batch_positions=10_000, epochs=1, device=device)
        with (
            torch.no_grad()
        ):  # away from zero: there q(y) equals p(y) at many rows, where total variation has a kink
            for parameter in trainer.heads.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
        start = trainer.heads.trainable_state()
        report = trainer.train_batch(batch)
        heads = MedusaHeads(trainer.heads.config).to(device)
        heads.load_trainable_state(start)
        rows = look_up(batch, 3, True)
        lm_head_VD = trainer.lm_head_VD
        logits_NKV = sequence_by_sequence(heads, batch, lm_head_VD)
        teacher_rows_MK = rows.teacher_rows_MK.to(device)
        teacher = Teacher(batch.hidden_MD.to(device), teacher_rows_MK, lm_head_VD)
        teacher_NKV = torch.stack(
            [teacher.logprobs(rows_N) for rows_N in teacher_rows_MK.unbind(1)], 1
        )
        loss_K = reference_head_loss(
            logits_NKV,
            rows.targets_MK.to(device),
            rows.mask_MK.to(device),
            LossConfig.named(loss),
            logprobs_NK=rows.logprobs_MK.to(device),
            teacher_logits_NKV=teacher_NKV,
        )
        loss_K.sum().backward()
        optimizer = torch.optim.AdamW(heads.parameters(), lr=2e-2, weight_decay=0.0)
        for parameter, other in zip(heads.parameters(), trainer._named.values(), strict=True):
            assert torch.allclose(
                parameter.grad,
                other.grad,
                atol=1e-6 if form == "hydra" and device.type == "cpu" else 1e-5,
            )
        optimizer.step()
        assert torch.allclose(
            loss_K.double().cpu(), torch.tensor(report.losses, dtype=torch.float64), atol=1e-5
        )


def test_a_tenth_of_the_positions_sees_a_part_of_its_context(chain) -> None:
    """Blocks of neighbours in random order, each position once; the loss is that of rows whose
    older pairs are missing.
    """
    task = chain()
    batch = task.batch(100)
    trainer = make(task, "context")
    rows = look_up(batch, 3, True, PAIRS)
    picks_N3 = trainer._shuffle([(rows, 1.0)])
    assert torch.equal(picks_N3[:, 1].sort().values, rows.usable_N)
    together = float((picks_N3[1:, 1] - picks_N3[:-1, 1] <= 2).double().mean())
    assert 0.9 < together < 1 and 0.05 < float((picks_N3[:, 2] < PAIRS).double().mean()) < 0.15
    assert picks_N3[:, 2].unique().tolist() == [1, 2, 3, 4]
    rows_N = torch.tensor([5, 0, 6])
    cut = rows.context(rows_N, torch.tensor([2, 4, 4]), torch.device("cpu"))
    whole = rows.context(rows_N, torch.tensor([4, 4, 4]), torch.device("cpu"))
    assert [(row >= 0).tolist() for row in cut.places_Nn[0:1]] == [[False, False, True, True]]
    assert torch.equal(cut.hidden_PD[cut.places_Nn[0, 2:]], whole.hidden_PD[whole.places_Nn[0, 2:]])
    assert torch.equal(cut.ids_P[cut.places_Nn[:, -1]], batch.response_ids_M[rows_N])


def test_a_context_without_the_states_that_were_left_out(chain) -> None:
    batch = chain().batch(1, 16)
    weights_M = torch.ones(batch.response_ids_M.shape[0])
    weights_M[1] = -1
    compact = dataclasses.replace(
        batch, weights_M=weights_M, hidden_MD=batch.hidden_MD[weights_M >= 0]
    )
    rows_Mn = look_up(compact, 3, True, PAIRS).context_Mn
    assert not (rows_Mn == 1).any() and torch.equal(
        rows_Mn == -1, (look_up(batch, 3, True, PAIRS).context_Mn == -1) | (rows_Mn == -1)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_same_seed_same_bits_and_other_seed_other_order(
    chain, device: torch.device, kind: str
) -> None:
    def run(seed: int) -> dict[str, torch.Tensor]:
        task = chain()
        trainer = make(task, kind, seed, device=device)
        for _ in range(3):
            trainer.train_batch(task.batch())
        return trainer.state_dict()

    assert_repeated(run(1), run(1), device)
    assert any(not torch.equal(a, b) for a, b in zip(run(1).values(), run(2).values(), strict=True))


@pytest.mark.parametrize(
    ("kind", "lm_head"),
    [
        ("medusa", "shared"),
        ("medusa", "own"),
        ("hydra", "shared"),
        ("context", "shared"),
    ],
)
def test_killed_and_resumed_is_the_same_to_the_bit(
    chain, device: torch.device, kind: str, lm_head: str, tmp_path
) -> None:
    task = chain()
    batches = [task.batch() for _ in range(6)]
    straight = make(task, kind, lm_head=lm_head, device=device)
    for batch in batches:
        straight.train_batch(batch)
    first = make(task, kind, lm_head=lm_head, device=device)
    for batch in batches[:3]:
        first.train_batch(batch)
    save_state(tmp_path / "state.safetensors", first.state_dict())
    second = make(task, kind, seed=99, lm_head=lm_head, device=device)
    second.load_state_dict(load_state(tmp_path / "state.safetensors"))
    for batch in batches[3:]:
        second.train_batch(batch)
    assert_repeated(straight.state_dict(), second.state_dict(), device)


def test_a_step_that_is_not_finite_is_not_taken(chain, device: torch.device) -> None:
    """Those before it stay, and the mean of the heads never hears of it."""
    task = chain()
    trainer = make(task, epochs=3, batch_positions=16, device=device)
    trainer.train_batch(task.batch())
    before = trainer.optimizer_steps
    batch = task.batch()
    hidden_MD = batch.hidden_MD.clone()
    hidden_MD[-2] = 1e38  # finite, but its logits are not; only some of the steps meet this row
    report = trainer.train_batch(dataclasses.replace(batch, hidden_MD=hidden_MD))
    assert "Not finite" in report.problem and report.optimizer_steps > 0
    assert trainer.optimizer_steps == before + report.optimizer_steps
    assert trainer.batches_skipped == 1 and trainer.batches_trained == 1
    assert all(is_finite(value) for value in trainer.state_dict().values())
    assert trainer.train_batch(batch).problem == ""


def test_an_exception_half_way_leaves_the_steps_before_it(
    chain, device: torch.device, monkeypatch
) -> None:
    """The same heads as after the batch's first three steps alone."""
    task = chain()
    first = task.batch()
    second = task.batch()
    states = []
    for stop in ("before the backward pass", "behind it"):
        trainer = make(task, batch_positions=16, device=device)
        trainer.train_batch(first)
        clip = trainer_module.clip_per_head
        calls = []

        def failing(*args, calls=calls, clip=clip, **how):
            calls.append(1)
            if len(calls) == 4:
                raise MemoryError("no more")
            return clip(*args, **how)

        step = trainer._step

        def not_begun(*args, calls=calls, step=step):
            calls.append(1)
            if len(calls) == 4:
                raise MemoryError("no more")
            return step(*args)

        with monkeypatch.context() as patch:
            if stop == "behind it":
                patch.setattr(trainer_module, "clip_per_head", failing)
            else:
                patch.setattr(trainer, "_step", not_begun)
            steps = trainer.optimizer_steps
            with pytest.raises(MemoryError):
                trainer.train_batch(second)
        assert trainer.optimizer_steps == steps + 3
        states.append(trainer.state_dict())
    assert_repeated(*states, device)


def test_actors_tables_are_never_changed_and_bfloat16_is_taken(chain, device: torch.device) -> None:
    task = chain(dtype=torch.bfloat16)
    trainer = make(task, "hydra", device=device)
    copy = task.lm_head_VD.clone()
    held_out = task.batch(40)
    for _ in range(10):
        trainer.train_batch(task.batch())
    assert torch.equal(copy, task.lm_head_VD) and not trainer.lm_head_VD.requires_grad
    assert all(p.dtype == torch.float32 for p in trainer.heads.parameters())
    assert (
        replay(
            trainer.heads, held_out, trainer.lm_head_VD, embedding_VD=trainer.embedding_VD
        ).mean_acceptance_length
        > 2.0
    )


def test_copying_is_trained_with_the_best_places(chain, monkeypatch: pytest.MonkeyPatch) -> None:
    """With all places a row multiplies by the whole text."""
    task = chain()
    trainer = make(task, "copying")
    seen = []
    factored = trainer.heads.factored

    def watched(*args: Any, places: int | None = None, **options: Any) -> Any:
        seen.append(places)
        return factored(*args, places=places, **options)

    monkeypatch.setattr(trainer.heads, "factored", watched)
    before = trainer.heads.copy_query.detach().clone()
    trainer.train_batch(task.batch())
    assert set(seen) == {TRAINED_PLACES}
    assert not torch.equal(trainer.heads.copy_query, before)


def test_every_position_is_seen_once_in_an_epoch(chain) -> None:
    task = chain()
    trainer = make(task)
    batch = task.batch()
    older = task.batch()
    rows = look_up(batch, 3, False)
    older_rows = look_up(older, 3, False)
    pairs = trainer._shuffle([(rows, 1.0), (older_rows, 0.25)])
    new = pairs[pairs[:, 0] == 0, 1]
    old = pairs[pairs[:, 0] == 1, 1]
    assert torch.equal(new.sort().values, rows.usable_N)
    assert old.numel() == round(0.25 * older_rows.usable_N.numel()) == old.unique().numel()
    assert not torch.equal(new, new.sort().values)


def test_replayed_batches_join_the_training(chain, device: torch.device) -> None:
    task = chain()
    batch = task.batch()
    older = task.batch()
    alone = make(task, device=device)
    together = make(task, device=device)
    alone.train_batch(batch)
    report = together.train_batch(batch, [(older, 1.0)])
    assert report.tokens == look_up(batch, 3, False).usable_N.numel()
    assert together.optimizer_steps > alone.optimizer_steps


@pytest.mark.parametrize("epochs", [2, 0.5, 1.5, 0.001])
def test_part_of_a_pass_goes_over_part_of_the_positions(
    chain, device: torch.device, epochs: float
) -> None:
    task = chain()
    batch = task.batch()
    older = task.batch()
    trainer = make(task, batch_positions=10_000, device=device)
    seen = []
    shuffle = trainer._shuffle
    trainer._shuffle = lambda sources: seen.append(shuffle(sources)) or seen[-1]
    report = trainer.train_batch(batch, [(older, 0.5)], epochs=epochs)
    usable, of_older = (look_up(b, 3, False).usable_N.numel() for b in (batch, older))
    rest = epochs - int(epochs)
    parts = [1.0] * int(epochs) + ([rest] if rest else [])
    assert [int((picks[:, 0] == 0).sum()) for picks in seen] == [
        max(1, round(part * usable)) for part in parts
    ]
    assert [int((picks[:, 0] == 1).sum()) for picks in seen] == [
        round(0.5 * part * of_older) for part in parts
    ]
    assert report.rows == sum(picks.shape[0] for picks in seen)
    # 295 positions of a half, 591 of a whole pass: as many steps as have 128 positions or more.
    assert report.optimizer_steps == sum(max(1, picks.shape[0] // 128) for picks in seen)
    assert report.tokens == round(min(1, epochs) * usable)


def test_no_step_is_made_of_what_is_left_over(chain, device: torch.device) -> None:
    """AdamW moves the weights as far in a step of 6 positions as in one of 2,048."""
    batch = chain().batch()
    usable = look_up(batch, 3, False).usable_N.numel()
    trainer = make(chain(), batch_positions=usable - 3, device=device)
    taken = []
    step = trainer._step
    trainer._step = lambda sources, picks, loss: (
        taken.append(picks.shape[0]) or step(sources, picks, loss)
    )
    for steps in (None, 2, 7):
        taken.clear()
        trainer.train_batch(batch, epochs=1, steps=steps)
        assert sum(taken) == usable and max(taken) - min(taken) <= 1
        assert len(taken) == (steps or max(2, usable // 128))


def test_small_batches_are_cut_into_small_steps(chain, device: torch.device) -> None:
    config = CompanionConfig()
    assert [config.steps_of(count) for count in (0, 6, 127, 256, 2_054, 20_480, 20_481)] == [
        1, 1, 1, 2, 10, 10, 11,
    ]  # fmt: skip
    assert CompanionConfig(batch_positions=64).steps_of(640) == 10
    # Their step size is smaller by the root of their share.
    trainer = make(chain(), batch_positions=2_048, learning_rate=None, device=device)
    assert trainer._step_size(512) == 0.5 and trainer._step_size(2_048) == 1.0


def test_a_bound_on_a_step_leaves_the_size_of_smaller_ones(chain, device: torch.device) -> None:
    """With batch_positions=256 the default rate was 2.8 times as high in the same ten steps."""
    batch = chain().batch()
    usable = look_up(batch, 3, False).usable_N.numel()
    for bound in (2_048, 256, 10_000):
        trainer = make(chain(), batch_positions=bound, learning_rate=None, device=device)
        assert trainer.last_step_size == 0
        trainer.train_batch(batch, epochs=1, steps=4)
        (group,) = trainer._optimizer.param_groups
        expected = 0.512 / trainer.lm_head_VD.shape[1] * math.sqrt(usable / 4 / 2_048)
        assert trainer.last_step_size == group["lr"] == pytest.approx(expected)
    asked = make(chain(), batch_positions=256, learning_rate=1e-2, device=device)
    assert asked._step_size(256) == 1.0, "a rate that was set is that of whole steps"


def test_the_default_step_size_falls_with_the_width() -> None:
    config = CompanionConfig()
    assert config.learning_rate_of(256) == pytest.approx(2e-3)
    assert config.learning_rate_of(4096) == pytest.approx(1.25e-4)
    assert CompanionConfig(learning_rate=1e-3).learning_rate_of(4096) == 1e-3


def test_trained_heads_are_not_moved_by_a_whole_step_at_once(chain, device: torch.device) -> None:
    """AdamW's first step moves each weight by the step size, whatever its gradient."""
    task = chain()
    untrained = make(task, learning_rate=1e-3, device=device)
    batch = task.batch()
    untrained.train_batch(batch, epochs=1)
    assert untrained._step_size(10_000) == 1.0
    trained = make(task, learning_rate=1e-3, device=device, heads=copy.deepcopy(untrained.heads))
    before = trained.heads.trainable_state()
    trained.train_batch(batch, epochs=1, steps=1)
    moved = max(
        float((after - before[name]).abs().max())
        for name, after in trained.heads.trainable_state().items()
    )
    assert 0 < moved <= 1.01e-3 / 40
    for _ in range(45):
        trained.train_batch(batch, epochs=1, steps=1)
    assert trained._step_size(10_000) == 1.0
    # A new optimizer begins anew; one that goes on from a state, where it was.
    again = make(task, learning_rate=1e-3, device=device)
    again.load_state_dict(trained.state_dict())
    assert again._step_size(10_000) == 1.0
    trained.reset_to(before, moments=False)
    assert trained._step_size(10_000) == 1 / 40


@pytest.mark.parametrize("kind", KINDS)
def test_everything_moves(chain, device: torch.device, kind: str) -> None:
    """Bytes of weights, both moments and tables, to the device and back; on one device there is
    nowhere to go.
    """
    task = chain()
    trainer = make(task, kind)
    weights = sum(p.numel() for p in trainer.heads.parameters())
    tied = trainer.embedding_VD is None or trainer.embedding_VD is trainer.lm_head_VD
    tables = task.lm_head_VD.numel() * (1 if tied else 2)
    assert trainer.move_to(device) == 4 * (weights + tables)
    trainer.train_batch(task.batch())
    before = trainer.state_dict()
    assert {p.device.type for p in trainer.heads.parameters()} == {device.type}
    assert trainer.move_to(torch.device("cpu")) == 4 * (3 * weights + tables)
    assert {p.device.type for p in trainer.heads.parameters()} == {"cpu"}
    assert_same({name: value.cpu() for name, value in before.items()}, trainer.state_dict())
    assert trainer.train_batch(task.batch()).problem == ""


@pytest.mark.parametrize("device", [GPU], indirect=True)
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_left_on_a_gpu(chain, device: torch.device, kind: str) -> None:
    task = chain()
    # Not the default loss: where q equals p its gradient depends on rounding (test_parts.py).
    moved, stayed = make(task, kind, loss="kl"), make(task, kind, loss="kl")
    batches = [task.batch() for _ in range(3)]
    # What cuBLAS keeps from its first product on, and what tests before this one left, is not ours.
    first = make(task, kind, device=device)
    first.train_batch(batches[0])
    del first
    gc.collect()
    before = torch.cuda.memory_allocated()
    for batch in batches:
        moved.move_to(device)
        assert torch.cuda.memory_allocated() > before
        there = moved.train_batch(batch)
        moved.move_to(torch.device("cpu"))
        assert torch.cuda.memory_allocated() == before
        here = stayed.train_batch(batch)
        # Heads that begin at zero and read the drafts before them learn along another path after a
        # change of 1e-7 in a gradient.
        assert there.losses == pytest.approx(here.losses, rel=1e-3 if kind == "medusa" else 0.2)


def test_responses_of_one_token_teach_nothing(chain, device: torch.device) -> None:
    task = chain()
    trainer = make(task, device=device)
    before = trainer.heads.trainable_state()
    assert "No position has a target" in trainer.train_batch(task.single()).problem
    assert_same(before, trainer.heads.trainable_state())


def test_gradient_is_clipped_for_each_head_by_itself() -> None:
    for kind in KINDS:
        torch.manual_seed(0)
        pairs = PAIRS if kind == "context" else 0
        heads = MedusaHeads(
            HeadsConfig(8, 10, num_heads=3, kind="hydra" if pairs else kind, context=pairs)
        )
        named = dict(heads.named_parameters())
        for name, parameter in named.items():
            parameter.grad = torch.randn_like(parameter)
            if name.startswith(SHARED_PREFIXES):
                continue
            if not name.startswith("mlp_in."):
                parameter.grad[1] *= 1e-4
            elif name == "mlp_in.1":
                parameter.grad *= 1e-4
        before = {name: p.grad.clone() for name, p in named.items()}
        norm_K = clip_per_head(named, 3, 1.0)
        again_K = clip_per_head(named, 3, 1e9)
        assert norm_K[0] > 1 and norm_K[2] > 1 and norm_K[1] < 1
        ones = [torch.tensor(1.0)] * (1 + bool(pairs))  # What heads share is clipped by itself.
        assert torch.allclose(
            again_K, torch.stack([torch.tensor(1.0), norm_K[1], *ones]), rtol=1e-5
        )
        assert torch.equal(named["blocks.0"].grad[1], before["blocks.0"][1])
        total = sum(p.grad.square().sum() for p in named.values())
        assert torch.allclose(total, norm_K[1] ** 2 + 1 + len(ones), rtol=1e-4)


def test_batch_of_another_actor_is_refused(chain, device: torch.device) -> None:
    trainer = make(chain(), device=device)
    with pytest.raises(DataError, match="hidden size 20"):
        trainer.train_batch(chain(hidden=20).batch())
    with pytest.raises(DataError, match="token ids"):
        trainer.train_batch(chain(vocab=16).batch())


def test_a_device_without_room_is_not_the_states_fault(
    chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who takes it for one begins anew with heads whose state is whole."""
    trainer = make(chain())
    state = trainer.state_dict()

    def no_room(*given: object) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(type(trainer.heads), "load_trainable_state", no_room)
    with pytest.raises(torch.OutOfMemoryError):
        trainer.load_state_dict(state)


def test_foreign_state_is_refused(chain) -> None:
    task = chain()
    state = make(task, "hydra").state_dict()
    for damage in ("generator", "counters"):
        with pytest.raises(CheckpointError):
            make(task, "hydra").load_state_dict({k: v for k, v in state.items() if k != damage})
    with pytest.raises(CheckpointError):
        make(task, "medusa").load_state_dict(state)
