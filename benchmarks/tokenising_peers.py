"""Compare tokenising with its peers, from JSON lines to files of ids: CPU time of all processes, and peak memory.

    python -m benchmarks.tokenising_peers --spiece FILE.model [--megabytes 100] [--rounds 3] [--processes 2]
        [--text FILE.jsonl] [--packages FOLDER] [--megatron FOLDER] [--keep-text FILE.jsonl]

Without --text, the text is what this machine has: docstrings of installed packages, manual pages and the documentation
of Debian's packages, in this order, in passages of 100 words. A line that occurred before is left out. Before anything
is measured, it is said how much each of them gave. --keep-text writes all of it to a file, for --text. Packages such as
python3-doc and linux-doc add text. If there is less than --megabytes, all of it is used, once.

The peers are sentencepiece alone (one process reads, encodes and writes), ``datasets.map`` with Hugging Face's
tokenizer, the DocumentTokenizer of datatrove, and Megatron-LM's tools/preprocess_data.py. All use the same vocabulary,
end each passage with EOS, and keep the order of passages. t5-pretrain also verifies the text, divides it into splits,
and hashes and syncs its files. The last column is the number of tokens, which shows that all do the same work.

Those that are not installed are left out. In a folder of their own:

    pip install --target FOLDER --no-deps datatrove loguru humanize triton
    git clone --depth 1 --branch core_v0.16.0 https://github.com/NVIDIA/Megatron-LM

--packages is this folder, and --megatron the clone, which needs triton. The programs take turns, and each round begins
with another one. Numbers are medians of the rounds. Memory is
looked up every 50 ms: VmHWM of the largest process, and the sum of VmRSS of the processes that run at the same time, in
which memory that they share counts several times.
"""

import argparse
import ctypes
import gzip
import hashlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from html.parser import HTMLParser
from importlib.metadata import distributions, version
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from benchmarks.measured_result import Figure, add_into, measured_here, spread
from benchmarks.tokenise import MAP, PASSAGE_WORDS, PROGRAMS, START, docstrings
from t5train.data.native import segmenter_build
from t5train.data.vocabulary.tokenizer import given_tokenizer

MANUALS, DOCUMENTATION = Path("/usr/share/man"), Path("/usr/share/doc")
_PLAIN = {"", ".txt", ".md", ".rst", ".Debian", ".text"}
_PAUSE_SECONDS = 0.05
_MOST_DOCSTRING_BYTES = 1 << 30
_SUBREAPER = 36
"""PR_SET_CHILD_SUBREAPER of prctl: processes that outlive their parents become children of this one, and count."""
OURS = "t5-pretrain, corpus and shards"
PEERS = {
    OURS: PROGRAMS["t5train, all of its processes"].replace("\nbuild_shards(", "\nmade = build_shards(")
    + "print(sum(made.counts[split + '_tokens'] for split in ('train', 'validation', 'test')))",
    "sentencepiece alone, one process": """
import json, numpy, sentencepiece
encoder = sentencepiece.SentencePieceProcessor(model_file=tokenizer + "/spiece.model")
tokens, batch = 0, []
def encode(batch):
    ids = encoder.encode(batch, return_type="numpy", add_eos=True, num_threads=1)
    file.write(numpy.concatenate(ids).astype("<u2"))
    return sum(map(len, ids))
with open(text, encoding="utf-8") as lines, open(out + "/tokens.bin", "wb") as file:
    for line in lines:
        batch.append(json.loads(line)["text"])
        if len(batch) == 400:
            tokens += encode(batch)
            batch = []
    tokens += encode(batch) if batch else 0
print(tokens)
""",
    "datasets.map, Hugging Face tokenizer": MAP
    + "import pyarrow.compute\n"
    + "print(pyarrow.compute.sum(pyarrow.compute.list_value_length(tokens.data.column('input_ids'))).as_py())",
    "datatrove, DocumentTokenizer": """
import pathlib
from datatrove.executor.local import LocalPipelineExecutor
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.tokens import DocumentTokenizer
from loguru import logger
logger.remove()
steps = [
    JsonlReader(text + ".parts"),
    DocumentTokenizer(out + "/tokens", tokenizer + "/tokenizer.json", out + "/working", eos_token="</s>",
                      shuffle_documents=False),
]
LocalPipelineExecutor(steps, tasks=PROCESSES, workers=PROCESSES, logging_dir=out + "/logs").run()
print(sum(each.stat().st_size for each in pathlib.Path(out, "tokens").glob("*.ds")) // 2)
""",
    "Megatron-LM, preprocess_data": """
import os.path, subprocess
subprocess.run([sys.executable, "-W", "ignore", os.environ["MEGATRON"] + "/tools/preprocess_data.py", "--input", text,
                "--output-prefix", out + "/tokens", "--tokenizer-type", "GPTSentencePieceTokenizer",
                "--tokenizer-model", tokenizer + "/spiece.model", "--append-eod", "--workers", "PROCESSES",
                "--log-interval", "1000000"], check=True, stdout=subprocess.DEVNULL)
print(os.path.getsize(out + "/tokens_text_document.bin") // 2)
""",
}


