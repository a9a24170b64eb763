"""Runs one case of a night: repeats interleaved with the peer, the stages after training, and a resumed run.

::

    peer  repeat 1  peer  repeat 2  peer  repeat 3  peer  resumed run

Each repeat is divided by the mean of the peer before and after it, so that a slow machine does not look like a slow
program. Wall time and CPU time are measured for steps, stages and tokenising: only wall time shows waiting, and CPU
time stays steady on a busy machine. Other programs make some steps, saves and validations slower, but none faster: a
repeat counts with the lower quartile of its steps, and with its fastest save and validation.
"""

import hashlib
import json
import logging
import resource
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from infra.head.hosts.code_shipping import reached_nodes
from infra.head.hosts.hostfile import chosen_hosts
from infra.head.plain_ranks import run_ranks
from infra.head.regression.case_stages import (
    NightData,
    TrainedCase,
    certification,
    consolidation,
    exporting,
    resume_case,
    sharding,
    train_case,
)
from infra.node.inspection.facts import Devices, Question
from infra.node.inspection.hardware import CPU
from t5train.data.samples.span_corruption import geometry
from t5train.errors import HostError, T5TrainError
from t5train.files.atomic import write_json
from t5train.files.os_errors import in_one_line
from t5train.host_resources import num_cores
from t5train.model.model_shape import huggingface_config, resolve
from t5train.progress import Progress
from t5train.records.metrics import Values
from t5train.records.witness import Witness
from t5train.regression.baselines import machine_key
from t5train.regression.night_results import CPU_DEVICE, CaseResult, Measured
from t5train.regression.peer_loop import TIMES_FILE, PeerJob, StepTimes
from t5train.regression.regression_cases import RESUMED_STEP, RegressionCase
from t5train.regression.regression_findings import (
    ACCELERATOR_LOSS_TOLERANCE,
    ACCELERATOR_MEMORY,
    HOST_MEMORY,
    PEER,
    SAVING,
    STEP,
    STEP_CPU,
    VALIDATION,
    WALL,
    largest_change,
    unsteady,
)
from t5train.spec import MachinesSpec, RunSpec

PEER_STEPS = 60
_PEER_PROGRAM = ("-m", "t5train.regression.peer_loop")
_PEER_ENVIRONMENT = {
    "OMP_WAIT_POLICY": "PASSIVE",  # otherwise, waiting threads take CPU time on a busy machine
    "PYTHONSAFEPATH": "1",
}
_WARM_UP_STEPS = 5
_LEAST = {
    STEP: 0.15,
    STEP_CPU: 0.15,
    SAVING: 0.5,
    VALIDATION: 0.5,
    PEER: 0.5,
    HOST_MEMORY: 0.10,
    ACCELERATOR_MEMORY: 0.10,
}
_LEAST_OF_STAGES, _LEAST_OF_WAITS = 0.25, 0.75
_SHORTEST_STAGE, _SHORTEST_SAVE = 20.0, 1.0
"""In steps of the peer: shorter ones count as this long, as their wall time varies by chance and by the disk."""
_HASHED_BYTES, _HASHES = 8 << 20, 5
_ASK_SECONDS = 60.0  # enough to import torch from a slow disk
_log = logging.getLogger(__name__)


class _CaseFailed(Exception):
    """A stage failed, so that the case cannot go on; the message says which one and why."""


class _Taken(NamedTuple):
    """What a stage took."""

    cpu_seconds: float
    seconds: float


