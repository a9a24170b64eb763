"""Predicts what a T5 writes for each row of files, on one or many devices, so that their number changes nothing.

The folder of a result has, until it is complete, the rows, the plan of batches, and a file for each part that is done:
if predicting is interrupted, the next call predicts the other parts.
"""

import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson
from pydantic import ValidationError

from t5train.data.checks.unchanged_files import digests_of, require_unchanged, stamps_of
from t5train.data.passages import SourceFile
from t5train.data.worker_processes import Advance, Json, Workers, in_processes
from t5train.errors import InputError, SpecError, StorageError
from t5train.files.atomic import replacing, write_json
from t5train.files.output_folder import making
from t5train.host_resources import require_free_space, require_writable
from t5train.inference.model_folder import DType, ModelFolder, require_dtype
from t5train.inference.predict.batch_plan import BatchLimits, BatchPlan, batch_plan, with_margin
from t5train.inference.predict.batch_size import BATCHES, BatchSize
from t5train.inference.predict.devices import Machines, OtherMachines, device_bytes, devices_of
from t5train.inference.predict.prediction_worker import (
    DIGESTS,
    OFFSETS,
    ORDER,
    PARTS,
    ROWS,
    STARTS,
    part_name,
    read_part,
    write_plan,
)
from t5train.inference.predict.predictions import PREDICTION, PREDICTIONS, Predicted, Prediction
from t5train.inference.predict.source_rows import (
    DOUBLED,
    PREFIXES_MISSING,
    SourceFiles,
    SourceRow,
    source_files,
    source_rows,
)
from t5train.inference.text.decoding import GenerationSpec, Hypothesis
from t5train.progress import Progress, adding, silent
from t5train.quantities import quantity
from t5train.records.digests import FileDigest, digest_file
from t5train.records.identity import fingerprint, installed_versions
from t5train.records.witness import LONGEST_TRAIN_TARGET
from t5train.spec import StorageSpec

VERSION = 2  # incremented when the same job would give another result
_WORKER = "t5train.inference.predict.prediction_worker:predict_parts"
_ROWS_AT_ONCE = 1024
_OF_SAMPLING = ("sample", "temperature", "top_p", "seed")
_FROM = {
    "references": "those of the longest reference, and a quarter",
    "training": "by the longest targets in training",
}
_log = logging.getLogger(__name__)


class PredictJob(NamedTuple):
    """What to predict, and how. ``device`` and ``processes`` change no result on one kind of device."""

    model: Path
    """Folder of a T5: an export of this project, or any other."""
    files: Sequence[str]
    """Files of rows, named as ``pairs.train`` names files of pairs; the target is optional."""
    out: Path
    """Folder of the result."""
    decoding: GenerationSpec = GenerationSpec()
    batch_tokens: int | None = None
    """Most tokens of the sources and hypotheses of a batch, once for each beam; what fits into memory if left out."""
    device: str | None = None
    """Such as ``cuda:1``, ``cuda`` (all of them) or ``cpu``; if left out, this machine's accelerators, if any."""
    processes: int | None = None
    """One for each accelerator or, on a CPU, for each core as far as memory allows, if left out."""
    root: Path | None = None
    """Root folder, in whose ``cache`` remote files are kept; the default one if left out."""
    tokens_setting: str = "--max-new-tokens"
    """What sets the most tokens of a hypothesis, for messages."""
    less_memory: str = "Set a lower --batch-tokens"
    """What to do if a batch is too large for a device, for messages."""
    dtype: DType = "float32"
    """Of the weights, and of what is computed."""
    machines: Machines = nullcontext
    """Who predicts. They are asked once the model and files are checked. Of others, ``processes`` does not count."""


