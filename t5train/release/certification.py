"""Certification: proof, by a process that uses only plain ``transformers``, that an export is the trained model.

``python -m t5train.inference.evaluation.certifier EXPORT WITNESS [START]`` writes ``certificate.json`` into the export
and exits with 0, or writes ``certificate.failed.json`` beside the export and exits with 1. It reports progress as JSON
lines on standard output. If its parent process dies, the next line cannot be written, and this process exits, too.
"""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from t5train.data.vocabulary.tokenizer import SPIECE
from t5train.errors import CertificationError, InputError
from t5train.files.atomic import write_text
from t5train.files.os_errors import explain
from t5train.files.presence import ABSENT
from t5train.progress import Progress, silent
from t5train.records.digests import FileDigest, digest_file, digest_files
from t5train.records.evaluation_metrics import EVALUATION_METRICS, EvaluationMetrics, recorded_metrics
from t5train.records.identity import current_provenance
from t5train.records.stage_records import Export
from t5train.records.witness import (
    WITNESS,
    WITNESS_TENSORS,
    Witness,
    computing_environment,
    differing_environment,
)
from t5train.release.certificate import (
    CERTIFICATE,
    Certificate,
    EvaluationComparison,
    GenerationComparison,
    MergedAdapter,
    ProbeComparison,
    vouching_certificate,
)
from t5train.release.export import ADAPTER_CONFIG
from t5train.release.folder_comparison import DOCUMENTS, differing_folder
from t5train.release.model_card import LOSS_CURVE, README
from t5train.release.model_comparison import (
    compare_generation,
    compare_probes,
    differing_adapter,
    differing_keys,
    differing_probes,
    differing_settings,
    differing_tensors,
    differing_ties,
    differing_tokenizer,
    expected_ties,
    left_out_line,
    start_model,
)

FAILED_CERTIFICATE = "certificate.failed.json"
LOG = "certify.log"
_CERTIFIER = "t5train.inference.evaluation.certifier"
"""The program of the new process. It is above this package, as it computes the metrics of predictions, too."""
# Relative to the largest logit. On the same hardware with the same libraries, a dense model's bits must be equal.
OTHER_DEVICE_TOLERANCE = 1e-3
EXPERTS_TOLERANCE = 1e-5
_log = logging.getLogger(__name__)


def certify_in_fresh_process(
    export: Export, witness: Path, progress: Progress = silent, start_from: str | None = None
) -> Export:
    """Prove that an export is the model that was trained. An existing valid certificate is kept.

    A new Python process makes the certificate; its log is ``certify.log`` beside the export.

    Args:
        export: The export to certify.
        witness: Folder ``witness`` in the folder of the run that trained it.
        progress: Called with what is compared, and with the number of tensors or probes done.
        start_from: Folder of the model that training started from, which the certificate of a run with LoRA needs.

    Returns:
        The export's record, with the passing certificate among its files.

    Raises:
        CertificationError: The model differs. The error lists the differences.
        InputError: The witness is of another run than the export, or the model that training started from is missing.
        DigestMismatch: A certified export is damaged.

    """
    recorded = Witness.load(witness)
    _require_its_witness(export, recorded)
    if _is_certified(export, witness):
        if not export.reused:  # otherwise every byte has just been compared
            export.verify(progress)
        if recorded.trained.lora and start_from is not None:  # not needed any more, but it may be another model
            start_model(recorded, start_from, progress)
        return export.model_copy(update={"reused": True})
    _run_certifier(export.path, witness, progress, start_from)
    files = _uncertified_files(export)
    made = vouching_certificate(export.path, export.fingerprint, files)
    if made.relative_tolerance > EXPERTS_TOLERANCE:
        _log.warning(
            "%s is certified with a tolerance of %g of the largest logit instead of equal bits: %s",
            export.path, made.relative_tolerance, made.tolerance_reason,
        )  # fmt: skip
    if line := left_out_line(recorded.passages):
        _log.info("%s", line)
    return export.model_copy(update={"files": {**files, CERTIFICATE: digest_file(export.path / CERTIFICATE)}}).commit()


CompareMetrics = Callable[[Export, EvaluationMetrics, Witness], tuple[list[str], EvaluationComparison]]
"""Computes the recorded metrics of an export again from its predictions: what differs, and how much was compared.

Raises InputError if that is not possible here.
"""


def _compare_no_metrics(export: Export, _: EvaluationMetrics, __: Witness) -> tuple[list[str], EvaluationComparison]:
    raise InputError(f"{export.path} has predictions. Certify it with `certify_in_fresh_process`, which compares them")


