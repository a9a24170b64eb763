"""The cases: valid, of one text, and of one model where they are compared with each other."""

from pathlib import Path
from typing import get_args

import pytest

from t5train.errors import RegressionError
from t5train.regression.regression_cases import CASES, HOSTFILE_CASE, CaseName, chosen_cases
from t5train.spec import RunSpec

SPECS = {case.name: case.spec(Path("/root"), "run") for case in CASES}


def data_of(spec: RunSpec) -> list[dict[str, object]]:
    return [part.identity() for part in (spec.corpus, spec.tokenizer, spec.shards, spec.objective)]


def test_all_cases_use_the_same_text_and_shards() -> None:
    for spec in SPECS.values():
        assert data_of(spec) == data_of(SPECS["smoke"])


def test_layouts_that_are_compared_train_the_same_model() -> None:
    same = [SPECS[case.name] for case in CASES if case.same_model == "dense"]
    assert len(same) == 4
    assert {spec.fingerprint() for spec in same} == {same[0].fingerprint()}
    assert len({spec.layout for spec in same}) == 4


def test_the_forms_of_prefect_offer_every_case() -> None:
    assert get_args(CaseName) == (*(case.name for case in CASES), HOSTFILE_CASE)


def test_an_unknown_case_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(RegressionError, match=r"unknown case 'smok' \(did you mean 'smoke'\?\); choose"):
        chosen_cases(["smok"])


def test_a_hostfile_adds_a_case_with_a_rank_in_every_slot_and_node_local_storage() -> None:
    with pytest.raises(RegressionError, match="the case 'hosts' needs a hostfile"):
        chosen_cases(["hosts"])
    assert [case.name for case in chosen_cases(["hosts"], Path("/etc/hosts.slots"), 2)] == ["hosts"]
    *_, case = chosen_cases(["moe"], Path("/etc/hosts.slots"), 6)
    spec = case.spec(Path("/root"), "run")
    assert (case.name, spec.cluster.hostfile, spec.cluster.ranks) == (HOSTFILE_CASE, Path("/etc/hosts.slots"), 6)
    assert spec.storage.node_local, "also if the hosts share the root"
