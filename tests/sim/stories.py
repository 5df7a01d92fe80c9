"""Where to look for planted bugs."""

from __future__ import annotations

FIRST = {
    "skip_the_duplicate_check": 20,
    "acknowledge_a_duplicate_before_the_tail_has_it": 17,
    "report_level_before_the_joiner_has_what_was_acknowledged": 6,
    "forget_to_resync_after_a_reconnect": 6,
    "accept_words_from_before_the_chain_changed": 117,
    "accept_a_step_beyond_the_next": 91,
    "accept_pushes_of_old_epochs": 21,
    "resume_a_worker_from_uncommitted_clocks": 7,
    "give_up_the_last_replica_under_a_living_lease": 14,
    "show_at_a_tail_what_its_level_joiner_lacks": 20,
    "keep_no_log_for_a_joiner_that_counts": 14,
    "tell_only_one_leader_who_is_level": 14,
    "move_more_than_must": 54,
    "count_only_workers_that_have_pushed": 7,
    "wait_for_workers_that_pause": 33,
    "wait_for_workers_that_are_gone": 6,
}
"""Seeds that are tried first, before all others: stories that have found a bug soon."""
