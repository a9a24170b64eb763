"""Shares parts out to hosts as they have nothing to do, and collects them. Parts of a lost host are given to others.

A host that has nothing left to do gets a part that another one has begun, and the first result counts: both have the
same bytes. So one process that hangs, or a slow host, does not hold up the others.
"""

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from infra.node.channel import Channel
from infra.node.stages.predictor import FromPredictor, GivenPart, PartPredicted, RowsPredicted
from t5train.data.worker_processes import Advance, Json
from t5train.errors import HostError, HostUnreachable, WorkerLost
from t5train.files.atomic import replacing
from t5train.inference.predict.prediction_worker import part_name

_MOST_HOLDERS = 2
_log = logging.getLogger(__name__)


class Heard(NamedTuple):
    """What was heard from a host: its connection, when it is open; a message; or why it is lost."""

    host: str
    what: Channel | FromPredictor | HostError


def others_predict(hosts: Collection[str], lost: Mapping[str, HostError], new: Iterable[HostError]) -> None:
    """Log that the other hosts do without those that have just been lost. Raises WorkerLost when no host is left."""
    if len(lost) == len(hosts):
        raise WorkerLost(
            f"no host is left to predict: {'; '.join(map(str, lost.values()))}. Parts that are done are kept: run the "
            "same command again, without such hosts in the hostfile"
        )
    for error in new:
        _log.warning("%s. The other hosts predict its parts", error)


class SharedParts:
    """Parts, the hosts that predict them, and what is done. A job is one part."""

    def __init__(self, jobs: Sequence[Json], processes: Mapping[str, int], advance: Advance) -> None:
        """``processes`` are those of each host. ``advance`` is called with how many more rows are predicted."""
        self._jobs, self._processes, self._advance = jobs, processes, advance
        self._unfinished = set(range(len(jobs)))
        self._held: dict[str, set[int]] = {host: set() for host in processes}
        self._channels = dict[str, Channel]()
        self._lost = dict[str, HostError]()
        self._counted, self._by_host = Counter[int](), Counter[tuple[str, int]]()

    def results(self, heard: "SimpleQueue[Heard]") -> Iterator[Json]:
        """Yield a result for each part once its file is written. Raises WorkerLost when no host is left."""
        while self._unfinished:
            host, what = heard.get()
            if host in self._lost:
                continue  # it was given up, but does not know that yet
            if isinstance(what, Channel):
                self._channels[host] = what
            elif isinstance(what, HostError):
                self._lose(host, what)
            elif isinstance(what, RowsPredicted):
                self._count(host, what)
            elif isinstance(what, PartPredicted) and self._is_new(host, what):
                yield {"parts": 1}
            for each in self._channels:
                self._give(each)

    def _count(self, host: str, more: RowsPredicted) -> None:
        """Report rows, but not those that another host had predicted before."""
        self._by_host[host, more.number] += more.rows
        if (new := self._by_host[host, more.number] - self._counted[more.number]) > 0:
            self._counted[more.number] += new
            self._advance(new)

    def _is_new(self, host: str, found: PartPredicted) -> bool:
        """Write the file of a part unless another host has predicted it, too."""
        self._held[host].discard(found.number)
        if found.number not in self._unfinished:
            return False
        if hashlib.sha256(found.content).hexdigest() != found.sha256:
            self._lose(
                host, HostUnreachable(f"{host}: a part arrived damaged. Check its memory and its network", [host])
            )
            return False
        with replacing(self._path(found.number)) as file:
            file.write(found.content)
        self._unfinished.remove(found.number)
        return True

    def _give(self, host: str) -> None:
        """Give a host parts, until each of its processes has one."""
        while len(self._held[host]) < self._processes[host] and (number := self._next(host)) is not None:
            self._held[host].add(number)
            given = GivenPart(number, self._path(number).name, json.dumps(self._jobs[number]))
            with suppress(OSError, ValueError):  # the thread that reads from this host reports why it is lost
                self._channels[host].send(given)

    def _next(self, host: str) -> int | None:
        """Return a part that no host has or, if there is none, one that another host has begun; the first of them."""
        holders = Counter(number for held in self._held.values() for number in held)
        free = (number for number in self._unfinished - self._held[host] if holders[number] < _MOST_HOLDERS)
        return min(free, key=lambda number: (holders[number], number), default=None)

    def _path(self, number: int) -> Path:
        (part,) = self._jobs[number]["parts"]
        return Path(self._jobs[number]["folder"]) / part_name(part)

    def _lose(self, host: str, error: HostError) -> None:
        self._lost[host] = error
        self._channels.pop(host, None)
        self._held.pop(host)
        others_predict(self._processes, self._lost, [error])
