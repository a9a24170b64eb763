"""When a checkpoint's tag counts as complete."""

import json
import math
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ValidationError

from t5train.checkpoint import sidecar, tags
from t5train.checkpoint.sidecar import DataState, ParallelLayout
from t5train.checkpoint.tags import complete_tags, require_complete
from t5train.errors import IncompleteCheckpoint, UnknownVersion, UnlistedFile, Unreadable
from t5train.model.parameters import ExpertLayer, ParameterSlot, huggingface_name
from t5train.records.digests import FileDigest, digest_files
from t5train.records.identity import fingerprint
from tests.support.checkpoints.small_tags import save


def test_a_tag_whose_ranks_agree_and_whose_files_verify_is_complete(tmp_path: Path) -> None:
    folder = save(tmp_path, 400)
    seen: list[tuple[int, int | None]] = []
    found = require_complete(folder, lambda _what, done, total: seen.append((done, total)))
    assert [one.rank for one in found] == [0, 1]
    assert found == sidecar.read_all(folder)
    assert seen[-1] == (200, 200)


def test_an_exception_of_the_progress_callback_ends_the_verification_in_the_middle_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(_path: Path, _expected: FileDigest, advance: Callable[[int], None]) -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            advance(1)
        raise AssertionError("a file was read for a minute, for nobody")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tags, "verify_file", read)
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        require_complete(save(tmp_path, 400), interrupt)
    assert time.monotonic() - started < 60


def test_complete_tags_are_sorted_newest_first_and_exclude_unfinished_ones(tmp_path: Path) -> None:
    for step in (900, 1000, 200, 1100):
        save(tmp_path, step)
    (tmp_path / "step-00001100" / "rank-00001.json").unlink()
    (tmp_path / "latest").write_text("step-00001100")
    assert complete_tags(tmp_path) == ["step-00001000", "step-00000900", "step-00000200"]


def test_tags_with_a_file_of_another_size_or_renamed_to_be_removed_are_not_complete(tmp_path: Path) -> None:
    assert complete_tags(tmp_path / "nothing") == []
    save(tmp_path, 400)
    (save(tmp_path, 500) / "part0.pt").write_bytes(b"short")
    save(tmp_path, 600).rename(tmp_path / "removed-0a1b2c3d")
    assert complete_tags(tmp_path) == ["step-00000400"]


def without_sidecars(folder: Path) -> None:
    for path in folder.glob("rank-*.json"):
        path.unlink()


def altered(folder: Path) -> None:
    path = folder / "rank-00001.json"
    path.write_text(path.read_text().replace('"shared.weight"', '"shared.weighs"'))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (without_sidecars, "never finished"),
        (lambda folder: (folder / "rank-00000.json").unlink(), r"rank-00000\.json"),
        (lambda folder: (folder / "rank-00002.json").unlink(), r"rank-00002\.json"),
        (lambda folder: (folder / "rank-00000.json").rename(folder / "rank-00003.json"), "is the sidecar of rank 0"),
        (
            lambda folder: (folder / "rank-00001.json").write_text('{"schema_version": 1'),
            "is damaged, or not a sidecar",
        ),
        (altered, r"rank-00001\.json is damaged"),
    ],
)
def test_a_tag_without_an_intact_sidecar_of_each_rank_is_incomplete(
    tmp_path: Path, damage: Callable[[Path], object], words: str
) -> None:
    folder = save(tmp_path, 400, ranks=3)
    damage(folder)
    with pytest.raises(IncompleteCheckpoint, match=words):
        require_complete(folder)


def test_a_file_with_a_flipped_bit_is_named(tmp_path: Path) -> None:
    folder = save(tmp_path, 400)
    content = bytearray((folder / "part1.pt").read_bytes())
    content[17] ^= 4
    (folder / "part1.pt").write_bytes(content)
    with pytest.raises(IncompleteCheckpoint, match=r"part1\.pt has sha256"):
        require_complete(folder)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("step", 401),
        ("run_fingerprint", "q" * 64),
        ("world_size", 4),
        ("tag", "step-00000399"),
        ("aliases", {"lm_head.weight": "shared.weight"}),
        ("expert_layers", [ExpertLayer(path="a", module="b", num_experts=4, expert_parallel_size=2)]),
        ("data", DataState(samples_consumed=1, shards_fingerprint="s" * 64)),
        ("layout", ParallelLayout(zero_stage=2, precision="bf16", data_parallel_rank=1, data_parallel_size=2)),
    ],
)
def test_a_tag_whose_sidecars_disagree_is_incomplete_and_the_field_is_named(
    tmp_path: Path, field: str, value: object
) -> None:
    folder = save(tmp_path, 400, **{field: value})
    with pytest.raises(IncompleteCheckpoint, match=field):
        require_complete(folder)
    assert complete_tags(tmp_path) == []


def test_a_pickle_that_no_rank_wrote_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path, 400)
    (folder / "mp_rank_01_model_states.pt").write_bytes(b"hostile")
    with pytest.raises(UnlistedFile, match=r"mp_rank_01_model_states\.pt, a file that no rank recorded"):
        require_complete(folder)


