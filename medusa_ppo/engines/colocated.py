"""vLLM behind a function call: in this process (the engine that the Ray actor hosts), or started
and driven by another loop.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heads.errors import EngineError, MedusaError, SwapError
from heads.tensorfile import Header
from medusa_ppo.actors.vision import open_image
from medusa_ppo.config.engine_section import EngineConfig
from medusa_ppo.contract.rollouts import Counters, ImagePrompt, Response, Rollouts, Sampling
from medusa_ppo.contract.status import Checked, SwapReceipt
from medusa_ppo.engines import rollout_engine as base
from medusa_ppo.engines.calibration import (
    StepBench,
    Timed,
    batch_sizes,
    in_words,
    measure,
    rows_of,
)
from medusa_ppo.engines.gpu_room import require_room
from medusa_ppo.engines.kept_tables import keep_table
from medusa_ppo.engines.launch import ENVIRONMENT, LaunchPlan, kernels_environment, plan_launch
from medusa_ppo.engines.pieces import UNFINISHED, Ended, Finished, Partly, request_seed, tell
from medusa_ppo.engines.rollout_engine import COUNTER
from medusa_ppo.vllm_plugin.speculation import is_asynchronous
from medusa_ppo.vllm_plugin.worker_calls import Drafting, first_of, raise_reported

if TYPE_CHECKING:
    from vllm import LLM, SamplingParams

logger = logging.getLogger(__name__)

Call = Callable[[str, tuple[Any, ...]], list[Any]]
PROMPT_TOKENS, LONGEST = 8, 256
"""Requests for timing: tokens in their prompts, and maximum tokens in their responses."""
STEPS_AHEAD = 2
"""Steps that vLLM's asynchronous scheduling has under way when one of them ends."""
DEEP_SLEEP = 2
"""The sleep level of vLLM that throws weights away."""


