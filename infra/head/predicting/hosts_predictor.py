"""Predicts parts on all hosts of a hostfile, which need not share any storage.

The model and the rows are copied to the hosts, and verified there. A part that is done is sent to the head at once.
"""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from infra.head.hosts.code_shipping import reached_nodes
from infra.head.hosts.hostfile import chosen_hosts
from infra.head.hosts.nodes import Attendance, Nodes, attended
from infra.head.predicting.shared_parts import Heard, SharedParts, others_predict
from infra.head.storage.provisioning import stage_folder
from infra.head.storage.staged_bytes import StagingReports
from infra.node.node_folders import staged_path
from infra.node.stages.makers import own_makers
from infra.node.stages.predictor import PREDICTING_PACKAGES, FindDevice, FoundDevice, FromPredictor, PredictParts
from infra.node.storage.pull import listed
from t5train.data.worker_processes import Advance, Json
from t5train.errors import HostError, SpecError
from t5train.inference.model_folder import names_read
from t5train.inference.predict.devices import OtherMachines
from t5train.inference.predict.prediction_worker import OFFSETS, ORDER, ROWS, STARTS
from t5train.progress import Progress, relayed
from t5train.records.changed_files import recorded_files
from t5train.records.identity import fingerprint
from t5train.records.stage_records import MANIFEST
from t5train.spec import MachinesSpec, RunSpec

_DEVICE_SECONDS = 120.0  # enough to import torch from a slow disk
_PROCESS = "the process that predicts there"


@contextmanager
def predicting_hosts(machines: MachinesSpec, device: str | None, progress: Progress) -> Iterator[OtherMachines]:
    """Yield the hosts that the settings choose, to predict with a process for each slot.

    ``device`` is the kind of device, such as ``cuda`` or ``cpu``; None: what all hosts have. ``progress`` is called
    with the bytes that are copied to them.

    Hosts that are down are left out. Raises SpecError if the hostfile or the device is not valid, or hosts have
    different kinds of devices; the HostError of a host that cannot predict, or has other packages or other code than
    this machine, or whose name or key is wrong; and WorkerLost if all are down.
    """
    if device is not None and ":" in device:
        raise SpecError(
            f"--device is {device}, but with --hostfile it must be a kind, such as {device.partition(':')[0]}: the "
            "slots of hosts are chosen with --include"
        )
    hosts = chosen_hosts(machines.cluster)
    slots = {host.name: host.slots for host in hosts.all}
    with reached_nodes(machines, hosts.names) as (reached, lacking):
        nodes, found = _with_device(reached, lacking, slots, device)
        workers = HostsPredictor(nodes, slots, found.kind, machines.cluster.lease_seconds, progress)
        yield OtherMachines(found.kind, found.device_bytes, workers)


def evaluating_machines(spec: RunSpec) -> MachinesSpec | None:
    """Return how the hosts that predict the held-out pairs of a run are reached; None if this machine predicts."""
    if spec.evaluate.hostfile is None:
        return None
    chosen = {"hostfile": spec.evaluate.hostfile, "include": None, "exclude": None, "num_nodes": None, "spares": 0}
    return MachinesSpec(storage=spec.storage, cluster=spec.cluster.model_copy(update=chosen))


@contextmanager
def evaluating_hosts(spec: RunSpec, progress: Progress) -> Iterator[OtherMachines | None]:
    """Yield the hosts that predict the held-out pairs of a run; None if this machine does. Raises the same errors."""
    if (machines := evaluating_machines(spec)) is None:
        yield None
        return
    device = "cpu" if spec.cluster.accelerator == "cpu" else None
    with predicting_hosts(machines, device, progress) as found:
        yield found