def test_a_sidecar_that_cannot_be_read_is_named_and_not_taken_for_missing(tmp_path: Path) -> None:
    folder = save(tmp_path, 400)
    (folder / "rank-00001.json").unlink()
    (folder / "rank-00001.json").symlink_to("/proc/self/mem")  # no process can read its first page
    with pytest.raises(Unreadable, match=r"rank-00001\.json cannot be read now \(Input/output error\): check the disk"):
        sidecar.read(folder, 1)
    with pytest.raises(Unreadable, match=r"rank-00001\.json"):
        complete_tags(tmp_path)
    (folder / "rank-00001.json").unlink()
    with pytest.raises(IncompleteCheckpoint, match=r"rank-00001\.json is missing"):
        sidecar.read(folder, 1)


def test_an_intact_sidecar_with_an_unknown_field_is_refused_as_another_version(tmp_path: Path) -> None:
    path = save(tmp_path, 400) / "rank-00000.json"
    document = json.loads(path.read_text()) | {"optimizer_rank": 3}
    path.write_text(json.dumps(document))
    with pytest.raises(IncompleteCheckpoint, match="is damaged"):
        sidecar.read(path.parent, 0)
    del document["sha256"]
    path.write_text(json.dumps(document | {"sha256": fingerprint(document)}))
    for look in (lambda: sidecar.read(path.parent, 0), lambda: complete_tags(tmp_path)):
        with pytest.raises(UnknownVersion, match=r"rank-00000\.json is intact, .* does not know its optimizer_rank"):
            look()


@pytest.mark.parametrize("name", ["../step-00000001", "/etc/passwd", "a/b", ".."])
def test_a_sidecar_can_name_no_file_and_no_tag_outside_its_folder(tmp_path: Path, name: str) -> None:
    digest = digest_files(save(tmp_path, 1), ["part0.pt"])["part0.pt"]
    with pytest.raises(ValidationError, match="the sidecar names"):
        save(tmp_path, 2, files={name: digest})
    with pytest.raises(ValidationError, match="the sidecar names"):
        save(tmp_path, 3, tag=name)


def test_two_ranks_cannot_record_different_digests_of_one_file(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    second = sidecar.read_all(folder)[1]
    files = second.files | {"part0.pt": second.files["part1.pt"]}
    sidecar.write(folder, second.model_copy(update={"files": files}))
    with pytest.raises(IncompleteCheckpoint, match=r"different digests of part0\.pt"):
        require_complete(folder)


def test_a_parameter_slot_must_have_as_many_elements_as_its_shape() -> None:
    assert ParameterSlot.of("a", (5, 7), 3).numel == math.prod((5, 7))
    with pytest.raises(ValidationError, match="but numel is 34"):
        ParameterSlot(name="a", shape=(5, 7), offset=0, numel=34)


def test_expert_layers_must_divide_evenly_over_ranks_and_be_distinct(tmp_path: Path) -> None:
    layer = {"path": "encoder.block.1.layer.1.mlp", "module": "encoder.block.1.layer.1.mlp.moe", "num_experts": 6}
    with pytest.raises(ValidationError, match="num_experts is 6, but must be a multiple of expert_parallel_size"):
        ExpertLayer.model_validate(layer | {"expert_parallel_size": 4})
    three = ExpertLayer.model_validate(layer | {"expert_parallel_size": 3})
    with pytest.raises(ValidationError, match="expert_parallel_size is 3: it must divide data_parallel_size"):
        save(tmp_path / "three", 1, expert_layers=[three])
    two = ExpertLayer.model_validate(layer | {"expert_parallel_size": 2})
    with pytest.raises(ValidationError, match="but no two may be equal"):
        save(tmp_path / "twice", 1, expert_layers=[two, two])


LAYERS = {"0": "shared", "tied_modules.embed": "shared", "3": "encoder.block.2", "7": ""}


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        ("0.weight", "shared.weight"),
        ("tied_modules.embed.weight", "shared.weight"),
        ("3.layer.0.layer_norm.weight", "encoder.block.2.layer.0.layer_norm.weight"),
        ("7.lm_head.weight", "lm_head.weight"),
    ],
)
def test_pipeline_parameter_names_are_mapped_to_hugging_face_names(stored: str, expected: str) -> None:
    assert huggingface_name(f"module.{stored}", "module.", LAYERS) == expected


@pytest.mark.parametrize("stored", ["1.weight", "tied_modules.other.weight", "shared.weight", "3"])
def test_a_name_outside_the_recorded_layers_is_refused(stored: str) -> None:
    with pytest.raises(ValueError, match="none of the pipeline's layers"):
        huggingface_name(stored, "", LAYERS)


def test_pipeline_stages_without_layers_and_invalid_layer_names_are_refused(tmp_path: Path) -> None:
    stages = ParallelLayout(zero_stage=1, precision="bf16", data_parallel_rank=1, data_parallel_size=2, pipeline_size=2)
    with pytest.raises(ValidationError, match="pipeline_layers is empty, but must name the layers of 2"):
        save(tmp_path / "a", 400, layout=stages)
    with pytest.raises(ValidationError, match="'embed' is not a layer of a pipeline"):
        save(tmp_path / "b", 400, pipeline_layers={"embed": "shared"})


def test_a_sidecar_without_the_replicas_field_is_read(tmp_path: Path) -> None:
    path = save(tmp_path, 400) / "rank-00000.json"
    document = json.loads(path.read_text())
    del document["replicas"], document["sha256"]
    path.write_text(json.dumps(document | {"sha256": fingerprint(document)}))
    assert sidecar.read_all(path.parent)[0].replicas == {}