class ColocatedEngine(base.WorkerEngine):
    """`vllm.LLM` in this process, with our worker extension and (with a heads folder) our
    proposer.
    """

    def __init__(
        self,
        model_path: str | Path,
        heads_path: str | Path | None,
        config: EngineConfig,
        seed: int = 0,
        *,
        plan: LaunchPlan | None = None,
    ) -> None:
        """Start vLLM. Raises what `plan_launch` raises, and EngineError when the GPU has no room
        (`gpu_room`) or vLLM itself fails to start.

        Args:
            plan: a start that was planned elsewhere; the other arguments are then not used.
        """
        self.plan = plan or plan_launch(model_path, heads_path, config, seed)
        self._llm: LLM | None = _start(self.plan)
        self._asleep = self._actor_lost = False
        self._uncounted = Counters()
        try:
            self._take_stock(self.plan.drafting, needs_heads=self.plan.max_drafts > 0)
        except MedusaError:
            self.close()
            raise

    def _begin_to_choose(self) -> None:
        """Load saved step times, or calibrate."""
        answer = self._learn_kept_times()
        # Random tokens may stand for images that don't exist.
        if self.note or "limit_mm_per_prompt" in self.plan.engine_args:
            return
        started = time.perf_counter()
        key, choices = base.understood(
            lambda: (dict(answer["key"]), list(answer["choices"])), answer
        )
        rows = rows_of(self._calibrate(choices))
        self._call("medusa_step_times", rows)
        keep_table(key, rows)
        self.note = (
            f"Timed {len(rows)} kinds of steps in {time.perf_counter() - started:.1f} s:"
            f" {in_words(rows)}."
        )
        logger.info("%s", self.note)

    def _calibrate(self, choices: Sequence[int]) -> list[Timed]:
        """Time steps of dummy requests, which leave nothing behind."""
        llm = self._running()
        bench = _Bench(self, llm)
        before = self.counters()
        try:
            with _engine_errors("timing its steps"):
                return measure(
                    bench, batch_sizes(int(self.plan.engine_args["max_num_seqs"])), choices
                )
        finally:
            bench.abort()
            self._call("medusa_calibrate", None)
            self._forget_prompts()
            self._uncounted += self.counters() - before

    def generate(self, prompts: base.Prompts, sampling: Sampling) -> Rollouts:
        params = self._params(prompts, sampling)
        llm = self._running()
        repeat = sampling.responses_per_prompt
        requests: list[Any] = [
            request for prompt in prompts for request in [_request(prompt)] * repeat
        ]

        def answer() -> list[Response]:
            with _engine_errors("generating"):
                outputs = llm.generate(requests, params, use_tqdm=False)
            # vLLM resizes and crops images by its own reading of the processor's settings.
            _check_images(prompts, [output.prompt_token_ids for output in outputs[::repeat]])
            return [_response(i // repeat, output.outputs[0]) for i, output in enumerate(outputs)]

        return self._answered(prompts, sampling, answer)

    def generate_as_finished(
        self, prompts: base.Prompts, sampling: Sampling, finished: Finished
    ) -> Rollouts:
        return tell(self.generate_in_steps(prompts, sampling), finished)

    def generate_in_steps(
        self, prompts: base.Prompts, sampling: Sampling
    ) -> Iterator[Ended | Rollouts]:
        """Yield the responses that end in each engine step, and finally the whole result. All
        requests are in the engine from the first step on, as in `generate`, so every step is the
        same as there. Close the generator to skip the rest.
        """
        from vllm.sampling_params import RequestOutputKind

        params = self._params(prompts, sampling)
        engine = self._running().llm_engine
        before = self.counters()
        started = time.perf_counter()
        repeat = sampling.responses_per_prompt
        found = Ended()
        with _engine_errors("generating"):
            try:
                for place, settings in enumerate(params):
                    # By default every step would return all of a response so far.
                    settings.output_kind = RequestOutputKind.FINAL_ONLY
                    request: Any = {
                        # One layer above this call, vLLM makes the same from a prompt of ids.
                        "type": "token",
                        "prompt_token_ids": list(prompts[place // repeat]),
                    }
                    engine.add_request(str(place), request, settings)
                while engine.has_unfinished_requests():
                    outputs: list[Any] = [output for output in engine.step() if output.finished]
                    ended = {
                        int(o.request_id): _response(int(o.request_id) // repeat, o.outputs[0])
                        for o in outputs
                    }
                    found |= ended
                    if ended:
                        yield ended
            finally:
                # The caller may leave at any yield. Requests that still run would take slots from
                # the next call.
                if len(found) < len(params):
                    engine.abort_request(
                        [str(place) for place in range(len(params)) if place not in found]
                    )
        yield self._whole(
            prompts, sampling, [found[place] for place in range(len(params))], before, started
        )

    def generate_partly(
        self, prompts: base.Prompts, sampling: Sampling, partly: Partly
    ) -> Rollouts:
        """A continued request has a new seed, and its response so far follows its prompt. Whether
        enough have ended is checked after each engine step, so it does not depend on the clock.
        """
        from vllm.sampling_params import RequestOutputKind

        params = self._params(prompts, sampling)
        engine = self._running().llm_engine
        repeat = sampling.responses_per_prompt
        before = self.counters()
        started = time.perf_counter()
        texts = [PartialResponse.of(response) for response in partly.begun]
        open_places = [place for place, text in enumerate(texts) if text.ended == UNFINISHED]
        unfinished = {
            index: sum(text.ended == UNFINISHED for text in texts[index * repeat :][:repeat])
            for index in range(len(prompts))
        }
        with _engine_errors("generating"):
            try:
                for place in open_places:
                    text = texts[place]
                    settings = params[place]
                    # Tokens of unfinished responses count too, but each only once.
                    settings.output_kind = RequestOutputKind.DELTA
                    settings.max_tokens = sampling.max_new_tokens - len(text.ids)
                    request: Any = {
                        "type": "token",
                        "prompt_token_ids": [*prompts[place // repeat], *text.ids],
                    }
                    engine.add_request(str(place), request, settings)
                while not partly.over(unfinished):
                    outputs: list[Any] = list(engine.step())
                    for output in outputs:
                        place = int(output.request_id)
                        texts[place].add(output.outputs[0])
                        unfinished[place // repeat] -= output.finished
            finally:
                if left := [
                    str(place) for place in open_places if texts[place].ended == UNFINISHED
                ]:
                    engine.abort_request(left)
        responses = [
            base.checked_response(place // repeat, text.ids, text.logprobs, text.ended)
            for place, text in enumerate(texts)
        ]
        # Tokens from earlier calls were counted there.
        written = sum(len(text.ids) for text in texts) - sum(
            len(response.token_ids) for response in partly.begun
        )
        return replace(
            self._whole(prompts, sampling, responses, before, started), written_tokens=written
        )

    def _params(self, prompts: base.Prompts, sampling: Sampling) -> list[SamplingParams]:
        """vLLM's settings for each response, after checking that the call is possible."""
        from vllm import SamplingParams

        base.check_request(prompts, sampling, self.plan.max_model_len, self.plan.vocab_size)
        self._running()
        if self._actor_lost:
            given = "generate() after a sleep of level 2, or after an interrupted broadcast"
            raise EngineError(
                "The engine has no complete actor.",
                given=given,
                expected="sync_actor() first",
                do="Sync the actor.",
            )
        seeds = [
            request_seed(sampling, i) for i in range(len(prompts) * sampling.responses_per_prompt)
        ]
        arguments = [base.sampling_arguments(sampling, self.plan.stop_ids, seed) for seed in seeds]
        return [
            # Without flat_logprobs vLLM makes a dictionary and an object for each token's single
            # log-prob.
            SamplingParams(**given, detokenize=False, flat_logprobs=True)
            for given in arguments
        ]

    def check_actor(self, entries: Header) -> list[str]:
        return [answer["device"] for answer in self._answers("medusa_check_actor", entries)]

    def join_transfer(self, place: dict[str, Any]) -> None:
        self._call("medusa_join_transfer", place)

    def sync_actor(
        self, path: str | Path, version: int, checked: Checked | None = None
    ) -> SwapReceipt:
        try:
            return super().sync_actor(path, version, checked)
        except EngineError:
            self._look_at_actor()
            raise

    def _look_at_actor(self) -> None:
        """After a refusal the actor is unchanged; after an interruption there is none."""
        held = int(self._call("medusa_checksums")["actor_version"])
        self._actor_lost = self._actor_lost or held < 0

    def receive_actor(self, entries: Header, version: int) -> SwapReceipt:
        started = time.perf_counter()
        try:
            answer = self._call("medusa_receive_actor", entries, version)
        except EngineError:
            self._look_at_actor()
            raise
        return self._has_actor(SwapReceipt(version, answer["checksum"], answer["seconds"]), started)

    def _forget_prompts(self) -> bool:
        llm = self._running()
        if "limit_mm_per_prompt" in self.plan.engine_args:
            # Its workers drop image features when weights are loaded, without telling vLLM's
            # scheduler.
            llm.llm_engine.reset_encoder_cache()
        return llm.reset_prefix_cache(reset_running_requests=True)

    def _has_actor(self, receipt: SwapReceipt, started: float) -> SwapReceipt:
        receipt = super()._has_actor(receipt, started)
        self._actor_lost = False
        return receipt

    def sleep(self, level: int) -> None:
        llm = self._running()
        with _engine_errors("falling asleep"):
            llm.sleep(level=level)
        self._asleep = True
        self._actor_lost = self._actor_lost or level >= DEEP_SLEEP

    def wake(self) -> None:
        if not self._asleep:
            return
        # Cleared first, because `_running` refuses a sleeping engine.
        self._asleep = False
        with _engine_errors("waking up"):
            self._running().wake_up()
        # A deep sleep leaves the tensors in place, with different memory behind them.
        self._look_at_heads()

    def counters(self) -> Counters:
        llm = self._running()
        return (
            # Without speculation vLLM has no such counters.
            read_counters(llm.get_metrics()) - self._uncounted
            if self.plan.engine_args.get("speculative_config")
            else Counters()
        )

    def close(self) -> None:
        llm = self._llm
        self._llm = None
        if llm is not None:
            # `LLM` has no close of its own; waiting for the garbage collector would keep its
            # memory.
            llm.llm_engine.engine_core.shutdown()

    def _running(self) -> LLM:
        if self._llm is None:
            raise EngineError(
                "The engine is closed.",
                given="a call after close()",
                expected="a running engine",
                do="Start a new one.",
            )
        if self._asleep:  # Its memory is gone, and vLLM would wait for ever.
            raise EngineError(
                "The engine is asleep.",
                given="a call after sleep()",
                expected="wake() first",
                do="Wake it.",
            )
        return self._llm

    def _call(self, method: str, *args: Any) -> dict[str, Any]:
        return self._answers(method, *args)[0]

    def _answers(self, method: str, *args: Any) -> list[dict[str, Any]]:
        """Every worker's answer, after checking each for errors."""
        with _engine_errors(f"calling {method}"):
            return [
                raise_reported(answer)
                for answer in self._running().collective_rpc(method, args=args)
            ]


class _Bench(StepBench):
    """Requests with short random prompts; a new one starts whenever one ends, so the batch is
    always full.
    """

    def __init__(self, engine: ColocatedEngine, llm: LLM) -> None:
        self._engine = engine
        self._llm_engine = llm.llm_engine
        self.ahead = STEPS_AHEAD if is_asynchronous(llm.llm_engine.vllm_config) else 0
        self._random = random.Random(0)
        self._begun = 0
        self._live: list[str] = []

    def begin(self, running: int) -> None:
        self.abort()
        self._size = running

    def draft(self, drafts: int) -> list[Timed]:
        return self._engine._asked(
            "medusa_calibrate",
            lambda answer: [Timed(int(n), int(k), float(s)) for n, k, s in answer["steps"]],
            drafts,
        )

    def step(self) -> None:
        if not self._live:
            self._add()
        if any(output.finished for output in self._llm_engine.step()):
            self.abort()

    def abort(self) -> None:
        """End everything that still runs."""
        self._llm_engine.abort_request(self._live)
        self._live = []

    def _add(self) -> None:
        """New requests, up to the first token of each."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        plan = self._engine.plan
        length = min(PROMPT_TOKENS, plan.max_model_len // 2)
        sampling = Sampling(
            max_new_tokens=min(LONGEST, plan.max_model_len - length), ignore_eos=True
        )
        for place in range(self._size):
            name = f"calibration-{self._begun}"
            given = base.sampling_arguments(sampling, plan.stop_ids, place)
            params = SamplingParams(**given, detokenize=False, flat_logprobs=True)
            params.output_kind = RequestOutputKind.DELTA
            prompt = [self._random.randrange(plan.vocab_size) for _ in range(length)]
            request: Any = {"type": "token", "prompt_token_ids": prompt}
            self._llm_engine.add_request(name, request, params)
            self._live.append(name)
            self._begun += 1
        silent = set(self._live)
        while silent and self._llm_engine.has_unfinished_requests():
            outputs: list[Any] = list(self._llm_engine.step())
            silent -= {output.request_id for output in outputs}


@dataclass
class PartialResponse:
    """A response while it is being written."""

    ids: list[int]
    logprobs: list[float]
    ended: str = UNFINISHED

    @classmethod
    def of(cls, response: Response) -> PartialResponse:
        return cls(list(response.token_ids), list(response.logprobs), response.finish_reason)

    def add(self, completion: Any) -> None:
        """The new tokens of one engine step."""
        if completion.token_ids:
            assert list(completion.logprobs.token_ids) == list(completion.token_ids), (
                "vLLM's first log-prob is that of the sampled token"
            )
            self.ids += completion.token_ids
            self.logprobs += completion.logprobs.logprobs
        self.ended = completion.finish_reason or UNFINISHED


class AttachedEngine(base.WorkerEngine):
    """Reaches our worker extension in a foreign engine through one function.

    Some loops put their engine to sleep and throw its weights away, so the last heads are kept in a
    file of ours, from which `feed_again` restores them.
    """

    def __init__(
        self,
        call: Call,
        kept_state: str | Path,
        *,
        counters: Callable[[], Counters] = Counters,
        forget_prompts: Callable[[], object] | None = None,
        drafting: Drafting | None = None,
    ) -> None:
        """
        Args:
            call: (method, arguments) -> every worker's answer, e.g. of `LLM.collective_rpc`.
            kept_state: state file (heads.checkpoint.save_state) of the heads that the engine
                started with; swaps overwrite it.
            counters: vLLM's acceptance counters since the engine started.
            forget_prompts: resets the prefix cache; only `sync_actor` needs it.
            drafting: its initial configuration; default: one draft per head.

        Raises:
            UnsupportedVersionError: our plugin is not active in a worker.
            EngineError: the engine does not draft with native heads.
        """
        self._workers_call = call
        self._kept_state = Path(kept_state)
        self._counters = counters
        self._reset_prompts = forget_prompts
        self._take_stock(drafting or {})
        self._kept_version = self.heads_version

    def generate(self, prompts: base.Prompts, sampling: Sampling) -> Rollouts:
        raise EngineError(
            "This engine belongs to another loop, which does its own generating.",
            given="generate()",
            expected="swaps and counters",
            do="Generate through the loop.",
        )

    def swap_heads(
        self, path: str | Path, version: int, checked: Checked | None = None
    ) -> SwapReceipt:
        receipt = super().swap_heads(path, version, checked)
        fresh = self._kept_state.with_suffix(".new")
        try:
            shutil.copyfile(path, fresh)
            # Kept by a rename: if this is interrupted, the previous heads are still there.
            fresh.replace(self._kept_state)
        except OSError as error:  # No room. The engine has them all the same.
            fresh.unlink(missing_ok=True)
            logger.warning(
                "The engine has heads version %d, but they could not be kept: after a sleep in"
                " which it loses them it gets version %d. %s",
                version,
                self._kept_version,
                error,
            )
        else:
            self._kept_version = version
        return receipt

    def feed_again(self) -> SwapReceipt:
        """Reinstall the heads that the engine had before its loop threw them away."""
        if not self._kept_state.is_file():
            raise SwapError(
                "The last installed heads are gone.",
                given=str(self._kept_state),
                expected="a state file",
                do="Leave the run's folder alone while it is running.",
            )
        return super().swap_heads(self._kept_state, self._kept_version)

    def _forget_prompts(self) -> bool:
        return self._reset_prompts is None or self._reset_prompts() is not False

    def counters(self) -> Counters:
        return self._counters()

    def close(self) -> None:
        """Does nothing: the engine belongs to its loop."""

    def _call(self, method: str, *args: Any) -> dict[str, Any]:
        return first_of(self._workers_call(method, args))


def _start(plan: LaunchPlan) -> LLM:
    require_room(plan.engine_args, plan.parts, os.environ)
    for name, value in ENVIRONMENT.items():
        # Before importing vLLM, which sets up its logging.
        os.environ.setdefault(name, value)
    os.environ.update(plan.environment | kernels_environment())
    with _engine_errors("starting"):
        from vllm import LLM

        return LLM(**plan.engine_args)


@contextlib.contextmanager
def _engine_errors(doing: str) -> Iterator[None]:
    """Turn vLLM's failures into EngineError; our own errors pass through."""
    try:
        yield
    except MedusaError:
        raise
    except Exception as error:
        raise EngineError(
            f"vLLM failed while {doing}.",
            given=f"{type(error).__name__}: {error}",
            expected="a running engine",
            do="Read vLLM's message above.",
        ) from error


def _request(prompt: Sequence[int]) -> dict[str, Any]:
    """A prompt as vLLM takes it: images next to the ids, each a single token, whose features vLLM
    computes itself.
    """
    if not isinstance(prompt, ImagePrompt):
        return {"prompt_token_ids": list(prompt)}
    return {
        "prompt_token_ids": list(prompt.short_ids),
        "multi_modal_data": {"image": [open_image(image) for image in prompt.images]},
    }


def _check_images(prompts: base.Prompts, read: Sequence[Sequence[int] | None]) -> None:
    """Raise EngineError if vLLM gave an image a different number of tokens than the trainer did."""
    for prompt, ids in zip(prompts, read, strict=True):
        if isinstance(prompt, ImagePrompt) and list(ids or ()) != list(prompt):
            raise EngineError(
                "The engine reads a prompt's images differently from the trainer.",
                given=f"{len(ids or ())} tokens",
                expected=f"{len(prompt)} tokens",
                do=(
                    "Leave mm_processor_kwargs out of engine.extra; the model's "
                    "preprocessor_config.json sets the size of images."
                ),
            )


def _response(prompt_index: int, completion: Any) -> Response:
    logprobs = completion.logprobs
    assert list(logprobs.token_ids) == list(completion.token_ids), (
        "vLLM's first log-prob is that of the sampled token"
    )
    return base.checked_response(
        prompt_index, completion.token_ids, logprobs.logprobs, completion.finish_reason
    )


def process_counters() -> Counters:
    """vLLM's acceptance counters of the engine in this process, however it was started."""
    from vllm.v1.metrics.reader import get_metrics_snapshot

    return read_counters(get_metrics_snapshot())


def read_counters(metrics: Any) -> Counters:
    """Counters from `LLM.get_metrics()`."""
    values = {m.name.removeprefix(COUNTER): m for m in metrics if m.name.startswith(COUNTER)}
    if "drafts" not in values:
        raise EngineError(
            "vLLM reports no acceptance counters.",
            given=sorted(values),
            expected=f"{COUNTER}drafts",
            do="Leave disable_log_stats alone.",
        )
    return Counters(
        int(values["drafts"].value),
        int(values["draft_tokens"].value),
        int(values["accepted_tokens"].value),
        tuple(int(v) for v in values["accepted_tokens_per_pos"].values),
    )
