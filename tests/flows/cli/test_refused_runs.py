"""Runs that are refused before anything starts: what the machine, the text or an earlier run does not allow."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration

from infra.head.preflight.text_checks import LOOK_BYTES
from t5train import host_resources
from t5train.checkpoint.resume_point import ask_to_begin_again
from t5train.data.samples.loader import ORDER_VERSION
from t5train.data.vocabulary.sentencepiece_model import train
from t5train.model.model_shape import huggingface_config, resolve
from t5train.records.stage_records import TokenShards
from t5train.spec import TokenizerSpec
from t5train.spec.recipes import recipe

Refused = Callable[..., str]
HOLDS_A_RUN = """
import sys
from pathlib import Path
from infra.node.attempts.run_lock import run_lock

with run_lock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("settings", "code", "reason"),
    [
        (("corpus.source=one.txt",), 4, "is 1 passage of 1.9 MB, none of which falls into the validation split"),
        (("corpus.source=absent.txt",), 4, "corpus.source 'absent.txt' does not exist"),
        (("storage.keep_last=1000000000", "optimizer.num_steps=100000000000"), 5, "too little disk space"),
    ],
)
def test_a_dry_run_and_a_run_are_refused_for_the_same_reason(
    t5_pretrain: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    refused: Refused,
    tmp_path: Path,
    settings: tuple[str, ...],
    code: int,
    reason: str,
) -> None:
    (tmp_path / "one.txt").write_text("word " * 380_000 + "\n")
    assert reason in (refusal := refused(code, "run", "smoke", *changed(*settings)))
    assert t5_pretrain("run", "smoke", "--dry-run", *changed(*settings)) == code
    assert capsys.readouterr().err == refusal
    assert [path.name for path in tmp_path.iterdir()] == ["one.txt"]


def changed(*settings: str) -> list[str]:
    return [option for setting in settings for option in ("--set", setting)]


@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
def test_a_vocabulary_that_differs_from_the_starting_models_is_refused_before_any_work(
    refused: Refused,
    tmp_path: Path,
    dry: tuple[str, ...],
) -> None:
    words = [f"word {number} of {number * 7919}" for number in range(2000)]
    (tmp_path / "spiece.model").write_bytes(train(TokenizerSpec(vocab_size=300), words))
    model = tmp_path / "model"
    shape = resolve(recipe("smoke").model, tokenizer_vocab_size=400)
    T5ForConditionalGeneration(T5Config(**huggingface_config(shape, pad_id=0, eos_id=1))).save_pretrained(model)
    start = ("run", "smoke", "--root", str(tmp_path / "root"), "--set", f"model.start_from={model}", *dry)
    assert "tokenizer.path is left out" in refused(2, *start, "--set", "tokenizer.vocab_size=300")
    (model / "spiece.model").write_bytes(b"another")
    chosen = f"tokenizer.path={tmp_path / 'spiece.model'}"
    assert f"Set tokenizer.path={model}" in refused(2, *start, "--set", chosen)
    assert not (tmp_path / "root").exists()


def test_a_run_that_does_not_fit_in_memory_is_refused_before_it_starts(
    refused: Refused,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    root = tmp_path / "root"
    monkeypatch.setattr(host_resources, "host_memory_bytes", lambda: 128 * 10**9)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    asked = changed("corpus.source=pydocs", "cluster.accelerator=cuda")
    said = refused(2, "run", "t5_11b_one_gpu", "--root", str(root), *asked)
    assert "need 290.6 GB of host memory, but this machine has 128.0 GB" in said
    assert not root.exists()


def test_a_second_start_of_a_running_run_is_refused(
    t5_pretrain: Callable[..., int], refused: Refused, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", HOLDS_A_RUN, str(tmp_path / "work" / "runs" / "mine")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        assert "is in use by process" in refused(6, "run", "smoke", "--name", "mine")
        assert t5_pretrain("run", "smoke", "--name", "mine", "--dry-run") == 6


def test_a_run_begun_with_other_settings_is_refused_before_anything_starts(refused: Refused, tmp_path: Path) -> None:
    begun = tmp_path / "work" / "runs" / "mine" / "run.json"
    begun.parent.mkdir(parents=True)
    settings = {"optimizer.seed": 1, "corpus.split_seed": 2, "corpus.source": "elsewhere.txt", "cluster.ranks": 1}
    spec = recipe("smoke").with_settings(settings).model_dump(mode="json")
    begun.write_text(json.dumps({"identity": {"order_version": ORDER_VERSION}, "spec": spec}))
    published = tmp_path / "work" / "published" / "mine"
    published.mkdir(parents=True)
    (published / "manifest.json").write_text("{}")
    said = refused(2, "run", "smoke", "--name", "mine")
    assert "(corpus.split_seed: 2 -> 0; optimizer.seed: 1 -> 0)" in said
    assert not (tmp_path / "work" / "prefect").exists()


def test_accelerators_of_another_kind_do_not_count_as_gpus(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("xpu"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 64)
    said = refused(2, "run", "smoke", "--set", "cluster.accelerator=cuda")
    assert "this machine has 0 GPUs that torch can use" in said


def test_fp16_on_a_cpu_that_does_not_support_it_is_refused_before_anything_starts(
    refused: Refused,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", lambda: False)
    asked = changed("optimizer.precision=fp16", "layout.zero_stage=1", "cluster.accelerator=cpu")
    assert "this machine's CPU has no instructions for it" in refused(2, "run", "smoke", *asked)
    assert not (tmp_path / "work/prefect").exists()


@pytest.mark.slow
def test_text_that_does_not_fit_under_the_root_is_refused_before_anything_starts(
    refused: Refused, tmp_path: Path
) -> None:
    with open(tmp_path / "text.txt", "wb") as file:
        file.write(b"a line of text\n" * (LOOK_BYTES // 14 + 2))
        file.truncate(1 << 43)  # sparse from here on, and not read any further
    assert "choose another root" in refused(5, "run", "smoke", "--set", "corpus.source=text.txt")


@pytest.mark.parametrize("command", ["run", "train"])
def test_a_start_after_an_unfinished_begin_again_is_refused_with_how_to_repeat_or_withdraw_it(
    refused: Refused, tmp_path: Path, command: str
) -> None:
    folder = tmp_path / "work" / "runs" / "mine"
    folder.mkdir(parents=True)
    ask_to_begin_again(folder)
    shards = tmp_path / "work" / "shards" / "some"
    shards.mkdir(parents=True)
    TokenShards(path=shards, fingerprint="0", files={}).commit()
    said = refused(2, command, "smoke", "--name", "mine", "--set", "corpus.source=/nowhere")
    assert "Repeat --begin-again" in said
    assert f"remove {folder / 'begin-again'}" in said
