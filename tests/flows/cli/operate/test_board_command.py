"""`t5-pretrain board`: TensorBoard on this machine's loopback address, for one run or all of them."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from flows.cli.operate import board_command
from flows.cli.operate.board_command import board
from infra.node.ports import free_port
from t5train.errors import InputError, LaunchError
from t5train.records.metrics import Metrics

ROOT = Path(__file__).parents[4]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root with one run that has metrics, and one that has not begun to train."""
    (tmp_path / "runs/new").mkdir(parents=True)
    (tmp_path / "runs/new/run.json").write_text("{}")
    with Metrics(tmp_path / "runs/mine/metrics.jsonl", tmp_path / "runs/mine/tensorboard", 0) as metrics:
        metrics.write(1, {"loss": 2.5})
    return tmp_path


def test_what_cannot_be_shown_is_refused(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusal(said: str) -> pytest.RaisesExc[InputError]:
        return pytest.raises(InputError, match=said)

    empty = tmp_path / "empty"
    with refusal(rf"^there are no runs with metrics in {empty}/runs\. .* --root$"):
        board(root=empty)
    with refusal(r"there is no run 'mime' in .* \(did you mean 'mine'\?\)"):
        board("mime", root=root)
    with refusal("run new has no metrics yet"):
        board("new", root=root)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with refusal(f"port {port} of 127.0.0.1 cannot be used: .* --port"):
            board(root=root, port=port)
    monkeypatch.setattr(board_command, "find_spec", lambda _: None)
    with refusal(r"tensorboard is not installed. Install it: .* -m pip install 'tensorboard"):
        board(root=root)


def test_a_tensorboard_that_fails_is_reported_with_its_last_line(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(root / "python"))
    (root / "python").write_text("#!/bin/sh\necho 'No module named tensorboard'\nexit 3\n")
    (root / "python").chmod(0o755)
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(LaunchError, match="TensorBoard ended with exit code 3: No module named tensorboard"):
            board(root=root, port=free_port())
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.slow
@pytest.mark.parametrize(("words", "shown"), [((), "mine/tensorboard"), (("mine",), ".")])
def test_board_serves_the_runs_on_loopback_until_ctrl_c(root: Path, words: tuple[str, ...], shown: str) -> None:
    port = free_port()
    command = [sys.executable, "-m", "flows.cli", "board", *words, "--root", str(root), "--port", str(port)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(3)]
        assert re.fullmatch(rf"TensorBoard shows {root}.* at http://127\.0\.0\.1:{port}; Ctrl-C stops it\n", lines[0])
        assert re.fullmatch(rf" +ssh -N -L {port}:127\.0\.0\.1:{port} \S+@\S+\n", lines[2])
        assert _found_runs(port) == f'["{shown}"]'
        with pytest.raises(OSError, match="refused"):  # as from any address but the one that it listens on
            socket.create_connection(("127.0.0.2", port), 1)
        process.send_signal(signal.SIGINT)
        assert process.wait(300) == 0
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", port), 1)
    finally:
        process.kill()
        process.communicate()


def _found_runs(port: int) -> str:
    """Ask TensorBoard for its runs until it has read any."""
    deadline = time.monotonic() + 60
    while True:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/data/runs", timeout=20) as answer:
            found = answer.read().decode()
        if found != "[]" or time.monotonic() > deadline:
            return str(found)
        time.sleep(0.5)
