"""How a long stage tells how far it is; who shows it, and how, is the caller's affair."""

from typing import Protocol


class Progress(Protocol):
    """Called now and then by a stage, at most a few times a second's worth of work."""

    def __call__(self, what: str, done: int, total: int | None) -> None:
        """``done`` of ``total`` units of ``what`` (``total`` is None while it is not known)."""
        ...


def silent(what: str, done: int, total: int | None) -> None:
    """Progress that nobody watches."""
