"""Old nights are removed here and on hosts; a night with a host that does not answer is kept."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from infra.head.hosts.node_client import Nodes
from infra.head.regression import night_removal
from infra.head.regression.night_removal import remove_nights
from infra.head.storage.gather import gather
from infra.node.attempts.run_ownership import Owner
from infra.node.node_folders import run_path
from t5train.errors import StorageError
from t5train.files.run_folder import RUN as RUN_FILE
from t5train.files.run_folder import tag_of
from t5train.progress import silent
from t5train.records.digests import digest_files
from t5train.records.stage_records import Checkpoint
from t5train.regression.regression_cases import chosen_cases
from t5train.spec import RunSpec
from tests.support.simulated_nodes import RUN, Site, ThisMachine

OWNER = Owner("1" * 32, "this-head", "/root", "2026-01-01", 60.0)


@pytest.fixture
def night(site: Site) -> Path:
    """The folder of a night whose only run was on hosts a and b, which still have its checkpoint."""
    site.save(8)
    gather(site.nodes, RUN, site.newest(), site.checkpoints)
    for host in site.nodes.hosts:
        (site.scratch(host) / run_path(RUN) / "owner.json").write_text(json.dumps(asdict(OWNER)))
    run, [*_, case] = site.checkpoints.parent, chosen_cases([], site.folder / "hosts.slots", 2)
    spec = case.spec(site.root, "smoke").model_dump(mode="json")
    (run / RUN_FILE).write_text(json.dumps({"unique_id": OWNER.unique_id, "spec": spec, "fingerprint": "f" * 64}))
    files = digest_files(run, [str(path.relative_to(run)) for path in site.checkpoints.glob("*/*")])
    Checkpoint(path=run, fingerprint="f00df00df00dcafe", step=8, tag=tag_of(8), files=files).commit()
    return site.root


def copies(site: Site) -> list[bool]:
    return [(site.scratch(host) / run_path(RUN)).exists() for host in site.nodes.hosts]


def test_an_old_night_is_removed_here_and_on_its_hosts(site: Site, night: Path) -> None:
    asked: list[Path | None] = []

    @contextmanager
    def connect(spec: RunSpec) -> Iterator[Nodes]:
        asked.append(spec.cluster.hostfile)
        yield site.nodes

    assert all(copies(site))
    remove_nights([night], silent, connect)
    assert not any(copies(site))
    assert not night.exists()
    assert asked == [site.folder / "hosts.slots"]


def test_a_night_is_kept_if_a_host_does_not_answer(site: Site, night: Path, caplog: pytest.LogCaptureFixture) -> None:
    @contextmanager
    def connect(_: RunSpec) -> Iterator[Nodes]:
        yield replace(site.nodes, transport=ThisMachine("a", "b"))

    remove_nights([night], silent, connect)
    assert all(copies(site))
    assert night.exists()
    assert f"kept the night {night}, which is tried again" in caplog.text


def test_a_night_that_cannot_be_removed_is_kept_and_does_not_end_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def discard(_: Path) -> None:
        raise StorageError("the disk is read-only")

    monkeypatch.setattr(night_removal, "discard", discard)
    (tmp_path / "20261121-020000").mkdir()
    remove_nights([tmp_path / "20261121-020000"], silent)
    assert "the disk is read-only" in caplog.text


def test_a_night_without_hosts_is_removed_with_what_an_interrupted_removal_left(tmp_path: Path) -> None:
    for name in ("20261121-020000", ".20261120-020000.discarded", "20261122-020000"):
        (tmp_path / name / "runs" / "smoke-1").mkdir(parents=True)
    of_an_earlier_version = {"cluster": {"hostfile": None, "no_such_setting": 1}}
    (tmp_path / "20261121-020000" / "runs" / "smoke-1" / RUN_FILE).write_text(json.dumps(of_an_earlier_version))
    remove_nights([tmp_path / "20261121-020000"], silent)
    assert [path.name for path in tmp_path.iterdir()] == ["20261122-020000"]
