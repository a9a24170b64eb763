"""Mutations of checkpoints on hosts: ownership, gathering, recovery, garbage collection and removal of runs."""

from tests.acceptance.mutations.mutation import Mutation

_STORAGE = "infra/head/storage"
_TESTS = "tests/infra/head/storage"
_REMOVAL = "tests/infra/head/runs/test_run_removal.py"
_WRITE_SIDECARS = """    for name, text in sorted(tag.texts.items()):
        if not is_there(folder / name):  # a sidecar that is there is this one: others were set aside
            write_text(folder / name, text)
"""
_GATHER = "    _Gathering(nodes, tag_path(run_name, tag.name), folder, lacking, progress).run(tag.places)\n"

MUTATIONS = [
    Mutation(
        name="unreadable-copy-ends-a-gather",
        claims=("safety: One copy of a checkpoint cannot be read", "resumes: a file cannot be read now"),
        file=f"{_STORAGE}/gather.py",
        anchor="            unreadable[each.name] = error\n            return False",
        replacement="            raise",
        tests=(f"{_TESTS}/test_gather.py::test_a_copy_that_cannot_be_read_is_replaced_from_a_node_and_set_aside",),
    ),
    Mutation(
        name="sidecars-gathered-before-the-files",
        claims=("resumes: the head is restarted while it gathers",),
        file=f"{_STORAGE}/gather.py",
        anchor=_GATHER + _WRITE_SIDECARS,
        replacement=_WRITE_SIDECARS + _GATHER,
        tests=(f"{_TESTS}/test_gather.py::test_an_interrupted_transfer_resumes_where_it_stopped",),
    ),
    Mutation(
        name="interrupted-gathers-begin-again",
        claims=("resumes: the head is restarted while it gathers",),
        file="infra/node/storage/pull.py",
        anchor="    if partial.exists():\n        digest, size = _hash_of(partial)",
        replacement="    if partial.exists():\n        partial.unlink()",
        tests=(f"{_TESTS}/test_gather.py::test_a_full_disk_keeps_the_partial_file_and_the_transfer_resumes_from_it",),
    ),
    Mutation(
        name="arriving-files-not-verified",
        claims=("resumes: a bit is flipped in an optimizer file on its node",),
        file="infra/node/storage/pull.py",
        anchor="if found == wanted.sha256:",
        replacement="if found:",
        tests=(
            f"{_TESTS}/test_gather.py::test_a_damaged_partial_file_is_transferred_again",
            f"{_TESTS}/test_gather.py"
            "::test_a_file_damaged_on_every_host_is_named_with_its_hosts_and_the_tag_stays_incomplete",
        ),
    ),
    Mutation(
        name="damaged-newest-checkpoint-not-set-aside",
        claims=(
            "safety: Pruning deletes a checkpoint newer than",
            "resumes: a bit is flipped in an optimizer file on its node and in the gathered copy",
        ),
        file=f"{_STORAGE}/recovery.py",
        anchor="if name > chosen and (name in finished",
        replacement="if name < chosen and (name in finished",
        tests=(f"{_TESTS}/test_recovery.py::test_a_damaged_checkpoint_is_set_aside_and_the_previous_one_is_used",),
    ),
    Mutation(
        name="checkpoints-complete-without-all-files",
        claims=("resumes: an optimizer file of the newest checkpoint is missing on its node and in the gathered copy",),
        file=f"{_STORAGE}/checkpoint_inventory.py",
        anchor="        if not where:\n",
        replacement="        if not holders:\n",
        tests=(
            "tests/infra/head/storage/test_recovery.py::test_a_lost_file_is_named_with_the_host_that_last_had_it",
            "tests/infra/head/storage/test_checkpoint_inventory.py",
        ),
    ),
    Mutation(
        name="files-taken-from-their-first-holder-only",
        claims=("resumes: an optimizer file of the newest checkpoint is missing on its node",),
        file=f"{_STORAGE}/gather.py",
        anchor="place for place in places[name] if place in self._nodes.hosts]",
        replacement="place for place in places[name][:1] if place in self._nodes.hosts]",
        tests=(
            f"{_TESTS}/test_gather.py::test_a_damaged_file_is_replaced_from_an_intact_copy",
            f"{_TESTS}/test_gather.py::test_parts_on_several_nodes_are_gathered_into_one_checkpoint",
        ),
    ),
    Mutation(
        name="oldest-checkpoint-chosen",
        claims=("resumes: all nodes are intact",),
        file=f"{_STORAGE}/checkpoint_inventory.py",
        anchor="key=lambda tag: (tag.step, tag.name), reverse=True)",
        replacement="key=lambda tag: (tag.step, tag.name))",
        tests=("tests/infra/head/storage/test_checkpoint_inventory.py",),
    ),
    Mutation(
        name="optimizer-files-restored-to-other-ranks",
        claims=("resumes: one node's disk is wiped",),
        file="t5train/checkpoint/tags.py",
        anchor="        return reader.rank == writer.rank",
        replacement="        return writer.rank == 0",
        tests=("tests/t5train/checkpoint/test_tags.py::test_a_rank_reads_its_own_files_and_those_shared_by_all_ranks",),
    ),
    Mutation(
        name="older-checkpoint-replaces-an-unreadable-one",
        claims=("safety: A host cannot read part of the newest checkpoint",),
        file=f"{_STORAGE}/recovery.py",
        anchor="        _require_known(doubtful, [name for name in unknown if name > tag.name])\n",
        replacement="",
        tests=(
            f"{_TESTS}/test_recovery.py::test_a_checkpoint_that_cannot_be_read_now_is_not_replaced_by_an_older_one",
        ),
    ),
    Mutation(
        name="unreadable-checkpoint-pruned",
        claims=("safety: A host cannot read part of the newest checkpoint",),
        file=f"{_STORAGE}/checkpoint_inventory.py",
        anchor="_names(found) - steps.keys() - unreadable(found).keys()",
        replacement="_names(found) - steps.keys()",
        tests=(f"{_TESTS}/test_recovery.py::test_pruning_keeps_a_checkpoint_with_a_file_that_a_host_cannot_read_now",),
    ),
    Mutation(
        name="old-checkpoints-of-returning-hosts-used",
        claims=("safety: A host that has left the run cannot be reached while the run begins again",),
        file=f"{_STORAGE}/recovery.py",
        anchor="if late := [host for host in nodes.hosts if host in checkpoint_record.not_begun_again(run.folder)]:",
        replacement="if late := [host for host in checkpoint_record.not_begun_again(run.folder) if not host]:",
        tests=(
            f"{_TESTS}/test_recovery.py::test_old_checkpoints_of_a_host_that_returns_after_begin_again_are_set_aside",
        ),
    ),
    Mutation(
        name="pickles-on-hosts-not-looked-for",
        claims=("safety: A checkpoint holds a pickle that no rank wrote",),
        file=f"{_STORAGE}/recovery.py",
        anchor="        require_listed(tag, found.found)\n",
        replacement="",
        tests=(f"{_TESTS}/test_recovery.py::test_a_file_on_a_host_that_no_rank_recorded_is_refused_and_named",),
    ),
    Mutation(
        name="adopted-newest-checkpoint-not-recorded",
        claims=("safety: A head adopts a run while one of its hosts is missing",),
        file=f"{_STORAGE}/run_storage.py",
        anchor="        checkpoint_record.note_adopted(self.run.folder, found)\n",
        replacement="",
        tests=(f"{_TESTS}/test_claim.py::test_adopting_a_run_without_one_of_its_hosts_does_not_restart_it_at_step_0",),
    ),
    Mutation(
        name="requests-not-checked-against-the-owner",
        claims=("safety: Two heads with the same run name and settings",),
        file="infra/node/attempts/run_ownership.py",
        anchor="if found is not None and found.unique_id != unique_id:",
        replacement="if found is not None and unique_id is None:",
        tests=(f"{_TESTS}/test_claim.py::test_a_head_cannot_read_or_write_another_heads_run_on_hosts",),
    ),
    Mutation(
        name="leases-of-others-count-as-expired",
        claims=("safety: Two heads with the same run name and settings",),
        file="infra/node/attempts/run_ownership.py",
        anchor="left = max(0.0, found.lease_seconds - head_lease.age_seconds(folder))",
        replacement="left = max(0.0, head_lease.age_seconds(folder) - found.lease_seconds)",
        tests=(f"{_TESTS}/test_claim.py::test_a_second_head_is_refused_with_the_owner_and_what_to_do",),
    ),
    Mutation(
        name="runs-adopted-while-ranks-work",
        claims=("safety: A head has died for good",),
        file="infra/node/attempts/run_ownership.py",
        anchor="return max(left, found.lease_seconds) if _has_running_ranks(folder) else left",
        replacement="return left",
        tests=(
            f"{_TESTS}/test_claim.py::test_ranks_that_outlive_their_head_prevent_another_head_from_adopting_the_run",
        ),
    ),
    Mutation(
        name="superseded-head-does-not-notice",
        claims=("safety: A superseded head continues",),
        file=f"{_STORAGE}/claim.py",
        anchor="            if refused:\n                self.lost",
        replacement="            if len(refused) > len(answers):\n                self.lost",
        tests=(f"{_TESTS}/test_claim.py::test_a_head_notices_that_another_head_has_taken_over_its_run",),
    ),
    Mutation(
        name="attempts-of-a-superseded-head-prepared",
        claims=("safety: A superseded head continues",),
        file="infra/node/attempts/attempt_actions.py",
        anchor="    _require_own_run(request)\n    folder",
        replacement="    folder",
        tests=(
            "tests/infra/node/test_actions.py::test_no_attempt_is_prepared_for_a_run_that_another_head_has_taken_over",
        ),
    ),
    Mutation(
        name="lease-of-another-machine-not-awaited",
        claims=("safety: A shared root where flock is local to each client",),
        file="infra/node/attempts/run_lease.py",
        anchor="        self._await_silence()\n        try:",
        replacement="        try:",
        tests=(
            "tests/infra/node/attempts/test_run_lease.py"
            "::test_a_head_on_another_machine_is_refused_with_the_name_of_the_holder",
        ),
    ),
    Mutation(
        name="head-copy-not-verified-before-hosts-free-theirs",
        claims=("safety: `gc --free` frees the last good copy",),
        file=f"{_STORAGE}/garbage_collection.py",
        anchor="Checkpoint.load(run.folder).verify(progress)",
        replacement="Checkpoint.load(run.folder)",
        tests=(
            f"{_TESTS}/test_garbage_collection.py::test_hosts_keep_their_files_if_the_heads_copy_has_a_flipped_bit",
        ),
    ),
    Mutation(
        name="attempts-with-processes-freed",
        claims=("safety: `gc` frees another head's run, or an attempt that is alive",),
        file="infra/node/storage/left_attempts.py",
        anchor="elif folder.name in known.busy or _is_living(folder):",
        replacement="elif folder.name in known.busy:",
        tests=("tests/infra/node/storage/test_left_attempts.py::test_an_attempt_with_a_running_process_is_kept",),
    ),
    Mutation(
        name="runs-that-begin-again-freed",
        claims=("safety: A run begins again while `gc --free` verifies",),
        file="flows/cli/operate/gc_command.py",
        anchor="verified_runs = [run for run in checked if run.name in still]",
        replacement="verified_runs = [run for run in checked if run.name or still]",
        tests=(
            "tests/flows/cli/operate/test_gc_command.py"
            "::test_hosts_keep_a_run_that_begins_again_while_the_heads_copy_is_verified",
        ),
    ),
    Mutation(
        name="leases-on-hosts-ignored-by-rm",
        claims=("safety: `rm` deletes a run that is in use",),
        file="infra/head/runs/removal_plan.py",
        anchor="each.owner.unique_id == known.unique_id and each.left_seconds > 0:",
        replacement="each.owner.unique_id != known.unique_id and each.left_seconds > 0:",
        tests=(f"{_REMOVAL}::test_a_run_whose_lease_is_alive_on_a_host_is_refused",),
    ),
    Mutation(
        name="runs-that-start-from-it-ignored-by-rm",
        claims=("safety: `rm` deletes a run that is in use",),
        file="infra/head/runs/removal_plan.py",
        anchor="any(path.resolve().is_relative_to(folder) for folder in own)",
        replacement="path.resolve() in own",
        tests=(f"{_REMOVAL}::test_a_run_from_which_another_starts_is_refused",),
    ),
    Mutation(
        name="rm-goes-on-without-a-host",
        claims=("safety: `rm` is killed half-way, or a host fails meanwhile",),
        file="infra/head/runs/removal_plan.py",
        anchor="    if silent:\n        reasons",
        replacement="    if len(silent) == len(answers) > 1:\n        reasons",
        tests=(f"{_REMOVAL}::test_nothing_is_deleted_if_a_host_does_not_answer_and_the_error_names_it",),
    ),
    Mutation(
        name="rm-deletes-before-it-renames",
        claims=("safety: `rm` is killed half-way, or a host fails meanwhile",),
        file="infra/head/runs/run_removal.py",
        anchor="yield _renamed(plan.run, removing(plan.run) if has_more else discarded(plan.run))",
        replacement="yield plan.run if has_more else _renamed(plan.run, discarded(plan.run))",
        tests=(
            f"{_REMOVAL}::test_a_host_that_fails_during_the_deletion_is_named_and_repeating_the_command_finishes",
            f"{_REMOVAL}::test_a_deletion_that_is_killed_half_way_is_finished_by_the_same_command_or_by_gc",
        ),
    ),
    Mutation(
        name="rm-frees-all-garbage-of-hosts",
        claims=("safety: `rm` deletes another head's files on hosts",),
        file="infra/head/runs/removal_plan.py",
        anchor="[each for each in every if each.relative_path in own]",
        replacement="[each for each in every if own]",
        tests=(
            f"{_REMOVAL}::test_what_hosts_have_of_other_runs_and_what_they_set_aside_stays",
            f"{_REMOVAL}::test_a_run_is_deleted_here_and_on_all_hosts_and_the_data_stays",
        ),
    ),
    Mutation(
        name="finished-training-reported-as-lost",
        claims=("safety: Finished training is reported as lost",),
        file=f"{_STORAGE}/run_storage.py",
        anchor="raise self._not_gathered(error) from error",
        replacement="raise",
        tests=(
            f"{_TESTS}/test_run_storage.py"
            "::test_the_error_for_a_host_lost_at_the_last_gather_names_what_is_done_and_what_remains",
        ),
    ),
    Mutation(
        name="silent-strangers-occupy-all-threads",
        claims=("safety: Strangers connect to a staging relay",),
        file="infra/node/storage/peer_connection.py",
        anchor="_MOST_HANDSHAKES = 32",
        replacement="_MOST_HANDSHAKES = 320",
        tests=(
            "tests/infra/node/storage/test_peer_connection.py"
            "::test_200_silent_connections_use_few_threads_and_do_not_delay_a_peer",
        ),
    ),
    Mutation(
        name="peers-need-no-token",
        claims=("safety: Strangers connect to a staging relay",),
        file="infra/node/storage/peer_connection.py",
        anchor='if not _is_same(theirs.proof, _proof(token, "client", own, theirs.nonce)):',
        replacement="if not theirs.proof:",
        tests=(f"{_TESTS}/test_staging.py::test_a_client_without_the_token_receives_nothing",),
    ),
    Mutation(
        name="hosts-that-failed-twice-kept",
        claims=("resumes: a node is lost permanently and replaced by a spare",),
        file="infra/head/retries.py",
        anchor="if times >= _UNFIT}",
        replacement="if times > _UNFIT}",
        tests=(
            "tests/infra/head/test_retries.py"
            "::test_a_host_that_failed_twice_is_named_and_replaced_by_a_spare_with_enough_slots",
        ),
    ),
    Mutation(
        name="same-failure-retried-forever",
        claims=("supervision: one command met the same failure three times in a row",),
        file="infra/head/retries.py",
        anchor="if error.retryable and len(last) == MOST_ALIKE and",
        replacement="if error.retryable and len(last) > MOST_ALIKE and",
        tests=("tests/infra/head/test_retries.py::test_the_third_failure_that_differs_only_in_numbers_is_not_retried",),
    ),
]
