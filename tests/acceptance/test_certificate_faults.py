"""Faults in every published file, planted before certification, with digests that match them."""

from pathlib import Path

import pytest

from tests.acceptance.certificate_faults import FAMILIES, campaign
from tests.acceptance.file_faults import FAULTS


@pytest.mark.slow
def test_every_fault_is_refused_by_the_certificate_even_with_a_matching_manifest(tmp_path: Path) -> None:
    kinds = sum(len(of_file) for of_file in FAULTS.values())
    table, missed = campaign(tmp_path, trials=kinds, seed=1)
    assert not missed
    assert {file for _, file, _ in table} == set(FAULTS)
    assert len(table) > 0.8 * kinds, "the others change no parsed value of the file"
    assert set(FAMILIES) == {"v1.0", "v1.1", "switch", "pairs", "lora", "evaluated"}
