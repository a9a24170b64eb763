"""A site for hubs, and a Python that has imported what builds data."""

import sys
from collections.abc import Iterator

import pytest

from tests.support.hub_server import HubSite, running_site
from tests.support.prepared_python import prepared_python

_STAGES = [
    "t5train.data.corpus",
    "t5train.data.shards",
    "t5train.data.shard_worker",
    "t5train.data.vocabulary.tokenizer",
    "t5train.data.checks.removal",
    "t5train.data.checks.repetitions",
]


@pytest.fixture(scope="session")
def hub_site() -> Iterator[HubSite]:
    with running_site() as site:
        yield site


@pytest.fixture(scope="session")
def python_with_stages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with prepared_python(tmp_path_factory.mktemp("python"), _STAGES, {}) as python:
        yield python


@pytest.fixture(scope="session")
def python_with_datasets(tmp_path_factory: pytest.TempPathFactory, hub_site: HubSite) -> Iterator[str]:
    """Its processes use the hubs of ``hub_site``."""
    folder = tmp_path_factory.mktemp("python")
    environment = {"HF_ENDPOINT": hub_site.url, "HF_HOME": str(folder / "hf-home")}
    with prepared_python(folder, [*_STAGES, "datasets", "t5train.data.download.hub_shards"], environment) as python:
        yield python


@pytest.fixture
def quick_workers(python_with_stages: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Import modules once for all processes that the test starts. What they compute takes less time than that."""
    monkeypatch.setattr(sys, "executable", python_with_stages)
