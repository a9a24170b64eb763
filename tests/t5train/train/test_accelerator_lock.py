"""Accelerator locks. Another process holds the lock, like a rank of another run; only the accelerator is simulated."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from t5train.errors import AcceleratorBusy
from t5train.train import accelerator_lock
from t5train.train.accelerator_lock import lock_accelerator

HOLD = """
import sys
from types import SimpleNamespace
from t5train.train import accelerator_lock
device = SimpleNamespace(device_name=lambda: sys.argv[1], visible_devices_envs=lambda: ["VISIBLE"])
accelerator_lock.get_accelerator = lambda: device
accelerator_lock.lock_accelerator()
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of locks. This process has local rank 1, and may use the accelerators 2 and 5."""
    variables = {
        "T5_LOCKS": str(tmp_path / "node" / "locks"),
        "VISIBLE": "2,5",
        "LOCAL_RANK": "1",
        "T5_RUN_ID": "other",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("PYTHONWARNINGS", raising=False)
    return tmp_path / "node" / "locks"


def simulate_accelerator(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    device = SimpleNamespace(device_name=lambda: kind, visible_devices_envs=lambda: ["VISIBLE"])
    monkeypatch.setattr(accelerator_lock, "get_accelerator", lambda: device)


def test_an_accelerator_belongs_to_one_rank_until_it_ends(locks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simulate_accelerator(monkeypatch, "xpu")
    with subprocess.Popen([sys.executable, "-c", HOLD, "xpu"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as rank:
        while b"held" not in rank.stdout.readline():
            assert rank.poll() is None
        assert [path.name for path in locks.iterdir()] == ["xpu-5.lock"]
        with pytest.raises(AcceleratorBusy, match=f"xpu-5 on .* is in use by attempt other, process {rank.pid}: wait"):
            lock_accelerator()
        monkeypatch.setenv("LOCAL_RANK", "0")
        lock_accelerator()  # the accelerator 2 is free
        monkeypatch.setenv("LOCAL_RANK", "1")
        rank.kill()
    lock_accelerator()


def test_the_cpu_is_not_locked(locks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simulate_accelerator(monkeypatch, "cpu")
    lock_accelerator()
    assert not locks.exists()
