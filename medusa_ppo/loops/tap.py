"""A tap for any loop. It goes around the loop's own log-prob pass, on every rank, and sends to a
standalone companion (`medusa-ppo companion serve`, or in the loop's Ray). Engines load from a feed
what the companion publishes, so the loop needs nothing else.

    tap = CompanionTap(actor, "http://HOST:8461")
    for ...:
        with tap(prompts, completions):   # token ids of this rank's rows, in any order
            ...                           # the log-prob pass, in whatever micro-batches
        ...                               # the update
        tap.updated()                     # on every rank

The companion says how many states it wants. A sample of that size, on average, leaves the device,
and a thread sends it, so the loop only waits for the copies. A tap that is made while the companion
can't be reached raises an error; if it is unreachable later, slow or full, the rows of a step are
lost and counted, and the log says so once.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn

from heads.errors import CompanionError, ConfigError, DataError, ModelError
from medusa_ppo.actors.actor_tables import adapters_in_use
from medusa_ppo.actors.hf import HFActor, StatesHook
from medusa_ppo.companion.companion_link import CompanionLink, open_link
from medusa_ppo.companion.parts_wire import (
    MOST_TEMPERATURE,
    PartHeader,
    Tables,
    Wish,
    batch_tensors,
    ids_of_text,
    prompt_key,
    write_part,
)
from medusa_ppo.companion.wire import TableRows, copied_tables, table_rows
from medusa_ppo.contract.rollout_batch import RolloutBatch
from medusa_ppo.contract.rollouts import Sampling
from medusa_ppo.loops.passes import PassTap
from medusa_ppo.runtime.files import OwnedFolder

logger = logging.getLogger(__name__)

CLOSE_S = 5.0
NO_BOUND = 1 << 62
"""Switches off `PassTap`'s own limit in bytes: here the companion decides the number of rows."""
UNTOLD_PARTS = 2
"""Parts that the companion may not have counted in its last answer: one on its way, one waiting."""


