"""Each way in which the systems that Holdfast takes the place of were seen to fail, and the test that it doesn't.

The tests run real processes wherever a process matters; each of them fails for the system that it is listed under.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

XTUNER_CHECKPOINTS = {
    "a program hangs at its end after an exception of the training": [
        "integrations/test_xtuner.py::test_another_number_of_ranks_and_a_run_that_fails",
        "crash/test_exits.py::test_two_ranks_end",
    ],
    "what a callback of a future raises vanishes": [
        "integrations/test_xtuner.py::test_what_a_callback_raises_is_raised_by_the_next_save",
        "unit/manager/test_manager_failures.py::test_a_callback_that_raises_fails_nothing_but_the_next_call",
    ],
    "waits have no end": [
        "crash/test_lost_ranks.py::test_a_hanging_rank_is_reported",
        "crash/test_engine_faults.py::test_a_stopped_engine_is_killed_after_its_silence",
    ],
    "one rank's failure leaves the others at a barrier": [
        "crash/test_lost_ranks.py::test_both_ranks_get_the_same_outcome_if_one_raises",
        "distributed/test_failures.py::test_failures_are_alike_on_all_ranks",
    ],
    "old checkpoints are deleted before the record of the new one is durable": [
        "integrations/test_xtuner.py::test_nothing_is_deleted_before_the_next_record_is_durable",
    ],
    "directories are not fsynced": [
        "unit/engine/test_engine_parts.py::test_every_file_and_the_directory_are_fsynced_by_every_rank",
        "unit/commit/test_recovery.py::test_stopped_at_every_operation",
        "simulation/test_mutations.py::test_is_found",
    ],
    "what a failed save leaves is never swept": [
        "integrations/test_xtuner.py::test_what_a_crash_left_is_removed",
    ],
    "a crash between a rename and its record is followed by FileExistsError": [
        "integrations/test_xtuner.py::test_a_run_killed_between_a_checkpoint_and_its_record_goes_on_from_it",
        "integrations/test_xtuner.py::test_a_step_that_comes_again_is_replaced",
    ],
    "each tensor takes a descriptor": [
        "integrations/test_xtuner.py::test_thousands_of_tensors_take_no_descriptor_each",
    ],
    "dense weights are staged and written by one rank": [
        "integrations/test_xtuner.py::test_all_ranks_write_dense_weights",
        "unit/plan/test_plan_write.py::test_plain_replicas_are_shared_out_by_bytes",
    ],
}

XTUNER_EXPORTS = {
    "an export unshards the model": [
        "distributed/test_export_memory.py::test_an_export_takes_its_share_and_64_mib",
    ],
    "a process with threads is forked": [
        "contract/test_engine_process.py::test_no_torch_is_in_it",  # a fork would have it mapped
        "crash/test_one_engine.py::test_a_child_forked_during_a_save_is_independent",
    ],
    "memory is freed while it is still written from": [
        "unit/saver/test_process_session.py::test_release_in_flight_loses_nothing",
        "unit/saver/test_session.py::test_nothing_is_released_while_a_thread_may_still_publish",
        "crash/test_exits.py::test_a_save_whose_memory_is_freed_slowly",
    ],
    "a group's timeout ends before the wait around it": [
        "distributed/test_sessions.py::test_a_save_outlasts_the_timeout_of_its_group",
        "crash/test_one_engine.py::test_copies_and_report_of_an_export_have_one_deadline",
    ],
    "the old export is deleted before the new one has its name": [
        "contract/test_overwriting_beside_readers.py::test_the_only_export_is_never_missing_behind_its_link",
        "crash/test_export_kills.py::test_kill_at_every_call_of_an_export",
    ],
}

TORCHTITAN = {
    "close doesn't wait for the save in flight": [
        "integrations/test_torchtitan_options.py::test_closing_waits_for_the_save_in_flight",
    ],
    "a step is visible while it is written": [
        "integrations/test_torchtitan.py::test_a_killed_run_goes_on_as_if_nothing_had_happened",
        "crash/test_kill_points.py::test_kill_at_every_call",
    ],
    "directories without metadata count as the latest": [
        "integrations/test_torchtitan_options.py::test_what_has_no_metadata_does_not_count_among_the_latest",
    ],
    "a run that is started again fails on its model-only last save": [
        "integrations/test_torchtitan_options.py::test_a_last_save_of_the_model_is_converted_and_never_resumed_from",
    ],
    "random states are not saved": [
        "integrations/test_torchtitan_options.py::test_random_generators_go_on",
    ],
    "replicas deadlock with asynchronous staging": [
        "integrations/test_torchft.py::test_a_killed_replica_is_healed_and_a_killed_run_starts_again",
    ],
    "a rendezvous in the background takes MASTER_PORT + 2": [
        "distributed/test_sessions.py::test_no_port_is_listened_at",
    ],
}

WEIGHT_SYNC = {
    "nothing works without a device": [
        "distributed/test_sync_versions.py::test_fifty_versions_in_a_row_arrive_bit_by_bit"
    ],
    "the second update returns at once": [
        "distributed/test_sync_versions.py::test_fifty_versions_in_a_row_arrive_bit_by_bit",
    ],
    "a dead worker leaves the others hanging": [
        "crash/test_sync_kills.py::test_a_lost_receiver_costs_the_others_only_a_deadline",
        "crash/test_sync_kills.py::test_a_publisher_rank_that_dies_is_named_on_both_sides",
    ],
    "an abort leaves weights half applied": [
        "crash/test_sync_kills.py::test_receivers_keep_their_version_after_the_publisher_dies_and_a_new_one_continues",
        "crash/test_sync_blocks.py::test_receivers_come_and_go_at_random",
    ],
    "no version travels with the weights": [
        "unit/sync/test_sync_version_store.py::test_versions_only_go_up",
        "distributed/test_sync.py::test_versions_that_are_kept_serve_rollback_and_late_joiners",
    ],
    "tensors without elements are dropped": ["unit/sync/test_sync_pieces.py::test_every_dtype_arrives_bit_for_bit"],
    "dtypes of different alignment can't be mixed": [
        "distributed/test_sync_versions.py::test_fifty_versions_in_a_row_arrive_bit_by_bit",
        "unit/sync/test_sync_layout.py::test_entries_are_aligned_and_in_the_order_of_the_table",
    ],
    "float8 is not broadcast over gloo": [
        "distributed/test_sync.py::test_a_function_gets_whole_tensors_and_what_it_raises_is_raised",
    ],
    "what changes places has the same checksum": ["unit/sync/test_sync_pieces.py::test_every_change_is_seen"],
    "what a receiver was given is written over": [
        "distributed/test_sync.py::test_a_function_gets_whole_tensors_and_what_it_raises_is_raised",
    ],
}

ALL = {
    f"{system}: {failure}": tests
    for system, failures in {
        "XTuner's asynchronous checkpoints": XTUNER_CHECKPOINTS,
        "XTuner's asynchronous exports": XTUNER_EXPORTS,
        "torchtitan's manager": TORCHTITAN,
        "verl's checkpoint engine": WEIGHT_SYNC,
    }.items()
    for failure, tests in failures.items()
}


@cache
def names_in(path: str) -> frozenset[str]:
    tree = ast.parse((TESTS / path).read_text())
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize("failure", ALL)
def test_a_test_shows_that_it_does_not_happen(failure: str) -> None:
    for test in ALL[failure]:
        path, _, name = test.partition("::")
        assert name in names_in(path), f"{path} has no {name}"
