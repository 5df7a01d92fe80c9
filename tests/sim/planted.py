"""All planted bugs, and the stories that have to find them.

`python -m tests.sim.planted [NAME…]` looks for a story for each (`make soak`); with `--cheapest`, for a cheap one to be
written down here.
"""

from __future__ import annotations

import sys

import pytest

from chaos.sim.run import Result, run
from chaos.sim.story import Kind, tell
from tests.sim import planted_announcements as announced
from tests.sim import planted_caches as caches
from tests.sim import planted_chain as chain
from tests.sim import planted_connections as connections
from tests.sim import planted_cuts as cuts
from tests.sim import planted_delay as delay
from tests.sim import planted_differences as changes
from tests.sim import planted_dropped_tables as drops
from tests.sim import planted_growth as growth
from tests.sim import planted_growth_checkpoints as checkpoints
from tests.sim import planted_push_pull as together
from tests.sim import planted_ranges as ranges
from tests.sim import planted_readers as readers
from tests.sim import planted_retained_copies as retained
from tests.sim import planted_rounds as rounds
from tests.sim import planted_shell as shell
from tests.sim import planted_short_keys as short
from tests.sim import planted_sparse_ticks as sparse
from tests.sim import planted_view_hints as hints
from tests.sim.planting import Patch
from tests.sim.story_cost import expected_events

MODULES = (
    announced,
    caches,
    chain,
    changes,
    checkpoints,
    connections,
    cuts,
    delay,
    drops,
    growth,
    together,
    ranges,
    readers,
    retained,
    rounds,
    shell,
    short,
    hints,
    sparse,
)
"""Every function of these that has no underscore before its name plants a bug."""
STORIES = 50
"""How many stories of its kind are played at most to find a bug: one that none of them finds survives."""

