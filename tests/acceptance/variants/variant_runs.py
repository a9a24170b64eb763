"""Run one case as a user would: each stage of the program is a process."""

import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from t5train.model.model_shape import resolve
from t5train.records import metrics
from t5train.records.stage_records import TokenShards
from t5train.spec import RunSpec
from t5train.spec.recipes import recipe
from t5train.train.flops import flops_per_token
from tests.acceptance.variants.machine_memory import available_memory
from tests.acceptance.variants.variant_cases import CLEAR_ERRORS, Case

PROGRAM = (sys.executable, "-c", "from flows.cli.__main__ import main; main()")
Row = dict[str, Any]


class StageFailed(Exception):
    """A stage failed; the message is the last line of its error output."""


def stage(seconds: dict[str, float], name: str, *arguments: object, timeout: float | None = None) -> None:
    """Run a subcommand of ``t5-pretrain``, and record its seconds under its name. Raises StageFailed if it fails."""
    started, command = time.perf_counter(), [*PROGRAM, name, *map(str, arguments)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired as error:
        raise StageFailed(f"{name} took more than {error.timeout:.0f} s and was killed") from None
    finally:
        seconds[name] = round(time.perf_counter() - started, 1)
    if done.returncode:
        raise StageFailed((done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1])


class Runner:
    """Runs cases on one text, below one root."""

    def __init__(self, root: Path, *, tiny: bool, keep: bool) -> None:
        self.root, self.tiny, self.keep = root, tiny, keep

    def tokenize(self, corpus: str, vocabulary: str) -> None:
        """Make token shards of the text; quick if they exist."""
        where = ("--corpus", corpus, "--tokenizer", vocabulary, "--out", self._data)
        stage({}, "tokenize", *where, *(("--shard-tokens", 1 << 18) if self.tiny else ()))

    def spec(self, case: Case) -> RunSpec:
        """The run that the case asks for. Raises SpecError if the recipe or a setting does not exist."""
        return recipe(case.recipe).with_settings(case.all_settings(tiny=self.tiny))

    def train(self, case: Case, deadline: float | None) -> Row:
        """Train to the last step, or to the expected error; return the first part of the case's row."""
        optimizer = self.spec(case).optimizer
        row: Row = {"name": case.name, "recipe": case.recipe, "ranks": case.ranks, "precision": case.precision}
        row |= {
            "steps": optimizer.num_steps,
            "batch": optimizer.global_batch_sequences,
            "tiny": self.tiny,
            "seconds": {},
        }
        seconds_left = None if deadline is None else max(1.0, deadline - time.monotonic())
        try:
            with available_memory() as available:
                stage(row["seconds"], "train", *self._arguments(case), timeout=seconds_left)
        except StageFailed as error:
            return row | {"error": str(error), "passed": case.must_fail and self._reported(case) in CLEAR_ERRORS}
        if case.must_fail:
            return row | {
                "error": f"expected one of {', '.join(CLEAR_ERRORS)}, but training succeeded",
                "passed": False,
            }
        return row | {"machine_memory_bytes": available[0] - min(available), **self._measured(case)}

    def certify(self, case: Case, row: Row) -> Row:
        """Consolidate, export and certify the model; return the complete row.

        Removes the files of a case that passed.
        """
        if "passed" not in row:
            try:
                row["certificate"] = self._certificate(case, row["seconds"])
                row["passed"] = row["certificate"]["passed"]
            except StageFailed as error:
                row |= {"error": str(error), "passed": False}
        if row["passed"] and not self.keep:
            shutil.rmtree(self._run(case))
        return row

    def _arguments(self, case: Case) -> list[object]:
        settings = [f"{key}={json.dumps(value)}" for key, value in case.all_settings(tiny=self.tiny).items()]
        where = ["--root", self.root, "--name", case.name, "--shards", self._data / "shards"]
        return [case.recipe, *(word for setting in settings for word in ("--set", setting)), *where]

    def _certificate(self, case: Case, seconds: dict[str, float]) -> Row:
        run = self._run(case)
        stage(seconds, "consolidate", run / "checkpoints", run / "weights")
        if not self.keep:
            shutil.rmtree(run / "checkpoints")  # the optimizer's moments would fill the disk
        where = ("--run", run, "--tokenizer", self._data / "tokenizer")
        stage(seconds, "export", run / "weights", run / "export", *where)
        stage(seconds, "certify", run / "export", run / "witness")
        found = json.loads((run / "export/certificate.json").read_text("utf-8"))
        probes = found["probes"].values()
        return {
            "passed": found["passed"],
            "device": found["device"],
            "bit_equal": all(probe["bit_equal"] for probe in probes),
            "largest_difference": max(probe["max_relative_difference"] for probe in probes),
            "tolerance": found["relative_tolerance"],
        }

    def _measured(self, case: Case) -> Row:
        """Values from the run's metrics: rates are medians of the second half; memory is the maximum, on rank 0."""
        spec = self.spec(case)
        vocabulary = int(TokenShards.load(self._data / "shards").counts["vocab_size"])
        steps = [line for line in metrics.read(self._run(case) / "metrics.jsonl") if "loss" in line]
        rate = statistics.median(_floats(steps[len(steps) // 2 :], "tokens_per_second"))
        return {
            "tokens_per_second": rate,
            "flops_per_second": rate * flops_per_token(resolve(spec.model, vocabulary), spec.objective),
            "accelerator_memory_bytes": max(_floats(steps, "memory_bytes")),
            "host_memory_bytes": max(_floats(steps, "host_memory_bytes")),
            "loss": [steps[0]["loss"], steps[-1]["loss"]],
            "skipped_steps": steps[-1]["skipped_steps"],
        }

    def _reported(self, case: Case) -> str:
        """The class of the error that a rank of the last attempt reported; empty if none did."""
        reports = sorted((self._run(case) / "attempts").glob("*/rank-*.error.json"))
        return str(json.loads(reports[-1].read_text("utf-8"))["type"]) if reports else ""

    @property
    def _data(self) -> Path:
        return self.root / "data"

    def _run(self, case: Case) -> Path:
        return self.root / "runs" / case.name


def _floats(steps: list[metrics.Values], name: str) -> list[float]:
    return [float(step[name] or 0) for step in steps]


def with_mfu(row: Mapping[str, Any], peak_flops: float) -> Row:
    """Add the MFU of a row: its matrix products, relative to the peak of all accelerators; None for a tiny case."""
    rate = row.get("flops_per_second")
    return {**row, "mfu": rate / (peak_flops * row["ranks"]) if rate and not row["tiny"] else None}
