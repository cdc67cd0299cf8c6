"""When steps are scheduled ahead, and how many drafts they get. (That it samples the same tokens is
shown with an engine: test_speculator.py.)
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from heads.errors import ConfigError

pytest.importorskip("vllm")
pytest.importorskip("vllm.v1.core.sched.async_scheduler")

from medusa_ppo.vllm_plugin import asynchronous


def settled(
    monkeypatch: pytest.MonkeyPatch,
    asked: bool | None,
    *,
    heads: str = "heads",
    runner: str = "v2",
    cpu: bool = False,
    replicas: int = 1,
    launcher: str = "mp",
) -> bool | None:
    """What a configuration has in the end, if vLLM itself allows nothing but False."""
    monkeypatch.setattr(asynchronous, "heads_folder", lambda config: heads)
    monkeypatch.setattr(asynchronous, "current_platform", SimpleNamespace(is_cpu=lambda: cpu))
    executor = SimpleNamespace(supports_async_scheduling=lambda: True)
    monkeypatch.setattr(
        asynchronous, "Executor", SimpleNamespace(get_class=lambda config: executor)
    )
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(async_scheduling=asked),
        parallel_config=SimpleNamespace(
            data_parallel_size=replicas, distributed_executor_backend=launcher, world_size=2
        ),
        use_v2_model_runner=runner == "v2",
    )

    def original(self: Any) -> None:
        assert not (heads and self.scheduler_config.async_scheduling), "vLLM would refuse it"
        self.made = True

    asynchronous.with_steps_scheduled_ahead(original)(config)
    assert config.made
    return config.scheduler_config.async_scheduling


@pytest.mark.parametrize("asked", [None, True, False])
def test_v2_schedules_ahead_unless_somebody_says_no(
    asked: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert settled(monkeypatch, asked) is (asked is not False)
    assert settled(monkeypatch, asked, cpu=True) is (asked is True), "a CPU waits for nothing"
    assert settled(monkeypatch, asked, heads="") is asked, "vLLM's own business"


@pytest.mark.parametrize(
    "where", [{"runner": "v1"}, {"replicas": 2}, {"launcher": "external_launcher"}]
)
def test_elsewhere_it_does_not_and_says_so_if_asked(
    where: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert settled(monkeypatch, None, **where) is False
    with pytest.raises(ConfigError, match="async_scheduling can't be combined") as caught:
        settled(monkeypatch, True, **where)
    assert "Leave it out" in str(caught.value)


def test_the_speculators_number_reaches_the_steps_that_are_scheduled_later() -> None:
    """By a step's output, which is there later than the call that promises it."""
    scheduled = []
    schedule = asynchronous.with_number_of_drafts_as_asked(
        lambda self, output: scheduled.append(output.num_spec_tokens_to_schedule)
    )
    take = asynchronous.with_number_of_drafts_read(lambda self, scheduled, output: output.tokens)
    output = SimpleNamespace(tokens=[7])
    sample = asynchronous.with_number_of_drafts_told(lambda self: SimpleNamespace(
        model_runner_output=output
    ))  # fmt: skip
    scheduler = SimpleNamespace(num_spec_tokens=4)
    runner = SimpleNamespace(speculator=SimpleNamespace(asked=None))

    def step(most: int = 4) -> None:
        schedule(scheduler, SimpleNamespace(num_spec_tokens_to_schedule=most))
        assert sample(runner).model_runner_output is output
        assert take(scheduler, None, output) == [7]

    step()
    for asked in (2, 0, 9):
        runner.speculator.asked = asked
        step()
    step()
    step(most=1)
    assert scheduled == [4, 4, 2, 0, 4, 1], "at most as many as there are heads, and as vLLM wants"
    assert asynchronous.with_number_of_drafts_told(lambda self: None)(runner) is None
    without = SimpleNamespace(speculator=None)
    assert sample(without).model_runner_output is output
