import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from infra.head.hosts.agents import Agents
from infra.head.hosts.hostfile import Host, Hosts
from infra.head.hosts.nodes import Nodes
from infra.head.launch import cluster_launch, supervision
from infra.head.launch.deepspeed_launcher import ClusterLauncher
from infra.head.launch.held_run import hold_run
from infra.head.launch.supervision import Supervision
from infra.node.attempts import attempt, head_lease
from infra.node.attempts.attempt import Attempt
from infra.node.code_bundle import own_bundle
from t5train.spec.rank_job import TrainJob
from tests.infra.conftest import Until
from tests.support.guarded_ranks import recorded_exit

PROGRAM = """
import os, signal, sys, time
from pathlib import Path
signal.signal(signal.SIGTERM, lambda *_: Path(sys.argv[1], "signalled").touch())
Path(sys.argv[1], "new").write_text("\\n".join(sorted(os.environ)) + os.getcwd())
Path(sys.argv[1], "new").rename(Path(sys.argv[1], "environment"))
time.sleep(600)
"""


@pytest.fixture
def this(tmp_path: Path, own_node_folder: None) -> Attempt:
    return attempt.begin(tmp_path / "run", None, 30.0, {"localhost": (0,)})


@pytest.fixture
def launcher(this: Attempt, tmp_path: Path) -> Iterator[ClusterLauncher]:
    launcher = ClusterLauncher(this.run_id)
    launcher.folder.mkdir()
    (launcher.folder / "ssh_config").write_text("ConnectTimeout 1\n")
    head_lease.begin(launcher.folder)
    yield launcher
    launcher.end()


def launch(launcher: ClusterLauncher, this: Attempt, tmp_path: Path, until: Until) -> None:
    launcher.start(this, [sys.executable, "-c", PROGRAM, str(tmp_path)], "cpu")
    until((tmp_path / "environment").exists)


def test_the_launcher_has_a_minimal_environment_and_is_ended_only_by_sigkill(
    launcher: ClusterLauncher, this: Attempt, tmp_path: Path, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "$(touch spread)")
    monkeypatch.setenv("UCX_TLS", "`touch spread`")
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "s3cret")
    launch(launcher, this, tmp_path, until)
    seen = (tmp_path / "environment").read_text()
    assert not any(name in seen for name in ("NCCL", "UCX", "MLFLOW"))
    assert {"DS_ACCELERATOR", "DS_ENV_FILE", "PDSH_SSH_ARGS", "PYTHONSAFEPATH"} <= set(seen.split("\n"))
    assert seen.endswith("/")
    assert launcher.is_alive
    launcher.end()
    assert not launcher.is_alive
    assert not (tmp_path / "signalled").exists()
    assert recorded_exit(attempt.read(launcher.folder), attempt.LAUNCHER)[2] == -9


def test_a_launcher_that_its_guard_has_not_recorded_yet_is_ended_before_its_guard(
    launcher: ClusterLauncher, this: Attempt, tmp_path: Path, until: Until
) -> None:
    launch(launcher, this, tmp_path, until)
    recorded = launcher.folder / f"{attempt.LAUNCHER}.pid"
    until(recorded.exists)
    recorded.unlink()
    launcher.end()
    assert recorded_exit(attempt.read(launcher.folder), attempt.LAUNCHER)[2] == -9


def test_a_restarted_head_renews_the_lease_at_once_and_ends_ranks_that_are_not_adopted(
    launcher: ClusterLauncher, this: Attempt, tmp_path: Path, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch(launcher, this, tmp_path, until)
    monkeypatch.setattr(supervision, "RENEW_SECONDS", 600.0)  # later renewals come too late
    before = (launcher.folder / head_lease.LEASE).read_text()
    with hold_run(tmp_path / "run") as run:
        until(lambda: (launcher.folder / head_lease.LEASE).read_text() != before)
        assert launcher.is_alive
        assert run.running_hosts == Hosts((Host("localhost", (0,)),))
    assert not launcher.is_alive
    assert run.running_hosts is None


def test_ranks_are_adopted_only_once_and_then_keep_running(
    launcher: ClusterLauncher, this: Attempt, tmp_path: Path, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch(launcher, this, tmp_path, until)
    with hold_run(tmp_path / "run") as run:
        adopted = run.adopt()
        assert run.adopt() is None
    assert isinstance(adopted, Supervision)
    adopted.close()
    assert launcher.is_alive
    monkeypatch.setattr(head_lease, "age_seconds", lambda _folder: 31.0)
    with hold_run(tmp_path / "run") as run:
        assert run.adopt() is None, "their lease has expired"


def test_hosts_of_adopted_ranks_get_the_code_of_the_new_head(this: Attempt, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[str, ...]] = []
    monkeypatch.setattr(cluster_launch, "hosts_with_code", lambda _, hosts, __: sent.append(hosts))
    monkeypatch.setattr(TrainJob, "read", MagicMock())
    spec = MagicMock(hosts=Hosts((Host("localhost", (0,)),)))
    spec.run.adopt.return_value.this = this
    for spec.needs.code in (None, "c0de"):
        assert cluster_launch._continued(spec, MagicMock(), lambda: None) is not None
    assert sent == [("localhost",)]


def test_agents_on_hosts_of_ranks_that_were_found_running_have_the_code_of_the_new_head(
    launcher: ClusterLauncher, this: Attempt, tmp_path: Path, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace(this, code="0ld").write()
    launch(launcher, this, tmp_path, until)
    used = list[str | None]()

    def on(_agents: Agents, nodes: Nodes, _lease_seconds: float) -> dict[str, MagicMock]:
        used.append(nodes.code)
        return {host: MagicMock() for host in nodes.hosts}

    monkeypatch.setattr(Agents, "on", on)
    with hold_run(tmp_path / "run") as run:
        found = run.adopt()
        assert found is not None
        found.close()
    assert used == [own_bundle().digest]
