"""Fine-tuning and Seq2SeqTrainer train on the same pairs from the same weights; a second command continues."""

import json
import random
import sys
from pathlib import Path

import pytest

from benchmarks import pair_training
from benchmarks.measured_result import Result
from benchmarks.pair_training import PairRow
from t5train.data.vocabulary.sentencepiece_model import train
from t5train.spec import TokenizerSpec

PAIRS = 24
SETTINGS = {
    "model.preset": "smoke",
    "model.num_layers": 1,
    "model.num_decoder_layers": 1,
    "model.compile": False,
    "model.dropout_rate": 0,
    "optimizer.precision": "fp32",
    "optimizer.global_batch_sequences": PAIRS,
    "layout.micro_batch_sequences": PAIRS,
    "cluster.accelerator": "cpu",
    "pairs.pack": False,
    "pairs.input_tokens": 64,
    "pairs.target_tokens": 64,
}
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_ranks")]


def test_both_train_on_all_pairs_from_the_same_weights_and_are_measured_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocabulary = tmp_path / "spiece.model"
    pairs, into, root = tmp_path / "pairs.jsonl", tmp_path / "result.json", tmp_path / "root"
    draw = random.Random(1)
    texts = [" ".join(draw.choices(("class", "def", "return", "None"), k=draw.randint(1, 12))) for _ in range(PAIRS)]
    lines = [json.dumps({"source": f"{number} {text}", "target": text[::2]}) for number, text in enumerate(texts)]
    pairs.write_text("\n".join(lines) + "\n", "utf-8")
    vocabulary.write_bytes(train(TokenizerSpec(vocab_size=40), lines))
    held_out = [tmp_path / f"{split}.jsonl" for split in ("validation", "test")]
    for file in held_out:
        file.write_text(f"{lines[0]}\n", "utf-8")
    # Held-out files of their own, so that all pairs are trained on: a step has each of them once.
    splits = {f"pairs.{file.stem}": json.dumps([str(file)]) for file in held_out}
    settings = SETTINGS | splits
    changes = [
        part for name, value in settings.items() for part in ("--set", f"{name}={value}".replace("False", "false"))
    ]
    command = ["finetune_base", str(pairs), "--tokenizer", str(vocabulary), "--root", str(root), *changes]
    command += ["--only", "ours,trainer", "--ours", "8", "--trainer", "12", "--steps", "1", "--into", str(into)]
    monkeypatch.setattr(sys, "argv", ["pair_training", *command])

    assert pair_training.main() == 0

    ours, trainer = map(PairRow.model_validate_json, (root / "pairs.jsonl").read_text("utf-8").splitlines())
    assert (ours.contender, trainer.contender) == ("ours", "trainer")
    assert len(ours.losses) == len(trainer.losses) == 6
    assert trainer.losses[0] == pytest.approx(ours.losses[0], rel=1e-5)
    assert trainer.losses[-1] < trainer.losses[0]
    assert trainer.real_tokens == pytest.approx(ours.real_tokens)
    assert trainer.pairs == ours.pairs == (PAIRS,)
    assert trainer.row_tokens[0] < ours.row_tokens[0], "the Trainer pads to the longest pair of a pass"
    assert (root / "losses.svg").read_text("utf-8").startswith("<?xml")

    monkeypatch.setattr(pair_training, "_measure", lambda *_: pytest.fail("measured again"))
    assert pair_training.main() == 0
    rows = Result.model_validate_json(into.read_text("utf-8")).rows
    assert rows[1]["ours relative to it"] == round(ours.rate / trainer.rate, 2)
