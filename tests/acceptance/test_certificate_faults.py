"""Faults in every published file, planted before certification and sealed in the manifest."""

from pathlib import Path

from tests.acceptance.certificate_faults import FAMILIES, campaign
from tests.acceptance.file_faults import FAULTS


def test_every_fault_is_refused_by_the_certificate_even_with_a_matching_manifest(tmp_path: Path) -> None:
    table, missed = campaign(tmp_path, trials=160, seed=1)
    assert not missed
    assert {file for file, _ in table} == set(FAULTS)
    assert sum(count["planted"] for count in table.values()) > 130
    assert set(FAMILIES) == {"v1.0", "v1.1", "switch"}
