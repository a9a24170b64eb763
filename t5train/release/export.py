"""Exports a trained model as a Hugging Face folder that plain ``transformers`` loads."""

import logging
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from t5train.data.vocabulary.sentencepiece_model import FINISH_OR_BEGIN_ANOTHER, require_t5_form
from t5train.data.vocabulary.tokenizer import HUGGING_FACE_FILES, SPIECE, write_hugging_face_files
from t5train.errors import InputError, RecordError, SpecError, StorageError
from t5train.files.atomic import copy_durably, discard, filling, rename_aside, replacing, write_json, write_text
from t5train.files.presence import files_below
from t5train.progress import Progress, silent
from t5train.records.changed_files import changed_files
from t5train.records.digests import digest_files, verify_file
from t5train.records.evaluation_metrics import EVALUATION_FILES, EvaluationMetrics, recorded_metrics
from t5train.records.identity import current_provenance, fingerprint
from t5train.records.stage_records import Export, Record, TokenizerFiles, Weights, reusable
from t5train.records.witness import TrainedModel, Witness
from t5train.release.certificate import CERTIFICATE
from t5train.release.model_card import LOSS_CURVE, README, model_card, write_loss_curve
from t5train.spec import ModelSpec, RunSpec

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
INDEX = "model.safetensors.index.json"
ADAPTER = "adapter"
ADAPTER_WEIGHTS, ADAPTER_CONFIG = f"{ADAPTER}/adapter_model.safetensors", f"{ADAPTER}/adapter_config.json"
"""The adapter of a run with LoRA, as PEFT loads it."""
_log = logging.getLogger(__name__)


def export(
    weights: Weights, tokenizer: TokenizerFiles, witness: Path, spec: RunSpec, out: Path, progress: Progress = silent
) -> Export:
    """Write a Hugging Face folder: safetensors, config, generation config, tokenizer files, model card,
    loss curve, manifest; with LoRA, also the adapter.

    The result is not certified yet: see ``t5train.release.certification``.

    Args:
        weights: The weights of the run's last checkpoint.
        tokenizer: The vocabulary that the run was trained with. Only its spiece.model is used; the other tokenizer
            files are made from it.
        witness: Folder with the training engine's witness (``witness`` in the run's folder), which determines the
            configuration.
        spec: The spec of the run.
        out: Folder of the result. An earlier export of the same run there is replaced, or moved aside if files in it
            were added or changed.
        progress: Called with the number of bytes copied.

    Returns:
        The record of the export.

    Raises:
        DigestMismatch: An input is damaged.
        InputError: Weights or vocabulary are not those of the witness.
        SpecError: transformers has no class for the model, or its tokenizer would use the vocabulary otherwise.
        StorageError: ``out`` holds something else, or cannot be written.

    """
    require_exportable(spec.model)
    seen = Witness.load(witness)
    _require_its_weights(weights, seen)
    _require_its_vocabulary(tokenizer, seen)
    _require_replaceable(out, seen)
    _warn_of_other_statements(spec, seen)
    lineage = _lineage(weights, seen, spec)
    identity = export_fingerprint(lineage)
    existing = reusable(Export, out, identity, progress)
    if existing is not None and (CERTIFICATE in existing.files or _has_current_card(existing, seen)):
        return existing
    _require_publishable(tokenizer.path / SPIECE, spec.run_name)
    with filling(out) as folder:
        _take_files(weights, _weight_names(weights), folder, progress)
        _take_files(tokenizer, [SPIECE], folder, progress)
        write_model_files(seen, folder)
        write_loss_curve(seen, folder)
        if seen.trained.lora:
            _write_adapter(weights, seen.trained, folder)
        files, provenance = digest_files(folder, sorted(files_below(folder))), current_provenance()
        write_text(folder / README, model_card(seen, lineage, files, provenance))
        record = Export(
            path=out,
            fingerprint=identity,
            inputs=lineage,
            files=files | digest_files(folder, [README]),
            counts=export_counts(seen),
            provenance=provenance,
        ).commit(folder)
        _give_way(out, "which has other weights of this run or is from another version")
    return record


def with_evaluation(export: Export, made: Mapping[str, Path], witness: Witness) -> Export:
    """Add the files of an evaluation, by their names in the export, and replace those of another one.

    The card then has the metrics. A kill leaves the export as it was, or complete, or, for an instant, absent.
    Raises StorageError if it cannot be written.
    """
    with filling(export.path) as folder:
        kept = {n: digest for n, digest in export.files.items() if n != README and n not in EVALUATION_FILES}
        for name in kept:
            _link(export.path / name, folder / name)
        for name, source in made.items():
            _link(source, folder / name)
        record = export.model_copy(update={"files": kept | digest_files(folder, made), "reused": False})
        write_text(folder / README, card_of(record.model_copy(update={"path": folder}), witness))
        files = record.files | digest_files(folder, [README])
        record = record.model_copy(update={"files": files}).commit(folder)
        _give_way(export.path)
    return record


def _has_current_card(export: Export, witness: Witness) -> bool:
    """Whether the card has the words of this version, as certification requires."""
    try:
        return (export.path / README).read_bytes() == card_of(export, witness).encode("utf-8")
    except RecordError:  # its metrics are of another version
        return False


