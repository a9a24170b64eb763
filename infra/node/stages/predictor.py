"""Predicts parts on this host, with a process for each of its slots, until the head closes the connection.

The head has staged the model and the rows before. Each part that is done is sent to it at once, so nothing is lost with
a host but what it has begun. The rows are removed at the end; the model stays, until its disk space is needed.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, ClassVar

from infra.node.channel import Channel
from infra.node.messages import Query, Request
from infra.node.node_folders import locks_folder, scratch_folder, within
from infra.node.stages.makers import Makers, require_same
from infra.node.storage.disk_usage import pin, remove_unused, unpin
from t5train.errors import AcceleratorBusy, HostMisconfigured
from t5train.files.locks import try_lock

if TYPE_CHECKING:
    from t5train.data.worker_processes import LastingProcess

PREDICTING_PACKAGES = (
    *("torch", "transformers", "tokenizers", "sentencepiece", "safetensors", "numpy", "orjson", "pydantic"),
)
"""The packages that predictions need, and that their bytes depend on."""
_CPU = "cpu"
_REMEDY = "or leave the host out of the hostfile"
_LOCK_WAIT_SECONDS = 0.5  # a process that looks up the holder takes a shared lock for a moment
_ALIVE_SECONDS = 1.0


@dataclass(frozen=True)
class FoundDevice:
    """The kind of device that a host predicts on, such as ``cuda`` or ``cpu``."""

    kind: str
    device_bytes: int
    """See ``t5train.inference.predict.devices.device_bytes``."""


@dataclass(frozen=True)
class FindDevice(Query[FoundDevice]):
    """Find the device, and compare what predicts there with the head."""

    action = "device"
    makers: Makers
    """Those of the head."""
    device: str | None
    """The kind of device that was asked for; None: the host's accelerators, if any."""
    slots: tuple[int, ...]


def device(request: FindDevice) -> FoundDevice:
    """Return the kind of device. Raises HostMisconfigured if the host cannot predict as the head asks."""
    require_same(request.makers, _REMEDY)
    import torch

    from t5train.inference.model_folder import chosen_device
    from t5train.inference.predict.devices import device_bytes

    kind = chosen_device(request.device)
    count = torch.accelerator.device_count() if kind != _CPU else 1 + max(request.slots)
    if max(request.slots) >= count:
        raise HostMisconfigured(
            f"slot {max(request.slots)} of this host is chosen, but it has {count} of {kind}. Write slots={count}, "
            f"{_REMEDY}"
        )
    return FoundDevice(kind, device_bytes(kind))


@dataclass(frozen=True)
class PredictParts(Request):
    """Starts a conversation: do the jobs that the head gives, until stdin ends."""

    action: ClassVar[str] = "predict"
    scratch: Path | None
    run_name: str
    """The name of this prediction, for which the head has staged both folders."""
    function: str
    """Does a job: ``"package.module:name"``, see ``t5train.data.worker_processes``."""
    model: str
    """The folder of the model, relative to the scratch folder."""
    rows: str
    """The folder of the rows and their plan, relative to the scratch folder. Parts are written there."""
    device: str
    """The kind of device."""
    slots: tuple[int, ...]
    """The devices, each with a process of its own."""


@dataclass(frozen=True)
class GivenPart:
    """A part for the next process that has nothing to do."""

    number: int
    file: str
    """The name of the file that has the part when the job is done."""
    job: str
    """The job as JSON, with the head's paths, and without a device."""


class FromPredictor:
    """Base class of the messages from a host that predicts."""


@dataclass(frozen=True)
class StillPredicting(FromPredictor):
    """The host is alive."""


@dataclass(frozen=True)
class RowsPredicted(FromPredictor):
    """So many more rows of a part are predicted."""

    number: int
    rows: int


@dataclass(frozen=True)
class PartPredicted(FromPredictor):
    """A part is done: the content of its file."""

    number: int
    content: bytes
    sha256: str


def predict(request: PredictParts, head: Channel) -> None:
    """Predict the parts that the head gives. Ends with the first error: the head gives the parts to other hosts."""
    from t5train.data.worker_processes import LastingProcess

    scratch, parts = scratch_folder(request.scratch), SimpleQueue[GivenPart | None]()
    with ExitStack() as stack:
        stack.callback(_clean_up, scratch, request)
        stack.enter_context(_locked(request))
        processes = [stack.enter_context(closing(LastingProcess(request.function))) for _ in request.slots]
        threads = stack.enter_context(ThreadPoolExecutor(len(processes), thread_name_prefix="predict"))
        running = []
        for slot, process in zip(request.slots, processes, strict=True):
            stack.callback(parts.put, None)
            stack.callback(process.kill)
            running.append(threads.submit(_work, _Predictor(scratch, request, slot, process, head), parts))
        while not head.at_end:
            for given in head.receive_within(_ALIVE_SECONDS, GivenPart):
                pin(scratch, request.rows, request.run_name)
                parts.put(given)
            for each in running:
                if each.done():
                    each.result()
            head.send(StillPredicting())


@dataclass(frozen=True)
class _Predictor:
    """A process, and what it predicts with."""

    scratch: Path
    request: PredictParts
    slot: int
    process: "LastingProcess"
    head: Channel

    def predict(self, given: GivenPart) -> None:
        """Have the process predict a part, and send it to the head."""
        folder, kind = within(self.scratch, self.request.rows), self.request.device
        job = json.loads(given.job) | {
            "model": str(within(self.scratch, self.request.model)),
            "folder": str(folder),
            "device": kind if kind == _CPU else f"{kind}:{self.slot}",
        }
        self.process.do(job, lambda rows: self.head.send(RowsPredicted(given.number, rows)))
        content = within(folder, given.file).read_bytes()
        self.head.send(PartPredicted(given.number, content, hashlib.sha256(content).hexdigest()))


def _work(predictor: _Predictor, parts: "SimpleQueue[GivenPart | None]") -> None:
    while (given := parts.get()) is not None:
        predictor.predict(given)


@contextmanager
def _locked(request: PredictParts) -> Iterator[None]:
    """Lock the accelerators, as ranks do. On the CPU there is no lock."""
    slots = () if request.device == _CPU else request.slots
    with ExitStack() as stack:
        for path in (locks_folder() / f"{request.device}-{slot}.lock" for slot in slots):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            stack.callback(os.close, descriptor)
            if not try_lock(descriptor, _LOCK_WAIT_SECONDS):
                holder = path.read_text("utf-8") or "another run"
                raise AcceleratorBusy(f"accelerator {path.stem} is in use by {holder}. Wait for it to end, {_REMEDY}")
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"predict, process {os.getpid()}".encode(), 0)
        yield


def _clean_up(scratch: Path, request: PredictParts) -> None:
    unpin(scratch, request.run_name)
    remove_unused(scratch, request.rows)
