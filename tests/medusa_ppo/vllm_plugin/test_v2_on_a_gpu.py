"""vLLM's V2 model runner with our speculator on a GPU, where its kernels are compiled: what
test_speculator.py checks, except that V1's kernels round differently there.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.medusa_ppo.vllm_plugin import test_speculator as by_interpreter
from tests.medusa_ppo.vllm_plugin.test_speculator import FORMS, seen_with

pytestmark = [
    pytest.mark.engine,
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
]


seen = seen_with(*FORMS)


def test_v2_serves(seen: dict[str, Any]) -> None:
    by_interpreter.test_it_is_v2_that_runs(seen)
    by_interpreter.test_steps_are_scheduled_ahead_where_that_is_asked_for(seen)
    by_interpreter.test_greedy_tokens_are_the_models_own_whatever_is_drafted(seen)
    by_interpreter.test_when_steps_are_scheduled_changes_no_token(seen)
    for name, accepted in by_interpreter.LEAST_ACCEPTED.items():
        if name in seen:
            by_interpreter.test_sampled_tokens_have_the_models_distribution(seen, name, accepted)
    by_interpreter.test_swaps_and_syncs_reach_what_drafts_and_what_samples(seen)
    by_interpreter.test_rows_of_q_made_as_they_are_read_are_a_whole_table_to_the_kernels(seen)
    if seen["copies"]:
        by_interpreter.test_a_memory_has_what_was_written_and_learns_from_it(seen)
    by_interpreter.test_the_number_of_drafts_is_chosen_from_steps_that_were_timed(seen)
    by_interpreter.test_it_takes_versions_from_a_feed_while_requests_run(seen)