def card_of(export: Export, witness: Witness) -> str:
    """Return the model card of an export with its present files, of which the metrics are read.

    Raises RecordError if they cannot be parsed.
    """
    others = {name: digest for name, digest in export.files.items() if name not in {README, CERTIFICATE}}
    evaluation = recorded_metrics(export.path, export.files)
    return model_card(witness, export.inputs, others, export.provenance, evaluation)


def require_exportable(model: ModelSpec) -> None:
    """Raise SpecError for a model that transformers has no class for: one with two experts per token."""
    if model.moe.num_experts and model.moe.top_k != 1:
        raise SpecError(
            f"model.moe.top_k is {model.moe.top_k}, but SwitchTransformers in transformers has 1 expert per token, so "
            "such a model cannot be exported. Set model.moe.top_k=1, or use only the commands `train` and `consolidate`"
        )


def export_fingerprint(lineage: Mapping[str, str]) -> str:
    """Return the fingerprint of an export."""
    return fingerprint({"stage": "export", "schema_version": 2, "inputs": dict(lineage)})


def export_counts(witness: Witness) -> dict[str, int]:
    """Return the counts for an export's manifest."""
    return {"num_parameters": witness.num_parameters, "step": witness.step, "tensors": len(witness.tensors)}


def export_names(weights: Iterable[str], witness: Witness, evaluation: EvaluationMetrics | None) -> set[str]:
    """Return the names of all files of an uncertified export with these weight files and these metrics, if any."""
    curve = {LOSS_CURVE} if witness.curve else set()
    adapter = {ADAPTER_WEIGHTS, ADAPTER_CONFIG} if witness.trained.lora else set()
    evaluated = evaluation.names if evaluation is not None else set()
    return {*weights, CONFIG, GENERATION_CONFIG, SPIECE, *HUGGING_FACE_FILES, README, *curve, *adapter, *evaluated}


def _require_its_weights(weights: Weights, witness: Witness) -> None:
    """Raise InputError unless the weights are of the witness's run and step, because only they can be certified.

    Weights from a checkpoint that this project did not write record no run; certification compares them.
    """
    found = (weights.inputs.get("run", witness.run_fingerprint), weights.counts.get("step", witness.step))
    if found != (witness.run_fingerprint, witness.step):
        raise InputError(
            f"{weights.path} holds weights of run {found[0][:12]} at step {found[1]}, but the witness is of run "
            f"{witness.run_fingerprint[:12]} at step {witness.step}. Give weights and witness of the same run and step"
        )


def _require_its_vocabulary(tokenizer: TokenizerFiles, witness: Witness) -> None:
    """Raise InputError for another vocabulary than the run's.

    One of the same size would load and pass every comparison of weights, but yield nonsense.
    """
    expected, given = witness.inputs["vocabulary"], tokenizer.files.get(SPIECE)
    if given is None or given.sha256 != expected:
        raise InputError(
            f"{tokenizer.path} does not have the vocabulary that the model was trained with. Give the folder "
            f"(--tokenizer) whose {SPIECE} has sha256 {expected}"
        )


def _require_publishable(spiece: Path, run: str) -> None:
    """Raise SpecError for a vocabulary that only earlier versions trained with."""
    try:
        require_t5_form(spiece.read_bytes(), str(spiece))
    except SpecError as error:
        raise SpecError(
            f"run {run} was begun by an earlier version with the vocabulary {spiece}. Its published tokenizer would "
            f"not give the ids that the model was trained on: {FINISH_OR_BEGIN_ANOTHER}"
        ) from error


def _warn_of_other_statements(spec: RunSpec, witness: Witness) -> None:
    """Log what the settings state about the text, if the run recorded something else at its last step."""
    stated, recorded = spec.corpus, witness.trained  # which may state what is known of a text with a name
    if (stated.license, stated.languages) not in {(None, ()), (recorded.license, recorded.languages)}:
        _log.warning(
            "corpus.license is %r and corpus.languages %r, but the run recorded %r and %r at its last step, and the "
            "model card states these. Set them before a run ends",
            stated.license, ",".join(stated.languages), recorded.license, ",".join(recorded.languages),
        )  # fmt: skip


def _lineage(weights: Weights, witness: Witness, spec: RunSpec) -> dict[str, str]:
    """Return the fingerprints of everything that determines the export, including all earlier stages."""
    return {
        **witness.inputs,
        "spec": spec.fingerprint(),
        "run": witness.run_fingerprint,
        "weights": weights.fingerprint,
    }


