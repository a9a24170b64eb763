"""``predict`` on the command line."""

import io
import json
import os
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock

import pytest

from t5train.data.worker_processes import Advance, Json
from t5train.inference.predict.prediction_worker import predict_parts
from t5train.inference.predict.predictions import read_predictions
from t5train.release.export import export
from t5train.release.model_card import RecordedRun
from tests.support.documented_json import require_documented
from tests.support.synthetic_models import make_trained

T5Pretrain = Callable[..., int]
SHORT = ("--max-new-tokens", "3", "--device", "cpu", "--processes", "1")


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A model fine-tuned on two tasks, with which this process predicts."""

    def here(function: str, jobs: Sequence[Json], workers: int, advance: Advance) -> Iterator[Json]:
        return (predict_parts(job, advance) for job in jobs)

    monkeypatch.setattr("t5train.inference.predict.prediction.in_processes", here)
    return str(export(*make_trained(tmp_path / "made", "pairs"), tmp_path / "model").path)


def test_predict_writes_a_folder_and_says_where(
    t5_pretrain: T5Pretrain, capsys: pytest.CaptureFixture[str], tmp_path: Path, model: str
) -> None:
    (tmp_path / "rows.tsv").write_text("en\tde\n3 1 2\t2 1 3\n")
    file = "rows.tsv#source=en&target=de&task=reverse_digits"
    assert t5_pretrain("predict", model, file, "--out", "made-here", "--num-beams", "2", *SHORT) == 0
    assert capsys.readouterr().out == "1 prediction: made-here/predictions.jsonl\n"
    (row,) = read_predictions(tmp_path / "made-here")
    assert (row.source, row.reference) == ("reverse: 3 1 2", "2 1 3")
    assert t5_pretrain("predict", model, file, "--out", "made-here", "--num-beams", "2", *SHORT, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    require_documented("predict", found)
    assert found["dtype"] == "float32"
    assert found["decoding"] == {"num_beams": 2, "length_penalty": 1.0}


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("-", b"order: 2 1\norder: 3\r\n"),
        ("/dev/stdin#prefix=", b"order: 2 1\norder: 3"),
        ("/dev/stdin#task=sort_digits", b"2 1\n3"),
        ("/dev/stdin#source=s&task=sort_digits", b'{"s": "2 1"}\n{"s": "3"}\n'),
    ],
)
def test_predict_reads_standard_input_and_writes_standard_output(
    t5_pretrain: T5Pretrain,
    capfdbinary: pytest.CaptureFixture[bytes],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    model: str,
    name: str,
    given: bytes,
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(given)))
    if name == "-":  # of a model that records no tasks
        monkeypatch.setattr("t5train.inference.model_folder.recorded_run", lambda _: RecordedRun({}, {}, {}))
    assert t5_pretrain("predict", model, name, *SHORT) == 0
    (tmp_path / "out.jsonl").write_bytes(capfdbinary.readouterr().out)
    assert [each.source for each in read_predictions(tmp_path / "out.jsonl")] == ["order: 2 1", "order: 3"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nowhere", "rows.txt"), "PATH is nowhere"),
        (("MODEL", "rows.txt", "--json"), "it needs --out"),
        (("MODEL", "rows.txt"), "fine-tuned on 2 tasks (reverse_digits, sort_digits)"),
        (("MODEL", "nowhere.txt#prefix="), "'nowhere.txt' does not exist"),
        (("MODEL", "rows.txt#prefix=", "--out", "rows.txt"), "rows.txt"),
        (("MODEL", "rows.txt#prefix=", "--out", "made"), "made is not empty and was not made by this stage"),
    ],
)
def test_wrong_inputs_of_predict_are_refused_in_one_line(
    t5_pretrain: T5Pretrain,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    model: str,
    arguments: tuple[str, ...],
    said: str,
) -> None:
    (tmp_path / "rows.txt").write_text("a\n")
    assert t5_pretrain("predict", *(model if each == "MODEL" else each for each in arguments), *SHORT) != 0
    output = capsys.readouterr()
    assert output.err.count("\n") == 1
    assert said in output.err
    assert output.out == ""


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--hostfile", "hosts"), "--hostfile: it needs --out"),
        (
            ("--hostfile", "hosts", "--out", "predicted", "--processes", "2"),
            "--processes: with --hostfile, its slots are",
        ),
        (
            ("--hostfile", "hosts", "--out", "predicted", "--device", "cuda:1"),
            "--device is cuda:1, but with --hostfile it",
        ),
        (("--hostfile", "none", "--out", "predicted"), "none: No such file or directory; check the path"),
        (("--hostfile", "hosts", "--out", "predicted"), "nowhere: its name does not resolve. Correct the hostfile"),
        (("--include", "nowhere", "--out", "predicted"), "cluster.include selects hosts of a hostfile, but"),
    ],
)
def test_wrong_hosts_are_refused_in_one_line_before_a_folder_is_made(
    t5_pretrain: T5Pretrain,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    model: str,
    options: tuple[str, ...],
    said: str,
) -> None:
    (tmp_path / "rows.txt").write_text("a\n")
    (tmp_path / "hosts").write_text("nowhere slots=1\n")
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text(
        "#!/bin/sh\necho 'ssh: Could not resolve hostname nowhere: Name or service not known' >&2\nexit 255\n"
    )
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{ssh.parent}{os.pathsep}{os.environ['PATH']}")
    assert t5_pretrain("predict", model, "rows.txt#prefix=", *options) != 0
    output = capsys.readouterr()
    assert said in output.err
    assert output.err.count("\n") == 1
    assert not (tmp_path / "predicted").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nowhere", "rows.txt"), "PATH is nowhere"),
        (("MODEL", "nowhere.txt#prefix="), "'nowhere.txt' does not exist"),
        (("MODEL", "empty.txt#prefix="), "empty.txt has no rows"),
    ],
)
def test_wrong_inputs_are_refused_before_hosts_are_asked(
    t5_pretrain: T5Pretrain,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    model: str,
    arguments: tuple[str, ...],
    said: str,
) -> None:
    asked = Mock(side_effect=lambda *_: nullcontext())
    monkeypatch.setattr("infra.head.predicting.hosts_predictor.predicting_hosts", asked)
    (tmp_path / "empty.txt").touch()
    named = [model if each == "MODEL" else each for each in arguments]
    assert t5_pretrain("predict", *named, "--out", "predicted", "--hostfile", "hosts") != 0
    assert said in capsys.readouterr().err
    asked.assert_not_called()


@pytest.mark.parametrize(
    ("stream", "said"),
    [("stdin", "FILE is -, but standard input is closed"), ("stdout", "standard output, but it is closed. Set --out")],
)
def test_closed_streams_are_refused_before_anything_is_predicted(
    t5_pretrain: T5Pretrain,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    stream: str,
    said: str,
) -> None:
    monkeypatch.setattr(f"sys.{stream}", None)
    assert t5_pretrain("predict", model, "-", *SHORT) != 0
    output = capfd.readouterr()
    assert said in output.err
    assert output.err.count("\n") == 1


@pytest.mark.parametrize(
    ("names", "given", "said"),
    [
        (["-"], b"a", "FILE is 'standard input', but the model was fine-tuned on 2 tasks"),
        (["/dev/stdin#prefix="], b"a\n\xff\n", "error: standard input line 2 is not UTF-8"),
        (["/dev/stdin#source=s&prefix="], b"a\n", "error: standard input line 1 is not JSON"),
        (["/dev/stdin#prefix="], b"", "error: standard input has no rows"),
        (["/dev/stdin#prefix=", "-"], b"a\n", "FILE is standard input 2 times, but it can be read only once"),
    ],
)
def test_errors_name_standard_input_and_not_its_copy(
    refused: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    names: Sequence[str],
    given: bytes,
    said: str,
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(given)))
    assert said in refused(2 if "tasks" in said else 4, "predict", model, *names, *SHORT)


def test_texts_do_not_stay_in_a_temporary_folder_after_sigterm(
    t5_pretrain: T5Pretrain, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: str
) -> None:
    def stopped(*_: object) -> None:
        assert len(list(tmp_path.glob("t5-predict-*/standard-input.txt"))) == 1
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a")))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("t5train.inference.predict.prediction.predict", stopped)
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        assert t5_pretrain("predict", model, "/dev/stdin#prefix=", *SHORT) == 128 + signal.SIGINT
    finally:
        signal.signal(signal.SIGTERM, before)
    assert list(tmp_path.glob("t5-predict-*")) == []
