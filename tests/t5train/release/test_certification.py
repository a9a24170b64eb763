"""Only the model that was trained gets a certificate."""

import json
import logging
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from t5train.errors import CertificationError, DigestMismatch, InputError, Unreadable
from t5train.records.digests import digest_files
from t5train.records.stage_records import Export
from t5train.records.witness import Witness
from t5train.release import certification
from t5train.release.certificate import Certificate
from t5train.release.certification import certify, certify_in_fresh_process
from t5train.release.model_comparison import differing_passages, differing_tokenizer

MakeTrained = Callable[..., Any]
MakeExport = Callable[..., Export]


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Certify in this process, for tests that are not about the fresh one. It would import libraries for seconds."""
    monkeypatch.setattr(certification, "_run_certifier", certify)


@pytest.fixture
def exported(make_export: MakeExport) -> Export:
    """An export that is not certified yet."""
    return make_export(certified=False)


@pytest.fixture
def witness(tmp_path: Path) -> Path:
    return tmp_path / "run/witness"


def certificate_of(exported: Export) -> Certificate:
    return Certificate.parse((exported.path / "certificate.json").read_bytes(), "certificate.json")


def rewrite_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def reseal(exported: Export, name: str) -> None:
    """Rewrite the manifest to match a changed file."""
    files = exported.files | digest_files(exported.path, [name])
    exported.model_copy(update={"files": files}).commit()


def update_card_digest(exported: Export) -> None:
    """Make the model card state the digest of the current weights."""
    card, now = exported.path / "README.md", Export.load(exported.path)
    old, new = (each.files["model.safetensors"].sha256 for each in (exported, now))
    card.write_text(card.read_text().replace(old, new))
    reseal(now, "README.md")


def shuffle_vocabulary(path: Path) -> None:
    document = json.loads(path.read_text())
    pieces = document["model"]["vocab"]
    plain = pieces[3:-100]
    random.Random(0).shuffle(plain)
    document["model"]["vocab"] = [*pieces[:3], *plain, *pieces[-100:]]
    path.write_text(json.dumps(document))


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Replace the export's file of weights by a changed one, and rewrite the manifest to match."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    path.unlink()
    save_file(tensors, path, metadata={"format": "pt"})
    reseal(Export.load(folder), "model.safetensors")


def change_witness(folder: Path, relative: float) -> None:
    """Change one recorded logit of the first probe by this fraction of the largest logit."""
    path = folder / "witness.safetensors"
    tensors = load_file(path)
    logits = tensors["random.logits"]
    logits[0, 0, 0] += relative * logits.abs().max()
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("version", "moved", "passes"), [("switch", 5e-6, True), ("switch", 5e-5, False), ("v1.0", 5e-6, False)]
)
def test_logits_of_experts_may_differ_by_rounding_and_those_of_dense_models_may_not(
    make_export: MakeExport, witness: Path, version: str, moved: float, passes: bool
) -> None:
    exported = make_export(version, certified=False)
    change_witness(witness, moved)
    if not passes:
        with pytest.raises(CertificationError, match=r"certified here: .*logits of probe 'random' differ") as caught:
            certify(exported.path, witness)
        assert "export again" not in str(caught.value)
        return
    certificate = certify(exported.path, witness)
    assert certificate.relative_tolerance == 1e-5
    assert "summed in a different order" in certificate.tolerance_reason
    assert not certificate.probes["random"].bit_equal


def record_environment(witness: Path, changes: dict[str, str] | None) -> None:
    """Change what the witness records of the processor and libraries that it was made with; None: nothing."""
    recorded = json.loads((witness / "witness.json").read_text())["environment"]
    rewrite_json(witness / "witness.json", environment={} if changes is None else recorded | changes)


ELSEWHERE = {
    "processor": "abacus", "vector extensions": "avx2", "instruction set of torch": "DEFAULT",
    "MKL_CBWR": "COMPATIBLE", "torch": "1.0", "arithmetic": "0" * 16,
}  # fmt: skip


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize(
    ("changes", "reasons"),
    [
        (ELSEWHERE, [rf"{name} \({value} in training, .* here\)" for name, value in ELSEWHERE.items()]),
        (None, ["an earlier version wrote the witness, without the processor"]),
    ],
)
def test_with_another_processor_or_library_logits_may_differ_by_rounding_and_the_reason_is_named(
    exported: Export, witness: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    changes: dict[str, str] | None, reasons: list[str],
) -> None:  # fmt: skip
    monkeypatch.delenv("MKL_CBWR", raising=False)
    change_witness(witness, 5e-6)
    record_environment(witness, changes)
    certificate = certificate_of(certify_in_fresh_process(exported, witness))
    assert certificate.relative_tolerance == 1e-3
    assert not certificate.probes["random"].bit_equal
    (said,) = [each for each in caplog.messages if "0.001 of the largest logit instead of equal bits" in each]
    for reason in reasons:
        assert re.search(reason, certificate.tolerance_reason)
        assert re.search(reason, said)


def test_certification_on_another_kind_of_device_uses_and_records_a_tolerance(exported: Export, witness: Path) -> None:
    rewrite_json(witness / "witness.json", device_type="abacus")
    certificate = certify(exported.path, witness)
    assert (certificate.witness_device, certificate.device) == ("abacus", "cpu")
    assert certificate.relative_tolerance == 1e-3


def flip_a_bit(exported: Export, name: str = "shared.weight") -> None:
    def flip(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name].view(torch.int32)[5, 3] ^= 1

    change_tensors(exported.path, flip)
    update_card_digest(exported)


def exchange_generated(witness: Path) -> None:
    """Record another second token of each generated sequence, which no rounding would give."""
    tensors = load_file(witness / "witness.safetensors")
    tensors["heldout.generated"][:, 2] += 1
    tensors["heldout.margins"][:, 1] = 0.5
    save_file(tensors, witness / "witness.safetensors")


def update_setting(exported: Export) -> None:
    rewrite_json(exported.path / "config.json", layer_norm_epsilon=0.1)
    reseal(exported, "config.json")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "found", "is_computed"),
    [
        (lambda exported, _: flip_a_bit(exported), r"1 tensor unlike the recorded fp32 masters: shared\.weight", False),
        (lambda exported, _: update_setting(exported), "layer_norm_epsilon is 0.1", False),
        (lambda _, witness: change_witness(witness, 5e-3), "logits of probe 'random' differ by up to", True),
        (lambda _, witness: exchange_generated(witness), "generated differently", True),
    ],
)
def test_a_false_export_is_refused_with_another_processor_too(
    exported: Export, witness: Path, damage: Callable[[Export, Path], None], found: str, is_computed: bool
) -> None:
    record_environment(witness, {"processor": "abacus"})
    damage(exported, witness)
    with pytest.raises(CertificationError, match=found) as caught:
        certify(exported.path, witness)
    said = str(caught.value)
    assert ("Remove the folder and export again" in said) is not is_computed
    assert ("is not the model that was trained" in said) is not is_computed
    assert ("every file, setting and tensor is as training recorded it" in said) is is_computed
    assert ("processor (abacus in training" in said) is is_computed


def test_a_folder_that_is_not_a_witness_is_refused(make_export: MakeExport, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"witness\.json does not exist: name the folder"):
        certify_in_fresh_process(make_export(), tmp_path)


@pytest.mark.parametrize("version", ["v1.0", "v1.1"])
def test_the_certificate_lists_the_probes_the_ties_and_the_loss_curve(make_export: MakeExport, version: str) -> None:
    certificate = certificate_of(make_export(version))
    assert set(certificate.probes) == {"random", "heldout"}
    assert all(probe.bit_equal for probe in certificate.probes.values())
    assert ("lm_head.weight" in certificate.ties) is (version == "v1.0")
    if version == "v1.1":
        assert "loss_curve.png" in certificate.documents
        assert "loss_curve.png" in certificate.files


@pytest.mark.usefixtures("in_this_process")
def test_a_valid_certificate_is_reused_and_one_of_another_witness_is_not(
    make_export: MakeExport, witness: Path
) -> None:
    exported = make_export()
    assert certify_in_fresh_process(exported, witness).reused
    rewrite_json(witness / "witness.json", tag="step-00000008")
    assert not certify_in_fresh_process(exported, witness).reused


def test_a_certificate_that_cannot_be_read_now_is_not_made_again(make_export: MakeExport, witness: Path) -> None:
    exported = make_export()
    certificate, manifest = exported.path / "certificate.json", exported.path / "manifest.json"
    certificate.unlink()
    certificate.symlink_to("certificate.json")  # ELOOP
    before = manifest.read_bytes()
    with pytest.raises(Unreadable, match=r"certificate\.json cannot be read now"):
        certify_in_fresh_process(exported, witness)
    assert certificate.is_symlink()
    assert manifest.read_bytes() == before


def test_a_witness_of_another_run_is_refused_and_the_existing_certificate_stays(
    make_export: MakeExport, witness: Path
) -> None:
    exported = make_export()
    rewrite_json(witness / "witness.json", run_fingerprint="9" * 64)
    for attempt in (certify_in_fresh_process, lambda export, folder: certify(export.path, folder)):
        with pytest.raises(InputError, match="is from run 333333333333, but the witness is from run 999999999999"):
            attempt(exported, witness)
    Export.load(exported.path).verify()


def test_a_file_changed_since_the_export_is_named_and_its_certificate_not_reused(
    make_export: MakeExport, witness: Path
) -> None:
    exported = make_export()
    (exported.path / "tokenizer.json").write_text("{}")
    for attempt in (certify_in_fresh_process, lambda export, folder: certify(export.path, folder)):
        with pytest.raises(DigestMismatch, match=r"tokenizer\.json"):
            attempt(exported, witness)


def test_one_flipped_bit_of_a_weight_is_refused_with_the_name_of_its_tensor(
    make_export: MakeExport, witness: Path
) -> None:
    exported = make_export()
    name = "decoder.block.0.layer.0.SelfAttention.q.weight"
    flip_a_bit(exported, name)
    with pytest.raises(CertificationError, match=f"1 tensor unlike the recorded fp32 masters: {name}"):
        certify(exported.path, witness)
    assert not (exported.path / "certificate.json").exists(), "the earlier one does not hold any more"
    failed = json.loads((exported.path.parent / "certificate.failed.json").read_text())
    assert failed["passed"] is False
    assert failed["differences"]


def without_a_tensor(exported: Export) -> None:
    change_tensors(exported.path, lambda tensors: tensors.pop("encoder.final_layer_norm.weight"))


def with_another_tensor(exported: Export) -> None:
    change_tensors(exported.path, lambda tensors: tensors.update(stowaway=torch.zeros(2)))


def in_lower_precision(exported: Export) -> None:
    def lower(tensors: dict[str, torch.Tensor]) -> None:
        tensors.update({name: each.bfloat16() for name, each in tensors.items()})

    change_tensors(exported.path, lower)


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (without_a_tensor, r"1 recorded tensor missing from the weight files: encoder\.final_layer_norm\.weight"),
        (with_another_tensor, r"stowaway F32 \[2\] is not an fp32 tensor that training recorded"),
        (in_lower_precision, r"BF16 \[.*\] is not an fp32 tensor that training recorded"),
    ],
)
def test_an_export_of_other_tensors_is_refused_and_the_difference_named(
    exported: Export, witness: Path, damage: Callable[[Export], None], found: str
) -> None:
    damage(exported)
    with pytest.raises(CertificationError, match=found):
        certify(exported.path, witness)


def test_a_certificate_is_valid_only_for_the_files_of_its_own_export(make_export: MakeExport) -> None:
    exported = make_export()
    config = exported.files["config.json"]
    for fingerprint, files, complaint in [
        ("0" * 64, exported.files, "certifies the export"),
        (exported.fingerprint, exported.files | {"config.json": exported.files["README.md"]}, r"config\.json"),
        (exported.fingerprint, exported.files | {"more.json": config}, r"more\.json"),
        (exported.fingerprint, {"config.json": config}, r"model\.safetensors"),
    ]:
        with pytest.raises(CertificationError, match=complaint):
            certificate_of(exported).require_vouching(fingerprint, files, "certificate.json")


def test_a_certificate_of_an_earlier_version_is_refused_with_both_versions() -> None:
    with pytest.raises(CertificationError, match="has schema version 1, but this version of t5-pretrain reads 2"):
        Certificate.parse(b'{"schema_version": 1, "passed": true}', "certificate.json")


def test_a_shuffled_tokenizer_is_refused_and_the_passages_alone_would_detect_it(
    exported: Export, witness: Path
) -> None:
    shuffle_vocabulary(exported.path / "tokenizer.json")
    reseal(exported, "tokenizer.json")
    with pytest.raises(CertificationError, match=r"tokenizer\.json: model\.vocab\[\d+\]"):
        certify(exported.path, witness)
    tokenizer = AutoTokenizer.from_pretrained(exported.path)
    passages = Witness.load(witness).passages
    (difference,) = differing_passages(tokenizer, passages)
    assert f"of {len(passages)} held-out passages have other ids than in training" in difference
    found = differing_tokenizer(tokenizer, exported.path / "spiece.model", Witness.load(witness))
    assert "ids map to other pieces" in found[0]


@pytest.mark.usefixtures("in_this_process")
def test_the_log_counts_and_names_passages_whose_decoded_text_is_not_compared(
    exported: Export, witness: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ids = AutoTokenizer.from_pretrained(exported.path)("\u4e2d").input_ids
    known = [each.model_dump() for each in Witness.load(witness).passages if 2 not in each.ids]
    rewrite_json(witness / "witness.json", passages=[{"text": "\u4e2d", "ids": ids}, *known])
    with caplog.at_level(logging.INFO):
        certify_in_fresh_process(exported, witness)
    (line,) = [each for each in caplog.messages if "unknown characters" in each]
    assert line.startswith(f"1 of {1 + len(known)} held-out passages")
    assert line.endswith("The first is '\u4e2d'")


@pytest.mark.parametrize("listed", [True, False])
@pytest.mark.parametrize("name", ["modeling_t5.py", "adapter_config.json", "pytorch_model.bin", "deep/more.jinja"])
def test_a_file_that_does_not_belong_to_an_export_is_refused_before_anything_is_loaded(
    exported: Export, witness: Path, monkeypatch: pytest.MonkeyPatch, name: str, listed: bool
) -> None:
    (exported.path / name).parent.mkdir(exist_ok=True)
    (exported.path / name).write_text("foreign")
    if listed:
        reseal(exported, name)
    monkeypatch.setattr(AutoModelForSeq2SeqLM, "from_pretrained", None)
    with pytest.raises(CertificationError, match=f"files that do not belong to an export: {name}"):
        certify(exported.path, witness)


def test_a_witness_of_an_earlier_version_is_refused_with_a_remedy(exported: Export, witness: Path) -> None:
    document = json.loads((witness / "witness.json").read_text())
    for name in ("passages", "generation_config", "trained"):
        del document[name]
    (witness / "witness.json").write_text(json.dumps(document | {"schema_version": 1}))
    with pytest.raises(InputError, match=r"schema version 1, but version 2 is .*train again under another --name"):
        certify(exported.path, witness)


def test_an_export_by_another_version_of_transformers_is_refused_with_both_versions(
    exported: Export, witness: Path
) -> None:
    versions = exported.provenance.versions | {"transformers": "5.0.1"}
    exported.model_copy(update={"provenance": exported.provenance.model_copy(update={"versions": versions})}).commit()
    with pytest.raises(InputError, match=r"exported with transformers 5\.0\.1, but 5\.\S+ is installed"):
        certify(exported.path, witness)


def test_a_loss_curve_that_is_missing_changed_or_not_recorded_is_refused(exported: Export, witness: Path) -> None:
    picture = exported.path / "loss_curve.png"
    content = picture.read_bytes()
    picture.unlink()
    files = {name: digest for name, digest in exported.files.items() if name != "loss_curve.png"}
    without = exported.model_copy(update={"files": files}).commit()
    with pytest.raises(CertificationError, match=r"files that are missing: loss_curve\.png"):
        certify(exported.path, witness)
    picture.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    reseal(without, "loss_curve.png")
    with pytest.raises(CertificationError, match=r"loss_curve\.png is not the picture of the recorded losses"):
        certify(exported.path, witness)
    rewrite_json(witness / "witness.json", curve={})
    with pytest.raises(CertificationError, match=r"do not belong to an export: loss_curve\.png"):
        certify(exported.path, witness)
