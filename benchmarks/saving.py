"""Measure how long a rank takes for a save, ours and plain torch.save, and how long ours lets it wait.

    python -m benchmarks.saving [--gigabytes 1] [--rounds 5] [--folder FOLDER]

The state is that of a ZeRO rank: flat masters and two moments, in fp32, on its accelerator. Both ways write, sync and
hash the same archive. In ours, torch leaves out the checksums, and they are filled in afterwards; training waits only
until the state is copied to host memory. They take turns; the output shows the median time of each, and the median of
the rounds' ratios.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from deepspeed.accelerator import get_accelerator

from benchmarks.measured_result import Figure, add_into, measured_here
from t5train.checkpoint.archive_writing import fill_in, no_checksums
from t5train.checkpoint.host_copies import copied
from t5train.records.digests import digest_files

State = dict[str, torch.Tensor]
PROGRAMS = (
    "torch.save",
    "t5-pretrain: without torch's checksums, then filled in",
    "t5-pretrain: until training goes on",
)


def main() -> None:
    """Measure both in turns, and print the medians."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--gigabytes", type=float, default=1.0)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--folder", type=Path, help="on the disk that checkpoints go to")
    add_into(arguments)
    given = arguments.parse_args()
    device = get_accelerator().current_device_name()
    names, elements = ("masters", "exp_avg", "exp_avg_sq"), int(given.gigabytes * 1e9 / 12)
    state = {name: torch.randn(elements, device=device) for name in names}
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        path = Path(folder) / "state.pt"
        rounds = [
            (timed(theirs, state, path), timed(ours, state, path), seconds_to_copy(state)) for _ in range(given.rounds)
        ]
    rows: list[dict[str, Figure]] = [
        {"program": name, "seconds": round(seconds, 2), "GB/s": round(given.gigabytes / seconds, 2)}
        for name, seconds in zip(PROGRAMS, map(statistics.median, zip(*rounds, strict=True)), strict=True)
    ]
    ratio = statistics.median(mine / peer for peer, mine, _ in rounds)
    notes = f"{given.gigabytes:g} GB, {given.rounds} rounds; ours takes {ratio:.2f} of torch.save's time."
    what = "Saving the state of a rank until it is on disk and hashed, next to torch.save"
    measured_here(what, rows, notes).show(given.into)


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


def seconds_to_copy(state: State) -> float:
    """Return the seconds until the state may change again."""
    started = time.perf_counter()
    copied(state)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
