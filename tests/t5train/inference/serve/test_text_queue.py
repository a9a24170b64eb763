"""Texts that wait are decoded in batches of the same settings, the oldest first, and dropped if nobody waits."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager

import pytest

from t5train.inference.serve.text_queue import Asked, QueueFull, TextQueue
from t5train.inference.text.decoding import GenerationSpec
from t5train.inference.text.generation import Generated

GREEDY, BEAMS = GenerationSpec(max_new_tokens=4), GenerationSpec(max_new_tokens=4, num_beams=2)
SAMPLED = GenerationSpec(max_new_tokens=4, sample=True)


def generated(text: str) -> Generated:
    return Generated(text, {}, text.upper(), text, 1, 1, True, ())


class Decoding:
    """Decodes when it may, and records batches. The first batch is taken before anything else waits."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.began, self.may = threading.Event(), threading.Event()

    def __call__(self, texts: Sequence[str], *_: object) -> list[Generated]:
        self.batches.append(list(texts))
        self.began.set()
        assert self.may.wait(60)
        if "bad" in texts:
            raise ValueError("bad")
        return [generated(text) for text in texts]


@contextmanager
def busy(batch_sequences: int = 4, most_waiting: int = 99) -> Iterator[tuple[TextQueue, Decoding, "Future[Generated]"]]:
    """A queue whose thread is decoding a first text until it may go on."""
    decoding = Decoding()
    with TextQueue(decoding, batch_sequences, most_waiting) as queue:
        (first,) = queue.add([Asked("first", GREEDY)])
        assert decoding.began.wait(60)
        try:
            yield queue, decoding, first
        finally:
            decoding.may.set()


def asked(text: str, spec: GenerationSpec = GREEDY) -> list[Asked]:
    return [Asked(each, spec) for each in text.split()]


def test_what_waits_is_batched_with_what_has_the_same_settings_and_the_oldest_goes_first() -> None:
    with busy() as (queue, decoding, _):
        answers = [
            each
            for add in (asked("a"), asked("b c", BEAMS), asked("d e f g"), asked("h", BEAMS))
            for each in queue.add(add)
        ]
    assert decoding.batches == [["first"], ["a", "d", "e", "f"], ["b", "c"], ["g"], ["h"]]
    assert [each.result().filled for each in answers] == list("ABCDEFGH")


def test_a_sampled_text_is_decoded_alone() -> None:
    with busy() as (queue, decoding, _):
        queue.add(asked("a b", SAMPLED))
    assert decoding.batches[1:] == [["a"], ["b"]]


def test_a_text_that_nobody_waits_for_is_dropped_and_makes_room() -> None:
    with busy(most_waiting=3) as (queue, decoding, _):
        first, *_ = queue.add(asked("a b c"))
        with pytest.raises(QueueFull, match=r"^3 texts are waiting, and at most 3 can: try again later$"):
            queue.add(asked("d"))
        first.cancel()
        with pytest.raises(QueueFull):
            queue.add(asked("d e"))
        queue.add(asked("f"))
    assert decoding.batches[1:] == [["b", "c", "f"]]


def test_a_batch_that_nobody_waits_for_is_not_decoded() -> None:
    with busy() as (queue, decoding, _):
        (only,) = queue.add(asked("a"))
        only.cancel()
    assert decoding.batches == [["first"]]


def test_decoding_learns_when_nobody_waits_for_its_batch_any_more() -> None:
    answers, wanted = list["Future[Generated]"](), list[bool]()

    def decode(texts: Sequence[str], _: GenerationSpec, is_wanted: Callable[[], bool]) -> list[Generated]:
        for each in answers:
            wanted.append(is_wanted())
            each.cancel()
        wanted.append(is_wanted())
        return [generated(text) for text in texts]

    queue = TextQueue(decode, 4, 99)
    answers += queue.add(asked("a b"))
    with queue:
        pass
    assert wanted == [True, True, False]


def test_an_error_reaches_the_texts_of_its_batch_and_no_others() -> None:
    with busy(batch_sequences=2) as (queue, _, first):
        one, bad, other = queue.add(asked("one bad other"))
    assert [type(each.exception()) for each in (one, bad)] == [ValueError, ValueError]
    assert (first.result().filled, other.result().filled) == ("FIRST", "OTHER")


def test_closing_finishes_what_was_taken() -> None:
    with busy() as (queue, _, first):
        answers = queue.add(asked("a b"))
    assert [each.result().filled for each in (first, *answers)] == ["FIRST", "A", "B"]
