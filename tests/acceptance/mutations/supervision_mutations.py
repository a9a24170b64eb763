"""Mutations of starting, watching and ending ranks, on one machine and over hosts, and of the preflight."""

from tests.acceptance.mutations.mutation import Mutation

_NONE_LEFT = "proven: **No process is left behind.**"
_ATTEMPTS = "infra/node/attempts"
_LAUNCH = "infra/head/launch"
_GUARD = "tests/infra/node/attempts/test_process_guard.py"
_STOPPING = "tests/infra/node/attempts/test_stopping.py"
_SUPERVISION = "tests/infra/head/launch/test_supervision.py"
_FAILURES = "tests/infra/head/launch/test_failures.py"
_SSH = "tests/infra/head/hosts/test_ssh.py"
_CHECKLIST = "tests/infra/head/preflight/test_checklist.py"
_ENVIRONMENT = "tests/infra/node/attempts/test_rank_environment.py"

MUTATIONS = [
    Mutation(
        name="exit-codes-ignored",
        claims=(_NONE_LEFT, "faults: a rank is killed"),
        file=f"{_ATTEMPTS}/exit_record.py",
        anchor="return self.returncode == 0 and self.cause in",
        replacement="return self.returncode is not None and self.cause in",
        tests=(f"{_GUARD}::test_the_output_and_exit_code_of_a_rank_are_recorded",),
    ),
    Mutation(
        name="guards-end-with-the-session-of-their-launcher",
        claims=("faults: a rank is killed",),
        file=f"{_ATTEMPTS}/process_guard.py",
        anchor="os.setsid()",
        replacement="os.setpgid(0, 0)",
        tests=("tests/infra/head/launch/test_local_launch.py::test_the_first_rank_that_fails_ends_the_others",),
    ),
    Mutation(
        name="killed-ranks-not-noticed-by-the-head",
        claims=("faults: a rank is killed",),
        file=f"{_LAUNCH}/supervision.py",
        anchor="bad = self._gone or any(record.is_failure for record in self.records.values())",
        replacement="bad = self._gone",
        tests=(f"{_SUPERVISION}::test_the_first_bad_exit_record_is_a_failure_and_the_ranks_error_is_copied",),
    ),
    Mutation(
        name="stopped-ranks-not-noticed",
        claims=("proven: when the rank is stopped or hangs", "faults: a rank is stopped"),
        file=f"{_ATTEMPTS}/watchdog.py",
        anchor="        if activity.state == _STOPPED:\n            return True\n",
        replacement="        if activity.state == _STOPPED:\n            return False\n",
        tests=(f"{_GUARD}::test_a_rank_stopped_by_sigstop_is_detected_and_killed",),
    ),
    Mutation(
        name="deadlines-of-phases-not-enforced",
        claims=("proven: when the rank is stopped or hangs",),
        file=f"{_ATTEMPTS}/watchdog.py",
        anchor="(seconds := time.monotonic() - beat.since) > beat.limit:",
        replacement="(seconds := time.monotonic() - beat.since) > 10 * beat.limit + 60:",
        tests=(f"{_GUARD}::test_a_rank_that_exceeds_a_phase_deadline_is_ended_and_its_log_shows_where_it_hangs",),
    ),
    Mutation(
        name="ranks-outlive-their-launcher",
        claims=("proven: when the launcher is gone", "faults: DeepSpeed's launcher is killed"),
        file=f"{_ATTEMPTS}/watchdog.py",
        anchor="        if self._has_lost_parent:\n            return Cause.PARENT",
        replacement="        if self._has_lost_parent and self._head_died:\n            return Cause.PARENT",
        tests=(f"{_GUARD}::test_the_rank_ends_when_the_guards_parent_is_killed",),
    ),
    Mutation(
        name="ranks-outlive-their-head",
        claims=("proven: when the flow is gone", "faults: the head is killed"),
        file=f"{_ATTEMPTS}/watchdog.py",
        anchor="        if self._head_died:\n            return Cause.HEAD",
        replacement="        if self._head_died and self._has_lost_parent:\n            return Cause.HEAD",
        tests=(f"{_GUARD}::test_the_rank_ends_when_the_head_is_killed",),
    ),
    Mutation(
        name="expired-leases-ignored",
        claims=("proven: on several hosts, after `cluster.lease_seconds`", "faults: the head is killed"),
        file=f"{_ATTEMPTS}/watchdog.py",
        anchor="(age := head_lease.age_seconds(self._this.folder)) > tolerated:",
        replacement="(age := head_lease.age_seconds(self._this.folder)) > tolerated + 3600:",
        tests=(f"{_GUARD}::test_a_rank_runs_until_its_lease_is_no_longer_renewed",),
    ),
    Mutation(
        name="children-of-ranks-left-behind",
        claims=(_NONE_LEFT,),
        file=f"{_ATTEMPTS}/process_guard.py",
        anchor="left = processes.end(processes.in_session(child.pid), grace_seconds=0)",
        replacement="left = processes.end(lambda pid: pid == child.pid, grace_seconds=0)",
        tests=(f"{_GUARD}::test_child_processes_that_a_rank_leaves_behind_are_ended",),
    ),
    Mutation(
        name="ranks-outlive-their-guard",
        claims=(_NONE_LEFT,),
        file=f"{_ATTEMPTS}/process_guard.py",
        anchor="    processes.die_with_parent(signal.SIGKILL)\n    if",
        replacement="    if",
        tests=(f"{_GUARD}::test_killing_the_guard_kills_its_rank",),
    ),
    Mutation(
        name="sigterm-kills-at-once",
        claims=("proven: SIGTERM to any of these processes ends a run after the current step",),
        file=f"{_ATTEMPTS}/watchdog.py",
        anchor="            os.kill(self._pid, signal.SIGTERM)",
        replacement="            os.kill(self._pid, signal.SIGKILL)",
        tests=(f"{_STOPPING}::test_sigterm_to_a_guard_gives_its_rank_time_to_save",),
    ),
    Mutation(
        name="ordered-saves-cut-off",
        claims=("safety: A run is cancelled, and the save of its last checkpoint is cut off",),
        file=f"{_ATTEMPTS}/watchdog.py",
        anchor="        if self._this.is_stop_ordered and self._is_saving:\n            return None\n",
        replacement="",
        tests=(f"{_STOPPING}::test_a_save_that_the_head_ordered_is_completed_without_the_head",),
    ),
    Mutation(
        name="ctrl-c-gives-no-time-to-save",
        claims=("faults: Ctrl-C",),
        file="infra/head/stop_signal.py",
        anchor="return not isinstance(error, Exception) and not is_second",
        replacement="return isinstance(error, Stopped) and not is_second",
        tests=(
            "tests/infra/head/storage/test_run_storage.py"
            "::test_the_last_checkpoint_is_gathered_after_a_stop_but_not_after_a_killed_rank",
            "tests/infra/head/launch/test_local_launch.py"
            "::test_a_signal_gives_ranks_time_to_save_before_the_head_ends_by_it",
        ),
    ),
    Mutation(
        name="second-ctrl-c-interrupts-the-end",
        claims=("faults: Ctrl-C, twice", "safety: Ranks keep training after Ctrl-C is pressed twice"),
        file=f"{_LAUNCH}/earlier_attempts.py",
        anchor='    with undisturbed("ending the ranks on all hosts, which takes a minute at most"):\n',
        replacement="    if True:\n",
        tests=(
            "tests/infra/head/launch/test_earlier_attempts.py"
            "::test_repeated_ctrl_c_does_not_stop_ranks_on_hosts_from_being_ended",
        ),
    ),
    Mutation(
        name="launchers-killed-on-hosts-not-blamed",
        claims=("faults: pdsh is killed",),
        file=f"{_LAUNCH}/failures.py",
        anchor="(record.cause != Cause.PARENT or is_over_hosts)",
        replacement="record.cause != Cause.PARENT",
        tests=(f"{_FAILURES}::test_a_launcher_that_was_killed_on_a_host_is_named_before_ranks_that_lost_that_host",),
    ),
    Mutation(
        name="hosts-of-lost-connections-blamed",
        claims=("supervision: is named only if no other failed",),
        file=f"{_LAUNCH}/failures.py",
        anchor="diagnosis, record, rank = min(failed,",
        replacement="diagnosis, record, rank = max(failed,",
        tests=(f"{_FAILURES}::test_a_rank_that_lost_or_waited_for_a_peer_is_not_the_cause",),
    ),
    Mutation(
        name="failing-disks-without-host-and-remedy",
        claims=("safety: A failing disk looks like a bug", "resumes: a node's disk is full when it saves"),
        file=f"{_LAUNCH}/failures.py",
        anchor="if not isinstance(error, DiskFull | DiskFailed | StorageError):",
        replacement="if isinstance(error, DiskFull | DiskFailed | StorageError):",
        tests=(
            "tests/infra/head/launch/test_disk_failures.py::test_an_error_of_a_ranks_disk_names_rank_host_path_and_remedy",
        ),
    ),
    Mutation(
        name="restarted-head-ends-its-ranks",
        claims=("faults: the head is killed, and started again at once",),
        file=f"{_LAUNCH}/supervision.py",
        anchor="        head_lease.begin(self.head_folder)\n        while",
        replacement="        while",
        tests=(
            "tests/infra/head/launch/test_cluster_launch.py"
            "::test_a_restarted_head_renews_the_lease_at_once_and_ends_ranks_that_are_not_adopted",
        ),
    ),
    Mutation(
        name="silent-hosts-never-lost",
        claims=("faults: a node's cable is pulled", "faults: a node loses power"),
        file=f"{_LAUNCH}/supervision.py",
        anchor="host.is_lost = host.is_silent and seconds > (self.this.lease_seconds or 0)",
        replacement="host.is_lost = host.is_silent and seconds > 60 * (self.this.lease_seconds or 0)",
        tests=(f"{_SUPERVISION}::test_a_silent_host_causes_a_warning_and_is_lost_when_the_lease_expires",),
    ),
    Mutation(
        name="restarted-hosts-not-noticed",
        claims=("faults: a node loses power",),
        file=f"{_LAUNCH}/supervision.py",
        anchor="if host.boot_id not in (None, boot_id):",
        replacement="if not boot_id:",
        tests=(f"{_SUPERVISION}::test_a_restarted_host_is_lost_at_once",),
    ),
    Mutation(
        name="broken-sessions-not-opened-again",
        claims=("faults: sshd of a node stops while it trains",),
        file=f"{_LAUNCH}/host_session.py",
        anchor="            if self._closed.wait(seconds):\n                return",
        replacement="            self._closed.wait(seconds)\n            return",
        tests=("tests/infra/head/launch/test_host_session.py::test_a_broken_session_reports_the_cause_and_reconnects",),
    ),
    Mutation(
        name="refused-connections-not-explained",
        claims=("faults: sshd of a node is down",),
        file="infra/head/hosts/ssh_errors.py",
        anchor='        "Connection refused",\n',
        replacement='        "Connection was refused",\n',
        tests=(f"{_SSH}::test_a_host_that_cannot_be_reached_is_named_with_a_remedy",),
    ),
    Mutation(
        name="unknown-names-not-explained",
        claims=("faults: an unknown host name",),
        file="infra/head/hosts/ssh_errors.py",
        anchor='        "Could not resolve hostname",\n',
        replacement='        "could not resolve hostname",\n',
        tests=(f"{_SSH}::test_a_host_that_cannot_be_reached_is_named_with_a_remedy",),
    ),
    Mutation(
        name="changed-host-keys-accepted",
        claims=("faults: a node has another host key",),
        file="infra/head/hosts/ssh.py",
        anchor="StrictHostKeyChecking yes",
        replacement="StrictHostKeyChecking no",
        tests=(
            f"{_SSH}::test_an_unknown_host_key_is_refused_with_the_command_that_adds_it",
            f"{_SSH}::test_a_changed_host_key_is_refused_with_the_command_that_removes_the_old_one",
        ),
    ),
    Mutation(
        name="ports-in-use-count-as-free",
        claims=("faults: the port is taken",),
        file="infra/node/ports.py",
        anchor="        if error.errno == errno.EADDRINUSE:\n            return False",
        replacement="        if error.errno == errno.EADDRINUSE:\n            return True",
        tests=("tests/infra/node/test_ports.py::test_a_port_in_use_is_refused_with_its_number",),
    ),
    Mutation(
        name="hosts-with-0-slots-accepted",
        claims=("faults: slots=0",),
        file="infra/head/hosts/hostfile.py",
        anchor="if not 1 <= slots <= MAX_SLOTS:",
        replacement="if not 0 <= slots <= MAX_SLOTS:",
        tests=("tests/infra/head/hosts/test_hostfile.py::test_an_invalid_line_is_refused_with_its_number",),
    ),
    Mutation(
        name="two-names-of-one-machine-accepted",
        claims=("faults: one machine listed twice",),
        file="infra/head/preflight/agreement.py",
        anchor='        if len(hosts) > 1:\n            yield (\n                f"{names(hosts)}: these names',
        replacement='        if len(hosts) > 2:\n            yield (\n                f"{names(hosts)}: these names',
        tests=(f"{_CHECKLIST}::test_a_host_with_a_fault_is_named_with_the_remedy",),
    ),
    Mutation(
        name="versions-of-torch-not-compared",
        claims=("faults: a node has another torch",),
        file="infra/head/preflight/agreement.py",
        anchor="for package in PACKAGES:",
        replacement="for package in PACKAGES[1:]:",
        tests=(f"{_CHECKLIST}::test_a_host_with_a_fault_is_named_with_the_remedy",),
    ),
    Mutation(
        name="locks-of-killed-compiles-stay",
        claims=("faults: a killed compilation left its lock",),
        file="infra/node/compiled_operators.py",
        anchor='return not any(_opens(process, status) for process in Path("/proc").glob("[0-9]*"))',
        replacement='return not any(Path("/proc").glob("[0-9]*"))',
        tests=("tests/infra/node/test_compiled_operators.py::test_the_lock_of_a_killed_compile_is_removed",),
    ),
    Mutation(
        name="locks-on-shared-disks-removed",
        claims=("safety: The lock of a compile that is running on another host is removed",),
        file="infra/node/compiled_operators.py",
        anchor="    if not is_on_local_disk(lock):\n",
        replacement="    if not lock.name:\n",
        tests=("tests/infra/node/test_compiled_operators.py::test_a_lock_that_another_machine_may_hold_stays",),
    ),
    Mutation(
        name="shells-on-hosts-expand-arguments",
        claims=("faults: $(...) and quotes in an environment variable and in the root's name",),
        file="infra/head/hosts/ssh.py",
        anchor=r"""argument.replace("'", "'\"'\"'")""",
        replacement="argument",
        tests=(f"{_SSH}::test_a_shell_splits_a_quoted_line_into_exactly_the_arguments",),
    ),
    Mutation(
        name="secrets-sent-to-hosts",
        claims=("faults: a secret in the environment",),
        file=f"{_ATTEMPTS}/rank_environment.py",
        anchor="if _LIBRARIES.fullmatch(name) and not _SECRET.search(name) and not _is_own(name)",
        replacement="if _LIBRARIES.fullmatch(name) and not _is_own(name)",
        tests=(f"{_ENVIRONMENT}::test_hosts_get_settings_and_requested_variables_of_the_head_and_no_others",),
    ),
    Mutation(
        name="secrets-passed-to-ranks",
        claims=("faults: a secret in the environment", "safety: The key leaks"),
        file=f"{_ATTEMPTS}/rank_environment.py",
        anchor="return {name: value for name, value in parent.items() if _is_allowed(name)}",
        replacement="return dict(parent)",
        tests=(f"{_ENVIRONMENT}::test_no_secret_of_the_parent_reaches_a_rank",),
    ),
    Mutation(
        name="secrets-of-urls-not-redacted",
        claims=("safety: The key leaks",),
        file=f"{_ATTEMPTS}/rank_environment.py",
        anchor="            text = text.replace(value, _HIDDEN)",
        replacement="            text = text.replace(name, _HIDDEN)",
        tests=(f"{_ENVIRONMENT}::test_redact_removes_passwords_in_urls_and_values_of_variables_with_secret_names",),
    ),
    Mutation(
        name="hosts-without-code-asked-to-run-it",
        claims=("safety: A host did not receive the code",),
        file=f"{_LAUNCH}/earlier_attempts.py",
        anchor="asked = [host for host in this.hosts or {} if host not in without]",
        replacement="asked = list(this.hosts or {})",
        tests=(
            "tests/infra/head/launch/test_earlier_attempts.py"
            "::test_a_host_that_did_not_get_the_code_is_not_asked_to_run_it",
        ),
    ),
    Mutation(
        name="archives-of-any-size-unpacked",
        claims=("safety: A host sends an archive of logs that fills memory",),
        file=f"{_LAUNCH}/log_collection.py",
        anchor="    if len(content) > most:\n",
        replacement="    if len(content) < most < 0:\n",
        tests=("tests/infra/head/launch/test_log_collection.py",),
    ),
    Mutation(
        name="hosts-may-send-logs-of-other-ranks",
        claims=("safety: A host sends an archive of logs that fills memory",),
        file=f"{_LAUNCH}/log_collection.py",
        anchor="return found is not None and int(found[1]) in ranks",
        replacement="return found is not None and bool(ranks)",
        tests=(
            "tests/infra/head/launch/test_log_collection.py::test_a_host_cannot_write_the_logs_of_other_hosts_ranks",
        ),
    ),
    Mutation(
        name="escape-sequences-shown",
        claims=("safety: A host or a store answers with escape sequences",),
        file=f"{_ATTEMPTS}/log_tail.py",
        anchor='return _CONTROLS.sub("", _ESCAPES.sub("", text))',
        replacement='return _CONTROLS.sub("", text) if len(text) > _LINE_CHARACTERS else text',
        tests=(
            "tests/flows/cli/test_terminal.py::test_escape_sequences_from_stores_and_hosts_are_removed_from_output",
        ),
    ),
]
