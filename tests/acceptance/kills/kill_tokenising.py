"""Kill tokenising, from a text to its token shards, at random moments, and start it again until it is done.

::

    python -m tests.acceptance.kills.kill_tokenising                       twenty kills, 40 MB of made-up words
    python -m tests.acceptance.kills.kill_tokenising --kills 3 --megabytes 5 --seed 1

Copies and near-duplicates are looked for, too. The seed decides the moments, between 0 and the time that all takes when
nobody is killed. Each time it completes, it starts from the beginning, until there were enough kills. The result must
have the same bytes as when nobody is killed, and a shard that was complete at a kill must not have been made again. If
this does not hold, the command prints it and fails.
"""

import argparse
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from t5train.records.digests import digest_file
from tests.acceptance.kills.killed_process import await_end_of_processes
from tests.support.generated_text import write_jsonl

PROGRAM = """
import sys
from pathlib import Path
from t5train.data.corpus import build_corpus
from t5train.data.shards import build_shards
from t5train.data.vocabulary.tokenizer import build_tokenizer
from t5train.spec import CorpusSpec, ShardsSpec, TokenizerSpec
text, root = sys.argv[1], Path(sys.argv[2])
spec = CorpusSpec(source=text, workers=2, remove=("near_duplicates",))
corpus = build_corpus(spec, root)
tokenizer = build_tokenizer(TokenizerSpec(vocab_size=300), spec, corpus, root)
build_shards(ShardsSpec(shard_tokens=100_000, workers=2), spec, corpus, tokenizer, root)
"""
BYTES_A_DOCUMENT = 400
_VOLATILE = {"manifest.json"}
"""Has the time and the host in it."""


class Outcome(NamedTuple):
    undisturbed_seconds: float
    moments: list[float]
    """Seconds from each start to its kill."""
    faults: list[str]


def kill_tokenising(folder: Path, kills: int, documents: int, seed: int = 0) -> Outcome:
    """Tokenise a text twice, the second time with kills."""
    text = write_jsonl(folder / "text.jsonl", documents)
    began = time.monotonic()
    if code := _start(text, folder / "undisturbed").wait():
        raise RuntimeError(f"exited with {code} without a kill")
    seconds = time.monotonic() - began
    generator, moments, faults = random.Random(seed), list[float](), list[str]()
    expected, rounds = _contents(folder / "undisturbed"), 0
    while len(moments) < kills:
        root, rounds = folder / f"killed-{rounds}", rounds + 1
        complete: dict[str, int] = {}
        while len(moments) < kills:
            moment = generator.uniform(0, seconds)
            process = _start(text, root, stderr=subprocess.DEVNULL)  # workers complain of a lost parent
            time.sleep(moment)
            process.kill()
            if process.wait() == 0:
                break  # it was done before
            await_end_of_processes(root)
            moments.append(moment)
            complete |= _complete_shards(root)
        faults += _faults(text, root, complete, expected)
    return Outcome(seconds, moments, faults)


def _faults(text: Path, root: Path, complete: Mapping[str, int], expected: Mapping[str, str]) -> list[str]:
    """Tokenise to the end, and return what is wrong."""
    faults = [f"the last start exited with {code}"] if (code := _start(text, root).wait()) else []
    made, found = _complete_shards(root), _contents(root)
    faults += [f"{name} was complete, and made again" for name, ns in complete.items() if made.get(name) != ns]
    names = sorted(expected.keys() | found.keys())
    return faults + [f"{name} differs" for name in names if expected.get(name) != found.get(name)]


def _start(text: Path, root: Path, stderr: int | None = None) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", PROGRAM, str(text), str(root)], stderr=stderr)


def _complete_shards(root: Path) -> dict[str, int]:
    """Return the times at which the token files of shards with a description were written, by name."""
    described = [path.name.removeprefix("shard-").removesuffix(".json") for path in root.glob("shards/*/shard-*.json")]
    files = {path.name: path for path in root.glob("shards/*/train-*.bin")}
    return {f"train-{number}.bin": files[f"train-{number}.bin"].stat().st_mtime_ns for number in described}


def _contents(root: Path) -> Mapping[str, str]:
    return {
        str(path.relative_to(root)): digest_file(path).sha256
        for path in sorted(root.rglob("*"))
        if path.is_file() and path.name not in _VOLATILE
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--megabytes", type=float, default=40)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kills-") as folder:
        outcome = kill_tokenising(Path(folder), given.kills, int(given.megabytes * 1e6 / BYTES_A_DOCUMENT), given.seed)
    after = f", after {min(outcome.moments):.2f} to {max(outcome.moments):.2f} s" if outcome.moments else ""
    print(f"{len(outcome.moments)} kills{after}; undisturbed: {outcome.undisturbed_seconds:.1f} s")
    for fault in outcome.faults:
        print(fault)
    sys.exit(bool(outcome.faults))


if __name__ == "__main__":
    main()