class Peak(NamedTuple):
    """Peak memory of the processes of a program, in bytes."""

    largest: int
    total: int


class Run(NamedTuple):
    """One run of a program."""

    cpu_seconds: float
    wall_seconds: float
    peak: Peak
    tokens: int


def main() -> None:
    """Collect the text, let the programs take turns, and print the table."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--spiece", type=Path, required=True)
    arguments.add_argument("--text", type=Path)
    arguments.add_argument("--keep-text", type=Path)
    arguments.add_argument("--megabytes", type=float, default=100)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--processes", type=int, default=2)
    arguments.add_argument("--packages", type=Path)
    arguments.add_argument("--megatron", type=Path)
    add_into(arguments)
    given = arguments.parse_args()
    if not segmenter_build.built().exists():
        sys.exit("the segmenter is not compiled: make setup")
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        source = given.text or collected(given.keep_text or root / "collected.jsonl")
        text = root / "text.jsonl"
        text_bytes = first_passages(source, text, int(given.megabytes * 1e6))
        split_lines(text, Path(f"{text}.parts"), given.processes)
        tokenizer = given_tokenizer(given.spiece, root).path
        runs = dict[str, list[Run]]({name: [] for name in PEERS})
        for number in range(given.rounds):
            names = list(PEERS)
            for name in names[number % len(names) :] + names[: number % len(names)]:
                done = run(name, text, tokenizer, given.processes, given.packages, given.megatron)
                runs[name] += [] if done is None else [done]
    notes = f"{versions_of(given.packages, given.megatron)}; {given.processes} processes, start-up included."
    what = f"Tokenising {text_bytes / 1e6:.0f} MB, next to other programs"
    measured_here(what, compared(text_bytes / 1e6, runs), notes).show(given.into)


def collected(path: Path) -> Path:
    """Write all text that this machine has in passages, say what it is, and return the path."""
    seen, number = set[bytes](), 0
    with path.open("w", encoding="utf-8") as file:
        for name, texts in SOURCES.items():
            size = files = 0
            words = list[str]()
            for text in texts():
                new = unrepeated(text, seen)
                files += bool(new)
                words += new
                while len(words) >= PASSAGE_WORDS:
                    passage, words = " ".join(words[:PASSAGE_WORDS]), words[PASSAGE_WORDS:]
                    file.write(json.dumps({"id": str(number), "text": passage}) + "\n")
                    number, size = number + 1, size + len(passage.encode())
            print(f"{name}: {size / 1e6:.1f} MB without repetitions, from {files:,} texts", flush=True)
    return path


def unrepeated(text: str, seen: set[bytes]) -> list[str]:
    """Return the words of the lines that were not seen before."""
    words = list[str]()
    for line in text.splitlines():
        of_line = line.split()
        digest = hashlib.blake2b(" ".join(of_line).encode("utf-8", "replace"), digest_size=8).digest()
        if of_line and digest not in seen:
            seen.add(digest)
            words += of_line
    return words


def manual_pages() -> Iterator[str]:
    """Yield the manual pages of all languages, without their markup."""
    for path in sorted(MANUALS.rglob("*.gz")):
        if path.is_file() and not path.is_symlink():
            yield without_roff(_decoded(gzip.decompress(path.read_bytes())))


def documentation() -> Iterator[str]:
    """Yield the plain text and HTML in the documentation of Debian's packages."""
    for path in sorted(DOCUMENTATION.rglob("*")):
        if path.is_symlink() or not path.is_file():
            continue
        is_packed = path.suffix == ".gz"
        suffix = path.with_suffix("").suffix if is_packed else path.suffix
        if suffix in _PLAIN or suffix in {".html", ".htm"}:
            content = path.read_bytes()
            text = _decoded(gzip.decompress(content) if is_packed else content)
            yield without_tags(text) if suffix.startswith(".htm") else text


