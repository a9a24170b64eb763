"""Measure how long a resumed run takes from the command to its first step, and what every process does meanwhile.

::

    python -m benchmarks.resumed_start base --root DIR [--ranks N] [--set tokenizer.vocab_size=8000] [--repeats 2]
        [--log] [--stacks 0.2] [--into benchmarks/results/NAME.json]

Makes token shards of Python's documentation, or of the text in --set corpus.source, trains until the second step, ends
the run with SIGTERM, which saves a checkpoint, and starts the same command again. The first start is shown beside the
others: it compiles, and reads no checkpoint. Ranks train on the recipe's accelerator.

Phases end when: the head has imported its commands and checked the run, and starts the launcher (``head``); the guard
of rank 0 has started (``launcher``); rank 0 runs its first line (``guard``); it has imported torch and DeepSpeed
(``imports``); its engine has the state of the checkpoint (``engine``); its first step is taken (``first step``).

With --log, the lines of rank 0's log follow, with the seconds since the command. With --stacks, one more start is not
timed, but rank 0 writes its main thread's stack every so many seconds: the table shows the functions in which most time
is spent, with what they call.
"""

import argparse
import json
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import psutil

from benchmarks.measured_result import Figure, add_into, measured_here
from flows.spec_from_recipe import resolve
from infra.node.attempts import attempt
from infra.node.attempts.process_guard import MODULE
from infra.node.processes import ProcessIdentity
from t5train.data.corpus import build_corpus
from t5train.data.shards import build_shards
from t5train.data.vocabulary.tokenizer import build_tokenizer
from t5train.files import heartbeat
from t5train.files.run_folder import ATTEMPTS
from t5train.spec import RunSpec

NAME = "resumed-start"
PHASES = ("head", "launcher", "guard", "imports", "engine", "first step")
_LOOK_SECONDS = 0.02
_SHOWN_FUNCTIONS = 70
_RANK_0 = attempt.rank_name(0)
_FRAME = re.compile(r'  File "(?P<path>.+)", line \d+ in (?P<function>.+)')


class Start(NamedTuple):
    """One start of the command. Times are seconds since it."""

    phases: Mapping[str, float]
    """When each phase ended."""
    processes: Mapping[tuple[int, str], tuple[float, float]]
    """By pid and command: when it started, and its CPU seconds until the first step."""
    lines: list[tuple[float, str]]
    """The lines of rank 0's log."""


class _Watch:
    """Watches the processes of a start until its first step is taken."""

    def __init__(self, argv: list[str], run: Path, log: Path) -> None:
        self._attempts, self._before, self._log = run / ATTEMPTS, _attempts_in(run / ATTEMPTS), log
        with open(log, "ab") as output:
            self._started, self._clock = time.time(), time.monotonic()
            self.head = psutil.Popen(argv, stdout=output, stderr=subprocess.STDOUT)
        self._processes: dict[tuple[int, str], tuple[float, float]] = {}
        self._lines: list[tuple[float, str]] = []
        self._beats: dict[tuple[str, int], float] = {}
        self._read_bytes = 0

    @property
    def folder(self) -> Path | None:
        """The folder of the attempt, once there is one."""
        new = _attempts_in(self._attempts) - self._before
        return self._attempts / new.pop() if new else None

    def until_first_step(self, meanwhile: Callable[[Path], None] = lambda _folder: None) -> Start:
        """Wait; ``meanwhile`` is called with the attempt's folder again and again from rank 0's first line on."""
        while not self._is_done():
            if self.head.poll() is not None:
                raise SystemExit(f"the run ended before its first step: {self._log.read_text('utf-8')[-2000:]}")
            time.sleep(_LOOK_SECONDS)
            folder = self.folder
            self._see_processes()
            if folder is not None:
                self._see_log(folder / f"{_RANK_0}.log")
                if (beat := heartbeat.read(heartbeat.beat_file(folder / _RANK_0))) is not None:
                    self._beats.setdefault((beat.phase, beat.step), beat.since - self._clock)
                    meanwhile(folder)
        return Start(self._phases(), self._processes, self._lines)

    def end(self) -> None:
        """End the run as a user does, which saves a checkpoint."""
        if self.head.poll() is None:
            self.head.send_signal(signal.SIGTERM)
            self.head.wait()

    def _is_done(self) -> bool:
        return len({step for _, step in self._beats if step}) > 1

    def _see_processes(self) -> None:
        for each in (self.head, *self.head.children(recursive=True)):
            try:
                key, used = (each.pid, " ".join(each.cmdline())), each.cpu_times()
                self._processes[key] = (each.create_time() - self._started, used.user + used.system)
            except psutil.Error:
                continue

    def _see_log(self, log: Path) -> None:
        if not log.exists():
            return
        with open(log, "rb") as file:
            file.seek(self._read_bytes)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._read_bytes += len(whole + newline)
        at = time.monotonic() - self._clock
        self._lines += [(at, line) for line in whole.decode(errors="replace").splitlines()]

    def _phases(self) -> dict[str, float]:
        beats = sorted(self._beats.items(), key=lambda beat: beat[1])
        first = next(step for (_, step), _ in beats if step)
        ends = {
            "head": self._first_of("--launcher"),
            "launcher": self._first_of(f"-m {MODULE} {self.folder}"),
            "guard": next(at for (phase, _), at in beats if phase == "start"),
            "imports": next(at for (phase, step), at in beats if phase == "compile" and not step),
            "engine": next(at for (_, step), at in beats if step == first),
            "first step": next(at for (_, step), at in beats if step > first),
        }
        return {phase: round(ends[phase], 2) for phase in PHASES}

    def _first_of(self, part: str) -> float:
        return min(at for (_, command), (at, _) in self._processes.items() if part in command)


