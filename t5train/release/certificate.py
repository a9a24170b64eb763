"""The certificate: a file in an export that proves that the exported model is the one that was trained."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, SerializerFunctionWrapHandler, ValidationError, model_serializer

from t5train.errors import CertificationError
from t5train.files.presence import reading
from t5train.records.digests import FileDigest
from t5train.records.identity import Provenance

CERTIFICATE = "certificate.json"


class ProbeComparison(BaseModel):
    """Logits of the export compared with those of the training engine, on one probe."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    shape: tuple[int, ...]
    bit_equal: bool
    max_difference: float
    max_relative_difference: float


class GenerationComparison(BaseModel):
    """Greedy ``generate()`` of the export compared with that of the training engine."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    sequences: int
    tokens_compared: int


class MergedAdapter(BaseModel):
    """The start model and the adapter in the export, which give the export's tensors: bit for bit, on any machine.

    ``start_from`` is the fingerprint of the start model. ``tensors_merged`` are its values plus the scaled product of
    the adapter's factors, ``tensors_unchanged`` its values alone.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    start_from: str
    tensors_merged: int
    tensors_unchanged: int


class EvaluationComparison(BaseModel):
    """Metrics that were computed again from the predictions in the export. The predictions were not made again."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    predictions: int
    metrics: int


class Certificate(BaseModel):
    """What was compared, with which versions, and the result. Tolerance 0 requires equal bits.

    If the files already differ from their expected content, nothing is loaded, and ``probes`` is empty. ``adapter`` is
    of a run with LoRA, and ``evaluation`` of an export with predictions; otherwise they are left out of the file.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    schema_version: Literal[2] = 2
    passed: bool
    differences: list[str]
    export_fingerprint: str
    weights_fingerprint: str
    run_fingerprint: str
    step: int
    witness: dict[str, FileDigest]
    files: dict[str, FileDigest]
    tensors_compared: int
    elements_compared: int
    ties: dict[str, str]
    documents: tuple[str, ...]
    passages_compared: int
    probes: dict[str, ProbeComparison]
    generation: GenerationComparison | None
    adapter: MergedAdapter | None = None
    evaluation: EvaluationComparison | None = None
    relative_tolerance: float
    tolerance_reason: str = ""
    witness_device: str
    device: str
    num_threads: int
    provenance: Provenance

    @model_serializer(mode="wrap")
    def _without_absent_comparisons(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        document: dict[str, Any] = serialize(self)
        return {name: value for name, value in document.items() if name not in {"adapter", "evaluation"} or value}

    @classmethod
    def parse(cls, content: bytes, where: str) -> Self:
        """Read a certificate. Raises CertificationError if ``content`` is not one, or has another schema version."""
        try:
            return cls.model_validate_json(content)
        except ValidationError as error:
            if error.errors()[0]["loc"] == ("schema_version",):
                raise CertificationError(
                    f"{where} has schema version {error.errors()[0]['input']}, but this version of t5-pretrain reads "
                    "2, which covers more. Certify the export again, or use the version that wrote the certificate"
                ) from error
            raise CertificationError(
                f"{where} is not a certificate ({error.errors()[0]['msg']}). Certify the export again"
            ) from error

    def require_vouching(self, export_fingerprint: str, files: Mapping[str, FileDigest], where: str) -> None:
        """Raise CertificationError unless this certificate passed for this export and exactly these files.

        The certificate itself may be among the files; it does not count.
        """
        if not self.passed:
            raise CertificationError(f"{where} has not passed: {'; '.join(self.differences)}. Certify the export again")
        if self.export_fingerprint != export_fingerprint:
            raise CertificationError(
                f"{where} certifies the export {self.export_fingerprint}, not the export {export_fingerprint} in this "
                "folder. Certify this export"
            )
        present = {name: digest for name, digest in files.items() if name != CERTIFICATE}
        names = {*present, *self.files}
        differing = sorted(name for name in names if present.get(name) != self.files.get(name))
        if differing:
            raise CertificationError(
                f"{where} does not certify the present {', '.join(differing[:5])}, because files were added, changed "
                "or removed after certification. Restore them, or certify the export again"
            )


def vouching_certificate(folder: Path, export_fingerprint: str, files: Mapping[str, FileDigest]) -> Certificate:
    """Read the certificate in an export's folder, which must vouch for these files; see ``require_vouching``."""
    path = folder / CERTIFICATE
    with reading(path):
        content = path.read_bytes()
    certificate = Certificate.parse(content, str(path))
    certificate.require_vouching(export_fingerprint, files, str(path))
    return certificate
