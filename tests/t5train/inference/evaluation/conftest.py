"""Exports of a random model to evaluate, each in a folder of its own."""

import shutil
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path

import pytest
import torch

from t5train.inference.evaluation import export_evaluation
from t5train.inference.predict.prediction import predict
from tests.support.evaluated_exports import Evaluable, evaluable, evaluable_in, predict_here


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    threads = torch.get_num_threads()
    monkeypatch.setattr(export_evaluation, "predict", partial(predict, workers=predict_here))
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def made_evaluables(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], tuple[Path, Evaluable]]:
    @cache
    def made(evaluated: bool) -> tuple[Path, Evaluable]:
        folder = tmp_path_factory.mktemp("evaluable")
        found = evaluable(folder)
        if evaluated:
            found.evaluate()
        return folder, found

    return made


@pytest.fixture
def of_pairs(made_evaluables: Callable[[bool], tuple[Path, Evaluable]], tmp_path: Path) -> Evaluable:
    """An export of a run on pairs, not yet evaluated."""
    folder, made = made_evaluables(False)
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    return evaluable_in(tmp_path, made.spec, made.pairs)


@pytest.fixture
def evaluated(made_evaluables: Callable[[bool], tuple[Path, Evaluable]], tmp_path: Path) -> Evaluable:
    """The same, evaluated, but not certified."""
    folder, made = made_evaluables(True)
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    return evaluable_in(tmp_path, made.spec, made.pairs)
