"""A Prefect worker that is told to end with the process that started it: ``python -m flows.work POOL``."""

import runpy
import signal
import sys

from infra.processes import die_with_parent


def main() -> None:
    """Become ``prefect worker start``."""
    die_with_parent(signal.SIGTERM)
    sys.argv = ["prefect", "worker", "start", "--pool", sys.argv[1], "--type", "process"]
    runpy.run_module("prefect", run_name="__main__")


if __name__ == "__main__":
    main()
