"""Compare the search for near-duplicates with datatrove's MinHash: what is found, CPU time and memory.

    python -m benchmarks.duplicates [--text FILE.jsonl] [--megabytes 40] [--rounds 3] [--datatrove FOLDER]

The text is cut into passages of 100 words; by default, it is the docstrings of installed packages. Every tenth passage
is planted once more at the end, with a share of its words replaced: 0, 1, 2, 5, 10 or 20 percent. The recall is the
share of planted passages that are removed, or their originals, and the precision is the share of these among all that
are removed. Passages that resemble each other without having been planted would lower it for all programs, so they are
left out first: a passage shares at most half of its runs of five words with the passages before it.

All programs run with one worker. CPU time includes reading the text; that of t5train also looking for copies, and
storing what stays. The time for a small part of the text is subtracted, which leaves out the start of processes.
--datatrove names a folder with datatrove, nltk, spacy and what they need (``pip install --target``), if they are not
installed.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from benchmarks.measured_result import Figure, add_into, measured_here
from benchmarks.tokenise import docstrings

PASSAGE_WORDS, RUN_WORDS = 100, 5
SHARES = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2)
START = "import pathlib, sys; text, out = map(pathlib.Path, sys.argv[1:])\n"
OURS = """
import json
from t5train.data.corpus import build_corpus
from t5train.data.segments import passages_in, read_segments
from t5train.spec import CorpusSpec
corpus = build_corpus(CorpusSpec(source=str(text), workers=1, remove=KINDS, split=(998, 1, 1)), out)
files = read_segments(corpus.path)
kept = [each.id for each in passages_in((file.source, segment) for file in files for segment in file.segments)]
(out / "kept.json").write_text(json.dumps(kept))
"""
DATATROVE = """
import json
from datatrove.executor.local import LocalPipelineExecutor
from datatrove.pipeline.dedup import MinhashDedupSignature
from datatrove.pipeline.dedup.minhash import (
    MinhashConfig, MinhashDedupBuckets, MinhashDedupCluster, MinhashDedupFilter,
)
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.writers import JsonlWriter
from datatrove.utils.typeshelper import Languages
config = MinhashConfig()
def run(tasks, *steps):
    LocalPipelineExecutor(list(steps), tasks=tasks, workers=1, logging_dir=str(out / f"logs-{run.number}")).run()
    run.number += 1
run.number = 0
read = lambda: JsonlReader(str(text.parent), glob_pattern=text.name)
folder = lambda name: str(out / name)
run(1, read(), MinhashDedupSignature(folder("signatures"), config, language=Languages.english))
run(config.num_buckets, MinhashDedupBuckets(folder("signatures"), folder("buckets"), config=config))
run(1, MinhashDedupCluster(folder("buckets"), folder("remove"), config=config))
run(1, read(), MinhashDedupFilter(folder("remove")), JsonlWriter(folder("kept"), compression=None))
kept = [json.loads(line)["id"] for path in sorted((out / "kept").glob("*.jsonl")) for line in path.open()]
(out / "kept.json").write_text(json.dumps(kept))
"""
PROGRAMS = {
    "t5train, near_duplicates": OURS.replace("KINDS", "('near_duplicates',)"),
    "t5train, all three kinds": OURS.replace("KINDS", "('duplicates', 'near_duplicates', 'contaminated')"),
    "datatrove, MinHash": DATATROVE,
}


class Run(NamedTuple):
    """One run of a program."""

    cpu_seconds: float
    peak_bytes: int
    """Of the largest process."""
    kept: set[str]


class Planted(NamedTuple):
    """A text with planted near-duplicates."""

    path: Path
    text_bytes: int
    by_share: dict[float, list[str]]
    """The ids of planted passages, by the share of their words that was replaced."""


def main() -> None:
    """Run the programs in turns, and print what they found and took."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--text", type=Path)
    arguments.add_argument("--megabytes", type=float, default=40)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--datatrove", type=Path, default=None)
    add_into(arguments)
    given = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        texts = (json.loads(line)["text"] for line in given.text.open()) if given.text else docstrings()
        planted = plant(passages(texts, int(given.megabytes * 1e6)), Path(folder) / "text.jsonl")
        little = Path(folder) / "little.jsonl"
        little_bytes = first_lines(planted.path, little)
        runs = dict[str, list[Run]]({name: [] for name in PROGRAMS})
        for _ in range(given.rounds):
            for name in PROGRAMS:
                start, whole = (run(name, text, given.datatrove) for text in (little, planted.path))
                if start is not None and whole is not None:
                    runs[name].append(whole._replace(cpu_seconds=whole.cpu_seconds - start.cpu_seconds))
        megabytes = (planted.text_bytes - little_bytes) / 1e6
        notes = f"{megabytes:.1f} MB; one worker each. Every tenth passage of 100 words was planted once more."
        what = "Finding near-duplicates, next to datatrove's MinHash"
        measured_here(what, compared(planted, megabytes, runs), notes).show(given.into)


