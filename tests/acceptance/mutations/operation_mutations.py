"""Mutations of Prefect's server and workers, of environments on hosts, of tasks, and of the nightly regression."""

from tests.acceptance.mutations.mutation import Mutation

_SERVER = "flows/server"
_WORKERS = "flows/workers"
_TEST_SERVER = "tests/deployments/test_server.py"
_PREFECT_SERVER = "tests/flows/server/test_prefect_server.py"
_MONITOR = "tests/deployments/test_run_monitor.py"
_INSTALLATION = "tests/infra/head/environments/test_environment_installation.py"
_FINDINGS = "tests/t5train/regression/test_regression_findings.py"

MUTATIONS = [
    Mutation(
        name="server-requires-no-key",
        claims=(
            "safety: Another user of the machine starts a flow run",
            "safety: The API or a websocket without the key",
        ),
        file=f"{_SERVER}/prefect_server.py",
        anchor='        "PREFECT_SERVER_API_AUTH_STRING": key,\n',
        replacement="",
        tests=(f"{_TEST_SERVER}::test_without_the_key_a_server_answers_only_the_health_check",),
    ),
    Mutation(
        name="key-readable-by-others",
        claims=("safety: Another user of the machine starts a flow run", "safety: The key leaks"),
        file=f"{_SERVER}/api_key.py",
        anchor="atomic.replacing(path_of(home), mode=0o600)",
        replacement="atomic.replacing(path_of(home))",
        tests=("tests/flows/server/test_api_key.py::test_each_start_makes_a_new_key_that_only_its_owner_can_read",),
    ),
    Mutation(
        name="other-origins-may-use-the-server",
        claims=("safety: A web page starts a run",),
        file=f"{_SERVER}/prefect_server.py",
        anchor='"PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS": server,',
        replacement='"PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS": "*",',
        tests=(f"{_TEST_SERVER}::test_cors_requests_of_other_origins_are_refused",),
    ),
    Mutation(
        name="changes-need-no-csrf-token",
        claims=("safety: A web page starts a run",),
        file=f"{_SERVER}/prefect_settings.py",
        anchor='"PREFECT_SERVER_API_CSRF_PROTECTION_ENABLED": "true"',
        replacement='"PREFECT_SERVER_API_CSRF_PROTECTION_ENABLED": "false"',
        tests=(
            "tests/flows/server/test_prefect_settings.py"
            "::test_hostile_settings_in_environment_profile_and_files_change_nothing",
            f"{_TEST_SERVER}::test_a_change_requires_the_key_and_a_csrf_token",
        ),
    ),
    Mutation(
        name="runs-may-bring-an-environment",
        claims=("safety: A run brings a command or environment of its own",),
        file="flows/deployment/deploy.py",
        anchor='_NOT_FROM_OUTSIDE = ("command", "env", "working_dir")',
        replacement='_NOT_FROM_OUTSIDE = ("command", "working_dir")',
        tests=(
            "tests/flows/deployment/test_deploy.py"
            "::test_a_run_cannot_choose_the_command_environment_or_folder_of_its_process",
        ),
    ),
    Mutation(
        name="port-of-a-dead-server-given-up",
        claims=("safety: Somebody takes the server's port",),
        file=f"{_SERVER}/prefect_server.py",
        anchor="        bound.shutdown(socket.SHUT_RDWR)",
        replacement="        bound.close()",
        tests=(f"{_PREFECT_SERVER}::test_the_port_of_a_server_that_died_refuses_clients_and_cannot_be_taken",),
    ),
    Mutation(
        name="new-servers-have-the-old-key",
        claims=(
            "safety: Clients sent a key to another process",
            "safety: Somebody takes the server's port",
        ),
        file=f"{_SERVER}/prefect_server.py",
        anchor="_embedded_environment(home, port, api_key.renew(home))",
        replacement="_embedded_environment(home, port, api_key.keep(home))",
        tests=(f"{_PREFECT_SERVER}::test_a_new_server_has_a_new_key_even_while_flows_of_the_last_one_run",),
    ),
    Mutation(
        name="server-listens-on-all-interfaces",
        claims=("safety: The server is reachable from the network",),
        file=f"{_SERVER}/prefect_server.py",
        anchor="bound = socket.create_server((host, port),",
        replacement='bound = socket.create_server(("", port),',
        tests=(f"{_TEST_SERVER}::test_a_server_listens_on_loopback_alone",),
    ),
    Mutation(
        name="settings-of-the-current-folder-read",
        claims=("safety: Settings planted in the current folder",),
        file=f"{_SERVER}/prefect_settings.py",
        anchor='NEUTRAL_FOLDER = "/"',
        replacement='NEUTRAL_FOLDER = "."',
        tests=(f"{_PREFECT_SERVER}::test_settings_in_the_current_folder_choose_no_server_and_run_no_code",),
    ),
    Mutation(
        name="key-sent-to-a-proxy",
        claims=("safety: The key goes to an HTTP proxy",),
        file=f"{_SERVER}/prefect_server.py",
        anchor='return dict.fromkeys(names, ",".join(with_ours))',
        replacement='return dict.fromkeys(names, ",".join(hosts))',
        tests=(f"{_PREFECT_SERVER}::test_a_server_on_this_machine_is_never_contacted_through_a_proxy",),
    ),
    Mutation(
        name="profiles-written-without-verification",
        claims=("safety: Your own Prefect profiles are overwritten",),
        file=f"{_SERVER}/prefect_profile.py",
        anchor="if _parse(self.path, text) != wanted:",
        replacement="if not _parse(self.path, text):",
        tests=(
            "tests/flows/server/test_prefect_profile.py"
            "::test_a_profiles_file_that_cannot_be_restored_is_left_unchanged_and_the_error_has_a_remedy",
        ),
    ),
    Mutation(
        name="password-of-the-database-shown",
        claims=("safety: The database's password of a team's server leaks",),
        file=f"{_SERVER}/team_server.py",
        anchor='lines[0].replace(str(password), "[secret]") if password else lines[0]',
        replacement="lines[0] + str(password or '')",
        tests=("tests/flows/server/test_team_server.py",),
    ),
    Mutation(
        name="workers-end-without-a-server",
        claims=("safety: Prefect's server is away for minutes",),
        file=f"{_WORKERS}/head_worker.py",
        anchor="        except Exception as error:  # any error",
        replacement="        except KeyError as error:  # any error",
        tests=("tests/deployments/test_outage.py",),
    ),
    Mutation(
        name="cancelled-runs-train-on",
        claims=("safety: A run that was cancelled during an outage trains on",),
        file=f"{_WORKERS}/cancelled_runs.py",
        anchor="        for process in its_processes:\n            process.send(number)\n",
        replacement="",
        tests=(f"{_MONITOR}::test_a_cancelled_run_that_prefect_did_not_end_is_told_to_save_and_then_killed",),
    ),
    Mutation(
        name="crashing-runs-resumed-forever",
        claims=("safety: A run that crashes at once is resumed forever",),
        file=f"{_WORKERS}/run_monitor.py",
        anchor="    if resumes > MOST_RESUMES:\n",
        replacement="    if resumes > MOST_RESUMES + 1:\n",
        tests=(f"{_MONITOR}::test_a_run_that_keeps_crashing_without_a_new_checkpoint_is_given_up",),
    ),
    Mutation(
        name="runs-of-other-machines-taken",
        claims=("safety: A live run is closed or started a second time",),
        file=f"{_WORKERS}/head_worker.py",
        anchor="return before == worker or not (is_resumed or before in online)",
        replacement="return before == worker or not before in online",
        tests=(
            "tests/flows/workers/test_head_worker.py"
            "::test_a_run_stays_on_its_machine_unless_it_is_retried_while_that_is_off",
        ),
    ),
    Mutation(
        name="records-of-other-machines-judged",
        claims=("safety: A live run is closed or started a second time",),
        file=f"{_WORKERS}/run_records.py",
        anchor="(record := _read(file.fileno())) and record.is_from_here():",
        replacement="(record := _read(file.fileno())):",
        tests=("tests/flows/workers/test_run_records.py::test_records_of_other_machines_are_ignored",),
    ),
    Mutation(
        name="runs-of-dead-machines-keep-their-place",
        claims=("safety: A run whose machine is down keeps its place in the queue",),
        file=f"{_WORKERS}/lost_runs.py",
        anchor="- self._silent[run.id].since > SILENCE]",
        replacement="- self._silent[run.id].since > 100 * SILENCE]",
        tests=(
            f"{_MONITOR}::test_a_silent_run_of_a_machine_that_is_down_is_lost_even_if_the_servers_automation_forgot_it",
        ),
    ),
    Mutation(
        name="living-runs-resumed",
        claims=("safety: A run that cannot reach the server is taken for dead",),
        file=f"{_WORKERS}/run_monitor.py",
        anchor="if _is_of(worker, run) and not is_alive(run.id)]",
        replacement="if _is_of(worker, run)]",
        tests=(f"{_MONITOR}::test_a_lost_run_is_resumed_only_when_its_process_has_ended",),
    ),
    Mutation(
        name="permanent-errors-retried",
        claims=("supervision: the rank raised it: settings, data, a folder | no",),
        file="tasks/stage_tasks.py",
        anchor="return isinstance(error, T5TrainError) and error.retryable",
        replacement="return isinstance(error, T5TrainError)",
        tests=("tests/tasks/test_training_task.py::test_only_transient_failures_are_retried",),
    ),
    Mutation(
        name="folders-of-others-accept-a-run",
        claims=("safety: Another user creates the run's folder first",),
        file="infra/node/attempts/run_lock.py",
        anchor="found.st_mode & 0o022:",
        replacement="found.st_mode & 0o002:",
        tests=("tests/infra/node/attempts/test_run_lock.py::test_a_run_folder_that_others_may_write_to_is_refused",),
    ),
    Mutation(
        name="code-of-others-run",
        claims=("safety: Another user plants code, compiled operators or generated kernels",),
        file="infra/node/private_code.py",
        anchor="found.st_uid == os.getuid() and not found.st_mode & 0o077:",
        replacement="found.st_uid == os.getuid() and not found.st_mode & 0o007:",
        tests=(
            "tests/infra/node/test_private_code.py::test_code_in_a_folder_that_others_could_have_written_is_not_run",
        ),
    ),
    Mutation(
        name="operators-of-others-loaded",
        claims=("safety: Another user plants code, compiled operators or generated kernels",),
        file="infra/node/operator_folder.py",
        anchor="return private_folder(node_folders.node_folder() / FOLDERS[variable]) / _key(environment)",
        replacement="return node_folders.node_folder() / FOLDERS[variable] / _key(environment)",
        tests=(
            "tests/infra/node/test_operator_folder.py"
            "::test_operators_are_not_loaded_from_a_folder_that_others_can_write_to",
        ),
    ),
    Mutation(
        name="older-tls-accepted-by-dask",
        claims=("safety: Somebody sends code to the scheduler or the workers of Dask",),
        file="infra/node/tokenising/dask_settings.py",
        anchor="tls_min_version=ssl.TLSVersion.TLSv1_3",
        replacement="tls_min_version=ssl.TLSVersion.TLSv1_2",
        tests=("tests/infra/head/tokenising/test_refused_clients.py",),
    ),
    Mutation(
        name="tampered-wheels-stored",
        claims=("safety: A wheel for hosts is changed",),
        file="infra/node/environments/wheel_store.py",
        anchor="if (found := _digest(part)) != digest:",
        replacement="if not (found := _digest(part)):",
        tests=(f"{_INSTALLATION}::test_a_tampered_wheel_is_refused_by_the_host_and_leaves_no_environment",),
    ),
    Mutation(
        name="names-of-wheels-may-have-folders",
        claims=("safety: A wheelhouse names files outside its folder",),
        file="infra/node/environments/environment_installer.py",
        anchor="_NAME.fullmatch(name) and",
        replacement="_NAME.search(name) and",
        tests=(f"{_INSTALLATION}::test_a_host_checks_the_job_itself",),
    ),
    Mutation(
        name="folders-of-others-become-environments",
        claims=("safety: An installation overwrites an existing environment",),
        file="infra/node/environments/environment_folder.py",
        anchor="        if any(into.iterdir()):\n",
        replacement="        if not into.exists():\n",
        tests=(f"{_INSTALLATION}::test_a_folder_that_this_command_has_not_made_is_left_alone",),
    ),
    Mutation(
        name="slow-steps-not-found-by-the-regression",
        claims=("regression: a step computes 30% longer",),
        file="t5train/regression/regression_findings.py",
        anchor="SPREADS = 1.5",
        replacement="SPREADS = 15.0",
        tests=(_FINDINGS,),
    ),
    Mutation(
        name="only-higher-losses-found-by-the-regression",
        claims=("regression: learning rate doubled",),
        file="t5train/regression/regression_findings.py",
        anchor="change = abs(self.value / self.before - 1)",
        replacement="change = self.value / self.before - 1",
        tests=(f"{_FINDINGS}::test_a_loss_may_change_in_neither_direction",),
    ),
    Mutation(
        name="failures-without-a-baseline-not-found",
        claims=("regression: consolidation loses one tensor",),
        file="t5train/regression/regression_findings.py",
        anchor='found = [_finding(tonight, "failure", each) for each in tonight.problems]',
        replacement='found = [_finding(tonight, "failure", each) for each in tonight.problems if baseline]',
        tests=(f"{_FINDINGS}::test_a_failure_is_a_finding_without_a_baseline",),
    ),
]
