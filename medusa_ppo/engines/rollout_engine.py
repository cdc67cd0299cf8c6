"""The rollout engine's interface, and what its implementations share."""

from __future__ import annotations

import logging
import math
import reprlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, TypeVar, Unpack

from heads.checkpoint import checksum, load_state
from heads.errors import ConfigError, DataError, EngineError, SwapError
from heads.tensorfile import Header
from medusa_ppo.contract.rollouts import Counters, Response, Rollouts, Sampling
from medusa_ppo.contract.status import Checked, SwapReceipt
from medusa_ppo.drafting.memory import Row
from medusa_ppo.engines.calibration import in_words
from medusa_ppo.engines.kept_tables import read_table, table_file
from medusa_ppo.engines.pieces import Finished, Partly
from medusa_ppo.vllm_plugin.confirm import read_state
from medusa_ppo.vllm_plugin.worker_calls import Drafting

logger = logging.getLogger(__name__)

COUNTER = "vllm:spec_decode_num_"
"""vLLM's counters of drafts begin so."""
Prompts = Sequence[Sequence[int]]
Found = TypeVar("Found")


class RolloutEngine(ABC):
    """Samples responses, and accepts new heads and new actor weights while it runs.

    Attributes:
        max_drafts: drafts per step that it was started for; 0 without heads.
        num_drafts: drafts per step now.
        policy_version, heads_version: versions of the last sync and swap. For an engine that feeds
            itself (MEDUSA_PPO_FEED), heads_version is what it drafted with at the end of its last
            rollouts. A heads_version of -1: it has lost its heads, and drafts nothing until some
            are swapped in.
        note: a message for people about its start; empty: none.
        restarts: how often it was lost and restarted.
        elsewhere: whether it runs on another node.
        streams: whether it also accepts a broadcast actor (`stream_actor` of
            `medusa_ppo.engines.actor_sync.BroadcastPool`).
    """

    max_drafts: int = 0
    num_drafts: int = 0
    policy_version: int = 0
    heads_version: int = 0
    note: str = ""
    restarts: int = 0
    elsewhere: bool = False
    streams: bool = False

    @abstractmethod
    def generate(self, prompts: Prompts, sampling: Sampling) -> Rollouts:
        """Sample `responses_per_prompt` responses to each prompt (token ids), in prompt order.

        The log-probs are those of the distribution that was sampled from; the counters cover this
        call only.
        """

    def generate_as_finished(
        self, prompts: Prompts, sampling: Sampling, finished: Finished
    ) -> Rollouts:
        """Like `generate`; `finished` is called for each response as it ends, in any order, while
        the others are being written.

        If an engine is lost on the way, a response may arrive again with different tokens; only
        what is returned counts. An engine that can't do this reports all at the end.
        """
        rollouts = self.generate(prompts, sampling)
        for place, response in enumerate(rollouts.responses):
            finished(place, response)
        return rollouts

    def generate_partly(self, prompts: Prompts, sampling: Sampling, partly: Partly) -> Rollouts:
        """Like `generate`, continuing what was begun, until enough have ended. The others are
        returned as they are (UNFINISHED).
        """
        raise self._only_colocated("can't stop a response half-way", "Set ppo.carry_after=null.")

    @abstractmethod
    def swap_heads(
        self, path: str | Path, version: int, checked: Checked | None = None
    ) -> SwapReceipt:
        """Install the heads of a state file (heads.checkpoint.save_state) between two steps. After
        a SwapError the old ones stay.

        Args:
            checked: the result of `check_state` for the file; None: it is checked here.
        """

    @abstractmethod
    def sync_actor(
        self, path: str | Path, version: int, checked: Checked | None = None
    ) -> SwapReceipt:
        """Load the actor's weights from a safetensors file with HF names, and drop all cached
        prompts. `checked`: as for swap_heads.
        """

    def check_actor(self, entries: Header) -> list[str]:
        """The device of each of its ranks' weights: a GPU's id, or `cpu`. Raises SwapError if an
        actor with these tensors does not fit this engine.
        """
        raise self._only_colocated("takes an actor only from a file", "Set engine.transfer=file.")

    def join_transfer(self, place: dict[str, Any]) -> None:
        """Join a group for broadcasting actors; waits until all its ranks are there.

        Args:
            place: fields of `runtime.rendezvous.Place`, `rank` being that of this engine's first
                rank.
        """
        raise self._only_colocated("takes an actor only from a file", "Set engine.transfer=file.")

    def receive_actor(self, entries: Header, version: int) -> SwapReceipt:
        """Like `sync_actor`, but from the group, while rank 0 sends
        (`medusa_ppo.vllm_plugin.transfer.send`). After a SwapError the engine may have no complete
        actor; it then answers nothing until it has one.
        """
        raise self._only_colocated("takes an actor only from a file", "Set engine.transfer=file.")

    @abstractmethod
    def configure(self, **settings: Unpack[Drafting]) -> None:
        """Set how it drafts from the next step on; settings that are left out don't change. Raises
        ConfigError for impossible ones.
        """

    @abstractmethod
    def checksums(self) -> dict[str, str]:
        """`heads` and `actor`: checksums of what was last loaded; `actor` is empty before the first
        sync.
        """

    @abstractmethod
    def counters(self) -> Counters:
        """vLLM's acceptance counters since the engine started."""

    @abstractmethod
    def plugin_report(self) -> dict[str, Any]:
        """Proof that our vLLM plugin is active where the model runs: process id, versions,
        patches.
        """

    def serving_version(self) -> int:
        """`heads_version`; an engine that feeds itself is asked for it first."""
        return self.heads_version

    def choices(self) -> list[dict[str, Any]]:
        """The choices of an engine that chooses the number of drafts, since the last call: rows of
        `DraftChooser.take_report`.
        """
        return []

    def forget_prompts(self) -> None:
        """Drop all cached prompts, as a sync does: the next call computes its own anew. Raises
        EngineError if requests hold them.
        """
        raise self._only_colocated("can't drop its cached prompts", "Use one engine, not a pool.")

    def remember(self, rows: Sequence[Row]) -> int:
        """Put responses that others have written into its memory; returns the bytes that it then
        holds, 0 without a memory (`engine.memory_bytes`).
        """
        raise self._only_colocated("remembers nothing", "Set engine.memory_bytes=null.")

    def sleep(self, level: int) -> None:
        """Release memory until `wake`; the engine must be idle, and can do nothing meanwhile.

        Args:
            level: 1 keeps the weights on the host; 2 throws actor and heads away: `sync_actor` must
                follow `wake`, and for drafts `swap_heads`.
        """
        raise self._only_colocated("can't sleep", "Set engine.sleep_level=null.")

    def wake(self) -> None:
        """Take the memory again, and check which heads are really there (`heads_version`)."""
        raise self._only_colocated("can't sleep", "Set engine.sleep_level=null.")

    @abstractmethod
    def close(self) -> None:
        """End the engine and everything it started. Safe to call again."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _only_colocated(self, what: str, do: str) -> EngineError:
        return EngineError(
            f"This engine {what}.", given=type(self).__name__, expected="a colocated engine", do=do
        )

    def _possible(self, settings: Drafting) -> int:
        """The number of drafts with these settings. Raises ConfigError if there are fewer heads."""
        count = settings.get("num_drafts", self.num_drafts)
        if not 0 <= count <= self.max_drafts:
            do = "Restart the engine with more heads."
            raise ConfigError(
                "This number of drafts is not possible.",
                given=count,
                expected=f"0..{self.max_drafts}",
                do=do,
            )
        return count


class WorkerEngine(RolloutEngine):
    """The shared part of engines that reach our worker extension by their own call (`_call`)."""

    _feeds_itself = False
    """Whether a feed can change its heads without a call of ours."""

    @abstractmethod
    def _call(self, method: str, *args: Any) -> dict[str, Any]:
        """Call a method of the worker extension on all workers; returns the first answer, after
        checking each for errors.
        """

    def swap_heads(
        self, path: str | Path, version: int, checked: Checked | None = None
    ) -> SwapReceipt:
        try:
            receipt = self._receipt(
                "medusa_swap_heads", check_file(path, "new heads"), version, checked
            )
        except SwapError:
            # After most refusals the old heads stay; after some there are none, and only the
            # workers know.
            self._look_at_heads()
            raise
        self.heads_version = version
        return receipt

    def sync_actor(
        self, path: str | Path, version: int, checked: Checked | None = None
    ) -> SwapReceipt:
        started = time.perf_counter()
        return self._has_actor(
            self._receipt(
                "medusa_sync_actor", check_file(path, "the actor's weights"), version, checked
            ),
            started,
        )

    def _has_actor(self, receipt: SwapReceipt, started: float) -> SwapReceipt:
        """The model has new weights, but cached prompts were computed with the old ones."""
        self.forget_prompts()
        self.policy_version = receipt.version
        return SwapReceipt(receipt.version, receipt.checksum, time.perf_counter() - started)

    def forget_prompts(self) -> None:
        if not self._forget_prompts():
            raise EngineError(
                "The prefix cache could not be reset.",
                given="requests or a transfer of keys and values that hold its blocks",
                expected="an idle engine",
                do="Try again when they are done; after a sync, sync again: until then old keys may"
                " be used with new weights.",
            )

    @abstractmethod
    def _forget_prompts(self) -> bool:
        """Reset the prefix cache; keys and values of running requests are recomputed. False if that
        is not possible now.
        """

    def _answered(
        self, prompts: Prompts, sampling: Sampling, answer: Callable[[], Sequence[Response]]
    ) -> Rollouts:
        """The result of `answer`, with its seconds and the counters of that time."""
        before = self.counters()
        started = time.perf_counter()
        return self._whole(prompts, sampling, answer(), before, started)

    def _whole(
        self,
        prompts: Prompts,
        sampling: Sampling,
        responses: Sequence[Response],
        before: Counters,
        started: float,
    ) -> Rollouts:
        """A call that ends now. `before`: the counters when it `started`."""
        seconds = time.perf_counter() - started
        asked = tuple(tuple(prompt) for prompt in prompts)
        return with_versions(
            Rollouts(asked, tuple(responses), self.counters() - before, seconds, sampling), self
        )

    def configure(self, **settings: Unpack[Drafting]) -> None:
        count = self._possible(settings)
        # An engine without heads drafts nothing anyway.
        if self.max_drafts or settings != {"num_drafts": 0}:
            self._call("medusa_configure", settings)
        self.num_drafts = count

    def target_changed(self, version: int) -> None:
        """Another loop has put new actor weights into the engine: reread what our proposer took
        from the old ones.
        """
        self._call("medusa_target_changed", version)
        self.policy_version = version

    def checksums(self) -> dict[str, str]:
        return self._asked(
            "medusa_checksums",
            lambda answer: {"heads": str(answer["heads"]), "actor": str(answer["actor"])},
        )

    def plugin_report(self) -> dict[str, Any]:
        return self._call("medusa_plugin_report")

    def serving_version(self) -> int:
        # The feed's address is an environment variable, which engines without heads see, too.
        if self._feeds_itself and self.max_drafts:
            # Only its number: the engine may be asleep by now, and on a GPU its heads can't be read
            # there.
            self.heads_version = self._asked(
                "medusa_feed_version", lambda answer: int(answer["version"])
            )
        return self.heads_version

    def remember(self, rows: Sequence[Row]) -> int:
        return (
            self._asked(
                "medusa_remember", lambda answer: int(answer["bytes"]), [list(row) for row in rows]
            )
            if self.max_drafts
            else 0
        )

    def choices(self) -> list[dict[str, Any]]:
        return (
            self._asked("medusa_choices", lambda answer: list(answer["rows"]))
            if self.max_drafts
            else []
        )

    def probe(self, hidden: list[list[float]], last_ids: list[int]) -> list[list[int]]:
        """What the serving heads draft (one-hot, all K) for given hidden states and last tokens."""
        return self._asked("medusa_probe", lambda answer: list(answer["drafts"]), hidden, last_ids)

    def _learn_kept_times(self) -> dict[str, Any]:
        """Give the workers the step times saved by an earlier start, if there are any. They answer
        with what the times are valid for (`key`), the numbers of drafts to choose from (`choices`),
        and their current `rows`.
        """
        answer = self._call("medusa_step_times")
        key = understood(lambda: dict(answer["key"]), answer)
        rows = read_table(key, self.max_drafts)
        if not rows:
            return answer
        self.note = f"Step times from an earlier start: {in_words(rows)} ({table_file(key)})."
        logger.info("%s", self.note)
        return self._call("medusa_step_times", rows)

    def _take_stock(self, drafting: Drafting, *, needs_heads: bool = True) -> None:
        """Check what was started (our plugin, and heads if needed), and set how to draft.

        Raises:
            UnsupportedVersionError: our plugin is not active in a worker.
            EngineError: the engine does not draft with native heads.
        """
        report = self.plugin_report()
        kind, drafter, most = understood(
            lambda: (report["kind"], report["drafter"], int(report["max_drafts"])), report
        )
        if needs_heads and not kind:
            raise EngineError(
                "The engine does not draft with native heads.",
                given=f"drafter {drafter or 'none'}",
                expected="an engine started with the heads' folder as its draft model",
                do="Pass the speculative configuration on to vLLM (docs/hooks.md).",
            )
        self.max_drafts = most
        self._feeds_itself = bool(report.get("feeds_itself"))
        self._look_at_heads()
        if self.max_drafts:
            self.configure(
                **drafting
                | {"num_drafts": min(drafting.get("num_drafts", self.max_drafts), self.max_drafts)}
            )
        if self.max_drafts and drafting.get("choose"):
            self._begin_to_choose()

    def _begin_to_choose(self) -> None:
        """Load the saved step times of this machine, by which the number of drafts is chosen. If
        there are none, the engine learns them while it serves.
        """
        self._learn_kept_times()

    def _look_at_heads(self) -> None:
        """Ask the workers which heads they really hold."""
        if self.max_drafts:
            self.heads_version = self._asked(
                "medusa_checksums", lambda answer: int(answer["heads_version"])
            )

    def _receipt(
        self, method: str, path: str, version: int, checked: Checked | None = None
    ) -> SwapReceipt:
        def receipt(answer: dict[str, Any]) -> SwapReceipt:
            return SwapReceipt(
                int(answer["version"]), str(answer["checksum"]), float(answer["seconds"])
            )

        return self._asked(
            method, receipt, path, version, *([[checked.checksum]] if checked else [])
        )

    def _asked(self, method: str, take: Callable[[dict[str, Any]], Found], *args: Any) -> Found:
        """The part that `take` extracts from a worker's answer."""
        answer = self._call(method, *args)
        return understood(lambda: take(answer), answer)


