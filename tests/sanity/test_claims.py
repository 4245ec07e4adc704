"""The table of what works, docs/features.md: every clause names the tests that would fail if it did not."""

import ast
import re
from functools import cache

import pytest
import yaml

from tests.sanity.repository import ROOT

FEATURES = (ROOT / "docs" / "features.md").read_text()
TABLE = FEATURES[: FEATURES.index("`braid` estimates layouts")]
ROW = re.compile(r"^\| ([A-Z][^|]+) \| (.*) \|$", re.MULTILINE)
MASTER = "distributed/test_master.py::test_loss_and_every_gradient_equal_one_process"
FAMILIES = "distributed/test_hugging_face_families.py::test_logits_and_gradients_equal_transformers"
PRETRAIN = "distributed/test_pretrain.py"

PROOFS_TEXT = f"""
Units
  vision and audio encoders = {MASTER} + {FAMILIES}[qwen2-audio]
  generators behind it = {PRETRAIN}::test_a_generator_trains_alike_whatever_its_sizes
  megatron-core's TransformerLayer specs =
    distributed/test_against_megatron.py::test_losses_of_twenty_steps_equal_those_of_megatron
  RMSNorm or LayerNorm = {MASTER} + {FAMILIES} + distributed/test_hugging_face_families.py::test_windows_are_those_of_transformers
  LLMs with experts = distributed/test_master.py::test_replicas_share_experts
  projectors of learned queries = {MASTER}
    + unit/model/test_query_projector.py::test_they_find_in_each_item_what_they_find_in_it_alone
  encoders that feed encoders = distributed/test_master.py::test_encoders_feed_encoders
Pretrained weights
  `--load-hf DIR` starts = distributed/test_hugging_face_runs.py::test_a_run_steps_as_transformers_with_adamw
  `--save-hf DIR` writes one back = distributed/test_hugging_face_runs.py::test_tools_convert_in_both_directions
    + distributed/test_crash.py::test_a_killed_export_leaves_no_folder_by_half
  Llama, Mistral, Phi-3, Gemma 2 and 3 (text), InternLM2, Qwen2, Qwen3, Mixtral, Qwen3 with experts =
    {FAMILIES}[llama with biases in its mlp] + {FAMILIES}[mistral] + {FAMILIES}[phi3] + {FAMILIES}[gemma2] + {FAMILIES}[gemma3]
    + distributed/test_hugging_face_families.py::test_internlm2_is_a_llama_under_other_names + {FAMILIES}[qwen2]
    + {FAMILIES}[qwen3 with biases] + {FAMILIES}[mixtral] + {FAMILIES}[qwen3 with experts]
  LLaVA-1.5 = {FAMILIES}[clip with its class token] + {FAMILIES}[internvl] + {FAMILIES}[pixtral]
  Qwen2-VL = {FAMILIES}[qwen2-vl]
  Qwen2.5-VL = {FAMILIES}[qwen2.5-vl]
  Qwen3-VL = {FAMILIES}[qwen3-vl]
  Qwen2-Audio = {FAMILIES}[qwen2-audio]
  Qwen2.5-Omni's thinker = {FAMILIES}[qwen2.5-omni]
  Tokenizer, chat template and image processor = unit/data/chat/test_chat_format.py::test_tokens_are_those_of_transformers
    + unit/hugging_face/test_vision_towers.py::test_pixels_are_those_of_transformers
  trains LLaVA and Qwen2.5-VL in two stages = distributed/test_walkthroughs.py::test_llava_in_two_stages
    + distributed/test_walkthroughs.py::test_qwen2_5_vl_begins
Answers
  `tools/generate.py`, or `multimodal.generate` in Python, asks =
    distributed/test_generate.py::test_a_folder_answers_as_transformers_do
    + distributed/test_generate.py::test_next_tokens_are_those_of_the_training_forward
    + distributed/test_generate.py::test_next_tokens_behind_sound_that_an_encoder_of_transformers_hears
    + distributed/test_generate.py::test_a_program_asks_a_folder_once_or_an_open_model_again
  an exported folder answers = distributed/test_exported_folders.py::test_an_exported_folder_needs_no_further_file
  or says = distributed/test_sound.py::test_sound_and_images_come_from_one_run
  it draws = distributed/test_drawing.py::test_an_image_follows_the_flow_from_noise
    + distributed/test_drawing.py::test_what_the_prompt_says_changes_the_image
Recipes
  flags and a plan for trainings of published models =
    distributed/test_recipe_files.py::test_a_recipe_starts_on_its_gpus_and_says_its_prediction
    + distributed/test_recipe_files.py::test_a_recipe_trains_a_small_model_of_its_kind
Adapters
  LoRA on any linear layer = distributed/test_lora.py::test_loss_and_every_gradient_equal_one_process
  exported merged or as PEFT's files = distributed/test_hugging_face_lora.py::test_adapters_are_those_of_peft_under_any_plan
  started from PEFT's = distributed/test_hugging_face_lora.py::test_adapters_of_peft_are_trained_on_and_merged
Composed models
  as Braid's layers or as they are =
    distributed/test_composition.py::test_weights_come_from_their_folders_and_go_into_folders_like_them
    + distributed/test_opaque.py::test_gradients_equal_one_process_under_plans
    + distributed/test_opaque.py::test_gradients_equal_one_process_and_files_are_as_they_were
  `./scripts/quickstart_speech.sh` = distributed/test_composition.py::test_a_whisper_hears_what_transformers_hear
Data
  told apart by themselves = unit/data/forms/test_sample_files.py::test_one_corpus_in_every_form_is_one
    + unit/data/forms/test_sample_files.py::test_data_sets_of_hugging_face
    + distributed/test_data_runs.py::test_a_run_that_is_killed_goes_on_as_if_it_was_not
  tars of WebDataset and Energon = unit/data/forms/test_sample_files.py::test_samples_of_archives_are_those_of_files
    + unit/data/forms/test_sample_files.py::test_a_split_of_energon_by_its_field_map
  at `s3://` and `http(s)://` addresses = unit/data/test_remote.py::test_remote_data_are_those_of_this_machine
  left out by all ranks alike = distributed/test_data_runs.py::test_what_cannot_be_read_counts_nothing_on_any_plan
  videos as frames = unit/data/test_image_files.py::test_a_sample_with_a_video_is_one_with_its_frames
  as Qwen's models see them = distributed/test_videos.py::test_a_sample_with_a_video_is_what_transformers_make_of_it
    + distributed/test_videos.py::test_any_plan_trains_on_videos_like_one_process
    + unit/data/test_videos.py::test_frames_and_sizes_are_those_of_the_video_processor
  weighted mixtures = distributed/test_phases.py::test_phases_of_one_run
  joined into sequences = distributed/test_loss_weights.py::test_the_loss_is_the_weighted_mean
    + distributed/test_phases.py::test_a_phase_in_two_runs_is_that_of_one
  decoded on other machines = distributed/test_data_runs.py::test_losses_are_the_same_with_producers_and_when_they_are_killed
From the command line
  an LLM alone, or with any number of encoders = {PRETRAIN}::test_any_sizes_log_the_same_losses
    + distributed/test_several_encoders.py::test_a_step_is_that_of_transformers
  `--plan auto` = distributed/test_plan_auto.py::test_a_run_plans_by_itself_once_and_changes_a_plan_that_turns_out_bad
Parallelism, per unit
  tensor ( = {MASTER} + distributed/test_overlapped_linear.py::test_loss_and_every_gradient_equal_one_process
  context ( = distributed/test_context_parallel.py::test_every_distribution
  pipeline ( = {MASTER}
  sharing ranks, or as a plan file says = {MASTER}
    + {PRETRAIN}::test_replicas_of_templates_train_as_one_process_and_save_for_any_plan
Frozen modules and projectors
  input gradients only, or nothing = {MASTER} + {PRETRAIN}::test_a_frozen_encoder_trains_its_projector
Attention
  who sees whom = unit/attention/test_bitfield.py::test_a_prefix_sees_itself_in_both_directions
    + {PRETRAIN}::test_a_prefix_trains_alike_whatever_the_sizes_and_the_backend
  kernels that visit visible blocks only = unit/attention/test_backends.py::test_blocks_touch_what_is_visible_only
    + unit/attention/triton_kernels/test_triton_attention.py::test_kernels_give_the_references_output_and_gradients
    + unit/attention/triton_kernels/test_triton_attention.py::test_kernels_compile_and_fit
  FlexAttention = unit/attention/test_backends.py::test_flex_attention_gives_the_references_output
Packed sequences
  no padding = unit/data/test_token_counts.py::test_encoder_microbatch_holds_the_items_in_order
  native resolution = unit/data/test_image_files.py::test_known_sizes_of_qwen2_vl
Broker
  neither has to divide the other = {MASTER}
    + unit/runtime/communication/test_broker.py::test_two_ranks_send_to_three_only_what_overlaps
  microbatches that differ between units = {MASTER}
  point to point = unit/runtime/communication/test_broker.py::test_every_row_reaches_its_target_once
Schedules
  an IR that prints as text = unit/schedule/test_golden_schedules.py::test_text_round_trips
  builders = distributed/test_every_builder.py::test_every_builder_trains_every_model
    + distributed/test_optimus.py::test_orders_by_durations_train_as_one_process_does
    + distributed/test_inside_waits.py::test_loss_and_every_gradient_equal_one_process
  passes = distributed/test_every_builder.py::test_every_pair_of_passes_keeps_the_gradients
    + distributed/test_reduce_by_layer.py::test_it_is_exact
  one validator = unit/schedule/test_wrong_schedules.py::test_every_schedule_is_answered_as_written
Prediction
  of the very schedules that run = unit/schedule/test_every_schedule.py::test_any_builder_with_any_passes_on_any_plan
    + distributed/test_memory_model.py::test_peaks_are_predicted
  emulation of the real runtime = distributed/test_emulation.py::test_every_computation_takes_its_seconds_on_its_lane
  held against each other = unit/tools/test_simulate.py::test_diff_reads_timelines_and_traces
  measure their own layers = unit/cost/test_layer_profile.py::test_measured_computations_are_predicted
    + {PRETRAIN}::test_steps_decided_by_measured_layers_log_the_same_losses
Megatron drop-in
  runs training loops written for Megatron = distributed/test_drop_in.py::test_training_equals_that_on_megatrons_own_function
  microbatches balanced over replicas = distributed/test_drop_in.py::test_balanced_microbatches_train_the_same
  encoders compute in the LLM's bubbles = distributed/test_drop_in.py::test_encoders_fill_bubbles_of_a_loops_llm
  process groups set up = distributed/test_drop_in_groups.py::test_every_unit_gets_the_groups_of_its_grid
  what it cannot honour it refuses = distributed/test_drop_in_groups.py::test_options_that_would_be_ignored_are_refused
Balancers
  for any torch loop = distributed/test_module_exchange.py::test_examples_train_as_unbalanced
  `--balance` with = distributed/test_every_builder.py::test_every_balancer_trains_every_model
    + unit/balance/test_auto.py::test_auto_is_the_best_of_all_and_never_worse_than_none
  C++ kernels, else Python (not `entrain`, `disttrain`'s order) = unit/test_kernels.py::test_every_declared_kernel_is_asked_for
  off the critical path = {PRETRAIN}::test_the_log_has_the_step_and_its_split
  or exchanged after decoding = unit/runtime/feed/test_run_data.py::test_a_replica_needs_the_pixels_of_its_own_microbatches
    + {PRETRAIN}::test_any_sizes_log_the_same_losses
  batches moved between nodes = distributed/test_every_builder.py::test_rearranged_batches_train_the_same
Planning
  `tools/plan.py` with = unit/plan/planners/test_planners.py::test_every_plan_validates_fits_and_is_simulated
    + unit/plan/planners/test_plan_search.py::test_no_planner_is_better_on_a_random_request
  a set of pipeline templates =
    unit/plan/planners/templates/test_reconfigure.py::test_any_losses_and_returns_leave_a_run_that_uses_all_nodes
    + {PRETRAIN}::test_replicas_of_templates_train_as_one_process_and_save_for_any_plan
  from profiled layers = unit/tools/test_profile_layers.py::test_every_layer_is_timed_and_written
    + distributed/test_memory_model.py::test_peaks_of_tensor_parallel_ranks_are_predicted
Training
  ZeRO-1 = {PRETRAIN}::test_the_sharded_float32_optimizer_stays_close_to_float64
  ZeRO-3 = distributed/test_master.py::test_replicas_share_weights
  in one copy or several =
    distributed/test_checkpoint.py::test_training_otherwise_is_the_same_and_resumes_from_each_others_checkpoints
  learning rate schedules, one global gradient norm =
    distributed/test_against_megatron.py::test_losses_of_twenty_steps_equal_those_of_megatron
  bf16 with fp32 main gradients = {PRETRAIN}::test_bfloat16_stays_close_to_float32
  recomputation ( = {MASTER} + distributed/test_context_parallel.py::test_every_distribution
  JSON log with MFU = {PRETRAIN}::test_the_log_has_the_step_and_its_split
Checkpoints
  resumed bit for bit, under another plan = distributed/test_checkpoint.py::test_the_same_plan_resumes_bit_for_bit
    + distributed/test_checkpoint.py::test_another_plan_resumes_from_the_same_values
    + distributed/test_crash.py::test_the_newest_complete_checkpoint_always_loads
    + distributed/test_phases.py::test_a_phase_in_two_runs_is_that_of_one
  written while training goes on = distributed/test_checkpoint.py::test_steps_that_run_beside_a_save_are_not_in_it
Lost nodes
  takes nodes back = distributed/test_recovery.py::test_ranks_die_anywhere_and_nodes_return
  tried on CPU processes = distributed/test_recovery.py::test_replicas_that_differ_become_alike_and_differ_again
Platforms
  CPU processes over gloo = {MASTER}
  CUDA with NCCL = gpu/test_cuda.py::test_float64_losses_equal_the_cpus
  with Python 3.12 and 0.19 = distributed/test_against_mimo.py::test_losses_of_twenty_steps_equal_those_of_mimo
"""
"""Rows, and below them what they say, as they say it = the tests below tests/ that would fail if it were not so."""


