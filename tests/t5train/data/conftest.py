"""Servers of text, and a Python that asks a hub."""

from collections.abc import Iterator

import pytest

from tests.support.hub_server import HubSite, running_site
from tests.support.prepared_python import STAGES, prepared_python
from tests.support.served_text import serving_text
from tests.support.web_server import Web


@pytest.fixture
def web() -> Iterator[Web]:
    """A server of one text."""
    with serving_text() as web:
        yield web


@pytest.fixture(scope="session")
def hub_site() -> Iterator[HubSite]:
    with running_site() as site:
        yield site


@pytest.fixture(scope="session")
def python_with_datasets(tmp_path_factory: pytest.TempPathFactory, hub_site: HubSite) -> Iterator[str]:
    """Its processes use the hubs of ``hub_site``."""
    folder = tmp_path_factory.mktemp("python")
    environment = {"HF_ENDPOINT": hub_site.url, "HF_HOME": str(folder / "hf-home")}
    with prepared_python(folder, [*STAGES, "datasets", "t5train.data.download.hub_text"], environment) as python:
        yield python