def understood(take: Callable[[], Found], answer: object) -> Found:
    """The part that `take` extracts from an answer. Raises EngineError if it is missing."""
    try:
        return take()
    # Everything that a foreign server's JSON may contain: infinite numbers, lists instead of
    # mappings, endless nesting.
    except (
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        OverflowError,
        RecursionError,
    ) as error:
        raise EngineError(
            "An engine's answer lacks the expected part.",
            given=f"{type(error).__name__} {str(error)[:100]} in {reprlib.repr(answer)}",
            expected="vLLM's answer, with our worker extension",
            do=(
                "Check that engine.backend is such a server, or report this with the versions of"
                " `medusa-ppo doctor`."
            ),
        ) from error


def not_wanted() -> EngineError:
    """The error of an engine whose pool was closed while it started."""
    return EngineError(
        "The engine is not wanted any more.",
        given="a pool that was closed while it started",
        expected="a pool that is in use",
        do="Start a new one.",
    )


def check_request(
    prompts: Prompts, sampling: Sampling, max_model_len: int, vocab_size: int
) -> None:
    """Refuse requests that vLLM would refuse only half-way through the call, or misread. Raises
    DataError or ConfigError.
    """
    if not prompts:
        raise DataError(
            "There is no prompt.",
            given="an empty list",
            expected="at least one prompt",
            do="Check the dataset and its filters.",
        )
    # vLLM accepts a prompt that leaves too little room, and silently cuts the response.
    limit = max_model_len - sampling.max_new_tokens
    for index, prompt in enumerate(prompts):
        if not prompt or len(prompt) > limit:
            raise DataError(
                "A prompt is empty or too long.",
                given=f"prompt {index} has {len(prompt)} tokens",
                expected=(
                    f"1..{limit} (engine.max_model_len {max_model_len} minus max_new_tokens"
                    f" {sampling.max_new_tokens})"
                ),
                do="Raise engine.max_model_len or shorten prompts or responses.",
            )
        # Without a tokenizer vLLM does not check: the id would be read beyond the embedding's end.
        if vocab_size and not 0 <= min(prompt) <= max(prompt) < vocab_size:
            raise DataError(
                "A prompt has a token id outside the vocabulary.",
                given=f"prompt {index}: {min(prompt)}..{max(prompt)}",
                expected=f"0..{vocab_size - 1}",
                do="Use the model's own tokenizer.",
            )
    counts = min(sampling.responses_per_prompt, sampling.max_new_tokens)
    if sampling.temperature < 0 or not 0 < sampling.top_p <= 1 or sampling.top_k < 0 or counts < 1:
        raise ConfigError(
            "These sampling settings are not possible.",
            given=sampling,
            expected="temperature >= 0, 0 < top_p <= 1, top_k >= 0",
            do="Correct them.",
        )


