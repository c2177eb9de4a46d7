"""Which cases are of the lane `more`: those whose code other cases run too, at some cost of time.

A test is listed with what of it stays in the first lane: its ids, or every so manieth case of a
table of combinations, or nothing. All others are of the lane `more`, which `.ci/run` runs too.
"""

import re
from collections.abc import Iterable, Mapping

import pytest

Stays = tuple[str, ...] | int

# A whole run is four seconds of work, so that of each kind of run one stays.
RUNS: Mapping[str, Stays] = {
    "commands/test_train.py::test_resumed_run_equals_the_unbroken_one_bit_for_bit": ("extra2",),
    "commands/test_train.py::test_every_way_of_training_lowers_the_loss": (
        "arguments0",
        "arguments3",
    ),
    "commands/test_train.py::test_eval_loss_does_not_depend_on_batching": (),
    "commands/test_train.py::test_when_a_run_saves": ("options2-steps2",),
    "commands/test_train.py::test_a_signal_saves_and_exits_and_the_run_goes_on": ("15",),
    "commands/test_train.py::test_a_second_start_reads_the_persistent_cache": (),
    "commands/test_train.py::test_records_of_a_run_without_checkpoint_are_kept": (),
    "commands/test_train.py::test_skipping_for_ever_is_an_error": (),
    "commands/test_ready_configs.py::test_the_small_variant_trains_and_leaves_an_adapter": (
        "qwen3_8b_qlora",
    ),
    "commands/test_verify.py::test_a_run_killed_three_times_ends_as_the_unbroken_one": (),
    "commands/test_verify.py::test_a_run_that_does_not_resume_exactly_fails": (),
    "training/test_scenarios.py::test_a_b_resumed_is_the_unbroken_run": ("sft",),
    "training/test_scenarios.py::test_c_warm_start_at_step_0_from_the_adapter": (
        "sft-run",
        "sft-peft",
    ),
    "training/test_scenarios.py::test_d_adapters_on_a_base_that_was_fully_trained": ("sft",),
    "training/test_scenarios.py::test_the_saved_base_is_a_model_of_the_same_codes": ("sft",),
    "training/test_scenarios.py::test_e_other_executions_read_the_checkpoints": ("sft-changes0",),
    "training/test_scenarios.py::test_f_other_device_counts_read_the_checkpoints": ("sft-2",),
    "training/test_scenarios.py::test_every_feature_at_once_does_not_depend_on_the_mesh": (),
    "training/test_scenarios.py::test_a_run_resumed_in_a_later_epoch_reads_the_rows_of_that_epoch": (  # noqa: E501
        "True",
    ),
    "training/test_init.py::test_resumed_run_equals_the_unbroken_one": ("pissa",),
    "training/test_init.py::test_export_is_checked": ("patterns",),
    "training/test_init.py::test_adapters_out_of_weights_leave_the_model_what_it_is": ("pissa",),
    "checkpoint/test_damage.py::test_a_first_save_that_was_killed_begins_anew_by_itself": (),
    "checkpoint/test_damage.py::test_steps_of_another_version_are_not_begun_over": 3,
    "checkpoint/test_damage.py::test_a_full_disk_ends_the_run_and_keeps_the_old_checkpoint": (),
    "interop/test_maxtext.py::test_the_base_computes_what_maxtext_computes": 3,
    "interop/test_maxtext.py::test_a_run_from_maxtext_is_exported": (),
}
# Runs of several processes, each of which starts, compiles and ends by itself.
PROCESSES: Mapping[str, Stays] = {
    "multihost/test_several_processes.py::test_each_process_reads_and_writes_its_own_parts": (),
    "multihost/test_several_processes.py::test_a_killed_process_and_a_signal_to_one_of_them": (),
    "multihost/test_several_processes.py::test_an_error_is_told_once_and_ends_all": ("user-1",),
    "multihost/test_several_processes.py::test_a_setting_that_is_wrong_ends_the_launched_run": (),
    "multihost/test_several_processes.py::test_a_process_that_waits_for_others_says_so_and_ends": (),  # noqa: E501
}
# Tables whose combinations are compiled one by one.
TABLES: Mapping[str, Stays] = {
    "commands/test_generate.py::test_quantised_bases_and_bfloat16_speak": ("nf4",),
    "commands/test_merge.py::test_merged_is_adapted": (
        "rank_pattern-False",
        "dora-False",
        "embedding-False",
        "tokens and head-True",
        "own biases-False",
    ),
    "commands/test_merge.py::test_onto_the_dequantised_base": ("nf4",),
    "commands/test_merge.py::test_gguf_output_and_its_report": ("q8_0",),
    "interop/test_peft_convert.py::test_round_trip_through_a_peft_folder_is_bit_equal": 3,
    "interop/test_peft_experts.py::test_out_and_in_changes_no_bit": 2,
    "lora/test_experts.py::test_no_layer_is_left_out_of_a_word": 3,
    "models/test_decode.py::test_bfloat16_and_quantised_bases_generate": (),
    "models/test_decode.py::test_draws_of_a_row_depend_on_the_seed_and_its_number_alone": (),
    "models/test_families.py::test_logits_of_the_plain_model": 2,
    "models/test_families.py::test_cache_is_the_whole_sequence": 2,
    "models/test_moe.py::test_products_and_gradients_are_those_of_each_row_by_itself": 7,
    "models/test_moe.py::test_step_is_the_plain_gradient": 2,
    "models/test_stacks.py::test_what_repeats_is_compiled_once": 3,
    "models/test_llama.py::test_logits_of_the_plain_model": 2,
    "ops/test_attention.py::test_blocks_are_softmax_attention": 5,
    "ops/test_quant.py::test_round_trip_error_is_half_the_gap_between_two_codes": 5,
    "ops/test_quant.py::test_agrees_with_qwix": 5,
    "ops/test_quant.py::test_frozen_dot_and_its_gradient": 5,
    "ops/test_quant.py::test_frozen_dot_in_another_dtype": 3,
    "ops/test_quant.py::test_take_rows_is_indexing_the_dequantised_table": 5,
    "training/test_step.py::test_step_is_the_plain_gradient": (
        "none-1x1x1-M1-scan",
        "none-1x1x1-M4-remat",
        "int8-1x8x1-M1-scan-remat-head",
        "int84-2x4x1-M4-sharded-scan-head",
        "nf48-2x4x1-M4-sharded-scan-head",
        "full-1x8x1-M4-scan-remat",
        "int84-1x2x4-M4-sharded-scan-head",
    ),
    "training/test_step.py::test_first_and_second_gradient": 2,
    "training/test_tensor_parallel.py::test_features_are_those_of_one_device": ("dora", "tokens"),
    **{
        f"training/test_compiled_step.py::{name}": (
            "int8-1x8x1-M2-scan",
            "int8-2x4x1-M2-sharded-scan",
            "nf4-2x4x1-M2-scan",
        )
        for name in (
            "test_codes_are_gathered_never_floats",
            "test_weights_are_gathered_again_in_the_backward_pass",
            "test_the_gathered_base_is_never_stacked",
            "test_adapter_gradients_are_reduced_once_outside_every_loop",
            "test_base_is_neither_returned_nor_donated",
        )
    },
    "training/test_compiled_step.py::test_reductions_do_not_grow_with_layers_or_micro_batches": (),
    "weights/test_load.py::test_quantised_while_loading_equals_quantised_afterwards": 3,
    "weights/test_load.py::test_memory_peaks_at_the_base_and_one_tensor": (),
}
LISTED = {**RUNS, **PROCESSES, **TABLES}


def mark(items: Iterable[pytest.Item]) -> None:
    """Marks the cases of the lane `more`."""
    seen: dict[str, int] = {}
    for item in items:
        parts = re.fullmatch(r"(?:.*/)?tests/(.+?::\w+)(?:\[(.*)\])?", item.nodeid, re.DOTALL)
        stays = None if parts is None else LISTED.get(parts[1])
        if parts is None or stays is None:
            continue
        number = seen.get(parts[1], 0)
        seen[parts[1]] = number + 1
        is_more = number % stays > 0 if isinstance(stays, int) else parts[2] not in stays
        if is_more:
            item.add_marker("more")
