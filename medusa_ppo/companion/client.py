"""The PPO process's end of the companion: submits batches, polls for versions, and never waits
longer than a short poll.

With `on_error="disable"` no call here raises because of the companion: a dead, hanging or failing
companion shows in `status()` and in the log. With `on_error="raise"` the next call after a failure
raises CompanionError.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
import torch
from ray.exceptions import GetTimeoutError, RayError

from heads.checkpoint import checksum, load_state, save_state
from heads.errors import CheckpointError, CompanionError, SavedStateError
from heads.heads_config import HeadsConfig
from medusa_ppo.companion.collector import BatchCollector
from medusa_ppo.companion.giving_way import Pace
from medusa_ppo.companion.positions import ROW_BYTES, EarlySample, batch_seed
from medusa_ppo.companion.service import STATE_FILE, CompanionService, forget_oldest, settle
from medusa_ppo.companion.team import MAX_RESTARTS, HandedBatch, Leader, actor_options
from medusa_ppo.companion.wire import (
    HANG_S,
    Answer,
    ServiceArguments,
    TableRows,
    WantedRows,
    batch_token_ids,
    pack,
    pack_tables,
    unpack,
)
from medusa_ppo.companion.without_gpu import gpus_left
from medusa_ppo.config.companion_section import HOLDOUT_SHARE, CompanionConfig
from medusa_ppo.contract.rollout_batch import RolloutBatch
from medusa_ppo.contract.rollouts import Rollouts
from medusa_ppo.contract.status import CompanionStatus, PublishedHeads
from medusa_ppo.feeds.actor_sketch import sketch_rows
from medusa_ppo.feeds.feed_manifest import FeedActor
from medusa_ppo.feeds.http_feed import absolute, require_feed, warn_of_earlier
from medusa_ppo.runtime.files import OwnedFolder
from medusa_ppo.runtime.hardware import find_hardware
from medusa_ppo.runtime.processes import bundle, release, reserve, without_line

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 180.0
STATE_BYTES_PER_S = 25e6
"""Assumed speed of a start that goes on from a saved state, in bytes of its file: it is read,
checked and written again, and a network disk may do 50 MB/s each way. Also of what only writes it.
"""
POLL_TIMEOUT_S = 0.5
FETCH_WAIT_S = 60.0
"""How long the loop waits for a version that comes from another node: half as long after each that
took longer, because the next poll takes what has arrived.
"""
MOST_RECENT = 16
"""Batches whose tokens are kept apart until the companion has counted them; those of older ones are
joined.
"""
INTAKE, CONTROL = "intake", "control"
Recent = tuple[int, torch.Tensor]
"""A batch's number and its tokens; if they are joined, the last number and the tokens of all."""