class _Prepared(NamedTuple):
    """A job that was checked without reading more than the first rows of its files."""

    job: PredictJob
    folder: ModelFolder
    inputs: list[SourceFiles]
    machines: OtherMachines | None
    devices: list[str]
    """One for each process; of other machines, one for all."""

    @property
    def kind(self) -> str:
        """The kind of all devices, such as cpu."""
        return self.devices[0].partition(":")[0]

    def files(self) -> list[SourceFile]:
        """Return all files, each once."""
        return _files(self.inputs)

    def identity(self, digests: Mapping[SourceFile, FileDigest]) -> dict[str, Any]:
        """Return all that decides the predictions."""
        decoding = self.job.decoding
        kept = {"num_beams", *(_OF_SAMPLING if decoding.sample else ())}
        kept |= {"length_penalty"} if decoding.num_beams > 1 else set()
        return {
            "model": {name: str(digest) for name, digest in self.folder.recorded.items()},
            "inputs": [each.identity([digests[file].sha256 for file in each.files]) for each in self.inputs],
            "decoding": {name: value for name, value in decoding._asdict().items() if name in kept},
            "max_new_tokens": decoding.max_new_tokens,
            "batch_tokens": self.job.batch_tokens,
            "device": self.kind,
            "dtype": self.job.dtype,
            "versions": installed_versions(("torch", "transformers")),
        }


def _files(inputs: Sequence[SourceFiles]) -> list[SourceFile]:
    return list(dict.fromkeys(file for each in inputs for file in each.files))


class _Rows(NamedTuple):
    """What was found in the rows. Arrays are int64 [rows]: tokens of sources, and where rows begin in their file."""

    lengths: np.ndarray
    offsets: np.ndarray
    longest_reference: int
    counts: Counter[str]


def predict(job: PredictJob, progress: Progress = silent, *, workers: Workers | None = None) -> Predicted:
    """Predict all rows, and write ``predictions.jsonl`` and ``prediction.json``. A finished result is reused.

    Batches are formed once for all rows. So the result is the same for any number of processes, and after any
    interruption, on the same kind of device; with sampling, too. The most tokens of a hypothesis are those of
    ``decoding`` if it sets them, else those of the longest reference and a margin, else those of targets in training.

    Args:
        job: What to predict.
        progress: Called with the number of files hashed, of rows read, then of sources predicted.
        workers: Calls the function that predicts parts; if left out, those of ``job.machines``, or processes on this
            machine.

    Returns:
        What was written to ``prediction.json``.

    Raises:
        InputError: The model or a file cannot be used, or a source is empty, or a batch is too large for the device.
        SpecError: The device is not available, a task is not clear, or nothing says how long hypotheses may be.
        StorageError: ``job.out`` cannot be written, or holds another result.
        WorkerLost: A process was killed. What is done is kept.

    """
    folder, inputs = _checked(job, progress)
    with job.machines() as machines:
        devices = devices_of(folder, job.device, job.processes, machines)
        require_dtype(job.dtype, devices[0])
        prepared = _Prepared(job, folder, inputs, machines, devices)
        predicted = _found_or_predicted(prepared, progress, workers)
    for line in _warnings(predicted, folder, job.tokens_setting):
        _log.warning("%s", line)
    return predicted


def _found_or_predicted(prepared: _Prepared, progress: Progress, workers: Workers | None) -> Predicted:
    job, files = prepared.job, prepared.files()
    stamps, digests = stamps_of(files), digests_of(files, progress)
    prepared = prepared._replace(folder=prepared.folder.digested())
    identity = prepared.identity(digests)
    key = fingerprint({"kind": "predictions", "version": VERSION, **identity})
    with making(job.out, key):
        if (predicted := _finished(job.out)) is None:
            require_free_space(job.out, 4 * sum(each.size for each in digests.values()), "the predictions")
            rows = _written_rows(prepared, progress)
            require_unchanged(stamps, digests)
            workers = workers or (prepared.machines.workers if prepared.machines else _here)
            predicted = _predicted(prepared, rows, {"fingerprint": key, **identity}, progress, workers)
        for name in (ROWS, OFFSETS, ORDER, STARTS, BATCHES):
            (job.out / name).unlink(missing_ok=True)
        for part in job.out.glob(PARTS):
            part.unlink()
    return predicted


def _checked(job: PredictJob, progress: Progress) -> tuple[ModelFolder, list[SourceFiles]]:
    """Open the model and the files, and read the first rows of these."""
    require_writable(job.out)
    folder = ModelFolder.open(job.model)
    root = (job.root or StorageSpec().root).absolute()
    inputs = [source_files(each, folder.run.tasks, root, progress) for each in job.files]
    has_references = all(each.has_references for each in inputs)
    if not (job.decoding.max_new_tokens or has_references or folder.target_tokens):
        raise SpecError(
            f"nothing says how long hypotheses may be: {job.model} does not record the lengths of targets in training, "
            f"and not all rows have references. Set {job.tokens_setting}"
        )
    if next(source_rows(inputs, folder.run.tasks, Counter()), None) is None:
        raise InputError(f"{', '.join(file.shown for file in _files(inputs))} has no rows. Name a file with sources")
    return folder, inputs


