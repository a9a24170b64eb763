"""A copy of the repository in which a mutation is planted, with an environment that imports the copy.

The editable install of `.venv` points to the original. The copy has its own `.venv`, whose packages are links to the
original's, and whose scripts and editable install point to the copy, so that processes that tests start import the
mutated code, too.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.acceptance.mutations.mutation import Mutation
from tests.acceptance.mutations.warm_pytest import WarmPytest

REPOSITORY = Path(__file__).resolve().parents[3]
PACKAGES = ("t5train", "infra", "tasks", "flows", "tests")


class MutatedCopy:
    """A copy of the tracked files, and of what `make setup` builds, in a new folder. A context manager."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.rmtree(folder, ignore_errors=True)
        for name in (*tracked_files(), *_built_files()):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, folder / name, follow_symlinks=False)
        self._make_environment(folder / ".venv")
        self._require_own_code()
        self.pytest = WarmPytest(self.python, folder, self.environment)
        self._planted = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.pytest.end()

    @property
    def python(self) -> Path:
        return self.folder / ".venv/bin/python"

    @property
    def environment(self) -> dict[str, str]:
        ours = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
        for name in ("PYTHONPATH", "VIRTUAL_ENV"):
            ours.pop(name, None)
        return ours

    @contextmanager
    def planted(self, mutation: Mutation) -> Iterator[None]:
        """Plant a mutation for the duration of the block. Raises Misplaced."""
        path = self.folder / mutation.file
        text, since = path.read_text("utf-8"), path.stat()
        self._planted += 1
        try:
            path.write_text(mutation.planted_in(text), "utf-8")
            # Python recompiles a file if its size or its time in whole seconds differs from those of the cached one.
            os.utime(path, (since.st_mtime + self._planted, since.st_mtime + self._planted))
            yield
        finally:
            path.write_text(text, "utf-8")
            os.utime(path, (since.st_mtime, since.st_mtime))

    def _make_environment(self, folder: Path) -> None:
        venv.create(folder, symlinks=True, with_pip=False)
        packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
        for entry in Path(sysconfig.get_path("purelib")).iterdir():
            if entry.suffix == ".pth" and str(REPOSITORY) in (text := entry.read_text("utf-8")):
                (packages / entry.name).write_text(text.replace(str(REPOSITORY), str(self.folder)), "utf-8")
            elif entry.name != "__pycache__":
                (packages / entry.name).symlink_to(entry)
        for program in Path(sysconfig.get_path("scripts")).iterdir():
            own = folder / "bin" / program.name
            if own.exists() or not program.is_file():
                continue
            if (content := program.read_bytes()).startswith(b"#!"):
                own.write_bytes(content.replace(sys.prefix.encode(), bytes(folder)))
                shutil.copymode(program, own)
            else:
                own.symlink_to(program)

    def _require_own_code(self) -> None:
        """Raise SystemExit unless processes of this environment, scripts included, import the copy."""
        code = f"import {', '.join(PACKAGES)}\nfor each in ({', '.join(PACKAGES)}): print(*each.__path__)"
        command = [self.python, "-c", code]
        found = subprocess.run(command, cwd="/", env=self.environment, capture_output=True, text=True, check=True)
        first_line = (self.folder / ".venv/bin/t5-pretrain").read_text("utf-8").splitlines()[0]
        if found.stdout.split() != [str(self.folder / name) for name in PACKAGES] or first_line != f"#!{self.python}":
            raise SystemExit(f"the environment of {self.folder} does not import the copy: {found.stdout}{first_line}")


def tracked_files() -> list[str]:
    """Names of the repository's files that git tracks, as they are in the working tree."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.split("\0") if name and os.path.lexists(REPOSITORY / name)]


def _built_files() -> list[str]:
    """The compiled segmenter, and compiled modules, which are valid for copies of their sources with the same time."""
    built = [REPOSITORY.glob("t5train/data/native/*.so"), *(REPOSITORY.glob(f"{each}/**/*.pyc") for each in PACKAGES)]
    return [str(path.relative_to(REPOSITORY)) for found in built for path in found]
