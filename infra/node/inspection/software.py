"""What a node would run: versions, digests of our code and the spec, and compilers. No large package is imported."""

import ctypes
import json
import os
import platform
import runpy
import shutil
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

from infra.node import compiled_operators
from infra.node.attempts.rank_environment import search_path
from infra.node.code_bundle import bundle
from infra.node.inspection.facts import Build, Software
from infra.node.operator_folder import VARIABLE, operator_folder
from t5train.errors import SpecError, StorageError

PACKAGES = (
    *("torch", "deepspeed", "numpy", "safetensors", "transformers", "pydantic", "orjson", "pyarrow"),
    *("sentencepiece", "fsspec", "isal", "tensorboard"),
)
"""The packages that ranks import; others may differ between hosts."""
WANDB = "wandb"
"""The package that ranks import if ``monitor.wandb`` is true."""
SCORING = ("sacrebleu", "rouge-score")
"""The packages that ranks import if the best checkpoint is chosen by a score of generated text."""
DASK = "distributed"
"""The package that hosts import to tokenise if ``shards.executor`` is dask."""
_CODE = Path(__file__).parents[3]
"""The folder that this project is imported from."""
_RUNTIMES = ("cuda", "hip", "xpu")


def software(spec: str) -> Software:
    """The software of this interpreter; ``spec`` is the run's spec as JSON, or empty."""
    return Software(
        python=platform.python_version(),
        machine=platform.machine(),
        packages={name: _version(name) for name in (*PACKAGES, *_asked_for(spec))},
        runtime=torch_runtime(),
        code_digest=bundle(_CODE).digest,
        spec_digest=spec_digest(spec),
        libgomp_error=_libgomp_error(),
    )


def _asked_for(spec: str) -> tuple[str, ...]:
    """The packages that only this spec needs."""
    try:
        settings = json.loads(spec)
        from t5train.records.metrics import GENERATED  # needs what ranks import

        asked = {WANDB: settings["monitor"]["wandb"], DASK: settings["shards"]["executor"] == "dask"}
        asked |= dict.fromkeys(SCORING, settings["evaluate"]["best_metric"] in GENERATED)
        return tuple(package for package, is_needed in asked.items() if is_needed)
    except (ImportError, ValueError, KeyError, TypeError):  # no spec, or one that ``spec_digest`` refuses
        return ()


def spec_digest(spec: str) -> str:
    """Fingerprint of the whole spec, including execution, as this code reads it, or why this code rejects it."""
    if not spec:
        return ""
    try:
        from t5train.records.identity import fingerprint  # imports pydantic, which may be missing here
        from t5train.spec import RunSpec

        return fingerprint(RunSpec.model_validate(json.loads(spec)).model_dump(mode="json"))
    except (ImportError, SpecError, ValueError) as error:
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
    """What torch was built for, from its ``version.py``, which can be read without importing torch."""
    folder = _torch_folder()
    if folder is None or not (folder / "version.py").is_file():
        return {}
    built = runpy.run_path(str(folder / "version.py"))
    return {name: str(built[name]) for name in _RUNTIMES if built.get(name)}


def _libgomp_error() -> str:
    """Load torch's OpenMP library, and return the loader's error; empty if there is none.

    The library needs static thread-local storage, of which the loader reserves little. If other libraries have used it
    up, as happens on aarch64, ``import torch`` fails with "cannot allocate memory in static TLS block". This check
    therefore comes after the imports of libraries that ranks load before torch.
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


def build(given: Mapping[str, str]) -> Build:
    """Check what DeepSpeed needs to compile its operators, and remove stale locks in the operator folder.

    The variables are those that ranks get from the head, and otherwise those of this node, as sshd sets them.
    """
    environment = {**os.environ, **given}
    path = search_path()
    try:
        environment |= {VARIABLE: str(operator_folder(environment))}
    except StorageError:  # hardware reports it
        environment |= {VARIABLE: os.devnull}
    cleared, foreign = compiled_operators.clear_stale_locks(environment), compiled_operators.foreign_locks(environment)
    return Build(
        ninja=shutil.which("ninja", path=path),
        compiler=shutil.which(environment.get("CXX", "c++"), path=path),
        compiled=compiled_operators.compiled(environment),
        cleared_locks=[str(lock) for lock in cleared],
        foreign_locks=[str(lock) for lock in foreign],
        shared_locks=[str(lock) for lock in compiled_operators.shared_locks(environment)],
        unwritable=compiled_operators.unwritable(environment),
    )