class CompanionClient:
    """Owns the companion's Ray actor and the folder of its published versions.

    Attributes:
        shared: it trains on cores or a device that the loop uses too.
        yields: it then also gives way while responses are generated: several workers don't, because
            they would wait for each other.
        takes_turns: the loop calls `take_turn` before each generation.
        table_bytes: bytes of the actor's tables sent to the companion since it started.
    """

    def __init__(
        self,
        heads: HeadsConfig,
        config: CompanionConfig,
        lm_head_VD: torch.Tensor,
        *,
        seed: int,
        run_dir: str | Path = "",
        initial_state: dict[str, torch.Tensor] | None = None,
        embedding_VD: torch.Tensor | None = None,
        resume_from: str | Path = "",
        takes_turns: bool = False,
        hang_s: float = HANG_S,
        **served: Any,
    ) -> None:
        """Start the companion in a Ray actor and wait until it is ready. The caller runs
        `ray.init`.

        Args:
            heads: sizes and kind of the heads.
            config: the companion's settings.
            lm_head_VD, embedding_VD: the actor's tables; the embedding only for kinds that read it.
            seed: seed of everything random in the companion.
            run_dir: the run's folder, for checkpoints; empty: none are written.
            initial_state: trainable tensors to start from; None: zero start.
            resume_from: folder written by `save`.
            takes_turns: whether the loop calls `take_turn` before each generation, if they share
                the cores.
            hang_s, served (draft_temperature, num_drafts, draft_vocab): as in ServiceArguments.

        Raises:
            SavedStateError: it can't go on from the state in `resume_from`.
            CompanionError: it did not start, for another reason.
            RunError: the cluster has no room for all its workers.
        """
        if not ray.is_initialized():
            raise CompanionError(
                "The companion needs Ray.",
                given="no ray.init",
                expected="a running Ray",
                do="Call ray.init first.",
            )
        if config.feed:
            # Before anything starts: a feed that can't be used now would fail in each step.
            address = absolute(config.feed)
            found = require_feed(address, FeedActor.of(heads, lm_head_VD))
            if not resume_from:
                warn_of_earlier(found, address)
            config = config.model_copy(update={"feed": address})
        self._config = config = _with_gpus(config, heads, served.get("draft_vocab"))
        self._seed = seed
        self._hang_s = hang_s
        self._ahead = heads.num_heads
        # Heads with their own lm_head read the actor's only if the loss needs its distribution.
        self._reads_lm_head = heads.lm_head == "shared" or config.loss.startswith("kl")
        self._reads_embedding = embedding_VD is not None
        self._vocab_size = lm_head_VD.shape[0]
        # At most float32, at the speed of a slow network.
        values = sum(math.prod(shape) for shape in heads.tensor_shapes().values())
        self._fetch_s = FETCH_WAIT_S + 4 * values / STATE_BYTES_PER_S
        self._fetch_wait_s = FETCH_WAIT_S
        self._fetch: _Fetch | None = None
        self._row_bytes = heads.hidden_size * lm_head_VD.element_size() + ROW_BYTES
        self._step_s = 0.0
        self._last_came = time.monotonic()
        self._position_s = 0.0
        self._left_out = 0
        self._group = _room(config)
        self._folder = OwnedFolder("medusa-ppo-heads-", shared_memory=True)
        self._pace = Pace(self._folder.path)
        self.shared = shares_with_loop(config)
        self.yields = self.shared and config.workers == 1
        self.takes_turns = takes_turns and self.yields and not config.num_gpus
        run, published, resumed = (
            str(Path(path).resolve()) if path else ""
            for path in (run_dir, self._folder.path, resume_from)
        )
        arguments = ServiceArguments(
            heads,
            config,
            seed,
            pack(initial_state),
            run,
            published,
            resumed,
            hang_s=hang_s,
            takes_turns=self.takes_turns,
            pace=self._pace.name,
            **served,
        )
        self._first_tables = ray.put(pack_tables(lm_head_VD, embedding_VD))
        # A restarted companion is built from this; Ray frees objects without a reference.
        self._first = ray.put((arguments, self._first_tables))
        # The loop's own tables, from which each batch takes its rows; None: unchanged since the
        # start.
        self._live: tuple[torch.Tensor, torch.Tensor | None] | None = None
        # The tokens that drafts come from after the batch of this number (None: any), and the
        # tokens of later batches that may have arrived, which may become draft tokens.
        self._draft_ids: torch.Tensor | None = None
        self._recent: deque[Recent] = deque()
        self._rows: tuple[int, ray.ObjectRef, int] | None = None
        self.table_bytes = 0
        self._actor = _remote_actor(config, self._first, self._group)
        incarnation, hears_loop = self._started(resumed)
        self._incarnations = {incarnation}
        if not hears_loop:
            # It is on another node, and takes nothing from this one.
            self.shared = self.yields = self.takes_turns = False
        self._flying: deque[tuple[ray.ObjectRef, int, Recent]] = deque()
        self._poll: ray.ObjectRef | None = None
        self._newest: PublishedHeads | None = None
        self._newest_from = ""  # The incarnation that published them.
        self._telling: ray.ObjectRef | None = None  # The last call that tells the engine's heads.
        # Whether the poll in flight was made before the companion had them: it may name a version
        # that they have replaced, also in its file.
        self._poll_precedes = False
        self._poll_since = self._grace_until = 0.0
        self._held = 0  # Bytes of batches that the companion reports to hold.
        self._sent = self._sent_before_poll = self._lost = 0
        self._last = CompanionStatus()
        self._error = ""
        self._closed = False
        self._told: set[str] = set()

    def _started(self, resumed: str) -> tuple[str, bool]:
        """Wait for the first answers: its incarnation, and whether it hears the loop.

        Args:
            resumed: folder of the state that it goes on from; empty: there is none.
        """
        state = Path(resumed, STATE_FILE) if resumed else None
        timeout_s = START_TIMEOUT_S
        if state is not None and state.is_file():
            timeout_s += state.stat().st_size / STATE_BYTES_PER_S
        try:
            asked = [self._call(name, CONTROL) for name in ("ready", "hears_loop")]
            incarnation, hears_loop = ray.get(asked, timeout=timeout_s)
            return incarnation, hears_loop
        except RayError as error:
            ray.kill(self._actor, no_restart=True)
            release(self._group)
            self._folder.close()
            # In a start that goes on from a state, only that raises this error.
            if state is not None and _own_error(error)[0] == _full_name(CheckpointError):
                raise SavedStateError(
                    "The companion can't go on from its saved state.",
                    given=f"{state}: {_reason(error)}",
                    expected="a state that a companion with these heads has written",
                    do="Give the same settings of heads as before, or let the heads begin anew.",
                ) from error
            raise CompanionError(
                "The companion did not start.",
                given=_reason(error),
                expected=f"a ready Ray actor within {timeout_s:.0f} s",
                do=(
                    "Look at the message above; check free memory, companion.num_gpus and"
                    " companion.cores."
                ),
            ) from error

    # ---- called by the plugin

    def collector(self, rollouts: Rollouts, sample: EarlySample | None = None) -> BatchCollector:
        """A collector for the states of a rollout batch; if the batch is too large, for a sample of
        them.

        Args:
            sample: that of `begin_sample`, as it was left; None: the batch was not begun so.
        """
        if sample is None:
            sample = self.begin_sample(rollouts.policy_version)
        tokens = sum(len(response.token_ids) for response in rollouts.responses)
        collector = BatchCollector(rollouts, sample.unless_all_fit(tokens))
        self._left_out += collector.left_out
        if self._live is not None and self._usable():
            with self._guard("could not take the actor's tables"):
                # Read now, because a batch that is only partly scored is submitted after the next
                # update.
                self._rows = rollouts.policy_version, *self._put_rows(collector.token_ids())
        return collector

    def count_left_out(self, tokens: int) -> None:
        """Count response tokens that a sample drawn by others omits."""
        self._left_out += tokens

    def most_rows(self) -> int:
        """How many rows of the next batch to submit: as many as fit next to the previous batch and
        the companion has time for.
        """
        config = self._config
        rows = config.queue_bytes // 2 // self._row_bytes
        if self._position_s and self._step_s and not self.shared and not config.wait:
            rows = min(rows, int(self._step_s / self._position_s))
        return max(1, rows)

    def begin_sample(self, number: int) -> EarlySample:
        """Which rows of a batch to submit, if all of them are too many.

        Args:
            number: tells this batch from others.
        """
        return EarlySample(
            self.most_rows(), HOLDOUT_SHARE, batch_seed(self._seed, number), self._ahead
        )

    def give_way(self, wanted: bool) -> None:
        """Ask the companion to pause or to continue, if it gives way at all."""
        self._pace.hold(wanted and self.yields)

    def wanted_rows(self) -> WantedRows | None:
        """The rows of the actor's tables that the next batch needs; None: the heads read neither
        table.
        """
        if not (self._reads_lm_head or self._reads_embedding):
            return None
        draft_ids = self._draft_ids if self._reads_lm_head else torch.zeros(0, dtype=torch.int64)
        if draft_ids is not None:
            # Of all new tokens, a batch can turn only its own into draft tokens. The last ones are
            # for the feed's manifest, which identifies the actor of the heads.
            recent = (ids for _, ids in self._recent)
            sketched = torch.tensor(sketch_rows(self._vocab_size))
            draft_ids = torch.cat([draft_ids, *recent, sketched])
        return WantedRows(draft_ids, self._reads_embedding)

    def submit(self, batch: RolloutBatch, rows: TableRows | None = None) -> None:
        """Submit a batch; returns at once. The states are copied only once, into Ray's shared
        memory.

        `rows`: those of its actor's tables that `wanted_rows` named, if the actor is in another
        process; None: they are taken from the last `update_lm_head`.

        Batches in transit and those that the companion holds share one byte budget. The companion
        drops its oldest batches for new ones; if it accepts nothing for long, it gets no more.
        """
        if self._usable():
            self._reap()
            # States may be wider than the actor's tables: a pass under autocast gives float32.
            self._row_bytes = batch.hidden_MD.shape[1] * batch.hidden_MD.element_size() + ROW_BYTES
            tokens = batch.response_ids_M.numel()
            sample = self.begin_sample(batch.policy_version).unless_all_fit(tokens)
            if sample is not None and batch.weights_M is None:
                # Collected elsewhere, without a sample.
                batch = sample.of(batch)
                self._left_out += tokens - batch.hidden_MD.shape[0]
            self._step_s = time.monotonic() - self._last_came
            self._last_came = time.monotonic()
            if (
                sum(nbytes for _, nbytes, _ in self._flying) + self._held + batch.nbytes
                <= self._config.queue_bytes
            ):
                self._sent += 1
                with self._guard("could not take a batch"):
                    call = self._call("submit", INTAKE, *self._handed(batch, rows))
                    self._flying.append((call, batch.nbytes, self._recent[-1]))
                    return
        self._rows = None
        self._lost += 1

    def _handed(self, batch: RolloutBatch, sent: TableRows | None) -> tuple[Any, ...]:
        """A batch and the rows of the tables that it needs, in the form that the companion takes:
        by value for one worker, by reference for several.
        """
        ids = batch_token_ids(batch.response_ids_M, batch.before_ids_X)
        rows, self._rows = self._rows, None
        tables = None if self._config.workers == 1 else self._first_tables
        if sent is not None:
            tables = ray.put(pack(sent))
            self.table_bytes += sent.nbytes
        elif self._live is not None:
            if rows is None or rows[0] != batch.policy_version:
                rows = batch.policy_version, *self._put_rows(ids)
            _, tables, nbytes = rows
            self.table_bytes += nbytes
        self._remember(ids)
        packed = ray.put(pack(batch))
        if self._config.workers == 1:
            return packed, tables, self._sent
        assert tables is not None, "several workers are given the first tables, too"
        handed = HandedBatch([packed], [tables], batch.nbytes, batch.policy_version, self._sent)
        return (handed,)

    def _remember(self, ids: torch.Tensor) -> None:
        """Remember the tokens of the batch that is handed over. Without answers of the companion
        there may be many, each with most of the vocabulary.
        """
        self._recent.append((self._sent, ids))
        if len(self._recent) > MOST_RECENT:
            (_, oldest), (number, older) = self._recent.popleft(), self._recent.popleft()
            self._recent.appendleft((number, torch.cat([oldest, older]).unique()))

    def _put_rows(self, ids: torch.Tensor) -> tuple[ray.ObjectRef, int]:
        """Rows of the tables for a batch with these tokens, packed, and their bytes."""
        assert self._live is not None, "the tables have changed"
        wanted = self.wanted_rows()
        assert wanted is not None, "update_lm_head ignores tables that are not read"
        rows = wanted.of(*self._live, ids, copied=False)
        return ray.put(pack(rows)), rows.nbytes

    def update_lm_head(
        self,
        lm_head_VD: torch.Tensor,
        policy_version: int,
        *,
        embedding_VD: torch.Tensor | None = None,
    ) -> None:
        """Use the actor's tables after an update, live or copied. Nothing is copied here: each of
        the next batches takes the rows that it needs.
        """
        logger.debug("Tables of policy version %d.", policy_version)
        if self._reads_lm_head or embedding_VD is not None:
            self._live = lm_head_VD, embedding_VD

    def newest(
        self, after_version: int, timeout_s: float = POLL_TIMEOUT_S
    ) -> PublishedHeads | None:
        """The last published version if it is newer than `after_version`; None also if there is no
        answer in time.
        """
        if not self._usable():
            return None
        self._reap()
        answer = self._ask(after_version, timeout_s)
        if answer is None:
            return None
        if (
            answer.error and answer.error != self._error
        ):  # A failure inside a companion that is still alive.
            self._fail(answer.error)
        self._draft_ids = (
            None if answer.draft_ids is None else torch.from_numpy(answer.draft_ids.copy())
        )
        while self._recent and self._recent[0][0] <= answer.counted:
            self._recent.popleft()
        if (
            self._sent == self._sent_before_poll
        ):  # Otherwise a batch may have arrived after the answer.
            self._held = answer.held_bytes
        self._incarnations.add(answer.incarnation)
        # Its version alone does not tell: it may have published some of its own since it restarted.
        lost = answer.incarnation != self._newest_from and answer.follows < after_version
        if (
            (lost or answer.version < after_version)
            and self._newest is not None
            and Path(self._newest.path).is_file()
        ):
            # It restarted without the heads that the engine has. It is asked again until it has
            # them, because a call to a process that has just restarted may be lost.
            if self._telling_is_over():
                state = load_state(self._newest.path)
                self.go_on_from(after_version, state, self._newest.version)
            return None
        if answer.published is None or answer.published.version <= after_version:
            return None
        if self._poll_precedes:
            return None
        published = self._local(answer.published, answer.incarnation, after_version, timeout_s)
        if published is not None:
            self._newest, self._newest_from = published, answer.incarnation
        return published

    def _telling_is_over(self) -> bool:
        """Whether no call that tells the engine's heads is on its way."""
        if self._telling is None:
            return True
        ready, _ = ray.wait([self._telling], timeout=0)
        if ready:
            with self._guard("did not take the engine's heads"):
                ray.get(ready)
            self._telling = None
        return bool(ready)

    def go_on_from(self, version: int, state: dict[str, torch.Tensor], serving: int) -> None:
        """Let training continue from these heads, with which the engine drafts under the number
        `serving`; `version` was the last one offered to it.
        """
        if self._usable():
            with self._guard("did not take the engine's heads"):
                self._telling = self._call("adopt", CONTROL, version, pack(state), serving)
                self._poll_precedes = True
                self._fetch = None

    def status(self, timeout_s: float = 2.0) -> CompanionStatus:
        """What the companion has done; if it does not answer, the last known status with
        `alive=False` and an error.
        """
        if self._usable():
            with self._guard("does not answer"):
                before = self._last
                self._last = ray.get(self._call("status", CONTROL), timeout=timeout_s)
                self._incarnations.add(self._last.incarnation)
                if self._last.batches_trained > before.batches_trained > 0:
                    trained = self._last.trained_tokens - before.trained_tokens
                    self._position_s = max(0.0, self._last.train_s - before.train_s) / max(
                        1, trained
                    )
                self._error = ""
                self._tell(self._last.error)
                return self._with_own_counts(self._last)
        return self._with_own_counts(
            dataclasses.replace(self._last, alive=False, error=self._error or "closed")
        )

    def drain(self, timeout_s: float) -> bool:
        """Wait until everything submitted is trained on. False if the time is up or the companion
        is gone.
        """
        with self._all_cores():
            return self._drained(timeout_s)

    def take_turn(self, seconds: float) -> bool:
        """Let the companion train on all cores, at most this long, while the loop waits. True if
        nothing is left to train on, or the companion is gone.
        """
        before, self._error = self._error, ""
        with self._all_cores():
            done = self._drained(seconds)
        self.give_way(True)
        failed = bool(self._error)
        self._error = self._error or before
        return done or failed or not self._usable()

    @contextlib.contextmanager
    def _all_cores(self) -> Iterator[None]:
        """Inside, the loop waits for the companion, which need not give way."""
        self.give_way(False)
        if self.takes_turns:
            self._pace.hand_over()
        try:
            yield
        finally:
            self.give_way(False)

    def _drained(self, timeout_s: float) -> bool:
        if not self._usable():
            return False
        ends = time.monotonic() + timeout_s
        refs = [ref for ref, *_ in self._flying]
        if refs:
            ray.wait(refs, num_returns=len(refs), timeout=timeout_s, fetch_local=False)
        self._reap()
        with self._guard("did not finish its batches"):
            left_s = max(0.1, ends - time.monotonic())
            return bool(ray.get(self._call("drain", CONTROL, left_s), timeout=left_s + 5))
        return False

    def save(self, folder: str | Path) -> bool:
        """Write the companion's whole state into `folder`. False if that failed."""
        if self._usable():
            with self._all_cores(), self._guard("could not save its state"):
                # Each call waits for the batch in training.
                before_s = START_TIMEOUT_S + self._hang_s
                nbytes = ray.get(self._call("state_bytes", CONTROL), timeout=before_s)
                ray.get(
                    self._call("save", CONTROL, str(Path(folder).resolve())),
                    timeout=before_s + nbytes / STATE_BYTES_PER_S,
                )
                return True
        return False

    def close(self) -> None:
        """End the companion and remove its published files. Safe to call again."""
        if self._closed:
            return
        self._closed = True
        self.give_way(False)
        if ray.is_initialized():
            try:
                ray.get(self._call("close", CONTROL), timeout=5)
            except RayError as error:
                logger.info("The companion was gone before it was closed: %s", _reason(error))
            ray.kill(self._actor, no_restart=True)
            release(self._group)
        self._folder.close()

    # ---- parts

    def _call(self, method: str, group: str, *arguments: object) -> ray.ObjectRef:
        return getattr(self._actor, method).options(concurrency_group=group).remote(*arguments)

    def _with_own_counts(self, status: CompanionStatus) -> CompanionStatus:
        dropped = status.batches_dropped + self._lost
        restarts = len(self._incarnations) - 1
        return dataclasses.replace(
            status, batches_dropped=dropped, restarts=restarts, positions_left_out=self._left_out
        )

    def _usable(self) -> bool:
        return not self._closed and ray.is_initialized()

    def _ask(self, after_version: int, timeout_s: float) -> Answer | None:
        """One poll. The next poll picks up a late answer, without waiting."""
        if self._poll is None:
            self._poll_precedes = not self._telling_is_over()
            self._poll = self._call("newest", CONTROL, after_version)
            self._poll_since = time.monotonic()
            self._sent_before_poll = self._sent
        else:
            timeout_s = 0.0
        ready, _ = ray.wait([self._poll], timeout=timeout_s)
        if not ready:
            if (
                time.monotonic() - self._poll_since > self._hang_s
                and time.monotonic() > self._grace_until
            ):
                self._poll = None
                self._end_process("has not answered")
            return None
        poll = self._poll
        self._poll = None
        with self._guard("does not answer"):
            answer: Answer = ray.get(poll)
            if answer.stuck_s > self._hang_s:  # Its other threads still answer.
                self._end_process("has not moved on with a batch")
                return None
            return answer
        return None

    def _end_process(self, why: str) -> None:
        self._grace_until = time.monotonic() + START_TIMEOUT_S  # A new process needs time to start.
        ray.kill(self._actor, no_restart=False)
        self._fail(f"The companion {why} for {self._hang_s:.0f} s; it is ended and restarted.")

    def _reap(self) -> None:
        """Forget the batches that arrived; count those that were lost."""
        if not self._flying:
            return
        refs = [ref for ref, *_ in self._flying]
        ready, _ = ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=False)
        flying = self._flying
        self._flying = deque(entry for entry in flying if entry[0] not in ready)
        for ref, _, recent in flying:
            if ref not in ready:
                continue
            with self._guard("lost a batch"):
                self._held = ray.get(ref)
                continue
            self._lost += 1
            # A companion that is down never counts it.
            self._recent = deque(other for other in self._recent if other is not recent)

    def _local(
        self, published: PublishedHeads, incarnation: str, after_version: int, timeout_s: float
    ) -> PublishedHeads | None:
        """The same version with a file on this node. If the companion runs on another node, its
        tensors are fetched; None: they are still on their way. What is on its way is taken first: a
        newer version may be published before any arrives.
        """
        if Path(published.path).is_file():
            return published
        fetch, wait_s = self._fetch, timeout_s
        begins = (
            fetch is None
            or fetch.incarnation != incarnation
            or fetch.published.version <= after_version
        )
        if begins:
            call = self._call("published_state", CONTROL, published.version)
            fetch = _Fetch(call, published, incarnation, time.monotonic())
            wait_s = max(timeout_s, self._fetch_wait_s)
        assert fetch is not None, "it begins, or has begun"
        self._fetch = fetch
        # Ray goes on bringing the tensors here after this wait, too.
        if not ray.wait([fetch.call], timeout=wait_s)[0]:
            if begins:
                self._fetch_wait_s /= 2
            if time.monotonic() - fetch.since > self._fetch_s:
                self._fetch = None
                self._fail(f"The companion's heads did not arrive within {self._fetch_s:.0f} s.")
            return None
        self._fetch = None
        with self._guard("could not send its heads"):
            packed = ray.get(fetch.call)
            if packed is None:
                return None
            state = unpack(packed)
            path = self._folder.path / f"fetched-{fetch.published.version:06d}.safetensors"
            try:
                save_state(path, state)
            except OSError as error:  # Shared memory is full.
                self._fail(f"The companion's heads could not be written beside the loop: {error}")
                return None
            forget_oldest(path, "fetched-*.safetensors")
            return dataclasses.replace(fetch.published, path=str(path), checksum=checksum(state))
        return None

    @contextlib.contextmanager
    def _guard(self, what: str) -> Iterator[None]:
        """Apply the client's failure policy to Ray's errors in the block: continue after the block,
        or raise CompanionError.
        """
        try:
            yield
        except RayError as error:
            self._fail(f"The companion {what}: {_reason(error)}")

    def _tell(self, error: str) -> None:
        """Log each error once, until there is none again."""
        if error and error not in self._told:
            logger.warning("Companion: %s", error)
        self._told = self._told | {error} if error else set()

    def _fail(self, error: str) -> None:
        self._tell(error)
        self._error = error
        if self._config.on_error == "raise":
            raise CompanionError(
                "The companion failed.",
                given=error,
                expected="a companion that trains",
                do=(
                    "Correct the cause, or set companion.on_error=disable to continue with"
                    " the present heads."
                ),
            )


