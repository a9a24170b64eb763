"""An export predicts held-out pairs, and gets the predictions, their metrics, and a card that states them."""

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard
from huggingface_hub.repocard_data import model_index_to_eval_results
from torch import OutOfMemoryError

from flows.cli.models import measure_command
from infra.head.runs.run_state import last_finished_stage
from t5train.data.worker_processes import Advance, Json
from t5train.errors import InputError
from t5train.inference.evaluation import export_evaluation
from t5train.inference.evaluation.export_evaluation import evaluate_export
from t5train.inference.evaluation.held_out_sample import sampled_pairs
from t5train.inference.predict import prediction
from t5train.inference.predict.devices import OtherMachines
from t5train.inference.predict.prediction import predict
from t5train.inference.predict.predictions import read_predictions
from t5train.inference.text.decoding import Decoder
from t5train.records.stage_records import Export, TokenizerFiles, Weights
from t5train.release.export import export
from t5train.release.model_card import read_front_matter
from t5train.spec.recipes import recipe
from tests.support.changed_weights import change_weights
from tests.support.evaluated_exports import Evaluable, evaluable, predict_here

PREDICTIONS, METRICS = "evaluation/predictions.jsonl", "evaluation/metrics.json"
GROUPS = [f"{split}/{task}" for split in ("validation", "test") for task in ("reverse_digits", "sort_digits")]


def metrics_of(exported: Export) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((exported.path / METRICS).read_text())
    return found


def refuse(*_: object, **__: object) -> None:
    raise AssertionError("predicted again")


def test_predictions_of_each_split_and_task_are_in_the_export_and_its_manifest(evaluated: Evaluable) -> None:
    made = evaluated.export
    made.verify()
    assert made.files.keys() >= {PREDICTIONS, METRICS}
    rows = list(read_predictions(made.path / PREDICTIONS))
    assert [row.id.rpartition("/")[0] for row in rows] == [group for group in GROUPS for _ in range(3)]
    assert {(row.task, row.source.partition(": ")[0]) for row in rows} == {
        ("reverse_digits", "reverse"),
        ("sort_digits", "order"),
    }


def test_the_sample_is_that_of_the_lowest_hashes_whatever_the_order_of_files(of_pairs: Evaluable) -> None:
    every, some = (list(sampled_pairs(of_pairs.pairs, most)) for most in (1000, 4))
    assert len(every) == 18
    assert len(some) == 8
    file = of_pairs.pairs.path / "validation-000.jsonl"
    file.write_text("".join(reversed(file.read_text().splitlines(keepends=True))))
    assert {each.pair for each in sampled_pairs(of_pairs.pairs, 4)} == {each.pair for each in some}


def test_the_card_has_metrics_that_the_hub_accepts(evaluated: Evaluable) -> None:
    card = (evaluated.export.path / "README.md").read_text("utf-8")
    name, results = model_index_to_eval_results(read_front_matter(card)["model-index"])
    assert name == "made"
    assert [f"{each.dataset_split}/{each.dataset_type}" for each in results[::4]] == GROUPS
    groups = metrics_of(evaluated.export)["groups"]
    of_model = {(each["task"], each["split"]): each["systems"]["model"] for each in groups}
    assert {each.metric_type for each in results} == {"exact_match", "chrf", "bleu", "rouge"}
    for each in results:
        metric = "rougeL" if each.metric_type == "rouge" else each.metric_type
        assert each.metric_value == of_model[each.dataset_type, each.dataset_split][metric]["value"]
    assert ModelCard(card).data.eval_results == results
    for stated in (
        "6 of the 10 pairs of the validation split and 6 of the 8 pairs of the test split",
        "predicted greedily, with at most 5 new tokens, in float32 on cpu",
        "| validation | all | the source, copied |",
        "were cut off at the most tokens that were allowed",
        "their references have an unknown piece",
    ):
        assert stated in card


