"""The card of a model that was fine-tuned on pairs, and what is read from it."""

from typing import Any

from t5train.inference.text.generation import _missing_prefix
from t5train.records.identity import current_provenance
from t5train.records.witness import EncodedPassage, TensorDigest, TrainedModel, TrainedTask, Witness
from t5train.release.model_card import model_card, recorded_run
from t5train.spec.recipes import smoke

PREFIXES = {"reverse_digits": "reverse: ", "sort_digits": "order: "}
COUNTS = {"train_pairs": 90, "validation_pairs": 5, "test_pairs": 6, "train_samples": 14, "test_cut": 2}
COUNTS |= {"test_cut_targets": 1, "train_cut": 9, "train_cut_targets": 8}
SORTED = {
    "test_pairs_of_task_1": 3,
    "test_exact_match_of_task_1": 0.75,
    "test_token_accuracy_of_task_1": 0.9,
    "test_loss_of_task_1": 0.5,
}


def witness(settings: dict[str, Any]) -> Witness:
    pairs = {"pairs.train": ["reverse_digits", "sort_digits#prefix=order: "]}
    spec = smoke().with_settings(pairs | settings)
    trained = TrainedModel(
        run_name="digits",
        recipe="smoke",
        settings=spec.identity(),
        start_from="t5-base",
        data=COUNTS | {"train_pairs_of_task_0": 60, "train_pairs_of_task_1": 30},
        tasks=tuple(TrainedTask(task=task, prefix=prefix) for task, prefix in PREFIXES.items()),
    )
    return Witness(
        run_fingerprint="3" * 64,
        step=7,
        tag="step-00000007",
        device_type="cpu",
        num_threads=1,
        num_parameters=10,
        tensors={"shared.weight": TensorDigest(shape=(1,), sha256="0" * 64)},
        ties={},
        huggingface_config={},
        generation_config={},
        trained=trained,
        passages=[EncodedPassage(text="a", ids=[1])],
        probes=["heldout"],
        inputs={},
        validation={"validation_loss": 1.5, "unigram_loss": 1.4, "validation_exact_match": 0.25} | SORTED,
    )


def test_the_card_states_tasks_prefixes_pairs_rates_and_measurements() -> None:
    card = model_card(witness({"pairs.mixing_weights": [3, 1], "optimizer.z_loss": 1e-4}), {}, {}, current_provenance())
    for stated in (
        "fine-tuned starting from the weights of `t5-base`",
        '| `reverse_digits` | `"reverse: "` |',
        'tokenizer("reverse: ...", return_tensors="pt")',
        "| train | 90 |",
        "9 pairs of the train split had a side that is longer than a row, and were shortened.\n",
        "2 pairs of the test split had a side that is longer than a row, and were shortened. Of these, 1 had a longer",
        "Training took 448 rows: 32.00 epochs over the 14 rows that hold the 90 pairs of the training split.",
        "| `reverse_digits` | 60 | 75.00% |",
        "label smoothing 0, z-loss 0.0001",
        "| validation_exact_match | 25.00% |",
        "Its loss on held-out text is 1.5000 nats per target token",
        "| `sort_digits` | test | `3` | 75.00% | 90.00% | 0.5000 |",
        "| `reverse_digits` | test | not measured |",
        "Fine-tuned on `reverse_digits`, `sort_digits`. The licence of",
        "from the one that the pairs have",
    ):
        assert stated in card
    for of_text in ("extra_id", "span corruption", "masked token", "corpus"):
        assert of_text not in card
    assert "| test_loss_of_task_1 |" not in card


def test_prefixes_are_read_from_the_card_and_a_text_without_one_is_remarked() -> None:
    run = recorded_run(model_card(witness({}), {}, {}, current_provenance()))
    assert run.tasks == PREFIXES
    assert run.settings["pairs"]["target_tokens"] == 256
    assert list(_missing_prefix(run.tasks, "order: 3 1 2")) == []
    (remark,) = _missing_prefix(run.tasks, "3 1 2")
    assert '("reverse: ", "order: ")' in remark


def test_a_witness_of_text_has_no_field_of_tasks_and_one_of_pairs_survives_its_file() -> None:
    recorded = witness({})
    assert Witness.model_validate_json(recorded.model_dump_json()) == recorded
    of_text = recorded.trained.model_copy(update={"tasks": ()})
    assert "tasks" not in of_text.model_dump(mode="json")
