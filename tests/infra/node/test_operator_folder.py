"""Each build configuration has its own folder of operators, on a local disk, to which no other user can write."""

import sys
from collections.abc import Callable
from importlib.metadata import Distribution
from pathlib import Path

import pytest

from infra.node import node_folders, operator_folder
from t5train.errors import StorageError

Folder = Callable[..., Path]


@pytest.fixture
def folder(own_node_folder: None) -> Folder:
    """Return the operator folder of an environment."""

    def folder(**environment: str) -> Path:
        operator_folder._package.cache_clear()
        operator_folder._cpu.cache_clear()
        return operator_folder.operator_folder(environment)

    return folder


def test_the_folder_is_the_users_choice_or_else_the_same_for_any_home_folder(folder: Folder, tmp_path: Path) -> None:
    assert folder(TORCH_EXTENSIONS_DIR="/chosen") == Path("/chosen")
    assert not list(tmp_path.iterdir())
    assert folder(HOME="/a") == folder(HOME="/b", XDG_CACHE_HOME="/c")
    assert folder().parent == node_folders.node_path("operators")
    assert folder().is_relative_to(tmp_path)


def test_each_compiler_configuration_environment_and_set_of_cpu_flags_has_its_own_folder(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [folder(), *(folder(**{name: "x"}) for name in ("CXX", "CUDA_HOME", "TORCH_CUDA_ARCH_LIST"))]
    with monkeypatch.context() as patched:  # its paths are in the compile commands, so ninja would recompile
        patched.setattr(sys, "prefix", "/another/.venv")
        found.append(folder())
    monkeypatch.setattr(operator_folder, "_flags", lambda: iter(["another flag"]))
    assert len({*found, folder()}) == 6


@pytest.mark.parametrize("file", ["deepspeed/ops/csrc/x.cpp", "deepspeed/ops/op_builder/x.py"])
def test_other_sources_have_another_folder(folder: Folder, monkeypatch: pytest.MonkeyPatch, file: str) -> None:
    before = folder()
    kind = type(operator_folder.distribution("deepspeed"))
    read_text = kind.read_text

    def with_a_line(found: Distribution, name: str) -> str | None:
        text = read_text(found, name)
        return f"{text}{file},sha256=new,1\n" if name == "RECORD" else text

    monkeypatch.setattr(kind, "read_text", with_a_line)
    assert folder() != before


def test_operators_are_not_loaded_from_a_folder_that_others_can_write_to(folder: Folder) -> None:
    folder()
    node_folders.node_path("operators").chmod(0o777)
    with pytest.raises(StorageError, match="operators is not a folder that only user"):
        folder()


@pytest.mark.parametrize("name", ["inductor", "triton"])
def test_generated_code_is_not_loaded_from_a_folder_that_others_can_write_to(folder: Folder, name: str) -> None:
    folder()
    assert Path(operator_folder.compile_folders({})["TRITON_CACHE_DIR"]).name == folder().name
    node_folders.node_path(name).chmod(0o777)
    with pytest.raises(StorageError, match=f"{name} is not a folder that only user"):
        operator_folder.compile_folders({})
