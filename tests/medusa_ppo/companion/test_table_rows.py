"""Of the actor's tables only the rows travel that a batch needs, and what is learned from them is
what is learned from all.
"""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from heads.checkpoint import load_state
from heads.errors import DataError
from heads.heads_config import HeadsConfig
from medusa_ppo.companion.client import CompanionClient
from medusa_ppo.companion.collector import BatchCollector
from medusa_ppo.companion.cycle import Cycle
from medusa_ppo.companion.desk import CompanionDesk
from medusa_ppo.companion.parts_wire import (
    MOST_DRAFT_IDS,
    PartHeader,
    batch_tensors,
    ids_of_text,
    ids_text,
    read_part,
    write_part,
)
from medusa_ppo.companion.positions import EarlySample
from medusa_ppo.companion.service import STATE_FILE
from medusa_ppo.companion.wire import (
    ServiceArguments,
    TableRows,
    batch_token_ids,
    joined_rows,
    pack,
    table_rows,
    unpack,
)
from medusa_ppo.config.companion_section import CompanionConfig
from medusa_ppo.contract.rollout_batch import RolloutBatch
from medusa_ppo.contract.rollouts import Counters, Response, Rollouts, Sampling
from medusa_ppo.feeds.actor_sketch import sketch_rows
from tests.medusa_ppo.companion.conftest import ChainTask
from tests.medusa_ppo.companion.test_parts_wire import part_of

VOCAB, HIDDEN, DRAFTED = 200, 16, 24
CONFIG = CompanionConfig(batch_positions=64, learning_rate=1e-2, epochs=1)


class Policy:
    """An actor of which every step changes every row, and whose responses use few of them."""

    def __init__(self, tied: bool) -> None:
        self.tied = tied
        self.version = 0
        self._generator = torch.Generator().manual_seed(0)
        self.lm_head_VD = torch.randn(VOCAB, HIDDEN, generator=self._generator).bfloat16()
        self.embedding_VD = self.lm_head_VD if tied else self.lm_head_VD + 1

    def update(self) -> None:
        """In place, as an optimizer does it."""
        self.version += 1
        for table_VD in {id(t): t for t in (self.lm_head_VD, self.embedding_VD)}.values():
            table_VD.add_(torch.randn(VOCAB, HIDDEN, generator=self._generator).bfloat16())

    def batch(self, sequences: int = 16, length: int = 12) -> RolloutBatch:
        """Of the tokens of a part of the vocabulary, which moves with the version."""
        rows = sequences * length
        first = 5 * self.version
        draw = {"generator": self._generator}
        return RolloutBatch(
            torch.randn(rows, HIDDEN, **draw).bfloat16(),
            torch.randint(first, first + 40, (rows,), **draw),
            -torch.rand(rows, **draw),
            torch.full((sequences,), length),
            self.version,
            prompts_S=torch.arange(sequences),
            before_ids_X=torch.randint(90, 100, (2 * sequences,), dtype=torch.int32, **draw),
            before_S=torch.full((sequences,), 2),
        )


def sizes() -> HeadsConfig:
    """Heads that read every kind of row: conditions, a context, what they copy, the teacher's."""
    return HeadsConfig(HIDDEN, VOCAB, 3, "hydra", mlp_ratio=2, context=4, copy_parts=1)


def cycle_of(policy: Policy, **more: Any) -> Cycle:
    return Cycle(
        sizes(),
        CONFIG.model_copy(update=more),
        policy.lm_head_VD.clone(),
        seed=0,
        embedding_VD=policy.embedding_VD.clone() if not policy.tied else None,
        draft_vocab=DRAFTED,
    )


def tied_cycle_of(policy: Policy, **more: Any) -> Cycle:
    table_VD = policy.lm_head_VD.clone()
    config = CONFIG.model_copy(update=more)
    return Cycle(sizes(), config, table_VD, seed=0, embedding_VD=table_VD, draft_vocab=DRAFTED)


