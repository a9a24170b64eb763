"""Measure the memory and CPU time of making token shards of texts from 0.1 to 4 GB.

    python -m benchmarks.text_memory [--gigabytes 0.1 1 4] [--spiece FILE.model] [--remove] [--processes 2]

The texts are sentences from the docstrings of installed packages, in random order, in passages of 100 words. From 40 MB
on, sentences repeat, but not passages. With --remove, near-duplicates are looked for and removed, too. The peaks are
those of the main process and of the largest worker.
"""

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.measured_result import Figure, add_into, measured_here
from benchmarks.tokenise import docstrings, joined, tokenizer_folder

PASSAGE_WORDS = 100
PROGRAM = """
import os, re, sys, threading, time
from pathlib import Path
from t5train.data.corpus import build_corpus
from t5train.data.shards import build_shards
from t5train.records.stage_records import TokenizerFiles
from t5train.spec import CorpusSpec, ShardsSpec
text, tokenizer, out = sys.argv[1:]
# A process's ru_maxrss begins with the memory of the process that started it, so the kernel's own mark is read.
def peak(process):
    try:
        return int(re.search(r"VmHWM:\\s+(\\d+)", Path(f"/proc/{process}/status").read_text())[1]) << 10
    except (OSError, TypeError):  # it has just ended
        return 0
peaks = [0]
def watch():
    while True:
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        peaks[0] = max(peaks[0], *map(peak, children), 0)
        time.sleep(0.1)
threading.Thread(target=watch, daemon=True).start()
spec = CorpusSpec(source=text, workers=PROCESSES, remove=REMOVE)
corpus = build_corpus(spec, Path(out))
shards = build_shards(ShardsSpec(workers=PROCESSES), spec, corpus, TokenizerFiles.load(Path(tokenizer)), Path(out))
spent = os.times()
print(peak("self"), peaks[0], sum(spent[:4]), shards.counts["train_tokens"])
"""


def write_text(path: Path, sentences: list[str], size_bytes: int) -> int:
    """Write passages of random sentences, and return their bytes."""
    generator, written, number = random.Random(0), 0, 0
    with path.open("w", encoding="utf-8") as file:
        while written < size_bytes:
            words = list[str]()
            while len(words) < PASSAGE_WORDS:
                words += generator.choice(sentences).split()
            text = " ".join(words[:PASSAGE_WORDS])
            file.write(json.dumps({"id": str(number), "text": text}, ensure_ascii=False) + "\n")
            written += len(text.encode())
            number += 1
    return written


def main() -> None:
    """Print one row for each size."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--gigabytes", type=float, nargs="+", default=[0.1, 1, 4])
    arguments.add_argument("--spiece", type=Path)
    arguments.add_argument("--remove", action="store_true")
    arguments.add_argument("--processes", type=int, default=2)
    add_into(arguments)
    given = arguments.parse_args()
    remove = ("near_duplicates",) if given.remove else ()
    code = PROGRAM.replace("PROCESSES", str(given.processes)).replace("REMOVE", repr(remove))
    rows = list[dict[str, Figure]]()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        sentences = [each for text in docstrings() for each in re.split(r"(?<=[.!?])\s+|\n\n", text) if each.strip()]
        tokenizer = tokenizer_folder(joined(iter(sentences), root), given.spiece, root)
        for gigabytes in given.gigabytes:
            size = write_text(root / "text.jsonl", sentences, int(gigabytes * 1e9))
            with tempfile.TemporaryDirectory(dir=root) as out:
                command = [sys.executable, "-W", "ignore", "-c", code, str(root / "text.jsonl"), str(tokenizer), out]
                done = subprocess.run(command, env=os.environ, check=True, stdout=subprocess.PIPE, text=True)
            main_peak, worker_peak, spent, tokens = map(float, done.stdout.split())
            rows.append(
                {
                    "text, GB": round(size / 1e9, 2),
                    "main process, peak MB": round(main_peak / 1e6),
                    "largest worker, peak MB": round(worker_peak / 1e6),
                    "CPU seconds": round(spent, 1),
                    "MB per CPU second": round(size / 1e6 / spent, 1),
                    "million tokens": round(tokens / 1e6, 1),
                }
            )
            print(rows[-1], flush=True)
    notes = f"{given.processes} processes{', near-duplicates removed' if given.remove else ''}."
    measured_here("Memory of tokenising, by the size of the text", rows, notes).show(given.into)


if __name__ == "__main__":
    main()
