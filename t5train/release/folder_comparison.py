"""Compares the files of an export with a witness, without loading them with transformers.

Every file has one expected content: documents are made again from the witness and compared value by value. Two
fingerprints in the manifest are not compared, because training does not know them: ``spec`` (of the spec given to the
export) and ``weights`` (of the record of consolidation). The weights themselves are compared.
"""

import json
import re
import struct
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from t5train.data.vocabulary.tokenizer import HUGGING_FACE_FILES, SPIECE
from t5train.errors import RecordError
from t5train.files.atomic import copy_durably
from t5train.quantities import quantity
from t5train.records.changed_files import unlisted_files
from t5train.records.digests import FileDigest
from t5train.records.evaluation_metrics import recorded_metrics
from t5train.records.stage_records import Export
from t5train.records.witness import TensorDigest, Witness
from t5train.release.certificate import CERTIFICATE
from t5train.release.export import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    CONFIG,
    GENERATION_CONFIG,
    INDEX,
    adapter_config,
    card_of,
    export_counts,
    export_fingerprint,
    export_names,
    peft_name,
    write_model_files,
)
from t5train.release.model_card import FACTS, LOSS_CURVE, README, loss_curve, read_front_matter

DOCUMENTS = (CONFIG, GENERATION_CONFIG, *HUGGING_FACE_FILES)
NOT_COMPARED = {"spec", "weights"}
_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors")
_LENGTH = struct.Struct("<Q")
_MOST_SHOWN = 5


def differing_folder(export: Export, witness: Witness) -> list[str]:
    """Return all differences between the folder of an export and the witness."""
    files = {name: digest for name, digest in export.files.items() if name != CERTIFICATE}
    try:
        recorded_metrics(export.path, files)
    except (RecordError, OSError) as error:
        return [str(error)]
    if found := [*_differing_names(export, files, witness), *_differing_vocabulary(files, witness)]:
        return found
    return [
        *_differing_manifest(export, witness),
        *_differing_documents(export.path, witness),
        *_differing_weights(export.path, files, witness),
        *(_differing_adapter(export.path, witness) if witness.trained.lora else ()),
        *_differing_curve(export.path, witness),
        *_differing_card(export, witness),
    ]


def _differing_names(export: Export, files: Mapping[str, FileDigest], witness: Witness) -> Iterator[str]:
    """Yield extra and missing files: transformers might read an extra one, and use defaults for a missing one."""
    weights = {name for name in files if _WEIGHTS.fullmatch(name)}
    evaluation = recorded_metrics(export.path, files)
    expected = export_names(weights | ({INDEX} if len(weights) > 1 else set()), witness, evaluation)
    if extra := sorted({*(files.keys() - expected), *unlisted_files(export)} - {CERTIFICATE}):
        yield f"files that do not belong to an export: {first_of(extra)}"
    if missing := sorted(expected - files.keys()):
        yield f"files that are missing: {first_of(missing)}"
    if not weights:
        yield "there are no weights (model*.safetensors)"


def _differing_vocabulary(files: Mapping[str, FileDigest], witness: Witness) -> Iterator[str]:
    if SPIECE in files and files[SPIECE].sha256 != witness.inputs["vocabulary"]:
        yield f"{SPIECE} is not the vocabulary of the run, which has sha256 {witness.inputs['vocabulary']}"


def _differing_manifest(export: Export, witness: Witness) -> Iterator[str]:
    stated = {name: value for name, value in export.inputs.items() if name not in NOT_COMPARED}
    yield from _in("manifest.json, inputs", witness.inputs | {"run": witness.run_fingerprint}, stated)
    yield from _in("manifest.json, counts", export_counts(witness), export.counts)
    if export.fingerprint != export_fingerprint(export.inputs):
        yield "manifest.json: the fingerprint is not the one that follows from the inputs"


def _differing_documents(folder: Path, witness: Witness) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as temporary:
        copy_durably(folder / SPIECE, Path(temporary) / SPIECE)  # from which some of the documents are made
        write_model_files(witness, Path(temporary))
        for name in DOCUMENTS:
            yield from _in(name, _read(Path(temporary) / name), _read(folder / name))


def _differing_weights(folder: Path, files: Mapping[str, FileDigest], witness: Witness) -> Iterator[str]:
    """Compare headers and index. The tensors' bytes are compared after loading."""
    places: dict[str, str] = {}
    yield from _differing_headers(folder, sorted(filter(_WEIGHTS.fullmatch, files)), witness.tensors, places)
    if INDEX in files:
        index = {"metadata": {"total_size": 4 * witness.num_parameters}, "weight_map": places}
        yield from _in(INDEX, index, _read(folder / INDEX))