# What has to go wrong for a bug to show, in what kind of training, and a cheap story of that kind that finds it.
PLANTED: dict[Patch, tuple[str, str, int]] = {
    chain.skip_the_duplicate_check: ("levels", "free", 5),
    chain.acknowledge_a_duplicate_before_the_tail_has_it: ("limps", "free", 20),
    chain.acknowledge_before_the_tail: ("limps", "free", 0),
    chain.report_level_before_acknowledgements_wait: ("moves", "free", 3),
    chain.report_level_before_the_joiner_has_what_was_acknowledged: ("levels", "free", 13),
    chain.forget_to_resync_after_a_reconnect: ("flaps", "free", 46),
    chain.forget_to_resync_after_a_view: ("kills", "free", 41),
    chain.promote_a_half_filled_replica: ("moves", "free", 1),
    chain.accept_an_old_neighbour: ("moves", "free", 45),
    chain.resume_a_worker_from_uncommitted_clocks: ("heirs", "free", 0),
    chain.free_steps_that_are_applied_but_not_committed: ("limps", "free", 21),
    chain.give_up_the_last_replica_under_a_living_lease: ("alone", "free", 11),
    chain.send_what_the_caller_s_arrays_hold_later: ("flaps", "free", 46),
    chain.accept_pushes_of_old_epochs: ("moves", "free", 2),
    chain.apply_outside_the_intervals_received: ("moves", "rounds", 0),
    chain.leave_the_vector_clocks_out_of_a_snapshot: ("kills", "free", 21),
    chain.forget_what_followers_know_of_clocks: ("kills", "free", 21),
    chain.write_views_without_comparing: ("terms", "free", 1),
    chain.drop_the_log_of_a_middle_replica: ("takers", "free", 2),
    chain.drop_a_level_joiner_over_a_lost_link: ("levels", "free", 3),
    chain.fence_nobody_and_share_clocks: ("calm", "free", 0),
    chain.answer_a_pull_before_its_worker_s_pushes_are_applied: ("calm", "free", 0),
    chain.show_at_a_tail_what_its_level_joiner_lacks: ("levels", "free", 0),
    chain.read_at_heads_what_may_not_last: ("limps", "free", 18),
    chain.let_a_stale_tail_answer_for_a_view_it_has_not_seen: ("partitions", "free", 0),
    chain.leave_out_parts_that_have_rows_for_a_head: ("kills", "free", 0),
    chain.keep_only_pushes_for_a_new_successor: ("kills", "free", 2),
    chain.keep_no_log_for_a_joiner_that_counts: ("kills", "free", 38),
    chain.fence_nobody: ("ghosts", "free", 3),
    chain.let_every_replica_report_the_joiner_level: ("moves", "free", 1),
    chain.tell_only_one_leader_who_is_level: ("levels", "free", 21),
    chain.give_ranges_to_servers_that_drain: ("exodus", "free", 41),
    chain.end_on_the_request_to_drain: ("drains", "free", 0),
    chain.count_copies_at_servers_that_drain: ("hurried", "free", 5),
    chain.move_more_than_must: ("moves", "free", 1),
    connections.close_links_with_steps_outstanding: ("limps", "free", 17),
    connections.tell_a_server_that_is_connected_later_nothing: ("calm", "free", 15),
    delay.wait_for_one_step_less: ("calm", "bounded", 5),
    delay.forget_workers_that_have_joined: ("calm", "bounded", 2),
    delay.begin_where_the_fastest_worker_is: ("kills", "bounded", 22),
    delay.wait_for_workers_that_pause: ("calm", "bounded", 30),
    delay.wait_for_workers_that_are_gone: ("ghosts", "bounded", 0),
    delay.leave_out_workers_without_a_connection: ("flaps", "bounded", 9),
    delay.start_below_what_is_released: ("calm", "bounded", 1),
    readers.note_no_deletions: ("calm", "free", 19),
    readers.show_a_push_that_is_not_committed: ("levels", "free", 11),
    readers.go_on_from_a_mark_that_is_too_new: ("kills", "free", 0),
    readers.ignore_the_answer_to_an_older_subscription: ("takers", "free", 0),
    readers.take_any_states_for_a_moment: ("calm", "free", 27),
    readers.take_sparse_steps_for_missing_ones_of_home_alone: ("calm", "free", 24),
    readers.go_on_where_a_reader_was_too_slow: ("moves", "free", 2),
    readers.show_other_rows_while_it_holds: ("calm", "free", 0),
    readers.forget_the_rows_of_a_part_that_is_read: ("calm", "free", 0),
    readers.apply_a_window_after_a_newer_one: ("kills", "free", 21),
    retained.acknowledge_before_the_one_left_is_confirmed: ("suspicions", "free", 36),
    retained.drop_the_copy_that_is_to_be_kept: ("suspicions", "free", 0),
    retained.go_on_with_what_nobody_else_has: ("outcasts", "free", 2),
    retained.confirm_at_once: ("suspicions", "free", 1),
    retained.confirm_whom_nobody_has_heard: ("suspicions", "free", 1),
    retained.forget_kept_copies_at_an_election: ("suspicions", "free", 0),
    retained.keep_no_copy: ("suspicions", "free", 0),
    retained.keep_no_copy_behind_one_that_takes_over: ("takers", "free", 32),
    rounds.decide_again_after_the_head_of_the_home_range_moved: ("moves", "rounds", 48),
    rounds.wait_for_workers_that_died: ("ghosts", "rounds", 0),
    rounds.go_on_without_those_who_are_late: ("calm", "rounds", 0),
    rounds.apply_a_share_at_once: ("calm", "rounds", 0),
    rounds.close_a_round_twice: ("kills", "rounds", 12),
    rounds.average_in_the_order_of_arrival: ("calm", "rounds", 0),
    rounds.average_over_those_who_have_the_key_s_range: ("calm", "rounds", 0),
    rounds.average_all_that_is_kept: ("ghosts", "rounds", 37),
    rounds.drop_the_first_part_of_a_share: ("calm", "rounds", 0),
    rounds.fill_a_joiner_without_the_rounds: ("kills", "rounds", 26),
    rounds.fill_a_joiner_without_what_is_kept: ("kills", "rounds", 26),
    rounds.fill_a_joiner_of_the_home_range_without_its_state: ("moves", "rounds", 48),
    rounds.ignore_that_a_worker_leaves: ("calm", "shards in rounds", 2),
    rounds.count_a_worker_from_the_round_under_way: ("ghosts", "rounds", 1),
    rounds.forget_the_last_round_of_a_predecessor: ("ghosts", "shards in rounds", 33),
    rounds.count_answers_of_different_views_together: ("moves", "rounds", 21),
    rounds.settle_a_step_that_is_not_committed: ("calm", "rounds", 11),
    rounds.give_back_a_shard_whose_step_is_committed: ("ghosts", "shards", 1),
    rounds.keep_the_shards_of_workers_that_died: ("ghosts", "shards", 0),
    rounds.lose_the_shards_of_workers_that_died: ("ghosts", "shards", 0),
    rounds.take_for_lost_who_only_waits: ("calm", "shards", 42),
    rounds.fill_a_joiner_without_the_shards: ("drains", "shards", 0),
    rounds.forget_which_step_used_a_shard: ("ghosts", "shards", 0),
    rounds.note_only_at_the_head_which_step_used_a_shard: ("kills", "shards", 0),
    rounds.believe_one_head_that_a_step_is_committed: ("ghosts", "shards", 10),
    rounds.train_again_whatever_a_lost_worker_had: ("ghosts", "shards", 1),
    rounds.take_a_share_that_arrived_for_a_round_that_was_made: ("ghosts", "shards in rounds", 1),
    rounds.end_when_nothing_is_left_to_hand_out: ("calm", "shards", 42),
    rounds.hand_out_to_the_next_without_taking_from_the_last: ("ghosts", "shards", 0),
    announced.answer_workers_before_all_heads_have_closed_their_round: ("calm", "rounds", 12),
    announced.take_what_an_earlier_head_decided_for_closed: ("kills", "rounds", 5),
    announced.announce_nothing_again_under_a_new_view: ("kills", "rounds", 23),
    announced.believe_that_a_new_connection_knows_the_last_workers: ("resets", "rounds", 31),
    announced.average_over_those_who_pushed_to_this_server: ("calm", "rounds", 25),
    shell.keep_the_keys_of_a_pull_as_a_view_of_a_buffer_that_is_used_again: ("flaps", "free", 1),
    shell.gather_the_next_chunk_over_one_that_is_not_out_yet: ("kills", "free", 0),
    shell.use_memory_again_that_python_or_a_socket_refers_to: ("flaps", "free", 1),
    shell.receive_over_what_the_log_keeps: ("kills", "free", 47),
    shell.take_pushes_of_epochs_whose_heads_have_changed: ("moves", "free", 2),
    shell.acknowledge_recent_entries_while_python_has_older_ones: ("moves", "free", 0),
    shell.drop_the_rest_of_a_partial_write: ("flaps", "free", 2),
    shell.answer_whoever_has_the_number_of_a_connection_now: ("flaps", "free", 37),
    shell.leave_a_worker_unread_that_reads_again: ("readers", "free", 6),
    shell.apply_a_snapshot_chunk_again_after_a_reset: ("moves", "free", 1),
    shell.forget_to_read_on_when_answers_have_left: ("levels", "free", 1),
    shell.send_what_was_left_of_a_connection_on_the_next: ("flaps", "free", 6),
    shell.let_a_frame_between_replicas_be_no_larger_than_a_worker_s: ("tight", "free", 22),
    shell.reply_before_the_log_holds_the_entry: ("limps", "free", 0),
    shell.serve_pulls_of_any_epoch: ("moves", "free", 10),
    shell.look_at_an_answer_that_must_wait: ("levels", "free", 5),
    shell.let_a_view_that_comes_late_count_again: ("mixed", "free", 22),
    cuts.hold_before_the_last_step_is_committed: ("partitions", "free", 5),
    cuts.push_on_while_held: ("calm", "free", 3),
    cuts.go_on_at_the_release_of_an_older_cut: ("calm", "free", 3),
    cuts.log_a_cut_again_where_it_was_asked_for_again: ("moves", "free", 0),
    cuts.forget_the_cut_of_a_range_that_moves: ("moves", "free", 1),
    cuts.forward_a_cut_out_of_order: ("calm", "free", 3),
    cuts.tell_nobody_who_comes_later: ("ghosts", "free", 3),
    cuts.log_where_workers_have_gone_on: ("calm", "free", 0),
    cuts.wait_for_no_workers: ("partitions", "free", 4),
    cuts.judge_but_one_range: ("calm", "free", 3),
    cuts.take_a_worker_that_was_left_out_for_whole: ("ghosts", "free", 49),
    short.name_lists_that_went_with_a_connection: ("flaps", "free", 46),
    short.name_lists_that_others_were_written_over: ("calm", "free", 0),
    short.keep_lists_of_all_connections_in_one_place: ("calm", "free", 0),
    caches.show_rows_of_any_age: ("calm", "free", 13),
    caches.keep_rows_that_were_pushed_to_on_their_way: ("readers", "free", 2),
    caches.keep_rows_that_were_asked_for_in_an_open_step: ("readers", "free", 19),
    caches.take_rows_as_they_are_for_what_was_asked: ("calm", "free", 0),
    hints.believe_a_server_that_the_store_does_not_bear_out: ("calm", "free", 0),
    together.ask_as_if_nothing_had_been_pushed: ("calm", "free", 0),
    cuts.take_an_open_round_for_a_closed_one: ("calm", "rounds", 35),
    sparse.tick_only_what_the_last_part_touches: ("kills", "free", 0),
    sparse.commit_where_home_has_it: ("flaps", "free", 0),
    sparse.let_a_step_end_without_its_home: ("kills", "free", 21),
    sparse.claim_all_steps_before_as_committed: ("heirs", "free", 15),
    sparse.withhold_records_of_steps_that_are_not_committed: ("heirs", "free", 22),
    sparse.lose_records_on_the_way_down_a_chain: ("moves", "free", 1),
    sparse.take_for_trained_what_home_has: ("heirs", "free", 2),
    sparse.take_sparse_steps_for_dense: ("heirs", "free", 0),
    sparse.believe_home_that_a_shard_is_trained: ("ghosts", "shards", 2),
    sparse.tell_nobody_who_trains_a_shard: ("ghosts", "shards", 0),
    sparse.answer_pulls_before_named_steps_are_applied: ("kills", "free", 0),
    sparse.name_only_the_newest_step_to_wait_for: ("readers", "free", 37),
    sparse.read_prev_at_the_resend: ("kills", "free", 5),
    growth.stamp_by_each_replica_s_own_clock: ("calm", "free", 19),
    growth.let_time_go_back_after_a_failover: ("kills", "free", 11),
    growth.sweep_by_the_later_of_two_clocks: ("calm", "free", 4),
    growth.log_the_later_of_two_clocks: ("calm", "free", 4),
    growth.lose_counts_in_a_move: ("moves", "free", 3),
    growth.leave_candidates_out_of_a_piece: ("moves", "free", 3),
    growth.move_a_range_without_its_policies: ("moves", "free", 3),
    growth.sweep_twice_at_followers_with_other_numbers: ("calm", "free", 31),
    growth.keep_candidates_when_a_table_is_cleared: ("calm", "free", 3),
    growth.keep_candidates_whose_rows_are_deleted: ("calm", "free", 3),
    growth.lose_scores_in_a_move: ("moves", "free", 27),
    growth.give_every_key_a_row: ("calm", "free", 3),
    growth.decide_by_chance_at_each_replica: ("calm", "free", 19),
    growth.count_loads_as_pushes: ("calm", "free", 31),
    checkpoints.write_an_increment_without_its_sweeps: ("calm", "free", 24),
    checkpoints.note_a_sweep_under_the_cut_before: ("calm", "free", 18),
    checkpoints.note_no_sweep_of_a_part_of_a_range: ("calm", "free", 4),
    checkpoints.fill_a_joiner_without_the_sweeps: ("moves", "free", 7),
    checkpoints.write_waiting_keys_only_into_full_checkpoints: ("calm", "free", 3),
    checkpoints.write_the_time_of_another_range: ("calm", "free", 3),
}


