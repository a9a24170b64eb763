"""Compiles the segmenter, the C++ code in this folder, and loads it.

::

    python -m t5train.data.native.segmenter_build      compile it, which takes half a minute and a C++ compiler

``make setup`` does this. Without it, encoding gives the same ids more slowly. It is not compiled when it is needed:
many worker processes need it at the same moment, and they may run where there is no compiler or where this package
cannot be written. The result lies beside the sources. Its name contains a digest of them and the Python and machine
that it is for, so another one is never loaded.
"""

import logging
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from functools import cache
from hashlib import sha256
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType

from t5train.errors import InputError, T5TrainError
from t5train.files.atomic import replacing, try_writing

COMMAND = "python -m t5train.data.native.segmenter_build"
_SOURCES = Path(__file__).parent
_COMPILERS = ("g++", "c++", "clang++")
# Not -march=native: hosts with other CPUs may share this folder.
_OPTIONS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-fvisibility=hidden")
_log = logging.getLogger(__name__)


def build(folder: Path = _SOURCES) -> Path:
    """Compile the segmenter into a folder unless it is there, and return its path.

    One that is there and does not work on this machine is replaced. Raises InputError if there is no C++ compiler or
    it fails, and the system's error if the folder cannot be written.
    """
    path = built(folder)
    if load(path) is not None:
        return path
    try_writing(folder)  # before compiling, which takes half a minute
    compiled = _compile()
    with replacing(path) as file:
        file.write(compiled)
    _imported.cache_clear()
    for other in folder.glob(f"segmenter-*{_suffix()}"):
        if other != path:
            other.unlink(missing_ok=True)
    return path


def built(folder: Path = _SOURCES) -> Path:
    """Return where ``build`` puts the segmenter of the present sources for this Python."""
    return folder / f"segmenter-{_digest()}{_suffix()}"


def load(path: Path) -> ModuleType | None:
    """Import the segmenter at a path that ``built`` returned; None if it is not there or does not work here."""
    return _imported(path) if path.exists() else None


@cache
def _imported(path: Path) -> ModuleType | None:
    loader = ExtensionFileLoader("segmenter", str(path))
    spec = ModuleSpec("segmenter", loader, origin=str(path))
    try:
        module = module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        _log.warning("%s does not work on this machine: %s. Remove it, and run %s", path, error, COMMAND)
        return None
    return module


def _suffix() -> str:
    suffix: str = sysconfig.get_config_var("EXT_SUFFIX")
    return suffix


@cache
def _digest() -> str:
    digest = sha256(" ".join(_OPTIONS).encode())
    for source in sorted(path for path in _SOURCES.glob("*") if path.suffix in {".h", ".cpp"}):
        digest.update(f"\n{source.name} {source.stat().st_size}\n".encode() + source.read_bytes())
    return digest.hexdigest()[:16]


def _compile() -> bytes:
    try:
        import pybind11  # only needed here
    except ImportError as error:
        raise InputError(f"{error}: pip install pybind11") from error
    headers = [pybind11.get_include(), sysconfig.get_path("include")]
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "segmenter.so"
        command = [*_compiler(), *_OPTIONS, *(f"-I{path}" for path in headers), str(_SOURCES / "segmenter.cpp")]
        done = subprocess.run([*command, "-o", str(target)], capture_output=True, text=True, check=False)
        if done.returncode:
            raise InputError(
                f"the segmenter could not be compiled. The command was {' '.join(command)}, and the compiler reports: "
                f"{done.stderr[-2000:]}"
            )
        return target.read_bytes()


def _compiler() -> list[str]:
    """Return the command of the compiler: that of CXX, which may have arguments, or the first one that is installed."""
    commands = [chosen] if (chosen := shlex.split(os.environ.get("CXX", ""))) else [[name] for name in _COMPILERS]
    for program, *arguments in commands:
        if found := shutil.which(program):
            return [found, *arguments]
    names = ", ".join(program for program, *_ in commands)
    raise InputError(f"there is no C++ compiler ({names}). Install one, or set CXX to the command of one")


if __name__ == "__main__":
    try:
        sys.stdout.write(f"{build()}\n")
    except (T5TrainError, OSError) as error:
        sys.exit(f"segmenter: {error}")