def _finished(out: Path) -> Predicted | None:
    """Return what a finished result in a folder records. Raises StorageError if it was changed since."""
    if not (out / PREDICTION).exists():
        return None
    with suppress(FileNotFoundError, ValidationError):
        predicted = Predicted.model_validate_json((out / PREDICTION).read_bytes())
        if digest_file(out / PREDICTIONS).sha256 == predicted.sha256:
            _log.info("%s has the predictions of this job already", out)
            return predicted
    raise StorageError(
        f"{out} holds predictions of this job, but {PREDICTION} or {PREDICTIONS} was changed since. Choose another "
        "folder, or remove this one"
    )


def _written_rows(prepared: _Prepared, progress: Progress) -> _Rows:
    """Write all rows to one file, and return what was found in them."""
    lengths, offsets, longest, counts, done = list[int](), list[int](), 0, Counter[str](), 0
    encode = prepared.folder.vocabulary().encode
    rows = source_rows(prepared.inputs, prepared.folder.run.tasks, counts)
    with replacing(prepared.job.out / ROWS) as file:
        while some := list(islice(rows, _ROWS_AT_ONCE)):
            for row in some:
                offsets.append(done)
                done += file.write(orjson.dumps([*row], option=orjson.OPT_APPEND_NEWLINE))
            lengths += map(len, encode([row.source for row in some]))
            references = [row.reference for row in some if row.reference is not None]
            longest = max(longest, *map(len, encode(references)), 0)
            progress("rows read", len(offsets), None)
    return _Rows(np.array(lengths, np.int64), np.array(offsets, np.int64), longest, counts)


def _predicted(
    prepared: _Prepared, rows: _Rows, decided: dict[str, Any], progress: Progress, workers: Workers
) -> Predicted:
    """Predict the parts that are missing, merge them, and record the result."""
    job, folder = prepared.job, prepared.folder
    limit, limit_from = _limit(prepared, rows)
    memory = prepared.machines.device_bytes if prepared.machines else device_bytes(prepared.kind)
    size = BatchSize(folder, prepared.kind, job.dtype, job.decoding.num_beams, memory)
    tokens = job.batch_tokens or size.recorded_tokens(job.out / BATCHES, int(rows.lengths.max()))
    limits = BatchLimits(tokens, size.sequences(len(rows.lengths)), job.decoding.num_beams, limit)
    plan = batch_plan(rows.lengths, limits)
    write_plan(job.out, plan, rows.offsets)
    _predict_parts(prepared, plan, limit, progress, workers)
    not_ended = _merge(job.out, plan)
    inputs = decided.pop("inputs")
    model = decided.pop("model")
    predicted = Predicted.model_validate(
        decided
        | {
            "model": folder.path.absolute().name,
            "weights": {name: digest for name, digest in model.items() if name.endswith(".safetensors")},
            "tasks": {each["task"]: each["prefix"] for each in inputs if each["task"] is not None},
            "max_new_tokens": limit,
            "max_new_tokens_from": limit_from,
            "batch_tokens": tokens,
            "rows": len(rows.lengths),
            "long_sources": int((rows.lengths > folder.trained_tokens).sum()),
            DOUBLED: rows.counts[DOUBLED],
            PREFIXES_MISSING: rows.counts[PREFIXES_MISSING],
            "not_ended": not_ended,
            "sha256": digest_file(job.out / PREDICTIONS).sha256,
        }
    )
    write_json(job.out / PREDICTION, predicted.model_dump(mode="json"))
    return predicted


def _limit(prepared: _Prepared, rows: _Rows) -> tuple[int, str]:
    """Return the most tokens of a hypothesis, and what says so.

    A hypothesis may be a quarter longer than the longest reference or, without references, target of training, and 8
    tokens at least. What is longer by more is hardly ever right, and allowing this much costs nothing where it does not
    occur: a batch ends when all of its hypotheses have. Exports that do not record the longest target record the length
    that targets were cut to.
    """
    if (chosen := prepared.job.decoding.max_new_tokens) is not None:
        return chosen, "setting"
    if all(each.has_references for each in prepared.inputs):
        return with_margin(rows.longest_reference), "references"
    folder = prepared.folder
    recorded = folder.run.data.get(LONGEST_TRAIN_TARGET)
    return (folder.target_tokens if recorded is None else with_margin(int(recorded))), "training"


