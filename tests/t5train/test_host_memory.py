"""What does not fit in memory is refused while nothing has started."""

from pathlib import Path

import pytest

from t5train import host_memory
from t5train.errors import SpecError
from t5train.host_memory import host_memory_bytes, require_host_memory


def test_what_fits_passes() -> None:
    require_host_memory(host_memory_bytes(), "settings")


def test_what_does_not_fit_is_told_with_both_sizes_and_who_decides() -> None:
    with pytest.raises(SpecError, match=r"layout\.offload ask for 1000000\.0 GB .* this machine has [0-9.]+ GB: .*"):
        require_host_memory(10**15, "layout.offload")


@pytest.mark.parametrize(("text", "limit"), [("1048576\n", 1 << 20), ("max\n", None)])
def test_a_control_groups_limit_counts(
    text: str, limit: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "memory.max").write_text(text)
    monkeypatch.setattr(host_memory, "_GROUP_LIMITS", (tmp_path / "memory.max", tmp_path / "absent"))
    assert (host_memory_bytes() == limit) if limit else (host_memory_bytes() > 1 << 20)
