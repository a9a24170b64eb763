"""Damage small checkpoints of every layout at random, and count what consolidation detects.

    python -m tests.acceptance.corruptions [--trials 10000] [--without-sidecars 2000] [--seed 0]

With sidecars, every fault must be refused before anything is unpickled (torch.load and pickle are replaced by a trap).
The error must name the damaged file, and nothing may be written. Otherwise the command fails. Without sidecars, the
command counts which check noticed each fault, how often the result was right anyway (the fault was in bytes that hold
no weight), and how often it was wrong. The seed decides the damage.
"""

import argparse
import itertools
import logging
import pickle
import random
import re
import shutil
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch
from safetensors.torch import load_file

from t5train.checkpoint.consolidate import consolidate
from t5train.errors import T5TrainError
from tests.acceptance.checkpoint_faults import FAULTS, SIDECAR_FAULTS, Checkpoint, Files, unpickling_marker
from tests.support.checkpoints.deepspeed_files import Layout, Written
from tests.support.checkpoints.pipeline_files import Pipeline, write_pipeline
from tests.support.checkpoints.sidecar_files import write

GROUPS = [[(5, 3), (7,)], [(4,), (2, 2)]]
LAYOUTS = {
    "ZeRO 0, fp32": Layout(GROUPS, stage=0, precision=torch.float32, ties=1),
    "ZeRO 0, bf16": Layout(GROUPS[:1], stage=0),
    "ZeRO 1, fp16": Layout(GROUPS, stage=1, precision=torch.float16, alignment=8, ranks=3),
    "ZeRO 1, BF16_Optimizer": Layout(GROUPS, stage=1, keep_padding=True),
    "ZeRO 2": Layout(GROUPS, stage=2, ranks=4, frozen=[(3,)], ties=1, buffers=1),
    "ZeRO 3": Layout(GROUPS, stage=3, ranks=3, group_elements=12, frozen=[(3, 2)], ties=1, buffers=1),
    "pipeline, ZeRO 1": Pipeline([[[(3, 2)]], [[(2,), (4,)]], [[(7, 2)]]], Layout((), stage=1)),
    "experts, ZeRO 0": Layout(GROUPS[:1], stage=0, experts=[(4, 2)]),
    "experts, ZeRO 2": Layout(GROUPS, stage=2, ranks=4, experts=[(4, 2), (4, 4)], group_elements=20),
}


class Unpickled(BaseException):
    """Something was unpickled that should have been refused first."""


@contextmanager
def damaged(checkpoint: Checkpoint, files: Files) -> Iterator[None]:
    """Put a fault into the checkpoint, and undo it when the context ends."""
    try:
        for name, content in files.items():
            path = checkpoint.tag / name
            path.unlink(missing_ok=True) if content is None else path.write_bytes(content)
        yield
    finally:
        for name in files:
            (checkpoint.tag / name).unlink(missing_ok=True)
            if name in checkpoint.files:
                (checkpoint.tag / name).write_bytes(checkpoint.files[name])


@contextmanager
def no_unpickling() -> Iterator[None]:
    """Make every attempt to unpickle raise Unpickled, which nothing catches."""

    def trap(*_arguments: object, **_keywords: object) -> None:
        raise Unpickled

    with ExitStack() as stack:
        stack.enter_context(patch.object(torch, "load", trap))
        for name in ("load", "loads", "Unpickler", "_Unpickler"):
            stack.enter_context(patch.object(pickle, name, trap))
        yield


def refusal(checkpoint: Checkpoint, out: Path) -> str | None:
    """The error that consolidation raises, or None. Raises AssertionError if a refusal leaves files."""
    before = sorted(out.parent.iterdir())
    try:
        consolidate(checkpoint.tag, out)
    except T5TrainError as error:
        if sorted(out.parent.iterdir()) != before or unpickling_marker(checkpoint).exists():
            raise AssertionError(
                f"consolidation was refused but left files or ran a hostile pickle: {error}"
            ) from error
        return str(error)
    return None


def make_checkpoint(folder: Path, layout: Layout | Pipeline, *, sidecars: bool) -> Checkpoint:
    """Write a checkpoint, and another of the same run a step later, whose files serve as stale ones."""
    written = _write(folder / "checkpoint", layout, 0, sidecars=sidecars)
    later = _write(folder / "later", layout, 1, sidecars=sidecars)
    contents = [{path.name: path.read_bytes() for path in tag.iterdir()} for tag in (written.tag, later.tag)]
    return Checkpoint(written.tag, contents[0], written.expected, contents[1])


def _checkpoints(folder: Path, *, sidecars: bool) -> dict[str, Checkpoint]:
    return {
        name: make_checkpoint(folder / str(index), layout, sidecars=sidecars)
        for index, (name, layout) in enumerate(LAYOUTS.items())
    }


def _write(folder: Path, layout: Layout | Pipeline, steps: int, *, sidecars: bool) -> Written:
    if isinstance(layout, Pipeline):
        return write_pipeline(folder, replace(layout, layout=_later(layout.layout, steps)), sidecars=sidecars)
    return write(folder, _later(layout, steps), sidecars=sidecars)


def _later(layout: Layout, steps: int) -> Layout:
    return replace(layout, step=layout.step + steps, seed=layout.seed + steps)


Table = dict[str, dict[str, Counter[str]]]
"""Results of the trials: counts by kind of fault, then by layout (or by the check that noticed the fault)."""