def test_an_evaluated_export_is_reused_and_evaluated_again_with_other_settings(
    evaluated: Evaluable, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = evaluated.export
    again = evaluated.evaluate(max_new_tokens=3)
    assert "tokens (evaluate.max_new_tokens). If they should be longer, set evaluate.max_new_tokens" in caplog.text
    assert not again.reused
    assert metrics_of(again)["predicting"]["most_tokens"] == 3
    again.verify()
    assert again.fingerprint == before.fingerprint
    monkeypatch.setattr(export_evaluation, "predict", refuse)
    assert evaluated.evaluate(max_new_tokens=3).reused


def test_the_export_stage_reuses_an_evaluated_export(evaluated: Evaluable) -> None:
    weights = Weights.load(evaluated.run / "weights")
    tokenizer = TokenizerFiles.load(evaluated.run.parent / "tokenizer")
    made = export(weights, tokenizer, evaluated.run / "witness", evaluated.spec, evaluated.folder)
    assert made.reused
    assert made.files == evaluated.export.files


def test_a_certified_export_stays_as_it_is(
    of_pairs: Evaluable, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(export_evaluation, "predict", refuse)
    exported = of_pairs.export
    (exported.path / "certificate.json").write_text("{}")
    files = exported.files | {"certificate.json": exported.files["config.json"]}
    certified = exported.model_copy(update={"files": files}).commit()
    assert of_pairs.evaluate().files == certified.files
    assert "was certified without predictions, and stays as it is" in caplog.text


def test_a_killed_evaluation_leaves_the_export_as_it_was_and_continues(
    of_pairs: Evaluable, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = of_pairs.export

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(export_evaluation, "with_evaluation", stop)
        with pytest.raises(KeyboardInterrupt):
            of_pairs.evaluate()
    assert of_pairs.export == before
    before.verify()
    monkeypatch.setattr("tests.support.evaluated_exports.predict_parts", refuse)
    assert of_pairs.evaluate().files.keys() >= {PREDICTIONS, METRICS}


def test_an_evaluation_that_an_earlier_version_began_is_made_again(
    of_pairs: Evaluable, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(prediction, "VERSION", 1)
        patch.setattr(export_evaluation, "VERSION", 1)
        patch.setattr(export_evaluation, "with_evaluation", stop)
        with pytest.raises(KeyboardInterrupt):
            of_pairs.evaluate()
    assert of_pairs.evaluate().files.keys() >= {PREDICTIONS, METRICS}


def test_an_evaluation_may_continue_on_another_kind_of_device(
    of_pairs: Evaluable, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> Iterator[Json]:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(export_evaluation, "predict", predict)
        there = partial(nullcontext, OtherMachines("cuda", 1 << 36, stop))
        with pytest.raises(KeyboardInterrupt):
            evaluate_export(of_pairs.export, of_pairs.pairs, of_pairs.spec, of_pairs.run, machines=there)
    assert of_pairs.evaluate().files.keys() >= {PREDICTIONS, METRICS}


def test_files_that_somebody_added_to_the_export_are_kept(of_pairs: Evaluable) -> None:
    (of_pairs.folder / "notes.txt").write_text("mine")
    of_pairs.evaluate().verify()
    assert (of_pairs.run / "export.aside-1/notes.txt").read_text() == "mine"


def test_without_the_packages_only_exact_match_is_measured_and_the_card_says_so(
    of_pairs: Evaluable, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(export_evaluation, "can_score", lambda: False)
    made = of_pairs.evaluate()
    assert metrics_of(made)["signatures"].keys() == {"exact_match"}
    assert "t5-pretrain[score]" in (made.path / "README.md").read_text()
    assert "only exact match is measured: chrF, BLEU, ROUGE and token F1 need sacrebleu and rouge-score" in caplog.text


def test_the_start_model_predicts_the_same_pairs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = evaluable(tmp_path, "lora")
    shutil.copy(found.folder / "spiece.model", tmp_path / "start")
    made = found.evaluate()
    by_start = list(read_predictions(made.path / "evaluation/start_predictions.jsonl"))
    predicted = list(read_predictions(made.path / PREDICTIONS))
    assert [(row.id, row.source) for row in by_start] == [(row.id, row.source) for row in predicted]
    assert all("start" in group["systems"] for group in metrics_of(made)["groups"])
    assert "the model that training started from" in (made.path / "README.md").read_text()
    start = shutil.move(tmp_path / "start", tmp_path / "moved")
    shutil.copytree(start, tmp_path / "start")
    change_weights(tmp_path / "start")
    assert "evaluation/start_predictions.jsonl" not in found.evaluate(max_new_tokens=3).files
    assert f"{tmp_path / 'start'} is not the model any more that training started from" in caplog.text
    shutil.rmtree(tmp_path / "start")
    assert "evaluation/start_predictions.jsonl" not in found.evaluate(max_new_tokens=4).files
    assert f"{tmp_path / 'start'}, which training started from, is gone: it is not measured" in caplog.text


def test_other_machines_predict_and_are_asked_only_if_there_is_something_to_predict(
    of_pairs: Evaluable, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, jobs = list[str](), list[Json]()

    def there(function: str, given: Sequence[Json], advance: Advance) -> Iterator[Json]:
        jobs.extend(given)
        return predict_here(function, given, advance)

    @contextmanager
    def machines() -> Iterator[OtherMachines]:
        asked.append("asked")
        yield OtherMachines("cpu", 1 << 32, there)

    monkeypatch.setattr(export_evaluation, "predict", predict)
    for reused in (False, True):
        made = evaluate_export(of_pairs.export, of_pairs.pairs, of_pairs.spec, of_pairs.run, machines=machines)
        assert made.reused == reused
    assert len(list(read_predictions(made.path / PREDICTIONS))) == 12
    assert {job["model"] for job in jobs} == {str(of_pairs.folder)}
    assert asked == ["asked"]


def test_a_model_that_cannot_predict_names_the_setting_that_publishes_without(
    of_pairs: Evaluable, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OutOfMemoryError

    monkeypatch.setattr(Decoder, "decode", fail)
    remedies = (
        r"Set a lower evaluate\.num_beams or evaluate\.max_new_tokens\. To publish without .* evaluate\.max_pairs=0"
    )
    with pytest.raises(InputError, match=f"too little memory for .* sources at once. {remedies}"):
        of_pairs.evaluate()


def test_the_command_measure_does_the_stage_alone_and_refuses_a_run_without_pairs(
    of_pairs: Evaluable, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measure_command, "load_run_spec", lambda _: of_pairs.spec)
    monkeypatch.setattr(measure_command.Pairs, "load", lambda _: of_pairs.pairs)
    for reused in ("", " (reused)"):
        measure_command.measure(of_pairs.folder, of_pairs.pairs.path, of_pairs.run)
        said = capsys.readouterr().out.splitlines()
        assert said[0].startswith("6 pairs of the validation split, this model: exact match 0.00, chrF ")
        assert said[-1] == f"export: {of_pairs.folder}{reused}"
    of_text = recipe("smoke")
    monkeypatch.setattr(measure_command, "load_run_spec", lambda _: of_text)
    with pytest.raises(InputError, match=r"has no held-out pairs to predict: .*Name the folder of a run of `finetune`"):
        measure_command.measure(of_pairs.folder, of_pairs.pairs.path, of_pairs.run)


def test_the_evaluation_is_a_stage_of_status(evaluated: Evaluable) -> None:
    (evaluated.run / "manifest.json").write_text("{}")
    assert last_finished_stage(evaluated.run) == "evaluated"
