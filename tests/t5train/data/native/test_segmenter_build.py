"""The segmenter's build: repeated only if the sources changed, and never loaded if it is of other sources."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from t5train.data.native import segmenter_build
from t5train.errors import InputError

WRITES = f'echo "$@" >> $(dirname $0)/log\nwhile [ "$1" != -o ]; do shift; done\ncp {segmenter_build.built()} "$2"'
"""A compiler that takes no time: its result is the segmenter that is there."""


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the sources, used instead of them, with a compiler that writes its arguments to ``log``."""
    folder = tmp_path / "native"
    shutil.copytree(segmenter_build._SOURCES, folder, ignore=shutil.ignore_patterns("*.so"))
    monkeypatch.setattr(segmenter_build, "_SOURCES", folder)
    monkeypatch.setenv("CXX", str(fake_compiler(tmp_path, WRITES)))
    segmenter_build._digest.cache_clear()
    yield folder
    segmenter_build._digest.cache_clear()


def fake_compiler(folder: Path, script: str) -> Path:
    path = folder / "compiler"
    path.write_text(f"#!/bin/bash\n{script}\n")
    path.chmod(0o755)
    return path


def change(source: Path) -> None:
    source.write_text("// other\n")
    segmenter_build._digest.cache_clear()


def test_it_is_compiled_once_and_again_when_a_source_changes(sources: Path, tmp_path: Path) -> None:
    first = segmenter_build.build(sources)
    assert segmenter_build.build(sources) == first
    assert len((tmp_path / "log").read_text().splitlines()) == 1
    change(sources / "word.h")
    assert segmenter_build.load(segmenter_build.built(sources)) is None, "one of other sources is not loaded"
    second = segmenter_build.build(sources)
    assert second != first
    assert [path.name for path in sources.glob("*.so")] == [second.name], "the stale one should be removed"


def test_one_that_does_not_work_on_this_machine_is_named_and_replaced(
    sources: Path, caplog: pytest.LogCaptureFixture
) -> None:
    damaged = segmenter_build.built(sources)
    damaged.write_bytes(b"no ELF")
    assert segmenter_build.load(damaged) is None
    assert str(damaged) in caplog.text
    assert segmenter_build.COMMAND in caplog.text
    assert segmenter_build.load(segmenter_build.build(sources)) is not None


def test_the_compilers_command_may_have_arguments(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", f"{tmp_path / 'compiler'} -stdlib=libx")
    segmenter_build.build(sources)
    assert (tmp_path / "log").read_text().startswith("-stdlib=libx -O3 ")
    monkeypatch.setenv("CXX", "clang++-99")
    change(sources / "word.h")
    with pytest.raises(InputError, match=r"no C\+\+ compiler \(clang\+\+-99\)"):
        segmenter_build.build(sources)


def test_a_folder_that_cannot_be_written_is_noticed_before_compiling(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segmenter_build, "try_writing", Mock(side_effect=PermissionError("read-only")))
    with pytest.raises(PermissionError):
        segmenter_build.build(sources)
    assert not (tmp_path / "log").exists()


def test_code_without_the_sources_encodes_slowly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segmenter_build, "_SOURCES", tmp_path / "native")
    segmenter_build._digest.cache_clear()
    assert segmenter_build.load(segmenter_build.built(tmp_path / "native")) is None


def test_without_a_compiler_the_error_names_the_remedy(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(InputError, match=r"no C\+\+ compiler.*Install one"):
        segmenter_build.build(sources)
    assert not list(sources.glob("*.so*"))


def test_a_failed_compile_leaves_nothing_and_shows_what_the_compiler_reports(sources: Path, tmp_path: Path) -> None:
    fake_compiler(tmp_path, "echo no such option >&2; exit 3")
    with pytest.raises(InputError, match="no such option"):
        segmenter_build.build(sources)
    assert not list(sources.glob("*.so*"))
