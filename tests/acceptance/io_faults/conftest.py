"""Two workers, shared by all tests of this package."""

from collections.abc import Iterator

import pytest

from tests.acceptance.io_faults.operations import NAMES
from tests.acceptance.io_faults.workers import Workers, started


@pytest.fixture(scope="package")
def workers() -> Iterator[Workers]:
    with started(2, NAMES) as all_of_them:
        yield all_of_them
