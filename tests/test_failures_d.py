"""Public failures of other trainers: section (d), reliability, of shared/cases/failures.md.

``COVERED`` says for each entry of that list which tests hold its right value, ``PARTLY`` what of an entry does not
apply here and why. Those that need several parts are here.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from dapo.inputs import Inputs
from dapo.launch import run_experiment
from dapo.observe.samples import read_samples
from dapo.run_folder import RunFolder
from run_cases import TOKENIZER, Recorder, config_for, run, text_sum, tiny_model
from test_failures_c import TESTS, names_in

CHECKPOINTS, RESUME, EXPERIMENT, SIGNALS = (
    "test_checkpoints.py",
    "test_resume.py",
    "test_experiment.py",
    "test_signals.py",
)
ENGINE, CLIENT, TRAINER = "rollout/test_engine.py", "reward/test_client.py", "training/test_trainer.py"
PACKING, SERVER, FAULTS, HERE = (
    *("training/test_packing.py", "reward/test_server.py", "faults/test_faults.py", "test_failures_d.py"),
)

COVERED: dict[int, list[tuple[str, str]]] = {
    80: [
        (RESUME, "test_a_failed_save_leaves_the_old_one"),
        (CHECKPOINTS, "test_one_that_fails_once_is_told_of_and_written"),
        (CHECKPOINTS, "test_one_that_fails_twice_ends_the_run_at_the_next_step"),
        (FAULTS, "test_a_run_survives"),
    ],
    81: [
        (CHECKPOINTS, "test_what_is_half_written_is_no_checkpoint"),
        (RESUME, "test_half_written_checkpoints_are_not_seen_and_go_away"),
        (FAULTS, "test_a_run_survives"),
    ],
    82: [
        (RESUME, "test_a_lost_record_of_the_best_step_is_written_again"),
        (RESUME, "test_two_processes_cannot_write_to_one_run"),
        (HERE, "test_a_checkpoint_that_cannot_be_removed_ends_no_run_failures_82"),
    ],
    83: [
        (CHECKPOINTS, "test_keep_two_and_resume_three_times_leaves_two"),
        (CHECKPOINTS, "test_room_is_looked_for_first_and_both_numbers_said"),
        (RESUME, "test_the_newest_and_the_best_checkpoints_are_kept"),
    ],
    85: [
        (RESUME, "test_a_run_stopped_anywhere_goes_on_as_if_it_had_not_been"),
        ("test_buffer.py", "test_resume_is_exact"),
        (HERE, "test_rows_after_a_resume_are_those_of_the_run_that_was_not_stopped_failures_85_86"),
    ],
    86: [
        ("data/test_order.py", "test_the_order_is_the_same_everywhere_and_for_ever"),
        (HERE, "test_rows_after_a_resume_are_those_of_the_run_that_was_not_stopped_failures_85_86"),
    ],
    87: [
        (TRAINER, "test_two_plus_two_updates_equal_four_failures_87"),
        (TRAINER, "test_damaged_or_foreign_state_is_refused"),
        (RESUME, "test_a_run_stopped_anywhere_goes_on_as_if_it_had_not_been"),
    ],
    88: [
        (TRAINER, "test_counters_survive"),
        ("test_buffer.py", "test_state_keeps_every_field_of_a_carried_group"),
        (RESUME, "test_a_run_stopped_anywhere_goes_on_as_if_it_had_not_been"),
        (EXPERIMENT, "test_evaluation_and_checkpoints_come_when_asked_for"),
    ],
    89: [
        (RESUME, "test_a_changed_data_file_is_refused_with_the_difference"),
        (RESUME, "test_a_changed_model_is_refused"),
        (RESUME, "test_a_setting_that_would_make_it_another_run_is_refused"),
        (RESUME, "test_a_lost_fingerprint_is_said_aloud"),
    ],
    91: [
        (CLIENT, "test_a_server_that_refuses_for_a_while_costs_that_while"),
        (CLIENT, "test_after_giving_up_the_address_and_the_cause_are_named_and_the_next_is_tried_once"),
        (CLIENT, "test_a_reply_of_the_wrong_length_is_asked_for_once_more_and_then_failed"),
        (CLIENT, "test_a_result_that_is_no_reward_fails_alone"),
        (CLIENT, "test_requests_at_once_and_responses_in_one_are_bounded"),
        ("reward/test_pauses.py", "test_pauses_double_and_are_spread"),
        (FAULTS, "test_a_run_survives"),
    ],
    93: [
        (SERVER, "test_an_open_address_without_a_token_is_refused"),
        (SERVER, "test_the_token_is_asked_for_everywhere_but_for_health"),
        (CLIENT, "test_a_result_that_is_no_reward_fails_alone"),
        (CLIENT, "test_a_reply_of_the_wrong_length_is_asked_for_once_more_and_then_failed"),
    ],
    94: [
        (ENGINE, "test_a_failure_reaches_every_waiter_and_the_engine_recovers"),
        (ENGINE, "test_a_thread_that_dies_leaves_nobody_waiting"),
        (ENGINE, "test_weights_that_arrive_in_part_are_not_used"),
        (EXPERIMENT, "test_an_engine_that_fails_half_way_ends_the_run_and_nothing_is_lost"),
    ],
    95: [
        (SIGNALS, "test_what_does_not_close_is_not_waited_for"),
        (CHECKPOINTS, "test_a_writer_that_hangs_is_not_waited_for_without_end"),
        (EXPERIMENT, "test_a_scorer_is_closed_even_if_the_engine_does_not_stop"),
        (FAULTS, "test_a_process_that_is_left_behind_is_seen"),
    ],
    96: [
        (TRAINER, "test_not_finite_is_skipped_and_counted_then_stops_failures_96"),
        (EXPERIMENT, "test_an_update_that_is_not_finite_is_skipped_and_counted_failures_96"),
        (EXPERIMENT, "test_updates_that_are_not_finite_end_the_run_with_a_checkpoint"),
        ("training/test_faults_numeric.py", "test_no_checkpoint_is_made_of_weights_that_are_not_finite"),
    ],
    98: [
        ("test_soak.py", "test_memory_is_flat_and_steps_take_as_long_as_they_did"),
        ("test_process.py", "test_freed_memory_is_used_again"),
    ],
    99: [("model/test_head.py", "test_the_logits_never_exist_whole_failures_99")],
    100: [
        (PACKING, "test_eight_rows_of_seven_tokens_failures_100"),
        (PACKING, "test_every_sequence_exactly_once_within_the_budget"),
        (PACKING, "test_a_sequence_above_the_budget_is_an_error_with_numbers_failures_100"),
        (TRAINER, "test_a_sequence_above_the_budget_stops_before_anything_moves_failures_100"),
    ],
    101: [
        (EXPERIMENT, "test_a_length_beyond_the_models_positions_is_refused_with_lengths_that_work"),
        (ENGINE, "test_a_request_of_exactly_the_limit_is_served"),
    ],
}

PARTLY: dict[int, str] = {
    82: "parallel mkdir: one process writes a run folder, and holds its lock",
    85: "loader workers: there are none, rows are read when they are drawn",
    89: "another number of GPUs: a run is one process on one device",
    94: "an engine process to kill: the engine is a thread of the run, so it cannot outlive it",
}
"""What of an entry has no counterpart here."""


def test_every_entry_is_covered_by_tests_that_exist() -> None:
    wanted = [(number, file, name) for number, tests in COVERED.items() for file, name in tests]
    assert [entry for entry in wanted if entry[2] not in names_in(entry[1])] == []
    assert set(PARTLY) <= set(COVERED)


@pytest.mark.shared
def test_the_table_holds_every_entry_of_the_list() -> None:
    text = (TESTS.parents[1] / "shared/cases/failures.md").read_text(encoding="utf-8")
    section = text.partition("\n## (d)")[2].partition("\n## (e)")[0]
    assert [int(number) for number in re.findall(r"^(\d+)\. ", section, re.MULTILINE)] == sorted(COVERED)


def test_a_checkpoint_that_cannot_be_removed_ends_no_run_failures_82(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove = shutil.rmtree

    def refuse(path: Any, *args: Any, **kwargs: Any) -> None:
        if Path(path).parent.name == "checkpoints" and not kwargs.get("ignore_errors") and not (args and args[0]):
            raise PermissionError(13, "Permission denied", str(path))
        if Path(path).parent.name != "checkpoints":
            remove(path, *args, **kwargs)

    monkeypatch.setattr(shutil, "rmtree", refuse)
    summary = run(tmp_path / "run", {"training.steps": 3, "run.save_every": 1, "run.keep_last": 1})
    assert summary["stopped"] == "all steps are done" and RunFolder(tmp_path / "run").model_after.is_dir()


def rows_of(folder: Path) -> list[int]:
    """Row numbers in the order of training."""
    steps = sorted(RunFolder(folder).samples.glob("*.jsonl"))
    return [sample["row"] for path in steps for sample in read_samples(path) if sample["index"] == 0]


@pytest.mark.nightly
def test_rows_after_a_resume_are_those_of_the_run_that_was_not_stopped_failures_85_86(tmp_path: Path) -> None:
    """A thousand rows, 128 a step, stopped after 8 steps, which is inside of the second epoch."""
    rows = [{"prompt": f"{n // 100}+{n % 100}=", "answer": str(n)} for n in range(1000)]
    changes = {
        "rollout.prompts_per_step": 128,
        "rollout.samples_per_prompt": 2,
        "rollout.max_response_length": 2,
        "rollout.max_concurrent_samples": 256,
        "algorithm.overlong_buffer.enable": False,
        "algorithm.filter_groups.enable": False,
        "training.groups_per_update": 128,
    }
    run(tmp_path / "whole", changes | {"training.steps": 10}, rows=rows)
    run(tmp_path / "parts", changes | {"training.steps": 8}, rows=rows)
    given = Inputs(
        model=tiny_model(), tokenizer=TOKENIZER, rows=rows, reward=text_sum, resume=RunFolder(tmp_path / "parts")
    )
    run_experiment(config_for(tmp_path / "parts", changes | {"training.steps": 10}), Recorder(), given)
    found = rows_of(tmp_path / "parts")
    assert found == rows_of(tmp_path / "whole") and len(found) == 1280
    assert sorted(found[:1000]) == list(range(1000)), "an epoch holds every row once"
    assert found[1000:] != found[:280], "the second epoch has an order of its own"
