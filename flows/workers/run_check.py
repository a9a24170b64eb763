"""Checks whether a run could start on this machine: ``python -m flows.workers.run_check``.

It reads the run's parameters as JSON from stdin. It prints nothing if the run could start, and otherwise the reason.
It ends with the process that started it.
"""

import signal
import sys

from flows.run_parameters import RunParameters
from infra.head.training_run import require_destination, require_startable
from infra.node.processes import die_with_parent
from t5train.errors import T5TrainError


def main() -> None:
    """Print why the run could not start."""
    die_with_parent(signal.SIGKILL)
    try:
        spec = RunParameters.model_validate_json(sys.stdin.read()).spec_for_this_machine()
        of_model, _ = require_startable(spec)
        require_destination(spec, of_model)
    except T5TrainError as error:
        sys.stdout.write(f"{error}\n")


if __name__ == "__main__":
    main()