def certify(
    export_folder: Path,
    witness: Path,
    progress: Progress = silent,
    start_from: str | None = None,
    compare_metrics: CompareMetrics = _compare_no_metrics,
) -> Certificate:
    """Load the export, compare it with the witness in the folder ``witness``, and write ``certificate.json``.

    ``start_from`` is as in ``certify_in_fresh_process``; an export with predictions needs ``compare_metrics``.
    Raises InputError if the witness is of another run, or
    ``start_from`` of another model, and DigestMismatch if a file of the export differs from its manifest. If the model
    differs, writes ``certificate.failed.json`` beside the export instead, and raises CertificationError, which lists
    the differences.
    """
    export = Export.load(export_folder)
    _require_its_witness(export, Witness.load(witness))
    _require_same_versions(export)
    files = _uncertified_files(export)
    export.model_copy(update={"files": files}).verify(progress)
    certificate, is_as_recorded = _compare(export, files, witness, start_from, compare_metrics, progress)
    text = certificate.model_dump_json(indent=1) + "\n"
    if not certificate.passed:
        failed = export_folder.absolute().parent / FAILED_CERTIFICATE
        write_text(failed, text)
        (export_folder / CERTIFICATE).unlink(missing_ok=True)  # an earlier certificate is no longer valid
        raise CertificationError(_refusal(export_folder, certificate, is_as_recorded, failed))
    write_text(export_folder / CERTIFICATE, text)
    return certificate


def _refusal(export: Path, certificate: Certificate, is_as_recorded: bool, failed: Path) -> str:
    """Say what differs and what it means. Wrong files can be made again; other results of the right files cannot."""
    differences = "; ".join(certificate.differences)
    if not is_as_recorded:
        return (
            f"{export} is not the model that was trained: {differences}. The export must not be published. Remove the "
            f"folder and export again. Details are in {failed}"
        )
    if certificate.relative_tolerance > EXPERTS_TOLERANCE:
        meaning = (
            f"{certificate.tolerance_reason}, but the results differ by more than rounding: this machine computes with "
            "less precision (look for variables such as ONEDNN_DEFAULT_FPMATH_MODE and NVIDIA_TF32_OVERRIDE) or is "
            "faulty, or the witness was changed"
        )
    else:
        meaning = (
            f"{certificate.tolerance_reason}, so a machine is faulty, the libraries compute something else than they "
            "did in training, or the witness was changed"
        )
    return (
        f"{export} cannot be certified here: every file, setting and tensor is as training recorded it, but this "
        f"machine computes other results: {differences}. {meaning[0].upper()}{meaning[1:]}. Certify on the machine "
        f"that trained, or on another one; until then, the export must not be published. Details are in {failed}"
    )


def _compare(
    export: Export,
    files: dict[str, FileDigest],
    folder: Path,
    start_from: str | None,
    compare_metrics: CompareMetrics,
    progress: Progress,
) -> tuple[Certificate, bool]:
    """Return the certificate, and whether all that was recorded is as it was recorded, whatever is computed from it."""
    witness = Witness.load(folder)
    start = start_model(witness, start_from, progress) if witness.trained.lora else None
    device = _device(witness)
    tolerance, reason = _tolerance(witness, device)
    differences, computed = differing_folder(export, witness), list[str]()
    probes: dict[str, ProbeComparison] = {}
    generation: GenerationComparison | None = None
    evaluation: EvaluationComparison | None = None
    if not differences and (metrics := recorded_metrics(export.path, files)) is not None:
        progress("metrics compared", 0, None)
        differences, evaluation = compare_metrics(export, metrics, witness)
    if not differences:  # otherwise it is not safe to load
        model, differences = _compare_loaded(export.path, witness, progress)
        differences += differing_adapter(export.path, start, witness, progress) if start is not None else []
        model = model.to(device)
        probes = dict(compare_probes(model, witness, folder, device, progress))
        generation, generated_otherwise = compare_generation(model, witness, folder, device, tolerance)
        computed = [*differing_probes(probes, tolerance), *generated_otherwise]
    certificate = Certificate(
        passed=not differences and not computed,
        differences=[*differences, *computed],
        export_fingerprint=export.fingerprint,
        run_fingerprint=witness.run_fingerprint,
        weights_fingerprint=export.inputs["weights"],
        step=witness.step,
        witness=_witness_digests(folder),
        files=files,
        tensors_compared=len(witness.tensors),
        elements_compared=witness.num_parameters,
        ties=expected_ties(witness),
        documents=(
            *(*DOCUMENTS, README),
            *([LOSS_CURVE] if witness.curve else []),
            *([ADAPTER_CONFIG] if witness.trained.lora else []),
            *([EVALUATION_METRICS] if evaluation is not None else []),
        ),
        passages_compared=len(witness.passages),
        probes=probes,
        generation=generation,
        adapter=_merged(witness) if start is not None else None,
        evaluation=evaluation,
        relative_tolerance=tolerance,
        tolerance_reason=reason,
        witness_device=witness.device_type,
        device=device,
        num_threads=witness.num_threads,
        provenance=current_provenance(),
    )
    return certificate, not differences


