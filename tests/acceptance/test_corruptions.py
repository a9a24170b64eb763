"""Faults of every kind in checkpoints of every layout."""

from collections import Counter
from pathlib import Path

from tests.acceptance.checkpoint_faults import FAULTS, SIDECAR_FAULTS
from tests.acceptance.corruptions import LAYOUTS, Table, with_sidecars, without_sidecars


def total(table: Table) -> Counter[str]:
    return sum((count for row in table.values() for count in row.values()), Counter())


def test_with_sidecars_every_fault_is_refused_before_unpickling_and_its_file_named(tmp_path: Path) -> None:
    count = total(with_sidecars(tmp_path, trials=400, seed=1))
    assert count == {"tried": 400, "refused": 400, "named": 400}


def test_without_sidecars_no_fault_gives_wrong_weights(tmp_path: Path) -> None:
    table = without_sidecars(tmp_path, trials=3 * len(LAYOUTS) * len(FAULTS.keys() - SIDECAR_FAULTS), seed=1)
    assert not any(row["wrong"] for row in table.values())
    refused = {kind for kind, row in table.items() if not row["right"]}
    assert {"truncated", "file missing", "files swapped", "file of another step", "hostile pickle"} <= refused