class CaseRun:
    """The runs of one case in the folder of a night."""

    def __init__(self, case: RegressionCase, folder: Path, data: NightData, progress: Progress) -> None:
        self._case, self._folder, self._data, self._progress = case, folder, data, progress
        self._started = time.monotonic()
        self._trained = list[TrainedCase]()
        self._values = defaultdict[str, list[float]](list)
        self._problems = list[str]()

    def measure(self, is_slower: Callable[[CaseResult], bool]) -> CaseResult:
        """Run everything; return the result.

        If the repeats differ so much that the result would be worthless, they are run afresh. If ``is_slower`` says of
        the result that something takes longer than is allowed, they are run once more and added. So a disturbance of
        some minutes is not taken for a regression. Whatever fails is a problem of the result.
        """
        try:
            with self._failures("asking the hosts"):
                self._case = on_available_accelerators(self._case, self._spec("1"))
            with self._failures("measuring"):
                self._repeat()
                if any(each.about != "loss" for each in unsteady(self._result())):
                    _log.info("%s: its repeats differ too much; measuring afresh", self._case.name)
                    self._values.clear()
                    self._repeat()
                if is_slower(self._result()):
                    _log.info("%s: slower than is allowed; measuring once more", self._case.name)
                    self._repeat()
                self._check_resume()
        except _CaseFailed as failed:
            self._problems.append(str(failed))
        return self._result()

    def _repeat(self) -> None:
        before = self._peer_times()
        for _ in range(self._case.repeats):
            measured = self._run_once(len(self._trained) + 1)
            after = self._peer_times()
            self._add(measured, before, after)
            before = after

    def _run_once(self, number: int) -> dict[str, _Taken]:
        """Train, consolidate, export and certify, and tokenise again; return what each of them took.

        For training, the CPU seconds are those of rank 0 up to the last step, as ranks may not have been awaited here.
        """
        spec, taken = self._spec(str(number)), dict[str, _Taken]()
        with self._stage("training", taken):
            trained = train_case(spec, self._data, self._said)
        taken["training"] = taken["training"]._replace(cpu_seconds=_of(trained.steps, "process_cpu_seconds")[-1])
        self._trained.append(trained)
        with self._stage("consolidation", taken):
            consolidation(spec, trained, self._said)
        with self._stage("export", taken):
            exporting(spec, self._data, self._said)
        with self._stage("certification", taken):
            certification(spec, self._said)
        with self._failures("sharding"):
            make_shards = sharding(spec, self._data, self._said)
        with self._stage("sharding", taken):
            make_shards()
        return taken

    @contextmanager
    def _stage(self, name: str, taken: dict[str, _Taken]) -> Iterator[None]:
        computed, started = cpu_seconds(), time.monotonic()
        with self._failures(name):
            yield
        taken[name] = _Taken(cpu_seconds() - computed, time.monotonic() - started)

    @contextmanager
    def _failures(self, name: str) -> Iterator[None]:
        try:
            yield
        except _CaseFailed:
            raise
        except Exception as error:  # also bugs: whatever ends a case is a regression, and other cases go on
            _log.info("%s: %s failed", self._case.name, name, exc_info=not isinstance(error, T5TrainError))
            raise _CaseFailed(f"{name} failed: {in_one_line(error)}") from error

    def _peer_times(self) -> StepTimes:
        """Let the peer take steps, with as many ranks as the case, at most one for each core.

        A step of it trains as many sequences as a step of the case, in one pass. Its model has no experts:
        transformers' loop over experts takes much more CPU time on a busy machine.
        """
        spec, counts = self._spec("1"), self._data.shards.counts
        dense = spec.with_settings({"model.moe.num_experts": 0, "layout.expert_parallel_size": 1})
        shape = resolve(dense.model, int(counts["vocab_size"]))
        num_ranks = min(spec.cluster.ranks, num_cores())
        job = PeerJob(
            config=huggingface_config(shape, int(counts["pad_id"]), int(counts["eos_id"])),
            sequences=spec.optimizer.global_batch_sequences // num_ranks,
            input_tokens=spec.objective.input_tokens,
            target_tokens=geometry(spec.objective).target_tokens,
            steps=PEER_STEPS,
        )
        folder = self._folder / "peer"
        folder.mkdir(exist_ok=True)
        write_json(folder / "job.json", job._asdict())
        self._said("steps of the peer", 0, PEER_STEPS)
        run_ranks((*_PEER_PROGRAM, str(folder / "job.json")), num_ranks, CPU, folder, environment=_PEER_ENVIRONMENT)
        self._said("steps of the peer", PEER_STEPS, PEER_STEPS)
        return StepTimes(**json.loads((folder / TIMES_FILE).read_text("utf-8")))

    def _add(self, stages: dict[str, _Taken], before: StepTimes, after: StepTimes) -> None:
        trained, values = self._trained[-1], self._values
        peer_wall, peer_cpu = (
            statistics.mean([quartile(one), quartile(other)]) for one, other in zip(before, after, strict=True)
        )
        values[STEP].append(quartile(_of(trained.steps, "seconds")) / peer_wall)
        values[STEP_CPU].append(quartile(_of(trained.steps, "cpu_seconds")) / peer_cpu)
        for name, taken in stages.items():
            values[name].append(taken.cpu_seconds / peer_cpu)
            values[name + WALL].append(max(taken.seconds / peer_wall, _SHORTEST_STAGE))
        values[SAVING].append(max(min(trained.save_seconds) / peer_wall, _SHORTEST_SAVE))
        values[VALIDATION].append(min(trained.validate_seconds) / peer_wall)
        values[PEER].append(peer_cpu / hash_seconds())
        values[HOST_MEMORY].append(max(_of(trained.steps, "host_memory_bytes")))
        if trained.witness.device_type != CPU_DEVICE:
            values[ACCELERATOR_MEMORY].append(max(_of(trained.steps, "memory_bytes")))
        self._check_repeats()

    def _check_repeats(self) -> None:
        """On the CPU, all repeats must give the same bits."""
        first, last = self._trained[0].witness, self._trained[-1].witness
        if last.device_type == CPU_DEVICE and (names := _different(last, first)):
            self._problems.append(
                f"two runs with the same seed ended with different weights, in {len(names)} of {len(first.tensors)} "
                f"tensors ({names[0]} ...)"
            )

    def _check_resume(self) -> None:
        """Compare the weights of a resumed run with those of the uninterrupted one."""
        with self._failures("resuming"):
            resumed = resume_case(self._spec("1"), self._spec("resumed"), RESUMED_STEP, self._data, self._said)
        first = int(resumed.steps[0]["step"] or 0)
        if first != RESUMED_STEP + 1:
            self._problems.append(
                f"a run with a checkpoint of step {RESUMED_STEP} began at step {first}, not {RESUMED_STEP + 1}"
            )
        if (what := _not_resumed(resumed, self._trained[0])) is not None:
            self._problems.append(f"after resuming from step {RESUMED_STEP}, {what} those of the uninterrupted run")

    def _result(self) -> CaseResult:
        spec = self._spec("1")
        device = self._trained[0].witness.device_type if self._trained else CPU_DEVICE
        chosen = chosen_hosts(spec.cluster).all if spec.cluster.hostfile else ()
        hosts = [f"{host.name}:{len(host.slots)}" for host in chosen]
        return CaseResult(
            case=self._case.name,
            machine=machine_key(spec.cluster.ranks, device, " ".join(hosts)),
            # what the losses and times of a run depend on: its identity and its layout
            settings={**spec.identity(), "layout": spec.layout.model_dump(mode="json")},
            same_model=self._case.same_model,
            device=device,
            curves=[each.curve for each in self._trained],
            measured={name: _measured(name, values) for name, values in self._values.items()},
            problems=list(dict.fromkeys(self._problems)),
            seconds=time.monotonic() - self._started,
        )

    def _spec(self, number: str) -> RunSpec:
        # With the night's name, because hosts still have the runs of earlier nights.
        return self._case.spec(self._folder, f"{self._case.name}-{number}-{self._folder.name}")

    def _said(self, what: str, done: int, total: int | None) -> None:
        self._progress(f"{self._case.name}, run {len(self._trained) + 1}: {what}", done, total)


