import os
from pathlib import Path

import pytest

from infra import shared_memory


@pytest.fixture(autouse=True)
def segments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(shared_memory, "SEGMENTS", tmp_path)
    return tmp_path


def make(folder: Path, *names: str) -> None:
    for name in names:
        (folder / f"deepspeed_allreduce_buffer_{name}").touch()


def left(folder: Path) -> list[str]:
    return sorted(path.name.removeprefix("deepspeed_allreduce_buffer_") for path in folder.iterdir())


def test_a_rank_loses_its_own_segment_only(segments: Path) -> None:
    user = os.getuid()
    make(segments, *(f"{user}_127.0.0.1_2{port}_{rank}" for port in (10, 100) for rank in (1, 10)))
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "210", "RANK": "1"}
    shared_memory.remove_of_rank(environment)
    shared_memory.remove_of_rank(environment)  # gone already
    assert left(segments) == [f"{user}_127.0.0.1_{place}" for place in ("2100_1", "2100_10", "210_10")]


def test_a_launcher_which_is_no_rank_removes_nothing(segments: Path) -> None:
    make(segments, f"{os.getuid()}_127.0.0.1_210_0")
    shared_memory.remove_of_rank({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "210"})
    assert left(segments)


def test_all_segments_of_a_meeting_place_go_and_no_other(segments: Path) -> None:
    user = os.getuid()
    other = [f"{user}_127.0.0.1_2100_0", f"{user + 1}_127.0.0.1_210_0", f"{user}_10.0.0.1_210_0"]
    make(segments, *other, *(f"{user}_127.0.0.1_210_{rank}" for rank in range(3)))
    shared_memory.remove_all("127.0.0.1", 210)
    assert left(segments) == sorted(other)