def with_sidecars(folder: Path, trials: int, seed: int) -> Table:
    """Count faults with sidecars: tried, refused before any unpickling, and with the damaged file named."""
    checkpoints = _checkpoints(folder, sidecars=True)
    for checkpoint in checkpoints.values():
        require_intact(checkpoint, folder)
    table: Table = defaultdict(lambda: defaultdict(Counter))
    for kind, layout, files in _faults(checkpoints, list(FAULTS), trials, seed):
        with damaged(checkpoints[layout], files), no_unpickling():
            message = refusal(checkpoints[layout], folder / "out" / "weights")
        table[kind][layout] += Counter(
            tried=1,
            refused=message is not None,
            named=message is not None and any(name in message for name in files),
        )
    return table


def require_intact(checkpoint: Checkpoint, folder: Path) -> None:
    """Require that the undamaged checkpoint is consolidated, and that the trap works.

    Otherwise trials prove nothing.
    """
    (folder / "out").mkdir(exist_ok=True)
    assert outcome(checkpoint, folder / "out") == "right"
    with no_unpickling():
        try:
            refusal(checkpoint, folder / "out" / "weights")
        except Unpickled:
            return
    raise AssertionError("consolidation of an intact checkpoint did not trigger the unpickling trap")


def without_sidecars(folder: Path, trials: int, seed: int) -> Table:
    """Count faults without sidecars: which check noticed each, or whether the result was right anyway."""
    checkpoints = _checkpoints(folder, sidecars=False)
    (folder / "out").mkdir()
    table: Table = defaultdict(lambda: defaultdict(Counter))
    kinds = [kind for kind in FAULTS if kind not in SIDECAR_FAULTS]
    for kind, layout, files in _faults(checkpoints, kinds, trials, seed):
        with damaged(checkpoints[layout], files):
            found = outcome(checkpoints[layout], folder / "out")
        table[kind]["tried"]["tried"] += 1
        table[kind][found][layout] += 1
    return table


def _faults(
    checkpoints: Mapping[str, Checkpoint], kinds: Sequence[str], trials: int, seed: int
) -> Iterator[tuple[str, str, Files]]:
    """Yield the kind, layout and changed files of each trial.

    Each kind is tried with each layout that has such files.
    """
    pairs = [(kind, layout) for kind in kinds for layout in checkpoints]
    tried = 0
    for number, (kind, layout) in enumerate(itertools.cycle(pairs)):
        if tried == trials:
            return
        files = FAULTS[kind](checkpoints[layout], random.Random(f"{seed} {number}"))
        if files:
            tried += 1
            yield kind, layout, files


DETECTED_BY = {
    "name in the archive": r"was written under the name",
    "low-precision copy": r"rounded to",
    "CRC-32": r"CRC-32",
    "unreadable archive": r"truncated|damaged|cannot be read|not a torch checkpoint",
    "code in the pickle": r"is not loaded",
    "files disagree": r"differ in|different (positions|numbers)|was renamed|another checkpoint|is of step",
    "files missing or extra": r"lacks|missing|too many|is not supported|holds no checkpoint",
}


def outcome(checkpoint: Checkpoint, out: Path) -> str:
    """Return the check that noticed a fault; if none did, "right" or "wrong", depending on the result."""
    message = refusal(checkpoint, out / "weights")
    if message is not None:
        return next((what for what, pattern in DETECTED_BY.items() if re.search(pattern, message)), "another check")
    found = load_file(out / "weights" / "model.safetensors")
    shutil.rmtree(out / "weights")
    same = found.keys() == checkpoint.expected.keys() and all(
        torch.equal(found[name], tensor) for name, tensor in checkpoint.expected.items()
    )
    return "right" if same else "wrong"


def main() -> None:
    """Run the trials and print both tables; exit with 1 if a fault with sidecars was not refused and named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=10_000, help="faults in checkpoints with sidecars")
    parser.add_argument("--without-sidecars", type=int, default=2_000, help="faults in checkpoints without sidecars")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as scratch:
        table_with = with_sidecars(Path(scratch) / "ours", arguments.trials, arguments.seed)
        table_without = without_sidecars(Path(scratch) / "theirs", arguments.without_sidecars, arguments.seed)
    print(f"With sidecars, seed {arguments.seed}: tried / refused before unpickling / file named\n")
    cells = {kind: {name: cell(count) for name, count in row.items()} for kind, row in table_with.items()}
    print(rows(list(LAYOUTS), cells))
    total: Counter[str] = sum((count for row in table_with.values() for count in row.values()), Counter())
    print(f"\ntotal {cell(total)}\n\nWithout sidecars, seed {arguments.seed}: which check detected the fault\n")
    columns = ["tried", *DETECTED_BY, "another check", "right", "wrong"]
    print(rows(columns, {kind: {k: str(c.total()) for k, c in row.items()} for kind, row in table_without.items()}))
    for kind, row in table_without.items():
        if row["wrong"]:
            print(f"wrong: {kind}: {dict(row['wrong'])}")
    sys.exit(len(set(total.values())) > 1)


def cell(count: Counter[str]) -> str:
    return f"{count['tried']}/{count['refused']}/{count['named']}"


def rows(columns: list[str], table: Mapping[str, Mapping[str, str]]) -> str:
    lines = [f"| fault | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    lines += [f"| {kind} | {' | '.join(row.get(column, '') for column in columns)} |" for kind, row in table.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
