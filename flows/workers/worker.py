"""A Prefect worker that ends with the process that started it: ``python -m flows.workers.worker POOL NAME``."""

import asyncio
import os
import signal
import sys
import threading
import time
from contextlib import suppress

from infra.node.processes import die_with_parent

DRAIN = signal.SIGUSR1
"""The signal after which a worker takes no more runs."""
LOOK_SECONDS = 1.0
STOP_SECONDS = 40.0  # a worker gives its runs 30 s to stop


def main() -> None:
    """Take and run the runs of a pool until SIGTERM."""
    die_with_parent(signal.SIGTERM)
    threading.Thread(target=end_after, args=(os.getppid(),), daemon=True).start()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in background jobs of shells, but stops a worker
    asyncio.run(serve(*sys.argv[1:]))


async def serve(pool: str, name: str) -> None:
    """Run the worker in this process, as ``prefect worker start`` does."""
    from prefect.utilities.processutils import setup_signal_handlers_worker

    from flows.workers.head_worker import HeadWorker  # imports Prefect, which takes seconds in which the parent may end

    setup_signal_handlers_worker(os.getpid(), "the worker", print)  # forwards to the handler that asyncio has installed
    # The limit of the queue is higher if several heads take runs from it.
    worker = HeadWorker(name=name, work_pool_name=pool, create_pool_if_not_found=False, limit=1)
    signal.signal(DRAIN, lambda _number, _frame: worker.drain())
    with suppress(asyncio.CancelledError):
        await worker.start()


def end_after(parent: int) -> None:
    """Kill this process 40 s after its parent has ended: without its server, a worker does not end on SIGTERM."""
    while os.getppid() == parent:
        time.sleep(LOOK_SECONDS)
    time.sleep(STOP_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
