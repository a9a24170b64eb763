import os

import pytest

from infra.node import processes
from tests.infra.conftest import Start, Until


def test_processes_of_other_users_are_not_found_by_their_arguments(
    start: Start, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = f"/somewhere/{os.getpid()}"
    process = start("-c", "import time; time.sleep(600)", mark)
    until(lambda: processes.find(processes.given(mark)) == {process.pid})
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert processes.find(processes.given(mark)) == set()
