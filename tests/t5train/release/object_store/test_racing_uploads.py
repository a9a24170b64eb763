"""Eight processes publish to one destination of a real S3 server, and write the manifest at the same moment."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from t5train.records.stage_records import Export
from tests.support.s3_reader import Reader

pytestmark = pytest.mark.slow

SIZES = {"config.json": 700, "model.safetensors": 5_000}
SEEDS = (0, 0, 0, 0, 1, 2, 3, 4)  # four processes have the same export


def test_of_eight_processes_exactly_one_publishes_and_the_others_leave_nothing(
    s3: Any, make_random_export: Callable[..., Export], reader: Reader, destination: str, rounds: int
) -> None:
    exports = [make_random_export(f"run-{number}", seed, SIZES) for number, seed in enumerate(SEEDS)]
    command = [sys.executable, "-m", "tests.support.racing_uploads", *(str(export.path) for export in exports)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as process:
        for number in range(max(2, rounds)):
            process.stdin.write(f"{destination}-{number}\n")
            outcomes = process.stdout.readline().split()
            assert outcomes.count("new") == 1, outcomes
            winner = outcomes.index("new")
            for seed, outcome in zip(SEEDS, outcomes, strict=True):
                assert outcome in {"new", "reused" if seed == SEEDS[winner] else "lost"}, outcomes
            manifest = reader.require_only(f"{destination}-{number}")
            assert manifest["inputs"]["export"] == exports[winner].fingerprint
            assert manifest["files"]["certificate.json"]["sha256"] == exports[winner].files["certificate.json"].sha256
