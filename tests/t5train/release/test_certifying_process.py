"""Exports are certified in a fresh process, whose end is always explained."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from t5train.errors import CertificationError
from t5train.records.stage_records import Export
from t5train.records.witness import Witness
from t5train.release.certificate import Certificate
from t5train.release.certification import certify_in_fresh_process
from tests.acceptance.planted_faults import with_first_import


@pytest.fixture
def exported(make_export: Callable[..., Export]) -> Export:
    """An export that is not certified yet."""
    return make_export(certified=False)


@pytest.fixture
def witness(tmp_path: Path) -> Path:
    return tmp_path / "run/witness"


@pytest.mark.slow
def test_a_fresh_process_certifies_the_model_that_was_trained(exported: Export, witness: Path) -> None:
    steps: set[str] = set()
    done = certify_in_fresh_process(exported, witness, lambda *step: steps.add(step[0]))
    done.verify()
    certificate = Certificate.parse((done.path / "certificate.json").read_bytes(), "certificate.json")
    certificate.require_vouching(done.fingerprint, Export.load(done.path).files, "certificate.json")
    assert certificate.tensors_compared == len(Witness.load(witness).tensors)
    assert {"tensors compared", "probes compared"} <= steps


def test_an_error_that_ends_the_fresh_process_is_reported(
    exported: Export, witness: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = "from t5train.records.witness import Witness\nWitness.load = lambda folder: 1 / 0\n"
    monkeypatch.setenv("PYTHONPATH", with_first_import(fault, tmp_path / "fault"))
    problem = r"export could not be compared with .*witness \(division by zero.*see .*certify\.log"
    with pytest.raises(CertificationError, match=problem):
        certify_in_fresh_process(exported, witness)
    assert "ZeroDivisionError" in (exported.path.parent / "certify.log").read_text()


def test_a_fresh_process_that_ends_without_a_message_is_reported_with_its_exit_code(
    exported: Export, witness: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(CertificationError, match=r"\(exit status 1\)\. .*certify\.log can show why"):
        certify_in_fresh_process(exported, witness)


def test_a_process_whose_parent_has_ended_ends_quietly(exported: Export, witness: Path) -> None:
    command = [sys.executable, "-m", "t5train.inference.evaluation.certifier", exported.path, witness]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        said = process.stderr.read()
    assert "Traceback" not in said
    assert "BrokenPipeError" not in said
    assert process.returncode == 1
