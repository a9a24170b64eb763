"""Worker processes that share the work of a stage.

A worker is a new Python interpreter. It reads jobs from standard input and writes results to standard output, as one
JSON object per line. It imports only what its job needs, not the modules of the program that started it, which may be a
multi-threaded flow. When that program ends for any reason, the worker's input is closed, and a thread of the worker
ends it, also while it computes or waits.

``concurrent.futures.ProcessPoolExecutor`` is not used: fork would copy locks that the flow's threads hold, spawn would
import the flow's main module in every worker, and workers could outlive a flow that is killed.
"""

import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from queue import SimpleQueue
from typing import IO, Any

from t5train.errors import StorageError, T5TrainError, WorkerLost, error_of
from t5train.files.os_errors import explain

Json = dict[str, Any]
Advance = Callable[[int], None]
OWN_UMASK = -1
"""Stands for the umask of this process."""
_Worker = subprocess.Popen[str]
Workers = Callable[[str, Sequence[Json], Advance], Iterator[Json]]
"""Does jobs as ``in_processes`` does, in workers of its own, which may be on other machines."""


class InSteps:
    """Passes progress on in steps, because each is a message to another process."""

    def __init__(self, advance: Advance, step: int) -> None:
        self._advance, self._step, self._units = advance, step, 0

    def __call__(self, units: int) -> None:
        """Add units, and pass on all since the last time once they are a step."""
        self._units += units
        if self._units >= self._step:
            self.flush()

    def flush(self) -> None:
        """Pass on what is left."""
        self._advance(self._units)
        self._units = 0


def in_processes(
    function: str, jobs: Sequence[Json], workers: int, advance: Advance, *, umask: int = OWN_UMASK
) -> Iterator[Json]:
    """Yield the result of ``function`` (``"package.module:name"``) for each job, in the order in which jobs finish.

    The function is called as ``function(job, advance)`` in a worker. Each call of its ``advance`` is repeated here with
    the caller's ``advance``. A T5TrainError that it raises is raised here, too, and an OSError as StorageError. Raises
    WorkerLost if a worker is killed or fails in any other way. Workers have the given umask.
    """
    running = [_start(function, umask) for _ in range(min(workers, len(jobs)))]
    events: SimpleQueue[tuple[_Worker, Json | None]] = SimpleQueue()
    try:
        with ThreadPoolExecutor(max(1, len(running))) as listeners:
            for worker in running:
                listeners.submit(_listen, worker, events)
            try:
                yield from _share(jobs, running, events, advance)
            finally:
                for worker in running:
                    worker.kill()
    finally:
        for worker in running:
            worker.communicate()


class LastingProcess:
    """A worker that does one job after another, and keeps what it has loaded for them."""

    def __init__(self, function: str) -> None:
        """Start a worker for ``function``, as ``in_processes`` does."""
        self._worker = _start(function, OWN_UMASK)

    def do(self, job: Json, advance: Advance) -> Json:
        """Return the result of a job. Raises the errors of ``in_processes``; WorkerLost also if it was killed here."""
        _send(self._worker, job)
        for message in _messages(self._worker):
            if "error" in message:
                raise _as_error(message)
            if "advance" not in message:
                result: Json = message["result"]
                return result
            advance(message["advance"])
        raise WorkerLost(_obituary(self._worker))

    def kill(self) -> None:
        """Kill the worker. Another thread that has it do a job is no longer kept waiting."""
        self._worker.kill()

    def close(self) -> None:
        """Kill the worker, and wait for its end. No thread may have it do a job then."""
        self.kill()
        self._worker.communicate()


def _share(
    jobs: Sequence[Json], running: list[_Worker], events: "SimpleQueue[tuple[_Worker, Json | None]]", advance: Advance
) -> Iterator[Json]:
    waiting = iter(jobs)
    for worker in running:
        _send(worker, next(waiting))
    unfinished = len(jobs)
    while unfinished:
        worker, message = events.get()
        if message is None:
            raise WorkerLost(_obituary(worker))
        if "error" in message:
            raise _as_error(message)
        if "advance" in message:
            advance(message["advance"])
            continue
        unfinished -= 1
        if (job := next(waiting, None)) is not None:
            _send(worker, job)
        yield message["result"]


def _start(function: str, umask: int) -> _Worker:
    command = [sys.executable, "-P", "-m", "t5train.data.worker_processes", function]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    # Ctrl-C in a terminal reaches workers too, but this process decides when they end. They inherit the mask.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            env=environment,
            umask=umask,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _listen(worker: _Worker, events: "SimpleQueue[tuple[_Worker, Json | None]]") -> None:
    for message in _messages(worker):
        events.put((worker, message))
    events.put((worker, None))


def _messages(worker: _Worker) -> Iterator[Json]:
    for line in _pipe(worker.stdout):
        if line.endswith("\n"):  # a worker that is killed while it writes leaves half a line
            yield json.loads(line)


def _send(worker: _Worker, job: Json) -> None:
    with suppress(BrokenPipeError):  # its listener reports the end of the worker, with its exit status
        pipe = _pipe(worker.stdin)
        pipe.write(json.dumps(job) + "\n")
        pipe.flush()


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None  # noqa: S101  every worker is started with both pipes
    return pipe


def _obituary(worker: _Worker) -> str:
    status = worker.wait()
    if status < 0:
        return (
            f"a worker process was killed by {signal.Signals(-status).name}. If memory ran out (see `dmesg`), free "
            "some, or lower the number of workers (corpus.workers, shards.workers, --workers, --processes, or the "
            "slots of the host)"
        )
    return f"a worker process failed with exit status {status}. The standard error output of this program shows why"


def _as_error(message: Json) -> T5TrainError:
    return error_of(message["error"], message["message"])


def _answer(message: Json) -> None:
    try:
        sys.stdout.write(json.dumps(message) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:  # as an exception, it would look like a lost connection to code that retries these
        os._exit(1)


def end_with_parent(descriptor: int) -> None:
    """End this process when no process has the other end of a pipe open. Reads nothing of the pipe."""
    hung_up = select.poll()
    hung_up.register(descriptor, 0)  # for POLLHUP, which is always reported
    hung_up.poll()
    os._exit(1)


def _work(function: str) -> None:
    """Process jobs, one per line of standard input, until the input ends."""
    module, name = function.split(":")
    perform = getattr(importlib.import_module(module), name)
    gc.freeze()  # what was imported stays, so it is not searched for garbage each time
    for line in sys.stdin:
        try:
            result = perform(json.loads(line), lambda units: _answer({"advance": units}))
        except T5TrainError as error:
            _answer({"error": type(error).__name__, "message": str(error)})
        except OSError as error:
            _answer({"error": StorageError.__name__, "message": explain(error)})
        else:
            _answer({"result": result})


if __name__ == "__main__":
    sys.stdin.reconfigure(encoding="utf-8")  # type: ignore[union-attr]  # a worker's input is a pipe of text
    threading.Thread(target=end_with_parent, args=[sys.stdin.fileno()], name="end-with-parent", daemon=True).start()
    _work(sys.argv[1])
