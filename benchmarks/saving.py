"""Measure how long a rank waits for a save: ours and plain torch.save, until the file is on disk and hashed.

    python -m benchmarks.saving [--gigabytes 1] [--rounds 5] [--folder FOLDER]

The state is that of a ZeRO rank: flat masters and two moments, in fp32. Both ways write, sync and hash the same
archive. In ours, torch leaves out the checksums, and they are filled in afterwards. The two take turns; the output
shows the median time of each, and the median of the rounds' ratios.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from t5train.checkpoint.archive_writing import fill_in, no_checksums
from t5train.records.digests import digest_files
from tests.support.hardware import hardware

State = dict[str, torch.Tensor]


def main() -> None:
    """Measure both in turns, and print the medians."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--gigabytes", type=float, default=1.0)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--folder", type=Path, help="on the disk that checkpoints go to")
    given = arguments.parse_args()
    state = {name: torch.randn(int(given.gigabytes * 1e9 / 12)) for name in ("masters", "exp_avg", "exp_avg_sq")}
    print(f"{hardware()}; {given.gigabytes:g} GB, {given.rounds} rounds\n")
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        path = Path(folder) / "state.pt"
        rounds = [(timed(theirs, state, path), timed(ours, state, path)) for _ in range(given.rounds)]
    for name, seconds in (("torch.save", [one for one, _ in rounds]), ("ours", [one for _, one in rounds])):
        print(
            f"{name:<12}{statistics.median(seconds):6.2f} s   {given.gigabytes / statistics.median(seconds):5.2f} GB/s"
        )
    print(f"ratio       {statistics.median(mine / peer for peer, mine in rounds):6.2f}")


def theirs(state: State, path: Path) -> None:
    """Save with plain torch.save."""
    torch.save(state, path)


def ours(state: State, path: Path) -> None:
    """Save as t5train.checkpoint.saving does."""
    with no_checksums():
        torch.save(state, path)
    fill_in(path)


def timed(save: Callable[[State, Path], None], state: State, path: Path) -> float:
    """Return the seconds until the archive is on disk and its digest is known."""
    path.unlink(missing_ok=True)
    started = time.perf_counter()
    save(state, path)
    with open(path, "rb") as file:
        os.fsync(file.fileno())
    digest_files(path.parent, [path.name])
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