def _differing_adapter(folder: Path, witness: Witness) -> Iterator[str]:
    """Compare PEFT's configuration, and the header of the factors, whose bytes are compared with the start model."""
    yield from _in(ADAPTER_CONFIG, adapter_config(witness.trained), _read(folder / ADAPTER_CONFIG))
    recorded = {peft_name(name): digest for name, digest in witness.adapters.items()}
    yield from _differing_headers(folder, [ADAPTER_WEIGHTS], recorded, {})


def _differing_headers(
    folder: Path, names: Iterable[str], recorded: Mapping[str, TensorDigest], places: dict[str, str]
) -> Iterator[str]:
    """Compare the headers of files with what was recorded, and note in ``places`` which file holds which tensor."""
    for name in names:
        header = _read_header(folder / name)
        if not isinstance(header, dict):
            yield f"{name}: {header}"
            continue
        yield from _in(f"{name}, metadata", {"format": "pt"}, header.pop("__metadata__", None))
        for tensor, entry in header.items():
            if tensor in places:
                yield f"{name} and {places[tensor]} both hold {tensor}"
            places[tensor] = name
            expected = recorded.get(tensor)
            shape, dtype = (entry.get("shape"), entry.get("dtype")) if isinstance(entry, dict) else (None, None)
            if expected is None or (shape, dtype) != (list(expected.shape), "F32"):
                yield f"{name}: {tensor} {dtype} {shape} is not an fp32 tensor that training recorded"
    if missing := sorted(recorded.keys() - places.keys()):
        yield f"{quantity(len(missing), 'recorded tensor')} missing from the weight files: {first_of(missing)}"


def _differing_curve(folder: Path, witness: Witness) -> Iterator[str]:
    """Draw the loss curve again. The same version of matplotlib gives the same bytes."""
    if witness.curve and (folder / LOSS_CURVE).read_bytes() != loss_curve(witness):
        yield f"{LOSS_CURVE} is not the picture of the recorded losses"


def _differing_card(export: Export, witness: Witness) -> Iterator[str]:
    expected = card_of(export, witness)
    content = (export.path / README).read_bytes()
    if content == expected.encode("utf-8"):
        return
    text = content.decode("utf-8", "replace")
    try:
        stated = list(_in(f"{README}, front matter", read_front_matter(expected), read_front_matter(text)))
    except ValueError as error:
        stated = [f"{README}: {error}, so the facts under {FACTS} could not be compared"]
    lines = zip(expected.splitlines(), text.splitlines(), strict=False)
    number = next((place for place, (one, other) in enumerate(lines, start=1) if one != other), "the last")
    yield from stated or [f"{README} is not the card of this model: it differs from line {number} on"]


def _in(name: str, expected: Any, found: Any) -> list[str]:
    every = list(differing_values(expected, found))
    more = f" (and {len(every) - _MOST_SHOWN} more)" if every[_MOST_SHOWN:] else ""
    return [f"{name}: {'; '.join(every[:_MOST_SHOWN])}{more}"] if every else []


def differing_values(expected: Any, found: Any, place: str = "") -> Iterator[str]:
    """Yield every position at which two parsed documents differ in value or type. 1, 1.0 and true differ."""
    if isinstance(expected, dict) and isinstance(found, dict):
        for key in sorted({*expected, *found}, key=str):
            where = f"{place}.{key}" if place else str(key)
            if key not in found:
                yield f"{where} is missing"
            elif key not in expected:
                yield f"{where} is {_shown(found[key])}, and should not be there"
            else:
                yield from differing_values(expected[key], found[key], where)
    elif isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        for index, (one, other) in enumerate(zip(expected, found, strict=True)):
            yield from differing_values(one, other, f"{place}[{index}]")
    elif type(expected) is not type(found) or repr(expected) != repr(found):
        yield f"{place or 'the content'} is {_shown(found)} instead of {_shown(expected)}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _read(path: Path) -> Any:
    """Return a JSON document; a text that describes the problem if it is invalid or has duplicate keys."""
    return _parsed(path.read_bytes())


def _read_header(path: Path) -> Any:
    """Return the header of a safetensors file; a text that describes the problem if it has none."""
    with open(path, "rb") as file:
        length = file.read(_LENGTH.size)
        size = _LENGTH.unpack(length)[0] if len(length) == _LENGTH.size else 0
        if not 0 < size <= path.stat().st_size - _LENGTH.size:
            return "not a safetensors file"
        return _parsed(file.read(size))


def _parsed(content: bytes) -> Any:
    try:
        return json.loads(content.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        return f"not valid JSON ({error})"


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Reject duplicate keys, because libraries differ on which of them counts."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has the same key twice")
    return found


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def first_of(names: Iterable[str], count: int = 3) -> str:
    """Return the first names, and how many more there are."""
    every = list(names)
    return ", ".join(every[:count]) + (f" and {len(every) - count} more" if len(every) > count else "")
