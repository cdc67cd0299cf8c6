"""Parts of a batch cross as they are; whatever else comes is refused before it is used."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from heads.errors import CheckpointError, DataError
from heads.losses import Teacher, known_lse
from heads.tensorfile import save_state
from medusa_ppo.companion.parts_wire import (
    LOGPROB_ROWS,
    PartHeader,
    Wish,
    batch_tensors,
    joined,
    prompt_key,
    read_message,
    read_part,
    rows_without_logprobs,
    with_logprobs,
    write_part,
)
from medusa_ppo.contract.rollout_batch import RolloutBatch
from tests.medusa_ppo.companion.conftest import ChainTask
from tests.medusa_ppo.ppo.test_recompute import LiveBytes

HEADER = PartHeader(number=3, policy_version=7, tables_version=6, temperature=0.7, left_out=5)


@pytest.fixture
def task() -> ChainTask:
    return ChainTask()


def part_of(task: ChainTask, sequences: int = 5) -> RolloutBatch:
    """With prompts, as a tap makes it."""
    batch = task.batch(sequences)
    keys = torch.tensor([prompt_key([row // 2]) for row in range(sequences)])
    before_S = torch.full((sequences,), 2)
    return replace(
        batch,
        prompts_S=keys,
        before_ids_X=torch.arange(2 * sequences, dtype=torch.int32) % task.vocab,
        before_S=before_S,
    )


def written(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    save_state(tmp_path / "part", tensors)
    return tmp_path / "part"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tied", [True, False])
def test_a_part_comes_out_as_it_was(
    task: ChainTask, tmp_path: Path, dtype: torch.dtype, tied: bool
) -> None:
    batch = part_of(task)
    batch = replace(batch, hidden_MD=batch.hidden_MD.to(dtype))
    lm_head_VD = task.lm_head_VD.to(dtype)
    tables = lm_head_VD, lm_head_VD if tied else lm_head_VD + 1
    path = tmp_path / "part"
    header = write_part(path, batch_tensors(batch, logprobs=True), tables, HEADER)
    header = read_message(PartHeader, header.model_dump_json())
    part = read_part(path, header, task.hidden, task.vocab)
    path.unlink()  # What was read stays.
    for name in ("hidden_MD", "response_ids_M", "logprobs_M", "lengths_S", "prompts_S", "before_S"):
        assert torch.equal(getattr(part.batch, name), getattr(batch, name)), name
    assert part.batch.policy_version == 7 and part.batch.temperature == 0.7
    assert part.batch.left_out == 5 and part.has_logprobs
    assert part.tables is not None and torch.equal(part.tables[0], lm_head_VD)
    assert (part.tables[1] is part.tables[0]) == tied
    assert part.tables[1] is not None and torch.equal(part.tables[1], tables[1])


def test_a_part_without_rows_has_at_most_tables(task: ChainTask, tmp_path: Path) -> None:
    path = tmp_path / "part"
    header = write_part(path, {}, None, HEADER)
    part = read_part(path, header, task.hidden, task.vocab)
    assert not header.rows and part.batch is None and part.tables is None
    header = write_part(path, {}, (task.lm_head_VD, None), HEADER)
    part = read_part(path, header, task.hidden, task.vocab)
    assert part.batch is None and part.tables is not None
    assert torch.equal(part.tables[0], task.lm_head_VD)
    with pytest.raises(DataError, match="missing: hidden_MD"):
        read_part(path, HEADER, task.hidden, task.vocab)
    write_part(path, batch_tensors(part_of(task), logprobs=True), None, HEADER)
    with pytest.raises(DataError, match="no row; and perhaps"):
        read_part(path, header, task.hidden, task.vocab)


def test_log_probs_that_did_not_come_are_those_of_the_states(
    task: ChainTask, tmp_path: Path
) -> None:
    batch = replace(part_of(task), temperature=0.7)
    path = tmp_path / "part"
    write_part(path, batch_tensors(batch, logprobs=False), None, HEADER)
    part = read_part(path, HEADER, task.hidden, task.vocab)
    missing = rows_without_logprobs([part])
    found = with_logprobs(part.batch, missing, task.lm_head_VD).logprobs_M
    logits_MV = batch.hidden_MD @ task.lm_head_VD.T / 0.7
    expected = logits_MV.log_softmax(-1)[range(len(found)), batch.response_ids_M]
    torch.testing.assert_close(found, expected)


def as_sampled(logits_V: torch.Tensor, token: int, top_k: int, top_p: float) -> float:
    """log-prob of a token, by hand: the `top_k` likeliest tokens, of these the likeliest until
    their mass reaches `top_p`, and in any case the token itself.
    """
    order = logits_V.argsort(descending=True).tolist()[: top_k or None]
    p_K = logits_V[order].double().softmax(-1).tolist()
    kept = {token} | {order[i] for i in range(len(order)) if sum(p_K[:i]) < top_p}
    return float(logits_V[token].double() - logits_V[sorted(kept)].double().logsumexp(-1))


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 0.9), (3, 1.0), (5, 0.8), (0, 0.3), (99, 1.0)])
@pytest.mark.parametrize("rows", [1, 20, 1024])
def test_log_probs_that_did_not_come_are_of_what_was_sampled_from(
    top_k: int, top_p: float, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were those over all tokens: too small, so that drafts were judged too good. A token that
    the actor's rounding leaves out was sampled, so it counts.
    """
    monkeypatch.setattr("medusa_ppo.companion.parts_wire.LOGPROB_ROWS", rows)
    generator = torch.Generator().manual_seed(3)
    lm_head_VD = torch.randn(50, 16, generator=generator)
    hidden_MD = torch.randn(40, 16, generator=generator)
    logits_MV = hidden_MD @ lm_head_VD.T / 0.7
    ids_M = torch.multinomial(logits_MV.softmax(-1), 1, generator=generator)[:, 0]
    batch = RolloutBatch(
        hidden_MD,
        ids_M,
        torch.zeros(40),
        torch.full((4,), 10),
        temperature=0.7,
        top_k=top_k,
        top_p=top_p,
    )
    found = with_logprobs(batch, ((0, 15), (15, 40)), lm_head_VD).logprobs_M
    expected = [
        as_sampled(logits_V, token, top_k, top_p)
        for logits_V, token in zip(logits_MV, ids_M.tolist(), strict=True)
    ]
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-4, atol=1e-5)


