"""What test_speculator.py checks, with heads that copy, and with steps that are scheduled ahead."""

from __future__ import annotations

from tests.medusa_ppo.vllm_plugin.test_speculator import (
    pytestmark,  # noqa: F401
    seen_with,
    test_a_memory_has_what_was_written_and_learns_from_it,  # noqa: F401
    test_a_recorded_drafting_call_is_used_again_and_draws_the_same,  # noqa: F401
    test_greedy_tokens_are_the_models_own_whatever_is_drafted,  # noqa: F401
    test_it_drafts_what_v1_drafts,  # noqa: F401
    test_it_is_v2_that_runs,  # noqa: F401
    test_it_takes_versions_from_a_feed_while_requests_run,  # noqa: F401
    test_rows_of_q_made_as_they_are_read_are_a_whole_table_to_the_kernels,  # noqa: F401
    test_sampled_tokens_have_the_models_distribution,  # noqa: F401
    test_steps_are_scheduled_ahead_where_that_is_asked_for,  # noqa: F401
    test_swaps_and_syncs_reach_what_drafts_and_what_samples,  # noqa: F401
    test_the_number_of_drafts_is_chosen_from_steps_that_were_timed,  # noqa: F401
    test_when_steps_are_scheduled_changes_no_token,  # noqa: F401
)

seen = seen_with("copying", "ahead")
