"""Old nights are removed here and on hosts; a night with a host that does not answer is kept."""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from infra.head.hosts.nodes import Nodes
from infra.head.regression import night_run
from infra.head.regression.night_run import remove_nights
from infra.node.attempts.run_ownership import Owner
from infra.node.node_folders import run_path
from t5train.errors import HostError, StorageError
from t5train.files.run_folder import RUN as RUN_FILE
from t5train.files.run_folder import removing
from t5train.progress import silent
from t5train.regression.regression_cases import chosen_cases
from t5train.spec import MachinesSpec
from tests.support.simulated_nodes import RUN, Site, ThisMachine

OWNER = Owner("1" * 32, "this-head", "/root", "2026-01-01", 60.0)


@pytest.fixture
def night(site: Site) -> Path:
    """The folder of a night whose only run was on hosts a and b, which have its checkpoint; it never finished."""
    site.save(8)
    site.write_owner(OWNER)
    hostfile = site.folder / "hosts.slots"
    hostfile.write_text("a slots=1\nb slots=1\n")
    [*_, case] = chosen_cases([], hostfile, 2)
    begun = {"unique_id": OWNER.unique_id, "fingerprint": "f00df00df00d" + "0" * 52}
    begun |= {"spec": case.spec(site.root, "smoke").model_dump(mode="json")}
    (site.checkpoints.parent / RUN_FILE).write_text(json.dumps(begun))
    return site.root


class Connected:
    """Stands in for ssh; records the hosts that are to be reached."""

    def __init__(self, nodes: Nodes) -> None:
        self.nodes, self.asked = nodes, list[list[str]]()

    @contextmanager
    def __call__(self, _: MachinesSpec, hosts: Iterable[str]) -> Iterator[tuple[Nodes, dict[str, HostError]]]:
        self.asked.append(list(hosts))
        yield self.nodes, {}


def copies(site: Site) -> list[bool]:
    return [(site.scratch(host) / run_path(RUN)).exists() for host in site.nodes.hosts]


def test_an_old_night_is_removed_here_and_on_its_hosts_even_if_its_run_never_finished(site: Site, night: Path) -> None:
    connected = Connected(site.nodes)
    assert all(copies(site))
    remove_nights([night], silent, connected)
    assert not any(copies(site))
    assert not night.exists()
    assert connected.asked == [["a", "b"]]


def test_the_removal_of_a_night_that_was_interrupted_is_finished(site: Site, night: Path) -> None:
    run = site.checkpoints.parent
    run.rename(removing(run))
    remove_nights([night], silent, Connected(site.nodes))
    assert not any(copies(site))
    assert not night.exists()


def test_a_night_is_kept_if_a_host_does_not_answer(site: Site, night: Path, caplog: pytest.LogCaptureFixture) -> None:
    lost = replace(site.nodes, transport=ThisMachine("a", "b"))
    remove_nights([night], silent, Connected(lost))
    assert all(copies(site))
    assert (site.checkpoints.parent / RUN_FILE).exists()
    assert f"kept the night {night}, which is tried again" in caplog.text


def test_a_night_that_cannot_be_removed_is_kept_and_does_not_end_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def discard(_: Path) -> None:
        raise StorageError("the disk is read-only")

    monkeypatch.setattr(night_run, "discard", discard)
    (tmp_path / "20261121-020000").mkdir()
    remove_nights([tmp_path / "20261121-020000"], silent)
    assert "the disk is read-only" in caplog.text


def test_a_night_without_hosts_is_removed_with_what_an_interrupted_removal_left(tmp_path: Path) -> None:
    for name in ("20261121-020000", ".20261120-020000.discarded", "20261122-020000"):
        (tmp_path / name / "runs" / "smoke-1").mkdir(parents=True)
    of_an_earlier_version = {"spec": {"cluster": {"hostfile": None, "no_such_setting": 1}}}
    (tmp_path / "20261121-020000" / "runs" / "smoke-1" / RUN_FILE).write_text(json.dumps(of_an_earlier_version))
    remove_nights([tmp_path / "20261121-020000"], silent)
    assert [path.name for path in tmp_path.iterdir()] == ["20261122-020000"]