SOURCES: Mapping[str, Callable[[], Iterable[str]]] = {
    "docstrings of installed Python packages": partial(docstrings, _MOST_DOCSTRING_BYTES),
    f"manual pages ({MANUALS})": manual_pages,
    f"documentation of Debian's packages ({DOCUMENTATION})": documentation,
}


def without_roff(page: str) -> str:
    """Return the text of a manual page: without requests, escapes and comments."""
    lines = (line for line in page.splitlines() if not line.startswith(("'", '.\\"')))
    kept = (re.sub(r"^\.[A-Za-z]*", "", line) if line.startswith(_TEXT_MACROS) else line for line in lines)
    text = "\n".join(line for line in kept if not line.startswith("."))
    return _ESCAPES.sub("", text).replace("\\-", "-").replace("\\e", "\\")


_OF_TEXT = ("B", "I", "BR", "IR", "RB", "RI", "BI", "IB", "SH", "SS", "IP", "Nm", "Nd")
"""Macros whose arguments are text."""
_TEXT_MACROS = tuple(f".{macro} " for macro in _OF_TEXT)
_ESCAPES = re.compile(r"\\(?:f(?:\(..|\[[^]]*\]|.)|s[-+]?[0-9]|[&|/,c:])")


class _Text(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found = list[str]()
        self._is_code = False

    def handle_starttag(self, tag: str, _attrs: object) -> None:
        self._is_code = tag in {"script", "style"}

    def handle_endtag(self, _tag: str) -> None:
        self._is_code = False  # no other element begins inside of scripts and styles

    def handle_data(self, data: str) -> None:
        if not self._is_code:
            self.found.append(data)


def without_tags(page: str) -> str:
    """Return the text of an HTML page."""
    parser = _Text()
    parser.feed(page)
    return "\n".join(parser.found)


def _decoded(content: bytes) -> str:
    """Return a text in UTF-8, or else in Latin-1; empty if it is no text."""
    if b"\0" in content:
        return ""
    try:
        return content.decode()
    except UnicodeDecodeError:
        return content.decode("latin-1")


def first_passages(source: Path, target: Path, at_least: int) -> int:
    """Copy passages until there are ``at_least`` bytes of text, or all. Returns the bytes, and prints what they are."""
    size = passages = 0
    digest = hashlib.sha256()
    with source.open("rb") as lines, target.open("wb") as file:
        for line in lines:
            file.write(line)
            digest.update(line)
            passages, size = passages + 1, size + len(json.loads(line)["text"].encode())
            if size >= at_least:
                break
    shown = digest.hexdigest()[:12]
    print(f"{source.name}: the first {passages:,} passages, {size / 1e6:.1f} MB of text, sha256 {shown}", flush=True)
    return size


def split_lines(path: Path, folder: Path, parts: int) -> None:
    """Write a file in parts of equal numbers of lines: datatrove needs a file for each process."""
    folder.mkdir()
    with path.open("rb") as lines:
        share = -(-sum(1 for _ in lines) // parts)
        lines.seek(0)
        for part in range(parts):
            (folder / f"{part:05d}.jsonl").write_bytes(b"".join(islice(lines, share)))


def run(
    name: str, text: Path, tokenizer: Path, processes: int, packages: Path | None, megatron: Path | None
) -> Run | None:
    """Run a program; None if it fails, for example because it is not installed."""
    code = START + PEERS[name].replace("PROCESSES", str(processes))
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment |= {"OMP_NUM_THREADS": "1", "MEGATRON": str(megatron and megatron.absolute())}
    if packages is not None and name.startswith(("datatrove", "Megatron")):
        environment["PYTHONPATH"] = os.pathsep.join([environment.get("PYTHONPATH", ""), str(packages.absolute())])
    before, started = os.times(), time.monotonic()
    with (
        tempfile.TemporaryDirectory() as out,
        tempfile.TemporaryFile("w+") as said,
        tempfile.TemporaryFile("w+") as errors,
    ):
        command = [sys.executable, "-W", "ignore", "-c", code, str(text), str(tokenizer), out]
        program = subprocess.Popen(command, env=environment, stdout=said, stderr=errors, cwd=out)
        peak = watched(program)
        _reap_orphans()
        wall, after = time.monotonic() - started, os.times()
        said.seek(0)
        errors.seek(0)
        if program.returncode:
            last = errors.read().strip().splitlines()[-1:]
            print(f"{name}: exit status {program.returncode}. {' '.join(last)}", flush=True)
            return None
        used = after.children_user + after.children_system - before.children_user - before.children_system
        done = Run(used, wall, peak, int(said.read().split()[-1]))
    print(f"{name}: {done.cpu_seconds:.1f} CPU s, {done.wall_seconds:.1f} s", flush=True)
    return done


def watched(program: subprocess.Popen[bytes] | subprocess.Popen[str]) -> Peak:
    """Wait for a program, and return the peak memory of its processes."""
    largest = together = 0
    while program.poll() is None:
        processes = list(_with_descendants(program.pid))
        largest = max([largest, *(memory_of(each, "VmHWM") for each in processes)])
        together = max(together, sum(memory_of(each, "VmRSS") for each in processes))
        time.sleep(_PAUSE_SECONDS)
    return Peak(largest, together)


def memory_of(process: int, kind: str) -> int:
    """Return VmHWM or VmRSS of a process in bytes; 0 if it has ended."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return 0
    found = re.search(rf"^{kind}:\s+([0-9]+) kB", status, re.MULTILINE)
    return int(found[1]) << 10 if found else 0


def _with_descendants(process: int) -> Iterator[int]:
    yield process
    for path in Path(f"/proc/{process}/task").glob("*/children"):
        try:
            children = path.read_text().split()
        except OSError:  # the process or thread has ended
            continue
        for child in map(int, children):
            yield from _with_descendants(child)


def _reap_orphans() -> None:
    """Wait for processes that outlived a program, such as servers that fork workers, so that their time counts."""
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def versions_of(packages: Path | None, megatron: Path | None) -> str:
    """Return the versions of all programs that are installed."""
    found = [f"{name} {version(name)}" for name in ("datasets", "tokenizers", "sentencepiece")]
    if packages is not None:
        found += [f"datatrove {each.version}" for each in distributions(name="datatrove", path=[str(packages)])]
    if megatron is not None:
        facts = (megatron / "megatron/core/package_info.py").read_text("utf-8")
        found.append("Megatron " + ".".join(re.findall(r"^(?:MAJOR|MINOR|PATCH) = ([0-9]+)", facts, re.MULTILINE)))
    return ", ".join(found)


def compared(megabytes: float, runs: Mapping[str, list[Run]]) -> list[dict[str, Figure]]:
    """Return what each program that ran has taken."""
    ours = statistics.median(each.cpu_seconds for each in runs[OURS])
    rows = list[dict[str, Figure]]()
    for name, of_program in runs.items():
        if not of_program:
            continue
        spent = [each.cpu_seconds for each in of_program]
        rows.append(
            {
                "program": name,
                "CPU s": spread(spent, 1),
                "MB per CPU second": round(megabytes / statistics.median(spent), 1),
                "CPU s relative to ours": round(statistics.median(spent) / ours, 2),
                "seconds": round(statistics.median(each.wall_seconds for each in of_program), 1),
                "memory, MB": round(max(each.peak.largest for each in of_program) / 1e6),
                "memory of all processes, MB": round(max(each.peak.total for each in of_program) / 1e6),
                "tokens": of_program[0].tokens,
            }
        )
    return rows


if __name__ == "__main__":
    main()