def _attempts_in(folder: Path) -> set[str]:
    return {each.name for each in folder.iterdir()} if folder.exists() else set()


def main() -> None:
    """Make the shards, start the run again and again, and print what was seen."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("recipe")
    made.add_argument("--root", type=Path, required=True, help="folder for the run")
    made.add_argument("--ranks", type=int, help="the recipe's if left out")
    made.add_argument("--set", action="append", default=[], metavar="PART.KEY=VALUE", help="setting to change")
    made.add_argument("--repeats", type=int, default=2, help="resumed starts; 2 by default")
    made.add_argument("--log", action="store_true", help="show rank 0's log with times")
    made.add_argument("--stacks", type=float, metavar="SECONDS", help="interval between stacks of one more start")
    add_into(made)
    given = made.parse_args()
    root = given.root.absolute()
    settings = {"corpus.source": "pydocs", **dict(change.split("=", 1) for change in given.set)}
    if given.ranks is not None:
        settings["cluster.ranks"] = str(given.ranks)
    spec = resolve(given.recipe, settings, root=root, run_name=NAME)
    argv = [sys.executable, "-m", "flows.cli.__main__", "train", given.recipe, "--root", str(root), "--name", NAME]
    argv += ["--shards", str(_shards(spec))]
    argv += [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    starts = [_start(argv, spec, root / "start.log") for _ in range(1 + given.repeats)]
    _show_processes(starts[-1])
    if given.log:
        print("".join(f"{at:7.2f}  {line}\n" for at, line in starts[-1].lines))
    if given.stacks:
        _show_stacks(argv, spec, root / "start.log", given.stacks)
    measured_here(f"From the command to the first step of a resumed run of {given.recipe}", _rows(starts)).show(
        given.into
    )


def _shards(spec: RunSpec) -> Path:
    root = spec.storage.root
    corpus = build_corpus(spec.corpus, root)
    tokenizer = build_tokenizer(spec.tokenizer, spec.corpus, corpus, root)
    return build_shards(spec.shards, spec.corpus, corpus, tokenizer, root).path


def _start(argv: list[str], spec: RunSpec, log: Path) -> Start:
    watch = _Watch(argv, spec.run_folder, log)
    try:
        start = watch.until_first_step()
    finally:
        watch.end()
    print(", ".join(f"{phase} {at:.2f}" for phase, at in start.phases.items()), flush=True)
    return start


def _rows(starts: list[Start]) -> list[dict[str, Figure]]:
    names = ["first start", *(f"resumed {number}" for number in range(1, len(starts)))]
    rows: list[dict[str, Figure]] = []
    for before, phase in zip((None, *PHASES), PHASES, strict=False):
        took = [start.phases[phase] - (start.phases[before] if before else 0) for start in starts]
        rows.append({"phase": phase} | {name: round(each, 2) for name, each in zip(names, took, strict=True)})
    whole = {name: start.phases[PHASES[-1]] for name, start in zip(names, starts, strict=True)}
    return [*rows, {"phase": "all"} | whole]


def _show_processes(start: Start) -> None:
    print("\nprocesses of the last start: seconds since the command, CPU seconds, pid, command")
    for (pid, command), (at, used) in sorted(start.processes.items(), key=lambda item: item[1]):
        print(f"{at:7.2f} {used:7.2f}  {pid}  {command[:150]}")
    print(flush=True)


def _show_stacks(argv: list[str], spec: RunSpec, log: Path, seconds: float) -> None:
    """Sample rank 0's stack with the handler that its guard uses for a rank that hangs."""
    asked_at = 0.0

    def ask(folder: Path) -> None:
        nonlocal asked_at
        if time.monotonic() - asked_at > seconds:
            asked_at = time.monotonic()
            recorded = json.loads((folder / f"{_RANK_0}.pid").read_text("utf-8"))
            ProcessIdentity(**recorded["process"]).send(signal.SIGUSR1)

    watch = _Watch(argv, spec.run_folder, log)
    try:
        start = watch.until_first_step(ask)
    finally:
        watch.end()
    print("functions of rank 0's main thread: seconds that they took, with all that they called")
    for function, count in _inclusive(line for _, line in start.lines).most_common(_SHOWN_FUNCTIONS):
        print(f"{count * seconds:7.2f}  {function}")
    print(flush=True)


def _inclusive(lines: Iterable[str]) -> Counter[str]:
    """Return in how many stacks of the main thread each function is."""
    stacks, is_main = list[set[str]](), False
    for line in lines:
        if line.startswith(("Current thread ", "Thread ")):
            is_main = line.startswith("Current ")  # which has the signal, as only the main thread handles signals
            stacks += [set()] if is_main else []
        elif is_main and (frame := _FRAME.match(line)):
            path = re.sub(".*/(site-packages|lib/python[^/]*)/", "", frame["path"])
            stacks[-1].add(f"{path} {frame['function']}")
    return Counter(function for stack in stacks for function in stack)


if __name__ == "__main__":
    main()
