"""``generate`` and ``evaluate`` on the command line."""

import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from t5train.release.export import export
from tests.support.documented_json import require_documented
from tests.support.synthetic_models import make_trained

T5Pretrain = Callable[..., int]
TEXT = "The <extra_id_0> of a list"
SHORT = ("--json", "--max-new-tokens", "8", "--device", "cpu")


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(export(*make_trained(tmp_path / "made"), tmp_path / "model").path)


def test_generate_prints_each_span_and_the_text_with_the_spans_put_in(
    t5_pretrain: T5Pretrain, capsys: pytest.CaptureFixture[str], model: str
) -> None:
    assert t5_pretrain("generate", model, TEXT, "Two <extra_id_0>", "--max-new-tokens", "4", "--device", "cpu") == 0
    output = capsys.readouterr()
    first, second = output.out.split("\n\n")
    assert first.startswith("<extra_id_0>: ")
    assert len(first.splitlines()) == 2
    assert second.splitlines()[1].startswith("Two")
    assert output.err == ""


def test_generate_reads_lines_from_standard_input_and_prints_json_lines(
    t5_pretrain: T5Pretrain, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(f"{TEXT}\n\nno gap\r\n".encode())))
    assert t5_pretrain("generate", model, "-", "--json", "--max-new-tokens", "2", "--device", "cpu") == 0
    output = capsys.readouterr()
    found = [json.loads(line) for line in output.out.splitlines()]
    assert [each["text"] for each in found] == [TEXT, "no gap"]
    assert [list(each["spans"]) for each in found] == [["<extra_id_0>"], []]
    assert all(each["new_tokens"] <= 2 for each in found)
    assert output.err.count("\n") == 1
    assert output.err.startswith("warning: text 2: the text has no <extra_id_0>")


@pytest.mark.parametrize(("text", "what"), [("-", "line 2 of standard input"), (os.fsdecode(b"caf\xe9"), "TEXT")])
def test_generate_refuses_text_that_is_not_utf8(
    t5_pretrain: T5Pretrain,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    text: str,
    what: str,
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"one <extra_id_0>\ncaf\xe9\n")))
    assert t5_pretrain("generate", model, text, "--device", "cpu") == 4
    assert f"error: {what} is not UTF-8" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("option", ["--temperature=2.5", "--top-p=0.9", "--sample"])
def test_each_option_of_sampling_samples_and_is_reproducible(
    printed: Callable[..., str], model: str, option: str
) -> None:
    outputs = [
        json.loads(printed("generate", model, TEXT, option, "--seed", seed, *SHORT))["generated"]
        for seed in ("1", "1", "2")
    ]
    assert outputs[0] == outputs[1] != outputs[2]


def test_evaluate_prints_loss_baseline_and_accuracy(printed: Callable[..., str], tmp_path: Path, model: str) -> None:
    (tmp_path / "text.txt").write_text("one two three four five six seven eight nine ten\n" * 40)
    arguments = ("evaluate", model, "--corpus", str(tmp_path / "text.txt"), "--device", "cpu")
    said = printed(*arguments)
    assert "nats per masked token (perplexity " in said
    assert " bits) per byte of masked text, in spans of " in said
    assert "if only the frequency of tokens in the text is known" in said
    assert "of masked tokens, " in said
    assert "predicts no better than the frequencies of tokens do" in said
    found = json.loads(printed(*arguments, "--json", "--split", "train", "--seed", "3", "--max-sequences", "2"))
    assert (found["split"], found["seed"], found["sequences"], found["device"]) == ("train", 3, 2, "cpu")
    assert found["loss"] > found["unigram_loss"]
    require_documented("evaluate", found)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("evaluate", "--corpus", "nowhere.txt"), "'nowhere.txt'"),
        (("evaluate", "--corpus", "short.txt"), "Give more text, or set a lower --input-tokens"),
        (("evaluate", "--corpus", "short.txt", "--noise-density", "2"), "noise_density is 2.0"),
        (("generate", TEXT, "--device", "tpu"), "device is 'tpu', but it must be"),
    ],
)
def test_an_error_prints_one_line(
    t5_pretrain: T5Pretrain, capsys: pytest.CaptureFixture[str], model: str, arguments: tuple[str, ...], message: str
) -> None:
    Path("short.txt").write_text("short\n")
    command, *options = arguments
    assert t5_pretrain(command, model, *options) in {2, 4}
    output = capsys.readouterr()
    assert message in output.err
    assert (output.err.count("\n"), output.out) == (1, "")


def test_a_missing_folder_is_named_without_importing_torch(run_without: Callable[..., Any]) -> None:
    for arguments in (("generate", "nowhere", "x"), ("evaluate", "nowhere", "--corpus", "x")):
        assert "is not a folder on this machine" in run_without("torch transformers prefect", *arguments).stderr