def read_proofs(text):
    proofs = {}
    for title, lines in re.findall(r"^(\w.*)\n((?: .*\n)+)", text, re.MULTILINE):
        phrases = (line.split(" = ") for line in re.sub(r"\n    +", " ", lines).splitlines())
        proofs[title] = {phrase.strip(): tuple(tests.strip().split(" + ")) for phrase, tests in phrases}
    return proofs


PROOFS = read_proofs(PROOFS_TEXT)


def rows_of(table):
    return dict(ROW.findall(table))


def find_unproven(table, proofs):
    """List clauses that no phrase of `proofs` stands in, and phrases that stand in no clause."""
    unproven = []
    for title, text in rows_of(table).items():
        phrases = proofs.get(title, {})
        outside_links = re.sub(r"\]\([^)]*\)", "]", text)
        clauses = re.sub(r"\([^()]*\)", lambda found: found[0].replace(";", ","), outside_links).split(";")
        unproven += [f"{title}: {clause.strip()}" for clause in clauses if not any(phrase in clause for phrase in phrases)]
        unproven += [f"{title} no longer says: {phrase}" for phrase in phrases if phrase not in outside_links]
    return unproven + [f"no row {title}" for title in proofs.keys() - rows_of(table).keys()]


@cache
def functions_in(path):
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