def passages(texts: Iterator[str], limit_bytes: int) -> list[str]:
    """Return passages that do not resemble each other, up to ``limit_bytes`` of text."""
    seen, found, size = set[int](), list[str](), 0
    words = (word for text in texts for word in text.split())
    while size < limit_bytes and (taken := list(islice(words, PASSAGE_WORDS))):
        lower = [word.lower() for word in taken]
        runs = {hash(tuple(lower[at : at + RUN_WORDS])) for at in range(len(lower) - RUN_WORDS + 1)}
        if 2 * len(runs & seen) <= len(runs):
            seen |= runs
            found.append(" ".join(taken))
            size += len(found[-1].encode())
    return found


def plant(texts: list[str], path: Path) -> Planted:
    """Write texts, and every tenth once more with some words replaced."""
    generator, by_share, lines = random.Random(0), dict[float, list[str]](), list[str]()
    lines = [json.dumps({"id": str(number), "text": text}) for number, text in enumerate(texts)]
    for number, text in enumerate(texts[::10]):
        share = SHARES[number % len(SHARES)]
        words = [f"other{generator.randrange(10**9)}" if generator.random() < share else each for each in text.split()]
        by_share.setdefault(share, []).append(f"planted-{number}")
        lines.append(json.dumps({"id": f"planted-{number}", "text": " ".join(words)}))
    path.write_text("\n".join(lines) + "\n")
    return Planted(path, sum(len(json.loads(line)["text"].encode()) for line in lines), by_share)


def first_lines(text: Path, path: Path, lines: int = 2000) -> int:
    """Write the beginning of a text to another file, and return its bytes of text."""
    with text.open() as file:
        taken = list(islice(file, lines))
    path.write_text("".join(taken))
    return sum(len(json.loads(line)["text"].encode()) for line in taken)


def run(name: str, text: Path, datatrove: Path | None) -> Run | None:
    """Run a program; None if datatrove is not installed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if datatrove is not None:
        environment["PYTHONPATH"] = os.pathsep.join([environment.get("PYTHONPATH", ""), str(datatrove)])
    with tempfile.TemporaryDirectory() as out:
        measured = Path(out) / "time"
        command = ["/usr/bin/env", "python3", "-c", _MEASURE, str(measured), sys.executable, "-W", "ignore", "-c"]
        done = subprocess.run(
            [*command, START + PROGRAMS[name], str(text), out],
            env=environment, check=False, capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode:
            print(f"{name}: {done.stderr.strip().splitlines()[-1]}")
            return None
        seconds, kilobytes = measured.read_text().split()
        return Run(float(seconds), int(kilobytes) << 10, set(json.loads((Path(out) / "kept.json").read_text())))


_MEASURE = """
import pathlib, resource, subprocess, sys
done = subprocess.run(sys.argv[2:])
used = resource.getrusage(resource.RUSAGE_CHILDREN)
pathlib.Path(sys.argv[1]).write_text(f"{used.ru_utime + used.ru_stime} {used.ru_maxrss}")
sys.exit(done.returncode)
"""


def compared(planted: Planted, megabytes: float, runs: dict[str, list[Run]]) -> list[dict[str, Figure]]:
    """Return speed, memory, precision and recall of each program that ran."""
    every = {each for ids in planted.by_share.values() for each in ids}
    with planted.path.open() as file:
        ids = {json.loads(line)["id"] for line in file}
    rows = list[dict[str, Figure]]()
    for name, of_program in runs.items():
        if not of_program:
            continue
        removed = ids - of_program[0].kept
        originals = removed & {each for each in ids - every if int(each) % 10 == 0}
        recalls: dict[str, Figure] = {}
        for share in SHARES:
            found = [is_found(each, removed) for each in planted.by_share[share]]
            recalls[f"found with {share:.0%} of words replaced"] = round(sum(found) / len(found), 3)
        rows.append(
            {
                "program": name,
                "MB per CPU second": round(megabytes / statistics.median(each.cpu_seconds for each in of_program), 2),
                "peak memory, MB": round(max(each.peak_bytes for each in of_program) / 1e6),
                "precision": round(len((removed & every) | originals) / max(1, len(removed)), 3),
                **recalls,
            }
        )
    return rows


def is_found(planted: str, removed: set[str]) -> bool:
    """Whether a planted passage was removed, or its original: that is removed if the planted one is held out."""
    return planted in removed or str(10 * int(planted.removeprefix("planted-"))) in removed


if __name__ == "__main__":
    main()