def _predict_parts(prepared: _Prepared, plan: BatchPlan, limit: int, progress: Progress, workers: Workers) -> None:
    """Share the parts that are missing out to the processes, every one of them parts of all lengths.

    Other machines may be slow or lost, so they get each part as a job of its own.
    """
    out, devices = prepared.job.out, prepared.devices
    missing = [part for part in range(plan.num_parts) if not (out / part_name(part)).exists()]
    common = {
        "model": str(prepared.job.model.absolute()),
        "digests": DIGESTS.dump_json(dict(prepared.folder.recorded)).decode(),
        "folder": str(out.absolute()),
        "spec": prepared.job.decoding._replace(max_new_tokens=limit)._asdict(),
        "less_memory": prepared.job.less_memory,
        "dtype": prepared.job.dtype,
    }
    if prepared.machines is not None:
        devices = devices * len(missing)
    shares = [missing[number :: len(devices)] for number in range(len(devices))]
    jobs = [common | {"device": device, "parts": share} for device, share in zip(devices, shares, strict=True) if share]
    left, total = sum(map(plan.rows_in, missing)), len(plan.order)
    if left < total:
        _log.info("%s were predicted before", quantity(total - left, "source"))
    if jobs:
        for _ in workers(_WORKER, jobs, adding(progress, "sources predicted", left)):
            pass


def _here(function: str, jobs: Sequence[Json], advance: Advance) -> Iterator[Json]:
    return in_processes(function, jobs, len(jobs), advance)


def _merge(out: Path, plan: BatchPlan) -> int:
    """Write the predictions in the order of the rows, and return how many have not ended."""
    found = dict[int, Hypothesis]()
    for part in range(plan.num_parts):
        rows_of_part = dict[int, Hypothesis]()
        with suppress(ValueError, TypeError):
            rows_of_part = dict(read_part(out / part_name(part)))
        if len(rows_of_part) != plan.rows_in(part):
            raise StorageError(
                f"{out / part_name(part)} is damaged. Remove it, and run the same command again: only this part is "
                "predicted again"
            )
        found.update(rows_of_part)
    with open(out / ROWS, "rb") as rows, replacing(out / PREDICTIONS) as merged:
        for number, line in enumerate(rows):
            row, hypothesis = SourceRow(*orjson.loads(line)), found[number]
            prediction = Prediction(
                **row._asdict(), hypothesis=hypothesis.text, tokens=hypothesis.tokens, ended=hypothesis.ended
            )
            merged.write(prediction.line())
    return sum(not each.ended for each in found.values())


def _warnings(predicted: Predicted, folder: ModelFolder, setting: str) -> Iterator[str]:
    """Yield what may make predictions worse than the model is."""
    if predicted.not_ended:
        yield (
            f"of {predicted.rows:,} hypotheses, {predicted.not_ended:,} were cut at {predicted.max_new_tokens:,} "
            f"tokens ({_FROM.get(predicted.max_new_tokens_from, setting)}). If they should be longer, set {setting}"
        )
    if predicted.long_sources:
        yield (
            f"{predicted.long_sources:,} of {quantity(predicted.rows, 'source')} have more than the "
            f"{folder.trained_tokens:,} tokens that the model was trained with: what it writes for them may be poor"
        )
    if predicted.doubled_prefixes:
        yield (
            f"{predicted.doubled_prefixes:,} of {quantity(predicted.rows, 'source')} begin with the prefix of their "
            "task in their files already, so they have it twice: remove it there, or set an empty one (#prefix=)"
        )
    if predicted.missing_prefixes:
        prefixes = ", ".join(json.dumps(each, ensure_ascii=False) for each in folder.run.tasks.values())
        yield (
            f"{predicted.missing_prefixes:,} of {quantity(predicted.rows, 'source')} begin with none of the prefixes "
            f"that the model was fine-tuned with ({prefixes}): leave #prefix= out, and name the task (#task=)"
        )
