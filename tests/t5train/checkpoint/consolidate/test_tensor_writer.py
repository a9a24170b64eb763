"""Tensors of any size are written with the bytes of their source, to files that safetensors can read."""

import errno
import os
import resource
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from t5train.checkpoint.consolidate import tensor_writer
from t5train.checkpoint.consolidate.plan import Extent, Source, TensorPlan
from t5train.checkpoint.consolidate.span_reader import Reader
from t5train.checkpoint.consolidate.tensor_writer import write_tensors
from t5train.errors import IncompleteCheckpoint
from t5train.progress import silent
from t5train.records.digests import digest_safetensors

CONTENT = torch.randint(0, 256, (300_000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def planned(folder: Path, tensors: Sequence[tuple[str, int, int]]) -> list[TensorPlan]:
    """Plan tensors of the given types, offsets and sizes. Each lies in a file of random bytes, in two extents."""
    file = folder / "source"
    file.write_bytes(CONTENT.numpy().tobytes())
    item = {"F32": 4, "U8": 1}
    plans = []
    for index, (dtype, offset, size) in enumerate(tensors):
        first, last = size // 2 * item[dtype], (size - size // 2) * item[dtype]
        source = Source(dtype, (Extent(file, offset + last, first), Extent(file, offset, last)))
        plans.append(TensorPlan(f"t{index}", (size,), dtype, source))
    return plans


def expected(tensor: TensorPlan) -> bytes:
    return b"".join(CONTENT.numpy()[run.offset : run.offset + run.size].tobytes() for run in tensor.source.extents)


tensors = st.lists(st.tuples(st.sampled_from(["F32", "U8"]), st.integers(0, 99), st.integers(0, 9_000)), max_size=7)


@settings(max_examples=40, deadline=None)
@given(tensors=tensors)
def test_tensors_of_any_size_are_written_unchanged(
    tmp_path_factory: pytest.TempPathFactory, tensors: list[tuple[str, int, int]]
) -> None:
    folder = tmp_path_factory.mktemp("stream")
    plans = planned(folder, tensors)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_writer, "_PIECE_BYTES", 8192)
        digests = write_tensors(plans, folder, "model", None, has_digests=True, progress=silent)
    found = load_file(folder / "model.safetensors")
    assert {name: tensor.numpy().tobytes() for name, tensor in found.items()} == {
        plan.name: expected(plan) for plan in plans
    }
    assert digests["model.safetensors"] == digest_safetensors(folder / "model.safetensors")


def test_a_file_system_without_direct_io_is_supported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_open = os.open

    def open_without_direct_io(path: str | Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_open(path, flags, mode)

    monkeypatch.setattr("t5train.checkpoint.consolidate.tensor_writer.os.open", open_without_direct_io)
    plans = planned(tmp_path, [("F32", 0, 9000), ("U8", 3, 70_000)])
    write_tensors(plans, tmp_path, "model", None, has_digests=True, progress=silent)
    found = load_file(tmp_path / "model.safetensors")
    assert all(found[plan.name].numpy().tobytes() == expected(plan) for plan in plans)


def test_an_error_in_one_thread_ends_the_write_and_is_raised(tmp_path: Path) -> None:
    plans = planned(tmp_path, [("F32", 0, 9000)] * 50)
    (tmp_path / "source").write_bytes(b"short")
    with pytest.raises(IncompleteCheckpoint, match="source ends at byte 18000"):
        write_tensors(plans, tmp_path, "model", None, has_digests=True, progress=silent)


def count_open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_tensor_split_over_many_files_is_read_with_few_files_open(tmp_path: Path) -> None:
    files = [tmp_path / f"rank{rank}" for rank in range(300)]
    for rank, file in enumerate(files):
        file.write_bytes(rank.to_bytes(4, "little"))
    source = Source("F32", tuple(Extent(file, 0, 4) for file in files))
    buffer, before = memoryview(bytearray(source.size)), count_open_files()
    with Reader() as reader:
        reader.read(source, 0, buffer)
        assert count_open_files() - before <= 16
    assert count_open_files() <= before
    assert buffer.cast("I").tolist() == list(range(300))


def test_many_output_files_are_written_with_few_files_open(tmp_path: Path) -> None:
    plans = planned(tmp_path, [("F32", 0, 9)] * 400)
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (count_open_files() + 200, allowed[1]))
    try:
        files = write_tensors(plans, tmp_path, "model", 36, has_digests=True, progress=silent)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, allowed)
    assert len(files) == 402