def _with_device(
    nodes: Nodes, lacking: Mapping[str, HostError], slots: Mapping[str, tuple[int, ...]], device: str | None
) -> tuple[Nodes, FoundDevice]:
    """Return the hosts that are up, the kind of device of all of them, and the least memory that one has.

    ``lacking`` are hosts that were not reached before.
    """
    makers = own_makers(PREDICTING_PACKAGES, nodes.code)
    queries = {host: FindDevice(makers, device, slots[host]) for host in nodes.hosts}
    kinds, memory, lost = dict[str, str](), list[int](), dict(lacking)
    for host, answer in nodes.ask_each(queries, _DEVICE_SECONDS).items():
        if isinstance(answer, HostError):
            lost[host] = answer
        else:
            kinds.setdefault(answer.kind, host)
            memory.append(answer.device_bytes)
    up = _without(nodes.on(*slots), lost)
    if len(kinds) > 1:
        found = ", ".join(f"{host} predicts on {kind}" for kind, host in kinds.items())
        raise SpecError(
            f"{found}, but all hosts must use one kind of device, as each rounds differently. Leave the others out of "
            "the hostfile, or have all use their CPUs (--device cpu)"
        )
    return up, FoundDevice(next(iter(kinds)), min(memory))


def _without(nodes: Nodes, lost: Mapping[str, HostError]) -> Nodes:
    """Return the other hosts. Raises the error of a host that would not answer later either; WorkerLost without any."""
    for error in lost.values():
        if not error.is_transient:
            raise error
    others_predict(nodes.hosts, lost, dict.fromkeys(lost.values()))
    return nodes.on(*(host for host in nodes.hosts if host not in lost))


class _Staged(NamedTuple):
    """Where hosts have what they predict with, relative to their scratch folders."""

    run_name: str
    model: str
    rows: str


@dataclass(frozen=True)
class HostsPredictor:
    """Hosts with the accelerators that each of them uses. Called as ``Workers`` are."""

    nodes: Nodes
    slots: Mapping[str, tuple[int, ...]]
    device: str
    """The kind of device that all of them have."""
    lease_seconds: float
    """A host that is silent for so long is given up."""
    progress: Progress

    def __call__(self, function: str, jobs: Sequence[Json], advance: Advance) -> Iterator[Json]:
        """Yield a result for each part once its file is written to the folder of the job.

        Raises HostError if a host that is up cannot get the model, and WorkerLost when no host is left.
        """
        if not jobs:
            return
        model, folder = Path(jobs[0]["model"]), Path(jobs[0]["folder"])
        stage = partial(_staged_on_all, self.nodes, model, folder)
        nodes, staged = relayed(stage, self.progress, "copying the model to the hosts")
        start = PredictParts(nodes.scratch, staged.run_name, function, staged.model, staged.rows, self.device, slots=())
        requests = {host: replace(start, slots=self.slots[host]) for host in nodes.hosts}
        heard, processes = SimpleQueue[Heard](), {host: len(self.slots[host]) for host in nodes.hosts}
        attendance = Attendance(FromPredictor, _PROCESS, self.lease_seconds, self.lease_seconds)
        with attended(nodes, requests, attendance, lambda host, what: heard.put(Heard(host, what))):
            yield from SharedParts(jobs, processes, advance).results(heard)


def _staged_on_all(nodes: Nodes, model: Path, folder: Path, progress: Progress) -> tuple[Nodes, _Staged]:
    """Copy the model and the rows to the hosts that are up, and return these."""
    while True:
        try:
            return nodes, _stage(nodes, model, folder, progress)
        except HostError as error:
            if not error.hosts:  # which host to do without is not known
                raise
            nodes = _without(nodes, dict.fromkeys(error.hosts, error))


def _stage(nodes: Nodes, model: Path, folder: Path, progress: Progress) -> _Staged:
    """Copy the model and the rows to all hosts. A model that hosts have already is not copied again."""
    names = sorted({*names_read(model), *(recorded_files(model) or ()), MANIFEST})
    files, token = listed(model, names), secrets.token_hex(6)
    path = staged_path("model", fingerprint({each.name: each.sha256 for each in files}))
    staged = _Staged(f"predict-{token}", path, staged_path("predict", token))
    reports = StagingReports(progress)
    stage_folder(nodes, model, files, staged.model, staged.run_name, reports)
    stage_folder(nodes, folder, listed(folder, (ROWS, OFFSETS, ORDER, STARTS)), staged.rows, staged.run_name, reports)
    return staged