def same(left: Cycle, right: Cycle) -> bool:
    states = left.state_dict(), right.state_dict()
    return states[0].keys() == states[1].keys() and all(
        torch.equal(value, states[1][name]) for name, value in states[0].items()
    )


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("replayed", [0, 2])
def test_rows_teach_what_whole_tables_teach(tied: bool, replayed: int) -> None:
    policy = Policy(tied)
    make = tied_cycle_of if tied else cycle_of
    of_all, of_rows = (make(policy, replay_versions=replayed) for _ in range(2))
    sent = 0
    for step in range(6):
        if step:
            policy.update()
            tables = policy.lm_head_VD.clone(), policy.embedding_VD.clone()
            of_all.take_tables((tables[0], tables[0] if tied else tables[1]))
        batch = policy.batch()
        if step:
            ids = batch_token_ids(batch.response_ids_M, batch.before_ids_X)
            rows = table_rows(policy.lm_head_VD, policy.embedding_VD, ids, of_rows.draft_ids)
            sent += rows.nbytes
            of_rows.take_tables(unpack(pack(rows)))
        reports = of_all.run(batch), of_rows.run(batch)
        assert not any(report.problem for report in reports)
    assert of_rows.draft_ids is not None and of_rows.draft_ids.numel() == DRAFTED
    assert same(of_all, of_rows)
    whole = (1 if tied else 2) * policy.lm_head_VD.nbytes
    assert sent < (0.45 if tied else 0.4) * 5 * whole


def test_no_more_than_the_rows_that_are_read_crosses_and_a_tied_one_once() -> None:
    """Both tables crossed whole with every update, in float32: 5 GB for an 8B actor."""
    vocab, hidden, drafted = 20_000, 32, 500
    table_VD = torch.randn(vocab, hidden).bfloat16()
    ids, drafts = torch.arange(300), torch.arange(200, 200 + drafted)
    row = hidden * 2
    both = 200 + drafted
    untied, tied, none, whole = (
        table_rows(table_VD, embedding, ids, some)
        for embedding, some in (
            (table_VD.clone(), drafts),
            (table_VD, drafts),
            (None, drafts),
            (table_VD, None),
        )
    )
    assert untied.lm_head_RD.nbytes == both * row
    assert untied.embedding_ED is not None and untied.embedding_ED.nbytes == len(ids) * row
    assert tied.tied and tied.embedding_ED is None and tied.lm_head_RD.nbytes == both * row
    assert not none.tied and none.nbytes == tied.nbytes
    assert whole.tied and whole.nbytes == table_VD.nbytes
    for rows in (untied, tied, none):
        crossing = len(pickle.dumps(pack(rows), protocol=5))
        assert rows.nbytes < crossing < rows.nbytes + 2000 < 0.11 * table_VD.nbytes
        assert rows.lm_head_RD.dtype == torch.bfloat16
    # What was copied stays what it was.
    before = tied.lm_head_RD.clone()
    table_VD.zero_()
    assert torch.equal(tied.lm_head_RD, before) and bool(whole.lm_head_RD.any())


def test_what_was_given_is_never_written_into() -> None:
    policy = Policy(tied=False)
    given = policy.lm_head_VD.clone(), policy.embedding_VD.clone()
    kept = [table.clone() for table in given]
    cycle = Cycle(
        sizes(),
        CONFIG.model_copy(update={"dtype": "bfloat16"}),
        given[0],
        seed=0,
        embedding_VD=given[1],
        draft_vocab=DRAFTED,
    )
    assert cycle.trainer.lm_head_VD.data_ptr() == given[0].data_ptr(), "nothing is copied at first"
    rows = TableRows(*2 * (torch.ones(2, HIDDEN), torch.tensor([3, 7])))
    cycle.take_tables(rows)
    assert all(map(torch.equal, given, kept))
    for table_VD, before_VD in zip(
        (cycle.trainer.lm_head_VD, cycle.trainer.embedding_VD), kept, strict=True
    ):
        changed_V = (table_VD != before_VD).any(1).nonzero()[:, 0]
        assert changed_V.tolist() == [3, 7] and bool((table_VD[changed_V] == 1).all())
    own = cycle.trainer.lm_head_VD
    cycle.take_tables(rows)
    assert cycle.trainer.lm_head_VD is own, "and once is enough"


@pytest.mark.parametrize(
    ("shape", "ids"),
    [((2, HIDDEN + 1), [3, 7]), ((3, HIDDEN), [3, 7]), ((2, HIDDEN), [3, VOCAB]), ((2, 16), None)],
)
def test_rows_of_another_actor_are_refused(shape: tuple[int, int], ids: list[int] | None) -> None:
    cycle = tied_cycle_of(Policy(tied=True))
    before = cycle.trainer.lm_head_VD.clone()
    rows = TableRows(torch.ones(shape), None if ids is None else torch.tensor(ids))
    with pytest.raises(DataError, match="rows of the actor's tables"):
        cycle.take_tables(rows)
    assert torch.equal(cycle.trainer.lm_head_VD, before)