@cache
def family_names():
    """Return all texts of the files that list the families of Hugging Face."""
    files = (ROOT / "tests" / "distributed" / name for name in ("hugging_face_models.py", "test_hugging_face_families.py"))
    found = {node.value for file in files for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Constant)}
    written = yaml.safe_load((ROOT / "tests" / "distributed" / "tiny_models.yaml").read_text())
    return found.union(*written.values())


def test_every_clause_names_its_proof():
    assert rows_of(TABLE)
    assert find_unproven(TABLE, PROOFS) == []


@pytest.mark.parametrize("proof", sorted({proof for row in PROOFS.values() for tests in row.values() for proof in tests}))
def test_the_proof_is_there(proof):
    path, name, row = re.fullmatch(r"(.*)::(\w+)(?:\[(.*)\])?", proof).groups()
    assert name in functions_in(ROOT / "tests" / path)
    assert row is None or row in family_names()


def test_what_nothing_proves_is_found():
    table = "| Speed | fast (and; small); faster than light |\n"
    assert find_unproven(table, {}) == ["Speed: fast (and, small)", "Speed: faster than light"]
    assert find_unproven(table, {"Speed": {"fast (": (), "slow": ()}}) == [
        "Speed: faster than light",
        "Speed no longer says: slow",
    ]
