"""``serve``: a real server of a model, and what stops it before the model is loaded."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flows.cli.models import serve_command
from t5train.inference.serve.access import KEY_VARIABLE
from t5train.release.export import export
from tests.acceptance import serve_load
from tests.support.synthetic_models import make_trained

T5Pretrain = Callable[..., int]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return export(*make_trained(tmp_path / "made"), tmp_path / "model").path


@pytest.mark.slow
def test_64_clients_get_the_answers_of_generate_while_others_are_refused_in_one_line(model: Path) -> None:
    load = serve_load.run(model, clients=64, seconds=3)
    assert load.wrong == []
    assert len(load.latencies) >= 64
    assert not [refusal for refusal in load.refusals if "\n" in refusal]


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (("nowhere",), {}, "PATH is nowhere, which is not a folder on this machine"),
        (("MODEL", "--host", "::"), {}, "so a key is needed: make one with `(umask 077; openssl rand -hex 32"),
        (("MODEL",), {KEY_VARIABLE: "short"}, f"the key in {KEY_VARIABLE} has 5 characters: it must be at least 16"),
        (("MODEL", "--key-file", "open.key"), {}, "so others may know the key: make one"),
        (("MODEL", "--key-file", "no.key"), {}, "no.key cannot be read"),
        (("MODEL", "--host", "nowhere.invalid"), {}, "--host nowhere.invalid is not an address of this machine"),
        (("MODEL", "--device", "tpu"), {}, "device is 'tpu', but it must be"),
    ],
)
def test_what_is_wrong_is_said_in_one_line_before_anything_is_loaded(
    t5_pretrain: T5Pretrain,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    model: Path,
    arguments: tuple[str, ...],
    environment: dict[str, str],
    message: str,
) -> None:
    Path("open.key").write_text("0123456789abcdef\n")
    Path("open.key").chmod(0o644)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert t5_pretrain("serve", *(str(model) if each == "MODEL" else each for each in arguments)) in {2, 4, 5}
    output = capsys.readouterr()
    assert message in output.err
    assert (output.err.count("\n"), output.out) == (1, "")


def test_a_missing_package_is_named_with_its_extra(
    t5_pretrain: T5Pretrain, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, model: Path
) -> None:
    monkeypatch.setattr(serve_command, "find_spec", lambda name: None if name == "fastapi" else name)
    assert t5_pretrain("serve", str(model)) == 4
    assert "needs fastapi, not installed here: pip install 't5-pretrain[serve]'" in capsys.readouterr().err


def test_the_command_needs_neither_prefect_nor_torch_to_find_what_is_wrong(run_without: Callable[..., Any]) -> None:
    assert "is not a folder on this machine" in run_without("torch transformers prefect", "serve", "./nowhere").stderr
