"""Gradients that two real ranks reduce are exact sums, whatever the buckets, and whatever order they get ready in."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.training.launched import launch
from tests.support.training.reduction_program import gradient_of, offsets_of

pytestmark = pytest.mark.slow

RANKS = 2
JOB = {"sizes": [7, 130, 1, 64, 31, 200], "own_sizes": [12, 5, 40], "passes": 3, "dtype": "fp32", "unused": []}
JOBS: dict[str, dict[str, Any]] = {
    "one bucket": {**JOB, "bucket_elements": 10_000},
    "a bucket for each parameter": {**JOB, "bucket_elements": 1},
    "some parameters a bucket": {**JOB, "bucket_elements": 150},
    "one pass, in bf16": {**JOB, "bucket_elements": 150, "passes": 1, "dtype": "bf16"},
    "a parameter that one rank does not use": {**JOB, "bucket_elements": 100, "unused": [[1, 4], [0, 7]]},
    "a parameter that no rank uses": {**JOB, "bucket_elements": 100, "unused": [[0, 5], [1, 5]]},
    "a rank that owns padding only": {**JOB, "sizes": [1], "bucket_elements": 100},
}


@pytest.fixture(scope="module")
def reduced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("reduced")
    (root / "jobs.json").write_text(json.dumps(JOBS))
    launch(root / "jobs.json", RANKS, program="reduction_program")
    return root


def _mean(job: dict[str, Any], index: int, numel: int, ranks: range) -> torch.Tensor:
    """The sum over passes and ``ranks``, divided by the number of all ranks."""
    used = [rank for rank in ranks if [rank, index] not in job["unused"]]
    given = [gradient_of(rank, number, index, numel) for rank in used for number in range(job["passes"])]
    return torch.stack(given).sum(0) / RANKS if given else torch.zeros(numel)


@pytest.mark.parametrize("name", JOBS)
def test_each_rank_sums_what_it_owns_of_the_gradients_of_all_ranks(reduced: Path, name: str) -> None:
    job = JOBS[name]
    owned = [json.loads((reduced / f"{name}.rank-{rank}.json").read_text())[0] for rank in range(RANKS)]
    found = torch.tensor(owned).flatten()  # of both partitions, one behind the other
    offsets, total = offsets_of(job["sizes"], RANKS)
    assert found.numel() == total
    for index, (first, size) in enumerate(zip(offsets, job["sizes"], strict=True)):
        assert torch.equal(found[first : first + size], _mean(job, index, size, range(RANKS)))


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize("rank", range(RANKS))
def test_gradients_of_a_group_that_a_rank_has_alone_are_its_own(reduced: Path, name: str, rank: int) -> None:
    """They are divided by the number of ranks nevertheless, because every rank's loss is part of their mean."""
    job = JOBS[name]
    found = torch.tensor(json.loads((reduced / f"{name}.rank-{rank}.json").read_text())[1])
    offsets, _ = offsets_of(job["own_sizes"], 1)
    for number, (first, size) in enumerate(zip(offsets, job["own_sizes"], strict=True)):
        expected = _mean(job, len(job["sizes"]) + number, size, range(rank, rank + 1))
        assert torch.equal(found[first : first + size], expected)
