"""If a machine cannot run a test cluster, the error says why and what to do."""

import os
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from infra.node.processes import ProcessIdentity
from infra.testcluster import Cluster, namespaces, registry
from t5train.errors import TestClusterError

Programs = Callable[[dict[str, str]], None]


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    """Make the test appear to run as root, with only the given programs (scripts by name) and those of /usr/sbin."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", str(tmp_path))

    def programs(scripts: dict[str, str]) -> None:
        for name, script in scripts.items():
            (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
            (tmp_path / name).chmod(0o755)

    return programs


def test_only_root_can_start_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(TestClusterError, match="only root can make namespaces"):
        Cluster.up("never")
    assert not (registry.FOLDER / "never").exists()


def test_missing_packages_are_named_once_each(programs: Programs) -> None:
    programs(dict.fromkeys(("unshare", "nsenter", "setpriv", "ip", "tc", "sshd"), ""))
    assert namespaces.what_is_missing() == "Debian packages are missing: apt-get install openssh-client pdsh"


def test_in_an_unprivileged_container_the_error_names_the_missing_option(programs: Programs) -> None:
    all_programs = dict.fromkeys(namespaces.PACKAGES, "")
    programs(all_programs | {"unshare": "echo unshare failed: Operation not permitted >&2; exit 1"})
    reason = namespaces.what_is_missing()
    assert reason is not None
    assert "unshare failed: Operation not permitted" in reason
    assert "--privileged" in reason


@pytest.mark.parametrize("name", ["", "..", "a/b", "Ä", "x" * 41])
def test_an_invalid_cluster_name_is_refused(name: str) -> None:
    with pytest.raises(TestClusterError, match="is not a valid name"):
        registry.end(name)


def test_clusters_that_start_together_remove_an_abandoned_one_without_disturbing_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "FOLDER", tmp_path / "clusters")
    ended = subprocess.Popen(["true"])
    state = registry.State(2, None, True, {}, ProcessIdentity.of(ended.pid))
    ended.wait()
    registry.create("abandoned", state)
    for number in range(2000):
        (registry.FOLDER / "abandoned" / f"file-{number}").touch()
    together = threading.Barrier(4)

    def start(number: int) -> None:
        together.wait(30)
        registry.create(f"new-{number}", replace(state, creator=ProcessIdentity.of(os.getpid())))

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(start, range(4)))
    left = {path.parent.name for path in registry.FOLDER.glob("*/cluster.json")}
    assert left == {f"new-{number}" for number in range(4)}
