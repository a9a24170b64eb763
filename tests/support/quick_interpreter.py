"""Lets Triton's interpreter prepare its language once per launch, which halves the time of kernels in tests.

Triton 3.9, which `make test` installs where there is no GPU, also does it at every call of a device function, a
thousand times in a launch, although nothing has changed it back in the meantime.
"""

from collections.abc import Callable
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

_prepared = set[frozenset[str]]()
"""The modules that are prepared in the launch that goes on; empty between launches."""


def speed_up() -> None:
    """Speed up the interpreter of this process, once."""
    if interpreter._patch_lang is not _prepare:
        interpreter._patch_lang = _prepare


def _prepare(function: Callable[..., Any]) -> Any:
    """Prepare the modules that ``function`` uses, unless they are. The launch itself restores what is returned."""
    modules = frozenset(each.__name__ for each in function.__globals__.values() if each is tl or each is tl.core)
    if modules in _prepared:
        return interpreter._LangPatchScope()
    scope = _Scope() if not _prepared else interpreter._LangPatchScope()
    scope._changes = _patch_lang(function)._changes
    _prepared.add(modules)
    return scope


class _Scope(interpreter._LangPatchScope):  # type: ignore[misc] # Triton has no types
    """What a launch prepared."""

    def restore(self) -> None:
        super().restore()
        _prepared.clear()


_patch_lang = interpreter._patch_lang