# Bugs that no story shows: peers that are as they should be never come to where they are, or too much has to go wrong
# at once (one calm story in 200 shows `tell_nobody_that_a_round_has_begun`). The test of one part that finds each,
# by its module.
ALONE: dict[Patch, tuple[str, str]] = {
    readers.digest_keys_without_their_rows: (
        "readers.test_cells",
        "test_one_row_in_a_hundred_costs_a_small_part_of_all",
    ),
    readers.forget_the_rows_that_are_the_same: (
        "readers.test_cells",
        "test_one_row_in_a_hundred_costs_a_small_part_of_all",
    ),
    readers.send_progress_of_those_who_were_there_first: (
        "server.test_sent_state",
        "test_a_worker_that_joins_later_is_heard_of",
    ),
    readers.leave_rows_of_tables_that_an_answer_leaves_out: (
        "readers.test_reading_ranges",
        "test_of_tables_that_an_answer_leaves_out_nothing_is_there",
    ),
    readers.empty_tables_that_a_server_has_not_listed: (
        "readers.test_reading_ranges",
        "test_tables_that_a_server_has_not_listed_stay_as_they_are",
    ),
    readers.go_on_behind_a_table_that_was_read_in_part: (
        "readers.test_reading_ranges",
        "test_a_table_that_goes_while_it_is_read_leaves_nothing",
    ),
    readers.send_a_reader_all_shares: ("readers.test_cells", "test_a_share_gets_the_rows_of_its_keys"),
    chain.accept_a_step_beyond_the_next: (
        "replication.test_replica",
        "test_parts_must_come_in_order_and_a_gap_changes_nothing",
    ),
    chain.accept_words_from_before_the_chain_changed: (
        "replication.test_replica",
        "test_messages_of_a_neighbour_from_before_its_refilling_are_ignored",
    ),
    connections.connect_to_no_head_that_a_step_goes_to: (
        "client.test_standing_connections",
        "test_a_push_has_the_heads_connected_that_it_goes_to_and_no_others",
    ),
    connections.stay_with_the_head_that_a_home_had: (
        "client.test_standing_connections",
        "test_who_heads_its_home_now_is_connected",
    ),
    connections.fence_a_predecessor_only_where_ranges_are_headed: (
        "client.test_standing_connections",
        "test_a_predecessor_is_fenced_by_whoever_has_or_gets_a_copy",
    ),
    connections.tell_workers_of_a_view_only_where_ranges_come: (
        "server.test_views_for_workers",
        "test_workers_hear_of_ranges_that_come_and_go_and_of_those_that_came_back_from_a_checkpoint",
    ),
    connections.believe_a_server_that_has_not_heard_of_an_open_round: (
        "client.test_checkpoint_hold",
        "test_a_worker_that_has_to_push_to_a_round_says_so_to_servers_that_have_not_heard_of_it",
    ),
    connections.tell_nobody_who_comes_later_of_the_release: (
        "server.test_cut",
        "test_workers_that_connect_after_a_release_hear_of_it",
    ),
    delay.report_steps_that_are_not_committed: (
        "client.test_delay",
        "test_a_report_that_is_due_is_made_once_when_that_clock_is_committed",
    ),
    delay.ask_nobody_twice: (
        "server.test_delay_coordinator",
        "test_a_pull_waits_until_all_have_committed_what_it_needs",
    ),
    delay.ask_nobody_who_connects_again: (
        "server.test_delay_coordinator",
        "test_one_that_is_not_connected_is_waited_for_and_asked_when_it_is",
    ),
    delay.release_without_a_proof: (
        "server.test_delay_coordinator",
        "test_a_rise_is_told_when_the_head_has_proved_that_it_is_one",
    ),
    delay.begin_with_an_older_roster: (
        "server.test_delay_coordinator",
        "test_a_head_with_an_older_roster_does_not_begin",
    ),
    delay.pull_under_an_older_view: (
        "client.test_delay",
        "test_a_pull_is_made_under_a_view_as_new_as_those_of_what_is_released",
    ),
    cuts.note_what_was_let_in_behind_the_cut: (
        "replication.test_full_links",
        "test_no_push_is_admitted_after_a_cut_before_the_cut_is_applied",
    ),
    cuts.tell_nobody_that_a_round_has_begun: (
        "server.test_cut",
        "test_an_open_round_delays_only_workers_of_its_application",
    ),
    drops.log_what_waited_behind_the_end_of_its_table: (
        "server.test_waiting_pushes",
        "test_rows_of_a_push_that_waited_while_their_table_was_dropped_are_refused",
    ),
    sparse.forget_progress_with_the_view: (
        "client.test_session_twin",
        "test_every_part_is_once_in_its_ranges_and_what_is_reported_is_there",
    ),
    sparse.send_all_ranges_the_first_one_s_prev: (
        "client.test_session_twin",
        "test_every_part_is_once_in_its_ranges_and_what_is_reported_is_there",
    ),
    sparse.take_a_gap_for_a_duplicate: (
        "replication.test_replica",
        "test_parts_must_come_in_order_and_a_gap_changes_nothing",
    ),
    sparse.move_a_home_without_its_records: (
        "replication.test_step_records",
        "test_records_of_a_home_go_with_its_range_and_no_others",
    ),
    announced.announce_a_decision_before_it_is_committed: (
        "server.test_announced_rounds",
        "test_workers_hear_of_a_round_when_every_head_has_closed_it",
    ),
    changes.apply_a_difference_to_whatever_view_there_is: (
        "coordinator.test_differences",
        "test_another_base_is_a_gap_even_of_the_same_epoch",
    ),
    changes.check_no_digest: (
        "coordinator.test_differences",
        "test_a_result_with_another_digest_is_a_gap",
    ),
    changes.take_a_notice_for_a_view: (
        "coordinator.test_differences",
        "test_the_death_of_a_server_takes_little_and_a_notice_says_nothing",
    ),
    changes.ignore_a_gap_between_records: (
        "coordinator.test_differences",
        "test_records_of_the_store_lead_from_a_known_view_to_the_newest",
    ),
    ranges.leave_counters_where_a_range_was: (
        "store.test_range_map",
        "test_a_range_that_comes_again_has_nothing_of_before",
    ),
    ranges.lose_blank_descriptors_that_are_being_written: (
        "store.test_range_map",
        "test_a_write_reaches_descriptors_that_were_blank",
    ),
    ranges.stamp_rows_as_before_the_cut: (
        "store.test_range_map",
        "test_a_range_that_comes_again_has_nothing_of_before",
    ),
    readers.lose_deletions_on_reconnect: (
        "server.test_reader_feeds",
        "test_deletions_of_the_time_in_which_a_reader_was_away_are_sent",
    ),
    readers.keep_marks_of_before_a_filling: (
        "server.test_journal_marks",
        "test_a_range_that_came_back_has_no_mark_of_before",
    ),
    readers.go_on_across_a_range_that_began_again: (
        "readers.test_following",
        "test_a_range_that_began_again_is_read_again",
    ),
    readers.go_on_where_views_were_skipped: (
        "readers.test_following",
        "test_ranges_that_changed_in_a_view_that_was_skipped_are_asked_for_again",
    ),
    readers.take_windows_of_servers_that_are_no_tails: (
        "readers.test_following",
        "test_windows_of_a_server_count_for_ranges_that_it_has_answered_for_as_their_tail",
    ),
    rounds.mark_a_shard_done_when_it_is_used: (
        "server.test_data_shard_sets",
        "test_a_lost_workers_shards_go_to_others_with_their_history",
    ),
    rounds.take_what_is_applied_for_committed: (
        "client.test_shards",
        "test_a_lost_worker_has_trained_a_shard_when_its_step_is_committed_and_not_before",
    ),
}


