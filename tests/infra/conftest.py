import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from infra import attempt, processes
from infra.attempt import Attempt
from infra.processes import ProcessIdentity

Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def this(tmp_path: Path) -> Attempt:
    """An attempt whose head is the test itself."""
    return attempt.begin(tmp_path / "run", ProcessIdentity.of(os.getpid()))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts Python with the given arguments; the test leaves no such process behind."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*arguments: str, **environment: str) -> subprocess.Popen[bytes]:
        with open(tmp_path / "output.txt", "ab") as output:
            started.append(
                subprocess.Popen(
                    [sys.executable, *arguments], stdout=output, stderr=output, env={**os.environ, **environment}
                )
            )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def start_guard(this: Attempt, start: Start) -> Start:
    """Guards a Python program as rank 0 of the attempt."""

    def start_guard(program: str) -> subprocess.Popen[bytes]:
        arguments = ("-m", "infra.guard", str(this.folder), sys.executable, "-c", program)
        return start(*arguments, RANK="0", T5_RUN_ID=this.run_id)

    return start_guard


@pytest.fixture
def until() -> Callable[..., None]:
    """Waits for a condition, and fails the test if it does not come."""

    def until(condition: Callable[[], object], seconds: float = 20.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"not in {seconds} s"
            time.sleep(0.02)

    return until


@pytest.fixture
def survivors() -> Callable[[str], set[int]]:
    """Pids of the living processes of a run id."""
    return lambda run_id: processes.find(processes.in_run(run_id))


NODE = """
import sys
from pathlib import Path
from infra import node_folder
node_folder.PARENT = Path(sys.argv.pop(1))
from infra.node import main
sys.exit(main())
"""


class LocalHosts:
    """Hosts that are folders of this machine: commands for them run here, each with its own place for attempts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def command(self, host: str, argv: Sequence[str]) -> list[str]:
        """An action of infra.node, as if on that host."""
        (self.folder / host).mkdir(exist_ok=True)
        return [sys.executable, "-c", NODE, str(self.folder / host), argv[-1]]

    def attempt_folder(self, host: str, run_id: str) -> Path:
        return self.folder / host / f"t5-pretrain-{os.getuid()}" / "attempts" / run_id


@pytest.fixture
def local_hosts(tmp_path: Path) -> LocalHosts:
    (tmp_path / "hosts").mkdir()
    return LocalHosts(tmp_path / "hosts")