@dataclasses.dataclass(frozen=True)
class _Fetch:
    """The call that brings a version from another node, who published it, and when it began."""

    call: ray.ObjectRef
    published: PublishedHeads
    incarnation: str
    since: float


class _HostedService(CompanionService):
    """The service, which fetches its arguments from the object store: the client keeps them there,
    so no constructor call has to.
    """

    def __init__(self, first: list[ray.ObjectRef]) -> None:
        arguments, tables = ray.get(first[0])
        settle(arguments.companion, arguments.takes_turns)
        super().__init__(arguments, ray.get(tables))


def shares_with_loop(config: CompanionConfig) -> bool:
    """Whether a companion trains on cores or a device that its loop uses too. On a machine with
    GPUs the loop needs few of the cores.
    """
    if config.resource or config.cores:
        return False
    if 0 < (config.num_gpus or 0) < 1:
        return True
    return not (find_hardware().gpus or ray.cluster_resources().get("GPU", 0.0))


def _with_gpus(
    config: CompanionConfig, heads: HeadsConfig, draft_vocab: int | None
) -> CompanionConfig:
    """Give each worker a share of the free GPUs, unless the configuration says how many."""
    if config.num_gpus is not None:
        return config
    return config.model_copy(update={"num_gpus": gpus_left(config, heads, draft_vocab)})