def test_the_actors_share_of_a_draft_vocabulary_is_of_what_was_sampled_from() -> None:
    """The log-probs normalise it. Where drafts may be any token that top-k keeps, it is all; it was
    the mass before the cut.
    """
    generator = torch.Generator().manual_seed(3)
    lm_head_VD = torch.randn(50, 16, generator=generator)
    hidden_MD = torch.randn(40, 16, generator=generator)
    ids_W = torch.arange(30)
    logits_MV = hidden_MD @ lm_head_VD.T
    kept_M3 = logits_MV.topk(3).indices
    rows = (kept_M3 < 30).all(1)
    count = int(rows.sum())
    assert count > 4
    batch = RolloutBatch(
        hidden_MD[rows],
        kept_M3[rows, 1],
        torch.zeros(count),
        torch.tensor([count]),
        top_k=3,
    )
    batch = with_logprobs(batch, ((0, count),), lm_head_VD)
    lse_M = known_lse(batch.hidden_MD, batch.response_ids_M, batch.logprobs_M, lm_head_VD, 1.0)
    places_M = torch.arange(count)
    teacher = Teacher(batch.hidden_MD, places_M[:, None], lm_head_VD[ids_W], top_k=3, lse_M=lse_M)
    torch.testing.assert_close(teacher.logprobs(places_M).exp().sum(1), torch.ones(count))


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (0, 0.9), (20, 0.9)])
def test_a_cut_takes_no_more_memory_however_long_the_batch(top_k: int, top_p: float) -> None:
    """Two float32 tables of a block's logits, as before there were cuts."""
    vocab = 400
    lm_head_VD = torch.randn(vocab, 8).bfloat16()
    for blocks in (1, 3):
        count = blocks * LOGPROB_ROWS
        batch = RolloutBatch(
            torch.randn(count, 8).bfloat16(),
            torch.randint(vocab, (count,)),
            torch.zeros(count),
            torch.tensor([count]),
            top_k=top_k,
            top_p=top_p,
        )
        with LiveBytes(torch.nn.Module()) as live:
            found = with_logprobs(batch, ((0, count),), lm_head_VD)
        beside = batch.logprobs_M.nbytes + batch.hidden_MD.nbytes + lm_head_VD.nbytes
        assert live.peak - beside < 2.1 * 4 * vocab * LOGPROB_ROWS
        assert bool(found.logprobs_M.isfinite().all())


