"""``bench``: what it prints, and a real measurement of a tiny model that reads token shards."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from flows.cli import bench_command
from infra.head.benchmark_run import TrainerMeasured
from t5train.errors import LaunchError
from t5train.records.stage_records import TokenShards
from t5train.spec.recipes import recipe
from t5train.train.step_benchmark import IDLE, Measured
from t5train.train.trainer_benchmark import MeasuredSteps
from tests.support.generated_text import make_shards, write_jsonl

Printed = Callable[..., str]
GIB = 1 << 30
OURS = Measured(
    device="a GPU",
    step_seconds=[0.1, 0.1, 0.2],
    data_wait_seconds=[0.0, 0.001, 0.0],
    tokens_a_step=80_128,
    mfu=0.5,
    memory_bytes=30 * GIB,
    reserved_bytes=33 * GIB,
    host_memory_bytes=4 * GIB,
    seconds_by_kind={"matrix products": 0.09, IDLE: 0.01},
)
TRAINER = MeasuredSteps(
    step_seconds=[0.4, 0.4],
    memory_bytes=78 * GIB,
    reserved_bytes=79 * GIB,
    host_memory_bytes=GIB,
    attention="sdpa",
    precision="bf16 weights, fp32 masters",
    first_loss=10.0,
    last_loss=9.0,
)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_command, "benchmark", lambda *_: OURS)
    monkeypatch.setattr(bench_command, "find_spec", lambda _: True)
    monkeypatch.setattr(bench_command, "benchmark_trainer", lambda *_: TrainerMeasured(128, TRAINER))


@pytest.mark.usefixtures("measured")
def test_speed_memory_and_data_wait_are_shown_next_to_the_trainer(printed: Printed) -> None:
    shown = printed("bench", "base")
    assert "Median step: 100.0 ms (100.0 to 200.0 ms over 3 steps)" in shown
    assert "801,280 tokens/s" in shown
    assert "MFU: 50.0%" in shown
    assert "Waiting for data: 0.25% of the time, 0.33 ms a step" in shown
    assert "accelerator\t3.7\t30.0\t33.0\n" in shown  # estimated: 16 bytes for each of 248 million parameters
    assert "host\t1.0\t4.0\t\n" in shown
    assert "matrix products\t90.0\t90%\n" in shown
    trainer = "200,320 tokens/s, 400.0 ms a step, 78.0 GiB, micro-batch 128. This project is 4.00 times as fast."
    assert trainer in shown


@pytest.mark.usefixtures("measured")
def test_the_trainer_is_left_out_with_alone_without_accelerate_and_in_fp16(
    printed: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_command, "benchmark_trainer", lambda *_: pytest.fail("it was measured"))
    assert "Trainer" not in printed("bench", "base", "--alone")
    in_fp16 = printed("bench", "base", "--set", "optimizer.precision=fp16")
    assert "not measured: it is compared in bf16 or fp32" in in_fp16
    monkeypatch.setattr(bench_command, "find_spec", lambda _: None)
    assert "not measured: it needs `pip install accelerate`" in printed("bench", "base")


@pytest.mark.usefixtures("measured")
def test_a_trainer_that_fails_or_does_not_fit_does_not_hide_our_own_figures(
    printed: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise LaunchError("rank 0 ended with exit code 1")

    for peer, message in ((fail, "failed: rank 0 ended with exit code 1"), (lambda *_: None, "does not fit")):
        monkeypatch.setattr(bench_command, "benchmark_trainer", peer)
        shown = printed("bench", "base")
        assert "801,280 tokens/s" in shown
        assert message in shown


@pytest.fixture
def tiny_shards(tmp_path: Path) -> TokenShards:
    text = str(write_jsonl(tmp_path / "text.jsonl", 400))
    spec = recipe("smoke", {"corpus.source": text, "tokenizer.vocab_size": 300, "shards.workers": 1})
    return make_shards(spec, tmp_path)[1]


@pytest.mark.slow
def test_a_tiny_model_is_measured_on_shards_with_a_real_wait_for_data(
    tiny_shards: TokenShards,
    printed: Printed,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    settings = {
        "tokenizer.vocab_size": 300,
        "model.num_layers": 1,
        "model.num_decoder_layers": 1,
        "objective.input_tokens": 32,
        "optimizer.global_batch_sequences": 4,
        "layout.micro_batch_sequences": 4,
        "cluster.ranks": 1,
    }
    changes = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
    shown = printed("bench", "smoke", *changes, "--steps", "3", "--shards", str(tiny_shards.path))
    assert "smoke: 1 rank on CPU, fp32" in shown
    assert "Waiting for data: " in shown
    assert "not measured, as tokens are random" not in shown
    assert "host\t" in shown
    assert "matrix products\t" in shown
    assert ("This project is" in shown) == (find_spec("accelerate") is not None)
