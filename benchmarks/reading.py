"""Compare reading windows of tokens in random order, memory-mapped from shards, with a Hugging Face Arrow dataset.

    python -m benchmarks.reading [--windows 20000] [--batch 128] [--rounds 5]

Both hold the same windows of 568 tokens, and both read the same random batches and return each as one array. Everything
is read once before, so it comes from the page cache. The readers take turns in one process; the table shows the median
of the rounds in samples per second.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import numpy as np

from benchmarks.measured_result import Figure, add_into, measured_here
from t5train.data import sources
from t5train.data.corpus import build_corpus
from t5train.data.samples.loader import Windows
from t5train.data.shards import build_shards
from t5train.data.vocabulary.tokenizer import build_tokenizer
from t5train.records.stage_records import TokenShards
from t5train.spec import CorpusSpec, ShardsSpec, TokenizerSpec

WINDOW_TOKENS = 568
SECONDS_A_ROUND = 1.0
Read = Callable[[np.ndarray], np.ndarray]


def main() -> None:
    """Make the windows, run all readers in turns, and print one table."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--windows", type=int, default=20_000)
    arguments.add_argument("--batch", type=int, default=128)
    arguments.add_argument("--rounds", type=int, default=5)
    add_into(arguments)
    given = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        windows = Windows(python_documentation(Path(folder), given.windows), "train", WINDOW_TOKENS)
        readers: dict[str, Read] = {"t5-pretrain, mapped shards": windows.__getitem__}
        readers |= arrow_readers(windows, Path(folder) / "arrow")
        order = np.random.default_rng(0).permutation(len(windows))
        batches = [order[at : at + given.batch] for at in range(0, len(order) - given.batch + 1, given.batch)]
        for read in readers.values():
            assert all((read(batch) == windows[batch]).all() for batch in batches)
        rates: dict[str, list[float]] = {name: [] for name in readers}
        for _ in range(given.rounds):
            for name, read in readers.items():
                rates[name].append(samples_per_second(read, batches))
        notes = f"Random batches of {given.batch} of {len(windows):,} windows of {WINDOW_TOKENS} tokens, warm."
        what = f"Reading random batches of samples, next to datasets {version('datasets')}"
        medians = {name: statistics.median(each) for name, each in rates.items()}
        measured_here(what, compared(medians), notes).show(given.into)


def python_documentation(root: Path, windows: int) -> TokenShards:
    """Tokenise the built-in corpus, repeated until it has about this many windows."""
    sources.write_pydocs(root / "once.jsonl")
    once = (root / "once.jsonl").read_bytes()
    text = root / "text"
    text.mkdir()
    for number in range(-(-windows * WINDOW_TOKENS * 6 // len(once))):
        (text / f"{number:03d}.jsonl").write_bytes(once)
    corpus_spec = CorpusSpec(source=str(text), split=(998, 1, 1))
    corpus = build_corpus(corpus_spec, root)
    tokenizer = build_tokenizer(TokenizerSpec(vocab_size=8000), corpus_spec, corpus, root)
    return build_shards(ShardsSpec(shard_tokens=4 << 20), corpus_spec, corpus, tokenizer, root)


def arrow_readers(windows: Windows, folder: Path) -> dict[str, Read]:
    """Return two ways to read the same windows from a dataset on disk: with the default and with NumPy's format."""
    import datasets  # which takes seconds, also where tests only collect what imports this module

    def rows() -> object:
        for at in range(0, len(windows), 1000):
            for window in windows[np.arange(at, min(at + 1000, len(windows)))]:
                yield {"input_ids": window.astype(np.int32)}

    features = datasets.Features({"input_ids": datasets.List(datasets.Value("int32"))})
    datasets.disable_progress_bars()
    datasets.Dataset.from_generator(rows, features=features, cache_dir=str(folder / "cache")).save_to_disk(folder)
    plain = datasets.load_from_disk(folder)
    numpy = plain.with_format("numpy")
    return {
        "Arrow dataset": lambda ids: np.array(plain[ids.tolist()]["input_ids"]),
        "Arrow dataset, numpy format": lambda ids: np.asarray(numpy[ids.tolist()]["input_ids"]),
    }


def samples_per_second(read: Read, batches: list[np.ndarray]) -> float:
    """Return the rate, measured for about a second."""
    done, number, started = 0, 0, time.perf_counter()
    while (spent := time.perf_counter() - started) < SECONDS_A_ROUND:
        done += len(read(batches[number % len(batches)]))
        number += 1
    return done / spent


def compared(rates: dict[str, float]) -> list[dict[str, Figure]]:
    """Return the rate of each program, also relative to the faster way to read an Arrow dataset."""
    best = max(rate for name, rate in rates.items() if name.startswith("Arrow"))
    return [{"program": name, "samples/s": round(rate), "ratio": round(rate / best, 1)} for name, rate in rates.items()]


if __name__ == "__main__":
    main()
