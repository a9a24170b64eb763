"""Compare tokenisation, from JSON lines to token files, with ``datasets.map`` and with sentencepiece alone.

    python -m benchmarks.tokenise [--text FILE.jsonl | --docstrings] [--spiece FILE.model] [--megabytes 40]
        [--rounds 3] [--processes 2] [--without-datasets]

Without arguments, the text is Python's documentation in passages of about 100 words, repeated, and the vocabulary is
trained on it. With --docstrings, the text is the docstrings of installed packages in such passages: about 40 MB without
repetitions, in which no cache of words has seen a text before. --without-datasets leaves out the slowest programs.

The programs take turns, each in its own processes. Programs that work "alone" measure their CPU time themselves, after
they have started. Of the others, the CPU time of all processes is measured. Figures
are medians of the rounds. Those without start-up subtract the time of the same program on 20 MB, which leaves out
imports and start-up, but also the part of the text in which most words are new.

``datasets.map`` keeps only ids, the least that a user needs. A T5 trainer needs them in windows, so a variant that cuts
windows is measured, too; ours are cut when they are read. Ours also verifies the text before, and hashes and syncs the
files afterwards.
"""

import argparse
import ast
import json
import os
import re
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from benchmarks.measured_result import Figure, add_into, measured_here
from t5train.data import sources
from t5train.data.corpus import build_corpus
from t5train.data.vocabulary.tokenizer import build_tokenizer, given_tokenizer
from t5train.spec import CorpusSpec, TokenizerSpec

LITTLE_BYTES = 20_000_000  # from here on, t5train records and compares as many held-out passages as it ever does
PASSAGE_WORDS = 100
START = "import os, sys; text, tokenizer, out = sys.argv[1:]\n"
MAP = """
import datasets, transformers
datasets.disable_progress_bars()
transformers.logging.set_verbosity_error()
encode = transformers.AutoTokenizer.from_pretrained(tokenizer)
rows = datasets.load_dataset("json", data_files=text, split="train", cache_dir=out)
tokens = rows.map(lambda batch: {"input_ids": encode(batch["text"]).input_ids}, batched=True, num_proc=PROCESSES,
                  remove_columns=rows.column_names)
"""
WINDOWS = """
def windows(batch):
    ids = [number for each in batch["input_ids"] for number in each]
    return {"input_ids": [ids[at : at + 568] for at in range(0, len(ids) - 567, 568)]}
tokens.map(windows, batched=True, num_proc=PROCESSES)
"""
TEXTS = """
import json
with open(text, encoding="utf-8") as file:
    texts = [json.loads(line)["text"] for line in file]
batches = [texts[first : first + 400] for first in range(0, len(texts), 400)]
"""
SEGMENTER = """
import pathlib
from t5train.data.vocabulary.document_encoder import DocumentEncoder
encoder = DocumentEncoder(pathlib.Path(tokenizer) / "spiece.model")
assert encoder.segmenter is not None, "run make setup"
"""
TIMED = """
started = os.times()
for batch in batches:
    encoder.encode(batch)
ended = os.times()
print(ended.user + ended.system - started.user - started.system)
"""
PROGRAMS = {
    "datasets.map, Hugging Face tokenizer": MAP,
    "the same, then cut into windows of 568": MAP + WINDOWS,
    "sentencepiece alone, no reading or writing": TEXTS
    + """
import functools, sentencepiece
encoder = sentencepiece.SentencePieceProcessor(model_file=tokenizer + "/spiece.model")
encoder.encode = functools.partial(encoder.encode, return_type="numpy", add_eos=True, num_threads=1)
"""
    + TIMED,
    "our encoder alone, no word remembered": TEXTS + SEGMENTER + TIMED,
    "our encoder alone, all words remembered": TEXTS + SEGMENTER + "list(map(encoder.encode, batches))" + TIMED,
    "t5train's work alone, in one process": """
import pathlib
from t5train.data import shard_worker
from t5train.data.passages import SPLITS
from t5train.data.segments import Segment, scan_file
from t5train.records.digests import digest_file
spiece = pathlib.Path(tokenizer) / "spiece.model"
shard_worker._encoder(spiece)
started = os.times()
digest_file(pathlib.Path(text))
scanned = {"path": text, "name": "text.jsonl", "frames": None, "digests": out + "/digests"}
segments = scan_file(scanned, lambda read_bytes: None)["segments"]
everything = Segment(0, sum(each.rows for each in segments), 0, sum(each.text_bytes for each in segments))
shard_worker.write_shard({
    "folder": out, "files": {split: (split + ".bin", split + ".len") for split in SPLITS}, "unigram": "train.unigram",
    "description": "shard.json", "stretches": [(text, "text.jsonl", everything, 0)], "spiece": str(spiece),
    "split": (950, 30, 20), "split_seed": 0, "bytes_per_token": 2, "vocab_size": 32100, "unigram_dtype": "<i8",
    "fingerprint": "", "number": 0,
}, lambda text_bytes: None)
ended = os.times()
print(ended.user + ended.system - started.user - started.system)
""",
    "t5train, all of its processes": """
import pathlib
from t5train.data.corpus import build_corpus
from t5train.data.shards import build_shards
from t5train.records.stage_records import TokenizerFiles
from t5train.spec import CorpusSpec; from t5train.spec import ShardsSpec
corpus_spec = CorpusSpec(source=text, workers=PROCESSES)
corpus = build_corpus(corpus_spec, pathlib.Path(out))
build_shards(ShardsSpec(shard_tokens=1 << 20, workers=PROCESSES), corpus_spec, corpus,
             TokenizerFiles.load(pathlib.Path(tokenizer)), pathlib.Path(out))
""",
}
REFERENCE, WINDOWED, BOUND = list(PROGRAMS)[:3]
DOCSTRING_BYTES = 40_000_000


