"""Mutations of checkpoints on one disk: which one a run resumes from, what is pruned, and how files are written."""

from tests.acceptance.mutations.mutation import Mutation

_RESUME = "tests/t5train/checkpoint/test_resume.py"
_SIDECAR = "tests/t5train/checkpoint/test_sidecar.py"
_RECORDS = "tests/t5train/records/test_stage_records.py"

MUTATIONS = [
    Mutation(
        name="unreadable-files-count-as-damaged",
        claims=("safety: A transient read error (EIO", "resumes: a file cannot be read now"),
        file="t5train/checkpoint/tags.py",
        anchor="    except DigestMismatch as error:\n        raise IncompleteCheckpoint(f",
        replacement="    except Exception as error:\n        raise IncompleteCheckpoint(f",
        tests=(f"{_RESUME}::test_an_unreadable_file_stops_the_start_and_no_checkpoint_is_lost",),
    ),
    Mutation(
        name="sidecars-of-other-versions-count-as-damaged",
        claims=("safety: A sidecar or manifest of another version", "resumes: an intact `rank-NNNNN.json` has a field"),
        file="t5train/checkpoint/sidecar.py",
        anchor="raise unknown_version(str(path), error) from error",
        replacement="raise IncompleteCheckpoint(str(path)) from error",
        tests=(f"{_RESUME}::test_a_sidecar_of_another_version_stops_the_start",),
    ),
    Mutation(
        name="manifests-of-other-versions-count-as-damaged",
        claims=("safety: A sidecar or manifest of another version",),
        file="t5train/records/stage_records.py",
        anchor='if is_intact(content, cls.model_fields["kind"].default):',
        replacement='if is_intact(content, ""):',
        tests=(f"{_RECORDS}::test_an_intact_manifest_of_another_version_is_refused_and_not_made_again",),
    ),
    Mutation(
        name="runs-without-a-checkpoint-begin-at-step-0",
        claims=("safety: All checkpoints are damaged or gone",),
        file="t5train/checkpoint/resume_point.py",
        anchor="    raise nothing_verifies(run_folder, reasons)",
        replacement="    return None",
        tests=(
            f"{_RESUME}::test_a_run_whose_only_checkpoint_is_damaged_begins_again_only_when_asked_to",
            f"{_RESUME}::test_a_run_whose_checkpoints_are_gone_does_not_quietly_begin_again",
        ),
    ),
    Mutation(
        name="unfinished-begin-again-forgotten",
        claims=("safety: `--begin-again` fails early",),
        file="t5train/checkpoint/resume_point.py",
        anchor="    if is_asked_to_begin_again(run_folder):\n        raise SpecError(",
        replacement="    if not run_folder.name:\n        raise SpecError(",
        tests=(
            "tests/flows/cli/test_refused_runs.py"
            "::test_a_start_after_an_unfinished_begin_again_is_refused_with_how_to_repeat_or_withdraw_it",
        ),
    ),
    Mutation(
        name="newer-checkpoints-pruned",
        claims=("safety: Pruning deletes a checkpoint newer than",),
        file="t5train/checkpoint/saving.py",
        anchor='name.startswith("step-") and name > begun_from',
        replacement='name.startswith("step-") and name < begun_from',
        tests=(f"{_RESUME}::test_pruning_never_deletes_a_checkpoint_newer_than_the_one_training_resumed_from",),
    ),
    Mutation(
        name="unreadable-results-made-again",
        claims=("safety: A finished stage cannot be read",),
        file="t5train/records/stage_records.py",
        anchor='    except (RecordError, DigestMismatch) as error:\n        _log.warning("%s: making it again", error)',
        replacement='    except Exception as error:\n        _log.warning("%s: making it again", error)',
        tests=(f"{_RECORDS}::test_a_record_that_cannot_be_read_now_is_not_made_again",),
    ),
    Mutation(
        name="unreadable-folders-look-empty",
        claims=("safety: A folder that cannot be read looks empty",),
        file="t5train/files/presence.py",
        anchor="return sorted(path.name for path in folder.iterdir())\n    except ABSENT:",
        replacement="return sorted(path.name for path in folder.iterdir())\n    except (*ABSENT, Unreadable):",
        tests=(f"{_RESUME}::test_an_unreadable_checkpoints_folder_is_refused_and_not_taken_for_empty",),
    ),
    Mutation(
        name="digests-not-verified-before-a-resume",
        claims=(
            "resumes: damaged: a file is missing, or was read and differs",
            "resumes: complete, every file has its digest",
        ),
        file="t5train/checkpoint/tags.py",
        anchor="        _verify(folder, files, progress)",
        replacement="        progress(str(folder), 0, len(files))",
        tests=(
            f"{_SIDECAR}::test_a_file_with_a_flipped_bit_is_named",
            f"{_RESUME}::test_a_run_resumes_from_the_previous_checkpoint_if_the_newest_is_damaged",
        ),
    ),
    Mutation(
        name="missing-files-accepted",
        claims=("resumes: damaged: a file is missing, or was read and differs",),
        file="t5train/records/digests.py",
        anchor="    except ABSENT:\n        raise DigestMismatch(",
        replacement="    except ABSENT:\n        return\n        raise DigestMismatch(",
        tests=(f"{_RECORDS}::test_a_damaged_file_is_named_and_the_record_is_not_reused",),
    ),
    Mutation(
        name="last-rank-may-be-missing",
        claims=("resumes: never finished: a rank's `rank-NNNNN.json` is missing",),
        file="t5train/checkpoint/tags.py",
        anchor="missing = sorted(set(range(first.world_size)) -",
        replacement="missing = sorted(set(range(first.world_size - 1)) -",
        tests=(f"{_SIDECAR}::test_complete_tags_are_sorted_newest_first_and_exclude_unfinished_ones",),
    ),
    Mutation(
        name="ranks-of-two-runs-mixed",
        claims=("resumes: damaged: a file is missing, or was read and differs",),
        file="t5train/checkpoint/tags.py",
        anchor='    "run_fingerprint",\n    "step",',
        replacement='    "step",',
        tests=(f"{_SIDECAR}::test_a_tag_whose_sidecars_disagree_is_incomplete_and_the_field_is_named",),
    ),
    Mutation(
        name="killed-first-save-counts-as-lost",
        claims=(
            "resumes: never finished: a rank's `rank-NNNNN.json` is missing",
            "resumes: a node loses power while it saves a checkpoint, ten times in a row",
        ),
        file="t5train/checkpoint/resume_point.py",
        anchor="        return not set(present).issuperset(",
        replacement="        return len(present) < 1 and not set(present).issuperset(",
        tests=(
            f"{_RESUME}::test_a_run_that_was_killed_in_its_first_save_begins_at_step_0",
            f"{_RESUME}::test_damaged_checkpoints_newer_than_the_one_resumed_from_are_set_aside",
        ),
    ),
    Mutation(
        name="pickles-that-no-rank-wrote-accepted",
        claims=(
            "safety: A checkpoint holds a pickle that no rank wrote",
            "resumes: it holds a `*.pt` file that no rank recorded",
        ),
        file="t5train/files/run_folder.py",
        anchor='name.endswith(".pt") and name not in recorded',
        replacement='name.endswith(".pth") and name not in recorded',
        tests=(
            f"{_RESUME}::test_a_checkpoint_with_a_file_that_no_rank_recorded_is_refused_and_not_skipped",
            f"{_SIDECAR}::test_a_pickle_that_no_rank_wrote_is_refused",
        ),
    ),
    Mutation(
        name="times-of-files-decide-which-is-newest",
        claims=("resumes: clock skew",),
        file="t5train/checkpoint/tags.py",
        anchor="found.append((sidecars[0].step, name))",
        replacement="found.append((-folder.stat().st_mtime_ns, name))",
        tests=(f"{_SIDECAR}::test_complete_tags_are_sorted_newest_first_and_exclude_unfinished_ones",),
    ),
    Mutation(
        name="checkpoints-of-other-runs-resumed",
        claims=("proven: **Resuming is exact.**",),
        file="t5train/checkpoint/resume.py",
        anchor="if written[0].run_fingerprint != own:",
        replacement="if not written[0].run_fingerprint:",
        tests=(f"{_RESUME}::test_a_checkpoint_of_another_run_is_never_resumed",),
    ),
    Mutation(
        name="files-renamed-before-they-are-on-disk",
        claims=("resumes: a node loses power while it saves a checkpoint, ten times in a row",),
        file="t5train/files/atomic.py",
        anchor="            os.fsync(file.fileno())\n        temporary.replace(path)",
        replacement="        temporary.replace(path)",
        tests=("tests/t5train/files/test_atomic.py::test_a_writer_killed_at_any_step_leaves_a_complete_file",),
    ),
    Mutation(
        name="files-overwritten-in-place",
        claims=("resumes: a node loses power while it saves a checkpoint, ten times in a row",),
        file="t5train/files/atomic.py",
        anchor="        temporary.replace(path)\n",
        replacement="        path.write_bytes(temporary.read_bytes())\n        temporary.unlink()\n",
        tests=("tests/t5train/files/test_atomic.py::test_a_writer_killed_at_any_step_leaves_a_complete_file",),
    ),
    Mutation(
        name="errors-name-temporary-files",
        claims=("safety: A system call on a run's files fails at any point",),
        file="t5train/files/atomic.py",
        anchor="named = _naming(path, temporary, error)",
        replacement="named = error",
        tests=(
            "tests/t5train/files/test_os_errors.py"
            "::test_a_file_that_cannot_be_replaced_is_named_instead_of_its_temporary_file",
        ),
    ),
    Mutation(
        name="full-disks-not-explained-by-torchs-error",
        claims=("resumes: a node's disk is full when it saves", "safety: A failing disk looks like a bug"),
        file="t5train/checkpoint/save_errors.py",
        anchor="raise OSError(reason.errno, reason.strerror, str(folder)) from error",
        replacement="raise error from reason",
        tests=("tests/t5train/checkpoint/test_save_errors.py::test_the_report_names_the_folder_and_the_reason",),
    ),
    Mutation(
        name="errors-of-flock-passed-on",
        claims=("safety: A file system without flock",),
        file="t5train/files/locks.py",
        anchor="if error.errno in _UNSUPPORTED:",
        replacement="if error.errno == errno.ENOTSUP and not _UNSUPPORTED:",
        tests=(
            "tests/t5train/files/test_locks.py::test_a_file_system_without_locks_is_named_with_the_path_and_the_remedy",
        ),
    ),
]
