"""Exports of random bytes with a passing certificate, of any size and without a model."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path

from t5train.files.presence import files_below
from t5train.records.digests import FileDigest, digest_files
from t5train.records.identity import current_provenance, fingerprint
from t5train.records.stage_records import MANIFEST, Export
from t5train.release.certificate import CERTIFICATE, Certificate

PART_BYTES = 5 << 20  # the least that S3 accepts
_CHUNK_BYTES = 64 << 20


def make_certified(folder: Path, sizes: dict[str, int], seed: int = 0) -> Export:
    """Write files of these sizes, a certificate that they pass, and their manifest."""
    folder.mkdir(parents=True)
    generator = random.Random(seed)
    for name, size in sizes.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        with open(folder / name, "wb") as file:
            for start in range(0, size, _CHUNK_BYTES):
                file.write(generator.randbytes(min(_CHUNK_BYTES, size - start)))
    files = digest_files(folder, sizes)
    identity = fingerprint({"files": {name: digest.sha256 for name, digest in files.items()}})
    return _certified(folder, identity, files)


def make_forged(folder: Path, export: Export, change: Callable[[Path], None]) -> Export:
    """Copy an export, change its files, and certify them under its fingerprint."""
    shutil.copytree(export.path, folder)
    for name in (CERTIFICATE, MANIFEST):
        (folder / name).unlink()
    change(folder)
    return _certified(folder, export.fingerprint, digest_files(folder, files_below(folder)))


def _certified(folder: Path, identity: str, files: dict[str, FileDigest]) -> Export:
    certificate = Certificate(
        passed=True,
        differences=[],
        export_fingerprint=identity,
        weights_fingerprint="b" * 64,
        run_fingerprint="c" * 64,
        step=3,
        witness={},
        files=files,
        tensors_compared=0,
        elements_compared=0,
        ties={},
        documents=(),
        passages_compared=0,
        probes={},
        generation=None,
        relative_tolerance=0.0,
        witness_device="cpu",
        device="cpu",
        num_threads=1,
        provenance=current_provenance(),
    )
    (folder / CERTIFICATE).write_text(certificate.model_dump_json(indent=1))
    files |= digest_files(folder, [CERTIFICATE])
    inputs = {"run": "c" * 64, "spec": "d" * 64}
    return Export(path=folder, fingerprint=identity, inputs=inputs, files=files).commit()
