"""What a node would run: versions without importing what is large, and digests of our own code and of the run."""

import ctypes
import platform
import runpy
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import Any

from infra.code_bundle import bundle
from infra.preflight.facts import Software
from t5train.errors import SpecError
from t5train.fingerprint import fingerprint
from t5train.spec import RunSpec

PACKAGES = (
    *("torch", "deepspeed", "numpy", "safetensors", "transformers", "pydantic", "orjson", "pyarrow"),
    *("sentencepiece", "fsspec", "isal", "tensorboard"),
)
"""What ranks import: others may differ."""
_CODE = Path(__file__).parent.parent.parent
"""Where it is imported from."""
_RUNTIMES = ("cuda", "hip", "xpu")


def software(spec: dict[str, Any]) -> Software:
    """Of this interpreter; ``spec`` is the run's, as JSON, or empty."""
    return Software(
        python=platform.python_version(),
        machine=platform.machine(),
        packages={name: _version(name) for name in PACKAGES},
        runtime=torch_runtime(),
        code_digest=bundle(_CODE).digest,
        spec_digest=spec_digest(spec),
        libgomp_error=_libgomp_error(),
    )


def spec_digest(spec: dict[str, Any]) -> str:
    """Fingerprint of the whole spec, execution too, as this code understands it; its complaint when it does not."""
    if not spec:
        return ""
    try:
        return fingerprint(RunSpec.model_validate(spec).model_dump(mode="json"))
    except (SpecError, ValueError) as error:
        return f"refused: {' '.join(str(error).split())[:300]}"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _torch_folder() -> Path | None:
    try:
        return Path(str(distribution("torch").locate_file("torch")))
    except PackageNotFoundError:
        return None


def torch_runtime() -> dict[str, str]:
    """What torch was built for, as its own ``version.py`` has it, which imports nothing of torch."""
    folder = _torch_folder()
    if folder is None or not (folder / "version.py").is_file():
        return {}
    built = runpy.run_path(str(folder / "version.py"))
    return {name: str(built[name]) for name in _RUNTIMES if built.get(name)}


def _libgomp_error() -> str:
    """Load torch's OpenMP library, after the libraries that ranks load before it.

    It wants static thread-local storage, of which the loader sets little aside: when others have taken it, as
    happens on aarch64, ``import torch`` fails with "cannot allocate memory in static TLS block".
    """
    for library in _openmp_libraries():
        try:
            ctypes.CDLL(str(library))
        except OSError as error:
            return str(error)
    return ""


def _openmp_libraries() -> Iterator[Path]:
    if (folder := _torch_folder()) is not None:
        yield from (folder / "lib").glob("libgomp*.so*")
        yield from folder.with_name("torch.libs").glob("libgomp*.so*")
