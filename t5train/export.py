"""A trained model as a Hugging Face folder that plain ``transformers`` loads."""

import logging
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from t5train.atomic import write_json, write_text
from t5train.atomic_folder import copy_durably, discard, filling
from t5train.data.tokenizer import SPIECE
from t5train.errors import InputError, RecordError, SpecError, StorageError
from t5train.fingerprint import fingerprint
from t5train.model_card import model_card
from t5train.progress import Progress, silent
from t5train.records import (
    Export,
    Record,
    TokenizerFiles,
    Weights,
    current_provenance,
    digest_files,
    reusable,
    verify_file,
)
from t5train.spec import ModelSpec, RunSpec
from t5train.witness import Witness

_log = logging.getLogger(__name__)


def export(
    weights: Weights, tokenizer: TokenizerFiles, witness: Path, spec: RunSpec, out: Path, progress: Progress = silent
) -> Export:
    """Write ``out``: safetensors, config, generation config, tokenizer files, model card, manifest.

    ``witness`` is the folder with the training engine's witness, which decides the configuration. The result is
    not certified yet: see ``t5train.certify``. An earlier export of the same run in ``out`` is replaced; anything else
    there raises StorageError. Damaged inputs raise DigestMismatch, weights or a vocabulary that are not those of the
    witness InputError, and a model that transformers has no class for SpecError.
    """
    require_exportable(spec.model)
    seen = Witness.load(witness)
    _require_its_weights(weights, seen)
    _require_its_vocabulary(tokenizer, seen)
    _require_replaceable(out, seen)
    lineage = _lineage(weights, tokenizer, seen, spec)
    identity = fingerprint({"stage": "export", "schema_version": 1, "inputs": lineage})
    if (existing := reusable(Export, out, identity, progress)) is not None:
        return existing
    with filling(out) as folder:
        _take_files(weights, _weight_names(weights), folder, progress)
        _take_files(tokenizer, list(tokenizer.files), folder, progress)
        _write_model_config(seen.huggingface_config, folder)
        write_text(folder / "README.md", model_card(spec, seen, lineage, current_provenance()))
        record = Export(
            path=out,
            fingerprint=identity,
            inputs=lineage,
            files=digest_files(folder, sorted(path.name for path in folder.iterdir())),
            counts={"num_parameters": seen.num_parameters, "step": seen.step, "tensors": len(seen.tensors)},
        ).commit(folder)
        _give_way(out)
    return record


def require_exportable(model: ModelSpec) -> None:
    """SpecError for a model that no class of transformers computes: one whose tokens choose two experts."""
    if model.moe.num_experts and model.moe.top_k != 1:
        raise SpecError(
            f"model.moe.top_k is {model.moe.top_k}: SwitchTransformers in transformers has 1, so that such a model can "
            "be trained and consolidated (stages `train` and `consolidate`), and not exported; set model.moe.top_k=1"
        )


def _require_its_weights(weights: Weights, witness: Witness) -> None:
    """The engine bears witness to its last step alone, so that of others nothing could be certified.

    Weights of a checkpoint that this project did not write tell of no run; the certificate will tell.
    """
    found = (weights.inputs.get("run", witness.run_fingerprint), weights.counts.get("step", witness.step))
    if found != (witness.run_fingerprint, witness.step):
        raise InputError(
            f"{weights.path} holds weights of run {found[0][:12]} at step {found[1]}, and the witness is of run "
            f"{witness.run_fingerprint[:12]} at step {witness.step}: take those that belong together"
        )


def _require_its_vocabulary(tokenizer: TokenizerFiles, witness: Witness) -> None:
    """Another one of the same size would load, pass every comparison of weights, and make nonsense of text."""
    expected, given = witness.inputs.get("vocabulary"), tokenizer.files.get(SPIECE)
    if expected is not None and (given is None or given.sha256 != expected):
        raise InputError(
            f"{tokenizer.path} has another vocabulary than the model was trained with, whose {SPIECE} has sha256 "
            f"{expected}: take that one"
        )


def _lineage(weights: Weights, tokenizer: TokenizerFiles, witness: Witness, spec: RunSpec) -> dict[str, str]:
    """Fingerprints of all that decides the export, the stages before its own inputs among them."""
    return {
        **tokenizer.inputs,
        "tokenizer": tokenizer.fingerprint,
        **witness.inputs,
        "spec": spec.fingerprint(),
        "run": witness.run_fingerprint,
        **weights.inputs,
        "weights": weights.fingerprint,
    }


def _weight_names(weights: Weights) -> list[str]:
    names = [name for name in weights.files if re.fullmatch(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?", name)]
    if not names:
        raise InputError(f"{weights.path} holds no safetensors: consolidate the checkpoint again")
    return names


def _take_files(record: Record, names: Iterable[str], folder: Path, progress: Progress) -> None:
    """Bring files of a record into ``folder``, by hard link where the disk allows it, and verify them there."""
    total, done = sum(record.files[name].size for name in names), 0
    for name in names:
        source, target = record.path / name, folder / Path(name).name
        try:
            os.link(source, target, follow_symlinks=True)
        except FileNotFoundError:
            raise InputError(f"{source} is missing: make the {record.kind} again") from None
        except OSError:  # another disk, or one without hard links
            copy_durably(source, target)
        verify_file(target, record.files[name])
        done += record.files[name].size
        progress(f"bytes of {record.kind} exported", done, total)


def _write_model_config(settings: dict[str, Any], folder: Path) -> None:
    """``config.json`` and ``generation_config.json``.

    ``tie_word_embeddings`` is written as the witness has it: transformers 5 sets it to true on every T5 and keeps
    whether the output is scaled (v1.0) apart, while older ones decide both tying and scaling by it.
    """
    from transformers import AutoConfig, GenerationConfig  # slow to import, needed here only

    config = AutoConfig.for_model(**settings)
    write_json(folder / "config.json", {**config.to_diff_dict(), **settings, "dtype": "float32"})
    ids = {name: settings[name] for name in ("decoder_start_token_id", "eos_token_id", "pad_token_id")}
    write_json(folder / "generation_config.json", GenerationConfig(**ids).to_diff_dict())


def _require_replaceable(out: Path, witness: Witness) -> None:
    """StorageError unless ``out`` is absent, empty, or an export of the same run."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    try:
        there = Export.load(out)
    except RecordError as error:
        raise StorageError(f"{out} is in the way: {error}. Remove it or export to another folder") from error
    if (other := there.inputs.get("run", "")) != witness.run_fingerprint:
        raise StorageError(
            f"{out} holds the export of run {other[:12]} (made {there.provenance.created_at}), and this one is of run "
            f"{witness.run_fingerprint[:12]}: export to another folder, or remove that one yourself"
        )


def _give_way(out: Path) -> None:
    if out.exists() and any(out.iterdir()):
        _log.warning("the export in %s is of other weights of this run, or damaged: it is replaced", out)
        discard(out)
