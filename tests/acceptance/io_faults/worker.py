"""A process that has imported everything once and forks a process for each trial.

``python -m tests.acceptance.io_faults.worker FOLDER NUMBER`` reads requests from standard input, each a line of JSON,
and answers each with a line on standard output. ``workers`` starts it, with the library preloaded.
"""

import json
import logging
import os
import sys
import warnings
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.acceptance.io_faults import stand_in
from tests.acceptance.io_faults.interposer import Call, Fault
from tests.acceptance.io_faults.operations import operation
from tests.acceptance.io_faults.stand_in import NODE_PARENT, Main, StandIn
from tests.acceptance.io_faults.trial import Operation, Trials, run_in_child

_ON_NODES = [f"infra.node.storage.{name}" for name in ("stored_checkpoints", "chain_copy", "garbage")]
_IMPORTED = [
    *("deepspeed", "torch._dynamo", "torch.distributed.fsdp", "torch.utils.tensorboard"),
    *("transformers.models.t5.modeling_t5", "transformers.models.t5.tokenization_t5", "transformers.models.mt5"),
    *("transformers.generation",),
    *("transformers.models.auto.modeling_auto", "transformers.models.auto.tokenization_auto", "safetensors.torch"),
    *(
        "t5train.train.loop",
        "t5train.checkpoint.resume",
        "t5train.checkpoint.consolidate",
        "t5train.release.export",
        "t5train.release.certification",
    ),
    *(
        "t5train.release.publication",
        "t5train.records.stage_records",
        "fsspec.implementations.local",
        "flows.cli.operate.gc_command",
    ),
    *("infra.head.storage.garbage_collection", "infra.head.storage.run_storage", "infra.head.storage.checkpoint_sync"),
]


class Worker:
    """A worker, with its own folder and the folder of templates that all workers share."""

    def __init__(self, shared: Path, number: int) -> None:
        self._shared, self._folder = shared, shared / f"worker-{number}"
        self._folder.mkdir()
        built = stand_in.build(self._folder)
        self._nodes = StandIn(built, stand_in.NODE_PYTHON, _node)  # forked while this process is still small
        import_everything()
        self._python = StandIn(built, "python", _certifier)
        self._trials: dict[str, Trials] = {}

    def prepare(self, names: list[str]) -> None:
        """Make the small run and the operations' templates, in child processes, so that this process stays small."""
        from tests.acceptance.io_faults.small_run import SmallRun

        run_in_child(SmallRun(self._shared / "made").make)
        sys.executable = str(self._python.program)
        for name in names:
            folder = self._folder / "trial"  # the path that trials use, because records may hold absolute paths
            folder.mkdir()
            run_in_child(partial(self._operation(name).prepare, folder))
            folder.rename(self._shared / name)

    def calls(self, name: str) -> list[list[Any]]:
        """The calls of an operation."""
        return [[each.kind, each.path, each.ordinal] for each in self._trials_of(name).calls()]

    def outcome(self, name: str, call: list[Any], error: int, mode: Any) -> dict[str, Any]:
        """The outcome of a fault."""
        return self._trials_of(name).outcome(Fault(Call(*call), error, mode))

    def close(self) -> None:
        """End the stand-ins."""
        for each in (self._nodes, self._python):
            each.close()

    def _trials_of(self, name: str) -> Trials:
        sys.executable = str(self._python.program)
        if name not in self._trials:
            self._trials[name] = Trials(self._operation(name), self._shared / name, self._folder)
        return self._trials[name]

    def _operation(self, name: str) -> Operation:
        from tests.acceptance.io_faults.small_run import SmallRun

        return operation(name, SmallRun(self._shared / "made"))


def import_everything() -> None:
    """Import and compute what each trial would otherwise have to do itself."""
    for module in _IMPORTED:
        import_module(module)
    from deepspeed.accelerator import get_accelerator
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    from t5train.records.identity import current_provenance

    current_provenance()
    get_checkpoint_conversion_mapping("t5")  # compiles a thousand patterns
    get_accelerator().create_op_builder("ShareMemCommBuilder").load()


def _node() -> dict[str, Main]:
    from infra.node import __main__ as node
    from infra.node import node_folders

    for module in _ON_NODES:
        import_module(module)

    def main(arguments: list[str]) -> int:
        node_folders.PARENT = Path(os.environ[NODE_PARENT])
        sys.argv = ["infra.node", *arguments]
        return node.main()

    return {"infra.node": main}


def _certifier() -> dict[str, Main]:
    from t5train.release.certification import main

    return {"t5train.release.certification": main}


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
