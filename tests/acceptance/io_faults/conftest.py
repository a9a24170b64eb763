"""Two workers, shared by all tests of this package."""

from collections.abc import Iterator

import pytest

from tests.acceptance.io_faults.operations import NAMES
from tests.acceptance.io_faults.workers import Workers, start_workers


@pytest.fixture(scope="package")
def workers() -> Iterator[Workers]:
    with start_workers(2, NAMES) as all_workers:
        yield all_workers
