"""Prediction and the loop that people write write the same."""

import json
import sys
from pathlib import Path
from pydoc_data.topics import topics

import pytest

from benchmarks import prediction
from benchmarks.measured_result import Result
from t5train.data.vocabulary.sentencepiece_model import train
from t5train.spec import TokenizerSpec

SHAPE = {"d_model": 16, "d_kv": 4, "d_ff": 32, "num_heads": 2, "num_layers": 1, "num_decoder_layers": 1}


@pytest.mark.slow
@pytest.mark.parametrize(("most", "ends"), [(3, []), (200, ["--ends"])])
def test_both_predict_the_first_rows_of_a_file_with_equal_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, ends: list[str]
) -> None:
    texts = [" ".join(text.split()[: 3 + number % 7]) for number, text in enumerate(list(topics.values())[:40])]
    rows, vocabulary, into = tmp_path / "rows.jsonl", tmp_path / "spiece.model", tmp_path / "result.json"
    rows.write_text("".join(f"{json.dumps({'source': text})}\n" for text in texts), "utf-8")
    vocabulary.write_bytes(train(TokenizerSpec(vocab_size=200), texts))
    command = [f"{rows}#prefix=", "--root", str(tmp_path / "root"), "--recipe", "smoke", "--tokenizer", str(vocabulary)]
    command += [part for name, value in SHAPE.items() for part in ("--set", f"model.{name}={value}")]
    command += ["--rows", "36", "--beams", "1,2", "--max-new-tokens", str(most), "--rounds", "1", "--into", str(into)]
    monkeypatch.setattr(sys, "argv", ["prediction", *command, "--batch-tokens", "500", "--device", "cpu", *ends])

    assert prediction.main() == 0

    ours, loop, *_ = found = Result.model_validate_json(into.read_text("utf-8")).rows
    assert [(row["beams"], row["program"]) for row in found] == [
        (beams, program) for beams in (1, 2) for program in ("predict", "loop")
    ]
    assert ours["rows"] == loop["rows"] == 36
    assert ours["tokens"] == loop["tokens"]
    assert (ours["tokens"] == 36 * most) == (not ends)
    assert ours["equal texts"] == 36