def test_log_probs_that_came_stay_beside_those_that_are_computed(
    task: ChainTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("medusa_ppo.companion.parts_wire.LOGPROB_ROWS", 7)
    parts = []
    for rank, logprobs in enumerate((False, True, False)):
        batch = part_of(task)
        told = batch.logprobs_M - 1  # Not what the states give.
        tensors = batch_tensors(replace(batch, logprobs_M=told), logprobs=logprobs)
        path = tmp_path / f"part {rank}"
        write_part(path, tensors, None, HEADER)
        parts.append(read_part(path, HEADER, task.hidden, task.vocab))
    batch = joined([part.batch for part in parts])
    found = with_logprobs(batch, rows_without_logprobs(parts), task.lm_head_VD)
    logits_MV = batch.hidden_MD @ task.lm_head_VD.T / batch.temperature
    computed = logits_MV.log_softmax(-1)[range(len(logits_MV)), batch.response_ids_M]
    first, second, _ = (part.batch.response_ids_M.numel() for part in parts)
    for rows, expected in (
        (slice(0, first), computed),
        (slice(first, first + second), batch.logprobs_M),
        (slice(first + second, None), computed),
    ):
        torch.testing.assert_close(found.logprobs_M[rows], expected[rows])
    assert bool((batch.logprobs_M[:first] == 0).all()), "what was given is not written to"


def test_a_sample_and_a_whole_part_become_one_batch(task: ChainTask) -> None:
    first, second = part_of(task, 3), part_of(task, 2)
    weights_M = torch.zeros(first.response_ids_M.numel())
    batch = joined([replace(first, weights_M=weights_M), second])
    assert batch.lengths_S.numel() == 5 and batch.weights_M is not None
    assert batch.weights_M[: weights_M.numel()].sum() == 0
    assert bool((batch.weights_M[weights_M.numel() :] == 1).all())


def test_prompts_have_a_number_wherever_they_are() -> None:
    assert prompt_key([1, 23]) == prompt_key((1, 23)) != prompt_key([12, 3])
    assert 0 <= prompt_key([]) < 1 << 63


WRONG: dict[str, Callable[[dict[str, torch.Tensor]], None]] = {
    "missing": lambda part: part.pop("lengths_S"),
    "unknown": lambda part: part.update(more=torch.zeros(1)),
    "another width": lambda part: part.update(hidden_MD=part["hidden_MD"][:, :-1]),
    "fewer states": lambda part: part.update(hidden_MD=part["hidden_MD"][:-1]),
    "integer states": lambda part: part.update(hidden_MD=part["hidden_MD"].long()),
    "a token beyond": lambda part: part["response_ids_M"].fill_(12),
    "a token below": lambda part: part["response_ids_M"].fill_(-1),
    "a prompt beyond": lambda part: part["before_ids_X"].fill_(12),
    "no response": lambda part: part["lengths_S"].fill_(0),
    "lengths that wrap": lambda part: part["lengths_S"].fill_((1 << 63) - 1),
    "lengths that don't sum": lambda part: part["lengths_S"].fill_(1),
    "before below 0": lambda part: part["before_S"].fill_(-1),
    "weights below 0": lambda part: part.update(
        weights_M=torch.full(part["response_ids_M"].shape, -1.0)
    ),
    "an embedding alone": lambda part: part.update(embedding_VD=torch.zeros(12, 16)),
    "another vocabulary": lambda part: part.update(lm_head_VD=torch.zeros(13, 16)),
    "nothing": lambda part: part.clear(),
}


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG)
def test_rows_that_do_not_fit_are_refused(
    task: ChainTask, tmp_path: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    tensors = {
        name: value.clone() for name, value in batch_tensors(part_of(task), logprobs=True).items()
    }
    change(tensors)
    with pytest.raises(DataError, match="do this"):
        read_part(written(tmp_path, tensors), HEADER, task.hidden, task.vocab)


def test_files_that_are_none_are_refused(task: ChainTask, tmp_path: Path) -> None:
    path = tmp_path / "part"
    write_part(path, batch_tensors(part_of(task), logprobs=True), None, HEADER)
    whole = path.read_bytes()
    start = whole.index(b"hidden_MD")
    nan = bytearray(whole)
    nan[-4:] = b"\xff\xff\xff\xff"
    for data in (
        b"",
        b"\x00" * 64,
        pickle.dumps({"hidden_MD": [1.0]}),
        whole[:-4],
        whole[: start + 4],
        b"\xff" * 8 + whole[8:],
        bytes(nan),
    ):
        path.write_bytes(data)
        with pytest.raises((CheckpointError, DataError)):
            read_part(path, HEADER, task.hidden, task.vocab)


def test_states_that_are_not_finite_are_not_sent(task: ChainTask, tmp_path: Path) -> None:
    batch = part_of(task)
    batch.hidden_MD[0, 0] = float("nan")
    with pytest.raises(CheckpointError):
        write_part(tmp_path / "part", batch_tensors(batch, logprobs=True), None, HEADER)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"number": 1}',
        '{"number": 1, "policy_version": 1, "more": 1}',
        '{"number": -1, "policy_version": 1}',
        '{"number": 1.5, "policy_version": 1}',
        '{"number": 1, "policy_version": 1, "rank": 2, "ranks": 2}',
        '{"number": 1, "policy_version": 1, "temperature": 0}',
        '{"number": 1, "policy_version": 1, "temperature": NaN}',
        '{"number": 1, "policy_version": 1, "top_p": 1.5}',
        '{"number": 1, "policy_version": 1e400}',
    ],
)
def test_a_header_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(DataError, match="do this"):
        read_message(PartHeader, text)


def test_a_wish_crosses(task: ChainTask) -> None:
    wish = Wish(rows=100, ahead=3, hidden=16, vocab=12, embedding=True)
    assert read_message(Wish, wish.model_dump_json()) == wish