# ---- of the loop's own companion


def client_for(policy: Policy, folder: Path | str = "") -> CompanionClient:
    return CompanionClient(
        sizes(),
        CONFIG,
        policy.lm_head_VD,
        seed=0,
        run_dir=folder,
        embedding_VD=policy.embedding_VD,
        draft_vocab=DRAFTED,
    )


@pytest.mark.slow
@pytest.mark.usefixtures("ray_session")
def test_each_batch_takes_its_rows_along(tmp_path: Path) -> None:
    """Of a real companion: bytes that went, and heads as whole tables make them."""
    policy = Policy(tied=False)
    whole = cycle_of(policy)
    client = client_for(policy, tmp_path)
    try:
        for step in range(4):
            if step:
                policy.update()
                client.update_lm_head(
                    policy.lm_head_VD, policy.version, embedding_VD=policy.embedding_VD
                )
                whole.take_tables((policy.lm_head_VD.clone(), policy.embedding_VD.clone()))
            batch = policy.batch()
            client.submit(batch)
            # The optimizer goes on at once; rows are those of when it was handed over.
            whole.run(batch)
            if step in (0, 2):
                assert client.drain(60)
                client.newest(0, 10.0)
        assert client.drain(60) and not client.status().error
        assert client.save(tmp_path / "saved")
        state = load_state(tmp_path / "saved" / STATE_FILE)
        for name, value in whole.trainer.state_dict().items():
            assert torch.equal(state[f"trainer.{name}"], value), name
        sketched = len(sketch_rows(VOCAB))
        most = 3 * (DRAFTED + 4 * 50 + sketched + 50) * (2 * HIDDEN + 8)
        assert 0 < client.table_bytes < min(most, 3 * 1.7 * policy.lm_head_VD.nbytes)
    finally:
        client.close()


@pytest.mark.slow
@pytest.mark.usefixtures("ray_session")
def test_what_is_scored_in_part_has_the_tables_of_its_actor() -> None:
    """It is handed over after the next update, which changes the loop's tables in place."""
    policy = Policy(tied=True)
    client = client_for(policy)
    try:
        policy.update()
        client.update_lm_head(policy.lm_head_VD, 1, embedding_VD=policy.embedding_VD)
        responses = (Response(0, (3, 4, 5), (-1.0,) * 3, "length"),)
        rollouts = Rollouts(([7, 8],), responses, Counters(), 0.0, Sampling(), 1)
        collector = client.collector(rollouts)
        scored_VD = policy.lm_head_VD.clone()
        policy.update()
        collector.put(0, torch.zeros(3, HIDDEN))
        _, tables, _ = client._handed(collector.batch())
        rows = unpack(ray.get(tables))
        ids = slice(None) if rows.lm_head_ids_R is None else rows.lm_head_ids_R
        assert torch.equal(rows.lm_head_RD, scored_VD[ids])
        # The next one's are the newest.
        _, tables, _ = client._handed(dataclasses.replace(collector.batch(), policy_version=2))
        rows = unpack(ray.get(tables))
        ids = slice(None) if rows.lm_head_ids_R is None else rows.lm_head_ids_R
        assert torch.equal(rows.lm_head_RD, policy.lm_head_VD[ids])
    finally:
        client.close()