def main() -> None:
    """Run all programs in turns, and print the table."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--text", type=Path)
    arguments.add_argument("--docstrings", action="store_true")
    arguments.add_argument("--processes", type=int, default=2)
    arguments.add_argument("--without-datasets", action="store_true")
    arguments.add_argument("--spiece", type=Path)
    arguments.add_argument("--megabytes", type=float, default=40)
    arguments.add_argument("--rounds", type=int, default=3)
    add_into(arguments)
    given = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        source = given.text or joined(docstrings() if given.docstrings else python_documentation(root), root)
        tokenizer = tokenizer_folder(source, given.spiece, root)
        whole, little = root / "whole.jsonl", root / "little.jsonl"
        text_bytes = repeat(source, whole, int(given.megabytes * 1e6))
        little_bytes = repeat(source, little, LITTLE_BYTES)
        programs = [name for name in PROGRAMS if not given.without_datasets or name not in {REFERENCE, WINDOWED}]
        all_of_it: dict[str, list[float]] = {name: [] for name in programs}
        start: dict[str, list[float]] = {name: [] for name in programs}
        for _ in range(given.rounds):
            for name in programs:
                all_of_it[name].append(cpu_seconds(name, whole, tokenizer, given.processes))
                start[name].append(cpu_seconds(name, little, tokenizer, given.processes))
        spent = {name: statistics.median(each) for name, each in all_of_it.items()}
        rest = {name: spent[name] - statistics.median(each) for name, each in start.items()}
    included = compared(text_bytes / 1e6, spent)
    left_out = compared((text_bytes - little_bytes) / 1e6, rest, ", without start-up")
    versions = ", ".join(f"{name} {version(name)}" for name in ("datasets", "tokenizers", "sentencepiece"))
    measured_here(
        f"Tokenising {text_bytes / 1e6:.0f} MB, relative to sentencepiece alone and to datasets.map",
        [{"program": name, **included[name], **left_out[name]} for name in programs],
        f"{versions}; {given.processes} processes, medians of {given.rounds} rounds.",
    ).show(given.into)


def python_documentation(root: Path) -> Iterator[str]:
    """Yield the texts of the built-in corpus."""
    sources.write_pydocs(root / "pydocs.jsonl")
    yield from (json.loads(line)["text"] for line in (root / "pydocs.jsonl").open())


def docstrings(at_most: int = DOCSTRING_BYTES) -> Iterator[str]:
    """Yield different docstrings of installed packages, up to so many bytes, without rows of dashes.

    These have several segmentations of the same score, between which tokenizers of other libraries choose
    differently. build_shards refuses a text if that concerns more than a tenth of its passages.
    """
    seen, size = set[str](), 0
    for path in sorted(Path(sysconfig.get_path("purelib")).rglob("*.py")):
        for text in docstrings_of(path):
            if text not in seen and size < at_most:
                seen.add(text)
                size += len(text.encode())
                yield re.sub("--+", "", text)


def docstrings_of(path: Path) -> Iterator[str]:
    """Yield the docstrings of a module that can be written as UTF-8; none if it is for another Python."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in ast.walk(tree):
        text = ast.get_docstring(node, clean=False) if isinstance(node, documented) else None
        if text and text.encode("utf-8", "replace").decode() == text:
            yield text


