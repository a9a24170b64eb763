import os
from pathlib import Path

import pytest

from infra.node.attempts import shared_memory
from infra.node.attempts.shared_memory import RANK_BYTES, SEGMENTS
from tests.support.small_disk import run_with_disk

REFUSED = """
from infra.node.attempts.shared_memory import require_free_space
from t5train.errors import StorageError
require_free_space(1)
try:
    require_free_space(2)
except StorageError as error:
    print(error)
"""
# Plays another program that takes shared memory after the check for enough space, and before ranks map theirs.
RANK = """
import os
from pathlib import Path
import deepspeed, torch
from deepspeed import comm
if os.environ["RANK"] == "0":
    Path("/dev/shm/other").write_bytes(bytes(100 << 20))
deepspeed.init_distributed()
comm.barrier()
comm.inference_all_reduce(torch.ones(16 << 20))
"""
LAUNCHED = """
import sys
from pathlib import Path
from infra.head.launch.local_launch import LaunchSpec, launch
from t5train.errors import T5TrainError
folder = Path(sys.argv[1])
try:
    launch(LaunchSpec(lambda _: (str(folder / "rank.py"),), folder / "run", 2, "cpu"))
except T5TrainError as error:
    print(type(error).__name__, error, sep="|")
"""


@pytest.fixture(autouse=True)
def segments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(shared_memory, "SEGMENTS", tmp_path)
    return tmp_path


def make(folder: Path, *names: str) -> None:
    for name in names:
        (folder / f"deepspeed_allreduce_buffer_{name}").touch()


def left(folder: Path) -> list[str]:
    return sorted(path.name.removeprefix("deepspeed_allreduce_buffer_") for path in folder.iterdir())


def test_only_the_ranks_own_segment_is_removed_and_none_by_a_launcher(segments: Path) -> None:
    user = os.getuid()
    make(segments, *(f"{user}_127.0.0.1_2{port}_{rank}" for port in (10, 100) for rank in (1, 10)))
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "210", "RANK": "1"}
    shared_memory.remove_of_rank(environment)
    shared_memory.remove_of_rank(environment)  # already removed
    del environment["RANK"]
    shared_memory.remove_of_rank(environment)
    assert left(segments) == [f"{user}_127.0.0.1_{suffix}" for suffix in ("2100_1", "2100_10", "210_10")]


def test_all_segments_of_a_rendezvous_are_removed_and_no_others(segments: Path) -> None:
    user = os.getuid()
    other = [f"{user}_127.0.0.1_2100_0", f"{user + 1}_127.0.0.1_210_0", f"{user}_10.0.0.1_210_0"]
    make(segments, *other, *(f"{user}_127.0.0.1_210_{rank}" for rank in range(3)))
    shared_memory.remove_all("127.0.0.1", 210)
    assert left(segments) == sorted(other)


def test_too_little_shared_memory_for_the_ranks_is_reported_before_they_start() -> None:
    result = run_with_disk(SEGMENTS, f"{2 * RANK_BYTES - 4096}", REFUSED)
    assert result.stdout.startswith(
        "this machine: /dev/shm has 133 of 133 MiB free, but the ranks' collectives need 134 MiB. Enlarge it"
    )
    assert "docker run --shm-size=1g" in result.stdout, result.stderr


@pytest.mark.slow
def test_full_shared_memory_is_reported_first_when_ranks_die_of_it(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    result = run_with_disk(SEGMENTS, "160m", LAUNCHED, str(tmp_path))
    kind, _, text = result.stdout.partition("|")
    assert kind == "DiskFull", result.stdout + result.stderr
    assert f"{SEGMENTS} on " in text.partition("\n")[0]
    assert "is full (0 of 160 MiB free). Enlarge it" in text.partition("\n")[0]