@pytest.mark.parametrize("rows", [None, 300])
def test_a_collector_knows_the_tokens_of_its_batch(rows: int | None) -> None:
    generator = torch.Generator().manual_seed(0)

    def tokens(count: int, first: int) -> tuple[int, ...]:
        return tuple(torch.randint(first, first + 60, (count,), generator=generator).tolist())

    responses = tuple(
        Response(s // 2, tokens(400, 100 * s), (-1.0,) * 400, "length") for s in range(6)
    )
    prompts = tuple(list(tokens(20, 1000)) for _ in range(3))
    rollouts = Rollouts(prompts, responses, Counters(), 0.0, Sampling(), 1)
    collector = BatchCollector(rollouts, rows and EarlySample(rows, 0.0, 0, 3))
    told = collector.token_ids()
    for s, wanted in enumerate(collector.wanted):
        collector.put(s, torch.zeros(int(wanted.sum()), 4))
    batch = collector.batch()
    assert torch.equal(told, batch_token_ids(batch.response_ids_M, batch.before_ids_X))


# ---- of a companion by itself


@pytest.mark.parametrize("drafted", [1, 50, 200])
def test_tokens_cross_as_text(drafted: int) -> None:
    ids = torch.randperm(VOCAB)[:drafted].sort().values
    back = ids_of_text(ids_text(ids, VOCAB), VOCAB)
    assert back is not None and torch.equal(back, ids)
    assert ids_of_text(ids_text(None, VOCAB), VOCAB) is None
    scattered = torch.randperm(2_000_000)[:400_000].sort().values
    assert ids_text(scattered, 2_000_000) == "", "then all rows are wanted"
    of_a_large_actor = torch.randperm(152_000)[:20_000]
    assert 0 < len(ids_text(of_a_large_actor, 152_000)) <= MOST_DRAFT_IDS


def test_text_that_is_no_tokens_is_refused() -> None:
    bomb = ids_text(torch.arange(1), 50_000_000)
    for text in ("x", "AAAA", ids_text(torch.arange(3), VOCAB + 80), bomb):
        with pytest.raises(DataError, match="does not encode tokens"):
            ids_of_text(text, VOCAB)


HEADER = PartHeader(number=3, policy_version=7, tables_version=7)


@pytest.mark.parametrize("kind", ["tied", "untied", "lm_head", "whole"])
def test_rows_come_out_of_a_part_as_they_were(tmp_path: Path, kind: str) -> None:
    task = ChainTask()
    batch = part_of(task)
    ids = batch_token_ids(batch.response_ids_M, batch.before_ids_X)
    embedding_VD = {"tied": task.lm_head_VD, "lm_head": None}.get(kind, task.lm_head_VD + 1)
    drafts = None if kind == "whole" else torch.tensor([0, 11])
    rows = table_rows(task.lm_head_VD, embedding_VD, ids, drafts)
    path = tmp_path / "part"
    header = write_part(path, batch_tensors(batch, logprobs=True), rows, HEADER)
    found = read_part(path, header, task.hidden, task.vocab).tables
    assert isinstance(found, TableRows) and found.tied == (kind == "tied")
    for field in ("lm_head_RD", "lm_head_ids_R", "embedding_ED", "embedding_ids_E"):
        left, right = getattr(rows, field), getattr(found, field)
        assert (left is None) == (right is None) and (left is None or torch.equal(left, right))


def test_rows_that_no_tap_sends_are_refused(tmp_path: Path) -> None:
    task = ChainTask()
    batch = batch_tensors(part_of(task), logprobs=True)
    good = {
        "lm_head_RD": task.lm_head_VD[[1, 3]],
        "lm_head_ids_R": torch.tensor([1, 3]),
        "embedding_ED": task.lm_head_VD[[2]],
        "embedding_ids_E": torch.tensor([2]),
    }
    path = tmp_path / "part"
    write_part(path, {**batch, **good}, None, HEADER)
    assert isinstance(read_part(path, HEADER, task.hidden, task.vocab).tables, TableRows)
    lm_head = {"lm_head_RD", "lm_head_ids_R"}
    for changed in (
        {"lm_head_ids_R": torch.tensor([3, 1])},
        {"lm_head_ids_R": torch.tensor([1, 1])},
        {"lm_head_ids_R": torch.tensor([-1, 3])},
        {"lm_head_ids_R": torch.tensor([1, task.vocab])},
        {"lm_head_ids_R": torch.tensor([1, 2, 3])},
        {"lm_head_ids_R": torch.zeros(0, dtype=torch.int64), "lm_head_RD": torch.zeros(0, 16)},
        {"lm_head_RD": torch.zeros(2, 17)},
        {"lm_head_VD": task.lm_head_VD},
        {"embedding_VD": task.lm_head_VD},
        dict.fromkeys(lm_head),
        {"embedding_ids_E": None},
    ):
        tensors = {n: v for n, v in {**batch, **good, **changed}.items() if v is not None}
        write_part(path, tensors, None, HEADER)
        with pytest.raises(DataError):
            read_part(path, HEADER, task.hidden, task.vocab)


@pytest.fixture
def desk(tmp_path: Path):
    policy = Policy(tied=False)
    config = CONFIG.model_copy(update={"feed": str(tmp_path / "feed")})
    arguments = ServiceArguments(
        sizes(), config, 0, None, "", str(tmp_path / "published"), draft_vocab=DRAFTED
    )
    made = CompanionDesk(arguments, (policy.lm_head_VD.clone(), policy.embedding_VD.clone()))
    yield made, policy
    made.close()


def send(
    desk: CompanionDesk, batch: RolloutBatch, tables: Any, logprobs: bool = True, **told: int
) -> None:
    path = desk.folder / "incoming"
    header = PartHeader(policy_version=batch.policy_version, **told)
    desk.take(path, write_part(path, batch_tensors(batch, logprobs=logprobs), tables, header))
    path.unlink()


def test_a_companion_by_itself_learns_from_rows_of_several_processes(desk) -> None:
    served, policy = desk
    assert served.wish().draft_ids == "", "before drafts come from some tokens all are wanted"
    send(served, policy.batch(), (policy.lm_head_VD, policy.embedding_VD), number=0)
    assert served.drain(60)
    for number in (1, 2):
        policy.update()
        drafts = ids_of_text(served.wish().draft_ids, VOCAB)
        assert drafts is not None and drafts.numel() < VOCAB
        for rank in (1, 0):
            batch = policy.batch()
            ids = batch_token_ids(batch.response_ids_M, batch.before_ids_X)
            own = ids if rank else drafts
            rows = table_rows(policy.lm_head_VD, policy.embedding_VD, ids, own)
            assert rows.nbytes < 0.85 * policy.lm_head_VD.nbytes * 2
            told = {"number": number, "rank": rank, "ranks": 2, "tables_version": number}
            send(served, batch, rows, **told)
        assert served.drain(60) and not served.status().error
        assert served.status().batches_trained == number + 1
        trainer = served._service._cycle.trainer
        assert torch.equal(
            trainer.lm_head_VD[drafts], policy.lm_head_VD[drafts].to(trainer.lm_head_VD.dtype)
        )
    assert served.wish().tables_version is None, "what it has is of several versions now"


def test_rows_without_those_of_the_first_process_are_not_learned_from(desk) -> None:
    served, policy = desk
    batch = policy.batch()
    ids = batch_token_ids(batch.response_ids_M, batch.before_ids_X)
    rows = table_rows(policy.lm_head_VD, policy.embedding_VD, ids, ids)
    told = {"ranks": 2, "tables_version": 5}
    send(served, batch, rows, number=1, rank=1, **told)
    send(served, batch, rows, number=2, rank=1, **told)  # The step before had one part alone.
    assert served.status().batches_received == 0
    assert "first process" in served.wish().problem


def test_log_probs_do_not_follow_from_some_rows(desk) -> None:
    served, policy = desk
    batch = policy.batch()
    ids = batch_token_ids(batch.response_ids_M, batch.before_ids_X)
    rows = table_rows(policy.lm_head_VD, policy.embedding_VD, ids, ids)
    send(served, batch, rows, logprobs=False, number=1, tables_version=5)
    assert served.status().batches_received == 0 and "log-probs" in served.wish().problem
    whole = table_rows(policy.lm_head_VD, policy.embedding_VD, ids, None)
    send(served, batch, whole, logprobs=False, number=2, tables_version=5)
    assert served.drain(60) and served.status().batches_trained == 1
    assert not served.status().error


def test_rows_of_several_processes_are_one() -> None:
    parts = [
        TableRows(torch.full((2, 3), 1.0), torch.tensor([0, 4]), tied=True),
        TableRows(torch.full((1, 3), 2.0), torch.tensor([9]), tied=True),
    ]
    one = joined_rows(parts)
    assert one.tied and one.lm_head_ids_R is not None and one.lm_head_ids_R.tolist() == [0, 4, 9]
    assert one.lm_head_RD[:, 0].tolist() == [1.0, 1.0, 2.0]
    whole = TableRows(torch.zeros(10, 3))
    both = joined_rows([parts[0], whole])
    assert both.lm_head_ids_R is None and torch.equal(both.lm_head_RD, whole.lm_head_RD)
