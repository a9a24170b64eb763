"""A run that has ended is trained on by the same command with more steps, to what one longer run would have given."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from infra.head.launch.held_run import hold_run
from infra.head.training_run import train_run
from t5train.checkpoint.consolidate import consolidate
from t5train.data.pairs.pair_shards import build_pair_shards
from t5train.data.pairs.pairs import build_pairs
from t5train.data.pairs.pairs_tokenizer import build_pairs_tokenizer
from t5train.files.run_folder import CHECKPOINTS
from t5train.records.stage_records import Checkpoint, PairShards
from t5train.records.witness import Witness
from t5train.spec import RunSpec
from tests.support.training.launched import spec_of

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_ranks")]


def trained(spec: RunSpec, shards: PairShards) -> Checkpoint:
    with hold_run(spec.run_folder) as run:
        return train_run(spec, shards, run)


def test_a_finished_run_that_gets_more_steps_ends_with_the_weights_of_one_longer_run(
    tmp_path: Path,
) -> None:
    settings = {"pairs.train": ["sort_digits"], "pairs.input_tokens": 48, "pairs.target_tokens": 48}
    settings |= {"optimizer.schedule": "constant", "storage.root": json.dumps(str(tmp_path)), "name": "short"}
    settings |= {"tokenizer.vocab_size": 21, "tokenizer.character_coverage": 1.0}
    short = spec_of("zero1-fp32", num_steps=3, ranks=1).with_settings(settings)
    pairs = build_pairs(short.pairs, tmp_path)
    tokenizer = build_pairs_tokenizer(short.tokenizer, pairs, tmp_path)
    shards = build_pair_shards(short.pairs, pairs, tokenizer, tmp_path, workers=1)
    assert trained(short, shards).step == 3
    found = {}
    for spec in (short, short.with_settings({"name": "long"})):
        checkpoint = trained(spec.with_settings({"optimizer.num_steps": 5}), shards)
        assert checkpoint.step == Witness.load(spec.run_folder / "witness").step == 5
        consolidate(spec.run_folder / CHECKPOINTS, tmp_path / spec.run_name)
        found[spec.run_name] = load_file(tmp_path / spec.run_name / "model.safetensors")
    assert found["short"].keys() == found["long"].keys()
    assert all(found["short"][name].equal(tensor) for name, tensor in found["long"].items())
