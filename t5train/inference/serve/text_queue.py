"""The texts that wait for the model: one thread decodes them in batches, the oldest first."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from threading import Condition, Thread
from typing import NamedTuple, Self

from t5train.errors import T5TrainError
from t5train.inference.text.decoding import GenerationSpec
from t5train.inference.text.generation import Generated

Decode = Callable[[Sequence[str], GenerationSpec, Callable[[], bool]], Sequence[Generated]]
"""Generates for texts. It may stop as soon as the last argument says that nobody waits for any of them."""


class QueueFull(T5TrainError):
    """More texts wait than a server takes."""

    retryable = True


class Asked(NamedTuple):
    """A text as the model reads it, and how to generate for it."""

    text: str
    spec: GenerationSpec


class _Answer(Future[Generated]):
    """The answer to a text. That it was cancelled is known also of one that is being decoded."""

    is_wanted = True

    def cancel(self) -> bool:
        self.is_wanted = False
        return super().cancel()


class _Waiting(NamedTuple):
    asked: Asked
    answer: _Answer


class TextQueue:
    """Decodes texts in a thread of its own. What waits when it is free, and has the same settings, makes a batch.

    A text whose future is cancelled while it waits is dropped, and decoding stops when all futures of a batch are. As
    a context manager, it ends when the last text that it has taken is decoded.
    """

    def __init__(self, decode: Decode, batch_sequences: int, most_waiting: int) -> None:
        self._decode, self._batch_sequences, self._most_waiting = decode, batch_sequences, most_waiting
        self._waiting: list[_Waiting] = []
        self._closed = False
        self._changed = Condition()
        self._thread = Thread(target=self._work, name="decoding", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def add(self, asked: Sequence[Asked]) -> "list[Future[Generated]]":
        """Add the texts of a request, all or none. Raises QueueFull if too many would wait."""
        added = [_Waiting(each, _Answer()) for each in asked]
        with self._changed:
            self._forget()
            if len(self._waiting) + len(added) > self._most_waiting:
                raise QueueFull(
                    f"{len(self._waiting)} texts are waiting, and at most {self._most_waiting} can: try again later"
                )
            self._waiting += added
            self._changed.notify()
        return [each.answer for each in added]

    def waiting(self) -> int:
        """Return how many texts wait to be decoded."""
        with self._changed:
            self._forget()
            return len(self._waiting)

    def _forget(self) -> None:
        """Drop the texts that nobody waits for."""
        self._waiting = [each for each in self._waiting if not each.answer.cancelled()]

    def _work(self) -> None:
        while batch := self._next_batch():
            try:
                answers = self._decode(
                    [each.asked.text for each in batch], batch[0].asked.spec, partial(_is_wanted, batch)
                )
            except Exception as error:  # it is raised to those who wait for it
                for each in batch:
                    each.answer.set_exception(error)
            else:
                for each, answer in zip(batch, answers, strict=True):
                    each.answer.set_result(answer)

    def _next_batch(self) -> list[_Waiting]:
        """Wait for texts, and take those that are decoded together; none when the queue is closed and empty."""
        batch: list[_Waiting] = []
        with self._changed:
            while not batch:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    break
                batch = self._taken()
        return batch

    def _taken(self) -> list[_Waiting]:
        """Remove what the oldest text is decoded with, and return what of it is still wanted."""
        spec = self._waiting[0].asked.spec
        # The seed is that of a batch, so a text that is sampled makes one alone, or it would depend on the others.
        most = 1 if spec.sample else max(1, self._batch_sequences // spec.num_beams)
        taken = [each for each in self._waiting if each.asked.spec == spec][:most]
        self._waiting = [each for each in self._waiting if each not in taken]
        return [each for each in taken if each.answer.set_running_or_notify_cancel()]


def _is_wanted(batch: Sequence[_Waiting]) -> bool:
    return any(each.answer.is_wanted for each in batch)
