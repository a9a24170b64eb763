"""A sample of ``python -m tests.acceptance.kills.kill_tokenising``."""

from pathlib import Path

import pytest

from tests.acceptance.kills import kill_tokenising as kills


@pytest.mark.slow
def test_tokenising_that_is_killed_gives_the_same_bytes_and_makes_no_shard_twice(tmp_path: Path) -> None:
    outcome = kills.kill_tokenising(tmp_path, kills=3, documents=8000, seed=1)
    assert len(outcome.moments) == 3
    assert not outcome.faults
