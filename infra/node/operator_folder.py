"""Where ranks of this machine keep what is compiled for them, with one folder per build configuration.

These are the operators that DeepSpeed compiles, and what torch.compile and Triton generate, which takes minutes: an
attempt that resumes a run finds it there, also after a reboot. The user can choose other folders with the variables of
``FOLDERS``. torch's own default for operators is one folder for all checkouts and
environments of a user, often in a home directory that machines share. There, each environment overwrites what another
one has compiled, and a live compile on another machine cannot be distinguished from a killed one. The one for
torch.compile is in /tmp, and Triton's in the home directory. Our default is on a disk of this machine. Standard library
only, as the guards import it.
"""

import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from types import MappingProxyType

from infra.node import node_folders
from t5train.files.locks import private_folder

VARIABLE = "TORCH_EXTENSIONS_DIR"
OPERATORS = "operators"
FOLDERS = MappingProxyType({VARIABLE: OPERATORS, "TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"})
"""Names of folders in the node folder, by the variable that chooses another one."""
CACHES = frozenset(FOLDERS) - {VARIABLE}
_COMPILERS = ("CXX", "CUDA_HOME", "ROCM_HOME", "TORCH_CUDA_ARCH_LIST")
_SOURCES = ("/csrc/", "op_builder/")


def operator_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """TORCH_EXTENSIONS_DIR for ranks with this environment. Raises StorageError if our default is open to others."""
    return _folder(VARIABLE, environment)


def compile_folders(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The value of each variable of ``FOLDERS`` for ranks with this environment. Raises as ``operator_folder`` does."""
    return {variable: str(_folder(variable, environment)) for variable in FOLDERS}


def _folder(variable: str, environment: Mapping[str, str]) -> Path:
    if given := environment.get(variable):
        return Path(given)
    return private_folder(node_folders.node_folder() / FOLDERS[variable]) / _key(environment)


def _key(environment: Mapping[str, str]) -> str:
    """A digest of everything that determines what is compiled.

    That includes the paths of torch and DeepSpeed: ninja recompiles whenever a command line differs, so two
    environments that shared a folder would recompile each other's operators again and again.
    """
    facts = [f"{name}={environment.get(name, '')}" for name in _COMPILERS]
    facts += [sys.prefix, str(sysconfig.get_config_var("SOABI")), _cpu(), *map(_package, ("torch", "deepspeed"))]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]


@cache
def _package(name: str) -> str:
    """Version and path of a package, and the recorded digests of its sources that are compiled."""
    try:
        found = distribution(name)
    except PackageNotFoundError:
        return f"{name} is not installed"
    recorded = [line for line in (found.read_text("RECORD") or "").splitlines() if any(one in line for one in _SOURCES)]
    return "\n".join([name, found.version, str(found.locate_file("")), *sorted(recorded)])


@cache
def _cpu() -> str:
    """The CPU and its features, which ``-march=native`` compiles for."""
    return "\n".join([os.uname().machine, *_flags()])


def _flags() -> Iterator[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        return
    for word in ("flags", "Features"):  # the latter on ARM
        yield from {line.partition(":")[2].strip() for line in lines if line.startswith(word)}