def _merged(witness: Witness) -> MergedAdapter:
    merged = len(witness.adapters) // 2
    return MergedAdapter(
        start_from=witness.inputs["start_from"],
        tensors_merged=merged,
        tensors_unchanged=len(witness.tensors) - merged,
    )


def _compare_loaded(export: Path, witness: Witness, progress: Progress) -> tuple[Any, list[str]]:
    """Load the model and the tokenizer with plain transformers. Returns the model and what differs of their content."""
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, T5TokenizerFast

    model, loading = AutoModelForSeq2SeqLM.from_pretrained(export, output_loading_info=True)
    model = model.eval()
    differences = differing_keys(loading)
    differences += differing_tensors(model, witness, progress)
    differences += differing_ties(model, witness)
    differences += differing_settings(model, witness)
    for kind in (AutoTokenizer, T5TokenizerFast):
        differences += differing_tokenizer(kind.from_pretrained(export), export / SPIECE, witness)
    return model, differences


def _device(witness: Witness) -> str:
    """Set the witness's number of threads, and return its kind of device if available, otherwise the CPU."""
    import torch

    torch.set_num_threads(witness.num_threads)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return witness.device_type if accelerator is not None and accelerator.type == witness.device_type else "cpu"


def _tolerance(witness: Witness, device: str) -> tuple[float, str]:
    """Return how much the logits may differ, relative to the largest one, and why."""
    if device != witness.device_type:
        return OTHER_DEVICE_TOLERANCE, f"{device} rounds differently from the engine's device, {witness.device_type}"
    if not witness.environment:
        return OTHER_DEVICE_TOLERANCE, (
            "an earlier version wrote the witness, without the processor and libraries of the engine, which may round "
            "differently from those here"
        )
    if differing := differing_environment(witness.environment, computing_environment(device)):
        return OTHER_DEVICE_TOLERANCE, f"other processors and libraries round differently: {'; '.join(differing)}"
    if witness.huggingface_config.get("num_experts"):
        return EXPERTS_TOLERANCE, (
            "the engine pads every expert's tokens to the same number, and transformers does not: matrix products of "
            "different sizes are summed in a different order"
        )
    return 0.0, "the same operations on the same processor with the same libraries give the same bits"


def _require_its_witness(export: Export, witness: Witness) -> None:
    """Raise InputError if the witness is of another run: comparing with it would revoke a valid certificate."""
    if export.inputs["run"] != witness.run_fingerprint:
        raise InputError(
            f"{export.path} is from run {export.inputs['run'][:12]}, but the witness is from run "
            f"{witness.run_fingerprint[:12]}. Give the folder `witness` of the run that the export is from"
        )


def _require_same_versions(export: Export) -> None:
    """Raise InputError for another version of a package that may write different content into the same files."""
    for package in ("transformers", *(["matplotlib"] if LOSS_CURVE in export.files else [])):
        made, here = (each.versions.get(package) for each in (export.provenance, current_provenance()))
        if made != here:
            raise InputError(
                f"{export.path} was exported with {package} {made}, but {here} is installed. Install {package} "
                f"{made} and certify the export again, or remove the folder and export again"
            )


def _is_certified(export: Export, witness: Path) -> bool:
    if CERTIFICATE not in export.files:
        return False
    try:
        certificate = vouching_certificate(export.path, export.fingerprint, export.files)
    except (CertificationError, *ABSENT):
        return False
    return certificate.witness == _witness_digests(witness)


def _uncertified_files(export: Export) -> dict[str, FileDigest]:
    return {name: digest for name, digest in export.files.items() if name != CERTIFICATE}


def _witness_digests(folder: Path) -> dict[str, FileDigest]:
    try:
        return digest_files(folder, (WITNESS, WITNESS_TENSORS))
    except OSError as error:
        raise InputError(
            f"the witness cannot be read: {explain(error)}; or give the folder `witness` of a finished run"
        ) from error


def _run_certifier(export_folder: Path, witness: Path, progress: Progress, start_from: str | None) -> None:
    """Run ``main`` in a new process, relay its progress, and raise the error that it reports."""
    # -P keeps modules in the current folder from shadowing libraries.
    command = [
        sys.executable,
        "-P",
        "-m",
        _CERTIFIER,
        os.fspath(export_folder),
        os.fspath(witness),
        *([] if start_from is None else [start_from]),
    ]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    log_path = export_folder.absolute().parent / LOG
    failure = None
    with (
        open(log_path, "wb") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment) as process,
    ):
        assert process.stdout is not None  # noqa: S101 - for the type checker: it is a pipe
        for line in process.stdout:
            match json.loads(line):
                case {"error": str(text)}:
                    failure = text
                case {"what": str(what), "done": int(done), "total": int(total)}:
                    progress(what, done, total)
    if process.returncode != 0:
        raise CertificationError(
            failure
            or f"the process that certifies {export_folder} ended without a result (exit status {process.returncode}). "
            f"{log_path} can show why; if memory ran out, free some and certify again"
        )
