"""The tap of any loop: what it sends is what the pass computed, from a real companion's point of
view, over HTTP and in a Ray; and no companion does anything to the loop.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from ray.exceptions import ObjectStoreFullError, RayError, RaySystemError
from transformers import LlamaForCausalLM
from typer.testing import CliRunner

from heads.checkpoint import checksum, load_heads, save_heads, save_state
from heads.errors import (
    CheckpointError,
    CompanionError,
    ConfigError,
    DataError,
    ModelError,
    RunError,
)
from medusa_ppo.actors.hf import HFActor, load_actor
from medusa_ppo.cli.app import app
from medusa_ppo.companion.companion_link import COMPANION_TOKEN, CompanionLink, RayLink
from medusa_ppo.companion.parts_wire import PartHeader, Wish, write_part
from medusa_ppo.companion.service import STATE_FILE
from medusa_ppo.companion.wire import TableRows, unpack
from medusa_ppo.contract.rollout_batch import RolloutBatch
from medusa_ppo.engines.http_server import free_port
from medusa_ppo.feeds.feed_manifest import FeedActor, Release
from medusa_ppo.feeds.folder_feed import FolderFeed
from medusa_ppo.loops import served_companion
from medusa_ppo.loops import tap as tap_module
from medusa_ppo.loops.remote import read_tables
from medusa_ppo.loops.tap import CompanionTap
from medusa_ppo.plugin.medusa_plugin import heads_for_table
from tests.medusa_ppo.loops.served_desk import ServedDesk, desk_config, served_desk

ROOT = Path(__file__).resolve().parents[3]
PROMPTS = [[5, 6], [7], [5, 6]]
COMPLETIONS = [[1, 2], [3, 3, 4], [9]]


@pytest.fixture
def actor(chain_actor: Path, device: torch.device) -> LlamaForCausalLM:
    return load_actor(chain_actor).to(device)


@pytest.fixture
def whole(
    chain_actor: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ServedDesk]:
    monkeypatch.setenv(COMPANION_TOKEN, "a secret of this test")
    with served_desk(chain_actor, tmp_path) as found:
        yield found


@pytest.fixture
def served(whole: ServedDesk) -> tuple[Any, str]:
    """A companion's desk in this process, and its address."""
    return whole.desk, whole.address


@pytest.fixture
def seen(whole: ServedDesk) -> list[RolloutBatch]:
    """Batches as they reach the training."""
    return whole.seen


def score(actor: LlamaForCausalLM, rows: list[int]) -> Any:
    """The loop's pass over some of its rows, padded."""
    width = max(len(PROMPTS[row]) + len(COMPLETIONS[row]) for row in rows)
    ids_BT = torch.zeros(len(rows), width, dtype=torch.int64)
    attention_BT = torch.zeros_like(ids_BT)
    for place, row in enumerate(rows):
        whole = [*PROMPTS[row], *COMPLETIONS[row]]
        ids_BT[place, : len(whole)] = torch.tensor(whole)
        attention_BT[place, : len(whole)] = 1
    return actor(input_ids=ids_BT.to(actor.device), attention_mask=attention_BT.to(actor.device))


def expected(actor: LlamaForCausalLM) -> tuple[torch.Tensor, torch.Tensor]:
    """States and log-probs of all response tokens, one row after the other."""
    states, logprobs = [], []
    for prompt, answer in zip(PROMPTS, COMPLETIONS, strict=True):
        with torch.no_grad():
            ids_1T = torch.tensor([[*prompt, *answer]], device=actor.device)
            hidden = actor.model(ids_1T).last_hidden_state[0]
            states.append(hidden[len(prompt) - 1 : -1])
            logits = actor.lm_head(states[-1]).log_softmax(-1)
        logprobs.append(logits[range(len(answer)), answer])
    return torch.cat(states).cpu(), torch.cat(logprobs).cpu()


