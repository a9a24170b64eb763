"""The file of predictions: what is written is what is read, and a bad line is named."""

import os
from pathlib import Path

import pytest

from t5train.errors import InputError
from t5train.inference.predict.predictions import PREDICTIONS, Prediction, read_predictions

MADE = Prediction(id="1", task=None, source="sort: 2\u2028 1", reference=None, hypothesis="1 2", tokens=4, ended=True)


def test_predictions_are_read_as_they_were_written(tmp_path: Path) -> None:
    other = MADE.model_copy(update={"task": "sort", "reference": 'a"\n', "ended": False})
    (tmp_path / PREDICTIONS).write_bytes(MADE.line() + other.line())
    assert list(read_predictions(tmp_path)) == list(read_predictions(tmp_path / PREDICTIONS)) == [MADE, other]
    keys = [each.partition('"')[0] for each in MADE.line().decode().split(',"')[1:]]
    assert keys == sorted(keys)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"{", "is not JSON"),
        (b"\n", "is not JSON"),
        (b"[]", "must be"),
        (MADE.line().replace(b'"tokens":4', b'"tokens":"4"'), "tokens is '4': it must be a whole number"),
        (MADE.line().replace(b'"hypothesis"', b'"hypothesys"'), "hypothesis is missing"),
        (MADE.line().replace(b"{", b'{"a\\n\\u001b[31m":1,'), r"a\n\x1b[31m is 1: unknown setting"),
        (MADE.line().replace(b'"task":null', b'"task":"a\\tb"'), r"task is 'a\tb': it must be text of the form"),
        (MADE.line().replace(b'"task":null', b'"task":""'), "task is '': it must be text of the form"),
    ],
)
def test_the_line_that_is_not_a_prediction_is_named(tmp_path: Path, line: bytes, said: str) -> None:
    file = tmp_path / "other.jsonl"
    file.write_bytes(MADE.line() + line)
    with pytest.raises(InputError, match=r"other\.jsonl line 2 is not what `predict` writes") as raised:
        list(read_predictions(file))
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_folder_without_predictions_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"is not a file of predictions.* or `evaluation` in a model"):
        list(read_predictions(tmp_path))


def test_an_empty_file_is_named_and_a_pipe_is_read(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(InputError, match=r"empty\.jsonl is empty. Predict again"):
        list(read_predictions(tmp_path / "empty.jsonl"))
    reading, writing = os.pipe()
    os.write(writing, MADE.line())
    os.close(writing)
    assert list(read_predictions(Path(f"/dev/fd/{reading}"))) == [MADE]
    os.close(reading)
