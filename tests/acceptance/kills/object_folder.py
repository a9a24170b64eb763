"""A folder that behaves like an object store, for fsspec: each object is there whole or not at all."""

import os
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

URL = "objects://"


class ObjectFolder(LocalFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Objects of ``objects:///some/folder``."""

    protocol = "objects"

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(os.fspath(path).removeprefix(URL))

    def put_file(self, path1: str, path2: str, callback: Any = None, **_: Any) -> None:  # noqa: ARG002 - fsspec's name
        self.pipe_file(path2, Path(path1).read_bytes())

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        if mode == "create" and self.exists(path):
            raise FileExistsError(path)
        target = Path(self._strip_protocol(path))
        arriving = target.parent.with_name(f".{target.parent.name}.arriving")
        target.parent.mkdir(parents=True, exist_ok=True)
        arriving.write_bytes(value)
        arriving.replace(target)


fsspec.register_implementation("objects", ObjectFolder, clobber=True)
