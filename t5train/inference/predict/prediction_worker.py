"""A process that predicts parts of all rows on one device."""

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np
import orjson
from pydantic import TypeAdapter

from t5train.data.worker_processes import Advance, Json
from t5train.errors import InputError
from t5train.files.atomic import replacing
from t5train.inference.model_folder import DType, ModelFolder
from t5train.inference.predict.batch_plan import BatchPlan
from t5train.inference.predict.source_rows import SourceRow
from t5train.inference.text.decoding import Decoder, GenerationSpec, Hypothesis
from t5train.records.digests import FileDigest, SafetensorsDigest

ROWS, OFFSETS, ORDER, STARTS = "rows.jsonl", "offsets.npy", "order.npy", "starts.npy"
"""In the folder of predictions until it is complete: all rows, where each begins, and the two arrays of the plan."""
PARTS = "part-*.jsonl"
"""Matches the names of parts."""
DIGESTS = TypeAdapter(dict[str, FileDigest | SafetensorsDigest])
"""Writes the digests of a model into a job, and reads them."""


def part_name(part: int) -> str:
    """Return the name of the file of a part, which has a line ``[row, text, tokens, ended]`` for each of its rows."""
    return f"part-{part:06d}.jsonl"


def write_plan(folder: Path, plan: BatchPlan, offsets: np.ndarray) -> None:
    """Write what ``predict_parts`` reads, besides the rows. ``offsets`` int64 [rows]: where each begins in its file."""
    for name, values in ((OFFSETS, offsets), (ORDER, plan.order), (STARTS, plan.starts)):
        with replacing(folder / name) as file:
            np.save(file, values)


def predict_parts(job: Json, advance: Advance) -> Json:
    """Predict the parts of a job, and write a file for each.

    On a CPU, one thread is used, as the order of sums, and so the bits of a result, depends on their number. Raises
    InputError if the device has too little memory for a batch.
    """
    import torch  # slow to import, and only needed here

    if job["device"] == "cpu":
        torch.set_num_threads(1)
    folder, spec = Path(job["folder"]), GenerationSpec(**job["spec"])
    plan = BatchPlan(np.load(folder / ORDER, mmap_mode="r"), np.load(folder / STARTS))
    offsets = np.load(folder / OFFSETS, mmap_mode="r")
    decoder = _decoder(job["model"], job["digests"], job["device"], job["dtype"])
    for part in job["parts"]:
        with replacing(folder / part_name(part)) as written:
            for batch in plan.batches_of(part):
                numbers = plan.rows_of(batch)
                rows = list(_rows(folder / ROWS, offsets[numbers]))
                of_batch = spec._replace(seed=(spec.seed << 32) + batch)
                try:
                    found = decoder.decode([row.source for row in rows], of_batch)
                except torch.OutOfMemoryError as error:
                    raise InputError(_too_large(job["device"], rows, job["less_memory"])) from error
                for number, hypothesis in zip(numbers.tolist(), found, strict=True):
                    written.write(orjson.dumps([number, *hypothesis], option=orjson.OPT_APPEND_NEWLINE))
                advance(len(rows))
    return {"parts": len(job["parts"])}


@lru_cache(maxsize=1)
def _decoder(model: str, digests: str, device: str, dtype: DType) -> Decoder:
    """Load a model once for all jobs of this process: the one with these digests, which may be changed meanwhile."""
    return Decoder(ModelFolder.open(Path(model), DIGESTS.validate_json(digests)), device, dtype)


def _rows(file: Path, offsets: np.ndarray) -> Iterator[SourceRow]:
    with open(file, "rb") as rows:
        for offset in offsets.tolist():
            rows.seek(offset)
            yield SourceRow(*orjson.loads(rows.readline()))


def _too_large(device: str, rows: list[SourceRow], less_memory: str) -> str:
    longest = max(rows, key=lambda row: len(row.source))
    if len(rows) == 1:
        alone = f"row {longest.id} alone, whose source has {len(longest.source):,} characters"
        return f"{device} has too little memory for {alone}. Shorten it"
    return f"{device} has too little memory for {len(rows)} sources at once. {less_memory}"


def read_part(file: Path) -> Iterator[tuple[int, Hypothesis]]:
    """Yield the number and the hypothesis of each row of a part."""
    with open(file, "rb") as lines:
        for line in lines:
            number, *hypothesis = orjson.loads(line)
            yield number, Hypothesis(*hypothesis)