def _weight_names(weights: Weights) -> list[str]:
    names = [name for name in weights.files if re.fullmatch(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?", name)]
    if not names:
        raise InputError(f"{weights.path} holds no model*.safetensors. Consolidate the checkpoint again")
    return names


def _take_files(record: Record, names: Iterable[str], folder: Path, progress: Progress) -> None:
    """Hard-link or copy files of a record into ``folder``, and verify them there."""
    total, done = sum(record.files[name].size for name in names), 0
    for name in names:
        source, target = record.path / name, folder / Path(name).name
        try:
            _link(source, target)
        except FileNotFoundError:
            raise InputError(f"{source} is missing. Make the {record.kind} again, in {record.path}") from None
        verify_file(target, record.files[name])
        done += record.files[name].size
        progress(f"bytes of {record.kind} exported", done, total)


def _link(source: Path, target: Path) -> None:
    """Hard-link or copy a file to a name in a folder, which is made if it is missing."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target, follow_symlinks=True)
    except FileNotFoundError:
        raise
    except OSError:  # another disk, or a file system without hard links
        copy_durably(source, target)


def write_model_files(witness: Witness, folder: Path) -> None:
    """Write all files that transformers reads, except the weights and spiece.model; the latter must be in ``folder``.

    ``tie_word_embeddings`` is written as in the witness. transformers 5 would set it to true for every T5 and has a
    separate field for scaling the output (v1.0); older versions derive both tying and scaling from it.
    """
    from transformers import AutoConfig, GenerationConfig  # slow to import, needed only here

    settings = witness.huggingface_config
    config = AutoConfig.for_model(**settings)
    write_json(folder / CONFIG, {**config.to_diff_dict(), **settings, "dtype": "float32"})
    write_json(folder / GENERATION_CONFIG, GenerationConfig(**witness.generation_config).to_diff_dict())
    trained = witness.trained.settings
    write_hugging_face_files(folder, int(trained["pairs" if "pairs" in trained else "objective"]["input_tokens"]))


def _write_adapter(weights: Weights, trained: TrainedModel, folder: Path) -> None:
    """Write the adapter's files below the folder of an export.

    PEFT's ``merge_and_unload`` gives the exported model within rounding: it leaves the order in which a product is
    summed to a library, and ``t5train.model.lora.merged`` does not. Raises InputError if the weights were consolidated
    without adapters, DigestMismatch if theirs are damaged.
    """
    from safetensors.torch import save  # as the next one, imports torch, which only this needs

    from t5train.model.lora import ADAPTERS, LORA_A, LORA_B, read_adapters

    file = f"{ADAPTERS}.safetensors"
    if (digest := weights.files.get(file)) is None:
        raise InputError(f"{weights.path} holds no {file}. Consolidate the checkpoint again, to another folder")
    verify_file(weights.path / file, digest)
    factors = {
        peft_name(weight + suffix): factor
        for weight, adapter in read_adapters(weights.path).items()
        for suffix, factor in ((LORA_A, adapter.a), (LORA_B, adapter.b))
    }
    (folder / ADAPTER).mkdir()
    with replacing(folder / ADAPTER_WEIGHTS) as written:
        written.write(save(factors, metadata={"format": "pt"}))
    write_json(folder / ADAPTER_CONFIG, adapter_config(trained))


def peft_name(name: str) -> str:
    """Return PEFT's name of a factor: that of ``X.q.weight.lora_a`` is ``base_model.model.X.q.lora_A.weight``."""
    module, _, factor = name.rpartition(".weight.lora_")
    return f"base_model.model.{module}.lora_{factor.upper()}.weight"


def adapter_config(trained: TrainedModel) -> dict[str, Any]:
    """Return the content of ``adapter_config.json``. Everything else has PEFT's default.

    The start model is named with its commit if it is of the Hub. A folder is not: its path says something only on one
    machine, and PEFT would look for its name on the Hub.
    """
    lora, (name, commit) = trained.lora, trained.hub_start or (None, None)
    return {
        "peft_type": "LORA",
        "task_type": "SEQ_2_SEQ_LM",
        "inference_mode": True,
        "base_model_name_or_path": name,
        "revision": commit,
        "r": lora["rank"],
        "lora_alpha": lora["alpha"],
        "lora_dropout": lora["dropout"],
        "target_modules": list(lora["targets"]),
        "bias": "none",
    }


def _require_replaceable(out: Path, witness: Witness) -> None:
    """Raise StorageError unless ``out`` is missing, empty, or an export of the same run."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    try:
        there = Export.load(out)
    except RecordError as error:
        raise StorageError(f"{out} is in the way: {error}. Remove {out}, or export to another folder") from error
    if (other := there.inputs.get("run", "")) != witness.run_fingerprint:
        raise StorageError(
            f"{out} holds the export of run {other[:12]} (made {there.provenance.created_at}), but the new export is "
            f"of run {witness.run_fingerprint[:12]}. Export to another folder, or remove the existing export yourself"
        )


def _give_way(out: Path, why: str | None = None) -> None:
    """Clear ``out``: an unchanged export is removed, one with added or changed files is moved aside."""
    if not out.exists() or not any(out.iterdir()):
        return
    if changed := [name for name in changed_files(Export.load(out)) if name != CERTIFICATE]:
        aside = rename_aside(out)
        _log.warning(
            "the earlier export in %s was moved to %s, because files in the folder were added or changed: %s",
            out, aside, ", ".join(changed[:5]),
        )  # fmt: skip
    else:
        if why is not None:
            _log.warning("replacing the export in %s, %s", out, why)
        discard(out)
