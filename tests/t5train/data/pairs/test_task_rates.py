"""What is trained on of each task, and what is refused before training."""

from pathlib import Path
from typing import Any

import pytest

from t5train.data.pairs.task_rates import TaskShare, require_enough_pairs, task_shares
from t5train.data.vocabulary.held_out import HELD_OUT
from t5train.errors import InputError, SpecError
from t5train.records.stage_records import PairShards
from t5train.spec import RunSpec
from t5train.spec.recipes import recipe
from tests.support.made_pairs import IdsOfPair, made_pair_shards

ROW = (20, 12)
NAMED = [f"{name}.jsonl#source=a&target=b&task={name}" for name in ("task0", "task1")]
SHORT: list[IdsOfPair] = [([5, 1], [5, 1])] * 60
LONG: list[IdsOfPair] = [([5] * 19 + [1], [5] * 11 + [1])] * 20


def a_spec(**changed: Any) -> RunSpec:
    settings = {"pairs.train": NAMED, "pairs.input_tokens": 20, "pairs.target_tokens": 12}
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


def test_enough_pairs_are_accepted(shards: PairShards) -> None:
    require_enough_pairs(a_spec(optimizer__global_batch_sequences=30), shards)


def test_fewer_rows_than_a_batch_are_refused(shards: PairShards) -> None:
    with pytest.raises(InputError, match=r"80 pairs in 30 rows, but a step takes .*\(31\) rows.*pairs\.pack=false"):
        require_enough_pairs(a_spec(optimizer__global_batch_sequences=31), shards)
    with pytest.raises(InputError, match=r"lower optimizer\.global_batch_sequences$"):
        require_enough_pairs(a_spec(optimizer__global_batch_sequences=31, pairs__pack=False), shards)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [({"pairs__target_tokens": 16}, "are 20 and 16,"), ({"pairs__train": [NAMED[1], NAMED[0]]}, "are task1, task0:")],
)
def test_shards_of_other_rows_or_tasks_are_refused(shards: PairShards, changed: dict[str, Any], expected: str) -> None:
    with pytest.raises(SpecError, match=f"rows of 20 and 12 tokens of the tasks task0, task1, but .*{expected}"):
        require_enough_pairs(a_spec(**changed), shards)


def test_a_run_needs_pairs_to_validate_on(tmp_path: Path) -> None:
    shards = made_pair_shards(tmp_path / "made", [{"train": SHORT}, {"train": LONG}], ROW)
    with pytest.raises(InputError, match=r"no pair to validate on.*pairs\.validation.*pairs\.split"):
        require_enough_pairs(a_spec(), shards)