def check_file(path: str | Path, what: str) -> str:
    """Absolute path of an existing file. Raises SwapError."""
    file = Path(path).resolve()
    if not file.is_file():
        raise SwapError(
            f"There is no file with {what}.",
            given=str(path),
            expected="a safetensors file",
            do="Write it before the swap.",
        )
    return str(file)


def check_state(path: str | Path, what: str) -> Checked:
    """Read a file of weights, check for NaN and infinity, and compute its checksum. Raises
    SwapError.
    """
    return Checked(read_state(check_file(path, what), what)[1])


def sampling_arguments(sampling: Sampling, stop: Sequence[int], seed: int | None) -> dict[str, Any]:
    """Arguments of one request under the names of both vLLM's SamplingParams and its HTTP API."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        # Left out, a server would take these from its model's generation_config.json; the learner
        # computes log-probs without them.
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "max_tokens": sampling.max_new_tokens,
        "seed": seed,
        "ignore_eos": sampling.ignore_eos,
        "stop_token_ids": [] if sampling.ignore_eos else list(stop),
        # Only the sampled token's, without the most likely ones.
        "logprobs": 0,
    }


def checked_response(
    prompt_index: int, token_ids: Sequence[int], logprobs: Sequence[float], finish_reason: str
) -> Response:
    """Raise EngineError unless there is one numeric log-prob for each token."""
    if len(token_ids) != len(logprobs) or not all(map(math.isfinite, logprobs)):
        raise EngineError(
            "vLLM's log-probs do not belong to its tokens.",
            given=(
                f"{len(logprobs)} log-probs, {len(token_ids)} tokens,"
                f" {sum(map(math.isfinite, logprobs))} finite"
            ),
            expected="one number per sampled token",
            do="Report this with the versions of `medusa-ppo doctor`.",
        )
    return Response(
        prompt_index, tuple(token_ids), tuple(float(value) for value in logprobs), finish_reason
    )


def with_versions(rollouts: Rollouts, engine: RolloutEngine) -> Rollouts:
    """Stamp a call's result with the engine's versions and number of drafts."""
    return replace(
        rollouts,
        policy_version=engine.policy_version,
        heads_version=engine.serving_version(),
        num_drafts=engine.num_drafts,
    )


class NoEngine(RolloutEngine):
    """Accepts heads; every other operation raises."""

    def __init__(self) -> None:
        self._heads = ""

    def generate(self, prompts: Prompts, sampling: Sampling) -> Rollouts:
        raise self._absent("generate")

    def swap_heads(
        self, path: str | Path, version: int, checked: Checked | None = None
    ) -> SwapReceipt:
        self._heads = checksum(load_state(check_file(path, "new heads")))
        self.heads_version = version
        return SwapReceipt(version, self._heads, 0.0)

    def sync_actor(
        self, path: str | Path, version: int, checked: Checked | None = None
    ) -> SwapReceipt:
        raise self._absent("sync_actor")

    def configure(self, **settings: Unpack[Drafting]) -> None:
        if self._possible(settings) or settings.keys() != {"num_drafts"}:
            raise self._absent("configure")

    def checksums(self) -> dict[str, str]:
        return {"heads": self._heads, "actor": ""}

    def counters(self) -> Counters:
        return Counters()

    def plugin_report(self) -> dict[str, Any]:
        return {"kind": "", "drafter": "", "max_drafts": 0}

    def close(self) -> None:
        """Nothing to end."""

    @staticmethod
    def _absent(method: str) -> EngineError:
        return EngineError(
            "There is no engine here.",
            given=method,
            expected="heads to train",
            do="To draft, generate with vLLM.",
        )
