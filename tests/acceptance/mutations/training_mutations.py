"""Mutations of training, of its data and of the exactness of resuming."""

from tests.acceptance.mutations.mutation import Mutation

_SANE = "proven: **Training is checked for sanity.**"
_EXACT = "proven: **Resuming is exact.**"
_MICRO_BATCH = "safety: The micro-batch size changes what is learned"
_CHECKS = "tests/t5train/train/test_sanity_checks.py"
_ENGINE = "tests/t5train/engine"
_SAMPLES = "tests/t5train/data/samples"

MUTATIONS = [
    Mutation(
        name="infinite-losses-accepted",
        claims=(_SANE, "proven: A loss that is not finite"),
        file="t5train/train/sanity_checks.py",
        anchor="if value is not None and not math.isfinite(value):",
        replacement="if value is not None and math.isnan(value):",
        tests=(f"{_CHECKS}::test_a_loss_that_is_not_finite_is_an_error_that_names_the_step",),
    ),
    Mutation(
        name="skipped-steps-not-bounded",
        claims=("proven: fp16 that keeps skipping steps",),
        file="t5train/train/sanity_checks.py",
        anchor="if skipped > bound:",
        replacement="if skipped > step:",
        tests=(f"{_CHECKS}::test_too_many_skipped_steps_are_an_error_with_both_numbers",),
    ),
    Mutation(
        name="first-rank-left-out-of-the-comparison-of-batches",
        claims=("proven: two ranks with the same batch",),
        file="t5train/train/sanity_checks.py",
        anchor="enumerate(digests[:data_parallel_size])",
        replacement="enumerate(digests[1:data_parallel_size])",
        tests=(f"{_CHECKS}::test_two_ranks_with_the_same_batch_are_an_error_that_names_them",),
    ),
    Mutation(
        name="one-moving-group-is-enough",
        claims=("proven: weights that do not move", "safety: An honest run fails because one rank's part"),
        file="t5train/train/sanity_checks.py",
        anchor="if not all(map(any, of_group)):",
        replacement="if not any(map(any, of_group)):",
        tests=(f"{_CHECKS}::test_experts_unchanged_on_all_ranks_are_an_error_even_if_the_rest_moves",),
    ),
    Mutation(
        name="every-ranks-part-has-to-move",
        claims=("safety: An honest run fails because one rank's part",),
        file="t5train/train/sanity_checks.py",
        anchor="if not all(map(any, of_group)):",
        replacement="if not all(map(all, of_group)):",
        tests=(f"{_CHECKS}::test_an_unchanged_part_is_allowed_if_another_part_of_its_group_moved",),
    ),
    Mutation(
        name="ranks-may-resume-from-different-checkpoints",
        claims=("proven: ranks that resumed from different checkpoints",),
        file="t5train/checkpoint/saving.py",
        anchor="if len({row[0] for row in everybody}) > 1:",
        replacement="if not everybody:",
        tests=(
            "tests/t5train/train/test_training.py"
            "::test_a_training_fault_ends_with_a_clear_error_on_every_rank[disagree]",
        ),
    ),
    Mutation(
        name="resumed-runs-begin-the-samples-again",
        claims=(_EXACT,),
        file="t5train/train/loop.py",
        anchor="yield samples.batch(first_sample(spec, done, micro)",
        replacement="yield samples.batch(first_sample(spec, done - step, micro)",
        tests=(f"{_ENGINE}/test_fused_update.py::test_a_killed_run_resumes_bit_equal[1-zero1-bf16]",),
    ),
    Mutation(
        name="epochs-in-the-same-order",
        claims=("proven: The samples of a step depend only on its number",),
        file="t5train/data/samples/loader.py",
        anchor="self._seed, keyed_random.ORDER, epochs), epochs)",
        replacement="self._seed, keyed_random.ORDER, 0), epochs)",
        tests=(f"{_SAMPLES}/test_loader.py::test_every_epoch_has_each_sample_once_in_an_order_of_its_own",),
    ),
    Mutation(
        name="noise-depends-on-the-batch",
        claims=("proven: The samples of a step depend only on its number",),
        file="t5train/data/samples/loader.py",
        anchor="key = noise_keys(self._seed, epochs, ids)",
        replacement="key = noise_keys(self._seed, epochs, np.arange(count))",
        tests=(f"{_SAMPLES}/test_loader.py::test_a_batch_depends_only_on_its_position_and_not_on_how_it_is_split",),
    ),
    Mutation(
        name="last-sample-of-a-shard-shifted",
        claims=("proven: The samples of a step depend only on its number",),
        file="t5train/data/samples/loader.py",
        anchor="shard[ascending[first:last] - (end - len(shard))]",
        replacement="shard[ascending[first:last] - end]",
        tests=(f"{_SAMPLES}/test_loader.py::test_sample_k_is_window_k_of_the_shards",),
    ),
    Mutation(
        name="sentinels-count-up",
        claims=(_EXACT,),
        file="t5train/data/samples/span_corruption.py",
        anchor="np.arange(first_sentinel_id, first_sentinel_id - shape.spans, -1, dtype=np.int32)",
        replacement="np.arange(first_sentinel_id - shape.spans + 1, first_sentinel_id + 1, dtype=np.int32)",
        tests=(
            f"{_SAMPLES}/test_span_corruption.py"
            "::test_a_window_starts_unmasked_ends_masked_and_its_sentinels_count_down",
        ),
    ),
    Mutation(
        name="texts-of-a-mixture-in-equal-shares",
        claims=("mixtures: rate",),
        file="t5train/data/samples/mixture.py",
        anchor="return [part / total for part in parts]",
        replacement="return [Fraction(1, len(parts)) for part in parts if total]",
        tests=(f"{_SAMPLES}/test_mixture.py::test_rates_are_those_of_t5",),
    ),
    Mutation(
        name="runs-of-another-sample-order-continue",
        claims=("safety: A run continues with a different order of samples",),
        file="t5train/checkpoint/resume.py",
        anchor="if version != ORDER_VERSION:",
        replacement="if version > ORDER_VERSION:",
        tests=(
            "tests/t5train/checkpoint/test_resume.py"
            "::test_a_run_with_another_sample_order_is_refused_and_both_versions_are_named",
        ),
    ),
    Mutation(
        name="training-text-normalised-otherwise-than-published",
        claims=("safety: A model is trained on ids that its tokenizer never produces",),
        file="t5train/data/vocabulary/sentencepiece_model.py",
        anchor="        if combines:\n            return self._encoded(self._of_normalised",
        replacement="        if combines and not texts:\n            return self._encoded(self._of_normalised",
        tests=(
            "tests/t5train/data/vocabulary/test_sentencepiece_model.py"
            "::test_text_that_normalisers_treat_differently_gets_the_published_tokenizers_ids",
            "tests/t5train/data/vocabulary/test_sentencepiece_model.py::test_any_text_gets_the_published_tokenizers_ids",
        ),
    ),
    Mutation(
        name="gradients-summed-in-16-bits",
        claims=(_MICRO_BATCH,),
        file="t5train/engine/gradient_accumulation.py",
        anchor="self._sums[parameter] = gradient.float()",
        replacement="self._sums[parameter] = gradient.clone()",
        tests=(f"{_ENGINE}/test_gradient_accumulation.py::test_the_sum_of_any_number_of_passes_is_rounded_once",),
    ),
    Mutation(
        name="gradients-of-ranks-not-averaged",
        claims=(_MICRO_BATCH,),
        file="t5train/engine/gradient_reduction.py",
        anchor="alpha=1 / self._ranks)",
        replacement="alpha=1.0)",
        tests=(
            f"{_ENGINE}/test_gradient_reduction.py::test_each_rank_sums_what_it_owns_of_the_gradients_of_all_ranks",
        ),
    ),
    Mutation(
        name="adams-bias-not-corrected",
        claims=(_EXACT,),
        file="t5train/engine/optimizer.py",
        anchor='value=-group["lr"] / (1 - beta1**step))',
        replacement='value=-group["lr"])',
        tests=(f"{_ENGINE}/test_optimizer.py::test_without_rms_scaling_the_optimizer_equals_torchs_adamw",),
    ),
    Mutation(
        name="rms-of-a-rank-instead-of-the-tensor",
        claims=("proven: its losses are the same up to rounding",),
        file="t5train/engine/optimizer.py",
        anchor="            self._sum_over_ranks(sums, sharers)",
        replacement="            sums.add_(0)",
        tests=(f"{_ENGINE}/test_optimizer.py::test_updates_do_not_depend_on_how_tensors_are_partitioned_over_ranks",),
    ),
    Mutation(
        name="initial-values-depend-on-the-layout",
        claims=("proven: starts with the same masters, moments and loss scale",),
        file="t5train/model/initialization.py",
        anchor='hashlib.sha256(f"{seed}|{name}".encode())',
        replacement='hashlib.sha256(f"{seed}|{size.numel()}".encode())',
        tests=("tests/t5train/model/test_initialization.py::test_initial_values_depend_only_on_seed_and_name",),
    ),
    Mutation(
        name="tokens-beyond-capacity-not-dropped",
        claims=("proven: no dropped tokens",),
        file="t5train/model/expert_dispatch.py",
        anchor="slot = route.chosen * capacity + route.place.clamp(max=capacity - 1)",
        replacement="slot = route.chosen * capacity + route.place % capacity",
        tests=(
            "tests/t5train/model/test_mixture_of_experts.py::test_rows_and_slots_keep_the_same_tokens",
            "tests/t5train/model/test_mixture_of_experts.py::test_sorting_tokens_drops_those_beyond_capacity_at_random",
        ),
    ),
    Mutation(
        name="moments-lost-in-another-layout",
        claims=(_EXACT, "proven: starts with the same masters, moments and loss scale"),
        file="t5train/checkpoint/state_loading.py",
        anchor="for key, stored in self.moments.items():",
        replacement="for key, stored in list(self.moments.items())[1:]:",
        tests=("tests/t5train/checkpoint/test_reshard.py::test_resharding_keeps_masters_and_moments_bit_for_bit",),
    ),
    Mutation(
        name="ranks-exchange-pickles",
        claims=("safety: A process that impersonates a rank sends a pickle",),
        file="t5train/engine/collectives.py",
        anchor='    content = json.dumps(mine).encode("ascii")\n',
        replacement="    import pickle as json\n\n    content = json.dumps(mine)\n",
        tests=(f"{_ENGINE}/test_collectives.py::test_objects_gathered_from_other_ranks_are_exact_and_never_unpickled",),
    ),
    Mutation(
        name="rendezvous-listens-on-all-interfaces",
        claims=("safety: torch's store for the rendezvous is open to the network",),
        file="t5train/train/loopback_store.py",
        anchor="socket.create_server((address, port), family=family)",
        replacement='socket.create_server(("", port), family=family)',
        tests=("tests/t5train/train/test_loopback_store.py::test_ranks_of_one_machine_listen_only_on_loopback",),
    ),
]
