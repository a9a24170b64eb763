"""A model is pre-trained, fine-tuned and measured beside one from scratch, in time; a second command repeats none."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks import real_task
from benchmarks.measured_result import Result
from benchmarks.real_task import TaskRow
from t5train.data.vocabulary.sentencepiece_model import train
from t5train.spec import TokenizerSpec

TINY = {
    "model.preset": "smoke",
    "model.num_layers": 1,
    "model.num_decoder_layers": 1,
    "model.compile": "false",
    "optimizer.precision": "fp32",
    "optimizer.global_batch_sequences": 2,
    "layout.micro_batch_sequences": 2,
    "cluster.accelerator": "cpu",
}
OF_PAIRS = {"pairs.input_tokens": 32, "pairs.target_tokens": 32, "evaluate.max_new_tokens": 4}


@pytest.mark.parametrize("option", ["--set", "--text-set"])
def test_a_setting_without_a_value_is_named_with_its_option(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = [f"--{name}=x" for name in ("text", "tokenizer", "root", "train", "validation", "test")]
    monkeypatch.setattr(sys, "argv", ["real_task", "finetune_base", *needed, option, "model.preset"])
    with pytest.raises(SystemExit, match=f"^{option} model.preset is not of the form part.key=value"):
        real_task.main()


@pytest.mark.slow
@pytest.mark.usefixtures("quick_ranks")
def test_both_are_measured_on_the_same_pairs_and_a_finished_part_is_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [f"class {number} def return None {number * 7}" for number in range(200)]
    text, vocabulary, into, root = (tmp_path / name for name in ("text.txt", "spiece.model", "out.json", "root"))
    text.write_text("\n".join(texts), "utf-8")
    vocabulary.write_bytes(train(TokenizerSpec(vocab_size=40), texts))
    command = ["finetune_base", "--text", str(text), "--tokenizer", str(vocabulary), "--root", str(root)]
    for number, split in enumerate(("train", "validation", "test")):
        rows = [json.dumps({"source": each, "target": each[:9]}) for each in texts[number::20]]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(rows) + "\n", "utf-8")
        command += [f"--{split}", f"{tmp_path / split}.jsonl" + ("#task=first" if split == "train" else "")]
    for option, settings in (("--set", TINY | OF_PAIRS), ("--text-set", TINY | {"objective.input_tokens": 32})):
        command += [part for name, value in settings.items() for part in (option, f"{name}={value}")]
    command += ["--text-steps", "2", "--steps", "2", "--seeds", "7", "--into", str(into)]
    monkeypatch.setattr(sys, "argv", ["real_task", *command])

    assert real_task.main() == 0

    lines = (root / "real-task.jsonl").read_text("utf-8").splitlines()
    text_row, pre_trained, scratch = map(TaskRow.model_validate_json, lines)
    assert (text_row.contender, pre_trained.contender, scratch.contender) == ("text", "pre-trained", "from scratch")
    assert pre_trained.data == scratch.data != text_row.data
    assert pre_trained.evaluation
    assert scratch.evaluation
    copied = [each.groups[-1].systems["copy"] for each in (pre_trained.evaluation, scratch.evaluation)]
    assert copied[0] == copied[1]
    assert "start" in pre_trained.evaluation.groups[0].systems, "it started from the model that was pre-trained"
    assert "start" not in scratch.evaluation.groups[0].systems
    left = {each.name for row in (text_row, pre_trained, scratch) for each in (root / "runs" / row.run).iterdir()}
    assert not [name for name in left if "checkpoints" in name or "weights" in name]

    monkeypatch.setattr(real_task, "_do", lambda *_: pytest.fail("done again"))
    assert real_task.main() == 0
    rows = [row for row in Result.model_validate_json(into.read_text("utf-8")).rows if row.get("split") == "test"]
    assert [row["system"] for row in rows if row.get("weights")] == ["pre-trained, seed 7", "from scratch, seed 7"]
    assert [row["pairs"] for row in rows] == [10] * len(rows)