def _room(config: CompanionConfig) -> Any:
    """A placement group for several workers; one worker needs none."""
    if config.workers == 1:
        return None
    return reserve(
        [bundle(config.num_gpus or 0.0, config.resource)] * config.workers, "companion's workers"
    )


def _remote_actor(config: CompanionConfig, first: ray.ObjectRef, group: Any) -> Any:
    """The service in a Ray actor: it takes batches one after the other, and answers calls
    meanwhile.
    """
    kind = ray.remote(  # type: ignore[call-overload]  # Ray's stubs don't know concurrency groups.
        max_restarts=MAX_RESTARTS,
        max_task_retries=0,
        concurrency_groups={INTAKE: 1, CONTROL: 4},
        **actor_options(config, group, 0),
    )(_HostedService if config.workers == 1 else Leader)
    # Ray warns that `first` may be gone when it restarts the actor; the client keeps it as long as
    # the actor.
    with without_line("has constructor arguments in the object store"):
        return kind.remote([first]) if config.workers == 1 else kind.remote([first], group)


def _reason(error: RayError) -> str:
    """The informative part of Ray's long messages."""
    if isinstance(error, GetTimeoutError):
        return "no answer in time"
    name, text = _own_error(error)
    if name:
        return text
    lines = _lines(error)
    return (
        f"{type(error).__name__}:"
        f" {lines[-1] if 'Traceback' in str(error) and lines else (lines or ['no message'])[0]}"
    )


def _own_error(error: RayError) -> tuple[str, str]:
    """Full name of the error of ours that Ray passes on, and its first line with what was found;
    empty if it is none of ours. An error of an actor's constructor comes as text only.
    """
    lines = _lines(error)
    own = [n for n, line in enumerate(lines) if line.startswith(f"{CompanionError.__module__}.")]
    if not own:
        return "", ""
    name, _, problem = lines[own[-1]].partition(": ")
    found = [line for line in lines[own[-1] :] if line.startswith("given:")]
    return name, " ".join([problem, *(line.removeprefix("given:").strip() for line in found[:1])])


def _full_name(kind: type[Exception]) -> str:
    return f"{kind.__module__}.{kind.__name__}"


def _lines(error: RayError) -> list[str]:
    return [line.strip() for line in str(error).splitlines() if line.strip()]
