"""Wheels of a few hundred bytes, and wheelhouses of them."""

import base64
import hashlib
import io
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from infra.head.environments.wheelhouse import Wheel, Wheelhouse, this_python
from t5train.records.digests import digest_file

BACKEND = """
import pathlib, zipfile
def build_wheel(folder, config_settings=None, metadata_directory=None):
    name = "{name}-{version}-{tag}.whl"
    with zipfile.ZipFile(pathlib.Path(folder, name), "w") as wheel:
        wheel.writestr("{name}.py", "VALUE = 'built'")
        info = "{name}-{version}.dist-info"
        wheel.writestr(info + "/METADATA", "Metadata-Version: 2.1\\nName: {name}\\nVersion: {version}\\n")
        wheel.writestr(info + "/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: {tag}\\n")
        wheel.writestr(info + "/RECORD", "")
    return name
"""
PROJECT = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'


def write_wheel(
    folder: Path, name: str, version: str = "1.0", requires: Sequence[str] = (), tag: str = "py3-none-any"
) -> Path:
    """Write a wheel with one module, whose VALUE is the version."""
    info = f"{name}-{version}.dist-info"
    needs = "".join(f"Requires-Dist: {line}\n" for line in requires)
    files = {
        f"{name}.py": f"VALUE = {version!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}",
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tag}\n",
    }
    lines = [f"{path},sha256={_record_digest(text)},{len(text)}\n" for path, text in files.items()]
    path = folder / f"{name}-{version}-{tag}.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for inner, text in files.items():
            wheel.writestr(inner, text)
        wheel.writestr(f"{info}/RECORD", "".join(lines) + f"{info}/RECORD,,\n")
    return path


def _record_digest(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


def write_source(folder: Path, name: str, version: str = "1.0", tag: str = "py3-none-any") -> Path:
    """Write a source archive that builds without any other package, into a wheel with this tag."""
    path = folder / f"{name}-{version}.tar.gz"
    backend = BACKEND.format(name=name, version=version, tag=tag)
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    with tarfile.open(path, "w:gz") as archive:
        for inner, text in {"backend.py": backend, "pyproject.toml": PROJECT, "PKG-INFO": metadata}.items():
            entry = tarfile.TarInfo(f"{name}-{version}/{inner}")
            entry.size = len(text.encode())
            archive.addfile(entry, io.BytesIO(text.encode()))
    return path


def wheelhouse_of(folder: Path, wheels: Sequence[Path]) -> Wheelhouse:
    """List wheels of this folder as a wheelhouse for this Python, and write the list there."""
    found = {path.name: digest_file(path) for path in wheels}
    made = Wheelhouse(
        python=this_python(),
        platforms=("manylinux_2_28_x86_64",),
        requirements=("first",),
        constraints_sha256="0" * 64,
        wheels=tuple(
            Wheel(name=name, size=digest.size, sha256=digest.sha256, unpacked_bytes=4096)
            for name, digest in found.items()
        ),
    )
    made.write(folder)
    return made
