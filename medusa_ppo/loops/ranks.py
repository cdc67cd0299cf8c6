"""The processes of one training (torch.distributed's): one of them has the plugin and the
companion, all of them have engines and rows.

They communicate only at points that all of them reach: `agree` when their trainers are created,
`led` inside the hooks. Between two such points no process waits. If a process dies, its connections
close, and the others get an error at once.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Self, TypeVar

import torch.distributed as dist

from heads.errors import ConfigError, EngineError
from medusa_ppo.engines.colocated import read_counters

logger = logging.getLogger(__name__)

AGREE_S = 300.0
"""Time for all processes to make their trainers; a process without the plugin never arrives."""
LED_S = 900.0
"""Longest wait for another process, unless the trainer allows more: the first one may be starting
or draining a companion.
"""
DONE = "done"
Found = TypeVar("Found")
Serve = Callable[[str, tuple[Any, ...]], list[Any]]


class Ranks:
    """One process's end of the communication; a single process needs none.

    Attributes:
        rank, size: this process, and how many there are.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size
        self._group: Any = None

    @staticmethod
    def refuse_several(what: str) -> None:
        """Raise ConfigError if this process is one of several in a training: each would start its
        own companion.
        """
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise ConfigError(
                f"{what} is for a training of one process.",
                given=f"process {dist.get_rank()} of {dist.get_world_size()}",
                expected="one process",
                # Not in one of them alone: it would feed its own engine from its own rows only.
                do="Put a CompanionTap on every rank, and a feed at the engines"
                " (docs/feeds.md#a-stand-alone-companion).",
            )

    @classmethod
    def here(cls, what: object, timeout_s: float = 0.0) -> Self:
        """This process's end, once all have arrived with the same settings. See `agree`.

        Args:
            timeout_s: how long the trainer lets its processes wait for each other.
        """
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        ranks = cls(dist.get_rank(), dist.get_world_size()) if several else cls()
        ranks.agree(what, timeout_s)
        return ranks

    @property
    def leads(self) -> bool:
        """Whether this process has the training's only plugin and companion."""
        return self.rank == 0

    def agree(self, what: object, timeout_s: float = 0.0) -> None:
        """Ensure that all processes have the same settings and share a node, since heads and
        weights are passed as files.

        Args:
            what: the settings; None: the trainer runs without heads, and nothing more than this is
                asked of its processes.
            timeout_s: how long they may later wait for each other; LED_S if that is longer. Under
                DDP, for example, one process writes a checkpoint while the others already wait.

        Raises:
            ConfigError: they don't (the same error on each), or one of them has not arrived.
        """
        if self.size == 1:
            return
        # Without heads they may take as long as in the trainer alone.
        wait_s = AGREE_S if what is not None else max(AGREE_S, timeout_s)
        try:
            # A separate group, on the host: the trainer's own may use NCCL, and has a timeout for
            # its collectives.
            group = dist.new_group(backend="gloo", timeout=timedelta(seconds=wait_s))
            found: list[Any] = [None] * self.size
            dist.all_gather_object(found, (what, socket.gethostname()), group=group)
        except RuntimeError as error:
            raise ConfigError(
                "Not every process of the training has created its trainer with draft heads.",
                given=(
                    f"process {self.rank} of {self.size} waited {wait_s:.0f} s:"
                    f" {str(error).splitlines()[0]}"
                ),
                expected=(
                    "the same trainer class in all of them; `medusa=None` switches it off in all"
                ),
                do="Run the same script in every process.",
            ) from error
        # Compared as text, because settings are nested mappings, which have no hash.
        for name, values in zip(("medusa settings", "node"), zip(*found, strict=True), strict=True):
            if len({repr(value) for value in values}) > 1:
                raise ConfigError(
                    f"The processes of the training do not have the same {name}.",
                    given="; ".join(
                        f"process {rank}: {value}" for rank, value in enumerate(values)
                    ),
                    expected=(
                        "the same in each: one companion feeds all their engines, through files"
                    ),
                    do="Give every process the same settings, and train on one node.",
                )
            if what is None:
                return  # Nothing is passed as files.
        # A new group, because a group's timeout is set when it is created.
        patience = timedelta(seconds=max(LED_S, timeout_s))
        self._group = dist.new_group(backend="gloo", timeout=patience)

    # ---- calls from the first process to all

    def led(self, action: Callable[[], Found], serve: Serve) -> Found | None:
        """The first process runs the action, which may `call` the others. The others serve its
        calls until it is done, and return None.

        Raises:
            EngineError: on the others, if the first one's action failed; the first one raises the
                original error.
        """
        if self.size == 1:
            return action()
        if not self.leads:
            self._follow(serve)
            return None
        problem = ""
        try:
            return action()
        # Also catches Ctrl-C, because the others would otherwise wait until their time is up.
        except BaseException as error:
            problem = f"{type(error).__name__}: {error}"
            raise
        finally:
            self._share((DONE, (problem,)))

    def call(self, method: str, arguments: tuple[Any, ...], serve: Serve) -> list[list[Any]]:
        """Inside `led`: the answers of every process, this one's first. Raises EngineError if one
        of them failed.
        """
        if self.size == 1:
            return [serve(method, arguments)]
        self._share((method, arguments))
        return self._answers(*_tried(serve, method, arguments))

    def _follow(self, serve: Serve) -> None:
        while True:
            method, arguments = self._share(None)
            if method == DONE:
                if arguments[0]:
                    raise EngineError(
                        "The first process of the training failed.",
                        given=arguments[0],
                        expected="draft heads loaded and counted",
                        do="Read its own message.",
                    )
                return
            # Errors are gathered like answers; the first process raises them for all.
            found, problem = _tried(serve, method, arguments)
            self._gather((found, problem))

    def _answers(self, found: list[Any], problem: str) -> list[list[Any]]:
        every = self._gather((found, problem))
        assert every is not None, "the first process gathers"
        problems = [f"process {rank}: {text}" for rank, (_, text) in enumerate(every) if text]
        if problems:
            raise EngineError(
                "An engine of the training failed.",
                given="; ".join(problems),
                expected="an answer from each",
                do="Read that process's log.",
            )
        return [answers for answers, _ in every]

    # ---- plain collectives, no-ops for one process

    def share(self, value: Found) -> Found:
        """The first process's value, on all. All must call this."""
        return value if self.size == 1 else self._share(value)

    def all(self, value: Found) -> list[Found]:
        """Every process's value, on all of them, in order. All must call this."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self._group)
        return found

    def first_gets(self, value: Found) -> list[Found] | None:
        """Every process's value on the first one; None on the others. All must call this."""
        return [value] if self.size == 1 else self._gather(value)

    def _share(self, value: Any) -> Any:
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]

    def _gather(self, value: Any) -> list[Any] | None:
        found: list[Any] | None = [None] * self.size if self.leads else None
        dist.gather_object(value, found, dst=0, group=self._group)
        return found


def _tried(serve: Serve, method: str, arguments: tuple[Any, ...]) -> tuple[list[Any], str]:
    """The result, or a sentence on what went wrong. A process that raised an error here would leave
    the others waiting.
    """
    try:
        return serve(method, arguments), ""
    except Exception as error:
        logger.exception("Serving %s failed.", method)
        return [], f"{type(error).__name__}: {error}"


def serve_llm(llm: Any, counts: bool, method: str, arguments: tuple[Any, ...]) -> list[Any]:
    """Runs calls from the first process on each process's vLLM."""
    if method == "workers":
        return llm.collective_rpc(arguments[0], args=arguments[1])
    # In a tensor-parallel engine every process sees the same counters, so only one of them counts.
    if method == "counters":
        return [read_counters(llm.get_metrics())] if counts else []
    return [llm.reset_prefix_cache()]


def no_engine(method: str, arguments: tuple[Any, ...]) -> list[Any]:
    """Serves a process whose engine is a server: only the first process calls that."""
    raise AssertionError(f"{method} is never called here")
