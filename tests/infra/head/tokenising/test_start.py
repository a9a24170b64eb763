"""What is found before the first shard is made: where Dask looks for settings, and hosts that cannot take part."""

import errno
import socket
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from queue import SimpleQueue

import pytest
from cryptography.x509 import load_pem_x509_certificate

from infra.head.tokenising import hosts_executor
from infra.head.tokenising.dask_scheduler import new_credentials
from infra.node.stages import dask_worker
from infra.node.stages.dask_settings import Credentials
from infra.node.stages.dask_worker import WorkerStart
from infra.node.stages.makers import own_makers
from t5train.errors import HostMisconfigured, HostUnreachable, StorageError
from t5train.files.output_folder import making
from t5train.spec import ClusterSpec, ShardsSpec
from t5train.spec.recipes import recipe
from tests.infra.head.tokenising.conftest import Site


def test_configuration_of_the_user_is_not_read(
    do: Callable[..., list[dict[str, object]]], site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = site.folder / ".config" / "dask"
    config.mkdir(parents=True)
    (config / "broken.yaml").write_text("distributed: [")
    monkeypatch.setenv("HOME", str(site.folder))
    monkeypatch.setenv("DASK_CONFIG", str(config))
    monkeypatch.setenv("DASK_DISTRIBUTED__LOGGING_FILE_CONFIG", str(config / "broken.yaml"))
    assert len(do("finish", site.jobs(1))) == 1


def test_a_worker_that_is_lost_while_others_start_is_named() -> None:
    events = SimpleQueue[hosts_executor._Event]()
    events.put(hosts_executor._Event({"left": "one"}))
    with pytest.raises(HostUnreachable, match=r"^one: its worker has ended"):
        hosts_executor._await_workers(["one", "two"], events)


def test_the_probe_of_a_killed_head_is_removed_by_the_next(tmp_path: Path) -> None:
    with making(tmp_path / "shards", "f"):
        pass
    with hosts_executor._probe(tmp_path / "shards") as (nonce, probe):
        assert probe.read_text() == nonce
        with making(tmp_path / "shards", "f"):
            assert not probe.exists()


def test_a_host_that_cannot_write_shards_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(dask_worker, "try_writing", refuse)
    with hosts_executor._probe(tmp_path) as (nonce, probe):
        start = WorkerStart("one", 1, Credentials("", ""), 5, own_makers([]), 0o022, 1, probe, nonce, {})
        with pytest.raises(HostMisconfigured, match=r"shards cannot be written: .*Read-only file system"):
            dask_worker._require_shared_files(start)


def test_a_closed_port_is_told_from_a_connection_that_is_refused_by_tls() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        port = server.getsockname()[1]
        dask_worker._require_reachable("127.0.0.1", port)
    with pytest.raises(HostUnreachable, match=r"cannot be reached at 127\.0\.0\.1, port .*jump host"):
        dask_worker._require_reachable("127.0.0.1", port)


def test_a_clock_that_is_hours_behind_does_not_invalidate_the_certificate_and_its_key_is_not_shown() -> None:
    credentials = new_credentials()
    assert "PRIVATE KEY" in credentials.key
    assert "PRIVATE KEY" not in repr(credentials)
    certificate = load_pem_x509_certificate(credentials.certificate.encode())
    assert certificate.not_valid_before_utc < datetime.now(UTC) - timedelta(hours=23)


def test_a_part_of_the_files_of_a_large_text_is_compared_and_a_vanished_one_named(tmp_path: Path) -> None:
    names = [tmp_path / f"{number:05}" for number in range(2500)]
    for name in names:
        name.write_text("text")
    job = {"stretches": [(str(name), "text", (0, 1, 0, 4), 0) for name in names]}
    compared = hosts_executor._sources([job])
    assert len(compared) < 1002
    assert {str(names[0]), str(names[-1])} <= compared.keys()
    job = {"stretches": [(str(tmp_path / "gone"), "text", (0, 1, 0, 4), 0)]}
    with pytest.raises(StorageError, match=r"the text cannot be read: .*gone"):
        hosts_executor._sources([job])


def test_a_run_without_jobs_needs_neither_dask_nor_its_hosts_and_by_default_none_has_them() -> None:
    assert hosts_executor.workers_for(ShardsSpec(), ClusterSpec()) is None
    spec = recipe("smoke", {"shards.executor": "dask", "cluster.hostfile": "/none"})
    workers = hosts_executor.shard_workers(spec)
    assert workers is not None
    assert not list(workers("some_jobs:finish", [], lambda _: None))
