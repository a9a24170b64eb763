"""Peers and loss curves really train, a tiny model on the CPU; an interrupted comparison continues."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import loss_curves, peer_training
from benchmarks.loss_curves import Curve
from infra.head.benchmark_run import TRAINER_PROGRAM, measure_ranks
from infra.node.processes import arguments, find
from t5train.data.vocabulary.tokenizer import expected_vocab_size
from t5train.spec.recipes import recipe
from t5train.train.trainer_benchmark import TrainerJob
from tests.support.waiting import await_that

TINY = {
    "model.num_layers": 1,
    "model.num_decoder_layers": 1,
    "model.compile": False,
    "objective.input_tokens": 16,
    "optimizer.global_batch_sequences": 4,
    "layout.micro_batch_sequences": 4,
    "cluster.ranks": 1,
}
PYTHON, ROOT = sys.executable, Path(__file__).parents[2]
# The command, of which only the ranks are forks: it gets signals.
PROGRAM = """
import sys
sys.executable = sys.argv.pop(1)
from benchmarks import loss_curves, peer_training
raise SystemExit(loss_curves.main())
"""
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_ranks")]


@pytest.mark.parametrize("peer", ["pytorch", "deepspeed", "trainer"])
def test_a_peer_trains_the_recipes_model(peer: str, tmp_path: Path) -> None:
    spec = recipe("smoke", TINY)
    facts = {"spec": spec, "vocab_size": expected_vocab_size(spec.tokenizer), "steps": 2}
    if peer == "trainer":
        measured = measure_ranks(TRAINER_PROGRAM, TrainerJob(**facts), tmp_path)
    else:
        measured = measure_ranks(peer_training.PROGRAM, peer_training.PeerJob(**facts, peer=peer), tmp_path)
    assert len(measured.step_seconds) == 2
    assert all(seconds > 0 for seconds in measured.step_seconds)
    assert measured.first_loss == pytest.approx(8.2, rel=0.1)
    assert measured.last_loss < measured.first_loss + 0.5
    assert measured.precision == "fp32"
    assert measured.host_memory_bytes > 100e6
    assert measured.memory_bytes > 100e6


def test_interrupted_loss_curves_leave_no_rank_and_continue(
    python_with_ranks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = [part for name, value in TINY.items() for part in ("--set", f"{name}={str(value).lower()}")]
    options = ["smoke", "--root", str(tmp_path), "--steps", "3", *settings]
    rows = tmp_path / "losses.jsonl"
    with subprocess.Popen([PYTHON, "-c", PROGRAM, python_with_ranks, *options], cwd=ROOT) as first:
        second_log = tmp_path / "logs" / "losses-none" / "rank-0.log"
        await_that(lambda: first.poll() is not None or second_log.exists())
        first.send_signal(signal.SIGTERM)
        assert first.wait(60) == 143
    [row] = map(Curve.model_validate_json, rows.read_text("utf-8").splitlines())
    assert row.variant == "kernels"
    assert not find(lambda pid: str(tmp_path) in " ".join(arguments(pid)) and pid != os.getpid())
    monkeypatch.setattr(sys, "argv", ["loss_curves", *options])
    assert not loss_curves.main()
    curves = {row.variant: row for row in map(Curve.model_validate_json, rows.read_text("utf-8").splitlines())}
    assert list(curves) == ["kernels", "none", "none again"]
    assert curves["kernels"] == row
    assert curves["kernels"].measured == curves["none"].measured, "there are no kernels here"
    once, again = curves["none"].measured.losses, curves["none again"].measured.losses
    assert len(once) == 3
    assert again == pytest.approx(once, rel=1e-5)
    assert again != once, "sums in another order are rounded differently"
    assert "difference by rounding alone" in capsys.readouterr().out
