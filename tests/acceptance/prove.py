"""Run the long proofs that are due, and record the date, commit and result of each in docs/evidence/proofs.md.

    python -m tests.acceptance.prove [--only NAME ...] [--list]

A proof is due if it has not passed, or if a file that it is about has changed since the commit at which it passed. A
result is recorded as soon as it is known, so an interrupted command continues with the proof that it was in. The exit
code is 1 if a proof failed.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.acceptance.result_table import ResultTable

PAGE = Path("docs/evidence/proofs.md")
COLUMNS = ("proof", "commit", "date", "minutes", "result")
PASSED = "passed"
_REPORTS = ("t5train/files/heartbeat.py", "t5train/files/error_report.py")
_HOSTS = ("infra", *_REPORTS, "t5train/train", "t5train/checkpoint", "tests/support")
_RUNS = (*_HOSTS, "t5train/engine", "t5train/data/samples", "t5train/release", "t5train/files")
_KILLED = (*_RUNS, "t5train/data", "tests/acceptance/kills")


@dataclass(frozen=True)
class Proof:
    """A make target, and the files and folders that it is about, besides its own program."""

    target: str
    about: Sequence[str]


PROOFS = (
    Proof("mutations", ("t5train", "infra", "flows", "tasks", "tests")),
    Proof(
        "faults", (*_HOSTS, *(f"tests/acceptance/{name}.py" for name in ("fault_table", "fault_cases", "hang_cases")))
    ),
    Proof("resumes", (*_HOSTS, "tests/acceptance/resume_table.py", "tests/acceptance/resume_cases.py")),
    Proof("pretraining-kills", _KILLED),
    Proof("finetuning-kills", (*_KILLED, "t5train/model")),
    Proof(
        "finetuning-trial",
        (*_RUNS, "t5train/data", "t5train/model", "t5train/spec", "flows", "tests/acceptance/finetuning_trial.py"),
    ),
    Proof(
        "prediction-equality",
        ("t5train/inference/predict", "t5train/inference/text", "tests/acceptance/prediction_equality.py"),
    ),
    Proof("serve-load", ("t5train/inference/serve", "t5train/inference/text", "tests/acceptance/serve_load.py")),
    Proof("io-faults", (*_RUNS, "tests/acceptance/io_faults", "tests/acceptance/file_faults.py")),
    Proof("corruptions", ("t5train/checkpoint", "tests/acceptance/corruptions.py")),
    Proof(
        "certificate-faults",
        (
            *("t5train/release", "t5train/records", "t5train/inference/evaluation"),
            *("tests/acceptance/certificate_faults.py", "tests/acceptance/file_faults.py"),
        ),
    ),
    Proof("upload-faults", ("t5train/release", "tests/t5train/release/object_store")),
    Proof("operation-faults", ("flows", "infra/head", "tests/acceptance/operation")),
    Proof("regression-faults", ("t5train", "infra/head/regression", "tests/acceptance/planted_faults.py")),
    Proof("regression-quiet", ("t5train/regression", "infra/head/regression", "tests/acceptance/regression_quiet.py")),
    Proof("variants-table", ("t5train/engine", "t5train/model", "t5train/train", "tests/acceptance/variants")),
)


def prove(proofs: Sequence[Proof], root: Path, *, list_only: bool = False) -> bool:
    """Run the proofs that are due. Returns whether all of them have passed.

    Raises SystemExit if a file that a proof is about has changes that are not committed.
    """
    table = ResultTable(root / PAGE, COLUMNS)
    for proof in proofs:
        if is_due(proof, table.rows().get(proof.target), root):
            print(f"{proof.target} is due", flush=True)
            if not list_only:
                table.add(_run(proof, root))
    return all(_passed(table.rows().get(proof.target)) for proof in proofs)


def is_due(proof: Proof, row: Sequence[str] | None, root: Path) -> bool:
    """Whether a proof has not passed, or not with the files as they are now."""
    if row is None or not _passed(row):
        return True
    return _git(root, "diff", "--quiet", row[1], "HEAD", "--", *proof.about).returncode != 0


def _passed(row: Sequence[str] | None) -> bool:
    return row is not None and row[-1] == PASSED


def _run(proof: Proof, root: Path) -> list[str]:
    if changed := _git(root, "status", "--porcelain", "--", *proof.about).stdout.strip():
        raise SystemExit(f"{proof.target} would prove files that are not committed. Commit them first:\n{changed}")
    commit = _git(root, "rev-parse", "--short", "HEAD").stdout.strip()
    started = time.monotonic()
    code = subprocess.run(["make", proof.target], cwd=root, check=False).returncode
    minutes = f"{(time.monotonic() - started) / 60:.0f}"
    return [proof.target, commit, time.strftime("%Y-%m-%d"), minutes, f"failed ({code})" if code else PASSED]


def _git(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [proof.target for proof in PROOFS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--list", action="store_true", help="name the proofs that are due, and run none")
    options = parser.parse_args()
    chosen = [proof for proof in PROOFS if proof.target in options.only]
    return 0 if prove(chosen, Path.cwd(), list_only=options.list) else 1


if __name__ == "__main__":
    sys.exit(main())