class CompanionTap:
    """One process's end. With several processes each has one and makes every call.

    Of the actor's tables only the rows that a batch needs are sent, if log-probs are given, the
    companion drafts from some tokens only (`engine.draft_vocab`), and torch.distributed joins the
    processes or there is only one. Otherwise the tables are sent whole after each change.

    Attributes:
        wish: what the companion last asked for.
        sent, lost: numbers of steps whose part the companion accepted, and did not accept. The part
            of one of several processes may be without rows.
        exposed_s: seconds that the tap has taken from the loop so far.
        problem: why the companion accepts nothing now; empty if it does.
    """

    def __init__(
        self,
        actor: nn.Module,
        address: str,
        *,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        rank: int | None = None,
        ranks: int | None = None,
        version: int = 0,
        reading: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> None:
        """Ask the companion which actor it serves.

        Args:
            actor: a transformers causal LM, bare or wrapped (DDP, FSDP, ZeRO, PEFT).
            address: `http://HOST:PORT` of `medusa-ppo companion serve`, with its
                MEDUSA_PPO_COMPANION_TOKEN in the environment; or `ray:NAME`.
            temperature, top_p, top_k: how the responses are sampled.
            rank, ranks: this process among those that have rows, and their number; None: as
                torch.distributed says, and the companion's answer to the first one holds for all.
            version: the actor's version, counted in the loop's updates.
            reading: a context in which the actor's tables can be gathered, for loops that keep
                sharded weights elsewhere between their passes.

        Raises:
            ConfigError: the address is invalid, or the sampling parameters are.
            CompanionError: the companion can't be reached.
            ModelError: it serves another actor.
        """
        several = dist.is_available() and dist.is_initialized()
        # With torch.distributed, the processes agree at each call on what the companion wants.
        self._meets = several and rank is None and ranks is None and dist.get_world_size() > 1
        self._rank = (dist.get_rank() if several else 0) if rank is None else rank
        self._ranks = (dist.get_world_size() if several else 1) if ranks is None else ranks
        self._actor = HFActor(actor, reports=self._rank == 0)
        if not (0 < temperature <= MOST_TEMPERATURE and 0 < top_p <= 1):
            raise ConfigError(
                "Heads can't learn from responses that are sampled this way.",
                given=f"temperature={temperature}, top_p={top_p}",
                expected=f"0 < temperature <= {MOST_TEMPERATURE}, 0 < top_p <= 1",
                do="Give the sampling parameters of the loop's rollouts.",
            )
        # vLLM's value for no top-k is -1.
        self._sampling = Sampling(temperature=temperature, top_p=top_p, top_k=max(0, top_k))
        self._link = open_link(address)
        # Checked on every rank before any continues, so that an error reaches all of them.
        wish = self._link.ask()
        self._reading = reading
        # Whether the tables may have changed since they were gathered.
        self._stale = False
        # Whether the companion's heads read the embedding.
        self._embedding = True
        with reading():
            # On every rank, because sharded tables are gathered.
            self._actor.refresh()
            if self._rank == 0:
                self._check(wish, address)
        self._rows = _PolicyTap(actor, self._sampling, NO_BOUND, wish.ahead)
        self._sender = _Sender(self._link, wish)
        self._version = self._tables_version = version
        # Tokens of the last parts, which may have become draft tokens since the last answer.
        self._untold: deque[torch.Tensor] = deque(maxlen=UNTOLD_PARTS)
        # Counts calls where the processes meet in each, else updates.
        self._number = 0
        # For processes that don't meet: whether this step's part is on its way; and the part
        # without rows that goes if it is not, with the step's tokens.
        self._told = False
        self._rowless: tuple[_Parcel, torch.Tensor | None] | None = None
        self._open: contextlib.ExitStack | None = None
        self.exposed_s = 0.0

    def _check(self, wish: Wish, address: str) -> None:
        vocab, hidden = self._actor.lm_head_VD.shape
        if (wish.vocab, wish.hidden) != (vocab, hidden):
            raise ModelError(
                "The companion trains heads of another actor.",
                given=f"{address}: width {wish.hidden}, vocabulary {wish.vocab}",
                expected=f"width {hidden}, vocabulary {vocab}",
                do="Start `medusa-ppo companion serve` with this actor as --model.",
            )

    # ---- called by the loop

    @contextlib.contextmanager
    def __call__(
        self,
        prompts: Sequence[Sequence[int]],
        completions: Sequence[Sequence[int]],
        logprobs: Sequence[torch.Tensor | Sequence[float]] | None = None,
    ) -> Iterator[None]:
        """Context around this rank's log-prob pass. Rows are recognised by their tokens, padded or
        packed, in any order and any micro-batches. An error of the pass is passed on, and its rows
        are lost.

        Args:
            prompts, completions: token ids of each row; a prompt is repeated for each of its rows.
            logprobs: behaviour log-probs of each completion's tokens, as they were sampled, with
                the temperature, top-p and top-k (see `cuts`); None: the companion computes them
                from the states. They are read when the block ends, so float32 tensors on the CPU
                may be filled in by the pass itself.

        Raises:
            DataError: the numbers of prompts, completions and log-probs differ.
            ConfigError: tokens went through the actor, but no whole row.
        """
        began = time.perf_counter()
        rows = _rows(prompts, completions, logprobs)
        tokens = sum(len(completion) for _, completion, _ in rows)
        rows_wanted, rows_here = self._agreed(tokens)
        most = rows_wanted / self._ranks
        if self._meets:
            self._number += 1
        # Asked on every rank or on none, whatever rows it has.
        ids = self._token_ids(rows) if most and logprobs is not None else None
        if most and self._together:
            self._refresh()
        wanted = min(tokens, most)
        if not wanted:
            self._sender.pass_over(bool(tokens))
            self._rows.take(self._version)  # Counted, as in the other processes.
            # The others' rows need this process's part. Tables are copied here, before the update
            # changes them.
            rowless = None
            if most and rows_here and not self._told and self._rowless is None:
                rowless = self._parcel(None, None, self._changed_tables(ids), False, 0), ids
            if not self._meets:
                # It goes with the update: until then rows may come.
                self._rowless = self._rowless or rowless
            self.exposed_s += time.perf_counter() - began
            yield
            if self._meets and rowless is not None:
                self._give(*rowless)
            return
        # Tables are copied before the pass, because the loop may update them right after it.
        tables = self._changed_tables(ids)
        self._rows.expect(tokens, wanted, rank=self._rank, ranks=self._ranks)
        self.exposed_s += time.perf_counter() - began
        with self._rows.watch([(prompt, completion) for prompt, completion, _ in rows]):
            yield
        began = time.perf_counter()
        self._rows.add_logprobs([values for _, _, values in rows])
        keys = torch.tensor([prompt_key(prompt) for prompt in self._rows.prompts])
        batch = self._rows.take(self._version)
        # A part without rows says that there is nothing to wait for, and the first process has
        # everybody's tables.
        self._give(self._parcel(batch, keys, tables, logprobs is not None, tokens), ids)
        # Who meets the others sends a part for each call in which one of them has rows.
        self._told, self._rowless = not self._meets, None
        self.exposed_s += time.perf_counter() - began

    def expect(
        self,
        prompts: Sequence[Sequence[int]],
        completions: Sequence[Sequence[int]],
        logprobs: Sequence[torch.Tensor | Sequence[float]] | None = None,
    ) -> None:
        """For a loop that can't put a block around its pass: the actor's next passes are tapped
        until `updated`. Raises like a call, here or in `updated`.
        """
        self._end_open()
        stack = contextlib.ExitStack()
        stack.enter_context(self(prompts, completions, logprobs))
        self._open = stack

    def updated(self, version: int | None = None) -> None:
        """Call this when the actor was updated: on every rank, at the same point of its work.

        Args:
            version: the actor's version, by the loop's count; None: one more than before.
        """
        self._end_open()
        began = time.perf_counter()
        if self._rowless is not None:
            self._give(*self._rowless)
        self._told, self._rowless = False, None
        self._version = self._version + 1 if version is None else version
        self._stale = True
        if not self._together:
            self._refresh()
        if not self._meets:
            self._number += 1
        self.exposed_s += time.perf_counter() - began

    def drain(self, timeout_s: float) -> bool:
        """Wait until everything has been sent; False if the time runs out first."""
        return self._sender.drain(timeout_s)

    def close(self) -> None:
        """End the thread after its current transfer. Safe to call again."""
        self._end_open(failed=True)
        self._sender.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def cuts(self) -> bool:
        """Whether top-p or top-k leave tokens out when responses are sampled. The log-probs of a
        pass that knows nothing of them are then too small: give none.
        """
        return self._sampling.top_p < 1 or self._sampling.top_k > 0

    @property
    def wish(self) -> Wish:
        return self._sender.wish

    @property
    def sent(self) -> int:
        return self._sender.sent

    @property
    def lost(self) -> int:
        return self._sender.lost

    @property
    def problem(self) -> str:
        return self._sender.problem or self._sender.wish.problem

    # ---- parts

    def _end_open(self, *, failed: bool = False) -> None:
        stack, self._open = self._open, None
        if stack is None:
            return
        if failed:
            # As after a pass that raised, nothing is sent.
            stack.__exit__(GeneratorExit, GeneratorExit(), None)
            return
        stack.close()

    @property
    def _together(self) -> bool:
        """Whether the processes know of each other's calls what is wanted. Then tables are gathered
        only if a step's rows are, right before its pass.
        """
        return self._meets or self._ranks == 1

    def _refresh(self) -> None:
        """Gather the tables on every rank, if they may have changed."""
        if self._stale:
            self._stale = False
            with self._reading():
                if self._actor.refresh(embedding=self._embedding):
                    self._tables_version = self._version

    def _agreed(self, tokens: int) -> tuple[int, bool]:
        """Rows wanted from all processes together, and whether another process may have rows of
        this call. Each process has its own answer, from a different moment. If each went by its
        own, the parts of a call would not belong together, or would come without their tables.

        Args:
            tokens: this process's own.
        """
        rows = self._sender.wish.rows
        if not self._meets:
            if self._ranks == 1:
                self._reads_embedding(self._sender.wish.embedding)
            return rows, self._ranks > 1
        embedding = self._sender.wish.embedding
        first = (0, 0) if self._rank else (rows, int(embedding))
        told = torch.tensor([*first, tokens], device=self._meeting_device)
        dist.all_reduce(told, dist.ReduceOp.MAX)
        rows, reads, most_tokens = told.tolist()
        self._reads_embedding(bool(reads))
        return rows, most_tokens > 0

    def _reads_embedding(self, reads: bool) -> None:
        """From the next time that tables are gathered, the embedding is one of them or is not."""
        # A companion with other heads may have taken the place of this one.
        self._stale |= reads and not self._embedding
        self._embedding = reads

    @property
    def _meeting_device(self) -> str:
        return "cuda" if dist.get_backend() == "nccl" else "cpu"

    def _token_ids(self, rows: Sequence[_Row]) -> torch.Tensor | None:
        """All tokens of the step, from all processes, int64, ascending; None if there are others
        that can't be asked. For a step with log-probs: without them the companion computes them,
        which takes all of lm_head.
        """
        if self._ranks > 1 and not self._meets:
            return None
        vocab = self._sender.wish.vocab
        there_V = torch.zeros(vocab, dtype=torch.uint8)
        for prompt, completion, _ in rows:
            ids = torch.tensor([*prompt, *completion])
            there_V[ids[(ids >= 0) & (ids < vocab)]] = 1
        if self._meets:
            told_V = there_V.to(self._meeting_device)
            dist.all_reduce(told_V, dist.ReduceOp.MAX)
            there_V = told_V.cpu()
        return there_V.nonzero().squeeze(1)

    def _changed_tables(self, ids: torch.Tensor | None) -> Tables | TableRows | None:
        """A copy of the actor's tables, if the companion has different ones; only in the first
        process.

        Args:
            ids: all tokens of the step: then of lm_head only the rows of these and of the draft
                tokens are copied; None: the tables are copied whole.
        """
        if self._rank:
            return None
        wish = self._sender.wish
        untold = list(self._untold)
        # Sent at least once, because an earlier loop may have reached the same version number.
        if self._sender.sent and wish.tables_version == self._tables_version:
            return None
        lm_head_VD = self._actor.lm_head_VD
        reads = self._embedding if self._together else wish.embedding
        embedding_VD = self._actor.embedding_VD if reads else None
        draft_ids = self._sender.draft_ids
        if ids is not None and draft_ids is not None:
            return table_rows(lm_head_VD, embedding_VD, ids, torch.cat([draft_ids, *untold]))
        if embedding_VD is None:
            return lm_head_VD.detach().to("cpu", copy=True), None
        return copied_tables(lm_head_VD, embedding_VD)

    def _give(self, parcel: _Parcel, ids: torch.Tensor | None) -> None:
        """Let a part go. `ids`: all tokens of its step, if they are known."""
        if ids is not None:
            self._untold.append(ids)
        self._sender.send(parcel)

    def _parcel(
        self,
        batch: RolloutBatch | None,
        keys: torch.Tensor | None,
        tables: Tables | TableRows | None,
        has_logprobs: bool,
        tokens: int,
    ) -> _Parcel:
        tensors: dict[str, torch.Tensor] = {}
        if batch is not None:
            assert batch.prompts_S is not None and keys is not None, "a RowTap numbers its prompts"
            batch = replace(batch, prompts_S=keys[batch.prompts_S])
            tensors = batch_tensors(batch, logprobs=has_logprobs)
        header = PartHeader(
            number=self._number,
            rank=self._rank,
            ranks=self._ranks,
            policy_version=self._version,
            tables_version=self._tables_version,
            temperature=self._sampling.temperature,
            top_k=self._sampling.top_k,
            top_p=self._sampling.top_p,
            left_out=tokens if batch is None else batch.left_out,
        )
        return _Parcel(tensors, tables, header)


_Row = tuple[Sequence[int], Sequence[int], torch.Tensor]
"""Prompt, completion, and log-probs of the latter."""


def _rows(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    logprobs: Sequence[torch.Tensor | Sequence[float]] | None,
) -> list[_Row]:
    """The rows that have a token: prompt, completion, log-probs (zeros if unknown)."""
    counts = len(prompts), len(completions), len(completions if logprobs is None else logprobs)
    if len(set(counts)) > 1:
        raise DataError(
            "A loop's rows do not fit together.",
            given=f"{counts[0]} prompts, {counts[1]} completions, {counts[2]} of log-probs",
            expected="the same number of each",
            do="Repeat each prompt for each of its completions.",
        )
    rows: list[_Row] = []
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        if not completion:
            continue
        values = torch.zeros(len(completion))
        if logprobs is not None:
            values = torch.as_tensor(logprobs[row], dtype=torch.float32).detach().cpu()
        if values.shape != (len(completion),):
            raise DataError(
                "A completion needs a log-prob for each of its tokens.",
                given=f"row {row}: {tuple(values.shape)} log-probs, {len(completion)} tokens",
                expected="one for each token",
                do="Give only those of the completion, or leave logprobs out.",
            )
        rows.append((tuple(prompt), tuple(completion), values))
    return rows


class _PolicyTap(PassTap):
    """Taps only passes of the actor itself: a pass with another adapter or none is one of the
    reference policy.
    """

    def __init__(self, model: nn.Module, *args: Any) -> None:
        super().__init__(model, *args)
        # The adapters that are active when the tap is created are the policy's.
        self._adapters = adapters_in_use(model)

    def _see_pass(self, kept: StatesHook) -> None:
        if adapters_in_use(self._model) == self._adapters:
            super()._see_pass(kept)


@dataclass(frozen=True)
class _Parcel:
    tensors: dict[str, torch.Tensor]
    tables: Tables | TableRows | None
    header: PartHeader


class _Sender:
    """The thread that sends parts. If several parts wait, only the newest is kept.

    Attributes:
        wish: the wish in the last answer.
        draft_ids: its draft tokens, int64; None: any.
        sent, lost: parts that were accepted, and parts that were not.
        problem: why the last part was not accepted; empty if it was.
    """

    def __init__(self, link: CompanionLink, wish: Wish) -> None:
        self._link = link
        self._folder = OwnedFolder("medusa-ppo-tap-", shared_memory=True)
        self._changed = threading.Condition()
        self._waiting: _Parcel | None = None
        self._asks = self._busy = self._over = False
        self.wish = wish
        self.draft_ids = ids_of_text(wish.draft_ids, wish.vocab)
        self.sent = self.lost = 0
        self.problem = ""
        self._thread = threading.Thread(target=self._run, name="medusa-ppo-tap", daemon=True)
        self._thread.start()

    def send(self, parcel: _Parcel) -> None:
        """Returns at once."""
        with self._changed:
            # The tables of the part that is dropped go with this one: they were never confirmed.
            self.lost += self._waiting is not None
            self._waiting = parcel
            self._changed.notify_all()

    def pass_over(self, lost: bool) -> None:
        """Skip a step whose rows are not wanted. The thread asks what is wanted next."""
        with self._changed:
            self.lost += lost
            self._asks = True
            self._changed.notify_all()

    def drain(self, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(
                lambda: self._waiting is None and not self._asks and not self._busy, timeout_s
            )

    def close(self) -> None:
        with self._changed:
            self._over = True
            self._changed.notify_all()
        self._thread.join(CLOSE_S)
        self._folder.close()
        self._link.close()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._waiting or self._asks or self._over)
                parcel, self._waiting = self._waiting, None
                if parcel is None and self._over:
                    return
                self._asks, self._busy = False, True
            try:
                wish = self._link.ask() if parcel is None else self._put(parcel)
                self.draft_ids = ids_of_text(wish.draft_ids, wish.vocab)
                self.wish = wish
                self.sent += parcel is not None
                self.problem = ""
            # Everything is caught: the loop must go on, and nobody would begin this thread again.
            except Exception as error:
                self._failed(error, parcel)

    def _put(self, parcel: _Parcel) -> Wish:
        path = self._folder.path / "part"
        try:
            header = write_part(path, parcel.tensors, parcel.tables, parcel.header)
            return self._link.put(path, header)
        finally:
            path.unlink(missing_ok=True)

    def _failed(self, error: Exception, parcel: _Parcel | None) -> None:
        self.lost += parcel is not None
        # Nothing is tapped until the companion answers again. It counts as having no tables of ours
        # until then, because it may have been restarted.
        self.wish = self.wish.model_copy(update={"rows": 0, "tables_version": None})
        text = str(error)
        if text != self.problem:
            self.problem = text
            do = "" if isinstance(error, CompanionError) else f"{type(error).__name__}: "
            logger.warning("%s%s The loop continues; heads learn nothing meanwhile.", do, text)