@torch.no_grad()
def test_what_the_pass_computed_arrives(
    served: tuple[Any, str], seen: list[RolloutBatch], actor: LlamaForCausalLM
) -> None:
    with CompanionTap(actor, served[1]) as tap:
        with tap(PROMPTS, COMPLETIONS):
            for part in ([2], [1, 0]):
                score(actor, part)
        assert tap.drain(30) and (tap.sent, tap.lost, tap.problem) == (1, 0, "")
        assert not actor.base_model._forward_hooks
    (batch,) = seen
    states_MD, logprobs_M = expected(actor)
    assert batch.response_ids_M.tolist() == [1, 2, 3, 3, 4, 9]
    torch.testing.assert_close(batch.hidden_MD, states_MD, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(batch.logprobs_M, logprobs_M, rtol=1e-4, atol=1e-5)
    assert batch.prompts_S is not None and batch.prompts_S[0] == batch.prompts_S[2]
    assert batch.prompts_S[0] != batch.prompts_S[1]


@torch.no_grad()
def test_a_loop_without_a_line_of_its_own(
    whole: ServedDesk, served: tuple[Any, str], seen: list[RolloutBatch], actor: LlamaForCausalLM
) -> None:
    logprobs = [[-0.5] * len(answer) for answer in COMPLETIONS]
    with CompanionTap(actor, served[1]) as tap:
        tap.expect(PROMPTS, COMPLETIONS, logprobs)
        score(actor, [0, 1, 2])
        actor.lm_head.weight.add_(1.0)  # The update; the rows' tables are those before it.
        tap.updated()
        assert tap.drain(30) and tap.sent == 1
        with tap(PROMPTS, COMPLETIONS):
            score(actor, [0, 1, 2])
        assert tap.drain(30) and tap.sent == 2
    first, second = seen
    assert bool((first.logprobs_M == -0.5).all())
    assert (first.policy_version, second.policy_version) == (0, 1)
    assert served[0].wish().tables_version == 1
    torch.testing.assert_close(whole.tables[0], actor.lm_head.weight.cpu())


@torch.no_grad()
def test_tables_are_read_only_for_rows_that_are_wanted(
    whole: ServedDesk,
    served: tuple[Any, str],
    actor: LlamaForCausalLM,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While the companion wants nothing, an update costs nothing; then those tables are read that
    the pass is about to use.
    """
    reads: list[str] = []

    @contextlib.contextmanager
    def reading() -> Iterator[None]:
        reads.append("read")
        yield

    with CompanionTap(actor, served[1], reading=reading) as tap:
        assert len(reads) == 1, "to check whose tables they are"
        ask = tap._sender._link.ask
        nothing = {"rows": 0}
        monkeypatch.setattr(tap._sender._link, "ask", lambda: ask().model_copy(update=nothing))
        with tap([], []):
            pass
        assert tap.drain(30)
        for _ in range(3):
            with tap(PROMPTS, COMPLETIONS):
                score(actor, [0, 1, 2])
            actor.lm_head.weight.add_(1.0)
            tap.updated()
            assert tap.drain(30)
        assert len(reads) == 1 and tap.sent == 0
        monkeypatch.setattr(tap._sender._link, "ask", ask)
        with tap([], []):
            pass
        assert tap.drain(30)
        with tap(PROMPTS, COMPLETIONS):
            score(actor, [0, 1, 2])
        assert tap.drain(30) and (tap.sent, tap.problem) == (1, "")
    assert len(reads) == 2, "once more, for the only rows that were wanted"
    torch.testing.assert_close(whole.tables[0], actor.lm_head.weight.cpu())
    assert served[0].wish().tables_version == 3


@torch.no_grad()
def test_the_embedding_is_gathered_for_heads_that_read_it(
    whole: ServedDesk, actor: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if a companion with such heads takes the place of one with others."""
    asked: list[bool] = []
    refresh = HFActor.refresh
    monkeypatch.setattr(
        HFActor,
        "refresh",
        lambda self, *, embedding=True: (asked.append(embedding), refresh(self))[1],
    )
    with CompanionTap(actor, whole.address) as tap:
        for number, reads in enumerate((False, False, True, True, False)):
            tap._sender.wish = tap.wish.model_copy(update={"embedding": reads, "rows": 64})
            asked.clear()
            with tap(PROMPTS, COMPLETIONS):
                score(actor, [0, 1, 2])
            # Before the first update there is nothing to gather again.
            assert asked == ([reads] if number else [])
            assert tap.drain(30)
            if number != 1:  # The third one's companion needs it without an update.
                actor.lm_head.weight.add_(1.0)
                tap.updated()


@torch.no_grad()
def test_only_the_rows_of_the_tables_that_a_batch_needs_are_sent(
    chain_actor: Path,
    actor: LlamaForCausalLM,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once drafts come from some tokens only: theirs, and those of the batch."""
    monkeypatch.setenv(COMPANION_TOKEN, "a secret of this test")
    logprobs = [[-0.5] * len(answer) for answer in COMPLETIONS]
    own = {token for row in [*PROMPTS, *COMPLETIONS] for token in row}
    with (
        served_desk(chain_actor, tmp_path, draft_vocab=4) as served,
        CompanionTap(actor, served.address) as tap,
    ):
        sent: list[Any] = []
        put = tap._sender._put
        monkeypatch.setattr(
            tap._sender, "_put", lambda parcel: (sent.append(parcel.tables), put(parcel))[1]
        )
        for _ in range(4):
            live_VD = actor.lm_head.weight.cpu().clone()
            with tap(PROMPTS, COMPLETIONS, logprobs):
                score(actor, [0, 1, 2])
            assert tap.drain(30) and served.desk.drain(30) and not tap.problem
            actor.lm_head.weight.add_(0.1)
            tap.updated()
            with tap([], []):  # Asks what is wanted, now that the last batch is counted.
                pass
            assert tap.drain(30)
        assert isinstance(sent[0], tuple), "nothing was counted yet"
        rows = sent[-1]
        ids_R = rows.lm_head_ids_R
        assert own <= set(ids_R.tolist()) and ids_R.numel() < len(live_VD)
        assert torch.equal(rows.lm_head_RD, live_VD[ids_R]), "those from before the update"
        trainer = served.desk._service._cycle.trainer
        torch.testing.assert_close(trainer.lm_head_VD.cpu()[ids_R], live_VD[ids_R].float())
        assert trainer.batches_trained == 4
        with tap(PROMPTS, COMPLETIONS):  # Log-probs follow from all of lm_head.
            score(actor, [0, 1, 2])
        assert tap.drain(30) and not tap.problem
        assert sent[-1][0].shape == live_VD.shape


@torch.no_grad()
def test_parts_of_several_processes_are_one_batch(
    whole: ServedDesk,
    served: tuple[Any, str],
    seen: list[RolloutBatch],
    chain_actor: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each has rows of its own; the first one sends the tables. Nobody waits for who has none,
    and its tables come all the same.
    """
    monkeypatch.setattr(whole.desk, "_rows", lambda status: 64)  # However busy it is.
    actors = [load_actor(chain_actor) for _ in range(2)]
    taps = [CompanionTap(actors[rank], served[1], rank=rank, ranks=2) for rank in range(2)]
    own = ([0, 2], [1])

    def step(ranks: tuple[int, ...]) -> None:
        for rank in ranks:
            rows = own[rank]
            with taps[rank]([PROMPTS[r] for r in rows], [COMPLETIONS[r] for r in rows]):
                score(actors[rank], rows)
            assert taps[rank].drain(30) and not taps[rank].problem
        for tap in taps:
            with tap([], []):  # A process without rows comes all the same.
                pass
        for tap, actor in zip(taps, actors, strict=True):
            actor.lm_head.weight.mul_(2.0)
            tap.updated()

    step((1, 0))  # In any order.
    assert [batch.response_ids_M.tolist() for batch in seen] == [[3, 3, 4, 1, 2, 9]]
    assert served[0].wish().tables_version == 0
    assert seen[0].prompts_S is not None and len(set(seen[0].prompts_S.tolist())) == 2
    for rank in (0, 1):
        # Of the other one no row may be learned from (tools' answers in each of them).
        step((rank,))
        assert all(tap.drain(30) and not tap.problem for tap in taps)
        assert seen[-1].response_ids_M.tolist() == [[1, 2, 9], [3, 3, 4]][rank]
        assert len(seen) == 2 + rank, "nobody waits for the next step"
    assert torch.equal(whole.tables[0], actors[0].lm_head.weight.cpu() / 2), "before the update"
    step((0, 1))
    assert [batch.response_ids_M.tolist() for batch in seen[3:]] == [[1, 2, 9, 3, 3, 4]]
    assert [batch.policy_version for batch in seen] == [0, 1, 2, 3]
    assert [tap.lost for tap in taps] == [0, 0]
    for tap in taps:
        tap.close()


class Meetings:
    """torch.distributed's part for processes that are threads of this one."""

    def __init__(self, ranks: int) -> None:
        self._barrier = threading.Barrier(ranks, timeout=120)
        self._told: list[torch.Tensor] = []

    def all_reduce(self, tensor: torch.Tensor, op: Any) -> None:
        self._told.append(tensor)
        self._barrier.wait()
        most = torch.stack(self._told).amax(0)
        self._barrier.wait()
        tensor.copy_(most)
        if self._barrier.wait() == 0:
            self._told.clear()
        self._barrier.wait()


def test_each_pass_of_a_step_is_complete_whoever_has_no_rows_in_it(
    chain_actor: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first process sent nothing for its second call, and the others' rows of that one were
    dropped without the tables that only it sends.
    """
    monkeypatch.setenv(COMPANION_TOKEN, "a secret of this test")
    monkeypatch.setattr(tap_module.dist, "get_backend", lambda: "gloo")
    monkeypatch.setattr(tap_module.dist, "all_reduce", Meetings(2).all_reduce)
    own = {0: ([0], [], [0], []), 1: ([1], [1], [], [])}
    with served_desk(chain_actor, tmp_path, draft_vocab=4) as served, contextlib.ExitStack() as st:
        monkeypatch.setattr(served.desk, "_rows", lambda status: 64)  # However busy it is.
        taps = []
        for rank in own:
            actor = load_actor(chain_actor)
            tap = st.enter_context(CompanionTap(actor, served.address, rank=rank, ranks=2))
            tap._meets = True
            taps.append((tap, actor))

        @torch.no_grad()
        def run(rank: int, step: int) -> None:
            tap, actor = taps[rank]
            for rows in own[rank]:
                logprobs = [[-0.5] * len(COMPLETIONS[row]) for row in rows]
                with tap([PROMPTS[r] for r in rows], [COMPLETIONS[r] for r in rows], logprobs):
                    if rows:
                        score(actor, rows)
                assert tap.drain(30) and not tap.problem
            actor.lm_head.weight.mul_(1.01)
            tap.updated()

        for step in range(3):
            with ThreadPoolExecutor(2) as pool:
                list(pool.map(run, own, [step] * 2))
            assert served.desk.drain(30), "draft tokens are counted"
        rows = [sorted(batch.response_ids_M.tolist()) for batch in served.seen]
        assert rows == 3 * [[1, 2, 3, 3, 4], [3, 3, 4], [1, 2]]
        assert isinstance(served.tables, TableRows) and not served.desk.wish().problem
        assert [(tap.sent, tap.lost) for tap, _ in taps] == [(9, 0), (9, 0)]


@torch.no_grad()
def test_of_many_processes_some_send_a_block_and_the_others_that_they_have_none(
    whole: ServedDesk, actor: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step is trained on when all have come, and also if the first one, which sends the tables,
    has no row in the sample.
    """
    ranks, tokens = 16, 60
    desk: Any = whole.desk
    monkeypatch.setattr(desk, "_rows", lambda status: 64)
    torch.manual_seed(0)
    answers = torch.randint(0, 20, (ranks, tokens)).tolist()
    with contextlib.ExitStack() as stack:
        taps = [
            stack.enter_context(CompanionTap(actor, whole.address, rank=rank, ranks=ranks))
            for rank in range(ranks)
        ]
        first_sent = []
        for step in range(6):
            for rank, tap in enumerate(taps):
                with tap([[5]], [answers[rank]]):
                    actor(torch.tensor([[5, *answers[rank]]], device=actor.device))
                assert tap.drain(30) and not tap.problem
                if not rank:
                    first_sent.append(desk._parts[0].header.rows)
            assert len(whole.seen) == step + 1, "nobody waits for the next step"
            batch = whole.seen[-1]
            rows = batch.hidden_MD.shape[0]
            assert rows + batch.left_out == ranks * tokens and 32 <= rows <= 96
            assert batch.weights_M is not None and int((batch.weights_M > 0).sum()) > 0.6 * rows
            assert desk.wish().tables_version == step
            actor.lm_head.weight.mul_(1.01)
            for tap in taps:
                tap.updated()
        assert set(first_sent) == {True, False}
        assert [tap.lost for tap in taps] == [0] * ranks


@pytest.mark.slow
@pytest.mark.parametrize("form", ["fsdp2", "ddp"])
def test_two_gloo_processes_send_what_each_has(
    served: tuple[Any, str],
    seen: list[RolloutBatch],
    chain_actor: Path,
    run_ranks: Callable[..., str],
    tmp_path: Path,
    form: str,
) -> None:
    """One batch a step, of both; its log-probs, which the companion computes with the tables that
    the first one sends, are those of the actor whole and alone.
    """
    script = Path(__file__).with_name("tap_ranks.py")
    run_ranks(script, 2, str(free_port()), form, str(chain_actor), served[1], str(tmp_path), "3")
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert [rank["sent"] for rank in ranks] == [3, 3] and not any(r["problem"] for r in ranks)
    assert [batch.policy_version for batch in seen] == [0, 1, 2]
    rows = {tuple(row) for rank in ranks for row in rank["responses"]}
    for batch in seen:
        parts = batch.response_ids_M.split(batch.lengths_S.tolist())
        assert {tuple(part.tolist()) for part in parts} == rows and len(parts) == 4
    first = seen[0]
    whole = load_actor(chain_actor)
    before = first.before_ids_X.split(first.before_S.tolist())
    at = 0
    for prompt, response in zip(
        before, first.response_ids_M.split(first.lengths_S.tolist()), strict=True
    ):
        row = torch.cat([prompt.long(), response])
        with torch.no_grad():
            logits = whole(row[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        logprobs = logits[range(len(response)), response]
        found = first.logprobs_M[at : at + len(response)]
        torch.testing.assert_close(found, logprobs, rtol=1e-4, atol=1e-5)
        at += len(response)
    assert not torch.equal(seen[0].hidden_MD, seen[2].hidden_MD), "the actor has learned"
    assert served[0].wish().tables_version == 2


def test_gradients_are_those_of_a_pass_that_nobody_taps(
    served: tuple[Any, str], actor: LlamaForCausalLM, device: torch.device
) -> None:
    def gradients() -> list[torch.Tensor]:
        actor.zero_grad()
        score(actor, [0, 1, 2]).logits.square().sum().backward()
        return [p.grad.clone() for p in actor.parameters() if p.grad is not None]

    before = gradients()
    with CompanionTap(actor, served[1]) as tap, tap(PROMPTS, COMPLETIONS):
        tapped = gradients()
    assert len(before) == len(tapped)
    for left, right in zip(before, tapped, strict=True):
        # A GPU adds the rows of an embedding's gradient up in any order.
        exact = device.type == "cpu"
        near = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-4, "atol": 1e-4}
        torch.testing.assert_close(right, left, **near)


@torch.no_grad()
def test_no_more_states_are_sent_than_are_wanted(
    served: tuple[Any, str], seen: list[RolloutBatch], actor: LlamaForCausalLM
) -> None:
    torch.manual_seed(0)
    answer = torch.randint(0, 20, (200,)).tolist()
    with CompanionTap(actor, served[1]) as tap:
        tap._sender.wish = tap.wish.model_copy(update={"rows": 60})
        with tap([[5]], [answer]):
            actor(torch.tensor([[5, *answer]], device=actor.device))
        assert tap.drain(30)
        rows = sum(batch.hidden_MD.shape[0] for batch in seen)
        assert rows <= 60 + 8 and sum(b.left_out for b in seen) == (200 - rows if rows else 0)
        tap._sender.wish = tap.wish.model_copy(update={"rows": 0})
        with tap(PROMPTS, COMPLETIONS):
            assert not actor.base_model._forward_hooks
            score(actor, [0, 1, 2])
        assert tap.lost == 1 and tap.drain(30)
        assert tap.wish.rows > 0, "it has asked again"


@torch.no_grad()
def test_a_companion_that_is_gone_costs_rows_and_no_step(
    chain_actor: Path, actor: LlamaForCausalLM, served: tuple[Any, str], caplog: Any
) -> None:
    tap = CompanionTap(actor, served[1])
    port = free_port()
    tap._link._client.base_url = f"http://127.0.0.1:{port}/"
    for _ in range(3):
        with tap(PROMPTS, COMPLETIONS):
            score(actor, [0, 1, 2])
        tap.updated()
        assert tap.drain(30)
    assert (tap.sent, tap.lost) == (0, 3) and "does not answer" in tap.problem
    assert len([r for r in caplog.records if "The loop continues" in r.message]) == 1
    tap._link._client.base_url = f"{served[1]}/"
    for _ in range(2):  # Asks; and sends.
        with tap(PROMPTS, COMPLETIONS):
            score(actor, [0, 1, 2])
        assert tap.drain(30)
    assert tap.sent == 1 and not tap.problem
    tap.close()


class FaultyLink(CompanionLink):
    """Raises once, then takes everything."""

    address = "nowhere"

    def __init__(self, error: Exception) -> None:
        self.error: Exception | None = error

    def ask(self) -> Wish:
        return Wish(rows=10, ahead=1, hidden=4, vocab=8, embedding=False)

    def put(self, path: Path, header: PartHeader) -> Wish:
        error, self.error = self.error, None
        if error is not None:
            raise error
        return self.ask()

    def close(self) -> None:
        """Holds nothing."""


@pytest.mark.parametrize("error", [ObjectStoreFullError("full"), ZeroDivisionError("a fault")])
def test_an_error_of_any_kind_does_not_end_the_sending(error: Exception) -> None:
    """From then on nothing was sent, and nothing said so."""
    link = FaultyLink(error)
    sender = tap_module._Sender(link, link.ask())
    header = PartHeader(number=1, policy_version=1)
    for sent in (0, 1):
        sender.send(tap_module._Parcel({"hidden_MD": torch.zeros(1, 4)}, None, header))
        assert sender.drain(30)
        assert (sender.sent, sender.lost) == (sent, 1) and bool(sender.problem) != bool(sent)
    sender.close()


@pytest.mark.parametrize("error", [ObjectStoreFullError("full"), RaySystemError("shut down")])
def test_a_call_that_ray_does_not_take_is_an_error_of_the_companion(
    error: RayError, tmp_path: Path
) -> None:
    def refuse(*_: object) -> None:
        raise error

    link = RayLink("ray:x")
    link._actor = SimpleNamespace(
        wish=SimpleNamespace(remote=refuse), take=SimpleNamespace(remote=refuse)
    )
    (tmp_path / "part").write_bytes(b"x")
    with pytest.raises(CompanionError, match=type(error).__name__):
        link.put(tmp_path / "part", PartHeader(number=1, policy_version=1))
    assert link._actor is None, "it is looked up again"


def test_what_is_wrong_is_said_at_once(served: tuple[Any, str], actor: LlamaForCausalLM) -> None:
    with pytest.raises(ConfigError):
        CompanionTap(actor, "nowhere")
    with pytest.raises(CompanionError):
        CompanionTap(actor, f"http://127.0.0.1:{free_port()}")
    with pytest.raises(ConfigError):
        CompanionTap(actor, served[1], temperature=0.0)
    with CompanionTap(actor, served[1]) as tap:
        with pytest.raises(DataError), tap(PROMPTS, COMPLETIONS[:2]):
            pass
        with pytest.raises(DataError), tap(PROMPTS, COMPLETIONS, [[0.0]] * 3):
            pass
        with pytest.raises(ConfigError, match="no row was recognised"), tap(PROMPTS, COMPLETIONS):
            actor(torch.tensor([[1, 2, 3]], device=actor.device))
    actor.resize_token_embeddings(actor.config.vocab_size + 8)
    with pytest.raises(ModelError, match="another actor"):
        CompanionTap(actor, served[1])


@pytest.mark.usefixtures("ray_session")
@torch.no_grad()
def test_in_the_loops_ray(chain_actor: Path, actor: LlamaForCausalLM, tmp_path: Path) -> None:
    handle = served_companion.companion_in_ray(
        "tapped", desk_config(tmp_path), str(chain_actor), tmp_path / "heads"
    )
    with CompanionTap(actor, "ray:tapped") as tap:
        with tap(PROMPTS, COMPLETIONS):
            score(actor, [0, 1, 2])
        assert tap.drain(60) and tap.sent == 1 and not tap.problem
        assert ray.get(handle.drain.remote(60))
        ray.kill(handle)
        with tap(PROMPTS, COMPLETIONS):
            score(actor, [0, 1, 2])
        assert tap.drain(60) and tap.lost == 1


def test_a_companion_in_ray_has_a_bound_and_saves_its_state_at_its_end(
    chain_actor: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process: what its actor's methods do."""
    monkeypatch.setattr(served_companion, "settle", lambda config: None)
    config = desk_config(tmp_path, {"queue_bytes": 1_000_000})
    given = served_companion._arguments(
        config, str(chain_actor), tmp_path / "heads", tmp_path / "out"
    )
    monkeypatch.setattr(served_companion.ray, "get", lambda first: first)
    actor = served_companion._DeskActor(config.companion, [given])
    desk = actor._holder.desk
    tables = given[1]
    header = PartHeader(number=0, policy_version=0, ranks=2, left_out=7)
    header = write_part(tmp_path / "part", {}, tables, header)
    data = (tmp_path / "part").read_bytes()
    text = header.model_dump_json()
    most = desk.most_bytes
    assert desk.reserve(most)
    while desk.reserve(len(data)):
        pass
    taken = desk._coming
    with pytest.raises(CompanionError, match="no room"):
        actor.take(text, data)
    assert desk._coming == taken
    desk.give_back(taken)
    for broken, error in ((data[:-8], CheckpointError), (bytes(most + 1), DataError)):
        with pytest.raises(error):
            actor.take(text, broken)
    assert desk._coming == 0 and not list(desk.folder.glob("tmp*"))
    actor.take(text, data)
    assert desk._coming == 0 and desk._held
    state = tmp_path / "out" / "companion" / STATE_FILE
    assert not state.exists()
    actor.close()
    assert state.is_file()


def test_the_command_says_what_it_lacks(
    chain_actor: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["companion", "serve", "--model", str(chain_actor), "--heads", str(tmp_path / "heads")]
    # A port that is taken would be refused first.
    words += ["--port", str(free_port())]
    monkeypatch.delenv(COMPANION_TOKEN, raising=False)
    for more, missing in ((["--feed", "feed"], COMPANION_TOKEN), ([], "--feed")):
        result = CliRunner().invoke(app, [*words, *more])
        assert result.exit_code == 2 and missing in result.output, result.output
        monkeypatch.setenv(COMPANION_TOKEN, "a secret of this test")


def test_a_companion_does_not_replace_a_folder_of_something_else(
    chain_actor: Path, tmp_path: Path
) -> None:
    precious = tmp_path / "heads" / "thesis.txt"
    precious.parent.mkdir()
    precious.write_text("a year of work")
    with pytest.raises(CheckpointError, match="holds no heads"):
        served_companion._arguments(
            desk_config(tmp_path), str(chain_actor), precious.parent, tmp_path / "out"
        )
    assert precious.read_text() == "a year of work"


def test_a_second_companion_in_the_same_folder_is_refused(
    chain_actor: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It went on from the first one's state, and wrote it again when it ended."""
    monkeypatch.setattr(served_companion, "settle", lambda config: None)  # This very process.
    out = tmp_path / "out"
    state = out / "companion" / STATE_FILE

    def made() -> Any:
        given = desk_config(tmp_path), str(chain_actor), tmp_path / "heads", out
        return served_companion._Desk(*served_companion._arguments(*given))

    holder = made()
    holder.desk.save(state.parent)
    written = state.stat().st_mtime_ns
    with pytest.raises(RunError, match="Another companion writes"):
        made()
    assert state.stat().st_mtime_ns == written
    holder.close()
    state.write_bytes(b"no state")
    with pytest.raises(CheckpointError):
        made()
    state.unlink()
    made().close()  # The one that failed holds nothing.


def chains(count: int, length: int, actor: LlamaForCausalLM, seed: int) -> list[list[int]]:
    """The actor's own responses to one-token prompts."""
    torch.manual_seed(seed)
    ids_BT = torch.arange(count, device=actor.device)[:, None] + 3
    with torch.no_grad():
        for _ in range(length):
            logits_BV = actor(ids_BT).logits[:, -1]
            ids_BT = torch.cat([ids_BT, torch.multinomial(logits_BV.softmax(-1), 1)], 1)
    return ids_BT.tolist()


def published(folder: Path) -> list[float]:
    manifest = FolderFeed(folder).manifest()
    lengths = [v.judged.mean_acceptance_length for v in manifest.versions] if manifest else []
    return [length for length in lengths if length is not None]


@torch.no_grad()
@pytest.mark.parametrize("trained", [True, False])
def test_trained_heads_are_in_the_feed_before_any_batch(
    trained: bool, chain_actor: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A deep sleep took them from engines, and they came back with the first version that was
    better than they: perhaps never. Untrained ones are no loss.
    """
    monkeypatch.setenv(COMPANION_TOKEN, "a secret of this test")
    lm_head_VD, _ = read_tables(str(chain_actor))
    heads = heads_for_table(desk_config(tmp_path), lm_head_VD)
    if trained:
        for parameter in heads.blocks:
            parameter.normal_(0, 0.1)
    save_heads(tmp_path / "heads", heads, lm_head_VD=lm_head_VD)
    feed = FolderFeed(tmp_path / "feed")
    for _ in range(2):
        with served_desk(chain_actor, tmp_path) as served:
            assert served.desk._service._feeder.drain(60)
            manifest = feed.manifest()
            assert (manifest is not None) == trained
            if manifest is not None:
                (version,) = manifest.versions
                assert (version.version, version.checksum) == (1, checksum(heads.trainable_state()))
                assert version.judged.mean_acceptance_length is None, "no gate has judged them"
    if manifest is not None:
        # What the gate lets through as the companion's first version.
        with served_desk(chain_actor, tmp_path) as served:
            service = served.desk._service
            service._cycle.version = 1
            service._cycle.serving.blocks[0].add_(0.1)
            service._publish()
            service._feed_newest()
            assert service._feeder.drain(60)
        manifest = feed.manifest()
        assert manifest is not None and [v.version for v in manifest.versions] == [1, 2]


@torch.no_grad()
@pytest.mark.parametrize("folder", ["a new one", "with untrained heads"])
@pytest.mark.parametrize("intact", [True, False])
def test_a_companion_by_itself_goes_on_from_what_its_feed_has(
    folder: str,
    intact: bool,
    chain_actor: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It began with untrained heads, and the first version that was better than these replaced what
    engines had from the run before.
    """
    monkeypatch.setenv(COMPANION_TOKEN, "a secret of this test")
    lm_head_VD, _ = read_tables(str(chain_actor))
    heads = heads_for_table(desk_config(tmp_path), lm_head_VD)
    if folder == "with untrained heads":
        save_heads(tmp_path / "heads", heads, lm_head_VD=lm_head_VD)
    for parameter in heads.blocks:
        parameter.normal_(0, 0.1)
    feed = FolderFeed(tmp_path / "feed")
    save_state(tmp_path / "state", heads.trainable_state())
    told = Release(
        actor=FeedActor.of(heads.config, lm_head_VD), dtype="float32", version=7, policy_version=7
    )
    version = feed.publish(tmp_path / "state", told)
    if not intact:
        (feed.folder / version.file).write_bytes(b"half")
    with served_desk(chain_actor, tmp_path) as served:
        serving = served.desk._service._cycle.serving
        assert (checksum(serving.trainable_state()) == version.checksum) == intact
        assert served.desk._service._feeder.drain(60)
    kept, _ = load_heads(tmp_path / "heads")
    assert kept.untrained == (not intact or folder == "with untrained heads")
    assert ("may be worse" in caplog.text) == (not intact)
    manifest = feed.manifest()
    assert manifest is not None and manifest.newest == 7, "nothing was published"


@torch.no_grad()
def test_a_second_start_goes_on_from_what_the_feed_has_by_then(
    chain_actor: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The first one wrote the feed's version into the folder of heads, where it counted as trained:
    the second began with it, and its first better version replaced the newest in all engines.
    """
    lm_head_VD, _ = read_tables(str(chain_actor))
    config = desk_config(tmp_path)
    feed = FolderFeed(tmp_path / "feed")

    def fed(number: int) -> str:
        heads = heads_for_table(config, lm_head_VD)
        for parameter in heads.blocks:
            parameter.normal_(0, 0.1)
        save_state(tmp_path / "state", heads.trainable_state())
        whose = FeedActor.of(heads.config, lm_head_VD)
        told = Release(actor=whose, dtype="float32", version=number, policy_version=number)
        return feed.publish(tmp_path / "state", told).checksum

    def begins_with() -> str:
        given = config, str(chain_actor), tmp_path / "heads", None
        arguments, _ = served_companion._arguments(*given)
        return checksum(unpack(arguments.initial_state))

    begins_with()
    assert "begin untrained" in caplog.text
    shutil.rmtree(tmp_path / "heads")
    caplog.clear()
    assert fed(40) == begins_with()
    kept, _ = load_heads(tmp_path / "heads")
    assert not kept.untrained, "engines that are not fed start with these"
    assert fed(90) == begins_with()
    # Heads that somebody trained stay its own.
    save_heads(tmp_path / "heads", kept, lm_head_VD=lm_head_VD, metadata={"start": "zero"})
    assert begins_with() == checksum(kept.trainable_state())
    assert "begin untrained" not in caplog.text


@pytest.mark.slow
def test_the_command_trains_heads_in_another_process(
    chain_actor: Path, actor: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And goes on from what it kept when it is started again."""
    monkeypatch.setenv(COMPANION_TOKEN, "a secret of this test")
    port = free_port()
    command = [sys.executable, "-m", "medusa_ppo", "companion", "serve"]
    command += ["--model", str(chain_actor), "--heads", str(tmp_path / "heads")]
    command += ["--feed", str(tmp_path / "feed"), "--out", str(tmp_path / "out")]
    command += ["--port", str(port), "heads.num_heads=2", "companion.learning_rate=0.01"]
    command += ["companion.batch_positions=128", "companion.num_gpus=0"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}

    def started() -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, env=environment)

    def reached(process: subprocess.Popen[bytes], make: Callable[[], CompanionTap]) -> CompanionTap:
        while process.poll() is None:
            try:
                return make()
            except CompanionError:
                time.sleep(0.2)
        raise AssertionError("the command ended")

    process = started()
    try:
        tap = reached(process, lambda: CompanionTap(actor, f"http://127.0.0.1:{port}"))
        assert (tmp_path / "heads" / "config.json").is_file()
        deadline = time.monotonic() + 200
        step = 0
        while not (found := published(tmp_path / "feed")) or found[-1] < 1.5:
            assert time.monotonic() < deadline and process.poll() is None, (found, tap.problem)
            rows = chains(48, 24, actor, step)
            with tap([row[:1] for row in rows], [row[1:] for row in rows]), torch.no_grad():
                actor(torch.tensor(rows, device=actor.device))
            tap.updated()
            assert tap.drain(30)
            step += 1
        trained = tap._link.ask().published
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        process = started()
        again = reached(process, lambda: CompanionTap(actor, f"http://127.0.0.1:{port}"))
        assert again.wish.published >= trained
        tap.close()
        again.close()
    finally:
        process.terminate()
        process.wait(60)
