"""Records of pairs and of their shards, without the stages that make them of files."""

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from t5train.data.pairs.pair_shard_worker import IDS, LENGTHS, arrange_pairs
from t5train.data.pairs.pair_shards import KINDS, PARTS, shard_file
from t5train.data.pairs.pairs import TASKS, pairs_name
from t5train.data.passages import SPLITS
from t5train.records.digests import digest_files
from t5train.records.identity import fingerprint
from t5train.records.stage_records import Pairs, PairShards

IdsOfPair = tuple[Sequence[int], Sequence[int]]
PairsOfSplits = Mapping[str, Sequence[tuple[str, str]]]


def made_pairs(folder: Path, tasks: Mapping[str, PairsOfSplits]) -> Pairs:
    """Write the pairs of each split of each task, as (source, target), and return their record."""
    folder.mkdir(parents=True)
    (folder / TASKS).write_text(json.dumps([{"task": task, "prefix": ""} for task in tasks]))
    names = [TASKS]
    for number, splits in enumerate(tasks.values()):
        for split in SPLITS:
            names.append(pairs_name(split, number))
            lines = [
                json.dumps({"source": source, "target": target}) + "\n" for source, target in splits.get(split, ())
            ]
            (folder / names[-1]).write_text("".join(lines))
    files = digest_files(folder, names)
    identity = fingerprint({name: digest.sha256 for name, digest in files.items()})
    return Pairs(path=folder, fingerprint=identity, files=files).commit()


def made_pair_shards(
    folder: Path, tasks: Sequence[Mapping[str, Sequence[IdsOfPair]]], row: tuple[int, int], *, pack: bool = True
) -> PairShards:
    """Return shards of the pairs of each split of each task, given as ids of source and target with EOS."""
    folder.mkdir(parents=True)
    (folder / TASKS).write_text(json.dumps([{"task": f"task{number}", "prefix": ""} for number in range(len(tasks))]))
    counts = {"vocab_size": 400, "pad_id": 0, "eos_id": 1, "bytes_per_token": 2, "num_shards": len(tasks)}
    counts |= {"input_tokens": row[0], "target_tokens": row[1]}
    names = [TASKS]
    for split, (task, splits) in itertools.product(SPLITS, enumerate(tasks)):
        pairs = splits.get(split, ())
        part = {kind: str(folder / f"part.{kind}") for kind in PARTS}
        np.array([each for pair in pairs for side in pair for each in side], "<u2").tofile(part["tokens"])
        np.array([[len(side) for side in pair] for pair in pairs], LENGTHS).tofile(part["lengths"])
        np.arange(len(pairs), dtype=IDS).tofile(part["ids"])
        np.zeros(len(pairs), bool).tofile(part["cut"])
        files = {kind: shard_file(split, task, kind) for kind in KINDS}
        job = {"number": 0, "task": task, "row": row, "pack": pack and split == "train", "parts": [part]}
        job |= {"bytes_per_token": 2, "vocab_size": 400, "joined": str(folder / "joined")}
        made = arrange_pairs(
            job | {"files": {kind: str(folder / name) for kind, name in files.items()}}, lambda _: None
        )
        for name, count in made.items():
            counts[f"{split}_{name}"] = counts.get(f"{split}_{name}", 0) + count
            counts[f"{split}_{name}_of_task_{task}"] = count
        names += files.values()
    return PairShards(path=folder, fingerprint="a" * 64, files=digest_files(folder, names), counts=counts).commit()
