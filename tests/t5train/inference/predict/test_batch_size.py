"""Batches fill a device, as far as its memory goes, and a small file makes several."""

from pathlib import Path

import pytest

from t5train.inference.model_folder import ModelFolder
from t5train.inference.predict import batch_size
from t5train.inference.predict.batch_plan import BatchLimits
from t5train.inference.predict.batch_size import BatchSize
from t5train.inference.predict.devices import device_bytes
from t5train.model.model_shape import T5Shape, count_parameters, huggingface_config, resolve
from t5train.spec import ModelSpec

GIB = 1 << 30
LOOP_ROWS = 32
"""Of the loop that people write."""


def _size(
    monkeypatch: pytest.MonkeyPatch, preset: str, num_beams: int = 1, memory: float = 79.1, **of: str
) -> BatchSize:
    """Return the size of batches of a T5 v1.0 on a GPU with so many GiB, unless a device is named."""
    shape = resolve(ModelSpec.model_validate({"preset": preset, "version": "v1.0"}), 32100)
    monkeypatch.setattr(batch_size, "_num_parameters", lambda _: count_parameters(shape))
    folder = ModelFolder(Path("model"), huggingface_config(shape, 0, 1), run=None, recorded={}, stamps={})  # not read
    given = {"device": "cuda", "dtype": "float32", "num_beams": num_beams, **of}
    memory_bytes = device_bytes("cpu") if given["device"] == "cpu" else int(memory * GIB)
    return BatchSize(folder, **given, device_bytes=memory_bytes)


def _rows(size: BatchSize, longest: int = 64, target: int = 64, rows: int = 10**6) -> int:
    limits = BatchLimits(size.tokens(longest), size.sequences(rows), size.num_beams, target)
    return limits.most_rows(longest)


@pytest.mark.parametrize(
    ("preset", "num_beams", "memory", "expected"),
    [
        ("base", 1, 79.1, 1024),
        ("base", 4, 79.1, 256),
        ("3b", 1, 79.1, 428),
        ("3b", 4, 79.1, 107),
        ("3b", 1, 139.7, 939),
        ("3b", 4, 139.7, 234),
        ("11b", 1, 79.1, 43),
    ],
)
def test_a_gpu_decodes_several_times_as_many_rows_as_a_plain_loop(
    monkeypatch: pytest.MonkeyPatch, preset: str, num_beams: int, memory: float, expected: int
) -> None:
    rows = _rows(_size(monkeypatch, preset, num_beams, memory))
    assert rows == pytest.approx(expected, rel=0.02)
    assert rows > LOOP_ROWS


@pytest.mark.parametrize("longest", [64, 512, 2048])
@pytest.mark.parametrize("target", [16, 512])
def test_neither_what_is_kept_nor_what_the_encoder_computes_exceeds_three_quarters(
    monkeypatch: pytest.MonkeyPatch, longest: int, target: int
) -> None:
    rows = _rows(_size(monkeypatch, "base", 2), longest, target)
    kept = rows * 2 * (longest + target) * 2 * 12 * 768 * 4
    read = rows * longest * 3 * (3072 + 12 * longest) * 4
    assert 1 < max(kept, read) <= 0.75 * 64 * GIB


def test_devices_of_about_the_same_memory_have_the_same_batches_and_half_precision_has_larger_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokens = _size(monkeypatch, "3b", memory=79.1).tokens(64)
    assert _size(monkeypatch, "3b", memory=93).tokens(64) == tokens
    assert _size(monkeypatch, "3b", memory=139).tokens(64) > 2 * tokens
    assert _size(monkeypatch, "3b", dtype="bfloat16").tokens(64) > 2 * tokens


@pytest.mark.parametrize(("num_beams", "expected"), [(1, 64), (4, 16)])
def test_a_core_decodes_as_many_sequences_as_pay(
    monkeypatch: pytest.MonkeyPatch, num_beams: int, expected: int
) -> None:
    assert _rows(_size(monkeypatch, "base", num_beams, device="cpu")) == expected


@pytest.mark.parametrize(("device", "rows", "batches"), [("cpu", 1280, 32), ("cpu", 500, 16), ("cuda", 5000, 10)])
def test_a_small_file_is_several_batches_but_none_is_much_smaller_than_pays(
    monkeypatch: pytest.MonkeyPatch, device: str, rows: int, batches: int
) -> None:
    assert -(-rows // _rows(_size(monkeypatch, "base", device=device), rows=rows)) == batches


def test_a_configuration_that_leaves_sizes_out_has_the_usual_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    size = _size(monkeypatch, "base", device="cpu")
    bare = size._replace(folder=size.folder._replace(config={"num_layers": 6, "num_decoder_layers": None}))
    assert bare.tokens(8) == (4 * GIB) // (3 * (2048 + 8 * 8) * 4)


def test_parameters_are_counted_in_the_files(model: Path) -> None:
    folder = ModelFolder.open(model)
    shape = {name: folder.config[name] for name in T5Shape.model_fields if name in folder.config}
    counted = T5Shape(**shape, gated=True, tied=False)
    assert batch_size._num_parameters(folder) == count_parameters(counted)
