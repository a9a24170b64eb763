import os
import subprocess
from collections.abc import Callable

import pytest

from infra.node import processes


def test_processes_of_other_users_are_not_found_by_their_arguments(
    start: Callable[..., subprocess.Popen[bytes]], until: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = f"/somewhere/{os.getpid()}"
    process = start("-c", "import time; time.sleep(600)", mark)
    until(lambda: processes.find(processes.given(mark)) == {process.pid})
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert processes.find(processes.given(mark)) == set()
