"""Starts a worker of Dask on each host over ssh, and notices when one ends."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from infra.head.hosts.node_client import Nodes, conversation
from infra.node.channel import BrokenOff, Channel
from infra.node.tokenising.worker_messages import WorkerReady, WorkerStart
from t5train.errors import HostError, HostTimeout

_START_SECONDS = 120.0  # enough to import Dask from a slow disk
_POLL_SECONDS = 0.25
OnHost = Callable[[str, WorkerReady | HostError], None]


@contextmanager
def host_workers(nodes: Nodes, starts: Mapping[str, WorkerStart], on_host: OnHost) -> Iterator[None]:
    """Run a worker on each host until the block ends.

    ``on_host`` is called in a thread with a host and its answer when its worker is ready, and with the error when the
    worker could not be started or has ended.
    """
    ended = threading.Event()
    threads = [
        threading.Thread(target=_attend, args=(nodes, host, start, on_host, ended), name=f"dask-{host}", daemon=True)
        for host, start in starts.items()
    ]
    try:
        for thread in threads:
            thread.start()
        yield
    finally:
        ended.set()
        for thread in threads:
            if thread.ident is not None:
                thread.join()


def _attend(nodes: Nodes, host: str, start: WorkerStart, on_host: OnHost, ended: threading.Event) -> None:
    try:
        with conversation(nodes, host, start) as channel:
            if (ready := _ready(channel, host, ended)) is None:
                return
            on_host(host, ready)
            while not ended.is_set():
                _received(channel)
    except HostError as error:
        if not ended.is_set():
            on_host(host, error)


def _ready(channel: Channel, host: str, ended: threading.Event) -> WorkerReady | None:
    """Wait for a worker to join; None if the block has ended."""
    deadline = time.monotonic() + _START_SECONDS
    while not ended.is_set():
        for ready in _received(channel):
            return ready
        if time.monotonic() > deadline:
            raise HostTimeout(
                f"{host}: Dask's worker did not start within {_START_SECONDS:g} s. Check whether the host is "
                "overloaded or one of its disks hangs",
                [host],
            )
    return None


def _received(channel: Channel) -> list[WorkerReady]:
    received = channel.receive_within(_POLL_SECONDS, WorkerReady)
    if channel.at_end and not received:
        raise BrokenOff("its worker of Dask has ended")
    return received