_FLAGS = {
    "few": (sparse, announced, readers),
    "cuts": (cuts, checkpoints),
    "short": (short,),
    "caches": (caches,),
    "together": (together,),
    "proven": (hints,),
    "grows": (growth, checkpoints, readers),
    "readers": (readers,),
}
"""What the stories of modules' bugs have, whatever their seeds."""


def kind_of(plant: Patch) -> Kind:
    """Returns the kind of the stories that have to find a bug."""
    flavour, training, _ = PLANTED[plant]
    flags = {flag: plant.__module__ in (module.__name__ for module in modules) for flag, modules in _FLAGS.items()}
    return Kind(flavour, training, **flags)


def find(plant: Patch, stories: int = STORIES, recorded: bool = True) -> Result | None:
    """Returns the first story that shows a planted bug: the one written down above, unless `recorded` is False, then
    others of its kind, the cheapest first."""
    kind, (*_, first) = kind_of(plant), PLANTED[plant]
    by_cost = sorted(range(stories), key=lambda seed: expected_events(tell(seed, kind)))
    for seed in dict.fromkeys((first, *by_cost) if recorded else by_cost):
        result = run(seed, kind)
        if not result.ok:
            return result
    return None


def main(names: list[str], recorded: bool) -> int:
    """Prints the seed that finds each bug; returns how many bugs survive."""
    survived = 0
    for plant, (flavour, training, _) in PLANTED.items():
        if names and plant.__name__ not in names:
            continue
        with pytest.MonkeyPatch.context() as patch:
            plant(patch)
            found = find(plant, recorded=recorded)
        survived += found is None
        outcome = "SURVIVED" if found is None else f'("{flavour}", "{training}", {found.seed}),  # {found.invariant}'
        sys.stdout.write(f"    {plant.__name__}: {outcome}\n")
        sys.stdout.flush()
    return survived


if __name__ == "__main__":
    options = set(sys.argv[1:])
    sys.exit(main([*(options - {"--cheapest"})], "--cheapest" not in options) > 0)
