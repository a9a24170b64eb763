"""A Prefect worker that ends with the process that started it: ``python -m flows.worker POOL``."""

import os
import runpy
import signal
import sys
import threading
import time

from infra.node.processes import die_with_parent

LOOK_SECONDS = 1.0
STOP_SECONDS = 40.0  # a worker gives its runs 30 s to stop


def main() -> None:
    """Run ``prefect worker start`` in this process."""
    die_with_parent(signal.SIGTERM)
    threading.Thread(target=end_after, args=(os.getppid(),), daemon=True).start()
    sys.argv = ["prefect", "worker", "start", "--pool", sys.argv[1], "--type", "process"]
    runpy.run_module("prefect", run_name="__main__")


def end_after(parent: int) -> None:
    """Kill this process 40 s after its parent has ended: without its server, a worker does not end on SIGTERM."""
    while os.getppid() == parent:
        time.sleep(LOOK_SECONDS)
    time.sleep(STOP_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
