"""vLLM's asynchronous scheduling with our heads, on the V2 runner: while the GPU computes a step,
the next one is scheduled and its work is queued. vLLM turns this off for methods of drafting that
it does not know.

The scheduler then can't wait for drafts, so it decides how many the next step will verify before
they are made, and tells the speculator. What the speculator would rather have comes back with the
outputs of its steps, and applies from the next step on that is scheduled after that.

Imported only if V2 is used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import vllm.v1.worker.gpu.model_runner as v2_runner
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.executor.abstract import Executor

from medusa_ppo.vllm_plugin.speculation import (
    has_separate_ranks,
    heads_folder,
    not_with_heads,
)

DRAFTS = "medusa_drafts"
"""Attribute of a step's output and of the scheduler: the number of drafts that the speculator wants
for later steps.
"""


def with_steps_scheduled_ahead(original: Callable[..., None]) -> Callable[..., None]:
    """`VllmConfig.__post_init__`, which allows asynchronous scheduling for a list of methods."""

    @functools.wraps(original)
    def __post_init__(self: Any, *args: Any, **kwargs: Any) -> None:
        scheduling = self.scheduler_config
        asked = scheduling.async_scheduling
        ours = bool(heads_folder(self)) and asked is not False
        if ours:
            # vLLM would refuse True, and warn of None.
            scheduling.async_scheduling = False
        original(self, *args, **kwargs)
        if not ours:
            return
        if reason := _why_not(self):
            if asked:
                raise not_with_heads("async_scheduling", True, False, reason)
            return
        # On a CPU there is nothing to wait for; vLLM turns it off there.
        scheduling.async_scheduling = bool(asked) or not current_platform.is_cpu()

    return __post_init__


def _why_not(vllm_config: Any) -> str:
    """What to do instead of asynchronous scheduling; empty if it is possible."""
    if not vllm_config.use_v2_model_runner:
        return "Leave it out, or use vLLM's V2 model runner."
    if vllm_config.parallel_config.data_parallel_size > 1:
        return "Leave it out: it was not tested with data parallelism."
    if has_separate_ranks(vllm_config):
        # Each would follow the number of drafts that its own rank wants.
        return "Leave it out: each rank schedules its own steps here."
    if not Executor.get_class(vllm_config).supports_async_scheduling():
        return "Leave it out, or use vLLM's own executors."
    return ""


def with_number_of_drafts_as_asked(original: Callable[..., None]) -> Callable[..., None]:
    """`AsyncScheduler._update_after_schedule`, which makes room for the drafts of the next step."""

    @functools.wraps(original)
    def _update_after_schedule(self: Any, scheduler_output: Any) -> None:
        asked = getattr(self, DRAFTS, None)
        if asked is not None:
            # vLLM may want fewer for so many requests.
            most = scheduler_output.num_spec_tokens_to_schedule
            scheduler_output.num_spec_tokens_to_schedule = min(asked, most)
        original(self, scheduler_output)

    return _update_after_schedule


def with_number_of_drafts_read(original: Callable[..., Any]) -> Callable[..., Any]:
    """`Scheduler.update_from_output`: called with the output of each step."""

    @functools.wraps(original)
    def update_from_output(
        self: Any, scheduler_output: Any, model_runner_output: Any, *args: Any, **kwargs: Any
    ) -> Any:
        asked = getattr(model_runner_output, DRAFTS, None)
        if asked is not None:
            setattr(self, DRAFTS, asked)
        return original(self, scheduler_output, model_runner_output, *args, **kwargs)

    return update_from_output


def with_number_of_drafts_told(original: Callable[..., Any]) -> Callable[..., Any]:
    """`GPUModelRunner.sample_tokens`: its output, or the one that will be there later, also tells
    how many drafts the speculator wants (`MedusaSpeculator.asked`).
    """

    @functools.wraps(original)
    def sample_tokens(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(self, *args, **kwargs)
        asked = getattr(self.speculator, "asked", None)
        if asked is not None and found is not None:
            setattr(getattr(found, "model_runner_output", found), DRAFTS, asked)
        return found

    return sample_tokens


PLACES: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
    (VllmConfig, "__post_init__", with_steps_scheduled_ahead),
    (AsyncScheduler, "_update_after_schedule", with_number_of_drafts_as_asked),
    (Scheduler, "update_from_output", with_number_of_drafts_read),
    (v2_runner.GPUModelRunner, "sample_tokens", with_number_of_drafts_told),
)
