"""A process that has imported everything once and forks a process for each trial.

``python -m tests.acceptance.io_faults.worker FOLDER NUMBER`` reads requests from standard input, each a line of JSON,
and answers each with a line on standard output. ``workers`` starts it, with the library preloaded.
"""

import json
import logging
import os
import sys
import warnings
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.acceptance.io_faults.interposer import Call, Fault
from tests.acceptance.io_faults.operations import operation
from tests.acceptance.io_faults.trial import Operation, Trials, run_in_child
from tests.support.prepared_python import prepared_python

_IMPORTS = "tests.acceptance.io_faults.imports"
_ON_NODES = [f"infra.node.storage.{name}" for name in ("stored_checkpoints", "chain_copy", "garbage")]


class Worker:
    """A worker, with its own folder and the folder of templates that all workers share."""

    def __init__(self, shared: Path, number: int) -> None:
        self._shared, self._folder = shared, shared / f"worker-{number}"
        self._folder.mkdir()
        self._pythons = ExitStack()
        self._python_with("nodes", ["infra.node.__main__", *_ON_NODES])  # small, as forks of small processes are quick
        self._python = self._python_with("python", [_IMPORTS])
        import_module(_IMPORTS)
        self._trials: dict[str, Trials] = {}

    def _python_with(self, name: str, modules: list[str]) -> str:
        (self._folder / name).mkdir()
        return self._pythons.enter_context(prepared_python(self._folder / name, modules, {}))

    def prepare(self, names: list[str]) -> None:
        """Make the small run and the operations' templates, in child processes, so that this process stays small."""
        from tests.acceptance.io_faults.small_run import SmallRun

        run_in_child(SmallRun(self._shared / "made").make)
        sys.executable = self._python
        for name in names:
            folder = self._folder / "trial"  # the path that trials use, because records may hold absolute paths
            folder.mkdir()
            run_in_child(partial(self._operation(name).prepare, folder))
            folder.rename(self._shared / name)

    def calls(self, name: str) -> list[list[Any]]:
        return [[each.kind, each.path, each.ordinal] for each in self._trials_of(name).calls()]

    def outcome(self, name: str, call: list[Any], error: int, mode: Any) -> dict[str, Any]:
        return self._trials_of(name).outcome(Fault(Call(*call), error, mode))

    def close(self) -> None:
        self._pythons.close()

    def _trials_of(self, name: str) -> Trials:
        sys.executable = self._python
        if name not in self._trials:
            self._trials[name] = Trials(self._operation(name), self._shared / name, self._folder)
        return self._trials[name]

    def _operation(self, name: str) -> Operation:
        from tests.acceptance.io_faults.small_run import SmallRun

        return operation(name, SmallRun(self._shared / "made"))


def main() -> None:
    """Answer requests until standard input ends."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not get among the answers
    worker = Worker(Path(sys.argv[1]), int(sys.argv[2]))
    try:
        for line in sys.stdin:
            action, arguments = json.loads(line)
            answers.write(json.dumps(getattr(worker, action)(*arguments)) + "\n")
            answers.flush()
    finally:
        worker.close()


if __name__ == "__main__":
    main()
