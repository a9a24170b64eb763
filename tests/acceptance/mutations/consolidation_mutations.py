"""Mutations of consolidation, of the certificate and of what is exported."""

from tests.acceptance.mutations.mutation import Mutation

_IS_MODEL = "proven: **The checkpoint is the model.**"
_CONSOLIDATE = "t5train/checkpoint/consolidate"
_LAYOUTS = f"{_CONSOLIDATE}/layouts"
_TESTS = "tests/t5train/checkpoint/consolidate"
_RELEASE = "tests/t5train/release"

MUTATIONS = [
    Mutation(
        name="zero-1-partitions-in-reverse-order",
        claims=(_IS_MODEL,),
        file=f"{_LAYOUTS}/zero12.py",
        anchor="[partition(state, index) for state in states]",
        replacement="[partition(state, index) for state in reversed(states)]",
        tests=(f"{_TESTS}/test_reassembly.py::test_parameters_of_every_kind_are_consolidated_with_their_moments",),
    ),
    Mutation(
        name="zero-3-parts-rounded-down",
        claims=(_IS_MODEL,),
        file=f"{_LAYOUTS}/zero3.py",
        anchor="return -(-math.prod(shape) // num_ranks)",
        replacement="return math.prod(shape) // num_ranks",
        tests=(f"{_TESTS}/test_reassembly.py::test_parameters_of_every_kind_are_consolidated_with_their_moments",),
    ),
    Mutation(
        name="experts-numbered-within-a-rank",
        claims=(_IS_MODEL,),
        file=f"{_LAYOUTS}/expert_masters.py",
        anchor="expert=expert_rank * (count // size) + name.expert",
        replacement="expert=name.expert",
        tests=(f"{_TESTS}/test_experts.py::test_with_sidecars_experts_and_gates_get_hugging_face_names",),
    ),
    Mutation(
        name="weights-written-through-bf16",
        claims=(_IS_MODEL,),
        file=f"{_CONSOLIDATE}/tensor_writer.py",
        anchor=".to(TORCH_DTYPES[tensor.dtype])",
        replacement=".bfloat16().to(TORCH_DTYPES[tensor.dtype])",
        tests=(f"{_TESTS}/test_reassembly.py::test_parameters_of_every_kind_are_consolidated_with_their_moments",),
    ),
    Mutation(
        name="moments-taken-from-the-masters",
        claims=("proven: starts with the same masters, moments and loss scale",),
        file=f"{_LAYOUTS}/optimizer_states.py",
        anchor="[partition.moment(key, self.padding) for partition in self.partitions]",
        replacement="[partition.master for partition in self.partitions]",
        tests=(f"{_TESTS}/test_reassembly.py::test_parameters_of_every_kind_are_consolidated_with_their_moments",),
    ),
    Mutation(
        name="weights-that-are-not-trained-left-out",
        claims=(_IS_MODEL,),
        file=f"{_LAYOUTS}/assembly.py",
        anchor="if name not in masters and name not in module.aliases",
        replacement="if name not in masters and name in module.buffers",
        tests=(
            f"{_TESTS}/test_reassembly.py::test_parameters_of_every_kind_are_consolidated_with_their_moments",
            f"{_TESTS}/test_reassembly.py::test_zero_0_in_fp32_uses_the_modules_own_weights",
        ),
    ),
    Mutation(
        name="masters-not-compared-with-the-engines-weights",
        claims=(_IS_MODEL,),
        file=f"{_CONSOLIDATE}/tensor_writer.py",
        anchor="if not np.array_equal(stored.view(bits), rounded.numpy().view(bits)):",
        replacement="if len(stored) != size:",
        tests=(
            f"{_TESTS}/test_refusals.py::test_an_optimizer_partition_that_does_not_round_to_the_weights_is_refused",
        ),
    ),
    Mutation(
        name="checksums-of-records-not-compared",
        claims=(_IS_MODEL,),
        file=f"{_CONSOLIDATE}/tensor_writer.py",
        anchor="            require_intact(self._passed)",
        replacement="            self._passed.clear()",
        tests=(f"{_TESTS}/test_refusals.py::test_a_flipped_master_bit_that_rounding_hides_is_detected",),
    ),
    Mutation(
        name="pickles-loaded-without-restriction",
        claims=("safety: A checkpoint holds a pickle that no rank wrote",),
        file=f"{_CONSOLIDATE}/torch_file.py",
        anchor='map_location="meta", weights_only=True',
        replacement='map_location="meta", weights_only=False',
        tests=(f"{_TESTS}/test_refusals.py::test_a_hostile_pickle_is_refused_and_does_not_run",),
    ),
    Mutation(
        name="latest-decides-what-is-newest",
        claims=("resumes: `latest` is on rank 0's node only",),
        file=f"{_CONSOLIDATE}/opened_checkpoint.py",
        anchor="    if complete:\n        return complete[0]",
        replacement="    if complete and not (checkpoint / LATEST).is_file():\n        return complete[0]",
        tests=(f"{_TESTS}/test_refusals.py::test_the_newest_complete_tag_is_used_regardless_of_latest",),
    ),
    Mutation(
        name="tensors-compared-by-shape-only",
        claims=(_IS_MODEL,),
        file="t5train/release/model_comparison.py",
        anchor=" or digest_tensor(parameters[name]) != expected.sha256",
        replacement="",
        tests=(
            f"{_RELEASE}/test_certification.py::test_one_flipped_bit_of_a_weight_is_refused_with_the_name_of_its_tensor",
        ),
    ),
    Mutation(
        name="logits-of-dense-models-may-differ",
        claims=(_IS_MODEL,),
        file="t5train/release/model_comparison.py",
        anchor="near = relative_tolerance > 0 and seen.max_relative_difference <= relative_tolerance",
        replacement="near = seen.max_relative_difference <= max(relative_tolerance, 1e-3)",
        tests=(
            f"{_RELEASE}/test_certification.py"
            "::test_logits_of_experts_may_differ_by_rounding_and_those_of_dense_models_may_not",
        ),
    ),
    Mutation(
        name="configuration-not-compared",
        claims=("safety: Any single fault in any published file",),
        file="t5train/release/folder_comparison.py",
        anchor="        for name in DOCUMENTS:\n            yield from",
        replacement="        for name in DOCUMENTS[1:]:\n            yield from",
        tests=(
            "tests/acceptance/test_certificate_faults.py"
            "::test_every_fault_is_refused_by_the_certificate_even_with_a_matching_manifest",
        ),
    ),
    Mutation(
        name="certificate-of-other-files-accepted",
        claims=("safety: Any single fault in any published file", "proven: nothing is published without it"),
        file="t5train/release/certificate.py",
        anchor="        if differing:\n            raise CertificationError(",
        replacement="        if len(differing) == len(names):\n            raise CertificationError(",
        tests=(f"{_RELEASE}/test_certification.py::test_a_certificate_is_valid_only_for_the_files_of_its_own_export",),
    ),
    Mutation(
        name="held-out-passages-not-encoded",
        claims=("safety: A shuffled or altered tokenizer is published",),
        file="t5train/release/tokenizer_comparison.py",
        anchor='if tokenizer(each.text)["input_ids"] != each.ids]',
        replacement='if len(tokenizer(each.text)["input_ids"]) != len(each.ids)]',
        tests=(
            f"{_RELEASE}/test_certification.py"
            "::test_a_shuffled_tokenizer_is_refused_and_the_passages_alone_would_detect_it",
        ),
    ),
    Mutation(
        name="generated-text-not-compared",
        claims=("safety: A wrong generation setting is published",),
        file="t5train/release/model_comparison.py",
        anchor="return place, None if place and margins[place - 1] <= close else place",
        replacement="return place, None",
        tests=(
            f"{_RELEASE}/test_model_comparison.py"
            "::test_settings_that_change_the_generated_text_are_detected_by_generating",
        ),
    ),
    Mutation(
        name="unknown-files-of-an-export-accepted",
        claims=("safety: Code or pickles in the export",),
        file="t5train/release/folder_comparison.py",
        anchor="{*(files.keys() - expected), *unlisted_files(export)} - {CERTIFICATE}",
        replacement="{*(name for name in files.keys() - expected if name.endswith('.json'))}",
        tests=(
            f"{_RELEASE}/test_certification.py"
            "::test_a_file_that_does_not_belong_to_an_export_is_refused_before_anything_is_loaded",
        ),
    ),
    Mutation(
        name="no-rounding-allowed-on-another-processor",
        claims=("safety: An honest run is refused on another processor or GPU",),
        file="t5train/release/certification.py",
        anchor='return OTHER_DEVICE_TOLERANCE, f"other processors and libraries',
        replacement='return 0.0, f"other processors and libraries',
        tests=(
            f"{_RELEASE}/test_certification.py"
            "::test_with_another_processor_or_library_logits_may_differ_by_rounding_and_the_reason_is_named",
        ),
    ),
    Mutation(
        name="unreadable-certificate-made-again",
        claims=("safety: A certificate that cannot be read now is made again",),
        file="t5train/release/certification.py",
        anchor="except (CertificationError, *ABSENT):",
        replacement="except (T5TrainError, *ABSENT):",
        tests=(f"{_RELEASE}/test_certification.py::test_a_certificate_that_cannot_be_read_now_is_not_made_again",),
    ),
    Mutation(
        name="damaged-model-folder-used",
        claims=("safety: A model folder is damaged after it was published, and used",),
        file="t5train/records/kept_files.py",
        anchor="        verify_file(folder / name, digest)\n",
        replacement="        (folder / name).stat()\n",
        tests=(
            f"{_RELEASE}/inference/test_model_folder.py"
            "::test_a_folder_that_is_not_as_its_manifest_records_is_refused_by_generate_and_evaluate",
        ),
    ),
    Mutation(
        name="files-of-users-not-noticed-by-an-export",
        claims=("safety: A second export or a repeated stage deletes files",),
        file="t5train/records/kept_files.py",
        anchor="return sorted({*unlisted_files(record), *(name",
        replacement="return sorted({*(name",
        tests=(f"{_RELEASE}/test_repeated_export.py::test_files_that_somebody_added_or_edited_are_never_removed",),
    ),
    Mutation(
        name="edited-files-overwritten-by-their-stage",
        claims=("safety: A second export or a repeated stage deletes files",),
        file="t5train/records/kept_files.py",
        anchor="rename_aside(folder / name))",
        replacement="folder / name)",
        tests=(
            "tests/t5train/records/test_kept_files.py"
            "::test_an_edited_file_is_moved_aside_before_its_stage_writes_it_again",
        ),
    ),
]
