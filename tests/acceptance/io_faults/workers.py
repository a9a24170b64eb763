"""Start worker processes, and send them requests."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

from infra.node.attempts.rank_environment import search_path
from infra.node.operator_folder import VARIABLE, operator_folder
from tests.acceptance.io_faults import interposer

_ENVIRONMENT = {
    "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}
_NEEDED_BYTES = 1 << 30
T = TypeVar("T")
R = TypeVar("R")


class Worker:
    def __init__(self, folder: Path, number: int, library: Path) -> None:
        self.folder = folder / f"worker-{number}"
        operators = {VARIABLE: str(operator_folder())}  # as guards set it for ranks
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.acceptance.io_faults.worker", str(folder), str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | _ENVIRONMENT | {"LD_PRELOAD": str(library), "PATH": search_path()} | operators,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, action: str, *arguments: Any) -> Any:
        """Send a request; return the answer.

        Raises RuntimeError if the worker died; its messages are on standard error.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([action, arguments]) + "\n")
        self._process.stdin.flush()
        if not (line := self._process.stdout.readline()):
            raise RuntimeError(f"a worker process died while handling {action} {arguments}")
        return json.loads(line)

    def close(self) -> None:
        """Close its standard input, and wait until it ends."""
        self._process.communicate()


class Workers:
    """All workers, and the folder that they share."""

    def __init__(self, folder: Path, library: Path, number: int) -> None:
        self.all = [Worker(folder, index, library) for index in range(number)]
        self._idle: SimpleQueue[Worker] = SimpleQueue()
        for each in self.all:
            self._idle.put(each)
        self._threads = ThreadPoolExecutor(number)

    def ask(self, action: str, *arguments: Any) -> Any:
        """Send a request to an idle worker; return the answer."""
        worker = self._idle.get()
        try:
            return worker.ask(action, *arguments)
        finally:
            self._idle.put(worker)

    def map(self, work: Callable[[Worker, T], R], items: Iterable[T]) -> Iterator[R]:
        """Yield the result of each item, in order, using all workers at once."""

        def on_idle_worker(item: T) -> R:
            worker = self._idle.get()
            try:
                return work(worker, item)
            finally:
                self._idle.put(worker)

        pending: deque[Future[R]] = deque()
        for item in items:
            pending.append(self._threads.submit(on_idle_worker, item))
            if len(pending) > 2 * len(self.all):
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()

    def close(self) -> None:
        """Let the workers finish their current requests, and end them."""
        self._threads.shutdown(cancel_futures=True)
        for each in self.all:
            each.close()


@contextmanager
def start_workers(number: int, operations: Sequence[str]) -> Iterator[Workers]:
    folder = Path(tempfile.mkdtemp(prefix="io-faults-", dir=_fast_folder()))
    workers = None
    try:
        workers = Workers(folder, interposer.build(folder), number)
        workers.all[0].ask("prepare", list(operations))
        yield workers
    finally:
        if workers is not None:
            workers.close()
        shutil.rmtree(folder, ignore_errors=True)


def _fast_folder() -> Path | None:
    """A folder in memory, if it has enough space, because fsync takes long on disks.

    Returns None otherwise, for the default temporary folder.
    """
    memory = Path("/dev/shm")  # noqa: S108 - what is made there has a name of its own
    return memory if memory.is_dir() and shutil.disk_usage(memory).free > _NEEDED_BYTES else None