def joined(texts: Iterator[str], root: Path) -> Path:
    """Write texts in passages of 100 words, a usual length for Wikipedia passages, and return the path."""
    words = [word for text in texts for word in text.split()]
    passages = [" ".join(words[first : first + PASSAGE_WORDS]) for first in range(0, len(words), PASSAGE_WORDS)]
    path = root / "joined.jsonl"
    path.write_text("".join(json.dumps({"id": str(i), "text": text}) + "\n" for i, text in enumerate(passages)))
    return path


def tokenizer_folder(source: Path, spiece: Path | None, root: Path) -> Path:
    """Return the folder of a tokenizer that both transformers and t5train can load."""
    if spiece is not None:
        return given_tokenizer(spiece, root).path
    corpus_spec = CorpusSpec(source=str(source))
    corpus = build_corpus(corpus_spec, root)
    return build_tokenizer(TokenizerSpec(vocab_size=8000), corpus_spec, corpus, root).path


def repeat(source: Path, target: Path, at_least: int) -> int:
    """Write the passages of ``source`` repeatedly until there are ``at_least`` bytes of text. Returns the bytes."""
    lines = source.read_text("utf-8").splitlines()
    sizes = [len(json.loads(line)["text"].encode()) for line in lines]
    size = number = 0
    with target.open("w", encoding="utf-8") as file:
        while size < at_least:
            file.write(lines[number % len(lines)] + "\n")
            size += sizes[number % len(lines)]
            number += 1
    return size


def cpu_seconds(name: str, text: Path, tokenizer: Path, processes: int) -> float:
    """Return the CPU seconds of a program and all its processes, or those that the program itself prints."""
    code = START + PROGRAMS[name].replace("PROCESSES", str(processes))
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    before = os.times()
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-W", "ignore", "-c", code, str(text), str(tokenizer), out]
        done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    after = os.times()
    if done.stdout.strip():
        return float(done.stdout)
    return after.children_user + after.children_system - before.children_user - before.children_system


def compared(megabytes: float, seconds: dict[str, float], suffix: str = "") -> dict[str, dict[str, Figure]]:
    """Return the speed of each program, also relative to sentencepiece and datasets.map."""
    return {
        name: {
            f"MB per CPU second{suffix}": round(megabytes / spent, 1),
            f"relative to sentencepiece{suffix}": round(seconds[BOUND] / spent, 2),
            f"relative to datasets.map{suffix}": round(seconds[REFERENCE] / spent, 1) if REFERENCE in seconds else None,
        }
        for name, spent in seconds.items()
    }


if __name__ == "__main__":
    main()
