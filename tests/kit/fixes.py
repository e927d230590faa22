"""The fixes of messages that name an option or a command, as the code has them (… for what is filled in): the test after
which each is typed, or the reason why it is not.

`cli/test_fixes.py` compares the tables with the code, `typed_fixes.py` types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

# fmt: off
TYPED: Final[Mapping[str, str]] = {
    "average changes, for which they need not be alike: --space delta":
        "tests/adapters_out/test_averages.py::test_snapshots_that_are_not_alike_have_no_averaged_factors[shape]",
    "bring it to LoRA: --algorithm lora --rank 32, or write another format (kohya)":
        "tests/adapters_out/test_experts.py::test_peft_gets_no_whole_values_of_an_expert_which_it_would_leave_out[qwen3_moe]",
    "bring it to LoRA: --algorithm lora, with --rank if it is not low-rank":
        "tests/adapters_out/test_convert.py::test_dialect_refuses_what_it_cannot_hold",
    "choose another -o, or give --overwrite":
        "tests/proof/test_unmerge.py::test_unmerge_has_the_manners_of_a_merge",
    "choose another name: -o …-new…":
        "tests/planning/test_folders.py::test_folder_of_the_tokenizer_is_not_replaced",
    "a merge quantises what it writes: lora-merge BASE ADAPTER --dtype q8_0":
        "tests/cli/test_foreign_options.py::test_what_is_dropped_is_named[llama-quantize base x Q4_K]",
    "run it as it is; or merge the adapter: lora-merge BASE ADAPTER":
        "tests/cli/test_foreign_options.py::test_what_is_dropped_is_named[convert_lora_to_gguf.py --base base one --outfile x.gguf]",
    "write what each adds to a model as an adapter: lora-merge extract BASE TUNED; then merge these":
        "tests/cli/test_foreign_options.py::test_what_is_dropped_is_named[ModelMergeSimple model1=base model2=tuned]",
    "name the files: lora-merge BASE ADAPTER":
        "tests/cli/test_foreign_options.py::test_what_is_dropped_is_named[mlx_lm.fuse]",
    "write --max-memory …MiB":
        "tests/cli/test_errors.py::test_errors_name_the_mistake_and_the_fix[base.safetensors lora.safetensors --max-memory 1KiB-5-the memory limit is too low-write lora-merge base.safetensors lora.safetensors --max-memory 8MiB]",
    "write --rank 32, or choose the format kohya or comfy":
        "tests/adapters_out/test_convert.py::test_whole_matrices_go_through_every_dialect_that_has_a_place_for_them",
    "give the base model of the training: --base MODEL":
        "tests/adapters_out/test_combine.py::test_merging_the_combination_is_merging_all_also_with_dora_and_biases",
    "give the base that it was tuned from, …or leave them out: --unmatched skip":
        "tests/adapters_out/test_extract_tokens.py::test_new_head_is_stored_whole_and_layers_behind_the_last_are_refused",
    "keep it as a separate adapter; --unmatched skip merges what it has for the decoder, which changes both":
        "tests/models/test_tied_weights.py::test_layers_that_encoder_and_decoder_share_are_not_changed_for_one_of_them[decoder.layers]",
    "leave it out with --strength-for te=0, or name the output .safetensors":
        "tests/files/test_checkpoint_to_gguf.py::test_gguf_refuses_what_it_has_no_place_for[a text encoder-FitError-a network that the GGUF file lacks]",
    "leave it out, or average changes: --space delta":
        "tests/adapters_out/test_averages.py::test_snapshots_that_are_not_alike_have_no_averaged_factors[rank]",
    "leave it out, or write --dtype … or another that quantises":
        "tests/files/test_quantising.py::test_formats_that_no_loader_reads_are_refused_with_what_to_write_instead",
    "leave it out; adapters follow the base: lora-merge BASE ADAPTER:0.8 ADAPTER2:0.5":
        "tests/cli/test_habits.py::test_mistakes_of_beginners_are_answered[base + lora-leave it out]",
    "lora-merge BASE ADAPTER:0.8; …":
        "tests/cli/test_errors.py::test_errors_name_the_mistake_and_the_fix[merge-2-no base and no adapter is named-lora-merge BASE ADAPTER:0.8]",
    "a first one: lora-merge batch --init OTHER.yaml":
        "tests/cli/test_habits.py::test_jobs_file_in_the_place_of_a_base_is_for_batch",
    "lora-merge batch JOBS.yaml; lora-merge batch --init writes a first one":
        "tests/cli/test_errors.py::test_errors_name_the_mistake_and_the_fix[batch-2-no jobs file was given---init writes a first one]",
    "choose another --format, or drop them with --unmatched skip":
        "tests/adapters_out/test_extract.py::test_changed_weight_without_a_name_in_the_dialect_is_refused_or_reported",
    "name a folder that contains one, or leave --tokenizer out":
        "tests/planning/test_folders.py::test_tokenizer_that_is_not_there_is_refused[adapter]",
    "name a folder: -o …":
        "tests/cli/test_main.py::test_outputs_of_odd_names",
    "name another folder: lora-merge demo DIR":
        "tests/cli/test_main.py::test_demo_takes_the_place_of_nothing[base.safetensors]",
    "name it: -o merged.safetensors":
        "tests/cli/test_errors.py::test_errors_name_the_mistake_and_the_fix[base.safetensors lora.safetensors -o --2-the output is a file, not a stream--o merged.safetensors]",
    "name the base first: lora-merge BASE ADAPTER:0.8":
        "tests/cli/test_habits.py::test_mistakes_of_beginners_are_answered[lora.safetensors:0.8 base.safetensors-name the base first: lora-merge base.safetensors lora.safetensors:0.8]",
    "name the base; lora-merge inspect … shows what the adapter changes":
        "tests/cli/test_errors.py::test_errors_name_the_mistake_and_the_fix[parts lora.safetensors-2-an adapter, and parts are those of a base-lora-merge inspect lora.safetensors]",
    "one merge needs no file: lora-merge BASE ADAPTER:0.8":
        "tests/cli/test_errors.py::test_errors_name_the_mistake_and_the_fix[batch base.safetensors-2-this is a model, not a jobs file-lora-merge BASE ADAPTER]",
    "merge again with --compute-dtype fp32":
        "tests/proof/test_verify.py::test_sums_in_16_bits_that_prove_nothing_are_noted_where_they_were_asked_for",
    "name the folder: --tokenizer …":
        "tests/planning/test_folders.py::test_tokenizer_of_several_adapters_is_named",
    "state it: --setting row_order=stacked for an adapter of a base with all of q, then k, then v, as single files have them; --setting row_order=heads for q, k and v head by head, as in the original shards":
        "tests/proof/test_second_reading.py::test_rows_with_two_orders_are_those_of_the_setting[True-False-stacked]",
    "use --rank 32 or --rank energy:0.99":
        "tests/adapters_out/test_extract.py::test_noise_of_whole_numbers_is_not_known",
    "write --dtype keep, or change --keep-precision":
        "tests/files/test_quantising.py::test_formats_that_no_loader_reads_are_refused_with_what_to_write_instead",
    "write --dtype keep, as what the adapter changes is not quantised; or …":
        "tests/files/test_quantised.py::test_dtype_other_than_keep_is_refused",
    "write --rank 32 or --rank energy:0.99, or store whole matrices: --algorithm full --to kohya":
        "tests/adapters_out/test_convert.py::test_dialect_refuses_what_it_cannot_hold",
    "state whether weights are [in, out] with --setting fan_in_fan_out=true or --setting fan_in_fan_out=false; the wrong one transposes the change":
        "tests/matching/test_conv1d.py::test_conv1d_that_was_wrapped_first_is_refused_until_the_user_says_it[lora]",
    "train it with ensure_weight_tying, or without these modules; --unmatched skip changes both ends, which computes something else":
        "tests/models/test_tied_weights.py::test_change_of_one_end_is_refused_where_a_model_cannot_be_untied[shared]",
    "use the base it was trained on, or merge all the same with --unmatched skip":
        "tests/matching/test_wrong_pairs.py::test_sides_of_a_wrong_pair_are_named[native/wan-t2v-14B-native/wan-i2v-14B-T2V or 2.2-I2V]",
    "…; or leave the file out with --unmatched skip":
        "tests/planning/test_folders.py::test_weights_without_one_place_are_refused_and_the_fix_works[several modules]",
    "write --dtype bf16":
        "tests/files/test_quantising.py::test_formats_that_no_loader_reads_are_refused_with_what_to_write_instead",
    "write --dtype bf16, …":
        "tests/files/test_checkpoint_to_gguf.py::test_gguf_refuses_what_it_has_no_place_for[scaled codes kept-UsageError-no type for the quantised weights]",
    "write --dtype …":
        "tests/files/test_checkpoint_to_gguf.py::test_gguf_refuses_what_it_has_no_place_for[scaled codes kept-UsageError-no type for the quantised weights]",
    "write a file here with -o NAME, or name hf://owner/name, s3://bucket/key, gs://… or az://…":
        "tests/cli/test_habits.py::test_mistakes_of_beginners_are_answered[base lora -o civitai:12345-write a file here with -o NAME]",
    "write lora-merge batch …":
        "tests/cli/test_habits.py::test_jobs_file_in_the_place_of_a_base_is_for_batch",
    "write --dtype … -o …":
        "tests/cli/test_habits.py::test_container_is_corrected_by_one_fix[flux.gguf style -o x.safetensors --dtype nf4]",
    "write a folder for each: …--include … -o …-…":
        "tests/adapters_out/test_convert.py::test_dialect_refuses_what_it_cannot_hold",
    "write a PEFT folder with --format peft -o FOLDER, or drop it with --unmatched skip":
        "tests/adapters_out/test_extract_tokens.py::test_head_apart_is_never_lost_in_a_file",
    "…; or leave them out with --unmatched skip":
        "tests/matching/test_tied_heads.py::test_value_of_no_parameter_of_the_head_lands_nowhere[(10,)-bias-apart]",
}
"""Text of a fix → the test whose error has it."""

UNTYPED: Final[Mapping[str, tuple[str, ...]]] = {
    "a GPU or a system that fails so is needed": (
        "choose another -o: without < > : \" | ? *, a point at the end, and names such as CON and NUL",
        "choose another -o, or wait for the other run",
        "choose a shorter -o, or enable long paths in Windows (LongPathsEnabled)",
        "choose another -o, or permit it: …",
        "make room, or write to another disk with -o",
        "remove files, or name a folder on another disk with --cache",
        "end other programs that use the device, or use --device cpu",
        "give --max-memory …MiB",
        "give a smaller --max-memory, or raise the limit (ulimit -v unlimited)",
        "give a smaller --max-memory, close other programs, or enlarge the paging file",
        "if it ran out of memory, use fewer --workers or a smaller --max-memory",
        "use --device cpu, or another device",
        "use --device cpu; or start again, after a look at the driver's messages (nvidia-smi, dmesg)",
        "use fp32, or --device cpu",
    ),
    "a server is needed": (
        "choose another repository, branch or name, or give --overwrite",
        "unset …, or write a file here with -o NAME",
    ),
    "a cluster, or a worker that dies, is needed": (
        "check that every node has lora-merge and the memory it needs; `ray logs` shows more",
        "start one with `ray start --head`, or leave the address out",
        "unset it, or name a cluster of yours: --ray-address",
    ),
    "it is a look at what else there is, or a report": (
        "run mergekit-yaml; or write the change of each checkpoint as an adapter with lora-merge extract, and merge these; "
        "for adapters alone use lora-merge combine or lora-merge average",
        "correct them; lora-merge schema jobs lists the fields",
        "read the weights too: --weights",
        "only outputs of lora-merge carry a recipe; …",
        "report this with lora-merge doctor's text",
        "use lora-merge compare …, or name a base first",
    ),
    "it goes in the place of the option that is refused": (
        "give it as --rank",
        "give its name, or print the report with --json",
    ),
}
"""Reason why no test types a fix → its texts."""
# fmt: on

BY_HAND: Final[Mapping[str, tuple[str, ...]]] = {
    "another file, download, training or export is needed": (
        "download", "export", "save", "get", "take", "train", "convert", "merge", "resize", "update", "load", "unpack",
        "DeepSpeed's", "the", "it", "keep", "combine", "run", "convert_lora_to_gguf.py",
    ),
    "the user names another file, or a value, that a test of the error has as its right case": (
        "use", "write", "lora-merge", "give", "at", "name", "names", "choose", "did", "this", "under", "verify", "of", "start",
    ),
    "the user corrects a file or a line": (
        "correct", "remove", "rename", "move", "put", "indent", "check", "close", "compare", "delete", "if", "let", "density",
    ),
    "the option, value or layer is left out by hand; or it is tried and not typed": ("leave", "lower", "or"),
    "a call in Python": ("bring", "cast", "undo", "see", "for"),
    "the system's or another program's": ("raise", "change", "you", "pip", "apply", "serve", "install"),
    "the mistake is ours": ("report",),
}  # fmt: skip
"""Why a fix without an option and a command cannot be run by a test → the first words of such fixes."""
