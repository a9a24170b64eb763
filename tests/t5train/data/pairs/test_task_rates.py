"""What is trained on of each task, and what is refused before training."""

from pathlib import Path
from typing import Any

import pytest

from t5train.data.held_out import HELD_OUT
from t5train.data.pairs.task_rates import TaskShare, rates_of_rows, require_enough_pairs, task_shares
from t5train.errors import InputError, SpecError
from t5train.records.stage_records import PairShards
from t5train.spec import PairsSpec, RunSpec
from t5train.spec.recipes import recipe
from tests.support.made_pairs import IdsOfPair, made_pair_shards

ROW = (20, 12)
SHORT: list[IdsOfPair] = [([5, 1], [5, 1])] * 60
LONG: list[IdsOfPair] = [([5] * 19 + [1], [5] * 11 + [1])] * 20


def a_spec(**changed: Any) -> RunSpec:
    settings = {"pairs.train": ["a.jsonl", "b.jsonl"], "pairs.input_tokens": 20, "pairs.target_tokens": 12}
    settings |= {"optimizer.num_steps": 10, "optimizer.warmup_steps": 1, "optimizer.global_batch_sequences": 15}
    settings |= {"layout.micro_batch_sequences": 1, "cluster.ranks": 1}
    return recipe("smoke").with_settings(settings | {name.replace("__", "."): value for name, value in changed.items()})


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> PairShards:
    tasks = [{"train": SHORT, "validation": SHORT[:3]}, {"train": LONG}]
    made = made_pair_shards(tmp_path_factory.mktemp("rates") / "made", tasks, ROW)
    (made.path / HELD_OUT).write_text('{"passages": [{"text": "a", "ids": [5, 1]}]}')
    return made


def test_rates_are_meant_in_pairs_and_epochs_count_rows(shards: PairShards) -> None:
    assert task_shares(shards, a_spec()) == [
        TaskShare("task0", pairs=60, rows=10, rate=0.75, epochs=150 * (10 / 30) / 10),
        TaskShare("task1", pairs=20, rows=20, rate=0.25, epochs=150 * (20 / 30) / 20),
    ]
    of_one_pair = [share.epochs * share.pairs for share in task_shares(shards, a_spec(pairs__mixing_weights=[1, 1]))]
    assert of_one_pair[0] == pytest.approx(of_one_pair[1])


def test_limit_and_temperature_count_pairs(shards: PairShards) -> None:
    rates = [share.rate for share in task_shares(shards, a_spec(pairs__mixing_limit=20))]
    assert rates == [0.5, 0.5]
    tempered = [share.rate for share in task_shares(shards, a_spec(pairs__mixing_temperature=2))]
    assert tempered[0] / tempered[1] == pytest.approx(3**0.5)


def test_each_task_needs_a_weight(shards: PairShards) -> None:
    with pytest.raises(SpecError, match=r"pairs\.mixing_weights has 3 numbers, but there are 2 tasks"):
        rates_of_rows(shards, PairsSpec(mixing_weights=(1, 2, 3)))


def test_enough_pairs_are_accepted(shards: PairShards) -> None:
    require_enough_pairs(a_spec(optimizer__global_batch_sequences=30), shards)


def test_fewer_rows_than_a_batch_are_refused(shards: PairShards) -> None:
    with pytest.raises(InputError, match=r"80 pairs in 30 rows, but a step takes .*\(31\) rows.*pairs\.pack=false"):
        require_enough_pairs(a_spec(optimizer__global_batch_sequences=31), shards)
    with pytest.raises(InputError, match=r"lower optimizer\.global_batch_sequences$"):
        require_enough_pairs(a_spec(optimizer__global_batch_sequences=31, pairs__pack=False), shards)


def test_rows_of_other_lengths_are_refused(shards: PairShards) -> None:
    with pytest.raises(SpecError, match=r"rows of 20 and 12 tokens, but .* are 20 and 16"):
        require_enough_pairs(a_spec(pairs__target_tokens=16), shards)


def test_a_run_needs_pairs_to_validate_on(tmp_path: Path) -> None:
    shards = made_pair_shards(tmp_path / "made", [{"train": LONG}], ROW)
    with pytest.raises(InputError, match=r"no pair to validate on.*pairs\.validation.*pairs\.split"):
        require_enough_pairs(a_spec(), shards)
