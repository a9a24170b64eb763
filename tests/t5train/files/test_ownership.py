"""What all owned places have in common: renewal, the loss of a run to another head, and a release that ends soon."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from t5train.errors import RunLocked, StorageError
from t5train.files import ownership
from t5train.files.ownership import Ownership
from tests.support.waiting import await_that

SECONDS = 20.0
"""Ample: what does not happen within this time never does."""


class Place(Ownership):
    """A place whose writes fail with ``error``, or do not return until it answers."""

    def __init__(self, error: Exception | None = None, *, answers: bool = True) -> None:
        self.error, self.written = error, list[str]()
        self.called, self.answering = threading.Semaphore(0), threading.Event()
        if answers:
            self.answering.set()
        super().__init__("the lease of a test", 0.001)

    def _renew(self) -> None:
        self.write("renewed")

    def _release(self) -> None:
        self.write("released")

    def write(self, what: str) -> None:
        self.called.release()
        assert self.answering.wait(SECONDS)
        if self.error is not None:
            raise self.error
        self.written.append(what)

    def await_writes(self, number: int) -> None:
        for _ in range(number):
            assert self.called.acquire(timeout=SECONDS)


@contextmanager
def owned(error: Exception | None = None, *, answers: bool = True) -> Iterator[Place]:
    place = Place(error, answers=answers)
    try:
        yield place
    finally:
        place.answering.set()
        place.release()


def test_a_place_is_renewed_until_it_is_released_once() -> None:
    with owned() as place:
        place.await_writes(3)
        place.release()
        assert place.written[:2] == ["renewed", "renewed"]
        place.release()
    assert place.written.count("released") == 1
    assert place.written[-1] == "released"


def test_a_superseded_head_says_so_and_leaves_the_place_to_the_other_for_good(caplog: pytest.LogCaptureFixture) -> None:
    with owned() as place:
        place.require_kept()
        place.error = RunLocked("taken over by far")
        place._thread.join(SECONDS)
        place.error, written = None, list(place.written)
        errors = list[RunLocked]()
        for act in (place.require_kept, place.renew):
            with pytest.raises(RunLocked, match="taken over by far") as found:
                act()
            errors.append(found.value)
    assert errors[0] is not errors[1], "threads that share the place would share a traceback, too"
    assert place.written == written, "neither renewed nor released"
    assert caplog.text.count("taken over by far") == 1


def test_a_head_that_finds_itself_superseded_while_it_releases_leaves_the_place_to_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with owned() as place:
        monkeypatch.setattr(place, "_renew", lambda: None)
        place.error = RunLocked("taken over by far")
        place.release()
    with pytest.raises(RunLocked):
        place.require_kept()
    assert "released" not in place.written


def test_a_failure_is_logged_once_and_the_place_renewed_as_soon_as_it_answers(caplog: pytest.LogCaptureFixture) -> None:
    with owned(StorageError("disk full")) as place:
        place.await_writes(9)
        place.require_kept()
        assert not place.written
        place.error = None
        await_that(lambda: place.written, SECONDS)
    assert caplog.text.count("the lease of a test cannot be renewed, will retry: disk full") == 1
    assert place.written[-1] == "released"


def test_a_place_that_hangs_delays_neither_another_one_nor_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ownership, "_END_SECONDS", 0.01)
    with owned(answers=False) as hanging, owned() as other:
        hanging.await_writes(1)
        other.await_writes(3)
        hanging.require_kept()
        hanging.release()
        assert hanging._thread.is_alive(), "the end waited for the place"