def on_available_accelerators(case: RegressionCase, spec: RunSpec) -> RegressionCase:
    """Return the case, set to run on CPUs if it names no accelerator and its hosts have none.

    Raises:
        HostError: A host does not answer.

    """
    if spec.cluster.accelerator is not None or any(found.count or found.error for found in _devices(spec)):
        return case
    return replace(case, settings={**case.settings, "cluster.accelerator": CPU})


def _devices(spec: RunSpec) -> Iterator[Devices]:
    machines = MachinesSpec(storage=spec.storage, cluster=spec.cluster)
    question = Question(root=spec.storage.root, nonce_path=spec.storage.root)
    with reached_nodes(machines, chosen_hosts(spec.cluster).names) as (nodes, lacking):
        for answer in (*lacking.values(), *nodes.ask(question, _ASK_SECONDS).values()):
            if isinstance(answer, HostError):
                raise answer
            yield answer.devices


def cpu_seconds() -> float:
    """Return the CPU time so far of this process and of all processes that it has awaited."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def hash_seconds() -> float:
    """Return the CPU time of hashing some bytes, the shortest of a few: it depends on the processor, not on torch."""
    content, taken = bytes(_HASHED_BYTES), []
    for _ in range(_HASHES):
        started = time.process_time()
        hashlib.sha256(content).digest()
        taken.append(time.process_time() - started)
    return min(taken)


def quartile(values: Sequence[float]) -> float:
    """Return the lower quartile of step times, without the first steps, which load and compile."""
    return sorted(values[_WARM_UP_STEPS:])[(len(values) - _WARM_UP_STEPS) // 4]


def _of(steps: Sequence[Values], name: str) -> list[float]:
    return [float(step[name] or 0) for step in steps]


def _measured(name: str, values: list[float]) -> Measured:
    unit = "bytes" if name in {HOST_MEMORY, ACCELERATOR_MEMORY} else "peer"
    least = _LEAST_OF_WAITS if name.endswith(WALL) else _LEAST_OF_STAGES
    return Measured(unit=unit, minimum=_LEAST.get(name, least), values=values)


def _different(one: Witness, other: Witness) -> list[str]:
    """Return the names of tensors whose digests differ between two witnesses."""
    return [name for name in {**one.tensors, **other.tensors} if one.tensors.get(name) != other.tensors.get(name)]


def _not_resumed(resumed: TrainedCase, whole: TrainedCase) -> str | None:
    """Return what of a resumed run differs from the uninterrupted one; None if nothing does."""
    if resumed.witness.device_type == CPU_DEVICE:
        if names := _different(resumed.witness, whole.witness):
            return f"{len(names)} of {len(whole.witness.tensors)} weight tensors ({names[0]} ...) differ from"
        return None
    worst = largest_change(resumed.curve, whole.curve)
    if worst is None or worst.change <= ACCELERATOR_LOSS_TOLERANCE:
        return None
    return f"losses differ by up to {worst.change:.1e} (allowed {ACCELERATOR_LOSS_TOLERANCE:.0e}) from"
